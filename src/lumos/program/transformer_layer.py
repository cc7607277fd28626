"""TransformerLayer: the blocks of one layer on one rank, and what stays in memory between them."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from lumos.program import primitives as ops
from lumos.program.attention import attention, attention_backward, core
from lumos.program.block import Block, saved_bytes
from lumos.program.mlp import activation_gradient_bytes, mlp, mlp_backward
from lumos.program.moe import expert_gradient_bytes, moe, moe_backward
from lumos.program.rank_layout import RankLayout


class LayerMemory(NamedTuple):
    """Bytes of one layer and one micro-batch."""

    kept: float  # between forward and backward pass
    backward: float  # alive at the worst moment of the backward pass, beyond `kept`


class TransformerLayer:
    """One layer: attention, then a dense MLP or, where `sparse`, a mixture of experts."""

    def __init__(self, layout: RankLayout, sparse: bool = False) -> None:
        self.layout, self.sparse = layout, sparse

    def forward(self) -> Block:
        s = self.layout
        more = ops.host_only(s, s.framework.layer_launches + s.gather_launches)
        return [*attention(s), *(moe(s) if self.sparse else mlp(s)), *more]

    def backward(self) -> Block:
        s = self.layout
        more = ops.host_only(s, 2 * s.framework.layer_launches + s.gather_launches)
        return [*(moe_backward(s) if self.sparse else mlp_backward(s)), *attention_backward(s), *more]

    def recomputed(self) -> Block:
        """What is run again before the backward pass, and so is not kept."""
        s, recompute = self.layout, self.layout.train.recompute
        if recompute == "none":
            return []
        again = self.forward() if recompute == "full" else core(s)
        return [*again, *ops.host_only(s, s.framework.checkpoint_launches)]

    @cached_property
    def memory(self) -> LayerMemory:
        """What the blocks keep, less what is recomputed.

        Known error on one H200, by differences over layers, batch, sequence and vocabulary: the allocator's rounding,
        0.1 to 1 % of the peak, up to 3 % of models under 1 GiB.
        """
        s = self.layout
        everything, again = saved_bytes(self.forward()), saved_bytes(self.recomputed())
        working = self._working_bytes(everything)
        if s.train.recompute != "full":
            return LayerMemory(everything - again, working)
        # A norm that keeps its input as it is keeps the input of the layer: not twice.
        shared = 0.0 if ops.norm_copies_input(s) else s.residual_bytes
        return LayerMemory(s.residual_bytes, everything + working - shared)

    def _working_bytes(self, everything: float) -> float:
        """What the backward pass adds at its worst moment."""
        s = self.layout
        inner = expert_gradient_bytes(s) if self.sparse else activation_gradient_bytes(s) * s.tokens * (
            s.model.ffn // s.parallel.tp
        )
        working = inner + s.residual_bytes  # and the gradient of the residual stream
        if s.splits_sequences:
            working += s.activation_bytes  # gathered over the tensor-parallel ranks
        if s.attention == "unfused":
            # The gradients before and after the softmax; what the MLP kept is free by then.
            freed = everything - saved_bytes(attention(s))
            again = saved_bytes(core(s)) if s.train.recompute == "selective" else 0.0
            working = max(working, again + 2 * s.element * s.scores - freed)
        return working
