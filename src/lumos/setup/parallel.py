"""Parallel: how the work is divided among GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lumos.setup.section import MaybeWays, Section, Ways, as_count

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Layers = Annotated[int, Field(ge=0, le=1 << 14)]


class Parallel(Section):
    """Tensor, pipeline (and virtual stages), context, expert and data parallelism. zero = 3 is FSDP."""

    tp: Ways = 1
    pp: Ways = 1
    vpp: Ways = 1
    cp: Ways = 1
    ep: Ways = 1
    dp: MaybeWays = 0  # derived in a Setup: gpus / (tp * pp * cp)
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"  # derived: interleaved where vpp > 1
    stage_layers: Annotated[tuple[Layers, ...], Field(strict=False, max_length=1 << 14)] = ()  # (): as even as it goes
    shard: MaybeWays = 0  # replicas that share one copy of the weights, gradients or state; 0: all of dp
    tp_overlap: bool | None = None  # None: what the framework does by itself
    dp_overlap: bool | None = None

    DERIVED: ClassVar[tuple[str, ...]] = ("schedule",)

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Virtual stages are for the interleaved schedule."""
        return {"schedule": "interleaved" if as_count(given.get("vpp")) > 1 else "1f1b"}

    @property
    def replica_gpus(self) -> int:
        """GPUs that hold one replica of the model."""
        return self.tp * self.pp * self.cp
