"""What is run for each operator: a function that, given a row, prepares its tensors and returns the call to time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Row = dict[str, Any]
Call = Callable[[], object]

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip


def prepare(row: Row, device: str) -> Call:
    """The call to time for `row`; its tensors hold random numbers, because power, and so speed, depends on them."""
    torch.backends.cuda.matmul.allow_tf32 = row["dtype"] == "tf32"
    return OPERATORS[row["op"]](row, _Tensors(DTYPES[row["dtype"]], device))


class _Tensors:
    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device

    def random(self, *shape: int, grad: bool = False) -> Tensor:
        wide = torch.bfloat16 if self.dtype == torch.float8_e4m3fn else self.dtype
        return torch.randn(*shape, device=self.device, dtype=wide).to(self.dtype).requires_grad_(grad)

    def indices(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self.device)


def _gemm(row: Row, make: _Tensors) -> Call:
    m, n, k = row["m"], row["n"], row["k"]
    if row["dtype"] == "fp8":
        one = torch.ones((), device=make.device)
        a, b = make.random(m, k), make.random(n, k).t()
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if row["layout"] == "TN":
        a, b = make.random(m, k), make.random(n, k).t()
    elif row["layout"] == "NN":
        a, b = make.random(m, k), make.random(k, n)
    else:
        a, b = make.random(k, m).t(), make.random(k, n)
    return lambda: torch.mm(a, b)


def _bmm(row: Row, make: _Tensors) -> Call:
    heads, s, d = row["b"] * row["h"], row["s"], row["d"]
    q, k = make.random(heads, s, d), make.random(heads, s, d).transpose(1, 2)
    return lambda: torch.bmm(q, k)


def _grouped_gemm(row: Row, make: _Tensors) -> Call:
    experts, t, n, k = row["e"], row["t"], row["n"], row["k"]
    x, w = make.random(t, k), make.random(experts, n, k).transpose(1, 2)
    ends = (torch.arange(1, experts + 1, device=make.device) * t // experts).to(torch.int32)
    return lambda: torch._grouped_mm(x, w, offs=ends)


def _permute(row: Row, make: _Tensors) -> Call:
    x, order = make.random(row["t"], row["h"]), torch.randperm(row["t"], device=make.device)
    return lambda: x.index_select(0, order)


def _attention(row: Row, make: _Tensors, grad: bool) -> tuple[list[Tensor], Tensor]:
    q, k, v = (make.random(row["b"], row["h"], row["s"], row["d"], grad=grad) for _ in range(3))
    return [q, k, v], functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _sdpa_fwd(row: Row, make: _Tensors) -> Call:
    (q, k, v), _ = _attention(row, make, grad=False)
    return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _sdpa_bwd(row: Row, make: _Tensors) -> Call:
    inputs, out = _attention(row, make, grad=True)
    return _gradient(out, inputs)


def _gradient(out: Tensor, inputs: list[Tensor]) -> Call:
    upstream = torch.randn_like(out) if out.dim() else torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True)


def _softmax(row: Row, make: _Tensors, grad: bool) -> Tensor:
    return make.random(row["b"], row["h"], row["s"], row["s"], grad=grad)


def _softmax_fwd(row: Row, make: _Tensors) -> Call:
    x = _softmax(row, make, grad=False)
    return lambda: torch.softmax(x, -1)


def _softmax_bwd(row: Row, make: _Tensors) -> Call:
    x = _softmax(row, make, grad=True)
    return _gradient(torch.softmax(x, -1), [x])


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS normalisation as models without fused kernels write it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as models without fused kernels write them."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def _rotary(row: Row, make: _Tensors, grad: bool) -> tuple[Tensor, Call]:
    b, h, s, d = (row[key] for key in "bhsd")
    x = make.random(b, s, h, d, grad=grad)
    cos, sin = make.random(s, d), make.random(s, d)
    return x, lambda: rotate(x.transpose(1, 2), cos, sin)


def _rotary_fwd(row: Row, make: _Tensors) -> Call:
    return _rotary(row, make, grad=False)[1]


def _rotary_bwd(row: Row, make: _Tensors) -> Call:
    x, call = _rotary(row, make, grad=True)
    out = call()
    assert isinstance(out, Tensor)
    return _gradient(out, [x])


def _on_plane(forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Row, _Tensors], Call]:
    """An operator on a (tokens, width) tensor, with a weight and a bias of that width at hand."""

    def build(row: Row, make: _Tensors) -> Call:
        x, w, b = make.random(row["t"], row["h"]), make.random(row["h"]), make.random(row["h"])
        return lambda: forward(x, w, b)

    return build


def _backward(forward: Callable[[Tensor, Tensor, Tensor], Tensor], weights: int) -> Callable[[Row, _Tensors], Call]:
    def build(row: Row, make: _Tensors) -> Call:
        x = make.random(row["t"], row["h"], grad=True)
        w, b = make.random(row["h"], grad=True), make.random(row["h"], grad=True)
        return _gradient(forward(x, w, b), [x, w, b][: 1 + weights])

    return build


def _pair(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Row, _Tensors], Call]:
    def build(row: Row, make: _Tensors) -> Call:
        x, y = make.random(row["t"], row["h"]), make.random(row["t"], row["h"])
        return lambda: combine(x, y)

    return build


def _cross_entropy(row: Row, make: _Tensors) -> Call:
    logits, labels = make.random(row["t"], row["v"]), make.indices(row["v"], row["t"])
    return lambda: functional.cross_entropy(logits, labels)


def _cross_entropy_bwd(row: Row, make: _Tensors) -> Call:
    logits, labels = make.random(row["t"], row["v"], grad=True), make.indices(row["v"], row["t"])
    return _gradient(functional.cross_entropy(logits, labels), [logits])


def _embedding(row: Row, make: _Tensors) -> Call:
    table, tokens = make.random(row["v"], row["h"]), make.indices(row["v"], row["t"])
    return lambda: functional.embedding(tokens, table)


def _embedding_bwd(row: Row, make: _Tensors) -> Call:
    table, tokens = make.random(row["v"], row["h"], grad=True), make.indices(row["v"], row["t"])
    return _gradient(functional.embedding(tokens, table), [table])


def _adamw_fused(row: Row, make: _Tensors) -> Call:
    weight = make.random(row["n"], grad=True)
    weight.grad = make.random(row["n"])
    step: Call = torch.optim.AdamW([weight], lr=1e-4, fused=True).step
    return step


def _rms(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), w)


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), w, b)


def _eager(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
    return eager_norm(x, w)


def _gelu(x: Tensor, _w: Tensor, _b: Tensor) -> Tensor:
    return functional.gelu(x)


def _silu(x: Tensor, _w: Tensor, _b: Tensor) -> Tensor:
    return functional.silu(x)


OPERATORS: dict[str, Callable[[Row, _Tensors], Call]] = {
    "gemm": _gemm, "bmm": _bmm, "grouped_gemm": _grouped_gemm, "permute": _permute, "sdpa_fwd": _sdpa_fwd,
    "sdpa_bwd": _sdpa_bwd, "softmax_fwd": _softmax_fwd, "softmax_bwd": _softmax_bwd, "rotary_fwd": _rotary_fwd,
    "rotary_bwd": _rotary_bwd, "cross_entropy": _cross_entropy, "cross_entropy_bwd": _cross_entropy_bwd,
    "embedding": _embedding, "embedding_bwd": _embedding_bwd, "adamw_fused": _adamw_fused,
    "rms_norm": _on_plane(_rms), "layer_norm": _on_plane(_layer), "gelu": _on_plane(_gelu), "silu": _on_plane(_silu),
    "norm_eager_fwd": _on_plane(_eager), "cast_f32": _on_plane(lambda x, _w, _b: x.float()),
    "copy": _on_plane(lambda x, _w, _b: x.clone()), "mul": _pair(torch.mul), "add": _pair(torch.add),
    "rms_norm_bwd": _backward(_rms, 1), "layer_norm_bwd": _backward(_layer, 2), "gelu_bwd": _backward(_gelu, 0),
    "silu_bwd": _backward(_silu, 0), "norm_eager_bwd": _backward(_eager, 1),
}  # fmt: skip
