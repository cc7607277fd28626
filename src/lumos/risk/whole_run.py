"""WholeRun: days and money of a run to a token budget, with failures, as distributions over thousands of drawn runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.arguments import checks_arguments
from lumos.errors import OptionError, check_seed
from lumos.prediction.bill import Tariff
from lumos.prediction.prediction import NO_PRICES, Prediction
from lumos.risk.failures import Cause, Failures
from lumos.risk.fault_model import ALWAYS, FaultModel
from lumos.risk.planned_run import PlannedRun, fault_model_of
from lumos.setup.reliability import Reliability

Floats = NDArray[np.float64]

DRAWS = 4000
DAY_S, HOUR_S, MINUTE_S = 86400.0, 3600.0, 60.0
_EVENTS = 1.5e6  # failures in all drawn runs of one setting: beyond it, fewer runs are drawn
_FEWEST = 100
_MOST_FAILURES = 1e5  # of one run
_LEAST_SHARE = 1e-3  # of a run that is productive: less is a run that does not end
_TENTH = 1.2815515594  # standard deviations: a tenth of a normal distribution is beyond it
_MOST_ATTEMPTS = 200_000
_J_PER_KWH = 3.6e6
_MANY = 10  # minutes, from which on they are whole numbers


@dataclass(frozen=True)
class DrawnRuns:
    """Runs of one setting: a row a run, in seconds by part, and how often what happened."""

    parts: Floats
    counts: NDArray[np.int64]

    @property
    def total_s(self) -> Floats:
        return np.asarray(self.parts.sum(axis=1))

    @property
    def interruptions(self) -> NDArray[np.int64]:
        """Failures, planned stops, and stops to take a repaired node back."""
        return np.asarray(self.counts[:, :3].sum(axis=1))

    def mean_count(self, name: str) -> float:
        """How often something (`run_loops.COUNTS`) happened in a run."""
        from lumos.risk.run_loops import COUNTS

        return float(self.counts[:, COUNTS.index(name)].mean())


def draw_runs(model: FaultModel, work_s: Floats, interval_s: float, seed: int = 0) -> DrawnRuns:
    """Simulate a run for each amount of work (seconds of training), with a checkpoint after every interval."""
    runs, _ = _simulated(model, work_s, interval_s, seed, 0, 0)
    return runs


def _simulated(
    model: FaultModel, work_s: Floats, interval_s: float, seed: int, first: int, rows: int
) -> tuple[DrawnRuns, Floats]:
    """The runs, numbered from `first`, and at most `rows` attempts of the first of them."""
    from lumos.risk.run_loops import COUNTS, PARTS, simulate_runs  # numba, for which other answers do not wait

    runs = DrawnRuns(np.zeros((len(work_s), len(PARTS))), np.zeros((len(work_s), len(COUNTS)), np.int64))
    log = np.zeros((rows, len(PARTS)))
    used = simulate_runs(
        np.ascontiguousarray(work_s, np.float64), first, seed,
        np.array([model.node_rate, model.other_rate, model.planned_rate]),
        np.array([model.detection_s, model.restart_s, model.pause_s, model.lag_s, model.repair_s]),
        np.array([model.spares, model.replicas, model.lost_replicas]),
        float(interval_s), runs.parts, runs.counts, log,
    )  # fmt: skip
    return runs, log[:used]


@dataclass(frozen=True, repr=False)
class WholeRun:
    """A run to its last token. What is drawn: failures, how far off the prediction is, how much steps vary.

    >>> run = whole_run(predict(setup), tokens=15e12)      # doctest: +SKIP
    >>> run.as_dict()["days"]["p90"]                       # doctest: +SKIP
    """

    job: PlannedRun
    reliability: Reliability
    factors: Mapping[str, Floats]  # of the step, by what it is that makes it differ from the predicted one
    tariff: Tariff = NO_PRICES
    joules_per_step: float | None = None
    idle_w: float = 0.0  # of a GPU
    deadline_days: float | None = None
    seed: int = 0

    def __repr__(self) -> str:
        days = self.as_dict()["days"]
        return f"WholeRun(p50 {days['p50']:,.1f} days, p90 {days['p90']:,.1f} days)"

    # ------------------------------------------------------------------ how it fails
    @cached_property
    def _faults(self) -> tuple[FaultModel, Failures]:
        return fault_model_of(self.reliability, self.job)

    @property
    def model(self) -> FaultModel:
        return self._faults[0]

    @property
    def failures(self) -> Failures:
        return self._faults[1]

    @cached_property
    def best_interval_s(self) -> float:
        """The training between two checkpoints with which the run is expected to end first."""
        return self.model.best_interval_s(self.job.work_s, self.job.step_s)

    @property
    def interval_s(self) -> float:
        """The stated one, or the best; at least a step, and not longer than the run, at whose end one is written."""
        stated = self.reliability.checkpoint_minutes
        interval = self.best_interval_s if stated is None else max(MINUTE_S * stated, self.job.step_s)
        return min(interval, self.job.work_s)

    @property
    def expected_s(self) -> float:
        """Of the predicted step, with failures; spares and repairs are left out."""
        return self.model.expected_s(self.job.work_s, self.interval_s)

    # ------------------------------------------------------------------ what is drawn
    @property
    def draws(self) -> int:
        failures = (self.model.failure_rate + self.model.planned_rate) * self.expected_s
        return int(np.clip(_EVENTS / max(failures, 1.0), _FEWEST, DRAWS))

    def work_s(self, without: str = "") -> Floats:
        """Seconds of training of every drawn run, without one of the factors."""
        total = np.full(self.draws, self.job.work_s)
        for name, factor in self.factors.items():
            if name != without:
                total = total * factor[: self.draws]
        return total

    @cached_property
    def runs(self) -> DrawnRuns:
        return draw_runs(self.model, self.work_s(), self.interval_s, self.seed)

    @cached_property
    def days(self) -> Floats:
        """Of every drawn run, from the first step to the last checkpoint."""
        return self.runs.total_s / DAY_S

    @property
    def effective(self) -> Floats:
        """Effective training time of every drawn run: productive over all of it."""
        return np.asarray(self.work_s() / self.runs.total_s)

    @property
    def held_gpus(self) -> int:
        """GPUs that are paid for: those of the job, and its spares."""
        return self.job.gpus + max(self.model.spares, 0) * self.job.gpus_per_node

    def gpu_hours(self, total_s: Floats) -> Floats:
        return total_s / HOUR_S * self.held_gpus

    def kwh(self, work_s: Floats, total_s: Floats) -> Floats | None:
        """Of all GPUs, with what the site draws besides: at work as in the predicted step, idle otherwise."""
        if self.joules_per_step is None:
            return None
        idle = self.held_gpus * self.idle_w
        joules = work_s * (self.joules_per_step / self.job.step_s - self.job.gpus * self.idle_w) + total_s * idle
        return np.asarray(joules * self.tariff.pue / _J_PER_KWH)

    def money(self, work_s: Floats, total_s: Floats) -> Floats | None:
        """None without a price."""
        tariff, kwh = self.tariff, self.kwh(work_s, total_s)
        if tariff.gpu_hour is None and tariff.kwh is None:
            return None
        energy = 0.0 if kwh is None or tariff.kwh is None else tariff.kwh * kwh
        return np.asarray((tariff.gpu_hour or 0.0) * self.gpu_hours(total_s) + energy)

    @property
    def trained_s(self) -> Floats:
        """Seconds in which the GPUs worked: also what was lost, and what took longer with fewer replicas."""
        return np.asarray(self.runs.parts[:, [0, 1, 6]].sum(axis=1))

    def mean_in_run(self, cause: Cause) -> float:
        """How often a cause interrupts a run, on average: only while processes run, not while the job waits."""
        if cause.planned:
            return self.runs.mean_count("planned_stops") * cause.per_hour / self.failures.per_hour(planned=True)
        nodes, failures = self.runs.mean_count("failed_nodes"), self.runs.mean_count("failures")
        drawn = nodes if cause.takes_node else failures - nodes
        return drawn * cause.per_hour / self.failures.per_hour(planned=False, takes_node=cause.takes_node)

    # ------------------------------------------------------------------ what follows
    def typical_attempts(self) -> Floats:
        """The run whose length is nearest to the median, a row an attempt: seconds by part (`run_loops.PARTS`)."""
        number = int(np.argmin(np.abs(self.days - np.median(self.days))))
        work = self.work_s()[number : number + 1]
        return _simulated(self.model, work, self.interval_s, self.seed, number, _MOST_ATTEMPTS)[1]

    def causes(self) -> list[dict[str, Any]]:
        """What makes the 90th percentile longer than the predicted run, and what it would be without each."""
        p90 = float(np.quantile(self.days, 0.9))
        without = {
            name: draw_runs(self.model, self.work_s(name), self.interval_s, self.seed).total_s for name in self.factors
        }
        without["failures and checkpoints"] = self.work_s()
        found = {name: float(np.quantile(total, 0.9) / DAY_S) for name, total in without.items()}
        ordered = sorted(found.items(), key=lambda one: one[1])  # without it the run is shortest: it costs most
        return [{"name": name, "p90_days": days, "costs_days": p90 - days} for name, days in ordered]

    def what_it_buys(self) -> list[dict[str, Any]]:
        """The same runs with one thing changed: days and money that it saves (or costs, where it is less than 0)."""
        rows = []
        for words, changes in _alternatives(self.reliability, self.model, self.failures):
            other = replace(self, reliability=self.reliability.model_copy(update=changes))
            money, now = other.mean_money, self.mean_money
            rows.append({
                "what": words,
                "set": [f"reliability.{key}={_toml(value)}" for key, value in changes.items() if value is not None],
                "mean_days": float(other.days.mean()),
                "days_saved": float(self.days.mean() - other.days.mean()),
                "p90_days_saved": float(np.quantile(self.days, 0.9) - np.quantile(other.days, 0.9)),
                "money_saved": None if money is None or now is None else now - money,
                "effective_training_time": float(other.effective.mean()),
            })  # fmt: skip
        return rows

    @property
    def mean_money(self) -> float | None:
        money = self.money(self.trained_s, self.runs.total_s)
        return None if money is None else float(money.mean())

    @property
    def warnings(self) -> list[str]:
        """What is stated and cannot be so."""
        stated, minutes = self.reliability.checkpoint_minutes, self.job.work_s / MINUTE_S
        if stated is None or stated <= minutes:
            return []
        takes = f"{minutes:,.0f}" if minutes >= _MANY else f"{minutes:.2g}"
        key = f"reliability.checkpoint_minutes = {stated:g}"
        return [f"{key} is more than the {takes} minutes of training: one checkpoint is written, at the end"]

    # ------------------------------------------------------------------ as JSON
    def as_dict(self) -> dict[str, Any]:
        """`run` in the answer of `lumos predict --json`."""
        work, total = self.work_s(), self.runs.total_s
        plain, spent = self.money(work, work), self.money(self.trained_s, total)
        deadline = self.deadline_days
        return {
            "draws": self.draws,
            "seed": self.seed,
            "steps": self.job.steps,
            "days": quantiles(self.days),
            "days_without_failures": quantiles(work / DAY_S),
            "effective_training_time": quantiles(self.effective, falling=True),
            "interruptions": quantiles(self.runs.interruptions),
            "gpu_hours": quantiles(self.gpu_hours(total)),
            "gpu_hours_without_failures": quantiles(work / HOUR_S * self.job.gpus),
            "money": None if spent is None else quantiles(spent),
            "money_without_failures": None if plain is None else quantiles(plain),
            "deadline": None
            if deadline is None
            else {"days": deadline, "probability": float((self.days <= deadline).mean())},
            "mean_days_by_part": self.mean_days_by_part,
            "failures": self._failures_answer(),
            "checkpoints": self._checkpoints_answer(),
            "causes": self.causes(),
            "buys": self.what_it_buys(),
        }

    @property
    def mean_days_by_part(self) -> dict[str, float]:
        """Where the days of the mean run go; they add up to it."""
        from lumos.risk.run_loops import PARTS

        return dict(zip(PARTS, (self.runs.parts.mean(axis=0) / DAY_S).tolist(), strict=True))

    def _failures_answer(self) -> dict[str, Any]:
        model, failures = self.model, self.failures
        return {
            "mtbf_job_hours": None if not model.failure_rate else failures.mtbf_hours,
            "mtbf_gpu_hours": None if not model.failure_rate else failures.mtbf_hours * self.job.gpus,
            "detection_minutes": model.detection_s / MINUTE_S,
            "restart_minutes": model.restart_s / MINUTE_S,
            "spare_nodes": None if model.spares == ALWAYS else model.spares,
            "repair_hours": model.repair_s / HOUR_S,
            "elastic": bool(model.replicas),
            "causes": [
                {
                    "name": one.name, "hours_between": 1 / one.per_hour, "takes_node": one.takes_node,
                    "planned": one.planned, "in_run": self.mean_in_run(one),
                }
                for one in failures.causes
            ],
            "source": failures.source,
        }  # fmt: skip

    def _checkpoints_answer(self) -> dict[str, Any]:
        model, work = self.model, self.job.work_s
        return {
            "gb": self.reliability.checkpoint_gb or self.job.checkpoint_gb,
            "write_seconds": model.write_s,
            "pause_seconds": model.pause_s,
            "asynchronous": self.reliability.async_checkpoints,
            "interval_minutes": self.interval_s / MINUTE_S,
            "interval_steps": max(round(self.interval_s / self.job.step_s), 1),
            "best_interval_minutes": self.best_interval_s / MINUTE_S,
            "young_minutes": None if not model.failure_rate else model.young_s / MINUTE_S,
            "expected_days": self.expected_s / DAY_S,
            "expected_days_at_best": model.expected_s(work, self.best_interval_s) / DAY_S,
        }


@checks_arguments
def whole_run(
    found: Prediction,
    step_factors: Floats | None = None,
    deadline_days: float | None = None,
    seed: int = 0,
    *,
    tokens: float | None = None,
) -> WholeRun:
    """The run to a token budget, which fails as the section `[reliability]` of the predicted setup says.

    `step_factors`: how much longer the steps of each drawn run are than the predicted one (`StepRisk.run_factors`).
    `tokens`: to train on, in place of those of the prediction's tariff.
    """
    check_seed(seed)
    if deadline_days is not None and not 0 < deadline_days < np.inf:
        raise OptionError(f"a deadline of {deadline_days} days: give a number above 0")
    if tokens is not None:
        found = replace(found, tariff=replace(found.tariff, tokens=tokens))
    job = PlannedRun.of(found)
    assert found.setup is not None  # PlannedRun.of refuses it
    factors = {"prediction error": _errors(job, seed)}
    if step_factors is not None:
        if len(step_factors) < DRAWS:
            place = f"step_factors of {len(step_factors):,} runs"
            raise OptionError(f"{place}: give those of {DRAWS:,}, as run_factors does")
        factors["variation of steps"] = np.asarray(step_factors, np.float64)[:DRAWS]
    stated = found.setup.reliability
    run = WholeRun(
        job, stated if stated.is_stated else Reliability(), factors, found.tariff, found.energy_j,
        found.setup.cluster.accelerator.idle_w, deadline_days, seed,
    )  # fmt: skip
    _refuse_endless(run)
    return run


def _errors(job: PlannedRun, seed: int) -> Floats:
    """Steps over the predicted one as the 80 % interval has them: half of them above it, log-normal to either side."""
    low, high = (np.log(end / job.step_s) / _TENTH for end in job.interval_s)
    score = np.random.default_rng([seed, 17]).standard_normal(DRAWS)
    return np.asarray(np.exp(np.where(score > 0, score * high, score * -low)))


def _refuse_endless(run: WholeRun) -> None:
    """Refuse a run that does not end, or not before too many failures."""
    model, stated, days = run.model, run.reliability.checkpoint_minutes, run.expected_s / DAY_S
    if run.job.work_s / run.expected_s < _LEAST_SHARE:
        apart = (
            f"checkpoints are {stated:g} minutes apart" if stated else f"a checkpoint {model.pause_s / 60:.3g} minutes"
        )
        raise OptionError(
            f"the run would not end: the job fails every {60 * run.failures.mtbf_hours:.3g} minutes, a restart takes "
            f"{model.restart_s / 60:.3g} minutes, {apart}; --mtbf and reliability.mtbf_gpu_hours are hours of one GPU, "
            "reliability.mtbf_job_hours those of the whole job"
        )
    failures = (model.failure_rate + model.planned_rate) * run.expected_s
    if failures > _MOST_FAILURES:
        raise OptionError(
            f"--tokens {run.tariff.tokens:.6g} would take {days:,.0f} days with {failures:,.0f} interruptions, and "
            f"{_MOST_FAILURES:,.0f} are drawn at most: give fewer tokens, or more GPUs"
        )


def quantiles(values: NDArray[Any], falling: bool = False) -> dict[str, float]:
    """Mean and percentiles. Of what is better if more (`falling`), p90 is reached or exceeded by 90 % of the runs."""
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: float(np.quantile(values, 1 - one if falling else one)) for name, one in at.items()}
    return {"mean": float(values.mean()), **found}


def _alternatives(reliability: Reliability, model: FaultModel, failures: Failures) -> list[tuple[str, dict[str, Any]]]:
    """What could be changed, in words and as keys of `[reliability]`."""
    if not model.failure_rate and not model.planned_rate:
        return []
    restart = failures.restart_s / MINUTE_S
    rows: list[tuple[str, dict[str, Any]]] = [
        ("checkpoints twice as fast", {"checkpoint_seconds": model.write_s / 2}),
        ("restarts twice as fast", {"restart_minutes": restart / 2}),
        ("failures noticed twice as fast", {"detection_minutes": failures.detection_s / MINUTE_S / 2}),
        ("failures half as often", _half_as_often(reliability)),
    ]
    if not reliability.async_checkpoints:
        rows.insert(1, ("asynchronous checkpoints", {"async_checkpoints": True}))
    if reliability.checkpoint_minutes is not None:
        rows.insert(0, ("the best checkpoint interval", {"checkpoint_minutes": None}))
    if not model.node_rate:
        return [row for row in rows if row[1]]
    if reliability.spare_nodes is None:
        rows.append(("no spare nodes: wait for repairs", {"spare_nodes": 0}))
        rows.append(("no spare nodes, but elastic", {"spare_nodes": 0, "elastic": True}))
        rows.append(("ten spare nodes, paid for", {"spare_nodes": 10}))
    else:
        rows.append(("ten more spare nodes", {"spare_nodes": reliability.spare_nodes + 10}))
        if not reliability.elastic:
            rows.append(("elastic: go on with fewer replicas", {"elastic": True}))
    return [row for row in rows if row[1]]


def _half_as_often(reliability: Reliability) -> dict[str, Any]:
    for key in ("mtbf_gpu_hours", "mtbf_job_hours"):
        if getattr(reliability, key):
            return {key: 2 * getattr(reliability, key)}
    return {}


def _toml(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).lower()
