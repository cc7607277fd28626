"""`lumos fit`: samples to a cost model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lumos.cli.options import AsJson
from lumos.cli.terminal import console, print_json, progress_bar


def fit_command(
    samples: Annotated[Path, typer.Argument(help="A file that lumos sample wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write, for lumos cost --model.")],
    gpu: Annotated[str, typer.Option(help="The GPU, in place of the one that the samples name.")] = "",
    as_json: AsJson = False,
) -> None:
    """Turn samples into a cost model (needs the extra [fit])."""
    from lumos.files import check_output
    from lumos.report.terminal.costs import show_fit

    check_output(output, samples, (".npz",))
    answer = _fitted(samples, output, gpu)
    if as_json:
        print_json(answer)
    else:
        show_fit(answer, console())


def _fitted(path: Path, output: Path, asked: str) -> dict[str, Any]:
    from lumos.cost.operator_model import encode
    from lumos.files import whole_file
    from lumos.measure.fit.boosting import regressor
    from lumos.measure.fit.fit import fit, sampled_gpu
    from lumos.measure.fit.samples import read_samples
    from lumos.report.terminal.costs import fit_answer

    regressor()  # without it, reading samples would be in vain
    name, samples = read_samples(path)
    gpu = sampled_gpu(path, name, asked)
    with progress_bar() as progress:
        regressors, verdicts = fit(gpu, samples, progress)
    answer = fit_answer(path, gpu.name, output, verdicts)
    with whole_file(output) as file:
        file.write(encode(gpu.name, regressors))
    return answer
