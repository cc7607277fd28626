"""NeMo: the YAML of a GPT model, whose [model] has the names of Megatron's options, read as those options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.setup.importers.foreign_file import Findings, Reading, flat
from lumos.setup.importers.keyed_file import Keys
from lumos.setup.importers.launch_script import Script, evaluate
from lumos.setup.importers.megatron import read_megatron
from lumos.setup.messages import listed, shown
from lumos.setup.sections import as_count
from lumos.setup.stated_size import preset_of

_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
_TABLE = read_table("other_tools.toml")["nemo"]
_FORMULA = re.compile(r"\$\{(multiply|divide|add):([^{}]*)\}")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SIGNS = {"multiply": "*", "divide": "/", "add": "+"}


def is_nemo(table: Mapping[str, Any]) -> bool:
    """Whether a table has the sections of NeMo: a trainer beside a model of Megatron."""
    trainer, model = table.get("trainer"), table.get("model")
    if not isinstance(trainer, dict) or not isinstance(model, dict):
        return False
    return bool({"num_nodes", "devices", "precision"} & set(trainer)) and (
        "exp_manager" in table or bool({"tensor_model_parallel_size", "micro_batch_size", "tokenizer"} & set(model))
    )


def read_nemo(table: Mapping[str, Any]) -> Reading:
    """The run that a NeMo file describes, or InputError where its model is not a GPT."""
    model = table["model"]
    others = [what for key, what in _TABLE["other_models"].items() if model.get(key) not in (None, False)]
    tokenizer = model.get("tokenizer")
    if isinstance(tokenizer, dict) and str(tokenizer.get("type")).startswith("Bert"):
        others.append("BERT, an encoder")
    missing = [key for key in _SIZES if model.get(key) is None]
    if others or missing:
        what = others[0] if others else f"without model.{missing[0]}"
        raise InputError(f"a NeMo file of another model ({what}): GPT models can be described")
    found = Findings()
    keys = Keys(_resolved(table), found)
    options = _options(keys, found)
    _vocabulary(keys, options, found)
    _cluster(keys, options)
    reading = read_megatron(Script(options))
    places = {mistake.place for mistake in found.mistakes}
    mistakes = (*found.mistakes, *(one for one in reading.mistakes if one.place not in places))
    cluster = reading.sections.get("cluster", {})
    devices = keys.number("cluster.gpus_per_node", "trainer.devices")
    if devices:
        cluster["gpus_per_node"] = devices
    return reading._replace(
        notes=(*found.notes, *reading.notes),
        mistakes=mistakes,
        not_recognised=tuple(keys.unread(_TABLE["ignored"])),
        model_names=(str(keys.first("run.name")[1] or ""),),
    )


def _resolved(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with `${multiply:4, ${.hidden_size}}` and references to other keys worked out, once for each level."""
    values = flat(table, 8)
    for _ in range(3):
        values = {key: _worked_out(key, value, values) for key, value in values.items()}
    return values


