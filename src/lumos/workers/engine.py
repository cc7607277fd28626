"""Engine: runs the chunks of a job somewhere, and hands back what each gave, in the order of the chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from lumos.errors import OptionError

NAMES = ("local", "ray")


class Job(NamedTuple):
    """A function of a module, called with what all chunks share and with one chunk."""

    function: Callable[[Any, Any], Any]
    shared: Any


class Engine(Protocol):
    """Where chunks are run. A chunk that is lost with its worker is run again; the others are not."""

    @property
    def workers(self) -> int: ...

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        """The answers to all chunks, in their order."""
        ...


class Here:
    """This process."""

    workers = 1

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        for chunk in chunks:
            yield job.function(job.shared, chunk)


def engine_named(name: str, workers: int = 0, address: str = "") -> AbstractContextManager[Engine]:
    """An engine, to be used in a `with` block: it ends what it started."""
    if name not in NAMES:
        raise OptionError(f"--engine {name!r} is not known: use {' or '.join(NAMES)}")
    if address and name != "ray":
        raise OptionError(f"--address {address!r} is of a Ray cluster: add --engine ray")
    if workers < 0:
        raise OptionError(f"--workers {workers} is negative: give a number of processes, or 0 for one a core")
    if name == "ray":
        from lumos.workers.ray_cluster import on_ray

        return on_ray(address, workers)
    count = workers or os.cpu_count() or 1
    if count == 1:
        return nullcontext(Here())
    from lumos.workers.processes import processes

    return processes(count)
