"""The widths of layers of any architecture on a rank that has them whole: experts, latent attention, unusual MLPs.

Every layer is read on its own: the matmuls before its attention (the same before all of them), the output projection
behind it, and what follows up to the next layer, which is an MLP, or a choice of experts. Values that the matmuls show
are exact. Where they are of no known form, the key gets the nearest size and is marked as rough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile

from lumos.data_files import read_table
from lumos.traced.infer import Findings, Inferred, agreed
from lumos.traced.infer.attentions import AttentionShape
from lumos.traced.infer.layers import LayerPart, Mlp, RankLayers, TracedMatmul, Weight, mlp_of

_LONGEST_QUERY: int = read_table("analysis.toml")["infer"]["longest_query"]


@dataclass(frozen=True)
class Layer:
    """What follows one attention, up to the matmuls before the next one."""

    weights: tuple[Weight, ...]  # after the output projection
    part: LayerPart
    is_last: bool  # of its micro-batch: the head follows

    @property
    def is_sparse(self) -> bool:
        return bool(self.part.routed)


@dataclass(frozen=True)
class Widths:
    """The widths of the layers of a rank, and of no other: without tensor parallelism."""

    rank: RankLayers
    attention: AttentionShape  # of the layers that are read; layers with another one (a vision tower) are not

    def findings(self) -> Findings:
        """model.hidden, ffn, gated, heads, kv_heads, head_dim, and the keys of experts and latent attention."""
        shape = self.attention
        latent = self._latent()
        findings = {
            "model.hidden": self._hidden(),
            "model.heads": Inferred(shape.heads, f"attention of {shape.heads} heads"),
            "model.head_dim": Inferred(shape.dim, "the last dimension of attention"),
            "model.kv_heads": Inferred(shape.heads, "latent attention") if latent else self._kv_heads(),
        }
        findings |= latent | self._mlp()
        if self.rank.are_alike:
            return findings
        why = "of the attentions over most tokens; there are others"
        return {key: Inferred(one.value, why, True) for key, one in findings.items()}

    @property
    def has_others(self) -> bool:
        """Whether more than one layer lies between two attentions, or before the first: such as state-space layers."""
        first = self.rank.parts[0]
        inputs = first.weights[: len(first.weights) - len(self.before)]
        inside = [layer.weights for layer in self.layers if not layer.is_last]
        returns = max(sum(columns == self.hidden for _, columns in weights) for weights in (inputs, *inside))
        return bool(first.routed) or returns > 1 or len(self._common) > _LONGEST_QUERY

    # ------------------------------------------------------------------ layers
    @property
    def before(self) -> tuple[Weight, ...]:
        """The matmuls before every attention: query, key and value."""
        return self._common if len(self._common) <= _LONGEST_QUERY else ()

    @cached_property
    def _common(self) -> tuple[Weight, ...]:
        """The longest run of matmuls that comes right before every attention."""
        shapes = self.rank.shapes
        parts = [
            part.weights[1:] if place and shapes[place - 1] == shape else part.weights  # the first is an output
            for place, (part, shape) in enumerate(zip(self.rank.parts, shapes, strict=False))
            if shape == self.attention
        ]
        common: list[Weight] = []
        for weights in zip(*map(reversed, parts), strict=False):
            if agreed(weights) is None:
                break
            common.append(weights[0])
        return tuple(reversed(common))

    @cached_property
    def per_pass(self) -> int:
        """Layers of one micro-batch."""
        return max(1, self.rank.shapes.count(self.attention) // max(self.rank.microbatches, 1))

    @cached_property
    def layers(self) -> list[Layer]:
        """Every layer; the last ones of a micro-batch without the head."""
        parts = [
            part for shape, part in zip(self.rank.shapes, self.rank.parts[1:], strict=True) if shape == self.attention
        ]
        return [
            Layer(self._inside(part.weights), part, place % self.per_pass == self.per_pass - 1)
            for place, part in enumerate(parts)
        ]

    def _inside(self, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        """Between the output projection and the matmuls before the next attention."""
        size = len(self.before)
        return weights[1:-size] if size and weights[-size:] == self.before else weights[1:]

    def _alike(self, layers: list[Layer]) -> list[tuple[Weight, ...]]:
        """The matmuls of layers that no head follows; where there are none, those before the head."""
        inner = [layer.weights for layer in layers if not layer.is_last]
        return inner or [tuple(takewhile(lambda w: w[1] != self.rank.vocab, layer.weights)) for layer in layers]

    @cached_property
    def hidden(self) -> int:
        """The width between layers; the most frequent width of matmuls where the attentions do not show it."""
        widths = Counter(inner for part in self.rank.parts for inner, _ in part.weights)
        return self.rank.hidden or (widths.most_common(1)[0][0] if widths else 0)

    def _hidden(self) -> Inferred:
        known = self.rank.hidden
        why = f"attentions are followed by matmuls with {known} columns" if known else "the width of most matmuls"
        return Inferred(self.hidden or self.attention.heads * self.attention.dim, why, not known)

    # ------------------------------------------------------------------ before the attention
    def _kv_heads(self) -> Inferred:
        shape = self.attention
        if 0 < shape.kv_heads < shape.heads and shape.heads % shape.kv_heads == 0:
            return Inferred(shape.kv_heads, f"keys of {shape.kv_heads} heads in attention")
        columns = tuple(columns for inner, columns in self.before if inner == self.hidden)
        groups = kv_heads(columns, shape.heads, shape.dim)
        if groups and shape.heads % groups == 0 and len(columns) == len(self.before):
            return Inferred(groups, f"matmuls of {self.hidden} × {groups * shape.dim} for keys")
        return Inferred(shape.heads, "as many as heads; the matmuls of keys are not recognised", True)

    def _latent(self) -> Findings:
        """Latent attention: keys and values come from a vector of kv_lora_rank, next to which a rotary key lies."""
        shape, weights, hidden = self.attention, self.before, self.rank.hidden
        wide = shape.heads * shape.dim
        for place, ((first, both), (kv_rank, up)) in enumerate(pairwise(weights)):
            rope, queries = both - kv_rank, weights[:place] + weights[place + 2 :]
            nope = shape.dim - rope
            value = up // shape.heads - nope
            q_rank = queries[0][1] if len(queries) == 2 else 0
            fits = queries == (((hidden, q_rank), (q_rank, wide)) if q_rank else ((hidden, wide),))
            if first != hidden or not fits or min(nope, rope, value) <= 0 or not self._returns(value):
                continue
            why = f"keys and values are made of {kv_rank} of {both} columns"
            sizes = {
                "q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope,
                "v_head_dim": value,
            }  # fmt: skip
            return {f"model.{key}": Inferred(size, why) for key, size in sizes.items() if size}
        return {}

    def _returns(self, value_dim: int) -> bool:
        """Whether the output projections take values of this size."""
        return all(
            part.weights[:1] == ((self.attention.heads * value_dim, self.rank.hidden),)
            for shape, part in zip(self.rank.shapes, self.rank.parts[1:], strict=True)
            if shape == self.attention
        )

    # ------------------------------------------------------------------ after the attention
    def _mlp(self) -> Findings:
        sparse = [layer for layer in self.layers if layer.is_sparse]
        experts = self._experts(sparse) if sparse else {}
        dense = [layer for layer in self.layers if not layer.is_sparse]
        if not dense:
            return experts or self._rough_mlp(self.layers)
        mlp = agreed(mlp_of(weights, self.hidden) for weights in self._alike(dense))
        if mlp is None:
            return self._rough_mlp(dense) | experts
        ffn = Inferred(mlp.ffn, f"matmuls of {self.hidden} × {mlp.ffn}")
        gated = Inferred(mlp.gated, f"matmuls into it: {'two' if mlp.gated else 'one'}")
        return {"model.ffn": ffn, "model.gated": gated} | experts

    def _rough_mlp(self, layers: list[Layer]) -> Findings:
        """The widest matmul that leads back to the hidden size, or the widest of all."""
        alike = self._alike(layers)
        weights = {weight for each in alike for weight in each}
        back = [inner for inner, columns in weights if columns == self.hidden != inner]
        widest = max(back or [max(weight) for weight in weights], default=4 * self.hidden)
        doubled = any(each.count((self.hidden, widest)) > 1 for each in alike)
        gated = doubled or any(columns == 2 * widest for _, columns in weights)
        why = "the widest matmul of layers of no known form"
        return {"model.ffn": Inferred(widest, why, True), "model.gated": Inferred(gated, why, True)}

    # ------------------------------------------------------------------ experts
    def _experts(self, sparse: list[Layer]) -> Findings:
        """Experts, how many of them a token uses, and how wide they are; {} where layers differ."""
        read = agreed(_routed(layer.part, self.rank.tokens) for layer in sparse)
        if read is None:
            return {}
        experts, top_k, mlp = read.experts, read.top_k, read.mlp
        findings = {
            "model.experts": Inferred(experts, f"a choice among {experts} experts"),
            "model.top_k": Inferred(top_k, f"every token is sent to {top_k} experts", read.is_rounded),
            "model.expert_ffn": Inferred(mlp.ffn, f"matmuls of experts of {self.hidden} × {mlp.ffn}"),
            "model.gated": Inferred(mlp.gated, f"matmuls into an expert: {'two' if mlp.gated else 'one'}"),
        }
        findings |= self._shared(sparse, read)
        leading = next(place for place, layer in enumerate(self.layers) if layer.is_sparse)
        each = self.per_pass
        dense = sum(not layer.is_sparse for layer in self.layers[:each])
        if dense:
            why = f"layers without experts: {dense}"
            is_first = all(layer.is_sparse == (place % each >= leading) for place, layer in enumerate(self.layers))
            findings["model.dense_layers"] = Inferred(dense, why if is_first else f"{why}, not the first", not is_first)
        return findings

    def _shared(self, sparse: list[Layer], read: Routed) -> Findings:
        """Experts that every token uses, besides the router and a gate of one column."""
        aside = {(self.hidden, read.experts), (self.hidden, 1)}
        widths = {tuple(weight for weight in weights if weight not in aside) for weights in self._alike(sparse)}
        if widths == {()}:
            return {}
        mlp = agreed(mlp_of(weights, self.hidden) for weights in widths)
        if mlp is None:
            return {}
        count = max(1, round(mlp.ffn / read.mlp.ffn))
        why = f"an MLP of {mlp.ffn} beside the experts of {read.mlp.ffn}"
        return {"model.shared_experts": Inferred(count, why, count * read.mlp.ffn != mlp.ffn)}


@dataclass(frozen=True)
class Routed:
    """The experts of one layer."""

    experts: int
    top_k: int
    is_rounded: bool  # rows were added or dropped, so that top_k is only near
    mlp: Mlp


def _routed(part: LayerPart, tokens: int) -> Routed | None:
    routed = part.routed
    down = routed[-1]
    mlp = mlp_of(_one_expert(routed), down.columns)
    experts = down.experts or (part.choices[-1].options if part.choices else 0)
    if mlp is None or not experts or not tokens:
        return None
    chosen = agreed(choice.chosen for choice in part.choices if choice.options == experts) or 0
    rows = sum(matmul.rows for matmul in routed if matmul.weight == down.weight)
    top_k = chosen or round(rows / tokens)
    return Routed(experts, top_k, not chosen and rows != top_k * tokens, mlp) if 1 <= top_k <= experts else None


def _one_expert(routed: Sequence[TracedMatmul]) -> tuple[Weight, ...]:
    """The weights of one expert, where each runs for itself; those of all where they run at once."""
    weights = [matmul.weight for matmul in routed]
    size = weights.index(weights[-1]) + 1  # every expert ends with the same matmul
    repeats = size and len(weights) % size == 0 and weights == weights[:size] * (len(weights) // size)
    return tuple(weights[:size]) if repeats else ()


def kv_heads(columns: Sequence[int], heads: int, dim: int) -> int:
    """Key heads on one rank, from the matmuls before the attention; 0 where they do not fit."""
    if len(columns) == 1:
        twice, rest = divmod(columns[0] - heads * dim, dim)
        return 0 if rest or twice % 2 or twice < 2 else twice // 2
    if len(columns) != 3:
        return 0
    query, key, value = columns
    return key // dim if query == heads * dim and key == value and key % dim == 0 else 0
