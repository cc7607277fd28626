"""Synthetic Kineto files: events as dictionaries, files in every layout that is seen in the wild.

    write_trace(tmp_path / "rank0.json.gz", [op("aten::mm", 0, 50), *launch("gemm", 10, 7)], header(rank=0))

Times are microseconds, as in the files themselves.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np

from lumos.dry_run.recorded_step import Recording, StorageEvent
from lumos.program.op import Op, Tensor
from lumos.trace.names import Category
from lumos.trace.trace import Message, Trace

Event = dict[str, Any]
Header = dict[str, Any]
Layout = Literal["pretty", "one line", "event a line", "bare list", "events first"]
LAYOUTS: tuple[Layout, ...] = ("pretty", "one line", "event a line", "bare list", "events first")
PATIENCE_S = 1200  # what is waited for takes seconds; this only ends what hangs, however busy the machine is
EPOCH_US = 1_698_107_929_560_561  # a moment of 2023, as old files write it
BASE_NS = 1_790_857_026_000_000_000  # what new files count from


def calls_made(function: Callable[[], object]) -> int:
    """Function calls that a piece of work makes: a measure of work that does not depend on the machine."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def span(cat: str, name: str, ts: Any, dur: Any, pid: Any, tid: Any, args: dict[str, Any] | None = None) -> Event:
    """Any event that has a beginning and an end."""
    event: Event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
    return event if args is None else event | {"args": args}


def op(name: str, ts: Any, dur: Any, tid: Any = 1, args: dict[str, Any] | None = None) -> Event:
    """An operator on a CPU thread."""
    return span("cpu_op", name, ts, dur, 100, tid, {"External id": 1} | (args or {}))


def note(name: str, ts: Any, dur: Any, tid: Any = 1) -> Event:
    """An annotation of the user or the framework, such as a step."""
    return span("user_annotation", name, ts, dur, 100, tid, {"External id": 1})


def call(name: str, ts: Any, dur: Any, correlation: int = 0, tid: Any = 1) -> Event:
    """A call of the CUDA runtime."""
    return span("cuda_runtime", name, ts, dur, 100, tid, {"cbid": 1, "correlation": correlation})


def kernel(
    name: str, ts: Any, dur: Any, correlation: int = 0, stream: Any = 7, args: dict[str, Any] | None = None
) -> Event:
    """A kernel on a stream of GPU 0."""
    told = {"device": 0, "stream": stream, "correlation": correlation, "grid": [1, 1, 1]}
    return span("kernel", name, ts, dur, 0, stream, told | (args or {}))


def memcpy(ts: Any, dur: Any, correlation: int = 0, stream: Any = 7) -> Event:
    """A copy to the GPU."""
    told = {"device": 0, "stream": stream, "correlation": correlation, "bytes": 64}
    return span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", ts, dur, 0, stream, told)


def memset(ts: Any, dur: Any, correlation: int = 0, stream: Any = 7) -> Event:
    """A fill on the GPU."""
    told = {"device": 0, "stream": stream, "correlation": correlation, "bytes": 64}
    return span("gpu_memset", "Memset (Device)", ts, dur, 0, stream, told)


def sync(name: str, ts: Any, dur: Any, correlation: int, stream: Any, args: dict[str, Any] | None = None) -> Event:
    """A `cuda_sync` row: what a synchronising call waited for."""
    told = {"device": 0, "stream": stream, "correlation": correlation}
    return span("cuda_sync", name, ts, dur, 0, stream, told | (args or {}))


def launch(name: str, ts: float, correlation: int, takes: float = 20, stream: int = 7, late: float = 10) -> list[Event]:
    """A launch call and the kernel that begins some time after it."""
    return [
        call("cudaLaunchKernel", ts, 5, correlation),
        kernel(name, ts + late, takes, correlation, stream),
    ]


def collective(name: str, elements: int = 1024, ranks: str = "[0, 1]", **more: Any) -> dict[str, Any]:
    """The arguments of a communication kernel in a new file."""
    told = {
        "Collective name": name, "dtype": "BFloat16", "In msg nelems": elements, "Out msg nelems": elements,
        "Group size": 2, "Process Group Name": "0", "Process Group Ranks": ranks,
    }  # fmt: skip
    return told | more


