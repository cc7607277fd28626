"""Files of other tools: recognised by their content; every key is used, known to be irrelevant, or listed."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import huggingface_counts
from huggingface_counts import TABLE
from lumos.dry_run.from_config import count_doubt
from lumos.errors import InputError, LumosError
from lumos.prediction.prediction import predict
from lumos.setup import Model, Setup, read_setup, read_setup_with_notes
from lumos.setup.importers.any_file import read_any
from lumos.setup.importers.huggingface import model_keys
from lumos.setup.importers.launch_script import evaluate, is_true, read_shell
from lumos.setup.importers.torchtitan import read_torchtitan
from lumos.setup.stated_size import size_doubt


def written(folder: Path, text: str, name: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def answer(path: Path) -> list[str]:
    """Its notes, or why there is no setup; any other error is a failure."""
    try:
        return list(read_setup_with_notes(path, ["train.seq=64"]).notes)
    except LumosError as error:
        return str(error).splitlines()


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(LumosError) as caught:
        read_setup(path, overrides)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(str(path)) for line in lines), lines
    return lines


# Hugging Face: sizes as in the released configurations, and the published number of parameters in billions


def sizes(family: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Any:
    usual = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab}
    return {"model_type": family, "num_attention_heads": heads, "num_key_value_heads": kv_heads} | usual | more


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
DEEPSEEK_V2_LITE = sizes(
    "deepseek_v2", 27, 2048, 10944, 16, 16, 102400, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
    moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=None, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, **UNTIED,
)  # fmt: skip
DEEPSEEK_V3 = sizes(
    "deepseek_v3", 61, 7168, 18432, 128, 128, 129280, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    moe_intermediate_size=2048, first_k_dense_replace=3, moe_layer_freq=1, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=1,
    n_group=8, topk_group=4,
)  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64, "vocab_size": 163840,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MINICPM3 = sizes(
    "minicpm3",
    62,
    2560,
    6400,
    40,
    40,
    73448,
    q_lora_rank=768,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
)
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "moe_loss_weight": 0.05},
    "tie_word_embeddings": False,
}  # fmt: skip
CHATGLM = {
    "model_type": "chatglm", "num_layers": 40, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32,
    "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 151552,
    "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Llama-2-7b": (sizes("llama", 32, 4096, 11008, 32, 32, 32000), 6.738),
    "Llama-3.1-70B": (sizes("llama", 80, 8192, 28672, 64, 8, 128256), 70.55),
    "Llama-3.2-1B": (sizes("llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, **TIED), 1.236),
    "Mistral-7B-v0.1": (sizes("mistral", 32, 4096, 14336, 32, 8, 32000), 7.242),
    "Mistral-Small-24B": (sizes("mistral", 40, 5120, 32768, 32, 8, 131072, head_dim=128), 23.57),
    "Mixtral-8x7B": (
        sizes("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2), 46.70
    ),
    "Qwen2-7B": (sizes("qwen2", 28, 3584, 18944, 28, 4, 152064, **UNTIED), 7.616),
    "Qwen1.5-MoE-A2.7B": (
        sizes("qwen2_moe", 24, 2048, 5632, 16, 16, 151936, num_experts=60, num_experts_per_tok=4,
              moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1), 14.32
    ),
    "Qwen2-57B-A14B": (
        sizes("qwen2_moe", 28, 3584, 18944, 28, 4, 151936, num_experts=64, num_experts_per_tok=8,
              moe_intermediate_size=2560, shared_expert_intermediate_size=20480), 57.41
    ),
    "Qwen3-0.6B": (sizes("qwen3", 28, 1024, 3072, 16, 8, 151936, head_dim=128, **TIED), 0.596),
    "Qwen3-32B": (sizes("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128, **UNTIED), 32.76),
    "Qwen3-235B-A22B": (
        sizes("qwen3_moe", 94, 4096, 12288, 64, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
              moe_intermediate_size=1536, **UNTIED), 235.1
    ),
    "gemma-2b": (sizes("gemma", 18, 2048, 16384, 8, 1, 256000, head_dim=256), 2.506),
    "gemma-7b": (sizes("gemma", 28, 3072, 24576, 16, 16, 256000, head_dim=256), 8.538),
    "gemma-2-9b": (sizes("gemma2", 42, 3584, 14336, 16, 8, 256000, head_dim=256), 9.242),
    "gemma-2-27b": (sizes("gemma2", 46, 4608, 36864, 32, 16, 256000, head_dim=128), 27.23),
    "gemma-3-1b": (sizes("gemma3_text", 26, 1152, 6912, 4, 1, 262144, head_dim=256), 1.000),
    "Phi-3-mini": (sizes("phi3", 32, 3072, 8192, 32, 32, 32064), 3.821),
    "phi-4": (sizes("phi3", 40, 5120, 17920, 40, 10, 100352), 14.66),
    "phi-2": (sizes("phi", 32, 2560, 10240, 32, 32, 51200), 2.78),
    "Phi-3.5-MoE": (
        sizes("phimoe", 32, 4096, 6400, 32, 8, 32064, num_local_experts=16, num_experts_per_tok=2), 41.87
    ),
    "gpt2-xl": ({"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}, 1.558),
    "starcoder": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
         "multi_query": True, "vocab_size": 49152}, 15.52
    ),
    "gpt-j-6b": ({"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "vocab_size": 50400}, 6.05),
    "gpt-neox-20b": (sizes("gpt_neox", 44, 6144, 24576, 64, 64, 50432), 20.55),
    "pythia-6.9b": (sizes("gpt_neox", 32, 4096, 16384, 32, 32, 50432), 6.857),
    "falcon-40b": (
        {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128,
         "num_kv_heads": 8, "new_decoder_architecture": True, "vocab_size": 65024, "bias": False}, 41.3
    ),
    "bloom-7b1": (
        {"model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "n_head": 32, "vocab_size": 250880}, 7.07
    ),
    "opt-6.7b": (
        {"model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "ffn_dim": 16384,
         "num_attention_heads": 32, "vocab_size": 50272}, 6.658
    ),
    "mpt-30b": (
        {"model_type": "mpt", "d_model": 7168, "n_heads": 64, "n_layers": 48, "expansion_ratio": 4,
         "vocab_size": 50432, "attn_config": {"alibi": True}}, 29.96
    ),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15.71),
    "DeepSeek-V3": (DEEPSEEK_V3, 671.0),
    "Kimi-K2": (KIMI_K2, 1026.0),
    "MiniCPM3-4B": (MINICPM3, 4.07),
    "OLMo-7B": (sizes("olmo", 32, 4096, 11008, 32, 32, 50304, **UNTIED), 6.888),
    "OLMo-2-7B": (sizes("olmo2", 32, 4096, 11008, 32, 32, 100352, **UNTIED), 7.299),
    "OLMoE-1B-7B": (
        sizes("olmoe", 16, 2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8, **UNTIED), 6.919
    ),
    "granite-3.1-8b": (sizes("granite", 40, 4096, 12800, 32, 8, 49155, **TIED), 8.171),
    "granite-3.0-3b-a800m": (
        sizes("granitemoe", 32, 1536, 512, 24, 8, 49155, num_local_experts=40, num_experts_per_tok=8, **TIED), 3.30
    ),
    "starcoder2-7b": (sizes("starcoder2", 32, 4608, 18432, 36, 4, 49152, use_bias=True), 7.174),
    "stablelm-3b-4e1t": (sizes("stablelm", 32, 2560, 6912, 32, 32, 50304, **UNTIED), 2.795),
    "c4ai-command-r": (sizes("cohere", 40, 8192, 22528, 64, 64, 256000), 34.98),
    "dbrx": (DBRX, 131.6),
    "gpt-oss-20b": (
        sizes("gpt_oss", 24, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
              attention_bias=True), 20.91
    ),
    "glm-4-9b": (CHATGLM, 9.40),
    "GLM-4.5-Air": (
        sizes("glm4_moe", 46, 4096, 10944, 96, 8, 151552, head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
              n_shared_experts=1, moe_intermediate_size=1408, first_k_dense_replace=1, attention_bias=True), 106.85
    ),
    "Minitron-4B": (sizes("nemotron", 32, 3072, 9216, 24, 8, 256000, head_dim=128), 4.19),
    "internlm2-7b": (sizes("internlm2", 32, 4096, 14336, 32, 8, 92544, bias=False), 7.738),
    "SmolLM3-3B": (sizes("smollm3", 36, 2048, 11008, 16, 4, 128256), 3.075),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_has_the_published_number_of_parameters_within_one_percent(name: str) -> None:
    config, published_b = PUBLISHED[name]
    reading = model_keys(config)
    counted = Model(**reading.sections["model"]).parameters(2048) / 1e9
    assert counted == pytest.approx(published_b, rel=0.01)
    assert (reading.mistakes, reading.not_recognised) == ((), ())


# What transformers itself counts for the configurations of all its decoders (tests/huggingface_counts.py)


def count_of(config: dict[str, Any]) -> tuple[int | None, str]:
    """The parameters of a config.json and its notes; None and the reason where it is refused."""
    try:
        reading = model_keys(config)
    except InputError as error:
        return None, str(error)
    if reading.mistakes:
        return None, reading.mistakes[0].sentence
    text = config.get("text_config", config)
    seq = next((text[key] for key in ("max_position_embeddings", "n_positions", "max_seq_len") if key in text), 0)
    return Model(**reading.sections["model"]).parameters(seq), "; ".join(note.sentence for note in reading.notes)


def test_groups_of_experts_are_read_and_further_predictions_are_left_out_as_by_transformers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    model = read_setup(path, ["cluster.gpus=1", "train.seq=4096"]).model
    assert (model.expert_groups, model.top_k_groups, model.mtp_layers) == (8, 4, 0)


def test_no_configuration_of_transformers_is_read_with_a_wrong_size() -> None:
    outcomes: dict[str, set[str]] = {"agree": set(), "refused": set(), "not counted": set(), "wrong": set()}
    for row in json.loads(gzip.decompress(TABLE.read_bytes())):
        name = row["config"]["model_type"]
        if name == "helium" and row["changes"]:
            continue  # its heads of 128 do not fit the small size: transformers builds it but cannot run it
        counted, words = count_of(row["config"])
        outcome = "refused" if counted is None else "agree"
        if counted is not None and abs(counted / row["parameters"] - 1) > 0.01:
            outcome = "not counted" if "not counted" in words else "wrong"
        if outcome == "refused":
            assert "--set model." in words or "lumos capture --dry" in words or "missing" in words, words
        outcomes[outcome].add(name if outcome != "wrong" else f"{name} {row['changes']}: {words}")
    assert outcomes["wrong"] == set()
    assert outcomes["not counted"] == {"deepseek_v32", "glm_moe_dsa"}  # in small, their index is much of the model
    assert len(outcomes["agree"]) >= 115
    hybrids = {"qwen3_next", "qwen3_5", "olmo_hybrid", "minimax", "jamba", "bamba", "falcon_h1", "nemotron_h", "lfm2"}
    assert hybrids | {"gemma4", "gemma3n_text", "kimi_linear", "granitemoehybrid"} <= outcomes["refused"]
    assert not hybrids & outcomes["agree"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, '3 of 4 layers are "linear_attention"'),
        ({"layer_types": ["mamba"] * 4}, '4 of 4 layers are "mamba"'),
        ({"mamba_d_state": 128}, "mamba_d_state = 128 means state-space layers"),
        ({"linear_num_value_heads": 32}, "means linear attention"),
        ({"hidden_size_per_layer_input": 256}, "means embeddings of every layer"),
        ({"attn_output_gate": True}, "means a gate on attention"),
        ({"attn_type_list": [1, 1, 0, 1]}, "means linear attention"),
        ({"full_attention_interval": 4}, "means linear attention"),
        ({"model_type": "nemotron_h"}, "nemotron_h is a state-space"),
        ({"model_type": "brand_new", "gadget_rank": 7}, 'model_type "brand_new" is not known, and these keys'),
    ],
)
def test_layers_that_cannot_be_described_are_refused_with_a_way_out(more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        model_keys(sizes("llama", 4, 512, 1024, 8, 8, 1000) | {"hidden_act": "silu"} | more)
    assert words in str(caught.value)
    assert "lumos capture --dry" in str(caught.value)


def test_lists_that_say_ordinary_attention_of_every_layer_are_no_linear_attention() -> None:
    config = sizes("minimax_m2", 4, 512, 1024, 8, 8, 1000) | {"hidden_act": "silu"}
    for more in ({"attn_type_list": [1] * 4}, {"block_types": ["attention"]}, {"full_attention_interval": 1}):
        assert model_keys(config | more).sections == model_keys(config).sections


def test_infinity_and_nan_are_json(tmp_path: Path) -> None:
    config = sizes("llama", 4, 512, 1024, 8, 8, 1000) | {"time_step_limit": [0.0, float("inf")], "beta": float("nan")}
    path = written(tmp_path, json.dumps(config), "config.json")
    assert "Infinity" in path.read_text()
    assert read_any(path).sections["model"]["layers"] == 4
    for text in ('{"hidden_size": ' + "[" * 100_000, '{"model_type": "\\ud800", "a": NaN}', '{"a": Infinit}'):
        with pytest.raises(InputError, match="not JSON"):
            read_any(written(tmp_path, text, "config.json"))
    endless = written(tmp_path, json.dumps(config | {"hidden_size": float("inf")}), "config.json")
    with pytest.raises(LumosError):
        read_setup(endless, ["train.seq=8"])


def test_a_type_that_is_not_known_is_guessed_from_its_activation_alone(tmp_path: Path) -> None:
    config = sizes("brand_new", 4, 512, 1024, 8, 8, 1000)
    path = written(tmp_path, json.dumps(config | {"hidden_activation": "silu"}), "config.json")
    assert any("assuming a gated MLP" in note for note in answer(path))
    path.write_text(json.dumps(config | {"hidden_activation": "gelu_pytorch_tanh"}))
    assert "--set model.gated=true" in refused(path, "train.seq=64")[0]
    setup = read_setup(path, ["train.seq=64", "model.gated=true"])
    assert (setup.model.gated, setup.model.activation) == (True, "gelu")


MAVERICK = sizes(
    "llama4_text", 48, 5120, 8192, 40, 8, 202048, head_dim=128, num_local_experts=128, num_experts_per_tok=1,
    interleave_moe_layer_step=2, intermediate_size_mlp=16384, **UNTIED,
)  # fmt: skip


def test_layers_without_experts_are_counted_wherever_they_are() -> None:
    reading = model_keys(MAVERICK)
    model = Model(**reading.sections["model"])
    assert (model.dense_layers, model.ffn, model.expert_ffn) == (24, 16384, 8192)
    assert model.parameters() / 1e9 == pytest.approx(400.7, rel=0.01)
    assert "24 of 48 layers have no experts: modelled as the first 24 layers" in [
        note.sentence for note in reading.notes
    ]
    moe = sizes("qwen3_moe", 6, 512, 1024, 8, 8, 1000, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    for spelling, dense in (
        ({"mlp_layer_types": ["dense", *["sparse"] * 5]}, 1),
        ({"mlp_only_layers": [0, 1]}, 2),
        ({"decoder_sparse_step": 2}, 3),
        ({"moe_layer_freq": [0, 0, 1, 1, 1, 1]}, 2),
        ({"first_k_dense_replace": 4}, 4),
    ):
        assert model_keys(moe | spelling).sections["model"]["dense_layers"] == dense, spelling
    assert model_keys(moe | {"mlp_layer_types": ["dense"]}).mistakes[0].place == "model.dense_layers"


# What its name says of the size of a model


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_name_of_a_published_model_agrees_with_its_size(name: str) -> None:
    model = Model(**model_keys(PUBLISHED[name][0]).sections["model"])
    for spelling in (name, f"{name}-Instruct", f"train_{name.replace('-', '_')}_h100"):
        assert size_doubt(model, 2048, [spelling]) == ""


@pytest.mark.parametrize(
    ("name", "doubt"),
    [
        (
            "Qwen3-30B-A3B",
            '"Qwen3-30B-A3B" was published with 30.53 B parameters, but the keys add up to 235 B (22.2 B',
        ),
        ("my-235b-a3b", '"my-235b-a3b" is not the name of a model of this size'),
        ("8x7b", "is not the name of a model of this size"),
        ("gpt_175b", "is not the name of a model of this size"),
        ("moe_22b", ""),  # the active part
        ("235b-4bit-h100-80gb", ""),
        ("debug", ""),
    ],
)
def test_a_name_that_states_another_size_is_doubted(name: str, doubt: str) -> None:
    model = Model(**model_keys(PUBLISHED["Qwen3-235B-A22B"][0]).sections["model"])
    said = size_doubt(model, 2048, [name])
    assert doubt in said
    assert bool(said) == bool(doubt)


def test_a_config_is_compared_with_its_name_its_file_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-2-7b-hf"
    folder.mkdir()
    half = PUBLISHED["Llama-2-7b"][0] | {"num_hidden_layers": 16}
    path = written(folder, json.dumps(half), "config.json")
    assert any("was published with 6.74 B" in note for note in answer(path))
    assert not any("published" in note for note in read_setup_with_notes(path, ["train.seq=8", "model.layers=4"]).notes)
    run = written(tmp_path, '[model]\nhf = "Llama-2-7b-hf/config.json"\n', "run.toml")
    assert any("was published with 6.74 B" in note for note in answer(run))
    path.write_text(json.dumps(half | {"num_hidden_layers": 32}))
    assert not any("published" in note for note in answer(path))
    assert any("published" in note for note in answer(written(tmp_path, json.dumps(half), "llama2-7b.json")))


def test_a_config_is_compared_with_the_weights_next_to_it(tmp_path: Path) -> None:
    config = PUBLISHED["Llama-2-7b"][0] | {"torch_dtype": "float16"}
    path = written(tmp_path, json.dumps(config), "config.json")
    index = {"metadata": {"total_size": 13_476_831_232}, "weight_map": {}}
    written(tmp_path, json.dumps(index), "model.safetensors.index.json")
    assert not any("the weights next to it" in note for note in answer(path))
    path.write_text(json.dumps(config | {"num_hidden_layers": 30}))
    (note,) = [note for note in answer(path) if "the weights next to it" in note]
    assert note.endswith("have 6.738 B parameters, but the keys add up to 6.33 B: check its sizes")
    written(tmp_path, json.dumps({"metadata": {"total_parameters": "many"}}), "model.safetensors.index.json")
    assert not any("the weights next to it" in note for note in answer(path))


@pytest.mark.slow
def test_a_config_with_unknown_keys_is_counted_by_transformers_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = sizes("qwen3", 4, 512, 1024, 8, 8, 1000, head_dim=64, gadget=3, **UNTIED)
    path = written(tmp_path, json.dumps(config), "config.json")
    setup = read_setup(path, ["train.seq=64"])
    assert count_doubt(path, setup) == ""
    doubt = count_doubt(written(tmp_path, json.dumps(config | {"num_hidden_layers": 8}), "other.json"), setup)
    assert doubt.startswith("transformers counts 0.02201 B parameters, but the keys that are known add up to 0.01151 B")
    assert count_doubt(written(tmp_path, json.dumps({"model_type": "odd"}), "odd.json"), setup) == ""


BESIDE = {
    "architectures": ["LlamaForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3],
    "initializer_range": 0.02, "max_position_embeddings": 8192, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "rope_theta": 5e5, "torch_dtype": "bfloat16",
    "transformers_version": "4.43", "use_cache": True, "attention_bias": False, "mlp_bias": False, "pad_token_id": None,
}  # fmt: skip


def test_keys_of_a_config_are_used_or_of_no_concern_or_listed_in_one_note(tmp_path: Path) -> None:
    usual = PUBLISHED["Llama-2-7b"][0] | BESIDE
    assert model_keys(usual).not_recognised == ()
    odd = usual | {f"gadget_{index}": index for index in range(300)} | {"x\ny": 1, "unset_gadget": None}
    reading = model_keys(odd)
    assert len(reading.not_recognised) == 301
    notes = read_setup_with_notes(written(tmp_path, json.dumps(odd), "config.json"), ["train.seq=64"]).notes
    (note,) = [note for note in notes if "not recognised" in note]
    assert "gadget_0, gadget_1," in note
    assert "and 261 more" in note
    assert len(note.splitlines()) == 1


@pytest.mark.parametrize(
    ("stated", "window"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, (128, 2)),
        ({"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 2}, (128, 6)),
        ({"layer_types": ["sliding_attention"] * 32}, (128, 0)),
        ({"layer_types": ["full_attention"] * 32}, (0, 0)),
        ({"model_type": "mistral"}, (128, 0)),
        ({"model_type": "gemma2"}, (128, 2)),
        ({"sliding_window_pattern": 4}, (128, 4)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (128, 0)),
        ({"use_sliding_window": True, "max_window_layers": 32}, (0, 0)),
        ({"use_sliding_window": False}, (0, 0)),
    ],
)
def test_a_config_gives_its_sliding_windows(stated: dict[str, Any], window: tuple[int, int]) -> None:
    reading = model_keys(PUBLISHED["Llama-2-7b"][0] | {"sliding_window": 128} | stated)
    keys = reading.sections["model"]
    assert (keys.get("window", 0), keys.get("window_pattern", 0)) == window
    assert not any("attention" in note.sentence for note in reading.notes)


@pytest.mark.parametrize(
    "stated",
    [
        {"layer_types": ["full_attention"] * 20 + ["sliding_attention"] * 12},
        {"use_sliding_window": True, "max_window_layers": 20},
        {"sliding_window_pattern": "LLLG"},
        {"sliding_window": "long"},
    ],
)
def test_windows_that_are_not_modelled_are_a_note_until_a_window_is_set(tmp_path: Path, stated: dict[str, Any]) -> None:
    config = PUBLISHED["Llama-2-7b"][0] | {"sliding_window": 128} | stated
    path = written(tmp_path, json.dumps(config), "config.json")
    reading = read_setup_with_notes(path, ["train.seq=64"])
    assert reading.setup.model.window == 0
    assert [note for note in reading.notes if "is not modelled: assuming full attention" in note]
    chosen = read_setup_with_notes(path, ["train.seq=64", "model.window=128", "model.window_pattern=2"])
    assert not [note for note in chosen.notes if "attention" in note]


def test_mistakes_in_a_config_are_listed_together_and_can_be_overridden(tmp_path: Path) -> None:
    wrong = {"hidden_size": "4096", "num_hidden_layers": 3.5, "vocab_size": -1, "num_key_value_heads": [8]}
    path = written(tmp_path, json.dumps(PUBLISHED["Llama-2-7b"][0] | wrong), "config.json")
    lines = refused(path, "train.seq=64", "parallel.tp=two")
    for start in ('hidden_size = "4096"', "num_hidden_layers = 3.5", "vocab_size = -1", "num_key_value_heads = a list"):
        assert any(f"{path}: {start}" in line and "--set model." in line for line in lines), lines
    assert any("parallel.tp" in line for line in lines)
    mended = [
        f"model.{key}={value}" for key, value in {"hidden": 4096, "layers": 4, "vocab": 320, "kv_heads": 8}.items()
    ]
    assert read_setup(path, ["train.seq=64", *mended]).model.layers == 4


def test_a_config_that_lacks_one_size_says_which(tmp_path: Path) -> None:
    config = {key: value for key, value in PUBLISHED["Llama-2-7b"][0].items() if key != "vocab_size"}
    path = written(tmp_path, json.dumps(config), "config.json")
    assert refused(path, "train.seq=64") == [f"{path}: vocab_size is missing: add it, or --set model.vocab=NUMBER"]
    assert read_setup(path, ["train.seq=64", "model.vocab=32000"]).model.vocab == 32000


# Shell


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2*3+4", 10), ("2*(3+4)", 14), ("TP * 2", 16), ("7/2", 3), ("7%4", 3), ("-2+5", 3), ("10-3-2", 5)],
)
def test_arithmetic_is_that_of_a_shell(expression: str, value: int) -> None:
    assert evaluate(expression, {"TP": "8"}) == value


@pytest.mark.parametrize(
    "expression", ["1/0", "X*2", "2**3", "(1", "1)", "", "9999999999999999", "2 2", "(" * 150 + "1"]
)
def test_arithmetic_that_has_no_value_has_none(expression: str) -> None:
    assert evaluate(expression, {}) is None


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        ('[ "1" -eq 1 ]', True), ("[[ 2 -gt 3 ]]", False), ('[[ "fp8" == "fp8" ]]; ', True), ("[ a != a ]", False),
        ('[ -z "" ]', True), ('[ -n "x" ]', True), ("[ ! 1 -eq 1 ]", False), ("! [ 1 -eq 1 ]", False),
        ("[ 1 -eq 1 ] && [ 1 -eq 2 ]", False), ("[ 1 -eq 2 ] || [ 2 -eq 2 ]", True), ("[ -f here ]", None),
        ('[ "$X" = y ]', None), ("grep -q x y", None), ("[ $X = y ] || [ 1 -eq 1 ]", True), ("[ a == a* ]", None),
    ],
)  # fmt: skip
def test_a_condition_holds_or_not_or_is_not_known(condition: str, answer: bool | None) -> None:
    assert is_true(condition) is answer


def test_branches_that_are_not_taken_do_not_count() -> None:
    text = """
    SIZE=${SIZE:-"70"}; FP8=0
    if [[ $SIZE -eq 8 ]]; then
        LAYERS=32
    elif [[ $SIZE -eq 70 ]]; then
        LAYERS=80
        if [ "$FP8" -eq 1 ]; then EXTRA="--fp8-format hybrid"; fi
    else
        LAYERS=1
    fi
    case $SIZE in
        8) TP=1 ;;
        70|72)
            TP=8
            ;;
        *) TP=2 ;;
    esac
    if [ -n "$TRACKER" ]; then ARGS="--tracked"; fi
    train --num-layers $LAYERS --tp $TP $EXTRA $ARGS
    """
    script = read_shell(text, "x.sh")
    assert script.options["num-layers"] == ["80"]
    assert script.options["tp"][0] == "8"
    assert "fp8-format" not in script.options
    assert "tracked" in script.options  # not known, so it counts, and that is said
    assert "$TRACKER" in script.notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A=${B:-"4"}\n--x $A', "4"),
        ("A=${B:-${C:-5}}\n--x $A", "5"),
        ('export A="${B:-"6"}"\n--x ${A}', "6"),
        ("A=2 B=3 run --x $((A*B))", "6"),
        ("A=8\nB=2\nC=$(( ${A} / ${B} ))\n--x $C", "4"),
        ("N=$(scontrol show hostnames | wc -l)\n--x $N", "$()"),
        ("N=`nproc`\n--x $N", "$()"),
        ("ARGS=(\n  --x 7  # not --x 8\n)\nrun ${ARGS[@]}", "7"),
        ("ARGS=(\n  --x 7\n)\nARGS+=(--x 9)\nrun ${ARGS[@]}", "9"),
        ("run --x \\\n  11 \\\n  --y 2", "11"),
    ],
)
def test_variables_arrays_and_continued_lines(text: str, words: str) -> None:
    assert read_shell(text, "x.sh").options["x"][0] == words


@pytest.mark.parametrize(
    ("text", "gpus", "per_node"),
    [
        ("torchrun --nproc_per_node=8 --nnodes 4 x.py", 32, 8),
        (
            "N=${SLURM_NNODES:-2}\nGPUS_PER_NODE=4\ntorchrun --nproc-per-node $GPUS_PER_NODE --nnodes $N x.py",
            8,
            4,
        ),
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\ntorchrun --nproc_per_node gpu --nnodes $SLURM_NNODES", 32, 8),
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:h100:4\nhead=$(srun --nodes=1 hostname)\nsrun python x.py --a 1", 8, 4),
        ("#SBATCH --nodes 2\n#SBATCH --ntasks-per-node=8\nsrun python x.py --a 1", 16, 8),
        ("NGPU=8 ./run_train.sh --a 1", 8, 8),
        ("export WORLD_SIZE=256\npython x.py --a 1", 256, 8),
        ("torchrun --nnodes=2:4 --nproc_per_node=8 x.py", 32, 8),
    ],
)
def test_the_number_of_gpus_is_that_of_the_launch(tmp_path: Path, text: str, gpus: int, per_node: int) -> None:
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --vocab-size 128 --seq-length 64 --bf16"
    setup = read_setup(written(tmp_path, f"{text} {model}\n", "job.sh"))
    assert (setup.cluster.gpus, setup.cluster.gpus_per_node) == (gpus, per_node)
    assert setup.cluster.gpu == ("h100" if "h100" in text else "h200")


def test_an_option_given_twice_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "--num-layers 4 --num-layers 8 --lr 1 --lr 2 --hidden-size 64", "x.args")
    assert any("several times" in note and note.endswith("--num-layers") for note, _ in read_any(path).notes)


def test_uneven_stages_of_megatron(tmp_path: Path) -> None:
    text = "--num-layers 30 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 "
    path = written(tmp_path, text + "--decoder-last-pipeline-num-layers 7", "x.args")
    assert read_any(path).sections["parallel"]["stage_layers"] == [7, 8, 8, 7]


# Megatron as a run wrote it down

ARGUMENTS = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "kv_channels": 128,
    "group_query_attention": True, "num_query_groups": 8, "seq_length": 4096, "micro_batch_size": 1,
    "global_batch_size": 128, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1, "num_layers_per_virtual_pipeline_stage": None, "sequence_parallel": True,
    "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "padded_vocab_size": 128256, "bf16": True, "fp16": False,
    "fp8": "hybrid", "world_size": 32, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
    "kv_lora_rank": 32, "qk_head_dim": 128, "multi_latent_attention": False, "moe_router_topk": 2, "num_experts": None,
    "adam_beta1": 0.9, "attention_backend": "AttnBackend.auto", "recompute_granularity": "selective",
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "data_parallel_size": 4, "img_h": 224, "gadget_size": 7,
    "gadget_off": False, "gadget_one": 1, "params_dtype": "torch.bfloat16", "iteration": 0,
}  # fmt: skip


def as_log(prefix: str = "") -> str:
    lines = [f"{prefix}  {name} {'.' * (48 - len(name))} {value}" for name, value in ARGUMENTS.items()]
    head, tail = (
        "------------------------ arguments ------------------------",
        "-------------------- end of arguments ---",
    )
    return "\n".join(
        [f"{prefix}using world size: 32", prefix + head, *lines, prefix + tail, f"{prefix} iteration 1/ 10"]
    )


def as_yaml() -> str:
    words = {True: "true", False: "false", None: "null"}
    return "".join(
        f"{name}: {words.get(value, value) if isinstance(value, bool) or value is None else value}  # said\n"
        for name, value in ARGUMENTS.items()
    )


DUMPS = {
    "run.log": as_log(),
    "ranks.txt": as_log("[default3]:"),
    "namespace.log": "args: Namespace(" + ", ".join(f"{name}={value!r}" for name, value in ARGUMENTS.items()) + ")",
    "args.json": json.dumps(ARGUMENTS),
    "args.yaml": as_yaml(),
    "model_config.yaml": "ENV:\n  A: 1\nMODEL_ARGS:\n"
    + "".join(f"  --{name.replace('_', '-')}: {str(value).lower() if value is True else value}\n"
              for name, value in ARGUMENTS.items()),
    "tracked.yaml": "".join(f"{name}:\n  desc: null\n  value: {value}\n" for name, value in ARGUMENTS.items()),
    "tracked.json": json.dumps({name: {"value": value} for name, value in ARGUMENTS.items()}),
}  # fmt: skip


@pytest.mark.parametrize("name", DUMPS)
def test_arguments_that_a_run_wrote_down(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, DUMPS[name], name)
    reading = read_setup_with_notes(path, ["cluster.gpu=h100"])
    setup = reading.setup
    model, train, parallel = setup.model, setup.train, setup.parallel
    assert (model.layers, model.ffn, model.kv_heads, model.vocab, model.latent) == (32, 14336, 8, 128256, False)
    assert (model.gated, model.tied, model.norm, model.bias, model.positions) == (True, False, "rms", False, "rotary")
    assert (train.seq, train.global_batch, train.precision, train.recompute) == (4096, 128, "fp8", "selective")
    assert (parallel.tp, parallel.pp, parallel.dp, parallel.zero, parallel.vpp) == (4, 2, 4, 1, 1)
    assert (parallel.sequence_parallel, parallel.dp_overlap, setup.cluster.gpus) == (True, True, 32)
    assert [note for note in reading.notes if "not recognised" in note] == [
        f"{path}: not recognised and ignored: gadget_size"
    ]


def test_a_log_of_any_length_is_read_by_its_beginning(tmp_path: Path) -> None:
    path = written(tmp_path, as_log() + "\n iteration 2/ 10 | lm loss: 1.0" * 200_000, "long.log")
    assert path.stat().st_size > 5 << 20
    assert read_setup(path, ["cluster.gpu=h100"]).model.layers == 32
    other = written(tmp_path, "word " * (2 << 20), "long.txt")
    assert "larger than 4 MiB" in refused(other)[0]


def test_a_yaml_of_something_else_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "a: 1\nb: 2\nnum_layers: 3\nhidden_size: 4\nmicro_batch_size: 1\n", "some.yaml")
    assert "this is none of them" in refused(path)[0]


def test_a_yaml_may_repeat_a_table_a_few_times(tmp_path: Path) -> None:
    text = "BASE: &base\n" + "".join(f"  {line}\n" for line in as_yaml().splitlines())
    reading = read_any(written(tmp_path, text + "MODEL_ARGS:\n  <<: *base\n  num_layers: 48\n", "args.yaml"))
    assert (reading.sections["model"]["layers"], reading.sections["parallel"]["tp"]) == (48, 4)


# torchtitan

TITAN = """
[job]
dump_folder = "./outputs"
description = "a run"
[profiling]
enable_profiling = true
[metrics]
log_freq = 10
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 4
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1
gadget_degree = 3
[checkpoint]
enable = false
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model", "loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
"""
OLD_TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
tokenizer_path = "./tokenizer.model"
[optimizer]
name = "AdamW"
[training]
batch_size = 8
seq_len = 4096
warmup_steps = 200
data_parallel_degree = -1
tensor_parallel_degree = 8
compile = false
enable_float8_linear = true
[experimental]
pipeline_parallel_degree = 4
pipeline_parallel_split_points = ["layers.18", "layers.40", "layers.60"]
[activation_checkpoint]
mode = 'selective'
selective_ac_option = '2'
"""


