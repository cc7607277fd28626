"""Reading: what a file that somebody already has says about a run, and what of it was not understood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lumos.setup.messages import shown

Sections = dict[str, Any]

_LONGEST_NAME = 60
_MOST_NAMES = 40


class Mistake(NamedTuple):
    """What is wrong with a value, in the words of its file."""

    place: str  # in a setup: "parallel.tp"; who overrides it mends the mistake. "" where nothing does
    sentence: str


class Reading(NamedTuple):
    """Sections of a setup, unchecked. Notes and mistakes do not name the file; whoever opened it does."""

    sections: Sections
    notes: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    not_understood: tuple[str, ...] = ()  # keys or options that are neither used nor known to be of no concern

    def remarks(self, where: str) -> tuple[str, ...]:
        """What the user should know, with the name of the file; what was not understood is one remark."""
        last = (f"not understood, and left out: {listed(self.not_understood)}",) if self.not_understood else ()
        return tuple(f"{where}: {note}" for note in (*self.notes, *last))


class Findings:
    """What is collected while a file is read."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # "section.key" to value
        self.notes: list[str] = []
        self.mistakes: list[Mistake] = []

    def reading(self, not_understood: Iterable[str] = ()) -> Reading:
        """What was found, as sections."""
        sections: Sections = {}
        for place, value in self.values.items():
            section, _, key = place.partition(".")
            sections.setdefault(section, {})[key] = value
        return Reading(sections, tuple(self.notes), tuple(self.mistakes), tuple(not_understood))


def listed(names: Iterable[str]) -> str:
    """Names from a file that is not trusted, on one line of bounded length."""
    known = list(names)
    words = [name if name.isprintable() and 0 < len(name) <= _LONGEST_NAME else shown(name) for name in known]
    more = len(words) - _MOST_NAMES
    return ", ".join(words[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def flat(config: Mapping[str, Any], depth: int = 4) -> dict[str, Any]:
    """A table of tables as one of dotted names."""
    names: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and depth > 1:
            names |= {f"{key}.{inner}": deeper for inner, deeper in flat(value, depth - 1).items()}
        else:
            names[str(key)] = value
    return names
