"""One job in two simulators: our times beside those that ASTRA-sim printed, rank by rank and collective by collective.

ASTRA-sim counts a rank's own work as compute and the rest of its time as exposed communication. In the files that
`lumos convert --for astra-sim` writes, the host is part of the work. So it is here: exposed communication is the time
in which a rank communicates or waits for others and does nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lumos.analysis.breakdown import covered
from lumos.analysis.replay import Replay
from lumos.errors import InputError
from lumos.trace.names import Kind, collective_name
from lumos.trace.read.astra_sim_log import AstraSimLog, SimulatedNode
from lumos.trace.read.chakra_format import NodeType

_MESSAGES = {NodeType.COMM_SEND: "send", NodeType.COMM_RECV: "recv"}
_CLOSE_PCT = 4.0


@dataclass(frozen=True)
class RankPair:
    """One rank in both simulators, in milliseconds; None where ASTRA-sim did not print it."""

    rank: int
    ours_ms: float
    astra_ms: float
    ours_compute_ms: float
    astra_compute_ms: float | None
    ours_exposed_ms: float
    astra_exposed_ms: float | None

    @property
    def difference_pct(self) -> float:
        """How much longer the rank takes in ASTRA-sim."""
        return _percent(self.astra_ms, self.ours_ms)


@dataclass(frozen=True)
class KindPair:
    """Collectives of one kind in both: how many, and from issue to end, waiting included, per rank that has some."""

    kind: str
    calls: int
    astra_calls: int
    ours_ms: float
    astra_ms: float


@dataclass(frozen=True)
class AstraComparison:
    """Our replay of a job beside ASTRA-sim's."""

    ours: Replay
    theirs: AstraSimLog

    @cached_property
    def ranks(self) -> list[RankPair]:
        """All ranks. ASTRA-sim counts them from 0, whatever they are called in the job."""
        here, there = self.ours.execution.trace.ranks, self.theirs.ranks
        if len(here) != len(there):
            raise InputError(
                f"{self.theirs.path}: {len(there)} ranks in ASTRA-sim and {len(here)} in the run; name the files it ran"
            )
        return [self._pair(rank, number) for number, rank in enumerate(here)]

    def _pair(self, rank: int, number: int) -> RankPair:
        trace, origin = self.ours.simulated, self.ours.execution.origin
        rows = np.flatnonzero((trace.rank == rank) & trace.on_gpu)
        everything = np.flatnonzero((trace.rank == rank) & trace.is_work)
        end = int(trace.end[everything].max(initial=origin))
        comm = trace.kind[rows] == Kind.COMM
        compute, busy = (covered(trace.start[x], trace.end[x], origin, end) for x in (rows[~comm], rows))
        wall, exposed = (end - origin) / 1e6, (busy - compute) / 1e6
        found = self.theirs.ranks[number]
        return RankPair(
            rank=rank, ours_ms=wall, astra_ms=(found.wall_ns or 0) / 1e6,
            ours_compute_ms=wall - exposed, astra_compute_ms=_ms(found.compute_ns),
            ours_exposed_ms=exposed, astra_exposed_ms=_ms(found.exposed_ns),
        )  # fmt: skip

    @cached_property
    def kinds(self) -> list[KindPair]:
        """By kind of collective; empty if ASTRA-sim was not told to trace nodes."""
        if not self.theirs.nodes:
            return []
        trace = self.ours.simulated
        here: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in np.flatnonzero(trace.is_communication).tolist():
            here[_kind_of_kernel(trace.collective_of(row))].append((int(trace.rank[row]), trace.duration[row] / 1e6))
        there: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for node in self.theirs.nodes:
            there[_kind_of_node(node)].append((node.rank, (node.end_ns - node.start_ns) / 1e6))
        rows = [
            KindPair(kind, len(here[kind]), len(there[kind]), _per_rank(here[kind]), _per_rank(there[kind]))
            for kind in dict.fromkeys([*here, *there])
        ]
        return sorted(rows, key=lambda row: -max(row.ours_ms, row.astra_ms))

    @property
    def ours_ms(self) -> float:
        """When our last rank ends."""
        return max(pair.ours_ms for pair in self.ranks)

    @property
    def astra_ms(self) -> float:
        return self.theirs.step_ns / 1e6

    @property
    def difference_pct(self) -> float:
        """How much longer the run is in ASTRA-sim."""
        return _percent(self.astra_ms, self.ours_ms)

    @cached_property
    def notes(self) -> list[str]:
        """What explains a difference, as far as the two results show it."""
        notes = list(self.ours.execution.warnings)
        if any(rank.compute_ns is None for rank in self.theirs.ranks.values()):
            notes.append(
                "ASTRA-sim printed no statistics: it stops them at nodes of the host; `lumos convert --for astra-sim` "
                "writes files without"
            )
        if not self.theirs.nodes:
            notes.append('collectives are compared if the system file of ASTRA-sim has "trace-enabled": 1')
        if abs(self.difference_pct) > _CLOSE_PCT:
            notes.append(
                "ASTRA-sim runs one collective or send of a rank at a time, lets a sender go on before the receiver "
                "is there (unless --rendezvous-protocol=true), and prices collectives by its own network file"
            )
        return notes

    def as_dict(self) -> dict[str, Any]:
        return {
            "ours_ms": self.ours_ms,
            "astra_sim_ms": self.astra_ms,
            "difference_pct": self.difference_pct,
            "ranks": [asdict(pair) | {"difference_pct": pair.difference_pct} for pair in self.ranks],
            "collectives": [asdict(kind) for kind in self.kinds],
            "warnings": self.notes,
        }


def _kind_of_kernel(kind: str) -> str:
    return "send, recv" if kind in ("send", "recv", "send_recv") else kind


def _kind_of_node(node: SimulatedNode) -> str:
    if node.type in _MESSAGES:
        return "send, recv"
    return collective_name(node.name) or node.name


def _per_rank(calls: list[tuple[int, float]]) -> float:
    return sum(ms for _, ms in calls) / max(1, len({rank for rank, _ in calls}))


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _percent(value: float, base: float) -> float:
    return 100 * (value / base - 1) if base else 0.0
