"""Reading on the workers of an engine, which see the same files: on a cluster, through a file system that all share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lumos.trace.read.kineto import read_kineto
from lumos.trace.trace import Trace
from lumos.workers import Engine, Job


@dataclass(frozen=True)
class EngineReaders:
    """Reads files on an engine, one a chunk."""

    engine: Engine

    def read(
        self, files: list[Path], done: Callable[[Path], None], meanwhile: Callable[[], None] | None = None
    ) -> list[Trace]:
        """The traces of files, in their order; `done` is told of every file."""
        if meanwhile is not None:
            meanwhile()
        traces = []
        answers = self.engine.run(Job(read_file, None), [file.absolute() for file in files])
        for file, trace in zip(files, answers, strict=True):
            traces.append(trace)
            done(file)
        return traces


def read_file(_: None, path: Path) -> Trace:
    """A job for an engine."""
    return read_kineto(path)
