"""Drawn steps of a job of which there is an operation table: passes are taken apart into what makes them differ, and
put together again from other draws.

The logarithm of a pass is the sum of its usual time (by type, stage and virtual stage), of its worker's factor, of its
step's, of both together, of its micro-batch (shared by the stages of a replica: lengths of sequences), and of a rest.
Workers that were not seen are drawn from the others; those that were keep what was learned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lumos.graph.graph import Bools, Floats, Ints, simulate_many
from lumos.graph.operation_graph import OperationGraph, meetings_of, operation_graph
from lumos.risk.drawn_steps import DRAWS
from lumos.risk.monte_carlo import StepRisk
from lumos.risk.variability import NONE, Pauses, Spread, Variability
from lumos.trace.operations import COMPUTE, MESSAGES, REPLICA_COLLECTIVES, OperationTable, numbered

_FAR = 5.0  # robust standard deviations from which on a worker is an exception, not one of the others
_LEAST_FAR = 0.03
_PAUSE_S = 0.001
_TRANSFER = 0.1  # quantile of the times of a collective that is without waiting
_FASTEST = 4  # one in so many
_LEAST_SHARE = 0.05
_BATCH = 4_000_000  # nodes times scenarios that are simulated together
_STEPS_TO_TRUST = 10.0  # recorded steps that count as much as the drawn ones
_WRONG_LEVEL = 0.1  # logarithm
_FIRST_DRAWS = 1000  # that tell the level
_MOST = 25_000_000  # nodes times scenarios in all
_NS = 1e9


@dataclass(frozen=True)
class PassFactors:
    """Logarithms of what the passes of a table differ by; not a number where nothing was seen."""

    usual: Floats  # of every row that is a pass, seen or not
    worker: Floats  # of every worker
    is_exception: Bools  # workers that are far slower or faster than the others: they count for themselves alone
    step: Floats  # of every step
    worker_step: Floats  # (workers, steps)
    micro_batch: Floats  # of every micro-batch of every replica and step that was seen
    rest: Floats  # of every pass that was seen
    own_rest: dict[int, Floats]  # of an exception: of its passes, micro-batches included
    error: float  # the standard error of `worker`


@dataclass(frozen=True)
class _Meetings:
    """Messages, collectives, what is done alone. Who comes last does not wait: the shortest time is the transfer."""

    number: Ints  # of every row: its meeting
    seconds: Floats  # of every meeting: the shortest time that was seen; infinite where none was
    missing: Bools  # meetings of which not all rows were seen: the last to come may be missing

    def times(self, rows: Ints) -> tuple[Floats, bool]:
        """Of the meetings of some rows; and whether they are transfers, as all who met were seen."""
        some = np.unique(self.number[rows])
        some = some[np.isfinite(self.seconds[some])]
        return self.seconds[some], not self.missing[some].any()


@dataclass(frozen=True)
class OperationSteps:
    """The steps of a table, learned from the rows that are `seen`."""

    table: OperationTable
    seen: Bools

    @cached_property
    def passes(self) -> Ints:
        """Rows of forward and backward passes."""
        return np.flatnonzero(self.table.of_type(*COMPUTE) & (self.table.duration > 0))

    @cached_property
    def factors(self) -> PassFactors:
        table, rows = self.table, self.passes
        seen = self.seen[rows]
        left = np.where(seen, np.log(table.duration[rows]), np.nan)
        kind = numbered(table.kind[rows], table.stage[rows], table.chunk[rows])
        worker, step = table.worker[rows], table.step_index[rows]
        usual = _usual(kind, worker, left)[kind]
        left = left - usual
        of_worker = _medians_of(worker, left, len(table.workers))
        left = left - of_worker[worker]
        error = _error(worker, numbered(step, table.micro_batch[rows]), left)
        exception = _far(of_worker, error)
        others = np.where(exception[worker], np.nan, left)
        of_step = _means_of(step, others, len(table.steps))
        left = left - of_step[step]
        both = worker * len(table.steps) + step
        of_both = _means_of(both, left, len(table.workers) * len(table.steps))
        left = left - of_both[both]
        others = np.where(exception[worker], np.nan, left)
        batch = numbered(step, table.dp_rank[rows], table.micro_batch[rows])
        of_batch = _means_of(batch, others, int(batch.max(initial=-1)) + 1)
        own = {int(one): left[(worker == one) & seen] for one in np.flatnonzero(exception)}
        return PassFactors(
            usual, of_worker, exception, of_step, of_both.reshape(len(table.workers), -1),
            of_batch[~np.isnan(of_batch)], others - of_batch[batch], own, error,
        )  # fmt: skip

    @cached_property
    def variability(self) -> Variability:
        """What was learned, for other runs; a worker that is an exception is left out."""
        found = self.factors
        others = found.worker[~found.is_exception & ~np.isnan(found.worker)]
        steps, (of_worker, of_job) = found.worker_step[~found.is_exception], self._own_shares
        real = _left(float(np.var(others)), found.error**2)
        return Variability(
            gpu=_spread(others).scaled(real), step=_spread(steps.ravel()).scaled(of_worker), kernel=_spread(found.rest),
            microbatch=_spread(found.micro_batch), collective=self._collective,
            job=_spread(found.step).scaled(of_job),
            pauses=self._pauses, source=self.source("left out (name {it} with --slow)"),
        )  # fmt: skip

    def source(self, exceptions: str) -> str:
        """Where it comes from, and what becomes of workers that are exceptions."""
        found = self.factors
        known, steps = ~np.isnan(found.worker), int((~np.isnan(found.step)).sum())
        left_out = int((found.is_exception & known).sum())
        text = f"learned from {self.table.name}: {int(known.sum()) - left_out} workers, {steps} step{'s' * (steps > 1)}"
        if not left_out:
            return text
        furthest = float(max(found.worker[known], key=abs))
        who = "one worker that is" if left_out == 1 else f"{left_out} workers that are up to"
        far = f"{np.exp(abs(furthest)):.2f} times {'slower' if furthest > 0 else 'faster'}"
        words = {"it": "it", "its": "its"} if left_out == 1 else {"it": "them", "its": "their"}
        return f"{text}; {who} {far} {exceptions.format(**words)}"

    @cached_property
    def _own_shares(self) -> tuple[float, float]:
        """Of the differences between steps of a worker, and of the job: what is not the mean of its passes'."""
        found, table = self.factors, self.table
        work, rest = float(np.var(found.micro_batch)), float(np.nanvar(found.rest))
        passes = len(self.passes) / len(table.steps)
        batches = len(found.micro_batch) / max(1, int((~np.isnan(found.step)).sum()))
        mine = float(np.nanvar(found.worker_step[~found.is_exception]))
        own = max(1, round(batches / table.dp) - 1)  # of a replica; their mean is taken out of them
        of_worker = work / own + rest * len(table.workers) / max(passes, 1.0)
        of_job = work / max(batches, 1.0) + rest / max(passes, 1.0)
        return _left(mine, of_worker), _left(float(np.nanvar(found.step)), of_job)

    # ------------------------------------------------------------------ other operations
    @cached_property
    def _meetings(self) -> _Meetings:
        """What workers meet in; what one does alone is a meeting of one."""
        table = self.table
        number = meetings_of(table)
        alone = number < 0
        number[alone] = int(number.max(initial=-1)) + 1 + np.arange(int(alone.sum()))
        size = int(number.max(initial=-1)) + 1
        seconds, missing = np.full(size, np.inf), np.zeros(size, bool)
        np.minimum.at(seconds, number[self.seen], table.duration[self.seen])
        missing[number[~self.seen]] = True
        return _Meetings(number, seconds, missing)

    def _alike(self, name: str) -> list[Ints]:
        """Rows of one type that take as long but for waiting and chance: of one stage and place in the step.

        Where workers were not seen, those of all stages: everyone who was seen in a stage may have waited.
        """
        table = self.table
        rows = np.flatnonzero(table.of_type(name))
        _, known = self._meetings.times(rows)
        place = numbered(table.stage[rows], table.sequence[rows]) if known else np.zeros(len(rows), np.int64)
        return [rows[place == one] for one in range(int(place.max(initial=-1)) + 1)]

    @cached_property
    def _others(self) -> Floats:
        """Of every row that is no pass: its usual time without waiting, in seconds."""
        table = self.table
        usual = np.zeros(len(table))
        groups = [rows for name in table.types if name not in (*MESSAGES, *COMPUTE) for rows in self._alike(name)]
        for rows in (np.flatnonzero(table.of_type(*MESSAGES)), *groups):
            times, known = self._meetings.times(rows)
            usual[rows] = float(np.quantile(times, 0.5 if known else _TRANSFER)) if len(times) else 0.0
        return usual

    @property
    def _collective(self) -> Spread:
        """Of collectives of replicas; of the fastest quarter of them where some may have waited."""
        logs = []
        for rows in (rows for name in REPLICA_COLLECTIVES for rows in self._alike(name)):
            times, known = self._meetings.times(rows)
            times = np.sort(times[times > 0])
            if len(times) > 1:
                log = np.log(times if known else times[: len(times) // _FASTEST + 1])
                logs.append(log - log.mean())
        return _spread(np.concatenate(logs)) if logs else NONE

    @property
    def _pauses(self) -> Pauses:
        table = self.table
        gc = table.duration[table.of_type("gc") & self.seen]
        long = gc[gc > _PAUSE_S]
        if not len(long):
            return Pauses()
        return Pauses(len(long) / len(gc), 1e3 * float(np.median(long)), _spread(np.log(long)))

    # ------------------------------------------------------------------ steps
    @cached_property
    def recorded(self) -> Floats:
        """Lengths of the steps of which workers were seen, by their clocks, in seconds."""
        table = self.table
        end = np.zeros(len(table.steps))
        np.maximum.at(end, table.step_index[self.seen], table.end[self.seen])
        return end[np.unique(table.step_index[self.seen])]

    @cached_property
    def one_step(self) -> tuple[Ints, OperationGraph]:
        """The rows of one step, and their graph: all steps have the same."""
        first = self.table.step_index[np.argmax(self.seen)]
        rows = self.table.step_index == first
        return np.flatnonzero(rows), operation_graph(self.table.select(rows))

    def drawn_ms(self, variability: Variability, draws: int, seed: int, without: str = "") -> Floats:
        """Lengths of so many steps, at the level and with the spread of the recorded ones."""
        middle, stretch = self._level
        logs = np.log(self._simulated(variability.without(without) if without else variability, draws, seed))
        return np.asarray(1e3 * np.exp(_middle(np.log(self.recorded)) + stretch * (logs - middle)))

    @cached_property
    def _level(self) -> tuple[float, float]:
        """The middle of simulated steps, of logarithms, and what their distance from it is multiplied by.

        That makes the spread one between that of simulated and recorded steps. If the simulated ones miss the level by
        far, what decides the steps was not seen, and the recorded spread counts alone.
        """
        logs, seen = np.log(self._simulated(self.variability, _FIRST_DRAWS, 0)), np.log(self.recorded)
        middle, wide, narrow = _middle(logs), _sigma(logs), _sigma(seen)
        trust = _STEPS_TO_TRUST if abs(middle - _middle(seen)) < _WRONG_LEVEL else 0.0
        target = np.sqrt((trust * wide**2 + len(seen) * narrow**2) / (trust + len(seen)))
        return middle, float(target) / wide if wide > 0 else 1.0

    def _simulated(self, variability: Variability, draws: int, seed: int) -> Floats:
        """Lengths of drawn steps in seconds, by the graph of the job."""
        rows, graph = self.one_step
        batch = max(1, _BATCH // len(graph.graph))
        found = []
        for first in range(0, draws, batch):
            size = min(batch, draws - first)
            duration = np.zeros((size, len(graph.graph)))
            duration[:, graph.work] = _NS * self._durations(rows, size, (seed, first), variability)
            found.append(simulate_many(graph.graph, duration).max(axis=1) / _NS)
        return np.concatenate(found)

    def _durations(self, rows: Ints, size: int, seed: tuple[int, int], drawn: Variability) -> Floats:
        """(scenarios, rows of the step), in seconds.

        Every cause has random numbers of its own, those of one scenario after those of another: the first scenarios are
        the same, however many there are.
        """
        table, found = self.table, self.factors
        random = [np.random.default_rng([*seed, kind]) for kind in range(8)]
        duration = np.repeat(self._others[rows][None], size, axis=0)
        _, meeting = np.unique(self._meetings.number[rows], return_inverse=True)
        duration *= drawn.collective.at(random[0].random((size, meeting.max(initial=0) + 1)))[:, meeting]
        gc = np.flatnonzero(table.of_type("gc")[rows])
        hit = random[7].random((size, len(gc))) < drawn.pauses.probability
        duration[:, gc] += hit * drawn.pauses.ms / 1e3 * drawn.pauses.spread.at(random[6].random(hit.shape))
        place = np.full(len(table), -1)
        place[self.passes] = np.arange(len(self.passes))
        chosen = np.flatnonzero(place[rows] >= 0)
        passes = rows[chosen]
        worker = table.worker[passes]
        of_worker = np.repeat(np.where(np.isnan(found.worker), 0.0, found.worker)[None], size, axis=0)
        of_worker += np.isnan(found.worker) * np.log(drawn.gpu.at(random[1].random(of_worker.shape)))
        pairs = zip((drawn.step, drawn.job), self._own_shares, strict=True)
        step, job = (spread.scaled(1 / share) for spread, share in pairs)
        of_worker += np.log(step.at(random[2].random(of_worker.shape)))
        of_worker += np.log(job.at(random[3].random((size, 1))))
        batch = numbered(table.dp_rank[passes], table.micro_batch[passes])
        rest = np.log(drawn.microbatch.at(random[4].random((size, batch.max(initial=0) + 1))))[:, batch]
        rest += np.log(drawn.kernel.at(random[5].random(rest.shape)))
        for one, logs in found.own_rest.items():
            own = found.step + found.worker_step[one]
            if drawn.is_none:
                of_worker[:, one] += np.nanmedian(own)
                continue
            of_its_steps, of_its_passes = (np.random.default_rng([*seed, len(random), one, part]) for part in range(2))
            of_worker[:, one] = found.worker[one] + of_its_steps.choice(own[~np.isnan(own)], size)
            rest[:, worker == one] = of_its_passes.choice(logs, (size, int((worker == one).sum())))
        rest -= _means(worker, rest)[:, worker]  # what a worker's passes have in common is its step's already
        duration[:, chosen] = np.exp(found.usual[place[passes]] + of_worker[:, worker] + rest)
        return duration


def operation_risk(table: OperationTable, draws: int = DRAWS, seed: int = 0) -> StepRisk:
    """The risk of a step of the job that a table records."""
    steps = OperationSteps(table, np.ones(len(table), bool))
    typical = float(steps.drawn_ms(Variability(), 1, seed)[0])
    source = steps.source("drawn from {its} own steps")
    differs = replace(steps.variability, gpu=NONE, source=source)  # workers are who they are
    most = max(1, _MOST // max(len(steps.one_step[1].graph), 1))
    ranks = table.tp * len(table.workers)
    words = "of the recorded job, if nothing differed from step to step"
    return StepRisk(steps, typical, differs, min(draws, most), seed, (), ranks, typical_words=words)


def _middle(logs: Floats) -> float:
    """The mean of the middle eight tenths: less noisy than the median, and single steps do not move it.

    Of two values neither is in the middle: it is the mean of both.
    """
    low, high = np.quantile(logs, [0.1, 0.9])
    middle = logs[(logs >= low) & (logs <= high)]
    return float((middle if len(middle) else logs).mean())


def _sigma(logs: Floats) -> float:
    low, high = np.quantile(logs, [0.16, 0.84])
    return float(high - low) / 2


def _spread(logs: Floats) -> Spread:
    """Of logarithms, as observed; none of fewer than three."""
    logs = logs[~np.isnan(logs)]
    return Spread.of(np.exp(logs)) if len(logs) > 2 and float(logs.std()) > 0 else NONE


def _usual(kind: Ints, worker: Ints, logs: Floats) -> Floats:
    """Of every kind: the median of its workers' medians; of two in the middle the faster, as the other may be slow."""
    workers = int(worker.max(initial=0)) + 1
    medians = _medians_of(kind * workers + worker, logs, (int(kind.max(initial=0)) + 1) * workers)
    return np.asarray(np.nanquantile(medians.reshape(-1, workers), 0.5, axis=1, method="lower"))


def _left(variance: float, of_passes: float) -> float:
    """The share of a standard deviation that is left without part of its variance; never none, to scale back by."""
    return float(np.sqrt(max(_LEAST_SHARE**2, 1 - of_passes / variance))) if variance > 0 else 1.0


def _means(group: Ints, logs: Floats) -> Floats:
    """(scenarios, groups): logarithms of mean factors."""
    size = int(group.max(initial=0)) + 1
    member = np.equal.outer(group, np.arange(size)).astype(np.float64)
    return np.asarray(np.log(np.maximum(np.exp(logs) @ member, 1e-300) / np.maximum(member.sum(axis=0), 1)))


def _error(worker: Ints, batch: Ints, logs: Floats) -> float:
    """The standard error of the medians of workers, whose passes of one micro-batch are alike."""
    known = ~np.isnan(logs)
    pairs = len(np.unique(np.stack((worker[known], batch[known])), axis=1).T)
    batches = pairs / max(1, len(np.unique(worker[known])))
    return 1.2533 * _sigma(logs[known]) / float(np.sqrt(max(batches, 1.0)))


def _far(worker: Floats, error: float) -> Bools:
    """Workers farther from the others than they and what was seen of them differ by chance."""
    away = np.abs(worker - np.nanmedian(worker))
    return np.asarray(away > max(_FAR * max(1.4826 * float(np.nanmedian(away)), error), _LEAST_FAR))


def _means_of(group: Ints, logs: Floats, size: int) -> Floats:
    """Of every group: the logarithm of the mean factor, as the sum of times is what counts."""
    known = ~np.isnan(logs)
    total, count = np.bincount(group[known], np.exp(logs[known]), size), np.bincount(group[known], minlength=size)
    return np.where(count > 0, np.log(np.maximum(total, 1e-300) / np.maximum(count, 1)), np.nan)


def _medians_of(group: Ints, values: Floats, size: int = 0) -> Floats:
    """Of every group, over what is a number; not a number where there is none."""
    answer = np.full(max(size, int(group.max(initial=-1)) + 1), np.nan)
    known = ~np.isnan(values)
    group, values = group[known], values[known]
    order = np.lexsort((values, group))
    for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        if len(part):
            answer[group[part[0]]] = np.median(values[part])
    return answer
