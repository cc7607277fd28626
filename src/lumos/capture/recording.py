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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from lumos.capture.clean_steps import CleanSteps
from lumos.capture.fake import check_world, fake_world
from lumos.capture.place import Place, require_torch, this_place
from lumos.capture.setup_file import checked, setup_files
from lumos.capture.step_profiler import StepProfiler
from lumos.errors import OptionError

_AFTER = 3  # steps that are timed after the recording
_FAKE = fake_world  # the name is also that of an option


@dataclass(frozen=True)
class Plan:
    """What is recorded, and where it goes."""

    folder: Path
    steps: int = 2
    warmup: int = 5
    setup: object = None
    rank_env: str = "RANK"

    @property
    def last(self) -> int:
        """Steps that have ended when the recording ends."""
        return self.warmup + self.steps


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

    `setup` (a path, a dictionary of sections, or a Setup) is written beside the traces. `fake_world=(rank, world)` has
    this process be a rank of a job that is not there. Wrong arguments raise; whatever happens later does not.
    """
    require_torch()
    plan = checked_plan(Path(folder), steps, warmup, setup, rank_env)
    if fake_world is not None:
        check_world(*fake_world)
        _FAKE(*fake_world)
    return Recording(plan)


def checked_plan(folder: Path, steps: int, warmup: int, setup: object = None, rank_env: str = "RANK") -> Plan:
    """The plan, or OptionError; the folder is there afterwards."""
    if steps < 1:
        raise OptionError(f"steps = {steps}: record at least one")
    if warmup < 1:
        raise OptionError(f"warmup = {warmup}: the profiler itself needs one step to warm up; give 1 or more")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{folder}: cannot be a folder of traces ({error.strerror})") from None
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{folder}: cannot be written to; choose another folder")
    return Plan(folder.absolute(), steps, warmup, checked(setup), rank_env)


@dataclass
class Recording:
    """Is told of every step that ends: `with recording as step: …; step()`, or `recording.step()`."""

    plan: Plan
    profiler: StepProfiler = field(default_factory=StepProfiler)
    before: CleanSteps = field(default_factory=CleanSteps)
    after: CleanSteps = field(default_factory=CleanSteps)
    ended: int = 0  # steps
    started: bool = False
    over: bool = False
    saved: bool = False

    def __enter__(self) -> Recording:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self) -> None:
        self.step()

    def start(self) -> None:
        """The first step begins here; `step` does it where nobody did."""
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
        self._time_clean_steps()
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

    def _time_clean_steps(self) -> None:
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
        place = this_place(self.plan.rank_env)
        self.profiler.save(self.plan.folder / f"rank{place.rank}.pt.trace.json.gz", unfinished)
        self.saved = True
        if not place.speaks_for_all:
            return
        for name, text in setup_files(self.plan.setup, place).items():
            _write(self.plan.folder / name, text)
        self._describe()
        stale = _ranks_beyond(self.plan.folder, place.world)
        if stale:
            _say(f"{self.plan.folder} also holds {stale[0]}, of a job of more than {place.world} ranks; remove it")

    def _describe(self) -> None:
        """Write what was recorded how, once a job."""
        place = this_place(self.plan.rank_env)
        if place.speaks_for_all:
            text = json.dumps(description(self, place), indent=1)
            _write(self.plan.folder / "capture.json", text + "\n")


def description(recording: Recording, place: Place) -> dict[str, object]:
    """What `capture.json` says."""
    import torch

    plan = recording.plan
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rank": place.rank,
        "world": place.world,
        "backend": place.backend,
        "device": place.device,
        "steps": min(recording.ended - plan.warmup, plan.steps),
        "warmup": plan.warmup,
        "record_shapes": True,
        "without_profiler": {"never_profiled": recording.before.as_dict(), "after": recording.after.as_dict()},
    }


def _ranks_beyond(folder: Path, world: int) -> list[str]:
    """Traces of ranks that this job does not have: left from another one, and read together with these."""
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
    sys.stderr.write(f"lumos capture{f' (rank {rank})' if rank else ''}: {text}\n")
    sys.stderr.flush()