def titan(text: str, folder: Path, *overrides: str) -> Setup:
    return read_setup(written(folder, text, "titan.toml"), overrides)


def test_a_torchtitan_toml(tmp_path: Path) -> None:
    path = written(tmp_path, TITAN, "whatever.toml")
    reading = read_setup_with_notes(path, ["cluster.gpu=h100"])
    setup = reading.setup
    train, parallel = setup.train, setup.parallel
    assert (setup.model.name, setup.model.layers, train.framework) == ("llama3-8b", 32, "torchtitan")
    assert (train.seq, train.micro_batch, train.microbatches, train.global_batch) == (8192, 4, 1, 32)
    assert (train.precision, train.recompute, train.compile, train.optimizer) == ("fp8", "full", True, "adamw")
    assert (parallel.tp, parallel.dp, parallel.zero, parallel.shard) == (2, 8, 3, 4)
    assert (parallel.sequence_parallel, parallel.tp_overlap, setup.cluster.gpus) == (True, True, 16)
    assert reading.notes == (f"{path}: not recognised and ignored: parallelism.gadget_degree",)


def test_a_torchtitan_toml_that_leaves_the_gpus_to_its_launcher_says_so(tmp_path: Path) -> None:
    text = TITAN.replace("data_parallel_shard_degree = 4", "data_parallel_shard_degree = -1")
    path = written(tmp_path, text, "llama3_8b.toml")
    assert any("the number of GPUs is not given: assuming one replica" in note for note in answer(path))
    assert not any("number of GPUs" in note for note in read_setup_with_notes(path, ["cluster.gpus=8"]).notes)
    path = written(tmp_path, text.replace("llama3", "deepseek_v3").replace('"8B"', '"671B"'), "deepseek_v3.toml")
    (line,) = refused(path, "cluster.gpu=h200")
    assert "and 2 × h200 cannot hold 671 B parameters: --set cluster.gpus=NUMBER" in line
    assert read_setup(path, ["cluster.gpu=h200", "cluster.gpus=512"]).parallel.dp == 256


