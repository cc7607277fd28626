"""Constraints between the values of a setup, and the check that lists every mistake in one error.

`rules` yields every constraint with the keys it is about; one about a key that is already known to be wrong is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import gcd, inf
from typing import Any

from pydantic import ValidationError

from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.model_file import ADVICE as MODEL_ADVICE
from lumos.schedules import names, schedule_named
from lumos.setup.frameworks import framework_named, framework_names
from lumos.setup.gpus import LEAST_POWER, Gpu, find_gpu, gpu_names, too_little_power
from lumos.setup.messages import did_you_mean, divisors_of, mistakes_of, named, one_of, shown
from lumos.setup.reliability import Reliability
from lumos.setup.sections import Cluster, Model, Parallel, Section, Train
from lumos.setup.setup import KEYS, SECTIONS, Setup
from lumos.setup.slow import read_slow

_MOST_GPUS = 1 << 20
_LARGEST_BATCH = 1 << 24
_BATCH = ("parallel.dp", "cluster.gpus", "train.microbatches", "train.global_batch")  # they follow from each other
# If one of the first is wrong, so may be what was derived from it: rules about those would mislead.
_DERIVED_FROM = (
    (("model.heads", "model.hidden"), ("model.heads", "model.hidden", "model.kv_heads", "model.head_dim")),
    (("parallel.tp", "parallel.pp", "parallel.cp", "train.micro_batch", *_BATCH), _BATCH),
    (("parallel.vpp",), ("parallel.schedule",)),
    (("model.experts", "model.ffn", "model.expert_ffn"), ("model.ffn", "model.expert_ffn")),
)


Rule = tuple[str, str]
"""The keys that a constraint is about, and the sentence that says how it is broken; "" where it holds."""


def check(setup: Setup, where: str = "") -> None:
    """Raise OptionError with every mistake in a setup whose values have the right types."""
    _refuse(mistakes_in(setup), where)


def checked_setup(
    sections: Mapping[str, Any], where: str = "", known_mistakes: Sequence[str] = (), searched: Collection[str] = ()
) -> Setup:
    """The setup of these sections, or OptionError with every mistake, including those known before.

    A section that is None could not be read, which a known mistake says; the others are checked without it. Rules about
    keys in `searched`, for which other values will be tried, are left to whoever tries them.

    >>> checked_setup({"model": {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 99}, "train": {"seq": 8}})
    """
    mistakes = [*known_mistakes, *(_stray(name) for name in sections if name not in SECTIONS)]
    built: dict[str, Section] = {}
    wrong: set[str] = set(searched)
    for name in SECTIONS:
        built[name], found = _section(name, sections.get(name, {}))
        mistakes += [sentence for sentence in found.values() if sentence]
        wrong |= {f"{name}.{key}" for key in found}
    for causes, effects in _DERIVED_FROM:
        if not wrong.isdisjoint(causes):
            wrong.update(effects)
    setup = Setup(**built)  # type: ignore[arg-type]
    _refuse([*mistakes, *mistakes_in(setup, wrong)], where)
    return setup


def mistakes_in(setup: Setup, wrong: Collection[str] = frozenset()) -> list[str]:
    """One sentence for every rule that the setup breaks; rules about the keys in `wrong` are skipped."""
    return [text for keys, text in rules(setup) if text and not (wrong and any(key in wrong for key in keys.split()))]


def rules(setup: Setup) -> Iterator[Rule]:
    """All constraints, broken or not, in a fixed order."""
    yield from _model(setup.model)
    yield from _batch(setup.train, setup.parallel)
    yield from _recomputation(setup.train)
    yield from _offloading(setup.model, setup.train, setup.parallel)
    yield from _tensor(setup.model, setup.parallel)
    yield from _experts(setup.model, setup.parallel)
    yield from _routing(setup.model, setup.train, setup.parallel)
    yield from _context(setup.model, setup.parallel)
    yield from _pipeline(setup.model, setup.train, setup.parallel)
    yield from _machines(setup)
    yield from _networks(setup)
    yield from _failures(setup.reliability)
    yield from _slow_parts(setup)


def warnings_in(setup: Setup) -> list[str]:
    """One sentence for everything that is allowed but probably not intended."""
    parallel, gpus, gpu = setup.parallel, setup.cluster.gpus, setup.cluster.accelerator
    tp, shard, node, reach = parallel.tp, parallel.shard, gpu.gpus_per_node, max(gpu.nvlink_domain, gpu.gpus_per_node)
    alone = parallel.ep_overlap and setup.train.microbatches == 1
    doubts = (
        (parallel.sequence_parallel and tp == 1, "parallel.sequence_parallel has no effect with parallel.tp = 1"),
        (shard and not parallel.zero, f"parallel.shard = {shard} has no effect with parallel.zero = 0"),
        (gpus > node and gpus % node, f"cluster.gpus = {gpus} is not a whole number of nodes of {node}"),
        (parallel.cp_type and parallel.cp == 1, "parallel.cp_type has no effect with parallel.cp = 1"),
        (alone, "parallel.ep_overlap has no effect with train.microbatches = 1: no other micro-batch has work to do"),
        (tp > reach, f"parallel.tp = {tp} reaches beyond a node of {reach} GPU{'s' * (reach > 1)}"),
    )
    certain = [sentence for applies, sentence in doubts if applies] + _unused_by_failures(setup.reliability)
    if gpu.assumed:
        certain.append(f"{gpu.shown} does not give all of its machine: assuming {', '.join(gpu.assumed)}")
    certain += _unused_by_experts(setup.model, setup.train)
    certain += _unusual_networks(setup.cluster)
    certain += _unused_by_sharding(setup)
    return [*certain, *_without_effect(setup.model, setup.train), *_assumed(setup)]


def _unused_by_sharding(setup: Setup) -> Iterator[str]:
    """Keys about ZeRO and factors of 8-bit values that change nothing, and stages of ZeRO that the framework lacks."""
    parallel, train, framework = setup.parallel, setup.train, framework_named(setup.train.framework)
    zero = f"parallel.zero = {parallel.zero}"
    if parallel.no_sync and parallel.zero != 3:
        yield f"parallel.no_sync has no effect with {zero}: it is about gradients that ZeRO 3 divides"
    if parallel.gather_overlap is not None and parallel.zero not in (1, 2):
        yield f"parallel.gather_overlap has no effect with {zero}: it is about weights that ZeRO 1 and 2 update"
    if parallel.zero and parallel.zero not in framework.zeros and parallel.dp * parallel.cp > 1:
        usual = one_of([str(stage) for stage in framework.zeros])
        yield f'{zero} is unusual with train.framework = "{framework.name}": usual is {usual}'
    if train.fp8_scaling != "tensor" and train.precision != "fp8":
        yield f'train.fp8_scaling has no effect with train.precision = "{train.precision}": it needs "fp8"'
    elif train.fp8_scaling == "row" and framework.fused:
        yield f'train.fp8_scaling has no effect with train.framework = "{framework.name}": it scales whole tensors'


def _unused_by_experts(model: Model, train: Train) -> Iterator[str]:
    """Keys about the load of experts that change nothing."""
    if not model.experts:
        given = {"imbalance": train.imbalance > 1, "capacity": train.capacity > 0}
        yield from (f"train.{key} has no effect with model.experts = 0" for key in given if given[key])
    elif train.capacity and train.imbalance > 1:
        yield "train.imbalance has no effect with train.capacity: every expert is filled up to it"


def _unusual_networks(cluster: Cluster) -> Iterator[str]:
    """Bandwidths that are not the GPU's usual ones or change nothing, and units that do not divide each other."""
    gpu, usual, table = cluster.accelerator, find_gpu(cluster.gpu), read_table("fabrics.toml")[cluster.fabric]
    domain, node, leaf, stated = gpu.nvlink_domain, gpu.gpus_per_node, cluster.leaf_gpus, cluster.inter_gb_s
    fabric, most = f'cluster.fabric = "{cluster.fabric}"', table.get("most_send_gb_s", inf)
    leaves = cluster.gpus > max(domain, node)
    if leaves and usual and not stated and gpu.inter_gb_s != usual.inter_gb_s:
        rates = f"{gpu.inter_gb_s:g} GB/s a GPU, not the {usual.inter_gb_s:g} of {usual.shown}"
        yield f"{fabric} is assumed to have {rates}: set cluster.inter_gb_s if yours differs"
    if leaves and stated and stated > most:
        yield f"cluster.inter_gb_s = {stated:g} has no effect above {most:g}: with {fabric} the host moves no more"
    if leaf % node and not cluster.rail_aligned:
        unlike = f"cluster.leaf_gpus = {leaf} is not a whole number of nodes of {node}"
        yield f"{unlike}: assuming a leaf for every {leaf} ranks"
    if max(domain, node) % min(domain, node):
        unlike = f"cluster.nvlink_domain = {domain} and nodes of {node} do not divide each other"
        yield f"{unlike}: assuming a domain for every {domain} ranks"


