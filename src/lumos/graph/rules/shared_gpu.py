"""Ranks that share a GPU, as they do under MPS: a kernel that may start has to wait for room.

Which GPU a rank ran on is not recorded reliably: device 0 may be another one for every process. Sharing shows. Of the
kernels that are ready, 2–60 % start late for no other reason (jobs under MPS), and while they wait, kernels of other
ranks run far more of the time (37–100 %) than beside a rank's own kernels (19–77 %). Ranks with GPUs of their own, in
step with one another, have few such waits, and run their kernels at the same time (89–99 %, public jobs).

In which order the GPU serves its clients is not recorded either, so a wait is tied to the last kernel of another rank
that started or ended before it was over, or to one that ran all the time. That one need not be the cause: the length of
a wait is explained by the work beside it, its end is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Bools, Edges, Floats, Ints, Rule
from lumos.graph.rules.nodes import Nodes

_SHARED = read_table("trace_rules.toml")["shared_gpu"]


def shared_gpu_edges(nodes: Nodes, unexplained: Floats) -> Edges:
    """From a kernel of another rank to a kernel that waited beside it; `unexplained` is the wait of every node."""
    computes = nodes.on_gpu & ~nodes.trace.is_communication[nodes.row] & (nodes.end > nodes.start)
    head = nodes.first[nodes.lane] == np.arange(len(nodes))
    held = np.flatnonzero(computes & ~head & (unexplained[: len(nodes)] > _SHARED["shortest_wait"]))
    parts = [Edges.of([], [], Rule.SHARED_GPU)]
    for ranks in _ranks_by_device(nodes):
        mine = held[np.isin(nodes.rank[held], ranks)]
        kernels = computes & np.isin(nodes.rank, ranks)
        begin = nodes.start[mine] - unexplained[mine].astype(np.int64)
        enough = len(mine) >= max(_SHARED["cases"], _SHARED["share_of_kernels"] * int(kernels.sum()))
        if len(ranks) > 1 and enough and _take_turns(nodes, kernels, mine, begin):
            parts += _beside(nodes, kernels, mine, begin)
    return Edges.join(parts)


def _ranks_by_device(nodes: Nodes) -> list[list[int]]:
    """Ranks whose kernels name the same device: only they can share a GPU."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, lanes in nodes.streams.items():
        found[nodes.trace.lanes[lanes[0]].process].append(rank)
    return list(found.values())


def _take_turns(nodes: Nodes, kernels: Bools, held: Ints, begin: Ints) -> bool:
    """Whether other ranks' kernels fill the unexplained waits far more than they run beside a rank's own kernels."""
    filled, beside, busy = 0.0, 0, 0
    for rank in np.unique(nodes.rank[held]).tolist():
        others, own = (_union(nodes, kernels & (nodes.rank != rank)), _union(nodes, kernels & (nodes.rank == rank)))
        mine = nodes.rank[held] == rank
        end = nodes.start[held[mine]]
        filled += float((_filled(others, begin[mine], end) / (end - begin[mine])).sum())  # every wait counts the same
        beside += int(_filled(others, *own).sum())
        busy += int((own[1] - own[0]).sum())
    return bool(1 - filled / len(held) < _SHARED["rest"] * (1 - beside / busy))


def _beside(nodes: Nodes, kernels: Bools, held: Ints, begin: Ints) -> Iterator[Edges]:
    """Edges from the last kernel of another rank that started, and from the last that ended, during each wait.

    A kernel that ran all the time lets the next in before its own end, once its last blocks have a place: of those, the
    one that ends first.
    """
    for rank in np.unique(nodes.rank[held]).tolist():
        mine = np.flatnonzero(nodes.rank[held] == rank)
        target, since, until = held[mine], begin[mine], nodes.start[held[mine]]
        others = np.flatnonzero(kernels & (nodes.rank != rank))
        if len(others) == 0:
            continue
        for from_start, times in ((True, nodes.start), (False, nodes.end)):
            others = others[np.argsort(times[others], kind="stable")]
            at = np.searchsorted(times[others], until, side="left") - 1
            found = (at >= 0) & (times[others[np.maximum(at, 0)]] > since)
            yield Edges.of(others[at[found]], target[found], Rule.SHARED_GPU, from_start)
        following = others[np.minimum(at + 1, len(others) - 1)]  # in the order of ends
        runs = (nodes.start[following] <= since) & (nodes.end[following] >= until)
        yield Edges.of(following[runs], target[runs], Rule.SHARED_GPU)


def _union(nodes: Nodes, which: Bools) -> tuple[Ints, Ints]:
    """The time that some nodes cover, as intervals that do not touch."""
    rows = np.flatnonzero(which)
    rows = rows[np.argsort(nodes.start[rows], kind="stable")]
    if len(rows) == 0:
        return nodes.start[rows], nodes.end[rows]
    end = np.maximum.accumulate(nodes.end[rows])
    begins = np.flatnonzero(np.concatenate([[True], nodes.start[rows][1:] > end[:-1]]))
    return nodes.start[rows][begins], end[np.concatenate([begins[1:] - 1, [len(rows) - 1]])]


def _filled(intervals: tuple[Ints, Ints], begin: Ints, end: Ints) -> Ints:
    """How much of each span from `begin` to `end` lies in the intervals."""
    start, stop = intervals
    if len(start) == 0:
        return np.zeros(len(begin), np.int64)
    before = np.concatenate([[0], np.cumsum(stop - start)])

    def until(time: Ints) -> Ints:
        at = np.searchsorted(start, time, side="right") - 1
        inside = np.minimum(time, stop[np.maximum(at, 0)]) - start[np.maximum(at, 0)]
        return np.where(at >= 0, before[np.maximum(at, 0)] + inside, 0)

    return until(end) - until(begin)
