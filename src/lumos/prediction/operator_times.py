"""What the operators and collectives of a described step take, what bounds them, and where their times came from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lumos.costs.kernel_work import base_name
from lumos.described.transfers import ROLES
from lumos.program.op import Op
from lumos.program.operators import Collective, Operator
from lumos.schedules import Phase
from lumos.step.rows import message_of_transfer, transfer_of
from lumos.step.step import Step
from lumos.traced.trace_costs import TraceCosts

Work = Operator | Collective
_LONGEST_NAME = 60
SOURCES = ("measured", "scaled", "fitted", "transferred", "roofline", "modelled")


@dataclass(frozen=True)
class OperatorTime:
    """All calls of one operator or collective in a step, on one rank."""

    name: str
    work: Work
    count: int
    ms: float
    bound: str  # compute, memory or network
    source: str  # one of SOURCES: in a trace, there in another size, sampled on this or another GPU, roofline, network

    @property
    def shape(self) -> list[int]:
        """Of a collective: its bytes."""
        return [int(self.work.bytes)] if isinstance(self.work, Collective) else list(self.work.shape)


class _Calls(NamedTuple):
    """Equal calls; their microseconds together."""

    name: str
    work: Work
    times: float
    us: float
    source: str
    bound: str


def operator_times(step: Step) -> list[OperatorTime]:
    """Operators and collectives of the first rank, the most expensive first."""
    found: dict[Hashable, OperatorTime] = {}
    counts: dict[Hashable, float] = {}
    for calls in (*_inside_blocks(step), *_data_parallel(step)):
        if calls.us <= 0:
            continue
        key = calls.name, calls.work
        counts[key] = counts.get(key, 0.0) + calls.times
        before = found.get(key) or OperatorTime(calls.name, calls.work, 0, 0.0, calls.bound, calls.source)
        found[key] = replace(before, count=max(1, round(counts[key])), ms=before.ms + calls.us / 1e3)
    return sorted(found.values(), key=lambda row: -row.ms)


def _inside_blocks(step: Step) -> Iterator[_Calls]:
    program, costs = step.assembly.program, step.costs
    passes = ((chunk, phase) for chunk in program.chunks[0] for phase in Phase)
    blocks = [(block, program.rounds) for at in passes for block in program.blocks(*at)]
    for block, times in [*blocks, (program.optimizer(0), 1)]:
        count = times * block.times
        for op in block.build():
            if op.work is not None:
                cost = costs.cost(op)
                yield _Calls(_name_of(op), op.work, count * op.calls, count * cost.us, cost.source, cost.bound)


def _name_of(op: Op) -> str:
    """Operators of a trace without their namespace and overload."""
    return base_name(op).strip("_").replace(".", " ")[:_LONGEST_NAME] if op.measured else op.name


def _data_parallel(step: Step) -> Iterator[_Calls]:
    """Collectives of the data-parallel ranks, outside the blocks."""
    costs = step.costs
    measured = isinstance(costs, TraceCosts) and costs.learned.network.get("ranks", 1.0) != 1.0
    for index, role in enumerate(step.structure.roles):
        if role.stage == 0 and role.what in ROLES:
            nodes = step.structure.node_role == index
            transfer = transfer_of(step, role)
            message = message_of_transfer(step, transfer)
            collective = Collective(message.collective, message.in_elements, step.assembly.layout.dp)
            us = float(step.graph.duration[nodes].sum()) / 1e3
            count = int(nodes.sum()) * transfer.times
            cost = costs.cost(Op(role.what, work=collective))
            yield _Calls(ROLES[role.what], collective, count, us, "measured" if measured else cost.source, cost.bound)
