"""Estimators: the step time of a setup and lower bounds on it, from descriptions or calibrated with a trace."""

from __future__ import annotations

from collections.abc import Hashable

from lumos.costs.costs import costs_of
from lumos.costs.model_costs import ModelCosts
from lumos.described.described import Program
from lumos.prediction.power import least_joules
from lumos.setup.setup import Setup
from lumos.step.bounds import bound_us
from lumos.step.step import Step, assembled, shape_of
from lumos.traced.learned import beyond_us, loaded_step
from lumos.traced.retarget import TracedBlocks
from lumos.traced.trace_costs import Learned, TraceCosts, trace_costs

_MOST_SHAPES = 4096  # whose costs are kept; a few kilobytes each


class Estimator:
    """Predicts steps from descriptions alone; setups of the same shape share their costs."""

    name = "described"  # the same for estimators that give the same answers
    fixed_us = 0.0  # added to every step

    def __init__(self) -> None:
        self._known: dict[Hashable, ModelCosts] = {}

    def bound(self, setup: Setup, program: Program | None = None) -> tuple[float, float]:
        """(seconds, joules of all GPUs) that the step of a setup cannot be below, without simulating it."""
        assembly = assembled(setup, self._shared_costs(setup), program)
        seconds = (bound_us(assembly) + self.fixed_us) / 1e6
        return seconds, least_joules(assembly, seconds)

    def step(self, setup: Setup) -> Step:
        """The simulated step of a setup."""
        return assembled(setup, self._shared_costs(setup)).step()

    def us(self, step: Step) -> float:
        """The time of a simulated step."""
        return step.us + self.fixed_us

    def _shared_costs(self, setup: Setup) -> ModelCosts:
        shape = shape_of(setup)
        if shape not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[shape] = self._costs(setup)
        return self._known[shape]

    def _costs(self, setup: Setup) -> ModelCosts:
        return costs_of(setup)


class CalibratedEstimator(Estimator):
    """Predicts steps from a traced run."""

    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.learned, self.name = learned, learned.name
        # For bounds: where the host decides, nothing is added to a step.
        self.fixed_us = min(learned.beyond_us, 0.0) if learned.gpu_bound else learned.beyond_us

    def bound(self, setup: Setup, program: Program | None = None) -> tuple[float, float]:
        """Likewise, from the blocks of the trace."""
        costs = self._shared_costs(setup)
        assert isinstance(costs, TraceCosts)
        blocks = costs.kept("traced blocks", lambda: TracedBlocks(costs))
        return super().bound(setup, (program or Program(setup)).made_by(blocks.block))

    def step(self, setup: Setup) -> Step:
        return loaded_step(setup, self.learned)

    def us(self, step: Step) -> float:
        return step.us + beyond_us(step, self.learned)

    def _costs(self, setup: Setup) -> ModelCosts:
        """For bounds: at the clock of a GPU that often waits, which is the fastest."""
        costs = trace_costs(setup, self.learned, 0.0)
        costs.leads = False  # they only make a step longer
        return costs
