"""CostModel: what operators cost on one GPU, alone and from a cold cache.

A model is a set of boosted trees, one for each family of operators, that correct a roofline; it was fitted on samples
of one GPU, and answers for another by the other's roofline and its own corrections. Where a family was not sampled,
what was is used: the two gradients of a linear layer for each other, a plain copy for whatever only moves data.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from lumos.cost.features import Chip, features, roofline_us
from lumos.cost.trees import Trees
from lumos.errors import InputError, OptionError
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu, find_gpu, gpu_named

_FAMILY = {"gemm_tn": "gemm", "gemm_nn": "gemm", "gemm_nt": "gemm"}
_SAMPLED_ON = {"h200": "h200", "gh200": "gh200", "a100": "a100", "a100-40": "a100"}
_BORROWS = {"volta": "a100", "ampere": "a100", "ada": "a100"}  # everything else resembles the H200 most
_EVENTS_US = 2.8  # kernels of traces, against the same kernels sampled
_MOST_BYTES = 1 << 27  # of a model file, and of what is packed in it


@dataclass(frozen=True)
class Regressor:
    """Trees for one family, and how far off they were on shapes held apart, in percent."""

    trees: Trees
    error_pct: float
    rows: int

    @cached_property
    def width(self) -> int:
        """Features that the trees look at, at least."""
        return int(self.trees.feature.max(initial=-1)) + 1


Words = list[tuple[Operator, float]]  # operators that together say another one, with the share of each one's time


@dataclass(frozen=True)
class CostModel:
    """Operators' costs, as fitted on `sampled` and asked for `gpu`."""

    gpu: Gpu
    sampled: str
    regressors: dict[str, Regressor]
    fallback: CostModel | None = None  # for families that `sampled` lacks
    _known: dict[Operator, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def transferred(self) -> bool:
        """Whether the GPU itself was never sampled."""
        return self.sampled not in (self.gpu.name, _SAMPLED_ON.get(self.gpu.name))

    @property
    def isolation_us(self) -> float:
        """What timing a kernel alone adds to it: a pair of events on H200; others are spans of a profiler."""
        return _EVENTS_US if self.sampled == "h200" else 0.0

    def us(self, operator: Operator) -> float:
        """Microseconds of one operator; every operator is worked out once."""
        known = self._known.get(operator)
        return self.us_of_all([operator])[0] if known is None else known

    def us_of_all(self, operators: Sequence[Operator]) -> list[float]:
        """Microseconds of many operators; those that are new are worked out together, a family at a time."""
        families: dict[str, list[Operator]] = defaultdict(list)
        for operator in dict.fromkeys(operators):
            if operator not in self._known:
                families[self._key(operator)].append(operator)
        unsampled = families.pop("", [])
        for key, members in families.items():
            self._known.update(zip(members, self._fitted(key, members), strict=True))
        if unsampled:
            self._known.update(self._unfitted(unsampled))
        return [self._known[operator] for operator in operators]

    def sampled_on(self, operator: Operator) -> str:
        """The GPU whose samples speak for an operator; "" where only its roofline does."""
        if self._key(operator) or self._words(operator):
            return self.sampled
        return self.fallback.sampled_on(operator) if self.fallback is not None else ""

    def bound(self, operator: Operator) -> str:
        """What the roofline says it waits for: "compute" or "memory"."""
        chip = chip_of(self.gpu, operator.dtype)
        peak = chip.peak if operator.is_matrix else chip.vector
        return "compute" if operator.flops / peak > operator.bytes / chip.bandwidth else "memory"

    def _fitted(self, key: str, operators: list[Operator]) -> list[float]:
        """Operators of one family: their rooflines, corrected by its trees."""
        regressor = self.regressors[key]
        chips = [chip_of(self.gpu, operator.dtype) for operator in operators]
        rows = np.array([features(operator, chip) for operator, chip in zip(operators, chips, strict=True)])
        if regressor.width > rows.shape[1]:
            raise InputError(f"the cost model for {self.sampled} does not fit {key}; fit it again with `lumos fit`")
        base = np.array([roofline_us(operator, chip) for operator, chip in zip(operators, chips, strict=True)])
        prices: list[float] = (base * np.exp(regressor.trees(rows))).tolist()
        return prices

    def _unfitted(self, operators: list[Operator]) -> Iterator[tuple[Operator, float]]:
        """Operators without trees of their own: in other words, by the fallback, or by the roofline alone."""
        said = {operator: self._words(operator) for operator in operators}
        self.us_of_all([part for words in said.values() for part, _ in words])
        for operator, words in said.items():
            if words:
                yield operator, sum(self.us(part) * share for part, share in words)
        rest = [operator for operator, words in said.items() if not words]
        if self.fallback is not None:
            yield from zip(rest, self.fallback.us_of_all(rest), strict=True)
        else:
            yield from ((operator, roofline_us(operator, chip_of(self.gpu, operator.dtype))) for operator in rest)

    def _words(self, operator: Operator) -> Words:
        """The first way to say an operator by operators that were sampled."""
        ways = _in_other_words(operator)
        return next((words for words in ways if all(self._key(part) for part, _ in words)), [])

    def _key(self, operator: Operator) -> str:
        """The name of the trees for an operator, or ""."""
        dtype = _STORED.get(operator.dtype, operator.dtype)
        suffix = "" if dtype in ("bf16", "fp16") else f":{dtype}"
        family = _FAMILY.get(operator.kind, operator.kind)
        # What only moves data, and attention, behaves in wider numbers as it does in narrow ones, at more bytes.
        narrow = () if family == "gemm" or operator.kind == "linear_bwd" else (operator.kind,)
        names = (operator.kind + suffix, family + suffix, *narrow)
        return next((name for name in names if name in self.regressors), "")


_STORED = {"mxfp8": "fp8", "nvfp4": "fp8"}  # sampled formats that stand for others of their kind


def _in_other_words(operator: Operator) -> list[Words]:
    """Ways to say an operator by others."""
    kind, shape, dtype = operator
    if kind == "gemm_nn":
        m, n, k = shape
        return [[(Operator("linear_bwd", (m, k, n), dtype), 0.5)]]
    if kind == "gemm_nt":
        m, n, k = shape
        return [[(Operator("linear_bwd", (k, m, n), dtype), 0.5)]]
    if kind == "linear_bwd":
        m, n, k = shape
        return [[(Operator("gemm_nn", (m, k, n), dtype), 1.0), (Operator("gemm_nt", (n, k, m), dtype), 1.0)]]
    if kind == "bmm_bwd":
        return [[(Operator("bmm", shape, dtype), 2.0)]]
    if kind == "grouped_gemm":
        experts, tokens, n, k = shape
        return [[(Operator("gemm_tn", (max(1, tokens // experts), n, k), dtype), float(experts))]]
    if kind == "stream":
        width = 4096
        rows = max(1, round(shape[0] / (2 * 2 * width)))
        return [[(Operator("copy", (rows, width), "bf16"), 1.0)]]
    return []


@cache
def chip_of(gpu: Gpu, dtype: str) -> Chip:
    """The numbers of a GPU that features need; without tensor cores for a precision, the nearest wider one counts."""
    wider = {"nvfp4": "fp8", "mxfp8": "fp8", "fp8": "bf16", "bf16": "fp16", "tf32": "fp32", "fp16": "fp32"}
    while not gpu.supports(dtype):
        dtype = wider[dtype]
    vector = gpu.peak_tflops.get("fp32", 20.0)
    return Chip(gpu.peak(dtype) * 1e6, vector * 1e6, gpu.hbm_gb_s * 1e3, gpu.sms, gpu.l2_mb * 1e6)


@cache
def cost_model(name: str) -> CostModel:
    """The shipped model for a GPU: its own samples, or those of the sampled GPU that is most like it."""
    gpu = gpu_named(name)
    if gpu.is_cpu:
        raise OptionError(
            f'cluster.gpu = "{gpu.name}" is only known from its trace: record one (lumos capture) and add --from'
        )
    sampled = _SAMPLED_ON.get(gpu.name) or _BORROWS.get(gpu.family, "h200")
    fallback = None if sampled == "h200" else CostModel(gpu, "h200", _shipped("h200"))
    return CostModel(gpu, sampled, _shipped(sampled), fallback)


@cache
def cpu_model() -> CostModel:
    """A CPU's rooflines, on placeholders for its peaks: for ratios of costs, where a trace says what one of them is."""
    return CostModel(gpu_named("cpu"), "cpu", {})


@cache
def _shipped(name: str) -> dict[str, Regressor]:
    with resources.files("lumos").joinpath(f"data/costs/{name}.npz").open("rb") as file:
        return _decode(file.read(_MOST_BYTES), f"{name}.npz")[1]


def read_cost_model(path: Path, asked: str = "") -> CostModel:
    """A model file as `lumos fit` writes it, for the GPU it was fitted on or another that is asked about."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a file that `lumos fit` wrote") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path}: larger than any cost model; name a file that `lumos fit` wrote")
    name, regressors = _decode(data, str(path))
    fitted = find_gpu(name)
    if fitted is None:
        raise InputError(f"{path}: fitted on {name[:100]!r}, which is not known; fit it again with --gpu")
    gpu = gpu_named(asked) if asked else fitted
    return CostModel(gpu, fitted.name, regressors, cost_model(gpu.name))


def encode(gpu: str, regressors: dict[str, Regressor]) -> bytes:
    """A model as bytes: an .npz of plain arrays and one JSON header."""
    header = {
        "gpu": gpu,
        "regressors": {
            key: {"error_pct": r.error_pct, "rows": r.rows, "start": r.trees.start} for key, r in regressors.items()
        },
    }
    arrays: dict[str, Any] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for key, regressor in regressors.items():
        for column in ("root", "feature", "threshold", "left"):
            arrays[f"{key}/{column}"] = getattr(regressor.trees, column)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _decode(data: bytes, place: str) -> tuple[str, dict[str, Regressor]]:
    """(GPU, regressors) of a file; whatever is wrong in it is found here, since the loops over trees do not look."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            if sum(part.file_size for part in packed.infolist()) > _MOST_BYTES:
                raise ValueError("too large")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            header = json.loads(bytes(file["header"]))
            regressors = {key: _regressor(file, key, facts) for key, facts in header["regressors"].items()}
            return str(header["gpu"]), regressors
    except _CORRUPT:
        raise InputError(f"{place}: not a cost model; name a file that `lumos fit` wrote") from None


# What numpy, zipfile and json raise on bytes that were never written by `encode`.
_CORRUPT = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError, MemoryError, EOFError,
    OSError, SyntaxError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def _regressor(file: Any, key: str, facts: dict[str, Any]) -> Regressor:
    kinds = {"root": np.int32, "feature": np.int16, "threshold": np.float32, "left": np.int32}
    columns = {name: file[f"{key}/{name}"].astype(kind, casting="safe") for name, kind in kinds.items()}
    trees = Trees(**columns, start=float(facts["start"]))
    if not _is_sound(trees):
        raise ValueError("not trees")
    return Regressor(trees, float(facts["error_pct"]), int(facts["rows"]))


def _is_sound(trees: Trees) -> bool:
    """Whether every walk from a root ends in a leaf: children stand in the table, and after their parents."""
    columns = (trees.feature, trees.threshold, trees.left)
    nodes = len(trees.feature)
    if trees.root.ndim != 1 or any(column.shape != (nodes,) for column in columns):
        return False
    parents = np.flatnonzero(trees.feature >= 0)
    below = trees.left[parents]
    return bool(
        (trees.root >= 0).all() and (trees.root < nodes).all()
        and (below > parents).all() and (below < nodes - 1).all()
        and np.isfinite(trees.threshold).all() and np.isfinite(trees.start)
    )  # fmt: skip
