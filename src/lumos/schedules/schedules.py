"""Schedules: in which order a pipeline stage runs its forwards and backwards.

A turn is (phase, micro-batch, chunk); chunk c of stage s holds virtual stage c * pp + s. Orders after Huang et al. 2019
(GPipe), Narayanan et al. 2021 (1F1B and interleaved) and Qi et al. 2023 (zero-bubble, H1). All stages are worked out at
once, as arrays: a search meets hundreds of new schedules.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Turns = NDArray[np.int32]
"""(stages, turns, 3): phase, micro-batch and chunk of every turn."""


class Phase(IntEnum):
    """What a turn computes."""

    FORWARD = 0
    BACKWARD = 1  # all of it, or the gradients of inputs where weights have a turn of their own
    WEIGHTS = 2


class Turn(NamedTuple):
    """One block of one micro-batch on one stage."""

    phase: Phase
    microbatch: int
    chunk: int


def order_of(schedule: str, stage: int, pp: int, vpp: int, microbatches: int) -> list[Turn]:
    """The turns of one stage, in order."""
    rows = turns_of(schedule, pp, vpp, microbatches)[stage].tolist()
    return [Turn(Phase(phase), micro, chunk) for phase, micro, chunk in rows]


def turns_of(schedule: str, pp: int, vpp: int, microbatches: int) -> Turns:
    """The turns of every stage, in order."""
    stages, total = np.arange(pp)[:, None], microbatches * vpp
    if schedule == "gpipe" or (vpp > 1 and schedule != "interleaved"):
        ahead = np.full((pp, 1), total)
    elif vpp > 1:
        ahead = np.minimum((pp - stages - 1) * 2 + (vpp - 1) * pp, total)
        ahead = np.full((pp, 1), total) if microbatches == pp else ahead
    else:
        ahead = np.minimum(pp - stages - 1, microbatches)
    whole_rounds = schedule == "interleaved" and vpp > 1
    turns = _alternating(ahead, *_sequence(pp if whole_rounds else microbatches, vpp, total))
    return _with_weights(turns) if schedule == "zero-bubble" else turns


def _sequence(together: int, vpp: int, total: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Micro-batch and chunk of the i-th forward: `together` micro-batches go through each chunk in turn."""
    round_, within = np.divmod(np.arange(total), together * vpp)
    chunk, micro = np.divmod(within, together)
    return (round_ * together + micro).astype(np.int32), chunk.astype(np.int32)


def _alternating(ahead: NDArray[np.int64], micro: NDArray[np.int32], chunk: NDArray[np.int32]) -> Turns:
    """So many forwards ahead, then a backward after every forward, then the backwards that are left."""
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


def _with_weights(turns: Turns) -> Turns:
    """Weight gradients come `stage` turns late, so that they fill the bubble at the end."""
    pp, count, _ = turns.shape
    total = count // 2
    stages = np.arange(pp)[:, None]
    followed = (turns[..., 0] == Phase.BACKWARD) & (turns[..., 1] >= stages)
    at = np.arange(count)[None, :] + np.cumsum(followed, axis=1) - followed
    out = np.empty((pp, count + total, 3), np.int32)
    out[..., 0], out[..., 2] = Phase.WEIGHTS, 0
    free = np.ones((pp, count + total), bool)
    rows = np.arange(pp)[:, None]
    free[rows, at] = False
    out[..., 1] = np.cumsum(free, axis=1) - 1
    out[rows, at] = turns
    return out
