"""The profiler's own cost, and the step without it.

Recording makes the host slower: by some microseconds for every operator and every runtime call, and by more the slower
the host is at that moment, so that a share of the recorded time describes it better than any constant. Both bounds are
kept: what is taken out is at most a cost per operator and call, and never more than leaves `kept_share` of a segment.
A pause in which nothing was recorded therefore keeps its length. The GPU pays a little per kernel.

Once a process has been profiled, CUPTI stays attached and every runtime call goes on costing 2–3 µs (H200, torch 2.11).
`kept_share` describes that process with the profiler stopped, `fresh_kept_share` one that was never profiled.
Recording shapes costs more than not recording them, so the share differs.

The constants are in `data/profiler.json`, fitted by calibration/fit_profiler.py on recordings of our own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from lumos.data_files import data_file
from lumos.errors import InputError
from lumos.files import read_file
from lumos.graph.graph import Floats, Graph
from lumos.graph.rules.build import Execution
from lumos.model_file import read_model_file
from lumos.trace.names import Category

_MOST_BYTES = 1 << 20
_Cost = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
_Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


class ProfilerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What recording costs, in microseconds and shares of host time."""

    operator_us: _Cost  # at most, per operator or annotation
    call_us: _Cost  # at most, per runtime or driver call
    kept_share: _Share  # of a host segment that is left at least, once the profiler has stopped
    no_shapes_kept_share: _Share  # the same for a recording without shapes
    fresh_kept_share: _Share  # the same as the first for a process that was never profiled
    kernel_gap_us: _Cost  # added to the gap before every kernel
    debt_us: _Cost = 100.0  # cost that a segment is too short to pay and that those after it pay; the rest is dropped
    error_pct: _Cost = 10.0  # 80 % of the recordings it was fitted on are within this
    source: str = ""

    def fresh(self) -> ProfilerCost:
        """For a process that was never profiled."""
        return msgspec.structs.replace(
            self,
            kept_share=self.fresh_kept_share,
            no_shapes_kept_share=self.no_shapes_kept_share * self.fresh_kept_share / self.kept_share,
        )


def load_profiler_cost(path: Path | None = None) -> ProfilerCost:
    """The constants of the package, or those in a file of the same form, or in a model file."""
    if path is None:
        return msgspec.json.decode(data_file("profiler.json").read_bytes(), type=ProfilerCost)
    place, advice = f"--profiler-costs {path}", "give a file like lumos/data/profiler.json"
    try:
        if path.suffix == ".npz":
            return _of_model_file(path)
        return msgspec.json.decode(read_file(path, _MOST_BYTES, advice, place), type=ProfilerCost)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{place}: not a file of profiler costs ({error}); {advice}") from None


def _of_model_file(path: Path) -> ProfilerCost:
    found = read_model_file(path).header.get("profiler")
    if found is None:
        raise InputError(f"--profiler-costs {path}: profiler costs were not sampled; leave it out, or sample again")
    return msgspec.convert(found, ProfilerCost)


def is_profiled(execution: Execution) -> bool:
    """Whether a profiler recorded this run; a predicted one, or a graph that another tool wrote, has no such cost."""
    return any(header.profiled for header in execution.trace.headers)


def without_profiler(execution: Execution, cost: ProfilerCost) -> Graph:
    """The same graph with the profiler's share taken out of host time and of the gaps between kernels.

    A run that no profiler recorded is left as it is.
    """
    from lumos.graph.compiled_loops import pay_debts

    graph, nodes = execution.graph, execution.nodes
    if not is_profiled(execution):
        return graph
    on_gpu = np.ones(len(graph), bool)  # hubs are not host work either
    on_gpu[: len(nodes)] = nodes.on_gpu
    shapes = any(header.shapes for header in execution.trace.headers)
    kept = cost.kept_share if shapes else cost.no_shapes_kept_share
    paid = pay_debts(graph.first, graph.duration, _owed(execution, cost), kept, cost.debt_us * 1e3)
    gap = np.where(on_gpu, np.maximum(graph.gap - cost.kernel_gap_us * 1e3, 0.0), graph.gap)
    np.copyto(paid, graph.duration, where=on_gpu)
    return graph.with_times(paid, gap)


def _owed(execution: Execution, cost: ProfilerCost) -> Floats:
    """What recording cost at every node, in nanoseconds."""
    trace, nodes = execution.trace, execution.nodes
    operators = np.isin(trace.category, (Category.OP, Category.NOTE)) & (nodes.first_node >= 0)
    calls = (trace.category == Category.CALL) & (nodes.last_node >= 0)
    at = np.concatenate([nodes.first_node[operators], nodes.last_node[calls]])
    costs = np.repeat([1e3 * cost.operator_us, 1e3 * cost.call_us], [operators.sum(), calls.sum()])
    return np.asarray(np.bincount(at, costs, len(execution.graph)), np.float64)
