"""Nodes of the graph of a trace, with the times at which they were recorded.

Host events nest, so a thread is cut into segments that follow one another (`loops.cut_into_segments`). A GPU
event is one node; a communication kernel is two: its arrival, and its transfer once all ranks have arrived.

A node is *elastic* if its recorded time includes waiting: the return of a blocking call, a launch into a full queue, a
pause of a thread, the transfer of a collective. What it waits for shortens it. All other nodes are *rigid*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lumos.graph.graph import Bools, Edges, Floats, Graph, Ints, Small, make_graph
from lumos.graph.loops import loops_for
from lumos.trace.names import BLOCKING, Category, Kind
from lumos.trace.trace import Trace

NEVER = int(np.iinfo(np.int64).min)
_MOST_STREAMS = 128  # of a rank that are compared with each other: a GPU has at most so many hardware queues


@dataclass(frozen=True)
class Nodes:
    """Nodes sorted by lane and time; `row` is their event in the trace, or -1.

    nodes = cut_nodes(read_job(path))
    nodes.trace.names[nodes.trace.name[nodes.row[0]]]  # the name of the first node's event
    """

    trace: Trace
    first: Ints  # nodes of lane i are first[i] … first[i + 1] - 1
    row: Small
    start: Ints
    end: Ints
    is_return: Bools  # return of a blocking call, or transfer of a communication kernel
    first_node: Small  # of every row; -1 for rows that are not in the graph
    last_node: Small
    parent: Small  # the row around every row of a thread; -1 if there is none

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def lane(self) -> Small:
        return np.repeat(np.arange(len(self.first) - 1, dtype=np.int32), np.diff(self.first))

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
    def rank(self) -> Small:
        return self.trace.lane_rank[self.lane]

    def _lanes_in_use(self, streams: bool) -> dict[int, list[int]]:
        lanes: dict[int, list[int]] = {}
        for index, lane in enumerate(self.trace.lanes):
            if lane.is_stream == streams and self.first[index + 1] > self.first[index]:
                lanes.setdefault(lane.rank, []).append(index)
        return lanes

    @cached_property
    def streams(self) -> dict[int, list[int]]:
        """The lanes of every rank's streams that have nodes."""
        return self._lanes_in_use(True)

    @cached_property
    def busy_streams(self) -> dict[int, list[int]]:
        """The same, but of thousands of streams those with most nodes: rules compare all streams with each other."""
        size = np.diff(self.first)
        return {rank: sorted(sorted(lanes, key=lambda lane: -size[lane])[:_MOST_STREAMS])
                for rank, lanes in self.streams.items()}  # fmt: skip

    @cached_property
    def threads(self) -> dict[int, list[int]]:
        """The lanes of every rank's threads that have nodes."""
        return self._lanes_in_use(False)

    @cached_property
    def previous_end(self) -> Ints:
        """When the node before on the lane ended; the smallest integer for the first of a lane."""
        ends = np.concatenate([[NEVER], self.end[:-1]]) if len(self) else self.end
        ends[self.first[:-1][np.diff(self.first) > 0]] = NEVER
        return ends

    @cached_property
    def launch_of_node(self) -> Small:
        """For every node on a GPU: the row of the call that launched it; -1 if the trace does not have it."""
        return np.where(self.row >= 0, self.trace.launch_row[self.row], -1).astype(np.int32)

    @cached_property
    def launched_lane(self) -> Small:
        """For every row of a launch call: the lane of the first thing it launched, -1 for all other rows."""
        lanes = np.full(len(self.trace), -1, np.int32)
        gpu = np.flatnonzero(self.trace.launch_row >= 0)[::-1]
        lanes[self.trace.launch_row[gpu]] = self.trace.lane[gpu]
        return lanes

    @cached_property
    def operator_row(self) -> Small:
        """For every row: the innermost operator around it, or around its launch; -1 if there is none."""
        around = np.where(self.trace.launch_row >= 0, self.parent[self.trace.launch_row], self.parent)
        for _ in range(64):  # deeper nesting than that is not seen
            higher = (around >= 0) & (self.trace.category[around] != Category.OP)
            if not higher.any():
                break
            around = np.where(higher, self.parent[around], around)
        return around.astype(np.int32)

    @cached_property
    def launched_at(self) -> Ints:
        """When the launch call of every node of a stream began; `NEVER` if it was launched before the recording."""
        return np.where(self.launch_of_node >= 0, self.trace.start[self.launch_of_node], NEVER)

    @cached_property
    def free_at(self) -> Ints:
        """When every node of a stream could have started by the order of its stream and its launch alone."""
        launched = np.where(self.launch_of_node >= 0, self.trace.end[self.launch_of_node], NEVER)
        return np.maximum(self.previous_end, launched)

    @cached_property
    def launch_order(self) -> dict[int, Ints]:
        """For every stream: `launched_at` of its nodes, made non-decreasing, for look-ups."""
        parts = {i: slice(self.first[i], self.first[i + 1]) for lanes in self.streams.values() for i in lanes}
        return {lane: np.maximum.accumulate(self.launched_at[part]) for lane, part in parts.items()}

    def graph(self, edges: Edges, hubs: int, **times: Floats) -> Graph:
        """The graph of these nodes and of one hub a rendezvous after them; `times` are columns of its nodes."""
        return make_graph(
            first=np.concatenate([self.first, len(self) + np.arange(1, hubs + 1)]), edges=edges,
            kind=np.concatenate([self.kind, np.full(hubs, Kind.COMM, np.uint8)]),
            **{name: np.concatenate([column, np.zeros(hubs)]) for name, column in times.items()},
        )  # fmt: skip

    def last_launched_before(self, lane: int, time: int) -> int:
        """The last node of a stream that was launched before a time; one less than its first if there is none."""
        return int(self.first[lane]) + int(self.launch_order[lane].searchsorted(time)) - 1

    def last_ended_by(self, lane: int, node: int, time: int) -> int:
        """`node`, or the last one before it on its stream that ended by a time; -1 if there is none."""
        low, step = int(self.first[lane]), 1
        if node >= low and self.end[node] <= time:
            return node
        while node >= low:  # in ever longer pieces: thousands of kernels may be queued
            begin = max(low, node - step + 1)
            ended = np.flatnonzero(self.end[begin : node + 1] <= time)
            if len(ended):
                return begin + int(ended[-1])
            node, step = begin - 1, 8 * step
        return -1


