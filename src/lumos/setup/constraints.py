"""Constraints between the values of a setup, and the check that lists every mistake in one error.

Each constraint is a function with `@_rule(keys)` that returns a sentence, or "" where it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from lumos.errors import OptionError
from lumos.schedules import names, schedule_named
from lumos.setup.frameworks import framework_names
from lumos.setup.gpus import find_gpu, gpu_names
from lumos.setup.messages import did_you_mean, divisors_of, mistakes_of, named, one_of, shown
from lumos.setup.sections import Section
from lumos.setup.setup import KEYS, SECTIONS, Setup

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


Mistake = Callable[[Setup], str]


class Rule(NamedTuple):
    """A constraint and the keys it is about: it is skipped where one of them is already known to be wrong."""

    keys: frozenset[str]
    mistake: Mistake


RULES: list[Rule] = []


def check(setup: Setup, where: str = "") -> None:
    """Raise OptionError with every mistake in a setup whose values have the right types."""
    _refuse(mistakes_in(setup), where)


def checked_setup(sections: Mapping[str, Any], where: str = "", known_mistakes: Sequence[str] = ()) -> Setup:
    """The setup of these sections, or OptionError with every mistake, including those known before.

    A section that is None could not be read, which a known mistake says; the others are checked without it.

    >>> checked_setup({"model": {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 99}, "train": {"seq": 8}})
    """
    mistakes = [*known_mistakes, *(_stray(name) for name in sections if name not in SECTIONS)]
    built: dict[str, Section] = {}
    wrong: set[str] = set()
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


def mistakes_in(setup: Setup, wrong: Iterable[str] = ()) -> list[str]:
    """One sentence for every rule that the setup breaks; rules about the keys in `wrong` are skipped."""
    skipped = frozenset(wrong)
    rules = [rule for rule in RULES if skipped.isdisjoint(rule.keys)] if skipped else RULES
    return [sentence for rule in rules if (sentence := rule.mistake(setup))]


def warnings_in(setup: Setup) -> list[str]:
    """One sentence for everything that is allowed but probably not intended."""
    parallel, gpus, gpu = setup.parallel, setup.cluster.gpus, setup.cluster.accelerator
    tp, shard, node, reach = parallel.tp, parallel.shard, gpu.gpus_per_node, max(gpu.nvlink_domain, gpu.gpus_per_node)
    doubts = (
        (parallel.sequence_parallel and tp == 1, "parallel.sequence_parallel has no effect with parallel.tp = 1"),
        (shard and not parallel.zero, f"parallel.shard = {shard} has no effect with parallel.zero = 0"),
        (gpus > node and gpus % node, f"cluster.gpus = {gpus} is not a whole number of nodes of {node}"),
        (tp > reach, f"parallel.tp = {tp} reaches beyond the {reach} GPUs of a node"),
    )
    return [sentence for applies, sentence in doubts if applies]


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


def _rule(*keys: str) -> Callable[[Mistake], Mistake]:
    def add(mistake: Mistake) -> Mistake:
        RULES.append(Rule(frozenset(keys), mistake))
        return mistake

    return add


def _must_divide(part: str, size: int, whole: str, total: int) -> str:
    return "" if total % size == 0 else f"{part} = {size} does not divide {whole} = {total}: use {divisors_of(total)}"


def _must_be_multiple(part: str, size: int, of: str, factor: int) -> str:
    if size % factor == 0:
        return ""
    below = size - size % factor
    return f"{part} = {size} is not a multiple of {of}: use {one_of([n for n in (below, below + factor) if n])}"


# The model


@_rule("model.heads", "model.hidden", "model.head_dim")
def _heads_divide_hidden(setup: Setup) -> str:
    model = setup.model
    if model.latent or model.head_dim != model.hidden // model.heads:  # a head_dim that is given need not divide
        return ""
    mistake = _must_divide("model.heads", model.heads, "model.hidden", model.hidden)
    return mistake and f"{mistake}; or set model.head_dim"


@_rule("model.heads", "model.kv_heads")
def _kv_heads_divide_heads(setup: Setup) -> str:
    model = setup.model
    return "" if model.latent else _must_divide("model.kv_heads", model.kv_heads, "model.heads", model.heads)


@_rule(
    "model.kv_lora_rank", "model.q_lora_rank", "model.qk_nope_head_dim", "model.qk_rope_head_dim", "model.v_head_dim"
)
def _latent_attention_is_complete(setup: Setup) -> str:
    model = setup.model
    if model.latent:
        sizes = {"qk_nope_head_dim + model.qk_rope_head_dim": model.head_dim, "v_head_dim": model.v_head_dim}
        missing = next((key for key, size in sizes.items() if not size), "")
        return missing and f"model.kv_lora_rank = {model.kv_lora_rank} needs model.{missing} of more than 0"
    key = "q_lora_rank" if model.q_lora_rank else "v_head_dim" if model.v_head_dim else ""
    return key and f"model.{key} = {getattr(model, key)} needs model.kv_lora_rank: set it, or remove {key}"


@_rule("model.ffn", "model.expert_ffn", "model.experts", "model.dense_layers", "model.layers")
def _every_mlp_has_a_width(setup: Setup) -> str:
    model = setup.model
    if model.moe_layers < model.layers and not model.ffn:
        return "model.ffn is missing: set it in [model] or with --set model.ffn=VALUE"
    if model.moe_layers and not model.expert_ffn:
        return f"model.expert_ffn is missing, and model.experts = {model.experts}: set it in [model]"
    return ""


@_rule("model.experts", "model.top_k", "model.shared_experts")
def _experts_have_a_router(setup: Setup) -> str:
    model = setup.model
    if model.experts and not 1 <= model.top_k <= model.experts:
        return f"model.top_k = {model.top_k} of model.experts = {model.experts}: use 1 to {model.experts}"
    key = "" if model.experts else "top_k" if model.top_k else "shared_experts" if model.shared_experts else ""
    return key and f"model.{key} = {getattr(model, key)} needs experts: set model.experts, or remove {key}"


@_rule("model.layers", "model.dense_layers")
def _dense_layers_are_layers(setup: Setup) -> str:
    layers, dense = setup.model.layers, setup.model.dense_layers
    return "" if dense <= layers else f"model.dense_layers = {dense} is more than model.layers = {layers}: use fewer"


# The batch


@_rule("train.micro_batch", "train.microbatches", "train.global_batch", "parallel.dp")
def _batches_agree(setup: Setup) -> str:
    train, dp = setup.train, setup.parallel.dp
    total = train.micro_batch * dp * train.microbatches
    if train.global_batch == total:
        return ""
    product = f"train.micro_batch = {train.micro_batch} times parallel.dp = {dp}"
    return _must_be_multiple("train.global_batch", train.global_batch, product, train.micro_batch * dp) or (
        f"train.global_batch = {train.global_batch} is not {product} times train.microbatches = {train.microbatches}, "
        f"which is {total}: remove one of global_batch and microbatches"
    )


@_rule("train.seq", "parallel.cp")
def _cp_divides_the_sequence(setup: Setup) -> str:
    cp = setup.parallel.cp
    halves = f"2 * parallel.cp = {2 * cp}"  # each rank has two chunks, which balances causal attention
    mistake = "" if cp == 1 else _must_be_multiple("train.seq", setup.train.seq, halves, 2 * cp)
    return mistake and f"{mistake}; or another cp"


@_rule("train.seq", "parallel.cp", "parallel.tp", "parallel.sequence_parallel")
def _tp_divides_the_sequence(setup: Setup) -> str:
    if not setup.parallel.sequence_parallel:
        return ""
    seq = setup.train.seq // setup.parallel.cp
    mistake = _must_divide("parallel.tp", setup.parallel.tp, "train.seq / parallel.cp", seq)
    return mistake and f"{mistake}; or turn parallel.sequence_parallel off"


# How the model is divided


@_rule("parallel.tp", "model.heads")
def _tp_divides_heads(setup: Setup) -> str:
    return _must_divide("parallel.tp", setup.parallel.tp, "model.heads", setup.model.heads)


@_rule("parallel.tp", "model.kv_heads", "model.heads")
def _tp_fits_kv_heads(setup: Setup) -> str:
    tp, kv_heads, heads = setup.parallel.tp, setup.model.kv_heads, setup.model.heads
    if setup.model.latent or heads % tp or kv_heads % tp == 0 or tp % kv_heads == 0:
        return ""
    fits = [n for n in range(1, min(heads, 256) + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    return f"parallel.tp = {tp} neither divides model.kv_heads = {kv_heads} nor is a multiple of it: use {one_of(fits)}"


@_rule(
    *("parallel.tp", "parallel.ep", "model.layers", "model.dense_layers"),
    *("model.ffn", "model.expert_ffn", "model.experts"),
)
def _tp_divides_ffn(setup: Setup) -> str:
    model, tp = setup.model, setup.parallel.tp
    if model.moe_layers < model.layers and model.ffn % tp:
        return _must_divide("parallel.tp", tp, "model.ffn", model.ffn)
    if model.moe_layers and setup.parallel.ep == 1:  # with ep, experts need not be divided
        return _must_divide("parallel.tp", tp, "model.expert_ffn", model.expert_ffn)
    return ""


@_rule("parallel.pp", "parallel.vpp", "model.layers")
def _every_stage_has_a_layer(setup: Setup) -> str:
    pp, vpp, layers = setup.parallel.pp, setup.parallel.vpp, setup.model.layers
    if pp > layers:
        return f"parallel.pp = {pp} is more than model.layers = {layers}: use at most {layers}"
    if pp * vpp > layers:
        stages = f"parallel.pp = {pp} times parallel.vpp = {vpp}"
        return f"{stages} is more than model.layers = {layers}: use vpp of at most {layers // pp}"
    return ""


@_rule("parallel.stage_layers", "parallel.pp", "parallel.vpp", "model.layers")
def _stage_layers_add_up(setup: Setup) -> str:
    stages, layers = setup.parallel.stage_layers, setup.model.layers
    if not stages:
        return ""
    wanted = sorted({setup.parallel.pp, setup.parallel.pp * setup.parallel.vpp})
    if len(stages) not in wanted:
        return f"parallel.stage_layers has {len(stages)} entries: give {one_of(wanted)}, one for every stage"
    surplus = sum(stages) - layers
    way_out = f"{'add' if surplus < 0 else 'remove'} {abs(surplus)}"
    return f"parallel.stage_layers adds up to {sum(stages)}, but model.layers = {layers}: {way_out}" if surplus else ""


@_rule("parallel.vpp", "parallel.pp")
def _virtual_stages_need_stages(setup: Setup) -> str:
    vpp = setup.parallel.vpp
    if vpp == 1 or setup.parallel.pp > 1:
        return ""
    return f"parallel.vpp = {vpp} needs parallel.pp of more than 1: set pp, or remove vpp"


@_rule("parallel.vpp", "parallel.schedule")
def _schedule_has_as_many_virtual_stages(setup: Setup) -> str:
    name, vpp = setup.parallel.schedule, setup.parallel.vpp
    fewest, most = schedule_named(name).chunks
    if fewest <= vpp <= most:
        return ""
    wanted = fewest if fewest == most else f"{fewest} or more"
    chunks = {other: schedule_named(other).chunks for other in names()}
    fits = one_of([f'"{other}"' for other, (fewest, most) in chunks.items() if fewest <= vpp <= most])
    return f'parallel.schedule = "{name}" needs parallel.vpp of {wanted}, and it is {vpp}: set vpp, or use {fits}'


@_rule("parallel.schedule", "parallel.pp", "parallel.vpp", "train.microbatches")
def _schedule_can_run(setup: Setup) -> str:
    parallel, count = setup.parallel, setup.train.microbatches
    schedule = schedule_named(parallel.schedule)
    problem = schedule.problem(parallel.pp, parallel.vpp, count)
    if not problem:
        return ""
    near = range(max(count - parallel.pp, 1), count + parallel.pp + 1)
    fits = [number for number in near if not schedule.problem(parallel.pp, parallel.vpp, number)]
    return f"{problem}: use {one_of(fits)}" if fits else problem


@_rule("parallel.ep", "model.experts")
def _ep_divides_experts(setup: Setup) -> str:
    ep, experts = setup.parallel.ep, setup.model.experts
    if ep > 1 and not experts:
        return f"parallel.ep = {ep} needs experts, and model.experts = 0: use 1"
    return _must_divide("parallel.ep", ep, "model.experts", experts) if experts else ""


@_rule("parallel.ep", "parallel.dp", "parallel.cp", "parallel.tp", "cluster.gpus")
def _ep_divides_a_stage(setup: Setup) -> str:
    parallel = setup.parallel
    ranks = parallel.dp * parallel.cp * parallel.tp
    return _must_divide("parallel.ep", parallel.ep, "parallel.dp * cp * tp", ranks)


@_rule("parallel.shard", "parallel.dp")
def _shard_divides_dp(setup: Setup) -> str:
    parallel = setup.parallel
    return _must_divide("parallel.shard", parallel.shard, "parallel.dp", parallel.dp) if parallel.shard else ""


# The machines


@_rule("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "cluster.gpus")
def _all_gpus_are_used(setup: Setup) -> str:
    parallel, gpus = setup.parallel, setup.cluster.gpus
    used = parallel.replica_gpus * parallel.dp
    if used == gpus:
        return ""
    sizes = f"tp {parallel.tp} * pp {parallel.pp} * cp {parallel.cp} * dp {parallel.dp}"
    fits = gpus % parallel.replica_gpus == 0
    other = f" or parallel.dp = {gpus // parallel.replica_gpus}" if fits else ""
    return f"cluster.gpus = {gpus}, but parallel uses {sizes} = {used}: set cluster.gpus = {used}{other}"


@_rule("cluster.gpus", "train.global_batch", "parallel.dp")
def _sizes_are_in_range(setup: Setup) -> str:
    gpus, batch = setup.cluster.gpus, setup.train.global_batch
    if gpus > _MOST_GPUS:
        return f"cluster.gpus = {gpus} is out of range: it must be at most {_MOST_GPUS}"
    if batch > _LARGEST_BATCH:
        return f"train.global_batch = {batch} is out of range: it must be at most {_LARGEST_BATCH}"
    return ""


@_rule("cluster.gpu")
def _gpu_is_known(setup: Setup) -> str:
    name = setup.cluster.gpu
    return "" if find_gpu(name) else f"cluster.gpu = {shown(name)} is not known: {did_you_mean(name, gpu_names())}"


@_rule("train.framework")
def _framework_is_known(setup: Setup) -> str:
    name, known = setup.train.framework, framework_names()
    return "" if name in known else f"train.framework = {shown(name)} is not known: {did_you_mean(name, known)}"


@_rule("train.precision", "cluster.gpu")
def _gpu_supports_precision(setup: Setup) -> str:
    gpu, precision = find_gpu(setup.cluster.gpu), setup.train.precision
    if gpu is None or gpu.supports(precision):
        return ""
    use = f"use {one_of(gpu.precisions)}"
    return f'train.precision = "{precision}" is not supported by cluster.gpu = "{gpu.name}": {use}'
