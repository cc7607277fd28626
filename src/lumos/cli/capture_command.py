"""`lumos capture`: record some steps of a training script to which no line may be added."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lumos.capture.command import run_command, signal_name
from lumos.capture.recording import Plan
from lumos.errors import OptionError


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
        int, typer.Option(help="Let one process be a rank of a job of this many, whose other ranks are not there.")
    ] = 0,
    rank: Annotated[int, typer.Option(help="Which rank of the fake world.")] = 0,
) -> None:
    """Record some steps of a training script.

    PyTorch with any launcher; a step ends when the optimizer has stepped. The exit code is that of the command.
    """
    if rank and not fake_world:
        raise OptionError(f"--rank {rank} is of a fake world: give its size with --fake-world")
    if fake_world < 0:
        raise OptionError(f"--fake-world {fake_world}: give the number of ranks of the job")
    plan = Plan(output, steps, warmup, setup, rank_env, (rank, fake_world) if fake_world else None).checked()
    before = _written(output)
    code = run_command(command, plan)
    _report(output, sorted(set(_written(output).items()) - set(before.items())), warmup, code, signal_name(code))
    sys.exit(code)


def _written(folder: Path) -> dict[str, int]:
    """The traces in a folder, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("rank*.pt.trace.json.gz")}


def _report(folder: Path, found: list[tuple[str, int]], warmup: int, code: int, signal: str) -> None:
    ended = f"; the command ended with {signal or code}" if code else ""
    if code and not found:
        text, ended = f"nothing was recorded: the command ended with {signal or code} (its own output says why)", ""
    elif found:
        count = "1 trace" if len(found) == 1 else f"{len(found)} traces"
        text = f"{count} in {folder}; next: lumos check {folder}, lumos replay {folder}"
    else:
        text = (
            f"nothing was recorded: no torch.optim optimizer made more than {warmup} steps in a Python process of the "
            "command; lower --warmup, or add lumos.capture(…) to the script"
        )
    sys.stderr.write(f"lumos: {text}{ended}\n")
