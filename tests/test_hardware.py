"""Hardware of the user: data sheets of GPUs, overrides, and model files; one line says what is wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lumos.cli.main import app
from lumos.costs.costs import costs_of, host_speed
from lumos.costs.hardware_model import encode, hardware_model
from lumos.costs.operator_model import cost_model
from lumos.errors import InputError, OptionError
from lumos.model_file import packed
from lumos.prediction.prediction import predict
from lumos.setup import read_setup
from lumos.setup.constraints import check
from lumos.setup.gpus import find_gpu, gpu_named, gpu_names
from lumos.setup.presets import preset_named, preset_names
from lumos.setup.sections import Cluster, Parallel, Train
from lumos.setup.setup import Setup

SETUP_PAGE = Path(__file__).parents[1] / "docs/setup.md"
WHOLE = {
    "memory_gib": 120, "hbm_tb_s": 4.0, "power_w": 650, "sms": 128, "l2_mb": 60, "clock_ghz": 1.9,
    "peak_tflops": {"bf16": 900, "fp32": 60},
}  # fmt: skip


def sheet(folder: Path, values: dict[str, Any], name: str = "my_gpu.toml") -> str:
    path = folder / name
    path.write_text(tomli_w.dumps(values))
    return str(path)


def setup(**cluster: Any) -> Setup:
    model = preset_named("llama3-8b").model
    return Setup(model=model, train=Train(seq=4096), parallel=Parallel(zero=3), cluster=Cluster(gpus=8, **cluster))


def step_ms(**cluster: Any) -> float:
    return predict(setup(**cluster)).step_ms


# ---------------------------------------------------------------------- data sheets
def test_a_data_sheet_changes_a_known_gpu(tmp_path: Path) -> None:
    path = sheet(tmp_path, {"like": "H100-SXM5", "power_w": 500, "hbm_tb_s": 2.0, "price": 2.5})
    gpu, h100 = gpu_named(path), gpu_named("h100")
    assert (gpu.tdp_w, gpu.hbm_gb_s, gpu.price, gpu.base, gpu.shown) == (500, 2000, 2.5, "h100", "my_gpu.toml")
    assert (gpu.peak_tflops, gpu.memory_gib, gpu.sms) == (h100.peak_tflops, h100.memory_gib, h100.sms)


def test_one_peak_of_a_data_sheet_leaves_the_others(tmp_path: Path) -> None:
    gpu = gpu_named(sheet(tmp_path, {"like": "h100", "peak_tflops": {"fp8": 1000}}))
    assert (gpu.peak("fp8"), gpu.peak("bf16")) == (1000, gpu_named("h100").peak("bf16"))


def test_a_whole_data_sheet_needs_no_known_gpu_and_says_what_it_assumed(tmp_path: Path) -> None:
    gpu = gpu_named(sheet(tmp_path, WHOLE))
    assert (gpu.hbm_gb_s, gpu.tdp_w, gpu.peak("bf16"), gpu.is_cpu) == (4000, 650, 900, False)
    assert "inter_gb_s = 50" in gpu.assumed
    said = predict(setup(gpu=sheet(tmp_path, WHOLE))).warnings
    assert any(text.startswith("my_gpu.toml does not give all of its machine: assuming") for text in said)


def test_a_data_sheet_that_copies_a_gpu_predicts_the_same_time(tmp_path: Path) -> None:
    assert step_ms(gpu=sheet(tmp_path, {"like": "h200"})) == pytest.approx(step_ms(gpu="h200"), rel=1e-12)


def test_what_was_never_sampled_is_said_to_be_transferred(tmp_path: Path) -> None:
    assert not predict(setup(gpu="h200")).step.costs.model.transferred
    assert not predict(setup(gpu=sheet(tmp_path, {"like": "h200", "price": 3.0}))).step.costs.model.transferred
    wide = predict(setup(gpu=sheet(tmp_path, {"like": "h200", "hbm_tb_s": 9.6}, "wide.toml")))
    assert wide.step.costs.model.transferred
    assert any(text.startswith("no samples for wide.toml") for text in wide.warnings)
    assert predict(setup(hbm_tb_s=9.6)).step_ms == pytest.approx(wide.step_ms, rel=1e-12)


@given(factor=st.floats(0.3, 4.0))
@settings(max_examples=30)
def test_a_faster_memory_or_tensor_core_never_makes_a_step_longer(factor: float) -> None:
    low, high = sorted((1.0, factor))
    assert step_ms(hbm_tb_s=4.8 * high) <= step_ms(hbm_tb_s=4.8 * low) * 1.02
    assert step_ms(peak_tflops=989.4 * high) <= step_ms(peak_tflops=989.4 * low) * 1.02


def test_a_setup_names_its_data_sheet_as_seen_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    sheet(tmp_path / "gpus", {"like": "h100", "memory_gib": 40})
    run = tmp_path / "run.toml"
    run.write_text('[model]\npreset = "llama3-8b"\n[train]\nseq = 4096\n[cluster]\ngpu = "gpus/my_gpu.toml"\n')
    assert read_setup(run).cluster.accelerator.memory_gib == 40


WRONG_SHEETS = {
    "an unknown key": ({"like": "h100", "hbm": 3}, "hbm is not known: did you mean hbm_tb_s?"),
    "an unknown GPU": ({"like": "h10"}, "like = 'h10' is not a known GPU: did you mean h100?"),
    "a file of a file": ({"like": "other.toml"}, "like = 'other.toml' is not a known GPU"),
    "a wrong type": ({"like": "h100", "sms": "many"}, 'sms = "many" has the wrong type'),
    "a negative rate": ({"like": "h100", "hbm_tb_s": -1}, "hbm_tb_s = -1 is out of range"),
    "an unknown precision": ({"like": "h100", "peak_tflops": {"fp7": 1}}, "peak_tflops.fp7 is not known: use fp32"),
    "one peak for all": ({"like": "h100", "peak_tflops": 989}, "peak_tflops = 989 is no table"),
    "nothing but power": ({"power_w": 500}, "memory_gib is missing: give it, or name a known GPU"),
    "less power than idle": ({"like": "h100", "power_w": 100}, "power_w = 100 is less than 1.5 times the 115 W"),
    "no half precision": (WHOLE | {"peak_tflops": {"fp32": 60}}, "neither bf16 nor fp16"),
}


@pytest.mark.parametrize("what", WRONG_SHEETS)
def test_a_wrong_data_sheet_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    values, words = WRONG_SHEETS[what]
    run = tmp_path / "run.toml"
    run.write_text('[model]\npreset = "llama3-8b"\n[train]\nseq = 4096\n')
    done = CliRunner().invoke(app, ["predict", str(run), "--gpu", sheet(tmp_path, values)], catch_exceptions=True)
    assert isinstance(done.exception, InputError | OptionError)
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)


NO_SHEETS = [b"", b"\xff\xfe", b"a = [" * 5000, b"like = 'h100'\nlike = 'h200'", b"x" * (2 << 20)]


@pytest.mark.parametrize("content", NO_SHEETS)
def test_what_is_no_data_sheet_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gpu.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"gpu\.toml: "):
        find_gpu(str(path))


def test_a_missing_data_sheet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml: cannot be read"):
        gpu_named(str(tmp_path / "none.toml"))


def test_a_smaller_node_in_a_data_sheet_is_a_smaller_nvlink_domain(tmp_path: Path) -> None:
    gpu = sheet(tmp_path, {"like": "h200", "gpus_per_node": 4})
    assert setup(gpu=gpu).cluster.accelerator.nvlink_domain == 4
    assert step_ms(gpu=gpu) == pytest.approx(step_ms(gpu="h200", gpus_per_node=4))


def test_a_domain_of_one_gpu_is_no_nvlink(tmp_path: Path) -> None:
    alone, pairs, all_eight = (step_ms(gpu="h200", nvlink_domain=domain) for domain in (1, 2, 8))
    assert alone > pairs * 0.99 > all_eight * 0.99
    assert setup(gpu=sheet(tmp_path, {"like": "h200", "nvlink_domain": 1})).cluster.accelerator.nvlink_gb_s == 0
    assert setup(gpu="gh200", gpus_per_node=4).cluster.accelerator.nvlink_domain == 4


# ---------------------------------------------------------------------- model files
FACTS = {
    "name": "x", "family": "hopper", "memory_gib": 60.0, "hbm_gb_s": 3000.0,
    "peak_tflops": {"bf16": 700.0, "fp32": 50.0}, "sms": 100, "l2_mb": 40.0, "clock_ghz": 1.7,
    "tdp_w": 500.0, "idle_w": 80.0, "nvlink_gb_s": 300.0,
    "nvlink_domain": 4, "pcie_gb_s": 63.0, "inter_gb_s": 25.0, "gpus_per_node": 4,
}  # fmt: skip


def model_file(folder: Path, gpu: str = "h200", name: str = "my.npz", **sections: Any) -> str:
    path = folder / name
    path.write_bytes(encode(gpu, cost_model("h200").regressors, isolation_us=2.8, **sections))
    return str(path)


def test_a_model_file_of_what_is_shipped_predicts_what_is_shipped(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    assert step_ms(model=path) == pytest.approx(step_ms(gpu="h200"), rel=1e-12)
    assert setup(model=path).cluster.gpu == "h200"
    assert step_ms(model=path, gpu="h100") == pytest.approx(step_ms(gpu="h100"), rel=1e-12)


def test_a_gpu_that_is_not_known_has_the_facts_of_its_model_file(tmp_path: Path) -> None:
    path = model_file(tmp_path, "NVIDIA X1", facts=FACTS)
    gpu = setup(model=path).cluster.accelerator
    assert (gpu.shown, gpu.sms, gpu.gpus_per_node, gpu.memory_gib) == ("my.npz", 100, 4, 60.0)
    assert not predict(setup(model=path)).step.costs.model.transferred


def test_a_measured_host_is_the_host_of_the_run(tmp_path: Path) -> None:
    path = model_file(tmp_path, host={"launch_us": 19.0, "error_pct": 3.0})
    assert host_speed(setup(model=path)) == pytest.approx(2.0)
    assert costs_of(setup(model=path)).host_us == pytest.approx(costs_of(setup()).host_us / 2)


def test_measured_steps_replace_the_factors_of_the_gpu_and_move_to_others(tmp_path: Path) -> None:
    path = model_file(tmp_path, in_step={"matrix": 1.265, "stream": 1.0, "launch_gap_us": 2.0})
    shipped, measured = costs_of(setup()).factors, costs_of(setup(model=path)).factors
    assert (measured.matrix, measured.stream, measured.launch_gap_us) == pytest.approx((1.265, 1.0, 2.0))
    moved = costs_of(setup(model=path, gpu="h100")).factors.matrix / costs_of(setup(gpu="h100")).factors.matrix
    assert moved == pytest.approx(1.265 / shipped.matrix)


def test_a_model_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = model_file(tmp_path, host={"launch_us": 19.0})
    assert host_speed(setup(model=path)) == pytest.approx(2.0)
    model_file(tmp_path, host={"launch_us": 38.0})
    assert host_speed(setup(model=path)) == pytest.approx(1.0)


def test_shapes_beyond_those_sampled_are_said_to_be_extrapolated(tmp_path: Path) -> None:
    from dataclasses import replace

    gemm = replace(cost_model("h200").regressors["gemm"], least=(128.0,) * 3, most=(1024.0,) * 3)
    path = tmp_path / "small.npz"
    path.write_bytes(encode("h200", {"gemm": gemm}, isolation_us=2.8))
    said = predict(setup(model=str(path))).warnings
    assert any("far from those sampled for small.npz" in text for text in said)
    assert any(text.startswith("small.npz has no samples of ") for text in said)
    assert any(text.startswith("small.npz has no samples of collectives") for text in said)


WRONG_FILES: dict[str, dict[str, Any]] = {
    "a host of no time": {"host": {"launch_us": 0}},
    "a host of text": {"host": {"launch_us": "fast"}},
    "a section that is a list": {"host": [1]},
    "factors without one": {"in_step": {"matrix": 1.0}},
    "factors beyond reason": {"in_step": {"matrix": 1e9, "stream": 1.0, "launch_gap_us": 1.0}},
    "a network of nonsense": {"network": {"gpus_per_node": 8, "rings": 3, "tables": []}},
    "power of nonsense": {"power": {"memory_pj": "much"}},
    "power below zero": {"power": {"memory_pj": -5.0}},
    "facts without peaks": {"gpu": "X", "facts": {"name": "x"}},
    "facts beyond reason": {"gpu": "X", "facts": FACTS | {"hbm_gb_s": 1e300}},
    "facts of text": {"gpu": "X", "facts": FACTS | {"sms": "many"}},
    "a time of isolation below zero": {"isolation_us": -1},
}


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_wrong_model_file_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "bad.npz"
    header = {"version": 1, "gpu": "h200", "facts": None, "isolation_us": 2.8, "regressors": {}, **WRONG_FILES[what]}
    path.write_bytes(packed(json.loads(json.dumps(header)), {}))
    with pytest.raises(InputError, match=r"bad\.npz: .*; name a file that `lumos fit` wrote$") as problem:
        predict(setup(model=str(path))).as_dict()
    assert "\n" not in str(problem.value)


def test_about_says_what_a_model_file_knows(tmp_path: Path) -> None:
    samples = [{"file": "a.jsonl", "rows": 12, "gpu": "NVIDIA H200"}]
    known = {"samples": samples, "lumos": "0.1.0", "fitted": "2026-11-16"}
    path = model_file(tmp_path, host={"launch_us": 19.0, "error_pct": 3.0}, provenance=known)
    done = CliRunner().invoke(app, ["about", path, "--json", "-o", str(tmp_path / "a.html")])
    answer = json.loads(done.stdout)
    assert (answer["gpu"], answer["samples"][0]["rows"], answer["fitted"]) == ("h200", 12, "2026-11-16")
    parts = {one["part"]: one["measured"] for one in answer["parts"]}
    assert parts == {"collectives": False, "host": True, "profiler": False, "power": False, "whole steps": False}
    assert "launch_us 19" in CliRunner().invoke(app, ["about", path]).stdout
    assert hardware_model(path).missing == ["network", "profiler", "power", "in_step"]


def test_a_model_file_named_as_the_gpu_is_its_model(tmp_path: Path) -> None:
    path = model_file(tmp_path, in_step={"matrix": 1.3, "stream": 1.0, "launch_gap_us": 2.0})
    named = setup(gpu=path)
    assert (named.cluster.gpu, named.cluster.model) == ("h200", path)
    assert step_ms(gpu=path) == step_ms(model=path) != step_ms(gpu="h200")


@pytest.mark.parametrize(("measured", "wanted"), [("cpu", "h200"), ("h200", "cpu")])
def test_what_was_measured_on_a_cpu_says_nothing_of_a_gpu(tmp_path: Path, measured: str, wanted: str) -> None:
    facts = FACTS | {"family": "cpu"} if measured == "cpu" else None
    path = model_file(tmp_path, measured, facts=facts)
    with pytest.raises(OptionError, match="says nothing of"):
        check(setup(model=path, gpu=wanted))


def test_a_step_that_a_sampled_host_decides_has_a_narrower_interval_and_names_its_host(tmp_path: Path) -> None:
    tiny = {"model.layers": 24, "model.hidden": 256, "model.heads": 4, "model.kv_heads": 4, "model.ffn": 512}
    path = model_file(tmp_path, host={"launch_us": 38.0, "error_pct": None})
    typical, sampled = (predict(setup(**cluster).replaced(tiny)) for cluster in ({}, {"model": path}))
    assert typical.host_bound
    assert sampled.step_ms == pytest.approx(typical.step_ms)
    assert sampled.spread.high < typical.spread.high
    assert any("taken to be that of my.npz" in text for text in sampled.warnings)


def test_families_that_a_model_file_of_a_known_gpu_lacks_are_named(tmp_path: Path) -> None:
    path = tmp_path / "part.npz"
    path.write_bytes(encode("h200", {"gemm": cost_model("h200").regressors["gemm"]}, isolation_us=2.8))
    assert any(text.startswith("part.npz has no samples of") for text in predict(setup(model=str(path))).warnings)


@pytest.mark.parametrize("name", ["tpu-v5e", "trn2", "gaudi3"])
def test_other_accelerators_carry_a_warning_and_a_wide_interval(name: str) -> None:
    other, known = predict(setup(gpu=name)), predict(setup(gpu="h100"))
    assert any("only from its data sheet" in text for text in other.warnings)
    assert other.spread.high / other.spread.low > 2 * known.spread.high / known.spread.low


def test_programs_of_other_accelerators_are_always_compiled() -> None:
    eager, compiled = (setup(gpu="tpu-v5p").replaced({"train.compile": mode}) for mode in (False, True))
    assert predict(eager).step_ms == predict(compiled).step_ms


@pytest.mark.parametrize(("name", "other"), [("tpu-v5e", "v5e"), ("tpu-v7", "TPU7x"), ("gaudi3", "HL-325L")])
def test_cloud_names_of_other_accelerators_are_known(name: str, other: str) -> None:
    assert gpu_named(other).name == name


def test_the_setup_page_lists_every_gpu_and_model() -> None:
    names = set(re.findall(r"[\w.-]+\w", SETUP_PAGE.read_text("utf-8").partition("## Names")[2]))
    assert {*gpu_names(), *preset_names()} <= names
