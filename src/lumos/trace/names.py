"""What the names in a trace mean: categories of events, kinds of calls, communication kernels.

Each name is matched once (a trace of a million events has a few hundred names), so regular expressions are fast enough.
"""

from __future__ import annotations

import re
from enum import IntEnum


class Category(IntEnum):
    """What an event of a trace is."""

    OTHER = 0
    OP = 1  # an operator on a CPU thread
    CALL = 2  # a CUDA or HIP runtime or driver call on a CPU thread
    NOTE = 3  # a scope the user or the framework opened (record_function, ProfilerStep)
    KERNEL = 4
    COPY = 5
    SET = 6
    SYNC = 7  # details of a synchronising call, by correlation
    PYTHON = 8  # a Python function (with_stack)
    OVERHEAD = 9  # the profiler's record of its own work


class Kind(IntEnum):
    """What a task does; the names are those of `--scale`."""

    CPU = 0
    COMPUTE = 1
    COMM = 2
    COPY = 3


class CallKind(IntEnum):
    """What a runtime call means for the graph."""

    PLAIN = 0
    LAUNCH = 1  # puts work on a stream and returns
    COPY = 2  # the same, but may wait for the copy
    GRAPH_LAUNCH = 3
    DEVICE_SYNC = 4
    STREAM_SYNC = 5
    EVENT_SYNC = 6
    EVENT_RECORD = 7
    STREAM_WAIT = 8
    POLL = 9  # asks and never blocks


BLOCKING = (CallKind.DEVICE_SYNC, CallKind.STREAM_SYNC, CallKind.EVENT_SYNC, CallKind.COPY)
LAUNCHING = (CallKind.LAUNCH, CallKind.COPY, CallKind.GRAPH_LAUNCH)

CATEGORIES = {
    "cpu_op": Category.OP, "Operator": Category.OP, "operator": Category.OP, "cpu_instant_event": Category.OTHER,
    "cuda_runtime": Category.CALL, "cuda_driver": Category.CALL, "Runtime": Category.CALL,
    "runtime": Category.CALL, "hip_runtime": Category.CALL, "mtia_runtime": Category.CALL,
    "xpu_runtime": Category.CALL, "xpu_driver": Category.CALL, "cuda_api": Category.CALL,
    "user_annotation": Category.NOTE, "nvtx": Category.NOTE,
    "kernel": Category.KERNEL, "Kernel": Category.KERNEL, "cuda": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL, "concurrent_kernel": Category.KERNEL,
    "gpu_memcpy": Category.COPY, "Memcpy": Category.COPY,
    "gpu_memset": Category.SET, "Memset": Category.SET,
    "cuda_sync": Category.SYNC,
    "python_function": Category.PYTHON,
    "overhead": Category.OVERHEAD,
}  # fmt: skip
GPU_CATEGORIES = (Category.KERNEL, Category.COPY, Category.SET)
HOST_CATEGORIES = (Category.OP, Category.CALL, Category.NOTE)

CPU_COMPUTE, CPU_SUBMIT = "cpuCompute", "cpuSubmit"  # calls that `cpu_device` adds to a run on CPUs

_CALLS: tuple[tuple[CallKind, re.Pattern[str]], ...] = (
    (CallKind.GRAPH_LAUNCH, re.compile(r"(cuda|cu|hip)GraphLaunch")),
    (CallKind.LAUNCH, re.compile(r"(cuda|cu|hip)(Ext|Module|ExtModule)*Launch(Cooperative)?Kernel|(cuda|hip)Launch\b")),
    (CallKind.COPY, re.compile(r"(cuda|cu|hip)Memcpy")),
    (CallKind.LAUNCH, re.compile(r"(cuda|cu|hip)Memset")),
    (CallKind.COPY, re.compile(CPU_COMPUTE)),  # returns when it is done
    (CallKind.LAUNCH, re.compile(CPU_SUBMIT)),
    (CallKind.DEVICE_SYNC, re.compile(r"(cuda|hip)DeviceSynchronize|(cu|hip)CtxSynchronize")),
    (CallKind.STREAM_SYNC, re.compile(r"(cuda|cu|hip)StreamSynchronize")),
    (CallKind.EVENT_SYNC, re.compile(r"(cuda|cu|hip)EventSynchronize")),
    (CallKind.EVENT_RECORD, re.compile(r"(cuda|cu|hip)EventRecord")),
    (CallKind.STREAM_WAIT, re.compile(r"(cuda|cu|hip)StreamWaitEvent")),
    (CallKind.POLL, re.compile(r"(cuda|cu|hip)(EventQuery|StreamQuery|StreamIsCapturing|StreamGetCaptureInfo"
                               r"|ThreadExchangeStreamCaptureMode|GetDevice|SetDevice|GetLastError|PeekAtLastError"
                               r"|GetErrorString|DriverGetVersion|EventElapsedTime|CtxGetCurrent|CtxSetCurrent)")),
)  # fmt: skip

# cub::DeviceReduce and its like are arithmetic, not communication, so "reduce" alone proves nothing.
_COMM = re.compile(
    r"nccl(Dev)?Kernel|rccl|\bdpsk::ep::|deep_ep|allreduce_fusion|multimem_all_?reduce|cross_device_reduce"
    r"|all_?to_?all_?(single_)?kernel|nvshmem|symm_mem.{0,200}(reduce|gather|scatter)|one_shot_all_reduce|two_shot_all_reduce"
    r"|oneShotAllreduce|twoShotAllreduce|userbuffers",
    re.IGNORECASE,
)
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})\s*")


def call_kind(name: str) -> CallKind:
    """What a runtime or driver call of this name does."""
    for kind, pattern in _CALLS:
        if pattern.match(name):
            return kind
    return CallKind.PLAIN


def is_communication(kernel_name: str) -> bool:
    """Whether a kernel of this name moves data between GPUs."""
    return _COMM.search(kernel_name) is not None


def is_step(annotation: str) -> bool:
    """Whether an annotation marks a step of the profiler's schedule."""
    return _STEP.fullmatch(annotation) is not None


def collective_name(text: str) -> str:
    """One name for the many spellings of a collective; '' if the text names none.

    Takes the name in `record_param_comms` (`_allgather_base`), an annotation (`nccl:all_reduce`) or a kernel's name:
    `collective_name("ncclDevKernel_AllReduce_Sum_bf16") == "all_reduce"`.
    """
    squeezed = text.lower().replace("_", "").replace("nccl:", "")
    for pattern, name in _COLLECTIVES:
        if pattern in squeezed:
            return name
    return ""


_COLLECTIVES = (
    ("reducescatter", "reduce_scatter"), ("allgather", "all_gather"), ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("sendrecv", "send_recv"),
    ("coalesced", "send_recv"), ("send", "send_recv"), ("recv", "send_recv"), ("gather", "gather"),
    ("scatter", "scatter"), ("reduce", "reduce"),
)  # fmt: skip
