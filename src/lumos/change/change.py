"""Edit: predict another configuration of a traced run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lumos.analysis.replay import Replay
from lumos.change.calibration import (
    MOST_NETWORK,
    AnchoredPrices,
    Anchors,
    BlockingPrices,
    Factors,
    factors,
    less,
    modelled_times,
    stages_of,
)
from lumos.change.cut import MeasuredBlock, MeasuredStage, Times, measure
from lumos.change.kernel_labels import Phase, RankLabels, Work, label
from lumos.cost.operator_model import CostModel, cpu_model
from lumos.cost.prices import Prices
from lumos.errors import OptionError
from lumos.prediction.bill import Bill, Tariff
from lumos.prediction.forecasting import NO_PRICES, Forecast
from lumos.prediction.power import Energy
from lumos.prediction.step import Step, assembled, prices_of, simulate_step
from lumos.program.block import Block
from lumos.program.embedding_head import embedding, embedding_backward, head, head_backward, optimizer
from lumos.program.operators import Collective
from lumos.program.transformer_layer import TransformerLayer
from lumos.setup.gpus import find_gpu
from lumos.setup.setup import Setup
from lumos.trace.names import collective_name

_FEWEST_TIMES, _MOST_TIMES = 0.6, 1.8  # nothing takes much less or more than its sizes ask for
_MOST_SHARED = 4.0  # unless several ranks share a GPU
_SHARED_CORES = (
    "every rank is taken to have the cores and the network that it has in the trace; ranks that share cores are slower"
)
_ROUNDS = 6  # the rest shrinks by about four fifths a round
_MOST_SPREAD = 0.5  # of the step, that the anchored model may miss at the traced setup before an answer is refused


def anchored_step(setup: Setup, anchors: Anchors) -> Step:
    """A step of any setup, priced with the factors of a traced one."""
    return assembled(setup, anchored_prices(setup, anchors)).step()


def anchored_prices(setup: Setup, anchors: Anchors) -> Prices:
    """Prices of any setup, with the factors of a traced one."""
    kind = BlockingPrices if setup.cluster.accelerator.is_cpu else AnchoredPrices

    def make(*arguments: Any) -> AnchoredPrices:
        prices = kind(*arguments)
        prices.anchors = anchors
        return prices

    return prices_of(setup, model=_model_of(setup), make_prices=make)


def _model_of(setup: Setup) -> CostModel | None:
    """What only a trace makes an answer of; None: what a description gets too."""
    return cpu_model() if setup.cluster.accelerator.is_cpu else None


def loaded_step(setup: Setup, anchors: Anchors) -> Step:
    """The same, at the clock of the GPU's own load."""
    step = anchored_step(setup, anchors)
    if setup.cluster.accelerator.is_cpu:  # whose clock is not known to fall
        return step
    busy = step.stage_work()
    load = float(np.mean([work.compute_us for work in busy])) / max(step.us, 1e-9)
    return anchored_step(setup, anchors.under(min(load, 1.0)))


