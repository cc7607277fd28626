"""Recording: counts the steps of a training loop, and records some of them.

    step        0        1 … warmup-2        warmup-1          warmup … warmup+steps-1      then        later
    what        left     timed, nothing      the profiler      recorded                     timed       nothing
                out      is recorded         warms up                                       again

A failure of the profiler never reaches the loop: one line says so, and the training goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from lumos.arguments import checks_arguments
from lumos.capture.fake import check_world
from lumos.capture.fake import fake_world as join_fake_world
from lumos.capture.rank_info import rank_info, require_torch, synchronise
from lumos.capture.setup_file import checked_setup, setup_files
from lumos.capture.step_profiler import StepProfiler
from lumos.errors import OptionError, printable

_AFTER = 3  # steps that are timed after the recording


@dataclass(frozen=True)
class Plan:
    """What is recorded, and where it goes."""

    folder: Path
    steps: int = 2
    warmup: int = 5
    setup: object = None
    rank_env: str = "RANK"
    fake_world: tuple[int, int] | None = None  # (rank, world)
    by: str = "lumos.capture.command"  # the module that records in a process of the command
    gpu: dict[str, object] = field(default_factory=dict)  # that a dry run has; a recording has a real one

    @property
    def last(self) -> int:
        """Steps that have ended when the recording ends."""
        return self.warmup + self.steps

    def checked(self) -> Plan:
        """The plan with absolute paths, or OptionError; the folder exists afterwards."""
        if self.steps < 1:
            raise OptionError(f"steps = {self.steps}: record at least one")
        if self.warmup < 1:
            raise OptionError(f"warmup = {self.warmup}: the profiler itself needs one step to warm up; give 1 or more")
        if self.fake_world is not None:
            check_world(*self.fake_world)
        setup = checked_setup(self.setup)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"{self.folder}: cannot be a folder of traces ({error.strerror})") from None
        if not os.access(self.folder, os.W_OK):
            raise OptionError(f"{self.folder}: cannot be written to; choose another folder")
        return replace(self, folder=self.folder.absolute(), setup=setup)


@checks_arguments
def capture(
    folder: str | os.PathLike[str],
    *,
    setup: object = None,
    steps: int = 2,
    warmup: int = 5,
    fake_world: tuple[int, int] | None = None,
    rank_env: str = "RANK",
) -> Recording:
    """Record `steps` steps of this process into `folder`, after `warmup` steps.

    `setup` (a path, a dictionary of sections, or a Setup) is written beside the traces. With `fake_world=(rank, world)`
    this process poses as one rank of a larger job. Wrong arguments raise; failures after that never do.
    """
    require_torch()
    plan = Plan(Path(folder), steps, warmup, setup, rank_env, fake_world).checked()
    if fake_world is not None:
        join_fake_world(*fake_world)
    return Recording(plan)


@dataclass
class StepTimer:
    """Times steps in a row while nothing is recorded; the GPU is waited for at the first and the last end only."""

    ends: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Steps are timed from here."""
        synchronise()
        self.ends = [time.perf_counter()]

    def lap(self, last: bool = False) -> None:
        """A step has ended; nothing happens before `begin`."""
        if self.ends:
            if last:
                synchronise()
            self.ends.append(time.perf_counter())

    def as_dict(self) -> dict[str, object]:
        """The mean, which counts, and each one, which on a GPU may end before its work does."""
        each = [1e3 * (b - a) for a, b in pairwise(self.ends)]
        mean = round(sum(each) / len(each), 4) if each else None
        return {"steps": len(each), "mean_ms": mean, "each_ms": [round(value, 4) for value in each]}


