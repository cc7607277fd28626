"""Which communication of a run becomes which Chakra nodes: collectives, and sends matched with their receives.

A simulator that runs the files waits for every participant of a collective and for the other side of a message, so a
node of communication is written only if its kind and size are known and its counterparts are written too. Any other
communication kernel is written as plain work of its recorded length, and counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lumos.analysis.collectives import message_bytes
from lumos.graph.from_trace.build import Execution
from lumos.graph.from_trace.rendezvous import POINT_TO_POINT, Rendezvous
from lumos.trace.read.chakra_format import COLLECTIVES, NodeType
from lumos.trace.trace import Message

_LARGEST_GROUP_NAME = "0"  # the feeder takes this name for all ranks, whatever is said of it


class Transfer(NamedTuple):
    """One node of communication."""

    type: NodeType
    bytes: int
    collective: int = -1  # its number in the schema
    group: str = ""  # a process group by the number under which it is written
    source: int = -1
    destination: int = -1
    tag: int = -1


@dataclass
class Communication:
    """The communication of a run by the row of its kernels, and the process groups it happens in."""

    transfers: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    groups: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    plain: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # why kernels are plain work

    @property
    def warnings(self) -> list[str]:
        return [
            f"{len(rows)} communication kernels are written as plain work: {why}" for why, rows in self.plain.items()
        ]

    def described_groups(self, world: tuple[int, ...]) -> list[dict[str, object]]:
        """The groups as PyTorch describes them; no ranks means all of them."""
        return [
            {
                "pg_name": name,
                "pg_desc": label,
                "ranks": [] if name == _LARGEST_GROUP_NAME else list(ranks),
                "group_size": len(ranks or world),
            }
            for (label, ranks), name in self.groups.items()
        ]


def plan_communication(execution: Execution) -> Communication:
    """The nodes of communication for every communication kernel of a run."""
    plan = Communication()
    tags: Counter[tuple[int, int]] = Counter()
    world = world_of(execution)
    matched: set[int] = set()
    order = np.argsort([int(execution.trace.start[m.rows].max()) for m in execution.rendezvous], kind="stable")
    for found in (execution.rendezvous[i] for i in order):
        matched.update(found.rows.tolist())
        if found.collective in POINT_TO_POINT:
            _add_message(plan, found, tags)
        else:
            _add_collective(plan, found, world)
    for row in np.flatnonzero(execution.trace.is_communication).tolist():
        if row not in matched:
            _add_alone(plan, execution, row, world)
    for transfers in plan.transfers.values():
        # Sends first: a simulator that does one thing at a time would wait for ever if both sides received first.
        transfers.sort(key=lambda t: t.type)
    return plan


def world_of(execution: Execution) -> tuple[int, ...]:
    """All ranks of the job, whether their traces are here or not."""
    headers = execution.trace.headers
    size = max(*(h.world_size for h in headers), *(h.rank + 1 for h in headers))
    return tuple(range(size))


def _add_message(plan: Communication, found: Rendezvous, tags: Counter[tuple[int, int]]) -> None:
    message, size = found.message, message_bytes(found.message)
    if len(found.rows) != 2 or message is None or size < 0:
        plan.plain["their peer or size is not recorded"].update(found.rows.tolist())
        return
    sender, receiver = found.ranks
    tags[sender, receiver] += 1
    for row, kind in zip(found.rows.tolist(), (NodeType.COMM_SEND, NodeType.COMM_RECV), strict=True):
        sent = Transfer(kind, size, source=sender, destination=receiver, tag=tags[sender, receiver])
        plan.transfers[row].append(sent)


def _add_collective(plan: Communication, found: Rendezvous, world: tuple[int, ...]) -> None:
    kind, size = COLLECTIVES.get(found.collective, -1), _sent_bytes(found.message)
    if kind < 0 or size < 0:
        plan.plain["their kind or size is not recorded"].update(found.rows.tolist())
        return
    group = _group(plan, found.message, found.ranks, world)
    for row in found.rows.tolist():
        plan.transfers[row].append(Transfer(NodeType.COMM_COLL, size, kind, group))


def _add_alone(plan: Communication, execution: Execution, row: int, world: tuple[int, ...]) -> None:
    """A kernel without counterpart: its peers are not in this trace, or their part of it was cut off."""
    trace = execution.trace
    message = trace.messages[trace.message[row]] if trace.message[row] >= 0 else None
    kind, size = COLLECTIVES.get(trace.collective_of(row), -1), _sent_bytes(message)
    others = set(message.ranks if message and message.ranks else world) - {int(trace.rank[row])}
    if kind < 0 or size < 0:
        plan.plain["their kind, peer or size is not recorded"].add(row)
    elif not others.isdisjoint(trace.ranks):
        plan.plain["the other ranks did not record their part"].add(row)
    else:
        group = _group(plan, message, (int(trace.rank[row]),), world)
        plan.transfers[row].append(Transfer(NodeType.COMM_COLL, size, kind, group))


def _sent_bytes(message: Message | None) -> int:
    """What every rank puts in, which is how simulators take the size of a collective; -1 unknown."""
    if message is None:
        return -1
    larger = message_bytes(message)
    if larger < 0 or message.in_elements <= 0:
        return larger
    return larger * message.in_elements // max(message.in_elements, message.out_elements)


def _group(plan: Communication, message: Message | None, here: tuple[int, ...], world: tuple[int, ...]) -> str:
    """The number of a process group; the first that holds all ranks is 0, as the feeder expects."""
    ranks = message.ranks if message and message.ranks else ()
    if not ranks:  # not recorded: as many as take part, or all
        ranks = here if message and message.group_size == len(here) else world
    key = (message.group if message else "", ranks)
    if key not in plan.groups:
        taken = set(plan.groups.values())
        whole = set(ranks) == set(world) and _LARGEST_GROUP_NAME not in taken
        plan.groups[key] = _LARGEST_GROUP_NAME if whole else str(len(taken - {_LARGEST_GROUP_NAME}) + 1)
    return plan.groups[key]
