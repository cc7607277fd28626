"""Pipelines among observed jobs: which rank is which stage, which schedule they follow, and what messages cost.

Messages are taken out of what is observed: they follow from the schedule, and are put back where it has them. In a
recorded run several may share a kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from lumos.errors import InputError
from lumos.graph.graph import Floats
from lumos.schedules import Phase, schedule_named
from lumos.synthesis.model import SCHEDULES
from lumos.synthesis.observe import Job, Observed, ObservedRank, State, Task
from lumos.synthesis.vocabulary import MESSAGE_KINDS


@dataclass(frozen=True)
class PipelineJob:
    """A pipeline, as it was recognised."""

    stages: int
    stride: int  # between ranks of neighbouring stages
    schedule: str
    micro_batches: int
    layers: int  # of a stage
    stage_of_rank: list[int]

    def without_messages(self, steps: Sequence[Observed]) -> list[Observed]:
        """The steps without messages, and without passes that ran into one another."""
        return [replace(step, ranks=[_without_messages(r, self.layers) for r in step.ranks]) for step in steps]

    def messages(self, steps: Sequence[Observed]) -> Floats:
        """Columns of messages; the work of the host for them is spread over all that the schedule has."""
        tasks = [t for step in steps for rank in step.ranks for t in rank.tasks if _is_message(t)]
        both_sides = 4 * (self.stages - 1) * self.micro_batches * self.stride * len(steps)
        share = len(tasks) / both_sides
        return np.array([
            (0.5, share * t.work / 1e3, share * t.call / 1e3, t.delay / 1e3, t.busy / 1e3, max(t.bytes, 0.0), 1.0)
            for t in tasks
        ])  # fmt: skip


def pipeline_of(jobs: Sequence[Job]) -> PipelineJob | None:
    """The pipeline that all jobs are; None if they send no messages."""
    found = {_of_step(job.name, step) for job in jobs for step in job.steps}
    if found == {None}:
        return None
    if len(found) > 1:
        raise InputError(f"{jobs[0].name}: the runs are pipelines of different form; learn from each on its own")
    stages, stride, schedule, micro_batches, layers = next(one for one in found if one)
    ranks = len(jobs[0].steps[0].ranks)
    stage_of_rank = [rank // stride % stages for rank in range(ranks)]
    return PipelineJob(stages, stride, schedule, micro_batches, layers, stage_of_rank)


def _of_step(name: str, step: Observed) -> tuple[int, int, str, int, int] | None:
    apart = {abs(peer - rank.rank) for rank in step.ranks for peer in rank.peers}
    if not any(_is_message(task) for rank in step.ranks for task in rank.tasks):
        return None
    if len(apart) != 1:
        raise InputError(f"{name}: its messages do not go from stage to stage; use lumos convert --anonymise for it")
    stride = apart.pop()
    stages = len(step.ranks) // stride
    layers = min(_attentions(rank) for rank in step.ranks)
    counts = [sum(_passes(rank).get("forward", [])) // max(layers, 1) for rank in step.ranks]
    micro_batches = Counter(counts).most_common(1)[0][0]
    for schedule in SCHEDULES:
        turns = schedule_named(schedule).turns(stages, 1, micro_batches) if micro_batches else np.zeros((stages, 0, 3))
        if all(_collapsed(turns[rank.rank // stride % stages]) == _recorded(rank) for rank in step.ranks):
            return stages, stride, schedule, micro_batches, layers
    raise InputError(
        f"{name}: a pipeline of {stages} stages that follows none of {', '.join(SCHEDULES)}; "
        "use lumos convert --anonymise for it"
    )


def _is_message(task: Task) -> bool:
    return task.state.kind in MESSAGE_KINDS


def _passes(rank: ObservedRank) -> dict[str, list[int]]:
    """Attentions of the passes of every phase."""
    found: dict[str, list[int]] = {}
    for turn, name in enumerate(rank.passes):
        found.setdefault(name, []).append(sum(block.turn == turn for block in rank.blocks) - 1)
    return found


def _attentions(rank: ObservedRank) -> int:
    """Layers of a stage: the fewest attentions of a pass; passes of several micro-batches have a multiple of it."""
    return min((count for count in _passes(rank).get("forward", []) if count > 0), default=0)


def _collapsed(turns: np.ndarray) -> list[str]:
    return [Phase(int(phase)).name.lower() for phase, _ in groupby(turns[:, 0].tolist())]


def _recorded(rank: ObservedRank) -> list[str]:
    return [name for name in rank.passes if name != "optimizer"]


def _without_messages(rank: ObservedRank, layers: int) -> ObservedRank:
    """A rank without messages, and with the passes that hold one micro-batch alone, where there are any."""
    carrying = {task.state.stream for task in rank.tasks if _is_message(task)}
    alone = _alone(rank, layers)
    blocks = [
        replace(block, last=True, tasks=[_bare(task, carrying) for task in block.tasks if not _is_message(task)])
        for block in rank.blocks
        if block.turn in alone
    ]
    return replace(rank, blocks=blocks, layers=layers)


def _alone(rank: ObservedRank, layers: int) -> set[int]:
    """The passes of a single micro-batch, and the update."""
    chosen = set()
    for phase in set(rank.passes):
        turns = [turn for turn, name in enumerate(rank.passes) if name == phase]
        single = {turn for turn in turns if sum(block.turn == turn for block in rank.blocks) == layers + 1}
        if not single and phase != "optimizer":
            raise InputError(
                f"rank {rank.rank}: all its {phase} passes run into one another, so that none can be told apart; "
                "record more micro-batches than stages"
            )
        chosen |= set(turns) if phase == "optimizer" else single
    return chosen


def _bare(task: Task, carrying: set[int]) -> Task:
    """A task that waits for no message."""
    state: State = task.state
    waits = tuple(wait for wait in state.waits if wait.stream not in carrying)
    return task._replace(state=state._replace(waits=waits))
