"""Setups: what a run is, read from what people have, and every mistake in it said at once."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lumos.errors import InputError, LumosError, OptionError
from lumos.prediction.prediction import predict
from lumos.setup import (
    Cluster,
    Model,
    Parallel,
    Setup,
    Train,
    check,
    checked_setup,
    gpu_named,
    gpu_names,
    mistakes_in,
    preset_named,
    preset_names,
    read_setup,
    read_setup_with_notes,
    warnings_in,
    write_setup,
)
from lumos.setup.constraints import rules
from lumos.setup.frameworks import framework_names
from lumos.setup.importers.huggingface import model_keys
from lumos.setup.importers.megatron import script_sections
from lumos.setup.setup import KEYS, SECTIONS
from support import calls_made

SMALL = {"layers": 8, "hidden": 2048, "ffn": 5632, "heads": 16, "vocab": 32000}
MOE = SMALL | {"experts": 8, "top_k": 2}
LATENT = SMALL | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def small(**sections: dict[str, Any]) -> Setup:
    """A small run, unchecked, with some values in the place of others."""
    values: dict[str, Any] = {"model": SMALL, "train": {"seq": 2048}} | sections
    built = {name: kind(**values.get(name, {})) for name, kind in SECTIONS.items()}
    return Setup(**built)  # type: ignore[arg-type]


def toml(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    return toml(tmp_path, '[model]\npreset = "llama3-8b"\n[train]\nseq = 4096\n[cluster]\ngpu = "h100"\ngpus = 8\n')


# What follows from what


def test_a_gated_model_is_like_llama_and_one_that_is_not_like_gpt() -> None:
    llama, gpt = Model(**SMALL), Model(**SMALL, gated=False)
    assert (llama.norm, llama.positions, llama.bias, llama.activation) == ("rms", "rotary", False, "silu")
    assert (gpt.norm, gpt.positions, gpt.bias, gpt.activation) == ("layer", "learned", True, "gelu")


def test_heads_follow_from_each_other() -> None:
    assert (Model(**SMALL).kv_heads, Model(**SMALL).head_dim) == (16, 128)
    assert Model(**SMALL, kv_heads=4, head_dim=64).head_dim == 64
    assert Model(**LATENT).head_dim == 192


def test_experts_are_as_wide_as_the_mlp_unless_said_otherwise() -> None:
    assert Model(**MOE).expert_ffn == 5632
    assert Model(**{**MOE, "ffn": 0}, expert_ffn=768).ffn == 768
    assert Model(**SMALL).expert_ffn == 0


def test_dp_follows_from_gpus_and_gpus_from_dp() -> None:
    assert small(parallel={"tp": 2, "pp": 2}, cluster={"gpus": 16}).parallel.dp == 4
    assert small(parallel={"tp": 2, "dp": 4}).cluster.gpus == 8
    assert small().cluster.gpus == small().parallel.dp == 1


def test_microbatches_and_global_batch_follow_from_each_other() -> None:
    halves = {"parallel": {"dp": 2}}
    assert small(train={"seq": 1, "micro_batch": 2, "global_batch": 32}, **halves).train.microbatches == 8
    assert small(train={"seq": 1, "micro_batch": 2, "microbatches": 3}, **halves).train.global_batch == 12
    assert small().train.microbatches == small().train.global_batch == 1


def test_virtual_stages_are_interleaved() -> None:
    assert Parallel(pp=2).schedule == "1f1b"
    assert Parallel(pp=2, vpp=2).schedule == "interleaved"
    assert Parallel(pp=2, schedule="gpipe").schedule == "gpipe"


def test_a_node_is_as_usual_for_the_gpu() -> None:
    assert [Cluster(gpu=name).gpus_per_node for name in ("h100", "gb200", "gh200")] == [8, 4, 1]
    assert Cluster(gpu="gb200", gpus_per_node=8).gpus_per_node == 8


def test_what_is_derived_fills_sections_given_as_plain_values_too() -> None:
    plain = Setup.model_validate({"model": SMALL, "train": {"seq": 2048}, "parallel": {"tp": 2, "dp": 2}})
    assert plain == small(parallel={"tp": 2, "dp": 2})


@pytest.mark.parametrize("values", [{"layers": "8"}, {"layers": True}, {"layers": 8.0}, {"tied": 1}, {"depth": 3}])
def test_types_are_strict_and_unknown_keys_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Model(**(SMALL | values))


# Searching


def test_replaced_keeps_the_gpus_and_the_global_batch() -> None:
    setup = small(train={"seq": 2048, "global_batch": 64}, parallel={"tp": 2}, cluster={"gpus": 16})
    wider = setup.replaced({"parallel.tp": 4})
    assert (wider.parallel.dp, wider.cluster.gpus, wider.train.global_batch, wider.train.microbatches) == (
        4,
        16,
        64,
        16,
    )
    assert setup.replaced({"train.micro_batch": 4}).train.microbatches == 2


def test_replaced_follows_what_is_given() -> None:
    setup = small(cluster={"gpus": 16})
    assert setup.replaced({"parallel.dp": 4}).cluster.gpus == 4
    assert setup.replaced({"cluster.gpus": 32}).parallel.dp == 32
    assert setup.replaced({"train.microbatches": 4}).train.global_batch == 64
    assert setup.replaced({"parallel.pp": 2, "parallel.vpp": 2}).parallel.schedule == "interleaved"
    assert setup.replaced({"model.heads": 32}).model.kv_heads == 32
    assert setup.replaced({"cluster.gpu": "gb200"}).cluster.gpus_per_node == 4


def test_replaced_does_not_touch_what_was_stated() -> None:
    setup = small(model=SMALL | {"kv_heads": 4, "head_dim": 64})
    assert (setup.replaced({"model.heads": 32}).model.kv_heads, setup.model.head_dim) == (4, 64)


def test_replaced_by_nothing_is_the_same() -> None:
    for setup in (small(), small(model=MOE), small(model=LATENT), small(parallel={"pp": 2, "vpp": 2})):
        assert setup.replaced({}) == setup
        assert setup.replaced({"parallel.tp": setup.parallel.tp}) == setup


@pytest.mark.parametrize(
    ("changes", "answer"),
    [({"parallel.tq": 2}, "parallel.tp"), ({"parallel.tp": 0}, "at least 1"), ({"train.precision": "bf61"}, "bf16")],
)
def test_replaced_refuses_what_no_setup_can_hold(changes: dict[str, Any], answer: str) -> None:
    with pytest.raises(OptionError, match=answer):
        small().replaced(changes)


def test_a_setup_takes_few_calls() -> None:
    """A search makes and checks hundreds of thousands of setups."""
    setup = small(cluster={"gpus": 16})
    steps = {
        "build": lambda: small(cluster={"gpus": 16}),
        "replace": lambda: setup.replaced({"parallel.tp": 4, "parallel.zero": 1}),
        "check": lambda: mistakes_in(setup),
    }
    calls = {name: min(calls_made(step) for _ in range(2)) for name, step in steps.items()}  # the first may fill caches
    assert max(calls.values()) < 600, calls


# Facts


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    preset = preset_named(name)
    if preset.published_b:
        assert preset.model.parameters(preset.seq) / 1e9 == pytest.approx(preset.published_b, rel=0.02)
    if preset.active_b:
        assert preset.model.active_parameters() / 1e9 == pytest.approx(preset.active_b, rel=0.02)
    assert mistakes_in(Setup(model=preset.model, train=Train(seq=preset.seq))) == []
    assert preset.source


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("llama2-7b", 6_738_415_616),
        ("llama3.2-1b", 1_235_814_400),
        ("Mixtral-8x7B", 46_702_792_704),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("qwen3_30b_a3b", 30_532_122_624),
    ],
)
def test_parameters_are_counted_to_the_last_one(name: str, count: int) -> None:
    preset = preset_named(name)
    assert preset.model.parameters(preset.seq) == count


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean llama3-8b"):
        preset_named("lama3-8b")


@pytest.mark.parametrize("name", gpu_names())
def test_a_gpu_is_sound(name: str) -> None:
    gpu = gpu_named(name)
    peaks = gpu.peak_tflops
    assert gpu.source
    assert gpu.family
    assert gpu.supports("fp32")
    half = peaks["bf16" if gpu.family == "tpu" else "fp16"]
    assert peaks["fp32"] <= half <= peaks.get("fp8", 1e9) <= peaks.get("fp4", 1e9)
    assert gpu.idle_w < gpu.tdp_w
    assert min(gpu.memory_gib, gpu.hbm_gb_s, gpu.sms, gpu.l2_mb, gpu.clock_ghz, gpu.inter_gb_s, gpu.local_gb_s) > 0
    assert (gpu.nvlink_gb_s > 0) or gpu.nvlink_domain == 1
    assert all(gpu_named(alias.upper()) == gpu for alias in gpu.aliases)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("H100", "h100"),
        ("H100-SXM5-80", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("nvidia h200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("a100-80g", "a100"),
        ("A10G", "a10g"),
    ],
)
def test_a_gpu_answers_to_what_it_is_called(alias: str, name: str) -> None:
    assert gpu_named(alias).name == name


def test_a_gpu_may_be_named_by_a_number() -> None:
    assert Cluster.model_validate({"gpu": 4090}).accelerator.name == "rtx4090"


@pytest.mark.data
def test_every_gpu_of_the_measured_runs_is_known(shared_data: Path) -> None:
    import csv

    with (shared_data / "truth" / "measured_runs.csv").open() as file:
        names = {row["gpu"] for row in csv.DictReader(file)}
    assert {gpu_named(name).name for name in names} <= set(gpu_names())


def test_precisions_are_those_of_the_hardware() -> None:
    assert gpu_named("v100").precisions == ("fp32", "fp16")
    assert not gpu_named("h100").supports("mxfp8")
    assert gpu_named("b200").peak("nvfp4") == 9000
    with pytest.raises(OptionError, match="fp8"):
        gpu_named("a100").peak("fp8")


def test_a_cluster_overrides_its_gpu() -> None:
    assert Cluster(gpu="h100", inter_gb_s=12.5, memory_gib=40.0).accelerator.inter_gb_s == 12.5
    assert Cluster(gpu="h100", gpus_per_node=4).accelerator.nvlink_domain == 4  # NVLink ends at the node
    assert Cluster(gpu="gb200", gpus_per_node=4).accelerator.nvlink_domain == 72  # but not in a rack


def test_frameworks_are_named_in_the_package() -> None:
    assert {"pytorch", "megatron", "nanotron", "torchtitan"} <= set(framework_names())


# Mistakes

H200_COSTS = str(Path(__file__).resolve().parents[1] / "src/lumos/data/costs/h200.npz")

MISTAKES: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"model": SMALL | {"heads": 12}}, "model.heads = 12 does not divide model.hidden = 2048"),
    ({"model": SMALL | {"kv_heads": 3}}, "model.kv_heads = 3 does not divide model.heads = 16: use 1, 2, 4, 8 or 16"),
    ({"model": SMALL | {"q_lora_rank": 8}}, "model.q_lora_rank = 8 needs model.kv_lora_rank"),
    ({"model": LATENT | {"v_head_dim": 0}}, "model.kv_lora_rank = 512 needs model.v_head_dim"),
    ({"model": SMALL | {"ffn": 0}}, "model.ffn is missing"),
    ({"model": MOE | {"ffn": 0}}, "model.expert_ffn is missing"),
    ({"model": MOE | {"top_k": 9}}, "model.top_k = 9 of model.experts = 8: use 1 to 8"),
    ({"model": SMALL | {"top_k": 2}}, "model.top_k = 2 needs experts"),
    ({"model": MOE | {"dense_layers": 9}}, "model.dense_layers = 9 is more than model.layers = 8"),
    (
        {"train": {"seq": 2048, "global_batch": 65}, "parallel": {"dp": 2}},
        "train.global_batch = 65 is not a multiple of train.micro_batch = 1 times parallel.dp = 2: use 64 or 66",
    ),
    ({"train": {"seq": 2048, "global_batch": 8, "microbatches": 4}}, "remove one of global_batch and microbatches"),
    ({"train": {"seq": 2050}, "parallel": {"cp": 2}}, "train.seq = 2050 is not a multiple of 2 * parallel.cp = 4"),
    (
        {"train": {"seq": 2049}, "parallel": {"tp": 2, "sequence_parallel": True}},
        "parallel.tp = 2 does not divide train.seq / parallel.cp = 2049",
    ),
    ({"parallel": {"tp": 3}}, "parallel.tp = 3 does not divide model.heads = 16: use 1, 2, 4, 8 or 16"),
    (
        {"model": SMALL | {"heads": 24, "kv_heads": 6, "head_dim": 64}, "parallel": {"tp": 4}},
        "parallel.tp = 4 neither divides model.kv_heads = 6 nor is a multiple of it: use 1, 2, 3, 6, 12 or 24",
    ),
    ({"model": SMALL | {"ffn": 5631}, "parallel": {"tp": 2}}, "parallel.tp = 2 does not divide model.ffn = 5631"),
    ({"model": MOE | {"expert_ffn": 99}, "parallel": {"tp": 2}}, "does not divide model.expert_ffn = 99"),
    (
        {"train": {"seq": 2048, "recompute_every": 2, "recompute_layers": 4}},
        "train.recompute_every = 2 and train.recompute_layers = 4 choose layers in two ways: remove one",
    ),
    ({"train": {"seq": 2048, "recompute_every": 2, "recompute_group": 4}}, "cannot be recomputed together: remove one"),
    ({"train": {"seq": 2048, "recompute_modules": "operators,mlp"}}, '"operators" covers the whole layer'),
    ({"train": {"seq": 2048, "optimizer": "muon", "offload_optimizer": 0.5}}, '"muon" on the host is not modelled'),
    ({"train": {"seq": 2048, "offload_weights": True}}, "train.offload_weights needs parallel.zero = 3, and it is 0"),
    (
        {"train": {"seq": 2048, "offload_layers": 5}, "parallel": {"pp": 2}},
        "train.offload_layers = 5 is more than a stage has: use at most 4",
    ),
    ({"parallel": {"etp": 2, "dp": 2}}, "parallel.etp = 2 needs experts, and model.experts = 0: remove it"),
    ({"model": MOE, "parallel": {"etp": 3, "dp": 3}}, "parallel.etp = 3 does not divide model.expert_ffn = "),
    (
        {"model": MOE, "parallel": {"etp": 4, "ep": 4, "dp": 8}},
        "parallel.etp = 4 does not divide parallel.dp * cp * tp / ep = 2: use 1 or 2",
    ),
    (
        {"model": SMALL | {"window_pattern": 2}},
        "model.window_pattern = 2 needs model.window: set it, or model.window_pattern = 0",
    ),
    (
        {"model": MOE, "train": {"seq": 2048, "imbalance": 4.5}},
        "train.imbalance = 4.5 is out of range: it must be at most 4, where one expert gets every token",
    ),
    ({"model": MOE, "train": {"seq": 2048, "capacity": 5.0}}, "train.capacity = 5 is out of range: it must be at most"),
    (
        {"model": MOE, "parallel": {"dispatcher": "all_gather", "ep_overlap": True}},
        'parallel.ep_overlap = true needs parallel.dispatcher = "all_to_all" or "flex", and it is "all_gather"',
    ),
    (
        {"parallel": {"dispatcher": "flex", "ep_overlap": True}},
        'parallel.dispatcher = "flex", parallel.ep_overlap = true: needs experts, and model.experts = 0; remove it',
    ),
    ({"model": SMALL | {"expert_groups": 2}}, "model.expert_groups = 2 needs experts: set model.experts, or remove"),
    (
        {"model": MOE | {"expert_groups": 3}},
        "model.expert_groups = 3 does not divide model.experts = 8: use 1, 2, 4 or 8",
    ),
    ({"model": MOE | {"top_k_groups": 2}}, "model.top_k_groups = 2 needs model.expert_groups: set it, or remove"),
    (
        {"model": MOE | {"expert_groups": 2, "top_k_groups": 3}},
        "model.top_k_groups = 3 of model.expert_groups = 2: use 1 to 2",
    ),
    (
        {"model": MOE | {"expert_groups": 8, "top_k_groups": 1}},
        "model.top_k_groups = 1 of model.expert_groups = 8 holds 1 experts, and model.top_k = 2: use more groups",
    ),
    ({"parallel": {"pp": 3, "schedule": "dualpipe"}}, "parallel.pp = 3 is odd, and DualPipe needs stages in pairs"),
    (
        {"train": {"seq": 2048, "microbatches": 2}, "parallel": {"pp": 2, "schedule": "dualpipe"}},
        "train.microbatches = 2 is fewer than 4, twice parallel.pp, which DualPipe needs: use 4",
    ),
    ({"parallel": {"cp": 2, "cp_inner": 2}}, 'parallel.cp_inner = 2 needs parallel.cp_type = "a2a+p2p"'),
    ({"parallel": {"cp": 4, "cp_type": "a2a+p2p", "cp_inner": 3}}, "parallel.cp_inner = 3 does not divide parallel.cp"),
    (
        {"model": SMALL | {"kv_heads": 4}, "parallel": {"tp": 2, "cp": 4, "cp_type": "a2a"}},
        'parallel.cp = 4 with parallel.cp_type = "a2a" must divide the heads and key-value heads of a rank: use 1 or 2',
    ),
    ({"parallel": {"pp": 9}}, "parallel.pp = 9 is more than model.layers = 8: use at most 8"),
    ({"parallel": {"pp": 4, "vpp": 3}}, "is more than model.layers = 8: use vpp of at most 2"),
    ({"parallel": {"pp": 2, "stage_layers": [4, 4, 4]}}, "parallel.stage_layers has 3 entries: give 2"),
    ({"parallel": {"pp": 2, "stage_layers": [4, 3]}}, "adds up to 7, but model.layers = 8: add 1"),
    ({"parallel": {"vpp": 2}}, "parallel.vpp = 2 needs parallel.pp of more than 1"),
    ({"parallel": {"pp": 2, "vpp": 2, "schedule": "1f1b"}}, 'parallel.schedule = "1f1b" needs parallel.vpp of 1'),
    ({"parallel": {"pp": 2, "schedule": "interleaved"}}, "needs parallel.vpp of 2 or more, and it is 1: set vpp"),
    ({"parallel": {"pp": 2, "vpp": 3, "schedule": "zero-bubble-v"}}, 'and it is 3: set vpp, or use "interleaved"'),
    (
        {"train": {"seq": 2048, "microbatches": 3}, "parallel": {"pp": 2, "vpp": 2}},
        "train.microbatches = 3 is not a multiple of parallel.pp = 2, which interleaving needs: use 2 or 4",
    ),
    ({"parallel": {"ep": 2, "dp": 2}}, "parallel.ep = 2 needs experts"),
    ({"model": MOE, "parallel": {"ep": 3, "dp": 3}}, "parallel.ep = 3 does not divide model.experts = 8"),
    ({"model": MOE, "parallel": {"ep": 4, "dp": 2}}, "parallel.ep = 4 does not divide parallel.dp * cp * tp = 2"),
    ({"parallel": {"dp": 4, "shard": 3}}, "parallel.shard = 3 does not divide parallel.dp = 4: use 1, 2 or 4"),
    (
        {"parallel": {"tp": 2, "dp": 2}, "cluster": {"gpus": 8}},
        "cluster.gpus = 8, but parallel uses tp 2 * pp 1 * cp 1 * dp 2 = 4: set cluster.gpus = 4 or parallel.dp = 4",
    ),
    ({"parallel": {"dp": 1 << 20, "tp": 2}}, "cluster.gpus = 2097152 is out of range"),
    ({"train": {"seq": 2048, "microbatches": 1 << 20}, "parallel": {"dp": 32}}, "train.global_batch = 33554432 is out"),
    ({"cluster": {"gpu": "h2000"}}, 'cluster.gpu = "h2000" is not known: did you mean h200'),
    ({"cluster": {"gpu": "h100", "power_w": 100}}, "cluster.power_w = 100 is less than 1.5 times the 115 W of"),
    ({"cluster": {"model": H200_COSTS, "gpu": "cpu"}}, "was measured on h200, and says nothing of a CPU"),
    ({"cluster": {"model": "my.bin"}}, 'cluster.model = "my.bin" is no .npz file: name a file that `lumos fit` wrote'),
    ({"cluster": {"leaf_gpus": 4}}, "cluster.leaf_gpus = 4 is less than a node of 8: if the GPUs of a node"),
    ({"cluster": {"rail_aligned": True}}, "cluster.rail_aligned = true needs cluster.leaf_gpus"),
    ({"cluster": {"sharp": True, "fabric": "efa"}}, "cluster.sharp = true is done by InfiniBand switches, not by"),
    ({"cluster": {"gpu": "a100", "nvls": True}}, 'cluster.nvls = true: the NVLink switch of cluster.gpu = "a100"'),
    ({"train": {"seq": 2048, "framework": "megatrn"}}, "did you mean megatron?"),
    (
        {"train": {"seq": 2048, "precision": "fp8"}, "cluster": {"gpu": "a100"}},
        'train.precision = "fp8" is not supported by cluster.gpu = "a100": use fp32, tf32, fp16 or bf16',
    ),
    ({"train": {"seq": 2048}, "cluster": {"gpu": "v100"}}, 'train.precision = "bf16" is not supported'),
    ({"train": {"seq": 2048, "weight_precision": "nf4"}}, 'train.weight_precision = "nf4" needs train.mode = "lora"'),
    ({"train": {"seq": 2048, "weight_precision": "fp8"}}, 'train.weight_precision = "fp8" needs train.precision'),
    (
        {"reliability": {"rates": "llama3", "mtbf_job_hours": 3.0}},
        "reliability.rates and reliability.mtbf_job_hours each say how often the job fails: leave out all but one",
    ),
    ({"variability": {"slow": ("rank=9,factor=2",)}}, "variability.slow = rank=9,factor=2: the job has ranks 0 to"),
]


@pytest.mark.parametrize(("sections", "sentence"), MISTAKES)
def test_a_mistake_names_the_value_the_place_and_the_way_out(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError) as caught:
        check(small(**sections), "run.toml")
    lines = str(caught.value).splitlines()
    assert any(sentence in line for line in lines), lines
    assert all(line.startswith("run.toml: ") for line in lines)


def test_every_rule_has_a_mistake_that_breaks_it() -> None:
    examples = [list(rules(small(**sections))) for sections, _ in MISTAKES]
    unbroken = [versions[0][0] for versions in zip(*examples, strict=True) if not any(text for _, text in versions)]
    assert unbroken == []


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"pp": 3}},  # uneven stages
        {"parallel": {"pp": 2, "stage_layers": [5, 3]}},
        {"parallel": {"pp": 2, "vpp": 2, "stage_layers": [1, 2, 2, 3]}, "train": {"seq": 2048, "microbatches": 4}},
        {"model": SMALL | {"kv_heads": 2}, "parallel": {"tp": 8}},  # keys and values replicated
        {"model": SMALL | {"vocab": 32001}, "parallel": {"tp": 2}},  # the vocabulary is padded
        {"parallel": {"pp": 2, "zero": 3, "dp": 2}},
        {"model": MOE, "parallel": {"ep": 8, "dp": 4, "tp": 2}},
        {"model": LATENT, "parallel": {"tp": 16}},
    ],
)
def test_what_is_unusual_but_works_is_allowed(sections: dict[str, Any]) -> None:
    check(small(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"ep": 4}},
        {"parallel": {"pp": 2, "schedule": "dualpipe"}, "train": {"seq": 512, "microbatches": 1}},
    ],
)
def test_a_prediction_refuses_a_setup_whose_values_do_not_fit_together(sections: dict[str, Any]) -> None:
    small = {"layers": 4, "hidden": 512, "ffn": 1024, "heads": 8, "vocab": 1000, "experts": 8, "top_k": 2}
    with pytest.raises(OptionError):
        predict(Setup(**{"model": small, "train": {"seq": 512}} | sections))


def test_a_preset_may_be_named_in_place_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = Setup(model={"preset": "qwen3-8b"}, train={"seq": 4096}, cluster={"gpus": 8})
    assert read_setup("Qwen/Qwen3-8B", ["cluster.gpus=8", "train.seq=4096"]).model == described.model
    assert any("train.seq" in note for note in read_setup_with_notes("llama3-8b").notes)
    with pytest.raises(OptionError, match="did you mean"):
        Setup(model={"preset": "qwen3-8bb"}, train={"seq": 4096})
    with pytest.raises(InputError):
        read_setup("someone/else")
    config = tmp_path / "hub" / "models--someone--else" / "snapshots" / "0af1" / "config.json"
    config.parent.mkdir(parents=True)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **sizes}))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert read_setup("someone/else", ["train.seq=8"]).model.hidden == 64


def test_predict_takes_a_path_and_shows_itself_in_a_line(run_toml: Path) -> None:
    found = predict(str(run_toml))
    assert found.step_ms == predict(read_setup(run_toml)).step_ms
    assert len(repr(found)) < 120


def test_what_is_pointless_is_a_warning() -> None:
    assert warnings_in(small(parallel={"sequence_parallel": True})) != []
    assert warnings_in(small(parallel={"shard": 1})) != []
    assert warnings_in(small(cluster={"gpus": 12})) == ["cluster.gpus = 12 is not a whole number of nodes of 8"]
    assert warnings_in(small(parallel={"tp": 16})) != []
    assert warnings_in(small(cluster={"gpus": 16})) == []
    assert warnings_in(small(train={"seq": 2048, "imbalance": 1.5, "capacity": 2.0})) == [
        "train.imbalance has no effect with model.experts = 0",
        "train.capacity has no effect with model.experts = 0",
    ]
    assert warnings_in(small(model=MOE, train={"seq": 2048, "imbalance": 1.5})) == []
    filled = small(model=MOE, train={"seq": 2048, "imbalance": 1.5, "capacity": 2.0})
    assert warnings_in(filled) == ["train.imbalance has no effect with train.capacity: every expert is filled up to it"]
    beside = {"ep": 8, "dp": 8, "ep_overlap": True}
    alone = warnings_in(small(model=MOE, train={"seq": 2048, "microbatches": 1}, parallel=beside))
    assert [line for line in alone if line.startswith("parallel.ep_overlap has no effect with train.microbatches = 1")]
    assert warnings_in(small(model=MOE, train={"seq": 2048, "microbatches": 2}, parallel=beside)) == []


@pytest.mark.parametrize(
    ("train", "parallel", "said"),
    [
        ({"fp8_scaling": "row"}, {}, 'train.fp8_scaling has no effect with train.precision = "bf16": it needs "fp8"'),
        (
            {"fp8_scaling": "row", "precision": "fp8", "framework": "megatron"},
            {},
            'train.fp8_scaling has no effect with train.framework = "megatron"',
        ),
        ({"fp8_scaling": "row", "precision": "fp8", "framework": "torchtitan"}, {}, ""),
        (
            {"fp8_scaling": "block", "precision": "mxfp8"},
            {},
            'no effect with train.precision = "mxfp8": it needs "fp8"',
        ),
        ({"fp8_scaling": "block", "precision": "fp8", "framework": "megatron"}, {}, ""),
        ({}, {"dp": 8, "zero": 1, "no_sync": True}, "parallel.no_sync has no effect with parallel.zero = 1"),
        ({}, {"dp": 8, "zero": 3, "no_sync": True}, ""),
        ({}, {"dp": 8, "gather_overlap": True}, "parallel.gather_overlap has no effect with parallel.zero = 0"),
        ({}, {"dp": 8, "zero": 3, "gather_overlap": False}, "parallel.gather_overlap has no effect"),
        ({}, {"dp": 8, "zero": 2, "gather_overlap": True}, ""),
        ({"recompute": "full", "recompute_every": 9}, {}, "train.recompute_every = 9 is more than model.layers = 8"),
        ({"recompute": "full", "recompute_every": 8}, {}, ""),
        (
            {"framework": "megatron"},
            {"dp": 8, "zero": 2},
            'unusual with train.framework = "megatron": usual is 0, 1 or 3',
        ),
        ({"framework": "deepspeed"}, {"dp": 8, "zero": 2}, ""),
    ],
)
def test_keys_without_an_effect_on_sharding_are_warnings(
    train: dict[str, Any], parallel: dict[str, Any], said: str
) -> None:
    found = warnings_in(small(train={"seq": 2048} | train, parallel=parallel))
    assert [said in line for line in found] == ([True] if said else [])


def test_all_mistakes_are_listed_together(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        tp = 2
        [model]
        layers = 8
        hidden = 2048
        ffn = 5632
        heads = "many"
        hedas = 16
        vocab = 32000
        [train]
        precision = "bf61"
        [parallel]
        pp = 9
        [cluster]
        gpu = "h2000"
        [clutser]
        """,
    )
    with pytest.raises(OptionError) as caught:
        read_setup(path)
    lines = str(caught.value).splitlines()
    expected = (
        "tp is outside of any section: move it to [parallel]",
        "[clutser] is not a section: did you mean cluster?",
        'model.heads = "many" has the wrong type: give a whole number',
        "model.hedas is not known: did you mean heads?",
        "train.seq is missing: set it in [train] or with --set train.seq=VALUE",
        'train.precision = "bf61" is not known: use fp32,',
        "parallel.pp = 9 is more than model.layers = 8: use at most 8",
        'cluster.gpu = "h2000" is not known: did you mean h200?',
    )
    assert len(lines) == len(expected)
    assert all(any(line.startswith(f"{path}: {start}") for line in lines) for start in expected), lines


