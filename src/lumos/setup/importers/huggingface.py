"""Hugging Face: a config.json as the keys of [model]. It comes from anywhere, so nothing in it is trusted.

The keys and model types are in `data/huggingface_configs.toml`; here is what takes more than one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.setup.importers.foreign_file import Findings, Reading, flat, is_ignored
from lumos.setup.messages import shown

_TABLES = read_table("huggingface_configs.toml")
_SIZES, _LATENT, _COMBINED = _TABLES["sizes"], _TABLES["latent_sizes"], _TABLES["combined"]
_FAMILIES = {name: family["keys"] for family in _TABLES["families"] for name in family["types"]}
_UNSUPPORTED = {name: group["description"] for group in _TABLES["unsupported"] for name in group["types"]}
_KNOWN = {
    name
    for table in ("sizes", "latent_sizes", "expert_sizes", "switches", "combined")
    for names in _TABLES[table].values()
    for name in names
}
_REQUIRED = ("layers", "hidden", "heads", "vocab")


def model_keys(content: object) -> Reading:
    """The section [model] of a config.json, or InputError that says why it does not describe a language model."""
    if not isinstance(content, dict):
        raise InputError(f"a config.json is a table, this is {shown(content)}")
    found = Findings()
    config = _language_model(content, found.notes)
    keys = _family(config, found.notes) | _sizes(config, found)
    keys |= _experts(config, keys, found)
    keys |= _style(config, keys, found.notes)
    _note_missing(keys, found)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        window = shown(config["sliding_window"])
        found.notes.append(f"sliding_window = {window} is not modelled: assuming full attention")
    if config.get("num_nextn_predict_layers"):
        found.notes.append("num_nextn_predict_layers: multi-token prediction is not modelled")
    found.values |= {f"model.{key}": value for key, value in (keys | {"name": _name(config)}).items()}
    stated = (name for name, value in flat(config, 2).items() if value is not None and name not in _KNOWN)
    return found.reading(name for name in stated if not is_ignored(name, _TABLES["ignored"]))


def _note_missing(keys: Mapping[str, Any], found: Findings) -> None:
    wrong = {mistake.place for mistake in found.mistakes}
    missing = [key for key in (*_REQUIRED, "ffn") if key not in keys and f"model.{key}" not in wrong]
    if missing == ["ffn"] and (keys.get("expert_ffn") or "model.expert_ffn" in wrong):
        return
    if len(missing) > 2:
        names = ", ".join(_SIZES[key][0] for key in missing)
        raise InputError(f"{names} missing: is it the config.json of a decoder-only language model?")
    for key in missing:
        found.mistake(f"model.{key}", f"{_SIZES[key][0]} is missing: add it, or --set model.{key}=NUMBER")


def _language_model(content: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The part of a multimodal configuration that is the language model, or all of it."""
    for name in _COMBINED["language_model"]:
        part = content.get(name)
        if isinstance(part, dict) and content.get("model_type") not in tuple(_UNSUPPORTED):
            notes.append(f"the model has several parts: only {name} is modelled")
            return {"tie_word_embeddings": content.get("tie_word_embeddings")} | part
    return content


