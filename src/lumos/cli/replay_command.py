"""`lumos replay` and `lumos demo`: is the graph right, and where does the time go?"""

from __future__ import annotations

from importlib import resources

from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, Output, ProfilerCosts, TraceOptions, TracePath
from lumos.cli.terminal import deliver
from lumos.data_files import data_file
from lumos.export.chrome_traces import write_timeline
from lumos.files import check_output, write_csv
from lumos.report.html.page import write_page
from lumos.report.html.replay_page import replay_page
from lumos.report.terminal.show import show_replay


def replay_command(
    path: TracePath,
    options: TraceOptions,
    profiler_costs: ProfilerCosts = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Is the graph right, and where does the time go?"""
    check_output(output, path)
    run = load_run(path, options, profiler_costs)
    answer = run.as_dict()
    writers = {
        ".csv": lambda to: write_csv(to, answer["per_rank"]),
        ".html": lambda to: write_page(to, replay_page(run)),
        ".trace.json": lambda to: write_timeline(to, run.run),
        ".trace.json.gz": lambda to: write_timeline(to, run.run),
    }
    deliver(answer, lambda _, to: show_replay(run, to), as_json, output, writers)


def demo_command(as_json: AsJson = False, output: Output = None) -> None:
    """Replay the example in the package: four ranks, one of them slow."""
    with resources.as_file(data_file("example")) as path:
        replay_command(path, TraceOptions(), None, as_json, output)
