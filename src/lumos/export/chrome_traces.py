"""Writes runs as Chrome-trace JSON, which Perfetto opens.

`write_kineto` writes one rank as PyTorch's profiler does, so that every tool for its traces reads it, Lumos too: times
are microseconds after `baseTimeNanoseconds`, with the digits of nanoseconds, and nothing is rounded.

`write_timeline` writes all ranks of a simulated run in one view: one process a rank, one track a thread or stream.
Arrows show the dependencies between lanes that decided when a task started; those on the critical path are named so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from isal import igzip

from lumos.analysis.run import Run
from lumos.analysis.slowdown import SlowdownJob
from lumos.files import whole_file
from lumos.graph.graph import Graph, Rule, Times
from lumos.trace.names import GPU_CATEGORIES, Category
from lumos.trace.trace import Header, Trace

Event = dict[str, Any]

_CHUNK = 20_000  # events that are encoded at once
_CATEGORIES = {
    Category.OTHER: "cpu_instant_event", Category.OP: "cpu_op", Category.CALL: "cuda_runtime",
    Category.NOTE: "user_annotation", Category.KERNEL: "kernel", Category.COPY: "gpu_memcpy",
    Category.SET: "gpu_memset", Category.PYTHON: "python_function", Category.OVERHEAD: "overhead",
}  # fmt: skip


def _write(path: Path, header: dict[str, Any], events: Iterable[Event]) -> None:
    """Write the header and the events; gzip if the name ends in .gz."""
    with whole_file(path) as plain:
        gzip: Any = igzip.IGzipFile
        packed = gzip(fileobj=plain, mode="wb", filename="", mtime=0) if path.name.endswith(".gz") else None
        file = packed or plain
        file.write(orjson.dumps(header)[:-1] + b',"traceEvents":[\n')
        lines, separator = map(orjson.dumps, events), b""
        while chunk := list(islice(lines, _CHUNK)):
            file.write(separator + b",\n".join(chunk))
            separator = b",\n"
        file.write(b"\n]}\n")
        if packed is not None:
            packed.close()


def write_kineto(path: Path, trace: Trace, rank: int) -> None:
    """Write the events of one rank as PyTorch's profiler does."""
    base = int(trace.start.min()) if len(trace) else 0
    header = _header(next(h for h in trace.headers if h.rank == rank))
    # Recording shapes took time, whether this file has them or not.
    has_shapes = bool((trace.argument[trace.rank == rank] >= 0).any())
    header |= {"baseTimeNanoseconds": base, "lumosShapesLeftOut": int(header["record_shapes"] and not has_shapes)}
    _write(path, header, _kineto_events(trace, rank, base))


def _header(header: Header) -> dict[str, Any]:
    world = {"rank": header.rank} | ({"world_size": header.world_size} if header.world_size > 0 else {})
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": header.job,
        "record_shapes": int(header.shapes),
        "with_stack": int(header.stacks),
        "distributedInfo": world | ({"backend": header.backend} if header.backend else {}),
        "deviceProperties": [{"id": 0, "name": header.gpu}] if header.gpu else [],
    }


def _kineto_events(trace: Trace, rank: int, base: int) -> Iterator[Event]:
    mine = np.flatnonzero(trace.lane_rank == rank).tolist()
    tracks = {lane: (_number(trace.lanes[lane].process), _number(trace.lanes[lane].label)) for lane in mine}
    yield from (_track(*track, trace.lanes[lane].text) for lane, track in tracks.items())
    for row in np.flatnonzero(trace.rank == rank).tolist():
        track = tracks[int(trace.lane[row])]
        yield _span(trace, row, *track, base) | {"args": _args(trace, row, track)}
    yield from _syncs(trace, rank)


