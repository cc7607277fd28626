"""Engine: runs the chunks of a job somewhere, and returns the result of each, in the order of the chunks.

    with engine_named("local", workers=4) as engine:
        for result in engine.run(Job(price, shared=costs), chunks):  # calls price(costs, chunk) in four processes
            ...

Work that several machines divide without knowing of each other is divided by shards: `--shard 3/8` is the third of
eight parts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson

from lumos.errors import OptionError

NAMES = ("local", "ray")
AHEAD = 2  # chunks that are submitted, for every worker: enough to keep all busy, few enough to bound memory
_FEW_WORKERS = 32  # are allowed on the smallest machine
_MOST_WORKERS = 1 << 16
_MOST_SHARDS = 1 << 16


class Job(NamedTuple):
    """A function of a module, called with what all chunks share and with one chunk."""

    function: Callable[[Any, Any], Any]
    shared: Any
    tries: int = 3  # of one chunk, if workers are killed
    advice: str = "use fewer --workers"


@runtime_checkable
class Engine(Protocol):
    """Where chunks are run. A chunk that is lost with its worker is run again; finished ones are not."""

    @property
    def workers(self) -> int: ...

    @property
    def remote(self) -> bool:
        """Whether chunks may run on other machines, with other working directories."""
        ...

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        """The answers to all chunks, in their order."""
        ...


class Here:
    """An engine that runs chunks in this process, each when its answer is asked for."""

    workers, remote = 1, False

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        """The answers to all chunks, in their order."""
        return (job.function(job.shared, chunk) for chunk in chunks)


def engine_named(name: str, workers: int = 0, address: str = "") -> AbstractContextManager[Engine]:
    """An engine, to be used in a `with` block: it ends what it started."""
    if name not in NAMES:
        raise OptionError(f"--engine {name!r} is not known: use {' or '.join(NAMES)}")
    if address and name != "ray":
        raise OptionError(f"--address {address!r} is the address of a Ray cluster: add --engine ray")
    if workers < 0:
        raise OptionError(f"--workers {workers} is negative: give a number of processes, or 0 for one a core")
    most = max(_FEW_WORKERS, 4 * (os.cpu_count() or 1))
    if workers > most and name == "local":
        raise OptionError(f"--workers {workers}: this machine has {os.cpu_count()} cores; use at most {most}")
    if workers > _MOST_WORKERS:
        raise OptionError(f"--workers {workers}: use at most {_MOST_WORKERS}")
    if name == "ray":
        from lumos.workers.ray_cluster import on_ray

        return on_ray(address, workers)
    count = workers or os.cpu_count() or 1
    if count == 1:
        return nullcontext(Here())
    from lumos.workers.processes import processes

    return processes(count)


def fingerprint(*question: object) -> str:
    """A name for a question: parts with the same fingerprint can be merged."""
    return sha256(orjson.dumps(question, option=orjson.OPT_SORT_KEYS, default=repr)).hexdigest()[:32]


def read_shard(text: str) -> tuple[int, int]:
    """(index from 0, count) of "I/N", I from 1; all of the work for ""."""
    if not text:
        return 0, 1
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None:
        raise OptionError(f"--shard {text[:40]!r}: write I/N, as in 3/8")
    index, count = int(found[1]), int(found[2])
    if not 1 <= index <= count <= _MOST_SHARDS:
        raise OptionError(f"--shard {text!r}: I goes from 1 to N, and N to {_MOST_SHARDS}")
    return index - 1, count
