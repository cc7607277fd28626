"""Network: what a collective costs, by the links that its ranks share and by the algorithm that NCCL picks.

A cluster is a list of tiers, from the inside out: the NVLink domain, PCIe where NVLink joins less than a node, the
leaf switches, the spine. Each has a bandwidth of one GPU; `Group` says how many of its members are in one unit of each
tier. All GPUs of a cluster do the same at the same moment, so a group has the share of a link that its members bring:

    ring    min(bandwidth inside, members in one unit x bandwidth of one GPU in the next tier, for every tier it leaves)

The leaves of a fat tree with half the uplinks therefore slow a group with one node under each leaf, and not one whose
nodes are neighbours. Algorithms and protocols are lines: a latency, and the time of a byte. NCCL takes the fastest of
its own estimates, and so does this model. The latencies are NCCL's (src/graph/tuning.cc), the bandwidths and the
pipelining between both were fitted on published measurements (calibration/fit_collectives.py, data/network.json,
data/fabrics.toml; docs/networks.md has the errors).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, log2, sqrt
from typing import Any, NamedTuple

from lumos.costs.energy import InStepFactors
from lumos.data_files import read_table
from lumos.program.operators import Collective, Group
from lumos.setup.gpus import Gpu
from lumos.setup.sections import Cluster

_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}  # of the tensor through every link of a ring


@dataclass(frozen=True)
class Tier:
    """One level of the network: what one GPU has of it."""

    bandwidth: float  # bytes per microsecond, one direction, as the data sheet has it
    hop_us: float = 0.0  # of a step through it, beyond what NCCL counts for any network


class Line(NamedTuple):
    """One way to run a collective, up to a size: its latency, and its time for one byte of the whole tensor."""

    start_us: float
    us_per_byte: float
    fill: float = 0.0  # see `Habits`
    most_bytes: float = float("inf")


@dataclass(frozen=True)
class Habits:
    """What NCCL does on any cluster; data/network.json has the values and where they are from."""

    protocols: tuple[dict[str, float], ...]  # low latency (LL), the same in 128 bytes (LL128), simple
    inside_share: float  # of a domain's bandwidth, reached by all-reduce, whether it stays in the domain or goes on
    gather_share: float  # the same of gathers and scatters
    exchange_share: float  # the same of sends and receives, as in all-to-all
    nvls_us: float  # latency of a reduction by the NVLink switch
    nvls_member_us: float  # and for each member, all of which meet before and after
    sharp_us: float  # the same by the switches between nodes
    overhead_us: float  # of the host's proxy for each step of a ring that leaves the domain
    send_us: float  # of a message inside a domain
    send_far_us: float  # of a message to another domain
    peer_us: float  # for each further peer of an all-to-all inside the domain
    peer_far_us: float  # the same outside
    peer_gb_s: float  # what the channels of one peer move inside a domain, of a message up to peer_bytes
    peer_bytes: float
    fill_inside: float  # pipelining: this times the geometric mean of latency and transfer is added to both
    fill_between: float
    fill_exchange: float  # of all-to-all inside a domain


@dataclass(frozen=True)
class Fabric:
    """What a kind of network between nodes reaches; data/fabrics.toml has the values."""

    ring_share: float = 1.0  # of the adapters' bandwidth: gathers and scatters
    tree_share: float = 1.0  # all-reduce
    send_share: float = 1.0  # messages and all-to-all
    rail_share: float = 1.0  # exchanges between experts along rails, by kernels of their own (DeepEP)
    most_gb_s: float = float("inf")  # of one GPU, whatever the adapter has: what the host copies
    most_send_gb_s: float = float("inf")
    trees: bool = True  # whether all-reduce uses trees between nodes
    relay_us: float = 0.0  # of every step of a ring that leaves the domain
    crowding: float = 0.0  # trees take longer by this power of half the number of domains


@cache
def habits(family: str = "") -> Habits:
    """The values of data/network.json, with those of a family of GPUs in their place."""
    table = read_table("network.json")
    return Habits(tuple(table["protocols"].values()), **table["habits"] | table["of_family"].get(family, {}))


@dataclass(frozen=True)
class Network:
    """Tiers from the inside out, and how they are used."""

    tiers: tuple[Tier, ...]
    fabric: Fabric = field(default_factory=Fabric)
    mesh: int = 0  # GPUs of a domain whose links join pairs, without a switch; 0: a switch joins all
    nvls: float = 0.0  # share of a domain's bandwidth that all-reduce reaches in the NVLink switch; 0: it cannot
    sharp: bool = False  # switches between nodes reduce
    rails: bool = False  # exchanges send a token once to every node, along the rail of its GPU; NVLink spreads it
    penalty: float = 1.0  # of training, against a benchmark
    habits: Habits = field(default_factory=habits, repr=False)
    _known: dict[tuple[str, Group], tuple[Line, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def us(self, collective: Collective) -> float:
        """The time of a collective once all its ranks have arrived, in microseconds."""
        kind, size, group = collective
        if group.size <= 1 or size <= 0:
            return 0.0
        lines = self._known.get((kind, group))
        if lines is None:
            lines = self._known[kind, group] = tuple(self._lines(kind, group))
        if kind == "p2p" and group.inside > 1:
            return self.penalty * self._near_message(size, *lines)
        return self.penalty * min(_piped(line, size) for line in lines if size <= line.most_bytes)

    def kept(self, collective: Collective, share: float) -> float:
        """What a collective keeps of its speed where its kernels move this share of what a domain's links would give.

        That is all of it where the adapters bind it, and the share itself where the links inside do.
        """
        if collective.group.nodes == 1:
            return share
        inside = replace(self.inside, bandwidth=share * self.inside.bandwidth)
        slower = replace(self, tiers=(inside, *self.tiers[1:]))
        return self.us(collective) / slower.us(collective)

    @property
    def inside(self) -> Tier:
        """The NVLink domain."""
        return self.tiers[0]

    # ------------------------------------------------------------------ what the links give
    def near(self, members: int) -> float:
        """Bytes per microsecond of a ring through so many members of one domain."""
        links = (members - 1) / (self.mesh - 1) if 1 < members <= self.mesh else 1.0
        return self.tiers[0].bandwidth * links

    def far(self, group: Group) -> float:
        """Bytes per microsecond of all rings of a group between domains: the narrowest tier that they leave."""
        return min(held * self._of_gpu(tier, self.fabric.most_gb_s) for held, tier in self._left(group))

    def _left(self, group: Group) -> Iterator[tuple[int, Tier]]:
        """The tiers that a group uses beyond its domain, with its members in one unit of the tier inside of each."""
        for tier, held in zip(self.tiers[1:], (group.inside, *group.above), strict=False):
            if held < group.size:
                yield held, tier

    def _of_gpu(self, tier: Tier, most_gb_s: float) -> float:
        return min(tier.bandwidth, most_gb_s * 1e3)

    def _hop_us(self, group: Group) -> float:
        return max((tier.hop_us for _, tier in self._left(group)), default=0.0)

    # ------------------------------------------------------------------ what NCCL can do
    def _lines(self, kind: str, group: Group) -> Iterator[Line]:
        if kind == "p2p":
            yield self._message(group)
        elif kind == "all_to_all":
            yield self._exchange(group)
        else:
            for protocol in self.habits.protocols:
                if group.nodes == 1 or protocol["far_bytes"]:
                    yield self._ring(kind, group, protocol)
                if kind == "all_reduce" and group.nodes > 1 and self.fabric.trees:
                    yield self._tree(group, protocol)
            if kind == "all_reduce":
                yield from self._in_switches(group)

    def _ring(self, kind: str, group: Group, protocol: dict[str, float]) -> Line:
        """Every rank passes on what it has; one that leaves the domain is as fast as its slowest link."""
        passes = _PASSES[kind]
        steps, moved = passes * (group.size - 1), passes * (group.size - 1) / group.size
        reached = self.habits.inside_share if kind == "all_reduce" else self.habits.gather_share
        near = self.near(group.inside) * reached if group.inside > 1 else float("inf")
        if group.nodes == 1:
            start = protocol["base_us"] + steps * protocol["ring_us"]
            return Line(start, moved / (near * protocol["share"]), self.habits.fill_inside)
        share = self.fabric.tree_share if kind == "all_reduce" else self.fabric.ring_share
        bandwidth = min(near, self.far(group) * share)
        if protocol is self.habits.protocols[-1]:
            return Line(protocol["base_us"] + steps * self.fabric.relay_us, moved / bandwidth)
        far_steps = passes * (group.nodes - 1)
        far_us = protocol["tree_far_us" if group.inside == 1 else "ring_far_us"] + self._hop_us(group)
        near_us = max(protocol["ring_us"], self.habits.overhead_us)
        start = protocol["base_us"] + (steps - far_steps) * near_us + far_steps * far_us
        return Line(start, moved / (bandwidth * protocol["share"]), 0.0, protocol["far_bytes"])

    def _tree(self, group: Group, protocol: dict[str, float]) -> Line:
        """Two binary trees of domains, each with half of the tensor; inside a domain a chain."""
        near = self._chain(group, protocol)
        up_and_down = 2 * ceil(log2(group.nodes)) * (protocol["tree_far_us"] + self._hop_us(group))
        rate = max(near.us_per_byte, self._tree_us(group) / protocol["share"])
        return Line(near.start_us + up_and_down, rate, self.habits.fill_between)

    def _chain(self, group: Group, protocol: dict[str, float]) -> Line:
        """From one member of a domain to the next, and back."""
        start = protocol["base_us"] + 2 * (group.inside - 1) * protocol["tree_us"]
        rate = self.habits.inside_share * protocol["share"]
        return Line(start, self._chain_us(group) / rate if group.inside > 1 else 0.0)

    def _chain_us(self, group: Group) -> float:
        """Microseconds that the links of a domain need for one byte of a tensor that goes in and out."""
        return 2 * (group.size - 1) / group.size / self.near(group.inside)

    def _tree_us(self, group: Group) -> float:
        """The same of the adapters: a domain in the middle sends the tensor twice, one of only two domains once."""
        crowd: float = (group.nodes / 2) ** self.fabric.crowding
        return (1.0 if group.nodes == 2 else 2.0) * crowd / (self.far(group) * self.fabric.tree_share)

    def _in_switches(self, group: Group) -> Iterator[Line]:
        """Reductions by the NVLink switch of each domain, and by the switches between nodes."""
        simple, hop_us = self.habits.protocols[-1], self._hop_us(group)
        near = None
        if self.nvls and group.inside > 2:
            meeting = group.inside * self.habits.nvls_member_us
            near = Line(self.habits.nvls_us + meeting, self._chain_us(group) / self.nvls, self.habits.fill_inside)
        if near and group.nodes == 1:
            yield near
        elif near and self.fabric.trees:
            rounds = 2 * ceil(log2(group.nodes)) * (simple["tree_far_us"] + hop_us)
            rate = max(near.us_per_byte, self._tree_us(group))
            yield Line(near.start_us + rounds, rate, self.habits.fill_between)
        if self.sharp and group.nodes > 1:
            near = near or self._chain(group, simple)
            once = 1 / (self.far(group) * self.fabric.tree_share)
            start = near.start_us + self.habits.sharp_us + hop_us
            yield Line(start, max(near.us_per_byte, once), self.habits.fill_between)

    def _message(self, group: Group) -> Line:
        """From one rank to another, while all other ranks do the same."""
        if group.inside > 1:
            link = self.tiers[0].bandwidth / (self.mesh - 1 if self.mesh > 1 else 1)
            return Line(self.habits.send_us, 1 / (link * self.habits.exchange_share))
        widths = [self._of_gpu(tier, self.fabric.most_send_gb_s) for _, tier in self._left(group)]
        return Line(self.habits.send_far_us + self._hop_us(group), 1 / (min(widths) * self.fabric.send_share))

    def _near_message(self, size: float, line: Line) -> float:
        """Inside a domain: NCCL gives one peer few channels up to some size, and then more, until the link is full."""
        few = min(size, self.habits.peer_bytes) / (self.habits.peer_gb_s * 1e3)
        return line.start_us + max(few, size * line.us_per_byte)

    def _exchange(self, group: Group) -> Line:
        """All-to-all: every rank sends an equal part to every member, through all tiers at the same time."""
        size, here = group.size, group.inside
        parts = [(here - 1) / size / (self.near(here) * self.habits.exchange_share)] if here > 1 else []
        share = self.fabric.rail_share if self.rails else self.fabric.send_share
        for held, tier in self._left(group):
            width = self._of_gpu(tier, self.fabric.most_send_gb_s) * share
            parts.append((size - held) / size / width)
        start, fill = self.habits.send_us + (here - 1) * self.habits.peer_us, self.habits.fill_exchange
        if size > here:
            fill = self.habits.fill_between
            far = self.habits.send_far_us - self.habits.send_us + self._hop_us(group)
            start += far + (group.nodes - 1 if self.rails else size - here) * self.habits.peer_far_us
        return Line(start, max(parts), fill)


def _piped(line: Line, size: float) -> float:
    """Latency and transfer, and what a pipeline of chunks loses between both: large chunks fill it late."""
    transfer = size * line.us_per_byte
    return line.start_us + transfer + line.fill * sqrt(line.start_us * transfer)


def network_of(
    gpu: Gpu, fabric: str, factors: InStepFactors, cluster: Cluster | None = None, rails: bool = False
) -> Network:
    """The tiers of a GPU on a fabric of data/fabrics.toml; `cluster` has leaves, oversubscription and switches."""
    facts: dict[str, Any] = read_table("fabrics.toml")[fabric]
    reached = Fabric(
        facts["ring_share"], facts["tree_share"], facts["send_share"], facts.get("rail_share", facts["send_share"]),
        facts.get("most_gb_s", float("inf")), facts.get("most_send_gb_s", float("inf")), facts.get("trees", True),
        facts["relay_us"], facts.get("crowding", 0.0),
    )  # fmt: skip
    switched = _is_switched(gpu) if cluster is None or cluster.nvswitch is None else cluster.nvswitch
    shares: dict[str, float] = read_table("network.json")["nvls_share"]
    nvls = shares.get(gpu.family, 0.0) if switched and gpu.nvlink_domain > 1 else 0.0
    if cluster is not None and cluster.nvls is not None:
        nvls = nvls if cluster.nvls else 0.0
    return Network(
        _tiers(gpu, facts["hop_us"], cluster),
        reached,
        0 if switched else gpu.nvlink_domain,
        nvls,
        bool(cluster and cluster.sharp),
        rails,
        factors.penalty,
        habits(gpu.family),
    )


def _tiers(gpu: Gpu, hop_us: float, cluster: Cluster | None) -> tuple[Tier, ...]:
    """As many as `RankLayout` counts the members of: a domain, PCIe if NVLink ends inside a node, leaves, spine."""
    tiers = [Tier(gpu.local_gb_s * 1e3)]
    if 1 < gpu.nvlink_domain < gpu.gpus_per_node:
        tiers.append(Tier(gpu.pcie_gb_s * 1e3))
    adapter = gpu.inter_gb_s * 1e3
    spine = adapter / (cluster.oversubscription if cluster else 1.0)
    if cluster is not None and cluster.leaf_gpus:
        further: float = read_table("network.json")["spine_us"]
        return (*tiers, Tier(adapter, hop_us), Tier(spine, hop_us + further))
    return (*tiers, Tier(spine, hop_us))


def _is_switched(gpu: Gpu) -> bool:
    """Whether a switch joins the domain: boards of four GPUs and AMD's are joined pair by pair."""
    mesh = read_table("network.json")["mesh"]
    if gpu.family in mesh["families"]:
        return False
    return not 1 < gpu.nvlink_domain <= mesh["largest_board"]
