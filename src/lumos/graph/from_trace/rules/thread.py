"""Across threads: forward → autograd → optimizer. A pause of one thread that another thread's work explains.

Kineto does not record that the main thread waits in `loss.backward()` while the autograd thread works, nor what wakes
the autograd thread. Both show as a pause in one thread, filled by the work of another that ends just before the pause
does. Such a pause is waiting; any other pause is work that was not recorded (Python), and stays in the graph as it is.
"""

from __future__ import annotations

import numpy as np

from lumos.graph.from_trace.nodes import Draft
from lumos.graph.graph import Edges, Rule
from lumos.trace.names import Category

SHORTEST_PAUSE = 100_000  # ns; a hand-over between threads costs tens of microseconds
COVERED = 0.5  # share of the pause during which the other thread was busy


def thread_edges(draft: Draft) -> Edges:
    """Edges from the last segment of a thread that goes idle to the pause it explains in another."""
    pauses = _pauses(draft)
    sources, targets = [], []
    for lanes in _working_threads(draft).values():
        if len(lanes) < 2:
            continue
        mine = np.concatenate([pauses[slice(*np.searchsorted(pauses, draft.first[[i, i + 1]]))] for i in lanes])
        for pause in mine:
            source = _explained_by(draft, int(pause), lanes, mine)
            if source >= 0:
                sources.append(source)
                targets.append(int(pause))
        for lane in lanes:  # the first thing a thread does may be what another one asked for
            head = int(draft.first[lane])
            source = _woken_by(draft, head, lanes, mine)
            if source >= 0:
                sources.append(source)
                targets.append(head)
    return Edges.of(sources, targets, Rule.THREAD)


def is_pause(draft: Draft) -> np.ndarray:
    """Segments of threads that belong to no operator and no call: Python, or waiting."""
    category = draft.trace.category[draft.row]
    return np.asarray(~draft.on_gpu & ((draft.row < 0) | (category == Category.NOTE)))


def _pauses(draft: Draft) -> np.ndarray:
    long = draft.end - draft.start >= SHORTEST_PAUSE
    return np.flatnonzero(is_pause(draft) & long)


def _working_threads(draft: Draft) -> dict[int, list[int]]:
    """The threads of every rank that have nodes, in the order of their lanes."""
    threads: dict[int, list[int]] = {}
    for index, lane in enumerate(draft.trace.lanes):
        if not lane.is_stream and draft.first[index + 1] > draft.first[index]:
            threads.setdefault(lane.rank, []).append(index)
    return threads


def _explained_by(draft: Draft, pause: int, lanes: list[int], pauses: np.ndarray) -> int:
    """The node whose end ended this pause: another thread fills most of it, then goes idle or ends."""
    start, end = int(draft.start[pause]), int(draft.end[pause])
    best, best_end = -1, start
    for lane in lanes:
        if lane == draft.lane[pause]:
            continue
        node = _last_busy_before(draft, lane, end, pauses)
        if node < 0 or draft.end[node] <= best_end:
            continue
        if _busy(draft, lane, start, end, pauses) >= COVERED * (end - start):
            best, best_end = node, int(draft.end[node])
    return best


def _woken_by(draft: Draft, head: int, lanes: list[int], pauses: np.ndarray) -> int:
    """The node of another thread that went idle last before a thread began; -1 where none did."""
    begin, best, best_end = int(draft.start[head]), -1, -1
    for lane in lanes:
        if lane == draft.lane[head] or draft.start[draft.first[lane]] >= begin:
            continue
        node = _last_busy_before(draft, lane, begin, pauses)
        if node >= 0 and draft.end[node] > best_end and begin - draft.end[node] < 20 * SHORTEST_PAUSE:
            best, best_end = node, int(draft.end[node])
    return best


def _last_busy_before(draft: Draft, lane: int, time: int, pauses: np.ndarray) -> int:
    """The last node of a lane before it went idle for good by a time; -1 where it is still busy then."""
    low, high = int(draft.first[lane]), int(draft.first[lane + 1])
    node = low + int(np.searchsorted(draft.start[low:high], time, side="left")) - 1
    if node < low:
        return -1
    at = int(np.searchsorted(pauses, node))
    if at < len(pauses) and pauses[at] == node:
        node -= 1  # the pause itself is not work
    elif draft.end[node] > time or (node + 1 < high and draft.start[node + 1] < time):
        return -1
    return node if node >= low and draft.end[node] < time else -1  # strictly: a tie could close a circle


def _busy(draft: Draft, lane: int, start: int, end: int, pauses: np.ndarray) -> int:
    """How long a lane worked between two times, its long pauses left out."""
    low, high = int(draft.first[lane]), int(draft.first[lane + 1])
    a = low + int(np.searchsorted(draft.end[low:high], start, side="right"))
    b = low + int(np.searchsorted(draft.start[low:high], end, side="left"))
    if b <= a:
        return 0
    covered = np.minimum(draft.end[a:b], end) - np.maximum(draft.start[a:b], start)
    idle = pauses[np.searchsorted(pauses, a) : np.searchsorted(pauses, b)]
    return int(covered.sum() - covered[idle - a].sum())
