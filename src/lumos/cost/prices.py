"""Prices: what operators and collectives cost inside a training step of one setup.

Isolated, cold costs come from the CostModel. Inside a step kernels find part of their data in the cache, and run at the
clock that the power limit leaves: `InStepFactors` hold those factors, each with how it was measured (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from lumos.cost.energy import joules_for
from lumos.cost.in_step import InStepFactors
from lumos.cost.network import Network
from lumos.cost.operator_model import CostModel
from lumos.program.block import Block, BlockOp
from lumos.program.operators import Collective
from lumos.program.operators import Operator

# Kernels of recorded steps over the same kernels alone, by log2 of a tensor over the cache; read off 26
# recordings of our own on H200 (calibration/records.tar.xz) by hand.
_WARM_DEPTH = (-7.0, -4.0, -1.74, 0.5)
_WARM_STREAM = (0.57, 0.71, 0.86, 1.0)
_WARM_MATRIX = (0.77, 0.88, 0.97, 1.0)
Kept = TypeVar("Kept")
_SHORTEST_US = 1.0  # any kernel inside a step


@lru_cache(maxsize=1 << 16)
def warmth(operator: Operator, cache_mb: float) -> float:
    """How much sooner a kernel ends that finds its data in the cache, where the kernel before it left them."""
    depth = log2(max(operator.tensor_bytes, 1.0) / (cache_mb * 1e6))
    return float(np.interp(depth, _WARM_DEPTH, _WARM_MATRIX if operator.is_matrix else _WARM_STREAM))


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

    def __add__(self, other: BlockTime) -> BlockTime:  # type: ignore[override]
        return BlockTime(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> BlockTime:
        return BlockTime(*(value * count for value in self))


class Prices:
    """Costs inside a step; the blocks of a setup are priced once."""

    def __init__(
        self, model: CostModel, network: Network, conditions: InStepFactors, host_us: float, collective_launches: float
    ) -> None:
        self.model, self.network, self.conditions = model, network, conditions
        self.host_us, self.collective_launches = host_us, collective_launches
        self.joules = joules_for(model.gpu)
        self.flash_model: Priced | None = None  # for attention kernels of an older generation
        self._blocks: dict[Hashable, BlockTime] = {}
        self._kept: dict[Hashable, Any] = {}

    def operator_us(self, operator: Operator) -> float:
        if operator.kind == "stream" and operator.shape[0] == 0:
            return 0.0
        c = self.conditions
        model = self.flash_model if self.flash_model and operator.kind.startswith("sdpa") else self.model
        alone = max(model.us(operator) - model.isolation_us, _SHORTEST_US)
        factor = c.matrix if operator.is_matrix else c.stream
        return alone * factor * warmth(operator, self.model.gpu.l2_mb) + c.launch_gap_us

    def collective_us(self, collective: Collective) -> float:
        return self.network.us(collective)

    def block(self, key: Hashable, build: Callable[[], Block]) -> BlockTime:
        """The time of a block, built and priced on first use."""
        if key not in self._blocks:
            self._blocks[key] = time_of(build(), self)
        return self._blocks[key]

    @contextmanager
    def inside(self, key: Hashable) -> Iterator[None]:
        """Prices as they hold inside the block of this key: those calibrated on a trace differ from block to block."""
        yield

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Whatever else depends on nothing but these prices and a key, made on first use."""
        if key not in self._kept:
            self._kept[key] = make()
        found: Kept = self._kept[key]
        return found


def time_of(block: Block, prices: Prices) -> BlockTime:
    """Run the pieces in order: operators one after the other, collectives beside them unless somebody waits."""
    now = network = compute = communication = joules = 0.0
    launches = 0.0
    for piece in block:
        if isinstance(piece.work, Collective):
            launches += prices.collective_launches
            cost = prices.collective_us(piece.work)
            communication += cost
            joules += prices.joules.collective(piece.work, cost)
            network = max(network, now) + cost
            if piece.waits:
                now = network
        else:
            launches += piece.launches
            if piece.joins:
                now = max(now, network)
            cost = prices.operator_us(piece.work)
            compute += cost
            joules += prices.joules.operator(piece.work, cost)
            now += cost
    return BlockTime(max(now, network), prices.host_us * launches, compute, communication, joules)


class Row(NamedTuple):
    """One operator or collective of a block, in microseconds from the start of the block."""

    piece: BlockOp
    start_us: float
    end_us: float


def timeline(block: Block, prices: Prices) -> list[Row]:
    """When each operator and collective of a block runs, by the same walk as `time_of`."""
    now = network = 0.0
    rows = []
    for piece in block:
        if isinstance(piece.work, Collective):
            begin = max(network, now)
            network = begin + prices.collective_us(piece.work)
            rows.append(Row(piece, begin, network))
            if piece.waits:
                now = network
        else:
            if piece.joins:
                now = max(now, network)
            begin, now = now, now + prices.operator_us(piece.work)
            rows.append(Row(piece, begin, now))
    return rows
