"""Kernels of Triton that a script launches itself: written down by their operands, and marked as unseen."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from lumos.dry_run.gpu_functions import Add
from lumos.program.op import UNSEEN


def triton_launches(add: Add) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of what launches kernels; nothing if Triton is not installed."""
    if find_spec("triton") is None:
        return
    kernel, tuner = import_module("triton.runtime.jit").JITFunction, import_module("triton.runtime.autotuner").Autotuner

    @functools.wraps(kernel.run)
    def launch(self: Any, *args: Any, **given: Any) -> None:
        if not given.get("warmup"):
            write_down(add, self, [*args, *given.values()])

    @functools.wraps(tuner.run)
    def first_choice(self: Any, *args: Any, **given: Any) -> Any:
        """Of several configurations the fastest runs: which one does not matter for operands."""
        return self.fn.run(*args, **given)

    yield kernel, "run", launch
    yield tuner, "run", first_choice


def write_down(add: Add, kernel: Any, arguments: list[Any]) -> None:
    """A launch with tensors among its arguments; the last of them is taken as what it writes, as is usual."""
    tensors = [value for value in (getattr(a, "base", a) for a in arguments) if isinstance(value, torch.Tensor)]
    if tensors:
        add(name_of(kernel), tensors[:-1], tensors[-1:], (UNSEEN,))


def name_of(kernel: Any) -> str:
    """The name of a kernel that the user wrote."""
    kernel = getattr(kernel, "fn", kernel)  # of an autotuned one
    return f"triton.{getattr(kernel, '__name__', '') or getattr(getattr(kernel, 'fn', None), '__name__', 'kernel')}"
