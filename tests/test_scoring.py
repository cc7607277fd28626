"""Tables of measured runs: every row is predicted or refused with a reason, and errors are counted as a user would."""

from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos.cli import main as cli
from lumos.costs.hardware_model import encode
from lumos.costs.operator_model import cost_model
from lumos.errors import InputError, OptionError
from lumos.score.measured_runs import Run, read_rows, run_of, runs_of
from lumos.score.score import Score, rank_correlation, score
from lumos.setup.gpus import gpu_named

ROW = {
    "id": "llama", "source": "lab", "model_name": "Llama 8B", "n_layers": "32", "hidden": "4096", "ffn_hidden": "14336",
    "n_heads": "32", "n_kv_heads": "8", "head_dim": "128", "vocab": "128256", "seq_len": "8192", "gated_mlp": "true",
    "tied_embeddings": "false", "train_mode": "pretrain", "gpu": "H100", "gpu_mem_gb": "80", "gpus_per_node": "8",
    "n_gpus": "8", "precision": "bf16", "tp": "2", "pp": "1", "cp": "", "ep": "", "micro_batch": "1",
    "global_batch": "32", "framework": "NeMo", "step_time_s": "4.4", "recompute": "", "zero": "",
    "sequence_parallel": "", "interconnect_inter": "", "inter_gbps_per_gpu": "", "attention_impl": "",
    "overlap_or_graph_flags": "", "moe_experts": "", "moe_topk": "", "moe_ffn_hidden": "", "fsdp_shard": "",
    "vp_interleave": "",
}  # fmt: skip
NEEDED = (
    "n_layers", "hidden", "n_heads", "vocab", "seq_len", "n_gpus", "tp", "pp", "micro_batch", "global_batch"
)  # fmt: skip


def one(**changes: str) -> Run:
    """The run of a row with some columns changed."""
    return run_of(ROW | changes, "row 1")


def only(**changes: str) -> Score:
    """A table of one row."""
    return score([ROW | changes])


def reason(**changes: str) -> str:
    """Why a row is refused."""
    found = only(**changes)
    assert (found.rows, found.scored) == (1, ())
    ((name, why),) = found.refused
    assert name == "llama"
    assert "\n" not in why
    return why


def write_table(path: Path, rows: list[dict[str, str]], encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def width(found: Score) -> float:
    low, high = 1e3 * found.scored[0].low, 1e3 * found.scored[0].high
    return high / low


# What a row says


def test_a_row_becomes_the_setup_it_describes() -> None:
    run = one()
    assert (run.source, run.model, run.gpus, run.seconds) == ("lab", "Llama 8B", 8, 4.4)
    model, train, parallel, cluster = run.setup.model, run.setup.train, run.setup.parallel, run.setup.cluster
    assert (model.layers, model.kv_heads, model.ffn, model.gated) == (32, 8, 14336, True)
    assert (train.seq, train.microbatches, train.precision, train.framework) == (8192, 8, "bf16", "megatron")
    assert (parallel.tp, parallel.dp, parallel.zero, parallel.sequence_parallel) == (2, 4, 1, True)
    assert (cluster.gpu, cluster.gpus) == ("h100", 8)
    assert run.notes == ()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NeMo/Megatron-Core + TransformerEngine (MLPerf)", "megatron"),
        ("Megatron-LM 2021", "megatron-2021"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("llm-foundry", "llm-foundry"),
        ("nanotron v0.5", "nanotron"),
        ("GPT-NeoX", "neox"),
        ("torchtitan", "torchtitan"),
        ("fms-fsdp", "fms-fsdp"),
        ("DeepSpeed", "deepspeed"),
    ],
)
def test_frameworks_are_recognised(text: str, name: str) -> None:
    run = one(framework=text)
    assert run.setup.train.framework == name
    assert run.notes == ()


