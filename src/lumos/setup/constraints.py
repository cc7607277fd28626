"""Rules: what the values of a setup must be to each other. One function a rule: a sentence, or "" where it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lumos.setup.frameworks import framework_names
from lumos.setup.gpus import find_gpu, gpu_names
from lumos.setup.messages import did_you_mean, divisors_of, one_of, shown
from lumos.setup.setup import Setup

_MOST_GPUS = 1 << 20
_LARGEST_BATCH = 1 << 24
_ONE_CHUNK_A_STAGE = ("gpipe", "1f1b", "zero-bubble")


@dataclass(frozen=True)
class Rule:
    """A check and the keys it is about: where one of those is wrong already, it says nothing."""

    keys: frozenset[str]
    mistake: Callable[[Setup], str]


def mistakes_in(setup: Setup, beside: Iterable[str] = ()) -> list[str]:
    """Every rule that the setup breaks, in a sentence each; rules about the keys in `beside` are left out."""
    wrong = frozenset(beside)
    found = (rule.mistake(setup) for rule in RULES if wrong.isdisjoint(rule.keys))
    return [sentence for sentence in found if sentence]


def warnings_in(setup: Setup) -> list[str]:
    """What is allowed but probably not meant."""
    return [sentence for sentence in (doubt(setup) for doubt in _DOUBTS) if sentence]


def _about(*keys: str) -> Callable[[Callable[[Setup], str]], Rule]:
    return lambda mistake: Rule(frozenset(keys), mistake)


def _undivided(part: str, size: int, whole: str, total: int) -> str:
    return "" if total % size == 0 else f"{part} = {size} does not divide {whole} = {total}: use {divisors_of(total)}"


# The model


@_about("model.heads", "model.hidden", "model.head_dim")
def _heads_divide_hidden(setup: Setup) -> str:
    model = setup.model
    if model.latent or model.hidden % model.heads == 0 or model.head_dim != model.hidden // model.heads:
        return ""
    fitting = _undivided("model.heads", model.heads, "model.hidden", model.hidden)
    return f"{fitting}; or set model.head_dim"


@_about("model.heads", "model.kv_heads")
def _kv_heads_divide_heads(setup: Setup) -> str:
    model = setup.model
    return "" if model.latent else _undivided("model.kv_heads", model.kv_heads, "model.heads", model.heads)


@_about(
    "model.kv_lora_rank", "model.q_lora_rank", "model.qk_nope_head_dim", "model.qk_rope_head_dim", "model.v_head_dim"
)
def _latent_attention_is_whole(setup: Setup) -> str:
    model = setup.model
    if not model.latent:
        ranks = {"q_lora_rank": model.q_lora_rank, "v_head_dim": model.v_head_dim}
        stated = next((key for key, size in ranks.items() if size), "")
        return f"model.{stated} = {ranks[stated]} needs model.kv_lora_rank: set it, or leave it out" if stated else ""
    sizes = {"qk_nope_head_dim + model.qk_rope_head_dim": model.head_dim, "v_head_dim": model.v_head_dim}
    missing = next((key for key, size in sizes.items() if not size), "")
    return f"model.kv_lora_rank = {model.kv_lora_rank} needs model.{missing} of more than 0" if missing else ""


@_about("model.ffn", "model.expert_ffn", "model.experts", "model.dense_layers", "model.layers")
def _every_mlp_has_a_width(setup: Setup) -> str:
    model = setup.model
    if model.moe_layers < model.layers and not model.ffn:
        return "model.ffn is missing: set it in [model] or with --set model.ffn=VALUE"
    if model.moe_layers and not model.expert_ffn:
        return f"model.expert_ffn is missing, and model.experts = {model.experts}: set it in [model]"
    return ""


@_about("model.experts", "model.top_k", "model.shared_experts")
def _experts_are_chosen(setup: Setup) -> str:
    model = setup.model
    if model.experts and not 1 <= model.top_k <= model.experts:
        return f"model.top_k = {model.top_k} of model.experts = {model.experts}: use 1 to {model.experts}"
    if not model.experts and (model.top_k or model.shared_experts):
        key, size = ("top_k", model.top_k) if model.top_k else ("shared_experts", model.shared_experts)
        return f"model.{key} = {size} needs experts: set model.experts, or leave it out"
    return ""


@_about("model.layers", "model.dense_layers")
def _dense_layers_are_layers(setup: Setup) -> str:
    model = setup.model
    if model.dense_layers <= model.layers:
        return ""
    return f"model.dense_layers = {model.dense_layers} is more than model.layers = {model.layers}: use at most that"


# The batch


@_about("train.micro_batch", "train.microbatches", "train.global_batch", "parallel.dp")
def _batches_agree(setup: Setup) -> str:
    train, dp = setup.train, setup.parallel.dp
    batch, per_round = train.global_batch, train.micro_batch * dp
    if batch == per_round * train.microbatches:
        return ""
    stated = f"train.global_batch = {batch}"
    product = f"train.micro_batch = {train.micro_batch} times parallel.dp = {dp}"
    if batch % per_round:
        below = batch - batch % per_round
        choice = one_of([size for size in (below, below + per_round) if size])
        return f"{stated} is not a multiple of {product}: use {choice}"
    right = per_round * train.microbatches
    return (
        f"{stated} is not {product} times train.microbatches = {train.microbatches}, which is {right}: "
        "leave one of global_batch and microbatches out"
    )


@_about("train.seq", "parallel.cp")
def _sequence_is_cut_by_cp(setup: Setup) -> str:
    seq, cp = setup.train.seq, setup.parallel.cp
    if cp == 1 or seq % (2 * cp) == 0:
        return ""
    nearest = max(round(seq / (2 * cp)), 1) * 2 * cp
    return (
        f"train.seq = {seq} is not a multiple of 2 * parallel.cp = {2 * cp}, which balances causal attention: "
        f"use train.seq = {nearest}, or another cp"
    )


@_about("train.seq", "parallel.cp", "parallel.tp", "parallel.sequence_parallel")
def _sequence_is_cut_by_tp(setup: Setup) -> str:
    seq, parallel = setup.train.seq // setup.parallel.cp, setup.parallel
    if not parallel.sequence_parallel or seq % parallel.tp == 0:
        return ""
    return (
        f"parallel.tp = {parallel.tp} does not divide train.seq / parallel.cp = {seq}, as sequence_parallel needs it: "
        f"use {divisors_of(seq)}"
    )


# How the model is divided


@_about("parallel.tp", "model.heads")
def _tp_divides_heads(setup: Setup) -> str:
    return _undivided("parallel.tp", setup.parallel.tp, "model.heads", setup.model.heads)


@_about("parallel.tp", "model.kv_heads", "model.heads")
def _tp_and_kv_heads_fit(setup: Setup) -> str:
    tp, kv_heads, heads = setup.parallel.tp, setup.model.kv_heads, setup.model.heads
    if setup.model.latent or heads % tp or kv_heads % tp == 0 or tp % kv_heads == 0:
        return ""
    fitting = [n for n in range(1, min(heads, 256) + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    return (
        f"parallel.tp = {tp} neither divides model.kv_heads = {kv_heads} nor is a multiple of it: use {one_of(fitting)}"
    )


@_about(
    *("parallel.tp", "parallel.ep", "model.layers", "model.dense_layers"),
    *("model.ffn", "model.expert_ffn", "model.experts"),
)
def _tp_divides_ffn(setup: Setup) -> str:
    model, tp = setup.model, setup.parallel.tp
    if model.moe_layers < model.layers and model.ffn % tp:
        return _undivided("parallel.tp", tp, "model.ffn", model.ffn)
    if model.moe_layers and setup.parallel.ep == 1 and model.expert_ffn % tp:  # with ep, experts need not be cut
        return _undivided("parallel.tp", tp, "model.expert_ffn", model.expert_ffn)
    return ""


@_about("parallel.pp", "parallel.vpp", "model.layers")
def _stages_have_layers(setup: Setup) -> str:
    parallel, layers = setup.parallel, setup.model.layers
    if parallel.pp * parallel.vpp <= layers:
        return ""
    if parallel.pp > layers:
        return f"parallel.pp = {parallel.pp} is more than model.layers = {layers}: use at most {layers}"
    return (
        f"parallel.pp = {parallel.pp} times parallel.vpp = {parallel.vpp} is more than model.layers = {layers}: "
        f"use vpp of at most {layers // parallel.pp}"
    )


@_about("parallel.stage_layers", "parallel.pp", "parallel.vpp", "model.layers")
def _stage_layers_add_up(setup: Setup) -> str:
    parallel, stages = setup.parallel, setup.parallel.stage_layers
    if not stages:
        return ""
    if len(stages) not in (parallel.pp, parallel.pp * parallel.vpp):
        wanted = one_of(sorted({parallel.pp, parallel.pp * parallel.vpp}))
        return f"parallel.stage_layers has {len(stages)} entries: give {wanted}, one for every stage"
    if sum(stages) != setup.model.layers:
        return (
            f"parallel.stage_layers adds up to {sum(stages)}, but model.layers = {setup.model.layers}: "
            f"{'add' if sum(stages) < setup.model.layers else 'take away'} {abs(sum(stages) - setup.model.layers)}"
        )
    return ""


@_about("parallel.vpp", "parallel.pp")
def _virtual_stages_need_stages(setup: Setup) -> str:
    parallel = setup.parallel
    if parallel.vpp == 1 or parallel.pp > 1:
        return ""
    return f"parallel.vpp = {parallel.vpp} needs parallel.pp of more than 1: set pp, or leave vpp out"


@_about("parallel.vpp", "parallel.schedule")
def _schedule_suits_vpp(setup: Setup) -> str:
    schedule, vpp = setup.parallel.schedule, setup.parallel.vpp
    if vpp > 1 and schedule in _ONE_CHUNK_A_STAGE:
        return f'parallel.schedule = "{schedule}" has no virtual stages, but parallel.vpp = {vpp}: use "interleaved"'
    if vpp == 1 and schedule == "interleaved":
        return 'parallel.schedule = "interleaved" needs parallel.vpp of more than 1: set vpp, or use "1f1b"'
    return ""


@_about("parallel.schedule", "parallel.pp", "parallel.vpp", "train.microbatches")
def _interleaved_rounds_are_whole(setup: Setup) -> str:
    pp, microbatches = setup.parallel.pp, setup.train.microbatches
    if setup.parallel.schedule != "interleaved" or microbatches % pp == 0:
        return ""
    below = microbatches - microbatches % pp
    choice = one_of([count for count in (below, below + pp) if count])
    return (
        f"train.microbatches = {microbatches} is not a multiple of parallel.pp = {pp}, as interleaved needs it: "
        f"use {choice}"
    )


@_about("parallel.ep", "model.experts")
def _ep_divides_experts(setup: Setup) -> str:
    ep, experts = setup.parallel.ep, setup.model.experts
    if ep > 1 and not experts:
        return f"parallel.ep = {ep} needs experts, and model.experts = 0: use 1"
    return _undivided("parallel.ep", ep, "model.experts", experts) if experts else ""


@_about("parallel.ep", "parallel.dp", "parallel.cp", "parallel.tp", "cluster.gpus")
def _ep_fits_into_replicas(setup: Setup) -> str:
    parallel = setup.parallel
    ranks = parallel.dp * parallel.cp * parallel.tp
    return _undivided("parallel.ep", parallel.ep, "parallel.dp * cp * tp", ranks)


@_about("parallel.shard", "parallel.dp")
def _shard_divides_dp(setup: Setup) -> str:
    parallel = setup.parallel
    return _undivided("parallel.shard", parallel.shard, "parallel.dp", parallel.dp) if parallel.shard else ""


# The machines


@_about("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "cluster.gpus")
def _all_gpus_are_used(setup: Setup) -> str:
    parallel, gpus = setup.parallel, setup.cluster.gpus
    used = parallel.replica_gpus * parallel.dp
    if used == gpus:
        return ""
    sizes = f"tp {parallel.tp} * pp {parallel.pp} * cp {parallel.cp} * dp {parallel.dp}"
    way_out = f"set cluster.gpus = {used}"
    if gpus % parallel.replica_gpus == 0:
        way_out += f" or parallel.dp = {gpus // parallel.replica_gpus}"
    return f"cluster.gpus = {gpus}, but parallel uses {sizes} = {used}: {way_out}"


@_about("cluster.gpus", "train.global_batch", "parallel.dp")
def _sizes_are_in_reach(setup: Setup) -> str:
    if setup.cluster.gpus > _MOST_GPUS:
        return f"cluster.gpus = {setup.cluster.gpus} is out of range: it must be at most {_MOST_GPUS}"
    if setup.train.global_batch > _LARGEST_BATCH:
        return f"train.global_batch = {setup.train.global_batch} is out of range: it must be at most {_LARGEST_BATCH}"
    return ""


@_about("cluster.gpu")
def _gpu_is_known(setup: Setup) -> str:
    name = setup.cluster.gpu
    return "" if find_gpu(name) else f"cluster.gpu = {shown(name)} is not known: {did_you_mean(name, gpu_names())}"


@_about("train.framework")
def _framework_is_known(setup: Setup) -> str:
    name, known = setup.train.framework, framework_names()
    return "" if name in known else f"train.framework = {shown(name)} is not known: {did_you_mean(name, known)}"


@_about("train.precision", "cluster.gpu")
def _gpu_has_precision(setup: Setup) -> str:
    gpu, precision = find_gpu(setup.cluster.gpu), setup.train.precision
    if gpu is None or gpu.supports(precision):
        return ""
    return f'train.precision = "{precision}" does not exist on cluster.gpu = "{gpu.name}": use {one_of(gpu.precisions)}'


RULES: tuple[Rule, ...] = (
    _heads_divide_hidden,
    _kv_heads_divide_heads,
    _latent_attention_is_whole,
    _every_mlp_has_a_width,
    _experts_are_chosen,
    _dense_layers_are_layers,
    _batches_agree,
    _sequence_is_cut_by_cp,
    _sequence_is_cut_by_tp,
    _tp_divides_heads,
    _tp_and_kv_heads_fit,
    _tp_divides_ffn,
    _stages_have_layers,
    _stage_layers_add_up,
    _virtual_stages_need_stages,
    _schedule_suits_vpp,
    _interleaved_rounds_are_whole,
    _ep_divides_experts,
    _ep_fits_into_replicas,
    _shard_divides_dp,
    _all_gpus_are_used,
    _sizes_are_in_reach,
    _gpu_is_known,
    _framework_is_known,
    _gpu_has_precision,
)


def _sequence_parallel_alone(setup: Setup) -> str:
    pointless = setup.parallel.sequence_parallel and setup.parallel.tp == 1
    return "parallel.sequence_parallel has no effect with parallel.tp = 1" if pointless else ""


def _shard_of_nothing(setup: Setup) -> str:
    pointless = setup.parallel.shard and not setup.parallel.zero
    return f"parallel.shard = {setup.parallel.shard} has no effect with parallel.zero = 0" if pointless else ""


def _part_of_a_node(setup: Setup) -> str:
    gpus, node = setup.cluster.gpus, setup.cluster.gpus_per_node
    if gpus <= node or gpus % node == 0:
        return ""
    return f"cluster.gpus = {gpus} is not a whole number of nodes of {node}"


def _tp_beyond_nvlink(setup: Setup) -> str:
    tp, gpu = setup.parallel.tp, setup.cluster.accelerator
    reach = max(gpu.nvlink_domain, gpu.gpus_per_node)
    return f"parallel.tp = {tp} reaches beyond the {reach} GPUs of a node" if tp > reach else ""


_DOUBTS = (_sequence_parallel_alone, _shard_of_nothing, _part_of_a_node, _tp_beyond_nvlink)
