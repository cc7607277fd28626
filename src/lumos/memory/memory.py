"""Memory: what the ranks of every pipeline stage hold at their worst moment, and whether it fits.

A stage may need most at one of four moments:

| phase | held besides weights and optimizer state |
|---|---|
| loss | activations of all micro-batches in flight, the logits and what the loss makes of them (last stage) |
| backward | the same activations, and what the backward pass of the first layer to go adds |
| last layer | all gradients but those of this layer and the embedding, and one layer's activations |
| optimizer | all gradients, no activations |

Between the second and the third, activations go as gradients come, layer by layer: the worst is at an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.described.layer import LayerMemory
from lumos.memory.stage_walk import GIB, MIB, StageFacts, StageMemory
from lumos.program.sharding import recomputed_layers, recomputes_every
from lumos.setup.setup import Setup

_NOTHING = LayerMemory(0.0, 0.0)


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest stage, the reserve that torch does not count, and what the GPU has; in bytes."""

    worst: int  # the stage that needs most
    at_peak: StageMemory
    reserve: float  # the CUDA context, NCCL, and blocks of the allocator that do not fit what is asked for
    usable: float
    _stages: _Stages | tuple[StageMemory, ...] = field(repr=False, compare=False)
    reserved: float | None = None  # as torch.cuda.max_memory_reserved reports it; known from dry runs alone
    modules: Mapping[str, float] = field(default_factory=dict, repr=False)  # activations at the peak, of a dry run

    @property
    def peak(self) -> float:
        """As torch.cuda.max_memory_allocated reports it."""
        return self.at_peak.peak

    @property
    def fits(self) -> bool:
        """Whether the fullest stage has room for its peak and the reserve.

        Known error: of nanotron's sweep on H100, 10 in 1,100 runs that ran are called too large, and of those that
        failed, for whatever reason, two thirds are caught. Runs that do not state recomputation may seem too large.
        """
        return self.peak + self.reserve <= self.usable

    @property
    def is_tight(self) -> bool:
        """Whether it fits only if less memory is lost to fragmentation than the reserve allows for."""
        return not self.fits and self.peak + self.reserve - _fragmented(self.peak) <= self.usable

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """Every stage at its own worst moment."""
        if isinstance(self._stages, tuple):
            return self._stages
        return tuple(self._stages.memory(index) for index in range(len(self._stages.program.chunks)))

    def gib(self) -> dict[str, float]:
        """Peak and parts of the fullest stage, for reports."""
        return _in_gib(self.at_peak)

    def rows(self) -> list[dict[str, float | str]]:
        """A row a stage: its number, the phase of its peak, peak and parts in GiB."""
        return [{"stage": index, "phase": stage.phase, **_in_gib(stage)} for index, stage in enumerate(self.stages)]


def _needs(layer: LayerMemory) -> float:
    return layer.kept + layer.backward


def _in_gib(stage: StageMemory) -> dict[str, float]:
    parts = zip(StageMemory._fields[1:], stage[1:], strict=True)
    return {"peak": stage.peak / GIB, **{name: value / GIB for name, value in parts}}


def memory_of(setup: Setup, program: Program | None = None) -> Memory:
    """The memory of one training step; `program` is that of the setup, where it is known already."""
    stages = _Stages(program or Program(setup))
    worst, memory = stages.worst()
    usable = setup.cluster.accelerator.memory_gib * GIB
    return Memory(worst, memory, reserve_of(setup, memory.peak), usable, stages)


def reserve_of(setup: Setup, peak: float) -> float:
    """What torch does not report as allocated."""
    constants, parallel = read_table("memory.json"), setup.parallel
    groups = sum(size > 1 for size in (parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.dp))
    outside = constants["context_mib"] + groups * constants["nccl_mib_per_group"]
    return float(outside * MIB + _fragmented(peak))


def _fragmented(peak: float) -> float:
    return float(read_table("memory.json")["fragmented_share"] * peak)


