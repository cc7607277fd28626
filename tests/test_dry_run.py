"""Dry runs: a model's own training step on fake tensors. Laws of the recording, prices, and measured architectures."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lumos.cli.main import app
from lumos.costs.kernel_work import matrix_operator, runs_kernel, work_of
from lumos.costs.model_costs import corrections
from lumos.data_files import read_table
from lumos.errors import LumosError
from lumos.program.op import Op, Tensor

installed = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not installed, reason="needs torch and transformers")

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024,
}  # fmt: skip
# Steps measured on an H200 (ms, peak bytes), from calibration/architectures_h200.json.xz.
MEASURED = {
    "gpt_neox": ({"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 16,
                  "vocab_size": 50304}, 4096, 2, 92.83, 16393503232),
    "bert": ({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
              "vocab_size": 30522, "max_position_embeddings": 512}, 512, 32, 99.69, 18988294656),
}  # fmt: skip


def tensor(*shape: int, dtype: str = "bf16", strides: tuple[int, ...] | None = None) -> Tensor:
    dense = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
    return Tensor(shape, dtype, dense if strides is None else strides, {"bf16": 2, "fp32": 4}[dtype])


def op(name: str, *inputs: Tensor, out: Tensor, allocates: bool = True) -> Op:
    return Op(f"aten.{name}.default", inputs, (out,), "forward", allocates=allocates)


def record(
    config: dict[str, Any], seq: int = 256, batch: int = 2, recompute: bool = False, microbatches: int = 1
) -> Any:
    from lumos.dry_run.huggingface_model import builder
    from lumos.dry_run.record import record_step

    return record_step(builder(config, seq, batch, recompute=recompute), microbatches=microbatches)


def predicted(tmp_path: Path, config: dict[str, Any], *changes: str, **options: Any) -> dict[str, Any]:
    """The answer of `lumos predict config.json --set … --json`, or the error."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    settings = [word for change in ("cluster.gpu=h200", *changes) for word in ("--set", change)]
    done = CliRunner().invoke(app, ["predict", str(path), *settings, *options.get("more", ()), "--json"])
    if done.exception is not None:
        raise done.exception
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def flops(ops: list[Op]) -> float:
    found = [matrix_operator(one) for one in ops if runs_kernel(one)]
    return sum(work.flops for work in found if work is not None and work.is_matrix)


# ---------------------------------------------------------------------- prices
def test_the_layout_of_a_matmul_follows_from_strides() -> None:
    x, w, out = tensor(64, 32), tensor(32, 16), tensor(64, 16)
    weight = tensor(32, 16, strides=(1, 32))
    transposed = tensor(64, 32, strides=(1, 64))
    kinds = [matrix_operator(op("mm", *operands, out=out)) for operands in ((x, weight), (x, w), (transposed, w))]
    assert [kind and kind.kind for kind in kinds] == ["gemm_tn", "gemm_nn", "gemm_nt"]
    assert all(kind and kind.shape == (64, 16, 32) for kind in kinds)


def test_element_wise_kernels_are_vectorised_only_over_dense_operands_of_one_dtype() -> None:
    x = tensor(64, 32)
    assert work_of(op("mul", x, x, out=x)).family == "pointwise.dense"
    assert work_of(op("mul", x, tensor(32), out=x)).family == "pointwise.strided"
    assert (
        work_of(op("mul", x, tensor(64, 32, dtype="fp32"), out=tensor(64, 32, dtype="fp32"))).family
        == "pointwise.mixed"
    )
    assert work_of(op("clone", tensor(64, 32, strides=(1, 64)), out=x)).family == "copy.transposed"


def test_views_and_empty_tensors_cost_the_gpu_nothing() -> None:
    x = tensor(64, 32)
    assert not runs_kernel(op("view", x, out=x, allocates=False))
    assert not runs_kernel(op("empty_like", x, out=x))
    assert runs_kernel(op("add_", x, x, out=x, allocates=False))


def test_every_family_names_its_source_and_error() -> None:
    table = read_table("aten_costs.json")
    assert set(table["held_out_error_pct"]) <= set(table["families"]) | set(corrections())
    assert {"families", "transfer", "misaligned_tflops"} <= set(table["sources"])


