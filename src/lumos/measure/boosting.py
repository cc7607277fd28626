"""Boosting: gradient-boosted trees on the logarithm of time over roofline, stored as plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from lumos.cost.trees import Floats, Trees
from lumos.errors import OptionError

_MANY = 2000  # rows from which on outliers are tolerated, and several threads pay off
_L2 = 0.1


def grow(rows: Floats, target: Floats, rounds: int = 600, leaves: int = 24, rate: float = 0.06) -> Trees:
    """Boosted trees for `target`; since that is a logarithm, they minimise the relative error."""
    model = regressor()(
        loss="absolute_error" if len(rows) >= _MANY else "squared_error", max_iter=rounds, learning_rate=rate,
        max_leaf_nodes=leaves, min_samples_leaf=max(2, min(12, len(rows) // 60)), l2_regularization=_L2,
        max_features=0.5, early_stopping=False, random_state=0,
    )  # fmt: skip
    from threadpoolctl import threadpool_limits

    with threadpool_limits(None if len(rows) >= _MANY else 1):
        return flatten(model.fit(rows, target))


def regressor() -> Any:
    """scikit-learn's class that grows the trees, or OptionError with how to install it."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        raise OptionError("fitting needs scikit-learn: pip install 'lumos-sim[fit]'") from None
    return HistGradientBoostingRegressor


def flatten(model: Any) -> Trees:
    """The trees of a fitted model as arrays that need no scikit-learn.

    The nodes of all trees are in one table, the two children of a node side by side and after it.
    """
    nodes: list[tuple[int, float, int]] = []  # feature (-1: a leaf), threshold or value, place of the left child
    roots = []
    for (tree,) in model._predictors:
        roots.append(len(nodes))
        nodes.append((-1, 0.0, 0))
        waiting = [(0, roots[-1])]
        while waiting:
            index, place = waiting.pop()
            node = tree.nodes[index]
            if node["is_leaf"]:
                nodes[place] = (-1, float(node["value"]), 0)
                continue
            left = len(nodes)
            nodes[place] = (int(node["feature_idx"]), float(node["num_threshold"]), left)
            nodes += [(-1, 0.0, 0), (-1, 0.0, 0)]
            waiting += [(int(node["left"]), left), (int(node["right"]), left + 1)]
    feature, threshold, left_child = zip(*nodes, strict=True)
    return Trees(
        np.array(roots, np.int32), np.array(feature, np.int16), np.array(threshold, np.float32),
        np.array(left_child, np.int32), float(model._baseline_prediction[0, 0]),
    )  # fmt: skip
