"""Writes `tests/data/huggingface_counts.json.gz`: how many parameters transformers counts for its own configurations.

    python tests/huggingface_counts.py

Every type that transformers trains as a decoder, alone or as part of a model of images, is built on meta tensors from
its default configuration. Decoders are built again in small, with each switch the other way and with other layers
dense. It takes half a minute; the test reads the table alone.
"""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "data" / "huggingface_counts.json.gz"

# What a default configuration lacks before a model can be built from it.
_COMPLETE: Mapping[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
_SMALL = {
    "num_hidden_layers": 6, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 3072, "moe_intermediate_size": 512, "vocab_size": 4096, "n_layer": 6, "n_embd": 1024,
    "n_head": 16, "n_inner": 3072, "ffn_dim": 3072, "n_layers": 6, "d_model": 1024, "n_heads": 16, "num_layers": 6,
}  # fmt: skip
_DENSE = {
    "decoder_sparse_step": 2, "interleave_moe_layer_step": 2, "moe_layer_freq": 2, "moe_layer_interval": 2,
    "first_k_dense_replace": 2, "num_dense_layers": 2, "moe_layer_start_index": 2, "mlp_only_layers": [1, 3],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"], "num_key_value_heads": 1,
    "shared_expert_intermediate_size": 1024, "shared_intermediate_size": 1024, "head_dim": 96,
}  # fmt: skip
_OTHER_PARTS = (
    "vision", "visual", "audio", "image_", "video_tower", "projector", "merger", "newline", "connector", "vqmodel",
    "aligner", "resampler", "perceiver", "sam_", "high_res", "qformer", "query_tokens", "language_projection", "vit.",
    "gen_", "generation_", "multi_modal", "abstractor", "vte",
)  # fmt: skip
_LEFT_OUT = (
    "vision_config", "audio_config", "vq_config", "qformer_config", "id2label", "label2id", "transformers_version",
)  # fmt: skip


def main() -> None:
    """Build every model and write the table."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.filterwarnings("ignore")
    from transformers.models.auto import modeling_auto as auto

    decoders, mixed = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    rows = []
    for name in [*decoders, *(name for name in mixed if name not in decoders)]:
        row = _row(name, {}, name in decoders)
        if row is None:
            print(f"{name} has no default configuration that can be built")
            continue
        rows.append(row)
        if name in decoders and "text_config" not in row["config"]:
            built = (_row(name, changes, True) for changes in _variants(row["config"]))
            rows += [one for one in built if one is not None]
    TABLE.write_bytes(gzip.compress(json.dumps(rows, separators=(",", ":")).encode(), mtime=0))
    print(f"{len(rows)} configurations of {len({row['config']['model_type'] for row in rows})} types in {TABLE}")


def _variants(base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    small = {key: size for key, size in _SMALL.items() if key in base}
    yield small
    for key, value in base.items():
        if isinstance(value, bool):
            yield small | {key: not value}
        elif key in _DENSE:
            yield small | {key: _DENSE[key]}


def _row(name: str, changes: Mapping[str, Any], is_decoder: bool) -> dict[str, Any] | None:
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    kind = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModelForImageTextToText
    try:
        config = transformers.CONFIG_MAPPING[name](**(dict(_COMPLETE.get(name, {})) | dict(changes)))
        with torch.device("meta"), no_init_weights():
            model = kind.from_config(config)
    except Exception:  # the model's own code may raise anything
        return None
    model.tie_weights()
    stated = _stated(json.loads(config.to_json_string(use_diff=False)))
    parts = _OTHER_PARTS if "text_config" in stated else ()
    sizes = {key: weight.numel() for key, weight in model.named_parameters()}
    counted = sum(size for key, size in sizes.items() if not any(part in key for part in parts))
    return {"changes": dict(changes), "config": stated, "parameters": counted}


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what no language model is made of."""
    kept = {}
    for key, value in config.items():
        if value is not None and key not in _LEFT_OUT and not key.startswith(("_", "output_", "return_")):
            kept[key] = _stated(value) if key == "text_config" else value
    return kept


if __name__ == "__main__":
    main()
