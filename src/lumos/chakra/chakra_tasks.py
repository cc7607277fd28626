"""The tasks of a rank as nodes of a Chakra file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lumos.chakra import file_format as chakra
from lumos.chakra.communication import Transfer
from lumos.chakra.file_format import NodeType
from lumos.chakra.folded_ranks import Task

SCHEMA_VERSION = "0.0.4"
FIRST_ID = 1


def head_message() -> Any:
    """The metadata of a file of tasks."""
    head = chakra.schema().metadata(version=SCHEMA_VERSION)
    chakra.add_value(head.attr, chakra.FOLDED, "int64_val", 1)
    return head


def task_messages(tasks: Sequence[Task]) -> Iterator[Any]:
    """The nodes of a rank. Microseconds that are rounded away from work are carried on to the next piece of it."""
    done, written = 0.0, 0
    for place, task in enumerate(tasks):
        if task.transfer is None:
            done += task.ns
            micros = round(done / 1000) - written
            written += micros
        else:
            micros = round(task.ns / 1000)
        node = chakra.schema().node(
            id=place + FIRST_ID,
            name=task.name,
            type=NodeType.COMP if task.transfer is None else task.transfer.type,
            data_deps=[other + FIRST_ID for other in task.waits_for],
            duration_micros=micros,
        )
        if task.transfer is None:
            chakra.add_value(node.attr, "is_cpu_op", "bool_val", False)
        else:
            add_transfer(node, task.transfer)
        yield node


def add_transfer(node: Any, transfer: Transfer) -> None:
    """The attributes of a node of communication."""
    chakra.add_value(node.attr, "is_cpu_op", "bool_val", False)
    chakra.add_value(node.attr, "comm_size", "int64_val", transfer.bytes)
    if transfer.type == NodeType.COMM_COLL:
        chakra.add_value(node.attr, "comm_type", "int64_val", transfer.collective)
        chakra.add_value(node.attr, "pg_name", "string_val", transfer.group)
    else:
        chakra.add_value(node.attr, "comm_src", "int32_val", transfer.source)
        chakra.add_value(node.attr, "comm_dst", "int32_val", transfer.destination)
        chakra.add_value(node.attr, "comm_tag", "int32_val", transfer.tag)


def renumbered(transfer: Transfer | None, number: Mapping[int, int]) -> Transfer | None:
    """A message between ranks that have other numbers in the files."""
    if transfer is None or transfer.type == NodeType.COMM_COLL:
        return transfer
    return transfer._replace(source=number[transfer.source], destination=number[transfer.destination])
