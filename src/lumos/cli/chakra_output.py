"""Chakra files of any run, as `lumos convert` and `lumos predict -o NAME.et` write them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from lumos.analysis.run import TracedRun
from lumos.chakra.astra_comparison import AstraEstimate
from lumos.chakra.astra_costs import (
    at_astra_prices,
    largest_tensor,
    tell_of_rings,
    told_stages,
    too_long,
    too_many_groups,
)
from lumos.chakra.astra_estimate import estimate_ranks, estimate_stages
from lumos.chakra.astra_files import (
    Dimension,
    described_network,
    needs_parting,
    shows_bandwidth,
    traced_network,
    write_astra_files,
)
from lumos.chakra.communication import Communication, plan_communication
from lumos.chakra.file_format import NodeType
from lumos.chakra.folded_ranks import Task, folded
from lumos.chakra.rank_files import Stages, write_stages
from lumos.chakra.repeated_rank import repeated_rank
from lumos.chakra.run_writer import Written, file_of_rank, write_chakra, write_folded
from lumos.chakra.step_tasks import StepTasks
from lumos.cli.terminal import busy, progress_bar
from lumos.errors import OptionError
from lumos.graph.rules.build import Execution
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.prediction import Prediction
from lumos.program.layout import layout_of
from lumos.program.rank_places import RankPlaces
from lumos.read.execution_trace import Links
from lumos.report.wording import number_text
from lumos.setup.setup import Setup
from lumos.step.step import prices_of

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
    with busy("writing"):
        if wishes.simulator:
            return _write_traced_for_astra(output, execution)
        written = write_chakra(output, execution, links, wishes.metadata, wishes.folds)
    return _answer(written, len(execution.trace.ranks))


class _Priced(NamedTuple):
    """A traced run as it is with transfers over the links that the network file states, not as it was recorded."""

    plan: Communication
    dimensions: list[Dimension]
    chains: dict[int, list[Task]]

    @staticmethod
    def of(execution: Execution) -> _Priced:
        plan, world = plan_communication(execution, closed=True), len(execution.trace.ranks)
        dimensions = traced_network(execution, needs_parting(plan.group_file(), world))
        priced = at_astra_prices(execution, plan, dimensions[0].gb_s, dimensions[0].latency_ns)
        if len(dimensions) > 1:
            tell_of_rings(plan, world, dimensions)
        return _Priced(plan, dimensions, folded(priced, plan))

    def estimate(self, execution: Execution) -> AstraEstimate | None:
        return estimate_ranks(folded(execution, self.plan), self.chains, self.plan, self.dimensions)


def estimate_traced(execution: Execution) -> AstraEstimate | None:
    """How long ASTRA-sim will take for the files of a traced run."""
    return _Priced.of(execution).estimate(execution)


def _write_traced_for_astra(output: Path, execution: Execution) -> dict[str, Any]:
    priced, world = _Priced.of(execution), len(execution.trace.ranks)
    plan, dimensions, chains = priced
    sizes = {number: len(ranks) for (_, ranks), number in plan.groups.items()}
    largest = largest_tensor((t, sizes[t.group]) for found in plan.transfers.values() for t in found if t.group)
    written = write_folded(output, chains, plan)
    answer = _answer(written, world) | _beside(output, dimensions, written.group_file, largest)
    _add_estimate(answer, priced.estimate(execution))
    answer["warnings"] += too_long(one for found in plan.transfers.values() for one in found)
    if not shows_bandwidth(execution):
        told = f"no transfer of 1 MiB or more has a recorded size: {dimensions[0].gb_s:g} GB/s is a guess"
        answer["warnings"] = [*answer["warnings"], f"{told}; put yours into {answer['simulator_files'][1]}"]
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
        stages = described_stages(run, wishes.operators)
    if wishes.simulator:
        answer = _write_simulated(output, stages, _described_links(run, stages))
    else:
        answer = _write_stages(output, stages)
    return answer | {"warnings": [*answer["warnings"], *_slow_everywhere(run)]}


def _slow_everywhere(run: DescribedRun) -> list[str]:
    """What to report about slow parts: all ranks of a stage are written alike."""
    if not run.slow_us:
        return []
    return [
        f"--slow: the {run.slow_us / 1e3:,.2f} ms per step that slow parts add are in the files of all ranks, not only "
        "those of the slow ones; the step is right, but lumos stragglers cannot find them there"
    ]


def described_stages(run: DescribedRun, operators: bool = False) -> Stages:
    """The tasks of all ranks of a described run."""
    found, parallel = StepTasks(run, operators), run.step.setup.parallel
    places = RankPlaces.of_setup(parallel, run.step.assembly.layout.schedule.copies)
    return Stages(places, tuple(tuple(found.tasks(stage)) for stage in range(parallel.pp)))


def _described_links(run: DescribedRun, stages: Stages) -> list[Dimension]:
    parted = needs_parting(stages.groups(), stages.places.world)
    return described_network(run.step.assembly.layout, run.step.prices.network, parted)


def estimate_described(run: DescribedRun, stages: Stages) -> AstraEstimate | None:
    """How long ASTRA-sim will take for the files of a described run."""
    links = _described_links(run, stages)
    return estimate_stages(stages, told_stages(stages, links), links)


def estimate_repeated(execution: Execution, stages: Stages) -> AstraEstimate | None:
    """How long ASTRA-sim will take for the files of a job of which one rank was recorded."""
    world = stages.places.world
    links = traced_network(execution, needs_parting(stages.groups(), world), world)
    return estimate_stages(stages, told_stages(stages, links), links)


def _write_repeated(
    output: Path, execution: Execution, wishes: ChakraWishes, world: int, setup: Setup | None
) -> dict[str, Any]:
    """A job of which one rank was recorded, in a dry run or a trace: all ranks do the same."""
    wishes.check_recorded()
    stages, warnings = repeated_rank(execution, world)
    if wishes.simulator:
        parted = needs_parting(stages.groups(), world)
        if setup is None:
            dimensions = traced_network(execution, parted, world)
        else:
            dimensions = described_network(layout_of(setup), prices_of(setup).network, parted)
        answer = _write_simulated(output, stages, dimensions)
    else:
        answer = _write_stages(output, stages)
    return answer | {"warnings": [*answer["warnings"], *warnings]}


def _write_simulated(output: Path, stages: Stages, dimensions: list[Dimension]) -> dict[str, Any]:
    """The files of all ranks as ASTRA-sim is to be told of them, and those beside."""
    told = told_stages(stages, dimensions)
    answer = _write_stages(output, told)
    answer["warnings"] += _told_otherwise(stages, told)
    _add_estimate(answer, estimate_stages(stages, told, dimensions))
    stages = told
    answer["warnings"] += too_long(task.transfer for tasks in stages.tasks for task in tasks)
    answer["warnings"] += too_many_groups(stages.groups())
    largest = largest_tensor(
        (task.transfer, int(task.transfer.group.split("x")[0]))
        for tasks in stages.tasks
        for task in tasks
        if task.transfer is not None and task.transfer.group
    )
    return answer | _beside(output, dimensions, _group_file(answer), largest)


def _add_estimate(answer: dict[str, Any], estimate: AstraEstimate | None) -> None:
    if estimate is not None:
        answer |= {"estimate": estimate.as_dict(), "warnings": [*answer["warnings"], *estimate.warnings]}


def _told_otherwise(stages: Stages, told: Stages) -> list[str]:
    """What to say where files state other sizes than the run has."""
    pairs = [pair for tasks in zip(stages.tasks, told.tasks, strict=True) for pair in zip(*tasks, strict=True)]
    changed = sum(a.transfer != b.transfer for a, b in pairs)
    if not changed:
        return []
    share = changed / sum(a.transfer is not None for a, _ in pairs)
    percent = f"{100 * share:.0f}" if share >= 0.005 else "less than 1"
    return [
        f"{percent} % of the transfers state another size than the run moves, with which they take as long as "
        "the network file says: ASTRA-sim routes messages between nodes, and exchanges of some ranks, in its own way"
    ]


def _write_stages(output: Path, stages: Stages) -> dict[str, Any]:
    world = stages.places.world
    with progress_bar() as progress:
        group_file = write_stages(output, stages, 1 if world <= _FEW else 0, progress)
    tasks = [(task, stages.places.of_stage) for stage in stages.tasks for task in stage]
    sent = [(task.transfer.type, count) for task, count in tasks if task.transfer is not None]
    written = Written(
        files=[file_of_rank(output, rank) for rank in range(world)], group_file=group_file,
        nodes=sum(count for _, count in tasks),
        collectives=sum(count for kind, count in sent if kind == NodeType.COMM_COLL),
        messages=sum(count for kind, count in sent if kind != NodeType.COMM_COLL),
        groups=len(_groups_in(group_file)), warnings=[],
    )  # fmt: skip
    return _answer(written, world)


def _answer(written: Written, ranks: int) -> dict[str, Any]:
    counts = {key: getattr(written, key) for key in ("nodes", "collectives", "messages", "groups")}
    return {
        "files": [str(file) for file in written.files], "ranks": ranks, **counts,
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


def _groups_in(group_file: Path | None) -> dict[str, list[int]]:
    return {} if group_file is None else msgspec.json.decode(group_file.read_bytes(), type=dict[str, list[int]])


def _group_file(answer: dict[str, Any]) -> Path | None:
    return Path(answer["group_file"]) if answer["group_file"] else None


def _beside(output: Path, dimensions: list[Dimension], group_file: Path | None, largest: int) -> dict[str, Any]:
    """The other files of the simulator, and the command that runs it."""
    found = write_astra_files(output, dimensions, group_file, largest)
    network = [{"ranks": one.ranks, "gb_s": round(one.gb_s, 3), "latency_ns": one.latency_ns} for one in dimensions]
    return {"simulator_files": [str(file) for file in found.files], "network": network, "command": found.command}


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
