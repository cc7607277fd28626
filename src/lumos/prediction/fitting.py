"""Fitting: the smallest change that makes a setup fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

from lumos.data_files import read_table
from lumos.errors import LumosError
from lumos.memory.memory import Memory, memory_of
from lumos.memory.stage_walk import GIB
from lumos.setup.constraints import mistakes_in
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup

Changes = dict[str, Any]
_MOST_GPUS = 1 << 14
_MOST_CONTEXT = 16  # ranks that share a sequence


def memory_words(memory: Memory) -> str:
    """Peak and reserve against what there is."""
    peak, reserve, usable = (value / GIB for value in (memory.peak, memory.reserve, memory.usable))
    return f"{peak:.1f} GiB peak + {reserve:.1f} GiB reserve of {usable:.1f} GiB"


def shortage(memory: Memory) -> str:
    """The warning about a peak that does not fit; a tight one may."""
    if memory.is_tight:
        lost = 100 * read_table("memory.json")["fragmented_share"]
        words = f"does not fit with all of the reserve: {memory_words(memory)}"
        return f"{words} (it runs if less than {lost:.0f}% of the peak is lost to fragmentation)"
    return f"does not fit: {memory_words(memory)}"


def does_not_fit(setup: Setup, memory: Memory) -> str:
    """The same for a setup, with the smallest change that would make it fit."""
    return f"{shortage(memory)}; {fitting_advice(setup)}"


def fitting_advice(setup: Setup) -> str:
    """The smallest change that makes a setup fit, as options; what is left if no change does."""
    changes = smallest_change(setup)
    if changes is None:
        return (
            "no sharding, recomputation or offloading that was tried makes it fit: use a smaller model, shorter "
            "sequences or GPUs with more memory, or let lumos search try other layouts"
        )
    options = " ".join(f"--set {key}={str(value).lower()}" for key, value in changes.items())
    return f"it would fit with {options} ({memory_words(memory_of(setup.replaced(changes)))})"


def smallest_change(setup: Setup) -> Changes | None:
    """The first change that fits, tried in this order: one change, several, more GPUs, and offloading."""
    return next((changes for changes in _candidates(setup) if _fits(setup, changes)), None)


def _fits(setup: Setup, changes: Changes) -> bool:
    try:
        changed = setup.replaced(changes)
        return not mistakes_in(changed) and memory_of(changed).fits
    except LumosError:
        return False


def _candidates(setup: Setup) -> Iterator[Changes]:
    ladders = [_sharding(setup), _smaller_batches(setup), _recomputation(setup), *_splits(setup)]
    for ladder in ladders:
        yield from ladder
    together: list[Changes] = []
    for ladder in ladders[:3]:
        if ladder:
            together.append({**(together[-1] if together else {}), **ladder[-1]})
    yield from together[1:]
    most = together[-1] if together else {}
    if setup.parallel.zero == 0 and "parallel.zero" not in most:
        most = {**most, "parallel.zero": framework_named(setup.train.framework).zeros[-1]}
    more = _more_gpus(setup, most)
    yield from more
    offloaded: Changes = {"train.offload_optimizer": 1.0}
    yield from (offloaded, {**most, **offloaded}, *({**changes, **offloaded} for changes in more))


def _sharding(setup: Setup) -> list[Changes]:
    stages = framework_named(setup.train.framework).zeros
    shared = setup.parallel.dp * setup.parallel.cp > 1
    return [{"parallel.zero": stage} for stage in stages if shared and stage > setup.parallel.zero]


def _smaller_batches(setup: Setup) -> list[Changes]:
    """Fewer sequences per micro-batch, and as many more micro-batches."""
    sizes = [size for size in range(setup.train.micro_batch - 1, 0, -1) if setup.train.micro_batch % size == 0]
    return [{"train.micro_batch": size, "train.global_batch": setup.train.global_batch} for size in sizes]


def _recomputation(setup: Setup) -> list[Changes]:
    kinds = ("none", "selective", "full")
    return [{"train.recompute": kind} for kind in kinds[kinds.index(setup.train.recompute) + 1 :]]


def _splits(setup: Setup) -> Iterator[list[Changes]]:
    """More tensor, pipeline or context parallelism on the same GPUs."""
    parallel, batch = setup.parallel, setup.train.global_batch
    for key, now in (("tp", parallel.tp), ("pp", parallel.pp), ("cp", parallel.cp)):
        factors = [2**power for power in range(1, parallel.dp.bit_length()) if parallel.dp % 2**power == 0]
        yield [
            {f"parallel.{key}": now * factor, "parallel.dp": parallel.dp // factor, "train.global_batch": batch}
            for factor in factors
        ]


def _more_gpus(setup: Setup, most: Changes) -> list[Changes]:
    """As few GPUs as possible with all that saves memory; on equally many, tensor parallelism, then stages, come first.

    Only long sequences gain from context parallelism, which is tried last.
    """
    parallel, cluster = setup.parallel, setup.cluster
    tensor: list[Changes] = [{}, *({"parallel.tp": tp} for tp in _doubled(parallel.tp, cluster.gpus_per_node))]
    stages: list[Changes] = [{"parallel.pp": pp} for pp in _doubled(parallel.pp, setup.model.layers)]
    counts = (cluster.gpus, *_doubled(cluster.gpus, _MOST_GPUS))
    found = [_on(setup, gpus, {**most, **split}) for gpus, split in product(counts, tensor)]
    found += [_on(setup, gpus, {**most, **split, **staged}) for gpus, staged, split in product(counts, stages, tensor)]
    parts: list[Changes] = [{"parallel.cp": cp} for cp in _doubled(parallel.cp, _MOST_CONTEXT)]
    found += [_on(setup, gpus, {**most, **split, **part}) for gpus, part, split in product(counts, parts, tensor)]
    widest = tensor[-1]
    both = product(counts, stages, parts)
    found += [_on(setup, gpus, {**most, **widest, **staged, **part}) for gpus, staged, part in both]
    return sorted((changes for changes in found if changes["parallel.dp"]), key=lambda one: int(one["cluster.gpus"]))


def _on(setup: Setup, gpus: int, changes: Changes) -> Changes:
    """These changes on this many GPUs: what they leave is data parallelism, and every replica has a batch."""
    now = {f"parallel.{key}": getattr(setup.parallel, key) for key in ("tp", "pp", "cp")}
    split, further = prod(now.values()), prod(changes.get(key, value) for key, value in now.items())
    replicas = gpus // (setup.parallel.replica_gpus // split * further)
    batch = max(setup.train.global_batch, replicas * changes.get("train.micro_batch", setup.train.micro_batch))
    return {**changes, "cluster.gpus": gpus, "parallel.dp": replicas, "train.global_batch": batch}


def _doubled(number: int, most: int) -> Iterator[int]:
    """Twice, four times … a number, up to this."""
    while 2 * number <= most:
        number *= 2
        yield number
