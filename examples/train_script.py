"""Trains a Llama-like model on random tokens, as scripts for GPUs are written: on one, or on several with FSDP2.

    python examples/train_script.py
    torchrun --nproc-per-node 8 examples/train_script.py --layers 32 --hidden 4096 --compile

It knows nothing of Lumos. `lumos capture --dry -o DIR -- python examples/train_script.py` dry-runs it on a machine
without a GPU.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional


class Block(nn.Module):
    """A decoder layer: attention and a gated MLP, each behind a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        ffn = 8 * hidden // 3 // 256 * 256
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Embedding, layers, output matrix."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(options: argparse.Namespace) -> nn.Module:
    """The model on this rank's GPU; of several ranks, each holds its share of fp32 weights and computes in bf16."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with torch.device("meta"):
        model = Decoder(options.layers, options.hidden, options.hidden // 128, options.vocab)
    if options.compile:
        for block in model.blocks:
            block.compile()
    if world > 1:
        dist.init_process_group("nccl")
        mesh, policy = init_device_mesh("cuda", (world,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    else:
        model.to(torch.bfloat16)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("layers", 16), ("hidden", 2048), ("vocab", 32000), ("seq", 2048), ("batch", 4), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true", help="compile every layer")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    model = build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(options.steps):
        tokens = torch.randint(options.vocab, (options.batch, options.seq), device="cuda")
        loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
