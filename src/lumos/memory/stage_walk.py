"""What the ranks of one pipeline stage hold at their worst moment: the one account for setups and traces.

The walk goes through the blocks of a stage as the step runs them, from the moment when it holds most micro-batches:
every block's forward pass and the moments of its backward pass, and the update.

FSDP2 holds: parameters outside the layers gathered from the forward pass to the end of the backward pass, and their
gradients whole until then; the weights of the layer at work; in the backward pass those of the next layer, gathered
ahead; whole gradients of the layer at work, and the previous layer's on their way to being divided. What is gathered
ahead comes with the first gradient that enters the model, so not while a loss outside the model runs backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import ceil
from typing import NamedTuple

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.program.sharding import Parameters, Sharding
from lumos.setup.gpus import gpu_named

MIB, GIB = float(1 << 20), float(1 << 30)


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


class Moment(NamedTuple):
    """Memory in use at one moment of the backward pass of a block."""

    activations: float  # beyond what earlier blocks keep
    gradients: float = 0.0  # of its parameters, so far, before ZeRO divides them
    begun: bool = True  # the backward pass has reached the model, and is not in a loss outside it


class BlockMemory(NamedTuple):
    """A layer, or what comes before or after all layers; bytes of one micro-batch."""

    place: int  # BEFORE, LAYER, AFTER
    kept: float  # between its forward and its backward pass
    forward: float  # most while it runs, beyond what earlier blocks keep
    parameters: Parameters  # before ZeRO divides them
    widest: float  # elements of the largest parameter
    moments: tuple[Moment, ...]


BEFORE, LAYER, AFTER = range(3)
Runs = Sequence[tuple[BlockMemory, int]]
"""Blocks in the order of the forward pass, and how many equal ones follow each other."""


class StageBlocks(NamedTuple):
    """The blocks of one stage, by chunk."""

    chunks: Sequence[Runs]
    sharding: Sharding
    vectors: float  # parameters with one moment more than the others
    temporaries: str = ""  # of the update: all, one
    adds: bool = False  # gradients are there before the first backward pass


def workspaces_of(gpu: str) -> float:
    """Workspaces of cuBLAS."""
    constants = read_table("memory.json")
    sizes = constants["cublas_workspace_mib"]
    return float(sizes.get(gpu_named(gpu).family, sizes["other"]) * constants["cublas_handles"] * MIB)


class StageFacts:
    """What a stage holds besides activations: its states, and the buffers of its framework and of ZeRO.

    `parameters` are those of the stage before ZeRO divides them; `ends` of them are outside the layers, and `vectors`
    have one moment more than the others.
    """

    def __init__(
        self, program: Program, stage: int, sharding: Sharding, parameters: Parameters, ends: float, vectors: float
    ) -> None:
        self.program, self.framework, self.layout = program, program.framework, program.layout
        self.sharding, self.parameters, self.ends = sharding, parameters, ends
        self.chunks, self.counts = program.chunks[stage], program.in_flight(stage)
        self.most, self.rounds = max(self.counts), program.rounds
        self.first, self.last = any(c.first for c in self.chunks), any(c.last for c in self.chunks)
        self.states = sharding.states(parameters, vectors, ends)
        self.trained = sum(sharding.trained(parameters))
        self.workspaces = workspaces_of(program.setup.cluster.gpu)

    def memory(self, phase: str, gradients: float, activations: float, buffers: float) -> StageMemory:
        weights, _, optimizer = self.states
        return StageMemory(phase, weights, gradients, optimizer, activations, buffers, self.workspaces)

    @cached_property
    def has_buckets(self) -> bool:
        """DistributedDataParallel holds one more copy of the gradients."""
        return self.framework.gradient_buckets and self.sharding.replicas > 1 and self.sharding.zero < 2

    @cached_property
    def divided(self) -> float:
        """Parameters that ZeRO 3 divides: experts of which every rank has its own stay whole."""
        return self.parameters.common + (self.parameters.experts if self.sharding.expert_shards > 1 else 0.0)

    @cached_property
    def stay_gathered(self) -> float:
        """Parameters that stay gathered between their uses: those outside the layers, and what ZeRO 3 keeps alive."""
        return min(self.ends + self.framework.live_parameters, self.divided)

    @cached_property
    def gathered(self) -> float:
        """Whole weights from the first forward to the last backward pass, and gradients that wait to be divided."""
        sharding, reduced = self.sharding, self.framework.reduce_bytes
        total = reduced * self.trained if sharding.accumulates_whole else 0.0
        if sharding.gathers == "once":  # and gradients are divided after the last micro-batch
            own = 0.0 if sharding.frozen else self.parameters.common + self.parameters.experts - self.divided
            return total + sharding.low * self.divided + reduced * (self.trained - own)
        return total + (sharding.low * self.stay_gathered if sharding.gathers == "every pass" else 0.0)

    @cached_property
    def always(self) -> float:
        """Buffers that are held through the whole step."""
        sharding, framework = self.sharding, self.framework
        whole = self.parameters.common + self.parameters.experts
        total = sharding.casts * whole + self.gathered
        if self.has_buckets:
            total += sharding.gradients * self.trained
        if sharding.gathers != "never" and sharding.low < sharding.weights:
            total += sharding.low * (whole - self.divided)  # casts
        if sharding.replicas > 1:
            total += framework.bucket_buffers * 1e6 * framework.bucket_mb
        if self.joins_outputs:
            # A buffer for every micro-batch of a chunk and each of its neighbours, and the outputs of the last one.
            neighbours = sum((not chunk.first) + (not chunk.last) for chunk in self.chunks)
            total += self.rounds * neighbours * self.layout.residual_bytes + self.outputs
        return total

    @cached_property
    def joins_outputs(self) -> bool:
        """The last stage of a pipeline joins the outputs of all micro-batches."""
        return self.program.setup.parallel.pp > 1 and self.framework.keeps_outputs

    @cached_property
    def outputs(self) -> float:
        """Logits of the micro-batches whose loss the stage computes."""
        return self.rounds * self.layout.element * float(self.layout.tokens * self.layout.vocab) if self.last else 0.0

    @cached_property
    def half_gradients(self) -> float:
        """16-bit gradients next to the fp32 buffer."""
        low = self.sharding.low
        return low * self.trained if self.framework.half_gradients and low < 4 else 0.0


def stage_walk(program: Program, stage: int, blocks: StageBlocks) -> StageMemory:
    """The worst moment of one stage."""
    walk = _Walk(program, stage, blocks)
    return walk.memory(*max(walk.moments(), key=lambda held: held[1] + held[2] + held[3]))


Held = tuple[str, float, float, float]
"""Phase, gradients, activations, buffers."""


class _Walk(StageFacts):
    """One stage, its blocks, and every moment that may be the worst."""

    def __init__(self, program: Program, stage: int, blocks: StageBlocks) -> None:
        self.blocks, self.runs = blocks, sorted((run for chunk in blocks.chunks for run in chunk), key=_place)
        every, ends = _sum(self.runs), _sum(run for run in self.runs if run[0].place != LAYER)
        super().__init__(program, stage, blocks.sharding, every, ends.common, blocks.vectors)
        self.end_gradients = sum(blocks.sharding.trained(ends))
        self.is_sharded = blocks.sharding.gathers == "every pass"
        # Gradients are there before the backward pass if a buffer holds them, or an earlier micro-batch left them. Of
        # DistributedDataParallel this is measured: its peak is the same with and without accumulation.
        buffer = self.has_buckets or self.framework.gradient_buffer_fp32
        self.stay = blocks.adds or buffer or self.rounds > self.most

    def moments(self) -> Iterator[Held]:
        """Every block forward and backward, from the last to the first, and the update.

        Of equal blocks, activations go as gradients come: the worst is at an end, or next to one, where the neighbours
        of a block are gathered or reduced, too.
        """
        counts = zip(self.blocks.chunks, self.counts, strict=True)
        before = sum(count * number * block.kept for runs, count in counts for block, number in runs)
        done = 0.0
        for index in range(len(self.runs) - 1, -1, -1):
            block, number = self.runs[index]
            inner, outer = (self.runs[i][0] if 0 <= i < len(self.runs) else None for i in (index - 1, index + 1))
            own = 0.0 if self.is_sharded and block.place != LAYER else self.sharding.gradient_bytes(block.parameters)
            for at in sorted({0, 1, number - 2, number - 1} & set(range(number)), reverse=True):
                left, there = before - (number - at) * block.kept, done + (number - 1 - at) * own
                gathered = self._gathered(block) if self.is_sharded else 0.0
                yield "forward", self._there(0.0), left + block.forward, self.always + 2 * gathered
                if self.is_sharded:
                    around = (block if at else inner), (block if at < number - 1 else outer)
                    yield from self._sharded(block, *around, left, there)
                else:
                    for moment in block.moments:
                        gradients = self._there(there, moment.gradients)
                        yield "backward", gradients, left + moment.activations, self.always
            before -= number * block.kept
            done += number * own
        yield from self._at_the_end(done)

    def _there(self, done: float, begun: float = 0.0) -> float:
        """Gradients of the blocks that have theirs, and those of the block at work, still whole."""
        if self.sharding.gathers == "once":  # they are in a buffer
            begun = 0.0
        return self.states.gradients if self.stay else done + begun

    def _gathered(self, block: BlockMemory | None) -> float:
        """Bytes of gathered weights of a layer, as they are computed with; those of other blocks stay gathered."""
        if block is None or block.place != LAYER:
            return 0.0
        common, experts, adapters = block.parameters
        divided = experts if self.sharding.expert_shards > 1 else 0.0
        return self.sharding.low * (common + adapters + divided)

    def _sharded(
        self, block: BlockMemory, inner: BlockMemory | None, outer: BlockMemory | None, left: float, done: float
    ) -> Iterator[Held]:
        """While gradients come that are whole on their way; those outside the layers are divided at the very end."""
        sharding, reduced = self.sharding, self.framework.reduce_bytes
        ahead, own = self._gathered(inner), self._gathered(block)
        behind = reduced * self._trained(outer)
        head = 0.0 if block.place == AFTER else sharding.low * self.after
        there = self._there(done)
        for moment in block.moments:
            buffers = self.always + moment.begun * (own + ahead) + behind + moment.gradients + head
            yield "backward", there, left + moment.activations, buffers
        if block.place == LAYER:
            whole = (sharding.low + reduced) * self._trained(block)
            yield "reduce", there, left, self.always + whole + ahead + head

    def _trained(self, block: BlockMemory | None) -> float:
        """Elements of the gradients of a layer."""
        return sum(self.sharding.trained(block.parameters)) if block is not None and block.place == LAYER else 0.0

    @cached_property
    def after(self) -> float:
        """Elements of the gradients of what comes after the layers."""
        return sum(sum(self.sharding.trained(block.parameters)) for block, _ in self.runs if block.place == AFTER)

    def _at_the_end(self, done: float) -> Iterator[Held]:
        """Gradients outside the layers are divided; the optimizer makes roots of all moments, or one by one."""
        sharding, always = self.sharding, self.always - self.gathered
        if self.is_sharded:
            both = sharding.low + self.framework.reduce_bytes
            yield "reduce", self._there(done), 0.0, always + both * self.end_gradients
        each, more = sharding.weights / sharding.shards, 0.0
        if self.blocks.temporaries == "all":
            more = each * self.trained
        elif self.blocks.temporaries == "one":
            more = 2 * ceil(each * max(block.widest for block, _ in self.runs))
        yield "optimizer", self.states.gradients, 0.0, always + self.half_gradients + more


def _place(run: tuple[BlockMemory, int]) -> int:
    return run[0].place


def _sum(runs: Iterable[tuple[BlockMemory, int]]) -> Parameters:
    """Parameters of all blocks."""
    common = experts = adapters = 0.0
    for block, number in runs:
        common += number * block.parameters.common
        experts += number * block.parameters.experts
        adapters += number * block.parameters.adapters
    return Parameters(common, experts, adapters)
