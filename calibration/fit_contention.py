"""Fits how much a communication kernel slows the kernels beside it, and checks that on kernels kept apart.

    python calibration/fit_contention.py [--blind]

Reads contention_h200.jsonl.xz (calibration/contention_h200.py) and writes src/lumos/data/contention.json. Prints the
errors of kernels that the tables were fitted without (a fifth at a time), and those of real NCCL kernels of two
processes, of which nothing is fitted. With --blind it fits nothing and scores contention_blind_h200.jsonl.xz.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections import defaultdict
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from lumos.costs import contention
from lumos.costs.contention import Beside
from lumos.data_files import read_table
from lumos.program.operators import Operator
from lumos.schedules import Phase
from lumos.setup import Setup
from lumos.setup.gpus import gpu_named
from lumos.step.step import simulate_step
from shipped import ship

HERE = Path(__file__).parent
GPU = gpu_named("h200")
BLOCKS = [0, 1, 2, 4, 8, 12, 16, 24, 32, 48]
LENGTHS = [30, 100, 300, 1000, 3000]
ROUNDS = [1, 2, 3, 4, 5, 6, 8, 12, 24, 48]
FOLDS = 5
WAITED = 1.3  # time of a call over that of its kernels: beyond, the host did not launch fast enough
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    path = HERE / name
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    return [row for row in map(json.loads, text.splitlines()) if "us" in row and not _waited(row)]


def _waited(row: Row) -> bool:
    """Whether what was timed is the host, not the kernel."""
    busy = sum(kernel["us"] for kernel in row.get("kernels", ()))
    return bool(busy) and row["us"] > WAITED * busy


def operator_of(row: Row) -> Operator:
    """A measured kernel as an operator of a step."""
    if row["op"] == "gemm":
        return Operator(f"gemm_{row['layout'].lower()}", (row["m"], row["n"], row["k"]), row["dtype"])
    if row["op"] == "sdpa":
        kind = "sdpa_bwd" if row["backward"] else "sdpa_fwd"
        return Operator(kind, (row["batch"], row["heads"], row["seq"], row["dim"]), "bf16")
    return Operator("stream", (row["rows"] * row["width"],), "bf16")


def kind_of(row: Row) -> str:
    return {"gemm": "matmul", "sdpa": "attention"}.get(row["op"], "memory")


def matmul_table(rows: list[Row]) -> list[list[float]]:
    """Mean slowdown by rounds and blocks; more blocks never help."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        tiles = contention._tiles(operator_of(row), GPU.sms)
        rounds = max(r for r in ROUNDS if r <= max(1, ceil(tiles / GPU.sms)))
        for blocks, pause, us, *_ in row["beside"]:
            if not pause and tiles > GPU.sms - 2 * blocks:
                found[rounds, blocks].append(us / row["us"])
    table = []
    for rounds in ROUNDS:
        means = [1.0] + [float(np.mean(found[rounds, b])) if found[rounds, b] else np.nan for b in BLOCKS[1:]]
        known = [(b, v) for b, v in zip(BLOCKS, means, strict=True) if v == v]
        filled = np.interp(BLOCKS, *zip(*known, strict=True))
        table.append([round(float(v), 3) for v in np.maximum.accumulate(filled)])
    return table


def by_length(rows: list[Row]) -> list[list[float]]:
    """Mean slowdown of matmuls by their time alone and blocks, for those whose shape is not known."""
    table = []
    for low, high in zip([0.0, *LENGTHS[:-1]], [*LENGTHS[1:], np.inf], strict=True):  # around every knot
        some = [row for row in rows if low <= row["us"] <= high]
        means = [[us / r["us"] for r in some for n, p, us, *_ in r["beside"] if n == b and not p] for b in BLOCKS[1:]]
        table.append([1.0, *(round(float(v), 3) for v in np.maximum.accumulate([np.mean(m) for m in means]))])
    return table


def lines(rows: list[Row], kind: str) -> tuple[list[float], float]:
    """Slowdown by blocks, and for all of the memory's bandwidth, by least squares."""
    moves = kind == "memory"
    known = [(b, r if moves else 0.0, us / row["us"]) for row in rows for b, _, us, r, _ in row["beside"]]
    knots = np.array([[np.interp(b, BLOCKS, unit) for unit in np.eye(len(BLOCKS))[1:]] for b, _, _ in known])
    columns = np.column_stack([knots, [r / GPU.hbm_gb_s for _, r, _ in known]]) if moves else knots
    from scipy.optimize import nnls

    values = nnls(columns, np.array([s - 1 for *_, s in known]))[0]
    table = np.maximum.accumulate(np.concatenate([[1.0], 1 + values[: len(BLOCKS) - 1]]))
    return [round(float(v), 3) for v in table], round(float(values[-1]), 3) if moves else 0.0


