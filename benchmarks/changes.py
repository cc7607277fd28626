"""Predict measured runs from the traces of others, and write the page docs/changes.md.

    python benchmarks/changes.py [--data ../shared/data] [-o docs/changes.md]

Truth is the wall clock of the target, measured without the profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lumos.analysis.replay import replay
from lumos.change.change import CalibratedRun
from lumos.change.infer.infer import infer
from lumos.prediction.prediction import predict
from lumos.setup.setup import Setup
from lumos.step.step import simulate_step
from lumos.trace.read.job import read_job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from synthetic_traces import write_synthetic

INTRODUCTION = """# Changed runs, predicted from traces

Written by `make accuracy`. Truth is the wall clock without the profiler. No cost of a kernel or network was fitted on
these runs, but two numbers about the host were tuned on them: the typical launch of eager PyTorch (38 µs) and how much
the host of a GPU-bound trace counts (0.35). Published for such predictions: 4.2 % mean, 8.4 % worst, for fewer types of
change.
"""
INFERRED = """## Setups inferred from traces

`lumos predict --from TRACES --set …` needs no setup file if all values can be inferred from the trace; a file completes
the rest. Inferred wrongly: {wrongs} of {compared} values in {count} traces. The rules were written with these traces at
hand, and all but the last were recorded by the same scripts, so the figures show that nothing is broken, not how well
other recordings are understood. Unchecked values are inferred, and not written down of that run. What is written down
of our own runs includes what their scripts always do (bf16, AdamW, gated MLPs except gpt2, as many key heads as heads
unless stated). parallel.zero of a run without replicas has no meaning and is not inferred.

