"""Tasks of a rank, work and communication, and the nodes of a Chakra file that they become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lumos.chakra import file_format as chakra
from lumos.chakra.file_format import COLLECTIVE_NAMES, NodeType

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

    @property
    def name(self) -> str:
        """Its kind."""
        sides = {NodeType.COMM_SEND: "send", NodeType.COMM_RECV: "receive"}
        return sides.get(self.type) or COLLECTIVE_NAMES[self.collective]


class Task(NamedTuple):
    """A node of a rank; it waits for others by their places in the rank's list."""

    name: str
    ns: float
    waits_for: tuple[int, ...]
    transfer: CommNode | None = None  # None: work


class Cut(NamedTuple):
    """Where the work of a rank is cut; in order of time, then of the graph, then of what happens there."""

    time: float
    position: int
    order: int
    ready: float  # when the rank itself was ready for it
    name: str = "work"  # of the work before it
    issues: tuple[tuple[CommNode, float], ...] = ()  # transfers, and how long they take
    key: tuple[int, ...] = ()  # of what is issued
    waits: tuple[tuple[int, ...], ...] = ()  # for what was issued
    after: tuple[tuple[int, ...], ...] = ()  # what was issued, and what is issued has to follow
    label: str = ""  # of what is issued; "": its kind


def chained(cuts: Iterable[Cut], end: float, rest: str = "work", in_turn: bool = False) -> list[Task]:
    """The tasks of a rank: its work up to every cut and the end, and the transfers that hang on it.

    With `in_turn`, transfers that are issued together follow one another.
    """
    tasks, places, now, head = list[Task](), dict[tuple[int, ...], list[int]](), 0.0, tuple[int, ...]()
    for cut in (*sorted(cuts), Cut(end, 0, 0, end, rest)):
        if cut.ready > now:
            tasks.append(Task(cut.name, cut.ready - now, head))
            head, now = (len(tasks) - 1,), cut.ready
        for key in cut.waits:
            head, now = tuple(dict.fromkeys((*head, *places[key]))), max(now, cut.time)
        before, issued = [place for key in cut.after for place in places.get(key, ())], list[int]()
        for sent, ns in cut.issues:
            before = (issued or before)[-1:] if in_turn else before
            issued.append(len(tasks))
            tasks.append(Task(cut.label or sent.name, ns, tuple(dict.fromkeys((*head, *before))), sent))
        places |= {cut.key: issued} if issued else {}
    return tasks


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
