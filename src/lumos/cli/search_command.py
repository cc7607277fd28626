"""`lumos search`: which configuration is best?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lumos.cli.emission import Emission, Emit, read_emission
from lumos.cli.loading import load_run
from lumos.cli.options import (
    Address,
    AsJson,
    EngineName,
    KwhPrice,
    Model,
    Pue,
    ReliabilityOptions,
    Shard,
    Tokens,
    Workers,
)
from lumos.cli.run_failures import failure_changes
from lumos.cli.several_gpus import listed_gpus
from lumos.cli.terminal import deliver, progress_bar
from lumos.errors import OptionError
from lumos.export.launch_files import LaunchFiles
from lumos.files import check_output, write_csv, write_parquet
from lumos.prediction.bill import check_prices, read_prices, read_tariff
from lumos.report.html.page import write_page
from lumos.report.html.parts import with_launch
from lumos.report.html.search_page import search_page
from lumos.report.terminal.show import show_launch
from lumos.report.terminal.show_searches import show_search
from lumos.search.estimator import CalibratedEstimator, Estimator
from lumos.search.ranking import Objective
from lumos.search.search import COLUMNS, search
from lumos.search.space import AXES, DERIVED
from lumos.setup.gpus import gpu_named
from lumos.setup.importers.any_file import toml_value
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_plain
from lumos.traced.infer.completion import changed, complete
from lumos.traced.infer.infer import infer
from lumos.traced.learned import CalibratedRun, refuse
from lumos.workers import engine_named, read_shard

_NOT_VALIDATED = "calibrated with a trace: the accuracy for changed parallelism has not been measured"

Choices = dict[str, list[Any]]
Base = tuple[Setup, Estimator | None, tuple[str, ...]]
"""The setup to start from, its estimator, and notes about both."""
Searched = tuple[Setup, tuple[str, ...]]


Argument, Option = typer.Argument, typer.Option
SetupPath = Annotated[Path | None, Argument(help="The run: a setup, a Hugging Face config.json, a Megatron script.")]
Gpus = Annotated[str, Option(help="The number of GPUs, or several with commas; --objective gpus finds it.")]
GpuTypes = Annotated[str | None, Option(help="GPUs or data sheets to compare, with commas; the setup's by default.")]
Fixed = Annotated[list[str] | None, Option("--set", help="SECTION.KEY=VALUE, not to be varied. Repeatable.")]
Vary = Annotated[list[str] | None, Option(help="SECTION.KEY=A,B,…: these values and no others. Repeatable.")]
Minimise = Annotated[str, Option(help="What to minimise: time, cost, energy or gpus.")]
Top = Annotated[int, Option(help="How many of the best configurations to show.")]
Memory = Annotated[float, Option(help="GiB of a GPU that may be used; all it has by default.")]
Prices = Annotated[str, Option(help="The price of a GPU-hour: a number, or GPU=NUMBER for each type, with commas.")]
Deadline = Annotated[float, Option(help="Days until all tokens must be trained on.")]
ByRisk = Annotated[bool, Option("--risk", help="By the 90th percentile of drawn steps and runs, not by typical ones.")]
Mtbf = Annotated[str | None, Option(help="With --tokens: GPU-hours between failures, or published rates: llama3, ….")]
Trace = Annotated[Path | None, Option("--from", help="A trace of the run, to calibrate the predicted times with.")]
JournalPath = Annotated[
    Path | None, Option(help="A folder for progress; the same command resumes an interrupted search.")
]
Exhaustive = Annotated[bool, Option(help="Simulate everything that fits, whatever its bound.")]
Output = Annotated[Path | None, Option("-o", "--output", help="Also write it: .json, .csv, .parquet or .html.")]


def search_command(
    setup: SetupPath = None,
    gpus: Gpus = "",
    gpu: GpuTypes = None,
    model: Model = None,
    fixed: Fixed = None,
    vary: Vary = None,
    objective: Minimise = "time",
    top: Top = 10,
    memory: Memory = 0.0,
    price: Prices = "",
    kwh_price: KwhPrice = "",
    pue: Pue = "",
    tokens: Tokens = "",
    deadline: Deadline = 0.0,
    risk: ByRisk = False,
    mtbf: Mtbf = None,
    source: Trace = None,
    engine: EngineName = "local",
    address: Address = "",
    workers: Workers = 0,
    shard: Shard = "",
    journal: JournalPath = None,
    exhaustive: Exhaustive = False,
    emit: Emit = "",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Which TP, PP, CP, EP, DP, ZeRO, micro-batch, recomputation and schedule are best, and do they fit?

    \b
    Every valid combination gets a lower bound on its step time, and its memory. Those that may still be among the best,
    or on the Pareto front of time, memory and cost, are simulated as lumos predict does.
    """
    check_output(output, setup, (".json", ".csv", ".parquet", ".html"))
    fixed = [*(fixed or []), *([f"cluster.model={model}"] if model else [])]
    fixed += failure_changes(ReliabilityOptions(mtbf), tokens, [], fixed)
    choices = _choices(fixed, vary or [], gpus, ",".join(listed_gpus(gpu)))
    wanted = replace(_objective(objective, price, kwh_price, pue, tokens, deadline), risk=risk)
    part, emission = read_shard(shard), read_emission(emit)
    if emission and shard:
        raise OptionError("--emit and --shard together: the best is known once the parts are merged; emit it then")
    base, estimator, notes = _base(setup, fixed, source, choices)
    wanted = _with_sheet_prices(wanted, choices.get("cluster.gpu", [base.cluster.gpu]))
    if emission:
        base, notes = _for_launch(emission, base, choices, notes)
    if estimator is not None and base.train.compile:
        choices.setdefault("parallel.tp", [base.parallel.tp])  # fused kernels cannot be resized
    try:
        with progress_bar() as progress, engine_named(engine, workers, address) as started:
            found = search(
                base, choices, objective=wanted, top=top, memory_gib=memory, estimator=estimator, engine=started,
                shard=part, journal=journal, exhaustive=exhaustive, progress=progress, notes=notes,
                holds_for_all=[text.partition("=")[0].strip().removeprefix("cluster.") for text in fixed],
                keeps_batch=any(text.partition("=")[0].strip() == "train.global_batch" for text in fixed),
            )  # fmt: skip
    except KeyboardInterrupt:
        resume = f"run the same command to resume from {journal}" if journal else "use --journal FOLDER to resume one"
        typer.echo(f"lumos: interrupted; {resume}", err=True)
        raise typer.Exit(130) from None
    answer = found.as_dict()
    launch = emission.of_search(found, answer) if emission else None
    deliver(answer, partial(_show, launch), as_json, output, {
        ".csv": lambda to: write_csv(to, found.rows(), names=COLUMNS),
        ".parquet": lambda to: write_parquet(to, found.rows(), COLUMNS),
        ".html": lambda to: write_page(to, with_launch(search_page(answer), launch)),
    })  # fmt: skip
    if emission:
        emission.write(launch)


