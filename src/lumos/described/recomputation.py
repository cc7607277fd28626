"""Recomputation: what a layer runs again before its backward pass, and what it need not keep because of that.

Parts of a layer, as Megatron names them (megatron/core/transformer/transformer_config.py, `recompute_modules`):

| part | run again | not kept |
|---|---|---|
| core_attn | attention between its projections | scores or log-sum-exp; the output stays, as input of the next matmul |
| layernorm | both norms | their outputs |
| mlp | the dense MLP with its collectives | the inside of the MLP; its input stays |
| moe | router, exchanges, experts, shared experts | all of that; the input stays |
| moe_act | the activation of the experts | its output |
| shared_experts | the shared experts | their inside |
| mla_up_proj | up-projections and rotary positions of latent attention | query, key and value |

"operators" is the policy of torchtitan's selective mode (torchtitan/distributed/activation_checkpoint.py): it keeps the
results of attention, of every second matmul (the first, the third, …), of reduce-scatter and of all-to-all, and runs
the rest again. Known error: none of these was measured; the blocks are those of the forward pass, which were.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos.described import primitives as ops
from lumos.described.attention import core, latent_head_bytes, up_projections
from lumos.described.experts import expert_width, experts_activation, moe_inside, routed_copies, shared
from lumos.described.mlp import activation_bytes, activation_input_bytes, mlp_inside
from lumos.dtypes import BYTES
from lumos.program.layout import RankLayout
from lumos.program.op import Op, Ops, part_of, saved_bytes
from lumos.program.operators import Collective

_KEPT_COLLECTIVES = ("reduce_scatter", "all_to_all")
_NOT_READ_AGAIN = ("q", "qkv", "out", "down")  # results of matmuls that no backward formula reads as they are


class Again(NamedTuple):
    """What is run again, and the bytes that are not kept of attention and of the other half of the layer."""

    block: Ops
    attention: float = 0.0
    rest: float = 0.0
    checkpoints: int = 1  # parts that are run again, each with its bookkeeping

    def __add__(self, other: Again) -> Again:  # type: ignore[override]
        return Again(
            self.block + other.block,
            self.attention + other.attention,
            self.rest + other.rest,
            self.checkpoints + other.checkpoints,
        )


def recomputed_parts(s: RankLayout, sparse: bool) -> Again:
    """The parts that selective recomputation names, together; those that the layer does not have cost nothing."""
    named = s.train.modules
    total = Again([], checkpoints=0)
    for name in dict.fromkeys(named):
        if name in ("moe_act", "shared_experts") and "moe" in named:
            continue  # inside of what is run again as a whole
        total += _part(s, name, sparse)
    return total


def _part(s: RankLayout, name: str, sparse: bool) -> Again:
    nothing = Again([], checkpoints=0)
    if name == "core_attn":
        return Again(core(s), attention=saved_bytes(core(s)))
    if name == "layernorm":
        each = max(saved_bytes(ops.norm(s)) - s.residual_bytes, 0.0)
        second = sparse or not s.shares_norm
        return Again(ops.norm(s) * (1 + second), each, each * second, 1 + second)
    if name == "mla_up_proj":
        return Again(up_projections(s), attention=latent_head_bytes(s)) if s.model.latent else nothing
    if name == "mlp":
        return nothing if sparse else Again(mlp_inside(s), rest=saved_bytes(mlp_inside(s)))
    if not sparse:
        return nothing
    if name == "moe":
        return Again(moe_inside(s), rest=saved_bytes(moe_inside(s)))
    if name == "shared_experts":
        return Again(shared(s), rest=saved_bytes(shared(s))) if s.model.shared_experts else nothing
    made_anew = max(activation_bytes(s) - activation_input_bytes(s), 0.0)
    return Again(experts_activation(s), rest=made_anew * routed_copies(s) * expert_width(s))


class ByOperator(NamedTuple):
    """What torchtitan's policy runs again, the bytes of the results that it keeps, and of those read as they are."""

    block: Ops
    kept: float
    read_again: float


def by_operator(s: RankLayout, forward: Ops) -> ByOperator:
    """A forward pass without the operators whose results are kept."""
    again, kept, read, matmuls = list[bool](), 0.0, 0.0, 0
    for op in forward:
        size = _result_bytes(s, op)
        matmuls += op.kind == "gemm_tn"
        again.append(not size or (op.kind == "gemm_tn" and matmuls % 2 == 0))
        if not again[-1]:
            kept += size
            read += size if op.name not in _NOT_READ_AGAIN and not isinstance(op.work, Collective) else 0.0
    return ByOperator(part_of(forward, again), kept, read)


def _result_bytes(s: RankLayout, op: Op) -> float:
    """Of an operator or collective whose result torchtitan may keep; 0 for all others."""
    if isinstance(op.work, Collective):
        share = op.work.group.size if op.work.kind == "reduce_scatter" else 1
        return op.work.bytes / share if op.work.kind in _KEPT_COLLECTIVES else 0.0
    if op.work is None:
        return 0.0
    if op.work.kind == "gemm_tn":
        return float(op.work.shape[0] * op.work.shape[1] * s.element)
    if op.work.kind == "sdpa_fwd":
        batch, heads, _, size = op.work.shape
        return batch * heads * s.seq * size * BYTES[op.work.dtype] + op.saves
    return 0.0
