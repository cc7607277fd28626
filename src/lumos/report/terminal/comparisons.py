"""Comparisons as tables."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table

from lumos.analysis.comparison import Comparison, Difference
from lumos.report.terminal.style import make_table, notes
from lumos.report.wording import STEP_PARTS, ms_text

_MOST = 12

def show_comparison(found: Comparison, console: Console) -> None:
    """What makes the second run differ from the first."""
    before, after = found.before.recorded_steps.mean, found.after.recorded_steps.mean
    title = f"step, as recorded: {ms_text(before)}, then {ms_text(after)} ({ms_text(after - before, signed=True)})"
    tables = [_parts(title, found.parts), _rows("GPU time by operator", found.operators)]
    if found.collectives:
        tables.append(_rows("collectives, waiting and transfer", found.collectives))
    warnings = [*found.before.execution.warnings, *found.after.execution.warnings]
    console.print(Group(*tables, *notes(warnings)))


def _parts(title: str, parts: list[Difference]) -> Table:
    table = make_table(title, "", "before, ms", "after, ms", "change, ms")
    for part in parts:
        cells = (f"{part.before_ms:.2f}", f"{part.after_ms:.2f}", f"{part.change_ms:+.2f}")
        table.add_row(STEP_PARTS.get(part.name, part.name), *cells)
    return table


def _rows(title: str, parts: list[Difference]) -> Table:
    table = make_table(title, "", "before, ms", "calls", "after, ms", "calls", "change, ms")
    for part in parts[:_MOST]:
        table.add_row(
            part.name[:60], f"{part.before_ms:.3f}", f"{part.before_calls:.0f}", f"{part.after_ms:.3f}",
            f"{part.after_calls:.0f}", f"{part.change_ms:+.3f}",
        )  # fmt: skip
    return table
