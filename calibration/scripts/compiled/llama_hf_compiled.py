"""A Llama of transformers in bf16, compiled."""

import json
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, CONTEXT = 4, 2048
config = LlamaConfig(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=10, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32000, use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
times = []
for _ in range(14):
    t0 = time.perf_counter()
    ids = torch.randint(32000, (BATCH, CONTEXT), device="cuda")
    compiled(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - t0)
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
