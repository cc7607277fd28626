"""Block timeline: when each call of a block runs, and what the block's time consists of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lumos.costs.contention import Beside
from lumos.costs.model_costs import ModelCosts
from lumos.program.op import BESIDE, EXCHANGE, Op, Ops
from lumos.program.operators import Collective, Operator


class BlockTime(NamedTuple):
    """One block: how long the GPU is busy with it, how long the host issues it, and what the GPU's time consists of."""

    us: float = 0.0
    host_us: float = 0.0
    compute_us: float = 0.0
    communication_us: float = 0.0  # all of it, hidden or not
    joules: float = 0.0  # over those of an idle GPU, at the highest clock
    waited_us: float = 0.0  # of `us`, for a host that had waited for the GPU and no longer runs ahead

    def __add__(self, other: BlockTime) -> BlockTime:  # type: ignore[override]
        return BlockTime(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> BlockTime:
        return BlockTime(*(value * count for value in self))


class Row(NamedTuple):
    """One operator or collective of a block, in microseconds from the start of the block."""

    op: Op
    start_us: float
    end_us: float


def timeline(block: Ops, costs: ModelCosts) -> list[Row]:
    """When each operator and collective of a block runs.

    Calls on stream 0 run one after the other. Collectives on another stream run beside them, one at a time, until a
    call waits for them; those on stream 0 do not run beside those of stream 1 either. Operators are slower beside a
    collective. The host issues all of it ahead of time, until it waits for the GPU: from there on nothing starts before
    its first launch.
    """
    now, free = 0.0, {BESIDE: 0.0, EXCHANGE: 0.0}
    beside: list[tuple[float, Beside]] = []  # collectives that nobody waits for, and when they end
    launched: float | None = None  # when the host has issued all so far, once it has waited
    rows: list[Row] = []
    for op in block:
        if op.syncs:
            launched = max(now, free[BESIDE])
        if launched is not None:
            now = max(now, launched + costs.host_us + costs.launch_us)
            launched += costs.host_us_of(op)
        begin = max(now, *(rows[other].end_us for other in op.after)) if op.after else now
        if isinstance(op.work, Collective):
            stream, cost = op.stream or BESIDE, costs.us(op)
            begin = max(free[stream], begin)
            end = free[stream] = begin + cost
            if op.stream:
                beside.append((end, costs.running(op.work, cost)))
        else:
            beside = [(until, kernel) for until, kernel in beside if until > begin]
            end = end_beside(begin, costs.us(op), op, beside, costs)
        now = now if op.stream else end
        rows.append(Row(op, begin, end))
    return rows


def end_beside(begin: float, alone: float, op: Op, beside: list[tuple[float, Beside]], costs: ModelCosts) -> float:
    """When an operator ends: slower until the collectives beside it are over, by as much as the worst of them."""
    if not beside or not costs.contends or not isinstance(op.work, Operator):
        return begin + alone
    factor = max(costs.slowdown(op.work, kernel) for _, kernel in beside)
    covered = max(until for until, _ in beside) - begin
    return begin + min(alone * factor, alone + covered * (1 - 1 / factor))


def time_of(block: Ops, costs: ModelCosts) -> BlockTime:
    """A block in numbers: until its last operator and collective have ended, and what that time consists of."""
    found = summed(timeline(block, costs), costs)
    if not any(op.syncs for op in block):
        return found
    ahead = [op._replace(syncs=False) for op in block]
    return found._replace(waited_us=found.us - time_of(ahead, costs).us)


def summed(rows: Iterable[Row], costs: ModelCosts) -> BlockTime:
    """What rows consist of, until the last of them has ended."""
    end = host = compute = communication = joules = 0.0
    for op, begin, until in rows:
        us, end = until - begin, max(end, until)
        host += costs.host_us_of(op)
        joules += costs.joules_of(op, us)
        if isinstance(op.work, Collective):
            communication += us
        else:
            compute += us
    return BlockTime(end, host, compute, communication, joules)


def leads_us(blocks: Sequence[BlockTime], launch_us: float, units: int = 1) -> list[float]:
    """How much later than the host of a pass each of its units starts at least; units take equally long.

    No block starts before its first launch, or ends before the host issued all of it. If a unit waits for what holds up
    its blocks before it starts instead of inside, it ends no sooner.
    """
    issued = done = 0.0
    length = sum(block.us for block in blocks) / units
    leads = [launch_us] * units
    for block in blocks:
        for at, since in ((done, issued + launch_us), (done + block.us, issued + block.host_us)):
            unit = min(int(at / length), units - 1) if length else 0
            leads[unit] = max(leads[unit], since - (at - unit * length))
        issued, done = issued + block.host_us, done + block.us
    return leads
