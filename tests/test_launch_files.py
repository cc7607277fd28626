"""Launch files: what is written launches the configuration that was asked about, or says what it leaves out."""

from __future__ import annotations

import json
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commands import lumos_here
from lumos.cli.emission import read_emission
from lumos.data_files import read_table
from lumos.errors import LumosError, OptionError
from lumos.export.launch_draft import effective
from lumos.export.launch_files import TOOLS, LaunchFiles, launch_files, suited_to
from lumos.setup import Setup, Train, mistakes_in, preset_names, read_setup, read_setup_with_notes
from lumos.setup.importers.launch_script import read_shell
from lumos.step.step import simulate_step
from test_forecast import described, setups

ROOT = Path(__file__).resolve().parents[1]
MEGATRON = read_table("megatron_options.toml")
TORCHTITAN = read_table("torchtitan_keys.toml")
FRAMEWORKS = {"megatron": "megatron", "torchtitan": "torchtitan", "deepspeed": "deepspeed"}
PAIRS = [*FRAMEWORKS.items(), ("deepspeed", "megatron-deepspeed")]
MOE = {"preset": "mixtral-8x7b", "parallel__ep": 8, "parallel__dp": 8}
PIPELINE = {"parallel__pp": 4, "train__microbatches": 8}

# Configurations that a tool can launch exactly as they are.
BY_MODULE = {"train__recompute": "selective", "train__recompute_modules": ("core_attn",)}
NO_SYNC = {"parallel__dp": 8, "parallel__zero": 3, "parallel__no_sync": True, "train__microbatches": 4}
LAUNCHED: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("megatron", "megatron"): [
        {"parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 4, "parallel__order": "tp-cp-pp-dp"},
        {},
        {"parallel__tp": 4, "parallel__sequence_parallel": True, "parallel__dp": 16, "parallel__zero": 1},
        {"parallel__tp": 4, "parallel__sequence_parallel": True, "parallel__tp_overlap": True},
        {"parallel__dp": 4, "parallel__dp_overlap": False},
        {"parallel__dp": 16, "cluster__sharp": True},
        {"parallel__dp": 8, "parallel__zero": 1, "parallel__shard": 2},
        {"parallel__dp": 8, "parallel__zero": 1, "parallel__gather_overlap": False},
        {"parallel__dp": 8, "parallel__zero": 2},
        {"parallel__dp": 8, "parallel__zero": 3},
        {"parallel__cp": 4, "parallel__dp": 2, "train__recompute": "full"},
        {"parallel__cp": 4, "parallel__cp_type": "all_gather"},
        {"parallel__dp": 4, "parallel__zero": 1, "train__optimizer": "muon"},
        {"parallel__cp": 8, "parallel__cp_type": "a2a+p2p", "parallel__cp_inner": 4},
        {
            "preset": "mixtral-8x7b", "parallel__tp": 4, "parallel__sequence_parallel": True, "parallel__dp": 4,
            "parallel__ep": 4, "parallel__etp": 2,
        },
        MOE | {"parallel__dispatcher": "flex", "parallel__ep_overlap": True, "train__microbatches": 2},
        MOE | {"parallel__dispatcher": "all_gather"},
        MOE | {"model__window": 128, "model__window_pattern": 2},
        MOE | {"parallel__dispatcher": "all_to_all", "train__capacity": 1.5},
        {"train__recompute": "selective", "train__optimizer": "sgd", "train__attention": "unfused"},
        {"train__recompute": "selective", "train__recompute_modules": ("core_attn", "layernorm", "mlp")},
        {"train__recompute": "full", "train__recompute_layers": 4},
        {"train__recompute": "full", "train__recompute_group": 4},
        {"train__recompute": "full", "train__partition_activations": True, "parallel__tp": 4},
        {"parallel__zero": 1, "parallel__dp": 8, "train__offload_optimizer": 0.25, "train__offload_overlap": True},
        {"train__offload_layers": 4},
        {"train__precision": "fp8", "train__cuda_graphs": True, "train__attention": "flash"},
        {"train__precision": "mxfp8", "cluster__gpu": "b200"},
        {"train__precision": "fp8", "parallel__dp": 8, "parallel__zero": 1, "train__weight_precision": "fp8"},
        {"train__precision": "nvfp4", "cluster__gpu": "b200"},
        {"train__precision": "fp16"},
        {"train__reduce_precision": "bf16", "parallel__dp": 8},
        {"train__precision": "fp32", "cluster__gpu": "a100"},
        PIPELINE,
        {**PIPELINE, "parallel__vpp": 2, "parallel__schedule": "interleaved"},
        {**PIPELINE, "parallel__stage_layers": [7, 9, 9, 7]},
        {**PIPELINE, "parallel__stage_layers": [7, 9, 8, 8]},
        {**PIPELINE, "model__layers": 30, "parallel__vpp": 2, "parallel__schedule": "interleaved"},
        {"preset": "gpt3-1.3b"},
        {"preset": "gpt3-1.3b", "model__positions": "none", "model__head_dim": 96},
        {"preset": "nemotron4-15b"},
        {"preset": "qwen2.5-7b"},
        {"preset": "qwen3-8b"},
        {"preset": "grok-1", "parallel__ep": 8, "parallel__dp": 8},
        {"preset": "llama4-scout", "parallel__ep": 8, "parallel__dp": 8},
        MOE,
        {"preset": "deepseek-v3", "parallel__ep": 8, "parallel__dp": 8},
        {"preset": "deepseek-v3", "model__mtp_layers": 1, "train__precision": "fp8", "train__fp8_scaling": "block"},
        {"preset": "deepseek-v2-lite"},
    ],
    ("torchtitan", "torchtitan"): [
        {},
        {"parallel__dp": 8, "parallel__zero": 3},
        {"parallel__dp": 8, "parallel__zero": 2},
        {"parallel__dp": 8, "parallel__zero": 3, "parallel__shard": 4},
        {"parallel__dp": 8, "parallel__zero": 0, "train__micro_batch": 2, "train__microbatches": 4},
        {"parallel__tp": 4, "parallel__sequence_parallel": True, "train__compile": True, "parallel__tp_overlap": True},
        {"parallel__cp": 4, "parallel__dp": 2, "parallel__zero": 3, "train__recompute": "full"},
        {"train__precision": "fp32", "train__optimizer": "adam"},
        {"train__recompute": "selective", "train__recompute_modules": ("operators",)},
        {"train__recompute": "full", "train__recompute_every": 2},
        {"parallel__dp": 8, "parallel__zero": 3, "train__offload_optimizer": 1.0, "train__offload_weights": True},
        {"parallel__dp": 8, "parallel__zero": 2, "train__offload_optimizer": 1.0},
        {"train__precision": "fp8", "train__recompute": "none"},
        {"train__precision": "fp8", "train__fp8_scaling": "row", "train__reduce_precision": "bf16"},
        {"train__recompute": "selective"},
        {"train__precision": "mxfp8", "cluster__gpu": "b200"},
        {**PIPELINE, "parallel__dp": 2, "parallel__zero": 2},
        {**PIPELINE, "parallel__dp": 2, "parallel__zero": 3, "train__micro_batch": 2},
        {**PIPELINE, "parallel__schedule": "gpipe"},
        {**PIPELINE, "parallel__vpp": 2, "parallel__schedule": "interleaved"},
        {**PIPELINE, "parallel__vpp": 2, "parallel__schedule": "zero-bubble-v"},
        {**PIPELINE, "parallel__vpp": 2, "parallel__schedule": "dualpipe-v"},
        {**PIPELINE, "parallel__stage_layers": [7, 9, 9, 7]},
        {"preset": "llama3-405b", **PIPELINE, "parallel__vpp": 2, "parallel__schedule": "interleaved"},
        {"preset": "deepseek-v3", "parallel__ep": 8, "parallel__dp": 8, "parallel__zero": 3},
        {"preset": "qwen3-30b-a3b", "parallel__ep": 8, "parallel__dp": 8, "parallel__zero": 2,
         "train__precision": "fp8"},
    ],
    ("deepspeed", "megatron-deepspeed"): [
        {},
        {"parallel__tp": 4, "parallel__sequence_parallel": True, "parallel__dp": 16, "parallel__zero": 1},
        {**PIPELINE, "parallel__dp": 2, "parallel__zero": 1, "train__recompute": "full", "train__attention": "flash"},
        {"parallel__dp": 8, "parallel__zero": 2, "train__precision": "fp16"},
        {"preset": "gpt3-1.3b", "parallel__dp": 8, "model__positions": "none"},
    ],
}  # fmt: skip
CASES = [(tool, framework, changes) for (tool, framework), all_of in LAUNCHED.items() for changes in all_of]


