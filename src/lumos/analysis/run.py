"""Run: a simulated run as all reports see it, simulated from a trace or from a setup."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from lumos.analysis.breakdown import Breakdown, breakdown_by_rank, mean_breakdown, typical_weights
from lumos.analysis.collectives import CollectiveGroup, collectives, group_collectives
from lumos.graph.critical_path import (
    CriticalPath,
    PathSummary,
    StepPath,
    critical_path,
    last_node,
    step_path,
    summarise,
)
from lumos.graph.graph import Floats, Graph, Ints, Times, simulate
from lumos.graph.rules.build import Execution, StepNodes
from lumos.graph.rules.nodes import Nodes
from lumos.trace.steps import StepMarks, Steps
from lumos.trace.trace import Trace


class Run(Protocol):
    """A graph with its times, and the Trace that they make."""

    graph: Graph

    @property
    def origin(self) -> int:
        """The graph's time zero, on the trace's clock."""

    @property
    def times(self) -> Times:
        """When every node of the graph starts and ends."""

    @property
    def trace(self) -> Trace:
        """The run as the simulator has it."""

    @property
    def steps(self) -> Steps:
        """The steps of the trace."""

    @property
    def nodes(self) -> Nodes:
        """The trace cut into tasks: host events nest, tasks do not."""

    @property
    def task_times(self) -> tuple[Floats, Floats]:
        """When the tasks of `nodes` start and end, in nanoseconds from the origin."""

    @property
    def node_lane(self) -> Ints:
        """The lane of the trace that every node of the graph is on; -1: none."""

    @property
    def path(self) -> CriticalPath:
        """The critical path of all steps."""

    @property
    def path_summary(self) -> PathSummary:
        """What the critical path is made of, per step."""

    @property
    def collectives(self) -> list[CollectiveGroup]:
        """Collectives by kind and size."""

    @cached_property
    def breakdown_by_rank(self) -> dict[int, Breakdown]:
        """Where the typical step of every rank goes."""
        return breakdown_by_rank(self.trace, self.steps, typical_weights(self.steps))

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the typical step goes, as a mean over ranks; its parts add up to the step."""
        return mean_breakdown(list(self.breakdown_by_rank.values()))


@dataclass(frozen=True, repr=False)
class TracedRun(Run):
    """A recorded run as simulated, possibly with other durations."""

    execution: Execution
    marks: StepMarks
    graph: Graph
    duration: Floats | None = None  # of every node, where they are not the graph's own
    # Of a what-if: the typical step of the run as it was recorded, over its mean. Slower kernels may move work from one
    # step into the next, so that one step gets shorter while the run gets longer: their mean tells what changed.
    typical_share: float | None = None

    def __repr__(self) -> str:
        return f"TracedRun({self.step_ms:,.2f} ms, {self.execution!r})"

    @cached_property
    def step_ms(self) -> float:
        """The step of the run, in milliseconds."""
        return self.steps.typical if self.typical_share is None else self.typical_share * self.steps.mean

    @cached_property
    def breakdown_by_rank(self) -> dict[int, Breakdown]:
        """Where the step of every rank goes."""
        if self.typical_share is None:
            return breakdown_by_rank(self.trace, self.steps, typical_weights(self.steps))
        parts = breakdown_by_rank(self.trace, self.steps)
        return {rank: part.times(self.typical_share) for rank, part in parts.items()}

    @cached_property
    def origin(self) -> int:
        return self.execution.origin

    @cached_property
    def times(self) -> Times:
        return simulate(self.graph, self.duration)

    @cached_property
    def trace(self) -> Trace:
        return self.execution.retime(self.times)

    @cached_property
    def steps(self) -> Steps:
        return self.marks.read(self.trace)

    @cached_property
    def nodes(self) -> Nodes:
        return self.execution.nodes

    @cached_property
    def task_times(self) -> tuple[Floats, Floats]:
        size = len(self.nodes)
        return self.times.start[:size], self.times.end[:size]

    @cached_property
    def node_lane(self) -> Ints:
        lane = np.full(len(self.graph), -1, np.int64)  # a rendezvous is on no lane
        lane[: len(self.nodes)] = self.nodes.lane
        return lane

    @cached_property
    def path(self) -> CriticalPath:
        since = float(self.steps.start.min() - self.origin)
        return critical_path(self.graph, self.times, last_node(self.execution, self.marks, self.steps), since)

    @cached_property
    def path_summary(self) -> PathSummary:
        return summarise(self.execution, self.step_path, self.step_ms / self.steps.mean if self.steps.mean else 1.0)

    @cached_property
    def step_path(self) -> StepPath:
        """The mean of the critical paths of all ranks."""
        windows = StepNodes(self.execution, self.marks).windows(self.times)
        return step_path(self.graph, self.times, windows)

    @cached_property
    def collectives(self) -> list[CollectiveGroup]:
        return group_collectives(collectives(self.trace, self.execution.rendezvous, self.origin))
