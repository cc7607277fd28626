"""A PyTorch execution trace (ExecutionTraceObserver), linked to the Kineto trace of the same run.

An execution trace has no times. It has what Kineto leaves out: every tensor an operator reads and writes, by storage,
and the size and process group of every collective. Both record the same functions in the same order on every thread, so
a thread of the one is searched for as a sequence of names in a thread of the other; that all names agree proves that
the two belong together. (`rf_id`, which counts the functions, is only sometimes in the Kineto file, and under various
names.)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from lumos.dtypes import dtype_called
from lumos.errors import InputError
from lumos.graph.rules.nodes import Nodes
from lumos.read.formats import decode_file
from lumos.trace.messages import PeerCall, message_name, peers_are_indices, with_job_ranks
from lumos.trace.names import Category
from lumos.trace.trace import Message, Trace

_MOST_BYTES = 1 << 30  # of text: an execution trace is of a step or two
_MOST_ELEMENTS, _WIDEST = 1 << 40, 64  # bytes of one; what is larger is damage
_NOT_RECORDED_BY_KINETO = re.compile(r"\[pytorch\|profiler\||## process_group:init|__ROOT_")


class _Attribute(msgspec.Struct):
    name: Any = ""
    value: Any = None


class _Values(msgspec.Struct):
    """Inputs or outputs as newer files have them."""

    values: Any = None
    shapes: Any = None
    types: Any = None

    @property
    def texts(self) -> tuple[str, str, str]:
        found = (self.values, self.shapes, self.types)
        values, shapes, types = (msgspec.json.encode([] if v is None else v).decode() for v in found)
        return values, shapes, types


class _Node(msgspec.Struct):
    """A node of any version: newer files keep numbers in `attrs` and inputs in an object."""

    name: Any = ""
    rf_id: Any = 0
    tid: Any = 0
    inputs: _Values | list[Any] | None = None
    input_shapes: Any = None
    input_types: Any = None
    outputs: _Values | list[Any] | None = None
    output_shapes: Any = None
    output_types: Any = None
    attrs: list[_Attribute] = []

    def side(self, name: str) -> _Values:
        """Its "input" or its "output"."""
        found, *rest = (getattr(self, name + part) for part in ("s", "_shapes", "_types"))
        return found if isinstance(found, _Values) else _Values(found, *rest)


class _File(msgspec.Struct):
    schema: Any = ""
    nodes: list[_Node] = []


class Tensor(NamedTuple):
    """A tensor that an operator reads or writes."""

    storage: int
    elements: int
    width: int  # bytes of an element

    @property
    def bytes(self) -> int:
        return self.elements * self.width


class Operator(NamedTuple):
    """A recorded function: its name, its values as text, and the tensors among them."""

    name: str
    order: int  # rf_id
    thread: int
    inputs: tuple[str, str, str]  # values, shapes, types
    outputs: tuple[str, str, str]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    message: Message | None

    @property
    def bytes(self) -> int:
        """Of all tensors read or written."""
        return sum(tensor.bytes for tensor in {*self.reads, *self.writes})


@dataclass(frozen=True)
class ExecutionTrace:
    """The operators of one rank, by thread, in order."""

    path: Path
    schema: str
    threads: dict[int, list[Operator]]

    @property
    def count(self) -> int:
        return sum(map(len, self.threads.values()))


def read_execution_trace(path: Path) -> ExecutionTrace:
    """The operators in a file, by thread."""
    file = decode_file(path, _File, _MOST_BYTES, "a PyTorch execution trace", "record a single step")
    groups = _groups(file.nodes)
    threads: dict[int, list[Operator]] = defaultdict(list)
    for node in file.nodes:
        if isinstance(node.name, str) and not _NOT_RECORDED_BY_KINETO.match(node.name):
            found = _operator(node, groups)
            threads[found.thread].append(found)
    for operators in threads.values():
        operators.sort(key=lambda o: o.order)
    if not threads:
        raise InputError(f"{path}: no operators in it, so not a PyTorch execution trace of a training step")
    return ExecutionTrace(path, str(file.schema), dict(threads))


def _operator(node: _Node, groups: dict[str, tuple[int, ...]]) -> Operator:
    attributes = {str(a.name): a.value for a in node.attrs}
    taken, given = node.side("input"), node.side("output")
    reads, writes = tuple(_tensors(taken.values)), tuple(_tensors(given.values))
    is_communication = node.name == "record_param_comms"
    return Operator(
        name=str(node.name), order=_whole(attributes.get("rf_id", node.rf_id)),
        thread=_whole(attributes.get("tid", node.tid)), inputs=taken.texts, outputs=given.texts, reads=reads,
        writes=writes, message=_message(attributes, taken, reads, writes, groups) if is_communication else None,
    )  # fmt: skip


def _tensors(values: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors are lists of id, storage, offset, elements, bytes of an element, device; they may be nested in lists."""
    if not isinstance(values, list) or depth > 8:
        return
    if len(values) == 6 and isinstance(values[5], str) and all(isinstance(v, int) for v in values[:5]):
        if 0 <= values[3] < _MOST_ELEMENTS and 0 <= values[4] <= _WIDEST:
            yield Tensor(values[1], values[3], values[4])
        return
    for value in values:
        yield from _tensors(value, depth + 1)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _groups(nodes: list[_Node]) -> dict[str, tuple[int, ...]]:
    """Process groups by name, where a file describes them."""
    groups: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        if isinstance(node.name, str) and node.name.startswith("## process_group:init"):
            values = node.side("input").values
            for text in values if isinstance(values, list) else []:
                groups |= described_groups(text)
    return groups


