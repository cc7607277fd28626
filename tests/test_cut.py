"""A traced step is cut at its attentions: layers, what is left of them, recomputation, and no time is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumos.analysis.kernel_labels import RankLabels
from lumos.errors import OptionError
from lumos.program.op import Measured, Op, Tensor
from lumos.setup.setup import Setup
from lumos.traced.cut import CutBlock, CutRank, cut, mean_block, seen
from lumos.traced.measured_ops import Launch

T, H, F, V = 384, 64, 256, 1000  # tokens, hidden, ffn, vocabulary
LAUNCH_US = 10.0
END_US = {"embedding": 5.0, "head": 100.0, "head grad": 200.0, "embedding grad": 10.0}


def call(name: str, *shapes: tuple[int, ...], phase: str = "forward") -> Op:
    return Op(name, tuple(Tensor(shape, "bf16") for shape in shapes), (), phase)


def op(
    name: str, us: float, *shapes: tuple[int, ...], like: str = "matrix", phase: str = "forward", attention: int = 0,
    **more: Any,
) -> Launch:  # fmt: skip
    """One operator; when it was launched is filled in by `step`."""
    return Launch(call(name, *shapes, phase=phase)._replace(measured=Measured(us, like=like), **more), attention, 0.0)


def mm(us: float, rows: int, inner: int, columns: int, phase: str = "forward") -> Launch:
    return op("aten.mm.default", us, (rows, inner), (inner, columns), phase=phase)


def attention(us: float, backward: bool = False) -> Launch:
    name, phase = ("attention.backward", "backward") if backward else ("attention.forward", "forward")
    heads = (1, 4, T, 16)
    return op(name, us, heads, heads, heads, like="attention", phase=phase, attention=2 if backward else 1)


def layer(dense: bool = False, slower: float = 1.0) -> list[Launch]:
    """Forward: 20 + 2 + 30 + 7 us; a dense one has a wider MLP, of 60 us."""
    up = mm(60.0 * slower, T, 2 * F, H) if dense else mm(30.0 * slower, T, F, H)
    reduce = op("nccl:all_reduce", 7.0 * slower, like="comm")
    return [mm(20.0 * slower, T, H, 3 * H), attention(2.0 * slower), up, reduce]


def layer_backward(recomputes: bool = False, dense: bool = False, slower: float = 1.0) -> list[Launch]:
    """Backward: twice as long, in the other order; recomputation stops before the last matmul."""
    again = [one._replace(op=one.op._replace(phase="backward")) for one in layer(dense)[:2]] if recomputes else []
    wide = 2 * F if dense else F
    up = mm((120.0 if dense else 60.0) * slower, wide, T, H, "backward")
    return [*again, up, attention(4.0 * slower, backward=True), mm(40.0 * slower, H, T, 3 * H, "backward")]


def ends(phase: str) -> tuple[Launch, Launch]:
    """What runs before the layers of a pass, and after them."""
    if phase == "forward":
        first = op("aten.embedding.default", END_US["embedding"], (V, H), (1, T), like="stream")
        return first, mm(END_US["head"], T, H, V)
    last = op(
        "aten.embedding_dense_backward.default", END_US["embedding grad"], (T, H), (1, T), like="stream",
        phase="backward",
    )  # fmt: skip
    return mm(END_US["head grad"], T, V, H, "backward"), last


def step(layers: int, microbatches: int = 1, dense: int = 0, recomputes: bool = False) -> list[Launch]:
    """Embedding, layers, head and back again for every micro-batch, and the update; launches are 10 us apart."""
    found: list[Launch] = []
    for _ in range(microbatches):
        first, last = ends("forward")
        found += [first, *(one for i in range(layers) for one in layer(i < dense)), last]
        first, last = ends("backward")
        back = [one for i in reversed(range(layers)) for one in layer_backward(recomputes, i < dense)]
        found += [first, *back, last]
    found.append(op("aten._fused_adamw_.default", 300.0, (V, H), like="stream", phase="optimizer"))
    return launched(found)


def launched(ops: list[Launch]) -> list[Launch]:
    """One after the other, 10 us apart."""
    return [one._replace(at_us=LAUNCH_US * place) for place, one in enumerate(ops)]


def instead(ops: list[Launch], shape: tuple[int, ...], *others: Launch) -> list[Launch]:
    """With others in the place of forward operators whose first operand has this shape."""
    found: list[Launch] = []
    for one in ops:
        is_meant = one.op.phase == "forward" and one.op.inputs and one.op.inputs[0].shape == shape
        found += others if is_meant else [one]
    return launched(found)


def labels(ops: list[Launch]) -> RankLabels:
    """Of the whole rank; what is cut are the operators."""
    nothing = np.zeros(len(ops), np.int8)
    times, us = np.array([one.at_us for one in ops]), np.array([one.measured.us for one in ops])
    return RankLabels(3, np.arange(len(ops)), times, us, nothing, nothing, nothing, optimizer_us=77.0)


def setup(layers: int, microbatches: int = 1, dense: int = 0, **changes: Any) -> Setup:
    model: dict[str, Any] = {"layers": layers, "hidden": H, "ffn": F, "heads": 4, "vocab": V}
    if dense:
        model |= {"experts": 4, "top_k": 2, "expert_ffn": F, "ffn": 2 * F, "dense_layers": dense}
    train = {"seq": T, "micro_batch": 1, "microbatches": microbatches}
    given = {"model": model, "train": train, "parallel": {}, "cluster": {"gpu": "h200"}}
    return Setup.model_validate(given).replaced(changes)


def cut_step(layers: int, microbatches: int = 1, dense: int = 0, recomputes: bool = False) -> CutRank:
    ops = step(layers, microbatches, dense, recomputes)
    changes = {"train.recompute": "full"} if recomputes else {}
    return cut(labels(ops), ops, setup(layers, microbatches, dense, **changes), layers)


def times(block: CutBlock) -> list[float]:
    return [block.us(like) for like in ("matrix", "attention", "stream", "comm")]


def total_us(rank: CutRank, layers: int, microbatches: int, dense: int = 0, recomputes: bool = False) -> float:
    """All blocks as often as they run in a step."""
    often = {"forward": layers - dense, "backward": layers - dense, "forward dense": dense, "backward dense": dense}
    if recomputes:
        often |= {"recompute": layers - dense, "recompute dense": dense}
    found = rank.blocks["optimizer"].us()
    for name in (*often, *END_US):
        found += microbatches * often.get(name, 1) * rank.blocks.get(name, CutBlock()).us()
    return found


# ---------------------------------------------------------------------- layers and ends
@given(st.integers(2, 9), st.integers(1, 4))
def test_what_lies_between_two_attentions_is_a_layer(layers: int, microbatches: int) -> None:
    rank = cut_step(layers, microbatches)
    assert rank.rank == 3
    assert times(rank.blocks["forward"]) == pytest.approx([50, 2, 0, 7])
    assert times(rank.blocks["backward"]) == pytest.approx([100, 4, 0, 0])
    assert all(one.calls == pytest.approx(1) for one in rank.blocks["forward"].ops), "of one layer"
    assert rank.blocks["forward"].host_us == pytest.approx(4 * LAUNCH_US)
    assert rank.blocks["backward"].host_us == pytest.approx(3 * LAUNCH_US)


@given(st.integers(2, 9), st.integers(1, 4))
def test_what_the_layers_leave_is_embedding_and_head(layers: int, microbatches: int) -> None:
    rank = cut_step(layers, microbatches)
    for name, us in END_US.items():
        (only,) = rank.blocks[name].ops
        assert (seen(only).us, only.calls) == pytest.approx((us, 1)), name
    assert rank.blocks["embedding"].ops[0].name == "aten.embedding.default"
    assert rank.blocks["head"].ops[0].inputs[1].shape == (H, V)


def names(block: CutBlock) -> list[str]:
    return [one.name.removeprefix("aten.").removesuffix(".default") for one in block.ops]


@given(st.integers(3, 8), st.integers(1, 3), st.integers(0, 1))
def test_operators_of_a_block_are_in_the_order_in_which_they_run(layers: int, microbatches: int, dense: int) -> None:
    """What runs before the attention of a layer is before it in the block, although a layer is cut at its attention."""
    parts = cut_step(layers, microbatches, dense).blocks
    assert names(parts["forward"]) == ["mm", "attention.forward", "mm", "nccl:all_reduce"]
    assert parts["forward"].ops[0].inputs[0].shape == (T, H)
    assert names(parts["recompute"]) == ["mm", "attention.forward", "nccl:all_reduce"]
    assert names(parts["backward"]) == ["mm", "attention.backward", "mm"]
    assert parts["backward"].ops[0].inputs[0].shape == (F, T)


def test_equal_calls_are_at_their_own_places() -> None:
    norm = op("aten.mul.Tensor", 3.0, (T, H), like="stream")
    ops = instead(step(4), (1, 4, T, 16), norm, attention(2.0), norm)
    block = cut(labels(ops), ops, setup(4), 4).blocks["forward"]
    assert names(block) == ["mm", "mul.Tensor", "attention.forward", "mul.Tensor", "mm", "nccl:all_reduce"]
    assert all((seen(one).us, one.calls) == (3, 1) for one in block.ops if seen(one).like == "stream")


def test_the_optimizer_is_once_a_step() -> None:
    rank = cut_step(4, microbatches=3)
    assert times(rank.blocks["optimizer"]) == [0, 0, 300, 0]
    assert rank.blocks["optimizer"].host_us == 77


@given(st.integers(3, 8), st.integers(1, 3), st.data())
def test_dense_layers_come_first_and_are_a_block_of_their_own(layers: int, microbatches: int, data: Any) -> None:
    dense = data.draw(st.integers(1, layers - 2))
    rank = cut_step(layers, microbatches, dense)
    assert rank.blocks["forward"].us("matrix") == pytest.approx(50)
    assert rank.blocks["forward dense"].us("matrix") == pytest.approx(80)
    assert rank.blocks["backward"].us("matrix") == pytest.approx(100)
    assert rank.blocks["backward dense"].us("matrix") == pytest.approx(160)
    for name, us in END_US.items():
        assert rank.blocks[name].us() == pytest.approx(us), name


def test_one_layer_is_the_whole_pass() -> None:
    rank = cut_step(1, microbatches=2)
    assert times(rank.blocks["forward"]) == pytest.approx([150, 2, 5, 7])
    assert not rank.blocks.keys() & END_US.keys()


def test_chunks_of_a_stage_are_cut_one_by_one() -> None:
    """Two chunks of two layers run as two passes of two layers each."""
    ops = step(2, microbatches=4)
    chunked = setup(8, 2, **{"parallel.pp": 2, "parallel.vpp": 2})
    rank = cut(labels(ops), ops, chunked, 2)
    assert times(rank.blocks["forward"]) == pytest.approx([50, 2, 0, 7])
    assert rank.blocks["head"].us() == pytest.approx(2 * END_US["head"]), "of a micro-batch"


def test_attentions_that_do_not_match_the_setup_are_refused_with_the_counts() -> None:
    ops = step(4)
    with pytest.raises(OptionError, match="4 attention kernels in the forward pass, and the setup says 5 layers × 1"):
        cut(labels(ops), ops, setup(5), 5)


# ---------------------------------------------------------------------- time
@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_no_gpu_time_is_lost_or_made_up(layers: int, microbatches: int, dense: int, recomputes: bool) -> None:
    """Blocks, as often as they run, take what the kernels of the step took."""
    dense = min(dense, max(0, layers - 2))
    rank = cut_step(layers, microbatches, dense, recomputes)
    recorded = sum(one.measured.us for one in step(layers, microbatches, dense, recomputes))
    assert total_us(rank, layers, microbatches, dense, recomputes) == pytest.approx(recorded)


@given(st.lists(st.floats(0.8, 1.25), min_size=4, max_size=8))
def test_a_slow_layer_is_in_the_mean_of_layers(slower: list[float]) -> None:
    """Layers differ by noise: blocks still take the time of the step, within that of half a layer."""
    first, last = ends("forward")
    ops = [first, *(one for s in slower for one in layer(slower=s)), last]
    first, last = ends("backward")
    ops += [first, *(one for s in reversed(slower) for one in layer_backward(slower=s)), last]
    ops = launched(ops)
    rank = cut(labels(ops), ops, setup(len(slower)), len(slower))
    recorded = sum(one.measured.us for one in ops)
    assert total_us(rank, len(slower), 1) == pytest.approx(recorded, abs=0.5 * (59 + 104))


def test_the_host_outside_layers_is_that_of_the_quickest_micro_batch() -> None:
    """A micro-batch was held up by 5 ms after the first attention of its forward pass."""
    ops = [one._replace(at_us=one.at_us + 40 + (5000 if one.at_us >= 400 else 0)) for one in step(4, 3)]
    rank = cut(labels(ops), ops, setup(4, 3), 4)
    assert rank.blocks["forward"].host_us == pytest.approx(4 * LAUNCH_US), "the median of layers"
    outside = rank.blocks["embedding"].host_us + rank.blocks["head"].host_us
    assert 0 <= outside < 500


def test_work_beside_the_stream_that_computes_does_not_add_to_its_time() -> None:
    beside = called(call("all_gather"), "comm", 1.0, 500.0)._replace(stream=1)
    assert CutBlock((beside, called(call("mm"), "matrix", 1.0, 20.0))).us() == 20


# ---------------------------------------------------------------------- recomputation
@given(st.integers(2, 6), st.integers(1, 3))
def test_recomputation_is_taken_out_of_the_backward_pass_that_it_ran_in(layers: int, microbatches: int) -> None:
    rank = cut_step(layers, microbatches, recomputes=True)
    assert times(rank.blocks["backward"]) == pytest.approx([100, 4, 0, 0])
    assert times(rank.blocks["recompute"]) == pytest.approx([20, 2, 0, 0]), "the last matmul did not run again"
    assert times(rank.blocks["forward"]) == pytest.approx([50, 2, 0, 7])


def test_where_nothing_was_recomputed_all_but_the_last_matmul_would_be() -> None:
    """Checkpointing stops once it has what derivatives need: nobody needs the result of the widest matmul."""
    again = cut_step(4).blocks["recompute"]
    assert times(again) == pytest.approx([20, 2, 0, 7])


def test_of_equal_matmuls_the_last_one_alone_is_not_recomputed() -> None:
    out = mm(30.0, T, F, H)
    ops = instead(step(4), (T, F), out, out)
    rank = cut(labels(ops), ops, setup(4), 4)
    assert rank.blocks["forward"].us("matrix") == pytest.approx(80)
    assert rank.blocks["recompute"].us("matrix") == pytest.approx(50)


def test_the_last_matmul_with_a_bias_is_told_by_the_rows_that_it_reads() -> None:
    """addmm(bias, rows, weight): into the MLP 64 → 256, and out of it 256 → 64."""
    into = op("aten.addmm.default", 31.0, (F,), (T, H), (H, F))
    out = op("aten.addmm.default", 30.0, (H,), (T, F), (F, H))
    ops = instead(step(4), (T, F), into, out)
    again = cut(labels(ops), ops, setup(4), 4).blocks["recompute"]
    assert again.us("matrix") == pytest.approx(20 + 31)


def test_weights_that_fsdp_gathers_are_not_recomputed() -> None:
    gathered = op("fsdp.split_with_sizes_copy", 9.0, (1000,), like="stream", role="layout")
    ops = instead(step(4), (1, 4, T, 16), attention(2.0), gathered)
    rank = cut(labels(ops), ops, setup(4), 4)
    assert rank.blocks["forward"].us("stream") == pytest.approx(9)
    assert rank.blocks["recompute"].us("stream") == 0


# ---------------------------------------------------------------------- blocks
def called(op: Op, like: str, calls: float, us: float, kernels: float = 1.0) -> Op:
    """So many calls, each of which takes so long."""
    return op._replace(calls=calls, measured=Measured(us, kernels, like=like))


def test_what_another_block_runs_is_taken_away_call_by_call() -> None:
    matmul, add = call("mm", (T, H)), call("add", (T, H))
    whole = CutBlock((called(matmul, "matrix", 5.0, 10.0, 2.0), called(add, "stream", 2.0, 2.0)), 90.0)
    part = CutBlock((called(matmul, "matrix", 2.0, 9.0, 2.0),), 30.0)
    (left, same) = whole.less(part, 2).ops
    assert (left.calls, seen(left).us, seen(left).kernels) == pytest.approx((1, 14, 2))
    assert seen(same).us == 2
    assert whole.less(part, 2).host_us == 30
    assert whole.less(part, 10).host_us == 0
    assert [one.name for one in whole.less(part, 10).ops] == ["add"]


@given(st.lists(st.floats(1, 100), min_size=1, max_size=5))
def test_a_mean_block_is_the_mean_over_ranks(us: list[float]) -> None:
    blocks = [CutBlock((called(call("mm", (T, H)), "matrix", 1.0, one),), 2 * one) for one in us]
    mean = mean_block(blocks)
    assert mean.us("matrix") == pytest.approx(sum(us) / len(us))
    assert mean.host_us == pytest.approx(2 * sum(us) / len(us))
    assert mean.ops[0].calls == pytest.approx(1)


def test_a_phase_of_an_operator_does_not_make_it_another_one() -> None:
    forward, again = (called(call("mm", (T, H), phase=p), "matrix", 1.0, 7.0) for p in ("forward", "backward"))
    assert CutBlock((again,)).less(CutBlock((forward,))).ops == ()
