"""Trainer of transformers, which runs on accelerate: a Llama of 200 million parameters."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes))
tokens = torch.randint(0, 32000, (64, 1024))
rows = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=8, bf16=True, report_to=[],
    save_strategy="no", logging_steps=1,
)  # fmt: skip
Trainer(model=model, args=arguments, train_dataset=rows).train()
