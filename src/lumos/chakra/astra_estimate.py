"""How long exported files will take in ASTRA-sim, and why that differs from the run.

ASTRA-sim cannot express everything that happens in a run: transfers take as long as the links of its network file need,
and a rank runs one collective or send at a time, even of different process groups. Our own feeder estimates both
effects on the exported chains of work: first with ASTRA-sim's transfer times, then also with one transfer at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from math import prod

from lumos.chakra.astra_comparison import AstraEstimate
from lumos.chakra.astra_costs import largest_tensor, ring_link, transfer_ns
from lumos.chakra.astra_files import Dimension, dataset_splits
from lumos.chakra.feeder import Feeder
from lumos.chakra.file_format import COLLECTIVES, NodeType
from lumos.chakra.rank_files import Workload
from lumos.chakra.tasks import CommNode, Task

TransferNs = Callable[[int, Task, CommNode], float]


def estimated(own: Workload, written: Workload, dimensions: Sequence[Dimension]) -> AstraEstimate | None:
    """A run as it is, and as it is written for ASTRA-sim; None if some tasks wait for each other for ever.

    One rank of every stage stands for all.
    """
    world = written.places.world
    has_parts = any(1 < len(ranks) < world for ranks in written.groups().values())
    splits = dataset_splits(dimensions, has_parts, largest_tensor(written))
    known: dict[tuple[tuple[int, ...], CommNode, float], float] = {}

    def astra_ns(stage: int, task: Task, transfer: CommNode) -> float:
        key = _ranks(written, stage, transfer), transfer._replace(tag=-1), task.ns
        if key not in known:
            known[key] = _astra_ns(transfer, key[0], dimensions, splits, task.ns)
        return known[key]

    times = (
        _simulated_ms(own, lambda _, task, __: task.ns, one_at_a_time=False),
        *(_simulated_ms(written, astra_ns, one_at_a_time) for one_at_a_time in (False, True)),
    )
    found = [ms for ms in times if ms is not None]
    return AstraEstimate(*found) if len(found) == len(times) else None


def _ranks(workload: Workload, stage: int, transfer: CommNode) -> tuple[int, ...]:
    """The ranks of a transfer of the first rank of a stage."""
    rank = workload.places.rank
    if transfer.group:
        return workload.members(rank(0, stage), transfer.group)
    return rank(0, transfer.source), rank(0, transfer.destination)


def _astra_ns(
    transfer: CommNode, ranks: tuple[int, ...], dimensions: Sequence[Dimension], splits: int, own_ns: float
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
            part = CommNode(NodeType.COMM_SEND, chunk.bytes // size)
            return splits * size * (size - 1) / 2 * transfer_ns(part, 2, gb_s, latency_ns)
        return splits * transfer_ns(chunk, size, gb_s, latency_ns, own_ns / splits)
    parts = []
    for one in reversed(dimensions) if gathers else dimensions:
        parts.append(transfer_ns(chunk, one.ranks, one.gb_s, one.latency_ns, own_ns / splits))
        if not exchanges:
            chunk = chunk._replace(bytes=chunk.bytes * one.ranks if gathers else chunk.bytes // one.ranks)
    return sum(parts) + (splits - 1) * max(parts)  # chunks let dimensions work at the same time


def _simulated_ms(workload: Workload, ns: TransferNs, one_at_a_time: bool) -> float | None:
    """When the last task ends. ASTRA-sim starts the first transfer of a rank that is ready, by its place."""
    first = list(accumulate(map(len, workload.tasks), initial=0))
    tasks = [(stage, task) for stage, found in enumerate(workload.tasks) for task in found]
    queues = [
        one_at_a_time and task.transfer is not None and task.transfer.type != NodeType.COMM_RECV for _, task in tasks
    ]
    meetings = _meetings(workload, tasks)
    if any(len(members) != count for (_, count, _), members in meetings.items()):
        return None
    together = {index: members for members in meetings.values() for index in members}
    _, end, _ = Feeder(
        waits_for=[[first[stage] + other for other in task.waits_for] for stage, task in tasks],
        lanes=[(stage, queues[index]) for index, (stage, _) in enumerate(tasks)],
        turns=[(index,) for index in range(len(tasks))],
        lengths=[task.ns if task.transfer is None else ns(stage, task, task.transfer) for stage, task in tasks],
        together=together,
        before=together,
        is_beside=[not queue for queue in queues],
        is_held=[False] * len(tasks),
    ).run()
    return None if min(end, default=0.0) < 0 else max(end, default=0.0) / 1e6


def _meetings(workload: Workload, tasks: Sequence[tuple[int, Task]]) -> dict[tuple[Hashable, int, int], list[int]]:
    """Transfers that stages share, by what they are, how many stages that are, and how often they have met so far."""
    met: Counter[tuple[int, Hashable]] = Counter()
    found: dict[tuple[Hashable, int, int], list[int]] = defaultdict(list)
    for index, (stage, task) in enumerate(tasks):
        if (sent := task.transfer) is None:
            continue
        key: Hashable = (sent.source, sent.destination, sent.tag)
        stages = {sent.source, sent.destination}
        if sent.group:
            stages = {workload.places.of(rank)[1] for rank in _ranks(workload, stage, sent)}
            key = (sent.group, *sorted(stages))
        if len(stages) > 1:
            met[stage, key] += 1
            found[key, len(stages), met[stage, key]].append(index)
    return found
