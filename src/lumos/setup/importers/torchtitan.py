"""torchtitan's options as the sections of a setup: its TOML of any version, or the dotted options of a command."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lumos.errors import OptionError
from lumos.setup.importers.imported import Findings, Mistake, Reading, flat
from lumos.setup.importers.torchtitan_stages import put_stages
from lumos.setup.messages import one_of, shown
from lumos.setup.presets import preset_named
from lumos.setup.sections import as_count

# Where a key stood in one version or another. The first that is given counts.
_PARALLEL = ("parallelism", "training", "experimental")
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "train.seq": ("training.seq_len",),
    "local_batch": ("training.local_batch_size", "training.batch_size"),
    "train.global_batch": ("training.global_batch_size",),
    "parallel.tp": (*(f"{part}.tensor_parallel_degree" for part in _PARALLEL), "training.sequence_parallel_degree"),
    "parallel.cp": tuple(f"{part}.context_parallel_degree" for part in _PARALLEL),
    "parallel.pp": tuple(f"{part}.pipeline_parallel_degree" for part in _PARALLEL),
    "parallel.ep": ("parallelism.expert_parallel_degree",),
    "replicate": tuple(f"{part}.data_parallel_replicate_degree" for part in _PARALLEL),
    "shard": (*(f"{part}.data_parallel_shard_degree" for part in _PARALLEL), "training.data_parallel_degree"),
    "pipeline_batch": ("parallelism.pipeline_parallel_microbatch_size",),
    "pipeline_batches": ("experimental.pipeline_parallel_microbatches", "parallelism.pipeline_parallel_microbatches"),
    "layers_per_stage": ("parallelism.pipeline_parallel_layers_per_stage",),
    "first_less": ("parallelism.pipeline_parallel_first_stage_less_layers",),
    "last_less": ("parallelism.pipeline_parallel_last_stage_less_layers",),
}
_MAY_BE_NEGATIVE = ("shard", "train.global_batch")  # -1: what is left, or what follows
_WORDS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "train.precision": (
        ("training.mixed_precision_param",),
        {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    ),
    "train.optimizer": (("optimizer.name",), {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}),
    "train.recompute": (("activation_checkpoint.mode",), {"none": "none", "selective": "selective", "full": "full"}),
    "model.norm": (
        ("model.norm_type",),
        {"rmsnorm": "rms", "compiled_rmsnorm": "rms", "fused_rmsnorm": "rms", "layernorm": "layer"},
    ),
}
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "train.compile": ("compile.enable", "training.compile"),
    "parallel.tp_overlap": tuple(f"{part}.enable_async_tensor_parallel" for part in _PARALLEL),
    "sequence": ("parallelism.enable_sequence_parallel",),
    "float8": ("float8.enable_float8_linear", "training.enable_float8_linear"),
}
_FLOAT8 = ("float8", "quantize.linear.float8", "quantize.dense.float8", "quantize.grouped_mm.float8")
_MX = ("mx", "quantize.linear.mx", "quantize.dense.mx", "quantize.grouped_mm.mx")
_OTHERS = (
    *("model.name", "model.flavor", "model.converters", "hf_transformers.model", "module", "config", "parallelism"),
    *(
        "training.dtype",
        "activation_checkpoint.selective_ac_option",
        "parallelism.fsdp_reshard_after_forward",
        "training.fp8_linear",
    ),
    *(f"{part}.pipeline_parallel_split_points" for part in _PARALLEL),
    *(f"{part}.pipeline_parallel_schedule" for part in _PARALLEL),
    *("parallelism.module_fqns_per_model_part", "experimental.module_fqns_per_model_part"),
)
# What costs time or memory and is not modelled, where it is switched on.
_NOT_MODELLED = (
    *("training.enable_cpu_offload", "optimizer.early_step_in_backward", "fault_tolerance.enable"),
    *("training.deterministic", "debug.deterministic", "debug.detect_anomaly", "parallelism.enable_fsdp_symm_mem"),
    *("parallelism.full_dtensor", "experimental.enable_compiled_autograd", "parallelism.enable_compiled_autograd"),
    *("parallelism.disable_loss_parallel", "training.disable_loss_parallel", "validation.enable", "validation.enabled"),
    *("activation_offload.enable", "training.enable_activation_offload"),
)
_OF_NO_CONCERN = re.compile(
    r"(job|profiling|metrics|lr_scheduler|checkpoint|comm|validation|validator|memory_estimation|debug|dataset|dataloader|"
    r"tokenizer|hf_transformers|logging|eval|sampling|fault_tolerance)(\.|$)|"
    r"optimizer\.(lr|beta|eps|weight_decay|implementation|fused|foreach)|"
    r"training\.(steps|warmup_steps|max_norm|dataset|dataset_path|seed|gc_|checkpoint_|mixed_precision_reduce|"
    r"data_parallel_type|dump_|tensorboard)|"
    r"model\.(tokenizer_path|hf_assets_path|print_after_conversion|print_|tokenizer)|"
    r"experimental\.(custom_|pipeline_parallel_split_mode)|parallelism\.(context_parallel_rotate|context_parallel_load|"
    r"expert_tensor_parallel_degree$)|training\.context_parallel_rotate|experimental\.context_parallel_rotate|"
    r"activation_checkpoint\.(per_op|early_stop|preserve|determinism|debug|visualize)|"
    r"compile\.(components|backend|mode|model|loss|fullgraph)|(float8|mx|quantize)\.|hf_assets_path|dump_folder|"
    r"model_converters|"
    r"(nproc|nnodes|rdzv)"
)
_ATTENTION_KINDS = re.compile(r"[_-](flex|varlen|sdpa|fused_qkv)([_-]attn)?$")


def is_torchtitan(config: Mapping[str, Any]) -> bool:
    """Whether a table has torchtitan's sections, and none that only a setup has."""
    mine = {"job", "training", "parallelism", "activation_checkpoint"} & set(config)
    return bool(mine) and not {"train", "parallel", "cluster", "megatron", "torchtitan"} & set(config)


