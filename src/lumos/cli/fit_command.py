"""`lumos fit`: a model file from samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.cli.options import AsJson
from lumos.cli.terminal import deliver, progress_bar
from lumos.files import check_output, whole_file
from lumos.measure.fit import regressor
from lumos.measure.fit_machine import fit_machine
from lumos.report.terminal.costs import fit_answer, show_fit


def fit_command(
    samples: Annotated[
        list[Path], typer.Argument(help="Files that lumos sample wrote, or folders of published samples, of one GPU.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The model file (.npz) to write, for --model.")],
    gpu: Annotated[
        str, typer.Option(help="What was sampled, where the samples do not say: the name of a GPU, or a data sheet.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Fit a model of a machine to its samples (needs the extra [fit])."""
    for path in samples:
        check_output(output, path, (".npz",))
    regressor()  # without scikit-learn, reading samples would be in vain
    with progress_bar() as progress:
        machine = fit_machine(samples, gpu, progress)
    with whole_file(output) as file:
        file.write(machine.content)
    deliver(fit_answer(machine, output), show_fit, as_json)
