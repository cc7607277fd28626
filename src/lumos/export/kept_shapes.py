"""The arguments of operators that `--keep shapes` lets through: shapes, types, strides, numbers, autograd's counts.

What passes is built anew from numbers and from names of types; any other text is left out.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lumos.data_files import read_table
from lumos.read.op_columns import OpArguments
from lumos.trace.names import Category
from lumos.trace.trace import Trace

Arguments = dict[str, Any]
"""The arguments of one operator, by their keys in a Kineto file."""

_LARGEST = 1 << 62
_DEEPEST = 2  # a list of tensors is a list of shapes
_NUMBERS = re.compile(r"-?\d{0,20}\.?\d{0,20}(e[+-]?\d{1,3})?|True|False|\[[-\d., ]{0,400}\]")


def kept_arguments(trace: Trace, rank: int) -> dict[int, Arguments]:
    """The arguments of a rank's operators by their rows; empty if its file has no shapes."""
    rows = np.flatnonzero((trace.category == Category.OP) & (trace.rank == rank))
    places = np.unique(trace.argument[rows]).tolist()
    known = {place: _kept(OpArguments(trace.arguments[place])) for place in places if place >= 0 and trace.arguments}
    if not known:
        return {}
    least = int(trace.sequence[rows].min(initial=np.iinfo(np.int32).max, where=trace.sequence[rows] >= 0))
    kept = {}
    for row in rows.tolist():
        number = int(trace.sequence[row])
        counted = {"Sequence number": number - least} if number >= 0 else {}  # counts begin at zero
        kept[row] = known.get(int(trace.argument[row]), {}) | counted
    return {row: arguments for row, arguments in kept.items() if arguments}


def _kept(args: OpArguments) -> Arguments:
    """Numbers and known types alone."""
    types = read_table("public_names.toml")["tensor_types"]
    found: Arguments = {"Input Dims": _numbers(args.dims)}
    found["Input type"] = [text if text in types else "" for text in args.types]
    found["Concrete Inputs"] = [
        text if isinstance(text, str) and _NUMBERS.fullmatch(text) else "" for text in args.values
    ]
    return found | ({"Input Strides": _numbers(args.strides)} if args.strides else {})


def _numbers(value: Any, depth: int = 0) -> Any:
    """Lists of numbers, and lists of those; anything else becomes an empty list."""
    if isinstance(value, list) and depth <= _DEEPEST:
        return [_numbers(part, depth + 1) for part in value]
    return value if isinstance(value, int) and abs(value) < _LARGEST and depth > 1 else []