def test_one_wrong_value_is_one_mistake() -> None:
    """What was derived from it is not blamed."""
    for wrong in (
        {"parallel": {"tp": "2", "pp": 2}, "cluster": {"gpus": 4}},
        {"model": SMALL | {"heads": -1, "kv_heads": 4}},
        {"model": MOE | {"ffn": 1 << 30}},
        {"parallel": {"vpp": 0, "schedule": "interleaved"}},
        {"model": 3},
        {"model": SMALL | {"bias": "no"}},
    ):
        with pytest.raises(OptionError) as caught:
            checked_setup({"model": SMALL, "train": {"seq": 2048}} | wrong)
        assert len(str(caught.value).splitlines()) == 1, str(caught.value)


# Files


def test_a_preset_in_a_file_and_keys_beside_it(tmp_path: Path) -> None:
    setup = read_setup(toml(tmp_path, '[model]\npreset = "llama3-8b"\nlayers = 4\n[train]\nseq = 64\n'))
    assert (setup.model.layers, setup.model.hidden, setup.model.name) == (4, 4096, "llama3-8b")


def test_a_config_beside_the_file(tmp_path: Path) -> None:
    toml(tmp_path, json.dumps(LLAMA), "config.json")
    setup = read_setup(toml(tmp_path, '[model]\nhf = "config.json"\ntied = true\n[train]\nseq = 64\n'))
    assert setup.model.tied
    assert setup.model.kv_heads == 8


