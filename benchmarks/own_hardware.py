"""A model file from ten minutes of sampling, beside what the package ships: whole models and operators held apart.

    python benchmarks/own_hardware.py [MODEL.npz STEPS.jsonl ...]

Without arguments it fits calibration/ten_minutes_h200.jsonl.xz, and prints the figures of docs/your_hardware.md. Steps
are files of calibration/steps_h200.py. Nothing was fitted on steps_later_h200.jsonl, measured on the machine of the ten
minutes right after them, nor on steps_small_h200.jsonl, which the host decides: its own host was sampled before them
(calibration/host_later_h200.jsonl), and takes the place of the other in the model file.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from change_cases import setup_of
from lumos.costs.operator_model import cost_model, read_cost_model
from lumos.measure.fit_machine import fit_machine
from lumos.measure.operator_rows import operator_of
from lumos.prediction.prediction import predict
from lumos.setup.setup import Setup

CALIBRATION = Path(__file__).resolve().parents[1] / "calibration"


def cases_of(path: Path) -> list[dict[str, Any]]:
    """The measured steps of a file of lines, or of the shared measurements."""
    if path.suffix == ".json":
        return list(json.loads(path.read_text())["results"])
    return [json.loads(line) for line in path.read_text().splitlines()]


def described(case: dict[str, Any]) -> Setup | None:
    """Its setup; None for experts in a loop, norms of one kernel and an unfused optimizer, which are not described."""
    if case["kind"] not in ("llama", "gpt2") or case.get("optimizer", "adamw_fused") != "adamw_fused":
        return None
    names = {"checkpoint": "ckpt", "optimizer": "opt"}
    return setup_of({names.get(key, key): value for key, value in case.items()})


def show_steps(model: str, path: Path) -> None:
    print(f"\n{path.name}\n\n| case | measured ms | shipped, % | with the file, % | decided by |")
    print("|---|---|---|---|---|")
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases_of(path):
        setup = described(case)
        if setup is None:
            continue
        shipped, own = predict(setup), predict(setup.replaced({"cluster.model": model}))
        measured = 1e3 * case["step_s_median"]
        pair = tuple(100 * (found.step_ms / measured - 1) for found in (shipped, own))
        decided = "host" if shipped.host_bound else "GPU"
        errors[decided].append((pair[0], pair[1]))
        print(f"| {case['name']} | {measured:.2f} | {pair[0]:+.1f} | {pair[1]:+.1f} | {decided} |")
    for decided, pairs in errors.items():
        means = np.abs(np.array(pairs)).mean(axis=0)
        print(f"| **mean, {decided}: {len(pairs)}** | | **{means[0]:.2f}** | **{means[1]:.2f}** | |")


def show_operators(model: Path) -> None:
    """Shapes drawn with another seed, on another machine of the kind."""
    models = cost_model("h200"), read_cost_model(model)
    errors: dict[str, list[list[float]]] = defaultdict(list)
    with lzma.open(CALIBRATION / "held_out_h200.jsonl.xz", "rt") as file:
        for line in file:
            row = json.loads(line)
            if "us" in row:
                operator = operator_of(row, "row")
                name = row["op"] if row["dtype"] == "bf16" else f"{row['op']}, {row['dtype']}"
                errors[name].append([100 * abs(one.us(operator) / row["us"] - 1) for one in models])
    print("\n| operator, shapes held apart | rows | shipped, % | with the file, % |\n|---|---|---|---|")
    for name, values in sorted(errors.items()):
        means = np.mean(values, axis=0)
        print(f"| {name} | {len(values)} | {means[0]:.1f} | {means[1]:.1f} |")


def fitted(folder: Path) -> tuple[Path, Path]:
    """Model files of the ten minutes: with the host that they sampled, and with that of host_later_h200.jsonl."""
    ten = CALIBRATION / "ten_minutes_h200.jsonl.xz"
    rows = lzma.decompress(ten.read_bytes()).decode().splitlines()
    later = (CALIBRATION / "host_later_h200.jsonl").read_text().splitlines()[1:]
    moved = folder / "other_host.jsonl"
    moved.write_text("\n".join([row for row in rows if '"op": "host"' not in row] + later) + "\n")
    models = folder / "ten_minutes.npz", folder / "other_host.npz"
    for samples, model in zip((ten, moved), models, strict=True):
        model.write_bytes(fit_machine([samples]).content)
    return models


def main(model: str = "", *steps: str) -> None:
    if model:
        for path in steps:
            show_steps(model, Path(path))
        return
    with tempfile.TemporaryDirectory() as folder:
        ten, other_host = fitted(Path(folder))
        show_steps(str(ten), CALIBRATION / "steps_later_h200.jsonl")
        show_steps(str(ten), CALIBRATION / "steps_small_h200.jsonl")  # with the host of another machine
        show_steps(str(other_host), CALIBRATION / "steps_small_h200.jsonl")
        show_operators(ten)


if __name__ == "__main__":
    main(*sys.argv[1:])
