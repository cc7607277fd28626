"""Energy: what the GPUs draw in one training step, from what they do in it.

Every GPU draws its idle power all the time, and what its work costs on top (lumos.cost.energy). Where that is more
than the board may draw, it draws what it may: the clock falls, and with it the voltage and what the work costs. The
step's own time knows of the slower clock (lumos.cost.in_step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lumos.cost.energy import Joules
from lumos.prediction.step import Assembly, Step
from lumos.setup.gpus import Gpu


@dataclass(frozen=True)
class Energy:
    """Joules of one step: `stage_gpus` on each stage, all alike. The rest of the machines is not in it."""

    seconds: float
    stage_gpus: int
    idle_w: float
    most_w: float
    work: Sequence[float]  # of one GPU of every stage: joules over idle, at the highest clock

    @cached_property
    def stage_w(self) -> tuple[float, ...]:
        """Mean power of a GPU on every stage."""
        return tuple(drawn_w(self.idle_w, work / self.seconds, self.most_w) for work in self.work)

    @property
    def watts(self) -> float:
        """Mean power of a GPU."""
        return sum(self.stage_w) / len(self.stage_w)

    @property
    def joules(self) -> float:
        """Of all GPUs."""
        return self.watts * self.seconds * self.stage_gpus * len(self.work)

    @property
    def limited(self) -> bool:
        """Whether a stage is held at the power limit."""
        return max(self.stage_w) >= self.most_w


def drawn_w(idle_w: float, work_w: float, most_w: float) -> float:
    """What a board draws that has so much to do."""
    return max(idle_w, min(idle_w + work_w, most_w))


_DATA_PARALLEL = ("gather", "reduce", "reduce rest", "publish")


def energy_of(step: Step) -> Energy:
    """The energy of a simulated step."""
    gpu, joules = step.setup.cluster.accelerator, step.prices.joules
    talking_w = _network_w(step, gpu, joules)
    work = []
    for stage, row in enumerate(step.chunks):
        inside = step.plan.microbatches * sum(block.joules for chunk in row for block in chunk.blocks)
        update = joules.update_w * step.role_us("optimizer", stage) * 1e-6
        talk = talking_w * sum(step.role_us(what, stage) for what in _DATA_PARALLEL) * 1e-6
        work.append(inside + update + talk)
    gpus = step.setup.cluster.gpus // step.setup.parallel.pp
    return Energy(step.us * 1e-6, gpus, gpu.idle_w, joules.most_w, tuple(work))


def least_joules(assembly: Assembly, seconds: float) -> float:
    """What all GPUs draw at least in a step that takes at least so long: what their blocks cost."""
    setup, joules = assembly.setup, assembly.prices.joules
    count = setup.train.microbatches
    work = [count * sum(block.joules for chunk in row for block in chunk.blocks) for row in assembly.chunks]
    gpus, idle_w = setup.cluster.gpus // setup.parallel.pp, setup.cluster.accelerator.idle_w
    return Energy(seconds, gpus, idle_w, joules.most_w, tuple(work)).joules


def _network_w(step: Step, gpu: Gpu, joules: Joules) -> float:
    """While data-parallel ranks talk: their links are what they wait for, so they are busy."""
    gb_s = gpu.inter_gb_s if step.assembly.layout.dp.nodes > 1 else gpu.local_gb_s
    return joules.talking_w + joules.wire * gb_s * 1e9
