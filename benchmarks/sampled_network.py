"""SampledNetwork: what a collective costs on a cluster whose collectives were timed.

A configuration that was sampled (kind, nodes, members in a node) is read off its table: medians over message sizes,
joined by straight lines on logarithmic axes. Any other follows from the rings that the tables show: between nodes every
member of a group brings its adapter, inside a node every pair of members its own links. The tables are written by
calibration/fit_networks.py, which prints how far off they are on samples held apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lumos.errors import OptionError
from lumos.program.operators import Collective, Group

FOLDER = Path(__file__).parent / "networks"

_ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "p2p": 1.0}
_INSIDE_START_US, _BETWEEN_START_US, _STEP_US = 12.0, 20.0, 6.0  # no message was short enough to show them


class Table(NamedTuple):
    """Medians of one configuration: bytes of the whole tensor, rising, and microseconds."""

    bytes: tuple[float, ...]
    us: tuple[float, ...]

    def at(self, size: float, start_us: float) -> float:
        """Between medians along the line that joins them; beyond them at the bandwidth of the nearest."""
        if size <= self.bytes[0]:
            return min(start_us, self.us[0]) + max(self.us[0] - start_us, 0.0) * size / self.bytes[0]
        if size >= self.bytes[-1]:
            return self.us[-1] * size / self.bytes[-1]
        return exp(float(np.interp(log(size), np.log(self.bytes), np.log(self.us))))


class Rings(NamedTuple):
    """Bytes per microsecond that the samples show."""

    pair: float  # between two members of one node, in a ring
    member: Mapping[int, float]  # by members in a node: of each member's adapter, in a ring between nodes
    send_inside: float  # one message, alone
    send_between: float


@dataclass(frozen=True)
class SampledNetwork:
    """The same questions as a Network answers.

    `crowded`: as in training, where every GPU of a node communicates at the same moment. Groups that have fewer members
    in a node than it has GPUs then share the node with others of their kind, and each adapter gives what it gives when
    all are in use.
    """

    name: str
    gpus_per_node: int
    tables: Mapping[tuple[str, int, int], Table]
    rings: Rings
    crowded: bool = False
    beside: float = 1.0  # of the speed, that is left while kernels run beside; it was not sampled

    def us(self, collective: Collective) -> float:
        """The time of a collective, once all its ranks have arrived."""
        group = collective.group
        if group.size <= 1 or collective.bytes <= 0:
            return 0.0
        table = self.tables.get((collective.kind, group.nodes, min(group.inside, group.size)))
        alone = self._ring(collective) if table is None else table.at(collective.bytes, self._start(group))
        return alone * (self._crowding(group) if self.crowded else 1.0)

    def _start(self, group: Group) -> float:
        return _INSIDE_START_US if group.nodes == 1 else _BETWEEN_START_US

    def _ring(self, collective: Collective) -> float:
        """A configuration that was not sampled, from the rings of those that were."""
        group, rounds = collective.group, _ROUNDS[collective.kind]
        start = self._start(group)
        if collective.kind == "p2p":
            return start + collective.bytes / (self.rings.send_inside if group.nodes == 1 else self.rings.send_between)
        share = rounds * (group.size - 1) / group.size * collective.bytes
        if group.nodes == 1:
            return start + share / (self.rings.pair * (group.size - 1))
        return start + rounds * (group.nodes - 1) * _STEP_US + share / self._between(group.inside)

    def _between(self, inside: int) -> float:
        """All members' adapters together, as the nearest sampled number of members reaches."""
        nearest = min(self.rings.member, key=lambda members: abs(members - inside))
        return inside * self.rings.member[nearest]

    def _crowding(self, group: Group) -> float:
        """How much longer it takes beside the other groups of the node."""
        if group.nodes == 1 or group.inside >= self.gpus_per_node:
            return 1.0
        alone = self._between(group.inside) / group.inside
        return max(alone / (self._between(self.gpus_per_node) / self.gpus_per_node), 1.0)


@cache
def sampled_network(name: str, crowded: bool = False) -> SampledNetwork:
    """The network of a cluster whose collectives were sampled: perlmutter or vista."""
    if name not in sampled_networks():
        raise OptionError(f"network {name[:100]!r} was not sampled: use one of {', '.join(sampled_networks())}")
    return decode(json.loads((FOLDER / f"{name}.json").read_text("utf-8")), crowded)


@cache
def sampled_networks() -> tuple[str, ...]:
    """The names of the sampled networks."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def decode(facts: Mapping[str, Any], crowded: bool = False) -> SampledNetwork:
    """From the form that the data files have."""
    tables = {(t["kind"], t["nodes"], t["inside"]): Table(tuple(t["bytes"]), tuple(t["us"])) for t in facts["tables"]}
    rings = facts["rings"]
    member = {int(inside): float(value) for inside, value in rings["member"].items()}
    return SampledNetwork(
        facts["name"], facts["gpus_per_node"], tables,
        Rings(rings["pair"], member, rings["send_inside"], rings["send_between"]), crowded,
    )  # fmt: skip
