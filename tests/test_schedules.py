"""What every schedule does, and how long a pipeline of equal stages takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphs import simulate_reference
from lumos.graph.graph import simulate
from lumos.schedules import Phase, Schedule, Turn, names, schedule_named, schedules_of
from lumos.step.structure import Plan, step_structure

SCHEDULES = names()
TIMES = st.integers(1, 1000).map(float)


@st.composite
def shapes(draw: st.DrawFn, schedules: tuple[str, ...] = SCHEDULES) -> tuple[str, int, int, int]:
    """(schedule, stages, chunks, micro-batches) that a setup may have."""
    schedule, pp = draw(st.sampled_from(schedules)), draw(st.integers(1, 6))
    fewest, most = schedule_named(schedule).chunks
    vpp = draw(st.integers(fewest, min(most, 4)))
    pp = max(2, pp) if vpp > 1 else pp
    if schedule_named(schedule).pairs:
        pp = pp + pp % 2 if schedule == "dualpipe" else pp
        microbatches = 2 * (pp + draw(st.integers(0, 4)))
    else:
        microbatches = pp * draw(st.integers(1, 4)) if schedule == "interleaved" else draw(st.integers(1, 12))
    assert schedule_named(schedule).problem(pp, vpp, microbatches) == ""
    return schedule, pp, vpp, microbatches


def order_of(schedule: str, stage: int, pp: int, vpp: int, microbatches: int) -> list[Turn]:
    return schedule_named(schedule).order(stage, pp, vpp, microbatches)


def phases_of(schedule: str) -> tuple[Phase, ...]:
    return tuple(Phase) if schedule_named(schedule).splits_backward else (Phase.FORWARD, Phase.BACKWARD)


def plan_of(shape: tuple[str, int, int, int], **changes: object) -> Plan:
    plain = Plan(*shape, units=1, gathers="never", overlapped=False, hosted=False)
    return plain._replace(**changes)  # type: ignore[arg-type]


def span(plan: Plan, times: dict[str, float], link: float = 0.0, launch: float = 0.0) -> float:
    """The length of a step in which every block of a phase lasts equally long, and all else no time."""
    structure = step_structure(plan)
    parts = [1 if role.unit < 0 else plan.units for role in structure.roles]
    durations = np.array([times.get(role.what, 0.0) for role in structure.roles]) / parts
    return simulate(structure.filled(durations, launch, [link] * len(structure.links))).span


@given(shapes())
def test_every_stage_runs_every_block_exactly_once(shape: tuple[str, int, int, int]) -> None:
    schedule, pp, vpp, microbatches = shape
    wanted = sorted(Turn(*turn) for turn in product(phases_of(schedule), range(microbatches), range(vpp)))
    if schedule == "dualpipe":  # a micro-batch goes one way, through the chunk of that way
        wanted = sorted(turn._replace(chunk=2 * turn.microbatch // microbatches) for turn in wanted)
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


GATHERS = ("never", "every pass", "once")


@pytest.mark.parametrize(("gathers", "always", "hosted"), list(product(GATHERS, (False, True), (False, True))))
@settings(max_examples=40)
@given(shapes(), st.integers(1, 3), st.booleans(), st.booleans())
def test_no_structure_waits_for_itself(
    gathers: str, always: bool, hosted: bool,
    shape: tuple[str, int, int, int], units: int, overlapped: bool, in_turn: bool,
) -> None:  # fmt: skip
    beside = overlapped or gathers != "never"
    plan = plan_of(shape, units=units, gathers=gathers, overlapped=beside, reduces_always=always, hosted=hosted)
    plan = plan._replace(in_turn=in_turn and gathers != "never")
    structure = step_structure(plan)
    assert sorted(structure.graph.order) == list(range(len(structure.graph)))
    blocks = [turn for turn, role in zip(structure.node_turn, structure.node_role, strict=True)
              if turn is not None and structure.roles[role].what == turn.phase.name.lower()]  # fmt: skip
    assert len(set(blocks)) == len(phases_of(shape[0])) * plan.microbatches * plan.vpp
    assert len(blocks) >= len(set(blocks)) * plan.pp


@given(shapes(), st.booleans(), TIMES, TIMES)
def test_the_simulator_agrees_with_its_definition_on_steps(
    shape: tuple[str, int, int, int], hosted: bool, forward: float, backward: float
) -> None:
    assume(shape[1] * shape[2] * shape[3] <= 40)
    plan = plan_of(shape, units=2, gathers="every pass", overlapped=True, reduces_always=True, hosted=hosted)
    structure = step_structure(plan)
    times = {"forward": forward, "backward": backward, "gather": 7.0, "reduce": 11.0, "host forward": 5.0}
    durations = np.array([times.get(role.what, 1.0) for role in structure.roles])
    graph = structure.filled(durations, 2.0, [3.0 + link for link in range(len(structure.links))])
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
    alone = shape[2:] == (1, 1) and not schedule_named(shape[0]).splits_backward
    assert slow >= fast + (2 * (shape[1] - 1) * link if alone else 0)


@given(shapes(), st.integers(1, 4), TIMES, TIMES)
def test_weights_that_are_gathered_in_no_time_change_nothing(
    shape: tuple[str, int, int, int], units: int, forward: float, backward: float
) -> None:
    times = {"forward": forward, "backward": backward, "weights": backward}
    whole = span(plan_of(shape), times)
    for gathers in ("every pass", "once"):
        sharded = span(plan_of(shape, units=units, gathers=gathers, overlapped=True), times)
        assert sharded == pytest.approx(whole, rel=1e-12)


@given(shapes(), st.integers(1, 4))
def test_gathers_and_reductions_are_as_many_as_the_plan_says(shape: tuple[str, int, int, int], units: int) -> None:
    _, pp, vpp, microbatches = shape
    for gathers, always, wanted in (
        ("once", False, (1, 1)),
        ("every pass", True, (2 * microbatches, microbatches)),
        ("never", False, (0, 1)),
        ("never", True, (0, microbatches)),
    ):
        plan = plan_of(shape, units=units, gathers=gathers, overlapped=True, reduces_always=always)
        structure = step_structure(plan)
        whats = [structure.roles[role].what for role in structure.node_role]
        chunks = pp * vpp * (schedule_named(shape[0]).copies if not always else 1)
        assert (whats.count("gather"), whats.count("reduce")) == tuple(chunks * units * each for each in wanted)


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


# What a schedule says of itself


@given(shapes())
def test_what_is_held_is_what_the_turns_leave_open(shape: tuple[str, int, int, int]) -> None:
    """Closed forms are those of the turns. Late weight gradients leave one more open for a moment."""
    name, pp, vpp, microbatches = shape
    schedule = schedule_named(name)
    for stage in range(pp):
        stated = schedule.in_flight(stage, pp, vpp, microbatches)
        counted = Schedule.in_flight(schedule, stage, pp, vpp, microbatches)
        if name == "zero-bubble":
            assert abs(sum(stated) - sum(counted)) <= 1
        else:
            assert stated == counted


@given(shapes())
def test_no_stage_holds_more_than_the_one_before_it(shape: tuple[str, int, int, int]) -> None:
    name, *counts = shape
    assume(schedule_named(name).first_holds_most)
    held = [sum(schedule_named(name).in_flight(stage, *counts)) for stage in range(counts[0])]
    assert held == sorted(held, reverse=True)


@given(shapes())
def test_every_virtual_stage_lies_somewhere_once_or_as_often_as_there_are_copies(
    shape: tuple[str, int, int, int],
) -> None:
    name, pp, vpp, _ = shape
    schedule = schedule_named(name)
    assert sorted(schedule.virtual_stages(pp, vpp).ravel()) == sorted([*range(pp * vpp)] * schedule.copies)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 7, 12])
def test_zb_v_takes_the_turns_of_torch(pp: int, microbatches: int) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
    ours = schedule_named("zero-bubble-v")
    places = ours.virtual_stages(pp, 2)
    phases = {"FORWARD": Phase.FORWARD, "BACKWARD_INPUT": Phase.BACKWARD, "BACKWARD_WEIGHT": Phase.WEIGHTS}
    theirs = pipelining.ScheduleZBVZeroBubble.__new__(pipelining.ScheduleZBVZeroBubble)
    theirs.pp_group_size, theirs.num_stages, theirs._n_microbatches = pp, 2 * pp, microbatches
    for stage in range(pp):
        actions = [a for a in theirs._calculate_single_rank_operations(stage) if a is not None]
        chunk_of = {int(virtual): chunk for chunk, virtual in enumerate(places[stage])}
        wanted = [Turn(phases[a.computation_type.name], a.microbatch_index, chunk_of[a.stage_index]) for a in actions]
        assert ours.order(stage, pp, 2, microbatches) == wanted


def _action_turns(action: Any, chunk_of: dict[int, int]) -> Iterator[tuple[Turn, bool]]:
    """The turns of an action of torch, and whether each is one unit with the turn before it."""
    phases = {"FORWARD": (Phase.FORWARD,), "BACKWARD_INPUT": (Phase.BACKWARD,), "BACKWARD_WEIGHT": (Phase.WEIGHTS,)}
    for part, one in enumerate(action.sub_actions or (action,)):
        for index, phase in enumerate(phases.get(one.computation_type.name, (Phase.BACKWARD, Phase.WEIGHTS))):
            yield Turn(phase, one.microbatch_index, chunk_of[one.stage_index]), part + index > 0


@pytest.mark.parametrize("pp", [2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipe_v_takes_the_turns_of_torch_together_where_torch_does(pp: int, more: int) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
    ours, count = schedule_named("dualpipe-v"), 2 * pp + more
    places, joined = ours.virtual_stages(pp, 2), ours.joined(pp, 2, count)
    theirs = pipelining.ScheduleDualPipeV.__new__(pipelining.ScheduleDualPipeV)
    theirs.pp_group_size, theirs.num_stages, theirs._num_stages, theirs._n_microbatches = pp, 2 * pp, 2 * pp, count
    for stage in range(pp):
        chunk_of = {int(virtual): chunk for chunk, virtual in enumerate(places[stage])}
        actions = [a for a in theirs._calculate_single_rank_operations(stage) if a is not None]
        wanted = [turn for action in actions for turn in _action_turns(action, chunk_of)]
        assert list(zip(ours.order(stage, pp, 2, count), joined[stage].tolist(), strict=True)) == wanted


def test_dualpipe_mirrors_a_v_of_half_as_many_stages() -> None:
    """Micro-batches of the forward way are the first half; a stage and its mirror image exchange the ways."""
    whole, half = schedule_named("dualpipe"), schedule_named("dualpipe-v")
    for stage in range(8):
        place = min(stage, 7 - stage)
        found = whole.order(stage, 8, 1, 20)
        assert [t.phase for t in found] == [t.phase for t in half.order(place, 4, 2, 10)]
        assert [t.chunk ^ (stage > 3) for t in found] == [t.chunk for t in half.order(place, 4, 2, 10)]
        assert all((t.microbatch >= 10) == t.chunk for t in found)
    assert (whole.joined(8, 1, 20) == np.concatenate([half.joined(4, 2, 10), half.joined(4, 2, 10)[::-1]])).all()


def paired_span(shape: tuple[str, int, int, int], forward: float, inputs: float, weights: float, pair: float) -> float:
    """The length of a step whose forward passes beside backward passes take `pair` with them."""
    structure = step_structure(plan_of(shape))
    alone = {"forward": forward, "backward": inputs, "weights": weights}
    beside = {"forward": pair, "backward": 0.0, "weights": 0.0}
    times = [(alone if role.partner < 0 else beside).get(role.what, 0.0) for role in structure.roles]
    return simulate(structure.filled(np.array(times), 0.0, [0.0] * len(structure.links))).span


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
@pytest.mark.parametrize("more", [0, 6])
@pytest.mark.parametrize(("forward", "weights"), [(10.0, 10.0), (10.0, 8.0), (12.0, 6.0)])
def test_dualpipe_has_the_published_bubble(pp: int, more: int, forward: float, weights: float) -> None:
    """(PP/2 - 1)(F&B + B - 3W) (deepseek-ai/DualPipe), where input gradients take as long as the forward pass."""
    count, pair = 2 * pp + more, 2 * forward + weights
    step = paired_span(("dualpipe", pp, 1, count), forward, forward, weights, pair)
    bubble = (pp / 2 - 1) * (pair + (forward + weights) - 3 * weights)
    assert step == pytest.approx(count * pair + bubble)


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_dualpipe_holds_one_micro_batch_more_than_stages_and_two_copies_of_the_parameters(pp: int) -> None:
    """The table of deepseek-ai/DualPipe: activations PP + 1, parameters 2; DualPipeV on half as many GPUs the same."""
    whole, half = schedule_named("dualpipe"), schedule_named("dualpipe-v")
    assert {sum(whole.in_flight(stage, pp, 1, 3 * pp)) for stage in range(pp)} == {pp + 1}
    assert {sum(half.in_flight(stage, pp // 2, 2, 3 * pp)) for stage in range(pp // 2)} == {pp + 1}
    assert np.bincount(whole.virtual_stages(pp, 1).ravel()).tolist() == [2] * pp


@given(shapes(("dualpipe", "dualpipe-v")), TIMES, TIMES, TIMES)
def test_passes_that_hide_each_other_are_never_slower(
    shape: tuple[str, int, int, int], forward: float, inputs: float, weights: float
) -> None:
    plain = paired_span(shape, forward, inputs, weights, forward + inputs + weights)
    hidden = paired_span(shape, forward, inputs, weights, max(forward, inputs + weights))
    assert hidden <= plain
    assert plain >= (2 if shape[0] == "dualpipe-v" else 1) * shape[3] * (forward + inputs + weights)


@pytest.mark.parametrize(
    ("pp", "microbatches", "problem"),
    [(3, 8, "pp = 3 is odd"), (4, 9, "microbatches = 9 is odd"), (4, 6, "fewer than 8"), (4, 8, "")],
)
def test_dualpipe_needs_pairs_of_stages_and_enough_micro_batches(pp: int, microbatches: int, problem: str) -> None:
    found = schedule_named("dualpipe").problem(pp, 1, microbatches)
    assert problem in found
    assert bool(problem) == bool(found)


@given(st.integers(2, 6), st.integers(0, 8), TIMES)
def test_zb_v_has_no_bubble_but_the_fill_where_all_phases_take_equally_long(pp: int, more: int, time: float) -> None:
    microbatches = 2 * pp - 1 + more
    times = dict.fromkeys(("forward", "backward", "weights"), time)
    step = span(plan_of(("zero-bubble-v", pp, 2, microbatches)), times)
    assert step == 6 * microbatches * time + (pp - 1) * time, "times are those of a chunk, half of a stage"


def test_frameworks_have_the_schedules_of_their_documentation() -> None:
    assert schedules_of("megatron") == ("1f1b", "interleaved")
    assert schedules_of("torchtitan") == (
        *("1f1b", "dualpipe-v", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v"),
    )
    assert schedules_of("deepseek") == ("1f1b", "dualpipe", "zero-bubble"), "DeepSeek-V2 was trained with the last"
    assert schedules_of("llm-foundry") == (), "FSDP alone"


@pytest.mark.parametrize(
    ("name", "vpp", "links"), [("gpipe", 1, 3), ("1f1b", 1, 3), ("zero-bubble", 1, 3), ("interleaved", 3, 11),
                               ("zero-bubble-v", 2, 6), ("dualpipe-v", 2, 6), ("dualpipe", 1, 3)]
)  # fmt: skip
def test_a_micro_batch_changes_stages_between_any_two_virtual_stages_that_lie_apart(
    name: str, vpp: int, links: int
) -> None:
    """On four stages: between 12 virtual stages dealt around, 11 times; the turning point of a V stays where it is."""
    found = schedule_named(name).crossings(4, vpp)
    assert len(found) == links
    assert {abs(one - other) for one, other in found} == ({1, 3} if name == "interleaved" else {1}), "around, or down"
    assert schedule_named(name).crossings(1, vpp) == ()


@pytest.mark.parametrize(("stage", "held"), [(0, 11), (1, 9), (2, 7), (3, 5)])
def test_interleaving_holds_two_more_for_every_stage_that_follows_and_a_round_for_every_further_chunk(
    stage: int, held: int
) -> None:
    """Megatron's warm-up: 2 (p - s - 1) + (v - 1) p forward passes, and the one before the first backward pass."""
    interleaved = schedule_named("interleaved")
    assert sum(interleaved.in_flight(stage, 4, 2, 16)) == held
    phases = [turn.phase for turn in interleaved.order(stage, 4, 2, 16)]
    assert phases.index(Phase.BACKWARD) == held


def test_interleaving_needs_whole_rounds() -> None:
    interleaved = schedule_named("interleaved")
    assert "multiple of parallel.pp = 4" in interleaved.problem(4, 2, 6)
    assert interleaved.problem(4, 2, 8) == ""
    assert schedule_named("1f1b").problem(4, 1, 6) == ""


def test_schedules_say_how_many_virtual_stages_a_stage_may_have() -> None:
    chunks = {name: schedule_named(name).chunks for name in SCHEDULES}
    assert chunks["1f1b"] == chunks["gpipe"] == chunks["zero-bubble"] == (1, 1)
    assert chunks["zero-bubble-v"] == chunks["dualpipe-v"] == (2, 2)
    assert chunks["dualpipe"] == (1, 1), "the two parts of a stage are copies of parts that others have, too"
    assert chunks["interleaved"][0] == 2
    assert chunks["interleaved"][1] >= 128, "as many as a model has layers"
