"""From a described step to a Trace, the same type that is read from files.

One rank stands for all ranks of a pipeline stage. Its lanes:

    thread host            the step's mark; issuing blocks, where the host may decide
    thread schedule        forward and backward passes by micro-batch, optimizer
    stream compute         operators
    stream communication   collectives inside blocks (tensor, context and expert parallelism)
    stream data parallel   weights that are gathered, gradients that are reduced
    stream pipeline        activations and their gradients, from stage to stage

The simulator's nodes are blocks, or equal fractions of them. What runs inside a block is priced once
(`lumos.costs.costs.timeline`) and scaled into the window of every node that runs it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.described.described import Repeated
from lumos.described.transfers import ROLES, Transfer
from lumos.graph.graph import Bools, Floats, Ints
from lumos.program.op import Op
from lumos.program.operators import Collective
from lumos.schedules import Phase
from lumos.step.block_timeline import Row, timeline
from lumos.step.step import Step
from lumos.step.structure import Role
from lumos.trace.names import Category, Kind
from lumos.trace.trace import Header, Lane, Message, Trace

_MOST_NAMED = 50_000  # nodes of a step whose passes are named by their micro-batch
_PASSES = ("forward", "backward", "weights")


class Track(IntEnum):
    """The lanes of one rank."""

    HOST = 0
    SCHEDULE = 1
    COMPUTE = 2
    COMMUNICATION = 3
    DATA_PARALLEL = 4
    PIPELINE = 5


class Detail(IntEnum):
    """How finely the inside of blocks is resolved. The breakdown of a step is the same for the first two."""

    OPERATORS = 0
    INTERVALS = 1  # operators that follow each other without a pause are one row
    BLOCKS = 2  # a row of compute and a row of communication per block; their overlap is kept, their order is not


_MOST_ROWS = {Detail.OPERATORS: 1_000_000, Detail.INTERVALS: 150_000}  # a search asks for many breakdowns


def contents(step: Step, what: str, stage: int, chunk: int) -> list[Repeated]:
    """Every block that runs in a pass of one micro-batch, or in the optimizer, in order of time."""
    program = step.assembly.program
    if what == "optimizer":
        return [program.optimizer(stage)]
    return program.in_order(program.chunks[stage][chunk], Phase[what.upper()])


class _Inside(NamedTuple):
    """What runs inside a node, as columns; times are shares of the node's duration, or microseconds of a block."""

    start: Floats
    end: Floats
    track: Ints
    label: Ints

    @property
    def size(self) -> int:
        return len(self.start)

    @staticmethod
    def joined(parts: Sequence[_Inside]) -> _Inside:
        return _Inside(*map(np.concatenate, zip(*parts, strict=True)))

    def select(self, which: Bools | Ints) -> _Inside:
        return _Inside(self.start[which], self.end[which], self.track[which], self.label[which])

    def moved(self, by: float, scale: float = 1.0) -> _Inside:
        return self._replace(start=(self.start + by) * scale, end=(self.end + by) * scale)

    def part(self, low: float, high: float) -> _Inside:
        """What runs between two shares of the time, as shares of what lies between them."""
        some = self.select((self.end > low) & (self.start < high)).moved(-low, 1 / (high - low))
        return some._replace(start=np.clip(some.start, 0.0, 1.0), end=np.clip(some.end, 0.0, 1.0))

    def decisive(self) -> Floats:
        """The share of the time that each row decides: operators all of theirs, collectives what no operator hides."""
        computes = self.track == Track.COMPUTE
        low, high = self.start[computes], self.end[computes]
        done = np.concatenate([[0.0], np.cumsum(high - low)])
        length = self.end - self.start
        for row in np.flatnonzero(~computes).tolist():
            first, last = np.searchsorted(high, self.start[row], "right"), np.searchsorted(low, self.end[row])
            if last > first:
                hidden = done[last] - done[first]
                hidden -= max(0.0, self.start[row] - low[first]) + max(0.0, high[last - 1] - self.end[row])
                length[row] -= hidden
        return np.maximum(length, 0.0)


