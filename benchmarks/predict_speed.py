"""Speed of predictions from descriptions, in one process and from the command line.

    python benchmarks/predict_speed.py [docs/forecast_speed.md]

Predictions are complete: prices, graph, simulation, memory, interval, breakdown.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from lumos.prediction.prediction import predict
from lumos.setup.constraints import mistakes_in
from lumos.setup.setup import Setup

LLAMA_70B = {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "vocab": 128256}


def run(gpus: int, **parallel: int) -> Setup:
    """Llama 70B with two sequences of 8,192 tokens on every GPU."""
    return Setup.model_validate(
        {
            "model": LLAMA_70B,
            "train": {"seq": 8192, "micro_batch": 1, "global_batch": 2 * gpus, "framework": "megatron"},
            "parallel": {"zero": 1, "sequence_parallel": parallel.get("tp", 1) > 1, **parallel},
            "cluster": {"gpu": "h100", "gpus": gpus},
        }
    )


def configurations(gpus: int) -> list[Setup]:
    """Every valid choice of tp, pp, vpp and cp."""
    choices = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 5), (1, 2, 4))
    setups = (run(gpus, tp=tp, pp=pp, vpp=vpp, cp=cp) for tp, pp, vpp, cp in choices)
    return [setup for setup in setups if not mistakes_in(setup)]


def per_second(setups: Iterable[Setup]) -> float:
    found = list(setups)
    start = time.perf_counter()
    for setup in found:
        predict(setup).as_dict()
    return len(found) / (time.perf_counter() - start)


def cold_seconds(runs: int = 5) -> float:
    """The command, from nothing to its answer."""
    text = (
        '[model]\npreset = "llama3-8b"\n[train]\nseq = 8192\nglobal_batch = 128\nframework = "megatron"\n'
        '[parallel]\ncp = 2\nzero = 1\n[cluster]\ngpu = "h100"\ngpus = 8\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "setup.toml"
        path.write_text(text)
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "lumos.cli.main", "predict", str(path), "--json"], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def main(output: str = "") -> None:
    choices = configurations(512)
    first = per_second(choices)
    again = per_second(choices)
    one = run(512, tp=4, pp=4, vpp=5, cp=2)
    same = per_second([one] * 100)
    large = per_second([run(16384, tp=4, pp=4, vpp=5, cp=2)] * 100)
    lines = [
        "# Speed of predictions from descriptions\n\nWritten by `make bench`.\n",
        "| predictions of Llama 70B, one core | per second |\n|---|---|",
        f"| {len(choices)} configurations on 512 GPUs, the first time each | {first:.0f} |",
        f"| the same again | {again:.0f} |",
        f"| tp 4, pp 4, vpp 5, cp 2 on 512 GPUs | {same:.0f} |",
        f"| the same on 16,384 GPUs | {large:.0f} ({same / large:.2f} times the time) |",
        f"\n`lumos predict` from the command line, cold: {cold_seconds():.2f} s (median of 5).",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if output:
        Path(output).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
