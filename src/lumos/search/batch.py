"""The global batch of a search: as stated, or chosen where nobody stated it.

A search compares ways to train on the same batch. A batch that follows from one GPU would leave the others nothing to
do, so one that is not stated is chosen for the number of GPUs, and every answer says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, gcd, lcm
from typing import Any, NamedTuple

from lumos.data_files import read_table
from lumos.setup.setup import Setup

_LARGEST = 1 << 24  # sequences, as in a setup
_LARGEST_UNIT = 1 << 12  # of a common multiple of micro-batches; beyond it, their largest has to do
_HOW_TO_SET = "set another with --set train.global_batch=N"


class Batch(NamedTuple):
    """The global batch, in sequences and tokens, and where it comes from."""

    sequences: int
    tokens: int
    source: str  # "stated", "tokens per GPU" or "default"
    why: str  # in words

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def with_batch(setup: Setup, choices: Mapping[str, tuple[Any, ...]]) -> tuple[Setup, Batch]:
    """The setup with the global batch to search with, and where that comes from."""
    batch = _batch(setup, choices)
    if batch.sequences == setup.train.global_batch:
        return setup, batch
    return setup.replaced({"train.global_batch": batch.sequences}), batch


def _batch(setup: Setup, choices: Mapping[str, tuple[Any, ...]]) -> Batch:
    train = setup.train
    counts = choices.get("cluster.gpus", (setup.cluster.gpus,))
    micro = choices.get("train.micro_batch", ())
    unit = lcm(*micro) if lcm(*micro) <= _LARGEST_UNIT else max(micro)
    if "global_batch" in train.model_fields_set:
        return Batch(train.global_batch, train.global_batch * train.seq, "stated", "as stated")
    if {"micro_batch", "microbatches"} & train.model_fields_set:
        per_gpu = max(micro or (train.micro_batch,)) * train.microbatches / setup.parallel.replica_gpus
        sequences = suited(per_gpu * max(counts), counts, unit)
        source, kept = "tokens per GPU", f"{per_gpu * train.seq:,.0f} tokens per GPU, as in the setup"
    else:
        billions = setup.model.active_parameters(train.seq) / 1e9
        row = next(row for row in read_table("search.toml")["default_batch"]["rows"] if billions < row["below_b"])
        tokens = max(row["tokens"], row["tokens_per_gpu"] * max(counts))
        sequences = suited(tokens / train.seq, counts, unit)
        source, kept = "default", f"the default for {billions:,.3g} B parameters on {max(counts):,} GPUs"
    return Batch(sequences, sequences * train.seq, source, f"not stated: {kept}; {_HOW_TO_SET}")


def shared_batches(sequences: int, counts: tuple[int, ...]) -> dict[int, int]:
    """For numbers of GPUs that cannot share a batch evenly: the nearest batch that most of their layouts can share.

    Batches that would have to change by more than a limit are left out.
    """
    found = {count: _shared(sequences, count) for count in counts}
    return {count: near for count, near in found.items() if near}


def _shared(sequences: int, gpus: int) -> int:
    """0 where the batch can be shared as it is, or none is near."""
    step, limits = gpus, read_table("search.toml")["adapted_batch"]
    shares = sequences % (gpus // (gpus & -gpus)) == 0  # some power of two divides the rest
    if shares and gpus // gcd(sequences, gpus) <= limits["largest_replica"]:
        return 0
    while True:
        near = max(step, round(sequences / step) * step)
        if abs(near / sequences - 1) <= limits["most_change"]:
            return 0 if near == sequences else near
        if step % 2:
            return 0
        step //= 2


def suited(sequences: float, counts: tuple[int, ...], unit: int) -> int:
    """So many sequences or a few more, so that most numbers of replicas divide them into micro-batches.

    `counts` are the numbers of GPUs, and `unit` is a multiple of every micro-batch that was asked for. With fewer units
    than GPUs, a divisor of the GPUs does; with more, a multiple of them.
    """
    units, common = max(1, ceil(sequences / unit - 1e-9)), gcd(*counts)
    every = lcm(*counts)
    if units <= common:
        units = next(n for n in range(units, common + 1) if common % n == 0)
    else:
        step = next(step for step in (every, max(counts), common) if step <= units or step == common)
        units = step * ceil(units / step)
    return max(unit, min(units * unit, _LARGEST // unit * unit))
