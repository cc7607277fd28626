"""Time and memory are computed from one program: what a rank holds, gathers, keeps and recomputes is stated once."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from better_gpus import BETTER_GPUS
from lumos.costs.costs import costs_of
from lumos.costs.network import Network, Tier
from lumos.data_files import read_table
from lumos.described.attention import core
from lumos.described.described import Program
from lumos.described.layer import TransformerLayer
from lumos.described.recomputation import by_operator
from lumos.memory.memory import memory_of
from lumos.prediction.prediction import predict
from lumos.program.layout import RankLayout
from lumos.program.op import part_of, saved_bytes
from lumos.program.operators import Collective, Operator
from lumos.schedules import Phase
from lumos.setup import Setup, gpu_named, mistakes_in, preset_named
from lumos.setup.frameworks import framework_named, framework_names
from lumos.step.block_timeline import timeline
from lumos.step.bounds import bound_us
from lumos.step.step import Step, assembled, shape_of, simulate_step
from lumos.step.structure import LINKS
from plain_network import PLAIN_HABITS, plain_network
from test_memory import setups

SEVENTY_B = {"seq": 4096, "framework": "torchtitan", "global_batch": 256, "recompute": "selective"}


def setup_of(preset: str, train: dict[str, Any], **parallel: Any) -> Setup:
    return Setup(model=dict(preset_named(preset).keys), train={"seq": 4096} | train, parallel=parallel)  # type: ignore[arg-type]


def nodes(step: Step, what: str) -> int:
    """How many nodes of a role the graph has."""
    chosen = [index for index, role in enumerate(step.structure.roles) if role.what == what]
    return sum(int((step.structure.node_role == index).sum()) for index in chosen)


# ---------------------------------------------------------------------- laws over random setups
SHEETS = {
    "hbm_tb_s": lambda gpu: gpu.hbm_gb_s / 1e3, "l2_mb": lambda gpu: gpu.l2_mb, "power_w": lambda gpu: gpu.tdp_w,
    "nvlink_gb_s": lambda gpu: gpu.nvlink_gb_s, "inter_gb_s": lambda gpu: gpu.inter_gb_s,
}  # fmt: skip


def is_slower(setup: Setup, worse: str, better: str) -> bool:
    """By more than a thousandth: waves of tiles and what a GPU draws idle count for less."""
    times = []
    for name in (worse, better):
        changed = setup.replaced({"cluster.gpu": name, "cluster.gpus_per_node": 8})
        assume(not mistakes_in(changed))
        times.append(simulate_step(changed).us)
    return times[1] > times[0] * 1.001


@settings(max_examples=60, deadline=None)
@given(setups(), st.sampled_from(("bf16", "tf32", "fp32", "fp8")), st.sampled_from(("adamw", "muon")), st.data())
def test_a_gpu_with_better_figures_throughout_is_never_slower(
    setup: Setup, precision: str, optimizer: str, data: st.DataObject
) -> None:
    worse, better = data.draw(st.sampled_from(BETTER_GPUS))
    assert not is_slower(setup.replaced({"train.precision": precision, "train.optimizer": optimizer}), worse, better)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_b200_is_faster_than_h200_in_wide_precisions(precision: str, optimizer: str) -> None:
    setup = setup_of("llama3-8b", {"precision": precision, "optimizer": optimizer, "framework": "megatron"}, tp=8)
    on = [simulate_step(setup.replaced({"cluster.gpu": gpu, "cluster.gpus": 8})).us for gpu in ("h200", "b200")]
    assert on[1] < on[0]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_small_matmuls_of_experts_are_not_slower_with_a_higher_peak(precision: str) -> None:
    setup = setup_of("qwen3-30b-a3b", {"seq": 512, "precision": precision, "micro_batch": 2}, tp=4, dp=2)
    times = [
        simulate_step(setup.replaced({"cluster.gpu": "h200", "cluster.peak_tflops": 989.4 * more})).us
        for more in (1, 1.2, 2, 5)
    ]
    assert times == sorted(times, reverse=True)


@settings(max_examples=60, deadline=None)
@given(setups(), st.sampled_from(("h200", "h100", "a100", "b200", "mi300x")), st.floats(1.01, 4.0), st.data())
def test_a_data_sheet_with_one_higher_figure_is_never_slower(
    tmp_path_factory: pytest.TempPathFactory, setup: Setup, name: str, more: float, data: st.DataObject
) -> None:
    gpu, sheet = gpu_named(name), tmp_path_factory.mktemp("sheets") / "better.toml"
    setup = setup.replaced({"train.precision": data.draw(st.sampled_from(("bf16", "tf32", "fp32", "fp8")))})
    figure = data.draw(st.sampled_from((*SHEETS, *gpu.peak_tflops)))
    line = f"{figure} = {more * SHEETS[figure](gpu)}" if figure in SHEETS else ""
    sheet.write_text(line or f"[peak_tflops]\n{figure} = {more * gpu.peak_tflops[figure]}")
    sheet.write_text(f'like = "{name}"\n{sheet.read_text()}\n')
    assert not is_slower(setup, name, str(sheet))


# Its layers have experts alone, of which every rank has its own; dense layers would be much larger.
OWN_EXPERTS = Setup(
    model={"layers": 16, "hidden": 4096, "ffn": 11848, "heads": 64, "vocab": 1024, "experts": 16, "top_k": 2,
           "expert_ffn": 512, "tied": True},
    train={"seq": 256, "micro_batch": 5, "microbatches": 4, "precision": "fp32", "framework": "fms-fsdp"},
    parallel={"pp": 4, "vpp": 2, "dp": 16, "ep": 16, "sequence_parallel": True}, cluster={"gpu": "h100"},
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(setups(), st.sampled_from(framework_names()), st.integers(1, 6), st.booleans())
@example(OWN_EXPERTS, "fms-fsdp", 4, True)
@example(setup_of("llama3-8b", {"seq": 64}, dp=1), "pytorch", 1, False)
def test_dividing_what_adam_trains_never_needs_more_memory(
    setup: Setup, framework: str, layers: int, compiled: bool
) -> None:
    """Frozen weights are left out: FSDP holds a part of them next to the layers that it gathers."""
    assume(setup.train.mode == "pretrain")
    changes: dict[str, Any] = {"train.framework": framework, "train.compile": compiled}
    changes |= {"model.layers": layers} if setup.parallel.pp == 1 else {}
    whole = memory_of(setup.replaced(changes | {"parallel.zero": 0})).peak
    for zero in set(framework_named(framework).zeros) - {0}:
        assert memory_of(setup.replaced(changes | {"parallel.zero": zero})).peak <= whole * (1 + 1e-9)


@pytest.mark.parametrize("layers", [1, 2])
def test_deepspeed_keeps_no_weight_gathered_twice(layers: int) -> None:
    """What stays alive under ZeRO 3, and what is gathered for the layer at work, are at most all weights together."""
    setup = setup_of("llama3-8b", {"seq": 64, "framework": "deepspeed"}, dp=8).replaced({"model.layers": layers})
    held = [memory_of(setup.replaced({"parallel.zero": zero})).peak for zero in (0, 3)]
    assert held[1] <= held[0]


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
    elif setup.train.recompute == "selective" and setup.train.modules == ("operators",):
        results = by_operator(program.layout, layer.forward())
        assert kept == program.layout.residual_bytes + results.kept, "the input, and results instead of what they need"
        matmuls, again = (sum(op.kind == "gemm_tn" for op in ops) for ops in (layer.forward(), results.block))
        assert again == matmuls // 2, "every second matmul"
    else:
        assert kept == pytest.approx(everything - again)


@given(setups())
def test_experts_have_the_weights_that_their_matmuls_read(setup: Setup) -> None:
    setup = setup.replaced({"model.experts": 16, "model.top_k": 2, "model.expert_ffn": 512, "model.bias": False})
    program, inward = Program(setup), 2 if setup.model.gated else 1
    up = next(op.work for op in TransformerLayer(program.layout, sparse=True).forward() if op.name == "experts up")
    assert isinstance(up, Operator)
    experts, _, width, hidden = up.shape
    assert program.parameters.experts == experts * hidden * (width // inward) * (inward + 1)


@settings(max_examples=40, deadline=None)
@given(setups())
def test_the_halves_of_a_backward_pass_are_its_operators(setup: Setup) -> None:
    backward = TransformerLayer(Program(setup).layout, sparse=bool(setup.model.experts)).backward()
    inputs, weights = (part_of(backward, [op.weight_gradient == late for op in backward]) for late in (False, True))
    assert sorted(repr(op._replace(after=())) for op in inputs + weights) == sorted(
        repr(op._replace(after=())) for op in backward
    )
    waited = [[ops[at + other] for at, op in enumerate(ops) for other in op.after] for ops in (inputs, backward)]
    assert waited[0] == waited[1], "a half waits for the same collectives"
    assert all("wgrad" not in op.name and "accumulate" not in op.name for op in inputs)
    assert not any(isinstance(op.work, Collective) or "dgrad" in op.name for op in weights)
    experts = [[op.work for op in half if op.name.startswith("experts ") and op.kind == "grouped_gemm"]
               for half in (inputs, weights)]  # fmt: skip
    assert experts[0] == experts[1], "one gradient each"


# ---------------------------------------------------------------------- what once was wrong
def test_fsdp_in_a_pipeline_gathers_once_whether_it_reshards_after_the_forward_pass_or_not() -> None:
    """Weights that stay gathered for all micro-batches need one gather a step, not two for every micro-batch."""
    setups = [setup_of("llama3-70b", SEVENTY_B, tp=8, pp=4, dp=16, zero=zero) for zero in (3, 2, 1)]
    three, two, one = (simulate_step(setup).us for setup in setups)
    assert three == two
    assert one < three < 1.1 * one, "one gather, which is not wholly hidden"
    assert memory_of(setups[0]).at_peak == memory_of(setups[1]).at_peak


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
    prices = costs_of(setup)
    chunk = assembled(setup, prices).chunks[1][0]
    layer = TransformerLayer(RankLayout(setup, framework_named("torchtitan")))
    late = sum(prices.operator_us(op.work) for op in layer.backward() if op.weight_gradient)  # type: ignore[arg-type]
    assert chunk.weights.us == pytest.approx(8 * late)
    whole = assembled(setup.replaced({"parallel.schedule": "1f1b"}), prices).chunks[1][0].backward
    assert chunk.backward.us + chunk.weights.us == pytest.approx(whole.us), "recomputation belongs to the inputs"
    assert 0.2 < chunk.weights.us / whole.us < 0.5


def test_the_context_exchange_ends_before_the_mlp_begins() -> None:
    setup = setup_of("llama3-8b", {"framework": "megatron"}, cp=8, dp=2)
    prices = costs_of(setup)
    slow = dataclasses.replace(prices.network, tiers=(Tier(1e2), *prices.network.tiers[1:]))
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


# ---------------------------------------------------------------------- times by hand
PLAIN = plain_network(1e5, 1e4)
"""100 GB/s inside a node and 10 GB/s for each GPU between nodes, without latencies."""


def ring_us(kind: str, size: float, ranks: int, bandwidth: float = 1e5) -> float:
    return {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[kind] * (ranks - 1) / ranks * size / bandwidth


def step_of(preset: str = "llama3-8b", network: Network = PLAIN, **changes: Any) -> Step:
    """A step on a plain network, of a host that takes no time."""
    setup = setup_of(preset, {"seq": 2048, "cuda_graphs": True}).replaced({"train.microbatches": 1} | changes)
    return simulate_step(setup, network=network)


def undisturbed(step: Step) -> Step:
    """The same step before kernels and communication that run at the same time have slowed each other."""
    return dataclasses.replace(step, graph=step.assembly.graph())


@pytest.mark.parametrize(
    ("zero", "collective", "published"), [(0, "all_reduce", 0), (1, "reduce_scatter", 2)]
)  # fmt: skip
def test_gradients_are_reduced_in_fp32_and_divided_weights_published_in_16_bits(
    zero: int, collective: str, published: int
) -> None:
    step = step_of(**{"train.framework": "megatron", "parallel.dp": 8, "parallel.zero": zero,
                      "parallel.dp_overlap": False})  # fmt: skip
    parameters = step.setup.model.parameters(2048)
    assert step.role_us("reduce rest", 0) == pytest.approx(ring_us(collective, 4 * parameters, 8), rel=1e-6)
    assert step.role_us("publish", 0) == pytest.approx(ring_us("all_gather", published * parameters, 8), rel=1e-6)
    assert step.role_us("reduce", 0) == step.role_us("gather", 0) == 0


def test_weights_are_published_behind_the_first_forward_pass_where_communication_overlaps() -> None:
    step = step_of(**{"train.framework": "megatron", "parallel.dp": 8, "parallel.zero": 1, "parallel.dp_overlap": True})
    gather = ring_us("all_gather", 2 * step.setup.model.parameters(2048), 8)
    hidden = read_table("step.json")["hidden_share"] * step.chunks[0][0].forward.us
    assert 0 < hidden < gather
    speed = step.assembly.speeds(step.assembly.program.chunks[0][0])[Phase.FORWARD]
    assert 0.5 < speed < 1.0, "the forward pass is slower beside it"
    assert step.role_us("publish", 0) == pytest.approx(gather - speed * hidden, rel=1e-6)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_fsdp_gathers_in_16_bits_and_reduces_in_fp32(microbatches: int) -> None:
    step = undisturbed(step_of(**{"train.framework": "torchtitan", "parallel.dp": 8, "parallel.zero": 3,
                                  "train.microbatches": microbatches}))  # fmt: skip
    parameters = step.setup.model.parameters(2048)
    gather, reduce = ring_us("all_gather", 2 * parameters, 8), ring_us("reduce_scatter", 4 * parameters, 8)
    assert step.role_us("gather", 0) == pytest.approx(2 * microbatches * gather, rel=1e-6)
    assert step.role_us("reduce", 0) == pytest.approx(microbatches * reduce, rel=1e-6)
    assert step.role_us("publish", 0) == 0


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
def test_divided_weights_wait_for_compute_and_compute_for_them_where_overlap_is_off(framework: str) -> None:
    keys = {"train.framework": framework, "parallel.dp": 8, "parallel.zero": 3, "train.microbatches": 2}
    usual, beside, alone = (step_of(**keys | {"parallel.dp_overlap": value}) for value in (None, True, False))
    whats = ("forward", "backward", "gather", "reduce", "optimizer")
    assert alone.us == pytest.approx(sum(alone.role_us(what, 0) for what in whats), rel=1e-9)
    assert usual.us == beside.us < alone.us


@pytest.mark.parametrize(("zero", "times"), [(0, 1), (1, 1), (2, 3)])
def test_deepspeed_divides_gradients_after_every_micro_batch_and_does_not_overlap_that(zero: int, times: int) -> None:
    step = undisturbed(step_of(**{"train.framework": "deepspeed", "parallel.dp": 8, "parallel.zero": zero,
                                  "train.microbatches": 3}))  # fmt: skip
    kind = "reduce_scatter" if zero else "all_reduce"
    reduce = ring_us(kind, 2 * step.setup.model.parameters(2048), 8)
    assert step.role_us("reduce rest", 0) == pytest.approx(times * reduce, rel=1e-6)
    assert nodes(step, "reduce") == 0


def test_gradients_that_are_not_synchronised_are_reduced_once_and_kept_whole() -> None:
    keys = {"train.framework": "torchtitan", "parallel.dp": 8, "parallel.zero": 3, "train.microbatches": 4}
    always, last = (undisturbed(step_of(**keys | {"parallel.no_sync": value})) for value in (False, True))
    assert always.role_us("reduce", 0) == pytest.approx(4 * last.role_us("reduce", 0), rel=1e-6)
    assert always.role_us("gather", 0) == pytest.approx(last.role_us("gather", 0), rel=1e-6)
    whole = 4 * always.setup.model.parameters(2048)
    assert memory_of(last.setup).peak - memory_of(always.setup).peak == pytest.approx(whole, rel=1e-6)


def test_updated_weights_are_gathered_behind_the_next_forward_pass_only_where_that_is_asked_for() -> None:
    keys = {"train.framework": "megatron", "parallel.dp": 8, "parallel.zero": 1}
    usual, beside, alone = (
        undisturbed(step_of(**keys | more)).role_us("publish", 0)
        for more in ({}, {"parallel.gather_overlap": True}, {"parallel.gather_overlap": False})
    )
    assert usual == beside < alone
    parameters = step_of(**keys).setup.model.parameters(2048)
    assert alone == pytest.approx(ring_us("all_gather", 2 * parameters, 8), rel=1e-6)


def test_gradients_are_reduced_in_the_precision_that_is_asked_for() -> None:
    keys = {"train.framework": "torchtitan", "parallel.dp": 8, "parallel.zero": 3}
    wide, low = (undisturbed(step_of(**keys | {"train.reduce_precision": name})) for name in ("fp32", "bf16"))
    assert wide.role_us("reduce", 0) == pytest.approx(2 * low.role_us("reduce", 0), rel=1e-6)


def test_replicas_of_divided_weights_reduce_their_part_with_each_other() -> None:
    """Two groups of four GPUs divide the weights: reduce-scatter among four, all-reduce of a quarter between two."""
    keys = {"train.framework": "torchtitan", "parallel.dp": 8, "parallel.zero": 3, "parallel.shard": 4}
    step = undisturbed(step_of(**keys))
    parameters = step.setup.model.parameters(2048)
    assert step.role_us("gather", 0) == pytest.approx(2 * ring_us("all_gather", 2 * parameters, 4), rel=1e-6)
    wanted = ring_us("reduce_scatter", 4 * parameters, 4) + ring_us("all_reduce", parameters, 2)
    assert step.role_us("reduce", 0) == pytest.approx(wanted, rel=1e-6)


def test_a_script_that_calls_flash_attention_3_is_faster_and_skips_windows() -> None:
    train = {"framework": "pytorch", "compile": True}
    windows = {"model.window": 1024, "model.window_pattern": 4}
    setup = setup_of("llama3-8b", train).replaced({"cluster.gpu": "h100", "model.layers": 4})
    plain, fast, windowed, both = (
        simulate_step(setup.replaced(changes)).us
        for changes in ({}, {"train.attention": "flash-3"}, windows, windows | {"train.attention": "flash-3"})
    )
    assert windowed == plain, "a mask for PyTorch"
    assert both < fast < plain


def test_experts_are_reduced_among_their_own_replicas() -> None:
    """Mixtral on 2 nodes, a whole expert a GPU: two replicas of each, 8 apart, and sixteen of all else."""
    step = step_of("mixtral-8x7b", **{"train.framework": "megatron", "parallel.dp": 16, "parallel.ep": 8,
                                      "parallel.zero": 0, "parallel.dp_overlap": False})  # fmt: skip
    model = step.setup.model
    expert = model.layers * model.mlp_parameters(model.expert_ffn)
    rest = model.parameters(2048) - model.experts * expert
    wanted = ring_us("all_reduce", 4 * rest, 16, 8e4) + ring_us("all_reduce", 4 * expert, 2, 1e4)
    assert step.role_us("reduce rest", 0) == pytest.approx(wanted, rel=1e-6)


def test_buckets_have_a_latency_each() -> None:
    late_start = PLAIN_HABITS.protocols[0] | {"base_us": 100.0}
    slow = dataclasses.replace(PLAIN, habits=dataclasses.replace(PLAIN_HABITS, protocols=(late_start,)))
    keys = {"train.framework": "deepspeed", "parallel.dp": 8, "parallel.zero": 0, "parallel.dp_overlap": False}
    quick, late = (step_of(network=network, **keys).role_us("reduce rest", 0) for network in (PLAIN, slow))
    buckets = 2 * setup_of("llama3-8b", {}).model.parameters(2048) / 1e9
    assert late - quick == pytest.approx(100 * buckets, rel=1e-3)
    assert quick == pytest.approx(ring_us("all_reduce", 1e9 * buckets, 8), rel=1e-3)
    whole = keys | {"train.framework": "megatron"}
    quick, late = (step_of(network=network, **whole).role_us("reduce rest", 0) for network in (PLAIN, slow))
    assert late - quick == pytest.approx(100), "one bucket for all"


@pytest.mark.parametrize(
    ("framework", "keys", "overlaps"),
    [
        ("nanotron", {"parallel.zero": 0}, True),
        ("nanotron", {"parallel.zero": 1}, False),
        ("megatron", {"parallel.zero": 1}, True),
        ("megatron", {"parallel.zero": 1, "parallel.dp_overlap": False}, False),
        ("megatron", {"parallel.dp": 1}, False),
        ("megatron-2021", {"parallel.zero": 0}, False),
        ("megatron-2021", {"parallel.zero": 0, "parallel.dp_overlap": True}, True),
        ("pytorch", {"parallel.pp": 2, "parallel.schedule": "zero-bubble"}, False),
    ],
)
def test_gradients_are_reduced_beside_the_backward_pass_where_the_framework_does(
    framework: str, keys: dict[str, Any], overlaps: bool
) -> None:
    step = step_of(**({"train.framework": framework, "parallel.dp": 8} | keys))
    assert step.assembly.transfers.hides_reductions is overlaps
    assert (nodes(step, "reduce") > 0) is overlaps


def test_gradients_of_the_embedding_are_reduced_with_the_last_unit() -> None:
    keys = {"train.framework": "megatron", "parallel.dp": 8, "parallel.zero": 0, "parallel.dp_overlap": True}
    step = undisturbed(step_of(**keys))
    model, units = step.setup.model, step.plan.units
    assert units == 12, "of 32 layers: no more parts than that"
    table = model.vocab * model.hidden
    times = {role.unit: step.graph.duration[step.structure.node_role == index][0] / 1e3
             for index, role in enumerate(step.structure.roles) if role.what == "reduce"}  # fmt: skip
    usual = ring_us("all_reduce", 4 * (model.parameters(2048) - table) / units, 8)
    assert times[1] == pytest.approx(usual, rel=1e-6)
    assert times[0] == pytest.approx(usual + ring_us("all_reduce", 4 * table, 8), rel=1e-6)
    assert step_of(**keys, **{"model.layers": 5}).plan.units == 5


def test_activations_go_to_the_next_stage_over_the_link_between_nodes() -> None:
    keys = {"train.framework": "megatron", "parallel.pp": 2, "parallel.tp": 8, "parallel.dp": 1,
            "parallel.sequence_parallel": False}  # fmt: skip
    lag = step_of(**keys).graph.edges.lag.max() / 1e3
    assert lag == pytest.approx(2 * 2048 * 4096 / 1e4)
    divided = step_of(**(keys | {"parallel.sequence_parallel": True})).graph.edges.lag.max() / 1e3
    assert divided == pytest.approx(lag / 8)
    assert step_of().graph.edges.lag.max(initial=0.0) == 0


@pytest.mark.parametrize(("pp", "tp", "speed", "factor"), [(1, 1, 1.0, 1.0), (2, 4, 1.0, 1.0), (1, 1, 2.0, 0.5)])
def test_a_launch_costs_what_the_framework_and_the_host_make_of_it(
    pp: int, tp: int, speed: float, factor: float
) -> None:
    keys = {"parallel.pp": pp, "parallel.tp": tp, "cluster.host": speed}
    setup = setup_of("llama3-8b", {"framework": "nanotron"}).replaced(keys)
    assert costs_of(setup).host_us == pytest.approx(factor * framework_named("nanotron").host_us)
    assert costs_of(setup.replaced({"train.cuda_graphs": True})).host_us == 0


def test_a_host_that_decides_is_simulated_and_what_it_costs_is_said() -> None:
    tiny = setup_of("gpt2-124m", {"seq": 128, "framework": "pytorch"}, dp=1)
    slow, free = simulate_step(tiny), simulate_step(tiny.replaced({"train.cuda_graphs": True}))
    blocks = [block for row in slow.chunks for chunk in row for block in chunk.blocks]
    assert slow.plan.hosted
    assert not free.plan.hosted
    assert slow.host_share == pytest.approx(sum(b.host_us for b in blocks) / sum(max(b.us, b.host_us) for b in blocks))
    assert slow.host_share == pytest.approx(1.0), "every block waits for it"
    assert slow.host_cost == pytest.approx(1 - free.us / slow.us, abs=0.02)
    assert free.host_share == free.host_cost == 0


def test_the_share_of_the_host_is_that_of_a_step_whose_backward_pass_alone_waits_for_it() -> None:
    step = simulate_step(setup_of("llama3-8b", {"seq": 4096, "framework": "pytorch"}, dp=1))
    (row,) = step.chunks
    waits = row[0].backward._replace(host_us=2 * row[0].backward.us)
    slow = dataclasses.replace(step, chunks=((row[0]._replace(backward=waits),),))
    assert row[0].forward.host_us < row[0].forward.us
    assert slow.host_share > 0.5


def test_a_host_decides_where_the_gpu_would_be_hardly_faster_without_it() -> None:
    """Both GPUs wait for the same host, which the slower one would almost keep up with; a third one is slower still."""
    setup = setup_of("llama2-13b", {"framework": "megatron", "microbatches": 8}, tp=8, dp=1, zero=1)
    slower, faster, slowest = (predict(setup.replaced({"cluster.gpu": gpu})) for gpu in ("b200", "gb200", "h200"))
    assert slower.step_ms == pytest.approx(faster.step_ms, rel=1e-4)
    assert slower.step is not None
    assert 0 < slower.step.host_cost < 0.05
    assert (slower.host_bound, faster.host_bound, slowest.host_bound) == (True, True, False)
    assert any("the host decides this step" in note for note in slower.warnings)


# ---------------------------------------------------------------------- order
def spans(step: Step, what: str) -> list[tuple[float, float]]:
    """Start and end of the nodes of a role, in order."""
    roles = step.structure.roles
    nodes = [node for node, role in enumerate(step.structure.node_role) if roles[role].what == what]
    return sorted((float(step.times.start[node]), float(step.times.end[node])) for node in nodes)


def test_fsdp_gathers_at_most_two_units_ahead_and_before_it_reduces() -> None:
    fast = dataclasses.replace(PLAIN, tiers=(Tier(1e9), *PLAIN.tiers[1:]))
    step = step_of(network=fast, **{"train.framework": "torchtitan", "parallel.dp": 8, "parallel.zero": 3})
    gathers, forward = spans(step, "gather"), spans(step, "forward")
    backward, reductions = spans(step, "backward"), spans(step, "reduce")
    computed = sorted(forward + backward)
    assert len(gathers) == len(computed) == 64
    for index, (begin, end) in enumerate(computed):
        assert begin >= gathers[index][1], "weights are there before they are used"
        if index + 2 < len(gathers):
            assert gathers[index + 2][0] >= end, "memory for two"
    for index, (begin, _) in enumerate(reductions):
        assert begin >= backward[index][1]
    assert spans(step, "optimizer")[0][0] >= max(end for _, end in reductions)


def test_kernels_start_after_their_launch_and_a_step_ends_with_its_host() -> None:
    step = simulate_step(setup_of("gpt2-124m", {"seq": 128, "framework": "pytorch", "microbatches": 2}, dp=1))
    launch = read_table("step.json")["launch_us"] * 1e3
    for what in ("forward", "backward", "optimizer"):
        for (issued, _), (begun, _) in zip(spans(step, f"host {what}"), spans(step, what), strict=True):
            assert begun >= issued + launch
    assert step.times.span >= spans(step, "host optimizer")[0][1]


# ---------------------------------------------------------------------- bounds
@settings(max_examples=80, deadline=None)
@given(setups())
def test_no_step_is_shorter_than_its_bound(setup: Setup) -> None:
    step = simulate_step(setup)
    assert bound_us(step.assembly) <= step.us * (1 + 1e-9)


ALL_SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2),
                 ("dualpipe", 1), ("dualpipe-v", 2)]  # fmt: skip


@pytest.mark.parametrize(("order", "in_node"), [("tp-cp-dp-pp", 8), ("tp-cp-pp-dp", 4)])
@pytest.mark.parametrize(("schedule", "vpp"), ALL_SCHEDULES)
def test_of_four_stages_in_two_nodes_only_messages_between_the_nodes_go_through_the_network(
    schedule: str, vpp: int, order: str, in_node: int
) -> None:
    """Stages 0 and 1 share a node, and so do 2 and 3; around the pipeline again, a message leaves its node, too."""
    setup = setup_of("llama3-8b", {"seq": 1024, "framework": "megatron", "microbatches": 8}, tp=2, pp=4, dp=2)
    setup = setup.replaced({"parallel.schedule": schedule, "parallel.vpp": vpp, "parallel.order": order,
                            "cluster.gpus_per_node": in_node})  # fmt: skip
    fast, slow, crawling = (simulate_step(setup.replaced({"cluster.inter_gb_s": rate})) for rate in (50.0, 5.0, 0.05))
    assert fast.us <= slow.us < crawling.us, "a little may be hidden"
    leaves = [one // 2 != other // 2 for one, other in fast.structure.links]
    assert sum(leaves) == (2 if schedule == "interleaved" else 1)
    for index, far in enumerate(leaves):
        lags = [step.graph.edges.lag[step.structure.lag_class == LINKS + index] for step in (fast, slow)]
        assert (lags[1] > 2 * lags[0]).all() if far else (lags[1] == lags[0]).all()
    assert all(bound_us(step.assembly) <= step.us * (1 + 1e-9) for step in (fast, slow, crawling))


@st.composite
def jobs_on_nodes(draw: st.DrawFn) -> Setup:
    """Jobs of several nodes, also such that nodes end in the middle of a group or of a stage."""
    (schedule, vpp), experts = draw(st.sampled_from(ALL_SCHEDULES)), draw(st.sampled_from((0, 0, 4)))
    tp, cp, dp, pp = (draw(st.sampled_from(some)) for some in ((1, 2, 3, 4), (1, 1, 2), (1, 2, 3, 4, 6), (1, 2, 3, 4)))
    model = {"layers": 2 * pp * vpp, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 3072}
    if experts:
        model |= {"experts": experts, "top_k": 2, "expert_ffn": 768}
    order, zero = draw(st.sampled_from(("tp-cp-dp-pp", "tp-cp-pp-dp"))), draw(st.sampled_from((0, 0, 1, 3)))
    parallel = {
        "tp": tp,
        "cp": cp,
        "dp": dp,
        "pp": pp,
        "vpp": vpp,
        "order": order,
        "zero": zero,
        "schedule": schedule if pp > 1 else "1f1b",
        "ep": draw(st.sampled_from((1, 2, 4))) if experts else 1,
    }
    train = {"seq": 768, "microbatches": 8, "cuda_graphs": True,
             "framework": draw(st.sampled_from(("megatron", "torchtitan", "pytorch")))}  # fmt: skip
    cluster = {"gpu": "h100", "gpus_per_node": draw(st.sampled_from((2, 4, 6, 8)))}
    setup = Setup(model=model, train=train, parallel=parallel, cluster=cluster)  # type: ignore[arg-type]
    assume(not mistakes_in(setup) and setup.cluster.gpus > setup.cluster.gpus_per_node)
    return setup


@settings(max_examples=120, deadline=None)
@given(jobs_on_nodes())
def test_a_job_of_several_nodes_depends_on_the_network_between_them_and_a_slower_one_is_never_faster(
    setup: Setup,
) -> None:
    rates = (400.0, 50.0, 5.0, 1e-3)
    steps = [simulate_step(setup.replaced({"cluster.inter_gb_s": rate})) for rate in rates]
    assert all(slow.us >= fast.us * (1 - 1e-9) for fast, slow in pairwise(steps))
    assert steps[-1].us > 2 * steps[0].us, "no group and no message is priced as if it stayed in a node"
    assert all(bound_us(step.assembly) <= step.us * (1 + 1e-9) for step in steps)


SLOW_LINKS = {"parallel.pp": 4, "parallel.tp": 8, "parallel.dp": 1, "parallel.sequence_parallel": False}


@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({}, 1.0),
        ({"train.microbatches": 4}, 1.0),
        ({"parallel.dp": 8, "parallel.zero": 0, "parallel.dp_overlap": False}, 1.0),
        ({"parallel.dp": 8, "parallel.zero": 1, "parallel.dp_overlap": False}, 1.0),
        ({"parallel.pp": 4, "parallel.dp": 1, "train.microbatches": 1}, 1.0),
        ({"parallel.pp": 4, "parallel.dp": 1, "train.microbatches": 8}, 1.0),
        ({"parallel.pp": 4, "parallel.dp": 1, "train.microbatches": 8, "parallel.schedule": "gpipe"}, 0.95),
        ({"parallel.pp": 4, "parallel.vpp": 2, "parallel.dp": 1, "train.microbatches": 8}, 0.99),
        (SLOW_LINKS | {"train.microbatches": 1}, 1.0),
        (SLOW_LINKS | {"train.microbatches": 8}, 0.95),
        ({"train.framework": "torchtitan", "parallel.dp": 8, "parallel.zero": 3}, 0.8),
        ({"train.framework": "torchtitan", "parallel.dp": 16, "parallel.zero": 3, "train.microbatches": 3}, 1.0),
        ({"train.framework": "torchtitan", "parallel.dp": 16, "parallel.zero": 3, "train.seq": 256}, 1.0),
        ({"parallel.dp": 16, "parallel.zero": 0, "train.seq": 256, "parallel.dp_overlap": True}, 0.98),
        ({"parallel.dp": 8, "parallel.zero": 0, "parallel.dp_overlap": True}, 0.8),
    ],
    ids=str,
)  # fmt: skip
def test_the_bound_is_the_step_where_little_overlaps(keys: dict[str, Any], least: float) -> None:
    """Left out are the last micro-batches of a pipeline with slow links, and what kernels lose beside communication."""
    step = step_of(**({"train.framework": "megatron"} | keys))
    assert least * (1 - 1e-4) <= bound_us(step.assembly) / step.us <= 1 + 1e-9


def test_the_bound_of_a_step_that_its_host_decides_is_what_the_host_does() -> None:
    step = simulate_step(setup_of("gpt2-124m", {"seq": 128, "framework": "pytorch", "microbatches": 4}, dp=1))
    assert bound_us(step.assembly) == pytest.approx(step.us, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(setups())
def test_a_plan_knows_about_how_large_its_structure_is(setup: Setup) -> None:
    """Blocks, gathers, reductions and the host; what there is once a stage is not counted."""
    step = simulate_step(setup)
    once = 5 * setup.parallel.pp * (1 + setup.parallel.vpp * step.plan.units)
    assert step.plan.tasks <= 2 * len(step.graph)
    assert len(step.graph) <= 1.5 * step.plan.tasks + once


def test_setups_of_one_shape_share_their_prices() -> None:
    """Replicas do not change what blocks cost; sizes, tensor parallelism, gathered weights and the GPU do."""
    setup = setup_of("llama3-8b", {"framework": "megatron", "microbatches": 8}, pp=2, dp=8, zero=0)
    same = ({"parallel.pp": 4, "parallel.dp": 4}, {"parallel.zero": 1}, {"train.microbatches": 4, "parallel.dp": 8})
    other = ({"parallel.tp": 2, "parallel.dp": 4}, {"parallel.cp": 2, "parallel.dp": 4}, {"parallel.zero": 3},
             {"parallel.pp": 1, "parallel.dp": 16}, {"parallel.tp_overlap": False}, {"train.seq": 8192},
             {"cluster.gpu": "h100"}, {"model.hidden": 8192})  # fmt: skip
    for keys in same:
        assert shape_of(setup.replaced(keys)) == shape_of(setup), keys
    for keys in other:
        assert shape_of(setup.replaced(keys)) != shape_of(setup), keys
    eager = setup.replaced({"train.framework": "pytorch"})
    assert shape_of(eager.replaced({"train.microbatches": 4})) != shape_of(eager), "gradients are added up"
    sparse = setup_of("mixtral-8x7b", {"framework": "megatron"}, pp=2, dp=8, ep=8)
    other_replicas = sparse.replaced({"parallel.pp": 4, "parallel.dp": 4})
    assert shape_of(other_replicas) != shape_of(sparse), "experts lie elsewhere"
    pair = setup_of("llama3-8b", {"framework": "megatron"}, dp=2)
    assert shape_of(pair.replaced({"parallel.zero": 3})) != shape_of(pair)
    alone = setup_of("llama3-8b", {"framework": "megatron"}, dp=1)
    assert shape_of(alone.replaced({"parallel.zero": 3})) == shape_of(alone), "nobody to gather from"


# ---------------------------------------------------------------------- offloading to the host
def offloaded_us(gpu: str = "h200", framework: str = "megatron", **train: Any) -> float:
    setup = setup_of(
        "llama3-8b", {"framework": framework, "micro_batch": 2} | train, zero=3 if framework != "megatron" else 1
    )
    return simulate_step(setup.replaced({"cluster.gpu": gpu, "cluster.gpus": 8})).us


def test_the_host_updates_what_it_holds_after_its_gradients_came_and_before_its_weights_go() -> None:
    mine = preset_named("llama3-8b").model.parameters() / 8
    table = read_table("step.json")
    rate = min(table["host_adam_gparams_s"], table["host_memory_gb_s"] / 28 / 8) * 1e3
    there, back, update = mine * 4 / (63e3 * 0.855), mine * 2 / (63e3 * 0.855), mine / rate
    on_gpu, alone, beside = (
        offloaded_us(**train)
        for train in ({}, {"offload_optimizer": 1.0}, {"offload_optimizer": 1.0, "offload_overlap": True})
    )
    assert alone - beside == pytest.approx(there + back, rel=0.01)  # the update takes longest, and hides both copies
    assert alone - on_gpu == pytest.approx(there + back + update, rel=0.05)  # less what the GPU took for it


def test_the_answer_says_how_long_the_host_takes_and_that_its_rate_is_assumed() -> None:
    setup = setup_of("llama3-8b", {"framework": "megatron", "offload_optimizer": 1.0}, zero=1)
    said = predict(setup).warnings
    assert any("on the host is assumed" in text for text in said)
    took = simulate_step(setup).host_update_us / 1e3
    assert f"the host updates its parameters in {took:,.1f} ms, copies included" in said
    assert predict(setup).breakdown.other_ms >= 0.99 * took  # the GPU has nothing to do meanwhile
    assert not any(
        "the host updates" in text for text in predict(setup.replaced({"train.offload_optimizer": 0.0})).warnings
    )


def test_more_on_the_host_never_makes_a_step_faster_and_a_faster_link_never_slower() -> None:
    shares = [offloaded_us(offload_optimizer=share) for share in (0.0, 0.25, 0.5, 1.0)]
    layers = [offloaded_us(offload_layers=count) for count in (0, 8, 16, 32)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert layers == sorted(layers)
    assert layers[0] == layers[1] < layers[-1]  # a few hide behind the others
    slow, fast = (
        offloaded_us(gpu, offload_layers=32) / offloaded_us(gpu, offload_layers=0) for gpu in ("h200", "gh200")
    )
    assert fast == 1 < slow


def test_fsdp_fetches_its_weights_from_the_host_before_every_gather() -> None:
    here, there = (offloaded_us(framework="torchtitan", offload_weights=on) for on in (False, True))
    mine = preset_named("llama3-8b").model.parameters() / 8
    copies = mine * (4 + 4 + 4) / (63e3 * 0.855)  # weights twice, gradients once, in fp32
    assert here < there < here + copies + mine / 1e3


def test_inputs_that_are_kept_in_parts_are_gathered_before_they_are_recomputed() -> None:
    """DeepSpeed's partition_activations: an eighth is kept on each of eight tensor ranks."""
    whole = setup_of("gpt3-13b", {"recompute": "full", "framework": "neox"}, tp=8, dp=1)
    parts = whole.replaced({"train.partition_activations": True})
    layers = [TransformerLayer(Program(setup).layout) for setup in (whole, parts)]
    names = [[op.name for op in layer.recomputed() if isinstance(op.work, Collective)] for layer in layers]
    assert names[1] == ["gather input", *names[0]]
    assert layers[1].memory.kept == layers[0].memory.kept / 8 == 4096 * 5120 * 2 / 8
    assert simulate_step(parts).us > simulate_step(whole).us
    kept_whole = whole.replaced({"train.recompute": "none"})
    assert simulate_step(kept_whole.replaced({"train.partition_activations": True})).us == simulate_step(kept_whole).us