def setup_of(framework: str, changes: dict[str, Any]) -> Setup:
    """A published model, llama3-8b unless `preset` names another, with some keys changed."""
    keys = {"cluster__gpu": "h100", "train__framework": framework} | changes
    return described(keys.pop("preset", "llama3-8b"), **keys)


def read_back(launch: LaunchFiles, folder: Path) -> Setup:
    """The setup that `lumos predict` reads from the files, with the values that they say it needs besides."""
    launch.write(folder)
    return read_setup(folder / launch.main, launch.overrides)


def options_in(launch: LaunchFiles) -> set[str]:
    """The options of the script, as our own reader of scripts sees them."""
    return set(read_shell(launch.files["run.sh"], "run.sh").options)


def left_out_keys(launch: LaunchFiles) -> set[str]:
    return {text.partition(" = ")[0] for text in launch.left_out if " = " in text}


# What can be launched


@pytest.mark.parametrize(("tool", "framework", "changes"), CASES)
def test_what_a_tool_can_do_is_written_whole_and_is_predicted_the_same(
    tool: str, framework: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    setup = setup_of(framework, changes)
    launch = launch_files(setup, tool)
    assert launch.left_out == ()
    back = read_back(launch, tmp_path / "run")
    assert effective(back) == effective(setup)
    assert simulate_step(back).us == simulate_step(setup).us


def test_every_option_that_the_importer_of_megatron_knows_is_written_or_said_to_be_only_read() -> None:
    written: set[str] = set()
    for tool, framework, changes in CASES:
        if framework.startswith("megatron"):
            written |= options_in(launch_files(setup_of(framework, changes), tool))
    known = {*MEGATRON["numbers"], *MEGATRON["flags"], *MEGATRON["choices"]}
    assert known - written - set(MEGATRON["writing"]["only_read"]) == set()


def test_every_key_that_the_importer_of_torchtitan_knows_is_written_or_said_to_be_only_read() -> None:
    written: set[str] = set()
    for changes in LAUNCHED["torchtitan", "torchtitan"]:
        content = tomllib.loads(launch_files(setup_of("torchtitan", changes), "torchtitan").files["config.toml"])
        written |= {f"{section}.{key}" for section, values in content.items() for key in values}
    places = {**TORCHTITAN["numbers"], **TORCHTITAN["switches"]}
    others = {"local_tokens", "step_tokens", "microbatch_count", "float8", "sequence_parallel"}  # of other releases
    assert {place for place, names in places.items() if written.isdisjoint(names)} == others
    assert {name for name, _ in TORCHTITAN["choices"].values()} - written == {"model.norm_type"}


def test_flavors_of_torchtitan_are_models_that_are_known() -> None:
    for name, (family, flavor) in TORCHTITAN["writing"]["flavors"].items():
        text = launch_files(setup_of("torchtitan", {"preset": name}), "torchtitan").files["config.toml"]
        assert tomllib.loads(text)["model"] | {"name": family, "flavor": flavor} == tomllib.loads(text)["model"]
    assert {"llama3-8b", "qwen3-8b", "deepseek-v3"} <= set(preset_names()) & set(TORCHTITAN["writing"]["flavors"])


def test_a_sharding_group_of_all_replicas_is_the_default() -> None:
    keys = {"cluster__gpus": 8, "parallel__dp": 4, "parallel__cp": 2, "parallel__zero": 3}
    assert effective(setup_of("megatron", keys)) == effective(setup_of("megatron", keys | {"parallel__shard": 4}))


def test_a_script_for_several_nodes_starts_torchrun_on_each_of_them_under_slurm() -> None:
    several = launch_files(setup_of("megatron", {"cluster__gpus": 64, "parallel__dp": 64}), "megatron").files["run.sh"]
    assert "LAUNCH=${SLURM_JOB_ID:+srun}" in several
    assert "$LAUNCH torchrun" in several
    alone = launch_files(setup_of("megatron", {"cluster__gpus": 8, "parallel__dp": 8}), "megatron").files["run.sh"]
    assert "LAUNCH" not in alone
    assert "torchrun" in alone


def test_the_shell_sees_the_options_that_our_reader_sees(tmp_path: Path) -> None:
    uneven = {**PIPELINE, "parallel__stage_layers": [7, 9, 8, 8]}
    for changes in ({"preset": "deepseek-v3", "parallel__ep": 8, "parallel__dp": 8}, uneven):
        launch = launch_files(setup_of("megatron", changes), "megatron")
        launch.write(tmp_path / "run")
        echo = "torchrun() { printf '%s\\n' \"$@\"; }; source run.sh"
        done = subprocess.run(["bash", "-c", echo], cwd=tmp_path / "run", capture_output=True, text=True, check=True)
        words = done.stdout.splitlines()
        assert {word for word in words if word.startswith("--")} == {f"--{option}" for option in options_in(launch)}
    assert "Et*7|(t*9|)*1,(t*8|)*1,t*8L" in words


def test_values_that_no_file_can_hold_are_named_for_lumos_predict(tmp_path: Path) -> None:
    changes = {"cluster__inter_gb_s": 12.5, "cluster__host": 0.5, "cluster__gpus_per_node": 8, **MOE}
    setup = setup_of("megatron", changes | {"train__imbalance": 1.5, "cluster__memory_gib": 60.0})
    launch = launch_files(setup, "megatron")
    assert set(launch.overrides) == {
        "cluster.inter_gb_s=12.5", "cluster.host=0.5", "cluster.memory_gib=60.0", "train.imbalance=1.5",
    }  # fmt: skip
    assert "lumos predict run.sh --set train.imbalance=1.5" in launch.files["run.sh"]
    assert effective(read_back(launch, tmp_path / "run")) == effective(setup)


def test_a_deepspeed_json_reads_back_with_the_model_and_the_machines(tmp_path: Path) -> None:
    for changes in ({"parallel__zero": 3}, {"parallel__zero": 2, "parallel__tp": 2, "train__precision": "fp16"}, {
        "parallel__zero": 3, "parallel__shard": 4}, {"train__precision": "fp32", "parallel__dp_overlap": False},
        {"parallel__zero": 3, "parallel__dp_overlap": False},
        {"parallel__zero": 2, "train__offload_optimizer": 0.5, "train__offload_overlap": True},
    ):  # fmt: skip
        setup = setup_of("deepspeed", {"parallel__dp": 8, "train__micro_batch": 2, "train__microbatches": 3} | changes)
        launch = launch_files(setup, "deepspeed")
        assert left_out_keys(launch) == set()
        assert launch.overrides[:2] == ("model.preset=llama3-8b", "train.seq=2048")
        assert effective(read_back(launch, tmp_path / "run")) == effective(setup)
        assert json.loads(launch.files["ds_config.json"])["train_batch_size"] == 48


# What cannot


@st.composite
def styled_setups(draw: st.DrawFn) -> Setup:
    """Any run that the rules allow, with a model of any style and stages of any sizes."""
    setup = draw(setups())
    layers, stages = setup.model.layers, setup.parallel.pp * draw(st.sampled_from([1, setup.parallel.vpp]))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    sizes = [end - begin for begin, end in pairwise([0, *cuts, layers])]
    styles = {
        "model.gated": [True, False], "model.activation": ["silu", "gelu", "relu", "relu2"],
        "model.bias": [True, False], "model.qkv_bias": [True, False], "model.norm": ["rms", "layer"],
        "model.tied": [True, False],
        "model.positions": ["rotary", "learned", "alibi", "none"], "train.mode": ["pretrain", "pretrain", "lora"],
        "train.recompute_modules": [(), ("mlp",), ("operators",)], "train.recompute_group": [1, 3],
        "train.offload_optimizer": [0.0, 1 / 3, 1.0], "train.offload_weights": [False, True],
        "train.offload_layers": [0, 1], "train.offload_overlap": [False, True],
        "parallel.stage_layers": [(), sizes if setup.parallel.pp > 1 else ()], "cluster.host": [1.0, 0.5],
    }  # fmt: skip
    styled = setup.replaced({key: draw(st.sampled_from(values)) for key, values in styles.items()})
    assume(not mistakes_in(styled))
    return styled


@pytest.mark.parametrize(("tool", "framework"), PAIRS)
@given(styled_setups())
@settings(max_examples=60)
def test_what_does_not_read_back_the_same_is_named(
    tool: str, framework: str, tmp_path_factory: pytest.TempPathFactory, setup: Setup
) -> None:
    setup = setup.replaced({"train.framework": framework})
    launch = launch_files(setup, tool)
    assert mistakes_in(setup) == []
    try:
        back = read_back(launch, tmp_path_factory.mktemp("run") / "files")
    except LumosError:
        assert left_out_keys(launch)  # without what is left out, it may not be a run at all
        return
    meant, said = effective(setup), effective(back)
    assert {key for key in meant if meant[key] != said[key]} == left_out_keys(launch)
    for text in launch.left_out:
        assert f"# Left out: {text}\n" in launch.files["run.sh"]


@pytest.mark.parametrize(
    ("tool", "framework", "changes", "sentence"),
    [
        ("megatron", "megatron", {**PIPELINE, "parallel__schedule": "gpipe"}, "parallel.schedule = gpipe: Megatron"),
        ("megatron", "megatron", {"train__optimizer": "adam"}, "train.optimizer = adam: Megatron has no option for it"),
        ("megatron", "megatron", {"model__positions": "alibi"}, "model.positions = alibi: Megatron has no option"),
        ("megatron", "megatron", {"preset": "gpt2-124m", "parallel__tp": 2}, "model.vocab = 50257: Megatron pads"),
        ("megatron", "megatron", {"parallel__tp": 2, "parallel__tp_overlap": True}, "parallel.tp_overlap = true: Mega"),
        ("megatron", "nanotron", {}, "train.framework = nanotron: Megatron runs other kernels"),
        ("torchtitan", "torchtitan", {"parallel__dp": 8, "parallel__zero": 1}, "parallel.zero = 1: torchtitan shards"),
        ("torchtitan", "torchtitan", {"parallel__tp": 2}, "parallel.sequence_parallel = false: torchtitan has tensor"),
        ("torchtitan", "torchtitan", BY_MODULE, "train.recompute_modules = [core_attn]: "),
        ("torchtitan", "torchtitan", NO_SYNC, "parallel.no_sync = true: torchtitan reduces gradients after every"),
        ("megatron", "megatron", {"train__recompute": "full", "train__recompute_every": 2}, "train.recompute_every = "),
        ("torchtitan", "torchtitan", {"train__precision": "fp16"}, "train.precision = fp16: torchtitan has no key"),
        ("torchtitan", "torchtitan", {"preset": "gpt3-1.3b"}, "the model: torchtitan has no such flavor"),
        ("deepspeed", "deepspeed", PIPELINE, "parallel.pp = 4: DeepSpeed's JSON cannot say it"),
        ("deepspeed", "deepspeed", {"train__recompute": "full"}, "train.recompute = full: DeepSpeed's JSON cannot say"),
        ("deepspeed", "deepspeed", {"parallel__tp": 2, "parallel__zero": 3, "parallel__dp": 2}, "parallel.tp = 2: De"),
        ("deepspeed", "megatron-deepspeed", {"parallel__cp": 2}, "parallel.cp = 2: Megatron-DeepSpeed has no option"),
    ],
)  # fmt: skip
def test_what_a_tool_cannot_do_is_a_comment_in_its_files(
    tool: str, framework: str, changes: dict[str, Any], sentence: str
) -> None:
    launch = launch_files(setup_of(framework, changes), tool)
    assert any(text.startswith(sentence) for text in launch.left_out)
    assert f"# Left out: {sentence}" in launch.files["run.sh"]


def test_an_approximation_is_said_to_be_one() -> None:
    launch = launch_files(setup_of("megatron", {"model__activation": "gelu"}), "megatron")
    assert launch.left_out == ()
    assert "# Not exact: model.activation = gelu: --quick-geglu approximates" in launch.files["run.sh"]


@pytest.mark.parametrize("name", ["a\nrm -rf /", "x\r`reboot`", "$(reboot)", "a' \"; reboot #", "\x1b[31m"])
def test_a_name_cannot_leave_its_comment(name: str, tmp_path: Path) -> None:
    setup = setup_of("megatron", {"model__name": name})
    for tool in TOOLS:
        launch = launch_files(setup, tool)
        launch.write(tmp_path / "run")
        plain = launch_files(setup.replaced({"model.name": "x"}), tool)
        for file, text in launch.files.items():
            assert len(text.splitlines()) == len(plain.files[file].splitlines())
            assert "\x1b" not in text
    assert effective(read_setup(tmp_path / "run" / "ds_config.json", launch.overrides)) is not None


def test_gpus_that_do_not_fill_their_nodes_are_started_as_equal_nodes() -> None:
    launch = launch_files(setup_of("megatron", {"parallel__dp": 12}), "megatron")
    assert "NNODES=2\nGPUS_PER_NODE=6\n" in launch.files["run.sh"]
    assert launch.overrides == ("cluster.gpus_per_node=8",)


def test_a_setup_without_a_framework_gets_that_of_the_tool() -> None:
    unstated = Setup(model=setup_of("megatron", {}).model, train=Train(seq=128))
    assert suited_to(unstated, "torchtitan").train.framework == "torchtitan"
    assert suited_to(setup_of("nanotron", {}), "megatron").train.framework == "nanotron"


# The importers that the laws above rest on


def notes_and_setup(text: str, tmp_path: Path, name: str = "run.sh", *changes: str) -> tuple[Setup, tuple[str, ...]]:
    (tmp_path / name).write_text(text)
    reading = read_setup_with_notes(tmp_path / name, changes)
    return reading.setup, reading.notes


SIZES = (
    "--num-layers 10 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --seq-length 64 --micro-batch-size 1"
)


def test_a_layout_of_megatron_gives_the_layers_of_every_stage(tmp_path: Path) -> None:
    text = f"pretrain_gpt.py {SIZES} --global-batch-size 8 --pipeline-model-parallel-size 2 "
    setup, _ = notes_and_setup(text + '--pipeline-model-parallel-layout "Ett|(t*3|)*2,ttL"', tmp_path)
    assert (setup.parallel.vpp, setup.parallel.stage_layers) == (2, (2, 3, 3, 2))
    setup, _ = notes_and_setup(text + '--pipeline-model-parallel-layout "Et*5|t*5L"', tmp_path)
    assert (setup.parallel.vpp, setup.parallel.stage_layers) == (1, ())
    for wrong in ("Et*5|t*4L", "Et*5|t*3|t*2L", "Ex|t*10L", "(t*99999|)*99999", "((((("):
        with pytest.raises(OptionError, match=r"--pipeline-model-parallel-layout .* is not a layout of 10 layers"):
            notes_and_setup(f"{text}--pipeline-model-parallel-layout '{wrong}'", tmp_path)


def test_groups_of_the_distributed_optimizer_of_megatron_are_groups_of_replicas(tmp_path: Path) -> None:
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} --global-batch-size 8 --use-distributed-optimizer "
    assert notes_and_setup(f"{text}--num-distributed-optimizer-instances 4", tmp_path)[0].parallel.shard == 2
    setup, notes = notes_and_setup(f"{text}--num-distributed-optimizer-instances 3", tmp_path)
    assert setup.parallel.shard == 0
    assert any("--num-distributed-optimizer-instances 3: the number of replicas is not a multiple" in n for n in notes)


