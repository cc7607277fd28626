"""torchtitan: its TOML of any version, or the dotted options of a command.

The keys are in `data/torchtitan_keys.toml`; here is what takes more than one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.schedules import schedule_named
from lumos.setup.importers.foreign_file import Findings, Reading, flat, is_ignored
from lumos.setup.messages import one_of, shown
from lumos.setup.presets import preset_named
from lumos.setup.sections import as_count

OPTION = re.compile(r"(training|parallelism|model|job|activation-checkpoint|compile|optimizer|experimental)\.[a-z]")

_TABLES = read_table("torchtitan_keys.toml")
_DEFAULTS, _COMBINED = _TABLES["defaults"], _TABLES["combined"]
_KNOWN = {
    *(name for table in ("numbers", "switches", "combined") for names in _TABLES[table].values() for name in names),
    *(name for name, _ in _TABLES["choices"].values()),
    *_TABLES["not_modelled"]["names"],
}
_MAY_BE_NEGATIVE = ("shard", "train.global_batch", "step_tokens")  # -1: what is left, or what follows
_LARGEST = 1 << 40
_ATTENTION_SUFFIX = re.compile(r"[_-](flex|varlen|sdpa|fused_qkv)([_-]attn)?$")
_LAYER = re.compile(r"layers\.(\d{1,5})")
_PYTHON = {"True": True, "False": False, "None": None}


def is_torchtitan(config: Mapping[str, Any]) -> bool:
    """Whether a table has sections of torchtitan, and none of a setup."""
    mine = {"job", "training", "parallelism", "activation_checkpoint"} & set(config)
    return bool(mine) and not {"train", "parallel", "cluster", "megatron", "torchtitan"} & set(config)


def read_torchtitan(config: Mapping[str, Any], begun: Findings | None = None) -> Reading:
    """The run that sections or dotted keys describe. `begun` may hold what is known of the cluster."""
    found = begun or Findings()
    given = {key: value for key, value in flat(config).items() if value is not None}
    found.values["train.framework"] = "torchtitan"
    for rule in (_model, _choices, _precision, _parallelism, _batch, _sharding, _recompute, _stages):
        rule(found, given)
    for key in _TABLES["not_modelled"]["names"]:
        if given.get(key) is True:
            found.note(f"{key} = true is not modelled")
    return found.reading(key for key in given if key not in _KNOWN and not is_ignored(key, _TABLES["ignored"]))


def keys_of(options: Mapping[str, list[str]], value: Callable[[str], Any]) -> dict[str, Any]:
    """The dotted options of a command as keys of a TOML. A flag is true, and `section.no-flag` false."""
    keys: dict[str, Any] = {}
    for name, words in options.items():
        section, dot, key = name.replace("-", "_").rpartition(".")
        if dot and key.startswith("no_") and not words:
            key, words = key[3:], ["False"]
        word = words[0] if words else "True"
        if dot or (key in ("config", "module") and words):
            keys[section + dot + key] = _PYTHON[word] if word in _PYTHON else value(word)
    return keys


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a TOML below those of a command, which win under any name: training.compile is compile.enable."""
    groups = [names for table in ("numbers", "switches", "combined") for names in _TABLES[table].values()]
    same = [set(names) for names in groups if names is not _COMBINED["others"]]
    hidden = {name for names in same if not names.isdisjoint(above) for name in names}
    return {name: value for name, value in below.items() if name not in hidden} | dict(above)


# Values of single keys


