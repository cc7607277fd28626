"""ConvNeXt-T: depthwise convolutions, layer scale, stochastic depth; bf16 autocast, AdamW, EMA of the weights."""

import copy
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEPTHS, DIMS, BATCH = (3, 3, 9, 3), (96, 192, 384, 768), 128


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pw1, self.pw2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))
        self.drop = drop

    def forward(self, x):
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pw2(F.gelu(self.pw1(self.norm(y))))
        y = y.permute(0, 3, 1, 2)
        if self.training and self.drop > 0:
            keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) >= self.drop
            y = y * keep / (1 - self.drop)
        return x + y


class ConvNeXt(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        stages, inside = [], 3
        rates = torch.linspace(0, 0.1, sum(DEPTHS)).tolist()
        for depth, dim in zip(DEPTHS, DIMS):
            if inside == 3:
                stages += [nn.Conv2d(3, dim, 4, stride=4), LayerNorm2d(dim, eps=1e-6)]
            else:
                stages += [LayerNorm2d(inside, eps=1e-6), nn.Conv2d(inside, dim, 2, stride=2)]
            stages += [Block(dim, rates.pop(0)) for _ in range(depth)]
            inside = dim
        self.features = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(inside, eps=1e-6), nn.Linear(inside, classes)

    def forward(self, x):
        return self.head(self.norm(self.features(x).mean([-2, -1])))


@torch.no_grad()
def update_ema(ema, model, decay=0.9999):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(p, alpha=1 - decay)


model = ConvNeXt().to("cuda").to(memory_format=torch.channels_last)
ema = copy.deepcopy(model).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
times = []
for step in range(14):
    t = time.perf_counter()
    x = torch.randn(BATCH, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (BATCH,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    update_ema(ema, model)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - t)
print(f"loss {loss.item():.4f}")
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
