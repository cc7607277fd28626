"""Megatron-LM: a setup as the script that launches it.

Names of options are those that the importer reads, in `data/megatron_options.toml`; here is what takes more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import gcd
from typing import Any

from lumos.data_files import read_table
from lumos.export.launch_draft import TORCHRUN, Draft, effective, script
from lumos.setup.importers.megatron import script_sections
from lumos.setup.sections import Train
from lumos.setup.setup import Setup

_TABLES = read_table("megatron_options.toml")
_WRITING = _TABLES["writing"]
_GROUPS = {"model": "MODEL_ARGS", "train": "TRAINING_ARGS", "parallel": "PARALLEL_ARGS", "data": "DATA_ARGS"}
_REASONS = {
    "model.vocab": "Megatron pads the vocabulary to a multiple of the tensor-parallel size",
    "model.qkv_bias": "Megatron's linear layers all have a bias, or none but query, key and value have",
    "parallel.tp_overlap": "Megatron overlaps in the backward pass, and all with sequence parallelism alone",
    "train.framework": "Megatron runs other kernels than the framework that was predicted",
}  # fmt: skip

Options = dict[str, list[str]]
"""By section of a setup: options without dashes, each with its value."""


def megatron_script(setup: Setup) -> Draft:
    """The script that starts Megatron's `pretrain_gpt.py` with this setup."""
    options = options_of(setup)
    start = f"{TORCHRUN}pretrain_gpt.py \\\n    {expanded(options)}"
    text = script(setup, f"{environment_of(setup)}{arrays_of(options)}\n{start}")
    remarks = []
    if "quick-geglu" in options["model"]:
        remarks.append("model.activation = gelu: --quick-geglu approximates a gated GELU by a sigmoid")
    if setup.model.experts and setup.parallel.tp > 1 and not setup.parallel.sequence_parallel:
        remarks.append("parallel.sequence_parallel = false: Megatron asks for it with experts and tensor parallelism")
    reading = script_sections(text, "run.sh")
    return Draft({"run.sh": text}, "run.sh", reading, "Megatron has no option for it", _REASONS, tuple(remarks))


def options_of(setup: Setup) -> Options:
    """The options of a setup."""
    wanted = _wanted(setup)
    found = {section: list(_by_tables(wanted, section)) for section in ("model", "train", "parallel")}
    found["model"] += [*_model(setup), *_WRITING["always"]]
    by_block = setup.train.precision == "fp8" and setup.train.fp8_scaling == "block"
    found["train"] += _WRITING["precisions"].get("fp8, block" if by_block else setup.train.precision, ())
    found["train"] += [f"max-position-embeddings {setup.train.seq}"]
    found["train"] += [*_recomputation(setup.train), *_offloading(setup.train)]
    found["parallel"] += _parallel(setup)
    if setup.train.optimizer == "muon" and setup.parallel.zero == 1:  # it shares out whole matrices by itself
        found["parallel"] = [option for option in found["parallel"] if option != "use-distributed-optimizer"]
        found["train"] = [option.replace("optimizer muon", "optimizer dist_muon") for option in found["train"]]
    found["data"] = list(_WRITING["to_fill_in"])
    return found


def arrays_of(options: Options) -> str:
    """The options as arrays of a shell script, one option a line."""
    arrays = ("".join(f"    --{option}\n" for option in found) for found in options.values())
    return "".join(f"{_GROUPS[name]}=(\n{array})\n" for name, array in zip(options, arrays, strict=True))


def expanded(options: Options) -> str:
    return " ".join(f'"${{{_GROUPS[name]}[@]}}"' for name in options)


def environment_of(setup: Setup) -> str:
    """One connection keeps collectives in order with matmuls; FSDP and newer GPUs need several."""
    parallel, family = setup.parallel, setup.cluster.accelerator.family
    ordered = parallel.tp * parallel.cp > 1 and parallel.zero < 2 and family != "blackwell"
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if ordered else ""


def _wanted(setup: Setup) -> dict[str, Any]:
    """The keys that single options say, without those that have no option where they are off."""
    model, train, parallel, values = setup.model, setup.train, setup.parallel, effective(setup)
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    experts, given = ("experts", "top_k", "expert_ffn"), ("expert_groups", "top_k_groups", "mtp_layers")
    unless = {
        "model.kv_heads": model.latent or model.kv_heads == model.heads,
        "model.head_dim": model.latent or model.head_dim * model.heads == model.hidden,
        "model.gated": not model.gated or model.activation == "gelu",
        "model.activation": model.gated,
        "model.qkv_bias": model.bias,
        **{f"model.{key}": not model.latent or not getattr(model, key) for key in latent},
        **{f"model.{key}": not model.experts for key in experts},
        **{f"model.{key}": not getattr(model, key) for key in given},
        "train.attention": not train.attention,
        "train.reduce_precision": not train.reduce_precision,
        "train.weight_precision": values["train.weight_precision"] != "fp8",
        "parallel.cp": parallel.cp == 1,
        "parallel.ep": parallel.ep == 1,
        "parallel.etp": values["parallel.etp"] in (0, parallel.tp),
        "parallel.vpp": parallel.vpp == 1 or _is_uneven(values),
        "parallel.tp_overlap": not parallel.sequence_parallel,
    }  # fmt: skip
    values["parallel.zero"] = parallel.zero
    values["model.ffn"] = model.ffn or model.expert_ffn
    return {key: value for key, value in values.items() if not unless.get(key, False)}


