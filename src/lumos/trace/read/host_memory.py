"""Host memory: refuse a file that will not fit before the machine runs out of memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

from lumos.errors import InputError

_MEMORY_PER_EVENT = 330  # bytes: columns and graph; measured on 4 million of the shortest events
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


def refuse_events(path: Path, events: int, free: int) -> None:
    """Refuse what turns out to have more events than `free` bytes can hold, whatever the size of its file promised."""
    if events * _MEMORY_PER_EVENT > free:
        raise InputError(
            f"{path}: has {events:,} events or more, too many for the {free / 2**30:.1f} GiB of memory that were free; "
            "read fewer ranks with --match, or record fewer steps"
        )
