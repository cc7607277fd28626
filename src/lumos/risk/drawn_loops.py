"""The inner loops of Monte Carlo steps, compiled: the pace of ranks that meet, and steps whose times are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.graph.compiled_loops import compiled

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


@compiled
def pass_sums(
    order: Array, duration: Array, place: Array, parts: Array, fresh: Array, row: Array, tables: Array, states: Array
) -> Array:
    """(stages, columns): GPU time of all passes as `drawn_spans` draws them, over that without what is drawn."""
    drawn, plain, held = np.zeros(row.shape), np.zeros(len(row)), np.zeros(row.shape, np.int64)
    multiplier, increment, bits = np.uint64(6364136223846793005), np.uint64(1442695040888963407), np.uint64(52)
    state = states.copy()
    for node in order:
        work, stage = duration[node] * parts[node, 0], place[node]
        if parts[node, 0] + parts[node, 1] + parts[node, 2] > 0.0:
            plain[stage] += work
            for w in range(row.shape[1]):
                if fresh[node]:
                    state[w] = state[w] * multiplier + increment
                if fresh[node] and parts[node, 0] > 0.0:
                    held[stage, w] = state[w] >> bits
                drawn[stage, w] += work * tables[row[stage, w], held[stage, w]]
    for stage in range(len(row)):
        for w in range(row.shape[1]):
            drawn[stage, w] = drawn[stage, w] / plain[stage] if plain[stage] > 0.0 else 1.0
    return drawn


@compiled
def drawn_spans(
    order: Array, is_first: Array, duration: Array, gap: Array, incoming: Array, source: Array, lag: Array,
    from_start: Array, place: Array, parts: Array, fresh: Array, meets: Array, link: Array, micro: Array,
    pace: Array, row: Array, apart: Array, pause: Array, paused: Array, work: Array, hosted: Array, tables: Array,
    inner: float, states: Array, messages: Array, shared: Array, lanes: int, near: int,
) -> Array:  # fmt: skip
    """The length of a run in several scenarios at once, whose replicas are lanes: `lanes` columns a scenario.

    Of every node: its stage (`place`), the shares of its time that GPU, host and communication inside it take
    (`parts`; none of them: a collective), whether it begins a pass (`fresh`: what is drawn for a pass holds for all
    its parts), who meets in it (1: nobody, 2: all lanes, 3: `near` neighbouring ones), its micro-batch. Of every
    stage and column: the factor on all GPU time (`pace`), the row of `tables` for a pass, factors on communication
    inside passes and on messages with the stage before and with the next (`apart`), a pause and the node it is in, and
    a factor on the host (`hosted`). Of every column: factors on micro-batches (`work`). The last two tables are those
    of collectives and of hosts.
    `states` and `messages` are the random numbers of columns, `shared` those of scenarios; they are changed.
    """
    columns, nodes = pace.shape[1], len(duration)
    end, begin, time = np.empty((nodes, columns)), np.empty((nodes, columns)), np.empty(columns)
    longest, held = np.zeros(columns // lanes), np.zeros(pace.shape, np.int64)
    collectives, hosts = len(tables) - 2, len(tables) - 1
    multiplier, increment, bits = np.uint64(6364136223846793005), np.uint64(1442695040888963407), np.uint64(52)
    for node in order:
        stage, length = place[node], duration[node]
        gpu, host, within = parts[node, 0], parts[node, 1], parts[node, 2]
        for w in range(columns):
            time[w] = gap[node] if is_first[node] else end[node - 1, w] + gap[node]
        for edge in range(incoming[node], incoming[node + 1]):
            other, late = source[edge], lag[edge]
            reached = begin[other] if from_start[edge] else end[other]
            if link[edge]:
                here, there = (2, 1) if (place[other] - stage) % len(pace) == 1 else (1, 2)
                for w in range(columns):
                    messages[w] = messages[w] * multiplier + increment
                    far = max(apart[here, stage, w], apart[there, place[other], w])
                    time[w] = max(time[w], reached[w] + late * far * tables[collectives, messages[w] >> bits])
            else:
                for w in range(columns):
                    time[w] = max(time[w], reached[w] + late)
        if gpu + host + within > 0.0:
            if fresh[node]:
                for w in range(columns):
                    states[w] = states[w] * multiplier + increment
            if fresh[node] and gpu > 0.0:
                for w in range(columns):
                    held[stage, w] = states[w] >> bits
            for w in range(columns):
                factor = 1.0
                if gpu > 0.0:
                    mine = pace[stage, w] * tables[row[stage, w], held[stage, w]]
                    if micro[node] >= 0:
                        mine *= work[micro[node], w]
                    factor += gpu * (mine - 1.0)
                    if paused[stage, w] == node:
                        time[w] += pause[stage, w]
                if host > 0.0:
                    factor += host * (hosted[stage, w] * tables[hosts, states[w] >> bits] - 1.0)
                if within > 0.0:
                    factor += within * (inner * apart[0, stage, w] - 1.0)
                begin[node, w] = time[w]
                end[node, w] = time[w] + length * factor
        else:
            group = 1 if meets[node] < 2 else (lanes if meets[node] == 2 else near)
            for first in range(0, columns, group):
                if meets[node] > 0 and (group > 1 or first % lanes == 0):
                    shared[first // lanes] = shared[first // lanes] * multiplier + increment
                latest = 0.0
                for w in range(first, first + group):
                    latest = max(latest, time[w])
                chance = tables[collectives, shared[first // lanes] >> bits] if meets[node] > 0 else 1.0
                for w in range(first, first + group):
                    begin[node, w] = latest
                    end[node, w] = latest + length * chance
        if node == nodes - 1 or is_first[node + 1]:  # the last of a lane
            for w in range(columns):
                longest[w // lanes] = max(longest[w // lanes], end[node, w])
    return longest
