"""How long exported files will take in ASTRA-sim, and why that differs from the run.

ASTRA-sim cannot express everything that happens in a run: transfers take as long as the links of its network file need,
and a rank runs one collective or send at a time, even of different process groups. Our own simulator estimates both
effects on the exported chains of work: first with ASTRA-sim's transfer times, then also with one transfer at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from lumos.chakra.astra_comparison import AstraEstimate
from lumos.chakra.astra_costs import largest_tensor, ring_link, transfer_ns
from lumos.chakra.astra_files import Dimension, dataset_splits
from lumos.chakra.communication import Communication, Transfer
from lumos.chakra.file_format import COLLECTIVES, NodeType
from lumos.chakra.folded_ranks import Task
from lumos.chakra.rank_files import Stages


class _Place(NamedTuple):
    """The ranks of a transfer in the files; with a key, tasks of so many chains meet in it."""

    ranks: tuple[int, ...]
    key: Hashable = None
    chains: int = 1


Places = Callable[[int, Transfer], _Place]  # of a transfer in a chain
TransferNs = Callable[[int, Task, Transfer], float]


def estimate_ranks(
    own: Mapping[int, Sequence[Task]], written: Mapping[int, Sequence[Task]], plan: Communication,
    dimensions: Sequence[Dimension],
) -> AstraEstimate | None:  # fmt: skip
    """A traced run: its ranks as they were recorded, and as they are written for ASTRA-sim."""
    number = {rank: i for i, rank in enumerate(own)}
    groups = {name: tuple(number[rank] for rank in members) for name, members in plan.group_file().items()}

    def place(_: int, transfer: Transfer) -> _Place:
        if transfer.group:
            return _Place(groups[transfer.group], transfer.group, len(groups[transfer.group]))
        ends = number[transfer.source], number[transfer.destination]
        return _Place(ends, (*ends, transfer.tag), 2)

    return _estimate(list(own.values()), list(written.values()), place, dimensions, groups.values())


def estimate_stages(stages: Stages, written: Stages, dimensions: Sequence[Dimension]) -> AstraEstimate | None:
    """A run of which one rank of every stage stands for all: as it is, and as it is written for ASTRA-sim."""
    places = stages.places

    def place(stage: int, transfer: Transfer) -> _Place:
        if not transfer.group:
            ends = places.rank(0, transfer.source), places.rank(0, transfer.destination)
            return _Place(ends, (transfer.source, transfer.destination, transfer.tag), 2)
        ranks = places.members(places.rank(0, stage), *map(int, transfer.group.split("x")))
        shared = {places.of(rank)[1] for rank in ranks}
        return _Place(ranks, (transfer.group, *sorted(shared)) if len(shared) > 1 else None, len(shared))

    return _estimate(stages.tasks, written.tasks, place, dimensions, stages.groups().values())


def _estimate(
    own: Sequence[Sequence[Task]], written: Sequence[Sequence[Task]], place: Places, dimensions: Sequence[Dimension],
    groups: Iterable[Sequence[int]],
) -> AstraEstimate | None:  # fmt: skip
    world = prod(one.ranks for one in dimensions)
    sent = [(chain, task.transfer) for chain, tasks in enumerate(written) for task in tasks if task.transfer]
    largest = largest_tensor((one, len(place(chain, one).ranks)) for chain, one in sent if one.group)
    splits = dataset_splits(dimensions, any(1 < len(ranks) < world for ranks in groups), largest)
    known: dict[tuple[tuple[int, ...], Transfer, float], float] = {}

    def astra_ns(chain: int, task: Task, transfer: Transfer) -> float:
        key = place(chain, transfer).ranks, transfer._replace(tag=-1), task.ns
        if key not in known:
            known[key] = _astra_ns(transfer, key[0], dimensions, splits, task.ns)
        return known[key]

    runs = (
        _Simulation(own, place, lambda _, task, __: task.ns, one_at_a_time=False),
        *(_Simulation(written, place, astra_ns, one_at_a_time) for one_at_a_time in (False, True)),
    )
    found = [run.ms() for run in runs]
    return AstraEstimate(*(ms for ms in found if ms is not None)) if None not in found else None


def _astra_ns(
    transfer: Transfer, ranks: tuple[int, ...], dimensions: Sequence[Dimension], splits: int, own_ns: float
) -> float:
    """The time of a transfer once its ranks are there. Some ranks are one ring; all of them use every dimension."""
    size, kind = len(ranks), transfer.collective
    if not transfer.group:
        return transfer_ns(transfer, size, *ring_link(ranks, dimensions)[1:])
    exchanges, gathers = kind == COLLECTIVES["all_to_all"], kind == COLLECTIVES["all_gather"]
    chunk = transfer._replace(bytes=-(-transfer.bytes // splits))
    if len(dimensions) == 1 or size < prod(one.ranks for one in dimensions):
        _, gb_s, latency_ns = ring_link(ranks, dimensions)
        if exchanges and size > 2 and len(dimensions) > 1:  # n(n - 1)/2 steps of one part
            part = Transfer(NodeType.COMM_SEND, chunk.bytes // size)
            return splits * size * (size - 1) / 2 * transfer_ns(part, 2, gb_s, latency_ns)
        return splits * transfer_ns(chunk, size, gb_s, latency_ns, own_ns / splits)
    parts = []
    for one in reversed(dimensions) if gathers else dimensions:
        parts.append(transfer_ns(chunk, one.ranks, one.gb_s, one.latency_ns, own_ns / splits))
        if not exchanges:
            chunk = chunk._replace(bytes=chunk.bytes * one.ranks if gathers else chunk.bytes // one.ranks)
    return sum(parts) + (splits - 1) * max(parts)  # chunks let dimensions work at the same time


class _Simulation:
    """The exported chains, task by task. ASTRA-sim starts the first transfer of a rank that is ready, by its place."""

    def __init__(self, chains: Sequence[Sequence[Task]], place: Places, ns: TransferNs, one_at_a_time: bool) -> None:
        self.chains, self.place, self.ns, self.one_at_a_time = chains, place, ns, one_at_a_time
        self.left = [[len(task.waits_for) for task in tasks] for tasks in chains]
        self.after: list[list[list[int]]] = [[[] for _ in tasks] for tasks in chains]
        self.ready: list[list[int]] = [[] for _ in chains]  # transfers that wait for their turn
        self.is_busy = [False] * len(chains)
        self.arrived: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self.numbers = [self._numbered(tasks, chain) for chain, tasks in enumerate(chains)]
        self.events: list[tuple[float, int, int]] = []  # ends: time, chain, task
        for chain, tasks in enumerate(chains):
            for number, task in enumerate(tasks):
                for other in task.waits_for:
                    self.after[chain][other].append(number)

    def _numbered(self, tasks: Sequence[Task], chain: int) -> dict[int, tuple[Hashable, int]]:
        """Which transfer of those that share a key each one is."""
        count, found = Counter[Hashable](), dict[int, tuple[Hashable, int]]()
        for number, task in enumerate(tasks):
            if task.transfer is not None and (key := self.place(chain, task.transfer).key) is not None:
                count[key] += 1
                found[number] = key, count[key]
        return found

    def ms(self) -> float | None:
        """When the last task ends; None if some wait for each other for ever."""
        time, done = 0.0, 0
        for chain, tasks in enumerate(self.chains):
            for number, task in enumerate(tasks):
                if not task.waits_for:
                    self._free(chain, number, 0.0)
            self._issue(chain, 0.0)
        while self.events:
            time, chain, number = heappop(self.events)
            done += 1
            if self._queues(chain, number):
                self.is_busy[chain] = False
            for other in self.after[chain][number]:
                self.left[chain][other] -= 1
                if not self.left[chain][other]:
                    self._free(chain, other, time)
            self._issue(chain, time)
        return time / 1e6 if done == sum(map(len, self.chains)) else None

    def _queues(self, chain: int, number: int) -> bool:
        """Whether a task is one of those that a rank runs one at a time: work follows work anyway."""
        transfer = self.chains[chain][number].transfer
        return self.one_at_a_time and transfer is not None and transfer.type != NodeType.COMM_RECV

    def _free(self, chain: int, number: int, time: float) -> None:
        """Nothing that a task waits for is left."""
        if self._queues(chain, number):
            heappush(self.ready[chain], number)
        else:
            self._start(chain, number, time)

    def _issue(self, chain: int, time: float) -> None:
        if self.ready[chain] and not self.is_busy[chain]:
            self.is_busy[chain] = True
            self._start(chain, heappop(self.ready[chain]), time)

    def _start(self, chain: int, number: int, time: float) -> None:
        """A task begins; a transfer with others when all of them are there."""
        task, together = self.chains[chain][number], [(chain, number)]
        if task.transfer is not None and number in self.numbers[chain]:
            together = self.arrived[self.numbers[chain][number]]
            together.append((chain, number))
            if len(together) < self.place(chain, task.transfer).chains:
                return
        for at, place in together:
            one = self.chains[at][place]
            ns = one.ns if one.transfer is None else self.ns(at, one, one.transfer)
            heappush(self.events, (time + ns, at, place))
