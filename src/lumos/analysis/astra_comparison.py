"""One job in two simulators: our times beside those that ASTRA-sim printed, rank by rank and collective by collective.

ASTRA-sim counts a rank's own work as compute and the rest of its time as exposed communication. In the files that
`lumos convert --for astra-sim` writes, the host is part of the work. So it is here: exposed communication is the time
in which a rank communicates or waits for others and does nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lumos.analysis.breakdown import covered
from lumos.analysis.run import Run
from lumos.errors import InputError
from lumos.trace.names import Kind, collective_name
from lumos.trace.read.astra_sim_log import AstraSimLog
from lumos.trace.read.chakra_format import NodeType

_MESSAGES = "send, recv"
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


class _Ours(NamedTuple):
    """One rank of our run: all of it, what of it is exposed communication, and its communication kernels by kind."""

    wall_ms: float
    exposed_ms: float
    kinds: dict[str, list[float]]


@dataclass(frozen=True)
class AstraComparison:
    """Our simulation of a job beside ASTRA-sim's.

    ASTRA-sim counts ranks from 0, whatever they are called in the job. `stands_for` has the rank of our run for each: a
    described run has one rank of every pipeline stage, which stands for all of them.
    """

    run: Run
    theirs: AstraSimLog
    stands_for: Sequence[int]
    warnings: Sequence[str] = ()

    @cached_property
    def ranks(self) -> list[RankPair]:
        """All ranks."""
        here, there = len(self.stands_for), len(self.theirs.ranks)
        if here != there:
            raise InputError(
                f"{self.theirs.path}: {there} ranks in ASTRA-sim and {here} in the run; name the files it ran"
            )
        names = self.stands_for if len(set(self.stands_for)) == here else range(here)
        return [self._pair(number, name) for number, name in enumerate(names)]

    def _pair(self, number: int, name: int) -> RankPair:
        ours, found = self._ours[self.stands_for[number]], self.theirs.ranks[number]
        return RankPair(
            rank=name, ours_ms=ours.wall_ms, astra_ms=(found.wall_ns or 0) / 1e6,
            ours_compute_ms=ours.wall_ms - ours.exposed_ms, astra_compute_ms=_ms(found.compute_ns),
            ours_exposed_ms=ours.exposed_ms, astra_exposed_ms=_ms(found.exposed_ns),
        )  # fmt: skip

    @cached_property
    def _ours(self) -> dict[int, _Ours]:
        return {rank: self._ours_of(rank) for rank in self.run.trace.ranks}

    def _ours_of(self, rank: int) -> _Ours:
        trace, origin = self.run.trace, self.run.origin
        rows = np.flatnonzero((trace.rank == rank) & trace.on_gpu)
        everything = np.flatnonzero((trace.rank == rank) & trace.is_work)
        end = int(trace.end[everything].max(initial=origin))
        comm = trace.kind[rows] == Kind.COMM
        compute, busy = (covered(trace.start[x], trace.end[x], origin, end) for x in (rows[~comm], rows))
        kinds: dict[str, list[float]] = defaultdict(list)
        for row in rows[comm].tolist():
            kinds[_kind(trace.collective_of(row))].append(float(trace.duration[row]) / 1e6)
        return _Ours((end - origin) / 1e6, (busy - compute) / 1e6, kinds)

    @cached_property
    def kinds(self) -> list[KindPair]:
        """By kind of collective; empty if ASTRA-sim was not told to trace nodes."""
        if not self.theirs.nodes:
            return []
        here: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, rank in enumerate(self.stands_for):
            for kind, times in self._ours[rank].kinds.items():
                here[kind] += [(number, ms) for ms in times]
        there: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for node in self.theirs.nodes:
            kind = _MESSAGES if node.type != NodeType.COMM_COLL else collective_name(node.name) or node.name
            there[kind].append((node.rank, (node.end_ns - node.start_ns) / 1e6))
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
        notes = list(self.warnings)
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


def _kind(collective: str) -> str:
    return _MESSAGES if collective in ("send", "recv", "send_recv", "p2p") else collective


def _per_rank(calls: list[tuple[int, float]]) -> float:
    return sum(ms for _, ms in calls) / max(1, len({rank for rank, _ in calls}))


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _percent(value: float, base: float) -> float:
    return 100 * (value / base - 1) if base else 0.0
