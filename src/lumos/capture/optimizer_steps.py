"""Steps of a script that says nothing of them: one ends whenever its optimizer has stepped."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from dataclasses import dataclass
from typing import Any

from lumos.capture.recording import Recording


@dataclass
class OptimizerSteps:
    """Tells a recording of every step of the first optimizer that steps; others are part of its step."""

    recording: Recording
    counted: Any = None  # a weak reference to that optimizer

    def stepped(self, optimizer: Any) -> None:
        if self.counted is None:
            self.counted = weakref.ref(optimizer)
            atexit.register(self._close, os.getpid())
        if self.counted() is optimizer:
            self.recording.step()

    def _close(self, process: int) -> None:
        """At the end of the process that stepped; one that was forked off it has nothing to say."""
        if os.getpid() == process:
            self.recording.close()


def count_optimizer_steps(recording: Recording) -> None:
    """Before any optimizer is made: a class of optimizers has its `step` wrapped when the first of it is made.

    The wrapper goes around torch's own, whose annotation of the step must lie inside ours; a hook after the step would
    be called inside it.
    """
    from torch.optim import Optimizer

    steps = OptimizerSteps(recording)
    wrapped_by_torch = Optimizer.profile_hook_step

    def profile_hook_step(step: Any) -> Any:
        inner = wrapped_by_torch(step)

        @functools.wraps(inner)
        def counted_step(optimizer: Any, *arguments: Any, **options: Any) -> Any:
            result = inner(optimizer, *arguments, **options)
            steps.stepped(optimizer)
            return result

        return counted_step

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)
