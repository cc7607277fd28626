"""What the operators and collectives of a described step take, what bounds them, and where their times came from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lumos.change.calibration import CalibratedPrices
from lumos.cost.prices import Prices
from lumos.prediction.step import Step
from lumos.prediction.step_trace import DATA_PARALLEL, StepTrace
from lumos.program.operators import Collective, Operator
from lumos.schedules import Phase


@dataclass(frozen=True)
class OperatorTime:
    """All calls of one operator or collective in a step, on one rank."""

    name: str
    op: str
    shape: list[int]  # of a collective: bytes
    count: int
    ms: float
    bound: str  # compute, memory or network
    source: str  # measured, fitted, transferred or roofline


class _Counted(NamedTuple):
    calls: int
    ms: float
    source: str


def operator_times(step: Step) -> list[OperatorTime]:
    """Operators and collectives of the first rank, the most expensive first."""
    rows = [
        OperatorTime(name, work.kind, _shape(work), found.calls, found.ms, bound_of(step.prices, work), found.source)
        for (name, work), found in _counted(step).items()
    ]
    rows += _data_parallel(step)
    return sorted(rows, key=lambda row: -row.ms)


def operator_counts(step: Step) -> dict[tuple[str, Operator], tuple[int, float]]:
    """(how often, microseconds of one) of every operator of the first rank."""
    found = _counted(step)
    return {
        (name, work): (one.calls, 1e3 * one.ms / one.calls)
        for (name, work), one in found.items() if isinstance(work, Operator)
    }  # fmt: skip


def _counted(step: Step) -> dict[tuple[str, Operator | Collective], _Counted]:
    program, found = step.assembly.program, dict[tuple[str, Operator | Collective], _Counted]()
    passes = ((chunk, phase) for chunk in program.chunks[0] for phase in Phase)
    blocks = [(block, step.plan.microbatches) for at in passes for block in program.blocks(*at)]
    for block, times in [*blocks, (program.optimizer(0), 1)]:
        with step.prices.inside(block.key):
            costs = [(op.name, op.work, _us(step.prices, op.work)) for op in block.build()]
        for name, work, us in costs:
            if us > 0:
                before = found.get((name, work), _Counted(0, 0.0, source_of(step.prices, block.key, work)))
                count = times * block.times
                found[name, work] = _Counted(before.calls + count, before.ms + count * us / 1e3, before.source)
    return found


def _us(prices: Prices, work: Operator | Collective) -> float:
    return prices.collective_us(work) if isinstance(work, Collective) else prices.operator_us(work)


def _shape(work: Operator | Collective) -> list[int]:
    return [int(work.bytes)] if isinstance(work, Collective) else list(work.shape)


def bound_of(prices: Prices, work: Operator | Collective) -> str:
    return "network" if isinstance(work, Collective) else prices.model.bound(work)


def source_of(prices: Prices, key: Hashable, work: Operator | Collective) -> str:
    """Where the time of an operator came from; that of a block which was measured in a trace, from there."""
    if isinstance(prices, CalibratedPrices) and prices.is_measured(key, work):
        return "measured"
    if isinstance(work, Operator) and not prices.model.sampled_on(work):
        return "roofline"
    return "transferred" if prices.model.transferred else "fitted"


def _data_parallel(step: Step) -> list[OperatorTime]:
    """Collectives of the data parallel ranks, outside the blocks."""
    rows, trace = [], StepTrace(step)
    for index, role in enumerate(step.structure.roles):
        if role.stage or role.what not in DATA_PARALLEL:
            continue
        nodes = np.flatnonzero(step.structure.node_role == index)
        ms = float(step.graph.duration[nodes].sum()) / 1e6
        if ms > 0:
            message = trace.data_parallel_message(role)
            measured = isinstance(step.prices, CalibratedPrices) and step.prices.calibration.data_parallel != 1.0
            collective = Collective(message.collective, message.in_elements, step.assembly.layout.dp)
            source = "measured" if measured else source_of(step.prices, (), collective)
            size = [message.in_elements]
            row = OperatorTime(DATA_PARALLEL[role.what], collective.kind, size, len(nodes), ms, "network", source)
            rows.append(row)
    return _joined(rows)


def _joined(rows: list[OperatorTime]) -> list[OperatorTime]:
    """Rows of the same collective as one."""
    found: dict[tuple[str, str, int], OperatorTime] = {}
    for row in rows:
        key = (row.name, row.op, row.shape[0])
        before = found.get(key)
        found[key] = row if before is None else replace(row, count=row.count + before.count, ms=row.ms + before.ms)
    return list(found.values())
