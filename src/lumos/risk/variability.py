"""Variability: how much the times of a run differ, from GPU to GPU, from step to step and from kernel to kernel.

A `Spread` is a distribution of factors on a time; its median is 1, so that a typical time stays what it is. A
`Variability` has one for everything that differs. They are learned from recordings, stated by the user, or those of
`data/variability.json`, which names the source of every figure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.data_files import read_table

Floats = NDArray[np.float64]

_FURTHEST = 6.0  # standard deviations: the slowest of a billion
_KNOTS = 241
_FEWEST_QUANTILES = 2
_OFF_CENTRE = 0.1  # logarithm of a stated median: it is 1 but for rounding, and for skew where p = 0.5 is left out
SCORES: Floats = np.linspace(-_FURTHEST, _FURTHEST, _KNOTS)
"""Where the quantiles of a spread are kept, in standard deviations of a normal distribution: dense in both tails."""
PROBABILITIES: Floats = np.array([NormalDist().cdf(score) for score in SCORES])
"""The same as probabilities."""


@dataclass(frozen=True, eq=False)
class Spread:
    """A distribution of factors on a time. The median is 1.

    >>> Spread.lognormal(0.1).at(np.array([0.5])).tolist()
    [1.0]
    """

    logs: Floats  # logarithms of the quantiles at PROBABILITIES

    @classmethod
    def lognormal(cls, sigma: float) -> Spread:
        """Factors whose logarithm has this standard deviation: 0.02 for times that differ by about 2 %."""
        return cls(sigma * SCORES)

    @classmethod
    def of(cls, values: Floats) -> Spread:
        """As observed: times of one and the same thing. Nothing is slower than the slowest of them."""
        values = np.asarray(values, np.float64)
        if not len(values) or not (values > 0).all():
            raise ValueError("a spread is learned from one or more positive times")
        logs = np.quantile(np.log(values), PROBABILITIES)
        return cls(logs - logs[_KNOTS // 2])

    @classmethod
    def from_data(cls, data: Any) -> Spread:
        """From JSON: a number is the sigma of a lognormal distribution; else {"p": […], "factor": […]}."""
        if _is_number(data):
            return cls.lognormal(float(data))
        p, factor = (data.get(key) for key in ("p", "factor")) if isinstance(data, dict) else (None, None)
        if not (isinstance(p, list) and isinstance(factor, list) and all(map(_is_number, [*p, *factor]))):
            raise ValueError('a spread is a number, or {"p": [0.1, 0.5, 0.9], "factor": [0.95, 1, 1.1]}')
        if len(p) != len(factor) or len(p) < _FEWEST_QUANTILES:
            raise ValueError(f"{len(p)} p and {len(factor)} factors: give as many of both, {_FEWEST_QUANTILES} or more")
        if not p[0] > 0 or not p[-1] < 1 or any(b <= a for a, b in pairwise(p)):
            raise ValueError("p ascends, between 0 and 1")
        if not factor[0] > 0 or any(b < a for a, b in pairwise(factor)) or not np.isfinite(factor[-1]):
            raise ValueError("factors are above 0 and ascend with p")
        logs = np.interp(SCORES, [NormalDist().inv_cdf(one) for one in p], np.log(factor))
        middle = float(logs[_KNOTS // 2])
        if abs(middle) > _OFF_CENTRE:
            raise ValueError(f"the factor at p = 0.5 is {np.exp(middle):.3g}, and should be 1: the typical time")
        return cls(logs - middle)

    def to_data(self) -> dict[str, list[float]]:
        """For JSON, with every fourth quantile: enough to draw it again."""
        kept = slice(None, None, 4)
        return {"p": PROBABILITIES[kept].tolist(), "factor": [round(value, 6) for value in np.exp(self.logs[kept])]}

    def at(self, u: Floats) -> Floats:
        """The factors at these probabilities: `spread.at(random.random(n))` draws n factors."""
        return np.exp(np.interp(u, PROBABILITIES, self.logs))

    def slowest_of(self, count: float | Floats, u: Floats) -> Floats:
        """The largest of `count` factors, where `u` is drawn for the largest."""
        return self.at(np.power(u, 1.0 / np.asarray(count, np.float64)))

    def scaled(self, share: float) -> Spread:
        """The same shape with another sigma: `scaled(0.5)` differs half as much."""
        return Spread(self.logs * share)

    @property
    def sigma(self) -> float:
        """Half of the distance between the 16th and the 84th percentile, of logarithms: about the relative spread."""
        low, high = np.interp([-1.0, 1.0], SCORES, self.logs)
        return float(high - low) / 2

    @property
    def is_none(self) -> bool:
        """Whether it changes nothing."""
        return not self.logs.any()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spread) and np.array_equal(self.logs, other.logs)

    def __hash__(self) -> int:
        return hash(self.logs.tobytes())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < np.inf


NONE = Spread.lognormal(0.0)


@dataclass(frozen=True)
class Pauses:
    """What stops one rank now and then: garbage collection, data loading."""

    probability: float = 0.0  # that it happens to a rank in a step
    ms: float = 0.0  # the median of its length
    spread: Spread = NONE  # of its length

    @property
    def is_none(self) -> bool:
        return self.probability <= 0 or self.ms <= 0


@dataclass(frozen=True)
class Variability:
    """What differs in a run, each independent of the others. The defaults change nothing."""

    gpu: Spread = NONE  # one GPU against the typical one: every kernel of it, the whole run
    step: Spread = NONE  # one GPU in one step, against its own usual
    kernel: Spread = NONE  # one pass (forward or backward of a micro-batch on a GPU) against the rest of its step
    microbatch: Spread = NONE  # work of one micro-batch of one replica, on all its stages: lengths of sequences
    collective: Spread = NONE  # one collective
    host: Spread = NONE  # the host's work for one pass
    job: Spread = NONE  # all ranks of one step together: what they share
    pauses: Pauses = Pauses()
    source: str = "none"  # where it comes from, in words
    whole_steps: bool = False  # learned from the lengths of steps: what ranks waited for each other is in them

    @property
    def is_none(self) -> bool:
        return self.pauses.is_none and all(self.spread(name).is_none for name in CAUSES)

    def spread(self, name: str) -> Spread:
        """By name, one of `CAUSES`."""
        found: Spread = getattr(self, name)
        return found

    def without(self, name: str) -> Variability:
        """The same without one cause, which may be "pauses"."""
        neutral: Any = Pauses() if name == "pauses" else NONE
        return dataclasses.replace(self, **{name: neutral})

    def stated(self, sigmas: dict[str, float]) -> Variability:
        """With what the user states in place of what was learned or assumed."""
        if not sigmas:
            return self
        spreads: dict[str, Any] = {name: Spread.lognormal(sigma) for name, sigma in sigmas.items()}
        rest = "" if self.source == "none" else f"; else {self.source}"
        named = ", ".join(sigmas)
        return dataclasses.replace(self, **spreads, source=f"stated: {named}{rest}")

    @property
    def sigmas(self) -> dict[str, float]:
        """Of every spread, for tables."""
        return {name: self.spread(name).sigma for name in CAUSES}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Variability:
        """From JSON as `to_data` writes it."""
        spreads: dict[str, Any] = {}
        for name in (name for name in CAUSES if name in data):
            try:
                spreads[name] = Spread.from_data(data[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        pauses = data.get("pauses")
        if pauses:
            if not isinstance(pauses, dict) or not all(_is_number(pauses.get(key)) for key in ("probability", "ms")):
                raise ValueError('pauses are {"probability": 0.01, "ms": 100}, and perhaps a "spread"')
            spread = Spread.from_data(pauses.get("spread", 0.0))
            spreads["pauses"] = Pauses(float(pauses["probability"]), float(pauses["ms"]), spread)
        return cls(**spreads, source=str(data.get("source", "a file")))

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {name: self.spread(name).to_data() for name in CAUSES if not self.spread(name).is_none}
        if not self.pauses.is_none:
            pauses = self.pauses
            found["pauses"] = {
                "probability": pauses.probability, "ms": pauses.ms, "spread": pauses.spread.to_data(),
            }  # fmt: skip
        return found | {"source": self.source}


CAUSES = ("gpu", "step", "kernel", "microbatch", "collective", "host", "job")
"""The names of the spreads of a variability."""


@lru_cache(maxsize=1)
def usual_variability() -> Variability:
    """That of `data/variability.json`: for runs of which nothing was learned or stated."""
    return Variability.from_data(read_table("variability.json")["usual"])


@lru_cache(maxsize=1)
def usual_of_traces() -> Variability:
    """The same for steps that are drawn as a whole: parts that drift over minutes differ by more than single passes."""
    table = read_table("variability.json")
    return Variability.from_data(table["usual"] | table["traced"])
