"""Host memory: refuse a file that will not fit before the machine runs out of memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

from lumos.errors import InputError

_MEMORY_PER_EVENT = 330  # bytes: columns and graph; measured on 4 million of the shortest events
_CLEARLY = 1.5  # times the free memory: what is only expected to need so much is refused
_LEAST_PORTION = 1e-3  # of a file, to expect anything of the rest
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_bytes() -> int:
    """What this process may still use: free memory of the machine, or the limit it runs under if that is lower."""
    free = int(psutil.virtual_memory().available)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(free, _container_bytes(), free if soft == resource.RLIM_INFINITY else soft)


def _container_bytes() -> int:
    """The limit of a container, which the machine's own figures do not include."""
    for file in _CONTAINER_LIMITS:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # no such version of cgroups, or "max"
            continue
    return sys.maxsize


def require_memory(path: Path, need: float, advice: str) -> None:
    """Refuse in one line, instead of making the machine swap, if a path needs more bytes than are free."""
    free = available_bytes()
    if need > free:
        raise InputError(
            f"{path}: about {need / 2**30:.1f} GiB would be needed and {free / 2**30:.1f} GiB are free; {advice}"
        )


def refuse_events(path: Path, events: int, free: int, portion: float = 1.0) -> None:
    """Refuse what has more events than `free` bytes can hold, whatever the size of its file promised.

    `events` are those of this portion of the file: what follows is expected to be like it.
    """
    expected = round(events / max(portion, _LEAST_PORTION))
    if events * _MEMORY_PER_EVENT > free or expected * _MEMORY_PER_EVENT > _CLEARLY * free:
        raise InputError(
            f"{path}: has about {expected:,} events, too many for the {free / 2**30:.1f} GiB of memory that were free; "
            "read fewer ranks with --match, or record fewer steps"
        )
