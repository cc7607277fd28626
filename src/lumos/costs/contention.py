"""Contention: what a communication kernel costs the kernels beside it, and what they cost it.

NCCL runs on the GPU's own multiprocessors (SMs): a block of threads for each channel, which stays until the collective
has ended. Measured on an H200 (calibration/contention_h200.py), what that costs other kernels depends on their kind:

- Matmuls lose whole rounds. Their tiles fill the SMs round after round; if a few SMs are taken, the last tiles need a
  round more, and cuBLAS's persistent kernels, which count on every SM, one or two more. How much the communication
  moves does not matter. A matmul that leaves enough SMs free loses nothing.
- Attention loses about the share of the SMs that are taken.
- Memory-bound kernels lose that share too, and the bandwidth that the communication moves.

The communication itself is slower where it is bound by its SMs, that is, by the links of an NVLink domain: the clock
falls. Between nodes it loses that only where those links and not the adapters bind it (`Network.kept`).

The tables are in data/contention.json (calibration/fit_contention.py). GPUs without persistent matmuls (before Hopper)
lose the share of the SMs that are taken: 1.01 to 1.15 in public traces of V100s, of whose 80 SMs NCCL held 8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.data_files import read_table
from lumos.graph.graph import Graph
from lumos.graph.overlap import Side
from lumos.graph.rules.build import Execution
from lumos.graph.rules.rendezvous import POINT_TO_POINT
from lumos.program.operators import Collective, Group, Operator
from lumos.setup.gpus import Gpu, gpu_called, gpu_named
from lumos.trace.names import Kind

Floats = NDArray[np.float64]

# Rows and columns that one block of a matmul computes, as the names of cuBLAS's kernels on an H200 have them.
_TILES = ((256, 128), (128, 256), (320, 128), (192, 192))
_PERSISTENT = ("hopper", "blackwell")  # families whose matmuls start one block for each SM


class Beside(NamedTuple):
    """A communication kernel, as the kernels beside it see it."""

    blocks: int  # SMs that it holds: NCCL's channels
    gb_s: float  # of memory that it reads and writes
    inside: bool  # it stays in an NVLink domain


def kernel_of(collective: Collective, us: float) -> Beside:
    """The kernel of a collective that takes so long."""
    kind, size, group = collective
    moved = read_table("contention.json")["moved"][kind] * size
    return Beside(channels_of(kind, group), moved / max(us, 1e-9) / 1e3, group.nodes == 1)


def channels_of(kind: str, group: Group) -> int:
    """NCCL's channels: all that the links of a domain can use, or a few for every adapter that the group has."""
    table = read_table("contention.json")["channels"]
    if kind == "p2p":
        return int(table["message"])
    if group.nodes == 1:
        return int(table["domain"])
    return int(min(table["most_between"], table["adapter"] * group.inside))


def rounds_of(operator: Operator, gpu: Gpu) -> int:
    """How often the tiles of a matmul fill the SMs, the last time perhaps in part."""
    return ceil(_tiles(operator, gpu.sms) / gpu.sms)


def userbuffers_blocks() -> int:
    """What Transformer Engine's kernels hold for communication beside matmuls."""
    return int(read_table("contention.json")["channels"]["userbuffers"])


def rail_blocks() -> int:
    """What DeepEP's kernels hold for exchanges between experts."""
    return int(read_table("contention.json")["channels"]["rails"])


@lru_cache(maxsize=1 << 16)
def slowdown(operator: Operator, beside: Beside, gpu: Gpu) -> float:
    """Time of a kernel beside the communication, over its time alone."""
    if gpu.is_cpu or beside.blocks <= 0:
        return 1.0
    table = read_table("contention.json")
    blocks = min(beside.blocks * table["sms"] / gpu.sms, max(table["blocks"]))
    if operator.kind.startswith("sdpa"):
        return float(np.interp(blocks, table["blocks"], table["attention"]))
    if operator.is_matrix:
        return _matmul(_tiles(operator, gpu.sms), beside.blocks, blocks, gpu, table)
    bandwidth = min(1.0, beside.gb_s / gpu.hbm_gb_s)
    return float(np.interp(blocks, table["blocks"], table["memory"]) + table["bandwidth"] * bandwidth)


def _matmul(tiles: float, taken: int, blocks: float, gpu: Gpu, table: dict[str, Any]) -> float:
    left = max(1, gpu.sms - 2 * taken)  # clusters of two blocks: a taken SM keeps its neighbour from them
    rounds = ceil(tiles / gpu.sms)
    if tiles <= left:
        return 1.0
    if gpu.family not in _PERSISTENT:
        return gpu.sms / max(1, gpu.sms - taken)
    known = np.array(table["matmul"])
    each = [np.interp(rounds, table["rounds"], column) for column in known.T]
    return float(np.interp(blocks, table["blocks"], each))


