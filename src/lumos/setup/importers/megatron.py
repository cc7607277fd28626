"""Megatron-LM arguments as the sections of a setup: the script that passes them, or what a run printed of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lumos.setup.importers.imported import Findings, Reading, listed
from lumos.setup.importers.launch_script import LAUNCHER, put_machines
from lumos.setup.importers.shell import Options, Script, read_shell
from lumos.setup.messages import one_of, shown
from lumos.setup.sections import as_count

_NUMBERS: Mapping[str, str] = {
    "num-layers": "model.layers",
    "hidden-size": "model.hidden",
    "ffn-hidden-size": "model.ffn",
    "num-attention-heads": "model.heads",
    "num-query-groups": "model.kv_heads",
    "kv-channels": "model.head_dim",
    "padded-vocab-size": "model.vocab",
    "num-experts": "model.experts",
    "moe-router-topk": "model.top_k",
    "moe-ffn-hidden-size": "model.expert_ffn",
    "q-lora-rank": "model.q_lora_rank",
    "kv-lora-rank": "model.kv_lora_rank",
    "qk-head-dim": "model.qk_nope_head_dim",
    "qk-pos-emb-head-dim": "model.qk_rope_head_dim",
    "v-head-dim": "model.v_head_dim",
    "seq-length": "train.seq",
    "micro-batch-size": "train.micro_batch",
    "global-batch-size": "train.global_batch",
    "tensor-model-parallel-size": "parallel.tp",
    "pipeline-model-parallel-size": "parallel.pp",
    "context-parallel-size": "parallel.cp",
    "expert-model-parallel-size": "parallel.ep",
    "num-virtual-stages-per-pipeline-rank": "parallel.vpp",
    "zero-stage": "parallel.zero",
    "world-size": "cluster.gpus",
}
_FLAGS: Mapping[str, tuple[str, Any]] = {
    "swiglu": ("model.gated", True),
    "squared-relu": ("model.activation", "relu2"),
    "untie-embeddings-and-output-weights": ("model.tied", False),
    "disable-bias-linear": ("model.bias", False),
    "add-qkv-bias": ("model.qkv_bias", True),
    "qk-layernorm": ("model.qk_norm", True),
    "use-rotary-position-embeddings": ("model.positions", "rotary"),
    "no-position-embedding": ("model.positions", "none"),
    "bf16": ("train.precision", "bf16"),
    "fp16": ("train.precision", "fp16"),
    "recompute-activations": ("train.recompute", "selective"),
    "checkpoint-activations": ("train.recompute", "full"),
    "use-flash-attn": ("train.attention", "flash"),
    "enable-cuda-graph": ("train.cuda_graphs", True),
    "external-cuda-graph": ("train.cuda_graphs", True),
    "sequence-parallel": ("parallel.sequence_parallel", True),
    "use-distributed-optimizer": ("parallel.zero", 1),
    "tp-comm-overlap": ("parallel.tp_overlap", True),
    "overlap-grad-reduce": ("parallel.dp_overlap", True),
    "deepspeed": ("train.framework", "megatron-deepspeed"),
}
_WORDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "normalization": ("model.norm", {"RMSNorm": "rms", "LayerNorm": "layer"}),
    "position-embedding-type": (
        "model.positions",
        {"rope": "rotary", "yarn": "rotary", "learned_absolute": "learned", "alibi": "alibi", "none": "none"},
    ),
    "recompute-granularity": ("train.recompute", {"full": "full", "selective": "selective"}),
    "fp8-format": ("train.precision", {"e4m3": "fp8", "hybrid": "fp8"}),
    "fp4-format": ("train.precision", {"e2m1": "nvfp4"}),
    "optimizer": ("train.optimizer", {"adam": "adamw", "sgd": "sgd"}),  # Megatron's Adam decouples weight decay
    "attention-backend": ("train.attention", {"flash": "flash", "fused": "flash", "unfused": "unfused", "auto": ""}),
    "cuda-graph-impl": ("train.cuda_graphs", {"local": True, "transformer_engine": True, "none": False}),
}
_FSDP = ("use-torch-fsdp2", "use-custom-fsdp", "use-megatron-fsdp")
_READ_BELOW = (
    *("vocab-size", "make-vocab-size-divisible-by", "tokenizer-type", "group-query-attention"),
    *("multi-latent-attention", "moe-shared-expert-intermediate-size", "moe-layer-freq", "nnodes", "fp8-recipe"),
    *("num-layers-per-virtual-pipeline-stage", "overlap-param-gather", "data-parallel-sharding-strategy"),
    *("attention-dropout", "hidden-dropout", "transformer-impl"),
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
)
# Neither time nor memory of a step depends on these.
_OF_NO_CONCERN = re.compile(
    r"(?:no-)?(?:lr|min-lr|weight-decay|adam-|sgd-|clip-grad|init-method|log|no-log|save|load|ckpt|dist-ckpt|use-dist-ckpt|"
    r"async-save|eval|data-path|data-cache|data-impl|dataloader|split|train-data|valid-data|test-data|mock-data|"
    r"tokenizer|vocab-file|vocab-extra|merge-file|tensorboard|wandb|timing|distributed|exit|train-iters|train-samples|"
    r"seed|num-workers|rdzv|master|node-rank|use-mcore-models|initial-loss|loss-scale|hysteresis|rotary-|norm-epsilon|"
    r"max-position|manual-gc|attention-softmax-in-fp32|apply-layernorm-1p|"
    r"moe-aux-loss|moe-z-loss|moe-router-load|moe-router-score|moe-router-dtype|moe-router-bias|"
    r"recompute-method|finetune|profile|use-pytorch-profiler|rerun-mode|override-opt|decoupled|start-weight|"
    r"end-weight|reset-|eod-|create-attention|override|dataset|one-logger|check-for-nan|use-checkpoint|"
    r"cross-entropy|calculate-per-token|empty-unused|fp8-amax|fp8-margin|fp8-interval|fp8-param|fp8-wgrad|tiktoken|"
    r"mmap-|no-mmap|moe-grouped-gemm|moe-token-dispatcher|moe-permute|moe-router-|moe-input-jitter|mscale|beta-|"
    r"micro-batches-per|iteration$|iterations-to|consumed|skip-|no-load|no-save|strict|auto-|adlr|exp-avg|main-|"
    r"params-dtype|data-parallel-size$|data-parallel-random|rank$|local-rank|world|encoder-num-layers|encoder-seq|"
    r"decoder-seq|decoder-num|transformer-pipeline|virtual-pipeline-model|yaml-cfg|variable-seq|use-cpu-init|"
    r"perform-init|lazy-mpu|async-tensor|inference|onnx|bert|biencoder|retriever|vision|dino|img-|ict-|indexer|"
    r"patch-dim|num-channels|num-classes|mask-|classes-|iter-per|head-lr|titles|sample-rate|short-seq|swin-|retro|"
    r"query-in-block|evidence|embedding-path|block-data|output-bert|hybrid-|mamba|heterogeneous|spec$|is-hybrid|"
    r"barrier|bias-|masked-softmax|gradient-accumulation-fusion|apply-|openai-gelu|squared|layernorm|"
    r"accumulate-allreduce|fp16-lm|fp32-residual|min-loss|nccl|num-dataset|num-distributed-optimizer|non-persistent|"
    r"enable-one|enable-ft|error-injection|straggler|disable-straggler|log-|use-ring|use-one-sent|use-tokenizer|"
    r"prompt|test-mode|use-persistent|object-storage|rope-|use-rope|ckpt-|delay-|align-|hook|end-of|replication|"
    r"lion|muon-|ema|memory-|logging|record-|inprocess|results|deterministic|sft|freeze|trust-remote)"
)
_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_LEADING_DENSE = re.compile(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*\d{1,4}\)?")


def read_megatron(script: Script) -> Reading:
    """The run that Megatron's arguments describe."""
    options = script.options
    found = Findings()
    found.values |= _megatron_defaults()
    _put_plain_values(found, options)
    for rule in (_precision, _mlp, _attention, _experts, _vocabulary, _stages, _sharding, _not_modelled):
        rule(found.values, options, found.notes)
    put_machines(found, script)
    found.notes += script.notes
    twice = [name for name in script.repeated if name in _NUMBERS or name in _WORDS]
    if twice:
        found.notes.append(f"given several times, of which the last counts: {listed(f'--{name}' for name in twice)}")
    return found.reading(f"--{name}" for name in options if not _is_known(name))


