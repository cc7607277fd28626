"""Processes of this machine, each of which runs one chunk after the other.

Plain child processes rather than a multiprocessing pool: a pool runs the caller's script again in every worker, and is
broken as a whole when one of them dies. The pickles that travel are made and read by us; files never are.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import IO, Any

from lumos.errors import LumosError
from lumos.workers.engine import Job

_LENGTH = struct.Struct("<Q")
_TRIES = 3  # of one chunk, each with another process
_AHEAD = 2  # chunks that are asked for, for every process


class Processes:
    """Child processes that wait for chunks."""

    def __init__(self, count: int) -> None:
        self.workers = count
        self.idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self.running: list[subprocess.Popen[bytes]] = []
        self.knows: dict[int, int] = {}  # by process: the number of the job it was told last
        self.jobs = 0

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        self.jobs += 1
        told = (self.jobs, pickle.dumps(job))
        with ThreadPoolExecutor(self.workers) as pool:
            asked = []
            try:
                for chunk in chunks:
                    asked.append(pool.submit(self._answer, told, chunk))
                    if len(asked) > _AHEAD * self.workers:
                        yield asked.pop(0).result()
                while asked:
                    yield asked.pop(0).result()
            finally:
                for future in asked:
                    future.cancel()

    def start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "lumos.workers.processes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.running.append(process)
        self.idle.put(process)

    def _answer(self, job: tuple[int, bytes], chunk: Any) -> Any:
        for _ in range(_TRIES):
            process = self.idle.get()
            try:
                found = self._ask(process, job, chunk)
            except (EOFError, OSError, struct.error):
                process.kill()
                process.wait()
                self.running.remove(process)
                self.start()
                continue
            self.idle.put(process)
            if isinstance(found, Exception):
                raise found
            return found
        raise LumosError(
            f"a worker was killed {_TRIES} times at the same chunk, probably for want of memory: use fewer --workers"
        )

    def _ask(self, process: subprocess.Popen[bytes], job: tuple[int, bytes], chunk: Any) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        if self.knows.get(process.pid) != job[0]:
            _send(process.stdin, job[1])
            self.knows[process.pid] = job[0]
        _send(process.stdin, pickle.dumps(("chunk", chunk)))
        return pickle.loads(_receive(process.stdout))


@contextmanager
def processes(count: int) -> Iterator[Processes]:
    """Start so many processes, and end them."""
    here = Processes(count)
    for _ in range(count):
        here.start()
    try:
        yield here
    finally:
        for process in here.running:
            process.kill()
            process.communicate()


def _send(to: IO[bytes], message: bytes) -> None:
    to.write(_LENGTH.pack(len(message)) + message)
    to.flush()


def _receive(source: IO[bytes]) -> bytes:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return source.read(_LENGTH.unpack(head)[0])


def serve(source: IO[bytes], to: IO[bytes]) -> None:
    """Run chunks until there are no more: what a child process does."""
    job: Job | None = None
    while True:
        try:
            message = pickle.loads(_receive(source))
        except EOFError:
            return
        if isinstance(message, Job):
            job = message
            continue
        assert job is not None
        try:
            found = job.function(job.shared, message[1])
        except Exception as problem:
            found = problem
        _send(to, pickle.dumps(found))


if __name__ == "__main__":
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # what somebody prints must not end up among the answers
    try:
        serve(sys.stdin.buffer, out)
    except KeyboardInterrupt:
        sys.exit(130)