def read_torchtitan(config: Mapping[str, Any], begun: Findings | None = None) -> Reading:
    """The run that these sections describe. What is begun may hold machines."""
    found = begun or Findings()
    named = flat(config)
    given = {key: value for key, value in named.items() if value is not None}
    found.values["train.framework"] = "torchtitan"
    for rule in (_model, _put_words, _precision, _switches, _batch, _sharding, _recompute):
        rule(found, given)
    numbers = {place: _number(found, given, place) for place in ("parallel.pp", "layers_per_stage")}
    if as_count(numbers["parallel.pp"]) > 1:
        put_stages(found, given, numbers["layers_per_stage"] or 0, "parallelism" in config)
    for key in _NOT_MODELLED:
        if given.get(key) is True:
            found.notes.append(f"{key} = true is not modelled")
    found.values = {place: value for place, value in found.values.items() if "." in place}
    return found.reading(key for key in given if not _is_known(key))


def _is_known(key: str) -> bool:
    tables = (*_NUMBERS.values(), *(names for names, _ in _WORDS.values()), *_SWITCHES.values(), _OTHERS, _NOT_MODELLED)
    return any(key in names for names in tables) or bool(_OF_NO_CONCERN.match(key))


# The model


def _model(found: Findings, given: Mapping[str, Any]) -> None:
    """name and flavor, the config of newer versions, or the Hugging Face model that is trained as it is."""
    keys = ("model.name", "model.flavor", "config", "hf_transformers.model")
    words = {key: given[key] for key in keys if key in given}
    for key, value in words.items():
        if not isinstance(value, str):
            found.mistakes.append(Mistake("model.preset", f"{key} = {shown(value)} is not a name: give it in quotes"))
            return
    if "hf_transformers.model" in words:
        wanted, names = words["hf_transformers.model"], "hf_transformers.model"
    elif "config" in words and "model.flavor" not in words:
        wanted, names = words["config"], "--config"
        found.notes.append(f"--config {shown(wanted)} sets values in Python, which is not read: what is given counts")
    else:
        name = words.get("model.name", "llama3")
        wanted = f"{'llama2' if name == 'llama' else name}-{words.get('model.flavor', 'debugmodel')}"
        names = "model.name and model.flavor"
    plain = _ATTENTION_KINDS.sub("", wanted)
    if plain != wanted:
        found.notes.append(f"{names}: {shown(wanted)} is taken as {shown(plain)}, with attention over whole sequences")
    try:
        preset = preset_named(plain)
    except OptionError:
        found.mistakes.append(
            Mistake("model.preset", f"{names}: {shown(wanted)} is not known: give model.preset, model.hf or its sizes")
        )
        return
    found.values |= {f"model.{key}": value for key, value in preset.keys.items()}