def script_sections(text: str, where: str) -> Reading:
    """The same of a script or a line of options. It is read as text and never run."""
    return read_megatron(read_shell(text, where))


def _is_known(name: str) -> bool:
    tables = (_NUMBERS, _FLAGS, _WORDS, _FSDP, _READ_BELOW)
    return any(name in table for table in tables) or bool(_OF_NO_CONCERN.match(name) or LAUNCHER.match(name))


def _megatron_defaults() -> dict[str, Any]:
    """Where Megatron's own default differs from what Lumos would assume."""
    return {
        "model.gated": False,
        "model.tied": True,
        "model.bias": True,
        "model.norm": "layer",
        "model.positions": "learned",
        "train.precision": "fp32",
        "train.framework": "megatron",
        "parallel.dp_overlap": False,
        "parallel.tp_overlap": False,
    }


def _put_plain_values(found: Findings, options: Options) -> None:
    """What one option says alone."""
    for name, words in options.items():
        if name in _FLAGS:
            place, value = _FLAGS[name]
            found.values[place] = value
        elif name in _NUMBERS:
            found.values[_NUMBERS[name]] = _number(words)
        elif name in _WORDS and words:
            place, meanings = _WORDS[name]
            if words[0] in meanings:
                found.values[place] = meanings[words[0]]
            else:
                found.notes.append(f"--{name} {shown(words[0])} is not understood: use {one_of(list(meanings))}")


def _number(words: list[str]) -> int | str:
    """A whole number, or the word itself for the checks to refuse: a variable, say, that the file does not assign."""
    word = words[0] if words else ""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 12 else word


