"""The tasks that every step of a traced run repeats, and how long each took in which step.

A task recurs if its lane runs an event of the same name, for the same how-manieth time, in other steps too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.replay import Replay
from lumos.analysis.stragglers import group_medians, step_of_nodes
from lumos.graph.graph import Floats, Graph, Ints
from lumos.graph.rules.nodes import Nodes
from lumos.trace.names import Kind
from lumos.trace.operations import numbered, occurrence

HOST, KERNEL, TRANSFER = 0, 1, 2
PARTS = ("host", "kernel", "collective")


@dataclass(frozen=True)
class RecurringTasks:
    """Which recurring task every node of a graph is, and the durations of tasks in all steps, in nanoseconds."""

    graph: Graph
    step: Ints  # of every node: the index of its step, -1 outside of all
    rank: Ints  # of every node: the index of its rank
    part: NDArray[np.uint8]  # of every node: HOST, KERNEL or TRANSFER
    task: Ints  # of every node; -1 where it has none
    times: Floats  # (tasks, steps); not a number where a step has no such task

    @property
    def steps(self) -> int:
        return int(self.times.shape[1])

    @property
    def ranks(self) -> int:
        return int(self.rank.max(initial=0)) + 1

    @cached_property
    def typical(self) -> Floats:
        """Of every task: the median of the steps that have it."""
        return np.nanmedian(self.times, axis=1) if len(self.times) else np.zeros(0)

    @cached_property
    def typical_duration(self) -> Floats:
        """Of every node: that of its task, or its own."""
        return np.where(self.task >= 0, self.typical[self.task], self.graph.duration) if len(self.times) else (
            self.graph.duration
        )  # fmt: skip

    @cached_property
    def typical_graph(self) -> Graph:
        """The graph with typical durations, gaps and lags: every step of it is alike, but for what does not recur."""
        graph = self.graph
        typical = graph.with_times(self.typical_duration, self._over_steps(graph.gap + graph.frozen) - graph.frozen)
        edges = graph.edges
        key = np.where(self.task[edges.target] >= 0, self.task[edges.target] * 16 + edges.rule, -1)
        lag = _medians(key, edges.lag + edges.frozen)
        return typical.with_lags(lag - edges.frozen)

    def _over_steps(self, values: Floats) -> Floats:
        return _medians(self.task, values)

    def share(self, part: int) -> Floats:
        """Time of a part of the work over its typical time: (steps, ranks)."""
        chosen = (self.task >= 0) & (self.step >= 0) & (self.part == part)
        place = self.step[chosen] * self.ranks + self.rank[chosen]
        size = self.steps * self.ranks
        spent = np.bincount(place, self.graph.duration[chosen], size)
        usual = np.bincount(place, self.typical_duration[chosen], size)
        return np.asarray((spent + 1.0) / (usual + 1.0)).reshape(self.steps, self.ranks)


def recurring_tasks(replay: Replay, graph: Graph | None = None) -> RecurringTasks:
    """The tasks of a replayed trace, with the durations of `graph`: by default those without the profiler."""
    graph = replay.clean_graph if graph is None else graph
    nodes, marks = replay.execution.nodes, replay.marks
    size = len(graph)
    step, rank = np.full(size, -1, np.int64), np.zeros(size, np.int64)
    step[: len(nodes)] = step_of_nodes(nodes, marks, until_next=False)
    places = {number: index for index, number in enumerate(marks.ranks)}
    rank[: len(nodes)] = np.array([places.get(lane.rank, 0) for lane in nodes.trace.lanes] or [0])[nodes.lane]
    task = np.full(size, -1, np.int64)
    task[: len(nodes)] = _tasks(nodes, step[: len(nodes)])
    part = np.full(size, KERNEL, np.uint8)
    part[: len(nodes)] = np.where(nodes.on_gpu, np.where(nodes.kind == Kind.COMM, TRANSFER, KERNEL), HOST)
    times = np.full((int(task.max(initial=-1)) + 1, len(marks.names)), np.nan)
    known = task >= 0
    times[task[known], step[known]] = graph.duration[known]
    return RecurringTasks(graph, step, rank, part, task, times)


def _tasks(nodes: Nodes, step: Ints) -> Ints:
    """A number for every (lane, name, how-manieth of that name in its step), over all steps; -1 outside of steps."""
    name = np.where(nodes.row >= 0, nodes.trace.name[nodes.row], -1).astype(np.int64)
    kind = numbered(nodes.lane.astype(np.int64), 2 * name + nodes.is_return)
    task = numbered(kind, occurrence(numbered(kind, step), nodes.start))
    answer, inside = np.full(len(task), -1, np.int64), step >= 0
    answer[inside] = numbered(task[inside])
    return answer


def _medians(group: Ints, values: Floats) -> Floats:
    """Every value replaced by the median of its group; those of group -1 are left."""
    medians = group_medians(group, values, int(group.max(initial=-1)) + 1, lower=False)
    return np.where(group >= 0, medians[np.maximum(group, 0)], values) if len(medians) else values.copy()
