"""What every schedule does, and how long a pipeline of equal stages takes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lumos.graph.simulate import simulate, simulate_reference
from lumos.prediction.step_structure import Plan, step_structure
from lumos.schedules.schedules import Phase, Turn, order_of

SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved")
TIMES = st.integers(1, 1000).map(float)


@st.composite
def shapes(draw: st.DrawFn, schedules: tuple[str, ...] = SCHEDULES) -> tuple[str, int, int, int]:
    """(schedule, stages, chunks, micro-batches) that a setup may have."""
    schedule, pp = draw(st.sampled_from(schedules)), draw(st.integers(1, 6))
    if schedule != "interleaved":
        return schedule, pp, 1, draw(st.integers(1, 12))
    return schedule, max(2, pp), draw(st.integers(2, 4)), max(2, pp) * draw(st.integers(1, 4))


def plan_of(shape: tuple[str, int, int, int], **changes: object) -> Plan:
    plain = Plan(*shape, units=1, sharded=False, regathers=False, overlapped=False, hosted=False)
    return plain._replace(**changes)  # type: ignore[arg-type]


def span(plan: Plan, times: dict[str, float], link: float = 0.0, launch: float = 0.0) -> float:
    """The length of a step in which every block of a phase lasts equally long, and all else no time."""
    structure = step_structure(plan)
    parts = [1 if role.unit < 0 else plan.units for role in structure.roles]
    durations = np.array([times.get(role.what, 0.0) for role in structure.roles]) / parts
    return simulate(structure.filled(durations, np.array([0.0, link, launch]))).span


@given(shapes())
def test_every_stage_runs_every_block_exactly_once(shape: tuple[str, int, int, int]) -> None:
    schedule, pp, vpp, microbatches = shape
    phases = Phase if schedule == "zero-bubble" else (Phase.FORWARD, Phase.BACKWARD)
    wanted = sorted(Turn(*turn) for turn in product(phases, range(microbatches), range(vpp)))
    for stage in range(pp):
        assert sorted(order_of(schedule, stage, pp, vpp, microbatches)) == wanted


@given(shapes())
def test_gradients_come_after_what_they_are_gradients_of(shape: tuple[str, int, int, int]) -> None:
    schedule, pp, vpp, microbatches = shape
    for stage in range(pp):
        turns = order_of(schedule, stage, pp, vpp, microbatches)
        place = {turn: index for index, turn in enumerate(turns)}
        for turn in turns:
            if turn.phase != Phase.FORWARD:
                assert place[turn._replace(phase=Phase(turn.phase - 1))] < place[turn]


@given(shapes(("1f1b", "zero-bubble")))
def test_a_stage_holds_no_more_micro_batches_than_stages_follow(shape: tuple[str, int, int, int]) -> None:
    schedule, pp, vpp, microbatches = shape
    for stage in range(pp):
        held = np.cumsum([{0: 1, 1: -1}.get(t.phase, 0) for t in order_of(schedule, stage, pp, vpp, microbatches)])
        assert held.max() == min(pp - stage, microbatches)


FLAGS = list(product((False, True), repeat=3))  # sharded, overlapped, hosted


@pytest.mark.parametrize(("sharded", "overlapped", "hosted"), FLAGS)
@settings(max_examples=40)
@given(shapes(), st.integers(1, 3), st.booleans())
def test_no_structure_waits_for_itself(
    sharded: bool, overlapped: bool, hosted: bool, shape: tuple[str, int, int, int], units: int, regathers: bool
) -> None:
    plan = plan_of(
        shape, units=units, sharded=sharded, regathers=sharded and regathers, overlapped=overlapped, hosted=hosted
    )
    structure = step_structure(plan)
    assert sorted(structure.graph.order) == list(range(len(structure.graph)))
    blocks = [turn for turn, role in zip(structure.node_turn, structure.node_role, strict=True)
              if turn is not None and structure.roles[role].what == turn.phase.name.lower()]  # fmt: skip
    phases = 3 if shape[0] == "zero-bubble" else 2
    assert len(set(blocks)) == phases * plan.microbatches * plan.vpp
    assert len(blocks) >= len(set(blocks)) * plan.pp


@given(shapes(), st.booleans(), TIMES, TIMES)
def test_the_simulator_agrees_with_its_definition_on_steps(
    shape: tuple[str, int, int, int], hosted: bool, forward: float, backward: float
) -> None:
    assume(shape[1] * shape[2] * shape[3] <= 40)
    structure = step_structure(plan_of(shape, units=2, sharded=True, regathers=True, hosted=hosted))
    times = {"forward": forward, "backward": backward, "gather": 7.0, "reduce": 11.0, "host forward": 5.0}
    durations = np.array([times.get(role.what, 1.0) for role in structure.roles])
    graph = structure.filled(durations, np.array([0.0, 3.0, 2.0]))
    np.testing.assert_array_equal(simulate(graph).end, simulate_reference(graph).end)


@given(shapes(("gpipe", "1f1b")), TIMES, TIMES)
def test_a_pipeline_of_equal_stages_has_a_bubble_of_all_stages_but_one(
    shape: tuple[str, int, int, int], forward: float, backward: float
) -> None:
    _, pp, _, microbatches = shape
    step = span(plan_of(shape), {"forward": forward, "backward": backward})
    assert step == (microbatches - 1 + pp) * (forward + backward)


@given(shapes(("interleaved",)), TIMES, TIMES)
def test_chunks_make_the_bubble_smaller_by_their_number(
    shape: tuple[str, int, int, int], forward: float, backward: float
) -> None:
    _, pp, vpp, microbatches = shape
    step = span(plan_of(shape), {"forward": forward, "backward": backward})
    assert step == (microbatches * vpp + pp - 1) * (forward + backward), "times are those of a chunk"


@given(shapes(("zero-bubble",)), TIMES, TIMES, TIMES)
def test_zero_bubble_is_never_longer_than_1f1b(
    shape: tuple[str, int, int, int], forward: float, inputs: float, weights: float
) -> None:
    step = span(plan_of(shape), {"forward": forward, "backward": inputs, "weights": weights})
    usual = span(plan_of(("1f1b", *shape[1:])), {"forward": forward, "backward": inputs + weights})
    work = shape[3] * (forward + inputs + weights)
    assert work <= step <= usual


@given(shapes(("zero-bubble",)), TIMES)
def test_zero_bubble_leaves_a_third_of_the_bubble_where_all_phases_take_equally_long(
    shape: tuple[str, int, int, int], time: float
) -> None:
    _, pp, _, microbatches = shape
    assume(microbatches >= pp)
    step = span(plan_of(shape), {"forward": time, "backward": time, "weights": time})
    assert step == 3 * microbatches * time + (pp - 1) * time


@given(shapes(), TIMES, TIMES, st.integers(1, 100).map(float))
def test_a_slower_link_never_shortens_a_step(
    shape: tuple[str, int, int, int], forward: float, backward: float, link: float
) -> None:
    times = {"forward": forward, "backward": backward, "weights": backward / 2}
    fast, slow = (span(plan_of(shape), times, link=value) for value in (0.0, link))
    assert fast <= slow
    assert slow >= fast + (2 * (shape[1] - 1) * link if shape[3] == 1 and shape[0] != "zero-bubble" else 0)


@given(shapes(), st.integers(1, 4), TIMES, TIMES)
def test_weights_that_are_gathered_in_no_time_change_nothing(
    shape: tuple[str, int, int, int], units: int, forward: float, backward: float
) -> None:
    times = {"forward": forward, "backward": backward, "weights": backward}
    whole = span(plan_of(shape), times)
    sharded = span(plan_of(shape, units=units, sharded=True, regathers=True), times)
    assert sharded == pytest.approx(whole, rel=1e-12)


@given(shapes(), TIMES, TIMES)
def test_a_host_that_takes_no_time_changes_nothing(
    shape: tuple[str, int, int, int], forward: float, backward: float
) -> None:
    times = {"forward": forward, "backward": backward, "weights": backward}
    assert span(plan_of(shape, hosted=True), times) == span(plan_of(shape), times)


@given(shapes(), TIMES, TIMES, TIMES)
def test_a_slow_host_decides(shape: tuple[str, int, int, int], forward: float, backward: float, host: float) -> None:
    times = {"forward": forward, "backward": backward, "weights": backward, "host forward": host, "host backward": host}
    step = span(plan_of(shape, hosted=True), times)
    assert step >= 2 * shape[2] * shape[3] * host
    assert step >= span(plan_of(shape), times)
