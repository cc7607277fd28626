"""Order between streams: kernels of one communicator or hardware queue start in the order of their launches.

NCCL itself orders the kernels of a communicator. With CUDA_DEVICE_MAX_CONNECTIONS=1 always, and under MPS often,
streams share a hardware queue, where a kernel that still waits holds back kernels of other streams launched after it.
Whether two streams share a queue is not recorded. It shows when kernels that could have started long before start
together with the one that was held, and hardly any starts before it.
"""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Edges, Rule
from lumos.graph.rules.nodes import Nodes
from lumos.trace.names import Kind

_CHANNEL = read_table("trace_rules.toml")["channel"]
_TOGETHER, _HELD, _OVERTAKEN = _CHANNEL["together"], _CHANNEL["held"], _CHANNEL["overtaken"]


def communicator_edges(nodes: Nodes) -> Edges:
    """From one kernel of a communicator to its next one, if that is on another stream."""
    trace = nodes.trace
    arrive = np.flatnonzero((nodes.kind == Kind.COMM) & ~nodes.is_return & (nodes.launch_of_node >= 0))
    arrive = arrive[trace.message[nodes.row[arrive]] >= 0]
    if len(arrive) == 0:
        return Edges.of([], [], Rule.EVENT)
    messages = (trace.messages[m] for m in trace.message[nodes.row[arrive]])
    named = [(rank, m.group, m.ranks) for rank, m in zip(nodes.rank[arrive].tolist(), messages, strict=True)]
    number = {communicator: i for i, communicator in enumerate(dict.fromkeys(named))}
    key = np.array([number[communicator] for communicator in named])
    arrive = arrive[np.lexsort((nodes.launched_at[arrive], key))]
    key = np.sort(key, kind="stable")
    source, target = arrive[:-1] + 1, arrive[1:]  # from the transfer of one to the arrival of the next
    follows = (key[1:] == key[:-1]) & (nodes.lane[source] != nodes.lane[target])
    possible = follows & (nodes.end[source] <= nodes.start[target])
    return Edges.of(source[possible], target[possible], Rule.EVENT)


def channel_edges(nodes: Nodes) -> Edges:
    """From the start of a kernel to the start of the next one launched to another stream that shares its queue.

    A kernel leaves the queue once the one before it on its stream has ended, even if the GPU has no room for it yet:
    then the other stream goes on before it.
    """
    source, target = _next_on_other_streams(nodes)
    if len(source) == 0:
        return Edges.of([], [], Rule.CHANNEL)
    late, start, turn = nodes.start[source], nodes.start[target], nodes.previous_end[source]
    held = (nodes.free_at[target] + _HELD < late) & (nodes.launched_at[source] + _HELD < late)
    behind, ahead = late - start < _TOGETHER, late - start >= _OVERTAKEN
    at_its_turn = ~behind & (start >= turn) & (start - turn < _TOGETHER) & (nodes.free_at[target] + _HELD < start)
    pair = nodes.lane[source].astype(np.int64) << 32 | nodes.lane[target]
    evidence = held & behind & (start - late < _TOGETHER) | at_its_turn
    shares = np.isin(pair, _pairs_with_evidence(pair, evidence, held & ahead & ~at_its_turn))
    together, by_turn = shares & behind, shares & at_its_turn
    return Edges.join([
        Edges.of(source[together], target[together], Rule.CHANNEL, from_start=True),
        Edges.of(source[by_turn] - 1, target[by_turn], Rule.CHANNEL),
    ])  # fmt: skip


def _pairs_with_evidence(pair: np.ndarray, together: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Pairs of streams with enough evidence for a shared queue and few counterexamples."""
    known, index = np.unique(pair, return_inverse=True)
    cases = np.bincount(index, together, len(known))
    against = np.bincount(index, ahead, len(known))
    return np.asarray(known[(cases >= _CHANNEL["cases"]) & (against <= _CHANNEL["counterexamples"] * cases)])


def _next_on_other_streams(nodes: Nodes) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of nodes on two streams of a rank such that the second is the next one launched there after the first.

    Of several that come between two launches to the other stream, the last implies the others.
    """
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for lanes in nodes.busy_streams.values():
        launched = {lane: _launched(nodes, lane) for lane in lanes} if len(lanes) > 1 else {}
        for a, mine in launched.items():
            for b, theirs in launched.items():
                if a != b and len(mine) and len(theirs):
                    last = np.searchsorted(nodes.launched_at[mine], nodes.launched_at[theirs]) - 1
                    new = (last >= 0) & (np.diff(last, prepend=-1) != 0)
                    sources.append(mine[last[new]])
                    targets.append(theirs[new])
    return np.concatenate(sources), np.concatenate(targets)


def _launched(nodes: Nodes, lane: int) -> np.ndarray:
    """The nodes of a stream whose launch is known, in its order; of a communication kernel, its arrival."""
    found = np.arange(nodes.first[lane], nodes.first[lane + 1])
    found = found[~nodes.is_return[found] & (nodes.launch_of_node[found] >= 0)]
    return found[np.argsort(nodes.launched_at[found], kind="stable")]
