"""Energy of one training step: what its GPUs draw.

Every GPU draws its idle power all the time, plus what its work costs (lumos.costs.energy). Where that exceeds the power
limit of the board, it draws the limit: the clock falls, and with it the voltage and the cost of the work. The slower
clock is part of the step's time (lumos.costs.energy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log

from lumos.costs.energy import Joules, clock_of, in_step_factors
from lumos.costs.operator_model import chip_of, rated_gpu
from lumos.described.transfers import ROLES
from lumos.prediction.operator_times import OperatorTime
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu, is_file_name
from lumos.step.step import Assembly, Step


@dataclass(frozen=True)
class Energy:
    """Joules of one step, of the GPUs alone: `stage_gpus` of them on each stage, all alike."""

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
    def at_limit(self) -> list[int]:
        """The stages whose GPUs are held at the power limit."""
        return [stage for stage, watts in enumerate(self.stage_w) if watts >= self.most_w]

    @property
    def words(self) -> str:
        """Mean power of a GPU, and which stages the power limit slows down."""
        text, held = f"{self.watts:,.0f} W per GPU", self.at_limit
        if not held:
            return text
        if len(held) == len(self.work):
            return f"{text}, at the power limit"
        if len(held) <= 4:
            which = f"stage{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}"
        else:
            which = f"{len(held)} of {len(self.work)} stages"
        return f"{text} (mean); {which} at the power limit of {self.most_w:,.0f} W"


def drawn_w(idle_w: float, work_w: float, most_w: float) -> float:
    """Power of a board whose work takes so much beyond its idle power."""
    return max(idle_w, min(idle_w + work_w, most_w))


_LOW_CLOCK = 0.7  # of the highest: below it, an answer says that the power limit binds


def energy_of(step: Step, seconds: float | None = None) -> Energy:
    """The energy of a simulated step; `seconds` is its time, where a trace says that it is not the simulated one."""
    gpu, joules = step.setup.cluster.accelerator, step.costs.joules
    talking_w = _network_w(step, gpu, joules)
    work = []
    for stage in range(step.plan.pp):
        update = joules.update_w * step.role_us("optimizer", stage) * 1e-6
        talk = talking_w * sum(step.role_us(what, stage) for what in ROLES) * 1e-6
        work.append(_block_joules(step.assembly, stage) + update + talk)
    gpus = step.setup.cluster.gpus // step.setup.parallel.pp
    return Energy(step.us * 1e-6 if seconds is None else seconds, gpus, gpu.idle_w, joules.most_w, tuple(work))


def least_joules(assembly: Assembly, seconds: float) -> float:
    """A lower bound on the energy of a step that takes at least so long: that of its blocks."""
    setup, joules = assembly.setup, assembly.costs.joules
    like = assembly.program.like
    work = {stage: _block_joules(assembly, stage) for stage in set(like)}
    gpus, idle_w = setup.cluster.gpus // setup.parallel.pp, setup.cluster.accelerator.idle_w
    return Energy(seconds, gpus, idle_w, joules.most_w, [work[stage] for stage in like]).joules


def _block_joules(assembly: Assembly, stage: int) -> float:
    """What the blocks of a stage take over idle, for all micro-batches."""
    of_one = sum(times * sum(b.joules for b in chunk.blocks) for _, chunk, times in assembly.distinct_chunks(stage))
    return assembly.program.rounds * of_one


def _network_w(step: Step, gpu: Gpu, joules: Joules) -> float:
    """Power while data-parallel ranks communicate: their links are busy all the time."""
    gb_s = gpu.inter_gb_s if step.assembly.layout.dp.nodes > 1 else gpu.local_gb_s
    return joules.talking_w + joules.wire * gb_s * 1e9


def limit_part(gpu: Gpu, rows: Sequence[OperatorTime], step_us: float) -> float:
    """How much a power limit other than the usual one changes a step: the logarithm of its time, squared."""
    usual = rated_gpu(gpu)
    if gpu.tdp_w == usual.tdp_w:
        return 0.0
    now, before = in_step_factors(gpu), in_step_factors(usual)
    matrix, stream = log(now.matrix / before.matrix), log(now.stream / before.stream)
    operators = [(row.work, row.ms) for row in rows if isinstance(row.work, Operator)]
    longer_us = 1e3 * sum(ms * (matrix if work.is_matrix else stream) for work, ms in operators)
    return (longer_us / max(step_us, 1e-9)) ** 2


def limit_note(gpu: Gpu) -> str:
    """What is not known of a GPU under another power limit than its usual one, and how far a limit slows it down.

    "" for a known GPU as it is sold.
    """
    usual = rated_gpu(gpu)
    found = []
    if gpu.tdp_w != usual.tdp_w:
        found.append(
            f"no run was measured under a power limit of {gpu.tdp_w:,.0f} W (usual for {usual.shown}: "
            f"{usual.tdp_w:,.0f} W): the clock follows from energies measured on h200, and half of what it changes is "
            "in the interval"
        )
    clock, is_sold_so = clock_of(gpu).core, gpu.peak_tflops == usual.peak_tflops and not is_file_name(gpu.base)
    if clock < _LOW_CLOCK and not gpu.is_cpu and (found or not is_sold_so):
        peak = chip_of(gpu, "bf16").peak * 1e-6
        found.append(
            f"the power limit of {gpu.tdp_w:,.0f} W leaves matmuls {100 * clock:.0f} % of their peak: at most "
            f"{clock * peak:,.0f} of {peak:,.0f} TFLOP/s in bf16"
        )
    return "; ".join(found)
