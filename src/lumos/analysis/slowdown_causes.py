"""Causes of a slowdown: each with the time that it costs, its evidence, and the gain from fixing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lumos.analysis.replay import Replay, replay
from lumos.analysis.slowdown import Slowdown, SlowdownJob, slowdown
from lumos.analysis.slowdown_jobs import job_of_table, rank_job, table_at
from lumos.arguments import checks_arguments
from lumos.data_files import read_table
from lumos.graph.graph import Bools, Floats, Ints
from lumos.read.operation_table import read_operation_table
from lumos.tables import frame
from lumos.trace.operations import OperationTable

if TYPE_CHECKING:
    from polars import DataFrame

_LIMITS = read_table("analysis.toml")["causes"]
_NOTABLE, _SLOWER, _PERSISTENT = (_LIMITS[name] for name in ("notable", "slower", "persistent"))
_EVIDENCE: dict[str, str] = _LIMITS["evidence"]
_MOST_WORKERS, _MOST_NAMED = 3, 5


@dataclass(frozen=True)
class SlowdownCause:
    """Why a job is slow."""

    kind: str  # slow worker, long stage, sequence lengths, uneven passes, transient, communication, host, …
    name: str
    gain_ms: float  # of the mean step, if it were fixed
    gain_pct: float  # of the recorded step
    evidence: str
    after: str = ""  # the cause that hides it, which has to be fixed first


@dataclass(frozen=True)
class Fix:
    """What the mean recorded step would be if one thing were fixed."""

    name: str
    step_ms: float
    gain_ms: float
    gain_pct: float


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """A slowdown, its causes and its fixes, those that gain most first."""

    slowdown: Slowdown
    causes: tuple[SlowdownCause, ...]
    fixes: tuple[Fix, ...]
    attainable_ms: float  # the mean step with everything ideal: at least as good as any single fix

    @property
    def lost_ms(self) -> float:
        """What the step loses to stragglers; no cause among them costs more."""
        return max(0.0, float(self.slowdown.base_ms.mean()) - self.attainable_ms)

    def __repr__(self) -> str:
        return f"Diagnosis({self.slowdown.job.name}: slowdown {self.slowdown.slowdown:.3f}, {len(self.causes)} causes)"

    def table(self) -> DataFrame:
        """One row per worker, the slowest first."""
        return frame(self.slowdown.as_dict()["by_worker"])

    def as_dict(self) -> dict[str, Any]:
        """The answer of `lumos stragglers --json`."""
        causes, fixes = ([asdict(one) for one in rows] for rows in (self.causes, self.fixes))
        return self.slowdown.as_dict() | {"attainable_ms": self.attainable_ms, "causes": causes, "fixes": fixes}


def diagnose(lost: Slowdown, layers: int = 0) -> Diagnosis:
    """The causes of a slowdown; with the layers of the model, how many of them to move between stages."""
    search = _CauseSearch(lost, layers)
    causes = [
        *search.of_passes(), *search.slow_ranks(), *search.transient(), *search.communication(), *search.host(),
        *search.delays(),
    ]  # fmt: skip
    whole = search.everything()
    fixes = [whole, *(fix for fix in search.fixes if fix.gain_pct >= _LIMITS["worth_a_line_pct"])]
    first = {"slow worker": _LIMITS["slow_worker_first"]}
    return Diagnosis(
        lost,
        tuple(sorted(causes, key=lambda one: -one.gain_ms * first.get(one.kind, 1))),
        tuple(sorted(fixes, key=lambda one: -one.gain_ms)),
        whole.step_ms,
    )


@checks_arguments
def stragglers(source: Path | str | OperationTable | Replay, layers: int = 0) -> Diagnosis:
    """Find stragglers, their causes, and the gain from fixing them.

    `source` is a folder of traces or a table of operations, or what was read of either; with the number of `layers` of
    the model, the result says how many of them to move between pipeline stages.

    >>> stragglers("traces/").as_dict()["slowdown"]       # doctest: +SKIP
    """
    name = ""
    if isinstance(source, Path | str):
        path = Path(source)
        name, table = path.name, table_at(path)
        source = replay(path) if table is None else read_operation_table(table)
    return diagnose(slowdown(job_of(source, name)), layers)


def job_of(source: OperationTable | Replay, name: str = "") -> SlowdownJob:
    """The job of a table of operations, or of traces with what the replay reports about each rank."""
    if isinstance(source, OperationTable):
        return job_of_table(source)
    job = rank_job(source.run)
    why = {one.rank: one.why for one in source.stragglers} if len(job.workers) > 1 else {}
    return replace(job, name=name or job.name, why=why)


class _Candidate(NamedTuple):
    """A cause that shows in passes, and the factor on every operation that would fix it."""

    kind: str
    name: str
    evidence: str
    fix: str
    factor: Floats


class _CauseSearch:
    """Looks for one cause after the other, and collects the gains from fixing them."""

    def __init__(self, lost: Slowdown, layers: int) -> None:
        job = lost.job
        self.lost, self.job, self.layers = lost, job, layers
        self.base, self.recorded = float(lost.base_ms.mean()), float(job.recorded_ms.mean())
        # What percentages are of. A trace that contradicts itself may be simulated as longer than it was recorded.
        self.whole = max(self.recorded, self.base)
        self.fixes: list[Fix] = []
        self.least = float(lost.ideal_ms.mean())  # of all steps simulated with something fixed
        self.repaired = job.took  # with all causes fixed that show in passes
        self.passes = job.of_type(*job.passes)
        shape = (len(job.workers), len(job.steps))
        cell = (job.worker * shape[1] + job.step)[self.passes]
        self.busy = np.bincount(cell, job.took[self.passes], shape[0] * shape[1]).reshape(shape)  # of passes, in ns
        self.stage = np.array([-1 if w.stage is None else w.stage for w in job.workers])
        self.stages = np.unique(self.stage[self.stage >= 0])

    def _gain(self, durations: Floats, name: str) -> float:
        """Milliseconds that a scenario is faster than the job as it ran; it is kept as a fix."""
        return self._fixed(name, self.base - float(self.job.step_ms([durations])[0].mean()))

    def _fixed(self, name: str, gain: float) -> float:
        """Keep a fix; launches stay as late as they were."""
        self.least = min(self.least, self.base - gain)
        self.fixes.append(self._fix(name, self.whole - gain, gain))
        return gain

    def _fix(self, name: str, step_ms: float, gain: float) -> Fix:
        return Fix(name, step_ms, gain, 100 * gain / self.whole)

    def _cause(self, kind: str, name: str, gain: float, evidence: str, after: str = "") -> Iterator[SlowdownCause]:
        if gain >= _NOTABLE * self.whole:
            yield SlowdownCause(kind, name, gain, 100 * gain / self.whole, evidence, after)

    def of_passes(self) -> Iterator[SlowdownCause]:
        """Causes that show in passes; what costs nothing yet may do so once the others are fixed."""
        candidates = [*self.slow_workers(), *self.long_stage(), *self.uneven_passes()] if self.passes.any() else []
        gains = [self._gain(self.job.took * one.factor, one.fix) for one in candidates]
        listed = [one for one, gain in zip(candidates, gains, strict=True) if gain >= _NOTABLE * self.whole]
        repaired = self.repaired = self.job.took * np.prod([one.factor for one in listed], axis=0)
        for one, gain in zip(candidates, gains, strict=True):
            if one in listed:
                yield from self._cause(one.kind, one.name, gain, one.evidence)
            elif listed:
                before, after = self.job.step_ms([repaired, repaired * one.factor]).mean(axis=1).tolist()
                yield from self._cause(one.kind, one.name, before - after, one.evidence, after=listed[0].kind)

    def slow_workers(self) -> Iterator[_Candidate]:
        """Workers that are slower than their peers in most steps."""
        job, ratio = self.job, self._against_peers()
        often = np.mean(ratio >= _SLOWER, axis=1) >= _PERSISTENT
        slow = [w for w in self.lost.slowest.tolist() if often[w] and np.median(ratio[w]) >= _SLOWER]
        if not slow:
            return
        factor = np.ones(len(job.took))
        for worker in slow:
            factor[(job.worker == worker) & self.passes] = 1 / float(ratio[worker].mean())
        named = [f"{job.workers[w].label} (rank {job.workers[w].rank})" for w in slow[:_MOST_WORKERS]]
        name = "; ".join(named) + (f" and {len(slow) - _MOST_WORKERS} more" if len(slow) > _MOST_WORKERS else "")
        slower = ratio[slow]
        evidence = _EVIDENCE["slow_worker"].format(
            ratio=slower.mean(), often=int(np.median((slower >= _SLOWER).sum(axis=1))), steps=slower.shape[1]
        )
        yield _Candidate("slow worker", name, evidence, f"{name} as fast as the other replicas", factor)

    def _against_peers(self) -> Floats:
        """Passes of each worker and step, over the median of the same stage in other replicas; nan without any."""
        ratio = np.full(self.busy.shape, np.nan)
        for worker, stage in enumerate(self.stage):
            peers = np.flatnonzero((self.stage == stage) & (np.arange(len(self.stage)) != worker))
            if len(peers):
                median = np.median(self.busy[peers], axis=0)
                ratio[worker] = self.busy[worker] / np.where(median > 0, median, np.nan)
        return ratio

    def slow_ranks(self) -> Iterator[SlowdownCause]:
        """Ranks of traces: those that slow the job down by themselves."""
        for worker in self.lost.slowest[:_MOST_WORKERS].tolist() if not self.job.passes else []:
            alone = self.lost.alone[worker]
            if np.isnan(alone).any() or np.mean(alone >= 1 + _NOTABLE) < _PERSISTENT:
                continue
            rank = self.job.workers[worker].rank
            gain = self._gain(self.job.like_others(worker), f"rank {rank} like the others")
            why = self.job.why.get(rank, "it takes longer than the others")
            yield from self._cause("slow worker", f"rank {rank}", gain, why)

    def long_stage(self) -> Iterator[_Candidate]:
        """A stage that takes longer than the others in every replica: layers, or the head and its loss."""
        if len(self.stages) < 2:
            return
        mean = self.busy.mean(axis=1)
        typical = self._typical_of_stages(mean)
        longest, count = int(np.argmax(typical)), len(self.stages)
        replicas = mean[self.stage == self.stages[longest]]
        others = float(np.median(np.delete(typical, longest)))
        if others <= 0 or typical[longest] < _SLOWER * others or not np.all(replicas >= _SLOWER * others):
            return
        excess = float(typical[longest] - typical.mean()) / others
        where = f"in all {len(replicas)} replicas" if len(replicas) > 1 else _EVIDENCE["only_replica"]
        if self.layers:
            layers = max(round(excess * self.layers / count), 1)
            moved = f"about {layers} of the {self.layers} layers ({excess:.2f} of a stage)"
        else:
            moved = f"{excess:.2f} of a stage's work (--layers N: in layers)"
        evidence = _EVIDENCE["long_stage"].format(ratio=typical[longest] / others, where=where, moved=moved)
        name = f"stage {self.stages[longest]}" + (" (the last)" if longest == count - 1 else "")
        yield _Candidate("long stage", name, evidence, "work divided evenly among the stages", self._balanced())

    def _typical_of_stages(self, value: Floats) -> Floats:
        """For each stage, the lower median of its workers: of two replicas the faster one, as disorder is slower."""
        sorted_values = [np.sort(value[self.stage == stage]) for stage in self.stages]
        return np.array([float(values[(len(values) - 1) // 2]) for values in sorted_values])

    def _balanced(self) -> Floats:
        """Factors on passes, by which every stage takes the mean of all."""
        job, factor, workers = self.job, np.ones(len(self.job.took)), len(self.job.workers)
        place = self.stage[job.worker]
        for name in job.passes:
            kind = job.of_type(name)
            count = np.maximum(np.bincount(job.worker[kind], minlength=workers), 1)
            typical = self._typical_of_stages(np.bincount(job.worker[kind], job.took[kind], workers) / count)
            for stage, own in zip(self.stages, typical, strict=True):
                if own > 0:
                    factor[kind & (place == stage)] = typical.mean() / own
        return factor

    def uneven_passes(self) -> Iterator[_Candidate]:
        """Passes of one worker that differ: by the lengths of their sequences if forward and backward agree."""
        correlated = self._correlation()
        if correlated is None:
            return
        correlation, spread = correlated
        by_length = correlation >= _LIMITS["correlated"]
        kind = "sequence lengths" if by_length else "uneven passes"
        advice = "pack or sort sequences so that they cost alike" if by_length else "not their lengths"
        evidence = _EVIDENCE["uneven_passes"].format(pct=100 * spread, correlation=correlation, advice=advice)
        yield _Candidate(kind, kind, evidence, "micro-batches of equal work", self._even())

    def _even(self) -> Floats:
        """Factors that make passes of a step, stage and type alike, but for what is typical of their worker."""
        job, factor = self.job, np.ones(len(self.job.took))
        rows = np.flatnonzero(self.passes & (job.took > 0))
        took, kind, worker = job.took[rows], self._kind_and_chunk[rows], job.worker[rows]
        place = kind * (int(self.stage.max()) + 2) + self.stage[worker] + 1
        typical = _group_mean(kind * len(job.workers) + worker, took) / _group_mean(place, took)
        factor[rows] = typical * _group_mean(place * len(job.steps) + job.step[rows], took / typical) / took
        return factor

    @cached_property
    def _kind_and_chunk(self) -> Ints:
        """A number for each type and virtual stage of passes."""
        chunk = np.zeros_like(self.job.kind) if self.job.chunk is None else self.job.chunk
        return np.asarray(self.job.kind * (int(chunk.max()) + 1) + chunk)

    def _correlation(self) -> tuple[float, float] | None:
        """Of forward with backward passes of one worker in a step, and how much they vary: medians over workers.

        None where most workers do not vary: lengths of sequences differ for all of them.
        """
        job = self.job
        if job.backward_of is None or not (job.backward_of >= 0).any():
            return None
        forward = np.flatnonzero(job.backward_of >= 0)
        worker = job.worker[forward]
        cell = (self._kind_and_chunk[forward] * len(job.workers) + worker) * len(job.steps) + job.step[forward]
        both = (job.took[forward], job.took[job.backward_of[forward]])
        x, y = (took / np.maximum(_group_mean(cell, took), 1e-9) for took in both)
        by_worker: list[tuple[float, float]] = []
        for mine in (worker == number for number in range(len(job.workers))):
            if mine.sum() >= _LIMITS["fewest_pairs"] and min(x[mine].std(), y[mine].std()) >= _LIMITS["varies"]:
                by_worker.append((float(np.corrcoef(x[mine], y[mine])[0, 1]), float(x[mine].std())))
        if 2 * len(by_worker) < len(job.workers):
            return None
        return float(np.median([c for c, _ in by_worker])), float(np.median([s for _, s in by_worker]))

    def transient(self) -> Iterator[SlowdownCause]:
        """Few steps that take longer than the others."""
        base, median = self.lost.base_ms, float(np.median(self.lost.base_ms))
        slow = base >= _SLOWER * median
        if not slow.any() or 2 * slow.sum() >= len(slow):
            return
        named = ", ".join(self.job.steps[i] for i in np.flatnonzero(slow)[:_MOST_NAMED])
        evidence = _EVIDENCE["transient"].format(
            slow=int(slow.sum()), steps=len(base), named=named + (" …" if slow.sum() > _MOST_NAMED else ""),
            ratio=base[slow].mean() / median, worst=self._worst_of(slow),
        )  # fmt: skip
        gain = self._fixed("no slow steps", float((base[slow] - median).sum() / len(base)))
        yield from self._cause("transient", "some steps", gain, evidence)

    def _worst_of(self, steps: Bools) -> str:
        """The worker that costs some steps most, if it costs them far more than the median worker does."""
        cost = self.lost.alone[:, steps].mean(axis=1) - 1
        if np.isnan(cost).all() or len(cost) < 2:
            return ""
        worst = int(np.nanargmax(cost))
        if cost[worst] < _LIMITS["stands_out"] * float(np.nanmedian(cost)):
            return "; no worker stands out there"
        return f"; there {self.job.workers[worst].label} costs most"

    def communication(self) -> Iterator[SlowdownCause]:
        """Transfers that take longer than the median one."""
        slow = {name: value for name, value in self.lost.by_type.items() if name in self.job.communication}
        if slow:
            gain = self._gain(self.job.fixing(self.job.of_type(*slow)), "all transfers as fast as the median one")
            worst = max(slow, key=lambda name: slow[name])
            evidence = _EVIDENCE["communication"].format(worst=worst, slowdown=slow[worst])
            yield from self._cause("communication", "communication", gain, evidence)

    def host(self) -> Iterator[SlowdownCause]:
        """Work of hosts, of traces; garbage collection, of tables."""
        for kind, name in (("host", "host"), ("garbage collection", "gc")):
            rows = self.job.of_type(name)
            if name in self.lost.by_type and (self.job.took[rows] > 0).any():
                gain = self._gain(self.job.fixing(rows), f"{kind} alike everywhere")
                yield from self._cause(kind, kind, gain, _EVIDENCE["host"].format(slowdown=self.lost.by_type[name]))

    def delays(self) -> Iterator[SlowdownCause]:
        """Time in which an operation could have begun and did not."""
        late = self.job.delays_ms
        if late:
            gain, worst = self.recorded - self.base, max(late, key=lambda name: late[name])
            self.fixes.append(self._fix("no delays of launches", self.base, gain))
            evidence = _EVIDENCE["launch_delays"].format(worst=worst, ms=late[worst])
            yield from self._cause("launch delays", "launch delays", gain, evidence)

    def everything(self) -> Fix:
        """All at once: at least as good as any single fix.

        The published ideal takes the mean of each type, which a slow worker lengthens for all others; the mean without
        what slow workers and stages take too long is therefore tried as well.
        """
        job, ideal = self.job, self.job.ideal.copy()
        for name in job.passes:
            rows = job.of_type(name)
            ideal[rows] = self.repaired[rows].mean() if rows.any() else 0.0
        delays = self.recorded - self.base if job.delays_ms else 0.0
        best = min(self.least, float(job.step_ms([ideal])[0].mean())) if job.passes else self.least
        return self._fix("everything ideal", best, self.base - best + delays)


def _group_mean(group: Ints, value: Floats) -> Floats:
    """For every value, the mean of its group."""
    _, number = np.unique(group, return_inverse=True)
    return np.asarray((np.bincount(number, value) / np.bincount(number))[number])
