"""Prediction: what a run would do, from its description, a trace of it, or a trace of another configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumos.analysis.answers import MemoryAnswer, OperatorAnswer, PredictionAnswer
from lumos.analysis.breakdown import Breakdown, moved_breakdown
from lumos.analysis.replay import Replay, replay
from lumos.analysis.run import Run, TracedRun
from lumos.arguments import checks_arguments
from lumos.costs.costs import host_was_measured
from lumos.costs.model_costs import ModelCosts
from lumos.described.described import Program
from lumos.described.flops import hardware_flops, model_flops, utilisation
from lumos.errors import OptionError
from lumos.graph.critical_path import PathSummary
from lumos.graph.graph import simulate
from lumos.graph.scaling import Scale, scaled_durations
from lumos.memory.memory import Memory, memory_of
from lumos.prediction.approximations import Approximation
from lumos.prediction.bill import Bill, Tariff
from lumos.prediction.carried_over import carried_over, transfer_note
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.fitting import does_not_fit
from lumos.prediction.interval import Spread, basis_of, changed_spread, described_spread, scaled_spread
from lumos.prediction.machine_notes import machine_notes
from lumos.prediction.operator_times import SOURCES, OperatorTime, operator_times
from lumos.prediction.power import Energy, energy_of, limit_note
from lumos.setup.constraints import check, warnings_in
from lumos.setup.setup import STEP_SECTIONS, Setup
from lumos.setup.setup_files import read_setup, read_setup_with_notes
from lumos.step.step import Step, simulate_step
from lumos.tables import frame
from lumos.trace.trace import Trace
from lumos.traced.infer import Inferred
from lumos.traced.learned import CalibratedRun, beyond_us, changed_step

if TYPE_CHECKING:
    from polars import DataFrame

NO_PRICES = Tariff()
_GIB = float(1 << 30)
_HOST_BOUND = 0.05  # share of the step that a host without delay would save, from which on a step is host-bound


@dataclass(frozen=True, repr=False)
class Prediction:
    """A simulated run with everything that follows from it. What its source cannot know is None.

    >>> predict(setup).step_ms                                  # doctest: +SKIP
    >>> predict(replay(trace), ["compute=0.5"]).breakdown       # doctest: +SKIP
    """

    run: Run = field(repr=False)
    spread: Spread
    setup: Setup | None = None  # of the predicted run; None if only a trace is known
    traced: CalibratedRun | None = field(default=None, repr=False)  # of another configuration
    replayed: Replay | None = field(default=None, repr=False)  # the traced run
    scales: tuple[Scale, ...] = ()
    notes: tuple[str, ...] = ()  # what had to be assumed
    tariff: Tariff = NO_PRICES
    inferred: Mapping[str, Inferred] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        low, high = self.interval_ms
        fits = {None: "", True: ", fits", False: ", does not fit"}[self.fits]
        return f"{type(self).__name__}({self.step_ms:,.2f} ms, {low:,.2f} to {high:,.2f}{fits})"

    def table(self) -> DataFrame:
        """Operators and collectives of the first rank, the most expensive first."""
        return frame([_operator_answer(row).as_dict() for row in self.all_operators])

    # ------------------------------------------------------------------ time
    @cached_property
    def step_ms(self) -> float:
        """The predicted step, without a profiler."""
        run = self.run
        if isinstance(run, DescribedRun):
            return run.us / 1e3
        return run.step_ms if isinstance(run, TracedRun) else run.steps.typical

    @property
    def baseline_ms(self) -> float | None:
        """The traced step, without the profiler."""
        return None if self.replayed is None else self.replayed.clean_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """80 % of runs are within it; how often that held is in docs/accuracy.md."""
        return self.spread.of(self.step_ms)

    @property
    def trace(self) -> Trace:
        """The predicted run, one row an operator or collective."""
        return self.run.trace

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the step goes, as a mean over ranks (of a described run: one rank of every stage).

        Of a changed run, the recorded parts as the model changes them: where nothing changes, they are as recorded.
        """
        recorded, traced = self.baseline_breakdown, self.traced
        if recorded is None or traced is None or traced.silent:  # a fake process group records no communication
            return self.run.breakdown
        step, _ = changed_step(traced, traced.setup)
        modelled = DescribedRun(step, beyond_us(step, traced.learned)).breakdown
        return moved_breakdown(recorded, modelled, self.run.breakdown)

    @cached_property
    def baseline_breakdown(self) -> Breakdown | None:
        """Where the traced step goes, without the profiler."""
        if self.replayed is None:
            return None
        clean = self.replayed.clean_run
        if isinstance(self.run, TracedRun):
            clean = replace(clean, typical_share=self.run.typical_share)
        return clean.breakdown

    @property
    def bubble(self) -> float:
        """The share of the step in which a GPU is idle: it waits for other stages or for its host."""
        return self.breakdown.other_ms / self.step_ms if self.step_ms else 0.0

    @cached_property
    def contention_ms(self) -> float | None:
        """What the step loses because passes and communication beside them slow each other; None for a traced run."""
        step = self.step
        if step is None:
            return None
        alone = simulate(step.assembly.graph()).span / 1e3
        return max(0.0, step.us - alone) / 1e3

    @property
    def critical_path(self) -> PathSummary:
        """What decides the step; its parts add up."""
        return self.run.path_summary

    @property
    def step(self) -> Step | None:
        """The simulated step of a described run."""
        return self.run.step if isinstance(self.run, DescribedRun) else None

    @property
    def costs(self) -> ModelCosts | None:
        """What operators cost in it; None for a traced run, whose times were measured."""
        return None if self.step is None else self.step.costs

    @cached_property
    def host_bound(self) -> bool | None:
        """Whether the step keeps the host's pace, or gets shorter with a faster host, and not by a trifle."""
        return None if self.step is None else self.step.host_cost > _HOST_BOUND or self.step.host_decides

    @property
    def is_dry(self) -> bool:
        """Whether it comes from a dry run of the code; the model of its setup is a stand-in then."""
        return False

    # ------------------------------------------------------------------ throughput
    @property
    def tokens(self) -> int | None:
        """Of one step over all GPUs."""
        return None if self.setup is None else self.setup.tokens

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        setup = self.setup
        return None if setup is None else setup.tokens / (self.step_ms / 1e3) / setup.cluster.gpus

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over those that the GPUs could have done."""
        known = self._on_gpu
        return None if known is None else utilisation(model_flops(known), known, self.step_ms / 1e3)

    @property
    def hfu(self) -> float | None:
        """The same with what is recomputed."""
        known = self._on_gpu
        return None if known is None else utilisation(hardware_flops(known), known, self.step_ms / 1e3)

    @property
    def _on_gpu(self) -> Setup | None:
        """The setup, if peaks and power of what it runs on are known: of CPUs they are not."""
        return None if self.setup is None or self.is_of_cpu else self.setup

    @property
    def is_of_cpu(self) -> bool:
        return self.setup is not None and self.setup.cluster.accelerator.is_cpu

    @property
    def parameters(self) -> int | None:
        """Of the model."""
        return None if self.setup is None else self.setup.model.parameters(self.setup.train.seq)

    @property
    def active_parameters(self) -> int | None:
        """Those that one token uses."""
        return None if self.setup is None else self.setup.model.active_parameters(self.setup.train.seq)

    # ------------------------------------------------------------------ memory
    @property
    def allocated(self) -> tuple[list[float], list[float]]:
        """Memory over the step, as a dry run recorded it: milliseconds and GiB."""
        return [], []

    @cached_property
    def memory(self) -> Memory | None:
        if self.setup is None:
            return None
        found = self.traced.memory(self.setup) if self.traced is not None else None
        return found or memory_of(self.setup)

    @cached_property
    def state_bytes_per_parameter(self) -> dict[str, float] | None:
        """Bytes of weights, gradients, master weights and moments per parameter, before sharding."""
        if self.setup is None:
            return None
        program = self.step.assembly.program if self.step else Program(self.setup)
        return program.sharding.state_bytes._asdict()

    @property
    def fits(self) -> bool | None:
        """Whether peak and reserve are at most what the GPU has; None where that is not known."""
        if self.memory is None or self.setup is None or (self.is_of_cpu and self.setup.cluster.memory_gib is None):
            return None
        return self.memory.fits

    @property
    def approximations(self) -> list[Approximation]:
        """What part of a dry run is on other kernels than the real run."""
        return []

    # ------------------------------------------------------------------ energy and money
    @cached_property
    def energy(self) -> Energy | None:
        """What the GPUs draw; its errors are in docs/energy.md."""
        if self.step is None or self.is_of_cpu:
            return None
        return energy_of(self.step, self.step_ms / 1e3)

    @property
    def energy_j(self) -> float | None:
        """Of all GPUs for one step."""
        return None if self.energy is None else self.energy.joules

    @property
    def bill(self) -> Bill | None:
        """Energy, GPU-hours and money of a step and of a token budget."""
        if self.setup is None:
            return None
        low, high = self.interval_ms
        return Bill(
            self.tariff, self.setup.cluster.gpus, self.step_ms / 1e3, (low / 1e3, high / 1e3), self.tokens,
            self.energy_j,
        )  # fmt: skip

    # ------------------------------------------------------------------ where it came from
    @cached_property
    def all_operators(self) -> list[OperatorTime]:
        """Operators and collectives of the first rank, the most expensive first; none of a traced run."""
        return [] if self.step is None else operator_times(self.step)

    @property
    def operators(self) -> list[OperatorTime]:
        """The twelve most expensive ones."""
        return self.all_operators[:12]

    @cached_property
    def source(self) -> dict[str, float]:
        """Which share of the work was measured, scaled from a trace, fitted, transferred, a roofline, or modelled."""
        if self.step is None:
            return dict.fromkeys(SOURCES, 0.0) | {"measured": 1.0}
        total = sum(row.ms for row in self.all_operators) or 1.0
        return {name: sum(row.ms for row in self.all_operators if row.source == name) / total for name in SOURCES}

    @cached_property
    def warnings(self) -> list[str]:
        found = list(self.notes)
        if self.setup is None:
            return [*found, *(self.replayed.execution.warnings if self.replayed else ())]
        found += [text for text in warnings_in(self.setup) if text not in found]
        model = self.step.costs.model if self.step else None
        gpu = self.setup.cluster.shown
        on_host = self.step.host_update_us / 1e3 if self.step else 0.0
        if on_host:
            found.append(f"the host updates its parameters in {on_host:,.1f} ms, copies included")
        if model is not None:
            carried = carried_over(model, self.all_operators)
            found += filter(None, (transfer_note(gpu, model, carried), limit_note(model.gpu)))
            found += machine_notes(self.setup, model, self.all_operators)
        if self.is_of_cpu:
            memory = "" if self.fits is not None else "; give cluster.memory_gib to know whether it fits"
            found.append(f"peak and power of a CPU are not known: no MFU and no energy{memory}")
        elif self.step is not None and not self.step.costs.joules.measured:
            found.append(f"no power measurements for {gpu}: its energy is that of h200 scaled by peaks and power limit")
        if self.host_bound:
            found.append(host_words(self.setup))
        if self.step is not None and self.traced is None:
            found += framework_words(self.setup)
            found += [] if self.is_of_cpu else [basis_of(self.setup, self.notes)]
        if self.fits is False and self.memory is not None:
            found.append(does_not_fit(self.setup, self.memory))
        return found

    # ------------------------------------------------------------------ as JSON
    def as_dict(self) -> dict[str, Any]:
        """The answer of `lumos predict --json`."""
        return self.answer.as_dict()

    @cached_property
    def answer(self) -> PredictionAnswer:
        traced, bill = self.traced, self.bill
        other: dict[str, Any] = {
            "setup": self._stated_setup,
            "memory_gib": None if self.memory is None else _memory_answer(self.memory),
            "bill": None if bill is None else bill.as_dict(),
            "operators": [_operator_answer(row) for row in self.operators],
            "approximations": [part._asdict() for part in self.approximations],
            "understood": None if traced is None else traced.understood,
            "inferred": None if traced is None else {key: one._asdict() for key, one in self.inferred.items()},
        }
        same = [key for key in PredictionAnswer.__struct_fields__ if key not in other]
        return PredictionAnswer(**{key: getattr(self, key) for key in same}, **other)

    @property
    def _stated_setup(self) -> dict[str, dict[str, Any]] | None:
        """The setup that the answer is for; of a dry run its cluster alone, as its model is a stand-in."""
        if self.setup is None:
            return None
        hidden = ("model", "train", "parallel") if self.is_dry else ()
        names = [name for name in self.setup.stated_sections if name not in hidden]
        return {
            name: getattr(self.setup, name).model_dump(mode="json", exclude_unset=name not in STEP_SECTIONS)
            for name in names
        }

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import prediction_snippet

        return prediction_snippet(self)


def framework_words(setup: Setup) -> list[str]:
    """What is assumed of weights and state where no framework is set."""
    train = setup.train
    if "framework" in train.model_fields_set or train.precision in ("fp32", "tf32"):
        return []
    low = "fp16" if train.precision == "fp16" else "bf16"
    return [
        f'train.framework is not set: assuming "{train.framework}", with weights, gradients and optimizer state in '
        f'{low}; "torchtitan", "megatron" and others keep fp32 state'
    ]


def host_words(setup: Setup) -> str:
    """Whose host decides a step."""
    if host_was_measured(setup):
        return f"the host decides this step: it is taken to be that of {Path(setup.cluster.model).name}"
    return "the host decides this step: cluster.host = 1 is a typical host, and hosts differ by a third"


def _memory_answer(memory: Memory) -> MemoryAnswer:
    return MemoryAnswer(
        **memory.gib(), reserve=memory.reserve / _GIB, available=memory.usable / _GIB, stages=memory.rows(),
        reserved=None if memory.reserved is None else memory.reserved / _GIB,
        modules={name: size / _GIB for name, size in memory.modules.items()},
    )  # fmt: skip


def _operator_answer(row: OperatorTime) -> OperatorAnswer:
    return OperatorAnswer(
        name=row.name, op=row.work.kind, shape=row.shape, count=row.count, ms=row.ms, bound=row.bound,
        source=row.source,
    )  # fmt: skip


@checks_arguments
def predict(
    what: Setup | Replay | CalibratedRun | Path | str,
    scale: Scale | str | Sequence[Scale | str] = (),
    *,
    setup: Setup | Path | str | None = None,
    traced: Setup | Path | str | None = None,
    notes: Sequence[str] = (),
    tariff: Tariff = NO_PRICES,
    inferred: Mapping[str, Inferred] | None = None,
) -> Prediction:
    """What a run would do.

        predict(setup)                                   a described run, or the path of its file
        predict("traces", ["compute=0.5"])               a traced run with some of its tasks faster or slower
        predict(run, setup=wanted, traced=its_setup)     another configuration of a traced run

    `setup` and `traced` may be paths, too. `notes` are what had to be assumed of a setup: they are repeated as
    warnings, and widen the interval of a described run. `tariff` holds prices and a token budget.
    """
    if isinstance(what, Path | str) and (scale or setup or os.path.isdir(what)):
        what = replay(what)
    if isinstance(what, Path | str):
        reading = read_setup_with_notes(what)
        what, notes = reading.setup, (*reading.notes, *notes)
    if isinstance(setup, Path | str):
        reading = read_setup_with_notes(setup)
        setup, notes = reading.setup, (*reading.notes, *notes)
    traced = read_setup(traced) if isinstance(traced, Path | str) else traced
    if isinstance(what, Setup):
        if scale or setup or traced:
            raise OptionError("scale, setup and traced need a traced run: give one as the first argument")
        check(what)
        return predicted_step(simulate_step(what), tuple(notes), tariff)
    if isinstance(what, Replay):
        if setup is None:
            return _scaled(what, scale)
        if traced is None:
            raise OptionError("another configuration needs the setup of the traced run as well: give it as traced")
        what = CalibratedRun(what, traced)
    if not isinstance(what, CalibratedRun):
        raise OptionError(f"{type(what).__name__} is nothing to predict: give a Setup, a replayed trace, or a path")
    if scale or setup is None:
        raise OptionError("scale and setup: ask for exactly one of them")
    return _changed(what, setup, tuple(notes), tariff, inferred or {})


def _changed(
    source: CalibratedRun, target: Setup, notes: tuple[str, ...], tariff: Tariff, inferred: Mapping[str, Inferred]
) -> Prediction:
    step, found = changed_step(source, target)
    if source.on_cpu and tariff.kwh is not None:
        raise OptionError(f"--kwh-price {tariff.kwh:g}: the power of a CPU is not known: leave it out, or use --price")
    return Prediction(
        DescribedRun(step, beyond_us(step, source.learned)),
        changed_spread(source.setup, step, source.silent, step.us / 1e3 / source.run.clean_ms),
        target,
        source,
        source.run,
        notes=_assumed((*found, *notes), target),
        tariff=tariff,
        inferred=inferred,
    )


def predicted_step(step: Step, notes: tuple[str, ...] = (), tariff: Tariff = NO_PRICES) -> Prediction:
    """The prediction for a step that was simulated already."""
    assumed = _assumed(notes, step.setup)
    spread = described_spread(step, assumed)
    return Prediction(DescribedRun(step), spread, step.setup, notes=assumed, tariff=tariff)


def _assumed(notes: Sequence[str], setup: Setup) -> tuple[str, ...]:
    """Each note once, without what the setup warns of anyway."""
    doubts = warnings_in(setup)
    return tuple(note for note in dict.fromkeys(notes) if note not in doubts)


def _scaled(run: Replay, scale: Scale | str | Sequence[Scale | str]) -> Prediction:
    scale = [scale] if isinstance(scale, Scale | str) else scale
    scales = [Scale.parse(one) if isinstance(one, str) else one for one in scale]
    duration, _ = run.what_if.simulate(scaled_durations(run.execution, run.what_if.alone, scales))
    steps = run.clean_steps
    share = steps.typical / steps.mean if steps.mean else 1.0
    simulated = TracedRun(run.execution, run.marks, run.clean_graph, duration, share)
    return Prediction(simulated, scaled_spread(run.cost.error_pct), replayed=run, scales=tuple(scales))
