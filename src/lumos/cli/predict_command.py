"""`lumos predict`: what would this run do?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    from lumos.analysis.replay import Replay
    from lumos.prediction.bill import Tariff
    from lumos.setup.setup_files import PlainSetup


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
    """What would this run do: from its description, or from a trace of it with some parts faster or slower?"""
    from lumos.files import check_output
    from lumos.prediction.bill import read_tariff

    check_output(output, source or setup)
    tariff = read_tariff(price, kwh_price, pue, tokens)
    if source is None:
        if step or match or rank_pattern or profiler_costs:
            raise OptionError("--step, --match, --rank-pattern and --profiler-costs work on a trace: add --from")
        _forecast(setup, changes or [], scale or [], tariff, as_json, output)
        return
    if setup is not None and scale:
        raise OptionError("--scale and a setup together: change the setup with --set, or leave it out and use --scale")
    if changes and scale:
        raise OptionError("--scale and --set together: ask for one at a time")
    if setup is None and not changes:
        if price or kwh_price or pue or tokens:
            raise OptionError("--price, --kwh-price, --pue and --tokens need a setup, or what is to change: add --set")
        run = load_run(source, step, match, rank_pattern, profiler_costs, engine, address)
        _predict_from(run, scale or [], as_json, output)
        return
    plain = _plain(setup, changes or [])
    run = load_run(source, step, match, rank_pattern, profiler_costs, engine, address)
    _predict_changed(run, *plain, tariff, as_json, output)


def _plain(setup: Path | None, changes: list[str]) -> tuple[PlainSetup, PlainSetup]:
    """What is said of the traced run, and of the changed one."""
    from lumos.setup.setup_files import read_plain

    return read_plain(setup), read_plain(setup, changes)


def _predict_changed(
    run: Replay, said: PlainSetup, asked: PlainSetup, tariff: Tariff, as_json: bool, output: Path | None
) -> None:
    from lumos.change.change import Source, change
    from lumos.change.infer.completion import changed, complete
    from lumos.change.infer.infer import infer
    from lumos.report.html.forecast_page import write_changed_page
    from lumos.report.terminal.changes import inferred, show_change
    from lumos.report.terminal.forecasts import write_forecast_trace

    told = infer(run)
    has_shapes = any(header.shapes for header in run.execution.trace.headers)
    traced, wanted = complete(told, said, has_shapes), changed(told, asked)
    found = change(Source(run, traced.setup), wanted.setup, tuple(wanted.notes), tariff)
    answer = found.as_dict() | {"inferred": inferred(told)}
    if output is not None:
        step = found.forecast
        _write(output, answer, lambda to: write_changed_page(to, found), lambda to: write_forecast_trace(to, step))
    if as_json:
        print_json(answer)
    else:
        show_change(found, told, console())


def _forecast(
    setup: Path | None, changes: list[str], scale: list[str], tariff: Tariff, as_json: bool, output: Path | None
) -> None:
    from lumos.prediction.forecasting import forecast
    from lumos.report.html.forecast_page import write_forecast_page
    from lumos.report.terminal.forecasts import show_forecast, write_forecast_trace
    from lumos.setup import read_setup_with_notes

    if setup is None:
        raise OptionError("nothing to predict: name a setup file, or a trace with --from")
    if scale:
        raise OptionError("--scale works on a trace: add --from, or change the setup with --set")
    reading = read_setup_with_notes(setup, changes)
    found = forecast(reading.setup, tuple(reading.notes), tariff)
    answer = found.as_dict()
    if output is not None:
        _write(output, answer, lambda to: write_forecast_page(to, found), lambda to: write_forecast_trace(to, found))
    if as_json:
        print_json(answer)
    else:
        show_forecast(found, console())


def _predict_from(run: Replay, scale: list[str], as_json: bool, output: Path | None) -> None:
    from lumos.analysis.replay import predict
    from lumos.graph.scaling import Scale

    prediction = predict(run, [Scale.parse(text) for text in scale])
    answer = prediction.as_dict()
    if output is not None:
        from lumos.export.chrome_traces import write_timeline
        from lumos.report.html.prediction_page import write_prediction_page

        def perfetto(to: Path) -> None:
            write_timeline(to, run.execution, run.clean_graph, prediction.times, prediction.trace)

        _write(output, answer, lambda to: write_prediction_page(to, prediction), perfetto)
    if as_json:
        print_json(answer)
    else:
        from lumos.report.terminal.replays import show_prediction

        show_prediction(prediction, console())


def _write(output: Path, answer: dict[str, Any], page: Callable[[Path], None], trace: Callable[[Path], None]) -> None:
    """The answer in the form that the extension names."""
    from lumos.files import write_as, write_csv, write_json

    row = {k: v for k, v in answer.items() if isinstance(v, float | bool)} | answer["breakdown"]
    writers = {
        ".json": lambda to: write_json(to, answer), ".csv": lambda to: write_csv(to, [row]), ".html": page,
        ".trace.json": trace, ".trace.json.gz": trace,
    }  # fmt: skip
    write_as(output, writers)
