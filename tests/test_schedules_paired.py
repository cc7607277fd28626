"""DualPipe and DualPipeV as setups have them: passes that hide each other's exchanges, copies, limits of routing."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from lumos.chakra.step_tasks import StepTasks
from lumos.costs.costs import costs_of
from lumos.costs.energy import in_step_factors
from lumos.costs.model_costs import ModelCosts
from lumos.costs.network import network_of
from lumos.described.experts import reached
from lumos.memory.memory import memory_of
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.prediction import predict
from lumos.program.op import EXCHANGE, Op
from lumos.program.operators import Collective, Group, Operator
from lumos.risk.lanes import lanes_of
from lumos.schedules import Phase
from lumos.setup.constraints import check
from lumos.setup.gpus import gpu_named
from lumos.setup.sections import Model
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_setup
from lumos.step.block_timeline import Row
from lumos.step.bounds import bound_us
from lumos.step.dualpipe_overlap import Piece, together
from lumos.step.rows import StepTrace, Track
from lumos.step.step import Step, simulate_step
from lumos.step.structure import Role

ROOT = Path(__file__).resolve().parents[1]
MODEL: dict[str, Any] = {
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "vocab": 32000,
    "experts": 64,
    "top_k": 8,
    "expert_ffn": 1024,
}


def setup_of(schedule: str = "dualpipe", **changes: Any) -> Setup:
    vpp = 2 if schedule.endswith("-v") else 1
    values: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "train": {"seq": 4096, "microbatches": 24, "framework": "deepseek", "cuda_graphs": True},
        "parallel": {"pp": 4, "vpp": vpp, "ep": 16, "dp": 16, "zero": 1, "schedule": schedule},
        "cluster": {"gpu": "h800"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values[section] = values[section] | {name: value}
    found = Setup(**values)  # type: ignore[arg-type]
    check(found)
    return found


@cache
def step_of(schedule: str = "dualpipe", **changes: Any) -> Step:
    return simulate_step(setup_of(schedule, **changes))


def prices() -> ModelCosts:
    return costs_of(setup_of())


MATMUL = Op("up", work=Operator("gemm_tn", (4096, 4096, 4096)))
LATER = MATMUL._replace(weight_gradient=True)
SENT = Op("experts dispatch", work=Collective("all_to_all", 1e8, Group(16, 8)), stream=EXCHANGE)


def pieces(pattern: str, phase: Phase, us: float = 100.0) -> list[Piece]:
    """A pass of matmuls (m), exchanges (x) and gradients of weights (w), which take equally long."""
    found = {"m": MATMUL, "x": SENT, "w": LATER}
    return [Piece(found[kind], us, phase) for kind in pattern]


def length(rows: list[tuple[Phase, Row]]) -> float:
    return max(row.end_us for _, row in rows)


@pytest.mark.parametrize(
    ("forward", "backward", "wanted"),
    [
        ("mmm", "mm", 500.0),  # nothing to hide
        ("mx", "mm", 300.0),  # an exchange behind the other pass
        ("mxm", "xmx", 300.0),  # both in step with each other: none is exposed
        ("mxm", "mmm", 500.0),
        ("xm", "xm", 300.0),  # both begin with one: the first is exposed
        ("xm", "xwm", 300.0),  # … unless a gradient of weights can run meanwhile
        ("mx", "", 200.0),  # alone: exposed
    ],
)
def test_exchanges_of_one_pass_hide_behind_the_work_of_the_other(forward: str, backward: str, wanted: float) -> None:
    priced = prices()
    priced.contends = False
    rows = together(pieces(forward, Phase.FORWARD), pieces(backward, Phase.BACKWARD), priced)
    assert length(rows) == wanted
    assert Counter(phase for phase, _ in rows) == {
        phase: count for phase, count in ((Phase.FORWARD, len(forward)), (Phase.BACKWARD, len(backward))) if count
    }


def test_passes_keep_their_order_and_streams_run_one_thing_at_a_time() -> None:
    priced, random = prices(), Random(7)
    for _ in range(50):
        patterns = ["".join(random.choice("mxw") for _ in range(random.randint(1, 12))) for _ in range(2)]
        given = [
            pieces(pattern, phase, random.uniform(20, 300)) for pattern, phase in zip(patterns, Phase, strict=False)
        ]
        rows = together(given[0], given[1], priced)
        assert len(rows) == sum(map(len, patterns))
        for talks in (False, True):
            stream = sorted(row[1:] for _, row in rows if isinstance(row.op.work, Collective) == talks)
            assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(stream))
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            order = [row for found, row in rows if found == phase and not row.op.weight_gradient]
            assert all(a.end_us <= b.start_us + 1e-9 for a, b in pairwise(order))
        alone = sum(piece.us for one in given for piece in one)
        work = sum(piece.us for one in given for piece in one if not piece.op.stream)
        assert work <= length(rows) <= 1.5 * alone


def test_matmuls_that_leave_room_for_communication_lose_its_share_of_the_multiprocessors() -> None:
    priced = prices()
    beside = priced.running(SENT.work, 1e3)  # type: ignore[arg-type]
    assert beside.blocks == 20
    assert priced.slowdown(MATMUL.work, beside) == 132 / 112  # type: ignore[arg-type]
    priced.leaves_sms = False
    assert priced.slowdown(MATMUL.work, beside) > 132 / 112, "others lose whole rounds"  # type: ignore[arg-type]


# The step


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
def test_a_pair_takes_less_than_both_passes_and_no_less_than_their_work(schedule: str) -> None:
    step = step_of(schedule)
    for stage, forward in ((0, 0), (1, 1)):
        chunks = step.chunks[stage]
        pair = step.assembly.pair_of(Role("forward", stage, forward, -1, 1 - forward))
        begun, ended = chunks[forward].forward, chunks[1 - forward]
        together_us = sum(block.us for block in pair[:3])
        assert together_us < begun.us + ended.backward.us + ended.weights.us
        assert together_us >= 0.999 * (begun.compute_us + ended.backward.compute_us + ended.weights.compute_us)
        assert pair == step.assembly.pair_of(Role("backward", stage, 1 - forward, -1, forward))


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
def test_without_overlap_the_same_order_exposes_all_exchanges(schedule: str) -> None:
    hidden, exposed = step_of(schedule), step_of(schedule, parallel__ep_overlap=False)
    assert hidden.structure.graph.edges is exposed.structure.graph.edges, "one structure, other times"
    assert hidden.us < 0.9 * exposed.us


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize(
    "changes", [{}, {"parallel__zero": 3, "train__framework": "torchtitan"}, {"model__mtp_layers": 1}]
)
def test_the_bound_of_a_search_is_never_above_the_step(schedule: str, changes: dict[str, Any]) -> None:
    step = step_of(schedule, **changes)
    assert 0.5 * step.us < bound_us(step.assembly) <= step.us


def test_every_stage_runs_as_many_operators_as_there_are_micro_batches() -> None:
    """Of either way half: DualPipe does the work of 1F1B, not twice as much."""
    usual, dual = (predict(setup_of(schedule)) for schedule in ("1f1b", "dualpipe"))
    assert dual.mfu is not None
    assert usual.mfu is not None
    assert dual.mfu * dual.step_ms == pytest.approx(usual.mfu * usual.step_ms)
    step = step_of("dualpipe")
    turns = Counter(turn for turn in step.structure.node_turn if turn is not None)
    assert set(turns.values()) == {4}, "once on every stage"
    assert len(turns) == 3 * 24


def test_lanes_of_risk_see_passes_as_they_run_together() -> None:
    """Beside another pass, computing is a larger share of the time than alone."""
    step = step_of("dualpipe")
    lanes, roles = lanes_of(step), np.array([role.partner >= 0 for role in step.structure.roles])
    forward = np.array([role.what == "forward" for role in step.structure.roles])
    paired, alone = (lanes.parts[(forward & which)[step.structure.node_role], 0].mean() for which in (roles, ~roles))
    assert paired > alone + 0.1


def test_a_trace_of_the_step_shows_the_exchanges_of_both_passes_beside_work() -> None:
    """As many of them as without overlap, at the same time as operators, and each stream one at a time."""
    counts, names = {}, {}
    for overlap in (True, False):
        step = simulate_step(setup_of("dualpipe", train__microbatches=8, parallel__ep_overlap=overlap))
        trace = StepTrace(step).trace()
        lane = np.array([Track.COMPUTE, Track.COMMUNICATION])[:, None] == trace.lane % len(Track)
        rows = [
            np.column_stack([trace.start, trace.start + trace.duration])[one & (trace.lane < len(Track))]
            for one in lane
        ]
        for stream in rows:
            ordered = stream[np.argsort(stream[:, 0])]
            assert (ordered[1:, 0] >= ordered[:-1, 1] - 2).all(), "rounded to nanoseconds"
        names[overlap] = Counter(trace.names[name] for name in trace.name[trace.lane == Track.COMMUNICATION])
        work, talk = (float((stream[:, 1] - stream[:, 0]).sum()) for stream in rows)
        counts[overlap] = (work + talk) / step.times.span
    assert counts[True] > 1.1 * counts[False]
    assert names[True] == names[False]
    assert names[True]["experts dispatch"] == 8 * 2, "micro-batches, each through two layers"


# Memory


def test_dualpipe_holds_two_copies_of_weights_and_gradients_and_divides_the_state_of_both() -> None:
    usual, dual = (memory_of(setup_of(schedule)).stages[1] for schedule in ("1f1b", "dualpipe"))
    assert dual.weights == pytest.approx(2 * usual.weights)
    assert dual.optimizer == pytest.approx(usual.optimizer)
    assert dual.gradients == pytest.approx(2 * usual.gradients, rel=0.01)


def dense_ddp(**changes: Any) -> Setup:
    """A small dense model in PyTorch, whose gradients are reduced after every micro-batch unless it is a pipeline."""
    dense = {
        "model__experts": 0, "model__top_k": 0, "model__ffn": 4096, "parallel__ep": 1, "parallel__zero": 0,
        "parallel__dp": 2, "train__framework": "pytorch", "train__seq": 512, "train__microbatches": 16,
    }  # fmt: skip
    return setup_of(**{"schedule": "1f1b"} | dense | changes)


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"schedule": "dualpipe", "parallel__dp": 1}, 1),
        ({"schedule": "dualpipe"}, 1),
        ({"schedule": "dualpipe-v"}, 1),
        ({"parallel__pp": 1, "parallel__dp_overlap": False}, 16),
        ({"parallel__pp": 1, "parallel__dp_overlap": False, "train__framework": "megatron"}, 1),
    ],
    ids=str,
)
def test_bytes_count_and_time_of_reduced_gradients_belong_together(changes: dict[str, Any], times: int) -> None:
    """In the table of operators, in the timeline and in the files for simulators."""
    found = predict(dense_ddp(**changes))
    assert found.step is not None
    assert isinstance(found.run, DescribedRun)
    (row,) = (row for row in found.all_operators if row.name == "reduce gradients")
    assert isinstance(row.work, Collective)
    assert row.count == times
    assert row.ms * 1e3 == pytest.approx(times * found.step.costs.collective_us(row.work), rel=1e-6)
    names = found.run.trace.names
    shown = [name for name, lane in zip(found.run.trace.name, found.run.trace.lane, strict=True) if lane < len(Track)]
    assert [names[name] for name in shown].count("reduce gradients") == times
    sent = [task.transfer for task in StepTasks(found.run).tasks(0) if task.transfer and task.transfer.group]
    assert sum(one.bytes for one in sent) == pytest.approx(times * row.work.bytes, rel=1e-6)


@pytest.mark.parametrize("dp_overlap", [None, False])
def test_pipelines_of_pytorch_reduce_gradients_with_the_last_micro_batch_alone(dp_overlap: bool | None) -> None:
    few, many = (
        simulate_step(dense_ddp(train__microbatches=count, parallel__dp_overlap=dp_overlap)) for count in (8, 32)
    )
    for what in ("reduce", "reduce rest"):
        assert few.role_us(what, 0) == pytest.approx(many.role_us(what, 0), rel=0.05)
    assert few.role_us("reduce", 0) + few.role_us("reduce rest", 0) > 0


def test_a_stage_of_dualpipe_keeps_the_logits_of_the_micro_batches_whose_loss_it_computes() -> None:
    """Of 16 more, 8: the others end on the last stage. They are there twice when they are joined at the end."""
    logits, residual = 512 * 32000 * 2, 512 * 2048 * 2
    for schedule, stage, more in (("1f1b", 3, 16 * (2 * logits + residual)), ("dualpipe", 0, 16 * (logits + residual))):
        few, many = (
            memory_of(dense_ddp(schedule=schedule, train__microbatches=count)).stages[stage] for count in (64, 80)
        )
        assert few.phase == many.phase == "optimizer"
        assert many.buffers - few.buffers == pytest.approx(more)


# Routing that is limited to some groups, and how fast exchanges are


def model_with(groups: int, taken: int) -> Model:
    return Model(**MODEL | {"expert_groups": groups, "top_k_groups": taken})


@pytest.mark.parametrize(
    ("groups", "taken", "places", "wanted"),
    [(0, 0, 8, 8.0), (8, 8, 8, 8.0), (8, 4, 8, 4.0), (8, 4, 16, 8.0), (4, 1, 2, 1.0), (8, 4, 64, 32.0)],
)
def test_a_token_reaches_the_places_that_its_groups_lie_in(groups: int, taken: int, places: int, wanted: float) -> None:
    assert reached(model_with(groups, taken), places) == wanted


@pytest.mark.parametrize(("groups", "taken", "places"), [(8, 4, 4), (8, 3, 2), (16, 4, 8)])
def test_groups_that_share_a_place_are_counted_once(groups: int, taken: int, places: int) -> None:
    random, draws = Random(3), 20_000
    hit = sum(len({group * places // groups for group in random.sample(range(groups), taken)}) for _ in range(draws))
    assert reached(model_with(groups, taken), places) == pytest.approx(hit / draws, rel=0.01)


def _exchange_ms(nodes: int, element: float) -> float:
    """DeepEP's benchmark: 4,096 tokens of 7,168 values, 8 experts in at most 4 nodes, on H800s."""
    gpu = gpu_named("h800")
    network = network_of(gpu, "infiniband", in_step_factors(gpu), rails=True)
    places = min(nodes, 4)
    copies = 4096 * places * (1 - (1 - 1 / places) ** 8)
    return network.us(Collective("all_to_all", copies * 7168 * element, Group(8 * nodes, 8))) / network.penalty / 1e3


