"""Kernel labels: the phase and the type of work of every kernel of a traced step, in the order of launches.

The phase follows from the launch: inside the optimizer's scope, on the thread of the autograd engine, or on the thread
that drives the step. Kernels of attention are marked, because each layer has exactly one: see lumos.traced.cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.replay import Replay
from lumos.data_files import read_table
from lumos.graph.graph import simulate
from lumos.trace.names import CPU_COMPUTE, CallKind, Category, Kind, is_step
from lumos.trace.steps import Steps
from lumos.trace.trace import Trace

Rows = NDArray[np.int64]
Times = NDArray[np.float64]
Bytes = NDArray[np.int8]
_WAITS = (CallKind.DEVICE_SYNC, CallKind.STREAM_SYNC, CallKind.EVENT_SYNC)


class KernelPhase(IntEnum):
    """The part of a training step that a kernel belongs to."""

    FORWARD = 0
    BACKWARD = 1  # with recomputation
    OPTIMIZER = 2


class KernelClass(IntEnum):
    """The type of work that a kernel does, as far as cost models distinguish it."""

    MATRIX = 0
    ATTENTION = 1
    STREAM = 2  # limited by memory bandwidth
    COMM = 3


@dataclass(frozen=True)
class RankLabels:
    """The kernels that one rank launched in one step, in the order of their launches."""

    rank: int
    row: Rows  # in the trace
    launched: Times  # microseconds of the host since the start of the step, without the profiler's cost and waiting
    us: Times
    phase: Bytes
    work: Bytes
    attention: Bytes  # 0: none, 1: a forward kernel, 2: the main backward kernel
    optimizer_us: float  # of the host

    def of(self, phase: KernelPhase) -> NDArray[np.bool_]:
        """A mask of the kernels of a phase."""
        mask: NDArray[np.bool_] = self.phase == phase
        return mask


def label(run: Replay, most: int = 8) -> list[RankLabels]:
    """The kernels of up to `most` ranks, spread evenly over the job, in the step nearest to the typical one."""
    clean = run.execution.retime(simulate(run.clean_graph))
    steps = run.marks.read(clean)
    index = int(np.argmin(np.abs(steps.milliseconds - steps.typical)))
    columns = np.unique(np.linspace(0, len(steps.ranks) - 1, min(most, len(steps.ranks))).round().astype(int))
    labeller = _Labeller(run.execution.trace, clean)
    return [labeller.rank(steps, index, int(column)) for column in columns]


def label_launches(run: Replay) -> list[list[RankLabels]]:
    """For every step: the kernels that each rank launched inside its mark, whenever they ran."""
    if (run.marks.note < 0).any():
        return [label(run, most=len(run.marks.ranks))]
    clean = run.execution.retime(simulate(run.clean_graph))
    marks, labeller = run.marks, _Labeller(run.execution.trace, clean)
    steps = Steps(marks.names, marks.ranks, clean.start[marks.note], clean.end[marks.note])
    return [[labeller.rank(steps, i, column) for column in range(len(marks.ranks))] for i in range(len(marks.names))]


class _Labeller:
    """Labels ranks of one trace; `clean` is the trace as it would be without the profiler."""

    def __init__(self, trace: Trace, clean: Trace) -> None:
        self.trace, self.clean = trace, clean
        self.launch = trace.launch_row
        self.names = _Names(trace)
        self.rows = trace.rows_by_rank(np.ones(len(trace), bool))

    def rank(self, steps: Steps, index: int, column: int) -> RankLabels:
        trace, clean, rank = self.trace, self.clean, steps.ranks[column]
        rows = self.rows[rank]
        low, high = int(steps.start[index, column]), int(steps.end[index, column])
        kernels = rows[trace.on_gpu[rows] & (self.launch[rows] >= 0)]
        times = clean.start[self.launch[kernels]]
        kernels = kernels[(times >= low) & (times < high)]
        kernels = kernels[np.argsort(clean.start[self.launch[kernels]], kind="stable")]
        calls, names = self.launch[kernels].astype(np.int64), trace.name[kernels]
        updates = rows[(trace.category[rows] == Category.NOTE) & self.names.optimizer[trace.name[rows]]]
        inside = updates[(clean.start[updates] >= low) & (clean.end[updates] <= high)]
        communicates = trace.kind[kernels] == Kind.COMM
        # Computing takes as long as recorded; communication as simulated, without waiting for other ranks.
        us = np.where(communicates, clean.duration[kernels], trace.duration[kernels]) / 1e3
        phase = self._phases(rows, updates, calls)
        blocked = np.where(self.names.blocking[trace.name[calls]], us, 0.0)  # the host runs these itself
        work = self.names.work[names]
        starts = (clean.start[calls] - low) / 1e3
        ends = np.sort((clean.end[kernels[work == KernelClass.COMM]] - low) / 1e3)
        updating = float(clean.duration[inside].sum()) / 1e3 - float(blocked[phase == KernelPhase.OPTIMIZER].sum())
        return RankLabels(
            rank=rank,
            row=kernels,
            launched=self._launched(starts, calls, blocked, phase, ends) - self._waited(rows, calls),
            us=us,
            phase=phase,
            work=work,
            attention=self.names.attention[names],
            optimizer_us=max(0.0, updating),
        )

    def _launched(self, starts: Times, calls: Rows, blocked: Times, phase: Bytes, comm_ends: Times) -> Times:
        """When each kernel was launched; where calls block, on a clock per phase that counts only the host's work.

        Between two calls the host worked, or waited for communication: then it worked once that had ended.
        """
        if not self.names.blocking[self.trace.name[calls]].any():
            return starts
        free = np.concatenate([[0.0], (starts + blocked)[:-1]])
        before = np.searchsorted(comm_ends, starts)
        ended = np.concatenate([[0.0], comm_ends])[before]
        worked = np.maximum(starts - np.maximum(free, ended), 0.0)
        clock = np.zeros(len(starts))
        for one in KernelPhase:
            clock[phase == one] = np.cumsum(worked[phase == one])
        return clock

    def _waited(self, rows: Rows, calls: Rows) -> Times:
        """How long the host had waited for the GPU in synchronising calls before each launch, on any thread."""
        trace, clean = self.trace, self.clean
        waits = rows[np.isin(trace.call[rows], _WAITS)]
        waits = waits[np.argsort(clean.end[waits], kind="stable")]
        total = np.concatenate([[0.0], np.cumsum(clean.duration[waits])]) / 1e3
        before = total[np.searchsorted(clean.end[waits], clean.start[calls], side="right")]
        return before - (before[0] if len(before) else 0.0)

    def _phases(self, rows: Rows, updates: Rows, calls: Rows) -> Bytes:
        """By the thread and the scope of the launching call."""
        trace = self.trace
        phase = np.full(len(calls), KernelPhase.FORWARD, np.int8)
        engine = rows[(trace.category[rows] == Category.OP) & self.names.engine[trace.name[rows]]]
        main = self._main_lane(rows)
        for lane in np.unique(trace.lane[engine]):
            on = trace.lane[calls] == lane
            if lane == main:
                on &= _within(trace, calls, engine[trace.lane[engine] == lane])
            phase[on] = KernelPhase.BACKWARD
        phase[(trace.lane[calls] == main) & _within(trace, calls, updates)] = KernelPhase.OPTIMIZER
        return phase

    def _main_lane(self, rows: Rows) -> int:
        """The thread that marks the steps, or that runs the most operators."""
        trace = self.trace
        marks = rows[(trace.category[rows] == Category.NOTE) & self.names.step[trace.name[rows]]]
        if len(marks):
            return int(trace.lane[marks[0]])
        operators = rows[trace.category[rows] == Category.OP]
        return int(np.bincount(trace.lane[operators]).argmax()) if len(operators) else -1


class _Names:
    """What every name of a trace means; each is looked at once."""

    def __init__(self, trace: Trace) -> None:
        is_a = {
            key: np.array([re.search(text, name) is not None for name in trace.names], bool)
            for key, text in read_table("operator_names.toml")["kernels"].items()
        }
        self.engine, self.optimizer = is_a["autograd_engine"], is_a["optimizer"]
        self.step = np.array([is_step(name) for name in trace.names], bool)
        self.blocking = np.array([name == CPU_COMPUTE for name in trace.names], bool)
        attention = is_a["attention"] & np.array(["aten::" not in name for name in trace.names], bool)
        classes = [KernelClass.ATTENTION, KernelClass.MATRIX]
        self.work = np.select([attention, is_a["matrix"]], classes, KernelClass.STREAM).astype(np.int8)
        self.attention = np.where(attention, 1 + is_a["backward"], 0).astype(np.int8)
        if not attention.any():
            self.attention = (is_a["softmax_forward"] + 2 * is_a["softmax_backward"]).astype(np.int8)
        self.attention[is_a["attention_helper"]] = 0
        communication = np.unique(trace.name[trace.kind == Kind.COMM])
        self.work[communication], self.attention[communication] = KernelClass.COMM, 0


def _within(trace: Trace, calls: Rows, spans: Rows) -> NDArray[np.bool_]:
    """Which calls start inside any of the spans."""
    if len(spans) == 0:
        return np.zeros(len(calls), bool)
    spans = spans[np.argsort(trace.start[spans])]
    latest = np.maximum.accumulate(trace.end[spans])
    at = np.searchsorted(trace.start[spans], trace.start[calls], side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (trace.start[calls] <= latest[np.maximum(at, 0)])
    return inside
