"""Writes docs/synthesis.md: synthetic runs against recorded ones that nothing was learned from.

    python benchmarks/synthesis.py -o docs/synthesis.md

Traces are read from ../shared/data, and those that were recorded last from calibration/step_times_siblings_h200.tar.xz.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lumos import read_job
from lumos.analysis.replay import replay
from lumos.errors import LumosError
from lumos.synthesis.distance import Distance
from lumos.synthesis.generate import Size
from lumos.synthesis.synthesise import RecordedJob, Synthetic, record, synthesise

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))
from step_times_data import SIBLINGS, unpack  # noqa: E402

DATA = ROOT.parent / "shared/data"
RANKS = "rank?.pt.trace.json.gz"
STEP_PCT, POINTS = 5.0, 5.0
HEAD = """# Synthetic runs

Written by `python benchmarks/synthesis.py -o docs/synthesis.md`. `lumos synthesise` learns from some traces and
generates others of the same behaviour ([sharing](sharing.md)). Here every synthetic run is compared with a recorded
sibling that was **not** learned from: another step, other ranks, another depth, more micro-batches. "Learned" is how
far the recorded steps that were learned from are from that sibling themselves (between two depths, on the line through
them): nothing that is learned from one step can be nearer to another than they are. Hosts of the recordings of one GPU
differ by a quarter, and jobs of several ranks share one GPU: their steps differ by 10 % and more.

"""
BLIND = """
## Blind

Six kinds of runs on an H200, of two depths, and the first of them once more, recorded after everything was fixed
(`calibration/step_times_h200.py --set siblings`, three steps of each). A job that is started again differs from itself
by 1 to 42 %, although it does the same work. A synthetic run has the hosts and links of the recording that it was
learned from.

"""
SIZES = """
## Sizes that were only timed

Clean steps of runs that were not traced, against the synthetic step without the profiler. The recordings vary by
±10 % from run to run.

"""
NEAR = """
## Is an original reproduced?

Windows of six consecutive kernels: the factor, less 1, between their times and those of the nearest original, in the
median; beside it the same for the sibling, which is the yardstick. A synthetic run that came nearer than a sibling
would show something of an original. "New" are windows whose kinds, in this order, no original has. "Run" is the longest
sequence of kernels that agree with an original in kind and, within 1 %, in both times.

