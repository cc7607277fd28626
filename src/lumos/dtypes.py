"""The types of elements: the one table of their names, sizes and numbers."""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """A type of elements."""

    name: str  # in setups, dry runs and samples
    torch: str
    size: int  # bytes
    codes: tuple[int, ...] = ()  # in c10::ScalarType
    others: tuple[str, ...] = ()  # spellings of profilers and other tools

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.name, self.torch.lower(), *self.others


DTYPES = (
    DType("bf16", "bfloat16", 2, (15,), ("c10::bfloat16",)),
    DType("fp16", "float16", 2, (5,), ("c10::half", "half")),
    DType("fp32", "float32", 4, (6,), ("float", "tf32")),
    DType("fp64", "float64", 8, (7,), ("double",)),
    DType("fp8", "float8_e4m3fn", 1, (23, 24), ("c10::float8_e4m3fn", "c10::float8_e5m2", "float8_e5m2", "float8")),
    DType("int64", "int64", 8, (4,), ("long int", "long")),
    DType("int32", "int32", 4, (3,), ("int",)),
    DType("int16", "int16", 2, (2,), ("short", "short int")),
    DType("int8", "int8", 1, (1,), ("char", "signed char")),
    DType("uint8", "uint8", 1, (0,), ("unsigned char", "byte")),
    DType("bool", "bool", 1, (11,)),
)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")  # in which operators compute
MEASURED = ("bf16", "fp16", "fp32", "tf32", "fp8")  # in which `lumos sample` measures
_BY_SPELLING = {spelling: dtype for dtype in DTYPES for spelling in dtype.spellings}
_BY_CODE = {code: dtype for dtype in DTYPES for code in dtype.codes}
TORCH_NAMES = {spelling: dtype.torch for spelling, dtype in _BY_SPELLING.items()}
_SHARED_SCALES = {"mxfp8": 1.0, "nvfp4": 0.5}  # bytes of an element; its block has one scale
BYTES = {name: _SHARED_SCALES.get(name) or float(_BY_SPELLING[name].size) for name in PRECISIONS}


def dtype_called(spelling: object) -> DType | None:
    """The type that a trace, a dry run or a setup calls so; None if it is unknown.

    >>> dtype_called("c10::BFloat16").name
    'bf16'
    """
    return _BY_SPELLING.get(spelling.lower()) if isinstance(spelling, str) else None


def dtype_of_code(code: object) -> DType | None:
    """The type with this number in c10::ScalarType; traces have it as a number or as text."""
    text = str(code)
    return _BY_CODE.get(int(text)) if text.isdecimal() and len(text) < 4 else None
