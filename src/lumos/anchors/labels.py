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

from lumos.rules.draft import launch_rows
from lumos.run import Replay
from lumos.steps import Steps
from lumos.trace import Trace
from lumos.vocabulary import Category, Kind

Rows = NDArray[np.int64]


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
_ENGINE = "autograd::engine::evaluate_function"
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)")


@dataclass(frozen=True)
class RankLabels:
    """The tasks that one rank launched in one step, in the order of their launches."""

    rank: int
    row: Rows  # of the task on the GPU
    launched: NDArray[np.float64]  # when, in microseconds from the start of the step, without the profiler
    us: NDArray[np.float64]
    phase: NDArray[np.int8]
    work: NDArray[np.int8]
    attention: NDArray[np.int8]  # 0: not, 1: a forward kernel, 2: the main backward kernel
    optimizer_us: float  # of the host

    def of(self, phase: Phase) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = self.phase == phase
        return mask


def label(run: Replay) -> list[RankLabels]:
    """The labels of every rank, for the step that is nearest to the typical one."""
    clean = run.execution.retime(_clean_times(run))
    steps = run.marks.read(clean)
    index = int(np.argmin(np.abs(steps.milliseconds - steps.typical)))
    return [_label_rank(run, clean, steps, index, column) for column in range(len(steps.ranks))]


def _clean_times(run: Replay):  # type: ignore[no-untyped-def]
    from lumos.simulate import simulate

    return simulate(run.clean_graph)


def _label_rank(run: Replay, clean: Trace, steps: Steps, index: int, column: int) -> RankLabels:
    trace, rank = run.execution.trace, steps.ranks[column]
    launch = launch_rows(trace)
    mine = np.flatnonzero((trace.rank == rank) & trace.on_gpu & (launch >= 0))
    times = clean.start[launch[mine]]
    low, high = steps.start[index, column], steps.end[index, column]
    mine = mine[(times >= low) & (times < high)]
    mine = mine[np.argsort(clean.start[launch[mine]], kind="stable")]
    calls = launch[mine]
    words = _Words(trace)
    phase = _phases(trace, rank, calls)
    return RankLabels(
        rank=rank,
        row=mine,
        launched=(clean.start[calls] - low) / 1e3,
        us=_durations(trace, clean, mine),
        phase=phase,
        work=words.work[trace.name[mine]],
        attention=words.attention[trace.name[mine]],
        optimizer_us=_optimizer_us(trace, clean, rank, low, high),
    )


def _durations(trace: Trace, clean: Trace, rows: Rows) -> NDArray[np.float64]:
    """Compute as recorded; communication as simulated, waiting left out."""
    communicates = trace.kind[rows] == Kind.COMM
    return np.where(communicates, clean.duration[rows], trace.duration[rows]) / 1e3


class _Words:
    """What every name of a trace means; names are looked at once each."""

    def __init__(self, trace: Trace) -> None:
        count = len(trace.names)
        self.work = np.full(count, Work.STREAM, np.int8)
        self.attention = np.zeros(count, np.int8)
        for index, name in enumerate(trace.names):
            if _ATTENTION.search(name) and "aten::" not in name:
                self.work[index] = Work.ATTENTION
                self.attention[index] = 2 if _BACKWARD.search(name) else 1
            elif _MATRIX.search(name):
                self.work[index] = Work.MATRIX
        communication = np.unique(trace.name[trace.kind == Kind.COMM])
        self.work[communication] = Work.COMM
        self.attention[communication] = 0
        for index, name in enumerate(trace.names):
            if self.attention[index] == 2 and re.search(r"dot_do_o|convert_dq", name):
                self.attention[index] = 0  # helpers of the one kernel that counts


def _phases(trace: Trace, rank: int, calls: Rows) -> NDArray[np.int8]:
    """By thread and scope of the launching call."""
    phase = np.full(len(calls), Phase.FORWARD, np.int8)
    engine = np.array([name.startswith(_ENGINE) for name in trace.names], bool)
    inside = np.flatnonzero((trace.rank == rank) & (trace.category == Category.OP) & engine[trace.name])
    lanes = np.unique(trace.lane[inside])
    drives = _driving_lane(trace, rank)
    for lane in lanes:
        on = trace.lane[calls] == lane
        if lane != drives:
            phase[on] = Phase.BACKWARD
            continue
        spans = inside[trace.lane[inside] == lane]
        phase[on & _within(trace.start[calls], trace.start[spans], trace.end[spans])] = Phase.BACKWARD
    named = np.array([_OPTIMIZER.search(name) is not None for name in trace.names], bool)
    notes = np.flatnonzero((trace.rank == rank) & (trace.category == Category.NOTE) & named[trace.name])
    on = trace.lane[calls] == drives
    phase[on & _within(trace.start[calls], trace.start[notes], trace.end[notes])] = Phase.OPTIMIZER
    return phase


def _driving_lane(trace: Trace, rank: int) -> int:
    """The thread with the step's marks, or with the most operators that the engine does not run."""
    marks = np.array(["ProfilerStep" in name for name in trace.names], bool)
    rows = np.flatnonzero((trace.rank == rank) & marks[trace.name] & (trace.category == Category.NOTE))
    if len(rows):
        return int(trace.lane[rows[0]])
    rows = np.flatnonzero((trace.rank == rank) & (trace.category == Category.OP))
    return int(np.bincount(trace.lane[rows]).argmax()) if len(rows) else -1


def _within(times: Rows, starts: Rows, ends: Rows) -> NDArray[np.bool_]:
    """Which times lie inside any of the spans."""
    if len(starts) == 0:
        return np.zeros(len(times), bool)
    order = np.argsort(starts)
    latest = np.maximum.accumulate(ends[order])
    at = np.searchsorted(starts[order], times, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (times <= latest[np.maximum(at, 0)])
    return inside


def _optimizer_us(trace: Trace, clean: Trace, rank: int, low: int, high: int) -> float:
    named = np.array([_OPTIMIZER.search(name) is not None for name in trace.names], bool)
    notes = (trace.rank == rank) & (trace.category == Category.NOTE) & named[trace.name]
    rows = np.flatnonzero(notes & (clean.start >= low) & (clean.end <= high))
    return float(clean.duration[rows].sum()) / 1e3