class _Group(msgspec.Struct):
    """A process group in a node of metadata, as PyTorch writes it; no ranks means all of them."""

    pg_name: str = ""
    ranks: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]] = []
    group_size: Any = 0


def described_groups(text: Any) -> dict[str, tuple[int, ...]]:
    """Process groups by name, in the text of the node that describes them."""
    with suppress(msgspec.DecodeError, TypeError, RecursionError):
        groups = msgspec.json.decode(text, type=list[_Group])
        sizes = (range(min(_whole(one.group_size), 1 << 20)) for one in groups)
        return {one.pg_name: tuple(dict.fromkeys(one.ranks or size)) for one, size in zip(groups, sizes, strict=True)}
    return {}


def _message(
    attributes: dict[str, Any],
    taken: _Values,
    reads: tuple[Tensor, ...],
    writes: tuple[Tensor, ...],
    groups: dict[str, tuple[int, ...]],
) -> Message | None:
    """The communication that `record_param_comms` announces; None for the wait after it."""
    values = taken.values if isinstance(taken.values, list) else []
    name = attributes.get("collective_name") or next((v for v in values if isinstance(v, str)), "")
    if not isinstance(name, str) or not message_name(name):
        return None
    group, peer = str(attributes.get("pg_name", "")), _peer(values)
    return Message(
        collective=message_name(name),
        dtype=str(attributes.get("dtype") or _dtype(taken.types)),
        in_elements=_whole(attributes.get("in_msg_nelems")) or sum(t.elements for t in reads),
        out_elements=_whole(attributes.get("out_msg_nelems")) or sum(t.elements for t in writes), group=group,
        group_size=_whole(attributes.get("pg_size")) or next((v for v in reversed(values) if isinstance(v, int)), -1),
        ranks=groups.get(group, ()), source=peer if name == "recv" else -1, destination=peer if name == "send" else -1,
    )  # fmt: skip


def _peer(values: list[Any]) -> int:
    """The number before the collective's name: the other side of a message."""
    at = next((i for i, v in enumerate(values) if isinstance(v, str)), 0)
    return values[at - 1] if at and isinstance(values[at - 1], int) else -1


def _dtype(types: Any) -> str:
    """The type of the first tensor, as in "GenericList[Tensor(c10::Half)]"."""
    found = re.search(r"Tensor\(([^)]*)\)", str(types[0] if isinstance(types, list) and types else ""))
    name = found.group(1).lower() if found else ""
    dtype = dtype_called(name)
    return dtype.torch if dtype is not None else name


