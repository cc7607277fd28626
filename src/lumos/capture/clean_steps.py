"""CleanSteps: how long steps take while nothing is recorded, to hold Lumos' own answer against."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lumos.capture.place import synchronise


@dataclass
class CleanSteps:
    """Steps in a row, timed by the clock; the GPU is waited for at the first and the last end only."""

    ends: list[float] = field(default_factory=list)

    def begin(self) -> None:
        synchronise()
        self.ends = [time.perf_counter()]

    def lap(self, last: bool = False) -> None:
        if not self.ends:
            return
        if last:
            synchronise()
        self.ends.append(time.perf_counter())

    def as_dict(self) -> dict[str, object]:
        """The mean, which counts, and each one, which on a GPU may end before its work does."""
        each = [1e3 * (b - a) for a, b in zip(self.ends, self.ends[1:], strict=False)]
        mean = round(sum(each) / len(each), 4) if each else None
        return {"steps": len(each), "mean_ms": mean, "each_ms": [round(value, 4) for value in each]}