# ---------------------------------------------------------------------- laws of the recording
@needs_transformers
def test_matmuls_of_a_plain_decoder_are_six_flops_a_parameter_and_token() -> None:
    found = record(LLAMA | {"num_hidden_layers": 4}, seq=64)
    layers_and_head = found.parameters - 1024 * 512  # the embedding is a lookup
    assert flops(found.ops) == pytest.approx(6 * layers_and_head * found.tokens, rel=0.03)


@needs_transformers
def test_twice_the_layers_are_twice_the_operators() -> None:
    two, four, six = (len(record(LLAMA | {"num_hidden_layers": n}).ops) for n in (2, 4, 6))
    assert six - four == four - two > 0


@needs_transformers
def test_checkpointing_lowers_the_peak_and_repeats_the_forward_pass() -> None:
    config = LLAMA | {"num_hidden_layers": 6}
    plain, recomputed = record(config, 1024), record(config, 1024, recompute=True)
    assert recomputed.peak_bytes < 0.8 * plain.peak_bytes
    assert flops(recomputed.ops) == pytest.approx(flops(plain.ops) * 4 / 3, rel=0.1)


@needs_transformers
@pytest.mark.parametrize("batch", [1, 2])
def test_masks_that_a_gpu_run_leaves_out_are_left_out(batch: int) -> None:
    found = record(LLAMA | {"model_type": "gemma2", "sliding_window": 4096, "head_dim": 64}, batch=batch)
    assert not [op for op in found.ops if op.name.startswith("aten.where")]


@needs_transformers
def test_a_compiled_model_runs_fewer_kernels_and_holds_less(tmp_path: Path) -> None:
    eager, compiled = (predicted(tmp_path, LLAMA, "train.seq=256", f"train.compile={on}") for on in ("false", "true"))
    assert compiled["memory_gib"]["activations"] < eager["memory_gib"]["activations"]
    assert compiled["step_ms"] < eager["step_ms"]
    assert any("fused" in row["name"] for row in compiled["operators"])


