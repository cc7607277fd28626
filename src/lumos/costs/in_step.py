"""In-step factors: how a training step differs from a benchmark. The numbers are in data/in_step.json."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache

from lumos.costs.energy import clock_of, measured_on
from lumos.data_files import read_table
from lumos.setup.gpus import Gpu, gpu_named


@dataclass(frozen=True)
class InStepFactors:
    """Factors on isolated costs inside a training step."""

    matrix: float  # time of matmuls and attention inside a step, over the same kernels alone
    sustained: float  # of the tensor cores' peak, held for a whole step: beyond it the power limit lowers the clock
    stream: float  # the same factor for memory-bound kernels
    launch_gap_us: float  # between two kernels of one stream
    penalty: float  # time of collectives inside a step, over the same collectives alone


@lru_cache(maxsize=256)
def in_step_factors(gpu: Gpu) -> InStepFactors:
    """The factors for a GPU at its power limit: `in_step_factors(gpu_named("h100")).matrix`.

    Matmuls are slower in a step than alone because the power limit lowers the clock. The factor that was measured on
    one GPU holds on another, or under another limit, at the clock that is left there (`clock_of`): a factor of its own
    stays as it is at the usual limit. Known error on Blackwell: a few percent of the step (docs/transfer.md).
    """
    known = _factors_of(gpu.family, gpu.base)
    there, here = clock_of(gpu_named(measured_on(gpu))), clock_of(gpu)
    faster = here.core / there.core
    return replace(
        known,
        matrix=known.matrix / faster,
        sustained=min(1.0, known.sustained * faster) if known.sustained < 1 else 1.0,
        stream=known.stream * here.stream / there.stream,
    )


@cache
def _factors_of(family: str, name: str) -> InStepFactors:
    """The factors common to all GPUs, with those of a family and then those of a GPU in their place."""
    table = read_table("in_step.json")
    chosen = table["all"] | table.get(family, {}) | table.get(name, {})
    return InStepFactors(**{field.name: float(chosen[field.name]) for field in fields(InStepFactors)})
