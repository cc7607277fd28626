"""Style: what all tables look like on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table as RichTable
from rich.text import Text

from lumos.errors import printable
from lumos.report.table import Card, Table, short

_TEXT = frozenset({"", "why", "mostly", "bound", "shape", "refused", "source", "evidence"})
_WIDEST = 70  # characters of a name


def make_table(title: str, *columns: str) -> RichTable:
    """An empty table; the first column and those of words are flush left, numbers right."""
    table = RichTable(
        title=printable(title), title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False,
        caption_justify="left",
    )  # fmt: skip
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in _TEXT else "right", overflow="fold")
    return table


def rendered(found: Table, most: int = 16) -> RichTable:
    """A table of a report; its first rows and its totals."""
    table = make_table(found.caption)
    for column in found.columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", overflow="fold")
    body = found.body()
    rows = [cells for row, cells in body if not row.is_total]
    for cells in [*rows[:most], *(cells for row, cells in body if row.is_total)]:
        table.add_row(*(Text(short(cell.text, _WIDEST) if i == 0 else cell.text) for i, cell in enumerate(cells)))
    table.caption = found.left_out if len(rows) <= most else f"the first {most} of {len(rows)}; --json has more"
    return table


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
