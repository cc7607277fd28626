"""The inner loops, compiled by numba once and cached on disk. No other module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lumos.graph import loops

Array = NDArray[Any]


compiled = njit(cache=True, nogil=True)
topological_order = compiled(loops.topological_order)
forward_pass = compiled(loops.forward_pass)


@njit(cache=True, nogil=True)
def forward_pass_many(
    order: Array, is_first: Array, duration: Array, gap: Array, incoming: Array, source: Array, lag: Array,
    from_start: Array,
) -> Array:  # fmt: skip
    """End of every node in many scenarios at once; `duration` and the answer are (nodes, scenarios)."""
    scenarios = duration.shape[1]
    end = np.zeros(duration.shape)
    time = np.zeros(scenarios)
    for node in order:
        for s in range(scenarios):
            time[s] = gap[node] if is_first[node] else end[node - 1, s] + gap[node]
        for edge in range(incoming[node], incoming[node + 1]):
            other = source[edge]
            for s in range(scenarios):
                reached = end[other, s] - duration[other, s] if from_start[edge] else end[other, s]
                time[s] = max(time[s], reached + lag[edge])
        for s in range(scenarios):
            end[node, s] = time[s] + duration[node, s]
    return end


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def pay_debts(first: Array, duration: Array, owed: Array, kept: float, limit: float) -> Array:
    """Durations less what each node owes: each keeps a share, and the next ones owe the rest, up to a limit."""
    paid = duration.copy()
    for lane in range(len(first) - 1):
        debt = 0.0
        for node in range(first[lane], first[lane + 1]):
            debt = min(debt, limit) + owed[node]
            part = min(debt, duration[node] * (1.0 - kept))
            paid[node] = duration[node] - part
            debt -= part
    return paid


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def sum_of_trees(rows: Array, root: Array, feature: Array, threshold: Array, left: Array) -> Array:
    """The sum over all trees of the leaf that each row falls into."""
    answer = np.zeros(len(rows))
    for row in range(len(rows)):
        total = 0.0
        for tree in range(len(root)):
            node = root[tree]
            while feature[node] >= 0:
                node = left[node] + (rows[row, feature[node]] > threshold[node])
            total += threshold[node]
        answer[row] = total
    return answer


def load() -> None:
    """Load the compiled loops, or compile them the first time: half a second that may pass while files are read."""
    ints, small, flags, floats = np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, bool), np.zeros(1)
    lane, edges = np.array([0, 1]), np.zeros(2, np.int32)
    cut_into_segments(small, ints, ints, flags, flags)
    topological_order(lane, edges, small[:0])
    forward_pass(small, flags, floats, floats, edges, small[:0], floats[:0], flags[:0])
    walk_back(0, 0.0, floats, floats, flags, floats, edges, small[:0], floats[:0], flags[:0])
    pay_debts(lane, floats, floats, 0.5, 1.0)
