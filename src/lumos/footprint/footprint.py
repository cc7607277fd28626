"""Footprint: what a training step needs on every pipeline stage, from nothing but its description."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

from lumos.blocks.shard import Shard
from lumos.footprint.flight import held
from lumos.footprint.layout import Chunk, Parameters, Weights, chunks_of
from lumos.footprint.saved import Saved, Sizes, dense, norm, norm_output, sparse
from lumos.footprint.stage import StageMemory
from lumos.footprint.states import PerParameter, States
from lumos.frameworks import framework_named
from lumos.setups.setup import Setup

MIB, GIB = float(1 << 20), float(1 << 30)


@dataclass(frozen=True)
class Footprint:
    """Memory by pipeline stage, what torch does not count, and what the GPU has; in bytes."""

    stages: tuple[StageMemory, ...]
    unseen: float  # CUDA context, NCCL, and what the allocator cannot use
    usable: float

    @cached_property
    def worst(self) -> int:
        """The stage that needs most."""
        peaks = [stage.peak for stage in self.stages]
        return peaks.index(max(peaks))

    @property
    def peak(self) -> float:
        """Of the worst stage, as torch.cuda.max_memory_allocated reports it."""
        return self.stages[self.worst].peak

    @property
    def fits(self) -> bool:
        return self.peak + self.unseen <= self.usable

    def gib(self) -> dict[str, float]:
        """Peak and parts of the worst stage, for reports."""
        stage = self.stages[self.worst]
        parts = dict(zip(stage._fields[1:], stage[1:], strict=True))
        values = {"peak": self.peak, **parts, "unseen": self.unseen, "usable": self.usable}
        return {name: value / GIB for name, value in values.items()}


def footprint(setup: Setup) -> Footprint:
    """The memory of one training step."""
    return _Accounting(setup).footprint()


@cache
def _constants() -> dict[str, Any]:
    text = resources.files("lumos").joinpath("data/footprint.json").read_text("utf-8")
    constants: dict[str, Any] = json.loads(text)
    return constants


# What a framework does with logits and gradients beyond the fields of Framework, until they are fields of it.
_LOSS_BYTES = {"eager": 12.0, "sharded": 8.0, "fused": 6.0}
_KEEPS_LOGITS = {"nanotron": 4.0}
_HALF_GRADIENTS = frozenset({"nanotron"})
_TORCH_PIPELINE = frozenset({"pytorch"})


class _Accounting:
    """One setup's sizes, computed once for all stages."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.shard = shard = Shard(setup, framework_named(setup.train.framework))
        self.framework = shard.framework
        self.sizes = Sizes(shard)
        self.weights = Weights(shard)
        self.per = PerParameter(shard)
        model = setup.model
        none = Saved(0.0, 0.0, 0.0)
        self.dense = dense(self.sizes) if model.moe_layers < model.layers else none
        self.sparse = sparse(self.sizes) if model.experts else none
        self.logits = float(shard.tokens * shard.vocab)
        self.replicas = max(1, setup.parallel.dp * setup.parallel.cp)
        self.family = setup.cluster.accelerator.family

    def footprint(self) -> Footprint:
        gpu = self.setup.cluster.accelerator
        stages = tuple(self.stage(index, chunks) for index, chunks in enumerate(chunks_of(self.setup, self.framework.balances)))
        constants = _constants()
        peak = max(stage.peak for stage in stages)
        p = self.setup.parallel
        groups = sum(size > 1 for size in (p.tp, p.pp, p.cp, p.ep, p.dp))
        unseen = (constants["context_mib"] + groups * constants["nccl_mib_per_group"]) * MIB
        return Footprint(stages, unseen + constants["reserved_share"] * peak, gpu.memory_gib * GIB)

    # ------------------------------------------------------------------ one stage
    def stage(self, index: int, chunks: list[Chunk]) -> StageMemory:
        """The worst of the step's phases on one stage."""
        parameters = self.weights.of(chunks)
        states = self.per.of(parameters)
        counts = held(self.setup, index)
        return max(self._phases(chunks, counts, parameters, states), key=lambda memory: memory.peak)

    def _phases(
        self, chunks: list[Chunk], counts: tuple[int, ...], parameters: Parameters, states: States
    ) -> list[StageMemory]:
        first, last = chunks[0].first, chunks[-1].last
        microbatches = self.setup.train.microbatches
        kept = self._kept(chunks, counts)
        layer = self._worst_layer(chunks)
        entry, backward = layer.kept, layer.backward
        one = kept / max(counts)
        buffers = self._always(parameters, first, last)
        # Gradients are there before the backward if a buffer holds them, or an earlier micro-batch has left them.
        stay = self._has_buffer or microbatches > max(counts)
        begun = states.gradients if stay else 0.0
        head = self.per.gradients * self.weights.output if last and not stay and self.per.zero < 2 else 0.0
        rest = self.per.gradients * self._layer_parameters(chunks) if self.per.zero < 2 else 0.0
        most = states.gradients if stay else max(states.gradients - rest, 0.0)
        work = self._weight_gradient() + self._gathered_layers(chunks)
        half = self._half_gradients(parameters)
        if self.replicas > 1:  # they lie in the buckets of DistributedDataParallel, which stay
            buffers, half = buffers + half, 0.0
        phases = [
            self._memory("backward", states, begun + head, kept + backward, buffers + work),
            self._memory("last layer", states, most, kept - one + entry + backward, buffers + work + half),
            self._memory("optimizer", states, states.gradients, 0.0, buffers + half + self._at_the_end(parameters, first, last)),
        ]
        if last:
            phases.append(self._memory("loss", states, begun, kept, buffers + self._loss()))
        return phases

    def _memory(
        self, phase: str, states: States, gradients: float, activations: float, buffers: float
    ) -> StageMemory:
        return StageMemory(
            phase, states.weights, gradients, states.optimizer, activations, buffers, self._workspaces
        )

    @cached_property
    def _workspaces(self) -> float:
        """cuBLAS keeps a workspace for every thread that calls it: torch allocates and counts them."""
        sizes = _constants()["cublas_workspace_mib"]
        return float(sizes.get(self.family, sizes["other"]) * _constants()["cublas_handles"] * MIB)

    # ------------------------------------------------------------------ activations
    def _kept(self, chunks: list[Chunk], counts: tuple[int, ...]) -> float:
        total = 0.0
        for chunk, count in zip(chunks, counts, strict=True):
            layers = chunk.dense * self.dense.kept + chunk.sparse * self.sparse.kept
            if chunk.first and self.sizes.dropout:
                layers += self.sizes.spread * self.sizes.hidden  # mask of the dropout after the embedding
            if chunk.last:
                layers += norm(self.sizes) + norm_output(self.sizes)
            total += count * layers
            if chunk.last:
                total += (count - 1) * 4.0 * self.logits  # log-probabilities of those whose loss is known
        return total

    def _worst_layer(self, chunks: list[Chunk]) -> Saved:
        """The layer that is the hardest to run backward."""
        has_sparse = any(chunk.sparse for chunk in chunks)
        has_dense = any(chunk.dense for chunk in chunks)
        if has_sparse and has_dense:
            return max(self.dense, self.sparse, key=lambda saved: saved.kept + saved.backward)
        return self.sparse if has_sparse else self.dense if has_dense else Saved(0.0, 0.0, 0.0)

    # ------------------------------------------------------------------ buffers
    @property
    def _has_buffer(self) -> bool:
        """Gradients are accumulated in a buffer that is never freed."""
        return self.framework.state_precision == "mixed" and self.framework.accumulates_fp32

    def _always(self, parameters: Parameters, first: bool, last: bool) -> float:
        """Held through the whole step."""
        total = self.per.casts * (parameters.common + parameters.experts)
        trained = parameters.adapters if self.per.frozen else parameters.common + parameters.experts
        if self.replicas > 1 and self.per.zero < 2 and self.framework.state_precision != "mixed":
            total += self.per.gradients * trained  # the buckets of DistributedDataParallel, one more copy
        if self._divides_weights:
            total += self.per.low * self._root(first, last)  # the root of FSDP stays gathered from forward to backward
        if self.setup.parallel.pp > 1 and self.framework.name in _TORCH_PIPELINE:
            edges = (not first) + (not last)
            total += edges * self.setup.train.microbatches * self.sizes.stream()
            if last:
                total += self.setup.train.microbatches * self.sizes.e * self.logits  # outputs, to be joined
        return total

    @property
    def _divides_weights(self) -> bool:
        return self.per.zero == 3 and self.per.shards > 1

    def _root(self, first: bool, last: bool) -> float:
        return first * self.weights.embedding + last * self.weights.output

    def _loss(self) -> float:
        """Between the last layer's forward and backward, for the logits of one micro-batch."""
        framework = self.framework
        each = 10.0 if self.sizes.compiled else _LOSS_BYTES[framework.loss]
        if self.setup.train.microbatches > 1:
            each += _KEEPS_LOGITS.get(framework.name, 0.0)
        return each * self.logits

    def _weight_gradient(self) -> float:
        """The gradient of the MLP's last matrix, before it is added to what is there."""
        if self.framework.fused_accumulation or self.per.frozen:
            return 0.0
        m = self.setup.model
        return self.per.low * m.hidden * (m.ffn // self.setup.parallel.tp)

    def _layer_parameters(self, chunks: list[Chunk]) -> float:
        """Of the layer whose backward comes last, and of the embedding after it."""
        if self.per.frozen:
            return self.weights.adapters
        layer = self.weights.dense if chunks[0].dense else self.weights.sparse + self.weights.experts
        return layer + chunks[0].first * self.weights.embedding

    def _gathered_layers(self, chunks: list[Chunk]) -> float:
        """FSDP: weights of the layer at work and of the next, and gradients on their way to being divided."""
        if not self._divides_weights:
            return 0.0
        has_sparse = any(chunk.sparse for chunk in chunks)
        unit = max(self.weights.dense, self.weights.sparse + self.weights.experts if has_sparse else 0.0)
        gradients = 0.0 if self.per.frozen else self.per.low + self.framework.reduce_bytes
        return unit * (2 * self.per.low + gradients)

    def _half_gradients(self, parameters: Parameters) -> float:
        if self.framework.name not in _HALF_GRADIENTS:
            return 0.0
        return self.per.low * (parameters.common + parameters.experts)

    def _at_the_end(self, parameters: Parameters, first: bool, last: bool) -> float:
        """After the last backward."""
        step = self.per.step * (parameters.common / self.per.shards + parameters.experts / self.per.expert_shards)
        if self.setup.parallel.pp > 1 and last and self.framework.name in _TORCH_PIPELINE:
            step = max(step, self.setup.train.microbatches * self.sizes.e * self.logits)  # the outputs joined into one
        if self._divides_weights and not self.per.frozen:
            # Gradients of the root, whole, and on their way to being divided.
            step = max(step, (self.per.low + self.framework.reduce_bytes) * self._root(first, last))
        return step
