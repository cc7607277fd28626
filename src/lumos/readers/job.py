"""A job: one file, or the files of all ranks in a folder under any naming, read in parallel processes.

The rank of a file is what its header says, else what its name says, else what the user's pattern finds in the name.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from lumos.errors import InputError, OptionError
from lumos.memory import refuse_if_larger_than_memory
from lumos.readers.kineto import read_kineto
from lumos.readers.slices import BAD_GZIP, open_bytes
from lumos.readers.worker import Readers, readers
from lumos.trace import Header, Trace, concatenate

_TRACE_NAME = re.compile(r"\.(json|trace)(\.gz)?$")
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|tp|worker|gpu|device)[-_ ]?(\d+)", re.IGNORECASE)
_RANK_IN_HEAD = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d+)')
_HEAD = 1 << 18
_PARALLEL_FROM = 8 << 20  # bytes on disk; below, starting processes costs more than it saves
_APART = 10_000_000_000  # ns: ranks of one capture overlap in time, give or take a clock

Progress = Callable[[int, int], None]  # bytes read, bytes in all
Meanwhile = Callable[[], None]


def read_job(
    path: Path,
    match: str = "",
    rank_pattern: str = "",
    progress: Progress | None = None,
    workers: int = 0,
    started: Readers | None = None,
    meanwhile: Meanwhile | None = None,
) -> Trace:
    """The trace of a job from a file or a folder of ranks.

    Processes that were started for reading are used; `meanwhile` is run while they read.
    """
    files, notes = find_files(path, match)
    refuse_if_larger_than_memory(files)
    pattern = _compiled(rank_pattern)
    traces = _read_all(files, progress, workers, started, meanwhile)
    traces = [_with_rank(trace, Path(trace.headers[0].path), pattern, len(files)) for trace in traces]
    _refuse_mixed_jobs(traces)
    traces.sort(key=lambda t: t.headers[0].rank)
    job = concatenate(traces)
    return replace(job, warnings=(*notes, *job.warnings, *_missing_ranks(job)))


def find_files(path: Path, match: str = "") -> tuple[list[Path], list[str]]:
    """The trace files at a path, and notes on what was left out."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: neither a file nor a folder; name a Kineto trace, or the folder of a job's ranks")
    if path.is_file():
        return [path], []
    inside = sorted(p for p in path.iterdir() if p.is_file())
    named = [p for p in inside if _TRACE_NAME.search(p.name) and fnmatch.fnmatch(p.name, match or "*")]
    heads = {p: _head(p) for p in named}
    files = {p: head for p, head in heads.items() if _looks_like_kineto(head)}
    if not files:
        raise InputError(_nothing_found(path, inside, match))
    return _one_capture(files) if not match else (list(files), [])


def _nothing_found(path: Path, inside: list[Path], match: str) -> str:
    if match:
        return f"{path}: no Kineto trace here matches --match {match!r}"
    candidates = (p for p in sorted(path.rglob("*.json*")) if p.is_file())
    deeper = next((p.parent for p in candidates if _looks_like_kineto(_head(p))), None)
    if deeper is not None:
        return f"{path}: no Kineto trace in this folder itself; did you mean {deeper}?"
    if not inside:
        return f"{path}: the folder is empty; give a folder of .json or .json.gz traces"
    return f"{path}: none of its {len(inside)} files is a Kineto trace (.json or .json.gz with traceEvents)"


def _head(path: Path) -> bytes | None:
    """The first bytes of a file; None where it cannot be read."""
    try:
        with open_bytes(path) as file:
            return file.read(_HEAD).lstrip()
    except (InputError, *BAD_GZIP):  # type: ignore[misc]
        return None


def _looks_like_kineto(head: bytes | None) -> bool:
    """From the first bytes: events, or at least not something else."""
    if head is None:
        return True  # reading it will say what is wrong
    if b'"traceEvents"' in head or (head[:1] == b"[" and b'"ph"' in head):
        return True
    return head[:1] == b"{" and len(head) > _HEAD // 2 and b'"nodes"' not in head


