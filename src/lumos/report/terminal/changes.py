"""Changes: the prediction of a changed run as tables, beside what was understood of the traced one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from lumos.change.change import Changed
from lumos.change.infer import Inferred
from lumos.report.terminal.forecasts import bill_tables
from lumos.report.terminal.style import make_table, notes

_MOST_RANKS = 4


def show_change(found: Changed, told: Mapping[str, Inferred], console: Console) -> None:
    """The step as traced and as changed, and what was understood."""
    bill = [] if found.forecast.setup.cluster.accelerator.is_cpu else bill_tables(found.bill)
    console.print(Group(_summary(found), *bill, _understood(found), _told(told), *notes(found.forecast.warnings)))


def inferred(told: Mapping[str, Inferred]) -> dict[str, dict[str, Any]]:
    """What the trace tells of its setup, as JSON has it."""
    return {key: {"value": one.value, "evidence": one.evidence} for key, one in told.items()}


def _told(told: Mapping[str, Inferred]) -> Table:
    table = make_table("understood of the trace's setup", "key", "value", "why")
    for key, one in told.items():
        table.add_row(key, str(one.value).lower() if isinstance(one.value, bool) else str(one.value), one.evidence)
    return table


def _summary(found: Changed) -> Table:
    answer = found.as_dict()
    low, high = found.interval_ms
    table = make_table("predicted step, without the profiler", "", "as recorded", "changed")
    ratio = found.step_ms / found.baseline_ms
    table.add_row("step", f"{found.baseline_ms:.2f} ms", f"{found.step_ms:.2f} ms ({ratio:.3f} of it)")
    table.add_row("80 % interval", "", f"{low:.2f} – {high:.2f} ms")
    table.add_row(f"tokens/s/{_device(found)}", "", f"{answer['tokens_per_s_per_gpu']:,.0f}")
    if answer["mfu"] is not None:
        table.add_row("MFU", "", f"{100 * answer['mfu']:.1f} %")
    room = {True: ", fits", False: ", does not fit", None: ""}[answer["fits"]]
    table.add_row("peak memory", "", f"{answer['memory_gib']['peak']:.1f} GiB{room}")
    return table


def _device(found: Changed) -> str:
    return "CPU rank" if found.forecast.is_of_cpu else "GPU"


def _understood(found: Changed) -> Table:
    title = "what was understood of the trace"
    device = "CPU ms" if found.forecast.is_of_cpu else "GPU ms"
    table = make_table(title, "rank, phase", "tasks", device, "a layer, ms", "its host, ms", "ends, ms")
    for row in found.understood[: 3 * _MOST_RANKS]:
        cells = [f"{row[key]:.3f}" for key in ("gpu_ms", "layer_ms", "layer_host_ms", "ends_ms")]
        table.add_row(f"{row['rank']}, {row['phase']}", str(row["tasks"]), *cells)
    return table
