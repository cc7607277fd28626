"""Variability: how much the times of a run differ, from GPU to GPU, from step to step and from kernel to kernel.

A `Spread` is a distribution of factors on a time; its median is 1, so that a typical time stays what it is. A
`Variability` has one for everything that differs. They are learned from recordings, stated by the user, or those of
`data/variability.json`, which names the source of every figure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.data_files import read_table

Floats = NDArray[np.float64]

_FURTHEST = 6.0  # standard deviations: the slowest of a billion
_KNOTS = 241
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
        if isinstance(data, int | float):
            return cls.lognormal(float(data))
        scores = [NormalDist().inv_cdf(p) for p in data["p"]]
        logs = np.interp(SCORES, scores, np.log(data["factor"]))
        return cls(logs - logs[_KNOTS // 2])

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
        spreads: dict[str, Any] = {name: Spread.from_data(data[name]) for name in CAUSES if name in data}
        pauses = data.get("pauses")
        if pauses:
            spreads["pauses"] = Pauses(
                float(pauses["probability"]), float(pauses["ms"]), Spread.from_data(pauses.get("spread", 0.0))
            )
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
