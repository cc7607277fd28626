"""Dry run of a user's training script: called in its process by `lumos capture --dry`, right after it imported torch.

From then on the script runs on fake tensors and a fake GPU. It is stopped when its optimizer has stepped twice: the
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

import torch
import torch.cuda.nccl
import torch.distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lumos.capture.fake import fake_process_groups, world_environment
from lumos.dry_run.compiled import compiled_as_kernels
from lumos.dry_run.endless_loops import TooManyOperatorsError
from lumos.dry_run.fake_gpu import ADDRESS, NotInDryRunError, Replacement, refused, replaced
from lumos.dry_run.record import Recorder, StepCounter, recorded
from lumos.dry_run.recorded_step import write_recording
from lumos.errors import printable

ONE_PROCESS = "torch.multiprocessing.spawn: one of {} processes runs, assuming that the others do the same"
ONE_GPU = "nn.DataParallel runs as one GPU with the whole batch: use DistributedDataParallel for several GPUs"
_OBJECT = "it waits for an object of another rank: give a PipelineStage its input_args and output_args"
VARIABLE = "LUMOS_DRY_RUN"  # set in the script's process, which can ask for it
STEPS = 2
GPUS_OF_NODE = 8
_FIX = f"leave that line out when the variable {VARIABLE} is set, or record on a GPU with lumos capture"
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
    """Turn a process of the command into a dry run of one rank, by the plan of `lumos capture --dry`."""
    plan = json.loads(text)
    folder, gpu = Path(plan["folder"]), plan["gpu"]
    os.environ[VARIABLE] = "1"
    faulthandler.enable()  # C++ that is given an address of a fake tensor ends the process: say where
    stack = ExitStack()
    counter = faked(stack, gpu, *(plan["fake_world"] or place()))
    write = functools.partial(_write, counter, folder, str(gpu.get("gpu", "")))
    stack.enter_context(steps_counted(counter, write, _end))
    sys.excepthook = functools.partial(_explain, sys.excepthook)
    atexit.register(_say_how_far, counter, os.getpid(), stack)


def faked(stack: ExitStack, gpu: dict[str, Any], rank: int, world: int) -> StepCounter:
    """Until the stack is closed, this process has fake tensors, a fake GPU and the process groups of a fake world."""
    recorder = stack.enter_context(recorded(**{"gpus": min(world, GPUS_OF_NODE), **gpu}))
    stack.callback(fake_process_groups(rank, world, functools.partial(setattr, recorder, "peers_are_faked", True)))
    stack.enter_context(compiled_as_kernels(recorder))
    stack.enter_context(replaced(_functions_of_scripts(recorder.notes, rank)))
    return StepCounter(recorder)


def _functions_of_scripts(notes: dict[str, None], rank: int) -> Iterator[Replacement]:
    """Functions around training that would need other processes or files: loaders, checkpoints, processes."""
    saved: dict[str, Any] = {}
    load = torch.load

    def save(value: Any, file: Any, *_: Any, **__: Any) -> None:
        """Fake tensors have nothing to save; a script that loads the file again gets them back."""
        if isinstance(file, str | os.PathLike):
            saved[os.fspath(file)] = value

    @functools.wraps(load)
    def loaded(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
        if name not in saved:
            return load(file, map_location, *args, **options)
        device = map_location if isinstance(map_location, str | torch.device) else None
        return tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device or t.device), saved[name])

    def spawn(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if nprocs > 1:
            notes[ONE_PROCESS.format(nprocs)] = None
        function(rank % max(nprocs, 1), *args)

    def on_one_gpu(parallel: Any, *inputs: Any, **options: Any) -> Any:
        notes[ONE_GPU] = None
        inputs, options = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), (inputs, options))
        return parallel.module(*inputs, **options)

    yield torch.distributed, "is_nccl_available", lambda: True
    yield torch.cuda.nccl, "version", lambda: (2, 27, 3)
    yield torch.distributed, "recv_object_list", refused(_OBJECT)
    yield torch.distributed, "send_object_list", lambda *_, **__: None
    yield DataLoader, "__init__", _in_this_process(DataLoader.__init__)
    yield torch, "save", save
    yield torch, "load", loaded
    yield torch.multiprocessing, "spawn", spawn
    yield torch.nn.DataParallel, "forward", on_one_gpu


def _in_this_process(make: Any) -> Any:
    """A data loader without workers: fake tensors do not travel between processes."""

    @functools.wraps(make)
    def in_this_process(loader: Any, *args: Any, **options: Any) -> None:
        options |= {"num_workers": 0, "pin_memory": False}
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            options.pop(name, None)
        make(loader, *args[:5], **options)

    return in_this_process


# ---------------------------------------------------------------------- steps of training
def trains_on_gpu(counter: StepCounter) -> bool:
    """Whether the step has run anything on the GPU."""
    return any("cpu" not in op.options for op in counter.recorder.ops)


@contextmanager
def steps_counted(counter: StepCounter, recorded_one: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Follow the first optimizer that steps, or the last of those that step right after it; others are part of a step.

    Calls `recorded_one` after every step that can be used, and `ended` after one that is like all later ones: no
    optimizer made its first step in it, and DistributedDataParallel did not make its buckets anew.
    """
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

    with register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after):
        yield