def _worked_out(key: str, value: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or "${" not in value or len(value) > 300:
        return value

    def referred(match: re.Match[str]) -> str:
        name = match[1]
        folder = key.rpartition(".")[0]
        while name.startswith("."):
            name, above = name[1:], folder
            folder = folder.rpartition(".")[0]
            name = name if name.startswith(".") else f"{above}.{name}"
        target = values.get(name, values.get(name.removeprefix("training.")))
        return str(target) if isinstance(target, int | float | str) and "$" not in str(target) else match[0]

    text = _REFERENCE.sub(referred, value)
    formula = _FORMULA.fullmatch(text)
    if formula:
        result = evaluate(_SIGNS[formula[1]].join(f"({part})" for part in formula[2].split(",")), {})
        return value if result is None else result
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


def _options(keys: Keys, found: Findings) -> dict[str, list[str]]:
    """The model as options of Megatron."""
    options: dict[str, list[str]] = {}
    for name, option in ({name: name.replace("_", "-") for name in _TABLE["same"]} | _TABLE["renamed"]).items():
        value = keys.first(f"model.{name}")[1]
        if value is not None and option not in options:
            options[option] = [str(value)]
    for name, option in _TABLE["switches"].items():
        if keys.is_on(f"model.{name}"):
            options[option] = []
    if "num-query-groups" in options:
        options["group-query-attention"] = []
    _style(keys, options, found)
    _precision(keys, options, found)
    name = keys.word("model.optim.name")
    if name in ("distributed_fused_adam", "mcore_distributed_optim"):
        options["use-distributed-optimizer"] = []
    elif name and "adam" not in name:
        found.note(f"model.optim.name = {shown(name)} is not known: assuming AdamW", "train.optimizer")
    return options


def _style(keys: Keys, options: dict[str, list[str]], found: Findings) -> None:
    if keys.is_on("model.bias") is False:
        options["disable-bias-linear"] = []
    if keys.is_on("model.share_embeddings_and_output_weights") is False:
        options["untie-embeddings-and-output-weights"] = []
    for key in ("normalization", "position_embedding_type"):
        word = keys.word(f"model.{key}")
        if word:
            options[key.replace("_", "-")] = [_TABLE[key].get(word, word)]
    activation = keys.word("model.activation").removeprefix("fast-")
    hidden = as_count(keys.first("model.hidden_size")[1])
    options.setdefault("ffn-hidden-size", [str(4 * hidden)])
    if activation in ("swiglu", "geglu"):
        options["swiglu" if activation == "swiglu" else "quick-geglu"] = []
    elif activation in ("squared-relu", "squared_relu"):
        options["squared-relu"] = []
    elif activation not in ("", "gelu", "openai-gelu", "approx-gelu"):
        found.mistake(
            "model.gated",
            f"model.activation = {shown(activation)} is not known: --set model.gated=true or false",
        )


def _precision(keys: Keys, options: dict[str, list[str]], found: Findings) -> None:
    word = keys.word("trainer.precision", "model.precision")
    if word.startswith("bf16"):
        options["bf16"] = []
    elif word.startswith(("16", "fp16")):
        options["fp16"] = []
    elif word and not word.startswith(("32", "fp32", "tf32")):
        found.note(f"trainer.precision = {shown(word)} is not known: assuming fp32", "train.precision")
    if keys.is_on("model.fp8"):
        options["fp8-format"] = ["hybrid"]


def _vocabulary(keys: Keys, options: dict[str, list[str]], found: Findings) -> None:
    """The vocabulary of the tokenizer: by its type, or by the published model that it or the run is named after."""
    kind, library = keys.first("model.tokenizer.type")[1], keys.word("model.tokenizer.library")
    stated = keys.number("model.vocab", "model.tokenizer.vocab_size", "model.vocab_size")
    if stated or "padded-vocab-size" in options:
        options.setdefault("vocab-size", [str(stated)])
        return
    if str(kind) == "GPT2BPETokenizer" or (library == "megatron" and kind is None):
        options["tokenizer-type"] = ["GPT2BPETokenizer"]
        return
    names = [str(name) for name in (kind, keys.first("run.name")[1]) if name]
    known = next((preset for preset in map(preset_of, names) if preset), None)
    if known is None:
        what = f"tokenizer {listed(names[:1])}" if names else "model.tokenizer"
        found.mistake("model.vocab", f"the vocabulary of {what} is not known: --set model.vocab=NUMBER")
        options["vocab-size"] = ["1"]
        return
    options["vocab-size"] = [str(known.keys["vocab"])]
    size = known.keys["vocab"]
    found.note(f"vocabulary of {size}: that of {known.name}, after the tokenizer or the run", "model.vocab")


def _cluster(keys: Keys, options: dict[str, list[str]]) -> None:
    devices, nodes = (keys.number("cluster.gpus", f"trainer.{name}") for name in ("devices", "num_nodes"))
    if devices:
        options["world-size"] = [str(devices * (nodes or 1))]
