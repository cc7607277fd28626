"""Ways: how a traced run was divided among its ranks, from which collectives ran where.

Only what a layer sends in its forward pass tells of tensor parallelism, only what goes to one peer of a pipeline, and
only what DDP and FSDP send of data parallelism. A collective that none of these explains makes the rest doubtful: then
the keys that hang on it are not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lumos.change.infer.inferred_value import Told
from lumos.change.infer.layers import Stack, operands
from lumos.change.infer.recorded_shapes import Message, Op, What

_POINT = "send_recv"


@dataclass(frozen=True)
class Ways:
    """The parallelism of a run of `world` ranks, as some of them show it."""

    stacks: Sequence[Stack]
    world: int  # 0: not known

    @cached_property
    def calls(self) -> list[tuple[Op, Message]]:
        return [call for stack in self.stacks for call in stack.ops.messages]

    @cached_property
    def activation(self) -> int:
        """Elements of what one layer hands to the next; 0 where sizes are not known."""
        sizes = {stack.tokens * stack.layer.hidden for stack in self.stacks if stack.layer is not None}
        return sizes.pop() if len(sizes) == 1 else 0

    def told(self) -> dict[str, Told]:
        """parallel.tp, pp, vpp, cp, dp and zero, as far as they are told."""
        if self.world == 1:
            return {f"parallel.{way}": Told(1, "one rank") for way in ("tp", "pp", "dp", "cp")}
        data = self._data()
        if not self.world or not self.calls or not all(stack.attentions for stack in self.stacks):
            return data
        found = self._pipeline() | self._tensor()
        ways = [found.get(f"parallel.{way}") for way in ("tp", "pp", "cp")]
        if None in ways:
            return found | data
        model = 1
        for told in ways:
            model *= told.value if told is not None else 1
        rest, uneven = divmod(self.world, model)
        if uneven:
            return {}
        stated = data.get("parallel.dp")
        if stated is not None and stated.value != rest:  # replicas of shards, or a group that was not understood
            return found
        return found | {"parallel.dp": Told(rest, f"what is left of {self.world} ranks")} | data

    def _pipeline(self) -> dict[str, Told]:
        """pp from the chain of ranks that send to each other; not told unless every rank of it was traced."""
        peers = self._pairs()
        if not peers:
            return {"parallel.pp": Told(1, "no rank sends to a single other one")}
        chain = self.chain
        members = [stack for stack in self.stacks if stack.ops.rank in chain]
        if any(peer < 0 for _, peer in peers) or len(members) != len(chain):
            return {}
        if any(stack.embeds and stack.loses for stack in members):
            return {}  # a whole model on one rank is no stage: something else goes around in a ring
        found = {"parallel.pp": Told(len(chain), f"ranks {', '.join(map(str, chain))} send to each other in a chain")}
        return found | self._virtual(members)

    def _virtual(self, members: Sequence[Stack]) -> dict[str, Told]:
        """vpp: the first rank sends once a micro-batch and stage forward, and once less backward."""
        first = [stack for stack in members if stack.embeds]
        passes = max((stack.passes for stack in members), default=0)
        if len(first) != 1 or not passes:
            return {}
        sent = sum(m.collective == _POINT and "send" in _name(op) for op, m in first[0].ops.messages)
        twice, uneven = divmod(sent + passes, passes)
        if uneven or twice % 2:
            return {}
        return {"parallel.vpp": Told(twice // 2, f"the first stage sends {sent} × for {passes} micro-batches")}

    def _pairs(self) -> set[tuple[int, int]]:
        """Who sends to whom, or receives; -1 where the peer is not recorded."""
        return {(s.ops.rank, m.peer) for s in self.stacks for _, m in s.ops.messages if m.collective == _POINT}

    @cached_property
    def chain(self) -> list[int]:
        """The ranks that rank 0 (or the first that was traced) exchanges with, directly or through others."""
        links = {frozenset(pair) for pair in self._pairs() if pair[1] >= 0}
        reached = {self.stacks[0].ops.rank}
        while wider := {rank for link in links if link & reached for rank in link} - reached:
            reached |= wider
        return sorted(reached)

    def _tensor(self) -> dict[str, Told]:
        """tp and cp, from what the forward pass sends other than weights."""
        sent = [m for op, m in self.calls if op.forward and What.SHARDED not in op.scopes and m.collective != _POINT]
        small = max(stack.tokens for stack in self.stacks)
        large = [m for m in sent if not 0 <= m.inward <= small]
        if not large and (small or not sent):
            reason = "no activations are exchanged in the forward pass"
            return {"parallel.tp": Told(1, reason), "parallel.cp": Told(1, reason)}
        kinds = {m.collective for m in large}
        scattered = kinds == {"all_gather", "reduce_scatter"}
        exchanged = {max(m.inward, m.outward) for m in large}
        if not (scattered or kinds == {"all_reduce"}) or exchanged != {self.activation}:
            return {}
        found = {"parallel.cp": Told(1, "keys and values are not exchanged")}
        size = self._shards({m.group_size for m in large if m.group_size > 0})
        if size:
            how = "gathers and scatters" if scattered else "sums"
            why = f"the forward pass {how} activations over {size} ranks"
            found |= {"parallel.tp": Told(size, why), "parallel.sequence_parallel": Told(scattered, why)}
        return found

    def _shards(self, sizes: set[int]) -> int:
        """The size of the tensor-parallel group: as recorded, or of a DTensor's product over its shard's."""
        if len(sizes) == 1:
            return sizes.pop()
        ratios = set()
        for stack in self.stacks:
            for op in stack.ops.of(What.PRODUCT):
                if op.forward and op.whole is not None:
                    ratios.add(_ratio(op.whole, op))
        ratios.discard(1)  # what is not sharded, such as the head
        return ratios.pop() if len(ratios) == 1 and not sizes else 0

    def _data(self) -> dict[str, Told]:
        """dp and zero where DDP or FSDP say so themselves."""
        weights = [(op, m) for op, m in self.calls if What.SHARDED in op.scopes and m.collective == "all_gather"]
        scattered = [m for op, m in self.calls if op.backward and m.collective == "reduce_scatter"]
        if weights and scattered:
            return self._sharded(weights)
        replicated = any(op.what == What.REPLICATED for stack in self.stacks for op in stack.ops.ops)
        reduced = [m for op, m in self.calls if op.backward and m.collective == "all_reduce"]
        sizes = {m.group_size for m in reduced if m.inward != self.activation}
        if not replicated or len(sizes) != 1:
            return {}
        whole = {"parallel.zero": Told(0, "DDP keeps a whole copy on every rank")}
        if min(sizes) < 1:  # gloo does not say
            return whole
        return {"parallel.dp": Told(min(sizes), f"DDP sums gradients over {min(sizes)} ranks")} | whole

    def _sharded(self, weights: list[tuple[Op, Message]]) -> dict[str, Told]:
        sizes = {m.group_size for _, m in weights if m.group_size > 0}
        again = any(op.backward for op, _ in weights)
        found = {"parallel.zero": Told(3, "FSDP gathers weights again in the backward pass")} if again else {}
        if len(sizes) == 1:
            found["parallel.dp"] = Told(min(sizes), f"FSDP gathers weights over {min(sizes)} ranks")
        return found


def _name(op: Op) -> str:
    return op.args.collective or op.name


def _ratio(whole: Op, part: Op) -> int:
    """How many shards a product was cut into; 1 where its sizes do not say."""
    around, inside = (sum(operands(op), ()) for op in (whole, part))
    if len(around) != len(inside):
        return 1
    return max(
        (big // small for big, small in zip(around, inside, strict=True) if small and big % small == 0), default=1
    )
