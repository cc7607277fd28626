"""Calibration: how a traced run differs from the model of it, block by block, and prices that account for it.

What was measured and does not change keeps its time; what changes is scaled by the ratio of modelled costs, so that the
model's errors cancel. A factor is kept for every block and kind of work: measured over modelled, at the traced setup.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from lumos.analysis.kernel_labels import Work
from lumos.change.cut import MeasuredBlock, MeasuredStage, Times
from lumos.cost.prices import BlockTime, Prices, time_of
from lumos.data_files import read_table
from lumos.program.block import Block
from lumos.program.operators import Collective, Operator

_TABLE = read_table("change.json")
MOST_NETWORK: float = _TABLE["most_network_factor"]
_GROUPS = {
    "forward": "forward", "recompute": "forward", "backward": "backward", "embedding": "ends_forward",
    "head": "ends_forward", "embedding grad": "ends_backward", "head grad": "ends_backward", "optimizer": "optimizer",
}  # fmt: skip


@dataclass(frozen=True)
class Factors:
    """Measured over modelled, for one group of blocks."""

    gpu: tuple[float, ...] = (1.0,) * len(Work)
    measured: tuple[bool, ...] = (False,) * len(Work)  # whether the trace and the model both have such work
    launch_us: float | None = None  # of the host; None: as modelled

    def times(self, factor: float, works: Iterable[Work] = Work) -> Factors:
        """These kinds of work, this much slower."""
        return replace(self, gpu=tuple(f * factor if Work(w) in works else f for w, f in enumerate(self.gpu)))

    def with_host(self, change: Callable[[float], float]) -> Factors:
        return self if self.launch_us is None else replace(self, launch_us=change(self.launch_us))


@dataclass(frozen=True)
class Calibration:
    """Factors by group of blocks, and of the collectives outside blocks."""

    groups: dict[str, Factors] = field(default_factory=dict)
    data_parallel: float = 1.0
    link: float = 1.0
    fixed_us: float = 0.0  # once a step: what is left between the calibrated model of the traced run and the run
    load: float = 0.0  # share of the recorded step that the GPU was busy

    def _each(self, change: Callable[[Factors], Factors], **others: float) -> Calibration:
        """Every group changed, and other values."""
        return replace(self, groups={name: change(group) for name, group in self.groups.items()}, **others)

    def slower(self, factor: float) -> Calibration:
        """All that runs on the GPU, this much slower."""
        outside = {"data_parallel": self.data_parallel * factor, "link": self.link * factor}
        return self._each(lambda group: group.times(factor), **outside)

    def with_communication(self, factor: float) -> Calibration:
        """With every collective at this factor of the model's: 0 where a trace has none of its own."""

        def change(group: Factors) -> Factors:
            gpu = (factor if work == Work.COMM else own for work, own in zip(Work, group.gpu, strict=True))
            return replace(group, gpu=tuple(gpu))

        return self._each(change, data_parallel=factor, link=factor)

    def slower_host(self, factor: float) -> Calibration:
        """All that the host does, this much slower."""
        return self._each(lambda group: group.with_host(lambda us: us * factor))

    def tempered(self, typical_us: float) -> Calibration:
        """The host most of the way to a typical one, in ratio.

        A GPU-bound step does not show whether its host was quick for a moment: the same host took 20 to 39 us for a
        launch within a day. A host-bound step does show it, and keeps its host.
        """
        seen = _TABLE["host_weight"]
        layers = {
            name: group.with_host(lambda us: us**seen * typical_us ** (1 - seen))
            for name, group in self.groups.items() if not name.startswith("ends")
        }  # fmt: skip
        return replace(self, groups=self.groups | layers)

    def under(self, load: float) -> Calibration:
        """With the clock of a GPU that is busy this share of the step: matrix units draw most of the power."""
        factor = _strain(load) / _strain(self.load)
        return self._each(lambda group: group.times(factor, (Work.MATRIX, Work.ATTENTION)), load=load)


def _strain(load: float) -> float:
    """Time of matmuls of a busy GPU over those of one that often waits: its clock is lower."""
    return float(np.interp(load, _TABLE["clock_load"], _TABLE["clock_factor"]))


