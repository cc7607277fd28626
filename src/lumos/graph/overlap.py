"""Overlap: kernels that run beside communication are slower, and so is communication beside kernels.

How long each takes depends on how much of it overlaps, and that on how long each takes: `contended` simulates, updates
the durations by what overlapped, and simulates again until little changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lumos.graph.graph import Floats, Graph, Ints, Times, simulate

_ROUNDS = 6
_SETTLED = 1e-4  # of the run's length


class Side(NamedTuple):
    """Nodes that disturb those of another side in the same `place`, a GPU."""

    nodes: Ints
    place: Ints
    speed: Floats  # what each keeps of its speed beside the others


def contended(graph: Graph, kernels: Side, transfers: Side) -> tuple[Graph, Times]:
    """The graph with durations as they are beside each other, and its times; `graph` has them as they are alone."""
    times, work = simulate(graph), graph.duration
    duration, length = work.copy(), 0.0
    for _ in range(_ROUNDS):
        if abs(times.span - length) <= _SETTLED * times.span:
            break
        length = times.span
        for mine, theirs in ((kernels, transfers), (transfers, kernels)):
            share = overlapped(times, mine, theirs)
            duration[mine.nodes] = work[mine.nodes] / (1 - share * (1 - mine.speed))
        times = simulate(graph, duration)
    return graph.with_times(duration, graph.gap), times


def alone(graph: Graph, kernels: Side, transfers: Side) -> Floats:
    """What durations that were recorded beside each other would be alone: the reverse of `contended`."""
    times, duration = simulate(graph), graph.duration.copy()
    for mine, theirs in ((kernels, transfers), (transfers, kernels)):
        duration[mine.nodes] *= 1 - overlapped(times, mine, theirs) * (1 - mine.speed)
    return duration


def overlapped(times: Times, mine: Side, theirs: Side) -> Floats:
    """The share of each of my nodes during which one of theirs runs in the same place."""
    if not len(theirs.nodes):
        return np.zeros(len(mine.nodes))
    apart = times.span + 1.0  # places one after the other on one axis
    order = np.lexsort((times.start[theirs.nodes], theirs.place))
    shift = theirs.place[order] * apart
    begin, end = times.start[theirs.nodes][order] + shift, times.end[theirs.nodes][order] + shift
    end = np.maximum.accumulate(end)
    begin = np.maximum(begin, np.concatenate([begin[:1], end[:-1]]))  # where two of them run at once, they count once
    ran = np.cumsum(end - begin)
    moments = np.column_stack([begin, end]).ravel()
    total = np.column_stack([ran - (end - begin), ran]).ravel()
    low, high = times.start[mine.nodes] + mine.place * apart, times.end[mine.nodes] + mine.place * apart
    busy = np.interp(high, moments, total) - np.interp(low, moments, total)
    return np.asarray(np.clip(busy / np.maximum(high - low, 1e-9), 0.0, 1.0))
