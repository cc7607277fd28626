"""What-ifs on durations: the traced run without the profiler, simulated with other durations of its tasks.

Kernels and communication that run beside each other slow each other. A what-if scales the time that each would take
alone, and the overlap that is left then slows them again (lumos.graph.overlap).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lumos.costs.overlapped_kernels import sides
from lumos.graph.critical_path import StepPath, step_path
from lumos.graph.graph import Floats, Graph
from lumos.graph.overlap import Side, alone, contended
from lumos.graph.rules.build import Execution
from lumos.graph.rules.step_nodes import StepNodes
from lumos.graph.simulate import Times, simulate
from lumos.trace.steps import StepMarks


class WhatIfStep(NamedTuple):
    """The mean step, in nanoseconds, and the mean of its critical paths."""

    ns: float
    path: StepPath


@dataclass(frozen=True, repr=False)
class WhatIf:
    """A run whose tasks may take other times."""

    execution: Execution
    marks: StepMarks
    graph: Graph  # without the profiler

    def __repr__(self) -> str:
        return f"WhatIf({self.execution!r})"

    @cached_property
    def _between(self) -> tuple[Side, Side] | None:
        return sides(self.execution, self.graph)

    @cached_property
    def alone(self) -> Floats:
        """What each task would take with nothing beside it: the durations that a what-if scales."""
        return self.graph.duration if self._between is None else alone(self.graph, *self._between)

    def simulate(self, duration: Floats) -> tuple[Floats, Times]:
        """Durations beside each other, and the times that follow, from durations alone."""
        if self._between is None:
            return duration, simulate(self.graph, duration)
        graph, times = contended(self.graph.with_times(duration, self.graph.gap), *self._between)
        return graph.duration, times

    @cached_property
    def _step_nodes(self) -> StepNodes:
        return StepNodes(self.execution, self.marks)

    def step(self, alone: Floats) -> WhatIfStep:
        """The mean step in nanoseconds and its critical path, from durations alone."""
        duration, times = self.simulate(alone)
        windows = self._step_nodes.windows(times)
        slowed = 1 - alone / np.maximum(duration, 1e-9)
        return WhatIfStep(windows.mean, step_path(self.graph, times, windows, np.where(duration > alone, slowed, 0.0)))

    @cached_property
    def base(self) -> WhatIfStep:
        """The step with nothing changed."""
        return self.step(self.alone)
