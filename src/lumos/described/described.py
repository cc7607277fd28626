"""Program: what each distinct rank of a training step does, holds, gathers, keeps and recomputes; no times.

One rank stands for all ranks of a pipeline stage that do the same. A stage runs blocks (a layer's forward pass, its
backward pass, embedding, head, optimizer), each so many times for every micro-batch. Time is the price of these blocks
(step/step.py) and memory is what they leave alive (program/memory.py): both read the same statement.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import copy
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from lumos.described.embedding_head import embedding, embedding_backward, head, head_backward, optimizer
from lumos.described.layer import LayerMemory, TransformerLayer
from lumos.described.muon import Matrices, expert_matrices, layer_matrices, orthogonalised
from lumos.described.primitives import collective
from lumos.program.layout import RankLayout
from lumos.program.op import Ops, part_of, saved_bytes
from lumos.program.sharding import (
    Chunk,
    Parameters,
    RankParameters,
    Sharding,
    chunks_of,
    layers_of,
    recomputed_layers,
)
from lumos.schedules import Phase, Schedule
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup

_ORDER = {"embedding": 0, "head grad": 0, "head": 2, "embedding grad": 2}  # of blocks in a pass; layers are between


Key = tuple[Hashable, ...]
MakeBlock = Callable[[Key, Callable[[], Ops]], Ops]
"""Makes the block of a key; the second argument makes the setup's own one."""


class Repeated(NamedTuple):
    """A block and how often a chunk runs it for one micro-batch.

    Blocks of one key are the same on every stage. A key begins with the name of the block: forward, recompute,
    backward, embedding, embedding grad, head, head grad or optimizer.
    """

    key: tuple[Hashable, ...]
    build: Callable[[], Ops]
    times: int = 1

    @property
    def name(self) -> str:
        return str(self.key[0])


