"""A user's training script, dry-run: called in its process by `lumos capture --dry`, right after it imported torch.

From there on the script runs on fake tensors and a fake GPU. It is stopped when its optimizer has stepped twice: the
first step makes the optimizer's state, the second is recorded.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lumos.capture.fake import fake_process_groups, world_environment
from lumos.dry_run.compiled import compiled_as_kernels
from lumos.dry_run.endless_loops import TooManyOperatorsError
from lumos.dry_run.fake_gpu import ADDRESS, NotInDryRunError, replaced
from lumos.dry_run.record import Recorder, StepCounter, recorded
from lumos.dry_run.recorded_step import write_recording
from lumos.dry_run.script_functions import script_functions
from lumos.errors import printable

VARIABLE = "LUMOS_DRY_RUN"  # set in the script's process, which can ask for it
STEPS = 2
GPUS_OF_NODE = 8
_WAY_OUT = f"leave that line out when the variable {VARIABLE} is set, or record on a GPU with lumos capture"
_ASKED = {
    "DataDependentOutputException": "it asks for the value of a tensor",
    "DynamicOutputShapeException": "the size of its result depends on the values of a tensor",
    "UnsupportedOperatorException": "it calls an operator without shapes for fake tensors",
    "UnsupportedFakeTensorException": "it makes a tensor that cannot be a fake one",
    "ArgumentError": ADDRESS,
    "ModuleNotFoundError": "kernels of Triton are not run in a dry run",
}
_WORDS = ("FakeTensor", "fake tensor", "fake impl", "meta tensor", "'meta'", "data pointer", "Address", "CUDA",
          "torch._C", "dummy base class", "_OpNamespace", "triton", "NVIDIA")  # fmt: skip
_PLACES = (f"lumos{os.sep}dry_run", f"torch{os.sep}_subclasses", f"torch{os.sep}cuda")  # of the frame that fails


def record_this_process(text: str) -> None:
    """Called in a process of the command with the plan of `lumos capture --dry`."""
    plan = json.loads(text)
    rank, world = plan["fake_world"] or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    dry_run_this_process(Path(plan["folder"]), plan["gpu"], rank, world)


def dry_run_this_process(folder: Path, gpu: dict[str, Any], rank: int, world: int) -> None:
    """Turn this process into a dry run of one rank; its recording goes to a folder."""
    os.environ[VARIABLE] = "1"
    faulthandler.enable()  # C++ that is given an address of a fake tensor ends the process: say where
    stack = ExitStack()
    counter = faked(stack, gpu, rank, world)
    stack.enter_context(
        steps_counted(counter, functools.partial(_write, counter, folder, str(gpu.get("gpu", ""))), _end)
    )
    sys.excepthook = functools.partial(_explain, sys.excepthook)
    atexit.register(_say_how_far, counter, os.getpid(), stack)


def faked(stack: ExitStack, gpu: dict[str, Any], rank: int, world: int) -> StepCounter:
    """Until the stack is closed, this process has fake tensors, a fake GPU and the process groups of a fake world."""
    recorder = stack.enter_context(recorded(**{"gpus": min(world, GPUS_OF_NODE), **gpu}))
    stack.callback(fake_process_groups(rank, world, functools.partial(setattr, recorder, "peers_are_faked", True)))
    notes = stack.enter_context(compiled_as_kernels(recorder))
    stack.enter_context(replaced(script_functions(notes, rank)))
    return StepCounter(recorder, notes)


def trains_on_gpu(counter: StepCounter) -> bool:
    return any("cpu" not in op.options for op in counter.recorder.ops)


@contextmanager
def steps_counted(counter: StepCounter, recorded_one: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Follow the first optimizer that steps, or the last of those that step right after it; others are part of a step.

    Calls `recorded_one` after every step that can be used, and `ended` after one that is like all later ones: no
    optimizer made its first step in it, and DistributedDataParallel did not make its buckets anew.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    optimizers: list[Any] = []  # in the order of their first steps
    first_steps: list[Any] = []  # of optimizers, in the step that is under way
    last: list[Any] = [None]  # the optimizer that ends a step of training

    def before(optimizer: Any, *_: Any) -> None:
        if all(optimizer is not other for other in optimizers):
            optimizers.append(optimizer)
            first_steps.append(optimizer)
            if len(optimizers) == 1 or _goes_on(counter):
                last[0], counter.ended = optimizer, 0
        counter.begin(optimizer)

    def after(optimizer: Any, *_: Any) -> None:
        counter.end(optimizer, last[0] is optimizer)
        if last[0] is not optimizer:
            return
        if counter.ended >= STEPS:
            recorded_one()
            if not first_steps and counter.ended >= STEPS + _has_buckets(counter):
                ended()
        first_steps.clear()
        counter.recorder.restart()

    hooks = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _goes_on(counter: StepCounter) -> bool:
    """Whether the first step of training has just ended, and nothing was differentiated since."""
    return counter.ended == 1 and all(op.phase != "backward" for op in counter.recorder.ops)


def _has_buckets(counter: StepCounter) -> bool:
    """DistributedDataParallel makes its buckets anew in the second step."""
    from torch.nn.parallel import DistributedDataParallel

    return any(isinstance(model, DistributedDataParallel) for model in counter.recorder.modules.roots.values())


def _write(counter: StepCounter, folder: Path, gpu: str) -> None:
    """Write the step that has just ended, and the GPU that the script found."""
    if not trains_on_gpu(counter):
        _stop("lumos: the script trains on the CPU: move its model and data to cuda, which is there in a dry run")
    rank, world = place()
    recording = counter.recording(tokens_of(counter.recorder), 1, rank, world)
    recording.made_by["gpu"] = gpu
    try:
        write_recording(folder / f"rank{rank}.dry.json.gz", recording)
    except OSError as error:
        _stop(f"lumos: {folder}: the recording cannot be written ({error.strerror})")


def _end() -> None:
    """Stop the script: the rest of it would tell nothing new."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def place() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def tokens_of(recorder: Recorder) -> int:
    """Of a step: what is looked up in the embedding that is asked most.

    Compiled kernels do not name their table: those of one call of a graph, in order, have tables of their own.
    """
    found: dict[tuple[str, Any], int] = {}
    place = 0
    for op in recorder.ops:
        place = 0 if op.name == "compiled.call" else place
        is_compiled = any("embedding" in option for option in op.options)
        if op.phase == "forward" and (is_compiled or op.name == "aten.embedding.default"):
            looked_up = [t for t in op.inputs if t.dtype in ("int64", "int32")]
            key = (op.module, place if is_compiled else op.inputs[0].shape)
            place += is_compiled
            found[key] = found.get(key, 0) + max((t.elements for t in looked_up), default=0)
    return max(found.values(), default=0)


