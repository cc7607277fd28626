"""Whether a synthetic run reproduces an original: how near its steps come to recorded ones.

Two steps of one run resemble each other, so nearness alone proves nothing. The yardstick is a recorded step that the
model did not see, or else the originals among each other: a synthetic step that comes no nearer to the originals than
another step of the same run shows nothing of any one of them.

Compared are windows of consecutive kernels of the same kinds, by the logarithms of their times and of the host work
before them; and the longest run of consecutive kernels that agree with an original in kind, and in both times within
one per cent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lumos.graph.graph import Bools, Floats
from lumos.synthesis.observe import Task

WINDOW = 6  # kernels
_ALIKE = 0.01  # times that differ by less count as the same
_MOST_STEPS = 8  # of ranks, on either side, in which the longest run is looked for
_FLOOR_NS = 100.0  # what clocks of GPUs and hosts resolve
Steps = Sequence[Sequence[Task]]


@dataclass(frozen=True)
class Nearness:
    """How near some steps come to the originals."""

    median_distance: float  # of a window to the nearest original one: the mean factor between their times, less 1
    nearest_distance: float  # the same for the nearest hundredth of the windows
    new_windows: float  # share of windows whose kinds, in this order, no original has
    longest_run: int  # consecutive kernels that agree with an original
    equal_tasks: float  # share of kernels that agree with an original one to the nanosecond, in both times

    def as_dict(self) -> dict[str, Any]:
        """Without distances where no original has any of the windows."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


def nearness(steps: Steps, originals: Steps) -> Nearness:
    """Of some steps to the originals; each step is a sequence of kernels."""
    known = _Windows(originals)
    found = np.concatenate([known.nearest(step) for step in steps]) if steps else np.zeros(0)
    there = found[np.isfinite(found)]
    exact = {(task.state.kind, task.busy, task.work) for step in originals for task in step}
    tasks = [task for step in steps for task in step]
    same = sum((task.state.kind, task.busy, task.work) in exact for task in tasks)
    pairs = ((one, other) for one in _few(steps) for other in _few(originals))
    return Nearness(
        median_distance=float(np.expm1(np.median(there))) if len(there) else math.inf,
        nearest_distance=float(np.expm1(np.quantile(there, 0.01))) if len(there) else math.inf,
        new_windows=float(1 - len(there) / len(found)) if len(found) else 0.0,
        longest_run=max((longest_run(one, other) for one, other in pairs), default=0),
        equal_tasks=same / max(len(tasks), 1),
    )


def among_originals(originals: Steps) -> Nearness | None:
    """Of every original to the others; None for a single one."""
    if len(originals) < 2:
        return None
    found = [nearness([step], [o for o in originals if o is not step]) for step in _few(originals)]
    return Nearness(
        median_distance=float(np.median([one.median_distance for one in found])),
        nearest_distance=float(np.median([one.nearest_distance for one in found])),
        new_windows=float(np.mean([one.new_windows for one in found])),
        longest_run=max(one.longest_run for one in found),
        equal_tasks=float(np.mean([one.equal_tasks for one in found])),
    )


def longest_run(one: Sequence[Task], other: Sequence[Task]) -> int:
    """The most consecutive kernels that two steps have in common."""
    a, b = _features(one), _features(other)
    names = {name: i for i, name in enumerate({t.state.kind for t in (*one, *other)})}
    kinds = np.array([names[t.state.kind] for t in other])
    run = np.zeros(len(other) + 1, np.int64)
    best = 0
    for task, features in zip(one, a, strict=True):
        same: Bools = (kinds == names[task.state.kind]) & (np.abs(b - features) < _ALIKE).all(axis=1)
        run[1:] = np.where(same, run[:-1] + 1, 0)
        best = max(best, int(run.max()))
    return best


def _few(steps: Steps) -> Steps:
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).round().astype(int))
    return [steps[int(i)] for i in chosen] if len(steps) else []


def _features(tasks: Sequence[Task]) -> Floats:
    return np.log(np.array([(t.busy, t.work) for t in tasks]).reshape(-1, 2) + _FLOOR_NS)


class _Windows:
    """Windows of the originals by their kinds."""

    def __init__(self, steps: Steps) -> None:
        by_kinds: dict[tuple[str, ...], list[Floats]] = defaultdict(list)
        for step in steps:
            features = _features(step)
            for kinds, at in _kinds_of_windows(step):
                by_kinds[kinds].append(features[at : at + WINDOW].ravel())
        self.known = {kinds: np.array(rows) for kinds, rows in by_kinds.items()}

    def nearest(self, step: Sequence[Task]) -> Floats:
        """For every window of a step: the mean difference of logarithms to the nearest one; infinite without."""
        features = _features(step)
        distances = [
            float(np.abs(self.known[kinds] - features[at : at + WINDOW].ravel()).mean(axis=1).min())
            if kinds in self.known
            else np.inf
            for kinds, at in _kinds_of_windows(step)
        ]
        return np.array(distances)


def _kinds_of_windows(step: Sequence[Task]) -> list[tuple[tuple[str, ...], int]]:
    kinds = [task.state.kind for task in step]
    return [(tuple(kinds[at : at + WINDOW]), at) for at in range(len(kinds) - WINDOW + 1)]
