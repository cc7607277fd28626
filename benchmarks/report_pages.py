"""The reports that the screenshots and the speed of reports are made of: one of every kind."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from lumos import Scale, read_job, replay
from lumos.analysis.comparison import Comparison
from lumos.prediction.prediction import predict
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.page import Page
from lumos.report.html.prediction_page import prediction_page
from lumos.report.html.replay_page import replay_page
from lumos.report.html.search_page import search_page
from lumos.setup import read_setup
from lumos.setup.constraints import mistakes_in

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"
LLAMA = ROOT / "examples/llama3-70b.toml"
_ALIKE = 0.05  # GiB
_KEPT = ("step_ms", "mfu", "tokens_per_s_per_gpu", "energy_j", "breakdown")


def every_kind() -> dict[str, Page]:
    """A page of each kind, all from what comes with the project."""
    run = replay(read_job(EXAMPLE))
    changed = predict(run, [Scale("comm", 0.5)])
    return {
        "replay": replay_page(run),
        "what-if": prediction_page(changed),
        "forecast": prediction_page(predict(read_setup(LLAMA))),
        "comparison": comparison_page(Comparison(run, replay(read_job(EXAMPLE, "rank[013]*")))),
        "search": search_page(searched()),
    }


def searched() -> dict[str, Any]:
    """Every valid choice of tp, pp, vpp, cp and recomputation for the example setup, as a search would answer."""
    base = read_setup(LLAMA)
    start = time.perf_counter()
    keys = ("parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "train.recompute")
    choices = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 5), (1, 2, 4), ("none", "selective"))
    setups = ((dict(zip(keys, choice, strict=True)), choice) for choice in choices)
    rows, evaluated = [], 0
    for values, _ in setups:
        setup = base.replaced({**values, "parallel.sequence_parallel": values["parallel.tp"] != 1})
        if mistakes_in(setup):
            continue
        evaluated += 1
        found = predict(setup)
        if found.fits:
            answer = found.as_dict()
            rows.append(values | {key: answer[key] for key in _KEPT} | {"memory_gib": answer["memory_gib"]["peak"]})
    rows.sort(key=lambda row: row["step_ms"])
    return {
        "setup": {"model.preset": "llama3-70b", "cluster.gpus": 512, "cluster.gpu": "h100", "train.global_batch": 1024},
        "evaluated": evaluated,
        "seconds": time.perf_counter() - start,
        "objective": "step_ms",
        "results": rows,
        "pareto": _front(rows),
    }


def _front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows by step time, those that need less memory than every faster one."""
    front: list[dict[str, Any]] = []
    for row in rows:
        if not front or row["memory_gib"] < front[-1]["memory_gib"] - _ALIKE:
            front.append(row)
    return front
