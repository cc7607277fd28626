"""Writes docs/distributions.md: predicted distributions of steps against recorded ones that nothing was learned from.

    python benchmarks/distributions.py -o docs/distributions.md

Recordings on the H200 are in calibration/; straggler jobs and other traces are read from ../shared/data, if there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))

from lumos import read_job, replay  # noqa: E402
from lumos.graph.graph import Floats  # noqa: E402
from lumos.read.operation_table import read_operation_table  # noqa: E402
from lumos.risk.learn import learn_trace  # noqa: E402
from lumos.risk.operation_steps import OperationSteps  # noqa: E402
from lumos.risk.traced_steps import TracedSteps  # noqa: E402
from lumos.risk.variability import Spread  # noqa: E402
from lumos.trace.operations import OperationTable  # noqa: E402
from step_times_data import BLIND, DEVELOPMENT, LAST, Recorded, unpack  # noqa: E402

DRAWS, SPLITS = 4000, 24
GOAL = 3.0
DISTURBED = "lengths"  # see OPEN
HEAD = """# Distributions

Written by `make accuracy`. A prediction with `--risk` is a distribution of steps ([risk](risk.md)). This page compares
it with recorded steps from which nothing was learned.

## From a trace of a dozen steps to hundreds of others

Recorded on one H200 by `calibration/step_times_h200.py`: a trace of 10 to 14 steps, then 120 to 500 steps of the same
process without a profiler. From the trace alone, `lumos predict --from TRACE --risk` says how far the 90th percentile
is above the median; the error is the difference of these ratios, in points (%). The usual figures
(`data/variability.json`) are fitted on the runs marked "fit". "judge": runs of the same recording that were set aside
before it was made. "blind": a second recording, made after the method was fixed; how draws are put together was
changed once more after it, so that the third, "last", is the one to judge by. "40 steps before": what 40 clean
steps right before the trace say of those after it, which is as much as anyone who watches for a moment can know.

"""
TABLE = """
## From a table of step times

The same recordings without traces: `--variability TABLE` learns from half of the clean steps, and the other half is
predicted. Every second step shows what the method loses; the first half against the second shows how much a machine
changes within seconds.

"""
TWO_STEPS = """
## Traces of two steps

Jobs of the shared data whose ranks share an H200. Two steps show next to nothing: these are the usual figures, on the
graph of the job. 5 to 8 clean steps are little to judge by: as many drawn steps miss their own p90/p50 by what the last
column says.

"""
STRAGGLERS = """
## From half of the workers of a job to its other steps

Jobs with operation tables (`straggler_jobs` of the shared data: AR, 64 GPUs, one slow worker; ST, 8 GPUs, a long last
stage). From half of the workers of every stage, in half of the steps, passes are taken apart and the job is simulated
with other draws; workers that were not seen are drawn from the others. The level is that of the steps that were seen.
The Kolmogorov–Smirnov distance is that of drawn steps from the recorded ones of the other half, over {splits} splits.

"""
FLOOR = """
*Floor*: a sample of as many steps from all recorded steps of the job is that far from them, on average; a prediction
from the exact distribution would not be closer. *Two halves*: the recorded steps that were learned from, against the
others. *Both halves*: every step is drawn from the half that it is not in, and all drawn steps are compared with all
recorded ones. PRISM (arXiv 2510.15596) reports 0.208 for its own jobs, which are not these: the figures cannot be
compared. If the one slow worker of AR is not among those seen, the steps show that something is slow, but not what:
those splits stand apart.
"""
OPEN = """
## Not measured

