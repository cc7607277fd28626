"""Recording of training scripts with the PyTorch profiler; needs torch only.

    with lumos.capture("traces") as step:
        for batch in data:
            train(batch)
            step()

The package can be called like the function of its name, so that both `lumos.capture(…)` and
`lumos.capture.fake_world(…)` work, whichever of the two is imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from lumos.capture.fake import fake_world
from lumos.capture.recording import Recording, capture

__all__ = ["Recording", "capture", "fake_world"]


class _CallableModule(ModuleType):
    """A module that is called as its function `capture`."""

    def __call__(self, *arguments: Any, **options: Any) -> Recording:
        return capture(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
