"""`lumos.dry_run(train)`: a dry run of a function in this process, without a script of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from lumos.arguments import checks_arguments
from lumos.dry_run.recorded_step import Recording
from lumos.errors import LumosError, OptionError


class DryRunError(LumosError):
    """A function that cannot be dry-run: it takes too few steps, or does not train on a GPU."""


class _EnoughError(BaseException):
    """Ends the function when its second step is recorded; no `except Exception` of it catches this."""


@checks_arguments
def dry_run(train: Callable[[], Any], world: int = 1, rank: int = 0, gpu: str = "h100") -> Recording:
    """Run a function that builds a model and trains it, on fake tensors and a fake GPU; the second step is recorded.

    The function calls `optimizer.step()` at least twice, better three times, and is stopped after that. Inside, `cuda`
    is there, tensors hold no memory, and `torch.distributed` poses as one rank of a job of `world`. Afterwards torch is
    as it was.

    >>> def train():                                              # doctest: +SKIP
    ...     model = torch.nn.Linear(4096, 4096).cuda()
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     for _ in range(3):
    ...         model(torch.randn(8192, 4096, device="cuda")).sum().backward()
    ...         optimizer.step()
    >>> recording = lumos.dry_run(train, gpu="h200")              # doctest: +SKIP
    >>> recording.peak_bytes                                      # doctest: +SKIP
    """
    from lumos.capture.fake import check_world
    from lumos.capture.rank_info import require_torch
    from lumos.setup.gpus import gpu_named

    if not callable(train):
        raise OptionError(f"dry_run: {train!r} is not a function that builds and trains a model")
    check_world(rank, world)
    found = gpu_named(gpu)
    require_torch()
    with ExitStack() as stack:
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # torch.distributed puts its own there
        stack.callback(_leave_no_group)
        described = {"gpu": f"NVIDIA {found.name.upper()}", "memory_gib": found.memory_gib}
        return _recorded(train, stack, world, rank, described)


def _recorded(train: Callable[[], Any], stack: ExitStack, world: int, rank: int, gpu: dict[str, Any]) -> Recording:
    from lumos.dry_run.endless_loops import TooManyOperatorsError
    from lumos.dry_run.script import STEPS, faked, steps_counted, tokens_of, trains_on_gpu

    counter = faked(stack, gpu, rank, world)
    found: list[Recording] = []

    def keep() -> None:
        if not trains_on_gpu(counter):
            raise DryRunError("dry_run: the function trains on the CPU: move its model and data to cuda")
        recording = counter.recording(tokens_of(counter.recorder), 1, rank, world)
        recording.made_by["gpu"] = gpu["gpu"]
        found.append(recording)

    def end() -> None:
        raise _EnoughError

    stack.enter_context(steps_counted(counter, keep, end))
    try:
        with suppress(_EnoughError):
            train()
    except TooManyOperatorsError as error:
        raise DryRunError(f"dry_run: {error}") from None
    except RuntimeError as error:
        # The first backward pass of a process starts threads for the devices that are there, and no others later.
        if "device_ready_queues_" not in str(error):
            raise
        raise DryRunError(
            "dry_run: this process has run a backward pass before, without a GPU, and torch can run none on the fake "
            "one after that: dry-run first, or in a process of its own"
        ) from None
    if not found:
        raise DryRunError(f"dry_run: the function made {counter.ended} of the {STEPS} optimizer steps that are needed")
    return found[-1]


def _leave_no_group() -> None:
    """A process group of the fake world must not outlive it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and str(dist.get_backend()) == "fake":
        dist.destroy_process_group()
