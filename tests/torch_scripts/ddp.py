"""DistributedDataParallel around a stack of Transformer layers, as one of the ranks of `--world`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layers = [nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True) for _ in range(8)]
model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(5):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(8, 1024, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}, {torch.cuda.max_memory_allocated() >> 20} MiB")
