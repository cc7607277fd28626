"""How far a synthetic run is from a recorded one: what of its behaviour is preserved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lumos.analysis.breakdown import Breakdown, mean_breakdown
from lumos.analysis.replay import Replay
from lumos.graph.graph import Floats
from lumos.synthesis.observe import Observed, Task

PARTS = {
    "exposed_compute_ms": "exposed compute", "exposed_comm_ms": "exposed communication",
    "overlapped_ms": "overlapped", "other_ms": "other",
}  # fmt: skip
_PATH = {"operator": "host", "call": "host", "python": "host"}  # the vocabulary does not tell these apart


@dataclass(frozen=True)
class Behaviour:
    """What a run does, as far as it is compared: means over its steps and ranks."""

    step_ms: float  # the median step: the first of a recording may wait for what was before it
    breakdown: dict[str, float]  # shares of the step
    path: dict[str, float]  # shares of the critical path
    tasks: float  # of a rank in a step
    collectives: dict[str, tuple[float, float]]  # by kind: how many of a rank in a step, and bytes of all of them
    busy_us: dict[str, Floats]  # by kind, of every kernel
    work_us: Floats  # of the host before every task
    sizes: Floats  # of collectives


def behaviour(runs: Sequence[Replay], observed: Sequence[Observed]) -> Behaviour:
    """The behaviour of a run that was replayed as a whole or step by step, and of which steps were observed."""
    parts = [part for run in runs for part in run.recorded_breakdown.values()]
    mean = mean_breakdown(parts)
    ranks = [rank for step in observed for rank in step.ranks]
    kernels: dict[str, list[float]] = defaultdict(list)
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    tasks = [task for rank in ranks for task in rank.tasks]
    for task in tasks:
        if task.state.stream >= 0:
            kernels[task.state.kind].append(task.busy / 1e3)
        if task.state.group >= 0:
            count[task.state.kind] += 1
            total[task.state.kind] += int(max(task.bytes, 0.0))
    path: Counter[str] = Counter()
    for run in runs:
        for kind, ms in run.path_summary.by_kind.items():
            path[_PATH.get(kind, kind)] += ms  # type: ignore[assignment]
    whole = sum(path.values()) or 1.0
    return Behaviour(
        step_ms=float(np.median(np.concatenate([run.recorded_steps.milliseconds for run in runs]))),
        breakdown=_shares(mean),
        path={kind: ms / whole for kind, ms in path.items()},
        tasks=len(tasks) / max(len(ranks), 1),
        collectives={kind: (count[kind] / len(ranks), total[kind] / len(ranks)) for kind in count},
        busy_us={kind: np.array(values) for kind, values in kernels.items()},
        work_us=np.array([(task.work + task.call) / 1e3 for task in tasks]),
        sizes=np.array([task.bytes for task in tasks if task.state.group >= 0 and task.bytes > 0]),
    )


def _shares(part: Breakdown) -> dict[str, float]:
    step = part.step_ms or 1.0
    return {PARTS[name]: value / step for name, value in asdict(part).items()}


@dataclass(frozen=True)
class Distance:
    """A synthetic run beside a recorded one."""

    reference: str
    synthetic: Behaviour
    recorded: Behaviour

    @property
    def step_pct(self) -> float:
        return 100 * (self.synthetic.step_ms / self.recorded.step_ms - 1) if self.recorded.step_ms else 0.0

    @property
    def breakdown_points(self) -> float:
        """The largest difference of a part of the step, in percentage points."""
        return _largest(self.synthetic.breakdown, self.recorded.breakdown)

    @property
    def path_points(self) -> float:
        return _largest(self.synthetic.path, self.recorded.path)

    @property
    def durations(self) -> dict[str, float]:
        """By kind of kernel, and of the host: how far the distributions of times are apart, from 0 to 1."""
        kinds = [kind for kind in self.recorded.busy_us if kind in self.synthetic.busy_us]
        found = {kind: _apart(self.synthetic.busy_us[kind], self.recorded.busy_us[kind]) for kind in sorted(kinds)}
        return found | {"host": _apart(self.synthetic.work_us, self.recorded.work_us)}

    def as_dict(self) -> dict[str, Any]:
        one, other = self.synthetic, self.recorded
        kinds = sorted({*one.collectives, *other.collectives})
        return {
            "reference": self.reference,
            "step_ms": one.step_ms,
            "reference_step_ms": other.step_ms,
            "step_pct": self.step_pct,
            "breakdown_points": self.breakdown_points,
            "breakdown": [
                {"part": part, "share": one.breakdown[part], "reference_share": share}
                for part, share in other.breakdown.items()
            ],
            "path_points": self.path_points,
            "path": [
                {"kind": kind, "share": one.path.get(kind, 0.0), "reference_share": other.path.get(kind, 0.0)}
                for kind in sorted({*one.path, *other.path})
            ],
            "tasks": one.tasks,
            "reference_tasks": other.tasks,
            "collectives": [
                {
                    "collective": kind,
                    "count": one.collectives.get(kind, (0.0, 0.0))[0],
                    "reference_count": other.collectives.get(kind, (0.0, 0.0))[0],
                    "bytes": one.collectives.get(kind, (0.0, 0.0))[1],
                    "reference_bytes": other.collectives.get(kind, (0.0, 0.0))[1],
                }
                for kind in kinds
            ],
            "sizes_apart": _apart(one.sizes, other.sizes) if len(one.sizes) and len(other.sizes) else 0.0,
            "durations_apart": self.durations,
        }


def _largest(one: dict[str, float], other: dict[str, float]) -> float:
    return 100 * max((abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}), default=0.0)


def _apart(one: Floats, other: Floats) -> float:
    """The largest distance between two distribution functions (Kolmogorov and Smirnov's)."""
    if not len(one) or not len(other):
        return 1.0
    places = np.concatenate((one, other))
    shares = [np.searchsorted(np.sort(values), places, side="right") / len(values) for values in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def kernel_tasks(observed: Sequence[Observed]) -> list[list[Task]]:
    """The kernels of every rank and step, in the order of their launches."""
    return [[t for t in rank.tasks if t.state.stream >= 0] for step in observed for rank in step.ranks]