# One value


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    return next(((name, given[name]) for name in names if name in given), (names[0], None))


def _number(found: Findings, given: Mapping[str, Any], place: str) -> int | None:
    """A whole number under one of its names; None where there is none, or a wrong one, which is a mistake."""
    name, value = _first(given, _NUMBERS[place])
    if value is None:
        return None
    least = -1 if place in _MAY_BE_NEGATIVE else 0
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 40:
        mends = place if "." in place else ""
        sentence = f"{name} = {shown(value)} is not a whole number of {max(least, 1)} or more"
        sentence += " (or -1)" if least < 0 else ""
        mistake = Mistake(mends, sentence + (f": mend it, or --set {mends}=NUMBER" if mends else ": mend it"))
        if mistake not in found.mistakes:
            found.mistakes.append(mistake)
        return None
    return value


def _switch(found: Findings, given: Mapping[str, Any], place: str) -> bool | None:
    name, value = _first(given, _SWITCHES[place])
    if value is None or isinstance(value, bool):
        return value
    found.mistakes.append(Mistake(place if "." in place else "", f"{name} = {shown(value)} is neither true nor false"))
    return None


def _put_words(found: Findings, given: Mapping[str, Any]) -> None:
    for place, (names, meanings) in _WORDS.items():
        name, value = _first(given, names)
        if isinstance(value, str) and value in meanings:
            found.values[place] = meanings[value]
        elif value is not None:
            found.notes.append(f"{name} = {shown(value)} is not understood: use {one_of(list(meanings))}")
    if found.values.get("model.norm") == "rms":
        del found.values["model.norm"]  # as it is anyway


def _precision(found: Findings, given: Mapping[str, Any]) -> None:
    converters = given.get("model.converters", ())
    if isinstance(converters, str):
        converters = converters.split(",")
    names = [name.strip() for name in converters if isinstance(name, str)] if isinstance(converters, list) else []
    old = given.get("training.fp8_linear")
    if any(name in _MX for name in names):
        found.values["train.precision"] = "mxfp8"
    elif any(name in _FLOAT8 for name in names) or _switch(found, given, "float8") or (old and old is not False):
        found.values["train.precision"] = "fp8"
    unknown = [name for name in names if name not in (*_FLOAT8, *_MX)]
    if unknown:
        found.notes.append(f"model.converters: {shown(', '.join(unknown))} is not modelled")
    if given.get("training.dtype") not in (None, "float32"):
        dtype = shown(given["training.dtype"])
        found.notes.append(f"training.dtype = {dtype} is not modelled: weights are kept in float32")


def _switches(found: Findings, given: Mapping[str, Any]) -> None:
    for place in ("train.compile", "parallel.tp_overlap"):
        stated = _switch(found, given, place)
        if stated is not None:
            found.values[place] = stated
    for place in ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep"):
        ways = _number(found, given, place)
        if ways is not None:
            found.values[place] = max(ways, 1)
    sequence = _switch(found, given, "sequence")
    found.values["parallel.sequence_parallel"] = found.values.get("parallel.tp", 1) > 1 and sequence is not False
    if found.values.get("parallel.tp_overlap") and not found.values.get("train.compile"):
        found.notes.append("asynchronous tensor parallelism takes effect with compile alone: it is taken as off")
        found.values["parallel.tp_overlap"] = False


