"""Times what training scripts run besides large half-precision matmuls: convolutions, pooling, optimizers, fp32.

    python3 calibration/aten_training_h200.py OUT.jsonl SECONDS [SEED [FAMILY …]]

Needs torch and a GPU, nothing else. Each row holds the aten operators of one call exactly as a dry run records them
(a dispatch mode sees both), whatever arguments were not tensors, and the median time in microseconds from a cold cache.
The GPU is kept busy until the host has issued the whole call, so that slow launches do not count. SECONDS are divided
among the families by their weights; sizes are random, so that another seed gives other shapes.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = DEVICE == "cpu"  # a trial of the script itself
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {
    BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.float64: "fp64", torch.int64: "int64", torch.int32: "int32",
    torch.bool: "bool", torch.uint8: "uint8",
}  # fmt: skip
Call = Callable[[], Any]
Case = Iterator[tuple[dict[str, Any], Call]]
_FLUSH: list[torch.Tensor] = []


# ---------------------------------------------------------------------- timing and recording
def timed(call: Call, repeats: int = 5) -> float:
    """Median microseconds of a call from a cold cache, with whatever the events cost."""
    call()
    if TINY:
        return 1.0
    if not _FLUSH:
        _FLUSH.append(torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE))
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    host_s = time.perf_counter() - began
    torch.cuda.synchronize()
    busy = int(min(1.5 * host_s + 40e-6, 20e-3) * 1.9e9)  # cycles until the host has issued everything
    if time.perf_counter() - began > 0.01:
        repeats = 3
    times = []
    for _ in range(repeats):
        _FLUSH[0].zero_()
        torch.cuda._sleep(busy)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def text_of(tensor: torch.Tensor) -> str:
    """`bf16[64,3]`, with strides unless it is contiguous; tensors of the host are marked."""
    text = f"{NAMES.get(tensor.dtype, str(tensor.dtype))}[{','.join(map(str, tensor.shape))}]"
    if not tensor.is_contiguous():
        text += f"({','.join(map(str, tensor.stride()))})"
    return text + ("@host" if tensor.device.type != DEVICE else "")


def texts(value: Any) -> list[str]:
    if isinstance(value, torch.Tensor):
        return [text_of(value)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in texts(item)]
    return []


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value][:12]
    return value if isinstance(value, (bool, int, float, str)) or value is None else "tensor"


class Recorder(TorchDispatchMode):
    """Writes down the operators of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        facts = [plain(arg) for arg in args] if not str(func).startswith("aten._f") else []
        self.ops.append({
            "name": str(func), "inputs": texts(list(args) + list((kwargs or {}).values())), "outputs": texts(out),
            "args": facts, "kwargs": {key: plain(value) for key, value in (kwargs or {}).items() if value is not None},
        })  # fmt: skip
        return out


def recorded(call: Call) -> list[dict[str, Any]]:
    with Recorder() as recorder:
        call()
    skipped = ("aten.detach", "aten.view", "aten.expand", "aten.t.", "aten.transpose", "aten.permute", "aten.alias")
    return [op for op in recorder.ops if not op["name"].startswith(skipped)]


# ---------------------------------------------------------------------- drawing sizes
def draw(low: float, high: float, of: int = 8) -> int:
    """A whole number, log-uniform, a multiple of `of`."""
    return max(of, round(low * (high / low) ** random.random() / of) * of)


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    if TINY:
        shape = tuple(shape)
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def precision() -> torch.dtype:
    return random.choice([BF16, BF16, FP16, FP32, FP32])


def layout_of(x: torch.Tensor, last: bool) -> torch.Tensor:
    if not last:
        return x
    return x.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format))


def backward_of(out: torch.Tensor, *inputs: torch.Tensor, grad: torch.Tensor | None = None) -> Call:
    grad = torch.randn_like(out) if grad is None else grad
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