def test_a_release_that_differs_is_recognised_by_the_version_of_the_framework() -> None:
    assert one(framework="torchtitan", framework_version="9dec370 (2024)").setup.train.framework == "torchtitan-2024"
    assert one(framework="torchtitan", source="titan-2024-12").setup.train.framework == "torchtitan-2024"
    assert one(framework="torchtitan", framework_version="v0.2 (2025)").setup.train.framework == "torchtitan"
    assert one(framework="NeMo", framework_version="torchtitan 2024").setup.train.framework == "megatron"


@pytest.mark.parametrize(
    ("columns", "compiled"),
    [
        ({"compile": "true"}, True),
        ({"compile": "false", "notes": "torch.compile"}, False),
        ({"overlap_or_graph_flags": "FSDP + torch.compile + Float8"}, True),
        ({"framework_version": "no compile"}, False),
        ({"notes": "eager, without torch.compile"}, False),
        ({}, False),
    ],
)
def test_compilation_is_read_from_its_column_or_from_the_text(columns: dict[str, str], compiled: bool) -> None:
    assert one(framework="torchtitan", **columns).setup.train.compile is compiled


def test_a_board_is_as_the_row_states_it() -> None:
    stated = one(power_w="500", hbm_tb_s="2.4").setup.cluster
    assert (stated.power_w, stated.hbm_tb_s) == (500.0, 2.4)
    noted = one(notes="HBM2e with 2.4 TB/s, limited to 500 W").setup.cluster
    assert (noted.power_w, noted.hbm_tb_s) == (500.0, 2.4)
    of_96_gb = one(gpu_mem_gb="96").setup.cluster
    assert (of_96_gb.power_w, of_96_gb.hbm_tb_s) == (500.0, 2.4)
    assert (one().setup.cluster.power_w, one().setup.cluster.hbm_tb_s) == (None, None)


def test_selective_recomputation_is_what_the_framework_or_the_row_calls_it() -> None:
    def train(**columns: str) -> tuple[str, tuple[str, ...], int]:
        found = one(recompute="selective", **columns).setup.train
        return found.recompute, found.modules if found.recompute == "selective" else (), found.recompute_every

    assert train() == ("selective", ("core_attn",), 1)
    assert train(framework="torchtitan") == ("selective", ("operators",), 1)
    assert train(framework="torchtitan", activation_recompute="selective (every 3 layers)") == ("full", (), 3)
    assert train(framework="torchtitan", activation_recompute="selective layer") == ("full", (), 2)
    assert train(framework="fms-fsdp") == ("full", (), 2)
    assert one(recompute="selective", framework="fms-fsdp", mfu="0.6", hfu="0.7").setup.train.recompute_layers == 16


def test_the_row_says_how_gradients_are_reduced_and_which_collectives_are_overlapped() -> None:
    run = one(framework="torchtitan", overlap_or_graph_flags="async TP, no_sync, reduce_dtype=fp32", zero="3")
    assert (run.setup.parallel.tp_overlap, run.setup.parallel.no_sync) == (True, True)
    assert run.setup.train.reduce_precision == "fp32"
    foundry = one(framework="llm-foundry", overlap_or_graph_flags="mp_mode=PURE;act_cpu_offload=False")
    assert (foundry.setup.train.reduce_precision, foundry.setup.parallel.tp_overlap) == ("bf16", None)


