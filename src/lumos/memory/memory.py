"""Memory: what the ranks of every pipeline stage hold at their worst moment, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.memory.stage_walk import (
    AFTER,
    BEFORE,
    GIB,
    LAYER,
    MIB,
    BlockMemory,
    Moment,
    Runs,
    StageBlocks,
    StageMemory,
    stage_walk,
)
from lumos.program.sharding import Chunk, Parameters, recomputed_layers, recomputes_every
from lumos.setup.setup import Setup


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
    """The stages of a program that a setup states, and the blocks of their chunks."""

    def __init__(self, program: Program) -> None:
        self.program, self.layout = program, program.layout
        self.framework, self.sharding = program.framework, program.sharding
        self._known: dict[tuple[bool, int], BlockMemory] = {}  # layers, by kind and how many are recomputed

    def memory(self, stage: int) -> StageMemory:
        """The worst moment of one stage."""
        chunks = [self._runs(chunk) for chunk in self.program.chunks[stage]]
        every, vectors = self.program.stage_parameters(stage), self.program.vectors(stage)
        return stage_walk(self.program, stage, StageBlocks(chunks, self.sharding, every, vectors))

    def worst(self) -> tuple[int, StageMemory]:
        """The stage that needs most; of stages that hold the same layers, the first where it has most in flight."""
        program = self.program
        stages = dict.fromkeys(program.like) if program.schedule.first_holds_most else range(len(program.chunks))
        return max(((index, self.memory(index)) for index in stages), key=lambda found: found[1].peak)

    def _runs(self, chunk: Chunk) -> Runs:
        """The blocks of a chunk. The first layers of each kind are recomputed, or every n-th."""
        train = self.program.setup.train
        runs = [(self._embedding(), 1)] if chunk.first else []
        for sparse, layers, again in zip((False, True), chunk, recomputed_layers(train, chunk), strict=False):
            plain = layers - again
            if again and recomputes_every(train) > 1:
                between = plain // again
                runs += [(self._layer(sparse, 0), between), (self._layer(sparse, again), 1)] * again
                plain -= between * again
            elif again:
                runs.append((self._layer(sparse, again), again))
            if plain:
                runs.append((self._layer(sparse, 0), plain))
        return [*runs, (self._head(chunk.predicts), 1)] if chunk.last else runs

    def _layer(self, sparse: bool, again: int) -> BlockMemory:
        """A layer without recomputation, or one of so many with it."""
        if (sparse, again) not in self._known:
            self._known[sparse, again] = self._new_layer(sparse, again)
        return self._known[sparse, again]

    def _new_layer(self, sparse: bool, again: int) -> BlockMemory:
        program, sharding, layout = self.program, self.sharding, self.layout
        memory = program.layer_memory(sparse, again > 0)
        inputs = program.inputs(again) / again if again else 1.0
        parameters = program.parameters.of_layer(sparse)
        fused = self.framework.fused_accumulation or sharding.frozen
        matrix = 0.0 if fused else sharding.low * layout.model.hidden * (layout.model.ffn // layout.parallel.tp)
        on_gpu = 1 - program.offloaded_share
        held = memory.kept + (on_gpu * memory.kept if program.offloaded_share else 0.0)  # the next is fetched ahead
        moments = [Moment(held + memory.backward, buffers=matrix)]
        if sparse and not sharding.frozen:  # by the time attention goes back, the experts have their gradients
            size = sharding.gradients if sharding.gathers == "never" else sharding.low
            moments.append(Moment(held + memory.attention, size * parameters.experts, buffers=matrix))
        kept = on_gpu * inputs * memory.kept
        return BlockMemory(LAYER, kept, 0.0, parameters, 0.0, tuple(moments))

    def _embedding(self) -> BlockMemory:
        parameters, kept = self.program.parameters, self.program.end_bytes[0]
        return BlockMemory(BEFORE, kept, 0.0, Parameters(parameters.embedding + parameters.positions, 0.0), 0.0, ())

    def _head(self, predicts: int) -> BlockMemory:
        """Final norm, output matrix and loss. Log-probabilities of micro-batches whose loss is known stay."""
        parameters, kept = self.program.parameters, self.program.end_bytes[1]
        logits = float(self.layout.tokens * self.layout.vocab)
        of_one = self._logit_bytes() + (self.framework.kept_logit_bytes if self.program.rounds > 1 else 0.0)
        own = parameters.output + parameters.final_norm + predicts * parameters.predictor
        loss = Moment(kept, begun=False, buffers=of_one * logits)
        return BlockMemory(AFTER, kept + 4.0 * logits, 0.0, Parameters(own, 0.0), 0.0, (loss,))

    def _logit_bytes(self) -> float:
        """Of one logit between the loss and its backward pass."""
        by_loss, framework = read_table("memory.json")["logit_bytes"], self.framework
        divided = self.layout.parallel.tp > 1 and framework.splits_vocab and framework.loss == "eager"
        if self.layout.train.compile and framework.compiled_logit_bytes < by_loss["eager"]:
            return float(framework.compiled_logit_bytes or by_loss["compiled"])
        return float(framework.logit_bytes or by_loss["divided" if divided else framework.loss])
