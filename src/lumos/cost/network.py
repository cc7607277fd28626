"""Network: what a collective costs, by tier.

Ring and tree times after Thakur et al. (2005) and the bandwidth accounting of nccl-tests: a ring moves 2 (n - 1) / n of
the tensor through every link for an all-reduce and half of it for a gather or scatter. Between nodes every member of
the group that sits in a node brings its own adapter, so k members per node make k rings. Known error against the
samples of two clusters: see docs/accuracy.md.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import log2

from lumos.cost.in_step import Conditions
from lumos.program.collective import Collective
from lumos.setup.gpus import Gpu

_FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "p2p": 1.0}


@dataclass(frozen=True)
class Tier:
    """One level of the network: bytes per microsecond that a collective sees, and what a start and a step cost."""

    bandwidth: float
    start_us: float
    tree_us: float  # for every doubling of what a tree joins
    ring_us: float  # for every member of a ring


@dataclass(frozen=True)
class Network:
    """Two tiers, inside a node (an NVLink domain) and between nodes; `penalty` is for training, against a benchmark."""

    inside: Tier
    between: Tier
    penalty: float = 1.0
    exchange: float = 0.7  # of the bandwidth, that all-to-all reaches
    beside: float = 1.0  # of the speed between nodes, that is left while kernels run beside

    def us(self, collective: Collective) -> float:
        """The time of a collective, once all its ranks have arrived."""
        size, inside = collective.group
        if size <= 1 or collective.bytes <= 0:
            return 0.0
        if collective.kind == "p2p":
            return self.penalty * self._point_to_point(collective.bytes, inside > 1)
        if collective.kind == "all_to_all":
            return self.penalty * self._exchange(collective)
        share = (size - 1) / size * _FACTOR[collective.kind] * collective.bytes
        return self.penalty * (self._latency(collective) + share / self._ring_bandwidth(collective))

    def _ring_bandwidth(self, collective: Collective) -> float:
        group = collective.group
        if group.nodes == 1:
            return self.inside.bandwidth
        wide = group.inside * self.between.bandwidth
        return min(wide, self.inside.bandwidth) if group.inside > 1 else wide

    def _latency(self, collective: Collective) -> float:
        """A ring inside a node; between nodes a tree for all-reduce and a ring for the others, as NCCL has them."""
        group, rounds = collective.group, _FACTOR[collective.kind]
        local = self.inside.start_us + rounds * (group.inside - 1) * self.inside.ring_us
        if group.nodes == 1:
            return local
        if collective.kind == "all_reduce":
            return local + self.between.start_us + 2 * log2(group.nodes) * self.between.tree_us
        return local + self.between.start_us + (group.size - 1) * self.between.ring_us

    def _point_to_point(self, size: float, inside: bool) -> float:
        tier = self.inside if inside else self.between
        return tier.start_us + tier.tree_us + size / tier.bandwidth

    def _exchange(self, collective: Collective) -> float:
        size, inside = collective.group
        local = collective.bytes * (inside - 1) / size / (self.inside.bandwidth * self.exchange)
        remote = collective.bytes * (size - inside) / size / (self.between.bandwidth * self.exchange)
        start = self.inside.start_us + (self.between.start_us if size > inside else 0.0)
        return start + max(local, remote) + 0.2 * min(local, remote)


@cache
def _fabrics() -> dict[str, dict[str, float]]:
    return tomllib.loads(resources.files("lumos").joinpath("data/fabrics.toml").read_text("utf-8"))


def network_of(gpu: Gpu, fabric: str, conditions: Conditions) -> Network:
    """A GPU's two tiers, at the share of their peak that training reaches."""
    facts = _fabrics()[fabric]
    return Network(
        Tier(
            gpu.local_gb_s * 1e3 * conditions.inside_share, conditions.inside_start_us, 0.0, conditions.inside_step_us
        ),
        Tier(gpu.inter_gb_s * 1e3 * facts["share"], facts["start_us"], facts["tree_us"], facts["ring_us"]),
        conditions.penalty,
        beside=facts["beside"],
    )
