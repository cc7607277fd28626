"""Causes of a slowdown, told apart: each with the time that it costs, its evidence, and what mending it would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lumos.analysis.replay import Replay, replay
from lumos.analysis.slowdown import Job, Slowdown, slowdown
from lumos.analysis.slowdown_jobs import job_of_table, rank_job, table_at
from lumos.arguments import checks_arguments
from lumos.graph.graph import Bools, Floats, Ints
from lumos.read.operation_table import read_operation_table
from lumos.tables import frame
from lumos.trace.operations import OperationTable

if TYPE_CHECKING:
    from polars import DataFrame

_NOTABLE = 0.01  # of the step: less is no cause
_WHO_FIRST = 1.25  # a slow worker is named before the kind of its work that is slow
_WORTH_A_LINE = 0.05  # per cent that a fix gains
_SLOWER = 1.05  # times its peers: less is noise
_PERSISTENT = 0.75  # of the steps
_CORRELATED = 0.9  # the paper's criterion for sequence lengths
_FEWEST_PAIRS = 8
_VARIES = 0.01  # standard deviation of passes from which on they differ
_STANDS_OUT = 2.0  # times the median worker's cost of a step
_MOST_WORKERS = 3
_MOST_NAMED = 5


@dataclass(frozen=True)
class Cause:
    """Why a job is slow. `kind` is one of slow worker, long stage, sequence lengths, uneven passes, transient,
    communication, host, launch delays and garbage collection."""

    kind: str
    name: str
    gain_ms: float  # of the mean step, if it were mended
    gain_pct: float  # of the recorded step
    evidence: str
    after: str = ""  # the cause that hides it, which has to be mended first


@dataclass(frozen=True)
class Fix:
    """What the mean recorded step would be if something were mended."""

    name: str
    step_ms: float
    gain_ms: float
    gain_pct: float


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """A slowdown, its causes and its fixes, those that gain most first."""

    slowdown: Slowdown
    causes: tuple[Cause, ...]
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
        found = {"causes": [asdict(one) for one in self.causes], "fixes": [asdict(one) for one in self.fixes]}
        return self.slowdown.as_dict() | {"attainable_ms": self.attainable_ms} | found


def diagnose(found: Slowdown, layers: int = 0) -> Diagnosis:
    """The causes of a slowdown; with the layers of the model, how many of them to move between stages."""
    look = _Look(found, layers)
    causes = [
        *look.of_passes(), *look.slow_ranks(), *look.transient(), *look.communication(), *look.host(), *look.delays()
    ]  # fmt: skip
    whole = look.everything()
    fixes = [whole, *(fix for fix in look.fixes if fix.gain_pct >= _WORTH_A_LINE)]
    return Diagnosis(
        found,
        tuple(sorted(causes, key=lambda one: -one.gain_ms * (_WHO_FIRST if one.kind == "slow worker" else 1))),
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


def job_of(source: OperationTable | Replay, name: str = "") -> Job:
    """The job of a table of operations or of a replayed trace."""
    if isinstance(source, OperationTable):
        return job_of_table(source)
    job = job_of_run(source)
    return replace(job, name=name or job.name)


def job_of_run(run: Replay) -> Job:
    """The job of traces of several ranks, and what the replay says of each rank."""
    several = len(run.marks.ranks) > 1
    return replace(rank_job(run.run), why={one.rank: one.why for one in run.stragglers} if several else {})


class _Candidate(NamedTuple):
    """A cause that shows in passes: what it is, and the factor on every operation that would mend it."""

    kind: str
    name: str
    evidence: str
    fix: str
    factor: Floats


class _Look:
    """Looks for one cause after the other, and collects what mending them would give."""

    def __init__(self, found: Slowdown, layers: int) -> None:
        self.found, self.job, self.layers = found, found.job, layers
        self.base = float(found.base_ms.mean())
        # What percentages are of. A trace that contradicts itself may be simulated as longer than it was recorded.
        self.whole = max(float(found.job.recorded_ms.mean()), self.base)
        self.fixes: list[Fix] = []
        self.least = float(found.ideal_ms.mean())  # of all steps simulated with something mended
        self.mended = self.job.took  # with all causes fixed that show in passes
        self.passes = self.job.of_type(*self.job.passes)
        shape = (len(self.job.workers), len(self.job.steps))
        flat = self.job.worker * shape[1] + self.job.step
        total = np.bincount(flat[self.passes], self.job.took[self.passes], shape[0] * shape[1])
        self.busy = total.reshape(shape)  # nanoseconds of passes, by worker and step
        self.stage = np.array([-1 if w.stage is None else w.stage for w in self.job.workers])

    def _gain(self, durations: Floats, name: str) -> float:
        """Milliseconds that a scenario is faster than the job as it ran; it is kept as a fix."""
        step_ms = float(self.job.step_ms([durations])[0].mean())
        return self._fixed(name, self.base - step_ms)

    def _fixed(self, name: str, gain: float) -> float:
        """Keep a fix; launches stay as late as they were."""
        self.least = min(self.least, self.base - gain)
        self.fixes.append(Fix(name, self.whole - gain, gain, 100 * gain / self.whole))
        return gain

    def _cause(self, kind: str, name: str, gain_ms: float, evidence: str, after: str = "") -> Iterator[Cause]:
        if gain_ms >= _NOTABLE * self.whole:
            yield Cause(kind, name, gain_ms, 100 * gain_ms / self.whole, evidence, after)

    def of_passes(self) -> Iterator[Cause]:
        """Causes that show in passes; what costs nothing yet may do so once the others are mended."""
        found = [*self.slow_workers(), *self.long_stage(), *self.uneven_passes()] if self.passes.any() else []
        gains = [self._gain(self.job.took * one.factor, one.fix) for one in found]
        listed = [one for one, gain in zip(found, gains, strict=True) if gain >= _NOTABLE * self.whole]
        mended = self.mended = self.job.took * np.prod([one.factor for one in listed], axis=0)
        for one, gain in zip(found, gains, strict=True):
            if one in listed:
                yield from self._cause(one.kind, one.name, gain, one.evidence)
            elif listed:
                before, after = self.job.step_ms([mended, mended * one.factor]).mean(axis=1).tolist()
                yield from self._cause(one.kind, one.name, before - after, one.evidence, after=listed[0].kind)

    def slow_workers(self) -> Iterator[_Candidate]:
        """Workers that are slower than their peers in most steps."""
        ratio = self._against_peers()
        often = np.mean(ratio >= _SLOWER, axis=1) >= _PERSISTENT
        slow = [w for w in self.found.slowest.tolist() if often[w] and np.median(ratio[w]) >= _SLOWER]
        if not slow:
            return
        factor = np.ones(len(self.job.took))
        for worker in slow:
            factor[(self.job.worker == worker) & self.passes] = 1 / float(ratio[worker].mean())
        named = [f"{self.job.workers[w].label} (rank {self.job.workers[w].rank})" for w in slow[:_MOST_WORKERS]]
        more = f" and {len(slow) - _MOST_WORKERS} more" if len(slow) > _MOST_WORKERS else ""
        name, slower = "; ".join(named) + more, ratio[slow]
        evidence = (
            f"passes take {slower.mean():.2f} times as long as those of the same stage elsewhere, in "
            f"{int(np.median((slower >= _SLOWER).sum(axis=1)))} of {slower.shape[1]} steps: look at the machine"
        )
        yield _Candidate("slow worker", name, evidence, f"{name} as fast as the other replicas", factor)

    def _against_peers(self) -> Floats:
        """Passes of each worker and step, over the median of the same stage in other replicas; nan without any."""
        ratio = np.full(self.busy.shape, np.nan)
        for worker, stage in enumerate(self.stage):
            peers = np.flatnonzero((self.stage == stage) & (np.arange(len(self.stage)) != worker))
            if len(peers):
                usual = np.median(self.busy[peers], axis=0)
                ratio[worker] = self.busy[worker] / np.where(usual > 0, usual, np.nan)
        return ratio

    def slow_ranks(self) -> Iterator[Cause]:
        """Ranks of traces: those that slow the job down by themselves."""
        for worker in self.found.slowest[:_MOST_WORKERS].tolist() if not self.job.passes else []:
            alone = self.found.alone[worker]
            if np.isnan(alone).any() or np.mean(alone >= 1 + _NOTABLE) < _PERSISTENT:
                continue
            rank = self.job.workers[worker].rank
            gain = self._gain(self.job.like_others(worker), f"rank {rank} like the others")
            why = self.job.why.get(rank, "it takes longer than the others")
            yield from self._cause("slow worker", f"rank {rank}", gain, why)

    def long_stage(self) -> Iterator[_Candidate]:
        """A stage that takes longer than the others in every replica: layers, or the head and its loss."""
        stages = np.unique(self.stage[self.stage >= 0])
        if len(stages) < 2:
            return
        mean = self.busy.mean(axis=1)
        usual = np.array([_typical(mean[self.stage == stage]) for stage in stages])
        longest = int(np.argmax(usual))
        others = float(np.median(np.delete(usual, longest)))
        everywhere = bool(np.all(mean[self.stage == stages[longest]] >= _SLOWER * others))
        if others <= 0 or usual[longest] < _SLOWER * others or not everywhere:
            return
        name = f"stage {stages[longest]}" + (" (the last)" if longest == len(stages) - 1 else "")
        excess = float(usual[longest] - usual.mean()) / others
        replicas = int((self.stage == stages[longest]).sum())
        where = f"in all {replicas} replicas" if replicas > 1 else "in the only replica, so that it may be its machine"
        evidence = (
            f"its passes take {usual[longest] / others:.2f} times as long as those of other stages, {where}: move "
            f"{self._move(excess, len(stages))} away"
        )
        yield _Candidate("long stage", name, evidence, "work divided evenly among the stages", self._balanced(stages))

    def _move(self, excess: float, stages: int) -> str:
        """How much of a stage has to go elsewhere, in layers if their number is known."""
        if self.layers:
            count = max(round(excess * self.layers / stages), 1)
            return f"about {count} of the {self.layers} layers ({excess:.2f} of a stage)"
        return f"{excess:.2f} of a stage's work (--layers N: in layers)"

    def _balanced(self, stages: Ints) -> Floats:
        """Factors on passes, by which every stage takes the mean of all."""
        job, factor = self.job, np.ones(len(self.job.took))
        place = self.stage[job.worker]
        for name in job.passes:
            kind = job.of_type(name)
            mean = _worker_mean(job.worker[kind], job.took[kind], len(job.workers))
            usual = np.array([_typical(mean[self.stage == stage]) for stage in stages])
            for stage, own in zip(stages, usual, strict=True):
                if own > 0:
                    factor[kind & (place == stage)] = usual.mean() / own
        return factor

    def uneven_passes(self) -> Iterator[_Candidate]:
        """Passes of one worker that differ: by the lengths of their sequences if forward and backward agree."""
        found = self._correlation()
        if found is None:
            return
        correlation, spread = found
        kind = "sequence lengths" if correlation >= _CORRELATED else "uneven passes"
        advice = "pack or sort sequences so that they cost alike" if kind == "sequence lengths" else "not their lengths"
        evidence = (
            f"passes of one worker vary by {100 * spread:.0f} % in a step, and forward and backward passes of a "
            f"micro-batch have a correlation of {correlation:.2f}: {advice}"
        )
        yield _Candidate(kind, kind, evidence, "micro-batches of equal work", self._even())

    def _even(self) -> Floats:
        """Factors that make passes of a step, stage and type alike, but for what is usual for their worker."""
        job, factor = self.job, np.ones(len(self.job.took))
        rows = np.flatnonzero(self.passes & (job.took > 0))
        took, kind, worker = job.took[rows], self._kind_and_chunk[rows], job.worker[rows]
        place = kind * (int(self.stage.max()) + 2) + self.stage[worker] + 1
        usual = _group_mean(kind * len(job.workers) + worker, took) / _group_mean(place, took)
        factor[rows] = usual * _group_mean(place * len(job.steps) + job.step[rows], took / usual) / took
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
        forward = np.flatnonzero(job.backward_of >= 0) if job.backward_of is not None else np.zeros(0, np.int64)
        if job.backward_of is None or not len(forward):
            return None
        cell = (self._kind_and_chunk[forward] * len(job.workers) + job.worker[forward]) * len(job.steps) + job.step[
            forward
        ]
        x, y = (
            took / np.maximum(_group_mean(cell, took), 1e-9)
            for took in (job.took[forward], job.took[job.backward_of[forward]])
        )
        found: list[tuple[float, float]] = []
        for worker in range(len(job.workers)):
            mine = job.worker[forward] == worker
            if mine.sum() >= _FEWEST_PAIRS and min(x[mine].std(), y[mine].std()) >= _VARIES:
                found.append((float(np.corrcoef(x[mine], y[mine])[0, 1]), float(x[mine].std())))
        if 2 * len(found) < len(job.workers):
            return None
        return float(np.median([c for c, _ in found])), float(np.median([s for _, s in found]))

    def transient(self) -> Iterator[Cause]:
        """Few steps that take longer than the others."""
        base, usual = self.found.base_ms, float(np.median(self.found.base_ms))
        slow = base >= _SLOWER * usual
        if not slow.any() or 2 * slow.sum() >= len(slow):
            return
        gain = float((base[slow] - usual).sum() / len(base))
        named = [self.job.steps[i] for i in np.flatnonzero(slow)[:_MOST_NAMED]]
        more = " …" if slow.sum() > _MOST_NAMED else ""
        evidence = (
            f"{int(slow.sum())} of {len(base)} steps ({', '.join(named)}{more}) take "
            f"{base[slow].mean() / usual:.2f} times as long as the median one{self._worst_of(slow)}"
        )
        self._fixed("no slow steps", gain)
        yield from self._cause("transient", "some steps", gain, evidence)

    def _worst_of(self, steps: Bools) -> str:
        """The worker that costs some steps most, if it costs them more than twice what the median worker does."""
        cost = self.found.alone[:, steps].mean(axis=1) - 1
        if np.isnan(cost).all() or len(cost) < 2:
            return ""
        worst = int(np.nanargmax(cost))
        if cost[worst] < _STANDS_OUT * float(np.nanmedian(cost)):
            return "; no worker stands out there"
        return f"; there {self.job.workers[worst].label} costs most"

    def communication(self) -> Iterator[Cause]:
        """Transfers that take longer than usual."""
        slow = {name: value for name, value in self.found.by_type.items() if name in self.job.communication}
        if slow:
            gain = self._gain(self.job.fixing(self.job.of_type(*slow)), "all transfers as fast as the median one")
            worst = max(slow, key=lambda name: slow[name])
            evidence = f"transfers, not counting the waiting for others; {worst} alone: {slow[worst]:.3f}"
            yield from self._cause("communication", "communication", gain, evidence)

    def host(self) -> Iterator[Cause]:
        """Work of hosts, of traces; garbage collection, of tables."""
        for kind, name in (("host", "host"), ("garbage collection", "gc")):
            if name in self.found.by_type and (self.job.took[self.job.of_type(name)] > 0).any():
                gain = self._gain(self.job.fixing(self.job.of_type(name)), f"{kind} alike everywhere")
                yield from self._cause(
                    kind, kind, gain, f"with it alone, the slowdown is {self.found.by_type[name]:.3f}"
                )

    def delays(self) -> Iterator[Cause]:
        """Time in which an operation could have begun and did not."""
        gain = float(self.job.recorded_ms.mean()) - self.base
        if self.job.delays_ms:
            self.fixes.append(Fix("no delays of launches", self.base, gain, 100 * gain / self.whole))
            worst = max(self.job.delays_ms, key=lambda name: self.job.delays_ms[name])
            evidence = (
                "operations begin later than they could, as where a host is slow or loads data; those before "
                f"{worst} alone cost {self.job.delays_ms[worst]:.1f} ms"
            )
            yield from self._cause("launch delays", "launch delays", gain, evidence)

    def everything(self) -> Fix:
        """All at once: at least as good as any single fix.

        The published ideal takes the mean of each type, which a slow worker lengthens for all others; the mean without
        what slow workers and stages take too long is therefore tried as well.
        """
        job, ideal = self.job, self.job.ideal.copy()
        for name in job.passes:
            rows = job.of_type(name)
            ideal[rows] = self.mended[rows].mean() if rows.any() else 0.0
        delays = float(job.recorded_ms.mean()) - self.base if job.delays_ms else 0.0
        best = min(self.least, float(job.step_ms([ideal])[0].mean())) if job.passes else self.least
        gain = self.base - best + delays
        return Fix("everything ideal", best, gain, 100 * gain / self.whole)


def _typical(values: Floats) -> float:
    """The lower median: of two replicas the faster one, as what is out of order is slower."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def _worker_mean(worker: Ints, value: Floats, workers: int) -> Floats:
    """The mean by worker; 0 for who has none."""
    return np.asarray(np.bincount(worker, value, workers) / np.maximum(np.bincount(worker, minlength=workers), 1))


def _group_mean(group: Ints, value: Floats) -> Floats:
    """For every value, the mean of its group."""
    _, number = np.unique(group, return_inverse=True)
    return np.asarray((np.bincount(number, value) / np.bincount(number))[number])
