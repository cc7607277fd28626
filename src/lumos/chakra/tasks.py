"""Tasks of a rank, work and communication, and the nodes of a Chakra file that they become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lumos.chakra import file_format as chakra
from lumos.chakra.file_format import NodeType

LEAST_BYTES = 64  # of a collective; ASTRA-sim cuts them into chunks, and waits for ever for one of no bytes
SCHEMA_VERSION = "0.0.4"
FIRST_ID = 1


class CommNode(NamedTuple):
    """One node of communication."""

    type: NodeType
    bytes: int
    collective: int = -1  # its number in the schema
    group: str = ""  # a process group by the number under which it is written; numbers begin at 1
    source: int = -1
    destination: int = -1
    tag: int = -1


class Task(NamedTuple):
    """A node of a rank; it waits for others by their places in the rank's list."""

    name: str
    ns: float
    waits_for: tuple[int, ...]
    transfer: CommNode | None = None  # None: work


@dataclass
class Chain:
    """The tasks of one rank while they are put together: work in order of time, and transfers issued on the way."""

    tasks: list[Task] = field(default_factory=list)
    now: float = 0.0  # up to when the rank's own time is written, ns
    _head: tuple[int, ...] = ()  # what the next task waits for

    def work(self, until: float, name: str = "work") -> None:
        """The rank works until then."""
        if until > self.now:
            self.tasks.append(Task(name, until - self.now, self._head))
            self._head, self.now = (len(self.tasks) - 1,), until

    def issue(self, name: str, ns: float, transfers: list[CommNode]) -> list[int]:
        """Transfers begin now, beside what follows; their places."""
        places = list(range(len(self.tasks), len(self.tasks) + len(transfers)))
        self.tasks += [Task(name, ns, self._head, transfer) for transfer in transfers]
        return places

    def wait(self, places: list[int], until: float) -> None:
        """What follows waits for transfers, which end then."""
        self._head = tuple(dict.fromkeys((*self._head, *places)))
        self.now = max(self.now, until)

    def also(self, place: int, others: list[int]) -> None:
        """A transfer waits for others, too."""
        task = self.tasks[place]
        new = tuple(dict.fromkeys((*task.waits_for, *(other for other in others if other != place))))
        self.tasks[place] = task._replace(waits_for=new)


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


def add_transfer(node: Any, transfer: CommNode) -> None:
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
