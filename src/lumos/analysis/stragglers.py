"""Which ranks are slow, and why; and which tasks of a run are the same task on other ranks and in other steps.

A rank is compared with the others: its gain if it were like them, how often they wait for it, and its work. A task is
identified by what it does (its name and lane, for example) and by its occurrence index within a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lumos.analysis.breakdown import Breakdown
from lumos.data_files import read_table
from lumos.graph.graph import Floats, Ints
from lumos.graph.rules.build import Execution
from lumos.graph.rules.nodes import Nodes
from lumos.trace.steps import StepMarks

_LIMITS = read_table("analysis.toml")["stragglers"]
_MOST_SIMULATED = 64  # ranks, those that others wait for most


@dataclass(frozen=True)
class Straggler:
    """One rank: what it costs the job, and how it differs from the median rank."""

    rank: int
    costs_others_ms: float  # of the mean step, simulated: its gain if the rank took what the others take for the same
    last_in: int
    of: int
    compute_ms: float
    idle_ms: float
    why: str
    others_wait_ms: float  # in collectives to which it came last, mean of the others


def stragglers(
    execution: Execution, parts: dict[int, Breakdown], steps: int, step_ms: float, gain_ms: Callable[[int], float]
) -> list[Straggler]:
    """All ranks, the one that costs the job most first; `gain_ms` simulates the job with a rank like the others."""
    trace = execution.trace
    wait_ms, last, taking_part = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
    for meeting in execution.rendezvous:
        arrive = trace.start[meeting.rows]
        slowest = int(np.argmax(arrive))
        waits = np.minimum(arrive[slowest] - arrive, trace.duration[meeting.rows])  # none is longer than the kernel
        wait_ms[meeting.ranks[slowest]] += float(np.delete(waits, slowest).mean()) / 1e6 / max(steps, 1)
        last[meeting.ranks[slowest]] += 1
        for rank in meeting.ranks:
            taking_part[rank] += 1
    compute, idle = (float(np.median([getattr(p, key) for p in parts.values()])) for key in ("compute_ms", "other_ms"))
    count = np.bincount(trace.rank[trace.on_gpu], minlength=max(parts) + 1)
    kernels = count / max(float(np.median(count[list(parts)])), 1.0)
    simulated = set(sorted(parts, key=lambda rank: -wait_ms[rank])[:_MOST_SIMULATED]) if len(parts) > 1 else set()
    rows = [
        Straggler(
            rank, max(0.0, gain_ms(rank)) if rank in simulated else 0.0, last[rank], taking_part[rank],
            part.compute_ms, part.other_ms,
            _why(wait_ms[rank], part.compute_ms - compute, part.other_ms - idle, kernels[rank], step_ms),
            wait_ms[rank],
        )
        for rank, part in parts.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (-row.costs_others_ms, -row.others_wait_ms))


def _why(wait_ms: float, more_compute: float, more_idle: float, kernels: float, step_ms: float) -> str:
    if wait_ms < _LIMITS["notable"] * step_ms:
        return "in step with the others"
    if kernels > _LIMITS["more_kernels"]:
        return f"runs {kernels:.1f} times as many kernels as the median rank: it has more to do"
    if max(more_compute, more_idle) < _LIMITS["notable"] * step_ms:
        return "arrives last without more work of its own: look at its place in the schedule"
    if more_compute >= more_idle:
        return f"computes {more_compute:.2f} ms longer than the median rank"
    return f"idles {more_idle:.2f} ms longer than the median rank: its host is slow"


def step_of_nodes(nodes: Nodes, marks: StepMarks, until_next: bool) -> Ints:
    """The step in which a node of a thread ran, or in which a node of a stream was launched; -1 outside of all.

    A step lasts until its own mark ends, or `until_next` begins.
    """
    trace = nodes.trace
    if (marks.note < 0).all():
        return np.zeros(len(nodes), np.int64)
    launch = nodes.launch_of_node
    when = np.where(launch >= 0, trace.start[launch], nodes.start)
    step = np.full(len(nodes), -1, np.int64)
    for column, rank in enumerate(marks.ranks):
        mine = np.flatnonzero(nodes.rank == rank)
        begin, end = trace.start[marks.note[:, column]], trace.end[marks.note[:, column]]
        order = np.argsort(begin, kind="stable")
        place = np.searchsorted(begin[order], when[mine], side="right") - 1
        index = order[np.maximum(place, 0)]
        inside = until_next | (when[mine] < np.maximum(end[index], begin[index] + 1))
        step[mine] = np.where((place >= 0) & inside, index, -1)
    return step


def group_medians(group: Ints, value: Floats, groups: int, lower: bool) -> Floats:
    """The median of each group, 0 for an empty one; of two in the middle the `lower`, or their mean.

    Groups below 0 do not count.
    """
    order = np.lexsort((value, group))
    bounds = np.searchsorted(group[order], np.arange(groups + 1))
    first, last = bounds[:-1], np.maximum(bounds[1:] - 1, bounds[:-1])
    low, high = (value[order[np.minimum(place, len(order) - 1)]] if len(order) else np.zeros(groups)
                 for place in ((first + last) // 2, (first + last + 1) // 2))  # fmt: skip
    return np.where(np.diff(bounds) > 0, low if lower else (low + high) / 2, 0.0)
