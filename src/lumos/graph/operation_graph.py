"""The graph of an operation table: every worker of every step, with its passes, messages and collectives.

An operation is two nodes: its launch, which waits for what it depends on and then as long as its host took, and its
work. Operations of several workers (a send and its receive, a collective) meet in a node of their own between the two:

    worker 0, passes     [launch][forward  ]
    worker 0, sends                   └──►[launch]──┐      ┌►[transfer]
                                                 [meeting]
    worker 1, receives   [launch]───────────────────┘      └►[transfer]
    worker 1, passes                                             └──►[launch][forward  ]

A table may lack sends, receives or both. What these wait for then follows from the passes of the neighbouring stages,
of the same micro-batch (`_neighbours`).

Steps do not wait for one another: each begins at time zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumos.errors import CycleError, InputError
from lumos.graph.graph import Bools, Edges, Floats, Graph, Ints, Rule, make_graph
from lumos.trace.operations import COMPUTE, MESSAGES, REPLICA_COLLECTIVES, OperationTable, numbered, occurrence

_LANES = 6  # of a worker in a step: passes and what closes the step, four kinds of messages, collectives of replicas
_CLOCK_S = 5e-5  # operations of one worker are in order up to this
_SKEW_S = 0.01  # clocks of workers agree up to this
_AFTER_GRADIENTS = ("optimizer-clip-main-grad", "optimizer")
_NS = 1e9


@dataclass(frozen=True)
class OperationGraph:
    """A graph, and where the operations of the table are in it; times are nanoseconds."""

    graph: Graph
    launch: Ints  # the node of each row's launch
    work: Ints  # the node of each row's work
    meets: Bools  # rows that wait for other workers
    delay: Floats  # recorded: from when a row could have begun to when it did
    duration: Floats  # recorded: without the waiting for others
    step_nodes: Ints  # nodes of step i are step_nodes[i] … step_nodes[i + 1] - 1, meetings aside
    warnings: tuple[str, ...]


def operation_graph(table: OperationTable) -> OperationGraph:
    """What waits for what in the job of a table: `simulate(operation_graph(table).graph)` replays all its steps."""
    lane = (table.step_index * len(table.workers) + table.worker) * _LANES + _lane_of_type(table)[table.kind]
    order = np.argsort(lane, kind="stable")
    place = np.empty(len(table), np.int64)
    place[order] = np.arange(len(table))
    launch, work = 2 * place, 2 * place + 1
    warnings: list[str] = []
    passes = _Passes(table)
    messages = _messages(table, passes, warnings)
    waits = np.concatenate([messages.waits, _first_backward(table, passes), _replica_waits(table, passes)], axis=1)
    meeting = _meetings(table, messages.meeting)
    meets = meeting >= 0
    count = int(meeting.max(initial=-1)) + 1
    hub = 2 * len(table) + meeting[meets]
    edges = Edges.join([
        Edges.of(work[waits[0]], launch[waits[1]], Rule.EVENT),
        Edges.of(work[messages.instead[0]], 2 * len(table) + messages.instead[1], Rule.EVENT),
        Edges.of(launch[meets], hub, Rule.COLLECTIVE),
        Edges.of(hub, work[meets], Rule.COLLECTIVE),
    ])  # fmt: skip
    _, size = np.unique(lane, return_counts=True)
    first = np.concatenate([[0], np.cumsum(2 * size), 2 * len(table) + 1 + np.arange(count)])
    delay, duration = _launch_delay(table, waits, order, lane), _without_waiting(table, meeting, messages.instead)
    nodes = np.zeros(2 * len(table) + count)
    nodes[launch], nodes[work] = delay, duration
    graph = make_graph(first, nodes, edges)
    try:
        _ = graph.order
    except CycleError:
        raise InputError(
            f"{table.name}: the order of its operations contradicts itself, so that no worker could go on; check that "
            "seq_id, mc and mb_id of passes and the order of messages (start_ts) belong to one pipeline schedule"
        ) from None
    ends = np.concatenate([[0], np.cumsum(2 * np.bincount(table.step_index))])
    return OperationGraph(graph, launch, work, meets, delay, duration, ends, tuple(warnings))


def meetings_of(table: OperationTable) -> Ints:
    """The number of the meeting that each row is part of: a message or a collective; -1 for work of one worker alone.

    Who comes last does not wait: the shortest time of a meeting's rows is the transfer.
    """
    return _meetings(table, _messages(table, _Passes(table), []).meeting)


def _lane_of_type(table: OperationTable) -> Ints:
    """The lane of each type: messages of one kind are a stream, and so are collectives that overlap with passes."""
    lane = {name: 1 + number for number, name in enumerate(MESSAGES)}
    lane |= {"params-all-gather": 5, "grads-reduce-scatter": 5}
    return np.array([lane.get(name, 0) for name in table.types])


class _Passes:
    """Forward and backward passes of each worker in each step; rows of a table are in this order."""

    def __init__(self, table: OperationTable) -> None:
        self.cell = table.step_index * len(table.workers) + table.worker  # one worker in one step
        self.cells = int(self.cell.max()) + 1
        self.rows = [np.flatnonzero(table.of_type(name)) for name in COMPUTE]
        self.first = [np.searchsorted(self.cell[rows], np.arange(self.cells + 1)) for rows in self.rows]


@dataclass(frozen=True)
class _Messages:
    waits: Ints  # (2, n): the second row waits for the first
    meeting: Ints  # number of the meeting of each row; -1 without
    instead: Ints  # (2, n): passes that stand for a message the table lacks, and the number of the meeting


def _messages(table: OperationTable, passes: _Passes, warnings: list[str]) -> _Messages:
    """Which pass each message belongs to, and which send belongs to which receive."""
    waits: list[Ints] = []
    of_pass = np.full(len(table), -1)
    for name in MESSAGES:
        kind = int(name.startswith("backward"))
        rows, matched, before = _matched_passes(table, passes, name, kind)
        of_pass[rows] = matched
        if name.endswith("send"):
            waits.append(np.stack((matched, rows)))
        else:
            waits.append(np.stack((rows, matched)))
            known = before >= 0
            waits.append(np.stack((before[known], rows[known])))
    meeting, alone = _paired(table, of_pass)
    instead = [np.zeros((2, 0), np.int64)]
    lacking = [kind for kind in (0, 1) if table.pp > 1 and not (meeting[table.of_type(*_names(kind))] >= 0).any()]
    for kind in lacking:
        derived = _without_counterparts(table, passes, of_pass, kind, meeting, warnings)
        alone -= int(((derived.meeting >= 0) & (meeting < 0)).sum())
        meeting = derived.meeting
        waits.append(derived.waits)
        instead.append(derived.instead)
    if lacking:
        warnings.append(_lacking(table, lacking))
    if alone:
        warnings.append(f"{alone:,} messages have no counterpart in the table: they keep their recorded time")
    return _Messages(np.concatenate(waits, axis=1), meeting, np.concatenate(instead, axis=1))


def _names(kind: int) -> tuple[str, str]:
    """The send and the receive of forward (0) or backward (1) passes."""
    send, receive = MESSAGES[2 * kind : 2 * kind + 2]
    return send, receive


def _lacking(table: OperationTable, kinds: list[int]) -> str:
    """What is said of a table without sends, receives or both."""
    missing = [name for kind in kinds for name in _names(kind) if not table.of_type(name).any()]
    what = f"no {', '.join(missing)}" if missing else "no send has a receive"
    if len(missing) == len(MESSAGES):
        what = "no messages between stages"
    bare = any(set(_names(kind)) <= set(missing) for kind in kinds)
    transfers = "; transfers between them count as delays of launches" if bare else ""
    return f"{what}: passes wait for the same micro-batch in the neighbouring stage instead{transfers}"


def _without_counterparts(
    table: OperationTable, passes: _Passes, of_pass: Ints, kind: int, meeting: Ints, warnings: list[str]
) -> _Messages:
    """Messages of one direction of which sends, receives or both lack, with what these would have waited for.

    A missing send would have waited for its pass, a missing receive for the pass of the same kind before its own.
    Where both lack, passes wait for one another.
    """
    own = passes.rows[kind]
    sender, receiver = _neighbours(table, own, kind)
    _require_order(table, sender, receiver, kind)
    needing = _place(table, own, kind) > 0
    if len(receiver) < int(needing.sum()):
        alone = int(needing.sum()) - len(receiver)
        warnings.append(f"{alone:,} {COMPUTE[kind]} passes lack that of the neighbouring stage: they wait for nobody")
    send, receive, before = (np.full(len(table), -1) for _ in range(3))
    for row_of, name in zip((send, receive), _names(kind), strict=True):
        rows = np.flatnonzero(table.of_type(name) & (of_pass >= 0))
        row_of[of_pass[rows]] = rows
    same = passes.cell[own[1:]] == passes.cell[own[:-1]]
    before[own[1:][same]] = own[:-1][same]
    sent, received = send[sender] >= 0, receive[receiver] >= 0
    source = np.where(sent, send[sender], sender)
    waits = np.stack((source, receiver))[:, sent | ~received]
    rows = np.concatenate([send[sender[sent]], receive[receiver[received]]])
    other = np.concatenate([before[receiver[sent]], sender[received]])
    meeting, first = meeting.copy(), int(meeting.max(initial=-1)) + 1
    meeting[rows] = first + np.arange(len(rows))
    return _Messages(waits, meeting, np.stack((other, meeting[rows]))[:, other >= 0])


def _neighbours(table: OperationTable, own: Ints, kind: int) -> tuple[Ints, Ints]:
    """Passes of one kind that another one needs, and those: of the same micro-batch in the next virtual stage.

    Where micro-batches are not known, the order of passes tells.
    """
    place = _place(table, own, kind)
    where = (table.step_index[own], table.dp_rank[own], place)
    best = np.zeros((2, 0), np.int64)
    for number in (table.micro_batch[own], occurrence(numbered(*where))):
        key = np.stack((*where[:2], number, place))
        wanted = np.concatenate([key, key + np.array([[0], [0], [0], [1]])], axis=1)
        group = numbered(*wanted)
        count = np.bincount(group)
        receiver, sender = (np.full(len(count), -1) for _ in range(2))
        receiver[group[: len(own)]], sender[group[len(own) :]] = own, own
        found = (count == 2) & (receiver >= 0) & (sender >= 0)
        if int(found.sum()) > best.shape[1]:
            best = np.stack((sender[found], receiver[found]))
        if best.shape[1] == int((place > 0).sum()):
            break
    return best[0], best[1]


def _place(table: OperationTable, own: Ints, kind: int) -> Ints:
    """How many virtual stages a micro-batch has passed before each of some passes; backward, from the last."""
    place = table.chunk[own] * table.pp + table.stage[own]
    return table.vpp * table.pp - 1 - place if kind else place


def _require_order(table: OperationTable, sender: Ints, receiver: Ints, kind: int) -> None:
    """Refuse passes that begin before those in the neighbouring stage that they need."""
    early = table.end[sender] - table.start[receiver] > _SKEW_S
    if 10 * int(early.sum()) <= len(early):
        return
    one, other = receiver[np.argmax(early)], sender[np.argmax(early)]
    raise InputError(
        f"{table.name}: no messages tell what passes wait for, and {COMPUTE[kind]} of micro-batch "
        f"{table.micro_batch[one]} of dp_rank {table.dp_rank[one]}, step {table.step[one]}, begins in stage "
        f"{table.stage[one]} before it ends in stage {table.stage[other]}; give sends and receives, or check stage, mc "
        "and mb_id"
    )


def _matched_passes(table: OperationTable, passes: _Passes, name: str, kind: int) -> tuple[Ints, Ints, Ints]:
    """Messages of one kind, the pass of each, and the pass before that (-1 for the first).

    The n-th message belongs to the n-th pass, or if there are only as many as passes with a neighbour on that side, to
    the n-th of these. Profilers also record messages that carry nothing: a receive after the last pass has begun, a
    send before the first has ended. The first receive of the first stage may be missing.
    """
    receives = name.endswith("recv")
    rows, cell, own, first = _carrying(table, passes, name, kind)
    have, count = np.bincount(cell, minlength=passes.cells), np.diff(first)
    number = np.arange(len(rows)) - np.searchsorted(cell, cell)
    ends = 0 if receives == (kind == 0) else table.vpp * table.pp - 1  # the virtual stage without such a neighbour
    place = table.chunk[own] * table.pp + table.stage[own]
    needing = np.flatnonzero(place != ends)
    bounds = np.searchsorted(passes.cell[own[needing]], np.arange(passes.cells + 1))
    exact = ((have == np.diff(bounds)) & (have != count))[cell]
    if receives:
        number += (~exact & (have + 1 == count)[cell]).astype(np.int64)
    fits = number < count[cell]
    rows, cell, number, exact = rows[fits], cell[fits], number[fits], exact[fits]
    at = first[cell] + number
    at[exact] = needing[bounds[cell[exact]] + number[exact]]
    before = np.where(at > first[cell], own[np.maximum(at - 1, 0)], -1)
    return rows, own[at], before


def _carrying(table: OperationTable, passes: _Passes, name: str, kind: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Messages of one kind that may carry something and their cells; passes of that kind, and where cells begin."""
    rows = np.flatnonzero(table.of_type(name))
    own, first = passes.rows[kind], passes.first[kind]
    rows = rows[np.diff(first)[passes.cell[rows]] > 0]
    cell = passes.cell[rows]
    if name.endswith("recv"):
        real = table.start[rows] <= table.start[own[first[cell + 1] - 1]] + _CLOCK_S
    else:
        real = table.end[rows] >= table.end[own[first[cell]]] - _CLOCK_S
    return rows[real], cell[real], own, first


