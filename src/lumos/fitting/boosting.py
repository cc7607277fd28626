"""Boosting: grow trees on the logarithm of time over roofline, and write them down as plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from lumos.costs.trees import Floats, Trees


def grow(rows: Floats, target: Floats, rounds: int = 600, leaves: int = 24, rate: float = 0.06) -> Trees:
    """Boosted trees for `target`; relative error counts, since the target is a logarithm."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    smallest = max(2, min(12, len(rows) // 60))
    model = HistGradientBoostingRegressor(
        loss="absolute_error" if len(rows) >= 2000 else "squared_error",
        max_iter=rounds,
        learning_rate=rate,
        max_leaf_nodes=leaves,
        min_samples_leaf=smallest,
        l2_regularization=0.1,
        max_features=0.5,
        early_stopping=False,
        random_state=0,
    )
    model.fit(rows, target)
    return _flatten(model)


def _flatten(model: Any) -> Trees:
    """The nodes of all trees in one table, the two children of a node side by side."""
    root: list[int] = []
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    for predictors in model._predictors:
        nodes = predictors[0].nodes
        place = len(feature)
        root.append(place)
        waiting = [0]
        feature.append(0), threshold.append(0.0), left.append(0)
        at = {0: place}
        while waiting:
            index = waiting.pop()
            node, here = nodes[index], at[index]
            if node["is_leaf"]:
                feature[here], threshold[here] = -1, float(node["value"])
                continue
            feature[here], threshold[here], left[here] = int(node["feature_idx"]), float(node["num_threshold"]), len(feature)
            for child in (int(node["left"]), int(node["right"])):
                at[child] = len(feature)
                feature.append(0), threshold.append(0.0), left.append(0)
                waiting.append(child)
    return Trees(
        np.array(root, np.int32), np.array(feature, np.int16), np.array(threshold, np.float32),
        np.array(left, np.int32), float(model._baseline_prediction[0, 0]),
    )  # fmt: skip