class _Stages:
    """What all stages of a program have in common."""

    def __init__(self, program: Program) -> None:
        self.program, self.layout = program, program.layout
        self.framework, self.sharding = program.framework, program.sharding
        self.logits = float(self.layout.tokens * self.layout.vocab)
        self.logit_bytes = self._logit_bytes()

    def _logit_bytes(self) -> float:
        """Of one logit between the loss and its backward pass."""
        by_loss, framework = read_table("memory.json")["logit_bytes"], self.framework
        divided = self.layout.parallel.tp > 1 and framework.splits_vocab and framework.loss == "eager"
        if self.layout.train.compile and framework.compiled_logit_bytes < by_loss["eager"]:
            return float(framework.compiled_logit_bytes or by_loss["compiled"])
        return float(framework.logit_bytes or by_loss["divided" if divided else framework.loss])

    def memory(self, index: int) -> StageMemory:
        """The worst moment of one stage."""
        return max(_Stage(self, index).phases(), key=lambda memory: memory.peak)

    def worst(self) -> tuple[int, StageMemory]:
        """The stage that needs most; of stages that hold the same layers, the first where it has most in flight."""
        program = self.program
        stages = dict.fromkeys(program.like) if program.schedule.first_holds_most else range(len(program.chunks))
        return max(((index, self.memory(index)) for index in stages), key=lambda found: found[1].peak)