def _paired(table: OperationTable, of_pass: Ints) -> tuple[Ints, int]:
    """The meeting of each message, and how many that should have one do not.

    A send of one virtual stage meets the receive of the next, of the same micro-batch, or where micro-batches are not
    known, in the same order.
    """
    rows = np.flatnonzero(of_pass >= 0)
    of_pass = of_pass[rows]
    name = np.array(table.types)[table.kind[rows]]
    backward, send = np.char.startswith(name, "backward"), np.char.endswith(name, "send")
    place = table.chunk[of_pass] * table.pp + table.stage[of_pass]
    sender = np.where(send, place, np.where(backward, place + 1, place - 1))
    peer = np.where(backward, sender - 1, sender + 1)
    real = (np.minimum(sender, peer) >= 0) & (np.maximum(sender, peer) < table.vpp * table.pp)
    rows, of_pass, backward, send, sender = rows[real], of_pass[real], backward[real], send[real], sender[real]
    best, most = np.full(len(table), -1), 0
    where = (table.step_index[rows], table.dp_rank[rows], backward, sender)
    for number in (table.micro_batch[of_pass], occurrence(numbered(*where, send))):
        key = numbered(*where, number)
        pair = ((np.bincount(key) == 2) & (np.bincount(key, weights=send) == 1))[key]
        if int(pair.sum()) > most:
            most = int(pair.sum())
            best = np.full(len(table), -1)
            best[rows[pair]] = np.unique(key[pair], return_inverse=True)[1]
        if most == len(rows):
            break
    return best, len(rows) - most


