"""Footprint: what a training step needs on every pipeline stage, from nothing but its description."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any

from lumos.footprint.phases import Accounting, StageMemory
from lumos.setups.gpus import gpu_named
from lumos.setups.setup import Setup

MIB, GIB = float(1 << 20), float(1 << 30)


@dataclass(frozen=True)
class Footprint:
    """Memory of the worst stage, what torch does not count, and what the GPU has; in bytes."""

    worst: int  # the stage that needs most
    at_peak: StageMemory
    unseen: float  # the CUDA context, NCCL, and blocks of the allocator that do not fit what is asked for
    usable: float
    _accounting: Accounting = field(repr=False, compare=False)

    @property
    def peak(self) -> float:
        """As torch.cuda.max_memory_allocated reports it."""
        return self.at_peak.peak

    @property
    def fits(self) -> bool:
        """Known error: docs/accuracy.md. Published runs that leave recomputation or offloading unsaid seem not to."""
        return self.peak + self.unseen <= self.usable

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """Every stage at its own worst moment."""
        return tuple(self._accounting.stage(index) for index in range(len(self._accounting.chunks)))

    def gib(self) -> dict[str, float]:
        """Peak and parts of the worst stage, for reports."""
        parts = zip(StageMemory._fields[1:], self.at_peak[1:], strict=True)
        return {"peak": self.peak / GIB, **{name: value / GIB for name, value in parts}}


def footprint(setup: Setup) -> Footprint:
    """The memory of one training step."""
    gpu, constants = gpu_named(setup.cluster.gpu), _constants()
    sizes = constants["cublas_workspace_mib"]
    workspaces = sizes.get(gpu.family, sizes["other"]) * constants["cublas_handles"] * MIB
    accounting = Accounting(setup, workspaces)
    worst, memory = accounting.worst()
    usable = (setup.cluster.memory_gib or gpu.memory_gib) * GIB
    return Footprint(worst, memory, _unseen(setup, memory.peak), usable, accounting)


def _unseen(setup: Setup, peak: float) -> float:
    """What torch does not report as allocated."""
    constants, parallel = _constants(), setup.parallel
    groups = sum(size > 1 for size in (parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.dp))
    outside = constants["context_mib"] + groups * constants["nccl_mib_per_group"]
    return float(outside * MIB + constants["fragmented_share"] * peak)


@cache
def _constants() -> dict[str, Any]:
    text = resources.files("lumos").joinpath("data/footprint.json").read_text("utf-8")
    constants: dict[str, Any] = json.loads(text)
    return constants
