"""Style: what all tables look like."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

_TEXT = frozenset({"", "why", "mostly", "predicted", "as recorded", "bound", "shape", "refused", "source", "evidence"})


def make_table(title: str, *columns: str) -> Table:
    """An empty table; the first column and those of words are flush left, numbers right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in _TEXT else "right", overflow="fold")
    return table


def notes(warnings: Iterable[str]) -> list[Text]:
    """What the reader should know besides."""
    return [Text(f"note: {warning}", style="yellow") for warning in warnings]
