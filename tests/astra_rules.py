"""ASTRA-sim's own rules on written Chakra files, in plain Python: it stands for ASTRA-sim where that is not built.

From its sources (workload/Workload.cc, HardwareResource.cc, Statistics.cc, system/CommunicatorGroup.cc, and the feeder
of Chakra): which nodes its statistics accept, which collectives it knows, what it asks of groups, and how it runs the
nodes of a rank. A rank runs one node of the host, one piece of work and one collective or send at a time, and any
number of receives; of the nodes that could start it starts the one with the smallest id.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lumos.chakra.file_format import Node, NodeType, read_chakra_file

KNOWN_COLLECTIVES = {0, 2, 5, 6, 7}  # all-reduce, all-gather, broadcast, all-to-all, reduce-scatter
BROADCAST = 5  # replayed at its own length, without waiting for others
MOST_CHUNKS = 64  # that a usual system file cuts a collective into; an all-gather of fewer bytes never ends
MOST_GROUP = 2147  # its number times a million must be an int
ALL_GATHER = 2
LONGEST = (1 << 31) - 1  # bytes of a message whose sender waits (`SimSendCaller` has an int): a longer one never ends

Place = tuple[int, int]  # rank, id


@dataclass
class Workload:
    """The files of all ranks, as ASTRA-sim is given them."""

    ranks: list[dict[int, Node]]
    groups: dict[int, list[int]]
    pieces: int = 1  # that every collective is cut into (`preferred-dataset-splits`)

    @staticmethod
    def read(folder: Path, name: str) -> Workload:
        files = sorted(folder.glob(f"{name}.*.et"), key=lambda file: int(file.name.split(".")[-2]))
        assert [int(file.name.split(".")[-2]) for file in files] == list(range(len(files))), "ranks count from 0"
        path = folder / f"{name}.groups.json"
        groups = json.loads(path.read_text()) if path.exists() else {}
        ranks = [{node.id: node for node in read_chakra_file(file).nodes} for file in files]
        system = folder / f"{name}.system.json"
        pieces = json.loads(system.read_text())["preferred-dataset-splits"] if system.exists() else 1
        return Workload(ranks, {int(number): members for number, members in groups.items()}, pieces)

    @property
    def nodes(self) -> list[tuple[int, Node]]:
        return [(rank, node) for rank, nodes in enumerate(self.ranks) for node in nodes.values()]


def check(folder: Path, name: str, host: bool = False, seeds: int = 3) -> Workload:
    """Assert that ASTRA-sim would run the files to their end; `host`: with nodes of the host, that it counts not."""
    workload = Workload.read(folder, name)
    assert workload.ranks
    for rank, node in workload.nodes:
        check_node(workload, rank, node, host)
    for rank, nodes in enumerate(workload.ranks):
        check_dependencies(rank, nodes)
    check_groups(workload)
    check_messages(workload)
    for seed in range(seeds):  # the order must not depend on what the network makes of the transfers
        for meets in (True, False):
            check_order(workload, Run(workload, random.Random(seed), meets))
    return workload


def check_node(workload: Workload, rank: int, node: Node, host: bool) -> None:
    place = f"rank {rank}, node {node.id} ({node.name})"
    assert node.type in (NodeType.COMP, NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV), place
    on_host = bool(node.values.get("is_cpu_op", False))
    assert not on_host or (host and node.type == NodeType.COMP), f"{place} is of the host"
    if node.type == NodeType.COMP:
        return
    size = node.values["comm_size"]
    assert size > 0, place
    if node.type == NodeType.COMM_COLL:
        assert node.values["comm_type"] in KNOWN_COLLECTIVES, place
        assert node.values["comm_type"] != 2 or size >= MOST_CHUNKS, f"{place} never ends"
        group = int(node.values["pg_name"])
        assert group in workload.groups, f"{place}: group {group}"
        assert rank in workload.groups[group], f"{place}: not in group {group}"
        parts = 1 if node.values["comm_type"] == ALL_GATHER else len(workload.groups[group])
        assert size / parts / workload.pieces <= LONGEST, f"{place} has messages of more than 2 GiB"
    else:
        ends = node.values["comm_src"], node.values["comm_dst"]
        assert ends[0] != ends[1], place
        assert all(0 <= end < len(workload.ranks) for end in ends), place
        assert rank == ends[node.type == NodeType.COMM_RECV], place
        assert size <= LONGEST, f"{place} is a message of more than 2 GiB"


def check_dependencies(rank: int, nodes: dict[int, Node]) -> None:
    """Every node that is waited for is there, and none waits for itself by way of others."""
    left = {number: set(node.data_deps) for number, node in nodes.items()}
    after: dict[int, list[int]] = defaultdict(list)
    for number, others in left.items():
        for other in others:
            assert other in nodes, f"rank {rank}, node {number} waits for {other}, which is not there"
            after[other].append(number)
    ready, done = [number for number, others in left.items() if not others], 0
    while ready:
        done += 1
        number = ready.pop()
        for other in after[number]:
            left[other].discard(number)
            if not left[other]:
                ready.append(other)
    assert done == len(nodes), f"rank {rank}: {len(nodes) - done} nodes wait for each other"


def check_groups(workload: Workload) -> None:
    for number, members in workload.groups.items():
        assert 0 < number <= MOST_GROUP, number
        assert len(set(members)) == len(members), number
        assert set(members) <= set(range(len(workload.ranks))), number


def check_messages(workload: Workload) -> None:
    """Every send has its receive, with the same tag and size."""
    sides: dict[int, Counter[Any]] = {NodeType.COMM_SEND: Counter(), NodeType.COMM_RECV: Counter()}
    for _, node in workload.nodes:
        if node.type in sides:
            told = node.values
            sides[node.type][told["comm_src"], told["comm_dst"], told["comm_tag"], told["comm_size"]] += 1
    assert sides[NodeType.COMM_SEND] == sides[NodeType.COMM_RECV]
    assert max(sides[NodeType.COMM_SEND].values(), default=1) == 1, "two messages have one tag"


def check_order(workload: Workload, run: Run) -> None:
    """All members of a group ran the same collectives, of the same sizes, in the same order."""
    for number, members in workload.groups.items():
        first = run.issued.get((members[0], number), [])
        for rank in members:
            assert run.issued.get((rank, number), []) == first, f"group {number}: rank {rank} differs"


@dataclass
class Run:
    """A run of the feeder with transfers of random length; fails if it comes to a halt before the end."""

    workload: Workload
    random: random.Random
    meets: bool  # a sender waits until its receiver is there (--rendezvous-protocol=true)
    issued: dict[tuple[int, int], list[Any]] = field(default_factory=lambda: defaultdict(list))  # by rank and group
    events: list[tuple[int, int, int]] = field(default_factory=list)  # time, rank, id
    arrived: dict[Any, list[tuple[Place, int]]] = field(default_factory=lambda: defaultdict(list))
    end: int = 0

    def __post_init__(self) -> None:
        ranks = self.workload.ranks
        self.left = [{n: set(node.data_deps) for n, node in nodes.items()} for nodes in ranks]
        self.after: list[dict[int, list[int]]] = [defaultdict(list) for _ in ranks]
        self.free: list[dict[str, list[int]]] = [defaultdict(list) for _ in ranks]  # nodes that could start
        self.busy: list[set[str]] = [set() for _ in ranks]
        for rank, left in enumerate(self.left):
            for number, others in left.items():
                for other in others:
                    self.after[rank][other].append(number)
                if not others:
                    heapq.heappush(self.free[rank][resource(ranks[rank][number])], number)
        for rank in range(len(ranks)):
            self._start(rank, 0)
        done = 0
        while self.events:
            time, rank, number = heapq.heappop(self.events)
            done, self.end = done + 1, max(self.end, time)
            self._finish(rank, number, time)
        missing = sum(map(len, ranks)) - done
        waiting = {key: len(found) for key, found in self.arrived.items() if found}
        assert missing == 0, f"{missing} nodes never end; somebody waits in {dict(list(waiting.items())[:4])}"

    def _start(self, rank: int, time: int) -> None:
        for kind, ready in self.free[rank].items():
            while ready and (kind == "receive" or kind not in self.busy[rank]):
                number = heapq.heappop(ready)
                if kind != "receive":
                    self.busy[rank].add(kind)
                self._issue(rank, self.workload.ranks[rank][number], time)

    def _issue(self, rank: int, node: Node, time: int) -> None:
        if node.type == NodeType.COMP or node.values.get("comm_type") == BROADCAST:
            heapq.heappush(self.events, (time + max(1, 1000 * node.duration_us), rank, node.id))
        elif node.type == NodeType.COMM_COLL:
            group = int(node.values["pg_name"])
            told = self.issued[rank, group]
            told.append((node.values["comm_type"], node.values["comm_size"]))
            self._arrive(("group", group, len(told)), rank, node, time, len(self.workload.groups[group]))
        else:
            key = ("message", node.values["comm_src"], node.values["comm_dst"], node.values["comm_tag"])
            if node.type == NodeType.COMM_SEND and not self.meets:  # ends whether it is received or not
                heapq.heappush(self.events, (time + 1000, rank, node.id))
            self._arrive(key, rank, node, time, 2)

    def _arrive(self, key: Any, rank: int, node: Node, time: int, members: int) -> None:
        self.arrived[key].append(((rank, node.id), time))
        if len(self.arrived[key]) < members:
            return
        takes = self.random.randrange(1, 2_000_000)
        for (one, number), _ in self.arrived.pop(key):
            if self.meets or self.workload.ranks[one][number].type != NodeType.COMM_SEND:
                heapq.heappush(self.events, (time + takes, one, number))

    def _finish(self, rank: int, number: int, time: int) -> None:
        self.busy[rank].discard(resource(self.workload.ranks[rank][number]))
        for other in self.after[rank][number]:
            self.left[rank][other].discard(number)
            if not self.left[rank][other]:
                heapq.heappush(self.free[rank][resource(self.workload.ranks[rank][other])], other)
        self._start(rank, time)


def resource(node: Node) -> str:
    """What a node occupies while it runs."""
    if node.values.get("is_cpu_op", False):
        return "host"
    if node.type == NodeType.COMP:
        return "work"
    return "receive" if node.type == NodeType.COMM_RECV else "transfer"
