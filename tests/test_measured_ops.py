"""Every kernel of a traced step belongs to the operator that launched it, with the shapes that it worked on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lumos.analysis.kernel_labels import label
from lumos.analysis.replay import replay
from lumos.program.op import Measured
from lumos.read.job import read_job
from lumos.read.op_columns import OpArguments, OpType, TracedOp, rank_ops
from lumos.trace.trace import Arguments
from lumos.traced.measured_ops import Launch, measured_ops, recorded
from support import Event, call, header, kernel, memset, note, op, write_trace

MAIN, ENGINE = 1, 2
Shape = list[int]


class Recording:
    """Operators one after the other on the thread that drives the step, or on that of the autograd engine."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now, self.correlation = 20.0, 0

    def scope(self, name: str, start: float, thread: int = MAIN, shapes: list[Any] | None = None, **more: Any) -> None:
        """An operator or annotation around what was launched since `start`."""
        args = {"Input Dims": shapes, "Input type": ["c10::BFloat16"] * len(shapes)} if shapes else {}
        if name.startswith(("Optimizer", "FSDP::", "ProfilerStep")):
            self.events.append(note(name, start, self.now - start, thread))
        else:
            self.events.append(op(name, start, self.now - start, thread, args | more))
        self.now += 1

    def launch(self, name: str, us: float = 10.0, thread: int = MAIN, stream: int = 7) -> None:
        self.correlation += 1
        where: tuple[Any, ...] = self.now + 50, us, self.correlation, stream
        self.events.append(call("cudaLaunchKernel", self.now, 2, self.correlation, thread))
        self.events.append(memset(*where) if name == "memset" else kernel(name, *where))
        self.now += 60 + us

    def run(self, name: str, kernels: list[str], *shapes: Shape, thread: int = MAIN, stream: int = 7) -> None:
        """An operator with what it launches."""
        start = self.now
        self.now += 1
        for each in kernels:
            self.launch(each, thread=thread, stream=stream)
        self.scope(name, start, thread, list(shapes))

    def backward(self, node: str, name: str, kernels: list[str], *shapes: Shape) -> None:
        """The same inside a node of the backward pass."""
        start = self.now
        self.now += 1
        self.run(name, kernels, *shapes, thread=ENGINE)
        self.scope(f"autograd::engine::evaluate_function: {node}", start, ENGINE)

    def measured(self, folder: Path) -> list[Launch]:
        """As the change of a run sees it."""
        self.events.append(note("ProfilerStep#1", 0, self.now + 10))
        path = write_trace(folder / "rank0.json", self.events, header(0, 1))
        run = replay(read_job(path))
        (labels,) = label(run)
        return measured_ops(run.execution.trace, labels, rank_ops(run.execution.trace, 0, "ProfilerStep#1"))


def names(ops: list[Launch]) -> list[str]:
    return [one.op.name for one in ops]


# ---------------------------------------------------------------------- who launched it
def test_a_kernel_belongs_to_the_innermost_operator_with_tensors_around_its_launch(tmp_path: Path) -> None:
    """linear calls mm, which launches through a helper that shows no tensors."""
    trace = Recording()
    trace.now += 2
    trace.run("cublas_helper", ["gemm"])
    trace.scope("aten::mm", 21.5, shapes=[[64, 32], [32, 16]])
    trace.scope("aten::linear", 20.5, shapes=[[4, 16, 32], [16, 32]])
    (only,) = trace.measured(tmp_path)
    assert only.op.name == "aten.mm.default"
    assert [tensor.shape for tensor in only.op.inputs] == [(64, 32), (32, 16)]
    assert only.op.outputs[0].shape == (64, 16)
    assert (only.measured.like, only.measured.us, only.op.phase) == ("matrix", pytest.approx(10), "forward")


def test_the_memset_and_the_kernel_of_one_matmul_are_one_operator(tmp_path: Path) -> None:
    trace = Recording()
    trace.run("aten::mm", ["memset", "gemm_splitk"], [64, 32], [32, 16])
    trace.run("aten::mm", ["gemm"], [64, 32], [32, 16])
    first, second = trace.measured(tmp_path)
    assert (first.measured.kernels, first.measured.us) == (2, pytest.approx(20))
    assert (second.measured.kernels, second.measured.us) == (1, pytest.approx(10))
    assert first.op._replace(measured=None) == second.op._replace(measured=None)


