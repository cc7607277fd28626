"""`lumos check`: what does a trace lack, for which answers, and how is it recorded?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.readiness import readiness
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, TraceOptions, TracePath
from lumos.cli.terminal import deliver
from lumos.files import check_output, write_csv
from lumos.report.terminal.show import show_readiness


def check_command(
    path: TracePath,
    options: TraceOptions,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json or .csv.")] = None,
) -> None:
    """What does a trace lack, for which answers, and how is it recorded?"""
    check_output(output, path, (".json", ".csv"))
    found = readiness(load_run(path, options), path)
    answer = found.as_dict(str(path))
    writers = {".csv": lambda to: write_csv(to, answer["findings"])}
    deliver(answer, lambda _, to: show_readiness(found, str(path), to), as_json, output, writers)
