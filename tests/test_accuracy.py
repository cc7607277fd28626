"""Accuracy on measured runs that are in the repository: guards against regressions, a little above today's errors.

What Lumos claims is in docs/forecasts.md, measured on many more runs and with every source held out of the fit.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data/accuracy"
MOST_PCT = {  # mean error of a source's step times
    "bigscience-bloom-prequel": 18.0,
    "korthikanti-2205.05198-table5": 11.0,
    "mlperf-training": 13.5,
    "mosaicml-llm-foundry": 9.5,
    "nemo-24.07-perf": 7.0,
    "nemo-megatron-bridge-perf": 19.5,
    "nvidia-dgxc-benchmarking": 5.0,
    "vtrain-multi-node": 10.5,
    "nanotron-playbook-sweep": 17.0,
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
