"""DeepSpeed: a setup as its JSON, and the script that starts it.

The JSON holds batch, precision and ZeRO. Model and pipeline belong to the program: Megatron-DeepSpeed takes them as
options, any other program has its own way. Names are those that the importers read, in `data/other_tools.toml` and
`data/megatron_options.toml`.
"""

from __future__ import annotations

import json
from typing import Any

from lumos.data_files import read_table
from lumos.export.launch_draft import FILL_IN, Draft, effective, nodes_of, script
from lumos.export.megatron_script import Options, arrays_of, expanded, options_of
from lumos.setup.importers.finetuning import read_deepspeed
from lumos.setup.importers.megatron import script_sections
from lumos.setup.setup import Setup

_KEYS = read_table("other_tools.toml")["deepspeed"]
_FORK = read_table("megatron_options.toml")["writing"]["megatron-deepspeed"]
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
_CONFIG = "ds_config.json"
_OF_SCRIPT = "DeepSpeed's JSON cannot say it: the training script does"
_REASONS = {
    "train.recompute": f"{_OF_SCRIPT}, as with gradient_checkpointing of transformers",
    "parallel.pp": f"{_OF_SCRIPT}; train.framework = megatron-deepspeed has options for it",
    "parallel.tp": "DeepSpeed divides tensors with ZeRO 0, 1 and 2 alone",
    "parallel.shard": "DeepSpeed has groups of replicas (MiCS) with ZeRO 3 alone",
    "train.framework": "DeepSpeed reduces gradients and updates weights in its own way",
}
_MICS = "parallel.shard is mics_shard_size: the model must be made under deepspeed.zero.MiCS_Init"


def deepspeed_config(setup: Setup) -> Draft:
    """The JSON of a setup, and the script that starts a program with it."""
    table = _table(setup)
    files = {_CONFIG: json.dumps(table, indent=2) + "\n"}
    hosts = f" --hostfile {FILL_IN}" if nodes_of(setup)[0] > 1 else ""
    start = f'deepspeed --num_nodes "$NNODES" --num_gpus "$GPUS_PER_NODE"{hosts} \\\n    '
    if setup.train.framework != "megatron-deepspeed":
        files["run.sh"] = script(setup, f"{start}{FILL_IN}.py --deepspeed_config {_CONFIG}")
        reading = read_deepspeed(table, lambda _: None)
        has_groups = "mics_shard_size" in table["zero_optimization"]
        return Draft(files, _CONFIG, reading, _OF_SCRIPT, _REASONS, (_MICS,) if has_groups else ())
    options = _fork_options(setup)
    files["run.sh"] = script(setup, f"{arrays_of(options)}\n{start}pretrain_gpt.py {expanded(options)}")
    reading = script_sections(files["run.sh"], "run.sh")
    return Draft(files, "run.sh", reading, "Megatron-DeepSpeed has no option for it")


def _table(setup: Setup) -> dict[str, Any]:
    train, parallel, values = setup.train, setup.parallel, effective(setup)
    wanted: dict[str, Any] = {
        "train.global_batch": train.global_batch,
        "train.micro_batch": train.micro_batch,
        "train.microbatches": train.microbatches,
        "bf16": train.precision not in ("fp16", "fp32"),
        "fp16": train.precision == "fp16",
        "parallel.zero": parallel.zero,
    }
    if parallel.zero < 3 or parallel.dp_overlap is False:
        wanted["parallel.dp_overlap"] = bool(values["parallel.dp_overlap"])
    if parallel.zero < 3:
        if parallel.tp > 1 and train.framework != "megatron-deepspeed":
            wanted["parallel.tp"] = parallel.tp
    elif parallel.shard not in (0, parallel.dp):
        wanted["parallel.shard"] = parallel.shard
    if train.optimizer in _OPTIMIZERS:
        wanted["train.optimizer"] = _OPTIMIZERS[train.optimizer]
    table: dict[str, Any] = {}
    for place, value in wanted.items():
        *outer, key = _KEYS[place][0].split(".")
        inner = table
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[key] = value
    if train.offload_optimizer:
        table["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": train.offload_optimizer}
    if train.offload_weights:
        table["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if "optimizer" in table:
        table["optimizer"]["params"] = {"lr": FILL_IN}
    return table


def _fork_options(setup: Setup) -> Options:
    """Megatron's options as Megatron-DeepSpeed calls them, without those that it lacks."""
    found: Options = {}
    for section, options in options_of(setup).items():
        called = [_FORK["words"].get(option, option) for option in options]
        pairs = [option.partition(" ") for option in called]
        renamed = [(_FORK["renamed"].get(name, name), space + value) for name, space, value in pairs]
        found[section] = [name + value for name, value in renamed if name in _FORK["has"]]
    found["parallel"] += [f"zero-stage {setup.parallel.zero}", "deepspeed", f"deepspeed_config {_CONFIG}"]
    if setup.parallel.pp == 1:
        found["parallel"].append("no-pipeline-parallel")
    return found
