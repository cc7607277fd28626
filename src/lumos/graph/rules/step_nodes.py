"""The nodes at which steps begin and end: steps are read from simulated times without making a Trace of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lumos.graph.graph import Bools, Floats, Ints
from lumos.graph.rules.build import Execution
from lumos.graph.simulate import Times
from lumos.trace.steps import StepMarks


class Windows(NamedTuple):
    """Steps as (steps, ranks): when each starts and ends, in nanoseconds, and the node that ends it (-1: none)."""

    start: Floats
    end: Floats
    last: Ints

    @property
    def mean(self) -> float:
        """The mean step, in nanoseconds."""
        return float((self.end - self.start).mean())


@dataclass(frozen=True)
class StepNodes:
    """Where the steps of an execution begin and end."""

    execution: Execution
    marks: StepMarks

    def windows(self, times: Times) -> Windows:
        """The steps at these times, as `StepMarks.read` defines them."""
        if self._marked is not None:
            return self._by_marks(times, *self._marked)
        if all(len(nodes) for nodes in self._of_rank) and (self.marks.note < 0).all():
            return self._whole(times)
        steps, origin = self.marks.read(self.execution.retime(times)), self.execution.origin
        start, end = ((value - origin).astype(np.float64) for value in (steps.start, steps.end))
        return Windows(start, end, self._last_before(times, end))

    @cached_property
    def _marked(self) -> tuple[Ints, Ints, Ints] | None:
        """First and last nodes of the marks, and the last node on a GPU; None if a mark is missing or has no nodes."""
        nodes, note = self.execution.nodes, self.marks.note
        if not len(nodes) or (note < 0).any() or (nodes.last_node[note] < 0).any():
            return None
        last = nodes.last_node[note]
        on_gpu = np.where(self.marks.last_on_gpu >= 0, nodes.last_node[self.marks.last_on_gpu], -1)
        return nodes.first_node[note].astype(np.int64), last.astype(np.int64), np.where(on_gpu >= 0, on_gpu, last)

    @staticmethod
    def _by_marks(times: Times, first: Ints, last: Ints, gpu: Ints) -> Windows:
        last = np.where(times.end[gpu] > times.end[last], gpu, last)
        start, end = times.start[first], times.end[last]
        start[1:] = np.maximum(start[1:], np.minimum(end[:-1], end[1:]))
        return Windows(start, end, last)

    @cached_property
    def _of_rank(self) -> list[Ints]:
        """The nodes of every rank that a trace without marks begins and ends with."""
        nodes, trace, found = self.execution.nodes, self.execution.trace, []
        everything = trace.rows_by_rank(np.ones(len(trace), bool))
        for rank, rows in trace.rows_by_rank(self.marks.works).items():
            rows = rows if len(rows) else everything[rank]
            rows = rows[nodes.last_node[rows] >= 0]
            found.append(np.concatenate([nodes.first_node[rows], nodes.last_node[rows]]).astype(np.int64))
        return found

    def _whole(self, times: Times) -> Windows:
        start = np.array([[times.start[nodes].min() for nodes in self._of_rank]])
        last = np.array([[nodes[np.argmax(times.end[nodes])] for nodes in self._of_rank]])
        end = times.end[last]
        if self.marks.together:
            start, last = np.full_like(start, start.min()), np.full_like(last, last[0, np.argmax(end)])
        return Windows(start, times.end[last], last)

    def _last_before(self, times: Times, end: Floats) -> Ints:
        """The last node of each rank that ends within each step."""
        rank, size = self.execution.nodes.rank, len(self.execution.nodes)
        last = np.full(end.shape, -1, np.int64)
        for column, mine in enumerate(self.marks.ranks):
            nodes: Ints = np.flatnonzero(rank == mine)
            for step in range(len(end)):
                inside: Bools = times.end[:size][nodes] <= end[step, column] + 1
                if inside.any():
                    last[step, column] = nodes[inside][np.argmax(times.end[nodes[inside]])]
        return last
