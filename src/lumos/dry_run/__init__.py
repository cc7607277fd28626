"""Dry runs: training code on fake tensors and a fake GPU, recorded as operators.

    recording = lumos.dry_run(train)

The package can be called like the function of its name (`lumos.dry_run.in_process`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module that is called as its function `dry_run`, which is imported at that moment."""

    def __getattr__(self, name: str) -> Any:
        if name != "dry_run":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from lumos.dry_run.in_process import dry_run

        return dry_run

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.dry_run(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
