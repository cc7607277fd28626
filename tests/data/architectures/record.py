"""Record one step of small models of many architectures on the CPU, for tests/test_infer_architectures.py.

    python3 tests/data/architectures/record.py [NAME …]

Every trace beside this file is what torch.profiler (record_shapes=True) wrote, without the operators and arguments that
inference does not look at. NAME@3 accumulates gradients over 3 micro-batches. Needs torch and transformers.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule

Loss = Callable[[], Tensor]
Made = tuple[nn.Module, Loss]

HERE = Path(__file__).parent
KEPT = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|matmul|_grouped_mm|_softmax|topk|_?scaled_dot_product\w*attention\w*|nll_loss_forward|"
    r"embedding|add_?|convolution)$|torch::autograd::AccumulateGrad$|Optimizer\.step#|ProfilerStep"
)
NODE = "autograd::engine::evaluate_function"
COMMON = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0, "vocab_size": 1000}
LLAMA = COMMON | {"intermediate_size": 224, "num_key_value_heads": 2}
MIXTRAL = COMMON | {
    "intermediate_size": 160,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN = LLAMA | {"head_dim": 32, "moe_intermediate_size": 40, "num_experts": 16, "num_experts_per_tok": 4}
SHARED = LLAMA | {
    "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
DEEPSEEK = COMMON | {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 224, "moe_intermediate_size": 40,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "q_lora_rank": 56, "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}  # fmt: skip
GPT_OSS = COMMON | {
    "intermediate_size": 80, "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
FALCON = {key: COMMON[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")} | {
    "multi_query": True, "parallel_attn": True, "bias": False, "new_decoder_architecture": False, "alibi": False,
}  # fmt: skip


def language(
    name: str, config: dict[str, Any], head: str = "ForCausalLM", attention: str = "", experts: str = ""
) -> Made:
    """A language model of transformers on 3 × 40 tokens."""
    found = getattr(hf, f"{name}Config")(**config)
    if attention:
        found._attn_implementation = attention
    if experts:
        found._experts_implementation = experts
    model = getattr(hf, f"{name}{head}")(found).to(torch.bfloat16).train()
    ids = torch.randint(1, 900, (3, 40))
    return model, lambda: model(input_ids=ids, labels=ids).loss


def classifier() -> Made:
    """BERT with 5 classes for a text."""
    config = hf.BertConfig(intermediate_size=384, num_labels=5, **COMMON)
    model = hf.BertForSequenceClassification(config).to(torch.bfloat16).train()
    ids, classes = torch.randint(1, 900, (3, 40)), torch.randint(0, 5, (3,))
    return model, lambda: model(input_ids=ids, labels=classes).loss


def vit() -> Made:
    """A vision transformer: 16 patches and a class token of 6 images, 10 classes."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384}
    config = hf.ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes)
    model = hf.ViTForImageClassification(config).to(torch.bfloat16).train()
    images, classes = torch.randn(6, 3, 32, 32, dtype=torch.bfloat16), torch.randint(0, 10, (6,))
    return model, lambda: model(pixel_values=images, labels=classes).loss


def t5() -> Made:
    """An encoder of 40 tokens and a decoder of 20, two layers each."""
    config = hf.T5Config(
        vocab_size=1000, d_model=96, d_kv=24, d_ff=224, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).to(torch.bfloat16).train()
    ids, labels = torch.randint(1, 900, (3, 40)), torch.randint(1, 900, (3, 20))
    return model, lambda: model(input_ids=ids, labels=labels).loss


