"""CostModel: what operators cost on one GPU, alone and with a cold cache.

A model is a set of boosted trees, one for each family of operators, that correct a roofline. It was fitted on samples
of one GPU, and predicts another by the roofline of that GPU and the same corrections. A family without samples is
expressed by sampled ones: the two gradients of a linear layer by each other, memory-bound operators by a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import ceil, log2, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.data_files import data_file, read_table
from lumos.dtypes import BYTES
from lumos.errors import InputError, OptionError
from lumos.graph.loops import worth_compiling
from lumos.model_file import CORRUPT, Arrays, ModelFile, read_model_file, unpacked
from lumos.program.operators import Operator, stand_in
from lumos.setup.gpus import Gpu, find_gpu, gpu_named, gpu_names

Floats = NDArray[np.float64]
_NODES_OF_A_ROW = 50  # of a graph, that plain Python simulates in the time of one row of hundreds of trees


class Trees(NamedTuple):
    """Nodes of all trees in one table; a node without a feature (-1) is a leaf and holds its value."""

    root: NDArray[np.int32]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]  # the value, in a leaf
    left: NDArray[np.int32]  # right is left + 1
    start: float

    def __call__(self, rows: Floats) -> Floats:
        """The sum of the trees' answers for every row of features."""
        rows = np.ascontiguousarray(rows, np.float64)
        if not worth_compiling(_NODES_OF_A_ROW * len(rows)):
            leaves: Floats = self._leaves(rows).sum(axis=1)
            return self.start + leaves
        from lumos.graph.compiled_loops import sum_of_trees

        total: Floats = sum_of_trees(rows, self.root, self.feature, self.threshold, self.left)
        return self.start + total

    def _leaves(self, rows: Floats) -> Floats:
        """The leaf of every (row, tree), all of them going down a level at a time."""
        node = np.broadcast_to(self.root, (len(rows), len(self.root))).copy()
        which = np.arange(len(rows))[:, None]
        while True:
            feature = self.feature[node]
            inner = feature >= 0
            if not inner.any():
                return self.threshold[node].astype(np.float64)
            right = rows[which, np.maximum(feature, 0)] > self.threshold[node]
            node = np.where(inner, self.left[node] + right, node)


class Chip(NamedTuple):
    """The rates and sizes of a GPU that features and rooflines depend on."""

    peak: float  # dense operations per microsecond, in the operator's precision
    vector: float  # the same without tensor cores
    bandwidth: float  # bytes per microsecond
    processors: int
    cache: float  # bytes of second-level cache


_LAYOUTS = ("gemm_tn", "gemm_nn", "gemm_nt")
_GROUPED = ("grouped_gemm", "grouped_gemm_nn", "grouped_gemm_nt")
_TILES = ((128, 128), (128, 256), (256, 128), (192, 192), (64, 256), (256, 256), (320, 128), (64, 64))


def roofline_us(operator: Operator, chip: Chip) -> float:
    """The lower bound of the roofline plus the shortest kernel: what fitted models correct."""
    peak = chip.peak if operator.is_matrix else chip.vector
    shortest: float = read_table("operator_costs.json")["shortest_us"]
    return max(operator.flops / peak, operator.bytes / chip.bandwidth) + shortest


def features(operator: Operator, chip: Chip) -> list[float]:
    """The feature vector of an operator; its length depends on the kind alone."""
    work, data = max(operator.flops, 1.0), max(operator.bytes, 1.0)
    peak = chip.peak if operator.is_matrix else chip.vector
    common = [
        log2(work / peak + 0.01),
        log2(data / chip.bandwidth + 0.01),
        log2(work / peak + 0.01) - log2(data / chip.bandwidth + 0.01),
        log2(data / chip.cache),
    ]
    logs = [log2(max(1, size)) for size in operator.shape]
    if operator.kind in _LAYOUTS or operator.kind == "linear_bwd":
        layout = [float(operator.kind == other) for other in _LAYOUTS]
        return [*common, *logs, *_gemm_features(operator.shape, chip), *layout]
    if operator.kind in ("bmm", "bmm_bwd"):
        batch, m, n, k = operator.shape
        return [*common, *logs, *_tile_features(m, n, batch, chip), *_remainders(m, n, k)]
    if operator.kind.startswith("sdpa"):
        return [*common, *logs, *_attention_features(operator.shape, chip)]
    plain = [*common, *logs, *_remainders(*operator.shape), log2(prod(operator.shape))]
    return [*plain, *_grouped_features(operator, chip)] if operator.kind in _GROUPED else plain


