"""Reading in processes of our own: each reads one file after the other and sends back columns.

Plain child processes rather than a multiprocessing pool: a pool runs the caller's script again in every worker, which
breaks scripts that do not guard their main part. The pickles that travel are made and read by us; files never are.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Protocol

from lumos.errors import InputError

if TYPE_CHECKING:
    from lumos.trace.trace import Trace

_LENGTH = struct.Struct("<Q")
_LARGE = {False: 64 << 20, True: 4 << 20}  # bytes, of a plain and of a packed file, from which several readers pay
_KILLED = "a process that was reading it was killed, probably for want of memory; read fewer ranks with --match"


class FileReaders(Protocol):
    """Whatever reads many files at once."""

    def read(
        self, files: list[Path], done: Callable[[Path], None], meanwhile: Callable[[], None] | None = None
    ) -> list[Trace]:
        """The traces of files, in their order; `done` is told of every file, and `meanwhile` is run beside."""
        ...


@dataclass(frozen=True)
class Readers:
    """Child processes that wait for files to read."""

    running: list[subprocess.Popen[bytes]]

    def read(
        self, files: list[Path], done: Callable[[Path], None], meanwhile: Callable[[], None] | None = None
    ) -> list[Trace]:
        """The traces of files, in their order; `done` is told of every file, and `meanwhile` is run beside."""
        idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self.running:
            idle.put(process)

        def read(file: Path, share: tuple[int, int]) -> Trace | None:
            process = idle.get()
            try:
                return _ask(process, file, share)
            finally:
                idle.put(process)

        with ThreadPoolExecutor(len(self.running)) as pool:
            shares = {file: _shares(file, len(self.running) // len(files)) for file in files}
            asked = {file: [pool.submit(read, file, share) for share in shares[file]] for file in files}
            if meanwhile is not None:
                meanwhile()
            traces = []
            for file in files:
                whole = _joined([future.result() for future in asked[file]]) or read(file, (0, 1))
                assert whole is not None
                traces.append(whole)
                done(file)
        return traces


@contextmanager
def readers(count: int) -> Iterator[Readers]:
    """Start so many processes, and end them; started early, they import what they need while the caller does."""
    command = [sys.executable, "-m", "lumos.trace.read.reader_process"]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        yield Readers(running)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _shares(file: Path, readers: int) -> list[tuple[int, int]]:
    """How many readers a file is worth: a large one, several."""
    worth = max(1, readers) if file.stat().st_size >= _LARGE[file.suffix == ".gz"] else 1
    return [(index, worth) for index in range(worth)]


def _joined(parts: list[Trace | None]) -> Trace | None:
    """The shares of one file as one trace; None where it could not be shared."""
    from lumos.trace.trace import concatenate

    traces = [part for part in parts if part is not None]
    if len(traces) < len(parts):
        return None
    whole = concatenate(traces)
    if len(whole) == 0:
        return None  # reading it whole says what is wrong
    told = max(whole.headers, key=lambda header: header.rank)  # the keys after the events are in the last share alone
    return replace(whole, headers=(told,), lanes=tuple(lane._replace(rank=told.rank) for lane in whole.lanes))


def _ask(process: subprocess.Popen[bytes], file: Path, share: tuple[int, int]) -> Trace | None:
    """Have a process read a share of a file; its mistakes are raised here. None where the file cannot be shared."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, (file, share))
        answer = _receive(process.stdout)
    except (OSError, EOFError):
        raise InputError(f"{file}: {_KILLED}") from None
    if isinstance(answer, str):
        raise InputError(answer)
    found: Trace | None = answer
    return found


def _send(pipe: IO[bytes], value: object) -> None:
    payload = pickle.dumps(value, protocol=5)
    pipe.write(_LENGTH.pack(len(payload)))
    pipe.write(payload)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    payload = pipe.read(_LENGTH.unpack(head)[0])
    return pickle.loads(payload)


def main() -> None:
    """Read the files that the parent names, until it goes."""
    from lumos.trace.read.json_slices import CannotShareError
    from lumos.trace.read.kineto import read_kineto

    while True:
        try:
            file, share = _receive(sys.stdin.buffer)
        except EOFError:
            return
        answer: Trace | str | None
        try:
            answer = read_kineto(file, share=share)
        except CannotShareError:
            answer = None
        except InputError as error:
            answer = str(error)
        except MemoryError:
            answer = f"{file}: out of memory; read fewer ranks with --match, or record fewer steps"
        _send(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
