"""Shapes in another setup: a dimension is matched by its value, and by its place where values coincide."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumos.program.op import Op, Tensor
from lumos.setup.setup import Setup
from lumos.traced.sizes import Sizes

Shape = tuple[int, ...]


def setup(**changes: Any) -> Setup:
    """Sizes that are all distinct: 3 × 1536 tokens, hidden 2048 of 16 heads of 128, ffn 5632."""
    given: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": 2048, "ffn": 5632, "heads": 16, "vocab": 32000},
        "train": {"seq": 1536, "micro_batch": 3, "microbatches": 1},
        "parallel": {},
        "cluster": {"gpu": "h200"},
    }
    return Setup.model_validate(given).replaced(changes)


def dense(*shape: int) -> Tensor:
    return Tensor(shape, "bf16", tuple(prod(shape[i + 1 :]) for i in range(len(shape))))


def transposed(*shape: int) -> Tensor:
    return Tensor(shape, "bf16", (1, shape[0]))


def call(name: str, *inputs: Tensor, phase: str = "forward", outputs: tuple[Tensor, ...] = ()) -> Op:
    return Op(name, inputs, outputs, phase)


def mm(rows: int, inner: int, columns: int) -> Op:
    return call("aten.mm.default", dense(rows, inner), transposed(inner, columns), outputs=(dense(rows, columns),))


def weight_gradient(width: int, tokens: int, columns: int) -> Op:
    """The gradient of a weight sums over tokens."""
    inputs = transposed(width, tokens), dense(tokens, columns)
    return call("aten.mm.default", *inputs, phase="backward", outputs=(dense(width, columns),))


def operators(made: Setup) -> list[Op]:
    """Some of what a layer of this setup calls."""
    model, train = made.model, made.train
    b, s, h, f = train.micro_batch, train.seq, model.hidden, model.ffn
    heads, kv, d, t = model.heads, model.kv_heads, model.head_dim, train.micro_batch * train.seq
    query, keys = dense(b, heads, s, d), dense(b, kv, s, d)
    return [
        mm(t, h, f), mm(t, f, h), mm(t, h, model.vocab), mm(t, h, h), mm(t, h, kv * d),
        weight_gradient(f, t, h), weight_gradient(model.vocab, t, h),
        call("attention.forward", query, keys, keys, outputs=(query,)),
        call("aten.mul.Tensor", dense(b, s, h), dense(b, s, h), outputs=(dense(b, s, h),)),
        call("aten.mul.Tensor", dense(b, heads, s, d), dense(1, 1, s, d)),
        call("aten.silu.default", dense(b, s, f)),
        call("aten._to_copy.default", dense(t, h)),
        call("aten._log_softmax.default", dense(t, model.vocab)),
        call("aten.embedding.default", dense(model.vocab, h), dense(b, s)),
    ]  # fmt: skip


def shapes(op: Op) -> list[Shape]:
    return [tensor.shape for tensor in op.inputs]


# Values that no two sizes share, whatever is drawn
SETUPS = st.builds(
    lambda batch, seq, heads, ffn, vocab, layers: setup(**{
        "train.micro_batch": batch, "train.seq": seq, "model.heads": heads, "model.kv_heads": heads,
        "model.hidden": 128 * heads, "model.ffn": ffn, "model.vocab": vocab, "model.layers": layers,
    }),
    st.sampled_from((2, 3, 5, 7)),
    st.sampled_from((1200, 1360, 2640)),
    st.sampled_from((17, 19, 23)),
    st.sampled_from((5632, 7424, 11008)),
    st.sampled_from((32000, 50257, 128256)),
    st.integers(1, 4),
)  # fmt: skip


# ---------------------------------------------------------------------- laws
@given(SETUPS)
def test_the_same_setup_changes_nothing(made: Setup) -> None:
    sizes = Sizes(made, made)
    assert not sizes.changed
    assert sizes.growth == 1
    for op in operators(made):
        assert sizes.rewritten(op) is op


@given(SETUPS, SETUPS)
def test_operators_of_one_setup_become_those_of_the_other(before: Setup, after: Setup) -> None:
    sizes = Sizes(before, after)
    for old, new in zip(operators(before), operators(after), strict=True):
        assert shapes(sizes.rewritten(old)) == shapes(new), old.name


@given(SETUPS, SETUPS)
def test_there_and_back_is_where_it_began(before: Setup, after: Setup) -> None:
    there, back = Sizes(before, after), Sizes(after, before)
    for op in operators(before):
        assert back.rewritten(there.rewritten(op)) == op


@given(SETUPS, SETUPS)
def test_a_dense_tensor_stays_dense(before: Setup, after: Setup) -> None:
    sizes = Sizes(before, after)
    for op in operators(before):
        assert all(tensor.is_dense for tensor in sizes.rewritten(op).inputs)


@given(st.lists(st.integers(1, 4000), min_size=0, max_size=5), SETUPS, SETUPS)
def test_any_shape_has_another_one_of_as_many_dimensions(shape: list[int], before: Setup, after: Setup) -> None:
    """Untrusted: operators of any name and shape are rewritten without a crash, to sizes of at least 1."""
    names = ("aten.mm.default", "aten.bmm.default", "aten.add.Tensor", "aten._grouped_mm.default", "fsdp.chunk_cat")
    for name in (*names, "attention.forward", "custom.op.default"):
        for phase in ("forward", "backward", "optimizer"):
            for op in (call(name, dense(*shape), phase=phase), call(name, dense(*shape), dense(*shape), phase=phase)):
                new = Sizes(before, after).rewritten(op)
                assert [len(s) for s in shapes(new)] == [len(s) for s in shapes(op)]
                assert all(n >= 1 for s in shapes(new) for n in s)


# ---------------------------------------------------------------------- values that coincide
def test_a_hidden_size_and_a_sequence_of_2048_are_told_apart_by_place() -> None:
    square = setup(**{"train.seq": 2048, "train.micro_batch": 1})
    longer = Sizes(square, square.replaced({"train.seq": 4096}))
    assert shapes(longer.rewritten(mm(2048, 2048, 5632))) == [(4096, 2048), (2048, 5632)]
    assert shapes(longer.rewritten(mm(2048, 2048, 2048))) == [(4096, 2048), (2048, 2048)]
    gradient = longer.rewritten(weight_gradient(2048, 2048, 5632))
    assert shapes(gradient) == [(2048, 4096), (4096, 5632)], "sums over tokens"
    assert longer.rewritten(call("aten.add.Tensor", dense(1, 2048, 2048))).inputs[0].shape == (1, 4096, 2048)
    wider = Sizes(square, square.replaced({"model.hidden": 4096, "model.heads": 32, "model.kv_heads": 32}))
    assert shapes(wider.rewritten(mm(2048, 2048, 5632))) == [(2048, 4096), (4096, 5632)]
    assert shapes(wider.rewritten(weight_gradient(2048, 2048, 5632))) == [(4096, 2048), (2048, 5632)]
    assert wider.rewritten(call("aten.add.Tensor", dense(1, 2048, 2048))).inputs[0].shape == (1, 2048, 4096)


def test_weights_have_no_tokens() -> None:
    square = setup(**{"train.seq": 2048, "train.micro_batch": 1})
    sizes = Sizes(square, square.replaced({"train.seq": 4096}), [(2048, 2048), (2048,)])
    assert sizes.weight((2048, 2048)) == (2048, 2048)
    assert sizes.rewritten(call("aten.add_.Tensor", dense(2048, 2048))).inputs[0].shape == (2048, 2048)
    assert sizes.rewritten(call("aten.add_.Tensor", dense(2048))).inputs[0].shape == (2048,)


def test_tensor_parallelism_divides_one_side_of_a_square_matmul() -> None:
    sizes = Sizes(setup(), setup(**{"parallel.tp": 4}))
    assert shapes(sizes.rewritten(mm(4608, 2048, 2048))) == [(4608, 2048), (2048, 512)]
    assert shapes(sizes.rewritten(mm(4608, 2048, 5632))) == [(4608, 2048), (2048, 1408)]
    assert shapes(sizes.rewritten(mm(4608, 5632, 2048))) == [(4608, 1408), (1408, 2048)]
    square = sizes.rewritten(weight_gradient(2048, 4608, 2048))
    assert prod(square.outputs[0].shape) == 2048 * 512


def test_tensor_parallelism_leaves_norms_whole_and_divides_heads() -> None:
    sizes = Sizes(setup(), setup(**{"parallel.tp": 4}))
    assert sizes.rewritten(call("aten.mul.Tensor", dense(3, 1536, 2048))).inputs[0].shape == (3, 1536, 2048)
    query = dense(3, 16, 1536, 128)
    assert sizes.rewritten(call("attention.forward", query, query, query)).inputs[0].shape == (3, 4, 1536, 128)


# ---------------------------------------------------------------------- tokens
def test_rows_of_one_expert_grow_with_the_tokens() -> None:
    experts = {"model.experts": 8, "model.top_k": 2, "model.expert_ffn": 1408}
    sizes = Sizes(setup(**experts), setup(**experts | {"train.micro_batch": 6}))
    assert shapes(sizes.rewritten(mm(1111, 2048, 1408))) == [(2222, 2048), (2048, 1408)], "routed by the data"
    grouped = call("aten._grouped_mm.default", dense(9216, 2048), dense(8, 2048, 1408))
    assert shapes(sizes.rewritten(grouped)) == [(18432, 2048), (8, 2048, 1408)], "all that are routed"


@given(st.integers(2, 999), st.sampled_from((2, 3, 4)))
def test_whatever_rows_the_data_sends_here_they_grow_with_the_tokens(rows: int, times: int) -> None:
    sizes = Sizes(setup(), setup(**{"train.micro_batch": 3 * times}))
    known = any(rows in pair for pair in sizes.pairs.values())
    new = sizes.rewritten(call("aten.add.Tensor", dense(rows, 2048))).inputs[0].shape
    assert known or new == (rows * times, 2048)


def test_targets_of_a_loss_are_one_fewer_than_the_tokens() -> None:
    sizes = Sizes(setup(), setup(**{"train.seq": 3072}))
    assert sizes.rewritten(call("aten._log_softmax.default", dense(3 * 1535, 32000))).inputs[0].shape == (
        3 * 3071, 32000,
    )  # fmt: skip


def test_a_batch_of_one_grows_and_a_dimension_that_is_broadcast_does_not() -> None:
    one = setup(**{"train.micro_batch": 1})
    sizes = Sizes(one, setup(**{"train.micro_batch": 4}))
    assert sizes.rewritten(call("aten.mul.Tensor", dense(1, 1536, 2048))).inputs[0].shape == (4, 1536, 2048)
    tables = call("aten.mul.Tensor", dense(1, 16, 1536, 128), dense(1, 1, 1536, 128))
    assert shapes(sizes.rewritten(tables)) == [(4, 16, 1536, 128), (1, 1, 1536, 128)], "cosines of positions"
    assert sizes.rewritten(call("aten.mul.Tensor", dense(1, 1536, 128))).inputs[0].shape == (1, 1536, 128)
    norms = call("aten.mul.Tensor", dense(3, 1536, 1))
    assert Sizes(setup(), setup(**{"train.seq": 3072})).rewritten(norms).inputs[0].shape == (3, 3072, 1)


def test_scores_of_an_attention_are_square() -> None:
    sizes = Sizes(setup(), setup(**{"train.seq": 3072}))
    scores = call("aten._softmax.default", dense(3, 16, 1536, 1536))
    assert sizes.rewritten(scores).inputs[0].shape == (3, 16, 3072, 3072)
    product = call("aten.bmm.default", dense(48, 1536, 128), dense(48, 128, 1536))
    assert shapes(sizes.rewritten(product)) == [(48, 3072, 128), (48, 128, 3072)]
    more = Sizes(setup(), setup(**{"train.micro_batch": 6}))
    assert shapes(more.rewritten(product)) == [(96, 1536, 128), (96, 128, 1536)]


# ---------------------------------------------------------------------- keys
def test_heads_of_keys_are_not_those_of_queries() -> None:
    grouped = setup(**{"model.kv_heads": 4})
    sizes = Sizes(grouped, grouped.replaced({"model.kv_heads": 2}))
    query, keys = dense(3, 16, 1536, 128), dense(3, 4, 1536, 128)
    found = shapes(sizes.rewritten(call("attention.forward", query, keys, keys)))
    assert found == [query.shape, (3, 2, 1536, 128), (3, 2, 1536, 128)]
    assert shapes(sizes.rewritten(mm(4608, 2048, 512)))[1] == (2048, 256)
    assert sizes.keys is sizes, "the trace tells them apart"


def test_where_keys_have_the_size_of_queries_both_readings_are_offered() -> None:
    sizes = Sizes(setup(), setup(**{"model.kv_heads": 4}))
    rotated = call("aten.mul.Tensor", dense(3, 16, 1536, 128))
    assert sizes.rewritten(rotated).inputs[0].shape == (3, 16, 1536, 128)
    assert sizes.keys.rewritten(rotated).inputs[0].shape == (3, 4, 1536, 128)
    query = dense(3, 16, 1536, 128)
    for either in (sizes, sizes.keys):
        found = shapes(either.rewritten(call("attention.forward", query, query, query)))
        assert found == [(3, 16, 1536, 128), (3, 4, 1536, 128), (3, 4, 1536, 128)], "fused, its operands are known"


# ---------------------------------------------------------------------- memory layout
def test_strides_keep_their_order_and_their_gaps() -> None:
    """Heads as a view of (batch, sequence, heads, size), and one of three parts of a joined projection."""
    longer = Sizes(setup(), setup(**{"train.seq": 3072}))
    view = Tensor((3, 16, 1536, 128), "bf16", (1536 * 2048, 128, 2048, 1))
    found = longer.rewritten(call("aten.mul.Tensor", view)).inputs[0]
    assert (found.shape, found.strides) == ((3, 16, 3072, 128), (3072 * 2048, 128, 2048, 1))
    part = Tensor((3, 1536, 2048), "bf16", (1536 * 6144, 6144, 1))
    found = longer.rewritten(call("aten.mul.Tensor", part)).inputs[0]
    assert (found.shape, found.strides) == ((3, 3072, 2048), (3072 * 6144, 6144, 1))


def test_what_is_broadcast_stays_broadcast() -> None:
    longer = Sizes(setup(), setup(**{"train.seq": 3072}))
    expanded = Tensor((3, 16, 1536, 128), "bf16", (0, 0, 128, 1))
    found = longer.rewritten(call("aten.mul.Tensor", expanded)).inputs[0]
    assert (found.shape, found.strides) == ((3, 16, 3072, 128), (0, 0, 128, 1))


@given(st.permutations(range(4)), st.integers(1, 3), SETUPS, SETUPS)
def test_any_order_of_dimensions_is_kept(order: list[int], gap: int, before: Setup, after: Setup) -> None:
    b, s, heads = before.train.micro_batch, before.train.seq, before.model.heads
    shape, strides, size = (b, heads, s, 128), [0] * 4, gap
    for place in order:
        strides[place] = size
        size *= shape[place]
    tensor = Tensor(shape, "bf16", tuple(strides))
    found = Sizes(before, after).rewritten(call("aten.mul.Tensor", tensor)).inputs[0]
    assert sorted(range(4), key=found.strides.__getitem__) == sorted(range(4), key=strides.__getitem__)
    assert min(found.strides) == gap


# ---------------------------------------------------------------------- weights
def test_the_shard_of_a_weight_follows_the_ranks_that_share_it() -> None:
    ranks = {"parallel.zero": 3, "parallel.dp": 8}
    sizes = Sizes(setup(**ranks), setup(**ranks | {"parallel.dp": 32}))
    assert sizes.changed
    update = call("aten._fused_adamw_.default", dense(704, 2048), dense(4000, 2048), phase="optimizer")
    assert shapes(sizes.rewritten(update)) == [(176, 2048), (1000, 2048)]
    wider = Sizes(setup(**ranks), setup(**ranks | {"model.ffn": 11264}))
    assert shapes(wider.rewritten(update)) == [(1408, 2048), (4000, 2048)]


def test_a_weight_that_is_not_shared_is_updated_whole() -> None:
    ranks = {"parallel.zero": 3, "parallel.dp": 8}
    update = call("aten._fused_adamw_.default", dense(5632, 2048), phase="optimizer")
    assert shapes(Sizes(setup(), setup(**ranks)).rewritten(update)) == [(704, 2048)]
    part = call("aten._fused_adamw_.default", dense(704, 2048), phase="optimizer")
    assert shapes(Sizes(setup(**ranks), setup()).rewritten(part)) == [(5632, 2048)]


def test_a_padded_vocabulary_is_that_of_the_framework() -> None:
    """Megatron divides the vocabulary over tensor-parallel ranks, a plan of attention and MLP alone does not."""
    for framework, columns in (("megatron", 16000), ("pytorch", 32000)):
        before = setup(**{"train.framework": framework})
        sizes = Sizes(before, before.replaced({"parallel.tp": 2}))
        assert shapes(sizes.rewritten(mm(4608, 2048, 32000)))[1] == (2048, columns), framework


def test_what_matches_nothing_keeps_its_size() -> None:
    sizes = Sizes(setup(), setup(**{"model.hidden": 4096, "model.heads": 32, "model.kv_heads": 32}))
    assert sizes.rewritten(call("aten.add.Tensor", dense(3, 1536, 777))).inputs[0].shape == (3, 1536, 777)
    assert sizes.weight((777, 2048)) == (777, 4096)
    assert sizes.rewritten(call("aten.add.Tensor", dense())).inputs[0].shape == ()


@pytest.mark.parametrize("key", ["model.layers", "train.recompute"])
def test_what_has_no_size_changes_no_shape(key: str) -> None:
    value: Any = 9 if key == "model.layers" else "full"
    assert not Sizes(setup(), setup(**{key: value})).changed
