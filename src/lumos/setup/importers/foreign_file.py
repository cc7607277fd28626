"""Files of other tools: their text, and what an importer read from it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lumos.errors import InputError
from lumos.setup.messages import listed, place_of

Sections = dict[str, Any]

_LARGEST = 4 << 20  # bytes; a description of a run is a few kilobytes


class Mistake(NamedTuple):
    """A wrong value, in the words of its file."""

    place: str  # the key of a setup that overrides it, as in "parallel.tp"; "" where none does
    sentence: str


class Reading(NamedTuple):
    """Sections of a setup, unchecked. Notes and mistakes do not name the file."""

    sections: Sections
    notes: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    not_recognised: tuple[str, ...] = ()  # keys or options that are neither used nor known to be irrelevant
    model_names: tuple[str, ...] = ()  # names that may state the size of the model, the most reliable first

    def remarks(self, where: str) -> tuple[str, ...]:
        """The notes with the name of the file; keys that were not recognised are one note."""
        last = (f"not recognised and ignored: {listed(self.not_recognised)}",) if self.not_recognised else ()
        return tuple(f"{where}: {note}" for note in (*self.notes, *last))


class Findings:
    """Collects values, notes and mistakes while a file is read."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # by "section.key"
        self.notes: list[str] = []
        self.mistakes: list[Mistake] = []

    def mistake(self, place: str, sentence: str) -> None:
        """Note a mistake, once."""
        if Mistake(place, sentence) not in self.mistakes:
            self.mistakes.append(Mistake(place, sentence))

    def reading(self, not_recognised: Iterable[str] = ()) -> Reading:
        """Everything found, as sections of a setup."""
        sections: Sections = {}
        for place, value in self.values.items():
            section, _, key = place.partition(".")
            sections.setdefault(section, {})[key] = value
        return Reading(sections, tuple(self.notes), tuple(self.mistakes), tuple(not_recognised))


def is_ignored(name: str, table: Mapping[str, list[str]]) -> bool:
    """Whether a table of names, prefixes and suffixes says that a key does not matter."""
    prefixes, suffixes = tuple(table["prefixes"]), tuple(table.get("suffixes", ()))
    return name in table["names"] or name.startswith(prefixes) or name.endswith(suffixes)


def flat(config: Mapping[str, Any], depth: int = 4) -> dict[str, Any]:
    """A table of tables as one with dotted names: {"a": {"b": 1}} is {"a.b": 1}."""
    names: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and depth > 1:
            names |= {f"{key}.{inner}": deeper for inner, deeper in flat(value, depth - 1).items()}
        else:
            names[str(key)] = value
    return names


def text_of(path: Path, largest: int = _LARGEST) -> str:
    """The text of a file of at most this many bytes, or InputError."""
    text, complete = beginning_of(path, largest)
    if not complete:
        raise InputError(f"{place_of(path)}: larger than {largest >> 20} MiB, too large for a file of this type")
    return text


def beginning_of(path: Path, largest: int = _LARGEST) -> tuple[str, bool]:
    """The first bytes of a file as text, and whether they are all of it."""
    where = place_of(path)
    try:
        if not path.is_file():
            what = "is a folder: name a file in it" if path.is_dir() else "does not exist"
            raise InputError(f"{where}: {what}")
        with path.open("rb") as file:
            content = file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    complete = len(content) <= largest
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(content[:largest], final=complete), complete
    except UnicodeDecodeError:
        raise InputError(f"{where}: not a text file in UTF-8") from None