@pytest.mark.parametrize(
    ("nodes", "element", "published_gb_s"),
    [(4, 1.03, 58), (8, 1.03, 51), (4, 2.0, 57), (8, 2.0, 50)],  # docs/legacy.md of deepseek-ai/DeepEP
)
def test_exchanges_along_rails_take_as_long_as_deepep_publishes(
    nodes: int, element: float, published_gb_s: float
) -> None:
    copies = 4096 * 4 * (1 - (3 / 4) ** 8)
    published_ms = copies * 7168 * element / published_gb_s / 1e6
    assert _exchange_ms(nodes, element) == pytest.approx(published_ms, rel=0.08)


def test_deepseek_dispatches_in_8_bits_and_combines_in_16() -> None:
    step = step_of("dualpipe", train__precision="fp8")
    pair = step.assembly.pair_of(Role("forward", 0, 0, -1, 1))
    sizes = {row.op.name: row.op.work.bytes for row in pair.rows if isinstance(row.op.work, Collective)}
    assert sizes["experts dispatch"] == sizes["experts combine grad"]
    assert sizes["experts combine"] == sizes["experts dispatch grad"]
    assert sizes["experts combine"] == pytest.approx(sizes["experts dispatch"] * 2 / (1 + 4 / 128))


# DeepSeek-V3 itself: nothing was fitted on it


