"""Forecast: everything that is said about a run which was never traced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lumos.prediction.bill import Bill, Tariff
from lumos.prediction.interval import log_spread
from lumos.prediction.power import Energy, energy_of
from lumos.prediction.step import Step, simulate_step
from lumos.program.flops import hardware_flops, model_flops, utilisation
from lumos.program.memory import Memory, memory_of
from lumos.setup.constraints import warnings_in
from lumos.setup.setup import Setup

NO_PRICES = Tariff()
UNKNOWN_OF_CPU = (
    "peak, power and memory of a CPU are not known: no MFU and no energy; cluster.memory_gib says whether it fits"
)


@dataclass(frozen=True)
class Forecast:
    """A simulated step, its memory, and how sure both are."""

    setup: Setup
    step: Step
    notes: tuple[str, ...] = ()  # what had to be assumed about the setup
    tariff: Tariff = NO_PRICES

    @property
    def step_ms(self) -> float:
        return self.step.us / 1e3

    @cached_property
    def memory(self) -> Memory:
        return memory_of(self.setup)

    @property
    def is_of_cpu(self) -> bool:
        """Of a CPU only times are known, from its trace: no peak, no power, no memory."""
        return self.setup.cluster.accelerator.is_cpu

    @property
    def fits(self) -> bool | None:
        """None where nobody said how much memory there is."""
        return None if self.is_of_cpu and self.setup.cluster.memory_gib is None else self.memory.fits

    @cached_property
    def interval_ms(self) -> tuple[float, float]:
        """Four runs out of five are within it; how often that held is in docs/accuracy.md."""
        spread = float(np.exp(log_spread(self.step, len(self.notes))))
        return self.step_ms / spread, self.step_ms * spread

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.setup.tokens / (self.step.us / 1e6) / self.setup.cluster.gpus

    @property
    def mfu(self) -> float:
        return utilisation(model_flops(self.setup), self.setup, self.step.us / 1e6)

    @property
    def hfu(self) -> float:
        return utilisation(hardware_flops(self.setup), self.setup, self.step.us / 1e6)

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Where the time of a rank goes, as a mean over the stages."""
        work = self.step.stage_work()
        compute = float(np.mean([w.compute_us for w in work])) / 1e3
        exposed = float(np.mean([w.exposed_us for w in work])) / 1e3
        total = float(np.mean([w.communication_us for w in work])) / 1e3
        overlapped = max(0.0, total - exposed)
        return {
            "exposed_compute_ms": max(0.0, compute - overlapped),
            "exposed_comm_ms": exposed,
            "overlapped_ms": min(overlapped, compute),
            "other_ms": max(0.0, self.step_ms - compute - exposed),
        }

    @cached_property
    def bubble(self) -> float:
        """The share of the step that a stage waits for others or for its host."""
        return self.breakdown["other_ms"] / self.step_ms

    @cached_property
    def host_bound(self) -> bool:
        """Whether the step gets shorter with a faster host, and not by a trifle."""
        return self.step.host_cost > 0.05

    @cached_property
    def energy(self) -> Energy:
        """What the GPUs draw; how right that is, is in docs/energy.md."""
        return energy_of(self.step)

    @property
    def energy_j(self) -> float:
        """Of all GPUs for one step."""
        return self.energy.joules

    @property
    def bill(self) -> Bill:
        low, high = self.interval_ms
        return Bill(
            self.tariff, self.setup.cluster.gpus, self.step_ms / 1e3, (low / 1e3, high / 1e3),
            self.setup.tokens, self.energy_j,
        )  # fmt: skip

    @cached_property
    def warnings(self) -> list[str]:
        found = [*self.notes, *warnings_in(self.setup)]
        model = self.step.prices.model
        if model.transferred:
            found.append(
                f"{self.setup.cluster.gpu} was not sampled: its costs are those of {model.sampled} at its own peaks, "
                "and the interval is wider"
            )
        if self.is_of_cpu:
            found.append(UNKNOWN_OF_CPU)
        elif not self.step.prices.joules.measured:
            found.append(
                f"the power of {self.setup.cluster.gpu} was not measured: its energy is moved from the h200 by its own "
                "peaks and power limit"
            )
        if self.host_bound:
            found.append(
                "the host decides this step: cluster.host = 1 stands for a typical one, and hosts differ by a third"
            )
        if self.fits is False:
            found.append(
                f"does not fit: {self.memory.gib()['peak']:.1f} GiB at the peak, "
                f"{self.setup.cluster.accelerator.memory_gib:.1f} GiB on the GPU; recompute, shard or split more"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        return {
            "step_ms": self.step_ms,
            "interval_ms": list(self.interval_ms),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory_gib": self.memory.gib(),
            "fits": self.fits,
            "breakdown": self.breakdown,
            "bubble": self.bubble,
            "host_bound": self.host_bound,
            "energy_j": self.energy_j,
            "bill": self.bill.as_dict(),
            "operators": self.step.operators(),
            "warnings": self.warnings,
        } | (dict.fromkeys(("mfu", "hfu", "energy_j")) if self.is_of_cpu else {})

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import forecast_snippet

        return forecast_snippet(self)


def forecast(setup: Setup, notes: tuple[str, ...] = (), tariff: Tariff = NO_PRICES) -> Forecast:
    """What a run would do, from its description.

    Notes are what had to be assumed, and widen the interval; what the setup's own doubts say already is not one.
    """
    doubts = warnings_in(setup)
    told = tuple(note for note in dict.fromkeys(notes) if note not in doubts)
    return Forecast(setup, simulate_step(setup), told, tariff)
