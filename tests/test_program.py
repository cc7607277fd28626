"""What one rank runs for a layer: work is divided and never lost, and every parallelism talks as often as it must."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumos.costs.costs import costs_of
from lumos.described.attention import core
from lumos.described.described import Program
from lumos.described.embedding_head import embedding, head, head_backward, optimizer
from lumos.described.experts import busiest_rank, expert_gradient_bytes, moe, moe_backward
from lumos.described.flops import forward_flops_per_token, hardware_flops, model_flops, utilisation
from lumos.described.layer import TransformerLayer
from lumos.described.muon import Matrices, expert_matrices, layer_matrices, orthogonalised
from lumos.program.layout import RankLayout
from lumos.program.op import EXCHANGE, Ops, saved_bytes
from lumos.program.operators import Collective, Group, Operator
from lumos.program.sharding import RankParameters, chunks_of, layers_of
from lumos.schedules import Phase
from lumos.setup import Setup, mistakes_in, preset_named, preset_names
from lumos.setup.frameworks import framework_named, framework_names
from lumos.step.block_timeline import time_of

ROOT = Path(__file__).parent.parent


def layout_of(preset: str = "llama3-8b", framework: str = "megatron", **changes: Any) -> RankLayout:
    """One rank of a published model; changes are keys of a setup with `__` for the dot."""
    setup = Setup(model=dict(preset_named(preset).keys), train={"seq": 2048, "framework": framework})
    stated = {key.replace("__", "."): value for key, value in changes.items()}
    setup = setup.replaced({"parallel.dp": 1, "train.microbatches": 1} | stated)
    assert mistakes_in(setup) == []
    return RankLayout(setup, framework_named(framework, setup.train.precision))


def kinds(block: Ops) -> Counter[str]:
    """How often a block runs each collective."""
    return Counter(op.kind for op in block if isinstance(op.work, Collective))


def operators(block: Ops) -> list[Operator]:
    return [op.work for op in block if isinstance(op.work, Operator)]


def matrix_flops(block: Ops) -> float:
    return sum(operator.flops for operator in operators(block) if operator.is_matrix)


def names(block: Ops) -> set[str]:
    return {op.name for op in block}


# The work of a layer


@pytest.mark.parametrize("preset", preset_names())
def test_the_blocks_of_a_model_compute_what_the_formula_counts(preset: str) -> None:
    layout = layout_of(preset)
    model = layout.model
    dense, sparse = TransformerLayer(layout), TransformerLayer(layout, sparse=True)
    layers = (model.layers - model.moe_layers) * matrix_flops(dense.forward())
    layers += model.moe_layers * matrix_flops(sparse.forward()) if model.moe_layers else 0.0
    blocks = layers + matrix_flops(head(layout))
    formula = forward_flops_per_token(layout.setup) * layout.tokens
    assert blocks == pytest.approx(formula, rel=0.05 if model.latent else 0.01)


@pytest.mark.parametrize("framework", framework_names())
@pytest.mark.parametrize("preset", ["llama3-8b", "gpt3-1.3b", "mixtral-8x7b", "deepseek-v3"])
def test_a_backward_pass_computes_two_gradients_for_every_matmul(preset: str, framework: str) -> None:
    layout = layout_of(preset, framework)
    layer = TransformerLayer(layout, sparse=bool(layout.model.experts))
    ratio = matrix_flops(layer.backward()) / matrix_flops(layer.forward())
    assert 2.0 <= ratio <= 2.25, "flash attention computes its scores again"
    assert matrix_flops(head_backward(layout)) == 2 * matrix_flops(head(layout))


@given(st.sampled_from(framework_names()), st.sampled_from([2, 4, 8]), st.booleans())
def test_tensor_parallel_ranks_share_the_work_of_a_dense_layer(framework: str, tp: int, sequences: bool) -> None:
    alone = TransformerLayer(layout_of(framework=framework))
    shared = TransformerLayer(layout_of(framework=framework, parallel__tp=tp, parallel__sequence_parallel=sequences))
    for phase in ("forward", "backward"):
        assert tp * matrix_flops(getattr(shared, phase)()) == matrix_flops(getattr(alone, phase)())


@given(
    st.sampled_from(["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"]),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 4, 8]), st.booleans(),
)  # fmt: skip
def test_ranks_share_the_work_of_experts_whichever_way_they_are_cut(
    preset: str, tp: int, ep: int, dp: int, sequences: bool
) -> None:
    changes = {"parallel__tp": tp, "parallel__ep": ep, "parallel__dp": dp, "parallel__sequence_parallel": sequences}
    if tp * dp % ep:
        return
    shared = layout_of(preset, **changes)
    for phase in ("forward", "backward"):
        alone = getattr(TransformerLayer(layout_of(preset), sparse=True), phase)()
        mine = getattr(TransformerLayer(shared, sparse=True), phase)()
        experts, all_experts = (
            sum(operator.flops for operator in operators(block) if operator.kind == "grouped_gemm")
            for block in (mine, alone)
        )
        assert tp * experts == pytest.approx(all_experts, rel=0.01)
        # Projections to the latent space and the router are not divided.
        assert 0.999 * matrix_flops(alone) <= tp * matrix_flops(mine) <= 1.3 * matrix_flops(alone)


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("cp", [2, 8])
def test_context_parallel_ranks_share_the_work(cp: int, attention: str) -> None:
    alone = TransformerLayer(layout_of(train__attention=attention))
    shared = TransformerLayer(layout_of(train__attention=attention, parallel__cp=cp))
    for phase in ("forward", "backward"):
        assert cp * matrix_flops(getattr(shared, phase)()) == pytest.approx(
            matrix_flops(getattr(alone, phase)()), rel=0.001
        )
        assert kinds(getattr(shared, phase)()) == {"all_gather": 1}, "keys and values go round"


def test_kernels_skip_what_a_sliding_window_hides_where_the_framework_has_such_kernels() -> None:
    """A window of a quarter of the sequence hides (3/4)² of the causal scores; every second layer has one."""

    def scores(framework: str = "megatron", **changes: Any) -> float:
        layout = layout_of("llama3-8b", framework, **changes)
        return sum(op.flops for op in operators(TransformerLayer(layout).forward()) if op.kind == "sdpa_fwd")

    windows = {"model__window": 512, "model__window_pattern": 2}
    assert scores(**windows) == pytest.approx(scores() * (1 - 9 / 16 / 2), rel=1e-3)
    assert scores(model__window=512) == pytest.approx(scores() * 7 / 16, rel=1e-3)
    assert scores(model__window=4096) == scores(), "longer than the sequence"
    assert scores("pytorch", **windows) == scores("pytorch"), "a mask over the whole square"
    full, windowed = (model_flops(layout_of("llama3-8b", **changes).setup) for changes in ({}, windows))
    assert full - windowed == pytest.approx(3 * 2048 * 32 * 2048 * 4096 * 2 * 9 / 32, rel=1e-6)


def test_attention_with_sinks_is_unfused_where_the_framework_has_no_kernel_for_it() -> None:
    eager, fused = (TransformerLayer(layout_of("gpt-oss-20b", name), sparse=True) for name in ("pytorch", "megatron"))
    for block, row in ((eager.forward(), "sink in scores"), (eager.backward(), "sink in scores grad")):
        (sink,) = [op for op in block if op.name == row]
        assert sink.work.bytes == {"sink in scores": 21, "sink in scores grad": 25}[row] * 2 * 64 * 2048**2
    assert not any(op.kind.startswith("sdpa") for op in operators(eager.forward()))
    assert any(op.kind == "sdpa_fwd" for op in operators(fused.forward()))
    asked = TransformerLayer(layout_of("gpt-oss-20b", "pytorch", train__attention="flash"), sparse=True)
    assert any(op.kind == "sdpa_fwd" for op in operators(asked.forward()))


def test_eager_experts_of_gpt_oss_keep_four_results_more_than_a_gated_activation() -> None:
    plain, clamped = (
        saved_bytes(moe(layout_of("gpt-oss-20b", "pytorch", model__activation=name)))
        for name in ("silu", "clamped_silu")
    )
    assert clamped - plain == 4 * 2 * (4 * 2048) * 2880
    fused = [saved_bytes(moe(layout_of("gpt-oss-20b", model__activation=name))) for name in ("silu", "clamped_silu")]
    assert fused[0] == fused[1]


def test_the_busiest_rank_decides_how_long_an_unbalanced_router_takes() -> None:
    """One expert a rank: the busiest expert; several experts of a rank even out; one rank has all of them."""

    def flops(**changes: Any) -> float:
        return matrix_flops(TransformerLayer(layout_of("qwen3-30b-a3b", **changes), sparse=True).forward())

    def slower(ep: int) -> float:
        spread = {"parallel__ep": ep, "parallel__dp": max(ep, 1)}
        return flops(**spread, train__imbalance=1.5) / flops(**spread)

    assert slower(1) == 1.0
    assert 1.0 < slower(8) < slower(32) < slower(128)
    assert busiest_rank(128, 128, 1.5) == pytest.approx(1.5)
    assert busiest_rank(128, 8, 1.5) == pytest.approx(1 + 0.5 * 1.43 / 2.62 / 4, abs=0.01)
    assert busiest_rank(8, 2, 1000.0) == 2.0, "it cannot get more than there is"


def test_experts_that_are_filled_up_to_a_capacity_work_on_send_and_keep_as_much() -> None:
    """On one rank too, and however many experts a rank has: none of it evens out."""
    for ep in (1, 8):
        keys = {"parallel__ep": ep, "parallel__dp": ep}
        plain, filled = (moe(layout_of("qwen3-30b-a3b", **keys, train__capacity=factor)) for factor in (1.0, 1.5))
        assert plain == moe(layout_of("qwen3-30b-a3b", **keys))
        assert exchanged(filled) == [1.5 * size for size in exchanged(plain)]
        assert len(exchanged(plain)) == (2 if ep > 1 else 0)
        few, more = ([op.shape[1] for op in operators(x) if op.kind == "grouped_gemm"] for x in (plain, filled))
        assert more == [1.5 * copies for copies in few] != []
        assert saved_bytes(filled) > 1.3 * saved_bytes(plain)


def exchanged(block: Ops) -> list[float]:
    return [op.work.bytes for op in block if isinstance(op.work, Collective) and op.kind == "all_to_all"]


def test_a_dispatcher_that_gathers_gives_every_rank_all_tokens_of_its_group() -> None:
    layer = TransformerLayer(
        layout_of("mixtral-8x7b", parallel__ep=8, parallel__dp=8, parallel__dispatcher="all_gather"), sparse=True
    )
    sent = {
        op.name: (op.kind, op.work.bytes)
        for op in (*layer.forward(), *layer.backward())
        if isinstance(op.work, Collective) and op.name != "experts counts"
    }
    everything = 8 * 2048 * 4096 * 2.0
    assert sent == {
        "experts dispatch": ("all_gather", everything),
        "experts combine": ("reduce_scatter", everything),
        "experts combine grad": ("all_gather", everything),
        "experts dispatch grad": ("reduce_scatter", everything),
    }


def test_adapters_leave_no_weight_gradients() -> None:
    full, adapters = (TransformerLayer(layout_of(train__mode=mode)) for mode in ("pretrain", "lora"))
    assert any("wgrad" in name for name in names(full.backward()))
    assert not any("wgrad" in name or "accumulate" in name for name in names(adapters.backward()))
    assert matrix_flops(adapters.forward()) == matrix_flops(full.forward())


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_recomputation_runs_the_forward_pass_again(attention: str) -> None:
    layers = {
        recompute: TransformerLayer(layout_of(train__recompute=recompute, train__attention=attention))
        for recompute in ("none", "selective", "full")
    }
    again = {recompute: matrix_flops(layer.recomputed()) for recompute, layer in layers.items()}
    assert again["none"] == 0
    assert again["full"] == matrix_flops(layers["full"].forward())
    assert again["selective"] == matrix_flops(core(layers["selective"].layout)) < 0.2 * again["full"]


@pytest.mark.parametrize(
    ("preset", "module", "again"),
    [
        ("llama3-8b", "core_attn", {"sdpa_fwd"}),
        ("llama3-8b", "layernorm", {"rms_norm"}),
        ("llama3-8b", "mlp", {"up", "activation", "down"}),
        ("llama3-8b", "moe", set()),
        ("mixtral-8x7b", "mlp", set()),
        ("mixtral-8x7b", "moe_act", {"experts activation"}),
        ("mixtral-8x7b", "shared_experts", set()),
        ("deepseek-v3", "shared_experts", {"up", "activation", "down"}),
        ("deepseek-v3", "mla_up_proj", {"q up", "kv up", "rotary_fwd"}),
    ],
)
def test_a_module_that_is_recomputed_runs_its_own_operators_again(preset: str, module: str, again: set[str]) -> None:
    layout = layout_of(preset, train__recompute="selective", train__recompute_modules=[module])
    layer = TransformerLayer(layout, sparse=bool(layout.model.experts))
    assert names(layer.recomputed()) - {"host"} == again
    whole = TransformerLayer(layout, layer.sparse, "none").memory
    assert (layer.memory.kept < whole.kept) == bool(again)


def test_all_of_a_mixture_is_recomputed_with_its_exchanges() -> None:
    layout = layout_of(
        "mixtral-8x7b", parallel__dp=8, parallel__ep=8, train__recompute="selective",
        train__recompute_modules=["moe", "moe_act"],
    )  # fmt: skip
    again, forward = (getattr(TransformerLayer(layout, sparse=True), what)() for what in ("recomputed", "forward"))
    assert kinds(again) == kinds(forward) == {"all_gather": 1, "all_to_all": 2}
    assert [op.name for op in again].count("experts activation") == 1  # it is part of the whole


def test_torchtitan_keeps_attention_and_the_first_third_and_further_matmuls() -> None:
    layer = TransformerLayer(
        layout_of(framework="torchtitan", train__recompute="selective", train__recompute_modules=["operators"])
    )
    matmuls = [op.name for op in layer.recomputed() if op.kind == "gemm_tn"]
    assert matmuls == ["kv", "out", "up"]  # key, output and the second half of the gated MLP
    assert "sdpa_fwd" not in names(layer.recomputed())
    t, hidden, ffn, key = 2048, 4096, 14336, 1024
    results = 2 * t * (hidden + key + hidden + ffn + hidden) + 4 * t * 32  # query, value, attention, gate, down; lse
    assert layer.memory.kept == 2 * t * hidden + results


@pytest.mark.parametrize("pp", [1, 4])
def test_recomputing_so_many_layers_lies_between_none_and_all(pp: int) -> None:
    def again(**changes: Any) -> int:
        program = Program(layout_of(parallel__pp=pp, parallel__schedule="1f1b", **changes).setup)
        blocks = [block for row in program.chunks for chunk in row for block in program.blocks(chunk, Phase.BACKWARD)]
        return sum(block.times for block in blocks if block.name == "recompute")

    counts = [again(train__recompute="full", train__recompute_layers=layers) for layers in range(33)]
    assert counts == [pp * min(layers, 32 // pp) for layers in range(33)]
    assert again(train__recompute="none") == counts[0] == 0
    assert again(train__recompute="full") == counts[-1] == 32
    every = [again(train__recompute="full", train__recompute_every=n) for n in (1, 2, 3)]
    assert every == [32, 16, pp * (32 // pp // 3)]


def test_megatron_counts_recomputed_layers_in_every_virtual_stage() -> None:
    changes = {"parallel__pp": 4, "parallel__vpp": 2, "train__microbatches": 8}
    program = Program(layout_of(train__recompute="full", train__recompute_layers=3, **changes).setup)
    for chunk in (chunk for row in program.chunks for chunk in row):
        blocks = {block.name: block.times for block in program.blocks(chunk, Phase.BACKWARD)}
        assert (blocks["recompute"], blocks["backward"]) == (3, 4)


def test_the_first_recomputed_layers_of_a_mixture_are_the_dense_ones() -> None:
    program = Program(layout_of("deepseek-v3", train__recompute="full", train__recompute_layers=5).setup)
    (chunk,) = program.chunks[0]
    again = {block.key[1]: block.times for block in program.blocks(chunk, Phase.BACKWARD) if block.name == "recompute"}
    assert again == {False: 3, True: 2}


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_gradients_are_added_up_from_the_second_micro_batch_on(microbatches: int) -> None:
    layer = TransformerLayer(layout_of(framework="pytorch", train__microbatches=microbatches))
    added = sum(op.work.bytes for op in layer.backward() if op.name.endswith("accumulate"))
    once = 3 * 2 * (layer.layout.model.attention_parameters + layer.layout.model.mlp_parameters(14336))
    assert microbatches * added == pytest.approx((microbatches - 1) * once, rel=1e-6)


def test_a_compiled_layer_has_fewer_kernels() -> None:
    layouts = (layout_of(framework="pytorch", train__compile=value) for value in (False, True))
    eager, compiled = map(TransformerLayer, layouts)
    for phase in ("forward", "backward"):
        launches = [sum(op.launches for op in getattr(layer, phase)()) for layer in (eager, compiled)]
        assert launches[1] < launches[0]


def test_low_precision_is_for_linear_layers_alone() -> None:
    layer = TransformerLayer(layout_of(cluster__gpu="b200", train__precision="nvfp4"))
    used = {operator.kind: operator.dtype for operator in operators(layer.forward())}
    assert used["gemm_tn"] == "nvfp4"
    assert used["sdpa_fwd"] == used["rms_norm"] == "bf16"


# How often ranks talk


@pytest.mark.parametrize("framework", ["pytorch", "megatron", "nanotron"])
def test_tensor_parallel_layers_reduce_twice_each_way(framework: str) -> None:
    layer = TransformerLayer(layout_of(framework=framework, parallel__tp=8))
    assert kinds(layer.forward()) == {"all_reduce": 2}
    assert kinds(layer.backward()) == {"all_reduce": 2}


@pytest.mark.parametrize(("framework", "again"), [("megatron", 2), ("nanotron", 0), ("torchtitan", 0)])
def test_what_linear_layers_keep_gathered_is_not_gathered_again(framework: str, again: int) -> None:
    divided = {"parallel__tp": 4, "parallel__sequence_parallel": True}
    layout = layout_of(framework=framework, **divided)
    layer = TransformerLayer(layout)
    assert sum(op.name == "gather inputs again" for op in layer.backward()) == again
    whole = layout.tokens * layout.model.hidden * layout.element
    kept = sum(op.saves for op in layer.forward() if op.name in ("rms_norm", "norm_eager_fwd"))
    assert (kept > 2 * whole) == (again == 0)  # of both norms: the gathered output, or a part of it


def test_divided_sequences_are_gathered_and_scattered_in_pairs() -> None:
    layer = TransformerLayer(layout_of(parallel__tp=8, parallel__sequence_parallel=True))
    assert kinds(layer.forward()) == {"all_gather": 2, "reduce_scatter": 2}
    # The gradients of outputs are gathered, and the inputs once more, since only a part of them was kept.
    assert kinds(layer.backward()) == {"all_gather": 4, "reduce_scatter": 2}


def test_a_parallel_residual_reduces_once_in_the_forward_pass() -> None:
    layer = TransformerLayer(layout_of(parallel__tp=8, model__parallel_residual=True))
    assert kinds(layer.forward()) == {"all_reduce": 1}


def test_overlap_changes_who_waits_and_not_what_is_run() -> None:
    changes = {"parallel__tp": 4, "parallel__sequence_parallel": True}
    plain, beside = (TransformerLayer(layout_of(**changes, parallel__tp_overlap=value)) for value in (False, True))
    for phase in ("forward", "backward"):
        assert kinds(getattr(plain, phase)()) == kinds(getattr(beside, phase)())
        assert matrix_flops(getattr(plain, phase)()) == matrix_flops(getattr(beside, phase)())


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_experts_exchange_tokens_twice_each_way(preset: str) -> None:
    layer = TransformerLayer(layout_of(preset, parallel__ep=8, parallel__dp=8), sparse=True)
    assert kinds(layer.forward()) == {"all_gather": 1, "all_to_all": 2}
    assert kinds(layer.backward()) == {"all_to_all": 2}
    sent = {op.work.bytes for op in layer.forward() if op.kind == "all_to_all"}
    assert sent == {2.0 * layer.layout.tokens * layer.layout.model.top_k * layer.layout.model.hidden}


def test_the_host_waits_for_how_many_tokens_come_before_it_sends_them() -> None:
    """Only the GPU knows the sizes of a dropless exchange: they are counted, gathered, and waited for."""
    layer = TransformerLayer(layout_of("qwen3-30b-a3b", parallel__ep=8, parallel__dp=8), sparse=True)
    names = [op.name for op in layer.forward()]
    (waits,) = [index for index, op in enumerate(layer.forward()) if op.syncs]
    assert names[waits - 2 : waits] == ["count tokens", "experts counts"]
    assert names.index("experts dispatch") > waits
    assert not any(op.syncs for op in layer.backward())
    alone = TransformerLayer(layout_of("qwen3-30b-a3b", "pytorch", train__compile=True), sparse=True)
    assert not any(op.syncs for op in alone.forward()), "a grouped matmul reads its sizes on the GPU"


def test_one_rank_talks_to_nobody() -> None:
    for preset in ("llama3-8b", "deepseek-v3"):
        layout = layout_of(preset)
        layer = TransformerLayer(layout, sparse=bool(layout.model.experts))
        blocks = [layer.forward(), layer.backward(), embedding(layout), head(layout), head_backward(layout)]
        assert all(not kinds(block) for block in blocks)


# Who talks to whom


@pytest.mark.parametrize(
    ("changes", "group", "wanted"),
    [
        ({"parallel__tp": 8}, "tp", (8, 8)),
        ({"parallel__tp": 16}, "tp", (16, 8)),
        ({"parallel__tp": 4, "parallel__dp": 4}, "dp", (4, 2)),
        ({"parallel__tp": 8, "parallel__dp": 4}, "dp", (4, 1)),
        ({"parallel__dp": 32}, "dp", (32, 8)),
        ({"parallel__dp": 64, "cluster__gpu": "gb200"}, "dp", (64, 64)),
        ({"parallel__tp": 8, "cluster__gpu": "rtx4090"}, "tp", (8, 8)),  # PCIe joins the GPUs of a node
        ({"parallel__tp": 4, "cluster__gpus_per_node": 2}, "tp", (4, 2)),
    ],
)
def test_groups_are_laid_out_from_the_inside_out(changes: dict[str, Any], group: str, wanted: tuple[int, int]) -> None:
    found: Group = getattr(layout_of(**changes), group)
    assert (found.size, found.inside) == wanted


def test_whole_experts_are_spread_over_tensor_parallel_ranks_first() -> None:
    layout = layout_of("qwen3-30b-a3b", parallel__tp=8, parallel__ep=8)
    assert layout.expert_tp == 1
    assert layout.ep == Group(8, 8), "one node holds them all"
    assert layout.expert_dp.size == 1


def test_replicas_of_experts_are_fewer_than_of_the_rest() -> None:
    layout = layout_of("deepseek-v3", parallel__ep=64, parallel__dp=128)
    assert layout.dp.size == 128
    assert layout.expert_dp.size == 2


def test_some_replicas_may_share_one_copy() -> None:
    layout = layout_of(parallel__dp=64, parallel__zero=3, parallel__shard=8)
    assert layout.sharing == (Group(8, 8), Group(8, 1, stride=8))
    assert layout_of(parallel__dp=64, parallel__zero=3).sharing == (Group(64, 8), Group(1, 1, stride=64))


def test_a_sharding_group_counts_replicas_and_holds_all_ranks_of_their_contexts() -> None:
    layout = layout_of(parallel__dp=16, parallel__cp=2, parallel__zero=3, parallel__shard=4)
    assert [group.size for group in layout.sharing] == [8, 4]  # 4 replicas of 2 ranks each; 4 groups hold the same
    whole = layout_of(parallel__dp=16, parallel__cp=2, parallel__zero=3)
    assert [group.size for group in whole.sharing] == [32, 1]


# Ends


def test_a_divided_vocabulary_is_padded() -> None:
    assert layout_of("gpt2-1.5b").vocab == 50257
    layout = layout_of("gpt2-774m", parallel__tp=4)
    assert layout.vocab % 128 == 0
    assert 0 <= 4 * layout.vocab - 50257 < 4 * 128


@pytest.mark.parametrize("framework", framework_names())
def test_an_update_is_for_every_parameter_or_for_none(framework: str) -> None:
    adamw = optimizer(layout_of(framework=framework), 1e9)
    sgd = optimizer(layout_of(framework=framework, train__optimizer="sgd"), 1e9)
    assert operators(sgd)[0].bytes == pytest.approx(0.5 * operators(adamw)[0].bytes)
    assert optimizer(layout_of(framework=framework, train__optimizer="none"), 1e9) == []


# Values by hand


def shapes(block: Ops, *prefixes: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the operators of a block, by name, those whose kinds begin with a prefix."""
    return {
        op.name: op.work.shape for op in block
        if isinstance(op.work, Operator) and op.kind.startswith(prefixes or ("gemm",))
    }  # fmt: skip


