"""The laws that every graph obeys, whatever it was made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import graphs, scaled, simulate_reference
from lumos.errors import CycleError
from lumos.graph.graph import Edges, Graph, Rule, make_graph, simulate, simulate_many

laws = settings(deadline=None, max_examples=150)


@laws
@given(graphs())
def test_the_fast_simulator_agrees_with_the_definition(graph: Graph) -> None:
    fast, slow = simulate(graph), simulate_reference(graph)
    np.testing.assert_array_equal(fast.start, slow.start)
    np.testing.assert_array_equal(fast.end, slow.end)


@laws
@given(graphs(), st.integers(1, 4))
def test_many_scenarios_in_one_pass_agree_with_one_by_one(graph: Graph, scenarios: int) -> None:
    durations = np.array([graph.duration * (s + 1) for s in range(scenarios)])
    together = simulate_many(graph, durations)
    for row, duration in zip(together, durations, strict=True):
        np.testing.assert_array_equal(row, simulate(graph, duration).end)


@laws
@given(graphs(), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_scaling_everything_scales_the_span(graph: Graph, factor: float) -> None:
    assert simulate(scaled(graph, factor)).span == simulate(graph).span * factor


@laws
@given(graphs(), st.data())
def test_shortening_a_task_never_lengthens_the_span(graph: Graph, data: st.DataObject) -> None:
    if len(graph) == 0:
        return
    node = data.draw(st.integers(0, len(graph) - 1))
    shorter = graph.duration.copy()
    shorter[node] *= 0.5
    assert simulate(graph, shorter).span <= simulate(graph).span


@laws
@given(graphs(lags=False))
def test_the_span_lies_between_the_longest_lane_and_the_sum(graph: Graph) -> None:
    span = simulate(graph).span
    lanes = [graph.duration[a:b].sum() for a, b in zip(graph.first, graph.first[1:], strict=False)]
    assert max(lanes) <= span <= graph.duration.sum()


@laws
@given(graphs())
def test_tasks_of_a_lane_never_overlap_and_keep_their_order(graph: Graph) -> None:
    times = simulate(graph)
    follows = ~graph.is_first[1:]
    assert (times.start[1:][follows] >= times.end[:-1][follows]).all()


@laws
@given(graphs())
def test_no_task_starts_before_what_it_waits_for(graph: Graph) -> None:
    times, edges = simulate(graph), graph.edges
    since = np.where(edges.from_start, times.start[edges.source], times.end[edges.source])
    assert (times.start[edges.target] >= since + edges.lag).all()


@laws
@given(graphs())
def test_every_start_is_decided_by_something(graph: Graph) -> None:
    times, edges = simulate(graph), graph.edges
    earliest = np.where(graph.is_first, 0.0, np.concatenate([[0.0], times.end[:-1]])) + graph.gap
    since = np.where(edges.from_start, times.start[edges.source], times.end[edges.source])
    np.maximum.at(earliest, edges.target, since + edges.lag)
    np.testing.assert_array_equal(times.start, earliest)


def test_a_cycle_is_an_error_that_names_its_tasks() -> None:
    graph = make_graph([0, 2, 4], [1, 1, 1, 1], Edges.of([1, 3], [2, 0], Rule.EVENT))
    with pytest.raises(CycleError, match=r"task 0 of lane 0.*task 3 of lane 1"):
        simulate(graph)


def test_a_graph_of_nothing_takes_no_time() -> None:
    assert simulate(make_graph([0], [], Edges.of([], [], Rule.EVENT))).span == 0.0
