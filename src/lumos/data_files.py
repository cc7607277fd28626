"""Tables of the package: fitted, measured and assumed numbers, GPUs, models, frameworks.

They are TOML and JSON files in `lumos/data`, so that a number has one place, with its source and date beside it.
"""

import json
import tomllib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any


@cache
def read_table(name: str) -> dict[str, Any]:
    """The contents of one file of the package's data folder: `read_table("gpus.toml")["h200"]["memory_gib"]`.

    `name` is a path below `lumos/data` that ends in `.toml` or `.json`. A file is read once in a process, and all
    callers share what it returns: do not change it.
    """
    text = data_file(name).read_text("utf-8")
    return tomllib.loads(text) if name.endswith(".toml") else json.loads(text)


def data_file(name: str) -> Traversable:
    """A file or folder of the package's data folder, for what is not a table: `data_file("costs/h200.npz")`."""
    return resources.files("lumos").joinpath("data", *name.split("/"))
