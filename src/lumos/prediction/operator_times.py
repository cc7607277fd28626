"""What the operators and collectives of a described step take, what bounds them, and where their times came from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lumos.costs.kernel_work import base_name
from lumos.costs.prices import Prices
from lumos.costs.sampled_network import SampledNetwork
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
    is_measured: bool
    is_scaled: bool = False  # from a trace in which it had another size


def operator_times(step: Step) -> list[OperatorTime]:
    """Operators and collectives of the first rank, the most expensive first."""
    found: dict[Hashable, OperatorTime] = {}
    counts: dict[Hashable, float] = {}
    for calls in (*_inside_blocks(step), *_data_parallel(step)):
        if calls.us <= 0:
            continue
        key = calls.name, calls.work
        counts[key] = counts.get(key, 0.0) + calls.times
        before = found.get(key) or _none_of(step.prices, calls)
        found[key] = replace(before, count=max(1, round(counts[key])), ms=before.ms + calls.us / 1e3)
    return sorted(found.values(), key=lambda row: -row.ms)


def _none_of(prices: Prices, calls: _Calls) -> OperatorTime:
    work = calls.work
    bound = "network" if isinstance(work, Collective) else prices.model.bound(work)
    source = "measured" if calls.is_measured else "scaled" if calls.is_scaled else source_of(prices, work)
    return OperatorTime(calls.name, work, 0, 0.0, bound, source)


def source_of(prices: Prices, work: Work) -> str:
    if isinstance(work, Collective):
        network = prices.network
        return "fitted" if isinstance(network, SampledNetwork) and network.covers(work.group) else "modelled"
    sampled_on = prices.model.sampled_on(work)
    if not sampled_on:
        return "roofline"
    return "transferred" if prices.model.transferred or sampled_on != prices.model.sampled else "fitted"


def _inside_blocks(step: Step) -> Iterator[_Calls]:
    program, prices = step.assembly.program, step.prices
    passes = ((chunk, phase) for chunk in program.chunks[0] for phase in Phase)
    blocks = [(block, program.rounds) for at in passes for block in program.blocks(*at)]
    for block, times in [*blocks, (program.optimizer(0), 1)]:
        count = times * block.times
        for op in block.build():
            if op.work is not None:
                measured = isinstance(prices, TraceCosts) and prices.is_measured(op)
                scaled = op.measured is not None and not measured
                yield _Calls(_name_of(op), op.work, count * op.calls, count * prices.us(op), measured, scaled)


def _name_of(op: Op) -> str:
    """Operators of a trace without their namespace and overload."""
    return base_name(op).strip("_").replace(".", " ")[:_LONGEST_NAME] if op.measured else op.name


def _data_parallel(step: Step) -> Iterator[_Calls]:
    """Collectives of the data-parallel ranks, outside the blocks."""
    prices = step.prices
    measured = isinstance(prices, TraceCosts) and prices.learned.network.get("ranks", 1.0) != 1.0
    for index, role in enumerate(step.structure.roles):
        if role.stage == 0 and role.what in ROLES:
            nodes = step.structure.node_role == index
            transfer = transfer_of(step, role)
            message = message_of_transfer(step, transfer)
            collective = Collective(message.collective, message.in_elements, step.assembly.layout.dp)
            us = float(step.graph.duration[nodes].sum()) / 1e3
            count = int(nodes.sum()) * transfer.times
            yield _Calls(ROLES[role.what], collective, count, us, measured)
