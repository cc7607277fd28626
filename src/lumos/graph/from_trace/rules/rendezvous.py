"""Collectives and point-to-point messages across ranks: found, matched, and joined by a rendezvous.

A recorded collective is waiting plus transfer: it starts when its rank arrives, but moves data only when the last
participant is there. Ranks miss different leading collectives, so members are matched per process group and
collective from the end; where that disagrees with the recorded ends, the neighbouring alignments are tried.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lumos.graph.from_trace.nodes import Draft, launch_rows
from lumos.graph.graph import Edges, Ints, Rule, Small
from lumos.trace.names import Category, collective_name
from lumos.trace.trace import Message, Trace

_SHIFTS = 4  # neighbouring alignments that are tried
_CLOCK_ERROR = 100_000  # ns by which the clocks of two ranks may still differ after alignment
POINT_TO_POINT = ("send", "recv", "send_recv")


@dataclass(frozen=True)
class Meeting:
    """One collective, or one message: the kernels, one a rank, that must all be there before data moves."""

    collective: str
    rows: Small
    ranks: tuple[int, ...]
    message: Message | None
    complete: bool  # whether every participant's trace is here


def find_meetings(trace: Trace) -> tuple[list[Meeting], list[str]]:
    """All meetings of a job, and warnings about communication that could not be matched."""
    rows = np.flatnonzero(trace.is_communication)
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    if len(rows) == 0 or len(trace.ranks) < 2:
        return [], []
    told = _messages_of_kernels(trace, rows)
    members: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    messages: dict[int, Message] = {}
    pairs: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, rank, (name, found) in zip(rows.tolist(), trace.rank[rows].tolist(), told, strict=True):
        peers = [m for m in found if m.collective in ("send", "recv")]
        if peers:
            for message in peers:
                pairs[_direction(rank, message)][message.collective].append(row)
                messages[row] = message
            continue
        if found:
            messages[row] = found[0]
        group = f"{found[0].group} {found[0].ranks}" if found else ""
        members[name, group][rank].append(row)
    meetings, lonely = _match_collectives(trace, members, messages)
    matched, unmatched = _match_pairs(trace, pairs, messages)
    return meetings + matched, _warnings(lonely, unmatched, meetings + matched)


def collective_edges(draft: Draft, meetings: list[Meeting]) -> tuple[Edges, Ints]:
    """Edges through one hub a meeting (numbered after the draft's nodes), and the hubs' recorded times."""
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    hubs: list[int] = []
    for meeting in meetings:
        arrive, transfer = draft.first_node[meeting.rows], draft.last_node[meeting.rows]
        together = int(draft.start[arrive].max())
        waits = draft.end[transfer] + _CLOCK_ERROR >= together
        if waits.sum() == 0 or (not waits.all() and meeting.collective not in _ONE_SIDED):
            continue
        hub = len(draft) + len(hubs)
        hubs.append(together)
        sources += [arrive, np.full(int(waits.sum()), hub)]
        targets += [np.full(len(arrive), hub), transfer[waits]]
    empty = np.zeros(0, np.int32)
    return (
        Edges.of(np.concatenate([empty, *sources]), np.concatenate([empty, *targets]), Rule.COLLECTIVE),
        np.array(hubs, np.int64),
    )


_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "send_recv")


def _direction(rank: int, message: Message) -> tuple[int, int]:
    """(sending rank, receiving rank) in the world; the peer is given within its group."""
    peer = message.destination if message.collective == "send" else message.source
    if message.ranks and 0 <= peer < len(message.ranks):
        peer = message.ranks[peer]
    return (rank, peer) if message.collective == "send" else (peer, rank)


def _match_collectives(
    trace: Trace, members: dict[tuple[str, str], dict[int, list[int]]], messages: dict[int, Message]
) -> tuple[list[Meeting], int]:
    meetings, lonely = [], 0
    for (name, _), by_rank in members.items():
        if len(by_rank) < 2:
            lonely += sum(map(len, by_rank.values()))
            continue
        table = _align(trace, [np.array(by_rank[r]) for r in sorted(by_rank)])
        ranks = tuple(sorted(by_rank))
        for row in table:
            message = messages.get(int(row[0]))
            size = message.group_size if message else -1
            meetings.append(Meeting(name, row, ranks, message, size <= len(ranks)))
    return meetings, lonely


def _match_pairs(
    trace: Trace, pairs: dict[tuple[int, int], dict[str, list[int]]], messages: dict[int, Message]
) -> tuple[list[Meeting], int]:
    meetings, unmatched = [], 0
    for (sender, receiver), sides in pairs.items():
        sends, receives = sides.get("send", []), sides.get("recv", [])
        if not sends or not receives:
            unmatched += len(sends) + len(receives)
            continue
        for row in _align(trace, [np.array(sends), np.array(receives)]):
            meetings.append(Meeting("send_recv", row, (sender, receiver), messages[int(row[0])], True))
    return meetings, unmatched


def _align(trace: Trace, columns: list[np.ndarray]) -> np.ndarray:
    """One row a meeting, one column a rank, matched from the end."""
    surplus = [0] + [_trailing_surplus(trace.end[columns[0]], trace.end[c]) for c in columns[1:]]
    tails = [c[: len(c) - (s - min(surplus))] for c, s in zip(columns, surplus, strict=True)]
    count = min(map(len, tails))
    return np.stack([t[len(t) - count :] for t in tails], axis=1).astype(np.int32)


def _trailing_surplus(reference: Ints, ends: Ints) -> int:
    """How many members a rank has after the reference's last one (negative: fewer); 0 unless that fits much better."""

    def spread(surplus: int) -> float:
        a = reference[: len(reference) + min(surplus, 0)]
        b = ends[: len(ends) - max(surplus, 0)]
        count = min(len(a), len(b))
        if count < max(1, min(len(reference), len(ends)) // 2):
            return float("inf")
        difference = a[len(a) - count :] - b[len(b) - count :]
        return float(np.median(np.abs(difference - np.median(difference))))

    as_they_are = spread(0)
    if as_they_are < 1e6 and len(reference) == len(ends):
        return 0
    best = min((s for s in range(-_SHIFTS, _SHIFTS + 1) if s), key=spread)
    return best if spread(best) * 4 < as_they_are else 0


def _messages_of_kernels(trace: Trace, rows: np.ndarray) -> list[tuple[str, list[Message]]]:
    """For every communication kernel: its collective, and the messages it carries as far as they are recorded."""
    launch = launch_rows(trace)[rows]
    comm_ops = _CommOps(trace)
    answer = []
    for row, call in zip(rows.tolist(), launch.tolist(), strict=True):
        own = int(trace.message[row])
        if own >= 0:
            answer.append((trace.messages[own].collective, [trace.messages[own]]))
            continue
        found = comm_ops.before(call) if call >= 0 else []
        note = comm_ops.note_around(call) if call >= 0 else ""
        name = found[-1].collective if found else note or collective_name(trace.names[trace.name[row]])
        answer.append((name or trace.names[trace.name[row]], found))
    return answer


class _CommOps:
    """`record_param_comms` rows and `nccl:…` annotations by thread, to be asked in the order of launches."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        ops = np.flatnonzero((trace.category == Category.OP) & (trace.message >= 0))
        notes = np.array([n.startswith("nccl:") for n in trace.names], bool)
        self.ops = self._by_lane(ops)
        self.notes = self._by_lane(np.flatnonzero((trace.category == Category.NOTE) & notes[trace.name]))
        self.used: dict[int, int] = {}

    def _by_lane(self, rows: np.ndarray) -> dict[int, tuple[np.ndarray, Ints]]:
        rows = rows[np.lexsort((self.trace.start[rows], self.trace.lane[rows]))]
        parts = np.split(rows, np.flatnonzero(np.diff(self.trace.lane[rows])) + 1) if len(rows) else []
        return {int(self.trace.lane[p[0]]): (p, self.trace.start[p]) for p in parts}

    def before(self, call: int) -> list[Message]:
        """Messages announced in the call's thread since the last communication launch there."""
        lane, time = int(self.trace.lane[call]), self.trace.start[call]
        if lane not in self.ops:
            return []
        rows, starts = self.ops[lane]
        begin, end = self.used.get(lane, 0), int(np.searchsorted(starts, time, side="right"))
        self.used[lane] = max(begin, end)
        found = [self.trace.messages[self.trace.message[r]] for r in rows[begin:end]]
        peers = [m for m in found if m.collective in ("send", "recv")]
        return peers if found and found[-1].collective in ("send", "recv") else found[-1:]

    def note_around(self, call: int) -> str:
        """The collective named by the annotation around a call, '' where there is none."""
        lane, time = int(self.trace.lane[call]), int(self.trace.start[call])
        rows, starts = self.notes.get(lane, (np.zeros(0, int), np.zeros(0, int)))
        at = int(np.searchsorted(starts, time, side="right")) - 1
        if at < 0 or self.trace.end[rows[at]] < time:
            return ""
        return collective_name(self.trace.names[self.trace.name[rows[at]]])


def _warnings(lonely: int, unmatched: int, meetings: list[Meeting]) -> list[str]:
    warnings = []
    if lonely:
        warnings.append(
            f"{lonely} communication kernels have no counterpart in another rank; their waiting is not known"
        )
    if unmatched:
        warnings.append(f"{unmatched} sends or receives have no counterpart; is a rank's trace missing?")
    partial = sum(not m.complete for m in meetings)
    if partial:
        warnings.append(f"{partial} collectives lack the traces of some participants; their waiting is a lower bound")
    return warnings
