"""Parts: sections that several kinds of report have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lumos.analysis.breakdown import Breakdown
from lumos.analysis.collectives import Collective, CollectiveGroup, group_collectives
from lumos.analysis.hotspots import Hotspot
from lumos.analysis.utilisation import Utilisation
from lumos.graph.critical_path import PathSummary
from lumos.report.html.charts import Bars, Line, Lines, Series
from lumos.report.html.page import Figure, Section
from lumos.report.html.run_view import RunView
from lumos.report.html.table import Column, Row, Table, ms_digits
from lumos.report.html.timeline import lanes_table
from lumos.report.wording import STEP_PARTS as PART_NAMES
from lumos.report.wording import ms_text
from lumos.trace.steps import Steps

STEP_PARTS = {
    key: (name, colour)
    for (key, name), colour in zip(PART_NAMES.items(), ("compute", "comm", "overlapped", "idle"), strict=True)
}
_MOST_BARS = 20
_MOST_ROWS = 200
_MOST_LINES = 8


def breakdown_section(parts: Mapping[str, Mapping[str, float]], word: str, text: str, total: str = "") -> Section:
    """Where the step goes on every rank or stage; `total` names the mean, where it is to be shown."""
    labels = [f"{word} {name}" for name in parts]
    series = [
        Series(name, colour, [part[key] for part in parts.values()]) for key, (name, colour) in STEP_PARTS.items()
    ]
    columns = [Column(word), *(Column(f"{name}, ms", _digits(parts)) for name, _ in STEP_PARTS.values()),
               Column("step, ms", _digits(parts))]  # fmt: skip
    rows = [Row([name, *_values(part)], rank=name) for name, part in parts.items()]
    if total and len(parts) > 1:
        mean = {key: sum(part[key] for part in parts.values()) / len(parts) for key in STEP_PARTS}
        rows.append(Row([total, *_values(mean)], is_total=True))
    chart = Bars(labels, series, "ms per step", ranks=list(parts))
    title = f"where the step goes on every {word}"
    return Section("Step breakdown", text, [Figure(title, chart)], [Table(title, columns, rows)])


def _values(part: Mapping[str, float]) -> list[float]:
    values = [part[key] for key in STEP_PARTS]
    return [*values, sum(values)]


def _digits(parts: Mapping[str, Mapping[str, float]]) -> int:
    return ms_digits(value for part in parts.values() for value in _values(part))


def rank_parts(found: Mapping[int, Breakdown]) -> dict[str, dict[str, float]]:
    return {str(rank): part.as_dict() for rank, part in found.items()}


def timeline_section(view: RunView) -> Section:
    """The critical path and what runs around it."""
    name, drawn = view.shown
    title = f"{name}, {ms_text(drawn.chart.span_ms)} from the first rank's start to the last one's end"
    text = "The critical path is the line: what lies on it decides when the step ends. " + drawn.words
    return Section("Timeline", text, [Figure(title, drawn.chart)], [lanes_table(drawn)])


def path_section(summary: PathSummary) -> Section:
    """What the critical path is made of."""
    kinds = {kind: ms for kind, ms in summary.by_kind.items() if ms > 0} or summary.by_kind
    total = summary.total_ms or 1.0
    series = [Series(kind, kind, [ms], kind=_filtered(kind)) for kind, ms in kinds.items()]
    digits = ms_digits(kinds.values())
    by_kind = Table(
        "critical path by kind, per step",
        [Column("kind"), Column("ms", digits), Column("share, %", 1, bar=True), Column("mostly")],
        [
            Row([kind, ms, 100 * ms / total, _mostly(summary, kind)], kind=_filtered(kind))
            for kind, ms in summary.by_kind.items()
        ]
        + [Row(["critical path", summary.total_ms, 100.0, ""], is_total=True)],
    )
    by_name = Table(
        "critical path by operator, per step",
        [Column("operator"), Column("kind"), Column("ms", digits, bar=True), Column("share, %", 1)],
        [
            Row([name, kind, ms, 100 * ms / total], kind=_filtered(kind))
            for kind, name, ms in summary.by_operator
        ],
        f"the longest {len(summary.by_operator)}" if len(summary.by_operator) >= 50 else "",
    )  # fmt: skip
    text = (
        "Only what lies on this chain is worth making faster. It runs across ranks, from the first start to the last "
        "end. Latency is the cost of launches, queues, links and waits between lanes; unexplained is time that was "
        "recorded and that no dependency accounts for."
    )
    figure = Figure("critical path by kind, ms per step", Bars(["critical path"], series, "ms per step"))
    return Section("Critical path", text, [figure], [by_kind, by_name, *_blocks_table(summary)])


def _blocks_table(summary: PathSummary) -> list[Table]:
    """Where on the pipeline the path of a described step runs."""
    if not summary.by_block:
        return []
    columns = [Column("block"), Column("rank"), Column("ms", ms_digits(ms for *_, ms in summary.by_block), bar=True),
               Column("share, %", 1)]  # fmt: skip
    total = summary.total_ms or 1.0
    rows = [Row([what, str(rank), ms, 100 * ms / total], rank=str(rank)) for what, rank, ms in summary.by_block]
    between = total - sum(ms for *_, ms in summary.by_block)
    rows.append(Row(["links, launches and unexplained time", "", between, 100 * between / total]))
    return [Table("critical path by block and rank", columns, rows)]


def _filtered(kind: str) -> str:
    return "" if kind in ("latency", "unexplained") else kind


def _mostly(summary: PathSummary, kind: str) -> str:
    return ", ".join(f"{name[:40]} {ms:.2f}" for k, name, ms in summary.by_operator if k == kind and ms > 0)[:120]


def collectives_section(found: Sequence[Collective], steps: int) -> Section:
    """Waiting for the last rank, apart from moving data."""
    if not found:
        return Section("Collectives", "No collective of several recorded ranks: nothing to wait for.")
    section = _groups_section(group_collectives(list(found)), steps)
    return replace(section, tables=[*section.tables, _longest(found)])


def collective_groups_section(groups: Sequence[CollectiveGroup], steps: Steps) -> Section:
    """The same of a predicted run."""
    if not groups:
        return Section("Collectives", "No collective of several ranks: nothing to wait for.")
    return _groups_section(groups, max(len(steps.names), 1))


def _groups_section(groups: Sequence[CollectiveGroup], steps: int) -> Section:
    shown = groups[:_MOST_BARS]
    series = [
        Series("waiting for the last rank", "wait", [g.count * g.wait_ms / steps for g in shown]),
        Series("transfer", "comm", [g.count * g.transfer_ms / steps for g in shown]),
    ]
    text = (
        "Waiting is counted from a rank's arrival to the last one's, as a mean over the ranks, and is no fault of the "
        "network; transfer is what is left. Bus bandwidth as nccl-tests defines it, of the transfer alone."
    )
    title = "collectives by kind and size, ms per step"
    chart = Bars([_group_label(g) for g in shown], series, "ms per step", named=True)
    return Section("Collectives", text, [Figure(title, chart)], [_groups_table(groups, steps)])


def _group_label(group: CollectiveGroup) -> str:
    size = f"{group.bytes / 1e6:,.2f} MB" if group.bytes >= 0 else "size unknown"
    return f"{group.collective}, {size}, {group.ranks} ranks"


def _groups_table(groups: Sequence[CollectiveGroup], steps: int) -> Table:
    columns = [Column("collective"), Column("ranks", 0), Column("MB", 2), Column("per step", 1), Column("wait, ms", 3),
               Column("transfer, ms", 3), Column("both, ms per step", 3, bar=True), Column("bus GB/s", 1)]  # fmt: skip
    rows = [
        Row([g.collective, g.ranks, g.bytes / 1e6 if g.bytes >= 0 else None, g.count / steps, g.wait_ms,
             g.transfer_ms, g.count * (g.wait_ms + g.transfer_ms) / steps, g.bus_gb_s or None])
        for g in groups[:_MOST_ROWS]
    ]  # fmt: skip
    return Table("collectives by kind and size (wait and transfer: mean of one)", columns, rows, _left(groups))


def _longest(found: Sequence[Collective], most: int = 50) -> Table:
    longest = sorted(found, key=lambda c: -(c.wait_ms + c.transfer_ms))[:most]
    columns = [Column("collective"), Column("ranks", 0), Column("at, ms", 2), Column("last rank"),
               Column("worst wait, ms", 3), Column("mean wait, ms", 3), Column("transfer, ms", 3),
               Column("bus GB/s", 1)]  # fmt: skip
    rows = [
        Row([c.collective, c.ranks, c.start_ms, f"{c.last_rank}", c.worst_wait_ms, c.wait_ms, c.transfer_ms,
             c.bus_gb_s or None], rank=str(c.last_rank))
        for c in longest
    ]  # fmt: skip
    more = f"the longest {most} of {len(found):,}" if len(found) > most else ""
    return Table("single collectives, the longest first", columns, rows, more)


def hotspots_section(operators: Sequence[Hotspot], kernels: Sequence[Hotspot], text: str) -> Section:
    """GPU time by operator and by kernel."""
    figures = [
        Figure(f"GPU time by {word}, ms per step and rank", _hot_bars(spots))
        for word, spots in (("operator", operators), ("kernel", kernels))
        if spots
    ]
    tables = [_hot_table(word, spots) for word, spots in (("operator", operators), ("kernel", kernels)) if spots]
    return Section("Operators and kernels", text, figures, tables)


def _hot_bars(spots: Sequence[Hotspot]) -> Bars:
    shown = spots[:_MOST_BARS]
    return Bars([s.name for s in shown], [Series("GPU time", "compute", [s.ms for s in shown])], "ms", named=True)


def _hot_table(word: str, spots: Sequence[Hotspot]) -> Table:
    total = sum(spot.ms for spot in spots) or 1.0
    columns = [Column(word), Column("calls", 1), Column("ms", ms_digits(s.ms for s in spots), bar=True),
               Column("share, %", 1), Column("mean µs", 1)]  # fmt: skip
    rows = [Row([s.name, s.calls, s.ms, 100 * s.ms / total, s.mean_us]) for s in spots[:_MOST_ROWS]]
    return Table(f"GPU time by {word}, per step and rank", columns, rows, _left(spots))


def _left(rows: Sequence[Any]) -> str:
    return f"the first {_MOST_ROWS} of {len(rows):,}; --json has more" if len(rows) > _MOST_ROWS else ""


def utilisation_section(use: Utilisation) -> Section:
    """How busy the GPUs are over time."""
    edges = [use.bin_ms * i for i in range(use.share.shape[1])]
    lines = [Line("mean", "compute", edges, 100 * use.share.mean(axis=0), steps=True)]
    if 1 < len(use.ranks) <= _MOST_LINES:
        lines = [
            Line(f"rank {rank}", f"series-{i % 8}", edges, 100 * use.share[i], rank=str(rank), steps=True)
            for i, rank in enumerate(use.ranks)
        ]
    rows = [
        Row([str(rank), 100 * float(share.mean()), 100 * float((share < 0.05).mean())], rank=str(rank))
        for rank, share in zip(use.ranks, use.share, strict=True)
    ]
    columns = [Column("rank"), Column("busy, %", 1, bar=True), Column("bins that idle, %", 1)]
    text = f"The busy share of every {use.bin_ms:.3g} ms, from the first step's start to the last one's end."
    figure = Figure("GPU busy over time", Lines("ms", "busy, %", lines))
    return Section("GPU utilisation", text, [figure], [Table("GPU busy", columns, rows)])
