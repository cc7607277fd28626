"""Transfers: what data-parallel ranks gather and reduce in a step. Time, bounds, messages and exports all read it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.program.operators import Collective, Group
from lumos.program.sharding import Parameters

ROLES = {
    "gather": "gather weights", "reduce": "reduce gradients", "reduce rest": "reduce gradients",
    "publish": "gather updated weights",
}  # fmt: skip
_LARGE = 1e8  # bytes of a transfer that runs at the full rate of its network


class Transfer(NamedTuple):
    """Parameters of one rank that are gathered or reduced together, once or several times in a row."""

    kind: str
    parameters: Parameters
    element: float  # bytes per parameter
    times: int = 1

    @property
    def bytes(self) -> float:
        return (self.parameters.common + self.parameters.experts) * self.element


class Transfers:
    """The data-parallel transfers of a program.

    With FSDP or overlapped reductions, passes are cut into units: each is gathered before it runs, and its gradients
    are reduced after its backward pass ("gather", "reduce"). What remains is reduced after the last backward pass
    ("reduce rest"), and ZeRO 1 and 2 gather the updated weights ("publish").
    """

    def __init__(self, program: Program) -> None:
        self.program, self.setup = program, program.setup
        self.layout, self.sharding, self.framework = program.layout, program.sharding, program.framework
        self.gathers = program.sharding.gathers

    # ------------------------------------------------------------------ when
    @cached_property
    def hides_reductions(self) -> bool:
        """Whether gradients of whole weights are reduced during the backward pass."""
        p = self.setup.parallel
        wanted = self.framework.reduces_beside(p.zero, p.pp) if p.dp_overlap is None else p.dp_overlap
        return wanted and self.layout.dp.size > 1 and not self.program.schedule.splits_backward

    @cached_property
    def overlap(self) -> bool:
        """Whether the network gathers or reduces during passes, unit by unit."""
        return self.hides_reductions or self.gathers != "never"

    @property
    def hides_publishing(self) -> bool:
        """Whether updated weights are gathered during the next forward pass (ZeRO 1 and 2)."""
        asked = self.setup.parallel.gather_overlap
        return self.hides_reductions if asked is None else asked

    @cached_property
    def units(self) -> int:
        """Parts into which a pass is cut for its transfers."""
        most = max(1, max(self.program.layers))
        if self.gathers != "never":
            return most
        return min(read_table("step.json")["most_units"], most) if self.hides_reductions else 1

    # ------------------------------------------------------------------ what
    def of(self, role: str, stage: int, held: Parameters, chunk: int = -1, unit: int = -1) -> Transfer:
        """The transfer of a role; `held` are the parameters of the chunk, `unit` 0 is the last to run backward."""
        if role == "gather":
            return self.gather(held)
        if role == "reduce":
            return self.reduce(held, self.late(stage, chunk), unit == 0)
        return self.reduce_rest(stage) if role == "reduce rest" else self.publish(stage)

    def gather(self, held: Parameters) -> Transfer:
        """Weights of one unit."""
        return Transfer("all_gather", self._unit(held), self.framework.gather_bytes)

    def reduce(self, held: Parameters, late: float = 0.0, is_last: bool = False) -> Transfer:
        """Gradients of one unit. `late` parameters of the chunk are reduced with the last unit that runs."""
        trained = self.sharding.trained(held)
        part = self._unit(trained._replace(common=trained.common - late))
        if is_last:
            part = part._replace(common=part.common + late)
        return Transfer(self.sharding.reduction, part, self.framework.reduce_bytes)

    def reduce_rest(self, stage: int) -> Transfer:
        """Gradients of a stage, after all passes."""
        trained = self.sharding.trained(self.program.stage_parameters(stage))
        return Transfer(self.sharding.reduction, trained, self.framework.reduce_bytes, self.program.reductions)

    def publish(self, stage: int) -> Transfer:
        """Updated weights of a stage."""
        trained = self.sharding.trained(self.program.stage_parameters(stage))
        return Transfer("all_gather", trained, self.framework.gather_bytes)

    def late(self, stage: int, chunk: int) -> float:
        """Parameters of a chunk whose gradient is complete only when the backward pass ends: the embedding."""
        return self.program.parameters.embedding if stage == chunk == 0 and not self.sharding.frozen else 0.0

    def _unit(self, parameters: Parameters) -> Parameters:
        return Parameters(parameters.common / self.units, parameters.experts / self.units)

    @cached_property
    def concurrent(self) -> Collective | None:
        """A large transfer as it runs during passes: only its rate counts. None without data parallelism."""
        near = self.layout.sharing[0] if self.sharding.zero else self.layout.dp
        kind = "all_gather" if self.gathers != "never" else self.sharding.reduction
        if near.size < 2:
            near, kind = self.layout.dp, "all_reduce"
        if near.size < 2 or self.setup.cluster.accelerator.is_cpu:
            return None
        return Collective(kind, _LARGE, near)

    # ------------------------------------------------------------------ as collectives
    def collectives(self, transfer: Transfer) -> Iterator[tuple[Collective, float]]:
        """The collectives of a transfer, and how often each runs.

        Experts have groups of their own. If only some replicas share what ZeRO shards, they reduce their part with the
        other replicas afterwards. The number of buckets is a fraction: a simulator of whole messages rounds it.
        """
        groups = (self.layout.sharing, self.layout.experts_sharing)
        for count, (near, far) in zip(transfer.parameters[:2], groups, strict=True):
            if not count:
                continue
            yield self._bucketed(transfer.kind, count * transfer.element, near)
            if transfer.kind != "all_gather":
                yield self._bucketed("all_reduce", count * transfer.element / near.size, far)

    def _bucketed(self, kind: str, size: float, group: Group) -> tuple[Collective, float]:
        bucket = self.framework.bucket_bytes(self.overlap)
        parts = max(1.0, size / bucket) if bucket and kind != "all_gather" else 1.0
        return Collective(kind, size / parts, group), parts

    # ------------------------------------------------------------------ to the host and back
    def offloaded_bytes(self, transfer: Transfer, held: Parameters) -> float:
        """Bytes between GPU and host: a rank's weights before their gather, its gradients after their reduction."""
        sharding = self.sharding
        if not sharding.offloads_weights:
            return 0.0
        if transfer.kind == "all_gather":
            return sharding.held(held) * sharding.weights / self.units
        common, experts, _ = transfer.parameters
        return (common / sharding.shards + experts / sharding.expert_shards) * sharding.gradients
