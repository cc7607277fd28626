"""Objective: what a search makes small. Each grows with a step's time and energy, so bounds on those bound it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from lumos.errors import OptionError
from lumos.setup.setup import Setup

NAMES = ("time", "cost", "energy", "gpus")
_SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True)
class Objective:
    """`time` of a step, `cost` in money or in GPU-hours, `energy`, or the `gpus` that a deadline takes."""

    name: str = "time"
    gpu_hour: tuple[tuple[str, float], ...] = ()  # prices by kind of GPU; "" for all others
    kwh: float = 0.0  # the price of a kilowatt-hour, with what the site draws besides
    tokens: float = 0.0  # of the whole training run
    deadline_days: float = 0.0

    def value(self, setup: Setup, seconds: float, joules: float) -> float:
        """For each token of one step; inf where the deadline is missed."""
        if self.deadline_days and self.days(setup, seconds) > self.deadline_days:
            return float("inf")
        if self.name == "cost":
            return self.cost(setup, seconds, joules)
        if self.name == "energy":
            return joules / setup.tokens
        if self.name == "gpus":  # of equally many, the faster
            return setup.cluster.gpus + 0.5 * self.days(setup, seconds) / self.deadline_days
        return seconds / setup.tokens

    def cost(self, setup: Setup, seconds: float, joules: float) -> float:
        """Money for each token; where nothing has a price, GPU-hours."""
        hours = seconds * setup.cluster.gpus / 3600
        return (hours * self.price(setup) + joules / 3.6e6 * self.kwh) / setup.tokens

    def price(self, setup: Setup) -> float:
        prices = dict(self.gpu_hour)
        return prices.get(setup.cluster.gpu, prices.get("", 0.0 if self.kwh else 1.0))

    @property
    def priced(self) -> bool:
        return bool(self.gpu_hour or self.kwh)

    def days(self, setup: Setup, seconds: float) -> float:
        """To all tokens, without interruptions."""
        return seconds * self.steps(setup) / _SECONDS_A_DAY

    def steps(self, setup: Setup) -> float:
        return ceil(self.tokens / setup.tokens)


def checked_objective(objective: Objective, kinds: Sequence[str] = ()) -> Objective:
    """The objective of a search over these kinds of GPU, or OptionError with what it lacks."""
    prices = dict(objective.gpu_hour)
    unpriced = [kind for kind in kinds if prices and "" not in prices and kind not in prices]
    if unpriced:
        raise OptionError(f"--price has none for {unpriced[0]}: give {unpriced[0]}=NUMBER too, or one number for all")
    if objective.name not in NAMES:
        raise OptionError(f"--objective {objective.name!r} is not known: use {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    if objective.name == "gpus" and not objective.deadline_days:
        raise OptionError("--objective gpus needs the days there are: add --deadline DAYS and --tokens COUNT")
    if objective.deadline_days and not objective.tokens:
        raise OptionError(f"--deadline {objective.deadline_days:g} needs the tokens to train on: add --tokens COUNT")
    if objective.deadline_days < 0 or objective.tokens < 0:
        raise OptionError("--deadline and --tokens must be more than 0")
    return objective
