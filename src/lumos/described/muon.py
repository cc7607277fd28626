"""Muon: which matrices it orthogonalises, and the matmuls of that (Jordan et al. 2024).

Matrices inside the layers have one moment, which five Newton-Schulz iterations in bf16 make orthogonal: with X of
m × n, m ≤ n, each iteration is X Xᵀ, its square and a product with X. Everything else, the embedding and the output
above all, is updated by Adam. Tensor-parallel ranks orthogonalise their own blocks (Megatron's default). Ranks that
divide the state share the matrices out among themselves, whole ones (Megatron's dist_muon); where gradients are divided
too, each matrix is gathered for its owner in 16 bits, and handed out again.

Known error: single matrices of 4096 and more on one H200 within 4 % (calibration/offload_h200.json); smaller ones are
bound by the host. A step with Muon was not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos.described import primitives as ops
from lumos.program.layout import RankLayout
from lumos.program.op import Op, Ops
from lumos.program.operators import Operator

ITERATIONS = 5
_LAUNCHES = 6 * ITERATIONS + 8  # of one matrix: three matmuls and as many element-wise kernels, cast, norm, update
# Bytes for one element: the cast to 16 bits, its norm and its scaling; in every iteration, two products added up.
_CAST_BYTES, _ITERATION_BYTES = 12.0, 6.0


class Matrices(NamedTuple):
    """Equal matrices on one rank."""

    rows: int
    columns: int
    number: float

    @property
    def elements(self) -> float:
        return self.rows * self.columns * self.number


def layer_matrices(s: RankLayout, sparse: bool) -> list[Matrices]:
    """Of one layer, without its routed experts."""
    m, hidden = s.model, s.model.hidden
    if m.latent:
        query, value = s.heads * m.head_dim, s.heads * (m.qk_nope_head_dim + m.v_head_dim)
        low = [(m.q_lora_rank, hidden), (query, m.q_lora_rank)] if m.q_lora_rank else [(query, hidden)]
        shapes = [*low, (m.kv_lora_rank + m.qk_rope_head_dim, hidden), (value, m.kv_lora_rank)]
        shapes.append((hidden, s.heads * m.v_head_dim))
    else:
        query, key = s.heads * m.head_dim, s.kv_heads * m.head_dim
        shapes = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    width = (m.shared_experts * m.expert_ffn if sparse else m.ffn) // s.parallel.tp
    if width:
        shapes += [(width, hidden)] * s.inward + [(hidden, width)]
    if sparse:
        shapes.append((m.experts, hidden))
    return [Matrices(rows, columns, 1.0) for rows, columns in shapes]


def expert_matrices(s: RankLayout) -> list[Matrices]:
    """The routed experts of one layer."""
    width, experts = max(1, s.model.expert_ffn // s.expert_tp), s.model.experts / s.parallel.ep
    return [Matrices(width, s.model.hidden, s.inward * experts), Matrices(s.model.hidden, width, experts)]


def orthogonalised(s: RankLayout, matrices: list[Matrices]) -> Ops:
    """Newton-Schulz of all these matrices; equal ones are priced as one tall matmul, and launched one by one."""
    block: Ops = []
    for rows, columns, number in matrices:
        small, large = sorted((rows, columns))
        launches = max(1, round(_LAUNCHES * number / (3 * ITERATIONS)))
        for m, n, k in ((small, small, large), (small, small, small), (small, large, small)):
            tall = Operator("gemm_tn", (max(1, round(m * number)), n, k), "fp32" if s.element == 4 else "bf16")
            block += [Op("newton-schulz", work=tall, launches=launches)] * ITERATIONS
    elements = sum(matrix.elements for matrix in matrices)
    moved = round(elements * (_CAST_BYTES + ITERATIONS * _ITERATION_BYTES))
    return [*block, ops.op(s, "stream", moved, name="newton-schulz")] if block else []
