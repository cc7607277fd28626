"""`lumos capture`: record some steps of a training script to which no line may be added."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lumos.capture.command import STARTUP, run_command, signal_name
from lumos.capture.recording import Plan
from lumos.errors import OptionError, printable
from lumos.setup.gpus import gpu_named

_NO_TORCH = "{python} has no torch; install it with: {python} -m pip install torch"
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_OF_TORCH = ("torchrun", "accelerate", "deepspeed")
_MOST_WORDS = 8  # of a command, among which its Python may be: env, nice and others come before it
_CAPABILITIES = {"volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "blackwell": (10, 0),
                 "rtx-blackwell": (12, 0)}  # fmt: skip
_MISSING, _PATIENCE_S = 63, 20.0
_LOOK = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else {_MISSING})"


def capture_command(
    command: Annotated[list[str], typer.Argument(help="What to run, as in: -- torchrun --nproc-per-node 8 train.py")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder that gets one trace a rank.")],
    steps: Annotated[int, typer.Option(help="How many steps to record.")] = 2,
    warmup: Annotated[int, typer.Option(help="How many steps to let pass before.")] = 5,
    setup: Annotated[Path | None, typer.Option(help="The run's setup, to be kept beside the traces.")] = None,
    rank_env: Annotated[
        str, typer.Option(help="The variable with the rank, where torch.distributed is not used.")
    ] = "RANK",
    fake_world: Annotated[
        int,
        typer.Option(
            "--fake-world", "--world", help="Let one process be a rank of a job of this many; its peers are not there."
        ),
    ] = 0,
    rank: Annotated[int, typer.Option(help="Which rank of the fake world.")] = 0,
    dry: Annotated[
        bool, typer.Option("--dry", help="Without a GPU: run two steps on fake tensors, then stop the command.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="The GPU that the script finds in a dry run.")] = "h100",
) -> None:
    """Record a training script, or dry-run it on a machine without a GPU.

    PyTorch with any launcher; a step ends when the optimizer has stepped. The exit code is that of the command.
    """
    if rank and not fake_world:
        raise OptionError(f"--rank {rank} is of a fake world: give its size with --world")
    if fake_world < 0:
        raise OptionError(f"--world {fake_world}: give the number of ranks of the job")
    world = (rank, fake_world) if fake_world else None
    plan = Plan(output, steps, warmup, setup, rank_env, world).checked()
    if dry:
        plan = replace(plan, by="lumos.dry_run.script", gpu=_gpu(gpu))
    pattern = "rank*.dry.json.gz" if dry else "rank*.pt.trace.json.gz"
    before = _written(output, pattern)
    code = _run(command, plan)
    found = sorted(set(_written(output, pattern).items()) - set(before.items()))
    if not found and (python := _python_without_torch(command)):
        sys.stderr.write(f"lumos: nothing was recorded: {_NO_TORCH.format(python=printable(python))}\n")
        sys.exit(code or 2)
    if dry:
        _report_dry(output, len(found), code, signal_name(code), gpu)
    else:
        _report(output, found, warmup, code, signal_name(code))
    sys.exit(code)


def _run(command: list[str], plan: Plan) -> int:
    try:
        return run_command(command, plan)
    except OptionError as error:
        if Path(command[0]).name not in _OF_TORCH:
            raise
        raise OptionError(f"{error}: it comes with torch; install that with: pip install torch") from None


def _python_without_torch(command: list[str]) -> str:
    """The Python of a command, if it has no torch; '' if it has, or if the command does not name its Python."""
    python = next((word for word in command[:_MOST_WORDS] if _PYTHON.fullmatch(Path(word).name)), "")
    if not python:
        return ""
    program = os.path.abspath(shutil.which(python) or python)
    try:  # elsewhere: `python -c` imports from the current folder
        done = subprocess.run([program, "-c", _LOOK], capture_output=True, timeout=_PATIENCE_S, cwd=STARTUP)
    except (OSError, subprocess.SubprocessError):
        return ""
    return python if done.returncode == _MISSING else ""


def _gpu(name: str) -> dict[str, object]:
    """What a script may ask of its GPU."""
    found = gpu_named(name)
    capability = _CAPABILITIES.get(found.family, (9, 0))
    return {"gpu": f"NVIDIA {found.name.upper()}", "memory_gib": found.memory_gib, "capability": capability}


def _report_dry(folder: Path, found: int, code: int, signal: str, gpu: str) -> None:
    if code:
        sys.stderr.write(f"lumos: the command ended with {signal or code}: nothing to predict from\n")
    elif not found:
        raise OptionError(
            "nothing was recorded: no torch.optim optimizer made two steps in a Python process of the command, or that "
            "Python has no torch; let the script train two steps"
        )
    else:
        count = "1 rank" if found == 1 else f"{found} ranks"
        place = printable(str(folder))
        sys.stderr.write(f"lumos: {count} in {place}; next: lumos predict --from {place} --set cluster.gpu={gpu}\n")


def _written(folder: Path, pattern: str) -> dict[str, int]:
    """The recordings in a folder, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(pattern)}


def _report(folder: Path, found: list[tuple[str, int]], warmup: int, code: int, signal: str) -> None:
    ended = f"; the command ended with {signal or code}" if code else ""
    if code and not found:
        text, ended = f"nothing was recorded: the command ended with {signal or code} (its own output says why)", ""
    elif found:
        count = "1 trace" if len(found) == 1 else f"{len(found)} traces"
        text = f"{count} in {folder}; next: lumos check {folder}, lumos replay {folder}"
    else:
        text = (
            "nothing was recorded: unless a line above says why, no torch.optim optimizer made more than "
            f"{warmup} steps in a Python process of the command; lower --warmup, or add lumos.capture(…) to the script"
        )
    sys.stderr.write(f"lumos: {printable(text)}{ended}\n")
