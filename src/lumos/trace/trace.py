"""Trace: the events of a run as numpy columns, one row an event.

Recorded and simulated runs are the same type. Times are integer nanoseconds.

    row  category  name (→ names)      lane (→ lanes)          start  duration  correlation  message (→ messages)
    0    NOTE      ProfilerStep#2      rank 0, thread 400          0     67426           -1           -1
    1    OP        aten::linear        rank 0, thread 400        215       120           -1           -1
    2    CALL      cudaLaunchKernel    rank 0, thread 400        290         8        37659           -1
    3    KERNEL    nvjet_sm90_…        rank 0, stream 7          301        57        37659           -1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lumos.trace import names as vocabulary
from lumos.trace.names import CallKind, Category, Kind

Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.int64]


def _unknown() -> Small:
    return np.zeros(0, np.int32)


class Lane(NamedTuple):
    """Something that does one thing at a time: a CPU thread or a GPU stream of one rank."""

    rank: int
    is_stream: bool
    process: str
    label: str

    @property
    def text(self) -> str:
        return f"{'stream' if self.is_stream else 'thread'} {self.label}"


class Message(NamedTuple):
    """The communication behind an event; -1 and '' for what the trace does not say."""

    collective: str
    dtype: str = ""
    in_elements: int = -1
    out_elements: int = -1
    group: str = ""
    group_size: int = -1
    ranks: tuple[int, ...] = ()
    sequence: int = -1
    source: int = -1
    destination: int = -1

    @property
    def has_peer(self) -> bool:
        """Whether it is a send or a receive."""
        return self.collective in ("send", "recv")

    @property
    def peer(self) -> int:
        """Of a send or a receive; -1 if it was not recorded."""
        return self.destination if self.collective == "send" else self.source


class Arguments(NamedTuple):
    """What an operator was called with, as the JSON texts of the profiler; '' for what it did not record."""

    shapes: bytes
    types: bytes
    strides: bytes
    values: bytes


class Header(NamedTuple):
    """The header of a file."""

    rank: int
    path: str
    world_size: int = -1
    gpu: str = ""
    job: str = ""
    shapes: bool = False
    stacks: bool = False
    backend: str = ""
    shapes_left_out: bool = False  # they were recorded, and are not in this file
    profiled: bool = True  # whether its times include what a profiler costs
    is_graph: bool = False  # it says what waits for what and not when it ran; all ranks begin together

    @property
    def has_shapes(self) -> bool:
        return self.shapes and not self.shapes_left_out


@dataclass(frozen=True)
class Syncs:
    """Details of synchronising calls, one row each; -1 where unknown."""

    lane: Small  # any lane of the rank
    correlation: Ints  # of the call
    stream: Ints  # the stream that waits, or is waited for by the CPU
    wait_stream: Ints  # Stream Wait Event: the stream that is waited for
    record: Ints  # correlation of the cudaEventRecord that is waited for
    event: Ints

    @staticmethod
    def empty() -> Syncs:
        none = np.zeros(0, np.int64)
        return Syncs(none.astype(np.int32), none, none, none, none, none)


@dataclass(frozen=True)
class Allocations:
    """What the allocators of GPUs held, one row per event, in the order of the file."""

    lane: Small  # any lane of the rank
    time: Ints
    bytes: Floats

    @staticmethod
    def empty() -> Allocations:
        return Allocations(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, repr=False)
class Trace:
    """A run as columns, as drawn at the top of this module.

    trace = read_job(Path("traces"))
    trace.duration[trace.is_communication].sum()  # nanoseconds of communication over all ranks
    """

    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    messages: tuple[Message, ...]
    headers: tuple[Header, ...]
    category: NDArray[np.uint8]
    name: Small
    lane: Small
    start: Ints
    duration: Ints
    correlation: Ints
    message: Small
    syncs: Syncs = field(default_factory=Syncs.empty)
    warnings: tuple[str, ...] = ()
    arguments: tuple[Arguments, ...] | None = None  # of operators, each once; None if they were not read
    argument: Small = field(default_factory=_unknown)  # the place in `arguments`; -1 where none were recorded
    sequence: Small = field(default_factory=_unknown)  # autograd's number of the call, which its backward node repeats
    allocations: Allocations = field(default_factory=Allocations.empty)

    def __post_init__(self) -> None:
        for name in ("argument", "sequence"):
            if len(getattr(self, name)) != len(self):  # a trace of another source: a column that takes no memory
                object.__setattr__(self, name, np.broadcast_to(np.int32(-1), len(self)))

    def __len__(self) -> int:
        return len(self.start)

    def __repr__(self) -> str:
        return f"Trace({len(self.ranks)} ranks, {len(self):,} events)"

    @cached_property
    def end(self) -> Ints:
        return self.start + self.duration

    @property
    def ranks(self) -> list[int]:
        return sorted({h.rank for h in self.headers})

    @cached_property
    def lane_rank(self) -> Small:
        """The rank of every lane."""
        return np.array([lane.rank for lane in self.lanes], np.int32)

    @cached_property
    def rank(self) -> Small:
        return self.lane_rank[self.lane] if len(self.lanes) else np.zeros(0, np.int32)

    def is_any(self, categories: Iterable[Category]) -> Bools:
        """Rows of any of these categories."""
        return np.isin(self.category, np.array(list(categories), np.uint8))

    @cached_property
    def on_gpu(self) -> Bools:
        return self.is_any(vocabulary.GPU_CATEGORIES)

    @cached_property
    def on_host(self) -> Bools:
        return self.is_any(vocabulary.HOST_CATEGORIES)

    @cached_property
    def kind(self) -> NDArray[np.uint8]:
        """cpu, compute, comm or copy, for every row."""
        by_category = np.full(max(Category) + 1, Kind.CPU, np.uint8)
        by_category[Category.KERNEL] = Kind.COMPUTE
        by_category[[Category.COPY, Category.SET]] = Kind.COPY
        kinds = by_category[self.category]
        kinds[self.is_communication] = Kind.COMM
        return kinds

    @cached_property
    def is_communication(self) -> Bools:
        named = self._by_name(vocabulary.is_communication)
        return np.asarray((self.category == Category.KERNEL) & ((self.message >= 0) | named), bool)

    def _by_name(self, test: Callable[[str], bool]) -> Bools:
        """Rows whose name passes a test, which is asked once a name."""
        passes = np.array([test(n) for n in self.names], bool)
        return passes[self.name] if len(passes) else np.zeros(len(self), bool)

    @cached_property
    def call(self) -> NDArray[np.uint8]:
        """The CallKind of every row; PLAIN for rows that are no calls."""
        by_name = np.array([vocabulary.call_kind(n) for n in self.names], np.uint8)
        kinds = by_name[self.name] if len(by_name) else np.zeros(0, np.uint8)
        return np.where(self.category == Category.CALL, kinds, CallKind.PLAIN).astype(np.uint8)

    @cached_property
    def launch_row(self) -> Small:
        """For every row on a GPU: the row of the call that launched it, by correlation within the rank; else -1."""
        answer = np.full(len(self), -1, np.int32)
        calls = np.flatnonzero(np.isin(self.call, np.array(vocabulary.LAUNCHING)) & (self.correlation >= 0))
        gpu = np.flatnonzero(self.on_gpu & (self.correlation >= 0))
        if len(calls) == 0 or len(gpu) == 0:
            return answer
        # Correlation ids repeat from process to process; they are at most 2**32 in all traces seen.
        keys = (self.correlation & 0xFFFFFFFF) | (self.rank.astype(np.int64) << 32)
        order = calls[np.argsort(keys[calls], kind="stable")]
        at = np.minimum(np.searchsorted(keys[order], keys[gpu]), len(order) - 1)
        found = keys[order[at]] == keys[gpu]
        answer[gpu[found]] = order[at[found]]
        return answer

    @cached_property
    def is_work(self) -> Bools:
        """Rows on GPUs and of threads that do work; a thread that only polls does none."""
        host = self.on_host
        works = (self.category == Category.OP) | self._by_name(vocabulary.is_step)
        works |= np.isin(self.call, np.array(vocabulary.BLOCKING + vocabulary.LAUNCHING))
        working_lane = np.zeros(len(self.lanes), bool)
        working_lane[self.lane[works & host]] = True
        return np.asarray((host & working_lane[self.lane]) | self.on_gpu, bool)

    def collective_of(self, row: int) -> str:
        """The collective behind a communication row."""
        message = int(self.message[row])
        recorded = self.messages[message].collective if message >= 0 else ""
        return recorded or vocabulary.collective_name(self.names[self.name[row]]) or "communication"

    def rows_by_rank(self, which: Bools) -> dict[int, Rows]:
        """The rows of a mask, by rank."""
        rows = np.flatnonzero(which)
        rows = rows[np.argsort(self.rank[rows], kind="stable")]
        bounds = np.searchsorted(self.rank[rows], [*self.ranks, np.iinfo(np.int32).max])
        return {rank: rows[bounds[i] : bounds[i + 1]] for i, rank in enumerate(self.ranks)}

    def select(self, rows: Bools) -> Trace:
        """The trace of these rows alone."""
        columns = {c: getattr(self, c)[rows] for c in _ALL_COLUMNS}
        return replace(self, **columns)

    def with_times(self, start: Ints, duration: Ints) -> Trace:
        """The same events at other times; cached properties that do not depend on times are kept."""
        trace = replace(self, start=start, duration=duration)
        kept = ("lane_rank", "rank", "on_gpu", "on_host", "kind", "is_communication", "call", "launch_row", "is_work")
        trace.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
        return trace

    def shifted(self, offset_of_rank: dict[int, int]) -> Trace:
        """The same events with every rank's clock moved by its offset."""
        offsets = np.array([offset_of_rank.get(lane.rank, 0) for lane in self.lanes], np.int64)
        moved = replace(self.allocations, time=self.allocations.time + offsets[self.allocations.lane])
        return replace(self, start=self.start + offsets[self.lane], allocations=moved)


