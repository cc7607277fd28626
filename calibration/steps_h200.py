"""Clean training steps on one GPU: time, peak memory and energy, one process a case. No profiler anywhere.

python3 calibration/steps_h200.py OUTPUT.jsonl SECONDS [later|small]

`later` and `small`: other models, measured beside the samples of `lumos sample` to judge a model file
(benchmarks/own_hardware.py); nothing was fitted on them.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from models import Shape
from single import Case

SHORTEST_S = 2.5  # of steady training, for a reading of the energy counter
CASES = [
    Case("llama_l6_h2560_b2", "llama", Shape(6, 2560, 6912, 20, 48000, 2048, 2)),
    Case("llama_l10_h1792_b6", "llama", Shape(10, 1792, 4864, 14, 24000, 1536, 6)),
    Case("llama_l4_h5120_b2", "llama", Shape(4, 5120, 13824, 40, 32000, 2048, 2)),
    Case("llama_l3_h8192_s4096_b1_gqa", "llama", Shape(3, 8192, 28672, 64, 32000, 4096, 1, kv=8)),
    Case("llama_l2_h8192_s2048_b4", "llama", Shape(2, 8192, 22016, 64, 32000, 2048, 4)),
    Case("llama_l6_h3072_s1024_b12", "llama", Shape(6, 3072, 8192, 24, 32000, 1024, 12)),
    Case("llama_l4_h2048_s16384_b1", "llama", Shape(4, 2048, 5632, 16, 32000, 16384, 1)),
    Case("llama_l12_h1536_s2048_b8", "llama", Shape(12, 1536, 4096, 12, 50304, 2048, 8)),
    Case("llama_l20_h1024_s1024_b16", "llama", Shape(20, 1024, 2816, 16, 32000, 1024, 16)),
    Case("llama_l8_h4096_s512_b8_gqa", "llama", Shape(8, 4096, 14336, 32, 128256, 512, 8, kv=8)),
    Case("llama_l5_h3584_s3072_b3_gqa", "llama", Shape(5, 3584, 18944, 28, 151936, 3072, 3, kv=4)),
    Case("llama_l6_h2048_s2048_b16_ckpt", "llama", Shape(6, 2048, 5632, 16, 32000, 2048, 16), checkpoint=True),
    Case("llama_l6_h4096_s4096_b2_ckpt", "llama", Shape(6, 4096, 11008, 32, 32000, 4096, 2), checkpoint=True),
    Case("llama_l6_h3072_s2048_b2_accum4", "llama", Shape(6, 3072, 8192, 24, 32000, 2048, 2), accum=4),
    Case("llama_l4_h1024_s512_b2", "llama", Shape(4, 1024, 2816, 8, 32000, 512, 2)),
    Case("llama_l12_h768_s1024_b1", "llama", Shape(12, 768, 2048, 12, 32000, 1024, 1)),
    Case("gpt2_l8_h1600_s1024_b16", "gpt2", Shape(8, 1600, 6400, 25, 50257, 1024, 16)),
    Case("gpt2_l12_h768_s1024_b12", "gpt2", Shape(12, 768, 3072, 12, 50304, 1024, 12)),
    Case("gpt2_l6_h2560_s2048_b4", "gpt2", Shape(6, 2560, 10240, 32, 50304, 2048, 4)),
    Case("gpt2_l24_h1024_s512_b4", "gpt2", Shape(24, 1024, 4096, 16, 50257, 512, 4)),
    Case("mixtral_l4_h1536_s1024_b4", "mixtral", Shape(4, 1536, 4096, 12, 32000, 1024, 4, kv=4)),
    Case("mixtral_l2_h4096_s2048_b2", "mixtral", Shape(2, 4096, 8192, 32, 32000, 2048, 2, kv=8)),
    Case("foreach_l6_h2048_s2048_b4", "llama", Shape(6, 2048, 5632, 16, 32000, 2048, 4), optimizer="adamw_foreach"),
    Case("compile_l8_h2048_s4096_b2", "llama", Shape(8, 2048, 5632, 16, 32000, 4096, 2), compile=True),
    Case("compile_l4_h4096_s2048_b4", "llama", Shape(4, 4096, 11264, 32, 32000, 2048, 4), compile=True),
    Case("plain_l8_h2048_s2048_b4", "plain", Shape(8, 2048, 5632, 16, 32000, 2048, 4)),
    Case("plain_l4_h4096_s4096_b2", "plain", Shape(4, 4096, 11264, 32, 32000, 4096, 2)),
]

LATER = [
    Case("llama_l7_h2304_b4", "llama", Shape(7, 2304, 6144, 18, 40000, 2048, 4)),
    Case("llama_l3_h6144_b2", "llama", Shape(3, 6144, 16384, 48, 32000, 2048, 2)),
    Case("llama_l9_h3328_s4096_b1", "llama", Shape(9, 3328, 8960, 26, 64000, 4096, 1)),
    Case("llama_l5_h4608_s1024_b6_gqa", "llama", Shape(5, 4608, 12288, 36, 100352, 1024, 6, kv=12)),
    Case("llama_l14_h1280_b8", "llama", Shape(14, 1280, 3584, 20, 32000, 2048, 8)),
    Case("llama_l4_h7168_b2_gqa", "llama", Shape(4, 7168, 18432, 56, 32000, 2048, 2, kv=8)),
    Case("gpt2_l10_h1280_b12", "gpt2", Shape(10, 1280, 5120, 20, 50304, 1024, 12)),
    Case("gpt2_l5_h3072_s2048_b3", "gpt2", Shape(5, 3072, 12288, 24, 50304, 2048, 3)),
    Case("llama_l8_h3584_s4096_b2_ckpt", "llama", Shape(8, 3584, 9728, 28, 32000, 4096, 2), checkpoint=True),
    Case("llama_l6_h2560_s2048_b2_accum3", "llama", Shape(6, 2560, 7168, 20, 32000, 2048, 2), accum=3),
    Case("compile_l6_h3072_b4", "llama", Shape(6, 3072, 8192, 24, 32000, 2048, 4), compile=True),
]

SMALL = [  # which the host decides
    Case("llama_l5_h1024_s512_b2", "llama", Shape(5, 1024, 2816, 8, 32000, 512, 2)),
    Case("llama_l16_h896_s1024_b1_gqa", "llama", Shape(16, 896, 4864, 14, 151936, 1024, 1, kv=2)),
    Case("llama_l10_h1536_s1024_b1", "llama", Shape(10, 1536, 4096, 12, 32000, 1024, 1)),
    Case("gpt2_l12_h768_s512_b2", "gpt2", Shape(12, 768, 3072, 12, 50257, 512, 2)),
    Case("gpt2_l20_h1024_s512_b2", "gpt2", Shape(20, 1024, 4096, 16, 50257, 512, 2)),
    Case("llama_l8_h1280_s512_b2_ckpt", "llama", Shape(8, 1280, 3456, 10, 32000, 512, 2), checkpoint=True),
    Case("llama_l4_h768_s512_b1_accum4", "llama", Shape(4, 768, 2048, 12, 32000, 512, 1), accum=4),
]
SETS = {"": CASES, "later": LATER, "small": SMALL}


class EnergyCounter:
    """The board's own counter of millijoules, read through the driver's library."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        self.library.nvmlInit_v2()
        self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle))

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        status = self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(value))
        return value.value / 1e3 if status == 0 else float("nan")


