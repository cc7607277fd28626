"""Samples: measured operators, read from what `lumos sample` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lumos.errors import InputError
from lumos.measure.fit.operator_rows import operator_of
from lumos.measure.sample.collective_sampler import COLLECTIVES
from lumos.measure.sample.sample_file import lines_of
from lumos.program.operators import Operator

__all__ = ["Sample", "operator_of", "read_samples"]


class Sample(NamedTuple):
    """An operator and its time in microseconds."""

    operator: Operator
    us: float


def read_samples(path: Path) -> tuple[str, list[Sample]]:
    """(GPU, samples) of a file; collectives, and rows that failed when they were measured, are left out."""
    gpu, samples = "", []
    for place, row in lines_of(path):
        if "gpu" in row:
            gpu = str(row["gpu"])
        elif "us" in row and row.get("op") not in COLLECTIVES:
            samples.append(Sample(operator_of(row, place), _time(row["us"], place)))
    if not samples:
        raise InputError(f"{path}: no samples of operators in it; name a file that `lumos sample` wrote")
    return gpu, samples


def _time(us: Any, place: str) -> float:
    if not isinstance(us, int | float) or isinstance(us, bool) or not 0 < us < 1e9:
        raise InputError(f"{place}: us = {us!r:.60} is no time; measure it again, or remove the line")
    return float(us)