def cut_nodes(trace: Trace) -> Nodes:
    """The nodes of a trace: segments of threads, and what ran on streams."""
    host = _host_rows(trace)
    is_call = trace.category[host] == Category.CALL
    blocking = np.isin(trace.call[host], np.array(BLOCKING)) & is_call
    loops = loops_for(len(trace))
    lane, owner, begin, finish, is_return, first, last, parent = loops.cut_into_segments(
        trace.lane[host], trace.start[host], trace.end[host], blocking, is_call
    )
    gpu_row, gpu_start, gpu_end, gpu_transfer = _gpu_nodes(trace)
    all_lanes = np.concatenate([lane, trace.lane[gpu_row]])
    order = np.argsort(all_lanes, kind="stable")  # a lane is a thread or a stream, and each is in its order already
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order))
    host_place, gpu_place = place[: len(lane)], place[len(lane) :]
    first_node, last_node, parent_row = (np.full(len(trace), -1, np.int32) for _ in range(3))
    present = last >= first
    first_node[host[present]] = host_place[first[present]]
    last_node[host[present]] = host_place[last[present]]
    parent_row[host] = np.where(parent >= 0, host[parent], -1)
    last_node[gpu_row] = gpu_place  # the later of two nodes of one row wins
    first_node[gpu_row[::-1]] = gpu_place[::-1]
    host_row = np.where(owner >= 0, host[owner], -1).astype(np.int32)
    return Nodes(
        trace=trace, first=np.concatenate([[0], np.cumsum(np.bincount(all_lanes, minlength=len(trace.lanes)))]),
        row=np.concatenate([host_row, gpu_row])[order], start=np.concatenate([begin, gpu_start])[order],
        end=np.concatenate([finish, gpu_end])[order], is_return=np.concatenate([is_return, gpu_transfer])[order],
        first_node=first_node, last_node=last_node, parent=parent_row,
    )  # fmt: skip


def _host_rows(trace: Trace) -> Any:
    """Rows of threads that work, sorted for cutting."""
    rows = np.flatnonzero(trace.is_work & trace.on_host)
    # At one start the longer event encloses the shorter; an annotation encloses an operator, an operator a call.
    depth = np.zeros(max(Category) + 1, np.int8)
    depth[[Category.NOTE, Category.OP, Category.CALL]] = (0, 1, 2)
    order = np.lexsort((depth[trace.category[rows]], -trace.end[rows], trace.start[rows], trace.lane[rows]))
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