def test_an_operator_does_the_work_of_its_longest_kernel(tmp_path: Path) -> None:
    trace = Recording()
    start = trace.now
    trace.now += 1
    trace.launch("memset", us=2)
    trace.launch("gemm_splitk", us=30)
    trace.launch("reduce_splitk", us=4)
    trace.scope("aten::mm", start, shapes=[[64, 32], [32, 16]])
    (only,) = trace.measured(tmp_path)
    assert only.measured == Measured(pytest.approx(36), 3, like="matrix")


def test_what_no_operator_with_tensors_launched_keeps_its_name(tmp_path: Path) -> None:
    """A fused kernel of a compiler, one launch after the other: each is an operator without shapes."""
    trace = Recording()
    for name in ("triton_poi_fused_add_0", "triton_red_fused_norm_1", "triton_poi_fused_add_0"):
        trace.launch(name)
    found = trace.measured(tmp_path)
    assert names(found) == ["triton_poi_fused_add_0", "triton_red_fused_norm_1", "triton_poi_fused_add_0"]
    assert all(not one.op.inputs for one in found)


def test_the_phase_is_that_of_the_launch(tmp_path: Path) -> None:
    trace = Recording()
    trace.run("aten::mul", ["elementwise"], [64, 32], [64, 32])
    trace.backward("MulBackward0", "aten::mul", ["elementwise"], [64, 32], [64, 32])
    start = trace.now
    trace.run("aten::_fused_adamw_", ["adam"], [64, 32])
    trace.scope("Optimizer.step#AdamW.step", start - 0.5)
    assert [one.op.phase for one in trace.measured(tmp_path)] == ["forward", "backward", "optimizer"]


def test_a_node_of_the_backward_pass_and_the_optimizer_are_scopes_not_operators(tmp_path: Path) -> None:
    trace = Recording()
    start = trace.now
    trace.now += 1
    trace.launch("elementwise", thread=ENGINE)
    trace.scope("autograd::engine::evaluate_function: MulBackward0", start, ENGINE, [[64, 32]])
    (only,) = trace.measured(tmp_path)
    assert (only.op.name, only.op.phase) == ("elementwise", "backward")


def test_operators_are_launched_one_after_the_other(tmp_path: Path) -> None:
    trace = Recording()
    for _ in range(2):
        trace.run("aten::mul", ["elementwise"], [64, 32], [64, 32])
    first, second = trace.measured(tmp_path)
    assert second.at_us > first.at_us


# ---------------------------------------------------------------------- streams and sharding
def test_work_on_another_stream_runs_beside(tmp_path: Path) -> None:
    trace = Recording()
    for _ in range(3):
        trace.run("aten::mm", ["gemm"], [64, 32], [32, 16])
    trace.run("aten::copy_", ["elementwise"], [64, 32], [64, 32], stream=20)
    assert [one.op.stream for one in trace.measured(tmp_path)] == [0, 0, 0, 1]


def test_what_fsdp_does_to_its_weights_is_sharding(tmp_path: Path) -> None:
    trace = Recording()
    start = trace.now
    trace.run("aten::copy_", ["elementwise"], [4096], [4096])
    trace.scope("FSDP::pre_forward", start - 0.5)
    trace.run("fsdp::split_with_sizes_copy", ["split"], [8, 512], [64, 32], [64, 32])
    trace.run("aten::mm", ["gemm"], [64, 32], [32, 16])
    found = trace.measured(tmp_path)
    assert [one.op.role for one in found] == ["layout", "layout", ""]
    assert found[1].op.name == "fsdp.split_with_sizes_copy"


def test_copies_that_stand_for_the_peers_of_a_gather_are_one_for_every_peer(tmp_path: Path) -> None:
    """A fake process group answers an all-gather by copying the rank's own part into every place."""
    trace = Recording()
    start = trace.now
    for _ in range(3):
        trace.run("aten::copy_", ["elementwise"], [512], [512])
    trace.scope("c10d::_allgather_base_", start - 0.5, shapes=[[2048], [512]])
    start = trace.now
    trace.run("aten::copy_", ["elementwise"], [512], [512])
    trace.scope("c10d::allreduce_", start - 0.5, shapes=[[512]])
    found = trace.measured(tmp_path)
    assert [one.op.role for one in found] == ["peer", "peer", "peer", ""]