@needs_transformers
def test_functions_for_torchscript_run_as_python() -> None:
    torch = pytest.importorskip("torch")
    from torch.nn import functional

    from lumos.dry_run.record import recorded

    def attend(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x) * torch.tensor(2.0)

    calls = []
    for function in (lambda: attend, lambda: torch.jit.script(attend)):
        with recorded() as recorder:
            function()(torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda"))
        calls.append([op.name for op in recorder.ops])
    assert calls[0] == calls[1] != []
    assert torch.jit._state._enabled


@needs_transformers
def test_memory_after_a_step_is_what_it_was_before() -> None:
    recording = record(LLAMA)
    assert recording.allocated[-1] == sum(recording.alive.values())
    assert recording.peak_bytes > recording.allocated[-1]


@needs_transformers
def test_microbatches_repeat_both_passes_and_not_the_optimizer() -> None:
    one, three = record(LLAMA), record(LLAMA, microbatches=3)
    assert three.tokens == 3 * one.tokens
    assert flops(three.ops) == 3 * flops(one.ops)
    assert sum("adamw" in one.name for one in three.ops) == 1


# ---------------------------------------------------------------------- measured architectures
@needs_transformers
@pytest.mark.parametrize("name", MEASURED)
def test_step_and_memory_of_measured_architectures(name: str, tmp_path: Path) -> None:
    sizes, seq, batch, step_ms, peak = MEASURED[name]
    found = predicted(tmp_path, {"model_type": name} | sizes, f"train.seq={seq}", f"train.micro_batch={batch}")
    assert found["memory_gib"]["peak"] == pytest.approx(peak / 2**30, rel=0.01)
    assert found["step_ms"] == pytest.approx(step_ms, rel=0.06)
    low, high = found["interval_ms"]
    assert low < step_ms < high
    assert 0.2 < found["mfu"] < 0.8
    assert found["hfu"] == pytest.approx(found["mfu"], rel=0.05)
    assert any("dry run" in note for note in found["warnings"])
    parts = found["memory_gib"]
    assert sum(
        parts[key] for key in ("weights", "gradients", "optimizer", "activations", "framework")
    ) == pytest.approx(parts["peak"])
    assert sum(found["source"].values()) == pytest.approx(1.0)


# ---------------------------------------------------------------------- which models, and what happens otherwise
@needs_transformers
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit", "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2,
         "num_attention_heads": 3, "image_size": 64},
        {"model_type": "t5", "d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 32},
        {"model_type": "whisper", "d_model": 128, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_source_positions": 100},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_models_that_are_no_decoders(config: dict[str, Any], tmp_path: Path) -> None:
    found = predicted(tmp_path, config, "train.seq=64")
    assert found["step_ms"] > 0
    assert found["parameters"] > 1e5


@needs_transformers
def test_a_vision_transformer_is_built_without_drawing_its_weights() -> None:
    import transformers

    from lumos.dry_run.record import recorded

    with recorded() as recorder:
        config = transformers.ViTConfig(num_hidden_layers=1)
        transformers.ViTForImageClassification(config)
        assert "aten.where.self" not in {op.name for op in recorder.ops}


@needs_transformers
def test_a_model_type_that_is_not_known_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(LumosError, match=r"no_such_model.*--describe") as caught:
        predicted(tmp_path, LLAMA | {"model_type": "no_such_model"}, "train.seq=64")
    assert "\n" not in str(caught.value)


@needs_transformers
def test_a_failing_dry_run_of_what_cannot_be_described_does_not_offer_to_describe_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bert = LLAMA | {"model_type": "bert", "max_position_embeddings": 128, "type_vocab_size": 2}
    with pytest.raises(LumosError, match=r"train\.seq = 256 is more than its max_position_embeddings = 128") as caught:
        predicted(tmp_path, bert, "train.seq=256")
    assert str(caught.value).endswith("lumos capture --dry -- COMMAND")
    assert "fake_tensor.py" not in capfd.readouterr().err


@needs_transformers
@pytest.mark.parametrize(
    "change", ["cluster.gpus=2", "train.cuda_graphs=true", "model.layers=3", "train.precision=fp8"]
)
def test_what_a_dry_run_does_not_cover_is_described_and_says_so(change: str, tmp_path: Path) -> None:
    found = predicted(tmp_path, LLAMA, "train.seq=64", change)
    assert any("predicted from its sizes" in note for note in found["warnings"])


@needs_transformers
@pytest.mark.parametrize("change", ["tp=2", "pp=2", "cp=2", "dp=4", "stage_layers=[1,1]"])
def test_what_divides_the_model_divides_the_one_of_the_config(change: str, tmp_path: Path) -> None:
    changes = ["parallel.pp=2"] if "stage" in change else []
    found = predicted(tmp_path, LLAMA, "train.seq=64", f"parallel.{change}", *changes)
    assert any("predicted from its sizes: dry runs do not cover parallel." in note for note in found["warnings"])


@needs_transformers
def test_describe_asks_for_the_description(tmp_path: Path) -> None:
    found = predicted(tmp_path, LLAMA, "train.seq=64", more=["--describe"])
    assert not any("dry run" in note for note in found["warnings"])


@needs_transformers
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels"])
def test_a_config_makes_no_endless_lists(key: str, tmp_path: Path) -> None:
    with pytest.raises(LumosError, match=rf"{key} = 1099511627776 is more than [\d,]+; or add --describe"):
        predicted(tmp_path, LLAMA | {key: 1 << 40}, "train.seq=64")


def test_a_model_of_too_many_modules_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumos.dry_run import huggingface_model

    monkeypatch.setattr(huggingface_model, "_MOST_MODULES", 20)
    with pytest.raises(LumosError, match="more than 20 modules, too many for a dry run"):
        huggingface_model.parameters(LLAMA)


def test_modules_that_parts_of_a_config_name_are_not_offered_to_run() -> None:
    from lumos.dry_run.huggingface_model import _config

    part = {"model_type": "clip_vision_model", "auto_map": {"AutoModel": "planted.Model"}}
    config = _config({"model_type": "clip", "auto_map": {"AutoConfig": "planted.Config"}, "vision_config": part})
    assert "auto_map" not in json.dumps(config.to_dict())


def test_without_torch_or_transformers_a_config_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumos.dry_run.from_config.find_spec", lambda name: None)
    found = predicted(tmp_path, LLAMA, "train.seq=64")
    assert any("lumos-sim[dry]" in note for note in found["warnings"])
    with pytest.raises(LumosError, match=r"lumos-sim\[dry\]"):
        predicted(tmp_path, {"model_type": "vit", "hidden_size": 64, "image_size": 64}, "train.seq=64")
