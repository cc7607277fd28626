"""Dry runs that are kept: `rank0.dry.json.gz` in the folder of `lumos capture --dry`."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import msgspec

from lumos.dry_run.recorded_step import FORMAT, Recording, StorageEvent
from lumos.dry_run.recording_checks import check_recording
from lumos.errors import InputError
from lumos.files import open_file
from lumos.program.op import Op, Tensor
from lumos.setup.messages import place_of

SUFFIX = ".dry.json.gz"
_MOST_BYTES = 256 << 20  # unpacked; a step of 200,000 operators has a tenth of it
_MOST_VALUES = 12_000_000  # numbers, texts and lists, each of which takes up to 72 bytes in memory
_MOST_OPS = 400_000
# Each takes up to 1 kB while a step is simulated. Operators wait for few others, and memory is taken and released once.
_MOST_WAITS = 1_000_000
_MOST_EVENTS = 1_600_000


_Tensors = tuple[Tensor, ...]
_Integers = tuple[int, ...]
# The first fields of an Op, in their order: those that a dry run knows.
_KeptOp = tuple[str, _Tensors, _Tensors, str, str, bool, tuple[str, ...], int, _Integers, _Integers]


class _File(msgspec.Struct):
    """What `write_recording` writes."""

    format: str
    ops: list[tuple[_KeptOp, list[int], list[_Integers]]]
    parameters: int
    trained_parameters: int
    tokens: int
    alive: dict[int, int]
    events: list[StorageEvent]
    roles: dict[int, str]
    places: dict[int, str]
    most_bytes: int
    rank: int
    world: int
    microbatches: int
    assumptions: list[str]
    made_by: dict[str, str]


def dry_files(path: Path) -> list[Path]:
    """The dry runs at a path: the file, or those in the folder."""
    if path.is_dir():
        return sorted(path.glob(f"*{SUFFIX}"))
    return [path] if path.name.endswith(SUFFIX) else []


def read_recordings(path: Path) -> list[Recording]:
    """The dry runs of all ranks at a path, which must belong to one job."""
    files = dry_files(path)
    recordings = [read_recording(file) for file in files]
    ranks: dict[int, Path] = {}
    for file, recording in zip(files, recordings, strict=True):
        if recording.world != recordings[0].world:
            raise InputError(
                f"{place_of(file)}: it is of a job of {recording.world}, and {place_of(files[0])} of one of "
                f"{recordings[0].world}: keep one job per folder"
            )
        if recording.rank in ranks:
            raise InputError(f"{place_of(file)}: rank {recording.rank}, as {place_of(ranks[recording.rank])}: keep one")
        ranks[recording.rank] = file
    return recordings


def read_recording(path: Path) -> Recording:
    """A recording that `write_recording` wrote; anything else is rejected in one line."""
    try:
        with open_file(path, "give what lumos capture --dry wrote") as packed, gzip.open(packed) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES or sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            raise InputError(f"{place_of(path)}: larger than any dry run: make it again with lumos capture --dry")
        recording = _recording(msgspec.json.decode(content, type=_File))
        check_recording(recording)
        return recording
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(f"{place_of(path)}: not a dry run of lumos capture --dry ({reason}): make it again") from None


def _recording(kept: _File) -> Recording:
    count = sum(len(places) for _, places, _ in kept.ops)
    waits = sum(len(after) for _, _, of_places in kept.ops for after in of_places)
    for what, number, most in (
        ("operators", count, _MOST_OPS), ("waits", waits, _MOST_WAITS), ("events", len(kept.events), _MOST_EVENTS)
    ):  # fmt: skip
        if number > most:
            raise ValueError(f"{number} {what}, more than {most}")
    ops = {at: Op(*op)._replace(after=after) for op, places, waits in kept.ops
           for at, after in zip(places, waits, strict=True)}  # fmt: skip
    if kept.format != FORMAT or set(ops) != set(range(count)):
        raise ValueError("its operators do not make a step")
    values = {name: getattr(kept, name) for name in _File.__struct_fields__ if name not in ("format", "ops")}
    return Recording(ops=[ops[at] for at in range(count)], **values)