def _first_backward(table: OperationTable, passes: _Passes) -> Ints:
    """The first messages of the backward pass are issued in the warm-up: two passes before the first backward."""
    every = np.sort(np.concatenate(passes.rows))
    number = np.arange(len(every)) - np.searchsorted(passes.cell[every], passes.cell[every])
    place = np.zeros(len(table), np.int64)
    place[every] = np.arange(len(every))
    begins = _lookup(passes.rows[1], passes.cell, passes.cells, last=False)
    begins[begins >= 0] = place[begins[begins >= 0]]
    early = (begins >= 0) & (number[np.maximum(begins, 0)] >= 2)
    waited = np.where(early, every[np.maximum(begins - 2, 0)], -1)
    messages = [np.flatnonzero(table.of_type(name)) for name in ("backward-send", "backward-recv")]
    firsts = [_lookup(rows, passes.cell, passes.cells, last=False) for rows in messages]
    return np.concatenate([_where_known(waited, first) for first in firsts], axis=1)


def _replica_waits(table: OperationTable, passes: _Passes) -> Ints:
    """Passes wait for their parameters, gradients for their passes, and what closes the step for the gradients."""
    cell, cells = passes.cell, passes.cells
    slot, slots = cell * table.vpp + np.maximum(table.chunk, 0), cells * table.vpp  # one chunk of a worker in a step
    gathers, scatters = (np.flatnonzero(table.of_type(name)) for name in REPLICA_COLLECTIVES[:2])
    waits = [
        _where_known(_lookup(gathers, slot, slots, last=True), _lookup(passes.rows[0], slot, slots, last=False)),
        _where_known(_lookup(passes.rows[1], slot, slots, last=True), _lookup(scatters, slot, slots, last=False)),
    ]
    late = table.of_type(*_AFTER_GRADIENTS)
    closing = (_lane_of_type(table)[table.kind] == 0) & ~table.of_type(*COMPUTE)
    begun, done = (_lookup(scatters, cell, cells, last=last) for last in (False, True))
    if _gradients_overlap(table, passes, begun):
        after = np.flatnonzero(closing & ~table.of_type("gc"))
    else:
        after = np.flatnonzero(late)
        waits.append(_where_known(_lookup(np.flatnonzero(closing & ~late), cell, cells, last=True), begun))
    waits.append(_where_known(done, _lookup(after, cell, cells, last=False)))
    return np.concatenate(waits, axis=1)


