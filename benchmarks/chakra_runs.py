"""The Chakra files of a job, run as a plain graph: everything starts as soon as what it waits for has ended.

It stands between our simulator, which has the whole run, and ASTRA-sim, which has the same files and rules of its own:
with `one_at_a_time` every rank does one collective or send at a time, as there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from lumos.chakra.file_format import COLLECTIVES, Node, NodeType, read_chakra_file

KINDS = {number: name for name, number in COLLECTIVES.items()}
Place = tuple[int, int]  # rank and node id
_MEETING = -1  # in place of a rank: all ranks of a transfer are there; the number is that of the transfer


class Transfer(NamedTuple):
    """A collective or message: its kind as in COLLECTIVES, or p2p; what a rank puts in; its ranks and nodes."""

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    nodes: tuple[Place, ...]
    recorded_ns: float  # our own time of it, as the files have it


Price = Callable[[Transfer], float]  # nanoseconds


@dataclass
class ChakraRun:
    """All files NAME.RANK.et of a job."""

    nodes: dict[Place, Node]
    groups: dict[str, tuple[int, ...]]
    transfers: list[Transfer] = field(default_factory=list)

    @staticmethod
    def read(name: Path) -> ChakraRun:
        """The files of `NAME.et`."""
        stem = name.name.removesuffix(".et")
        group_file = name.with_name(f"{stem}.groups.json")
        groups = json.loads(group_file.read_text()) if group_file.exists() else {}
        files = {int(file.name.split(".")[-2]): file for file in name.parent.glob(f"{stem}.*.et")}
        nodes = {(rank, node.id): node for rank, file in sorted(files.items()) for node in read_chakra_file(file).nodes}
        run = ChakraRun(nodes, {number: tuple(ranks) for number, ranks in groups.items()})
        run.transfers = list(run._matched(len(files)))
        return run

    def _matched(self, world: int) -> Iterator[Transfer]:
        """Collectives, the n-th of a group on every rank; messages, by sender, receiver and tag."""
        found: dict[object, list[Place]] = defaultdict(list)
        seen: dict[object, int] = defaultdict(int)
        for place, node in sorted(self.nodes.items(), key=lambda item: item[0]):
            values = node.values
            if node.type == NodeType.COMM_COLL:
                key = place[0], values.get("pg_name", "")
                found["collective", values.get("pg_name", ""), seen[key]].append(place)
                seen[key] += 1
            elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                pair = values["comm_src"], values["comm_dst"], values["comm_tag"]
                found["message", *pair, seen[node.type, pair]].append(place)
                seen[node.type, pair] += 1
        for name, places in found.items():
            first = self.nodes[places[0]]
            ranks = tuple(rank for rank, _ in places)
            kind = KINDS[first.values["comm_type"]] if first.type == NodeType.COMM_COLL else "p2p"
            ours = 1e3 * min(self.nodes[place].duration_us for place in places)
            wanted = len(self.groups.get(str(first.values.get("pg_name", "")), range(world))) if kind != "p2p" else 2
            if len(places) != wanted:
                raise SystemExit(f"{name}: {len(places)} of {wanted} ranks take part")
            yield Transfer(kind, first.values["comm_size"], ranks, tuple(places), ours)

    def ms(self, price: Price, one_at_a_time: bool = False) -> float:
        """When the last node ends, in milliseconds."""
        number_of = {place: number for number, transfer in enumerate(self.transfers) for place in transfer.nodes}
        waits = {place: {(place[0], dep) for dep in node.data_deps} for place, node in self.nodes.items()}
        for number, transfer in enumerate(self.transfers):
            waits[_MEETING, number] = set().union(*(waits[place] for place in transfer.nodes))
        for place, number in number_of.items():
            waits[place] = {(_MEETING, number)}
        if one_at_a_time:
            self._chain(waits, number_of, self._ends(waits, number_of, price))
        return max(self._ends(waits, number_of, price).values(), default=0.0) / 1e6

    def _ends(self, waits: dict[Place, set[Place]], number_of: dict[Place, int], price: Price) -> dict[Place, float]:
        """When every node ends, in nanoseconds."""
        end: dict[Place, float] = {}
        for place in TopologicalSorter(waits).static_order():
            begin = max((end[other] for other in waits[place]), default=0.0)
            if place in number_of:
                begin += price(self.transfers[number_of[place]])
            elif place[0] != _MEETING:
                begin += max(1.0, 1e3 * self.nodes[place].duration_us)  # ASTRA-sim knows no work of no length
            end[place] = begin
        return end

    def _chain(self, waits: dict[Place, set[Place]], number_of: dict[Place, int], end: dict[Place, float]) -> None:
        """Let every collective or send of a rank wait for the one before it, in the order in which they met."""
        last: dict[int, Place] = {}
        for place in sorted(number_of, key=lambda place: (end[_MEETING, number_of[place]], number_of[place])):
            if self.nodes[place].type != NodeType.COMM_RECV:
                if place[0] in last:
                    waits[_MEETING, number_of[place]].add(last[place[0]])
                last[place[0]] = place
