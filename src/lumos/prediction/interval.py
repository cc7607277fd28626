"""Uncertainty: how far off a forecast may be, from how far off forecasts of measured runs were.

The variance of the logarithm of measured over predicted is a sum of parts, one for each thing that makes a run harder
to foresee. The parts are fitted on published runs, each source held apart in turn (calibration/fit_uncertainty.py), and
scaled so that four of five runs are inside.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from math import sqrt

from lumos.prediction.step import Step

PARTS = ("always", "transferred", "other_family", "nodes", "spread_tensor", "pipeline", "host", "experts", "assumed")


def parts_of(step: Step, assumptions: int) -> dict[str, float]:
    """What makes this step hard to foresee, each between 0 and 1 or so."""
    setup = step.setup
    gpus, node = setup.cluster.gpus, setup.cluster.gpus_per_node
    model = step.prices.model
    return {
        "always": 1.0,
        "transferred": float(model.transferred),
        "other_family": float(model.gpu.family not in ("hopper", "ampere", "blackwell")),
        "nodes": float(gpus > node),
        "spread_tensor": float(setup.parallel.tp > max(node, setup.cluster.accelerator.nvlink_domain)),
        "pipeline": float(setup.parallel.pp > 1),
        "host": min(1.0, step.host_share),
        "experts": float(setup.model.experts > 0),
        "assumed": float(min(assumptions, 2)) / 2,
    }


def log_spread(step: Step, assumptions: int = 0) -> float:
    """The half-width of the 80 % interval, in the logarithm of the time."""
    scale, variances = _table()
    variance = sum(variances[name] * value for name, value in parts_of(step, assumptions).items())
    return scale * sqrt(variance)


@cache
def _table() -> tuple[float, dict[str, float]]:
    table = json.loads(resources.files("lumos").joinpath("data/uncertainty.json").read_text("utf-8"))
    return float(table["scale"]), dict(table["variance"])
