"""The file format of Chakra execution traces (`.et`): messages, files, and the tables that Lumos adds to them.

A `.et` file is a GlobalMetadata and then Nodes, each preceded by its length as a varint. The schema is declared here
field by field rather than generated, in a pool of its own, so that it does not clash with another copy in the process.

Lumos adds attributes to the metadata, which other readers ignore, for what the schema has no field for (its times are
whole microseconds). Each is a column of a table, or a value of the file. Events and nodes have numbers that count over
all ranks of the job; -1 is none.

    lumos.node.…   one row a node of the graph: its number, its id, and how many nodes of the file it is (`count`: a
                   kernel with several messages is one for each), lane, row (its event), start, end, is_return,
                   duration, gap and frozen (after the node before it on the lane; explained and not)
    lumos.edge.…   one row an edge: numbers of source and target (below zero: a rendezvous, -1 being the first), rule,
                   lag, frozen, from_start
    lumos.event.…  one row an event of the trace: its number, category, name, lane and message (rows of lumos.names,
                   lumos.lanes and lumos.messages), start, duration, correlation, first_node, last_node, parent
    lumos.sync.…   one row a synchronisation
    lumos.version, .rank, .header, .warnings, .origin_ns, .lanes, .names, .messages, .rendezvous: of the file; JSON
                   where they are records. Times are nanoseconds, and count from origin_ns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.read.formats import MOST_VARINT_BYTES, decode_file, require_memory, varint
from lumos.trace.trace import COLUMNS

_PACKAGE = "ChakraProtoMsg"
_SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
_MESSAGES = {  # fields as "name number type", a star for repeated ones
    "GlobalMetadata": "version 1 string, attr 2 AttributeProto*",
    "IOInfo": "values 1 string, shapes 2 string, types 3 string",
    "Node": "id 1 uint64, name 2 string, type 3 int32, ctrl_deps 4 uint64*, data_deps 5 uint64*,"
    " start_time_micros 6 uint64, duration_micros 7 uint64, inputs 8 IOInfo, outputs 9 IOInfo, attr 10 AttributeProto*",
    **{f"{name.capitalize()}List": f"values 1 {name}*" for name in _SCALARS},
    "AttributeProto": "name 1 string, doc_string 2 string, "
    + ", ".join(f"{n}_val {3 + 2 * i} {n}, {n}_list {4 + 2 * i} {n.capitalize()}List" for i, n in enumerate(_SCALARS)),
}

_MEMORY_PER_BYTE = read_table("trace_rules.toml")["reading"]["memory_per_chakra_byte"]
_MOST_JSON_BYTES = 1 << 29
_KEPT = frozenset((
    "is_cpu_op", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "pg_name", "stream", "tensor_size",
    "num_ops", "op_type", "inputs", "outputs", "rf_id", "tid",
))  # fmt: skip

LUMOS_VERSION = 3  # of the tables
FOLDED = "lumos.folded"  # marks files without the host and without tables, whose durations hold no waiting
TABLES = {
    "event": ("number", *COLUMNS, "first_node", "last_node", "parent"),
    "sync": ("correlation", "stream", "wait_stream", "record", "event"),
    "node": ("number", "id", "count", "lane", "row", "start", "end", "is_return", "duration", "gap", "frozen"),
    "edge": ("source", "target", "rule", "lag", "frozen", "from_start"),
}
ANNOUNCEMENT = "record_param_comms"  # the operator by which PyTorch says what a collective is
GROUPS_ID = 0  # the node that describes the process groups; those of the graph follow from 1


class NodeType(IntEnum):
    """What a node does. Other types (storage, batches, checkpoints) do not occur in training steps."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


COLLECTIVES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
    "reduce_scatter": 7, "reduce_scatter_block": 8, "barrier": 9,
}  # fmt: skip
COLLECTIVE_NAMES = {number: name for name, number in COLLECTIVES.items()}
COMMUNICATION = (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)
LONGEST_US = 10**11  # a day


