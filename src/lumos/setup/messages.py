"""Messages about mistakes in a setup: each names the value, the place and the way out, on one line."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

_LONGEST_VALUE = 60
_LONGEST_NUMBER = 64  # bits
_FEW_NAMES = 30
_MOST_NAMES = 40
_MANY_DIVISORS = 10
_LARGEST_SUGGESTED = 64  # of many divisors
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}
_CALLED_ELSEWHERE = {  # what other tools call it, which is spelt like something else here
    "sp": "sequence_parallel", "virtual_stages": "vpp",
    "batch_size": "micro_batch", "micro_batch_size": "micro_batch", "local_batch_size": "micro_batch",
    "global_batch_size": "global_batch", "gradient_accumulation_steps": "microbatches", "seq_length": "seq",
    "max_seq_len": "seq", "dtype": "precision", "activation_checkpointing": "recompute", "fsdp": "zero",
    "world_size": "gpus", "num_gpus": "gpus", "nodes": "gpus", "matmul": "gemm", "mm": "gemm", "linear": "gemm",
    "attention": "sdpa_fwd", "flash_attention": "sdpa_fwd",
}  # fmt: skip
_WANTED = {
    "int_type": "give a whole number",
    "float_type": "give a number",
    "finite_number": "give a finite number",
    "bool_type": "give true or false",
    "string_type": 'give a name in quotes, as in "h200"',
    "tuple_type": "give a list in brackets",
}


def size_text(count: float) -> str:
    """A number of parameters, as in 30.5 B; with three digits and never an exponent."""
    units = ((999.5e9, 1e12, "T"), (1e8, 1e9, "B"), (0.0, 1e6, "M"))
    unit, name = next((unit, name) for least, unit, name in units if count >= least)
    return f"{count / unit:.3g} {name}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The known name that was probably meant, or ""; `cutoff` is how much of it must be alike."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    elsewhere = _CALLED_ELSEWHERE.get(name[:100].casefold(), "")
    if elsewhere in by_folded:
        return by_folded[elsewhere]
    found = difflib.get_close_matches(name[:100].casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else ""


def did_you_mean(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """A question with the nearest name, or the names to choose from where none is near."""
    guess = nearest(name, known, cutoff)
    if guess:
        return f"did you mean {guess}?"
    return f"use {one_of(known)}" if len(known) <= _FEW_NAMES else f"use one of {', '.join(known[:_FEW_NAMES])}, ..."


def one_of(names: Sequence[object]) -> str:
    """A choice in words: a, b or c."""
    words = [str(name) for name in names]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def listed(names: Iterable[str]) -> str:
    """Names from an untrusted file, on one line of bounded length."""
    words = [name if name.isprintable() and 0 < len(name) <= _LONGEST_VALUE else shown(name) for name in names]
    more = len(words) - _MOST_NAMES
    return ", ".join(words[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def divisors_of(number: int) -> str:
    """The divisors of a number as a choice; where there are many, only the small ones."""
    lower = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*lower, *(number // n for n in lower)})
    return one_of(divisors if len(divisors) <= _MANY_DIVISORS else [n for n in divisors if n <= _LARGEST_SUGGESTED])


def shown(value: object) -> str:
    """A value as its user wrote it, shortened. Tables, lists and huge numbers are described by their size."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=not value.isprintable()) if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def named(key: str) -> str:
    """A key as it is, or in quotes where it is not a plain word."""
    return key if key.isidentifier() and len(key) <= _LONGEST_VALUE else shown(key)


def place_of(path: Path) -> str:
    """A path on one line, whatever characters its name has."""
    return str(path) if str(path).isprintable() else repr(str(path))


def mistakes_of(error: ValidationError, section: str, known: Sequence[str]) -> dict[str, str]:
    """What pydantic found in a section: one line for each wrong key."""
    found: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_context=True):
        key = str(detail["loc"][0]) if detail["loc"] else ""
        found.setdefault(key, _sentence(f"{section}.{named(key)}", key, detail, known))
    return found


def mistakes_of_sections(error: ValidationError, sections: Mapping[str, type[BaseModel]]) -> list[str]:
    """What pydantic found in sections that were given together: one line for each wrong section or key."""
    found: dict[tuple[str, ...], str] = {}
    for detail in error.errors(include_url=False, include_context=True):
        name, *keys = (str(part) for part in detail["loc"])
        if name in sections and keys:
            place = f"{name}.{named(keys[0])}"
            found.setdefault((name, keys[0]), _sentence(place, keys[0], detail, list(sections[name].model_fields)))
        elif name not in sections:
            found[name,] = f"{named(name)} is not a section: {did_you_mean(name, list(sections))}"
        elif detail["type"] == "missing":
            found[name,] = f"the section {name} is missing"
        else:
            found[name,] = f"{name} = {shown(detail['input'])} is not a section: give a table of its keys"
    return list(found.values())


def _sentence(place: str, key: str, detail: Any, known: Sequence[str]) -> str:
    error, context = detail["type"], detail.get("ctx", {})
    if error == "missing":
        return f"{place} is missing: set it in [{place.partition('.')[0]}] or with --set {place}=VALUE"
    if error == "extra_forbidden":
        return f"{place} is not known: {did_you_mean(key, known)}"
    stated = f"{place} = {shown(detail['input'])}"
    if error == "literal_error":
        choices = [choice.strip("'") for choice in str(context["expected"]).replace(" or ", ", ").split(", ")]
        return f"{stated} is not known: use {one_of([choice for choice in choices if choice])}"
    if error in _BOUNDS:
        words, name = _BOUNDS[error]
        return f"{stated} is out of range: it must be {words} {context[name]}"
    return f"{stated} has the wrong type: {_WANTED.get(error, detail['msg'].lower())}"
