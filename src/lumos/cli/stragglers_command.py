"""`lumos stragglers`: who slows the job down, why, and what would mending it give?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lumos.analysis.replay import Replay
from lumos.analysis.slowdown import slowdown
from lumos.analysis.slowdown_causes import diagnose, job_of
from lumos.analysis.slowdown_jobs import table_at
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, Output, TraceOptions
from lumos.cli.terminal import busy, deliver, progress_bar
from lumos.errors import OptionError
from lumos.export.chrome_traces import write_ideal
from lumos.files import FORMS, check_output, write_csv
from lumos.prediction.prediction import predict
from lumos.read.operation_table import read_operation_table
from lumos.report.html.page import write_page
from lumos.report.html.risk_view import with_risk
from lumos.report.html.slowdown_page import slowdown_page
from lumos.report.terminal.show import show_risk, show_slowdown
from lumos.risk.learn import traced_risk
from lumos.risk.monte_carlo import StepRisk
from lumos.risk.operation_steps import operation_risk
from lumos.trace.operations import OperationTable

_MOST_LAYERS = 1_000_000


def stragglers_command(
    path: Annotated[
        Path, typer.Argument(help="A table of operations (Parquet or CSV), or a folder of traces of ranks.")
    ],
    options: TraceOptions,
    layers: Annotated[int, typer.Option(help="Layers of the model: then it is said how many of them to move.")] = 0,
    risk: Annotated[
        bool,
        typer.Option("--risk", help="Also draw steps of the job: p50, p90, p99, and what makes them differ."),
    ] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Who slows the job down, why, and what would mending it give?"""
    check_output(output, path, FORMS)
    if not 0 <= layers <= _MOST_LAYERS:
        raise OptionError(f"--layers {layers}: give the number of layers of the model, from 1 to {_MOST_LAYERS:,}")
    read = _read(path, options)
    with busy("building the graph"):
        job = job_of(read, path.name or str(path))
    with progress_bar() as progress:
        lost = slowdown(job, progress)
    with busy("looking for causes"):
        found = diagnose(lost, layers)
    asked = _risk(read) if risk else None
    answer = found.as_dict() | ({} if asked is None else {"risk": asked.as_dict()})
    writers = {
        ".csv": lambda to: write_csv(to, found.as_dict()["by_worker"]),
        ".html": lambda to: write_page(to, with_risk(slowdown_page(found), asked, ())),
        ".trace.json": lambda to: write_ideal(to, job),
        ".trace.json.gz": lambda to: write_ideal(to, job),
    }

    def show(_: object, to: Console) -> None:
        show_slowdown(found, to)
        show_risk(asked, (), to)

    deliver(answer, show, as_json, output, writers)


def _risk(read: OperationTable | Replay) -> StepRisk:
    """The distribution of the steps of what was recorded."""
    with busy("drawing steps"):
        found = operation_risk(read) if isinstance(read, OperationTable) else traced_risk(predict(read))
        _ = found.causes
    return found


def _read(path: Path, options: TraceOptions) -> OperationTable | Replay:
    """What is at a path: a table of operations, or traces."""
    table = table_at(path)
    if table is None:
        return load_run(path, options)
    given = {"--match": options.match, "--rank-pattern": options.rank_pattern, "--address": options.address}
    for name, value in given.items():
        if value:
            raise OptionError(f"{name} {value}: {table.name} is a table of operations; this option is for traces")
    with busy("reading the table"):
        found = read_operation_table(table)
        if options.step:
            rows = found.step == _number(options.step, found.steps.tolist())
            found = found.select(rows)
        return found


def _number(text: str, steps: list[int]) -> int:
    if text.lstrip("#") in map(str, steps):
        return int(text.lstrip("#"))
    shown = ", ".join(map(str, steps[:8])) + (" …" if len(steps) > 8 else "")
    raise OptionError(f"--step {text}: no such step; this table has {shown}")
