"""`lumos about`: what does Lumos know, how old is that, and how far off was it?"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.about import about, about_machine
from lumos.cli.options import AsJson
from lumos.cli.terminal import deliver
from lumos.files import check_output, write_csv
from lumos.report.terminal.costs import show_about, show_machine


def about_command(
    model: Annotated[Path | None, typer.Argument(help="A file that lumos fit wrote: what it knows instead.")] = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .html, .json or .csv.")] = None,
) -> None:
    """Which GPUs, models and frameworks are known, how old are the shipped costs, and how far off were they?"""
    check_output(output, model, (".html", ".json", ".csv"))
    if model is not None:
        _about_machine(model, as_json, output)
        return
    found = about(datetime.now(UTC).date())
    answer = found.as_dict()

    def write_html(to: Path) -> None:
        from lumos.report.html.about_page import about_page  # jinja2, for which the table does not wait
        from lumos.report.html.page import write_page

        write_page(to, about_page(found))

    rows = [{"model": c.name, "gpu": c.gpu, "date": c.date} | f for c in found.costs for f in map(vars, c.families)]
    writers = {".csv": lambda to: write_csv(to, rows), ".html": write_html}
    deliver(answer, lambda _, to: show_about(found, to), as_json, output, writers)


def _about_machine(model: Path, as_json: bool, output: Path | None) -> None:
    found = about_machine(str(model))

    def write_html(to: Path) -> None:
        from lumos.report.html.about_page import machine_page
        from lumos.report.html.page import write_page

        write_page(to, machine_page(found))

    rows = [asdict(one) for one in found.families]
    writers = {".csv": lambda to: write_csv(to, rows), ".html": write_html}
    deliver(found.as_dict(), lambda _, to: show_machine(found, to), as_json, output, writers)
