"""Shard: which part of the work this run does, where several machines divide it without knowing of each other."""

from __future__ import annotations

import re
from hashlib import sha256

import orjson

from lumos.errors import OptionError

_MOST = 1 << 16


def fingerprint(*question: object) -> str:
    """A name for a question: parts of the same can be put together, and of two that differ there are two names."""
    return sha256(orjson.dumps(question, option=orjson.OPT_SORT_KEYS, default=repr)).hexdigest()[:32]


def read_shard(text: str) -> tuple[int, int]:
    """(index from 0, count) of "I/N", I from 1; all of it for ""."""
    if not text:
        return 0, 1
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None:
        raise OptionError(f"--shard {text[:40]!r}: write I/N, as in 3/8")
    index, count = int(found[1]), int(found[2])
    if not 1 <= index <= count <= _MOST:
        raise OptionError(f"--shard {text!r}: I goes from 1 to N, and N to {_MOST}")
    return index - 1, count
