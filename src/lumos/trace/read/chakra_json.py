"""A Chakra graph as JSON (`workload_graph`), the other form that the feeder of ASTRA-sim reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lumos.errors import InputError
from lumos.trace.read.chakra import KEPT, ChakraFile, Node
from lumos.trace.read.json_slices import BAD_GZIP, open_bytes

_MOST_BYTES = 1 << 29  # of text
_LARGEST = (1 << 63) - 1


class _Node(msgspec.Struct):
    id: int = msgspec.field(name="Id")
    name: str = msgspec.field(default="", name="Name")
    type: int = msgspec.field(default=0, name="NodeType")
    data_deps: list[int] = []
    ctrl_deps: list[int] = msgspec.field(default_factory=list, name="ctrlDeps")
    runtime: int = 0  # microseconds


class _Graph(msgspec.Struct):
    workload_graph: list[msgspec.Raw] = []


def read_chakra_json(path: Path) -> ChakraFile:
    """All nodes of a file."""
    try:
        with open_bytes(path) as file:
            text = file.read(_MOST_BYTES + 1)
    except BAD_GZIP as error:
        raise InputError(f"{path}: not a readable file ({error}); copy it again") from None
    if len(text) > _MOST_BYTES:
        raise InputError(f"{path}: more than {_MOST_BYTES >> 20} MiB of JSON; give the graph as .et")
    try:
        nodes = [_node(raw) for raw in msgspec.json.decode(text, type=_Graph).workload_graph]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a Chakra graph ({error})") from None
    if not nodes or len({node.id for node in nodes}) < len(nodes):
        raise InputError(f"{path}: {'two nodes have one id' if nodes else 'no nodes in it'}; write it again")
    return ChakraFile(path, -1, {}, nodes)


def _node(raw: msgspec.Raw) -> Node:
    found = msgspec.json.decode(raw, type=_Node)
    others: dict[str, Any] = msgspec.json.decode(raw)
    if not 0 <= found.runtime <= _LARGEST:
        raise msgspec.ValidationError(f"the runtime of node {found.id} is out of range")
    return Node(
        id=found.id,
        name=found.name,
        type=found.type,
        data_deps=tuple(found.data_deps),
        ctrl_deps=tuple(found.ctrl_deps),
        start_us=0,
        duration_us=found.runtime,
        inputs="",
        values={name: value for name, value in others.items() if name in KEPT},
    )
