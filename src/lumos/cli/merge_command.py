"""`lumos merge`: the shards of a search or of a score as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

import msgspec
import orjson
import typer
from msgspec import Meta

from lumos.cli.options import AsJson
from lumos.cli.terminal import deliver
from lumos.errors import InputError
from lumos.files import check_output, write_csv
from lumos.report.html.page import write_page
from lumos.report.html.search_page import search_page
from lumos.report.terminal.show_searches import show_score, show_search
from lumos.score.score import Scored, merged_score
from lumos.search.shards import Shard, checked_part, merged_search
from lumos.setup.importers.foreign_file import text_of

Answer = dict[str, Any]

_MOST_BYTES = 256 << 20
_Time = Annotated[float, Meta(gt=1e-30, le=1e30)]
_Text = Annotated[str, Meta(max_length=20_000)]
_SCORED: dict[str, Any] = {
    **get_type_hints(Scored), **dict.fromkeys(("id", "source", "model"), _Text), "measured": _Time | None,
    **dict.fromkeys(("predicted", "low", "high"), _Time), "gpus": Annotated[int, Meta(ge=0, le=1 << 40)],
    "peak_gib": Annotated[float, Meta(ge=0, le=1e30)],
}  # fmt: skip
_Scored = TypedDict("_Scored", _SCORED)  # type: ignore[misc]


class _Refused(TypedDict):
    id: _Text
    reason: _Text


class _ScorePart(TypedDict):
    """What `lumos merge` reads of a shard of a score."""

    question: _Text
    shard: Shard
    rows: Annotated[int, Meta(ge=0, le=1 << 40)]
    scored: list[_Scored]
    refused: list[_Refused]


_MOST_NAMED = 20  # of the shards that are missing


def merge_command(
    parts: Annotated[list[Path], typer.Argument(help="Files that lumos search or lumos score wrote with --shard.")],
    partial: Annotated[bool, typer.Option("--partial", help="Merge even if shards are missing.")] = False,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json, .csv or .html.")] = None,
) -> None:
    """Merge the shards of a search or a score into the answer that one run without --shard would have given."""
    check_output(output, None, (".json", ".csv", ".html"))
    answer = merged(parts, partial)
    if answer["kind"] == "score":
        deliver(answer, show_score, as_json, output, {".csv": lambda to: write_csv(to, answer["scored"])})
        return
    rows = [{key: x for key, x in row.items() if not isinstance(x, dict | list)} for row in answer["results"]]
    deliver(answer, show_search, as_json, output, {
        ".csv": lambda to: write_csv(to, rows), ".html": lambda to: write_page(to, search_page(answer)),
    })  # fmt: skip


def merged(paths: Sequence[Path], partial: bool = False) -> Answer:
    """Merge the shards in these files. Missing shards are an error, or a warning if the result may be `partial`."""
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
    notes: list[str] = []
    missing = [str(index) for index in range(1, count + 1) if index not in seen]
    if missing:
        named = ", ".join(missing[:_MOST_NAMED]) + (", …" if len(missing) > _MOST_NAMED else "")
        text = f"{len(missing)} of {count} shards missing ({named})"
        if not partial:
            raise InputError(f"{text}: give their files too, or add --partial to merge the others")
        notes = [f"{text}: the answer is incomplete"]
    answer = (merged_search if parts[0]["kind"] == "search" else merged_score)(parts)
    return answer | {"shard": [1, 1], "warnings": [*answer.get("warnings", []), *notes]}


def _read(path: Path) -> Answer:
    try:
        part = orjson.loads(text_of(path, _MOST_BYTES))
    except (orjson.JSONDecodeError, RecursionError) as problem:
        raise InputError(f"{path}: not JSON ({problem}); give .json files that were written with --shard") from None
    match part:
        case {"kind": "search"}:
            found = checked_part(part, str(path))
        case {"kind": "score"}:
            try:
                found = dict(part) | msgspec.to_builtins(msgspec.convert(part, _ScorePart))
            except (msgspec.ValidationError, RecursionError) as problem:
                raise InputError(f"{path}: not a whole shard of a score ({problem}); score that shard again") from None
        case _:
            raise InputError(f"{path}: not a shard of a search or a score; give .json files written with --shard I/N")
    index, count = found["shard"]
    if index > count:
        raise InputError(f"{path}: shard {index} of {count}: I goes from 1 to N")
    return found