class Program:
    """The program of a step. Its blocks are the setup's own, unless it is made by others."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.make: MakeBlock | None = None
        train = setup.train
        self.framework = framework_named(
            train.framework, train.precision, train.reduce_precision, train.weight_precision
        )
        self.layout = RankLayout(setup, self.framework)
        self._held: dict[int, Parameters] = {}  # by the first of the stages that hold the same

    def made_by(self, make: MakeBlock) -> Program:
        """The same with other blocks."""
        found = copy(self)
        found.make = make
        return found

    # ------------------------------------------------------------------ what each stage holds
    @cached_property
    def schedule(self) -> Schedule:
        return self.layout.schedule

    @cached_property
    def chunks(self) -> list[tuple[Chunk, ...]]:
        """[stage][chunk]."""
        return chunks_of(self.setup, self.framework.balances)

    @cached_property
    def like(self) -> list[int]:
        """For every stage, the first that holds the same layers."""
        first: dict[tuple[Chunk, ...], int] = {}
        return [first.setdefault(row, stage) for stage, row in enumerate(self.chunks)]

    @cached_property
    def layers(self) -> list[int]:
        """Layers of every virtual stage, in the order of the model."""
        return layers_of(self.setup, self.framework.balances)

    @cached_property
    def parameters(self) -> RankParameters:
        return RankParameters(self.layout)

    @cached_property
    def sharding(self) -> Sharding:
        return Sharding(self.layout)

    def stage_parameters(self, stage: int) -> Parameters:
        """That one rank of a stage would hold, were nothing divided by ZeRO."""
        first = self.like[stage]
        if first not in self._held:
            self._held[first] = self.parameters.of(self.chunks[first])
        return self._held[first]

    def vectors(self, stage: int) -> float:
        """Parameters that Muon leaves to Adam: embedding, output, norms and biases; none with another optimizer."""
        if self.setup.train.optimizer != "muon":
            return 0.0
        trained, chunk = self.sharding.trained(self.stage_parameters(stage)), self._whole(stage)
        if self.sharding.frozen:
            return sum(trained)
        layers = ((chunk.dense, False), (chunk.sparse, True))
        matrices = (n * matrix.elements for n, sparse in layers if n for matrix in layer_matrices(self.layout, sparse))
        return max(trained.common - sum(matrices), 0.0)

    def tensors(self, stage: int) -> int:
        """Parameter tensors that one rank of a stage updates."""
        m = self.setup.model
        linears = 4 + (3 if m.gated else 2)
        in_layer = linears * (2 if m.bias else 1) + (4 if m.norm == "layer" and m.bias else 2)
        return in_layer * sum(chunk.layers for chunk in self.chunks[stage]) + 3

    @property
    def rounds(self) -> int:
        """Micro-batches that go through one chunk in a step: all, or those of one way."""
        return self.setup.train.microbatches // self.schedule.copies

    @property
    def reductions(self) -> int:
        """How often a gradient is reduced in a step: after every micro-batch that adds to it, or after the last."""
        return self.rounds if self.sharding.reduces_every_microbatch else 1

    def in_flight(self, stage: int) -> tuple[int, ...]:
        """Micro-batches that a stage holds of each chunk, at the moment it holds most."""
        p = self.setup.parallel
        if p.pp == 1 and p.vpp == 1:
            return (1,)
        return self.schedule.in_flight(stage, p.pp, p.vpp, self.setup.train.microbatches)

    # ------------------------------------------------------------------ what it runs
    def blocks(self, chunk: Chunk, phase: Phase, whole: bool = False) -> Iterator[Repeated]:
        """The blocks of a chunk in one phase, for one micro-batch.

        Where the schedule splits the backward pass, BACKWARD holds recomputation and input gradients, and WEIGHTS the
        rest; otherwise, or where the `whole` pass is asked for, BACKWARD holds all of it.
        """
        split = self.schedule.splits_backward and not whole
        if phase == Phase.WEIGHTS and not split:
            return
        for layer, count, again in self._layers(chunk):
            if phase == Phase.FORWARD:
                yield self._block(("forward", layer.sparse), layer.forward, count)
            elif phase == Phase.BACKWARD and again:
                yield self._block(("recompute", layer.sparse), layer.recomputed, again)
            if phase != Phase.FORWARD:
                yield self._gradients(("backward", layer.sparse), layer.backward, phase, split, count)
        if phase == Phase.FORWARD:
            yield from [self._block(("embedding",), lambda: embedding(self.layout))] if chunk.first else []
            yield from [self._block(("head",), lambda: head(self.layout))] if chunk.last else []
            return
        if chunk.first:
            yield self._gradients(("embedding grad",), lambda: embedding_backward(self.layout), phase, split)
        if chunk.last:
            yield self._gradients(("head grad",), lambda: head_backward(self.layout), phase, split)

    def in_order(self, chunk: Chunk, phase: Phase, whole: bool = False) -> list[Repeated]:
        """Every block that runs in a pass of one micro-batch, in order of time, one after the other."""
        found: list[Repeated] = []
        for block in sorted(self.blocks(chunk, phase, whole), key=lambda block: _ORDER.get(block.name, 1)):
            if found and found[-1].name == "recompute" and block.name == "backward":
                again = found[-1]
                del found[-again.times :]
                # A layer is recomputed right before its backward pass; where only some are, the first layers are.
                found += [block] * (block.times - again.times) + [again, block] * again.times
            else:
                found += [block] * block.times
        return found

    def optimizer(self, stage: int) -> Repeated:
        """The GPU's part of the update, once a step."""
        sharding, tensors = self.sharding, self.tensors(stage)
        size = sharding.stays * sharding.updated(self.stage_parameters(stage))
        if self.setup.train.optimizer != "muon":
            return self._block(("optimizer", round(size), tensors), lambda: optimizer(self.layout, size, tensors))
        chunk = self._whole(stage)
        return self._block(("optimizer", round(size), tensors, chunk), lambda: self._muon(chunk, size, tensors))

    def _block(self, key: Key, build: Callable[[], Ops], times: int = 1) -> Repeated:
        return Repeated(key, build if self.make is None else partial(self.make, key, build), times)

    def _whole(self, stage: int) -> Chunk:
        """The layers of a stage as one chunk."""
        return Chunk(sum(c.dense for c in self.chunks[stage]), sum(c.sparse for c in self.chunks[stage]))

    def _muon(self, chunk: Chunk, size: float, tensors: int) -> Ops:
        """The matrices that one rank orthogonalises, gathered where gradients are divided; then the update of all."""
        s, sharding = self.layout, self.sharding
        if sharding.frozen:
            return optimizer(s, size, tensors)
        found: list[Matrices] = []
        for sparse, layers in ((False, chunk.dense), (True, chunk.sparse)):
            common = layer_matrices(s, sparse) if layers else []
            found += [matrix._replace(number=layers / sharding.shards) for matrix in common]
        experts = expert_matrices(s) if chunk.sparse else []
        share = chunk.sparse / sharding.expert_shards
        found += [matrix._replace(number=matrix.number * share) for matrix in experts]
        gathered: Ops = []
        if sharding.zero >= 2:
            whole = 2.0 * sharding.shards * sum(matrix.elements for matrix in found)
            near = s.sharing[0]
            gathered = [
                *collective("all_gather", whole, near, name="gather matrices"),
                *collective("reduce_scatter", whole, near, name="scatter matrices"),
            ]
        return [*gathered, *orthogonalised(s, found), *optimizer(s, size, tensors)]

    def _layers(self, chunk: Chunk) -> Iterator[tuple[TransformerLayer, int, int]]:
        """Each kind of layer, how many there are, and of how many something is recomputed."""
        dense, sparse = recomputed_layers(self.setup.train, chunk)
        if chunk.dense:
            yield TransformerLayer(self.layout), chunk.dense, dense
        if chunk.sparse:
            yield TransformerLayer(self.layout, sparse=True), chunk.sparse, sparse

    def _gradients(
        self, key: tuple[Hashable, ...], build: Callable[[], Ops], phase: Phase, split: bool, count: int = 1
    ) -> Repeated:
        """A backward block: whole, or the half that belongs to this phase."""
        whole = self._block(key, build, count)
        if not split:
            return whole

        def half() -> Ops:
            ops = whole.build()
            return part_of(ops, [op.weight_gradient == (phase == Phase.WEIGHTS) for op in ops])

        return Repeated((*key, phase), half, count)

    # ------------------------------------------------------------------ what it keeps
    def layer_memory(self, sparse: bool, again: bool = True) -> LayerMemory:
        """Of one layer and one micro-batch; `again`: of one that is recomputed, where the setup recomputes any.

        Layers that are recomputed together are all there while the last of them goes back.
        """
        train = self.setup.train
        memory = _layer_memory(self._keyed, sparse, train.recompute if again else "none")
        together = min(train.recompute_group, max(self.layers)) if again and train.recompute == "full" else 1
        if together <= 1:
            return memory
        return memory._replace(backward=memory.backward + (together - 1) * self.layer_memory(sparse, False).kept)

    @cached_property
    def _keyed(self) -> _KeyedLayout:
        return _KeyedLayout(self.layout)

    @cached_property
    def end_bytes(self) -> tuple[float, float]:
        return _end_bytes(self._keyed)

    def kept_bytes(self, chunk: Chunk) -> float:
        """What one micro-batch keeps of a chunk between its forward and its backward pass, on the GPU."""
        kept = (1 - self.offloaded_share) * self._layers_keep(chunk)
        kept += self.end_bytes[0] if chunk.first else 0.0
        return kept + (self.end_bytes[1] if chunk.last else 0.0)

    @cached_property
    def offloaded_share(self) -> float:
        """Of what the layers of a stage keep, the share that is on the host from the forward to the backward pass."""
        return min(1.0, self.setup.train.offload_layers * self.setup.parallel.pp / self.setup.model.layers)

    def offloaded_bytes(self, chunk: Chunk) -> float:
        """What one micro-batch of a chunk sends to the host, and fetches again."""
        return self.offloaded_share * self._layers_keep(chunk) if self.offloaded_share else 0.0

    def _layers_keep(self, chunk: Chunk) -> float:
        """Wherever it is."""
        kept, some = 0.0, recomputed_layers(self.setup.train, chunk)
        for sparse, layers, again in zip((False, True), chunk, some, strict=False):
            kept += self.inputs(again) * self.layer_memory(sparse).kept if again else 0.0
            kept += (layers - again) * self.layer_memory(sparse, False).kept if layers > again else 0.0
        return kept

    def inputs(self, layers: int) -> int:
        """Of so many recomputed layers, those whose input is kept: one of every group."""
        train = self.setup.train
        return -(-layers // train.recompute_group) if train.recompute == "full" else layers


class _KeyedLayout:
    """A layout that is equal to another where their layers keep the same, so that a search works it out once."""

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        t, p = layout.train, layout.parallel
        self.key = (
            layout.model, t.micro_batch, t.seq, t.precision, t.recompute, t.recompute_modules,
            t.partition_activations, t.compile, t.framework, t.fp8_scaling,
            t.attention, t.mode, t.imbalance, t.capacity, p.tp, p.cp, p.cp_type, layout.cp_heads,
            p.sequence_parallel, p.ep, layout.expert_tp, layout.gathers_tokens,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeyedLayout) and self.key == other.key


@lru_cache(maxsize=4096)
def _layer_memory(keyed: _KeyedLayout, sparse: bool, recompute: str) -> LayerMemory:
    return TransformerLayer(keyed.layout, sparse, recompute).memory


@lru_cache(maxsize=4096)
def _end_bytes(keyed: _KeyedLayout) -> tuple[float, float]:
    return saved_bytes(embedding(keyed.layout)), saved_bytes(head(keyed.layout))
