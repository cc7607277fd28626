"""Replays and comparisons as cards and tables, for terminal, page and notebook."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from lumos.analysis.breakdown import Breakdown, Hotspot, mean_breakdown
from lumos.analysis.collectives import CollectiveGroup, CollectiveTimes
from lumos.analysis.comparison import Comparison, Difference
from lumos.analysis.replay import Replay
from lumos.graph.critical_path import SLOW_PARTS, PathSummary
from lumos.graph.rules.cpu_device import is_cpu_run
from lumos.report.table import Card, Column, Row, Table, left_out, ms_column, ms_columns, short
from lumos.report.wording import STEP_PARTS, change, ms_text, number_text, si_text

MOST_ROWS = 200
_CUDA_CALL = re.compile(r"cu(da)?[A-Z]")


# ---------------------------------------------------------------------- a replay
def device_of(run: Replay) -> str:
    return "CPU" if is_cpu_run(run.execution.trace) else "GPU"


def replay_cards(run: Replay) -> list[Card]:
    recorded, simulated = run.recorded_steps.mean, run.simulated_steps.mean
    unexplained, path_ms = run.path_summary.unexplained_ms, run.path_summary.total_ms
    share = 100 * unexplained / path_ms if path_ms else 0.0
    off = number_text(run.error_pct, 2, signed=True)
    is_cuda = any(_CUDA_CALL.match(name) for name in run.execution.trace.names)
    sure = f"± {run.cost.error_pct:.0f} % (80 % interval)"
    if not is_cuda and device_of(run) == "GPU":
        sure = "if profiling costs what it does on NVIDIA GPUs"
    never = "CUPTI stays attached once it was used" if is_cuda else "in a process that never started the profiler"
    profiler = [
        Card("without the profiler", ms_text(run.clean_ms), f"{sure}; the typical step"),
        Card("never profiled", ms_text(run.never_profiled_ms), never),
    ]
    return [
        Card("recorded step", ms_text(recorded), f"mean of {len(run.marks.names)}"),
        Card("simulated step", ms_text(simulated), f"{off} % from the recorded one"),
        *(profiler if run.is_profiled else ()),
        Card("unexplained", ms_text(unexplained), f"{share:.1f} % of the step, on the critical path"),
        Card(f"{device_of(run)} busy", f"{100 * run.utilisation.mean:.0f} %", "mean over ranks and time"),
    ]


def breakdown_table(parts: Mapping[int, Breakdown], simulated: Breakdown | None = None) -> Table:
    """Where the step goes on every rank."""
    rows = [Row([str(rank), *_with_sum(part)], rank=str(rank)) for rank, part in parts.items()]
    if len(parts) > 1:
        rows.append(Row(["all ranks, mean", *_with_sum(mean_breakdown(list(parts.values())))], is_total=True))
    if simulated is not None:
        rows.append(Row(["simulated, mean", *_with_sum(simulated)], is_total=True))
    titles = [f"{name}, ms" for name in (*STEP_PARTS.values(), "step")]
    return Table("where the step goes on every rank", [Column("rank"), *ms_columns(titles, rows)], rows)


def _with_sum(part: Breakdown) -> list[float]:
    return [*(getattr(part, key) for key in STEP_PARTS), part.step_ms]


def stragglers_table(run: Replay) -> Table:
    rows = []
    for s in run.stragglers:
        last_in = f"{s.last_in} of {s.of}"
        rows.append(Row([str(s.rank), s.costs_others_ms, last_in, s.compute_ms, s.idle_ms, s.why], rank=str(s.rank)))
    costs, compute, idle = ms_columns(("gain if like the others, ms", "compute, ms", "idle, ms"), rows)
    columns = [Column("rank"), costs._replace(bar=True), Column("last in"), compute, idle, Column("why")]
    return Table("which rank is slow", columns, rows)


def steps_table(run: Replay) -> Table:
    recorded, simulated = run.recorded_steps.milliseconds.tolist(), run.simulated_steps.milliseconds.tolist()
    rows = [
        Row([name, r, s, 100 * (s / r - 1) if r else None])
        for name, r, s in list(zip(run.marks.names, recorded, simulated, strict=True))[:MOST_ROWS]
    ]
    first, second = ms_columns(("recorded, ms", "simulated, ms"), rows)
    columns = [Column("step"), first._replace(bar=True), second, Column("difference, %", 2, signed=True)]
    return Table("steps, recorded and simulated", columns, rows, left_out(MOST_ROWS, recorded))


def ablation_table(run: Replay) -> Table:
    """How much of the step the rules explain, all together and without each."""
    rows = []
    for one in run.ablation:
        fewer = one.edges if one.without else None
        rows.append(Row([", ".join(one.without) or "none", fewer, one.step_ms, one.error_pct]))
    columns = [Column("rules left out"), Column("fewer dependencies", 0), *ms_columns(("step, ms",), rows),
               Column("error, %", 2, signed=True, bar=True)]  # fmt: skip
    return Table("nothing frozen: waits that no rule explains set to zero", columns, rows)


def sensitivities_table(run: Replay) -> Table:
    """The gain from making one part of the work twice as fast."""
    rows = [Row([one.what, one.kind, one.gain_ms, one.gain_pct, one.path_pct, one.then]) for one in run.sensitivities]
    (gain,) = ms_columns(("gain, ms",), rows)
    columns = [Column("twice as fast"), Column("kind"), gain, Column("gain, %", 1, bar=True),
               Column("share of the path, %", 1), Column("then limited by")]  # fmt: skip
    clean = ", without the profiler" if run.is_profiled else ""
    return Table(f"gain from making one part twice as fast{clean}", columns, rows)


def path_table(summary: PathSummary) -> Table:
    """What the critical path is made of, as a mean over the paths of all ranks."""
    total = summary.total_ms or 1.0
    rows = [
        Row([kind, ms, 100 * ms / total, _mostly(summary, kind)], kind=filtered_kind(kind))
        for kind, ms in summary.by_kind.items()
        if ms > 0 or (kind != "contention" and not summary.by_block)
    ]
    rows.append(Row(["critical path", summary.total_ms, 100.0, ""], is_total=True))
    columns = [Column("kind"), *ms_columns(("ms",), rows), Column("share, %", 1, bar=True), Column("mostly")]
    return Table("critical path by kind, per step", columns, rows)


def filtered_kind(kind: str) -> str:
    """The kind by which the filter of a page finds a row; waiting is found by any."""
    return "" if kind in ("contention", "latency", "unexplained", SLOW_PARTS) else kind


def _mostly(summary: PathSummary, kind: str) -> str:
    found = [f"{short(name, 28)} {ms:.2f}" for k, name, ms in summary.by_operator if k == kind]
    return ", ".join(found[:3])


def hot_table(spots: Sequence[Hotspot], title: str) -> Table:
    """Operators or kernels by the time they take on the GPU."""
    total = sum(spot.ms for spot in spots) or 1.0
    rows = [Row([s.name, s.calls, s.ms, 100 * s.ms / total, s.mean_us]) for s in spots[:MOST_ROWS]]
    time = ms_column("ms", (s.ms for s in spots))
    columns = [Column("name"), Column("calls", 1), time._replace(bar=True),
               Column("share, %", 1), Column("mean µs", 1)]  # fmt: skip
    return Table(f"{title}, per step and rank", columns, rows, left_out(MOST_ROWS, spots))


def groups_table(groups: Sequence[CollectiveGroup], steps: int) -> Table:
    times = [(g.wait_ms, g.transfer_ms, g.count * (g.wait_ms + g.transfer_ms) / steps) for g in groups[:MOST_ROWS]]
    titles = ("wait, ms", "transfer, ms", "both per step, ms")
    wait, transfer, both = (ms_column(title, [some[i] for some in times]) for i, title in enumerate(titles))
    columns = [Column("collective"), Column("ranks", 0), Column("size", form=partial(si_text, unit="B")),
               Column("per step", 1), wait, transfer, both._replace(bar=True), Column("bus GB/s", 1)]  # fmt: skip
    rows = [
        Row([g.collective, g.ranks, g.bytes if g.bytes >= 0 else None, g.count / steps, *some, g.bus_gb_s or None])
        for g, some in zip(groups, times, strict=False)
    ]
    title = "collectives by kind and size (wait and transfer: mean of one)"
    return Table(title, columns, rows, left_out(MOST_ROWS, groups))


def longest_collectives_table(found: Sequence[CollectiveTimes], most: int = 50) -> Table:
    longest = sorted(found, key=lambda c: -(c.wait_ms + c.transfer_ms))[:most]
    at, worst, mean, transfer = (
        ms_column(title, (float(getattr(c, key)) for c in longest))
        for title, key in (("at, ms", "start_ms"), ("worst wait, ms", "worst_wait_ms"), ("mean wait, ms", "wait_ms"),
                           ("transfer, ms", "transfer_ms"))
    )  # fmt: skip
    columns = [Column("collective"), Column("ranks", 0), at, Column("last rank"), worst, mean, transfer,
               Column("bus GB/s", 1)]  # fmt: skip
    rows = [
        Row([c.collective, c.ranks, c.start_ms, str(c.last_rank), c.worst_wait_ms, c.wait_ms, c.transfer_ms,
             c.bus_gb_s or None], rank=str(c.last_rank))
        for c in longest
    ]  # fmt: skip
    return Table("single collectives, the longest first", columns, rows, left_out(most, found))


# ---------------------------------------------------------------------- a comparison
def comparison_cards(found: Comparison) -> list[Card]:
    before, after = found.before.recorded_steps.mean, found.after.recorded_steps.mean
    worst = max(found.parts, key=lambda part: abs(part.change_ms))
    return [
        Card("before", ms_text(before), f"mean of {len(found.before.marks.names)} recorded"),
        Card("after", ms_text(after), f"mean of {len(found.after.marks.names)} recorded"),
        Card("change", ms_text(after - before, signed=True), change(after, before)),
        Card("mostly", ms_text(worst.change_ms, signed=True), STEP_PARTS[worst.name]),
    ]


def parts_table(parts: Sequence[Difference]) -> Table:
    """The parts of the step; their changes add up to its change."""
    rows = [Row([STEP_PARTS[part.name], part.before_ms, part.after_ms, part.change_ms]) for part in parts]
    total = [sum(part.before_ms for part in parts), sum(part.after_ms for part in parts)]
    rows.append(Row(["step", *total, total[1] - total[0]], is_total=True))
    columns = [Column("part"), *ms_columns(("before, ms", "after, ms", "change, ms"), rows)]
    return Table("parts of the step, mean over ranks", columns, rows)


def differences_table(title: str, parts: Sequence[Difference]) -> Table:
    """Operators or collectives, the largest change first."""
    rows = [
        Row([p.name, p.before_ms, p.before_calls, p.after_ms, p.after_calls, p.change_ms]) for p in parts[:MOST_ROWS]
    ]
    before, after, by = ms_columns(("before, ms", "after, ms", "change, ms"), rows)
    calls = Column("calls", 1)
    columns = [Column("name"), before, calls, after, calls, by._replace(bar=True)]
    return Table(f"{title}, before and after", columns, rows, left_out(MOST_ROWS, parts))
