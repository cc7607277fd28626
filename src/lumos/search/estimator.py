"""Estimators: the step time of a setup and lower bounds on it, from descriptions or calibrated with a trace."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from lumos.change.calibration import Calibration
from lumos.change.change import calibrated_prices, loaded_step
from lumos.cost.prices import Prices
from lumos.prediction.power import least_joules
from lumos.prediction.step import Assembly, Step, assembled, prices_of, shape_of
from lumos.setup.setup import Setup

_MOST_SHAPES = 4096  # whose prices are kept; a few kilobytes each


class Bound(NamedTuple):
    """Lower bounds on a step."""

    us: float
    joules: float  # of all GPUs


class Estimator:
    """Predicts steps from descriptions alone; setups of the same shape share their prices."""

    name = "described"  # the same for estimators that give the same answers
    fixed_us = 0.0  # added to every step

    def __init__(self) -> None:
        self._known: dict[Hashable, Prices] = {}

    def bound(self, setup: Setup) -> Bound:
        """Lower bounds on the step of a setup, without simulating it."""
        assembly = self._assembly(setup)
        us = assembly.bound_us() + self.fixed_us
        return Bound(us, least_joules(assembly, us / 1e6))

    def step(self, setup: Setup) -> Step:
        """The simulated step of a setup."""
        return self._assembly(setup).step()

    def us(self, step: Step) -> float:
        """The time of a simulated step."""
        return step.us + self.fixed_us

    def _assembly(self, setup: Setup) -> Assembly:
        shape = shape_of(setup)
        if shape not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[shape] = self._prices(setup)
        return assembled(setup, self._known[shape])

    def _prices(self, setup: Setup) -> Prices:
        return prices_of(setup)


class CalibratedEstimator(Estimator):
    """Predicts steps with the calibration from a traced run."""

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        self.calibration, self.name, self.fixed_us = calibration, repr(calibration), calibration.fixed_us

    def step(self, setup: Setup) -> Step:
        return loaded_step(setup, self.calibration)

    def _prices(self, setup: Setup) -> Prices:
        """For bounds: at the clock of a GPU that often waits, which is the fastest."""
        return calibrated_prices(setup, self.calibration.under(0.0))
