"""Fits the measured figures of data/variability.json to recordings of step times on one H200.

    .venv/bin/python calibration/fit_variability.py [--write]

Only runs that are marked "fit" count (step_times_h200.py marks them before anything is recorded). What decided their
steps is read off their traces; two of them came back without traces, and are small models that only a host can slow.

For described runs ("usual"), of which every pass is drawn:
    host         the host's work in one step against its neighbours, in traces
    step         kernels of a GPU in one step: sum over the step in the trace, and medians of six blocks of clean steps
    kernel       kernels of the forward pass against those of the backward pass, in traces
    pauses       single steps far above the others

For traced runs ("traced"), of which whole steps are drawn, the drift over minutes included:
    host         steps that the host decides, without pauses: mean quantiles over the runs
    collective   the same for ranks that share the GPU and talk over loopback sockets
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lumos import read_job, replay
from lumos.risk.recurring_tasks import HOST, KERNEL, RecurringTasks
from lumos.risk.traced_steps import TracedSteps
from shipped import DATA
from step_times_data import DEVELOPMENT, Floats, Recorded, unpack

HOST_RUNS = ("llama_host", "compiled", "loader", "experts")
COLLECTIVE_RUNS = ("ddp2", "fsdp2", "pp2")
GPU_RUNS = ("llama_gpu",)
PROBABILITIES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
BLOCKS = 6
FAR = 4.0  # standard deviations above the median, from which on a step has paused


def logs(run: Recorded) -> Floats:
    """Clean steps against their median."""
    return np.log(run.clean / np.median(run.clean))


def sigma(values: Floats) -> float:
    low, high = np.quantile(values, [0.16, 0.84])
    return float(high - low) / 2


def steady(run: Recorded) -> Floats:
    """Clean steps without those that paused."""
    found = logs(run)
    return found[found < FAR * sigma(found)]


def quantiles(runs: list[Recorded]) -> dict[str, list[float]]:
    """Mean quantiles of several runs, as factors; the median is 1."""
    mean = np.mean([np.quantile(steady(run), PROBABILITIES) for run in runs], axis=0)
    factors = np.exp(mean - mean[PROBABILITIES.index(0.5)])
    return {"p": list(PROBABILITIES), "factor": [round(float(factor), 4) for factor in factors]}


def pauses(runs: list[Recorded]) -> dict[str, float]:
    """How often a step pauses, and for how long."""
    steps, found = 0, []
    for run in runs:
        steps += len(run.clean)
        far = logs(run) >= FAR * sigma(logs(run))
        found += (run.clean[far] - np.median(run.clean)).tolist()
    long = np.array([ms for ms in found if ms > 10.0])  # shorter ones are the tails of the spreads
    spread = round(float(np.log(long).std(ddof=1)), 2)
    return {"probability": round(len(long) / steps, 4), "ms": round(float(np.median(long)), 1), "spread": spread}


def passes(tasks: RecurringTasks, lane: Floats) -> float:
    """How far kernels of the two passes of a step differ from each other, over the steps."""
    shares = []
    for one in np.unique(lane[(tasks.part == KERNEL) & (lane >= 0)]):
        chosen = (tasks.part == KERNEL) & (lane == one) & (tasks.step >= 0) & (tasks.task >= 0)
        if chosen.sum() > 100:
            spent = np.bincount(tasks.step[chosen], tasks.graph.duration[chosen], tasks.steps)
            shares.append(spent / np.bincount(tasks.step[chosen], tasks.typical_duration[chosen], tasks.steps))
    return float(np.log(shares[0] / shares[1]).std() / np.sqrt(2)) if len(shares) > 1 else float("nan")


def of_trace(run: Recorded) -> tuple[float, float, float]:
    """Standard deviations of the host and of kernels from step to step, and of kernels of one pass to the other."""
    played = replay(read_job(run.traces))
    steps, nodes = TracedSteps(played), played.execution.nodes
    tasks = steps.tasks
    lane = np.full(len(tasks.graph), -1)
    lane[: len(nodes)] = np.where(nodes.launch_of_node >= 0, nodes.trace.lane[nodes.launch_of_node], -1)
    return float(steps.shown[HOST]), float(steps.shown[KERNEL]), passes(tasks, lane)


def drift_of(run: Recorded) -> float:
    """How far medians of blocks of clean steps differ."""
    return float(np.std([np.median(block) for block in np.array_split(logs(run), BLOCKS)]))


def fitted(runs: list[Recorded]) -> dict[str, Any]:
    by_name = {run.name: run for run in runs if run.use == "fit"}
    alone = [of_trace(by_name[name]) for name in (*GPU_RUNS, *HOST_RUNS) if by_name[name].is_traced]
    drift = [drift_of(by_name[name]) for name in GPU_RUNS]
    return {
        "usual.step": round(float(np.hypot(alone[0][1], np.mean(drift))), 4),
        "usual.kernel": round(float(np.nanmean([one[2] for one in alone])), 4),
        "usual.host": round(float(np.mean([one[0] for one in alone])), 3),
        "traced.pauses": pauses(list(by_name.values())),
        "traced.host": quantiles([by_name[name] for name in HOST_RUNS]),
        "traced.collective": quantiles([by_name[name] for name in COLLECTIVE_RUNS]),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = fitted(unpack(DEVELOPMENT, Path(folder)))
    for key, value in found.items():
        print(f"{key:18}", value)
    if "--write" not in sys.argv:
        return
    path = DATA / "variability.json"
    table = json.loads(path.read_text("utf-8"))
    for name, value in found.items():
        section, _, key = name.partition(".")
        if table[section].get(key) != value:
            table[section][key] = value
            table["sources"][name]["date"] = datetime.now(UTC).date().isoformat()
    path.write_text(text_of(table), "utf-8")


def text_of(table: dict[str, Any]) -> str:
    """Two levels of keys, one value a line."""
    parts = []
    for name, part in table.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in part.items()]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
