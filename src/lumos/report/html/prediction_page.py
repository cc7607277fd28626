"""Prediction page: the report of a predicted run, from a description, a trace, or a trace of another configuration."""

from __future__ import annotations

from lumos.analysis.breakdown import Breakdown
from lumos.prediction.prediction import Prediction
from lumos.report.html.charts import Bars, Series
from lumos.report.html.memory_view import memory_section
from lumos.report.html.page import Card, Figure, Page, Section
from lumos.report.html.parts import (
    STEP_PARTS,
    breakdown_section,
    collective_groups_section,
    path_section,
    rank_parts,
    timeline_section,
)
from lumos.report.html.replay_page import subtitle_of
from lumos.report.html.roofline import roofline_section
from lumos.report.html.run_view import RunView
from lumos.report.html.table import Column, Row, Table, ms_digits
from lumos.report.wording import change, ms_text, si_text, title_of
from lumos.setup.setup import SECTIONS, Setup


def prediction_page(found: Prediction) -> Page:
    """The whole report."""
    view = RunView(found.run)
    words = "Predicted, without a profiler. Waiting for other ranks counts as communication."
    if found.step is not None:
        words = "One rank stands for all ranks of its pipeline stage. Idle is the pipeline's bubble and the host."
    sections = [
        *_before_and_after(found),
        breakdown_section(rank_parts(found.run.breakdown_by_rank), "rank", words, "all ranks, mean"),
        timeline_section(view),
        path_section(found.critical_path),
        collective_groups_section(found.run.collectives, found.run.steps),
        *_of_setup(found),
    ]
    return _page(found, sections, view.kinds)


def prediction_summary(found: Prediction) -> Page:
    """The same without charts, for a notebook."""
    parts = breakdown_section(rank_parts(found.run.breakdown_by_rank), "rank", "", "all ranks, mean")
    sections = [*_before_and_after(found), parts]
    return _page(found, [*sections, *([memory_section(found)] if found.step is not None else [])], [])


def _page(found: Prediction, sections: list[Section], kinds: list[str]) -> Page:
    ranks = [str(rank) for rank in found.run.trace.ranks]
    return Page(_title(found), _subtitle(found), _cards(found), sections, found.warnings, ranks, kinds=kinds)


def _title(found: Prediction) -> str:
    if found.setup is None:
        scales = ", ".join(f"{scale.what} × {scale.factor:g}" for scale in found.scales) or "nothing changed"
        return f"What if {scales}: {ms_text(found.step_ms)} per step"
    return f"{'Prediction' if found.traced is None else 'Changed run'}: {title_of(found.setup)}"


def _subtitle(found: Prediction) -> str:
    if found.setup is None:
        return subtitle_of(found.replayed) if found.replayed else ""
    train = found.setup.train
    return f"{train.framework}, {train.precision}, sequences of {train.seq:,} tokens, {train.global_batch:,} per step"


def _cards(found: Prediction) -> list[Card]:
    low, high = found.interval_ms
    cards = [Card("predicted step", ms_text(found.step_ms), f"{ms_text(low)} – {ms_text(high)} (80 % interval)")]
    base = found.baseline_ms
    if base:
        cards += [
            Card("as recorded", ms_text(base), "without the profiler"),
            Card("change", change(found.step_ms, base), f"{ms_text(found.step_ms - base, signed=True)} per step"),
        ]
    return [*cards, *_cards_of_setup(found)]


def _cards_of_setup(found: Prediction) -> list[Card]:
    setup, memory = found.setup, found.memory
    if setup is None or memory is None:
        return []
    device = "rank" if found.is_of_cpu else "GPU"
    peak, reserve, usable = (value / 2**30 for value in (memory.peak, memory.reserve, memory.usable))
    room = f"+ {reserve:.1f} GiB reserve of {usable:.1f} GiB: {'fits' if found.fits else 'does not fit'}"
    cards = [Card(f"tokens/s/{device}", f"{found.tokens_per_s_per_gpu:,.0f}", f"{setup.tokens:,} tokens per step")]
    if found.mfu is not None and found.hfu is not None:
        peak_of = f"HFU {100 * found.hfu:.1f} %, dense {setup.train.precision} peak"
        cards.append(Card("MFU", f"{100 * found.mfu:.1f} %", peak_of))
    cards.append(Card("peak memory", f"{peak:.1f} GiB", "available memory not known" if found.fits is None else room))
    cards.append(Card("idle", f"{100 * found.bubble:.1f} %", "of the step, waiting for other stages or the host"))
    if found.energy is not None:
        words = f"all GPUs, one step; {found.energy.words}"
        cards.append(Card("energy", si_text(found.energy.joules, "J"), words))
    return cards


def _before_and_after(found: Prediction) -> list[Section]:
    """Parts of the traced step and of the predicted one."""
    before = found.baseline_breakdown
    return [] if before is None else [_change(before, found.breakdown)]


def _change(before: Breakdown, after: Breakdown) -> Section:
    was, becomes = before.as_dict(), after.as_dict()
    names = [name for name, _ in STEP_PARTS.values()]
    series = [
        Series("as recorded", "plain", [was[key] for key in STEP_PARTS]),
        Series("predicted", "compute", [becomes[key] for key in STEP_PARTS]),
    ]
    digits = ms_digits([*was.values(), *becomes.values()])
    columns = [Column("part"), Column("as recorded, ms", digits), Column("predicted, ms", digits),
               Column("change, ms", digits, signed=True)]  # fmt: skip
    rows = [Row([name, was[key], becomes[key], becomes[key] - was[key]]) for key, (name, _) in STEP_PARTS.items()]
    total = [before.step_ms, after.step_ms]
    rows.append(Row(["step", *total, total[1] - total[0]], is_total=True))
    title = "parts of the typical step, mean over ranks"
    chart = Bars(names, series, "ms per step", grouped=True)
    table = Table(title, columns, rows)
    return Section("Before and after", "Both without the profiler.", [Figure(title, chart)], [table])


def _of_setup(found: Prediction) -> list[Section]:
    """What only a described run has."""
    if found.setup is None or found.step is None:
        return []
    roofline = [] if found.is_of_cpu else [roofline_section(found)]
    sections = [memory_section(found), *roofline, setup_section(found.setup)]
    return [*sections, *([_understood(found.traced.understood)] if found.traced is not None else [])]


def setup_section(setup: Setup) -> Section:
    """Every value, so that the report says what it is about."""
    rows = [
        Row([f"{name}.{key}", str(value).lower() if isinstance(value, bool) else str(value)])
        for name in SECTIONS
        for key, value in getattr(setup, name).stated().items()
        if value not in (None, "", (), [])
    ]
    return Section("Setup", tables=[Table("values of the setup", [Column("key"), Column("value")], rows)])


def _understood(found: list[dict[str, object]]) -> Section:
    keys = {"tasks": 0, "gpu_ms": 3, "layer_ms": 3, "layer_host_ms": 3, "ends_ms": 3}
    titles = ("tasks", "GPU, ms", "a layer, ms", "its host, ms", "embedding and head, ms")
    columns = [Column("rank"), Column("phase"), *(Column(t, d) for t, d in zip(titles, keys.values(), strict=True))]
    rows = [Row([str(row["rank"]), str(row["phase"]), *(float(str(row[key])) for key in keys)]) for row in found]
    text = "Phases and layers as they were recognised; what is predicted rests on these times."
    return Section("What was understood of the trace", text, tables=[Table("phases of the traced step", columns, rows)])
