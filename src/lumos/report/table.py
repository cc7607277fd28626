"""Table and Card: what is shown of an answer, on a terminal, on a page and in a notebook alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import NamedTuple

from lumos.errors import printable
from lumos.report.wording import ms_text, number_text

Value = str | float | int | bool | None

BEST = "*"  # before the best value of a column
_LONG_MS = 1e5
LONGEST = 160  # characters of a name that are shown; kernels of C++ templates have thousands
PROSE = 800  # of a text of ours


class Card(NamedTuple):
    """One number that matters, and what to know about it."""

    label: str
    value: str
    note: str = ""


class Column(NamedTuple):
    """A heading; numbers stand right with so many digits, `bar` draws their share of the largest one beside them."""

    title: str
    digits: int = -1  # -1: text
    bar: bool = False
    signed: bool = False
    form: Callable[[float], str] | None = None  # how a number is written, where digits do not say it
    longest: int = LONGEST  # characters of a text

    @property
    def is_number(self) -> bool:
        return self.digits >= 0 or self.form is not None


class Cell(NamedTuple):
    """What is shown, what it is sorted by, and the length of its bar in percent (-1: none)."""

    text: str
    sort: str
    bar: float = -1.0


@dataclass(frozen=True)
class Row:
    """The values of a row, and by what the page's filters find it; '' is found by any."""

    values: Sequence[Value]
    rank: str = ""
    kind: str = ""
    is_total: bool = False
    best: Collection[int] = ()  # columns in which no other row is better


@dataclass(frozen=True)
class Table:
    """A caption, headings and rows, as the template prints them."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    left_out: str = ""  # what is not shown of it

    def body(self) -> list[tuple[Row, list[Cell]]]:
        """Every row with its cells."""
        largest = [self._largest_of(index) if column.bar else 0.0 for index, column in enumerate(self.columns)]
        return [(row, self._cells(row, largest)) for row in self.rows]

    def _cells(self, row: Row, largest: Sequence[float]) -> list[Cell]:
        if row.is_total:  # its bar would be longer than its cell
            largest = [0.0] * len(largest)
        cells = [_cell(*parts) for parts in zip(row.values, self.columns, largest, strict=True)]
        return [c._replace(text=f"{BEST} {c.text}") if i in row.best else c for i, c in enumerate(cells)]

    def _largest_of(self, index: int) -> float:
        values = (row.values[index] for row in self.rows if not row.is_total)
        return max((abs(float(v)) for v in values if isinstance(v, int | float)), default=0.0)


def ms_columns(titles: Iterable[str], rows: Iterable[Row]) -> list[Column]:
    """Columns of milliseconds, all with the digits that the largest number of the rows needs.

    Where that has minutes, every time is written with its own unit.
    """
    values = [value for row in rows for value in row.values if isinstance(value, float)]
    return [ms_column(title, values) for title in titles]


def ms_column(title: str, values: Iterable[float]) -> Column:
    """A column of milliseconds, `values`, whose title ends in ms; of times with their units if some are long."""
    values, signed = list(values), title.startswith("change")
    if max((abs(value) for value in values if isfinite(value)), default=0.0) < _LONG_MS:
        return Column(title, ms_digits(values), signed=signed)
    bare = title.removesuffix("ms").rstrip(", ") or "time"
    return Column(bare, form=partial(ms_text, signed=signed))


def left_out(shown: int, rows: Sequence[object]) -> str:
    """What a table says below if it has only the first of many rows."""
    return f"the first {shown:,} of {len(rows):,}; --json has more" if len(rows) > shown else ""


def ms_digits(values: Iterable[float]) -> int:
    """Digits after the point that a column of milliseconds needs: about four that count in its largest value."""
    largest = max((abs(value) for value in values), default=0.0)
    return 1 if largest >= 1000 else 2 if largest >= 100 else 3


def short(name: str, longest: int = LONGEST) -> str:
    """A name of bounded length, with what does not print as a space."""
    clean = printable(name[: longest + 1]).replace("\n", " ")
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def _cell(value: Value, column: Column, largest: float) -> Cell:
    if value is None:
        return Cell("–", "")
    if isinstance(value, str) or not column.is_number:
        return Cell(short(str(value), column.longest), str(value)[:LONGEST])
    number = float(value)
    if not isfinite(number):
        return Cell("–", "")
    text = column.form(number) if column.form is not None else number_text(number, column.digits, column.signed)
    return Cell(text, repr(number), 100 * abs(number) / largest if largest > 0 else -1.0)
