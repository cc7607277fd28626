"""Tape: the tensors of one traced micro-batch: which call makes each, how long it lives, and which block it belongs to.

A trace names no tensors. What it has is enough to follow them:

- Every call has the shapes, dtypes and strides of its inputs; what it returns follows from them by rule.
- An input is the most recent tensor of that many elements of that size, and k equal inputs are the k most recent.
  Views, reshapes and transposes keep both numbers; of several tensors, those that were last viewed in the shape of the
  input come first (a query that was split into heads is not what the next matmul reads), then those that nobody has
  read yet, then those that are saved anyway. Where this still picks the wrong one of two tensors of one size, bytes
  are mostly right: as many tensors are kept, one in place of the other. Weights are known by the shapes of the
  gradients that autograd accumulates, and are never taken for activations.
- A node of the backward pass repeats the sequence number of the call that made it, and the calls inside the node read
  what was saved for it. So a call has saved an input or an output if its node reads a tensor of that size beside the
  gradient that comes in. What needs no gradient is never read there, and so is not kept.
- Calls inside a node with a sequence number of their own are a recomputed forward pass: they are left out, and the tape
  is that of the same run without recomputation.

A tensor lives from its call to its last reader, or to the end of the last node that it is saved for.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from lumos.dtypes import dtype_of_code
from lumos.program.op import Tensor
from lumos.read.op_columns import OpType, RankOps, TracedOp

Shape = tuple[int, ...]
Key = tuple[int, int]  # elements that differ in memory, and bytes of one

_VIEWS = frozenset((
    "view", "reshape", "_unsafe_view", "as_strided", "t", "transpose", "permute", "expand", "expand_as", "slice",
    "select", "detach", "alias", "unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "unbind", "narrow",
    "view_as", "flatten", "unflatten", "numpy_T", "lift_fresh", "movedim", "swapaxes", "diagonal", "_reshape_alias",
    "result_type", "is_nonzero", "item", "_local_scalar_dense", "resize_", "set_", "record_stream", "unfold",
))  # fmt: skip
_SHAPES = frozenset(("view", "_unsafe_view", "as_strided"))  # views that tell the new shape
_COMPOSITES = frozenset((
    "linear", "matmul", "reshape", "flatten", "rms_norm", "layer_norm", "group_norm", "cross_entropy_loss", "nll_loss",
    "nll_loss_nd", "mse_loss_nd", "log_softmax", "softmax", "_safe_softmax", "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math", "to", "contiguous", "type_as", "float", "einsum", "repeat_interleave", "pad",
    "dropout", "feature_dropout", "conv1d", "conv2d", "conv3d", "convolution", "_convolution", "where", "ones", "zeros",
    "ones_like", "zeros_like", "new_zeros", "new_ones", "full", "full_like", "embedding_backward",
))  # fmt: skip
_FREE = frozenset(("to", "contiguous", "dropout", "type_as", "float"))  # return their input where nothing runs
_KEEPS_OUTPUT = frozenset((
    "_softmax", "_log_softmax", "_safe_softmax", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "reciprocal", "relu",
    "logsumexp", "cumprod", "norm", "linalg_vector_norm",
))  # fmt: skip
_KEEPS_BOTH = re.compile(r"attention|flash_attn|_norm$|dropout|topk|sort$|^max$|^min$|_batch_norm|max_pool")
_REDUCTIONS = frozenset((
    "sum", "mean", "amax", "amin", "max", "min", "all", "any", "prod", "logsumexp", "linalg_vector_norm", "norm", "var",
    "std", "argmax", "argmin",
))  # fmt: skip
_COMPARISONS = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf", "isneginf",
    "bitwise_and", "bitwise_or", "bitwise_not", "isin",
))  # fmt: skip
_OF_ACTIVATIONS = frozenset(("add", "mul", "sub", "div", "clone", "_to_copy", "cat"))  # hardly gradients of weights
_INDEXED = frozenset(("embedding", "index_select"))
_NORMS = {"native_layer_norm": 2, "_fused_rms_norm": 1, "native_group_norm": 2}
_ATTENTION = re.compile(r"attention(_forward|_backward)?$|^(?>.*?flash_attn).*(fwd|bwd|forward|backward)")
_NODE = re.compile(r"autograd::engine::evaluate_function: ")
_CHECKPOINT = "CheckpointFunction"  # of torch.utils.checkpoint with use_reentrant=True
_FEWEST_BYTES = 4096  # what is smaller is not followed
_FARTHEST = 64  # tensors of one size that are looked at, from the latest on


@dataclass(eq=False)
class TensorLife:
    """One tensor: where it is made and how long it is needed; times are places on the tape."""

    call: int  # that makes it
    place: int  # among what the call returns
    info: Tensor
    born: int
    dies: int
    segment: int  # block that makes it
    outer: Key = (0, 0)  # of the whole tensor, where this is one rank's part of a DTensor
    form: Shape = ()  # the shape it was last viewed in
    read: int = 0  # how often
    saved: bool = False  # for the backward pass
    crosses: bool = False  # read by the next block
    taken: int = -1  # when it becomes the gradient of a parameter
    whole: TensorLife | None = None  # the tensor that this one is a view of a part of
    node: int = -1  # of the backward pass, that makes it
    maker: TracedOp | None = None  # the operator that the user called

    @property
    def key(self) -> Key:
        return key_of(self.info)

    def lives_until(self, now: int) -> None:
        """A view keeps all of its tensor."""
        self.dies = max(self.dies, now)
        if self.whole is not None:
            self.whole.lives_until(now)


class Call(NamedTuple):
    """One operator that may make tensors."""

    name: str  # without its namespace
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    backward: bool
    segment: int


class Gradient(NamedTuple):
    """Of one parameter: where it is handed to it, and the tensor, with the parameter's shape on this rank."""

    at: int
    segment: int
    info: Tensor


