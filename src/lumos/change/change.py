"""Another configuration of a traced run: its step, priced with what the trace says about the model's errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lumos.analysis.kernel_labels import Phase, RankLabels, Work, label
from lumos.analysis.replay import Replay
from lumos.change.calibration import (
    MOST_NETWORK,
    BlockingPrices,
    CalibratedPrices,
    Calibration,
    Factors,
    factors,
    less,
    modelled_times,
    stages_of,
)
from lumos.change.cut import MeasuredBlock, MeasuredStage, Times, measure
from lumos.cost.operator_model import CostModel, cpu_model
from lumos.cost.prices import Prices
from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.program.block import Block
from lumos.program.embedding_head import embedding, embedding_backward, head, head_backward, optimizer
from lumos.program.operators import Collective
from lumos.program.transformer_layer import TransformerLayer
from lumos.setup.gpus import find_gpu
from lumos.setup.setup import Setup
from lumos.step.step import Step, assembled, prices_of, simulate_step
from lumos.trace.names import collective_name

_SHARED_CORES = (
    "assumed: every rank has the cores and the network that it has in the trace; ranks that share cores are slower"
)
_TABLE = read_table("change.json")


def calibrated_step(setup: Setup, calibration: Calibration) -> Step:
    """A step of any setup, priced with the factors of a traced one."""
    return assembled(setup, calibrated_prices(setup, calibration)).step()


def calibrated_prices(setup: Setup, calibration: Calibration) -> Prices:
    """Prices of any setup, with the factors of a traced one."""
    kind = BlockingPrices if setup.cluster.accelerator.is_cpu else CalibratedPrices

    def make(*arguments: Any) -> CalibratedPrices:
        prices = kind(*arguments)
        prices.calibration = calibration
        return prices

    return prices_of(setup, model=_model_of(setup), make_prices=make)


def _model_of(setup: Setup) -> CostModel | None:
    """The cost model of a CPU, which only a trace can calibrate; None for the usual one."""
    return cpu_model() if setup.cluster.accelerator.is_cpu else None


def loaded_step(setup: Setup, calibration: Calibration) -> Step:
    """The same, at the clock of the GPU's own load."""
    step = calibrated_step(setup, calibration)
    if setup.cluster.accelerator.is_cpu:  # whose clock is not known to fall
        return step
    return calibrated_step(setup, calibration.under(min(_compute_us(step) / max(step.us, 1e-9), 1.0)))


def _compute_us(step: Step) -> float:
    """What a GPU computes in a step, as a mean over stages."""
    blocks = [sum(block.compute_us for chunk in row for block in chunk.blocks) for row in step.chunks]
    updates = [step.role_us("optimizer", stage) for stage in range(len(blocks))]
    return step.plan.microbatches * float(np.mean(blocks)) + float(np.mean(updates))


def _inside_blocks_us(step: Step, stage: int) -> float:
    """All communication inside the blocks of a stage, in one step."""
    blocks = (block for chunk in step.chunks[stage] for block in chunk.blocks)
    return step.plan.microbatches * sum(block.communication_us for block in blocks)