def _by_tables(wanted: Mapping[str, Any], section: str) -> Iterable[str]:
    """The options for single keys: the importer's tables in the other direction."""
    only_read, words_only_read = _WRITING["only_read"], _WRITING["only_read_words"]
    mine = {place: value for place, value in wanted.items() if place.startswith(f"{section}.")}
    for option, place in _TABLES["numbers"].items():
        if place in mine and option not in only_read:
            yield f"{option} {mine[place]}"
    for option, (place, value) in _TABLES["flags"].items():
        if option not in only_read and place in mine and mine[place] == value and type(mine[place]) is type(value):
            yield option
    for option, (place, meanings) in _TABLES["choices"].items():
        words = [word for word, value in meanings.items() if place in mine and mine[place] == value]
        words = [word for word in words if word not in words_only_read.get(option, ())]
        if words and option not in only_read:
            yield f"{option} {words[0]}"


def _model(setup: Setup) -> Iterable[str]:
    model = setup.model
    if not model.latent and model.kv_heads != model.heads:
        yield "group-query-attention"
    if model.latent:
        yield "multi-latent-attention"
    if model.gated and model.activation == "gelu":
        yield "quick-geglu"
    if model.window:
        yield f"window-size {model.window - 1},0"
    if model.window_pattern:
        yield f"window-attn-skip-freq {model.window_pattern}"
    share = gcd(model.vocab // setup.parallel.tp, _TABLES["vocabulary"]["divisible_by"])
    yield f"vocab-size {model.vocab}"
    yield f"make-vocab-size-divisible-by {share if model.vocab % setup.parallel.tp == 0 else 1}"
    if not model.experts:
        return
    yield from _WRITING["experts"]
    if model.shared_experts:
        yield f"moe-shared-expert-intermediate-size {model.shared_experts * model.expert_ffn}"
    if setup.train.capacity:
        yield f"moe-expert-capacity-factor {setup.train.capacity}"
        yield "moe-pad-expert-input-to-capacity"
    if model.dense_layers:
        yield f'moe-layer-freq "([0]*{model.dense_layers}+[1]*{model.moe_layers})"'


def _recomputation(train: Train) -> Iterable[str]:
    """Of full recomputation, "block" takes the first layers of every stage and "uniform" all, in groups."""
    if train.recompute == "full":
        is_block = train.recompute_layers is not None
        yield f"recompute-method {'block' if is_block else 'uniform'}"
        yield f"recompute-num-layers {train.recompute_layers if is_block else train.recompute_group}"
        yield from ["distribute-saved-activations"] if train.partition_activations else []
    modules = [name for name in train.recompute_modules if name != "operators"]
    if train.recompute == "selective" and modules:
        yield f"recompute-modules {' '.join(modules)}"


def _offloading(train: Train) -> Iterable[str]:
    """The optimizer's state, or the activations of some layers, on the host."""
    if train.offload_optimizer:
        yield from _WRITING["offload_optimizer"]
        yield f"optimizer-offload-fraction {train.offload_optimizer:.12g}"
        if train.offload_overlap:
            yield "overlap-cpu-optimizer-d2h-h2d"
    if train.offload_layers:
        yield f"cpu-offloading-num-layers {train.offload_layers}"


def _parallel(setup: Setup) -> Iterable[str]:
    parallel, values = setup.parallel, effective(setup)
    if parallel.cp > 1 and parallel.cp_type not in ("", "p2p"):
        yield f"cp-comm-type {parallel.cp_type}"
    if values["parallel.cp_inner"]:
        inner = values["parallel.cp_inner"]
        yield f"hierarchical-context-parallel-sizes {inner} {parallel.cp // inner}"
    if parallel.zero >= 2:
        yield from _WRITING["fsdp"]
    if parallel.zero == 3:
        yield "overlap-grad-reduce"
    if parallel.zero == 3 or (parallel.zero and values["parallel.gather_overlap"]):
        yield "overlap-param-gather"
    if setup.cluster.sharp:
        yield "use-sharp"
    groups = parallel.dp // parallel.shard if parallel.shard else 1
    if parallel.zero and groups > 1:
        yield f"num-distributed-optimizer-instances {groups}"
    if _is_uneven(values):
        yield from _stages(values["parallel.stage_layers"], parallel.pp)


def _is_uneven(values: Mapping[str, Any]) -> bool:
    return len(set(values["parallel.stage_layers"])) > 1


def _stages(layers: Sequence[int], pp: int) -> Iterable[str]:
    """Stages of different sizes: by the first and the last one where the others are equal, else by a layout of all."""
    if len(layers) == pp and len(set(layers[1:-1])) == 1 and 0 not in layers:
        yield f"decoder-first-pipeline-num-layers {layers[0]}"
        yield f"decoder-last-pipeline-num-layers {layers[-1]}"
        return
    first, *middle, last = (f"t*{count}" if count else "" for count in layers)
    repeated = "".join(f"({stage}|)*{len(list(group))}," for stage, group in groupby(middle))
    yield f'pipeline-model-parallel-layout "E{first}|{repeated}{last}L"'