class _Stage(StageFacts):
    """One stage of a program."""

    def __init__(self, common: _Stages, index: int) -> None:
        program, parameters = common.program, common.program.parameters
        self.common, self.train = common, program.setup.train
        ends = sum(
            parameters.embedding * chunk.first + parameters.output * chunk.last for chunk in program.chunks[index]
        )
        super().__init__(program, index, common.sharding, program.stage_parameters(index), ends, program.vectors(index))
        self.has_sparse = any(chunk.sparse for chunk in self.chunks)

    def phases(self) -> list[StageMemory]:
        """Every moment that may be the worst."""
        common, sharding, gradients = self.common, self.common.sharding, self.states.gradients
        layer, kept = self._layer(), self._kept()
        # Gradients are there before the backward pass if a buffer holds them, or an earlier micro-batch left them.
        most = self.most
        stay = common.framework.gradient_buffer_fp32 or self.rounds > most
        before = gradients if stay else 0.0
        whole = not (stay or sharding.divides_gradients)
        head = whole and self.last and not sharding.frozen
        after = max(gradients - sharding.gradients * self._still_to_come(), 0.0) if whole else gradients
        always, half = self.always, self.half_gradients
        if sharding.replicas > 1:  # they lie in the buckets of DistributedDataParallel, which stay
            always, half = always + half, 0.0
        work = always + self._at_work()
        one_left = kept * (most - 1) / most + layer.kept + layer.backward
        begun = before + (sharding.gradients * common.program.parameters.output if head else 0.0)
        phases = [
            self.memory("backward", begun, kept + self._first_backward(layer), work),
            self.memory("last layer", after, one_left, work + half),
            self.memory("optimizer", gradients, 0.0, always + half + self._at_the_end()),
        ]
        if whole and not self.chunks[0].dense and not sharding.frozen:  # by then its experts have their gradients
            parameters = common.program.parameters
            to_come = parameters.sparse + (parameters.embedding if self.first else 0.0)
            left = one_left - layer.backward + layer.attention
            there = max(gradients - sharding.gradients * to_come, 0.0)
            phases.append(self.memory("last layer", there, left, work + half))
        if self.last:
            phases.append(self.memory("loss", before, kept, always + self._loss()))
        return phases

    # ------------------------------------------------------------------ activations
    def _kept(self) -> float:
        """Of all micro-batches in flight."""
        common, total = self.common, 0.0
        for chunk, count in zip(self.chunks, self.counts, strict=True):
            total += count * common.program.kept_bytes(chunk)
            if chunk.last:
                total += max(count - 1, 0) * 4.0 * common.logits  # log-probabilities of those whose loss is known
        return total

    def _layer(self) -> LayerMemory:
        """The layer whose backward pass needs most."""
        return max((*self._recomputed, *self._plain), key=_needs, default=_NOTHING)

    def _first_backward(self, layer: LayerMemory) -> float:
        """What the backward pass adds while nearly all activations are there.

        Where the first layers of a stage are recomputed and the others are not, the others go back first: by the time
        a recomputed layer is made anew, what they kept is free.
        """
        fetched = layer.kept if self.common.program.offloaded_share else 0.0  # from the host, ahead of its turn
        if not (self._recomputed and self._plain) or recomputes_every(self.train) > 1:
            return layer.backward + fetched
        on_gpu = 1 - self.common.program.offloaded_share
        free = on_gpu * min(self.common.program.plain_kept_bytes(chunk) for chunk in self.chunks)
        again = max(self._recomputed, key=_needs).backward - free
        return max(again, max(self._plain, key=_needs).backward) + fetched

    @cached_property
    def _recomputed(self) -> list[LayerMemory]:
        """The kinds of layers that the stage recomputes."""
        program, counts = self.common.program, [recomputed_layers(self.train, chunk) for chunk in self.chunks]
        found = [program.dense_memory] if any(dense for dense, _ in counts) else []
        return [*found, program.sparse_memory] if any(sparse for _, sparse in counts) else found

    @cached_property
    def _plain(self) -> list[LayerMemory]:
        """The kinds of layers that it does not recompute."""
        program = self.common.program
        rest = [(chunk, recomputed_layers(self.train, chunk)) for chunk in self.chunks]
        found = [program.plain_memory(False)] if any(chunk.dense > dense for chunk, (dense, _) in rest) else []
        return [*found, program.plain_memory(True)] if any(chunk.sparse > n for chunk, (_, n) in rest) else found

    # ------------------------------------------------------------------ gradients
    def _still_to_come(self) -> float:
        """Parameters without a gradient while the last layer runs backward: its own and the embedding's."""
        parameters = self.common.program.parameters
        if self.common.sharding.frozen:
            return parameters.adapters
        layer = parameters.dense if self.chunks[0].dense else parameters.sparse + parameters.experts
        return layer + (parameters.embedding if self.first else 0.0)

    # ------------------------------------------------------------------ buffers
    def _at_work(self) -> float:
        """Beside a layer's backward pass."""
        common, sharding, layout = self.common, self.common.sharding, self.common.layout
        total = 0.0
        if not common.framework.fused_accumulation and not sharding.frozen:
            total += sharding.low * layout.model.hidden * (layout.model.ffn // layout.parallel.tp)  # of one matrix
        if sharding.gathers == "every pass":
            # Weights of the layer at work and of the next, and gradients on their way to being divided.
            parameters = common.program.parameters
            experts = parameters.experts if sharding.expert_shards > 1 else 0.0
            dense = parameters.dense if any(chunk.dense for chunk in self.chunks) else 0.0
            unit = max(dense, parameters.sparse + experts if self.has_sparse else 0.0)
            rest = self.divided - self.stay_gathered
            gradients = 0.0 if sharding.frozen else sharding.low + common.framework.reduce_bytes
            total += sharding.low * min(2 * unit, rest) + unit * gradients
        return total

    def _loss(self) -> float:
        """For the logits of one micro-batch."""
        common = self.common
        before = common.framework.kept_logit_bytes if self.rounds > 1 else 0.0
        return (common.logit_bytes + before) * common.logits

    def _at_the_end(self) -> float:
        """After the last backward pass."""
        common, sharding = self.common, self.common.sharding
        total = sharding.step * sharding.stays * sharding.updated(self.parameters) if sharding.optimizer else 0.0
        if self.joins_outputs and self.last:
            total = max(total, self.outputs)  # joined into one
        if sharding.gathers == "every pass" and not sharding.frozen:
            total = max(total, (sharding.low + common.framework.reduce_bytes) * self.ends)
        return total