def header(rank: int | None = 0, world_size: int | None = None, base: int | None = None, **more: Any) -> Header:
    """What stands beside the events."""
    answer: Header = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "record_shapes": 1}
    if rank is not None:
        told = {"backend": "nccl", "rank": rank} | ({} if world_size is None else {"world_size": world_size})
        answer["distributedInfo"] = told
    if base is not None:
        answer["baseTimeNanoseconds"] = base
    return answer | more


def training_run(steps: int = 2, layers: int = 4, rank: int = 0, slow: float = 0.0) -> list[Event]:
    """A data-parallel run on two streams: compute on 7, all-reduce on 20 behind an event, a device sync at the end.

    `slow` is added to each of the rank's kernels.
    """
    return [event for step in range(steps) for event in _training_step(step, layers, rank, slow)]


def _training_step(step: int, layers: int, rank: int, slow: float) -> Iterator[Event]:
    begin, number = (300 + slow) * layers * step, 1000 * (step + 1)
    yield call("cudaMemcpyAsync", begin + 5, 8, number)
    yield memcpy(begin + 15, 4, number)
    busy_until, time = begin + 30.0, begin + 20.0
    for layer in range(layers):
        number += 10
        yield op("aten::mm", time, 18)
        yield call("cudaLaunchKernel", time + 5, 6, number)
        busy_until = max(busy_until + 1, time + 13)
        yield kernel("sm90_gemm", busy_until, 60 + slow, number, args={"registers per thread": 168})
        busy_until += 60 + slow
        yield from _all_reduce(time + 25, number, busy_until, layer)
        time += 50
    number += 10
    yield op("aten::zero_", time, 10, tid=2)
    yield call("cudaMemsetAsync", time + 2, 5, number, tid=2)
    yield memset(busy_until + 1, 2, number)
    end = busy_until + 50  # the last all-reduce is over
    yield call("cudaDeviceSynchronize", time + 10, end - time - 10, number + 1)
    yield sync("Context Sync", time + 10, end - time - 10, number + 1, 4294967295)
    yield note(f"ProfilerStep#{step}", begin, end + 10 - begin)
    yield {"ph": "i", "s": "g", "name": "Iteration Start", "pid": 100, "tid": 1, "ts": begin}
    yield {"ph": "M", "name": "process_name", "pid": 100, "args": {"name": f"python, rank {rank}"}}


def _all_reduce(time: float, number: int, ready: float, layer: int) -> Iterator[Event]:
    """The communication stream waits for the compute stream by an event, then reduces."""
    yield op("record_param_comms", time, 20, args=collective("allreduce", 4096 * (layer + 1)))
    yield call("cudaEventRecord", time + 2, 2, number + 1)
    yield call("cudaStreamWaitEvent", time + 5, 2, number + 2)
    waits = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": number + 1, "wait_on_cuda_event_id": 3}
    yield sync("Stream Wait Event", time + 5, 2, number + 2, 20, waits)
    yield call("cudaLaunchKernel", time + 8, 5, number + 3)
    told = collective("allreduce", 4096 * (layer + 1))
    yield kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", ready + 3, 40, number + 3, 20, told)


def json_text(events: list[Event], head: Header | None = None, layout: Layout = "pretty") -> bytes:
    """The bytes of a file in one of the layouts."""
    head = head or {}
    if layout == "bare list":
        return json.dumps(events).encode()
    if layout == "one line":
        return json.dumps(head | {"traceEvents": events}).encode()
    if layout == "events first":
        return json.dumps({"traceEvents": events} | head, indent=1).encode()
    lines = ",\n".join(json.dumps(event) if layout == "event a line" else _pretty(event) for event in events)
    before = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{before}  "traceEvents": [\n{lines}\n  ]\n}}\n'.encode()


