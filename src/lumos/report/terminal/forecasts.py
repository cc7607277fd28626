"""Forecasts as tables, and as a Chrome trace of the predicted step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from lumos.files import whole_file
from lumos.prediction.bill import Bill
from lumos.prediction.forecasting import Forecast
from lumos.report.terminal.style import make_table, notes
from lumos.score.score import Score

_PARTS = {
    "exposed_compute_ms": "compute alone",
    "overlapped_ms": "compute over communication",
    "exposed_comm_ms": "communication alone",
    "other_ms": "waiting (pipeline, host)",
}


def show_forecast(found: Forecast, console: Console) -> None:
    """The whole answer for a described run."""
    parts: list[RenderableType] = [_summary(found), *bill_tables(found.bill)]
    parts += [_breakdown(found), _memory(found), _operators(found)]
    console.print(Group(*parts, *notes(found.warnings)))


def _summary(found: Forecast) -> Table:
    setup, (low, high) = found.setup, found.interval_ms
    name = setup.model.name or f"{setup.model.parameters(setup.train.seq) / 1e9:.2f} B parameters"
    p = setup.parallel
    ways = [f"{key} {getattr(p, key)}" for key in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(p, key) > 1]
    title = f"{name} on {setup.cluster.gpus} × {setup.cluster.gpu}: {', '.join(ways) or 'one GPU'}"
    table = make_table(title, "", "predicted", "")
    table.add_row("step", f"{found.step_ms:,.2f} ms", f"{low:,.2f} – {high:,.2f} ms, four times out of five")
    table.add_row("tokens/s/GPU", f"{found.tokens_per_s_per_gpu:,.0f}", "")
    table.add_row(
        "MFU", f"{100 * found.mfu:.1f} %", f"HFU {100 * found.hfu:.1f} % (dense {setup.train.precision} peak)"
    )
    table.add_row("energy", f"{found.energy_j / 1e3:,.2f} kJ", _energy_note(found))
    memory = found.memory.gib()
    table.add_row("peak memory", f"{memory['peak']:.1f} GiB", "fits" if found.memory.fits else "does not fit")
    return table


def _energy_note(found: Forecast) -> str:
    energy, bill = found.energy, found.bill.as_dict()
    held = ", held at its limit" if energy.limited else ""
    return f"all GPUs, one step; {energy.watts:,.0f} W a GPU{held}, {bill['joules_per_token']:,.3g} J a token"


def bill_tables(found: Bill) -> list[Table]:
    """What was asked about money and a token budget; nothing where nothing was asked."""
    bill = found.as_dict()
    money, budget = bill["money_per_step"], bill["budget"]
    if money is None and budget is None:
        return []
    table = make_table("what it costs", "", "predicted", "")
    if money is not None:
        table.add_row("a step", f"{money:,.4g}", _prices(bill))
        table.add_row("a million tokens", f"{bill['money_per_million_tokens']:,.4g}", "")
    if budget is not None:
        low, high = budget["days_interval"]
        table.add_row("days", f"{budget['days']:,.2f}", f"{low:,.2f} – {high:,.2f}, without a pause")
        table.add_row("steps", f"{budget['steps']:,}", f"{budget['tokens']:,.4g} tokens")
        table.add_row("GPU-hours", f"{budget['gpu_hours']:,.0f}", "")
        besides = "" if bill["pue"] == 1 else f", times {bill['pue']:g}"
        table.add_row("energy", f"{budget['kwh']:,.4g} kWh", f"GPUs alone{besides}")
        if budget["money"] is not None:
            table.add_row("money", f"{budget['money']:,.2f}", "")
    return [table]


def _prices(bill: dict[str, Any]) -> str:
    units = {"price_per_gpu_hour": "a GPU-hour", "price_per_kwh": "a kWh"}
    return " and ".join(f"{bill[key]:g} {unit}" for key, unit in units.items() if bill[key] is not None)


def _breakdown(found: Forecast) -> Table:
    table = make_table("where the step goes, mean over stages", "", "ms", "%")
    for key, name in _PARTS.items():
        value = found.breakdown[key]
        table.add_row(name, f"{value:,.2f}", f"{100 * value / found.step_ms:.1f}")
    return table


def _memory(found: Forecast) -> Table:
    table = make_table("memory by stage, GiB", "stage", "peak", "weights", "gradients", "optimizer", "activations",
                       "buffers", "framework")  # fmt: skip
    for index, stage in enumerate(found.memory.stages):
        values = [getattr(stage, name, 0.0) / 2**30 for name in ("peak", "weights", "gradients", "optimizer",
                                                                  "activations", "buffers", "framework")]  # fmt: skip
        table.add_row(str(index), *(f"{value:.2f}" for value in values))
    return table


def _operators(found: Forecast) -> Table:
    table = make_table("dearest pieces of one rank of the first stage", "", "shape", "count", "ms", "bound")
    for row in found.step.operators():
        shape = " × ".join(str(size) for size in _list(row["shape"]))
        table.add_row(str(row["name"]), shape, str(row["count"]), f"{float(str(row['ms'])):,.2f}", str(row["bound"]))
    return table


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def write_forecast_trace(path: Path, found: Forecast) -> None:
    """The predicted step for Perfetto: one process a stage, one track a lane."""
    import orjson
    from isal import igzip

    data = orjson.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": list(_events(found))})
    with whole_file(path) as file:
        if path.name.endswith(".gz"):
            with igzip.IGzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:  # type: ignore[no-untyped-call]
                packed.write(data)  # type: ignore[no-untyped-call]
        else:
            file.write(data)


def _events(found: Forecast) -> Iterator[dict[str, Any]]:
    step = found.step
    ranks = found.setup.cluster.gpus // found.setup.parallel.pp
    for stage in range(found.setup.parallel.pp):
        label = f"stage {stage}: ranks {stage * ranks} to {(stage + 1) * ranks - 1}"
        yield {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": label}}
    for lane, (name, stage) in enumerate(step.structure.lanes):
        yield {"ph": "M", "name": "thread_name", "pid": stage, "tid": lane, "args": {"name": name}}
    lanes = step.graph.lane
    for node, role_index in enumerate(step.structure.node_role.tolist()):
        role, turn = step.structure.roles[role_index], step.structure.node_turn[node]
        label = role.what if turn is None else f"{role.what} micro-batch {turn.microbatch}"
        yield {
            "ph": "X", "cat": "predicted", "name": label, "pid": role.stage, "tid": int(lanes[node]),
            "ts": float(step.times.start[node]) / 1e3, "dur": float(step.graph.duration[node]) / 1e3,
            "args": {"chunk": role.chunk, "unit": role.unit},
        }  # fmt: skip


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


_MOST_REASONS = 5


def _refusal(reason: str, count: int) -> str:
    return f"{count} {'row' if count == 1 else 'rows'} refused: {reason}"


def _rest(reasons: dict[str, int]) -> list[str]:
    more = len(reasons) - _MOST_REASONS
    return [f"rows were refused for {more} more reasons; --json has them all"] if more > 0 else []
