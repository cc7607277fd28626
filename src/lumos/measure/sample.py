"""Sample: measure operators and collectives on this machine, one JSON line each, resuming where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lumos.errors import OptionError
from lumos.measure.sample_file import SampleFile, open_samples
from lumos.measure.sample_grid import COLLECTIVES, COUNTS, Row, collective_rows, rows

Progress = Callable[[int, int, str], None]


class Timer(Protocol):
    """Measures operators on one GPU."""

    about: dict[str, Any]  # the GPU and the software on it

    def measured(self, row: Row) -> dict[str, Any]:
        """The time of a row ("us"), or why there is none ("error")."""
        ...

    def is_alive(self) -> bool:
        """Whether anything can still be measured: after some errors a process cannot use the GPU any more."""
        ...


class SamplePlan(NamedTuple):
    """What to sample, and for how long."""

    scale: float = 1.0
    only: frozenset[str] = frozenset()
    seed: int = 0
    seconds: float = float("inf")
    gpus: int = 1  # for collectives; none are measured with 1

    def checked(self) -> SamplePlan:
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
        return [] if self.only and self.only <= set(COLLECTIVES) else rows(self.scale, self.only, self.seed)

    def collectives(self) -> list[Row]:
        """The rows of collectives, for every group size."""
        return collective_rows(self.gpus, only=frozenset(COLLECTIVES) & (self.only or frozenset(COLLECTIVES)))


class Sampled(NamedTuple):
    """How many rows were measured, and how many are left."""

    measured: int
    left: int


def sample(
    grid: Iterable[Row],
    output: Path,
    seconds: float = float("inf"),
    progress: Progress | None = None,
    timer: Timer | None = None,
) -> Sampled:
    """Measure the operators that `output` does not hold yet, until `seconds` have passed."""
    timer, end = timer or gpu_timer(), time.monotonic() + seconds
    with open_samples(output, timer.about) as samples:
        return _append(samples, list(grid), lambda todo: _timed(todo, timer, end), progress)


def sample_machine(
    plan: SamplePlan, output: Path, progress: Progress | None = None, timer: Timer | None = None
) -> Sampled:
    """Measure collectives, which take a minute, and then operators until the time is up."""
    timer, end = timer or gpu_timer(), time.monotonic() + plan.seconds
    with open_samples(output, timer.about) as samples:
        together = _append(samples, plan.collectives(), lambda todo: _collectives(todo, end), progress)
        alone = _append(samples, plan.operators(), lambda todo: _timed(todo, timer, end), progress)
    return Sampled(together.measured + alone.measured, together.left + alone.left)


def _append(
    samples: SampleFile, rows: list[Row], measure: Callable[[list[Row]], Iterator[Row]], progress: Progress | None
) -> Sampled:
    """Measure the rows that the file does not have yet, and append each as it comes."""
    todo, measured = samples.missing(rows), 0
    for measured, row in enumerate(measure(todo), 1):
        samples.add(row)
        if progress is not None:
            progress(len(rows) - len(todo) + measured, len(rows), str(row["op"]))
    return Sampled(measured, len(todo) - measured)


def _collectives(todo: list[Row], end: float) -> Iterator[Row]:
    """Collectives with their times, until `end` on the monotonic clock."""
    if todo:
        from lumos.measure.time_collectives import measure_collectives

        yield from measure_collectives(todo, end)


def _timed(todo: list[Row], timer: Timer, end: float) -> Iterator[Row]:
    """Operators with their times, until `end` on the monotonic clock."""
    for row in todo:
        if time.monotonic() > end:
            return
        answer = timer.measured(row)
        yield row | answer
        if "error" in answer and not timer.is_alive():
            raise OptionError(
                f"the GPU failed at {row} ({answer['error']}); run the same command again to resume after this row"
            )


def visible_gpus() -> int:
    """GPUs that can run collectives together."""
    torch = _torch()
    able = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return int(torch.cuda.device_count()) if able else 1


def gpu_timer() -> Timer:
    """A timer on this machine's GPU, or OptionError."""
    _torch()
    from lumos.measure.time_operators import Stopwatch

    return Stopwatch()


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise OptionError(
            "sampling needs torch with CUDA, and torch is not installed: pip install torch, on the machine of the GPU"
        ) from None
    if not torch.cuda.is_available():
        raise OptionError("sampling needs a CUDA GPU, and torch sees none here: run it on the machine of the GPU")
    return torch
