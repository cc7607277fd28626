"""Ranking: the objective that a search minimises, the best configurations so far, and their Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lumos.arguments import check_fields
from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.search.pace import Pace
from lumos.search.space import VARIANT_BITS
from lumos.setup.setup import Setup

OBJECTIVES = ("time", "cost", "energy", "gpus")
GpuPrices = tuple[tuple[str, float], ...] | Mapping[str, float] | float
_SECONDS_PER_DAY = 86_400.0
_MOST_PRICE = 1e24  # as of a tariff

T = TypeVar("T")


@dataclass(frozen=True)
class Objective:
    """What a search minimises: step `time`, `cost`, `energy`, or the number of `gpus` that meet a deadline.

    All of them grow with the time and the energy of a step, so lower bounds on those give a lower bound on the
    objective. By risk, the 90th percentile counts in place of the typical step or run.

    >>> Objective("cost", gpu_hour={"h100": 2.0, "h200": 2.6})              # doctest: +SKIP
    """

    name: str = "time"
    gpu_hour: GpuPrices = ()  # one for all, or one for each type of GPU, where "" stands for all others
    kwh: float = 0.0  # price of a kilowatt-hour, times the site's power usage effectiveness
    tokens: float = 0.0  # of the whole training run
    deadline_days: float = 0.0
    risk: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        prices = self.gpu_hour if isinstance(self.gpu_hour, Mapping | tuple) else {"": self.gpu_hour}
        object.__setattr__(self, "gpu_hour", tuple(dict(prices).items()))
        for name, value in (*self.prices.items(), ("kwh", self.kwh)):
            if not 0 <= value < _MOST_PRICE:
                place = f"Objective: price {name or 'gpu_hour'} = {value:g}"
                raise OptionError(f"{place}: give a number from 0 to {_MOST_PRICE:g}")

    @property
    def prices(self) -> dict[str, float]:
        """Of a GPU-hour, by GPU type; "" stands for all others."""
        return dict(self.gpu_hour)  # type: ignore[arg-type]  # a tuple once it is checked

    def value(self, setup: Setup, pace: Pace, joules: float) -> float:
        """The objective of a step that takes so long and so much energy; inf where the deadline is missed."""
        if self.deadline_days and self.days(setup, pace.run) > self.deadline_days:
            return inf
        if self.name == "cost":
            return self.cost(setup, pace.run, joules)
        if self.name == "energy":
            return joules / setup.tokens
        if self.name == "gpus":  # of equally many, the faster configuration
            return setup.cluster.gpus + 0.5 * self.days(setup, pace.run) / self.deadline_days
        return pace.p90 / setup.tokens

    def cost(self, setup: Setup, seconds: float, joules: float) -> float:
        """The price of a token; GPU-hours per token where no prices are given."""
        return (self.gpu_hours(setup, seconds) * self.price(setup) + joules / 3.6e6 * self.kwh) / setup.tokens

    def gpu_hours(self, setup: Setup, seconds: float) -> float:
        """Of so many seconds on all GPUs, with the spare nodes of a run that may fail."""
        waiting = setup.reliability.spare_nodes if self.counts_failures(setup) else None
        return seconds * (setup.cluster.gpus + (waiting or 0) * setup.cluster.accelerator.gpus_per_node) / 3600

    def counts_failures(self, setup: Setup) -> bool:
        """Whether the run is as long as it is with its failures: how long that is depends on its tokens."""
        return self.tokens > 0 and setup.reliability.is_stated

    def price(self, setup: Setup) -> float:
        """The price of a GPU-hour."""
        prices = self.prices
        return prices.get(setup.cluster.gpu, prices.get("", 0.0 if self.kwh else 1.0))

    @property
    def priced(self) -> bool:
        return bool(self.gpu_hour or self.kwh)

    def steps(self, setup: Setup) -> int:
        """To the last token; 0 where it is not said how many there are."""
        return ceil(self.tokens / setup.tokens)

    def days(self, setup: Setup, seconds: float) -> float:
        """Until all tokens are trained on, at so many seconds a step."""
        return seconds * self.steps(setup) / _SECONDS_PER_DAY

    def check(self, gpu_types: Sequence[str]) -> None:
        """Raise OptionError for what a search over these types of GPU would lack."""
        prices = self.prices
        unpriced = next((gpu for gpu in gpu_types if prices and "" not in prices and gpu not in prices), "")
        if unpriced:
            raise OptionError(f"--price has none for {unpriced}: give {unpriced}=NUMBER too, or one number for all")
        if self.name not in OBJECTIVES:
            known = f"{', '.join(OBJECTIVES[:-1])} or {OBJECTIVES[-1]}"
            raise OptionError(f"--objective {self.name!r} is not known: use {known}")
        if self.name == "gpus" and not self.deadline_days:
            raise OptionError("--objective gpus needs a deadline: add --deadline DAYS and --tokens COUNT")
        if self.deadline_days and not self.tokens:
            raise OptionError(f"--deadline {self.deadline_days:g} needs the tokens to train on: add --tokens COUNT")
        if self.risk and self.name == "energy":
            raise OptionError("--risk and --objective energy: only times are drawn; minimise time or cost")
        if not (0 <= self.deadline_days < 1e6 and 0 <= self.tokens < 1e30):
            raise OptionError("--deadline and --tokens must be numbers of days and tokens, more than 0")


class Simulated(NamedTuple):
    """A simulated configuration: its number in the space, the objective, and the axes of the Pareto front."""

    number: int
    value: float  # of the objective
    seconds: float  # per step
    memory: float  # bytes on the fullest GPU
    cost: float  # per token: money, or GPU-hours where GPUs have no price
    joules: float  # per step, all GPUs
    bound: float  # lower bound on its seconds
    p90: float  # seconds, as `Pace` has them
    run: float


Bounds = NDArray[np.void]
BOUNDS = np.dtype([("number", "i8"), ("value", "f8"), ("seconds", "f8"), ("memory", "f8"), ("cost", "f8")])
"""A configuration that is not simulated yet: all but its memory are lower bounds."""


@dataclass
class Front:
    """The `top` best configurations and families, what no other beats, the best per cluster.

    A family lays the weights out in one way, and its members are nearly as good as its best: a prediction cannot tell
    them apart. `family_of` has the family of every layout (`Space.families`). Nothing here depends on the order in
    which configurations are added.
    """

    top: int
    family_of: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    cluster_of: NDArray[np.int64] | None = None  # of every layout; None where the best on each cluster is not asked for
    slack: float = 0.0  # how much worse than the best others may be and still matter, as a share
    best: list[Simulated] = field(default_factory=list)
    pareto: list[Simulated] = field(default_factory=list)
    relatives: dict[int, list[Simulated]] = field(default_factory=dict)  # all of each family, best first
    leaders: dict[int, Simulated] = field(default_factory=dict)  # the best on every cluster

    def add(self, rows: Iterable[Simulated]) -> None:
        """Take in configurations; those that miss the deadline, or are too large to simulate, never count."""
        new = [row for row in rows if row.value < inf]
        self.best = sorted({*self.best, *new}, key=_by_value)[: self.top]
        self.pareto = pareto_front([*self.pareto, *new], _axes)
        families = self._families([row.number for row in new]).tolist()
        for family, row in zip(families, new, strict=True):
            self.relatives.setdefault(family, []).append(row)
        for family in set(families):
            self.relatives[family].sort(key=_by_value)
        if self.cluster_of is not None:
            for row in new:
                cluster = int(self.cluster_of[row.number >> VARIANT_BITS])
                self.leaders[cluster] = min(self.leaders.get(cluster, row), row, key=_by_value)

    @property
    def families(self) -> list[list[Simulated]]:
        """The best families, best first, and the members of each."""
        ordered = sorted(self.relatives.values(), key=lambda rows: _by_value(rows[0]))[: self.top]
        return [[row for row in rows if row.value <= rows[0].value * (1 + tolerance())] for rows in ordered]

    def can_matter(self, rows: Bounds) -> NDArray[np.bool_]:
        """Which bounded configurations may still be among the best, in one of the best families, or on the front.

        The others are beaten for certain, even if their times were equal to their bounds.
        """
        worst = self.best[-1].value * (1 + self.slack) if len(self.best) == self.top else inf
        valid = np.isfinite(rows["value"])
        on_front = valid.copy()
        for row in self.pareto:
            on_front &= ~((row.seconds < rows["seconds"]) & (row.cost <= rows["cost"]) & (row.memory <= rows["memory"]))
        matters: NDArray[np.bool_] = on_front | valid & ((rows["value"] <= worst) | self._in_family(rows))
        return matters if self.cluster_of is None else matters | valid & self._may_lead(rows, self.cluster_of)

    def _in_family(self, rows: Bounds) -> NDArray[np.bool_]:
        """Which may be the best of their families or nearly so, where the family may be among the best."""
        leaders = sorted(rows[0].value for rows in self.relatives.values())[: self.top]
        worst = leaders[-1] if len(leaders) == self.top else inf
        families, of = np.unique(self._families(rows["number"]), return_inverse=True)
        known = (self.relatives.get(family) for family in families.tolist())
        best = np.array([relatives[0].value if relatives else inf for relatives in known])[of]
        near = rows["value"] <= best * (1 + tolerance())
        family: NDArray[np.bool_] = near & ((best <= worst) | (rows["value"] <= worst))
        return family

    def _may_lead(self, rows: Bounds, cluster_of: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which may be the best on their cluster."""
        best = np.full(int(cluster_of.max(initial=0)) + 1, inf)
        for cluster, row in self.leaders.items():
            best[cluster] = row.value
        may: NDArray[np.bool_] = rows["value"] < best[cluster_of[rows["number"] >> VARIANT_BITS]]
        return may

    def _families(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.family_of[np.asarray(numbers, np.int64) >> VARIANT_BITS]
        return found


def tolerance() -> float:
    """How much worse than the best of its family a member may be, as a share."""
    return float(read_table("search.toml")["families"]["tolerance"])


def _axes(row: Simulated) -> tuple[float, ...]:
    """Of the Pareto front: time, memory, cost and, by risk, the 90th percentile."""
    return row.seconds, row.memory, row.cost, row.p90, row.number


def _by_value(row: Simulated) -> tuple[float, int]:
    return row.value, row.number


def promising(rows: Bounds, most: int) -> NDArray[np.bool_]:
    """Which rows to simulate next, of rows sorted by their objective; at most `most`.

    The first quarter is the rows with the best bounds, the rest those whose bounds are on a Pareto front. Bounds are
    close to the times, so these include most of what matters, and rule out most of the remaining rows.
    """
    chosen = np.zeros(len(rows), bool)
    chosen[: most // 4] = True
    by_time = np.lexsort((rows["number"], rows["memory"], rows["seconds"]))
    memory, cost = rows["memory"][by_time], rows["cost"][by_time]
    least = np.minimum.accumulate(np.concatenate([[np.inf], memory[:-1]]))
    cheapest = np.minimum.accumulate(np.concatenate([[np.inf], cost[:-1]]))
    ahead = by_time[(memory < least) | (cost < cheapest)]
    chosen[ahead[: most - int(chosen.sum())]] = True
    if len(rows) > most // 4 and not chosen[most // 4 :].any():
        chosen[:most] = True
    return chosen


def pareto_front(rows: Iterable[T], key: Callable[[T], tuple[float, ...]]) -> list[T]:
    """The rows that no other beats in (seconds, memory, …), fastest first; of equals, that of the least number."""
    kept: list[tuple[T, tuple[float, ...]]] = []
    for row in sorted(rows, key=key):
        _, *others, _ = key(row)
        if not any(all(mine <= other for mine, other in zip(least, others, strict=True)) for _, least in kept):
            kept.append((row, tuple(others)))
    return [row for row, _ in kept]
