"""Replay: build the graph of a run, simulate it, report where the time goes, and how much of it the rules explain.

A graph that keeps every recorded wait replays perfectly, whatever its rules say. The ablation therefore sets every wait
that no rule explains to zero before the graph is simulated: what the step lacks then is the honest error of the replay.
The same without a rule shows what that rule explains. The start of a thread or stream is kept: a recording starts
somewhere. Without `thread` or `collective`, a pause or a transfer keeps its recorded time, waiting included: both rows
flatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lumos.analysis.answers import PathAnswer, ReplayAnswer
from lumos.analysis.breakdown import (
    Breakdown,
    Hotspot,
    Utilisation,
    breakdown_by_rank,
    hotspots,
    mean_breakdown,
    utilisation,
)
from lumos.analysis.collectives import CollectiveTimes, collectives, group_collectives
from lumos.analysis.run import TracedRun
from lumos.analysis.sensitivities import Sensitivity, WhatIf, sensitivities
from lumos.analysis.slowdown_jobs import rank_job
from lumos.analysis.stragglers import Straggler, stragglers
from lumos.arguments import checks_arguments
from lumos.data_files import read_table
from lumos.graph.critical_path import CriticalPath, PathSummary, summarise
from lumos.graph.graph import Graph, Times, simulate
from lumos.graph.rules.build import RULE_NAMES, Execution, build
from lumos.graph.rules.profiler_cost import ProfilerCost, is_profiled, load_profiler_cost, without_profiler
from lumos.graph.rules.sync import LONGEST_RETURN, SYNCHRONISING
from lumos.read.job import read_job
from lumos.tables import frame
from lumos.trace.steps import StepMarks, Steps, find_steps
from lumos.trace.trace import Trace

if TYPE_CHECKING:
    from polars import DataFrame

_LIMITS = read_table("analysis.toml")["replay"]
# What replays that know only launches, synchronisation and collectives lack: everything between streams.
BETWEEN_STREAMS = ("event", "communicator", "channel")


@dataclass(frozen=True, repr=False)
class Replay:
    """A run that was read, built and simulated; its reports are worked out when they are asked for."""

    execution: Execution
    marks: StepMarks
    cost: ProfilerCost

    def __repr__(self) -> str:
        ranks, recorded = len(self.execution.trace.ranks), self.recorded_steps.mean
        return f"Replay({ranks} ranks, {recorded:,.2f} ms recorded, {self.error_pct:+.2f}% simulated)"

    def table(self) -> DataFrame:
        """The step-time breakdown, one row per rank."""
        return frame([{"rank": rank, **row.as_dict()} for rank, row in self.recorded_breakdown.items()])

    @cached_property
    def run(self) -> TracedRun:
        """The run as simulated."""
        return TracedRun(self.execution, self.marks, self.execution.graph)

    @property
    def times(self) -> Times:
        return self.run.times

    @property
    def simulated(self) -> Trace:
        """The run as the simulator has it."""
        return self.run.trace

    @cached_property
    def recorded_steps(self) -> Steps:
        return self.marks.read(self.execution.trace)

    @property
    def simulated_steps(self) -> Steps:
        return self.run.steps

    @cached_property
    def clean_graph(self) -> Graph:
        """The graph without the profiler's cost."""
        return without_profiler(self.execution, self.cost)

    @property
    def clean_run(self) -> TracedRun:
        """The run as simulated without the profiler; it is large, and not kept."""
        return TracedRun(self.execution, self.marks, self.clean_graph)

    @cached_property
    def clean_steps(self) -> Steps:
        return self._steps_at(self.cost)

    def _steps_at(self, cost: ProfilerCost) -> Steps:
        """The steps without the profiler; neither the graph nor the run is kept, as they are large."""
        return self.marks.read(self.execution.retime(simulate(without_profiler(self.execution, cost))))

    @property
    def is_profiled(self) -> bool:
        """Whether the recorded times include what a profiler costs."""
        return is_profiled(self.execution)

    @property
    def clean_ms(self) -> float:
        """The step without the profiler, in milliseconds; the step itself where there was none."""
        return self.clean_steps.typical

    @cached_property
    def never_profiled_ms(self) -> float:
        """The step in a process that was never profiled, in milliseconds."""
        return self._steps_at(self.cost.fresh()).typical

    @property
    def error_pct(self) -> float:
        recorded = self.recorded_steps.mean
        return 100 * (self.simulated_steps.mean / recorded - 1) if recorded else 0.0

    @cached_property
    def ablation(self) -> tuple[Ablation, ...]:
        """The step with nothing frozen, under all rules and without some; the graph is built again for each."""
        return tuple(ablate(self.execution))

    @cached_property
    def what_if(self) -> WhatIf:
        """The run without the profiler, to be simulated with other durations."""
        return WhatIf(self.execution, self.marks, self.clean_graph)

    @property
    def path(self) -> CriticalPath:
        """The critical path of all steps of the rank that ends last, without the profiler."""
        return self.clean_run.path

    @cached_property
    def path_summary(self) -> PathSummary:
        """The critical path of the typical step without the profiler."""
        step = self.what_if.base
        return summarise(self.execution, step.path, 1e6 * self.clean_ms / step.ns if step.ns else 1.0)

    @cached_property
    def sensitivities(self) -> list[Sensitivity]:
        """The gain from making each part of the work twice as fast, the largest first."""
        return sensitivities(self.what_if, self.clean_ms)

    @cached_property
    def recorded_breakdown(self) -> dict[int, Breakdown]:
        return breakdown_by_rank(self.execution.trace, self.recorded_steps)

    @cached_property
    def simulated_breakdown(self) -> dict[int, Breakdown]:
        return breakdown_by_rank(self.simulated, self.simulated_steps)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """What each rank costs the job; the same gains as in the causes of `lumos stragglers`."""
        steps, ranks = len(self.marks.names), self.marks.ranks
        job = rank_job(self.run) if len(ranks) > 1 else None

        def gain_ms(rank: int) -> float:
            assert job is not None
            return self.simulated_steps.mean - float(job.step_ms([job.like_others(ranks.index(rank))]).mean())

        return stragglers(self.execution, self.recorded_breakdown, steps, self.recorded_steps.mean, gain_ms)

    @cached_property
    def collectives(self) -> list[CollectiveTimes]:
        return collectives(self.execution.trace, self.execution.rendezvous, self.execution.origin)

    @cached_property
    def utilisation(self) -> Utilisation:
        return utilisation(self.execution.trace, self.recorded_steps)

    def kernels(self, most: int = 15) -> list[Hotspot]:
        return hotspots(self.execution.nodes, len(self.marks.names), by_operator=False)[:most]

    def operators(self, most: int = 15) -> list[Hotspot]:
        return hotspots(self.execution.nodes, len(self.marks.names), by_operator=True)[:most]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import replay_snippet

        return replay_snippet(self)

    def as_dict(self, ablate: bool = False) -> dict[str, Any]:
        """The answer of `lumos replay --json`, on request with `--ablate`."""
        if not ablate:
            return self.answer.as_dict()
        whole, rows = self.ablation[0], [asdict(one) | {"without": list(one.without)} for one in self.ablation]
        unfrozen_step = {"unfrozen_ms": whole.step_ms, "unfrozen_error_pct": whole.error_pct}
        return self.answer.as_dict() | unfrozen_step | {"ablation": rows}

    @cached_property
    def answer(self) -> ReplayAnswer:
        recorded, simulated, path = self.recorded_steps, self.simulated_steps, self.path_summary
        steps = zip(self.marks.names, recorded.milliseconds.tolist(), simulated.milliseconds.tolist(), strict=True)
        return ReplayAnswer(
            ranks=len(self.marks.ranks),
            tasks=len(self.execution.graph),
            recorded_ms=recorded.mean,
            simulated_ms=simulated.mean,
            error_pct=self.error_pct,
            clean_ms=self.clean_ms if self.is_profiled else None,
            never_profiled_ms=self.never_profiled_ms if self.is_profiled else None,
            unexplained_ms=path.unexplained_ms,
            steps=[{"name": name, "recorded_ms": r, "simulated_ms": s} for name, r, s in steps],
            breakdown={
                "recorded": mean_breakdown(list(self.recorded_breakdown.values())),
                "simulated": mean_breakdown(list(self.simulated_breakdown.values())),
            },
            sensitivities=self.sensitivities,
            stragglers=self.stragglers,
            per_rank=[{"rank": rank, **part.as_dict()} for rank, part in self.recorded_breakdown.items()],
            critical_path=PathAnswer(
                total_ms=path.total_ms,
                by_kind_ms=path.by_kind,
                by_operator=[{"kind": kind, "name": name, "ms": ms} for kind, name, ms in path.by_operator],
            ),
            kernels=self.kernels(),
            operators=self.operators(),
            collective_groups=group_collectives(self.collectives),
            collectives=self.collectives,
            utilisation={
                "mean": round(self.utilisation.mean, 4),
                "bin_ms": self.utilisation.bin_ms,
                "share": self.utilisation.share.mean(axis=0).round(3).tolist(),
            },
            warnings=list(self.execution.warnings),
        )


