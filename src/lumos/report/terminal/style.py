"""Style: what all tables look like on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from lumos.errors import printable
from lumos.report.table import Card, Column, Table, short

_TEXT = frozenset({"", "why", "mostly", "bound", "shape", "refused", "source", "evidence"})
_WIDEST = 70  # characters of a name
_LONGEST_WORD = 24  # that is kept in one piece
_GAP = 2  # between columns


def make_table(title: str, *columns: str) -> RichTable:
    """An empty table; the first column and those of words are flush left, numbers right."""
    table = RichTable(
        title=printable(title), title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False,
        caption_justify="left",
    )  # fmt: skip
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in _TEXT else "right", overflow="fold")
    return table


def rendered(found: Table, most: int = 16) -> FittingTable:
    """A table of a report; its first rows and its totals."""
    body = found.body()
    rows = [cells for row, cells in body if not row.is_total]
    shown = [*rows[:most], *(cells for row, cells in body if row.is_total)]
    texts = [[short(cell.text, _WIDEST) if i == 0 else cell.text for i, cell in enumerate(cells)] for cells in shown]
    left_out = found.left_out if len(rows) <= most else f"the first {most} of {len(rows)}; --json has more"
    return FittingTable(found.caption, found.columns, texts, left_out)


class FittingTable:
    """A table for terminals of any width: no word and no number is broken.

    Columns that do not fit beside the others stand below them, in a table of their own that repeats the first column.
    """

    def __init__(self, caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], left_out: str) -> None:
        self._caption, self._columns, self._rows, self._left_out = caption, columns, rows, left_out
        self._natural = [max(map(cell_len, self._texts(index))) for index in range(len(columns))]
        self._least = [min(self._least_width(index), self._natural[index]) for index in range(len(columns))]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(printable(self._caption), style="bold")
        for chosen in self._parts(options.max_width):
            yield self._part(chosen, self._widths(chosen, options.max_width))
        if self._left_out:
            yield Text(self._left_out, style="dim italic")

    def _parts(self, width: int) -> list[list[int]]:
        """The columns of every part."""
        parts: list[list[int]] = [[0]]
        used = self._least[0]
        for index in range(1, len(self._columns)):
            used += _GAP + self._least[index]
            if used > width and len(parts[-1]) > 1:
                parts.append([0])
                used = self._least[0] + _GAP + self._least[index]
            parts[-1].append(index)
        return parts

    def _widths(self, chosen: Sequence[int], width: int) -> list[int]:
        """Of the columns of a part: as wide as their texts, or narrower where words can go to the next line."""
        widths = [self._natural[index] for index in chosen]
        while sum(widths) + _GAP * (len(chosen) - 1) > width:
            slack = [have - self._least[index] for have, index in zip(widths, chosen, strict=True)]
            if max(slack) == 0:
                break
            widths[slack.index(max(slack))] -= 1
        return widths

    def _part(self, chosen: Sequence[int], widths: Sequence[int]) -> RichTable:
        table = make_table("")
        table.title = None
        for index, width in zip(chosen, widths, strict=True):
            column = self._columns[index]
            justify: Literal["left", "right"] = "right" if column.is_number else "left"
            table.add_column(column.title, justify=justify, overflow="fold", width=width)
        for row in self._rows:
            table.add_row(*(Text(row[index]) for index in chosen))
        return table

    def _least_width(self, index: int) -> int:
        """Of a column: its longest word, or number, up to a limit."""
        title, *cells = self._texts(index)
        words = [*title.split(), *(cells if self._columns[index].is_number else " ".join(cells).split())]
        return min(max(map(cell_len, words), default=1), _LONGEST_WORD)

    def _texts(self, index: int) -> list[str]:
        """What stands in a column, its title first."""
        return [self._columns[index].title, *(row[index] for row in self._rows)]


def summary(title: str, cards: Sequence[Card]) -> RichTable:
    """The numbers that matter, one a line."""
    table = make_table(title, "", "", "")
    table.show_header = False
    for card in cards:
        table.add_row(*map(printable, card))
    return table


def notes(warnings: Iterable[str]) -> list[Text]:
    """What the reader should know besides."""
    return [Text(f"note: {printable(warning)}", style="yellow") for warning in warnings]