def sizes(block: Ops) -> dict[str, tuple[str, float]]:
    """Kind and bytes of the collectives of a block, by name."""
    return {op.name: (op.kind, op.work.bytes) for op in block if isinstance(op.work, Collective)}


@pytest.mark.parametrize(
    ("kind", "shape", "flops", "elements"),
    [
        ("gemm_tn", (2, 3, 5), 2 * 30, 10 + 15 + 6),
        ("linear_bwd", (2, 3, 5), 4 * 30, 2 * 31),
        ("bmm", (7, 2, 3, 5), 7 * 60, 7 * 31),
        ("bmm_bwd", (7, 2, 3, 5), 2 * 7 * 60, 2 * 7 * 31),
        ("grouped_gemm", (4, 20, 3, 5), 2 * 20 * 15, 20 * 5 + 20 * 3 + 4 * 15),  # four matrices of weights
        ("sdpa_fwd", (2, 3, 8, 4), 2 * 2 * (2 * 3 * 8 * 8 * 4) / 2, 4 * 2 * 3 * 8 * 4),  # two matmuls, the causal half
        ("sdpa_bwd", (2, 3, 8, 4), 5 * 2 * (2 * 3 * 8 * 8 * 4) / 2, 8 * 2 * 3 * 8 * 4),  # five matmuls
        ("softmax_fwd", (2, 3, 8), 5 * 2 * 3 * 64, 2 * 2 * 3 * 64),  # read and written
        ("softmax_bwd", (2, 3, 8), 5 * 2 * 3 * 64, 3 * 2 * 3 * 64),
        ("rms_norm", (8, 4), 4 * 32, 2 * 32),
        ("layer_norm", (8, 4), 6 * 32, 2 * 32),
        ("rms_norm_bwd", (8, 4), 8 * 32, 3 * 32),  # input, gradient, gradient of the input
        ("layer_norm_bwd", (8, 4), 10 * 32, 3 * 32),
        ("gelu", (8, 4), 12 * 32, 2 * 32),
        ("gelu_bwd", (8, 4), 20 * 32, 3 * 32),
        ("silu", (8, 4), 5 * 32, 2 * 32),
        ("silu_bwd", (8, 4), 8 * 32, 3 * 32),
        ("mul", (8, 4), 32, 3 * 32),
        ("add", (8, 4), 32, 3 * 32),
        ("copy", (8, 4), 32, 2 * 32),
        ("permute", (8, 4), 32, 2 * 32),
        ("cast_f32", (8, 4), 32, 3 * 32),  # read in 16 bits, written in 32
        ("embedding", (8, 100, 4), 0, 2 * 32),
        ("embedding_bwd", (8, 100, 4), 32, (2 * 8 + 100) * 4),  # the whole table is written
        ("neox_softmax_fwd", (2, 3, 8), 5 * 2 * 3 * 64, 6 * 2 * 3 * 64),  # GPT-NeoX: several kernels, sampled as one
        ("neox_softmax_bwd", (2, 3, 8), 5 * 2 * 3 * 64, 9 * 2 * 3 * 64),
        ("neox_fillmask_fwd", (2, 3, 8), 5 * 2 * 3 * 64, 3 * 2 * 3 * 64),
        ("neox_fillmask_bwd", (2, 3, 8), 5 * 2 * 3 * 64, 4 * 2 * 3 * 64),
        ("neox_rotary_fwd", (2, 3, 8, 4), 6 * 192, 24 * 192),
        ("neox_rotary_bwd", (2, 3, 8, 4), 6 * 192, 32 * 192),
        ("neox_layer_norm_fwd", (8, 4), 32, 4 * 32),
        ("neox_layer_norm_bwd", (8, 4), 32, 8 * 32),
        ("neox_gelu_fwd", (8, 4), 32, 2 * 32),
        ("neox_gelu_bwd", (8, 4), 32, 3 * 32),
        ("neox_loss_fwd", (8, 4), 32, 8 * 32),
        ("neox_loss_bwd", (8, 4), 32, 4 * 32),
        ("neox_embedding_fwd", (8, 100, 4), 0, 4 * 32),
        ("neox_embedding_bwd", (8, 100, 4), 0, (4 * 8 + 100) * 4),
        ("rotary_fwd", (2, 3, 8, 4), 6 * 192, 12 * 192),  # unfused: rotate, two products, a sum
        ("rotary_bwd", (2, 3, 8, 4), 6 * 192, 16 * 192),
        ("norm_eager_fwd", (8, 4), 6 * 32, 20 * 32),
        ("norm_eager_bwd", (8, 4), 12 * 32, 40 * 32),
        ("cross_entropy", (8, 4), 6 * 32, 4 * 32),
        ("cross_entropy_bwd", (8, 4), 3 * 32, 4 * 32),
        ("adamw_fused", (10,), 120, 70),  # weight, gradient and two moments read, all but the gradient written
    ],
)  # fmt: skip
def test_operators_do_the_work_that_their_mathematics_needs(
    kind: str, shape: tuple[int, ...], flops: float, elements: float
) -> None:
    operator = Operator(kind, shape)
    assert operator.flops == flops
    assert operator.bytes == 2 * elements
    assert operator._replace(dtype="fp32").bytes == 4 * elements
    assert operator._replace(dtype="fp8").bytes == elements


