"""Dry runs that are kept: `rank0.dry.json.gz` in the folder of `lumos capture --dry`."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import msgspec

from lumos.dry_run.recorded_step import FORMAT, Recording, StorageEvent
from lumos.errors import InputError
from lumos.files import open_file
from lumos.program.recorded_op import RecordedOp
from lumos.setup.messages import place_of

SUFFIX = ".dry.json.gz"
_MOST_BYTES = 1 << 30  # unpacked; a step of 200,000 operators has a tenth of it


class _File(msgspec.Struct):
    """What `write_recording` writes."""

    format: str
    ops: list[tuple[RecordedOp, list[int], list[tuple[int, ...]]]]
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


def read_recording(path: Path) -> Recording:
    """A recording that `write_recording` wrote; anything else is refused in one line."""
    try:
        with open_file(path, "give what lumos capture --dry wrote") as packed, gzip.open(packed) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputError(f"{place_of(path)}: more than {_MOST_BYTES >> 20} MiB, which no dry run is")
        kept = msgspec.json.decode(content, type=_File)
        return _recording(kept)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"{place_of(path)}: not a dry run of lumos capture --dry ({reason}): make it again") from None


def _recording(kept: _File) -> Recording:
    ops = {at: op._replace(after=after) for op, places, waits in kept.ops
           for at, after in zip(places, waits, strict=True)}  # fmt: skip
    if kept.format != FORMAT or set(ops) != set(range(len(ops))):
        raise ValueError("its operators do not make a step")
    if any(not 0 <= earlier < at for at, op in ops.items() for earlier in op.after):
        raise ValueError("an operator waits for a later one")
    values = {name: getattr(kept, name) for name in _File.__struct_fields__ if name not in ("format", "ops")}
    return Recording(ops=[ops[at] for at in range(len(ops))], **values)