class Schema(NamedTuple):
    """The message classes."""

    metadata: Any
    node: Any


@cache
def schema() -> Schema:
    """The message classes, made once a process."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="lumos/chakra.proto", package=_PACKAGE, syntax="proto3")
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind in (field.split() for field in fields.split(",")):
            field = message.field.add(name=name, number=int(number))
            field.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            field.type = getattr(kinds, f"TYPE_{kind.upper()}") if kind in _SCALARS else kinds.TYPE_MESSAGE
            if kind not in _SCALARS:
                field.type_name = f".{_PACKAGE}.{kind}"
    attribute = file.message_type[-1]
    attribute.oneof_decl.add(name="value")
    for field in attribute.field[2:]:
        field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in ("GlobalMetadata", "Node"))
    return Schema(*map(message_factory.GetMessageClass, found))


def values_of(attributes: Iterable[Any]) -> dict[str, Any]:
    """The attributes of a message as plain values; lists as sequences."""
    values = {}
    for attribute in attributes:
        kind = attribute.WhichOneof("value")
        if kind is not None:
            value = getattr(attribute, kind)
            values[attribute.name] = list(value.values) if kind.endswith("_list") else value
    return values


def add_value(attributes: Any, name: str, kind: str, value: Any) -> None:
    """Append an attribute; `kind` names the field of the schema, as in `int64_val` or `string_list`."""
    attribute = attributes.add(name=name)
    if kind.endswith("_list"):
        getattr(attribute, kind).values.extend(value)
        getattr(attribute, kind).SetInParent()
    else:
        setattr(attribute, kind, value)


def delimited(message: Any) -> bytes:
    """A message after its length."""
    data: bytes = message.SerializeToString()
    return varint_of(len(data)) + data


def varint_of(number: int) -> bytes:
    """A number as protobuf writes it."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(parts) + bytes([number])


class Node(NamedTuple):
    """A node, with those of its attributes that are of use."""

    id: int
    name: str
    type: int
    data_deps: tuple[int, ...]
    ctrl_deps: tuple[int, ...]
    start_us: int
    duration_us: int
    inputs: str  # values of what it takes; of metadata, kernels and announcements of collectives alone
    outputs: str  # values of what it makes; of kernels alone
    values: dict[str, Any]

    @property
    def group(self) -> str:
        """The name of the process group of a collective; '' for all ranks."""
        return str(self.values.get("pg_name", ""))[:100]

    def number(self, name: str, most: int = 1 << 62) -> int:
        """An attribute that is a whole number below `most`; -1 if there is none."""
        value = self.values.get(name, -1)
        return value if isinstance(value, int) and 0 <= value < most else -1


@dataclass(frozen=True)
class ChakraFile:
    """The file of one rank."""

    path: Path
    rank: int  # -1: not in the file
    head: dict[str, Any]
    nodes: list[Node]

    @property
    def is_own(self) -> bool:
        return "lumos.version" in self.head

    def waited_for(self, node: Node) -> tuple[int, ...]:
        """The nodes that a node waits for; some tools write nothing but `ctrl_deps`."""
        return node.data_deps if self._has_data_deps else node.ctrl_deps

    @cached_property
    def _has_data_deps(self) -> bool:
        return any(node.data_deps for node in self.nodes)


def read_chakra_file(path: Path) -> ChakraFile:
    """All messages of a `.et` file."""
    try:
        require_memory(path, path.stat().st_size * _MEMORY_PER_BYTE, "read fewer ranks with --match")
        with path.open("rb") as file:
            messages = list(_delimited(file, path))
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror}); check the path and its permissions") from None
    if not messages:
        raise InputError(f"{path}: the file is empty; write it again")
    kinds = schema()
    head = values_of(_parsed(kinds.metadata, messages[0], path, "its head").attr)
    nodes = [_node(_parsed(kinds.node, data, path, f"node {i}")) for i, data in enumerate(messages[1:], 1)]
    rank = head.get("lumos.rank", -1)
    return _checked(ChakraFile(path, rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else -1, head, nodes))


