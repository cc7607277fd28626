"""Boosting: grow trees on the logarithm of time over roofline, and write them down as plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from lumos.cost.trees import Floats, Trees
from lumos.errors import OptionError

_MANY = 2000  # rows from which on single outliers are left alone, and several threads are worth their coming together
_L2 = 0.1


def grow(rows: Floats, target: Floats, rounds: int = 600, leaves: int = 24, rate: float = 0.06) -> Trees:
    """Boosted trees for `target`; relative error counts, since the target is a logarithm."""
    model = regressor()(
        loss="absolute_error" if len(rows) >= _MANY else "squared_error", max_iter=rounds, learning_rate=rate,
        max_leaf_nodes=leaves, min_samples_leaf=max(2, min(12, len(rows) // 60)), l2_regularization=_L2,
        max_features=0.5, early_stopping=False, random_state=0,
    )  # fmt: skip
    from threadpoolctl import threadpool_limits

    with threadpool_limits(None if len(rows) >= _MANY else 1):
        return flatten(model.fit(rows, target))


def regressor() -> Any:
    """The class that grows the trees, or OptionError with the way to get it."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        raise OptionError("fitting needs scikit-learn: pip install 'lumos-sim[fit]'") from None
    return HistGradientBoostingRegressor


def flatten(model: Any) -> Trees:
    """The trees of a fitted model, without the library that grew them."""
    table = _Table()
    roots = [table.plant(predictors[0].nodes) for predictors in model._predictors]
    return Trees(
        np.array(roots, np.int32), np.array(table.feature, np.int16), np.array(table.threshold, np.float32),
        np.array(table.left, np.int32), float(model._baseline_prediction[0, 0]),
    )  # fmt: skip


class _Table:
    """The nodes of all trees, the two children of a node side by side and after it."""

    def __init__(self) -> None:
        self.feature: list[int] = []
        self.threshold: list[float] = []
        self.left: list[int] = []

    def plant(self, nodes: Any) -> int:
        """Take in one tree; the place of its root."""
        root = self._leaf()
        waiting = [(0, root)]
        while waiting:
            index, place = waiting.pop()
            node = nodes[index]
            if node["is_leaf"]:
                self.threshold[place] = float(node["value"])
                continue
            left, right = self._leaf(), self._leaf()
            self.feature[place], self.left[place] = int(node["feature_idx"]), left
            self.threshold[place] = float(node["num_threshold"])
            waiting += [(int(node["left"]), left), (int(node["right"]), right)]
        return root

    def _leaf(self) -> int:
        """A new node, a leaf until more is known."""
        self.feature.append(-1)
        self.threshold.append(0.0)
        self.left.append(0)
        return len(self.feature) - 1
