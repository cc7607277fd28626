"""One job in two simulators: our times beside those that ASTRA-sim printed, rank by rank and collective by collective.

ASTRA-sim counts a rank's own work as compute and the rest of its time as exposed communication. In the files that
`lumos convert --for astra-sim` writes, the host is part of the work, also where it runs ahead while the GPU waits. So
it is here: exposed communication is the time in which a rank waits for communication and does nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lumos.analysis.run import Run
from lumos.chakra.astra_log import AstraSimLog
from lumos.chakra.file_format import NodeType
from lumos.errors import InputError
from lumos.trace.names import collective_name

_MESSAGES = "messages"
_CLOSE_PCT = 4.0
_WORTH_NAMING = 0.01  # of the run
_OTHER_WORK_PCT = 1.0  # ASTRA-sim takes work as it is in the files
_RECUT_WORK_PCT = 10.0  # that of a trace is cut anew at ASTRA-sim's costs


@dataclass(frozen=True)
class AstraEstimate:
    """Milliseconds of a run: as it is, with ASTRA-sim's transfer times, and with one transfer at a time as well."""

    own_ms: float
    its_links_ms: float
    one_at_a_time_ms: float

    @property
    def difference_pct(self) -> float:
        """How much longer the run is expected to be in ASTRA-sim."""
        return 100 * (self.one_at_a_time_ms / self.own_ms - 1) if self.own_ms else 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"difference_pct": self.difference_pct}

    @property
    def causes(self) -> list[str]:
        """The effects that are worth naming, each with its milliseconds."""
        links, order = self.its_links_ms - self.own_ms, self.one_at_a_time_ms - self.its_links_ms
        named = [
            (links, "transfers take as long there as the links of its network file need"),
            (order, "a rank runs one collective or send at a time, and this run overlaps them"),
        ]
        return [f"{ms:+,.1f} ms because {why}" for ms, why in named if abs(ms) > _WORTH_NAMING * self.own_ms]

    @property
    def warnings(self) -> list[str]:
        """What an export has to say; nothing if ASTRA-sim is expected to agree."""
        if not self.causes:
            return []
        return [
            f"ASTRA-sim is expected to take {self.one_at_a_time_ms:,.1f} ms, {self.difference_pct:+.1f} % from the "
            f"{self.own_ms:,.1f} ms of this run: {'; '.join(self.causes)}"
        ]


@dataclass(frozen=True)
class RankPair:
    """One rank in both simulators, in milliseconds; None where ASTRA-sim did not print it."""

    rank: int
    ours_ms: float
    astra_ms: float
    ours_work_ms: float
    astra_work_ms: float | None
    ours_exposed_ms: float
    astra_exposed_ms: float | None

    @property
    def difference_pct(self) -> float:
        """How much longer the rank takes in ASTRA-sim."""
        return _percent(self.astra_ms, self.ours_ms)


@dataclass(frozen=True)
class KindPair:
    """Collectives of one kind, per rank that has some: how many, and from issue to end, waiting included."""

    kind: str
    calls: float
    astra_calls: float
    ours_ms: float
    astra_ms: float


class OurRank(NamedTuple):
    """One rank of our run: when it ends, and how long it works, as its export has it."""

    wall_ms: float
    work_ms: float


