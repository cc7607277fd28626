"""The options in a shell script, read as text: variables are put in where they stand, and nothing is ever run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lumos.errors import InputError

_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_CONTINUED = re.compile(r"\\\r?\n")
_BEFORE_NAME = r"^[ \t]*(?:(?:export|local|readonly)[ \t]+)?"
_ASSIGNMENT = re.compile(_BEFORE_NAME + r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;("']*)""", re.MULTILINE)
_ASSIGNED_TO = re.compile(_BEFORE_NAME + r"[A-Za-z_]\w*\+?=\(?", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_PRODUCT = re.compile(r"\$\(\(([\w\s*]{1,200})\)\)")
_OPTION = re.compile(r"--([A-Za-z0-9][\w.\-]{0,100})(?:=(.*))?", re.ASCII | re.DOTALL)
_WHOLE = re.compile(r"\d{1,12}")
_LONGEST = 4 << 20  # characters, after variables are put in: a few lines can double each other many times
_LONGEST_VARIABLE = 1 << 16


def options_in(text: str, where: str) -> dict[str, list[str]]:
    """--name and the words after it, the last mention of a name counting. Underscores in names become dashes."""
    plain = _CONTINUED.sub(" ", _COMMENT.sub(r"\1", text))
    plain = _filled_in(plain, _variables(plain, where), _LONGEST, where)
    words = re.sub(r"[\"']", " ", _ASSIGNED_TO.sub("", plain)).split()
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        word = word.rstrip(";,") if "(" in word else word.rstrip(";,)")
        option = _OPTION.fullmatch(word)
        if option:
            values = [option[2]] if option[2] else []
            options[option[1].replace("_", "-")] = values
        elif word:
            values.append(word)
    return options


def _variables(text: str, where: str) -> dict[str, str]:
    """NAME=value, in the order of the file: each may use those before it."""
    known: dict[str, str] = {}
    for match in _ASSIGNMENT.finditer(text):
        known[match[1]] = _filled_in(match[2].strip("\"'"), known, _LONGEST_VARIABLE, where)
    return known


def _filled_in(text: str, variables: Mapping[str, str], longest: int, where: str) -> str:
    """The text with variables, their defaults and products of whole numbers put in. What is not known stays."""
    length = len(text)

    def value(match: re.Match[str]) -> str:
        nonlocal length
        name, default = match[1] or match[3], match[2]
        found = variables.get(name, match[0] if default is None else default)
        length += len(found)
        if length > longest:
            raise InputError(f"{where}: its variables grow beyond {longest >> 10} KiB")
        return found

    def product(match: re.Match[str]) -> str:
        factors = [variables.get(factor.strip(), factor.strip()) for factor in match[1].split("*")]
        if not all(_WHOLE.fullmatch(factor) for factor in factors):
            return match[0]
        return str(math.prod(int(factor) for factor in factors))

    return _PRODUCT.sub(product, _VARIABLE.sub(value, text))