def test_a_megatron_script_below_a_file(tmp_path: Path) -> None:
    toml(tmp_path, SCRIPT, "train.sh")
    setup = read_setup(toml(tmp_path, 'megatron = "train.sh"\n[train]\nmicrobatches = 8\n[cluster]\ngpu = "a100"\n'))
    assert (setup.model.layers, setup.train.microbatches, setup.cluster.gpu) == (32, 8, "a100")
    assert setup.train.global_batch == 8 * setup.parallel.dp  # and not the script's


def test_a_config_alone_says_what_is_missing(tmp_path: Path) -> None:
    path = toml(tmp_path, json.dumps(LLAMA), "config.json")
    with pytest.raises(OptionError, match=r"train\.seq is missing"):
        read_setup(path)
    assert read_setup(path, ["train.seq=128"]).train.seq == 128


def test_overrides_are_toml_values_or_bare_words(run_toml: Path) -> None:
    changes = ["parallel.tp=2", "train.precision=fp8", 'train.recompute="full"', "parallel.stage_layers = [32]"]
    setup = read_setup(run_toml, changes)
    assert (setup.parallel.tp, setup.parallel.dp, setup.train.precision, setup.train.recompute) == (2, 4, "fp8", "full")
    assert setup.parallel.stage_layers == (32,)


