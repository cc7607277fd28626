"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TracePath = Annotated[Path, typer.Argument(help="A Kineto trace, or a folder with the ranks of one job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Also write it: .json, .csv, .trace.json.gz (for Perfetto).")
]
Match = Annotated[
    str, typer.Option(help="Only files of the folder whose names match this pattern, as in 'rank?.json'.")
]
RankPattern = Annotated[
    str, typer.Option(help="Where the rank stands in a file's name: a regular expression, one group.")
]
Step = Annotated[str, typer.Option(help="One step alone, by its number; all recorded steps otherwise.")]
ProfilerCosts = Annotated[
    Path | None, typer.Option(help="A file of profiler costs, in place of those measured on H200.")
]

Model = Annotated[Path | None, typer.Option(help="A cost model that lumos fit wrote, in place of those shipped.")]
