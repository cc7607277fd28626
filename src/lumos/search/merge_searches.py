"""Merge: the parts of a search that was divided into shards, as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lumos.search.outcome import Row, explained


def merged_search(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer that one search over everything would have given."""
    first = parts[0]
    common = set(first["warnings"]).intersection(*(part["warnings"] for part in parts[1:]))
    best = sorted((row for part in parts for row in part["results"]), key=lambda row: (row["value"], row["number"]))
    bounds = [part["bound_ms"] for part in parts if part["bound_ms"] is not None]
    return first | {
        "evaluated": sum(part["evaluated"] for part in parts),
        "fitting": sum(part["fitting"] for part in parts),
        "simulated": sum(part["simulated"] for part in parts),
        "seconds": sum(part["seconds"] for part in parts),
        "bound_ms": min(bounds, default=None),
        "results": explained(best[: first["top"]]),
        "pareto": _undominated([row for part in parts for row in part["pareto"]]),
        "warnings": [text for text in first["warnings"] if text in common],
    }


def _undominated(rows: Sequence[Row]) -> list[Row]:
    kept: list[Row] = []
    for row in sorted(rows, key=lambda r: (r["step_ms"], r["memory_gib"], _cost(r), r["number"])):
        if not any(other["memory_gib"] <= row["memory_gib"] and _cost(other) <= _cost(row) for other in kept):
            kept.append(row)
    return kept


def _cost(row: Row) -> float:
    return float(row["cost_per_mtoken"] if row["cost_per_mtoken"] is not None else row["gpu_hours_per_mtoken"])
