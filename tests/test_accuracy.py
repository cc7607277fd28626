"""Accuracy on measured runs that are in the repository: guards against regressions, a little above today's errors.

What Lumos claims is in docs/forecasts.md, measured on many more runs and with every source held out of the fit.
"""

from __future__ import annotations

import csv
import json
import lzma
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from lumos import predict, read_setup
from lumos.score.measured_runs import read_rows
from lumos.score.score import score as score_rows
from lumos.setup import Setup, preset_named

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data/accuracy"
PUBLISHED_PCT = {  # of calibration/published_runs.csv: nothing is fitted on it
    "fms-fsdp": 9.0,
    "kempnerforge": 12.0,
    "torchtitan-docs-2024": 9.0,
    "torchtitan-h100-2024-12": 11.0,
    "torchtitan-async-tp-2025-06": 17.0,
    "torchtitan-trainy-h200": 12.0,
}
CHECKPOINTING = {
    "none": {},
    "op": {"recompute": "selective"},
    "layer": {"recompute": "full", "recompute_every": 2},
    "full": {"recompute": "full"},
}
MOST_PCT = {  # mean error of a source's step times
    "bigscience-bloom-prequel": 18.0,
    "korthikanti-2205.05198-table5": 11.0,
    "mlperf-training": 13.5,
    "mosaicml-llm-foundry": 9.5,
    "nemo-24.07-perf": 9.5,
    "nemo-megatron-bridge-perf": 12.5,
    "nvidia-dgxc-benchmarking": 6.0,
    "vtrain-multi-node": 10.5,
    "nanotron-playbook-sweep": 31.0,
    "one-h200": 5.2,
}


