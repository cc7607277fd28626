"""Forecast page: the report of a described run, and of a traced run in another configuration."""

from __future__ import annotations

from pathlib import Path

from lumos.change.change import Changed
from lumos.prediction.forecasting import Forecast
from lumos.program.collective import Collective
from lumos.report.html.charts import Bars, Series
from lumos.report.html.memory_view import memory_section
from lumos.report.html.page import Card, Figure, Page, Section, write_page
from lumos.report.html.parts import STEP_PARTS, breakdown_section
from lumos.report.html.roofline import roofline_section
from lumos.report.html.step_view import KINDS, StepView, kind_of
from lumos.report.html.table import Column, Row, Table, ms_digits
from lumos.report.html.timeline import lanes_table
from lumos.setup.setup import SECTIONS, Setup

_WAYS = ("tp", "pp", "vpp", "cp", "ep", "dp")
_AROUND = {
    "gather": "weights, gathered before use", "reduce": "gradients, beside the backward pass",
    "reduce rest": "gradients, after the last backward pass", "publish": "weights, after the update",
}  # fmt: skip


def write_forecast_page(path: Path, found: Forecast) -> None:
    """The report of a described run."""
    write_page(path, forecast_page(found))


def write_changed_page(path: Path, found: Changed) -> None:
    """The report of a traced run in another configuration."""
    write_page(path, changed_page(found))


def forecast_page(found: Forecast) -> Page:
    return _forecast_page(found, sections_of(found))


def forecast_summary(found: Forecast) -> Page:
    """Where the step and the memory go, without charts."""
    return _forecast_page(found, _summary_sections(found))


def _forecast_page(found: Forecast, sections: list[Section]) -> Page:
    low, high = found.interval_ms
    step = Card("step", f"{found.step_ms:,.2f} ms", f"{low:,.1f} – {high:,.1f} ms, four times out of five")
    return _page(found, f"Forecast: {title_of(found.setup)}", [step, *cards_of(found)], sections)


def changed_page(found: Changed) -> Page:
    return _changed_page(found, [*sections_of(found.forecast), _understood(found)])


def changed_summary(found: Changed) -> Page:
    return _changed_page(found, _summary_sections(found.forecast))


def _changed_page(found: Changed, sections: list[Section]) -> Page:
    low, high = found.interval_ms
    ratio = found.step_ms / found.baseline_ms if found.baseline_ms else 0.0
    cards = [
        Card("changed step", f"{found.step_ms:,.2f} ms", f"{low:,.1f} – {high:,.1f} ms, four times out of five"),
        Card("as recorded", f"{found.baseline_ms:,.2f} ms", f"without the profiler; the change is {ratio:.3f} of it"),
    ]
    title = f"Changed run: {title_of(found.forecast.setup)}"
    return _page(found.forecast, title, [*cards, *cards_of(found.forecast)], sections)


def _page(found: Forecast, title: str, cards: list[Card], sections: list[Section]) -> Page:
    train = found.setup.train
    words = f"{train.framework}, {train.precision}, sequences of {train.seq:,} tokens, {train.global_batch:,} a step"
    stages = [str(stage) for stage in range(found.setup.parallel.pp)]
    kinds = (*KINDS, "critical path")
    return Page(title, words, cards, sections, found.warnings, stages, "stage", kinds)


def title_of(setup: Setup) -> str:
    name = setup.model.name or f"{setup.model.parameters(setup.train.seq) / 1e9:.2f} B parameters"
    ways = [f"{key} {getattr(setup.parallel, key)}" for key in _WAYS if getattr(setup.parallel, key) > 1]
    return f"{name} on {setup.cluster.gpus:,} × {setup.cluster.gpu}" + (f", {', '.join(ways)}" if ways else "")


def cards_of(found: Forecast) -> list[Card]:
    memory, precision = found.memory.gib()["peak"], found.setup.train.precision
    room = f"{'fits' if found.memory.fits else 'does not fit'} in {found.memory.usable / 2**30:.1f} GiB"
    if found.is_of_cpu:
        return _cards_of_cpu(found, "" if found.fits is None else room)
    return [
        Card("tokens/s/GPU", f"{found.tokens_per_s_per_gpu:,.0f}", f"{found.setup.tokens:,} tokens a step"),
        Card("MFU", f"{100 * found.mfu:.1f} %", f"HFU {100 * found.hfu:.1f} %, dense {precision} peak"),
        Card("peak memory", f"{memory:.1f} GiB", room),
        Card("waiting", f"{100 * found.bubble:.1f} %", "of the step, for other stages or the host"),
        Card("energy", f"{found.energy_j / 1e3:,.1f} kJ", "all GPUs, one step"),
    ]


def _cards_of_cpu(found: Forecast, room: str) -> list[Card]:
    """Without what is not known of a CPU."""
    return [
        Card("tokens/s/rank", f"{found.tokens_per_s_per_gpu:,.0f}", f"{found.setup.tokens:,} tokens a step"),
        Card("peak memory", f"{found.memory.gib()['peak']:.1f} GiB", room or "how much there is, is not known"),
        Card("waiting", f"{100 * found.bubble:.1f} %", "of the step, for other stages"),
    ]


