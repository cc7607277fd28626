"""CLIP from scratch: an image transformer, a text transformer, and the symmetric contrastive loss."""

import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, CONTEXT, IMAGE = 256, 77, 224


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.in_proj(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, d))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        h = self.c_fc(self.ln_2(x))
        return x + self.c_proj(h * torch.sigmoid(1.702 * h))


class CLIP(nn.Module):
    def __init__(self, vision=512, text=512, layers=12, embed=512, patch=16, vocab=49408):
        super().__init__()
        self.conv = nn.Conv2d(3, vision, patch, stride=patch, bias=False)
        self.cls = nn.Parameter(vision**-0.5 * torch.randn(vision))
        self.vpos = nn.Parameter(vision**-0.5 * torch.randn((IMAGE // patch) ** 2 + 1, vision))
        self.ln_pre, self.ln_post, self.ln_text = nn.LayerNorm(vision), nn.LayerNorm(vision), nn.LayerNorm(text)
        self.visual = nn.Sequential(*[Block(vision, 8, causal=False) for _ in range(layers)])
        self.tokens, self.tpos = nn.Embedding(vocab, text), nn.Parameter(0.01 * torch.randn(CONTEXT, text))
        self.text = nn.Sequential(*[Block(text, 8, causal=True) for _ in range(layers)])
        self.vproj = nn.Parameter(vision**-0.5 * torch.randn(vision, embed))
        self.tproj = nn.Parameter(text**-0.5 * torch.randn(text, embed))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, images):
        x = self.conv(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.cls.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1) + self.vpos
        return self.ln_post(self.visual(self.ln_pre(x))[:, 0]) @ self.vproj

    def encode_text(self, text):
        x = self.ln_text(self.text(self.tokens(text) + self.tpos))
        return x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)] @ self.tproj

    def forward(self, images, text):
        i = F.normalize(self.encode_image(images), dim=-1)
        t = F.normalize(self.encode_text(text), dim=-1)
        logits = self.logit_scale.exp() * i @ t.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


model = CLIP().cuda()
decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
other = [p for n, p in model.named_parameters() if p.ndim < 2]
groups = [{"params": decay, "weight_decay": 0.2}, {"params": other, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
pool = [torch.randn(BATCH, 3, IMAGE, IMAGE).pin_memory() for _ in range(2)]
times = []
for step in range(14):
    t0 = time.perf_counter()
    images = pool[step % 2].to("cuda", non_blocking=True)
    text = torch.randint(1, 49408, (BATCH, CONTEXT)).to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(images, text)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    torch.cuda.synchronize()
    times.append(time.perf_counter() - t0)
print(f"loss {loss.item():.3f} scale {model.logit_scale.exp().item():.2f}")
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
