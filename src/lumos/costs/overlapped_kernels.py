"""Overlapped kernels: which kernels of a trace disturb each other, and by how much (lumos.costs.contention).

A kernel that was recorded beside communication has its longer time in the trace. If the communication moves or gets
shorter in a what-if, the kernel gets faster: it is simulated with the time that it would take alone, and is slower for
as long as communication runs beside it. A step of a dry run has kernels that are priced alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from lumos.costs.contention import channels_of, usual_slowdown
from lumos.data_files import read_table
from lumos.graph.graph import Floats, Graph
from lumos.graph.overlap import Side
from lumos.graph.rules.build import Execution
from lumos.graph.rules.rendezvous import POINT_TO_POINT
from lumos.program.operators import Group
from lumos.setup.gpus import Gpu, gpu_called, gpu_named
from lumos.trace.names import Kind

_PERSISTENT = re.compile("nvjet|sm90|sm100")
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
    blocks, gpu = _usual_blocks(execution, transfers), chip_of(named, trace.names)
    found = usual_slowdown("memory", us, blocks, gpu)
    for kind, mask in (("matmul", is_a["matrix"]), ("attention", is_a["attention"])):
        found[mask] = usual_slowdown(kind, us[mask], blocks, gpu)
    return found


def chip_of(name: str, kernels: Iterable[str]) -> Gpu:
    """The GPU of a trace, or where its name says nothing, one of the generation that its matmuls are compiled for."""
    return gpu_called(name) or gpu_named("h100" if any(_PERSISTENT.search(kernel) for kernel in kernels) else "a100")


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