def score(table: str, output: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What `lumos score` answers, and its rows."""
    code = "import sys; from lumos.cli.main import main; sys.argv[0] = 'lumos'; main()"
    command = [sys.executable, "-c", code, "score", str(DATA / table), "--json", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with output.open(newline="") as file:
        return json.loads(done.stdout), list(csv.DictReader(file))


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], list[dict[str, str]]]]:
    folder = tmp_path_factory.mktemp("scores")
    return {path.name: score(path.name, folder / path.name) for path in sorted(DATA.glob("*.csv"))}


@pytest.mark.parametrize("source", MOST_PCT)
def test_step_times_are_as_near_to_measured_runs_as_they_were(scored: dict[str, Any], source: str) -> None:
    found = [answer["by_source"][source] for answer, _ in scored.values() if source in answer["by_source"]]
    assert len(found) == 1
    assert found[0]["mape"] < MOST_PCT[source]


def test_every_measured_run_is_predicted(scored: dict[str, Any]) -> None:
    assert [answer["refused"] for answer, _ in scored.values()] == [[], [], []]
    assert {source for answer, _ in scored.values() for source in answer["by_source"]} == MOST_PCT.keys()


def test_the_80_percent_interval_holds_for_about_80_percent_of_published_runs(scored: dict[str, Any]) -> None:
    assert 0.75 < scored["published_runs.csv"][0]["inside_interval"] < 0.92


def test_runs_of_the_sweep_are_ranked_as_measured(scored: dict[str, Any]) -> None:
    _, rows = scored["nanotron_sweep.csv"]
    measured, predicted = ([float(row[column]) for row in rows] for column in ("measured", "predicted"))
    pairs = [(a, b) for a in range(len(rows)) for b in range(a) if abs(measured[a] / measured[b] - 1) > 0.2]
    agree = sum((measured[a] > measured[b]) == (predicted[a] > predicted[b]) for a, b in pairs)
    assert agree > 0.9 * len(pairs)


def test_peak_memory_on_one_h200_is_within_two_percent(scored: dict[str, Any]) -> None:
    with (DATA / "one_h200.csv").open(newline="") as file:
        measured = {row["id"]: float(row["peak_gib"]) for row in csv.DictReader(file)}
    errors = {row["id"]: abs(float(row["peak_gib"]) / measured[row["id"]] - 1) for row in scored["one_h200.csv"][1]}
    assert errors.keys() == measured.keys()
    assert sum(errors.values()) / len(errors) < 0.005
    assert max(errors.values()) < 0.02


def test_published_runs_of_pytorch_s_frameworks_are_as_near_as_they_were() -> None:
    found = score_rows(read_rows(ROOT / "calibration/published_runs.csv"))
    assert found.refused == ()
    by_source: dict[str, list[float]] = {}
    for row in found.scored:
        by_source.setdefault(row.source, []).append(100 * abs(row.predicted / row.measured - 1))
    errors = {source: sum(values) / len(values) for source, values in by_source.items()}
    assert {source: errors[source] for source, most in PUBLISHED_PCT.items() if errors[source] > most} == {}


def _one_rank(case: dict[str, Any]) -> Setup:
    """A rank of eight whose peers answer at once; the loss of the measured script is eager even in compiled models."""
    train = {"seq": case["seq"], "micro_batch": case["micro"], "microbatches": case["accum"]}
    train |= {"framework": "torchtitan-2024" if case["compiled"] else "torchtitan", "compile": case["compiled"]}
    train |= CHECKPOINTING[case["checkpoint"]]
    if case["float8"]:
        train |= {"precision": "fp8", "fp8_scaling": case["float8"]}
    model = dict(preset_named("llama3-8b").keys) | {"layers": case["layers"]}
    parallel = {"dp": 8, "zero": 3, "no_sync": not case["sync"]}
    return Setup(model=model, train=train, parallel=parallel, cluster={"gpu": "h200", "nvlink_gb_s": 1e6})  # type: ignore[arg-type]


def test_every_kind_of_checkpointing_takes_the_time_and_keeps_the_memory_that_was_measured_on_an_h200() -> None:
    results = json.loads((ROOT / "calibration/checkpointing_h200.json").read_text())["results"]
    times, peaks = {}, {}
    for row in results:
        if row["case"]["backend"] == "flash":  # as torchtitan asks for
            answer = predict(_one_rank(row["case"]))
            times[row["case"]["name"]] = abs(answer.step_ms / 1e3 / row["step_s"] - 1)
            peaks[row["case"]["name"]] = abs(answer.memory.peak / row["peak"] - 1)
    assert len(times) == 13
    assert sum(times.values()) / len(times) < 0.04
    assert max(times.values()) < 0.075
    assert max(peaks.values()) < 0.04


def test_mixtures_of_experts_on_one_h200_are_described_as_they_were_measured(tmp_path: Path) -> None:
    """Mixtral, Qwen3, OLMoE, GPT-OSS and DeepSeek-V3 of real widths (calibration/moe_h200.py), half of them blind."""
    steps, memory = [], []
    for file in ("moe_h200.json.xz", "moe_blind_h200.json.xz"):
        with lzma.open(ROOT / "calibration" / file, "rt") as opened:
            rows = json.load(opened)["results"]
        for row in rows:
            if row["experts"] != "grouped_mm":  # a description has no loop over experts
                continue
            path = tmp_path / "config.json"
            path.write_text(json.dumps(row["config"]))
            again = "full" if row["checkpointing"] else "none"
            keys = {"seq": row["seq"], "micro_batch": row["batch"], "recompute": again}
            changes = [*(f"train.{key}={value}" for key, value in keys.items()), "cluster.gpu=h200", "cluster.gpus=1"]
            predicted = predict(read_setup(path, changes))
            assert predicted.memory is not None
            steps.append(100 * abs(predicted.step_ms / 1e3 / row["step_s_median"] - 1))
            memory.append(100 * abs(predicted.memory.peak / row["peak_mem_alloc"] - 1))
    assert len(steps) == 14
    assert mean(steps) < 4.5
    assert max(steps) < 11
    assert mean(memory) < 1.5