| trace | wrong | right | unchecked | not inferred |
|---|---|---|---|---|
"""
SOURCES = ("base_l8_h2048_s2048_b2", "b8", "h4096", "l4", "s4096")
PAIRS = (
    ("ddp2_l8", "ddp2_l4"), ("ddp2_l8", "ddp2_l16"), ("ddp2_l8", "ddp2_l8_accum2"), ("ddp2_l16", "ddp2_l4"),
    ("fsdp2_l8", "fsdp2_l4"), ("tp2_l8", "tp2_l4"), ("pp2_mb4", "pp2_mb2"), ("pp2_mb4", "pp2_mb16"),
)  # fmt: skip
TARGETS: tuple[dict[str, int], ...] = (
    {}, {"parallel.dp": 8}, {"parallel.dp": 16}, {"parallel.dp": 32}, {"parallel.pp": 4, "parallel.dp": 4},
    {"parallel.pp": 8, "parallel.dp": 4}, {"parallel.pp": 16, "parallel.dp": 4}, {"parallel.pp": 4, "parallel.dp": 8},
    {"model.layers": 96}, {"model.hidden": 12288, "model.ffn": 24576},
)  # fmt: skip
WRITTEN_OF_FAKE_WORLD = (
    "cluster.gpu", "cluster.gpus", "parallel.tp", "parallel.dp", "parallel.zero", "parallel.pp", "parallel.cp",
    "model.layers", "model.hidden", "model.ffn", "model.heads", "model.vocab", "train.seq", "train.micro_batch",
)  # fmt: skip
WRITTEN_OF_MEGATRON: dict[str, Any] = {
    "cluster.gpu": "a100", "cluster.gpus": 8, "parallel.tp": 8, "parallel.pp": 1, "parallel.cp": 1, "parallel.dp": 1,
    "model.layers": 40, "model.hidden": 4096, "train.seq": 2048, "train.micro_batch": 4,
}  # fmt: skip
PARALLEL: dict[str, Any] = {
    "ddp": lambda c: {"dp": c["world"]}, "fsdp": lambda c: {"dp": c["world"], "zero": 3},
    "tp": lambda c: {"tp": c["world"]}, "pp": lambda c: {"pp": c["pp"]},
    "dp_tp": lambda c: {"tp": c["tp"], "dp": c["world"] // c["tp"], "zero": 3},
}  # fmt: skip
FAKE_WORLD: dict[str, Any] = {
    "layers": 4, "hidden": 8192, "ffn": 28672, "heads": 64, "vocab": 32000, "seq": 4096, "mbs": 1, "world": 64,
    "mode": "dp_tp", "tp": 8,
}  # fmt: skip
ASKED = (
    "cluster.gpu", "cluster.gpus", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "parallel.zero",
    "train.seq", "train.micro_batch", "train.microbatches", "train.precision", "train.recompute", "train.optimizer",
    "train.compile", "model.layers", "model.hidden", "model.ffn", "model.heads", "model.kv_heads", "model.head_dim",
    "model.vocab", "model.gated", "model.tied",
)  # fmt: skip


def setup_of(case: dict[str, Any], parallel: dict[str, int] | None = None, gpus: int = 1) -> Setup:
    """The setup of a measured case."""
    gpt2 = case.get("kind") == "gpt2"
    model = {
        "layers": case["layers"], "hidden": case["hidden"], "ffn": case["ffn"], "heads": case["heads"],
        "kv_heads": case.get("kv") or case["heads"], "vocab": case["vocab"], "gated": not gpt2, "tied": gpt2,
    }  # fmt: skip
    train = {
        "seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1),
        "recompute": "full" if case.get("ckpt") else "none", "compile": bool(case.get("compile")),
    }  # fmt: skip
    return Setup.model_validate(
        {"model": model, "train": train, "parallel": parallel or {}, "cluster": {"gpu": "h200", "gpus": gpus}}
    )


def single(data: Path) -> tuple[list[str], list[float]]:
    """One GPU: from each source to every other eager Llama."""
    root = data / "h200/single"
    cases = {c["name"]: c for c in json.loads((root / "measured.json").read_text())["results"]}
    cases = {name: c for name, c in cases.items() if c["kind"] == "llama" and not c.get("compile")}
    rows, errors = [], []
    for name in SOURCES:
        source = CalibratedRun(replay(read_job(root / f"{name}.pt.trace.json.gz")), setup_of(cases[name]))
        for target, case in cases.items():
            if target == name:
                continue
            found, truth = predict(source, setup=setup_of(case)).step_ms, 1e3 * case["step_s_median"]
            errors.append(100 * (found / truth - 1))
            rows.append(f"| {name} | {target} | {truth:.2f} | {found:.2f} | {errors[-1]:+.1f} |")
    return rows, errors


def several(data: Path) -> tuple[list[str], list[float]]:
    """Ranks that share one GPU: other layer and micro-batch counts."""
    root = data / "h200/multirank"
    rows, errors = [], []
    for name, target in PAIRS:
        ranks = [[json.loads(p.read_text()) for p in sorted((root / n).glob("rank[0-9].json"))] for n in (name, target)]
        before, after = (part[0] for part in ranks)
        parallel = PARALLEL[before["mode"]](before)
        source = CalibratedRun(replay(read_job(root / name)), setup_of(before, parallel, before["world"]))
        wanted = setup_of(before | {k: after.get(k, 1) for k in ("layers", "accum")}, parallel, before["world"])
        found = predict(source, setup=wanted).step_ms
        truth = 1e3 * statistics.mean(r["step_s_median"] for r in ranks[1])
        errors.append(100 * (found / truth - 1))
        rows.append(f"| {name} | {target} | {truth:.1f} | {found:.1f} | {errors[-1]:+.1f} |")
    return rows, errors


def one_story() -> str:
    """A synthetic trace of GPT-3 15B at TP2·PP2·DP4, edited, beside the description's own answer."""
    base = Setup.model_validate(
        {
            "model": {"layers": 48, "hidden": 6144, "ffn": 12288, "heads": 48, "vocab": 51200, "gated": False},
            "train": {"seq": 2048, "micro_batch": 1, "microbatches": 8, "framework": "megatron"},
            "parallel": {"tp": 2, "pp": 2, "dp": 4, "tp_overlap": False, "dp_overlap": False},
            "cluster": {"gpu": "h100", "gpus": 16},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(simulate_step(base), Path(folder))
        source = CalibratedRun(replay(read_job(Path(folder))), base)
        rows, worst = [], 0.0
        for changes in TARGETS:
            target = base.replaced(changes | {"train.microbatches": 8})
            edited, direct = predict(source, setup=target).step_ms, simulate_step(target).us / 1e3
            worst = max(worst, abs(100 * (edited / direct - 1)))
            name = ", ".join(f"{key} = {value}" for key, value in changes.items()) or "as traced"
            rows.append(f"| {name} | {edited:.1f} | {direct:.1f} | {100 * (edited / direct - 1):+.2f} |")
    head = "| GPT-3 15B, TP2·PP2·DP4, changed to | from its trace, ms | described, ms | % |\n|---|---|---|---|"
    title = "## From a trace and from the description"
    return f"{title}\n\nWorst {worst:.1f} % (bar 3).\n\n{head}\n" + "\n".join(rows) + "\n"


def recordings(data: Path) -> dict[Path, dict[str, Any]]:
    """Traces with what is written down of their setups, apart from the traces themselves."""
    root = data / "h200"
    cases = json.loads((root / "single/measured.json").read_text())["results"]
    found = {root / f"single/{case['name']}.pt.trace.json.gz": _written(setup_of(case), ASKED) for case in cases}
    for folder in sorted((root / "multirank").iterdir()):
        case = json.loads((folder / "rank0.json").read_text())
        found[folder] = _written(setup_of(case, PARALLEL[case["mode"]](case), case["world"]), ASKED)
    fake = setup_of(FAKE_WORLD, PARALLEL["dp_tp"](FAKE_WORLD), FAKE_WORLD["world"])
    found[root / "fake_world/rank0_of_64_tp8_dp8.pt.trace.json.gz"] = _written(fake, WRITTEN_OF_FAKE_WORLD)
    found[data / "public/megatron_tp8_a100/kineto"] = WRITTEN_OF_MEGATRON
    return {path: known for path, known in found.items() if path.is_file() or any(path.glob("rank0*.json.gz"))}


def _written(setup: Setup, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: getattr(getattr(setup, key.split(".")[0]), key.split(".")[1]) for key in keys}


def inferred(data: Path) -> str:
    """What is inferred of the setups of traces, beside what is written down of them."""
    rows, wrongs, compared = [], 0, 0
    for path, known in recordings(data).items():
        found = infer(replay(read_job(path)))
        right = [key for key in known if key in found and found[key].value == known[key]]
        wrong = [key for key in known if key in found and found[key].value != known[key]]
        unchecked = [key for key in ASKED if key in found and key not in known]
        silent = [key for key in ASKED if key not in found]
        wrongs, compared = wrongs + len(wrong), compared + len(wrong) + len(right)
        name = str(path.relative_to(data)).removesuffix(".pt.trace.json.gz")
        cells = (", ".join(wrong) or "0", str(len(right)), str(len(unchecked)), ", ".join(silent) or "0")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return INFERRED.format(wrongs=wrongs, compared=compared, count=len(rows)) + "\n".join(rows) + "\n"


def speed(data: Path) -> str:
    root = data / "h200/single"
    case = json.loads((root / "measured.json").read_text())["results"][0]
    source = CalibratedRun(replay(read_job(root / f"{case['name']}.pt.trace.json.gz")), setup_of(case))
    predict(source, setup=setup_of(case))
    start = time.perf_counter()
    for layers in range(2, 22):
        predict(source, setup=setup_of(case | {"layers": layers})).as_dict()
    return f"After loading, one answer takes {(time.perf_counter() - start) / 20 * 1e3:.1f} ms (bar 50 ms).\n"


def section(title: str, rows: list[str], errors: list[float], bar: str) -> str:
    size = np.abs(errors)
    inside = 100 * np.mean(size <= 10)
    head = "| from the trace of | to | measured ms | predicted ms | error, % |\n|---|---|---|---|---|"
    verdict = f"Mean {size.mean():.1f} %, worst {size.max():.1f} % ({bar}); within 10 %: {inside:.0f} %."
    return f"## {title}\n\n{verdict}\n\n{head}\n" + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    parts = [
        INTRODUCTION,
        section("One GPU", *single(options.data), "bars 5 and 12"),
        section("Several ranks on one GPU", *several(options.data), "bar 10 in the mean; the data vary by 10 %"),
        inferred(options.data),
        one_story(),
        speed(options.data),
    ]
    text = "\n".join(parts)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
