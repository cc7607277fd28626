"""Measured: the blocks of a traced step: one layer forward and backward, the ends of the model, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lumos.change.kernel_labels import Phase, RankLabels, Work
from lumos.errors import OptionError

Times = NDArray[np.float64]  # microseconds by Work


@dataclass(frozen=True)
class MeasuredBlock:
    """GPU time by kind of work, and the host's time."""

    us: Times
    host_us: float


@dataclass(frozen=True)
class MeasuredStage:
    """What one rank ran; layers and ends are of one micro-batch."""

    rank: int
    forward: MeasuredBlock
    backward: MeasuredBlock
    ends_forward: MeasuredBlock
    ends_backward: MeasuredBlock
    optimizer: MeasuredBlock
    before_us: float  # of the host, before it launches anything


def measure(labels: RankLabels, layers: int, microbatches: int, chunks: int = 1) -> MeasuredStage:
    """Cut a rank's step into blocks; refuse where the repetition does not fit the setup.

    A stage of several chunks runs its layers chunk by chunk: `layers` are those of one chunk.
    """
    forward, ends_forward = _cut(labels, Phase.FORWARD, layers, microbatches, chunks)
    backward, ends_backward = _cut(labels, Phase.BACKWARD, layers, microbatches, chunks)
    update = labels.of(Phase.OPTIMIZER)
    optimizer = MeasuredBlock(_by_work(labels, np.flatnonzero(update)), labels.optimizer_us)
    before = float(labels.launched[0]) if len(labels.launched) else 0.0
    return MeasuredStage(labels.rank, forward, backward, ends_forward, ends_backward, optimizer, before)


def _cut(
    labels: RankLabels, phase: Phase, layers: int, microbatches: int, chunks: int
) -> tuple[MeasuredBlock, MeasuredBlock]:
    """(one layer, the ends) of a phase."""
    rows = np.flatnonzero(labels.of(phase))
    marks = np.flatnonzero(labels.attention[rows] == (1 if phase == Phase.FORWARD else 2))
    passes = microbatches * chunks
    if len(marks) != layers * passes:
        name = phase.name.lower()
        raise OptionError(
            f"rank {labels.rank}: {len(marks)} attention kernels in the {name} pass, and the setup says "
            f"{layers * chunks} layers × {microbatches} micro-batches = {layers * passes}: correct model.layers, "
            "train.microbatches or parallel.pp to what was traced, or record with an attention that can be recognised"
        )
    sums = np.zeros((len(rows) + 1, len(Work)))
    sums[1:] = np.cumsum(_spread(labels, rows), axis=0)
    ends_of_windows = marks.reshape(passes, layers)
    launched = labels.launched[rows]
    if layers > 1:
        windows = sums[ends_of_windows[:, 1:]] - sums[ends_of_windows[:, :-1]]
        layer = windows.mean(axis=(0, 1))
        host = float(np.median(np.diff(launched[ends_of_windows], axis=1)))
    else:
        layer, host = sums[-1] / passes, float(np.ptp(launched)) / passes
    ends = np.maximum(sums[-1] / microbatches - layers * chunks * layer, 0.0)
    host_ends = _host_ends(launched, ends_of_windows, layers * host) * chunks
    return MeasuredBlock(layer, host), MeasuredBlock(ends, host_ends)


def _host_ends(launched: Times, marks: NDArray[np.int64], layers_us: float) -> float:
    """The host's time of a micro-batch outside its layers: the least over micro-batches, as blocking only adds."""
    found = []
    for index, row in enumerate(marks):
        first = 0 if index == 0 else (marks[index - 1][-1] + row[0]) // 2
        last = len(launched) - 1 if index == len(marks) - 1 else (row[-1] + marks[index + 1][0]) // 2
        found.append(float(launched[last] - launched[first]))
    return max(0.0, min(found) - layers_us)


def _spread(labels: RankLabels, rows: NDArray[np.int64]) -> Times:
    """Times of tasks in the column of their work."""
    table = np.zeros((len(rows), len(Work)))
    table[np.arange(len(rows)), labels.work[rows]] = labels.us[rows]
    return table


def _by_work(labels: RankLabels, rows: NDArray[np.int64]) -> Times:
    total: Times = _spread(labels, rows).sum(axis=0)
    return total