def sections_of(found: Forecast) -> list[Section]:
    view = StepView(found.step)
    words = "One rank stands for all of its stage. Idle is the pipeline's bubble and waiting for the host."
    return [
        breakdown_section(stage_parts(found), "stage", words, "all stages, mean"),
        _timeline(view),
        _path(view),
        _communication(found),
        memory_section(found),
        *([] if found.is_of_cpu else [roofline_section(found)]),
        setup_section(found.setup),
    ]


def _summary_sections(found: Forecast) -> list[Section]:
    return [breakdown_section(stage_parts(found), "stage", "", "all stages, mean"), memory_section(found)]


def stage_parts(found: Forecast) -> dict[str, dict[str, float]]:
    """Where the step of every stage goes, as the forecast's own breakdown says it of their mean."""
    parts = {}
    for stage, work in enumerate(found.step.stage_work()):
        compute, exposed = work.compute_us / 1e3, work.exposed_us / 1e3
        hidden = max(0.0, work.communication_us / 1e3 - exposed)
        idle = max(0.0, found.step_ms - compute - exposed)
        values = (max(0.0, compute - hidden), exposed, min(hidden, compute), idle)
        parts[str(stage)] = dict(zip(STEP_PARTS, values, strict=True))
    return parts


def _timeline(view: StepView) -> Section:
    drawn = view.timeline()
    text = "One rank of every stage. The line is the critical path: what lies on it decides the step. " + drawn.said
    figure = Figure(f"the predicted step, {drawn.chart.span_ms:,.1f} ms", drawn.chart)
    return Section("Timeline", text, [figure], [lanes_table(drawn)])


def _path(view: StepView) -> Section:
    spent, between = view.path_ms()
    total = sum(spent.values()) + between or 1.0
    by_kind = dict.fromkeys(KINDS, 0.0)
    for (what, _), ms in spent.items():
        by_kind[kind_of(what)] += ms
    series = [Series(kind, kind, [ms], kind=kind) for kind, ms in by_kind.items() if ms > 0]
    series += [Series("links and launches", "latency", [between])] if between > 0 else []
    digits = ms_digits(spent.values())
    rows = [
        Row([what, str(stage), ms, 100 * ms / total], str(stage), kind_of(what))
        for (what, stage), ms in spent.items()
    ]
    rows.append(Row(["links and launches", "", between, 100 * between / total]))
    columns = [Column("what"), Column("stage"), Column("ms", digits, bar=True), Column("share, %", 1)]
    figure = Figure("critical path by kind, ms", Bars(["critical path"], series, "ms"))
    text = "Only what lies on this chain is worth making faster."
    return Section("Critical path", text, [figure], [Table("critical path by block and stage", columns, rows)])


def _communication(found: Forecast) -> Section:
    """What is waited for, apart from what compute hides."""
    work = found.step.stage_work()
    if not any(part.communication_us > 0 for part in work):
        return Section("Collectives", "One GPU talks to nobody.")
    stages = [str(stage) for stage in range(len(work))]
    exposed = [part.exposed_us / 1e3 for part in work]
    hidden = [max(0.0, part.communication_us - part.exposed_us) / 1e3 for part in work]
    series = [Series("waited for", "comm", exposed), Series("behind compute", "overlapped", hidden)]
    chart = Bars([f"stage {stage}" for stage in stages], series, "ms a step", ranks=stages)
    text = "Communication that compute waits for, apart from what it hides."
    return Section("Collectives", text, [Figure("communication of every stage", chart)], [_collectives(found)])


def _collectives(found: Forecast) -> Table:
    columns = [Column("collective"), Column("kind"), Column("ranks", 0), Column("MB", 2), Column("a step", 0),
               Column("ms of one", 3), Column("ms a step", 2, bar=True)]  # fmt: skip
    prices, rows = found.step.prices, []
    for (name, piece), count in found.step.assembly.counts().items():
        if isinstance(piece, Collective):
            ms = prices.collective_us(piece) / 1e3
            size = piece.bytes / 1e6
            rows.append(Row([name or piece.kind, piece.kind, piece.group.size, size, count, ms, count * ms]))
    for what, words in _AROUND.items():
        ms = found.step.role_us(what, 0) / 1e3
        if ms > 0:
            rows.append(Row([words, what, found.setup.parallel.dp, None, None, None, ms]))
    rows.sort(key=lambda row: -float(row.values[-1] or 0.0))
    return Table("collectives of one rank of the first stage", columns, rows)


def setup_section(setup: Setup) -> Section:
    """Every value, so that the report says what it is about."""
    rows = [
        Row([f"{name}.{key}", _shown(value)])
        for name in SECTIONS
        for key, value in getattr(setup, name).stated().items()
        if value not in (None, "", (), [])
    ]
    table = Table("values of the setup", [Column("key"), Column("value")], rows)
    return Section("Setup", tables=[table])


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _understood(found: Changed) -> Section:
    columns = [Column("rank"), Column("phase"), Column("tasks", 0), Column("GPU, ms", 3), Column("a layer, ms", 3),
               Column("its host, ms", 3), Column("ends, ms", 3)]  # fmt: skip
    rows = [
        Row([str(row["rank"]), row["phase"], row["tasks"], row["gpu_ms"], row["layer_ms"], row["layer_host_ms"],
             row["ends_ms"]])
        for row in found.understood
    ]  # fmt: skip
    text = "Phases and layers as they were recognised; what is predicted rests on these times."
    return Section("What was understood of the trace", text, tables=[Table("phases of the traced step", columns, rows)])
