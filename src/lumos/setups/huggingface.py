"""A Hugging Face config.json as the keys of [model]. It comes from anywhere, so nothing in it is taken on trust."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lumos.errors import InputError
from lumos.setups.families import FAMILIES, OTHER_KINDS
from lumos.setups.source import place_of, text_of
from lumos.setups.wording import shown

# Our key, and what it is called in configurations, the most usual name first. A dot leads into a table.
_SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_config.ffn_hidden_size"),
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


class ConfigReading(NamedTuple):
    """The keys of [model], and what the user should know about them."""

    keys: dict[str, Any]
    notes: tuple[str, ...]


def read_config(path: Path) -> ConfigReading:
    """The keys of [model] in a config.json, or InputError that says why it is none of a language model."""
    try:
        content = msgspec.json.decode(text_of(path))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{place_of(path)}: not JSON ({str(error)[:100]})") from None
    return model_keys(content, place_of(path))


def model_keys(content: object, where: str) -> ConfigReading:
    """The same of what the file holds."""
    if not isinstance(content, dict):
        raise InputError(f"{where}: a config.json is a table, this is {shown(content)}")
    notes: list[str] = []
    config = _language_part(content, notes)
    family = _family(config, where, notes)
    keys = dict(family) | _sizes(config, where)
    keys |= _expert_keys(config, keys, where, notes)
    keys |= _style(config, keys, notes)
    missing = [_SIZES[key][0] for key in (*_NEEDED, "ffn") if key not in keys]
    if missing and not (missing == [_SIZES["ffn"][0]] and keys.get("expert_ffn")):
        raise InputError(
            f"{where}: {', '.join(missing)} missing: is it the config.json of a decoder-only language model?"
        )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        notes.append(f"sliding_window = {shown(config['sliding_window'])} is not modelled: attention is taken as full")
    return ConfigReading(keys | {"name": _name(config)}, tuple(f"{where}: {note}" for note in notes))


def _language_part(content: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    for name in _LANGUAGE_PARTS:
        part = content.get(name)
        if isinstance(part, dict) and content.get("model_type") not in tuple(OTHER_KINDS):
            notes.append(f"the model has several parts; {name} is taken, and the others are not counted")
            return {"tie_word_embeddings": content.get("tie_word_embeddings")} | part
    return content


def _family(config: dict[str, Any], where: str, notes: list[str]) -> Mapping[str, Any]:
    """What the type says; a config of another kind of model is refused."""
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise InputError(f"{where}: model_type = {shown(kind)} is not a name")
    if kind and kind in FAMILIES:
        return FAMILIES[kind]
    if kind and kind in OTHER_KINDS:
        raise InputError(f"{where}: {kind} is {OTHER_KINDS[kind]}; Lumos knows decoder-only transformers")
    if config.get("is_encoder_decoder") is True:
        raise InputError(f"{where}: an encoder with a decoder; Lumos knows decoder-only transformers")
    architectures = config.get("architectures")
    names = [str(name)[:100] for name in architectures] if isinstance(architectures, list) else []
    if names and not any("CausalLM" in name or "LMHead" in name for name in names):
        raise InputError(f"{where}: {names[0]} is no decoder-only language model (ForCausalLM)")
    if kind is None and not all(_first(config, *_SIZES[key])[1] for key in _NEEDED):
        raise InputError(f"{where}: not the config.json of a language model: it has no model_type")
    act = config.get("hidden_act", config.get("activation_function"))
    gated = act in ("silu", "swish", "swiglu")
    notes.append(
        f"model_type {shown(kind)} is not known: taken as {'gated, as Llama' if gated else 'not gated, as GPT-2'}, "
        f"because its activation is {shown(act)}; set model.gated if that is wrong"
    )
    return {"gated": gated}


def _sizes(config: dict[str, Any], where: str) -> dict[str, int]:
    keys = {key: size for key, names in _SIZES.items() if (size := _count(config, names, where)) is not None}
    keys |= {key: size for key in _LATENT_SIZES if (size := _count(config, (key,), where)) is not None}
    unused = ("head_dim",) if keys.get("kv_lora_rank") else _LATENT_SIZES  # some configs give both
    keys = {key: size for key, size in keys.items() if key not in unused}
    kind = config.get("model_type")
    if kind == "qwen" and "ffn" in keys:
        keys["ffn"] //= 2  # it counts both inward halves
    if "ffn" not in keys and kind in _FOUR_TIMES and "hidden" in keys:
        ratio = _count(config, ("expansion_ratio", "ffn_hidden_ratio"), where)
        keys["ffn"] = (ratio or 4) * keys["hidden"]
    grouped = config.get("new_decoder_architecture") is True
    if kind in ("falcon", "gpt_bigcode") and config.get("multi_query", True) is True and not grouped:
        keys["kv_heads"] = 1
    return keys


def _expert_keys(config: dict[str, Any], sizes: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, int]:
    experts = _count(config, _EXPERTS, where) or 0
    if experts <= 1:
        return {}
    keys = {key: size for key, names in _EXPERT_SIZES.items() if (size := _count(config, names, where)) is not None}
    width = keys.get("expert_ffn") or sizes.get("ffn", 0)
    shared = _count(config, ("shared_expert_intermediate_size", "shared_intermediate_size"), where)
    if shared and width:
        keys["shared_experts"] = max(round(shared / width), 1)
        if shared % width:
            notes.append(f"a shared expert of {shared} is taken as {keys['shared_experts']} of {width}")
    keys["dense_layers"] = keys.get("dense_layers", 0) or _leading(config.get("mlp_only_layers"), notes)
    for name in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"):
        if config.get(name) not in (None, 0, 1):
            notes.append(f"{name} = {shown(config[name])} is not modelled: every layer is taken to have experts")
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
    act = config.get("hidden_act") or config.get("activation_function") or config.get("hidden_activation")
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
    names = {
        "tied": ("tie_word_embeddings",),
        "parallel_residual": ("use_parallel_residual", "parallel_attn"),
        "bias": ("use_bias", "mlp_bias", "enable_bias") + (("bias",) if config.get("model_type") == "falcon" else ()),
        "qkv_bias": ("attention_bias", "use_qkv_bias", "qkv_bias"),
        "qk_norm": ("use_qk_norm", "qk_layernorm"),
    }
    for key, others in names.items():
        stated = [config[name] for name in others if isinstance(config.get(name), bool)]
        if stated:
            yield key, stated[0]


def _count(config: dict[str, Any], names: tuple[str, ...], where: str) -> int | None:
    """A whole number under one of these names. What is null is not there."""
    name, value = _first(config, *names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{where}: {name} = {shown(value)} is not a whole number of 0 or more")
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