MIXTURE = {
    "model_name": "qwen3-30b-a3b", "n_layers": "48", "hidden": "2048", "n_heads": "32", "n_kv_heads": "4",
    "head_dim": "128", "moe_experts": "128", "moe_topk": "8", "moe_ffn_hidden": "768", "ep": "8", "tp": "1", "pp": "1",
    "n_gpus": "8", "framework": "Megatron-Bridge/NeMo 26.04 NeMo Container", "precision": "mxfp8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"gpu": "B200"}, ("", None, False)),
        ({"gpu": "GB200"}, ("flex", None, False)),
        ({"gpu": "H100", "precision": "fp8"}, ("flex", None, False)),
        ({"gpu": "GB200", "framework": "Megatron-Bridge/NeMo 26.06 NeMo Container"}, ("flex", True, True)),
        ({"gpu": "GB200", "overlap_or_graph_flags": "alltoall; moe_a2a_overlap=1"}, ("all_to_all", True, False)),
        ({"gpu": "B200", "framework": "Megatron-LM", "notes": "with DeepEP"}, ("flex", None, False)),
        ({"gpu": "GB200", "framework": "Megatron-LM"}, ("", None, False)),
    ],
)
def test_tokens_reach_experts_as_the_row_says_or_as_its_suite_is_known_to_run(
    columns: dict[str, str], wanted: tuple[str, bool | None, bool]
) -> None:
    setup = one(**MIXTURE | columns).setup
    assert (setup.parallel.dispatcher, setup.parallel.ep_overlap, setup.train.cuda_graphs) == wanted


def test_what_no_column_states_is_that_of_the_model_that_the_row_names() -> None:
    assert one(**MIXTURE | {"gpu": "B200"}).setup.model.qk_norm
    assert not one(**MIXTURE | {"gpu": "B200", "hidden": "4096"}).setup.model.qk_norm, "another model of that name"
    latent = {"model_name": "deepseek-v3 (w/o MTP)", "hidden": "7168", "n_heads": "128", "n_kv_heads": "128",
              "moe_experts": "256", "moe_ffn_hidden": "2048", "n_layers": "61"}  # fmt: skip
    model = one(**MIXTURE | latent | {"gpu": "GB200"}).setup.model
    assert (model.kv_lora_rank, model.shared_experts, model.dense_layers, model.head_dim) == (512, 1, 3, 192)


def test_scales_of_rows_are_told_from_scales_of_tensors() -> None:
    assert one(precision="fp8-rowwise").setup.train.fp8_scaling == "row"
    assert one(precision="fp8-tensorwise").setup.train.fp8_scaling == one(precision="fp8").setup.train.fp8_scaling


def test_numbers_may_be_written_as_tables_write_them() -> None:
    run = one(n_gpus="8.0", zero="1.0", cp="0", tp=" 2 ", step_time_s=" 4.4 ")
    assert (run.gpus, run.setup.parallel.zero, run.setup.parallel.cp, run.seconds) == (8, 1, 1, 4.4)


@pytest.mark.parametrize(
    ("column", "text", "gbit"),
    [
        ("inter_gbps_per_gpu", "400", 400),
        ("interconnect_inter", "1600 Gbps per node", 200),
        ("interconnect_inter", "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s", 400),
        ("interconnect_inter", "Omni-Path 100, 4 links per node", 50),
    ],
)
def test_a_network_that_is_stated_counts(column: str, text: str, gbit: float) -> None:
    run = one(n_gpus="64", **{column: text})
    assert run.setup.cluster.inter_gb_s == pytest.approx(gbit / 8)
    assert run.notes == ()


def test_plain_pytorch_is_known_by_its_name() -> None:
    assert one(framework="PyTorch, transformers").setup.train.framework == "pytorch"
    assert one(framework="PyTorch").notes == ()
    assert one(framework="PyTorch FSDP2").setup.train.framework != "pytorch", "told apart by what stands for it"


@pytest.mark.parametrize("text", ["", "EFA", "IB NDR", "RoCE", "sockets"])
def test_a_bandwidth_that_is_not_stated_is_noted_with_what_is_assumed(text: str) -> None:
    notes = one(n_gpus="64", interconnect_inter=text).notes
    assert notes == ("the bandwidth between nodes is not stated: assuming 400 Gbit/s of h100",)
    assert one(n_gpus="8", interconnect_inter=text).notes == ()


