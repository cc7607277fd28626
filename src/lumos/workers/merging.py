"""Merging: the parts of work that was divided with --shard, as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from lumos.errors import InputError
from lumos.score.merge_scores import merged_score
from lumos.search.merge_searches import merged_search
from lumos.setup.importers.text_file import text_of

_LARGEST = 256 << 20
_KINDS = {
    "search": (merged_search, ("top", "results", "pareto", "evaluated", "fitting", "simulated", "seconds", "warnings")),
    "score": (merged_score, ("rows", "scored", "refused")),
}


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The answer that one run without --shard would have given."""
    parts = [_read(path) for path in paths]
    _refuse_strangers(paths, parts)
    count = parts[0]["shard"][1]
    missing = sorted(set(range(1, count + 1)) - {part["shard"][0] for part in parts})
    merge, _ = _KINDS[parts[0]["kind"]]
    answer = merge(parts)
    if missing:
        names = ", ".join(map(str, missing))
        told = f"{len(missing)} of {count} shards missing ({names}): this is not the whole answer"
        answer["warnings"] = [*answer.get("warnings", []), told]
    return answer | {"shard": [1, 1]}


def _read(path: Path) -> dict[str, Any]:
    try:
        part = orjson.loads(text_of(path, _LARGEST))
    except orjson.JSONDecodeError as problem:
        raise InputError(f"{path}: not JSON ({problem}); give .json files that were written with --shard") from None
    kind = part.get("kind") if isinstance(part, dict) else None
    needed = _KINDS[kind][1] if isinstance(kind, str) and kind in _KINDS else ()
    shard = part.get("shard") if needed else None
    counts = isinstance(shard, list) and len(shard) == 2 and all(isinstance(n, int) for n in shard)
    if not counts or any(key not in part for key in ("question", *needed)):
        raise InputError(f"{path}: not a part of a search or a score; give .json files written with --shard I/N -o")
    found: dict[str, Any] = part
    return found


def _refuse_strangers(paths: Sequence[Path], parts: Sequence[dict[str, Any]]) -> None:
    seen: dict[int, Path] = {}
    for path, part in zip(paths, parts, strict=True):
        if any(part[key] != parts[0][key] for key in ("kind", "question")) or part["shard"][1] != parts[0]["shard"][1]:
            raise InputError(f"{path} is of another question than {paths[0]}: merge the parts of one alone")
        index = part["shard"][0]
        if index in seen:
            raise InputError(f"{path} and {seen[index]} are the same shard, {index}: give each once")
        seen[index] = path