@pytest.mark.parametrize(
    ("operator", "wanted"),
    [
        (Operator("stream", (300,)), 100),  # two read, one written
        (Operator("gemm_tn", (64, 32, 16)), 2 * 64 * 32),  # the result, or the input if it is larger
        (Operator("gemm_nn", (64, 16, 32)), 2 * 64 * 32),
        (Operator("softmax_fwd", (2, 3, 8)), 2 * 2 * 3 * 64),
        (Operator("embedding", (8, 100, 4)), 2 * 32),
        (Operator("add", (8, 4), "fp32"), 4 * 32),
    ],
    ids=str,
)
def test_the_tensor_that_the_next_kernel_reads_is_the_result(operator: Operator, wanted: float) -> None:
    assert operator.tensor_bytes == wanted


LLAMA = {"t": 2048, "h": 4096, "q": 32 * 128, "kv": 8 * 128, "ffn": 14336}


def test_matmuls_of_megatron_are_joined() -> None:
    """Llama 3 8B: 32 query and 8 key-value heads of 128, gate and up in one matmul."""
    t, h, f = LLAMA["t"], LLAMA["h"], LLAMA["ffn"]
    layer = TransformerLayer(layout_of())
    assert shapes(layer.forward()) == {
        "qkv": (t, 6144, h), "out": (t, h, 4096), "up": (t, 2 * f, h), "down": (t, h, f)
    }  # fmt: skip
    assert shapes(layer.backward()) == {
        "down dgrad": (t, f, h), "down wgrad": (h, f, t), "up dgrad": (t, h, 2 * f), "up wgrad": (2 * f, h, t),
        "out dgrad": (t, 4096, h), "out wgrad": (h, 4096, t), "qkv dgrad": (t, h, 6144), "qkv wgrad": (6144, h, t),
    }  # fmt: skip


