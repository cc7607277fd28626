"""Families: what a Hugging Face `model_type` says about a model that its config.json does not spell out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_GPT = {"gated": False, "tied": True}
_GPT_ROTARY = {"gated": False, "positions": "rotary", "tied": False}
_GEMMA = {"gated": True, "activation": "gelu", "tied": True}
_COHERE = {"gated": True, "norm": "layer", "parallel_residual": True, "tied": True}
_LLAMA_LIKE = """
    llama mistral ministral mixtral phi3 granite granitemoe internlm internlm2 baichuan deepseek deepseek_v2 deepseek_v3
    kimi_k2 exaone minicpm glm glm4 glm4_moe ernie4_5 ernie4_5_moe seed_oss mimo aquila yi xverse helium internlm3
    granitemoeshared orion
"""

# Keys of [model], for the types that are decoder-only transformers. Whether the MLP is gated is never guessed.
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: {"gated": True} for name in _LLAMA_LIKE.split()}
    | {
        "llama4_text": {"gated": True, "shared_experts": 1},
        "qwen": {"gated": True, "qkv_bias": True},
        "qwen2": {"gated": True, "qkv_bias": True},
        "qwen2_vl": {"gated": True, "qkv_bias": True},
        "qwen2_5_vl": {"gated": True, "qkv_bias": True},
        "qwen2_5_vl_text": {"gated": True, "qkv_bias": True},
        "qwen2_moe": {"gated": True, "qkv_bias": True},
        "qwen3": {"gated": True, "qk_norm": True},
        "qwen3_moe": {"gated": True, "qk_norm": True},
        "olmo": {"gated": True, "norm": "layer"},
        "qwen3_vl_text": {"gated": True, "qk_norm": True},
        "qwen3_vl_moe_text": {"gated": True, "qk_norm": True},
        "hunyuan_v1_dense": {"gated": True, "qk_norm": True},
        "hunyuan_v1_moe": {"gated": True, "qk_norm": True},
        "exaone4": {"gated": True, "qk_norm": True},
        "smollm3": {"gated": True, "tied": True},
        "minicpm3": {"gated": True, "tied": True},
        "chatglm": {"gated": True, "qkv_bias": True, "activation": "silu"},
        "phimoe": {"gated": True, "norm": "layer", "qkv_bias": True},
        "olmo2": {"gated": True, "qk_norm": True},
        "olmo3": {"gated": True, "qk_norm": True},
        "olmoe": {"gated": True, "qk_norm": True},
        "gemma": _GEMMA,
        "gemma2": _GEMMA,
        "gemma3_text": _GEMMA | {"qk_norm": True},
        "cohere": _COHERE,
        "cohere2": _COHERE,
        "stablelm": {"gated": True, "norm": "layer"},
        "dbrx": {"gated": True, "norm": "layer"},
        "gpt_oss": {"gated": True, "bias": True},
        "gpt2": _GPT,
        "gpt_neo": _GPT,
        "gpt_bigcode": _GPT,
        "opt": _GPT | {"activation": "relu"},
        "bloom": _GPT | {"positions": "alibi"},
        "mpt": _GPT | {"positions": "alibi", "bias": False},
        "falcon": _GPT_ROTARY | {"bias": False, "parallel_residual": True, "tied": True},
        "gpt_neox": _GPT_ROTARY | {"parallel_residual": True},
        "gptj": _GPT_ROTARY | {"parallel_residual": True},
        "codegen": _GPT_ROTARY | {"parallel_residual": True},
        "phi": _GPT_ROTARY | {"parallel_residual": True},
        "starcoder2": _GPT_ROTARY | {"tied": True},
        "nemotron": _GPT_ROTARY | {"bias": False, "activation": "relu2"},
        "arcee": _GPT_ROTARY | {"bias": False, "norm": "rms", "activation": "relu2"},
        "persimmon": _GPT_ROTARY | {"activation": "relu2", "qk_norm": True},
    }
)

_OTHERS = {
    "an encoder": """
        bert roberta xlm-roberta distilbert albert electra deberta deberta-v2 mpnet modernbert camembert longformer
        big_bird nomic_bert clip_text_model siglip_text_model""",
    "an encoder with a decoder": """
        t5 mt5 umt5 longt5 bart mbart pegasus marian m2m_100 blenderbot led encoder-decoder vision-encoder-decoder
        prophetnet t5gemma""",
    "a model of speech or sound": """
        whisper wav2vec2 hubert speech_to_text musicgen encodec seamless_m4t bark vits""",
    "a model of images": """
        vit deit beit swin swinv2 convnext resnet dinov2 detr segformer sam clip siglip blip vilt clip_vision_model
        siglip_vision_model vit_mae yolos mobilenet_v2""",
    "a state-space or recurrent model, or a hybrid with one": """
        mamba mamba2 falcon_mamba rwkv jamba zamba zamba2 bamba nemotron_h qwen3_next recurrent_gemma granitemoehybrid
        xlstm retnet lfm2 falcon_h1""",
}
OTHER_KINDS: Mapping[str, str] = MappingProxyType(
    {name: kind for kind, names in _OTHERS.items() for name in names.split()}
)
