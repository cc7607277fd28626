"""Replay: build the graph of a run, simulate it, and say where the time goes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lumos.analysis.breakdown import Breakdown, breakdown_by_rank, mean_breakdown
from lumos.analysis.collectives import Collective, collectives, group_collectives
from lumos.analysis.hotspots import Hotspot, top_kernels, top_operators
from lumos.analysis.stragglers import Straggler, stragglers
from lumos.analysis.utilisation import Utilisation, utilisation
from lumos.graph.critical_path import CriticalPath, PathSummary, critical_path, last_node, summarise
from lumos.graph.from_trace.build import Execution, build
from lumos.graph.from_trace.profiler_cost import ProfilerCost, load_profiler_cost, without_profiler
from lumos.graph.graph import Floats, Graph
from lumos.graph.scaling import Scale, scaled_durations
from lumos.graph.simulate import Times, simulate
from lumos.trace.steps import StepMarks, Steps, find_steps
from lumos.trace.trace import Trace


@dataclass(frozen=True)
class Replay:
    """A run that was read, built and simulated; its reports are worked out when they are asked for."""

    execution: Execution
    marks: StepMarks
    cost: ProfilerCost

    @cached_property
    def times(self) -> Times:
        return simulate(self.execution.graph)

    @cached_property
    def simulated(self) -> Trace:
        """The run as the simulator has it."""
        return self.execution.retime(self.times)

    @cached_property
    def recorded_steps(self) -> Steps:
        return self.marks.read(self.execution.trace)

    @cached_property
    def simulated_steps(self) -> Steps:
        return self.marks.read(self.simulated)

    @cached_property
    def clean_graph(self) -> Graph:
        """The graph without the profiler's cost."""
        return without_profiler(self.execution, self.cost)

    @cached_property
    def clean_steps(self) -> Steps:
        return self._steps_at(self.cost)

    def _steps_at(self, cost: ProfilerCost) -> Steps:
        """The steps without the profiler; neither the graph nor the run is kept, as they are large."""
        return self.marks.read(self.execution.retime(simulate(without_profiler(self.execution, cost))))

    @property
    def clean_ms(self) -> float:
        """The step without the profiler, in milliseconds."""
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
    def path(self) -> CriticalPath:
        """The critical path of all steps."""
        since = float(self.simulated_steps.start.min() - self.execution.origin)
        return critical_path(
            self.execution.graph, self.times, last_node(self.execution, self.marks, self.simulated_steps), since
        )

    @cached_property
    def path_summary(self) -> PathSummary:
        return summarise(self.execution, self.times, self.path, len(self.marks.names))

    @cached_property
    def recorded_breakdown(self) -> dict[int, Breakdown]:
        return breakdown_by_rank(self.execution.trace, self.recorded_steps)

    @cached_property
    def simulated_breakdown(self) -> dict[int, Breakdown]:
        return breakdown_by_rank(self.simulated, self.simulated_steps)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        steps = len(self.marks.names)
        return stragglers(
            self.execution, self.execution.trace, self.recorded_breakdown, steps, self.recorded_steps.mean
        )

    @cached_property
    def collectives(self) -> list[Collective]:
        return collectives(self.execution, self.execution.trace)

    @cached_property
    def utilisation(self) -> Utilisation:
        return utilisation(self.execution.trace, self.recorded_steps)

    def kernels(self) -> list[Hotspot]:
        return top_kernels(self.execution.nodes, len(self.marks.names))

    def operators(self) -> list[Hotspot]:
        return top_operators(self.execution.nodes, len(self.marks.names))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import replay_snippet

        return replay_snippet(self)

    def as_dict(self) -> dict[str, Any]:
        """The answer of `lumos replay --json`."""
        recorded, simulated = self.recorded_steps, self.simulated_steps
        steps = zip(self.marks.names, recorded.milliseconds, simulated.milliseconds, strict=True)
        return {
            "ranks": len(self.marks.ranks),
            "tasks": len(self.execution.graph),
            "recorded_ms": round(recorded.mean, 4),
            "simulated_ms": round(simulated.mean, 4),
            "error_pct": round(self.error_pct, 4),
            "clean_ms": round(self.clean_ms, 4),
            "never_profiled_ms": round(self.never_profiled_ms, 4),
            "unexplained_ms": round(self.path_summary.unexplained_ms, 4),
            "steps": [
                {"name": n, "recorded_ms": round(float(r), 4), "simulated_ms": round(float(s), 4)} for n, r, s in steps
            ],
            "breakdown": {
                "recorded": mean_breakdown(list(self.recorded_breakdown.values())).as_dict(),
                "simulated": mean_breakdown(list(self.simulated_breakdown.values())).as_dict(),
            },
            "stragglers": [_rounded(s) for s in self.stragglers],
            "per_rank": [{"rank": r, **b.as_dict()} for r, b in self.recorded_breakdown.items()],
            "critical_path": {
                "by_kind_ms": {k: round(v, 4) for k, v in self.path_summary.by_kind.items()},
                "by_operator": [{"kind": k, "name": n, "ms": round(v, 4)} for k, n, v in self.path_summary.by_operator],
            },
            "kernels": [_rounded(h) for h in self.kernels()],
            "operators": [_rounded(h) for h in self.operators()],
            "collective_groups": [_rounded(g) for g in group_collectives(self.collectives)],
            "collectives": [_rounded(c) for c in self.collectives],
            "utilisation": {
                "mean": round(self.utilisation.mean, 4),
                "bin_ms": self.utilisation.bin_ms,
                "share": [round(float(s), 3) for s in self.utilisation.share.mean(axis=0)],
            },
            "warnings": list(self.execution.warnings),
        }


def replay(source: Trace | Execution, cost: ProfilerCost | None = None) -> Replay:
    """Build and simulate a trace; what is a graph already is taken as it is."""
    execution = source if isinstance(source, Execution) else build(source)
    return Replay(execution, find_steps(execution.trace), cost or load_profiler_cost())


@dataclass(frozen=True)
class Prediction:
    """What a changed run would take, without the profiler."""

    run: Replay
    scales: tuple[Scale, ...]

    @cached_property
    def duration(self) -> Floats:
        return scaled_durations(self.run.execution, self.run.clean_graph.duration, list(self.scales))

    @cached_property
    def times(self) -> Times:
        return simulate(self.run.clean_graph, self.duration)

    @cached_property
    def trace(self) -> Trace:
        """The predicted run."""
        return self.run.execution.retime(self.times)

    @cached_property
    def steps(self) -> Steps:
        return self.run.marks.read(self.trace)

    @property
    def step_ms(self) -> float:
        """The predicted step, in milliseconds."""
        return self.steps.typical

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import prediction_snippet

        return prediction_snippet(self)

    def as_dict(self) -> dict[str, Any]:
        """The answer of `lumos predict --from --json`."""
        step = self.step_ms
        error = self.run.cost.error_pct / 100
        parts = list(breakdown_by_rank(self.trace, self.steps).values())
        return {
            "step_ms": round(step, 4),
            "baseline_ms": round(self.run.clean_ms, 4),
            "interval_ms": [round(step * (1 - error), 4), round(step * (1 + error), 4)],
            "breakdown": mean_breakdown(parts).as_dict(),
            "warnings": list(self.run.execution.warnings),
        }


def predict(run: Replay, scales: list[Scale]) -> Prediction:
    """The run with some of its tasks faster or slower."""
    return Prediction(run, tuple(scales))


def _rounded(record: Any) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(record).items()}
