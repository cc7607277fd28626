"""Steps: which part of a run one iteration is, on every rank. The same definition serves recorded and simulated runs.

A step is the profiler's `ProfilerStep#N` on the thread that drives the rank. The CPU may run ahead of the GPU: a step
ends when everything it launched has ended, and the next one begins there. Steps that synchronise are unaffected. A
trace without such marks is one step, from its first to its last task. Ranks are recorded one by one, so each has its
own first and last. Graphs that state no times (Chakra) are run instead: their ranks begin together, and the step is
over when the last of them is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumos.errors import InputError, OptionError
from lumos.trace.names import Category, is_step
from lumos.trace.trace import Ints, Trace

WHOLE = "whole trace"


@dataclass(frozen=True)
class Steps:
    """Windows of the steps: `start` and `end` are (steps, ranks), in nanoseconds on the trace's clock."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    start: Ints
    end: Ints

    @property
    def milliseconds(self) -> np.ndarray:
        """The time of every step: its mean over the ranks."""
        return np.asarray((self.end - self.start).mean(axis=1) / 1e6)

    @property
    def typical(self) -> float:
        """The undisturbed step, in milliseconds: disturbances only ever make steps longer, so the lower quartile."""
        return float(np.quantile(self.milliseconds, 0.25))

    @property
    def mean(self) -> float:
        """The mean over steps and ranks, in milliseconds."""
        return float((self.end - self.start).mean() / 1e6)


@dataclass(frozen=True)
class StepMarks:
    """The rows that mark steps: found once in the recorded trace, then read at the times of any simulated one."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    note: np.ndarray  # (steps, ranks): the ProfilerStep row, -1 for the whole trace
    last_on_gpu: np.ndarray  # (steps, ranks): row of the last thing on a GPU that the step launched, or -1
    works: np.ndarray  # rows that a trace without marks begins and ends with
    together: bool = False  # all ranks begin at the same moment: without marks, they share one window

    def read(self, trace: Trace) -> Steps:
        """The windows of the steps, by the times of this trace."""
        if (self.note < 0).all():
            return self._whole(trace)
        start, end = trace.start[self.note], trace.end[self.note].copy()
        gpu_end = np.where(self.last_on_gpu >= 0, trace.end[np.maximum(self.last_on_gpu, 0)], end)
        end = np.maximum(end, gpu_end)
        start[1:] = np.maximum(start[1:], np.minimum(end[:-1], end[1:]))
        return Steps(self.names, self.ranks, start, end)

    def _whole(self, trace: Trace) -> Steps:
        rows, all_rows = trace.rows_by_rank(self.works), trace.rows_by_rank(np.ones(len(trace), bool))
        rows = {r: rows[r] if len(rows[r]) else all_rows[r] for r in self.ranks}
        start = np.array([[int(trace.start[rows[r]].min()) for r in self.ranks]])
        end = np.array([[int(trace.end[rows[r]].max()) for r in self.ranks]])
        if self.together:
            start, end = np.full_like(start, start.min()), np.full_like(end, end.max())
        return Steps(self.names, self.ranks, start, end)


def find_steps(trace: Trace) -> StepMarks:
    """The steps of a trace that every rank has."""
    ranks, by_rank = tuple(trace.ranks), step_rows(trace)
    last = _last_on_gpu(trace, by_rank)
    shared = [n for n in by_rank[ranks[0]] if all(n in by_rank[r] for r in ranks)]
    working = [n for n in shared if any(last[r].get(n, -1) >= 0 for r in ranks)]
    names = [n for n in working or shared  # a trailing step may be empty
             if any(trace.duration[by_rank[r][n]] > 0 or last[r].get(n, -1) >= 0 for r in ranks)]  # fmt: skip
    if not names:
        _refuse_a_moment(trace)
        none = np.full((1, len(ranks)), -1)
        together = all(header.is_graph for header in trace.headers)
        return StepMarks((WHOLE,), ranks, none, none, trace.is_work, together)
    note = np.array([[by_rank[r][n] for r in ranks] for n in names])
    last_row = np.array([[last[r].get(n, -1) for r in ranks] for n in names])
    return StepMarks(tuple(names), ranks, note, last_row, trace.is_work)


def step_rows(trace: Trace) -> dict[int, dict[str, int]]:
    """For every rank, the rows that mark its steps, in the order of time."""
    named = np.array([is_step(n) for n in trace.names] or [False], bool)
    rows = np.flatnonzero(np.isin(trace.category, (Category.NOTE, Category.OP)) & named[trace.name])
    by_rank: dict[int, dict[str, int]] = {r: {} for r in trace.ranks}
    for row in rows[np.argsort(trace.start[rows], kind="stable")]:
        by_rank[int(trace.lane_rank[trace.lane[row]])].setdefault(trace.names[trace.name[row]], int(row))
    return by_rank


def _refuse_a_moment(trace: Trace) -> None:
    if len(trace) == 0 or int(trace.end.max()) <= int(trace.start.min()):
        path = trace.headers[0].path if trace.headers else "the trace"
        raise InputError(f"{path}: nothing in it takes any time; record it again")


def _last_on_gpu(trace: Trace, by_rank: dict[int, dict[str, int]]) -> dict[int, dict[str, int]]:
    """Per rank and step: the row that ends last among those launched inside the step."""
    launch = trace.launch_row
    rows = trace.rows_by_rank(launch >= 0)
    answer: dict[int, dict[str, int]] = {}
    for r, steps in by_rank.items():
        mine = rows[r]
        times = trace.start[launch[mine]]
        answer[r] = {}
        for name, row in steps.items():
            inside = mine[(times >= trace.start[row]) & (times < trace.end[row])]
            if len(inside):
                answer[r][name] = int(inside[np.argmax(trace.end[inside])])
    return answer


def keep_step(trace: Trace, wanted: str) -> Trace:
    """The part of a trace that belongs to one step: what its threads did in it, and what that launched."""
    marks = find_steps(trace)
    name = _find_name(marks.names, wanted)
    index = marks.names.index(name)
    rank, launch = trace.rank, trace.launch_row
    keep = np.zeros(len(trace), bool)
    for column, r in enumerate(marks.ranks):
        row = marks.note[index, column]
        low, high = trace.start[row], trace.end[row]
        mine = rank == r
        host = mine & ~trace.on_gpu & (trace.start >= low) & (trace.start < high)
        keep |= host & ((trace.end <= high) | ~np.isin(trace.category, (Category.NOTE,)))
        keep[row] = True
        launched = (launch >= 0) & mine
        keep |= launched & (trace.start[launch] >= low) & (trace.start[launch] < high)
    return trace.select(keep)


def _find_name(names: tuple[str, ...], wanted: str) -> str:
    matching = [n for n in names if n == wanted or n.rsplit("#", 1)[-1] == wanted.lstrip("#")]
    if matching:
        return matching[0]
    if names == (WHOLE,):
        raise OptionError(
            f"--step {wanted}: this trace has no step marks; leave --step out, or record with profiler.step()"
        )
    raise OptionError(f"--step {wanted}: no such step; this trace has {', '.join(names)}")
