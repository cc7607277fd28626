"""LoRA on a frozen 1.3B Llama-like model: base weights in bf16, adapters in fp32."""

import json
import statistics
import time

import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, SEQ, RANK, ALPHA = 2, 2048, 16, 32


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: int, p: float = 0.05):
        super().__init__()
        self.base, self.scaling, self.dropout = base, alpha / r, nn.Dropout(p)
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features, device=device, dtype=torch.float32) * 0.01)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r, device=device, dtype=torch.float32))

    def forward(self, x):
        result = self.base(x)
        h = self.dropout(x.to(self.lora_A.dtype))
        return result + ((h @ self.lora_A.t()) @ self.lora_B.t() * self.scaling).to(result.dtype)


def add_lora(module: nn.Module, names: tuple[str, ...]) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name in names:
            setattr(module, name, LoRALinear(child, RANK, ALPHA))
        else:
            add_lora(child, names)


config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
for p in model.parameters():
    p.requires_grad_(False)
add_lora(model, ("q_proj", "k_proj", "v_proj", "o_proj"))
model.train()
trainable = [p for p in model.parameters() if p.requires_grad]
print(f"trainable {sum(p.numel() for p in trainable):,} of {sum(p.numel() for p in model.parameters()):,}")
optimizer = torch.optim.AdamW(trainable, lr=2e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
times = []
for step in range(14):
    begin = time.perf_counter()
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQ)).to("cuda")
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 0.3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - begin)
print(f"loss {loss.item():.3f}")
print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))
