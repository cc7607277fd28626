"""From a model to a run: tasks drawn for every rank and step, put on lanes with their dependencies, and simulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumos.errors import OptionError, check_seed
from lumos.graph.rules.build import Execution
from lumos.synthesis.draw import draw_step, expected_tasks, matched
from lumos.synthesis.lanes import Lanes
from lumos.synthesis.model import Model
from lumos.synthesis.observe import Group

_MOST_TASKS = 1_000_000  # of 1.3 kB and 40 microseconds each: most of both goes into comparing the run
_MOST_DRAWS = 300_000  # of 100 microseconds each
_MOST = 100_000


@dataclass(frozen=True)
class Size:
    """What to generate; 0 is what was learned."""

    ranks: int = 0
    steps: int = 0
    layers: int = 0
    micro_batches: int = 0

    def of(self, model: Model) -> Size:
        """The same with what was learned in place of zeros, checked."""
        size = Size(
            self.ranks or model.ranks, self.steps or model.steps, self.layers or model.layers,
            self.micro_batches or model.micro_batches,
        )  # fmt: skip
        if self.layers and not model.layers:
            raise OptionError(f"--layers {self.layers}: the traces have no attention, by which layers are told apart")
        given = {"ranks": self.ranks, "steps": self.steps, "layers": self.layers, "micro-batches": self.micro_batches}
        for name, value in given.items():
            if not 0 <= value <= _MOST:
                raise OptionError(f"--{name} {value}: give a number from 1 to {_MOST:,}")
        return size


def generate(model: Model, size: Size | None = None, seed: int = 0) -> Execution:
    """A synthetic run: simulated, and ready to be written."""
    asked = size or Size()
    wanted = asked.of(model)
    groups = _groups_at(model, asked.ranks)
    check_seed(seed)
    role_of_rank = _roles_at(model, asked.ranks)
    _check_work(model, wanted, role_of_rank)
    steps = [
        [
            draw_step(model, role, wanted.layers, wanted.micro_batches, np.random.default_rng([seed, number]))
            for role in range(len(model.roles))
        ]
        for number in range(wanted.steps)
    ]
    if len(model.roles) > 1 and model.pipeline is None:
        steps = [matched(roles) for roles in steps]
    return Lanes(model, groups, role_of_rank, steps, seed).execution()


def _check_work(model: Model, wanted: Size, role_of_rank: list[int]) -> None:
    """Refuse what would take minutes, or more memory than most machines have."""
    roles = range(len(model.roles))
    per_role = [expected_tasks(model, role, wanted.layers, wanted.micro_batches) for role in roles]
    tasks = wanted.steps * sum(per_role[role][0] for role in role_of_rank)
    draws = wanted.steps * sum(per_role[role][1] for role in role_of_rank)
    size = f"{wanted.ranks:,} ranks, {wanted.steps:,} steps, {wanted.layers:,} layers"
    advice = "are generated at once, so give fewer with --ranks, --steps or --layers"
    if not 0 < tasks <= _MOST_TASKS:
        raise OptionError(f"{size}: {tasks:,.0f} tasks; at most {_MOST_TASKS:,} {advice}")
    if draws > _MOST_DRAWS:
        raise OptionError(f"{size}: {draws:,} kinds of tasks in all steps; at most {_MOST_DRAWS:,} {advice}")


def _roles_at(model: Model, ranks: int) -> list[int]:
    """The role of every rank, with another number of ranks in the same proportion."""
    known = model.role_of_rank
    if not ranks or ranks == len(known):
        return list(known)
    if model.pipeline is not None and ranks % model.pipeline.stages:
        stages = model.pipeline.stages
        raise OptionError(f"--ranks {ranks}: the learned pipeline has {stages} stages; give a multiple of {stages}")
    return [known[rank * len(known) // ranks] for rank in range(ranks)]


def _groups_at(model: Model, ranks: int) -> list[Group]:
    """The process groups with another number of ranks: the outermost grows or shrinks, the others stay."""
    groups = [Group(*group) for group in model.groups]
    if not ranks or ranks == model.world or not groups:
        return groups
    outermost = max(range(len(groups)), key=lambda i: groups[i].size * groups[i].stride)
    inner = max(1, model.world // groups[outermost].size)
    if ranks % inner:
        raise OptionError(f"--ranks {ranks}: the learned job has groups of {inner} ranks; give a multiple of {inner}")
    groups[outermost] = groups[outermost]._replace(size=ranks // inner)
    return groups