def test_a_value_that_is_to_be_derived_leaves_what_it_follows_from(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "llama3-8b"\n[train]\nseq = 4096\n[parallel]\ndp = 8\n[cluster]\ngpus = 8\n')
    assert read_setup(path, ["parallel.dp=0"]).cluster.gpus == 8
    assert read_setup(path, ["parallel.dp=4"]).cluster.gpus == 4


def test_an_override_replaces_what_follows_from_it(tmp_path: Path) -> None:
    body = "".join(f"{key} = {value}\n" for key, value in SMALL.items())
    path = toml(
        tmp_path,
        f"[model]\n{body}[train]\nseq = 64\nmicrobatches = 2\n[parallel]\ndp = 4\n[cluster]\ngpus = 4\n",
    )
    assert read_setup(path, ["cluster.gpus=8"]).parallel.dp == 8
    assert read_setup(path, ["parallel.dp=2"]).cluster.gpus == 2
    assert read_setup(path, ["train.global_batch=64"]).train.microbatches == 16
    assert read_setup(path, ["model.preset=llama3-8b"]).model == preset_named("llama3-8b").model


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("tp=2", "did you mean parallel.tp"),
        ("parallel.tp", "the value is missing: write parallel.tp=VALUE"),
        ("model.layers", "the value is missing: write model.layers=VALUE"),
        ("tp", "did you mean parallel.tp"),
        ("parallel.tpp=2", "did you mean tp"),
        ("parallel.sp=true", "did you mean sequence_parallel"),
        ("train.batch_size=2", "did you mean micro_batch"),
        ("train.global_batch_size=2", "did you mean global_batch"),
        ("paralel.tp=2", "did you mean parallel.tp"),
        ("model.preset=lama3-8b", "did you mean llama3-8b"),
        ("model.preset=3", "give it in quotes"),
        ("parallel.tp=2\ncluster.gpus = 4", "give a whole number"),
        ("parallel.tp=two", "give a whole number"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(run_toml: Path, override: str, answer: str) -> None:
    with pytest.raises(OptionError, match=answer):
        read_setup(run_toml, [override])


def test_notes_say_what_was_assumed(tmp_path: Path, run_toml: Path) -> None:
    assert read_setup_with_notes(run_toml).notes == ()
    path = toml(tmp_path, SCRIPT, "train.sh")
    notes = "\n".join(read_setup_with_notes(path).notes)
    assert "--rampup-batch-size" in notes
    assert "padded to 32256" in notes
    assert "assuming h200" in notes


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", b"a: 1"),
        ("run.toml", b"[model\n"),
        ("run.toml", b"\xff\xfe"),
        ("run.toml", b"x = " + b"[" * 5000),
        ("run.toml", b"[model]\nlayers = 0x" + b"f" * 9999),
        ("run.toml", b'megatron = "nowhere.sh"'),
        ("run.toml", b"megatron = 3"),
        ("run.toml", b'[model]\nhf = "\\u0000"'),
        ("run.toml", b"model = 3"),
        ("run.toml", b" " * (5 << 20)),
        ("config.json", b"{"),
        ("config.json", b"[1, 2]"),
        ("config.json", b"[" * 100_000),
        ("train.sh", b"echo hello"),
        ("train.sh", b"A=xxxxxxxx\n" + b"".join(b"A=$A$A$A$A\n" for _ in range(40)) + b"--num-layers $A"),
    ],
)
def test_a_file_that_is_no_setup_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(LumosError, match=name) as caught:
        read_setup(path)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("name", ["nowhere.toml", "folder.toml"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match=name):
        read_setup(tmp_path / name)


# Megatron

SCRIPT = """
#!/bin/bash
export GPUS_PER_NODE=8
NNODES=${NODES:-4}
WORLD=$(($GPUS_PER_NODE*$NNODES))
TP=2
SIZES="--num-layers 32 \\
    --hidden-size 4096 --ffn-hidden-size 14336"
MODEL=(
    --num-attention-heads 32   # not --num-layers 99
    --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=${NNODES} pretrain_gpt.py ${MODEL[@]} $SIZES \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 \\
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --tp-comm-overlap \\
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 --vocab-size 32001 --bf16 --lr 3e-4 \\
    --recompute-granularity selective --use-flash-attn --expert-tensor-parallel-size 1 --rampup-batch-size 16 16 5
"""


def test_a_megatron_script_is_read_as_text() -> None:
    script = script_sections(SCRIPT, "train.sh")
    setup = checked_setup(script.sections)
    model, train, parallel = setup.model, setup.train, setup.parallel
    assert (model.layers, model.hidden, model.ffn, model.heads, model.kv_heads) == (32, 4096, 14336, 32, 8)
    assert (model.gated, model.tied, model.norm, model.bias, model.positions) == (True, False, "rms", False, "rotary")
    assert model.vocab == 32256  # padded to a multiple of 128 * tp
    assert (train.seq, train.global_batch, train.precision, train.recompute) == (4096, 128, "bf16", "selective")
    assert (train.framework, train.attention, train.optimizer) == ("megatron", "flash", "adamw")
    assert (parallel.tp, parallel.pp, parallel.vpp, parallel.dp, parallel.zero) == (2, 4, 2, 4, 1)
    assert (parallel.sequence_parallel, parallel.tp_overlap, parallel.dp_overlap) == (True, True, True)
    assert (setup.cluster.gpus, setup.cluster.gpus_per_node) == (32, 8)
    assert script.not_recognised == ("--rampup-batch-size",)
    assert parallel.etp == 0  # there are no experts


def sections_of(options: str) -> dict[str, dict[str, Any]]:
    return script_sections(options, "train.sh").sections


def test_megatron_defaults_are_those_of_gpt() -> None:
    model = sections_of("--num-layers 2 --hidden-size 1024 --num-attention-heads 16")["model"]
    assert model | {"layers": 2} == model
    assert (model["ffn"], model["gated"], model["tied"], model["norm"]) == (4096, False, True, "layer")
    assert sections_of("--hidden-size 1024 --swiglu")["model"]["ffn"] == 2688


@pytest.mark.parametrize(
    ("options", "place", "value"),
    [
        ("--bf16", "train.precision", "bf16"),
        ("--fp8-format hybrid --bf16", "train.precision", "fp8"),
        ("--fp8-format hybrid --bf16", "train.weight_precision", "bf16"),
        ("--fp8-format hybrid --bf16 --fp8-param-gather", "train.weight_precision", "fp8"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "train.precision", "mxfp8"),
        ("--fp4-format e2m1 --bf16", "train.precision", "nvfp4"),
        ("--recompute-activations", "train.recompute", "selective"),
        ("--activations-checkpoint-method uniform", "train.recompute", "full"),
        ("--activations-checkpoint-method uniform", "train.framework", "megatron-2021"),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 3", "train.recompute_layers", 3),
        ("--recompute-granularity full --recompute-method uniform", "train.recompute", "full"),
        ("--recompute-granularity full --recompute-method block", "train.recompute_layers", 1),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
            "train.recompute_layers",
            5,
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "train.recompute_group",
            4,
        ),
        ("--recompute-activations --recompute-modules mlp layernorm", "train.recompute_modules", ["mlp", "layernorm"]),
        (
            "--recompute-granularity selective --recompute-modules \"['moe_act', 'gdn']\"",
            "train.recompute_modules",
            ["moe_act"],
        ),
        ("--num-experts 8 --hidden-size 64 --moe-layer-recompute", "train.recompute_modules", ["moe"]),
        ("--grad-reduce-in-bf16 --bf16", "train.reduce_precision", "bf16"),
        ("--use-distributed-optimizer --overlap-grad-reduce", "parallel.gather_overlap", False),
        ("--use-distributed-optimizer --overlap-param-gather", "parallel.gather_overlap", True),
        (
            "--num-experts 8 --hidden-size 64 --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
            "train.capacity",
            1.5,
        ),
        ("--num-experts 8 --hidden-size 64", "parallel.dispatcher", "all_gather"),  # its default
        ("--num-experts 8 --hidden-size 64 --moe-token-dispatcher-type allgather", "parallel.dispatcher", "all_gather"),
        ("--num-experts 8 --hidden-size 64 --moe-token-dispatcher-type alltoall", "parallel.dispatcher", "all_to_all"),
        ("--num-experts 8 --hidden-size 64 --expert-tensor-parallel-size 2", "parallel.etp", 2),
        ("--num-experts 8 --hidden-size 64 --tensor-model-parallel-size 4", "parallel.etp", 4),  # its default
        ("--context-parallel-size 4 --cp-comm-type a2a", "parallel.cp_type", "a2a"),
        ("--context-parallel-size 4 --cp-comm-type all_gather all_gather", "parallel.cp_type", "all_gather"),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            "parallel.cp_inner",
            4,
        ),
        ("--optimizer muon", "train.optimizer", "muon"),
        ("--optimizer dist_muon", "parallel.zero", 1),
        ("--optimizer-cpu-offload", "train.offload_optimizer", 1.0),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.75", "train.offload_optimizer", 0.75),
        ("--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", "train.offload_overlap", True),
        ("--cpu-offloading --cpu-offloading-num-layers 3", "train.offload_layers", 3),
        ("--tokenizer-type GPT2BPETokenizer", "model.vocab", 50304),
        ("--tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size 8", "model.vocab", 51200),
        ("--vocab-size 1000 --make-vocab-size-divisible-by 1", "model.vocab", 1000),
        ("--num-virtual-stages-per-pipeline-rank 3", "parallel.vpp", 3),
        ("--use-torch-fsdp2", "parallel.zero", 3),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel.zero", 2),
        ("--num-experts 8 --hidden-size 64", "model.top_k", 2),
        ("--num-layers 61 --num-experts 64 --moe-layer-freq '([0]*3+[1]*58)'", "model.dense_layers", 3),
        ("--num-layers 24 --num-experts 64 --moe-layer-freq 2", "model.dense_layers", 12),
        ("--num-layers 6 --num-experts 64 --moe-layer-freq '([0]+[1]*2)*2'", "model.dense_layers", 2),
        ("--hidden-size 64 --quick-geglu", "model.gated", True),
        ("--hidden-size 64 --quick-geglu", "model.ffn", 256),
        (
            "--num-experts 64 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 1024",
            "model.shared_experts",
            2,
        ),
        ("--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536", "model.v_head_dim", 128),
        ("--context-parallel-size 2", "parallel.cp", 2),
        ("--position-embedding-type rope --no-position-embedding", "model.positions", "rotary"),
        ("--no-position-embedding", "model.positions", "none"),
        ("--world-size 64", "cluster.gpus", 64),
        ("A=3\nB=${A}2\n--num-layers=$B", "model.layers", 32),
        ("--num-layers 4 --num-layers 8", "model.layers", 8),
    ],
)
def test_a_megatron_option(options: str, place: str, value: object) -> None:
    section, _, key = place.partition(".")
    assert sections_of(options)[section][key] == value


