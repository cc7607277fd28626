"""A CPU as the device: in a run without a GPU, operators are the kernels, and a call to one returns when it is done.

    thread   [ aten::linear [ aten::mm ················ ]]  [c10d::allreduce_]  [aten::mm ·····]      ┌►[copy to grad]
    stream cpu              [ cpu_gemm_mm               ]         │             [cpu_gemm_mm   ]      │
    stream gloo                                                   └─►[ gloo:all_reduce ··· waits, then transfers ]

Rows for the calls and their kernels are added to the trace, so that rules and reports need no case for CPUs. gloo runs
collectives on threads of its own and records neither their group nor their size: those of one name are matched across
ranks in their order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from lumos.data_files import read_table
from lumos.trace.names import CPU_COMPUTE, CPU_SUBMIT, Category, collective_name
from lumos.trace.trace import Message, Rows, Small, Trace

GLOO = "gloo:"
_MATRIX = re.compile(r"^(addmm|mm|bmm|baddbmm|addbmm|linear|_addmm_activation|mkldnn_linear|_mkl_linear)$")
_OPERATOR = re.compile(r"^(?!autograd::|torch::autograd::|c10d::)[\w.]+::")
_OWN_SHARE = read_table("trace_rules.toml")["cpu_device"]["own_share"]


def with_cpu_device(trace: Trace) -> Trace:
    """The trace of a run without any GPU with its operators as kernels; any other trace as it is."""
    if trace.on_gpu.any() or (trace.category == Category.CALL).any() or not (trace.category == Category.OP).any():
        return trace
    trace = _gloo_on_streams(trace)
    return _with_kernels(trace, *_computing(trace))


def is_cpu_run(trace: Trace) -> bool:
    """Whether a CPU is the device of a trace that `with_cpu_device` has seen."""
    return CPU_COMPUTE in trace.names


def _kernel_name(operator: str) -> str:
    """What an operator is called as a kernel, so that matmuls and attention are recognised as on a GPU."""
    bare = operator.removeprefix("aten::")
    return f"cpu_gemm_{bare}" if _MATRIX.match(bare) else f"cpu_{bare}"


def _computing(trace: Trace) -> tuple[Rows, Rows]:
    """(operators that do work of their own, operators that are a small part of one of those)."""
    from lumos.graph.compiled_loops import cut_into_segments

    rows = np.flatnonzero(trace.category == Category.OP)
    rows = rows[np.lexsort((-trace.end[rows], trace.start[rows], trace.lane[rows]))]
    no = np.zeros(len(rows), bool)
    parent = cut_into_segments(trace.lane[rows], trace.start[rows], trace.end[rows], no, no)[-1]
    inner = np.bincount(parent[parent >= 0], trace.duration[rows[parent >= 0]], len(rows))
    works = _names_that_work(trace, rows, inner)[trace.name[rows]] & (trace.duration[rows] > 0)
    within, deeper = no, works[parent] & (parent >= 0)
    while (deeper & ~within).any():
        within = within | deeper
        deeper = within[parent] & (parent >= 0)
    return rows[works & ~within], rows[within]


def _names_that_work(trace: Trace, rows: Rows, inner: np.ndarray) -> np.ndarray:
    """Which operators, by name, spend most of their time themselves; the median, as any call may be interrupted."""
    works = np.zeros(len(trace.names), bool)
    share = inner / np.maximum(trace.duration[rows], 1)
    order = np.argsort(trace.name[rows], kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(trace.name[rows[order]])) + 1):
        name = trace.name[rows[part[0]]]
        works[name] = _OPERATOR.match(trace.names[name]) is not None and float(np.median(share[part])) < _OWN_SHARE
    return works


def _gloo_on_streams(trace: Trace) -> Trace:
    """Collectives of gloo as communication kernels, each thread of gloo a stream."""
    rows = np.flatnonzero((trace.category == Category.NOTE) & (_collectives(trace, GLOO) != "")[trace.name])
    if len(rows) == 0:
        return trace
    messages: dict[int, Message] = {}
    for (_, name), mine in _by_rank_and_name(trace, rows, GLOO).items():
        # Each is a group of its own, numbered from the end: ranks may miss different leading collectives.
        messages |= {r: Message(name, group=f"{len(mine) - i} from the end") for i, r in enumerate(mine.tolist())}
    known = {message: len(trace.messages) + at for at, message in enumerate(dict.fromkeys(messages.values()))}
    category, message, lane = trace.category.copy(), trace.message.copy(), trace.lane.copy()
    category[rows] = Category.KERNEL
    message[rows] = [known[messages[row]] for row in rows.tolist()]
    threads = np.unique(trace.lane[rows])
    lane[rows] = len(trace.lanes) + np.searchsorted(threads, trace.lane[rows])
    lanes = [trace.lanes[i]._replace(is_stream=True, label=f"gloo {trace.lanes[i].label}") for i in threads.tolist()]
    moved = replace(
        trace, category=category, message=message, lane=lane, lanes=(*trace.lanes, *lanes),
        messages=(*trace.messages, *known),
    )  # fmt: skip
    return _submitted(moved, rows)


def _submitted(trace: Trace, kernels: Rows) -> Trace:
    """With a call in every `c10d::` operator that started a collective: those of one name, in order, from the end."""
    operators = np.flatnonzero((trace.category == Category.OP) & (_collectives(trace, "c10d::") != "")[trace.name])
    calls, started = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    begun, ran = _by_rank_and_name(trace, operators, "c10d::"), _by_rank_and_name(trace, kernels, GLOO)
    for key in begun.keys() & ran.keys():
        count = min(len(begun[key]), len(ran[key]))
        calls.append(begun[key][-count:])
        started.append(ran[key][-count:])
    correlation = trace.correlation.copy()
    to = np.concatenate(started)
    correlation[to] = 1 + np.arange(len(to))
    return _with_calls(replace(trace, correlation=correlation), np.concatenate(calls), CPU_SUBMIT, correlation[to])


def _by_rank_and_name(trace: Trace, rows: Rows, prefix: str) -> dict[tuple[int, str], Rows]:
    """Rows by rank and collective, each in the order of time."""
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    names = _collectives(trace, prefix)[trace.name[rows]]
    keys = list(zip(trace.rank[rows].tolist(), names.tolist(), strict=True))
    return {key: rows[[at for at, other in enumerate(keys) if other == key]] for key in set(keys)}


def _collectives(trace: Trace, prefix: str) -> np.ndarray:
    """For every name of a trace, the collective that it means; '' where it has another prefix."""
    return np.array([collective_name(n.removeprefix(prefix)) if n.startswith(prefix) else "" for n in trace.names])


def _with_kernels(trace: Trace, rows: Rows, parts: Rows) -> Trace:
    """With a blocking call in each of these rows, and its kernel on a stream of its thread, where its parts go too."""
    correlation = 1 + max(int(trace.correlation.max(initial=0)), 0) + np.arange(len(rows))
    trace = _with_calls(trace, rows, CPU_COMPUTE, correlation)
    threads = np.unique(trace.lane[rows])
    stream = np.full(len(trace.lanes), -1, np.int32)
    stream[threads] = len(trace.lanes) + np.arange(len(threads))
    lanes = [trace.lanes[i]._replace(is_stream=True, label=f"cpu {trace.lanes[i].label}") for i in threads.tolist()]
    names = (*trace.names, *map(_kernel_name, trace.names))
    category, lane = trace.category.copy(), trace.lane.copy()
    category[parts], lane[parts] = Category.OTHER, stream[trace.lane[parts]]  # the parts of a kernel are no tasks
    wider = replace(trace, category=category, lane=lane, names=names, lanes=(*trace.lanes, *lanes))
    return _with_rows(
        wider, rows, Category.KERNEL, trace.name[rows] + len(trace.names), stream[trace.lane[rows]], correlation
    )


def _with_calls(trace: Trace, inside: Rows, call: str, correlation: Rows) -> Trace:
    """With a call inside each of these rows, as long as the row itself."""
    wider = replace(trace, names=(*trace.names, call))
    name = np.full(len(inside), len(trace.names))
    return _with_rows(wider, inside, Category.CALL, name, trace.lane[inside], correlation)


def _with_rows(
    trace: Trace, like: Rows, category: Category, name: Rows | Small, lane: Small, correlation: Rows
) -> Trace:
    """With further rows, at the times of others."""
    count = len(like)
    columns: dict[str, Any] = {
        "category": np.full(count, category, np.uint8), "name": name.astype(np.int32), "lane": lane,
        "start": trace.start[like], "duration": trace.duration[like], "correlation": correlation,
        "message": np.full(count, -1, np.int32), "argument": np.full(count, -1, np.int32),
        "sequence": np.full(count, -1, np.int32),
    }  # fmt: skip
    longer: dict[str, Any] = {c: np.concatenate([getattr(trace, c), new]) for c, new in columns.items()}
    return replace(trace, **longer)
