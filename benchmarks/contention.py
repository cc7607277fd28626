"""Writes docs/contention.md: what kernels lose beside communication, measured and predicted.

    python benchmarks/contention.py -o docs/contention.md

Slowdowns on the H200 are recorded in calibration/; public traces are read from ../shared/data, where it is there.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import orjson

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))

from fit_contention import FOLDS, GPU, Row, errors, fitted, kind_of, nccl_errors, operator_of, rows_of, step_slowdowns  # noqa: E402
from lumos import read_setup  # noqa: E402
from lumos.costs.contention import Beside, gpu_of_trace, rounds_of, slowdown, usual_slowdown  # noqa: E402
from lumos.graph.graph import simulate  # noqa: E402
from lumos.setup.gpus import Gpu  # noqa: E402
from lumos.setup.setup import Setup  # noqa: E402
from lumos.step.step import simulate_step  # noqa: E402

SHOWN = (1, 4, 8, 16, 24, 32, 48)
TRACES = {
    "nanoGPT, 8 H100": "nanogpt_h100/adamhook_20251031_current_rank0.json.gz",
    "nanoGPT, 8 H100, other optimizer": "nanogpt_h100/adamhook_20251031_hook_rank0.json.gz",
    "TorchRec, V100": "torchrec_v100/sst_long_a2a_optimizer_3/*_29220.*.json.gz",
    "TorchRec, V100, another run": "torchrec_v100/sst_long_a2a_optimizer_4/*_44237.*.json.gz",
}
HEAD = """# Contention

Written by `make accuracy`. NCCL runs on the GPU's own multiprocessors (SMs), a block of threads for each channel, and
stays there until a collective has ended. The kernels beside it are slower: matmuls by whole rounds of their tiles,
attention by the share of SMs that is gone, memory-bound kernels by the bandwidth as well. Lumos slows both sides for as
long as they overlap, in described steps, in dry runs and in what-ifs on traces ([concepts](concepts.md)).

## One kernel beside a copy of n blocks

Measured on an H200 by `calibration/contention_h200.py`: a kernel of n blocks of 512 threads
copies memory while a stream of equal kernels runs. Mean slowdown of matmuls by the rounds that their tiles need on 132
SMs, measured / as predicted:
"""
TRACED = """
## Kernels of public traces

The same kernel beside NCCL and alone, in runs of others. NCCL held 24 of 132 SMs on H100 and 8 of 80 on V100. Shapes
are not known here: a matmul is taken to be the usual one of its length, and a kernel of Triton's to be memory-bound.
"""
WHOLE = """## Whole steps

Training steps of decoders on the H200, beside the copy kernel from their beginning to their end. They were measured
after everything was fixed.
"""
FSDP = """
What that means for steps whose communication is hidden behind passes, as predicted:
"""
OPEN = """Not measured by us: communication over NVLink beside kernels (a copy stands for it), and GPUs other than H200.
"""


def by_rounds(rows: list[Row]) -> list[str]:
    found: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["op"] == "gemm":
            work = operator_of(row)
            rounds = min(int(rounds_of(work, GPU)), 9)
            for blocks, pause, us, rate, _ in row["beside"]:
                if not pause:
                    found[rounds, blocks].append((us / row["us"], slowdown(work, Beside(blocks, rate, True), GPU)))
    lines = [
        "| rounds | " + " | ".join(f"{n} block{'s' * (n > 1)}" for n in SHOWN) + " |",
        "|---" * (len(SHOWN) + 1) + "|",
    ]
    for rounds in sorted({key[0] for key in found}):
        means = [np.mean(found[rounds, n], axis=0) for n in SHOWN]
        name = "9 and more" if rounds == 9 else str(rounds)
        lines.append(f"| {name} | " + " | ".join(f"{m:.2f} / {p:.2f}" for m, p in means) + " |")
    return lines


def error_rows(title: str, found: dict[str, list[float]]) -> list[str]:
    return [
        f"| {title} | {kind} | {len(values)} | {100 * np.mean(np.abs(values)):.1f} | {100 * np.mean(values):+.1f} |"
        for kind, values in sorted(found.items())
    ]


def held_out(rows: list[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for fold in range(FOLDS):
        table = fitted([row for i, row in enumerate(rows) if i % FOLDS != fold])
        for kind, values in errors(rows[fold::FOLDS], table).items():
            found[kind] += values
    return found


def nccl() -> dict[str, list[float]]:
    """By kind of kernel, whatever the number of channels."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, values in nccl_errors({}).items():
        found[name.split()[0]] += values
    return found


