"""Trees: a sum of regression trees as flat arrays, evaluated without the library that grew them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Trees(NamedTuple):
    """Nodes of all trees in one table; a node without a feature (-1) is a leaf and holds its value."""

    root: NDArray[np.int32]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]  # the value, in a leaf
    left: NDArray[np.int32]  # right is left + 1
    start: float

    def __call__(self, rows: Floats) -> Floats:
        """The sum of the trees' answers for every row of features."""
        from lumos.kernels import sum_of_trees

        return self.start + sum_of_trees(
            np.ascontiguousarray(rows, np.float64), self.root, self.feature, self.threshold, self.left
        )
