"""Experts in a loop with activation checkpointing: sixteen small experts, four per token, bf16 autocast."""

import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, HIDDEN, INNER, DEPTH, HEADS, EXPERTS, K = 16384, 768, 1024, 6, 12, 16, 4
BATCH, LENGTH = 8, 1024


class SparseMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN)) for _ in range(EXPERTS)]
        )

    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        scores, index = self.gate(flat).topk(K, dim=-1)
        scores = scores.softmax(dim=-1)
        result = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slots = (index == e).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            result[rows] += scores[rows, slots].unsqueeze(-1) * expert(flat[rows]).to(result.dtype)
        return result.view_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = nn.MultiheadAttention(HIDDEN, HEADS, dropout=0.0, batch_first=True)
        self.mlp = SparseMLP()

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False)
        return self.out(self.norm(x))


torch.manual_seed(3)
model = Model().to("cuda")
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
times = []
for step in range(14):
    t0 = time.perf_counter()
    ids = torch.randint(VOCAB, (BATCH, LENGTH), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - t0)
print("loss", loss.item())
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