def _pretty(event: Event) -> str:
    """As Kineto writes it."""
    outer = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in event.items() if k != "args")
    args = json.dumps(event.get("args"))
    inner = f',\n    "args": {{\n      {args[1:-1]}\n    }}' if args[0] == "{" else f',\n    "args": {args}'
    return f"  {{\n    {outer}{inner}\n  }}"


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file, packed where its name ends in .gz."""
    path.write_bytes(gzip.compress(content, 1, mtime=0) if path.suffix == ".gz" else content)
    return path


def write_trace(path: Path, events: list[Event], head: Header | None = None, layout: Layout = "pretty") -> Path:
    """Write a trace file."""
    return write_bytes(path, json_text(events, head, layout))


class Row(NamedTuple):
    """One event as it was read, for comparing."""

    category: Category
    name: str
    lane: str
    start: int
    duration: int
    correlation: int
    message: Message | None


def rows(trace: Trace) -> list[Row]:
    """All events of a trace, in the order of the file."""
    return [
        Row(
            Category(trace.category[i]),
            trace.names[trace.name[i]],
            trace.lanes[trace.lane[i]].text,
            int(trace.start[i]),
            int(trace.duration[i]),
            int(trace.correlation[i]),
            trace.messages[trace.message[i]] if trace.message[i] >= 0 else None,
        )
        for i in range(len(trace))
    ]


def assert_same_columns(a: Trace, b: Trace) -> None:
    """Two traces hold the same events, numbered and named alike."""
    assert (a.names, a.lanes, a.messages) == (b.names, b.lanes, b.messages)
    for column in ("category", "name", "lane", "start", "duration", "correlation", "message"):
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column), err_msg=column)
    for column in ("lane", "correlation", "stream", "wait_stream", "record", "event"):
        np.testing.assert_array_equal(getattr(a.syncs, column), getattr(b.syncs, column), err_msg=column)


# Recordings of dry runs


def operand(*shape: int, dtype: str = "bf16") -> Tensor:
    """A dense tensor."""
    strides = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
    return Tensor(shape, dtype, strides, {"fp32": 4, "int64": 8, "bool": 1}.get(dtype, 2))


def small_recording() -> Recording:
    """A dry run of rank 1 of 4 with an operator of every kind: matmuls, attention, convolutions, lists, collectives."""
    x, w, q = operand(256, 512), operand(512, 512), operand(2, 8, 128, 64)
    image, kernel, wide = operand(2, 8, 32, 32), operand(16, 8, 3, 3), operand(2, 16, 30, 30)
    rows, group = operand(2, 8, 128, dtype="fp32"), (0, 1, 2, 3)

    def aten(name: str, inputs: tuple[Tensor, ...], out: Tensor, phase: str = "forward", *options: str) -> Any:
        return Op(f"aten.{name}", inputs, (out,), phase, "model.layer", True, options)

    ops = [
        aten("embedding.default", (operand(1000, 512), operand(2, 128, dtype="int64")), x),
        aten("mm.default", (x, w), x), aten("native_layer_norm.default", (x, operand(512), operand(512)), x),
        Op("attention.forward", (q, q, q), (q, rows), "forward", "model.attn", True, ("causal",)),
        aten("convolution.default", (image, kernel), wide),
        aten("bmm.default", (operand(4, 8, 8),) * 2, operand(4, 8, 8)),
        aten("_softmax.default", (x,), x, "forward", "dim=1"),
        aten("topk.default", (x,), operand(256, 2), "forward", "k=2"),
        aten("sum.dim_IntList", (x,), operand(256)), Op("python.module", (), (), "forward", options=("cpu",)),
        aten("_to_copy.default", (operand(4),), operand(4), "forward", "d2h", "waits"),
        Op("cudaStreamSynchronize", (), (), "forward", after=(10,)),
        aten("mm.default", (x, w), x, "backward"),
        Op("attention.backward", (q, q, q, q, rows, q), (q, q, q), "backward", "model.attn", True, ("causal",)),
        aten("convolution_backward.default", (wide, image, kernel), image, "backward", "mask=110"),
        Op("all_reduce", (w,), (w,), "backward", stream=-1, ranks=group, after=(12,)),
        aten("_foreach_mul_.Scalar", (w, x), w, "optimizer"),
        Op("aten._fused_adamw_.default", (w,) * 4, (), "optimizer", allocates=True, after=(15,)),
    ]  # fmt: skip
    alive = {1: w.elements * 2, 2: w.elements * 8}
    changes = ((1, 3, 1 << 18), (8, 4, 1 << 20), (14, 3, -(1 << 18)), (17, 4, -(1 << 20)))
    return Recording(
        ops, 600_000, 500_000, 256, alive, [StorageEvent(*change) for change in changes],
        {1: "weights", 2: "optimizer", 4: "gradients"}, {3: "model.layer"}, 1 << 22, 1, 4, 2,
        ["experts as equally loaded"], {"torch": "2.13.0", "gpu": "NVIDIA H200"},
    )  # fmt: skip