def test_the_command_line_of_torchtitan_wins_under_any_name(tmp_path: Path) -> None:
    written(tmp_path, TITAN, "titan.toml")
    command = "torchrun --nproc_per_node=16 -m torchtitan.train --job.config_file titan.toml"
    assert read_setup(written(tmp_path, command, "a.sh")).train.compile
    assert not read_setup(written(tmp_path, f"{command} --training.no-compile", "b.sh")).train.compile
    assert not read_setup(written(tmp_path, f"{command} --training.compile False", "c.sh")).train.compile
    setup = read_setup(
        written(tmp_path, f"{command} --training.tensor_parallel_degree 1 --training.batch_size 1", "d.sh"),
        ["cluster.gpus=8"],
    )
    assert (setup.parallel.tp, setup.train.micro_batch) == (1, 1)


def test_a_torchtitan_toml_of_an_older_version(tmp_path: Path) -> None:
    setup = titan(OLD_TITAN, tmp_path, "cluster.gpus=64", "cluster.gpu=h100")
    train, parallel = setup.train, setup.parallel
    assert (parallel.tp, parallel.pp, parallel.dp, parallel.stage_layers) == (8, 4, 2, (18, 22, 20, 20))
    assert (train.micro_batch, train.microbatches, train.precision, train.compile) == (2, 4, "fp8", False)
    assert (train.recompute, train.recompute_every) == ("full", 2)
    assert parallel.zero == 2  # a pipeline keeps its weights until the backward pass


