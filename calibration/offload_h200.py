"""Times what offloading and Muon cost: copies between GPU and host, Adam on the host, Newton-Schulz on the GPU.

    python3 calibration/offload_h200.py OUT.json

Needs torch and a GPU, nothing else. Copies are of pinned memory, alone and in both directions at once; Adam is torch's
fused one on fp32 tensors, with as many threads as the machine has cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

SHAPES = ((4096, 4096), (4096, 14336), (1024, 4096), (8192, 8192), (8192, 28672), (2048, 768))
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median of several calls, each until the GPU is idle."""
    found = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def copies() -> dict[str, float]:
    """GB/s in one direction, and of each direction while both are busy."""
    size = 1 << 30
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            host[0].copy_(gpu[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            gpu[1].copy_(host[1], non_blocking=True)

    return {
        "to_host_gb_s": size / 1e9 / seconds(lambda: host[0].copy_(gpu[0], non_blocking=True)),
        "to_gpu_gb_s": size / 1e9 / seconds(lambda: gpu[0].copy_(host[0], non_blocking=True)),
        "both_each_gb_s": size / 1e9 / seconds(both),
    }


def host_adam() -> dict[str, float]:
    """Parameters per second, fused and not."""
    torch.set_num_threads(os.cpu_count() or 1)
    found = {}
    for fused in (True, False):
        weights = [torch.nn.Parameter(torch.randn(1 << 26)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        update = torch.optim.AdamW(weights, fused=fused)
        us = seconds(update.step, repeats=3)
        found["fused" if fused else "foreach"] = sum(w.numel() for w in weights) / us / 1e9
    return {"cores": float(os.cpu_count() or 1), **{f"{key}_gparams_s": value for key, value in found.items()}}


def newton_schulz(gradient: torch.Tensor) -> torch.Tensor:
    """Five iterations in bf16 on the smaller side of a matrix (Jordan et al. 2024)."""
    a, b, c = NEWTON_SCHULZ
    x = gradient.bfloat16()
    x = x.mT if x.size(0) > x.size(1) else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    return x


def orthogonalised() -> list[dict[str, float]]:
    """Milliseconds of Newton-Schulz for matrices of common shapes."""
    rows = []
    for m, n in SHAPES:
        gradient = torch.randn(m, n, device="cuda")
        rows.append({"m": m, "n": n, "ms": 1e3 * seconds(lambda gradient=gradient: newton_schulz(gradient))})
    return rows


if __name__ == "__main__":
    result = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copies": copies(), "host_adam": host_adam(),
        "newton_schulz": orthogonalised(),
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