def _gradients_overlap(table: OperationTable, passes: _Passes, begun: Ints) -> bool:
    """Whether gradients are reduced while passes still run, or after all of them and what follows them."""
    if "separate-grads-all-reduce" in table.types:
        return True
    last = _lookup(np.sort(np.concatenate(passes.rows)), passes.cell, passes.cells, last=True)
    both = (begun >= 0) & (last >= 0)
    return bool(np.any(table.start[begun[both]] < table.start[last[both]] - _CLOCK_S))


def _lookup(rows: Ints, key: Ints, size: int, last: bool) -> Ints:
    """For every key, the first or last of some rows that has it; -1 where none has."""
    found = np.full(size, -1)
    ordered = rows if last else rows[::-1]
    found[key[ordered]] = ordered  # the last assignment stays
    return found


def _where_known(source: Ints, target: Ints) -> Ints:
    return np.stack((source, target))[:, (source >= 0) & (target >= 0)]


def _meetings(table: OperationTable, messages: Ints) -> Ints:
    """The meeting of each row: that of its message, or of its collective; -1 for work of one worker alone."""
    meeting = messages.copy()
    replicas = table.of_type(*REPLICA_COLLECTIVES)
    ends = table.of_type("embedding-grads-all-reduce")
    everyone = table.of_type("optimizer-clip-main-grad")
    rows = np.flatnonzero(replicas | ends | everyone)
    stage = np.where(replicas, table.stage, -1)
    replica = np.where(ends, table.dp_rank, -1)
    columns = (table.step_index, table.kind, table.sequence, stage, replica)
    meeting[rows] = int(messages.max(initial=-1)) + 1 + numbered(*(column[rows] for column in columns))
    return meeting


