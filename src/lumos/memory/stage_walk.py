"""What the ranks of one pipeline stage hold at their worst moment: the one account for setups and traces."""

from __future__ import annotations

from functools import cached_property
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
