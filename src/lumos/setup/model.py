"""Model: the transformer that is trained, and how many parameters it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lumos.setup.section import MaybeSize, Section, Size, as_count

Norm = Literal["rms", "layer"]
Positions = Literal["rotary", "learned", "alibi", "none"]
Activation = Literal["silu", "gelu", "relu", "relu2"]


class Model(Section):
    """A decoder-only transformer: dense or mixture of experts, grouped-query or latent attention."""

    layers: Annotated[int, Field(ge=1, le=1 << 14)]
    hidden: Size
    ffn: MaybeSize = 0  # of dense layers; that of the experts where nothing is said
    heads: Size
    kv_heads: MaybeSize = 0  # derived: heads
    head_dim: MaybeSize = 0  # derived: hidden / heads, or that of queries in latent attention
    vocab: Size
    gated: bool = True
    tied: bool = False  # one matrix for the embedding and the output
    experts: Annotated[int, Field(ge=0, le=1 << 14)] = 0
    top_k: Annotated[int, Field(ge=0, le=1 << 14)] = 0
    expert_ffn: MaybeSize = 0  # derived: ffn
    shared_experts: Annotated[int, Field(ge=0, le=1 << 14)] = 0
    dense_layers: Annotated[int, Field(ge=0, le=1 << 14)] = 0  # the first layers of a mixture of experts that are dense
    norm: Norm = "rms"  # this and the next two are derived: as in Llama if gated, as in GPT-3 if not
    positions: Positions = "rotary"
    bias: bool = False
    qkv_bias: bool = False  # derived: bias
    qk_norm: bool = False
    parallel_residual: bool = False
    activation: Activation = "silu"  # derived: silu if gated, else gelu
    q_lora_rank: MaybeSize = 0
    kv_lora_rank: MaybeSize = 0  # more than 0: multi-head latent attention
    qk_nope_head_dim: MaybeSize = 0
    qk_rope_head_dim: MaybeSize = 0
    v_head_dim: MaybeSize = 0
    name: Annotated[str, Field(max_length=200)] = ""

    DERIVED: ClassVar[tuple[str, ...]] = (
        *("ffn", "kv_heads", "head_dim", "expert_ffn"),
        *("norm", "positions", "bias", "qkv_bias", "activation"),
    )

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Llama where the MLP is gated, GPT-3 where it is not."""
        gated = given.get("gated", True) is not False
        hidden, heads = as_count(given.get("hidden")), as_count(given.get("heads"))
        experts = as_count(given.get("experts"))
        ffn, expert_ffn = as_count(given.get("ffn")), as_count(given.get("expert_ffn"))
        bias = given["bias"] if isinstance(given.get("bias"), bool) else not gated
        latent_dim = as_count(given.get("qk_nope_head_dim")) + as_count(given.get("qk_rope_head_dim"))
        latent = as_count(given.get("kv_lora_rank")) > 0
        return {
            "ffn": expert_ffn if experts else 0,
            "kv_heads": heads,
            "head_dim": latent_dim if latent else hidden // max(heads, 1),
            "expert_ffn": ffn if experts else 0,
            "norm": "rms" if gated else "layer",
            "positions": "rotary" if gated else "learned",
            "bias": bias,
            "qkv_bias": bias,
            "activation": "silu" if gated else "gelu",
        }

    @property
    def latent(self) -> bool:
        """Multi-head latent attention, as in DeepSeek-V3."""
        return self.kv_lora_rank > 0

    @property
    def moe_layers(self) -> int:
        """How many layers have experts; the dense ones come first."""
        return max(self.layers - self.dense_layers, 0) if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer, biases and inner norms included."""
        return self._latent_attention() if self.latent else self._grouped_attention()

    @property
    def norm_parameters(self) -> int:
        """Of one norm over the hidden size. A LayerNorm has a bias where the model has biases."""
        return self.hidden * (2 if self.norm == "layer" and self.bias else 1)

    @property
    def router_parameters(self) -> int:
        """Of one layer with experts."""
        return self.hidden * self.experts

    def mlp_parameters(self, ffn: int) -> int:
        """Of one MLP of this width: a dense layer's (`ffn`) or one expert's (`expert_ffn`)."""
        inward = 2 if self.gated else 1
        biases = inward * ffn + self.hidden if self.bias else 0
        return (inward + 1) * self.hidden * ffn + biases

    def embedding_parameters(self, seq: int = 0) -> int:
        """Input embedding, output matrix unless tied, and learned positions for sequences of this length."""
        positions = seq * self.hidden if self.positions == "learned" else 0
        return self.vocab * self.hidden * (1 if self.tied else 2) + positions

    def parameters(self, seq: int = 0) -> int:
        """All of them; learned positions count where the sequence length is given."""
        return self._parameters(self.experts, seq)

    def active_parameters(self, seq: int = 0) -> int:
        """Those that one token meets: `top_k` of the experts."""
        return self._parameters(self.top_k, seq)

    def _parameters(self, experts: int, seq: int) -> int:
        every_layer = self.attention_parameters + 2 * self.norm_parameters
        dense = self.mlp_parameters(self.ffn)
        expert = self.mlp_parameters(self.expert_ffn)
        sparse = self.router_parameters + (experts + self.shared_experts) * expert
        layers = self.layers * every_layer + (self.layers - self.moe_layers) * dense + self.moe_layers * sparse
        return layers + self.norm_parameters + self.embedding_parameters(seq)

    def _grouped_attention(self) -> int:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * query + 2 * key_value)
        biases = (query + 2 * key_value if self.qkv_bias else 0) + (self.hidden if self.bias else 0)
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    def _latent_attention(self) -> int:
        per_head = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.q_lora_rank:
            query = self.q_lora_rank * (self.hidden + 1 + self.heads * per_head)  # + 1: the norm between the two
        else:
            query = self.hidden * self.heads * per_head
        down = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + self.heads * self.v_head_dim * self.hidden
