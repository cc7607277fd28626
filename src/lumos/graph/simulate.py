"""The simulator: one forward pass over the graph in topological order, compiled by numba for all but small graphs.

The tests hold it to a definition in plain Python (`simulate_reference` in tests/graphs.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lumos.graph.graph import Floats, Graph
from lumos.graph.loops import loops_for


class Times(NamedTuple):
    """When every node starts and ends, in nanoseconds from the start of the run."""

    start: Floats
    end: Floats

    @property
    def span(self) -> float:
        """From time zero to the last end."""
        return float(self.end.max(initial=0.0))


def simulate(graph: Graph, duration: Floats | None = None) -> Times:
    """Start every node as soon as everything it waits for has ended: `simulate(graph).span` is the run's length."""
    durations = graph.duration if duration is None else np.ascontiguousarray(duration, np.float64)
    forward_pass = loops_for(len(graph)).forward_pass
    return Times(*forward_pass(graph.order, graph.is_first, durations, *_delays(graph)))


def simulate_many(graph: Graph, durations: Floats) -> Floats:
    """Ends of all nodes for many scenarios in one pass; `durations` and the answer are (scenarios, nodes)."""
    from lumos.graph.compiled_loops import forward_pass_many

    columns = np.ascontiguousarray(durations.T, np.float64)
    return np.ascontiguousarray(forward_pass_many(graph.order, graph.is_first, columns, *_delays(graph)).T)


def _delays(graph: Graph) -> tuple[Any, ...]:
    """What the loops know of gaps and edges: frozen time counts like explained time."""
    edges = graph.edges
    return graph.gap + graph.frozen, graph.incoming, edges.source, edges.lag + edges.frozen, edges.from_start