def _gemm_features(shape: tuple[int, ...], chip: Chip) -> list[float]:
    m, n, k = shape
    return [
        *_tile_features(m, n, 1, chip), *_remainders(m, n, k), log2(m / n), log2(k) - 0.5 * log2(m * n),
        float(k), float(n), float(m),
    ]  # fmt: skip


def _grouped_features(operator: Operator, chip: Chip) -> list[float]:
    """Tokens of one expert, which its tiles are filled with or, for gradients of weights, go through in depth."""
    experts, tokens, n, k = operator.shape
    each = ceil(tokens / experts)
    rows, columns = {"grouped_gemm": (each, n), "grouped_gemm_nn": (each, k)}.get(operator.kind, (n, k))
    layout = [float(operator.kind == other) for other in _GROUPED]
    return [log2(tokens / experts), *_tile_features(rows, columns, experts, chip), *layout]


def _tile_features(m: int, n: int, batch: int, chip: Chip) -> list[float]:
    """For each tile: how much of the last wave, and of the padded output, is of use."""
    values = []
    for rows, columns in _TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        waves = tiles / chip.processors
        padded = tiles * rows * columns
        values += [waves / ceil(waves) * (batch * m * n / padded), min(waves, 16.0)]
    return values


def _remainders(*sizes: int) -> list[float]:
    """How often each size can be halved, up to 256: alignment decides which kernels may run."""
    return [float(min(8, (size & -size).bit_length() - 1)) for size in sizes]


def _attention_features(shape: tuple[int, ...], chip: Chip) -> list[float]:
    b, h, s, _ = shape
    blocks = b * h * ceil(s / 128)
    waves = blocks / chip.processors
    return [log2(b * h), min(waves, 64.0), waves / ceil(waves), log2(b * h / chip.processors), float(s % 128 == 0)]


_FAMILY = {
    "gemm_tn": "gemm", "gemm_nn": "gemm", "gemm_nt": "gemm", "grouped_gemm_nn": "grouped_gemm",
    "grouped_gemm_nt": "grouped_gemm",
}  # fmt: skip
_STORED = {"mxfp8": "fp8", "nvfp4": "fp8"}  # sampled formats that stand for others
_LARGEST_LEAF = 5.0  # of the trees that were shipped: 0.1
_FARTHEST = 30.0  # log of measured time / roofline, which damaged trees may exceed
_NEAR = 2.0  # times a sampled size: so far, the correction of the roofline is taken to hold
_COLUMNS = {"root": np.int32, "feature": np.int16, "threshold": np.float32, "left": np.int32}