def test_a_collective_kernel_is_communication(tmp_path: Path) -> None:
    trace = Recording()
    trace.run("aten::mm", ["gemm"], [64, 32], [32, 16])
    trace.run("c10d::_allgather_base_", ["ncclDevKernel_AllGather_RING_LL"], [2048], [512])
    matmul, gather = trace.measured(tmp_path)
    assert (matmul.measured.like, gather.measured.like) == ("matrix", "comm")
    assert gather.op.role != "peer"


# ---------------------------------------------------------------------- attention
HEADS = [1, 4, 64, 16]
SCORES = [1, 4, 64, 64]


def test_attentions_are_marked_by_their_kernels(tmp_path: Path) -> None:
    trace = Recording()
    flash = "aten::_scaled_dot_product_flash_attention"
    trace.run(flash, ["flash_fwd_kernel"], HEADS, HEADS, HEADS)
    trace.run("aten::_softmax", ["cunn_SoftMaxForward"], SCORES)
    trace.backward("X0", f"{flash}_backward", ["flash_bwd_dot_do_o", "flash_bwd_kernel"], HEADS, HEADS, HEADS, HEADS)
    found = trace.measured(tmp_path)
    assert [one.attention for one in found] == [1, 0, 2], "a softmax of something else is none"
    assert names(found) == ["attention.forward", "aten._softmax.default", "attention.backward"]
    assert [tensor.shape for tensor in found[0].op.inputs] == [(1, 4, 64, 16)] * 3
    assert found[2].measured.kernels == 2


def test_attentions_are_marked_by_their_softmax_where_kernels_do_not_tell(tmp_path: Path) -> None:
    trace = Recording()
    trace.run("aten::bmm", ["gemm"], [4, 64, 16], [4, 16, 64])
    trace.run("aten::_softmax", ["cunn_SoftMaxForward"], SCORES)
    trace.run("aten::_softmax", ["cunn_SoftMaxForward"], [64, 8])
    trace.backward("SoftmaxBackward0", "aten::_softmax_backward_data", ["cunn_SoftMaxBackward"], SCORES, SCORES)
    found = trace.measured(tmp_path)
    assert [one.attention for one in found] == [0, 1, 0, 2], "a router's softmax has no heads"


def test_attentions_are_marked_by_their_operator_where_kernels_have_other_names(tmp_path: Path) -> None:
    trace = Recording()
    for name in ("unknown_kernel_a", "unknown_kernel_b"):
        trace.run("aten::_scaled_dot_product_cudnn_attention", [name], HEADS, HEADS, HEADS)
        trace.run("aten::_softmax", ["cunn_SoftMaxForward"], SCORES)
    assert [one.attention for one in trace.measured(tmp_path)] == [1, 0, 1, 0]


# ---------------------------------------------------------------------- as a dry run writes it
def traced(name: str, *shapes: Shape, dtype: str = "c10::BFloat16", strides: list[Shape] | None = None) -> TracedOp:
    texts = Arguments(*map(msgspec.json.encode, (shapes, [dtype] * len(shapes), strides, [])))
    return TracedOp(OpType.OTHER, name, 0, 1, 0, OpArguments(texts), -1)


def test_a_copy_reads_the_second_operand_and_writes_the_first() -> None:
    found = recorded(traced("aten::copy_", [8, 16], [16, 8]), "forward")
    assert (found.name, found.inputs[0].shape, found.outputs[0].shape) == ("aten._to_copy.default", (16, 8), (8, 16))


