"""Forecasts of single-GPU runs measured on an H200, and of operators that no model was fitted on.

    python benchmarks/h200_forecasts.py [SHARED_DATA]

Prints the tables of docs/forecasts.md.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from change_cases import setup_of
from lumos.costs.operator_model import cost_model
from lumos.measure.operator_rows import operator_of
from lumos.prediction.prediction import predict

CALIBRATION = Path(__file__).parent.parent / "calibration"
GPU_BOUND = ("h4096", "s4096", "s8192", "b4", "b8", "v128k", "gpt2_l12_h1024", "compile_base")
PUBLISHED = {
    "a100": {"gemm_tn": "3.9–6.0", "linear_bwd": "3.9–6.0", "sdpa_fwd": "10.6", "sdpa_bwd": "11.9",
             "neox_layer_norm_fwd": "7", "neox_layer_norm_bwd": "7", "neox_loss_fwd": "10", "neox_loss_bwd": "10"},
    "gh200": {"gemm_tn": "2.5–5.7", "linear_bwd": "2.5–5.7", "sdpa_fwd": "6.7", "neox_layer_norm_fwd": "4",
              "neox_layer_norm_bwd": "4", "neox_loss_fwd": "12", "neox_loss_bwd": "12"},
}  # fmt: skip


def show_steps(data: Path) -> None:
    cases = json.loads((data / "h200/single/measured.json").read_text())["results"]
    print("| case | measured ms | predicted ms | error, % | peak GiB | predicted GiB | error, % | decided by |")
    print("|---|---|---|---|---|---|---|---|")
    times, peaks = {}, []
    for case in cases:
        found = predict(setup_of(case))
        measured, peak = 1e3 * case["step_s_median"], case["peak_mem_alloc"] / 2**30
        guess = found.memory.gib()["peak"]
        times[case["name"]] = 100 * (found.step_ms / measured - 1)
        peaks.append(100 * (guess / peak - 1))
        decided = "host" if found.host_bound else "GPU"
        print(f"| {case['name']} | {measured:.2f} | {found.step_ms:.2f} | {times[case['name']]:+.1f} | {peak:.2f} | "
              f"{guess:.2f} | {peaks[-1]:+.2f} | {decided} |")  # fmt: skip
    bound = [abs(error) for name, error in times.items() if name in GPU_BOUND]
    everything = [abs(error) for error in times.values()]
    print(f"\nSteps bound by the GPU ({', '.join(GPU_BOUND)}): mean {np.mean(bound):.1f} % (bar 8). "
          f"All: mean {np.mean(everything):.1f} %, worst {max(everything):.1f} %. Peak memory: mean "
          f"{np.mean(np.abs(peaks)):.2f} % (bar 5), worst {np.max(np.abs(peaks)):.2f} % (bar 15).")  # fmt: skip


def show_operators() -> None:
    """Shapes drawn with another seed, sampled later on another machine of the kind."""
    known = set(_rows("samples_h200.jsonl.xz"))
    errors: dict[str, list[float]] = defaultdict(list)
    model = cost_model("h200")
    for text, us in _rows("held_out_h200.jsonl.xz").items():
        if text in known:
            continue
        row = json.loads(text)
        name = row["op"] if row["dtype"] == "bf16" else f"{row['op']}, {row['dtype']}"
        errors[name].append(100 * abs(model.us(operator_of(row, "row")) / us - 1))
    print("| operator on H200, shapes held apart | rows | mean error, % | median, % |\n|---|---|---|---|")
    for name, values in sorted(errors.items()):
        print(f"| {name} | {len(values)} | {np.mean(values):.1f} | {np.median(values):.1f} |")


def _rows(name: str) -> dict[str, float]:
    """Rows without their times, as text, and the times."""
    found = {}
    with lzma.open(CALIBRATION / name, "rt") as file:
        for line in file:
            row = json.loads(line)
            if "us" in row:
                us = row.pop("us")
                found[json.dumps(row, sort_keys=True)] = us
    return found


def show_published() -> None:
    print("| operator | A100, held out, % | published | GH200, held out, % | published |\n|---|---|---|---|---|")
    models = {name: cost_model(name).regressors for name in ("a100", "gh200")}
    for key in sorted(models["a100"] | models["gh200"]):
        cells = []
        for name, regressors in models.items():
            cells.append(f"{regressors[key].error_pct:.1f}" if key in regressors else "")
            cells.append(PUBLISHED[name].get(key, ""))
        print(f"| {key} | {' | '.join(cells)} |")


def main(data: str = "../shared/data") -> None:
    show_steps(Path(data))
    print("\n### Operators\n")
    if (CALIBRATION / "held_out_h200.jsonl.xz").exists():
        show_operators()
        print()
    show_published()


if __name__ == "__main__":
    main(*sys.argv[1:])
