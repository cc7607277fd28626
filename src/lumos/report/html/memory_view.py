"""Memory view: predicted memory, by stage at its peak and over the step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lumos.described.described import Program
from lumos.graph.graph import Floats
from lumos.memory.memory import Memory
from lumos.prediction.fitting import memory_words
from lumos.prediction.prediction import Prediction
from lumos.report.html.allocations import thinned
from lumos.report.html.charts import Bars, Line, Lines, Series
from lumos.report.html.page import Figure, Section
from lumos.report.predictions import MEMORY_PARTS, memory_table, modules_table
from lumos.schedules import Phase
from lumos.step.step import Step

_GIB = float(1 << 30)
_MOST_LINES = 8
_MOST_TASKS = 200_000
_NEAR = 2.5  # times the largest value: farther away, the limit would press the curves flat


def memory_section(found: Prediction) -> Section:
    """Peaks by stage, and the curve over the step where it can be drawn."""
    step, memory = found.step, found.memory
    if step is None or memory is None:
        return Section("Memory by stage", "A trace alone does not say what a step needs: predict with a setup.")
    rows, ranks = memory.rows(), [str(rank) for rank in found.run.trace.ranks]
    series = [Series(name, f"series-{i}", [float(row[name]) for row in rows]) for i, name in enumerate(MEMORY_PARTS)]
    peaks = Bars([f"stage {i}" for i in range(len(rows))], series, "GiB", ranks=ranks)
    figures = [Figure("at the peak of every stage", peaks)]
    if len(step.graph) <= _MOST_TASKS:
        figures.append(Figure("over the step", _curves(found, step, memory)))
    return Section("Memory by stage", _words(found, memory), figures, [memory_table(memory, ranks)])


def dry_memory_section(found: Prediction) -> Section:
    """What a dry run allocates over its step, and for which modules."""
    memory = found.memory
    if memory is None:
        return Section("Memory", "Not known.")
    times, sizes = (np.array(values) for values in found.allocated)
    lines = [Line("allocated", "series-0", *thinned(times, sizes), steps=True)]
    tables = [memory_table(memory), modules_table(memory)]
    return Section("Memory", _words(found, memory), [Figure("over the step", Lines("ms", "GiB", lines))], tables)


def _words(found: Prediction, memory: Memory) -> str:
    if found.is_of_cpu:
        return "What PyTorch allocates; how much memory a rank's host has is not known."
    return (
        f"The worst stage: {memory_words(memory)}. The reserve is for the CUDA context, NCCL and fragmentation, beyond "
        "what torch counts. Over the step, activations of a micro-batch come with its forward pass and go with its "
        "backward pass; the peak of a stage bounds its curve."
    )


def _curves(found: Prediction, step: Step, memory: Memory) -> Lines:
    stages = step.setup.parallel.pp
    chosen = sorted({round(i) for i in np.linspace(0, stages - 1, min(stages, _MOST_LINES))})
    curves, ranks = _by_stage(step, memory), found.run.trace.ranks
    end = step.times.span / 1e6
    lines = [
        Line(f"stage {stage}", f"series-{i % 8}", *thinned(*curves[stage]), rank=str(ranks[stage]))
        for i, stage in enumerate(chosen)
    ]
    room = (memory.usable - memory.reserve) / _GIB
    if found.fits is not None and room < _NEAR * max(float(max(line.y)) for line in lines):
        lines.append(Line("available less the reserve", "worse", [0.0, end], [room, room], dashed=True))
    return Lines("ms", "GiB", lines)


def _by_stage(step: Step, found: Memory) -> list[tuple[Floats, Floats]]:
    """(milliseconds, GiB) of every stage: what a chunk keeps comes with its forward pass and goes with its backward."""
    program = Program(step.setup)
    kept = [[program.kept_bytes(chunk) for chunk in row] for row in program.chunks]
    answer = []
    for stage, memory in enumerate(found.stages):
        ramps = [
            (low, high, kept[stage][chunk] if is_forward else -kept[stage][chunk])
            for (chunk, is_forward), low, high in _passes(step, stage)
        ]
        times, activations = _integrated(ramps, step.times.span)
        total = memory.peak - memory.activations + activations
        answer.append((times / 1e6, np.minimum(total, memory.peak) / _GIB))
    return answer


def _passes(step: Step, stage: int) -> Iterator[tuple[tuple[int, bool], float, float]]:
    """(chunk, whether it is forward), from when to when in nanoseconds, for every pass of a micro-batch on a stage."""
    structure, times = step.structure, step.times
    mine = np.array([r.stage == stage and r.what in ("forward", "backward", "weights") for r in structure.roles])
    nodes = np.flatnonzero(mine[structure.node_role])
    phase, micro, chunk = structure.turns.reshape(-1, 3)[structure.turn_index[nodes]].T
    keys = np.stack([chunk, phase == Phase.FORWARD, micro])  # a backward is over when its weight gradients are
    found, which = np.unique(keys, axis=1, return_inverse=True)
    low, high = np.full(found.shape[1], np.inf), np.zeros(found.shape[1])
    np.minimum.at(low, which.ravel(), times.start[nodes])
    np.maximum.at(high, which.ravel(), times.end[nodes])
    for (chunk_id, forward, _), begin, end in zip(found.T.tolist(), low.tolist(), high.tolist(), strict=True):
        yield (chunk_id, bool(forward)), begin, end


def _integrated(ramps: list[tuple[float, float, float]], end: float) -> tuple[Floats, Floats]:
    """The sum of ramps, each of which rises by its height from its low to its high, at every bend and at the ends."""
    low, high, height = np.array(ramps, np.float64).reshape(-1, 3).T
    slope = height / np.maximum(high - low, 1.0)
    at = np.concatenate([[0.0], low, np.maximum(high, low + 1.0), [end]])
    change = np.concatenate([[0.0], slope, -slope, [0.0]])
    order = np.argsort(at, kind="stable")
    at, change = at[order], change[order]
    values = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(at))])
    return at, np.maximum(values, 0.0)
