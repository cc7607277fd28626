"""Another configuration of a traced run: both paths tell one story, and edits obey their laws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lumos.analysis.kernel_labels import Phase, Work, label
from lumos.analysis.replay import replay
from lumos.change.change import CalibratedRun
from lumos.errors import OptionError
from lumos.prediction.prediction import predict
from lumos.setup.setup import Setup
from lumos.step.step import simulate_step
from lumos.trace.read.job import read_job
from synthetic_traces import write_synthetic

GPT_15B = {"layers": 48, "hidden": 6144, "ffn": 12288, "heads": 48, "vocab": 51200, "gated": False}
TARGETS: list[dict[str, Any]] = [
    {"parallel.dp": 8}, {"parallel.dp": 16}, {"parallel.dp": 32}, {"parallel.pp": 4, "parallel.dp": 4},
    {"parallel.pp": 8, "parallel.dp": 4}, {"parallel.pp": 16, "parallel.dp": 4}, {"parallel.pp": 4, "parallel.dp": 8},
    {"model.layers": 96}, {"model.hidden": 12288, "model.ffn": 24576},
]  # fmt: skip


def setup(**parallel: Any) -> Setup:
    """GPT-3 15B at TP2·PP2·DP4, the run that published edits start from."""
    ways = {"tp": 2, "pp": 2, "dp": 4, "tp_overlap": False, "dp_overlap": False} | parallel
    return Setup.model_validate(
        {
            "model": GPT_15B,
            "train": {"seq": 2048, "micro_batch": 1, "microbatches": 8, "framework": "megatron"},
            "parallel": ways,
            "cluster": {"gpu": "h100", "gpus": ways["tp"] * ways["pp"] * ways["dp"]},
        }
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CalibratedRun:
    folder = tmp_path_factory.mktemp("traces")
    write_synthetic(simulate_step(setup()), folder)
    return CalibratedRun(replay(read_job(folder)), setup())


def test_a_synthetic_trace_replays_to_the_step_it_was_made_of(source: CalibratedRun) -> None:
    assert source.run.recorded_steps.mean == pytest.approx(simulate_step(setup()).us / 1e3, rel=1e-3)
    assert abs(source.run.error_pct) < 0.1


@pytest.mark.parametrize("changes", TARGETS, ids=str)
def test_the_trace_and_the_description_tell_one_story(source: CalibratedRun, changes: dict[str, Any]) -> None:
    target = setup().replaced(changes | {"train.microbatches": 8})
    assert predict(source, setup=target).step_ms == pytest.approx(simulate_step(target).us / 1e3, rel=0.03)


def test_the_identity_changes_nothing(source: CalibratedRun) -> None:
    assert predict(source, setup=setup()).step_ms == pytest.approx(source.run.clean_ms, rel=1e-3)


def test_there_and_back_is_the_baseline_and_two_edits_are_one(source: CalibratedRun) -> None:
    there = setup().replaced({"model.layers": 96})
    back = there.replaced({"model.layers": 48})
    assert predict(source, setup=back).step_ms == pytest.approx(source.run.clean_ms, rel=1e-3)
    both = setup().replaced({"model.layers": 96, "train.micro_batch": 2, "train.microbatches": 8})
    two = there.replaced({"train.micro_batch": 2, "train.microbatches": 8})
    assert predict(source, setup=two).step_ms == predict(source, setup=both).step_ms


def test_every_attention_is_one_layer_of_one_micro_batch(source: CalibratedRun) -> None:
    for labels in label(source.run):
        forward, backward = labels.of(Phase.FORWARD), labels.of(Phase.BACKWARD)
        assert (labels.attention[forward] == 1).sum() == 24 * 8
        assert (labels.attention[backward] == 2).sum() == 24 * 8
        assert (labels.us[labels.work == Work.MATRIX] > 0).all()


def test_a_setup_that_is_not_the_traced_one_is_refused_with_the_counts(source: CalibratedRun) -> None:
    wrong = setup().replaced({"model.layers": 40})
    with pytest.raises(
        OptionError, match="192 attention kernels in the forward pass, and the setup says 20 layers × 8"
    ):
        predict(CalibratedRun(source.run, wrong), setup=wrong)


@pytest.mark.parametrize(
    "changes", [{"train.micro_batch": 4, "train.microbatches": 8}, {"model.hidden": 1536}, {"train.seq": 8192}], ids=str
)
def test_a_setup_of_other_sizes_is_refused(source: CalibratedRun, changes: dict[str, Any]) -> None:
    wrong = setup().replaced(changes)
    with pytest.raises(OptionError, match="does not describe this trace"):
        predict(CalibratedRun(source.run, wrong), setup=wrong)


def test_another_parallelism_gets_a_wider_interval_and_a_note(source: CalibratedRun) -> None:
    same, other = predict(source, setup=setup()), predict(source, setup=setup().replaced({"parallel.dp": 8}))
    assert other.interval_ms[1] / other.step_ms > same.interval_ms[1] / same.step_ms
    assert any("parallelism differs" in note for note in other.warnings)


def test_a_slow_host_is_felt(source: CalibratedRun) -> None:
    slow = setup().replaced({"cluster.host": 0.02})
    assert predict(source, setup=slow).step_ms > 1.5 * source.run.clean_ms


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train.precision": "fp16"}, "train.precision cannot be changed"),
        ({"train.compile": True}, "train.compile cannot be changed"),
        ({"train.framework": "nanotron"}, "train.framework cannot be changed"),
        ({"model.gated": True}, "kind of MLP"),
    ],
)
def test_what_a_trace_cannot_tell_is_refused(source: CalibratedRun, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        predict(source, setup=setup().replaced(changes))


def test_tensor_parallelism_of_a_compiled_trace_is_refused(source: CalibratedRun) -> None:
    compiled = setup().replaced({"train.compile": True})
    with pytest.raises(OptionError, match="fused beyond recognition"):
        predict(CalibratedRun(source.run, compiled), setup=compiled.replaced({"parallel.tp": 4, "parallel.dp": 2}))


def lumos(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lumos.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_set_without_the_setup_is_one_line(tmp_path: Path) -> None:
    done = lumos("predict", "--from", "src/lumos/data/example", "--set", "model.layers=4")
    assert done.returncode == 2
    assert "needs the traced run's setup" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_comparing_a_run_with_itself_finds_nothing() -> None:
    done = lumos("compare", "src/lumos/data/example", "src/lumos/data/example", "--json")
    answer = json.loads(done.stdout)
    assert answer["change_ms"] == 0
    assert all(row["change_ms"] == 0 for name in ("parts", "operators", "collectives") for row in answer[name])


def single(data: Path, name: str) -> tuple[CalibratedRun, dict[str, Any]]:
    cases = {c["name"]: c for c in json.loads((data / "h200/single/measured.json").read_text())["results"]}
    trace = data / f"h200/single/{name}.pt.trace.json.gz"
    return CalibratedRun(replay(read_job(trace)), measured_setup(cases[name])), cases


def measured_setup(case: dict[str, Any]) -> Setup:
    sizes = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    train = {"seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1),
             "recompute": "full" if case.get("ckpt") else "none"}  # fmt: skip
    model = sizes | {"kv_heads": case.get("kv", case["heads"])}
    return Setup.model_validate({"model": model, "train": train, "cluster": {"gpu": "h200", "gpus": 1}})


@pytest.mark.data
def test_a_gpu_bound_trace_foretells_measured_runs(shared_data: Path) -> None:
    source, cases = single(shared_data, "b8")
    for name in ("b4", "s4096", "h4096", "l16", "h1024", "ckpt", "tiny_l2_h512"):
        truth = 1e3 * cases[name]["step_s_median"]
        assert predict(source, setup=measured_setup(cases[name])).step_ms == pytest.approx(truth, rel=0.12), name


@pytest.mark.data
def test_one_rank_of_a_fake_world_gets_its_collectives_from_the_model(shared_data: Path) -> None:
    trace = shared_data / "h200/fake_world/rank0_of_64_tp8_dp8.pt.trace.json.gz"
    described = Setup.model_validate(
        {
            "model": {"layers": 4, "hidden": 8192, "ffn": 28672, "heads": 64, "vocab": 32000},
            "train": {"seq": 4096},
            "parallel": {"tp": 8, "dp": 8, "zero": 3},
            "cluster": {"gpu": "h200", "gpus": 64},
        }
    )
    found = predict(CalibratedRun(replay(read_job(trace)), described), setup=described)
    assert found.step_ms > 1.1 * found.baseline_ms
    assert any("fake process group" in note for note in found.warnings)
