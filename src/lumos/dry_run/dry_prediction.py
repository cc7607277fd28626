"""DryPrediction: what a run would do, from a dry run of its own code."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from lumos.costs.costs import costs_of
from lumos.costs.model_costs import ModelCosts
from lumos.dry_run.dry_step import DryStep
from lumos.dry_run.recorded_step import Recording
from lumos.memory.memory import Memory
from lumos.memory.stage_walk import GIB
from lumos.prediction.approximations import Approximation
from lumos.prediction.bill import Bill, Tariff
from lumos.prediction.carried_over import carried_over, transfer_note, transfer_part
from lumos.prediction.fitting import memory_words, shortage
from lumos.prediction.interval import dry_spread
from lumos.prediction.machine_notes import machine_notes
from lumos.prediction.operator_times import SOURCES, OperatorTime
from lumos.prediction.power import Energy, limit_note, limit_part
from lumos.prediction.prediction import Prediction, host_words
from lumos.program.op import UNCOMPILED
from lumos.program.sharding import StateBytes
from lumos.setup.setup import Setup

STAND_IN = {"layers": 1, "hidden": 64, "ffn": 64, "heads": 1, "vocab": 64}  # for a model; no size of it is used

_MANY_SIZES = 16  # of a step, from which on they matter: a loop over experts has one for each
_SIZES_VARY = (
    "the sizes of {} results depend on the values of tensors: while they change from step to step, PyTorch takes new "
    "memory for them, and steps take up to twice as long"
)


@dataclass(frozen=True, repr=False)
class DryPrediction(Prediction):
    """A prediction from a dry run. Sizes come from the recording; the model of `setup` is a stand-in."""

    dry: DryStep = field(kw_only=True, repr=False)

    @property
    def is_dry(self) -> bool:
        return True

    @property
    def costs(self) -> ModelCosts:
        return self.dry.costs

    @property
    def tokens(self) -> int | None:
        """Of one step over all GPUs, as far as they can be told: ranks of tensor parallelism share theirs."""
        return round(self.dry.recording.tokens * self.dry.data_parallel) or None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        return None if self.tokens is None else self.tokens / (self.step_ms / 1e3) / self.dry.recording.world

    @property
    def mfu(self) -> float | None:
        return None if self.is_of_cpu else self.dry.utilisation(self.dry.model_flops, self.step_ms / 1e3)

    @property
    def hfu(self) -> float | None:
        return None if self.is_of_cpu else self.dry.utilisation(self.dry.hardware_flops, self.step_ms / 1e3)

    @property
    def parameters(self) -> int:
        return self.dry.recording.parameters

    @property
    def active_parameters(self) -> None:
        """A dry run does not know which parameters are those of experts."""
        return None

    @cached_property
    def memory(self) -> Memory:
        return self.dry.memory

    @cached_property
    def state_bytes_per_parameter(self) -> dict[str, float]:
        """Bytes per parameter that this rank holds; optimizer state counts as moments."""
        held, count = self.dry.recording.most_held, max(self.parameters, 1)
        weights, gradients, moments = (held.get(role, 0) / count for role in ("weights", "gradients", "optimizer"))
        return StateBytes(weights, gradients, 0.0, moments)._asdict()

    @property
    def fits(self) -> bool | None:
        """Not known where eager code that stands in for compiled code holds too much."""
        fits = super().fits
        return None if fits is False and self._is_uncompiled else fits

    @property
    def _is_uncompiled(self) -> bool:
        return any(part.kind == UNCOMPILED for part in self.approximations)

    @property
    def approximations(self) -> list[Approximation]:
        return self.dry.approximations

    @property
    def allocated(self) -> tuple[list[float], list[float]]:
        return self.dry.allocated

    @cached_property
    def energy(self) -> Energy | None:
        return None if self.is_of_cpu else self.dry.energy(self.step_ms / 1e3)

    @property
    def bill(self) -> Bill:
        low, high = self.interval_ms
        seconds, world = self.step_ms / 1e3, self.dry.recording.world
        return Bill(self.tariff, world, seconds, (low / 1e3, high / 1e3), self.tokens, self.energy_j)

    @cached_property
    def host_bound(self) -> bool:
        return self.dry.host_us > self.dry.busy_us

    @cached_property
    def all_operators(self) -> list[OperatorTime]:
        return self.dry.operators

    @cached_property
    def source(self) -> dict[str, float]:
        total = sum(row.ms for row in self.all_operators) or 1.0
        return {name: sum(row.ms for row in self.all_operators if row.source == name) / total for name in SOURCES}

    @cached_property
    def warnings(self) -> list[str]:
        found, model = list(self.notes), self.dry.costs.model
        carried = carried_over(model, self.all_operators)
        found += filter(None, (transfer_note(model.gpu.shown, model, carried), limit_note(model.gpu)))
        if self.setup is not None:
            found += machine_notes(self.setup, model, self.all_operators)
        if self.host_bound and self.setup is not None:
            found.append(host_words(self.setup))
        if self.dry.unknown_sizes >= _MANY_SIZES:
            found.append(_SIZES_VARY.format(self.dry.unknown_sizes))
        if self.fits is None and self._is_uncompiled:
            found.append(f"whether it fits is not known: {memory_words(self.memory)}, but compiled code holds less")
        if self.fits is False:
            found.append(f"{shortage(self.memory)}; {_advice(self)}")
        return found


def dry_prediction(recording: Recording, setup: Setup, notes: tuple[str, ...], tariff: Tariff) -> DryPrediction:
    """Predict a recorded step on the cluster of a setup."""
    step = DryStep(setup, recording, costs_of(setup))
    transferred = transfer_part(carried_over(step.costs.model, step.operators))
    power = limit_part(setup.cluster.accelerator, step.operators, max(step.busy_us, step.host_us))
    sizes_vary = step.unknown_sizes >= _MANY_SIZES
    spread = dry_spread(transferred, step.host_us / max(step.busy_us, 1.0), power, step.approximations, sizes_vary)
    return DryPrediction(step.run, spread, setup, notes=(*notes, *recording.assumptions), tariff=tariff, dry=step)


def _advice(prediction: DryPrediction) -> str:
    """How many GPUs make the step fit if they share its weights, gradients and optimizer state (FSDP)."""
    memory = prediction.memory
    state = memory.at_peak.weights + memory.at_peak.gradients + memory.at_peak.optimizer
    other = memory.peak - state
    room = memory.usable - memory.reserve - other
    if state <= 0 or room <= 0:
        activations = f"{other / GIB:.1f} GiB are activations and temporary tensors"
        return f"{activations}: use smaller micro-batches or shorter sequences, or recompute activations"
    return f"it would fit if {ceil(state / room)} times as many GPUs sharded weights, gradients and optimizer state"
