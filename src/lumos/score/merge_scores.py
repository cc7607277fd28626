"""Merge: the parts of a score that was divided into shards, as one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lumos.errors import InputError
from lumos.score.score import Score, Scored


def merged_score(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer that one score of the whole table would have given, but for the order of its rows."""
    try:
        scored = tuple(_scored(row) for part in parts for row in part["scored"])
        refused = tuple((str(row["id"]), str(row["reason"])) for part in parts for row in part["refused"])
        rows = sum(int(part["rows"]) for part in parts)
    except (KeyError, TypeError, ValueError) as problem:
        raise InputError(f"a part of a score is damaged ({problem!r}): score that shard again") from None
    whole = Score(rows, scored, refused)
    return whole.as_part(parts[0]["question"], (0, 1))


def _scored(row: Mapping[str, Any]) -> Scored:
    measured = None if row["measured"] is None else float(row["measured"])
    predicted, low, high, peak = (float(row[key]) for key in ("predicted", "low", "high", "peak_gib"))
    return Scored(
        str(row["id"]), str(row["source"]), str(row["model"]), int(row["gpus"]), measured, predicted, low, high,
        bool(row["fits"]), peak, tuple(map(str, row["notes"])),
    )  # fmt: skip
