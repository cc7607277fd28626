"""Model files: what `lumos fit` learnt of a machine, as an .npz of plain arrays and a JSON header. No pickle.

Every layer reads its own part: the GPU's facts are known to the setup, trees and tables to the costs.
"""

from __future__ import annotations

import io
import json
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.errors import InputError
from lumos.files import read_file, stamp_of

ADVICE = "name a file that `lumos fit` wrote"
_MOST_BYTES = 1 << 27  # of a file, and of its contents
_MOST_HEADER = 1 << 24

# What numpy, zipfile and json raise on bytes that `packed` never wrote.
CORRUPT = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError, MemoryError, EOFError,
    OSError, SyntaxError, NotImplementedError, RecursionError, zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class ModelFile:
    """The parts of a model file, not yet checked."""

    header: dict[str, Any]
    arrays: Arrays
    place: str  # for messages

    def refused(self, why: str) -> InputError:
        """The error for a header or arrays that make no sense."""
        return InputError(f"{self.place}: {why}; {ADVICE}")


def read_model_file(path: Path) -> ModelFile:
    """A file of the user, read again where it has changed."""
    return _read(path, stamp_of(path))


@lru_cache(maxsize=8)
def _read(path: Path, stamp: int) -> ModelFile:
    return unpacked(read_file(path, _MOST_BYTES, ADVICE), str(path))


def unpacked(data: bytes, place: str) -> ModelFile:
    """The parts of a model file, or InputError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            sizes = {part.filename: part.file_size for part in file.infolist()}
            if sum(sizes.values()) > _MOST_BYTES or sizes["header.npy"] > _MOST_HEADER:
                raise ValueError("too large")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        header = json.loads(bytes(found.pop("header")))
        if not isinstance(header, dict) or not isinstance(header.get("gpu"), str):
            raise ValueError("no header")
    except CORRUPT:
        raise InputError(f"{place}: not a model file; {ADVICE}") from None
    return ModelFile(header, found, place)


def packed(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """The bytes of a model file."""
    parts: dict[str, Any] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays}
    file = io.BytesIO()
    np.savez_compressed(file, **parts)
    return file.getvalue()