def _assumed(setup: Setup) -> list[str]:
    """What is understood in memory, but whose time was not measured."""
    train, found = setup.train, []
    if train.offload_optimizer or train.offload_weights:
        found.append(
            "the optimizer's step on the host is assumed to run at the rate of a typical host (data/step.json): "
            "its time may be off by a factor of two"
        )
    if train.optimizer == "muon":
        found.append(
            "Muon: five Newton-Schulz iterations for every matrix, shared out among the ranks that divide the state, "
            "are assumed; no step with Muon was measured"
        )
        if setup.parallel.dp > 1 and not setup.parallel.zero:
            found.append(
                "Muon: with parallel.zero = 0 every rank iterates for all matrices; set 1 or 2 if ranks share them"
            )
    if train.offload_layers:
        found.append("activations are assumed to move to the host and back beside compute, at the link's full rate")
    return found


def _without_effect(model: Model, train: Train) -> list[str]:
    """Keys about recomputation that change nothing."""
    layers = ("recompute_layers", "recompute_every", "recompute_group")
    wanted = {"recompute_modules": "selective"} | dict.fromkeys(layers, "full")
    given = [key for key in wanted if getattr(train, key) != Train.model_fields[key].default]
    found = [
        f'train.{key} has no effect with train.recompute = "{train.recompute}": it needs "{wanted[key]}"'
        for key in given
        if train.recompute != wanted[key]
    ]
    has = {
        "moe": model.moe_layers, "moe_act": model.moe_layers, "shared_experts": model.shared_experts,
        "mla_up_proj": model.latent, "mlp": model.moe_layers < model.layers,
    }  # fmt: skip
    if train.recompute == "full" and train.recompute_every > model.layers:
        found.append(
            f"train.recompute_every = {train.recompute_every} is more than model.layers = {model.layers}: "
            "no layer is recomputed"
        )
    absent = [name for name in train.recompute_modules if not has.get(name, True)]
    return [*found, *(f"train.recompute_modules: the model has no {name} to recompute" for name in absent)]


