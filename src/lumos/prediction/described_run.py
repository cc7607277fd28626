"""DescribedRun: a step that was simulated from a description, as reports see any run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lumos.analysis.breakdown import Breakdown, breakdown_by_rank
from lumos.analysis.collectives import CollectiveGroup, messages_of_rank
from lumos.analysis.run import Run
from lumos.graph.critical_path import CriticalPath, PathSummary, critical_path
from lumos.graph.graph import Floats, Graph, Ints, Times
from lumos.graph.rules.nodes import Nodes, cut_nodes
from lumos.step.rows import Detail, StepTrace, Track
from lumos.step.step import Step
from lumos.trace.steps import Steps, find_steps
from lumos.trace.trace import Trace

_PATH_KIND = {Track.HOST: "operator", Track.COMPUTE: "compute"}
_ROUNDING = 1e-9  # of a block


@dataclass(frozen=True)
class DescribedRun(Run):
    """One step, one rank of every pipeline stage.

    `fixed_us` is what a traced run takes once a step beyond its model: idle time at the end. If it is negative, all
    times shrink. `slow_us` is the part of it that slow parts of the cluster add.
    """

    step: Step
    fixed_us: float = 0.0
    slow_us: float = 0.0

    @property
    def us(self) -> float:
        """The whole step, in microseconds."""
        return self.step.us + self.fixed_us

    @cached_property
    def rows(self) -> StepTrace:
        return StepTrace(self.step, self.us)

    @cached_property
    def origin(self) -> int:
        return 0

    @cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        return self.step.graph

    @cached_property
    def times(self) -> Times:
        return Times(self.rows.start, self.rows.end)

    @cached_property
    def trace(self) -> Trace:
        return self.rows.trace()

    @cached_property
    def steps(self) -> Steps:
        return find_steps(self.trace).read(self.trace)

    @cached_property
    def nodes(self) -> Nodes:
        return cut_nodes(self.trace)

    @cached_property
    def task_times(self) -> tuple[Floats, Floats]:
        return self.nodes.start.astype(np.float64), self.nodes.end.astype(np.float64)

    @cached_property
    def node_lane(self) -> Ints:
        return self.rows.node_lane

    @cached_property
    def breakdown_by_rank(self) -> dict[int, Breakdown]:
        """The same as of the whole trace, from one with fewer rows."""
        ranks = tuple(self.rows.ranks)
        end = np.full((1, len(ranks)), round(self.us * 1e3))
        return breakdown_by_rank(self.rows.trace(Detail.INTERVALS), Steps(("step",), ranks, np.zeros_like(end), end))

    @cached_property
    def path(self) -> CriticalPath:
        return critical_path(self.graph, self.step.times, int(np.argmax(self.step.times.end)))

    @cached_property
    def path_summary(self) -> PathSummary:
        scale = self.rows.scale
        latency = float((self.path.lag + self.path.frozen).sum()) * scale
        unexplained = max(0.0, self.fixed_us - self.slow_us) * 1e3
        blocks = self._blocks_on_path()
        return PathSummary.of(self._operators_on_path(), latency, unexplained, blocks=blocks, slow=self.slow_us * 1e3)

    @cached_property
    def _spent(self) -> Floats:
        """How long every node is on the critical path."""
        spent = np.zeros(len(self.graph))
        spent[self.path.node] = self.path.spent * self.rows.scale
        return spent

    def _operators_on_path(self) -> list[tuple[str, str, float]]:
        """(kind, name, nanoseconds) of what decides inside the blocks on the path; where the GPU waits, the host."""
        rows, found, waited = self.rows, dict[tuple[str, int], float](), 0.0
        for role, part, nodes in rows.groups:
            ns = float(self._spent[nodes].sum())
            if ns > 0:
                inside = rows.inside(role, part)
                shares = inside.decisive()
                idle = 1 - float(shares.sum())
                waited += idle * ns if idle > _ROUNDING and inside.size else 0.0
                for track, label, share in zip(inside.track, inside.label, shares, strict=True):
                    key = (_PATH_KIND.get(Track(track), "comm"), int(label))
                    found[key] = found.get(key, 0.0) + share * ns
        labels, names = list(rows.labels.rows), list(rows.labels.names)
        host = [("operator", "host", waited)] if waited else []
        return host + [(kind, names[labels[label][0]], ns) for (kind, label), ns in found.items()]

    def _blocks_on_path(self) -> Iterator[tuple[str, int, float]]:
        structure = self.step.structure
        spent = np.bincount(structure.node_role, self._spent, len(structure.roles))
        found: dict[tuple[str, int], float] = {}
        for role, ns in zip(structure.roles, spent.tolist(), strict=True):
            if ns > 0:
                key = (role.what, self.rows.ranks[role.stage])
                found[key] = found.get(key, 0.0) + ns
        yield from ((what, rank, ns) for (what, rank), ns in found.items())

    @cached_property
    def collectives(self) -> list[CollectiveGroup]:
        """Of the first rank."""
        return messages_of_rank(self.trace, self.rows.ranks[0])