@pytest.mark.parametrize(
    ("keys", "place", "value"),
    [
        ("[training]\nseq_len = 512", "train.micro_batch", 8),  # its defaults
        ("[training]\nsteps = 1", "train.seq", 2048),
        ("[training]\nsteps = 1", "parallel.zero", 3),
        ("[training]\nsteps = 1", "train.recompute_every", 2),
        ("[training]\nenable_cpu_offload = true", "train.offload_weights", True),
        ("[parallelism]\ncontext_parallel_degree = 2", "parallel.cp_type", "all_gather"),
        (
            "[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = 'alltoall'",
            "parallel.cp_type",
            "p2p",
        ),
        ("[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '3'", "train.recompute_every", 3),
        ("[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '0'", "train.recompute", "full"),
        (
            "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'",
            "train.recompute_modules",
            ("operators",),
        ),
        ("[training]\nglobal_batch_size = 64", "train.microbatches", 8),
        ("[training]\nglobal_batch_size = -1", "train.microbatches", 1),
        ("[training]\nmixed_precision_param = 'float32'", "train.precision", "fp32"),
        ("[model]\nconverters = ['mx']\n[training]\nsteps = 1", "train.precision", "mxfp8"),
        ("[parallelism]\ndata_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 4", "parallel.zero", 0),
        ("[parallelism]\ndata_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 4", "parallel.dp", 4),
        ("[parallelism]\nfsdp_reshard_after_forward = 'never'", "parallel.zero", 2),
        (
            "[parallelism]\nenable_sequence_parallel = false\ntensor_parallel_degree = 2",
            "parallel.sequence_parallel",
            False,
        ),
        (
            "[parallelism]\nenable_async_tensor_parallel = true\ntensor_parallel_degree = 2",
            "parallel.tp_overlap",
            False,
        ),
        ("[parallelism]\npipeline_parallel_degree = 2", "train.microbatches", 8),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 4", "train.microbatches", 2),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'GPipe'",
            "parallel.schedule",
            "gpipe",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'",
            "parallel.vpp",
            2,
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'ZBVZeroBubble'",
            "parallel.vpp",
            2,
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'DualPipeV'",
            "parallel.schedule",
            "dualpipe-v",
        ),
        ("[parallelism]\npipeline_parallel_degree = 4", "parallel.stage_layers", (8, 9, 8, 7)),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\n"
            "pipeline_parallel_layers_per_stage = 4\npipeline_parallel_first_stage_less_layers = 0\n"
            "pipeline_parallel_last_stage_less_layers = 0",
            "parallel.vpp",
            4,
        ),
    ],
)
def test_a_torchtitan_key(tmp_path: Path, keys: str, place: str, value: object) -> None:
    model = "" if "[model]" in keys else "[model]\nname = 'llama3'\nflavor = '8B'\n"
    flavour = keys.replace("[model]\n", "[model]\nname = 'llama3'\nflavor = '8B'\n") if not model else keys
    setup = titan(model + flavour, tmp_path, "cluster.gpu=b200")
    section, _, key = place.partition(".")
    assert getattr(getattr(setup, section), key) == value


