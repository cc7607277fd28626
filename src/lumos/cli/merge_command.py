"""`lumos merge`: the shards of a search or of a score as one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from lumos.cli.options import AsJson
from lumos.cli.terminal import deliver
from lumos.errors import InputError
from lumos.files import check_output, write_csv
from lumos.report.html.page import write_page
from lumos.report.html.search_page import search_page
from lumos.report.terminal.show_searches import show_score, show_search
from lumos.score.score import merged_score
from lumos.search.search import merged_search
from lumos.setup.importers.foreign_file import text_of

Answer = dict[str, Any]

_MOST_BYTES = 256 << 20
_MERGE: dict[str, tuple[Callable[[Sequence[Answer]], Answer], tuple[str, ...]]] = {
    "search": (merged_search, ("top", "results", "pareto", "evaluated", "fitting", "simulated", "seconds", "warnings")),
    "score": (merged_score, ("rows", "scored", "refused")),
}  # kind: (how to merge, the keys that a part must have)


def merge_command(
    parts: Annotated[list[Path], typer.Argument(help="Files that lumos search or lumos score wrote with --shard.")],
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json, .csv or .html.")] = None,
) -> None:
    """Merge the shards of a search or a score into the answer that one run without --shard would have given."""
    check_output(output, None, (".json", ".csv", ".html"))
    answer = merged(parts)
    if answer["kind"] == "score":
        deliver(answer, show_score, as_json, output, {".csv": lambda to: write_csv(to, answer["scored"])})
        return
    rows = [{key: x for key, x in row.items() if not isinstance(x, dict | list)} for row in answer["results"]]
    deliver(answer, show_search, as_json, output, {
        ".csv": lambda to: write_csv(to, rows), ".html": lambda to: write_page(to, search_page(answer)),
    })  # fmt: skip


def merged(paths: Sequence[Path]) -> Answer:
    """The merged answer of the parts in these files; a warning names the shards that are missing."""
    parts = [_read(path) for path in paths]
    seen: dict[int, Path] = {}
    count = parts[0]["shard"][1]
    for path, part in zip(paths, parts, strict=True):
        index, of = part["shard"]
        if any(part[key] != parts[0][key] for key in ("kind", "question")) or of != count:
            raise InputError(f"{path} is of another question than {paths[0]}: merge only shards of the same run")
        if index in seen:
            raise InputError(f"{path} and {seen[index]} are the same shard, {index}: give each once")
        seen[index] = path
    answer = _MERGE[parts[0]["kind"]][0](parts)
    missing = [str(index) for index in range(1, count + 1) if index not in seen]
    if missing:
        text = f"{len(missing)} of {count} shards missing ({', '.join(missing)}): the answer is incomplete"
        answer["warnings"] = [*answer.get("warnings", []), text]
    return answer | {"shard": [1, 1]}


def _read(path: Path) -> Answer:
    try:
        part = orjson.loads(text_of(path, _MOST_BYTES))
    except orjson.JSONDecodeError as problem:
        raise InputError(f"{path}: not JSON ({problem}); give .json files that were written with --shard") from None
    match part:
        case {"kind": "search" | "score" as kind, "question": _, "shard": [int(), int()]} if part.keys() >= {
            *_MERGE[kind][1]
        }:
            return dict(part)
    raise InputError(f"{path}: not a shard of a search or a score; give .json files written with --shard I/N -o")
