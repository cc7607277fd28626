"""Fine-tunes BERT-base on sentence classification: autocast, clipping, linear warm-up."""

import json
import statistics
import time

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

BATCH = 64
SEQ = 384
STEPS = 14


def make_dataset():
    ids = torch.randint(1000, 30000, (BATCH * STEPS, SEQ))
    lengths = torch.randint(SEQ // 4, SEQ + 1, (BATCH * STEPS, 1))
    mask = (torch.arange(SEQ)[None, :] < lengths).long()
    labels = torch.randint(0, 4, (BATCH * STEPS,))
    return TensorDataset(ids * mask, mask, labels)


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = BertForSequenceClassification(BertConfig(num_labels=4)).to(device)
    model.train()
    loader = DataLoader(make_dataset(), batch_size=BATCH, shuffle=True, num_workers=2, pin_memory=True)
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=STEPS)
    times = []
    for step, (ids, mask, labels) in enumerate(loader):
        start = time.perf_counter()
        ids, mask, labels = (t.to(device, non_blocking=True) for t in (ids, mask, labels))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step} loss {out.loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
