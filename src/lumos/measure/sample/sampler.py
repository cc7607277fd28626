"""Sampler: measures the rows of a grid, one JSON line each, and goes on where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lumos.errors import OptionError
from lumos.measure.sample.collective_sampler import COLLECTIVES, collective_rows, measure_collectives
from lumos.measure.sample.grid import COUNTS, Row, rows
from lumos.measure.sample.sample_file import Journal, open_journal

Progress = Callable[[int, int, str], None]


class Bench(Protocol):
    """What measures operators on one GPU."""

    about: dict[str, Any]  # the GPU, and the software on it

    def measured(self, row: Row) -> dict[str, Any]:
        """The time of a row ("us"), or why it has none ("error")."""
        ...

    def is_alive(self) -> bool:
        """Whether anything can still be measured: some errors take the GPU away from the process for good."""
        ...


class Wish(NamedTuple):
    """What is to be sampled."""

    scale: float = 1.0
    only: frozenset[str] = frozenset()
    seed: int = 0
    seconds: float = float("inf")
    gpus: int = 1  # that do collectives together; 1: none

    def checked(self) -> Wish:
        """Itself, or OptionError."""
        names = {key.partition(":")[0] for key in COUNTS} | set(COLLECTIVES)
        unknown = sorted(self.only - names)
        if unknown:
            raise OptionError(f"--only {unknown[0]}: not known; use some of {', '.join(sorted(names))}")
        if not 0 < self.scale <= 100:
            raise OptionError(f"--scale {self.scale:g}: give a factor of more than 0, and at most 100")
        if not self.seconds > 0:
            raise OptionError(f"--seconds {self.seconds:g}: give a number of more than 0")
        if self.gpus < 2 and self.only and self.only <= set(COLLECTIVES):
            raise OptionError(f"--only {','.join(sorted(self.only))}: collectives need more than one GPU")
        return self

    def operators(self) -> list[Row]:
        """The rows of operators."""
        return [] if self.only and self.only <= set(COLLECTIVES) else rows(self.scale, self.only, self.seed)

    def collectives(self) -> list[Row]:
        """The rows of collectives, for every number of GPUs."""
        chosen = self.only & set(COLLECTIVES) if self.only else frozenset(COLLECTIVES)
        return collective_rows(self.gpus, only=chosen)


class Outcome(NamedTuple):
    """How far it got."""

    measured: int
    left: int


def sample(
    grid: Iterable[Row],
    output: Path,
    seconds: float = float("inf"),
    progress: Progress | None = None,
    bench: Bench | None = None,
) -> Outcome:
    """Measure what `output` does not hold yet, until `seconds` have passed."""
    bench = bench or gpu_at_hand()
    with open_journal(output, bench.about) as journal:
        return _measure(list(grid), journal, bench, time.monotonic() + seconds, progress)


def sample_machine(wish: Wish, output: Path, progress: Progress | None = None, bench: Bench | None = None) -> Outcome:
    """Measure collectives, which take a minute, and then operators until the time is up."""
    end = time.monotonic() + wish.seconds
    bench = bench or gpu_at_hand()
    with open_journal(output, bench.about) as journal:
        together = _measure_together(wish.collectives(), journal, end, progress)
        alone = _measure(wish.operators(), journal, bench, end, progress)
    return Outcome(together.measured + alone.measured, together.left + alone.left)


def _measure_together(rows: list[Row], journal: Journal, end: float, progress: Progress | None) -> Outcome:
    todo, measured = journal.missing(rows), 0
    for row in measure_collectives(todo, end):
        journal.add(row)
        measured += 1
        if progress is not None:
            progress(len(rows) - len(todo) + measured, len(rows), str(row["op"]))
    return Outcome(measured, len(todo) - measured)


def _measure(rows: list[Row], journal: Journal, bench: Bench, end: float, progress: Progress | None) -> Outcome:
    todo = journal.missing(rows)
    for place, row in enumerate(todo):
        if time.monotonic() > end:
            return Outcome(place, len(todo) - place)
        answer = bench.measured(row)
        journal.add(row | answer)
        if "error" in answer and not bench.is_alive():
            raise OptionError(
                f"the GPU gave up at {row} ({answer['error']}); give the same command again: it goes on after this row"
            )
        if progress is not None:
            progress(len(rows) - len(todo) + place + 1, len(rows), str(row["op"]))
    return Outcome(len(todo), 0)


def visible_gpus() -> int:
    """GPUs that could do collectives together."""
    torch = _torch()
    able = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return int(torch.cuda.device_count()) if able else 1


def gpu_at_hand() -> Bench:
    """A stopwatch on this machine's GPU, or OptionError."""
    _torch()
    from lumos.measure.sample.stopwatch import Stopwatch

    return Stopwatch()


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise OptionError(
            "sampling needs torch with CUDA, and there is no torch here: pip install torch, on the machine of the GPU"
        ) from None
    if not torch.cuda.is_available():
        raise OptionError("sampling needs a CUDA GPU, and torch sees none here: run it on the machine of the GPU")
    return torch
