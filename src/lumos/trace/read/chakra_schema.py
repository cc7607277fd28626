"""The messages of a Chakra execution trace (`.et`), and the attributes that Lumos adds to them.

A `.et` file is a GlobalMetadata and then Nodes, each preceded by its length as a varint. The schema is declared here
field by field rather than generated, in a pool of its own, so that it lives beside any other copy of it in a process.

Attributes named `lumos.…` hold what the schema has no field for, mostly because its times are whole microseconds:
nanoseconds, lanes, lags, and the events that the nodes are pieces of. Other readers leave them alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "ChakraProtoMsg"

# The values an attribute may have, in the order of their field numbers: each has a single form and a list.
_SCALARS = (
    ("double", _Field.TYPE_DOUBLE), ("float", _Field.TYPE_FLOAT), ("int32", _Field.TYPE_INT32),
    ("int64", _Field.TYPE_INT64), ("uint32", _Field.TYPE_UINT32), ("uint64", _Field.TYPE_UINT64),
    ("sint32", _Field.TYPE_SINT32), ("sint64", _Field.TYPE_SINT64), ("fixed32", _Field.TYPE_FIXED32),
    ("fixed64", _Field.TYPE_FIXED64), ("sfixed32", _Field.TYPE_SFIXED32), ("sfixed64", _Field.TYPE_SFIXED64),
    ("bool", _Field.TYPE_BOOL), ("string", _Field.TYPE_STRING), ("bytes", _Field.TYPE_BYTES),
)  # fmt: skip
_FIRST_VALUE = 3  # after `name` and `doc_string`


class NodeType(IntEnum):
    """What a node does. Types above these exist (storage, batches, checkpoints) and are not of a training step."""

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


class Own:
    """Names of the attributes that Lumos adds."""

    # Of a node.
    LANE = "lumos.lane"  # its thread or stream, by place in LANES
    EVENT = "lumos.event"  # the event it is a piece of, by place in the EVENT_ columns; absent: none
    START = "lumos.start_ns"  # when it began, on the clock that all ranks share
    DURATION = "lumos.duration_ns"
    WAITED = "lumos.waited_ns"  # what was recorded beyond its duration, because it waited
    GAP = "lumos.gap_ns"  # left after the node before it on the lane, as is usual
    FROZEN = "lumos.frozen_ns"  # left beyond that, unexplained
    RETURNS = "lumos.returns"  # it ends a blocking call, or is the transfer of a communication
    PART_OF = "lumos.part_of"  # another message of the kernel that this node stands for
    DEPS = "lumos.deps"  # the nodes it waits for; below zero: a rendezvous, -1 being the first
    DEP_RULES = "lumos.dep_rules"
    DEP_LAGS = "lumos.dep_lags_ns"
    DEP_FROZEN = "lumos.dep_frozen_ns"
    DEP_STARTS = "lumos.dep_starts"  # whether it waits for the start rather than the end
    JOINS = "lumos.joins"  # the rendezvous at which it arrives
    JOIN_LAGS = "lumos.join_lags_ns"
    JOIN_FROZEN = "lumos.join_frozen_ns"
    # Of a file.
    VERSION = "lumos.version"
    RANK = "lumos.rank"
    HEADER = "lumos.header"  # JSON
    WARNINGS = "lumos.warnings"
    ORIGIN = "lumos.origin_ns"  # what START counts from
    LANES = "lumos.lanes"  # JSON, one a lane
    NAMES = "lumos.names"
    MESSAGES = "lumos.messages"  # JSON, one a message
    MEETINGS = "lumos.meetings"  # JSON, one for every rank that takes part
    EVENT_NAME = "lumos.event_name"
    EVENT_CATEGORY = "lumos.event_category"
    EVENT_LANE = "lumos.event_lane"
    EVENT_START = "lumos.event_start_ns"
    EVENT_DURATION = "lumos.event_duration_ns"
    EVENT_CORRELATION = "lumos.event_correlation"
    EVENT_MESSAGE = "lumos.event_message"
    EVENT_FIRST = "lumos.event_first"  # its first node, -1 where it has none
    EVENT_LAST = "lumos.event_last"
    EVENT_PARENT = "lumos.event_parent"
    SYNCS = tuple(f"lumos.sync_{column}" for column in ("correlation", "stream", "wait_stream", "record", "event"))


OWN_VERSION = 1
GROUPS_ID = 0  # the node that describes the process groups; those of the graph follow from 1


class Schema(NamedTuple):
    """The message classes."""

    metadata: Any
    node: Any


@cache
def schema() -> Schema:
    """The message classes, made once a process."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in ("GlobalMetadata", "Node"))
    return Schema(*(message_factory.GetMessageClass(kind) for kind in found))


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="lumos/chakra.proto", package=_PACKAGE, syntax="proto3")
    _add_attribute(file)
    text = _Field.TYPE_STRING
    _add_message(file, "GlobalMetadata", [("version", 1, text, False), ("attr", 2, "AttributeProto", True)])
    _add_message(file, "IOInfo", [(name, i, text, False) for i, name in enumerate(_IO, 1)])
    whole = _Field.TYPE_UINT64
    _add_message(
        file,
        "Node",
        [
            ("id", 1, whole, False), ("name", 2, text, False), ("type", 3, _Field.TYPE_INT32, False),
            ("ctrl_deps", 4, whole, True), ("data_deps", 5, whole, True),
            ("start_time_micros", 6, whole, False), ("duration_micros", 7, whole, False),
            ("inputs", 8, "IOInfo", False), ("outputs", 9, "IOInfo", False), ("attr", 10, "AttributeProto", True),
        ],
    )  # fmt: skip
    return file


