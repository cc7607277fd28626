"""Chakra execution traces (`.et`), one file a rank, to the Execution that they describe.

A Chakra file is a graph, not a record of events, so it does not go through the rules that find a graph in a Trace: its
nodes and dependencies are taken as they stand. Files that Lumos wrote come back as they were (`chakra_own`); those of
others say what waits for what but not on which thread or stream, and get lanes (`chakra_foreign`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from lumos.errors import InputError
from lumos.graph.from_trace.build import Execution
from lumos.trace.read.chakra_schema import NodeType, Own, schema, values_of
from lumos.trace.read.formats import MOST_VARINT_BYTES, varint
from lumos.trace.read.host_memory import available_bytes

_MEMORY_PER_BYTE = 12  # of a file, once decoded; measured on files that Lumos wrote
KEPT = frozenset(
    {"is_cpu_op", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "pg_name", "stream", "tensor_size"}
)


class Node(NamedTuple):
    """A node, with those of its attributes that are of use."""

    id: int
    name: str
    type: int
    data_deps: tuple[int, ...]
    ctrl_deps: tuple[int, ...]
    start_us: int
    duration_us: int
    inputs: str  # of a node of metadata
    values: dict[str, Any]


@dataclass(frozen=True)
class ChakraFile:
    """The file of one rank."""

    path: Path
    rank: int  # -1: it does not say
    head: dict[str, Any]
    nodes: list[Node]

    @property
    def is_own(self) -> bool:
        return Own.VERSION in self.head


def read_chakra(files: Sequence[ChakraFile]) -> Execution:
    """The run that the files of some ranks describe."""
    from lumos.trace.read.chakra_foreign import foreign_execution
    from lumos.trace.read.chakra_own import own_execution

    own = [file for file in files if file.is_own]
    if own and len(own) < len(files):
        other = next(file for file in files if not file.is_own)
        raise InputError(
            f"{other.path}: not written by Lumos, while {own[0].path.name} is: choose one kind with --match"
        )
    return own_execution(files) if own else foreign_execution(files)


def read_chakra_file(path: Path) -> ChakraFile:
    """All messages of a file."""
    _refuse_if_too_large(path)
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror}); check the path and its permissions") from None


def _read(file: IO[bytes], path: Path) -> ChakraFile:
    messages = _delimited(file, path)
    kinds = schema()
    first = next(messages, None)
    if first is None:
        raise InputError(f"{path}: the file is empty; write it again")
    head = values_of(_parsed(kinds.metadata, first, path, 0).attr)
    nodes: list[Node] = []
    seen: set[int] = set()
    for number, data in enumerate(messages, 1):
        node = _node(_parsed(kinds.node, data, path, number))
        if node.id in seen:
            raise InputError(f"{path}: two nodes have the id {node.id}; a Chakra trace names each node once")
        seen.add(node.id)
        nodes.append(node)
    if not nodes:
        raise InputError(f"{path}: no nodes in it; write it again from a run that has some")
    rank = head.get(Own.RANK, -1)
    return ChakraFile(path, rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else -1, head, nodes)


def _parsed(kind: Any, data: bytes, path: Path, number: int) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(data)
    except (DecodeError, RecursionError):
        what = "its head" if number == 0 else f"node {number}"
        raise InputError(
            f"{path}: {what} is no message of a Chakra trace; is the file damaged, or of another kind?"
        ) from None


def _node(message: Any) -> Node:
    values = {
        name: value for name, value in values_of(message.attr).items() if name in KEPT or name.startswith("lumos.")
    }
    return Node(
        id=message.id,
        name=message.name,
        type=message.type,
        data_deps=tuple(message.data_deps),
        ctrl_deps=tuple(message.ctrl_deps),
        start_us=message.start_time_micros,
        duration_us=message.duration_micros,
        inputs=message.inputs.values if message.type == NodeType.METADATA else "",
        values={
            name: value if isinstance(value, str | int | float | bytes) else list(value)
            for name, value in values.items()
        },
    )


def _delimited(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The messages of a file; each is no longer than what is left of it."""
    left = path.stat().st_size
    number = 0
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


def _refuse_if_too_large(path: Path) -> None:
    try:
        need = path.stat().st_size * _MEMORY_PER_BYTE
    except OSError:
        return  # opening it will say what is wrong
    if need > available_bytes():
        raise InputError(
            f"{path}: about {need / 2**30:.1f} GiB would be needed and {available_bytes() / 2**30:.1f} GiB are free; "
            "read fewer ranks with --match"
        )
