"""Ranks that share a GPU, as they do under MPS: a kernel that may start has to wait for room.

Which GPU a rank ran on is not recorded reliably: device 0 may be another one for every process. Sharing shows. Waits
that nothing else explains lie where kernels of other ranks run (69–100 % of their time in jobs under MPS, against
19–52 % of the time of a rank's own kernels), and kernels of different ranks seldom run at the same time. On GPUs of
their own, ranks in step with one another run theirs together all the time (89–99 % in the public jobs).

In which order the GPU serves its clients is not recorded either, so a wait is tied to the last kernel of another rank
that started or ended before it was over. That one need not be the cause: the time of a wait is explained by the work
beside it, its end is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from lumos.data_files import read_table
from lumos.graph.from_trace.nodes import Nodes
from lumos.graph.graph import Bools, Edges, Floats, Ints, Rule

_SHARED = read_table("trace_rules.toml")["shared_gpu"]


def shared_gpu_edges(nodes: Nodes, unexplained: Floats) -> Edges:
    """From a kernel of another rank to a kernel that waited beside it; `unexplained` is the wait of every node."""
    head = nodes.first[nodes.lane] == np.arange(len(nodes))
    held = np.flatnonzero(nodes.on_gpu & ~head & (unexplained[: len(nodes)] > _SHARED["shortest_wait"]))
    computes = nodes.on_gpu & ~nodes.trace.is_communication[nodes.row] & (nodes.end > nodes.start)
    parts = [Edges.of([], [], Rule.SHARED_GPU)]
    for ranks in _ranks_by_device(nodes):
        mine = held[np.isin(nodes.rank[held], ranks)]
        kernels = computes & np.isin(nodes.rank, ranks)
        begin = nodes.start[mine] - unexplained[mine].astype(np.int64)
        if len(ranks) > 1 and len(mine) >= _SHARED["cases"] and _take_turns(nodes, kernels, mine, begin):
            parts += _last_before(nodes, kernels, mine, begin)
    return Edges.join(parts)


def _ranks_by_device(nodes: Nodes) -> list[list[int]]:
    """Ranks whose kernels name the same device: only they can share a GPU."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, lanes in nodes.streams.items():
        found[nodes.trace.lanes[lanes[0]].process].append(rank)
    return list(found.values())


def _take_turns(nodes: Nodes, kernels: Bools, held: Ints, begin: Ints) -> bool:
    """Whether other ranks' kernels fill the unexplained waits far more than they run beside a rank's own kernels."""
    wait_filled = wait_total = beside = busy = 0
    for rank in np.unique(nodes.rank[held]).tolist():
        others, own = (_union(nodes, kernels & (nodes.rank != rank)), _union(nodes, kernels & (nodes.rank == rank)))
        mine = nodes.rank[held] == rank
        wait_filled += _filled(others, begin[mine], nodes.start[held[mine]])
        wait_total += int((nodes.start[held[mine]] - begin[mine]).sum())
        beside += _filled(others, *own)
        busy += int((own[1] - own[0]).sum())
    if not wait_total or beside > _SHARED["most_beside"] * busy:
        return False
    return bool((1 - wait_filled / wait_total) < _SHARED["rest"] * (1 - beside / busy))


def _last_before(nodes: Nodes, kernels: Bools, held: Ints, begin: Ints) -> Iterator[Edges]:
    """Edges from the last end, and from the last start, of another rank's kernel during each wait."""
    for rank in np.unique(nodes.rank[held]).tolist():
        mine = np.flatnonzero(nodes.rank[held] == rank)
        others = np.flatnonzero(kernels & (nodes.rank != rank))
        for from_start, times in ((False, nodes.end), (True, nodes.start)):
            others = others[np.argsort(times[others], kind="stable")]
            at = np.searchsorted(times[others], nodes.start[held[mine]], side="left") - 1
            found = (at >= 0) & (times[others[np.maximum(at, 0)]] > begin[mine])
            yield Edges.of(others[at[found]], held[mine[found]], Rule.SHARED_GPU, from_start)


def _union(nodes: Nodes, which: Bools) -> tuple[Ints, Ints]:
    """The time that some nodes cover, as intervals that do not touch."""
    rows = np.flatnonzero(which)
    rows = rows[np.argsort(nodes.start[rows], kind="stable")]
    if len(rows) == 0:
        return nodes.start[rows], nodes.end[rows]
    end = np.maximum.accumulate(nodes.end[rows])
    begins = np.flatnonzero(np.concatenate([[True], nodes.start[rows][1:] > end[:-1]]))
    return nodes.start[rows][begins], end[np.concatenate([begins[1:] - 1, [len(rows) - 1]])]


def _filled(intervals: tuple[Ints, Ints], begin: Ints, end: Ints) -> int:
    """How much of the spans from `begin` to `end` lies in the intervals, in all."""
    start, stop = intervals
    if len(start) == 0:
        return 0
    before = np.concatenate([[0], np.cumsum(stop - start)])

    def until(time: Ints) -> Ints:
        at = np.searchsorted(start, time, side="right") - 1
        inside = np.minimum(time, stop[np.maximum(at, 0)]) - start[np.maximum(at, 0)]
        return np.where(at >= 0, before[np.maximum(at, 0)] + inside, 0)

    return int((until(end) - until(begin)).sum())