@dataclass
class Tape:
    """One micro-batch without recomputation, forward and backward.

    Segments are numbered in the order of the forward pass: 0 is all before the first block, 1 … `blocks` are the
    blocks (layers), and `blocks` + 1 is all behind the last.
    """

    calls: list[Call] = field(default_factory=list)
    tensors: list[TensorLife] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    when: list[int] = field(default_factory=list)  # the segment of every place on the tape
    middle: int = 0  # the place where the backward pass begins
    blocks: int = 0
    signatures: list[tuple[str, ...]] = field(default_factory=list)  # of the blocks: the calls of their forward passes
    frozen: list[tuple[int, Shape]] = field(default_factory=list)  # segment and shape of weights without a gradient
    adds: bool = False  # gradients were there before: they are added to
    loss_inside: bool = False  # the model makes the loss itself, so that its last output is the loss


def key_of(info: Tensor) -> Key:
    """By which a tensor is known again after views."""
    return info.distinct, info.element


def tape_of(ops: RankOps) -> Tape | None:
    """The tape of the first micro-batch.

    None where the trace has no shapes, sequence numbers or backward pass, or where its code is compiled.
    """
    if any(op.type == OpType.COMPILED for op in ops.ops) or not any(op.tensors for op in ops.ops):
        return None
    forward, nodes = _first_microbatch(ops)
    if not forward or not nodes:
        return None
    tape = _Follower(forward, nodes).tape
    return tape if any(tensor.saved for tensor in tape.tensors) else None


# ---------------------------------------------------------------------- reading the trace
class _Raw(NamedTuple):
    """A call before its tensors are followed."""

    op: TracedOp
    name: str
    sequence: int
    outputs: tuple[Tensor, ...]
    outer: Key  # of what the whole DTensor call returns
    outermost: TracedOp  # the operator that the user called
    owner: str  # the operator whose sequence number it has
    temporaries: tuple[Tensor, ...]  # that it makes for itself

    @property
    def is_view(self) -> bool:
        return self.name in _VIEWS


class _Node(NamedTuple):
    """A node of autograd with the calls inside it, and those beside it that add up gradients."""

    name: str
    sequence: int
    inside: list[_Raw]
    beside: list[_Raw]
    gradient: Tensor | None  # of AccumulateGrad
    adds: bool


