"""`lumos synthesise`: traces like those of a run, without any of them in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lumos.chakra.run_writer import write_chakra
from lumos.cli.loading import load_source
from lumos.cli.options import AsJson, TraceOptions
from lumos.cli.terminal import busy, deliver
from lumos.errors import InputError, OptionError
from lumos.files import check_output
from lumos.report.html.page import write_page
from lumos.report.html.synthetic_page import synthetic_page
from lumos.report.terminal.show_synthetics import show_synthetic
from lumos.synthesis.generate import Size
from lumos.synthesis.model import Model, is_model, read_model, save_model
from lumos.synthesis.synthesise import RecordedJob, Synthetic, record, synthesise


def synthesise_command(
    sources: Annotated[
        list[Path], typer.Argument(help="Runs to learn from, each a trace or a folder of ranks; or one learned model.")
    ],
    options: TraceOptions,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="NAME.et writes NAME.RANK.et.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write what was learned, a .json, to be given away.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the synthetic run; as recorded otherwise.")] = 0,
    steps: Annotated[int, typer.Option(help="Its steps.")] = 0,
    layers: Annotated[int, typer.Option(help="Its layers.")] = 0,
    micro_batches: Annotated[int, typer.Option(help="Its micro-batches a step.")] = 0,
    seed: Annotated[int, typer.Option(help="Another number draws another run; the same one the same run.")] = 0,
    against: Annotated[
        list[Path] | None, typer.Option(help="A run that is not learned from: compare with it. Repeatable.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the comparison: .html or .json.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate traces that behave like those of a run and contain none of them.

    Learning needs the extra [fit].
    """
    check_output(output, None, (".et",))
    check_output(save, None, (".json",), "--save")
    check_output(report, None, (".html", ".json"), "--report")
    made = _made(sources, options, Size(ranks, steps, layers, micro_batches), seed, against or [])
    with busy("comparing"):
        answer = made.as_dict()
    if save is not None:
        save_model(save, made.model)
    with busy("writing"):
        written = write_chakra(output, made.execution) if output is not None else None
    answer |= {
        "files": [str(file) for file in written.files] if written else [],
        "model": str(save) if save else "",
        "warnings": [*made.warnings, *(written.warnings if written else [])],
    }
    deliver(answer, show_synthetic, as_json, report, {".html": lambda to: write_page(to, synthetic_page(answer))})


def _made(sources: list[Path], options: TraceOptions, size: Size, seed: int, against: list[Path]) -> Synthetic:
    """The synthetic run of what was named."""
    models = [path for path in sources if is_model(path)]
    if models and len(sources) > 1:
        raise OptionError(f"{models[0]}: a learned model is given alone; name the runs, or the model")
    if models and not against and (options.step or options.match):
        given = f"--step {options.step}" if options.step else f"--match {options.match}"
        raise OptionError(f"{given}: chooses from recorded runs, and {models[0].name} is a learned model; leave it out")
    others = [_recorded(path, options) for path in against]
    learned: Model | list[RecordedJob] = read_model(models[0]) if models else [_recorded(p, options) for p in sources]
    with busy("learning and generating"):
        return synthesise(learned, size, seed, others)


def _recorded(path: Path, options: TraceOptions) -> RecordedJob:
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    try:
        source: Any = load_source(path, options)
    except InputError as error:
        if path.name.endswith(".json") and path.is_file():
            raise InputError(f"{error}, or a model that lumos synthesise --save wrote") from None
        raise
    with busy(f"looking at every step of {path.name}"):
        return record(path.name or str(path), source)
