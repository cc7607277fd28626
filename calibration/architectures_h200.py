"""Trains one step of many Hugging Face architectures on one GPU: clean step, peak memory, and GPU time by operator.

    python3 calibration/architectures_h200.py OUT.json SECONDS

The configurations are small versions of published architectures, written here: the truth to hold dry runs against.
Each is built with random weights in bf16, trained with fused AdamW, measured without a profiler, and then
profiled for one step, of which the GPU time by aten operator and input shapes is kept.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers

SMALL: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 14,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "olmo2": {
        "model_type": "olmo2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 100352,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 14,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
    },
    "phi": {
        "model_type": "phi",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "vocab_size": 51200,
    },
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "vocab_size": 65024,
        "alibi": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "vocab_size": 50304,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_layer": 12,
        "n_head": 25,
        "vocab_size": 50257,
        "n_positions": 2048,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "word_embed_proj_dim": 2048,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 8,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
    },
    "stablelm": {
        "model_type": "stablelm",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 100352,
    },
    "cohere": {
        "model_type": "cohere",
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 128000,
    },
    "granite": {
        "model_type": "granite",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49155,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 2048, "n_layer": 10, "n_head": 16, "vocab_size": 128000},
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "olmoe": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "vocab_size": 129280,
    },
    "bert": {
        "model_type": "bert",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "vit": {
        "model_type": "vit",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
    },
    "t5": {
        "model_type": "t5",
        "d_model": 1024,
        "d_ff": 2816,
        "num_layers": 12,
        "num_heads": 16,
        "d_kv": 64,
        "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu",
    },
    "whisper": {
        "model_type": "whisper",
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "vocab_size": 51865,
    },
    "mamba": {
        "model_type": "mamba",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "vocab_size": 50280,
        "state_size": 16,
    },
}
BATCH: dict[str, tuple[int, int]] = {
    "bert": (32, 512),
    "vit": (128, 224),
    "t5": (8, 512),
    "whisper": (8, 448),
    "mamba": (2, 512),
    "gpt2": (4, 1024),
    "opt": (4, 2048),
}


def build(name: str, config: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model and a batch for it."""
    batch, seq = BATCH.get(name, (2, 4096))
    made = transformers.AutoConfig.for_model(**config)
    kind = {
        "bert": transformers.AutoModelForMaskedLM,
        "vit": transformers.AutoModelForImageClassification,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "whisper": transformers.AutoModelForSpeechSeq2Seq,
    }.get(name, transformers.AutoModelForCausalLM)
    with torch.device("cuda"):
        model = kind.from_config(made, dtype=torch.bfloat16)
    ids = torch.randint(0, 1000, (batch, seq), device="cuda")
    if name == "vit":
        return model, {
            "pixel_values": torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16),
            "labels": torch.zeros(batch, dtype=torch.long, device="cuda"),
        }
    if name == "whisper":
        return model, {
            "input_features": torch.randn(batch, 80, 3000, device="cuda", dtype=torch.bfloat16),
            "labels": ids,
        }
    return model, {"input_ids": ids, "labels": ids}


def profiled(step: Any, most: int = 150) -> list[dict[str, Any]]:
    """GPU time of one step by operator and input shapes, the longest first."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as found:
        step()
        torch.cuda.synchronize()
    rows = [
        {"op": e.key, "shapes": str(e.input_shapes), "calls": e.count, "us": round(e.self_device_time_total, 1)}
        for e in found.key_averages(group_by_input_shape=True)
        if e.self_device_time_total > 0 and e.key.startswith("aten::")
    ]
    return sorted(rows, key=lambda row: -row["us"])[:most]


def measure(name: str, config: dict[str, Any]) -> dict[str, Any]:
    model, batch = build(name, config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times: list[float] = []
    for index in range(13):
        torch.cuda.synchronize()
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    back_to_back = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    back_to_back = (time.perf_counter() - back_to_back) / 5
    return {
        "name": name,
        "config": config,
        "batch": {k: [list(v.shape), str(v.dtype)] for k, v in batch.items()},
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention": model.config._attn_implementation,
        "step_s_median": statistics.median(times[3:]),
        "step_s": [round(t, 6) for t in times],
        "back_to_back_s": back_to_back,
        "peak_mem_alloc": peak,
        "peak_mem_reserved": reserved,
        "operators": profiled(step),
    }


def main(output: str, seconds: str) -> None:
    stop = time.monotonic() + float(seconds)
    found: list[dict[str, Any]] = []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    for name, config in SMALL.items():
        if time.monotonic() > stop:
            print("time is up before", name)
            break
        began = time.monotonic()
        try:
            row = measure(name, config)
            print(
                f"{name:12s} {row['parameters'] / 1e9:6.2f} B {1e3 * row['step_s_median']:8.2f} ms "
                f"{row['peak_mem_alloc'] / 2**30:7.2f} GiB {row['attention']} {time.monotonic() - began:.0f} s",
                flush=True,
            )
        except Exception as error:  # one architecture must not end the others
            row = {"name": name, "config": config, "error": f"{type(error).__name__}: {error}"[:500]}
            print(name, row["error"], flush=True)
        found.append(row)
        gc.collect()
        torch.cuda.empty_cache()
        with open(output, "w") as file:
            json.dump({"about": about, "results": found}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
