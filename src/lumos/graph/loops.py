"""The loops of the simulator as plain Python; `compiled_loops` compiles them.

Loading numba takes half a second, as long as these take for some 200,000 nodes: a command that simulates one described
step does without it. Work is counted, and the compiled loops are loaded once it has become worth it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_SMALL = 100_000  # nodes


class _Work:
    """Nodes that were visited so far in this process."""

    nodes = 0


def worth_compiling(nodes: int) -> bool:
    """Whether compiled loops are faster for a graph and all work before it, the time to load them included."""
    _Work.nodes += nodes
    return _Work.nodes > _SMALL or "lumos.graph.compiled_loops" in sys.modules


def loops_for(nodes: int) -> Any:
    """The module whose loops a graph of this size is run by: the compiled ones, or this one."""
    if worth_compiling(nodes):
        from lumos.graph import compiled_loops

        return compiled_loops
    return sys.modules[__name__]


def topological_order(first: Array, incoming: Array, source: Array) -> tuple[Array, int]:
    """Run every lane until it meets a node that waits for one which has not run; that one wakes it again."""
    lanes = len(first) - 1
    size = first[lanes]
    order = np.empty(size, np.int32)
    has_run = np.zeros(size, np.bool_)
    waiting = np.full(size, -1, np.int32)  # the first lane that waits for a node, then the next one of each lane
    next_waiting = np.full(lanes, -1, np.int32)
    cursor = first[:-1].copy()
    checked = np.empty(lanes, np.int64)  # edges of the cursor's node up to here are known to have run
    stack = np.empty(lanes + 1, np.int32)
    top, done = 0, 0
    for lane in range(lanes - 1, -1, -1):
        checked[lane] = incoming[first[lane]]
        stack[top] = lane
        top += 1
    while top > 0:
        top -= 1
        lane = stack[top]
        node, edge, blocker = cursor[lane], checked[lane], -1
        while node < first[lane + 1]:
            while edge < incoming[node + 1] and has_run[source[edge]]:
                edge += 1
            if edge < incoming[node + 1]:
                blocker = source[edge]
                break
            order[done] = node
            done += 1
            has_run[node] = True
            other = waiting[node]
            while other >= 0:
                stack[top] = other
                top += 1
                other = next_waiting[other]
            node += 1
        cursor[lane], checked[lane] = node, edge
        if blocker >= 0:
            next_waiting[lane], waiting[blocker] = waiting[blocker], lane
    return order, done


def forward_pass(
    order: Array, is_first: Array, duration: Array, gap: Array, incoming: Array, source: Array, lag: Array,
    from_start: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Start and end of every node."""
    start = np.zeros(len(duration))
    end = np.zeros(len(duration))
    for node in order:
        time = gap[node] if is_first[node] else end[node - 1] + gap[node]
        for edge in range(incoming[node], incoming[node + 1]):
            other = (start[source[edge]] if from_start[edge] else end[source[edge]]) + lag[edge]
            if other > time:
                time = other
        start[node] = time
        end[node] = time + duration[node]
    return start, end


def cut_into_segments(
    lane: Array, start: Array, end: Array, blocking: Array, is_call: Array
) -> tuple[Array, Array, Array, Array, Array, Array, Array, Array]:
    """Nested events of threads to segments that follow one another.

    Events come sorted by lane, start and falling end. Every moment belongs to the deepest open event, or to none
    (-1): then the thread runs something that was not recorded. A blocking call yields two segments, an empty one on
    entry and one on return. Returns the segments' lane, event, start, end, whether they are a return, and the first
    and last segment and the enclosing event (-1 for none) of every event.
    """
    count = len(start)
    limit = 2 * count + 2 * int(blocking.sum()) + 8
    where, owner = np.empty(limit, np.int32), np.empty(limit, np.int32)
    begin, finish = np.empty(limit, np.int64), np.empty(limit, np.int64)
    is_return = np.zeros(limit, np.bool_)
    first, last = np.zeros(count, np.int32), np.zeros(count, np.int32)
    parent = np.full(count, -1, np.int32)
    stack = np.empty(count + 1, np.int32)
    closing = end.copy()
    depth, made = 0, 0
    now = np.int64(0)
    for event in range(count + 1):
        new_lane = event == count or event == 0 or lane[event] != lane[event - 1]
        while depth > 0:
            open_event = stack[depth - 1]
            if not new_lane and closing[open_event] > start[event]:
                # Times rounded to microseconds make events that follow one another overlap a little.
                over = end[event] - closing[open_event]
                if over <= closing[open_event] - start[event]:
                    break
                closing[open_event] = start[event]
            where[made] = lane[open_event]
            if closing[open_event] > now or (is_call[open_event] and first[open_event] >= made):
                owner[made], begin[made], finish[made] = open_event, now, max(now, closing[open_event])
                made += 1
            elif blocking[open_event]:
                owner[made], begin[made], finish[made] = open_event, now, now
                made += 1
            if blocking[open_event]:
                is_return[made - 1] = True
            now = max(now, closing[open_event])
            last[open_event] = made - 1
            depth -= 1
        if event == count:
            break
        if new_lane:
            now = start[event]
        if start[event] > now:
            where[made], owner[made] = lane[event], stack[depth - 1] if depth > 0 else -1
            begin[made], finish[made] = now, start[event]
            made += 1
            now = start[event]
        if depth > 0:
            parent[event] = stack[depth - 1]
            closing[event] = min(closing[event], closing[parent[event]])
        first[event] = made
        if blocking[event]:
            where[made], owner[made], begin[made], finish[made] = lane[event], event, now, now
            made += 1
        stack[depth] = event
        depth += 1
    return where[:made], owner[:made], begin[:made], finish[:made], is_return[:made], first, last, parent


def walk_back(
    last: int, since: float, start: Array, end: Array, is_first: Array, gap: Array, incoming: Array, source: Array,
    lag: Array, from_start: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """The chain of nodes that decided when `last` started, and the edge by which each followed (-1: its lane's order).

    Where an edge and the order of the lane reach a node at the same time, the edge counts: it says more.
    """
    nodes = np.empty(len(start), np.int64)
    edges = np.empty(len(start), np.int64)
    count = 0
    node = last
    while node >= 0 and end[node] > since and count < len(start):
        best = gap[node] if is_first[node] else end[node - 1] + gap[node]
        before = -1 if is_first[node] else node - 1
        chosen = -1
        for edge in range(incoming[node], incoming[node + 1]):
            other = source[edge]
            reached = (start[other] if from_start[edge] else end[other]) + lag[edge]
            if reached > best or (reached == best and chosen < 0):
                best, before, chosen = reached, other, edge
        nodes[count], edges[count] = node, chosen
        count += 1
        node = before
    return nodes[:count][::-1].copy(), edges[:count][::-1].copy()
