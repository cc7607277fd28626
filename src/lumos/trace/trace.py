"""Trace: what happened, as numpy columns, one row an event.

What is read from a file and what comes out of the simulator are the same type. Times are integer nanoseconds.

    row  category  name (→ names)      lane (→ lanes)          start  duration  correlation  message (→ messages)
    0    NOTE      ProfilerStep#2      rank 0, thread 400          0     67426           -1           -1
    1    OP        aten::linear        rank 0, thread 400        215       120           -1           -1
    2    CALL      cudaLaunchKernel    rank 0, thread 400        290         8        37659           -1
    3    KERNEL    nvjet_sm90_…        rank 0, stream 7          301        57        37659           -1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.trace.names import (
    GPU_CATEGORIES,
    HOST_CATEGORIES,
    CallKind,
    Category,
    Kind,
    call_kind,
    collective_name,
    is_communication,
)

Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Bools = NDArray[np.bool_]
Rows = NDArray[np.int64]


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
    """What is known of the communication behind an event; -1 and '' where the trace does not say."""

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


class Header(NamedTuple):
    """What a file says of itself."""

    rank: int
    path: str
    world_size: int = -1
    gpu: str = ""
    job: str = ""
    shapes: bool = False
    stacks: bool = False
    backend: str = ""


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
class Trace:
    """A run as columns; see the module's picture."""

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

    def __len__(self) -> int:
        return len(self.start)

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
        return self.is_any(GPU_CATEGORIES)

    @cached_property
    def on_host(self) -> Bools:
        return self.is_any(HOST_CATEGORIES)

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
        named = np.array([is_communication(n) for n in self.names], bool)
        told = self.message >= 0
        kernel = self.category == Category.KERNEL
        return np.asarray(kernel & (told | (named[self.name] if len(named) else False)), bool)

    @cached_property
    def call(self) -> NDArray[np.uint8]:
        """The CallKind of every row; PLAIN for what is no call."""
        by_name = np.array([call_kind(n) for n in self.names], np.uint8)
        kinds = by_name[self.name] if len(by_name) else np.zeros(0, np.uint8)
        return np.where(self.category == Category.CALL, kinds, CallKind.PLAIN).astype(np.uint8)

    def collective_of(self, row: int) -> str:
        """The collective behind a communication row."""
        message = int(self.message[row])
        told = self.messages[message].collective if message >= 0 else ""
        return told or collective_name(self.names[self.name[row]]) or "communication"

    def rows_by_rank(self, which: Bools) -> dict[int, Rows]:
        """The rows of a mask, apart for every rank."""
        rows = np.flatnonzero(which)
        rows = rows[np.argsort(self.rank[rows], kind="stable")]
        bounds = np.searchsorted(self.rank[rows], [*self.ranks, np.iinfo(np.int32).max])
        return {rank: rows[bounds[i] : bounds[i + 1]] for i, rank in enumerate(self.ranks)}

    def select(self, rows: Bools) -> Trace:
        """The trace of these rows alone."""
        columns = {c: getattr(self, c)[rows] for c in _COLUMNS}
        return replace(self, **columns)

    def with_times(self, start: Ints, duration: Ints) -> Trace:
        """The same events at other times; what does not depend on times is not worked out again."""
        trace = replace(self, start=start, duration=duration)
        for name in ("lane_rank", "rank", "on_gpu", "on_host", "kind", "is_communication", "call"):
            if name in self.__dict__:
                trace.__dict__[name] = self.__dict__[name]
        return trace

    def shifted(self, offset_of_rank: dict[int, int]) -> Trace:
        """The same events with every rank's clock moved by its offset."""
        offsets = np.array([offset_of_rank.get(lane.rank, 0) for lane in self.lanes], np.int64)
        return replace(self, start=self.start + offsets[self.lane])


_COLUMNS = ("category", "name", "lane", "start", "duration", "correlation", "message")


def concatenate(traces: Sequence[Trace]) -> Trace:
    """The ranks of one job, or the shares of one file, as one trace; lanes that are the same become one."""
    if len(traces) == 1:
        return traces[0]
    names: dict[str, int] = {}
    messages: dict[Message, int] = {}
    lanes: dict[Lane, int] = {}
    parts: list[dict[str, Any]] = []
    sync_lanes: list[Small] = []
    for trace in traces:
        to_name = np.array([names.setdefault(n, len(names)) for n in trace.names] or [0], np.int32)
        to_message = np.array([messages.setdefault(m, len(messages)) for m in trace.messages] + [-1], np.int32)
        to_lane = np.array([lanes.setdefault(lane, len(lanes)) for lane in trace.lanes] or [0], np.int32)
        columns = {c: getattr(trace, c) for c in _COLUMNS}
        columns["name"] = to_name[trace.name]
        columns["message"] = to_message[trace.message]  # -1 picks the last entry, which is -1
        columns["lane"] = to_lane[trace.lane]
        parts.append(columns)
        sync_lanes.append(to_lane[trace.syncs.lane])
    syncs = {c: np.concatenate([getattr(t.syncs, c) for t in traces]) for c in _SYNC_COLUMNS}
    return Trace(
        names=tuple(names),
        lanes=tuple(lanes),
        messages=tuple(messages),
        headers=tuple(h for t in traces for h in t.headers),
        syncs=Syncs(lane=np.concatenate(sync_lanes), **syncs),
        warnings=tuple(dict.fromkeys(w for t in traces for w in t.warnings)),
        **{c: np.concatenate([p[c] for p in parts]) for c in _COLUMNS},
    )


_SYNC_COLUMNS = ("correlation", "stream", "wait_stream", "record", "event")
