"""`lumos predict`: what would this run do?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lumos.analysis.replay import Replay
from lumos.cli.chakra_output import ChakraWishes, show_written, write_prediction
from lumos.cli.emission import Emission, Emit, read_emission
from lumos.cli.loading import load_run
from lumos.cli.options import (
    AsJson,
    KwhPrice,
    Model,
    Price,
    ProfilerCosts,
    Pue,
    ReliabilityOptions,
    RiskOptions,
    Tokens,
    TraceOptions,
)
from lumos.cli.prediction_sources import Described, OfConfig, OfGraph, OfScript, OfTrace, Source, graph_at
from lumos.cli.risk_of_step import AskedRisk, asked_risk, refuse_risk
from lumos.cli.run_failures import asked_run, failure_changes
from lumos.cli.several_gpus import COMPARED, compare_sources, deliver_comparison, listed_gpus
from lumos.cli.terminal import deliver
from lumos.dry_run.dry_files import dry_files
from lumos.errors import OptionError
from lumos.export.chrome_traces import write_timeline
from lumos.export.launch_files import LaunchFiles
from lumos.files import FORMS, check_output, write_csv
from lumos.prediction.bill import Tariff, read_prices, read_tariff
from lumos.prediction.gpu_comparison import machine_of, tariffs_on
from lumos.prediction.prediction import Prediction, predict
from lumos.report.predictions import flat_row
from lumos.report.risks import risk_row
from lumos.report.runs import run_row
from lumos.report.terminal.show import show_launch, show_prediction, show_risk, show_run
from lumos.risk.whole_run import WholeRun
from lumos.setup.setup_files import located

_ALL = TraceOptions()
_NO_FAILURES = ReliabilityOptions()
_NO_RISK = RiskOptions()


def predict_command(
    setup: Annotated[
        Path | None, typer.Argument(help="The run: a setup, a config.json, a Megatron script, a torchtitan TOML.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="The trace, ranks, dry run or Chakra workload to start from.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE of the setup, as in parallel.tp=4. Repeatable.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU: short for --set cluster.gpu=GPU. Several, with commas, are compared.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="How many: short for --set cluster.gpus=N.")] = "",
    model: Model = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(help="WHAT=FACTOR on durations: compute, comm, memcpy, cpu, kernel:REGEX. Repeatable."),
    ] = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Predict a config.json from its sizes, not from the model's own code.")
    ] = False,
    options: TraceOptions = _ALL,
    profiler_costs: ProfilerCosts = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Also write it: .html, .json, .csv, .trace.json.gz (Perfetto), .et (Chakra)."
        ),
    ] = None,
    price: Price = "",
    kwh_price: KwhPrice = "",
    pue: Pue = "",
    tokens: Tokens = "",
    risks: RiskOptions = _NO_RISK,
    reliability: ReliabilityOptions = _NO_FAILURES,
    emit: Emit = "",
    simulator: Annotated[
        str, typer.Option("--for", help="With -o NAME.et: astra-sim, for all files it needs and the command.")
    ] = "",
) -> None:
    """What would this run do: from its description, or from a trace?

    From a trace: with some parts faster or slower (--scale), or in another configuration (--set, or a setup).
    """
    names = listed_gpus(gpu)
    check_output(output, source or setup, COMPARED if len(names) > 1 else (*FORMS, ".et"))
    chakra = ChakraWishes(simulator)
    chakra.check(output or Path())
    stated = changes or []
    changes = [*_cluster(names, gpus, model), *failure_changes(reliability, tokens, names, stated), *stated]
    scale, emission = scale or [], read_emission(emit)
    prices, tariff = read_prices(price), read_tariff("", kwh_price, pue, tokens)
    priced, reads = bool(prices) or tariff != Tariff(), options != _ALL or profiler_costs is not None
    _refuse(setup, source, [*changes, *names], scale, reads, priced)
    _refuse_several(names, changes, emission)
    refuse_risk(risks, names)
    as_recorded = source is not None and not setup and not changes
    if emission and as_recorded:
        raise OptionError("--emit needs the setup of a run: name a setup file, or what is to change with --set")
    load = partial(load_run, source or Path(), options, profiler_costs, operators=True)
    if as_recorded and not names and not dry_files(source or Path()):
        found, asked = asked_risk(predict(load(), scale), risks)
        _deliver(found, None, asked, None, as_json, output, chakra)
        return
    run = _source(setup, source, changes, scale, describe or emission is not None, load, options)
    if len(names) > 1:
        deliver_comparison(compare_sources(run, names, tariff, prices), as_json, output)
        return
    found, launch = _predicted(run, emission, tariff, prices)
    found, asked = asked_risk(found, risks)
    _deliver(found, launch, asked, asked_run(found, reliability, asked.run_factors(found)), as_json, output, chakra)
    if emission is not None:
        emission.write(launch)


def _cluster(names: list[str], gpus: str, model: Path | None) -> list[str]:
    """What --gpu, --gpus and --model are short for."""
    if gpus.strip("0 ") == "" != gpus:  # in a setup, 0 stands for what parallel needs
        raise OptionError(f"--gpus {gpus}: give a number of 1 or more")
    short = (("gpu", names[0] if len(names) == 1 else ""), ("gpus", gpus), ("model", model))
    return [f"cluster.{key}={value}" for key, value in short if value]


def _predicted(
    run: Source, emission: Emission | None, tariff: Tariff, prices: dict[str, float]
) -> tuple[Prediction, LaunchFiles | None]:
    """The run on its own machine, with its prices, and as what is launched where that is asked for."""
    found = _described(run, emission, tariff) if emission and isinstance(run, Described) else run.on(None, tariff)
    if found.setup is not None:
        machine = machine_of(found.setup)
        found = replace(found, tariff=tariffs_on([machine], tariff, prices)[machine])
    return emission.of_prediction(found) if emission is not None else (found, None)


def _refuse_several(names: list[str], changes: list[str], emission: Emission | None) -> None:
    """Refuse what needs one GPU, where several are named."""
    if len(names) < 2:
        return
    if any(text.partition("=")[0].strip() == "cluster.gpu" for text in changes):
        raise OptionError(f"--gpu {','.join(names)[:100]} and --set cluster.gpu: leave one of them out")
    if emission is not None:
        raise OptionError(f"--emit and --gpu {','.join(names)[:100]}: files are written for one GPU; name one")


def _source(
    setup: Path | None, source: Path | None, changes: list[str], scale: list[str], describe: bool,
    load: Callable[[], Replay], options: TraceOptions,
) -> Source:  # fmt: skip
    """What to predict from."""
    if source is None:
        path = located(setup or Path())
        return Described(path, changes) if describe or path.suffix.lower() != ".json" else OfConfig(path, changes)
    if not dry_files(source):
        graph = graph_at(source, options) if setup is None else []
        return OfGraph(graph, changes) if graph else OfTrace(load, setup, changes)
    if setup is not None or scale:
        raise OptionError(f"{source}: a dry run: change its cluster with --set; --scale and setups are for traces")
    return OfScript(source, changes)


def _deliver(
    found: Prediction, launch: LaunchFiles | None, asked: AskedRisk, run: WholeRun | None, as_json: bool,
    output: Path | None, chakra: ChakraWishes,
) -> None:  # fmt: skip
    more = asked.as_dict() | ({"run": run.as_dict()} if run else {})
    answer = found.as_dict() | ({"launch": launch.as_dict()} if launch else {}) | more
    answer["warnings"] = [*answer["warnings"], *(run.warnings if run else ())]
    writers = {
        ".csv": lambda to: write_csv(to, [flat_row(answer) | risk_row(more.get("risk")) | run_row(more.get("run"))]),
        ".html": lambda to: _write_page(to, found, launch, asked, run),
        ".trace.json": lambda to: write_timeline(to, found.run),
        ".trace.json.gz": lambda to: write_timeline(to, found.run),
    }
    written = write_prediction(output, found, chakra) if output is not None and output.name.endswith(".et") else {}
    answer |= {"written": written} if written else {}

    def show(_: dict[str, Any], to: Console) -> None:
        _show(found, launch, asked, run, to)
        show_written(written, to)

    deliver(answer, show, as_json, None if written else output, writers)


def _show(found: Prediction, launch: LaunchFiles | None, asked: AskedRisk, run: WholeRun | None, to: Console) -> None:
    show_prediction(found, to)
    show_risk(asked.risk, asked.slow, to)
    if run is not None:
        show_run(run, to)
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
        "--scale and --set together (--gpu sets, too): ask for one at a time": traced and changes and scale,
        "--price, --kwh-price, --pue and --tokens need a setup, or what is to change: add --set":
            traced and priced and not setup and not changes and not dry_files(source or Path()),
    }  # fmt: skip
    for text, is_so in wrong.items():
        if is_so:
            raise OptionError(text)


def _described(run: Described, emission: Emission, tariff: Tariff) -> Prediction:
    """A described run as a tool can launch it."""
    reading = run.reading(None)
    suited, notes = emission.suited(reading.setup)
    return predict(suited, notes=(*reading.notes, *notes), tariff=tariff)


def _write_page(
    path: Path, found: Prediction, launch: LaunchFiles | None, asked: AskedRisk, run: WholeRun | None
) -> None:
    from lumos.report.html.page import write_page  # jinja2, for which an answer without a page does not wait
    from lumos.report.html.parts import with_launch
    from lumos.report.html.prediction_page import prediction_page
    from lumos.report.html.risk_view import with_risk
    from lumos.report.html.run_view import with_run

    page = with_risk(prediction_page(found), asked.risk, asked.slow)
    write_page(path, with_launch(with_run(page, run), launch))
