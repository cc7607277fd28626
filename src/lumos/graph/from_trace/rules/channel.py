"""Order that streams do not show: communicators run their kernels one by one, and streams may share a hardware queue.

A communicator (NCCL) starts its kernels in the order of their launches, whichever streams they are on.

Streams that share a hardware queue (always with CUDA_DEVICE_MAX_CONNECTIONS=1, often under MPS) are dispatched in the
order of their launches: a kernel that still waits holds back kernels of other streams that were launched after it.
Whether two streams share a queue is not recorded; it shows when kernels that could have started long before start
together with the one that was held, and hardly any starts before it.
"""

from __future__ import annotations

import numpy as np

from lumos.graph.from_trace.nodes import Draft
from lumos.graph.graph import Edges, Rule
from lumos.trace.names import Kind

_TOGETHER = 20_000  # ns between the starts of two kernels that were released together
_HELD = 100_000  # ns by which a kernel must have been late for its lateness to be evidence
_EVIDENCE = 2  # cases that are needed
_DOUBT = 0.25  # cases against, per case for it, that are still taken for other causes


def communicator_edges(draft: Draft) -> Edges:
    """From one kernel of a communicator to its next one, where that is on another stream."""
    trace = draft.trace
    arrive = _arrivals(draft)
    told = trace.message[draft.row[arrive]] >= 0
    arrive = arrive[told & (draft.launch_row[draft.row[arrive]] >= 0)]
    if len(arrive) == 0:
        return Edges.of([], [], Rule.EVENT)
    groups: dict[tuple[int, str, tuple[int, ...]], int] = {}
    key = np.array(
        [
            groups.setdefault((rank, message.group, message.ranks), len(groups))
            for rank, message in zip(
                draft.lane_rank[draft.lane[arrive]].tolist(),
                (trace.messages[m] for m in trace.message[draft.row[arrive]]),
                strict=True,
            )
        ]
    )
    arrive = arrive[np.lexsort((draft.launched_at(arrive), key))]
    key = np.sort(key, kind="stable")
    source, target = arrive[:-1] + 1, arrive[1:]  # from the transfer of one to the arrival of the next
    follows = (key[1:] == key[:-1]) & (draft.lane[source] != draft.lane[target])
    possible = follows & (draft.end[source] <= draft.start[target])
    return Edges.of(source[possible], target[possible], Rule.EVENT)


def channel_edges(draft: Draft) -> Edges:
    """From the start of a kernel to the start of the next one launched to another stream that shares its queue."""
    source, target = _next_on_other_streams(draft)
    if len(source) == 0:
        return Edges.of([], [], Rule.CHANNEL)
    late = draft.start[source]
    held = (_free_to_start(draft, target) + _HELD < late) & (draft.launched_at(source) + _HELD < late)
    ahead = late - draft.start[target]
    pair = draft.lane[source].astype(np.int64) << 32 | draft.lane[target]
    shares = _pairs_with_evidence(pair, held & (np.abs(ahead) < _TOGETHER), held & (ahead >= _TOGETHER))
    keep = np.isin(pair, shares) & (ahead < _TOGETHER)
    return Edges.of(source[keep], target[keep], Rule.CHANNEL, from_start=True)


def _pairs_with_evidence(pair: np.ndarray, together: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Pairs of streams with enough cases for a shared queue and few against it."""
    known, index = np.unique(pair, return_inverse=True)
    cases = np.bincount(index, together, len(known))
    against = np.bincount(index, ahead, len(known))
    return known[(cases >= _EVIDENCE) & (against <= _DOUBT * cases)]


def _arrivals(draft: Draft) -> np.ndarray:
    """The nodes at which communication kernels arrive."""
    return np.flatnonzero((draft.kind == Kind.COMM) & ~draft.is_return)


def _next_on_other_streams(draft: Draft) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of nodes on two streams of a rank such that the second is the next one launched there after the first.

    Of several that come between two launches to the other stream, the last says it all.
    """
    sources, targets = [], []
    for lanes in draft.lanes_of_rank.values():
        launched = {lane: _launched(draft, lane) for lane in lanes} if len(lanes) > 1 else {}
        for a, mine in launched.items():
            for b, theirs in launched.items():
                if a == b or len(mine) == 0 or len(theirs) == 0:
                    continue
                last = np.searchsorted(draft.launched_at(mine), draft.launched_at(theirs)) - 1
                news = (last >= 0) & (np.diff(last, prepend=-1) != 0)
                sources.append(mine[last[news]])
                targets.append(theirs[news])
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *sources]), np.concatenate([empty, *targets])


def _launched(draft: Draft, lane: int) -> np.ndarray:
    """The nodes of a stream whose launch is known, in order; of a communication kernel, its arrival."""
    nodes = np.arange(draft.first[lane], draft.first[lane + 1])
    nodes = nodes[~draft.is_return[nodes] & (draft.launch_row[draft.row[nodes]] >= 0)]
    return nodes[np.argsort(draft.launched_at(nodes), kind="stable")]


def _free_to_start(draft: Draft, node: np.ndarray) -> np.ndarray:
    """When nodes could have started by the order of their stream and their launch."""
    head = draft.first[draft.lane[node]] == node
    previous = np.where(head, 0, draft.end[np.maximum(node - 1, 0)])
    launch = draft.launch_row[draft.row[node]]
    return np.maximum(previous, np.where(launch >= 0, draft.trace.end[launch], 0))
