"""`lumos sample`: measure operators on this machine's GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from lumos.cli.options import AsJson
from lumos.cli.terminal import deliver, progress_bar
from lumos.errors import OptionError
from lumos.files import check_output
from lumos.measure.sample import SamplePlan, sample_machine, visible_gpus
from lumos.report.terminal.costs import sample_answer, show_samples


def sample_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="The .jsonl file to append rows to.")],
    scale: Annotated[float, typer.Option(help="How many shapes: a factor on the usual number.")] = 1.0,
    only: Annotated[str, typer.Option(help="Only these operators or collectives, with commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Stop after this time; the same command resumes.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Another number draws other shapes.")] = 0,
    collectives: Annotated[
        bool | None, typer.Option(help="Also sample collectives; by default where there are several GPUs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure operators on this machine's GPU (needs torch), as input for lumos fit."""
    check_output(output, None, (".jsonl",))
    names = frozenset(name.strip() for name in only.split(",") if name.strip())
    plan = SamplePlan(scale, names, seed, seconds, gpus=2).checked()
    gpus = visible_gpus() if collectives is not False else 1
    if collectives and gpus < 2:
        raise OptionError("--collectives needs more than one GPU with NCCL, and torch sees no more than one here")
    with progress_bar() as progress:
        done = sample_machine(plan._replace(gpus=gpus).checked(), output, progress)
    answer = sample_answer(output, *done)
    deliver(answer, show_samples, as_json)
