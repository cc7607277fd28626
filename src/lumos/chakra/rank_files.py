"""Files of tasks, also of very many ranks: those of a pipeline stage differ in their groups and peers only.

The tasks of a stage are encoded once, with room for the numbers of groups and ranks, and every rank gets a copy with
its own. Numbers are written at their usual length, so there is one encoding for every combination of lengths. Files
are written in processes, into a folder of their own, and moved to their places when all of them are whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lumos.chakra.file_format import NodeType, delimited, varint_of
from lumos.chakra.tasks import CommNode, Task, head_message, task_messages
from lumos.errors import OptionError
from lumos.program.rank_places import RankPlaces
from lumos.workers.engine import Job, engine_named

_RANKS_AT_ONCE = 64  # of one stage, in one process
_GROUP, _SOURCE, _DESTINATION = b"\x0a\x07pg_name", b"\x0a\x08comm_src", b"\x0a\x08comm_dst"
_GROUP_TAG, _RANK_TAG = 3, 1  # bytes between an attribute's name and its value: field number, and length of a string


Progress = Callable[[int, int, str], None]  # how much is done, of how much, and of what


class Written(NamedTuple):
    """What an export wrote."""

    files: list[Path]
    group_file: Path | None  # None: no process groups
    nodes: int
    collectives: int
    messages: int
    groups: int
    warnings: list[str]


class Slot(NamedTuple):
    """What differs from rank to rank: the number of a group, or the rank of a stage."""

    group: str = ""
    stage: int = -1


@dataclass(frozen=True)
class Workload:
    """The tasks of every stage, and which ranks have them. Of a recorded job, every rank is a stage of its own.

    A group of described ranks is named `SIZExSTRIDE`, as it is laid out; one of recorded ranks by its number.
    """

    places: RankPlaces
    tasks: tuple[tuple[Task, ...], ...]
    recorded: Mapping[str, tuple[int, ...]] | None = None  # groups of recorded ranks

    def slots(self, stage: int) -> list[Slot]:
        """What differs between the ranks of a stage."""
        return list(dict.fromkeys(slot for task in self.tasks[stage] for slot in slots_of(task)))

    def sizes(self, group: str) -> tuple[int, int]:
        """How many ranks a group has, and how far apart they are."""
        if self.recorded is not None:
            return len(self.recorded[group]), 1
        size, _, stride = group.partition("x")
        return int(size), int(stride)

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """The ranks of a group that a rank is in."""
        if self.recorded is not None:
            return self.recorded[group]
        return self.places.members(rank, *self.sizes(group))

    def number(self, rank: int, group: str) -> str:
        """The number of that group in the files, where groups count from 1."""
        if self.recorded is not None:
            return group
        return str(self._first_numbers[group] + self.places.group_number(rank, *self.sizes(group)))

    @cached_property
    def _first_numbers(self) -> dict[str, int]:
        """The number of the first group of every kind."""
        used = {slot.group for stage in range(len(self.tasks)) for slot in self.slots(stage) if slot.group}
        found, number = {}, 1
        for kind in sorted(used, key=lambda kind: self.sizes(kind)[::-1]):
            found[kind] = number
            number += self.places.stages * self.places.groups(*self.sizes(kind))
        return found

    def groups(self) -> dict[str, list[int]]:
        """The members of every group, by its number, as ASTRA-sim takes them (`--comm-group-configuration`)."""
        if self.recorded is not None:
            return {number: list(ranks) for number, ranks in self.recorded.items()}
        found: dict[str, list[int]] = {}
        kinds = [[slot.group for slot in self.slots(stage) if slot.group] for stage in range(len(self.tasks))]
        for rank in range(self.places.world):
            for kind in kinds[self.places.of(rank)[1]]:
                number = self.number(rank, kind)
                if number not in found:
                    found[number] = list(self.members(rank, kind))
        return dict(sorted(found.items(), key=lambda item: int(item[0])))

    @property
    def sent(self) -> Iterator[CommNode]:
        """All transfers, of every stage once."""
        return (task.transfer for tasks in self.tasks for task in tasks if task.transfer is not None)


def slots_of(task: Task) -> list[Slot]:
    """What differs in a task that transfers: its group, or sender and receiver."""
    if task.transfer is None:
        return []
    if task.transfer.type == NodeType.COMM_COLL:
        return [Slot(group=task.transfer.group)]
    return [Slot(stage=task.transfer.source), Slot(stage=task.transfer.destination)]


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
        parts = [delimited(head_message())]
        at, found = len(parts[0]), {slot: list[int]() for slot in lengths}
        for task, node in zip(self.tasks, task_messages([_filled(task, lengths) for task in self.tasks]), strict=True):
            data = delimited(node)
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


# ---------------------------------------------------------------------- writing
@dataclass(frozen=True)
class _Writing:
    """What the processes that write share."""

    workload: Workload
    path: Path

    def values(self, rank: int, slots: Sequence[Slot]) -> dict[Slot, bytes]:
        """What is particular to a rank."""
        number, _ = self.workload.places.of(rank)
        return {
            slot: self.workload.number(rank, slot.group).encode()
            if slot.group
            else varint_of(self.workload.places.rank(number, slot.stage))
            for slot in slots
        }


def _write_ranks(shared: _Writing, ranks: list[int]) -> int:
    """Write the files of ranks of one stage; how many."""
    stage = shared.workload.places.of(ranks[0])[1]
    slots, encoder = shared.workload.slots(stage), Encoder(shared.workload.tasks[stage])
    for rank in ranks:
        file_of_rank(shared.path, rank).write_bytes(encoder.of_rank(shared.values(rank, slots)))
    return len(ranks)


def file_of_rank(path: Path, rank: int) -> Path:
    """Of NAME.et, the file of a rank."""
    return path.with_name(f"{path.name.removesuffix('.et')}.{rank}.et")


def group_file_of(path: Path) -> Path:
    """Of NAME.et, the file of the process groups."""
    return path.with_name(f"{path.name.removesuffix('.et')}.groups.json")


def write_workload(path: Path, workload: Workload, workers: int = 1, progress: Progress | None = None) -> Written:
    """Write `NAME.RANK.et` for every rank and `NAME.groups.json`: all of them, or none.

    `workers` are processes, 0 for one a core.
    """
    places, groups = workload.places, workload.groups()
    _require_space(path, workload)
    by_stage: dict[int, list[int]] = {}
    for rank in range(places.world):
        by_stage.setdefault(places.of(rank)[1], []).append(rank)
    chunks = [
        ranks[low : low + _RANKS_AT_ONCE] for ranks in by_stage.values() for low in range(0, len(ranks), _RANKS_AT_ONCE)
    ]
    with _all_or_none(path) as folder, engine_named("local", workers) as engine:  # ends before the folder does
        job = Job(_write_ranks, _Writing(workload, folder / path.name), advice="write fewer ranks")
        done = 0
        for written in engine.run(job, chunks):
            done += written
            if progress is not None:
                progress(done, places.world, "writing")
        if groups:
            group_file_of(folder / path.name).write_bytes(msgspec.json.encode(groups))
    collectives = sum(one.type == NodeType.COMM_COLL for one in workload.sent)
    return Written(
        files=[file_of_rank(path, rank) for rank in range(places.world)],
        group_file=group_file_of(path) if groups else None,
        nodes=sum(map(len, workload.tasks)) * places.of_stage, collectives=collectives * places.of_stage,
        messages=(len(list(workload.sent)) - collectives) * places.of_stage, groups=len(groups), warnings=[],
    )  # fmt: skip


def _require_space(path: Path, workload: Workload) -> None:
    """Refuse before anything is written what the disk has no room for."""
    per_task = 110  # bytes, about
    needed = sum(len(tasks) for tasks in workload.tasks) * per_task * workload.places.of_stage
    free = shutil.disk_usage(path.parent).free
    if 0 < free < needed:  # what is no disk, such as /proc, has none free; writing tells what is wrong there
        raise OptionError(
            f"-o {path}: {workload.places.world:,} ranks need about {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB "
            "are free there; name another disk, or fewer micro-batches"
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
