"""A Hugging Face config.json as the keys of [model]. It comes from anywhere, so nothing in it is taken on trust."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lumos.errors import InputError
from lumos.setup.importers.huggingface_families import FAMILIES, OTHER_KINDS
from lumos.setup.importers.imported import Findings, Mistake, Reading, flat
from lumos.setup.messages import shown

# Our key, and what it is called in configurations, the most usual name first. A dot leads into a table.
_SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "ffn_config.ffn_hidden_size"),
    "vocab": ("vocab_size", "padded_vocab_size"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts")
_EXPERT_SIZES: Mapping[str, tuple[str, ...]] = {
    "top_k": ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "ffn_config.moe_top_k"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
}
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NEEDED = ("layers", "hidden", "heads", "vocab")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "swiglu": "silu", "relu": "relu", "relu2": "relu2"}
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
_FOUR_TIMES = ("gpt2", "gpt_neo", "gpt_bigcode", "gptj", "codegen", "bloom", "mpt", "falcon")


_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "tied": ("tie_word_embeddings",),
    "parallel_residual": ("use_parallel_residual", "parallel_attn"),
    "bias": ("use_bias", "mlp_bias", "enable_bias", "add_bias_linear"),
    "qkv_bias": ("attention_bias", "use_qkv_bias", "qkv_bias", "add_qkv_bias"),
    "qk_norm": ("use_qk_norm", "qk_layernorm"),
}
_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SPARSE_STEPS = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")
_RATIOS = ("expansion_ratio", "ffn_hidden_ratio")
_ACTIVATION_NAMES = ("hidden_act", "activation_function", "hidden_activation")
_READ_BELOW = (
    *("model_type", "architectures", "_name_or_path", "is_encoder_decoder", "multi_query", "new_decoder_architecture"),
    *("alibi", "attn_config.alibi", "mlp_only_layers", "sliding_window", "use_sliding_window", "bias", "name_or_path"),
    *("multi_query_attention", "ffn_config.moe_num_experts", "moe_layers"),
)
# What the cost of a training step does not depend on, or no more than by a kernel that is not told apart.
_OF_NO_CONCERN = re.compile(
    r"(\w*_)?(bos|eos|pad|sep|unk|cls|mask|image|video|audio|vision|decoder_start|boi|eoi|begin|forced)_\w*(token|index|id)\w*|"
    r"(transformers|flash|auto|quant|_attn|_flash|_commit|_from|task_|id2|label2|output_|return_|use_cache|use_return|tokenizer|"
    r"torch|dtype|initializer|init_|rope|rotary|partial_rotary|max_|min_|n_positions|n_ctx|seq_length|seq_len|original_max|"
    r"model_max|layer_norm|layernorm|rms_norm|rmsnorm|norm_eps|norm_epsilon|ln_eps|eps|classifier|attention_dropout|embd_pdrop|"
    r"resid_pdrop|attn_pdrop|resid_drop|attn_drop|embed_drop|emb_drop|hidden_dropout|dropout|layerdrop|ffn_dropout|"
    r"summary|scale_attn|scale_attention|reorder|gradient_checkpointing|pretraining|slow_but|"
    r"masked_softmax|apply_residual|pre_layer_norm|do_layer_norm|_remove|remove_|problem_type|finetuning|chunk_size|"
    r"temperature|top_p|repetition|length_penalty|num_beams|do_sample|diversity|no_repeat|bad_words|prefix|"
    r"router_|norm_topk|output_router|aux_loss|seq_aux|scoring|topk_method|topk_group|n_group|routed_scaling|ep_size|"
    r"moe_capacity|moe_use_aux|router$|moe_layer_end|moe_layer_interval|swiglu_limit|experts_per_token|"
    r"attn_logit|final_logit|query_pre|logit|logits|embedding_mult|attention_mult|residual_mult|scale_emb|scale_depth|"
    r"dim_model_base|mup_|use_mup|softcap|cache_|layer_types|sliding_window_pattern|_sliding|window_|max_window|no_rope|"
    r"attention_chunk|attention_types|attention_layers|use_rope|norm_type|fp32_res|post_layer|original_rope|embedding_dropout|"
    r"add_cross|cross_attention|chunk_|is_decoder|tie_encoder|pruned|torchscript|use_bfloat|kv_cache|is_training|"
    r"use_dynamic|use_logn|softmax_in|fp16|bf16|fp32|no_bias|onnx|use_flash|safe|"
    r"attention_softmax|bias_dropout|apply_query|fuse|interleaved_|learned_pos|verbose|embedding_fraction|resid_|emb_|"
    r"activation_type|gating|position_embedding|clip_qkv|word_embed_proj|use_deterministic|_pre_quant|language_model_only|"
    r"image_|video_|vision_|audio_|mm_|projector|tf_|description|attn_config\.|ffn_config\.|quantization|unsloth|"
    r"attn_implementation|num_labels|use_fused|sliding_attention|shared_expert_gate|for_llm|attn_temp|floor_scale|"
    r"block_auto|long_factor|short_factor|longrope|tensor_parallel|n_ctx|rescale|dual_chunk|custom_)\w*"
)


def model_keys(content: object) -> Reading:
    """The section [model] of what a config.json holds, or InputError that says why it is none of a language model."""
    if not isinstance(content, dict):
        raise InputError(f"a config.json is a table, this is {shown(content)}")
    found = Findings()
    config = _language_part(content, found.notes)
    family = _family(config, found.notes)
    keys = dict(family) | _sizes(config, found)
    keys |= _expert_keys(config, keys, found)
    keys |= _style(config, keys, found.notes)
    _note_what_is_missing(keys, found)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        window = shown(config["sliding_window"])
        found.notes.append(f"sliding_window = {window} is not modelled: attention is taken as full")
    if config.get("num_nextn_predict_layers"):
        found.notes.append("num_nextn_predict_layers: the layers that predict further tokens are left out")
    found.values |= {f"model.{key}": value for key, value in (keys | {"name": _name(config)}).items()}
    return found.reading(name for name, value in flat(config, 2).items() if value is not None and not _is_known(name))


def _is_known(name: str) -> bool:
    tables = (*_SIZES.values(), *_EXPERT_SIZES.values(), *_SWITCHES.values(), _EXPERTS, _LATENT_SIZES, _READ_BELOW)
    beside = (_SHARED, _SPARSE_STEPS, _RATIOS, _ACTIVATION_NAMES, ("num_nextn_predict_layers",))
    return any(name in names for names in (*tables, *beside)) or bool(_OF_NO_CONCERN.match(name))


def _note_what_is_missing(keys: Mapping[str, Any], found: Findings) -> None:
    wrong = {mistake.place for mistake in found.mistakes}
    missing = [key for key in (*_NEEDED, "ffn") if key not in keys and f"model.{key}" not in wrong]
    if missing == ["ffn"] and (keys.get("expert_ffn") or "model.expert_ffn" in wrong):
        return
    if len(missing) > 2:
        names = ", ".join(_SIZES[key][0] for key in missing)
        raise InputError(f"{names} missing: is it the config.json of a decoder-only language model?")
    found.mistakes += [
        Mistake(f"model.{key}", f"{_SIZES[key][0]} is missing: add it, or --set model.{key}=NUMBER") for key in missing
    ]


def _language_part(content: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    for name in _LANGUAGE_PARTS:
        part = content.get(name)
        if isinstance(part, dict) and content.get("model_type") not in tuple(OTHER_KINDS):
            notes.append(f"the model has several parts; {name} is taken, and the others are not counted")
            return {"tie_word_embeddings": content.get("tie_word_embeddings")} | part
    return content


def _family(config: dict[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """What the type says; a config of another kind of model is refused."""
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise InputError(f"model_type = {shown(kind)} is not a name")
    if kind and kind in FAMILIES:
        return FAMILIES[kind]
    if kind and kind in OTHER_KINDS:
        raise InputError(f"{kind} is {OTHER_KINDS[kind]}; Lumos knows decoder-only transformers")
    if config.get("is_encoder_decoder") is True:
        raise InputError("an encoder with a decoder; Lumos knows decoder-only transformers")
    architectures = config.get("architectures")
    names = [str(name)[:100] for name in architectures] if isinstance(architectures, list) else []
    if names and not any("CausalLM" in name or "LMHead" in name for name in names):
        raise InputError(f"{names[0]} is no decoder-only language model (ForCausalLM)")
    if kind is None and not all(_first(config, *_SIZES[key])[1] for key in _NEEDED):
        raise InputError("not the config.json of a language model: it has no model_type")
    act = config.get("hidden_act", config.get("activation_function"))
    gated = act in ("silu", "swish", "swiglu")
    notes.append(
        f"model_type {shown(kind)} is not known: taken as {'gated, as Llama' if gated else 'not gated, as GPT-2'}, "
        f"because its activation is {shown(act)}; set model.gated if that is wrong"
    )
    return {"gated": gated}


def _sizes(config: dict[str, Any], found: Findings) -> dict[str, int]:
    tables = {**_SIZES, **{key: (key,) for key in _LATENT_SIZES}}
    keys = {key: size for key, names in tables.items() if (size := _count(config, names, found, key)) is not None}
    unused = ("head_dim",) if keys.get("kv_lora_rank") else _LATENT_SIZES  # some configs give both
    keys = {key: size for key, size in keys.items() if key not in unused}
    kind = config.get("model_type")
    if kind == "qwen" and "ffn" in keys:
        keys["ffn"] //= 2  # it counts both inward halves
    if "ffn" not in keys and kind in _FOUR_TIMES and "hidden" in keys:
        ratio = _count(config, _RATIOS, found, "ffn")
        keys["ffn"] = (ratio or 4) * keys["hidden"]
    grouped = config.get("new_decoder_architecture") is True
    if kind in ("falcon", "gpt_bigcode") and config.get("multi_query", True) is True and not grouped:
        keys["kv_heads"] = 1
    if keys.get("kv_lora_rank") and not keys.get("v_head_dim") and keys.get("hidden") and keys.get("heads"):
        keys["v_head_dim"] = keys["hidden"] // keys["heads"]
    return keys


def _expert_keys(config: dict[str, Any], sizes: Mapping[str, Any], found: Findings) -> dict[str, int]:
    experts = _count(config, _EXPERTS, found, "experts") or 0
    if experts <= 1:
        return {}
    tables = _EXPERT_SIZES.items()
    keys = {key: size for key, names in tables if (size := _count(config, names, found, key)) is not None}
    width = keys.get("expert_ffn") or sizes.get("ffn", 0)
    shared = _count(config, _SHARED, found, "shared_experts")
    if shared and width:
        keys["shared_experts"] = max(round(shared / width), 1)
        if shared % width:
            found.notes.append(f"a shared expert of {shared} is taken as {keys['shared_experts']} of {width}")
    keys["dense_layers"] = keys.get("dense_layers", 0) or _leading(config.get("mlp_only_layers"), found.notes)
    for name in _SPARSE_STEPS:
        if config.get(name) not in (None, 0, 1):
            found.notes.append(f"{name} = {shown(config[name])} is not modelled: every layer is taken to have experts")
    return keys | {"experts": experts}


def _leading(layers: object, notes: list[str]) -> int:
    """How many layers are dense, if they are the first ones."""
    if not isinstance(layers, list) or not layers:
        return 0
    if layers == list(range(len(layers))):
        return len(layers)
    notes.append(
        "mlp_only_layers are not the first layers, which is not modelled: every layer is taken to have experts"
    )
    return 0


def _style(config: dict[str, Any], family: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What a config may say itself about biases, norms, positions and the activation."""
    keys: dict[str, Any] = dict(_switches(config))
    act = next((config[name] for name in _ACTIVATION_NAMES if config.get(name)), None)
    if isinstance(act, str) and "activation" not in family:
        known = "gelu" if "gelu" in act else _ACTIVATIONS.get(act)
        if known:
            keys["activation"] = known
        else:
            notes.append(f"activation {shown(act)} is not known: taken as {'silu' if family['gated'] else 'gelu'}")
    if config.get("alibi") is True or _inner(config, "attn_config.alibi") is True:
        keys["positions"] = "alibi"
    elif config.get("model_type") == "mpt" and _inner(config, "attn_config.alibi") is False:
        keys["positions"] = "learned"
    return keys