def _track(process: int | str, thread: int | str, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _span(trace: Trace, row: int, process: int | str, thread: int | str, base: int) -> Event:
    return {
        "ph": "X", "cat": _CATEGORIES[Category(trace.category[row])], "name": trace.names[trace.name[row]],
        "pid": process, "tid": thread, "ts": (int(trace.start[row]) - base) / 1000,
        "dur": int(trace.duration[row]) / 1000,
    }  # fmt: skip


def _args(trace: Trace, row: int, track: tuple[int | str, int | str]) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if trace.category[row] in GPU_CATEGORIES:
        args["device"], args["stream"] = track
    if trace.correlation[row] >= 0:
        args["correlation"] = int(trace.correlation[row])
    if trace.message[row] >= 0:
        message = trace.messages[trace.message[row]]
        args |= {
            "Collective name": message.collective, "dtype": message.dtype, "In msg nelems": message.in_elements,
            "Out msg nelems": message.out_elements, "Process Group Name": message.group,
            "Group size": message.group_size, "Process Group Ranks": str(list(message.ranks)),
            "Seq": message.sequence, "Src Rank": message.source, "Dst Rank": message.destination,
        }  # fmt: skip
    if trace.arguments is not None and trace.argument[row] >= 0:
        called = trace.arguments[trace.argument[row]]
        texts = {"Input Dims": called.shapes, "Input type": called.types, "Concrete Inputs": called.values,
                 "Input Strides": called.strides}  # fmt: skip
        args |= {key: orjson.Fragment(text) for key, text in texts.items() if text}
    if trace.sequence[row] >= 0:
        args["Sequence number"] = int(trace.sequence[row])
    return args


def _syncs(trace: Trace, rank: int) -> Iterator[Event]:
    """What synchronising calls waited for; these rows have no times of their own."""
    syncs = trace.syncs
    for i in np.flatnonzero(trace.lane_rank[syncs.lane] == rank).tolist() if len(syncs.lane) else []:
        args = {
            "correlation": int(syncs.correlation[i]), "stream": int(syncs.stream[i]),
            "wait_on_stream": int(syncs.wait_stream[i]), "wait_on_cuda_event_record_corr_id": int(syncs.record[i]),
            "wait_on_cuda_event_id": int(syncs.event[i]),
        }  # fmt: skip
        yield {"ph": "X", "cat": "cuda_sync", "name": "Sync", "pid": 0, "tid": 0, "ts": 0.0, "dur": 0.0, "args": args}


def _number(label: str) -> int | str:
    """A label as the number it is, so that viewers sort it as one."""
    return int(label) if label.isdecimal() and len(label) < 18 and str(int(label)) == label else label


def write_timeline(path: Path, run: Run) -> None:
    """Write a simulated run, traced or described, with the arrows of the edges that decided."""
    _write(path, {"schemaVersion": 1, "displayTimeUnit": "ms", "lumosTimeline": 1}, _timeline_events(run))


def write_ideal(path: Path, job: SlowdownJob) -> None:
    """Write a job without stragglers: of an operation table, one process a worker and one track a type."""
    if job.ideal_run is not None:
        write_timeline(path, job.ideal_run())
    else:
        _write(path, {"schemaVersion": 1, "displayTimeUnit": "ms", "lumosTimeline": 1}, _operation_events(job))


def _operation_events(job: SlowdownJob) -> Iterator[Event]:
    for number, worker in enumerate(job.workers):
        shown = {"process_name": {"name": worker.label}, "process_sort_index": {"sort_index": number}}
        yield from ({"ph": "M", "name": name, "pid": number, "args": args} for name, args in shown.items())
    start, end = job.ideal_spans() if job.ideal_spans is not None else (job.took * 0, job.took)
    tracks = [0 if name in job.passes else 1 + kind for kind, name in enumerate(job.types)]
    columns = zip(job.kind.tolist(), job.worker.tolist(), job.step.tolist(), strict=True)
    for row, (kind, worker, step) in enumerate(columns):
        yield {
            "ph": "X", "cat": "operation", "name": job.types[kind], "pid": worker, "tid": tracks[kind],
            "ts": float(start[row]) / 1e3, "dur": float(end[row] - start[row]) / 1e3,
            "args": {"step": job.steps[step]},
        }  # fmt: skip


def _timeline_events(run: Run) -> Iterator[Event]:
    trace = run.trace
    for rank in trace.ranks:
        shown = {"process_name": {"name": f"rank {rank}"}, "process_sort_index": {"sort_index": rank}}
        yield from ({"ph": "M", "name": name, "pid": rank, "args": args} for name, args in shown.items())
    yield from (_track(lane.rank, index, lane.text) for index, lane in enumerate(trace.lanes))
    for row in np.flatnonzero(run.nodes.last_node >= 0).tolist():
        lane = int(trace.lane[row])
        yield _span(trace, row, trace.lanes[lane].rank, lane, run.origin)
    on_path = set(run.path.edge[run.path.edge >= 0].tolist())
    for edge in _deciding_edges(run.graph, run.times).tolist():
        yield from _arrow(run, edge, edge in on_path)


def _deciding_edges(graph: Graph, times: Times) -> np.ndarray:
    """Edges that decided when their target started, rather than the order of its lane."""
    edges = graph.edges
    since = np.where(edges.from_start, times.start[edges.source], times.end[edges.source])
    reached = since + edges.lag + edges.frozen
    before = np.where(graph.is_first, 0.0, np.concatenate([[0.0], times.end[:-1]])) + graph.gap + graph.frozen
    start = times.start[edges.target]
    return np.flatnonzero((np.abs(reached - start) < 0.5) & (before[edges.target] < start - 0.5))


def _arrow(run: Run, edge: int, critical: bool) -> Iterator[Event]:
    edges, times = run.graph.edges, run.times
    source, target = int(edges.source[edge]), int(edges.target[edge])
    if min(run.node_lane[source], run.node_lane[target]) < 0:
        return  # a rendezvous has no lane; the arrivals around it are visible as they are
    name = "critical path" if critical else Rule(edges.rule[edge]).name.lower()
    since = times.start[source] if edges.from_start[edge] else times.end[source]
    for phase, node, time in (("s", source, since), ("f", target, times.start[target])):
        lane = int(run.node_lane[node])
        yield {
            "ph": phase, "id": edge, "cat": "dependency", "name": name, "bp": "e",
            "pid": run.trace.lanes[lane].rank, "tid": lane, "ts": float(time) / 1e3,
        }  # fmt: skip