@pytest.mark.parametrize(
    ("text", "fabric"),
    [
        ("", "infiniband"), ("IB NDR", "infiniband"), ("Infiniband, Ethernet", "infiniband"), ("EFA", "efa"),
        ("RoCE v2", "roce"), ("Slingshot 11", "slingshot"), ("tcpxo", "tcpxo"), ("GPUDirect-TCPXO", "tcpxo"),
        ("sockets", "sockets"), ("NET/Socket", "sockets"), ("TCP", "sockets"), ("TCP/IP over Ethernet", "sockets"),
        ("Ethernet 100G", "roce"), ("8x BlueField-3 B3140 400GbE", "roce"),
        ("8x ConnectX-7 400Gb/s, Management: 100Gb/s Ethernet NIC", "infiniband"),
    ],
)  # fmt: skip
def test_the_kind_of_network_that_a_row_names_counts(text: str, fabric: str) -> None:
    assert one(n_gpus="64", interconnect_inter=text).setup.cluster.fabric == fabric


def test_ethernet_may_be_either_of_two_networks_and_tcpxo_has_a_bandwidth_of_its_own() -> None:
    notes = one(n_gpus="64", interconnect_inter="Ethernet", inter_gbps_per_gpu="100").notes
    assert notes == ("Ethernet is not said to be RoCE or TCP: assuming RoCE",)
    *_, note = one(n_gpus="64", interconnect_inter="Ethernet 100G").notes
    assert note == "the bandwidth between nodes is that of a node or of a GPU: assuming 400 Gbit/s of h100"
    notes = one(n_gpus="64", interconnect_inter="tcpxo").notes
    assert notes == ("the bandwidth between nodes is not stated: assuming 200 Gbit/s of tcpxo",)


# What is not known


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"framework": "MyTrainer 3000"}, "'MyTrainer 3000' is predicted as pytorch"),
        ({"framework": "NeMo AutoModel (PyTorch FSDP2)"}, "predicted as torchtitan"),
        ({"framework": "MaxText"}, "predicted as torchtitan"),
        ({"framework": ""}, "framework"),
        ({"precision": "fp8-blockwise"}, "fp8-blockwise"),
        ({"precision": "bf16-mixed"}, "bf16-mixed"),
    ],
)
def test_what_is_not_known_is_noted_and_widens_the_interval(changes: dict[str, str], about: str) -> None:
    found = only(**changes)
    assert any(about in note for note in found.scored[0].notes)
    assert width(found) > 1.05 * width(only())


@pytest.mark.parametrize("gpu", ["MI300X", "MI325X", "MI355X", "B200", "L40S"])
def test_a_gpu_that_was_never_sampled_has_a_wider_interval(gpu: str) -> None:
    assert width(only(gpu=gpu)) > width(only(gpu="H200"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "MI999"}, "MI999"),
        ({"gpu": ""}, "GPU ''"),
        ({"precision": "int3"}, "int3"),
        ({"gpu": "A100", "precision": "fp8"}, "fp8"),
        ({"n_layers": "many"}, "n_layers 'many'"),
        ({"hidden": "nan"}, "hidden 'nan'"),
        ({"vocab": "inf"}, "vocab 'inf'"),
        ({"hidden": "1e300"}, "model.hidden"),
        ({"n_layers": "32.5"}, "n_layers '32.5'"),
        ({"n_heads": "-4"}, "model.heads"),
        ({"n_gpus": "-8"}, "cluster.gpus"),
        ({"n_gpus": "0"}, "n_gpus not stated"),
        ({"tp": "0"}, "tp not stated"),
        ({"tp": "-2"}, "parallel.tp"),
        ({"tp": "3"}, "parallel.tp = 3 does not divide"),
        ({"pp": "64", "n_gpus": "128"}, "parallel.pp = 64"),
        ({"global_batch": "7"}, "train.global_batch = 7"),
        ({"global_batch": "10000000000"}, "global_batch"),
        ({"zero": "seven"}, "zero 'seven'"),
        ({"zero": "7"}, "parallel.zero = 7"),
        ({"step_time_s": "fast"}, "step_time_s 'fast'"),
        ({"step_time_s": "0"}, "step_time_s '0'"),
        ({"step_time_s": "-1"}, "step_time_s '-1'"),
        ({"recompute": "sometimes"}, "train.recompute"),
        ({"train_mode": "guess"}, "train.mode"),
        ({"inter_gbps_per_gpu": "a lot"}, "inter_gbps_per_gpu 'a lot'"),
        ({"gpus_per_node": "eight"}, "gpus_per_node 'eight'"),
        ({"moe_experts": "8", "moe_topk": "9"}, "model.top_k = 9"),
        ({"ep": "64"}, "parallel.ep"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name(changes: dict[str, str], words: str) -> None:
    assert words in reason(**changes)


@pytest.mark.parametrize("column", NEEDED)
def test_what_is_needed_and_not_stated_is_named(column: str) -> None:
    assert f"{column} not stated" in reason(**{column: " "})


COLUMNS = sorted(set(ROW) - {"id"})
VALUES = st.sampled_from(
    ["", "0", "1", "-1", "2.5", "1e9", "1e400", "nan", "text", "true", "x" * 500, "８", "H100", "fp8", "\x00"]
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=4))
def test_no_row_is_too_absurd(changes: dict[str, str]) -> None:
    found = only(**changes)
    assert len(found.scored) + len(found.refused) == 1
    answer = found.as_dict()
    assert json.dumps(answer)
    assert all(item["reason"] for item in answer["refused"])
    assert all(math.isfinite(row["predicted"]) for row in found.table())