def llava() -> Made:
    """A vision tower of 3 layers before a Llama of 3 layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision = hf.CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**LLAMA), image_token_id=999)
    model = hf.LlavaForConditionalGeneration(config).to(torch.bfloat16).train()
    ids = torch.randint(1, 900, (3, 48))
    ids[:, 4:20] = 999
    images = torch.randn(3, 3, 32, 32, dtype=torch.bfloat16)
    return model, lambda: model(input_ids=ids, pixel_values=images, labels=ids).loss


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False).to(base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False).to(base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


def lora(names: tuple[str, ...], checkpointed: bool = False) -> Made:
    """A frozen Llama with adapters beside these layers."""
    model, loss = language("Llama", LLAMA)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, Adapter(child))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, loss


class Block(nn.Module):
    """A layer of a diffusion transformer, with adaptive layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.output = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.adapt = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        shift, scale, gate, shift2, scale2, gate2 = self.adapt(condition)[:, None].chunk(6, -1)
        qkv = self.qkv(functional.layer_norm(x, (width,)) * (1 + scale) + shift)
        query, key, value = qkv.reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + gate * self.output(attended)
        return x + gate2 * self.mlp(functional.layer_norm(x, (width,)) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer on patches of 8 × 8 latents."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.patch, self.label, self.output = nn.Conv2d(4, width, 2, 2), nn.Embedding(11, width), nn.Linear(width, 16)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x, condition = self.patch(latents).flatten(2).transpose(1, 2), self.time(times) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        return self.output(x)


def dit() -> Made:
    model, dtype = DiT().to(torch.bfloat16), torch.bfloat16
    inputs = torch.randn(5, 4, 8, 8, dtype=dtype), torch.randn(5, 256, dtype=dtype), torch.randint(0, 10, (5,))
    return model, lambda: functional.mse_loss(model(*inputs), torch.zeros(5, 16, 16, dtype=dtype))


MODELS: dict[str, Callable[[], Made]] = {
    "mixtral": lambda: language("Mixtral", MIXTRAL),
    "mixtral_loop@2": lambda: language("Mixtral", MIXTRAL, experts="eager"),
    "qwen3_moe": lambda: language("Qwen3Moe", QWEN),
    "qwen2_moe": lambda: language("Qwen2Moe", SHARED),
    "deepseek_v3": lambda: language("DeepseekV3", DEEPSEEK),
    "gpt_oss": lambda: language("GptOss", GPT_OSS, attention="eager"),
    "gemma2": lambda: language("Gemma2", LLAMA | {"head_dim": 32}, attention="eager"),
    "falcon": lambda: language("Falcon", FALCON),
    "phi3": lambda: language("Phi3", LLAMA),
    "bert": lambda: language("Bert", COMMON | {"intermediate_size": 384}, head="ForMaskedLM"),
    "bert_classes": classifier,
    "vit@2": vit,
    "dit@3": dit,
    "t5": t5,
    "llava": llava,
    "lora": lambda: lora(("q_proj", "v_proj")),
    "lora_checkpointed": lambda: lora(("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"), checkpointed=True),
}


def record(name: str, path: Path) -> None:
    """One profiled step, after one that is not."""
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    count = int(name.partition("@")[2] or 1)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    plan = schedule(wait=0, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as profiler:
        for _ in range(2):
            for _ in range(count):
                loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            if profiler.step_num == 1:
                break
            profiler.step()
    profiler.export_chrome_trace(str(path))


def slim(trace: dict[str, Any]) -> dict[str, Any]:
    """Only what inference looks at: some operators, and the nodes of the backward pass around them."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
    kept = [e for e in events if KEPT.match(e["name"])]
    starts = sorted(e["ts"] for e in kept)
    nodes = [e for e in events if e["name"].startswith(NODE) and _holds(e, starts)]
    keys = ("Input Dims", "Input type", "Sequence number")
    slimmed = []
    for event in sorted(kept + nodes, key=lambda e: e["ts"]):
        arguments = event.get("args", {})
        found = {key: arguments[key] for key in keys if key in arguments and NODE not in event["name"]}
        if event["name"] == "aten::topk":
            found["Concrete Inputs"] = arguments.get("Concrete Inputs")
        times = {"ts": round(event["ts"] - starts[0] + 1e3, 1), "dur": round(event["dur"], 1)}
        slimmed.append({key: event[key] for key in ("ph", "cat", "name", "pid", "tid")} | times | {"args": found})
    return {"schemaVersion": 1, "record_shapes": 1, "traceEvents": slimmed}


def _holds(node: dict[str, Any], starts: list[float]) -> bool:
    return any(node["ts"] <= start < node["ts"] + node["dur"] for start in starts)


def main(names: list[str]) -> None:
    hf.logging.set_verbosity_error()
    for name in names or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "trace.json"
            record(name, raw)
            text = json.dumps(slim(json.loads(raw.read_text())), separators=(",", ":"))
        path = HERE / f"{name.partition('@')[0]}.json.gz"
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