def _family(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """What the type of a model implies, or InputError for one that is not a decoder-only transformer."""
    name = config.get("model_type")
    if name is not None and not isinstance(name, str):
        raise InputError(f"model_type = {shown(name)} is not a name")
    if name and name in _FAMILIES:
        return dict(_FAMILIES[name])
    if name and name in _UNSUPPORTED:
        raise InputError(f"{name} is {_UNSUPPORTED[name]}; Lumos models decoder-only transformers")
    if config.get("is_encoder_decoder") is True:
        raise InputError("an encoder with a decoder; Lumos models decoder-only transformers")
    architectures = config.get("architectures")
    classes = [str(word)[:100] for word in architectures] if isinstance(architectures, list) else []
    if classes and not any("CausalLM" in word or "LMHead" in word for word in classes):
        raise InputError(f"{classes[0]} is not a decoder-only language model (ForCausalLM)")
    if name is None and not all(_first(config, _SIZES[key])[1] for key in _REQUIRED):
        raise InputError("not the config.json of a language model: it has no model_type")
    activation = config.get("hidden_act", config.get("activation_function"))
    gated = activation in ("silu", "swish", "swiglu")
    mlp = "a gated MLP, as in Llama" if gated else "an MLP without a gate, as in GPT-2"
    notes.append(
        f"model_type {shown(name)} is not known: assuming {mlp}, because its activation is {shown(activation)}; "
        "set model.gated if that is wrong"
    )
    return {"gated": gated}


def _sizes(config: dict[str, Any], found: Findings) -> dict[str, int]:
    keys = _counts(config, _SIZES | _LATENT, found)
    unused = ("head_dim",) if keys.get("kv_lora_rank") else tuple(_LATENT)  # some configs give both
    keys = {key: size for key, size in keys.items() if key not in unused}
    name, default = config.get("model_type"), _TABLES["default_ffn"]
    if name == "qwen" and "ffn" in keys:
        keys["ffn"] //= 2  # it counts both halves of the gated MLP
    if "ffn" not in keys and name in default["types"] and "hidden" in keys:
        ratio = _count(config, _COMBINED["ffn_ratio"], found, "ffn")
        keys["ffn"] = (ratio or default["ratio"]) * keys["hidden"]
    grouped = config.get("new_decoder_architecture") is True
    if name in ("falcon", "gpt_bigcode") and config.get("multi_query", True) is True and not grouped:
        keys["kv_heads"] = 1
    if keys.get("kv_lora_rank") and not keys.get("v_head_dim") and keys.get("hidden") and keys.get("heads"):
        keys["v_head_dim"] = keys["hidden"] // keys["heads"]
    return keys


def _experts(config: dict[str, Any], sizes: Mapping[str, Any], found: Findings) -> dict[str, int]:
    table = _TABLES["expert_sizes"]
    if (_count(config, table["experts"], found, "experts") or 0) <= 1:
        return {}
    keys = _counts(config, table, found)
    width = keys.get("expert_ffn") or sizes.get("ffn", 0)
    shared = _count(config, _COMBINED["shared_width"], found, "shared_experts")
    if shared and width:
        keys["shared_experts"] = max(round(shared / width), 1)
        if shared % width:
            found.notes.append(f"a shared expert of width {shared} is modelled as {keys['shared_experts']} of {width}")
    keys["dense_layers"] = keys.get("dense_layers", 0) or _leading(config.get("mlp_only_layers"), found.notes)
    for name in _COMBINED["sparse_steps"]:
        if config.get(name) not in (None, 0, 1):
            found.notes.append(f"{name} = {shown(config[name])} is not modelled: assuming experts in every layer")
    return keys


def _leading(layers: object, notes: list[str]) -> int:
    """How many layers are dense, if they are the first ones."""
    if not isinstance(layers, list) or not layers:
        return 0
    if layers == list(range(len(layers))):
        return len(layers)
    notes.append("mlp_only_layers are not the first layers, which is not modelled: assuming experts in every layer")
    return 0


def _style(config: dict[str, Any], family: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What a config says itself about biases, norms, positions and the activation."""
    keys: dict[str, Any] = dict(_switches(config))
    activation = next((config[name] for name in _COMBINED["activation"] if config.get(name)), None)
    if isinstance(activation, str) and "activation" not in family:
        known = "gelu" if "gelu" in activation else _TABLES["activations"].get(activation)
        if known:
            keys["activation"] = known
        else:
            default = "silu" if family["gated"] else "gelu"
            notes.append(f"activation {shown(activation)} is not known: assuming {default}")
    if config.get("alibi") is True or _inner(config, "attn_config.alibi") is True:
        keys["positions"] = "alibi"
    elif config.get("model_type") == "mpt" and _inner(config, "attn_config.alibi") is False:
        keys["positions"] = "learned"
    return keys


def _switches(config: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for key, names in _TABLES["switches"].items():
        of_falcon = ("bias",) if key == "bias" and config.get("model_type") == "falcon" else ()
        stated = [config[name] for name in (*names, *of_falcon) if isinstance(config.get(name), bool)]
        if stated:
            yield key, stated[0]


def _counts(config: dict[str, Any], table: Mapping[str, Sequence[str]], found: Findings) -> dict[str, int]:
    counts = ((key, _count(config, names, found, key)) for key, names in table.items())
    return {key: count for key, count in counts if count is not None}


def _count(config: dict[str, Any], names: Sequence[str], found: Findings, key: str) -> int | None:
    """A whole number under one of these names, or None; null counts as absent, a wrong value is noted as a mistake."""
    name, value = _first(config, names)
    if value is None or (type(value) is int and value >= 0):
        return value
    wrong = f"{name} = {shown(value)} is not a whole number of 0 or more"
    found.mistake(f"model.{key}", f"{wrong}: correct it, or --set model.{key}=NUMBER")
    return None


def _first(config: dict[str, Any], names: Sequence[str]) -> tuple[str, Any]:
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
