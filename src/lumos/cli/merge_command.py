"""`lumos merge`: the parts of a search that was divided into shards, as one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.cli.options import AsJson
from lumos.cli.terminal import console, print_json


def merge_command(
    parts: Annotated[list[Path], typer.Argument(help="Files that lumos search or lumos score wrote with --shard.")],
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json, .csv or .html.")] = None,
) -> None:
    """The answer that one run without --shard would have given."""
    from lumos.files import check_output
    from lumos.report.terminal.searches import show_merged, write_merged
    from lumos.workers.merging import merged

    check_output(output, None, (".json", ".csv", ".html"))
    answer = merged(parts)
    if output is not None:
        write_merged(output, answer)
    if as_json:
        print_json(answer)
    else:
        show_merged(answer, console())
