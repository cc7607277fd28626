"""Scores as tables: predictions against measured runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group

from lumos.report.terminal.style import make_table, notes
from lumos.score.score import Score

_MOST_REASONS = 5


def show_score(found: Score, console: Console) -> None:
    """Errors by source, and what was refused."""
    show_score_answer(found.as_dict(), console)


def show_score_answer(answer: Mapping[str, Any], console: Console) -> None:
    """The same from plain values."""
    title = f"{answer['predicted']} of {answer['rows']} rows predicted"
    table = make_table(title, "source", "rows", "mean error, %", "median, %", "rank correlation")
    for name, part in [*answer["by_source"].items(), ("all", answer)]:
        cells = [part["mape"], part["median"], part["spearman"]]
        table.add_row(name, str(part["n"]), *("" if c is None else f"{c:.2f}" for c in cells))
    reasons: dict[str, int] = {}
    for row in answer["refused"]:
        reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    most = sorted(reasons.items(), key=lambda item: -item[1])[:_MOST_REASONS]
    inside = answer["inside_interval"]
    covered = [] if inside is None else [f"{100 * inside:.0f} % of the measured runs are inside their 80 % interval"]
    refusals = [_refusal(reason, count) for reason, count in most]
    console.print(Group(table, *notes([*covered, *refusals, *_rest(reasons), *answer.get("warnings", ())])))


def _refusal(reason: str, count: int) -> str:
    return f"{count} {'row' if count == 1 else 'rows'} refused: {reason}"


def _rest(reasons: dict[str, int]) -> list[str]:
    more = len(reasons) - _MOST_REASONS
    return [f"rows were refused for {more} more reasons; --json has them all"] if more > 0 else []