def _first_microbatch(ops: RankOps) -> tuple[list[_Raw], list[_Node]]:
    """Calls of the first forward pass, and the nodes of the backward pass that follows.

    Where blocks are checkpointed by a function of autograd's (reentrant), its forward pass has no nodes: the
    recomputed one, which has, takes its place.
    """
    children = _children(ops)
    forward: list[list[_Raw]] = []
    nodes: list[_Node] = []
    checkpoints: list[int] = []  # places in the forward pass that are still to be recomputed
    for op in ops.ops:
        if op.type == OpType.OPTIMIZER:
            if nodes:
                break
            continue
        if op.scopes & {OpType.BACKWARD, OpType.OPTIMIZER, OpType.FSDP}:
            continue
        if op.type == OpType.BACKWARD:
            if _NODE.sub("", op.name) == f"{_CHECKPOINT}Backward" and checkpoints:
                recomputed, own = _checkpointed(op, children)
                forward[checkpoints.pop()] = recomputed
                nodes += own
            elif (node := _node(op, children)) is not None:
                nodes.append(node)
        elif op.type == OpType.ATTENTION and nodes:
            break  # the next micro-batch
        elif not nodes and _is_operator(op) and not _is_nested(op):
            if op.name == _CHECKPOINT:
                checkpoints.append(len(forward))
            forward.append(list(_calls(op, children)))
    return [raw for calls in forward for raw in calls], nodes


def _checkpointed(op: TracedOp, children: dict[int, list[TracedOp]]) -> tuple[list[_Raw], list[_Node]]:
    """A recomputed forward pass, and the nodes of the backward pass inside the same node."""
    calls: list[_Raw] = []
    nodes: list[_Node] = []
    for child in children.get(id(op), []):
        for inside in children.get(id(child), []):
            if inside.type != OpType.BACKWARD:
                calls += _calls(inside, children) if inside.type != OpType.FSDP else ()
            elif (node := _node(inside, children)) is not None:
                nodes.append(node)
    last = next((node for node in reversed(nodes) if node.gradient is not None), None)  # of the block's input
    return calls, [node for node in nodes if node is not last]


def _children(ops: RankOps) -> dict[int, list[TracedOp]]:
    found: dict[int, list[TracedOp]] = defaultdict(list)
    for op in ops.ops:
        if op.parent is not None:
            found[id(op.parent)].append(op)
    return found


def _is_operator(op: TracedOp) -> bool:
    """And not a scope that a user or the profiler named."""
    return op.type != OpType.FSDP and ("::" in op.name or op.sequence >= 0)


def _is_nested(op: TracedOp) -> bool:
    """Whether another operator called this one."""
    outer = op.parent
    while outer is not None and not _is_operator(outer):
        outer = outer.parent
    return outer is not None


def _calls(
    op: TracedOp,
    children: dict[int, list[TracedOp]],
    sequence: int = -1,
    outer: Key = (0, 0),
    outermost: TracedOp | None = None,
    owner: str = "",
) -> Iterator[_Raw]:
    """The calls that make tensors or views, of this operator and those inside it: composite ones are opened."""
    name, inside, outermost = _base(op.name), children.get(id(op), []), outermost or op
    if op.sequence >= 0:
        sequence, owner = op.sequence, name
    is_dtensor = any(child.name == "PythonSubclass" for child in inside)
    if is_dtensor:
        outputs = outputs_of(op)
        outer = key_of(outputs[0]) if outputs else outer
    real = (op.name.startswith("aten::") or op.type == OpType.ATTENTION) and not is_dtensor
    if real and name not in _COMPOSITES and (name not in _VIEWS or name in _SHAPES):
        yield _Raw(op, name, sequence, outputs_of(op), outer, outermost, owner, tuple(_temporaries(op, children)))
        return
    found = [
        raw
        for child in inside
        if child.type != OpType.FSDP
        for raw in _calls(child, children, sequence, outer, outermost, owner)
    ]
    yield from found
    if real and not found and op.tensors and name not in _VIEWS and name not in _FREE:
        yield _Raw(op, name, sequence, outputs_of(op), outer, outermost, owner, ())


def _temporaries(op: TracedOp, children: dict[int, list[TracedOp]]) -> Iterator[Tensor]:
    """What an operator makes for itself: copies of what is not contiguous, products (softmax backward)."""
    for child in children.get(id(op), []):
        if _base(child.name) in ("clone", "mul") and _base(child.name) != _base(op.name):
            yield from outputs_of(child)
        elif child.name.startswith("aten::") and _base(child.name) != _base(op.name):
            yield from _temporaries(child, children)


