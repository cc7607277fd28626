"""A stranger's path on a machine without a GPU: capture two ranks, check, replay, predict others, open the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from stranger import MOST_ERROR_PCT, Journey, Stranger, pinned_torch, walk

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    return Stranger(sys.executable, tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def answers(stranger: Stranger) -> dict[str, Any]:
    """Of replay and predict; the walk itself ends where a command or the report fails."""
    return walk(stranger, Journey())


def asked(stranger: Stranger, *options: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(stranger.lumos("predict", "--from", "traces", *options, "--json"))
    return answer


def test_the_run_is_replayed(answers: dict[str, Any]) -> None:
    replayed = answers["replay"]
    assert abs(replayed["error_pct"]) <= MOST_ERROR_PCT
    assert replayed["ranks"] == 2
    assert 0 <= replayed["unexplained_ms"] <= replayed["recorded_ms"]  # how much depends on what else the cores do


def test_four_ranks_with_twice_the_layers_take_longer(answers: dict[str, Any]) -> None:
    predicted = answers["predict"]
    assert predicted["step_ms"] > predicted["baseline_ms"]
    assert predicted["energy_j"] is None
    assert any("share cores" in warning for warning in predicted["warnings"])


def test_every_layer_adds_the_same(answers: dict[str, Any], stranger: Stranger) -> None:
    base = answers["predict"]["baseline_ms"]
    two, eight = (asked(stranger, "--set", f"model.layers={count}")["step_ms"] for count in (2, 8))
    assert two < base < eight
    assert eight - base == pytest.approx(2 * (base - two), rel=0.1)


def test_the_trace_alone_tells_what_its_setup_says(answers: dict[str, Any], stranger: Stranger) -> None:
    without = asked(stranger, "--set", "parallel.dp=4", "--set", "model.layers=8")
    assert without["step_ms"] == pytest.approx(answers["predict"]["step_ms"], rel=1e-3)
    assert without["inferred"]["cluster.gpu"]["value"] == "cpu"
    assert without["inferred"]["train.precision"]["value"] == "fp32"


def test_the_torch_of_the_scripted_installation_is_the_one_under_test() -> None:
    import torch

    assert pinned_torch() == f"torch=={torch.__version__.partition('+')[0]}"