def _batch(found: Findings, given: Mapping[str, Any]) -> None:
    """The batch of a rank is one micro-batch, or is cut into several by the pipeline."""
    by_config = "config" in given and "model.flavor" not in given  # what is not given is in its Python
    seq = _number(found, given, "train.seq")
    if seq is not None or not by_config or found.mistakes:
        found.values["train.seq"] = seq or 2048
    local = _number(found, given, "local_batch")
    if local is None and by_config:
        found.notes.append("training.local_batch_size is not given: 1 is taken")
    local = local or (1 if by_config else 8)
    pp = found.values.get("parallel.pp", 1)
    pieces = _pieces(found, given, local, pp) if pp > 1 else 1
    found.values["train.micro_batch"] = max(local // pieces, 1)
    total = _number(found, given, "train.global_batch")
    if total and total > 0:
        found.values["train.global_batch"] = total
    else:
        found.values["train.microbatches"] = pieces


def _pieces(found: Findings, given: Mapping[str, Any], local: int, pp: int) -> int:
    """Micro-batches of one rank's batch: of a given size, or, in older versions, so many."""
    number = _number(found, given, "pipeline_batches")
    size = _number(found, given, "pipeline_batch")
    old = not any(key.startswith("parallelism.") for key in given)
    if number is None and size is None and old:
        number = pp
    pieces = number or max(local // (size or 1), 1)
    if local % pieces:
        found.notes.append(f"a batch of {local} in {pieces} micro-batches is not even: {local // pieces} each is taken")
    return min(pieces, local)


def _sharding(found: Findings, given: Mapping[str, Any]) -> None:
    """FSDP, hybrid FSDP or DDP, and how many replicas there are where that is given."""
    shard, replicate = _number(found, given, "shard"), _number(found, given, "replicate") or 1
    shard = -1 if shard is None else shard
    ways = {key: found.values.get(f"parallel.{key}", 1) for key in ("tp", "pp", "cp")}
    sharded = shard not in (0, 1) or ways["cp"] > 1
    policy = given.get("parallelism.fsdp_reshard_after_forward", "default")
    keeps = policy == "never" or (policy == "default" and ways["pp"] > 1)
    found.values["parallel.zero"] = 0 if not sharded else 2 if keeps else 3
    gpus = as_count(found.values.get("cluster.gpus"))
    if shard > 0 and not gpus:
        found.values["parallel.dp"] = shard * replicate
    if replicate > 1 and sharded:
        copies = gpus // (ways["tp"] * ways["pp"] * ways["cp"])
        group = shard if shard > 0 else copies // replicate
        if group:
            found.values["parallel.shard"] = group
        else:
            found.notes.append(
                f"data_parallel_replicate_degree = {replicate}: how many replicas share one copy depends on the number "
                "of GPUs, which is not given; all are taken to: set parallel.shard"
            )
    if shard > 0 and gpus:
        found.values["parallel.dp"] = shard * replicate  # the checks say where that does not fit the GPUs


def _recompute(found: Findings, given: Mapping[str, Any]) -> None:
    if "train.recompute" not in found.values and "activation_checkpoint.mode" not in given:
        by_config = "config" in given and "model.flavor" not in given
        if not by_config:
            found.values["train.recompute"] = "selective"
    if found.values.get("train.recompute") == "selective":
        option = given.get("activation_checkpoint.selective_ac_option", "op")
        what = "every layer" if option == "op" else f"one layer in {shown(option)}"
        found.notes.append(
            f"activation_checkpoint.mode = selective recomputes part of {what}: taken as recomputing attention alone"
        )


# A command

OPTION = re.compile(r"(training|parallelism|model|job|activation-checkpoint|compile|optimizer|experimental)\.[a-z]")


def config_of(options: Mapping[str, list[str]], value: Callable[[str], Any]) -> dict[str, Any]:
    """Dotted options as the sections of a TOML. A flag is true, and `section.no-flag` false."""
    config: dict[str, Any] = {}
    for name, words in options.items():
        section, dot, key = name.replace("-", "_").rpartition(".")
        if not dot:
            if key in ("config", "module") and words:
                config[key] = words[0]
            continue
        if key.startswith("no_") and not words:
            key, stated = key[3:], False
        else:
            stated = _typed(words[0], value) if words else True
        part = config
        for step in section.split("."):
            inner = part.setdefault(step, {})
            part = inner if isinstance(inner, dict) else part
        part[key] = stated
    return config


def _typed(word: str, value: Callable[[str], Any]) -> Any:
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    return value(word)
