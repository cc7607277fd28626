"""The result of a search as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from lumos.report.terminal.style import make_table, notes

Row = Mapping[str, Any]

_SHORT = {"sequence_parallel": "sp", "micro_batch": "mb", "microbatches": "n"}
_PARTS = ("exposed_compute_ms", "overlapped_ms", "exposed_comm_ms", "other_ms")
_MOST_ON_FRONT = 12


def show_search(answer: Mapping[str, Any], console: Console) -> None:
    """The best configurations, why the others lost, and the Pareto front."""
    results: Sequence[Row] = answer["results"]
    parts: list[RenderableType] = []
    if results:
        parts = [_best(answer), _breakdowns(results), *_lost(results), _front(answer["pareto"])]
    console.print(Group(_counts(answer), *parts, *notes([*_gap(answer), *answer["warnings"]])))


def _counts(answer: Mapping[str, Any]) -> Table:
    table = make_table("configurations", "", "")
    table.add_row("valid", f"{answer['evaluated']:,}")
    table.add_row("fit into memory", f"{answer['fitting']:,}")
    table.add_row("simulated (not ruled out by bounds)", f"{answer['simulated']:,}")
    table.add_row("seconds", f"{answer['seconds']:.1f}")
    return table


def _keys(rows: Sequence[Row]) -> list[str]:
    """The setup keys that differ between rows or have a value other than 1, 0 or false."""
    keys = [key for key in rows[0] if "." in key]
    return [key for key in keys if len({row[key] for row in rows}) > 1 or rows[0][key] not in (1, False, 0)]


def _name(key: str) -> str:
    name = key.partition(".")[2]
    return _SHORT.get(name, name)


def _cells(row: Row, keys: Sequence[str]) -> list[str]:
    return [("yes" if row[key] else "no") if isinstance(row[key], bool) else str(row[key]) for key in keys]


def _best(answer: Mapping[str, Any]) -> Table:
    results = answer["results"]
    keys = _keys(results)
    columns = {"step_ms": ("step, ms", "{:,.1f}", 1), "mfu": ("MFU, %", "{:.1f}", 100),
               "memory_gib": ("memory, GiB", "{:.1f}", 1), "joules_per_token": ("J/token", "{:.3g}", 1),
               "cost_per_mtoken": ("per Mtoken", "{:,.4g}", 1), "days": ("days", "{:,.1f}", 1)}  # fmt: skip
    columns = {key: column for key, column in columns.items() if results[0][key] is not None}
    names = [name for name, _, _ in columns.values()]
    table = make_table(f"the best by {answer['objective']}", "", *map(_name, keys), *names)
    for rank, row in enumerate(results, 1):
        numbers = [form.format(scale * row[key]) for key, (_, form, scale) in columns.items()]
        table.add_row(str(rank), *_cells(row, keys), *numbers)
    return table


def _breakdowns(results: Sequence[Row]) -> Table:
    columns = ("compute only", "compute and communication", "communication only", "waiting")
    table = make_table("where the step goes, ms", "", *columns)
    for rank, row in enumerate(results[:5], 1):
        table.add_row(str(rank), *(f"{row['breakdown'][part]:,.1f}" for part in _PARTS))
    return table


def _lost(results: Sequence[Row]) -> list[Table]:
    if len(results) < 2:
        return []
    table = make_table("why the others lost", "", "by, %", "why")
    for rank, row in enumerate(results[1:5], 2):
        table.add_row(str(rank), f"{100 * (row['value'] / results[0]['value'] - 1):.2f}", row["lost_by"])
    return [table]


def _front(rows: Sequence[Row]) -> Table:
    keys, priced = _keys(rows), rows[0]["cost_per_mtoken"] is not None
    cost, name = ("cost_per_mtoken", "per Mtoken") if priced else ("gpu_hours_per_mtoken", "GPU-hours/Mtoken")
    table = make_table("Pareto front of time, memory and cost", *map(_name, keys), "step, ms", "memory, GiB", name)
    for row in rows[:_MOST_ON_FRONT]:
        numbers = (f"{row['step_ms']:,.1f}", f"{row['memory_gib']:.1f}", f"{row[cost]:.4g}")
        table.add_row(*_cells(row, keys), *numbers)
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
