"""Sample files: JSON lines, of which the first describes the machine; rows are only ever appended.

    {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "cuda": "13.0", "driver": "580.95", "date": "2026-11-17",
     "device": {"memory_gib": 139.8, "sms": 132, "l2_mb": 50.0, "clock_ghz": 1.98, "power_limit_w": 700.0},
     "host": "AMD EPYC 9534", "gpus_per_node": 8, "nodes": 2}            (on one line; only "gpu" is required)
    {"op": "gemm", "m": 4096, "n": 4096, "k": 4096, "layout": "TN", "dtype": "bf16", "us": 204.512}
    {"op": "permute", "t": 65536, "h": 20480, "dtype": "bf16", "error": "out of memory"}

Rows, by "op":

    an operator    alone, from a cold cache: sizes, layout, dtype; us
    a collective   on `bytes` of the whole tensor among `ranks` GPUs of `nodes` nodes (1 where absent), while `groups`
                   such groups (1 where absent) do the same at the same moment; us of the slowest rank
    host           the host issues `what` (forward, backward, optimizer) of a small decoder of the stated sizes, in
                   `launches` launches; us for all of them
    profiler       `what` torch.profiler costs, as lumos.measure.time_profiler explains; us
    power          the board while `operator` of the stated sizes runs in a loop, called `what`, or while nothing does
                   (idle); watts, clock_mhz, us of one call
    step           training steps of a small Llama-like decoder back to back: forward, backward, fused AdamW; us of one,
                   watts

Every row may have `error` instead of what was measured. A run that was killed leaves at most half a line at the end,
which the next run cuts off before it continues.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from lumos.errors import InputError, OptionError
from lumos.files import read_file

Row = dict[str, Any]
Key = tuple[tuple[str, str], ...]

_MOST_BYTES = 1 << 28
_MOST_MEMORY = 1 << 28  # that decompressing may take
_MOST_STREAMS = 100  # in a file that is compressed by xz: each of them copies the rest of the file
_XZ, _GZIP = PACKED = b"\xfd7zXZ\0", b"\x1f\x8b"
_WAY_OUT = "name a file that `lumos sample` wrote"
_MEASURED = frozenset({"us", "error", "watts", "clock_mhz", "launches"})  # what does not tell one row from another


class SampleFile:
    """The rows of a file, and a place to append new ones."""

    def __init__(self, path: Path, file: TextIO, done: set[Key]) -> None:
        self._path, self._file, self._done = path, file, done

    def missing(self, rows: Iterable[Row]) -> list[Row]:
        """Those of the rows that the file does not have yet."""
        return [row for row in rows if _key(row) not in self._done]

    def add(self, row: Row) -> None:
        """Append a row, and hand it to the operating system; OptionError where that takes no more."""
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from None
        self._done.add(_key(row))


@contextmanager
def open_samples(path: Path, about: Row) -> Iterator[SampleFile]:
    """The samples of the machine that `about` describes, to append to; InputError for a file of anything else."""
    try:
        done = _checked(path, about) if path.exists() else set()
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        samples = SampleFile(path, file, done)
        if file.tell() == 0:
            samples.add(about)
        yield samples
    finally:
        with suppress(OSError):  # every row was flushed, or its failure reported
            file.close()


def _unwritable(path: Path, error: OSError) -> OptionError:
    return OptionError(f"-o {path}: cannot be written ({error.strerror}); make room for it, or name another file")


def _checked(path: Path, about: Row) -> set[Key]:
    """The rows of a file that can be appended to, after half a line at its end is cut off."""
    done, here = set(), _machine(about)
    for _, row in lines_of(path):
        if "gpu" in row and _machine(row) != here:
            raise InputError(f"{path}: holds samples of {_machine(row)}, and this is {here}; name another file with -o")
        done.add(_key(row))
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return done


def _machine(about: Row) -> str:
    """What must not be mixed: GPUs of different names; of CPUs, which are all called "cpu", hosts and threads."""
    if about["gpu"] != "cpu" or "host" not in about:
        return str(about["gpu"])
    threads = threads_of(about)
    return f"cpu ({about['host']}" + (f", OMP_NUM_THREADS={threads})" if threads else ")")


def threads_of(about: Row) -> int:
    """With how many threads a CPU was sampled; 0 where the header does not say."""
    device = about.get("device")
    threads = device.get("sms") if isinstance(device, dict) else 0
    return threads if isinstance(threads, int) else 0


def lines_of(path: Path, unpack: bool = False) -> Iterator[tuple[str, Row]]:
    """(place, row) of a sample file, without half a line at its end; InputError where it is none.

    With `unpack`, the file may be compressed by xz or gzip, whatever it is called: nothing can be appended to it then.
    """
    content = read_file(path, _MOST_BYTES, _WAY_OUT)
    if unpack and content.startswith(PACKED):
        content = _unpacked(content, path)
    try:
        lines = content.decode("utf-8-sig").split("\n")[:-1]
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text; {_WAY_OUT}") from None
    if not lines and path.stat().st_size:
        raise InputError(f"{path}: not a file of samples; {_WAY_OUT}")
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{place}: not JSON; {_WAY_OUT}") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: not a row of samples; {_WAY_OUT}")
        if number == 1 and "gpu" not in row:
            raise InputError(f"{place}: does not name the GPU; {_WAY_OUT}")
        yield place, row


def _unpacked(content: bytes, path: Path) -> bytes:
    import gzip  # here, since not every Python that samples has both
    import lzma

    found = b""
    try:
        if content.startswith(_GZIP):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                found = file.read(_MOST_BYTES + 1)
        streams = 0
        while content.startswith(_XZ) and len(found) <= _MOST_BYTES:
            stream, streams = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY), streams + 1
            found += stream.decompress(content, _MOST_BYTES + 1 - len(found))
            if not stream.eof and len(found) <= _MOST_BYTES:
                raise EOFError
            content = stream.unused_data.lstrip(b"\0")
            if content and streams == _MOST_STREAMS:
                raise InputError(f"{path}: more than {_MOST_STREAMS} compressed parts; compress it as one")
    except (lzma.LZMAError, EOFError, OSError, zlib.error):
        raise InputError(f"{path}: cannot be decompressed, perhaps cut short; copy it again") from None
    if len(found) > _MOST_BYTES:
        raise InputError(f"{path}: larger than {_MOST_BYTES >> 20} MiB once decompressed; {_WAY_OUT}")
    return found


def _key(row: Row) -> Key:
    return tuple(sorted((name, repr(value)) for name, value in row.items() if name not in _MEASURED))
