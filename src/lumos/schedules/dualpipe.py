"""DualPipe: micro-batches enter the pipeline from both ends (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1).

Every stage holds two parts of the model, one for each direction, so that there are two copies of all parameters:

    stage       0    1    2    3
    forward     v0   v1   v2   v3    the first half of the micro-batches, from left to right
    reverse     v3   v2   v1   v0    the second half, from right to left

Stages of one half of the pipeline take the turns of DualPipeV on half as many stages; the other half mirrors them.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lumos.schedules.dualpipe_v import DualPipeV, dealt, held_most, passes_of
from lumos.schedules.schedule import Turns


class DualPipe(DualPipeV):
    """As DualPipeV; the way that enters from this side is the forward one in the first half of the stages alone."""

    name = "dualpipe"
    frameworks: ClassVar[tuple[str, ...]] = ("deepseek",)
    chunks = (1, 1)
    copies = 2

    def problem(self, pp: int, vpp: int, microbatches: int) -> str:
        if pp % 2:
            even = f"{pp - 1} or {pp + 1}" if pp > 1 else "2"
            return f"parallel.pp = {pp} is odd, and DualPipe needs stages in pairs: use {even}"
        if microbatches % 2:
            return f"train.microbatches = {microbatches} is odd, and DualPipe sends half of them from either end"
        return super().problem(pp, vpp, microbatches)

    def virtual_stages(self, pp: int, vpp: int) -> NDArray[np.int64]:
        down = np.arange(pp)
        return np.stack([down, pp - 1 - down], axis=1)

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        half = microbatches // 2
        found = np.empty((pp, 3 * microbatches, 3), np.int32)
        for stage in range(pp // 2):
            found[stage] = dealt(passes_of(stage, pp // 2, half))
        found[pp // 2 :] = found[: pp // 2][::-1]
        found[pp // 2 :, :, 2] ^= 1
        found[..., 1] += half * found[..., 2]
        return found

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        near, far = held_most(min(stage, pp - 1 - stage), pp // 2, min(microbatches, 3 * pp) // 2)
        return (near, far) if stage < pp // 2 else (far, near)

    def joined(self, pp: int, vpp: int, microbatches: int) -> NDArray[np.bool_]:
        half = super().joined(pp // 2, vpp, microbatches // 2)
        return np.concatenate([half, half[::-1]])


SCHEDULE = DualPipe()