def run_case(case: Case) -> dict[str, Any]:
    """Everything measured of one case."""
    import torch

    from models import build_model
    from single import training_step

    model = build_model(case.kind, case.shape, "cuda")
    if case.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step = training_step(case, model, "cuda")
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    counter, began = EnergyCounter(), time.perf_counter()
    joules = counter.joules()
    while len(seconds) < 15 or time.perf_counter() - began < SHORTEST_S:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    joules = counter.joules() - joules
    wall = time.perf_counter() - began
    sizes = asdict(case)
    sizes |= sizes.pop("shape")
    return {
        "name": case.name,
        **{k: sizes[k] for k in ("kind", "layers", "hidden", "ffn", "heads", "kv", "vocab", "seq", "mbs", "accum",
                                 "checkpoint", "compile", "optimizer")},
        "n_params": sum(p.numel() for p in model.parameters()),
        "step_s_median": median(seconds), "step_s_min": min(seconds), "step_s_max": max(seconds), "steps": len(seconds),
        "joules_per_step": joules / len(seconds), "watts": joules / wall,
        "peak_mem_alloc": torch.cuda.max_memory_allocated(), "peak_mem_reserved": torch.cuda.max_memory_reserved(),
    }  # fmt: skip


def main(output: str, seconds: str, which: str = "") -> None:
    end = time.monotonic() + float(seconds)
    lines = Path(output).read_text().splitlines() if Path(output).exists() else []
    known = {json.loads(line)["name"] for line in lines}
    for case in (case for case in SETS[which] if case.name not in known):
        left = end - time.monotonic()
        if left < 20:
            print(f"{case.name}: no time left", flush=True)
            continue
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--case", case.name, output],
                capture_output=True, text=True, timeout=min(90, left),
            )  # fmt: skip
            print((done.stdout + done.stderr)[-300:].strip(), flush=True)
        except subprocess.TimeoutExpired:
            print(f"{case.name}: took too long", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        chosen = next(case for cases in SETS.values() for case in cases if case.name == sys.argv[2])
        result = run_case(replace(chosen))
        with Path(sys.argv[3]).open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result['name']}: {result['step_s_median'] * 1e3:.2f} ms, {result['watts']:.0f} W, "
              f"{result['peak_mem_alloc'] / 2**30:.2f} GiB")  # fmt: skip
    else:
        main(*sys.argv[1:])