@cache
def deepseek() -> Step:
    return simulate_step(read_setup(ROOT / "examples/deepseek-v3.toml"))


def test_deepseek_v3_trains_as_fast_as_published() -> None:
    """19.926 s a step on 2,048 H800s (arXiv 2505.09343): 1,542 tokens a second and GPU."""
    assert deepseek().us / 1e6 == pytest.approx(19.926, rel=0.1)
    assert memory_of(deepseek().setup).fits


def test_a_pair_of_four_layers_takes_as_long_as_in_the_published_profile() -> None:
    """129.0 ms in train.json of deepseek-ai/profile-data."""
    pair = deepseek().assembly.pair_of(Role("forward", 7, 0, -1, 1))
    assert sum(block.us for block in pair[:3]) / 1e3 == pytest.approx(129.0, rel=0.1)


def test_further_predictions_are_a_layer_and_a_head_each() -> None:
    plain, more = Model(**MODEL), Model(**MODEL | {"mtp_layers": 1})
    layer = (plain.parameters() - Model(**MODEL | {"layers": 7}).parameters()) + plain.predictor_parameters
    assert more.parameters() == plain.parameters() + layer
    usual, predicting = (step_of("1f1b", model__mtp_layers=count).chunks for count in (0, 1))
    assert [row[0].layers for row in predicting] == [2, 2, 2, 3]
    assert predicting[3][0].forward.compute_us > 1.5 * usual[3][0].forward.compute_us
    assert predicting[2] == usual[2]
