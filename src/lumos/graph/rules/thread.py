"""Hand-over between threads (forward → autograd → optimizer): a pause of one thread that another's work explains.

Kineto does not record that the main thread waits in `loss.backward()` while the autograd thread works, nor what wakes
the autograd thread. Both show as a pause in one thread, filled by the work of another that ends just before the pause
does. Such a pause is waiting; any other pause is work that was not recorded (Python), and stays in the graph as it is.
A thread that waits for a gloo collective pauses until it ends.
"""

from __future__ import annotations

import numpy as np

from lumos.data_files import read_table
from lumos.graph.graph import Edges, Rule
from lumos.graph.rules.cpu_device import GLOO
from lumos.graph.rules.nodes import NEVER, Nodes
from lumos.trace.names import Category

_THREAD = read_table("trace_rules.toml")["thread"]
_LONGEST_GLOO_WAKE = read_table("trace_rules.toml")["cpu_device"]["longest_wake"]


def thread_edges(nodes: Nodes) -> Edges:
    """From the last segment of a thread that goes idle to the pause it explains in another, or to a thread's start."""
    pauses = _long_pauses(nodes)
    found: list[tuple[int, int]] = []
    for lanes in nodes.threads.values():
        if len(lanes) < 2:
            continue
        mine = np.concatenate([pauses[slice(*np.searchsorted(pauses, nodes.first[[i, i + 1]]))] for i in lanes])
        found += [(_explained_by(nodes, pause, lanes, mine), pause) for pause in mine.tolist()]
        heads = [int(nodes.first[lane]) for lane in lanes]  # the first thing a thread does may be on another's behalf
        work = np.concatenate([np.arange(nodes.first[lane], nodes.first[lane + 1]) for lane in lanes])
        by_end = work[np.argsort(nodes.end[work], kind="stable")]
        found += [(_woken_by(nodes, head, by_end, mine), head) for head in heads]
    return Edges.of_pairs([pair for pair in found if pair[0] >= 0], Rule.THREAD)


def gloo_wait_edges(nodes: Nodes) -> Edges:
    """From a collective of gloo to the pause of a thread that ends just after it."""
    trace = nodes.trace
    named = np.array([name.startswith(GLOO) for name in trace.names], bool)
    rows = np.flatnonzero((trace.category == Category.KERNEL) & named[trace.name] & (nodes.last_node >= 0))
    found = []
    for pause in _long_pauses(nodes).tolist() if len(rows) else []:
        mine = rows[trace.rank[rows] == nodes.rank[pause]]
        ends, end = nodes.end[nodes.last_node[mine]], nodes.end[pause]
        last = mine[(ends > nodes.start[pause]) & (ends < end) & (end - ends < _LONGEST_GLOO_WAKE)]
        if len(last):
            found.append((int(nodes.last_node[last[np.argmax(trace.end[last])]]), pause))
    return Edges.of_pairs(found, Rule.THREAD)


def _long_pauses(nodes: Nodes) -> np.ndarray:
    """Long segments of threads that belong to no operator and no call: Python, or waiting."""
    outside = (nodes.row < 0) | (nodes.trace.category[nodes.row] == Category.NOTE)
    return np.flatnonzero(~nodes.on_gpu & outside & (nodes.end - nodes.start >= _THREAD["shortest_pause"]))


def _explained_by(nodes: Nodes, pause: int, lanes: list[int], pauses: np.ndarray) -> int:
    """The node whose end ended this pause: another thread fills most of it, then goes idle or ends; else -1."""
    start, end = int(nodes.start[pause]), int(nodes.end[pause])
    best, best_end = -1, start
    among = np.array(lanes)
    first, last = nodes.start[nodes.first[among]], nodes.end[nodes.first[among + 1] - 1]
    there = np.minimum(last, end) - np.maximum(first, start) >= _THREAD["covered"] * (end - start)
    for lane in among[there].tolist():  # of thousands of threads, few were there for most of the pause
        if lane == nodes.lane[pause]:
            continue
        node = _last_busy_before(nodes, lane, end, pauses)
        if node < 0 or nodes.end[node] <= best_end:
            continue
        if _busy(nodes, lane, start, end, pauses) >= _THREAD["covered"] * (end - start):
            best, best_end = node, int(nodes.end[node])
    return best


def _woken_by(nodes: Nodes, head: int, by_end: np.ndarray, pauses: np.ndarray) -> int:
    """The node of another thread that went idle last before a thread began; -1 if none did.

    Threads are tried by when something of theirs last ended, the latest first: there may be thousands.
    """
    begin, best, best_end = int(nodes.start[head]), -1, NEVER
    window = np.searchsorted(nodes.end[by_end], [begin - _THREAD["longest_wake"], begin], side="left")
    recent = by_end[slice(*window)][::-1]
    lanes, at = np.unique(nodes.lane[recent], return_index=True)
    for i in np.lexsort((lanes, -nodes.end[recent[at]])).tolist():
        if nodes.end[recent[at[i]]] < best_end:
            break
        if lanes[i] == nodes.lane[head]:
            continue
        node = _last_busy_before(nodes, int(lanes[i]), begin, pauses)
        if node >= 0 and nodes.end[node] > best_end and begin - nodes.end[node] < _THREAD["longest_wake"]:
            best, best_end = node, int(nodes.end[node])
    return best


def _last_busy_before(nodes: Nodes, lane: int, time: int, pauses: np.ndarray) -> int:
    """The last node of a lane before it went idle for good by a time; -1 if it is still busy then."""
    low, high = int(nodes.first[lane]), int(nodes.first[lane + 1])
    node = low + int(np.searchsorted(nodes.start[low:high], time, side="left")) - 1
    if node < low:
        return -1
    at = int(np.searchsorted(pauses, node))
    if at < len(pauses) and pauses[at] == node:
        node -= 1  # the pause itself is not work
    elif nodes.end[node] > time or (node + 1 < high and nodes.start[node + 1] < time):
        return -1
    return node if node >= low and nodes.end[node] < time else -1  # strictly: a tie could close a cycle


def _busy(nodes: Nodes, lane: int, start: int, end: int, pauses: np.ndarray) -> int:
    """How long a lane worked between two times, its long pauses left out."""
    low, high = int(nodes.first[lane]), int(nodes.first[lane + 1])
    a = low + int(np.searchsorted(nodes.end[low:high], start, side="right"))
    b = low + int(np.searchsorted(nodes.start[low:high], end, side="left"))
    if b <= a:
        return 0
    covered = np.minimum(nodes.end[a:b], end) - np.maximum(nodes.start[a:b], start)
    idle = pauses[np.searchsorted(pauses, a) : np.searchsorted(pauses, b)]
    return int(covered.sum() - covered[idle - a].sum())
