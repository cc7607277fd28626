"""T5-small on made-up translation pairs: bf16 autocast, AdamW, linear decay."""

import json
import statistics
import time

import torch
from transformers import T5Config, T5ForConditionalGeneration

BATCH, SOURCE, TARGET, STEPS = 16, 256, 64, 16

config = T5Config(
    vocab_size=32128,
    d_model=512,
    d_ff=2048,
    d_kv=64,
    num_layers=6,
    num_heads=8,
    dropout_rate=0.1,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config).to("cuda")
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=STEPS)
times = []
for step in range(STEPS):
    start = time.perf_counter()
    source = torch.randint(2, 32000, (BATCH, SOURCE), device="cuda")
    mask = torch.ones_like(source)
    mask[:, SOURCE - 32 :] = 0
    target = torch.randint(2, 32000, (BATCH, TARGET), device="cuda")
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        loss = model(input_ids=source, attention_mask=mask, labels=target).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.3f} norm {norm.item():.2f}")
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
