"""Events between streams: cudaEventRecord on one stream, cudaStreamWaitEvent on another.

If the file says which record a wait belongs to, that is used. Current PyTorch often does not (the stream and the record
are -1), and older files have nothing at all. Then the source is inferred, in this order:

1. a record directly before the wait, in the same thread: `stream.wait_stream(other)`, every NCCL launch;
2. the waiting stream's next kernel starts right after a kernel of another stream, and nothing else held it back;
3. event ids count upwards, so an id lies between the records of its neighbours;
4. the newest record before the wait.

The stream of a record is the one its thread last launched to (other than the waiting stream). A source that ended
after the waiting stream went on is never taken; then it is the latest one before it that did not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Edges, Rule
from lumos.graph.rules.nodes import Nodes
from lumos.trace.names import LAUNCHING, CallKind

_EVENT = read_table("trace_rules.toml")["event"]


def event_edges(nodes: Nodes) -> Edges:
    """From the last kernel before an event was recorded to the next kernel of the stream that waits for it."""
    trace = nodes.trace
    calls = np.flatnonzero(np.isin(trace.call, (CallKind.EVENT_RECORD, CallKind.STREAM_WAIT, *LAUNCHING)))
    calls = calls[np.lexsort((trace.start[calls], trace.rank[calls]))]
    details = _details(nodes)
    found: list[tuple[int, int]] = []
    for part in np.split(calls, np.flatnonzero(np.diff(trace.rank[calls])) + 1):
        rank = int(trace.rank[part[0]]) if len(part) else -1
        if len(nodes.streams.get(rank, [])) >= 2:
            found += _RankEvents(nodes, rank, part, details.get(rank, {})).edges()
    return Edges.of_pairs(found, Rule.EVENT)


class _Wait(NamedTuple):
    """A cudaStreamWaitEvent; -1 for what the file does not say."""

    time: int
    thread: _Thread
    stream: int  # lane that waits
    event: int
    record_time: int
    source_lane: int


@dataclass
class _Thread:
    """What one thread did to streams, in order: launches (time, lane), records (time), and all calls (time, kind)."""

    launch_times: list[int] = field(default_factory=list)
    launch_lanes: list[int] = field(default_factory=list)
    launch_elsewhere: list[int] = field(default_factory=list)  # of every launch: the last one before to another lane
    record_times: list[int] = field(default_factory=list)
    call_times: list[int] = field(default_factory=list)
    call_kinds: list[int] = field(default_factory=list)

    def launch(self, time: int, lane: int) -> None:
        """Add the next launch."""
        at = len(self.launch_lanes) - 1
        if at >= 0 and self.launch_lanes[at] == lane:
            at = self.launch_elsewhere[at]
        self.launch_times.append(time)
        self.launch_lanes.append(lane)
        self.launch_elsewhere.append(at)

    def last_record(self, time: int) -> int:
        """The newest record before a time; -1 if there is none."""
        at = bisect_left(self.record_times, time) - 1
        return self.record_times[at] if at >= 0 else -1

    def adjacent_record(self, time: int) -> int:
        """The record that is the last call before a time; -1 if that was another call."""
        at = bisect_left(self.call_times, time) - 1
        return self.call_times[at] if at >= 0 and self.call_kinds[at] == CallKind.EVENT_RECORD else -1

    def next_lane(self, time: int) -> int:
        """The stream that is launched to next; -1 if there is none."""
        at = bisect_left(self.launch_times, time)
        return self.launch_lanes[at] if at < len(self.launch_lanes) else -1

    def last_lane(self, time: int, other_than: int) -> int:
        """The stream that was launched to last before a time, other than one; -1 if there is none."""
        at = bisect_left(self.launch_times, time) - 1
        if at >= 0 and self.launch_lanes[at] == other_than:
            at = self.launch_elsewhere[at]
        return self.launch_lanes[at] if at >= 0 else -1


class _RankEvents:
    """The events of one rank, and the inference of what its streams wait for."""

    def __init__(self, nodes: Nodes, rank: int, calls: np.ndarray, details: dict[int, tuple[int, ...]]) -> None:
        self.nodes, self.lanes = nodes, nodes.busy_streams[rank]
        self.rank = rank
        self.anchors: list[tuple[int, int]] = []  # (event id, index of its record), both rising
        self.waits = list(self._collect(calls, details))

    def _collect(self, calls: np.ndarray, details: dict[int, tuple[int, ...]]) -> Iterator[_Wait]:
        trace = self.nodes.trace
        threads: dict[int, _Thread] = defaultdict(_Thread)
        record_times: dict[int, int] = {}
        lane_of_stream = {trace.lanes[lane].label: lane for lane in self.nodes.streams[self.rank]}
        columns = (trace.start, trace.lane, trace.correlation, trace.call, self.nodes.launched_lane)
        for time, lane, correlation, kind, launched in zip(*(c[calls].tolist() for c in columns), strict=True):
            thread = threads[lane]
            thread.call_times.append(time)
            thread.call_kinds.append(kind)
            if kind == CallKind.EVENT_RECORD:
                thread.record_times.append(time)
                record_times[correlation] = time
            elif kind != CallKind.STREAM_WAIT:
                if launched >= 0:
                    thread.launch(time, launched)
            elif not details or correlation in details:  # if some waits have details, one without has no effect
                stream, wait_stream, record, event = details.get(correlation, (-1, -1, -1, -1))
                stream_lane, source_lane = (lane_of_stream.get(str(s), -1) for s in (stream, wait_stream))
                yield _Wait(time, thread, stream_lane, event, record_times.get(record, -1), source_lane)

    def edges(self) -> Iterator[tuple[int, int]]:
        """(source, target) of every wait whose source is found."""
        for wait in self.waits:
            waiter = wait.stream if wait.stream >= 0 else wait.thread.next_lane(wait.time)
            if waiter < 0:
                continue
            target = self.nodes.last_launched_before(waiter, wait.time) + 1
            if not self.nodes.first[waiter] <= target < self.nodes.first[waiter + 1]:
                continue
            source = self._source(wait, waiter, target)
            if source >= 0:
                yield source, target

    def _source(self, wait: _Wait, waiter: int, target: int) -> int:
        """The node that a wait is for, by the steps in the module's docstring; -1 if it is not found."""
        if wait.record_time >= 0 and wait.source_lane >= 0:
            return self._ended(wait.source_lane, wait.record_time, target)
        record = wait.thread.adjacent_record(wait.time)
        if record >= 0:
            if wait.event >= 0 and (not self.anchors or wait.event > self.anchors[-1][0]):
                self.anchors.append((wait.event, bisect_left(wait.thread.record_times, record)))
        else:
            binding = self._binding(wait, waiter, target)
            if binding >= 0:
                return binding
            record = self._record_by_id(wait)
            if record < 0:
                record = wait.thread.last_record(wait.time)
        time = record if record >= 0 else wait.time
        lane, others = wait.thread.last_lane(time, waiter), [lane for lane in self.lanes if lane != waiter]
        return self._ended(others[0] if lane < 0 and len(others) == 1 else lane, time, target)

    def _ended(self, lane: int, time: int, target: int) -> int:
        """The last node launched to a lane before a time that had ended when the target started."""
        if lane < 0:
            return -1
        node = self.nodes.last_launched_before(lane, time)
        return self.nodes.last_ended_by(lane, node, int(self.nodes.start[target]))

    def _binding(self, wait: _Wait, waiter: int, target: int) -> int:
        """The node that visibly held the target back; -1 if none did."""
        nodes, best = self.nodes, -1
        held = max(int(nodes.free_at[target]), int(nodes.start[target]) - _EVENT["release"])
        for lane in self.lanes:
            node = self._ended(lane, wait.time, target) if lane != waiter else -1
            if node >= 0 and nodes.end[node] > held:
                best, held = node, int(nodes.end[node])
        return best

    def _record_by_id(self, wait: _Wait) -> int:
        """Fresh event ids rise with every new event: count on from the nearest certain one."""
        times = wait.thread.record_times
        at = bisect_left(self.anchors, (wait.event, -1)) - 1
        if wait.event < 0 or at < 0 or (at + 1 < len(self.anchors) and self.anchors[at + 1][0] == wait.event):
            return -1
        event, index = self.anchors[at]
        guess = index + (wait.event - event)
        newest = bisect_left(times, wait.time) - 1
        near = guess - index < _EVENT["most_new_events"] and newest > index
        return times[min(guess, newest)] if near else -1


def _details(nodes: Nodes) -> dict[int, dict[int, tuple[int, ...]]]:
    """Rank → correlation of a wait call → (waiting stream, source stream, record, event), from `cuda_sync` rows."""
    syncs = nodes.trace.syncs
    known = np.flatnonzero((syncs.event >= 0) & (syncs.stream >= 0))
    ranks = nodes.trace.lane_rank[syncs.lane[known]].tolist() if len(known) else []
    columns = (syncs.correlation, syncs.stream, syncs.wait_stream, syncs.record, syncs.event)
    details: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank, correlation, *rest in zip(ranks, *(c[known].tolist() for c in columns), strict=True):
        details.setdefault(rank, {})[correlation] = tuple(rest)
    return details
