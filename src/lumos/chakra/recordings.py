"""Chakra files that were recorded by PyTorch's profiler and written by the converter of Chakra, as one recorded rank.

The converter keeps what every operator and kernel took, which operator called which (`ctrl_deps`), which operator
launched a kernel, threads, streams, and what PyTorch announced of a collective. It drops when anything happened, what
waited for what on the GPU, and fractions of microseconds. This module reads what is there; `recorded_times` finds the
times again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lumos.chakra.file_format import (
    ANNOUNCEMENT,
    COLLECTIVE_NAMES,
    COMMUNICATION,
    LONGEST_US,
    ChakraFile,
    Node,
    NodeType,
)
from lumos.trace.messages import PeerCall, message_name, peers_are_indices, with_job_ranks
from lumos.trace.names import Category, collective_name, is_step
from lumos.trace.trace import Message

_ROOTS = re.compile(r"\[pytorch\|profiler\|execution_(trace|graph)\|(process|thread)\]")
_LATEST_US = 4 * 10**15  # 2096
_COMPUTE_STREAM, _COMMUNICATION_STREAM = 7, 20  # of files that do not number their streams
_MOST_RANKS = 1 << 20
_MOST_TEXT = 1 << 16  # of an announcement; beyond, it is a list of splits
# Tensors are written as [tensor, storage, offset, elements, bytes of an element, 'device'].
_STORAGE = re.compile(r"\[\d+, (\d{1,18})(?:, \d+)+, '(?:cuda|hip)[^']*'\]")
# [sequence, whether a message], [group, description], peer, name, splits, splits, first rank, stride, size.
_ANNOUNCED = re.compile(
    r"(?:\[(?P<sequence>\d{1,18}), (?P<message>True|False)\]|(?P<number>\d{1,18})), "
    r"(?:\['(?P<group>[^']*)', '[^']*'\]|(?P<group_number>\d{1,18})), (?P<peer>-?\d{1,9}), '(?P<name>\w+)', "
    r"\[[^\[\]]*\], \[[^\[\]]*\], (?P<first>-?\d{1,9}), (?P<stride>-?\d{1,9}), (?P<size>-?\d{1,9})\]$"
)
_BLOCKING = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")


@dataclass(frozen=True)
class Announcement:
    """What PyTorch said of a collective or a message, or of waiting for one."""

    name: str  # as in a Message; "wait"
    group: str
    sequence: int
    peer: int
    ranks: tuple[int, ...]

    @property
    def is_wait(self) -> bool:
        return self.name == "wait"

    def message(self, size: int, rank: int) -> Message:
        """The same with the bytes that one rank gives; its peer is an index into its group."""
        count = len(self.ranks)
        received = {"all_gather": size * count, "reduce_scatter": size // max(count, 1)}.get(self.name, size)
        source, destination = {"send": (rank, self.peer), "recv": (self.peer, rank)}.get(self.name, (-1, -1))
        return Message(
            self.name, "byte", size, received, self.group, count or -1, self.ranks, self.sequence, source, destination
        )


@dataclass
class RecordedKernel:
    """Something on a GPU, with the operator that launched it."""

    node: Node
    op: int
    number: int = -1  # in the order of launches

    @property
    def nanoseconds(self) -> int:
        """Its time; the converter cut off the fraction of a microsecond."""
        return min(self.node.duration_us, LONGEST_US) * 1000 + 500

    @cached_property
    def communicates(self) -> bool:
        return self.node.type in COMMUNICATION

    @cached_property
    def category(self) -> Category:
        copies = {"Memcpy": Category.COPY, "Memset": Category.SET}
        return copies.get(self.node.name[:6], Category.KERNEL)

    @cached_property
    def stream(self) -> int:
        stream = self.node.number("stream", 1 << 31)
        if stream >= 0:
            return stream
        return _COMMUNICATION_STREAM if self.communicates else _COMPUTE_STREAM

    @cached_property
    def announced(self) -> Announcement | None:
        return announcement(self.node) if self.communicates else None

    @cached_property
    def read(self) -> frozenset[int]:
        """Storages that it may read, or write in place."""
        return frozenset(map(int, _STORAGE.findall(self.node.inputs)))

    @cached_property
    def written(self) -> frozenset[int]:
        return frozenset(map(int, _STORAGE.findall(self.node.outputs)))


@dataclass
class RecordedOp:
    """An operator of a thread; indices are those of `RankRecording.ops`."""

    node: Node
    thread: int
    parent: int = -1
    children: list[int] = field(default_factory=list)
    kernels: list[RecordedKernel] = field(default_factory=list)
    waits_for: tuple[int, ...] = ()  # operators of other threads

    @cached_property
    def announced(self) -> Announcement | None:
        return announcement(self.node) if self.node.name == ANNOUNCEMENT else None

    @cached_property
    def is_step(self) -> bool:
        return is_step(self.node.name)

    @property
    def is_timed(self) -> bool:
        """Whether its own time is known: the converter loses that of steps, and sets that of optimizers to zero."""
        return (self.node.duration_us > 0 or not self.children) and not self.is_step

    @property
    def own_ns(self) -> int:
        return min(self.node.duration_us, LONGEST_US) * 1000 + 500

    @property
    def blocks(self) -> bool:
        """Whether it returns only when its copy to the host is done."""
        copies = [kernel for kernel in self.kernels if kernel.category == Category.COPY]
        return any("DtoH" in k.node.name and (self.node.name in _BLOCKING or "Pageable" in k.node.name) for k in copies)


@dataclass(frozen=True)
class RankRecording:
    """The file of one rank: operators in the order in which they began."""

    file: ChakraFile
    ops: list[RecordedOp]
    peers_are_indices: bool = True

    @property
    def rank(self) -> int:
        return self.file.rank

    @cached_property
    def has_times(self) -> bool:
        """Whether the file says when everything ran; today's converter does not write that."""
        timed = [op.node for op in self.ops if op.node.duration_us] + [kernel.node for kernel in self.kernels]
        return all(0 < node.start_us < _LATEST_US for node in timed)

    @cached_property
    def kernels(self) -> list[RecordedKernel]:
        """All kernels, in the order of their numbers."""
        kernels = [kernel for op in self.ops for kernel in op.kernels]
        for number, kernel in enumerate(kernels):
            kernel.number = number
        return kernels

    def messages(self, kernel: RecordedKernel) -> list[Message]:
        """What a kernel of communication carries: its announcement and, of a batch of messages, all that are alike."""
        size = kernel.node.number("comm_size")
        own = kernel.announced or self.ops[kernel.op].announced
        if own is None or own.is_wait:
            name = COLLECTIVE_NAMES.get(kernel.node.number("comm_type"), "") or collective_name(kernel.node.name)
            name = name or "communication"
            group = str(kernel.node.values.get("pg_name", ""))
            return [Message(name, "byte", size, size, group)]
        if own.name not in ("send", "recv"):
            return [self.message(own, size)]
        return [self.message(one, size) for one in self._batches.get(own.sequence, [own])]

    def message(self, announced: Announcement, size: int) -> Message:
        """What an announcement of this rank says, with its peer as a rank of the job."""
        return with_job_ranks(announced.message(size, self.rank), self.peers_are_indices)

    @cached_property
    def peer_calls(self) -> list[Announcement]:
        """Sends and receives, in order."""
        return [op.announced for op in self.ops if op.announced and op.announced.name in ("send", "recv")]

    @cached_property
    def _batches(self) -> dict[int, list[Announcement]]:
        """Sends and receives by their sequence number: those of one batch share it."""
        found: dict[int, list[Announcement]] = {}
        for announced in self.peer_calls:
            found.setdefault(announced.sequence, []).append(announced)
        return found


