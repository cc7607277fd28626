"""Samples operators with nothing installed but torch and numpy; `lumos sample` does the same with a progress bar.

PYTHONPATH=src python3 calibration/sample_h200.py SAMPLES.jsonl SECONDS [SCALE [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from lumos.measure.sample import sample
from lumos.measure.sample_grid import rows


def report(done: int, total: int, operator: str) -> None:
    if done % 1000 == 0:
        print(f"{done} of {total}: {operator}", flush=True)


def main(output: str, seconds: str, scale: str = "1", seed: str = "0") -> None:
    measured, left = sample(rows(float(scale), seed=int(seed)), Path(output), float(seconds), report)
    print(f"{measured} measured, {left} left")


if __name__ == "__main__":
    main(*sys.argv[1:])
