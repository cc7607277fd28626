"""Time and memory are computed from one program: what a rank holds, gathers, keeps and recomputes is stated once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given, settings

from lumos.cost.prices import timeline
from lumos.program.attention import core
from lumos.program.block import input_gradients, saved_bytes, weight_gradients
from lumos.program.memory import memory_of
from lumos.program.operators import Collective, Operator
from lumos.program.program import Program
from lumos.program.rank_layout import RankLayout
from lumos.program.transformer_layer import TransformerLayer
from lumos.schedules import Phase
from lumos.setup import Setup, preset_named
from lumos.setup.frameworks import framework_named
from lumos.step.step import Step, assembled, prices_of, simulate_step
from test_memory import setups

SEVENTY_B = {"seq": 4096, "framework": "torchtitan", "global_batch": 256, "recompute": "selective"}


def setup_of(preset: str, train: dict[str, Any], **parallel: Any) -> Setup:
    return Setup(model=dict(preset_named(preset).keys), train={"seq": 4096} | train, parallel=parallel)  # type: ignore[arg-type]


def nodes(step: Step, what: str) -> int:
    """How many nodes of a role the graph has."""
    chosen = [index for index, role in enumerate(step.structure.roles) if role.what == what]
    return sum(int((step.structure.node_role == index).sum()) for index in chosen)


# ---------------------------------------------------------------------- laws over random setups
@settings(max_examples=60, deadline=None)
@given(setups())
def test_weights_that_stay_gathered_are_gathered_once(setup: Setup) -> None:
    step, program = simulate_step(setup), Program(setup)
    pp, vpp, count = setup.parallel.pp, setup.parallel.vpp, setup.train.microbatches
    times = {"never": 0, "once": 1, "every pass": 2 * count}[program.sharding.gathers]
    assert nodes(step, "gather") == times * pp * vpp * step.plan.units
    held = sum(stage.buffers for stage in memory_of(setup).stages)
    if program.sharding.gathers == "once":
        gathered = sum(program.stage_parameters(stage).common for stage in range(pp))
        assert held >= program.sharding.low * gathered, "memory holds what time does not gather again"


@given(setups())
def test_a_rank_updates_what_it_keeps_the_state_of(setup: Setup) -> None:
    program = Program(setup)
    for stage, memory in enumerate(memory_of(setup).stages):
        _, updated, _ = program.optimizer(stage).key
        bytes_each = program.sharding.optimizer
        assert memory.optimizer == pytest.approx(bytes_each * updated, rel=1e-3, abs=bytes_each)


@given(setups())
def test_micro_batches_in_flight_are_those_of_the_order_that_is_simulated(setup: Setup) -> None:
    program, parallel = Program(setup), setup.parallel
    assume(parallel.pp > 1 and program.schedule.name != "zero-bubble")
    last = program.schedule.last_phase
    for stage in range(parallel.pp):
        now = most = 0
        for turn in program.schedule.order(stage, parallel.pp, parallel.vpp, setup.train.microbatches):
            now += (turn.phase == Phase.FORWARD) - (turn.phase == last)
            most = max(most, now)
        assert sum(program.in_flight(stage)) == most


@given(setups())
def test_what_is_not_kept_is_computed_again(setup: Setup) -> None:
    program = Program(setup)
    layer = TransformerLayer(program.layout, sparse=bool(setup.model.experts))
    everything, again = saved_bytes(layer.forward()), saved_bytes(layer.recomputed())
    kept = layer.memory.kept
    if setup.train.recompute == "full":
        assert again == everything
        assert kept == program.layout.residual_bytes, "the input of the layer alone"
    else:
        assert kept == pytest.approx(everything - again)


@given(setups())
def test_experts_have_the_weights_that_their_matmuls_read(setup: Setup) -> None:
    assume(setup.model.experts and not setup.model.bias)
    program, inward = Program(setup), 2 if setup.model.gated else 1
    up = next(op.work for op in TransformerLayer(program.layout, sparse=True).forward() if op.name == "experts up")
    assert isinstance(up, Operator)
    experts, _, width, hidden = up.shape
    assert program.parameters.experts == experts * hidden * (width // inward) * (inward + 1)


@settings(max_examples=40, deadline=None)
@given(setups())
def test_the_halves_of_a_backward_pass_are_its_operators(setup: Setup) -> None:
    backward = TransformerLayer(Program(setup).layout, sparse=bool(setup.model.experts)).backward()
    inputs, weights = input_gradients(backward), weight_gradients(backward)
    assert sorted(map(repr, inputs + weights)) == sorted(map(repr, backward))
    assert all("wgrad" not in op.name and "accumulate" not in op.name for op in inputs)
    assert not any(isinstance(op.work, Collective) for op in weights)


# ---------------------------------------------------------------------- what once was wrong
def test_fsdp_in_a_pipeline_costs_one_gather_more_than_divided_gradients() -> None:
    """Weights that stay gathered for all micro-batches need one gather a step, not two for every micro-batch."""
    three, two = (
        simulate_step(setup_of("llama3-70b", SEVENTY_B, tp=8, pp=4, dp=16, zero=zero)).us for zero in (3, 2)
    )
    assert two < three < 1.1 * two


def test_mixtral_with_more_expert_ranks_than_replicas_has_the_same_experts_in_time_and_memory() -> None:
    setup = setup_of("mixtral-8x7b", {"framework": "megatron"}, tp=2, ep=8, dp=4)
    program = Program(setup)
    whole = setup.model.mlp_parameters(setup.model.expert_ffn)
    assert program.layout.expert_tp == 1, "each rank has one whole expert"
    assert program.parameters.experts == whole


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_zero_bubble_schedule_delays_the_weight_gradients_and_nothing_else(recompute: str) -> None:
    setup = setup_of("llama3-8b", {"framework": "torchtitan", "recompute": recompute, "microbatches": 8}, pp=4,
                     schedule="zero-bubble")  # fmt: skip
    prices = prices_of(setup)
    chunk = assembled(setup, prices).chunks[1][0]
    layer = TransformerLayer(RankLayout(setup, framework_named("torchtitan")))
    late = sum(prices.operator_us(op.work) for op in layer.backward() if op.weight_gradient)  # type: ignore[arg-type]
    assert chunk.weights.us == pytest.approx(8 * late)
    whole = assembled(setup.replaced({"parallel.schedule": "1f1b"}), prices).chunks[1][0].backward
    assert chunk.backward.us + chunk.weights.us == pytest.approx(whole.us), "recomputation belongs to the inputs"
    assert 0.2 < chunk.weights.us / whole.us < 0.5


def test_the_context_exchange_ends_before_the_mlp_begins() -> None:
    setup = setup_of("llama3-8b", {"framework": "megatron"}, cp=8, dp=2)
    prices = prices_of(setup)
    slow = dataclasses.replace(prices.network, inside=dataclasses.replace(prices.network.inside, bandwidth=1e2))
    prices.network = slow
    for phase in ("forward", "backward"):
        block = getattr(TransformerLayer(Program(setup).layout), phase)()
        rows = timeline(block, prices)
        names = [op.name for op in block]
        exchange = rows[names.index("context exchange")].end_us
        attention = next(i for i, op in enumerate(block) if isinstance(op.work, Operator) and "sdpa" in op.work.kind)
        after = rows[attention + 2].start_us  # behind the wait
        assert after >= exchange > rows[attention].end_us


def test_a_bias_that_no_matmul_adds_costs_a_kernel_and_leaves_the_matmul_beside_its_reduction() -> None:
    setup = setup_of("gpt3-1.3b", {"framework": "pytorch"}, tp=4, dp=1, tp_overlap=True)
    fused = RankLayout(setup, framework_named("pytorch"))
    unfused = RankLayout(setup, dataclasses.replace(framework_named("pytorch"), fused_bias=False))
    blocks = [TransformerLayer(layout).forward() for layout in (fused, unfused)]
    added = [op for op in blocks[1] if op.name.endswith(" bias")]
    assert [op.name for op in added] == ["q bias", "kv bias", "out bias", "up bias", "down bias"]
    assert all(op.work.bytes > 0 and op.launches == 1 for op in added)
    assert sum(op.launches for op in blocks[1]) == sum(op.launches for op in blocks[0]) + len(added)
    names = [op.name for op in blocks[1]]
    assert names.index("mlp reduce") < names.index("down") < names.index("down bias") < len(names) - 1
    assert names[names.index("down bias") + 1] == "wait"


def test_compiling_torchtitan_changes_its_time_and_its_memory() -> None:
    eager, compiled = (
        setup_of("llama3-8b", {"framework": "torchtitan", "compile": on}, dp=8, zero=3) for on in (False, True)
    )
    assert simulate_step(compiled).us < 0.95 * simulate_step(eager).us
    assert memory_of(compiled).peak < memory_of(eager).peak


def test_selective_recomputation_drops_attention_and_runs_it_again() -> None:
    layouts = [Program(setup_of("llama3-8b", {"recompute": mode}, dp=1)).layout for mode in ("none", "selective")]
    none, selective = (TransformerLayer(layout) for layout in layouts)
    assert none.memory.kept - selective.memory.kept == saved_bytes(core(layouts[0]))
    assert {op.work for op in core(layouts[1])} <= {op.work for op in selective.recomputed()}
