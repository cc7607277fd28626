"""A trace named on the command line, read and replayed, with its progress."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lumos.analysis.replay import Replay, replay
from lumos.cli.options import TraceOptions
from lumos.cli.terminal import busy, progress_bar
from lumos.errors import OptionError
from lumos.graph.rules.build import Execution
from lumos.graph.rules.profiler_cost import load_profiler_cost
from lumos.read.job import read_job
from lumos.trace.steps import keep_step
from lumos.trace.trace import Trace
from lumos.workers import Engine, engine_named
from lumos.workers.processes import processes

_WORTH_A_PROCESS = 1 << 20  # bytes on disk
_WORTH_SEVERAL = 4 << 20
_ALL = TraceOptions()


def load_run(
    path: Path, options: TraceOptions = _ALL, profiler_costs: Path | None = None, operators: bool = False
) -> Replay:
    """A run, replayed; its files are read in processes of this machine, or on a cluster."""
    cost = load_profiler_cost(profiler_costs)
    source = load_source(path, options, operators)
    with busy("building and simulating; the first run also compiles, for some seconds"):
        run = replay(source, cost)
        _ = run.path_summary, run.clean_ms, run.never_profiled_ms  # what takes time; it is kept for what is shown
    return run


def load_source(path: Path, options: TraceOptions = _ALL, operators: bool = False) -> Trace | Execution:
    """What is at a path, read and not yet replayed; with the arguments of its operators if they are wanted."""
    with _readers_for(path, options.engine, options.address) as started, progress_bar() as progress:
        source = read_job(
            path, options.match, options.rank_pattern, progress, engine=started, meanwhile=_load_kernels,
            operators=operators,
        )  # fmt: skip
    return _one_step(source, options.step) if options.step else source


def _one_step(source: Trace | Execution, step: str) -> Trace:
    if isinstance(source, Execution):
        raise OptionError(f"--step {step}: a Chakra graph is replayed whole; cut the trace it was made from instead")
    return keep_step(source, step)


@contextmanager
def _readers_for(path: Path, engine: str, address: str) -> Iterator[Engine | None]:
    """Processes for reading what is large, or workers of a cluster."""
    if engine != "local" or address:
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
    count = 1 if path.is_file() and size < _WORTH_SEVERAL else os.cpu_count() or 1
    with processes(count, preload="lumos.read.kineto") as started:
        yield started


def _load_kernels() -> None:
    from lumos.graph.compiled_loops import load  # numba, while files are read

    load()
