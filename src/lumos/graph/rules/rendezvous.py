"""Rendezvous: one collective or message across ranks, found, matched, and joined by a node of its own.

A recorded collective is waiting plus transfer: it starts when its rank arrives, but moves data only when the last
participant is there. Ranks miss different leading collectives, so members are matched per process group and
collective from the end; if that disagrees with the recorded ends, the neighbouring alignments are tried.

The hosts of a job may have clocks that are seconds apart, while the ends of one collective agree across ranks within
2.5–90 µs (median over real jobs). A rank whose ends are off by more is moved by the median of its differences.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Edges, Ints, Rule, Small
from lumos.graph.rules.nodes import Nodes
from lumos.trace.messages import PeerCall
from lumos.trace.names import Category, collective_name
from lumos.trace.trace import Message, Trace

_LIMITS = read_table("trace_rules.toml")["rendezvous"]
POINT_TO_POINT = ("send", "recv", "send_recv")
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter", *POINT_TO_POINT)  # some participants need not wait


@dataclass(frozen=True)
class Rendezvous:
    """One collective, or one message: the kernels, one a rank, that must all be there before data moves."""

    collective: str
    rows: Small
    ranks: tuple[int, ...]
    message: Message | None
    complete: bool  # whether every participant's trace is here


def find_rendezvous(trace: Trace) -> tuple[list[Rendezvous], list[str]]:
    """All collectives and messages of a job, and warnings about communication that could not be matched."""
    rows = np.flatnonzero(trace.is_communication)
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    if len(rows) == 0 or len(trace.ranks) < 2:
        return [], []
    collectives: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    messages: dict[int, Message] = {}
    announced = _messages_of_kernels(trace, rows)
    for row, rank, (name, found) in zip(rows.tolist(), trace.rank[rows].tolist(), announced, strict=True):
        peers = [m for m in found if m.has_peer]
        for message in peers or found[:1]:
            messages[row] = message
        for message in peers:
            pairs[PeerCall.of(rank, message).direction()][message.collective].append(row)
        if not peers:
            group = f"{found[0].group} {found[0].ranks}" if found else ""
            collectives[name, group][rank].append(row)
    matched, lonely = _match_collectives(trace, collectives, messages)
    unmatched = 0
    for direction, sides in pairs.items():
        sends, receives = sides.get("send", []), sides.get("recv", [])
        if not sends or not receives:
            unmatched += len(sends) + len(receives)
            continue
        aligned = _align(trace, [np.array(sends), np.array(receives)])
        matched += [Rendezvous("send_recv", row, direction, messages[int(row[0])], True) for row in aligned]
    return matched, _warnings(lonely, unmatched, matched)


def clock_offsets(trace: Trace, rendezvous: list[Rendezvous]) -> dict[int, int]:
    """What to add to every rank's times so that the ends of its collectives agree with its neighbours'."""
    differences: dict[tuple[int, int], list[int]] = {}
    for found in rendezvous:
        ends = trace.end[found.rows]
        for rank, end in zip(found.ranks[1:], ends[1:], strict=True):
            differences.setdefault((found.ranks[0], rank), []).append(int(ends[0] - end))
    neighbours: dict[int, list[tuple[int, int]]] = {}
    for (a, b), between in differences.items():
        offset = int(np.median(between))
        neighbours.setdefault(a, []).append((b, offset))
        neighbours.setdefault(b, []).append((a, -offset))
    offsets: dict[int, int] = {}
    for root in trace.ranks:
        waiting = [] if root in offsets else [root]
        offsets.setdefault(root, 0)
        while waiting:
            rank = waiting.pop()
            for other, offset in neighbours.get(rank, []):
                if other not in offsets:
                    offsets[other] = offsets[rank] + offset
                    waiting.append(other)
    return {rank: offset for rank, offset in offsets.items() if abs(offset) > _LIMITS["smallest_offset"]}


def rendezvous_edges(nodes: Nodes, rendezvous: list[Rendezvous]) -> tuple[Edges, Ints]:
    """Edges through one hub a rendezvous (numbered after all other nodes), and the hubs' recorded times."""
    sources, targets = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    hubs: list[int] = []
    for found in rendezvous:
        arrive, transfer = nodes.first_node[found.rows], nodes.last_node[found.rows]
        together = int(nodes.start[arrive].max())
        waits = nodes.end[transfer] + _LIMITS["clock_error"] >= together
        if waits.sum() == 0 or (not waits.all() and found.collective not in _ONE_SIDED):
            continue
        hub = len(nodes) + len(hubs)
        hubs.append(together)
        sources += [arrive, np.full(int(waits.sum()), hub)]
        targets += [np.full(len(arrive), hub), transfer[waits]]
    return Edges.of(np.concatenate(sources), np.concatenate(targets), Rule.COLLECTIVE), np.array(hubs, np.int64)


def _match_collectives(
    trace: Trace, members: dict[tuple[str, str], dict[int, list[int]]], messages: dict[int, Message]
) -> tuple[list[Rendezvous], int]:
    """The collectives of each process group across ranks, and how many kernels have no counterpart."""
    matched, lonely = [], 0
    for (name, _), by_rank in members.items():
        if len(by_rank) < 2:
            lonely += sum(map(len, by_rank.values()))
            continue
        ranks = tuple(sorted(by_rank))
        for row in _align(trace, [np.array(by_rank[r]) for r in ranks]):
            message = messages.get(int(row[0]))
            size = message.group_size if message else -1
            matched.append(Rendezvous(name, row, ranks, message, size <= len(ranks)))
    return matched, lonely


def _align(trace: Trace, columns: list[np.ndarray]) -> np.ndarray:
    """One row a rendezvous, one column a rank, matched from the end."""
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
    if as_they_are < _LIMITS["good_spread"] and len(reference) == len(ends):
        return 0
    shifts = _LIMITS["shifts"]
    best = min((s for s in range(-shifts, shifts + 1) if s), key=spread)
    return best if spread(best) * _LIMITS["better"] < as_they_are else 0


def _messages_of_kernels(trace: Trace, rows: np.ndarray) -> list[tuple[str, list[Message]]]:
    """For every communication kernel: its collective, and the messages it carries as far as they are recorded."""
    launch = trace.launch_row[rows]
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
        peers = [m for m in found if m.has_peer]
        return peers if found and found[-1].has_peer else found[-1:]

    def note_around(self, call: int) -> str:
        """The collective named by the annotation around a call; '' if there is none."""
        lane, time = int(self.trace.lane[call]), int(self.trace.start[call])
        rows, starts = self.notes.get(lane, (np.zeros(0, int), np.zeros(0, int)))
        at = int(np.searchsorted(starts, time, side="right")) - 1
        if at < 0 or self.trace.end[rows[at]] < time:
            return ""
        return collective_name(self.trace.names[self.trace.name[rows[at]]])


def _warnings(lonely: int, unmatched: int, matched: list[Rendezvous]) -> list[str]:
    warnings = []
    if lonely:
        warnings.append(
            f"{lonely} communication kernels have no counterpart in another rank; their waiting is not known"
        )
    if unmatched:
        warnings.append(f"{unmatched} sends or receives have no counterpart; is a rank's trace missing?")
    partial = sum(not m.complete for m in matched)
    if partial:
        warnings.append(f"{partial} collectives lack the traces of some participants; their waiting is a lower bound")
    return warnings