def test_outputs_follow_from_the_inputs() -> None:
    outputs = {
        "aten::mm": ([[64, 32], [32, 16]], (64, 16)),
        "aten::addmm": ([[16], [64, 32], [32, 16]], (64, 16)),
        "aten::bmm": ([[4, 64, 32], [4, 32, 16]], (4, 64, 16)),
        "aten::_grouped_mm": ([[64, 32], [8, 32, 16], [8]], (64, 16)),
        "aten::embedding": ([[1000, 32], [4, 64]], (4, 64, 32)),
        "aten::add": ([[4, 64, 32], [32]], (4, 64, 32)),
        "aten::mul": ([[4, 64, 1], [1, 1, 32]], (4, 64, 32)),
        "aten::mean": ([[4, 64, 32]], (4, 64, 1)),
        "aten::cat": ([[4, 32], [4, 16]], (4, 48)),
    }
    for name, (shapes, expected) in outputs.items():
        assert recorded(traced(name, *shapes), "forward").outputs[0].shape == expected, name


def test_the_gradient_of_grouped_weights_has_one_matrix_an_expert() -> None:
    found = recorded(traced("aten::_grouped_mm", [32, 64], [64, 16], [8]), "backward")
    assert found.outputs[0].shape == (8, 32, 16)


def test_a_library_s_attention_has_its_heads_behind_the_sequence() -> None:
    """flash-attn and the inner operator of PyTorch: (batch, sequence, heads, size)."""
    outer = traced("aten::_scaled_dot_product_flash_attention", [2, 4, 64, 16], [2, 2, 64, 16], [2, 2, 64, 16])
    for name in ("aten::_flash_attention_forward", "flash_attn::_flash_attn_forward"):
        inner = traced(name, [2, 64, 4, 16], [2, 64, 2, 16], [2, 64, 2, 16])
        found, same = recorded(inner, "forward"), recorded(outer, "forward")
        assert [t.shape for t in found.inputs] == [t.shape for t in same.inputs], name
        assert found.name == same.name == "attention.forward"


def test_the_gradient_of_attention_comes_before_its_operands() -> None:
    name = "aten::_scaled_dot_product_flash_attention_backward"
    heads, keys = [2, 4, 64, 16], [2, 2, 64, 16]
    found = recorded(traced(name, heads, heads, keys, keys, heads), "backward")
    assert [t.shape for t in found.inputs] == [(2, 4, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16)]


@pytest.mark.parametrize("causal", [True, False])
def test_whether_attention_is_causal_is_said_by_the_call_around_it(tmp_path: Path, causal: bool) -> None:
    trace = Recording()
    start = trace.now
    trace.run("aten::_scaled_dot_product_flash_attention", ["flash_fwd_kernel"], HEADS, HEADS, HEADS)
    values = ["", "", "", "", "0.0", str(causal), "", "False"]
    trace.scope("aten::scaled_dot_product_attention", start - 0.5, shapes=[HEADS] * 3, **{"Concrete Inputs": values})
    (only,) = trace.measured(tmp_path)
    assert only.op.options == (("causal",) if causal else ())


@pytest.mark.parametrize(
    "args",
    [
        {"Input Dims": "many"}, {"Input Dims": [[-1, 2], [3]]}, {"Input Dims": [[1 << 60]]}, {"Input Dims": [[], []]},
        {"Input Dims": [[64, 32], [31, 16]]}, {"Input Dims": [[64], [32]], "Input Strides": [[-4], "x"]},
        {"Input Dims": [[[64, 32]] * 5000], "Input type": 7},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "name", ["aten::mm", "aten::bmm", "aten::cat", "aten::embedding", "aten::_flash_attention_backward", "aten::copy_"]
)
def test_odd_arguments_do_not_stop_the_reading(tmp_path: Path, name: str, args: dict[str, Any]) -> None:
    trace = Recording()
    start = trace.now
    trace.now += 1
    trace.launch("kernel_of_it")
    trace.scope(name, start, **args)
    (only,) = trace.measured(tmp_path)
    assert only.measured.us == pytest.approx(10)


def test_a_prediction_needs_the_file_no_more_once_it_was_read(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", [op("aten::mm", 0, 9, 1, {"Input Dims": [[8, 4], [4, 2]]})])
    trace = read_job(path)
    path.unlink()
    assert rank_ops(trace, 0, "").ops[0].shapes == [(8, 4), (4, 2)]


def test_a_trace_that_was_read_without_operators_has_none(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", [op("aten::mm", 0, 9, 1, {"Input Dims": [[8, 4], [4, 2]]})])
    assert rank_ops(read_job(path, operators=False), 0, "").ops == ()
