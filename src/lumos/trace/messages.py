"""Messages as profilers record them: the names of collectives, and the peers of sends and receives as ranks of the job.

PyTorch's profiler records `Src Rank` and `Dst Rank` as ranks of the job, while execution traces, and other tools,
record the peer's index in its process group. Nothing in a file names the convention, so it is decided for a whole job:
both readings are tried, and the one with fewer contradictions is taken. A contradiction is a peer outside its group, a
rank that would send to itself, or a send whose receive is missing although both ranks were traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lumos.trace.names import collective_name
from lumos.trace.trace import Message, Trace


def message_name(recorded: str) -> str:
    """The collective of a Message by the name in its record; '' for a wait, which moves nothing."""
    if recorded in ("send", "recv"):
        return recorded
    return "" if recorded in ("wait", "barrier_wait") else collective_name(recorded) or recorded


class PeerCall(NamedTuple):
    """A send or a receive as one rank recorded it."""

    rank: int
    sends: bool
    peer: int
    group: tuple[int, ...]  # empty if its ranks are unknown

    @classmethod
    def of(cls, rank: int, message: Message) -> PeerCall:
        return cls(rank, message.collective == "send", message.peer, message.ranks)

    def job_peer(self, by_index: bool = False) -> int:
        """The peer as a rank of the job; -1 if it cannot be read that way: no rank sends to itself."""
        peer = job_rank(self.peer, self.group, by_index)
        return peer if peer != self.rank else -1

    def direction(self, by_index: bool = False) -> tuple[int, int]:
        """(sender, receiver) as ranks of the job."""
        peer = self.job_peer(by_index)
        return (self.rank, peer) if self.sends else (peer, self.rank)


def job_rank(peer: int, group: tuple[int, ...], by_index: bool) -> int:
    """A recorded peer as a rank of the job; -1 if its group does not have it."""
    if not by_index:
        return peer if not group or peer in group else -1
    return group[peer] if 0 <= peer < len(group) else -1


def peers_are_indices(calls: Iterable[PeerCall] | Mapping[PeerCall, int], otherwise: bool) -> bool:
    """Whether the peers of a job are indices into their groups; `otherwise` decides if both readings fit."""
    counts = Counter({call: n for call, n in Counter(calls).items() if call.peer >= 0})
    by_rank, by_index = (_contradictions(counts, reading) for reading in (False, True))
    return otherwise if by_rank == by_index else by_index < by_rank


def _contradictions(counts: Counter[PeerCall], by_index: bool) -> int:
    traced, impossible = {call.rank for call in counts}, 0
    surplus: Counter[tuple[int, int]] = Counter()  # sends without a receive, by direction
    for call, count in counts.items():
        if by_index and not call.group:
            continue  # nothing contradicts an index into an unknown group
        sender, receiver = call.direction(by_index)
        if min(sender, receiver) < 0:
            impossible += 2 * count  # its counterpart cannot be there either
        elif {sender, receiver} <= traced:
            surplus[sender, receiver] += count if call.sends else -count
    return impossible + sum(map(abs, surplus.values()))


def with_job_ranks(message: Message, by_index: bool) -> Message:
    """A message whose peer is a rank of the job."""
    if not message.has_peer:
        return message
    peer = job_rank(message.peer, message.ranks, by_index)
    return message._replace(destination=peer) if message.collective == "send" else message._replace(source=peer)


def with_peers_decoded(trace: Trace) -> Trace:
    """A job that PyTorch's profiler recorded, with the peers of all messages as ranks of the job."""
    is_call = np.array([message.has_peer for message in trace.messages] + [False], bool)
    if not is_call.any():
        return trace
    rows = np.flatnonzero(is_call[trace.message])
    pairs = np.stack([trace.rank[rows], trace.message[rows]], axis=1)
    unique, counts = np.unique(pairs, axis=0, return_counts=True)
    calls: Counter[PeerCall] = Counter()
    for (rank, number), count in zip(unique.tolist(), counts.tolist(), strict=True):
        calls[PeerCall.of(rank, trace.messages[number])] += count
    by_index = peers_are_indices(calls, otherwise=False)
    return replace(trace, messages=tuple(with_job_ranks(message, by_index) for message in trace.messages))