def _node(op: TracedOp, children: dict[int, list[TracedOp]]) -> _Node | None:
    """An interval of the autograd engine; None for one that only runs hooks."""
    if not _NODE.match(op.name):
        return None
    name = _NODE.sub("", op.name)
    inside: list[_Raw] = []
    beside: list[_Raw] = []
    gradient: Tensor | None = None
    sequence, adds = op.sequence, False
    for child in children.get(id(op), []):
        if child.name.rpartition("::")[2] == "AccumulateGrad":
            gradient = child.tensors[0] if child.tensors else None
            adds = any(_base(c.name) == "add_" for c in children.get(id(child), []))
        elif child.sequence >= 0 or child.name == name:
            sequence = max(sequence, child.sequence)
            inside += _backward_calls(child, children)
        elif child.type != OpType.FSDP:
            beside += _calls(child, children)
    return _Node(name, sequence, inside, beside, gradient, adds)


def _backward_calls(node: TracedOp, children: dict[int, list[TracedOp]]) -> Iterator[_Raw]:
    """The calls of a node itself: those with sequence numbers of their own recompute a forward pass."""
    for child in children.get(id(node), []):
        if child.type != OpType.FSDP and child.type != OpType.BACKWARD:
            found = list(_calls(child, children))
            yield from (raw for raw in found if raw.sequence < 0)


def _base(name: str) -> str:
    return name.rpartition("::")[2]


# ---------------------------------------------------------------------- what a call returns
def outputs_of(op: TracedOp) -> tuple[Tensor, ...]:
    """The tensors that a call makes; none where it works in place."""
    name, tensors = _base(op.name), op.tensors
    values = op.args.values
    if name.endswith("_") or (not tensors and not values):
        return ()
    if not tensors:
        return _filled(name, values)
    first = tensors[0]
    if name in ("mm", "addmm", "bmm", "baddbmm") and len(tensors) >= 2:
        a, b = tensors[-2:]
        return (_dense((*a.shape[:-1], b.shape[-1]), a),)
    if name == "_grouped_mm" and len(tensors) >= 2:
        a, b = tensors[:2]
        experts = tensors[2].shape[:1] if len(b.shape) == 2 and len(tensors) > 2 else ()
        return (_dense((*experts, a.shape[0], b.shape[-1]), a),)
    if _ATTENTION.search(op.name):
        return _attention(op.name, tensors)
    if name in _INDEXED and len(tensors) >= 2:
        return (_dense((*tensors[1].shape, *first.shape[1:]), first),)
    if name in ("slice_backward", "select_backward") and len(values) > 1 and (sizes := _sizes(values[1])):
        return (_dense(sizes, first),)
    if name == "embedding_dense_backward":
        return _embedding_gradient(first, values)
    if name in _NORMS:
        rows = prod(first.shape[:-1])
        return (_dense(first.shape, first), *[Tensor((rows,), "fp32", (1,), 4)] * _NORMS[name])
    if name.endswith("_norm_backward") or name.startswith("convolution_backward"):
        return tuple(_dense(t.shape, t) for t in tensors[1:2]) + tuple(_dense(t.shape, t) for t in tensors[-1:])
    return _element_wise(name, tensors, values)


def _element_wise(name: str, tensors: tuple[Tensor, ...], values: list[Any]) -> tuple[Tensor, ...]:
    first = tensors[0]
    if name in ("_to_copy", "clone", "constant_pad_nd", "empty_like"):
        typed = name in ("_to_copy", "empty_like") and len(values) > 1
        return (_as_type(_dense(first.shape, first), values[1] if typed else ""),)
    if name in _REDUCTIONS:
        return (_dense(_reduced(first.shape, values), first),)
    if name in ("cat", "stack", "_chunk_cat"):
        return (_joined(tensors, values),)
    if name in ("_softmax", "_log_softmax") and len(values) > 2 and values[2] == "True":
        return (_as_type(_dense(first.shape, first), "6"),)
    if name in ("_softmax_backward_data", "_log_softmax_backward_data") and len(values) > 3:
        return (_as_type(_dense(first.shape, first), values[3]),)
    if name == "nll_loss_backward":
        return (_dense(max(tensors, key=lambda t: t.elements).shape, max(tensors, key=lambda t: t.elements)),)
    if name in ("nll_loss_forward", "mse_loss", "nll_loss2d_forward"):
        return ()
    if name in ("topk", "sort"):
        return (_dense(first.shape, first), _as_type(_dense(first.shape, first), "4"))
    if name in ("gather", "index") and len(tensors) > 1:
        return (_dense(tensors[1].shape if name == "gather" else (*tensors[1].shape, *first.shape[1:]), first),)
    if name == "native_dropout":
        return (_dense(first.shape, first), _as_type(_dense(first.shape, first), "11"))
    wide = max(tensors, key=lambda t: (t.elements, t.element))
    shape = _broadcast([t.shape for t in tensors]) or wide.shape
    info = _dense(shape, wide)
    return (_as_type(info, "11") if name in _COMPARISONS else info,)


