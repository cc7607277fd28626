"""Shapes: the operators of one rank's step that tell of its setup, with the sizes they were recorded with.

The graph needs no sizes, so a Trace has none: they are read from the file once more, of the few operators that tell.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lumos.errors import LumosError
from lumos.trace.names import CATEGORIES, Category, collective_name
from lumos.trace.read.json_slices import Slices

Dims = tuple[int, ...]
_LONGEST_LIST = 4096  # tensors of one operator that are looked at
_LARGEST = 1 << 48  # what is larger is no size


class What(IntEnum):
    """What an operator or a scope tells of."""

    PRODUCT = 1
    BATCHED = 2  # products of an attention that is not fused
    ATTENTION = 3
    LOSS = 4
    EMBEDDING = 5
    GRADIENT = 6  # of one parameter
    COMM = 7
    ENGINE = 8  # a scope: the backward pass
    OPTIMIZER = 9  # a scope
    SHARDED = 10  # a scope of FSDP
    REPLICATED = 11  # a scope of DDP
    STEP = 12
    COMPILED = 13


_PATTERNS: tuple[tuple[What, re.Pattern[str]], ...] = (
    (What.PRODUCT, re.compile(r"aten::(mm|addmm|_scaled_mm)$")),
    (What.BATCHED, re.compile(r"aten::(bmm|baddbmm)$")),
    (What.ATTENTION, re.compile(r"aten::_?scaled_dot_product(_flash|_efficient|_cudnn)?_attention$")),
    (What.ATTENTION, re.compile(r"(flash_attn(_[23])?::_?)(flash_attn_)?(varlen_)?(forward|fwd)$|FlashAttn\w*Func$")),
    (What.LOSS, re.compile(r"aten::nll_loss_forward$")),
    (What.EMBEDDING, re.compile(r"aten::embedding$")),
    (What.GRADIENT, re.compile(r"torch::autograd::AccumulateGrad$")),
    (What.COMM, re.compile(r"(_?c10d(_functional)?::(?!wait|_wrap|barrier)|record_param_comms$)")),
    (What.ENGINE, re.compile(r"autograd::engine::evaluate_function")),
    (What.OPTIMIZER, re.compile(r"Optimizer\.step#")),
    (What.SHARDED, re.compile(r"FSDP::|FullyShardedDataParallel\.")),
    (What.REPLICATED, re.compile(r"DistributedDataParallel\.forward")),
    (What.STEP, re.compile(r"ProfilerStep\s*#")),
    (What.COMPILED, re.compile(r"triton_(poi|red|per)_fused|Torch-Compiled Region|CompiledFunction|## Call Compiled")),
)
_KEPT = frozenset({Category.OP, Category.NOTE})


class _Args(msgspec.Struct, gc=False):
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")
    collective: Any = msgspec.field(default="", name="Collective name")
    inward: Any = msgspec.field(default=-1, name="In msg nelems")
    outward: Any = msgspec.field(default=-1, name="Out msg nelems")
    group_size: Any = msgspec.field(default=-1, name="Group size")
    source: Any = msgspec.field(default=-1, name="Src Rank")
    destination: Any = msgspec.field(default=-1, name="Dst Rank")
    ranks: Any = msgspec.field(default="", name="Process Group Ranks")


class _Event(msgspec.Struct, gc=False):
    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    tid: Any = None
    ts: Any = None
    dur: Any = 0
    args: _Args | str | int | float | bool | list[Any] | None = None


class Message(NamedTuple):
    """What is known of one collective call; -1 where nothing is."""

    collective: str
    inward: int  # elements
    outward: int
    group_size: int
    peer: int  # the other rank of a point-to-point call


@dataclass
class Op:
    """One operator, and inside what it ran."""

    what: What
    name: str
    start: float
    end: float
    dims: list[Dims]
    dtype: str
    args: _Args
    scopes: set[What] = field(default_factory=set)
    whole: Op | None = None  # the same kind of operator around this one: a DTensor's, of the sizes of all shards
    is_leaf: bool = True  # no operator of the same kind inside

    @property
    def backward(self) -> bool:
        return What.ENGINE in self.scopes

    @property
    def forward(self) -> bool:
        return not self.scopes & {What.ENGINE, What.OPTIMIZER}


@dataclass(frozen=True)
class RankOps:
    """The telling operators of one rank in one step, in the order of their calls."""

    rank: int
    ops: tuple[Op, ...]
    is_one_step: bool  # and not a capture of several that are not marked

    def of(self, *what: What) -> list[Op]:
        """Innermost operators of a kind."""
        return [op for op in self.ops if op.what in what and op.is_leaf]

    @cached_property
    def messages(self) -> list[tuple[Op, Message]]:
        """Every collective call with what its record inside says of it."""
        calls = [op for op in self.ops if op.what == What.COMM and op.is_leaf]
        found = [(op, _message(op, self.rank)) for op in calls]
        return [(op, message) for op, message in found if message.collective]


def read_ops(path: Path, rank: int, step: str) -> RankOps:
    """The telling operators of a file in the step of that name; none where the file is no Kineto trace."""
    by_thread: dict[str, list[Op]] = defaultdict(list)
    known: dict[str, What | None] = {}
    try:
        for events in Slices(path, _Event):
            for event in events:
                op = _read(event, known)
                if op is not None:
                    by_thread[str(event.tid)].append(op)
    except LumosError:
        by_thread.clear()
    every = [op for ops in by_thread.values() for op in _nested(ops)]
    every.sort(key=lambda op: op.start)
    mark = next((op for op in every if op.what == What.STEP and op.name == step), None)
    if mark is None:
        return RankOps(rank, tuple(every), _is_one_step(every))
    return RankOps(rank, tuple(op for op in every if mark.start <= op.start < mark.end), True)


def _is_one_step(ops: list[Op]) -> bool:
    """Without marks: one update, and no forward pass after it."""
    updates = [op.start for op in ops if op.what == What.OPTIMIZER]
    return len(updates) == 1 and not any(op.what == What.ATTENTION and op.start > updates[0] for op in ops)


def _read(event: _Event, known: dict[str, What | None]) -> Op | None:
    if event.ph != "X" or CATEGORIES.get(event.cat if isinstance(event.cat, str) else "") not in _KEPT:
        return None
    name = event.name if isinstance(event.name, str) else ""
    if name not in known:
        known[name] = next((what for what, pattern in _PATTERNS if pattern.match(name)), None)
    what = known[name]
    if what is None or not isinstance(event.ts, int | float) or not isinstance(event.dur, int | float):
        return None
    args = event.args if isinstance(event.args, _Args) else _Args()
    types = args.types if isinstance(args.types, list) else []
    dtype = next((t for t in types if isinstance(t, str) and t and t not in _NO_TENSOR), "")
    return Op(what, name, float(event.ts), float(event.ts) + float(event.dur), _dims(args.dims), dtype, args)


_NO_TENSOR = frozenset({"Scalar", "ScalarList", "TensorList"})


def _dims(told: Any) -> list[Dims]:
    """Sizes of the inputs; of a list of tensors, those of its tensors one after another, a number being one element."""
    found: list[Dims] = []
    for item in told[:_LONGEST_LIST] if isinstance(told, list) else []:
        if isinstance(item, list) and item and all(isinstance(part, list) for part in item):
            found += [_sizes(part) or (1,) for part in item[:_LONGEST_LIST]]
        else:
            found.append(_sizes(item))
    return found


def _sizes(told: Any) -> Dims:
    usable = isinstance(told, list) and all(isinstance(size, int) and 0 < size < _LARGEST for size in told)
    return tuple(told) if usable else ()


def _nested(ops: list[Op]) -> Iterable[Op]:
    """Operators of one thread, with the scopes around each."""
    ops.sort(key=lambda op: (op.start, -op.end))
    around: list[Op] = []
    for op in ops:
        while around and around[-1].end <= op.start:
            around.pop()
        if around:
            op.scopes = around[-1].scopes | {around[-1].what}
            same = next((outer for outer in reversed(around) if outer.what == op.what), None)
            if same is not None:
                same.is_leaf, op.whole = False, same
        around.append(op)
    return ops


def _message(op: Op, rank: int) -> Message:
    """Of a collective: the record's own words first, then the sizes of the call around it."""
    args = op.args
    outer = op.whole if op.whole is not None and op.name == "record_param_comms" else op
    told = args.collective if isinstance(args.collective, str) else ""
    if told in ("wait", "barrier_wait"):
        return Message("", -1, -1, -1, -1)
    name = collective_name(told) or (collective_name(outer.name) if outer.name != "record_param_comms" else "")
    inward, outward = _integer(args.inward), _integer(args.outward)
    if inward <= 0:
        inward, outward = _elements(name, outer.dims)
    size = _integer(args.group_size)
    if size <= 0 and name in ("all_gather", "reduce_scatter") and 0 < min(inward, outward) < max(inward, outward):
        size = max(inward, outward) // min(inward, outward)
    return Message(name, inward, outward, size, _peer(args, rank))


def _peer(args: _Args, rank: int) -> int:
    """The other rank of a point-to-point call, recorded as its place in the group; -1 where it is not clear."""
    place = max(_integer(args.source), _integer(args.destination))
    group = [int(r) for r in re.findall(r"\d{1,9}", str(args.ranks))] if "..." not in str(args.ranks) else []
    return group[place] if 0 <= place < len(group) and group[place] != rank else -1


def _elements(name: str, dims: list[Dims]) -> tuple[int, int]:
    """What goes in and out, of the sizes of a c10d call: what comes out stands first."""
    sizes = [_count(part) for part in dims if part]
    if not sizes:
        return -1, -1
    if name in ("all_gather", "reduce_scatter") and len(sizes) > 1:
        return sizes[1], sizes[0]
    return sum(sizes), sum(sizes)


def _count(dims: Dims) -> int:
    total = 1
    for size in dims:
        total *= size
    return total


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else -1
