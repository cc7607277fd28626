"""Stopwatch: how long a call takes on the GPU, from a cold cache.

The convention of every cost in this package: the second-level cache is flushed before each repetition, and the median
of the repetitions counts. A short sleep on the GPU before the call lets the host run ahead, so that what is timed is
the kernels and not their launch; the optimizer alone is timed with its launch: nobody runs it any other way.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from lumos.measure.sample.operator_calls import Call, prepare

_FLUSH_BYTES = 256 << 20  # several times the second-level cache of any GPU
_LEAD_CYCLES = 400_000  # about 0.2 ms
_LONG_LEAD_CYCLES = 2_400_000  # a backward pass of many operators takes the host about a millisecond to issue
_TARGET_S = 0.012  # spent on the repetitions of one row
_FEWEST, _MOST = 5, 20
_WITH_LAUNCH = frozenset({"adamw_fused"})
_NO_LEAD = frozenset({"gemm", "bmm", "mul", "add", "gelu", "silu", "copy", "cast_f32", "rms_norm", "layer_norm"})


class Stopwatch:
    """Times calls on one CUDA device; holds the buffer that flushes its cache."""

    def __init__(self) -> None:
        self.about = {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        }  # fmt: skip
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def measured(self, row: dict[str, Any]) -> dict[str, Any]:
        """The time of a row, or why it has none: an operator that this GPU or torch lacks must not end the run."""
        answer = self._tried(row)
        if answer.get("error") == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # what rows before it left in pieces may have been in the way
            answer = self._tried(row)
        return answer

    def is_alive(self) -> bool:
        """Whether the GPU still takes work."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _tried(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"us": round(self.microseconds(row), 3)}
        except torch.cuda.OutOfMemoryError:
            return {"error": _OUT_OF_MEMORY}
        except (RuntimeError, AttributeError, ValueError) as problem:
            return {"error": (str(problem).splitlines() or [type(problem).__name__])[0][:120]}

    def microseconds(self, row: dict[str, Any]) -> float:
        """The median time of the operator that `row` describes."""
        call = prepare(row, "cuda")
        lead = _lead(row["op"])
        call()
        first = self._repeat(call, 2, lead)
        count = round(_TARGET_S / (min(first) / 1e6 + 1.2e-4))
        return median(self._repeat(call, max(_FEWEST, min(_MOST, count)), lead))

    def _repeat(self, call: Call, count: int, lead: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            self._flush.zero_()
            if lead:
                torch.cuda._sleep(lead)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]


_OUT_OF_MEMORY = "out of memory"


def _lead(operator: str) -> int:
    """Cycles that the GPU sleeps before the call."""
    if operator in _WITH_LAUNCH | _NO_LEAD:
        return 0
    return _LONG_LEAD_CYCLES if operator.endswith("_bwd") or "eager" in operator else _LEAD_CYCLES
