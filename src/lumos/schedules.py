"""Schedules: in which order a pipeline stage runs its forwards and backwards.

A turn is (phase, micro-batch, chunk); chunk c of stage s holds virtual stage c * pp + s. Orders after Huang et al. 2019
(GPipe), Narayanan et al. 2021 (1F1B and interleaved) and Qi et al. 2023 (zero-bubble, H1).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple


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
    if schedule == "interleaved" and vpp > 1:
        return _interleaved(stage, pp, vpp, microbatches)
    if vpp > 1:
        return _gpipe_chunks(vpp, microbatches)
    return _SIMPLE[schedule](stage, pp, microbatches)


def _gpipe(_stage: int, _pp: int, microbatches: int) -> list[Turn]:
    forwards = [Turn(Phase.FORWARD, m, 0) for m in range(microbatches)]
    return forwards + [Turn(Phase.BACKWARD, m, 0) for m in range(microbatches)]


def _gpipe_chunks(vpp: int, microbatches: int) -> list[Turn]:
    forwards = [Turn(Phase.FORWARD, m, c) for c in range(vpp) for m in range(microbatches)]
    return forwards + [Turn(Phase.BACKWARD, m, c) for c in reversed(range(vpp)) for m in range(microbatches)]


def _one_forward_one_backward(stage: int, pp: int, microbatches: int) -> list[Turn]:
    ahead = min(pp - stage - 1, microbatches)
    turns = [Turn(Phase.FORWARD, m, 0) for m in range(ahead)]
    for m in range(ahead, microbatches):
        turns += [Turn(Phase.FORWARD, m, 0), Turn(Phase.BACKWARD, m - ahead, 0)]
    return turns + [Turn(Phase.BACKWARD, m, 0) for m in range(microbatches - ahead, microbatches)]


def _zero_bubble(stage: int, pp: int, microbatches: int) -> list[Turn]:
    """1F1B whose weight gradients come `stage` turns late, so that they fill the bubble at the end."""
    turns: list[Turn] = []
    done = 0
    for turn in _one_forward_one_backward(stage, pp, microbatches):
        turns.append(turn)
        if turn.phase == Phase.BACKWARD and turn.microbatch >= stage:
            turns.append(Turn(Phase.WEIGHTS, done, 0))
            done += 1
    return turns + [Turn(Phase.WEIGHTS, m, 0) for m in range(done, microbatches)]


def _interleaved(stage: int, pp: int, vpp: int, microbatches: int) -> list[Turn]:
    total = microbatches * vpp
    ahead = min((pp - stage - 1) * 2 + (vpp - 1) * pp, total)
    if microbatches == pp:
        ahead = total
    turns = [_virtual(Phase.FORWARD, i, pp, vpp) for i in range(ahead)]
    for i in range(ahead, total):
        turns += [_virtual(Phase.FORWARD, i, pp, vpp), _virtual(Phase.BACKWARD, i - ahead, pp, vpp)]
    return turns + [_virtual(Phase.BACKWARD, i, pp, vpp) for i in range(total - ahead, total)]


def _virtual(phase: Phase, index: int, pp: int, vpp: int) -> Turn:
    """The i-th virtual micro-batch: pp micro-batches through each chunk in turn."""
    round_, within = divmod(index, pp * vpp)
    chunk, micro = divmod(within, pp)
    return Turn(phase, round_ * pp + micro, chunk if phase == Phase.FORWARD else vpp - 1 - chunk)


_SIMPLE: dict[str, Callable[[int, int, int], list[Turn]]] = {
    "gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zero-bubble": _zero_bubble,
    "interleaved": _one_forward_one_backward,
}  # fmt: skip
