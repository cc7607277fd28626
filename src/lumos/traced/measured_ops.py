"""The operators of a traced step that launched kernels, as Ops with shapes and measured times.

A kernel belongs to the innermost operator around its launch that has tensors. Operators are written as a dry run writes
them (`Op`), so that the same prices hold for both. A trace does not tell what an operator returned: where its
price needs that, it follows from the inputs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lumos.analysis.kernel_labels import KernelClass, KernelPhase, RankLabels
from lumos.costs.kernel_work import REDUCTIONS
from lumos.program.op import Measured, Op, Tensor
from lumos.read.op_columns import OpType, RankOps, TracedOp
from lumos.trace.trace import Trace

_PHASES = {KernelPhase.FORWARD: "forward", KernelPhase.BACKWARD: "backward", KernelPhase.OPTIMIZER: "optimizer"}
_ATTENTIONS = (
    ("forward", 1, (("attention.forward", 4), ("aten._softmax.default", 4))),
    ("backward", 2, (("attention.backward", 4), ("aten._softmax_backward_data.default", 4))),
)
_MATMULS = ("aten.mm.default", "aten.addmm.default")
_SHARDING = ("split_with_sizes_copy", "chunk_cat", "all_gather_copy_in")


class Launch(NamedTuple):
    """A call that launched kernels; it has no tensors if the trace shows none."""

    op: Op
    attention: int  # 0: none, 1: a forward one, 2: the main kernel of its backward pass
    at_us: float  # on the clock of the labels

    @property
    def measured(self) -> Measured:
        assert self.op.measured is not None
        return self.op.measured


def measured_ops(trace: Trace, labels: RankLabels, ops: RankOps) -> list[Launch]:
    """The operators of one rank's step that launched kernels, in the order of their first launches."""
    owners = owners_of(trace, labels, ops)
    causal = is_causal(ops)
    streams = trace.lane[labels.row]
    computing = np.where(labels.work == KernelClass.COMM, 0.0, labels.us)  # collectives may run longer than all else
    main = int(np.bincount(streams, computing).argmax()) if len(streams) else -1
    found: list[Launch] = []
    last: TracedOp | None = None
    for i, owner in enumerate(owners):
        kernel = Measured(float(labels.us[i]), 1.0, like=KernelClass(int(labels.work[i])).name.lower())
        mark = int(labels.attention[i])
        if owner is not None and owner is last:
            found[-1] = _joined(found[-1], kernel, mark)
            continue
        phase = _PHASES[KernelPhase(int(labels.phase[i]))]
        name = trace.names[trace.name[labels.row[i]]]
        op = recorded(owner, phase, causal) if owner is not None else Op(name, (), (), phase)
        op = op._replace(stream=int(streams[i] != main), role=_role(op, owner, kernel), measured=kernel)
        found.append(Launch(op, mark, float(labels.launched[i])))
        last = owner
    return _marked(found)


def _joined(launch: Launch, kernel: Measured, mark: int) -> Launch:
    """With one more kernel of the same operator; the longer one says what it does."""
    before = launch.measured
    like = kernel.like if kernel.us > before.us else before.like
    both = Measured(before.us + kernel.us, before.kernels + 1, like=like)
    return launch._replace(op=launch.op._replace(measured=both), attention=max(launch.attention, mark))


def _role(op: Op, owner: TracedOp | None, kernel: Measured) -> str:
    """peer: once for every other rank that a stand-in for a collective answers for; layout: FSDP moves weights."""
    scopes = owner.scopes if owner is not None else frozenset[OpType]()
    if OpType.COMM in scopes and kernel.like != "comm" and "gather" in _outer_collective(owner):
        return "peer"
    return "layout" if OpType.FSDP in scopes or op.name.startswith("fsdp.") else ""


def owners_of(trace: Trace, labels: RankLabels, ops: RankOps, any_op: bool = False) -> list[TracedOp | None]:
    """For every kernel of the labels, the innermost operator with tensors around its launch.

    With `any_op`, where there is none, the innermost operator: lists of very many tensors are recorded without shapes.
    """
    calls = trace.launch_row[labels.row]
    around = _Around(ops)
    moments = list(zip(trace.lane[calls].tolist(), trace.start[calls].tolist(), strict=True))
    return [around.of(*moment) or (around.of(*moment, any_op) if any_op else None) for moment in moments]


def _marked(ops: list[Launch]) -> list[Launch]:
    """With attentions marked by their operators where the names of kernels do not show them: fused ones, else softmax
    over scores of (batch, heads, queries, keys).
    """
    for phase, mark, names in _ATTENTIONS:
        mine = [i for i, op in enumerate(ops) if op.op.phase == phase]
        if any(ops[i].attention == mark for i in mine):
            continue
        for name, dims in names:
            places = [i for i in mine if ops[i].op.name == name and len((*ops[i].op.inputs, _NONE)[0].shape) >= dims]
            for i in places:
                ops[i] = ops[i]._replace(attention=mark)
            if places:
                break
    return ops


_NONE = Tensor((), "bf16")


class _Around:
    """Finds the innermost operator with tensors around a moment of a thread."""

    def __init__(self, ops: RankOps) -> None:
        self.threads: dict[int, list[TracedOp]] = {}
        for op in ops.ops:
            self.threads.setdefault(op.lane, []).append(op)
        self.starts = {thread: [op.start for op in some] for thread, some in self.threads.items()}

    def of(self, thread: int, moment: int, any_op: bool = False) -> TracedOp | None:
        place = bisect_right(self.starts.get(thread, []), moment) - 1
        op = self.threads[thread][place] if place >= 0 else None
        while op is not None and (op.end < moment or op.type in _SCOPES or not (op.tensors or any_op) or op.is_note):
            op = op.parent
        return op


