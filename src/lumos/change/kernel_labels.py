"""Labels: which phase, layer and micro-batch every task of a trace belongs to.

Phases follow from who launched a task: the optimizer's scope, the thread of the autograd engine, or the thread that
drives the step. Layers follow from repetition: a layer has one attention, so what lies between one attention and the
next in the order of launches is one layer, turned by half. What is before the first and after the last is the ends of
the model (and half a layer on each side).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.replay import Replay
from lumos.graph.simulate import simulate
from lumos.trace.names import CPU_COMPUTE, Category, Kind, is_step
from lumos.trace.steps import Steps
from lumos.trace.trace import Trace

Rows = NDArray[np.int64]
Times = NDArray[np.float64]


class Phase(IntEnum):
    """What a task is for."""

    FORWARD = 0
    BACKWARD = 1  # recomputation included
    OPTIMIZER = 2


class Work(IntEnum):
    """What a task on a GPU does, as far as costs tell apart."""

    MATRIX = 0
    ATTENTION = 1
    STREAM = 2  # whatever only moves data
    COMM = 3


_MATRIX = re.compile(r"nvjet|gemm|cutlass|cublas|cijk|xmma|_mm_|matmul|ampere_.*(s|h)gemm|sm\d+_xmma|wgmma_gemm", re.I)
_ATTENTION = re.compile(r"sdpa|flash|fmha|mha_(fwd|bwd)|attention|attn", re.I)
_BACKWARD = re.compile(r"bprop|bwd|backward|dot_do_o|convert_dq|dgrad", re.I)
_SOFTMAX = re.compile(r"(masked_softmax|softmax_warp)_?(warp_)?(forward|backward)")  # of attention that is not fused
_ENGINE = "autograd::engine::evaluate_function"
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)")


@dataclass(frozen=True)
class RankLabels:
    """The tasks that one rank launched in one step, in the order of their launches."""

    rank: int
    row: Rows  # of the task on the GPU
    launched: NDArray[np.float64]  # when, in microseconds of the host from the start of the step, without the profiler
    us: NDArray[np.float64]
    phase: NDArray[np.int8]
    work: NDArray[np.int8]
    attention: NDArray[np.int8]  # 0: not, 1: a forward kernel, 2: the main backward kernel
    optimizer_us: float  # of the host

    def of(self, phase: Phase) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = self.phase == phase
        return mask


def label(run: Replay, most: int = 8) -> list[RankLabels]:
    """The labels of ranks spread evenly over the job, for the step that is nearest to the typical one."""
    clean = run.execution.retime(simulate(run.clean_graph))
    steps = run.marks.read(clean)
    index = int(np.argmin(np.abs(steps.milliseconds - steps.typical)))
    columns = np.unique(np.linspace(0, len(steps.ranks) - 1, min(most, len(steps.ranks))).round().astype(int))
    labeller = _Labeller(run.execution.trace, clean)
    return [labeller.rank(steps, index, int(column)) for column in columns]


class _Labeller:
    """What all ranks' labels need of a trace, worked out once."""

    def __init__(self, trace: Trace, clean: Trace) -> None:
        self.trace, self.clean = trace, clean
        self.launch = trace.launch_row
        self.words = _Words(trace)
        self.rows = trace.rows_by_rank(np.ones(len(trace), bool))

    def rank(self, steps: Steps, index: int, column: int) -> RankLabels:
        trace, clean, rank = self.trace, self.clean, steps.ranks[column]
        rows = self.rows[rank]
        mine = rows[trace.on_gpu[rows] & (self.launch[rows] >= 0)]
        times = clean.start[self.launch[mine]]
        low, high = int(steps.start[index, column]), int(steps.end[index, column])
        mine = mine[(times >= low) & (times < high)]
        mine = mine[np.argsort(clean.start[self.launch[mine]], kind="stable")]
        calls = self.launch[mine].astype(np.int64)
        notes = rows[(trace.category[rows] == Category.NOTE) & self.words.updates[trace.name[rows]]]
        inside = notes[(clean.start[notes] >= low) & (clean.end[notes] <= high)]
        us, phase = _durations(trace, clean, mine), self._phases(rows, notes, calls)
        blocked = np.where(self.words.blocks[trace.name[calls]], us, 0.0)  # the host did nothing else meanwhile
        ends = (clean.end[mine[self.words.work[trace.name[mine]] == Work.COMM]] - low) / 1e3
        updating = float(clean.duration[inside].sum()) / 1e3 - float(blocked[phase == Phase.OPTIMIZER].sum())
        return RankLabels(
            rank=rank,
            row=mine,
            launched=self._launched((clean.start[calls] - low) / 1e3, calls, blocked, phase, ends),
            us=us,
            phase=phase,
            work=self.words.work[trace.name[mine]],
            attention=self.words.attention[trace.name[mine]],
            optimizer_us=max(0.0, updating),
        )

    def _launched(self, starts: Times, calls: Rows, blocked: Times, phase: NDArray[np.int8], ends: Times) -> Times:
        """When each task was launched: where calls block, on a clock of every phase that only counts the host's work.

        Between two calls the host worked, or waited for communication: then it worked once that had ended.
        """
        if not self.words.blocks[self.trace.name[calls]].any():
            return starts
        free = np.concatenate([[0.0], (starts + blocked)[:-1]])
        before = np.searchsorted(ends := np.sort(ends), starts) - 1
        ended = np.where(before >= 0, ends[np.maximum(before, 0)] if len(ends) else 0.0, 0.0)
        worked = np.maximum(starts - np.maximum(free, ended), 0.0)
        clock = np.zeros(len(starts))
        for one in Phase:
            clock[phase == one] = np.cumsum(worked[phase == one])
        return clock

    def _phases(self, rows: Rows, notes: Rows, calls: Rows) -> NDArray[np.int8]:
        """By thread and scope of the launching call."""
        trace = self.trace
        phase = np.full(len(calls), Phase.FORWARD, np.int8)
        engine = rows[(trace.category[rows] == Category.OP) & self.words.engine[trace.name[rows]]]
        drives = self._driving_lane(rows)
        for lane in np.unique(trace.lane[engine]):
            on = trace.lane[calls] == lane
            if lane != drives:
                phase[on] = Phase.BACKWARD
                continue
            spans = engine[trace.lane[engine] == lane]
            phase[on & _within(trace.start[calls], trace.start[spans], trace.end[spans])] = Phase.BACKWARD
        on = trace.lane[calls] == drives
        phase[on & _within(trace.start[calls], trace.start[notes], trace.end[notes])] = Phase.OPTIMIZER
        return phase

    def _driving_lane(self, rows: Rows) -> int:
        """The thread with the step's marks, or with the most operators."""
        trace = self.trace
        marks = rows[(trace.category[rows] == Category.NOTE) & self.words.steps[trace.name[rows]]]
        if len(marks):
            return int(trace.lane[marks[0]])
        operators = rows[trace.category[rows] == Category.OP]
        return int(np.bincount(trace.lane[operators]).argmax()) if len(operators) else -1


