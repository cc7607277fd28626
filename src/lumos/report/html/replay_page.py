"""Replay page: the report of a replayed trace."""

from __future__ import annotations

from pathlib import Path

from lumos.analysis.hotspots import top_kernels, top_operators
from lumos.analysis.replay import Replay
from lumos.report.html.allocations import memory_section
from lumos.report.html.page import Card, Page, Section
from lumos.report.html.parts import (
    breakdown_section,
    collectives_section,
    hotspots_section,
    path_section,
    rank_parts,
    timeline_section,
    utilisation_section,
)
from lumos.report.html.run_view import RunView
from lumos.report.html.table import Column, Row, Table, ms_digits
from lumos.report.wording import ms_text

_MOST_SPOTS = 200
_MOST_STEPS = 200


def replay_page(run: Replay) -> Page:
    view = RunView(run.run)
    ranks = [str(rank) for rank in run.marks.ranks]
    words = (
        "As recorded. A communication kernel counts from its arrival, so waiting for other ranks is communication "
        "here; the collectives below tell the two apart. Copies count as compute."
    )
    sections = [
        breakdown_section(rank_parts(run.recorded_breakdown), "rank", words, "all ranks, mean"),
        *([_stragglers(run)] if len(ranks) > 1 else []),
        timeline_section(view),
        path_section(run.path_summary),
        collectives_section(run.collectives, max(len(run.marks.names), 1)),
        hotspots(run),
        utilisation_section(run.utilisation),
        memory_section(run.execution.trace, run.execution.origin),
        _steps(run),
    ]
    return Page(
        title=title_of(run, "Replay"),
        subtitle=subtitle_of(run),
        cards=cards_of(run),
        sections=sections,
        notes=run.execution.warnings,
        ranks=ranks,
        kinds=view.kinds,
    )


def title_of(run: Replay, word: str) -> str:
    count = len(run.marks.ranks)
    return f"{word} of {count} rank{'s' if count > 1 else ''}: {ms_text(run.recorded_steps.mean)} per step"


def subtitle_of(run: Replay) -> str:
    headers = run.execution.trace.headers
    gpus = sorted({header.gpu for header in headers if header.gpu})
    files = sorted({Path(header.path).name for header in headers if header.path})
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return " · ".join(part for part in (", ".join(gpus), f"{len(run.execution.graph):,} tasks", shown) if part)


def cards_of(run: Replay) -> list[Card]:
    recorded, simulated = run.recorded_steps.mean, run.simulated_steps.mean
    sure = f"± {run.cost.error_pct:.0f} % (80 % interval)"
    share = 100 * run.path_summary.unexplained_ms / simulated if simulated else 0.0
    return [
        Card("recorded step", ms_text(recorded), f"mean of {len(run.marks.names)}"),
        Card("simulated step", ms_text(simulated), f"{run.error_pct:+.2f} % from the recorded one"),
        Card("without the profiler", ms_text(run.clean_ms), sure),
        Card("never profiled", ms_text(run.never_profiled_ms), "a process without CUPTI"),
        Card("unexplained", ms_text(run.path_summary.unexplained_ms), f"{share:.1f} % of the critical path"),
        Card("GPU busy", f"{100 * run.utilisation.mean:.0f} %", "mean over ranks and time"),
    ]


def hotspots(run: Replay) -> Section:
    nodes, steps = run.execution.nodes, len(run.marks.names)
    words = (
        "A mean over ranks and steps, without communication. A trace does not say how much kernels compute and move, "
        "so there is no roofline; `lumos predict` with a setup has one."
    )
    return hotspots_section(top_operators(nodes, steps, _MOST_SPOTS), top_kernels(nodes, steps, _MOST_SPOTS), words)


def _stragglers(run: Replay) -> Section:
    digits = ms_digits([s.compute_ms for s in run.stragglers] + [s.idle_ms for s in run.stragglers])
    columns = [Column("rank"), Column("costs the others, ms", digits, bar=True), Column("last in", 0), Column("of", 0),
               Column("compute, ms", digits), Column("idle, ms", digits), Column("why")]  # fmt: skip
    rows = [
        Row([str(s.rank), s.costs_others_ms, s.last_in, s.of, s.compute_ms, s.idle_ms, s.why], rank=str(s.rank))
        for s in run.stragglers
    ]
    text = "In a collective everyone waits for the last to arrive; what that costs the others is charged to the last."
    return Section("Which rank is slow", text, tables=[Table("ranks, the costliest first", columns, rows)])


def _steps(run: Replay) -> Section:
    recorded, simulated = run.recorded_steps.milliseconds.tolist(), run.simulated_steps.milliseconds.tolist()
    digits = ms_digits(recorded)
    columns = [Column("step"), Column("recorded, ms", digits, bar=True), Column("simulated, ms", digits),
               Column("difference, %", 2, signed=True)]  # fmt: skip
    rows = [
        Row([name, r, s, 100 * (s / r - 1) if r else None])
        for name, r, s in list(zip(run.marks.names, recorded, simulated, strict=True))[:_MOST_STEPS]
    ]
    more = f"the first {_MOST_STEPS} of {len(recorded):,}" if len(recorded) > _MOST_STEPS else ""
    return Section("Steps", tables=[Table("recorded and simulated steps", columns, rows, more)])
