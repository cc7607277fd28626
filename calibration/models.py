"""The models that the recordings train: small decoders with random weights, from transformers and written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The size of a decoder and of the batch it is trained on."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    seq: int
    mbs: int
    kv: int | None = None  # key-value heads, where fewer than heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def shrunk(self) -> Shape:
        """The same structure, small enough to train on a CPU within a second."""
        return replace(self, hidden=16 * self.heads, ffn=64, vocab=256, seq=32)


class SimpleNorm(nn.Module):
    """RMS normalisation as separate element-wise operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


def matmul_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as separate products, mask and softmax."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(ahead, float("-inf")), dim=-1) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused_norm(width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-6)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Style:
    """Whether a block is made of fused operators or of simple ones."""

    attend: Attend
    norm: Callable[[int], nn.Module]


FUSED, SIMPLE = Style(fused_attention, fused_norm), Style(matmul_attention, SimpleNorm)
PLAIN = {"plain": FUSED, "plain_simple": SIMPLE}


class Attention(nn.Module):
    """Self-attention; the number of heads follows from the width, so its linears may be split over ranks."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.head_dim, self.attend = shape.head_dim, attend
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x)))
        return self.o(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, style: Style) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = style.norm(shape.hidden), style.norm(shape.hidden)
        self.attention, self.mlp = Attention(shape, style.attend), GatedMLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens to logits; without `embed` or `head` it is a middle part of one, as a pipeline stage holds."""

    def __init__(self, shape: Shape, style: Style = FUSED, embed: bool = True, head: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden) if embed else None
        self.blocks = nn.ModuleList(Block(shape, style) for _ in range(shape.layers))
        self.norm = style.norm(shape.hidden) if head else None
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if head else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def hf_model(kind: str, shape: Shape) -> nn.Module:
    """A causal language model of transformers, built from its configuration alone."""
    import transformers as hf

    common: dict[str, Any] = {"vocab_size": shape.vocab, "use_cache": False, "attn_implementation": "sdpa"}
    if kind == "gpt2":
        widths = {"n_embd": shape.hidden, "n_inner": shape.ffn, "n_head": shape.heads}
        config = hf.GPT2Config(n_layer=shape.layers, n_positions=shape.seq, **widths, **common)
        return hf.GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv or shape.heads,
        "max_position_embeddings": shape.seq,
    }
    if kind == "mixtral":  # a loop over the experts: it synchronises with the host inside the step
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **experts, **common))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **common))


def build_model(kind: str, shape: Shape, device: str) -> nn.Module:
    """A model in bf16 on `device`, in training mode."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(shape, PLAIN[kind]) if kind in PLAIN else hf_model(kind, shape)
    return model.to(torch.bfloat16).train()
