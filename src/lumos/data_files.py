"""Tables of the package: fitted, measured and assumed numbers, GPUs, models, frameworks.

They are TOML and JSON files in `lumos/data`, so that a number has one place, with its source and date beside it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@cache
def read_table(name: str) -> dict[str, Any]:
    """The contents of one file of the package's data folder: `read_table("gpus.toml")["h200"]["memory_gib"]`.

    `name` is a path below `lumos/data` that ends in `.toml` or `.json`. A file is read once in a process, and all
    callers share what it returns: do not change it.
    """
    text = data_file(name).read_text("utf-8")
    if name.endswith(".json"):
        found: dict[str, Any] = json.loads(text)
        return found
    import tomllib  # here, because `lumos sample --script` also runs on Python 3.10, which has none

    return tomllib.loads(text)


def data_file(name: str) -> Traversable:
    """A file or folder of the package's data folder, for what is not a table: `data_file("costs/h200.npz")`."""
    return resources.files("lumos").joinpath("data", *name.split("/"))
