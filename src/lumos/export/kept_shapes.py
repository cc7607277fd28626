"""The arguments of operators that `--keep shapes` lets through: shapes, types, strides, numbers, autograd's counts.

A Trace has none of them, so the file is read again. What passes is built anew from numbers and from names of types;
any other text is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lumos.data_files import read_table
from lumos.errors import LumosError
from lumos.read.json_slices import Slices
from lumos.trace.names import CATEGORIES, Category
from lumos.trace.trace import Trace

Arguments = dict[str, Any]
"""The arguments of one operator, by their keys in a Kineto file."""

_LARGEST = 1 << 62
_DEEPEST = 2  # a list of tensors is a list of shapes
_NUMBERS = re.compile(r"-?\d{0,20}\.?\d{0,20}(e[+-]?\d{1,3})?|True|False|\[[-\d., ]{0,400}\]")
_TRIES = 64  # moments that the first operator may have been at
_ENOUGH = 0.9  # of the operators must be found at their times


class _Args(msgspec.Struct, gc=False):
    shapes: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")
    strides: Any = msgspec.field(default=None, name="Input Strides")
    values: Any = msgspec.field(default=None, name="Concrete Inputs")
    sequence: Any = msgspec.field(default=None, name="Sequence number")


class _Event(msgspec.Struct, gc=False):
    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    args: _Args | str | int | float | bool | list[Any] | None = None


class _Call(NamedTuple):
    """An operator in the file: its name and thread, when it began, and its arguments."""

    key: tuple[str, str]
    start: int
    arguments: Arguments


def read_arguments(trace: Trace, rank: int) -> dict[int, Arguments]:
    """The arguments of a rank's operators by their rows; empty where its file shows none."""
    header = next(header for header in trace.headers if header.rank == rank)
    try:
        calls = list(_calls(Path(header.path)))
    except LumosError:  # not a Kineto file
        return {}
    if not any("Input Dims" in call.arguments for call in calls):
        return {}
    rows = np.flatnonzero((trace.category == Category.OP) & (trace.rank == rank)).tolist()
    keys = {row: (trace.names[trace.name[row]], trace.lanes[trace.lane[row]].label) for row in rows}
    known = {(*call.key, call.start): call.arguments for call in calls}
    for offset in _offsets(calls, rows, keys, trace):
        found = {row: known.get((*keys[row], int(trace.start[row]) - offset)) for row in rows}
        kept = {row: arguments for row, arguments in found.items() if arguments}
        if len([row for row in rows if found[row] is not None]) >= _ENOUGH * len(rows):
            return _renumbered(kept)
    return {}


def _offsets(calls: list[_Call], rows: list[int], keys: dict[int, tuple[str, str]], trace: Trace) -> Iterator[int]:
    """What may lie between the clock of the file and that of the trace: whatever puts the first operator in place."""
    first = rows[0] if rows else -1
    same = [call.start for call in calls if first >= 0 and call.key == keys[first]]
    yield from (int(trace.start[first]) - start for start in same[:_TRIES])


def _calls(path: Path) -> Iterator[_Call]:
    for events in Slices(path, _Event):
        for event in events:
            if event.ph != "X" or CATEGORIES.get(event.cat if isinstance(event.cat, str) else "") != Category.OP:
                continue
            try:
                start = round(Decimal(bytes(event.ts).strip(b'"').decode()) * 1000)
            except (InvalidOperation, UnicodeDecodeError, ValueError, OverflowError):
                continue
            arguments = _kept(event.args) if isinstance(event.args, _Args) else {}
            yield _Call((str(event.name), str(event.tid)), start, arguments)


def _kept(args: _Args) -> Arguments:
    """Numbers and known types alone."""
    found: Arguments = {}
    if isinstance(args.shapes, list):
        types = read_table("public_names.toml")["tensor_types"]
        listed = args.types if isinstance(args.types, list) else []
        values = args.values if isinstance(args.values, list) else []
        found["Input Dims"] = _numbers(args.shapes)
        found["Input type"] = [text if text in types else "" for text in listed]
        found["Concrete Inputs"] = [
            text if isinstance(text, str) and _NUMBERS.fullmatch(text) else "" for text in values
        ]
        if isinstance(args.strides, list):
            found["Input Strides"] = _numbers(args.strides)
    if isinstance(args.sequence, int) and 0 <= args.sequence < _LARGEST:
        found["Sequence number"] = args.sequence
    return found


def _numbers(value: Any, depth: int = 0) -> Any:
    """Lists of numbers, and lists of those; anything else becomes an empty list."""
    if isinstance(value, list) and depth <= _DEEPEST:
        return [_numbers(part, depth + 1) for part in value]
    return value if isinstance(value, int) and abs(value) < _LARGEST and depth > 1 else []


def _renumbered(arguments: dict[int, Arguments]) -> dict[int, Arguments]:
    """With counts of autograd that begin at zero."""
    key = "Sequence number"
    least = min((found[key] for found in arguments.values() if key in found), default=0)
    return {row: found | ({key: found[key] - least} if key in found else {}) for row, found in arguments.items()}
