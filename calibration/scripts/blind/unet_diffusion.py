"""A denoising U-Net (convolutions, group norm, attention at two resolutions) in fp16 with a gradient scaler."""

import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

BASE, MULT, SIZE, BATCH = 128, (1, 2, 3, 4), 64, 32


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(emb, cout)
        self.norm2, self.conv2 = nn.GroupNorm(32, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return self.skip(x) + h


class AttnBlock(nn.Module):
    def __init__(self, c, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, c)
        self.qkv, self.out = nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w)
        return x + self.out(y)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        emb, c = 4 * BASE, BASE
        self.time = nn.Sequential(nn.Linear(BASE, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.stem, widths = nn.Conv2d(3, c, 3, padding=1), [c]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for i, m in enumerate(MULT):
            for _ in range(2):
                attn = AttnBlock(BASE * m) if i >= 2 else nn.Identity()
                self.down.append(nn.ModuleList([ResBlock(c, BASE * m, emb), attn, nn.Identity()]))
                c = BASE * m
                widths.append(c)
            if i < len(MULT) - 1:
                self.down[-1][2] = nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.mid = nn.ModuleList([ResBlock(c, c, emb), AttnBlock(c), ResBlock(c, c, emb)])
        for i, m in reversed(list(enumerate(MULT))):
            for j in range(2):
                attn = AttnBlock(BASE * m) if i >= 2 else nn.Identity()
                last = j == 1 and i > 0
                grow = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(BASE * m, BASE * m, 3, padding=1))
                block = ResBlock(c + widths.pop(), BASE * m, emb)
                self.up.append(nn.ModuleList([block, attn, grow if last else nn.Identity()]))
                c = BASE * m
        self.norm, self.out = nn.GroupNorm(32, c), nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(BASE // 2, device=x.device) / (BASE // 2))
        emb = t[:, None] * freqs
        emb = self.time(torch.cat([emb.sin(), emb.cos()], dim=1))
        h, skips = self.stem(x), []
        for res, attn, down in self.down:
            h = attn(res(h, emb))
            skips.append(h)
            h = down(h)
        h = self.mid[2](self.mid[1](self.mid[0](h, emb)), emb)
        for res, attn, up in self.up:
            h = up(attn(res(torch.cat([h, skips.pop()], dim=1), emb)))
        return self.out(F.silu(self.norm(h)))


def main():
    torch.backends.cudnn.benchmark = True
    model = UNet().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler("cuda")
    alphas = torch.cos(torch.linspace(0, 1, 1000, device="cuda") * math.pi / 2) ** 2
    times = []
    for step in range(14):
        begin = time.perf_counter()
        x = torch.rand(BATCH, 3, SIZE, SIZE, device="cuda") * 2 - 1
        t = torch.randint(0, 1000, (BATCH,), device="cuda")
        a, noise = alphas[t][:, None, None, None], torch.randn_like(x)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t).float(), noise)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    print("loss", loss.item())
    print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