def traced(path: Path) -> list[tuple[str, float, float, float]]:
    """Kernels of a trace that ran beside NCCL and alone: name, microseconds alone, slowdown measured and predicted."""
    record = orjson.loads(gzip.decompress(path.read_bytes()))
    events = [event for event in record["traceEvents"] if event.get("cat") == "kernel"]
    transfers = [event for event in events if "nccl" in event["name"].lower()]
    begin, end = (np.array([e["ts"] + late * e["dur"] for e in transfers]) for late in (0, 1))
    blocks = float(np.average([e["args"]["grid"][0] for e in transfers], weights=end - begin))
    gpu = gpu_of_trace(record["deviceProperties"][0]["name"], [event["name"] for event in events])
    found: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for event in events:
        if event not in transfers and event["dur"] > 0:
            first, last = event["ts"], event["ts"] + event["dur"]
            share = np.maximum(0, np.minimum(last, end) - np.maximum(first, begin)).sum() / event["dur"]
            if not 0.02 < share < 0.98:
                found[event["name"], str(event["args"]["grid"])][int(share > 0.5)].append(event["dur"])
    return [row for (name, _), times in found.items() if (row := _row(name, *times, blocks, gpu))]


def _row(
    name: str, alone: list[float], beside: list[float], blocks: float, gpu: Gpu
) -> tuple[str, float, float, float] | None:
    if min(len(alone), len(beside)) < 3 or np.median(alone) < 15:
        return None
    us = float(np.median(alone))
    kind = "matmul" if re.search(r"gemm|nvjet|xmma|cutlass", name) else "memory"
    return name, us, float(np.median(beside)) / us, float(usual_slowdown(kind, np.array([us]), blocks, gpu)[0])


def traces(folder: Path) -> list[str]:
    lines = ["| trace | kernel | µs alone | beside NCCL, measured | predicted |", "|---|---|---|---|---|"]
    for title, place in TRACES.items():
        for path in sorted((folder / "public").glob(place)):
            for name, us, measured, predicted in sorted(traced(path), key=lambda row: -row[1])[:5]:
                short = re.sub(r"void |at::native::|\(anonymous namespace\)::|<.*", "", name)[:48]
                lines.append(f"| {title} | {short} | {us:.0f} | {measured:.2f} | {predicted:.2f} |")
    return lines


def beside_a_copy() -> list[str]:
    """Whole steps that were measured beside the copy kernel."""
    lines = ["| step | blocks | measured | predicted |", "|---|---|---|---|"]
    lines += [f"| {name} | {n} | {was:.2f} | {said:.2f} |" for name, n, was, said in step_slowdowns()]
    return lines


def steps() -> list[str]:
    """Setups with communication beside their passes, and what that costs them."""
    lines = ["| step | without contention, ms | with it, ms | longer by |", "|---|---|---|---|"]
    base = read_setup(ROOT / "examples/llama3-70b.toml")
    plain = {"parallel.tp": 1, "parallel.pp": 1, "parallel.zero": 3, "parallel.vpp": 1, "parallel.dp": 64,
             "cluster.gpus": 64, "train.framework": "torchtitan", "train.recompute": "full"}  # fmt: skip
    for title, changes in (
        ("Llama 3 70B, FSDP on 64 GPUs, 1 sequence each", {"train.global_batch": 64}),
        ("the same, 4 micro-batches", {"train.global_batch": 256}),
    ):
        setup: Setup = base.replaced(plain | changes)
        step = simulate_step(setup)
        alone = simulate(step.assembly.graph()).span / 1e6
        lines.append(f"| {title} | {alone:.0f} | {step.us / 1e3:.0f} | {100 * (step.us / 1e3 / alone - 1):.1f} % |")
    return lines


def page(folder: Path) -> str:
    rows, blind = rows_of("contention_h200.jsonl.xz"), rows_of("contention_blind_h200.jsonl.xz")
    head = ["| data | kernels | cases | mean error, % | bias, % |", "|---|---|---|---|---|"]
    measured = error_rows("fitted on the others", held_out(rows))
    errors(rows, fitted(rows))  # the tables of all rows again
    counts = [sum(kind_of(row) == kind for row in rows) for kind in ("matmul", "attention", "memory")]
    kinds = "{} matmuls, {} attention kernels and {} memory-bound kernels".format(*counts)
    told = f"""
Matmuls of one round vary most: whether they need a second one depends on the tile that cuBLAS picks, which is guessed
here. Errors of the slowdown, over {kinds}. Blind kernels
have other shapes and other numbers of blocks, and were looked at once, after the tables were fixed. NCCL: two processes
share the GPU and reduce over sockets with 1 to 16 channels each; two of their blocks share an SM. Nothing was fitted on
them.
"""
    return "\n".join([
        HEAD, *by_rounds(rows), told, *head, *measured, *error_rows("blind", errors(blind, {})),
        *error_rows("real NCCL", nccl()), TRACED, *traces(folder), "",
        WHOLE, *beside_a_copy(), FSDP, *steps(), "", OPEN,
    ])  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared/data")
    options = parser.parse_args()
    options.output.write_text(page(options.shared), "utf-8")
