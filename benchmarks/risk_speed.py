"""Drawn steps against brute force, which draws and simulates every rank and replica: how far off, and how fast.

    python benchmarks/risk_speed.py [-o docs/risk.md]

With -o, the tables replace those under the last heading of the page.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from brute_force_steps import brute_force_ms
from lumos.risk.drawn_steps import DRAWS, drawn_ms
from lumos.risk.lanes import lanes_of
from lumos.risk.monte_carlo import step_risk
from lumos.setup.setup_files import read_setup
from lumos.step.step import Step, simulate_step
from test_risk import JOBS, LARGE, REALISTIC, measures

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/llama3-70b.toml"
BRUTE_DRAWS = 20_000
SIZES = {
    "512 GPUs": [],
    "16,384 GPUs": ["cluster.gpus=16384", "train.global_batch=32768"],
    "512 GPUs, FSDP": ["parallel.pp=1", "parallel.vpp=1", "parallel.zero=3", "train.framework=torchtitan"],
}


def agreement() -> Iterator[str]:
    """A row a job."""
    yield "| job | GPUs | realistic variances | large variances | brute force, s | drawn, s |"
    yield "|---|---|---|---|---|---|"
    for name, setup in JOBS.items():
        step = simulate_step(setup)
        found = [compared(step, variability) for variability in (REALISTIC, LARGE)]
        errors = " | ".join(f"{error:.2f}" for error, _, _ in found)
        yield f"| {name} | {setup.cluster.gpus} | {errors} | {found[0][1]:.2f} | {found[0][2]:.2f} |"


def compared(step: Step, variability: object) -> tuple[float, float, float]:
    """Largest difference in percent, and seconds of both for as many steps."""
    begin = time.perf_counter()
    every = measures(brute_force_ms(step, variability, BRUTE_DRAWS))
    middle = time.perf_counter()
    drawn = measures(drawn_ms(lanes_of(step), variability, draws=BRUTE_DRAWS))
    return float(100 * np.abs(drawn / every - 1).max()), middle - begin, time.perf_counter() - middle


def speed() -> Iterator[str]:
    yield f"| Llama 3 70B, {DRAWS:,} steps | seconds | seconds of all cores | with causes |"
    yield "|---|---|---|---|"
    for name, changes in SIZES.items():
        step = simulate_step(read_setup(EXAMPLE, changes))
        begin, used = time.perf_counter(), time.process_time()
        risk = step_risk(step)
        _ = risk.step_ms
        drawn, cores = time.perf_counter() - begin, time.process_time() - used
        _ = risk.causes
        yield f"| {name} | {drawn:.1f} | {cores:.1f} | {time.perf_counter() - begin:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    drawn_ms(lanes_of(simulate_step(JOBS["DDP"])), REALISTIC, draws=1)  # compiled
    lines = [*agreement(), "", *speed()]
    print("\n".join(lines))
    if output is not None:
        text = output.read_text("utf-8")
        head = text[: text.index("in percent.\n") + len("in percent.\n")]
        output.write_text(head + "\n" + "\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
