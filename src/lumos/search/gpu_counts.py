"""Numbers of GPUs that a search for the fewest tries where nobody names any, and what it skips and why.

One search on a rough number of GPUs gives the GPU-days that the run takes. They change little with the number of GPUs,
so the fewest that meet the deadline are near GPU-days over days, and numbers around that are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log2
from typing import Any

from lumos.data_files import read_table
from lumos.described.flops import model_flops
from lumos.errors import OptionError
from lumos.search.ranking import Objective
from lumos.setup.setup import Setup

_SECONDS_PER_DAY = 86_400.0


def estimated_gpus(setup: Setup, objective: Objective, gpu_days: Callable[[int], float | None]) -> tuple[float, int]:
    """About how many GPUs meet the deadline, and the least power of two on which the run is known to fit.

    `gpu_days` has those of the run on a number of GPUs, None where it does not fit.
    """
    count, largest = _least_gpus(setup, objective), read_table("search.toml")["gpu_counts"]["largest"]
    while count <= largest:
        days = gpu_days(count)
        if days is not None:
            return days / objective.deadline_days, count
        count *= 2
    raise OptionError(
        f"--objective gpus: nothing fits on up to {largest:,} GPUs, or all miss --deadline "
        f"{objective.deadline_days:g}: name numbers with --gpus, or allow more days"
    )


def _least_gpus(setup: Setup, objective: Objective) -> int:
    """A power of two; half of it cannot meet the deadline at the peak rate."""
    peak = setup.cluster.accelerator.peak(setup.train.precision) * 1e12
    seconds = model_flops(setup) / setup.tokens * objective.tokens / peak
    least = seconds / _SECONDS_PER_DAY / objective.deadline_days
    largest = read_table("search.toml")["gpu_counts"]["largest"]
    return int(2 ** ceil(log2(max(1.0, min(least, 2.0 * largest)))))


def counts_between(low: float, high: float, node: int) -> list[int]:
    """Numbers of GPUs in a range: whole nodes, or powers of two inside of one; the next one above, if there is none."""
    most, step = read_table("search.toml")["gpu_counts"]["most"], node
    while (high - low) / step > most:
        step *= 2
    first = ceil(low / step) * step
    inside = [2**power for power in range(node.bit_length()) if 2**power < node and low <= 2**power]
    found = [*inside, *range(max(first, step), int(high) + 1, step)]
    return [count for count in found if count <= high] or [min([*inside, max(first, step)])]


def why_skipped(row: dict[str, Any]) -> str:
    """Why no configuration on these GPUs is an answer."""
    if row["least_days"] is not None:
        return f"misses the deadline: takes {row['least_days']:,.1f} days or more"
    if row["layouts"] and not row["fitting"]:
        return "no valid configuration fits into memory"
    batch = row["batch"]
    other = f"; they could share {row['near_batch']:,}" if row["near_batch"] else ""
    return f"no layout can share a batch of {batch:,} sequences evenly{other}" if not row["layouts"] else "not ranked"


def tried_rows(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every GPU type and number that was tried, from one search or from its shards."""
    found = []
    for rows in zip(*parts, strict=True):
        days = [row["least_days"] for row in rows if row["least_days"] is not None]
        fitting = sum(row["fitting"] for row in rows)
        found.append(rows[0] | {"fitting": fitting, "least_days": min(days, default=None)})
    return found


def skipped_rows(tried: list[dict[str, Any]], answered: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """What every GPU type and number lacks that has no answer."""
    without = [row for row in tried if (row["cluster.gpu"], row["cluster.gpus"]) not in answered]
    return [row | {"why": why_skipped(row)} for row in without]
