"""Slowdown: how much longer a job takes than if all its workers and steps were alike, and which of them cause it.

The ideal job has the same graph, in which every operation takes what is typical of its type: the mean of computations,
the median of transfers. Between it and the job as it ran lie jobs that keep the recorded times of some operations: of
one type, one worker, one stage. What such a job takes over the ideal is the slowdown that these operations cause. The
method is that of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Any, NamedTuple, Protocol

import numpy as np

from lumos.analysis.run import TracedRun
from lumos.data_files import read_table
from lumos.graph.graph import Bools, Floats, Ints

_SLOWEST_SHARE: float = read_table("analysis.toml")["slowdown"]["slowest_share"]
_MOST_EXACT = 64  # workers that are simulated one by one
_MOST_FLOATS = 1 << 25  # durations in memory at once


class Worker(NamedTuple):
    """One rank, or one pipeline stage of one replica, whose tensor-parallel ranks count once."""

    rank: int
    dp_rank: int | None = None
    stage: int | None = None

    @property
    def label(self) -> str:
        return f"rank {self.rank}" if self.stage is None else f"dp {self.dp_rank}, stage {self.stage}"


@dataclass(frozen=True)
class SlowdownJob:
    """Operations of all workers and steps, and a simulator for other durations of them; nanoseconds.

    `simulate` takes durations as (scenarios, operations), and gives the milliseconds of (scenarios, steps).
    """

    name: str
    types: tuple[str, ...]
    kind: Ints  # of every operation: index into `types`, -1 for what belongs to none
    workers: tuple[Worker, ...]
    worker: Ints
    steps: tuple[str, ...]
    step: Ints
    took: Floats  # without waiting for others
    ideal: Floats
    recorded_ms: Floats  # of every step
    replayed_ms: Floats  # the same, simulated, with the delays of launches
    simulate: Callable[[Floats], Floats]
    communication: tuple[str, ...]  # types
    of_others: Floats | None = None  # of traces: what the other ranks took for the same
    warnings: tuple[str, ...] = ()
    gpus: int = 0
    passes: tuple[str, ...] = ()  # types that are forward and backward passes
    chunk: Ints | None = None  # virtual stage of every pass within its worker
    backward_of: Ints | None = None  # of every forward pass: its backward pass; -1 for all else
    delays_ms: dict[str, float] = field(default_factory=dict)  # what delays before operations of a type cost a step
    why: dict[int, str] = field(default_factory=dict)  # what a replay says of a rank
    held_out_ms: Floats | None = None  # steps replayed with the delays of other steps
    ideal_spans: Callable[[], tuple[Floats, Floats]] | None = None  # of a table: start and end of every operation
    ideal_run: Callable[[], TracedRun] | None = None  # of traces

    def step_ms(self, scenarios: Sequence[Floats]) -> Floats:
        """The steps of some scenarios, each the durations of all operations."""
        return np.asarray(self.simulate(np.asarray(scenarios)))

    def keeping(self, rows: Bools) -> Floats:
        """The ideal but for some operations, which take what they took."""
        return np.where(rows, self.took, self.ideal)

    def fixing(self, rows: Bools) -> Floats:
        """The job as it ran but for some operations, which take what is ideal."""
        return np.where(rows, self.ideal, self.took)

    def like_others(self, worker: int) -> Floats:
        """The job as it ran but for one worker, which takes what the others take for the same; of traces."""
        return np.where(self.worker == worker, self.ideal if self.of_others is None else self.of_others, self.took)

    def of_type(self, *names: str) -> Bools:
        return np.isin(self.kind, [number for number, name in enumerate(self.types) if name in names])

    def places(self, name: str) -> Ints:
        """`stage` or `dp_rank` of every operation; -1 where the job has none."""
        values = [getattr(worker, name) for worker in self.workers]
        return np.array([-1 if value is None else value for value in values])[self.worker]


class Reporter(Protocol):
    """Shows how much is done, of how much, and of what."""

    def __call__(self, done: int, total: int, what: str = ...) -> None: ...


@dataclass(frozen=True)
class Slowdown:
    """What a job loses to stragglers; arrays over steps are milliseconds or slowdowns."""

    job: SlowdownJob
    base_ms: Floats  # by step: simulated without delays of launches
    ideal_ms: Floats
    by_type: dict[str, float]
    by_stage: dict[int, float]
    by_dp_rank: dict[int, float]
    alone: Floats  # (workers, steps): the slowdown that each worker alone causes; nan where it was not simulated
    of_worker: Floats  # the published estimate: the lesser of those of its stage and of its replica
    mw: float | None
    ms: float | None
    slowest: Ints  # workers, the slowest first

    @property
    def slowdown(self) -> float:
        """The step as it ran, over the ideal one; both without delays of launches."""
        return float(self.base_ms.mean() / self.ideal_ms.mean())

    @property
    def launch_slowdown(self) -> float:
        """The recorded step over the one without delays of launches."""
        return float(self.job.recorded_ms.mean() / self.base_ms.mean())

    @property
    def error_pct(self) -> float:
        """Error of the simulated step."""
        return self._error_pct(self.job.replayed_ms)

    @property
    def worst_error_pct(self) -> float:
        """Error of the step that is simulated worst."""
        return self._worst_error_pct(self.job.replayed_ms)

    @property
    def held_out_error_pct(self) -> float | None:
        """The same as `error_pct`, where the delays of launches are those of other steps."""
        return None if self.job.held_out_ms is None else self._error_pct(self.job.held_out_ms)

    @property
    def held_out_worst_pct(self) -> float | None:
        return None if self.job.held_out_ms is None else self._worst_error_pct(self.job.held_out_ms)

    def _error_pct(self, simulated: Floats) -> float:
        return 100 * float(simulated.mean() / self.job.recorded_ms.mean() - 1)

    def _worst_error_pct(self, simulated: Floats) -> float:
        known = self.job.recorded_ms > 0
        errors = 100 * (simulated[known] / self.job.recorded_ms[known] - 1)
        return float(errors[np.argmax(np.abs(errors))]) if len(errors) else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `lumos stragglers --json` has them."""
        job = self.job
        return {
            "slowdown": self.slowdown,
            "launch_slowdown": self.launch_slowdown,
            "recorded_ms": float(job.recorded_ms.mean()),
            "simulated_ms": float(job.replayed_ms.mean()),
            "error_pct": self.error_pct,
            "worst_error_pct": self.worst_error_pct,
            "held_out_error_pct": self.held_out_error_pct,
            "held_out_worst_pct": self.held_out_worst_pct,
            "without_delays_ms": float(self.base_ms.mean()),
            "ideal_ms": float(self.ideal_ms.mean()),
            "gpus": job.gpus,
            "workers": len(job.workers),
            "mw": self.mw,
            "ms": self.ms,
            "by_type": self.by_type,
            "by_worker": [self._worker_row(worker) for worker in self.slowest.tolist()],
            "by_stage": [{"stage": stage, "slowdown": value} for stage, value in self.by_stage.items()],
            "by_dp_rank": [{"dp_rank": rank, "slowdown": value} for rank, value in self.by_dp_rank.items()],
            "steps": [self._step_row(step) for step in range(len(job.steps))],
            "warnings": list(job.warnings),
        }

    def alone_slowdown(self, worker: int) -> float | None:
        """The slowdown of all steps that one worker alone causes."""
        by_step = self.alone[worker]
        return None if np.isnan(by_step).any() else float((by_step * self.ideal_ms).sum() / self.ideal_ms.sum())

    def _worker_row(self, worker: int) -> dict[str, Any]:
        one, of_worker = self.job.workers[worker], float(self.of_worker[worker])
        places = {} if one.stage is None else {"dp_rank": one.dp_rank, "stage": one.stage}
        slowdowns = {"slowdown": None if np.isnan(of_worker) else of_worker, "alone": self.alone_slowdown(worker)}
        why = {"why": self.job.why[one.rank]} if one.rank in self.job.why else {}
        return {"rank": one.rank, **places, **slowdowns, **why}

    def _step_row(self, step: int) -> dict[str, Any]:
        known = np.nan_to_num(self.alone[:, step])
        worst = int(np.argmax(known))
        return {
            "step": self.job.steps[step],
            "recorded_ms": float(self.job.recorded_ms[step]),
            "simulated_ms": float(self.job.replayed_ms[step]),
            "without_delays_ms": float(self.base_ms[step]),
            "ideal_ms": float(self.ideal_ms[step]),
            "slowdown": float(self.base_ms[step] / self.ideal_ms[step]) if self.ideal_ms[step] else None,
            "worst_rank": self.job.workers[worst].rank,
            "worst_slowdown": float(known[worst]),
        }


