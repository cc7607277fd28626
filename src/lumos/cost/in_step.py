"""Conditions: how a training step differs from a benchmark. The numbers are in data/conditions.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources

from lumos.setup.gpus import Gpu


@dataclass(frozen=True)
class Conditions:
    """Factors on isolated costs, and what networks reach of their peak."""

    matrix: float = 1.0  # products and attention inside a step, over the same alone
    stream: float = 1.0  # everything that only moves data
    launch_gap_us: float = 0.0  # between two kernels of one stream
    inside_share: float = 0.78  # of the NVLink peak, that a ring reaches in training
    inside_start_us: float = 12.0
    inside_step_us: float = 1.0
    penalty: float = 1.1  # collectives inside a step, over the same alone


def conditions_for(gpu: Gpu) -> Conditions:
    """The conditions for a GPU.

    A chip that is held at its power limit runs at a lower clock. Power grows with the cube of the clock (voltage goes
    with it), so the factor measured on one chip moves to another of its kind by the cube root of the power that each
    has for its peak. Measured on H200; known error on GB200 and GB300: a few percent of the step (docs/accuracy.md).
    """
    known, own = conditions_of(gpu.family, gpu.name)
    if own or gpu.family not in ("hopper", "blackwell"):
        return known
    strain = gpu.peak_tflops["bf16"] / gpu.tdp_w
    return replace(known, matrix=known.matrix * (strain / _H200_STRAIN) ** (1 / 3))


_H200_STRAIN = 989.4 / 700  # dense TFLOP/s in bf16 for every watt


@cache
def conditions_of(family: str, name: str) -> tuple[Conditions, bool]:
    """The conditions common to all GPUs, with a family's and a GPU's own on top, and whether the GPU has its own."""
    tables = json.loads(resources.files("lumos").joinpath("data/conditions.json").read_text("utf-8"))
    names = {field.name for field in fields(Conditions)}
    chosen = tables.get("all", {}) | tables.get(family, {}) | tables.get(name, {})
    return replace(Conditions(), **{k: v for k, v in chosen.items() if k in names}), "matrix" in tables.get(name, {})
