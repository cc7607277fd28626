"""Patterns: regular expressions that users type, matched in a time that is linear in the names.

Python's own engine backtracks: `(a+)+b` would take centuries on a kernel of forty a's. That of polars never does; it
knows neither look-around nor references to groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lumos.errors import OptionError

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True)
class Pattern:
    """A regular expression that is known to be one, with its number of groups."""

    text: str
    groups: int

    @staticmethod
    def parse(text: str, place: str) -> Pattern:
        """The pattern; OptionError, which begins with `place`, for what is none."""
        import polars  # here: most commands are given no pattern

        text = text.encode(errors="replace").decode()
        try:
            found = polars.Series([""]).str.extract_groups(text)
            polars.Series([""]).str.contains(text)  # a pattern without groups was not looked at yet
        except polars.exceptions.PolarsError as problem:
            lines = str(problem).splitlines()
            reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
            raise OptionError(f"{place}: {text[:80]!r} is not a regular expression ({reason})") from None
        return Pattern(text, len(found.struct.fields))

    def is_in(self, names: Sequence[str]) -> np.ndarray:
        """Which names it is found in."""
        return _series(names).str.contains(self.text).to_numpy().astype(bool)

    def first_group(self, name: str) -> str:
        """What its first group matches in a name; '' where it is not found."""
        return _series([name]).str.extract(self.text, 1).item() or ""


def _series(names: Sequence[str]) -> polars.Series:
    """Names as polars has them: half a character, which some files have, is a question mark."""
    import polars

    return polars.Series([name.encode(errors="replace").decode() for name in names], dtype=polars.String)
