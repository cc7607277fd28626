"""Reproducers: scripts that time one traced operator alone, on tensors of the same shapes, dtypes and strides.

Traces are untrusted. A script consists of our own text, names of data/reproducible_operators.toml, and numbers: every
value of a trace passes through `_literal`, `_sizes` or a table, or no script is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lumos.data_files import data_file, read_table
from lumos.dtypes import dtype_called
from lumos.errors import OptionError
from lumos.files import write_files
from lumos.program.op import Tensor
from lumos.traced.traced_operators import TracedOperator, TracedOperators

MOST = 10  # scripts
_LARGEST = 1 << 40
_LONGEST_LIST, _LONGEST_TEXT = 1024, 1 << 15
_NUMBER = re.compile(r"-?(\d{1,19}(\.\d{0,20})?|\.\d{1,20})(e[+-]?\d{1,3})?")
_WORDS = {"True": "True", "False": "False", "": "None", "None": "None", "inf": 'float("inf")', "-inf": 'float("-inf")'}
_MADE = ("bf16", "fp16", "fp32", "fp64", "int64", "int32", "bool", "uint8")  # types of tensors that a script makes


class NotReproducibleError(Exception):
    """Why no script can be written."""


def write_reproducers(folder: Path, found: TracedOperators) -> tuple[list[str], list[str]]:
    """A script for each of the operators with most to gain: (names of the files, why others have none)."""
    check_folder(folder)
    chosen = sorted(found.operators, key=lambda op: (-(op.gain_ms or 0.0), -op.ms))
    scripts: dict[str, str] = {}
    reasons: list[str] = []
    for op in chosen:
        if len(scripts) == MOST:
            break
        try:
            scripts[f"{len(scripts) + 1:02d}_{_bare_name(op)}.py"] = script_of(op)
        except NotReproducibleError as reason:
            reasons.append(f"{op.name[:80]}: {reason}")
    write_files(folder, scripts, "--reproduce")
    return list(scripts), list(dict.fromkeys(reasons))


def check_folder(folder: Path) -> None:
    """Refuse a folder that scripts cannot be written to."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--reproduce {folder}: that is a file; give the name of a folder")
    if not folder.parent.is_dir():
        raise OptionError(f"--reproduce {folder}: the folder {folder.parent} does not exist; create it first")


def script_of(op: TracedOperator) -> str:
    """The text of a script that times an operator; NotReproducibleError where that cannot be."""
    name = _known_name(op)
    if name.startswith("attention."):
        return _filled(op, *_attention(op, name))
    if any("HtoD" in kernel or "DtoH" in kernel for kernel in (op.kernel,)):
        raise NotReproducibleError("a copy between host and GPU")
    places = _arguments(op)
    lines = ",\n".join(f"        {text}" for text in places)
    return _filled(op, f"torch.ops.aten.{name}", f"    return overload(OPERATOR, [\n{lines},\n    ])")


@cache
def _known_names() -> frozenset[str]:
    return frozenset(name for names in read_table("reproducible_operators.toml").values() for name in names)


def _known_name(op: TracedOperator) -> str:
    """The name as the table has it, never as the trace has it."""
    recorded = op.op.name if op.op is not None else ""
    wanted = recorded if recorded.startswith("attention.") else op.name.removeprefix("aten::")
    for name in _known_names():
        if name == wanted and (name.startswith("attention.") or op.name == f"aten::{name}"):
            return name
    raise NotReproducibleError("not an operator that scripts are written for")


def _bare_name(op: TracedOperator) -> str:
    return _known_name(op).strip("_").replace(".", "_")


# ---------------------------------------------------------------------- arguments, from what the trace recorded
def _arguments(op: TracedOperator) -> list[str]:
    """Every argument of the call as Python text."""
    if op.call is None:
        raise NotReproducibleError("the trace has no operator around the kernel")
    args = op.call.args
    dims, types, strides, values = args.dims, args.types, args.strides, args.values
    if not dims or len(types) != len(dims) or len(values) != len(dims):
        raise NotReproducibleError("the trace does not record the arguments that are no tensors")
    strides = strides if len(strides) == len(dims) else [None] * len(dims)
    usual = next(filter(None, map(_torch_dtype, types)), "float32")
    return [_argument(*parts, usual) for parts in zip(dims, types, strides, values, strict=True)]


def _argument(dims: Any, kind: Any, strides: Any, value: Any, usual: str) -> str:
    if not isinstance(kind, str) or not isinstance(dims, list):
        raise NotReproducibleError("an argument of a form that is not known")
    if kind == "TensorList":
        if not dims or len(dims) > _LONGEST_LIST:
            raise NotReproducibleError("a list of tensors that was recorded without shapes")
        steps = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
        return f"[{', '.join(_tensor(*one, usual) for one in zip(dims, steps, strict=True))}]"
    if dtype := _torch_dtype(kind):
        return _tensor(dims, strides, dtype)
    if kind not in ("", "Scalar", "ScalarList", "GenericList"):
        raise NotReproducibleError("a tensor of a dtype that is not known")
    return _literal(value)


