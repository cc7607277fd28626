"""The loop over the interruptions of a run, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.graph.compiled_loops import compiled, compiled_into

Array = NDArray[Any]

PARTS = ("productive", "lost", "detection", "restart", "checkpoints", "waiting", "fewer_replicas")
"""Where the seconds of a run go; they add up to it. The last is what training takes longer with fewer replicas."""
COUNTS = ("failures", "planned_stops", "returns", "failed_nodes", "waits")
"""Of a run; the first three interrupt it. A return: the job stops to take a repaired node back (elastic jobs)."""

PRODUCTIVE, LOST, DETECTION, RESTART, CHECKPOINTS, WAITING, FEWER = range(7)
FAILURES, STOPS, RETURNS, FAILED_NODES, WAITS = range(5)
ATTEMPTS, CAUSES, RESTARTS = range(3)  # streams of random numbers
FREE, MISSING, HEAD, TAIL = range(4)  # of nodes: spares, those that the job lacks, those in repair (a ring)


@compiled_into
def _uniform(state: Array, stream: int) -> float:
    """The next number of a stream, at least 0 and less than 1 (splitmix64)."""
    state[stream] += np.uint64(0x9E3779B97F4A7C15)
    z = state[stream]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled_into
def _until_next(state: Array, stream: int, rate: float) -> float:
    """Seconds to the next event of a Poisson process."""
    uniform = _uniform(state, stream)
    return -np.log(1.0 - uniform) / rate if rate > 0 else np.inf


@compiled_into
def _take_back(nodes: Array, returns: Array, clock: float) -> None:
    """Nodes whose repair is over: the job has them back if it lacks some; otherwise they are spares."""
    while nodes[TAIL] > nodes[HEAD] and returns[nodes[HEAD] % len(returns)] <= clock:
        nodes[HEAD] += 1
        if nodes[MISSING] > 0:
            nodes[MISSING] -= 1
        else:
            nodes[FREE] += 1


@compiled_into
def _replace(nodes: Array, returns: Array, clock: float, repair: float, replicas: int, lost_replicas: int) -> float:
    """Replace a failed node: by a spare, by none (with fewer replicas), or by waiting, for the seconds returned."""
    _take_back(nodes, returns, clock)
    returns[nodes[TAIL] % len(returns)] = clock + repair
    nodes[TAIL] += 1
    if nodes[FREE] > 0:
        nodes[FREE] -= 1
        return 0.0
    if (nodes[MISSING] + 1) * lost_replicas < replicas:
        nodes[MISSING] += 1
        return 0.0
    back = returns[nodes[HEAD] % len(returns)]
    nodes[HEAD] += 1
    return float(max(back - clock, 0.0))


@compiled_into
def _recover(
    spent: Array, counted: Array, state: Array, nodes: Array, returns: Array, clock: float, rates: Array, times: Array,
    pool: Array, failed: bool, takes_node: bool,
) -> None:  # fmt: skip
    """Detect a failure (or not, after a planned stop), replace its node, restart until that succeeds."""
    detection, restart, repair = times[0], times[1], times[4]
    failing = rates[0] + rates[1]
    while True:
        if takes_node:
            counted[FAILED_NODES] += 1
            if pool[0] >= 0:
                waited = _replace(nodes, returns, clock, repair, pool[1], pool[2])
                counted[WAITS] += waited > 0
                spent[WAITING] += waited
                clock += waited
        if failed:
            spent[DETECTION] += detection
            clock += detection
        again = _until_next(state, RESTARTS, failing)
        spent[RESTART] += min(again, restart)
        clock += min(again, restart)
        if again >= restart:
            return
        counted[FAILURES] += 1
        failed = True
        takes_node = _uniform(state, RESTARTS) * failing < rates[0]


@compiled_into
def _attempt(
    spent: Array, left: float, speed: float, length: float, stops: bool, interval: float, times: Array
) -> float:
    """Train for `length` seconds, until a failure or a planned stop; the answer is the work that is kept."""
    pause, lag, trained = times[2], times[3], interval / speed
    period = trained + pause
    if stops:
        done = np.floor(length / period)
        kept = min(done * interval + min(length - done * period, trained) * speed, left)
        spent[CHECKPOINTS] = max(length - kept / speed, 0.0) + pause + lag
    else:
        done = max(np.floor((length - lag) / period), 0.0)
        kept = min(done * interval, left)
        spent[CHECKPOINTS] = done * pause
        spent[LOST] = max(length - kept / speed - done * pause, 0.0)
    spent[PRODUCTIVE], spent[FEWER] = kept, kept / speed - kept
    return float(kept)


@compiled_into
def _run(
    left: float, state: Array, rates: Array, times: Array, pool: Array, interval: float, parts: Array, counted: Array,
    log: Array,
) -> int:  # fmt: skip
    """One run; the answer is the number of rows in `log`, one an attempt."""
    every, failing, pause = rates[0] + rates[1] + rates[2], rates[0] + rates[1], times[2]
    nodes, returns = np.zeros(4, np.int64), np.zeros(max(pool[0], 0) + pool[1] + 2)
    nodes[FREE] = max(pool[0], 0)
    clock, rows = 0.0, 0
    while True:
        _take_back(nodes, returns, clock)
        spent = np.zeros(7)
        speed = 1.0 - nodes[MISSING] * pool[2] / pool[1] if nodes[MISSING] > 0 else 1.0
        segments = max(np.ceil(left / interval - 1e-9), 1.0)
        length = _until_next(state, ATTEMPTS, every)
        rejoin = returns[nodes[HEAD] % len(returns)] - clock if nodes[MISSING] > 0 else np.inf
        ends = left / speed + segments * pause <= min(length, rejoin)
        if ends:
            spent[PRODUCTIVE], spent[FEWER], spent[CHECKPOINTS] = left, left / speed - left, segments * pause
        else:
            cause = _uniform(state, CAUSES) * every
            stops = rejoin < length or cause >= failing
            counted[RETURNS if rejoin < length else STOPS if stops else FAILURES] += 1
            left -= _attempt(spent, left, speed, min(length, rejoin), stops, interval, times)
            takes_node = not stops and cause < rates[0]
            now = clock + spent.sum()
            _recover(spent, counted, state, nodes, returns, now, rates, times, pool, not stops, takes_node)
        clock += spent.sum()
        parts += spent
        if rows < len(log):
            log[rows] = spent
            rows += 1
        if ends:
            return rows


@compiled
def simulate_runs(
    work: Array, first: int, seed: int, rates: Array, times: Array, pool: Array, interval: float, parts: Array,
    counts: Array, log: Array,
) -> int:  # fmt: skip
    """Fill `parts` (runs, PARTS) with seconds and `counts` (runs, COUNTS); `log` with the attempts of the first run.

    `work` has the seconds of training of every run. `rates`: per second, of failures that take a node, of others, of
    planned stops. `times`: detection, restart, pause and lag of a checkpoint, repair. `pool`: spares (-1: always one
    more), replicas (0: wait for a node where there is no spare), replicas that a missing node takes with it. Runs are
    numbered from `first`, and have random numbers of their own, in streams for attempts, causes and restarts: so two
    settings see the same failures. The answer is the number of rows in `log`.
    """
    rows = 0
    for run in range(len(work)):
        state = np.zeros(3, np.uint64)
        for stream in range(3):
            state[stream] = np.uint64((seed * 1_000_003 + first + run) * 3 + stream) * np.uint64(0xD1342543DE82EF95)
            _uniform(state, stream)
        used = _run(
            work[run], state, rates, times, pool, interval, parts[run], counts[run], log if run == 0 else log[:0]
        )
        rows = used if run == 0 else rows
    return rows
