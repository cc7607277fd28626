"""Operation tables from files, Parquet or CSV: checked, sorted, and with the columns that follow from others."""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lumos.errors import InputError
from lumos.files import open_file, read_file
from lumos.read.formats import available_bytes, head_of, require_memory
from lumos.read.json_slices import BAD_GZIP, open_bytes
from lumos.trace.operations import COMPUTE, KNOWN_TYPES, Bools, Floats, Ints, OperationTable, numbered, occurrence

if TYPE_CHECKING:
    from polars import DataFrame

_NUMBERS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc", "mb_id")
_NEEDED = ("step", "optype", "start_ts", "duration")
_COLUMNS = (*_NUMBERS, "optype", "start_ts", "duration")
_DOCUMENTED = "docs/stragglers.md describes the columns"
_MOST_OTHER_TYPES = 16
_ENOUGH_COLUMNS = 4  # by which a table is known whose column of types is missing
_MOST_WORKERS = 1 << 20
_MOST_CHUNKS = 1 << 12
_LONGEST_S = 1e9  # thirty years
_LONGEST_STEP_S = 3600.0
_COARSEST_S = 1e-3
_BYTES_A_ROW = 800  # in memory: columns, graph and some scenarios; measured on 1.9 million rows
_MEMORY_PER_TEXT = 8  # times the size of a CSV file


def is_operation_table(path: Path) -> bool:
    """Whether a file is a Parquet file, or CSV (perhaps compressed) whose header has the columns of such a table."""
    if not path.is_file():
        return False
    head = head_of(path)
    if head is None or head.startswith(b"PAR1"):
        return head is not None
    header = {name.strip().strip('"') for name in head.split(b"\n", 1)[0].decode(errors="replace").lower().split(",")}
    return "optype" in header or len(header & set(_COLUMNS)) >= _ENOUGH_COLUMNS


def read_operation_table(path: Path) -> OperationTable:
    """The table at a path, checked; what is missing and can be derived is derived, and `warnings` say so."""
    frame = _frame(path)
    missing = [name for name in _NEEDED if name not in frame.columns]
    if missing:
        raise InputError(f"{path}: no column {', '.join(missing)}; {_DOCUMENTED}")
    if not len(frame):
        raise InputError(f"{path}: has no rows; {_DOCUMENTED}")
    numbers = {name: _whole_numbers(path, frame, name) for name in _NUMBERS if name in frame.columns}
    start, duration = _seconds(path, frame, "start_ts"), _seconds(path, frame, "duration")
    if np.any(duration < 0):
        row = int(np.argmax(duration < 0))
        raise InputError(f"{path}: row {row + 1}: duration {duration[row]:g} is negative; it is end minus start")
    if not duration.any():
        raise InputError(f"{path}: no operation takes any time; duration is end minus start, in seconds")
    types, kind = _types(path, frame)
    warnings: list[str] = [
        f"{name!r} is not a type that Lumos knows: it counts as work of its worker, in its recorded order"
        for name in types
        if name not in KNOWN_TYPES
    ]
    return _table(path, types, kind, numbers, start, duration, warnings)


def _table(
    path: Path, types: tuple[str, ...], kind: Ints, numbers: dict[str, Ints], start: Floats, duration: Floats,
    warnings: list[str],
) -> OperationTable:  # fmt: skip
    """The table from its columns: missing ones are derived, rows sorted, and tensor-parallel copies left out."""
    none = np.full(len(kind), -1)
    dp_rank, stage, rank = _places(path, numbers)
    step = numbers["step"]
    keep = _one_rank_each(dp_rank, stage, rank, warnings)
    order = np.lexsort((kind, numbers.get("seq_id", none), start, stage, dp_rank, step))
    order = order[keep[order]]
    step, start = step[order], start[order]
    _, first = np.unique(step, return_inverse=True)
    begin = np.full(int(first.max()) + 1, np.inf)
    np.minimum.at(begin, first, start)
    start = start - begin[first]
    if float((start + duration[order]).max()) > _LONGEST_S:
        raise InputError(f"{path}: a step lasts longer than thirty years; start_ts and duration are seconds")
    if float((start + duration[order]).max()) > _LONGEST_STEP_S:
        warnings.append("a step lasts longer than an hour: are the times in seconds?")
    table = OperationTable(
        path.name, types, kind[order], dp_rank[order], stage[order], rank[order], step, start, duration[order],
        numbers.get("seq_id", none)[order], numbers.get("mc", none)[order], numbers.get("mb_id", none)[order],
        _tensor_parallel(path, dp_rank, stage, rank[keep], warnings), tuple(warnings),
    )  # fmt: skip
    return _completed(path, table)


