"""Interleaved 1F1B: every stage holds several virtual stages of the model (Narayanan et al. 2021)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumos.schedules.schedule import Schedule, Turns, alternating


class Interleaved(Schedule):
    """`pp` micro-batches go through a chunk before the next chunk takes its turn."""

    name = "interleaved"
    frameworks = ("pytorch", "torchtitan", "megatron", "megatron-2021")
    chunks = (2, 1 << 14)

    def problem(self, pp: int, vpp: int, microbatches: int) -> str:
        if microbatches % pp == 0:
            return ""
        return f"train.microbatches = {microbatches} is not a multiple of parallel.pp = {pp}, which interleaving needs"

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        ahead = np.array([[self._ahead(stage, pp, vpp, microbatches)] for stage in range(pp)])
        return alternating(ahead, *self._sequence(pp, vpp, microbatches * vpp))

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        """The forward passes before the first backward pass, dealt to the chunks pp at a time."""
        begun = min(self._ahead(stage, pp, vpp, microbatches) + 1, microbatches * vpp)
        rounds, rest = divmod(begun, pp * vpp)
        return tuple(min(rounds * pp + min(max(rest - chunk * pp, 0), pp), microbatches) for chunk in range(vpp))

    @staticmethod
    def _ahead(stage: int, pp: int, vpp: int, microbatches: int) -> int:
        """Forward passes before the first backward pass; all of them where there is one round alone."""
        total = microbatches * vpp
        return total if microbatches == pp else min((pp - stage - 1) * 2 + (vpp - 1) * pp, total)

    @staticmethod
    def _sequence(pp: int, vpp: int, total: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Micro-batch and chunk of the i-th forward pass."""
        round_, within = np.divmod(np.arange(total), pp * vpp)
        chunk, micro = np.divmod(within, pp)
        return (round_ * pp + micro).astype(np.int32), chunk.astype(np.int32)


SCHEDULE = Interleaved()
