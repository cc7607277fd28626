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
