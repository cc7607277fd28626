"""How fast searches are, on one process and on two, and that bounds lose nothing.

    python benchmarks/search_speed.py [docs/search_speed.md] [--million]

The full space of a 70B model on 512 GPUs; the same space simulated whole; and, with --million, a million configurations
with the memory that this takes. Times are of the machine at hand; ratios are what to look at. The share of the fitting
configurations that are simulated depends on no machine, and CPU time little on what else one does.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

from lumos import read_setup, search
from lumos.search.search import SearchResult
from lumos.workers import engine_named

ROOT = Path(__file__).resolve().parents[1]
HEAD = (
    "| search | valid | fitting | simulated | of the fitting, % | seconds | CPU seconds | configurations/CPU second |\n"
    "|---|---|---|---|---|---|---|---|"
)
MILLION: dict[str, list[object]] = {
    "cluster.gpu": ["a100", "h100", "h200", "b200"],
    "cluster.gpus": [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096],
}


class Timed(NamedTuple):
    """A search, and the CPU seconds of all its processes."""

    found: SearchResult
    cpu_s: float


def cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(workers: int, vary: dict[str, list[object]], exhaustive: bool = False) -> Timed:
    setup = read_setup(ROOT / "examples/llama3-70b.toml")
    before = cpu_s()
    with engine_named("local", workers) as engine:
        found = search(setup, vary, engine=engine, exhaustive=exhaustive)
    return Timed(found, cpu_s() - before)


def row(what: str, timed: Timed) -> str:
    state = timed.found.search
    return (
        f"| {what} | {state.valid:,} | {state.fitting:,} | {len(state.simulated):,} | "
        f"{100 * len(state.simulated) / state.fitting:.1f} | {timed.found.seconds:.1f} | {timed.cpu_s:.1f} | "
        f"{state.valid / timed.cpu_s:,.0f} |"
    )


def report(million: bool) -> str:
    full: dict[str, list[object]] = {"cluster.gpus": [512]}
    found = {workers: timed(workers, full) for workers in (1, 2)}
    whole = timed(2, full, exhaustive=True)
    front, every = found[2].found.search.front, whole.found.search.front
    same = front.best == every.best and front.pareto == every.pareto
    asked_for = {row.number for rows in (*front.families, front.pareto, front.best) for row in rows}
    lines = [
        "# Speed of searches\n",
        "Written by `benchmarks/search_speed.py`: Llama 3 70B on 512 H100, all that Megatron has.\n",
        f"Load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n",
        HEAD,
        row("one process", found[1]), row("two processes", found[2]), row("two processes, everything", whole),
        f"\nTwo processes are {found[1].found.seconds / found[2].found.seconds:.2f} times as fast as one. The answer "
        f"has {len(asked_for)} configurations: the ten best families with their variants, and the Pareto front. The "
        f"ten best and the front of both, bounded and exhaustive, are {'the same' if same else 'NOT THE SAME'}.",
    ]  # fmt: skip
    if million:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lines += ["", HEAD, row("four kinds and ten numbers of GPUs, two processes", timed(2, MILLION))]
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        lines.append(
            f"\nMemory at its peak: {after / 1024:.0f} MiB here ({before / 1024:.0f} before), "
            f"{child / 1024:.0f} MiB in the larger of the two workers."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = report("--million" in sys.argv)
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    if names:
        Path(names[0]).write_text(text)
    print(text)
