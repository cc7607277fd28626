"""What one rank runs for a layer: work is divided and never lost, and every parallelism talks as often as it must."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumos.program.attention import core
from lumos.program.block import Block
from lumos.program.embedding_head import embedding, head, head_backward, optimizer
from lumos.program.flops import forward_flops_per_token
from lumos.program.operators import Collective, Operator
from lumos.program.rank_layout import RankLayout
from lumos.program.transformer_layer import TransformerLayer
from lumos.setup import Setup, mistakes_in, preset_named, preset_names
from lumos.setup.frameworks import framework_named, framework_names


def layout_of(preset: str = "llama3-8b", framework: str = "megatron", **changes: Any) -> RankLayout:
    """One rank of a published model; changes are keys of a setup with `__` for the dot."""
    setup = Setup(model=dict(preset_named(preset).keys), train={"seq": 2048, "framework": framework})
    stated = {key.replace("__", "."): value for key, value in changes.items()}
    setup = setup.replaced({"parallel.dp": 1, "train.microbatches": 1} | stated)
    assert mistakes_in(setup) == []
    return RankLayout(setup, framework_named(framework))


def kinds(block: Block) -> Counter[str]:
    """How often a block runs each collective."""
    return Counter(op.work.kind for op in block if isinstance(op.work, Collective))


def operators(block: Block) -> list[Operator]:
    return [op.work for op in block if isinstance(op.work, Operator)]


def matrix_flops(block: Block) -> float:
    return sum(operator.flops for operator in operators(block) if operator.is_matrix)


def names(block: Block) -> set[str]:
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


def test_an_unbalanced_router_makes_the_busiest_expert_slower() -> None:
    even, uneven = (
        matrix_flops(TransformerLayer(layout_of("mixtral-8x7b", train__imbalance=value), sparse=True).forward())
        for value in (1.0, 1.5)
    )
    assert uneven > 1.3 * even


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
    assert kinds(layer.forward()) == {"all_to_all": 2}
    assert kinds(layer.backward()) == {"all_to_all": 2}
    sent = {op.work.bytes for op in layer.forward() if isinstance(op.work, Collective)}
    assert sent == {2.0 * layer.layout.tokens * layer.layout.model.top_k * layer.layout.model.hidden}


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
        ({"parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 2}, "pp", (2, 2)),
        ({"parallel__tp": 8, "parallel__pp": 2}, "pp", (2, 1)),
        ({"parallel__dp": 64, "cluster__gpu": "gb200"}, "dp", (64, 64)),
        ({"parallel__tp": 8, "cluster__gpu": "rtx4090"}, "tp", (8, 8)),  # PCIe joins the GPUs of a node
        ({"parallel__tp": 4, "cluster__gpus_per_node": 2}, "tp", (4, 2)),
    ],
)
def test_groups_are_laid_out_from_the_inside_out(changes: dict[str, Any], group: str, wanted: tuple[int, int]) -> None:
    assert getattr(layout_of(**changes), group) == wanted


def test_whole_experts_are_spread_over_tensor_parallel_ranks_first() -> None:
    layout = layout_of("qwen3-30b-a3b", parallel__tp=8, parallel__ep=8)
    assert layout.expert_tp == 1
    assert layout.ep == (8, 8), "one node holds them all"
    assert layout.expert_dp.size == 1


def test_replicas_of_experts_are_fewer_than_of_the_rest() -> None:
    layout = layout_of("deepseek-v3", parallel__ep=64, parallel__dp=128)
    assert layout.dp.size == 128
    assert layout.expert_dp.size == 2


def test_some_replicas_may_share_one_copy() -> None:
    layout = layout_of(parallel__dp=64, parallel__zero=3, parallel__shard=8)
    assert layout.sharing == ((8, 8), (8, 1))
    assert layout_of(parallel__dp=64, parallel__zero=3).sharing == ((64, 8), (1, 1))


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
