"""Wording: how a mistake is put, so that it names the value, the place and the way out."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

_LONGEST_VALUE = 60
_LONGEST_NUMBER = 64  # bits
_FEW_NAMES = 30
_MANY_DIVISORS = 10
_USUAL_WAYS = 64


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, or ""."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    found = difflib.get_close_matches(name[:100].casefold(), by_folded, n=1, cutoff=0.5)
    return by_folded[found[0]] if found else ""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A question with the nearest name, or all the names where none is near."""
    guess = nearest(name, known)
    if guess:
        return f"did you mean {guess}?"
    return f"use {one_of(known)}" if len(known) <= _FEW_NAMES else f"use one of {', '.join(known[:_FEW_NAMES])}, ..."


def one_of(names: Sequence[object]) -> str:
    """a, b or c."""
    words = [str(name) for name in names]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def divisors_of(number: int) -> str:
    """The numbers that divide it, as a choice; of many, those that a tensor-parallel size may have."""
    lower = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*lower, *(number // n for n in lower)})
    return one_of(divisors if len(divisors) <= _MANY_DIVISORS else [n for n in divisors if n <= _USUAL_WAYS])


def shown(value: object) -> str:
    """A value as its user wrote it, shortened. Containers may be deep and numbers endless: those are only named."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=not value.isprintable()) if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def named(key: str) -> str:
    """A key as it stands, or in quotes where it is no plain word."""
    return key if key.isidentifier() and len(key) <= _LONGEST_VALUE else shown(key)


def mistakes_of(error: ValidationError, section: str, known: Sequence[str]) -> dict[str, str]:
    """What pydantic found, one line a key of the section: key to sentence."""
    found: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_context=True):
        key = str(detail["loc"][0]) if detail["loc"] else ""
        found.setdefault(key, _sentence(f"{section}.{named(key)}", key, detail, known))
    return found


def _sentence(place: str, key: str, detail: Any, known: Sequence[str]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return f"{place} is missing: set it in [{place.partition('.')[0]}] or with --set {place}=VALUE"
    if kind == "extra_forbidden":
        return f"{place} is not known: {did_you_mean(key, known)}"
    stated = f"{place} = {shown(detail['input'])}"
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in str(context["expected"]).replace(" or ", ", ").split(", ")]
        return f"{stated} is not known: use {one_of([choice or repr('') for choice in choices])}"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{stated} is out of range: it must be {words} {context[name]}"
    return f"{stated} is of the wrong kind: {_WANTED.get(kind, detail['msg'].lower())}"


_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}
_WANTED = {
    "int_type": "give a whole number",
    "float_type": "give a number",
    "finite_number": "give a finite number",
    "bool_type": "give true or false",
    "string_type": 'give a name in quotes, as in "h200"',
    "tuple_type": "give a list of whole numbers, as in [8, 8]",
}
