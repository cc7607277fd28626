"""Whole-number arithmetic as a shell has it in $(( )), for scripts that are read and never run."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TOKEN = re.compile(r"\s*(?:(\d{1,15})|([A-Za-z_]\w*)|([-+*/%()]))", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,15}", re.ASCII)
_LARGEST = 1 << 62


def worth(text: str, variables: Mapping[str, str]) -> int | None:
    """The value of an expression of numbers, names, + - * / % and brackets; None where it has none."""
    tokens: list[str] = []
    at = 0
    text = text.strip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        word = variables.get(token[2], "") if token[2] else token[1] or token[3]
        if token[2] and not _WHOLE.fullmatch(word):
            return None
        tokens.append(word)
        at = token.end()
    try:
        value = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if not tokens and abs(value) < _LARGEST else None


def _sum(tokens: list[str]) -> int:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        value = value + _product(tokens) if tokens.pop(0) == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> int:
    value = _factor(tokens)
    while tokens and tokens[0] in "*/%":
        how, other = tokens.pop(0), _factor(tokens)
        value = value * other if how == "*" else value // other if how == "/" else value % other
    return value


def _factor(tokens: list[str]) -> int:
    token = tokens.pop(0)
    if token == "(":
        value = _sum(tokens)
        if tokens.pop(0) != ")":
            raise ValueError(token)
        return value
    return -_factor(tokens) if token == "-" else int(token)