@dataclass(frozen=True)
class Regressor:
    """Trees for one family of operators, and their mean error on held-out shapes."""

    trees: Trees
    error_pct: float
    rows: int
    least: tuple[float, ...] = ()  # the smallest sampled size of every dimension; () where it is not known
    most: tuple[float, ...] = ()

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether a shape lies within those sampled, or so near that their correction of the roofline still holds."""
        if len(shape) != len(self.most):
            return True
        sizes = zip(self.least, shape, self.most, strict=True)
        return all(least / _NEAR <= size <= most * _NEAR for least, size, most in sizes)

    @cached_property
    def width(self) -> int:
        """The number of features that the trees need."""
        return int(self.trees.feature.max(initial=-1)) + 1


Equivalent = list[tuple[Operator, float]]  # operators whose times, each multiplied by its factor, add up to another's


@dataclass(frozen=True)
class CostModel:
    """Costs of operators on `gpu`, from samples of the GPU `sampled`.

    `cost_model("h100").us(Operator("gemm_tn", (4096, 4096, 4096)))` is the time of a matmul in microseconds.
    """

    gpu: Gpu
    sampled: str
    regressors: dict[str, Regressor]
    fallback: CostModel | None = None  # for families that `sampled` lacks
    isolation_us: float = 0.0  # what timing a kernel alone adds to it
    measured_on: Gpu | None = None  # the GPU of a model file; None where `sampled` is a known GPU
    _known: dict[Operator, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def transferred(self) -> bool:
        """Whether a GPU with these rates was never sampled."""
        if self.measured_on is not None:
            return rates_of(self.gpu) != rates_of(self.measured_on)
        same = self.sampled in (self.gpu.base, read_table("operator_costs.json")["samples_of"].get(self.gpu.base))
        return not same or rates_of(self.gpu) != rates_of(gpu_named(self.gpu.base))

    def us(self, operator: Operator) -> float:
        """Microseconds of one operator, computed on first use."""
        known = self._known.get(operator)
        return self.us_of_all([operator])[0] if known is None else known

    def us_of_all(self, operators: Sequence[Operator]) -> list[float]:
        """Microseconds of many operators; new ones are computed together, a family at a time."""
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
        """The GPU whose samples the price of an operator rests on; "" for a roofline estimate."""
        if self.has_samples_of(operator):
            return self.sampled
        return self.fallback.sampled_on(operator) if self.fallback is not None else ""

    def has_samples_of(self, operator: Operator) -> bool:
        """Whether its own samples price an operator, and not those of the fallback or a roofline."""
        return bool(self._key(operator) or self._equivalent(operator))

    def kernel(self, operator: Operator) -> Operator:
        """One of the matmuls that run in turn where experts' matmuls have no samples; else the operator itself."""
        if not operator.kind.startswith("grouped_gemm") or self._key(operator):
            return operator
        for part, _ in self._equivalent(operator):
            return part
        return operator if self.fallback is None else self.fallback.kernel(operator)

    def covers(self, operator: Operator) -> bool:
        """Whether an operator is like those that were sampled; a family without samples says nothing of it."""
        key = self._key(operator)
        return not key or self.regressors[key].covers(operator.shape)

    def bound(self, operator: Operator) -> str:
        """The side of the roofline that an operator is on: "compute" or "memory"."""
        chip = chip_of(self.gpu, operator.dtype)
        peak = chip.peak if operator.is_matrix else chip.vector
        return "compute" if operator.flops / peak > operator.bytes / chip.bandwidth else "memory"

    def _fitted(self, key: str, operators: list[Operator]) -> list[float]:
        """Operators of one family: their rooflines, corrected by its trees."""
        costs, sampled = self._corrected(key, operators, self.gpu), self.measured_on or gpu_named(self.sampled)
        if rates_of(self.gpu) == rates_of(sampled):
            return costs
        measured, alike = self._corrected(key, operators, sampled), _same_silicon(rated_gpu(self.gpu))
        known = _bounded(self._corrected(key, operators, alike), operators, alike, measured, sampled)
        return _bounded(_bounded(costs, operators, self.gpu, known, alike), operators, self.gpu, measured, sampled)

    def _corrected(self, key: str, operators: list[Operator], gpu: Gpu) -> list[float]:
        """Rooflines of a GPU, corrected by the trees of a family for the chip that this GPU usually has."""
        regressor = self.regressors[key]
        usual = [chip_of(rated_gpu(gpu), operator.dtype) for operator in operators]
        rows = np.array([features(operator, chip) for operator, chip in zip(operators, usual, strict=True)])
        if regressor.width > rows.shape[1]:
            raise InputError(f"the cost model for {self.sampled} does not fit {key}; fit it again with `lumos fit`")
        base = np.array([roofline_us(operator, chip_of(gpu, operator.dtype)) for operator in operators])
        costs: list[float] = (base * np.exp(np.clip(regressor.trees(rows), -_FARTHEST, _FARTHEST))).tolist()
        return costs

    def _unfitted(self, operators: list[Operator]) -> Iterator[tuple[Operator, float]]:
        """Operators without trees of their own: by equivalent operators, the fallback, or the roofline alone."""
        equivalents = {operator: self._equivalent(operator) for operator in operators}
        self.us_of_all([part for equivalent in equivalents.values() for part, _ in equivalent])
        for operator, equivalent in equivalents.items():
            if equivalent:
                yield operator, sum(self.us(part) * factor for part, factor in equivalent)
        rest = [operator for operator, equivalent in equivalents.items() if not equivalent]
        if self.fallback is not None:
            yield from zip(rest, self.fallback.us_of_all(rest), strict=True)
        else:
            yield from ((operator, roofline_us(operator, chip_of(self.gpu, operator.dtype))) for operator in rest)

    def _equivalent(self, operator: Operator) -> Equivalent:
        """Sampled operators that do the same work; empty where there are none."""
        equivalent = _equivalent_of(operator)
        if operator.kind == "stream" and "copy" not in self.regressors:
            equivalent = [(_copy(operator, "fp32"), 1.0)]
        return equivalent if all(self._key(part) for part, _ in equivalent) else []

    def _key(self, operator: Operator) -> str:
        """The name of the trees for an operator, or ""."""
        dtype = _STORED.get(operator.dtype, operator.dtype)
        suffix = "" if dtype in ("bf16", "fp16") else f":{dtype}"
        family = _FAMILY.get(operator.kind, operator.kind)
        # What only moves data, and attention, behaves in wider numbers as it does in narrow ones, at more bytes.
        # Matmuls do not: those of experts in 8 bits take up to 1.7 times as long as that (calibration/moe_h200.py).
        narrow = () if family in ("gemm", "grouped_gemm") or operator.kind == "linear_bwd" else (operator.kind,)
        names = (operator.kind + suffix, family + suffix, *narrow)
        return next((name for name in names if name in self.regressors), "")