@dataclass
class Recording:
    """Call it at the end of every step: `with recording as step: …; step()`, or `recording.step()`."""

    plan: Plan
    profiler: StepProfiler = field(default_factory=StepProfiler)
    before: StepTimer = field(default_factory=StepTimer)
    after: StepTimer = field(default_factory=StepTimer)
    ended: int = 0  # steps
    started: bool = False
    over: bool = False
    saved: bool = False

    def __enter__(self) -> Recording:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self) -> None:
        self.step()

    def start(self) -> None:
        """The first step begins here; without this call it begins with the first `step`."""
        if not self.started:
            self.started = True
            self._guarded(self._prepare_if_due)

    def step(self) -> None:
        """A step has ended."""
        if not self.over:
            self.started = True
            self._guarded(self._advance)

    def close(self) -> None:
        """The loop has ended: write what there is."""
        if not self.over:
            self._guarded(self._finish)
        self.over = True

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as problem:
            self.over = True
            _say(f"recording failed, and the training goes on without it ({type(problem).__name__}: {problem})")
            with suppress(Exception):  # it may have stopped by itself
                self.profiler.abandon()

    def _advance(self) -> None:
        self.ended += 1
        plan, ended = self.plan, self.ended
        self._time_step()
        if ended == plan.warmup:
            self.profiler.begin(ended)
        elif plan.warmup < ended < plan.last:
            self.profiler.next_step(ended)
        elif ended == plan.last:
            self.profiler.end()
            self._save()
        elif ended == plan.last + 1 + _AFTER:
            self._describe()
            self.over = True
        self._prepare_if_due()

    def _prepare_if_due(self) -> None:
        if self.ended == self.plan.warmup - 1:
            self.profiler.prepare()

    def _time_step(self) -> None:
        """The first step is slow, and ranks wait for each other's files in the first after the recording."""
        ended, last = self.ended, self.plan.last
        if ended == 1 and self.plan.warmup > 2:
            self.before.begin()
        elif 1 < ended < self.plan.warmup:
            self.before.lap(ended == self.plan.warmup - 1)
        elif ended == last + 1:
            self.after.begin()
        elif ended > last + 1:
            self.after.lap(ended == last + 1 + _AFTER)

    def _finish(self) -> None:
        recorded = self.ended - self.plan.warmup
        if recorded >= self.plan.steps:
            self._describe()
        elif recorded >= 1:
            self.profiler.end()
            self._save(unfinished=True)
            _say(f"the loop ended after {recorded} of {self.plan.steps} steps to record; the trace has {recorded}")
        else:
            self.profiler.cancel()
            _say(
                f"no step was recorded: the loop ended after {self.ended} steps, and {self.plan.warmup} come before "
                "the first that is; make it longer, or lower warmup"
            )

    def _save(self, unfinished: bool = False) -> None:
        info = rank_info(self.plan.rank_env)
        self.profiler.save(self.plan.folder / f"rank{info.rank}.pt.trace.json.gz", unfinished)
        self.saved = True
        if not info.writes_job_files:
            return
        for name, text in setup_files(self.plan.setup, info).items():
            _write(self.plan.folder / name, text)
        self._describe()
        stale = _ranks_beyond(self.plan.folder, info.world)
        if stale:
            _say(f"{self.plan.folder} also holds {stale[0]}, of a job of more than {info.world} ranks; remove it")

    def _describe(self) -> None:
        """Write `capture.json`: what was recorded and how, once a job."""
        import torch

        info, plan = rank_info(self.plan.rank_env), self.plan
        if not info.writes_job_files:
            return
        description = {
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            **asdict(info),
            "steps": min(self.ended - plan.warmup, plan.steps),
            "warmup": plan.warmup,
            "record_shapes": True,
            "without_profiler": {"never_profiled": self.before.as_dict(), "after": self.after.as_dict()},
        }
        _write(plan.folder / "capture.json", json.dumps(description, indent=1) + "\n")


def _ranks_beyond(folder: Path, world: int) -> list[str]:
    """Traces of ranks that this job does not have: left from another one, they would be read together with these."""
    names = sorted(path.name for path in folder.glob("rank*.pt.trace.json.gz"))
    numbers = {name: name.removeprefix("rank").partition(".")[0] for name in names}
    return [name for name in names if numbers[name].isdecimal() and int(numbers[name]) >= world]


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)


def _say(text: str) -> None:
    """One line; not a warning of Python's, which a user may have turned into an error."""
    rank = os.environ.get("RANK")
    sys.stderr.write(f"lumos capture{f' (rank {rank})' if rank else ''}: {printable(text)}\n")
    sys.stderr.flush()
