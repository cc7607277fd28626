"""Cost of transfers in ASTRA-sim over links of one bandwidth, so that a run can be simulated at its costs.

A run is exported as the chain of work that it is at some length of its transfers (`folded_ranks`). ASTRA-sim takes the
cost of transfers from its network file. If the recorded ones were longer or shorter than that, work that waited for one
and not for another would be cut in the wrong places; so the run is simulated at these costs first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from lumos.chakra.astra_files import LONGEST_MESSAGE, Dimension
from lumos.chakra.communication import Communication
from lumos.chakra.file_format import COLLECTIVES, NodeType
from lumos.chakra.rank_files import Workload
from lumos.chakra.tasks import LEAST_BYTES, CommNode, Task
from lumos.graph.rules.build import Execution

HANDSHAKE = 8192  # bytes with which a receiver tells a sender that it is there, if both wait for each other
LAST_GROUP = 2147  # it multiplies the number by a million, and has 32 bits for that
_HOPS = 2  # to a switch and on


def at_astra_costs(execution: Execution, plan: Communication, link: Dimension) -> Execution:
    """The run with transfers as long as ASTRA-sim makes them between ranks that one switch joins."""
    sizes = {number: len(ranks) for (_, ranks), number in plan.groups.items()}
    duration = execution.graph.duration.copy()
    for row, transfers in plan.transfers.items():
        node = int(execution.nodes.last_node[row])
        found = [transfer_ns(t, sizes.get(t.group, 2), *link[1:], float(duration[node])) for t in transfers]
        duration[node] = max(found)  # messages of one kernel move at the same time
    return replace(execution, graph=execution.graph.with_times(duration, execution.graph.gap))


def as_ring(transfer: CommNode, ranks: int, stride: int, dimensions: Sequence[Dimension]) -> CommNode:
    """An exchange between some of the ranks, in a network of several dimensions: what ASTRA-sim is told of it.

    It runs such a group as one ring, an exchange in n(n - 1)/2 steps, and takes messages between nodes over the links
    inside them unless their ranks have the same place there. The size is one with which that takes as long as sending
    every other rank its part over the links of the files: from the inside out, what leaves over the slowest of them.
    """
    if transfer.collective != COLLECTIVES["all_to_all"] or ranks <= 2:
        return transfer
    ring = (ranks - 1) / 2 / dimensions[0].gb_s
    exchange, unit = (ranks - 1) / ranks / dimensions[0].gb_s, 1
    for here, above in pairwise(dimensions):
        unit *= here.ranks
        leaving = max(0.0, 1 - max(1, unit // stride) / ranks)
        exchange = max(exchange, leaving / above.gb_s)
    if stride >= dimensions[0].ranks:  # the same place in every node
        return transfer._replace(bytes=max(LEAST_BYTES, round(transfer.bytes * 2 / ranks)))
    return transfer._replace(bytes=max(LEAST_BYTES, round(transfer.bytes * exchange / ring)))


@dataclass(frozen=True)
class CompensatedSizes:
    """The sizes that ASTRA-sim is told for the transfers of ranks, in a network of several dimensions.

    It sends a message through the innermost dimension in which its ranks differ, also to another node, unless both have
    the same place there. A larger size makes up for that, so that a transfer takes as long as over the links it needs.
    """

    workload: Workload
    dimensions: Sequence[Dimension]
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def of(self, transfer: CommNode, stage: int) -> CommNode:
        """A transfer of a rank of a stage."""
        if not transfer.group:
            told = self._longer(transfer, transfer.source, transfer.destination)
            return told._replace(bytes=min(told.bytes, max(transfer.bytes, LONGEST_MESSAGE)))
        size, stride = self.workload.sizes(transfer.group)
        if size == self.workload.places.world:
            return transfer
        if transfer.collective == COLLECTIVES["all_to_all"] and size > 2:
            return as_ring(transfer, size, stride, self.dimensions)
        return self._longer(transfer, stage, transfer.group)

    def _longer(self, transfer: CommNode, stage: int, other: int | str) -> CommNode:
        if (stage, other) not in self._known:
            apart = (links_apart(ranks, self.dimensions) for ranks in self._together(stage, other))
            self._known[stage, other] = max(apart)
        return transfer._replace(bytes=round(transfer.bytes * self._known[stage, other]))

    def _together(self, stage: int, other: int | str) -> set[tuple[int, ...]]:
        """Ranks of messages to another stage, or of the groups of a kind."""
        places, numbers = self.workload.places, range(self.workload.places.of_stage)
        if isinstance(other, int):
            return {(places.rank(number, stage), places.rank(number, other)) for number in numbers}
        ranks = (places.rank(number, stage) for number in numbers)
        first = {self.workload.number(rank, other): rank for rank in ranks}
        return {self.workload.members(rank, other) for rank in first.values()}


def compensated(workload: Workload, dimensions: Sequence[Dimension]) -> Workload:
    """The ranks of a job with the sizes that ASTRA-sim is told for their transfers."""
    if len(dimensions) < 2:
        return workload
    sizes = CompensatedSizes(workload, dimensions)

    def told(task: Task, stage: int) -> Task:
        return task if task.transfer is None else task._replace(transfer=sizes.of(task.transfer, stage))

    tasks = tuple(tuple(told(task, stage) for task in tasks) for stage, tasks in enumerate(workload.tasks))
    return replace(workload, tasks=tasks)


def links_apart(ranks: Sequence[int], dimensions: Sequence[Dimension]) -> float:
    """How much faster the links are over which ASTRA-sim sends in a ring of ranks than those that lead from one to the
    next; at least 1. All ranks of a group that are in one node bring their own links to the network outside.
    """
    needed, unit = inf, 1
    for here in dimensions:
        inside, outside = {rank // unit for rank in ranks}, {rank // (unit * here.ranks) for rank in ranks}
        if len(inside) > len(outside):  # some differ at this level
            needed = min(needed, here.gb_s * max(1, len(ranks) // len(inside)))
        unit *= here.ranks
    return max(1.0, ring_link(ranks, dimensions).gb_s / needed) if needed < inf else 1.0


def ring_link(ranks: Sequence[int], dimensions: Sequence[Dimension]) -> Dimension:
    """The slowest dimension in which ASTRA-sim sends from one rank of a ring to the next."""
    used, pairs = set(), list(pairwise([*ranks, ranks[0]]))
    for one, other in pairs:
        unit = 1
        for here in dimensions:
            if one // unit % here.ranks != other // unit % here.ranks:
                used.add(here)
                break
            unit *= here.ranks
    return min(used, key=lambda here: here.gb_s, default=dimensions[0])


def largest_tensor(workload: Workload) -> int:
    """The size of the largest tensor that is reduced, gathered or exchanged."""
    gather = COLLECTIVES["all_gather"]
    sizes = ((t, workload.sizes(t.group)[0] if t.collective == gather else 1) for t in workload.sent if t.group)
    return max((t.bytes * ranks for t, ranks in sizes), default=0)


def too_long(transfers: Iterable[CommNode]) -> list[str]:
    """What to say about messages between two ranks that ASTRA-sim never ends, or of which it cannot be told enough.

    Only collectives can be cut.
    """
    sent = [one.bytes for one in transfers if one.type == NodeType.COMM_SEND]
    if max(sent, default=0) == LONGEST_MESSAGE:
        return [
            "messages between nodes are faster in ASTRA-sim than over the links of its network file: it takes links "
            "inside a node for them, and has 32 bits for the size that makes up for that"
        ]
    if max(sent, default=0) < LONGEST_MESSAGE:
        return []
    return [
        f"messages of {max(sent) / (1 << 30):.1f} GiB between ranks: ASTRA-sim has 32 bits for the length of one, and "
        "does not end; take --rendezvous-protocol=true out of the command, or make micro-batches smaller"
    ]


def too_many_groups(numbers: Iterable[str]) -> list[str]:
    """What to say about process groups whose numbers ASTRA-sim cannot take."""
    last = max(map(int, numbers), default=0)
    if last <= LAST_GROUP:
        return []
    return [
        f"process groups up to number {last:,}: ASTRA-sim multiplies numbers above {LAST_GROUP:,} beyond its integers, "
        "and may mix up their messages; write fewer ranks"
    ]


def transfer_ns(
    transfer: CommNode, ranks: int, gb_s: float, latency_ns: float, recorded_ns: float = 0.0,
    handshake: int = HANDSHAKE,
) -> float:  # fmt: skip
    """Time of one transfer once all its ranks are there; kinds without a cost in ASTRA-sim keep their own."""
    if transfer.type != NodeType.COMM_COLL:
        steps, size = 1, float(transfer.bytes)
    elif transfer.collective == COLLECTIVES["all_reduce"]:
        steps, size = 2 * (ranks - 1), transfer.bytes / ranks
    elif transfer.collective == COLLECTIVES["all_gather"]:
        steps, size = ranks - 1, float(transfer.bytes)
    elif transfer.collective in (COLLECTIVES["reduce_scatter"], COLLECTIVES["all_to_all"]):
        steps, size = ranks - 1, transfer.bytes / ranks
    else:
        return recorded_ns
    return steps * (2 * _HOPS * latency_ns + (size + handshake) / gb_s)