def _precision(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    """Beside --bf16, which is then the precision of what is not a matrix product."""
    if "fp4-format" in options:
        values["train.precision"] = "nvfp4"
    elif "fp8-format" in options:
        values["train.precision"] = "mxfp8" if options.get("fp8-recipe") == ["mxfp8"] else "fp8"


def _mlp(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    hidden = as_count(values.get("model.hidden"))
    if "model.ffn" not in values and hidden:
        values["model.ffn"] = int(4 * hidden * 2 / 3 / 64) * 64 if values["model.gated"] else 4 * hidden


def _attention(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    if values["model.positions"] == "none" and (options.get("position-embedding-type") or [""])[0] in ("rope", "yarn"):
        values["model.positions"] = "rotary"  # --no-position-embedding is about learned ones
    if "group-query-attention" in options:
        values.setdefault("model.kv_heads", 1)
    elif "model.kv_heads" in values:
        notes.append("--num-query-groups without --group-query-attention: taken as meant, though Megatron ignores it")
    usual = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    if "multi-latent-attention" not in options:
        for key in usual:
            values.pop(f"model.{key}", None)  # a dump of arguments has them always
        return
    for key, size in usual.items():
        values.setdefault(f"model.{key}", size)
    values.pop("model.head_dim", None)  # --kv-channels says nothing about latent attention


def _experts(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    if not as_count(values.get("model.experts")):
        for key in ("experts", "top_k", "expert_ffn"):
            values.pop(f"model.{key}", None)
        return
    values.setdefault("model.top_k", 2)
    width = as_count(values.get("model.expert_ffn")) or as_count(values.get("model.ffn"))
    shared = as_count(_number(options.get("moe-shared-expert-intermediate-size", [])))
    if shared and width:
        values["model.shared_experts"] = max(round(shared / width), 1)
    pattern = "".join(options.get("moe-layer-freq", ["1"])).replace(" ", "")
    leading = _LEADING_DENSE.fullmatch(pattern)
    if leading:
        values["model.dense_layers"] = int(leading[1])
    elif pattern != "1":
        notes.append(f"--moe-layer-freq {shown(pattern)} is not modelled: every layer is taken to have experts")


def _vocabulary(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    """Megatron pads the vocabulary so that every tensor-parallel rank has as much of it."""
    tokenizer = (options.get("tokenizer-type") or [""])[0]
    stated: int | str = _TOKENIZERS.get(tokenizer, 0)
    if options.get("vocab-size"):
        stated = _number(options["vocab-size"])
    if "model.vocab" in values or not stated:
        return
    values["model.vocab"] = stated
    multiple = as_count(_number(options.get("make-vocab-size-divisible-by", ["128"])))
    multiple *= as_count(values.get("parallel.tp", 1))
    if isinstance(stated, int) and multiple and stated % multiple:
        values["model.vocab"] = padded = -(-stated // multiple) * multiple
        notes.append(f"vocabulary of {stated} padded to {padded}, a multiple of {multiple}, as Megatron does")


def _stages(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    per_chunk = as_count(_number(options.get("num-layers-per-virtual-pipeline-stage", [])))
    layers, pp = as_count(values.get("model.layers")), as_count(values.get("parallel.pp", 1))
    if per_chunk and layers and pp:
        values["parallel.vpp"] = max(layers // (pp * per_chunk), 1)
    first, last = (
        as_count(_number(options.get(f"decoder-{end}-pipeline-num-layers", []))) for end in ("first", "last")
    )
    if (first or last) and layers and pp > 1:
        _put_uneven(values, first, last, layers, pp, notes)


def _put_uneven(values: dict[str, Any], first: int, last: int, layers: int, pp: int, notes: list[str]) -> None:
    """The first and the last stage have so many layers, and the others share the rest evenly."""
    between = pp - bool(first) - bool(last)
    rest = layers - first - last
    if as_count(values.get("parallel.vpp")) > 1 or between < 1 or rest < between or rest % between:
        notes.append("uneven stages are not modelled together with virtual ones: stages are taken as even as it goes")
        return
    values["parallel.stage_layers"] = [first] * bool(first) + [rest // between] * between + [last] * bool(last)


def _sharding(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    if any(name in options for name in _FSDP):
        values["parallel.zero"] = 3
    strategy = (options.get("data-parallel-sharding-strategy") or [""])[0]
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if strategy in stages:
        values["parallel.zero"] = stages[strategy]
    if values.get("parallel.zero") == 3:
        values["parallel.dp_overlap"] = True  # sharded weights are fetched ahead


def _not_modelled(values: dict[str, Any], options: Options, notes: list[str]) -> None:
    """What costs time and is left out of the answer."""
    usual = {
        "attention-dropout": ("0", "0.0"),
        "hidden-dropout": ("0", "0.0"),
        "transformer-impl": ("transformer_engine",),
    }
    for name, free in usual.items():
        stated = (options.get(name) or [free[0]])[0]
        if stated not in free:
            notes.append(f"--{name} {shown(stated)} is not modelled: {free[0]} is taken")