def _without_waiting(table: OperationTable, meeting: Ints, instead: Ints) -> Floats:
    """Durations; of what meets others, from when the last of them has arrived: the transfer.

    Where clocks of workers differ, transfers in one direction seem longer, in the other shorter or even negative. The
    sum is right, so both are kept, up to what clocks differ by.
    """
    meets = meeting >= 0
    arrived = np.zeros(int(meeting.max(initial=-1)) + 1)
    np.maximum.at(arrived, meeting[meets], table.start[meets])
    np.maximum.at(arrived, instead[1], table.end[instead[0]])
    duration = table.duration.copy()
    duration[meets] = _within_skew(table.end[meets] - arrived[meeting[meets]])
    return duration * _NS


def _launch_delay(table: OperationTable, waits: Ints, order: Ints, lane: Ints) -> Floats:
    """From the end of what a row waits for, or the beginning of its step, to its start."""
    ready = np.zeros(len(table))
    np.maximum.at(ready, waits[1], table.end[waits[0]])
    same = lane[order[1:]] == lane[order[:-1]]
    np.maximum.at(ready, order[1:][same], table.end[order[:-1][same]])
    return _within_skew(table.start - ready) * _NS


def _within_skew(seconds: Floats) -> Floats:
    """Times; what is more negative than clocks differ by is none."""
    return np.where(seconds > -_SKEW_S, seconds, 0.0)
