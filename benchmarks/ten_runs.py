"""Predicts the ten runs of arXiv 2509.22832 from the operator and NCCL samples of their clusters, and prints a table.

    python benchmarks/ten_runs.py SHARED_DATA/operators [--models FOLDER]

What it does by the public interface a user can do with two commands: `lumos fit OPERATORS/Perlmutter -o perlmutter.npz`
and `lumos predict examples/neox/NAME.toml --model perlmutter.npz`. GPT-NeoX with ZeRO-1 on DeepSpeed: five
configurations on Perlmutter (A100, four GPUs a node) and on Vista (GH200, one). None of the measured steps was used for
anything but the error column.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from lumos import predict, read_setup

ROOT = Path(__file__).resolve().parents[1]
SITES = ("Perlmutter", "Vista")
# NCCL ran over sockets on Perlmutter: its samples have 1.2 GB/s a GPU between nodes, of the 25 of an adapter.
WITHOUT_SAMPLES = (("cluster.gpu=a100", "cluster.gpus_per_node=4", "cluster.fabric=sockets"), ("cluster.gpu=gh200",))


class Run(NamedTuple):
    """One configuration: its measured step and the published prediction on each site, in seconds."""

    name: str
    setup: str  # in examples/neox
    measured: tuple[float, float]
    published: tuple[float, float]

    @property
    def path(self) -> Path:
        return ROOT / "examples/neox" / f"{self.setup}.toml"


RUNS = (
    Run("GPT-20B 4-4-8", "gpt-20b-pp4-tp4-dp8", (17.370, 7.129), (15.838, 6.476)),
    Run("GPT-20B 4-8-4", "gpt-20b-pp4-tp8-dp4", (42.533, 6.350), (44.210, 5.387)),
    Run("GPT-20B 8-4-4", "gpt-20b-pp8-tp4-dp4", (9.239, 4.292), (8.696, 3.932)),
    Run("LLaMA-13B 4-8-2", "llama-13b-pp4-tp8-dp2", (48.385, 6.761), (45.989, 6.151)),
    Run("Llemma-7B 4-2-2", "llemma-7b-pp4-tp2-dp2", (9.575, 5.040), (9.700, 4.779)),
)


def predicted_s(run: Run, *cluster: str) -> float:
    """The predicted step on a cluster, in seconds."""
    return predict(read_setup(run.path, cluster)).step_ms / 1e3


def _fitted(operators: Path, folder: Path) -> None:
    """The model files of both sites, in a few minutes."""
    for site in SITES:
        lumos = str(Path(sys.executable).with_name("lumos"))
        command = [lumos, "fit", str(operators / site), "-o", str(folder / f"{site}.npz")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def show(models: Path) -> None:
    """The table, with the model files SITE.npz of a folder."""
    errors = "error % | published error % | without samples, error %"
    print(f"| site | run (PP-TP-DP) | measured s | predicted s | {errors} |")
    print("|---|---|---|---|---|---|---|")
    means = []
    for index, site in enumerate(SITES):
        ours, theirs, blind = [], [], []
        for run in RUNS:
            measured, predicted = run.measured[index], predicted_s(run, f"cluster.model={models / site}.npz")
            ours.append(100 * (predicted / measured - 1))
            theirs.append(100 * (run.published[index] / measured - 1))
            blind.append(100 * (predicted_s(run, *WITHOUT_SAMPLES[index]) / measured - 1))
            cells = f"{measured:.3f} | {predicted:.3f} | {ours[-1]:+.1f} | {theirs[-1]:+.1f} | {blind[-1]:+.1f}"
            print(f"| {site} | {run.name} | {cells} |")
        mean, published, other = (sum(map(abs, errors)) / len(RUNS) for errors in (ours, theirs, blind))
        means.append(f"| {site} | **mean** | | | **{mean:.2f}** | {published:.2f} | {other:.1f} |")
    print("\n".join(means))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operators", type=Path, help="the folder that has Perlmutter and Vista")
    parser.add_argument("--models", type=Path, help="a folder of Perlmutter.npz and Vista.npz, instead of fitting them")
    options = parser.parse_args()
    if options.models:
        show(options.models)
        return
    with tempfile.TemporaryDirectory() as folder:
        _fitted(options.operators, Path(folder))
        show(Path(folder))


if __name__ == "__main__":
    main()