def usual_slowdown(kind: str, us: Floats, blocks: float, gpu: Gpu | None = None) -> Floats:
    """The same of kernels that are known by their kind (matmul, attention, memory) and their time alone.

    Without a GPU, it is taken to be one with persistent matmuls.
    """
    table = read_table("contention.json")
    if kind == "matmul" and gpu is not None and gpu.family not in _PERSISTENT:
        return np.full(len(us), gpu.sms / max(1.0, gpu.sms - blocks))
    scaled = blocks * table["sms"] / gpu.sms if gpu is not None else blocks
    if kind != "matmul":
        return np.full(len(us), float(np.interp(scaled, table["blocks"], table[kind])))
    each = np.array([np.interp(scaled, table["blocks"], row) for row in table["matmul_by_us"]])
    return np.asarray(np.interp(np.log(np.maximum(us, 1e-3)), np.log(table["us"]), each))


@lru_cache(maxsize=1 << 16)
def _tiles(operator: Operator, sms: int) -> float:
    """Of a matmul, all its batches and experts; of two that stand for one operator, the mean."""
    if operator.kind.startswith("grouped_gemm"):
        experts, tokens, n, k = operator.shape
        if operator.kind == "grouped_gemm_nt":  # of weights: as many as there are experts
            return experts * _of_one(n, k, sms, experts)
        return experts * _of_one(ceil(tokens / experts), n, sms, experts)
    if operator.kind.startswith("bmm"):
        batch, m, n, k = operator.shape
        return batch * _of_one(m, n, sms, batch)
    m, n, k = operator.shape
    if operator.kind == "linear_bwd":
        return (_of_one(m, k, sms) + _of_one(n, k, sms)) / 2
    return _of_one(m, n, sms)


def _of_one(m: int, n: int, sms: int, count: int = 1) -> float:
    """Tiles of the shape that takes the least time."""
    found = [(ceil(m / rows) * ceil(n / columns), rows * columns) for rows, columns in _TILES]
    return min(found, key=lambda tiles: ceil(count * tiles[0] / sms) * tiles[1])[0]


def kept_rate() -> float:
    """The share of its speed that communication inside a domain keeps beside the matmuls of a pass."""
    return float(read_table("contention.json")["kept"]["matmul"])


# ---------------------------------------------------------------------- kernels of a trace, known by their names
_HOPPER_NAME = re.compile("nvjet|sm90|sm100")
_ON_SMS = re.compile("nccl|rccl", re.IGNORECASE)  # the kernels whose channels are blocks; others hold a few SMs or none


def sides(execution: Execution, graph: Graph) -> tuple[Side, Side] | None:
    """Kernels and transfers that disturb each other; None where nothing runs beside communication."""
    nodes, trace = execution.nodes, execution.trace
    named = np.array([_ON_SMS.search(name) is not None for name in trace.names], bool)
    known = nodes.on_gpu & (nodes.row >= 0)
    transfers = np.flatnonzero(known & (nodes.kind == Kind.COMM) & nodes.is_return & named[trace.name[nodes.row]])
    kernels = np.flatnonzero(known & (nodes.kind == Kind.COMPUTE))
    if not len(transfers) or not len(kernels):
        return None
    speed = 1 / _slowdowns(execution, graph.duration[kernels] / 1e3, trace.name[nodes.row[kernels]], transfers)
    quiet = np.ones(len(transfers))  # recorded communication includes waiting: what it lost to kernels is not known
    rank = nodes.rank.astype(np.int64)
    return Side(kernels, rank[kernels], speed), Side(transfers, rank[transfers], quiet)


def _slowdowns(execution: Execution, us: Floats, names: np.ndarray, transfers: np.ndarray) -> Floats:
    """Of every kernel, beside the usual communication of the run."""
    texts = read_table("operator_names.toml")["kernels"]
    is_a = {
        key: np.array([re.search(texts[key], name) is not None for name in execution.trace.names], bool)[names]
        for key in ("attention", "matrix")
    }
    trace = execution.trace
    named = trace.headers[0].gpu if trace.headers else ""
    blocks, gpu = _usual_blocks(execution, transfers), gpu_of_trace(named, trace.names)
    found = usual_slowdown("memory", us, blocks, gpu)
    for kind, mask in (("matmul", is_a["matrix"]), ("attention", is_a["attention"])):
        found[mask] = usual_slowdown(kind, us[mask], blocks, gpu)
    return found


def gpu_of_trace(name: str, kernels: Iterable[str]) -> Gpu:
    """The GPU of a trace, or where its name says nothing, one of the generation that its matmuls are compiled for."""
    return gpu_called(name) or gpu_named("h100" if any(_HOPPER_NAME.search(kernel) for kernel in kernels) else "a100")


def _usual_blocks(execution: Execution, transfers: np.ndarray) -> float:
    """SMs that communication holds, as a mean over its time. Groups of up to eight ranks are taken to share a node."""
    trace, rows = execution.trace, execution.nodes.row[transfers]
    node = 8
    blocks = []
    for index in trace.message[rows].tolist():
        size = max(2, trace.messages[index].group_size) if index >= 0 else 2
        kind = "p2p" if index >= 0 and trace.messages[index].collective in POINT_TO_POINT else "all_reduce"
        blocks.append(channels_of(kind, Group(size, min(size, node))))
    length = np.maximum((execution.nodes.end - execution.nodes.start)[transfers], 1)
    return float(np.average(blocks, weights=length))
