"""The result of a search as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from lumos.report.terminal.style import make_table, notes
from lumos.report.wording import STEP_PARTS

Row = Mapping[str, Any]

_SHORT = {"sequence_parallel": "sp", "micro_batch": "mb", "microbatches": "n"}
_NUMBERS = {
    "step_ms": ("step, ms", "{:,.1f}", 1), "mfu": ("MFU, %", "{:.1f}", 100), "memory_gib": ("memory, GiB", "{:.1f}", 1),
    "joules_per_token": ("J/token", "{:.3g}", 1), "cost_per_mtoken": ("per Mtoken", "{:,.4g}", 1),
    "gpu_hours_per_mtoken": ("GPU-hours/Mtoken", "{:.4g}", 1), "days": ("days", "{:,.1f}", 1),
}  # fmt: skip
_OF_BEST = ("step_ms", "mfu", "memory_gib", "joules_per_token", "cost_per_mtoken", "days")
_MOST_ON_FRONT = 12


def show_search(answer: Mapping[str, Any], console: Console) -> None:
    """The best configurations, why the others lost, and the Pareto front."""
    results, front = answer["results"], answer["pareto"]
    parts = [_counts(answer)]
    if results:
        shown = front[:_MOST_ON_FRONT]
        cost = "gpu_hours_per_mtoken" if front[0]["cost_per_mtoken"] is None else "cost_per_mtoken"
        parts += [
            _configurations(f"the best by {answer['objective']}", results, _OF_BEST),
            _breakdowns(results[:5]),
            *([_lost(results)] if len(results) > 1 else []),
            _configurations("Pareto front of time, memory and cost", shown, ("step_ms", "memory_gib", cost)),
        ]
    console.print(Group(*parts, *notes([*_gap(answer), *answer["warnings"]])))


def _counts(answer: Mapping[str, Any]) -> Table:
    table = make_table("configurations", "", "")
    table.add_row("valid", f"{answer['evaluated']:,}")
    table.add_row("fit into memory", f"{answer['fitting']:,}")
    table.add_row("simulated (not ruled out by bounds)", f"{answer['simulated']:,}")
    table.add_row("seconds", f"{answer['seconds']:.1f}")
    return table


def _configurations(title: str, rows: Sequence[Row], numbers: Sequence[str]) -> Table:
    """Configurations with the setup keys that differ between them, or have a value other than 1, 0 or false."""
    keys = [key for key in rows[0] if "." in key]
    keys = [key for key in keys if len({row[key] for row in rows}) > 1 or rows[0][key] not in (1, False, 0)]
    columns = {key: _NUMBERS[key] for key in numbers if rows[0][key] is not None}
    names = [_SHORT.get(name, name) for name in (key.partition(".")[2] for key in keys)]
    table = make_table(title, "", *names, *(name for name, _, _ in columns.values()))
    for rank, row in enumerate(rows, 1):
        cells = [{True: "yes", False: "no"}[row[key]] if isinstance(row[key], bool) else str(row[key]) for key in keys]
        table.add_row(str(rank), *cells, *(form.format(scale * row[key]) for key, (_, form, scale) in columns.items()))
    return table


def _breakdowns(results: Sequence[Row]) -> Table:
    table = make_table("where the step goes, ms", "", *STEP_PARTS.values())
    for rank, row in enumerate(results, 1):
        table.add_row(str(rank), *(f"{row['breakdown'][part]:,.1f}" for part in STEP_PARTS))
    return table


def _lost(results: Sequence[Row]) -> Table:
    table = make_table("why the others lost", "", "by, %", "why")
    for rank, row in enumerate(results[1:5], 2):
        table.add_row(str(rank), f"{100 * (row['value'] / results[0]['value'] - 1):.2f}", row["lost_by"])
    return table


def _gap(answer: Mapping[str, Any]) -> list[str]:
    found = []
    if answer["results"] and answer["bound_ms"] and answer["objective"] == "time":
        best, bound, own = answer["results"][0]["step_ms"], answer["bound_ms"], answer["results"][0]["bound_ms"]
        found.append(
            f"no configuration that fits can take less than {bound:,.1f} ms; the best takes {best:,.1f} ms "
            f"(+{100 * (best / bound - 1):.1f} %), {100 * (best / own - 1):.1f} % more than its own lower bound"
        )
    more = len(answer["pareto"]) - _MOST_ON_FRONT
    return found + ([f"the front has {more} more configurations; --json lists all"] if more > 0 else [])