def work_of(work: Operator | Collective) -> Work:
    """The kind of work of an operator."""
    if isinstance(work, Collective):
        return Work.COMM
    if work.kind.startswith("sdpa"):
        return Work.ATTENTION
    return Work.MATRIX if work.is_matrix else Work.STREAM


def us_of(work: Operator | Collective, prices: Prices) -> float:
    return prices.collective_us(work) if isinstance(work, Collective) else prices.operator_us(work)


class CalibratedPrices(Prices):
    """Prices of a setup with the factors of a traced one."""

    calibration: Calibration = Calibration()
    _inside: Factors | None = None  # the factors of the block that is being priced; None between blocks

    def operator_us(self, operator: Operator) -> float:
        modelled = super().operator_us(operator)
        return modelled if self._inside is None else modelled * self._inside.gpu[work_of(operator)]

    def collective_us(self, collective: Collective) -> float:
        modelled = super().collective_us(collective)
        if self._inside is not None:
            return modelled * self._inside.gpu[Work.COMM]
        return modelled * (self.calibration.link if collective.kind == "p2p" else self.calibration.data_parallel)

    def _factors_of(self, key: Hashable) -> Factors:
        name = key[0] if isinstance(key, tuple) and key else str(key)
        return self.calibration.groups.get(_GROUPS.get(name, ""), Factors())

    def is_measured(self, key: Hashable, work: Operator | Collective) -> bool:
        """Whether the time of an operator in the block of this key rests on the trace."""
        return self._factors_of(key).measured[work_of(work)]

    @contextmanager
    def inside(self, key: Hashable) -> Iterator[None]:
        before, self._inside = self._inside, self._factors_of(key)
        try:
            yield
        finally:
            self._inside = before

    def block(self, key: Hashable, build: Callable[[], Block]) -> BlockTime:
        group = self._factors_of(key)
        with self.inside(key):
            found = super().block(key, build)
        if group.launch_us is None or not self.host_us:
            return found
        return found._replace(host_us=found.host_us / self.host_us * group.launch_us)


class BlockingPrices(CalibratedPrices):
    """The same on a CPU: its host is what computes, so that a block takes the time of both."""

    def block(self, key: Hashable, build: Callable[[], Block]) -> BlockTime:
        found = super().block(key, build)
        return found._replace(
            us=found.us + found.host_us, compute_us=found.compute_us + found.host_us, host_us=0.0
        )


def modelled_times(block: Block, prices: Prices) -> tuple[Times, float]:
    """(microseconds by work, launches) of a block as the model has it."""
    us = np.zeros(len(Work))
    for op in block:
        us[work_of(op.work)] += us_of(op.work, prices)
    launches = time_of(block, prices).host_us / prices.host_us if prices.host_us else 0.0
    return us, launches


def factors(
    measured: list[MeasuredBlock],
    modelled: Times,
    launches: float,
    network: float = MOST_NETWORK,
    placeholders: bool = False,
) -> Factors:
    """Measured over modelled; where only one of them has a kind of work, the model is left as it is.

    `network` is the most that collectives may differ: little at the ends, where those of the whole step end up.
    `placeholders` says that the modelled times mean nothing: any factor is one, and what was not measured is nothing.
    """
    mean = np.mean([block.us for block in measured], axis=0)
    both = (modelled > 1e-3) & (mean > 1e-3)
    ratio = np.where(both, mean / np.where(both, modelled, 1.0), 1.0)
    most = np.where(np.arange(len(Work)) == Work.COMM, network, np.inf if placeholders else _TABLE["most_factor"])
    ratio = np.where((ratio > most) | (ratio < 1 / most), 1.0, ratio)
    if placeholders:
        ratio = np.where(mean > 1e-3, ratio, 0.0)
    host = float(np.mean([block.host_us for block in measured]))
    return Factors(tuple(float(r) for r in ratio), tuple(both.tolist()), host / launches if launches else None)


def less(block: MeasuredBlock, other: MeasuredBlock) -> MeasuredBlock:
    """A block less another that ran inside it."""
    return MeasuredBlock(np.maximum(block.us - other.us, 0.0), max(block.host_us - other.host_us, 0.0))


def stages_of(stages: list[MeasuredStage], name: str) -> list[MeasuredBlock]:
    return [getattr(stage, name) for stage in stages]
