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
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from lumos.errors import InputError
from lumos.readers.kineto import read_kineto
from lumos.trace import Trace

_LENGTH = struct.Struct("<Q")
_KILLED = "a process that was reading it was killed, probably for want of memory; read fewer ranks with --match"


def read_in_processes(
    files: list[Path], workers: int, done: Callable[[Path], None], meanwhile: Callable[[], None] | None = None
) -> list[Trace]:
    """The traces of files, in their order; `done` is told of every file, and `meanwhile` is run while they are read."""
    with _processes(workers) as idle, ThreadPoolExecutor(workers) as pool:

        def read(file: Path) -> Trace:
            process = idle.get()
            try:
                return _ask(process, file)
            finally:
                idle.put(process)
                done(file)

        traces = pool.map(read, files)
        if meanwhile is not None:
            meanwhile()
        return list(traces)


@contextmanager
def _processes(count: int) -> Iterator[SimpleQueue[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "lumos.readers.worker"]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    for process in running:
        idle.put(process)
    try:
        yield idle
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _ask(process: subprocess.Popen[bytes], file: Path) -> Trace:
    """Have a process read a file; its mistakes are raised here."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, file)
        answer = _receive(process.stdout)
    except (OSError, EOFError):
        raise InputError(f"{file}: {_KILLED}") from None
    if isinstance(answer, Trace):
        return answer
    raise InputError(str(answer))


def _send(pipe: IO[bytes], value: object) -> None:
    payload = pickle.dumps(value, protocol=5)
    pipe.write(_LENGTH.pack(len(payload)))
    pipe.write(payload)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> object:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    payload = pipe.read(_LENGTH.unpack(head)[0])
    return pickle.loads(payload)


def main() -> None:
    """Read the files that the parent names, until it goes."""
    while True:
        try:
            file = _receive(sys.stdin.buffer)
        except EOFError:
            return
        assert isinstance(file, Path)
        answer: Trace | str
        try:
            answer = read_kineto(file)
        except InputError as error:
            answer = str(error)
        except MemoryError:
            answer = f"{file}: out of memory; read fewer ranks with --match, or record fewer steps"
        _send(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
