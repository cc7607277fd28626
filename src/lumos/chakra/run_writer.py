"""Writes a run as Chakra execution traces, one file a rank: `NAME.RANK.et`, as ASTRA-sim looks for them.

The process groups are beside them in `NAME.groups.json`; a node of metadata describes them on request, as PyTorch's own
traces do, at which the statistics of ASTRA-sim stop. With the host folded (`folded_ranks`) a file is that rank's chain
of work and transfers. Otherwise it is all of the run, as follows.

Every node of the graph is a node of the file: segments of CPU threads, kernels, and of a communication kernel its
arrival (plain work of no length) and its transfer (COMM_COLL, or COMM_SEND and COMM_RECV). Nodes wait for `data_deps`,
the only ones that the feeder of ASTRA-sim resolves: the node before on the lane, and the edges of the graph.
`ctrl_deps` names the node before on the lane once more. Ranks depend on each other only through communication.

Times are whole microseconds in the schema; rounding is carried along a lane, so that its sum stays right. Nanoseconds,
lags and events are in the tables of `file_format`, from which a replay comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lumos.chakra import file_format as chakra
from lumos.chakra.communication import Communication, plan_communication
from lumos.chakra.file_format import NodeType
from lumos.chakra.folded_ranks import other_ranks, recorded_workload
from lumos.chakra.rank_files import Written, file_of_rank, group_file_of, write_workload
from lumos.chakra.tasks import SCHEMA_VERSION, CommNode, add_transfer
from lumos.files import whole_file
from lumos.graph.graph import Ints, simulate
from lumos.graph.rules.build import Execution
from lumos.graph.rules.nodes import Nodes
from lumos.read.execution_trace import Links, Operator
from lumos.trace.trace import COLUMNS, Trace

_UNRECORDED = "not recorded"  # a segment of a thread in which no event was open


def write_chakra(
    path: Path, execution: Execution, links: Links | None = None, metadata: bool = False, fold_host: bool = False
) -> Written:
    """Write `NAME.RANK.et` for every rank and `NAME.groups.json`, all of them or none; `path` is NAME.et.

    `metadata` adds the node that describes the process groups, `fold_host` leaves out the host and the tables that
    give the run back as it was.
    """
    plan = plan_communication(execution, closed=fold_host, every_kind=metadata)
    if fold_host:
        written = write_workload(path, recorded_workload(execution, plan))
        return written._replace(warnings=[*plan.warnings, *other_ranks(execution)])
    writer = _Writer(execution, plan, links, metadata)
    ranks, groups = execution.trace.ranks, plan.group_file()
    files = [file_of_rank(path, rank) for rank in ranks]
    with ExitStack() as stack:
        opened = [stack.enter_context(whole_file(file, follow=False)) for file in files]
        for rank, file in zip(ranks, opened, strict=True):
            file.writelines(map(chakra.delimited, writer.messages(rank)))
        if groups:
            stack.enter_context(whole_file(group_file_of(path), follow=False)).write(msgspec.json.encode(groups))
    sent = [t.type for transfers in plan.transfers.values() for t in transfers]
    collectives = sent.count(NodeType.COMM_COLL)
    return Written(
        files, group_file_of(path) if groups else None, int(writer.count.sum()), collectives, len(sent) - collectives,
        len(groups), plan.warnings,
    )  # fmt: skip


@dataclass(frozen=True)
class _Writer:
    """Makes the messages of the files. Ids count from 1 in every file."""

    execution: Execution
    plan: Communication
    links: Links | None
    metadata: bool

    @property
    def trace(self) -> Trace:
        return self.execution.trace

    @property
    def nodes(self) -> Nodes:
        return self.execution.nodes

    @cached_property
    def _transfers(self) -> dict[int, list[CommNode]]:
        """The communication of the nodes that transfer."""
        return {int(self.nodes.last_node[row]): transfers for row, transfers in self.plan.transfers.items()}

    @cached_property
    def count(self) -> Ints:
        """How many nodes of a file every node is: a kernel that carries several messages is one for each."""
        count = np.ones(len(self.nodes), np.int64)
        count[list(self._transfers)] = [len(transfers) for transfers in self._transfers.values()]
        return count

    @cached_property
    def ids(self) -> Ints:
        """The first id of every node, in the order in which the nodes of a rank run."""
        rank = self.nodes.rank
        order = np.lexsort((np.arange(len(self.nodes)), self._when, rank))
        before = np.cumsum(self.count[order]) - self.count[order]
        base = np.maximum.accumulate(np.where(np.diff(rank[order], prepend=-1) != 0, before, 0))
        ids = np.empty(len(self.nodes), np.int64)
        ids[order] = before - base + chakra.GROUPS_ID + 1
        return ids

    @cached_property
    def _when(self) -> np.ndarray:
        """What nodes are sorted by: when they start; transfers by their rendezvous, which all ranks share."""
        graph, size = self.execution.graph, len(self.nodes)
        times = simulate(graph)
        when = times.start[:size].copy()
        transfers = (graph.edges.source >= size) & (graph.edges.target < size)
        when[graph.edges.target[transfers]] = times.start[graph.edges.source[transfers]]
        for low, high in self._lanes:
            when[low:high] = np.maximum.accumulate(when[low:high])
        return when

    @cached_property
    def _micros(self) -> Ints:
        """Durations in whole microseconds; what is rounded away is carried along the lane."""
        answer = np.zeros(len(self.nodes), np.int64)
        for low, high in self._lanes:
            ended = np.floor(np.cumsum(self.execution.graph.duration[low:high]) / 1000 + 0.5).astype(np.int64)
            answer[low:high] = np.diff(ended, prepend=0)
        return answer

    @cached_property
    def _lanes(self) -> list[tuple[int, int]]:
        return [(low, high) for low, high in pairwise(self.nodes.first.tolist()) if low < high]

    def messages(self, rank: int) -> Iterator[Any]:
        """Everything in the file of a rank."""
        mine = np.flatnonzero(self.nodes.rank == rank)
        yield self._metadata(rank, mine)
        if self.plan.groups and self.metadata:
            yield self._groups()
        for node in mine[np.argsort(self.ids[mine])].tolist():
            transfers = self._transfers.get(node, [])
            if not transfers:
                yield self._work(node)
            for number, transfer in enumerate(transfers):
                yield self._transfer(node, transfer, number)

    # The nodes of a file.

    def _groups(self) -> Any:
        """The process groups, as PyTorch's own traces have them."""
        node = chakra.schema().node(id=chakra.GROUPS_ID, name="## process_group:init ##", type=NodeType.METADATA)
        described = _json(self.plan.described_groups())
        node.inputs.values, node.inputs.shapes, node.inputs.types = f"['{described}']", "[[]]", "['String']"
        chakra.add_value(node.attr, "is_cpu_op", "bool_val", True)
        return node

    def _work(self, node: int) -> Any:
        message = self._blank(node, NodeType.COMP, int(self.ids[node]))
        chakra.add_value(message.attr, "is_cpu_op", "bool_val", not bool(self.nodes.on_gpu[node]))
        operator = self._operator(node)
        if operator is not None:
            message.inputs.values, message.inputs.shapes, message.inputs.types = operator.inputs
            message.outputs.values, message.outputs.shapes, message.outputs.types = operator.outputs
            chakra.add_value(message.attr, "tensor_size", "uint64_val", operator.bytes)
        return message

    def _operator(self, node: int) -> Operator | None:
        """The operator of an execution trace that a node is the beginning of, or that launched it."""
        nodes, row = self.nodes, int(self.nodes.row[node])
        if self.links is None or row < 0 or nodes.first_node[row] != node:
            return None
        return self.links.by_row.get(int(nodes.operator_row[row]) if nodes.on_gpu[node] else row)

    def _transfer(self, node: int, transfer: CommNode, number: int) -> Any:
        message = self._blank(node, transfer.type, int(self.ids[node]) + number)
        add_transfer(message, transfer)
        return message

    def _blank(self, node: int, kind: NodeType, number: int) -> Any:
        """A node with what all nodes have."""
        row, trace = int(self.nodes.row[node]), self.trace
        before = [] if self.execution.graph.is_first[node] else self._all_ids(node - 1)
        return chakra.schema().node(
            id=number,
            name=trace.names[trace.name[row]] if row >= 0 else _UNRECORDED,
            type=kind,
            ctrl_deps=before[:1],
            data_deps=dict.fromkeys([*before, *self._waits_for(node)]),
            start_time_micros=max(0, int(self.nodes.start[node]) - self.execution.origin) // 1000,
            duration_micros=int(self._micros[node]),
        )

    def _all_ids(self, node: int) -> range:
        first = int(self.ids[node])
        return range(first, first + int(self.count[node]))

    def _waits_for(self, node: int) -> Iterator[int]:
        """Ids of the nodes of other lanes that must have ended before a node starts."""
        graph = self.execution.graph
        for edge in range(graph.incoming[node], graph.incoming[node + 1]):
            source = int(graph.edges.source[edge])
            if source >= len(self.nodes):
                continue  # a rendezvous: the communication itself
            if self.nodes.rank[source] != self.nodes.rank[node]:
                continue  # ranks that share a GPU: the schema has no such dependency; our table of edges has
            if not graph.edges.from_start[edge] or graph.duration[source] == 0:
                yield from self._all_ids(source)
            elif not graph.is_first[source]:
                # The schema has only ends: what starts no sooner than another waits for the one before that.
                yield from self._all_ids(source - 1)
        for source in self._data.get(node, ()):
            yield from self._all_ids(source)

    @cached_property
    def _data(self) -> dict[int, list[int]]:
        """For every kernel: those of other streams that wrote its inputs, if an execution trace says so."""
        found: dict[int, list[int]] = {}
        for source, target in [] if self.links is None else self.links.data_edges(self.nodes):
            found.setdefault(target, []).append(source)
        return found

    # The tables.

    def _metadata(self, rank: int, mine: np.ndarray) -> Any:
        """The GlobalMetadata of a rank's file: its events, nodes and edges as tables."""
        trace, execution = self.trace, self.execution
        rows, lanes = np.flatnonzero(trace.rank == rank), np.flatnonzero(trace.lane_rank == rank)
        names = np.unique(trace.name[rows])
        messages = np.unique(trace.message[rows][trace.message[rows] >= 0])
        header = next(h for h in trace.headers if h.rank == rank)
        values: list[tuple[str, str, Any]] = [
            ("schema", "string_val", f"lumos-chakra.{SCHEMA_VERSION}"),
            ("lumos.version", "int64_val", chakra.LUMOS_VERSION),
            ("lumos.rank", "int64_val", rank),
            ("lumos.header", "string_val", _json(header._replace(path=Path(header.path).name))),
            ("lumos.warnings", "string_list", execution.warnings),
            ("lumos.origin_ns", "int64_val", execution.origin),
            ("lumos.lanes", "string_list", [_json(trace.lanes[i]) for i in lanes]),
            ("lumos.names", "string_list", [trace.names[i] for i in names]),
            ("lumos.messages", "string_list", [_json(trace.messages[i]) for i in messages]),
            ("lumos.rendezvous", "string_list", self._rendezvous(rank)),
        ]
        metadata = chakra.schema().metadata(version=SCHEMA_VERSION)
        for label, kind, value in values:
            chakra.add_value(metadata.attr, label, kind, value)
        for label, column in self._columns(rank, rows, mine).items():
            if (listed := {"event.name": names, "event.message": messages}.get(label)) is not None:
                column = np.where(column >= 0, np.searchsorted(listed, column), -1)
            elif label.endswith(".lane"):
                column = np.searchsorted(lanes, column)
            whole = np.rint(column).astype(np.int64) if column.dtype.kind == "f" else column.astype(np.int64)
            exact = bool((whole == column).all())  # nanoseconds are whole numbers, unless they were scaled
            kind, numbers = ("sint64_list", whole) if exact else ("double_list", column)
            chakra.add_value(metadata.attr, f"lumos.{label}", kind, numbers.tolist())
        return metadata

    def _columns(self, rank: int, rows: np.ndarray, mine: np.ndarray) -> dict[str, np.ndarray]:
        """The tables of a rank: its events are `rows`, its nodes `mine`. Lanes are those of the whole trace here."""
        trace, nodes, graph, size = self.trace, self.nodes, self.execution.graph, len(self.nodes)
        syncs = trace.syncs
        of_rank = trace.lane_rank[syncs.lane] == rank if len(syncs.lane) else np.zeros(0, bool)
        owner = np.where(graph.edges.target < size, graph.edges.target, graph.edges.source)
        edges = graph.edges.select(nodes.rank[owner] == rank) if size else graph.edges
        columns = {
            **{f"event.{name}": getattr(trace, name)[rows] for name in COLUMNS},
            **{f"event.{name}": getattr(nodes, name)[rows] for name in ("first_node", "last_node", "parent")},
            **{f"sync.{name}": getattr(syncs, name)[of_rank] for name in chakra.TABLES["sync"]},
            **{f"node.{name}": getattr(nodes, name)[mine] for name in ("lane", "row", "start", "end", "is_return")},
            **{f"node.{name}": getattr(graph, name)[mine] for name in ("duration", "gap", "frozen")},
            **{f"edge.{name}": getattr(edges, name) for name in chakra.TABLES["edge"]},
        }
        columns |= {"event.number": rows, "node.number": mine}
        columns |= {"node.id": self.ids[mine], "node.count": self.count[mine]}
        for label in ("event.start", "node.start", "node.end"):
            columns[label] = columns[label] - self.execution.origin
        for label in ("edge.source", "edge.target"):  # rendezvous, which come after the nodes, are -1, -2 and so on
            columns[label] = np.where(columns[label] < size, columns[label], size - 1 - columns[label])
        return columns

    def _rendezvous(self, rank: int) -> list[str]:
        """The rendezvous in which a rank takes part: number, and what is known of it."""
        return [
            _json([number, r.collective, r.rows.tolist(), r.ranks, r.complete, r.message])
            for number, r in enumerate(self.execution.rendezvous)
            if (self.trace.rank[r.rows] == rank).any()
        ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