def test_what_a_script_asks_for_and_is_not_modelled_is_said() -> None:
    notes = script_sections("--hidden-dropout 0.1 --attention-dropout 0 --optimizer lion", "train.sh").notes
    assert any("--hidden-dropout" in note.sentence for note in notes)
    assert any("--optimizer" in note.sentence for note in notes)
    assert not any("--attention-dropout" in note.sentence for note in notes)


def test_a_script_is_never_run(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    sections_of(f"A=$(touch {target})\nB=`touch {target}`\n--num-layers $(touch {target}) --hidden-size $A$B")
    assert not target.exists()


# Hugging Face

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None, "vocab_size": 50257}
FALCON = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "vocab_size": 65024,
    "multi_query": True,
    "bias": False,
}
MPT = {
    "model_type": "mpt",
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "expansion_ratio": 4,
    "vocab_size": 50432,
    "attn_config": {"alibi": True},
}
BLOOM = {"model_type": "bloom", "n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GEMMA3 = {
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    },
}
QWEN2_MOE = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 3072}


@pytest.mark.parametrize(
    ("config", "published_b"),
    [
        (LLAMA, 8.03),
        (GPT2, 0.124),
        (FALCON, 6.92),
        (MPT, 6.65),
        (BLOOM, 176.2),
        (QWEN3_MOE, 30.5),
        (DEEPSEEK, 671.0),
        (GEMMA3, 3.88),
    ],
)
def test_a_config_has_the_published_number_of_parameters(config: dict[str, Any], published_b: float) -> None:
    assert Model(**model_of(config)).parameters(1024) / 1e9 == pytest.approx(published_b, rel=0.02)


