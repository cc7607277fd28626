"""In-step factors: how a training step differs from a benchmark. The numbers are in data/in_step.json."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

from lumos.data_files import read_table
from lumos.setup.gpus import Gpu, gpu_named


@dataclass(frozen=True)
class InStepFactors:
    """Factors on isolated costs inside a training step, and the share of their peak that networks reach there."""

    matrix: float  # time of matmuls and attention inside a step, over the same kernels alone
    sustained: float  # of the tensor cores' peak, held for a whole step: beyond it the power limit lowers the clock
    stream: float  # the same factor for memory-bound kernels
    launch_gap_us: float  # between two kernels of one stream
    inside_share: float  # of the NVLink bandwidth, reached by a ring
    inside_start_us: float  # of a collective inside a node
    inside_step_us: float  # for every member of a ring inside a node
    penalty: float  # time of collectives inside a step, over the same collectives alone
    exchange_share: float  # of the ring's bandwidth, reached by all-to-all
    exchange_serial: float  # share of the shorter of its two parts, inside and between nodes, that is not overlapped


def in_step_factors(gpu: Gpu) -> InStepFactors:
    """The factors for a GPU: `in_step_factors(gpu_named("h100")).matrix`.

    A chip that is held at its power limit runs at a lower clock. Power grows with the cube of the clock (voltage goes
    with it), so the factor measured on one chip moves to another of a power-limited family by the cube root of the
    power that each has for its peak. Known error on GB200 and GB300: a few percent of the step (docs/accuracy.md).
    """
    table = read_table("in_step.json")
    known = _factors_of(gpu.family, gpu.name)
    if gpu.family not in table["power_limited"]["families"] or "matrix" in table.get(gpu.name, {}):
        return known
    measured_on = gpu_named(table["power_limited"]["measured_on"])
    return replace(known, matrix=known.matrix * (_strain(gpu) / _strain(measured_on)) ** (1 / 3))


def _strain(gpu: Gpu) -> float:
    """Dense bf16 TFLOP/s for every watt."""
    return gpu.peak_tflops["bf16"] / gpu.tdp_w


@cache
def _factors_of(family: str, name: str) -> InStepFactors:
    """The factors common to all GPUs, with those of a family and then those of a GPU in their place."""
    table = read_table("in_step.json")
    chosen = table["all"] | table.get(family, {}) | table.get(name, {})
    return InStepFactors(**{field.name: float(chosen[field.name]) for field in fields(InStepFactors)})