"""


AS_LEARNED = Size()


class Part(NamedTuple):
    """Some steps of a recording."""

    path: str
    match: str = ""
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    """What is learned from, what is generated, and what it is compared with."""

    kind: str
    name: str
    learned: tuple[Part, ...]
    judged: Part
    size: Size = AS_LEARNED


@dataclass(frozen=True)
class Timed:
    """A size of which only the clean step is known."""

    name: str
    learned: Part
    measured: str
    size: Size


def _single(name: str, *steps: int) -> Part:
    return Part(f"h200/single/{name}.pt.trace.json.gz", "", steps or None)


def _multi(name: str, *steps: int, match: str = RANKS) -> Part:
    return Part(f"h200/multirank/{name}", match, steps or None)


def cases() -> Iterator[Case]:
    """All comparisons."""
    for name in ("base_l8_h2048_s2048_b2", "l4", "l16", "b1", "b8", "h1024", "h4096", "s4096", "ckpt", "accum4",
                 "compile_base", "gpt2_l12_h1024", "nosync_base", "tiny_l2_h512"):  # fmt: skip
        yield Case("another step", f"single/{name}", (_single(name, 0),), _single(name, 1))
    for name in ("ddp2_l8", "ddp2_l16", "fsdp2_l8", "tp2_l8", "dp2_tp2_l8", "pp2_mb4", "pp4_mb8"):
        yield Case("another step", f"multirank/{name}", (_multi(name, 0),), _multi(name, 1))
    depths = {4: "l4", 8: "base_l8_h2048_s2048_b2", 16: "l16"}
    for layers, name in depths.items():
        others = {depth: other for depth, other in depths.items() if depth != layers}
        both = " and ".join(map(str, others))
        yield Case(
            "another depth", f"single, {layers} layers from {both}", tuple(_single(other) for other in others.values()),
            _single(name), Size(layers=layers),
        )  # fmt: skip
        for depth, other in others.items():
            name_of = f"single, {layers} layers from {depth}"
            yield Case("another depth", name_of, (_single(other),), _single(name), Size(layers=layers))
    for learned, judged, layers in (("ddp2_l8", "ddp2_l16", 16), ("ddp2_l16", "ddp2_l8", 8)):
        yield Case("another depth", f"{judged} from {learned}", (_multi(learned),), _multi(judged), Size(layers=layers))
    base = "base_l8_h2048_s2048_b2"
    yield Case("micro-batches", "single, 4 from 1", (_single(base),), _single("accum4"), Size(micro_batches=4))
    yield Case("micro-batches", "single, 1 from 4", (_single("accum4"),), _single(base), Size(micro_batches=1))
    tp8 = "public/megatron_tp8_a100/kineto"
    yield Case("other ranks", "megatron_tp8_a100, 4 to 7 from 0 to 3", (Part(tp8, "rank[0-3].json.gz"),),
               Part(tp8, "rank[4-7].json.gz"))  # fmt: skip
    resnet = "public/torchrec_v100/resnet18"
    yield Case("another step", "resnet18, 3 from 1 and 2", (Part(resnet, "", (0, 1)),), Part(resnet, "", (2,)))


def blind_cases(folder: Path) -> Iterator[Case]:
    """The last recordings: another recording of a job, and another depth."""
    parts = {run.name: Part(str(run.traces)) for run in unpack(SIBLINGS, folder)}
    for name, part in parts.items():
        again = f"{name}_again"
        if again not in parts:
            continue
        kind, _, layers = name.partition("_l")
        deep = f"{kind}_l{2 * int(layers)}"
        yield Case("another recording", name, (part,), parts[again])
        yield Case("another depth", f"{deep} from {name}", (part,), parts[deep], Size(layers=2 * int(layers)))
        yield Case("another depth", f"{name} from {deep}", (parts[deep],), part, Size(layers=int(layers)))


TIMED = (
    Timed("ddp2, 4 layers from 8", _multi("ddp2_l8"), "ddp2_l4", Size(layers=4)),
    Timed("fsdp2, 4 layers from 8", _multi("fsdp2_l8"), "fsdp2_l4", Size(layers=4)),
    Timed("tp2, 4 layers from 8", _multi("tp2_l8"), "tp2_l4", Size(layers=4)),
    Timed("pp2, 2 micro-batches from 4", _multi("pp2_mb4"), "pp2_mb2", Size(micro_batches=2)),
    Timed("pp2, 16 micro-batches from 4", _multi("pp2_mb4"), "pp2_mb16", Size(micro_batches=16)),
)


@cache
def recorded(part: Part) -> RecordedJob:
    return record(Path(part.path).name, read_job(DATA / part.path, part.match), part.steps)


def joined(parts: tuple[Part, ...]) -> tuple[float, dict[str, float]]:
    """Step and shares of what was learned from, as means."""
    found = [recorded(part).behaviour for part in parts]
    shares = {key: statistics.mean(one.breakdown[key] for one in found) for key in found[0].breakdown}
    return statistics.mean(one.step_ms for one in found), shares


class Result(NamedTuple):
    """One comparison."""

    case: Case
    made: Synthetic
    distance: Distance

    @property
    def learned_pct(self) -> float | None:
        """How far the originals are from the sibling; None where they are of another size and one depth."""
        if self.case.size == AS_LEARNED:
            return 100 * (joined(self.case.learned)[0] / self.distance.recorded.step_ms - 1)
        if len(self.case.learned) < 2:
            return None
        (low, first), (high, last) = sorted((job.job.layers, job.behaviour.step_ms) for job in self.made.originals)
        between = first + (last - first) * (self.case.size.layers - low) / (high - low)
        return 100 * (between / self.distance.recorded.step_ms - 1)

    @property
    def learned_points(self) -> float | None:
        if self.case.size != AS_LEARNED:
            return None
        own = joined(self.case.learned)[1]
        return 100 * max(abs(share - own[part]) for part, share in self.distance.recorded.breakdown.items())

    @property
    def compute_pct(self) -> float:
        """How far the time in which the GPU computes is off."""
        own, other = (
            one.step_ms * (one.breakdown["exposed compute"] + one.breakdown["overlapped"])
            for one in (self.distance.synthetic, self.distance.recorded)
        )
        return 100 * (own / other - 1)

    @property
    def passes(self) -> bool:
        return abs(self.distance.step_pct) <= STEP_PCT and self.distance.breakdown_points <= POINTS

    @property
    def possible(self) -> bool:
        """Whether the originals themselves are as near to the sibling as is asked."""
        step, points = self.learned_pct, self.learned_points
        return (step is None or abs(step) <= STEP_PCT) and (points is None or points <= POINTS)


def judge(case: Case) -> Result:
    made = synthesise([recorded(part) for part in case.learned], case.size, against=[recorded(case.judged)])
    return Result(case, made, made.distances[0])


def rows_of(results: list[Result]) -> Iterator[str]:
    head = ("held out", "case", "recorded, ms", "synthetic", "step, %", "learned, %", "compute, %", "breakdown, points")
    yield f"| {' | '.join(head)} | learned |"
    yield f"|{'---|' * 9}"
    for one in sorted(results, key=lambda one: -max(abs(one.distance.step_pct), one.distance.breakdown_points)):
        found = one.distance
        learned = "–" if one.learned_pct is None else f"{one.learned_pct:+.1f}"
        points = "–" if one.learned_points is None else f"{one.learned_points:.1f}"
        yield (
            f"| {one.case.kind} | {one.case.name} | {found.recorded.step_ms:.2f} | {found.synthetic.step_ms:.2f} "
            f"| {found.step_pct:+.1f} | {learned} | {one.compute_pct:+.1f} | {found.breakdown_points:.1f} | {points} |"
        )


def summary(results: list[Result]) -> str:
    same = [one for one in results if one.case.size == AS_LEARNED]
    near, far = [one for one in same if one.possible], [one for one in same if not one.possible]
    other = [one for one in results if one.case.size != AS_LEARNED]
    beyond = max(abs(abs(one.distance.step_pct) - abs(one.learned_pct or 0.0)) for one in far)
    return (
        f"Of the same size, where the originals are themselves within {STEP_PCT:.0f} % and {POINTS:.0f} points of the "
        f"sibling, **{sum(one.passes for one in near)} of {len(near)}** synthetic runs are too "
        f"({_means(near)}). In the other {len(far)} the recorded steps differ by more; the synthetic one is off by as "
        f"much, to within {beyond:.1f} %. Against the traces that were learned from, the step is "
        f"{mean_to_originals(results):.1f} % off on average. Of another size, {sum(one.passes for one in other)} of "
        f"{len(other)} are within both ({_means(other)}): there the time in which the GPU computes is within "
        f"{max(abs(one.compute_pct) for one in other):.1f} %, but hosts and links were not equally fast in these "
        f"recordings (the steps of 4, 8 and 16 layers do not lie on a line).\n"
    )


def blind_summary(results: list[Result]) -> str:
    same = [one for one in results if one.case.size == AS_LEARNED]
    other = [one for one in results if one.case.size != AS_LEARNED]
    beyond = [abs(one.distance.step_pct - (one.learned_pct or 0.0)) for one in same]
    return (
        f"Of another recording of the same job, {sum(one.passes for one in same)} of {len(same)} are within both bars "
        f"({_means(same)}), and within {max(beyond):.1f} points of how far the recordings are apart themselves (mean "
        f"{statistics.mean(beyond):.1f}). Of another depth, {sum(one.passes for one in other)} of {len(other)} "
        f"({_means(other)}).\n"
    )


def _means(results: list[Result]) -> str:
    step = statistics.mean(abs(one.distance.step_pct) for one in results)
    return f"mean {step:.1f} % and {statistics.mean(one.distance.breakdown_points for one in results):.1f} points"


def mean_to_originals(results: list[Result]) -> float:
    same = [one for one in results if one.case.size == AS_LEARNED]
    return statistics.mean(
        abs(100 * (one.distance.synthetic.step_ms / joined(one.case.learned)[0] - 1)) for one in same
    )


def timed_rows() -> Iterator[str]:
    yield "| run | measured, ms | synthetic, ms | error, % |"
    yield "|---|---|---|---|"
    for one in TIMED:
        files = sorted((DATA / "h200/multirank" / one.measured).glob("rank?.json"))
        seconds = [_median(json.loads(file.read_text("utf-8"))) for file in files]
        made = synthesise([recorded(one.learned)], one.size)
        measured, clean = 1e3 * statistics.mean(seconds), _clean_ms(made)
        yield f"| {one.name} | {measured:.2f} | {clean:.2f} | {100 * (clean / measured - 1):+.1f} |"


def _clean_ms(made: Synthetic) -> float:
    """The synthetic step without what the profiler cost in the runs that were learned from."""
    execution = made.execution
    trace = replace(execution.trace, headers=tuple(one._replace(profiled=True) for one in execution.trace.headers))
    return replay(replace(execution, trace=trace, nodes=replace(execution.nodes, trace=trace))).clean_ms


def _median(run: dict[str, object]) -> float:
    steps = run["step_s"]
    return statistics.median(steps) if isinstance(steps, list) else float(str(steps))


def nearness_rows(results: list[Result]) -> Iterator[str]:
    yield "| case | synthetic | sibling | nearest 1 %: synthetic | sibling | new | run | run, sibling |"
    yield "|---|---|---|---|---|---|---|---|"
    same = [one for one in results if one.case.size == AS_LEARNED]
    for one in sorted(same, key=_closeness):
        own, other = one.made.nearness["synthetic"], one.made.nearness["held out"]
        yield (
            f"| {one.case.name}, {one.case.kind} | {own.median_distance:.0%} | {other.median_distance:.0%} "
            f"| {own.nearest_distance:.0%} | {other.nearest_distance:.0%} | {own.new_windows:.0%} | {own.longest_run} "
            f"| {other.longest_run} |"
        )


def _closeness(one: Result) -> float:
    return one.made.nearness["synthetic"].median_distance / one.made.nearness["held out"].median_distance


def judged(chosen: Iterator[Case]) -> tuple[list[Result], list[str]]:
    """Every comparison, and those that were refused."""
    results, refused = [], []
    for case in chosen:
        try:
            results.append(judge(case))
            found = results[-1].distance
            print(f"{case.kind}: {case.name}: {found.step_pct:+.1f} %, {found.breakdown_points:.1f} points", flush=True)
        except LumosError as error:
            refused.append(f"- {case.kind}, {case.name}: {error}")
            print(refused[-1], flush=True)
    return results, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results, refused = judged(cases())
    with tempfile.TemporaryDirectory() as folder:
        blind, _ = judged(blind_cases(Path(folder)))
    parts = [HEAD, summary(results), "\n", *(f"{row}\n" for row in rows_of(results))]
    parts += ["\nRefused:\n\n", *(f"{line}\n" for line in refused)] if refused else []
    parts += [BLIND, blind_summary(blind), "\n", *(f"{row}\n" for row in rows_of(blind))]
    parts += [SIZES, *(f"{row}\n" for row in timed_rows()), NEAR, *(f"{row}\n" for row in nearness_rows(results))]
    text = "".join(parts)
    print(text)
    if options.output:
        options.output.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
