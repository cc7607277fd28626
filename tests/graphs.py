"""Random graphs for property tests: lanes of tasks, and edges that only go forward in time, so that they can run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from lumos.graph.graph import Edges, Graph, Rule, Times, make_graph
from lumos.trace.names import Kind


@st.composite
def graphs(draw: st.DrawFn, most_lanes: int = 5, most_tasks: int = 12, lags: bool = True) -> Graph:
    """A graph that has an order: nodes are ranked at random along their lanes, and edges follow the ranks."""
    sizes = draw(st.lists(st.integers(0, most_tasks), min_size=1, max_size=most_lanes))
    count = sum(sizes)
    first = np.concatenate([[0], np.cumsum(sizes)])
    whole = st.integers(0, 1000)
    duration = draw(st.lists(whole, min_size=count, max_size=count))
    gap = draw(st.lists(st.integers(0, 50) if lags else st.just(0), min_size=count, max_size=count))
    lane = np.repeat(np.arange(len(sizes)), sizes)
    rank = draw(st.permutations(range(count)))
    position = np.empty(count, int)
    for index in range(len(sizes)):
        members = np.flatnonzero(lane == index)
        position[members] = sorted(rank[m] for m in members)
    pairs = (
        draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=30)) if count else []
    )
    forward = [(a, b) for a, b in pairs if position[a] < position[b] and lane[a] != lane[b]]
    source, target = zip(*forward, strict=True) if forward else ((), ())
    edges = Edges.of(source, target, Rule.EVENT)
    if lags and forward:
        lag = np.array(draw(st.lists(st.integers(0, 50), min_size=len(forward), max_size=len(forward))), float)
        starts = np.array(draw(st.lists(st.booleans(), min_size=len(forward), max_size=len(forward))))
        edges = Edges(edges.source, edges.target, edges.rule, lag, edges.frozen, starts)
    kind = draw(st.lists(st.sampled_from([int(k) for k in Kind]), min_size=count, max_size=count))
    return make_graph(first, duration, edges, gap=gap, kind=kind)


def scaled(graph: Graph, factor: float) -> Graph:
    """Every duration, gap and lag times a factor."""
    edges = replace(graph.edges, lag=graph.edges.lag * factor, frozen=graph.edges.frozen * factor)
    return replace(
        graph, duration=graph.duration * factor, gap=graph.gap * factor, frozen=graph.frozen * factor, edges=edges
    )


def simulate_reference(graph: Graph) -> Times:
    """The definition, slowly: relax every edge until nothing moves."""
    size, edges = len(graph), graph.edges
    start = [0.0] * size
    end = [0.0] * size
    changed = True
    while changed:
        changed = False
        for node in range(size):
            delay = float(graph.gap[node] + graph.frozen[node])
            time = delay if graph.is_first[node] else end[node - 1] + delay
            for edge in range(graph.incoming[node], graph.incoming[node + 1]):
                reached = (start if edges.from_start[edge] else end)[edges.source[edge]]
                time = max(time, reached + float(edges.lag[edge] + edges.frozen[edge]))
            if time != start[node] or end[node] != time + graph.duration[node]:
                start[node], end[node] = time, time + float(graph.duration[node])
                changed = True
    return Times(np.array(start), np.array(end))