def slowdown(job: SlowdownJob, progress: Reporter | None = None) -> Slowdown:
    """Simulate the ideal job, the job as it ran, and those in between."""
    scenarios = _Scenarios(job, progress)
    stage, replica = job.places("stage"), job.places("dp_rank")
    types = sorted({job.types[kind] for kind in np.unique(job.kind).tolist() if kind >= 0})
    stages, replicas = (np.unique(place[place >= 0]).tolist() for place in (stage, replica))
    scenarios.total = 4 + len(types) + len(stages) + len(replicas) + min(len(job.workers), _MOST_EXACT)
    base, ideal = scenarios.run([job.took, job.ideal])

    def slowdowns(names: Sequence[Any], rows: Iterable[Bools]) -> dict[Any, float]:
        steps = scenarios.run(job.keeping(some) for some in rows)
        return {name: float(one.mean() / ideal.mean()) for name, one in zip(names, steps, strict=True)}

    by_type = slowdowns(types, (job.of_type(name) for name in types))
    by_stage = slowdowns(stages, (stage == number for number in stages))
    by_replica = slowdowns(replicas, (replica == number for number in replicas))
    if stages:
        of_worker = np.array([min(by_stage[w.stage], by_replica[w.dp_rank]) for w in job.workers])
        alone = _alone(scenarios, of_worker, ideal)
    else:
        alone = _alone(scenarios, np.bincount(job.worker, job.took, len(job.workers)).astype(float), ideal)
        of_worker = (alone * ideal).sum(axis=1) / ideal.sum()
    slowest = np.lexsort((np.array([w.rank for w in job.workers]), -of_worker))
    most = slowest[: ceil(_SLOWEST_SHARE * len(job.workers) - 1e-9)]
    fixed = [job.fixing(np.isin(job.worker, most))] + ([job.fixing(stage == stages[-1])] if len(stages) > 1 else [])
    shares = [_share(base, steps, ideal) for steps in scenarios.run(fixed)]
    return Slowdown(
        job, base, ideal, _descending(by_type), _descending(by_stage), _descending(by_replica), alone, of_worker,
        mw=shares[0] if len(job.workers) > 1 else None, ms=shares[1] if len(shares) > 1 else None, slowest=slowest,
    )  # fmt: skip


