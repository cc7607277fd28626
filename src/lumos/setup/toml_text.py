"""TOML of the user as tables, in time that grows with its length alone."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MOST_PARTS = 100  # of a dotted key
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:{_PART}\.[ \t]*+){{{_MOST_PARTS}}}")


def toml_table(text: str) -> dict[str, Any]:
    """What TOML holds; ValueError or RecursionError where it is none, or where a key is nested without end."""
    if _DEEP_KEY.search(text):  # tomllib takes the square of the number of parts
        raise ValueError(f"a key of more than {_MOST_PARTS} parts")
    return tomllib.loads(text)
