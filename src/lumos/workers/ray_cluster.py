"""A Ray cluster as an engine: chunks run wherever there is a free core, and once more if a node was lost."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from lumos.errors import LumosError, OptionError
from lumos.safe_path import safe_path
from lumos.workers.engine import AHEAD, Job

_PATIENCE_S = 5.0
_TRIES = 5  # of one chunk, if nodes are lost


class Ray:
    """Cores of a Ray cluster, as many as it has at the moment."""

    remote = True

    def __init__(self, ray: Any, workers: int) -> None:
        self.ray, self.limit = ray, workers

    @property
    def workers(self) -> int:
        cores = int(self.ray.cluster_resources().get("CPU", 1))
        return min(cores, self.limit) if self.limit else max(1, cores)

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        """The answers to all chunks, in their order."""
        remote = self.ray.remote(num_cpus=1, max_retries=_TRIES)(job.function)
        shared = self.ray.put(job.shared)
        most = AHEAD * self.workers
        asked: deque[Any] = deque()
        for chunk in chunks:
            asked.append(remote.remote(shared, chunk))
            if len(asked) > most:
                yield self._answer(asked.popleft())
        while asked:
            yield self._answer(asked.popleft())

    def _answer(self, reference: Any) -> Any:
        is_reported = False
        while not self.ray.wait([reference], timeout=_PATIENCE_S)[0]:
            if not is_reported and not self.ray.cluster_resources().get("CPU"):
                print("lumos: the Ray cluster has no cores left: waiting for a node to join it", file=sys.stderr)
                is_reported = True
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as problem:
            cause = getattr(problem, "cause", None)
            if isinstance(cause, LumosError):
                raise cause from None
            raise
        except self.ray.exceptions.RayError as problem:
            raise LumosError(
                f"the Ray cluster lost a chunk {_TRIES} times ({_first_line(problem)}): check its nodes"
            ) from None


def _refuse_if_silent(address: str) -> None:
    """Ray itself waits for minutes at an address where nothing answers."""
    found = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d{1,5})", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), _PATIENCE_S).close()
    except (OSError, OverflowError) as problem:
        raise OptionError(f"--address {address!r}: no Ray cluster answers there ({problem})") from None


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


@contextmanager
def on_ray(address: str, workers: int) -> Iterator[Ray]:
    """Join the cluster at an address, or start one on this machine; leave it as it was."""
    try:
        import ray
    except ImportError:
        raise OptionError("--engine ray needs Ray: pip install 'lumos-sim[ray]'") from None
    joined = ray.is_initialized()
    with output_as_messages(), TemporaryDirectory(prefix="lumos-ray-", ignore_cleanup_errors=True) as empty:
        if not joined:
            _refuse_if_silent(address)
            try:
                alone = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}  # out of reach of others
                where = {"address": address} if address else alone
                with safe_path(), chdir(empty):  # Ray puts the current folder on sys.path of all workers
                    ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
            except Exception as problem:  # Ray has no class of its own for a node that does not start
                reason = _first_line(problem)
                if not address:
                    raise LumosError(f"--engine ray: no Ray cluster can be started here ({reason}); join one with "
                                     "--address, or leave --engine out") from None  # fmt: skip
                raise OptionError(f"--address {address!r}: no Ray cluster answers there ({reason})") from None
        try:
            yield Ray(ray, workers)
        finally:
            if not joined:
                ray.shutdown()


@contextmanager
def output_as_messages() -> Iterator[None]:
    """Whatever Ray prints goes to standard error, so that standard output holds the answer alone.

    Ray's libraries and threads write to the file descriptor itself, when a node is lost for instance.
    """
    sys.stdout.flush()
    try:
        answers = os.dup(1)
    except OSError:  # it is closed: there is nothing to protect
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(answers, 1)
        os.close(answers)
