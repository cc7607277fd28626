"""What the ranks of one pipeline stage hold at their worst moment: the one account for setups and traces.

The walk goes through the blocks of a stage as the step runs them, from the moment when it holds most micro-batches:
every block's forward pass and the moments of its backward pass, and the update.

FSDP2 holds: parameters outside the layers gathered from the forward pass to the end of the backward pass, and their
gradients whole until then; the weights of the layer at work; in the backward pass those of the next layer, gathered
ahead; whole gradients of the layer at work, and the previous layer's on their way to being divided. What is gathered
ahead comes with the first gradient that enters the model, so not while a loss outside the model runs backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    buffers: float = 0.0


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
    """The blocks of one stage, by chunk, and what else determines its memory."""

    chunks: Sequence[Runs]
    sharding: Sharding
    parameters: Parameters  # of all blocks
    vectors: float = 0.0  # parameters with one moment more than the others
    temporaries: str = ""  # of the update: all, one
    adds: bool = False  # gradients are there before the first backward pass


Held = tuple[str, float, float, float]
"""Phase, gradients, activations, buffers."""


def workspaces_of(gpu: str) -> float:
    """Workspaces of cuBLAS."""
    constants = read_table("memory.json")
    sizes = constants["cublas_workspace_mib"]
    return float(sizes.get(gpu_named(gpu).family, sizes["other"]) * constants["cublas_handles"] * MIB)


def stage_walk(program: Program, stage: int, blocks: StageBlocks) -> StageMemory:
    """The worst moment of one stage."""
    walk = _Walk(program, stage, blocks)
    phase, gradients, activations, buffers = max(walk.moments(), key=lambda held: held[1] + held[2] + held[3])
    weights, _, optimizer = walk.states
    workspaces = workspaces_of(program.setup.cluster.gpu)
    return StageMemory(phase, weights, gradients, optimizer, activations, buffers, workspaces)


class _Walk:
    """One stage: its states, the buffers of its framework and of ZeRO, and every moment that may be the worst."""

    def __init__(self, program: Program, stage: int, blocks: StageBlocks) -> None:
        self.program, self.framework, self.layout = program, program.framework, program.layout
        self.blocks, self.sharding, self.parameters = blocks, blocks.sharding, blocks.parameters
        self.chunks, self.counts, self.rounds = program.chunks[stage], program.in_flight(stage), program.rounds
        self.runs: list[tuple[BlockMemory, int]] = []
        for block, number in sorted((run for chunk in blocks.chunks for run in chunk), key=_place):
            if self.runs and self.runs[-1][0] is block:
                number += self.runs.pop()[1]
            self.runs.append((block, number))
        ends = [block for block, _ in self.runs if block.place != LAYER]
        outside = sum(block.parameters.common for block in ends)
        trained = self.sharding.trained_number
        self.end_gradients = sum(trained(block.parameters) for block in ends)
        self.after = self.sharding.low * sum(trained(block.parameters) for block in ends if block.place == AFTER)
        self.is_sharded = self.sharding.gathers == "every pass"
        self.units = list(self._units()) if self.is_sharded else []
        self.states = self.sharding.states(self.parameters, blocks.vectors, outside)
        self.trained = trained(self.parameters)
        self.gathered, self.outputs = self._gathered(outside), self._outputs()
        self.always = self.gathered + self._buffers()
        # Gradients are there before the backward pass if a buffer holds them, or an earlier micro-batch left them. Of
        # DistributedDataParallel this is measured: its peak is the same with and without accumulation.
        buffer = self._has_buckets or self.framework.gradient_buffer_fp32
        self.stay = blocks.adds or buffer or self.rounds > max(self.counts)
        low = self.sharding.low  # 16-bit gradients of all weights, next to the fp32 buffer
        self.half = low * self.trained if self.framework.half_gradients and low < 4 else 0.0

    # ------------------------------------------------------------------ buffers
    @property
    def _divided(self) -> float:
        """Parameters that ZeRO 3 divides: experts of which every rank has its own stay whole."""
        return self.parameters.common + (self.parameters.experts if self.sharding.expert_shards > 1 else 0.0)

    @property
    def _has_buckets(self) -> bool:
        """DistributedDataParallel holds one more copy of the gradients."""
        return self.framework.gradient_buckets and self.sharding.replicas > 1 and self.sharding.zero < 2

    def _gathered(self, outside: float) -> float:
        """Whole weights from the first forward to the last backward pass, and gradients that wait to be divided.

        Parameters outside the layers stay gathered between their uses, and others that ZeRO 3 keeps alive.
        """
        sharding, reduced = self.sharding, self.framework.reduce_bytes
        total = reduced * self.trained if sharding.accumulates_whole else 0.0
        if sharding.gathers == "once":  # and gradients are divided after the last micro-batch
            own = 0.0 if sharding.frozen else self.parameters.common + self.parameters.experts - self._divided
            return total + sharding.low * self._divided + reduced * (self.trained - own)
        if sharding.gathers == "every pass":
            total += sharding.low * min(outside + self.framework.live_parameters, self._divided)
        return total

    def _buffers(self) -> float:
        """Buffers that are held through the whole step."""
        sharding, framework = self.sharding, self.framework
        whole = self.parameters.common + self.parameters.experts
        total = sharding.casts * whole + (sharding.gradients * self.trained if self._has_buckets else 0.0)
        if sharding.gathers != "never" and sharding.low < sharding.weights:
            total += sharding.low * (whole - self._divided)  # casts
        if sharding.replicas > 1:
            total += framework.bucket_buffers * 1e6 * framework.bucket_mb
        if self.program.setup.parallel.pp > 1 and framework.keeps_outputs:
            # A buffer for every micro-batch of a chunk and each of its neighbours, and the outputs of the last one.
            neighbours = sum((not chunk.first) + (not chunk.last) for chunk in self.chunks)
            total += self.rounds * neighbours * self.layout.residual_bytes + self.outputs
        return total

    def _outputs(self) -> float:
        """Logits of all micro-batches, which the last stage of a pipeline joins."""
        joins = self.program.setup.parallel.pp > 1 and self.framework.keeps_outputs
        last = joins and any(chunk.last for chunk in self.chunks)
        return self.rounds * self.layout.element * float(self.layout.tokens * self.layout.vocab) if last else 0.0

    # ------------------------------------------------------------------ moments
    def moments(self) -> Iterator[Held]:
        """Every block forward and backward, from the last to the first, and the update.

        Of equal blocks, activations go as gradients come: the worst is at an end, or next to one, where the neighbours
        of a block are gathered or reduced, too.
        """
        before = done = 0.0
        for runs, count in zip(self.blocks.chunks, self.counts, strict=True):
            before += count * sum(number * block.kept for block, number in runs)
        nearest = 2 if self.is_sharded else 1
        for index in range(len(self.runs) - 1, -1, -1):
            block, number = self.runs[index]
            own = 0.0 if self.is_sharded and block.place != LAYER else self.sharding.gradient_bytes(block.parameters)
            for later in range(number):  # blocks of the run that are done
                if later < nearest or later >= number - nearest:
                    yield from self._at(index, later, before - (later + 1) * block.kept, done + later * own)
            before -= number * block.kept
            done += number * own
        yield from self._at_the_end(done)

    def _at(self, index: int, later: int, left: float, done: float) -> Iterator[Held]:
        """One of equal blocks; `left` is what earlier ones keep, `done` gradients of later ones.

        Sharded gradients are whole on their way; those outside the layers are divided at the very end.
        """
        (block, number), sharding, reduced = self.runs[index], self.sharding, self.framework.reduce_bytes
        always, gathered, ahead, head = self.always + self._half(done), 0.0, 0.0, 0.0
        if self.is_sharded:
            ahead = self.units[index if later < number - 1 else index - 1][0]
            gathered = self.units[index][0] + ahead
            head = 0.0 if block.place == AFTER else self.after
            always += head + reduced * self.units[index if later else index + 1][1]
        there = self.states.gradients if self.stay else done
        if block.forward:
            before = self.states.gradients if self.stay else 0.0
            yield "forward", before, left + block.forward, self.always + 2 * (gathered - ahead)
        for moment in block.moments:
            begun = 0.0 if self.stay or sharding.gathers == "once" else moment.gradients
            buffers = always + moment.buffers + moment.begun * gathered
            if self.is_sharded:
                begun, buffers = 0.0, buffers + moment.gradients
            yield self._phase(index, later), there + begun, left + moment.activations, buffers
        if self.is_sharded and block.place == LAYER:
            own = (sharding.low + reduced) * self.units[index][1]
            yield "reduce", there, left, self.always + own + ahead + head

    def _phase(self, index: int, later: int) -> str:
        """What runs, by the name that reports have for it."""
        block, number = self.runs[index]
        if block.place == AFTER:
            return "loss"
        is_first = later == number - 1 and (not index or self.runs[index - 1][0].place == BEFORE)
        is_last = not later and (index + 1 == len(self.runs) or self.runs[index + 1][0].place == AFTER)
        return "last layer" if is_first and not is_last else "backward"

    def _half(self, done: float) -> float:
        """16-bit gradients of blocks that have theirs; in the buckets of DistributedDataParallel, of all blocks."""
        if self.sharding.replicas > 1 or not self.half:
            return self.half
        return self.half * done / max(self.sharding.gradient_bytes(self.parameters), 1.0)

    def _units(self) -> Iterator[tuple[float, float]]:
        """Bytes of a layer's weights that ZeRO 3 gathers, and how many gradients it divides; none of other blocks.

        The last row is for the neighbours that the first and the last block do not have.
        """
        divides_experts = self.sharding.expert_shards > 1
        for block, _ in self.runs:
            unit = block.parameters if divides_experts else block.parameters._replace(experts=0.0)
            is_layer = block.place == LAYER
            yield is_layer * self.sharding.low * sum(unit), is_layer * self.sharding.trained_number(unit)
        yield 0.0, 0.0

    def _at_the_end(self, done: float) -> Iterator[Held]:
        """Gradients outside the layers are divided; the optimizer makes roots of all moments, or one by one."""
        sharding, always = self.sharding, self.always - self.gathered
        if self.is_sharded:
            both = sharding.low + self.framework.reduce_bytes
            yield "reduce", self.states.gradients if self.stay else done, 0.0, always + both * self.end_gradients
        each, more = sharding.weights / sharding.shards, self.outputs
        if sharding.optimizer:
            more = max(more, sharding.step * sharding.stays * sharding.updated(self.parameters))
        if self.blocks.temporaries == "all":
            more = max(more, each * self.trained)
        elif self.blocks.temporaries == "one":
            more = max(more, 2 * ceil(each * max(block.widest for block, _ in self.runs)))
        yield "optimizer", self.states.gradients, 0.0, always + self.half + more


def _place(run: tuple[BlockMemory, int]) -> int:
    return run[0].place