@dataclass(frozen=True)
class Source:
    """A traced run with its setup: what was understood of it, and the anchors that follow."""

    run: Replay
    setup: Setup

    @cached_property
    def plain(self) -> Step:
        """The model of the traced run, before anything is learned from it."""
        return simulate_step(self.setup, model=_model_of(self.setup))

    @cached_property
    def labels(self) -> list[RankLabels]:
        return label(self.run)

    @cached_property
    def stages(self) -> list[MeasuredStage]:
        """The blocks of every rank."""
        p, train = self.setup.parallel, self.setup.train
        found = []
        for labels in self.labels:
            chunks = [chunk.layers for chunk in self.plain.chunks[self._stage_of(labels.rank)]]
            if len(set(chunks)) > 1:
                raise OptionError(f"chunks of {chunks} layers on one stage: a trace of unlike chunks cannot be cut yet")
            found.append(measure(labels, chunks[0], train.microbatches, p.vpp))
        return found

    def _stage_of(self, rank: int) -> int:
        per_stage = max(1, self.setup.cluster.gpus // self.setup.parallel.pp)
        return min(rank // per_stage, self.setup.parallel.pp - 1)

    @cached_property
    def anchors(self) -> Anchors:
        """Factors of blocks first, then of what runs outside them, then of the whole."""
        blocks = Anchors(self._groups())
        outside = replace(blocks, data_parallel=self._data_parallel(), link=self._link())
        outside = replace(outside, load=self._recorded_load())
        if self.silent:
            outside = outside.with_communication(0.0)
        step = anchored_step(self.setup, outside)
        explained = step.us / 1e3
        if not 1 - _MOST_SPREAD < explained / self.run.clean_ms < 1 / (1 - _MOST_SPREAD):
            raise OptionError(
                f"the setup does not describe this trace: it explains {explained:.1f} ms of a step of "
                f"{self.run.clean_ms:.1f} ms; correct the setup to what was traced"
            )
        closed = self._closed(outside, step)
        return closed.with_communication(1.0) if self.silent else closed

    @property
    def on_cpu(self) -> bool:
        return self.setup.cluster.accelerator.is_cpu

    def _factors(
        self, measured: list[MeasuredBlock], us: Times, launches: float, network: float = MOST_NETWORK
    ) -> Factors:
        return factors(measured, us, launches, network, placeholders=self.on_cpu)

    @cached_property
    def silent(self) -> bool:
        """The run has collectives and the trace has no kernels of them: a fake process group stood for the peers."""
        expected = any(work.communication_us > 0 for work in self.plain.stage_work())
        return expected and not any((labels.work == Work.COMM).any() for labels in self.labels)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.on_cpu:
            return (_SHARED_CORES,)
        if not self.silent:
            return ()
        return (
            "the trace has no communication kernels (a fake process group): collectives, peers and network are the "
            "model's, and the recorded step is without them",
        )

    def _closed(self, anchors: Anchors, step: Step) -> Anchors:
        """Close the rest by the speed of what decides: the kernels of a GPU-bound step, else the host."""
        clean = self.run.clean_ms * 1e3
        decides: Callable[[Anchors, float], Anchors] = Anchors.slower_host
        if self.on_cpu:
            decides = _slower_core
        elif step.host_share <= 0.5:
            decides = Anchors.slower
            anchors = anchors.tempered(self.plain.prices.host_us)
        for _ in range(_ROUNDS):
            step = loaded_step(self.setup, anchors)
            anchors = decides(anchors, min(max(clean / step.us, 0.5), 2.0))
        return replace(anchors, fixed_us=clean - loaded_step(self.setup, anchors).us)

    def _recorded_load(self) -> float:
        """The share of the recorded step that kernels ran, as a mean over ranks."""
        busy = float(np.mean([labels.us[labels.work != Work.COMM].sum() for labels in self.labels]))
        return busy / 1e3 / self.run.recorded_steps.mean

    def _groups(self) -> dict[str, Factors]:
        shard, prices = self.plain.assembly.layout, self.plain.prices
        layer = TransformerLayer(shard, bool(self.setup.model.experts))
        recomputes = self.setup.train.recompute == "full"
        backward = stages_of(self.stages, "backward")
        if recomputes:
            backward = [less(b, f) for b, f in zip(backward, stages_of(self.stages, "forward"), strict=True)]
        groups = {
            "forward": self._factors(stages_of(self.stages, "forward"), *modelled_times(layer.forward(), prices)),
            "backward": self._factors(backward, *modelled_times(layer.backward(), prices)),
            "optimizer": self._optimizer(),
        }
        self._refuse_misfits(groups)
        groups["ends_forward"] = self._ends("ends_forward", embedding(shard), head(shard))
        groups["ends_backward"] = self._ends("ends_backward", embedding_backward(shard), head_backward(shard))
        return groups

    def _refuse_misfits(self, groups: dict[str, Factors]) -> None:
        """A setup whose products take far more or less time than those of the trace is not the traced one's.

        How long they should take on a CPU is not known; its layers and shapes are checked all the same.
        """
        if self.on_cpu:
            return
        traced = next((h.gpu for h in self.run.execution.trace.headers if h.gpu), "")
        known, stated = find_gpu(traced), self.setup.cluster.accelerator.name
        if known is not None and known.name != stated:
            raise OptionError(f"the trace is of {traced}, and cluster.gpu = {stated}: give the setup of the traced run")
        for name in ("forward", "backward"):
            factor = groups[name].gpu[Work.MATRIX]
            if not _FEWEST_TIMES < factor < (_MOST_TIMES if len(self.labels) == 1 else _MOST_SHARED):
                raise OptionError(
                    f"the setup does not describe this trace: products of a layer's {name} pass take {factor:.2f} of "
                    "the time that its sizes ask for; correct hidden, ffn, seq, micro_batch or tp to what was traced"
                )

    def _optimizer(self) -> Factors:
        shard, prices = self.plain.assembly.layout, self.plain.prices
        assembly = self.plain.assembly
        held = [self._stage_of(stage.rank) for stage in self.stages]
        program = assembly.program
        size = sum(program.sharding.updated(program.stage_parameters(at)) for at in held) / len(held)
        tensors = sum(program.tensors(at) for at in held) // len(held)
        block = optimizer(shard, size, tensors)
        return self._factors(stages_of(self.stages, "optimizer"), *modelled_times(block, prices))

    def _ends(self, name: str, first: Block, last: Block) -> Factors:
        """Embedding and head together; a rank has what its stage has of them."""
        prices, last_stage = self.plain.prices, self.setup.parallel.pp - 1
        total, launches, count = np.zeros(len(Work)), 0.0, 0
        measured: list[MeasuredBlock] = []
        for stage in self.stages:
            at = self._stage_of(stage.rank)
            parts = ([first] if at == 0 else []) + ([last] if at == last_stage else [])
            if not parts:
                continue
            measured.append(getattr(stage, name))
            count += 1
            for part in parts:
                us, some = modelled_times(part, prices)
                total, launches = total + us, launches + some
        return self._factors(measured, total / count, launches / count, network=2.0) if count else Factors()

    def _communication(self) -> Times:
        """All communication of a step, as a mean over ranks, in microseconds."""
        return np.array([labels.us[labels.work == Work.COMM].sum() for labels in self.labels])

    def _data_parallel(self) -> float:
        """Measured over modelled, of collectives that are in no layer."""
        if self.plain.assembly.layout.dp.size <= 1 or self.setup.parallel.pp > 1:
            return 1.0
        modelled = sum(self.plain.role_us(what, 0) for what in ("gather", "reduce", "reduce rest"))
        inside = self.plain.stage_work()[0].communication_us - modelled
        measured = float(self._communication().mean())
        share = modelled / max(modelled + max(inside, 0.0), 1e-9)
        return measured * share / modelled if modelled > 0 and measured > 0 else 1.0

    def _link(self) -> float:
        """Measured over modelled, of what goes from stage to stage."""
        p, shard = self.setup.parallel, self.plain.assembly.layout
        if p.pp == 1:
            return 1.0
        names = self.run.execution.trace.names
        sends = np.array([collective_name(name) == "send_recv" for name in names], bool)
        kernel = self.run.execution.trace.name
        found = [labels.us[(labels.work == Work.COMM) & sends[kernel[labels.row]]] for labels in self.labels]
        typical = float(np.median(np.concatenate(found))) if any(len(part) for part in found) else 0.0
        size = float(shard.spread_tokens * shard.model.hidden * shard.element)
        modelled = self.plain.prices.collective_us(Collective("p2p", size, shard.pp))
        return typical / modelled if typical > 0 and modelled > 0 else 1.0


@dataclass(frozen=True)
class Changed:
    """The prediction of a changed run."""

    source: Source
    forecast: Forecast

    @property
    def step_ms(self) -> float:
        return (self.forecast.step.us + self.source.anchors.fixed_us) / 1e3

    @property
    def baseline_ms(self) -> float:
        return self.source.run.clean_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Four of five of the changes that were measured were within a tenth (docs/changes.md); others get more."""
        before, after = self.source.setup, self.forecast.setup
        spread = _SPREAD
        if after.cluster.gpu != before.cluster.gpu:
            spread += _OTHER_GPU
        if after.parallel != before.parallel or self.source.silent:
            spread += _OTHER_PARALLELISM
        return self.step_ms / (1 + spread), self.step_ms * (1 + spread)

    @cached_property
    def energy(self) -> Energy:
        """With what the trace adds once a step."""
        return replace(self.forecast.energy, seconds=self.step_ms / 1e3)

    @property
    def bill(self) -> Bill:
        low, high = self.interval_ms
        joules = self.energy.joules
        return replace(
            self.forecast.bill, step_s=self.step_ms / 1e3, interval_s=(low / 1e3, high / 1e3), step_joules=joules
        )

    @cached_property
    def understood(self) -> list[dict[str, Any]]:
        """What was recognised of every rank: tasks and GPU time by phase, one layer, the ends."""
        rows = []
        for labels, stage in zip(self.source.labels, self.source.stages, strict=True):
            for phase, layer, ends in (
                (Phase.FORWARD, stage.forward, stage.ends_forward),
                (Phase.BACKWARD, stage.backward, stage.ends_backward),
                (Phase.OPTIMIZER, None, stage.optimizer),
            ):
                tasks = labels.of(phase)
                rows.append(
                    {
                        "rank": labels.rank, "phase": phase.name.lower(), "tasks": int(tasks.sum()),
                        "gpu_ms": float(labels.us[tasks].sum()) / 1e3,
                        "layer_ms": float(layer.us.sum()) / 1e3 if layer else 0.0,
                        "layer_host_ms": layer.host_us / 1e3 if layer else 0.0,
                        "ends_ms": float(ends.us.sum()) / 1e3,
                    }
                )  # fmt: skip
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        answer = self.forecast.as_dict()
        scale = self.step_ms / self.forecast.step_ms
        changed = {
            "step_ms": self.step_ms,
            "baseline_ms": self.baseline_ms,
            "interval_ms": list(self.interval_ms),
            "tokens_per_s_per_gpu": answer["tokens_per_s_per_gpu"] / scale,
            "mfu": self.forecast.mfu / scale,
            "hfu": self.forecast.hfu / scale,
            "energy_j": self.energy.joules,
            "bill": self.bill.as_dict(),
            "understood": self.understood,
        }
        return answer | changed | (self._unknown(changed) if self.forecast.is_of_cpu else {})

    def _unknown(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What is not known of a CPU, as None: all that hangs on its peak or its power."""
        bill = answer["bill"] | dict.fromkeys(("joules_per_step", "joules_per_token", "watts_per_gpu", "kwh_per_step"))
        if bill["budget"] is not None:
            bill["budget"] |= {"kwh": None}
        return dict.fromkeys(("mfu", "hfu", "energy_j")) | {"bill": bill}

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lumos.report.html.notebook import changed_snippet

        return changed_snippet(self)


def _slower_core(anchors: Anchors, factor: float) -> Anchors:
    """A CPU computes and is its own host."""
    return anchors.slower(factor).slower_host(factor)


_SPREAD = 0.10
_OTHER_GPU, _OTHER_PARALLELISM = 0.20, 0.25  # by hand: no measured pair tells


def change(source: Source, target: Setup, notes: tuple[str, ...] = (), tariff: Tariff = NO_PRICES) -> Changed:
    """Predict `target` from a traced run."""
    refuse(source.setup, target)
    if source.on_cpu:
        _refuse_on_cpu(source, target, tariff)
    anchors = source.anchors.slower_host(source.setup.cluster.host / target.cluster.host)
    found = [*source.notes, *notes]
    if target.parallel != source.setup.parallel:
        found.append(
            "the parallelism differs from the traced run's: no such change has been measured, and the interval is wider"
        )
    return Changed(source, Forecast(target, loaded_step(target, anchors), tuple(found), tariff))


def _refuse_on_cpu(source: Source, target: Setup, tariff: Tariff) -> None:
    """What is not in the trace of a CPU, nobody knows: there is no typical one to take it from."""
    if source.silent:
        raise OptionError(
            "the trace has no communication (a fake process group), and that of CPUs is only known from a trace: "
            "record two or more ranks with gloo"
        )
    for way in ("dp", "tp", "pp", "cp", "ep"):
        before, after = getattr(source.setup.parallel, way), getattr(target.parallel, way)
        if before == 1 < after:
            raise OptionError(
                f"parallel.{way} = {after}: the traced run had none, and how CPUs talk is only known from a trace: "
                f"record one with parallel.{way} of 2 or more"
            )
    if tariff.kwh is not None:
        raise OptionError(f"--kwh-price {tariff.kwh:g}: the power of a CPU is not known: leave it out, or use --price")


def refuse(before: Setup, after: Setup) -> None:
    """What a trace cannot tell, with the reason."""
    if before.cluster.accelerator.is_cpu != after.cluster.accelerator.is_cpu:
        raise OptionError(
            f"cluster.gpu = {after.cluster.gpu} cannot be told from a trace of {before.cluster.gpu}: CPUs and GPUs run "
            "other kernels; leave it out, or predict from a setup alone"
        )
    if before.train.compile and after.parallel.tp != before.parallel.tp:
        raise OptionError(
            "parallel.tp cannot be changed from a compiled trace: its kernels are fused beyond recognition; record the "
            "run without compile, or predict from the setup alone"
        )
    if before.train.compile != after.train.compile:
        raise OptionError(
            "train.compile cannot be changed from a trace: other kernels would run; predict from the setup"
        )
    for key in ("framework", "precision", "attention", "mode"):
        if getattr(before.train, key) != getattr(after.train, key):
            raise OptionError(
                f"train.{key} cannot be changed from a trace: other kernels would run; predict from the setup"
            )
    if bool(before.model.experts) != bool(after.model.experts) or before.model.gated != after.model.gated:
        raise OptionError(
            "the kind of MLP cannot be changed from a trace: other kernels would run; predict from the setup"
        )