def fitted(rows: list[Row]) -> dict[str, Any]:
    by = {kind: [row for row in rows if kind_of(row) == kind] for kind in ("matmul", "attention", "memory")}
    memory, bandwidth = lines(by["memory"], "memory")
    kept = {
        kind: round(float(np.mean([rate / alone for row in part for *_, rate, alone in row["beside"]])), 3)
        for kind, part in by.items()
    }
    return {
        "blocks": BLOCKS, "rounds": ROUNDS, "matmul": matmul_table(by["matmul"]),
        "us": LENGTHS, "matmul_by_us": by_length(by["matmul"]),
        "attention": lines(by["attention"], "attention")[0], "memory": memory, "bandwidth": bandwidth, "kept": kept,
    }  # fmt: skip


def errors(rows: list[Row], table: dict[str, Any]) -> dict[str, list[float]]:
    """Predicted over measured slowdown, less one, by kind of kernel."""
    read_table("contention.json").update(table)
    contention.slowdown.cache_clear()
    found = defaultdict(list)
    for row in rows:
        for blocks, _, us, rate, _ in row["beside"]:
            said = contention.slowdown(operator_of(row), Beside(blocks, rate, True), GPU)
            found[kind_of(row)].append(said / (us / row["us"]) - 1)
    return found


def show(title: str, found: dict[str, list[float]]) -> None:
    for kind, values in found.items():
        size = 100 * np.abs(values)
        middle, bias = np.median(size), 100 * np.mean(values)
        print(f"{title:24s} {kind:10s} {len(size):5d} cases: mean {size.mean():4.1f} %, median {middle:4.1f} %, "
              f"bias {bias:+.1f} %")  # fmt: skip


def nccl_errors(table: dict[str, Any]) -> dict[str, list[float]]:
    """Real NCCL kernels of two processes on one GPU; two of their blocks (288 threads, 104 KB) share an SM."""
    read_table("contention.json").update(table)
    contention.slowdown.cache_clear()
    found = defaultdict(list)
    for row in rows_of("contention_nccl_h200.jsonl"):
        if "op" in row and row["still"]:
            said = contention.slowdown(operator_of(row), Beside(row["channels"], 0.0, True), GPU)
            found[f"{kind_of(row)} {row['channels']}"].append(said / (row["beside_us"] / row["us"]) - 1)
    return found


def step_slowdowns() -> list[tuple[str, int, float, float]]:
    """Whole training steps beside a copy: name, blocks, slowdown measured and predicted."""
    measured = json.loads((HERE / "contention_steps_h200.json").read_text())
    found = []
    for name in dict.fromkeys(row["name"] for row in measured):
        rows = [row for row in measured if row["name"] == name]
        alone = float(np.mean([row["ms"] for row in rows if not row["blocks"]]))
        layers, hidden, ffn, heads, vocab, seq, batch = rows[0]["sizes"]
        setup = Setup(
            model={"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "vocab": vocab},
            train={"seq": seq, "micro_batch": batch}, cluster={"gpu": "h200"},
        )  # type: ignore[arg-type]  # fmt: skip
        step = simulate_step(setup)
        program = step.assembly.program
        blocks = [block for phase in Phase for block in program.blocks(program.chunks[0][0], phase)]
        blocks.append(program.optimizer(0))
        total = sum(block.times * step.assembly.block_time(block).us for block in blocks)
        for row in rows:
            if row["blocks"]:
                beside = Beside(row["blocks"], row["gb_s"], True)
                more = sum(block.times * step.assembly.disturbed_us(block, beside) for block in blocks)
                found.append((name, row["blocks"], row["ms"] / alone, 1 + more / total))
    return found


def main(*options: str) -> None:
    if "--blind" in options:
        show("blind", errors(rows_of("contention_blind_h200.jsonl.xz"), {}))
        return
    rows = rows_of("contention_h200.jsonl.xz")
    held: dict[str, list[float]] = defaultdict(list)
    for fold in range(FOLDS):
        table = fitted([row for i, row in enumerate(rows) if i % FOLDS != fold])
        for kind, values in errors(rows[fold::FOLDS], table).items():
            held[kind] += values
    show("held out", held)
    table = fitted(rows)
    show("NCCL, channels", nccl_errors(table))
    ship("contention.json", table)


if __name__ == "__main__":
    main(*sys.argv[1:])
