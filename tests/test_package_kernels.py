"""Kernels of packages that transformers calls if they are installed: estimated, named, and not the reference code."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

from lumos.dry_run.huggingface_model import builder
from lumos.dry_run.package_kernels import KERNELS
from lumos.dry_run.record import record_step
from lumos.dry_run.recorded_step import Recording
from lumos.program.op import UNSEEN

SIZES = {"hidden_size": 256, "vocab_size": 1000, "num_hidden_layers": 2}
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "mamba2": (
        {"state_size": 64, "num_heads": 8, "head_dim": 64, "n_groups": 1, "expand": 2, "chunk_size": 64},
        {"mamba_chunk_scan_combined", "causal_conv1d_fn"},
    ),
    "mamba": ({"state_size": 16}, {"selective_scan_fn", "causal_conv1d_fn"}),
    "qwen3_next": (
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"chunk_gated_delta_rule", "causal_conv1d_fn"},
    ),
}


def step_of(model: str, seq: int) -> Recording:
    return record_step(builder({"model_type": model, **SIZES, **MODELS[model][0]}, seq, 1))


def works(recording: Recording) -> list[Any]:
    return [op for op in recording.ops if UNSEEN in op.options]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_kernels_of_packages_run_in_both_passes_and_grow_with_the_sequence(model: str) -> None:
    shorter, longer = step_of(model, 256), step_of(model, 512)
    if not works(shorter):
        pytest.skip("this release of transformers has no references that name their kernels, or has the packages")
    named = {option.removeprefix("of=") for op in works(shorter) for option in op.options if option.startswith("of=")}
    assert named == {f"{name}{way}" for name in MODELS[model][1] for way in ("", "_backward")}
    assert {op.phase for op in works(shorter)} == {"forward", "backward"}
    assert all(any(name in text for text in shorter.assumptions) for name in MODELS[model][1])
    assert len(longer.ops) == len(shorter.ops)  # no loop over tokens or chunks in Python
    once, twice = (sum(t.bytes for op in works(step) for t in op.outputs) for step in (shorter, longer))
    assert once < twice <= 2.01 * once  # linear in the length
    assert longer.peak_bytes < 2.5 * shorter.peak_bytes


def test_matmuls_of_a_chunked_scan_do_not_depend_on_how_often_the_state_is_passed_on() -> None:
    import torch

    def flops(chunk: int) -> int:
        x, b = torch.empty(2, 1024, 8, 64, device="meta"), torch.empty(2, 1024, 1, 128, device="meta")
        given = {"hidden_states": x, "B": b, "chunk_size": chunk}
        return sum(2 * one.times * one.m * one.n * one.k for one in KERNELS["mamba_chunk_scan_combined"].matmuls(given))

    states = 2 * 2 * 2 * 1024 * 8 * 64 * 128  # both ways between tokens and states, whatever the chunks
    assert flops(64) - states == pytest.approx((flops(128) - states) / 2)  # inside chunks: tokens times the chunk