def _section(name: str, values: Any) -> tuple[Section, dict[str, str]]:
    """A section to continue with, and its mistakes: key to sentence, "" where another mistake says it already."""
    section = SECTIONS[name]
    required = {key: 1 for key, field in section.model_fields.items() if field.is_required()}
    if not isinstance(values, dict):
        found = dict.fromkeys(section.model_fields, "")
        if values is not None:
            found[""] = f"{name} = {shown(values)} is not a section: write [{name}] and its keys below"
        return section.model_validate(required), found
    try:
        return section.model_validate(values), {}
    except ValidationError as error:
        found = mistakes_of(error, name, list(section.model_fields))
    usable = {key: value for key, value in values.items() if key not in found}
    for key in found.keys() - values.keys() - required.keys():
        found[key] = ""  # derived from a value that is wrong
    return section.model_validate(required | usable), found


def _stray(name: str) -> str:
    """A name at the top level of a file that is not a section."""
    homes = [key.partition(".")[0] for key in KEYS if key.partition(".")[2] == name]
    if homes:
        return f"{name} is outside of any section: move it to [{homes[0]}]"
    return f"[{named(name)}] is not a section: {did_you_mean(name, list(SECTIONS))}"


def _refuse(mistakes: Sequence[str], where: str) -> None:
    if mistakes:
        raise OptionError("\n".join(f"{where}: {sentence}" if where else sentence for sentence in mistakes))


def _must_divide(part: str, size: int, whole: str, total: int) -> str:
    return "" if total % size == 0 else f"{part} = {size} does not divide {whole} = {total}: use {divisors_of(total)}"


def _must_be_multiple(part: str, size: int, of: str, factor: int) -> str:
    if size % factor == 0:
        return ""
    below = size - size % factor
    return f"{part} = {size} is not a multiple of {of}: use {one_of([n for n in (below, below + factor) if n])}"


