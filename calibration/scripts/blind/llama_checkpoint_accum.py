"""A 0.5B Llama-like decoder: bf16 weights, checkpointed blocks, four micro-batches a step, loss printed."""

import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, FFN, LAYERS, HEADS, KV = 32000, 1536, 4096, 14, 12, 4
MICRO, ACCUM, SEQ = 2, 4, 2048


def rope_table(seq, dim, device):
    freqs = 1.0 / (10000 ** (torch.arange(0, dim, 2, device=device).float() / dim))
    angles = torch.outer(torch.arange(seq, device=device).float(), freqs)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.hd = DIM // HEADS
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk, self.wv = nn.Linear(DIM, KV * self.hd, bias=False), nn.Linear(DIM, KV * self.hd, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = rotate(self.wq(x).view(b, t, HEADS, self.hd).transpose(1, 2), cos, sin)
        k = rotate(self.wk(x).view(b, t, KV, self.hd).transpose(1, 2), cos, sin)
        v = self.wv(x).view(b, t, KV, self.hd).transpose(1, 2)
        k, v = (y.repeat_interleave(HEADS // KV, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5), Attention()
        self.w1, self.w3 = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.w2 = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        cos, sin = rope_table(ids.shape[1], DIM // HEADS, ids.device)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Llama().to(device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-4, total_steps=20)
times = []
for step in range(14):
    start = time.perf_counter()
    total = 0.0
    for micro in range(ACCUM):
        tokens = torch.randint(0, VOCAB, (MICRO, SEQ + 1)).to("cuda")
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / ACCUM
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    print(f"step {step}: loss {total:.4f}")
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
