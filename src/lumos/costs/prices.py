"""Prices: what operators, collectives and blocks cost inside a training step of one setup.

Isolated, cold costs come from the CostModel. Inside a step kernels find part of their data in the cache, and run at the
clock that the power limit leaves: `InStepFactors` hold those factors, and `data/step.json` the warmth of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from lumos.costs.contention import Beside, kernel_of, slowdown
from lumos.costs.energy import joules_for, relief_of
from lumos.costs.in_step import InStepFactors
from lumos.costs.network import Network
from lumos.costs.operator_model import CostModel, chip_of
from lumos.data_files import read_table
from lumos.program.op import BESIDE, EXCHANGE, Op, Ops
from lumos.program.operators import Collective, Operator

Kept = TypeVar("Kept")


@lru_cache(maxsize=1 << 16)
def warmth(operator: Operator, cache_mb: float) -> float:
    """Time of a kernel that finds its data in the cache, where the kernel before it left them, over its cold time."""
    constants = read_table("step.json")
    depth = log2(max(operator.tensor_bytes, 1.0) / (cache_mb * 1e6))
    factors = constants["warm_matrix" if operator.is_matrix else "warm_stream"]
    return float(np.interp(depth, constants["warm_depth"], factors))


def block_scaling(kind: str) -> float:
    """Time of an 8-bit matmul with a factor for every block of 128 values over that with one factor."""
    inputs, weights = (float(read_table("step.json")[key]) for key in ("block_scaled", "block_scaled_weights"))
    if kind in ("gemm_nt", "grouped_gemm_nt"):
        return weights
    if kind == "linear_bwd":
        return (inputs + weights) / 2
    return inputs if "gemm" in kind else 1.0


class Priced(Protocol):
    """Whatever knows the isolated cost of an operator."""

    @property
    def isolation_us(self) -> float: ...

    def us(self, operator: Operator) -> float: ...


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


class Prices:
    """Costs inside a step; the blocks of a setup are priced once."""

    def __init__(
        self, model: CostModel, network: Network, factors: InStepFactors, host_us: float, collective_launches: float
    ) -> None:
        self.model, self.network, self.factors = model, network, factors
        self.host_us, self.collective_launches = host_us, collective_launches
        self.joules = joules_for(model.gpu)
        self.flash_model: Priced | None = None  # for attention kernels of an older generation
        self.leads = False  # passes wait for the host block by block
        self.contends = True  # kernels and communication beside each other; not where measured prices hold it already
        self.overlap_blocks = 0  # SMs of collectives beside the operators of a block; 0: NCCL's channels
        self.exchange_blocks = 0  # … of exchanges between experts; 0: the same
        self.block_scaled = False  # 8-bit matmuls have a factor for every block of 128 values
        self.leaves_sms = False  # matmuls start as many blocks as communication leaves SMs: none needs a round more
        self._blocks: dict[Hashable, BlockTime] = {}
        self._kept: dict[Hashable, Any] = {}

    def operator_us(self, operator: Operator) -> float:
        """One operator: its isolated cost without the timer's own, under the conditions of a step."""
        if operator.kind == "stream" and operator.shape[0] == 0:
            return 0.0
        older = self.flash_model if operator.kind.startswith("sdpa") else None
        model = older or self.model
        alone = max(model.us(operator) - model.isolation_us, read_table("step.json")["shortest_us"])
        if older:  # at half of the rate, it does not reach the power limit: as fast in a step as alone on an H200
            factor = 1.0
        elif operator.is_matrix:
            factor = self.factors.matrix * self.relief(operator)
        else:
            factor = self.factors.stream
        if self.block_scaled and operator.dtype == "fp8":
            factor *= block_scaling(operator.kind)
        us = alone * factor * warmth(operator, self.model.gpu.l2_mb)
        if operator.is_matrix and operator.dtype != "fp32" and self.factors.sustained < 1:
            held = self.factors.sustained * chip_of(self.model.gpu, operator.dtype).peak
            us = max(us, self.relief(operator) * operator.flops / held)
        return float(us + self.factors.launch_gap_us)

    def relief(self, operator: Operator) -> float:
        """Of the clock; small kernels that run in turn wait for their start, not for tensor cores."""
        return relief_of(self.model.kernel(operator), self.model.gpu)

    def collective_us(self, collective: Collective) -> float:
        """One collective, once all its ranks have arrived."""
        return self.network.us(collective)

    def us(self, op: Op) -> float:
        """The time of a call on its stream, with nothing beside it."""
        if isinstance(op.work, Collective):
            return self.collective_us(op.work)
        return self.operator_us(op.work) if op.work is not None else 0.0

    def running(self, collective: Collective, us: float) -> Beside:
        """A collective of a block that takes so long, as the operators beside it see it."""
        kernel = kernel_of(collective, us)
        blocks = self.exchange_blocks if collective.kind == "all_to_all" else 0
        blocks = blocks or self.overlap_blocks
        return kernel._replace(blocks=blocks) if blocks else kernel

    def disturbed_us(self, build: Callable[[], Ops], beside: Beside) -> float:
        """How much longer the operators of a block take if this communication runs beside all of them."""
        ops = [(op, op.work) for op in build() if isinstance(op.work, Operator)]
        return sum(self.us(op) * (self.slowdown(work, beside) - 1) for op, work in ops)

    def slowdown(self, work: Operator, beside: Beside) -> float:
        """Time of an operator beside communication over its time alone."""
        gpu = self.model.gpu
        if self.leaves_sms and work.is_matrix and not work.kind.startswith("sdpa") and not gpu.is_cpu:
            return gpu.sms / max(1, gpu.sms - beside.blocks)
        return slowdown(work, beside, gpu)

    def launches(self, op: Op) -> float:
        """Of the host, for one operator or collective."""
        return self.collective_launches if isinstance(op.work, Collective) else op.launches

    @property
    def launch_us(self) -> float:
        """From the host's call to the start of the kernel on an idle GPU."""
        return float(read_table("step.json")["launch_us"])

    def block(self, key: Hashable, build: Callable[[], Ops]) -> BlockTime:
        """The time of a block, built and priced on first use."""
        if key not in self._blocks:
            self._blocks[key] = time_of(build(), self)
        return self._blocks[key]

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Whatever else depends on nothing but these prices and a key, made on first use."""
        if key not in self._kept:
            self._kept[key] = make()
        found: Kept = self._kept[key]
        return found


def timeline(block: Ops, prices: Prices) -> list[Row]:
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
            now = max(now, launched + prices.host_us + prices.launch_us)
            launched += prices.host_us * prices.launches(op)
        begin = max(now, *(rows[other].end_us for other in op.after)) if op.after else now
        if isinstance(op.work, Collective):
            stream, cost = op.stream or BESIDE, prices.us(op)
            begin = max(free[stream], begin)
            end = free[stream] = begin + cost
            if op.stream:
                beside.append((end, prices.running(op.work, cost)))
        else:
            beside = [(until, kernel) for until, kernel in beside if until > begin]
            end = end_beside(begin, prices.us(op), op, beside, prices)
        now = now if op.stream else end
        rows.append(Row(op, begin, end))
    return rows


def end_beside(begin: float, alone: float, op: Op, beside: list[tuple[float, Beside]], prices: Prices) -> float:
    """When an operator ends: slower until the collectives beside it are over, by as much as the worst of them."""
    if not beside or not prices.contends or not isinstance(op.work, Operator):
        return begin + alone
    factor = max(prices.slowdown(op.work, kernel) for _, kernel in beside)
    covered = max(until for until, _ in beside) - begin
    return begin + min(alone * factor, alone + covered * (1 - 1 / factor))


def time_of(block: Ops, prices: Prices) -> BlockTime:
    """A block in numbers: until its last operator and collective have ended, and what that time consists of."""
    found = summed(timeline(block, prices), prices)
    if not any(op.syncs for op in block):
        return found
    ahead = [op._replace(syncs=False) for op in block]
    return found._replace(waited_us=found.us - time_of(ahead, prices).us)


def summed(rows: Iterable[Row], prices: Prices) -> BlockTime:
    """What rows consist of, until the last of them has ended."""
    end = compute = communication = joules = launches = 0.0
    for op, begin, until in rows:
        cost, end = until - begin, max(end, until)
        launches += prices.launches(op)
        if isinstance(op.work, Collective):
            communication += cost
            joules += prices.joules.collective(op.work, cost)
        elif op.work is not None:
            compute += cost
            joules += prices.joules.operator(op.work, cost)
    return BlockTime(end, prices.host_us * launches, compute, communication, joules)
