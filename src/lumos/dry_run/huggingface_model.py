"""A Hugging Face model from its config.json, with a batch to train it on. Needs torch and transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
import transformers
from torch.nn.modules.module import register_module_module_registration_hook

from lumos.dry_run.gpu_functions import trace_only_compiled_code
from lumos.dtypes import TORCH_NAMES
from lumos.errors import OptionError

_FIRST = {  # what decides between several classes of one architecture
    "speech": transformers.AutoModelForSpeechSeq2Seq, "both": transformers.AutoModelForSeq2SeqLM,
    "decoder": transformers.AutoModelForCausalLM, "encoder": transformers.AutoModelForMaskedLM,
    "image": transformers.AutoModelForImageClassification, "mixed": transformers.AutoModelForImageTextToText,
}  # fmt: skip

_MOST_MODULES = 200_000  # a dry run takes as many operators, and most modules run several
_LIST_LENGTHS = {"layer": 1 << 14, "depth": 1 << 14, "label": 1 << 20}  # part of a key: the largest value


def builder(
    config: dict[str, Any], seq: int, batch: int, dtype: str = "bf16", recompute: bool = False
) -> Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor], int]]:
    """The function that `record_step` calls: the model of a configuration, its loss on one batch, and its tokens."""
    made = _config(config)
    task, kind = _class_for(made)

    def build() -> tuple[torch.nn.Module, Callable[[], torch.Tensor], int]:
        torch_dtype = getattr(torch, TORCH_NAMES[dtype if dtype in ("bf16", "fp16") else "fp32"])
        model = _made(kind, made, torch_dtype)
        model.train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False, "determinism_check": "none"})
        trace_only_compiled_code()
        inputs = _batch(made, task, seq, batch, torch_dtype)
        return model, lambda: model(**inputs).loss, _tokens(inputs)

    return build


def parameters(config: dict[str, Any]) -> int:
    """The number of parameters of a configuration's model, counted on tensors without memory."""
    made = _config(config)
    with torch.device("meta"):
        model = _made(_class_for(made)[1], made, torch.bfloat16)
    return sum(weight.numel() for weight in model.parameters())


def _made(kind: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """A model without values for its weights, because initialisers may draw until they fit."""
    with _without_values(), _of_few_modules():
        model: torch.nn.Module = kind.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def _without_values() -> Any:
    for name in ("transformers.initialization", "transformers.modeling_utils"):
        skip = getattr(sys.modules.get(name), "no_init_weights", None)
        if skip is not None:
            return skip()
    return nullcontext()


def _of_few_modules() -> Any:
    """Reject a model whose modules would take minutes and gigabytes to make; what is returned is a context manager."""
    made = count(1)

    def check(*_: object) -> None:
        if next(made) > _MOST_MODULES:
            raise OptionError(f"its model has more than {_MOST_MODULES:,} modules, too many for a dry run")

    return register_module_module_registration_hook(check)


def _refuse_endless_lists(config: dict[str, Any]) -> None:
    """transformers makes a list as long as these say before anything else sees them."""
    for key, value in config.items():
        if isinstance(value, dict):
            _refuse_endless_lists(value)
        for part, most in _LIST_LENGTHS.items() if isinstance(value, int) else ():
            if part in key.casefold() and value > most:
                raise OptionError(f"{key[:60]} = {value} is more than {most:,}")


def _config(config: dict[str, Any]) -> Any:
    _refuse_endless_lists(config)
    try:
        made = transformers.AutoConfig.for_model(**_without_code(config))
        made.architectures = made.architectures or []  # which transformers goes through where it has several classes
        if getattr(made, "is_encoder_decoder", False):
            for name in ("decoder_start_token_id", "pad_token_id"):
                if getattr(made, name, None) is None:
                    setattr(made, name, 0)
        return made
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error).partition("Should contain")[0].strip()[:160]
        raise OptionError(
            f"model_type = {str(config.get('model_type'))[:60]!r}: transformers {transformers.__version__} does not "
            f"take this config.json ({reason}): install a newer one"
        ) from None


def _without_code(value: Any) -> Any:
    """A configuration without the modules that it or its parts name, which transformers would offer to run."""
    if isinstance(value, dict):
        return {key: _without_code(part) for key, part in value.items() if key != "auto_map"}
    return [_without_code(part) for part in value] if isinstance(value, list) else value


def _class_for(config: Any) -> tuple[str, Any]:
    """The Auto class that trains models of this configuration: the one it names, or that of its architecture."""
    named = (getattr(config, "architectures", None) or [""])[0]
    possible = {key: kind for key, kind in _FIRST.items() if type(config) in kind._model_mapping}
    for key, kind in possible.items():
        classes = kind._model_mapping[type(config)]
        if named in [one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,))]:
            return key, kind
    order = list(_FIRST)
    if not getattr(config, "is_decoder", False):  # encoders have a class to generate with, too
        order = ["speech", "both", "encoder", "decoder", "image", "mixed"]
    if not getattr(config, "is_encoder_decoder", False):
        order = [key for key in order if key not in ("speech", "both")]
    for key in order:
        if key in possible:
            return key, possible[key]
    raise OptionError(f"model_type = {config.model_type!r}: no class of transformers trains it with a loss of its own")


def _batch(config: Any, task: str, seq: int, batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs and labels, by what the model reads."""
    ids = torch.zeros(batch, seq, dtype=torch.long)
    if task == "speech" and hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", 1500)
        return {"input_features": torch.zeros(batch, config.num_mel_bins, frames, dtype=dtype), "labels": ids}
    if task == "image":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.zeros(batch, getattr(config, "num_channels", 3), height, width, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
    return {"input_ids": ids, "labels": ids}


def _tokens(inputs: dict[str, torch.Tensor]) -> int:
    return int(inputs["input_ids"].numel() if "input_ids" in inputs else inputs["labels"].numel())