def test_a_row_that_is_too_large_to_simulate_is_refused_and_the_next_one_is_not() -> None:
    found = score([ROW | {"global_batch": "8388608", "tp": "1", "n_gpus": "1"}, ROW | {"id": "next"}])
    assert [name for name, _ in found.refused] == ["llama"]
    assert [item.id for item in found.scored] == ["next"]


# Files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it has no rows"),
        (b"id,gpu\n", "it has no rows"),
        (b"id,gpu\na,H100\n", "column n_layers is missing"),
        (b"\x80\x81\x82\xff" * 100, "not a CSV table"),
        (b"PK\x03\x04" + bytes(200), "table.csv"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_rows(path)


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(InputError, match="cannot be read"):
            read_rows(path)


@pytest.mark.parametrize("column", [*NEEDED, "gpu", "framework"])
def test_a_table_without_a_column_is_refused(tmp_path: Path, column: str) -> None:
    path = write_table(tmp_path / "table.csv", [{key: value for key, value in ROW.items() if key != column}])
    with pytest.raises(InputError, match=f"column {column} is missing"):
        read_rows(path)


def test_the_mark_that_spreadsheets_put_first_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.csv", [ROW], encoding="utf-8-sig")
    assert read_rows(path)[0]["id"] == "llama"


def test_rows_shorter_or_longer_than_the_header_are_read(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.csv", [ROW])
    path.write_text(path.read_text() + "short,lab\n" + ",".join([*ROW.values(), "one", "more"]) + "\n")
    kept, short, long = runs_of(read_rows(path))
    assert isinstance(kept, Run)
    assert isinstance(long, Run)
    assert short == ("short", f"{', '.join(NEEDED)} not stated")


def test_columns_that_nobody_needs_may_be_missing(tmp_path: Path) -> None:
    row = {key: value for key, value in ROW.items() if key in (*NEEDED, "gpu", "framework")}
    found = score(read_rows(write_table(tmp_path / "table.csv", [row])))
    assert [item.id for item in found.scored] == ["row 1"]
    assert found.as_dict()["mape"] is None, "nothing was measured"


# Scores


def test_a_score_says_how_far_off_it_was_by_source() -> None:
    rows = [
        ROW | {"id": "a", "source": "x", "step_time_s": "1"}, ROW | {"id": "b", "source": "x", "step_time_s": "100"},
        ROW | {"id": "c", "source": "y", "step_time_s": ""}, ROW | {"id": "d", "source": "y", "gpu": "MI999"},
        ROW | {"id": "e", "source": "z"},
    ]  # fmt: skip
    found = score(rows)
    seconds = found.scored[0].predicted
    answer = found.as_dict()
    assert (answer["rows"], answer["predicted"], answer["n"]) == (5, 4, 3)
    assert answer["by_source"].keys() == {"x", "z"}
    errors = [100 * abs(seconds / measured - 1) for measured in (1, 100, 4.4)]
    assert answer["mape"] == pytest.approx(sum(errors) / 3)
    assert answer["median"] == pytest.approx(sorted(errors)[1])
    assert answer["by_source"]["x"] == pytest.approx(
        {"n": 2, "mape": sum(errors[:2]) / 2, "median": sum(errors[:2]) / 2, "spearman": None,
         "bias": 100 * (seconds / 10 - 1), "inside_interval": 0}
    )  # fmt: skip
    assert answer["refused"] == [{"id": "d", "reason": "GPU 'MI999' is not known"}]
    assert 0 <= answer["inside_interval"] <= 1


def group(measured: list[float], predicted: list[float], model: str = "m", gpus: int = 8) -> list[Any]:
    return [(model, gpus, *pair) for pair in zip(measured, predicted, strict=True)]


@pytest.mark.parametrize(
    ("measured", "predicted", "wanted"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / math.sqrt(4.5 * 5)),  # ranks 0, 1.5, 1.5, 3
        ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3], 2.0 / math.sqrt(9.5 * 10)),  # ranks 2, .5, 3, .5, 4 and 4, 0, 3, 2, 1
    ],
)
def test_rank_correlation_is_spearmans(measured: list[float], predicted: list[float], wanted: float) -> None:
    assert rank_correlation(group(measured, predicted)) == pytest.approx(wanted)