def _model(model: Model) -> Iterator[Rule]:
    derived = not model.latent and model.head_dim == model.hidden // model.heads  # one that is given need not divide
    mistake = _must_divide("model.heads", model.heads, "model.hidden", model.hidden) if derived else ""
    yield "model.heads model.hidden model.head_dim", mistake and f"{mistake}; or set model.head_dim"

    mistake = "" if model.latent else _must_divide("model.kv_heads", model.kv_heads, "model.heads", model.heads)
    yield "model.heads model.kv_heads", mistake

    keys = "model.kv_lora_rank model.q_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim model.v_head_dim"
    if model.latent:
        heads = model.qk_nope_head_dim + model.qk_rope_head_dim
        sizes = {"qk_nope_head_dim + model.qk_rope_head_dim": heads, "v_head_dim": model.v_head_dim}
        missing = next((key for key, size in sizes.items() if not size), "")
        yield keys, missing and f"model.kv_lora_rank = {model.kv_lora_rank} needs model.{missing} of more than 0"
    else:
        yield keys, _needs(model, ("q_lora_rank", "v_head_dim"), "model.kv_lora_rank: set it,")

    mistake = ""
    if model.moe_layers < model.layers and not model.ffn:
        mistake = "model.ffn is missing: set it in [model] or with --set model.ffn=VALUE"
    elif model.moe_layers and not model.expert_ffn:
        mistake = f"model.expert_ffn is missing, and model.experts = {model.experts}: set it in [model]"
    yield "model.ffn model.expert_ffn model.experts model.dense_layers model.layers", mistake

    mistake = "" if model.experts else _needs(model, ("top_k", "shared_experts"), "experts: set model.experts,")
    if model.experts and not 1 <= model.top_k <= model.experts:
        mistake = f"model.top_k = {model.top_k} of model.experts = {model.experts}: use 1 to {model.experts}"
    yield "model.experts model.top_k model.shared_experts", mistake

    yield from _groups_of_experts(model)

    mistake = f"model.window_pattern = {model.window_pattern} needs model.window: set it, or model.window_pattern = 0"
    yield "model.window model.window_pattern", mistake if model.window_pattern and not model.window else ""

    dense, layers = model.dense_layers, model.layers
    mistake = "" if dense <= layers else f"model.dense_layers = {dense} is more than model.layers = {layers}: use fewer"
    yield "model.layers model.dense_layers", mistake