def test_without_an_option_megatron_overlaps_tensor_parallelism_as_it_does_by_itself(tmp_path: Path) -> None:
    assert notes_and_setup(f"pretrain_gpt.py {SIZES} --global-batch-size 8", tmp_path)[0].parallel.tp_overlap is None


def test_all_sizes_of_a_model_stand_for_a_name_that_is_not_known(tmp_path: Path) -> None:
    text = '[model]\nname = "mine"\nflavor = "1B"\n[training]\nseq_len = 128\n'
    sizes = ("model.layers=2", "model.hidden=512", "model.heads=8", "model.vocab=1024", "model.ffn=2048")
    assert notes_and_setup(text, tmp_path, "run.toml", *sizes)[0].model.layers == 2
    with pytest.raises(LumosError, match="is not known"):
        notes_and_setup(text, tmp_path, "run.toml", *sizes[1:])


# On the command line


def lumos(*arguments: object) -> subprocess.CompletedProcess[str]:
    return lumos_here(*arguments, cwd=ROOT)


SEARCH = (
    "search", "examples/one-h200.toml", "--gpus", 8, "--set", "train.global_batch=64", "--vary", "parallel.tp=1,2",
    "--workers", 1, "--top", 3,
)  # fmt: skip


def test_a_search_emits_its_best_configuration_and_json_those_of_every_family(tmp_path: Path) -> None:
    page = tmp_path / "search.html"
    answer = json.loads(lumos(*SEARCH, "--emit", f"megatron={tmp_path / 'run'}", "--json", "-o", page).stdout)
    assert [family["launch"]["tool"] for family in answer["families"]] == ["megatron"] * len(answer["families"])
    best = answer["families"][0]
    text = (tmp_path / "run" / "run.sh").read_text()
    assert best["launch"]["files"] == {"run.sh": text}
    assert f"--tensor-model-parallel-size {best['parallel.tp']}\n" in text
    assert "train.framework is not given: megatron, for --emit megatron" in answer["warnings"]
    again = json.loads(lumos("predict", tmp_path / "run" / "run.sh", "--json").stdout)
    assert again["step_ms"] == pytest.approx(best["step_ms"], rel=1e-9)
    assert "--tensor-model-parallel-size" in page.read_text()


