"""`lumos predict`: what would this run do?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lumos.analysis.replay import Replay
from lumos.change.infer.completion import changed, complete
from lumos.change.infer.infer import infer
from lumos.cli.emission import Emission, Emit, read_emission
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, KwhPrice, Output, Price, ProfilerCosts, Pue, Tokens, TraceOptions
from lumos.cli.terminal import busy, deliver
from lumos.dry_run.dry_files import dry_files
from lumos.errors import InputError, OptionError
from lumos.export.chrome_traces import write_timeline
from lumos.export.launch_files import LaunchFiles
from lumos.files import check_output, write_csv
from lumos.prediction.bill import Tariff, read_tariff
from lumos.prediction.prediction import Prediction, predict
from lumos.report.predictions import flat_row
from lumos.report.terminal.show import show_launch, show_prediction
from lumos.setup import read_setup_with_notes
from lumos.setup.setup_files import read_plain

_ALL = TraceOptions()


def predict_command(
    setup: Annotated[
        Path | None, typer.Argument(help="The run: a setup, a config.json, a Megatron script, a torchtitan TOML.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="The trace, or the folder of ranks, of the run to start from.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE of the setup, as in parallel.tp=4. Repeatable.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="The GPU: short for --set cluster.gpu=GPU.")] = "",
    gpus: Annotated[str, typer.Option(help="How many: short for --set cluster.gpus=N.")] = "",
    scale: Annotated[
        list[str] | None, typer.Option(help="WHAT=FACTOR on durations: compute, comm, cpu, kernel:REGEX. Repeatable.")
    ] = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Predict a config.json from its sizes, not from the model's own code.")
    ] = False,
    options: TraceOptions = _ALL,
    profiler_costs: ProfilerCosts = None,
    as_json: AsJson = False,
    output: Output = None,
    price: Price = "",
    kwh_price: KwhPrice = "",
    pue: Pue = "",
    tokens: Tokens = "",
    emit: Emit = "",
) -> None:
    """What would this run do: from its description, or from a trace?

    From a trace: with some parts faster or slower (--scale), or in another configuration (--set, or a setup).
    """
    check_output(output, source or setup)
    cluster = [f"cluster.{key}={value}" for key, value in (("gpu", gpu), ("gpus", gpus)) if value]
    changes, scale, emission = [*cluster, *(changes or [])], scale or [], read_emission(emit)
    tariff = read_tariff(price, kwh_price, pue, tokens)
    _refuse(setup, source, changes, scale, options != _ALL or profiler_costs is not None, tariff != Tariff())
    if emission and source is not None and not setup and not changes:
        raise OptionError("--emit needs the setup of a run: name a setup file, or what is to change with --set")
    if source is None:
        found = _described(setup or Path(), changes, tariff, describe, emission)
    elif dry_files(source):
        found = _from_script(source, setup, changes, scale, tariff)
    elif setup is None and not changes:
        found = predict(load_run(source, options, profiler_costs), scale)
    else:
        found = _changed(partial(load_run, source, options, profiler_costs), setup, changes, tariff)
    launch = None
    if emission is not None:
        found, launch = emission.of_prediction(found)
    answer = found.as_dict() | ({"launch": launch.as_dict()} if launch else {})
    writers = {
        ".csv": lambda to: write_csv(to, [flat_row(answer)]),
        ".html": lambda to: _write_page(to, found, launch),
        ".trace.json": lambda to: write_timeline(to, found.run),
        ".trace.json.gz": lambda to: write_timeline(to, found.run),
    }
    deliver(answer, lambda _, to: _show(found, launch, to), as_json, output, writers)
    if emission is not None:
        emission.write(launch)


def _show(found: Prediction, launch: LaunchFiles | None, to: Console) -> None:
    show_prediction(found, to)
    if launch is not None:
        show_launch(launch, to)


def _refuse(
    setup: Path | None, source: Path | None, changes: list[str], scale: list[str], reads: bool, priced: bool
) -> None:
    """Refuse options that do not go together: `reads` are those of traces, `priced` those of bills."""
    described, traced = source is None, source is not None
    wrong = {
        "--step, --match, --rank-pattern, --profiler-costs, --engine and --address work on a trace: add --from":
            described and reads,
        "nothing to predict: name a setup file, or a trace with --from": described and setup is None,
        "--scale works on a trace: add --from, or change the setup with --set": described and scale,
        "--scale and a setup together: change the setup with --set, or leave it out and use --scale":
            traced and setup and scale,
        "--scale and --set together: ask for one at a time": traced and changes and scale,
        "--price, --kwh-price, --pue and --tokens need a setup, or what is to change: add --set":
            traced and priced and not setup and not changes and not dry_files(source or Path()),
    }  # fmt: skip
    for text, is_so in wrong.items():
        if is_so:
            raise OptionError(text)


def _described(
    setup: Path, changes: list[str], tariff: Tariff, describe: bool, emission: Emission | None
) -> Prediction:
    """From a description; a config.json from the model's own code, unless a tool is to launch it."""
    if emission is not None:
        reading = read_setup_with_notes(setup, changes)
        suited, notes = emission.suited(reading.setup)
        return predict(suited, notes=(*reading.notes, *notes), tariff=tariff)
    if describe or setup.suffix.lower() != ".json":
        reading = read_setup_with_notes(setup, changes)
        return predict(reading.setup, notes=tuple(reading.notes), tariff=tariff)
    return _from_config(setup, changes, tariff)


