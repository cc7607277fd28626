"""`lumos sample`: measure this machine."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lumos.cli.options import AsJson
from lumos.cli.terminal import deliver, progress_bar
from lumos.errors import LumosError, OptionError
from lumos.measure.sample import SamplePlan
from lumos.measure.sample_script import PlainProgress, chosen, interrupted, is_follower, sample_as_told, write_script
from lumos.measure.sample_summary import text_of


def sample_command(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The .jsonl file to append rows to.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default cuda where torch sees a GPU.")] = "auto",
    scale: Annotated[float, typer.Option(help="How many shapes: a factor on the usual number.")] = 1.0,
    only: Annotated[str, typer.Option(help="Only these operators, collectives or sections, with commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Stop after this time; the same command resumes.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Another number draws other shapes.")] = 0,
    collectives: Annotated[
        bool | None, typer.Option(help="Also sample collectives; by default where there are several GPUs or ranks.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="Write the sampler as one .pyz file, for a machine that has torch alone.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's GPUs or its CPU (needs torch), as input for lumos fit."""
    plan = SamplePlan(scale, chosen(only), seed, seconds, device)
    if script is not None:
        if output is not None or collectives is not None or plan != SamplePlan(device="auto"):
            raise OptionError(
                f"--script {script}: writes the sampler and measures nothing; leave the other options out, and give "
                "them to the sampler where it runs"
            )
        write_script(script)
        told = f"{script}: copy it to the machine, and run there: python {script.name} -o samples.jsonl"
        deliver({"script": str(script)}, lambda _, console: console.print(Text(told)), as_json)
        return
    if output is None:
        raise OptionError("name the file to append rows to: -o samples.jsonl")
    try:
        with progress_bar() as progress:
            answer = sample_as_told(plan, output, collectives, progress or PlainProgress(seconds), _note)
    except LumosError:
        if is_follower():
            raise typer.Exit(2) from None
        raise
    except KeyboardInterrupt:
        if not is_follower():
            _note(f"lumos: {interrupted(output)}")
        raise typer.Exit(130) from None
    deliver(answer, _show, as_json)


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")


def _show(answer: dict[str, Any], console: Console) -> None:
    console.print(Text(text_of(answer)))
