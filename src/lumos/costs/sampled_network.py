"""SampledNetwork: what a collective costs on a cluster whose collectives were timed.

A configuration that was sampled (kind, nodes, members in a node, groups at the same moment) is read off its table:
medians over message sizes, joined by straight lines on logarithmic axes. Any other follows from the table that is most
like it, by the bytes that each link has to move: kinds move different shares of a tensor, a ring between nodes uses the
adapters of all its members. A tier that was not sampled at all is that of the usual network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import exp, isfinite, log
from typing import Any, NamedTuple

import numpy as np

from lumos.costs.network import Network
from lumos.program.operators import Collective, Group

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
# Which tables serve a kind that was not sampled, the best first.
_LIKE = {
    "all_reduce": ("reduce_scatter", "all_gather", "all_to_all", "p2p"),
    "all_gather": ("reduce_scatter", "all_reduce", "all_to_all", "p2p"),
    "reduce_scatter": ("all_gather", "all_reduce", "all_to_all", "p2p"),
    "all_to_all": ("all_gather", "reduce_scatter", "all_reduce", "p2p"),
    "p2p": ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
}
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}  # of the tensor through every link of a ring
_START_US = {True: 12.0, False: 20.0}  # inside a node, and between nodes, where no message was short enough to show it
_MOST_TABLES, _MOST_KNOTS, _LARGEST = 10_000, 10_000, 1e18


class Configuration(NamedTuple):
    """Which ranks did what: a group of `nodes` × `inside` ranks, beside `groups` - 1 others of its kind."""

    kind: str
    nodes: int
    inside: int
    groups: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.inside


class Table(NamedTuple):
    """Medians of one configuration: bytes of the whole tensor, rising, and microseconds."""

    bytes: tuple[float, ...]
    us: tuple[float, ...]

    def start(self, usual_us: float) -> float:
        """What an empty message would take."""
        return min(usual_us, self.us[0])

    def at(self, size: float, usual_start_us: float) -> float:
        """Between medians along the line that joins them; beyond them at the bandwidth of the nearest."""
        if size <= self.bytes[0]:
            start = self.start(usual_start_us)
            return start + (self.us[0] - start) * size / self.bytes[0]
        if size >= self.bytes[-1]:
            return self.us[-1] * size / self.bytes[-1]
        return exp(float(np.interp(log(size), np.log(self.bytes), np.log(self.us))))


class Rings(NamedTuple):
    """Bytes per microsecond that the samples show, of large messages."""

    inside: Mapping[int, float]  # through every link of a ring in one node, by its members
    member: Mapping[int, float]  # of each member's adapter in a ring between nodes, by its members in a node


@dataclass(frozen=True)
class SampledNetwork:
    """The same questions as a Network answers.

    In training every GPU of a node communicates at the same moment: groups with fewer members in a node than it has
    GPUs share the node with others of their kind (`crowded`). Where such groups were sampled together their table
    counts; else each adapter gives what it gives when all are in use.
    """

    gpus_per_node: int
    tables: Mapping[Configuration, Table]
    rings: Rings
    usual: Network | None = None  # for tiers that were not sampled
    crowded: bool = True

    def us(self, collective: Collective) -> float:
        """The time of a collective, once all its ranks have arrived."""
        kind, size, group = collective
        if group.size <= 1 or size <= 0:
            return 0.0
        wanted = Configuration(kind, group.nodes, min(group.inside, group.size), self._groups(group))
        found = self._nearest.get(wanted) or self._find(wanted)
        if found is None:
            return self.usual.us(collective) if self.usual else 0.0
        table, start, ratio = found
        return start + (table.at(size, start) - start) * ratio

    def kept(self, collective: Collective, share: float) -> float:
        """What a collective keeps of its speed beside kernels; between nodes by the model of such links."""
        if collective.group.nodes == 1:
            return share
        return self.usual.kept(collective, share) if self.usual else 1.0

    def covers(self, group: Group) -> bool:
        """Whether the tier that a group communicates over was sampled."""
        return any((key.nodes == 1) == (group.nodes == 1) for key in self.tables)

    def _groups(self, group: Group) -> int:
        return max(1, self.gpus_per_node // group.inside) if self.crowded else 1

    @cached_property
    def _nearest(self) -> dict[Configuration, tuple[Table, float, float]]:
        """What was found for a configuration: a table, the time of an empty message, and the factor on the rest."""
        return {}

    def _find(self, wanted: Configuration) -> tuple[Table, float, float] | None:
        near = [key for key in self.tables if (key.nodes == 1) == (wanted.nodes == 1)]
        if not near:
            return None
        best = min(near, key=lambda key: _distance(key, wanted))
        ratio = self._us_per_byte(wanted) / self._us_per_byte(best)
        if best.groups != wanted.groups:
            ratio *= self._crowding(wanted) / self._crowding(best)
        table = self.tables[best]
        found = self._nearest[wanted] = table, table.start(_START_US[wanted.nodes == 1]), ratio
        return found

    def _us_per_byte(self, key: Configuration) -> float:
        """Microseconds that the links need for one byte of the tensor, by the rings of large messages."""
        if key.nodes == 1:
            link = _between(self.rings.inside, key.ranks)
            return (1.0 if key.kind == "p2p" else _PASSES.get(key.kind, 1.0) * (key.ranks - 1) / key.ranks) / link
        adapter = _between(self.rings.member, key.inside)
        if key.kind == "p2p":
            return 1 / adapter
        if key.kind == "all_to_all":  # every rank sends its own parts to the other nodes, through its own adapter
            return (key.ranks - key.inside) / key.ranks / adapter
        return _PASSES[key.kind] * (key.ranks - 1) / key.ranks / (key.inside * adapter)

    def _crowding(self, key: Configuration) -> float:
        """How much longer it takes beside the other groups of the node than alone."""
        if key.nodes == 1 or key.groups == 1:
            return 1.0
        alone, full = _between(self.rings.member, key.inside), _between(self.rings.member, self.gpus_per_node)
        return max(alone / full, 1.0)


def _distance(key: Configuration, wanted: Configuration) -> tuple[float, ...]:
    """By kind first, then by members in a node, ranks, and groups at the same moment."""
    kinds = (wanted.kind, *_LIKE[wanted.kind])
    ranks = abs(log(key.ranks / wanted.ranks))
    return (kinds.index(key.kind), abs(log(key.inside / wanted.inside)), ranks, abs(log(key.groups / wanted.groups)))


def _between(rates: Mapping[int, float], members: int) -> float:
    """The rate for a number of members: as sampled, between the two next to it, or that of the nearest."""
    return float(np.interp(members, list(rates), list(rates.values())))


def decode(facts: Mapping[str, Any], usual: Network | None = None, crowded: bool = True) -> SampledNetwork:
    """From the form that model files have, or ValueError and its like where that makes no sense."""
    if len(facts["tables"]) > _MOST_TABLES:
        raise ValueError("too many tables")
    tables = {}
    for row in facts["tables"]:
        key = Configuration(str(row["kind"]), _count(row["nodes"]), _count(row["inside"]), _count(row.get("groups", 1)))
        if key.kind not in KINDS or key.ranks < 2:
            raise ValueError("no collective")
        tables[key] = Table(_rising(row["bytes"]), _rising(row["us"], strictly=False))
        if len(tables[key].bytes) != len(tables[key].us):
            raise ValueError("no table")
    rings = Rings(*(_rates(facts["rings"][name]) for name in Rings._fields))
    if any(not (rings.inside if key.nodes == 1 else rings.member) for key in tables):
        raise ValueError("no rings")
    return SampledNetwork(_count(facts["gpus_per_node"]), tables, rings, usual, crowded)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 1 <= value <= 1 << 20:
        raise ValueError("no count")
    return value


def _rates(table: Mapping[str, Any]) -> dict[int, float]:
    found = {_count(int(members)): float(rate) for members, rate in table.items()}
    if not all(0 < rate < _LARGEST for rate in found.values()):
        raise ValueError("no rate")
    return dict(sorted(found.items()))


def _rising(values: Iterable[Any], strictly: bool = True) -> tuple[float, ...]:
    found = tuple(float(value) for value in values)
    if not 1 <= len(found) <= _MOST_KNOTS or not all(isfinite(x) and 0 < x < _LARGEST for x in found):
        raise ValueError("no numbers")
    if any(b < a or (strictly and a == b) for a, b in pairwise(found)):
        raise ValueError("not rising")
    return found
