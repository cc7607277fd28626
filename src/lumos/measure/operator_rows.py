"""Operator rows: how files describe operators, as objects with `op`, its sizes, and a dtype where it is not bf16.

    {"op": "gemm", "m": 4096, "n": 12288, "k": 4096, "layout": "TN"}
    {"op": "cross_entropy", "t": 8192, "v": 128256, "dtype": "fp32"}

Other keys of a row are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from lumos.data_files import read_table
from lumos.dtypes import MEASURED
from lumos.errors import InputError
from lumos.files import read_file
from lumos.program.operators import KINDS, Operator, sizes_of
from lumos.setup.messages import did_you_mean, one_of, shown

_LAYOUTS = ("TN", "NN", "NT")
_EXAMPLE = '{"op": "gemm", "m": 4096, "n": 4096, "k": 4096}'
_MOST_BYTES = 1 << 28  # of a file of rows
_LARGEST = 1 << 40  # of a size

_NOT_IN_ROWS = {"gemm_tn", "gemm_nn", "gemm_nt", "grouped_gemm_nn", "grouped_gemm_nt", "bmm_bwd", "stream"}
_BATCHED = {"batched_gemm": "bmm", "batched_gemm_bwd": "bmm_bwd"}
_SIZES = read_table("operator_names.toml")["row_sizes"]

SIZES: dict[str, tuple[str, ...]] = {
    name: tuple(_SIZES.get(name) or sizes_of(name)) for name in ("gemm", *_BATCHED, *sorted(KINDS - _NOT_IN_ROWS))
}
"""The sizes of each operator; a matmul also has a layout.

bmm computes attention scores, b × h of s × s × d; batched_gemm any product of `batch` pairs of matrices.
"""


def operator_of(row: Any, place: str) -> Operator:
    """The operator that a row describes, or InputError with every mistake in it, one per line."""
    mistakes = list(_mistakes(row))
    if mistakes:
        raise InputError("\n".join(f"{place}: {mistake}" for mistake in mistakes))
    name, dtype = row["op"], row.get("dtype", "bf16")
    sizes = tuple(row[size] for size in SIZES[name])
    if name in ("gemm", "grouped_gemm"):
        kind = f"{name}_{row.get('layout', 'TN').lower()}"
        return Operator("grouped_gemm" if kind == "grouped_gemm_tn" else kind, sizes, dtype)
    if name == "bmm":
        batch, heads, seq, head = sizes
        return Operator("bmm", (batch * heads, seq, seq, head), dtype)
    return Operator(_BATCHED.get(name, name), sizes, dtype)


def operators_of(rows: list[Any], place: str) -> list[Operator]:
    """The operators of all rows, or one InputError with every mistake in any of them."""
    operators, mistakes = [], []
    for number, row in enumerate(rows):
        try:
            operators.append(operator_of(row, f"{place}: rows[{number}]"))
        except InputError as error:
            mistakes.append(str(error))
    if mistakes:
        raise InputError("\n".join(mistakes))
    return operators


def read_rows(path: Path) -> list[Any]:
    """The rows of a JSON file, or of standard input for "-": a list, or an object whose "rows" is one."""
    try:
        value = orjson.loads(_content(path))
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON ({error}); give a list of rows such as [{_EXAMPLE}]") from None
    rows = value.get("rows") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise InputError(f'{path}: neither a list of rows nor an object with "rows"; give [{_EXAMPLE}]')
    return rows


def _content(path: Path) -> bytes:
    if str(path) != "-":
        return read_file(path, _MOST_BYTES, "give a JSON file of rows, in several files if need be, or -")
    try:
        data = sys.stdin.buffer.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a JSON file of rows, or -") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; give it in several files")
    return data


def _mistakes(row: Any) -> Iterator[str]:
    """The mistakes in a row, one sentence each."""
    if not isinstance(row, dict):
        yield f"{shown(row)} is not a row; give an object such as {_EXAMPLE}"
        return
    name, dtype, layout = row.get("op"), row.get("dtype", "bf16"), row.get("layout", "TN")
    if dtype not in MEASURED:
        yield f"dtype = {shown(dtype)} is not known: use {one_of(MEASURED)}"
    if name == "gemm" and layout not in _LAYOUTS:
        yield f"layout = {shown(layout)} is not known: use {one_of(_LAYOUTS)}"
    if not isinstance(name, str) or name not in SIZES:
        if name is None:
            yield f"op is missing: give a name, as in {_EXAMPLE}"
        else:
            hint = did_you_mean(str(name), list(SIZES))
            yield f"op = {shown(name)} is not known: {hint} (`lumos cost --help` lists all)"
        return
    for size in SIZES[name]:
        if size not in row:
            yield f"{size} is missing: {name} needs {one_of(SIZES[name]).replace(' or ', ' and ')}"
        elif type(row[size]) is not int or not 0 < row[size] < _LARGEST:
            yield f"{size} = {shown(row[size])} is not a size: give a whole number from 1 to {_LARGEST - 1}"
