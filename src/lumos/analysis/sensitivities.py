"""Sensitivities: the gain from making a category of work, a kernel family or a rank twice as fast.

Each gain comes from the simulator, with the profiler's overhead removed, so that `lumos predict --scale` gives the same
number. A gain is at most half of the share that the work has on the critical path (see lumos.graph.critical_path), plus
what kernels gain if concurrent communication ends sooner; it is less if another path is nearly as long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lumos.costs.contention import sides
from lumos.data_files import read_table
from lumos.graph.critical_path import StepPath, step_path
from lumos.graph.graph import Bools, Floats, Graph, Times, simulate
from lumos.graph.overlap import Side, alone, contended
from lumos.graph.rules.build import Execution, StepNodes
from lumos.trace.names import Kind
from lumos.trace.steps import StepMarks

SPEEDUP = 2.0
CATEGORIES = {"compute": Kind.COMPUTE, "communication": Kind.COMM, "memcpy": Kind.COPY, "host": Kind.CPU}
_MOST_OF_A_KIND = 8  # families or ranks, those with the largest share of the path
_LEAST_SHARE = 1e-3  # of the path: the gain is at most half of it


class WhatIfStep(NamedTuple):
    """The mean step, in nanoseconds, and the mean of its critical paths."""

    ns: float
    path: StepPath


@dataclass(frozen=True, repr=False)
class WhatIf:
    """A run whose tasks may take other times."""

    execution: Execution
    marks: StepMarks
    graph: Graph  # without the profiler

    def __repr__(self) -> str:
        return f"WhatIf({self.execution!r})"

    @cached_property
    def _between(self) -> tuple[Side, Side] | None:
        return sides(self.execution, self.graph)

    @cached_property
    def alone(self) -> Floats:
        """Time of each task with nothing running concurrently: the durations that a what-if scales."""
        return self.graph.duration if self._between is None else alone(self.graph, *self._between)

    def simulate(self, duration: Floats) -> tuple[Floats, Times]:
        """Durations slowed by concurrent work, and the times that follow, from those without it."""
        if self._between is None:
            return duration, simulate(self.graph, duration)
        graph, times = contended(self.graph.with_times(duration, self.graph.gap), *self._between)
        return graph.duration, times

    @cached_property
    def _step_nodes(self) -> StepNodes:
        return StepNodes(self.execution, self.marks)

    def step(self, alone: Floats) -> WhatIfStep:
        """The mean step in nanoseconds and its critical path, from durations alone."""
        duration, times = self.simulate(alone)
        windows = self._step_nodes.windows(times)
        slowed = 1 - alone / np.maximum(duration, 1e-9)
        return WhatIfStep(windows.mean, step_path(self.graph, times, windows, np.where(duration > alone, slowed, 0.0)))

    @cached_property
    def base(self) -> WhatIfStep:
        """The step with nothing changed."""
        return self.step(self.alone)


@dataclass(frozen=True)
class Sensitivity:
    """The gain from a faster part of the work.

    `path_pct` is its share of the critical path; what kernels lose to concurrent communication counts for both.
    """

    what: str
    kind: str  # category, family or rank
    gain_ms: float
    gain_pct: float
    path_pct: float
    then: str  # the category with the largest share of the path once this is faster
    speedup: float = SPEEDUP


def sensitivities(what_if: WhatIf, step_ms: float) -> list[Sensitivity]:
    """The largest gain first, of a step of `step_ms`."""
    base, path = what_if.base
    categories = {name: what_if.graph.kind == kind for name, kind in CATEGORIES.items()}
    rows = []
    for kind, what, nodes in _groups(what_if, path, categories):
        ns, after = what_if.step(np.where(nodes, what_if.alone / SPEEDUP, what_if.alone))
        gain = (base - ns) / base if base else 0.0
        then = max(categories, key=lambda name: after.share(categories[name]))
        on_path = path.share(nodes) + (path.contention if what_if.graph.kind[nodes].max() == Kind.COMM else 0.0)
        rows.append(Sensitivity(what, kind, gain * step_ms, 100 * gain, 100 * on_path, then))
    return sorted(rows, key=lambda one: -one.gain_ms)


def _groups(what_if: WhatIf, path: StepPath, categories: dict[str, Bools]) -> Iterator[tuple[str, str, Bools]]:
    """(kind, name, nodes) of what is made faster: all categories, and the families and ranks that can matter."""
    present = {name: nodes for name, nodes in categories.items() if nodes.any()}
    yield from (("category", name, nodes) for name, nodes in present.items())
    for kind, groups in (("family", families(what_if)), ("rank", _ranks(what_if))):
        shares = {name: path.share(nodes) for name, nodes in groups.items()}
        largest = sorted((name for name in shares if shares[name] >= _LEAST_SHARE), key=lambda name: -shares[name])
        for name in largest[:_MOST_OF_A_KIND]:
            if not any(np.array_equal(groups[name], nodes) for nodes in present.values()):
                yield kind, name, groups[name]


def families(what_if: WhatIf) -> dict[str, Bools]:
    """Nodes of matmuls, attention, other kernels, and each collective."""
    trace, nodes, kind = what_if.execution.trace, what_if.execution.nodes, what_if.graph.kind
    patterns = read_table("operator_names.toml")["kernels"]
    name = np.zeros(len(kind), np.int64)
    name[: len(nodes)] = np.where(nodes.row >= 0, trace.name[nodes.row], len(trace.names))
    named = [*trace.names, ""]
    attention, matrix = (
        np.array([re.search(patterns[key], text) is not None for text in named])[name]
        for key in ("attention", "matrix")
    )
    compute = kind == Kind.COMPUTE
    masks = {"matmuls": compute & matrix & ~attention, "attention": compute & attention,
             "other kernels": compute & ~matrix & ~attention}  # fmt: skip
    rows = np.flatnonzero((nodes.kind == Kind.COMM) & (nodes.row >= 0))
    message, at = trace.message[nodes.row[rows]].astype(np.int64), name[rows]
    _, first, group = np.unique(message * len(named) + at, return_index=True, return_inverse=True)
    collectives = np.array([trace.collective_of(int(nodes.row[rows[one]])) for one in first], object)[group.ravel()]
    for collective in sorted(set(collectives.tolist())):
        masks[collective] = np.zeros(len(kind), bool)
        masks[collective][rows[collectives == collective]] = True
    return {what: mask for what, mask in masks.items() if mask.any()}


def _ranks(what_if: WhatIf) -> dict[str, Bools]:
    """Kernels, copies and host of each rank; communication belongs to several."""
    nodes, kind, ranks = what_if.execution.nodes, what_if.graph.kind, what_if.marks.ranks
    rank = np.full(len(kind), -1, np.int64)
    rank[: len(nodes)] = nodes.rank
    own = kind != Kind.COMM
    return {f"rank {one}": own & (rank == one) for one in ranks} if len(ranks) > 1 else {}