def test_ranks_are_compared_inside_a_model_and_a_number_of_gpus() -> None:
    rising, falling = group([1, 2, 3], [1, 2, 3], "a"), group([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], "b")
    assert rank_correlation(rising + falling) == pytest.approx((3 - 6) / 9), "by the size of the groups"
    apart = group([1, 2, 3], [1, 2, 3], gpus=8) + group([0.1, 0.2, 0.3], [10, 20, 30], gpus=64)
    assert rank_correlation(apart) == pytest.approx(1.0)


def test_groups_that_cannot_be_ranked_are_left_out() -> None:
    assert math.isnan(rank_correlation([]))
    assert math.isnan(rank_correlation(group([1, 2], [2, 1])))
    assert math.isnan(rank_correlation(group([1, 1, 1], [1, 2, 3])))


# With a model file


SMALL = {
    "n_layers": "2", "hidden": "256", "ffn_hidden": "1024", "n_heads": "4", "n_kv_heads": "4", "head_dim": "64",
    "vocab": "1000", "seq_len": "128", "n_gpus": "1", "gpus_per_node": "1", "tp": "1", "global_batch": "1",
    "precision": "fp32", "framework": "PyTorch",
}  # fmt: skip


def model_file(path: Path, gpu: str, **sections: Any) -> str:
    path.write_bytes(encode(gpu, cost_model("h200").regressors, isolation_us=2.8, **sections))
    return str(path)


def facts_of(gpu: str, **changes: Any) -> dict[str, Any]:
    known = gpu_named(gpu)
    facts = {f.name: getattr(known, f.name) for f in fields(known) if f.name not in ("aliases", "assumed")}
    return facts | {"peak_tflops": dict(known.peak_tflops)} | changes