def _first(given: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    return next(((name, given[name]) for name in names if name in given), (names[0], None))


def _number(found: Findings, given: Mapping[str, Any], place: str) -> int | None:
    """A whole number under one of its names, or None; a wrong value is noted as a mistake."""
    name, value = _first(given, _TABLES["numbers"][place])
    least = -1 if place in _MAY_BE_NEGATIVE else 0
    if value is None or (type(value) is int and least <= value <= _LARGEST):
        return value
    key = place if "." in place else ""
    sentence = f"{name} = {shown(value)} is not a whole number of {max(least, 1)} or more"
    sentence += (" (or -1)" if least < 0 else "") + (f": correct it, or --set {key}=NUMBER" if key else ": correct it")
    found.mistake(key, sentence)
    return None


def _switch(found: Findings, given: Mapping[str, Any], place: str) -> bool | None:
    name, value = _first(given, _TABLES["switches"][place])
    if value is None or isinstance(value, bool):
        return value
    found.mistake(place if "." in place else "", f"{name} = {shown(value)} is neither true nor false")
    return None


def _choices(found: Findings, given: Mapping[str, Any]) -> None:
    for place, (name, meanings) in _TABLES["choices"].items():
        value = given.get(name)
        if isinstance(value, str) and value in meanings:
            found.values[place] = meanings[value]
        elif value is not None:
            found.note(f"{name} = {shown(value)} is not known: use {one_of(list(meanings))}", place)


# What takes more than one key


def _model(found: Findings, given: Mapping[str, Any]) -> None:
    """name and flavor, the config of newer versions, or the Hugging Face model that is trained unchanged."""
    if "hf_transformers.model" in given:
        wanted, place = str(given["hf_transformers.model"]), "hf_transformers.model"
    elif _is_python(given):
        wanted, place = str(given["config"]), "--config"
        found.note(f"--config {shown(wanted)} is Python, which is not read: only the options given are used")
    else:
        name = given.get("model.name", _DEFAULTS["model"])
        flavor = given.get("model.flavor", _DEFAULTS["flavor"])
        wanted, place = f"{'llama2' if name == 'llama' else name}-{flavor}", "model.name and model.flavor"
    plain = _ATTENTION_SUFFIX.sub("", wanted)
    if plain != wanted:
        what = f"{place}: {shown(wanted)} is modelled as {shown(plain)}"
        found.note(f"{what}, with attention over all tokens", "model.preset")
    try:
        found.values |= {f"model.{key}": value for key, value in preset_named(plain).keys.items()}
    except OptionError:
        found.mistake(
            "model.preset", f"{place}: {shown(wanted)} is not known: give model.preset, model.hf or its sizes"
        )


def _is_python(given: Mapping[str, Any]) -> bool:
    """Whether a configuration in Python sets what is not given, instead of torchtitan's defaults."""
    return "config" in given and "model.flavor" not in given


def _precision(found: Findings, given: Mapping[str, Any]) -> None:
    converters = given.get("model.converters", ())
    if isinstance(converters, str):
        converters = converters.split(",")
    names = [name.strip() for name in converters if isinstance(name, str)] if isinstance(converters, list) else []
    fp8, mxfp8 = _TABLES["converters"]["fp8"], _TABLES["converters"]["mxfp8"]
    if any(name in mxfp8 for name in names):
        found.values["train.precision"] = "mxfp8"
    elif any(name in fp8 for name in names) or _switch(found, given, "float8") or given.get("training.fp8_linear"):
        found.values["train.precision"] = "fp8"
    name, recipe = _first(given, _COMBINED["fp8_recipe"])
    if recipe is not None and found.values.get("train.precision") == "fp8":
        meanings = _TABLES["fp8_recipes"]
        if recipe in meanings:
            found.values["train.fp8_scaling"] = meanings[recipe]
        else:
            found.note(f"{name} = {shown(recipe)} is not known: use {one_of(list(meanings))}", "train.fp8_scaling")
    name, gathers_low = _first(given, _COMBINED["fp8_gather"])
    if gathers_low is True and found.values.get("train.precision") == "fp8":
        found.note(f"{name} = true is not modelled: weights are gathered in 16 bits, twice as many bytes as with it")
    unknown = [name for name in names if name not in (*fp8, *mxfp8)]
    if unknown:
        found.note(f"model.converters: {shown(', '.join(unknown))} is not modelled", "train.precision")
    if given.get("training.dtype") not in (None, "float32"):
        dtype = shown(given["training.dtype"])
        found.note(f"training.dtype = {dtype} is not modelled: assuming weights in float32")


def _parallelism(found: Findings, given: Mapping[str, Any]) -> None:
    for place in ("train.compile", "parallel.tp_overlap"):
        on = _switch(found, given, place)
        if on is not None:
            found.values[place] = on
    for place in ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep"):
        degree = _number(found, given, place)
        if degree is not None:
            found.values[place] = max(degree, 1)
    etp = _number(found, given, "parallel.etp")
    if etp and found.values.get("model.experts") and found.values.get("parallel.ep", 1) > 1:
        found.values["parallel.etp"] = etp  # without expert parallelism, experts are cut by tensor parallelism
    if found.values.get("parallel.cp", 1) > 1:
        name, word = _first(given, _COMBINED["rotate"])
        meanings = _TABLES["rotations"]
        kind = meanings.get(_DEFAULTS["rotate"] if word is None else str(word))
        if kind is None:
            found.note(f"{name} = {shown(word)} is not known: use {one_of(list(meanings))}", "parallel.cp_type")
        found.values["parallel.cp_type"] = kind or meanings[_DEFAULTS["rotate"]]
    sequence = _switch(found, given, "sequence_parallel")
    found.values["parallel.sequence_parallel"] = found.values.get("parallel.tp", 1) > 1 and sequence is not False
    if found.values.get("parallel.tp_overlap") and not found.values.get("train.compile"):
        sentence = "asynchronous tensor parallelism needs compile, which is off: assuming it has no effect"
        found.note(sentence, "train.compile", "parallel.tp_overlap")
        found.values["parallel.tp_overlap"] = False


def _batch(found: Findings, given: Mapping[str, Any]) -> None:
    """The batch of a rank is one micro-batch, or is divided into several by the pipeline."""
    in_python = _is_python(given)
    seq = _number(found, given, "train.seq")
    if seq is not None or not in_python or found.mistakes:
        found.values["train.seq"] = seq or _DEFAULTS["seq"]
    local = _number(found, given, "local_batch")
    tokens = _number(found, given, "local_tokens")
    if local is None and tokens:
        local = max(tokens // found.values.get("train.seq", tokens), 1)  # newer versions count tokens
    if local is None and in_python:
        found.note("training.local_batch_size is not given: assuming 1", "train.micro_batch")
    local = local or (1 if in_python else _DEFAULTS["local_batch"])
    microbatches = _microbatches(found, given, local)
    found.values["train.micro_batch"] = max(local // microbatches, 1)
    total = _number(found, given, "train.global_batch")
    tokens = _number(found, given, "step_tokens")
    if total is None and tokens and tokens > 0:
        total = tokens // found.values.get("train.seq", tokens)
    if total and total > 0:
        found.values["train.global_batch"] = total
    else:
        found.values["train.microbatches"] = microbatches


def _microbatches(found: Findings, given: Mapping[str, Any], local: int) -> int:
    """Micro-batches of one rank's batch: given by their size or, in older versions, by their number."""
    pp = found.values.get("parallel.pp", 1)
    if pp == 1:
        return 1
    number, size = _number(found, given, "microbatch_count"), _number(found, given, "microbatch_size")
    if number is None and size is None and not any(key.startswith("parallelism.") for key in given):
        number = pp
    count = min(number or max(local // (size or 1), 1), local)
    if local % count:
        uneven = f"a batch of {local} in {count} micro-batches is not even: assuming {local // count} each"
        found.note(uneven, "train.micro_batch")
    return count


def _sharding(found: Findings, given: Mapping[str, Any]) -> None:
    """FSDP, hybrid FSDP or DDP, and how many replicas there are where that is given."""
    shard, replicate = _number(found, given, "shard"), _number(found, given, "replicate") or 1
    shard = -1 if shard is None else shard
    pp, cp = (found.values.get(f"parallel.{key}", 1) for key in ("pp", "cp"))
    sharded = shard not in (0, 1) or cp > 1
    policy = given.get("parallelism.fsdp_reshard_after_forward", "default")
    keeps = policy == "never" or (policy == "default" and pp > 1)
    offloads = _switch(found, given, "train.offload_weights")
    if offloads and sharded:  # weights, gradients and the optimizer; what is kept gathered stays on the GPU
        found.values |= {"train.offload_weights": not keeps, "train.offload_optimizer": 1.0}
    found.values["parallel.zero"] = 0 if not sharded else 2 if keeps else 3
    if shard > 0:
        found.values["parallel.dp"] = shard * replicate  # the constraints say where that does not fit the GPUs
    elif "cluster.gpus" not in found.values:
        found.note_gpus()
    if replicate > 1 and sharded:
        if shard > 0:
            found.values["parallel.shard"] = shard
        else:
            found.copies = replicate  # among which the replicas are divided, once their number is known


def _recompute(found: Findings, given: Mapping[str, Any]) -> None:
    if "activation_checkpoint.mode" not in given and not _is_python(given):
        found.values["train.recompute"] = _DEFAULTS["recompute"]
    if found.values.get("train.recompute") != "selective":
        return
    name = "activation_checkpoint.selective_ac_option"
    if name not in given:
        assumed = f"{name} is not given: every second layer is recomputed, as torchtitan does"
        found.note(assumed, "train.recompute", "train.recompute_every")
    option = str(given.get(name, _DEFAULTS["selective"])).strip()
    if option == "op":
        found.values["train.recompute_modules"] = ["operators"]
    elif option.isascii() and option.isdigit() and len(option) < 5:
        found.values |= {"train.recompute": "full", "train.recompute_every": max(int(option), 1)}
        if not int(option):
            every = f'{name} = "0" recomputes every layer, as in torchtitan'
            found.note(every, "train.recompute", "train.recompute_every")
    else:
        keys = ("train.recompute", "train.recompute_modules", "train.recompute_every")
        found.note(f'{name} = {shown(option)} is not known: use "op" or a number of layers; assuming "op"', *keys)
        found.values["train.recompute_modules"] = ["operators"]


# Pipeline stages


def _stages(found: Findings, given: Mapping[str, Any]) -> None:
    """Put the schedule, the virtual stages and the layers of each stage, for a run with a pipeline."""
    values = found.values
    layers, pp = as_count(values.get("model.layers")), as_count(values.get("parallel.pp"))
    if pp <= 1:
        return
    stated = _first(given, _COMBINED["schedule"])[1] or _DEFAULTS["schedule"]
    by_name = {name.casefold(): schedule for name, schedule in _TABLES["schedules"].items()}
    schedule = by_name.get(str(stated).casefold(), "1f1b")
    if str(stated).casefold() not in by_name:
        known = one_of(list(_TABLES["schedules"]))
        what = f"pipeline_parallel_schedule = {shown(stated)} is not known"
        found.note(f"{what}: use {known}; assuming 1F1B", "parallel.schedule")
    elif stated == "InterleavedZeroBubble":
        found.note(f"pipeline_parallel_schedule = {stated} is modelled as {schedule}", "parallel.schedule")
    values["parallel.schedule"] = schedule
    chunks = schedule_named(schedule).chunks[0]
    stages = _stated_stages(given, layers) or _divided(found, given, layers, pp, chunks)
    if len(stages) % pp or (len(stages) > pp and chunks == 1) or min(stages, default=0) < 0:
        sentence = f"{len(stages)} pipeline stages for {pp} ranks: assuming stages as even as possible"
        found.note(sentence, "parallel.stage_layers", "parallel.pp")
        stages = []
    if chunks > 1:
        values["parallel.vpp"] = len(stages) // pp if stages else chunks
    if stages and sum(stages) == (layers or sum(stages)) and min(stages) < max(stages):
        values["parallel.stage_layers"] = stages


def _stated_stages(given: Mapping[str, Any], layers: int) -> list[int]:
    """The layers of every stage where the file lists its modules or the points between the stages."""
    parts = _first(given, _COMBINED["modules"])[1]
    if isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts):
        return [sum(bool(_LAYER.fullmatch(str(name))) for name in part) for part in parts]
    points = _first(given, _COMBINED["split_points"])[1]
    words = points.split(",") if isinstance(points, str) else points if isinstance(points, list) else []
    firsts = [int(match[1]) for word in words if (match := _LAYER.fullmatch(str(word).strip()))]
    return [after - before for before, after in pairwise([0, *firsts, layers])] if firsts and layers else []


def _divided(found: Findings, given: Mapping[str, Any], layers: int, pp: int, chunks: int) -> list[int]:
    """Stages as even as possible; newer versions count the embedding and the output as layers of theirs."""
    first = last = 0
    if any(key.startswith("parallelism.") for key in given):
        ends = (_number(found, given, f"{end}_less") for end in ("first", "last"))
        first, last = (_DEFAULTS["less_layers"] if less is None else min(less, layers) for less in ends)
    per_stage = _number(found, given, "layers_per_stage") or 0
    total = layers + first + last
    count = -(-total // per_stage) if per_stage and chunks > 1 else chunks * pp
    if not 0 < count <= layers:
        return []
    each, extra = divmod(total, count)
    stages = [each + (index < extra) for index in range(count)]
    stages[0] -= first
    stages[-1] -= last
    return stages
