"""Jobs for the analysis of slowdowns: from an operation table, and from traces of several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lumos.analysis.run import TracedRun
from lumos.analysis.slowdown import SlowdownJob, Worker
from lumos.analysis.stragglers import group_medians, step_of_nodes
from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.graph.graph import Bools, Floats, Ints, simulate, simulate_many
from lumos.graph.operation_graph import OperationGraph, operation_graph
from lumos.graph.rules.build import StepNodes
from lumos.read.operation_table import is_operation_table
from lumos.trace.names import Kind, is_step
from lumos.trace.operations import COMPUTE, MESSAGES, REPLICA_COLLECTIVES, OperationTable, numbered, occurrence
from lumos.trace.steps import StepMarks

_JOINED = {name: f"{name.split('-')[0]}-pp-comm" for name in MESSAGES}  # a send and its receive are one transfer
_COMMUNICATION = (
    *MESSAGES, *REPLICA_COLLECTIVES, "layernorm-grads-all-reduce", "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
)  # fmt: skip
_KINDS = {Kind.COMPUTE: "compute", Kind.COMM: "communication", Kind.COPY: "copies", Kind.CPU: "host"}
_MS = 1e-6  # a nanosecond
_MOST_SEGMENTS = 1023
_IN_PLACE: float = read_table("analysis.toml")["slowdown_jobs"]["in_place"]
_MESSAGES = ("c10d::send", "c10d::recv_", "nccl:send", "nccl:recv")  # of pipelines, whose stages do different things

_TABLE_NAMES = (".parquet", ".csv", ".csv.gz")


def job_of_table(table: OperationTable) -> SlowdownJob:
    """The job of an operation table, without steps that some worker does not have."""
    table, notes = _whole_steps(table)
    graph = operation_graph(table)
    joined = [_JOINED.get(name, name) for name in table.types]
    types, ideal = tuple(dict.fromkeys(joined)), _typical(table, graph.duration)
    recorded = np.zeros(len(table.steps))
    np.maximum.at(recorded, table.step_index, table.end)
    ranks = np.zeros(len(table.workers), np.int64)
    ranks[table.worker] = table.rank
    return SlowdownJob(
        name=table.name, types=types, kind=np.array([types.index(name) for name in joined])[table.kind],
        workers=tuple(Worker(int(r), *w) for r, w in zip(ranks, table.workers, strict=True)), worker=table.worker,
        steps=tuple(str(step) for step in table.steps), step=table.step_index,
        took=graph.duration, ideal=ideal,
        recorded_ms=1e3 * recorded, replayed_ms=_steps(graph, graph.duration[None], graph.delay)[0],
        simulate=lambda durations: _steps(graph, durations), held_out_ms=_held_out(table, graph),
        communication=tuple(dict.fromkeys(_JOINED.get(name, name) for name in _COMMUNICATION)),
        warnings=(*table.warnings, *notes, *graph.warnings), gpus=len(table.workers) * table.tp,
        ideal_spans=lambda: _spans(graph, ideal, table.step_index),
        passes=COMPUTE, chunk=np.maximum(table.chunk, 0), backward_of=_backward_of(table),
        delays_ms=_delays(table, graph),
    )  # fmt: skip


def _whole_steps(table: OperationTable) -> tuple[OperationTable, list[str]]:
    """The steps in which every worker takes part."""
    cells = np.unique(np.stack((table.step_index, table.worker)), axis=1)
    present, notes = np.bincount(cells[0], minlength=len(table.steps)), []
    expected = table.dp * table.pp
    if len(table.workers) < expected:
        notes.append(
            f"{len(table.workers)} of {expected} workers (dp_rank, stage) are in the table: messages and "
            "collectives with the others keep their recorded time"
        )
    whole = present == present.max()
    if not whole.all():
        dropped = table.steps[~whole]
        shown = ", ".join(str(step) for step in dropped[:5]) + (" …" if len(dropped) > 5 else "")
        notes.append(f"{len(dropped)} of {len(table.steps)} steps lack some workers and were left out: {shown}")
        table = table.select(whole[table.step_index])
    return table, notes


def _typical(table: OperationTable, duration: Floats) -> Floats:
    """What every operation takes in the ideal job: the mean of its type, of transfers the median."""
    typical = np.zeros(len(table.types))
    for kind in np.unique(table.kind).tolist():
        mean = np.median if table.types[kind] in _COMMUNICATION else np.mean
        typical[kind] = mean(duration[table.kind == kind])
    return typical[table.kind]


def _backward_of(table: OperationTable) -> Ints:
    """For each forward pass, the backward pass of the same micro-batch on the same worker; -1 if it is unknown."""
    passes = np.flatnonzero(table.of_type(*COMPUTE) & (table.micro_batch >= 0))
    columns = (table.step_index, table.worker, table.chunk, table.micro_batch)
    key, backward = numbered(*(column[passes] for column in columns)), table.of_type("backward-compute")[passes]
    partner = np.full(int(key.max(initial=-1)) + 1, -1)
    partner[key[backward]] = passes[backward]
    backward_of = np.full(len(table), -1)
    backward_of[passes[~backward]] = partner[key[~backward]]
    return backward_of


def _delays(table: OperationTable, graph: OperationGraph) -> dict[str, float]:
    """Milliseconds of the mean step that delays of launches before operations of each type cost by themselves."""
    kinds = [kind for kind in range(len(table.types)) if graph.delay[table.kind == kind].any()]
    only = [graph.delay * 0, *(np.where(table.kind == kind, graph.delay, 0.0) for kind in kinds)]
    without, *means = (float(_steps(graph, graph.duration[None], delay).mean()) for delay in only)
    return {table.types[kind]: mean - without for kind, mean in zip(kinds, means, strict=True)}


def _held_out(table: OperationTable, graph: OperationGraph) -> Floats | None:
    """Milliseconds of every step, replayed with delays of launches that are typical of other steps.

    Half of the steps take the median delays of the other half, of the same worker and operation: what is recorded of a
    step itself then says nothing about when its operations are launched.
    """
    if len(table.steps) < 2:
        return None
    task = numbered(table.worker, table.kind, table.sequence)
    odd = table.step_index % 2
    steps = []
    for mine in (0, 1):
        others = np.flatnonzero(odd != mine)
        median = group_medians(task[others], graph.delay[others], int(task.max()) + 1, lower=True)
        steps.append(_steps(graph, graph.duration[None], median[task])[0])
    return np.asarray(np.where(np.arange(len(table.steps)) % 2 == 0, *steps))


def _ends(graph: OperationGraph, durations: Floats, delay: Floats | None = None) -> Floats:
    """When every node ends, for several durations of all operations."""
    nodes = np.zeros((len(durations), len(graph.graph)))
    nodes[:, graph.work] = durations
    if delay is not None:
        nodes[:, graph.launch] = delay
    return simulate_many(graph.graph, nodes) if len(nodes) > 1 else simulate(graph.graph, nodes[0]).end[None]


def _steps(graph: OperationGraph, durations: Floats, delay: Floats | None = None) -> Floats:
    """Milliseconds of every step: to the end of its last operation, without meetings, which are of all steps."""
    ends = _ends(graph, durations, delay)[:, : graph.step_nodes[-1]]
    return np.asarray(np.maximum.reduceat(ends, graph.step_nodes[:-1], axis=1) * _MS)


def _spans(graph: OperationGraph, durations: Floats, step: Ints) -> tuple[Floats, Floats]:
    """When every operation starts and ends, one step after the other; what meets others starts when it arrives."""
    ends = _ends(graph, durations[None])[0]
    lengths = np.maximum.reduceat(ends[: graph.step_nodes[-1]], graph.step_nodes[:-1])
    begins = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])[step]
    return begins + ends[graph.launch], begins + ends[graph.work]


def rank_job(run: TracedRun) -> SlowdownJob:
    """The job of traces of several ranks: tasks of the same name and place in the step are compared.

    What a rank runs more than the others has no counterpart there; in the ideal job it is shared by all ranks. Time of
    hosts is not work that could be shared: there, the ideal is the median rank, and the faster one of two, unless ranks
    are stages of a pipeline, or hosts wait for one another at different places.
    """
    execution, nodes, marks, graph = run.execution, run.execution.nodes, run.marks, run.execution.graph
    if len(marks.ranks) * len(marks.names) < 2:
        path = next((header.path for header in execution.trace.headers), "the trace")
        raise InputError(f"{path}: one step of one rank, with nothing to compare it to; give the folder of all ranks")
    single = ["a trace of one rank: only its steps are compared with one another"] if len(marks.ranks) == 1 else []
    size, is_host, begins = len(nodes), nodes.kind == Kind.CPU, graph.is_first[: len(nodes)]
    step, column = step_of_nodes(nodes, marks, until_next=True), np.searchsorted(np.array(marks.ranks), nodes.rank)
    took, gap = graph.duration[:size], (graph.gap + graph.frozen)[:size]
    task, inside = _alike(run, step), step >= 0
    transfers, fixed_gap = (nodes.kind == Kind.COMM) & inside, begins | ~inside
    alike = not any(name in _MESSAGES for name in execution.trace.names)
    times = (took, np.where(is_host, took, 0.0), gap)
    durations, hosts, gaps = (_ByRank.of(task, value, step, column, marks, alike) for value in times)
    in_place = hosts.in_place
    ideal = np.where(is_host & in_place, hosts.median(task), durations.mean(task))
    ideal = np.where(transfers, _least_transfer(run, task, took), np.where(inside, ideal, took))
    ideal_gap = np.where(fixed_gap, gap, gaps.median(task) if in_place else gaps.mean(task))
    others = np.where(transfers, ideal, np.where(inside, durations.others(task, column), took))
    others_gap = np.where(fixed_gap, gap, gaps.others(task, column))
    step_nodes = StepNodes(execution, marks)

    def steps(durations: Floats) -> Floats:
        windows = [step_nodes.windows(_with_times(run, one[:size], one[size:]).times) for one in durations]
        return np.array([(one.end - one.start).mean(axis=1) * _MS for one in windows])

    kinds = np.full(256, -1)
    kinds[list(_KINDS)] = range(len(_KINDS))
    return SlowdownJob(
        name=f"{len(marks.ranks)} ranks", types=tuple(_KINDS.values()),
        kind=np.tile(np.where(inside, kinds[nodes.kind], -1), 2),
        workers=tuple(Worker(rank) for rank in marks.ranks), worker=np.tile(column, 2),
        steps=marks.names, step=np.tile(step, 2),
        took=np.concatenate([took, gap]), ideal=np.concatenate([ideal, ideal_gap]),
        of_others=np.concatenate([others, others_gap]) if alike and in_place else None,
        recorded_ms=marks.read(execution.trace).milliseconds, replayed_ms=run.steps.milliseconds,
        simulate=steps, communication=("communication",), gpus=len(marks.ranks),
        warnings=(*execution.warnings, *single), ideal_run=lambda: _with_times(run, ideal, ideal_gap),
    )  # fmt: skip


def _with_times(run: TracedRun, duration: Floats, gap: Floats) -> TracedRun:
    """The run with other durations, and other gaps before tasks."""
    graph = run.execution.graph
    durations, gaps = graph.duration.copy(), graph.gap.copy()
    durations[: len(duration)] = duration
    gaps[: len(gap)] = gap - graph.frozen[: len(gap)]
    return TracedRun(run.execution, run.marks, graph.with_times(durations, gaps))


def _alike(run: TracedRun, step: Ints) -> Ints:
    """A number for each node, which the nodes share that do the same on other ranks and in other steps.

    That is: the n-th task of its name; a call is cut into segments by the calls within it, which are numbered. The
    time between two calls of a thread is named after the second one.
    """
    nodes, trace = run.execution.nodes, run.execution.trace
    first_of = {name: place for place, name in reversed(list(enumerate(_plain(n) for n in trace.names)))}
    plain = np.array([first_of[_plain(name)] for name in trace.names] or [0])
    known = nodes.row >= 0
    following = np.append(nodes.row[1:], -1)
    named = np.where(known, nodes.row, np.where(following >= 0, following, 0))
    name = plain[trace.name[named]] + np.where(known, 0, len(trace.names) + (following < 0))
    segment = np.where(known, np.arange(len(nodes)) - nodes.first_node[nodes.row], 0)
    what = numbered(name, np.clip(segment, 0, _MOST_SEGMENTS))
    place = occurrence(numbered(what, nodes.rank.astype(np.int64), step + 1), nodes.start)
    return numbered(what, place)


def _plain(name: str) -> str:
    """A name that is the same in every step."""
    return "step" if is_step(name) else name


@dataclass(frozen=True)
class _ByRank:
    """What is alike, (tasks, ranks): its time in a step, on average over the steps; 0 where a rank does not do it."""

    time: Floats
    comparable: Bools  # tasks of which one rank should take as long as another

    @classmethod
    def of(cls, task: Ints, value: Floats, step: Ints, rank: Ints, marks: StepMarks, alike: bool) -> _ByRank:
        shape = int(task.max(initial=0)) + 1, len(marks.ranks)
        place, inside = task * shape[1] + rank, step >= 0
        time, count = (
            np.bincount(place, part, shape[0] * shape[1]).reshape(shape) for part in (value * inside, inside)
        )
        return cls(time / len(marks.names), np.asarray((count > 0).all(axis=1) & alike))

    @property
    def in_place(self) -> bool:
        """Whether ranks lose time at the same places; where each waits elsewhere, medians would leave nothing of it."""
        every = np.arange(len(self.time))
        return float(self.median(every).sum()) >= _IN_PLACE * float(self.time.sum(axis=0).min())

    def mean(self, task: Ints) -> Floats:
        """Over all ranks: work that could be shared."""
        return np.asarray(self.time.mean(axis=1)[task])

    def median(self, task: Ints) -> Floats:
        """The median rank, or the faster of two; what only some ranks do, or stages differ in, counts as shared."""
        median = np.sort(self.time, axis=1)[:, (self.time.shape[1] - 1) // 2]
        return np.asarray(np.where(self.comparable, median, self.time.mean(axis=1))[task])

    def others(self, task: Ints, rank: Ints) -> Floats:
        """The mean over all ranks but one."""
        rest = self.time.sum(axis=1)[task] - self.time[task, rank]
        return np.asarray(rest / max(1, self.time.shape[1] - 1))


def _least_transfer(run: TracedRun, task: Ints, took: Floats) -> Floats:
    """For transfers: the shortest of all ranks, which did not wait for anyone; the median of the steps."""
    value = took.copy()
    for meeting in run.execution.rendezvous:
        transfers = run.execution.nodes.last_node[meeting.rows]
        transfers = transfers[transfers >= 0]
        if len(transfers):
            value[transfers] = value[transfers].min()
    return group_medians(task, value, int(task.max(initial=0)) + 1, lower=True)[task]


def table_at(path: Path) -> Path | None:
    """The table of operations at a path, or in the folder; None for what may be traces."""
    if path.is_file():
        return path if path.name.endswith(_TABLE_NAMES) or is_operation_table(path) else None
    if not path.is_dir():
        return None
    tables = [file for file in sorted(path.iterdir()) if file.name.endswith(_TABLE_NAMES) and is_operation_table(file)]
    if len(tables) > 1:
        shown = ", ".join(file.name for file in tables[:4])
        raise InputError(f"{path}: has {len(tables)} tables of operations ({shown}); name one of them")
    return tables[0] if tables else None
