"""A trace named on the command line, read and replayed, with a sign of life."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lumos.cli.terminal import busy, progress_bar

if TYPE_CHECKING:
    from lumos.analysis.replay import Replay
    from lumos.graph.from_trace.build import Execution
    from lumos.trace.trace import Trace
    from lumos.workers import Engine

_WORTH_A_PROCESS = 1 << 20  # bytes on disk
_WORTH_SEVERAL = 4 << 20


def load_run(
    path: Path, step: str, match: str, rank_pattern: str, profiler_costs: Path | None, engine: str = "local",
    address: str = "",
) -> Replay:  # fmt: skip
    """A run, replayed; its files are read in processes of this machine, or on a cluster."""
    with _readers_for(path, engine, address) as started:
        return _load_with(started, path, step, match, rank_pattern, profiler_costs)


def _load_with(
    started: Engine | None, path: Path, step: str, match: str, rank_pattern: str, profiler_costs: Path | None
) -> Replay:
    from lumos.analysis.replay import replay
    from lumos.graph.from_trace.profiler_cost import load_profiler_cost

    cost = load_profiler_cost(profiler_costs)
    source = _read_with(started, path, match, rank_pattern)
    with busy("building and simulating; the first run also compiles, for some seconds"):
        run = replay(_one_step(source, step) if step else source, cost)
        _ = run.path_summary, run.clean_ms, run.never_profiled_ms  # what takes time; it is kept for what is shown
    return run


def load_source(path: Path, match: str, rank_pattern: str) -> Trace | Execution:
    """What is at a path, read and not yet replayed."""
    with _readers_for(path) as started:
        return _read_with(started, path, match, rank_pattern)


def _read_with(started: Engine | None, path: Path, match: str, rank_pattern: str) -> Trace | Execution:
    from lumos.trace.read.job import read_job

    with progress_bar() as progress:
        return read_job(path, match, rank_pattern, progress, engine=started, meanwhile=_load_kernels)


def _one_step(source: Trace | Execution, step: str) -> Trace:
    from lumos.errors import OptionError
    from lumos.graph.from_trace.build import Execution
    from lumos.trace.steps import keep_step

    if isinstance(source, Execution):
        raise OptionError(f"--step {step}: a Chakra graph is replayed whole; cut the trace it was made from instead")
    return keep_step(source, step)


@contextmanager
def _readers_for(path: Path, engine: str = "local", address: str = "") -> Iterator[Engine | None]:
    """Processes for reading what is large, started before this one imports what it needs itself."""
    if engine != "local" or address:
        from lumos.workers import engine_named

        with engine_named(engine, 0, address) as there:
            yield there
        return

    try:
        files = path.iterdir() if path.is_dir() else [path]
        size = sum(f.stat().st_size for f in files)
    except OSError:
        size = 0  # reading it will say what is wrong
    if size < _WORTH_A_PROCESS:
        yield None
        return
    from lumos.workers.processes import processes

    count = 1 if path.is_file() and size < _WORTH_SEVERAL else os.cpu_count() or 1
    with processes(count, preload="lumos.trace.read.kineto") as started:
        yield started


def _load_kernels() -> None:
    from lumos.graph.compiled_loops import load

    load()
