"""Writes the measured part of docs/stragglers.md: slowdowns of published jobs, beside what was published.

    python benchmarks/stragglers.py -o docs/stragglers.md

What is above the heading MEASURED in that page is kept. The jobs are read from ../shared/data.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lumos import read_job, replay
from lumos.analysis.slowdown import Slowdown, slowdown
from lumos.analysis.slowdown_causes import Diagnosis, diagnose, job_of
from lumos.analysis.slowdown_jobs import job_of_table
from lumos.read.operation_table import read_operation_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))

from step_times_data import STRAGGLERS, STRAGGLERS_BLIND, Recorded, unpack  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
JOBS = DATA / "public" / "straggler_jobs"
MEASURED = "## Checked against published jobs\n"
TRACES = {  # traces of several ranks, and what is known of them
    "package example: one of four ranks runs more kernels": (ROOT / "src/lumos/data/example", ""),
    "TorchRec on V100, one rank sleeps": (DATA / "public/torchrec_v100/sst_sleep_pl_dense_after_backward_2", ""),
    "Megatron on A100, eight ranks": (DATA / "public/megatron_tp8_a100/kineto", ""),
    "H200, four stages that share a GPU": (DATA / "h200/multirank/pp4_mb8", "rank?.pt.trace.json.gz"),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("-o", "--output", type=Path, help="the page, whose measured part is replaced")
    output = options.parse_args().output
    text = "".join(f"{line}\n" for line in page())
    if output is None:
        print(text)
        return
    kept = output.read_text("utf-8").split(MEASURED)[0]
    output.write_text(f"{kept}{MEASURED}\n{text}", "utf-8")


def page() -> Iterator[str]:
    if not JOBS.is_dir():
        raise SystemExit(f"{JOBS} is not on this machine")
    names = sorted(path.stem.removeprefix("trace-") for path in JOBS.glob("trace-*.parquet"))
    found = {name: job(name) for name in names}
    yield "Measured by `benchmarks/stragglers.py` on the jobs that the authors published with their results; nothing"
    yield "was fitted on them."
    yield ""
    yield from overview(found)
    yield from differences(found)
    yield from causes({f"job {name}": diagnosis for name, (diagnosis, _, _) in found.items()})
    yield from traces()
    yield from mended()


Found = dict[str, tuple[Diagnosis, dict[str, Any], float]]


def job(name: str) -> tuple[Diagnosis, dict[str, Any], float]:
    """What Lumos says of a published job, what was published, and how long it took."""
    table = JOBS / f"trace-{name}.parquet"
    slowdown(job_of_table(read_operation_table(table)))  # compiled loops are loaded
    began = time.perf_counter()
    diagnosis = diagnose(slowdown(job_of_table(read_operation_table(table))))
    took = time.perf_counter() - began
    told = json.loads((JOBS / f"result-{name}.json").read_text())
    for key in ("ms", "mw"):
        told |= {key: json.loads((JOBS / f"{key}-{name}.json").read_text())[key.capitalize()]}
    return diagnosis, told, took


def overview(found: Found) -> Iterator[str]:
    yield "| job | GPUs | steps | slowdown | published | Mw | published | Ms | published | seconds |"
    yield "|---|" + "---:|" * 9
    for name, (diagnosis, told, took) in found.items():
        ours, answer = diagnosis.slowdown, diagnosis.as_dict()
        cells = [
            name, ours.job.gpus, len(ours.job.steps), f"{ours.slowdown:.4f}", f"{told['blocking_slowdown']:.4f}",
            f"{answer['mw']:.3f}", f"{told['mw']:.3f}", f"{answer['ms']:.3f}", f"{told['ms']:.3f}", f"{took:.1f}",
        ]  # fmt: skip
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""
    yield "Simulated against recorded steps, as a mean and for the worst step:"
    yield ""
    yield "| job | recorded delays | worst | delays of other steps | worst | no delays |"
    yield "|---|" + "---:|" * 5
    for name, (diagnosis, _, _) in found.items():
        ours = diagnosis.slowdown
        without = 100 * (ours.base_ms.mean() / ours.job.recorded_ms.mean() - 1)
        errors = [ours.error_pct, ours.worst_error_pct, ours.held_out_error_pct, ours.held_out_worst_pct, without]
        yield f"| {name} | " + " | ".join(f"{error:+.2f} %" for error in errors) + " |"
    yield ""
    yield "With the recorded delays of launches, a replay shows only that the graph contradicts nothing. With the"
    yield "median delays of the other half of the steps, it predicts. Slowdowns are measured without delays, as"
    yield "published."
    yield ""


def differences(found: Found) -> Iterator[str]:
    """The largest difference from what was published, in points (hundredths)."""
    yield "Largest difference from the published slowdowns, in points (0.01):"
    yield ""
    yield "| job | by type | by stage | by replica | by worker | by step |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, (diagnosis, told, _) in found.items():
        ours = diagnosis.slowdown
        stages = {int(k): v for k, v in told["blocking_decompose_by_stage"].items()}
        replicas = {int(k): v for k, v in told["blocking_decompose_by_dp_rank"].items()}
        workers = [min(stages[w.stage or 0], replicas[w.dp_rank or 0]) for w in ours.job.workers]
        steps = [told["blocking_step_slowdown"][step] for step in ours.job.steps]
        types = told["blocking_decompose_by_optype"]
        values = [
            largest([ours.by_type[k] for k in types], list(types.values())),
            largest([ours.by_stage[k] for k in stages], list(stages.values())),
            largest([ours.by_dp_rank[k] for k in replicas], list(replicas.values())),
            largest(ours.of_worker.tolist(), workers),
            largest((ours.base_ms / ours.ideal_ms).tolist(), steps),
        ]
        yield f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |"
    yield ""


def largest(ours: list[float], published: list[float]) -> float:
    return 100 * float(np.abs(np.array(ours) - np.array(published)).max())


def causes(found: dict[str, Diagnosis]) -> Iterator[str]:
    yield "| job | cause | where | of the step | evidence |"
    yield "|---|---|---|---:|---|"
    for name, diagnosis in found.items():
        for cause in diagnosis.causes[:3]:
            yield f"| {name} | {cause.kind} | {cause.name} | {cause.gain_pct:.1f} % | {cause.evidence} |"
    yield ""


def traces() -> Iterator[str]:
    yield "Traces of several ranks, and what is known of them:"
    yield ""
    yield "| trace | slowdown | worst rank | alone | next rank | cause |"
    yield "|---|---:|---:|---:|---:|---|"
    for name, (path, match) in TRACES.items():
        if not path.is_dir():
            continue
        diagnosis = diagnose(slowdown(job_of(replay(read_job(path, match)))))
        ours: Slowdown = diagnosis.slowdown
        first, second = ours.slowest[:2].tolist()
        named = "; ".join(
            f"{cause.kind}: {cause.evidence}" for cause in diagnosis.causes if cause.kind == "slow worker"
        )
        cells = [f"{ours.slowdown:.3f}", str(ours.job.workers[first].rank), f"{ours.of_worker[first]:.3f}",
                 f"{ours.of_worker[second]:.3f}", named or "–"]  # fmt: skip
        yield f"| {name} | " + " | ".join(cells) + " |"


def mended() -> Iterator[str]:
    """What a slow rank costs according to its trace, beside the same job without it."""
    yield ""
    yield "## Checked by mending"
    yield ""
    yield "Jobs on one H200 (`calibration/step_times_h200.py`), recorded with a rank that pauses or has more kernels"
    yield "to run, and without. From the trace of the slow job, `lumos stragglers` says which rank it is, and what the"
    yield "job would gain if that were like the others. Measured: the difference of median steps of the two jobs, while"
    yield "they were profiled, and later. The same job started again differs by up to 2 ms. *Blind* jobs (`--set"
    yield "stragglers-blind`) were recorded once it was fixed how ranks are compared; the others were in sight."
    yield ""
    yield "| job | blind | slow rank | named | gain predicted, ms | measured, profiled | measured, clean |"
    yield "|---|---|---|---|---|---|---|"
    for archive, blind in ((STRAGGLERS_BLIND, "yes"), (STRAGGLERS, "")):
        with tempfile.TemporaryDirectory() as folder:
            runs = {run.name: run for run in unpack(archive, Path(folder))}
            for run in runs.values():
                if run.is_traced:
                    yield _mended_row(run, runs[f"{run.name.split('_')[0]}_even"], blind)


def _mended_row(run: Recorded, even: Recorded, blind: str) -> str:
    found = diagnose(slowdown(job_of(replay(read_job(run.traces)))))
    slow = next((cause for cause in found.causes if cause.kind == "slow worker"), None)
    named, gain = ("none", "") if slow is None else (slow.name, f"{slow.gain_ms:.1f}")
    true = run.record["slow_rank"]
    if run is even:
        return f"| {run.name} | {blind} | none | {named} | {gain} | | |"
    profiled, clean = (float(np.median(run.ms(when)) - np.median(even.ms(when))) for when in ("profiled", "after"))
    return f"| {run.name} | {blind} | {true} | {named} | {gain} | {profiled:.1f} | {clean:.1f} |"


if __name__ == "__main__":
    main()