TITAN_HSDP = """
[model]
name = "llama3"
flavor = "8B"
[parallelism]
data_parallel_replicate_degree = 8
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
"""


def test_copies_of_the_weights_divide_whatever_replicas_there_are(tmp_path: Path) -> None:
    path = written(tmp_path, TITAN_HSDP, "titan.toml")
    reading = read_setup_with_notes(path, ["cluster.gpus=128"])
    assert (reading.setup.parallel.dp, reading.setup.parallel.shard) == (64, 8)
    assert not any("one copy for all" in note for note in reading.notes)
    assert any("one copy for all; set cluster.gpus" in note for note in read_setup_with_notes(path, []).notes)
    assert read_setup(path, ["cluster.gpus=128", "parallel.shard=4"]).parallel.shard == 4
    setup = written(tmp_path, f'torchtitan = "{path.name}"\n[cluster]\ngpus = 32\n', "run.toml")
    assert read_setup(setup).parallel.shard == 2


def test_what_torchtitan_gathers_in_8_bits_is_noted_and_not_ignored(tmp_path: Path) -> None:
    text = "[model]\nname = 'llama3'\nflavor = '8B'\nconverters = ['float8']\n[training]\nsteps = 1\n"
    name = "float8.enable_fsdp_float8_all_gather = true"
    for table, noted in (("[float8]\nenable_fsdp_float8_all_gather = true", True), ("", False)):
        notes = read_setup_with_notes(written(tmp_path, text + table, "titan.toml"), []).notes
        assert any(name in note and "gathered in 16 bits" in note for note in notes) == noted


