"""`lumos fit`: a cost model from samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.cli.options import AsJson
from lumos.cli.terminal import deliver, progress_bar
from lumos.cost.hardware_model import encode
from lumos.files import check_output, whole_file
from lumos.measure.fit import fit, read_samples, regressor, sampled_gpu
from lumos.report.terminal.costs import fit_answer, show_fit


def fit_command(
    samples: Annotated[Path, typer.Argument(help="A file that lumos sample wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write, for lumos cost --model.")],
    gpu: Annotated[str, typer.Option(help="The GPU, instead of the one that the samples name.")] = "",
    as_json: AsJson = False,
) -> None:
    """Fit a cost model to samples (needs the extra [fit])."""
    check_output(output, samples, (".npz",))
    regressor()  # without scikit-learn, reading samples would be in vain
    name, rows = read_samples(samples)
    chosen = sampled_gpu(samples, name, gpu)
    with progress_bar() as progress:
        regressors, verdicts = fit(chosen, rows, progress)
    answer = fit_answer(samples, chosen.name, output, verdicts)
    with whole_file(output) as file:
        file.write(encode(chosen.name, regressors))
    deliver(answer, show_fit, as_json)