def test_matmuls_of_pytorch_are_one_for_every_matrix() -> None:
    t, h, f = LLAMA["t"], LLAMA["h"], LLAMA["ffn"]
    layer = TransformerLayer(layout_of(framework="pytorch"))
    assert shapes(layer.forward()) == {
        "q": (t, 4096, h), "kv": (t, 1024, h), "out": (t, h, 4096), "up": (t, f, h), "down": (t, h, f)
    }  # fmt: skip
    assert Counter(op.name for op in layer.forward())["kv"] == Counter(op.name for op in layer.forward())["up"] == 2
    backward = shapes(layer.backward())
    assert backward["kv dgrad"] == (t, h, 1024)
    assert backward["kv wgrad"] == (1024, h, t)
    assert backward["up dgrad"] == (t, h, f)
    assert backward["up wgrad"] == (f, h, t)
    counts = Counter(op.name for op in layer.backward())
    assert all(counts[f"{name} {gradient}"] == 2 for name in ("kv", "up") for gradient in ("dgrad", "wgrad"))


def test_matmuls_of_latent_attention_go_through_low_ranks() -> None:
    """DeepSeek-V3: ranks 1536 and 512, 128 heads with keys of 128 + 64 and values of 128."""
    layout = layout_of("deepseek-v3")
    t, forward = layout.tokens, shapes(TransformerLayer(layout).forward())
    assert forward["q down"] == (t, 1536, 7168)
    assert forward["q up"] == (t, 128 * 192, 1536)
    assert forward["kv down"] == (t, 512 + 64, 7168)
    assert forward["kv up"] == (t, 128 * (128 + 128), 512)
    assert forward["out"] == (t, 7168, 128 * 128)
    assert shapes(TransformerLayer(layout).forward(), "sdpa") == {"sdpa_fwd": (1, 128, t, 192)}
    kept = 2 * (2 * (1536 + 512) + 64 + 128 * (2 * 192 + 128 + 128))
    projections = next(op for op in TransformerLayer(layout).forward() if op.name == "q down")
    assert projections.saves == kept * t


def test_unfused_attention_multiplies_scores_and_values() -> None:
    layout = layout_of(train__attention="unfused", train__micro_batch=2)
    s, d = 2048, 128
    layer = TransformerLayer(layout)
    assert shapes(layer.forward(), "bmm") == {"scores": (64, s, s, d), "values": (64, s, d, s)}
    assert shapes(layer.backward(), "bmm") == {"values grad": (64, s, d, s), "scores grad": (64, s, s, d)}
    assert shapes(layer.forward(), "softmax") == {"softmax_fwd": (2, 32, s)}


@pytest.mark.parametrize("sequences", [False, True])
def test_collectives_of_a_layer_carry_the_hidden_states(sequences: bool) -> None:
    layout = layout_of(parallel__tp=4, parallel__sequence_parallel=sequences)
    whole = 2.0 * 2048 * 4096
    found = sizes(TransformerLayer(layout).forward()) | sizes(TransformerLayer(layout).backward())
    assert {size for _, size in found.values()} == {whole}
    ends = sizes(embedding(layout)) | sizes(head(layout)) | sizes(head_backward(layout))
    assert ends["embedding reduce"] == ("reduce_scatter" if sequences else "all_reduce", whole)
    assert ends["loss reduce"] == ("all_reduce", 3 * 4 * 2048), "maximum, sum and logit of the target, in fp32"
    assert ends["head grad reduce"] == ("reduce_scatter" if sequences else "all_reduce", whole)


def test_context_parallel_ranks_exchange_keys_and_values_and_their_gradients_besides() -> None:
    layer = TransformerLayer(layout_of(parallel__cp=4))
    exchanged = 2.0 * 2048 * 2 * 8 * 128  # keys and values of the whole sequence, 8 heads of 128
    assert sizes(layer.forward()) == {"context exchange": ("all_gather", exchanged)}
    assert sizes(layer.backward()) == {"context exchange": ("all_gather", 2 * exchanged)}


def test_torchtitan_gathers_repeated_keys_and_adds_up_results_in_fp32() -> None:
    layer = TransformerLayer(layout_of(framework="torchtitan", parallel__cp=4, parallel__cp_type="all_gather"))
    repeated = 2.0 * 2048 * 2 * 32 * 128  # keys and values of the whole sequence, for each of 32 queries
    assert sizes(layer.forward()) == {"context gather": ("all_gather", repeated)}
    assert sizes(layer.backward())["context reduce"] == ("reduce_scatter", 2 * repeated)
    assert {"context parts", "context parts grad"} <= names([*layer.forward(), *layer.backward()])
    alone = TransformerLayer(layout_of(framework="torchtitan"))
    assert not {"context parts", "context parts grad"} & names([*alone.forward(), *alone.backward()])


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_the_output_matrix_stays_in_16_bits(framework: str) -> None:
    layout = layout_of(framework=framework, train__precision="fp8", cluster__gpu="h100")
    dtypes = {op.name: op.work.dtype for op in [*head(layout), *head_backward(layout)] if isinstance(op.work, Operator)}
    assert {dtypes[name] for name in ("head", "head dgrad", "head wgrad")} == {"bf16"}
    assert not {"head cast", "head grad cast"} & set(dtypes)
    inner = {op.work.dtype for op in TransformerLayer(layout).forward() if op.name == "down"}
    assert inner == {"fp8"}


