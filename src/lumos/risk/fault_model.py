"""FaultModel: how a job fails and goes on; the time that its run is expected to take, and the best checkpoint interval.

Failures are a Poisson process: those of thousands of parts that fail independently add up to one, whatever each part
does alone. They strike while the processes of the job run, also while it restarts. An attempt runs from a restart to
the next failure, and keeps the work up to the last checkpoint that was complete. With the rate L of failures, the
training T between checkpoints, the pause S for one, the time D until it is complete (0 where the pause waits for that),
detection F and the restart R:

    work kept by an attempt   T exp(-L D) / (exp(L (T + S)) - 1)
    time of an attempt        1 / L + F exp(L R) + (exp(L R) - 1) / L

Their ratio is the share of the run that is productive. With D = F = 0 this is Daly's formula (2006), whose optimum
Young's sqrt(2 S / L) (1974) approximates where S is much less than 1 / L. Planned stops, which lose no work, add terms
of the same kind. Spares that run out, and training on with fewer replicas, are left to the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALWAYS = -1  # of spares: there is always one more
_HIGHEST = 200.0  # exponents beyond it stand for what never happens
_LEAST = 1e-100  # seconds of work that is kept, where there is none
_TRIED = 600  # intervals


@dataclass(frozen=True)
class FaultModel:
    """One job. Rates are per second, of the whole job; times are in seconds."""

    node_rate: float = 0.0  # failures that take a node away
    other_rate: float = 0.0  # failures after which the job restarts on the same nodes
    planned_rate: float = 0.0  # stops before which a checkpoint is written
    detection_s: float = 0.0
    restart_s: float = 0.0  # with reading the checkpoint
    pause_s: float = 0.0  # that training waits for a checkpoint
    lag_s: float = 0.0  # from there until the checkpoint is complete; training goes on
    spares: int = ALWAYS
    repair_s: float = 0.0
    replicas: int = 0  # of the model; 0: the job waits for a node where there is no spare
    lost_replicas: int = 1  # that one missing node takes with it

    @property
    def failure_rate(self) -> float:
        return self.node_rate + self.other_rate

    @property
    def write_s(self) -> float:
        """To write a checkpoint: training waits for all of it, or for a copy alone."""
        return self.lag_s or self.pause_s

    @property
    def young_s(self) -> float:
        """Young's interval, where the simulation starts from."""
        return sqrt(2 * self.pause_s / self.failure_rate) if self.failure_rate else float("inf")

    def seconds_per_segment(self, training_s: Floats) -> Floats:
        """Expected seconds until so much training and its checkpoint are done, with all failures on the way."""
        failing, planned = self.failure_rate, self.planned_rate
        every, period = failing + planned, training_s + self.pause_s
        if every == 0:
            return period
        kept_after_failure = training_s * _exp(-every * self.lag_s) / np.maximum(_expm1(every * period), _LEAST)
        kept_after_stop = _expm1(-every * training_s) / (every * np.minimum(_expm1(-every * period), -_LEAST))
        share = planned / every
        kept = (1 - share) * kept_after_failure + share * kept_after_stop
        tries = float(_expm1(np.float64(failing * self.restart_s)))  # restarts that fail, for one that does not
        restart = tries / failing if failing else self.restart_s
        down = restart + self.detection_s * (tries + 1 - share) + share * (self.pause_s + self.lag_s)
        return training_s * (1 / every + down) / np.maximum(kept, _LEAST)

    def expected_s(self, work_s: float, interval_s: float) -> float:
        """The expected length of a run of so much work with a checkpoint after every interval, and at the end."""
        whole = max(ceil(work_s / interval_s - 1e-9) - 1, 0)
        rest = max(work_s - whole * interval_s, 0.0)
        long, last = self.seconds_per_segment(np.array([interval_s, rest]))
        return float(whole * long + last)

    def best_interval_s(self, work_s: float, shortest_s: float = 1.0) -> float:
        """The training between two checkpoints with which the run is expected to end first.

        Not less than `shortest_s`, a step, nor than a checkpoint takes to be complete: they do not overtake each other.
        """
        least = min(max(shortest_s, self.lag_s - self.pause_s), work_s)
        tried = np.geomspace(least, work_s, _TRIED)
        for _ in range(2):
            at = int(np.argmin(self.seconds_per_segment(tried) / tried))
            tried = np.geomspace(tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)], _TRIED)
        about = work_s / tried[_TRIED // 2]
        counts = {max(1, int(about) + more) for more in (-1, 0, 1, 2)}
        fitting = [work_s / count for count in counts if work_s / count >= least * (1 - 1e-9)] or [work_s]
        return min(fitting, key=lambda interval: self.expected_s(work_s, interval))


def _exp(exponent: float) -> float:
    return float(np.exp(max(exponent, -_HIGHEST)))


def _expm1(exponent: Floats | np.float64) -> Floats:
    return np.asarray(np.expm1(np.minimum(exponent, _HIGHEST)))
