"""The frameworks that Lumos tells apart, by name."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

_WITHOUT_FILE = (
    *("pytorch", "megatron", "megatron-2021", "megatron-deepspeed"),
    *("llm-foundry", "nanotron", "neox", "torchtitan"),
)


@cache
def framework_names() -> tuple[str, ...]:
    """The tables of `data/frameworks.toml`, where the package has it."""
    try:
        text = resources.files("lumos").joinpath("data/frameworks.toml").read_text("utf-8")
    except OSError:
        return _WITHOUT_FILE
    return tuple(name for name, table in tomllib.loads(text).items() if isinstance(table, dict)) or _WITHOUT_FILE
