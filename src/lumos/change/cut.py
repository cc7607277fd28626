"""Cut: the blocks of a traced step: one layer forward and backward, what is outside the layers, and the optimizer.

Every layer has one attention, so the kernels from one attention up to the next one are one layer, although shifted by
half a layer. The rest of a pass is embedding and head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lumos.analysis.kernel_labels import Phase, RankLabels, Work
from lumos.errors import OptionError

Times = NDArray[np.float64]
"""Microseconds, by Work."""


@dataclass(frozen=True)
class MeasuredBlock:
    """GPU time by type of work, and the host's time."""

    us: Times
    host_us: float


@dataclass(frozen=True)
class MeasuredStage:
    """The blocks of one rank; all but the optimizer are of one micro-batch."""

    rank: int
    forward: MeasuredBlock  # of one layer
    backward: MeasuredBlock
    ends_forward: MeasuredBlock  # embedding and head
    ends_backward: MeasuredBlock
    optimizer: MeasuredBlock
    before_us: float  # of the host, before it launches anything


def measure(labels: RankLabels, layers: int, microbatches: int, chunks: int = 1) -> MeasuredStage:
    """Cut a rank's step into blocks; OptionError where the attentions do not match the setup.

    A stage of several chunks runs its layers chunk by chunk: `layers` are those of one chunk.
    """
    forward, ends_forward = _cut(labels, Phase.FORWARD, layers, microbatches, chunks)
    backward, ends_backward = _cut(labels, Phase.BACKWARD, layers, microbatches, chunks)
    update = _by_work(labels, np.flatnonzero(labels.of(Phase.OPTIMIZER))).sum(axis=0)
    optimizer = MeasuredBlock(update, labels.optimizer_us)
    before = float(labels.launched[0]) if len(labels.launched) else 0.0
    return MeasuredStage(labels.rank, forward, backward, ends_forward, ends_backward, optimizer, before)


def _cut(
    labels: RankLabels, phase: Phase, layers: int, microbatches: int, chunks: int
) -> tuple[MeasuredBlock, MeasuredBlock]:
    """(one layer, embedding and head) of a phase."""
    rows = np.flatnonzero(labels.of(phase))
    marks = np.flatnonzero(labels.attention[rows] == (1 if phase == Phase.FORWARD else 2))
    passes = microbatches * chunks
    if len(marks) != layers * passes:
        raise OptionError(
            f"rank {labels.rank}: {len(marks)} attention kernels in the {phase.name.lower()} pass, and the setup says "
            f"{layers * chunks} layers × {microbatches} micro-batches = {layers * passes}: correct model.layers, "
            "train.microbatches or parallel.pp to what was traced, or record with an attention that can be recognised"
        )
    sums = np.zeros((len(rows) + 1, len(Work)))
    sums[1:] = np.cumsum(_by_work(labels, rows), axis=0)
    starts, launched = marks.reshape(passes, layers), labels.launched[rows]
    if layers > 1:
        layer = (sums[starts[:, 1:]] - sums[starts[:, :-1]]).mean(axis=(0, 1))
        host = float(np.median(np.diff(launched[starts], axis=1)))
    else:
        layer, host = sums[-1] / passes, float(np.ptp(launched)) / passes
    ends = np.maximum(sums[-1] / microbatches - layers * chunks * layer, 0.0)
    return MeasuredBlock(layer, host), MeasuredBlock(ends, _host_outside(launched, starts, layers * host) * chunks)


def _host_outside(launched: Times, marks: NDArray[np.int64], layers_us: float) -> float:
    """The host's time of a micro-batch outside its layers: the least over micro-batches, as blocking only adds."""
    middles = (marks[:-1, -1] + marks[1:, 0]) // 2
    first, last = np.concatenate([[0], middles]), np.concatenate([middles, [len(launched) - 1]])
    return max(0.0, float((launched[last] - launched[first]).min()) - layers_us)


def _by_work(labels: RankLabels, rows: NDArray[np.int64]) -> Times:
    """(kernels, types of work): the time of every kernel in the column of its work."""
    table = np.zeros((len(rows), len(Work)))
    table[np.arange(len(rows)), labels.work[rows]] = labels.us[rows]
    return table
