"""Writes what transformers says of its own configurations, counts and defaults.

    python tests/huggingface_counts.py

`tests/data/huggingface_counts.json.gz` has how many parameters it counts, and
`src/lumos/data/huggingface_defaults.json` the sizes that a configuration may leave out.

Every type that transformers trains as a decoder, alone or as part of a model of images, is built on meta tensors from
its default configuration. Decoders are built again in small, with each switch the other way and with other layers
dense. It takes half a minute; the tests read the tables alone.
"""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lumos.data_files import read_table

TABLE = Path(__file__).parent / "data" / "huggingface_counts.json.gz"
DEFAULTS = Path(__file__).parents[1] / "src/lumos/data/huggingface_defaults.json"

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
_ALSO = ("sliding_window", "attention_chunk_size", "intermediate_size_mlp")  # sizes that are used in combination
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
    write_defaults()
    TABLE.write_bytes(gzip.compress(json.dumps(rows, separators=(",", ":")).encode(), mtime=0))
    print(f"{len(rows)} configurations of {len({row['config']['model_type'] for row in rows})} types in {TABLE}")


def write_defaults() -> None:
    """Write the sizes that every configuration class has where a file says nothing; none that follow from others."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables = read_table("huggingface_configs.toml")
    groups = [group for key in ("sizes", "latent_sizes", "expert_sizes") for group in tables[key].values()]
    names = [*(name for group in groups for name in group), *tables["combined"]["sparse_steps"], *_ALSO]
    found = {}
    for kind in sorted(kind for family in tables["families"] for kind in family["types"]):
        try:
            usual = CONFIG_MAPPING[kind]().to_dict()
            other = CONFIG_MAPPING[kind](num_attention_heads=6, hidden_size=1536).to_dict()
        except (KeyError, TypeError, ValueError, StrictDataclassError):  # unknown, or its sizes have to fit together
            continue
        given = ("num_attention_heads", "hidden_size")
        sizes = {name: usual[name] for name in names if usual.get(name) is not None}
        found[kind] = {name: size for name, size in sizes.items() if name in given or other.get(name) == size}
    source = {
        "source": f"configuration classes of transformers {__version__}",
        "script": "tests/huggingface_counts.py",
        "date": datetime.now(UTC).date().isoformat(),
    }
    rows = ",\n".join(f'  "{kind}": {json.dumps(sizes)}' for kind, sizes in found.items() if sizes)
    DEFAULTS.write_text(f'{{\n "sources": {json.dumps({"types": source})},\n "types": {{\n{rows}\n }}\n}}\n')


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
