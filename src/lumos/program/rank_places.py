"""RankPlaces: which rank is where, and which ranks are together in a group."""

from __future__ import annotations

from typing import NamedTuple

from lumos.setup.sections import Parallel


class RankPlaces(NamedTuple):
    """Ranks by pipeline stage. A rank has a number among those of its stage, by which groups are laid out in it."""

    stages: int
    of_stage: int  # ranks of one stage
    near: int  # neighbouring ranks of one stage, before those of another stage follow
    copies: int = 1  # stages that hold the same weights: 2 where one from the end mirrors one from the beginning

    @staticmethod
    def of_setup(parallel: Parallel, copies: int = 1) -> RankPlaces:
        near, replica = parallel.tp * parallel.cp, parallel.tp * parallel.cp * parallel.dp
        return RankPlaces(parallel.pp, replica, replica if parallel.order == "tp-cp-dp-pp" else near, copies)

    @property
    def world(self) -> int:
        return self.stages * self.of_stage

    def of(self, rank: int) -> tuple[int, int]:
        """The number of a rank among those of its stage, and the stage."""
        replica, stage = divmod(rank // self.near, self.stages)
        return replica * self.near + rank % self.near, stage

    def rank(self, number: int, stage: int) -> int:
        """The rank with a number in a stage."""
        return (number // self.near * self.stages + stage) * self.near + number % self.near

    def members(self, rank: int, size: int, stride: int) -> tuple[int, ...]:
        """The ranks of a group that a rank is in: `size` of its stage, `stride` apart, and those of a copy of it."""
        number, stage = self.of(rank)
        here = min(size, max(1, self.of_stage // stride))
        first = number - number // stride % here * stride
        stages = (stage,) if here == size else sorted({stage, self.stages - 1 - stage})
        return tuple(sorted(self.rank(first + stride * i, one) for one in stages for i in range(here)))

    def group_number(self, rank: int, size: int, stride: int) -> int:
        """The number of that group among all of its kind, from 0; every stage has room for as many."""
        number, stage = self.of(rank)
        here = min(size, max(1, self.of_stage // stride))
        if here < size:
            stage = min(stage, self.stages - 1 - stage)
        return stage * self.groups(size, stride) + number // (stride * here) * stride + number % stride

    def groups(self, size: int, stride: int) -> int:
        """How many groups of a kind a stage has."""
        return self.of_stage // min(size, max(1, self.of_stage // stride))
