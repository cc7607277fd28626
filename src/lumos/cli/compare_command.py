"""`lumos compare`: why does one run take longer than another, or here than in ASTRA-sim?"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from lumos.analysis.comparison import Comparison
from lumos.chakra.astra_comparison import AstraComparison, AstraEstimate, OurRank
from lumos.chakra.astra_estimate import described_workload, estimated, of_described, of_recorded, of_repeated
from lumos.chakra.astra_files import read_network
from lumos.chakra.astra_log import AstraSimLog, looks_like_astra_sim, read_astra_sim_log
from lumos.chakra.astra_report import astra_page, show_astra_comparison
from lumos.chakra.communication import plan_communication
from lumos.chakra.folded_ranks import recorded_workload, repeated_rank
from lumos.chakra.rank_files import Workload
from lumos.chakra.tasks import Task
from lumos.cli.loading import load_run
from lumos.cli.options import AsJson, TraceOptions
from lumos.cli.terminal import deliver
from lumos.errors import InputError, OptionError
from lumos.files import check_output, write_csv
from lumos.graph.rules.build import Execution
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.prediction import predict
from lumos.read.formats import Form, head_of
from lumos.read.formats import form_of as form_of_file
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.page import write_page
from lumos.report.terminal.show import show_comparison
from lumos.setup.setup_files import read_setup


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
    trace, origin, execution = ours.run.trace, ours.run.origin, ours.execution
    end = {rank: int(trace.end[(trace.rank == rank) & trace.is_work].max(initial=origin)) for rank in trace.ranks}
    is_exact = all(header.is_graph for header in trace.headers)
    stands_for, warnings = trace.ranks, list(execution.warnings)
    if len(trace.ranks) == 1 < len(theirs.ranks) == max(header.world_size for header in trace.headers):
        own, more = repeated_rank(execution, len(theirs.ranks))
        estimate = of_repeated(execution, own).estimate
        stands_for, is_exact, warnings = trace.ranks * len(theirs.ranks), True, [*warnings, *more]
    else:
        own = recorded_workload(execution, plan_communication(execution, closed=True))
        estimate = _estimate_written(execution, own) if is_exact else of_recorded(execution).estimate
    works = zip(trace.ranks, map(_work_ms, own.tasks), strict=True)
    ranks = {rank: OurRank((end[rank] - origin) / 1e6, work) for rank, work in works}
    return AstraComparison(ours.run, theirs, stands_for, ranks, warnings, is_exact, estimate)


def _estimate_written(execution: Execution, own: Workload) -> AstraEstimate | None:
    """The same for exported files, with the network file next to them; None without one."""
    links = read_network(Path(execution.trace.headers[0].path))
    if links is None or prod(one.ranks for one in links) != own.places.world:
        return None
    return estimated(own, own, links)


def _described(path: Path, theirs: AstraSimLog) -> AstraComparison:
    """The prediction of a described run: one rank of every stage stands for all of them."""
    setup = read_setup(path)
    found = predict(setup)
    assert isinstance(found.run, DescribedRun)
    trace, workload = found.run.trace, described_workload(found.run)
    end = {rank: int(trace.end[(trace.rank == rank) & trace.on_gpu].max(initial=0)) for rank in trace.ranks}
    works = zip(trace.ranks, map(_work_ms, workload.tasks), strict=True)
    ranks = {rank: OurRank(end[rank] / 1e6, work) for rank, work in works}
    stands_for = [trace.ranks[workload.places.of(rank)[1]] for rank in range(setup.cluster.gpus)]
    estimate = of_described(found.run, workload).estimate
    return AstraComparison(found.run, theirs, stands_for, ranks, found.warnings, is_exact=True, estimate=estimate)


def _work_ms(tasks: Iterable[Task]) -> float:
    """How long a rank works, in the files that ASTRA-sim is given."""
    return sum(task.ns for task in tasks if task.transfer is None) / 1e6


def _is_setup(path: Path) -> bool:
    return path.is_file() and form_of_file(path, head_of(path)) == Form.OTHER
