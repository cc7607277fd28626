"""Files of keys and values in YAML or JSON: read as plain data, their keys as dotted names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lumos.setup.importers.foreign_file import Findings, flat
from lumos.setup.messages import one_of, shown

_LARGEST_YAML = 1 << 18  # characters
_DEEPEST_YAML = 50
_MOST_ALIASES = 16  # tables that are used again and again grow beyond any memory
_LARGEST = 1 << 40
_UNSET = (None, "", "auto", "None")
_INTEGER = re.compile(r"[-+]?\d(?:_?\d){0,17}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\d{1,18}\.?\d{0,18}|\.\d{1,18})([eE][-+]?\d{1,3})?", re.ASCII)
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "~": None, "": None}


def table_in_yaml(text: str) -> dict[str, Any] | None:
    """The table in a YAML text; None where it is none, is not YAML, or has more nesting or aliases than is safe."""
    import yaml  # here, because most setups are TOML and a cold start counts

    if len(text) > _LARGEST_YAML:
        return None
    loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # plain text, lists and tables: no types, no objects
    depth = aliases = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            if depth > _DEEPEST_YAML or aliases > _MOST_ALIASES:
                return None
        content = _typed(yaml.load(text, Loader=loader))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _typed(value: Any) -> Any:
    """Words as truth values, numbers or themselves."""
    if isinstance(value, dict):
        return {str(key): _typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if value.casefold() in _WORDS:
        return _WORDS[value.casefold()]
    if _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if _FLOAT.fullmatch(value) else value


class Keys:
    """The keys of a file as dotted names. It remembers which were read, so that the others can be listed.

    >>> keys = Keys({"parallelism": {"tp": 8}}, found)
    >>> keys.put_number("parallel.tp", "parallelism.tp")
    8
    """

    def __init__(self, table: Mapping[str, Any], found: Findings) -> None:
        self._given = {key: value for key, value in flat(table, 8).items() if value not in _UNSET}
        self._read: set[str] = set()
        self._found = found

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of these names that is given, with its value; the first name and None where none is."""
        self._read.update(names)
        return next(((name, self._given[name]) for name in names if name in self._given), (names[0], None))

    def number(self, place: str, *names: str, least: int = 1) -> int | None:
        """A whole number, or None; a wrong value is a mistake about this key of a setup."""
        name, value = self.first(*names)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (type(value) is int and least <= value <= _LARGEST):
            return value
        way_out = f"correct it, or --set {place}=NUMBER" if "." in place else "correct it"
        wrong = f"{name} = {shown(value)} is not a whole number of {least} or more"
        unset = "a value that only the tool fills in: " if isinstance(value, str) and "$" in value else ""
        self._found.mistake(place if "." in place else "", f"{wrong}: {unset}{way_out}")
        return None

    def put_number(self, place: str, *names: str, least: int = 1) -> int | None:
        """Set a key of a setup to the number under one of these names, if there is one."""
        value = self.number(place, *names, least=least)
        if value is not None:
            self._found.values[place] = value
        return value

    def is_on(self, *names: str) -> bool | None:
        """A switch, or None where it is not given; anything but true and false is a mistake."""
        name, value = self.first(*names)
        if value is None or isinstance(value, bool):
            return value
        self._found.mistake("", f"{name} = {shown(value)} is neither true nor false")
        return None

    def word(self, *names: str) -> str:
        """A value as text, in lower case; "" where it is not given."""
        value = self.first(*names)[1]
        return "" if value is None or isinstance(value, dict | list) else str(value).casefold()

    def put_choice(self, place: str, meanings: Mapping[str, Any], *names: str, otherwise: str = "") -> None:
        """Set a key of a setup by the word under one of these names; a word that is not known is noted.

        `otherwise` is what a setup then assumes, for the note.
        """
        name, value = self.first(*names)
        if value is None:
            return
        word = str(value).casefold() if not isinstance(value, dict | list) else ""
        if word in meanings:
            self._found.values[place] = meanings[word]
        else:
            known = one_of(list(meanings))
            assumed = f"assuming {otherwise}; " if otherwise else ""
            self._found.note(f"{name} = {shown(value)} is not known: {assumed}use {known}, or --set {place}", place)

    def switched_on(self, prefixes: Iterable[str]) -> list[str]:
        """The keys that begin with one of these and are not false or 0."""
        return [key for key, value in self._given.items() if value and key.startswith(tuple(prefixes))]

    def unread(self, ignored: Iterable[str]) -> list[str]:
        """The keys that were not read and do not begin with one of these."""
        prefixes = tuple(ignored)
        return [key for key in self._given if key not in self._read and not key.startswith(prefixes)]
