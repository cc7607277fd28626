"""What 8-bit matmuls with a scaling factor for every block cost against those with one factor, and latent attention.

Measured on an H200 with torch alone, each case beside the one it is compared with, so that the ratio counts:

- `scaled_mm` with one factor a tensor, one a row, and factors of 1 × 128 (activations) and 128 × 128 (weights), as
  DeepSeek-V3 trains; in the shapes of its layers and in others;
- attention whose keys (192) are wider than its values (128), against equal widths of 128, 160 and 192.

    python calibration/block_scaled_h200.py --seconds 150 -o $OUT/block_scaled_h200.jsonl
    python calibration/block_scaled_h200.py --summary calibration/block_scaled_h200.jsonl

The summary prints the medians that `block_scaled` and `block_scaled_weights` of src/lumos/data/step.json are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = (
    *((4096, 7168, 16384), (4096, 16384, 7168), (7168, 16384, 4096)),  # output projection of DeepSeek-V3
    *((4096, 24576, 1536), (4096, 32768, 512), (4096, 1536, 7168), (4096, 4096, 7168), (4096, 7168, 2048)),
    *((8192, 4096, 7168), (8192, 7168, 2048), (4096, 36864, 7168), (4096, 7168, 18432)),  # experts, dense layers
    *((8192, 8192, 8192), (4096, 4096, 4096), (16384, 5120, 5120), (8192, 28672, 8192), (2048, 8192, 8192)),
)
Kinds = Iterator[tuple[str, Callable[[], Any]]]
HEADS = ((192, 128), (128, 128), (160, 160), (192, 192))


def median_us(run: Callable[[], Any], repeats: int = 15) -> float:
    """The median of single runs, each after the cache was overwritten."""
    trash = torch.empty(64 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        trash.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return float(sorted(times)[repeats // 2])


def matmuls(m: int, n: int, k: int) -> Kinds:
    """The product of (m, k) and (k, n) with factors of every kind."""
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")

    def product(scale_a: torch.Tensor, scale_b: torch.Tensor, fast: bool = True) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(
            a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    yield "tensor", product(one, one)
    yield "tensor, exact", product(one, one, fast=False)
    yield "row", product(torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda"))
    rows = torch.ones(k // 128, m, device="cuda").t()
    columns = torch.ones(k // 128, n, device="cuda")
    yield "block", product(rows, torch.ones(n // 128, k // 128, device="cuda").t(), fast=False)
    yield "block of weights", product(rows, columns, fast=False)
    bf16 = a.to(torch.bfloat16), b.to(torch.bfloat16)
    yield "bf16", lambda: torch.mm(*bf16)


def attentions(keys: int, values: int, backend: SDPBackend) -> Kinds:
    """128 heads over 4,096 tokens, forward and backward."""
    q, k, v = (
        torch.randn(1, 128, 4096, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in (keys, keys, values)
    )
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        yield "forward", lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
        yield "backward", lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def cases() -> Iterator[tuple[dict[str, Any], Callable[[], Kinds]]]:
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for keys, values in HEADS:
            what = {"keys": keys, "values": values, "backend": backend.name}
            yield what, partial(attentions, keys, values, backend)
    for m, n, k in SHAPES:
        yield {"m": m, "n": n, "k": k}, partial(matmuls, m, n, k)


def measured(make: Callable[[], Kinds]) -> Iterator[tuple[str, float | str]]:
    """Every kind of a case; what this version of torch does not have is an error of its own."""
    kinds = make()
    while True:
        try:
            kind, run = next(kinds)
        except StopIteration:
            return
        except Exception as error:  # a backend that refuses the shape
            yield "all", f"{type(error).__name__}: {error}"[:300]
            return
        try:
            yield kind, median_us(run)
        except Exception as error:
            yield kind, f"{type(error).__name__}: {error}"[:300]


def summary(path: Path) -> str:
    """Times of matmuls over those with one factor a tensor: median, least and most over all shapes."""
    found: dict[tuple[int, ...], dict[str, float]] = {}
    for row in map(json.loads, path.read_text("utf-8").splitlines()):
        if "m" in row and "us" in row:
            found.setdefault((row["m"], row["n"], row["k"]), {})[row["kind"]] = row["us"]
    lines = []
    for kind in ("tensor, exact", "row", "block", "block of weights"):
        ratios = sorted(times[kind] / times["tensor"] for times in found.values())
        lines.append(f"{kind}: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--summary", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.summary or not arguments.output:
        print(summary(arguments.summary or Path(__file__).with_suffix(".jsonl")))
        return
    began = time.monotonic()
    with arguments.output.open("w", encoding="utf-8") as file:
        for what, make in cases():
            if time.monotonic() - began > arguments.seconds:
                print("time is up")
                return
            for kind, found in measured(make):
                row = what | {"kind": kind, "us" if isinstance(found, float) else "error": found}
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(*row.values())


if __name__ == "__main__":
    main()