_IO = ("values", "shapes", "types")


def _add_attribute(file: descriptor_pb2.FileDescriptorProto) -> None:
    """An attribute: a name and one of many kinds of value."""
    fields: list[tuple[str, int, Any, bool]] = [
        ("name", 1, _Field.TYPE_STRING, False), ("doc_string", 2, _Field.TYPE_STRING, False),
    ]  # fmt: skip
    for place, (name, kind) in enumerate(_SCALARS):
        list_name = f"{name.capitalize()}List"
        _add_message(file, list_name, [("values", 1, kind, True)])
        number = _FIRST_VALUE + 2 * place
        fields += [(f"{name}_val", number, kind, False), (f"{name}_list", number + 1, list_name, False)]
    message = _add_message(file, "AttributeProto", fields)
    message.oneof_decl.add(name="value")
    for field in message.field[2:]:
        field.oneof_index = 0


def _add_message(
    file: descriptor_pb2.FileDescriptorProto, name: str, fields: list[tuple[str, int, Any, bool]]
) -> descriptor_pb2.DescriptorProto:
    """A message of fields (name, number, type or the name of a message, whether repeated)."""
    message = file.message_type.add(name=name)
    for label, number, kind, repeated in fields:
        field = message.field.add(name=label, number=number)
        field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
        if isinstance(kind, str):
            field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        else:
            field.type = kind
    return message


def values_of(attributes: Any) -> dict[str, Any]:
    """The attributes of a message as plain values; lists as sequences."""
    return dict(_pairs(attributes))


def _pairs(attributes: Any) -> Iterator[tuple[str, Any]]:
    for attribute in attributes:
        kind = attribute.WhichOneof("value")
        if kind is not None:
            value = getattr(attribute, kind)
            yield attribute.name, value.values if kind.endswith("_list") else value


def add_value(attributes: Any, name: str, kind: str, value: Any) -> None:
    """Append an attribute; `kind` names the field of the schema, as in `int64_val` or `string_list`."""
    attribute = attributes.add(name=name)
    if kind.endswith("_list"):
        getattr(attribute, kind).values.extend(value)
        getattr(attribute, kind).SetInParent()
    else:
        setattr(attribute, kind, value)
