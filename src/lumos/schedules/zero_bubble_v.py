"""ZB-V: two chunks a stage, laid out as a V, so that loss and embedding share the first stage (Qi et al. 2024).

Micro-batches go down the stages through the first chunks and come back up through the second ones:

    stage      0    1    2    3
    chunk 0    v0   v1   v2   v3
    chunk 1    v7   v6   v5   v4

Every stage holds as many micro-batches as the first stage of 1F1B would, and where the three phases take equally long
there is no bubble but the fill of the pipeline. The order is that of torch's ScheduleZBVZeroBubble.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lumos.schedules.schedule import Phase, Schedule, Turns

_F, _B, _W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS


class ZeroBubbleV(Schedule):
    """Each of the phases of each chunk takes the micro-batches in order; what is listed is which of them is next."""

    name = "zero-bubble-v"
    frameworks = ("pytorch", "torchtitan")
    splits_backward = True
    chunks = (2, 2)
    first_holds_most = False

    def virtual_stages(self, pp: int, vpp: int) -> NDArray[np.int64]:
        down = np.arange(pp)
        return np.stack([down, 2 * pp - 1 - down], axis=1)

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        count = max(2 * pp - 1, microbatches)  # shorter runs are the beginning of a longer one
        rows = [self._stage(stage, pp, count, microbatches) for stage in range(pp)]
        return np.array(rows, np.int32).reshape(pp, 6 * microbatches, 3)

    def _stage(self, stage: int, pp: int, count: int, microbatches: int) -> list[tuple[int, int, int]]:
        next_of: dict[tuple[Phase, int], int] = {}
        turns = []
        for phase, chunk in self._pattern(stage, pp, count):
            micro = next_of.get((phase, chunk), 0)
            next_of[phase, chunk] = micro + 1
            if micro < microbatches:
                turns.append((int(phase), micro, chunk))
        return turns

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        """As counted; once the pipeline is full, more micro-batches do not add to it."""
        return super().in_flight(stage, pp, vpp, min(microbatches, 3 * pp))

    @staticmethod
    def _pattern(stage: int, pp: int, count: int) -> Iterator[tuple[Phase, int]]:
        """(phase, chunk) of every turn of a stage, for `count` micro-batches."""
        fill, held = 2 * (pp - stage) - 1, pp - stage
        yield from [(_F, 0)] * fill
        yield from [(_F, 1), (_F, 0)] * stage
        yield from [(_F, 1), (_B, 1), (_W, 1)] * held
        begun = fill + stage  # forward passes of chunk 0; chunk 1 has run pp of them
        for more in range(count - pp):
            yield from [(_F, 0)] if begun + more < count else []
            yield from [(_B, 0), (_W, 0), (_F, 1), (_B, 1), (_W, 1)]
        yield from [(_B, 0), (_B, 1)] * stage
        yield from [(_B, 0), (_W, 0)] * held
        yield from [(_W, 1)] * stage
        yield from [(_W, 0)] * stage


SCHEDULE = ZeroBubbleV()