def _one_capture(files: dict[Path, bytes | None]) -> tuple[list[Path], list[str]]:
    """Of files named alike but for their numbers, the largest set: `rank0.json` beside `rank0.with_et.json` are two.

    Sets that hold other ranks belong to the same capture: files may be named after their hosts.
    """
    sets: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        sets[re.sub(r"\d+", "#", file.name)].append(file)
    kept: list[Path] = []
    ranks: set[int] = set()
    for name in sorted(sets, key=lambda name: (-len(sets[name]), len(name), name)):
        found = [_rank_hint(file, files[file]) for file in sets[name]]
        if not kept or (-1 not in found and ranks.isdisjoint(found)):
            kept += sets[name]
            ranks.update(found)
    left_out = [file.name for file in files if file not in kept]
    if not left_out or sum("#" in name for name in sets) < 2:
        return list(files), []
    shown = ", ".join(left_out[:2]) + (", …" if len(left_out) > 2 else "")
    return sorted(kept), [f"{len(left_out)} files of another capture were left out ({shown}); choose with --match"]


def _rank_hint(path: Path, head: bytes | None) -> int:
    """The rank by the beginning of a file, or by its name; -1 where neither says."""
    told = _RANK_IN_HEAD.search(head or b"")
    found = _RANK_IN_NAME.search(path.name)
    return int(told.group(1)) if told else int(found.group(1)) if found else -1


def _read_all(
    files: list[Path],
    progress: Progress | None,
    workers: int,
    started: Readers | None,
    meanwhile: Meanwhile | None,
) -> list[Trace]:
    sizes = {file: file.stat().st_size for file in files}
    total, read = sum(sizes.values()), 0

    def done(file: Path) -> None:
        nonlocal read
        read += sizes[file]
        if progress is not None:
            progress(read, total)

    if started is not None:
        return started.read(files, done, meanwhile)
    workers = workers or min(len(files), os.cpu_count() or 1)
    if workers < 2 or total < _PARALLEL_FROM:
        return [_read_here(file, done) for file in files]
    with readers(workers) as here:
        return here.read(files, done, meanwhile)


def _read_here(file: Path, done: Callable[[Path], None]) -> Trace:
    trace = read_kineto(file)
    done(file)
    return trace


def _compiled(pattern: str) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise OptionError(f"--rank-pattern {pattern!r}: not a regular expression ({error})") from None
    if compiled.groups != 1:
        raise OptionError(f"--rank-pattern {pattern!r}: needs one group for the number, as in 'node(\\d+)'")
    return compiled


def _with_rank(trace: Trace, path: Path, pattern: re.Pattern[str] | None, files: int) -> Trace:
    header = trace.headers[0]
    rank = header.rank
    found = (pattern or _RANK_IN_NAME).search(path.name)
    if pattern is not None:
        if found is None or not (found.group(1) or "").isdecimal():
            raise InputError(
                f"{path}: --rank-pattern {pattern.pattern!r} finds no rank here; its group must match a number"
            )
        rank = int(found.group(1))
    elif rank < 0 and found is not None:
        rank = int(found.group(1))
    elif rank < 0 and files == 1:
        rank = 0
    elif rank < 0:
        raise InputError(
            f"{path}: neither its header nor its name says which rank it is; say how with --rank-pattern 'REGEX(\\d+)'"
        )
    lanes = tuple(lane._replace(rank=rank) for lane in trace.lanes)
    return replace(trace, lanes=lanes, headers=(header._replace(rank=rank),))


def _refuse_mixed_jobs(traces: list[Trace]) -> None:
    by_rank: dict[int, str] = {}
    for header in (t.headers[0] for t in traces):
        if header.rank in by_rank:
            a, b = Path(by_rank[header.rank]).name, Path(header.path).name
            raise InputError(
                f"{Path(header.path).parent}: both {a} and {b} claim rank {header.rank}; they are of two captures: "
                "choose one with --match 'PATTERN', or give ranks with --rank-pattern"
            )
        by_rank[header.rank] = header.path
    sizes: dict[int, Header] = {t.headers[0].world_size: t.headers[0] for t in traces if t.headers[0].world_size > 0}
    if len(sizes) > 1:
        (size, x), (other, y) = list(sizes.items())[:2]
        raise InputError(
            f"{Path(x.path).name} is of a job of {size} ranks and {Path(y.path).name} of one of {other}: "
            "these are different jobs; choose one with --match"
        )
    spans = sorted((int(t.start.min()), int(t.end.max()), t.headers[0]) for t in traces)
    for (_, end, x), (start, _, y) in pairwise(spans):
        if start - end > _APART:
            raise InputError(
                f"{Path(x.path).name} ends {(start - end) / 1e9:.0f} s before {Path(y.path).name} begins: "
                "these are different captures; choose one with --match"
            )


def _missing_ranks(job: Trace) -> list[str]:
    world = max(h.world_size for h in job.headers)
    here = len(job.headers)
    if world <= here or world < 2:
        return []
    return [f"{here} of {world} ranks are here; waiting for the others cannot be told from transfer"]