def _from_config(config: Path, changes: list[str], tariff: Tariff) -> Prediction:
    from lumos.dry_run.from_config import INSTALL, count_doubt, predict_config, why_not  # other setups need none of it

    reason = why_not(config, changes)
    if reason is None:
        with busy("running the model's own code on fake tensors"):
            return predict_config(config, changes, tariff)
    try:
        reading = read_setup_with_notes(config, changes)
    except InputError as error:
        raise InputError(f"{error}; {INSTALL}" if INSTALL in reason else str(error)) from None
    if any("not recognised" in note or "is not known" in note for note in reading.notes):
        with busy("counting the parameters of the model's own code"):
            doubt = count_doubt(config, reading.setup)
        if doubt:
            raise InputError(f"{config}: {doubt}")
    found = predict(reading.setup, notes=tuple(reading.notes), tariff=tariff)
    return replace(found, notes=(*found.notes, reason)) if reason else found


def _from_script(source: Path, setup: Path | None, changes: list[str], scale: list[str], tariff: Tariff) -> Prediction:
    from lumos.dry_run.from_script import predict_script  # traces need none of it

    if setup is not None or scale:
        raise OptionError(f"{source}: a dry run: change its cluster with --set; --scale and setups are for traces")
    return predict_script(source, changes, tariff)


def _changed(load: Callable[[], Replay], setup: Path | None, changes: list[str], tariff: Tariff) -> Prediction:
    """Another configuration of a traced run, whose own setup is inferred as far as the trace shows it."""
    stated, asked = read_plain(setup), read_plain(setup, changes)
    run = load()
    inferred = infer(run)
    has_shapes = any(header.shapes for header in run.execution.trace.headers)
    traced, wanted = complete(inferred, stated, has_shapes), changed(inferred, asked, stated)
    return predict(
        run, setup=wanted.setup, traced=traced.setup, notes=tuple(wanted.notes), tariff=tariff, inferred=inferred
    )


def _write_page(path: Path, found: Prediction, launch: LaunchFiles | None) -> None:
    from lumos.report.html.page import write_page  # jinja2, for which an answer without a page does not wait
    from lumos.report.html.parts import with_launch
    from lumos.report.html.prediction_page import prediction_page

    write_page(path, with_launch(prediction_page(found), launch))
