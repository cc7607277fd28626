"""Chakra files of any run, as `lumos convert` and `lumos predict -o NAME.et` write them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lumos.analysis.run import TracedRun
from lumos.chakra.astra_costs import largest_tensor, too_long, too_many_groups
from lumos.chakra.astra_estimate import AstraWorkload, described_workload, of_described, of_recorded, of_repeated
from lumos.chakra.astra_files import shows_bandwidth, write_astra_files
from lumos.chakra.folded_ranks import repeated_rank
from lumos.chakra.rank_files import Workload, Written, write_workload
from lumos.chakra.run_writer import write_chakra
from lumos.cli.terminal import busy, progress_bar
from lumos.errors import OptionError
from lumos.graph.rules.build import Execution
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.prediction import Prediction
from lumos.read.execution_trace import Links
from lumos.report.wording import number_text
from lumos.setup.setup import Setup

SIMULATORS = ("astra-sim",)
_FEW = 256  # ranks that one process writes
_SHOWN = 8  # files that are listed one by one


@dataclass(frozen=True)
class ChakraWishes:
    """What is asked for of the files."""

    simulator: str = ""  # whose other files are written, too
    fold_host: bool = False
    metadata: bool = False
    operators: bool = False  # of a described run, each as a node

    def check(self, output: Path) -> None:
        """Refuse options that contradict each other, or the format."""
        given = {"--for": self.simulator, "--fold-host": self.fold_host, "--metadata": self.metadata,
                 "--operators": self.operators}  # fmt: skip
        first = next((name for name, value in given.items() if value), "")
        if first and not output.name.endswith(".et"):
            raise OptionError(f"{first}: shapes Chakra files; name one with -o NAME.et, not {output.name}")
        if output.name == ".et" or (output.name.endswith(".et") and "{" in output.name):
            raise OptionError(f"-o {output}: Chakra files are named NAME.RANK.et; give NAME.et, without the rank")
        if self.simulator and self.simulator not in SIMULATORS:
            raise OptionError(f"--for {self.simulator[:40]}: not known; use {', '.join(SIMULATORS)}")
        if self.metadata and (self.fold_host or self.simulator):
            name = "--for astra-sim" if self.simulator else "--fold-host"
            raise OptionError(f"{name} and --metadata: files without the host are for ASTRA-sim, which stops at it")

    def check_recorded(self) -> None:
        """Refuse what shapes descriptions alone, before anything is written."""
        if self.operators:
            raise OptionError(
                "--operators: for a description; of a recorded run all operators are written, leave it out"
            )

    def check_ranks(self, count: int) -> None:
        """Refuse what needs several ranks, before anything is written."""
        if self.simulator and count < 2:
            raise OptionError("--for astra-sim: it simulates networks, and this run has one rank; leave the option out")

    @property
    def folds(self) -> bool:
        return self.fold_host or bool(self.simulator)


def write_execution(
    output: Path, execution: Execution, wishes: ChakraWishes, links: Links | None = None
) -> dict[str, Any]:
    """A run that was traced, with what was written as an answer."""
    wishes.check_recorded()
    world = max(header.world_size for header in execution.trace.headers)
    if wishes.folds and len(execution.trace.ranks) == 1 < world:
        return _write_repeated(output, execution, wishes, world, None)
    wishes.check_ranks(len(execution.trace.ranks))
    if not wishes.simulator:
        with busy("writing"):
            return _answer(write_chakra(output, execution, links, wishes.metadata, wishes.folds))
    with busy("simulating the run over the links of ASTRA-sim"):
        found = of_recorded(execution)
    answer = _write_for_astra(output, found)
    if not shows_bandwidth(execution):
        told = f"no transfer of 1 MiB or more has a recorded size: {found.dimensions[0].gb_s:g} GB/s is a guess"
        answer["warnings"].append(f"{told}; put yours into {answer['simulator_files'][1]}")
    return answer


def write_prediction(output: Path, found: Prediction, wishes: ChakraWishes) -> dict[str, Any]:
    """A predicted run of any kind."""
    run = found.run
    if isinstance(run, DescribedRun):
        return _write_described(output, run, wishes)
    if not isinstance(run, TracedRun):
        raise OptionError(f"-o {output}: this kind of run cannot be written as Chakra; use .json or .html")
    execution = _as_predicted(run)
    world = max(header.world_size for header in execution.trace.headers)
    if len(execution.trace.ranks) == 1 < world:
        return _write_repeated(output, execution, wishes, world, found.setup)
    return write_execution(output, execution, wishes)


def _as_predicted(run: TracedRun) -> Execution:
    """A traced run at its predicted times, as if it had been recorded so."""
    graph = run.graph if run.duration is None else run.graph.with_times(run.duration, run.graph.gap)
    start, end = (np.rint(times).astype(np.int64) + run.origin for times in run.task_times)
    trace = replace(run.trace, headers=tuple(header._replace(profiled=False) for header in run.trace.headers))
    nodes = replace(run.nodes, trace=trace, start=start, end=end)
    return replace(run.execution, trace=trace, nodes=nodes, graph=graph)


def _write_described(output: Path, run: DescribedRun, wishes: ChakraWishes) -> dict[str, Any]:
    wishes.check_ranks(run.step.setup.cluster.gpus)
    with busy("laying out the ranks"):
        workload = described_workload(run, wishes.operators)
    if wishes.simulator:
        answer = _write_for_astra(output, of_described(run, workload))
    else:
        answer = _write_workload(output, workload)
    return answer | {"warnings": [*answer["warnings"], *_slow_everywhere(run)]}


def _slow_everywhere(run: DescribedRun) -> list[str]:
    """What to report about slow parts: all ranks of a stage are written alike."""
    if not run.slow_us:
        return []
    return [
        f"--slow: the {run.slow_us / 1e3:,.2f} ms per step that slow parts add are in the files of all ranks, not only "
        "those of the slow ones; the step is right, but lumos stragglers cannot find them there"
    ]


def _write_repeated(
    output: Path, execution: Execution, wishes: ChakraWishes, world: int, setup: Setup | None
) -> dict[str, Any]:
    """A job of which one rank was recorded, in a dry run or a trace: all ranks do the same."""
    wishes.check_recorded()
    workload, warnings = repeated_rank(execution, world)
    if wishes.simulator:
        answer = _write_for_astra(output, of_repeated(execution, workload, setup))
    else:
        answer = _write_workload(output, workload)
    return answer | {"warnings": [*answer["warnings"], *warnings]}


def _write_for_astra(output: Path, found: AstraWorkload) -> dict[str, Any]:
    """The files of all ranks as ASTRA-sim is to be told of them, and those beside."""
    answer, written, estimate = _write_workload(output, found.written), found.written, found.estimate
    warnings = [*found.warnings, *answer["warnings"], *_told_otherwise(found)]
    if estimate is not None:
        answer["estimate"] = estimate.as_dict()
        warnings += estimate.warnings
    answer["warnings"] = [*warnings, *too_long(written.sent), *too_many_groups(written.groups())]
    files = write_astra_files(output, found.dimensions, written.groups(), largest_tensor(written))
    network = [
        {"ranks": one.ranks, "gb_s": round(one.gb_s, 3), "latency_ns": one.latency_ns} for one in found.dimensions
    ]
    named = {"simulator_files": [str(file) for file in files.files], "network": network, "command": files.command}
    return answer | named


def _told_otherwise(found: AstraWorkload) -> list[str]:
    """What to say where files state other sizes than the run has."""
    if found.own.recorded is not None:
        return []  # its tasks are cut anew
    pairs = list(zip(found.own.sent, found.written.sent, strict=True))
    changed = sum(own != told for own, told in pairs)
    if not changed:
        return []
    share = changed / len(pairs)
    percent = f"{100 * share:.0f}" if share >= 0.005 else "less than 1"
    return [
        f"{percent} % of the transfers state another size than the run moves, with which they take as long as "
        "the network file says: ASTRA-sim routes messages between nodes, and exchanges of some ranks, in its own way"
    ]


def _write_workload(output: Path, workload: Workload) -> dict[str, Any]:
    with progress_bar() as progress:
        return _answer(write_workload(output, workload, 1 if workload.places.world <= _FEW else 0, progress))


def _answer(written: Written) -> dict[str, Any]:
    counts = {key: getattr(written, key) for key in ("nodes", "collectives", "messages", "groups")}
    return {
        "files": [str(file) for file in written.files], "ranks": len(written.files), **counts,
        "group_file": "" if written.group_file is None else str(written.group_file),
        "bytes": sum(os.path.getsize(file) for file in written.files),
        "warnings": [*written.warnings, *_left_from_before(written)],
    }  # fmt: skip


def _left_from_before(written: Written) -> list[str]:
    """What to say about files of an earlier export under the same name: a reader takes them for part of this run."""
    name = re.sub(r"(\.\d+)?\.et$", "", written.files[0].name)
    there = {
        int(match[1]): file.name
        for file in written.files[0].parent.iterdir()
        if (match := re.fullmatch(re.escape(name) + r"\.(\d+)\.et", file.name))
    }
    mine = {file.name for file in written.files}
    left = [there[rank] for rank in sorted(there) if there[rank] not in mine]
    if written.group_file is None and (groups := written.files[0].with_name(f"{name}.groups.json")).exists():
        left.append(groups.name)
    if not left:
        return []
    return [f"{_some(left)}: left from an earlier export, and no part of this run; remove before the folder is read"]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names):,} files)"


def show_written(answer: dict[str, Any], console: Console) -> None:
    """What was written, a line each."""
    for name, value in answer.items():
        if name == "files" and len(value) > _SHOWN:
            shown = f"{value[0]}\n… ({len(value) - 2:,} more)\n{value[-1]}"
        elif name == "network":
            shown = ", ".join(f"{d['ranks']} ranks at {d['gb_s']:,.1f} GB/s" for d in value)
        elif name == "estimate":
            difference = number_text(value["difference_pct"], 1, signed=True)
            shown = f"{value['one_at_a_time_ms']:,.1f} ms in ASTRA-sim, {difference} %"
        elif name == "bytes":
            shown = f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value:,}"
        else:
            shown = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        if shown:
            console.print(f"{name}: {shown}", highlight=False, markup=False, soft_wrap=True)
