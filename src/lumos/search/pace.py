"""Pace: how long a step takes where the differences between GPUs and steps count, and the failures of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lumos.graph.graph import Floats
from lumos.prediction.prediction import predicted_step
from lumos.risk.monte_carlo import slowed, step_risk
from lumos.risk.planned_run import PlannedRun, checkpoint_bytes
from lumos.risk.whole_run import WholeRun, draw_runs
from lumos.setup.setup import Setup
from lumos.step.step import Step

_STEPS, _RUNS = 400, 200  # drawn for a configuration: the 90th percentile is off by a tenth of the standard deviation
_LATE = 0.9


class Pace(NamedTuple):
    """Seconds that one step takes; all the same where neither risk nor failures count."""

    seconds: float  # typically
    p90: float  # at most, nine times of ten
    run: float  # of a whole run, with its failures: on average, or by risk at most, nine times of ten

    @classmethod
    def least(cls, setup: Setup, seconds: float, steps: int) -> Pace:
        """A lower bound, where the step takes at least so long; `steps` of the run, 0 where failures do not count."""
        return cls(seconds, seconds, expected_s(setup, seconds, steps))

    @classmethod
    def of(cls, step: Step, seconds: float, steps: int) -> Pace:
        """That of a simulated step in runs that fail, of which the mean counts."""
        run = float(_runs_s(step.setup, seconds, steps, np.ones(_RUNS)).mean())
        return cls(seconds, seconds, max(run, expected_s(step.setup, seconds, steps)))

    @classmethod
    def drawn(cls, step: Step, seconds: float, steps: int) -> Pace:
        """By risk: 90th percentiles, which are not taken to be less than what is typical."""
        risk, typical = step_risk(step, draws=_STEPS), cls.of(step, seconds, steps)
        runs = _runs_s(step.setup, seconds, steps, risk.run_factors(_RUNS))
        p90 = seconds * risk.p90_ms / risk.typical_ms
        return cls(seconds, max(seconds, p90), max(typical.run, float(np.quantile(runs, _LATE))))


def slow_us(step: Step) -> float:
    """What the slow parts of the cluster, which a setup may name, add to a step."""
    if not step.setup.variability.slow:
        return 0.0
    found = predicted_step(step)
    return 1e3 * (slowed(found)[0].step_ms - found.step_ms)


def expected_s(setup: Setup, seconds: float, steps: int) -> float:
    """Of a step, with its share of the failures of the run, where a failed node is replaced at once."""
    run = _run(setup, seconds, steps)
    return seconds if run is None else run.expected_s / steps


def _runs_s(setup: Setup, seconds: float, steps: int, factors: Floats) -> Floats:
    """Of a step in drawn runs, each with steps longer by a factor; with failures, spares and repairs."""
    run = _run(setup, seconds, steps)
    if run is None:
        return seconds * factors
    return draw_runs(run.model, steps * seconds * factors, run.interval_s).total_s / steps


def _run(setup: Setup, seconds: float, steps: int) -> WholeRun | None:
    """The run to its last step, if it can fail."""
    if not steps or not setup.reliability.is_stated:
        return None
    per_node, size = setup.cluster.accelerator.gpus_per_node, checkpoint_bytes(setup) / 1e9
    job = PlannedRun(setup.cluster.gpus, per_node, setup.parallel.dp, steps, seconds, (seconds, seconds), size)
    return WholeRun(job, setup.reliability, {})
