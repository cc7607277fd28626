"""Searches as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from lumos.files import write_as, write_csv, write_json
from lumos.report.terminal.style import make_table, notes

Row = Mapping[str, Any]

_SHORT = {"sequence_parallel": "sp", "micro_batch": "mb", "microbatches": "n", "recompute": "recompute"}
_PARTS = ("exposed_compute_ms", "overlapped_ms", "exposed_comm_ms", "other_ms")


def show_search(answer: Mapping[str, Any], console: Console) -> None:
    """The best, why the others lost, and the front."""
    results: Sequence[Row] = answer["results"]
    parts: list[RenderableType] = []
    if results:
        parts = [_best(answer), _breakdowns(results), *_lost(results), _front(answer["pareto"])]
    console.print(Group(_counts(answer), *parts, *notes([*_gap(answer), *answer["warnings"]])))


def _counts(answer: Mapping[str, Any]) -> Table:
    table = make_table("what was searched", "", "")
    table.add_row("valid configurations", f"{answer['evaluated']:,}")
    table.add_row("that fit into memory", f"{answer['fitting']:,}")
    table.add_row("that bounds did not rule out, simulated", f"{answer['simulated']:,}")
    table.add_row("seconds", f"{answer['seconds']:.1f}")
    return table


def _keys(rows: Sequence[Row]) -> list[str]:
    """The keys that are not the same everywhere, or worth nothing."""
    keys = [key for key in rows[0] if "." in key]
    return [key for key in keys if len({row[key] for row in rows}) > 1 or rows[0][key] not in (1, False, 0)]


def _name(key: str) -> str:
    short = key.partition(".")[2]
    return _SHORT.get(short, short)


def _cells(row: Row, keys: Sequence[str]) -> list[str]:
    return [("yes" if row[key] else "no") if isinstance(row[key], bool) else str(row[key]) for key in keys]


def _best(answer: Mapping[str, Any]) -> Table:
    results, objective = answer["results"], answer["objective"]
    keys = _keys(results)
    money = results[0]["cost_per_mtoken"] is not None
    days = results[0]["days"] is not None
    columns = ["step, ms", "MFU, %", "memory, GiB", "J/token", *(["per Mtoken"] * money), *(["days"] * days)]
    table = make_table(f"the best by {objective}", "", *map(_name, keys), *columns)
    for rank, row in enumerate(results, 1):
        cells = [f"{row['step_ms']:,.1f}", f"{100 * row['mfu']:.1f}", f"{row['memory_gib']:.1f}"]
        cells.append(f"{row['joules_per_token']:.3g}")
        cells += [f"{row['cost_per_mtoken']:,.4g}"] if money else []
        cells += [f"{row['days']:,.1f}"] if days else []
        table.add_row(str(rank), *_cells(row, keys), *cells)
    return table


def _breakdowns(results: Sequence[Row]) -> Table:
    table = make_table(
        "where the step goes, ms", "", "compute alone", "compute over communication", "communication alone", "waiting"
    )
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
    keys = _keys(rows)
    title = "no configuration is faster, smaller and cheaper than one of these"
    money = rows[0]["cost_per_mtoken"] is not None
    cost = "cost_per_mtoken" if money else "gpu_hours_per_mtoken"
    table = make_table(
        title, *map(_name, keys), "step, ms", "memory, GiB", "per Mtoken" if money else "GPU-hours/Mtoken"
    )
    for row in rows[:_MOST_FRONT]:
        numbers = (f"{row['step_ms']:,.1f}", f"{row['memory_gib']:.1f}", f"{row[cost]:.4g}")
        table.add_row(*_cells(row, keys), *numbers)
    return table


_MOST_FRONT = 12


def _gap(answer: Mapping[str, Any]) -> list[str]:
    found = []
    if answer["results"] and answer["bound_ms"] and answer["objective"] == "time":
        best, bound, own = answer["results"][0]["step_ms"], answer["bound_ms"], answer["results"][0]["bound_ms"]
        found.append(
            f"no configuration that fits can take less than {bound:,.1f} ms; the first takes {best:,.1f}, which is "
            f"{100 * (best / bound - 1):.1f} % more, and {100 * (best / own - 1):.1f} % more than its own bound"
        )
    more = len(answer["pareto"]) - _MOST_FRONT
    return found + ([f"the front has {more} more; --json has them all"] if more > 0 else [])


def show_merged(answer: Mapping[str, Any], console: Console) -> None:
    """What was put together, a search or a score."""
    if answer["kind"] == "search":
        show_search(answer, console)
        return
    from lumos.report.terminal.forecasts import show_score_answer

    show_score_answer(answer, console)


def write_merged(path: Path, answer: dict[str, Any]) -> None:
    rows = [_flat(row) for row in answer["results"]] if answer["kind"] == "search" else answer["scored"]
    writers = {".json": lambda to: write_json(to, answer), ".csv": lambda to: write_csv(to, rows)}
    if answer["kind"] == "search":
        from lumos.report.html.search_page import write_search_page

        writers[".html"] = lambda to: write_search_page(to, answer)
    write_as(path, writers)


def _flat(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, dict | list)}
