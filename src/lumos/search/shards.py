"""Shards: the parts of a search, checked key by key and merged into one answer.

A shard is a file that may have been damaged or edited, so nothing in it is taken for granted: what is missing, of
another type or out of range is refused with its place, before anything is added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from lumos.errors import InputError
from lumos.search.gpu_counts import skipped_rows, tried_rows
from lumos.search.ranking import OBJECTIVES, pareto_front
from lumos.search.search import COUNTS, KEYS, Row, explained

_MOST_SHARDS = 1 << 16

Shard = Annotated[list[Annotated[int, Meta(ge=1, le=_MOST_SHARDS)]], Meta(min_length=2, max_length=2)]
"""Which part of how many, from 1."""

_Number = Annotated[float, Meta(ge=0, le=1e30)]
_Positive = Annotated[float, Meta(gt=1e-30, le=1e30)]
_Any = Annotated[float, Meta(ge=-1e30, le=1e30)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Text = Annotated[str, Meta(max_length=20_000)]
_Value = bool | int | _Any | _Text | None

_WORDS = ("cluster.gpu", "parallel.schedule", "parallel.cp_type", "train.recompute")
_SWITCHES = ("parallel.sequence_parallel",)
_SETTINGS: dict[str, Any] = {key: _Text if key in _WORDS else bool if key in _SWITCHES else _Count for key in KEYS}
_SETTINGS["train.recompute_layers"] = _Count | None

_Pair = Annotated[list[_Number], Meta(min_length=2, max_length=2)]


class _Batch(TypedDict):
    sequences: _Count
    tokens: _Count
    source: _Text
    why: _Text


_ROW: dict[str, Any] = _SETTINGS | {
    "step_ms": _Positive, "p90_ms": _Positive | None, "run_ms": _Positive | None, "bound_ms": _Positive,
    "memory_gib": _Number, "tokens_per_s_per_gpu": _Number,
    "energy_j": _Number, "gpu_hours_per_mtoken": _Number, "cost_per_mtoken": _Number | None, "number": _Count,
    "value": _Positive, "interval_ms": _Pair, "mfu": _Number | None, "breakdown": dict[str, _Any],
    "bubble": _Any | None, "joules_per_token": _Number, "days": _Number | None, "gpu_hours": _Number | None,
    "money": _Number | None,
}  # fmt: skip
_CLUSTER: dict[str, Any] = {
    "cluster.gpu": _Text, "cluster.gpus": _Count, "layouts": _Count, "fitting": _Count, "least_days": _Number | None,
    "batch": _Count, "near_batch": _Count | None,
}  # fmt: skip
_Cluster = TypedDict("_Cluster", _CLUSTER)  # type: ignore[misc]
_Skipped = TypedDict("_Skipped", _CLUSTER | {"why": _Text})  # type: ignore[misc]
_Row = TypedDict("_Row", _ROW)  # type: ignore[misc]
_Result = TypedDict("_Result", _ROW | {"lost_by": _Text})  # type: ignore[misc]
_Family = TypedDict(  # type: ignore[misc]
    "_Family", _ROW | {"lost_by": _Text, "variants": list[dict[str, _Value]], "differ": dict[str, list[_Value]]}
)
_PART: dict[str, Any] = {
    "kind": Literal["search"], "question": _Text, "shard": Shard, "objective": Literal[*OBJECTIVES], "risk": bool,
    "parameters": _Count, "active_parameters": _Count, "global_batch": _Batch,
    "setup": dict[str, _Value | list[_Value]], "tried": dict[str, list[_Value]],
    **dict.fromkeys(COUNTS, _Count), "seconds": _Number, "top": Annotated[int, Meta(ge=1, le=1 << 32)],
    "tolerance": _Number, "bound_ms": _Positive | None, "families": list[_Family], "results": list[_Result],
    "pareto": list[_Row], "best_by_gpu": list[_Row],
    "tried_clusters": list[_Cluster], "skipped": list[_Skipped], "comparison": None, "warnings": list[_Text],
}  # fmt: skip
_Part = TypedDict("_Part", _PART)  # type: ignore[misc]


def checked_part(content: Mapping[str, Any], where: str) -> Row:
    """A shard of a search with its known keys alone, or InputError that names the first that is wrong."""
    try:
        part: Row = msgspec.to_builtins(msgspec.convert(content, _Part))
    except (msgspec.ValidationError, RecursionError) as problem:
        raise InputError(f"{where}: not a whole shard of a search ({problem}); search that shard again") from None
    if bool(part["results"]) != bool(part["pareto"]) or bool(part["results"]) != bool(part["families"]):
        raise InputError(f"{where}: results, families and pareto contradict each other; search that shard again")
    return part


def merged_search(parts: Sequence[Row]) -> Row:
    """The shards of a search as the answer that one search would have given."""
    first = parts[0]
    bounds = [part["bound_ms"] for part in parts if part["bound_ms"] is not None]
    results, by_gpu, tried = _best(parts, "results"), _best_by_gpu(parts), _tried(parts)
    answered = {(row["cluster.gpu"], row["cluster.gpus"]) for row in (*results, *by_gpu)}
    return first | {
        **{key: sum(part[key] for part in parts) for key in COUNTS},
        "bound_ms": min(bounds, default=None),
        "families": _best(parts, "families"),
        "results": results,
        "pareto": pareto_front(
            (row for part in parts for row in part["pareto"]),
            lambda row: (row["step_ms"], row["memory_gib"], _cost(row), row["p90_ms"] or row["step_ms"], row["number"]),
        ),
        "best_by_gpu": by_gpu,
        "tried_clusters": tried,
        "skipped": skipped_rows(tried, answered),
        "warnings": _warnings(parts),
    }


def _tried(parts: Sequence[Row]) -> list[Row]:
    if len({len(part["tried_clusters"]) for part in parts}) > 1:
        raise InputError("the shards tried different GPUs; search them again")
    return tried_rows([part["tried_clusters"] for part in parts])


def _warnings(parts: Sequence[Row]) -> list[str]:
    """The warnings about the best configuration; if no shard has one, those that all shards share."""
    able = [part for part in parts if part["results"]]
    if not able:
        return [text for text in parts[0]["warnings"] if all(text in part["warnings"] for part in parts)]
    winner = min(able, key=lambda part: (part["results"][0]["value"], part["results"][0]["number"]))
    others = sum(part["too_large"] for part in parts) - winner["too_large"]
    unranked = f"{others:,} configurations of other shards are not ranked: their steps have too many micro-batches"
    return [*winner["warnings"], *([unranked] if others else [])]


def _best(parts: Sequence[Row], key: str) -> list[Row]:
    rows = sorted((row for part in parts for row in part[key]), key=lambda row: (row["value"], row["number"]))
    return explained(rows[: parts[0]["top"]], parts[0]["objective"])


def _best_by_gpu(parts: Sequence[Row]) -> list[Row]:
    """The best of all shards, in the order in which the GPUs were asked for."""
    found: dict[tuple[Any, Any], Row] = {}
    for row in (row for part in parts for row in part["best_by_gpu"]):
        best = found.setdefault((row["cluster.gpu"], row["cluster.gpus"]), row)
        if (row["value"], row["number"]) < (best["value"], best["number"]):
            found[row["cluster.gpu"], row["cluster.gpus"]] = row
    return sorted(found.values(), key=lambda row: int(row["number"]))


def _cost(row: Row) -> float:
    return float(row["gpu_hours_per_mtoken"] if row["cost_per_mtoken"] is None else row["cost_per_mtoken"])