Distributions of jobs on several nodes, over hours, and over a fleet of GPUs: their spreads are published figures. The
recordings are of one machine whose host is virtual; ranks that share its GPU talk over loopback sockets. `lengths` is a
run whose batches had lengths that it had not met before while it was recorded: each made it allocate memory, and later
steps are eight times as fast.
"""


def ratio(times: Floats, percent: float = 90) -> float:
    """A percentile over the median."""
    return float(np.percentile(times, percent) / np.median(times))


@dataclass(frozen=True)
class Judged:
    """A run whose distribution was predicted from its trace."""

    name: str
    use: str
    decided_by: str
    predicted: Floats
    measured: Floats
    before: Floats

    @property
    def error(self) -> float:
        return 100 * (ratio(self.predicted) - ratio(self.measured))

    @property
    def of_before(self) -> float:
        return 100 * (ratio(self.before) - ratio(self.measured))

    @property
    def row(self) -> str:
        ratios = f"{ratio(self.predicted):.3f} | {ratio(self.measured):.3f}"
        tails = f"{ratio(self.predicted, 99):.2f} | {ratio(self.measured, 99):.2f}"
        errors = f"{self.error:+.1f} | {self.of_before:+.1f}"
        return f"| {self.name} | {self.use} | {self.decided_by} | {ratios} | {errors} | {tails} |"


def judged(run: Recorded, use: str) -> Judged:
    steps = TracedSteps(replay(read_job(run.traces)))
    drawn = steps.drawn_ms(learn_trace(steps.replay, whole_steps=True), DRAWS, 0)
    return Judged(run.name, use, decided_by(steps), drawn, run.clean, run.ms("before"))


def decided_by(steps: TracedSteps) -> str:
    """What makes the step longer."""
    felt = steps.sensitivity()
    names = {"host": "host", "kernel": "GPU", "collective": "network"}
    return names[max(felt, key=lambda part: felt[part])]


def summary(title: str, runs: list[Judged]) -> list[str]:
    """Errors of some runs as a row; none if there are no such runs."""
    runs = [one for one in runs if one.name != DISTURBED]
    if not runs:
        return []
    errors, before = np.abs([one.error for one in runs]), np.abs([one.of_before for one in runs])
    within = int((errors <= GOAL).sum())
    means = f"{errors.mean():.1f} | {np.median(errors):.1f} | {within} | {before.mean():.1f}"
    return [f"| {title} | {len(runs)} | {means} |"]


def from_traces(runs: list[tuple[Recorded, str]]) -> list[str]:
    found = [judged(run, use) for run, use in runs if run.is_traced]
    lines = [
        "| run | use | decided by | p90/p50 predicted | measured | error, points | 40 steps before "
        "| p99/p50 predicted | measured |",
        "|---|---|---|---|---|---|---|---|---|",
        *(one.row for one in sorted(found, key=lambda one: -abs(one.error))),
        "",
        f"| runs, without `{DISTURBED}` | number | mean error, points | median | within 3 points "
        "| mean of 40 steps before |",
        "|---|---|---|---|---|---|",
    ]
    for use in ("fit", "judge", "blind", "last"):
        for place in ("GPU", "host", "network", ""):
            title = f"{use}, decided by the {place}" if place else f"{use}, all"
            lines += summary(title, [one for one in found if one.use == use and place in ("", one.decided_by)])
    missing = [run.name for run, _ in runs if not run.is_traced]
    told = (
        f"\nWithout a trace, as the files that came back were limited in size: {', '.join(missing)}." if missing else ""
    )
    return [*lines, told] if told else lines


def from_tables(runs: list[tuple[Recorded, str]]) -> list[str]:
    """Errors of what half of the clean steps say about the other half."""
    kept = [run for run, _ in runs if run.name != DISTURBED]
    lines = [
        f"| learned from | runs, without `{DISTURBED}` | mean error, points | median | worst | within 3 points |",
        "|---|---|---|---|---|---|",
    ]
    u = (np.arange(DRAWS) + 0.5) / DRAWS
    for title, split in (
        ("every second step", lambda x: (x[::2], x[1::2])),
        ("the first half", lambda x: (x[: len(x) // 2], x[len(x) // 2 :])),
    ):
        errors = []
        for run in kept:
            known, others = split(run.clean)
            errors.append(100 * abs(ratio(Spread.of(known).at(u)) - ratio(others)))
        worst = f"{max(errors):.1f} ({kept[int(np.argmax(errors))].name})"
        within = sum(error <= GOAL for error in errors)
        lines.append(
            f"| {title} | {len(errors)} | {np.mean(errors):.1f} | {np.median(errors):.1f} | {worst} | {within} |"
        )
    return lines


# ---------------------------------------------------------------------- traces of the shared data
def chance_error(drawn: Floats, size: int) -> float:
    """By how many points a sample of drawn steps misses their own p90/p50, on average."""
    random = np.random.default_rng(0)
    return float(np.mean([100 * abs(ratio(random.choice(drawn, size)) - ratio(drawn)) for _ in range(400)]))


def shared_traces(folder: Path) -> list[str]:
    """Jobs of the shared data whose traces have two steps, and whose clean steps were recorded: a handful each."""
    lines = [
        "| job | clean steps | p90/p50 predicted | measured | error, points | expected of so few steps |",
        "|---|---|---|---|---|---|",
    ]
    errors, few = [], []
    for place in sorted((folder / "h200/multirank").glob("*/")):
        if not list(place.glob("rank?.pt.trace.json.gz")):
            continue
        measured = np.mean(
            [json.loads(path.read_text())["step_s"] for path in sorted(place.glob("rank?.json"))], axis=0
        )
        played = replay(read_job(place, "rank?.pt.trace.json.gz"))
        drawn = TracedSteps(played).drawn_ms(learn_trace(played, whole_steps=True), DRAWS, 0)
        errors.append(100 * (ratio(drawn) - ratio(measured)))
        few.append(chance_error(drawn, len(measured)))
        ratios = f"{ratio(drawn):.3f} | {ratio(measured):.3f}"
        lines.append(f"| {place.name} | {len(measured)} | {ratios} | {errors[-1]:+.1f} | {few[-1]:.1f} |")
    lines.append(f"| mean of absolute errors | | | | {np.mean(np.abs(errors)):.1f} | {np.mean(few):.1f} |")
    return lines


# ---------------------------------------------------------------------- straggler jobs
def distance(one: Floats, other: Floats) -> float:
    """Of Kolmogorov and Smirnov: the largest difference of two distribution functions."""
    at = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def recorded_steps(table: OperationTable) -> Floats:
    ends = np.zeros(len(table.steps))
    np.maximum.at(ends, table.step_index, table.end)
    return ends


@dataclass(frozen=True)
class Split:
    """Distances of one way to halve workers and steps."""

    sees_slow: bool
    drawn: float
    halves: float
    both: float


def split(table: OperationTable, seed: int, slow: int | None) -> Split:
    random = np.random.default_rng(seed)
    workers = np.zeros(len(table.workers), bool)
    for stage in range(table.pp):
        mine = [place for place, (_, at) in enumerate(table.workers) if at == stage]
        workers[random.permutation(mine)[: max(1, len(mine) // 2)]] = True
    order = random.permutation(len(table.steps))
    parts = np.zeros(len(order), bool)
    parts[order[: len(order) // 2]] = True
    recorded = recorded_steps(table)
    drawn = []
    for known in (parts, ~parts):
        seen = workers[table.worker] & known[table.step_index]
        drawn.append(seconds_of(OperationSteps(table, seen), seed))
    return Split(
        slow is None or bool(workers[slow]), distance(drawn[0], recorded[~parts]),
        distance(recorded[parts], recorded[~parts]), distance(np.concatenate(drawn), recorded),
    )  # fmt: skip


def seconds_of(steps: OperationSteps, seed: int) -> Floats:
    return steps.drawn_ms(steps.variability, 1000, seed) / 1e3


def floor(recorded: Floats, size: int) -> float:
    random = np.random.default_rng(0)
    return float(np.mean([distance(random.choice(recorded, size), recorded) for _ in range(400)]))


def straggler_jobs(folder: Path) -> list[str]:
    lines = [
        "| job | splits | steps to predict | distance, mean | worst | two halves | floor | both halves | floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((folder / "public/straggler_jobs").glob("trace-*.parquet")):
        table = read_operation_table(path)
        every = OperationSteps(table, np.ones(len(table), bool)).factors
        slow = int(np.nanargmax(every.worker)) if every.is_exception.any() else None
        found = [split(table, seed, slow) for seed in range(SPLITS)]
        recorded = recorded_steps(table)
        for sees in (True, False):
            some = [one for one in found if one.sees_slow is sees]
            if not some:
                continue
            name = path.stem.removeprefix("trace-")
            title = name if slow is None else f"{name}, the slow worker {'seen' if sees else 'not seen'}"
            size = len(recorded) - len(recorded) // 2
            drawn = [one.drawn for one in some]
            lines.append(
                f"| {title} | {len(some)} | {size} | {np.mean(drawn):.3f} | {max(drawn):.3f} | "
                f"{np.mean([one.halves for one in some]):.3f} | {floor(recorded, size):.3f} | "
                f"{np.mean([one.both for one in some]):.3f} | {floor(recorded, len(recorded)):.3f} |"
            )
    return lines


def page(shared: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        runs = [(run, run.use) for run in unpack(DEVELOPMENT, Path(folder) / "development")]
        for use, archive in (("blind", BLIND), ("last", LAST)):
            runs += [(run, use) for run in unpack(archive, Path(folder) / use)]
        lines = [HEAD, *from_traces(runs), TABLE, *from_tables(runs)]
    if shared.exists():
        lines += [TWO_STEPS, *shared_traces(shared)]
        lines += [STRAGGLERS.format(splits=SPLITS), *straggler_jobs(shared), FLOOR]
    return "\n".join([*lines, OPEN]).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared/data")
    arguments = parser.parse_args()
    arguments.output.write_text(page(arguments.shared).rstrip() + "\n", "utf-8")
