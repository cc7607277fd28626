"""`lumos stragglers`: who slows the job down, why, and what would mending it give?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.slowdown import Job, slowdown
from lumos.analysis.slowdown_causes import diagnose
from lumos.analysis.slowdown_jobs import job_of_run, job_of_table
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, Output, TraceOptions
from lumos.cli.terminal import busy, deliver, progress_bar
from lumos.errors import InputError, OptionError
from lumos.export.chrome_traces import write_ideal
from lumos.files import FORMS, check_output, write_csv
from lumos.report.html.page import write_page
from lumos.report.html.slowdown_page import slowdown_page
from lumos.report.terminal.show_slowdowns import show_slowdown
from lumos.trace.read.operation_table import is_operation_table, read_operation_table

_MOST_LAYERS = 1_000_000


def stragglers_command(
    path: Annotated[
        Path, typer.Argument(help="A table of operations (Parquet or CSV), or a folder of traces of ranks.")
    ],
    options: TraceOptions,
    layers: Annotated[int, typer.Option(help="Layers of the model: then it is said how many of them to move.")] = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Who slows the job down, why, and what would mending it give?"""
    check_output(output, path, FORMS)
    if not 0 <= layers <= _MOST_LAYERS:
        raise OptionError(f"--layers {layers}: give the number of layers of the model, from 1 to {_MOST_LAYERS:,}")
    job = _job(path, options)
    with progress_bar() as progress:
        lost = slowdown(job, progress)
    with busy("looking for causes"):
        found = diagnose(lost, layers)
    writers = {
        ".csv": lambda to: write_csv(to, found.as_dict()["by_worker"]),
        ".html": lambda to: write_page(to, slowdown_page(found)),
        ".trace.json": lambda to: write_ideal(to, job),
        ".trace.json.gz": lambda to: write_ideal(to, job),
    }
    deliver(found.as_dict(), lambda _, to: show_slowdown(found, to), as_json, output, writers)


def _job(path: Path, options: TraceOptions) -> Job:
    """What is at a path: a table of operations, or traces."""
    table = _table_at(path)
    if table is None:
        return replace(job_of_run(load_run(path, options)), name=path.name or str(path))
    given = {"--match": options.match, "--rank-pattern": options.rank_pattern, "--address": options.address}
    for name, value in given.items():
        if value:
            raise OptionError(f"{name} {value}: {table.name} is a table of operations; this option is for traces")
    with busy("reading the table and building its graph"):
        found = read_operation_table(table)
        if options.step:
            rows = found.step == _number(options.step, found.steps.tolist())
            found = found.select(rows)
        return job_of_table(found)


def _number(text: str, steps: list[int]) -> int:
    if text.lstrip("#") in map(str, steps):
        return int(text.lstrip("#"))
    shown = ", ".join(map(str, steps[:8])) + (" …" if len(steps) > 8 else "")
    raise OptionError(f"--step {text}: no such step; this table has {shown}")


def _table_at(path: Path) -> Path | None:
    """The table of operations at a path, or in the folder; None for what may be traces."""
    if path.is_file():
        return path if is_operation_table(path) else None
    if not path.is_dir():
        return None
    names = (".parquet", ".csv", ".csv.gz")
    tables = [file for file in sorted(path.iterdir()) if file.name.endswith(names) and is_operation_table(file)]
    if len(tables) > 1:
        shown = ", ".join(file.name for file in tables[:4])
        raise InputError(f"{path}: has {len(tables)} tables of operations ({shown}); name one of them")
    return tables[0] if tables else None