@checks_arguments
def replay(source: Trace | Execution | Path | str, cost: ProfilerCost | Path | str | None = None) -> Replay:
    """Build and simulate a trace, or the traces at a path; what is a graph already is taken as it is.

    `cost` is what the profiler costs, or the path of its file.
    """
    cost = cost if isinstance(cost, ProfilerCost) else load_profiler_cost(None if cost is None else Path(cost))
    source = read_job(source) if isinstance(source, Path | str) else source
    execution = source if isinstance(source, Execution) else build(source)
    run = Replay(execution, find_steps(execution.trace), cost)
    doubts = _doubts(run)
    return replace(run, execution=replace(execution, warnings=(*execution.warnings, *doubts))) if doubts else run


def _doubts(run: Replay) -> list[str]:
    """What no training step is like: then the trace is damaged, or its steps are not what they seem."""
    recorded, typical, error = run.recorded_steps.mean, run.recorded_steps.typical, run.error_pct
    is_doubted = {
        "too_long": recorded > _LIMITS["longest_step_ms"],
        "too_short": recorded < _LIMITS["shortest_step_ms"],
        "uneven": typical < _LIMITS["shortest_share"] * recorded,
        "contradictory": abs(error) > _LIMITS["most_error_pct"],
    }
    values = {"hours": recorded / 3.6e6, "us": recorded * 1e3, "error": error}
    return [_LIMITS["doubts"][name].format(**values) for name, holds in is_doubted.items() if holds]


