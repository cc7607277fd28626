"""The same batch of the same model in every way one GPU can train it: micro-batch and recomputation. Clean step times.

python3 calibration/choices_h200.py OUTPUT.jsonl SECONDS

What a search would have chosen is compared with the best of these by benchmarks/choices.py; nothing is fitted on them.
"""

from __future__ import annotations

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

BATCHES = {
    Case("llama_l12_h2048_s2048", "llama", Shape(12, 2048, 5632, 16, 32000, 2048, 1)): 16,
    Case("llama_l24_h1024_s1024", "llama", Shape(24, 1024, 2816, 16, 32000, 1024, 1)): 32,
    Case("llama_l4_h4096_s4096", "llama", Shape(4, 4096, 14336, 32, 32000, 4096, 1, kv=8)): 8,
    Case("llama_l8_h3072_v128k", "llama", Shape(8, 3072, 8192, 24, 128256, 2048, 1, kv=8)): 16,
    Case("llama_l16_h4096_s8192", "llama", Shape(16, 4096, 14336, 32, 32000, 8192, 1, kv=8)): 8,
    Case("gpt2_l12_h1024_s1024", "gpt2", Shape(12, 1024, 4096, 16, 50304, 1024, 1)): 32,
}
FEWEST_STEPS, SHORTEST_S = 4, 1.5


def configurations() -> list[Case]:
    """Every micro-batch that divides the batch, with and without recomputation."""
    found = []
    for case, batch in BATCHES.items():
        for size in (1, 2, 4, 8, 16, 32):
            if batch % size == 0:
                shape = replace(case.shape, mbs=size)
                for checkpoint in (False, True):
                    name = f"{case.name}_b{size}{'_ckpt' if checkpoint else ''}"
                    found.append(replace(case, name=name, shape=shape, accum=batch // size, checkpoint=checkpoint))
    return found


def run_case(case: Case) -> dict[str, Any]:
    """The step time of one configuration, or that it does not fit."""
    import torch

    from models import build_model
    from single import training_step

    sizes = asdict(case)
    sizes |= sizes.pop("shape")
    keys = ("kind", "layers", "hidden", "ffn", "heads", "kv", "vocab", "seq", "mbs", "accum", "compile")
    told = {"name": case.name, **{key: sizes[key] for key in keys}, "ckpt": case.checkpoint}
    try:
        model = build_model(case.kind, case.shape, "cuda")
        if case.checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        step = training_step(case, model, "cuda")
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        seconds: list[float] = []
        while len(seconds) < FEWEST_STEPS or sum(seconds) < SHORTEST_S:
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.cuda.OutOfMemoryError:
        return told | {"fits": False}  # the traceback that holds its tensors ends here
    return told | {"fits": True, "step_s_median": median(seconds), "step_s_min": min(seconds), "steps": len(seconds),
                   "peak_mem_alloc": torch.cuda.max_memory_allocated()}  # fmt: skip


def run_model(name: str, output: str) -> None:
    """All configurations of one model that the file has not, in one process: starting one takes longer than they do."""
    import gc

    import torch

    lines = Path(output).read_text().splitlines() if Path(output).exists() else []
    known = {json.loads(line)["name"] for line in lines}
    for case in configurations():
        if case.name.startswith(name) and case.name not in known:
            result = run_case(case)
            with Path(output).open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{result['name']}: {1e3 * result.get('step_s_median', float('nan')):.2f} ms", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main(output: str, seconds: str) -> None:
    end = time.monotonic() + float(seconds)
    for case in BATCHES:
        command = [sys.executable, __file__, "--model", case.name, output]
        try:
            subprocess.run(command, timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{case.name}: no time left", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--model":
        run_model(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
