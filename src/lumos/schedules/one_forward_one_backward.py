"""1F1B: one forward pass, one backward pass, in turns (Narayanan et al. 2021, without interleaving)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from lumos.schedules.schedule import Schedule, Turns, alternating, in_order


class OneForwardOneBackward(Schedule):
    """A stage runs ahead by the stages after it, and holds as many micro-batches."""

    name = "1f1b"
    frameworks: ClassVar[tuple[str, ...]] = (
        *("pytorch", "torchtitan", "nanotron", "neox", "deepseek"),
        *("megatron", "megatron-2021", "megatron-deepspeed"),
    )

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        ahead = np.minimum(pp - np.arange(pp)[:, None] - 1, microbatches)
        return alternating(ahead, *in_order(microbatches))

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        return (min(pp - stage, microbatches),)


SCHEDULE = OneForwardOneBackward()
