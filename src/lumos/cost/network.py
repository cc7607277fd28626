"""Network: what a collective costs, by tier.

Ring and tree times after Thakur et al. (2005) and the bandwidth accounting of nccl-tests: a ring moves 2 (n - 1) / n of
the tensor through every link for an all-reduce and half of that for a gather or scatter. Between nodes every member of
the group in a node uses its own adapter, so k members per node make k rings. What collectives reach of the peak is in
data/in_step.json (inside a node) and data/fabrics.toml (between nodes).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from lumos.cost.in_step import InStepFactors
from lumos.data_files import read_table
from lumos.program.operators import Collective
from lumos.setup.gpus import Gpu

_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}  # of the tensor through every link of a ring


@dataclass(frozen=True)
class Tier:
    """One level of the network: the bandwidth that a collective reaches, and its latencies."""

    bandwidth: float  # bytes per microsecond
    start_us: float  # of any collective
    tree_us: float  # for every doubling of what a tree joins
    ring_us: float  # for every member of a ring


@dataclass(frozen=True)
class Network:
    """Two tiers: inside a node (an NVLink domain) and between nodes."""

    inside: Tier
    between: Tier
    penalty: float = 1.0  # of training, against a benchmark
    exchange_share: float = 1.0  # of a tier's bandwidth, reached by all-to-all
    exchange_serial: float = 0.0  # share of the shorter part of all-to-all that is not overlapped with the longer
    beside: float = 1.0  # share of the bandwidth between nodes that is left while kernels run at the same time

    def us(self, collective: Collective) -> float:
        """The time of a collective once all its ranks have arrived, in microseconds."""
        size, inside = collective.group
        if size <= 1 or collective.bytes <= 0:
            return 0.0
        if collective.kind == "p2p":
            return self.penalty * self._point_to_point(collective.bytes, inside > 1)
        if collective.kind == "all_to_all":
            return self.penalty * self._all_to_all(collective)
        moved = (size - 1) / size * _PASSES[collective.kind] * collective.bytes
        return self.penalty * (self._latency(collective) + moved / self._ring_bandwidth(collective))

    def _ring_bandwidth(self, collective: Collective) -> float:
        group = collective.group
        if group.nodes == 1:
            return self.inside.bandwidth
        wide = group.inside * self.between.bandwidth
        return min(wide, self.inside.bandwidth) if group.inside > 1 else wide

    def _latency(self, collective: Collective) -> float:
        """A ring inside a node; between nodes a tree for all-reduce and a ring for the others, as NCCL has them."""
        group, passes = collective.group, _PASSES[collective.kind]
        local = self.inside.start_us + passes * (group.inside - 1) * self.inside.ring_us
        if group.nodes == 1:
            return local
        if collective.kind == "all_reduce":
            return local + self.between.start_us + 2 * log2(group.nodes) * self.between.tree_us
        return local + self.between.start_us + (group.size - 1) * self.between.ring_us

    def _point_to_point(self, size: float, inside: bool) -> float:
        tier = self.inside if inside else self.between
        return tier.start_us + tier.tree_us + size / tier.bandwidth

    def _all_to_all(self, collective: Collective) -> float:
        """Every rank sends an equal part to every member: those inside its node and those outside, side by side."""
        size, inside = collective.group
        local = collective.bytes * (inside - 1) / size / (self.inside.bandwidth * self.exchange_share)
        remote = collective.bytes * (size - inside) / size / (self.between.bandwidth * self.exchange_share)
        start = self.inside.start_us + (self.between.start_us if size > inside else 0.0)
        return start + max(local, remote) + self.exchange_serial * min(local, remote)


def network_of(gpu: Gpu, fabric: str, factors: InStepFactors) -> Network:
    """The two tiers of a GPU on a fabric of data/fabrics.toml, at the share of their peak that training reaches."""
    f, between = factors, read_table("fabrics.toml")[fabric]
    return Network(
        Tier(gpu.local_gb_s * 1e3 * f.inside_share, f.inside_start_us, 0.0, f.inside_step_us),
        Tier(gpu.inter_gb_s * 1e3 * between["share"], between["start_us"], between["tree_us"], between["ring_us"]),
        f.penalty,
        f.exchange_share,
        f.exchange_serial,
        between["beside"],
    )
