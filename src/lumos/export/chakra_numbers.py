"""The numbers that nodes, events and lanes of a run have in its Chakra files, each counted within its rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from lumos.graph.from_trace.build import Execution
from lumos.graph.graph import Ints
from lumos.graph.simulate import simulate
from lumos.trace.read.chakra_schema import GROUPS_ID


@dataclass(frozen=True)
class Numbers:
    """A run, and how many messages its communication kernels carry, by row."""

    execution: Execution
    messages: dict[int, int]

    @cached_property
    def size(self) -> int:
        """Nodes of lanes; those after them are the rendezvous."""
        return len(self.execution.nodes)

    @cached_property
    def rank(self) -> Ints:
        """The rank of every node."""
        return self.execution.trace.lane_rank[self.execution.nodes.lane].astype(np.int64)

    @cached_property
    def pieces(self) -> Ints:
        """How many nodes of a file every node is: a kernel that carries several messages is one for each."""
        count = np.ones(self.size, np.int64)
        for row, messages in self.messages.items():
            count[self.execution.nodes.last_node[row]] = messages
        return count

    @cached_property
    def ids(self) -> Ints:
        """The first id of every node, in the order in which the nodes of a rank run."""
        order = np.lexsort((np.arange(self.size), self._when, self.rank))
        before = np.cumsum(self.pieces[order]) - self.pieces[order]
        new_rank = np.diff(self.rank[order], prepend=-1) != 0
        base = np.maximum.accumulate(np.where(new_rank, before, 0))
        ids = np.empty(self.size, np.int64)
        ids[order] = before - base + GROUPS_ID + 1
        return ids

    @cached_property
    def _when(self) -> np.ndarray:
        """What nodes are sorted by: when they start; transfers by their rendezvous, which all ranks share."""
        graph = self.execution.graph
        times = simulate(graph)
        when = times.start[: self.size].copy()
        transfers = (graph.edges.source >= self.size) & (graph.edges.target < self.size)
        when[graph.edges.target[transfers]] = times.start[graph.edges.source[transfers]]
        for low, high in self._lanes:
            when[low:high] = np.maximum.accumulate(when[low:high])
        return when

    @cached_property
    def micros(self) -> Ints:
        """Durations in whole microseconds; what is rounded away is carried along the lane."""
        answer = np.zeros(self.size, np.int64)
        for low, high in self._lanes:
            ended = np.floor(np.cumsum(self.execution.graph.duration[low:high]) / 1000 + 0.5).astype(np.int64)
            answer[low:high] = np.diff(ended, prepend=0)
        return answer

    @cached_property
    def _lanes(self) -> list[tuple[int, int]]:
        first = self.execution.nodes.first.tolist()
        return [(low, high) for low, high in pairwise(first) if low < high]

    @cached_property
    def place_of_row(self) -> Ints:
        """The place of every event among those of its rank."""
        return _places(self.execution.trace.rank)

    @cached_property
    def place_of_lane(self) -> Ints:
        """The place of every lane among those of its rank."""
        return _places(self.execution.trace.lane_rank)

    def all_ids(self, node: int) -> list[int]:
        """The ids of all that a node is in a file."""
        first = int(self.ids[node])
        return list(range(first, first + int(self.pieces[node])))


def _places(rank: np.ndarray) -> Ints:
    places = np.empty(len(rank), np.int64)
    for r in np.unique(rank):
        mine = np.flatnonzero(rank == r)
        places[mine] = np.arange(len(mine))
    return places
