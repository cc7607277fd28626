"""Features: what the cost of an operator depends on, as dimensionless numbers.

Everything that belongs to the GPU enters as a ratio (waves over its multiprocessors, operations over its peak, bytes
over its cache), so that a model fitted on one GPU can predict a similar one.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import NamedTuple

from lumos.data_files import read_table
from lumos.program.operators import Operator


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
