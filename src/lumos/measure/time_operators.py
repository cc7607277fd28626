"""How long operators take on this machine's GPU, or on its CPU.

Every cost of a GPU follows this convention: the second-level cache is flushed before each repetition, and the median of
the repetitions counts. A short sleep on the GPU before the call lets the host run ahead, so that the kernels are timed
and not their launch. Only the optimizer is timed with its launches, because it always runs with them.

A CPU is timed as its steps run: with warm caches, which hold most of the tensors of models that are trained there, and
with all that a call costs. The fastest repetition counts, because other programs only ever add to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lumos.dtypes import MEASURED, TORCH_NAMES
from lumos.measure.machine import about_machine

Row = dict[str, Any]
Call = Callable[[], Any]

DTYPES = {name: getattr(torch, TORCH_NAMES[name]) for name in MEASURED}
_FLUSH_BYTES = 256 << 20  # several times the second-level cache of any GPU
_LEAD_CYCLES = 400_000  # about 0.2 ms
_LONG_LEAD_CYCLES = 2_400_000  # the host takes about a millisecond to issue a backward pass of many operators
_TARGET_S = 0.012  # spent on the repetitions of one row
_OVERHEAD_S = 1.2e-4  # of one repetition
_FEWEST, _FEWEST_ON_CPU, _MOST = 5, 3, 20
_NO_LEAD = frozenset(
    {"adamw_fused", "gemm", "bmm", "mul", "add", "gelu", "silu", "copy", "cast_f32", "rms_norm", "layer_norm"}
)
_OUT_OF_MEMORY = "out of memory"


class Stopwatch:
    """Times operators on one device; holds the buffer that flushes its cache."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.about = about_machine(device)
        self._flush = torch.empty(_FLUSH_BYTES // 4 if device == "cuda" else 0, dtype=torch.int32, device=device)

    def measured(self, row: Row) -> Row:
        """{"us": …}, or {"error": …}: an operator that this device or torch lacks must not end the run."""
        answer = self._try(row)
        if answer.get("error") == _OUT_OF_MEMORY and self.device == "cuda":
            torch.cuda.empty_cache()  # memory that earlier rows left fragmented
            answer = self._try(row)
        return answer

    def is_alive(self) -> bool:
        """Whether the GPU still accepts work."""
        try:
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _try(self, row: Row) -> Row:
        try:
            return {"us": round(self.microseconds(row), 3)}
        except (RuntimeError, AttributeError, ValueError, NotImplementedError) as problem:
            return {"error": error_of(problem)}

    def microseconds(self, row: Row) -> float:
        """The time of the operator that `row` describes: the median on a GPU, the least on a CPU."""
        call = prepare(row, self.device)
        if self.device == "cpu":
            return min(_cpu_times(call))
        long = row["op"].endswith("_bwd") or "eager" in row["op"]
        lead = 0 if row["op"] in _NO_LEAD else _LONG_LEAD_CYCLES if long else _LEAD_CYCLES
        call()
        first = self._repeat(call, 2, lead)
        count = round(_TARGET_S / (min(first) / 1e6 + _OVERHEAD_S))
        return median(self._repeat(call, max(_FEWEST, min(_MOST, count)), lead))

    def _repeat(self, call: Call, count: int, lead: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            self._flush.zero_()
            if lead:
                torch.cuda._sleep(lead)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]


def _cpu_times(call: Call) -> list[float]:
    """Microseconds of repetitions: many of what is short."""
    call()
    clock = cpu_clock()
    found: list[float] = []
    begin = last = clock()
    while len(found) < _FEWEST_ON_CPU or (last - begin < _TARGET_S and len(found) < _MOST):
        call()
        now = clock()
        found.append((now - last) * 1e6)
        last = now
    return found


def cpu_clock() -> Callable[[], float]:
    """A clock in seconds: what one thread computes is timed without the programs that it shares its core with.

    Several threads wait for each other, so the wall clock counts for them: they need idle cores.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def error_of(problem: BaseException) -> str:
    """Why something could not be measured, in a few words."""
    if isinstance(problem, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(problem):
        return _OUT_OF_MEMORY
    return (str(problem).splitlines() or [type(problem).__name__])[0][:120]


def prepare(row: Row, device: str) -> Call:
    """The call to time for a row; its tensors hold random numbers, because power, and so speed, depends on them.

    `NAME` and `NAME_fwd` run the function under NAME in OPERATORS, `NAME_bwd` its gradients.
    """
    torch.backends.cuda.matmul.allow_tf32 = row["dtype"] == "tf32"
    backward = row["op"].endswith("_bwd")
    make = _Tensors(DTYPES[row["dtype"]], device, backward)
    call = OPERATORS[row["op"].removesuffix("_bwd").removesuffix("_fwd")](row, make)
    if not backward:
        return call
    out = call()
    upstream = torch.randn_like(out) if out.dim() else torch.ones_like(out)
    return lambda: torch.autograd.grad(out, make.variables, upstream, retain_graph=True)


class _Tensors:
    """Makes the tensors of a call."""

    def __init__(self, dtype: torch.dtype, device: str, backward: bool) -> None:
        self.dtype, self.device, self.backward = dtype, device, backward
        self.variables: list[Tensor] = []  # whose gradients a backward pass computes

    def random(self, *shape: int) -> Tensor:
        wide = torch.bfloat16 if self.dtype == torch.float8_e4m3fn else self.dtype
        return torch.randn(*shape, device=self.device, dtype=wide).to(self.dtype)

    def variable(self, *shape: int) -> Tensor:
        self.variables.append(self.random(*shape).requires_grad_(self.backward))
        return self.variables[-1]

    def indices(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self.device)


Build = Callable[[Row, _Tensors], Call]


def _applied(function: Callable[..., Tensor], *shapes: str) -> Build:
    """A function of tensors whose sizes are the row's: "th" is tokens × width."""

    def build(row: Row, make: _Tensors) -> Call:
        tensors = [make.variable(*(row[size] for size in shape)) for shape in shapes]
        return lambda: function(*tensors)

    return build


def _gemm(row: Row, make: _Tensors) -> Call:
    m, n, k = row["m"], row["n"], row["k"]
    layout = "TN" if row["dtype"] == "fp8" else row["layout"]
    a = make.random(k, m).t() if layout == "NT" else make.random(m, k)
    b = make.random(n, k).t() if layout == "TN" else make.random(k, n)
    if row["dtype"] == "fp8":
        one = torch.ones((), device=make.device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(a, b)


def _bmm(row: Row, make: _Tensors) -> Call:
    heads, s, d = row["b"] * row["h"], row["s"], row["d"]
    q, k = make.random(heads, s, d), make.random(heads, s, d).transpose(1, 2)
    return lambda: torch.bmm(q, k)


def _grouped_gemm(row: Row, make: _Tensors) -> Call:
    experts, t, n, k = row["e"], row["t"], row["n"], row["k"]
    x, w = make.random(t, k), make.random(experts, n, k).transpose(1, 2)
    offsets = (torch.arange(1, experts + 1, device=make.device) * t // experts).to(torch.int32)
    return lambda: torch._grouped_mm(x, w, offs=offsets)


def _permute(row: Row, make: _Tensors) -> Call:
    x, order = make.random(row["t"], row["h"]), torch.randperm(row["t"], device=make.device)
    return lambda: x.index_select(0, order)


def _rotary(row: Row, make: _Tensors) -> Call:
    """Rotary embeddings as models without fused kernels write them."""
    b, h, s, d = (row[key] for key in "bhsd")
    x, cos, sin = make.variable(b, s, h, d), make.random(s, d), make.random(s, d)

    def rotate() -> Tensor:
        turned = x.transpose(1, 2)
        half = torch.cat((-turned[..., d // 2 :], turned[..., : d // 2]), dim=-1)
        return turned * cos + half * sin

    return rotate


def _cross_entropy(row: Row, make: _Tensors) -> Call:
    logits, labels = make.variable(row["t"], row["v"]), make.indices(row["v"], row["t"])
    return lambda: functional.cross_entropy(logits, labels)


def _embedding(row: Row, make: _Tensors) -> Call:
    table, tokens = make.variable(row["v"], row["h"]), make.indices(row["v"], row["t"])
    return lambda: functional.embedding(tokens, table)


def _adamw_fused(row: Row, make: _Tensors) -> Call:
    weight = make.random(row["n"]).requires_grad_()
    weight.grad = make.random(row["n"])
    step: Call = torch.optim.AdamW([weight], lr=1e-4, fused=True).step
    return step


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS normalisation as models without fused kernels write it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


OPERATORS: dict[str, Build] = {
    "gemm": _gemm, "bmm": _bmm, "grouped_gemm": _grouped_gemm, "permute": _permute, "rotary": _rotary,
    "cross_entropy": _cross_entropy, "embedding": _embedding, "adamw_fused": _adamw_fused,
    "sdpa": _applied(_attention, "bhsd", "bhsd", "bhsd"),
    "softmax": _applied(lambda x: torch.softmax(x, -1), "bhss"),
    "rms_norm": _applied(_rms_norm, "th", "h"), "layer_norm": _applied(_layer_norm, "th", "h", "h"),
    "norm_eager": _applied(_eager_norm, "th", "h"),
    "gelu": _applied(functional.gelu, "th"), "silu": _applied(functional.silu, "th"),
    "cast_f32": _applied(Tensor.float, "th"), "copy": _applied(torch.clone, "th"),
    "mul": _applied(torch.mul, "th", "th"), "add": _applied(torch.add, "th", "th"),
}  # fmt: skip
