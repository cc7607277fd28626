"""Draft: the nodes of a graph in the making, with the times at which they were recorded.

Host events nest, so a thread is cut into segments that follow one another (`kernels.cut_into_segments`). A GPU event
is one node; a communication kernel is two: it arrives, then it transfers.

A node is *elastic* when its recorded time includes waiting: the return of a blocking call, a launch into a full
queue, a pause of a thread, the transfer of a collective. What it waits for shortens it. All others are *rigid*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lumos.graph.graph import Bools, Ints, Small
from lumos.trace.names import CallKind, Category, Kind, is_step
from lumos.trace.trace import Trace

BLOCKING = (CallKind.DEVICE_SYNC, CallKind.STREAM_SYNC, CallKind.EVENT_SYNC, CallKind.COPY)
LAUNCHING = (CallKind.LAUNCH, CallKind.COPY, CallKind.GRAPH_LAUNCH)


@dataclass(frozen=True)
class Draft:
    """Nodes sorted by lane and time; `row` is their event in the trace, or -1."""

    trace: Trace
    first: Ints  # nodes of lane i are first[i] … first[i + 1] - 1
    row: Small
    start: Ints
    end: Ints
    is_return: Bools  # return of a blocking call, or transfer of a communication kernel
    first_node: Small  # of every row; -1 for rows that are not in the graph
    last_node: Small
    parent: Small  # the row around every row of a thread; -1 where there is none

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def lane(self) -> Small:
        return np.repeat(np.arange(len(self.first) - 1, dtype=np.int32), np.diff(self.first))

    @cached_property
    def call(self) -> Any:
        return self.trace.call

    @cached_property
    def on_gpu(self) -> Bools:
        """Nodes of streams."""
        streams = np.array([lane.is_stream for lane in self.trace.lanes], bool)
        return streams[self.lane]

    @cached_property
    def kind(self) -> Any:
        kinds = self.trace.kind[self.row]
        return np.where(self.row < 0, np.uint8(Kind.CPU), kinds).astype(np.uint8)

    @cached_property
    def lane_rank(self) -> Small:
        return self.trace.lane_rank

    @cached_property
    def lanes_of_rank(self) -> dict[int, list[int]]:
        """The stream lanes of every rank that have nodes."""
        lanes: dict[int, list[int]] = {}
        for index, lane in enumerate(self.trace.lanes):
            if lane.is_stream and self.first[index + 1] > self.first[index]:
                lanes.setdefault(lane.rank, []).append(index)
        return lanes

    @cached_property
    def launch_row(self) -> Small:
        """For every row on a GPU: the row of the call that launched it, -1 where the file does not have it."""
        return launch_rows(self.trace)

    @cached_property
    def launched_lane(self) -> Small:
        """For every row of a launch call: the lane of the first thing it launched, -1 for all other rows."""
        lanes = np.full(len(self.trace), -1, np.int32)
        gpu = np.flatnonzero(self.launch_row >= 0)[::-1]
        lanes[self.launch_row[gpu]] = self.trace.lane[gpu]
        return lanes

    @cached_property
    def operator_row(self) -> Small:
        """For every row: the innermost operator around it, or around its launch; -1 where there is none."""
        around = np.where(self.launch_row >= 0, self.parent[self.launch_row], self.parent)
        for _ in range(64):  # deeper nesting than that is not seen
            higher = (around >= 0) & (self.trace.category[around] != Category.OP)
            if not higher.any():
                break
            around = np.where(higher, self.parent[around], around)
        return around.astype(np.int32)

    def launched_at(self, nodes: Any) -> Ints:
        """When the launch calls of nodes of streams began; for what was launched before the file began, never."""
        launch = self.launch_row[self.row[nodes]]
        return np.where(launch >= 0, self.trace.start[launch], np.iinfo(np.int64).min)

    @cached_property
    def launch_order(self) -> dict[int, Ints]:
        """For every stream: `launched_at` of its nodes, made non-decreasing, for look-ups."""
        streams = (lane for lanes in self.lanes_of_rank.values() for lane in lanes)
        nodes = {lane: np.arange(self.first[lane], self.first[lane + 1]) for lane in streams}
        return {lane: np.maximum.accumulate(self.launched_at(mine)) for lane, mine in nodes.items()}

    def last_launched_before(self, lane: int, time: int) -> int:
        """The last node of a stream that was launched before a time; one less than its first where there is none."""
        return int(self.first[lane]) + int(self.launch_order[lane].searchsorted(time)) - 1

    def last_ended_by(self, lane: int, node: int, time: int) -> int:
        """`node`, or the last one before it on its stream that ended by a time; -1 where there is none."""
        low = int(self.first[lane])
        while node >= low and self.end[node] > time:
            node -= 1
        return node if node >= low else -1


def launch_rows(trace: Trace) -> Small:
    """For every row on a GPU: the row of the call that launched it, by correlation within the rank; else -1."""
    answer = np.full(len(trace), -1, np.int32)
    calls = np.flatnonzero(np.isin(trace.call, np.array(LAUNCHING)) & (trace.correlation >= 0))
    gpu = np.flatnonzero(trace.on_gpu & (trace.correlation >= 0))
    if len(calls) == 0 or len(gpu) == 0:
        return answer
    # Correlation ids repeat from process to process; they are at most 2**32 in all traces seen.
    keys = (trace.correlation & 0xFFFFFFFF) | (trace.rank.astype(np.int64) << 32)
    order = calls[np.argsort(keys[calls], kind="stable")]
    at = np.minimum(np.searchsorted(keys[order], keys[gpu]), len(order) - 1)
    found = keys[order[at]] == keys[gpu]
    answer[gpu[found]] = order[at[found]]
    return answer


def draft(trace: Trace) -> Draft:
    """Cut a trace into nodes."""
    from lumos.graph.compiled_loops import cut_into_segments

    host = _host_rows(trace)
    is_call = trace.category[host] == Category.CALL
    blocking = np.isin(trace.call[host], np.array(BLOCKING)) & is_call
    lane, owner, begin, finish, is_return, first, last, parent = cut_into_segments(
        trace.lane[host], trace.start[host], trace.end[host], blocking, is_call
    )
    gpu_row, gpu_start, gpu_end, gpu_transfer = _gpu_nodes(trace)
    places = _Places.of(lane, trace.lane[gpu_row], len(trace.lanes))
    first_node, last_node, parent_row = (np.full(len(trace), -1, np.int32) for _ in range(3))
    present = last >= first
    first_node[host[present]] = places.host[first[present]]
    last_node[host[present]] = places.host[last[present]]
    parent_row[host] = np.where(parent >= 0, host[parent], -1)
    last_node[gpu_row] = places.gpu  # the later of two nodes of one row wins
    first_node[gpu_row[::-1]] = places.gpu[::-1]
    return Draft(
        trace=trace,
        first=places.first,
        row=places.put(np.where(owner >= 0, host[owner], -1).astype(np.int32), gpu_row),
        start=places.put(begin, gpu_start),
        end=places.put(finish, gpu_end),
        is_return=places.put(is_return, gpu_transfer),
        first_node=first_node,
        last_node=last_node,
        parent=parent_row,
    )


@dataclass(frozen=True)
class _Places:
    """Where segments of threads and nodes of streams, each sorted by lane, stand among all nodes sorted by lane."""

    first: Ints
    host: Small
    gpu: Small

    @staticmethod
    def of(host_lane: Small, gpu_lane: Small, lanes: int) -> _Places:
        host_count, gpu_count = (np.bincount(lane, minlength=lanes) for lane in (host_lane, gpu_lane))
        first = np.concatenate([[0], np.cumsum(host_count + gpu_count)])
        # No lane has both; the place in a lane is the place among its like, counted from the lane's first.
        host_shift, gpu_shift = (first[:-1] - (np.cumsum(c) - c) for c in (host_count, gpu_count))
        host = np.arange(len(host_lane), dtype=np.int32) + host_shift.astype(np.int32)[host_lane]
        gpu = np.arange(len(gpu_lane), dtype=np.int32) + gpu_shift.astype(np.int32)[gpu_lane]
        return _Places(first.astype(np.int64), host, gpu)

    def put(self, host: Any, gpu: Any) -> Any:
        """One column of both."""
        column = np.empty(len(self.host) + len(self.gpu), host.dtype)
        column[self.host], column[self.gpu] = host, gpu
        return column


def working_rows(trace: Trace) -> Bools:
    """Rows on GPUs and of threads that work. A thread that only polls does not."""
    host = trace.on_host
    steps = np.array([is_step(n) for n in trace.names], bool)
    works = (trace.category == Category.OP) | np.isin(trace.call, np.array(BLOCKING + LAUNCHING)) | steps[trace.name]
    working_lane = np.zeros(len(trace.lanes), bool)
    working_lane[trace.lane[works & host]] = True
    return (host & working_lane[trace.lane]) | trace.on_gpu


def _host_rows(trace: Trace) -> Any:
    """Rows of threads that work, sorted for cutting."""
    rows = np.flatnonzero(working_rows(trace) & trace.on_host)
    # At one start the longer event encloses the shorter; a note encloses an operator, an operator a call.
    rank_of = np.zeros(max(Category) + 1, np.int8)
    rank_of[[Category.NOTE, Category.OP, Category.CALL]] = (0, 1, 2)
    order = np.lexsort((rank_of[trace.category[rows]], -trace.end[rows], trace.start[rows], trace.lane[rows]))
    return rows[order]


def _gpu_nodes(trace: Trace) -> tuple[Any, Any, Any, Any]:
    """Row, start, end of the nodes on streams, and whether a node is the transfer of a communication kernel."""
    rows = np.flatnonzero(trace.on_gpu)
    rows = rows[np.lexsort((trace.end[rows], trace.start[rows], trace.lane[rows]))].astype(np.int32)
    start, end = trace.start[rows].copy(), trace.end[rows].copy()
    # With programmatic dependent launch a kernel is resident before the one ahead of it has ended, and waits for it:
    # it begins when that one ends.
    for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(trace.lane[rows])) + 1):
        ended = np.maximum.accumulate(end[part]) if len(part) else end[part]
        start[part[1:]] = np.maximum(start[part[1:]], ended[:-1])
        end[part] = np.maximum(end[part], start[part])
    communicates = trace.is_communication[rows]
    twice = np.repeat(np.arange(len(rows)), 1 + communicates)
    second = np.zeros(len(twice), bool)
    second[1:] = twice[1:] == twice[:-1]
    starts, ends = start[twice], end[twice]
    arrival = communicates[twice] & ~second
    ends = np.where(arrival, starts, ends)
    return rows[twice], starts, ends, second