# ---------------------------------------------------------------------- convolutions
def resnet_like() -> dict[str, Any]:
    size = random.choice([7, 8, 14, 16, 28, 32, 56, 64, 112])
    kernel = random.choice([1, 1, 1, 3, 3, 3, 5])
    channels = random.choice([64, 128, 256, 512, 1024, 2048])
    out = random.choice([64, 128, 256, 512, 1024, 2048])
    return {"n": random.choice([8, 16, 32, 64, 128, 256]), "c": channels, "k": out, "size": [size, size],
            "kernel": [kernel] * 2, "stride": random.choice([1, 1, 1, 2]), "pad": kernel // 2}  # fmt: skip


def mixed_channels() -> dict[str, Any]:
    kernel, size = random.choice([1, 3, 3, 5]), random.choice([8, 12, 16, 20, 32, 40, 64, 80, 96])
    several = [16, 24, 32, 40, 48, 72, 80, 96, 112, 144, 160, 192, 240, 320, 384, 480, 640, 768, 960, 1280]
    return {"n": random.choice([2, 4, 8, 16, 32, 64, 128]), "c": random.choice(several), "k": random.choice(several),
            "size": [size, size], "kernel": [kernel] * 2, "stride": random.choice([1, 1, 2]),
            "pad": kernel // 2}  # fmt: skip


def stem() -> dict[str, Any]:
    kernel, stride = random.choice([(7, 2), (3, 2), (3, 1), (5, 2)])
    size = random.choice([32, 64, 128, 192, 224, 256, 384])
    return {"n": random.choice([8, 16, 32, 64, 128, 256]), "c": random.choice([1, 3, 3, 3, 4]),
            "k": random.choice([16, 24, 32, 48, 64, 96, 128]), "size": [size, size], "kernel": [kernel] * 2,
            "stride": stride, "pad": kernel // 2}  # fmt: skip


def patches() -> dict[str, Any]:
    kernel = random.choice([2, 2, 4, 4, 8, 14, 16, 16, 32])
    from_image = kernel > 2 and random.random() < 0.8
    size = kernel * random.choice([7, 14, 16, 24, 28, 32, 37, 56])
    if size > 520:
        size = kernel * 16
    return {"n": random.choice([8, 16, 32, 64, 128, 256]), "c": 3 if from_image else draw(64, 768, 32),
            "k": random.choice([96, 128, 192, 384, 512, 768, 1024, 1280]), "size": [size, size],
            "kernel": [kernel] * 2, "stride": kernel, "pad": 0}  # fmt: skip


def depthwise() -> dict[str, Any]:
    kernel, size = random.choice([3, 3, 5, 7, 7]), random.choice([7, 14, 16, 28, 32, 56, 64, 112])
    channels = random.choice([32, 64, 96, 128, 144, 192, 240, 256, 384, 480, 512, 672, 768, 960, 1024])
    return {"n": random.choice([8, 16, 32, 64, 128]), "c": channels, "k": channels, "size": [size, size],
            "kernel": [kernel] * 2, "stride": random.choice([1, 1, 1, 2]), "pad": kernel // 2,
            "groups": channels}  # fmt: skip


def grouped() -> dict[str, Any]:
    groups, each = random.choice([2, 4, 8, 16, 32]), random.choice([4, 8, 16, 24, 32, 64])
    size = random.choice([7, 14, 28, 56])
    return {"n": random.choice([16, 32, 64, 128]), "c": groups * each, "k": groups * each, "size": [size, size],
            "kernel": [3, 3], "stride": random.choice([1, 1, 2]), "pad": 1, "groups": groups}  # fmt: skip


def one_dimension() -> dict[str, Any]:
    which = random.choice(["speech", "wave", "causal", "position", "plain"])
    n = random.choice([2, 4, 8, 16, 32])
    if which == "speech":
        c = random.choice([80, 128, 384, 512, 768, 1024, 1280])
        return {"n": n, "c": c, "k": draw(384, 1280, 64), "size": [draw(1000, 3000)], "kernel": [3],
                "stride": random.choice([1, 2]), "pad": 1}  # fmt: skip
    if which == "wave":
        return {"n": n, "c": 512, "k": 512, "size": [draw(2000, 40000)], "kernel": [random.choice([2, 3])],
                "stride": 2, "pad": 0}  # fmt: skip
    if which == "causal":
        c = draw(1024, 8192, 256)
        return {"n": random.choice([1, 2, 4]), "c": c, "k": c, "size": [draw(512, 4096)], "kernel": [4], "stride": 1,
                "pad": 3, "groups": c}  # fmt: skip
    if which == "position":
        c = random.choice([768, 1024])
        return {"n": n, "c": c, "k": c, "size": [draw(200, 1000)], "kernel": [128], "stride": 1, "pad": 64,
                "groups": 16}  # fmt: skip
    kernel = random.choice([1, 3, 5, 7, 9])
    return {"n": n, "c": draw(64, 1024, 32), "k": draw(64, 1024, 32), "size": [draw(128, 4000)], "kernel": [kernel],
            "stride": 1, "pad": kernel // 2}  # fmt: skip


def three_dimensions() -> dict[str, Any]:
    if random.random() < 0.5:
        return {"n": random.choice([256, 1024, 4096]), "c": 3, "k": random.choice([768, 1152, 1280]),
                "size": [2, 14, 14], "kernel": [2, 14, 14], "stride": [2, 14, 14], "pad": 0}  # fmt: skip
    c, size = random.choice([32, 64, 128, 256]), random.choice([8, 16, 32])
    return {"n": random.choice([1, 2, 4, 8]), "c": c, "k": random.choice([32, 64, 128, 256]), "size": [size] * 3,
            "kernel": [3] * 3, "stride": 1, "pad": 1}  # fmt: skip


def upwards() -> dict[str, Any]:
    kernel = random.choice([2, 4])
    size = random.choice([8, 14, 16, 28, 32, 64])
    return {"n": random.choice([4, 8, 16, 32]), "c": draw(64, 1024, 64), "k": draw(32, 512, 32), "size": [size, size],
            "kernel": [kernel] * 2, "stride": 2, "pad": (kernel - 2) // 2, "transposed": True}  # fmt: skip


# (channels in, out, size, kernel, stride, groups) of layers that many networks share, at images of 224 × 224
KNOWN = [
    *[(3, c, 224, k, s, 1) for c, k, s in ((64, 7, 2), (32, 3, 2), (64, 3, 1), (96, 4, 4), (128, 4, 4), (768, 16, 16))],
    *[(c, c, 56 * 64 // c, 3, 1, 1) for c in (64, 128, 256, 512)],  # residual blocks
    *[(c // 2, c, 112 * 64 // c, 3, 2, 1) for c in (128, 256, 512)],
    *[(4 * c, c, 56 * 64 // c, 1, 1, 1) for c in (64, 128, 256, 512)],
    *[(c, 4 * c, 56 * 64 // c, 1, 1, 1) for c in (64, 128, 256, 512)],
    *[(2 * c, c, 112 * 64 // c, 1, 1, 1) for c in (128, 256, 512)],
    *[(2 * c, 4 * c, 112 * 64 // c, 1, 2, 1) for c in (128, 256, 512)],
    *[(c, c, 56 * 128 // c, 3, 1, 32) for c in (128, 256, 512, 1024)],
    *[(c, c, 224 * 64 // c, 3, 1, 1) for c in (64, 128, 256, 512)],  # plain stacks
    *[(c, c, 56 * 96 // c, 7, 1, c) for c in (96, 192, 384, 768)],  # large depthwise kernels
    *[(c, c, 56 * 128 // c, 7, 1, c) for c in (128, 256, 512, 1024)],
    *[(c, 2 * c, 56 * 96 // c, 2, 2, 1) for c in (96, 192, 384)],
    *[(c, c, size, k, s, c) for c, size, k, s in (  # inverted bottlenecks
        (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (192, 28, 3, 2), (240, 28, 5, 1),
        (384, 14, 3, 1), (480, 14, 5, 1), (672, 14, 5, 2), (960, 7, 3, 1), (1152, 7, 5, 1))],
    *[(a, b, size, 1, 1, 1) for a, b, size in (
        (16, 96, 112), (24, 144, 56), (144, 24, 56), (40, 240, 28), (240, 40, 28), (80, 480, 14), (480, 112, 14),
        (112, 672, 14), (192, 1152, 7), (1152, 320, 7), (320, 1280, 7))],
    *[(a, b, size, 3, 1, 1) for a, b, size in (  # denoising networks and autoencoders
        (4, 320, 64), (320, 320, 64), (640, 320, 64), (640, 640, 32), (1280, 640, 32), (1280, 1280, 16),
        (2560, 1280, 16), (1280, 1280, 8), (128, 128, 128), (256, 256, 64), (512, 512, 32), (128, 128, 32))],
    *[(c, c, size, 3, 2, 1) for c, size in ((320, 64), (640, 32), (1280, 16), (128, 128), (256, 64))],
]  # fmt: skip


def known_network() -> dict[str, Any]:
    c, k, size, kernel, stride, groups = random.choice(KNOWN)
    if random.random() < 0.25:
        size = max(kernel, size * random.choice([1, 2, 3, 4]) // 2)
    return {"n": random.choice([1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256]), "c": c, "k": k, "size": [size, size],
            "kernel": [kernel] * 2, "stride": stride, "pad": 0 if kernel == stride else kernel // 2,
            "groups": groups}  # fmt: skip


CONVOLUTIONS = [
    (known_network, 30), (resnet_like, 10), (mixed_channels, 6), (stem, 2), (patches, 3), (depthwise, 5), (grouped, 2),
    (one_dimension, 4),
    (three_dimensions, 1), (upwards, 1),
]  # fmt: skip


def convolution() -> Case:
    makers, weights = zip(*CONVOLUTIONS, strict=True)
    made = random.choices(makers, weights)[0]
    facts = made()
    n, c, k, kernel, groups = facts["n"], facts["c"], facts["k"], facts["kernel"], facts.get("groups", 1)
    transposed, dims = facts.get("transposed", False), len(kernel)
    if TINY:
        n, facts["size"] = 1, [max(2 * a, min(size, 8)) for size, a in zip(facts["size"], kernel, strict=True)]
    work = n * k * c // groups * math.prod(kernel) * math.prod(facts["size"])
    if work > 6e11 or n * max(c, k) * math.prod(facts["size"]) > 1 << 29 or (TINY and work > 1e8):
        return
    dtype, last = precision(), random.random() < 0.45 and dims > 1
    weight = (c, k // groups, *kernel) if transposed else (k, c // groups, *kernel)
    x, w = layout_of(rand(n, c, *facts["size"], dtype=dtype), last), layout_of(rand(*weight, dtype=dtype), last)
    bias = rand(k, dtype=dtype) if random.random() < 0.3 else None
    stride = [facts["stride"]] * dims if isinstance(facts["stride"], int) else facts["stride"]
    pad, one, zero = [facts["pad"]] * dims, [1] * dims, [0] * dims
    rest = (stride, pad, one, transposed, zero, groups)
    note = {"shape of": made.__name__, "channels last": last}
    yield note, lambda: torch.ops.aten.convolution.default(x, w, bias, *rest)
    y = torch.randn_like(torch.ops.aten.convolution.default(x, w, bias, *rest))
    sizes = None if bias is None else [k]
    for mask in ([True, False, False], [False, True, False], [True, True, bias is not None]):
        if mask[0] and c <= 4:
            continue  # images need no gradient
        yield (
            note,
            lambda mask=mask: torch.ops.aten.convolution_backward.default(y, x, w, sizes, *rest, mask),
        )


# ---------------------------------------------------------------------- normalisation, pooling, resizing
def image(most: int = 1 << 28) -> torch.Tensor:
    while True:
        n, size = random.choice([4, 8, 16, 32, 64, 128, 256]), random.choice([7, 8, 14, 16, 28, 32, 56, 64, 112])
        c = random.choice([32, 64, 96, 128, 192, 256, 320, 512, 640, 1024, 1280, 2048])
        if TINY:
            n, size, c = 2, 8, 64
        if n * c * size * size <= most:
            return layout_of(rand(n, c, size, size, dtype=precision()), random.random() < 0.45)


def batch_norm() -> Case:
    x = image().requires_grad_()
    c, note = x.shape[1], {}
    kind = FP32 if random.random() < 0.6 else x.dtype
    weight, bias = (torch.ones(c, device=DEVICE, dtype=kind, requires_grad=True) for _ in range(2))
    mean, var = torch.zeros(c, device=DEVICE, dtype=kind), torch.ones(c, device=DEVICE, dtype=kind)
    yield note, lambda: functional.batch_norm(x, mean, var, weight, bias, training=True)
    out = functional.batch_norm(x, mean, var, weight, bias, training=True)
    yield note, backward_of(out, x, weight, bias)


def group_norm() -> Case:
    x = image(1 << 27).requires_grad_()
    groups = 1 if random.random() < 0.15 else 32
    if x.shape[1] % groups:
        return
    weight, bias = (torch.ones(x.shape[1], device=DEVICE, dtype=x.dtype, requires_grad=True) for _ in range(2))
    yield {}, lambda: functional.group_norm(x, groups, weight, bias)
    yield {}, backward_of(functional.group_norm(x, groups, weight, bias), x, weight, bias)


def pooling() -> Case:
    x = image().requires_grad_()
    kernel, stride, pad = random.choice([(3, 2, 1), (2, 2, 0), (3, 1, 1)])
    size = random.choice([(1, 1), (1, 1), (7, 7)])
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: functional.max_pool2d(x, kernel, stride, pad),
        lambda: functional.avg_pool2d(x, kernel, stride, pad),
        lambda: functional.adaptive_avg_pool2d(x, size),
        lambda: functional.interpolate(x[:, :, :64, :64], scale_factor=2.0, mode="nearest"),
        lambda: functional.interpolate(x[:, :, :64, :64], scale_factor=2.0, mode="bilinear"),
    ]
    call = random.choice(calls)
    yield {}, call
    yield {}, backward_of(call(), x)


def normalisation() -> Case:
    t, h = draw(256, 65536), random.choice([64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096])
    dtype = random.choice([FP32, FP32, BF16, FP16])
    if TINY:
        t = 16
    x = rand(t, h, dtype=dtype).requires_grad_()
    weight, bias = (torch.ones(h, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(2))
    yield {}, lambda: functional.layer_norm(x, [h], weight, bias)
    yield {}, backward_of(functional.layer_norm(x, [h], weight, bias), x, weight, bias)
    yield {}, lambda: functional.rms_norm(x, [h], weight, 1e-6)
    yield {}, backward_of(functional.rms_norm(x, [h], weight, 1e-6), x, weight)
    if t % 64 == 0 and h >= 96:  # a stack of images whose channels were moved last by a view
        moved = rand(64, h, t // 64, 1, dtype=dtype).permute(0, 2, 3, 1)
        yield {}, lambda: functional.layer_norm(moved, [h], weight, bias)


# ---------------------------------------------------------------------- optimizers
def bert(layers: int, h: int, vocab: int = 30522) -> list[tuple[int, ...]]:
    layer = [(h, h), (h,)] * 4 + [(h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,), (h,), (h,)]
    return [(vocab, h), (512, h), (2, h), (h,), (h,)] + layer * layers + [(h, h), (h,)]


def gpt(layers: int, h: int, vocab: int = 50257) -> list[tuple[int, ...]]:
    layer = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    return [(vocab, h), (1024, h)] + layer * layers + [(h,), (h,)]


def resnet(blocks: int, width: int) -> list[tuple[int, ...]]:
    block = [(width, 4 * width, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,),
             (4 * width, width, 1, 1), (4 * width,), (4 * width,)]  # fmt: skip
    return [(64, 3, 7, 7), (64,), (64,)] + block * blocks + [(1000, 4 * width), (1000,)]


def parameter_list() -> tuple[str, list[tuple[int, ...]]]:
    which = random.choice(["bert", "bert", "gpt", "gpt", "resnet", "random", "lora"])
    layers, h = random.choice([4, 6, 12, 24, 36]), random.choice([384, 512, 768, 1024, 1280, 1600])
    if TINY:
        layers, h = 1, 8
    if which == "resnet":
        return which, resnet(random.choice([8, 16, 33]), random.choice([64, 128, 256]))
    if which == "lora":
        return which, [(16, h), (h, 16)] * layers * 4
    if which == "random":
        return which, [(draw(8, 2e3 if TINY else 2e7),) for _ in range(random.choice([5, 20, 60, 150]))]
    return which, {"bert": bert, "gpt": gpt}[which](layers, h)


def optimizer() -> Case:
    which, shapes = parameter_list()
    dtype = random.choice([FP32, FP32, FP32, BF16])
    if sum(map(math.prod, shapes)) > 1 << 30:
        return
    p, g, m, v = ([torch.ones(shape, device=DEVICE, dtype=dtype) for shape in shapes] for _ in range(4))
    steps = [torch.ones((), device=DEVICE) for _ in shapes]
    one, tiny = torch.ones((), device=DEVICE), 1e-9
    adam = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False,
            "maximize": False}  # fmt: skip
    calls: list[Call] = [
        lambda: torch._fused_adamw_(p, g, m, v, [], steps, **adam),
        lambda: torch._fused_sgd_(
            p, g, m, weight_decay=1e-4, momentum=0.9, lr=1e-9, dampening=0.0, nesterov=False, maximize=False,
            is_first_step=False,
        ),
        lambda: torch._foreach_mul_(p, 0.999),
        lambda: torch._foreach_add_(p, g, alpha=tiny),
        lambda: torch._foreach_lerp_(m, g, 0.1),
        lambda: torch._foreach_addcmul_(v, g, g, 0.001),
        lambda: torch._foreach_sqrt(v),
        lambda: torch._foreach_div_(v, 1.5),
        lambda: torch._foreach_add_(v, 1e-8),
        lambda: torch._foreach_addcdiv_(p, m, v, -1e-9),
        lambda: torch._foreach_norm(g),
        lambda: torch._foreach_mul_(g, one),
        lambda: torch._foreach_zero_(g),
        lambda: torch._foreach_add(p, g, alpha=tiny),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(g, torch.zeros((), device=DEVICE), one),
    ]  # fmt: skip
    norms = torch._foreach_norm(g)
    calls += [lambda: torch.stack(norms), lambda: torch._foreach_copy_(p, m), lambda: torch._foreach_add_(steps, 1.0)]
    for call in random.sample(calls, 7):
        yield {"list": which}, call


# ---------------------------------------------------------------------- indexing, sorting
def indexing() -> Case:
    t, h = draw(512, 32768), random.choice([64, 128, 256, 512, 1024, 2048, 4096])
    k = random.choice([1, 2, 4])
    if TINY:
        t, h = 32, 16
    dtype = random.choice([FP32, BF16])
    x, index = rand(t, h, dtype=dtype), torch.randint(t, (t * k,), device=DEVICE)
    values, wide = rand(t * k, h, dtype=dtype), index[:, None].expand(-1, h)
    mask, vocab = torch.rand(t, h, device=DEVICE) > 0.5, random.choice([30522, 50257, 128256])
    row_mask = torch.rand(t, device=DEVICE) > 0.5
    table = rand(100 if TINY else vocab, h, dtype=dtype)
    ids = torch.randint(len(table), (t,), device=DEVICE)
    calls: list[Call] = [
        lambda: x[index],
        lambda: x.index_select(0, index),
        lambda: torch.gather(x, 0, wide),
        lambda: x.index_add_(0, index, values),
        lambda: x.scatter_add_(0, wide, values),
        lambda: x.scatter(0, wide, values),
        lambda: x.index_put_((index,), values, accumulate=False),
        lambda: x.index_put_((index,), values, accumulate=True),
        lambda: x.index_copy_(0, index, values),
        lambda: x.masked_fill(mask, 0.0),
        lambda: x.masked_fill_(mask, 0.0),
        lambda: x.masked_fill(row_mask[:, None], 0.0),
        lambda: torch.nonzero(row_mask),
        lambda: torch.nonzero(mask),
        lambda: x[row_mask],
        lambda: torch.where(mask, x, 0.0),
        lambda: functional.embedding(ids, table),
        lambda: torch.ops.aten.embedding_dense_backward(x, ids, len(table), -1, False),
        lambda: functional.one_hot(ids % 64, 64),
        lambda: torch.tril(x),
        lambda: torch.roll(x, 1, 0),
        lambda: torch.flip(x, [0]),
        lambda: x.repeat_interleave(2, dim=0),
    ]
    for call in random.sample(calls, 8):
        yield {"rows": t * k}, call


def sorting() -> Case:
    rows, width = random.choice([(1, draw(1024, 2e6)), (draw(64, 16384), draw(8, 4096)), (draw(512, 32768), 64)])
    if rows * width > 1 << 26:
        return
    if TINY:
        rows, width = 4, 32
    x = rand(rows, width, dtype=random.choice([FP32, FP32, BF16]))
    keys = torch.randint(random.choice([8, 64, 30000]), (rows * width,), device=DEVICE)
    k = min(width, random.choice([1, 2, 4, 8, 50]))
    calls: list[Call] = [
        lambda: torch.sort(x, dim=-1),
        lambda: torch.sort(keys),
        lambda: torch.argsort(keys),
        lambda: torch.topk(x, k, dim=-1),
        lambda: torch.cumsum(x, -1),
        lambda: torch.cumsum(x, 0),
        lambda: torch.cumsum(keys, 0),
        lambda: torch.bincount(keys % 64, minlength=64),
        lambda: torch.histc(keys.float(), bins=64, min=0, max=63),
        lambda: torch.argmax(x, -1),
        lambda: torch.max(x, -1),
        lambda: torch.cumprod(x, -1),
    ]
    for call in random.sample(calls, 4):
        yield {}, call


# ---------------------------------------------------------------------- element-wise, losses
def element_wise() -> Case:
    t, h = draw(256, 32768), random.choice([256, 512, 768, 1024, 2048, 3072, 4096, 8192])
    if TINY:
        t, h = 16, 16
    dtype = random.choice([FP32, FP32, BF16])
    x, y, row = rand(t, h, dtype=dtype).requires_grad_(), rand(t, h, dtype=dtype), rand(h, dtype=dtype)
    half, other, plain = rand(t, h, dtype=BF16), y.clone(), x.detach()
    tanh = functional.gelu(x, approximate="tanh")
    calls: list[Call] = [
        lambda: functional.gelu(plain), lambda: functional.gelu(plain, approximate="tanh"),
        lambda: functional.silu(plain), lambda: functional.relu(plain), lambda: torch.tanh(plain),
        backward_of(functional.gelu(x), x, grad=y), backward_of(tanh, x, grad=y),
        backward_of(functional.silu(x), x, grad=y), backward_of(functional.relu(x), x, grad=y),
        lambda: torch.native_dropout(plain, 0.1, True), lambda: torch.ops.aten.native_dropout_backward(y, y > 0, 1.1),
        lambda: plain * y, lambda: plain + y, lambda: plain * row, lambda: plain * 0.5, lambda: other.add_(y),
        lambda: plain.float() if dtype != FP32 else plain.to(BF16), lambda: half.float(), lambda: half * plain,
        lambda: torch.sum(plain, 0), lambda: torch.sum(plain, -1), lambda: torch.mean(plain, -1, keepdim=True),
        lambda: torch.sum(plain), lambda: torch.var_mean(plain, dim=-1), lambda: torch.addcmul(plain, y, y),
        lambda: torch.rand_like(plain), lambda: torch.randn_like(plain), lambda: plain.pow(2), lambda: torch.exp(plain),
        lambda: torch.clamp(plain, -1, 1), lambda: torch.isnan(plain).any(), lambda: plain.t().contiguous(),
        lambda: torch.cat([plain, y], -1), lambda: torch.cat([plain, y], 0), lambda: torch.chunk(plain, 2, -1)[0] * 2,
        lambda: functional.leaky_relu(plain), lambda: functional.softplus(plain), lambda: torch.sin(plain),
        lambda: torch.lerp(plain, y, 0.1), lambda: torch.div(plain, 3.0), lambda: plain.clone(),
    ]  # fmt: skip
    for call in random.sample(calls, 9):
        yield {}, call


def casts() -> Case:
    """Autocast converts every weight once a step."""
    h = random.choice([384, 512, 768, 1024, 1280, 1600, 2048, 4096])
    shape = random.choice([(h, h), (4 * h, h), (h,), (50257, h), (64, h, 3, 3) if h <= 1024 else (h, 3 * h)])
    if TINY:
        shape = (8, 8)
    half = random.choice([BF16, FP16])
    w, g = rand(*shape, dtype=FP32), rand(*shape, dtype=half)
    yield {}, lambda: w.to(half)
    yield {}, lambda: g.to(FP32)
    if len(shape) == 4:
        last = w.to(memory_format=torch.channels_last)
        yield {}, lambda: last.to(half)
        yield {}, lambda: w.contiguous(memory_format=torch.channels_last)


def scores() -> Case:
    """Attention that is not fused."""
    b, a, s = random.choice([1, 2, 4, 8, 16]), random.choice([8, 12, 16, 32]), draw(64, 2048, 64)
    if TINY:
        s = 16
    if b * a * s * s > 1 << 28:
        return
    dtype = random.choice([FP32, BF16, FP16])
    x = rand(b, a, s, s, dtype=dtype).requires_grad_()
    mask, alibi = rand(b, 1, s, s, dtype=dtype), rand(a, 1, s, dtype=dtype)
    hidden, plain = torch.rand(b, 1, s, s, device=DEVICE) > 0.5, x.detach()
    soft = torch.softmax(x, -1)
    calls: list[Call] = [
        lambda: plain + mask, lambda: plain + alibi, lambda: plain.masked_fill(hidden, -1e4), lambda: plain / 8.0,
        lambda: plain.masked_fill_(hidden, -1e4), lambda: torch.softmax(plain, -1),
        backward_of(soft, x), lambda: torch.softmax(plain, -1, dtype=FP32),
        lambda: torch.native_dropout(plain, 0.1, True), lambda: plain.to(FP32 if dtype != FP32 else BF16),
        lambda: torch.where(hidden, plain, torch.full((), -1e4, device=DEVICE, dtype=dtype)),
    ]  # fmt: skip
    for call in random.sample(calls, 6):
        yield {}, call


def loss() -> Case:
    vocab = random.choice([10, 1000, 8192, 30522, 32000, 50257, 50304, 51865, 128256, 151936])
    n = draw(64, 16384)
    if TINY:
        n, vocab = 8, 100
    if n * vocab > 1 << 30:
        return
    logits = rand(n, vocab, dtype=random.choice([FP32, FP32, BF16])).requires_grad_()
    target = torch.randint(vocab, (n,), device=DEVICE)
    logp = torch.log_softmax(logits, -1)
    plain = logp.detach().requires_grad_()
    yield {}, lambda: torch.log_softmax(logits.detach(), -1)
    yield {}, backward_of(logp, logits)
    yield {}, lambda: functional.nll_loss(plain.detach(), target)
    yield {}, backward_of(functional.nll_loss(plain, target), plain)


# ---------------------------------------------------------------------- matmuls
def operand(rows: int, columns: int, is_transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    return rand(columns, rows, dtype=dtype).t() if is_transposed else rand(rows, columns, dtype=dtype)


def matmul() -> Case:
    odd = random.random() < 0.15
    m, n, k = (draw(64, 16384, random.choice([8, 64, 128])) for _ in range(3))
    if odd:
        n = random.choice([10, 1000, 2, 30522, 50257, 51865, 250, 1001])
    if TINY:
        m, n, k = 16, 8, 8
    kind = random.choice(["fp32", "fp32", "tf32", "tf32", "fp16", "bf16"])
    if m * n * k > (1 << 36 if kind == "fp32" else 1 << 38):
        return
    dtype = {"bf16": BF16, "fp16": FP16}.get(kind, FP32)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    at, bt = random.choice([(False, True), (False, False), (True, False)])
    a, b = operand(m, k, at, dtype), operand(k, n, bt, dtype)
    bias = rand(n, dtype=dtype)
    if random.random() < 0.3 and not at:
        yield {"tf32": kind == "tf32"}, lambda: torch.addmm(bias, a, b)
    else:
        yield {"tf32": kind == "tf32"}, lambda: torch.mm(a, b)


def batched() -> Case:
    count, s, d = draw(8, 512), draw(16, 2048, 16), random.choice([32, 64, 80, 96, 128])
    if TINY:
        count, s, d = 2, 16, 8
    if count * s * s > 1 << 28:
        return
    kind = random.choice(["fp32", "fp32", "tf32", "fp16", "bf16"])
    dtype = {"bf16": BF16, "fp16": FP16}.get(kind, FP32)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    note = {"tf32": kind == "tf32"}
    q, p = rand(count, s, d, dtype=dtype), rand(count, s, s, dtype=dtype)
    yield note, lambda: torch.bmm(q, q.transpose(1, 2))
    yield note, lambda: torch.bmm(p, q)
    yield note, lambda: torch.bmm(p.transpose(1, 2), q)
    yield note, lambda: torch.baddbmm(p, q, q.transpose(1, 2), beta=1.0, alpha=0.1)


def attention() -> Case:
    b, a = random.choice([1, 2, 4, 8, 16, 32]), random.choice([6, 8, 12, 16, 20, 32])
    d, s = random.choice([32, 64, 64, 64, 80, 96, 128, 128, 192, 256]), draw(50, 4096, random.choice([1, 16, 64]))
    cross = random.random() < 0.3
    long = draw(16, 4096, 16) if cross else s
    if TINY:
        s, long, d = 16, 32 if cross else 16, 8
    if b * a * s * long > 1 << 31:
        return
    dtype = random.choice([BF16, BF16, FP16, FP32])
    causal = not cross and random.random() < 0.35
    masked = not causal and random.random() < 0.45
    dropout = 0.1 if random.random() < 0.25 else 0.0
    q = rand(b, s, a, d, dtype=dtype).transpose(1, 2).requires_grad_()
    k, v = (rand(b, long, a, d, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(2))
    torch.backends.cuda.matmul.allow_tf32 = False
    mask = None
    if masked:
        mask = torch.zeros(random.choice([1, b]), 1, s, long, device=DEVICE, dtype=random.choice([dtype, torch.bool]))
        mask = ~mask if mask.dtype == torch.bool else mask
    note = {"causal": causal, "masked": masked, "dropout": dropout, "q": text_of(q), "k": text_of(k),
            "mask": None if mask is None else text_of(mask)}  # fmt: skip

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)

    yield note | {"pass": "forward"}, forward
    yield note | {"pass": "backward"}, backward_of(forward(), q, k, v)


# ---------------------------------------------------------------------- host and device
def transfer() -> Case:
    size = draw(1e3, 1e5 if TINY else 2e8, 1024)
    on_gpu = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = pageable if TINY else torch.empty(size, dtype=torch.uint8, pin_memory=True)
    yield {"copy": "host to device", "pinned": False}, lambda: on_gpu.copy_(pageable)
    yield {"copy": "host to device", "pinned": True}, lambda: on_gpu.copy_(pinned, non_blocking=True)
    yield {"copy": "device to host", "pinned": False}, lambda: pageable.copy_(on_gpu)
    yield {"copy": "device to host", "pinned": True}, lambda: pinned.copy_(on_gpu, non_blocking=True)


FAMILIES: dict[str, tuple[Callable[[], Case], float]] = {  # shares of the time; what one leaves, the next may use
    "batch_norm": (batch_norm, 14), "group_norm": (group_norm, 5),
    "pooling": (pooling, 9), "normalisation": (normalisation, 9), "optimizer": (optimizer, 26),
    "indexing": (indexing, 12), "sorting": (sorting, 7), "element_wise": (element_wise, 10), "casts": (casts, 3),
    "transfer": (transfer, 5),
    "scores": (scores, 7), "loss": (loss, 6), "matmul": (matmul, 18), "batched": (batched, 10),
    "attention": (attention, 24), "convolution": (convolution, 95),
}  # fmt: skip
MOST_ROWS = {"convolution": 20000}  # 700 for others


def sample(family: str, case: Callable[[], Case], until: float, empty: float, file: Any) -> tuple[int, int]:
    """Cases of one family until its time is over; a case that fails is left."""
    done = failed = 0
    most = 30 if TINY else MOST_ROWS.get(family, 700)
    while time.monotonic() < until and done < most:
        try:
            for note, call in case():
                ops = recorded(call)
                us = timed(call) - empty
                file.write(json.dumps({"family": family, **note, "ops": ops, "us": round(us, 3)}) + "\n")
                done += 1
                if time.monotonic() > until:
                    break
        except Exception as error:
            failed += 1
            if failed < 4:
                print(f"  {family}: {type(error).__name__} {str(error)[:200]}", flush=True)
    file.flush()
    return done, failed


def main(output: str, seconds: str, seed: str = "0", *only: str) -> None:
    random.seed(int(seed))
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = False, True
    began = time.monotonic()
    heat = rand(512, 512)
    while not TINY and time.monotonic() < began + 1.0:  # an idle GPU clocks down
        heat = torch.mm(heat, heat).clamp_(-1, 1)
    empty = timed(lambda: None)
    about = {"torch": torch.__version__, "cuda": torch.version.cuda, "seed": int(seed), "empty_us": empty}
    if not TINY:
        about |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    families = {name: family for name, family in FAMILIES.items() if not only or name in only}
    total, passed = sum(weight for _, weight in families.values()), 0.0
    with open(output, "w") as file:
        file.write(json.dumps({"about": about}) + "\n")
        for family, (case, weight) in families.items():
            passed += weight
            start, until = time.monotonic(), began + float(seconds) * passed / total
            done, failed = sample(family, case, until, empty, file)
            print(f"{family}: {done} rows, {failed} failed, {time.monotonic() - start:.1f} s", flush=True)
            if not TINY:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
