"""`lumos search`: which configuration is best?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lumos.cli.options import Address, AsJson, EngineName, KwhPrice, Pue, Shard, Tokens, Workers
from lumos.cli.terminal import console, print_json, progress_bar
from lumos.errors import OptionError

if TYPE_CHECKING:
    from lumos.search.estimator import Estimator
    from lumos.search.objective import Objective
    from lumos.search.outcome import Outcome
    from lumos.setup.setup import Setup

_UNMEASURED = "anchored in a trace: changes of parallelism from a trace have not been measured"
FORMS = (".json", ".csv", ".parquet", ".html")


def search_command(
    setup: Annotated[
        Path | None, typer.Argument(help="The run: a setup, a Hugging Face config.json, a Megatron script.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="How many GPUs: a number, or several with commas.")] = "",
    gpu: Annotated[str, typer.Option(help="Which kinds of GPU: names with commas; the setup's own otherwise.")] = "",
    fixed: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE, not to be varied. Repeatable.")
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(help="SECTION.KEY=A,B,…: these values and no others. Repeatable.")
    ] = None,
    objective: Annotated[str, typer.Option(help="What is to be small: time, cost, energy or gpus.")] = "time",
    top: Annotated[int, typer.Option(help="How many of the best are shown.")] = 10,
    memory: Annotated[float, typer.Option(help="GiB of a GPU that may be used; all it has otherwise.")] = 0.0,
    price: Annotated[
        str, typer.Option(help="What a GPU-hour costs: a number, or KIND=NUMBER for each kind, with commas.")
    ] = "",
    kwh_price: KwhPrice = "",
    pue: Pue = "",
    tokens: Tokens = "",
    deadline: Annotated[float, typer.Option(help="Days there are for all tokens.")] = 0.0,
    source: Annotated[
        Path | None, typer.Option("--from", help="A trace of the run: the search is anchored in what it measured.")
    ] = None,
    engine: EngineName = "local",
    address: Address = "",
    workers: Workers = 0,
    shard: Shard = "",
    journal: Annotated[
        Path | None, typer.Option(help="A folder for what is done; the same command goes on from there.")
    ] = None,
    exhaustive: Annotated[bool, typer.Option(help="Simulate everything that fits, whatever its bound.")] = False,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write it: .json, .csv, .parquet or .html.")
    ] = None,
) -> None:
    """Which TP, PP, CP, EP, DP, ZeRO, micro-batch, recomputation and schedule are best, and do they fit?

    \b
    Every valid combination gets a bound on its step time and its memory; those that may still be among the best, or on
    the Pareto front of time, memory and cost, are simulated as lumos predict does.
    """
    from lumos.files import check_output

    check_output(output, setup, FORMS)
    wanted = _objective(objective, price, kwh_price, pue, tokens, deadline)
    try:
        found = _searched(
            setup, _choices(fixed or [], vary or [], gpus, gpu), fixed or [], wanted, top, memory, source,
            (engine, workers, address), shard, journal, exhaustive,
        )  # fmt: skip
    except KeyboardInterrupt:
        way = f"the same command goes on from {journal}" if journal else "with --journal FOLDER it could be resumed"
        typer.echo(f"lumos: interrupted; {way}", err=True)
        raise typer.Exit(130) from None
    if output is not None:
        _write(found, output)
    if as_json:
        print_json(found.as_dict())
    else:
        from lumos.report.terminal.searches import show_search

        show_search(found.as_dict(), console())


def _objective(name: str, price: str, kwh_price: str, pue: str, tokens: str, deadline: float) -> Objective:
    from lumos.prediction.bill import read_tariff
    from lumos.search.objective import Objective
    from lumos.setup.gpus import gpu_named

    prices = {}
    for part in price.split(",") if price else []:
        kind, equals, amount = part.rpartition("=")
        value = read_tariff(amount).gpu_hour
        if value is None:
            raise OptionError(f"--price {price!r}: write a number, or KIND=NUMBER for each kind of GPU")
        prices[gpu_named(kind.strip()).name if equals else ""] = value
    tariff = read_tariff("", kwh_price, pue, tokens)
    energy = (tariff.kwh or 0.0) * tariff.pue
    return Objective(name, tuple(sorted(prices.items())), energy, tariff.tokens or 0.0, deadline)


def _choices(fixed: list[str], vary: list[str], gpus: str, gpu: str) -> dict[str, list[Any]]:
    """The values of axes that are named on the command line."""
    from lumos.search.space import AXES, FOLLOWING
    from lumos.setup.setup_files import toml_value

    found: dict[str, list[Any]] = {}
    for option, texts in (("--set", fixed), ("--vary", vary)):
        for text in texts:
            key, equals, values = (part.strip() for part in text.partition("="))
            if option == "--vary" and not equals:
                raise OptionError(f"--vary {text[:100]}: write SECTION.KEY=A,B,…")
            if option == "--vary" or key in AXES or key in FOLLOWING:
                if key in found:
                    raise OptionError(f"{option} {text[:100]}: the values of {key} are given twice")
                parts = values.split(",") if option == "--vary" else [values]
                found[key] = [toml_value(part.strip()) for part in parts if part.strip()]
    for option, key, text in (("--gpus", "cluster.gpus", gpus), ("--gpu", "cluster.gpu", gpu)):
        if text and key in found:
            raise OptionError(f"{option} {text}: the values of {key} are given twice")
    if gpus:
        found["cluster.gpus"] = [toml_value(part.strip()) for part in gpus.split(",")]
    if gpu:
        found["cluster.gpu"] = [part.strip() for part in gpu.split(",")]
    return found


def _searched(
    path: Path | None, choices: dict[str, list[Any]], fixed: list[str], objective: Objective, top: int, memory: float,
    source: Path | None, where: tuple[str, int, str], shard: str, journal: Path | None, exhaustive: bool,
) -> Outcome:  # fmt: skip
    from lumos.search.question import search
    from lumos.search.space import AXES, FOLLOWING
    from lumos.workers import engine_named
    from lumos.workers.shard import read_shard

    part = read_shard(shard)
    others = [text for text in fixed if text.partition("=")[0].strip() not in (*AXES, *FOLLOWING)]
    base, estimator, notes = _described(path, others) if source is None else _anchored(source, others, path)
    if estimator is not None and base.train.compile:
        choices.setdefault("parallel.tp", [base.parallel.tp])  # fused kernels cannot be cut otherwise
    with progress_bar() as progress, engine_named(*where) as engine:
        return search(
            base, choices, objective=objective, top=top, memory_gib=memory, estimator=estimator, engine=engine,
            shard=part, journal=journal, exhaustive=exhaustive, progress=progress, notes=notes,
        )  # fmt: skip


def _described(path: Path | None, others: list[str]) -> tuple[Setup, None, tuple[str, ...]]:
    from lumos.setup import read_setup_with_notes

    if path is None:
        raise OptionError("nothing to search: name a setup file, or a trace with --from")
    reading = read_setup_with_notes(path, others)
    return reading.setup, None, tuple(reading.notes)


def _anchored(source: Path, others: list[str], path: Path | None) -> tuple[Setup, Estimator, tuple[str, ...]]:
    """The setup to start from, prices anchored in a traced run of it, and what has to be said of them."""
    from lumos.change.change import Source, refuse
    from lumos.change.infer.completion import changed, complete
    from lumos.change.infer.infer import infer
    from lumos.cli.loading import load_run
    from lumos.search.estimator import Anchored
    from lumos.setup.setup_files import read_plain

    run = load_run(source, "", "", "", None)
    told = infer(run)
    traced = complete(told, read_plain(path), any(header.shapes for header in run.execution.trace.headers)).setup
    if traced.cluster.accelerator.is_cpu:
        raise OptionError("a search needs memory and power, which are not known of a CPU: use lumos predict --from")
    wanted = changed(told, read_plain(path, others)).setup
    refuse(traced, wanted)
    anchored = Source(run, traced)
    return wanted, Anchored(anchored.anchors), (*anchored.notes, _UNMEASURED)


def _write(found: Outcome, output: Path) -> None:
    from lumos.files import write_as, write_csv, write_json, write_parquet
    from lumos.report.html.search_page import write_search_page
    from lumos.search.outcome import COLUMNS

    write_as(
        output,
        {
            ".json": lambda to: write_json(to, found.as_dict()),
            ".csv": lambda to: write_csv(to, found.table(), names=COLUMNS),
            ".parquet": lambda to: write_parquet(to, found.table(), COLUMNS),
            ".html": lambda to: write_search_page(to, found.as_dict()),
        },
    )
