"""A run as Chakra execution traces, one file a rank: `NAME.RANK.et`, as ASTRA-sim looks for them.

Every node of the graph is a node of the file: pieces of CPU threads, kernels, and of a communication kernel its arrival
(plain work of no length) and its transfer (COMM_COLL, or COMM_SEND and COMM_RECV). Nodes wait for `data_deps`, the only
ones that the feeder of ASTRA-sim resolves: the node before on the lane, and the edges of the graph. `ctrl_deps` names
the node before on the lane once more. Between ranks there are no dependencies but the communication itself.

Times are whole microseconds in the schema; rounding is carried along a lane, so that its sum stays right. Nanoseconds,
lags and the events are in attributes of our own (`readers.chakra_schema.Own`), from which a replay comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from lumos.errors import InputError
from lumos.export.chakra_head import head
from lumos.export.chakra_messages import Communication, Transfer, plan_communication, world_of
from lumos.export.chakra_numbers import Numbers
from lumos.files import whole_file
from lumos.graph.from_trace.build import Execution
from lumos.graph.graph import Floats
from lumos.trace.read.chakra_schema import GROUPS_ID, NodeType, Own, add_value, schema
from lumos.trace.read.execution_trace import Links, Operator
from lumos.trace.trace import Trace

_UNRECORDED = "not recorded"  # a piece of a thread in which no event was open


@dataclass(frozen=True)
class Written:
    """What an export wrote."""

    files: list[Path]
    nodes: int
    collectives: int
    messages: int
    groups: int
    warnings: list[str]


def write_chakra(path: Path, execution: Execution, links: Links | None = None) -> Written:
    """Write `NAME.RANK.et` for every rank, all of them or none; `path` is NAME.et."""
    plan = plan_communication(execution)
    numbers = Numbers(execution, {row: len(transfers) for row, transfers in plan.transfers.items()})
    ranks = execution.trace.ranks
    files = [path.with_name(f"{path.name.removesuffix('.et')}.{rank}.et") for rank in ranks]
    writer = _Writer(execution, plan, numbers, links)
    with ExitStack() as stack:
        opened = [stack.enter_context(whole_file(file)) for file in files]
        for rank, file in zip(ranks, opened, strict=True):
            for message in writer.messages(rank):
                write_delimited(file, message)
    sent = [t for transfers in plan.transfers.values() for t in transfers]
    collectives = sum(t.type == NodeType.COMM_COLL for t in sent)
    nodes = int(numbers.pieces.sum())
    return Written(files, nodes, collectives, len(sent) - collectives, len(plan.groups), plan.warnings)


def write_delimited(file: IO[bytes], message: Any) -> None:
    """A message after its length as a varint."""
    data = message.SerializeToString()
    size, length = len(data), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    file.write(bytes(length) + data)


@dataclass(frozen=True)
class _Writer:
    """Makes the messages of the files."""

    execution: Execution
    plan: Communication
    numbers: Numbers
    links: Links | None

    @property
    def trace(self) -> Trace:
        return self.execution.trace

    def messages(self, rank: int) -> Iterator[Any]:
        """Everything in the file of a rank."""
        yield head(self.numbers, rank)
        if self.plan.groups:
            yield self._groups()
        mine = np.flatnonzero(self.numbers.rank == rank)
        for node in mine[np.argsort(self.numbers.ids[mine])].tolist():
            yield from self._node(node)

    def _groups(self) -> Any:
        """The process groups, as PyTorch's own traces have them."""
        described = orjson.dumps(self.plan.described_groups(world_of(self.execution))).decode()
        node = schema().node(id=GROUPS_ID, name="## process_group:init ##", type=NodeType.METADATA)
        node.inputs.values, node.inputs.shapes, node.inputs.types = f"['{described}']", "[[]]", "['String']"
        add_value(node.attr, "is_cpu_op", "bool_val", True)
        return node

    @cached_property
    def _transfers(self) -> dict[int, list[Transfer]]:
        """The communication of the nodes that transfer."""
        last = self.execution.nodes.last_node
        return {int(last[row]): transfers for row, transfers in self.plan.transfers.items()}

    def _node(self, node: int) -> Iterator[Any]:
        """One node of the graph: one node of the file, or one for each message that it carries."""
        transfers = self._transfers.get(node, [])
        message = self._work(node) if not transfers else self._transfer(node, transfers[0], 0)
        self._describe(message.attr, node)
        self._describe_edges(message.attr, node)
        yield message
        for place, transfer in enumerate(transfers[1:], 1):
            part = self._transfer(node, transfer, place)
            add_value(part.attr, Own.PART_OF, "int64_val", int(self.numbers.ids[node]))
            yield part

    def _work(self, node: int) -> Any:
        draft = self.execution.nodes
        message = self._blank(node, NodeType.COMP, int(self.numbers.ids[node]))
        add_value(message.attr, "is_cpu_op", "bool_val", not bool(draft.on_gpu[node]))
        operator = self._operator(node)
        if operator is not None:
            message.inputs.values, message.inputs.shapes, message.inputs.types = operator.inputs
            message.outputs.values, message.outputs.shapes, message.outputs.types = operator.outputs
            add_value(message.attr, "tensor_size", "uint64_val", operator.bytes)
        return message

    def _operator(self, node: int) -> Operator | None:
        """The operator of an execution trace that a node is the beginning of, or that launched it."""
        draft, row = self.execution.nodes, int(self.execution.nodes.row[node])
        if self.links is None or row < 0 or draft.first_node[row] != node:
            return None
        return self.links.of_row(int(draft.operator_row[row]) if draft.on_gpu[node] else row)

    def _transfer(self, node: int, transfer: Transfer, place: int) -> Any:
        message = self._blank(node, transfer.type, int(self.numbers.ids[node]) + place)
        add_value(message.attr, "is_cpu_op", "bool_val", False)
        add_value(message.attr, "comm_size", "int64_val", transfer.bytes)
        if transfer.type == NodeType.COMM_COLL:
            add_value(message.attr, "comm_type", "int64_val", transfer.collective)
            add_value(message.attr, "pg_name", "string_val", transfer.group)
        else:
            add_value(message.attr, "comm_src", "int32_val", transfer.source)
            add_value(message.attr, "comm_dst", "int32_val", transfer.destination)
            add_value(message.attr, "comm_tag", "int32_val", transfer.tag)
        return message

    def _blank(self, node: int, kind: NodeType, number: int) -> Any:
        """A node with what all nodes have."""
        draft, row = self.execution.nodes, int(self.execution.nodes.row[node])
        before, others = self._waits_for(node)
        return schema().node(
            id=number,
            name=self.trace.names[self.trace.name[row]] if row >= 0 else _UNRECORDED,
            type=kind,
            ctrl_deps=before[:1],
            data_deps=dict.fromkeys([*before, *others]),
            start_time_micros=max(0, int(draft.start[node]) - self.execution.origin) // 1000,
            duration_micros=int(self.numbers.micros[node]),
        )

    def _waits_for(self, node: int) -> tuple[list[int], list[int]]:
        """Ids of the node before on the lane, and of what else must have ended."""
        graph, numbers = self.execution.graph, self.numbers
        before = [] if graph.is_first[node] else numbers.all_ids(node - 1)
        others: list[int] = []
        for edge in range(graph.incoming[node], graph.incoming[node + 1]):
            source = int(graph.edges.source[edge])
            if source >= numbers.size:
                continue  # a rendezvous: the communication itself
            if numbers.rank[source] != numbers.rank[node]:
                raise InputError("a dependency between ranks that is no communication cannot be written as Chakra")
            if graph.edges.from_start[edge] and graph.duration[source] > 0:
                # The schema knows ends alone: what starts no sooner than another waits for the one before that.
                others += [] if graph.is_first[source] else numbers.all_ids(source - 1)
            else:
                others += numbers.all_ids(source)
        for source in self._data.get(node, ()):
            others += numbers.all_ids(source)
        return before, others

    @cached_property
    def _data(self) -> dict[int, list[int]]:
        """For every kernel: those of other streams that wrote what it reads, where an execution trace tells."""
        found: dict[int, list[int]] = {}
        for source, target in [] if self.links is None else self.links.data_edges(self.execution.nodes):
            found.setdefault(target, []).append(source)
        return found

    def _describe(self, attr: Any, node: int) -> None:
        """What the schema has no field for."""
        draft, graph, numbers = self.execution.nodes, self.execution.graph, self.numbers
        add_value(attr, Own.LANE, "int64_val", int(numbers.place_of_lane[draft.lane[node]]))
        if draft.row[node] >= 0:
            add_value(attr, Own.EVENT, "int64_val", int(numbers.place_of_row[draft.row[node]]))
        add_value(attr, Own.START, "int64_val", int(draft.start[node]) - self.execution.origin)
        _add_time(attr, Own.DURATION, graph.duration[node])
        waited = float(draft.end[node] - draft.start[node]) - graph.duration[node]
        for name, time in ((Own.WAITED, waited), (Own.GAP, graph.gap[node]), (Own.FROZEN, graph.frozen[node])):
            if time:
                _add_time(attr, name, time)
        if draft.is_return[node]:
            add_value(attr, Own.RETURNS, "bool_val", True)

    def _describe_edges(self, attr: Any, node: int) -> None:
        graph, edges, size = self.execution.graph, self.execution.graph.edges, self.numbers.size
        some = slice(graph.incoming[node], graph.incoming[node + 1])
        if some.start < some.stop:
            source = edges.source[some]
            ids = np.where(source < size, self.numbers.ids[np.minimum(source, size - 1)], size - 1 - source)
            add_value(attr, Own.DEPS, "int64_list", ids.tolist())
            add_value(attr, Own.DEP_RULES, "int32_list", edges.rule[some].tolist())
            _add_times(attr, Own.DEP_LAGS, edges.lag[some])
            _add_times(attr, Own.DEP_FROZEN, edges.frozen[some])
            if edges.from_start[some].any():
                add_value(attr, Own.DEP_STARTS, "bool_list", edges.from_start[some].tolist())
        joins = self._joins.get(node)
        if joins is not None:
            add_value(attr, Own.JOINS, "int64_list", [int(edges.target[e]) - size for e in joins])
            _add_times(attr, Own.JOIN_LAGS, edges.lag[joins])
            _add_times(attr, Own.JOIN_FROZEN, edges.frozen[joins])

    @cached_property
    def _joins(self) -> dict[int, list[int]]:
        """For every node that arrives at a rendezvous: those edges."""
        edges = self.execution.graph.edges
        found: dict[int, list[int]] = {}
        for edge in np.flatnonzero(edges.target >= self.numbers.size).tolist():
            found.setdefault(int(edges.source[edge]), []).append(edge)
        return found


def _add_time(attributes: Any, name: str, time: float) -> None:
    """Nanoseconds, as a whole number where they are one."""
    whole = float(time).is_integer()
    add_value(attributes, name, "sint64_val" if whole else "double_val", int(time) if whole else float(time))


def _add_times(attributes: Any, name: str, times: Floats) -> None:
    """The same for a list, left out where all are zero."""
    if times.any():
        whole = bool((times == np.rint(times)).all())
        values = np.rint(times).astype(np.int64) if whole else times
        add_value(attributes, name, "sint64_list" if whole else "double_list", values.tolist())
