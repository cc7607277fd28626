"""Schedule: in which order the stages of a pipeline run their forward and backward passes.

A schedule is one object in one file of this package. It says in which order each stage takes its turns, where the
virtual stages of the model lie, how many micro-batches a stage holds at its worst moment, whether the backward pass is
split into input gradients and weight gradients, and which passes run together. How long each takes follows from the
operators of the blocks.

All stages are worked out at once, as arrays: a search meets hundreds of new schedules.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

Turns = NDArray[np.int32]
"""(stages, turns, 3): phase, micro-batch and chunk of every turn, in the order of each stage."""


class Phase(IntEnum):
    """What a turn computes."""

    FORWARD = 0
    BACKWARD = 1  # all of it, or the input gradients alone where weight gradients have turns of their own
    WEIGHTS = 2


class Turn(NamedTuple):
    """One block of one micro-batch on one stage."""

    phase: Phase
    microbatch: int
    chunk: int


class Schedule:
    """What every schedule has; subclasses say the rest."""

    name: ClassVar[str]
    frameworks: ClassVar[tuple[str, ...]] = ()  # that have it; a search tries it for these
    splits_backward: ClassVar[bool] = False  # weight gradients have turns of their own
    chunks: ClassVar[tuple[int, int]] = (1, 1)  # fewest and most virtual stages of one stage
    first_holds_most: ClassVar[bool] = True  # no stage holds more micro-batches than the one before it
    pairs: ClassVar[bool] = False  # forward passes run together with backward passes of other micro-batches
    copies: ClassVar[int] = 1  # of every parameter in one pipeline, each of which sees its share of the micro-batches

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        """The turns of every stage, in order."""
        raise NotImplementedError

    def joined(self, pp: int, vpp: int, microbatches: int) -> NDArray[np.bool_]:
        """(stages, turns): which turns are one unit with the turn before them; asked of schedules with `pairs` alone.

        A unit begins when the inputs of all its turns have arrived, and its results leave when all of it is done.
        """
        raise NotImplementedError

    def problem(self, pp: int, vpp: int, microbatches: int) -> str:
        """Why a pipeline of this shape cannot run this schedule, with the way out; empty if it can."""
        return ""

    def virtual_stages(self, pp: int, vpp: int) -> NDArray[np.int64]:
        """(stages, chunks): which virtual stage of the model each chunk is; around the stages again and again.

        Where there are copies, a virtual stage lies in several places.
        """
        return np.arange(pp)[:, None] + pp * np.arange(vpp)[None, :]

    def placement(self, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
        """The same as plain numbers, [stage][chunk]."""
        return _placement(self, pp, vpp)

    def crossings(self, pp: int, vpp: int) -> tuple[tuple[int, int], ...]:
        """From which stage to which a micro-batch goes on its way forward, one crossing after the other."""
        return _crossings(self, pp, vpp)

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        """Micro-batches that a stage holds of each chunk, at the moment it holds most.

        A micro-batch is held from its forward pass until the turn that needs its activations last. This counts them in
        the turns; subclasses may give the same number in closed form, because a search asks thousands of times.
        """
        return _in_flight(self, pp, vpp, microbatches)[stage]

    @property
    def last_phase(self) -> Phase:
        """The phase after which a micro-batch's gradients are complete and its activations free."""
        return Phase.WEIGHTS if self.splits_backward else Phase.BACKWARD

    def order(self, stage: int, pp: int, vpp: int, microbatches: int) -> list[Turn]:
        """The turns of one stage."""
        rows = self.turns(pp, vpp, microbatches)[stage].tolist()
        return [Turn(Phase(phase), micro, chunk) for phase, micro, chunk in rows]


@lru_cache(maxsize=4096)
def _placement(schedule: Schedule, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in schedule.virtual_stages(pp, vpp).tolist())


@lru_cache(maxsize=4096)
def _in_flight(schedule: Schedule, pp: int, vpp: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """[stage][chunk], counted in the turns of all stages at once."""
    chunks = schedule.virtual_stages(pp, vpp).shape[1]
    return tuple(_most_held(schedule, turns, chunks) for turns in schedule.turns(pp, vpp, microbatches))


def _most_held(schedule: Schedule, turns: Turns, chunks: int) -> tuple[int, ...]:
    phase, _, chunk = turns.T
    change = (phase == Phase.FORWARD).astype(np.int64) - (phase == schedule.last_phase)
    held = np.cumsum(change[:, None] * (chunk[:, None] == np.arange(chunks)[None, :]), axis=0)
    return tuple(int(count) for count in held[int(np.argmax(held.sum(axis=1)))])


@lru_cache(maxsize=4096)
def _crossings(schedule: Schedule, pp: int, vpp: int) -> tuple[tuple[int, int], ...]:
    stage_of = np.empty(pp * vpp, np.int64)
    stage_of[schedule.virtual_stages(pp, vpp)[:, :vpp]] = np.arange(pp)[:, None]  # of the first copy
    return tuple((one, other) for one, other in pairwise(stage_of.tolist()) if one != other)


def alternating(ahead: NDArray[np.int64], micro: NDArray[np.int32], chunk: NDArray[np.int32]) -> Turns:
    """`ahead` forward passes first, then a backward pass after every forward pass, then the remaining backward passes.

    `ahead` has a row for each stage; `micro` and `chunk` are those of the i-th forward pass. Backward passes take the
    micro-batches in the same order and the chunks in the opposite one.
    """
    pp, total = len(ahead), len(micro)
    index = np.arange(total)[None, :]
    forward_at = np.where(index < ahead, index, 2 * index - ahead)
    backward_at = np.where(index < total - ahead, ahead + 2 * index + 1, total + index)
    turns = np.empty((pp, 2 * total, 3), np.int32)
    rows = np.arange(pp)[:, None]
    last = chunk.max(initial=0)
    for at, phase, chunks in ((forward_at, Phase.FORWARD, chunk), (backward_at, Phase.BACKWARD, last - chunk)):
        turns[rows, at] = np.stack([np.full(total, phase, np.int32), micro, chunks.astype(np.int32)], axis=1)[None]
    return turns


def in_order(microbatches: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Micro-batch and chunk of the i-th forward pass, where a stage has one chunk."""
    return np.arange(microbatches, dtype=np.int32), np.zeros(microbatches, np.int32)