def _durations(trace: Trace, clean: Trace, rows: Rows) -> NDArray[np.float64]:
    """Compute as recorded; communication as simulated, waiting left out."""
    communicates = trace.kind[rows] == Kind.COMM
    times: NDArray[np.float64] = np.where(communicates, clean.duration[rows], trace.duration[rows]) / 1e3
    return times


class _Words:
    """What every name of a trace means; names are looked at once each."""

    def __init__(self, trace: Trace) -> None:
        count = len(trace.names)
        self.work = np.full(count, Work.STREAM, np.int8)
        self.attention = np.zeros(count, np.int8)
        self.engine = np.array([name.startswith(_ENGINE) for name in trace.names], bool)
        self.updates = np.array([_OPTIMIZER.search(name) is not None for name in trace.names], bool)
        self.steps = np.array([is_step(name) for name in trace.names], bool)
        self.blocks = np.array([name == CPU_COMPUTE for name in trace.names], bool)
        for index, name in enumerate(trace.names):
            if _ATTENTION.search(name) and "aten::" not in name:
                self.work[index] = Work.ATTENTION
                self.attention[index] = 2 if _BACKWARD.search(name) else 1
            elif _MATRIX.search(name):
                self.work[index] = Work.MATRIX
        if not self.attention.any():
            for index, name in enumerate(trace.names):
                found = _SOFTMAX.search(name)
                self.attention[index] = 0 if found is None else 2 if found[3] == "backward" else 1
        communication = np.unique(trace.name[trace.kind == Kind.COMM])
        self.work[communication] = Work.COMM
        self.attention[communication] = 0
        for index, name in enumerate(trace.names):
            if self.attention[index] == 2 and re.search(r"dot_do_o|convert_dq", name):
                self.attention[index] = 0  # helpers of the one kernel that counts


def _within(times: Rows, starts: Rows, ends: Rows) -> NDArray[np.bool_]:
    """Which times lie inside any of the spans."""
    if len(starts) == 0:
        return np.zeros(len(times), bool)
    order = np.argsort(starts)
    latest = np.maximum.accumulate(ends[order])
    at = np.searchsorted(starts[order], times, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (times <= latest[np.maximum(at, 0)])
    return inside