@dataclass(frozen=True)
class AstraComparison:
    """Our simulation of a job beside ASTRA-sim's.

    ASTRA-sim counts ranks from 0, whatever they are called in the job. `stands_for` has the rank of our run for each: a
    described run has one rank of every pipeline stage, which stands for all of them.
    """

    run: Run
    theirs: AstraSimLog
    stands_for: Sequence[int]
    ours: Mapping[int, OurRank]
    warnings: Sequence[str] = ()
    is_exact: bool = False  # the files that ASTRA-sim ran hold the work of our ranks as it is here
    estimate: AstraEstimate | None = None  # by our simulator, of what ASTRA-sim makes of the files

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
        rank, found = self.stands_for[number], self.theirs.ranks[number]
        wall, work = self.ours[rank]
        return RankPair(
            rank=name, ours_ms=wall, astra_ms=(found.wall_ns or 0) / 1e6,
            ours_work_ms=work, astra_work_ms=_ms(found.compute_ns),
            ours_exposed_ms=max(0.0, wall - work), astra_exposed_ms=_ms(found.exposed_ns),
        )  # fmt: skip

    @cached_property
    def _our_kinds(self) -> dict[int, dict[str, list[float]]]:
        """Of every rank of our run, the milliseconds of its communication kernels by kind."""
        trace = self.run.trace
        found: dict[int, dict[str, list[float]]] = {rank: defaultdict(list) for rank in trace.ranks}
        for row in np.flatnonzero(trace.is_communication).tolist():
            kind = trace.collective_of(row)
            if kind == "recv":  # a message counts once, where it is sent
                continue
            kind = _MESSAGES if kind in ("send", "recv", "send_recv", "p2p") else kind
            found[int(trace.rank[row])][kind].append(float(trace.duration[row]) / 1e6)
        return found

    @cached_property
    def kinds(self) -> list[KindPair]:
        """By kind of collective; empty if ASTRA-sim was not told to trace nodes."""
        if not self.theirs.nodes:
            return []
        here: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, rank in enumerate(self.stands_for):
            for kind, times in self._our_kinds[rank].items():
                here[kind] += [(number, ms) for ms in times]
        there: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for node in self.theirs.nodes:
            kind = _MESSAGES if node.type == NodeType.COMM_SEND else collective_name(node.name) or node.name
            if node.type != NodeType.COMM_RECV:  # posted long before their message comes
                there[kind].append((node.rank, (node.end_ns - node.start_ns) / 1e6))
        rows = []
        for kind in dict.fromkeys([*here, *there]):
            (calls, ours), (astra_calls, astra) = _per_rank(here[kind]), _per_rank(there[kind])
            rows.append(KindPair(kind, calls, astra_calls, ours, astra))
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

    @property
    def _work_apart_pct(self) -> float:
        """How far the work of the ranks is apart, on average over them."""
        pairs = [(pair.ours_work_ms, pair.astra_work_ms) for pair in self.ranks if pair.astra_work_ms is not None]
        apart, ours = sum(abs(theirs - mine) for mine, theirs in pairs), sum(mine for mine, _ in pairs)
        return 100 * apart / ours if ours else 0.0

    @cached_property
    def notes(self) -> list[str]:
        """What explains a difference, as far as the two results show it."""
        notes = list(self.warnings)
        if any(rank.compute_ns is None for rank in self.theirs.ranks.values()):
            notes.append(
                "ASTRA-sim printed no statistics: it stops them at nodes of the host; `lumos convert --for astra-sim` "
                "writes files without"
            )
        if (apart := self._work_apart_pct) > (_OTHER_WORK_PCT if self.is_exact else _RECUT_WORK_PCT):
            notes.append(
                f"the work of its ranks is {apart:.0f} % apart from ours, and ASTRA-sim takes work as it is in the "
                f"files: is {self.theirs.path} of this run?"
            )
        if not self.theirs.nodes:
            notes.append(
                "collectives are not in what ASTRA-sim prints, but in the log/log.log that it writes where it runs "
                '(with "trace-enabled": 1 in its system file, as after `--for astra-sim`): give that to compare them'
            )
        return [*notes, *self._reasons()]

    def _reasons(self) -> list[str]:
        """Why the two simulators differ: what ASTRA-sim cannot express, with what it costs in our simulator."""
        causes = self.estimate.causes if self.estimate is not None else []
        rest = self.unexplained_ms
        is_large = abs(rest) > _CLOSE_PCT / 100 * self.ours_ms
        if causes:
            left = f"; {rest:+,.1f} ms have another reason" if is_large else ""
            causes = [f"of the difference of {self.astra_ms - self.ours_ms:+,.1f} ms, {'; '.join(causes)}{left}"]
        if is_large:
            causes.append(
                "ASTRA-sim runs one collective or send of a rank at a time, lets a sender go on before the receiver "
                "is there (unless --rendezvous-protocol=true), and estimates collectives by its own network file"
            )
        return causes

    @property
    def unexplained_ms(self) -> float:
        """What remains of the difference from our estimate of it."""
        known = 0.0 if self.estimate is None else self.estimate.one_at_a_time_ms - self.estimate.own_ms
        return self.astra_ms - self.ours_ms - known

    def as_dict(self) -> dict[str, Any]:
        return {
            "ours_ms": self.ours_ms,
            "astra_sim_ms": self.astra_ms,
            "difference_pct": self.difference_pct,
            "estimate": None if self.estimate is None else self.estimate.as_dict(),
            "unexplained_ms": self.unexplained_ms,
            "ranks": [asdict(pair) | {"difference_pct": pair.difference_pct} for pair in self.ranks],
            "collectives": [asdict(kind) for kind in self.kinds],
            "warnings": self.notes,
        }


def _per_rank(calls: list[tuple[int, float]]) -> tuple[float, float]:
    """How many calls a rank has, of those that have some, and how long they take."""
    ranks = max(1, len({rank for rank, _ in calls}))
    return len(calls) / ranks, sum(ms for _, ms in calls) / ranks


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _percent(value: float, base: float) -> float:
    return 100 * (value / base - 1) if base else 0.0
