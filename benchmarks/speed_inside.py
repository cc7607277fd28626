"""What runs inside the fresh processes of the benchmark, ours and the peer's; each prints one line of JSON.

`seconds` is the time of the part that the case is about, without the start of Python and what had to be loaded before.
Every function imports what it needs itself: the peer's environment has no lumos, and ours has no HTA.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LANES = 4_000  # 512 ranks of about eight threads and streams
_REACH = 8  # layers that an edge goes back at most


def read(path: str) -> dict[str, Any]:
    """Read only: how much of a replay is spent before the graph is begun."""
    from lumos.read.job import read_job

    clock = _Clock()
    trace = read_job(Path(path))
    return {"seconds": clock.read()["seconds"], "rows": len(trace)}  # its helpers' processor time is not ours to know


def simulate_layers(tasks: str, edges: str) -> dict[str, Any]:
    """One pass over a random layered graph; the topological order is computed before and not counted."""
    from lumos.graph.compiled_loops import load
    from lumos.graph.graph import simulate

    load()
    simulate(_layers(2 * _LANES, 5 * _LANES))  # compiles what is new
    graph = _layers(int(tasks), int(edges))
    clock = _Clock()
    _ = graph.order
    order = clock.read()
    simulate(graph)
    best = min((_timed(lambda: simulate(graph)) for _ in range(3)), key=lambda t: t["seconds"])
    return {**best, "order_seconds": order["seconds"], "tasks": len(graph), "edges": len(graph.edges)}


def resimulate(path: str) -> dict[str, Any]:
    """One pass over the graph of a real job, once it is built."""
    from lumos.graph.graph import simulate
    from lumos.graph.rules.build import build
    from lumos.read.job import read_job

    graph = build(read_job(Path(path))).graph
    simulate(graph)
    return min((_timed(lambda: simulate(graph)) for _ in range(3)), key=lambda t: t["seconds"])


def scale(path: str, scenarios: str) -> dict[str, Any]:
    """An answer to `--scale` once the trace is loaded, and many scenarios in one pass."""
    import numpy as np

    from lumos.analysis.replay import replay
    from lumos.graph.graph import simulate_many
    from lumos.graph.scaling import Scale, scaled_durations
    from lumos.prediction.prediction import predict
    from lumos.read.job import read_job

    run = replay(read_job(Path(path)))

    def answer() -> float:
        return predict(run, [Scale.parse("compute=0.5")]).run.steps.mean

    answer()
    one = min((_timed(answer) for _ in range(10)), key=lambda t: t["seconds"])
    graph = run.clean_graph
    factors = np.linspace(0.1, 2.0, int(scenarios))
    durations = np.stack([scaled_durations(run.execution, graph.duration, [Scale("compute", f)]) for f in factors])
    simulate_many(graph, durations[:2])
    many = min((_timed(lambda: simulate_many(graph, durations)) for _ in range(3)), key=lambda t: t["seconds"])
    return {**one, "tasks": len(graph), "many_seconds": many["seconds"], "many_cpu": many["cpu"]}


def peer(path: str, how: str) -> dict[str, Any]:
    """HolisticTraceAnalysis: load one rank, and for `critical-path` analyse all its steps."""
    from contextlib import redirect_stdout

    with redirect_stdout(sys.stderr):
        from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

        analysis = TraceAnalysis(trace_files={0: path}, trace_dir="")
        if how == "load":
            return {}
        steps = sum(name.startswith("ProfilerStep") for name in analysis.t.symbol_table.get_sym_table())
        _, found = analysis.critical_path_analysis(0, "ProfilerStep", (0, steps - 1))
        if not found:
            raise SystemExit("HTA found no critical path")
        return {"steps": steps}


def _layers(tasks: int, edges: int) -> Any:
    """Lanes of equal length; every edge comes from another lane, a few layers before."""
    import numpy as np

    from lumos.graph.graph import Edges, Rule, make_graph

    random = np.random.default_rng(1)
    depth = tasks // _LANES
    target = np.sort(random.integers(0, _LANES * depth, edges, dtype=np.int32))
    layer = target % depth - random.integers(1, _REACH + 1, edges, dtype=np.int32)
    lane = (target // depth + random.integers(1, _LANES, edges, dtype=np.int32)) % _LANES
    keep = layer >= 0
    joined = Edges.of(lane[keep] * depth + layer[keep], target[keep], Rule.EVENT)
    duration = random.integers(1_000, 100_000, _LANES * depth).astype(np.float64)
    return make_graph(np.arange(_LANES + 1) * depth, duration, joined)


class _Clock:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu}


def _timed(what: Callable[[], object]) -> dict[str, float]:
    clock = _Clock()
    what()
    return clock.read()


_FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "read": read,
    "simulate": simulate_layers,
    "resimulate": resimulate,
    "scale": scale,
    "peer": peer,
}

if __name__ == "__main__":
    print(json.dumps(_FUNCTIONS[sys.argv[1]](*sys.argv[2:])))
