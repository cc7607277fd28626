"""`lumos compare`: why does one run take longer than another?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.comparison import Comparison
from lumos.cli.loading import load_run
from lumos.cli.options import Address, AsJson, EngineName, Match, RankPattern, Step
from lumos.cli.terminal import console, print_json
from lumos.files import check_output, write_as, write_csv, write_json
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.page import write_page
from lumos.report.terminal.comparisons import show_comparison

_FORMS = (".html", ".json", ".csv")


def compare_command(
    before: Annotated[Path, typer.Argument(help="The trace, or the folder of ranks, of a run.")],
    after: Annotated[Path, typer.Argument(help="The same of another.")],
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .html, .json or .csv.")] = None,
    step: Step = "",
    match: Match = "",
    rank_pattern: RankPattern = "",
    engine: EngineName = "local",
    address: Address = "",
) -> None:
    """Why does one run take longer than another?

    By part of the step, operator and collective.
    """
    check_output(output, before, _FORMS)
    check_output(output, after, _FORMS)
    where = (engine, address)
    found = Comparison(*(load_run(path, step, match, rank_pattern, None, *where) for path in (before, after)))
    answer = found.as_dict()
    if output is not None:
        rows = [{"table": name} | row for name in ("parts", "operators", "collectives") for row in answer[name]]
        write_as(
            output,
            {
                ".html": lambda to: write_page(to, comparison_page(found)),
                ".json": lambda to: write_json(to, answer),
                ".csv": lambda to: write_csv(to, rows),
            },
        )
    if as_json:
        print_json(answer)
    else:
        show_comparison(found, console())
