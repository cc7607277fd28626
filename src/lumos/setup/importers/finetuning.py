"""DeepSpeed, axolotl, LLaMA-Factory and transformers' Trainer: files that name a model or leave it to the script."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lumos.data_files import read_table
from lumos.setup.importers.foreign_file import Findings, Reading
from lumos.setup.importers.keyed_file import Keys
from lumos.setup.messages import listed, shown
from lumos.setup.stated_size import preset_of

_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_TRAINER = ("per_device_train_batch_size", "finetuning_type", "cutoff_len", "stage", "gradient_accumulation_steps")
_ZERO_IN_NAME = re.compile(r"z(?:ero)?[_-]?([0-3])(?!\d)", re.IGNORECASE)
_OPTIMIZERS = read_table("other_tools.toml")["optimizers"]
_FSDP = ("fsdp", "fsdp_config", "fsdp_version", "fsdp_config.reshard_after_forward")
_DEEPSPEED_KEYS = read_table("other_tools.toml")["deepspeed"]
_FINETUNING = read_table("other_tools.toml")["finetuning"]
Beside = Callable[[str], Mapping[str, Any] | None]
"""The table in a file next to the one that is read, by its path; None where there is none."""


def is_deepspeed(table: Mapping[str, Any]) -> bool:
    """Whether a table configures DeepSpeed; a model's sizes beside it belong to another tool."""
    return any(key in table for key in _DEEPSPEED) and not {"num_layers", "num-layers", "model_type"} & set(table)


def is_axolotl(table: Mapping[str, Any]) -> bool:
    return "base_model" in table and bool({"sequence_len", "micro_batch_size", "datasets", "adapter"} & set(table))


def is_trainer(table: Mapping[str, Any]) -> bool:
    """Whether a table has the names of LLaMA-Factory or of transformers' Trainer."""
    return "model_name_or_path" in table and any(key in table for key in _TRAINER)


def read_deepspeed(table: Mapping[str, Any], beside: Beside) -> Reading:
    """Batch, precision and sharding. The model and its sequences are not in the file."""
    found = Findings()
    keys = Keys(table, found)
    found.mistake(
        "model.preset",
        "a DeepSpeed file does not describe the model: --set model.preset=NAME or model.hf=CONFIG.JSON, and train.seq",
    )
    _deepspeed(keys, found)
    return found.reading()


def _deepspeed(keys: Keys, found: Findings) -> None:
    names = _DEEPSPEED_KEYS
    found.values["train.framework"] = "deepspeed"
    keys.put_number("parallel.zero", *names["parallel.zero"], least=0)
    for place in ("parallel.tp", "train.micro_batch"):
        keys.put_number(place, *names[place])
    group = keys.number("parallel.shard", *names["parallel.shard"], least=-1)  # -1 and 1: no groups
    if group is not None and group > 1:
        found.values["parallel.shard"] = group
    overlaps = keys.is_on(*names["parallel.dp_overlap"])
    if overlaps is not None:
        found.values["parallel.dp_overlap"] = overlaps
    total = keys.number("train.global_batch", *names["train.global_batch"])
    accumulated = keys.number("train.microbatches", *names["train.microbatches"])
    if accumulated:
        found.values["train.microbatches"] = accumulated
    elif total:
        found.values["train.global_batch"] = total
    on = {name: keys.is_on(*names[name]) for name in ("bf16", "fp16")}
    if any(on.values()) or set(on.values()) == {False}:
        found.values["train.precision"] = next((name for name, is_on in on.items() if is_on), "fp32")
    keys.put_choice("train.optimizer", _OPTIMIZERS, *names["train.optimizer"], otherwise="adamw")
    put_offloading(keys, found)
    if keys.is_on("activation_checkpointing.cpu_checkpointing"):
        found.note("activation_checkpointing.cpu_checkpointing is not modelled")
    _note_not_modelled(keys, found)