def _torch_dtype(spelling: Any) -> str:
    """The name in torch of a type of tensors that a script makes; "" of others."""
    dtype = dtype_called(spelling)
    return dtype.torch if dtype is not None and dtype.name in _MADE else ""


def _tensor(dims: Any, strides: Any, dtype: str) -> str:
    shape = _sizes(dims)
    steps = _sizes(strides) if isinstance(strides, list) and len(strides) == len(shape) else _contiguous(shape)
    return f"tensor({shape!r}, {steps!r}, torch.{dtype})"


def _sizes(recorded: Any) -> tuple[int, ...]:
    usable = isinstance(recorded, list) and len(recorded) <= 16
    if not usable or not all(type(n) is int and 0 <= n < _LARGEST for n in recorded):
        raise NotReproducibleError("a size that makes no sense")
    return tuple(recorded)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return tuple(reversed(strides))


def _literal(value: Any) -> str:
    """A number, a truth value, None, or a list of them, as Python text of our own making."""
    text = value.strip() if isinstance(value, str) else repr(value) if isinstance(value, int | float) else "?"
    text = text[:_LONGEST_TEXT]
    if text.startswith("[") and text.endswith("]"):
        inner = [part for part in text[1:-1].split(",") if part.strip()]
        if len(inner) > _LONGEST_LIST:
            raise NotReproducibleError("a list that is too long")
        return f"[{', '.join(_number(part.strip()) for part in inner)}]"
    return _number(text)


def _number(text: str) -> str:
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.fullmatch(text):
        raise NotReproducibleError("an argument that is no number")
    return repr(float(text)) if set(text) & set(".e") else repr(int(text))


# ---------------------------------------------------------------------- attention, from its query, key and value
def _attention(op: TracedOperator, name: str) -> tuple[str, str]:
    """Attention of any library: (the operator, the body of the function that returns the call)."""
    if op.op is None or len(op.op.inputs) < 3:
        raise NotReproducibleError("query, key and value were not recorded")
    query, key, value = (_of_info(tensor) for tensor in op.op.inputs[:3])
    options = op.op.options
    mask = "torch.zeros((query.shape[-2], key.shape[-2]), dtype=query.dtype, device=DEVICE)"
    body = [
        f"    query = {query}", f"    key = {key}", f"    value = {value}",
        "    options = {",
        f'        "is_causal": {"causal" in options and "masked" not in options},',
        f'        "attn_mask": {mask if "masked" in options else None},',
        '        "enable_gqa": query.shape[1] != key.shape[1],',
        "    }",
    ]  # fmt: skip
    if name.endswith("forward"):
        body.append("    return lambda: OPERATOR(query, key, value, **options)")
    else:
        body += [
            "    inputs = [one.detach().requires_grad_() for one in (query, key, value)]",
            "    with torch.enable_grad():",
            "        output = OPERATOR(*inputs, **options)",
            "    gradient = torch.randn_like(output)",
            "    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)",
        ]
    return "torch.nn.functional.scaled_dot_product_attention", "\n".join(body)


def _of_info(tensor: Tensor) -> str:
    dtype = _torch_dtype(tensor.dtype)
    if not dtype.startswith(("bfloat", "float")):
        raise NotReproducibleError("a tensor of a dtype that is not known")
    return _tensor(list(tensor.shape), list(tensor.strides), dtype)


# ---------------------------------------------------------------------- the script
def _filled(op: TracedOperator, operator: str, body: str) -> str:
    """The template with numbers and text of our own; names of GPUs are those of data/gpus.toml."""
    filled = {
        "operator": operator,
        "body": body,
        "gpu": op.gpu.name if op.gpu else "the device of the trace",
        "phase": op.phase if op.phase in ("forward", "backward", "optimizer") else "step",
        "calls": str(int(op.calls)),
        "traced_us": repr(round(float(op.us), 3)),
        "model_us": "None" if op.effort.model_us is None else repr(round(float(op.effort.model_us), 3)),
        "flops": repr(float(op.effort.flops)),
        "bytes": repr(float(op.effort.bytes)),
        "limit": repr(_limit(op)),
    }
    text = data_file("reproducer.py.txt").read_text("utf-8")
    return re.sub(r"@(\w+)@", lambda place: filled[place[1]], text)


def _limit(op: TracedOperator) -> int:
    """What random integers stay below: no index may lie beyond the table that it is looked up in."""
    floats = [t.shape for t in op.tensors if t.dtype not in ("int64", "int32", "bool", "uint8")]
    if op.name == "aten::embedding" and floats and floats[0]:
        return int(floats[0][0])
    values = op.call.args.values if op.call is not None and isinstance(op.call.args.values, list) else []
    numbers = [int(v) for v in values if isinstance(v, str) and re.fullmatch(r"\d{1,12}", v) and int(v) > 1]
    return max(1, min([n for shape in floats for n in shape] + numbers, default=100))