_NOTHING = _Inside(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass
class _Labels:
    """What rows are called and which message is behind them."""

    names: dict[str, int] = field(default_factory=dict)
    messages: dict[Message, int] = field(default_factory=dict)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    collectives: dict[int, Collective] = field(default_factory=dict)  # inside blocks, by label

    def add(self, name: str, message: Message | None = None) -> int:
        name_id = self.names.setdefault(name, len(self.names))
        message_id = -1 if message is None else self.messages.setdefault(message, len(self.messages))
        return self.rows.setdefault((name_id, message_id), len(self.rows))


Columns = tuple[NDArray[Any], ...]
"""Rows of a trace in the making: start and end in nanoseconds, stage, track, label, category."""


class StepTrace:
    """The rows of a described step. `total_us` is the time of the step where a trace says it differs from the model:
    what is missing is idle time at the end; where the model is too long, all of it shrinks."""

    def __init__(self, step: Step, total_us: float | None = None) -> None:
        self.step = step
        self.total_us = step.us if total_us is None else total_us
        self.scale = min(1.0, self.total_us / step.us) if step.us > 0 else 1.0
        self.labels = _Labels()
        self._inside: dict[Hashable, _Inside] = {}
        self._blocks: dict[Hashable, tuple[_Inside, float]] = {}

    # ------------------------------------------------------------------ the nodes
    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return self.step.structure.roles

    @cached_property
    def ranks(self) -> list[int]:
        """The first rank of every stage."""
        places = self.step.assembly.layout.places
        return [places.rank(0, stage) for stage in range(places.stages)]

    @cached_property
    def start(self) -> Floats:
        return self.step.times.start * self.scale

    @cached_property
    def end(self) -> Floats:
        return self.step.times.end * self.scale

    @cached_property
    def node_stage(self) -> Ints:
        return np.array([role.stage for role in self.roles])[self.step.structure.node_role]

    @cached_property
    def node_lane(self) -> Ints:
        """The lane of the trace that every node is on."""
        track = np.array([_track_of(role.what) for role in self.roles])
        return np.asarray(self.node_stage * len(Track) + track[self.step.structure.node_role], np.int64)

    @cached_property
    def _part_of_pass(self) -> Ints:
        """For every node of a pass that is cut into units: which of them in order of time; else 0."""
        structure, lane = self.step.structure, self.step.graph.lane
        turn, index = structure.turn_index, np.arange(len(lane))
        follows = np.zeros(len(lane), bool)
        follows[1:] = (turn[1:] >= 0) & (turn[1:] == turn[:-1]) & (lane[1:] == lane[:-1])
        return index - np.maximum.accumulate(np.where(follows, 0, index))

    @cached_property
    def groups(self) -> list[tuple[Role, int, Ints]]:
        """(role, part of its pass, nodes), for nodes that take time; stages that hold the same are in one group."""
        nodes = np.flatnonzero(self.end > self.start)
        unit, like = np.array([role.unit for role in self.roles]), self.step.assembly.program.like
        first: dict[Hashable, int] = {}
        keys = ((r.what, like[r.stage], r.chunk, r.unit < 0, r.partner) for r in self.roles)
        same = [first.setdefault(key, index) for index, key in enumerate(keys)]
        role = np.array(same, np.int64)[self.step.structure.node_role[nodes]]
        computes = np.array([role.what in _PASSES for role in self.roles])
        part = np.where(computes[role] & (unit[role] >= 0), self._part_of_pass[nodes], -1)
        key = role * (self.step.plan.units + 1) + part + 1
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order], prepend=-1))
        found = []
        for members in np.split(order, bounds[1:]) if len(order) else []:
            found.append((self.roles[int(role[members[0]])], int(part[members[0]]), nodes[members]))
        return found

    # ------------------------------------------------------------------ the inside of blocks
    def inside(self, role: Role, part: int = -1, detail: Detail = Detail.OPERATORS) -> _Inside:
        """What runs inside a node of a role, or inside one of the equal parts of it."""
        stage = self.step.assembly.program.like[role.stage]
        key = (role.what, stage, role.chunk, part, role.partner, detail)
        if key not in self._inside:
            self._inside[key] = self._resolved(role, stage, part, detail)
        return self._inside[key]

    def _resolved(self, role: Role, stage: int, part: int, detail: Detail) -> _Inside:
        if part >= 0:
            units = self.step.plan.units
            found = self.inside(role, -1, Detail.OPERATORS).part(part / units, (part + 1) / units)
        elif role.partner >= 0:
            found = self._beside_another(role, stage)
        elif role.what in _PASSES or role.what == "optimizer":
            found = self._operators(role.what, stage, role.chunk)
        else:
            found = self._alone(role)
        if detail == Detail.INTERVALS:
            return self._intervals(found, role.what)
        return self._two_rows(found, role.what) if detail == Detail.BLOCKS else found

    def _alone(self, role: Role) -> _Inside:
        """The host, or the same collective of the data-parallel ranks, once or several times in a row."""
        track, message, count = _track_of(role.what), None, 1
        if track == Track.DATA_PARALLEL:
            transfer = transfer_of(self.step, role)
            message, count = message_of_transfer(self.step, transfer), transfer.times
        label = self.labels.add(ROLES.get(role.what, role.what), message)
        ends = np.arange(count + 1) / count
        return _Inside(ends[:-1], ends[1:], np.full(count, track), np.full(count, label))

    def _operators(self, what: str, stage: int, chunk: int) -> _Inside:
        parts, now = [], 0.0
        for block in contents(self.step, what, stage, chunk):
            one, length = self._of_block(block)
            parts.append(one.moved(now))
            now += length
        if now <= 0:
            return _NOTHING
        now = max(now, self.step.assembly.waited_us(what, stage, chunk))  # the GPU is idle while the host is busy
        found = _Inside.joined(parts).moved(0.0, 1 / now)
        return found.select(np.argsort(found.start, kind="stable"))

    def _beside_another(self, role: Role, stage: int) -> _Inside:
        """A pass that runs together with another: what runs of both in its share of their time."""
        low, high, rows = self.step.assembly.pair_of(role).window(role.what)
        length = max((row.end_us for row in rows), default=0.0)
        if length <= 0 or high <= low:
            return _NOTHING
        found = self._columns_of(rows).moved(0.0, 1 / length)
        middle = (found.start + found.end) / 2  # a collective is not cut in two, but counts where most of it runs
        elsewhere = (found.track != Track.COMPUTE) & ((middle < low) | (middle >= high))
        found = found.select(~elsewhere)
        return found.select(np.argsort(found.start, kind="stable")).part(low, high)

    def _of_block(self, block: Repeated) -> tuple[_Inside, float]:
        """One block, in microseconds, and how long it takes."""
        if block.key not in self._blocks:
            self._blocks[block.key] = self._timed(block)
        return self._blocks[block.key]

    def _timed(self, block: Repeated) -> tuple[_Inside, float]:
        issued = timeline(block.build(), self.step.costs)
        length = max((row.end_us for row in issued), default=0.0)  # the host may be the last to be done
        return self._columns_of(issued), length

    def _columns_of(self, issued: Sequence[Row]) -> _Inside:
        rows = [row for row in issued if row.end_us > row.start_us]
        if not rows:
            return _NOTHING
        start, end = np.array([row.start_us for row in rows]), np.array([row.end_us for row in rows])
        talks = np.array([isinstance(row.op.work, Collective) for row in rows])
        labels = [self.labels.add(row.op.name, message_of(row.op)) for row in rows]
        works = ((label, row.op.work) for label, row in zip(labels, rows, strict=True))
        self.labels.collectives |= {label: work for label, work in works if isinstance(work, Collective)}
        tracks = np.where(talks, Track.COMMUNICATION, Track.COMPUTE)
        return _Inside(start, end, tracks, np.array(labels))

    def _intervals(self, full: _Inside, what: str) -> _Inside:
        """Operators without a pause between them as one row; collectives as they are."""
        computes = full.track == Track.COMPUTE
        compute = full.select(computes)
        if compute.size < 2:
            return full
        first = np.append(True, compute.start[1:] > compute.end[:-1] + 1e-12)
        merged = compute.select(first)._replace(end=compute.end[np.append(first[1:], True)])
        merged = merged._replace(label=np.full(merged.size, self.labels.add(what)))
        return _Inside.joined([merged, full.select(~computes)])

    def _two_rows(self, full: _Inside, what: str) -> _Inside:
        talks = full.track == Track.COMMUNICATION
        if not talks.any():
            return self._intervals(full, what)
        compute, talk = (float((full.end - full.start)[rows].sum()) for rows in (~talks, talks))
        exposed = float(full.decisive()[talks].sum())
        label = int(full.label[talks][0])
        alone = compute - (talk - exposed)
        return _Inside(
            np.array([0.0, alone]), np.array([compute, alone + talk]),
            np.array([Track.COMPUTE, Track.COMMUNICATION]), np.array([self.labels.add(what), label]),
        )  # fmt: skip

    # ------------------------------------------------------------------ the trace
    def trace(self, detail: Detail = Detail.OPERATORS) -> Trace:
        """The step as a Trace, as finely as asked for or as the limit on rows allows."""
        most = _MOST_ROWS.get(detail, 0)
        while detail < Detail.BLOCKS and self._size(detail) > most:
            detail = Detail(detail + 1)
        passes = self._passes() if detail == Detail.OPERATORS else ()  # nothing but a timeline needs them
        parts = [*self._rows(detail), *passes, self._sends(), self._marks()]
        start, end, stage, track, label, category = map(np.concatenate, zip(*parts, strict=True))
        start, end = np.rint(start).astype(np.int64), np.rint(end).astype(np.int64)
        pairs = np.array(list(self.labels.rows), np.int32).reshape(-1, 2)
        lane = (stage * len(Track) + track).astype(np.int32)
        order = np.lexsort((start, lane)) if detail == Detail.OPERATORS else np.arange(len(lane))
        setup = self.step.setup
        return Trace(
            names=tuple(self.labels.names),
            lanes=tuple(_lane(rank, track) for rank in self.ranks for track in Track),
            messages=tuple(self.labels.messages),
            headers=tuple(
                Header(r, "", setup.cluster.gpus, setup.cluster.gpu, "predicted", True, profiled=False)
                for r in self.ranks
            ),
            category=category[order].astype(np.uint8),
            name=pairs[label[order], 0],
            lane=lane[order],
            start=start[order],
            duration=(end - start)[order],
            correlation=np.full(len(order), -1, np.int64),
            message=pairs[label[order], 1],
        )

    def _size(self, detail: Detail) -> int:
        return sum(len(nodes) * self.inside(role, part, detail).size for role, part, nodes in self.groups)

    def _rows(self, detail: Detail) -> Iterator[Columns]:
        """Operators and collectives, node by node."""
        for role, part, nodes in self.groups:
            on_host = role.what.startswith("host")
            if detail > Detail.OPERATORS and on_host:
                continue  # no breakdown needs it
            inside = self.inside(role, part, detail)
            begin, length = self.start[nodes][:, None], (self.end - self.start)[nodes][:, None]
            yield _columns(
                begin + inside.start * length, begin + inside.end * length, self.node_stage[nodes][:, None],
                inside.track, inside.label, Category.OP if on_host else Category.KERNEL,
            )  # fmt: skip

    def _passes(self) -> Iterator[Columns]:
        """The schedule: forward and backward passes of micro-batches, and what follows them."""
        named = len(self.step.structure.node_role) <= _MOST_NAMED
        for role, _, nodes in self.groups:
            if role.what in (*_PASSES, "optimizer"):
                labels = np.array([self.labels.add(self._pass_name(role, int(node), named)) for node in nodes])
                stage = self.node_stage[nodes]
                yield _columns(self.start[nodes], self.end[nodes], stage, Track.SCHEDULE, labels, Category.OP)

    def _pass_name(self, role: Role, node: int, named: bool) -> str:
        turn = self.step.structure.node_turn[node] if named else None
        if turn is None:
            return role.what
        chunk = f", chunk {turn.chunk}" if self.step.plan.chunks > 1 else ""
        return f"{role.what} micro-batch {turn.microbatch}{chunk}"

    def _sends(self) -> Columns:
        """What a stage receives from its neighbours: the lag of edges between the blocks of different stages."""
        edges, stage = self.step.graph.edges, self.node_stage
        computes = self.step.graph.kind == Kind.COMPUTE
        some = (edges.lag > 0) & self.step.structure.is_message & computes[edges.source]
        at = np.flatnonzero(some)
        at = at[np.lexsort((self.end[edges.source[at]], stage[edges.target[at]]))]
        begin, to = self.end[edges.source[at]], stage[edges.target[at]]
        end = begin + edges.lag[at] * self.scale
        apart = to * (1.0 + end.max(initial=0.0))  # so that no stage waits for another
        done = np.maximum.accumulate(end + apart) - apart
        same = to[1:] == to[:-1]  # a stage receives one message at a time
        begin[1:] = np.where(same, np.maximum(begin[1:], done[:-1]), begin[1:])
        count = round(self.step.assembly.layout.residual_bytes)
        label = self.labels.add("send to the next stage", Message("send_recv", "uint8", count, count, "pipeline", 2))
        return _columns(begin, np.maximum(end, begin), to, Track.PIPELINE, label, Category.KERNEL)

    def _marks(self) -> Columns:
        """The step itself, on every rank."""
        label, end = self.labels.add("ProfilerStep#0"), self.total_us * 1e3
        return _columns(0.0, end, np.arange(len(self.ranks)), Track.HOST, label, Category.NOTE)