def _goes_on(counter: StepCounter) -> bool:
    """Whether the first step of training has just ended, and nothing was differentiated since."""
    return counter.ended == 1 and all(op.phase != "backward" for op in counter.recorder.ops)


def _has_buckets(counter: StepCounter) -> bool:
    """DistributedDataParallel makes its buckets anew in the second step."""
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
    """Stop the script: later steps are the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def place() -> tuple[int, int]:
    """The rank of this process and the number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def tokens_of(recorder: Recorder) -> int:
    """Tokens of a step: those that are looked up in the embedding that is asked most.

    Compiled kernels do not name their table: those of one call of a graph, in order, have tables of their own.
    """
    by_table: dict[tuple[str, Any], int] = {}
    place = 0
    for op in recorder.ops:
        place = 0 if op.name == "compiled.call" else place
        is_compiled = any("embedding" in option for option in op.options)
        if op.phase == "forward" and (is_compiled or op.name == "aten.embedding.default"):
            looked_up = [t for t in op.inputs if t.dtype in ("int64", "int32")]
            key = (op.module, place if is_compiled else op.inputs[0].shape)
            place += is_compiled
            by_table[key] = by_table.get(key, 0) + max((t.elements for t in looked_up), default=0)
    return max(by_table.values(), default=0)


# ---------------------------------------------------------------------- what went wrong
def _explain(
    usual: Callable[..., None], kind: type[BaseException], error: BaseException, trail: TracebackType | None
) -> None:
    """Print the script's own line, what is not supported there, and the fix; other errors are printed as always."""
    if kind.__name__ == "ChildFailedError":  # of torchrun, whose processes have printed the reason
        status = 1
        with suppress(Exception):
            status = int(error.get_first_failure()[1].exitcode) or 1  # type: ignore[attr-defined]
        sys.stdout.flush()
        os._exit(status)
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
    _stop(f"lumos: {os.path.relpath(at.filename)}, line {at.lineno}: {code}: {_reason(error)}: {_FIX}")


def _reason(error: BaseException) -> str:
    if isinstance(error, TooManyOperatorsError):
        return str(error)
    if isinstance(error, NotInDryRunError):
        return f"not supported in a dry run: {error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{_ASKED.get(name, f'it fails on the fake tensors of torch {torch.__version__}')} ({name}: {first[:160]})"


def _is_of_dry_runs(error: BaseException, frames: list[traceback.FrameSummary]) -> bool:
    """Whether an error comes from fake tensors or the fake GPU; the script would meet others on a GPU as well."""
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
    """At the end of a script that was not stopped: report how many steps it made."""
    stack.close()
    if os.getpid() == process and 0 < counter.ended < STEPS:
        sys.stderr.write(f"lumos: the optimizer made {counter.ended} of the {STEPS} steps that a dry run needs\n")
