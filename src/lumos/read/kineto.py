"""Reads one Kineto file (PyTorch's profiler) as the Trace of one rank.

Field types are permissive on purpose: real files hold strings in place of numbers, and the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from lumos.errors import InputError
from lumos.read.formats import available_bytes, refuse_events
from lumos.read.json_slices import CannotShareError, Slices
from lumos.trace.messages import message_name
from lumos.trace.names import CATEGORIES, GPU_CATEGORIES, Category
from lumos.trace.trace import Allocations, Arguments, Header, Lane, Message, Syncs, Trace

Array = np.ndarray[Any, np.dtype[Any]]
_CODES = {name: int(category) for name, category in CATEGORIES.items()}  # plain integers: this is the inner loop
MOST_RANKS = 1 << 24  # of a job; what claims to be more is no rank
_ON_STREAM = np.array([*GPU_CATEGORIES, Category.SYNC], np.uint8)


class _Args(msgspec.Struct, gc=False):
    """The arguments of an event that the graph needs."""

    correlation: Any = msgspec.field(default=-1)
    stream: Any = msgspec.field(default=None)
    device: Any = msgspec.field(default=None)
    collective: Any = msgspec.field(default=None, name="Collective name")
    dtype: Any = msgspec.field(default="", name="dtype")
    in_elements: Any = msgspec.field(default=-1, name="In msg nelems")
    out_elements: Any = msgspec.field(default=-1, name="Out msg nelems")
    group_size: Any = msgspec.field(default=-1, name="Group size")
    group: Any = msgspec.field(default="", name="Process Group Name")
    group_ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    sequence: Any = msgspec.field(default=-1, name="Seq")
    source: Any = msgspec.field(default=-1, name="Src Rank")
    destination: Any = msgspec.field(default=-1, name="Dst Rank")
    wait_stream: Any = msgspec.field(default=-1, name="wait_on_stream")
    record: Any = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    event: Any = msgspec.field(default=-1, name="wait_on_cuda_event_id")


_ABSENT = msgspec.Raw(b"")


class _OpArgs(_Args, gc=False):
    """With those of operators as they are written, since few of them differ, and what an allocator held."""

    shapes: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input type")
    strides: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input Strides")
    values: msgspec.Raw = msgspec.field(default=_ABSENT, name="Concrete Inputs")
    autograd: Any = msgspec.field(default=-1, name="Sequence number")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    allocator: Any = msgspec.field(default=0, name="Device Type")


class _Event(msgspec.Struct, gc=False):
    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = 0
    args: Any = None


def _event_type(args: type[_Args], exact: bool) -> type[_Event]:
    """An event of which only these arguments are decoded: several times faster than a dictionary.

    With `exact`, it has the digits of its time, for files that write epoch times as 1712195495519689.047.
    """
    known: Any = args | str | int | float | bool | list[Any] | None
    digits = [("ts", msgspec.Raw, msgspec.Raw(b"null"))] if exact else []
    found: Any = msgspec.defstruct("_TypedEvent", [*digits, ("args", known, None)], bases=(_Event,), gc=False)
    return cast(type[_Event], found)


class _NeedsDigitsError(Exception):
    """A time has more digits than a float64 holds."""


def read_kineto(path: Path, share: tuple[int, int] = (0, 1), operators: bool = True) -> Trace:
    """The trace in one file, or a share of it; its rank is that of the header, -1 if the header has none.

    With `operators`, it has what operators were called with and what allocators held, which the graph does not need.
    """
    try:
        return _read(path, share, operators, exact=False)
    except _NeedsDigitsError:  # known from the first slice, as a rule
        return _read(path, share, operators, exact=True)


def read_share(operators: bool, share: tuple[Path, int, int]) -> Trace | None:
    """A chunk of a job: (file, which share, of how many); None if the file can only be read as a whole."""
    path, index, count = share
    try:
        return read_kineto(path, (index, count), operators)
    except CannotShareError:
        return None
    except MemoryError:
        raise InputError(f"{path}: out of memory; read fewer ranks with --match, or record fewer steps") from None


def _read(path: Path, share: tuple[int, int], operators: bool, exact: bool) -> Trace:
    slices = Slices(path, _event_type(_OpArgs if operators else _Args, exact), share)
    columns, free, read = _Columns(operators), available_bytes(), 0
    columns.add([])  # a share may hold nothing
    for events in slices:
        columns.add(events)
        read += len(columns.parts[-1][0]) * share[1]
        refuse_events(path, read, free, slices.portion)
        del events  # before the next slice is decoded
    header = _header(slices.header, path)
    warnings = [f"{path.name}: {note}" for note in dict.fromkeys(slices.notes)]
    if columns.refused:
        warnings.append(f"{path.name}: {columns.refused} events have no usable time and were left out")
    return columns.trace(header, _base_time(slices.header), warnings, share[1] == 1)


_NO_ARGS, _MEMORY = _Args(), "[memory]"
Key = TypeVar("Key")


class _Numbers(dict[Key, int]):
    """Numbers keys in the order in which they are first asked for."""

    def __missing__(self, key: Key) -> int:
        number = self[key] = len(self)
        return number


class _LaneNumbers(dict[tuple[bool, Any, Any], int]):
    """Numbers lanes by their keys in the file; different spellings may be one lane."""

    def __init__(self, lanes: dict[tuple[bool, str, str], int]) -> None:
        super().__init__()
        self.lanes = lanes

    def __missing__(self, key: tuple[bool, Any, Any]) -> int:
        is_stream, process, label = key
        text = _text(label).removeprefix("stream").strip() if is_stream else _text(label)
        number = self[key] = self.lanes.setdefault((is_stream, _text(process), text), len(self.lanes))
        return number


class _Columns:
    """Collects events slice by slice into arrays."""

    def __init__(self, operators: bool) -> None:
        self.operators = operators
        self.names: _Numbers[str] = _Numbers()
        self.lanes: dict[tuple[bool, str, str], int] = {}
        self.lane_of = _LaneNumbers(self.lanes)
        self.messages: dict[Message, int] = {}
        self.arguments: _Numbers[tuple[bytes, ...]] = _Numbers()
        self.parts: list[tuple[Array, ...]] = []
        self.syncs: list[tuple[int, ...]] = []
        self.allocations = [_allocations([])]
        self.refused = 0

    def add(self, events: list[_Event]) -> None:
        """Append the spans of one slice, column by column: a step through all events for each costs the least."""
        kept = [e for e in events if e.ph == "X" and type(e.cat) is str and e.cat in _CODES]
        category = np.array([_CODES[e.cat] for e in kept], np.uint8)
        args = [e.args if isinstance(e.args, _Args) else _NO_ARGS for e in kept]
        start, ok_start = _nanoseconds([e.ts for e in kept], _LATEST)
        duration, ok_duration = _nanoseconds([e.dur for e in kept], _LONGEST)
        ok = ok_start & ok_duration & (duration >= 0)
        self.refused += int((~ok).sum())
        lane = self._lanes(kept, args, category)
        correlation = _integers([a.correlation for a in args])
        message = np.full(len(kept), -1, np.int32)
        for i in [i for i, a in enumerate(args) if a.collective is not None]:
            message[i] = self._message(args[i])
        is_sync = category == Category.SYNC
        for i in np.flatnonzero(is_sync).tolist():
            a = args[i]
            self.syncs.append((int(correlation[i]), *map(_integer, (a.stream, a.wait_stream, a.record, a.event))))
        columns = [category, self._names(kept), lane, start, duration, correlation, message]
        if self.operators:
            columns += self._called(args)
            self.allocations.append(_allocations([e for e in events if e.name == _MEMORY and type(e.args) is _OpArgs]))
        self.parts.append(tuple(column[ok & ~is_sync] for column in columns))

    def _called(self, args: list[Any]) -> tuple[Array, Array]:
        """The columns `argument` and `sequence`."""
        argument = np.full(len(args), -1, np.int32)
        called = [(i, a) for i, a in enumerate(args) if a is not _NO_ARGS and a.shapes]
        texts = [(bytes(a.shapes), bytes(a.types), bytes(a.strides), bytes(a.values)) for _, a in called]
        argument[[i for i, _ in called]] = list(map(self.arguments.__getitem__, texts))
        sequence = _integers([-1 if a is _NO_ARGS else a.autograd for a in args], 1 << 31)
        return argument, sequence.astype(np.int32)

    def _names(self, kept: list[_Event]) -> Array:
        names = [e.name if type(e.name) is str else str(e.name) for e in kept]
        return np.array(list(map(self.names.__getitem__, names)), np.int32)

    def _lanes(self, kept: list[_Event], args: list[_Args], category: Array) -> Array:
        """The lane of every event: its stream, by its arguments or else by its process and thread; or its thread."""
        keys: list[tuple[bool, Any, Any]] = [(False, e.pid, e.tid) for e in kept]
        for i in np.flatnonzero(np.isin(category, _ON_STREAM)).tolist():
            event, a = kept[i], args[i]
            device, stream = event.pid if a.device is None else a.device, event.tid if a.stream is None else a.stream
            keys[i] = (True, device, stream)
        try:
            return np.array(list(map(self.lane_of.__getitem__, keys)), np.int32)
        except TypeError:  # a list or an object in place of a number
            return np.array([self.lane_of[s, _text(p), _text(t)] for s, p, t in keys], np.int32)

    def _message(self, args: _Args) -> int:
        name = message_name(_text(args.collective))
        if not name:
            return -1
        message = Message(
            collective=name, dtype=_text(args.dtype),
            in_elements=_integer(args.in_elements), out_elements=_integer(args.out_elements), group=_text(args.group),
            group_size=_rank(args.group_size), ranks=rank_list(args.group_ranks), sequence=_integer(args.sequence),
            source=_rank(args.source), destination=_rank(args.destination),
        )  # fmt: skip
        return self.messages.setdefault(message, len(self.messages))

    def trace(self, header: Header, base: int, warnings: list[str], whole: bool) -> Trace:
        """All slices as one Trace."""
        columns: list[Any] = list(zip(*self.parts, strict=True))
        self.parts.clear()
        for place, column in enumerate(columns):
            columns[place] = np.concatenate(column)  # its slices are freed before the next column is joined
        category, name, lane, start, duration, correlation, message, *called = columns
        if len(category) == 0 and whole:
            raise InputError(
                f"{header.path}: no operator, runtime call or kernel in it; record with "
                "torch.profiler.profile(activities=[CPU, CUDA])"
            )
        syncs = np.array(self.syncs, np.int64).reshape(-1, 5)
        at, held = (np.concatenate(column) for column in zip(*self.allocations, strict=True))
        return Trace(
            names=tuple(self.names), lanes=tuple(Lane(header.rank, *key) for key in self.lanes),
            messages=tuple(self.messages), headers=(header,), category=category, name=name, lane=lane,
            start=start + base, duration=duration, correlation=correlation, message=message,
            syncs=Syncs(np.zeros(len(syncs), np.int32), *(np.ascontiguousarray(c) for c in syncs.T)),
            warnings=tuple(warnings), arguments=tuple(starmap(Arguments, self.arguments)) if self.operators else None,
            allocations=Allocations(np.zeros(len(at), np.int32), at + base, held),
            **dict(zip(("argument", "sequence"), called, strict=False)),
        )  # fmt: skip


# Sums and differences of times must fit an int64 of nanoseconds: moments up to 2049, a base up to 2096, spans of a day.
_LATEST = 2.5e15
_LATEST_BASE = 4_000_000_000_000_000_000
_LONGEST = 1e11
_MOST_MEMORY = 1 << 48  # bytes of a GPU
_EXACT = 2.0**43  # microseconds: above, a float64 does not tell nanoseconds apart


def _nanoseconds(micros: list[Any], most: float) -> tuple[Array, Array]:
    """Microseconds to integer nanoseconds, and which are usable; float64 cannot hold epoch nanoseconds."""
    digits: list[str] = []
    if micros and isinstance(micros[0], msgspec.Raw):
        micros = digits = [bytes(raw).strip(b'"').decode(errors="replace") for raw in micros]
    values = _array(micros, np.float64, _number)
    with np.errstate(invalid="ignore"):
        ok = np.isfinite(values) & (np.abs(values) <= most)
    if digits:
        exact = [round(Decimal(d) * 1000) if good else 0 for d, good in zip(digits, ok.tolist(), strict=True)]
        return np.array(exact, np.int64), ok
    values = np.where(ok, values, 0.0)
    whole = np.floor(values)
    if np.abs(values).max(initial=0.0) >= _EXACT and any(type(v) is not int for v in micros):
        raise _NeedsDigitsError
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64), ok


def _allocations(events: list[Any]) -> tuple[Array, Array]:
    """When, and how many bytes, the allocators of GPUs held; device type 0 is the host."""
    on_gpu = [event for event in events if event.args.allocator not in (0, None)]
    at, ok = _nanoseconds([event.ts for event in on_gpu], _LATEST)
    held = _array([event.args.allocated for event in on_gpu], np.float64, _number)
    ok &= (held >= 0) & (held < _MOST_MEMORY)
    return at[ok], held[ok]


def _array(values: list[Any], dtype: Any, convert: Callable[[Any], Any]) -> Array:
    """Numbers as an array; if anything among them is none, each is converted by itself."""
    try:
        array = np.array(values, dtype)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros(0, dtype)
    return array if array.shape == (len(values),) else np.array([convert(v) for v in values], dtype)


def _integers(values: list[Any], most: int = 1 << 62) -> Array:
    """Correlation ids and the like as int64; -1 for values that are none."""
    numbers = _array(values, np.int64, _integer)
    return np.where((numbers >= -1) & (numbers < most), numbers, -1)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _integer(value: Any) -> int:
    """An int64 from any value; -1 if it is none. 2**32-1 is CUPTI's "all streams"."""
    number = _number(value)
    if not abs(number) < 2**62:
        return -1
    integer = value if isinstance(value, int) else int(number)
    return -1 if integer == 4294967295 else int(integer)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def rank_list(value: Any) -> tuple[int, ...]:
    """The tuple of "[0, 1, 2, 3]" or of a list; of "[0, 1, ..., 7]" (PyTorch's abbreviation) the empty one."""
    text = _text(value)
    return () if "..." in text else tuple(map(whole_number, re.findall(r"\d+", text)))


def _base_time(header: dict[str, Any]) -> int:
    base = header.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int) and 0 <= base < _LATEST_BASE else 0


def whole_number(digits: str | bytes, most: int = MOST_RANKS) -> int:
    """The number that digits spell; -1 for one that is too large to be a rank or a count of ranks."""
    number = int(digits) if len(digits) < 20 else most
    return number if number < most else -1


def _rank(value: Any) -> int:
    """A rank or a number of ranks; -1 if it is none."""
    number = _integer(value)
    return number if 0 <= number < MOST_RANKS else -1


def _header(found: dict[str, Any], path: Path) -> Header:
    distributed, devices = found.get("distributedInfo"), found.get("deviceProperties")
    info = distributed if isinstance(distributed, dict) else {}
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    return Header(
        rank=_rank(info.get("rank")), path=str(path), world_size=_rank(info.get("world_size")),
        gpu=_text(first.get("name", "")), job=_text(found.get("traceName", "")),
        shapes=bool(found.get("record_shapes", 0)), stacks=bool(found.get("with_stack", 0)),
        backend=_text(info.get("backend") or ""), shapes_left_out=bool(found.get("lumosShapesLeftOut", 0)),
    )  # fmt: skip