COLUMNS = ("category", "name", "lane", "start", "duration", "correlation", "message")  # of a Trace, of every source
_ALL_COLUMNS = (*COLUMNS, "argument", "sequence")


_Item = TypeVar("_Item")
_Rows = TypeVar("_Rows", Syncs, Allocations)
_SPAN_NS = 86_400 * 10**9  # no recording takes longer than a day


def without_strays(trace: Trace) -> Trace:
    """A trace without events that are more than a day from most of the others, and a warning that says so."""
    if len(trace) == 0 or int(trace.start.max()) - int(trace.start.min()) <= _SPAN_NS:
        return trace
    middle = int(np.sort(trace.start)[len(trace) // 2])
    near = np.abs(trace.start - middle) <= _SPAN_NS
    text = f"{(~near).sum():,} events are more than a day from the others and were left out: their times are damaged"
    return replace(trace.select(near), warnings=(*trace.warnings, text))


def concatenate(traces: Sequence[Trace]) -> Trace:
    """The ranks of one job, or the shares of one file, as one trace; equal lanes become one."""
    if len(traces) == 1:
        return traces[0]
    names: dict[str, int] = {}
    messages: dict[Message, int] = {}
    arguments: dict[Arguments, int] = {}
    lanes: dict[Lane, int] = {}
    parts: list[dict[str, Any]] = []
    syncs: list[Syncs] = []
    held: list[Allocations] = []
    for trace in traces:
        to_name, to_lane = _numbered(names, trace.names), _numbered(lanes, trace.lanes)
        to_message, to_argument = _numbered(messages, trace.messages), _numbered(arguments, trace.arguments or ())
        columns = {c: getattr(trace, c) for c in _ALL_COLUMNS}
        columns |= {"name": to_name[trace.name], "lane": to_lane[trace.lane]}
        columns |= {"message": to_message[trace.message], "argument": to_argument[trace.argument]}
        parts.append(columns)
        syncs.append(replace(trace.syncs, lane=to_lane[trace.syncs.lane]))
        held.append(replace(trace.allocations, lane=to_lane[trace.allocations.lane]))
    return Trace(
        names=tuple(names), lanes=tuple(lanes), messages=tuple(messages),
        arguments=None if any(t.arguments is None for t in traces) else tuple(arguments),
        headers=tuple(h for t in traces for h in t.headers), syncs=_joined(syncs), allocations=_joined(held),
        warnings=tuple(dict.fromkeys(w for t in traces for w in t.warnings)),
        **{c: np.concatenate([p[c] for p in parts]) for c in _ALL_COLUMNS},
    )  # fmt: skip


def _numbered(numbers: dict[_Item, int], own: Iterable[_Item]) -> Small:
    """The numbers of a trace's own items among those of all; the last entry, which -1 picks, is -1."""
    return np.array([numbers.setdefault(item, len(numbers)) for item in own] + [-1], np.int32)


def _joined(parts: Sequence[_Rows]) -> _Rows:
    """The rows of several tables as one."""
    names = [column.name for column in fields(parts[0])]
    return type(parts[0])(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