def test_gpt_neox_reduces_gradients_beside_the_backward_pass_unless_there_are_stages() -> None:
    """DeepSpeed's pipeline reduces once all is done, and all gradients on every rank: twice what scattering sends."""
    alone = setup_of("gpt3-13b", {"framework": "neox", "microbatches": 4}, dp=8, zero=1)
    stages = alone.replaced({"parallel.pp": 4, "cluster.gpus": 32})
    assert [assembled(setup, costs_of(setup)).transfers.hides_reductions for setup in (alone, stages)] == [True, False]
    assert Program(stages).sharding.reduction == "all_reduce"
    assert nodes(simulate_step(stages), "reduce") == 0
    other = stages.replaced({"train.framework": "megatron-deepspeed", "parallel.dp_overlap": True})
    assert assembled(other, costs_of(other)).transfers.hides_reductions


def test_a_layer_that_gpt_neox_recomputes_starts_with_an_idle_gpu() -> None:
    """The host waits for the GPU at every checkpoint, so its own time is part of the layer, on any GPU."""
    setup = setup_of("gpt3-13b", {"framework": "neox", "recompute": "full"}, tp=2, dp=1)
    layer, prices = TransformerLayer(Program(setup).layout), costs_of(setup)
    block = layer.forward()
    assert [op.syncs for op in block] == [True, *[False] * (len(block) - 1)]
    first = next(row for row in timeline(block, prices) if row.end_us > row.start_us)
    assert first.start_us >= prices.host_us * framework_named("neox").checkpoint_launches
    slow = setup.replaced({"cluster.host": 0.5})
    assert simulate_step(slow).us > simulate_step(setup).us
    kept = TransformerLayer(Program(setup.replaced({"train.recompute": "none"})).layout)
    assert not any(op.syncs for op in kept.forward())


