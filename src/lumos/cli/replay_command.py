"""`lumos replay` and `lumos demo`: is the graph right, and where does the time go?"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.replay import Replay
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, Output, ProfilerCosts, TraceOptions, TracePath
from lumos.cli.terminal import busy, deliver
from lumos.data_files import data_file
from lumos.export.chrome_traces import write_timeline
from lumos.files import FORMS, check_output, write_csv
from lumos.report.html.page import write_page
from lumos.report.html.replay_page import replay_page
from lumos.report.operator_rates import flat_row, reproduced_words
from lumos.report.reproducers import check_folder, write_reproducers
from lumos.report.terminal.show import show_operators, show_replay
from lumos.traced.traced_operators import traced_operators


def replay_command(
    path: TracePath,
    options: TraceOptions,
    profiler_costs: ProfilerCosts = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also replay with nothing frozen, and without each dependency rule.")
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="Rates of operators by shape, their roofline, and time by module.")
    ] = False,
    reproduce: Annotated[
        Path | None, typer.Option(help="A folder for scripts that time the operators with most to gain, each alone.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Is the graph right, and where does the time go?"""
    wants_operators = operators or reproduce is not None
    check_output(output, path, (".html", ".json", ".csv") if wants_operators else FORMS)
    if reproduce is not None:
        check_folder(reproduce)
    run = load_run(path, options, profiler_costs, wants_operators or is_page(output))
    if wants_operators:
        _deliver_operators(run, reproduce, ablate, as_json, output)
        return
    answer = run.as_dict(ablate)
    writers = {
        ".csv": lambda to: write_csv(to, answer["per_rank"]),
        ".html": lambda to: write_page(to, replay_page(run, ablate)),
        ".trace.json": lambda to: write_timeline(to, run.run),
        ".trace.json.gz": lambda to: write_timeline(to, run.run),
    }
    deliver(answer, lambda _, to: show_replay(run, to, ablate), as_json, output, writers)


def is_page(output: Path | None) -> bool:
    """Whether a report is written that shows memory over time."""
    return output is not None and output.suffix == ".html"


def _deliver_operators(run: Replay, folder: Path | None, ablate: bool, as_json: bool, output: Path | None) -> None:
    """How fast every operator ran, against its GPU and the cost model; HTML has the whole report of the replay, too."""
    with busy("reading the shapes of operators"):
        found = traced_operators(run)
    written, reasons = write_reproducers(folder, found) if folder is not None else ([], [])
    said = reproduced_words(str(folder), written, reasons) if folder is not None else []
    answer = found.as_dict() | ({"reproducers": written, "not_reproduced": reasons} if folder is not None else {})
    writers = {
        ".csv": lambda to: write_csv(to, [flat_row(op) for op in found.operators]),
        ".html": lambda to: write_page(to, replay_page(run, ablate, found)),
    }
    deliver(answer, lambda _, to: show_operators(found, to, said), as_json, output, writers)


def demo_command(as_json: AsJson = False, output: Output = None) -> None:
    """Replay the example in the package: four ranks, one of them slow."""
    with resources.as_file(data_file("example")) as path:
        replay_command(path, TraceOptions(), as_json=as_json, output=output)
