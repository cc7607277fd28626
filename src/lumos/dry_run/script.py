"""A user's training script, dry-run: called in its process by `lumos capture --dry`, right after it imported torch.

From there on the script runs on fake tensors and a fake GPU. It is stopped when its optimizer has stepped twice: the
first step makes the optimizer's state, the second is recorded.
"""

from __future__ import annotations

import atexit
import functools
import linecache
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lumos.capture.fake import fake_process_groups
from lumos.dry_run.compiled import compiled_as_kernels
from lumos.dry_run.fake_gpu import replaced
from lumos.dry_run.record import Recorder, StepCounter, TooManyOperatorsError, recorded
from lumos.dry_run.recorded_step import write_recording

VARIABLE = "LUMOS_DRY_RUN"  # set in the script's process, which can ask for it
_STEPS = 2
_WAY_OUT = f"leave that line out when the variable {VARIABLE} is set, or record on a GPU with lumos capture"
_ASKED = {
    "DataDependentOutputException": "it asks for the value of a tensor",
    "DynamicOutputShapeException": "the size of its result depends on the values of a tensor",
    "UnsupportedOperatorException": "it calls an operator without shapes for fake tensors",
    "UnsupportedFakeTensorException": "it makes a tensor that cannot be a fake one",
}


def dry_run_this_process(folder: Path, gpu: dict[str, Any], rank: int, world: int) -> None:
    """Turn this process into a dry run of one rank; its recording goes to a folder."""
    os.environ[VARIABLE] = "1"
    stack = ExitStack()
    recorder = stack.enter_context(recorded(**gpu))
    fake_process_groups(rank, world, functools.partial(setattr, recorder, "peers_are_faked", True))
    stack.enter_context(replaced(_replacements()))
    counter = StepCounter(recorder, stack.enter_context(compiled_as_kernels(recorder)))
    ended = functools.partial(_end, counter, folder)
    count_steps(counter, ended)
    sys.excepthook = functools.partial(_explain, sys.excepthook)
    atexit.register(_say_how_far, counter, os.getpid(), stack)


def count_steps(counter: StepCounter, ended: Callable[[], None]) -> None:
    """Follow the first optimizer that steps; call `ended` when it has stepped as often as is needed.

    A class of optimizers has its `step` wrapped when the first of it is made. Other optimizers are part of the step.
    """
    from torch.optim import Optimizer

    wrapped_by_torch = Optimizer.profile_hook_step
    counted: list[Any] = []

    def profile_hook_step(step: Any) -> Any:
        inner = wrapped_by_torch(step)

        @functools.wraps(inner)
        def counted_step(optimizer: Any, *args: Any, **options: Any) -> Any:
            if not counted:
                counted.append(optimizer)
            if counted[0] is not optimizer:
                return inner(optimizer, *args, **options)
            counter.begin(optimizer)
            result = inner(optimizer, *args, **options)
            counter.end(optimizer)
            if counter.ended == _STEPS:
                ended()
            counter.recorder.restart()
            return result

        return counted_step

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _end(counter: StepCounter, folder: Path) -> None:
    """Write the step, and stop the script: the rest of it would tell nothing new."""
    rank, world = _place()
    write_recording(folder / f"rank{rank}.dry.json.gz", counter.recording(_tokens(counter.recorder), 1, rank, world))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _place() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _tokens(recorder: Recorder) -> int:
    """Of a step: what is looked up in the embedding that is asked most."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for op in recorder.ops:
        looks_up = op.name == "aten.embedding.default" or any("embedding" in option for option in op.options)
        if op.phase == "forward" and looks_up:
            looked_up = [t for t in op.inputs if t.dtype in ("int64", "int32")]
            key = (op.module, op.inputs[0].shape)
            found[key] = found.get(key, 0) + max((t.elements for t in looked_up), default=0)
    return max(found.values(), default=0)


def _replacements() -> list[tuple[Any, str, Any]]:
    """What would need values, other processes or files."""
    from torch.utils.data import DataLoader

    make = DataLoader.__init__

    @functools.wraps(make)
    def in_this_process(loader: Any, *args: Any, **options: Any) -> None:
        options |= {"num_workers": 0, "pin_memory": False}
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            options.pop(name, None)
        make(loader, *args[:5], **options)

    def save(*_: Any, **__: Any) -> None:
        """Fake tensors have nothing to save."""

    return [(DataLoader, "__init__", in_this_process), (torch, "save", save)]


# ---------------------------------------------------------------------- what went wrong
def _explain(
    usual: Callable[..., None], kind: type[BaseException], error: BaseException, trail: TracebackType | None
) -> None:
    """One line: the script's own line, what is not supported there, the way out. A mistake of its own is as ever."""
    frames = traceback.extract_tb(trail)
    own = [frame for frame in frames if _is_users(frame.filename)]
    if not frames or not own or (own[-1] is frames[-1] and not isinstance(error, TooManyOperatorsError)):
        usual(kind, error, trail)
        return
    at = own[-1]
    code = (linecache.getline(at.filename, at.lineno or 0) or at.line or "").strip()[:100]
    if isinstance(error, TooManyOperatorsError):
        reason = "its step runs too many operators for a dry run (a loop over tokens in Python?)"
    else:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        reason = f"{_ASKED.get(kind.__name__, 'it fails on fake tensors')} ({kind.__name__}: {first[:160]})"
    sys.stdout.flush()
    text = f"lumos: {os.path.relpath(at.filename)}, line {at.lineno}: {code}: {reason}: {_WAY_OUT}\n"
    os.write(2, text.encode())  # torch.distributed reads what is written to sys.stderr
    os._exit(2)


def _is_users(path: str) -> bool:
    """Whether a file is neither an installed package, nor Python's, nor ours."""
    here = str(Path(__file__).resolve().parents[1])
    known = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python")
    return not (path.startswith("<") or path.startswith(here) or any(part in path for part in known))


def _say_how_far(counter: StepCounter, process: int, stack: ExitStack) -> None:
    """The script ended by itself, before it was stopped."""
    stack.close()
    if os.getpid() == process and counter.ended:
        sys.stderr.write(f"lumos: the optimizer made {counter.ended} of the {_STEPS} steps that a dry run needs\n")
