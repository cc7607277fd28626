"""`lumos sample`: measure operators on the GPU of this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from lumos.cli.options import AsJson
from lumos.cli.terminal import console, print_json, progress_bar
from lumos.errors import OptionError


def sample_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="The .jsonl file that rows are added to.")],
    scale: Annotated[float, typer.Option(help="How many shapes: a factor on the usual number.")] = 1.0,
    only: Annotated[str, typer.Option(help="Only these operators or collectives, with commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Stop after so long; the same command goes on from there.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Other shapes for another number.")] = 0,
    collectives: Annotated[
        bool | None, typer.Option(help="Collectives of this machine's GPUs too; so where there are several.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure operators on the GPU of this machine (needs torch), to be fitted."""
    from lumos.files import check_output
    from lumos.measure.sample.sampler import Wish, sample_machine, visible_gpus
    from lumos.report.terminal.costs import sample_answer, show_samples

    check_output(output, None, (".jsonl",))
    names = frozenset(name.strip() for name in only.split(",") if name.strip())
    wish = Wish(scale, names, seed, seconds, gpus=2).checked()
    gpus = visible_gpus() if collectives is not False else 1
    if collectives and gpus < 2:
        raise OptionError("--collectives needs more than one GPU with NCCL, and torch sees no more than one here")
    with progress_bar() as progress:
        done = sample_machine(wish._replace(gpus=gpus).checked(), output, progress)
    answer = sample_answer(output, *done)
    if as_json:
        print_json(answer)
    else:
        show_samples(answer, console())
