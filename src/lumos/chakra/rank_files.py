"""Files of very many ranks: those of a pipeline stage differ in their groups and peers alone.

The tasks of a stage are encoded once, with room for the numbers of groups and ranks, and every rank gets a copy with
its own. Numbers are written at their usual length, so there is one encoding for every combination of lengths. Files
are written in processes, into a folder of their own, and moved to their places when all of them are whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lumos.chakra.chakra_tasks import head_message, task_messages
from lumos.chakra.file_format import NodeType
from lumos.chakra.folded_ranks import Task
from lumos.errors import OptionError
from lumos.program.rank_places import RankPlaces
from lumos.workers.engine import Job, engine_named

_RANKS_AT_ONCE = 64  # of one stage, in one process
_GROUP, _SOURCE, _DESTINATION = b"\x0a\x07pg_name", b"\x0a\x08comm_src", b"\x0a\x08comm_dst"
_GROUP_TAG, _RANK_TAG = 3, 1  # bytes between an attribute's name and its value: field number, and length of a string


class Progress(Protocol):
    """Shows how much is done, of how much, and of what."""

    def __call__(self, done: int, total: int, what: str = ...) -> None: ...


class Slot(NamedTuple):
    """What differs from rank to rank: the number of a group (`SIZExSTRIDE`), or the rank of a stage."""

    group: str = ""
    stage: int = -1


@dataclass(frozen=True)
class Stages:
    """The tasks of every stage, and which ranks have them."""

    places: RankPlaces
    tasks: tuple[tuple[Task, ...], ...]

    def slots(self, stage: int) -> list[Slot]:
        """What differs between the ranks of a stage."""
        found: dict[Slot, None] = {}
        for task in self.tasks[stage]:
            if task.transfer is not None:
                found |= dict.fromkeys(slots_of(task))
        return list(found)

    def kinds(self) -> list[str]:
        """The kinds of groups, in order."""
        used = {slot.group for stage in range(len(self.tasks)) for slot in self.slots(stage) if slot.group}
        return sorted(used, key=lambda kind: (_sizes(kind)[1], _sizes(kind)[0]))

    def first_numbers(self) -> dict[str, int]:
        """The number of the first group of every kind; groups count from 1."""
        found, number = {}, 1
        for kind in self.kinds():
            found[kind] = number
            number += self.places.stages * self.places.groups(*_sizes(kind))
        return found

    def groups(self) -> dict[str, list[int]]:
        """The members of every group, by its number, as ASTRA-sim takes them."""
        firsts, found = self.first_numbers(), dict[str, list[int]]()
        kinds = [[slot.group for slot in self.slots(stage) if slot.group] for stage in range(len(self.tasks))]
        for rank in range(self.places.world):
            for kind in kinds[self.places.of(rank)[1]]:
                number = str(firsts[kind] + self.places.group_number(rank, *_sizes(kind)))
                if number not in found:
                    found[number] = list(self.places.members(rank, *_sizes(kind)))
        return dict(sorted(found.items(), key=lambda item: int(item[0])))


def slots_of(task: Task) -> list[Slot]:
    """What differs in a task that transfers: its group, or sender and receiver."""
    if task.transfer is None:
        return []
    if task.transfer.type == NodeType.COMM_COLL:
        return [Slot(group=task.transfer.group)]
    return [Slot(stage=task.transfer.source), Slot(stage=task.transfer.destination)]


def _sizes(kind: str) -> tuple[int, int]:
    size, _, stride = kind.partition("x")
    return int(size), int(stride)


# ---------------------------------------------------------------------- encoding
class Encoded(NamedTuple):
    """A file with room for what differs: where each of it stands."""

    data: NDArray[np.uint8]
    places: dict[Slot, NDArray[np.int64]]


@dataclass
class Encoder:
    """Encodes the tasks of one stage, once for every combination of lengths."""

    tasks: Sequence[Task]
    _known: dict[tuple[int, ...], Encoded] = field(default_factory=dict)

    def of_rank(self, values: dict[Slot, bytes]) -> bytes:
        """The file with these values in it."""
        lengths = tuple(len(value) for value in values.values())
        if lengths not in self._known:
            self._known[lengths] = self._encoded({slot: len(value) for slot, value in values.items()})
        encoded = self._known[lengths]
        data = encoded.data.copy()
        for slot, value in values.items():
            for i, byte in enumerate(value):
                data[encoded.places[slot] + i] = byte
        return data.tobytes()

    def _encoded(self, lengths: dict[Slot, int]) -> Encoded:
        parts = [_delimited(head_message())]
        at, found = len(parts[0]), {slot: list[int]() for slot in lengths}
        for task, node in zip(self.tasks, task_messages([_filled(task, lengths) for task in self.tasks]), strict=True):
            data = _delimited(node)
            for slot, label in zip(slots_of(task), _labels(task), strict=True):
                found[slot].append(at + data.rindex(label) + len(label) + (_GROUP_TAG if slot.group else _RANK_TAG))
            parts.append(data)
            at += len(data)
        places = {slot: np.array(where, np.int64) for slot, where in found.items()}
        return Encoded(np.frombuffer(b"".join(parts), np.uint8), places)


def _labels(task: Task) -> list[bytes]:
    if task.transfer is None:
        return []
    return [_GROUP] if task.transfer.type == NodeType.COMM_COLL else [_SOURCE, _DESTINATION]


def _filled(task: Task, lengths: dict[Slot, int]) -> Task:
    """The task with values of the right lengths."""
    found = slots_of(task)
    if task.transfer is None or not found:
        return task
    if found[0].group:
        return task._replace(transfer=task.transfer._replace(group="9" * lengths[found[0]]))
    source, destination = (1 << 7 * (lengths[slot] - 1) for slot in found)
    return task._replace(transfer=task.transfer._replace(source=source, destination=destination))


def _delimited(message: object) -> bytes:
    data: bytes = message.SerializeToString()  # type: ignore[attr-defined]
    return varint(len(data)) + data


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(parts) + bytes([number])


# ---------------------------------------------------------------------- writing
@dataclass(frozen=True)
class _Writing:
    """What the processes that write share."""

    stages: Stages
    firsts: dict[str, int]
    folder: str
    name: str

    def values(self, rank: int, slots: Sequence[Slot]) -> dict[Slot, bytes]:
        """What is particular to a rank."""
        places = self.stages.places
        number, _ = places.of(rank)
        return {
            slot: str(self.firsts[slot.group] + places.group_number(rank, *_sizes(slot.group))).encode()
            if slot.group
            else varint(places.rank(number, slot.stage))
            for slot in slots
        }


def _write_ranks(shared: _Writing, ranks: list[int]) -> int:
    """Write the files of ranks of one stage; how many."""
    stage = shared.stages.places.of(ranks[0])[1]
    slots, encoder = shared.stages.slots(stage), Encoder(shared.stages.tasks[stage])
    for rank in ranks:
        path = Path(shared.folder) / f"{shared.name}.{rank}.et"
        path.write_bytes(encoder.of_rank(shared.values(rank, slots)))
    return len(ranks)


def write_stages(path: Path, stages: Stages, workers: int = 1, progress: Progress | None = None) -> Path | None:
    """Write `NAME.RANK.et` for every rank and `NAME.groups.json`: all of them, or none. The file of the groups.

    `workers` are processes, 0 for one a core.
    """
    name, places, groups = path.name.removesuffix(".et"), stages.places, stages.groups()
    _require_space(path, stages)
    by_stage: dict[int, list[int]] = {}
    for rank in range(places.world):
        by_stage.setdefault(places.of(rank)[1], []).append(rank)
    chunks = [
        ranks[low : low + _RANKS_AT_ONCE] for ranks in by_stage.values() for low in range(0, len(ranks), _RANKS_AT_ONCE)
    ]
    with _all_or_none(path) as folder, engine_named("local", workers) as engine:  # ends before the folder does
        job = Job(_write_ranks, _Writing(stages, stages.first_numbers(), str(folder), name), advice="write fewer ranks")
        done = 0
        for written in engine.run(job, chunks):
            done += written
            if progress is not None:
                progress(done, places.world, "writing")
        if groups:
            (folder / f"{name}.groups.json").write_bytes(msgspec.json.encode(groups))
    return path.with_name(f"{name}.groups.json") if groups else None


def _require_space(path: Path, stages: Stages) -> None:
    """Refuse before anything is written what the disk has no room for."""
    per_task = 110  # bytes, about
    needed = sum(len(tasks) for tasks in stages.tasks) * per_task * stages.places.of_stage
    free = shutil.disk_usage(path.parent).free
    if 0 < free < needed:  # what is no disk, such as /proc, has none free; writing tells what is wrong there
        raise OptionError(
            f"-o {path}: {stages.places.world:,} ranks need about {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are "
            "free there; name another disk, or fewer micro-batches"
        )


@contextmanager
def _all_or_none(path: Path) -> Iterator[Path]:
    """A folder whose files are moved beside `path` at the end; nothing of them stays if that is not reached."""
    if not path.parent.is_dir():
        raise OptionError(f"-o {path}: the folder {path.parent} does not exist; create it first")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", dir=path.parent))
    except OSError as error:
        raise OptionError(f"-o {path}: cannot be written ({error.strerror})") from None
    try:
        yield folder
        for file in sorted(folder.iterdir()):
            os.replace(file, path.parent / file.name)
    except OSError as error:
        raise OptionError(f"-o {path}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
