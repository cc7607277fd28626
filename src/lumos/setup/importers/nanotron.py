"""nanotron: its YAML of model, parallelism, tokens and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.setup.importers.foreign_file import Findings, Reading
from lumos.setup.importers.huggingface import model_keys
from lumos.setup.importers.keyed_file import Keys
from lumos.setup.sections import as_count

_TABLE = read_table("other_tools.toml")["nanotron"]
_TYPES, _EXPERTS = _TABLE["types"], _TABLE["experts"]


def is_nanotron(table: Mapping[str, Any]) -> bool:
    """Whether a table has the sections of nanotron."""
    model = table.get("model")
    return isinstance(model, dict) and isinstance(model.get("model_config"), dict)


def read_nanotron(table: Mapping[str, Any]) -> Reading:
    """The run that a nanotron file describes, or InputError where its model is not a transformer."""
    found = Findings()
    keys = Keys(table, found)
    model = model_keys(_model_config(table["model"]["model_config"]))
    found.notes += model.notes
    found.mistakes += model.mistakes
    found.values |= {f"model.{key}": value for key, value in model.sections["model"].items()}
    found.values |= {"train.framework": "nanotron", "model.name": ""}
    _parallelism(keys, found)
    keys.put_number("train.seq", "tokens.sequence_length")
    keys.put_number("train.micro_batch", "tokens.micro_batch_size")
    keys.put_number("train.microbatches", "tokens.batch_accumulation_per_replica")
    precisions = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
    keys.put_choice("train.precision", precisions, "model.dtype")
    keys.put_choice("train.optimizer", {"adamw": "adamw", "sgd": "sgd"}, "optimizer.optimizer_factory.name")
    if keys.is_on("parallelism.recompute_layer"):
        found.values["train.recompute"] = "full"
    _vocabulary(keys, found)
    unread = [*model.not_recognised, *keys.unread(_TABLE["ignored"])]
    return found.reading(unread)._replace(model_names=(str(keys.first("general.run")[1] or ""),))


def _model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model as Hugging Face would write it, whose names nanotron shares."""
    flags = [name for name in config if name.startswith("is_") and name.endswith("_config")]
    if flags and flags[0] not in _TYPES:
        raise InputError(f"{flags[0][:60]}: nanotron models that can be described are Llama, Qwen2 and StarCoder2")
    left_out = tuple(_TABLE["not_the_model"])
    model = {key: value for key, value in config.items() if not key.startswith(left_out) and value is not None}
    model["model_type"] = _TYPES[flags[0]] if flags else "llama"
    model.setdefault("attention_bias", False)
    if "sliding_window_size" in model:
        model["sliding_window"] = model.pop("sliding_window_size")
    experts = model.pop("moe_config", None)
    if isinstance(experts, dict):
        experts = _EXPERTS | experts
        model |= {name: experts[name] for name in ("num_experts", "moe_intermediate_size")}
        model["num_experts_per_tok"] = experts["top_k"]
        if experts.get("enable_shared_expert"):
            model["shared_expert_intermediate_size"] = experts["shared_expert_intermediate_size"]
        if experts.get("layers") not in (None, [-1]):
            model["moe_layers"] = experts["layers"]
    return model


def _parallelism(keys: Keys, found: Findings) -> None:
    tp = keys.put_number("parallel.tp", "parallelism.tp") or 1
    keys.put_number("parallel.pp", "parallelism.pp")
    keys.put_number("parallel.cp", "parallelism.context_parallel_size")
    ep = keys.put_number("parallel.ep", "parallelism.expert_parallel_size") or 1
    dp = keys.number("parallel.dp", "parallelism.dp")
    if dp is not None:
        found.values["parallel.dp"] = dp * ep  # expert parallelism is a dimension of its own there
    else:
        found.note_gpus()
    keys.put_number("parallel.zero", "optimizer.zero_stage", least=0)
    keys.put_choice("parallel.schedule", {"1f1b": "1f1b", "afab": "gpipe"}, "parallelism.pp_engine")
    reduces = keys.word("parallelism.tp_mode") == "reduce_scatter"
    found.values["parallel.sequence_parallel"] = reduces and tp > 1
    overlaps = keys.is_on("parallelism.tp_linear_async_communication")
    if overlaps is not None and tp > 1:
        found.values["parallel.tp_overlap"] = overlaps and found.values["parallel.sequence_parallel"]


def _vocabulary(keys: Keys, found: Findings) -> None:
    """Padded so that every tensor-parallel rank has the same share."""
    size, divisor = as_count(found.values.get("model.vocab")), keys.number("", "model.make_vocab_size_divisible_by")
    multiple = (divisor or 1) * as_count(found.values.get("parallel.tp", 1))
    if size and size % multiple:
        found.values["model.vocab"] = padded = -(-size // multiple) * multiple
        found.note(
            f"vocabulary of {size} padded to {padded}, a multiple of {multiple}, as nanotron does", "model.vocab"
        )