def _for_launch(emission: Emission, base: Setup, choices: Choices, notes: tuple[str, ...]) -> Searched:
    """The setup and the notes of a search for a tool; what its files cannot say is not searched."""
    base, chosen = emission.suited(base)
    return base, (*notes, *chosen, *emission.narrowed(base, choices))


def _show(launch: LaunchFiles | None, answer: dict[str, Any], to: Console) -> None:
    show_search(answer, to)
    if launch is not None:
        show_launch(launch, to)


def _objective(name: str, price: str, kwh_price: str, pue: str, tokens: str, deadline: float) -> Objective:
    tariff = read_tariff("", kwh_price, pue, tokens)
    energy = (tariff.kwh or 0.0) * tariff.pue
    return Objective(name, tuple(sorted(read_prices(price).items())), energy, tariff.tokens or 0.0, deadline)


def _with_sheet_prices(wanted: Objective, types: Iterable[str]) -> Objective:
    """With the prices that data sheets give, where all GPUs have one then; the price of another GPU is a mistake."""
    prices, gpus = wanted.prices, [gpu_named(name) for name in types]
    check_prices(prices, [gpu.name for gpu in gpus])
    if "" in prices:
        return wanted
    prices = {gpu.name: gpu.price for gpu in gpus if gpu.price is not None} | prices
    return replace(wanted, gpu_hour=tuple(sorted(prices.items()))) if all(g.name in prices for g in gpus) else wanted


def _choices(fixed: list[str], vary: list[str], gpus: str, gpu: str) -> Choices:
    """The values of axes that the command line names."""
    given = [("--set", text, *text.partition("=")[::2]) for text in fixed]
    given = [item for item in given if item[2].strip() in (*AXES, *DERIVED)]
    for text in vary:
        if "=" not in text:
            raise OptionError(f"--vary {text[:100]}: write SECTION.KEY=A,B,…")
        given.append(("--vary", text, *text.partition("=")[::2]))
    given += [("--gpus", gpus, "cluster.gpus", gpus)] if gpus else []
    given += [("--gpu", gpu, "cluster.gpu", gpu)] if gpu else []
    found: Choices = {}
    for option, text, key, values in given:
        if key.strip() in found:
            raise OptionError(f"{option} {text[:100]}: the values of {key.strip()} are given twice")
        parts = [part.strip() for part in ([values] if option == "--set" else values.split(","))]
        found[key.strip()] = [_choice(option, key.strip(), part) for part in parts if part]
    return found


def _choice(option: str, key: str, text: str) -> Any:
    """A value as TOML has it; the name of a GPU is text, whatever it looks like."""
    value = text if option == "--gpu" else toml_value(text)
    return text if key == "cluster.gpu" and not isinstance(value, str) else value


def _base(path: Path | None, fixed: list[str], source: Path | None, choices: Choices) -> Base:
    """From a setup file, or from a trace whose setup is inferred and completed by the file."""
    others = [text for text in fixed if text.partition("=")[0].strip() not in (*AXES, *DERIVED)]
    if source is None:
        if path is None:
            raise OptionError("nothing to search: name a setup file, or a trace with --from")
        counts = choices.get("cluster.gpus", [])
        plain = read_plain(path, [*others, *(f"cluster.gpus={count}" for count in counts[:1] if type(count) is int)])
        reading = plain.checked(plain.sections, (*AXES, *DERIVED))
        stale = "cluster.gpu is not given" if "cluster.gpu" in choices else "\n"  # which no note has
        return reading.setup, None, tuple(note for note in reading.notes if stale not in str(note))
    run = load_run(source, operators=True)
    inferred = infer(run)
    has_shapes = any(header.has_shapes for header in run.execution.trace.headers)
    traced = complete(inferred, read_plain(path), has_shapes).setup
    if traced.cluster.accelerator.is_cpu:
        raise OptionError("a search needs memory and power, which are not known of a CPU: use lumos predict --from")
    wanted = changed(inferred, read_plain(path, others), read_plain(path)).setup
    refuse(traced, wanted)
    measured = CalibratedRun(run, traced)
    return wanted, CalibratedEstimator(measured.learned), (*measured.notes, _NOT_VALIDATED)
