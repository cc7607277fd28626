"""A pool of processes on this machine, made of loky's executors.

loky rather than the standard library's pools, because those run the caller's script again in every worker, which
breaks scripts that do not guard their main part. An executor is unusable once a worker was killed; the pool then starts
another one and runs again only the chunks that had no result yet.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

from loky import ProcessPoolExecutor

from lumos.errors import LumosError
from lumos.safe_path import safe_environment, safe_path
from lumos.workers.engine import AHEAD, Engine, Here, Job

_ENVIRONMENT = {"LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}  # a worker that read a large file is no leak, and is not replaced


class Processes:
    """An engine of processes that stay until it is closed."""

    remote = False

    def __init__(self, count: int, preload: str = "") -> None:
        self.workers, self.preload = count, preload
        self._start()

    def _start(self) -> None:
        with safe_path():  # of its resource tracker
            self.executor = ProcessPoolExecutor(self.workers, timeout=None, env=_ENVIRONMENT | safe_environment())
        with suppress(BrokenProcessPool):  # `run` will find out
            for _ in range(self.workers if self.preload else 0):
                self._submit(import_module, self.preload)

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        with safe_path():  # the first call starts the workers and the resource tracker of multiprocessing
            future: Future[Any] = self.executor.submit(function, *arguments)
        return future

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        self.executor.shutdown(kill_workers=True)

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        """The answers to all chunks, in their order. The first chunks are started before this returns."""
        payload = pickle.dumps((job.function, job.shared))
        asked: dict[int, Future[Any]] = {}

        def ask(first: int) -> None:
            for index in range(first, min(first + AHEAD * self.workers, len(chunks))):
                if index not in asked:
                    asked[index] = self._submit(_run_chunk, payload, chunks[index])

        def answer(index: int) -> Any:
            for _ in range(job.tries):
                try:
                    ask(index)
                    return asked.pop(index).result()
                except BrokenProcessPool as error:
                    reason = _reason(error)
                    asked.clear()
                    self.close()
                    self._start()
            raise LumosError(f"{reason}: {job.advice}")

        def answers() -> Iterator[Any]:
            try:
                yield from map(answer, range(len(chunks)))
            finally:
                for future in asked.values():
                    future.cancel()

        with suppress(BrokenProcessPool):  # then `answer` starts the processes again
            ask(0)
        return answers()


def _reason(error: BrokenProcessPool) -> str:
    """Why a worker is gone, from the exit codes that loky states: "… of the workers are {SIGKILL(-9)}"."""
    ended = sorted(set(re.findall(r"(SIG[A-Z]+|EXIT|UNKNOWN)\(-?\d+\)", str(error))))
    if "SIGKILL" in ended:
        return "a worker process was killed (SIGKILL), probably for want of memory"
    if ended:
        return f"a worker process ended ({', '.join(ended)})"
    return f"a worker process failed ({str(error).splitlines()[0] if str(error) else type(error).__name__})"


def _run_chunk(payload: bytes, chunk: Any) -> Any:
    function, shared = _unpickled(payload)
    return function(shared, chunk)


@lru_cache(maxsize=1)
def _unpickled(payload: bytes) -> Any:
    """The job, which all its chunks share: unpickled once in a worker."""
    return pickle.loads(payload)


@contextmanager
def processes(count: int, preload: str = "") -> Iterator[Engine]:
    """Start so many processes, and end them. They import the module `preload` while the caller does other things.

    Where no process can be started, as in containers without a writable /dev/shm, this process does the work.
    """
    try:
        pool = Processes(count, preload)
    except (OSError, ImportError):  # loky needs semaphores; Python has none of them on some systems
        yield Here()
        return
    try:
        yield pool
    finally:
        pool.close()