def test_recomputation_of_every_0th_layer_is_that_of_all_and_noted(tmp_path: Path) -> None:
    keys = "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '0'"
    path = written(tmp_path, f"[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nsteps = 1\n{keys}", "titan.toml")
    reading = read_setup_with_notes(path, [])
    assert (reading.setup.train.recompute, reading.setup.train.recompute_every) == ("full", 1)
    assert any("recomputes every layer" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("name", "flavour", "layers"),
    [
        ("llama3", "debugmodel", 6), ("llama3", "8B_flex", 32), ("llama3", "405B", 126), ("llama2", "7B", 32),
        ("qwen3", "0.6B", 28), ("qwen3", "30B-A3B", 48), ("deepseek_v3", "16B", 27), ("deepseek_v3", "236B", 60),
        ("deepseek_v3", "671B", 61), ("gpt_oss", "20b", 24), ("gpt_oss", "120b", 36), ("llama4", "17bx16e", 48),
        ("deepseek_v3", "debugmodel", 6), ("qwen3", "debugmodel", 8),
    ],
)  # fmt: skip
def test_a_torchtitan_flavour_is_a_preset(name: str, flavour: str, layers: int) -> None:
    reading = read_torchtitan({"model": {"name": name, "flavor": flavour}, "training": {}})
    assert reading.mistakes == ()
    assert Model(**reading.sections["model"]).layers == layers


