"""Graph: what waits for what. Structure and durations are separate, so one structure serves every what-if.

Nodes of a lane are adjacent and run in their order; `gap` is the time between a node and the one before it (or time
zero, for the first of a lane). Edges connect nodes of different lanes. Part of a gap or lag may be `frozen`: recorded
time that no rule explains.

    lane 0 (thread)   [ op ][launch]───────[op ][ sync enter ]··········[ sync exit ]
                               │ launch                         ▲ sync
    lane 1 (stream)            └──────►[ kernel ][ kernel ]─────┘
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.errors import CycleError
from lumos.graph.loops import loops_for

Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Rule(IntEnum):
    """Why an edge is there."""

    THREAD = 0  # one thread hands over to another
    LAUNCH = 1
    SYNC = 2  # the CPU waits for the GPU
    EVENT = 3  # a stream waits for another stream
    QUEUE = 4  # the launch queue is full
    COLLECTIVE = 5  # all ranks must have arrived
    GRAPH = 6  # inside one CUDA graph
    CHANNEL = 7  # streams that share a hardware queue
    ORDER = 8  # the order of a lane; never an explicit edge
    SHARED_GPU = 9  # kernels of ranks on the same GPU take turns


@dataclass(frozen=True)
class Edges:
    """Dependencies between nodes of different lanes: `target` starts no sooner than `source` ends, plus `lag`.

    With `from_start` it is no sooner than `source` starts.
    """

    source: Small
    target: Small
    rule: NDArray[np.uint8]
    lag: Floats
    frozen: Floats
    from_start: Bools

    def __len__(self) -> int:
        return len(self.source)

    @staticmethod
    def of(source: Any, target: Any, rule: Rule, from_start: bool = False) -> Edges:
        """Edges of one rule, without lag."""
        source, target = np.asarray(source, np.int32), np.asarray(target, np.int32)
        size, none = len(source), np.zeros(len(source))
        return Edges(source, target, np.full(size, rule, np.uint8), none, none, np.full(size, from_start))

    @staticmethod
    def of_pairs(pairs: list[tuple[int, int]], rule: Rule) -> Edges:
        """Edges of one rule from (source, target)."""
        source, target = np.array(pairs, np.int32).reshape(-1, 2).T
        return Edges.of(source, target, rule)

    @staticmethod
    def join(parts: list[Edges]) -> Edges:
        """All edges of several rules."""
        if not parts:
            return Edges.of([], [], Rule.ORDER)
        return Edges(*(np.concatenate([getattr(p, c) for p in parts]) for c in _EDGE_COLUMNS))

    def select(self, which: Any) -> Edges:
        """Some of the edges, by mask or by order."""
        return Edges(*(getattr(self, c)[which] for c in _EDGE_COLUMNS))


_EDGE_COLUMNS = ("source", "target", "rule", "lag", "frozen", "from_start")


@dataclass(frozen=True, repr=False)
class Graph:
    """Tasks, their order on lanes, and the edges between lanes. All times are nanoseconds."""

    first: Ints  # nodes of lane i are first[i] … first[i + 1] - 1
    duration: Floats
    gap: Floats
    frozen: Floats  # the unexplained part of `gap`
    kind: NDArray[np.uint8]
    edges: Edges  # sorted by target

    def __repr__(self) -> str:
        return f"Graph({len(self):,} nodes, {len(self.edges.target):,} edges)"

    def __len__(self) -> int:
        return len(self.duration)

    @cached_property
    def incoming(self) -> Small:
        """Edges into node i are incoming[i] … incoming[i + 1] - 1."""
        offsets = np.zeros(len(self) + 1, np.int32)
        np.cumsum(np.bincount(self.edges.target, minlength=len(self)), out=offsets[1:])
        return offsets

    @cached_property
    def is_first(self) -> Bools:
        """Nodes that begin a lane."""
        flags = np.zeros(len(self) + 1, bool)
        flags[self.first[:-1][np.diff(self.first) > 0]] = True
        return flags[:-1]

    @cached_property
    def lane(self) -> Small:
        """The lane of every node."""
        return np.repeat(np.arange(len(self.first) - 1, dtype=np.int32), np.diff(self.first))

    @cached_property
    def order(self) -> Small:
        """A topological order; if there is none, an error that names the tasks of a cycle."""
        order: Small
        order, done = loops_for(len(self)).topological_order(self.first, self.incoming, self.edges.source)
        if done < len(self):
            raise CycleError(f"the dependencies form a cycle: {_describe_cycle(self, order[:done])}")
        return order

    def with_times(self, duration: Floats, gap: Floats) -> Graph:
        """The same structure with other durations and gaps; cached properties of the structure are kept."""
        return replace(self, duration=duration, gap=gap)._keeping(self)

    def with_lags(self, lag: Floats) -> Graph:
        """The same structure with other lags."""
        return replace(self, edges=replace(self.edges, lag=lag))._keeping(self)

    def _keeping(self, other: Graph) -> Graph:
        """With the cached properties of `other`, whose structure is the same."""
        kept = ("incoming", "is_first", "lane", "order")
        self.__dict__.update({name: other.__dict__[name] for name in kept if name in other.__dict__})
        return self


def make_graph(first: Any, duration: Any, edges: Edges, gap: Any = None, frozen: Any = None, kind: Any = None) -> Graph:
    """A Graph from its parts, edges in any order."""
    size = len(duration)
    none = np.zeros(size)
    return Graph(
        first=np.asarray(first, np.int64),
        duration=np.asarray(duration, np.float64),
        gap=none if gap is None else np.asarray(gap, np.float64),
        frozen=none if frozen is None else np.asarray(frozen, np.float64),
        kind=np.zeros(size, np.uint8) if kind is None else np.asarray(kind, np.uint8),
        edges=edges.select(np.argsort(edges.target, kind="stable")),
    )


def _describe_cycle(graph: Graph, done: Small) -> str:
    """The nodes of one cycle, as "lane L task T", at most eight of them."""
    stuck = np.ones(len(graph), bool)
    stuck[done] = False
    node = int(np.flatnonzero(stuck)[0])
    seen: dict[int, int] = {}
    while node not in seen:
        seen[node] = len(seen)
        sources = graph.edges.source[graph.incoming[node] : graph.incoming[node + 1]]
        waiting_for = [int(s) for s in sources if stuck[s]]
        node = waiting_for[0] if waiting_for else node - 1
    cycle = [n for n, position in seen.items() if position >= seen[node]]
    text = " ← ".join(f"task {n} of lane {graph.lane[n]}" for n in cycle[:8])
    return text + (f" ← … ({len(cycle)} tasks)" if len(cycle) > 8 else f" ← task {node}")


class Times(NamedTuple):
    """When every node starts and ends, in nanoseconds from the start of the run."""

    start: Floats
    end: Floats

    @property
    def span(self) -> float:
        """From time zero to the last end."""
        return float(self.end.max(initial=0.0))


def simulate(graph: Graph, duration: Floats | None = None) -> Times:
    """Start every node as soon as everything it waits for has ended: `simulate(graph).span` is the run's length."""
    durations = graph.duration if duration is None else np.ascontiguousarray(duration, np.float64)
    forward_pass = loops_for(len(graph)).forward_pass
    return Times(*forward_pass(graph.order, graph.is_first, durations, *_delays(graph)))


def simulate_many(graph: Graph, durations: Floats) -> Floats:
    """Ends of all nodes for many scenarios in one pass; `durations` and the answer are (scenarios, nodes)."""
    from lumos.graph.compiled_loops import forward_pass_many

    columns = np.ascontiguousarray(durations.T, np.float64)
    return np.ascontiguousarray(forward_pass_many(graph.order, graph.is_first, columns, *_delays(graph)).T)


def _delays(graph: Graph) -> tuple[Any, ...]:
    """What the loops know of gaps and edges: frozen time counts like explained time."""
    edges = graph.edges
    return graph.gap + graph.frozen, graph.incoming, edges.source, edges.lag + edges.frozen, edges.from_start
