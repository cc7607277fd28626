"""A small diffusion transformer (DiT-S/2 on 32x32 latents) with adaptive layer norm and an EMA of the weights."""

import copy
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

D, L, H, BATCH = 384, 12, 6, 48


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(D, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"), nn.Linear(4 * D, D))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x, c):
        s1, c1, g1, s2, c2, g2 = self.ada(c).chunk(6, dim=1)
        b, n, _ = x.shape
        q, k, v = self.qkv(modulate(self.norm1(x), s1, c1)).view(b, n, 3, H, D // H).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, D)
        x = x + g1.unsqueeze(1) * self.proj(a)
        return x + g2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), s2, c2))


class DiT(nn.Module):
    def __init__(self, size=32, patch=2, channels=4, classes=1000):
        super().__init__()
        self.patch, self.channels, self.grid = patch, channels, size // patch
        self.embed = nn.Conv2d(channels, D, patch, stride=patch)
        self.pos = nn.Parameter(torch.randn(1, self.grid**2, D) * 0.02, requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, D), nn.SiLU(), nn.Linear(D, D))
        self.label = nn.Embedding(classes + 1, D)
        self.blocks = nn.ModuleList([Block() for _ in range(L)])
        self.norm, self.ada = nn.LayerNorm(D, elementwise_affine=False), nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))
        self.out = nn.Linear(D, patch * patch * channels)

    def forward(self, x, t, y):
        freqs = torch.exp(-math.log(10000) * torch.arange(128, device=x.device) / 128)
        args = t[:, None].float() * freqs[None]
        c = self.time(torch.cat([args.cos(), args.sin()], dim=-1)) + self.label(y)
        x = self.embed(x).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.ada(c).chunk(2, dim=1)
        x = self.out(modulate(self.norm(x), shift, scale))
        x = x.view(-1, self.grid, self.grid, self.patch, self.patch, self.channels)
        return torch.einsum("bhwpqc->bchpwq", x).reshape(x.shape[0], self.channels, self.grid * self.patch, -1)


model = DiT().to("cuda")
ema = copy.deepcopy(model).requires_grad_(False).eval()
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)
abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to("cuda")
times = []
for step in range(16):
    t0 = time.perf_counter()
    x = torch.randn(BATCH, 4, 32, 32, device="cuda")
    y = torch.randint(0, 1000, (BATCH,), device="cuda")
    y = torch.where(torch.rand(BATCH, device="cuda") < 0.1, torch.full_like(y, 1000), y)
    t = torch.randint(0, 1000, (BATCH,), device="cuda")
    noise = torch.randn_like(x)
    a = abar[t].view(-1, 1, 1, 1)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pred = model(a.sqrt() * x + (1 - a).sqrt() * noise, t, y)
        loss = F.mse_loss(pred.float(), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1e-4)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - t0)
print("loss", float(loss))
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
