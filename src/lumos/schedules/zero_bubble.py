"""Zero-bubble H1: weight gradients fill the bubble at the end, in the memory of 1F1B (Qi et al. 2023)."""

from __future__ import annotations

import numpy as np

from lumos.schedules.one_forward_one_backward import OneForwardOneBackward
from lumos.schedules.schedule import Phase, Turns


class ZeroBubble(OneForwardOneBackward):
    """1F1B, whose weight gradients come `stage` turns late. Every stage holds what the first stage of 1F1B holds."""

    name = "zero-bubble"
    frameworks = ("pytorch", "torchtitan", "deepseek")
    splits_backward = True

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        whole = super().turns(pp, vpp, microbatches)
        count = whole.shape[1]
        stages = np.arange(pp)[:, None]
        followed = (whole[..., 0] == Phase.BACKWARD) & (whole[..., 1] >= stages)
        at = np.arange(count)[None, :] + np.cumsum(followed, axis=1) - followed
        turns = np.empty((pp, count + microbatches, 3), np.int32)
        turns[..., 0], turns[..., 2] = Phase.WEIGHTS, 0
        free = np.ones((pp, count + microbatches), bool)
        free[stages, at] = False
        turns[..., 1] = np.cumsum(free, axis=1) - 1
        turns[stages, at] = whole
        return turns

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        return (min(pp, microbatches),)


SCHEDULE = ZeroBubble()
