"""What PyTorch's host code costs per call beside an H200: microseconds, on tensors so small that no GPU decides.

    python3 calibration/host_h200.py OUT.json SECONDS [GROUP ...]

Loops over one call each, never waiting for the GPU inside a loop; the median of several loops is kept. Names end in
what was counted: `forward` with gradients recorded, `backward` per node of the graph, `per parameter`, `per module`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from scripts_h200 import about

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOOP_S = 0.02  # length of one timed loop
LOOPS = 7
NODES = 210  # of the longer chain
CALLS = 400  # of one loop, fewer than the launches that CUDA queues


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Table:
    """Collects microseconds per call by name; a call that fails is written down and ends nothing."""

    def __init__(self, output: str, seconds: float) -> None:
        self.output, self.stop = Path(output), time.monotonic() + seconds
        self.us: dict[str, float] = {}
        self.errors: dict[str, str] = {}

    def add(self, name: str, call: Callable[[], Any], divide: float = 1.0) -> None:
        """The time of `call` in a loop, divided by the number of things that it does."""
        self._guarded(name, lambda: _loop_us(call) / divide)

    def add_prepared(
        self, name: str, prepare: Callable[[], Any], call: Callable[[Any], Any], divide: float = 1.0
    ) -> None:
        """The time of `call(prepare())`, of which the preparation is not timed."""
        self._guarded(name, lambda: _prepared_us(prepare, call) / divide)

    def add_slope(self, name: str, make: Callable[[int], tuple[Callable[[], Any], Callable[[Any], Any]]]) -> None:
        """Time per node: the difference between 210 and 10 nodes."""

        def slope() -> float:
            return (_prepared_us(*make(NODES)) - _prepared_us(*make(10))) / (NODES - 10)

        self._guarded(name, slope)

    def _guarded(self, name: str, measure: Callable[[], float]) -> None:
        if time.monotonic() > self.stop:
            self.errors[name] = "time is up"
            return
        try:
            self.us[name] = round(measure(), 3)
        except Exception as error:  # one call must not end the others
            self.errors[name] = f"{type(error).__name__}: {error}"[:300]

    def write(self) -> None:
        self.output.write_text(json.dumps({"about": about(), "us": self.us, "errors": self.errors}, indent=1))


def _loop_us(call: Callable[[], Any]) -> float:
    for _ in range(5):
        call()
    synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        call()
    one = (time.perf_counter() - begin) / 5
    count = int(min(CALLS, max(3, LOOP_S / max(one, 1e-7))))
    found = []
    for _ in range(LOOPS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begin) / count)
    return 1e6 * statistics.median(found)


def _prepared_us(prepare: Callable[[], Any], call: Callable[[Any], Any]) -> float:
    found = []
    for _ in range(18):
        given = prepare()
        synchronize()
        begin = time.perf_counter()
        call(given)
        found.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(found[4:])


def tensor(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def operators(table: Table) -> None:
    """Eager operators with one kernel and views, without and with a graph for the backward pass."""
    for grad in (False, True):
        x, y, w, b = (tensor(16, 16, grad=grad) for _ in range(4))
        half = tensor(16, 16, grad=grad, dtype=torch.bfloat16)
        cube, image = tensor(2, 16, 16, grad=grad), tensor(2, 16, 8, 8, grad=grad)
        filters, book = tensor(16, 16, 3, 3, grad=grad), tensor(64, 16, grad=grad)
        heads = [tensor(1, 2, 16, 16, grad=grad, dtype=torch.bfloat16) for _ in range(3)]
        scale, ids = tensor(16, grad=grad), torch.randint(0, 16, (16,), device=DEVICE)
        flag = x > 0
        calls: dict[str, Callable[[], Any]] = {
            "mm": lambda x=x, y=y: x @ y,
            "bmm": lambda c=cube: torch.bmm(c, c),
            "linear": lambda x=x, w=w: functional.linear(x, w),
            "linear with bias": lambda x=x, w=w, s=scale: functional.linear(x, w, s),
            "linear 3d": lambda c=cube, w=w: functional.linear(c, w),
            "linear 3d with bias": lambda c=cube, w=w, s=scale: functional.linear(c, w, s),
            "add": lambda x=x, y=y: x + y,
            "mul": lambda x=x, y=y: x * y,
            "mul by number": lambda x=x: x * 2.0,
            "gelu": lambda x=x: functional.gelu(x),
            "silu": lambda x=x: functional.silu(x),
            "relu": lambda x=x: functional.relu(x),
            "softmax": lambda x=x: x.softmax(-1),
            "layer_norm": lambda x=x, s=scale: functional.layer_norm(x, (16,), s, s),
            "rms_norm": lambda x=x, s=scale: functional.rms_norm(x, (16,), s),
            "dropout": lambda x=x: functional.dropout(x, 0.1),
            "embedding": lambda ids=ids, book=book: functional.embedding(ids, book),
            "cat": lambda x=x, y=y: torch.cat([x, y]),
            "to dtype": lambda x=x: x.to(torch.bfloat16),
            "sum": lambda x=x: x.sum(),
            "mean": lambda x=x: x.mean(-1),
            "clone": lambda x=x: x.clone(),
            "where": lambda f=flag, x=x, y=y: torch.where(f, x, y),
            "index by tensor": lambda x=x, ids=ids: x[ids],
            "cross_entropy": lambda x=x, ids=ids: functional.cross_entropy(x, ids),
            "attention": lambda h=heads: functional.scaled_dot_product_attention(*h, is_causal=True),
            "conv2d": lambda i=image, f=filters: functional.conv2d(i, f, padding=1),
            "batch_norm": lambda i=image: functional.batch_norm(i, None, None, training=True),
            "group_norm": lambda i=image: functional.group_norm(i, 4),
            "contiguous copy": lambda x=x: x.t().contiguous(),
            "view": lambda x=x: x.view(4, 64),
            "reshape without copy": lambda x=x: x.reshape(4, 64),
            "transpose": lambda x=x: x.transpose(0, 1),
            "permute": lambda c=cube: c.permute(2, 0, 1),
            "expand": lambda c=cube: c[:, :1].expand(-1, 16, -1),
            "slice": lambda x=x: x[:, 1:],
            "select": lambda x=x: x[0],
            "unsqueeze": lambda x=x: x.unsqueeze(0),
            "split in 3": lambda c=cube: c.split(6, dim=-1),
            "chunk in 2": lambda x=x: x.chunk(2, dim=-1),
            "unbind of 2": lambda c=cube: c.unbind(0),
            "detach": lambda x=x: x.detach(),
            "bf16 mm": lambda h=half: h @ h,
        }
        kind = "forward" if grad else "no grad"
        for name, call in calls.items():
            table.add(f"{name}, {kind}", call)
        del b
    x = tensor(16, 16)
    table.add("add_, no grad", lambda: x.add_(1.0))
    table.add("zero_, no grad", lambda: x.zero_())
    table.add("copy_ same dtype, no grad", lambda: x.copy_(y))
    table.add("empty", lambda: torch.empty(16, 16, device=DEVICE))
    table.add("zeros", lambda: torch.zeros(16, 16, device=DEVICE))
    table.add("zeros_like", lambda: torch.zeros_like(x))
    table.add("arange", lambda: torch.arange(16, device=DEVICE))
    table.add("randn", lambda: torch.randn(16, 16, device=DEVICE))
    table.add("randint", lambda: torch.randint(0, 10, (16, 16), device=DEVICE))
    table.add("topk", lambda: x.topk(2))
    table.add("foreach lerp of 100", lambda: torch._foreach_lerp_([x] * 100, [y] * 100, 0.1))
    with torch.inference_mode():
        table.add("add, inference mode", lambda: x + x)


def backward(table: Table) -> None:
    """Backward per node of a chain of equal operations."""
    w, s = tensor(16, 16), tensor(16)
    weights = [tensor(16, 16, grad=True) for _ in range(NODES)]
    scales, biases = ([tensor(16, grad=True) for _ in range(NODES)] for _ in range(2))
    half = tensor(16, 16, dtype=torch.bfloat16)
    stages: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
        "add number (no kernel)": lambda x, i: x + 1.0,
        "add tensor (no kernel)": lambda x, i: x + w,
        "mul by number": lambda x, i: x * 1.01,
        "mul by tensor": lambda x, i: x * w,
        "mm": lambda x, i: x @ w,
        "mm and weight": lambda x, i: x @ weights[i],
        "linear and weight": lambda x, i: functional.linear(x, weights[i]),
        "linear, weight and bias": lambda x, i: functional.linear(x, weights[i], biases[i]),
        "linear 3d and weight": lambda x, i: functional.linear(x.view(2, 8, 16), weights[i]).view(16, 16),
        "view": lambda x, i: x.view(4, 64) if x.shape[0] == 16 else x.view(16, 16),
        "transpose": lambda x, i: x.transpose(0, 1),
        "slice": lambda x, i: x[:, :],
        "expand and sum": lambda x, i: x.unsqueeze(0).expand(2, -1, -1).sum(0),
        "gelu": lambda x, i: functional.gelu(x),
        "relu": lambda x, i: functional.relu(x),
        "softmax": lambda x, i: x.softmax(-1),
        "layer_norm": lambda x, i: functional.layer_norm(x, (16,), s, s),
        "layer_norm, weight and bias": lambda x, i: functional.layer_norm(x, (16,), scales[i], biases[i]),
        "rms_norm and weight": lambda x, i: functional.rms_norm(x, (16,), scales[i]),
        "dropout": lambda x, i: functional.dropout(x, 0.1),
        "to dtype and back": lambda x, i: x.to(torch.bfloat16).to(torch.float32),
        "clone": lambda x, i: x.clone(),
        "residual (adds two gradients)": lambda x, i: x + x * 1.01,
        "split in 2 and add": lambda x, i: torch.cat(x.chunk(2, dim=-1), dim=-1),
        "custom autograd function": lambda x, i: Twice.apply(x),
        "attention": lambda x, i: functional.scaled_dot_product_attention(x, x, x),
    }
    for name, stage in stages.items():
        first = half.view(1, 1, 16, 16) if name == "attention" else w

        def make(
            count: int, stage: Callable[..., torch.Tensor] = stage, first: torch.Tensor = first
        ) -> tuple[Any, Any]:
            def prepare() -> torch.Tensor:
                for parameter in (*weights, *scales, *biases):
                    parameter.grad = None
                x = first.clone().requires_grad_()
                for index in range(count):
                    x = stage(x, index)
                return x

            return prepare, lambda x: x.backward(torch.ones_like(x))

        table.add_slope(f"{name}, backward", make)
    leaves = [tensor(16, 16, grad=True) for _ in range(NODES)]
    for kept in (False, True):

        def make_leaves(count: int, kept: bool = kept) -> tuple[Any, Any]:
            def prepare() -> list[torch.Tensor]:
                for leaf in leaves:
                    leaf.grad = torch.zeros_like(leaf) if kept else None
                return [leaf * 1.0 for leaf in leaves[:count]]

            return prepare, lambda roots: torch.autograd.backward(roots, [w] * len(roots))

        table.add_slope(f"mul and AccumulateGrad {'that adds' if kept else 'that keeps'}, backward", make_leaves)
    x = tensor(16, 16, grad=True)
    table.add_prepared("backward call itself", lambda: x.sum(), lambda loss: loss.backward())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2.0


class Nested(nn.Module):
    """Calls its child and does nothing."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


