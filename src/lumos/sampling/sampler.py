"""Sampler: measures the rows of a grid, one JSON line each, and goes on where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from lumos.errors import InputError, OptionError
from lumos.sampling.grid import Row

Progress = Callable[[int, int, str], None]


def sample(
    grid: Iterable[Row], output: Path, seconds: float = float("inf"), progress: Progress | None = None
) -> tuple[int, int]:
    """Measure what `output` does not hold yet, until `seconds` have passed; (measured now, still to do)."""
    torch = _torch()
    from lumos.sampling.stopwatch import Stopwatch

    rows = list(grid)
    done = _rows_in(output, torch.cuda.get_device_name())
    todo = [row for row in rows if _key(row) not in done]
    stopwatch, began, measured = Stopwatch(), time.monotonic(), 0
    with output.open("a") as file:
        if not done and output.stat().st_size == 0:
            _append(file, {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda})
        for row in todo:
            if time.monotonic() - began > seconds:
                break
            _append(file, row | _measured(stopwatch, row, torch))
            measured += 1
            if progress is not None:
                progress(len(rows) - len(todo) + measured, len(rows), str(row["op"]))
    return measured, len(todo) - measured


def _measured(stopwatch: Any, row: Row, torch: Any) -> dict[str, Any]:
    """The time of a row, or why it has none: an operator that this GPU or torch lacks must not end the run."""
    try:
        return {"us": round(stopwatch.microseconds(row), 3)}
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"error": "out of memory"}
    except (RuntimeError, AttributeError, ValueError) as problem:
        return {"error": str(problem).splitlines()[0][:120]}


def _append(file: TextIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


def _key(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((key, value) for key, value in row.items() if key not in ("us", "error")))


def _rows_in(output: Path, gpu: str) -> set[tuple[tuple[str, Any], ...]]:
    if not output.exists():
        return set()
    done = set()
    for number, line in enumerate(output.read_text().splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError:
            continue  # the line that was being written when the last run was stopped
        if not isinstance(value, dict):
            raise InputError(f"{output}:{number}: not a row of samples; name another file with -o")
        if "gpu" in value and value["gpu"] != gpu:
            raise InputError(f"{output}: holds samples of {value['gpu']}, this is {gpu}; name another file with -o")
        done.add(_key(value))
    return done


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise OptionError("lumos sample needs torch with CUDA: pip install torch, on the machine with the GPU") from None
    if not torch.cuda.is_available():
        raise OptionError("lumos sample needs a CUDA GPU, and torch sees none here; run it on the machine with the GPU")
    return torch
