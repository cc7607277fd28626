"""Record one rank of a large job on one GPU: every kernel of the rank is real, its peers are not there.

    python examples/record_fake_world.py --world 64 --tp 8 -o traces

PyTorch's fake process group answers every collective at once, without a peer. The trace then holds the compute of one
rank and its launches; `lumos predict traces/setup.toml --from traces` takes collectives, peers and network from its
model. Without a GPU it runs on the CPU, at the sizes given, to try it out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import lumos


class Block(nn.Module):
    """A decoder layer whose linears can be divided over ranks."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).view(*y.shape[:2], -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, ffn, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divide(model: Decoder, tp: int, world: int, device: str) -> None:
    """Tensor parallelism inside blocks, FSDP over the rest."""
    mesh = init_device_mesh(device, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"q": columns, "k": columns, "v": columns, "o": rows, "gate": columns, "up": columns, "down": rows}
    for block in model.blocks:
        if tp > 1:
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def described(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The whole job, as a setup of Lumos."""
    names = ("layers", "hidden", "ffn", "heads", "vocab")
    return {
        "model": {name: getattr(options, name) for name in names},
        "train": {"seq": options.seq, "micro_batch": options.micro_batch, "precision": "bf16"},
        "parallel": {"tp": options.tp, "dp": options.world // options.tp, "zero": 3},
    }


def record(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lumos.capture.fake_world(options.rank, options.world)
    model = Decoder(options.layers, options.hidden, options.ffn, options.heads, options.vocab)
    model = model.to(device=device, dtype=torch.bfloat16)
    divide(model, options.tp, options.world, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(options.vocab, (options.micro_batch, options.seq), device=device)
    with lumos.capture(options.output, setup=described(options), steps=options.steps) as step:
        for _ in range(11):
            logits = model(tokens)
            functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device == "cuda":
                torch.cuda.synchronize()
            step()
    print(
        f"{options.output}: rank {options.rank} of {options.world}, tp {options.tp}, "
        f"FSDP over {options.world // options.tp}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("rank", 0), ("world", 64), ("tp", 8), ("steps", 2), ("layers", 4), ("hidden", 1024),
                        ("ffn", 2816), ("heads", 16), ("vocab", 32000), ("seq", 1024), ("micro-batch", 1)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("-o", "--output", type=Path, default=Path("traces"), help="the folder of the trace")
    record(parser.parse_args())


if __name__ == "__main__":
    main()