_SCOPES = (OpType.BACKWARD, OpType.OPTIMIZER, OpType.FSDP, OpType.DDP, OpType.STEP)


def _outer_collective(op: TracedOp | None) -> str:
    """The name of the collective that an operator runs inside."""
    while op is not None and op.type != OpType.COMM:
        op = op.parent
    return op.name if op is not None else ""


def is_causal(ops: RankOps) -> bool:
    """Whether the attentions of the forward pass leave out what comes later."""
    for op in ops.forward(OpType.ATTENTION):
        outer: TracedOp | None = op
        while outer is not None:
            values = outer.args.values
            if outer.name == "aten::scaled_dot_product_attention" and len(values) > 5:
                return bool(values[5] == "True")
            outer = outer.parent
    return True


def recorded(traced: TracedOp, phase: str, causal: bool = True) -> Op:
    """The same call, as a dry run would have written it."""
    name, tensors = traced.name.rpartition("::")[2], traced.tensors
    fused = "attention" in name and not name.endswith(("_math", "scaled_dot_product_attention"))
    if fused or "flash_attn" in traced.name:
        return _attention(traced.name, tensors, phase, causal)
    if any(part in name for part in _SHARDING):
        return Op(f"fsdp.{name}", tensors, (), phase, allocates=True)
    if name.startswith(("_foreach", "_fused_ad", "_fused_sgd")):
        return Op(f"aten.{name}.default", tensors, (), phase, allocates=True)
    if name == "copy_" and len(tensors) > 1:
        return Op("aten._to_copy.default", (tensors[1],), (tensors[0],), phase, allocates=True)
    space = "aten" if traced.name.startswith("aten::") else traced.name.rpartition("::")[0] or "python"
    op = Op(f"{space}.{name}.default", tensors, _outputs(name, tensors), phase, allocates=True)
    return op._replace(weight_gradient=is_weight_gradient(op))


def is_weight_gradient(op: Op) -> bool:
    """Whether a matmul returns the gradient of a weight: it sums over tokens, so its first operand is transposed.

    A grouped one sums over the tokens of every expert, so its second operand is a matrix as well.
    """
    if op.phase != "backward" or len(op.inputs) < 2:
        return False
    a, b = op.inputs[-2:] if op.name in _MATMULS else op.inputs[:2]
    if op.name == "aten._grouped_mm.default":
        return len(a.shape) == len(b.shape) == 2
    return op.name in _MATMULS and len(a.strides) == len(b.shape) == 2 and a.strides[0] == 1 < a.strides[1]


def _attention(name: str, tensors: tuple[Tensor, ...], phase: str, causal: bool) -> Op:
    """Query, key and value as (batch, heads, sequence, size), whichever library was called."""
    backward = "backward" in name or "bwd" in name
    four = [tensor for tensor in tensors if len(tensor.shape) == 4]
    inputs = four[1:4] if backward and len(four) >= 4 else four[:3]
    direct = name.startswith("aten::") and "scaled_dot_product" not in name and "cudnn" not in name
    if direct or not name.startswith("aten::"):  # (batch, sequence, heads, size)
        inputs = [_swapped(tensor) for tensor in inputs]
    if len(inputs) < 3:
        return Op(f"aten.{name.rpartition('::')[2]}.default", tensors, _outputs(name, tensors), phase)
    options = ("causal",) if causal else ()
    kind = "attention.backward" if backward else "attention.forward"
    return Op(kind, tuple(inputs), (inputs[0],), phase, allocates=True, options=options)


def _swapped(tensor: Tensor) -> Tensor:
    a, b, c, d = range(4)
    order = (a, c, b, d)
    return tensor._replace(shape=tuple(tensor.shape[i] for i in order), strides=tuple(tensor.strides[i] for i in order))


def _outputs(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What an operator returns, as far as its price needs it."""
    if not tensors:
        return ()
    base = name.rstrip("_")
    first = tensors[0]
    if base in ("mm", "addmm", "bmm", "baddbmm") and len(tensors) >= 2:
        a, b = tensors[-2:]
        return (_dense((*a.shape[:-1], b.shape[-1]), a),)
    if base == "_grouped_mm" and len(tensors) >= 2:
        a, b = tensors[:2]
        experts = tensors[2].shape[:1] if len(b.shape) == 2 and len(tensors) > 2 else ()
        return (_dense((*experts, a.shape[0], b.shape[-1]), a),)
    if base in ("embedding", "index_select") and len(tensors) >= 2:
        return (_dense((*tensors[1].shape, *first.shape[1:]), first),)
    if base in REDUCTIONS:
        return (_dense((*first.shape[:-1], 1), first),)
    if base == "cat":
        dims = list(first.shape)
        dims[-1] = sum(t.shape[-1] for t in tensors if len(t.shape) == len(dims))
        return (_dense(tuple(dims), first),)
    wide = max(tensors, key=lambda t: (len(t.shape), t.elements))
    try:
        shape = tuple(int(n) for n in np.broadcast_shapes(*(t.shape for t in tensors)))
    except ValueError:
        shape = wide.shape
    same = shape == wide.shape
    return (wide if same and wide.is_dense else _dense(shape, wide),)


def _dense(shape: tuple[int, ...], like: Tensor) -> Tensor:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return Tensor(shape, like.dtype, tuple(reversed(strides)), like.element)
