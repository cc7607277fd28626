"""Hugging Face: a config.json as the keys of [model]. It comes from anywhere, so nothing in it is trusted.

The keys and model types are in `data/huggingface_configs.toml`; here is what takes more than one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.setup.importers.foreign_file import Findings, Reading, flat, is_ignored, shared_experts
from lumos.setup.messages import listed, named, shown
from lumos.setup.sections import as_count

_TABLES = read_table("huggingface_configs.toml")
_SIZES, _LATENT, _COMBINED = _TABLES["sizes"], _TABLES["latent_sizes"], _TABLES["combined"]
_DEFAULT_ALONE = (*_COMBINED["sparse_steps"], "sliding_window", "attention_chunk_size", "intermediate_size_mlp")
_FAMILIES = {name: family["keys"] for family in _TABLES["families"] for name in family["types"]}
_UNSUPPORTED = {name: group["description"] for group in _TABLES["unsupported"] for name in group["types"]}
_KNOWN = {
    name
    for table in ("sizes", "latent_sizes", "expert_sizes", "switches", "combined")
    for names in _TABLES[table].values()
    for name in names
}
_DEFAULTS = read_table("huggingface_defaults.json")["types"]
_ALIASES = {  # of every name that has a default, all names of the same
    name: names
    for table in (_SIZES, _LATENT, _TABLES["expert_sizes"], {name: [name] for name in _DEFAULT_ALONE})
    for names in table.values()
    for name in names
}
_REQUIRED = ("layers", "hidden", "heads", "vocab")
_MOST_LAYERS = 1 << 14
_LONGEST_WINDOW = 1 << 20  # longer ones hide nothing
_LIMITED, _SPARSE = _TABLES["attention_layers"]["limited"], _TABLES["attention_layers"]["sparse"]
_WAY_OUT = (
    "lumos predict dry-runs its own code for one GPU (with torch and transformers installed); "
    "for more GPUs, dry-run the training script: lumos capture --dry --world GPUS -- COMMAND"
)


def model_keys(content: object) -> Reading:
    """The section [model] of a config.json, or InputError that says why it does not describe a language model."""
    if not isinstance(content, dict):
        raise InputError(f"a config.json is a table, this is {shown(content)}")
    found = Findings()
    config = _language_model(content, found)
    keys = _family(config)
    _refuse_other_layers(config)
    is_part = config is not content
    config = _completed(config, is_part, found)
    is_known = bool(keys)
    keys = keys or _guessed(config, found)
    keys |= _sizes(config, found)
    keys |= _experts(config, keys, found)
    keys |= _style(config, keys, found)
    keys |= _windows(config, keys, found)
    _note_missing(keys, found)
    if config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"):
        sentence = "multi-token prediction is left out, as transformers does: set model.mtp_layers to have it"
        found.note(sentence, "model.mtp_layers")
    found.values |= {f"model.{key}": value for key, value in (keys | {"name": _name(config)}).items()}
    stated = (name for name, value in flat(config, 2).items() if value is not None and name not in _KNOWN)
    unread = [name for name in stated if not is_ignored(name, _TABLES["ignored"])]
    if unread and not is_known:
        raise InputError(
            f"model_type {shown(config.get('model_type'))} is not known, and these keys may change the model: "
            f"{listed(unread)}; change model_type to that of a model that is built the same (llama, for example) and "
            f"remove them, or {_WAY_OUT}"
        )
    names = None if is_part else (_name(config),)  # the name of several parts counts all of them
    return found.reading(unread)._replace(model_names=names)


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


def _language_model(content: dict[str, Any], found: Findings) -> dict[str, Any]:
    """The part of a multimodal configuration that is the language model, or all of it."""
    for name in _COMBINED["language_model"]:
        part = content.get(name)
        if isinstance(part, dict) and content.get("model_type") not in tuple(_UNSUPPORTED):
            found.note(f"the model has several parts: only {name} is modelled", "model.preset")
            tied = content.get("tie_word_embeddings")
            return part if tied is None else part | {"tie_word_embeddings": tied}
    return content


def _completed(config: dict[str, Any], is_part: bool, found: Findings) -> dict[str, Any]:
    """With the sizes that transformers has where a file says nothing: it leaves them out of the parts of a model."""
    kind = config.get("model_type")
    defaults = _DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    latent = not config.keys().isdisjoint(_LATENT["kv_lora_rank"])
    wanted = [*_ALIASES] if is_part else [] if latent else [*_SIZES["kv_heads"], *_SIZES["head_dim"]]
    lacking = {
        name: size
        for name, size in defaults.items()
        if name in wanted and config.keys().isdisjoint(_ALIASES[name])
    }  # fmt: skip
    heads = _first(config, _SIZES["heads"])[1]
    if not is_part and as_count(heads) % lacking.get("num_key_value_heads", 1):
        del lacking["num_key_value_heads"]
    if lacking:
        names = listed(f"{name} = {size}" for name, size in lacking.items())
        found.note(f"not given, so as transformers has it for {kind}: {names}", "model.preset")
    return lacking | config


def _family(config: dict[str, Any]) -> dict[str, Any]:
    """What the type of a model implies, {} where it is not known, or InputError where it cannot be described."""
    name = config.get("model_type")
    if name is not None and not isinstance(name, str):
        raise InputError(f"model_type = {shown(name)} is not a name")
    if name and name in _UNSUPPORTED:
        raise InputError(f"{name} is {_UNSUPPORTED[name]}, which cannot be described: {_WAY_OUT}")
    if name and name in _FAMILIES:
        return dict(_FAMILIES[name])
    if config.get("is_encoder_decoder") is True:
        raise InputError(f"an encoder with a decoder, which cannot be described: {_WAY_OUT}")
    architectures = config.get("architectures")
    classes = [str(word)[:100] for word in architectures] if isinstance(architectures, list) else []
    if classes and not any("CausalLM" in word or "LMHead" in word for word in classes):
        raise InputError(f"{named(classes[0])} is not a decoder-only language model (ForCausalLM): {_WAY_OUT}")
    if "traceEvents" in config:
        raise InputError("a trace, not a description: give it with --from")
    if name is None and not all(_first(config, _SIZES[key])[1] for key in _REQUIRED):
        raise InputError("not the config.json of a language model: it has no model_type")
    return {}


def _guessed(config: dict[str, Any], found: Findings) -> dict[str, Any]:
    """The MLP of a model whose type is not known: gated if its activation is SiLU; otherwise the user has to say."""
    name, activation = config.get("model_type"), _first(config, _COMBINED["activation"])[1]
    gated = activation in ("silu", "swish", "swiglu")
    if gated:
        found.note(
            f"model_type {shown(name)} is not known: assuming a gated MLP, as in Llama, because its activation is "
            f"{shown(activation)}; compare the number of parameters, and set model.gated if that is wrong",
            "model.gated",
        )
    else:
        found.mistake(
            "model.gated",
            f"model_type {shown(name)} is not known, and its activation {shown(activation)} does not tell whether its "
            "MLP is gated: --set model.gated=true (three matrices, as in Gemma) or false (two, as in GPT-2)",
        )
    return {"gated": gated}


def _refuse_other_layers(config: dict[str, Any]) -> None:
    """Raise InputError where keys speak of layers that are not attention and an MLP, whatever the model is called."""
    for group in _TABLES["refused_keys"]:
        prefixes = tuple(group["prefixes"])
        for name, value in config.items():
            if name.startswith(prefixes) and value not in (None, 0, False, "", [], {}) and not _is_full(name, value):
                what = f"{name[:60]} = {shown(value)} means {group['description']}"
                raise InputError(f"{what}, which cannot be described: {_WAY_OUT}")
    kinds = config.get("layer_types")
    known = [kind for kinds in _TABLES["attention_layers"].values() for kind in kinds]
    others = [str(kind) for kind in kinds if kind not in known] if isinstance(kinds, list) else []
    if others:
        count = f"{len(others)} of {len(kinds or ())} layers are {shown(others[0])}"
        raise InputError(f"layer_types: {count}, which cannot be described: {_WAY_OUT}")


def _is_full(name: str, value: Any) -> bool:
    """Whether a key of hybrid models says of every layer that it is ordinary attention."""
    kinds = value if isinstance(value, list) else [value]
    return name in _TABLES["full_attention"] and all(kind == _TABLES["full_attention"][name] for kind in kinds)


def _windows(config: dict[str, Any], sizes: Mapping[str, Any], found: Findings) -> dict[str, int]:
    """Sliding windows of all layers, or of all but every n-th; a note where layers do not attend to all otherwise."""
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    limited = sum(kind in _LIMITED for kind in kinds)
    where = f" in {limited} of {len(kinds)} layers" if kinds else ""
    keys: dict[str, int] = {}
    for name in ("sliding_window", "attention_chunk_size"):
        size = config.get(name)
        if not size or not config.get("use_sliding_window", True) or not (limited or not kinds):
            continue
        pattern = _window_pattern(config, sizes, len(kinds), limited) if name == "sliding_window" else None
        if pattern == 1:
            continue
        if pattern is not None and type(size) is int and 0 < size < _LONGEST_WINDOW:
            keys = {"window": size, "window_pattern": pattern}
        else:
            sentence = f"{name} = {shown(size)}{where} is not modelled: assuming full attention"
            found.note(sentence, "model.preset", "model.window")
    if any(kind in _SPARSE for kind in kinds) or config.get("index_topk"):
        sentence = "sparse attention is not modelled, and its index is not counted: assuming full attention"
        found.note(sentence, "model.preset")
    return keys


def _window_pattern(config: Mapping[str, Any], sizes: Mapping[str, Any], layers: int, limited: int) -> int | None:
    """Which layers have no window: 0 for none of them, n for every n-th (1 for all), None where it is neither.

    Of `layers` kinds that are listed, so many are `limited`; where none is listed, the model's type tells.
    """
    if layers:
        full = layers - limited
        step = round(layers / full) if full else 0
        return step if not full or (step > 1 and full in (layers // step, -(-layers // step))) else None
    first = config.get("max_window_layers")  # of Qwen: the layers before it have no window
    if first is not None:
        return 0 if first == 0 else 1 if as_count(first) >= sizes.get("layers", 0) else None
    stated = config.get("sliding_window_pattern")
    if stated is not None:
        return stated if type(stated) is int and 0 < stated <= _MOST_LAYERS else None
    return int(_TABLES["window_patterns"].get(config.get("model_type"), 0))


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
    if name in ("falcon", "gpt_bigcode") and not grouped:
        keys["kv_heads"] = 1 if config.get("multi_query", True) is True else keys.get("heads", 0)
    if keys.get("kv_lora_rank") and not keys.get("v_head_dim") and keys.get("hidden") and keys.get("heads"):
        keys["v_head_dim"] = keys["hidden"] // keys["heads"]
    return keys


def _experts(config: dict[str, Any], sizes: Mapping[str, Any], found: Findings) -> dict[str, int]:
    table = _TABLES["expert_sizes"]
    if (_count(config, table["experts"], found, "experts") or 0) <= 1:
        return {}
    keys = _counts(config, table, found)
    if config.get("intermediate_size_mlp"):  # of Llama 4, where intermediate_size is that of an expert
        keys |= {"expert_ffn": sizes.get("ffn", 0)} | _counts(config, {"ffn": ["intermediate_size_mlp"]}, found)
    width = keys.get("expert_ffn") or sizes.get("ffn", 0)
    shared = _count(config, _COMBINED["shared_width"], found, "shared_experts")
    if shared and width:
        keys["shared_experts"] = shared_experts(found, shared, width, keys.get("experts", 0))
    layers = min(sizes.get("layers", 0), _MOST_LAYERS)
    sparse = _sparse_layers(config, layers, keys.get("dense_layers", 0))
    if sparse is None:
        found.mistake(
            "model.dense_layers",
            f"mlp_layer_types, moe_layer_freq or moe_layers do not say of {layers} layers which have experts: "
            "correct them, or --set model.dense_layers=NUMBER",
        )
        return keys
    keys["dense_layers"] = dense = layers - sum(sparse)
    if any(sparse[:dense]):
        found.note(
            f"{dense} of {layers} layers have no experts: modelled as the first {dense} layers", "model.dense_layers"
        )
    return keys


def _sparse_layers(config: Mapping[str, Any], layers: int, leading: int) -> list[bool] | None:
    """Of every layer, whether it has experts; None where the file contradicts itself."""
    kinds, steps, chosen = (config.get(key) for key in ("mlp_layer_types", "moe_layer_freq", "moe_layers"))
    if isinstance(kinds, list):
        return [kind != "dense" for kind in kinds] if len(kinds) == layers else None
    if isinstance(steps, list):
        return [bool(step) for step in steps] if len(steps) == layers else None
    if isinstance(chosen, list) and chosen:
        return [layer in chosen for layer in range(layers)]
    dense = config.get("mlp_only_layers")
    dense = dense if isinstance(dense, list) else []
    end = config.get("moe_layer_end_index")
    last = end if type(end) is int and end >= 0 else layers
    *ends_groups, begins_groups = (as_count(config.get(name)) or 1 for name in _COMBINED["sparse_steps"])
    return [
        leading <= layer <= last
        and layer not in dense
        and layer % begins_groups == 0
        and all((layer + 1) % step == 0 for step in ends_groups)
        for layer in range(layers)
    ]


def _style(config: dict[str, Any], family: Mapping[str, Any], found: Findings) -> dict[str, Any]:
    """What a config says itself about biases, norms, positions and the activation."""
    keys: dict[str, Any] = dict(_switches(config))
    activation = _first(config, _COMBINED["activation"])[1]
    if isinstance(activation, str) and "activation" not in family:
        known = "gelu" if "gelu" in activation else _TABLES["activations"].get(activation)
        if known:
            keys["activation"] = known
        else:
            default = "silu" if family["gated"] else "gelu"
            found.note(f"activation {shown(activation)} is not known: assuming {default}", "model.activation")
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
    if isinstance(value, list) and len(value) > 1 and all(item == value[0] for item in value):
        value = value[0]  # one for every layer, all the same
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
