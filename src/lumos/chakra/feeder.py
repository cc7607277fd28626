"""Runs tasks that wait for one another as the feeder of ASTRA-sim does; a heap of events, as this is done once."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence


class Feeder:
    """Tasks by their place in a list. Those of one lane run one at a time; of those that could start, the first does.

    `turns` order the tasks of a lane. Members of a collective or message (`together`) start on their own, and their
    data move once those of `before` have started. Tasks that are `is_beside` others do not occupy their lane, and
    those that are `is_held` do not even start before the data do.
    """

    def __init__(
        self,
        waits_for: Sequence[Sequence[int]],
        lanes: Sequence[Hashable],
        turns: Sequence[tuple[int, ...]],
        lengths: Sequence[float],
        together: Mapping[int, Sequence[int]],
        before: Mapping[int, Sequence[int]],
        is_beside: Sequence[bool],
        is_held: Sequence[bool],
    ) -> None:
        self.lanes, self.turns, self.lengths, self.together, self.before = lanes, turns, lengths, together, before
        self.is_beside, self.is_held = is_beside, is_held
        self.waiting = [len(sources) for sources in waits_for]
        self.next: list[list[int]] = [[] for _ in lanes]
        for index, sources in enumerate(waits_for):
            for source in sources:
                self.next[source].append(index)
        self.ready: dict[Hashable, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        self.busy: set[Hashable] = set()
        self.start: list[float] = [-1] * len(lanes)
        self.end: list[float] = [-1] * len(lanes)
        self.order: list[int] = []
        self.events: list[tuple[float, int]] = []  # (time, task that ends then)
        self.held: set[int] = set()

    def run(self) -> tuple[list[float], list[float], list[int]]:
        """When every task starts and ends, -1 for never, and the order in which they started."""
        for index, waiting in enumerate(self.waiting):
            if waiting == 0:
                self._make_ready(index)
        for lane in list(self.ready):
            self._start_next(lane, 0)
        while self.events:
            time, index = heapq.heappop(self.events)
            self._finish(index, time)
        return self.start, self.end, self.order

    def _make_ready(self, index: int) -> None:
        heapq.heappush(self.ready[self.lanes[index]], (self.turns[index], index))

    def _start_next(self, lane: Hashable, time: float) -> None:
        while self.ready[lane] and lane not in self.busy:
            _, index = heapq.heappop(self.ready[lane])
            if not self.is_beside[index]:
                self.busy.add(lane)
            if self.is_held[index] and any(self.start[i] < 0 for i in self.before.get(index, ()) if i != index):
                self.held.add(index)
                continue
            self._start(index, time)
            for member in self.held.intersection(self.together.get(index, ())):
                self.held.discard(member)
                self._start(member, time)

    def _start(self, index: int, time: float) -> None:
        self.start[index] = time
        self.order.append(index)
        for member in self.together.get(index, (index,)):
            arrived = [self.start[i] for i in {member, *self.before.get(member, ())}]
            if min(arrived) >= 0 and self.end[member] < 0:
                self.end[member] = max(arrived) + self.lengths[member]
                heapq.heappush(self.events, (self.end[member], member))

    def _finish(self, index: int, time: float) -> None:
        lanes = {self.lanes[index]: None}
        if not self.is_beside[index]:
            self.busy.discard(self.lanes[index])
        for target in self.next[index]:
            self.waiting[target] -= 1
            if self.waiting[target] == 0:
                self._make_ready(target)
                lanes[self.lanes[target]] = None
        for lane in lanes:
            self._start_next(lane, time)