# ---------------------------------------------------------------------- what went wrong
def _explain(
    usual: Callable[..., None], kind: type[BaseException], error: BaseException, trail: TracebackType | None
) -> None:
    """One line: the script's own line, what is not supported there, the way out. A mistake of its own is as ever."""
    if kind.__name__ == "ChildFailedError":  # of torchrun, whose processes have said why
        sys.stdout.flush()
        os._exit(_exit_code(error))
    frames = traceback.extract_tb(trail)
    own = [frame for frame in frames if _is_users(frame.filename)]
    if not own or not _is_of_dry_runs(error, frames):
        usual(kind, error, trail)
        if isinstance(error, KeyError) and error.args and error.args[0] in world_environment(0, 1):
            variable = error.args[0]
            _stop(f"lumos: the script reads {variable}, which a launcher sets: add --world N, or start it by torchrun")
        return
    at = own[-1]
    code = (linecache.getline(at.filename, at.lineno or 0) or at.line or "").strip()[:100]
    _stop(f"lumos: {os.path.relpath(at.filename)}, line {at.lineno}: {code}: {_reason(error)}: {_WAY_OUT}")


def _exit_code(error: Any) -> int:
    with suppress(Exception):
        return int(error.get_first_failure()[1].exitcode) or 1
    return 1


def _reason(error: BaseException) -> str:
    import torch

    if isinstance(error, TooManyOperatorsError):
        return str(error)
    if isinstance(error, NotInDryRunError):
        return f"not supported in a dry run: {error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{_ASKED.get(name, f'it fails on the fake tensors of torch {torch.__version__}')} ({name}: {first[:160]})"


def _is_of_dry_runs(error: BaseException, frames: list[traceback.FrameSummary]) -> bool:
    """Whether an error comes from fake tensors or the fake GPU; others a script would meet on a GPU as well."""
    if isinstance(error, ModuleNotFoundError):
        return error.name == "triton"
    if type(error).__name__ in _ASKED or isinstance(error, NotImplementedError | TooManyOperatorsError):
        return True
    return any(word in str(error) for word in _WORDS) or any(part in frames[-1].filename for part in _PLACES)


def _stop(text: str) -> None:
    sys.stdout.flush()
    said = f"{printable(text)}\n".encode(errors="replace")
    os.write(2, said)  # torch.distributed reads what is written to sys.stderr
    os._exit(2)


def _is_users(path: str) -> bool:
    """Whether a file is neither an installed package, nor Python's, nor ours."""
    here = str(Path(__file__).resolve().parents[1])
    known = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", str(Path(sys.executable).parent))
    return not (path.startswith("<") or path.startswith(here) or any(part in path for part in known))


def _say_how_far(counter: StepCounter, process: int, stack: ExitStack) -> None:
    """The script ended by itself, before it was stopped."""
    stack.close()
    if os.getpid() == process and 0 < counter.ended < STEPS:
        sys.stderr.write(f"lumos: the optimizer made {counter.ended} of the {STEPS} steps that a dry run needs\n")