def test_mistakes_in_a_torchtitan_toml_are_listed_together_and_can_be_overridden(tmp_path: Path) -> None:
    text = """
    [model]
    name = "llama3"
    flavor = "9B"
    [training]
    seq_len = "long"
    local_batch_size = 0.5
    compile = "yes"
    [parallelism]
    tensor_parallel_degree = nan
    """
    path = written(tmp_path, text, "titan.toml")
    lines = refused(path)
    for start in (
        'model.name and model.flavor: "llama3-9B" is not known',
        'training.seq_len = "long" is not a whole number',
        "training.local_batch_size = 0.5 is not a whole number",
        'training.compile = "yes" is neither true nor false',
        "parallelism.tensor_parallel_degree = nan is not a whole number",
    ):
        assert any(line.startswith(f"{path}: {start}") for line in lines), (start, lines)
    assert len(lines) == 5
    mends = ("model.preset=llama3-8b", "train.seq=64", "train.compile=true", "parallel.tp=2")
    assert len(refused(path, *mends)) == 1  # the batch is left


COMMAND = (
    "torchrun --nproc_per_node=8 --nnodes 2 -m torchtitan.train --model.name llama3 --model.flavor 8B "
    "--training.local_batch_size 2 --training.seq_len=4096 --parallelism.tensor_parallel_degree 2 --compile.enable "
    "--activation_checkpoint.mode none --parallelism.no-enable-sequence-parallel --metrics.log_freq 1 --gadget.on 3"
)


def test_a_torchtitan_command(tmp_path: Path) -> None:
    reading = read_setup_with_notes(written(tmp_path, COMMAND, "run.sh"))
    setup = reading.setup
    assert (setup.cluster.gpus, setup.parallel.tp, setup.parallel.dp, setup.parallel.zero) == (16, 2, 8, 3)
    assert (setup.train.micro_batch, setup.train.seq, setup.train.compile) == (2, 4096, True)
    assert not setup.parallel.sequence_parallel
    assert any(note.endswith("ignored: gadget.on") for note in reading.notes)


def test_a_torchtitan_command_with_its_toml_beside_it(tmp_path: Path) -> None:
    written(tmp_path, TITAN, "llama3_8b.toml")
    text = 'NGPU=${NGPU:-"8"}\nCONFIG_FILE=${CONFIG_FILE:-"./train_configs/llama3_8b.toml"}\n'
    text += "torchrun --nproc_per_node=${NGPU} train.py --job.config_file ${CONFIG_FILE} --training.seq_len 1024 "
    text += "--parallelism.data_parallel_replicate_degree 1"
    setup = read_setup(written(tmp_path, text, "run_train.sh"))
    assert (setup.train.seq, setup.parallel.tp, setup.parallel.dp, setup.train.recompute) == (1024, 2, 4, "full")
    away = written(tmp_path, text.replace("llama3_8b.toml", "elsewhere.toml"), "other.sh")
    assert any("is not next to the script" in note for note, _ in read_any(away).notes)


def test_a_torchtitan_config_in_python_gives_its_model_alone(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b --training.seq_len 512"
    reading = read_setup_with_notes(written(tmp_path, text, "run.sh"))
    assert (reading.setup.model.name, reading.setup.train.micro_batch) == ("llama3-8b", 1)
    assert any("is Python, which is not read" in note for note in reading.notes)
    path = written(tmp_path, text.replace("--training.seq_len 512", ""), "short.sh")
    assert "train.seq is missing" in refused(path)[0]


def test_a_torchtitan_toml_below_a_setup(tmp_path: Path) -> None:
    written(tmp_path, TITAN, "titan.toml")
    path = written(tmp_path, 'torchtitan = "titan.toml"\n[cluster]\ngpu = "h100"\n[train]\nseq = 64\n', "run.toml")
    setup = read_setup(path)
    assert (setup.train.seq, setup.parallel.tp, setup.cluster.gpu) == (64, 2, "h100")


def test_deep_table_is_listed_by_its_first_keys(tmp_path: Path) -> None:
    path = written(tmp_path, "[training]\nx." + "a." * 90 + "b = 1", "deep.toml")
    (note,) = [line for line in answer(path) if "not recognised" in line]
    assert "training.x.a.a" in note


# Which kind it is


def test_the_kind_is_known_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    config = json.dumps(PUBLISHED["Llama-2-7b"][0])
    contents = {"a.cfg": config, "b.conf": as_log(), "c": COMMAND, "d.cfg": TITAN, "e.json": json.dumps(ARGUMENTS)}
    for name, text in contents.items():
        assert read_setup(written(tmp_path, text, name), ["train.seq=128", "cluster.gpu=h100"]).model.layers == 32, name


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.toml", b"[training]\nseq_len = " + b"9" * 5000),
        ("x.toml", b"[training]\nseq_len = " + b"9" * 400),
        ("x.toml", b"[parallelism]\ntensor_parallel_degree = inf\n"),
        ("x.json", b'{"model_type": "llama", "hidden_size": ' + b"9" * 4000 + b"}"),
        ("x.json", b'{"a":' * 3000),
        ("x.json", b'{"num_layers": NaN}'),
        ("x.yaml", b"\xff\xfe\x00"),
        ("x.yaml", b"num_layers: [" * 1000),
        (
            "x.yaml",
            b"a0: &a0 {num_layers: 1}\n"
            + b"".join(b"a%d: &a%d {<<: [%s]}\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)),
        ),
        ("x.yaml", b"a: &a\n  b: *a\n"),
        ("x.yaml", b"!!python/object/apply:os.system ['true']"),
        ("x.log", b"num_layers .... 3\n" * 3),
        ("x.log", b"\x00" * 1000),
        ("x.sh", b"--num-layers " + b"9" * 100_000),
        ("x.sh", b"if " * 100_000 + b"--a 1"),
        ("x.sh", b"if true\n" * 100_000 + b"--a 1"),
        ("x.sh", b'A="' * 100_001 + b"--a 1"),
        ("x.sh", b"${A:-" * 100_000 + b"--a 1"),
        ("x.sh", b"$((" * 100_000 + b"--a 1"),
        ("x.sh", b"case $A in\n" + b"a) b\n" * 50_000 + b"--a 1"),
        ("x.txt", b"nothing to see"),
    ],
)
def test_hostile_files_end_in_a_few_short_lines(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    lines = refused(path)
    assert len(lines) < 12
    assert max(len(line) for line in lines) < 1000


SEEDS = [TITAN, OLD_TITAN, COMMAND, *DUMPS.values(), json.dumps(DEEPSEEK_V3)]


@given(st.sampled_from(SEEDS), st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_of_any_kind_is_read_or_refused(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 20))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", "0", "-1", "nan", '"', "$", "{", "\n", "9" * 40, "é", "--"]))
            + text[at + gone :]
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / data.draw(st.sampled_from(["x", "x.toml", "x.json", "x.sh", "x.yaml", "x.log"]))
        path.write_text(text, "utf-8")
        assert all(line.strip() for line in answer(path))


SOURCING = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
MODEL=tiny
source %s
TRAIN=(--seq-length 512 --micro-batch-size 1 --bf16 --tensor-model-parallel-size 2)
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAIN[@]}
"""
SOURCED_MODEL = """MODEL_ARGS=(
  --num-layers 4 --hidden-size 64
  --num-attention-heads 4 --padded-vocab-size 1000
)
"""


@pytest.mark.parametrize(
    "place",
    [
        '"${SCRIPT_DIR}/models/${MODEL}.sh"', '"${SCRIPT_DIR}/../../models/tiny.sh"', "models/tiny.sh",
        "${UNSET}/models/tiny.sh", "/root/models/tiny.sh",
    ],
)  # fmt: skip
def test_a_sourced_file_next_to_the_script_is_read(tmp_path: Path, place: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(SOURCED_MODEL)
    setup = read_setup(written(tmp_path, SOURCING % place, "run.sh"))
    assert (setup.model.layers, setup.model.hidden, setup.train.seq, setup.parallel.tp) == (4, 64, 512, 2)


@pytest.mark.parametrize("place", ["models/absent.sh", "../secret.sh", "/etc/passwd"])
def test_a_sourced_file_that_is_not_there_is_named(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "secret.sh").write_text(SOURCED_MODEL)
    with pytest.raises(InputError, match=re.escape(place)):
        read_setup(written(folder, SOURCING % place, "run.sh"))


SLIME = """
source "$(dirname -- "$0")/models/tiny.sh"
PERF=(--tensor-model-parallel-size 2 --seq-length 512 --micro-batch-size 1)
ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-batch-size 8 \\
  ${MODEL_ARGS[@]} ${PERF[@]} %s
