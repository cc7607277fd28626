"""Lumos: what a training run will do, from its trace or from its description.

>>> from lumos import predict, replay                         # doctest: +SKIP
>>> predict("run.toml").step_ms                               # doctest: +SKIP
>>> run = replay("traces")                                    # doctest: +SKIP
>>> predict(run, ["compute=0.5"]).step_ms                     # doctest: +SKIP
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lumos.analysis.comparison import compare
    from lumos.analysis.readiness import check
    from lumos.analysis.replay import Replay, replay
    from lumos.analysis.slowdown_causes import stragglers
    from lumos.capture.recording import capture
    from lumos.dry_run.from_script import predict_recording
    from lumos.dry_run.in_process import dry_run
    from lumos.dry_run.recorded_step import Recording
    from lumos.errors import LumosError
    from lumos.graph.scaling import Scale
    from lumos.prediction.bill import Tariff
    from lumos.prediction.gpu_comparison import GpuComparison, compare_gpus
    from lumos.prediction.prediction import Prediction, predict
    from lumos.read.job import read_job
    from lumos.risk.monte_carlo import StepRisk, step_risk
    from lumos.risk.whole_run import WholeRun, whole_run
    from lumos.search.ranking import Objective
    from lumos.search.search import search
    from lumos.setup import Setup, read_setup, write_setup
    from lumos.trace.trace import Trace

_HOME = {
    "GpuComparison": "prediction.gpu_comparison", "LumosError": "errors", "Prediction": "prediction.prediction",
    "Recording": "dry_run.recorded_step",
    "Replay": "analysis.replay", "Scale": "graph.scaling", "Setup": "setup", "Trace": "trace.trace",
    "compare": "analysis.comparison", "compare_gpus": "prediction.gpu_comparison", "predict": "prediction.prediction",
    "predict_recording": "dry_run.from_script",
    "read_job": "read.job", "read_setup": "setup", "replay": "analysis.replay", "search": "search.search",
    "StepRisk": "risk.monte_carlo", "step_risk": "risk.monte_carlo", "WholeRun": "risk.whole_run",
    "whole_run": "risk.whole_run", "write_setup": "setup",
    "Objective": "search.ranking", "Tariff": "prediction.bill", "check": "analysis.readiness",
    "stragglers": "analysis.slowdown_causes",
}  # fmt: skip

__all__ = [
    "GpuComparison", "LumosError", "Objective", "Prediction", "Recording", "Replay", "Scale", "Setup", "StepRisk",
    "Tariff", "Trace", "WholeRun", "capture", "check", "compare", "compare_gpus", "dry_run", "predict",
    "predict_recording", "read_job", "read_setup", "replay", "search", "step_risk", "stragglers", "whole_run",
    "write_setup",
]  # fmt: skip


class _PublicNames(ModuleType):
    """The package, whose public names are imported on first use: `lumos --help` must not wait for numpy.

    Some functions are called like the package that holds them (`lumos.search`). Importing that package would put it in
    the function's place; a property cannot be replaced, so the public name always means the function.
    """

    @property
    def search(self) -> Any:
        return _public("search")

    @search.setter
    def search(self, package: ModuleType) -> None:
        """Python binds an imported package to its parent; the name is taken."""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})

    def __getattr__(self, name: str) -> Any:
        if name in ("capture", "dry_run"):
            return import_module(f"lumos.{name}")  # which is called as the function of its name
        if name not in _HOME:
            raise AttributeError(f"module 'lumos' has no attribute {name!r}")
        return _public(name)


def _public(name: str) -> Any:
    return getattr(import_module(f"lumos.{_HOME[name]}"), name)


sys.modules[__name__].__class__ = _PublicNames