def test_tensor_ranks_of_gpt_neox_send_parts_to_the_next_stage_and_gather_them() -> None:
    setup = setup_of("gpt3-13b", {"framework": "neox", "microbatches": 4}, tp=4, pp=2, dp=1)
    prices, layout = costs_of(setup), Program(setup).layout
    whole = layout.activation_bytes
    sent = prices.collective_us(Collective("p2p", whole / 4, layout.link(0, 1)))
    gathered = prices.collective_us(Collective("all_gather", whole, layout.tp))
    lags = simulate_step(setup).graph.edges.lag
    assert lags.max() == pytest.approx(1e3 * (sent + gathered))


MODULES = ("core_attn", "layernorm", "mlp", "moe_act", "mla_up_proj", "moe", "shared_experts")


@st.composite
def asked_for(draw: st.DrawFn) -> dict[str, Any]:
    """Recomputation, offloading, experts and context parallelism that differ from what is usual."""
    chosen = {
        "train.recompute_layers": st.none() | st.integers(0, 9), "train.recompute_group": st.integers(1, 3),
        "train.partition_activations": st.booleans(),
        "train.recompute_modules": st.lists(st.sampled_from(MODULES), max_size=3) | st.just(["operators"]),
        "train.offload_optimizer": st.sampled_from((0.0, 0.3, 1.0)), "train.offload_layers": st.integers(0, 2),
        "train.offload_weights": st.booleans(), "train.offload_overlap": st.booleans(),
        "train.optimizer": st.sampled_from(("adamw", "muon", "none")), "parallel.etp": st.sampled_from((0, 1, 2, 4)),
        "parallel.cp": st.sampled_from((1, 2, 4)),
        "parallel.cp_type": st.sampled_from(("", "all_gather", "a2a", "a2a+p2p")),
    }  # fmt: skip
    return {key: draw(values) for key, values in chosen.items()}


@settings(max_examples=60, deadline=None)
@given(setups(), asked_for())
def test_whatever_is_asked_for_no_step_is_below_its_bound_and_no_part_of_memory_below_zero(
    setup: Setup, changes: dict[str, Any]
) -> None:
    wanted = setup.replaced({"cluster.gpus": setup.cluster.gpus * changes["parallel.cp"]} | changes)
    assume(not mistakes_in(wanted))
    assembly = assembled(wanted, costs_of(wanted))
    assert bound_us(assembly) <= assembly.step().us * (1 + 1e-9)
    assert all(part >= 0 for stage in memory_of(wanted).stages for part in stage[1:])
