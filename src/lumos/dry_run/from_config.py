"""`lumos predict config.json` from the model's own code, run on fake tensors; no GPU, no weights.

This module needs no torch; `predict_config` imports it when it is called.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lumos.dry_run.dry_prediction import STAND_IN, DryPrediction, dry_prediction
from lumos.dry_run.recorded_step import Recording
from lumos.errors import InputError, LumosError, OptionError
from lumos.prediction.bill import Tariff
from lumos.setup.importers.any_file import json_value
from lumos.setup.importers.foreign_file import text_of
from lumos.setup.messages import place_of
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_plain, read_setup_with_notes

_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "cluster.gpus": (1,), "train.precision": ("bf16", "fp16", "fp32"),
    "train.recompute": ("none", "full"), "train.framework": ("pytorch",), "train.mode": ("pretrain",),
    "train.optimizer": ("adamw", "adam", "sgd"), "train.attention": ("",), "train.cuda_graphs": (False,),
    "train.imbalance": (1.0,), "train.capacity": (0.0,),
}  # fmt: skip
_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "stage_layers")
_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip
_COUNTED_WITHIN = 0.03
INSTALL = "pip install 'lumos-sim[dry]' predicts it from the model's own code"


def why_not(path: Path, changes: Sequence[str]) -> str | None:
    """The reason for predicting a config.json from its sizes; None if it is dry-run, "" for any other file."""
    if _config_of(path) is None:
        return ""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return f"predicted from its sizes: {INSTALL}"
    given = read_plain(None, changes).overrides
    if given.get("model"):
        return (
            "predicted from its sizes, because model keys are set: a dry run takes the model as its config.json has it"
        )
    for key in _DEGREES:  # before the stand-in for the model is checked, which has no heads and layers to divide
        value = (given.get("parallel") or {}).get(key, 1)
        if value not in (0, 1):
            return f"predicted from its sizes: dry runs do not cover parallel.{key} = {value}"
    setup = _setup(path, changes).setup
    if setup.cluster.accelerator.is_cpu:
        return "predicted from its sizes: dry runs have no costs for CPUs"
    for key, values in _SUPPORTED.items():
        section, name = key.split(".")
        value = getattr(getattr(setup, section), name)
        if value not in values:
            return f"predicted from its sizes: dry runs do not cover {key} = {str(value).lower()}"
    return None


def count_doubt(path: Path, setup: Setup) -> str:
    """The contradiction between transformers' own count and the keys of a config.json; "" if there is none."""
    config = _config_of(path)
    if config is None or find_spec("torch") is None or find_spec("transformers") is None:
        return ""
    if any(isinstance(part, dict) and "model_type" in part for part in config.values()):
        return ""  # a setup covers only one part of such a model
    os.environ.update(_OFFLINE)
    from lumos.dry_run.huggingface_model import parameters

    try:
        counted = parameters(config)
    except Exception:  # the model's own code may raise anything
        return ""
    read = setup.model.parameters(setup.train.seq)
    if abs(read / max(counted, 1) - 1) <= _COUNTED_WITHIN:
        return ""
    return (
        f"transformers counts {counted / 1e9:.4g} B parameters, but the keys that are known add up to "
        f"{read / 1e9:.4g} B: it cannot be described; for one GPU, leave out cluster.gpus, and its own code is dry-run"
    )


def _config_of(path: Path) -> dict[str, Any] | None:
    """The contents of a Hugging Face config.json; None for any other file."""
    if path.suffix.lower() != ".json":
        return None
    try:
        content = json_value(text_of(path))
    except InputError:
        return None
    return content if isinstance(content, dict) and isinstance(content.get("model_type"), str) else None


def _setup(path: Path, changes: Sequence[str]) -> Any:
    config = _config_of(path) or {}
    plain = read_plain(None, changes)._replace(where=place_of(path))
    name = str(config.get("_name_or_path") or config["model_type"])[:100]
    train = plain.sections.get("train") or {}
    if "vocab_size" not in config and "seq" not in train and "image_size" in config:
        train = {"seq": 1} | train  # a model that sees images has no sequence length to set
    return plain.checked({**plain.sections, "train": train, "model": STAND_IN | {"name": name}})


def predict_config(
    path: Path, changes: Sequence[str], tariff: Tariff, recording: Recording | None = None
) -> DryPrediction:
    """Predict a config.json from the model's own code, recorded now or before: the step is the same on every GPU."""
    reading = _setup(path, changes)
    recording = recording or record_config(path, changes)
    return dry_prediction(recording, reading.setup, (*reading.notes, *_notes(reading.setup.train.precision)), tariff)


def record_config(path: Path, changes: Sequence[str]) -> Recording:
    """Record a step of the model of a config.json on fake tensors."""
    config = _config_of(path)
    if config is None:
        raise InputError(f"{place_of(path)}: not the config.json of a model")
    return _recorded(config, _setup(path, changes).setup, path, changes)


def _notes(precision: str) -> tuple[str, ...]:
    import torch
    import transformers

    return (
        f"dry run of the model's own code: transformers {transformers.__version__}, torch {torch.__version__}, "
        "fused AdamW, attention as PyTorch chooses it on this GPU, experts equally loaded; weights, gradients and "
        f"moments are in {precision}{'' if precision == 'fp32' else ', without master weights in fp32'}",
    )


def _recorded(config: dict[str, Any], setup: Setup, path: Path, changes: Sequence[str]) -> Recording:
    """Record the step; one line reports what the model's code does that fake tensors cannot follow."""
    os.environ.update(_OFFLINE)
    from lumos.dry_run.huggingface_model import builder
    from lumos.dry_run.record import record_step

    train, where = setup.train, place_of(path)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what is raised, too
    try:
        build = builder(config, train.seq, train.micro_batch, train.precision, train.recompute == "full")
        return record_step(build, train.optimizer, train.microbatches, train.compile)
    except LumosError as error:
        raise OptionError(f"{where}: {error}; or {_alternative(path, changes)}") from None
    except TimeoutError as error:
        raise OptionError(f"{where}: {error}; {_alternative(path, changes)}") from None
    except Exception as error:  # the model's own code may raise anything
        line = next((text.strip() for text in str(error).splitlines() if text.strip()), "")
        longest = config.get("max_position_embeddings")
        if isinstance(longest, int) and 0 < longest < train.seq:
            line = f"train.seq = {train.seq} is more than its max_position_embeddings = {longest} ({line[:80]})"
        raise OptionError(
            f"{where}: the dry run of {config['model_type'][:60]} failed: {type(error).__name__}: {line[:200]}; "
            f"{_alternative(path, changes)}"
        ) from None


def _alternative(path: Path, changes: Sequence[str]) -> str:
    """What to do instead of a dry run: predict from the sizes of the model, if a setup can describe it."""
    try:
        read_setup_with_notes(path, changes)
    except LumosError as error:  # other errors can be fixed with --set
        if "cannot be described" in str(error):
            return "dry-run a training script of it: lumos capture --dry -- COMMAND"
    return "add --describe to predict from the sizes of the model"