def _switches(config: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for key, others in _SWITCHES.items():
        falcons = ("bias",) if key == "bias" and config.get("model_type") == "falcon" else ()
        stated = [config[name] for name in (*others, *falcons) if isinstance(config.get(name), bool)]
        if stated:
            yield key, stated[0]


def _count(config: dict[str, Any], names: tuple[str, ...], found: Findings, key: str) -> int | None:
    """A whole number under one of these names; what is null is not there, and what is none is a mistake."""
    name, value = _first(config, *names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        sentence = f"{name} = {shown(value)} is not a whole number of 0 or more: mend it, or --set model.{key}=NUMBER"
        found.mistakes.append(Mistake(f"model.{key}", sentence))
        return None
    return value


def _first(config: dict[str, Any], *names: str) -> tuple[str, Any]:
    found = ((name, _inner(config, name)) for name in names)
    return next(((name, value) for name, value in found if value is not None), (names[0], None))


def _inner(config: dict[str, Any], name: str) -> Any:
    outer, dot, inner = name.partition(".")
    value = config.get(outer)
    return value.get(inner) if dot and isinstance(value, dict) else None if dot else value


def _name(config: dict[str, Any]) -> str:
    path = config.get("_name_or_path")
    name = path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else ""
    return (name or str(config.get("model_type") or ""))[:100]
