"""Compare the critical path of recorded runs with the gains from faster work, and write docs/sensitivities.md.

    python benchmarks/sensitivities.py [--data ../shared/data] [--trace NAME=PATH …] [-o docs/sensitivities.md]

`--trace` adds a trace that is not among the shared measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from lumos.analysis.replay import Replay, replay
from lumos.analysis.sensitivities import Sensitivity
from lumos.errors import LumosError
from lumos.read.job import read_job

TOLERANCE_PCT = 0.2  # of the step: kernels that begin before the one that they follow has ended
FOLDERS = ("h200/multirank/*", "public/torchrec_v100/*", "public/megatron_tp8_a100/kineto", "public/sglang_decode_b200")
FILES = (
    "public/hta/**/*.gz", "public/tracelens/**/*.gz", "public/nanogpt_h100/*.gz", "public/kineto_2021/*.gz",
    "public/aorta_mi350/*.gz", "public/param/*_kineto.json.gz", "public/nsys/*.sqlite", "public/chakra/*.et",
)  # fmt: skip
MOST_GAINS = 5
SHORTEST_MS = 0.05  # fragments with hardly any task
HEAD = """# Critical path and sensitivities

Written by `benchmarks/sensitivities.py`. For each recorded run: the share of each category of work on the critical
path of the step without the profiler, and the five largest gains if one part of the work were twice as fast, in percent
of the step. A part that is the same work as a larger one (the only collective is all of the communication) is left out.

A gain can be at most half of the share that the part has on the path, because the step is the longest of all paths; it
is less if another path is nearly as long. Ranks that start before others may add what they do before the others start.
A gain beyond that, or a largest gain that is not that of the category with the largest share, contradicts the path.
"""


def early_pct(run: Replay) -> float:
    """What ranks that start before the others do before these start, in percent of the step."""
    start = run.clean_steps.start
    mean = run.clean_steps.mean
    return 100 * float((start - start.min(axis=1, keepdims=True)).mean()) / (1e6 * mean) if mean else 0.0


def excess_pct(run: Replay, one: Sensitivity) -> float:
    """By how much a gain exceeds what the critical path explains; negative if it does not."""
    return one.gain_pct - (one.path_pct + early_pct(run)) / 2


def contradictions(run: Replay) -> list[str]:
    found = [
        f"{one.what} gains {one.gain_pct:.2f} %, and is {one.path_pct:.2f} % of the path"
        for one in run.sensitivities
        if excess_pct(run, one) > TOLERANCE_PCT
    ]
    categories = [one for one in run.sensitivities if one.kind == "category"]
    if categories:
        best, longest = (max(categories, key=lambda one: getattr(one, key)) for key in ("gain_pct", "path_pct"))
        if best.gain_pct - longest.gain_pct > TOLERANCE_PCT:
            found.append(f"{best.what} gains most, and {longest.what} has most of the path")
    return found


def runs(data: Path, more: list[str]) -> Iterator[tuple[str, Replay]]:
    """Every run that can be read and has steps with work in them."""
    paths = [path for pattern in FOLDERS for path in sorted(data.glob(pattern)) if path.is_dir()]
    paths += [path for pattern in FILES for path in sorted(data.glob(pattern))]
    named = [(str(path.relative_to(data)), path) for path in paths]
    named += [(name, Path(path)) for name, _, path in (one.partition("=") for one in more)]
    for name, path in named:
        try:
            run = replay(read_job(path))
        except LumosError:
            continue  # docs/files.md says why
        if run.clean_ms > SHORTEST_MS and run.sensitivities:
            yield name, run


def row(name: str, run: Replay) -> str:
    categories = sorted((one for one in run.sensitivities if one.kind == "category"), key=lambda one: -one.path_pct)
    path = ", ".join(f"{one.what} {one.path_pct:.0f}" for one in categories if one.path_pct >= 0.5)
    parts = {(round(one.gain_ms, 6), round(one.path_pct, 6)): one for one in reversed(run.sensitivities)}
    gains = ", ".join(f"{one.what} {one.gain_pct:.1f}" for one in list(reversed(parts.values()))[:MOST_GAINS])
    return f"| {name} | {len(run.marks.ranks)} | {run.clean_ms:,.2f} | {path} | {gains} |"


def page(data: Path, more: list[str]) -> str:
    rows, wrong, count, most = [], [], 0, -100.0
    for name, run in runs(data, more):
        rows.append(row(name, run))
        wrong += [f"- {name}: {what}" for what in contradictions(run)]
        count += len(run.sensitivities)
        most = max([most, *(excess_pct(run, one) for one in run.sensitivities)])
    told = f"{len(rows)} runs, {count} gains: {len(wrong)} contradictions. "
    told += (
        f"The largest gain over its limit is {max(most, 0.0):.2f}% of the step; up to {TOLERANCE_PCT}% is tolerated."
    )
    table = ["| run | ranks | step, ms | on the critical path, % | gain if twice as fast, % |", "|---|---|---|---|---|"]
    return "\n".join([HEAD, told, *wrong, "", *table, *rows]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared/data")
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).resolve().parents[1] / "docs/sensitivities.md"
    )
    options = parser.parse_args()
    options.output.write_text(page(options.data, options.trace), "utf-8")