@dataclass(frozen=True)
class CalibratedRun:
    """A traced run with its setup: what was recognised in the trace, and the calibration of the model that follows."""

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
    def calibration(self) -> Calibration:
        """Factors of blocks first, then of what runs outside them, then of the whole."""
        blocks = Calibration(self._groups())
        outside = replace(blocks, data_parallel=self._data_parallel(), link=self._link())
        outside = replace(outside, load=self._recorded_load())
        if self.silent:
            outside = outside.with_communication(0.0)
        step = calibrated_step(self.setup, outside)
        explained = step.us / 1e3
        unexplained = _TABLE["most_unexplained"]
        if not 1 - unexplained < explained / self.run.clean_ms < 1 / (1 - unexplained):
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
        outside = ("gather", "reduce", "reduce rest", "publish")
        expected = any(
            _inside_blocks_us(self.plain, stage) + sum(self.plain.role_us(what, stage) for what in outside) > 0
            for stage in range(self.setup.parallel.pp)
        )
        return expected and not any((labels.work == Work.COMM).any() for labels in self.labels)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.on_cpu:
            return (_SHARED_CORES,)
        if not self.silent:
            return ()
        return (
            "the trace has no communication kernels (a fake process group): collectives are modelled, and the recorded "
            "step is without them",
        )

    def _closed(self, calibration: Calibration, step: Step) -> Calibration:
        """Close the rest by the speed of what decides: the kernels of a GPU-bound step, else the host."""
        clean = self.run.clean_ms * 1e3
        decides: Callable[[Calibration, float], Calibration] = Calibration.slower_host
        if self.on_cpu:
            decides = _slower_core
        elif step.host_share <= _TABLE["host_bound_share"]:
            decides = Calibration.slower
            calibration = calibration.tempered(self.plain.prices.host_us)
        low, high = _TABLE["least_correction"], _TABLE["most_correction"]
        for _ in range(_TABLE["rounds"]):
            step = loaded_step(self.setup, calibration)
            calibration = decides(calibration, min(max(clean / step.us, low), high))
        return replace(calibration, fixed_us=clean - loaded_step(self.setup, calibration).us)

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
        """A setup whose matmuls take far more or less time than those of the trace is not the traced one's.

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
            most = _TABLE["most_matrix_factor" if len(self.labels) == 1 else "most_matrix_factor_shared"]
            if not _TABLE["least_matrix_factor"] < factor < most:
                raise OptionError(
                    f"the setup does not describe this trace: matmuls of a layer's {name} pass take {factor:.2f} "
                    "times what their sizes suggest; correct hidden, ffn, seq, micro_batch or tp to what was traced"
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
        """Factors of embedding and head together; a rank has those that its stage has."""
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
        most = _TABLE["most_network_factor_outside_layers"]
        return self._factors(measured, total / count, launches / count, most) if count else Factors()

    def _communication(self) -> Times:
        """All communication of a step, as a mean over ranks, in microseconds."""
        return np.array([labels.us[labels.work == Work.COMM].sum() for labels in self.labels])

    def _data_parallel(self) -> float:
        """Measured over modelled, of collectives that are in no layer."""
        if self.plain.assembly.layout.dp.size <= 1 or self.setup.parallel.pp > 1:
            return 1.0
        modelled = sum(self.plain.role_us(what, 0) for what in ("gather", "reduce", "reduce rest"))
        inside = _inside_blocks_us(self.plain, 0) + self.plain.role_us("publish", 0)
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

    @cached_property
    def understood(self) -> list[dict[str, Any]]:
        """What was recognised of every rank: tasks and GPU time by phase, one layer, embedding and head."""
        rows = []
        for labels, stage in zip(self.labels, self.stages, strict=True):
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


def _slower_core(calibration: Calibration, factor: float) -> Calibration:
    """A CPU computes and is its own host."""
    return calibration.slower(factor).slower_host(factor)


def changed_step(source: CalibratedRun, target: Setup) -> tuple[Step, tuple[str, ...]]:
    """The step of another configuration of a traced run, and what to know about it; or OptionError."""
    refuse(source.setup, target)
    if source.on_cpu:
        _refuse_on_cpu(source, target)
    calibration = source.calibration.slower_host(source.setup.cluster.host / target.cluster.host)
    notes = source.notes
    if target.parallel != source.setup.parallel:
        notes = (*notes, "the parallelism differs from the traced run's: no such change was measured; wider interval")
    return loaded_step(target, calibration), notes


def _refuse_on_cpu(source: CalibratedRun, target: Setup) -> None:
    """What the trace of a CPU does not have cannot be predicted: there is no typical CPU to take it from."""
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


def refuse(before: Setup, after: Setup) -> None:
    """Refuse changes that a trace says nothing about, with the reason."""
    if before.cluster.accelerator.is_cpu != after.cluster.accelerator.is_cpu:
        raise OptionError(
            f"cluster.gpu = {after.cluster.gpu} cannot be predicted from a trace of {before.cluster.gpu}: they run "
            "other kernels; leave it out, or predict from a setup alone"
        )
    if before.train.compile and after.parallel.tp != before.parallel.tp:
        raise OptionError(
            "parallel.tp cannot be changed from a compiled trace: its kernels are fused beyond recognition; record the "
            "run without compile, or predict from the setup alone"
        )
    keys = ("compile", "framework", "precision", "attention", "mode")
    fixed = [f"train.{key}" for key in keys if getattr(before.train, key) != getattr(after.train, key)]
    if bool(before.model.experts) != bool(after.model.experts) or before.model.gated != after.model.gated:
        fixed.append("the kind of MLP")
    if fixed:
        raise OptionError(
            f"{fixed[0]} cannot be changed from a trace: other kernels would run; predict from the setup"
        )