def test_inputs_with_one_factor_are_gathered_in_8_bits_and_those_with_factors_of_rows_are_not() -> None:
    keys = {"parallel__tp": 4, "parallel__sequence_parallel": True, "cluster__gpu": "h100"}
    wide, tensor, row = (
        TransformerLayer(layout_of(framework="torchtitan", **keys, **more)).forward()
        for more in ({}, {"train__precision": "fp8"}, {"train__precision": "fp8", "train__fp8_scaling": "row"})
    )
    gathered = [sizes(block)["gather sequence"] for block in (wide, tensor, row)]
    assert gathered[1] == ("all_gather", gathered[0][1] / 2)
    assert gathered[2] == gathered[0]
    cast = {name: op.work for name, block in (("tensor", tensor), ("row", row)) for op in block if op.name == "q cast"}
    assert cast["row"].shape[0] == 4 * cast["tensor"].shape[0], "a rank casts its part, or what was gathered"


def test_scales_that_are_found_anew_cost_more_than_those_of_the_step_before() -> None:
    kept, anew = (
        TransformerLayer(layout_of(framework=name, train__precision="fp8", cluster__gpu="h100"))
        for name in ("megatron", "torchtitan")
    )
    assert "down weight cast" not in names(kept.forward())
    assert {"down cast", "down weight cast"} <= names(anew.forward())
    assert {"down grad cast", "down weight cast", "down cast"} <= names(anew.backward())


# What a layer keeps for each token, in bytes: h hidden, q queries, k keys (and as many values), a heads, f inner width


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        # eager: both norms keep a copy in fp32, the normalised input, 1/rms and their output; the MLP gate, up, silu
        # and the product
        ({"framework": "pytorch"}, "2 * (8*h + 4) + 2*(q + 2*k) + 2*q + 4*a + 8*f"),
        # fused: both norms keep their input, 1/rms and their output; the MLP gate, up and the product
        ({"framework": "megatron"}, "2 * (4*h + 4) + 2*(q + 2*k) + 2*q + 4*a + 6*f"),
        # in 8 bits, linear layers keep their inputs in 8 bits, and that of the output projection besides attention's
        ({"framework": "megatron", "train__precision": "fp8"}, "2 * (3*h + 4) + 2*(q + 2*k) + 3*q + 4*a + 5*f"),
        # compiled whole: outputs of norms are made anew, but one; so is the product of gate and up
        ({"framework": "pytorch", "train__compile": True}, "2 * (2*h + 4) + 2*h + 2*(q + 2*k) + 2*q + 4*a + 4*f"),
        # compiled layer by layer: silu is made anew; what matmuls of the backward pass read is not
        ({"framework": "torchtitan", "train__compile": True}, "2 * (4*h + 4) + 2*3*q + 2*q + 4*a + 6*f"),
        # torchtitan repeats keys and values for their queries; torchao keeps inputs in 16 bits
        ({"framework": "torchtitan", "train__precision": "fp8"}, "2 * (4*h + 4) + 2*3*q + 2*q + 4*a + 8*f"),
        ({"framework": "megatron", "model__qk_norm": True},
         "2 * (4*h + 4) + 2*(q + k) + 2*(q + 2*k) + 2*q + 4*a + 6*f"),
        ({"framework": "pytorch", "model__qk_norm": True},
         "2 * (8*h + 4) + 6*(q + k) + 2*(q + 2*k) + 2*q + 4*a + 8*f"),
        ({"framework": "megatron", "model__gated": False}, "2 * (4*h + 8) + 2*(q + 2*k) + 2*q + 4*a + 4*f"),
        # layer norms keep input, mean, 1/deviation and output; GELU written out: x, tanh, x / 2, 1 + tanh and
        # their product
        ({"framework": "pytorch", "model__gated": False}, "2 * (4*h + 8) + 2*(q + 2*k) + 2*q + 4*a + 10*f"),
        ({"framework": "pytorch", "model__gated": False, "model__activation": "relu"},
         "2 * (4*h + 8) + 2*(q + 2*k) + 2*q + 4*a + 2*f"),
        ({"framework": "megatron", "model__norm": "layer"}, "2 * (4*h + 8) + 2*(q + 2*k) + 2*q + 4*a + 6*f"),
        ({"framework": "megatron", "train__mode": "lora"}, "2 * (4*h + 4) + 2*(q + 2*k) + 2*q + 4*a + 4*f"),
        # scores in 16 bits after the softmax
        ({"framework": "megatron", "train__attention": "unfused"},
         "2 * (4*h + 4) + 2*(q + 2*k) + 2*q + 2*a*2048 + 6*f"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value.values())),
)  # fmt: skip
def test_a_layer_keeps_for_a_token(changes: dict[str, Any], wanted: str) -> None:
    layer = TransformerLayer(layout_of(**({"cluster__gpu": "h100"} | changes)))
    names = {"h": 4096, "q": 4096, "k": 1024, "a": 32, "f": 14336}
    assert layer.memory.kept == pytest.approx(2048 * eval(wanted, names), rel=1e-9)


def test_a_layer_with_experts_keeps_the_router_and_what_its_experts_read_and_return() -> None:
    """Mixtral: every token goes to 2 of 8 experts; logits and probabilities of the router are in fp32."""
    layer = TransformerLayer(layout_of("mixtral-8x7b"), sparse=True)
    attention = 2 * (4 * 4096 + 4) + 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32
    experts = 8 * 8 + 2 * ((2 + 2) * 4096 + 6 * 14336)
    assert layer.memory.kept == 2048 * (attention + experts)
    assert shapes(layer.forward(), "grouped") == {
        "experts up": (8, 2 * 2048, 2 * 14336, 4096), "experts down": (8, 2 * 2048, 4096, 14336)
    }  # fmt: skip


# Parameters and stages


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_the_stages_of_a_pipeline_hold_the_parameters_of_the_model(preset: str, pp: int, vpp: int) -> None:
    schedule = "interleaved" if vpp > 1 else "1f1b"
    keys = dict(preset_named(preset).keys)
    if int(keys["layers"]) < pp * vpp:
        return
    setup = Setup(model=keys, train={"seq": 1024, "framework": "megatron", "microbatches": 4})
    setup = setup.replaced({"parallel.pp": pp, "parallel.vpp": vpp, "parallel.schedule": schedule, "parallel.dp": 1})
    program, model = Program(setup), setup.model
    held = [program.stage_parameters(stage) for stage in range(pp)]
    again = model.vocab * model.hidden if model.tied and pp > 1 else 0  # both ends have the table
    assert sum(part.common + part.experts for part in held) == pytest.approx(model.parameters(1024) + again, rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "pp", "wanted"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [2, 3, 3, 2]), (11, 4, [2, 3, 3, 3]), (5, 2, [3, 2]), (7, 1, [7])],
)
def test_layers_are_dealt_evenly_and_the_ends_get_fewer(layers: int, pp: int, wanted: list[int]) -> None:
    """The first and the last stage have the embedding and the output matrix besides."""
    setup = layout_of("llama3-8b", model__layers=layers, parallel__pp=pp).setup
    assert layers_of(setup) == wanted


def test_layers_are_dealt_by_work_where_the_framework_balances() -> None:
    """Llama 3.2 1B: the output matrix is worth 4.3 of its layers, so each of four stages does the work of 5.1."""
    setup = layout_of("llama3.2-1b", framework="nanotron", parallel__pp=4).setup
    m = setup.model
    layer = m.attention_parameters + m.mlp_parameters(m.ffn)
    share = (m.layers + m.vocab * m.hidden / layer) / 4
    counts = layers_of(setup, balances=True)
    assert sum(counts) == m.layers
    assert counts[:-1] == pytest.approx([share] * 3, abs=1)
    assert counts[-1] == pytest.approx(share - m.vocab * m.hidden / layer, abs=1)
    assert min(counts) >= 1


def test_layers_that_are_given_by_stage_are_dealt_to_its_chunks() -> None:
    setup = layout_of("llama3-8b", model__layers=12, parallel__pp=2, parallel__vpp=2, train__microbatches=2,
                      parallel__schedule="interleaved", parallel__stage_layers=[5, 7]).setup  # fmt: skip
    assert layers_of(setup) == [3, 4, 2, 3], "virtual stages 0 and 2 are on the first stage"


def test_dense_layers_of_a_mixture_come_first() -> None:
    """DeepSeek-V3: 3 dense and 58 sparse layers; on 8 stages the first has all dense ones."""
    rows = chunks_of(layout_of("deepseek-v3", parallel__pp=8).setup)
    chunks = [chunk for row in rows for chunk in row]
    assert [chunk.dense for chunk in chunks] == [3, 0, 0, 0, 0, 0, 0, 0]
    assert sum(chunk.sparse for chunk in chunks) == 58
    assert [chunk.first for chunk in chunks] == [True] + [False] * 7
    assert [chunk.last for chunk in chunks] == [False] * 7 + [True]


@pytest.mark.parametrize("tp", [1, 4])
def test_adapters_are_thin_matrices_beside_the_linear_layers_of_attention(tp: int) -> None:
    """Rank 16: (h + q), (h + k), (h + k) and (q + h) for query, key, value and output."""
    program = Program(layout_of(train__mode="lora", parallel__tp=tp).setup)
    each = 16 * ((4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096))
    assert program.stage_parameters(0).adapters == 32 * each / tp
    assert program.sharding.trained(program.stage_parameters(0)) == (32 * each / tp, 0, 0)