def test_a_search_for_deepspeed_tries_only_what_its_json_can_say() -> None:
    answer = json.loads(lumos(*SEARCH, "--emit", "deepspeed", "--json").stdout)
    assert {family["parallel.pp"] for family in answer["families"]} == {1}
    assert any("searched with parallel.pp = 1, parallel.cp = 1" in text for text in answer["warnings"])


def test_a_prediction_shows_the_files_below_its_tables(tmp_path: Path) -> None:
    shown = lumos("predict", "examples/llama3-70b.toml", "--set", "parallel.zero=0", "--emit", "torchtitan", "-o",
                  tmp_path / "run.html").stdout  # fmt: skip
    assert "\nconfig.toml\n# llama3-70b on 512 x h100." in shown
    assert "\ntensor_parallel_degree = 4\n" in shown
    assert "note: --emit torchtitan leaves out train.framework = megatron: torchtitan runs other kernels" in shown
    assert "<pre># llama3-70b on 512 x h100." in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("megatorn", "--emit megatorn: not a tool that can be launched: did you mean megatron?"),
        ("megatron=", "--emit megatron=: the folder is missing: write megatron=FOLDER"),
        ("megatron=no/such/folder", "--emit no/such/folder: the folder no/such does not exist; create it first"),
        (f"megatron={__file__}", f"--emit {__file__}: is a file: name a folder for the files"),
    ],
)
def test_a_wrong_emit_is_one_line(asked: str, sentence: str) -> None:
    with pytest.raises(OptionError) as error:
        read_emission(asked)
    assert str(error.value) == sentence


def test_what_has_no_setup_cannot_be_emitted() -> None:
    done = lumos("predict", "--from", "src/lumos/data/example", "--scale", "compute=0.5", "--emit", "megatron")
    assert done.returncode == 2
    assert done.stderr.startswith("lumos: --emit needs the setup of a run")
    done = lumos(*SEARCH, "--emit", "megatron", "--shard", "1/2")
    assert done.returncode == 2
    assert "--emit and --shard together" in done.stderr