def _checked(file: ChakraFile) -> ChakraFile:
    if not file.nodes and "lumos.version" not in file.head:  # a rank of a run may have nothing to do
        raise InputError(f"{file.path}: no nodes in it; write it again from a run that has some")
    seen: set[int] = set()
    for node in file.nodes:
        if node.id in seen:
            raise InputError(f"{file.path}: two nodes have the id {node.id}; a Chakra trace names each node once")
        seen.add(node.id)
    for node in file.nodes:
        missing = next((dep for dep in file.waited_for(node) if dep not in seen), None)
        if missing is not None:
            raise InputError(
                f"{file.path}: node {node.id} ({node.name[:40]}) waits for node {missing}, which is not there"
            )
    return file


def _parsed(kind: Any, data: bytes, path: Path, what: str) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(data)
    except (DecodeError, RecursionError):
        raise InputError(
            f"{path}: {what} is no message of a Chakra trace; is the file damaged, or of another kind?"
        ) from None


def _node(message: Any) -> Node:
    values = {name: value for name, value in values_of(message.attr).items() if name in _KEPT}
    on_gpu = values.get("is_cpu_op", True) is False
    told = on_gpu or message.type == NodeType.METADATA or message.name == ANNOUNCEMENT
    return Node(
        id=message.id, name=message.name, type=message.type, data_deps=tuple(message.data_deps),
        ctrl_deps=tuple(message.ctrl_deps), start_us=message.start_time_micros, duration_us=message.duration_micros,
        inputs=message.inputs.values if told else "", outputs=message.outputs.values if on_gpu else "", values=values,
    )  # fmt: skip


def _delimited(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The messages of a file; each is no longer than what is left of it."""
    left, number = path.stat().st_size, 0
    while left > 0:
        head = file.read(min(left, MOST_VARINT_BYTES + 1))
        try:
            size, used = varint(head)
        except ValueError:
            raise InputError(
                f"{path}: message {number} has no readable length; is the file damaged, or of another kind?"
            ) from None
        left -= used
        if size > left:
            raise InputError(
                f"{path}: message {number} should have {size:,} bytes and the file ends after {left:,}; copy it again"
            )
        file.seek(used - len(head), 1)
        yield file.read(size)
        left -= size
        number += 1


class _JsonNode(msgspec.Struct):
    id: int = msgspec.field(name="Id")
    name: str = msgspec.field(default="", name="Name")
    type: int = msgspec.field(default=0, name="NodeType")
    data_deps: list[int] = []
    ctrl_deps: list[int] = msgspec.field(default_factory=list, name="ctrlDeps")
    runtime: int = 0  # microseconds


class _JsonGraph(msgspec.Struct):
    workload_graph: list[msgspec.Raw] = []


def read_chakra_json(path: Path) -> ChakraFile:
    """All nodes of a graph as JSON (`workload_graph`), the other format that the feeder of ASTRA-sim reads."""
    graph = decode_file(path, _JsonGraph, _MOST_JSON_BYTES, "a Chakra graph", "give the graph as .et")
    try:
        nodes = [_json_node(raw) for raw in graph.workload_graph]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a Chakra graph ({error})") from None
    return _checked(ChakraFile(path, -1, {}, nodes))


def _json_node(raw: msgspec.Raw) -> Node:
    found = msgspec.json.decode(raw, type=_JsonNode)
    others: dict[str, Any] = msgspec.json.decode(raw)
    if not 0 <= found.runtime < 1 << 63:
        raise msgspec.ValidationError(f"the runtime of node {found.id} is out of range")
    values = {name: value for name, value in others.items() if name in _KEPT}
    deps = tuple(found.data_deps), tuple(found.ctrl_deps)
    return Node(found.id, found.name, found.type, *deps, 0, found.runtime, "", "", values)
