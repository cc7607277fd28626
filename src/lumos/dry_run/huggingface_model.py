"""A Hugging Face model from its config.json, with a batch to train it on. Needs torch and transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

from lumos.errors import OptionError

_HEADS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification", "ForSpeechSeq2Seq", "LMHeadModel")
_KINDS = (
    transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForSpeechSeq2Seq, transformers.AutoModelForImageClassification, transformers.AutoModelForImageTextToText,
)  # fmt: skip


def builder(
    config: dict[str, Any], seq: int, batch: int, dtype: str = "bf16", recompute: bool = False
) -> Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor], int]]:
    """What `record_step` calls: the model of a configuration, its loss on one batch, and the tokens in it."""
    made = _config(config)
    kind = _class_for(made)

    def build() -> tuple[torch.nn.Module, Callable[[], torch.Tensor], int]:
        torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
        model = _made(kind, made, torch_dtype)
        model.train()
        if recompute:
            model.gradient_checkpointing_enable()
        _see_no_tracing()
        inputs = _batch(made, seq, batch, torch_dtype)
        return model, lambda: model(**inputs).loss, _tokens(inputs)

    return build


def _made(kind: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """With fused attention where the model has it, as on a GPU."""
    try:
        model: torch.nn.Module = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except (ValueError, ImportError):
        model = kind.from_config(config, dtype=dtype, attn_implementation="eager")
    return model


def _config(config: dict[str, Any]) -> Any:
    known = {key: value for key, value in config.items() if key != "auto_map"}
    try:
        return transformers.AutoConfig.for_model(**known)
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(f"model_type = {str(config.get('model_type'))[:60]!r}: transformers {transformers.__version__} does not know it ({str(error)[:120]}): install a newer one") from None


def _class_for(config: Any) -> Any:
    """The Auto class that trains models of this configuration."""
    for kind in _KINDS:
        if type(config) in kind._model_mapping:
            return kind
    raise OptionError(f"model_type = {config.model_type!r}: no class of transformers trains it with a loss of its own")


def _see_no_tracing() -> None:
    """transformers takes fake tensors for a compiler at work, and makes masks that it leaves out otherwise."""
    for name in ("transformers.masking_utils", "transformers.utils.import_utils", "transformers.utils"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "is_tracing"):
            module.is_tracing = lambda *_: False  # type: ignore[attr-defined]


def _batch(config: Any, seq: int, batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs and labels, by what the model reads."""
    ids = torch.zeros(batch, seq, dtype=torch.long)
    if hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", 1500)
        return {"input_features": torch.zeros(batch, config.num_mel_bins, frames, dtype=dtype), "labels": ids}
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        size = config.image_size
        pixels = torch.zeros(batch, getattr(config, "num_channels", 3), size, size, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
    return {"input_ids": ids, "labels": ids}


def _tokens(inputs: dict[str, torch.Tensor]) -> int:
    return int(inputs["input_ids"].numel() if "input_ids" in inputs else inputs["labels"].numel())
