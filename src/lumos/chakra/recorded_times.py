"""When everything in recordings of Chakra's converter happened: host threads, kernels, and the clocks of all ranks.

The host is laid out operator by operator in the order in which they began. A kernel starts when it was launched, when
the one before it on its stream has ended, and when what it needs is there: a collective needs what its thread launched
before it and the one before it in its process group, a kernel needs a collective that its thread waited for or whose
memory it touches.

A collective takes as long on every rank as its file says. The shortest of them is the transfer, since all of them end
together; what the others took longer is how much earlier they arrived. That dates the ranks relative to one another:
a rank that comes too early for what the others waited was held up by its host, whose time between operators the
converter drops. Its clock then moves on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lumos.chakra.file_format import ChakraFile
from lumos.chakra.recordings import RankRecording, RecordedKernel, RecordedOp, recordings
from lumos.data_files import read_table
from lumos.graph.rules.rendezvous import POINT_TO_POINT
from lumos.trace.names import Category
from lumos.trace.trace import Header, Lane, Message, Syncs, Trace, concatenate

_LOST: dict[str, float] = read_table("trace_rules.toml")["chakra"]
_AUTOGRAD, _OPTIMIZER = "autograd::engine", "Optimizer.step"
_CALL = 2  # nanoseconds between calls that are put into the trace, so that they have an order
_UNUSUAL = _LOST["unusual_transfer"]
_KERNEL_GAP = int(read_table("trace_rules.toml")["lags"]["order"]["usual"])
_CALL_NAMES = {Category.KERNEL: "cudaLaunchKernel", Category.COPY: "cudaMemcpyAsync", Category.SET: "cudaMemsetAsync"}


def recorded_job(files: Sequence[ChakraFile]) -> Trace:
    """The run that was recorded, as a trace: what the files do not say about times is found from all ranks together."""
    ranks = [_RankTimes(recorded) for recorded in recordings(files)]
    if all(rank.recorded.has_times for rank in ranks):
        for rank in ranks:
            rank.take()
        return concatenate([rank.trace(0) for rank in ranks])
    offsets = _CollectiveTimes(ranks).run()
    return concatenate([rank.trace(offset) for rank, offset in zip(ranks, offsets, strict=True)])


_Ending = tuple[RecordedKernel, int]  # a kernel, and when it ends


class _Arrival(NamedTuple):
    """A rank is at a collective, and cannot go on before it is known when that took place."""

    kernel: RecordedKernel
    ready: int
    lead: int  # how long before that it was launched


@dataclass
class _RankTimes:
    """The times of one rank, in nanoseconds of a clock of its own."""

    recorded: RankRecording
    clock: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # of every thread
    began: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    launched: dict[int, int] = field(default_factory=dict)  # by number of kernel
    started: dict[int, int] = field(default_factory=dict)
    waits: list[tuple[int, int]] = field(default_factory=list)  # (kernel that is waited for, kernel of another stream)

    @cached_property
    def streams(self) -> _Streams:
        return _Streams(self)

    def run(self) -> Generator[_Arrival, int, None]:
        """Lay the rank out; yields its collectives, and is sent when they started."""
        ops = self.recorded.ops
        self.began, self.ended = [0] * len(ops), [0] * len(ops)
        left = [len(op.children) for op in ops]
        woken: set[tuple[int, int]] = set()  # (thread, operator of another that it waited for)
        for index, op in enumerate(ops):
            begin = self.clock[op.thread] + self._piece(op.thread, op.parent)
            for other in op.waits_for:
                if (op.thread, other) not in woken:
                    woken.add((op.thread, other))
                    begin = max(begin, self._left(other) + self._hand_over(op.thread))
            self.began[index] = self.clock[op.thread] = begin
            while index >= 0 and left[index] == 0:
                yield from self._end(index)
                index = ops[index].parent
                if index >= 0:
                    left[index] -= 1

    def take(self) -> None:
        """Take the times as they were recorded."""
        ops = self.recorded.ops
        self.began, self.ended = [1000 * op.node.start_us for op in ops], [0] * len(ops)
        for index, op in reversed(list(enumerate(ops))):
            inside = [self.began[child] for child in op.children] + [1000 * k.node.start_us for k in op.kernels]
            if not op.node.start_us:
                self.began[index] = min(inside, default=self.began[index])
            took = op.own_ns + sum(self.ended[child] - self.began[child] for child in op.children)
            self.ended[index] = max([self.began[index] + took, *(self.ended[child] for child in op.children)])
        for kernel in self.recorded.kernels:
            op, start = ops[kernel.op], 1000 * kernel.node.start_us
            self.launched[kernel.number] = min(self.ended[kernel.op] - _CALL, start)
            self.started[kernel.number] = start
            self.streams.ready(op.thread, kernel)
            self.streams.add(op.thread, kernel, start + kernel.nanoseconds)

    def _left(self, index: int) -> int:
        """When another thread had done what an operator waits for; one that calls others may go on meanwhile."""
        op = self.recorded.ops[index]
        return self.ended[index] if not op.children else self.began[index] + self._piece(op.thread, index)

    def _piece(self, thread: int, index: int) -> int:
        """The time that an operator, or the thread itself (-1), spends between two operators that it calls."""
        if index >= 0 and self.recorded.ops[index].is_timed:
            op = self.recorded.ops[index]
            return op.own_ns // (len(op.children) + 1)
        usual = self._usual.get(thread, 0.0)
        if index >= 0 and self.recorded.ops[index].node.name.startswith(_OPTIMIZER):
            pieces = len(self.recorded.ops[index].children) + 1
            return round(usual * max(_LOST["in_optimizer"], _LOST["least_of_optimizer"] / pieces))
        return round(usual * _LOST["between_functions" if thread in self._of_autograd else "between_operators"])

    @cached_property
    def _usual(self) -> dict[int, float]:
        """The median time of an operator of every thread."""
        times: dict[int, list[int]] = defaultdict(list)
        for op in self.recorded.ops:
            if op.node.duration_us and not op.is_step:
                times[op.thread].append(op.own_ns)
        return {thread: float(np.median(found)) for thread, found in times.items()}

    @cached_property
    def _of_autograd(self) -> set[int]:
        """Threads of the autograd engine, where no Python runs."""
        autograd = {op.thread for op in self.recorded.ops if op.node.name.startswith(_AUTOGRAD)}
        return autograd - {op.thread for op in self.recorded.ops if op.is_step}

    def _hand_over(self, thread: int) -> int:
        return round(_LOST["hand_over"] * self._usual.get(thread, 0.0))

    def _end(self, index: int) -> Generator[_Arrival, int, None]:
        """The rest of an operator: its own time, then its launches."""
        op = self.recorded.ops[index]
        self.clock[op.thread] += self._piece(op.thread, index)
        if op.announced is not None and op.announced.is_wait:
            self.streams.wait(op)
        for kernel in op.kernels:
            self.clock[op.thread] += _CALL
            yield from self._launch(op, kernel)
            self.clock[op.thread] += _CALL
        if op.is_step and op.node.duration_us:  # what is left of it was waiting for the GPU
            self.clock[op.thread] = max(self.clock[op.thread], self.began[index] + self._inclusive(index))
        self.ended[index] = self.clock[op.thread]

    def _inclusive(self, index: int) -> int:
        op = self.recorded.ops[index]
        return op.own_ns + sum(self.ended[child] - self.began[child] for child in op.children)

    def _launch(self, op: RecordedOp, kernel: RecordedKernel) -> Generator[_Arrival, int, None]:
        launch = self.clock[op.thread]
        self.launched[kernel.number] = launch
        ready = max(launch, self.streams.ready(op.thread, kernel))
        if kernel.communicates:
            start = yield _Arrival(kernel, ready, ready - launch)
            if start - ready > ready - launch:  # the host had not run ahead as far: it was late
                self.launched[kernel.number] = self.clock[op.thread] = start
        else:
            start = ready
        self.started[kernel.number] = start
        self.streams.add(op.thread, kernel, start + kernel.nanoseconds)
        if op.blocks and kernel.category == Category.COPY:
            self.clock[op.thread] = max(self.clock[op.thread], start + kernel.nanoseconds)

    def trace(self, offset: int) -> Trace:
        """Operators, launches and kernels as events, and what waits for what as events of streams."""
        return _Rows(self, offset).trace()


class _Streams:
    """What is on the streams of a rank, and what a kernel that is launched next has to wait for."""

    def __init__(self, times: _RankTimes) -> None:
        self.times = times
        self.free: dict[int, int] = {}
        self.last: dict[tuple[str, int | str], _Ending] = {}  # kernel of a thread, collective of a group
        self.toucher: dict[int, dict[int, _Ending]] = defaultdict(dict)  # storage → stream → last one
        self.pending: dict[int, list[tuple[str, int]]] = defaultdict(list)  # thread → collectives it waited for
        self.collectives: dict[tuple[str, int], _Ending] = {}
        self.seen: dict[tuple[int, int], int] = defaultdict(lambda: -1)  # (stream, other) → last kernel waited for

    def wait(self, op: RecordedOp) -> None:
        """A thread lets its stream wait for a collective."""
        if op.announced is not None:
            self.pending[op.thread].append((op.announced.group, op.announced.sequence))

    def ready(self, thread: int, kernel: RecordedKernel) -> int:
        """When what a kernel needs is there; notes what it waits for on other streams."""
        time = self.free[kernel.stream] + _KERNEL_GAP if kernel.stream in self.free else -(1 << 62)
        for source, end in self._needed(thread, kernel):
            if source.stream == kernel.stream or self.seen[kernel.stream, source.stream] >= source.number:
                continue
            self.seen[kernel.stream, source.stream] = source.number
            self.times.waits.append((source.number, kernel.number))
            time = max(time, end)
        return time

    def _needed(self, thread: int, kernel: RecordedKernel) -> Iterator[_Ending]:
        if kernel.communicates:
            groups = (("group", message.group) for message in self.times.recorded.messages(kernel))
            yield from (self.last[key] for key in (("thread", thread), *groups) if key in self.last)
        if not kernel.communicates:
            waited, self.pending[thread] = self.pending[thread], []
            yield from (self.collectives[key] for key in waited if key in self.collectives)
        for storage in kernel.read | kernel.written:
            for source, end in self.toucher[storage].values():
                together = source.communicates or kernel.communicates
                if together or (storage in source.written and storage in kernel.read):
                    yield source, end

    def add(self, thread: int, kernel: RecordedKernel, end: int) -> None:
        """A kernel was put on its stream, and will end then."""
        self.free[kernel.stream] = end
        if kernel.communicates:
            for message in self.times.recorded.messages(kernel):
                self.collectives[message.group, message.sequence] = kernel, end
                self.last["group", message.group] = kernel, end
        else:
            self.last["thread", thread] = kernel, end
        for storage in kernel.read | kernel.written:
            self.toucher[storage][kernel.stream] = kernel, end


class _CollectiveTimes:
    """Collectives and messages across ranks: when each took place, and how far the clocks of the ranks are apart."""

    def __init__(self, ranks: list[_RankTimes]) -> None:
        self.ranks = ranks
        self.runs = [rank.run() for rank in ranks]
        self.offset = [0] * len(ranks)
        self.tied = {rank: frozenset([rank]) for rank in range(len(ranks))}  # ranks whose clocks hang together
        self.waiting: dict[int, _Arrival] = {}
        self.complete: list[int] = []  # ranks at a collective at which all are
        self.members = self._matched()

    def run(self) -> list[int]:
        """Lay all ranks out together; returns what to add to the times of each."""
        for rank in range(len(self.ranks)):
            self._go_on(rank, None)
        while self.waiting:
            # If no collective has all its ranks, they come to several in different orders: any of them goes first.
            rank = self.complete.pop() if self.complete else min(self.waiting)
            if rank in self.waiting:
                arrived = {r: self.waiting.pop(r) for r in self._together(rank)}
                for r, start in self._meet(arrived).items():
                    self._go_on(r, start)
        return self.offset

    def _go_on(self, rank: int, start: int | None) -> None:
        """Let a rank run until its next collective."""
        with suppress(StopIteration):
            arrival = next(self.runs[rank]) if start is None else self.runs[rank].send(start)
            self.waiting[rank] = arrival
            if len(self._together(rank)) == len(self.members.get((rank, arrival.kernel.number), (0,))):
                self.complete.append(rank)

    def _together(self, rank: int) -> list[int]:
        """The ranks that are at the same collective as one."""
        own = (rank, self.waiting[rank].kernel.number)
        found = self.members.get(own, [own])
        return [r for r, number in found if r in self.waiting and self.waiting[r].kernel.number == number]

    def _meet(self, arrived: dict[int, _Arrival]) -> dict[int, int]:
        """When the collective starts on the ranks that are there, each by its own clock.

        A rank starts as early as the others waited for it. Two things are left alone: a message that was sent before
        its receiver came, and an unusually long transfer on a rank whose host had run far ahead. There, the end of one
        rank was late, and not the beginning of another; but no rank leaves before all have come.
        """
        rank, first = next(iter(arrived.items()))
        transfer = self._transfer(rank, first.kernel)
        waited = {r: one.kernel.nanoseconds - transfer for r, one in arrived.items()}
        last = self._tie({r: one.ready + waited[r] for r, one in arrived.items()})
        if self._is_one_sided(arrived) and max(waited.values()) <= transfer:
            return {r: one.ready for r, one in arrived.items()}
        unusual = transfer > _UNUSUAL * self._usual_transfer[self._size(rank, first.kernel)]
        start = {}
        for r, one in arrived.items():
            ready, wanted = self.offset[r] + one.ready, last - waited[r]
            start[r] = ready if unusual and one.lead > wanted - ready else wanted
        begun = max(start.values())
        return {r: max(start[r], begun - one.kernel.nanoseconds) - self.offset[r] for r, one in arrived.items()}

    def _tie(self, begin: dict[int, int]) -> int:
        """When a collective begins; clocks that nothing tied together until now are moved so that it does for both."""
        first, *others = dict.fromkeys(self.tied[rank] for rank in begin)
        last = max(self.offset[rank] + time for rank, time in begin.items() if rank in first)
        for other in others:
            apart = last - max(self.offset[rank] + time for rank, time in begin.items() if rank in other)
            for rank in other:
                self.offset[rank] += apart
            first |= other
        self.tied |= dict.fromkeys(first, first)
        return last

    def _transfer(self, rank: int, kernel: RecordedKernel) -> int:
        """The shortest time that a rank was in a collective."""
        members = self.members.get((rank, kernel.number), [(rank, kernel.number)])
        return min(self.ranks[r].recorded.kernels[number].nanoseconds for r, number in members)

    def _size(self, rank: int, kernel: RecordedKernel) -> tuple[str, int, int]:
        (first, *_) = self.ranks[rank].recorded.messages(kernel)
        return first.collective, first.in_elements, len(self.members.get((rank, kernel.number), ()))

    @cached_property
    def _usual_transfer(self) -> dict[tuple[str, int, int], float]:
        """The median transfer of collectives of one kind and size."""
        found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for rank, times in enumerate(self.ranks):
            for kernel in times.recorded.kernels:
                if kernel.communicates:
                    found[self._size(rank, kernel)].append(self._transfer(rank, kernel))
        return {size: float(np.median(transfers)) for size, transfers in found.items()}

    def _is_one_sided(self, arrived: dict[int, _Arrival]) -> bool:
        sent = [{m.collective for m in self.ranks[r].recorded.messages(one.kernel)} for r, one in arrived.items()]
        return sorted(map(sorted, sent)) == [["recv"], ["send"]]

    def _matched(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """(rank, kernel) → all members of the same collective; a kernel without counterparts is left out."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for parts in self._keys().values():
            whole = {member for part in parts for member in groups.get(part, [part])}
            if len({rank for rank, _ in whole}) == len(whole) > 1:  # else one kernel of a rank would be two at once
                members = sorted(whole)
                groups |= dict.fromkeys(members, members)
        return groups

    def _keys(self) -> dict[Any, list[tuple[int, int]]]:
        """What the participants of a communication share → (rank, kernel) of each."""
        found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for rank, times in enumerate(self.ranks):
            count: Counter[Any] = Counter()
            for kernel in times.recorded.kernels:
                for message in times.recorded.messages(kernel) if kernel.communicates else ():
                    key = _key(message)
                    count[key] += 1
                    number = count[key] if message.sequence < 0 or message.collective in POINT_TO_POINT else -1
                    found[key, number].append((rank, kernel.number))
        return found