def _equivalent_of(operator: Operator) -> Equivalent:
    """Other operators that do the same work."""
    kind, shape, dtype = operator
    if kind == "gemm_nn":
        m, n, k = shape
        return [(Operator("linear_bwd", (m, k, n), dtype), 0.5)]
    if kind == "gemm_nt":
        m, n, k = shape
        return [(Operator("linear_bwd", (k, m, n), dtype), 0.5)]
    if kind == "linear_bwd":
        m, n, k = shape
        return [(Operator("gemm_nn", (m, k, n), dtype), 1.0), (Operator("gemm_nt", (n, k, m), dtype), 1.0)]
    if kind == "bmm_bwd":
        return [(Operator("bmm", shape, dtype), 2.0)]
    if kind.startswith("grouped_gemm"):  # in turn, as Transformer Engine runs them; its four streams win nothing
        experts, tokens, n, k = shape
        each = max(1, tokens // experts)
        layouts = {"grouped_gemm": (each, n, k), "grouped_gemm_nn": (each, k, n), "grouped_gemm_nt": (n, k, each)}
        matmul = Operator(f"gemm_{kind[-2:] if kind != 'grouped_gemm' else 'tn'}", layouts[kind], dtype)
        return [(matmul, float(experts))]
    if kind == "stream":
        return [(_copy(operator, "bf16"), 1.0)]
    like = stand_in(kind)
    return [(Operator(like[0], shape, dtype), like[1])] if like else []


def _copy(stream: Operator, dtype: str) -> Operator:
    """A copy that reads and writes as many bytes."""
    width = 4096
    return Operator("copy", (max(1, round(stream.shape[0] / (2 * BYTES[dtype] * width))), width), dtype)


@cache
def chip_of(gpu: Gpu, dtype: str) -> Chip:
    """The rates of a GPU in a precision; where tensor cores lack the precision, those of the nearest wider one."""
    wider = {"nvfp4": "fp8", "mxfp8": "fp8", "fp8": "bf16", "bf16": "fp16", "tf32": "fp32", "fp16": "fp32"}
    while not gpu.supports(dtype):
        dtype = wider[dtype]
    return Chip(gpu.peak(dtype) * 1e6, gpu.peak_tflops["fp32"] * 1e6, gpu.hbm_gb_s * 1e3, gpu.sms, gpu.l2_mb * 1e6)


@lru_cache(maxsize=256)
def rated_gpu(gpu: Gpu) -> Gpu:
    """A GPU with the rates and the power that it is sold with: the known one that a data sheet or a setup changes."""
    return find_gpu(gpu.base) or gpu


@cache
def _same_silicon(gpu: Gpu) -> Gpu:
    """The first known GPU with the same multiprocessors and cache that was not sampled either; often the GPU itself."""
    sampled, size = read_table("operator_costs.json")["samples_of"], (gpu.family, gpu.sms, gpu.l2_mb)
    known = (gpu_named(name) for name in gpu_names() if name not in sampled and gpu.name not in sampled)
    return next((other for other in known if (other.family, other.sms, other.l2_mb) == size), gpu)


def _bounded(costs: list[float], operators: list[Operator], gpu: Gpu, known: list[float], other: Gpu) -> list[float]:
    """Costs on a GPU within what its rates allow: no further above another's than they are below, and not below it
    unless one of them is better.

    So a GPU with better rates throughout is never slower, whatever the noise of the trees.
    """
    found = []
    for price, usual, operator in zip(costs, known, operators, strict=True):
        there, here = chip_of(other, operator.dtype), chip_of(gpu, operator.dtype)
        rate = there.peak / here.peak if operator.is_matrix else there.vector / here.vector
        ratios = (1.0, rate, *(old / new for old, new in zip(there[2:], here[2:], strict=True)))
        found.append(min(max(price, usual if min(ratios) >= 1 else 0.0), usual * max(ratios)))
    return found


def rates_of(gpu: Gpu) -> tuple[Any, ...]:
    """What operators on a GPU depend on."""
    return tuple(sorted(gpu.peak_tflops.items())), gpu.hbm_gb_s, gpu.sms, gpu.l2_mb


def cost_model(gpu: Gpu | str) -> CostModel:
    """The shipped model for a GPU: from its own samples, or those of the sampled GPU that is most like it."""
    return _cost_model(gpu_named(gpu) if isinstance(gpu, str) else gpu)


@cache
def _cost_model(gpu: Gpu) -> CostModel:
    if gpu.is_cpu:
        raise OptionError(
            f'cluster.gpu = "{gpu.shown}" is only known from a trace (lumos capture, then --from) or from samples '
            "(lumos sample, lumos fit, then --model)"
        )
    table = read_table("operator_costs.json")
    families = table["samples_of_family"]
    sampled = table["samples_of"].get(gpu.base) or families.get(gpu.family, families["other"])
    fallback = None if sampled == "h200" else CostModel(gpu, "h200", _shipped("h200"), None, _isolation_us("h200"))
    return CostModel(gpu, sampled, _shipped(sampled), fallback, _isolation_us(sampled))


def _isolation_us(sampled: str) -> float:
    """A pair of events on H200; other samples are spans of a profiler."""
    added = read_table("operator_costs.json")["isolation_us"]
    return float(added.get(sampled, added["other"]))


@cache
def cpu_model() -> CostModel:
    """Rooflines of a CPU on placeholder peaks: only ratios mean anything, where a trace has measured one of the two."""
    return CostModel(gpu_named("cpu"), "cpu", {})


@cache
def _shipped(name: str) -> dict[str, Regressor]:
    with data_file(f"costs/{name}.npz").open("rb") as file:
        return regressors_of(unpacked(file.read(), f"{name}.npz"))


def read_cost_model(path: Path, asked: str = "") -> CostModel:
    """The operators of a model file, for the GPU it was fitted on or for the GPU `asked`."""
    return fitted_model(read_model_file(path), gpu_named(asked or str(path)))


def fitted_model(file: ModelFile, gpu: Gpu) -> CostModel:
    """The operators of a model file on a GPU; families that it lacks are those of the shipped models."""
    fallback = None if gpu.is_cpu else cost_model(gpu)
    added = file.header.get("isolation_us", _isolation_us(gpu_named(file.place).name))
    if not isinstance(added, int | float) or not 0 <= added < 1e3:
        raise file.refused("isolation_us is no time")
    measured_on = gpu_named(file.place)
    if measured_on.is_cpu != gpu.is_cpu:
        raise OptionError(f"{file.place}: measured on {measured_on.shown}, and says nothing of {gpu.shown}")
    return CostModel(gpu, measured_on.name, regressors_of(file), fallback, float(added), measured_on)


def header_of(regressors: Mapping[str, Regressor]) -> dict[str, Any]:
    """What the header of a model file says of its trees."""
    return {
        key: {
            "error_pct": r.error_pct, "rows": r.rows, "start": r.trees.start, "least": list(r.least),
            "most": list(r.most),
        }
        for key, r in regressors.items()
    }  # fmt: skip


def arrays_of(regressors: Mapping[str, Regressor]) -> dict[str, Any]:
    """The trees as the arrays of a model file."""
    return {f"{key}/{column}": getattr(r.trees, column) for key, r in regressors.items() for column in _COLUMNS}


def regressors_of(file: ModelFile) -> dict[str, Regressor]:
    """The trees of a file. All damage is found here, because the loops over trees check nothing."""
    try:
        return {key: _regressor(file.arrays, key, facts) for key, facts in file.header["regressors"].items()}
    except CORRUPT:
        raise file.refused("its trees are damaged") from None


def _regressor(arrays: Arrays, key: str, facts: dict[str, Any]) -> Regressor:
    columns = {name: arrays[f"{key}/{name}"].astype(kind, casting="safe") for name, kind in _COLUMNS.items()}
    trees = Trees(**columns, start=float(facts["start"]))
    error_pct = float(facts["error_pct"])
    least, most = (tuple(float(size) for size in facts.get(end, ())) for end in ("least", "most"))
    if not _is_sound(trees) or not 0 <= error_pct <= 1e4 or len(least) != len(most):
        raise ValueError("not trees")
    return Regressor(trees, error_pct, int(facts["rows"]), least, most)


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
        and np.isfinite(trees.threshold).all() and abs(trees.start) < _FARTHEST
        and (np.abs(trees.threshold[trees.feature < 0]) < _LARGEST_LEAF).all()
    )  # fmt: skip
