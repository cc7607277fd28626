"""Lumos: what a training run will do, from its trace.

>>> from lumos import Scale, predict, read_job, replay  # doctest: +SKIP
>>> run = replay(read_job(Path("traces")))              # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lumos.capture.recording import capture
    from lumos.errors import LumosError
    from lumos.readers.job import read_job
    from lumos.run import Prediction, Replay, predict, replay
    from lumos.scenario import Scale
    from lumos.trace import Trace

__all__ = ["LumosError", "Prediction", "Replay", "Scale", "Trace", "capture", "predict", "read_job", "replay"]

_HOME = {
    "LumosError": "errors", "Prediction": "run", "Replay": "run", "Scale": "scenario", "Trace": "trace",
    "capture": "capture", "predict": "run", "read_job": "readers.job", "replay": "run",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Import on first use: `lumos --help` must not wait for numpy."""
    if name not in _HOME:
        raise AttributeError(f"module 'lumos' has no attribute {name!r}")
    from importlib import import_module

    if name == "capture":
        return import_module("lumos.capture")  # which is called as the function of its name
    return getattr(import_module(f"lumos.{_HOME[name]}"), name)
