"""TransformerLayer: the blocks of one layer on one rank, and what stays in memory between them."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from lumos.described import primitives as ops
from lumos.described.attention import attention, attention_backward, keys_and_values_bytes
from lumos.described.experts import exchanges_first, expert_gradient_bytes, gathered_bytes, moe, moe_backward
from lumos.described.mlp import activation_gradient_bytes, mlp, mlp_backward
from lumos.described.recomputation import Again, ByOperator, by_operator, recomputed_parts
from lumos.program.layout import RankLayout
from lumos.program.op import Ops, saved_bytes
from lumos.program.operators import Collective, Operator


class LayerMemory(NamedTuple):
    """Bytes of one layer and one micro-batch."""

    kept: float  # between forward and backward pass
    backward: float  # alive at the worst moment of the backward pass, beyond `kept`
    attention: float = 0.0  # the same of attention, which goes back last; less than 0 where the rest is free by then


def _is_heavy(work: Operator | Collective | None) -> bool:
    return isinstance(work, Collective) or (work is not None and work.is_matrix)


class TransformerLayer:
    """One layer: attention, then a dense MLP or, where `sparse`, a mixture of experts.

    `recompute` is that of the setup, unless the layer is one of those that a setup leaves out.
    """

    def __init__(self, layout: RankLayout, sparse: bool = False, recompute: str = "") -> None:
        self.layout, self.sparse = layout, sparse
        self.recompute = recompute or layout.train.recompute
        if self.recompute == "selective" and layout.train.modules == ("layers",):
            self.recompute = "full"  # of those layers that are chosen

    def forward(self) -> Ops:
        s = self.layout
        more = ops.host_only(s.framework.layer_launches + s.gather_launches)
        return exchanges_first([*self._boundary(), *attention(s), *(moe(s) if self.sparse else mlp(s)), *more])

    def backward(self) -> Ops:
        s = self.layout
        more = ops.host_only(2 * s.framework.layer_launches + s.gather_launches)
        second = moe_backward(s) if self.sparse else mlp_backward(s)
        return exchanges_first([*second, *attention_backward(s), *more])

    def recomputed(self) -> Ops:
        """What is run again before the backward pass, and so is not kept."""
        s, count = self.layout, 1
        if self.recompute == "none":
            return []
        if self.recompute == "full":
            again = [*self._gathered_input(), *self._needed(self.forward())]
        elif self._policy is not None:
            again = self._needed(self._policy.block)
        else:
            again, count = self._parts.block, self._parts.checkpoints
        return [*again, *([] if self._boundary() else ops.host_only(count * s.framework.checkpoint_launches))]

    def _needed(self, block: Ops) -> Ops:
        """What is run again of a block: all of it, or all before the matmul or collective whose result nobody keeps.

        PyTorch stops there, and compiled code has nothing else; Megatron's and nanotron's checkpoints run all of it.
        """
        s = self.layout
        if not (s.framework.stops_early or s.train.compile):
            return block
        kept = max((index for index, op in enumerate(block) if op.saves), default=-1) + 1
        ends = next((i for i in range(kept, len(block)) if _is_heavy(block[i].work)), len(block))
        return [*block[:ends], *(op for op in block[ends:] if op.name == "host")]

    def _boundary(self) -> Ops:
        """Where a checkpoint begins, the host may wait for the GPU, and then does what keeping a layer takes."""
        framework = self.layout.framework
        if self.recompute != "full" or not framework.syncs_checkpoints:
            return []
        return [op._replace(syncs=True) for op in ops.host_only(framework.checkpoint_launches)]

    def _gathered_input(self) -> Ops:
        """The input of the layer, of which every tensor rank keeps a part."""
        s = self.layout
        return ops.collective("all_gather", s.activation_bytes, s.tp, name="gather input") if s.divides_inputs else []

    @cached_property
    def _parts(self) -> Again:
        """What selective recomputation runs again, by parts of the layer."""
        if self.recompute != "selective":
            return Again([], checkpoints=0)
        return recomputed_parts(self.layout, self.sparse)

    @cached_property
    def _policy(self) -> ByOperator | None:
        """The same by operators, where the setup asks for that."""
        wanted = self.recompute == "selective" and "operators" in self.layout.train.modules
        return by_operator(self.layout, self.forward()) if wanted else None

    @cached_property
    def memory(self) -> LayerMemory:
        """What the blocks keep, less what is recomputed.

        Known error on one H200, by differences over layers, batch, sequence and vocabulary: the allocator's rounding,
        0.1 to 1 % of the peak, up to 3 % of models under 1 GiB.
        """
        s = self.layout
        everything = saved_bytes(self.forward())
        second, attention = self._working_bytes(everything)
        working = max(second, attention)
        if self.recompute != "full" and self._policy is None:
            return LayerMemory(everything - self._parts.attention - self._parts.rest, working, attention)
        # A norm that keeps its input as it is keeps the input of the layer: not twice.
        shared = 0.0 if ops.norm_copies_input(s) or s.divides_inputs else s.residual_bytes
        kept, read = self._policy[1:] if self._policy is not None else (0.0, 0.0)
        again = everything - shared - read
        return LayerMemory(s.kept_input_bytes + kept, again + working, again + attention)

    def _working_bytes(self, everything: float) -> tuple[float, float]:
        """What the backward pass adds at the worst moment of the second half, and of attention."""
        s = self.layout
        inner = (
            expert_gradient_bytes(s)
            if self.sparse
            else activation_gradient_bytes(s) * s.tokens * (s.model.ffn // s.parallel.tp)
        )
        working = inner + s.residual_bytes  # and the gradient of the residual stream
        if s.splits_sequences:
            working += s.activation_bytes  # gathered over the tensor-parallel ranks
        if self.sparse:
            working += gathered_bytes(s)
        working += self._parts.rest  # made anew for the second half, which goes back first
        # By the time attention goes back, what the second half kept is free.
        freed = everything - saved_bytes(attention(s)) - self._parts.rest
        scores = 2 * s.element * s.scores if s.attention == "unfused" else 0.0  # gradients around the softmax
        # Keys and values of all context-parallel ranks, and their gradients.
        gathered = 2 * keys_and_values_bytes(s) if s.parallel.cp > 1 and s.parallel.cp_type == "all_gather" else 0.0
        return working, self._parts.attention + scores + gathered - freed
