"""The operators of one rank's step: rows of a Trace with their arguments decoded, and the scopes around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum, auto
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import numpy as np

from lumos.data_files import read_table
from lumos.dtypes import DTYPES, DType, dtype_called
from lumos.program.op import Tensor
from lumos.trace.names import Category, collective_name
from lumos.trace.trace import Arguments, Message, Rows, Trace

Shape = tuple[int, ...]
MODULE = "nn.Module: "  # how the profiler names the call of a module

_LONGEST_LIST = 4096  # tensors of one operator that are looked at
_LARGEST_SIZE = 1 << 48
_NOT_TENSORS = frozenset({"Scalar", "ScalarList", "TensorList"})
_RECORD = "record_param_comms"


class OpType(StrEnum):
    """The operators and scopes that inference looks at; data/operator_names.toml has their names in traces."""

    MATMUL = auto()
    BATCHED_MATMUL = auto()  # of an attention that is not fused
    GROUPED_MATMUL = auto()  # of all experts at once
    ATTENTION = auto()
    SOFTMAX = auto()
    TOP_K = auto()  # chooses experts
    LOSS = auto()
    EMBEDDING = auto()
    GRADIENT = auto()  # accumulated for one parameter
    COMM = auto()
    BACKWARD = auto()  # a scope
    OPTIMIZER = auto()  # a scope
    FSDP = auto()  # a scope
    DDP = auto()  # a scope
    STEP = auto()
    COMPILED = auto()
    OTHER = auto()


_PATTERNS = {OpType(name): re.compile(text) for name, text in read_table("operator_names.toml")["operators"].items()}


class OpArguments:
    """What an operator was called with; equal calls share one."""

    def __init__(self, recorded: Arguments) -> None:
        self.dims, self.types, self.strides, self.values = map(_decoded, recorded)

    @cached_property
    def shapes(self) -> list[Shape]:
        """Those of the inputs; a list of tensors gives the shapes of its tensors, a number in it one element."""
        found: list[Shape] = []
        for item in self.dims[:_LONGEST_LIST]:
            if isinstance(item, list) and item and all(isinstance(part, list) for part in item):
                found += [_shape(part) or (1,) for part in item[:_LONGEST_LIST]]
            else:
                found.append(_shape(item))
        return found

    @cached_property
    def dtype(self) -> str:
        return next((text for text in self.types if isinstance(text, str) and text and text not in _NOT_TENSORS), "")

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operands; a list of tensors gives each of them."""
        return tuple(_tensors(self.dims, self.types, self.strides))


def _decoded(text: bytes) -> list[Any]:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(text) if text else []
        return found if isinstance(found, list) else []
    return []


@dataclass(eq=False, slots=True)
class TracedOp:
    """One operator or scope, and the scopes around it; times are those of the Trace."""

    type: OpType
    name: str
    start: int
    end: int
    lane: int
    args: OpArguments
    sequence: int  # the number that autograd gave the call, which its backward node repeats; -1 where there is none
    message: Message | None = None
    is_note: bool = False  # a scope that the user or the framework opened, or a module
    scopes: frozenset[OpType] = frozenset()
    outer: TracedOp | None = None  # of the same type around this one: a DTensor's operator, with unsharded shapes
    parent: TracedOp | None = None  # the operator or scope right around this one
    is_leaf: bool = True  # no operator of the same type inside

    @property
    def backward(self) -> bool:
        return OpType.BACKWARD in self.scopes

    @property
    def forward(self) -> bool:
        return not self.scopes & {OpType.BACKWARD, OpType.OPTIMIZER}

    @property
    def shapes(self) -> list[Shape]:
        return self.args.shapes

    @property
    def dtype(self) -> str:
        return self.args.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.args.tensors

    @property
    def factors(self) -> list[Shape]:
        """The two factors of a matmul, without what is added to or scales their product."""
        return self.shapes[1:3] if self.name.endswith(("addmm", "baddbmm")) else self.shapes[:2]


@dataclass(frozen=True)
class RankOps:
    """The operators of one rank in one step, in the order of their calls."""

    rank: int
    ops: tuple[TracedOp, ...]
    is_one_step: bool  # and not a recording of several unmarked ones
    most_bytes: float = 0.0  # that the GPU's allocator held, where the profiler recorded it; else 0

    def of(self, *types: OpType) -> list[TracedOp]:
        """The innermost operators of these types."""
        return [op for op in self.ops if op.type in types and op.is_leaf]

    def forward(self, *types: OpType) -> list[TracedOp]:
        return [op for op in self.of(*types) if op.forward]

    @cached_property
    def collectives(self) -> list[tuple[TracedOp, Message]]:
        """What ranks did together, by the name of the collective; a record without a message is of a wait."""
        recorded = any(op.message for op in self.ops)
        calls = [op for op in self.of(OpType.COMM) if op.message or op.name != _RECORD or not recorded]
        return [(op, message) for op in calls if (message := _collective(op)).collective]


