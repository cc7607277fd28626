"""Operators and collectives: the two units of work that have a cost.

An Operator is one thing a GPU does, with the shape that one rank sees:

| kind | shape | what it is |
|---|---|---|
| gemm_tn, gemm_nn, gemm_nt | m, n, k | (m, k) times (k, n): forward, input and weight gradient of a linear |
| linear_bwd | m, n, k | both gradients of a linear layer whose forward is gemm_tn of this shape |
| bmm | batch, m, n, k | a batched product |
| grouped_gemm | experts, t, n, k | t tokens over that many experts, each with weights of n × k |
| grouped_gemm_nn, grouped_gemm_nt | experts, t, n, k | its gradients: of the tokens, and of the weights |
| sdpa_fwd, sdpa_bwd | b, h, s, d | causal flash attention |
| softmax_fwd, softmax_bwd | b, h, s | over square causal scores |
| rotary_fwd, rotary_bwd | b, h, s, d | unfused rotary positions of one tensor |
| rms_norm, layer_norm, norm_eager_fwd, gelu, silu, mul, add, cast_f32, copy, permute and their _bwd | t, h | on t × h |
| cross_entropy, cross_entropy_bwd | t, v | over t × v logits |
| embedding, embedding_bwd | t, v, h | t rows of a v × h table |
| adamw_fused | n | the update of n parameters |
| neox_… | as above | what GPT-NeoX runs for it: several kernels, sampled as one (arXiv 2509.22832) |
| stream | bytes | any kernel that only moves data: that many bytes read and written |
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from lumos.dtypes import BYTES


class Operator(NamedTuple):
    """What is run, on which shape, in which precision."""

    kind: str
    shape: tuple[int, ...]
    dtype: str = "bf16"

    @property
    def flops(self) -> float:
        """Multiplications and additions, each counted as one."""
        return _WORK[self.kind][0](*self.shape)

    @property
    def bytes(self) -> float:
        """What must at least be read and written once."""
        return _WORK[self.kind][1](BYTES[self.dtype], *self.shape)

    @property
    def tensor_bytes(self) -> float:
        """Of a tensor that the next kernel reads: what may be found in the cache."""
        size, shape = BYTES[self.dtype], self.shape
        if self.kind == "stream":
            return shape[0] / 3
        if self.kind in ("gemm_tn", "gemm_nn", "gemm_nt", "linear_bwd"):
            m, n, k = shape
            return size * max(m * n, m * k)
        if "softmax" in self.kind or "fillmask" in self.kind:
            return size * prod(shape) * shape[-1]
        return size * (shape[0] * shape[-1] if self.kind.startswith("embedding") else prod(shape))

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor cores do the work."""
        return self.kind in MATRIX


