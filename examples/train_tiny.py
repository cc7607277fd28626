"""Train a small Llama-like model in plain PyTorch, data-parallel over processes: on CPUs with gloo, on GPUs with NCCL.

    python examples/train_tiny.py --nproc 2
    torchrun --nproc-per-node 2 examples/train_tiny.py
    python examples/train_tiny.py --nproc 2 --capture traces   # records two steps of every rank for Lumos

Nothing in it knows of Lumos but the lines under `--capture`; `lumos capture -o traces -- python
examples/train_tiny.py --nproc 2` does the same without them.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """A decoder layer: attention and a gated MLP, each behind a norm."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
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


class TinyLlama(nn.Module):
    """Embedding, layers, output matrix."""

    def __init__(self, layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, ffn, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def described(options: argparse.Namespace, world: int) -> dict[str, dict[str, Any]]:
    """The run as a Lumos setup has it; written beside the traces."""
    return {
        "model": {name: getattr(options, name) for name in ("layers", "hidden", "ffn", "heads", "vocab")},
        "train": {"seq": options.seq, "micro_batch": options.micro_batch, "precision": "fp32"},
        "parallel": {"dp": world},
    }


def train(options: argparse.Namespace) -> None:
    """Some steps of training in this process, which is one rank."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = _device()
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: nn.Module = TinyLlama(options.layers, options.hidden, options.ffn, options.heads, options.vocab).to(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with _capture(options, world) as captured:
        for number in range(options.steps):
            began = time.perf_counter()
            loss = _step(model, optimizer, options, device)
            captured()
            if int(os.environ.get("RANK", "0")) == 0:
                print(f"step {number}: loss {loss:.3f}, {1e3 * (time.perf_counter() - began):.1f} ms", flush=True)
    if world > 1:
        dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, device: Any) -> float:
    tokens = torch.randint(options.vocab, (options.micro_batch, options.seq), device=device)
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _capture(options: argparse.Namespace, world: int) -> Any:
    if not options.capture:
        return nullcontext(_nothing)
    import lumos

    return lumos.capture(options.capture, setup=described(options, world), steps=2, warmup=options.warmup)


def _nothing() -> None: ...


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def _as_rank(rank: int, port: int, run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.nproc, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"})
    run(options)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("layers", 4), ("hidden", 256), ("ffn", 704), ("heads", 4), ("vocab", 2048), ("seq", 128),
                        ("micro-batch", 4), ("steps", 12), ("warmup", 5), ("nproc", 1), ("threads", 1)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--capture", default="", help="record two steps into this folder")
    options = parser.parse_args()
    if options.nproc > 1:
        mp.spawn(_as_rank, (_free_port(), train, options), nprocs=options.nproc)
    else:
        train(options)


if __name__ == "__main__":
    main()
