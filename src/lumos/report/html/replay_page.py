"""Replay page: the report of a replayed trace."""

from __future__ import annotations

from pathlib import Path

from lumos.analysis.replay import Replay
from lumos.report.html.allocations import memory_section
from lumos.report.html.page import Page, Section
from lumos.report.html.parts import (
    breakdown_section,
    hotspots_section,
    path_section,
    recorded_collectives_section,
    timeline_section,
    utilisation_section,
)
from lumos.report.html.roofline import traced_operators_sections
from lumos.report.html.timeline import run_timeline
from lumos.report.replays import (
    MOST_ROWS,
    ablation_table,
    device_of,
    replay_cards,
    sensitivities_table,
    steps_table,
    stragglers_table,
)
from lumos.report.wording import ms_text
from lumos.traced.traced_operators import TracedOperators

_BREAKDOWN = (
    "As recorded. A collective counts from its arrival, so waiting for other ranks is communication here; "
    "the collectives below tell the two apart. Copies count as compute."
)
_SENSITIVITIES = (
    "Simulated, without what the profiler cost: the gain if one part of the work took half its time. It is at most "
    "half of that part's share of the critical path, and less if another path is nearly as long; a rank that starts "
    "before the others may gain a little more. The last column is the kind of work with the largest share of the path "
    "after that."
)
_STRAGGLERS = (
    "The gain is simulated: what the step would be shorter by if the rank took as long for each task as the others do. "
    "In a collective everyone waits for the last to arrive."
)
_ABLATION = (
    "A graph that keeps every recorded wait replays perfectly. Here each wait that no rule explains is set to zero, "
    "with all rules and without each of them; what the step lacks then is the honest error of the replay."
)
_HOTSPOTS = "A mean over ranks and steps, without communication."
_MORE_OPERATORS = " With --operators, a report has the rates of operators by shape, and their roofline."


def replay_page(run: Replay, ablate: bool = False, operators: TracedOperators | None = None) -> Page:
    """The whole report; with the rates of operators, if they are given."""
    timeline = run_timeline(run.clean_run)
    ranks = [str(rank) for rank in run.marks.ranks]
    spots = {
        f"{device_of(run)} time by operator": run.operators(MOST_ROWS),
        f"{device_of(run)} time by kernel": run.kernels(MOST_ROWS),
    }
    stragglers = Section("Which rank is slow", _STRAGGLERS, tables=[stragglers_table(run)])
    faster = Section("What would help", _SENSITIVITIES, tables=[sensitivities_table(run)])
    sections = [
        faster,
        breakdown_section(run.recorded_breakdown, _BREAKDOWN),
        *([stragglers] if len(ranks) > 1 else []),
        timeline_section(timeline, "Simulated, without the profiler. " if run.is_profiled else ""),
        path_section(run.path_summary),
        recorded_collectives_section(run.collectives, max(len(run.marks.names), 1)),
        *(traced_operators_sections(operators) if operators is not None else []),
        hotspots_section(spots, _HOTSPOTS + ("" if operators else _MORE_OPERATORS), device_of(run)),
        utilisation_section(run.utilisation, device_of(run)),
        memory_section(run.execution.trace, run.execution.origin),
        Section("Steps", tables=[steps_table(run)]),
        *([Section("What the dependency rules explain", _ABLATION, tables=[ablation_table(run)])] if ablate else []),
    ]
    notes = [*run.execution.warnings, *(operators.warnings if operators is not None else [])]
    return Page(replay_title(run), subtitle_of(run), replay_cards(run), sections, notes, ranks, kinds=timeline.kinds)


def replay_title(run: Replay) -> str:
    count = len(run.marks.ranks)
    return f"Replay of {count} rank{'s' if count > 1 else ''}: {ms_text(run.recorded_steps.mean)} per step"


def subtitle_of(run: Replay) -> str:
    headers = run.execution.trace.headers
    gpus = sorted({header.gpu for header in headers if header.gpu})
    files = sorted({Path(header.path).name for header in headers if header.path})
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return " · ".join(part for part in (", ".join(gpus), f"{len(run.execution.graph):,} tasks", shown) if part)
