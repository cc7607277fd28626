"""Memory: refuse what will not fit before the machine runs out of it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from lumos.errors import InputError

_COLUMNS_PER_BYTE = 1.3  # peak of columns and graph per byte of JSON, measured by benchmarks/replay_speed.py
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_GZIP_RATIO = 15.0  # JSON of a trace compresses about this well


def available_bytes() -> int:
    """What this process may still use: free memory of the machine, or the limit it runs under if that is lower."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(free, _container_bytes(), free if soft == resource.RLIM_INFINITY else soft)


def _container_bytes() -> int:
    """The limit of a container, which the machine's own figures do not know of."""
    for file in _CONTAINER_LIMITS:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # no such version of cgroups, or "max"
            continue
    return sys.maxsize


def refuse_if_larger_than_memory(files: list[Path]) -> None:
    """One clear line instead of a machine that swaps."""
    need = sum(f.stat().st_size * (_GZIP_RATIO if _is_gzip(f) else 1.0) for f in files) * _COLUMNS_PER_BYTE
    free = available_bytes()
    if need > free:
        raise InputError(
            f"{files[0] if len(files) == 1 else files[0].parent}: about {need / 2**30:.1f} GiB would be needed and "
            f"{free / 2**30:.1f} GiB are free; read fewer ranks with --match, or record fewer steps"
        )


def _is_gzip(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"\x1f\x8b"
    except OSError:
        return False  # reading it will say what is wrong