@pytest.mark.parametrize(
    ("framework", "precision", "weights", "gradients", "state"),
    [
        ("pytorch", "bf16", 2, 2, 4),  # all as trained
        ("pytorch", "fp32", 4, 4, 8),
        ("megatron", "bf16", 2, 4, 12),  # master weights and two moments in fp32
        ("megatron", "fp16", 2, 2, 12),  # fp16 is accumulated and reduced as it is
        ("megatron-2021", "fp16", 2, 2, 12),
        ("neox", "bf16", 2, 2, 12),
        ("torchtitan", "bf16", 4, 4, 8),  # fp32 weights, cast for the matmuls
    ],
)
def test_bytes_of_a_parameter(framework: str, precision: str, weights: int, gradients: int, state: int) -> None:
    sharding = Program(layout_of(framework=framework, train__precision=precision).setup).sharding
    assert (sharding.weights, sharding.gradients, sharding.optimizer) == (weights, gradients, state)


# FLOPs of a step


def test_a_step_of_llama_3_8b_takes_six_operations_for_every_parameter_and_twelve_for_every_score() -> None:
    """6 N T without the embedding, and 12 l q s / 2 for every token: the causal half of the scores."""
    setup = layout_of(train__microbatches=4).setup
    tokens, dense = 4 * 2048, setup.model.parameters(2048) - 128256 * 4096
    by_hand = tokens * (6 * dense + 6 * 32 * 4096 * 2048)
    assert model_flops(setup) == pytest.approx(by_hand, rel=1e-3)
    full, selective = (hardware_flops(setup.replaced({"train.recompute": how})) for how in ("full", "selective"))
    layers = dense - 128256 * 4096
    assert full - by_hand == pytest.approx(tokens * (2 * layers + 2 * 32 * 4096 * 2048), rel=1e-3)
    assert selective - by_hand == pytest.approx(tokens * 2 * 32 * 4096 * 2048, rel=0.05)
    assert hardware_flops(setup) == model_flops(setup)
    half = hardware_flops(setup.replaced({"train.recompute": "full", "train.recompute_every": 2}))
    assert half - model_flops(setup) == pytest.approx((full - model_flops(setup)) / 2)
    mlp = hardware_flops(setup.replaced({"train.recompute": "selective", "train.recompute_modules": ["mlp"]}))
    assert mlp - model_flops(setup) == pytest.approx(tokens * 32 * 2 * 3 * 4096 * 14336, rel=1e-3)
    lora = model_flops(setup.replaced({"train.mode": "lora"}))
    assert lora == pytest.approx(tokens * (4 * dense + 6 * 32 * 4096 * 2048), rel=1e-3)


def test_utilisation_is_work_over_the_peak_of_all_gpus() -> None:
    setup = layout_of(parallel__dp=4, cluster__gpu="h100").setup
    assert utilisation(989.4e12, setup, 1.0) == pytest.approx(0.25, rel=1e-3)
    assert utilisation(989.4e12, setup, 0.5) == pytest.approx(0.5, rel=1e-3)


# Element-wise work, by hand


def traffic(block: Ops) -> dict[str, float]:
    """Elements that memory-bound chains read and write for a token, by name; gradients of weights aside."""
    total: Counter[str] = Counter()
    for op in block:
        if isinstance(op.work, Operator) and op.kind == "stream" and "accumulate" not in op.name:
            total[op.name] += op.work.bytes / 2 / 2048  # type: ignore[assignment]
    return {name: elements for name, elements in total.items() if elements}


H, Q, K, FFN, SCORES = 4096, 4096, 1024, 14336, 32 * 2048


@pytest.mark.parametrize(
    ("framework", "forward", "backward"),
    [
        (
            "megatron",
            {"rotary_fwd": 2 * (Q + K), "residual": 2 * 3 * H, "activation": 3 * FFN},
            {"rotary_bwd": 2 * (Q + K), "residual grad": 2 * 3 * H, "activation": 5 * FFN,
             "join qkv grads": 2 * (Q + 2 * K)},
        ),
        (
            "pytorch",  # keys and values are repeated for 32 query heads, gradients of three matmuls' input added
            {"repeat keys and values": 2 * 2 * Q, "attention copy": 2 * Q, "residual": 2 * 3 * H},
            {"repeat keys and values grad": 2 * 1.5 * Q, "attention copy": 2 * Q, "residual grad": 2 * 3 * H,
             "up sum": 3 * H, "kv sum": 3 * H, "sum qkv grads": 3 * H},
        ),
        (
            "megatron-2021",  # dropout reads and writes 16 bits and a mask of 8
            {"rotary_fwd": 2 * (Q + K), "residual": 2 * 4.5 * H, "activation": 3 * FFN, "attention copy": 2 * Q,
             "attention dropout": 2.5 * SCORES},
            {"rotary_bwd": 2 * (Q + K), "residual grad": 2 * 5.5 * H, "activation": 5 * FFN,
             "attention copies grad": 4 * Q, "attention dropout grad": 2.5 * SCORES},
        ),
    ],
)  # fmt: skip
def test_element_wise_chains_read_and_write(
    framework: str, forward: dict[str, float], backward: dict[str, float]
) -> None:
    layer = TransformerLayer(layout_of(framework=framework))
    assert traffic(layer.forward()) == pytest.approx(forward)
    assert traffic(layer.backward()) == pytest.approx(backward)


@pytest.mark.parametrize(
    ("framework", "compiled", "again"), [("pytorch", False, 6), ("torchtitan", False, 7), ("torchtitan", True, 6)]
)
def test_a_recomputed_layer_stops_where_nothing_more_is_needed(framework: str, compiled: bool, again: int) -> None:
    layer = TransformerLayer(layout_of(framework=framework, train__recompute="full", train__compile=compiled))
    assert sum(op.kind == "gemm_tn" for op in layer.forward()) == 7
    assert sum(op.kind == "gemm_tn" for op in layer.recomputed()) == again
    assert ("down" in names(layer.recomputed())) == (again == 7)


def test_an_eager_layer_launches_so_many_kernels() -> None:
    """Forward: two norms of 8, 7 matmuls, two rotaries of 5, 3 copies, attention, silu, product, 2 additions."""
    layer = TransformerLayer(layout_of(framework="pytorch"))
    forward = 2 * 8 + 7 + 2 * 5 + 3 + 1 + 2 + 2
    assert sum(op.launches for op in layer.forward()) == forward
    backward = 2 * 15 + 14 + 2 * 10 + 3 + 4 + 3 + 2 + 3  # and three sums of gradients
    assert sum(op.launches for op in layer.backward()) == backward
    checkpointed = TransformerLayer(layout_of(framework="pytorch", train__recompute="full"))
    assert sum(op.launches for op in checkpointed.recomputed()) == forward - 2 + 40  # not the last matmul and addition


def test_gradients_are_accumulated_in_fp32_by_the_matmul_or_after_it() -> None:
    weights = sum(a * b for a, b in ((6144, H), (H, Q), (2 * FFN, H), (H, FFN)))
    for framework, each, launches in (("megatron", 6, 0), ("megatron-2021", 12, 3)):
        added = [op for op in TransformerLayer(layout_of(framework=framework)).backward() if "accumulate" in op.name]
        assert sum(op.work.bytes for op in added) == each * weights
        assert {op.launches for op in added} == {launches}


def test_megatron_accumulates_fp16_in_fp16() -> None:
    layout = layout_of(framework="megatron-2021", train__precision="fp16", train__microbatches=4)
    added = [op for op in TransformerLayer(layout).backward() if "accumulate" in op.name]
    weights = sum(a * b for a, b in ((6144, H), (H, Q), (2 * FFN, H), (H, FFN)))
    assert sum(op.work.bytes for op in added) == 3 / 4 * 6 * weights  # not for the first of four micro-batches


def test_linear_layers_in_8_bits_cast_their_inputs_and_gradients() -> None:
    layer = TransformerLayer(layout_of(cluster__gpu="h100", train__precision="fp8"))
    casts = {name: value for name, value in traffic(layer.forward()).items() if name.endswith("cast")}
    assert casts == {"qkv cast": 1.5 * H, "out cast": 1.5 * Q, "up cast": 1.5 * H, "down cast": 1.5 * FFN}
    casts = {name: value for name, value in traffic(layer.backward()).items() if name.endswith("cast")}
    assert casts == {
        "qkv grad cast": 2.5 * (Q + 2 * K), "out grad cast": 2.5 * H, "up grad cast": 2.5 * 2 * FFN,
        "down grad cast": 2.5 * H,
    }  # fmt: skip


V = 128256


@pytest.mark.parametrize(
    ("framework", "forward", "backward"),
    [
        ("megatron", [("cross_entropy", "bf16", (2048, V), 6)], [("cross_entropy_bwd", "bf16", (2048, V), 2)]),
        ("nanotron", [("stream", "fp32", (9.5 * 4 * 2048 * V,), 10)], [("stream", "fp32", (5.5 * 4 * 2048 * V,), 5)]),
        (
            "pytorch",
            [("cast_f32", "bf16", (2048, V), 1), ("cross_entropy", "fp32", (2048, V), 2)],
            [("cross_entropy_bwd", "fp32", (2048, V), 3), ("stream", "bf16", (3 * 2 * 2048 * V,), 1)],
        ),
    ],
)  # fmt: skip
def test_the_loss_is_fused_sharded_or_eager(framework: str, forward: list[Any], backward: list[Any]) -> None:
    def rows(block: Ops) -> list[Any]:
        return [(op.kind, op.work.dtype, op.work.shape, op.launches) for op in block]  # type: ignore[union-attr]

    layout = layout_of(framework=framework)
    assert rows(head(layout))[2:] == forward, "after norm and matmul"
    assert rows(head_backward(layout))[: len(backward)] == backward


