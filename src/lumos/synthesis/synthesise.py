"""synthesise(): jobs observed, a model learned, a run generated, and how far it is from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from lumos.analysis.replay import Replay, replay
from lumos.errors import check_seed
from lumos.graph.rules.build import Execution
from lumos.synthesis.distance import Behaviour, Distance, behaviour, kernel_tasks
from lumos.synthesis.generate import Size, generate
from lumos.synthesis.learn import learn
from lumos.synthesis.model import Model
from lumos.synthesis.observe import Job, Observed, Task, observe
from lumos.synthesis.originals import Nearness, among_originals, nearness
from lumos.trace.steps import WHOLE, find_steps, keep_step
from lumos.trace.trace import Trace

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RecordedJob:
    """A job that was replayed, and whose steps were observed one by one."""

    name: str
    runs: list[Replay]
    observed: list[Observed]

    @property
    def job(self) -> Job:
        return Job(self.name, self.observed)

    @cached_property
    def behaviour(self) -> Behaviour:
        return behaviour(self.runs, self.observed)


def record(name: str, source: Trace | Execution, steps: Sequence[int] | None = None) -> RecordedJob:
    """Replay a job and observe its steps, or some of them by their place, each cut out of it."""
    runs = [replay(part) for part in _parts(source, steps)]
    return RecordedJob(name, runs, [step for run in runs for step in observe(run)])


def _parts(source: Trace | Execution, steps: Sequence[int] | None) -> list[Trace | Execution]:
    if isinstance(source, Execution) or steps is None:
        return [source]
    names = find_steps(source).names
    return [source] if names == (WHOLE,) else [keep_step(source, names[i]) for i in steps]


@dataclass(frozen=True)
class Synthetic:
    """A generated run, the model it was drawn from, and what it is compared with."""

    model: Model
    execution: Execution
    size: Size
    seed: int
    originals: Sequence[RecordedJob] = ()
    against: Sequence[RecordedJob] = ()

    @cached_property
    def run(self) -> Replay:
        return replay(self.execution)

    @cached_property
    def observed(self) -> list[Observed]:
        return observe(self.run)

    @cached_property
    def distances(self) -> list[Distance]:
        """From the jobs that were kept aside, and from those that were learned from."""
        own = behaviour([self.run], self.observed)
        return [Distance(job.name, own, job.behaviour) for job in (*self.against, *self.originals)]

    @cached_property
    def nearness(self) -> dict[str, Nearness]:
        """To the originals: of the synthetic run, and of the yardsticks."""
        if not self.originals:
            return {}
        originals = [step for job in self.originals for step in kernel_tasks(job.observed)]
        found = {"synthetic": nearness(kernel_tasks(self.observed), originals)}
        learned = {_times_of(step) for step in originals}
        held_out = [s for job in self.against for s in kernel_tasks(job.observed) if _times_of(s) not in learned]
        if held_out:
            found["held out"] = nearness(held_out, originals)
        between = among_originals(originals)
        return found | ({"originals among each other": between} if between else {})

    @property
    def reproduces(self) -> bool | None:
        """Whether the run comes nearer to an original than recorded steps do to each other; None: no yardstick."""
        others = [one for name, one in self.nearness.items() if name != "synthetic"]
        if not others:
            return None
        own, other = self.nearness["synthetic"], others[0]
        return own.longest_run > other.longest_run or own.median_distance < other.median_distance * _NEARER

    @property
    def warnings(self) -> list[str]:
        """What of the size was assumed rather than learned."""
        model, size = self.model, self.size
        said = []
        if size.ranks and size.ranks != model.world and model.groups:
            said.append(
                f"{size.ranks} rank{'s' * (size.ranks > 1)} in place of {model.world}: work of a rank is kept, "
                "transfers follow what a ring of that size moves, and sharded updates the share of a rank"
            )
        if size.layers and size.layers != model.layers and len({job.job.layers for job in self.originals}) < 2:
            said.append(
                f"{size.layers} layers from runs of {model.layers}: what the optimizer does in each is estimated; "
                "learn from runs of two depths to know it"
            )
        learned = {_times_of(step) for job in self.originals for step in kernel_tasks(job.observed)}
        for job in self.against:
            if any(_times_of(step) in learned for step in kernel_tasks(job.observed)):
                said.append(f"{job.name} has steps that were learned from: nearness leaves them out, as no yardstick")
        return [*said, *(text for job in self.against if (text := self._unlike(job)))]

    def _unlike(self, job: RecordedJob) -> str:
        """How the run differs in size from one that it is compared with; '' if it does not."""
        own = {"layers": self.size.layers or self.model.layers, "ranks": len(self.run.marks.ranks)}
        other = {"layers": job.job.layers, "ranks": len(job.runs[0].marks.ranks)}
        unlike = [name for name in own if own[name] != other[name]]
        if not unlike:
            return ""
        theirs = " and ".join(f"{other[name]} {name}" for name in unlike)
        ours = " and ".join(f"{own[name]} {name}" for name in unlike)
        options = " ".join(f"--{name} {other[name]}" for name in unlike)
        return f"{job.name} has {theirs}, the synthetic run {ours}: compared as they are; {options} makes them alike"

    def as_dict(self) -> dict[str, Any]:
        run, model = self.run, self.model
        return {
            "ranks": len(run.marks.ranks),
            "steps": len(run.marks.names),
            "layers": self.size.layers or model.layers,
            "micro_batches": self.size.micro_batches or model.micro_batches,
            "seed": self.seed,
            "tasks": len(self.execution.graph),
            "step_ms": run.recorded_steps.mean,
            "learned_from": msgspec.structs.asdict(model.learned_from),
            "distances": [one.as_dict() for one in self.distances],
            "nearness": {name: one.as_dict() for name, one in self.nearness.items()},
            "reproduces_an_original": self.reproduces,
        }


def _times_of(step: Sequence[Task]) -> tuple[tuple[float, float], ...]:
    """By which a step is known again."""
    return tuple((task.busy, task.work) for task in step)


_NEARER = 0.8  # how much nearer than the yardstick is near


def synthesise(
    originals: Sequence[RecordedJob] | Model, size: Size | None = None, seed: int = 0,
    against: Sequence[RecordedJob] = (),
) -> Synthetic:  # fmt: skip
    """A synthetic run like some recorded jobs, or from a model of them.

    job = record("run", read_job(Path("traces")))
    synthesise([job], Size(ranks=64)).execution
    """
    check_seed(seed)
    wanted = size or Size()
    if isinstance(originals, Model):
        return Synthetic(originals, generate(originals, wanted, seed), wanted, seed, (), against)
    model = learn([one.job for one in originals], seed)
    return Synthetic(model, generate(model, wanted, seed), wanted, seed, originals, against)
