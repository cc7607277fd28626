"""CostModel: what operators cost on one GPU, alone and from a cold cache.

A model is a set of boosted trees, one for each family of operators, that correct a roofline; it was fitted on samples of
one GPU, and answers for another by the other's roofline and its own corrections. Where a family was not sampled, what
was is used: the two gradients of a linear layer for each other, a plain copy for whatever only moves data.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from lumos.costs.features import Chip, features, roofline_us
from lumos.costs.operator import Operator
from lumos.costs.trees import Trees
from lumos.errors import InputError
from lumos.setups.gpus import Gpu, gpu_named

_FAMILY = {"gemm_tn": "gemm", "gemm_nn": "gemm", "gemm_nt": "gemm"}
_SAMPLED_ON = {"h200": "h200", "gh200": "gh200", "a100": "a100", "a100-40": "a100"}
_BORROWS = {"volta": "a100", "ampere": "a100", "ada": "a100"}  # everything else resembles the H200 most
_MOST_BYTES = 1 << 27  # of a model file


@dataclass(frozen=True)
class Regressor:
    """Trees for one family, and how far off they were on shapes held apart, in percent."""

    trees: Trees
    error_pct: float
    rows: int


@dataclass(frozen=True)
class CostModel:
    """Operators' costs, as fitted on `sampled` and asked for `gpu`."""

    gpu: Gpu
    sampled: str
    regressors: dict[str, Regressor]
    fallback: CostModel | None = None  # for families that `sampled` lacks
    _known: dict[Operator, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def transferred(self) -> bool:
        """Whether the GPU itself was never sampled."""
        return _SAMPLED_ON.get(self.gpu.name) != self.sampled

    def us(self, operator: Operator) -> float:
        """Microseconds of one operator; every operator is worked out once."""
        known = self._known.get(operator)
        if known is None:
            known = self._known[operator] = self._priced([operator])[0]
        return known

    def us_of_all(self, operators: list[Operator]) -> list[float]:
        """Microseconds of many operators."""
        return [self.us(operator) for operator in operators]

    def _priced(self, operators: list[Operator]) -> list[float]:
        return [self._price(operator) for operator in operators]

    def _price(self, operator: Operator) -> float:
        regressor = self._regressor(operator)
        if regressor is not None:
            chip = chip_of(self.gpu, operator.dtype)
            row = np.array([features(operator, chip)])
            return roofline_us(operator, chip) * float(np.exp(regressor.trees(row)[0]))
        for other in _in_other_words(operator):
            if all(self._regressor(part) is not None for part, _ in other):
                return sum(self.us(part) * share for part, share in other)
        if self.fallback is not None:
            return self.fallback.us(operator)
        return roofline_us(operator, chip_of(self.gpu, operator.dtype))

    def _regressor(self, operator: Operator) -> Regressor | None:
        dtype = _STORED.get(operator.dtype, operator.dtype)
        suffix = "" if dtype in ("bf16", "fp16") else f":{dtype}"
        exact = self.regressors.get(operator.kind + suffix)
        return exact or self.regressors.get(_FAMILY.get(operator.kind, operator.kind) + suffix)


@dataclass(frozen=True)
class OlderKernels:
    """Kernels built for an older GPU: its times, at the multiprocessors and clock of the one they run on."""

    model: CostModel
    speed: float

    def us(self, operator: Operator) -> float:
        return self.model.us(operator) / self.speed


_FLASH_2 = 1.8  # times as fast as FlashAttention 1, which is what was sampled on A100 (Dao 2023: "around 2x")


@cache
def flash_kernels(gpu: Gpu, generation: str) -> OlderKernels | None:
    """Flash attention of a generation on a GPU; None where the GPU's own samples are of that generation."""
    newer = gpu.family in ("hopper", "blackwell")
    if newer and generation == "native":
        return None
    older = gpu_named("a100")
    speed = gpu.sms * gpu.clock_ghz / (older.sms * older.clock_ghz) if newer else 1.0
    model = cost_model("a100") if newer else cost_model(gpu.name)
    return OlderKernels(model, speed * (1.0 if generation == "flash-1" else _FLASH_2))


_STORED = {"mxfp8": "fp8", "nvfp4": "fp8"}  # sampled formats that stand for others of their kind


def _in_other_words(operator: Operator) -> list[list[tuple[Operator, float]]]:
    """Ways to say an operator by others: (operator, share of its time)."""
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
    sampled = _SAMPLED_ON.get(gpu.name) or _BORROWS.get(gpu.family, "h200")
    fallback = None if sampled == "h200" else CostModel(gpu, "h200", _shipped("h200"))
    return CostModel(gpu, sampled, _shipped(sampled), fallback)


@cache
def _shipped(name: str) -> dict[str, Regressor]:
    with resources.files("lumos").joinpath(f"data/costs/{name}.npz").open("rb") as file:
        return _decode(file.read(_MOST_BYTES), f"{name}.npz")[1]


def read_cost_model(path: Path) -> CostModel:
    """A model file as `lumos fit` writes it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path}: larger than any cost model; name a file that `lumos fit` wrote")
    name, regressors = _decode(data, str(path))
    gpu = gpu_named(name)
    return CostModel(gpu, gpu.name, regressors, CostModel(gpu, "h200", _shipped("h200")))


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
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            header = json.loads(bytes(file["header"]))
            regressors = {
                key: Regressor(
                    Trees(*(file[f"{key}/{c}"] for c in ("root", "feature", "threshold", "left")), facts["start"]),
                    float(facts["error_pct"]),
                    int(facts["rows"]),
                )
                for key, facts in header["regressors"].items()
            }
            return str(header["gpu"]), regressors
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile):
        raise InputError(f"{place}: not a cost model; name a file that `lumos fit` wrote") from None