@pytest.mark.parametrize(
    ("framework", "work", "launches"),
    [
        ("megatron", Operator("stream", (38_000_000_000,), "fp32"), 60),
        ("torchtitan", Operator("stream", (28_000_000_000,), "fp32"), 60),
        ("pytorch", Operator("adamw_fused", (1_000_000_000,), "bf16"), 150),  # one for every two tensors
    ],
)
def test_the_update_reads_and_writes_the_state(framework: str, work: Operator, launches: int) -> None:
    (update,) = optimizer(layout_of(framework=framework), 1e9, 300)
    assert (update.work, update.launches) == (work, launches)


# The four ways of a mixture with tensor parallelism (Mixtral, two of eight experts a token)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        # whole experts, sequences divided: every rank routes its own half
        ({"parallel__ep": 2, "parallel__dp": 2, "parallel__sequence_parallel": True}, {"all_to_all": [2 * 1024]}),
        ({"parallel__ep": 2, "parallel__dp": 2, "parallel__sequence_parallel": False},
         {"all_to_all": [2 * 1024], "all_gather": [2048]}),
        # cut by tensor parallelism: every rank works on the copies of both
        ({"parallel__ep": 8, "parallel__dp": 8, "parallel__sequence_parallel": True},
         {"all_to_all": [2 * 1024], "all_gather": [2 * 2048], "reduce_scatter": [2 * 2048]}),
        ({"parallel__ep": 8, "parallel__dp": 8, "parallel__sequence_parallel": False},
         {"all_to_all": [2 * 2048], "all_reduce": [2048]}),
    ],
    ids=["whole, divided", "whole", "cut, divided", "cut"],
)  # fmt: skip
def test_experts_and_tensor_parallel_ranks_exchange(keys: dict[str, Any], wanted: dict[str, list[int]]) -> None:
    """Tokens, or copies of tokens, in every collective of the mixture."""
    layout = layout_of("mixtral-8x7b", parallel__tp=2, **keys)
    for block in (moe(layout), moe_backward(layout)):
        found: dict[str, set[float]] = {}
        for op in block:
            if isinstance(op.work, Collective) and op.name != "experts counts":
                found.setdefault(op.kind, set()).add(op.work.bytes / 2 / 4096)
        assert {kind: sorted(sizes) for kind, sizes in found.items()} == wanted


def test_gelu_written_out_is_eight_operators_and_eleven_gradients() -> None:
    layer = TransformerLayer(layout_of(framework="pytorch", model__gated=False))
    for block, count, passes in ((layer.forward(), 8, 18), (layer.backward(), 11, 28)):
        gelus = [op for op in block if op.name == "gelu"]
        assert len(gelus) == sum(op.launches for op in gelus) == count
        assert sum(op.work.bytes for op in gelus) == pytest.approx(passes * 2 * 2048 * FFN, rel=1e-6)


def test_experts_in_a_loop_launch_for_each_and_make_gradients_as_large_as_all_of_them() -> None:
    """Mixtral on one GPU: the gradient of one expert's slice of the weights is a tensor of zeros for all eight."""
    looped, grouped = (layout_of("mixtral-8x7b", framework) for framework in ("megatron-2021", "megatron"))
    copies, width, hidden = 2 * 2048, 14336, 4096
    at_once = 2 * 2 * copies * width + 2 * copies * hidden
    assert expert_gradient_bytes(grouped) == at_once
    assert expert_gradient_bytes(looped) == at_once / 8 + 2 * 8 * 2 * hidden * width
    eager = layout_of("mixtral-8x7b", "pytorch")
    for layout, launches in ((eager, 1), (grouped, round(0.3 * 8)), (looped, 5 * 8)):
        experts = [op for op in moe(layout) if op.name in ("experts up", "experts down")]
        assert {op.launches for op in experts} == {launches}


def test_a_flexible_dispatcher_sends_a_token_once_to_every_place_that_has_experts_for_it() -> None:
    """16 ranks on two nodes, two experts a token: 1.5 nodes on average, not two copies."""
    keys = {"parallel__ep": 8, "parallel__dp": 16, "model__experts": 16, "model__top_k": 2, "parallel__etp": 1}
    spread = {"cluster__gpus_per_node": 4, "cluster__nvlink_domain": 4}

    def sent(**changes: Any) -> set[float]:
        block = moe(layout_of("mixtral-8x7b", **keys, **changes))
        return {round(op.work.bytes / 2 / 4096 / 2048, 6) for op in block if op.kind == "all_to_all"}

    assert sent() == sent(**spread) == {2.0}
    assert sent(**spread, parallel__dispatcher="flex") == {1.5}
    assert sent(parallel__dispatcher="flex") == {8 * (1 - (7 / 8) ** 2)}  # one node: once to every rank


def test_exchanges_beside_another_micro_batch_cost_only_what_the_layer_does_not_hide() -> None:
    keys = {"parallel__ep": 8, "parallel__dp": 8, "train__microbatches": 2}
    waiting, beside = (TransformerLayer(layout_of("mixtral-8x7b", **keys, parallel__ep_overlap=on), sparse=True)
                       for on in (False, True))  # fmt: skip
    alone = layout_of("mixtral-8x7b", **keys | {"train__microbatches": 1}, parallel__ep_overlap=True)
    assert TransformerLayer(alone, sparse=True).forward() == waiting.forward(), "there is no other micro-batch"
    for before, after in ((waiting.forward(), beside.forward()), (waiting.backward(), beside.backward())):
        assert [op.name for op in after[:2]] == [op.name for op in before if op.kind == "all_to_all"]
        assert sorted(op.name for op in after) == sorted(op.name for op in before)
        assert all(op.stream == EXCHANGE for op in after[:2])


def test_experts_in_8_bits_cast_what_they_read_and_add_to_gradients_of_all_their_weights() -> None:
    layout = layout_of("mixtral-8x7b", train__precision="fp8")
    copies, width, hidden = 2 * 2048, 14336, 4096
    casts = [op.work.bytes for op in moe(layout) if op.name == "experts cast"]
    assert casts == [1.5 * 2 * copies * hidden, 1.5 * 2 * copies * width]
    added = {op.name: op.work.bytes for op in moe_backward(layout) if op.name.endswith("accumulate")}
    weights = 8 * width * hidden
    assert added == {"experts down accumulate": 6 * weights, "experts up accumulate": 2 * 6 * weights}


def test_eager_experts_run_a_kernel_for_every_line_of_their_code() -> None:
    """transformers fuses nothing between router and residual: sort, masks, weights, sums, each over all copies."""
    eager, fused = (layout_of("mixtral-8x7b", framework) for framework in ("pytorch", "megatron"))
    copies, inner, hidden = 2 * 2048, 2 * 14336, 4096
    forward = {op.name: op for op in moe(eager)}
    assert forward["experts activation"].work.bytes == round(10.8 * 2 * copies * 14336)
    cleared = [op.work.bytes for op in moe(eager) if op.name == "clear rows"]
    assert cleared == [6 * 2 * copies * hidden, 8 * 2 * copies * inner, 8 * 2 * copies * hidden]
    longer = {op.name: op for op in moe(layout_of("mixtral-8x7b", "pytorch", train__seq=4096))}
    assert forward["sort choices"].work.bytes == longer["sort choices"].work.bytes
    moved = [sum(op.work.bytes for op in moe(layout) if op.kind == "stream") for layout in (eager, fused)]
    assert moved[0] > 5 * moved[1]
    assert {"clear rows", "weigh rows", "sort choices"}.isdisjoint(op.name for op in moe(fused))
    compiled = layout_of("mixtral-8x7b", "pytorch", train__compile=True)
    assert "clear rows" not in {op.name for op in moe(compiled)}


def test_experts_activate_every_copy_and_keep_no_state_without_an_optimizer() -> None:
    layout = layout_of("mixtral-8x7b")
    for block, passes in ((moe(layout), 3), (moe_backward(layout), 5)):
        (activation,) = (op for op in block if op.name == "experts activation")
        assert activation.work.bytes == passes * 2 * (2 * 2048) * 14336
    for framework in framework_names():
        frozen = Program(layout_of(framework=framework, train__optimizer="none").setup)
        assert frozen.sharding.optimizer == 0
        assert frozen.sharding.states(frozen.stage_parameters(0)).optimizer == 0


@pytest.mark.parametrize(
    ("schedule", "stage", "phase", "wanted"),
    [
        ("1f1b", 0, Phase.FORWARD, {"forward": 8, "embedding": 1}),
        ("1f1b", 1, Phase.FORWARD, {"forward": 8}),
        ("1f1b", 3, Phase.FORWARD, {"forward": 8, "head": 1}),
        ("1f1b", 0, Phase.BACKWARD, {"recompute": 8, "backward": 8, "embedding grad": 1}),
        ("1f1b", 3, Phase.BACKWARD, {"recompute": 8, "backward": 8, "head grad": 1}),
        ("1f1b", 3, Phase.WEIGHTS, {}),
        ("zero-bubble", 3, Phase.BACKWARD, {"recompute": 8, "backward": 8, "head grad": 1}),
        ("zero-bubble", 3, Phase.WEIGHTS, {"backward": 8, "head grad": 1}),
    ],
)
def test_a_stage_runs_its_layers_and_the_ends_of_the_model(
    schedule: str, stage: int, phase: Phase, wanted: dict[str, int]
) -> None:
    setup = layout_of("llama3-8b", "torchtitan", parallel__pp=4, train__recompute="full", parallel__schedule=schedule)
    program = Program(setup.setup)
    (chunk,) = program.chunks[stage]
    assert {block.name: block.times for block in program.blocks(chunk, phase)} == wanted
    assert program.optimizer(stage).name == "optimizer"