def _completed(path: Path, table: OperationTable) -> OperationTable:
    """With the sequence, chunk and micro-batch of every pass."""
    sequence, chunk, micro_batch = table.sequence.copy(), table.chunk.copy(), table.micro_batch.copy()
    group = (table.step_index * len(table.workers) + table.worker) * len(table.types) + table.kind
    if np.any(sequence < 0):
        sequence = occurrence(group)
    call = numbered(group, sequence)
    count = np.bincount(call)
    if np.any(count > 1):
        row = int(np.argmax(call == np.argmax(count > 1)))
        raise InputError(
            f"{path}: {table.types[table.kind[row]]} number {sequence[row]} of dp_rank {table.dp_rank[row]}, stage "
            f"{table.stage[row]} occurs {int(count.max())} times in step {table.step[row]}; number them by "
            "seq_id, or leave that column out"
        )
    passes = table.of_type(*COMPUTE)
    chunk[passes & (chunk < 0)] = 0
    if chunk.max(initial=0) == 0:
        unknown = passes & (micro_batch < 0)
        micro_batch[unknown] = sequence[unknown]
    return replace(table, sequence=sequence, chunk=chunk, micro_batch=micro_batch)


def _places(path: Path, numbers: dict[str, Ints]) -> tuple[Ints, Ints, Ints]:
    """Replica, stage and rank of every row; what is missing follows from the others."""
    size = len(numbers["step"])
    if not {"dp_rank", "stage", "rank"} & set(numbers):
        raise InputError(f"{path}: no column that names the worker (dp_rank and stage, or rank); {_DOCUMENTED}")
    for name in ("dp_rank", "stage", "rank"):
        if name in numbers and not 0 <= int(numbers[name].min()) <= int(numbers[name].max()) < _MOST_WORKERS:
            row = int(np.argmax((numbers[name] < 0) | (numbers[name] >= _MOST_WORKERS)))
            wrong, most = numbers[name][row], _MOST_WORKERS - 1
            raise InputError(f"{path}: row {row + 1}: {name} {wrong} is not from 0 to {most:,}; {_DOCUMENTED}")
    stage = numbers.get("stage", np.zeros(size, np.int64))
    if "dp_rank" in numbers:
        dp_rank = numbers["dp_rank"]
    elif "rank" in numbers:
        dp_rank = _dense_within(stage, numbers["rank"])
    else:
        dp_rank = np.zeros(size, np.int64)
    rank = numbers.get("rank", stage * (int(dp_rank.max()) + 1) + dp_rank)
    return dp_rank, stage, rank


def _dense_within(group: Ints, value: Ints) -> Ints:
    """The place of a value among the distinct ones of its group."""
    pairs, inverse = np.unique(np.stack((group, value)), axis=1, return_inverse=True)
    first = np.searchsorted(pairs[0], pairs[0])
    return np.asarray((np.arange(pairs.shape[1]) - first)[np.ravel(inverse)])