def _key(message: Message) -> tuple[Any, ...]:
    if message.has_peer:
        return ("message", message.group, message.source, message.destination)
    return ("collective", message.group, message.ranks, message.collective, message.sequence)


class _Rows:
    """The events of one rank."""

    def __init__(self, times: _RankTimes, offset: int) -> None:
        self.times, self.offset, self.rank = times, offset, times.recorded.rank
        self.names: dict[str, int] = {}
        self.lanes: dict[Lane, int] = {}
        self.messages: dict[Message, int] = {}
        self.rows: list[tuple[int, int, int, int, int, int, int]] = []
        self.syncs: list[tuple[int, int, int, int, int]] = []

    def trace(self) -> Trace:
        for index, op in enumerate(self.times.recorded.ops):
            self._add_op(index, op)
        for kernel in self.times.recorded.kernels:
            self._add_kernel(kernel)
        self._add_waits()
        columns = np.array(self.rows, np.int64).reshape(-1, 7).T
        category, name, lane, start, duration, correlation, message = columns
        syncs = np.array(self.syncs, np.int64).reshape(-1, 5)
        return Trace(
            names=tuple(self.names), lanes=tuple(self.lanes), messages=tuple(self.messages),
            headers=(self._header(),), category=category.astype(np.uint8),
            name=name.astype(np.int32), lane=lane.astype(np.int32), start=start, duration=duration,
            correlation=correlation, message=message.astype(np.int32),
            syncs=Syncs(np.zeros(len(syncs), np.int32), *(np.ascontiguousarray(c) for c in syncs.T)),
            warnings=() if self.times.recorded.has_times else (_NOTE,),
        )  # fmt: skip

    def _header(self) -> Header:
        """Recording an execution graph records shapes, and costs as much; they are not in what is read here."""
        return Header(self.rank, str(self.times.recorded.file.path), shapes=True, shapes_left_out=True)

    def _add(
        self, category: Category, name: str, lane: Lane, start: int, end: int, correlation: int = -1,
        said: Message | None = None,
    ) -> None:  # fmt: skip
        named = self.names.setdefault(name, len(self.names))
        on = self.lanes.setdefault(lane, len(self.lanes))
        message = -1 if said is None else self.messages.setdefault(said, len(self.messages))
        self.rows.append((category, named, on, start + self.offset, end - start, correlation, message))

    def _add_op(self, index: int, op: RecordedOp) -> None:
        told = op.announced
        said = self.times.recorded.message(told, self._size(op)) if told is not None and not told.is_wait else None
        category = Category.NOTE if op.is_step else Category.OP
        self._add(category, op.node.name, self._thread(op), self.times.began[index], self.times.ended[index], said=said)

    def _size(self, op: RecordedOp) -> int:
        sizes = (k.node.number("comm_size") for k in op.kernels if k.communicates)
        return next((size for size in sizes if size >= 0), -1)

    def _add_kernel(self, kernel: RecordedKernel) -> None:
        op, start = self.times.recorded.ops[kernel.op], self.times.started[kernel.number]
        launch = self.times.launched[kernel.number]
        blocks = op.blocks and kernel.category == Category.COPY
        name = "cudaMemcpy" if blocks else _CALL_NAMES[kernel.category]
        returned = max(launch, start + kernel.nanoseconds) if blocks else launch
        self._add(Category.CALL, name, self._thread(op), launch, returned, correlation=kernel.number)
        said = self.times.recorded.messages(kernel)[0] if kernel.communicates else None
        if said is not None and said.collective in POINT_TO_POINT:  # of a batch, announcements say more
            said = None
        lane, end = Lane(self.rank, True, "gpu", str(kernel.stream)), start + kernel.nanoseconds
        self._add(kernel.category, kernel.node.name, lane, start, end, correlation=kernel.number, said=said)

    def _add_waits(self) -> None:
        """An event is recorded just after what is waited for was launched, and waited for just before the other is."""
        kernels, ops = self.times.recorded.kernels, self.times.recorded.ops
        for number, (source, target) in enumerate(self.times.waits):
            record, wait = (len(kernels) + 2 * number + i for i in range(2))
            first, then = kernels[source], kernels[target]
            recorded, waited = self.times.launched[source] + 1, self.times.launched[target] - 1
            self._add(Category.CALL, "cudaEventRecord", self._thread(ops[first.op]), recorded, recorded, record)
            self._add(Category.CALL, "cudaStreamWaitEvent", self._thread(ops[then.op]), waited, waited, wait)
            self.syncs.append((wait, then.stream, first.stream, record, number))

    def _thread(self, op: RecordedOp) -> Lane:
        return Lane(self.rank, False, "cpu", str(op.thread))


_NOTE = (
    "the files do not say when anything ran: times are found from durations, threads, streams and the collectives of "
    "all ranks"
)
