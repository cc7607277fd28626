"""The setup of a traced run is inferred whatever the architecture: experts, latent attention, images, adapters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lumos.analysis.replay import replay
from lumos.errors import OptionError
from lumos.read.job import read_job
from lumos.setup.setup_files import read_plain
from lumos.traced.infer import Inferred
from lumos.traced.infer.completion import changed, complete
from lumos.traced.infer.infer import infer
from support import header, op
from test_inference import Step

FOLDER = Path(__file__).parent / "data/architectures"
TEXT = {"train.seq": 40, "train.micro_batch": 3, "train.microbatches": 1, "train.recompute": "none"}
MODEL = {"layers": 3, "hidden": 96, "heads": 4, "head_dim": 24, "kv_heads": 2, "vocab": 1000, "tied": False}


def text(gated: bool = True, **model: Any) -> dict[str, Any]:
    """A language model of 3 × 40 tokens, as record.py has them, where nothing else is stated."""
    return TEXT | {f"model.{key}": value for key, value in (MODEL | {"gated": gated} | model).items()}


def image(seq: int, batch: int, microbatches: int) -> dict[str, Any]:
    found = text(gated=False, kv_heads=4, ffn=384)
    sizes = {"train.seq": seq, "train.micro_batch": batch, "train.microbatches": microbatches}
    return {key: value for key, value in found.items() if key not in ("model.vocab", "model.tied")} | sizes


EXACT: dict[str, dict[str, Any]] = {
    "mixtral": text(experts=8, top_k=2, expert_ffn=160),
    "mixtral_loop": text(experts=8, top_k=2, expert_ffn=160) | {"train.microbatches": 2},
    "qwen3_moe": text(head_dim=32, experts=16, top_k=4, expert_ffn=40),
    "qwen2_moe": text(experts=16, top_k=4, expert_ffn=40, shared_experts=2),
    "deepseek_v3": text(
        layers=4, kv_heads=4, head_dim=48, ffn=224, experts=16, top_k=4, expert_ffn=40, shared_experts=2,
        dense_layers=1, q_lora_rank=56, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24,
    ),
    "gpt_oss": text(experts=8, top_k=2, expert_ffn=80),
    "gemma2": text(head_dim=32, ffn=224, tied=True),
    "falcon": text(gated=False, kv_heads=1, ffn=384, tied=True),
    "phi3": text(ffn=224),
    "bert": text(gated=False, kv_heads=4, ffn=384, tied=True),
    "bert_classes": image(40, 3, 1),
    "vit": image(17, 6, 2),
    "dit": image(16, 5, 3),
    "lora": {key: value for key, value in text(ffn=224).items() if key != "model.tied"} | {"train.mode": "lora"},
    "lora_checkpointed": {key: value for key, value in text(ffn=224).items() if key != "model.tied"}
    | {"train.mode": "lora", "train.recompute": "full"},
    "t5": {
        "train.micro_batch": 3, "train.microbatches": 1, "train.recompute": "none", "model.vocab": 1000,
        "model.tied": True,
    },
    "llava": {
        "train.micro_batch": 3, "train.microbatches": 1, "train.recompute": "none", "model.vocab": 1000,
        "model.tied": False,
    },
}  # fmt: skip
ROUGH: dict[str, dict[str, Any]] = {
    "bert_classes": {"model.vocab": 1000, "model.tied": False},  # rows of the embedding; it has no such head
    "vit": {"model.vocab": 10, "model.tied": False},  # classes
    "dit": {"model.vocab": 16, "model.tied": False},  # values of a patch
    "lora": {"model.tied": False},
    "lora_checkpointed": {"model.tied": False},
    "t5": {
        "model.layers": 6, "model.hidden": 96, "model.heads": 4, "model.kv_heads": 4, "model.head_dim": 24,
        "model.ffn": 224, "model.gated": False, "train.seq": 40,
    },
    "llava": {
        "model.layers": 6, "model.hidden": 96, "model.heads": 4, "model.kv_heads": 2, "model.head_dim": 24,
        "model.ffn": 224, "model.gated": True, "train.seq": 48,
    },
}  # fmt: skip


@cache
def inferred(name: str) -> dict[str, Inferred]:
    return infer(replay(read_job(FOLDER / f"{name}.json.gz")))


@pytest.mark.parametrize("name", EXACT)
def test_everything_that_an_architecture_shows_is_inferred(name: str) -> None:
    wanted = EXACT[name] | {"train.optimizer": "adamw", "train.precision": "bf16", "train.compile": False}
    found = {key: one.value for key, one in inferred(name).items() if not one.rough}
    assert {key: value for key, value in found.items() if key.startswith(("model.", "train."))} == wanted


@pytest.mark.parametrize("name", EXACT)
def test_what_stands_for_something_else_is_marked_as_rough(name: str) -> None:
    assert {key: one.value for key, one in inferred(name).items() if one.rough} == ROUGH.get(name, {})


@pytest.mark.parametrize("name", EXACT)
def test_a_trace_alone_is_a_whole_setup_and_another_batch_can_be_asked_for(name: str) -> None:
    setup = complete(inferred(name), read_plain(None)).setup
    wanted = changed(inferred(name), read_plain(None, ["train.micro_batch=9"])).setup
    assert (setup.train.micro_batch, wanted.train.micro_batch) == (EXACT[name]["train.micro_batch"], 9)
    assert wanted.model == setup.model


def test_every_architecture_that_was_recorded_is_tested() -> None:
    assert {path.name for path in FOLDER.glob("*.gz")} == {f"{name}.json.gz" for name in EXACT}


# Rough values


def test_a_rough_value_cannot_be_changed_unless_a_file_states_it(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as refused:
        changed(inferred("vit"), read_plain(None, ["model.vocab=100", "train.micro_batch=9"]))
    assert str(refused.value) == (
        "model.vocab = 100: the trace shows only roughly 10 (columns of the head or loss; no tokens are looked up): "
        "to change it, state the traced run's model.vocab in a SETUP file, "
        "as in lumos predict SETUP --from PATH --set …"
    )
    file = tmp_path / "vit.toml"
    file.write_text("[model]\nvocab = 10\n")
    wanted = changed(inferred("vit"), read_plain(file, ["model.vocab=100"]), read_plain(file))
    assert wanted.setup.model.vocab == 100


def test_a_rough_value_fills_a_gap_and_contradicts_no_file(tmp_path: Path) -> None:
    file = tmp_path / "llava.toml"
    file.write_text("[model]\nlayers = 3\n")
    setup = complete(inferred("llava"), read_plain(file)).setup
    assert (setup.model.layers, setup.model.hidden) == (3, 96)


def test_an_exact_value_beside_rough_ones_still_contradicts_a_file(tmp_path: Path) -> None:
    file = tmp_path / "vit.toml"
    file.write_text("[train]\nmicro_batch = 4\n")
    with pytest.raises(OptionError, match=r"train.micro_batch = 4, and the trace shows 6"):
        complete(inferred("vit"), read_plain(file))


# Steps written by hand


class Moe(Step):
    """A step of layers with experts, in grouped matmuls unless told otherwise."""

    def sparse_layer(self, experts: int = 8, chosen: int = 2, wide: int = 640, rows: int = 0) -> None:
        for columns in (256, 256, 256):
            self.matmul(256, columns)
        self.call("aten::_scaled_dot_product_flash_attention", [[2, 4, 256, 64]] * 3)
        self.matmul(256, 256)
        self.matmul(256, experts)
        self.call("aten::topk", [[self.rows, experts], [], [], [], []])
        routed = rows or chosen * self.rows
        self.call("aten::_grouped_mm", [[routed, 256], [experts, 256, 2 * wide], [experts]])
        self.call("aten::_grouped_mm", [[routed, wide], [experts, wide, 256], [experts]])


class Sharded(Step):
    """A step of DTensors on 4 ranks: every matmul of a whole weight holds one of its shard."""

    def split(self, inner: int, columns: int, by_rows: bool = False) -> None:
        whole = [[self.rows, inner], [inner, columns]]
        part = (inner // 4, columns) if by_rows else (inner, columns // 4)
        self.events.append(op("aten::mm", self.time - 1, 6, args={"Input Dims": whole}))
        self.matmul(*part)

    def dtensor_layer(self) -> None:
        for columns in (256, 128, 128):  # 8 heads of 32, which share 4 keys
            self.split(256, columns)
        self.call("aten::_scaled_dot_product_flash_attention", [[2, 2, 256, 32]] * 3)
        self.split(256, 256, by_rows=True)
        for columns in (640, 640):
            self.split(256, columns)
        self.split(640, 256, by_rows=True)


def test_experts_are_chosen_as_often_as_rows_are_more_than_tokens(tmp_path: Path) -> None:
    step = Moe()
    for _ in range(3):
        step.sparse_layer()
    step.end()
    found = step.inferred(tmp_path)
    assert (found["model.experts"], found["model.top_k"], found["model.expert_ffn"]) == (8, 2, 640)
    assert "model.ffn" not in found  # no layer is without experts


def test_a_number_of_chosen_experts_from_padded_rows_is_rough(tmp_path: Path) -> None:
    step = Moe()
    for _ in range(3):
        step.sparse_layer(rows=1100)
    step.end()
    found = step.inferred(tmp_path)
    assert (found["model.experts"], step.rough["model.top_k"]) == (8, 2)


def test_dense_layers_that_are_not_the_first_are_counted_roughly(tmp_path: Path) -> None:
    step = Moe()
    for _ in range(2):
        step.sparse_layer()
        step.layer((256, 256, 256), [2, 4, 256, 64], (1024, 1024), 1024)
    step.sparse_layer()
    step.end()
    found = step.inferred(tmp_path)
    assert (found["model.layers"], found["model.ffn"], found["model.expert_ffn"]) == (5, 1024, 640)
    assert step.rough["model.dense_layers"] == 2


def test_layers_without_attention_make_the_number_of_layers_rough(tmp_path: Path) -> None:
    step = Step()
    for _ in range(3):
        step.layer((256, 256, 256), [2, 4, 256, 64], (1024,), 1024)
        for inner, columns in ((256, 512), (512, 256), (256, 1024), (1024, 256)):  # a state-space layer and its MLP
            step.matmul(inner, columns)
    step.end()
    assert "model.layers" not in step.inferred(tmp_path)
    assert step.rough["model.layers"] == 3


def test_forward_passes_are_told_apart_by_the_backward_passes_between_them(tmp_path: Path) -> None:
    step = Step()  # without lookup, head or loss
    for _ in range(4):
        for _ in range(3):
            step.layer((256, 256, 256), [2, 4, 256, 64], (1024,), 1024)
        step.call("autograd::engine::evaluate_function: MseLossBackward0", [])
    found = step.inferred(tmp_path)
    assert (found["train.microbatches"], found["model.layers"]) == (4, 3)


def test_two_losses_of_one_backward_pass_are_one_micro_batch(tmp_path: Path) -> None:
    step = Step()
    for _ in range(4):
        step.layer((256, 256, 256), [2, 4, 256, 64], (1024,), 1024)
    for _ in range(2):
        step.call("aten::nll_loss_forward", [[2, 2], [2]])  # of texts for images, and of images for texts
    step.call("autograd::engine::evaluate_function: NllLossBackward0", [])
    found = step.inferred(tmp_path)
    assert (found["train.microbatches"], found["model.layers"]) == (1, 4)


def test_keys_that_dtensors_split_are_as_many_as_all_ranks_have(tmp_path: Path) -> None:
    step = Sharded()
    activation = step.rows * 256
    for _ in range(2):
        step.dtensor_layer()
        step.reduce("allreduce", (activation, activation), 4)
    found = step.inferred(tmp_path, header(rank=0, world_size=4))
    assert (found["parallel.tp"], found["model.heads"], found["model.kv_heads"]) == (4, 8, 4)


def test_the_batch_of_joint_attention_is_exact_and_its_length_rough(tmp_path: Path) -> None:
    step = Step()  # 2 × 256 tokens of an image, which attend to 44 tokens of text as well
    for _ in range(3):
        step.layer((256, 256, 256), [2, 4, 300, 64], (1024,), 1024)
    step.end()
    assert step.inferred(tmp_path)["train.micro_batch"] == 2
    assert step.rough["train.seq"] == 300


def test_windows_of_images_are_no_batch(tmp_path: Path) -> None:
    step = Step()
    step.call("aten::convolution", [[4, 3, 64, 64], [256, 3, 4, 4]])
    for _ in range(3):
        step.layer((256, 256, 256), [32, 4, 16, 64], (1024,), 1024)  # 8 windows of each of 4 images
    step.end()
    assert step.inferred(tmp_path).keys().isdisjoint({"train.micro_batch", "train.seq"})


def test_experts_behind_an_unknown_exchange_are_not_inferred(tmp_path: Path) -> None:
    step = Moe()
    for _ in range(2):
        step.sparse_layer()
        step.reduce("all_to_allv", (step.rows * 256, step.rows * 256), 4)
    step.end()
    found = step.inferred(tmp_path, header(rank=0, world_size=4))
    assert found.keys().isdisjoint({"model.experts", "model.top_k", "parallel.tp", "parallel.dp"})
    assert not step.rough
