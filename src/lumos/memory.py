"""Memory: refuse what will not fit before the machine runs out of it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from lumos.errors import InputError

_COLUMNS_PER_BYTE = 0.7  # peak of columns and graph per byte of JSON, measured by benchmarks/replay_speed.py
_GZIP_RATIO = 15.0  # JSON of a trace compresses about this well


def available_bytes() -> int:
    """What this process may still use: free memory of the machine, or its own limit if that is lower."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return free if soft == resource.RLIM_INFINITY else min(free, soft)


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
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"
