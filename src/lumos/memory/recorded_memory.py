"""Memory of a dry run, from its storages, which are exact for the one program that ran.

They also determine what PyTorch's caching allocator reserves (c10/cuda/CUDACachingAllocator.cpp). Sizes are rounded to
512 bytes. Those up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones get
segments of their own, rounded to 2 MiB. A request takes the smallest free block that fits; what is left of it stays
free, if that is worth it; free neighbours join again. Segments are kept until memory runs out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lumos.memory.memory import Memory, reserve_of
from lumos.memory.stage_walk import GIB, StageMemory, workspaces_of
from lumos.setup.setup import Setup

_MIB = 1 << 20
_BLOCK = 512
_SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _ROUND = _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB, 2 * _MIB


def recorded_memory(
    setup: Setup, phase: str, held: Mapping[str, float], sizes: Iterable[tuple[int, int]], modules: Mapping[str, float]
) -> Memory:
    """The memory of one rank, by what it `held` at its peak; `sizes` are of storages as they change, over two steps."""
    workspaces = workspaces_of(setup.cluster.gpu)
    weights, gradients, optimizer, activations = (
        held.get(role, 0.0) for role in ("weights", "gradients", "optimizer", "activations")
    )
    stage = StageMemory(phase, weights, gradients, optimizer, activations, 0.0, workspaces)
    usable = setup.cluster.accelerator.memory_gib * GIB
    reserved = max(CachingAllocator().run(sizes).reserved + workspaces, stage.peak)
    return Memory(0, stage, reserve_of(setup, stage.peak), usable, (stage,), reserved, modules)


@dataclass(eq=False)
class _Block:
    """A part of a segment, and its neighbours there."""

    size: int
    is_small: bool
    place: int
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.place


class CachingAllocator:
    """Follows allocations and releases; `reserved` is what `torch.cuda.max_memory_reserved()` would show."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by size
        self._at: dict[int, _Block] = {}  # blocks by place; places only grow
        self._used: dict[int, _Block] = {}
        self._next = 0

    def run(self, events: Iterable[tuple[int, int]]) -> CachingAllocator:
        """Follow (storage, bytes) in order; negative bytes release."""
        for storage, size in events:
            if storage in self._used:  # released, or resized
                self._release(self._used.pop(storage))
            if size > 0:
                self._used[storage] = self._allocate(size)
        return self

    def _allocate(self, size: int) -> _Block:
        size = max(-(-size // _BLOCK) * _BLOCK, _BLOCK)
        is_small = size <= _SMALL
        free = self._free[is_small]
        index = bisect_left(free, (size, -1))
        block = self._at[free.pop(index)[1]] if index < len(free) else self._segment(size, is_small)
        left = block.size - size
        if left >= _BLOCK if is_small else left > _SMALL:
            self._split(block, size)
        block.is_free = False
        return block

    def _segment(self, size: int, is_small: bool) -> _Block:
        whole = _SMALL_SEGMENT if is_small else _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _ROUND) * _ROUND
        self.reserved += whole
        return self._new(whole, is_small)

    def _new(self, size: int, is_small: bool) -> _Block:
        self._next += 1
        block = self._at[self._next] = _Block(size, is_small, self._next)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = self._new(block.size - size, block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        insort(self._free[rest.is_small], rest.key)

    def _release(self, block: _Block) -> None:
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                free = self._free[block.is_small]
                del free[bisect_left(free, other.key)]
        if block.before is not None and block.before.is_free:
            block = self._joined(block.before, block)
        if block.after is not None and block.after.is_free:
            block = self._joined(block, block.after)
        insort(self._free[block.is_small], block.key)

    def _joined(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._at[second.place]
        return first
