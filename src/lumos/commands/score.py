"""`lumos score`: how good are the predictions on measured runs?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.commands.options import AsJson
from lumos.commands.terminal import console, print_json, progress_bar


def score_command(
    table: Annotated[Path, typer.Argument(help="Measured runs: a CSV table, one row a run (docs/scoring.md).")],
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write id, measured, predicted: .csv or .json.")
    ] = None,
) -> None:
    """How good are the predictions on measured runs?"""
    from lumos.output.files import check_output, write_as, write_csv, write_json
    from lumos.output.forecasts import show_score
    from lumos.scoring.runs import read_rows
    from lumos.scoring.score import score

    check_output(output, table, (".json", ".csv"))
    rows = read_rows(table)
    with progress_bar() as progress:
        found = score(rows, progress)
    if output is not None:
        writers = {".csv": lambda to: write_csv(to, found.table()), ".json": lambda to: write_json(to, found.as_dict())}
        write_as(output, writers)
    if as_json:
        print_json(found.as_dict())
    else:
        show_score(found, console())
