"""A described step, written as the traces that a profiler would have recorded of it.

One rank of every pipeline stage is written, kernel by kernel, with its launches on the threads that run forward,
backward and optimizer. What is read back is a run like any other: it can be replayed and changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from lumos.described.embedding_head import embedding, embedding_backward, head, head_backward
from lumos.described.layer import TransformerLayer
from lumos.files import whole_file
from lumos.program.op import Ops
from lumos.program.operators import Collective, Operator
from lumos.step.step import Step

_MAIN, _ENGINE, _STREAM = 100, 101, 7
_LAUNCH_US = 3.0  # of the runtime call inside an operator's time on the host
_NAMES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "p2p": "SendRecv"}


def write_synthetic(step: Step, folder: Path) -> list[Path]:
    """Write one trace for a rank of every stage; the files' names carry the rank."""
    written = []
    for stage in range(step.setup.parallel.pp):
        rank = stage * (step.setup.cluster.gpus // step.setup.parallel.pp)
        path = folder / f"rank{rank}.json"
        world = {"rank": rank, "world_size": step.setup.cluster.gpus, "backend": "nccl"}
        data = orjson.dumps({"distributedInfo": world, "traceEvents": list(_Writer(step, stage).events())})
        with whole_file(path) as file:
            file.write(data)
        written.append(path)
    return written


class _Writer:
    """The events of one stage."""

    def __init__(self, step: Step, stage: int) -> None:
        self.step, self.stage = step, stage
        self.correlation = 0
        self.host = 0.0  # when the host is free, in microseconds

    def events(self) -> Iterator[dict[str, Any]]:
        start, end = 0.0, self.step.us
        for role, begin, until in self._nodes():
            block = self._block(role)
            if block:
                yield from self._run(role, block, begin, until)
            elif until > begin:
                yield from self._kernel(f"ncclDevKernel_{role}", _MAIN, begin, until - begin)
            end = max(end, until)
        yield _event("ProfilerStep#1", "user_annotation", _MAIN, start, max(end, self.host) - start)

    def _nodes(self) -> list[tuple[str, float, float]]:
        """(role, begin, end) of what the stage computes, in order."""
        step, found = self.step, []
        for node, index in enumerate(step.structure.node_role.tolist()):
            role = step.structure.roles[index]
            if role.stage == self.stage and not role.what.startswith("host") and role.what != "end":
                times = float(step.times.start[node]) / 1e3, float(step.times.end[node]) / 1e3
                found.append((role.what, *times))
        return sorted(found, key=lambda item: item[1])

    def _block(self, role: str) -> Ops:
        program = self.step.assembly.program
        layout, last = program.layout, self.step.setup.parallel.pp - 1
        layers = sum(chunk.layers for chunk in program.chunks[self.stage])
        layer = TransformerLayer(layout, bool(self.step.setup.model.experts))
        if role == "forward":
            first = embedding(layout) if self.stage == 0 else []
            return [*first, *layer.forward() * layers, *(head(layout) if self.stage == last else [])]
        if role == "backward":
            loss = head_backward(layout) if self.stage == last else []
            operators = [*layer.recomputed(), *layer.backward()] * layers
            return [*loss, *operators, *(embedding_backward(layout) if self.stage == 0 else [])]
        if role == "optimizer":
            return program.optimizer(self.stage).build()
        return []

    def _run(self, role: str, block: Ops, begin: float, until: float) -> Iterator[dict[str, Any]]:
        """The kernels of a block one after the other, filling its time."""
        prices = self.step.costs
        costs = [prices.cost(op).us for op in block]
        scale = (until - begin) / max(sum(costs), 1e-9)
        thread = _ENGINE if role == "backward" else _MAIN
        opened = self.host
        now = begin
        for op, cost in zip(block, costs, strict=True):
            if cost > 0:
                yield from self._kernel(_kernel_name(op.work), thread, now, cost * scale, max(1, op.launches))
                now += cost * scale
        if role == "optimizer":
            yield _event("Optimizer.step#AdamW.step", "user_annotation", _MAIN, opened, self.host - opened)

    def _kernel(self, name: str, thread: int, begin: float, us: float, launches: int = 1) -> Iterator[dict[str, Any]]:
        """An operator on the host, its launch, and the kernel."""
        self.correlation += 1
        host = launches * self.step.costs.host_us
        label = f"autograd::engine::evaluate_function: {name}" if thread == _ENGINE else f"aten::{name}"
        start = min(self.host, max(begin - host - 1.0, 0.0)) if self.host > begin else self.host
        yield _event(label, "cpu_op", thread, start, max(host, _LAUNCH_US + 1))
        link = {"correlation": self.correlation}
        yield _event("cudaLaunchKernel", "cuda_runtime", thread, start + 0.5, _LAUNCH_US, link)
        yield _event(name, "kernel", _STREAM, begin, us, link | {"stream": _STREAM, "device": 0}, process=0)
        self.host = start + max(host, _LAUNCH_US + 1)


def _kernel_name(work: Operator | Collective) -> str:
    if isinstance(work, Collective):
        return f"ncclDevKernel_{_NAMES.get(work.kind, work.kind)}_Sum_bf16_RING_LL"
    if work.kind.startswith("sdpa"):
        return "flash_bwd_kernel" if work.kind.endswith("bwd") else "flash_fwd_kernel"
    return f"gemm_{work.kind}" if work.is_matrix else f"elementwise_{work.kind}"


def _event(
    name: str, category: str, thread: int, start: float, us: float, args: dict[str, Any] | None = None, process: int = 1
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": us,
        "args": args or {},
    }  # fmt: skip
