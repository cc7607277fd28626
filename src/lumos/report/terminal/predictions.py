"""Predictions as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from lumos.prediction.bill import Bill
from lumos.prediction.prediction import Prediction, memory_words
from lumos.report.terminal.style import make_table, notes
from lumos.report.wording import STEP_PARTS, change, money_text, ms_text, si_text, title_of

_MEMORY = ("peak", "weights", "gradients", "optimizer", "activations", "buffers", "framework")
_MOST_RANKS = 4


def show_prediction(found: Prediction, console: Console) -> None:
    """The whole answer, whatever it was predicted from."""
    parts: list[RenderableType] = [_summary(found), *_bill(found.bill), _breakdown(found)]
    if found.all_operators:
        parts += [_memory(found), _operators(found)]
    if found.traced is not None:
        parts += [_understood(found), _inferred(found)]
    console.print(Group(*parts, *notes(found.warnings)))


def _summary(found: Prediction) -> Table:
    title = "predicted step, without the profiler" if found.setup is None else title_of(found.setup)
    base, (low, high) = found.baseline_ms, found.interval_ms
    table = make_table(title, "", "predicted", "")
    table.add_row("step", ms_text(found.step_ms), f"{ms_text(low)} – {ms_text(high)} (80 % interval)")
    if base is not None:
        words = f"without the profiler; the prediction is {change(found.step_ms, base)}"
        table.add_row("as recorded", ms_text(base), words)
    if found.setup is None:
        return table
    device = "CPU rank" if found.is_of_cpu else "GPU"
    table.add_row(f"tokens/s/{device}", f"{found.tokens_per_s_per_gpu:,.0f}", "")
    if found.mfu is not None and found.hfu is not None:
        precision = found.setup.train.precision
        table.add_row("MFU", f"{100 * found.mfu:.1f} %", f"HFU {100 * found.hfu:.1f} % (dense {precision} peak)")
    if found.energy is not None:
        per_token = found.energy.joules / found.setup.tokens
        words = f"all GPUs, one step; {per_token:,.3g} J per token; {found.energy.words}"
        table.add_row("energy", si_text(found.energy.joules, "J"), words)
    if found.memory is not None:
        fits = {True: ": fits", False: ": does not fit", None: ""}[found.fits]
        words = "" if found.fits is None else memory_words(found.memory) + fits
        table.add_row("peak memory", f"{found.memory.gib()['peak']:.1f} GiB", words)
    return table


def _bill(found: Bill | None) -> list[Table]:
    """Money and a token budget, if they were asked for."""
    if found is None:
        return []
    bill = found.as_dict()
    money, budget = bill["money_per_step"], bill["budget"]
    if money is None and budget is None:
        return []
    table = make_table("cost", "", "predicted", "")
    if money is not None:
        table.add_row("one step", money_text(money), _prices(bill))
        table.add_row("a million tokens", money_text(bill["money_per_million_tokens"]), "")
    if budget is not None:
        low, high = budget["days_interval"]
        table.add_row("days", f"{budget['days']:,.2f}", f"{low:,.2f} – {high:,.2f} (80 % interval), no interruptions")
        table.add_row("steps", f"{budget['steps']:,}", si_text(budget["tokens"], " tokens"))
        table.add_row("GPU-hours", f"{budget['gpu_hours']:,.0f}", "")
        besides = "" if bill["pue"] == 1 else f", times a PUE of {bill['pue']:g}"
        if budget["kwh"] is not None:
            table.add_row("energy", si_text(1e3 * budget["kwh"], "Wh"), f"GPUs alone{besides}")
        if budget["money"] is not None:
            table.add_row("money", money_text(budget["money"]), "")
    return [table]


def _prices(bill: dict[str, Any]) -> str:
    units = {"price_per_gpu_hour": "a GPU-hour", "price_per_kwh": "a kWh"}
    return " and ".join(f"{bill[key]:g} {unit}" for key, unit in units.items() if bill[key] is not None)


def _breakdown(found: Prediction) -> Table:
    """The parts of the step, beside those of the traced one; both columns add up."""
    before = found.baseline_breakdown
    title = "where the step goes, mean over ranks" + ("" if found.step is None else " (one per pipeline stage)")
    table = make_table(title, "", *(["as recorded"] if before else []), "predicted", "%")
    after = found.breakdown.as_dict() | {"step": found.breakdown.step_ms}
    was = before.as_dict() | {"step": before.step_ms} if before else {}
    for key, name in (STEP_PARTS | {"step": "step"}).items():
        cells = [ms_text(was[key])] if before else []
        table.add_row(name, *cells, ms_text(after[key]), f"{100 * after[key] / (after['step'] or 1.0):.1f}")
    return table


def _memory(found: Prediction) -> Table:
    table = make_table("memory by stage, GiB", "stage", *_MEMORY)
    for row in found.memory.rows() if found.memory else ():
        table.add_row(str(row["stage"]), *(f"{float(row[name]):.2f}" for name in _MEMORY))
    return table


def _operators(found: Prediction) -> Table:
    table = make_table("most expensive operators (rank 0), per step", "", "shape", "count", "ms", "bound", "source")
    for row in found.operators:
        shape = si_text(row.shape[0], "B") if row.bound == "network" else " × ".join(map(str, row.shape))
        table.add_row(row.name, shape, f"{row.count:,}", f"{row.ms:,.2f}", row.bound, row.source)
    shares = ", ".join(f"{100 * share:.0f} % {name}" for name, share in found.source.items() if share >= 0.005)
    table.caption, table.caption_justify = f"times of all operators: {shares}", "left"
    return table


def _understood(found: Prediction) -> Table:
    device = "CPU ms" if found.is_of_cpu else "GPU ms"
    title = "what was understood of the trace"
    table = make_table(title, "rank, phase", "tasks", device, "layer, ms", "its host, ms", "embedding and head, ms")
    for row in found.traced.understood[: 3 * _MOST_RANKS] if found.traced else ():
        cells = [f"{row[key]:.3f}" for key in ("gpu_ms", "layer_ms", "layer_host_ms", "ends_ms")]
        table.add_row(f"{row['rank']}, {row['phase']}", str(row["tasks"]), *cells)
    return table


def _inferred(found: Prediction) -> Table:
    table = make_table("setup of the traced run, as inferred", "key", "value", "evidence")
    for key, one in found.inferred.items():
        table.add_row(key, str(one.value).lower() if isinstance(one.value, bool) else str(one.value), one.evidence)
    return table
