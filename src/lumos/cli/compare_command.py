"""`lumos compare`: why does one run take longer than another, or here than in ASTRA-sim?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.astra_comparison import AstraComparison, OurRank
from lumos.analysis.comparison import Comparison
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, TraceOptions
from lumos.cli.terminal import deliver
from lumos.errors import InputError, OptionError
from lumos.export.chakra_communication import plan_communication
from lumos.export.folded_ranks import Folder, Task
from lumos.files import check_output, write_csv
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.prediction import predict
from lumos.prediction.step_tasks import StepTasks
from lumos.program.rank_places import RankPlaces
from lumos.report.html.astra_page import astra_page
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.page import write_page
from lumos.report.terminal.show import show_astra_comparison, show_comparison
from lumos.setup.setup_files import read_setup
from lumos.trace.read.astra_sim_log import AstraSimLog, looks_like_astra_sim, read_astra_sim_log
from lumos.trace.read.formats import Form, head_of
from lumos.trace.read.formats import form_of as form_of_file


def compare_command(
    before: Annotated[Path, typer.Argument(help="The trace or folder of ranks of a run; with a log, also a setup.")],
    after: Annotated[Path, typer.Argument(help="The same of another; or what ASTRA-sim printed about the run.")],
    options: TraceOptions,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .html, .json or .csv.")] = None,
) -> None:
    """Why does one run take longer than another?

    By part of the step, operator and collective. With the output of ASTRA-sim, or its log/log.log, in place of the
    second run: rank by rank in both simulators.
    """
    for path in (before, after):
        check_output(output, path, (".html", ".json", ".csv"))
    if looks_like_astra_sim(before):
        raise OptionError(f"{before}: printed by ASTRA-sim; name the run first, and this second")
    if not after.exists():
        raise InputError(f"{after}: no such file or folder")
    if looks_like_astra_sim(after):
        _compare_with_astra_sim(before, after, options, as_json, output)
        return
    if _is_setup(before):
        raise InputError(
            f"{after}: nothing of ASTRA-sim is in it; {before} is no trace, and is compared with what ASTRA-sim "
            "printed about it, or its log/log.log"
        )
    found = Comparison(*(load_run(path, options) for path in (before, after)))
    answer = found.as_dict()
    rows = [{"table": name} | row for name in ("parts", "operators", "collectives") for row in answer[name]]
    writers = {
        ".html": lambda to: write_page(to, comparison_page(found)),
        ".csv": lambda to: write_csv(to, rows),
    }
    deliver(answer, lambda _, to: show_comparison(found, to), as_json, output, writers)


def _compare_with_astra_sim(run: Path, log: Path, options: TraceOptions, as_json: bool, output: Path | None) -> None:
    theirs = read_astra_sim_log(log)  # first: it is read sooner
    found = _described(run, theirs) if _is_setup(run) else _traced(run, options, theirs)
    answer = found.as_dict()
    rows = [{"table": name} | row for name in ("ranks", "collectives") for row in answer[name]]
    writers = {".html": lambda to: write_page(to, astra_page(found)), ".csv": lambda to: write_csv(to, rows)}
    deliver(answer, lambda _, to: show_astra_comparison(found, to), as_json, output, writers)


def _traced(path: Path, options: TraceOptions, theirs: AstraSimLog) -> AstraComparison:
    ours = load_run(path, options)
    folder = Folder(ours.execution, plan_communication(ours.execution, closed=True))
    trace, origin = ours.run.trace, ours.run.origin
    end = {rank: int(trace.end[(trace.rank == rank) & trace.is_work].max(initial=origin)) for rank in trace.ranks}
    ranks = {rank: OurRank((end[rank] - origin) / 1e6, _work_ms(folder.rank(rank))) for rank in trace.ranks}
    is_exact = all(header.is_graph for header in trace.headers)
    return AstraComparison(ours.run, theirs, trace.ranks, ranks, ours.execution.warnings, is_exact)


def _described(path: Path, theirs: AstraSimLog) -> AstraComparison:
    """The prediction of a described run: one rank of every stage stands for all of them."""
    setup = read_setup(path)
    found = predict(setup)
    places = RankPlaces.of_setup(setup.parallel)
    assert isinstance(found.run, DescribedRun)
    trace, tasks = found.run.trace, StepTasks(found.run)
    end = {rank: int(trace.end[(trace.rank == rank) & trace.on_gpu].max(initial=0)) for rank in trace.ranks}
    ranks = {rank: OurRank(end[rank] / 1e6, _work_ms(tasks.tasks(stage))) for stage, rank in enumerate(trace.ranks)}
    stands_for = [trace.ranks[places.of(rank)[1]] for rank in range(setup.cluster.gpus)]
    return AstraComparison(found.run, theirs, stands_for, ranks, found.warnings, is_exact=True)


def _work_ms(tasks: Iterable[Task]) -> float:
    """How long a rank works, in the files that ASTRA-sim is given."""
    return sum(task.ns for task in tasks if task.transfer is None) / 1e6


def _is_setup(path: Path) -> bool:
    return path.is_file() and form_of_file(path, head_of(path)) == Form.OTHER
