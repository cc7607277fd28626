"""A small mixture-of-experts language model whose experts run one after the other in a Python loop."""

import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, FFN, LAYERS, HEADS, EXPERTS, TOP_K = 32000, 1024, 2816, 8, 16, 8, 2
BATCH, SEQ = 8, 1024


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, DIM)
        probs = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probs, TOP_K, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        load = F.one_hot(chosen, EXPERTS).float().mean(dim=(0, 1))
        return out.view(shape), EXPERTS * (load * probs.mean(dim=0)).sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.proj, self.moe = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False), MoE()

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, DIM))
        y, aux = self.moe(self.norm2(x))
        return x + y, aux


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x, total = self.embed(ids), 0.0
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return self.head(self.norm(x)), total


torch.manual_seed(0)
model = LM().to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
times = []
for step in range(14):
    start = time.perf_counter()
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), device="cuda")
    logits, aux = model(tokens[:, :-1])
    ce = F.cross_entropy(logits.float().view(-1, VOCAB), tokens[:, 1:].reshape(-1))
    (ce + 0.01 * aux).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
print(f"loss {ce.item():.3f} aux {aux.item():.3f}")
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
