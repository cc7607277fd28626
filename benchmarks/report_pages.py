"""The reports that the screenshots and the speed of reports are made of: one of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lumos import Scale, read_job, replay, search
from lumos.analysis.comparison import Comparison
from lumos.prediction.prediction import predict
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.page import Page
from lumos.report.html.prediction_page import prediction_page
from lumos.report.html.replay_page import replay_page
from lumos.report.html.search_page import search_page
from lumos.setup import read_setup

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"
LLAMA = ROOT / "examples/llama3-70b.toml"
_AXES = {
    "parallel.tp": [1, 2, 4, 8], "parallel.pp": [1, 2, 4, 8, 16], "parallel.vpp": [1, 2, 4, 5],
    "parallel.cp": [1, 2, 4], "parallel.zero": [1], "train.micro_batch": [1], "train.recompute": ["none", "selective"],
}  # fmt: skip


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
    """The answer of a search around the example setup."""
    return search(LLAMA, _AXES).as_dict()
