"""Drawing a step from a model: which tasks there are, in which order, and how long each takes on every rank.

The order and the sizes of communication are drawn once for all ranks of a role, so that collectives match; times are
drawn for every rank. Values of a state are stratified: n draws take one value from each n-th of the distribution, so
that the work of a step is that of the recorded ones, and not by chance more or less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from statistics import NormalDist
from types import MappingProxyType

import numpy as np

from lumos.graph.graph import Floats, Ints
from lumos.schedules import Phase, schedule_named
from lumos.synthesis.model import COLUMNS, LEVELS, BlockModel, Marginal, Model, RoleModel, StateModel
from lumos.synthesis.observe import Wait

MESSAGE = -2  # in place of a group
_MOST_FACTOR = 3.0
_LEAST_COLLECTIVES = 0.5  # of a kind in a step; rarer ones come in some steps only
_AS_DRAWN: Mapping[str, float] = MappingProxyType({})
_BEFORE, _AFTER = -1.0, 2.0  # places in a block
TIMES = ("work", "call", "delay", "busy")


@dataclass(frozen=True)
class Part:
    """All tasks of one state in the blocks of one kind of a step."""

    state: StateModel
    tasks: Ints  # their places in the step
    scores: Floats  # normal scores of their places in their blocks
    factors: Mapping[str, float]  # by which columns are longer

    @cached_property
    def _root(self) -> Floats:
        low, vectors = np.linalg.eigh(np.array(self.state.correlation))
        positive = (vectors * np.maximum(low, 1e-3)) @ vectors.T  # rounding, or a hand, may have made it indefinite
        scale = np.sqrt(np.diag(positive))
        return np.linalg.cholesky(positive / scale[:, None] / scale)

    def values(self, generator: np.random.Generator) -> dict[str, Floats]:
        """Columns of the joint distribution, given the places."""
        normal = generator.standard_normal((len(self.tasks), len(COLUMNS)))
        normal[:, 0] = self.scores
        related = normal @ self._root.T
        return {
            name: self.state.columns[name].at(stratified(related[:, i], generator)) * self.factors.get(name, 1.0)
            for i, name in enumerate(COLUMNS)
            if name != "place"
        }


@dataclass(frozen=True)
class DrawnStep:
    """One step of a role: its tasks in order, as a state each and the part that knows their times."""

    states: list[StateModel]
    parts: list[Part]
    turns: Ints  # the pass of every task
    phases: list[str]  # of every pass

    def rearranged(self, order: Ints) -> DrawnStep:
        """The step with these of its tasks, in this order; passes stay where they are."""
        place = np.full(len(self.states), -1, np.int64)
        place[order] = np.arange(len(order))
        parts = []
        for part in self.parts:
            kept = place[part.tasks] >= 0
            parts.append(replace(part, tasks=place[part.tasks[kept]], scores=part.scores[kept]))
        return DrawnStep([self.states[i] for i in order], parts, np.sort(self.turns[order]), self.phases)

    def times(self, generator: np.random.Generator) -> dict[str, Floats]:
        """Microseconds of every task of a rank, and bytes."""
        columns = {name: np.zeros(len(self.states)) for name in (*TIMES, "bytes")}
        for part in self.parts:
            for name, values in part.values(generator).items():
                columns[name][part.tasks] = values
        return columns


def draw_step(model: Model, number: int, layers: int, micro_batches: int, generator: np.random.Generator) -> DrawnStep:
    """The tasks of a step of one role with so many layers and micro-batches."""
    role, plan = model.roles[number], _Plan(model, number, layers, micro_batches)
    states: list[StateModel] = []
    block_of, place_of = [np.zeros(0, np.int64)], [np.zeros(0)]
    parts: list[Part] = []

    def add(
        state: StateModel, blocks: Ints, levels: Floats, places: Floats, factors: Mapping[str, float] = _AS_DRAWN
    ) -> None:
        parts.append(Part(state, len(states) + np.arange(len(blocks)), _scores(levels), factors))
        block_of.append(blocks)
        place_of.append(places)
        states.extend([state] * len(blocks))

    for block, numbers in plan.by_kind(role):
        counts = _counts(block, len(numbers), layers - model.layers, generator)
        factors = _kept_totals(block, counts, layers - model.layers)
        for index, state in enumerate(block.states):
            blocks = np.repeat(np.array(numbers), counts[:, index])
            if len(blocks):
                levels = _spread_in_blocks(counts[:, index], generator)
                add(state, blocks, levels, _places(state, levels), _AS_DRAWN if state.group >= 0 else factors)
    for state, numbers, place in plan.messages(model):
        add(state, np.array(numbers), np.full(len(numbers), 0.5), np.full(len(numbers), place))
    blocks = np.concatenate(block_of)
    order = _tail_last(np.lexsort((np.concatenate(place_of), blocks)), states)
    turns = np.array(plan.turn_of_block, np.int64)[blocks]
    return DrawnStep(states, parts, turns, plan.phases).rearranged(order)


def matched(steps: list[DrawnStep]) -> list[DrawnStep]:
    """Steps of several roles with the same collectives in the same order, so that their ranks can meet.

    What one role has more of than another is left out; positions stay, and the order is that of the first role.
    """
    groups = {(state.kind, state.group) for step in steps for state in step.states if state.group >= 0}
    most = {key: min(sum((s.kind, s.group) == key for s in step.states) for step in steps) for key in groups}
    wanted: dict[int, list[str]] = {}
    answer = []
    for step in steps:
        left, chosen = dict(most), []
        for i, state in enumerate(step.states):
            key = (state.kind, state.group)
            if state.group < 0 or left[key] > 0:
                chosen.append(i)
                left[key] = left.get(key, 0) - 1
        order = np.array(chosen, np.int64)
        for group in {group for _, group in groups}:
            slots = [at for at, i in enumerate(chosen) if step.states[i].group == group]
            kinds = wanted.setdefault(group, [step.states[chosen[at]].kind for at in slots])
            queues: dict[str, list[int]] = {}
            for at in slots:
                queues.setdefault(step.states[chosen[at]].kind, []).append(chosen[at])
            order[slots] = [queues[kind].pop(0) for kind in kinds]
        answer.append(step.rearranged(order))
    return answer


def expected_tasks(model: Model, number: int, layers: int, micro_batches: int) -> tuple[float, int]:
    """About how many tasks a step of a rank of this role has, and in how many states."""
    role, plan = model.roles[number], _Plan(model, number, layers, micro_batches)
    tasks, states = 0.0, 0
    for block, numbers in plan.by_kind(role):
        counts = _mean_counts(block, layers - model.layers)
        tasks += float(counts.sum()) * len(numbers)
        states += int((counts > 0).sum())
    return tasks, states


def _tail_last(order: Ints, states: list[StateModel]) -> Ints:
    """What the host does after its last launch comes last, whatever its place was."""
    tail = np.array([states[i].kind == "tail" for i in order])
    return np.concatenate([order[~tail], order[tail]])


def message_state(model: Model, kind: str, phase: str) -> StateModel:
    """Messages of one direction, on a stream of their own, so that none holds up another.

    A stage posts them between passes, as frameworks do, so they begin once its work until then is done.
    """
    assert model.pipeline is not None
    stream = model.streams + 2 * (phase == "backward") + (kind == "send")
    columns = model.pipeline.columns
    busy = _as_one_of_two(columns["busy"])
    eye = [[float(i == j) for j in range(len(COLUMNS))] for i in range(len(COLUMNS))]
    return StateModel(
        kind=kind, stream=stream, group=MESSAGE, waits=[Wait(0, 0)], pause=False, count=1.0, per_layer=0.0, depth=0.5,
        depth_spread=0.0, operators=1.0, columns=columns | {"busy": busy}, correlation=eye,
    )  # fmt: skip


def _as_one_of_two(found: Marginal) -> Marginal:
    """The distribution of a time such that the longer one of two has the one given.

    A recorded kernel carries what a stage sends and receives at once; here these are two.
    """
    if not found.quantiles:
        return found
    fine = (np.arange(1000) + 0.5) / 1000
    logs = np.log(np.maximum(found.quantiles, 1e-9))
    both, one = (np.exp(np.interp(levels, LEVELS, logs)) for levels in (fine, fine**2))
    quantiles = np.exp(np.interp(np.array(LEVELS) ** 2, LEVELS, logs))
    return Marginal(found.zero, float(found.mean * one.mean() / both.mean()), quantiles.tolist())


class _Plan:
    """The blocks of a step, counted through it: of which kind each is, and in which pass."""

    def __init__(self, model: Model, number: int, layers: int, micro_batches: int) -> None:
        role = model.roles[number]
        self.stage = number
        kinds = {(block.phase, block.last, block.place): i for i, block in enumerate(role.blocks)}
        if model.pipeline is None:
            times = max(1, round(role.micro_batches * micro_batches / model.micro_batches))
            rounds = [(phase, turn == times - 1) for turn in range(times) for phase in role.repeated]
        else:
            turns = schedule_named(model.pipeline.schedule).turns(model.pipeline.stages, 1, micro_batches)
            rounds = [(Phase(int(phase)).name.lower(), True) for phase in turns[number, :, 0]]
        passes = [*rounds, *((phase, True) for phase in role.final)]
        self.phases = [phase for phase, _ in passes]
        self.kind_of_block: list[int] = []
        self.turn_of_block: list[int] = []
        for turn, (phase, last) in enumerate(passes):
            attentions = role.layers.get(phase, 0)
            if attentions > 0:
                attentions = max(1, attentions + layers - model.layers)
            places = ["first", *["middle"] * (attentions - 1), "last"] if attentions > 0 else ["first"]
            found = [kinds.get((phase, last, place), kinds.get((phase, not last, place))) for place in places]
            self.kind_of_block += [kind for kind in found if kind is not None]
            self.turn_of_block += [turn for kind in found if kind is not None]

    def messages(self, model: Model) -> list[tuple[StateModel, list[int], float]]:
        """Messages of a stage of a pipeline: the state, the blocks they are in, and where in these."""
        if model.pipeline is None:
            return []
        last, found = model.pipeline.stages - 1, []
        blocks_of: dict[int, list[int]] = defaultdict(list)
        for block, turn in enumerate(self.turn_of_block):
            blocks_of[turn].append(block)
        for phase, away_from in (("forward", 0), ("backward", last)):
            blocks = [blocks_of[turn] for turn, name in enumerate(self.phases) if name == phase]
            if self.stage != away_from:
                found.append((message_state(model, "recv", phase), [numbers[0] for numbers in blocks], _BEFORE))
            if self.stage != last - away_from:
                found.append((message_state(model, "send", phase), [numbers[-1] for numbers in blocks], _AFTER))
        return found

    def by_kind(self, role: RoleModel) -> list[tuple[BlockModel, list[int]]]:
        """For every kind of block: the numbers of its blocks."""
        numbers: dict[int, list[int]] = {}
        for number, kind in enumerate(self.kind_of_block):
            numbers.setdefault(kind, []).append(number)
        return [(role.blocks[kind], some) for kind, some in numbers.items()]


def _counts(block: BlockModel, blocks: int, more_layers: int, generator: np.random.Generator) -> Ints:
    """How many tasks of every state each block has, such that states that alternate still do.

    Rounding runs along the sum over states, which are sorted by kind, from a random offset, so that rare tasks are as
    frequent as they were; how many collectives there are is rounded to the nearest number instead. The tasks of a kind
    are then dealt to the blocks, those first that came first: a kind of which every block has exactly one, in one state
    or another, gets exactly one in every block, and one that the last layer does not have leaves out the last block.
    """
    means = blocks * _mean_counts(block, more_layers)
    counts = np.zeros((blocks, len(means)), np.int64)
    offset = generator.random()
    for _, numbers in groupby(range(len(means)), lambda i: block.states[i].kind):
        some = list(numbers)
        until = np.concatenate([[0.0], np.cumsum(means[some])])
        nearest = block.states[some[0]].group >= 0 and until[-1] > _LEAST_COLLECTIVES
        totals = np.diff(np.floor(until + (0.5 if nearest else offset) + 1e-6)).astype(np.int64)
        offset = (offset + until[-1]) % 1.0
        owner = np.repeat(some, totals)
        depths = _depths([block.states[i] for i in owner], _spread_in_blocks(totals, generator, together=True))
        owner, depths = owner[np.argsort(depths)], np.sort(depths)
        if len(owner) >= blocks:  # as many in each
            depths = (np.arange(len(owner)) + generator.random()) / len(owner)
        np.add.at(counts, (np.clip(blocks * depths, 0, blocks - 1).astype(np.int64), owner), 1)
    return counts


def _depths(states: list[StateModel], levels: Floats) -> Floats:
    """Where tasks are among the blocks, from 0 to 1: evenly in a window of the learned mean and spread."""
    window = np.array([(state.depth, state.depth_spread) for state in states], np.float64).reshape(-1, 2)
    return window[:, 0] + (levels - 0.5) * float(np.sqrt(12.0)) * window[:, 1]


def _mean_counts(block: BlockModel, more_layers: int) -> Floats:
    return np.array([max(0.0, state.count + more_layers * state.per_layer) for state in block.states])


def _kept_totals(block: BlockModel, counts: Ints, more_layers: int) -> dict[str, float]:
    """Factors by which blocks have as much work as learned, although rare tasks are there or not.

    Communication is left as it is: its times belong to its sizes.
    """
    own = np.array([state.group < 0 for state in block.states], bool)
    wanted, drawn = len(counts) * _mean_counts(block, more_layers) * own, counts.sum(axis=0) * own
    factors = {}
    for name in TIMES:
        means = np.array([state.columns[name].mean for state in block.states])
        there = float(drawn @ means)
        factors[name] = min(max(float(wanted @ means) / there, 1 / _MOST_FACTOR), _MOST_FACTOR) if there > 0 else 1.0
    return factors


def _spread_in_blocks(counts: Ints, generator: np.random.Generator, together: bool = False) -> Floats:
    """Levels of places: the k tasks of a block take one value from each k-th of the distribution.

    `together`: these values are equally far apart.
    """
    within = np.concatenate([np.arange(count) for count in counts]) if counts.sum() else np.zeros(0)
    total = np.repeat(counts, counts)
    random = np.repeat(generator.random(len(counts)), counts) if together else generator.random(len(within))
    return (within + random) / np.maximum(total, 1)


def _places(state: StateModel, levels: Floats) -> Floats:
    quantiles = state.columns["place"].quantiles
    return np.interp(levels, LEVELS, quantiles) if quantiles else np.zeros(len(levels))


def _scores(levels: Floats) -> Floats:
    return normal_scores(np.clip(levels, 1e-6, 1 - 1e-6))


def normal_scores(levels: Floats) -> Floats:
    """Quantiles of the standard normal distribution; without scipy, which those who only draw need not have."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse(level) for level in levels.tolist()], np.float64)


def stratified(scores: Floats, generator: np.random.Generator) -> Floats:
    """Levels in the order of scores, one in each n-th of 0 … 1."""
    order = np.argsort(scores, kind="stable")
    levels = np.empty(len(scores))
    levels[order] = (np.arange(len(scores)) + generator.random(len(scores))) / len(scores)
    return levels
