"""Jobs for the analysis of slowdowns: from an operation table, and from traces of several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lumos.analysis.run import TracedRun
from lumos.analysis.slowdown import Job, Worker
from lumos.analysis.stragglers import group_medians, numbered, occurrence, step_of_nodes
from lumos.errors import InputError
from lumos.graph.graph import Bools, Floats, Ints
from lumos.graph.operation_graph import OperationGraph, operation_graph
from lumos.graph.rules.step_nodes import StepNodes
from lumos.graph.simulate import simulate, simulate_many
from lumos.read.operation_table import is_operation_table
from lumos.trace.names import Kind, is_step
from lumos.trace.operations import COMPUTE, MESSAGES, REPLICA_COLLECTIVES, OperationTable
from lumos.trace.steps import StepMarks

_JOINED = {name: f"{name.split('-')[0]}-pp-comm" for name in MESSAGES}  # a send and its receive are one transfer
_COMMUNICATION = (
    *MESSAGES, *REPLICA_COLLECTIVES, "layernorm-grads-all-reduce", "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
)  # fmt: skip
_KINDS = {Kind.COMPUTE: "compute", Kind.COMM: "communication", Kind.COPY: "copies", Kind.CPU: "host"}
_MS = 1e-6  # a nanosecond
_MOST_SEGMENTS = 1023
_IN_PLACE = 0.8  # of the fastest rank; jobs whose ranks do the same have 0.89 or more, where hosts wait for others 0.34
_MESSAGES = ("c10d::send", "c10d::recv_", "nccl:send", "nccl:recv")  # of pipelines, whose stages do different things

_TABLE_NAMES = (".parquet", ".csv", ".csv.gz")


def job_of_table(table: OperationTable) -> Job:
    """The job of an operation table, without steps that some worker does not have."""
    table, notes = _whole_steps(table)
    found = operation_graph(table)
    types = tuple(dict.fromkeys(_JOINED.get(name, name) for name in table.types))
    kind = np.array([types.index(_JOINED.get(name, name)) for name in table.types])[table.kind]
    recorded = np.zeros(len(table.steps))
    np.maximum.at(recorded, table.step_index, table.end)
    ranks = np.zeros(len(table.workers), np.int64)
    ranks[table.worker] = table.rank
    return Job(
        name=table.name, types=types, kind=kind,
        workers=tuple(Worker(int(r), *w) for r, w in zip(ranks, table.workers, strict=True)), worker=table.worker,
        steps=tuple(str(step) for step in table.steps), step=table.step_index,
        took=found.duration, ideal=_usual(table, found.duration),
        recorded_ms=1e3 * recorded, replayed_ms=_steps(found, found.duration[None], found.delay)[0],
        simulate=lambda durations: _steps(found, durations), held_out_ms=_held_out(table, found),
        communication=tuple(dict.fromkeys(_JOINED.get(name, name) for name in _COMMUNICATION)),
        warnings=(*table.warnings, *notes, *found.warnings), gpus=len(table.workers) * table.tp,
        ideal_spans=lambda: _spans(found, _usual(table, found.duration), table.step_index),
        passes=COMPUTE, chunk=np.maximum(table.chunk, 0), backward_of=_backward_of(table),
        delays_ms=_delays(table, found),
    )  # fmt: skip


def _whole_steps(table: OperationTable) -> tuple[OperationTable, list[str]]:
    """The steps in which every worker takes part."""
    cells = np.unique(np.stack((table.step_index, table.worker)), axis=1)
    present = np.bincount(cells[0], minlength=len(table.steps))
    notes = []
    if len(table.workers) < table.dp * table.pp:
        notes.append(
            f"{len(table.workers)} of {table.dp * table.pp} workers (dp_rank, stage) are in the table: messages and "
            "collectives with the others keep their recorded time"
        )
    whole = present == present.max()
    if not whole.all():
        dropped = table.steps[~whole]
        shown = ", ".join(str(step) for step in dropped[:5]) + (" …" if len(dropped) > 5 else "")
        notes.append(f"{len(dropped)} of {len(table.steps)} steps lack some workers and were left out: {shown}")
        table = table.select(whole[table.step_index])
    return table, notes


def _usual(table: OperationTable, duration: Floats) -> Floats:
    """What every operation takes in the ideal job: the mean of its type, of transfers the median."""
    usual = np.zeros(len(table.types))
    for kind, name in enumerate(table.types):
        mine = duration[table.kind == kind]
        if len(mine):
            usual[kind] = np.median(mine) if name in _COMMUNICATION else mine.mean()
    return usual[table.kind]


def _backward_of(table: OperationTable) -> Ints:
    """Of each forward pass, the backward pass of the same micro-batch on the same worker; -1 where none is known."""
    passes = np.flatnonzero(table.of_type(*COMPUTE) & (table.micro_batch >= 0))
    columns = (table.step_index, table.worker, table.chunk, table.micro_batch)
    _, key = np.unique(np.stack([c[passes] for c in columns]), axis=1, return_inverse=True)
    key, backward = np.ravel(key), table.of_type("backward-compute")[passes]
    partner = np.full(int(key.max(initial=-1)) + 1, -1)
    partner[key[backward]] = passes[backward]
    found = np.full(len(table), -1)
    found[passes[~backward]] = partner[key[~backward]]
    return found


def _delays(table: OperationTable, found: OperationGraph) -> dict[str, float]:
    """Milliseconds of the mean step that delays of launches cost, those before operations of each type alone."""
    kinds = [kind for kind in range(len(table.types)) if found.delay[table.kind == kind].any()]
    only = [found.delay * 0, *(np.where(table.kind == kind, found.delay, 0.0) for kind in kinds)]
    means = [float(_steps(found, found.duration[None], delay).mean()) for delay in only]
    return {table.types[kind]: mean - means[0] for kind, mean in zip(kinds, means[1:], strict=True)}


def _held_out(table: OperationTable, found: OperationGraph) -> Floats | None:
    """Milliseconds of every step, replayed with delays of launches that are usual in other steps.

    Half of the steps take the median delays of the other half, of the same worker and operation: what is recorded of a
    step itself then says nothing about when its operations are launched.
    """
    if len(table.steps) < 2:
        return None
    _, task = np.unique(np.stack((table.worker, table.kind, table.sequence)), axis=1, return_inverse=True)
    half = table.step_index % 2
    steps = np.zeros((2, len(table.steps)))
    for mine in (0, 1):
        others = np.flatnonzero(half != mine)
        usual = group_medians(np.ravel(task)[others], found.delay[others], int(task.max()) + 1, lower=True)
        steps[mine] = _steps(found, found.duration[None], usual[np.ravel(task)])[0]
    return np.asarray(np.where(np.arange(len(table.steps)) % 2 == 0, steps[0], steps[1]))


def _steps(found: OperationGraph, durations: Floats, delay: Floats | None = None) -> Floats:
    """Milliseconds of every step: to the end of its last operation."""
    nodes = np.zeros((len(durations), len(found.graph)))
    nodes[:, found.work] = durations
    if delay is not None:
        nodes[:, found.launch] = delay
    ends = simulate_many(found.graph, nodes) if len(nodes) > 1 else simulate(found.graph, nodes[0]).end[None]
    ends = ends[:, : found.step_nodes[-1]]  # without meetings, which are of all steps
    return np.asarray(np.maximum.reduceat(ends, found.step_nodes[:-1], axis=1) * _MS)


def _spans(found: OperationGraph, durations: Floats, step: Ints) -> tuple[Floats, Floats]:
    """When every operation starts and ends, one step after the other; what meets others starts when it arrives."""
    nodes = np.zeros(len(found.graph))
    nodes[found.work] = durations
    times = simulate(found.graph, nodes)
    lengths = np.maximum.reduceat(times.end[: found.step_nodes[-1]], found.step_nodes[:-1])
    begins = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])[step]
    return begins + times.end[found.launch], begins + times.end[found.work]


def rank_job(run: TracedRun) -> Job:
    """The job of traces of several ranks: tasks of the same name and place in the step are compared.

    What a rank runs more than the others has no counterpart there; in the ideal job it is shared by all ranks. Time of
    hosts is not work that could be shared: there, the ideal is the median rank, and the faster one of two, unless ranks
    are stages of a pipeline, or hosts wait for one another at different places.
    """
    execution, nodes = run.execution, run.execution.nodes
    if len(run.marks.ranks) * len(run.marks.names) < 2:
        path = next((header.path for header in execution.trace.headers), "the trace")
        raise InputError(f"{path}: one step of one rank, with nothing to compare it to; give the folder of all ranks")
    alone = ["a trace of one rank: only its steps are compared with one another"] if len(run.marks.ranks) == 1 else []
    size, graph = len(nodes), execution.graph
    step = step_of_nodes(run.execution.nodes, run.marks, until_next=True)
    column = np.searchsorted(np.array(run.marks.ranks), nodes.rank)
    took = graph.duration[:size]
    gap = (graph.gap + graph.frozen)[:size]
    task = _alike(run, step)
    alike = not any(name in _MESSAGES for name in execution.trace.names)
    transfers, begins = (nodes.kind == Kind.COMM) & (step >= 0), graph.is_first[:size]
    on_host = np.where(nodes.kind == Kind.CPU, took, 0.0)
    durations, hosts, gaps = (_ByRank.of(task, value, step, column, run.marks, alike) for value in (took, on_host, gap))
    alike &= hosts.in_place
    ideal = np.where((nodes.kind == Kind.CPU) & hosts.in_place, hosts.median(task), durations.mean(task))
    ideal = np.where(transfers, _least_transfer(run, task, took), np.where(step >= 0, ideal, took))
    ideal_gap = np.where(begins | (step < 0), gap, gaps.median(task) if hosts.in_place else gaps.mean(task))
    others = np.where(transfers, ideal, np.where(step >= 0, durations.others(task, column), took))
    others_gap = np.where(begins | (step < 0), gap, gaps.others(task, column))

    step_nodes = StepNodes(execution, run.marks)

    def steps(durations: Floats) -> Floats:
        windows = [step_nodes.windows(_with_times(run, one[:size], one[size:]).times) for one in durations]
        return np.array([(one.end - one.start).mean(axis=1) * _MS for one in windows])

    number = {int(kind): place for place, kind in enumerate(_KINDS)}
    kinds = np.array([number.get(kind, -1) for kind in range(256)])[nodes.kind]
    return Job(
        name=f"{len(run.marks.ranks)} ranks", types=tuple(_KINDS.values()),
        kind=np.tile(np.where(step >= 0, kinds, -1), 2),
        workers=tuple(Worker(rank) for rank in run.marks.ranks), worker=np.tile(column, 2),
        steps=run.marks.names, step=np.tile(step, 2),
        took=np.concatenate([took, gap]), ideal=np.concatenate([ideal, ideal_gap]),
        of_others=np.concatenate([others, others_gap]) if alike else None,
        recorded_ms=run.marks.read(execution.trace).milliseconds, replayed_ms=run.steps.milliseconds,
        simulate=steps, communication=("communication",), gpus=len(run.marks.ranks),
        warnings=(*run.execution.warnings, *alone),
        ideal_run=lambda: _with_times(run, ideal, ideal_gap),
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

    That is: the n-th task of its name; a call is cut into segments by the calls within it, which are told apart. The
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
        time = np.bincount(place, weights=value * inside, minlength=shape[0] * shape[1]) / len(marks.names)
        done = np.bincount(place, weights=inside, minlength=shape[0] * shape[1]).reshape(shape) > 0
        return cls(time.reshape(shape), np.asarray(done.all(axis=1) & alike))

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
