"""Which communication of a run becomes which Chakra nodes: collectives, and sends matched with their receives.

A simulator that runs the files waits for every participant of a collective and for the other side of a message, so a
node of communication is written only if its kind and size are known and its counterparts are written too. Any other
communication kernel is written as plain work of its recorded length, and counted.

ASTRA-sim knows some collectives only, and reads `comm_size` as what every rank puts in: its part of an all-gather, all
of it for the others. It never ends an all-gather of fewer bytes than it cuts it into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from lumos.analysis.collectives import message_bytes
from lumos.chakra.file_format import COLLECTIVE_NAMES, COLLECTIVES, NodeType
from lumos.chakra.tasks import LEAST_BYTES, CommNode
from lumos.graph.rules.build import Execution
from lumos.graph.rules.rendezvous import POINT_TO_POINT, Rendezvous
from lumos.trace.trace import Message

_SIMULATED = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast")  # what ASTRA-sim knows
_IN_PLACE_OF = {"barrier": "all_reduce"}  # all others as a broadcast, which it replays at its recorded length


@dataclass
class Communication:
    """The communication of a run by the row of its kernels, and the process groups it happens in."""

    transfers: dict[int, list[CommNode]] = field(default_factory=lambda: defaultdict(list))
    groups: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    plain: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # why kernels are plain work
    replaced: Counter[tuple[str, str]] = field(default_factory=Counter)  # kinds that are written as another

    @property
    def warnings(self) -> list[str]:
        plain = (
            f"{len(rows)} communication kernels are written as plain work: {why}" for why, rows in self.plain.items()
        )
        replaced = (
            f"{count} kernels of {kind} are written as {other}: ASTRA-sim knows no {kind} (--metadata keeps it)"
            for (kind, other), count in self.replaced.items()
        )
        return [*plain, *replaced]

    def described_groups(self) -> list[dict[str, object]]:
        """The groups as PyTorch describes them in a node of metadata."""
        return [
            {"pg_name": name, "pg_desc": label, "ranks": list(ranks), "group_size": len(ranks)}
            for (label, ranks), name in self.groups.items()
        ]

    def group_file(self) -> dict[str, list[int]]:
        """The groups as ASTRA-sim takes them (`--comm-group-configuration`)."""
        return {name: list(ranks) for (_, ranks), name in self.groups.items()}


def plan_communication(execution: Execution, closed: bool = False, every_kind: bool = False) -> Communication:
    """The nodes of communication for every communication kernel of a run.

    With `closed`, only where all participants are in the trace: a simulator would wait for the others for ever. With
    `every_kind`, collectives that ASTRA-sim does not know are kept as they are.
    """
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
            _add_collective(plan, found, world, closed)
    for row in np.flatnonzero(execution.trace.is_communication).tolist():
        if row not in matched:
            _add_alone(plan, execution, row, world, closed)
    if not every_kind:
        _replace_kinds(plan)
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
        sent = CommNode(kind, size, source=sender, destination=receiver, tag=tags[sender, receiver])
        plan.transfers[row].append(sent)


def _replace_kinds(plan: Communication) -> None:
    """Kinds that ASTRA-sim does not know become others that it does; it stops at a node of an unknown kind."""
    for row, transfers in plan.transfers.items():
        for i, transfer in enumerate(transfers):
            kind = COLLECTIVE_NAMES.get(transfer.collective, "")
            if kind and kind not in _SIMULATED:
                other = _IN_PLACE_OF.get(kind, "broadcast")
                plan.replaced[kind, other] += 1
                plan.transfers[row][i] = transfer._replace(collective=COLLECTIVES[other])


def _add_collective(plan: Communication, found: Rendezvous, world: tuple[int, ...], closed: bool) -> None:
    kind, size = COLLECTIVES.get(found.collective, -1), _sent_bytes(found.message)
    if kind < 0 or size < 0:
        plan.plain["their kind or size is not recorded"].update(found.rows.tolist())
        return
    members = _members(found.message, found.ranks, world)
    if closed and set(members) != set(found.ranks):
        plan.plain["not all ranks of their process group are in the trace"].update(found.rows.tolist())
        return
    group = _group(plan, found.message, members)
    for row in found.rows.tolist():
        plan.transfers[row].append(CommNode(NodeType.COMM_COLL, max(size, LEAST_BYTES), kind, group))


def _add_alone(plan: Communication, execution: Execution, row: int, world: tuple[int, ...], closed: bool) -> None:
    """A kernel without counterpart: its peers are not in this trace, or their part of it was cut off."""
    trace = execution.trace
    message = trace.messages[trace.message[row]] if trace.message[row] >= 0 else None
    kind, size = COLLECTIVES.get(trace.collective_of(row), -1), _sent_bytes(message)
    others = set(message.ranks if message and message.ranks else world) - {int(trace.rank[row])}
    if kind < 0 or size < 0:
        plan.plain["their kind, peer or size is not recorded"].add(row)
    elif not others.isdisjoint(trace.ranks):
        plan.plain["the other ranks did not record their part"].add(row)
    elif closed:
        plan.plain["not all ranks of their process group are in the trace"].add(row)
    else:
        group = _group(plan, message, _members(message, (int(trace.rank[row]),), world))
        plan.transfers[row].append(CommNode(NodeType.COMM_COLL, max(size, LEAST_BYTES), kind, group))


def _sent_bytes(message: Message | None) -> int:
    """What every rank puts in, which is how simulators take the size of a collective; -1 unknown."""
    if message is None:
        return -1
    larger = message_bytes(message)
    if larger < 0 or message.in_elements <= 0:
        return larger
    return larger * message.in_elements // max(message.in_elements, message.out_elements)


def _members(message: Message | None, here: tuple[int, ...], world: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a process group; where they are not recorded, as many as take part, or all."""
    if message and message.ranks:
        return message.ranks
    return here if message and message.group_size == len(here) else world


def _group(plan: Communication, message: Message | None, ranks: tuple[int, ...]) -> str:
    """The number of a process group. ASTRA-sim refuses 0, which it keeps for all ranks."""
    return plan.groups.setdefault((message.group if message else "", ranks), str(len(plan.groups) + 1))
