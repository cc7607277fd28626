"""What a search would have chosen on one H200, against all measured configurations for the same batch.

    python benchmarks/choices.py

Six models, every micro-batch that divides the batch, with and without recomputation (calibration/choices_h200.py). They
were measured after everything that predicts them was fixed, and nothing was fitted on them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from change_cases import setup_of
from lumos.prediction.prediction import predict

MEASURED = Path(__file__).parent.parent / "calibration/choices_h200.jsonl"


def main() -> None:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        found = predict(setup_of(row))
        row |= {"predicted": found.step_ms / 1e3, "predicted_fits": found.memory.fits, "host": found.host_bound}
        groups[row["name"].partition("_b")[0]].append(row)
    titles = ("model", "configurations", "fit, predicted / measured", "chosen", "best", "regret, %", "errors: GPU, %",
              "host, %")  # fmt: skip
    print(f"| {' | '.join(titles)} |")
    print("|---|---|---|---|---|---|---|---|")
    regrets, wrong = [], 0
    errors: dict[bool, list[float]] = {True: [], False: []}
    for name, rows in sorted(groups.items()):
        ran = [row for row in rows if row["fits"]]
        wrong += sum(row["fits"] != row["predicted_fits"] for row in rows)
        chosen = min((r for r in rows if r["predicted_fits"]), key=lambda r: r["predicted"])
        best = min(ran, key=lambda r: r["step_s_median"])
        regrets.append(100 * (chosen.get("step_s_median", np.inf) / best["step_s_median"] - 1))
        mine: dict[bool, list[float]] = {True: [], False: []}
        for row in ran:
            mine[row["host"]].append(100 * abs(row["predicted"] / row["step_s_median"] - 1))
        for key, values in mine.items():
            errors[key] += values
        shown = [f"{np.mean(mine[key]):.1f}" if mine[key] else "" for key in (False, True)]
        names = [row["name"].removeprefix(name + "_") for row in (chosen, best)]
        fits = f"{sum(r['predicted_fits'] for r in rows)} / {len(ran)}"
        print(f"| {name} | {len(rows)} | {fits} | {names[0]} | {names[1]} | {regrets[-1]:.1f} | {' | '.join(shown)} |")
    count = sum(map(len, groups.values()))
    print(
        f"\nRegret: mean {np.mean(regrets):.2f} %, worst {max(regrets):.2f} %. Whether it fits is right for "
        f"{count - wrong} of {count}. Mean error of step times: {np.mean(errors[False]):.1f} % where the GPU decides "
        f"({len(errors[False])} configurations), {np.mean(errors[True]):.1f} % where the host does "
        f"({len(errors[True])})."
    )


if __name__ == "__main__":
    main()
