"""A vision transformer of timm with its own optimizer factory, in bf16 autocast."""

import timm
import torch
from timm.optim import create_optimizer_v2

model = timm.create_model("vit_base_patch16_224", num_classes=1000).cuda()
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
loss_of = torch.nn.CrossEntropyLoss()
for _ in range(4):
    images, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_of(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
