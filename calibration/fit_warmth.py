"""Derives how much faster kernels are that find their data in the L2 cache, from one-GPU recordings of training steps.

    python calibration/fit_warmth.py

The kernels of one layer of every recording in records.tar.xz, forward and backward, by class (matmul, memory-bound),
are compared with the isolated, cold costs of the same operators. The warmth of an operator is a line through knots at
`warm_depth` of src/lumos/data/step.json, so that the time of a layer is linear in the values at the knots: they are
fitted by least squares, and divided by the last, which stands for a cold cache (and for the clock of the recording).
Writes warm_matrix and warm_stream of src/lumos/data/step.json.
"""

from __future__ import annotations

import json
import tempfile
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from fit_steps import setup_of
from lumos.analysis.replay import replay
from lumos.costs.model_costs import ModelCosts
from lumos.described.layer import TransformerLayer
from lumos.program.op import Ops
from lumos.program.operators import Collective, Operator
from lumos.read.job import read_job
from lumos.step.step import simulate_step
from lumos.traced.learned import CalibratedRun
from shipped import ship, shipped, unpack_records

CLASSES = ("matrix", "stream")
Floats = NDArray[np.float64]
Row = tuple[Floats, float]  # cold microseconds of a layer's operators at each knot, and the measured ones


def rows_of(folder: Path) -> dict[str, list[Row]]:
    """By class of operators, forward and backward passes of a layer of every recording."""
    found: dict[str, list[Row]] = {name: [] for name in CLASSES}
    for run in sorted(folder.glob("run*")):
        for name, case in json.loads((run / "results.json").read_text())["single"].items():
            path = run / "single" / f"{name}.pt.trace.json"
            if path.is_file() and is_described(case):
                for kind, rows in rows_in(path, case).items():
                    found[kind] += rows
    return found


def is_described(case: dict[str, Any]) -> bool:
    """Models that a setup describes, one pass of a layer at a time."""
    return case["kind"] in ("llama", "gpt2") and not case["compile"] and not case["checkpoint"]


def rows_in(path: Path, case: dict[str, Any]) -> dict[str, list[Row]]:
    step = simulate_step(setup_of(case))
    layer = TransformerLayer(step.assembly.layout, False)
    blocks = CalibratedRun(replay(read_job(path)), step.setup).blocks
    passes = ((layer.forward(), blocks["forward"]), (layer.backward(), blocks["backward"]))
    return {
        name: [(cold_us(block, step.costs, name == "matrix"), measured.us(name)) for block, measured in passes]
        for name in CLASSES
    }


def cold_us(block: Ops, prices: ModelCosts, matrix: bool) -> Floats:
    """Isolated costs of the operators of a class, each divided among the knots that its tensor size is between."""
    depths, model = shipped("step.json")["warm_depth"], prices.model
    total = np.zeros(len(depths))
    for op in block:
        work = op.work
        if isinstance(work, Collective) or not in_class(work, matrix):
            continue
        alone = model.us(work) - model.isolation_us
        depth = log2(work.tensor_bytes / (model.gpu.l2_mb * 1e6))
        total += alone * np.array([np.interp(depth, depths, knot) for knot in np.eye(len(depths))])
    return total


def in_class(operator: Operator, matrix: bool) -> bool:
    """Attention is labelled apart in a trace, and left out."""
    empty = operator.kind == "stream" and operator.shape[0] == 0
    return operator.is_matrix == matrix and not operator.kind.startswith("sdpa") and not empty


def fit(rows: list[Row]) -> list[float]:
    """The values at the knots, relative to the last."""
    relative = np.array([cold / us for cold, us in rows])
    values = lsq_linear(relative, np.ones(len(rows)), bounds=(0.2, 1.5)).x
    return [round(float(value), 3) for value in values / values[-1]]


def derived() -> dict[str, list[float]]:
    """Both tables, by their names in step.json."""
    with tempfile.TemporaryDirectory() as folder:
        unpack_records(folder)
        return {f"warm_{name}": fit(rows) for name, rows in rows_of(Path(folder)).items()}


def main() -> None:
    found = derived()
    print(found)
    ship("step.json", found)


if __name__ == "__main__":
    main()