def _note_not_modelled(keys: Keys, found: Findings) -> None:
    """One note on the keys of ZeRO that change a step, are not modelled and do not have their default."""
    if not found.values.get("parallel.zero"):
        return
    table = _DEEPSPEED_KEYS["not_modelled"]
    usual = {key: value for key, value in table.items() if key != "of_stage3"}
    if found.values.get("parallel.zero") == 3:
        usual |= table["of_stage3"]
    given = {key: keys.first(f"zero_optimization.{key}")[1] for key in usual}
    named = [f"{key} = {shown(value)}" for key, value in given.items() if value not in (None, usual[key])]
    if named:
        found.note(f"zero_optimization: not modelled, assuming DeepSpeed's defaults: {listed(named)}")
    if (given.get("zero_hpz_partition_size") or 1) != 1:
        found.note("hpZ: weights are assumed to be gathered over all ranks in both passes, and to have no second copy")


def put_offloading(keys: Keys, found: Findings) -> None:
    """ZeRO-Offload: the optimizer, and with ZeRO 3 the weights, on the host; gradients go there beside the backward."""
    devices = {part: keys.word(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")}
    if keys.is_on("zero_optimization.cpu_offload"):
        devices["optimizer"] = "cpu"
    for part, device in devices.items():
        if device == "nvme":
            what = f"zero_optimization.offload_{part} to NVMe is modelled as the memory of the host"
            found.note(f"{what}: the step takes longer", "train.offload_optimizer")
        elif device not in ("", "none", "cpu"):
            known = "use cpu, nvme or none"
            found.note(f"zero_optimization.offload_{part}.device = {shown(device)} is not known: {known}")
    if devices["optimizer"] in ("cpu", "nvme"):
        share = keys.first("zero_optimization.offload_optimizer.ratio")[1]
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
        found.values |= {"train.offload_optimizer": float(share) if is_share else 1.0, "train.offload_overlap": True}
    if devices["param"] in ("cpu", "nvme") and found.values.get("parallel.zero") == 3:
        found.values |= {"train.offload_weights": True, "train.offload_optimizer": 1.0}


def read_axolotl(table: Mapping[str, Any], beside: Beside) -> Reading:
    """A run of axolotl."""
    found = Findings()
    keys = Keys(table, found)
    _model(keys.first("base_model")[1], found)
    keys.put_number("train.seq", "sequence_len")
    keys.put_number("train.micro_batch", "micro_batch_size")
    keys.put_number("parallel.tp", "tensor_parallel_size")
    keys.put_number("parallel.cp", "context_parallel_size", "sequence_parallel_degree")
    keys.put_number("parallel.ep", "expert_parallel_size")
    shard, replicas = keys.number("", "dp_shard_size"), keys.number("", "dp_replicate_size")
    if shard:
        found.values |= {"parallel.zero": 3, "parallel.dp": shard * (replicas or 1), "parallel.shard": shard}
    _mode(keys.word("adapter"), keys, found)
    _only_supervised(keys, found, "rl", "reward_model", "process_reward_model", "diffusion.noise_schedule")
    return _trained(keys, found, beside, recomputes=keys.first("gradient_checkpointing")[1] not in (None, False))


def read_trainer(table: Mapping[str, Any], beside: Beside) -> Reading:
    """A run of LLaMA-Factory or of transformers' Trainer."""
    found = Findings()
    keys = Keys(table, found)
    _model(keys.first("model_name_or_path")[1], found)
    keys.put_number("train.seq", "cutoff_len", "max_seq_length", "max_length", "block_size", "model_max_length")
    keys.put_number("train.micro_batch", "per_device_train_batch_size")
    is_factory = bool(keys.word("finetuning_type", "stage", "template"))
    for place, names in _FINETUNING["trainer"].items():
        keys.put_number(place, *names)
    _mode(keys.word("finetuning_type"), keys, found)
    _only_supervised(keys, found, "stage")
    stated = keys.is_on("gradient_checkpointing")
    off = keys.is_on("disable_gradient_checkpointing")
    return _trained(keys, found, beside, recomputes=bool(stated) or (is_factory and not off))


def _model(name: Any, found: Findings) -> None:
    """The published model of that name, or a mistake that asks for its config.json."""
    preset = preset_of(str(name)) if isinstance(name, str) else None
    if preset is not None:
        found.values |= {f"model.{key}": value for key, value in preset.keys.items()}
    else:
        found.mistake("model.hf", f"the model {shown(name)} is not known: --set model.hf=PATH of its config.json")


def _mode(adapter: str, keys: Keys, found: Findings) -> None:
    found.values["train.mode"] = "lora" if "lora" in adapter else "sft"
    bits = str(keys.first("quantization_bit")[1])
    in_four, in_eight = keys.is_on("load_in_4bit"), keys.is_on("load_in_8bit")
    if found.values["train.mode"] == "lora" and (adapter == "qlora" or in_four or in_eight or bits in ("4", "8")):
        found.values["train.weight_precision"] = "int8" if in_eight or bits == "8" else "nf4"
    if adapter in ("freeze", "oft", "ia3", "badam"):
        found.note(f"{adapter} is not modelled: assuming that all weights are trained", "train.mode")


def _only_supervised(keys: Keys, found: Findings, *names: str) -> None:
    """Refuse what trains by preferences, rewards or denoising, unless the user asks for a supervised step."""
    for name in names:
        method = keys.word(name)
        if method not in _FINETUNING["supervised"]:
            mode = found.values["train.mode"]
            found.mistake(
                "train.mode",
                f"{name} = {shown(keys.first(name)[1])} is not modelled: --set train.mode={mode} for the step of "
                "supervised training on the same sequences, without reference model, pairs or generation",
            )


def _trained(keys: Keys, found: Findings, beside: Beside, recomputes: bool) -> Reading:
    """What both tools share: accumulation, precision, recomputation, sharding; the number of GPUs is never given."""
    keys.put_number("train.microbatches", "gradient_accumulation_steps")
    bf16, fp16 = keys.first("bf16")[1], keys.first("fp16")[1]
    found.values["train.precision"] = "fp8" if keys.is_on("fp8") else "fp16" if fp16 and not bf16 else "bf16"
    keys.put_choice("train.optimizer", _OPTIMIZERS, "optimizer", "optim", otherwise="adamw")
    found.values["train.recompute"] = "full" if recomputes else "none"
    compiled = keys.is_on("torch_compile")
    if compiled is not None:
        found.values["train.compile"] = compiled
    _sharded(keys, found, beside)
    if "parallel.dp" not in found.values:
        found.note_gpus()
    found.note("sequences are taken as packed: all of their tokens count")
    ignored = keys.switched_on(_FINETUNING["not_modelled"])
    if ignored:
        found.note(f"not modelled and ignored: {listed(ignored)}")
    return found.reading()


def _sharded(keys: Keys, found: Findings, beside: Beside) -> None:
    """By a DeepSpeed file, which may be next to this one, or by FSDP."""
    path = keys.first("deepspeed")[1]
    on_host = keys.word("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params", "fsdp_offload_params")
    if isinstance(path, str):
        table, in_name = beside(path), _ZERO_IN_NAME.search(Path(path).name)
        if table is not None and is_deepspeed(table):
            sharding = Findings()
            _deepspeed(Keys(table, sharding), sharding)
            moved = ("parallel.", "train.offload_", "train.framework")
            found.values |= {key: value for key, value in sharding.values.items() if key.startswith(moved)}
            found.notes += sharding.notes
        elif in_name:
            found.values |= {"parallel.zero": int(in_name[1]), "train.framework": "deepspeed"}
            offloads = "offload" in Path(path).name.casefold()
            if offloads:
                found.values |= {"train.offload_optimizer": 1.0, "train.offload_overlap": True}
                found.values["train.offload_weights"] = in_name[1] == "3"
            by_name = f"ZeRO {in_name[1]}{' with offloading' if offloads else ''} by its name"
            found.note(f"{shown(path)} is not next to this file: {by_name}", "parallel.zero")
        else:
            found.mistake("parallel.zero", f"{shown(path)} is not next to this file: --set parallel.zero=STAGE")
    elif on_host or any(keys.first(name)[1] for name in _FSDP):
        found.values |= {"parallel.zero": 3, "parallel.no_sync": True}  # accelerate: sync_each_batch is off by default
        if on_host == "true" or "offload" in str(keys.first("fsdp")[1]):
            found.values |= {"train.offload_weights": True, "train.offload_optimizer": 1.0}