# Experts that are cut, and attention among context-parallel ranks


def mixture(**changes: Any) -> RankLayout:
    keys = {"parallel__tp": 4, "parallel__sequence_parallel": True, "parallel__ep": 2, "parallel__dp": 4} | changes
    return layout_of("mixtral-8x7b", **keys)


@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize(("ep", "assumed"), [(1, 4), (2, 1), (8, 1)])
def test_an_expert_is_cut_as_was_assumed_where_nothing_else_is_asked_for(
    ep: int, assumed: int, sequences: bool
) -> None:
    keys = {"parallel__ep": ep, "parallel__sequence_parallel": sequences}
    free, asked = mixture(**keys), mixture(**keys, parallel__etp=assumed)
    assert free.expert_tp == asked.expert_tp == assumed
    for phase in ("forward", "backward"):
        mine, other = (getattr(TransformerLayer(layout, sparse=True), phase)() for layout in (free, asked))
        assert mine == other
    assert Program(free.setup).stage_parameters(0) == Program(asked.setup).stage_parameters(0)


@pytest.mark.parametrize("etp", [1, 2, 4, 8])
def test_experts_that_are_cut_do_the_same_work_on_the_same_weights(etp: int) -> None:
    layout = mixture(parallel__etp=etp)
    up = next(op.work for op in TransformerLayer(layout, sparse=True).forward() if op.name == "experts up")
    experts, copies, width, _ = up.shape
    assert copies * width == 2048 * 2 // 4 * (2 * 14336)  # a rank's tokens by whole experts, however it is divided
    assert experts * width * etp * 2 == 8 * 2 * 14336  # over all ranks that hold different parts
    program = Program(layout.setup)
    assert program.parameters.experts == pytest.approx(8 * 3 * 4096 * 14336 / (2 * etp))
    assert layout.expert_dp.size * etp * 2 == 16


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({"parallel__etp": 1}, {}),
        ({"parallel__etp": 2}, {"experts gather": 2, "experts scatter": 2}),
        ({"parallel__etp": 4}, {"experts gather": 4, "experts scatter": 4}),
        ({"parallel__etp": 2, "parallel__tp": 1}, {"experts gather": 2, "experts scatter": 2}),
        ({"parallel__etp": 2, "parallel__sequence_parallel": False}, {"experts reduce": 4}),
    ],
)
def test_ranks_that_an_expert_is_cut_for_gather_its_copies(changes: dict[str, Any], moved: dict[str, int]) -> None:
    block = TransformerLayer(mixture(**changes), sparse=True).forward()
    named = ("experts gather", "experts scatter", "experts reduce")
    assert {op.name: op.work.group.size for op in block if op.name in named} == moved


def context(kind: str, backward: bool = False, **changes: Any) -> dict[str, tuple[str, float, int]]:
    """What context-parallel ranks do in a layer: by name, the collective, its bytes and its ranks."""
    layer = TransformerLayer(layout_of(parallel__cp_type=kind, **({"parallel__cp": 4} | changes)))
    block = layer.backward() if backward else layer.forward()
    return {op.name: (op.kind, op.work.bytes, op.work.group.size) for op in block if "context" in op.name}


def test_context_parallel_ranks_exchange_what_their_type_says() -> None:
    whole, mine = 2 * 2 * 2048 * 8 * 128, 2 * 512 * 128  # keys and values of all ranks; of one head of a rank
    assert context("") == context("p2p") == {"context exchange": ("all_gather", whole, 4)}
    assert context("p2p", backward=True) == {"context exchange": ("all_gather", 2 * whole, 4)}
    assert context("all_gather") == {"context gather": ("all_gather", whole, 4)}
    assert set(context("all_gather", backward=True)) == {"context gather", "context reduce"}
    heads, sequence = ("all_to_all", (32 + 16) * mine, 4), ("all_to_all", 32 * mine, 4)
    assert context("a2a") == {"context heads": heads, "context sequence": sequence}
    assert context("a2a", backward=True) == {"context heads": sequence, "context sequence": heads}
    both = context("a2a+p2p", parallel__cp=8, parallel__cp_inner=4)
    assert {name: found[2] for name, found in both.items()} == {
        "context heads": 4, "context exchange": 2, "context sequence": 4,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_attention_among_context_parallel_ranks_is_divided_evenly_whatever_the_type(kind: str) -> None:
    alone, shared = (
        matrix_flops(core(layout_of(train__attention="flash", **changes)))
        for changes in ({}, {"parallel__cp": 4, "parallel__cp_type": kind})
    )
    assert shared == pytest.approx(alone / 4, rel=2e-3)


def test_only_a_ring_is_hidden_behind_attention() -> None:
    def waits(kind: str) -> set[bool]:
        block = TransformerLayer(layout_of(parallel__cp=4, parallel__cp_type=kind)).forward()
        return {op.stream == 0 for op in block if "context" in op.name}

    assert (waits("p2p"), waits("all_gather"), waits("a2a")) == ({False}, {True}, {True})


# Muon


def muon(**changes: Any) -> Program:
    return Program(layout_of(train__optimizer="muon", **changes).setup)


def test_muon_keeps_one_moment_of_matrices_and_adams_two_of_the_rest() -> None:
    program, adam = muon(), Program(layout_of().setup)
    model, rest = program.setup.model, 2 * 128256 * 4096 + (2 * 32 + 1) * 4096  # embedding, output, norms
    assert program.vectors(0) == rest
    states = [p.sharding.states(p.stage_parameters(0), p.vectors(0)).optimizer for p in (program, adam)]
    matrices = model.parameters() - rest
    assert states == [8 * matrices + 12 * rest, 12 * (matrices + rest)]


@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_muon_counts_every_matrix_of_a_layer(preset: str) -> None:
    layout = layout_of(preset, train__optimizer="muon")
    model, parameters = layout.model, RankParameters(layout)
    vectors = 2 * model.norm_parameters + (model.q_lora_rank + model.kv_lora_rank if model.latent else 0)
    for sparse in [False] * (model.moe_layers < model.layers) + [True] * bool(model.moe_layers):
        whole = parameters.sparse if sparse else parameters.dense
        assert sum(matrix.elements for matrix in layer_matrices(layout, sparse)) == whole - vectors
    if model.experts:
        assert sum(matrix.elements for matrix in expert_matrices(layout)) == parameters.experts


def test_an_iteration_of_newton_schulz_is_three_matmuls_of_the_smaller_side() -> None:
    block = orthogonalised(layout_of(), [Matrices(4096, 14336, 2.0)])
    m, n = 4096, 14336
    assert matrix_flops(block) == 2 * 5 * (4 * m * m * n + 2 * m**3)
    assert {op.dtype for op in operators(block) if op.is_matrix} == {"bf16"}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_matrices_are_shared_out_among_the_ranks_that_divide_the_state(zero: int) -> None:
    alone = muon().optimizer(0).build()
    program = muon(parallel__dp=8, parallel__zero=zero)
    block = program.optimizer(0).build()
    assert matrix_flops(block) == pytest.approx(matrix_flops(alone) / (8 if zero else 1), rel=1e-3)
    assert kinds(block) == ({"all_gather": 1, "reduce_scatter": 1} if zero >= 2 else {})
    assert program.sharding.reduction == {0: "all_reduce", 1: "all_reduce"}.get(zero, "reduce_scatter")


def test_newton_schulz_takes_as_long_as_it_was_measured_to() -> None:
    rows = json.loads((ROOT / "calibration" / "offload_h200.json").read_text())["newton_schulz"]
    setup = layout_of(cluster__gpu="h200").setup
    for row in (row for row in rows if row["m"] >= 4096):  # smaller ones are bound by the host
        block = orthogonalised(Program(setup).layout, [Matrices(row["m"], row["n"], 1.0)])
        assert time_of(block, costs_of(setup)).us == pytest.approx(1e3 * row["ms"], rel=0.05)


@pytest.mark.parametrize(("precision", "share"), [("bf16", 1.0), ("fp8", 0.5), ("mxfp8", 0.5), ("nvfp4", 0.25)])
def test_transformer_engine_gathers_sequences_as_its_matmuls_read_them(precision: str, share: float) -> None:
    """The output matrix stays in 16 bits, and so do sums over ranks."""
    stated = {"parallel__tp": 4, "parallel__sequence_parallel": True, "cluster__gpu": "b200"}
    layout = layout_of(train__precision=precision, **stated)
    layer = TransformerLayer(layout)
    moved = Counter({"all_gather": 0.0, "reduce_scatter": 0.0})
    for op in [*layer.forward(), *layer.backward()]:
        if isinstance(op.work, Collective):
            moved[op.kind] += op.work.bytes / layout.activation_bytes
    assert moved == {"all_gather": 6 * share, "reduce_scatter": 4.0}
    assert [op.work.bytes for op in head(layout) if op.name == "gather sequence"] == [layout.activation_bytes]
