"""Operation tables: what every worker of a job did, one row an operation (docs/stragglers.md describes the columns).

A worker is one pipeline stage of one data-parallel replica; its tensor-parallel ranks run in lockstep and count once.

    dp_rank stage rank step optype            start_ts  duration seq_id mc mb_id gmc
          0     1   16   21 forward-compute     0.8710    0.2152      0  0     0   1
          0     1   16   21 forward-send        1.0862    0.0010      0 -1    -1  -1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COMPUTE = ("forward-compute", "backward-compute")
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
REPLICA_COLLECTIVES = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")
CLOSING = ("gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad", "optimizer")
KNOWN_TYPES = (*COMPUTE, *MESSAGES, *REPLICA_COLLECTIVES, *CLOSING)

_ARRAYS = ("kind", "dp_rank", "stage", "rank", "step", "start", "duration", "sequence", "chunk", "micro_batch")


@dataclass(frozen=True)
class OperationTable:
    """The operations of a job as columns, sorted by step, worker and start; times are seconds.

    `read_operation_table(path).duration` are the durations; `table.types[table.kind[0]]` is the type of the first row.
    """

    name: str
    types: tuple[str, ...]
    kind: Ints  # index into `types`
    dp_rank: Ints
    stage: Ints
    rank: Ints
    step: Ints
    start: Floats  # from the beginning of the row's step
    duration: Floats
    sequence: Ints  # the how-manieth operation of its type, of its worker and step
    chunk: Ints  # virtual stage of the worker, 0 without interleaving; -1 where the row has none
    micro_batch: Ints  # -1 where it is not known
    tp: int
    warnings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def dp(self) -> int:
        return int(self.dp_rank.max()) + 1

    @property
    def pp(self) -> int:
        return int(self.stage.max()) + 1

    @property
    def vpp(self) -> int:
        return max(int(self.chunk.max()) + 1, 1)

    @cached_property
    def end(self) -> Floats:
        return np.asarray(self.start + self.duration)

    @cached_property
    def steps(self) -> Ints:
        """The numbers of the steps, ascending."""
        return np.unique(self.step)

    @cached_property
    def step_index(self) -> Ints:
        """Which of `steps` each row belongs to."""
        return np.searchsorted(self.steps, self.step)

    @cached_property
    def workers(self) -> list[tuple[int, int]]:
        """(dp_rank, stage) of every worker, by replica and then stage."""
        return [divmod(int(key), self.pp) for key in np.unique(self.dp_rank * self.pp + self.stage)]

    @cached_property
    def worker(self) -> Ints:
        """Which of `workers` each row belongs to."""
        key = self.dp_rank * self.pp + self.stage
        return np.searchsorted(np.unique(key), key)

    def of_type(self, *types: str) -> Bools:
        """Rows of some types of operations."""
        return np.isin(self.kind, [number for number, name in enumerate(self.types) if name in types])

    def select(self, rows: Bools) -> OperationTable:
        """Some of the rows, as a table."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ARRAYS})


def numbered(*columns: Ints | Bools) -> Ints:
    """A number for each combination of values that occurs, in their order."""
    key = np.unique(columns[0], return_inverse=True)[1].astype(np.int64)
    for column in columns[1:]:
        values, other = np.unique(column, return_inverse=True)
        key = np.unique(key * len(values) + other, return_inverse=True)[1].astype(np.int64)
    return key


def occurrence(cell: Ints, start: Ints | None = None) -> Ints:
    """The occurrence index of each within its cell, in the order of time, or else of rows."""
    order = np.argsort(cell, kind="stable") if start is None else np.lexsort((start, cell))
    place = np.empty(len(cell), np.int64)
    place[order] = np.arange(len(cell)) - np.searchsorted(cell[order], cell[order])
    return place