def _alone(scenarios: _Scenarios, score: Floats, ideal: Floats) -> Floats:
    """For each worker and step, the slowdown if only that worker takes what it took; of many, for the worst ones."""
    job = scenarios.job
    alone = np.full((len(job.workers), len(job.steps)), np.nan)
    exact = np.sort(np.argsort(-score, kind="stable")[:_MOST_EXACT])
    steps = scenarios.run(job.keeping(job.worker == worker) for worker in exact.tolist())
    alone[exact] = np.array(steps) / np.where(ideal > 0, ideal, 1.0)
    return alone


def _share(base: Floats, fixed: Floats, ideal: Floats) -> float | None:
    """Which share of the lost time a fix wins back; None where nothing is lost."""
    lost = float(base.mean() - ideal.mean())
    return float(base.mean() - fixed.mean()) / lost if lost > 1e-6 * float(base.mean()) else None


def _descending(values: dict[Any, float]) -> dict[Any, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


class _Scenarios:
    """Runs scenarios, a bounded number at once, and reports how many are done."""

    def __init__(self, job: SlowdownJob, progress: Reporter | None) -> None:
        self.job = job
        self.progress = progress
        self.done, self.total = 0, 0
        self.at_once = max(1, _MOST_FLOATS // (4 * max(len(job.kind), 1)))

    def run(self, scenarios: Iterable[Floats]) -> list[Floats]:
        steps: list[Floats] = []
        waiting = iter(scenarios)
        while batch := list(islice(waiting, self.at_once)):
            steps += list(self.job.step_ms(batch))
            self.done += len(batch)
            if self.progress is not None:
                self.progress(self.done, max(self.total, self.done), "simulating")
        return steps
