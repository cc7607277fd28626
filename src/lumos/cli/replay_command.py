"""`lumos replay`: is the graph right, and where does the time go?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lumos.cli.loading import load_run
from lumos.cli.options import (
    Address,
    AsJson,
    EngineName,
    Match,
    Output,
    ProfilerCosts,
    RankPattern,
    Step,
    TracePath,
)
from lumos.cli.terminal import console, print_json

if TYPE_CHECKING:
    from lumos.analysis.replay import Replay


def replay_command(
    path: TracePath,
    as_json: AsJson = False,
    output: Output = None,
    step: Step = "",
    match: Match = "",
    rank_pattern: RankPattern = "",
    profiler_costs: ProfilerCosts = None,
    engine: EngineName = "local",
    address: Address = "",
) -> None:
    """Is the graph right, and where does the time go?"""
    from lumos.files import check_output

    check_output(output, path)
    run = load_run(path, step, match, rank_pattern, profiler_costs, engine, address)
    if output is not None:
        _write_replay(run, output)
    if as_json:
        print_json(run.as_dict())
    else:
        from lumos.report.terminal.replays import show_replay

        show_replay(run, console())


def _write_replay(run: Replay, output: Path) -> None:
    from lumos.export.chrome_traces import write_timeline
    from lumos.files import write_as, write_csv, write_json
    from lumos.report.html.replay_page import write_replay_page

    def perfetto(to: Path) -> None:
        write_timeline(to, run.execution, run.execution.graph, run.times, run.simulated, run.path)

    write_as(
        output,
        {
            ".json": lambda to: write_json(to, run.as_dict()),
            ".csv": lambda to: write_csv(to, run.as_dict()["per_rank"]),
            ".html": lambda to: write_replay_page(to, run),
            ".trace.json": perfetto,
            ".trace.json.gz": perfetto,
        },
    )