class Group(NamedTuple):
    """The ranks of a collective: how many, and how many of them share each link.

    `inside` of them are in one NVLink domain. Where the network between domains has several tiers (PCIe, leaf
    switches, spine), `above` has the members in one unit of each but the last, from the inside out.
    """

    size: int
    inside: int
    above: tuple[int, ...] = ()
    stride: int = 1  # from one member to the next, among the ranks of a stage

    @property
    def nodes(self) -> int:
        """NVLink domains that have members: nodes, unless NVLink joins a rack or only a part of a node."""
        return -(-self.size // self.inside)


class Collective(NamedTuple):
    """What ranks do together; `bytes` is the whole tensor: what is reduced, or what every rank has after gathering."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, p2p
    bytes: float
    group: Group


_GROUPED = frozenset({"grouped_gemm", "grouped_gemm_nn", "grouped_gemm_nt"})
MATRIX = _GROUPED | {"gemm_tn", "gemm_nn", "gemm_nt", "linear_bwd", "bmm", "bmm_bwd", "sdpa_fwd", "sdpa_bwd"}


Work = tuple[Callable[..., float], Callable[..., float]]


def _matmul(copies: float = 1.0) -> Work:
    return (
        lambda m, n, k: copies * 2.0 * m * n * k,
        lambda size, m, n, k: size * copies * (m * k + n * k + m * n),
    )


def _batched(copies: float) -> Work:
    return (
        lambda b, m, n, k: copies * 2.0 * b * m * n * k,
        lambda size, b, m, n, k: size * copies * b * (m * k + n * k + m * n),
    )


def _plane(passes: float, flops: float = 1.0) -> Work:
    """An operator that goes over a t × h tensor `passes` times, in units of the tensor's own element."""
    return lambda t, h: flops * t * h, lambda size, t, h: size * passes * t * h


def _heads(passes: float) -> Work:
    return lambda b, h, s, d: 6.0 * b * h * s * d, lambda size, b, h, s, d: size * passes * b * h * s * d


def _scores(passes: float) -> Work:
    return lambda b, h, s: 5.0 * b * h * s * s, lambda size, b, h, s: size * passes * b * h * s * s


def _optimizer(end: bool) -> Work:
    """The update of a stage of GPT-NeoX: so many layers of this width over so many ranks, and an end of the model."""

    def parameters(layers: int, width: int, ranks: int) -> float:
        return (12.0 * layers * width * width + (50304.0 * width if end else 0.0)) / ranks

    return (
        lambda layers, width, ranks: 12.0 * parameters(layers, width, ranks),
        lambda size, layers, width, ranks: 40.0 * parameters(layers, width, ranks),
    )


_WORK: dict[str, Work] = {
    "gemm_tn": _matmul(), "gemm_nn": _matmul(), "gemm_nt": _matmul(), "linear_bwd": _matmul(2.0),
    "bmm": _batched(1.0), "bmm_bwd": _batched(2.0),
    **{
        kind: (lambda e, t, n, k: 2.0 * t * n * k, lambda size, e, t, n, k: size * (t * k + t * n + e * n * k))
        for kind in _GROUPED
    },
    "sdpa_fwd": (lambda b, h, s, d: 2.0 * b * h * s * s * d, lambda size, b, h, s, d: size * 4.0 * b * h * s * d),
    "sdpa_bwd": (lambda b, h, s, d: 5.0 * b * h * s * s * d, lambda size, b, h, s, d: size * 8.0 * b * h * s * d),
    "softmax_fwd": _scores(2.0), "softmax_bwd": _scores(3.0),
    "rotary_fwd": _heads(12.0), "rotary_bwd": _heads(16.0),
    "rms_norm": _plane(2.0, 4.0), "layer_norm": _plane(2.0, 6.0), "norm_eager_fwd": _plane(20.0, 6.0),
    "rms_norm_bwd": _plane(3.0, 8.0), "layer_norm_bwd": _plane(3.0, 10.0), "norm_eager_bwd": _plane(40.0, 12.0),
    "gelu": _plane(2.0, 12.0), "silu": _plane(2.0, 5.0), "gelu_bwd": _plane(3.0, 20.0), "silu_bwd": _plane(3.0, 8.0),
    "mul": _plane(3.0), "add": _plane(3.0), "copy": _plane(2.0), "permute": _plane(2.0), "cast_f32": _plane(3.0),
    "cross_entropy": _plane(4.0, 6.0), "cross_entropy_bwd": _plane(4.0, 3.0),
    "embedding": (lambda t, v, h: 0.0, lambda size, t, v, h: size * 2.0 * t * h),
    "embedding_bwd": (lambda t, v, h: 1.0 * t * h, lambda size, t, v, h: size * (2.0 * t + v) * h),
    "adamw_fused": (lambda n: 12.0 * n, lambda size, n: size * 7.0 * n),
    "neox_softmax_fwd": _scores(6.0), "neox_softmax_bwd": _scores(9.0), "neox_fillmask_fwd": _scores(3.0),
    "neox_fillmask_bwd": _scores(4.0), "neox_rotary_fwd": _heads(24.0), "neox_rotary_bwd": _heads(32.0),
    "neox_layer_norm_fwd": _plane(4.0), "neox_layer_norm_bwd": _plane(8.0), "neox_rms_norm_fwd": _plane(20.0),
    "neox_rms_norm_bwd": _plane(40.0), "neox_add_fwd": _plane(3.0), "neox_add_bwd": _plane(3.0),
    "neox_gelu_fwd": _plane(2.0), "neox_gelu_bwd": _plane(3.0), "neox_loss_fwd": _plane(8.0),
    "neox_loss_bwd": _plane(4.0),
    "neox_embedding_fwd": (lambda t, v, h: 0.0, lambda size, t, v, h: size * 4.0 * t * h),
    "neox_embedding_bwd": (lambda t, v, h: 0.0, lambda size, t, v, h: size * (4.0 * t + v) * h),
    "neox_optimizer_first": _optimizer(True), "neox_optimizer_middle": _optimizer(False),
    "neox_optimizer_last": _optimizer(True),
    "stream": (lambda n: 0.0, lambda size, n: 1.0 * n),
}  # fmt: skip

KINDS = frozenset(_WORK)
