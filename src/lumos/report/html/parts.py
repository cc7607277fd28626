"""Parts: sections that several kinds of report have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lumos.analysis.breakdown import Breakdown, Hotspot, Utilisation
from lumos.analysis.collectives import CollectiveGroup, CollectiveTimes, group_collectives
from lumos.export.launch_files import LaunchFiles
from lumos.graph.critical_path import SLOW_PARTS, PathSummary
from lumos.report import replays
from lumos.report.html.charts import Bars, Line, Lines, Series
from lumos.report.html.page import Figure, Page, Section
from lumos.report.html.timeline import RunTimeline, lanes_table
from lumos.report.table import Column, Row, Table, ms_columns
from lumos.report.wording import STEP_PARTS as PART_NAMES
from lumos.report.wording import ms_text, si_text

STEP_PARTS = {
    key: (name, colour)
    for (key, name), colour in zip(PART_NAMES.items(), ("compute", "comm", "overlapped", "idle"), strict=True)
}
_PATH = "Only work on this path is worth making faster, and less so if another path is nearly as long. "
_DESCRIBED_PATH = "Latency is the cost of launches and of links between pipeline stages."
_TRACED_PATH = (
    "It runs across ranks; shares are a mean over the paths that end the step of each rank. Contention is what kernels "
    "lose to communication beside them, latency the cost of launches, queues, links and waits between lanes; "
    "unexplained time was recorded, and no dependency accounts for it."
)
_MOST_BARS = 20
_MOST_LINES = 8


def bars_section(title: str, text: str, chart: Bars, table: Table) -> Section:
    """A chart and the table of its numbers, under the caption of the table."""
    return Section(title, text, [Figure(table.caption, chart)], [table])


def with_launch(page: Page, launch: LaunchFiles | None) -> Page:
    """A page with the files that launch its configuration, if they were asked for."""
    if launch is None:
        return page
    files = Section("Launch files", f"The configuration for {launch.tool}.", texts=list(launch.files.items()))
    return replace(page, sections=[*page.sections, files])


def breakdown_section(parts: Mapping[int, Breakdown], text: str) -> Section:
    """Where the step goes on every rank."""
    series = [
        Series(name, colour, [getattr(part, key) for part in parts.values()])
        for key, (name, colour) in STEP_PARTS.items()
    ]
    chart = Bars([f"rank {rank}" for rank in parts], series, "ms per step", ranks=[str(rank) for rank in parts])
    return bars_section("Step breakdown", text, chart, replays.breakdown_table(parts))


def before_and_after_section(
    title: str, text: str, names: Sequence[str], before: Sequence[float], after: Sequence[float], table: Table
) -> Section:
    """The parts of two steps side by side."""
    series = [Series("before", "plain", before), Series("after", "compute", after)]
    return bars_section(title, text, Bars(names, series, "ms per step", grouped=True), table)


def timeline_section(found: RunTimeline, text: str = "") -> Section:
    """The critical path and what runs around it; `text` comes first."""
    drawn = found.drawn
    title = f"{found.step}, {ms_text(drawn.chart.span_ms)} from the first rank's start to the last one's end"
    text += "The critical path is the line: what lies on it decides when the step ends. " + drawn.words
    return Section("Timeline", text, [Figure(title, drawn.chart)], [lanes_table(drawn)])


def path_section(summary: PathSummary) -> Section:
    """What the critical path is made of."""
    kinds = {kind: ms for kind, ms in summary.by_kind.items() if ms > 0} or summary.by_kind
    total = summary.total_ms or 1.0
    series = [Series(kind, kind, [ms], kind=replays.filtered_kind(kind)) for kind, ms in kinds.items()]
    rows = [
        Row([name, kind, ms, 100 * ms / total], kind=replays.filtered_kind(kind))
        for kind, name, ms in summary.by_operator
    ]
    (ms_column,) = ms_columns(("ms",), rows)
    columns = [Column("operator"), Column("kind"), ms_column._replace(bar=True), Column("share, %", 1)]
    more = f"the longest {len(rows)}" if len(rows) >= 50 else ""
    by_name = Table("critical path by operator, per step", columns, rows, more)
    text = _PATH + (_DESCRIBED_PATH if summary.by_block else _TRACED_PATH)
    if SLOW_PARTS in kinds:
        text += " The slow parts of the cluster, above, lengthen the step by the rest."
    chart = Bars(["critical path"], series, "ms per step")
    found = bars_section("Critical path", text, chart, replays.path_table(summary))
    return replace(found, tables=[*found.tables, by_name, *_blocks_table(summary)])


def _blocks_table(summary: PathSummary) -> list[Table]:
    """Where on the pipeline the path of a described step runs."""
    if not summary.by_block:
        return []
    total = summary.total_ms or 1.0
    rows = [Row([what, str(rank), ms, 100 * ms / total], rank=str(rank)) for what, rank, ms in summary.by_block]
    between = total - sum(ms for *_, ms in summary.by_block)
    rows.append(Row(["links, launches, slow parts and unexplained time", "", between, 100 * between / total]))
    (ms_column,) = ms_columns(("ms",), rows)
    columns = [Column("block"), Column("rank"), ms_column._replace(bar=True), Column("share, %", 1)]
    return [Table("critical path by block and rank", columns, rows)]


def collectives_section(groups: Sequence[CollectiveGroup], steps: int) -> Section:
    """Waiting for the last rank, apart from moving data."""
    if not groups:
        return Section("Collectives", "No collective of several ranks: nothing to wait for.")
    shown = groups[:_MOST_BARS]
    series = [
        Series("waiting for the last rank", "wait", [g.count * g.wait_ms / steps for g in shown]),
        Series("transfer", "comm", [g.count * g.transfer_ms / steps for g in shown]),
    ]
    text = (
        "Waiting is counted from a rank's arrival to the last one's, as a mean over the ranks, and is no fault of the "
        "network; transfer is what is left. Bus bandwidth as nccl-tests defines it, of the transfer alone."
    )
    chart = Bars([_group_label(g) for g in shown], series, "ms per step", named=True)
    return bars_section("Collectives", text, chart, replays.groups_table(groups, steps))


def recorded_collectives_section(found: Sequence[CollectiveTimes], steps: int) -> Section:
    """The same with the longest ones by themselves."""
    section = collectives_section(group_collectives(list(found)), steps)
    return replace(section, tables=[*section.tables, replays.longest_collectives_table(found)]) if found else section


def _group_label(group: CollectiveGroup) -> str:
    size = si_text(group.bytes, "B") if group.bytes >= 0 else "size unknown"
    return f"{group.collective}, {size}, {group.ranks} ranks"


def hotspots_section(by_name: Mapping[str, Sequence[Hotspot]], text: str, device: str = "GPU") -> Section:
    """Time by operator and by kernel."""
    figures, tables = [], []
    for title, spots in by_name.items():
        if spots:
            shown = spots[:_MOST_BARS]
            series = [Series(f"{device} time", "compute", [s.ms for s in shown])]
            tables.append(replays.hot_table(spots, title))
            figures.append(Figure(tables[-1].caption, Bars([s.name for s in shown], series, "ms", named=True)))
    return Section("Operators and kernels", text, figures, tables)


def utilisation_section(use: Utilisation, device: str = "GPU") -> Section:
    """How busy the devices are over time."""
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
    figure = Figure(f"{device} busy over time", Lines("ms", "busy, %", lines))
    return Section(f"{device} utilisation", text, [figure], [Table(f"{device} busy", columns, rows)])
