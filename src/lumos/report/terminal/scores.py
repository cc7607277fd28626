"""Scores as tables: predictions against measured runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group

from lumos.report.terminal.style import make_table, notes

_MOST_REASONS = 5


def show_score(answer: Mapping[str, Any], console: Console) -> None:
    """Errors by source, and what was refused."""
    title = f"{answer['predicted']} of {answer['rows']} rows predicted"
    table = make_table(title, "source", "rows", "mean error, %", "median, %", "rank correlation")
    for name, part in [*answer["by_source"].items(), ("all", answer)]:
        cells = [part["mape"], part["median"], part["spearman"]]
        table.add_row(name, str(part["n"]), *("" if c is None else f"{c:.2f}" for c in cells))
    reasons = Counter(row["reason"] for row in answer["refused"])
    inside, more = answer["inside_interval"], len(reasons) - _MOST_REASONS
    remarks = [] if inside is None else [f"{100 * inside:.0f} % of the measured runs are inside their 80 % interval"]
    for reason, count in reasons.most_common(_MOST_REASONS):
        remarks.append(f"{count} {'row' if count == 1 else 'rows'} refused: {reason}")
    if more > 0:
        remarks.append(f"rows were refused for {more} more reasons; --json has them all")
    console.print(Group(table, *notes([*remarks, *answer.get("warnings", ())])))
