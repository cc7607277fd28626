"""What the operators and collectives of a described step take, what bounds them, and where their times came from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lumos.costs.kernel_work import base_name, matrix_operator
from lumos.costs.prices import Prices
from lumos.costs.sampled_network import SampledNetwork
from lumos.described.transfers import ROLES
from lumos.program.operators import Collective, Operator
from lumos.schedules import Phase
from lumos.step.rows import message_of_transfer, transfer_of
from lumos.step.step import Step
from lumos.traced.calibration import CalibratedPrices, ChangedBlocks

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
    times: int
    us: float
    is_measured: bool
    is_scaled: bool = False  # from a trace in which it had another size


def operator_times(step: Step) -> list[OperatorTime]:
    """Operators and collectives of the first rank, the most expensive first."""
    found: dict[Hashable, OperatorTime] = {}
    changed = step.prices.changed if isinstance(step.prices, CalibratedPrices) else None
    inside = _inside_blocks(step) if changed is None else _of_trace(step, changed)
    for calls in (*inside, *_data_parallel(step)):
        if calls.us <= 0:
            continue
        before = found.get((calls.name, calls.work)) or _none_of(step.prices, calls)
        row = replace(before, count=before.count + calls.times, ms=before.ms + calls.us / 1e3)
        found[calls.name, calls.work] = row
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
        with prices.inside(block.key):
            costs = [(op.name, op.work, prices.us(op)) for op in block.build() if op.work is not None]
        for name, work, us in costs:
            measured = isinstance(prices, CalibratedPrices) and prices.is_measured(block.key, work)
            yield _Calls(name, work, count, count * us, measured)


def _of_trace(step: Step, changed: ChangedBlocks) -> Iterator[_Calls]:
    """The operators of the trace in the new setup, and the collectives of the description."""
    for op, calls, us, is_same in changed.operators():
        name = base_name(op).strip("_").replace(".", " ")[:_LONGEST_NAME]
        try:
            work = matrix_operator(op) if op.inputs else None
        except (ArithmeticError, LookupError, TypeError, ValueError):  # shapes that make no sense
            work = None
        moved = sum(tensor.bytes for tensor in (*op.inputs, *op.outputs))
        work = work or Operator("stream", (max(1, round(moved)),))
        yield _Calls(name, work, max(1, round(calls)), us, is_same, not is_same)
    for calls_of in _inside_blocks(step):
        if isinstance(calls_of.work, Collective):
            yield calls_of


def _data_parallel(step: Step) -> Iterator[_Calls]:
    """Collectives of the data-parallel ranks, outside the blocks."""
    changed = step.prices.changed if isinstance(step.prices, CalibratedPrices) else None
    measured = changed is not None and changed.calibration.data_parallel != 1.0
    for index, role in enumerate(step.structure.roles):
        if role.stage == 0 and role.what in ROLES:
            nodes = step.structure.node_role == index
            transfer = transfer_of(step, role)
            message = message_of_transfer(step, transfer)
            collective = Collective(message.collective, message.in_elements, step.assembly.layout.dp)
            us = float(step.graph.duration[nodes].sum()) / 1e3
            count = int(nodes.sum()) * transfer.times
            yield _Calls(ROLES[role.what], collective, count, us, measured)