"""


@pytest.mark.parametrize(("option", "precision"), [("", "bf16"), ("--fp16", "fp16")])
def test_slime_has_its_own_defaults(tmp_path: Path, option: str, precision: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(SOURCED_MODEL)
    setup = read_setup(written(tmp_path, SLIME % option, "run.sh"))
    assert (setup.train.precision, setup.parallel.zero, setup.cluster.gpus) == (precision, 1, 8)


@pytest.mark.parametrize(("first", "dense"), [("0", 0), ("1", 1), ("9", 4)])
def test_slime_fills_the_layers_with_experts_in_a_loop(tmp_path: Path, first: str, dense: int) -> None:
    (tmp_path / "models").mkdir()
    model = f"""FIRST_K_DENSE_REPLACE={first}
for ((i=0; i<4; i++)); do
  if (( i < FIRST_K_DENSE_REPLACE )); then arr+=(0); else arr+=(1); fi
done
printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${{arr[*]}}")"
{SOURCED_MODEL.replace("(", "(--num-experts 8 --moe-ffn-hidden-size 64 --moe-layer-freq $MOE_LAYER_FREQ ")}"""
    (tmp_path / "models" / "tiny.sh").write_text(model)
    assert read_setup(written(tmp_path, SLIME % "", "run.sh")).model.dense_layers == dense


def test_slime_trains_on_the_samples_of_a_rollout_in_a_number_of_steps(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(SOURCED_MODEL)
    options = "--n-samples-per-prompt 8 --num-steps-per-rollout 4"
    assert read_setup(written(tmp_path, SLIME % options, "run.sh")).train.global_batch == 8 * 8 // 4
    assert read_setup(written(tmp_path, SLIME % f"{options} --global-batch-size 4", "run.sh")).train.global_batch == 4


def test_a_script_that_sources_itself_ends(tmp_path: Path) -> None:
    path = written(tmp_path, SOURCING % "run.sh", "run.sh")
    with pytest.raises(LumosError):
        read_setup(path)


@pytest.mark.parametrize(
    ("name", "flavor", "experts", "billions"), [("llama4", "17bx128e", 128, 400.7), ("gpt_oss", "20b", 32, 20.9)]
)
def test_torchtitan_runs_mixtures_of_experts_as_grouped_matmuls(
    tmp_path: Path, name: str, flavor: str, experts: int, billions: float
) -> None:
    command = f"torchrun --nproc_per_node 8 -m torchtitan.train --model.name {name} --model.flavor {flavor}"
    setup = read_setup(written(tmp_path, f"{command} --training.seq_len 8192\n", "run.sh"))
    assert setup.model.experts == experts
    assert setup.model.parameters() / 1e9 == pytest.approx(billions, rel=0.002)
    assert not predict(setup).host_bound


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [  # what released files of Gemma 3 and LLaVA say of their language models, and what these have
        ({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}, 3.88),
        (
            {"hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_hidden_layers": 48}
            | {"num_attention_heads": 16, "num_key_value_heads": 8},
            11.77,
        ),
        ({"model_type": "llama", "vocab_size": 32064}, 6.74),
    ],
)
def test_parts_of_a_model_leave_out_what_transformers_has_as_default(
    tmp_path: Path, sizes: dict[str, Any], billions: float
) -> None:
    content = {"model_type": "of several parts", "text_config": sizes, "vision_config": {"hidden_size": 8}}
    tied = {"tie_word_embeddings": sizes["model_type"] != "llama"}
    path = written(tmp_path, json.dumps(content | tied), "config.json")
    reading = read_setup_with_notes(path, ["train.seq=64", "cluster.gpus=64"])
    assert reading.setup.model.parameters(64) / 1e9 == pytest.approx(billions, abs=0.005)
    assert any("not given" in note for note in reading.notes)


def test_a_whole_model_is_filled_only_where_other_sizes_do_not_tell(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 8192}
    content = {"model_type": "mistral", **sizes, "vocab_size": 1000}
    model = read_setup(written(tmp_path, json.dumps(content), "config.json"), ["train.seq=64", "cluster.gpus=1"]).model
    assert (model.kv_heads, model.window) == (8, 0)
    del content["hidden_size"], content["vocab_size"]
    with pytest.raises(LumosError, match="hidden_size is missing"):
        read_setup(written(tmp_path, json.dumps(content), "config.json"), ["train.seq=64", "cluster.gpus=1"])


def test_defaults_of_configurations_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="without transformers, its defaults cannot be compared")
    shipped = huggingface_counts.DEFAULTS.read_text("utf-8")
    monkeypatch.setattr(huggingface_counts, "DEFAULTS", tmp_path / "defaults.json")
    huggingface_counts.write_defaults()
    assert json.loads((tmp_path / "defaults.json").read_text("utf-8"))["types"] == json.loads(shipped)["types"]