def rank_ops(trace: Trace, rank: int, step: str, modules: bool = False) -> RankOps:
    """The operators of a rank in the step of that name; none if the trace was read without them.

    With `modules`, the scopes of `nn.Module`s are among them, where Python functions were recorded (with_stack).
    """
    if trace.arguments is None:
        return RankOps(rank, (), False)
    is_op = trace.is_any((Category.OP, Category.NOTE))
    is_module = np.array([name.startswith(MODULE) for name in trace.names], bool)[trace.name]
    python = (trace.category == Category.PYTHON) & is_module if modules else np.zeros(len(trace), bool)
    rows = np.flatnonzero((is_op | python) & (trace.rank == rank))
    rows = rows[np.lexsort((-trace.end[rows], trace.start[rows], trace.lane[rows]))]
    every = sorted(_nested(trace, rows), key=lambda op: op.start)
    mark = next((op for op in every if op.type == OpType.STEP and op.name == step), None)
    held = trace.allocations
    mine = trace.lane_rank[held.lane] == rank
    if mark is None:
        return RankOps(rank, tuple(every), _is_one_step(every), float(held.bytes[mine].max(initial=0.0)))
    during = mine & (held.time >= mark.start) & (held.time < mark.end)
    inside = tuple(op for op in every if mark.start <= op.start < mark.end)
    return RankOps(rank, inside, True, float(held.bytes[during].max(initial=0.0)))


def _is_one_step(ops: list[TracedOp]) -> bool:
    """Without step marks: one optimizer update, and no forward pass after it."""
    updates = [op.start for op in ops if op.type == OpType.OPTIMIZER]
    return len(updates) == 1 and not any(op.type == OpType.ATTENTION and op.start > updates[0] for op in ops)


def _nested(trace: Trace, rows: Rows) -> Iterator[TracedOp]:
    """The operators of some rows, sorted by lane and time, with the scopes around each."""
    around: list[TracedOp] = []
    for op in _plain(trace, rows):
        while around and (around[-1].end <= op.start or around[-1].lane != op.lane):
            around.pop()
        if around:
            op.parent = around[-1]
            op.scopes = around[-1].scopes | {around[-1].type}
            op.outer = next((outer for outer in reversed(around) if outer.type == op.type), None)
            if op.outer is not None:
                op.outer.is_leaf = False
        around.append(op)
        yield op


def _plain(trace: Trace, rows: Rows) -> Iterator[TracedOp]:
    """The operators of some rows, without what is around them."""
    types = {name: _type_of(trace.names[name]) for name in np.unique(trace.name[rows]).tolist()}
    texts = (*(trace.arguments or ()), Arguments(b"", b"", b"", b""))  # -1 picks the last
    arguments = {place: OpArguments(texts[place]) for place in np.unique(trace.argument[rows]).tolist()}
    columns = ("name", "start", "end", "lane", "argument", "sequence", "message", "category")
    listed = (getattr(trace, column)[rows].tolist() for column in columns)
    for name, start, end, lane, argument, sequence, message, category in zip(*listed, strict=True):
        yield TracedOp(
            types[name], trace.names[name], start, end, lane, arguments[argument], sequence,
            trace.messages[message] if message >= 0 else None, category != Category.OP,
        )  # fmt: skip


def _type_of(name: str) -> OpType:
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.match(name)), OpType.OTHER)


def _shape(recorded: Any) -> Shape:
    usable = isinstance(recorded, list) and all(isinstance(n, int) and 0 < n < _LARGEST_SIZE for n in recorded)
    return tuple(recorded) if usable else ()


def _tensors(dims: list[Any], types: list[Any], strides: list[Any]) -> Iterator[Tensor]:
    """Operands with dtype and strides; traces do not have the dtype of lists: they get that of the other operands."""
    usual = next(filter(None, map(dtype_called, types)), DTYPES[0])
    for place, item in enumerate(dims[:_LONGEST_LIST]):
        dtype = (dtype_called(types[place]) if place < len(types) else None) or usual
        steps = strides[place] if place < len(strides) else None
        if isinstance(item, list) and item and all(isinstance(part, list) for part in item):
            for index, part in enumerate(item[:_LONGEST_LIST]):
                each = steps[index] if isinstance(steps, list) and index < len(steps) else None
                yield _tensor(_shape(part) or (1,), each, dtype)
        elif shape := _shape(item):
            yield _tensor(shape, steps, dtype)


def _tensor(shape: Shape, strides: Any, dtype: DType) -> Tensor:
    """With the strides that were recorded, or else those of a contiguous tensor."""
    usable = isinstance(strides, list) and len(strides) == len(shape)
    if usable and all(isinstance(n, int) and 0 <= n < _LARGEST_SIZE for n in strides):
        return Tensor(shape, dtype.name, tuple(strides), dtype.size)
    return Tensor(shape, dtype.name, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), dtype.size)


def _collective(op: TracedOp) -> Message:
    """What ranks did together, from its record first, then from the call around it."""
    around = op.outer if op.outer is not None and op.name == _RECORD else op
    message = op.message or Message("")
    sent, received, size = message.in_elements, message.out_elements, message.group_size
    name = collective_name(message.collective) or (collective_name(around.name) if around.name != _RECORD else "")
    if sent <= 0:
        sent, received = _elements(name, around.shapes)
    if size <= 0 and name in ("all_gather", "reduce_scatter") and 0 < min(sent, received) < max(sent, received):
        size = max(sent, received) // min(sent, received)
    return message._replace(collective=name, in_elements=sent, out_elements=received, group_size=size)


def _elements(name: str, shapes: list[Shape]) -> tuple[int, int]:
    """(in, out) of a c10d call, whose output comes first."""
    sizes = [prod(shape) for shape in shapes if shape]
    if not sizes:
        return -1, -1
    if name in ("all_gather", "reduce_scatter") and len(sizes) > 1:
        return sizes[1], sizes[0]
    return sum(sizes), sum(sizes)
