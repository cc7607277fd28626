"""Times of a run in a secret scale: multiplied by a factor, and blurred so that the factor cannot be computed.

A factor alone is not secret. Clocks tick: the GPUs of NVIDIA count in 32 ns, older profilers in microseconds, so that
scaled durations are multiples of the tick times the factor, and a scan over factors finds it to five digits. Every
point in time is therefore moved at random by about a tick. All events at one time move together, and no two times
change places, so that tasks keep their order, their nesting and what they wait for.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from lumos.graph.graph import Floats, Graph, Ints, simulate
from lumos.graph.rules.build import Execution, timed_graph
from lumos.trace.trace import Trace

_FASTEST, _SLOWEST = 0.5, 2.0  # bounds of the factor
_BLUR = 1.5  # standard deviation of what times are moved by, in ticks: enough to hide those of the slowest factor
_SHORTEST_TICK = 32  # ns
_TICKS = (1_000_000, 100_000, 10_000, 1_000, 500, 250, 200, 125, 100, 64)  # longer ones that clocks may have
_ON_TICK = 0.02  # how near to a multiple of a tick a duration counts as one
_ENOUGH = 0.7  # the share of durations that must be multiples: of 32 ns, half are multiples of 64 too


def with_hidden_times(execution: Execution) -> Execution:
    """The same run at other times, which begin at zero."""
    trace, nodes, graph = execution.trace, execution.nodes, execution.graph
    times, size = simulate(graph), len(nodes)
    begun, ended = (np.rint(column).astype(np.int64) + execution.origin for column in times)
    origin = np.array([execution.origin], np.int64)
    scale = _Scale(np.concatenate([trace.start, trace.end, nodes.start, nodes.end, begun, ended, origin]), _tick(trace))
    start = scale.at(trace.start)
    trace = replace(trace, start=start, duration=scale.at(trace.end) - start)
    moved = replace(nodes, trace=trace, start=scale.at(nodes.start), end=scale.at(nodes.end))
    begun, ended = scale.at(begun), scale.at(ended)
    if _has_delays(graph):
        # Usual delays are public numbers: those of the graph times the factor would tell it. They are found anew.
        ran = replace(moved, start=begun[:size], end=ended[:size])
        graph, zero = timed_graph(ran, graph.edges, begun[size:])
    else:
        graph = graph.with_times((ended - begun).astype(np.float64), graph.gap)
        zero = int(scale.at(origin)[0])
    return replace(execution, trace=trace, nodes=moved, graph=graph, origin=zero)


class _Scale:
    """What becomes of every one of some points in time: later ones stay later."""

    def __init__(self, times: Ints, tick: int) -> None:
        secret = random.SystemRandom()
        factor = secret.uniform(_FASTEST**0.5, _SLOWEST**0.5) ** 2
        noise = np.random.default_rng(secret.getrandbits(128))
        self._old = np.unique(times)
        # The blur is as wide for every factor, or else its width would tell the factor.
        blurred = (self._old - self._old[0]) * factor + noise.normal(0.0, _BLUR * tick, len(self._old))
        new = np.sort(np.rint(blurred).astype(np.int64))
        count = np.arange(len(new))
        new = np.maximum.accumulate(new - count) + count  # no two times become one
        self._new = new - new[0]

    def at(self, times: Ints) -> Ints:
        return np.asarray(self._new[np.searchsorted(self._old, times)], np.int64)


def _tick(trace: Trace) -> int:
    """The longest tick of the clocks of GPUs and hosts, as far as durations show it."""
    parts = (trace.duration[rows & (trace.duration > 0)] for rows in (trace.on_gpu, ~trace.on_gpu))
    return max(_tick_of(durations) for durations in parts)


def _tick_of(durations: Ints) -> int:
    for tick in _TICKS if len(durations) else ():
        off = np.abs(durations - np.maximum(np.rint(durations / tick), 1) * tick)
        if (off <= _ON_TICK * tick).mean() > _ENOUGH:
            return tick
    return _SHORTEST_TICK


def _has_delays(graph: Graph) -> bool:
    """Whether anything but work takes time; graphs of other tools have none."""
    columns: tuple[Floats, ...] = (graph.gap, graph.frozen, graph.edges.lag, graph.edges.frozen)
    return any(bool(column.any()) for column in columns)
