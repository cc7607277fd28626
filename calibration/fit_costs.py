"""Fits the cost models that the package ships, from samples of H200 and from the published ones of A100 and GH200.

    python calibration/fit_costs.py [h200] [a100 OPERATORS/Perlmutter] [gh200 OPERATORS/Vista]

Writes src/lumos/data/costs/GPU.npz and prints each family's error on shapes held apart. The A100 and GH200 samples are
those of arXiv 2509.22832 (MIT licence); only the fitted trees are kept.
"""

from __future__ import annotations

import csv
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path

from lumos.cost.hardware_model import encode
from lumos.measure.fit import Sample, Verdict, fit
from lumos.measure.operator_rows import operator_of
from lumos.program.operators import Operator
from lumos.setup.gpus import gpu_named

HERE = Path(__file__).parent
TARGET = HERE.parent / "src/lumos/data/costs"
Values = dict[str, int]
VOCABULARY = 50257


def h200_samples() -> Iterator[Sample]:
    with lzma.open(HERE / "samples_h200.jsonl.xz", "rt") as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if "us" in row:
                yield Sample(operator_of(row, f"line {number}"), row["us"])


def _linear(n: Callable[[Values], int], k: Callable[[Values], int]) -> Callable[[Values], tuple[int, ...]]:
    return lambda r: (r["b"] * r["l"], n(r), k(r))


def _padded(r: Values) -> int:
    return ceil(VOCABULARY / (128 * r["mp"])) * 128


def _plane(r: Values) -> tuple[int, ...]:
    return r["b"] * r["l"], r["dim"]


def _heads(r: Values) -> tuple[int, ...]:
    return r["b"], max(1, r["h"] // r["mp"]), r["l"], r["dim"] // r["h"]


def _scores(r: Values) -> tuple[int, ...]:
    return r["b"], max(1, r["h"] // r["mp"]), r["l"]


def _batch(m: str, n: str, k: str) -> Callable[[Values], tuple[int, ...]]:
    def shape(r: Values) -> tuple[int, ...]:
        sizes = {"l": r["l"], "d": r["dim"] // r["h"]}
        return r["b"] * max(1, r["h"] // r["mp"]), sizes[m], sizes[n], sizes[k]

    return shape


FILES: dict[str, tuple[str, str, Callable[[Values], tuple[int, ...]]]] = {
    "linear1": ("gemm_tn", "linear_bwd", _linear(lambda r: 3 * r["dim"] // r["mp"], lambda r: r["dim"])),
    "linear2": ("gemm_tn", "linear_bwd", _linear(lambda r: r["dim"], lambda r: r["dim"] // r["mp"])),
    "linear3": ("gemm_tn", "linear_bwd", _linear(lambda r: 4 * r["dim"] // r["mp"], lambda r: r["dim"])),
    "linear4": ("gemm_tn", "linear_bwd", _linear(lambda r: r["dim"], lambda r: 4 * r["dim"] // r["mp"])),
    "linear_final": ("gemm_tn", "linear_bwd", _linear(_padded, lambda r: r["dim"])),
    "flash_atten": ("sdpa_fwd", "sdpa_bwd", _heads),
    "baddbmm": ("bmm", "bmm_bwd", _batch("l", "l", "d")),
    "bmm": ("bmm", "bmm_bwd", _batch("l", "d", "l")),
    "ScaledUpperTriangMaskedSoftmax": ("softmax_fwd", "softmax_bwd", _scores),
    "softmax": ("neox_softmax_fwd", "neox_softmax_bwd", _scores),
    "fillmask": ("neox_fillmask_fwd", "neox_fillmask_bwd", _scores),
    "RoPE": ("neox_rotary_fwd", "neox_rotary_bwd", _heads),
    "layernorm": ("neox_layer_norm_fwd", "neox_layer_norm_bwd", _plane),
    "RMSlayernorm": ("neox_rms_norm_fwd", "neox_rms_norm_bwd", _plane),
    "res_add": ("neox_add_fwd", "neox_add_bwd", _plane),
    "gelu": ("neox_gelu_fwd", "neox_gelu_bwd", lambda r: (r["b"] * r["l"], 4 * r["dim"] // r["mp"])),
    "embedding": ("neox_embedding_fwd", "neox_embedding_bwd", lambda r: (r["b"] * r["l"], _padded(r), r["dim"])),
    "parallel_cross_entropy_128": ("neox_loss_fwd", "neox_loss_bwd", lambda r: (r["b"] * r["l"], _padded(r))),
    "firstStage_optimizer": ("neox_optimizer_first", "", lambda r: (r["encoders"], r["dim"], r["mp"])),
    "middleStage_optimizer": ("neox_optimizer_middle", "", lambda r: (r["encoders"], r["dim"], r["mp"])),
    "lastStage_optimizer": ("neox_optimizer_last", "", lambda r: (r["encoders"], r["dim"], r["mp"])),
}
INSANE = {
    ("Vista", "sdpa_bwd"),  # faster than its forward
    ("Vista", "neox_optimizer_first"), ("Vista", "neox_optimizer_middle"), ("Vista", "neox_optimizer_last"),
}  # fmt: skip  # the optimizers: more than twice the bandwidth of the memory
CAUSAL = 0.57
"""Flash attention was sampled without a mask (223 TFLOP/s on A100 only if the whole square counts). The masked kernel
does 0.516 of the blocks at this size, at a tenth less throughput."""


def published_samples(folder: Path) -> Iterator[tuple[str, Sample]]:
    """(file, sample) of one site's operators."""
    for name, (forward, backward, shape) in FILES.items():
        with (folder / "operator" / f"{name}_fp16.csv").open() as file:
            for row in csv.DictReader(file):
                sizes = {k: int(float(v)) for k, v in row.items() if "dur" not in k}
                sizes.setdefault("mp", 1)
                for kind, column in ((forward, "F_dur(us)"), (backward, "B_dur(us)"), (forward, "dur(us)")):
                    value = float(row.get(column) or 0)
                    if kind and 0 < value < 1e6 and (folder.name, kind) not in INSANE:
                        share = CAUSAL if kind.startswith("sdpa") else 1.0
                        yield name, Sample(Operator(kind, shape(sizes), "fp16"), value * share)


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
            fit_and_write(gpu, [sample for _, sample in published_samples(Path(arguments.pop(0)))])


if __name__ == "__main__":
    main(sys.argv[1:])
