"""`lumos score`: how accurate are the predictions for measured runs?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.cli.options import Address, AsJson, EngineName, Model, Shard, Workers
from lumos.cli.terminal import deliver, progress_bar
from lumos.files import check_output, write_csv
from lumos.report.terminal.show_searches import show_score
from lumos.score.measured_runs import read_rows
from lumos.score.score import score
from lumos.workers import engine_named, fingerprint, read_shard


def score_command(
    table: Annotated[Path, typer.Argument(help="Measured runs: a CSV table, one row per run (docs/scoring.md).")],
    model: Model = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write id, measured, predicted: .csv or .json.")
    ] = None,
    engine: EngineName = "local",
    address: Address = "",
    workers: Workers = 1,
    shard: Shard = "",
) -> None:
    """How accurate are the predictions for measured runs?

    With --model, those on the GPU that it was fitted on are predicted with it.
    """
    check_output(output, table, (".json", ".csv"))
    rows, part = read_rows(table), read_shard(shard)
    with progress_bar() as progress, engine_named(engine, workers, address) as started:
        found = score(rows, progress, started, part, str(model or ""))
    answer = found.as_part(fingerprint(rows), part) if shard else found.as_dict()
    deliver(answer, show_score, as_json, output, {".csv": lambda to: write_csv(to, found.table())})