def _groups_of_experts(model: Model) -> Iterator[Rule]:
    """Groups that a token may ask experts of: equally large, and large enough together."""
    groups, taken, mistake = model.expert_groups, model.top_k_groups, ""
    if not model.experts:
        mistake = _needs(model, ("expert_groups", "top_k_groups"), "experts: set model.experts,")
    elif groups:
        mistake = _must_divide("model.expert_groups", groups, "model.experts", model.experts)
    yield "model.expert_groups model.experts", mistake

    mistake = ""
    if taken and not groups:
        mistake = f"model.top_k_groups = {taken} needs model.expert_groups: set it, or remove top_k_groups"
    elif taken > groups:
        mistake = f"model.top_k_groups = {taken} of model.expert_groups = {groups}: use 1 to {groups}"
    elif taken and model.experts % groups == 0 and taken * (model.experts // groups) < model.top_k:
        held = f"holds {taken * (model.experts // groups)} experts, and model.top_k = {model.top_k}"
        mistake = f"model.top_k_groups = {taken} of model.expert_groups = {groups} {held}: use more groups"
    yield "model.top_k_groups model.expert_groups model.experts model.top_k", mistake


def _batch(train: Train, parallel: Parallel) -> Iterator[Rule]:
    total, batch = train.micro_batch * parallel.dp * train.microbatches, train.global_batch
    mistake = ""
    if batch != total:
        product = f"train.micro_batch = {train.micro_batch} times parallel.dp = {parallel.dp}"
        mistake = _must_be_multiple("train.global_batch", batch, product, train.micro_batch * parallel.dp) or (
            f"train.global_batch = {batch} is not {product} times train.microbatches = {train.microbatches}, which is "
            f"{total}: remove one of global_batch and microbatches"
        )
    yield "train.micro_batch train.microbatches train.global_batch parallel.dp", mistake

    cp = parallel.cp
    halves = f"2 * parallel.cp = {2 * cp}"  # each rank has two chunks, which balances causal attention
    mistake = "" if cp == 1 else _must_be_multiple("train.seq", train.seq, halves, 2 * cp)
    yield "train.seq parallel.cp", mistake and f"{mistake}; or another cp"

    mistake = _must_divide("parallel.tp", parallel.tp, "train.seq / parallel.cp", train.seq // cp)
    mistake = mistake and f"{mistake}; or turn parallel.sequence_parallel off"
    keys = "train.seq parallel.cp parallel.tp parallel.sequence_parallel"
    yield keys, mistake if parallel.sequence_parallel else ""


def _recomputation(train: Train) -> Iterator[Rule]:
    mistake = ""
    if train.recompute_every > 1 and train.recompute_layers is not None:
        both = f"train.recompute_every = {train.recompute_every} and train.recompute_layers = {train.recompute_layers}"
        mistake = f"{both} choose layers in two ways: remove one"
    elif train.recompute_every > 1 and train.recompute_group > 1:
        both = f"train.recompute_every = {train.recompute_every} and train.recompute_group = {train.recompute_group}"
        mistake = f"{both}: layers that are not neighbours cannot be recomputed together: remove one"
    yield "train.recompute_every train.recompute_layers train.recompute_group", mistake

    alone = "operators" not in train.recompute_modules or len(set(train.recompute_modules)) == 1
    mistake = 'train.recompute_modules: "operators" covers the whole layer: remove it, or the others'
    yield "train.recompute_modules", "" if alone else mistake


def _offloading(model: Model, train: Train, parallel: Parallel) -> Iterator[Rule]:
    mistake = f"train.offload_weights needs parallel.zero = 3, and it is {parallel.zero}: set it"
    yield "train.offload_weights parallel.zero", mistake if train.offload_weights and parallel.zero < 3 else ""

    offloads = train.offload_weights or train.offload_optimizer
    mistake = 'train.optimizer = "muon" on the host is not modelled: use "adamw", or do not offload the optimizer'
    yield "train.optimizer train.offload_optimizer", mistake if offloads and train.optimizer == "muon" else ""

    most, mistake = -(-model.layers // parallel.pp), ""
    if train.offload_layers > most:
        mistake = f"train.offload_layers = {train.offload_layers} is more than a stage has: use at most {most}"
    yield "train.offload_layers model.layers parallel.pp", mistake


def _tensor(model: Model, parallel: Parallel) -> Iterator[Rule]:
    tp, ep, heads, kv_heads = parallel.tp, parallel.ep, model.heads, model.kv_heads
    yield "parallel.tp model.heads", _must_divide("parallel.tp", tp, "model.heads", heads)

    mistake = ""
    if not (model.latent or heads % tp or kv_heads % tp == 0 or tp % kv_heads == 0):
        fits = [n for n in range(1, min(heads, 256) + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        what = f"neither divides model.kv_heads = {kv_heads} nor is a multiple of it"
        mistake = f"parallel.tp = {tp} {what}: use {one_of(fits)}"
    yield "parallel.tp model.kv_heads model.heads", mistake

    mistake = _must_divide("parallel.tp", tp, "model.ffn", model.ffn) if model.moe_layers < model.layers else ""
    if not mistake and model.moe_layers and ep == 1 and not parallel.etp:  # with ep, experts need not be divided
        mistake = _must_divide("parallel.tp", tp, "model.expert_ffn", model.expert_ffn)
    keys = "parallel.tp parallel.ep model.layers model.dense_layers model.ffn model.expert_ffn model.experts"
    yield f"parallel.etp {keys}", mistake

    shard = parallel.shard
    mistake = _must_divide("parallel.shard", shard, "parallel.dp", parallel.dp) if shard else ""
    yield "parallel.shard parallel.dp", mistake


def _experts(model: Model, parallel: Parallel) -> Iterator[Rule]:
    tp, ep = parallel.tp, parallel.ep
    mistake = f"parallel.ep = {ep} needs experts, and model.experts = 0: use 1" if ep > 1 else ""
    mistake = _must_divide("parallel.ep", ep, "model.experts", model.experts) if model.experts else mistake
    yield "parallel.ep model.experts", mistake

    ranks = parallel.dp * parallel.cp * tp
    keys = "parallel.ep parallel.dp parallel.cp parallel.tp cluster.gpus"
    mistake = _must_divide("parallel.ep", ep, "parallel.dp * cp * tp", ranks)
    more = parallel.replica_gpus * parallel.dp * ep // gcd(ep, ranks)
    yield keys, mistake.replace(": use ", f": set cluster.gpus to {more} or a multiple, or use ") if mistake else ""

    etp, mistake = parallel.etp, ""
    if etp and not model.experts:
        mistake = f"parallel.etp = {etp} needs experts, and model.experts = 0: remove it" if etp > 1 else ""
    elif etp:
        mistake = _must_divide("parallel.etp", etp, "model.expert_ffn", model.expert_ffn)
    yield "parallel.etp model.experts model.expert_ffn", mistake

    mistake = ""
    if etp and model.experts and ranks % ep == 0 and (ranks // ep) % etp:
        mistake = _must_divide("parallel.etp", etp, "parallel.dp * cp * tp / ep", ranks // ep)
    yield f"parallel.etp {keys}", mistake

    exchange, mistake = ", ".join(_given_for_experts(parallel)), ""
    if exchange and not model.experts:
        mistake = f"{exchange}: needs experts, and model.experts = 0; remove it"
    yield "parallel.dispatcher parallel.ep_overlap model.experts", mistake


def _routing(model: Model, train: Train, parallel: Parallel) -> Iterator[Rule]:
    """An expert can get every token at most, which is experts / top_k times the mean."""
    most = model.experts / max(model.top_k, 1) or float("inf")
    for key, load in (("imbalance", train.imbalance), ("capacity", train.capacity)):
        limit = f"{most:g}, where one expert gets every token (model.experts / top_k)"
        mistake = f"train.{key} = {load:g} is out of range: it must be at most {limit}"
        yield f"train.{key} model.experts model.top_k", mistake if load > most else ""

    mistake = 'parallel.ep_overlap = true needs parallel.dispatcher = "all_to_all" or "flex", and it is "all_gather"'
    gathers = parallel.dispatcher == "all_gather" and parallel.ep_overlap
    yield "parallel.dispatcher parallel.ep_overlap", f"{mistake}: change one of them" if gathers else ""


def _given_for_experts(parallel: Parallel) -> Iterator[str]:
    """Keys that only experts have a use for, as the user gave them."""
    if parallel.dispatcher in ("flex", "all_gather"):
        yield f'parallel.dispatcher = "{parallel.dispatcher}"'
    if parallel.ep_overlap:
        yield "parallel.ep_overlap = true"


def _context(model: Model, parallel: Parallel) -> Iterator[Rule]:
    """Ranks that exchange heads need equally many of them, and of the heads that keys and values have."""
    cp, tp, kind, inner = parallel.cp, parallel.tp, parallel.cp_type, parallel.cp_inner
    mistake = ""
    if inner and kind != "a2a+p2p":
        mistake = f'parallel.cp_inner = {inner} needs parallel.cp_type = "a2a+p2p": set it, or remove cp_inner'
    elif inner:
        mistake = _must_divide("parallel.cp_inner", inner, "parallel.cp", cp)
    yield "parallel.cp_inner parallel.cp_type parallel.cp", mistake

    share = cp if kind == "a2a" else inner if kind == "a2a+p2p" else 1
    heads, mistake = gcd(max(model.heads // tp, 1), max(model.kv_heads // tp, 1)), ""
    if share > 1 and heads % share:
        name = "parallel.cp" if kind == "a2a" else "parallel.cp_inner"
        what = f'{name} = {share} with parallel.cp_type = "{kind}"'
        mistake = f'{what} must divide the heads and key-value heads of a rank: use {divisors_of(heads)}, or "p2p"'
    yield "parallel.cp parallel.cp_type parallel.cp_inner parallel.tp model.heads model.kv_heads", mistake


def _pipeline(model: Model, train: Train, parallel: Parallel) -> Iterator[Rule]:
    pp, vpp, layers, count = parallel.pp, parallel.vpp, model.layers, train.microbatches
    mistake = ""
    if pp > layers:
        mistake = f"parallel.pp = {pp} is more than model.layers = {layers}: use at most {layers}"
    elif pp * vpp > layers:
        stages = f"parallel.pp = {pp} times parallel.vpp = {vpp}"
        mistake = f"{stages} is more than model.layers = {layers}: use vpp of at most {layers // pp}"
    yield "parallel.pp parallel.vpp model.layers", mistake

    given = parallel.stage_layers
    mistake, surplus, wanted = "", sum(given) - layers, sorted({pp, pp * vpp})
    if given and len(given) not in wanted:
        mistake = f"parallel.stage_layers has {len(given)} entries: give {one_of(wanted)}, one for every stage"
    elif given and surplus:
        way_out = f"{'add' if surplus < 0 else 'remove'} {abs(surplus)}"
        mistake = f"parallel.stage_layers adds up to {sum(given)}, but model.layers = {layers}: {way_out}"
    yield "parallel.stage_layers parallel.pp parallel.vpp model.layers", mistake

    mistake = f"parallel.vpp = {vpp} needs parallel.pp of more than 1: set pp, or remove vpp"
    yield "parallel.vpp parallel.pp", mistake if pp == 1 < vpp else ""

    schedule, mistake = schedule_named(parallel.schedule), ""
    fewest, most = schedule.chunks
    if not fewest <= vpp <= most:
        wanted_chunks = fewest if fewest == most else f"{fewest} or more"
        chunks = {name: schedule_named(name).chunks for name in names()}
        fits_vpp = one_of([f'"{name}"' for name, (fewest, most) in chunks.items() if fewest <= vpp <= most])
        what = f"needs parallel.vpp of {wanted_chunks}, and it is {vpp}: set vpp, or use {fits_vpp}"
        mistake = f'parallel.schedule = "{schedule.name}" {what}'
    yield "parallel.vpp parallel.schedule", mistake

    mistake = schedule.problem(pp, vpp, count)
    if mistake:
        near = range(max(count - pp, 1), count + pp + 1)
        fits = [number for number in near if not schedule.problem(pp, vpp, number)]
        mistake += f": use {one_of(fits)}" if fits else ""
    yield "parallel.schedule parallel.pp parallel.vpp train.microbatches", mistake


def _networks(setup: Setup) -> Iterator[Rule]:
    """Leaf switches, rails, and what switches reduce."""
    cluster = setup.cluster
    leaf, node, mistake = cluster.leaf_gpus, cluster.gpus_per_node, ""
    if leaf and leaf < node and not cluster.rail_aligned:
        mistake = (
            f"cluster.leaf_gpus = {leaf} is less than a node of {node}: if the GPUs of a node are on several leaf "
            f"switches, set cluster.rail_aligned = true, else at least {node}"
        )
    yield "cluster.leaf_gpus cluster.gpus_per_node cluster.rail_aligned", mistake
    mistake = "cluster.rail_aligned = true needs cluster.leaf_gpus: the GPUs whose adapters are on one leaf switch"
    yield "cluster.rail_aligned cluster.leaf_gpus", mistake if cluster.rail_aligned and not leaf else ""
    mistake = f'cluster.sharp = true is done by InfiniBand switches, not by cluster.fabric = "{cluster.fabric}"'
    yield "cluster.sharp cluster.fabric", mistake if cluster.sharp and cluster.fabric != "infiniband" else ""
    gpu = find_gpu(cluster.gpu)
    mistake = ""
    if cluster.nvls and gpu and gpu.family not in read_table("network.json")["nvls_share"]:
        mistake = f'cluster.nvls = true: the NVLink switch of cluster.gpu = "{gpu.name}" does not reduce: leave it out'
    yield "cluster.nvls cluster.gpu", mistake


def _failures(reliability: Reliability) -> Iterator[Rule]:
    keys = [key for key in ("rates", "mtbf_gpu_hours", "mtbf_job_hours") if getattr(reliability, key)]
    names = " and ".join(f"reliability.{key}" for key in keys)
    mistake = f"{names} each say how often the job fails: leave out all but one" if len(keys) > 1 else ""
    yield "reliability.rates reliability.mtbf_gpu_hours reliability.mtbf_job_hours", mistake


def _slow_parts(setup: Setup) -> Iterator[Rule]:
    mistake = ""
    try:
        read_slow(setup.variability.slow, setup.cluster.gpus, "variability.slow =")
    except OptionError as error:
        mistake = str(error)
    yield "variability.slow cluster.gpus", mistake


def _unused_by_failures(reliability: Reliability) -> list[str]:
    stated = sorted(reliability.model_fields_set)
    if stated and not reliability.is_stated:
        names = " and ".join(f"reliability.{key}" for key in stated)
        have = "have" if len(stated) > 1 else "has"
        return [f"{names} {have} no effect: how often the job fails is not stated (reliability.rates, or --mtbf)"]
    always = reliability.spare_nodes is None
    unused = [key for key in ("repair_hours", "elastic") if always and key in stated]
    return [
        f"reliability.{key} has no effect without reliability.spare_nodes: nodes are replaced at once" for key in unused
    ]


def _machines(setup: Setup) -> Iterator[Rule]:
    parallel, gpus, batch = setup.parallel, setup.cluster.gpus, setup.train.global_batch
    used, mistake = parallel.replica_gpus * parallel.dp, ""
    if used != gpus:
        sizes = f"tp {parallel.tp} * pp {parallel.pp} * cp {parallel.cp} * dp {parallel.dp}"
        fits = gpus % parallel.replica_gpus == 0
        other = f" or parallel.dp = {gpus // parallel.replica_gpus}" if fits else ""
        mistake = f"cluster.gpus = {gpus}, but parallel uses {sizes} = {used}: set cluster.gpus = {used}{other}"
    yield "parallel.tp parallel.pp parallel.cp parallel.dp cluster.gpus", mistake

    sizes_and_limits = (("cluster.gpus", gpus, _MOST_GPUS), ("train.global_batch", batch, _LARGEST_BATCH))
    too_large = (item for item in sizes_and_limits if item[1] > item[2])
    mistake = next((f"{key} = {n} is out of range: it must be at most {most}" for key, n, most in too_large), "")
    yield "cluster.gpus train.global_batch parallel.dp", mistake

    gpu, name = find_gpu(setup.cluster.gpu), setup.cluster.gpu
    yield "cluster.gpu", "" if gpu else f"cluster.gpu = {shown(name)} is not known: {did_you_mean(name, gpu_names())}"
    model = setup.cluster.model
    wrong = model and not model.endswith(".npz")
    yield "cluster.model", f"cluster.model = {shown(model)} is no .npz file: {MODEL_ADVICE}" if wrong else ""

    power, idle = setup.cluster.power_w, gpu.idle_w if gpu else 0.0
    mistake = f"cluster.{too_little_power(power, idle)}" if power and power < LEAST_POWER * idle else ""
    if power and gpu and gpu.is_cpu:
        mistake = f"cluster.power_w = {power:g}: the power of a CPU is not known: leave it out"
    yield "cluster.power_w cluster.gpu", mistake
    yield "cluster.model cluster.gpu", _moved_too_far(model, gpu) if model and not wrong and gpu else ""

    name, known = setup.train.framework, framework_names()
    mistake = "" if name in known else f"train.framework = {shown(name)} is not known: {did_you_mean(name, known)}"
    yield "train.framework", mistake

    precision, mistake = setup.train.precision, ""
    if gpu and not gpu.supports(precision):
        what = f'is not supported by cluster.gpu = "{gpu.name}": use {one_of(gpu.precisions)}'
        mistake = f'train.precision = "{precision}" {what}'
    yield "train.precision cluster.gpu", mistake
    yield "train.weight_precision train.mode train.precision", _unusable_weights(setup.train)


def _unusable_weights(train: Train) -> str:
    """Quantised weights can only be frozen, except that Transformer Engine trains weights stored in 8 bits."""
    stored, mode = train.weight_precision, train.mode
    if stored in ("int8", "nf4") and mode != "lora":
        return f'train.weight_precision = "{stored}" needs train.mode = "lora": quantised weights cannot be trained'
    if stored == "fp8" and mode != "lora" and train.precision not in ("fp8", "mxfp8", "nvfp4"):
        return f'train.weight_precision = "fp8" needs train.precision = "fp8" or "mxfp8", not "{train.precision}"'
    return ""


def _moved_too_far(model: str, gpu: Gpu) -> str:
    """What was measured of a CPU says nothing of a GPU, and the other way round."""
    measured = find_gpu(model)
    if measured is None or measured.is_cpu == gpu.is_cpu:
        return ""
    of, on = ("a CPU", gpu.shown) if measured.is_cpu else (measured.shown, "a CPU")
    return f"cluster.model = {shown(model)} was measured on {of}, and says nothing of {on}: leave one of them out"


def _needs(model: Model, keys: Sequence[str], what: str) -> str:
    """A mistake for the first of these keys that is set without what it needs."""
    key = next((key for key in keys if getattr(model, key)), "")
    return key and f"model.{key} = {getattr(model, key)} needs {what} or remove {key}"
