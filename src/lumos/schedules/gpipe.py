"""GPipe: all forward passes, then all backward passes (Huang et al. 2019)."""

from __future__ import annotations

import numpy as np

from lumos.schedules.schedule import Schedule, Turns, alternating, in_order


class GPipe(Schedule):
    """Every stage holds every micro-batch."""

    name = "gpipe"
    frameworks = ("pytorch", "torchtitan", "nanotron")

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        return alternating(np.full((pp, 1), microbatches), *in_order(microbatches))

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        return (microbatches,)


SCHEDULE = GPipe()
