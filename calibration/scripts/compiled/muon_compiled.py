"""A decoder with rotary positions and squared ReLU, compiled, trained by Muon with compiled Newton-Schulz steps."""

import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, CONTEXT, LAYERS, WIDTH, HEADS, VOCAB = 16, 1024, 12, 768, 6, 50304


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        b, n, d = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (d,))).view(b, n, 3, HEADS, d // HEADS).unbind(2)
        q, k = (rotate(F.rms_norm(t, (t.shape[-1],)), cos, sin) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (d,)))).square())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        angles = torch.outer(torch.arange(CONTEXT), 1e-4 ** torch.linspace(0, 1, WIDTH // HEADS // 2))
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, ids, targets):
        x = F.rms_norm(self.tokens(ids), (WIDTH,))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = 15 * torch.tanh(self.head(F.rms_norm(x, (WIDTH,))) / 15)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.compile
def orthogonal(g):
    x = g.bfloat16()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.05)
                p.add_(orthogonal(p.grad.lerp(buffer, 0.95)).to(p.dtype), alpha=-group["lr"])


net = Decoder().cuda()
for module in net.modules():
    if isinstance(module, nn.Embedding):
        module.bfloat16()
model = torch.compile(net, dynamic=False)
adam = torch.optim.AdamW([net.tokens.weight, net.head.weight], lr=3e-3, fused=True)
muon = Muon(list(net.blocks.parameters()), {"lr": 0.02})
times = []
for _ in range(14):
    t0 = time.perf_counter()
    ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    adam.step()
    muon.step()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - t0)
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
