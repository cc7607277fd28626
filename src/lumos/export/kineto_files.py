"""One rank of a run as a Kineto trace: Perfetto shows it, and every tool that reads PyTorch's profiler does, Lumos too.

Times are microseconds after `baseTimeNanoseconds`, with the digits of nanoseconds, so that nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from lumos.files import whole_file
from lumos.trace.names import GPU_CATEGORIES, Category
from lumos.trace.trace import Header, Message, Trace

_CHUNK = 20_000
_CATEGORIES = {
    Category.OTHER: "cpu_instant_event", Category.OP: "cpu_op", Category.CALL: "cuda_runtime",
    Category.NOTE: "user_annotation", Category.KERNEL: "kernel", Category.COPY: "gpu_memcpy",
    Category.SET: "gpu_memset", Category.PYTHON: "python_function", Category.OVERHEAD: "overhead",
}  # fmt: skip


def write_kineto(path: Path, trace: Trace, rank: int) -> None:
    """Write the events of a rank; gzip where the name ends in .gz."""
    from isal import igzip

    with whole_file(path) as file:
        if path.name.endswith(".gz"):
            with igzip.IGzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:  # type: ignore[no-untyped-call]
                _write(packed, trace, rank)
        else:
            _write(file, trace, rank)


def _write(file: Any, trace: Trace, rank: int) -> None:
    base = int(trace.start.min(initial=np.iinfo(np.int64).max)) if len(trace) else 0
    header = next(h for h in trace.headers if h.rank == rank)
    head = orjson.dumps(_header(header) | {"baseTimeNanoseconds": base})
    file.write(head[:-1] + b',"traceEvents":[\n')
    first = True
    for chunk in _chunks(trace, rank, base):
        if chunk:
            file.write((b"" if first else b",\n") + b",\n".join(map(orjson.dumps, chunk)))
            first = False
    file.write(b"\n]}\n")


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


def _chunks(trace: Trace, rank: int, base: int) -> Iterator[list[dict[str, Any]]]:
    yield [_track(trace, lane) for lane in np.flatnonzero(trace.lane_rank == rank).tolist()]
    rows = np.flatnonzero(trace.rank == rank)
    for low in range(0, len(rows), _CHUNK):
        yield [_span(trace, row, base) for row in rows[low : low + _CHUNK].tolist()]
    yield list(_syncs(trace, rank))


def _place(trace: Trace, lane: int) -> dict[str, Any]:
    """Where a lane is drawn: its process or device, and its thread or stream."""
    found = trace.lanes[lane]
    return {"pid": _number(found.process), "tid": _number(found.label)}


def _track(trace: Trace, lane: int) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", **_place(trace, lane), "args": {"name": trace.lanes[lane].text}}


def _span(trace: Trace, row: int, base: int) -> dict[str, Any]:
    category, lane = Category(trace.category[row]), int(trace.lane[row])
    args: dict[str, Any] = {}
    if category in GPU_CATEGORIES:
        place = _place(trace, lane)
        args |= {"device": place["pid"], "stream": place["tid"]}
    if trace.correlation[row] >= 0:
        args["correlation"] = int(trace.correlation[row])
    if trace.message[row] >= 0:
        args |= _message(trace.messages[trace.message[row]])
    return {
        "ph": "X", "cat": _CATEGORIES[category], "name": trace.names[trace.name[row]], **_place(trace, lane),
        "ts": (int(trace.start[row]) - base) / 1000, "dur": int(trace.duration[row]) / 1000, "args": args,
    }  # fmt: skip


def _message(message: Message) -> dict[str, Any]:
    return {
        "Collective name": message.collective, "dtype": message.dtype, "In msg nelems": message.in_elements,
        "Out msg nelems": message.out_elements, "Process Group Name": message.group, "Group size": message.group_size,
        "Process Group Ranks": str(list(message.ranks)), "Seq": message.sequence, "Src Rank": message.source,
        "Dst Rank": message.destination,
    }  # fmt: skip


def _syncs(trace: Trace, rank: int) -> Iterator[dict[str, Any]]:
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
