"""Tables: rows of results as polars frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polars import DataFrame


def frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """A polars frame of rows that may have different keys; nested values stay nested."""
    import polars

    columns = dict.fromkeys(key for row in rows for key in row)
    return polars.DataFrame({key: [row.get(key) for row in rows] for key in columns}, strict=False)