@dataclass(frozen=True)
class Links:
    """Which operator of an execution trace every row of a Kineto trace is."""

    by_row: dict[int, Operator]
    notes: tuple[str, ...]

    def enrich(self, trace: Trace) -> Trace:
        """The trace with the sizes and groups of collectives where it does not have them itself."""
        known = {r: o.message for r, o in self.by_row.items() if o.message is not None and trace.message[r] < 0}
        calls = (PeerCall.of(int(trace.rank[r]), m) for r, m in known.items() if m.has_peer)
        by_index = peers_are_indices(calls, otherwise=True)
        messages, column = {message: i for i, message in enumerate(trace.messages)}, trace.message.copy()
        for row, message in known.items():
            column[row] = messages.setdefault(with_job_ranks(message, by_index), len(messages))
        return replace(trace, messages=tuple(messages), message=column)

    def data_edges(self, nodes: Nodes) -> list[tuple[int, int]]:
        """(kernel that wrote a tensor, kernel that reads it) on two streams, where the clock does not contradict."""
        found: dict[tuple[int, int], None] = {}
        writer: dict[tuple[int, int], int] = {}
        rank_of = nodes.trace.rank
        for operator_row, kernels in self._kernels(nodes):
            operator, rank = self.by_row[operator_row], int(rank_of[operator_row])
            target = int(nodes.first_node[kernels[0]])
            for storage in {t.storage for t in operator.reads}:
                source = writer.get((rank, storage), -1)
                if source >= 0 and nodes.lane[source] != nodes.lane[target] and nodes.end[source] < nodes.start[target]:
                    found[source, target] = None
            for tensor in operator.writes:
                writer[rank, tensor.storage] = int(nodes.last_node[kernels[-1]])
        return list(found)

    def _kernels(self, nodes: Nodes) -> list[tuple[int, list[int]]]:
        """The rows on GPUs by the linked operator that launched them, operators in order of time."""
        kernels: dict[int, list[int]] = defaultdict(list)
        for row in np.flatnonzero(nodes.trace.on_gpu).tolist():
            operator = int(nodes.operator_row[row])
            if operator in self.by_row:
                kernels[operator].append(row)
        return sorted(kernels.items(), key=lambda item: int(nodes.trace.start[item[0]]))


def link(trace: Trace, executions: dict[int, ExecutionTrace]) -> Links:
    """Link the execution traces of some ranks to the Kineto trace of the same run."""
    by_row: dict[int, Operator] = {}
    notes: list[str] = []
    codes = {name: i for i, name in enumerate(trace.names)}
    for rank, execution in executions.items():
        threads = _rows_by_thread(trace, rank)
        found = 0
        for operators in execution.threads.values():
            rows, times = _find(trace, threads, np.array([codes.get(o.name, -1) for o in operators]))
            by_row.update(zip(rows, operators, strict=False))
            found += len(rows)
            if times > 1:
                notes.append(f"{execution.path.name}: its operators come {times} times; the first time is taken")
        if found < execution.count / 2:
            raise InputError(
                f"{execution.path}: not recorded with the Kineto trace of rank {rank}: of its {execution.count} "
                f"operators, {found} are there in the same order; give the two files of one step"
            )
        if found < execution.count:
            missing = execution.count - found
            notes.append(f"{execution.path.name}: {missing} of {execution.count} operators are not linked")
    return Links(by_row, tuple(dict.fromkeys(notes)))


def _rows_by_thread(trace: Trace, rank: int) -> list[np.ndarray]:
    """The functions that each thread of a rank recorded, in order."""
    rows = np.flatnonzero(np.isin(trace.category, (Category.OP, Category.NOTE)) & (trace.rank == rank))
    rows = rows[np.lexsort((rows, -trace.end[rows], trace.start[rows], trace.lane[rows]))]
    return np.split(rows, np.flatnonzero(np.diff(trace.lane[rows])) + 1)


def _find(trace: Trace, threads: list[np.ndarray], wanted: np.ndarray) -> tuple[list[int], int]:
    """The rows of the first run of these names on a thread, and how many runs there are; none: ([], 0)."""
    for rows in threads:
        places = _places(trace.name[rows], wanted)
        if len(places):
            return rows[places[0] : places[0] + len(wanted)].tolist(), len(places)
    return [], 0


def _places(text: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where one sequence of numbers occurs in another."""
    if len(wanted) == 0 or len(wanted) > len(text):
        return np.zeros(0, np.int64)
    places = np.flatnonzero(text[: len(text) - len(wanted) + 1] == wanted[0])
    for offset, code in enumerate(wanted[1:].tolist(), 1):
        places = places[text[places + offset] == code]
        if len(places) == 0:
            break
    return places
