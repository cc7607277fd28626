"""`lumos predict`: what would this run do?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.change.infer.completion import changed, complete
from lumos.change.infer.infer import infer
from lumos.cli.loading import load_run
from lumos.cli.options import (
    Address,
    AsJson,
    EngineName,
    KwhPrice,
    Match,
    Output,
    Price,
    ProfilerCosts,
    Pue,
    RankPattern,
    Step,
    Tokens,
)
from lumos.cli.terminal import console, print_json
from lumos.errors import OptionError
from lumos.files import check_output, write_as, write_csv, write_json
from lumos.prediction.bill import Tariff, read_tariff
from lumos.prediction.prediction import Prediction, predict
from lumos.report.terminal.predictions import show_prediction
from lumos.setup import read_setup_with_notes
from lumos.setup.setup_files import read_plain


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
    scale: Annotated[
        list[str] | None, typer.Option(help="WHAT=FACTOR on durations: compute, comm, cpu, kernel:REGEX. Repeatable.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
    step: Step = "",
    match: Match = "",
    rank_pattern: RankPattern = "",
    profiler_costs: ProfilerCosts = None,
    engine: EngineName = "local",
    address: Address = "",
    price: Price = "",
    kwh_price: KwhPrice = "",
    pue: Pue = "",
    tokens: Tokens = "",
) -> None:
    """What would this run do: from its description, or from a trace?

    From a trace: with some parts faster or slower (--scale), or in another configuration (--set, or a setup).
    """
    check_output(output, source or setup)
    tariff = read_tariff(price, kwh_price, pue, tokens)
    if source is None:
        if step or match or rank_pattern or profiler_costs:
            raise OptionError("--step, --match, --rank-pattern and --profiler-costs work on a trace: add --from")
        found = _described(setup, changes or [], scale or [], tariff)
    else:
        priced = bool(price or kwh_price or pue or tokens)
        _refuse_together(setup, changes or [], scale or [], priced)
        reading = (step, match, rank_pattern, profiler_costs, engine, address)
        if setup is None and not changes:
            found = predict(load_run(source, *reading), scale or [])
        else:
            found = _changed(source, reading, setup, changes or [], tariff)
    if output is not None:
        _write(output, found)
    if as_json:
        print_json(found.as_dict())
    else:
        show_prediction(found, console())


def _refuse_together(setup: Path | None, changes: list[str], scale: list[str], priced: bool) -> None:
    if setup is not None and scale:
        raise OptionError("--scale and a setup together: change the setup with --set, or leave it out and use --scale")
    if changes and scale:
        raise OptionError("--scale and --set together: ask for one at a time")
    if setup is None and not changes and priced:
        raise OptionError("--price, --kwh-price, --pue and --tokens need a setup, or what is to change: add --set")


def _described(setup: Path | None, changes: list[str], scale: list[str], tariff: Tariff) -> Prediction:
    if setup is None:
        raise OptionError("nothing to predict: name a setup file, or a trace with --from")
    if scale:
        raise OptionError("--scale works on a trace: add --from, or change the setup with --set")
    reading = read_setup_with_notes(setup, changes)
    return predict(reading.setup, notes=tuple(reading.notes), tariff=tariff)


def _changed(
    source: Path, reading: tuple[str, str, str, Path | None, str, str], setup: Path | None, changes: list[str],
    tariff: Tariff,
) -> Prediction:  # fmt: skip
    """Another configuration of a traced run, whose own setup is inferred as far as the trace shows it."""
    stated, asked = read_plain(setup), read_plain(setup, changes)
    run = load_run(source, *reading)
    inferred = infer(run)
    has_shapes = any(header.shapes for header in run.execution.trace.headers)
    traced, wanted = complete(inferred, stated, has_shapes), changed(inferred, asked)
    return predict(
        run, setup=wanted.setup, traced=traced.setup, notes=tuple(wanted.notes), tariff=tariff, inferred=inferred
    )


def _write(output: Path, found: Prediction) -> None:
    """The answer in the format that the extension names; pages and traces take what an answer does not need."""
    from lumos.export.chrome_traces import write_timeline
    from lumos.report.html.page import write_page
    from lumos.report.html.prediction_page import prediction_page

    answer = found.as_dict()
    row = {k: v for k, v in answer.items() if isinstance(v, float | bool)} | answer["breakdown"]
    writers = {
        ".json": lambda to: write_json(to, answer), ".csv": lambda to: write_csv(to, [row]),
        ".html": lambda to: write_page(to, prediction_page(found)),
        ".trace.json": lambda to: write_timeline(to, found.run),
        ".trace.json.gz": lambda to: write_timeline(to, found.run),
    }  # fmt: skip
    write_as(output, writers)
