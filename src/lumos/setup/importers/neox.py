"""GPT-NeoX: its YAML of model, parallelism, batch and the options that it hands to DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.setup.importers.finetuning import put_offloading
from lumos.setup.importers.foreign_file import Findings, Reading
from lumos.setup.importers.keyed_file import Keys
from lumos.setup.messages import shown
from lumos.setup.sections import as_count

_ONLY_NEOX = ("pipe_parallel_size", "gpt_j_residual", "no_weight_tying", "pos_emb", "make_vocab_size_divisible_by")
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
_TABLE = read_table("other_tools.toml")["neox"]
_GATED, _PLAIN, _TOKENS = _TABLE["gated"], _TABLE["plain"], _TABLE["tokens"]


def is_neox(table: Mapping[str, Any]) -> bool:
    """Whether a table has keys that only GPT-NeoX has, beside the sizes of a model."""
    names = {str(name).replace("-", "_") for name in table}
    return names.issuperset(_SIZES) and not names.isdisjoint(_ONLY_NEOX)


def read_neox(table: Mapping[str, Any]) -> Reading:
    """The run that a GPT-NeoX file describes, or InputError where its layers are not attention and an MLP."""
    found = Findings()
    keys = Keys({str(name).replace("-", "_"): value for name, value in table.items()}, found)
    _refuse_other_layers(keys.first("attention_config")[1])
    found.values["train.framework"] = "neox"
    for place, name in (("layers", "num_layers"), ("hidden", "hidden_size"), ("heads", "num_attention_heads")):
        keys.put_number(f"model.{place}", name)
    keys.put_number("model.kv_heads", "num_kv_heads")
    _style(keys, found)
    _mlp(keys, found)
    _vocabulary(keys, found)
    _parallelism(keys, found)
    _batch(keys, found)
    gpus = keys.number("cluster.gpus", "global_num_gpus", "world_size")
    if gpus:
        found.values["cluster.gpus"] = gpus
    else:
        found.note_gpus()
    return found.reading(keys.unread(_TABLE["ignored"]))._replace(model_names=())


def _refuse_other_layers(config: Any) -> None:
    """attention_config is a list of [[kinds], repeats]."""
    words = str(config).casefold() if config is not None else ""
    for kind in ("mamba", "rwkv", "gmlp", "amlp"):
        if kind in words:
            raise InputError(f"attention_config has layers of kind {kind}, which cannot be described")


def _style(keys: Keys, found: Findings) -> None:
    norms = {"layernorm": "layer", "rmsnorm": "rms", "scalenorm": "layer", "te_rmsnorm": "rms", "te_layernorm": "layer"}
    found.values |= {"model.norm": "layer", "model.positions": "learned", "model.gated": False}
    keys.put_choice("model.norm", norms, "norm")
    keys.put_choice("model.positions", _TABLE["positions"], "pos_emb")
    found.values["model.tied"] = keys.is_on("no_weight_tying") is not True
    found.values["model.parallel_residual"] = keys.is_on("gpt_j_residual") is True
    found.values["model.qk_norm"] = keys.is_on("use_qk_layernorm") is True
    found.values["model.bias"] = keys.is_on("use_bias_in_mlp") is not False
    found.values["model.qkv_bias"] = keys.is_on("use_bias_in_attn_linear") is not False
    keys.is_on("use_bias_in_norms")
    if keys.number("model.layers", "sliding_window_width"):
        found.note("sliding_window_width is not modelled: assuming full attention", "model.window")
    attention = str(keys.first("attention_config")[1]).casefold()
    if "flash" in attention:
        found.values["train.attention"] = "flash"
    if any(kind in attention for kind in ("sparse", "local", "bigbird", "bslongformer")):
        found.note("sparse and local attention are not modelled: assuming full attention")


def _mlp(keys: Keys, found: Findings) -> None:
    """NeoX narrows a gated MLP to two thirds, so that it has as many parameters as one without a gate."""
    name = keys.word("activation") or "gelu"
    if name not in _GATED and name not in _PLAIN:
        found.note(f"activation {shown(name)} is not known: assuming gelu without a gate", "model.activation")
    gated = name in _GATED
    found.values |= {"model.gated": gated, "model.activation": (_GATED | _PLAIN).get(name, "gelu")}
    hidden = as_count(found.values.get("model.hidden"))
    if keys.word("mlp_type") == "llama":  # until 2024: two thirds of four times the hidden size, a multiple of 256
        width = keys.number("model.ffn", "intermediate_size") or -(-int(2 * hidden * 4 / 3) // 256) * 256
        found.values |= {"model.gated": True, "model.bias": False, "model.ffn": width}
        return
    factor = keys.first("expansion_factor")[1]
    stated = keys.number("model.ffn", "intermediate_size")
    scaled = int(factor * hidden) if isinstance(factor, int | float) and 0 < factor < 1000 else 4 * hidden
    width, multiple = stated or scaled, keys.number("", "mlp_multiple_of") or 1
    experts = keys.number("model.experts", "moe_num_experts") or 1
    if experts > 1:
        found.values |= {"model.experts": experts, "model.top_k": 1}
        keys.put_number("model.top_k", "moe_top_k")
        keys.number("parallel.ep", "moe_expert_parallel_size")
        step, layers = keys.number("", "moe_expert_interval") or 1, as_count(found.values.get("model.layers"))
        found.values["model.dense_layers"] = layers - layers // step
    if gated and experts <= 1:
        width = int(width * 2 / 3) // 2
    if width:
        found.values["model.ffn"] = -(-width // multiple) * multiple


def _vocabulary(keys: Keys, found: Findings) -> None:
    tokenizer, file = keys.word("tokenizer_type") or "gpt2bpetokenizer", keys.word("vocab_file")
    size = keys.number("model.vocab", "padded_vocab_size") or 0
    plain = _TOKENS.get(tokenizer, 0)
    if tokenizer == "hftokenizer" and file and "20b_tokenizer" not in file:
        plain = 0  # any tokenizer of Hugging Face
    if not size and not plain:
        what = shown(file or tokenizer)
        found.mistake("model.vocab", f"the vocabulary of {what} is not known: --set model.vocab=NUMBER")
    elif not size and not (file or keys.word("tokenizer_type")):
        assumed = f"assuming the {plain} tokens of {tokenizer}"
        found.note(f"neither tokenizer_type nor vocab_file is given: {assumed}; set model.vocab", "model.vocab")
    multiple = (keys.number("", "make_vocab_size_divisible_by") or 128) * (keys.number("", "model_parallel_size") or 1)
    found.values["model.vocab"] = size or -(-plain // multiple) * multiple or 1


def _parallelism(keys: Keys, found: Findings) -> None:
    found.values["parallel.tp"] = keys.number("parallel.tp", "model_parallel_size") or 1
    found.values["parallel.pp"] = keys.number("parallel.pp", "pipe_parallel_size", least=0) or 1  # 0: no pipeline
    keys.put_number("parallel.cp", "context_parallel_size")
    keys.put_number("parallel.zero", "zero_optimization.stage", "zero_stage", least=0)
    found.values["parallel.sequence_parallel"] = keys.is_on("sequence_parallel") is True
    overlap = keys.is_on("zero_optimization.overlap_comm")
    if overlap is not None and found.values["parallel.pp"] == 1:  # DeepSpeed turns it off in pipelines
        found.values["parallel.dp_overlap"] = overlap
    put_offloading(keys, found)


def _batch(keys: Keys, found: Findings) -> None:
    keys.put_number("train.seq", "seq_length")
    keys.put_number("train.micro_batch", "train_micro_batch_size_per_gpu", "batch_size")
    accumulated = keys.number("train.microbatches", "gradient_accumulation_steps", "gas")
    total = keys.number("train.global_batch", "train_batch_size")
    if accumulated:
        found.values["train.microbatches"] = accumulated
    elif total:
        found.values["train.global_batch"] = total
    found.values["train.precision"] = "fp32"
    precisions = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16"}
    keys.put_choice("train.precision", precisions, "precision")
    enabled = [name for name in ("fp16", "bf16") if keys.is_on(f"{name}.enabled")]
    if enabled:
        found.values["train.precision"] = enabled[-1]
    elif not keys.word("precision"):
        found.note("no precision is given: assuming fp32; set train.precision", "train.precision")
    keys.put_choice("train.optimizer", read_table("other_tools.toml")["optimizers"], "optimizer.type")
    if keys.is_on("checkpoint_activations"):
        found.values["train.recompute"] = "full"
    if keys.is_on("partition_activations"):
        found.values["train.partition_activations"] = True