def modules(table: Table) -> None:
    """nn.Module calls, hooks, autocast and checkpointing."""
    x = tensor(16, 16)
    deep: nn.Module = nn.Identity()
    for _ in range(20):
        deep = Nested(deep)
    table.add("nn.Module call, per level", lambda: deep(x), 21)
    plain, hooked = nn.Identity(), nn.Identity()
    hooked.register_forward_pre_hook(lambda module, args: None)
    hooked.register_forward_hook(lambda module, args, result: None)
    table.add("nn.Module call", lambda: plain(x))
    table.add("nn.Module call with two hooks", lambda: hooked(x))
    linear, norm = nn.Linear(16, 16, device=DEVICE), nn.LayerNorm(16, device=DEVICE)
    chain = nn.Sequential(*[nn.Identity() for _ in range(20)])
    table.add("nn.Linear, forward", lambda: linear(x))
    table.add("nn.LayerNorm, forward", lambda: norm(x))
    table.add("nn.Sequential, per child", lambda: chain(x), 20)
    half = x.to(torch.bfloat16)
    lower = nn.Linear(16, 16, device=DEVICE, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        table.add("nn.Linear of bf16 input in autocast, weights cached", lambda: linear(half))
        table.add("nn.Linear of fp32 input in autocast, weights cached", lambda: linear(x))
        table.add("nn.Linear of bf16 weights and input in autocast", lambda: lower(half))
        table.add("nn.LayerNorm of bf16 input in autocast", lambda: norm(half))
        table.add("mul in autocast", lambda: x * x)
        table.add("gelu in autocast", lambda: functional.gelu(half))
    table.add("nn.Linear of bf16 weights and input", lambda: lower(half))

    def uncached() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            linear(x)

    def empty() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            pass

    table.add("autocast entered and left", empty)
    table.add("nn.Linear of fp32 input in its own autocast, weights cast", uncached)
    checkpointing(table)


def checkpointing(table: Table) -> None:
    from torch.utils.checkpoint import checkpoint

    x = tensor(16, 16, grad=True)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 1.01

    for reentrant in (False, True):
        name = f"checkpoint {'re-entrant' if reentrant else 'not re-entrant'}"

        def saved(reentrant: bool = reentrant) -> torch.Tensor:
            return checkpoint(plain, x, use_reentrant=reentrant)

        table.add(f"{name} of one mul, forward", saved)
        table.add_prepared(f"{name} of one mul, backward", saved, lambda y: y.sum().backward())
    table.add_prepared("one mul and sum, backward", lambda: plain(x), lambda y: y.sum().backward())


def with_gradients(count: int) -> list[torch.Tensor]:
    found = [tensor(16, 16, grad=True) for _ in range(count)]
    for parameter in found:
        parameter.grad = torch.zeros_like(parameter)
    return found


def optimizers(table: Table) -> None:
    """Optimizer steps, clipping, scaling and clearing, per parameter, of 50 and 200 parameters."""
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    kinds: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
        "AdamW loop": lambda p: adamw(p, lr=1e-4, foreach=False, fused=False),
        "AdamW foreach": lambda p: adamw(p, lr=1e-4, foreach=True),
        "AdamW fused": lambda p: adamw(p, lr=1e-4, fused=True),
        "Adam foreach": lambda p: torch.optim.Adam(p, lr=1e-4, foreach=True),
        "SGD momentum loop": lambda p: sgd(p, lr=1e-4, momentum=0.9, weight_decay=1e-4, foreach=False),
        "SGD momentum foreach": lambda p: sgd(p, lr=1e-4, momentum=0.9, weight_decay=1e-4, foreach=True),
        "SGD momentum fused": lambda p: sgd(p, lr=1e-4, momentum=0.9, weight_decay=1e-4, fused=True),
    }
    for count in (1, 50, 200):
        for name, kind in kinds.items():
            optimizer = kind(with_gradients(count))
            table.add(f"{name}, step of {count} parameters", optimizer.step)
        parameters = with_gradients(count)
        table.add(
            f"clip_grad_norm_ foreach, of {count} parameters", lambda p=parameters: nn.utils.clip_grad_norm_(p, 1.0)
        )
        table.add(
            f"clip_grad_norm_ loop, of {count} parameters",
            lambda p=parameters: nn.utils.clip_grad_norm_(p, 1.0, foreach=False),
        )
        optimizer = adamw(parameters, lr=1e-4)
        table.add_prepared(f"zero_grad of {count} parameters", lambda p=parameters: _fill(p), _clear(optimizer))
        _fill(parameters)
        scaling(table, parameters)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw(with_gradients(1), lr=1e-4), T_max=1000000)
    schedule.optimizer.step()
    table.add("learning-rate schedule, step", schedule.step)


