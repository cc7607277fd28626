"""Whisper-small on made-up log-mel features and transcripts, everything in bf16."""

import json
import statistics
import time

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import WhisperConfig, WhisperForConditionalGeneration

BATCH, TARGET, STEPS, FRAMES = 8, 128, 14, 3000

config = WhisperConfig(
    d_model=768,
    encoder_layers=12,
    decoder_layers=12,
    encoder_attention_heads=12,
    decoder_attention_heads=12,
    encoder_ffn_dim=3072,
    decoder_ffn_dim=3072,
    vocab_size=51865,
    dropout=0.1,
)


def main():
    torch.manual_seed(42)
    model = WhisperForConditionalGeneration(config).to("cuda", dtype=torch.bfloat16)
    model.train()
    features = torch.randn(4 * BATCH, 80, FRAMES)
    labels = torch.randint(0, 50000, (4 * BATCH, TARGET))
    labels[:, TARGET * 3 // 4 :] = -100
    loader = DataLoader(TensorDataset(features, labels), batch_size=BATCH, shuffle=True, num_workers=2, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times, step = [], 0
    while step < STEPS:
        for mel, text in loader:
            start = time.perf_counter()
            mel = mel.to("cuda", dtype=torch.bfloat16, non_blocking=True)
            text = text.to("cuda", non_blocking=True)
            optimizer.zero_grad()
            loss = model(input_features=mel, labels=text).loss
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            step += 1
            if step == STEPS:
                break
    print("loss", loss.item())
    print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
