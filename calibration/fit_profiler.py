"""Fit what the profiler costs, from the recordings in records.tar.xz, and write src/lumos/data/profiler.json.

    python3 calibration/fit_profiler.py [--records calibration/records.tar.xz] [-o src/lumos/data/profiler.json]

Every recording comes with steps measured before the process was first profiled and after the profiler had stopped.
The cost per kernel comes from the micro-benchmark of the same recordings; the upper bounds per operator and call are
set by hand, and matter only where little is recorded. The shares are the ones with the least mean squared error over
the cases (of the logarithm, so that short steps count as much as long ones). A job of several ranks is too short for
"after" to settle: there the mean of before and after counts. `error_pct` is of these same recordings; docs/accuracy.md
has the errors on others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lumos.analysis.replay import Replay, replay
from lumos.graph.graph import simulate
from lumos.graph.rules.profiler_cost import ProfilerCost, without_profiler
from lumos.read.job import read_job
from shipped import unpack_records

SHARES = np.round(np.arange(0.40, 0.86, 0.01), 2)
OPERATOR_US, CALL_US = 10.0, 4.0  # set by hand, well above what the micro-benchmarks show in warm loops


@dataclass(frozen=True)
class Recording:
    """A recorded run and what its steps take without the profiler."""

    name: str
    run: Replay
    stopped_ms: float
    fresh_ms: float
    shapes: bool = True


def recordings(folder: Path) -> list[Recording]:
    """All recordings of all runs in a folder."""
    found = []
    for run in sorted(folder.glob("run*")):
        results = json.loads((run / "results.json").read_text())
        for name, record in results["single"].items():
            found += single(run, name, record)
        for job in sorted((run / "multirank").iterdir()):
            found.append(several_ranks(run, job))
    return found


def single(run: Path, name: str, record: dict[str, Any]) -> list[Recording]:
    """The recordings of one model, each with the clean steps around it."""
    found, before = [], None
    fresh = 1e3 * record["clean_before_median"]
    for variant, cycle in {"": record, **record["variants"]}.items():
        after = 1e3 * cycle["clean_after_median"]
        path = run / "single" / cycle["trace"].removesuffix(".gz")
        if path.exists():
            stopped = after if before is None else (after + before) / 2
            shapes = variant != "noshapes"
            label = f"{run.name} {name}" + ("" if shapes else " without shapes")
            found.append(Recording(label, replay(read_job(path)), stopped, fresh, shapes))
        before = after
    return found


def several_ranks(run: Path, job: Path) -> Recording:
    ranks = [json.loads(path.read_text()) for path in sorted(job.glob("rank?.json"))]
    fresh = 1e3 * statistics.mean(r["step_s_median"] for r in ranks)
    after = 1e3 * statistics.mean(statistics.median(r["step_s_after"]) for r in ranks)
    return Recording(f"{run.name} {job.name}", replay(read_job(job, match="*.trace.json")), (fresh + after) / 2, fresh)


def predicted(recording: Recording, cost: ProfilerCost) -> float:
    """Milliseconds of a step without the profiler."""
    execution = recording.run.execution
    times = simulate(without_profiler(execution, cost))
    return recording.run.marks.read(execution.retime(times)).typical


def errors(found: list[Recording], cost: ProfilerCost, truth: Callable[[Recording], float]) -> dict[str, list[float]]:
    """Logarithm of predicted over measured, by case."""
    by_case: dict[str, list[float]] = {}
    for recording in found:
        by_case.setdefault(recording.name, []).append(float(np.log(predicted(recording, cost) / truth(recording))))
    return by_case


def best_share(found: list[Recording], cost: ProfilerCost, truth: Callable[[Recording], float]) -> float:
    def loss(share: float) -> float:
        by_case = errors(found, msgspec.structs.replace(cost, kept_share=share, no_shapes_kept_share=share), truth)
        return statistics.mean(statistics.mean(e * e for e in case) for case in by_case.values())

    return float(min(SHARES, key=loss))


def kernel_gap_us(folder: Path) -> float:
    """What recording adds to back-to-back kernels, by the micro-benchmark; the median over runs and kernels."""
    added = []
    for run in folder.glob("run*"):
        gaps = json.loads((run / "results.json").read_text())["micro"]["gpu_us_per_kernel"]
        added += [gaps["shapes_syncevents"][k]["us_median"] - gaps["off"][k]["us_median"] for k in gaps["off"]]
    return round(statistics.median(added), 2)


def fit(folder: Path) -> tuple[ProfilerCost, list[Recording]]:
    found = recordings(folder)
    cost = ProfilerCost(OPERATOR_US, CALL_US, 0.6, 0.6, 0.6, kernel_gap_us(folder))
    shapes, no_shapes = [r for r in found if r.shapes], [r for r in found if not r.shapes]
    cost = msgspec.structs.replace(
        cost,
        kept_share=best_share(shapes, cost, lambda r: r.stopped_ms),
        no_shapes_kept_share=best_share(no_shapes, cost, lambda r: r.stopped_ms),
        fresh_kept_share=best_share(shapes, cost, lambda r: r.fresh_ms),
    )
    flat = [abs(e) for case in errors(found, cost, lambda r: r.stopped_ms).values() for e in case]
    made = f"calibration/fit_profiler.py, {datetime.now(UTC).date()}"
    source = f"{len(found)} recordings on NVIDIA H200, torch 2.11, calibration/records.tar.xz; {made}"
    return msgspec.structs.replace(cost, error_pct=round(100 * float(np.quantile(flat, 0.8)), 1), source=source), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--records", type=Path, default=here / "records.tar.xz")
    parser.add_argument("-o", "--output", type=Path, default=here.parent / "src/lumos/data/profiler.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unpack_records(folder, arguments.records)
        cost, found = fit(Path(folder))
    for recording in found:
        guess, fresh = predicted(recording, cost), predicted(recording, cost.fresh())
        print(
            f"{recording.name:40} recorded {recording.run.recorded_steps.mean:7.2f}  "
            f"stopped {recording.stopped_ms:7.2f} → {guess:7.2f} ({100 * (guess / recording.stopped_ms - 1):+5.1f} %)  "
            f"fresh {recording.fresh_ms:7.2f} → {fresh:7.2f} ({100 * (fresh / recording.fresh_ms - 1):+5.1f} %)"
        )
    arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(cost), indent=2) + b"\n")
    print(msgspec.json.encode(cost).decode())


if __name__ == "__main__":
    main()
