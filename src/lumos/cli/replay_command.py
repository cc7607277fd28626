"""`lumos replay` and `lumos demo`: is the graph right, and where does the time go?"""

from __future__ import annotations

from importlib import resources

from lumos.cli.loading import load_run
from lumos.cli.options import Address, AsJson, EngineName, Match, Output, ProfilerCosts, RankPattern, Step, TracePath
from lumos.cli.terminal import console, print_json
from lumos.data_files import data_file
from lumos.export.chrome_traces import write_timeline
from lumos.files import check_output, write_as, write_csv, write_json
from lumos.report.html.page import write_page
from lumos.report.html.replay_page import replay_page
from lumos.report.terminal.replays import show_replay


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
    check_output(output, path)
    run = load_run(path, step, match, rank_pattern, profiler_costs, engine, address)
    if output is not None:
        writers = {
            ".json": lambda to: write_json(to, run.as_dict()),
            ".csv": lambda to: write_csv(to, run.as_dict()["per_rank"]),
            ".html": lambda to: write_page(to, replay_page(run)),
            ".trace.json": lambda to: write_timeline(to, run.run),
            ".trace.json.gz": lambda to: write_timeline(to, run.run),
        }
        write_as(output, writers)
    if as_json:
        print_json(run.as_dict())
    else:
        show_replay(run, console())


def demo_command(as_json: AsJson = False, output: Output = None) -> None:
    """Replay the example in the package: four ranks, one of them slow."""
    with resources.as_file(data_file("example")) as path:
        replay_command(path, as_json=as_json, output=output)
