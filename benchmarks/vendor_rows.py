"""Choose measured runs that tests/test_accuracy.py guards the accuracy with, where the shared measurements are not.

    python benchmarks/vendor_rows.py SHARED_DATA

Writes small tables in the format of `lumos score` to tests/data/accuracy: facts and figures of runs whose sources have
a permissive licence, drawn at random from each source, and steps that were measured for this project on one H200.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "tests/data/accuracy"
PERMISSIVE = ("Apache-2.0", "MIT", "apache-2.0")
PER_SOURCE = 10
SWEEP_ROWS = 30
COLUMNS = (
    "id", "source", "source_url_or_repo_path", "licence", "model_name", "n_layers", "hidden", "ffn_hidden", "n_heads",
    "n_kv_heads", "head_dim", "vocab", "seq_len", "gated_mlp", "tied_embeddings", "moe_experts", "moe_topk",
    "moe_ffn_hidden", "train_mode", "gpu", "gpu_mem_gb", "gpus_per_node", "n_gpus", "interconnect_inter",
    "inter_gbps_per_gpu", "precision", "tp", "pp", "vp_interleave", "cp", "ep", "sequence_parallel", "zero",
    "fsdp_shard", "recompute", "micro_batch", "global_batch", "attention_impl", "framework", "overlap_or_graph_flags",
    "step_time_s",
)  # fmt: skip
Row = dict[str, Any]


def published(path: Path) -> list[Row]:
    """Rows with a stated step time and a permissive licence, the same number of each source; MLPerf counts as one."""
    by_source: dict[str, list[Row]] = {}
    for row in read(path):
        if row["licence"].startswith(PERMISSIVE) and row["step_time_s"] and not row["consistency_flag"]:
            row["source"] = "mlperf-training" if row["source"].startswith("mlperf") else row["source"]
            by_source.setdefault(row["source"], []).append(row)
    draw = random.Random(0)
    return [row for _, rows in sorted(by_source.items()) for row in draw.sample(rows, min(PER_SOURCE, len(rows)))]


def sweep(path: Path) -> list[Row]:
    """Configurations whose repeated runs agree."""
    stable = [row for row in read(path) if row["stable"] == "true" and row["step_time_s"]]
    return random.Random(0).sample(stable, SWEEP_ROWS)


def one_h200(path: Path) -> list[Row]:
    """Steps of Hugging Face models on one GPU, with their peak memory; compiled ones have no column to say so."""
    rows = []
    for case in json.loads(path.read_text())["results"]:
        if case.get("compile"):
            continue
        gpt2 = case["kind"] == "gpt2"
        rows.append({
            "id": case["name"], "source": "one-h200", "licence": "Apache-2.0 (this project)",
            "model_name": case["kind"], "n_layers": case["layers"],
            "hidden": case["hidden"], "ffn_hidden": case["ffn"], "n_heads": case["heads"],
            "n_kv_heads": case.get("kv") or case["heads"], "vocab": case["vocab"], "seq_len": case["seq"],
            "gated_mlp": str(not gpt2).lower(), "tied_embeddings": str(gpt2).lower(), "train_mode": "pretrain",
            "gpu": "H200", "n_gpus": 1, "precision": "bf16", "tp": 1, "pp": 1, "micro_batch": case["mbs"],
            "global_batch": case["mbs"] * case.get("accum", 1), "recompute": "full" if case.get("ckpt") else "none",
            "framework": "PyTorch, transformers", "step_time_s": round(case["step_s_median"], 6),
            "peak_gib": round(case["peak_mem_alloc"] / 2**30, 3),
        })  # fmt: skip
    return rows


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: list[Row], *more: str) -> None:
    with (TARGET / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *more), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{name}: {len(rows)} rows")


def main(data: str) -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    write("published_runs.csv", published(Path(data) / "truth/measured_runs.csv"))
    write("nanotron_sweep.csv", sweep(Path(data) / "truth/nanotron_sweep.csv"))
    write("one_h200.csv", one_h200(Path(data) / "h200/single/measured.json"), "peak_gib")


if __name__ == "__main__":
    main(sys.argv[1])
