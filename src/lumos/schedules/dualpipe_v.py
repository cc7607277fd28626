"""DualPipeV: forward and backward passes of different micro-batches run together, on stages laid out as a V.

DualPipe cut in half (Qi et al. 2025): every stage holds two chunks, as in ZB-V. Once the pipeline is full, the forward
pass of one chunk and the backward pass of the other are one unit, in which each computes while the other exchanges
tokens between experts. A unit begins when the inputs of both have arrived, and its results leave at its end.
The order is that of torch's ScheduleDualPipeV and of DeepSeek's published code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.schedules.schedule import Phase, Schedule, Turns

_F, _B, _W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS


class Pass(NamedTuple):
    """One turn of a stage, before micro-batches are dealt out."""

    phase: Phase
    way: int  # 0: micro-batches that enter on this side, 1: those that come back, or from the other end
    joins: bool = False  # one unit with the turn before it


class DualPipeV(Schedule):
    """Each of the phases of each chunk takes the micro-batches in order; what is listed is which of them is next."""

    name = "dualpipe-v"
    frameworks: ClassVar[tuple[str, ...]] = ("pytorch", "torchtitan")
    splits_backward = True
    pairs = True
    chunks = (2, 2)
    first_holds_most = False

    def problem(self, pp: int, vpp: int, microbatches: int) -> str:
        if microbatches >= 2 * pp:
            return ""
        return f"train.microbatches = {microbatches} is fewer than {2 * pp}, twice parallel.pp, which DualPipe needs"

    def virtual_stages(self, pp: int, vpp: int) -> NDArray[np.int64]:
        down = np.arange(pp)
        return np.stack([down, 2 * pp - 1 - down], axis=1)

    def turns(self, pp: int, vpp: int, microbatches: int) -> Turns:
        rows = [dealt(passes_of(stage, pp, microbatches)) for stage in range(pp)]
        return np.array(rows, np.int32).reshape(pp, 6 * microbatches, 3)

    def joined(self, pp: int, vpp: int, microbatches: int) -> NDArray[np.bool_]:
        return np.array([[one.joins for one in passes_of(stage, pp, microbatches)] for stage in range(pp)])

    def in_flight(self, stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
        """As counted; once the pipeline is full, more micro-batches do not add to it."""
        return held_most(stage, pp, min(microbatches, 3 * pp))


@lru_cache(maxsize=64)
def passes_of(place: int, places: int, count: int) -> tuple[Pass, ...]:
    """The turns of the stage at a place of a V, for `count` micro-batches that enter it."""
    return tuple(_pattern(place, places, count))


@lru_cache(maxsize=4096)
def held_most(place: int, places: int, count: int) -> tuple[int, int]:
    """Micro-batches of either way that the stage at a place holds, when it holds most."""
    held, most = [0, 0], (0, 0)
    for phase, way, _ in _pattern(place, places, count):
        held[way] += (phase == _F) - (phase == _W)
        most = (held[0], held[1]) if sum(held) > sum(most) else most
    return most


def _pattern(place: int, places: int, count: int) -> Iterator[Pass]:
    after = places - place - 1
    yield from [Pass(_F, 0)] * (2 * after)
    yield from [Pass(_F, 0), Pass(_F, 1)] * (place + 1)
    yield from [Pass(_B, 1), Pass(_W, 1), Pass(_F, 1)] * after
    for index in range(count - 2 * places + place + 1):
        apart = index == 0 and after == 0  # at the turning point the first two run one after the other
        yield from [Pass(_F, 0), *_whole(1)] if apart else _together(0)
        yield from _together(1)
    for _ in range(after):
        yield from [*_whole(1), *_together(1)]
    late: list[int] = []  # the ways of backward passes whose weight gradients are still to come
    for index in range(2 * (place + 1)):
        way = 1 - index % 2
        if index <= place:
            yield from _whole(way)
        else:
            late.append(way)
            yield Pass(_B, way)
    for _ in range(after):
        late.append(0)
        yield from [Pass(_W, late.pop(0)), Pass(_B, 0)]
    yield from (Pass(_W, way) for way in late)


def _whole(way: int) -> list[Pass]:
    """A backward pass with its weight gradients."""
    return [Pass(_B, way), Pass(_W, way, joins=True)]


def _together(way: int) -> list[Pass]:
    """A forward pass and, beside it, a backward pass of the other way."""
    return [Pass(_F, way), Pass(_B, 1 - way, joins=True), Pass(_W, 1 - way, joins=True)]


def dealt(passes: tuple[Pass, ...]) -> list[tuple[int, int, int]]:
    """Phase, micro-batch and way of every turn."""
    next_of: dict[tuple[Phase, int], int] = {}
    turns = []
    for phase, way, _ in passes:
        micro = next_of.get((phase, way), 0)
        next_of[phase, way] = micro + 1
        turns.append((int(phase), micro, way))
    return turns


SCHEDULE = DualPipeV()