def _clear(optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    return lambda _: optimizer.zero_grad()


def _fill(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def scaling(table: Table, parameters: list[torch.Tensor]) -> None:
    scaler = torch.amp.GradScaler(DEVICE)
    loss, count = tensor(1), len(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    table.add(f"GradScaler scale, beside {count} parameters", lambda: scaler.scale(loss))

    def unscale() -> None:
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states.clear()

    def whole() -> None:
        scaler.step(optimizer)
        scaler.update()

    table.add(f"GradScaler unscale_ of {count} parameters", unscale)
    table.add(f"GradScaler step and update of {count} parameters (reads the GPU)", whole)


def waiting(table: Table) -> None:
    """Reads, copies and launches on an idle GPU."""
    x, host = tensor(1), torch.randint(0, 9, (8, 128))
    table.add("item, idle GPU", lambda: x.item())
    table.add("copy of 8 KiB from pageable memory", lambda: host.to(DEVICE))
    total = 0.0

    def python_loop() -> None:
        nonlocal total
        for index in range(1000):
            total += index * 0.5

    table.add("Python: a thousand additions", python_loop)
    table.add("Python: a function call", lambda: None)
    if DEVICE != "cuda":
        return
    pinned = host.pin_memory()
    table.add("pin_memory of 8 KiB", lambda: host.pin_memory())
    table.add("copy of 8 KiB from pinned memory", lambda: pinned.to(DEVICE, non_blocking=True))
    table.add("synchronize, idle GPU", synchronize)
    table.add("kernel launch alone", lambda: torch.cuda._sleep(1))
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    table.add("event recorded", lambda: event.record())
    table.add("event waited for by a stream", lambda: stream.wait_event(event))

    def switched() -> None:
        with torch.cuda.stream(stream):
            pass

    table.add("stream entered and left", switched)
    flag = tensor(64, 8) > 0
    table.add("nonzero (waits)", lambda: flag.nonzero())


def compiled(table: Table) -> None:
    """Calls of compiled regions: guards and wrapper, then a kernel at a time."""
    x, w = tensor(16, 16), tensor(16, 16, grad=True)

    def chain(count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for _ in range(count):
                x = torch.relu(x.softmax(-1) @ w)
            return x

        return torch.compile(run)

    for count in (1, 8):
        run = chain(count)
        table.add(f"compiled, {count} mm and {count} fused kernels, forward", lambda run=run: run(x, w))
        one = torch.ones_like(x)
        table.add_prepared(
            f"compiled, {count} mm and {count} fused kernels, backward",
            lambda run=run: run(x, w),
            lambda y, one=one: y.backward(one),
        )


def distributed(table: Table) -> None:
    """Collectives, DTensor and FSDP2 on a fake process group of 16 ranks (8 × 2)."""
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    mesh = init_device_mesh(DEVICE, (8, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    x, wide = tensor(16, 16), tensor(32, 16)
    table.add("all_reduce", lambda: dist.all_reduce(x, group=group))
    table.add("all_reduce async and wait", lambda: dist.all_reduce(x, group=group, async_op=True).wait())
    table.add("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(wide, x, group=group))
    table.add("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(x, wide, group=group))
    table.add("functional all_reduce and wait", lambda: collectives.all_reduce(x, "sum", group).wait())
    dtensors(table, mesh)
    fsdp(table, mesh)


def dtensors(table: Table, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    tp = mesh["tp"]
    for grad in (False, True):
        kind = "forward" if grad else "no grad"
        same, column, row = (
            distribute_tensor(tensor(16, 16), tp, [place]).requires_grad_(grad)
            for place in (Replicate(), Shard(1), Shard(0))
        )
        scale = distribute_tensor(tensor(16), tp, [Replicate()]).requires_grad_(grad)
        long = distribute_tensor(tensor(2, 16, 16), tp, [Shard(1)]).requires_grad_(grad)
        part = DTensor.from_local(tensor(16, 16), tp, [Partial()], run_check=False).requires_grad_(grad)
        local = tensor(16, 16, grad=grad)
        calls: dict[str, Callable[[], Any]] = {
            "mm": lambda a=same, b=column: a @ b,
            "add": lambda a=same: a + a,
            "mul": lambda a=column: a * a,
            "silu": lambda a=column: functional.silu(a),
            "rms_norm": lambda a=long, s=scale: functional.rms_norm(a, (16,), s),
            "layer_norm": lambda a=long, s=scale: functional.layer_norm(a, (16,), s, s),
            "view": lambda a=same: a.view(4, 64),
            "transpose": lambda a=column: a.t(),
            "from_local": lambda a=local: DTensor.from_local(a, tp, [Shard(1)], run_check=False),
            "to_local": lambda a=column: a.to_local(),
            "redistribute to the same": lambda a=same: a.redistribute(tp, [Replicate()]),
            "redistribute by all_gather": lambda a=row: a.redistribute(tp, [Replicate()]),
            "redistribute by all_reduce": lambda a=part: a.redistribute(tp, [Replicate()]),
            "redistribute by reduce_scatter": lambda a=part: a.redistribute(tp, [Shard(0)]),
        }
        for name, call in calls.items():
            table.add(f"DTensor {name}, {kind}", call)
    base = distribute_tensor(tensor(16, 16), tp, [Replicate()])
    weights = [distribute_tensor(tensor(16, 16), tp, [Replicate()]).requires_grad_() for _ in range(NODES)]
    stages: dict[str, Callable[[Any, int], Any]] = {
        "mul by number": lambda x, i: x * 1.01,
        "mm": lambda x, i: x @ base,
        "mm and weight": lambda x, i: x @ weights[i],
        "view": lambda x, i: x.view(4, 64) if x.shape[0] == 16 else x.view(16, 16),
        "rms_norm": lambda x, i: functional.rms_norm(x, (16,)),
    }
    for name, stage in stages.items():

        def make(count: int, stage: Callable[[Any, int], Any] = stage) -> tuple[Any, Any]:
            def prepare() -> Any:
                for weight in weights:
                    weight.grad = None
                x = base.clone().requires_grad_()
                for index in range(count):
                    x = stage(x, index)
                return x

            return prepare, lambda x: x.backward(base)

        table.add_slope(f"DTensor {name}, backward", make)
    parallel_modules(table, tp)
    for name, flags in {"loop": {"foreach": False, "fused": False}, "foreach": {}, "fused": {"fused": True}}.items():
        parameters = [distribute_tensor(tensor(16, 16), tp, [Shard(0)]).requires_grad_() for _ in range(50)]
        _fill(parameters)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **flags)
        table.add(f"DTensor AdamW {name}, per parameter of 50", optimizer.step, 50)
        table.add(
            f"DTensor clip_grad_norm_ beside {name}, per parameter of 50",
            lambda p=parameters: nn.utils.clip_grad_norm_(p, 1.0),
            50,
        )


def parallel_modules(table: Table, mesh: Any) -> None:
    """nn.Linear under ColwiseParallel and RowwiseParallel; a norm under SequenceParallel."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for name, style in {
        "ColwiseParallel": ColwiseParallel(),
        "RowwiseParallel": RowwiseParallel(),
        "SequenceParallel": SequenceParallel(),
    }.items():
        module: nn.Module = nn.Linear(16, 16, bias=False, device=DEVICE)
        if name == "SequenceParallel":
            module = nn.RMSNorm(16, device=DEVICE)
        module = parallelize_module(module, mesh, style)
        x = tensor(2, 8, 8 if name == "RowwiseParallel" else 16, grad=True)
        table.add(f"{name} module, forward", lambda m=module, x=x: m(x))

        def gradient(y: Any) -> Any:
            return torch.ones_like(y)

        def run(pair: Any) -> None:
            pair[0].backward(pair[1])

        def prepare(m: nn.Module = module, x: torch.Tensor = x) -> Any:
            m.zero_grad()
            y = m(x)
            return y, gradient(y)

        table.add_prepared(f"{name} module, backward", prepare, run)


def stack(blocks: int, linears: int) -> nn.Module:
    chains = [
        nn.Sequential(*[nn.Linear(16, 16, bias=False, device=DEVICE) for _ in range(linears)]) for _ in range(blocks)
    ]
    return nn.Sequential(*chains)


def fsdp(table: Table, mesh: Any) -> None:
    """Blocks of Linear layers, 8 of them sharded by FSDP2, with 1 and 8 parameters a block, beside the plain ones."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    x = tensor(16, 16)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policies: dict[str, dict[str, Any] | None] = {"plain": None, "FSDP2": {}, "FSDP2 mixed": {"mp_policy": mixed}}
    for name, options in policies.items():
        for linears in (1, 8):
            model = stack(8, linears)
            if options is not None:
                for block in model:
                    fully_shard(block, mesh=mesh["dp"], **options)
                fully_shard(model, mesh=mesh["dp"], **options)

            def forward_backward(m: nn.Module = model) -> None:
                m(x).sum().backward()

            def prepare(m: nn.Module = model) -> torch.Tensor:
                m.zero_grad()
                return m(x).sum()

            label = f"{name}, 8 blocks of {linears} parameters"
            table.add_prepared(f"{label}, forward", lambda m=model: m.zero_grad(), lambda _, m=model: m(x))
            forward_backward()
            table.add_prepared(f"{label}, backward", prepare, lambda loss: loss.backward())
            for kind, flags in {"foreach": {"foreach": True}, "fused": {"fused": True}}.items():
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **flags)
                forward_backward()
                table.add(f"{label}, AdamW {kind} step", optimizer.step)
            table.add(f"{label}, clip_grad_norm_", lambda m=model: nn.utils.clip_grad_norm_(m.parameters(), 1.0))


def main(output: str, seconds: str, *names: str) -> None:
    warnings.filterwarnings("ignore")
    table = Table(output, float(seconds))
    for group in (waiting, operators, backward, modules, optimizers, distributed, compiled):
        if names and group.__name__ not in names:
            continue
        began = time.monotonic()
        try:
            group(table)
        except Exception as error:  # what was measured before is kept
            table.errors[group.__name__] = f"{type(error).__name__}: {error}"[:500]
        table.write()
        print(group.__name__, f"{time.monotonic() - began:.1f} s", flush=True)
    for name, us in table.us.items():
        print(f"{us:10.2f}  {name}")
    for name, error in table.errors.items():
        print("FAILED", name, error)


if __name__ == "__main__":
    main(*sys.argv[1:])