def _filled(name: str, values: list[Any]) -> tuple[Tensor, ...]:
    """empty, rand and the like: a size and a dtype in the arguments."""
    sizes = _sizes(values[0]) if values else ()
    place = 2 if name == "empty_strided" else 1
    if not sizes:
        return ()
    return (_as_type(_dense(sizes, Tensor(sizes, "fp32", (), 4)), values[place] if len(values) > place else ""),)


def _attention(name: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward: output and the logarithms of its sums; backward: three gradients."""
    four = [t for t in tensors if len(t.shape) in (3, 4)]
    if "backward" in name or "bwd" in name:
        return tuple(_dense(t.shape, t) for t in four[1:4])
    if len(four) < 3:
        return tuple(_dense(t.shape, t) for t in tensors[:1])
    query, value = four[0], four[2]
    rows = Tensor(query.shape[:-1], "fp32", (), 4)
    return _dense((*query.shape[:-1], value.shape[-1]), query), _dense(rows.shape, rows)


def _embedding_gradient(gradient: Tensor, values: list[Any]) -> tuple[Tensor, ...]:
    rows = _number(values[2]) if len(values) > 2 else 0
    return (_dense((rows, gradient.shape[-1]), gradient),) if rows > 0 and gradient.shape else ()


def _joined(tensors: tuple[Tensor, ...], values: list[Any]) -> Tensor:
    first = tensors[0]
    alike = [t for t in tensors if len(t.shape) == len(first.shape)]
    dim = _number(values[1]) if len(values) > 1 else -1
    dim = dim if -len(first.shape) <= dim < len(first.shape) else -1
    shape = list(first.shape)
    if shape:
        shape[dim] = sum(t.shape[dim] for t in alike)
    return _dense(tuple(shape), first)


def _reduced(shape: Shape, values: list[Any]) -> Shape:
    """Without the dimensions that are summed over; all of them where none is named."""
    named = values[1] if len(values) > 1 else ""
    text = str(named)
    dims = [int(n) for n in re.findall(r"-?\d{1,2}(?!\d)", text)] if text and text[0] in "[-0123456789" else []
    gone = {d % len(shape) for d in dims} if shape else set()
    return tuple(n for i, n in enumerate(shape) if i not in gone) if gone else ()


def _broadcast(shapes: Iterable[Shape]) -> Shape:
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for i, n in enumerate(reversed(shape), 1):
            if n != result[-i] and 1 not in (n, result[-i]):
                return ()
            result[-i] = max(n, result[-i])
    return tuple(result)


def _as_type(info: Tensor, code: Any) -> Tensor:
    """With the dtype of this number in c10::ScalarType."""
    dtype = dtype_of_code(code)
    return info if dtype is None else info._replace(dtype=dtype.name, element=dtype.size)


def _dense(shape: Shape, like: Tensor) -> Tensor:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return Tensor(shape, like.dtype, tuple(reversed(strides)), like.element)


def _sizes(text: Any, elements: int = 0) -> Shape:
    """A list of sizes, one of which may be -1: as many as there are."""
    found = re.fullmatch(r"\[(-?\d{1,12}(?:, ?-?\d{1,12})*)\]", str(text))
    sizes = [int(n) for n in found.group(1).split(",")] if found else []
    known = prod(n for n in sizes if n > 0)
    if -1 in sizes and known and elements % known == 0:
        sizes[sizes.index(-1)] = elements // known
    return tuple(sizes) if all(n > 0 for n in sizes) else ()


def _number(text: Any) -> int:
    return int(text) if re.fullmatch(r"-?\d{1,12}", str(text)) else 0


# ---------------------------------------------------------------------- blocks
def _boundaries(names: list[tuple[str, ...]], marks: list[int]) -> list[int]:
    """Where blocks begin, and where the last one ends.

    From one attention to the next is one block, although shifted. What runs before the first attention and is like
    what runs before the second one is the beginning of a block; the rest of it comes before all blocks.
    """
    if len(marks) < 2:
        return [0, len(names)]
    lead, first, second = 0, marks[0], marks[1]
    while lead < min(first, second - first - 1) and names[first - 1 - lead] == names[second - 1 - lead]:
        lead += 1
    starts = [mark - lead for mark in marks]
    last = min(len(names), marks[-1] + (starts[-1] - marks[-2]))
    return [*starts, last]


# ---------------------------------------------------------------------- following tensors
class _Follower:
    """Builds the tape: walks the calls, finds what each of them reads, and who saves what."""

    def __init__(self, forward: list[_Raw], nodes: list[_Node]) -> None:
        self.tape = Tape(loss_inside=_pads_labels(forward))
        self.recent: dict[Key, list[TensorLife]] = defaultdict(list)
        self.saved: dict[int, list[TensorLife]] = {}  # by sequence number
        self.segments: dict[int, int] = {}  # likewise, of the call that made a node
        self.results: dict[int, tuple[Key, int]] = {}  # likewise, what that call returned, and of how many sides
        self.since = 0  # what was made earlier is not looked at
        self.node = -1
        self.latest: TensorLife | None = None  # read by a product with a number: x; 0.5·x waits in 0.5·x·(1 + … x³)
        self.weights = {tuple(sorted(node.gradient.shape)) for node in nodes if node.gradient}
        self._forward(forward, {node.sequence: node for node in nodes if node.sequence >= 0 and not node.gradient})
        self._backward(nodes)

    def _forward(self, forward: list[_Raw], nodes: dict[int, _Node]) -> None:
        marks = [i for i, raw in enumerate(forward) if _is_attention(raw)]
        marks = [i for i in marks if i == 0 or forward[i - 1].outermost is not forward[i].outermost]
        if not marks:
            marks = [i for i, raw in enumerate(forward) if raw.name == "_softmax"]
        starts = _boundaries([_signature(raw) for raw in forward], marks)
        self.tape.blocks = max(len(marks), 1)
        self.tape.signatures = [tuple(raw.name for raw in forward[a:b]) for a, b in pairwise(starts)]
        last = {raw.sequence: i for i, raw in enumerate(forward) if raw.sequence >= 0}  # that one made the node
        segment = 0
        for place, raw in enumerate(forward):
            while segment < len(starts) and place >= starts[segment]:
                segment += 1
            read, made = self._step(raw, segment, backward=False)
            self._note_frozen(raw, segment)
            node = nodes.get(raw.sequence)
            if node is not None and last[raw.sequence] == place:
                self.segments[raw.sequence] = segment
                self.saved[raw.sequence] = _saved(raw, node, read, made)
                self.results[raw.sequence] = _result(raw, made)
            if not self.saved.get(raw.sequence):  # a sum: which one it reads beside the latest is the least certain
                for tensor in read[1:]:
                    tensor.read -= tensor.key == read[0].key
        self.tape.middle = len(self.tape.when)

    def _step(self, raw: _Raw, segment: int, backward: bool) -> tuple[list[TensorLife], list[TensorLife]]:
        """One call: what it reads lives at least until now, and what it returns is new."""
        tape, now = self.tape, len(self.tape.when)
        if raw.is_view:
            self._view(raw)
            return [], []
        read = self._inputs(raw)
        for tensor in read:
            tensor.lives_until(now)
            filled = raw.name.endswith("_") and tape.calls[tensor.call].name.startswith("empty")
            tensor.read += not filled  # it is still to be read
            tensor.crosses |= segment == tensor.segment + 1 and not backward
        if backward and raw.name in ("add_", "sub_") and read:
            read[-1].read = min(read[-1].read, 0)  # holds the sum from now on
        made = [
            TensorLife(now, place, info, now, now, segment, raw.outer, info.shape, node=self.node, maker=raw.outermost)
            for place, info in enumerate((*raw.outputs, *raw.temporaries))
            if info.elements * info.element >= _FEWEST_BYTES
        ]
        tape.calls.append(Call(raw.name, raw.op.tensors, (*raw.outputs, *raw.temporaries), backward, segment))
        tape.when.append(segment)
        tape.tensors += made
        made = [tensor for tensor in made if tensor.place < len(raw.outputs)]
        self.latest = read[0] if raw.name == "mul" and len(read) == 1 == len(raw.op.tensors) else None
        for tensor in made:
            self.recent[tensor.key].append(tensor)
        return read, made

    def _inputs(self, raw: _Raw) -> list[TensorLife]:
        """The tensors that a call reads, as far as they were made on the tape."""
        wanted: dict[Key, list[Shape]] = defaultdict(list)
        for place, info in enumerate(raw.op.tensors):
            if info.elements * info.element >= _FEWEST_BYTES and not self._is_weight(raw.name, place, info):
                wanted[key_of(info)].append(info.shape)
        if raw.name == "pow" and self.latest is not None and list(wanted) == [self.latest.key]:
            return [self.latest]
        found: list[TensorLife] = []
        for key, shapes in wanted.items():
            forms = set(shapes) | {t.shape for t in raw.outermost.tensors if t.elements == key[0]}
            latest = self.recent.get(key, [])[: -_FARTHEST - 1 : -1]
            latest = [t for t in latest if t.born >= self.since and t.taken < 0]
            found += sorted(latest, key=lambda t: (t.form not in forms, t.read > 0, not t.saved))[: len(shapes)]
        return found

    def _note_frozen(self, raw: _Raw, segment: int) -> None:
        """A weight of a linear layer or an embedding that no gradient has the shape of."""
        place = {"aten::linear": 1, "aten::embedding": 0}.get(raw.outermost.name, -1)
        tensors = raw.outermost.tensors
        if raw.name not in ("mm", "addmm", "embedding") or not 0 <= place < len(tensors):
            return
        shape = tensors[place].shape
        if tuple(sorted(shape)) not in self.weights:
            self.tape.frozen.append((segment, shape))

    def _is_weight(self, name: str, place: int, info: Tensor) -> bool:
        """The second factor of a matmul or the table of an embedding, of a parameter's shape and never computed."""
        matrix = name in ("mm", "addmm", "_grouped_mm") and place >= (2 if name == "addmm" else 1)
        if not matrix and not (name in _INDEXED and place == 0):
            return False
        shape = tuple(sorted(info.shape))
        latest = self.recent.get(key_of(info), [])[-2:]
        cast = any(self.tape.calls[t.call].name == "_to_copy" and sorted(t.info.shape) == list(shape) for t in latest)
        return shape in self.weights and not cast  # autocast makes a copy of it, which is kept like any tensor

    def _view(self, raw: _Raw) -> None:
        """Another shape of a tensor, or a view of a part of it, such as the keys in the joint output of one matmul."""
        values, info = raw.op.args.values, raw.op.tensors[0] if raw.op.tensors else None
        if info is None or info.elements * info.element < _FEWEST_BYTES:
            return
        latest = self.recent.get(key_of(info), [])[: -_FARTHEST - 1 : -1]
        tensor = next((t for t in latest if info.shape in (t.form, t.info.shape)), None)
        sizes = _sizes(values[1], info.elements) if len(values) > 1 else ()
        if tensor is None or not sizes:
            return
        if prod(sizes) < info.distinct:
            part = replace(tensor, info=_dense(sizes, info), form=sizes, read=0, saved=False, whole=tensor)
            self.recent[part.key].append(part)
        elif tensor.maker is raw.outermost or _base(raw.outermost.name) in _VIEWS:  # else only this operator sees it so
            tensor.form = sizes

    def _backward(self, nodes: list[_Node]) -> None:
        """Nodes in the order in which they ran."""
        self.recent = defaultdict(list)  # gradients are no activations
        segment = self.tape.blocks + 1
        for self.node, node in enumerate(nodes):
            segment = self.segments.get(node.sequence, segment)
            if node.gradient:
                self._accumulate(node, segment)
                continue
            incoming = self._incoming(node)
            self.since = len(self.tape.when)  # what a node reads is saved for it, comes in, or is made by itself
            for raw in node.inside:
                self._step(raw, segment, backward=True)
            for tensor in (*self.saved.get(node.sequence, ()), *incoming):
                tensor.lives_until(len(self.tape.when) - 1)
            self.since = 0
            for raw in node.beside:
                self._step(raw, segment, backward=True)

    def _incoming(self, node: _Node) -> list[TensorLife]:
        """The gradient that a node gets: the most recent one of its size that nobody has had yet.

        Nodes that make nothing pass it on. That of an addition does so to both sides: somebody else will read it, too.
        """
        key, sides = self.results.get(node.sequence, ((0, 0), 1))
        latest = [t for t in self.recent.get(key, [])[: -_FARTHEST - 1 : -1] if t.taken < 0]
        found = sorted(latest, key=lambda t: t.read > 0)[:1]
        for tensor in found:
            tensor.read += 1 if any(not raw.is_view for raw in node.inside) else 1 - sides
        return found

    def _accumulate(self, node: _Node, segment: int) -> None:
        """The gradient becomes that of a parameter: the latest tensor of its size, or this rank's part of a DTensor.

        Of equal ones that one node made, it is the first: the gradient of a weight comes before that of the input.
        """
        tape, gradient = self.tape, node.gradient
        if gradient is None:
            return
        tape.adds = tape.adds or (node.adds and not tape.gradients)
        elements, now = gradient.elements, max(len(tape.when) - 1, 0)
        free = [t for t in reversed(tape.tensors[-_FARTHEST:]) if t.taken < 0 and t.born >= tape.middle]
        free = [t for t in free if t.info.element == gradient.element]
        part = next((t for t in free if t.info.elements < elements == t.outer[0]), None)
        whole = [t for t in free if t.info.elements == elements]
        whole = [t for t in whole if tape.calls[t.call].name not in _OF_ACTIVATIONS] or whole
        tensor = part or next((t for t in reversed(whole) if t.node == whole[0].node), None)
        if tensor is not None:
            tensor.taken = now
            tensor.dies = max(tensor.dies, now)
        tape.gradients.append(Gradient(now, segment, gradient if part is None else part.info))


def _saved(raw: _Raw, node: _Node, read: list[TensorLife], made: list[TensorLife]) -> list[TensorLife]:
    """The tensors that a call saved for its node: those that the node reads beside the gradient that comes in."""
    unread = _beside_gradients(node.inside, {t.key for t in made[:1]})
    foreign = not raw.op.name.startswith("aten::")  # anything may be kept
    candidates = made if _KEEPS_OUTPUT & {raw.name, raw.owner} else read
    if foreign or _KEEPS_BOTH.search(raw.name):
        candidates = [*read, *made]
    kept: list[TensorLife] = []
    for tensor in candidates:
        if unread[tensor.key] > 0 and tensor not in kept:
            unread[tensor.key] -= 1
            kept.append(tensor)
            tensor.saved = True
    return kept


def _result(raw: _Raw, made: list[TensorLife]) -> tuple[Key, int]:
    """What a call returns, and how many inputs of that size get its gradient as it is, where it is a sum."""
    if made:
        key = made[0].key
    elif raw.op.tensors:
        key = key_of(raw.op.tensors[0])  # of a view
    else:
        return (0, 0), 1
    sides = sum(key_of(info) == key for info in raw.op.tensors) if raw.name in ("add", "sub") else 1
    return key, max(sides, 1)


def _beside_gradients(inside: list[_Raw], gradients: set[Key]) -> Counter[Key]:
    """How many tensors of each size the calls of a node read, beside the gradient that comes in."""
    found: Counter[Key] = Counter()
    for raw in inside:
        if raw.is_view:
            continue
        read = Counter(key_of(info) for info in raw.op.tensors)
        for key, count in read.items():
            found[key] += count - (key in gradients)
    return found


def _is_attention(raw: _Raw) -> bool:
    return OpType.ATTENTION in (raw.op.type, raw.outermost.type)


def _signature(raw: _Raw) -> tuple[str, ...]:
    return (raw.name, *(str(info.shape) for info in raw.op.tensors))


def _pads_labels(forward: list[_Raw]) -> bool:
    """As the losses inside models of transformers do, to shift labels by one."""
    pads = [raw for raw in forward[-_FARTHEST:] if raw.name == "constant_pad_nd" and raw.op.tensors]
    return any(raw.op.tensors[0].dtype == "int64" for raw in pads)