def _one_rank_each(dp_rank: Ints, stage: Ints, rank: Ints, warnings: list[str]) -> Bools:
    """Rows of the lowest rank of every worker: its tensor-parallel ranks run in lockstep."""
    _, worker = np.unique(dp_rank * (int(stage.max()) + 1) + stage, return_inverse=True)
    lowest = np.full(int(worker.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, worker, rank)
    keep = rank == lowest[worker]
    if not keep.all():
        warnings.append("several ranks share a dp_rank and stage (tensor parallelism): the lowest of each counts")
    return np.asarray(keep)


def _types(path: Path, frame: DataFrame) -> tuple[tuple[str, ...], Ints]:
    """The types of operations that occur, and which of them each row is."""
    import polars

    column = frame["optype"]
    if not (column.dtype == polars.String or isinstance(column.dtype, polars.Categorical | polars.Enum)):
        raise InputError(f"{path}: optype is {column.dtype}, not text such as forward-compute; {_DOCUMENTED}")
    _refuse_missing(path, column.is_null().to_numpy(), "optype")
    text = column.cast(polars.String).str.strip_chars()
    types = tuple(sorted(text.unique().to_list()))
    other = [name for name in types if name not in KNOWN_TYPES]
    for name in other:
        near = difflib.get_close_matches(name[:64].lower().replace("_", "-"), KNOWN_TYPES, 1, 0.85)
        if near:
            raise InputError(f"{path}: unknown optype {name[:64]!r}; did you mean {near[0]!r}? {_DOCUMENTED}")
    if len(other) > _MOST_OTHER_TYPES:
        raise InputError(
            f"{path}: {len(other)} unknown types of operations, such as {other[0][:64]!r}; "
            f"known are {', '.join(KNOWN_TYPES)}"
        )
    if not set(types) & set(COMPUTE):
        raise InputError(f"{path}: no row of optype {' or '.join(COMPUTE)}; {_DOCUMENTED}")
    number = {name: place for place, name in enumerate(types)}
    return types, text.replace_strict(number, return_dtype=polars.Int64).to_numpy()


def _whole_numbers(path: Path, frame: DataFrame, name: str) -> Ints:
    """A column of whole numbers; -1 where a value may be missing and is."""
    import polars

    column = _cast(path, frame, name, polars.Float64)
    values = column.fill_null(np.nan).to_numpy()
    missing = np.isnan(values)
    if name in ("seq_id", "mc", "gmc", "mb_id"):
        values = np.where(missing | (values < 0), -1.0, values)
    else:
        _refuse_missing(path, missing, name)
    wrong = ~np.isfinite(values) | (values != np.round(values)) | (np.abs(values) >= 2.0**53)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(f"{path}: row {row + 1}: {name} {values[row]:g} is not a whole number; {_DOCUMENTED}")
    if name == "mc" and values.max() >= _MOST_CHUNKS:
        row = int(np.argmax(values))
        raise InputError(f"{path}: row {row + 1}: mc {values[row]:g} is not below {_MOST_CHUNKS:,}; {_DOCUMENTED}")
    return np.asarray(values, np.int64)


def _seconds(path: Path, frame: DataFrame, name: str) -> Floats:
    import polars

    if frame[name].dtype == polars.Float32:
        largest = float(np.nanmax(np.abs(frame[name].fill_null(0).to_numpy())))
        if np.isfinite(largest) and float(np.spacing(np.float32(largest))) > _COARSEST_S:
            raise InputError(
                f"{path}: {name} reaches {largest:g} in single precision, which tells times no finer than "
                f"{float(np.spacing(np.float32(largest))):g} s apart; write it in double precision"
            )
    values = _cast(path, frame, name, polars.Float64).fill_null(np.nan).to_numpy()
    _refuse_missing(path, ~np.isfinite(values), name)
    return np.asarray(values, np.float64)


def _cast(path: Path, frame: DataFrame, name: str, to: type) -> polars.Series:  # type: ignore[name-defined]  # noqa: F821
    import polars

    kind = frame[name].dtype
    if not (kind.is_numeric() or kind in (polars.String, polars.Null)):  # nested ones fail where they are used
        raise InputError(f"{path}: {name} is {str(kind)[:64]}, not a number; {_DOCUMENTED}")
    try:
        return frame[name].cast(to)
    except polars.exceptions.PolarsError:
        wrong = (frame[name].cast(to, strict=False).is_null() & frame[name].is_not_null()).to_numpy()
        row = int(np.argmax(wrong))
        text = str(frame[name][row])[:64]
        raise InputError(f"{path}: row {row + 1}: {name} {text!r} is not a number; {_DOCUMENTED}") from None


def _refuse_missing(path: Path, missing: Bools, name: str) -> None:
    if missing.any():
        count, row = int(missing.sum()), int(np.argmax(missing)) + 1
        raise InputError(f"{path}: {name} is missing in {count:,} rows, first in row {row}; every operation needs it")


def _frame(path: Path) -> DataFrame:
    """The columns that are known, from Parquet or CSV."""
    import polars

    with open_file(path, "check the path and its permissions") as file:
        parquet = file.read(4) == b"PAR1"
    advice = "cut the table to fewer steps"
    try:
        if parquet:
            with _without_panics():
                table = polars.scan_parquet(path)
                names = [name for name in table.collect_schema().names() if name in _COLUMNS]
                rows = int(table.select(polars.len()).collect().item())
                require_memory(path, rows * _BYTES_A_ROW, advice)
                return table.select(names).collect()
        limit = available_bytes() // _MEMORY_PER_TEXT
        with open_bytes(path) as source:
            text = source.read(limit + 1)
        if len(text) > limit:
            require_memory(path, len(text) * _MEMORY_PER_TEXT, advice)
        if not text.strip():
            raise InputError(f"{path}: is empty; {_DOCUMENTED}")
        frame = polars.read_csv(io.BytesIO(text), infer_schema_length=0)
        names = [name for name in frame.columns if name in _COLUMNS]
        if path.suffix == ".parquet" and not names:
            raise InputError(f"{path}: not a Parquet file, and no CSV with the columns of a table; {_DOCUMENTED}")
        return frame.select(names)
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, *BAD_GZIP) as error:  # type: ignore[misc]
        problem = str(error).strip().split("\n")[0][:200]
        raise InputError(f"{path}: not a readable Parquet or CSV table ({problem}); {_DOCUMENTED}") from None


@contextmanager
def _without_panics() -> Iterator[None]:
    """Without what the reader of Parquet prints about damaged files; the error that it raises is enough."""
    try:
        kept = os.dup(2)
    except OSError:  # there is nothing to print to
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _tensor_parallel(path: Path, dp_rank: Ints, stage: Ints, rank: Ints, warnings: list[str]) -> int:
    """The tensor-parallel size that meta-NAME.yaml beside trace-NAME states, or what ranks are multiples of."""
    stem = re.sub(r"\.(parquet|csv)(\.gz)?$", "", path.name)
    meta = path.parent / f"meta-{stem.removeprefix('trace-')}.yaml"
    if not meta.is_file():
        return max(int(np.gcd.reduce(np.unique(rank))), 1)
    text = read_file(meta, 1 << 16, "it states dp_size, pp_size and tp_size").decode(errors="replace")
    sizes = {key: int(value) for key, value in re.findall(r"^(\w+)_size:\s*(\d{1,7})\s*$", text, re.MULTILINE)}
    for name, here in (("dp", int(dp_rank.max()) + 1), ("pp", int(stage.max()) + 1)):
        if sizes.get(name, here) != here:
            warnings.append(f"{meta.name} states {name}_size {sizes[name]}, the table has {here}: the table counts")
    return max(sizes.get("tp", 1), 1)
