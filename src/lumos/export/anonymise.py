"""Removes names, paths and times of day from a run, and keeps what its performance depends on.

What passes is decided by what it is, not by what it looks like: numbers of typed columns, and names of a public
vocabulary (`public_names`). Everything else of the files that a run was read from stays behind: arguments, stacks,
modules, hosts, users, environments, comments. The run replays as before, to the nanosecond.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from lumos.data_files import read_table
from lumos.export.hidden_times import with_hidden_times
from lumos.export.public_names import NameMap
from lumos.graph.rules.build import Execution
from lumos.graph.rules.rendezvous import Rendezvous
from lumos.read.execution_trace import Links, Operator, Tensor
from lumos.read.op_columns import OpArguments
from lumos.setup.gpus import gpu_called
from lumos.trace.names import Category
from lumos.trace.trace import Arguments, Header, Lane, Message, Trace

DROPS = {
    "gpu": "the GPU and the generation that its kernels are compiled for",
    "operators": "names of operators; their kinds stay",
    "sizes": "sizes of messages and tensors, and types of messages",
    "times": "the scale of time: all times are multiplied by one secret factor, and blurred by a tick of the clock",
}
KEEPS = {"shapes": "shapes of operators, from which other configurations are predicted, and all sizes of the model"}
_LARGEST_NUMBER = 1000  # of a stream or device that is kept: others may be addresses or processes
_NOTHING = ("[]", "[]", "[]")  # values, shapes and types of an operator
_LARGEST_SIZE = 1 << 62
_DEEPEST = 2  # a list of tensors is a list of shapes
_UNKNOWN = np.zeros(0, np.int32)  # a column that a trace does not have
_VALUES = re.compile(r"-?\d{0,20}\.?\d{0,20}(e[+-]?\d{1,3})?|True|False|\[[-\d., ]{0,400}\]")


@dataclass(frozen=True)
class Anonymised:
    """A run without names, and what happened to them."""

    execution: Execution
    links: Links | None
    kept_names: int
    replaced_names: int
    changed_roles: int  # names whose replacement the analysis reads otherwise: figures may differ


def anonymise(
    execution: Execution, drop: Collection[str] = (), links: Links | None = None, shapes: bool = False
) -> Anonymised:
    """The same run under new names, from time zero; without more of it if `drop` names some of `DROPS`.

    With `shapes`, those of operators are kept.
    """
    names = NameMap(operators="operators" not in drop, generation="gpu" not in drop, types="sizes" not in drop)
    trace = _with_arguments(_with_lanes(_renamed(_renumbered(execution.trace), names)), shapes)
    speak = _Messages(sizes="sizes" not in drop)
    gpus = "gpu" not in drop
    trace = replace(
        trace, headers=tuple(_header(header, gpus) for header in trace.headers),
        messages=tuple(map(speak.of, trace.messages)), warnings=_own(trace.warnings),
    )  # fmt: skip
    renamed = replace(execution, trace=trace, nodes=replace(execution.nodes, trace=trace), before=None)
    moved = with_hidden_times(renamed) if "times" in drop else _from_zero(renamed)
    meetings = [_meeting(meeting, speak) for meeting in execution.rendezvous]
    moved = replace(moved, rendezvous=meetings, warnings=_own(execution.warnings))
    kept = None if links is None else _links(links, "sizes" not in drop)
    return Anonymised(moved, kept, names.kept, names.replaced, names.changed_roles)


# ---------------------------------------------------------------------- names
def _renamed(trace: Trace, names: NameMap) -> Trace:
    """With new names, and only those that occur."""
    used: dict[int, list[Category]] = {}
    for name, category in np.unique(np.stack([trace.name, trace.category.astype(np.int32)], axis=1), axis=0).tolist():
        used.setdefault(name, []).append(Category(category))
    place = np.zeros(len(trace.names) or 1, np.int32)
    place[list(used)] = np.arange(len(used))
    new = tuple(names.of(trace.names[name], within) for name, within in used.items())
    return replace(trace, names=new, name=place[trace.name])


def _header(header: Header, gpus: bool) -> Header:
    """Without the path, the name of the job, and a GPU that is not a known product."""
    gpu, known = gpu_called(header.gpu), read_table("public_names.toml")["backends"]
    backends = dict.fromkeys(part for part in re.split(r"[^a-z]+", header.backend) if part in known)
    name = gpu.name if gpu is not None and gpus else ""
    numbers: dict[str, Any] = {key: value for key, value in header._asdict().items() if isinstance(value, int)}
    return Header(**numbers, path="", gpu=name, backend=",".join(backends))  # no other text passes


def _with_lanes(trace: Trace) -> Trace:
    """Threads and processes are numbered; streams and devices keep their small numbers, which say nothing."""
    processes, threads, streams, devices = (_Numbers() for _ in range(4))
    syncs = {key: getattr(trace.syncs, key).tolist() for key in ("stream", "wait_stream")}
    streams.reserve(lane.label for lane in trace.lanes if lane.is_stream)
    streams.reserve(str(number) for column in syncs.values() for number in column)
    devices.reserve(lane.process for lane in trace.lanes if lane.is_stream)
    lanes = []
    for lane in trace.lanes:
        kind, _, thread = lane.label.rpartition(" ")
        if not lane.is_stream:
            process, label = processes.of(lane.process), threads.of(f"{lane.rank} {lane.process} {lane.label}")
        elif kind in ("cpu", "gloo"):  # what a thread of this process runs
            process, label = processes.of(lane.process), f"{kind} {threads.of(f'{lane.rank} {lane.process} {thread}')}"
        else:
            process, label = devices.of(lane.process), streams.of(lane.label)
        lanes.append(Lane(lane.rank, lane.is_stream, process, label))
    renumbered: dict[str, Any] = {
        key: np.array([int(streams.of(str(number))) if number >= 0 else -1 for number in column], np.int64)
        for key, column in syncs.items()
    }
    return replace(trace, lanes=tuple(lanes), syncs=replace(trace.syncs, **renumbered))


class _Numbers:
    """Numbers for texts, in the order in which they are asked for; small numbers that are reserved stay."""

    def __init__(self) -> None:
        self._new: dict[str, str] = {}
        self._taken: set[str] = set()
        self._count = 0

    def reserve(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text.isascii() and text.isdecimal() and len(text) < 8 and int(text) < _LARGEST_NUMBER:
                self._new[text] = text
                self._taken.add(text)

    def of(self, text: str) -> str:
        while text not in self._new:
            self._count += 1
            if str(self._count) not in self._taken:
                self._new[text] = str(self._count)
        return self._new[text]


class _Messages:
    """New messages: public collectives and types, numbered groups."""

    def __init__(self, sizes: bool) -> None:
        self.sizes = sizes
        self._groups, self._collectives = _Numbers(), _Numbers()
        self._table = read_table("public_names.toml")

    def of(self, message: Message) -> Message:
        known = message.collective in self._table["collectives"]
        collective = message.collective if known else f"collective_{self._collectives.of(message.collective)}"
        dtype = message.dtype.lower()
        if "float8" in dtype:
            dtype = "float8_e4m3fn" if dtype not in self._table["dtypes"] else dtype
        numbers: dict[str, Any] = {key: value for key, value in message._asdict().items() if isinstance(value, int)}
        numbers["sequence"] = -1  # counts what was sent before the recording
        if not self.sizes:
            dtype, numbers["in_elements"], numbers["out_elements"] = "", -1, -1
        return Message(
            collective=collective, dtype=dtype if dtype in self._table["dtypes"] else "", ranks=message.ranks,
            group=self._groups.of(message.group) if message.group else "", **numbers,
        )  # fmt: skip


def _meeting(meeting: Rendezvous, speak: _Messages) -> Rendezvous:
    if meeting.message is None:
        known = speak.of(Message(meeting.collective)).collective
        return replace(meeting, collective=known)
    message = speak.of(meeting.message)
    same = meeting.collective == meeting.message.collective
    return replace(
        meeting, message=message,
        collective=message.collective if same else speak.of(Message(meeting.collective)).collective,
    )  # fmt: skip


def _links(links: Links, sizes: bool) -> Links:
    """Execution traces without values: which tensors are the same stays, and how large they are."""
    storages: dict[int, int] = {}

    def blank(tensor: Tensor) -> Tensor:
        storage = storages.setdefault(tensor.storage, len(storages))
        return tensor._replace(storage=storage) if sizes else Tensor(storage, 0, 0)

    def bare(operator: Operator) -> Operator:
        reads, writes = (tuple(map(blank, tensors)) for tensors in (operator.reads, operator.writes))
        return Operator("", 0, 0, _NOTHING, _NOTHING, reads, writes, message=None)

    return Links({row: bare(operator) for row, operator in links.by_row.items()}, ())


def _own(warnings: Iterable[str]) -> tuple[str, ...]:
    """Warnings in words of our own; others quote names of files, or were in a file."""
    kept = read_table("public_names.toml")["warnings"]["kept"]
    return tuple(text for text in warnings if re.sub(r"-?\d[\d,.]*", "#", text) in kept)


# ---------------------------------------------------------------------- arguments of operators
def _with_arguments(trace: Trace, shapes: bool) -> Trace:
    """With nothing but numbers and known types in the arguments of operators, or without arguments."""
    if trace.arguments is None or not shapes:
        return replace(trace, arguments=None, argument=_UNKNOWN, sequence=_UNKNOWN)
    is_op = trace.category == Category.OP
    argument, sequence = (np.where(is_op, column, -1) for column in (trace.argument, trace.sequence))
    for rank in trace.ranks:
        mine = trace.rank == rank
        if (argument[mine] < 0).all():
            sequence[mine] = -1
        sequence[mine & (sequence >= 0)] -= _least(sequence[mine])
    used = set(argument.tolist())
    nothing = Arguments(b"", b"", b"", b"")
    kept = (_bare_arguments(one) if place in used else nothing for place, one in enumerate(trace.arguments))
    return replace(trace, arguments=tuple(kept), argument=argument, sequence=sequence)


def _bare_arguments(recorded: Arguments) -> Arguments:
    """Numbers and known types only."""
    args, known = OpArguments(recorded), read_table("public_names.toml")["tensor_types"]
    types = [text if text in known else "" for text in args.types]
    values = [text if isinstance(text, str) and _VALUES.fullmatch(text) else "" for text in args.values]
    texts = map(msgspec.json.encode, (_sizes(args.dims), types, _sizes(args.strides), values))
    shapes, dtypes, strides, plain = texts
    return Arguments(shapes, dtypes, strides if args.strides else b"", plain)


def _sizes(value: Any, depth: int = 0) -> Any:
    """Lists of numbers, and lists of those; anything else becomes an empty list."""
    if isinstance(value, list) and depth <= _DEEPEST:
        return [_sizes(part, depth + 1) for part in value]
    return value if isinstance(value, int) and abs(value) < _LARGEST_SIZE and depth > 1 else []


# ---------------------------------------------------------------------- numbers
def _renumbered(trace: Trace) -> Trace:
    """With ids that begin at zero on every rank: they count what a process did before the recording."""
    if not len(trace) or not len(trace.lanes):
        return trace
    syncs, correlation = trace.syncs, trace.correlation.copy()
    columns = {name: getattr(syncs, name).copy() for name in ("correlation", "record", "event")}
    of_rank = trace.lane_rank[syncs.lane] if len(syncs.lane) else np.zeros(0, np.int32)
    for rank in trace.ranks:
        mine, waits = trace.rank == rank, of_rank == rank
        calls = np.concatenate([correlation[mine], columns["correlation"][waits], columns["record"][waits]])
        for column, rows, least in (
            (correlation, mine, _least(calls)), (columns["correlation"], waits, _least(calls)),
            (columns["record"], waits, _least(calls)), (columns["event"], waits, _least(columns["event"][waits])),
        ):  # fmt: skip
            column[rows & (column >= 0)] -= least
    return replace(trace, correlation=correlation, syncs=replace(syncs, **columns))


def _least(ids: np.ndarray) -> int:
    return int(ids[ids >= 0].min()) if (ids >= 0).any() else 0


def _from_zero(execution: Execution) -> Execution:
    """With times since the first of them."""
    trace, nodes = execution.trace, execution.nodes
    begin = int(min(trace.start.min(initial=execution.origin), execution.origin))
    trace = replace(trace, start=trace.start - begin)
    nodes = replace(nodes, trace=trace, start=nodes.start - begin, end=nodes.end - begin)
    return replace(execution, trace=trace, nodes=nodes, origin=execution.origin - begin)
