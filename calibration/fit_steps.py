"""Fits how kernels inside a step differ from kernels alone, on the GPU-bound steps of calibration/steps_h200.jsonl.

    python calibration/fit_steps.py

Prints hopper.matrix and all.stream, which calibration/fit_in_step.py holds fixed, and the errors that remain.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from lumos.costs.energy import in_step_factors
from lumos.setup.gpus import gpu_named
from lumos.setup.setup import Setup
from lumos.step.step import simulate_step

BUSY_W = 600  # a board that draws less waits for its host


def setup_of(case: dict[str, Any]) -> Setup:
    gpt2 = case["kind"] == "gpt2"
    model = {
        "layers": case["layers"], "hidden": case["hidden"], "ffn": case["ffn"], "heads": case["heads"],
        "kv_heads": case["kv"] or case["heads"], "vocab": case["vocab"], "gated": not gpt2, "tied": gpt2,
    }  # fmt: skip
    train = {
        "seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case["accum"],
        "recompute": "full" if case["checkpoint"] else "none", "compile": case["compile"],
    }  # fmt: skip
    return Setup.model_validate({"model": model, "train": train, "cluster": {"gpu": "h200", "gpus": 1, "host": 2.0}})


Run = tuple[Setup, float]  # and its measured microseconds


def busy_runs() -> list[Run]:
    """GPU-bound steps of models that a setup describes."""
    lines = (Path(__file__).parent / "steps_h200.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    cases = [c for c in cases if c["kind"] in ("llama", "gpt2") and c["watts"] > BUSY_W and "foreach" not in c["name"]]
    return [(setup_of(case), case["step_s_median"] * 1e6) for case in cases]


def errors(runs: list[Run], matrix: float, stream: float) -> np.ndarray:
    """Logarithm of predicted over measured time."""
    factors = replace(in_step_factors(gpu_named("h200")), matrix=matrix, stream=stream)
    return np.array([log(simulate_step(setup, factors).us / us) for setup, us in runs])


def fit(runs: list[Run]) -> tuple[float, float]:
    """(matrix, stream) of the smallest mean error."""
    best = minimize(lambda x: float(np.abs(errors(runs, *x)).mean()), [1.1, 1.0], method="Nelder-Mead").x
    return float(best[0]), float(best[1])


def main() -> None:
    runs, known = busy_runs(), in_step_factors(gpu_named("h200"))
    for name, (matrix, stream) in {"fitted": fit(runs), "shipped": (known.matrix, known.stream)}.items():
        left = 100 * np.abs(errors(runs, matrix, stream))
        print(f"{name}: matrix {matrix:.3f}, stream {stream:.3f}: mean error {left.mean():.1f} %, "
              f"worst {left.max():.1f} % over {len(runs)} steps")  # fmt: skip


if __name__ == "__main__":
    main()
