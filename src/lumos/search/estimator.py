"""Estimator: how long a step of any setup takes, and a time that it cannot be below; from descriptions or a trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lumos.change.calibration import Calibration
from lumos.change.change import calibrated_prices, loaded_step
from lumos.cost.prices import Prices
from lumos.prediction.power import least_joules
from lumos.prediction.step import Assembly, Step, assembled, prices_of, shape_of
from lumos.setup.setup import Setup

_MOST_SHAPES = 4096  # whose prices are kept; a few kilobytes each


class Estimator(Protocol):
    """Prices setups; those of one shape share what was priced."""

    @property
    def name(self) -> str:
        """The same for estimators that answer the same."""
        ...

    def bound(self, setup: Setup) -> Bound: ...

    def step(self, setup: Setup) -> Step: ...

    def us(self, step: Step) -> float: ...


class Bound(NamedTuple):
    """What a step takes at least."""

    us: float
    joules: float  # of all GPUs

    @staticmethod
    def of(assembly: Assembly, fixed_us: float = 0.0) -> Bound:
        us = assembly.bound_us() + fixed_us
        return Bound(us, least_joules(assembly, us / 1e6))


class PriceBook:
    """Prices by the shape of a setup."""

    def __init__(self, make: Callable[[Setup], Prices]) -> None:
        self.make = make
        self.known: dict[Hashable, Prices] = {}

    def assembly(self, setup: Setup) -> Assembly:
        shape = shape_of(setup)
        if shape not in self.known:
            if len(self.known) >= _MOST_SHAPES:
                self.known.clear()
            self.known[shape] = self.make(setup)
        return assembled(setup, self.known[shape])


@dataclass
class Described:
    """From descriptions alone."""

    name: str = "described"
    book: PriceBook = field(default_factory=lambda: PriceBook(prices_of), init=False)

    def bound(self, setup: Setup) -> Bound:
        return Bound.of(self.book.assembly(setup))

    def step(self, setup: Setup) -> Step:
        return self.book.assembly(setup).step()

    def us(self, step: Step) -> float:
        return step.us


@dataclass
class Anchored:
    """With the factors of a traced run."""

    calibration: Calibration
    book: PriceBook = field(init=False)

    def __post_init__(self) -> None:
        self.book = PriceBook(self._fastest)

    @property
    def name(self) -> str:
        return repr(self.calibration)

    def _fastest(self, setup: Setup) -> Prices:
        """At the clock of a GPU that often waits: none is faster."""
        return calibrated_prices(setup, self.calibration.under(0.0))

    def bound(self, setup: Setup) -> Bound:
        return Bound.of(self.book.assembly(setup), self.calibration.fixed_us)

    def step(self, setup: Setup) -> Step:
        return loaded_step(setup, self.calibration)

    def us(self, step: Step) -> float:
        return step.us + self.calibration.fixed_us
