"""torchtitan: a setup as its TOML, and the script that starts it.

Names of keys are those that the importer reads, in `data/torchtitan_keys.toml`; here is what takes more than one.
"""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w

from lumos.data_files import read_table
from lumos.export.launch_draft import FILL_IN, TORCHRUN, Draft, effective, script
from lumos.setup.importers.foreign_file import Findings
from lumos.setup.importers.launch_script import put_cluster, read_shell
from lumos.setup.importers.torchtitan import read_torchtitan
from lumos.setup.presets import find_preset
from lumos.setup.sections import Model
from lumos.setup.setup import Setup

_TABLES = read_table("torchtitan_keys.toml")
_WRITING = _TABLES["writing"]
_CONFIG = "config.toml"
_REASONS = {
    "model.preset": "torchtitan has no such flavor: register the model, then name it here",
    "train.recompute_modules": "torchtitan's selective recomputation is by operator",
    "parallel.no_sync": "torchtitan reduces gradients after every micro-batch",
    "parallel.sequence_parallel": "torchtitan has tensor and sequence parallelism together",
    "parallel.zero": "torchtitan shards weights, gradients and state together, and always with context parallelism",
    "parallel.dp_overlap": "FSDP and DDP overlap by themselves",
    "parallel.tp_overlap": "torchtitan overlaps tensor parallelism with compile alone",
    "train.framework": "torchtitan runs other kernels than the framework that was predicted",
}  # fmt: skip


def torchtitan_config(setup: Setup) -> Draft:
    """The TOML of a setup, and the script that starts torchtitan with it."""
    keys = _model(setup) | _training(setup) | _parallelism(setup) | _stages(setup)
    tables: dict[str, Any] = {}
    for name, value in keys.items():
        *sections, key = name.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
    text = tomli_w.dumps(tables)
    start = script(setup, f"{TORCHRUN}-m torchtitan.train --job.config_file {_CONFIG}")
    found = Findings()
    put_cluster(found, read_shell(start, "run.sh"))
    reading = read_torchtitan(tomllib.loads(text), found)
    remarks = []
    if setup.parallel.schedule == "zero-bubble" and setup.parallel.pp > 1:
        remarks.append("parallel.schedule = zero-bubble: torchtitan has it with two stages a rank or more")
    files = {_CONFIG: text, "run.sh": start}
    return Draft(files, "run.sh", reading, "torchtitan has no key for it", _REASONS, tuple(remarks))


def _name(table: str, place: str) -> str:
    """What a key of a setup is called in the TOML."""
    names: list[str] = _TABLES[table][place]
    return next(name for name in names if name not in _WRITING["only_read"])


def _model(setup: Setup) -> dict[str, Any]:
    name, flavor = flavor_of(setup.model)
    keys: dict[str, Any] = {"model.name": name, "model.flavor": flavor, "model.hf_assets_path": FILL_IN}
    converters = list(_WRITING["converters"].get(setup.train.precision, ()))
    if converters and setup.model.experts:
        converters += _WRITING["expert_converters"][setup.train.precision]
    return keys | ({"model.converters": converters} if converters else {})


def flavor_of(model: Model) -> tuple[str, str]:
    """How torchtitan calls a model; what is to be filled in where it does not know it."""
    for name, (family, flavor) in _WRITING["flavors"].items():
        preset = find_preset(name)
        if preset is not None and preset.model == model.model_copy(update={"name": preset.name}):
            return family, flavor
    return FILL_IN, FILL_IN


def _training(setup: Setup) -> dict[str, Any]:
    train, pp = setup.train, setup.parallel.pp
    keys: dict[str, Any] = {
        _name("numbers", "train.seq"): train.seq,
        _name("numbers", "local_batch"): train.micro_batch * (train.microbatches if pp > 1 else 1),
        _name("numbers", "train.global_batch"): train.global_batch,
        "training.steps": FILL_IN,
        "training.dataset": FILL_IN,
        "optimizer.lr": FILL_IN,
    }
    for key in ("optimizer", "recompute", "precision", "reduce_precision"):
        option, meanings = _TABLES["choices"][f"train.{key}"]
        words = [word for word, meaning in meanings.items() if meaning == getattr(train, key)]
        words = [word for word in words if word not in _WRITING["only_read_words"]]
        if words:
            keys[option] = words[0]
    if train.precision == "fp8" and train.fp8_scaling == "row":
        keys[_TABLES["combined"]["fp8_recipe"][0]] = "rowwise"
    by_layer = train.recompute == "full" and train.recompute_every > 1
    if by_layer:
        keys[_TABLES["choices"]["train.recompute"][0]] = "selective"
    if by_layer or train.recompute == "selective":
        keys["activation_checkpoint.selective_ac_option"] = str(train.recompute_every) if by_layer else "op"
    return keys | {_name("switches", "train.compile"): train.compile}


def _parallelism(setup: Setup) -> dict[str, Any]:
    parallel, zero = setup.parallel, effective(setup)["parallel.zero"]
    group = (parallel.shard or parallel.dp) if parallel.zero else 1
    keys: dict[str, Any] = {
        _name("numbers", "replicate"): parallel.dp // group,
        _name("numbers", "shard"): group,
        _name("numbers", "parallel.tp"): parallel.tp,
        _name("numbers", "parallel.cp"): parallel.cp,
        _name("numbers", "parallel.pp"): parallel.pp,
    }
    if zero and setup.train.offload_optimizer == 1:
        keys[_name("switches", "train.offload_weights")] = True
    if zero:
        keys["parallelism.fsdp_reshard_after_forward"] = "always" if zero == 3 else "never"
    if setup.model.experts:
        keys[_name("numbers", "parallel.ep")] = parallel.ep
        keys[_name("numbers", "parallel.etp")] = effective(setup)["parallel.etp"]
    words = {kind: word for word, kind in _TABLES["rotations"].items()}
    if parallel.cp > 1 and (parallel.cp_type or "p2p") in words:
        keys[_TABLES["combined"]["rotate"][0]] = words[parallel.cp_type or "p2p"]
    if parallel.tp_overlap and parallel.tp > 1:
        keys[_name("switches", "parallel.tp_overlap")] = True
    return keys


def _stages(setup: Setup) -> dict[str, Any]:
    """Schedule and stages: as even as torchtitan makes them, or the modules of each."""
    parallel = setup.parallel
    if parallel.pp == 1:
        return {}
    names = [name for name, meaning in _TABLES["schedules"].items() if meaning == parallel.schedule]
    schedule = next((name for name in names if name not in _WRITING["only_read_words"]), names[0])
    keys: dict[str, Any] = {
        _TABLES["combined"]["schedule"][0]: schedule,
        _name("numbers", "microbatch_size"): setup.train.micro_batch,
    }
    layers: list[int] = effective(setup)["parallel.stage_layers"]
    if len(set(layers)) > 1 or flavor_of(setup.model)[0] == FILL_IN:
        return keys | {_TABLES["combined"]["modules"][0]: _modules(layers)}
    even = {_name("numbers", "first_less"): 0, _name("numbers", "last_less"): 0}
    return keys | even | ({_name("numbers", "layers_per_stage"): layers[0]} if parallel.vpp > 1 else {})


def _modules(layers: list[int]) -> list[list[str]]:
    """The names of the modules of every stage."""
    firsts = [sum(layers[:stage]) for stage in range(len(layers))]
    parts = [[f"layers.{first + i}" for i in range(count)] for first, count in zip(firsts, layers, strict=True)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts
