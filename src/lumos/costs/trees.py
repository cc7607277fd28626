"""Trees: a sum of regression trees as flat arrays, evaluated without the library that grew them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.graph.loops import worth_compiling

Floats = NDArray[np.float64]
_NODES_OF_A_ROW = 50  # of a graph, that plain Python simulates in the time of one row of hundreds of trees


class Trees(NamedTuple):
    """Nodes of all trees in one table; a node without a feature (-1) is a leaf and holds its value."""

    root: NDArray[np.int32]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]  # the value, in a leaf
    left: NDArray[np.int32]  # right is left + 1
    start: float

    def __call__(self, rows: Floats) -> Floats:
        """The sum of the trees' answers for every row of features."""
        rows = np.ascontiguousarray(rows, np.float64)
        if not worth_compiling(_NODES_OF_A_ROW * len(rows)):
            leaves: Floats = self._leaves(rows).sum(axis=1)
            return self.start + leaves
        from lumos.graph.compiled_loops import sum_of_trees

        total: Floats = sum_of_trees(rows, self.root, self.feature, self.threshold, self.left)
        return self.start + total

    def _leaves(self, rows: Floats) -> Floats:
        """The leaf of every (row, tree), all of them going down a level at a time."""
        node = np.broadcast_to(self.root, (len(rows), len(self.root))).copy()
        which = np.arange(len(rows))[:, None]
        while True:
            feature = self.feature[node]
            inner = feature >= 0
            if not inner.any():
                return self.threshold[node].astype(np.float64)
            right = rows[which, np.maximum(feature, 0)] > self.threshold[node]
            node = np.where(inner, self.left[node] + right, node)
