"""Sample: measure this machine, one JSON line a measurement, resuming where it stopped.

Collectives and the small sections (host, whole steps, power, profiler) come first and take at most half of the time;
operators take the rest, in an order that makes every beginning of it a smaller grid.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lumos.errors import LumosError, OptionError
from lumos.measure.sample_file import SampleFile, open_samples
from lumos.measure.sample_grid import COLLECTIVES, SECTIONS, Row, collective_rows, layout_of, operators_of, rows
from lumos.measure.sample_grid import section_rows as rows_of_sections

if TYPE_CHECKING:
    from lumos.measure.ranks import Team, World

Progress = Callable[[int, int, str], None]
Measure = Callable[[list[Row], float], Iterator[Row]]

_SMALL_SHARE = 0.5  # of the time, at most, for everything but operators
_ROWS_A_TURN = 24  # that every rank measures before rank 0 writes them down


class Timer(Protocol):
    """Measures operators and sections on one device."""

    about: dict[str, Any]  # the device and the software on it

    def measured(self, row: Row) -> Row:
        """The time of a row ("us"), or why there is none ("error")."""
        ...

    def section(self, name: str, rows: list[Row]) -> Iterator[Row]:
        """The rows of a small section, with what was measured."""
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
    device: str = "cuda"
    gpus_per_node: int = 1  # for collectives; none are measured with 1 on 1 node
    nodes: int = 1

    def checked(self) -> SamplePlan:
        """Itself, or OptionError."""
        names = {*operators_of(self.device), *COLLECTIVES, *SECTIONS}
        unknown = sorted(self.only - names)
        if unknown:
            raise OptionError(f"--only {unknown[0]}: not known; use some of {', '.join(sorted(names))}")
        if not 0 < self.scale <= 100:
            raise OptionError(f"--scale {self.scale:g}: give a factor of more than 0, and at most 100")
        if not self.seconds > 0:
            raise OptionError(f"--seconds {self.seconds:g}: give a number of more than 0")
        return self

    def checked_for_ranks(self) -> SamplePlan:
        """Itself, once the machine is known, or OptionError."""
        if self.gpus_per_node * self.nodes < 2 and self.only and self.only <= set(COLLECTIVES):
            raise OptionError(f"--only {','.join(sorted(self.only))}: collectives need more than one GPU")
        if not self.everything():
            raise OptionError(f"--only {','.join(sorted(self.only))}: cannot be measured on a CPU; leave it out")
        return self

    def operators(self) -> list[Row]:
        chosen = self.only & set(operators_of(self.device))
        return rows(self.scale, chosen, self.seed, self.device) if chosen or not self.only else []

    def sections(self) -> list[Row]:
        chosen = self.only & set(SECTIONS)
        return rows_of_sections(self.device, chosen) if chosen or not self.only else []

    def collectives(self) -> list[Row]:
        """The rows of collectives, for every layout of groups."""
        chosen = frozenset(COLLECTIVES) & (self.only or frozenset(COLLECTIVES))
        return collective_rows(self.gpus_per_node, self.nodes, only=chosen, device=self.device)

    def everything(self) -> list[Row]:
        return [*self.collectives(), *self.sections(), *self.operators()]


@dataclass(frozen=True)
class Sampled:
    """How many rows were measured, how many are left, and how many seconds those will take at this rate."""

    measured: int
    left: int
    seconds_left: float = field(default=0.0, compare=False)

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(self.measured + other.measured, other.left, other.seconds_left)


def sample(
    grid: Iterable[Row],
    output: Path,
    seconds: float = float("inf"),
    progress: Progress | None = None,
    timer: Timer | None = None,
) -> Sampled:
    """Measure the operators that `output` does not hold yet, until `seconds` have passed."""
    timer, end = timer or device_timer("cuda"), time.monotonic() + seconds
    with open_samples(output, timer.about) as samples:
        return _append(samples, list(grid), lambda todo, end: _timed(todo, timer, end), end, progress)


def sample_machine(
    plan: SamplePlan,
    output: Path,
    progress: Progress | None = None,
    timer: Timer | None = None,
    team: Team | None = None,
) -> Sampled:
    """Measure what a plan has and `output` does not hold yet, until the time is up; rank 0 of a team calls this."""
    timer, begin = timer or device_timer(plan.device), time.monotonic()
    about = timer.about
    if team is not None:
        about = about | {"gpus_per_node": team.per_node, "nodes": team.nodes}
    parts: list[tuple[list[Row], Measure]] = [
        (plan.collectives(), lambda todo, end: _collectives(todo, team, end)),
        (plan.sections(), lambda todo, end: _sections(todo, timer, end)),
        (plan.operators(), lambda todo, end: _timed(todo, timer, end, team)),
    ]
    with open_samples(output, about) as samples:
        done = [Sampled(0, len(samples.missing(rows))) for rows, _ in parts]
        for turn in range(2):  # what the small parts had no time for comes after the operators
            for place, (chosen, measure) in enumerate(parts):
                share = _SMALL_SHARE if turn == 0 and place < 2 and parts[2][0] else 1.0
                found = _append(samples, chosen, measure, begin + plan.seconds * share, progress)
                done[place] += found if found.measured else Sampled(0, found.left, done[place].seconds_left)
    return Sampled(sum(d.measured for d in done), sum(d.left for d in done), sum(d.seconds_left for d in done))


def _append(samples: SampleFile, chosen: list[Row], measure: Measure, end: float, progress: Progress | None) -> Sampled:
    """Measure the rows that the file does not have yet, and append each as it comes."""
    todo, measured, begin = samples.missing(chosen), 0, time.monotonic()
    for measured, row in enumerate(measure(todo, end), 1):
        samples.add(row)
        if progress is not None:
            progress(len(chosen) - len(todo) + measured, len(chosen), str(row["op"]))
    left = len(todo) - measured
    return Sampled(measured, left, left * (time.monotonic() - begin) / max(1, measured))


def _collectives(todo: list[Row], team: Team | None, end: float) -> Iterator[Row]:
    """Collectives with their times, layout by layout."""
    if team is None:
        return
    from lumos.measure.time_collectives import measure_collectives

    for _, same in groupby(todo, key=layout_of):
        if time.monotonic() > end:
            return
        members = list(same)
        team.shared(("collectives", members))
        yield from measure_collectives(members, team, end)


def _sections(todo: list[Row], timer: Timer, end: float) -> Iterator[Row]:
    for name, same in groupby(todo, key=lambda row: str(row["op"])):
        members = list(same)
        together = name in ("host", "profiler")
        for part in [members] if together else [[row] for row in members]:
            if time.monotonic() > end:
                return
            yield from timer.section(name, part)


def _timed(todo: list[Row], timer: Timer, end: float, team: Team | None = None) -> Iterator[Row]:
    """Operators with their times; the ranks of a team on GPUs divide them, while CPUs of one node would share cores."""
    if team is not None and team.device == "cuda":
        yield from _divided(todo, timer, end, team)
        return
    for row in todo:
        if time.monotonic() > end:
            return
        answer = timer.measured(row)
        yield row | answer
        _check_alive(timer, row, answer)


def _divided(todo: list[Row], timer: Timer, end: float, team: Team) -> Iterator[Row]:
    turn = _ROWS_A_TURN * team.size
    for begin in range(0, len(todo), turn):
        if time.monotonic() > end:
            return
        chosen = todo[begin : begin + turn]
        team.shared(("operators", chosen))
        for answers in _share_of(chosen, timer, team):
            yield from answers


def _share_of(chosen: list[Row], timer: Timer, team: Team) -> list[list[Row]]:
    """What all ranks measured of these rows; every rank of the team calls this."""
    found = []
    for row in chosen[team.rank :: team.size]:
        answer = timer.measured(row)
        found.append(row | answer)
        _check_alive(timer, row, answer)
    return team.gathered(found)


def _check_alive(timer: Timer, row: Row, answer: Row) -> None:
    if "error" in answer and not timer.is_alive():
        raise OptionError(
            f"the GPU failed at {row} ({answer['error']}); run the same command again to resume after this row"
        )


# ---------------------------------------------------------------------- one process or many
def run_sampling(
    plan: SamplePlan, output: Path, collectives: bool | None = None, progress: Progress | None = None
) -> tuple[Sampled, SamplePlan]:
    """Sample alone, with all GPUs of this machine, or as rank 0 of what torchrun or Slurm started.

    The plan that comes back knows how many GPUs and nodes there were.
    """
    from lumos.measure.ranks import Peers, world_of

    world, peers = world_of(os.environ), None
    if world is None and collectives is not False and plan.device == "cuda" and visible_gpus() > 1:
        peers = Peers(visible_gpus(), plan.device, follow)
        world = peers.world
    if world is None:
        if collectives:
            raise OptionError("--collectives needs more than one GPU with NCCL, and torch sees no more than one here")
        return sample_machine(plan.checked_for_ranks(), output, progress), plan
    try:
        return _lead(plan, world, output, collectives is not False, progress)
    finally:
        if peers is not None:
            peers.end()


def _lead(
    plan: SamplePlan, world: World, output: Path, collectives: bool, progress: Progress | None
) -> tuple[Sampled, SamplePlan]:
    from lumos.measure.ranks import Team, use_gpu, words_of

    use_gpu(world.local_rank, plan.device)
    team = Team(world, plan.device)
    try:
        timer = device_timer(plan.device)
        _check_alike(team, timer)
        if collectives:
            plan = plan._replace(gpus_per_node=team.per_node, nodes=team.nodes)
        done = sample_machine(plan.checked_for_ranks(), output, progress, timer, team)
        team.shared(None)
    except LumosError as problem:
        team.watch.report(str(problem))
        raise
    except RuntimeError as problem:  # of gloo or NCCL: another rank is gone
        why = team.watch.failure() or f"another rank is gone ({words_of(problem)})"
        raise OptionError(f"{why}; the same command resumes") from None
    team.leave()
    return done, plan


def follow(team: Team) -> None:
    """What every rank but the first does: measure what rank 0 says, until it says no more."""
    from lumos.measure.time_collectives import measure_collectives

    timer = device_timer(team.device)
    _check_alike(team, timer)
    while (order := team.shared()) is not None:
        what, chosen = order
        if what == "collectives":
            for _ in measure_collectives(chosen, team):
                pass
        else:
            _share_of(chosen, timer, team)


def _check_alike(team: Team, timer: Timer) -> None:
    names = sorted(set(team.gathered(timer.about["gpu"])))
    if len(names) > 1:
        raise OptionError(f"ranks have different GPUs ({', '.join(names)}): sample each kind alone, into its own file")


def device_of(wanted: str) -> str:
    """ "cuda" or "cpu", by what was asked for and what torch sees; OptionError where it sees none of it."""
    torch = _torch()
    if wanted not in ("auto", "cuda", "cpu"):
        raise OptionError(f"--device {wanted}: not known; use cuda or cpu")
    seen = bool(torch.cuda.is_available())
    if wanted == "cuda" and not seen:
        raise OptionError("--device cuda: torch sees no GPU here; run it where the GPU is, or use --device cpu")
    return "cpu" if wanted == "cpu" or not seen else "cuda"


def visible_gpus() -> int:
    """GPUs that can run collectives together."""
    torch = _torch()
    able = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return int(torch.cuda.device_count()) if able else 1


def device_timer(device: str) -> Timer:
    """A timer on this machine's GPU or CPU, or OptionError."""
    _torch()
    from lumos.measure.time_sections import MachineTimer

    return MachineTimer(device)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise OptionError(
            "sampling needs torch, and it is not installed: pip install torch, on the machine to be sampled; "
            "`lumos sample --script sample.pyz` writes a file that needs nothing else there"
        ) from None
    return torch
