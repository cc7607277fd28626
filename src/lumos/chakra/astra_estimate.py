"""How long exported files will take in ASTRA-sim, and why that differs from the run.

ASTRA-sim cannot express everything that happens in a run: transfers take as long as the links of its network file need,
and a rank runs one collective or send at a time, even of different process groups. Our own feeder estimates both
effects on the exported chains of work: first with ASTRA-sim's transfer times, then also with one transfer at a time.

A run is given to ASTRA-sim as its ranks as they are, as they are written, and the network between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from lumos.chakra.astra_comparison import AstraEstimate
from lumos.chakra.astra_costs import at_astra_costs, compensated, largest_tensor, ring_link, transfer_ns
from lumos.chakra.astra_files import Dimension, dataset_splits, described_network, needs_parting, traced_network
from lumos.chakra.communication import plan_communication
from lumos.chakra.feeder import Feeder
from lumos.chakra.file_format import COLLECTIVES, NodeType
from lumos.chakra.folded_ranks import other_ranks, recorded_workload
from lumos.chakra.rank_files import Workload
from lumos.chakra.step_tasks import StepTasks
from lumos.chakra.tasks import CommNode, Task
from lumos.costs.costs import costs_of
from lumos.graph.rules.build import Execution
from lumos.prediction.described_run import DescribedRun
from lumos.program.layout import layout_of
from lumos.program.rank_places import RankPlaces
from lumos.setup.setup import Setup


class AstraWorkload(NamedTuple):
    """A run as it is, as it is written for ASTRA-sim, and the links that are written with it."""

    own: Workload
    written: Workload
    dimensions: list[Dimension]
    warnings: Sequence[str] = ()

    @property
    def estimate(self) -> AstraEstimate | None:
        """How long ASTRA-sim will take for the files."""
        return estimated(self.own, self.written, self.dimensions)


def of_recorded(execution: Execution) -> AstraWorkload:
    """A traced run: written with transfers over the links that the network file states, not as they were recorded."""
    plan, world = plan_communication(execution, closed=True), len(execution.trace.ranks)
    dimensions = traced_network(execution, needs_parting(plan.group_file(), world))
    written = recorded_workload(at_astra_costs(execution, plan, dimensions[0]), plan)
    own, told = recorded_workload(execution, plan), compensated(written, dimensions)
    return AstraWorkload(own, told, dimensions, (*plan.warnings, *other_ranks(execution)))


def of_repeated(execution: Execution, workload: Workload, setup: Setup | None = None) -> AstraWorkload:
    """A job of which one rank was recorded, in a trace, or in a dry run on the cluster of a setup."""
    world = workload.places.world
    parted = needs_parting(workload.groups(), world)
    if setup is None:
        dimensions = traced_network(execution, parted, world)
    else:
        dimensions = described_network(layout_of(setup), costs_of(setup).network, parted)
    return AstraWorkload(workload, compensated(workload, dimensions), dimensions)


def of_described(run: DescribedRun, workload: Workload) -> AstraWorkload:
    """A run that a setup describes."""
    parted = needs_parting(workload.groups(), workload.places.world)
    dimensions = described_network(run.step.assembly.layout, run.step.costs.network, parted)
    return AstraWorkload(workload, compensated(workload, dimensions), dimensions)


def described_workload(run: DescribedRun, operators: bool = False) -> Workload:
    """The tasks of all ranks of a run that a setup describes."""
    found, parallel = StepTasks(run, operators), run.step.setup.parallel
    places = RankPlaces.of_setup(parallel, run.step.assembly.layout.schedule.copies)
    return Workload(places, tuple(tuple(found.tasks(stage)) for stage in range(parallel.pp)))


# ---------------------------------------------------------------------- the estimate
TransferNs = Callable[[int, Task, CommNode], float]


def estimated(own: Workload, written: Workload, dimensions: Sequence[Dimension]) -> AstraEstimate | None:
    """A run as it is, and as it is written for ASTRA-sim; None if some tasks wait for each other for ever.

    One rank of every stage stands for all.
    """
    splits = dataset_splits(dimensions, written.groups(), largest_tensor(written))
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
