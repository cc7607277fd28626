"""Fits the cost models that the package ships, from samples of H200 and from the published ones of A100 and GH200.

    python calibration/fit_costs.py [h200] [a100 OPERATORS/Perlmutter] [gh200 OPERATORS/Vista]

Writes src/lumos/data/costs/GPU.npz and prints each family's error on shapes held apart. The A100 and GH200 samples are
those of arXiv 2509.22832 (MIT licence); only the fitted trees are kept.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

from lumos.costs.hardware_model import encode
from lumos.measure.fit import Verdict, fit
from lumos.measure.fit_samples import Sample
from lumos.measure.operator_rows import operator_of
from lumos.measure.published_samples import published_rows
from lumos.measure.sample_grid import COLLECTIVES
from lumos.setup.gpus import gpu_named

HERE = Path(__file__).parent
TARGET = HERE.parent / "src/lumos/data/costs"


def h200_samples() -> Iterator[Sample]:
    with lzma.open(HERE / "samples_h200.jsonl.xz", "rt") as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if "us" in row:
                yield Sample(operator_of(row, f"line {number}"), row["us"])
    yield from grouped_samples()


def grouped_samples() -> Iterator[Sample]:
    """Grouped matmuls in all layouts; experts that get more tokens than others hardly change the time of them all."""
    with lzma.open(HERE / "moe_operators_h200.jsonl.xz", "rt") as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if row["op"] == "grouped" and "us" in row:
                same = row | {"op": "grouped_gemm", "layout": row["layout"].upper()}
                yield Sample(operator_of(same, f"line {number}"), row["us"])


def published_samples(folder: Path) -> Iterator[Sample]:
    """The operators of one site."""
    for place, row in published_rows(folder):
        if "us" in row and row["op"] not in COLLECTIVES:
            yield Sample(operator_of(row, place), row["us"])


def show(gpu: str, verdicts: list[Verdict]) -> None:
    print(f"{gpu}: held-out error, percent")
    for v in verdicts:
        print(f"  {v.family:24s} {v.rows:6d} rows  mean {v.error_pct:6.2f}  median {v.median_pct:6.2f}  {v.refused}")


def fit_and_write(gpu: str, samples: list[Sample]) -> None:
    regressors, verdicts = fit(gpu_named(gpu), samples)
    show(gpu, verdicts)
    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / f"{gpu}.npz").write_bytes(encode(gpu, regressors))


def main(arguments: list[str]) -> None:
    while arguments:
        gpu = arguments.pop(0)
        if gpu == "h200":
            fit_and_write(gpu, list(h200_samples()))
        else:
            fit_and_write(gpu, list(published_samples(Path(arguments.pop(0)))))


if __name__ == "__main__":
    main(sys.argv[1:])
