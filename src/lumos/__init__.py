"""Lumos: what a training run will do, from its trace or from its description.

>>> from lumos import forecast, read_job, read_setup, replay  # doctest: +SKIP
>>> run = replay(read_job(Path("traces")))                    # doctest: +SKIP
>>> forecast(read_setup(Path("run.toml"))).step_ms            # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lumos.anchors.edit import Source, change
    from lumos.capture.recording import capture
    from lumos.choice.question import search
    from lumos.errors import LumosError
    from lumos.forecasting import Forecast, forecast
    from lumos.readers.job import read_job
    from lumos.reports.comparison import compare
    from lumos.run import Prediction, Replay, predict, replay
    from lumos.scenario import Scale
    from lumos.setups import Setup, read_setup, write_setup
    from lumos.trace import Trace

_HOME = {
    "Forecast": "forecasting", "LumosError": "errors", "Prediction": "run", "Replay": "run", "Scale": "scenario",
    "Setup": "setups", "Source": "anchors.edit", "Trace": "trace", "capture": "capture", "change": "anchors.edit",
    "compare": "reports.comparison", "forecast": "forecasting", "predict": "run", "read_job": "readers.job",
    "read_setup": "setups", "replay": "run", "search": "choice.question", "write_setup": "setups",
}  # fmt: skip

__all__ = [
    "Forecast", "LumosError", "Prediction", "Replay", "Scale", "Setup", "Source", "Trace", "capture", "change",
    "compare", "forecast", "predict", "read_job", "read_setup", "replay", "search", "write_setup",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import on first use: `lumos --help` must not wait for numpy."""
    if name not in _HOME:
        raise AttributeError(f"module 'lumos' has no attribute {name!r}")
    from importlib import import_module

    if name == "capture":
        return import_module("lumos.capture")  # which is called as the function of its name
    return getattr(import_module(f"lumos.{_HOME[name]}"), name)
