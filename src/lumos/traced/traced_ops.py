"""The operators of one rank's step as its trace has them: shapes, dtypes, strides, and the scopes around them.

The graph needs no shapes, so a Trace has none: they are read from the file again, for the ranks that are looked at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lumos.data_files import read_table
from lumos.dtypes import DTYPES, DType, dtype_called
from lumos.program.op import Tensor
from lumos.read.formats import Form, form_of, head_of
from lumos.read.json_slices import Slices
from lumos.read.kineto import rank_list
from lumos.trace.names import CATEGORIES, Category, collective_name

Shape = tuple[int, ...]
MODULE = "nn.Module: "  # how the profiler names the call of a module

_LONGEST_LIST = 4096  # tensors of one operator that are looked at
_LARGEST_SIZE = 1 << 48
_NOT_TENSORS = frozenset({"Scalar", "ScalarList", "TensorList"})
_CATEGORIES = frozenset({Category.OP, Category.NOTE})


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


class _Args(msgspec.Struct, gc=False):
    shapes: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")
    strides: Any = msgspec.field(default=None, name="Input Strides")
    values: Any = msgspec.field(default=None, name="Concrete Inputs")
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    collective: Any = msgspec.field(default="", name="Collective name")
    elements_in: Any = msgspec.field(default=-1, name="In msg nelems")
    elements_out: Any = msgspec.field(default=-1, name="Out msg nelems")
    group_size: Any = msgspec.field(default=-1, name="Group size")
    source: Any = msgspec.field(default=-1, name="Src Rank")
    destination: Any = msgspec.field(default=-1, name="Dst Rank")
    ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    device: Any = msgspec.field(default=None, name="Device Type")


class _Event(msgspec.Struct, gc=False):
    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    tid: Any = None
    ts: Any = None
    dur: Any = 0
    args: _Args | str | int | float | bool | list[Any] | None = None


class CollectiveCall(NamedTuple):
    """What is recorded of one collective; -1 where nothing is."""

    collective: str
    elements_in: int
    elements_out: int
    group_size: int
    peer: int = -1  # of a send or a receive, as recorded
    group: tuple[int, ...] = ()  # empty if its ranks were not recorded


@dataclass
class TracedOp:
    """One operator, and the scopes around it."""

    type: OpType
    name: str
    start: float
    end: float
    shapes: list[Shape]
    dtype: str
    args: _Args
    thread: str = ""
    scopes: set[OpType] = field(default_factory=set)
    outer: TracedOp | None = None  # of the same type around this one: a DTensor's operator, with unsharded shapes
    parent: TracedOp | None = None  # the operator or scope right around this one
    is_leaf: bool = True  # no operator of the same type inside
    is_note: bool = False  # a scope that the user or the framework opened, or a module

    @property
    def backward(self) -> bool:
        return OpType.BACKWARD in self.scopes

    @property
    def forward(self) -> bool:
        return not self.scopes & {OpType.BACKWARD, OpType.OPTIMIZER}

    @property
    def sequence(self) -> int:
        """The number that autograd gave the call, which its backward node repeats; -1 where there is none."""
        return _integer(self.args.sequence)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operands; a list of tensors gives each of them."""
        return tuple(_tensors(self.args))

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
    first_us: float = 0.0  # when the first operator or scope of the whole file begins, on the clock of the file
    most_bytes: float = 0.0  # that the GPU's allocator held, where the profiler recorded it; else 0

    def of(self, *types: OpType) -> list[TracedOp]:
        """The innermost operators of these types."""
        return [op for op in self.ops if op.type in types and op.is_leaf]

    def forward(self, *types: OpType) -> list[TracedOp]:
        return [op for op in self.of(*types) if op.forward]

    @cached_property
    def collectives(self) -> list[tuple[TracedOp, CollectiveCall]]:
        found = [(op, _collective(op)) for op in self.of(OpType.COMM)]
        return [(op, call) for op, call in found if call.collective]


def read_ops(path: Path, rank: int, step: str, modules: bool = False) -> RankOps:
    """The operators of a file in the step of that name; none if the file is not a Kineto trace.

    With `modules`, the scopes of `nn.Module`s are among them, where Python functions were recorded (with_stack).
    """
    by_thread: dict[str, list[TracedOp]] = defaultdict(list)
    known: dict[str, OpType] = {}
    held: list[tuple[float, float]] = []
    for event in chain.from_iterable(Slices(path, _Event)) if form_of(path, head_of(path)) == Form.KINETO else ():
        op = _read(event, known, modules)
        held += _held(event)
        if op is not None:
            by_thread[str(event.tid)].append(op)
    every = sorted((op for ops in by_thread.values() for op in _nested(ops)), key=lambda op: op.start)
    first = next((op.start for op in every if not op.name.startswith(MODULE)), 0.0)
    mark = next((op for op in every if op.type == OpType.STEP and op.name == step), None)
    if mark is None:
        return RankOps(rank, tuple(every), _is_one_step(every), first, max((size for _, size in held), default=0.0))
    most = max((size for at, size in held if mark.start <= at < mark.end), default=0.0)
    return RankOps(rank, tuple(op for op in every if mark.start <= op.start < mark.end), True, first, most)


