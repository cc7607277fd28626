"""Tables of step times, as training scripts log them: CSV or JSON, with a number for every step and perhaps its rank.

step,ms,rank          [812.4, 809.9, 811.0]          {"step_s": [0.812, 0.81]}
1,812.4,0
"""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from lumos.errors import InputError
from lumos.files import read_file
from lumos.graph.graph import Floats

_MOST_BYTES = 1 << 26
_MILLISECONDS = {
    "ms": 1.0, "step_ms": 1.0, "step_time_ms": 1.0, "s": 1e3, "seconds": 1e3, "step_s": 1e3, "step_time_s": 1e3,
}  # fmt: skip
_STEP = ("step", "iteration")
_ADVICE = f"a table of step times has a column {', '.join(_MILLISECONDS)}, and perhaps step and rank (docs/risk.md)"
_WARM_UP = 1.3  # times the median: slower steps at the beginning are left out
_FEWEST = 3
_SHORTEST_MS, _LONGEST_MS = 1e-3, 8.64e7  # a microsecond, a day


def read_step_times(path: Path) -> tuple[Floats, int]:
    """Milliseconds as (ranks, steps), of steps that all ranks have; how many slow ones at the start were left out."""
    text = read_file(path, _MOST_BYTES, _ADVICE)
    try:
        decoded = text.decode("utf-8-sig")
        is_json = decoded.lstrip().startswith(("[", "{"))
        rows = _json_rows(path, json.loads(decoded)) if is_json else _csv_rows(decoded)
    except (UnicodeDecodeError, ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{path}: not a table ({str(error)[:100]}); {_ADVICE}") from None
    ranks: dict[str, dict[str, float]] = {}
    for number, row in enumerate(rows):
        rank, ms = str(row.get("rank", "")), _milliseconds(path, number, row)
        mine = ranks.setdefault(rank, {})
        mine[str(next((row[name] for name in _STEP if name in row), len(mine)))] = ms
    shared = [step for step in next(iter(ranks.values()), {}) if all(step in mine for mine in ranks.values())]
    times = np.array([[mine[step] for step in shared] for mine in ranks.values()])
    late = _warm_up(times) if times.size else 0
    if times.size == 0 or times.shape[1] - late < _FEWEST:
        raise InputError(f"{path}: fewer than {_FEWEST} steps that all ranks have; {_ADVICE}")
    return times[:, late:], late


def _warm_up(times: Floats) -> int:
    """How many steps at the beginning are slower than usual: compilation, caches, allocations."""
    step = times.mean(axis=0)
    usual = step <= _WARM_UP * np.median(step)
    return int(np.argmax(usual))


def _csv_rows(text: str) -> list[dict[str, Any]]:
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    return [{str(key).strip().lower(): value for key, value in row.items()} for row in rows]


def _json_rows(path: Path, data: Any) -> list[dict[str, Any]]:
    """A list of numbers or of rows, or an object with a list of numbers under the name of a column."""
    if isinstance(data, dict):
        name = next((name for name in _MILLISECONDS if isinstance(data.get(name), list)), None)
        if name is None:
            raise InputError(f"{path}: no list of step times in it; {_ADVICE}")
        return [{name: value} for value in data[name]]
    if not isinstance(data, list):
        raise InputError(f"{path}: no list of step times in it; {_ADVICE}")
    return [
        {key.lower(): value for key, value in row.items()} if isinstance(row, dict) else {"ms": row} for row in data
    ]


def _milliseconds(path: Path, number: int, row: dict[str, Any]) -> float:
    name = next((name for name in _MILLISECONDS if name in row), None)
    if name is None:
        raise InputError(f"{path}: row {number + 1} has no step time; {_ADVICE}")
    try:
        value = float(row[name]) * _MILLISECONDS[name] if not isinstance(row[name], bool) else math.nan
    except (TypeError, ValueError):
        value = math.nan
    if not _SHORTEST_MS <= value <= _LONGEST_MS:
        raise InputError(f"{path}: row {number + 1}: {name} {str(row[name])[:40]!r} is not a step time; {_ADVICE}")
    return value