@pytest.mark.parametrize(("own", "like", "stated"), [
    ("cpu", "cpu", "cpu"), ("cpu", "cpu", "CPU"), ("NVIDIA X1", "h200", "nvidia x1"),
])  # fmt: skip
def test_rows_on_a_machine_that_only_its_model_file_knows_are_predicted_with_it(
    tmp_path: Path, own: str, like: str, stated: str
) -> None:
    path = model_file(tmp_path / "my.npz", own, facts=facts_of(like))
    row = ROW | SMALL | {"gpu": stated}
    assert run_of(row, "row 1", path).setup.cluster.model == path
    found = score([row, ROW], model=path)
    assert [(item.id, item.predicted > 0) for item in found.scored] == [("llama", True), ("llama", True)]
    assert (found.scored[0].fits is None) == (own == "cpu")
    assert found.scored[1] == score([ROW]).scored[0]
    assert score([row]).scored == ()


def test_rows_on_another_gpu_are_predicted_without_the_model_file(tmp_path: Path) -> None:
    path = model_file(tmp_path / "my.npz", "a100")
    clusters = [run_of(ROW | {"gpu": gpu, "gpu_mem_gb": gib}, "row 1", path).setup.cluster for gpu, gib in (
        ("A100", "80"), ("A100", "40"), ("H100", "80"),
    )]  # fmt: skip
    assert [(cluster.gpu, cluster.model) for cluster in clusters] == [("a100", path), ("a100-40", ""), ("h100", "")]


def test_a_model_file_that_no_row_needs_is_refused(tmp_path: Path) -> None:
    path = model_file(tmp_path / "my.npz", "h200")
    with pytest.raises(OptionError, match=r"my\.npz was fitted on h200, on which no row of the table ran"):
        score([ROW, ROW | {"gpu": "none.toml"}], model=path)
    with pytest.raises(InputError, match=r"my\.csv"):
        score([ROW], model=str(write_table(tmp_path / "my.csv", [ROW])))


# The command line


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lumos", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_score_writes_what_was_measured_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "runs.csv", [ROW, ROW | {"id": "bad", "tp": "3"}])
    assert run(monkeypatch, "score", "runs.csv", "--json", "-o", "out.csv") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() >= {"rows", "predicted", "mape", "median", "by_source"}
    assert answer["by_source"]["lab"].keys() == {"n", "mape", "median", "bias", "spearman", "inside_interval"}
    with (tmp_path / "out.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row.keys() >= {"id", "measured", "predicted"}
    assert (row["id"], float(row["measured"])) == ("llama", 4.4)
    assert abs(float(row["predicted"]) / 4.4 - 1) * 100 == pytest.approx(answer["mape"])
    assert run(monkeypatch, "score", "runs.csv", "-o", "out.json") == 0
    shown = capsys.readouterr().out
    assert "1 of 2 rows predicted" in shown
    assert "1 row refused" in shown
    assert json.loads((tmp_path / "out.json").read_text()) == answer


@pytest.mark.parametrize("name", ["missing.csv", "folder", "binary.csv", "empty.csv", "other.csv"])
def test_score_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "other.csv").write_text("name,age\nada,36\n")
    assert run(monkeypatch, "score", name) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lumos: ")
    assert err.count("\n") == 1


# Published measurements

# Of tables with many runs of few kinds, and of the one that has long pipelines, a part: all of them take a minute.
_EVERY = {"nanotron_sweep.csv": 16, "vtrain_single_node.csv": 24, "failed_runs.csv": 16}


@pytest.mark.data
def test_published_runs_are_predicted_or_refused_and_the_error_stays_small(shared_data: Path) -> None:
    tables = sorted((shared_data / "truth").glob("*.csv"))
    assert len(tables) >= 5
    errors = {}
    for table in tables:
        try:
            rows = read_rows(table)
        except InputError:
            assert table.name in ("hardware.csv", "networks.csv"), "these have no runs in them"
            continue
        found = score(rows[:: _EVERY.get(table.name, 1)])
        assert len(found.scored) + len(found.refused) == found.rows
        assert all(why for _, why in found.refused)
        errors[table.name] = found.as_dict()
    assert errors["measured_runs.csv"]["predicted"] > 700
    assert errors["measured_runs.csv"]["mape"] < 20
    assert errors["measured_runs.csv"]["inside_interval"] > 0.7