def _columns(*columns: NDArray[Any] | float) -> Columns:
    """Start, end, stage, track, label and category of rows; what is the same for all is given once."""
    return tuple(column.ravel() for column in np.broadcast_arrays(*columns))


def transfer_of(step: Step, role: Role, unit: int = -1) -> Transfer:
    """The transfer of a node; without a unit, that of a typical unit of its chunk."""
    held = step.chunks[role.stage][role.chunk].parameters
    transfers = step.assembly.transfers
    if role.what == "reduce" and unit < 0:
        return transfers.reduce(held)
    return transfers.of(role.what, role.stage, held, role.chunk, unit)


def message_of_transfer(step: Step, transfer: Transfer) -> Message:
    """All that a transfer moves at once, as one message."""
    size = round(transfer.bytes)
    return Message(transfer.kind, "uint8", size, size, "data parallel", step.assembly.layout.dp.size)


def message_of(op: Op) -> Message | None:
    """The message behind a collective of a block; None for other calls."""
    work = op.work
    if not isinstance(work, Collective):
        return None
    kind, count = "send_recv" if work.kind == "p2p" else work.kind, round(work.bytes)
    return Message(kind, "uint8", count, count, "", work.group.size)


def _track_of(what: str) -> Track:
    if what.startswith("host"):
        return Track.HOST
    return Track.DATA_PARALLEL if what in ROLES else Track.COMPUTE


def _lane(rank: int, track: Track) -> Lane:
    return Lane(rank, track >= Track.COMPUTE, "predicted", track.name.lower().replace("_", " "))
