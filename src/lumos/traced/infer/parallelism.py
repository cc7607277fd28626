"""The parallelism of a traced run, inferred from which collectives ran where.

Tensor parallelism shows only in what layers exchange in their forward pass, pipelines in what is sent to single ranks,
and data parallelism in the collectives of DDP and FSDP. A collective that none of these explains makes the rest
doubtful: then the keys that depend on it are not inferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from lumos.read.op_columns import OpType, TracedOp
from lumos.trace.trace import Message
from lumos.traced.infer import Findings, Inferred, agreed
from lumos.traced.infer.layers import POINT_TO_POINT, RankLayers

Calls = list[tuple[TracedOp, Message]]


@dataclass(frozen=True)
class Parallelism:
    """The parallelism of a run of `world` ranks, as some of them show it."""

    ranks: Sequence[RankLayers]
    world: int  # 0: not known

    @cached_property
    def calls(self) -> Calls:
        return [call for rank in self.ranks for call in rank.ops.collectives]

    @cached_property
    def activation(self) -> int:
        """Elements that one layer hands to the next; 0 where shapes are not known."""
        return agreed(rank.tokens * rank.hidden for rank in self.ranks if rank.hidden) or 0

    @cached_property
    def inferred(self) -> Findings:
        """parallel.tp, pp, vpp, cp, dp and zero, as far as the trace shows them."""
        if self.world == 1:
            return {f"parallel.{key}": Inferred(1, "one rank") for key in ("tp", "pp", "dp", "cp")}
        data = self._data()
        if not self.world or not self.calls or not all(rank.attentions for rank in self.ranks):
            return data
        findings = self._pipeline() | self._tensor()
        sizes = [findings[key].value for key in ("parallel.tp", "parallel.pp", "parallel.cp") if key in findings]
        if len(sizes) < 3:
            return findings | data
        replicas, uneven = divmod(self.world, prod(sizes))
        if uneven:
            return {}
        if "parallel.dp" in data and data["parallel.dp"].value != replicas:
            return findings  # replicas of shards, or a group that is not understood
        return findings | {"parallel.dp": Inferred(replicas, f"what is left of {self.world} ranks")} | data

    # ------------------------------------------------------------------ pipelines
    def _pairs(self) -> set[tuple[int, int]]:
        """(rank, peer) of every send and receive; -1 where the peer was not recorded."""
        return {
            (rank.ops.rank, max(call.source, call.destination))
            for rank in self.ranks
            for _, call in rank.ops.collectives
            if call.collective == POINT_TO_POINT
        }

    @cached_property
    def chain(self) -> list[int]:
        """The ranks that the first traced one exchanges with, directly or through others."""
        links = {frozenset(pair) for pair in self._pairs() if pair[1] >= 0}
        reached = {self.ranks[0].ops.rank}
        while wider := {rank for link in links if link & reached for rank in link} - reached:
            reached |= wider
        return sorted(reached)

    def _pipeline(self) -> Findings:
        """pp from the chain of ranks that send to each other, if every rank of it was traced."""
        pairs = self._pairs()
        if not pairs:
            return {"parallel.pp": Inferred(1, "no rank sends to a single other one")}
        stages = [rank for rank in self.ranks if rank.ops.rank in self.chain]
        if any(peer < 0 for _, peer in pairs) or len(stages) != len(self.chain):
            return {}
        if any(rank.has_embedding and rank.has_loss for rank in stages):
            return {}  # a whole model on one rank is no stage: something else is sent around a ring
        listed = ", ".join(map(str, self.chain))
        findings = {"parallel.pp": Inferred(len(stages), f"ranks {listed} send to each other in a chain")}
        return findings | self._virtual_stages(stages)

    def _virtual_stages(self, stages: Sequence[RankLayers]) -> Findings:
        """vpp: per micro-batch, the first rank sends once per chunk forward, and once less backward."""
        first = [rank for rank in stages if rank.has_embedding]
        count = max((rank.microbatches for rank in stages), default=0)
        if len(first) != 1 or not count:
            return {}
        sent = sum(
            call.collective == POINT_TO_POINT and "send" in (op.message.collective if op.message else op.name)
            for op, call in first[0].ops.collectives
        )
        chunks, uneven = divmod(sent + count, 2 * count)
        why = f"the first stage sends {sent} × for {count} micro-batches"
        return {} if uneven else {"parallel.vpp": Inferred(chunks, why)}

    # ------------------------------------------------------------------ tensor and context parallelism
    def _tensor(self) -> Findings:
        """tp and cp, from what the forward pass exchanges other than weights."""
        sent = [
            call
            for op, call in self.calls
            if op.forward and OpType.FSDP not in op.scopes and call.collective != POINT_TO_POINT
        ]
        small = max(rank.tokens for rank in self.ranks)
        large = [call for call in sent if not 0 <= call.in_elements <= small]
        if not large and (small or not sent):
            why = "no activations are exchanged in the forward pass"
            return {"parallel.tp": Inferred(1, why), "parallel.cp": Inferred(1, why)}
        names = {call.collective for call in large}
        scattered = names == {"all_gather", "reduce_scatter"}
        exchanged = {max(call.in_elements, call.out_elements) for call in large}
        if not (scattered or names == {"all_reduce"}) or exchanged != {self.activation}:
            return {}
        findings = {"parallel.cp": Inferred(1, "keys and values are not exchanged")}
        size = self._tensor_ranks({call.group_size for call in large if call.group_size > 0})
        if size:
            how = "gathers and scatters" if scattered else "reduces"
            why = f"the forward pass {how} activations over {size} ranks"
            findings |= {"parallel.tp": Inferred(size, why), "parallel.sequence_parallel": Inferred(scattered, why)}
        return findings

    def _tensor_ranks(self, sizes: set[int]) -> int:
        """The size of the tensor-parallel group: as recorded, or of a DTensor's matmul over its shard's."""
        if sizes:
            return agreed(sizes) or 0
        ratios = {
            _ratio(op.outer, op)
            for rank in self.ranks
            for op in rank.ops.forward(OpType.MATMUL)
            if op.outer is not None
        }
        return agreed(ratios - {1}) or 0  # 1: not sharded, such as the head

    # ------------------------------------------------------------------ data parallelism
    def _data(self) -> Findings:
        """dp and zero where DDP or FSDP show them."""
        gathers = [(op, c) for op, c in self.calls if OpType.FSDP in op.scopes and c.collective == "all_gather"]
        if gathers and any(op.backward and call.collective == "reduce_scatter" for op, call in self.calls):
            return self._fsdp(gathers)
        replicated = any(op.type == OpType.DDP for rank in self.ranks for op in rank.ops.ops)
        reduced = [call for op, call in self.calls if op.backward and call.collective == "all_reduce"]
        size = agreed(call.group_size for call in reduced if call.in_elements != self.activation)
        if not replicated or size is None:
            return {}
        findings = {"parallel.zero": Inferred(0, "DDP keeps a whole copy on every rank")}
        if size > 0:  # gloo does not record it
            findings["parallel.dp"] = Inferred(size, f"DDP reduces gradients over {size} ranks")
        return findings

    def _fsdp(self, gathers: Calls) -> Findings:
        findings: Findings = {}
        if any(op.backward for op, _ in gathers):
            findings["parallel.zero"] = Inferred(3, "FSDP gathers weights again in the backward pass")
        size = agreed(call.group_size for _, call in gathers if call.group_size > 0)
        if size:
            findings["parallel.dp"] = Inferred(size, f"FSDP gathers weights over {size} ranks")
        return findings


def _ratio(whole: TracedOp, part: TracedOp) -> int:
    """How many shards a matmul was split into; 1 where its shapes do not show it."""
    outer, inner = (sum(op.factors, ()) for op in (whole, part))
    if len(outer) != len(inner):
        return 1
    return max((big // small for big, small in zip(outer, inner, strict=True) if small and big % small == 0), default=1)