def model_of(config: dict[str, Any]) -> dict[str, Any]:
    reading = model_keys(config)
    assert reading.mistakes == ()
    return dict(reading.sections["model"])


def test_what_a_config_says_about_the_style() -> None:
    models = {config["model_type"]: Model(**model_of(config)) for config in (LLAMA, GPT2, FALCON, MPT)}
    assert models["llama"].gated
    assert not models["gpt2"].gated
    assert models["gpt2"].tied
    assert (models["falcon"].kv_heads, models["falcon"].parallel_residual, models["falcon"].bias) == (1, True, False)
    assert models["mpt"].positions == "alibi"
    assert Model(**model_of(DEEPSEEK)).head_dim == 192
    assert model_of(QWEN2_MOE)["shared_experts"] == 4


def test_gating_follows_from_the_type_and_never_from_a_ratio() -> None:
    four_times = LLAMA | {"intermediate_size": 4 * 4096}
    assert Model(**model_of(four_times)).gated
    assert not Model(**model_of(LLAMA | {"model_type": "starcoder2"})).gated


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bert", "hidden_size": 768}, "bert is an encoder"),
        ({"model_type": "whisper", "d_model": 768}, "whisper is a model of speech"),
        ({"model_type": "vit"}, "vit is a model of images"),
        ({"model_type": "t5"}, "encoder with a decoder"),
        ({"model_type": "mamba"}, "state-space"),
        ({"model_type": "clip", "text_config": LLAMA}, "clip is a model of images"),
        (LLAMA | {"model_type": "news", "is_encoder_decoder": True}, "encoder with a decoder"),
        (LLAMA | {"model_type": "news", "architectures": ["NewsForMaskedLM"]}, "NewsForMaskedLM is not a decoder-only"),
        ({"name": "something", "version": 2}, "it has no model_type"),
        ({}, "it has no model_type"),
        ([LLAMA], "a config.json is a table"),
        ({"model_type": "llama"}, "num_hidden_layers, hidden_size, num_attention_heads, vocab_size"),
        (LLAMA | {"model_type": ["llama"]}, "model_type = a list of 1 is not a name"),
    ],
)
def test_a_config_of_something_else_is_refused_with_the_reason(config: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        model_keys(config)


def test_an_unknown_decoder_is_taken_with_a_warning() -> None:
    unknown = LLAMA | {"model_type": "brandnew"}
    ((note, _),) = model_keys(unknown).notes
    assert Model(**model_of(unknown)).gated
    assert "brandnew" in note
    assert "model.gated" in note
    assert model_keys(LLAMA).notes == ()


# Laws

ways = st.integers(1, 12)
models = st.sampled_from([SMALL, MOE, LATENT, SMALL | {"gated": False}, SMALL | {"gated": False, "norm": "rms"}])


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any values of the right types; most are mistaken."""
    parallel = {key: draw(ways) for key in ("tp", "pp", "vpp", "cp", "ep", "dp")}
    parallel |= {"zero": draw(st.integers(0, 3)), "shard": draw(st.integers(0, 4))}
    parallel["tp_overlap"] = draw(st.sampled_from([None, True, False]))
    parallel["sequence_parallel"] = draw(st.booleans())
    layers = draw(st.integers(1, 24))
    if draw(st.booleans()):
        parallel["stage_layers"] = draw(st.lists(st.integers(0, 12), max_size=4))
    cluster = {"gpu": draw(st.sampled_from(gpu_names())), "gpus": draw(st.sampled_from([0, 8, 64]))}
    cluster |= {"inter_gb_s": draw(st.none() | st.floats(1e-3, 1e3)), "host": draw(st.floats(0.1, 10.0))}
    train = {"seq": draw(st.integers(1, 9000)), "micro_batch": draw(ways), "global_batch": draw(st.integers(0, 300))}
    name = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    return small(model=draw(models) | {"name": name, "layers": layers}, train=train, parallel=parallel, cluster=cluster)


@st.composite
def sound_setups(draw: st.DrawFn) -> Setup:
    """Setups without a mistake."""
    tp, pp, cp, dp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    model = draw(models) | {"name": draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))}
    shape = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "vpp": vpp, "zero": draw(st.integers(0, 3))}
    shape |= {"dp_overlap": draw(st.none() | st.booleans()), "shard": draw(st.sampled_from([0, 1, dp]))}
    if draw(st.booleans()):
        shape["stage_layers"] = [8 // pp + (0 if i else 8 % pp) for i in range(pp)]
    train = {
        "seq": 2048,
        "microbatches": pp * draw(ways),
        "micro_batch": draw(ways),
        "imbalance": draw(st.floats(1, 4)),
    }
    cluster = {"gpu": "h100", "host": draw(st.floats(0.1, 10.0)), "memory_gib": draw(st.none() | st.floats(1, 99))}
    return small(model=model, train=train, parallel=shape, cluster=cluster)


@given(sound_setups())
def test_what_is_written_reads_back_equal(setup: Setup) -> None:
    check(setup)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(write_setup(setup), "utf-8", newline="")
        assert read_setup(path) == setup


@given(setups())
@settings(max_examples=300)
def test_any_setup_is_sound_or_has_a_mistake_that_is_said(setup: Setup) -> None:
    found = mistakes_in(setup)
    if found:
        assert all(len(sentence.splitlines()) == 1 for sentence in found)
        with pytest.raises(OptionError):
            check(setup)
        return
    parallel, train, model = setup.parallel, setup.train, setup.model
    assert parallel.tp * parallel.pp * parallel.cp * parallel.dp == setup.cluster.gpus
    assert train.global_batch == train.micro_batch * train.microbatches * parallel.dp
    assert model.heads % parallel.tp == 0
    assert parallel.pp * parallel.vpp <= model.layers
    assert setup.cluster.accelerator.supports(train.precision)
    assert setup.replaced({}) == setup


def refusal(build: Callable[[], Setup]) -> str:
    """Why there is no setup; where there is one, it must be sound. Any other error is a failure."""
    try:
        setup = build()
    except LumosError as error:
        return str(error)
    assert mistakes_in(setup) == []
    return ""


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from(["h100", "bf16", "llama3-8b", "interleaved", 1 << 70, "x" * 500]),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.dictionaries(st.sampled_from([*KEYS, "model.preset", "model.x", "y.tp"]), odd_values, max_size=6))
@settings(max_examples=300)
def test_values_of_any_kind_make_a_setup_or_a_list_of_mistakes(changes: dict[str, Any]) -> None:
    sections: dict[str, Any] = {"model": dict(MOE), "train": {"seq": 2048}}
    for place, value in changes.items():
        section, _, key = place.partition(".")
        sections.setdefault(section, {})[key] = value
    said = refusal(lambda: checked_setup(sections, "run.toml"))
    assert all(line.startswith("run.toml: ") for line in said.splitlines())


ODD_WORDS = ("", "0", "-1", "3", "9" * 30, "nan", "true", '"x"', "[1]", "{}", "$A", "é", "=", "\n", "\\", "\x00")


def damaged(text: str, seed: int) -> str:
    """The text with one to three words dropped, doubled, swapped or replaced."""
    dice = random.Random(seed)
    words = re.findall(r"[\w.$-]+|\s+|.", text)
    spots = [at for at, word in enumerate(words) if word[0].isalnum()]
    for at in dice.sample(spots, dice.randint(1, 3)):
        words[at] = dice.choice([*ODD_WORDS, words[at] * 2, words[dice.choice(spots)]])
    return "".join(words)


@pytest.mark.parametrize("name", ["run.toml", "train.sh", "config.json"])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=200)
def test_a_damaged_file_is_read_or_refused(name: str, seed: int) -> None:
    whole = {"run.toml": write_setup(small(model=MOE)), "train.sh": SCRIPT, "config.json": json.dumps(DEEPSEEK)}[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(damaged(whole, seed), "utf-8")
        refusal(lambda: read_setup(path, ["train.seq=2048"]))


@given(st.sampled_from([LLAMA, GPT2, MPT, DEEPSEEK, GEMMA3, QWEN2_MOE]), st.data())
@settings(max_examples=300)
def test_a_config_with_odd_values_is_read_or_refused(config: dict[str, Any], data: st.DataObject) -> None:
    keys = st.sampled_from([*config, "text_config", "architectures", "is_encoder_decoder", "hidden_act", "alibi"])
    changed = config | data.draw(st.dictionaries(keys, odd_values, max_size=4))
    for key in data.draw(st.lists(st.sampled_from(list(config)), max_size=2)):
        changed.pop(key, None)
    refusal(lambda: checked_setup(model_keys(changed).sections | {"train": {"seq": 64}}))


@pytest.mark.parametrize(("name", "guess"), [("Qwen/Qwen3-9B", "did you mean qwen3-8b"), ("some/thing", "config.json")])
def test_an_unknown_model_name_is_answered_with_what_to_give(name: str, guess: str) -> None:
    with pytest.raises(InputError, match=guess):
        read_setup(name)


def test_the_folder_of_a_model_is_as_good_as_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "models--some--thing" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(llama | {"vocab_size": 128, "intermediate_size": 256}))
    changes = ["train.seq=64", "cluster.gpus=1"]
    read = [read_setup(path, changes) for path in (folder / "config.json", folder, tmp_path / "models--some--thing")]
    assert read[0] == read[1] == read[2]


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"), ("unsloth/Meta-Llama-3.1-8B", "llama3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"), ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
    ],
)  # fmt: skip
def test_variants_of_a_published_model_are_its_preset(name: str, preset: str) -> None:
    assert read_setup(name).model.name == preset


@pytest.mark.parametrize("name", ["Qwen/Qwen3-Next-80B-A3B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "x/GLM-4.5"])
def test_other_models_of_a_family_are_not_its_preset(name: str) -> None:
    with pytest.raises(InputError, match=r"give the path of its config.json|did you mean qwen3-30b-a3b"):
        read_setup(name)