def announcement(node: Node) -> Announcement | None:
    """What the inputs of `record_param_comms`, or of the kernel that it launched, say; None if they say nothing."""
    found = _ANNOUNCED.search(node.inputs[-_MOST_TEXT:])
    if found is None:
        return None
    name = found["name"]
    first, stride, size = (int(found[key]) for key in ("first", "stride", "size"))
    is_group = first >= 0 and stride > 0 and size > 1 and first + stride * size <= _MOST_RANKS
    return Announcement(
        name=message_name(name) or "wait",
        group=found["group"] if found["group"] is not None else found["group_number"],
        sequence=int(found["sequence"] or found["number"]),
        peer=int(found["peer"]),
        ranks=tuple(range(first, first + stride * size, stride)) if is_group else (),
    )


def is_recording(files: Sequence[ChakraFile]) -> bool:
    """Whether these files are recordings of PyTorch: operators with threads and callers, and kernels below them."""
    return all(_is_recorded(file) for file in files)


def _is_recorded(file: ChakraFile) -> bool:
    numbered = [node for node in file.nodes if "rf_id" in node.values]  # before 2024, kernels were not
    host = [node for node in numbered if node.values.get("is_cpu_op") is True]
    kernels = [node for node in numbered if node.values.get("is_cpu_op") is False]
    if not kernels or len(host) < len(file.nodes) // 4:
        return False
    ops = {node.id for node in host}
    launched = sum(bool(ops.intersection(node.ctrl_deps)) for node in kernels)
    return launched > len(kernels) // 2 and any(node.duration_us for node in kernels)


def recordings(files: Sequence[ChakraFile]) -> list[RankRecording]:
    """The ranks of one job."""
    ranks = [_recording(file) for file in files]
    calls = (PeerCall(r.rank, call.name == "send", call.peer, call.ranks) for r in ranks for call in r.peer_calls)
    by_index = peers_are_indices(calls, otherwise=True)
    return [replace(rank, peers_are_indices=by_index) for rank in ranks]


def _recording(file: ChakraFile) -> RankRecording:
    """The operators and kernels of a file."""
    host = sorted((node for node in file.nodes if _is_op(node)), key=lambda node: node.id)
    index = {node.id: i for i, node in enumerate(host)}
    ops = [RecordedOp(node, _thread(node)) for node in host]
    for i, op in enumerate(ops):
        caller = min((index[dep] for dep in op.node.ctrl_deps if dep in index), default=-1)
        if 0 <= caller < i and ops[caller].thread == op.thread:
            op.parent = caller
            ops[caller].children.append(i)
        found = (index[dep] for dep in op.node.data_deps if dep in index)
        op.waits_for = tuple(dep for dep in found if dep < i and ops[dep].thread != op.thread)
    for node in sorted(file.nodes, key=lambda node: node.id):
        if node.values.get("is_cpu_op", True) is False and node.type != NodeType.METADATA:
            launcher = next((index[dep] for dep in (*node.ctrl_deps, *node.data_deps) if dep in index), -1)
            if launcher >= 0:
                ops[launcher].kernels.append(RecordedKernel(node, launcher))
    return RankRecording(file, ops)


def _is_op(node: Node) -> bool:
    on_host = node.values.get("is_cpu_op", True) is not False and node.type != NodeType.METADATA
    return on_host and _ROOTS.fullmatch(node.name) is None


def _thread(node: Node) -> int:
    thread = node.values.get("tid", 0)
    return thread if isinstance(thread, int) else 0
