"""Conditions: how a training step differs from a benchmark. The numbers, and where they are from, are in the data file."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources

from lumos.setups.gpus import Gpu


@dataclass(frozen=True)
class Conditions:
    """Factors on isolated costs, and what networks reach of their peak."""

    matrix: float = 1.0  # products and attention inside a step, over the same alone
    stream: float = 1.0  # everything that only moves data
    launch_gap_us: float = 0.0  # between two kernels of one stream
    inside_share: float = 0.78  # of the NVLink peak, that a ring reaches in training
    inside_start_us: float = 12.0
    inside_step_us: float = 1.0
    contention: float = 0.0  # of a collective's time, that the compute beside it loses
    straggle: float = 0.0  # of the step, for every doubling of the nodes
    fixed_us: float = 0.0  # of every step: data, logging, gradient norm


def conditions_for(gpu: Gpu) -> Conditions:
    """The conditions for a GPU.

    A chip that is held at its power limit runs at a lower clock. Power grows with the cube of the clock (voltage goes
    with it), so the factor measured on one chip moves to another of its kind by the cube root of the power that each
    has for its peak. Measured on H200; known error on GB200 and GB300: a few percent of the step (docs/accuracy.md).
    """
    known = conditions_of(gpu.family)
    if gpu.family not in ("hopper", "blackwell"):
        return known
    strain = gpu.peak_tflops["bf16"] / gpu.tdp_w
    return replace(known, matrix=known.matrix * (strain / _H200_STRAIN) ** (1 / 3))


_H200_STRAIN = 989.4 / 700


@cache
def conditions_of(family: str) -> Conditions:
    """The conditions common to all GPUs, with a family's own on top."""
    text = resources.files("lumos").joinpath("data/conditions.json").read_text("utf-8")
    tables = json.loads(text)
    names = {field.name for field in fields(Conditions)}
    chosen = tables.get("all", {}) | tables.get(family, {})
    return replace(Conditions(), **{key: value for key, value in chosen.items() if key in names})
