"""The inner loops of Monte Carlo steps, compiled: the pace of ranks that meet, and steps whose times are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.graph.compiled_loops import compiled, compiled_into

Array = NDArray[Any]


@compiled
def add_drawn(to: Array, scores: Array, logs: Array, furthest: float, times: int) -> None:
    """Add to rows what is drawn for them: the value of `logs` at each score, between -furthest and furthest.

    `times` rows of `to` share a row of scores.
    """
    scale = (len(logs) - 1) / (2 * furthest)
    for row in range(len(to)):
        for k in range(to.shape[1]):
            place = min(max((scores[row // times, k] + furthest) * scale, 0.0), len(logs) - 1.001)
            at = int(place)
            to[row, k] += logs[at] + (place - at) * (logs[at + 1] - logs[at])


@compiled
def slowest_paces(
    logs: Array, most: int, log_share: Array, low: float, high: float, points: Array, mean: Array, cv: Array
) -> tuple[Array, Array]:
    """How fast ranks that meet in every pass are together: (factor, row of a table of factors to draw from).

    `logs` has the logarithm of every rank's own factor, (groups, ranks). A pass of a rank has another factor, whose
    logarithm is distributed as `log_share` says: logarithms of the share below each of its equidistant points between
    `low` and `high`. The slowest rank of each pass decides; its distribution is described by its mean and its relative
    spread. Rows are distributions of the slowest of so many equal ranks, of which `mean` and `cv` are known; the last
    row is that of `most` equal ranks. `points`: where the distribution is worked out, above the slowest rank's own.
    """
    groups, ranks = logs.shape
    factor, row = np.empty(groups), np.zeros(groups, np.int32)
    scale = (len(log_share) - 1) / (high - low) if high > low else 0.0
    bins = 128  # many ranks are counted by their factors
    value, count = np.empty(max(bins, ranks)), np.ones(max(bins, ranks))
    for g in range(groups):
        top, bottom = logs[g].max(), logs[g].min()
        if scale == 0.0 or ranks == 1 or top == bottom:
            factor[g] = np.exp(top)
            row[g] = most if ranks > 1 and top == bottom else 0
            continue
        kinds = ranks
        if ranks > bins:
            kinds, width = bins, (top - bottom) / bins
            for k in range(bins):
                count[k], value[k] = 0.0, bottom + (k + 0.5) * width
            for k in range(ranks):
                count[min(bins - 1, int((logs[g, k] - bottom) / width))] += 1.0
        else:
            for k in range(ranks):
                value[k] = logs[g, k]
        below, first, second = 0.0, 0.0, 0.0
        for p in range(len(points)):
            total = 0.0
            for k in range(kinds):
                place = (top + points[p] - value[k] - low) * scale
                if place < len(log_share) - 1:
                    at = max(0, int(place))
                    total += count[k] * (log_share[at] + max(0.0, place - at) * (log_share[at + 1] - log_share[at]))
            share = np.exp(total)
            length = np.exp(points[max(0, p - 1)] / 2 + points[p] / 2)
            first += (share - below) * length
            second += (share - below) * length * length
            below = share
        spread = np.sqrt(max(0.0, second / below - (first / below) ** 2)) / (first / below)
        best = 0
        for r in range(1, most + 1):
            if abs(cv[r] - spread) < abs(cv[best] - spread):
                best = r
        row[g], factor[g] = best, np.exp(top) * first / below / mean[best]
    return factor, row


# What is drawn for every stage and column: factors on all GPU time, on the host, on communication inside passes and on
# messages with the stage before and with the next, and nanoseconds of a pause; and the row of `tables` for a pass, and
# the node that the pause is in.
PACE, HOST, INSIDE, BEFORE, NEXT, PAUSE = range(6)
ROW, PAUSED = range(2)
_BITS = np.uint64(52)  # the upper twelve choose an entry of a table
_OTHER_BITS, _ENTRIES = np.uint64(40), np.uint64(4095)  # and the twelve below them one that is independent of it


@compiled_into
def _next(state: Any) -> Any:
    """The random number after this one."""
    return state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)


@compiled
def pass_sums(order: Array, tasks: Array, row: Array, tables: Array, states: Array) -> Array:
    """(stages, columns): GPU time of all passes as `drawn_spans` draws them, over that without what is drawn."""
    drawn, plain, held = np.zeros(row.shape), np.zeros(len(row)), np.zeros(row.shape, np.int64)
    state = states.copy()
    for node in order:
        task = tasks[node]
        work, stage = task.length * task.gpu, task.stage
        if task.gpu + task.host + task.within > 0.0:
            plain[stage] += work
            for w in range(row.shape[1]):
                if task.fresh:
                    state[w] = _next(state[w])
                if task.fresh and task.gpu > 0.0:
                    held[stage, w] = state[w] >> _BITS
                drawn[stage, w] += work * tables[row[stage, w], held[stage, w]]
    for stage in range(len(row)):
        for w in range(row.shape[1]):
            drawn[stage, w] = drawn[stage, w] / plain[stage] if plain[stage] > 0.0 else 1.0
    return drawn


@compiled_into
def _wait(edge: Any, here: int, there: int, reached: Array, drawn: Array, chances: Array, messages: Array,
          time: Array) -> None:  # fmt: skip
    """Every column waits for another node, in the stage `there`; a message between stages takes as long as drawn."""
    if not edge.is_message:
        for w in range(len(time)):
            time[w] = max(time[w], reached[w] + edge.lag)
        return
    mine, other = (NEXT, BEFORE) if (there - here) % drawn.shape[1] == 1 else (BEFORE, NEXT)
    for w in range(len(time)):
        messages[w] = _next(messages[w])
        far = max(drawn[mine, here, w], drawn[other, there, w])
        time[w] = max(time[w], reached[w] + edge.lag * far * chances[messages[w] >> _BITS])


@compiled_into
def _work(node: int, task: Any, drawn: Array, chosen: Array, work: Array, tables: Array, inner: float, states: Array,
          held: Array, time: Array, end: Array) -> None:  # fmt: skip
    """A part of a pass: GPU, host and communication inside it, each with its factor; a pause delays its beginning."""
    stage, hosts, length, gpu, host, within = task.stage, len(tables) - 1, task.length, task.gpu, task.host, task.within
    micro = task.micro if len(work) else -1
    if task.fresh:
        for w in range(len(time)):
            states[w] = _next(states[w])
    if task.fresh and gpu > 0.0:
        for w in range(len(time)):
            held[stage, w] = states[w] >> _BITS
    for w in range(len(time)):
        factor = 1.0
        if gpu > 0.0:
            pace = drawn[PACE, stage, w] * tables[chosen[ROW, stage, w], held[stage, w]]
            if micro >= 0:
                pace *= work[micro, w]
            factor += gpu * (pace - 1.0)
            if chosen[PAUSED, stage, w] == node:
                time[w] += drawn[PAUSE, stage, w]
        if host > 0.0:
            factor += host * (drawn[HOST, stage, w] * tables[hosts, (states[w] >> _OTHER_BITS) & _ENTRIES] - 1.0)
        if within > 0.0:
            factor += within * (inner * drawn[INSIDE, stage, w] - 1.0)
        end[node, w] = time[w] + length * factor


@compiled_into
def _meet(node: int, task: Any, chances: Array, shared: Array, lanes: int, near: int, time: Array, end: Array) -> None:
    """A collective: those who meet begin with the last of them, and take equally long."""
    group = 1 if task.meets < 2 else (lanes if task.meets == 2 else near)
    for first in range(0, len(time), group):
        if task.meets > 0 and (group > 1 or first % lanes == 0):
            shared[first // lanes] = _next(shared[first // lanes])
        latest = 0.0
        for w in range(first, first + group):
            latest = max(latest, time[w])
        chance = chances[shared[first // lanes] >> _BITS] if task.meets > 0 else 1.0
        for w in range(first, first + group):
            time[w] = latest
            end[node, w] = latest + task.length * chance


@compiled
def drawn_spans(
    order: Array, tasks: Array, incoming: Array, edges: Array, drawn: Array, chosen: Array, work: Array, tables: Array,
    inner: float, states: Array, messages: Array, shared: Array, lanes: int, near: int,
) -> Array:  # fmt: skip
    """The length of a run in several scenarios at once, whose replicas are lanes: `lanes` columns a scenario.

    `tasks` and `edges` are the tables of `drawn_steps`; `drawn` and `chosen` have a plane of (stages, columns) for each
    of the above, `work` the factors on micro-batches of every column. The last two rows of `tables` are those of
    collectives and of hosts. `states` and `messages` are the random numbers of columns, `shared` those of scenarios;
    they are changed.
    """
    columns, nodes = drawn.shape[2], len(tasks)
    end, begin, time = np.empty((nodes, columns)), np.empty((nodes, columns)), np.empty(columns)
    longest, held, chances = np.zeros(columns // lanes), np.zeros(drawn.shape[1:], np.int64), tables[len(tables) - 2]
    for node in order:
        task = tasks[node]
        for w in range(columns):
            time[w] = task.gap if task.is_first else end[node - 1, w] + task.gap
        for number in range(incoming[node], incoming[node + 1]):
            edge = edges[number]
            reached = begin[edge.source] if edge.from_start else end[edge.source]
            _wait(edge, task.stage, tasks[edge.source].stage, reached, drawn, chances, messages, time)
        if task.gpu + task.host + task.within > 0.0:
            _work(node, task, drawn, chosen, work, tables, inner, states, held, time, end)
        else:
            _meet(node, task, chances, shared, lanes, near, time, end)
        for w in range(columns):
            begin[node, w] = time[w]
        if node == nodes - 1 or tasks[node + 1].is_first:  # the last of a lane
            for w in range(columns):
                longest[w // lanes] = max(longest[w // lanes], end[node, w])
    return longest
