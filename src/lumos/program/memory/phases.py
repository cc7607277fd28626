"""Phases: the moments of a step at which a pipeline stage may need most memory.

| phase | held besides weights and optimizer state |
|---|---|
| loss | activations of all micro-batches in flight, the logits and what the loss makes of them (last stage) |
| backward | the same activations, and what the backward of the first layer to go adds |
| last layer | all gradients but those of this layer and the embedding, and one layer's activations |
| optimizer | all gradients, no activations |

Between the second and the third, activations go as gradients come, layer by layer: the worst is at an end.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos.program.memory.activations import Saved, Sizes, dense, norm, norm_output, sparse
from lumos.program.memory.allocator import COMPILED_LOSS_BYTES, habits_of
from lumos.program.memory.in_flight import held
from lumos.program.memory.states import PerParameter
from lumos.program.parameters import Chunk, Weights, chunks_of
from lumos.program.rank_layout import Shard
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup

_NOTHING = Saved(0.0, 0.0)


class StageMemory(NamedTuple):
    """What the ranks of one pipeline stage hold at their worst moment, in bytes; the parts sum to the peak."""

    phase: str
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    framework: float

    @property
    def peak(self) -> float:
        """As torch.cuda.max_memory_allocated reports it."""
        return self[1] + self[2] + self[3] + self[4] + self[5] + self[6]


class Accounting:
    """What all stages of a setup have in common."""

    def __init__(self, setup: Setup, workspaces: float) -> None:
        self.setup, self.workspaces = setup, workspaces
        self.framework = framework_named(setup.train.framework)
        self.habits = habits_of(self.framework)
        shard = Shard(setup, self.framework)
        self.sizes = Sizes(shard, self.habits)
        self.weights = Weights(shard)
        self.per = PerParameter(shard, self.habits)
        model = setup.model
        self.dense = dense(self.sizes) if model.moe_layers < model.layers else _NOTHING
        self.sparse = sparse(self.sizes) if model.experts else _NOTHING
        self.logits = float(shard.tokens * shard.vocab)
        self.chunks = chunks_of(setup, self.framework.balances)
        self.torch_pipeline = setup.parallel.pp > 1 and self.habits.keeps_outputs

    def stage(self, index: int) -> StageMemory:
        """The worst moment of one stage."""
        return max(_Stage(self, index).phases(), key=lambda memory: memory.peak)

    def worst(self) -> tuple[int, StageMemory]:
        """The stage that needs most. Of stages that hold the same, the first has most in flight."""
        layouts: dict[tuple[Chunk, ...], int] = {}
        for index, chunks in enumerate(self.chunks):
            layouts.setdefault(chunks, index)
        return max(((index, self.stage(index)) for index in layouts.values()), key=lambda found: found[1].peak)


class _Stage:
    """One stage of a setup."""

    def __init__(self, common: Accounting, index: int) -> None:
        self.common = common
        self.chunks = common.chunks[index]
        self.counts = held(common.setup, index)
        self.first, self.last = self.chunks[0].first, self.chunks[-1].last
        self.parameters = common.weights.of(self.chunks)
        self.states = common.per.of(self.parameters)
        # Dense layers come first in the model, so the chunks at the ends of a stage tell.
        self.has_dense = self.chunks[0].dense > 0
        self.has_sparse = self.chunks[-1].sparse > 0

    def phases(self) -> list[StageMemory]:
        """Every moment that may be the worst."""
        common, per, gradients = self.common, self.common.per, self.states.gradients
        layer, kept = self._layer(), self._kept()
        # Gradients are there before the backward if a buffer holds them, or an earlier micro-batch has left them.
        most = max(self.counts)
        stay = common.habits.gradient_buffer_fp32 or common.setup.train.microbatches > most
        before = gradients if stay else 0.0
        whole = per.zero < 2 and not stay
        head = per.gradients * common.weights.output if whole and self.last and not per.frozen else 0.0
        after = max(gradients - per.gradients * self._still_to_come(), 0.0) if whole else gradients
        always, half = self._always(), self._half_gradients()
        if per.replicas > 1:  # they lie in the buckets of DistributedDataParallel, which stay
            always, half = always + half, 0.0
        work = always + self._at_work()
        one_left = kept * (most - 1) / most + layer.kept + layer.backward
        phases = [
            self._memory("backward", before + head, kept + layer.backward, work),
            self._memory("last layer", after, one_left, work + half),
            self._memory("optimizer", gradients, 0.0, always + half + self._at_the_end()),
        ]
        if self.last:
            phases.append(self._memory("loss", before, kept, always + self._loss()))
        return phases

    def _memory(self, phase: str, gradients: float, activations: float, buffers: float) -> StageMemory:
        weights, _, optimizer = self.states
        return StageMemory(phase, weights, gradients, optimizer, activations, buffers, self.common.workspaces)

    # ------------------------------------------------------------------ activations
    def _kept(self) -> float:
        """Of all micro-batches in flight."""
        common = self.common
        total = 0.0
        for chunk, count in zip(self.chunks, self.counts, strict=True):
            layers = chunk.dense * common.dense.kept + chunk.sparse * common.sparse.kept
            if chunk.first and common.sizes.dropout:
                layers += common.sizes.spread * common.sizes.hidden  # mask of the dropout after the embedding
            if chunk.last:
                layers += norm(common.sizes) + norm_output(common.sizes)
                total += max(count - 1, 0) * 4.0 * common.logits  # log-probabilities of those whose loss is known
            total += count * layers
        return total

    def _layer(self) -> Saved:
        """The layer whose backward needs most."""
        dense_layer = self.common.dense if self.has_dense else _NOTHING
        sparse_layer = self.common.sparse if self.has_sparse else _NOTHING
        return max(dense_layer, sparse_layer, key=lambda saved: saved.kept + saved.backward)

    # ------------------------------------------------------------------ gradients
    def _still_to_come(self) -> float:
        """Parameters without a gradient while the last layer runs backward: its own and the embedding's."""
        weights = self.common.weights
        if self.common.per.frozen:
            return weights.adapters
        layer = weights.dense if self.chunks[0].dense else weights.sparse + weights.experts
        return layer + (weights.embedding if self.first else 0.0)

    def _half_gradients(self) -> float:
        """In 16 bits, beside the buffer in fp32."""
        per = self.common.per
        return per.low * per.trained(self.parameters) if self.common.habits.half_gradients and per.low < 4 else 0.0

    # ------------------------------------------------------------------ buffers
    def _always(self) -> float:
        """Held through the whole step."""
        common, per = self.common, self.common.per
        total = per.casts * (self.parameters.common + self.parameters.experts)
        if common.habits.buckets and per.replicas > 1 and per.zero < 2:
            total += per.gradients * per.trained(self.parameters)
        if per.divides_weights:
            if common.setup.parallel.pp > 1:
                # FSDP in a pipeline gathers once for all micro-batches, and divides gradients after the last.
                whole = self.parameters.common + self.parameters.experts
                total += per.low * whole + common.framework.reduce_bytes * per.trained(self.parameters)
            else:
                total += per.low * self._root()  # stays gathered from forward to backward
        if common.torch_pipeline:
            # A buffer for every micro-batch and neighbour, and the outputs of the last stage.
            edges = (not self.first) + (not self.last)
            each = edges * common.sizes.stream() + (common.sizes.e * common.logits if self.last else 0.0)
            total += common.setup.train.microbatches * each
        return total

    def _root(self) -> float:
        """Parameters outside the layers, which FSDP treats as one unit."""
        weights = self.common.weights
        return (weights.embedding if self.first else 0.0) + (weights.output if self.last else 0.0)

    def _at_work(self) -> float:
        """Beside a layer's backward."""
        common, per = self.common, self.common.per
        total = 0.0
        if not common.framework.fused_accumulation and not per.frozen:
            model = common.setup.model
            total += per.low * model.hidden * (model.ffn // common.setup.parallel.tp)  # gradient of the last matrix
        if per.divides_weights and common.setup.parallel.pp == 1:
            # Weights of the layer at work and of the next, and gradients on their way to being divided.
            weights = common.weights
            unit = max(weights.dense, weights.sparse + weights.experts if self.has_sparse else 0.0)
            total += unit * (2 * per.low + (0.0 if per.frozen else per.low + common.framework.reduce_bytes))
        return total

    def _loss(self) -> float:
        """For the logits of one micro-batch."""
        common = self.common
        each = COMPILED_LOSS_BYTES if common.sizes.compiled else common.habits.loss_bytes
        if common.setup.train.microbatches > 1:
            each += common.habits.kept_logit_bytes
        return each * common.logits

    def _at_the_end(self) -> float:
        """After the last backward."""
        common, per = self.common, self.common.per
        total = per.step * self.states.optimizer / per.optimizer if per.optimizer else 0.0
        if common.torch_pipeline and self.last:
            total = max(total, common.setup.train.microbatches * common.sizes.e * common.logits)  # joined into one
        if per.divides_weights and not per.frozen and common.setup.parallel.pp == 1:
            total = max(total, (per.low + common.framework.reduce_bytes) * self._root())
        return total