def _is_one_step(ops: list[TracedOp]) -> bool:
    """Without step marks: one optimizer update, and no forward pass after it."""
    updates = [op.start for op in ops if op.type == OpType.OPTIMIZER]
    return len(updates) == 1 and not any(op.type == OpType.ATTENTION and op.start > updates[0] for op in ops)


def _held(event: _Event) -> list[tuple[float, float]]:
    """When, and how many bytes, of an event of a GPU's allocator; device type 0 is the host."""
    if event.name != "[memory]" or not isinstance(event.args, _Args) or event.args.device in (0, None):
        return []
    match event.ts, event.args.allocated:
        case ((int() | float() as at), (int() | float() as size)) if 0 <= size < _LARGEST_SIZE:
            return [(float(at), float(size))]
    return []


def _read(event: _Event, known: dict[str, OpType], modules: bool) -> TracedOp | None:
    category = CATEGORIES.get(event.cat if isinstance(event.cat, str) else "")
    name = event.name if isinstance(event.name, str) else ""
    is_module = modules and category == Category.PYTHON and name.startswith(MODULE)
    if event.ph != "X" or not (category in _CATEGORIES or is_module):
        return None
    if name not in known:
        known[name] = next((found for found, pattern in _PATTERNS.items() if pattern.match(name)), OpType.OTHER)
    found = known[name]
    if not isinstance(event.ts, int | float) or not isinstance(event.dur, int | float):
        return None
    args = event.args if isinstance(event.args, _Args) else _Args()
    types = args.types if isinstance(args.types, list) else []
    dtype = next((text for text in types if isinstance(text, str) and text and text not in _NOT_TENSORS), "")
    start = float(event.ts)
    thread = str(event.tid)
    is_note = is_module or category == Category.NOTE
    end = start + float(event.dur)
    return TracedOp(found, name, start, end, _shapes(args.shapes), dtype, args, thread, is_note=is_note)


def _shapes(recorded: Any) -> list[Shape]:
    """The shapes of the inputs; a list of tensors gives the shapes of its tensors, a number in it one element."""
    found: list[Shape] = []
    for item in recorded[:_LONGEST_LIST] if isinstance(recorded, list) else []:
        if isinstance(item, list) and item and all(isinstance(part, list) for part in item):
            found += [_shape(part) or (1,) for part in item[:_LONGEST_LIST]]
        else:
            found.append(_shape(item))
    return found


def _shape(recorded: Any) -> Shape:
    usable = isinstance(recorded, list) and all(isinstance(n, int) and 0 < n < _LARGEST_SIZE for n in recorded)
    return tuple(recorded) if usable else ()


def _tensors(args: _Args) -> Iterator[Tensor]:
    """Operands with dtype and strides; traces do not tell the dtype of lists: they get that of the other operands."""
    dims, types, strides = (part if isinstance(part, list) else [] for part in (args.shapes, args.types, args.strides))
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


def _nested(ops: list[TracedOp]) -> Iterable[TracedOp]:
    """The operators of one thread, with the scopes around each."""
    ops.sort(key=lambda op: (op.start, -op.end))
    around: list[TracedOp] = []
    for op in ops:
        while around and around[-1].end <= op.start:
            around.pop()
        if around:
            op.parent = around[-1]
            op.scopes = around[-1].scopes | {around[-1].type}
            op.outer = next((outer for outer in reversed(around) if outer.type == op.type), None)
            if op.outer is not None:
                op.outer.is_leaf = False
        around.append(op)
    return ops


def _collective(op: TracedOp) -> CollectiveCall:
    """From the arguments of the record first, then from the shapes of the call around it."""
    args = op.args
    outer = op.outer if op.outer is not None and op.name == "record_param_comms" else op
    recorded = args.collective if isinstance(args.collective, str) else ""
    if recorded in ("wait", "barrier_wait"):
        return CollectiveCall("", -1, -1, -1)
    name = collective_name(recorded) or (collective_name(outer.name) if outer.name != "record_param_comms" else "")
    sent, received = _integer(args.elements_in), _integer(args.elements_out)
    if sent <= 0:
        sent, received = _elements(name, outer.shapes)
    size = _integer(args.group_size)
    if size <= 0 and name in ("all_gather", "reduce_scatter") and 0 < min(sent, received) < max(sent, received):
        size = max(sent, received) // min(sent, received)
    peer = max(_integer(args.source), _integer(args.destination))
    return CollectiveCall(name, sent, received, size, peer, rank_list(args.ranks))


def _elements(name: str, shapes: list[Shape]) -> tuple[int, int]:
    """(in, out) of a c10d call, whose output comes first."""
    sizes = [prod(shape) for shape in shapes if shape]
    if not sizes:
        return -1, -1
    if name in ("all_gather", "reduce_scatter") and len(sizes) > 1:
        return sizes[1], sizes[0]
    return sum(sizes), sum(sizes)


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else -1