@dataclass(frozen=True)
class Ablation:
    """The step with nothing frozen, under some of the rules."""

    without: tuple[str, ...]
    edges: int  # fewer than with all rules; negative if others came in their place
    step_ms: float
    error_pct: float  # from the recorded step


def ablate(execution: Execution) -> Iterator[Ablation]:
    """All rules first, then without each that states something here, then without all that order streams."""
    edges = len(execution.graph.edges)
    for without in ((), *((name,) for name in RULE_NAMES), BETWEEN_STREAMS):
        reduced = build(execution.trace, without) if without else execution
        fewer = edges - len(reduced.graph.edges)
        if fewer or not without:
            marks = find_steps(reduced.trace)
            recorded = marks.read(reduced.trace).mean
            step = marks.read(reduced.retime(simulate(unfrozen(reduced)))).mean
            yield Ablation(without, fewer, step, 100 * (step / recorded - 1) if recorded else 0.0)


def unfrozen(execution: Execution) -> Graph:
    """The graph without the waits that no rule explains; where a lane begins is not one of them.

    A synchronising call that outlasts everything it is known to wait for waited for something else.
    """
    graph, nodes, trace = execution.graph, execution.nodes, execution.trace
    waits = np.zeros(len(graph), bool)
    waits[: len(nodes)] = nodes.is_return & np.isin(trace.call[nodes.row], SYNCHRONISING) & (nodes.row >= 0)
    duration = np.where(waits, np.minimum(graph.duration, LONGEST_RETURN), graph.duration)
    edges = replace(graph.edges, frozen=np.zeros(len(graph.edges)))
    return replace(graph, duration=duration, frozen=np.where(graph.is_first, graph.frozen, 0.0), edges=edges)
