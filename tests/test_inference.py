"""The setup of a traced run, inferred: inferred values are true, the rest is left out, contradictions are refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import lumos_here as lumos
from lumos.analysis.replay import Replay, replay
from lumos.errors import OptionError
from lumos.prediction.prediction import predict
from lumos.read.job import read_job
from lumos.setup import read_setup
from lumos.setup.setup_files import SetupReading, read_plain
from lumos.traced.infer import Inferred
from lumos.traced.infer.completion import changed, complete
from lumos.traced.infer.infer import infer
from support import Event, Header, header, note, op, write_trace

SINGLE = ("accum4", "b8", "ckpt", "compile_base", "gpt2_l12_h1024", "h4096", "l4", "nosync_base", "tiny_l2_h512")
SEVERAL = ("ddp2_l8", "dp2_tp2_l8", "fsdp2_l8", "pp2_mb4", "tp2_l8")
FAKE = "h200/fake_world/rank0_of_64_tp8_dp8.pt.trace.json.gz"
FEWEST = 22  # keys that must be inferred from every one of our own recordings
PARALLEL: dict[str, Any] = {
    "ddp": lambda c: {"dp": c["world"], "zero": 0}, "fsdp": lambda c: {"dp": c["world"], "zero": 3},
    "tp": lambda c: {"tp": c["world"]}, "pp": lambda c: {"pp": c["pp"]},
    "dp_tp": lambda c: {"tp": c["tp"], "dp": c["world"] // c["tp"], "zero": 3},
}  # fmt: skip


@cache
def run_of(path: Path) -> Replay:
    return replay(read_job(path))


@cache
def inferred_from(path: Path) -> dict[str, Inferred]:
    return infer(run_of(path))


def values(path: Path) -> dict[str, Any]:
    """What is inferred exactly."""
    return {key: found.value for key, found in inferred_from(path).items() if not found.rough}


def truth(case: dict[str, Any]) -> dict[str, Any]:
    """The setup of a measured case, every key that can be inferred."""
    gpt2, world = case.get("kind") == "gpt2", case.get("world", 1)
    parallel = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "dp": 1, "zero": 0, "sequence_parallel": False}
    parallel |= PARALLEL[case["mode"]](case) if "mode" in case else {}
    model = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")} | {
        "kv_heads": case.get("kv", case["heads"]), "head_dim": case["hidden"] // case["heads"],
        "gated": not gpt2, "tied": gpt2,
    }  # fmt: skip
    train = {
        "seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1), "precision": "bf16",
        "recompute": "full" if case.get("ckpt") else "none", "optimizer": "adamw",
        "compile": bool(case.get("compile")),
    }  # fmt: skip
    sections = {"model": model, "train": train, "parallel": parallel, "cluster": {"gpu": "h200", "gpus": world}}
    return {f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()}


def cases(data: Path) -> dict[Path, dict[str, Any]]:
    """Recordings of our own, of every kind, with their truth."""
    measured = json.loads((data / "h200/single/measured.json").read_text())["results"]
    known = {case["name"]: case for case in measured}
    found = {data / f"h200/single/{name}.pt.trace.json.gz": truth(known[name]) for name in SINGLE}
    for name in SEVERAL:
        folder = data / "h200/multirank" / name
        found[folder] = truth(json.loads((folder / "rank0.json").read_text()))
    fake = {"layers": 4, "hidden": 8192, "ffn": 28672, "heads": 64, "vocab": 32000, "seq": 4096, "mbs": 1}
    return found | {data / FAKE: truth(fake | {"world": 64, "mode": "dp_tp", "tp": 8})}


def as_toml(sections: dict[str, Any]) -> str:
    lines: dict[str, list[str]] = {}
    for key, value in sections.items():
        section, _, name = key.partition(".")
        lines.setdefault(section, [f"[{section}]"]).append(f"{name} = {json.dumps(value)}")
    return "\n".join(line for part in lines.values() for line in part) + "\n"


@pytest.mark.data
@pytest.mark.slow
def test_everything_inferred_from_a_recording_is_true(shared_data: Path) -> None:
    for path, expected in cases(shared_data).items():
        found = values(path)
        assert found == {key: expected[key] for key in found}, path.name
        assert len(found) >= FEWEST, path.name
        assert all(one.evidence for one in inferred_from(path).values())


@pytest.mark.data
@pytest.mark.slow
def test_a_file_that_is_right_is_never_contradicted(shared_data: Path, tmp_path: Path) -> None:
    for path, expected in cases(shared_data).items():
        file = tmp_path / "traced.toml"
        file.write_text(as_toml({key: value for key, value in expected.items() if key != "parallel.vpp"}))
        assert complete(inferred_from(path), read_plain(file)).setup == read_setup(file), path.name


@pytest.mark.data
@pytest.mark.parametrize("name", ["ckpt", "gpt2_l12_h1024"])
def test_without_a_file_the_prediction_is_that_with_the_file(shared_data: Path, tmp_path: Path, name: str) -> None:
    path = shared_data / f"h200/single/{name}.pt.trace.json.gz"
    file = tmp_path / "traced.toml"
    file.write_text(as_toml(cases(shared_data)[path]))
    asked = ["model.layers=6", "train.micro_batch=3", "train.seq=1024"]
    traced = complete(inferred_from(path), read_plain(None)).setup
    wanted = changed(inferred_from(path), read_plain(None, asked)).setup
    alone = predict(run_of(path), setup=wanted, traced=traced)
    stated = predict(run_of(path), setup=read_setup(file, asked), traced=read_setup(file))
    assert alone.step_ms == pytest.approx(stated.step_ms, rel=1e-9)


@pytest.mark.data
def test_a_changed_size_takes_along_what_follows_from_it(shared_data: Path) -> None:
    found = inferred_from(shared_data / "h200/single/l4.pt.trace.json.gz")
    wider = changed(found, read_plain(None, ["model.hidden=4096", "model.heads=32", "cluster.gpus=8"])).setup
    assert (wider.model.kv_heads, wider.model.head_dim, wider.parallel.dp) == (32, 128, 8)


@pytest.mark.data
def test_what_no_trace_shows_is_named_as_assumed_where_no_file_states_it(shared_data: Path, tmp_path: Path) -> None:
    found = inferred_from(shared_data / "h200/multirank/pp2_mb4")
    notes = changed(found, read_plain(None, ["train.microbatches=8"])).notes
    assert "train.framework = pytorch, cluster.gpus_per_node = 8, parallel.schedule = 1f1b" in notes[-1]
    file = tmp_path / "some.toml"
    file.write_text("[parallel]\nschedule = 'gpipe'\n")
    assert not any("assumed" in note for note in changed(found, read_plain(file)).notes)
    assert complete(found, read_plain(file)).setup.parallel.schedule == "gpipe"


@pytest.mark.data
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[model]\nlayers = 9", "model.layers = 9, and the trace shows 4 (4 attentions in 1 micro-batch)"),
        ("[train]\nrecompute = 'full'", "train.recompute = full, and the trace shows none"),
        ("[train]\nglobal_batch = 8", "train.microbatches = 4, and the trace shows 1"),
        ("[cluster]\ngpu = 'b200'", "cluster.gpu = b200, and the trace shows h200 (the trace is of NVIDIA H200)"),
        ("[parallel]\ntp = 4", "parallel.tp = 4, and the trace shows 1"),
    ],
)
def test_a_contradiction_names_both_values_and_the_evidence(
    shared_data: Path, tmp_path: Path, line: str, sentence: str
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(line)
    with pytest.raises(OptionError) as refused:
        complete(inferred_from(shared_data / "h200/single/l4.pt.trace.json.gz"), read_plain(file))
    assert sentence in str(refused.value)
    assert str(file) in str(refused.value)


# What is written down of recordings of others (or follows from the name of a published model), apart from the trace;
# and the keys that are inferred from them without such a record: those are not proved here, only not added to unseen.
PUBLIC: dict[str, tuple[dict[str, Any], set[str]]] = {
    "megatron_tp8_a100/kineto": (
        {
            "cluster.gpu": "a100", "cluster.gpus": 8, "parallel.tp": 8, "parallel.pp": 1, "parallel.cp": 1,
            "parallel.dp": 1, "model.layers": 40, "model.hidden": 4096, "train.seq": 2048, "train.micro_batch": 4,
        },
        {"model.gated", "model.head_dim", "train.microbatches", "train.precision"},
    ),
    "nanogpt_h100/adamhook_20251031_current_rank0.json.gz": (
        {"cluster.gpu": "h100", "cluster.gpus": 8},
        {
            *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp"),
            *("model.heads", "model.kv_heads", "model.head_dim"),
            *("train.microbatches", "train.recompute", "train.precision", "train.compile"),
        },
    ),
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": (
        {"cluster.gpu": "h100", "model.hidden": 1024, "model.gated": True, "model.head_dim": 64},
        {"train.microbatches", "train.precision", "train.compile"},
    ),
    "torchrec_v100/resnet18": ({}, {"cluster.gpus"}),
    "hta/nccl_parser_config/nccl_data.json.gz": (
        {}, {"cluster.gpus", "parallel.dp", "parallel.zero", "train.optimizer"},
    ),
    "hta/critical_path/alexnet": ({}, set()),
    "sglang_decode_b200": ({"cluster.gpu": "b200", "cluster.gpus": 8}, set()),
    "tracelens/mi210/gpu_only_trace": ({}, set()),
}  # fmt: skip


@pytest.mark.data
@pytest.mark.parametrize("name", PUBLIC)
def test_nothing_false_is_inferred_from_recordings_of_others(shared_data: Path, name: str) -> None:
    written, unchecked = PUBLIC[name]
    found = values(shared_data / "public" / name)
    assert {key: value for key, value in found.items() if key in written}.items() <= written.items()
    assert found.keys() - written.keys() == unchecked


@pytest.mark.data
def test_what_a_group_of_unknown_size_shards_is_not_inferred(shared_data: Path) -> None:
    found = values(shared_data / "public/megatron_tp8_a100/kineto")
    assert {"model.layers", "model.hidden", "train.seq", "train.micro_batch"} <= found.keys()
    assert found.keys().isdisjoint({"parallel.tp", "model.heads", "model.ffn", "model.vocab", "parallel.dp"})


# Steps written by hand: the operators of a rank, one after another


class Step:
    """The operators of one step of a small model, in the order of their calls."""

    def __init__(self, rows: int = 512) -> None:
        self.events: list[Event] = []
        self.rows, self.time = rows, 10.0

    def call(self, name: str, dims: list[Any], **more: Any) -> None:
        found = {"Input Dims": dims, "Input type": ["c10::BFloat16", "c10::BFloat16"]} | more
        self.events.append(op(name, self.time, 4, args=found))
        self.time += 10

    def matmul(self, inner: int, columns: int) -> None:
        self.call("aten::mm", [[self.rows, inner], [inner, columns]])

    def layer(self, query: tuple[int, ...], attention: list[int], wide: tuple[int, ...], ffn: int) -> None:
        hidden = 256
        for columns in query:
            self.matmul(hidden, columns)
        self.call("aten::_scaled_dot_product_flash_attention", [attention, attention, attention])
        self.matmul(attention[1] * attention[3], hidden)
        for columns in wide:
            self.matmul(hidden, columns)
        self.matmul(ffn, hidden)

    def end(self) -> None:
        self.matmul(256, 1000)
        self.call("aten::nll_loss_forward", [[self.rows, 1000], [self.rows]])

    def reduce(self, name: str, sizes: tuple[int, int], ranks: int) -> None:
        found = {"Collective name": name, "In msg nelems": sizes[0], "Out msg nelems": sizes[1], "Group size": ranks}
        self.call("record_param_comms", [], **found)

    def inferred(self, folder: Path, head: Header | None = None) -> dict[str, Any]:
        marks = [note("ProfilerStep#1", 0, self.time), note("Optimizer.step#AdamW.step", self.time - 5, 1)]
        path = write_trace(folder / "trace.json", [*marks, *self.events], head or header(rank=None))
        self.rough = {key: found.value for key, found in infer(replay(read_job(path))).items() if found.rough}
        return {key: found.value for key, found in infer(replay(read_job(path))).items() if not found.rough}


PLAIN = ((256, 256, 256), [2, 4, 256, 64], (640, 640), 640)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (PLAIN, {"heads": 4, "kv_heads": 4, "ffn": 640, "gated": True, "head_dim": 64}),
        (((256, 64, 64), *PLAIN[1:]), {"heads": 4, "kv_heads": 1, "ffn": 640, "gated": True, "head_dim": 64}),
        (((384,), *PLAIN[1:]), {"heads": 4, "kv_heads": 1, "ffn": 640, "gated": True, "head_dim": 64}),
        ((*PLAIN[:2], (1280,), 640), {"heads": 4, "kv_heads": 4, "ffn": 640, "gated": True, "head_dim": 64}),
        ((*PLAIN[:2], (1024,), 1024), {"heads": 4, "kv_heads": 4, "ffn": 1024, "gated": False, "head_dim": 64}),
        (
            ((512, 512, 512), [2, 8, 256, 64], (640, 640), 640),
            {"heads": 8, "kv_heads": 8, "ffn": 640, "gated": True, "head_dim": 64},
        ),
    ],
    ids=["plain", "grouped", "fused and grouped", "fused and gated", "not gated", "wide heads"],
)
def test_the_matmuls_around_an_attention_show_its_layer(
    tmp_path: Path, layer: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    step = Step()
    for _ in range(2):  # micro-batches
        for _ in range(3):
            step.layer(*layer)
        step.end()
    found = step.inferred(tmp_path)
    sizes = {"layers": 3, "hidden": 256, "vocab": 1000}
    assert {key: found.get(f"model.{key}") for key in expected | sizes} == expected | sizes
    assert (found["train.microbatches"], found["train.seq"], found["train.micro_batch"]) == (2, 256, 2)


def test_a_layer_that_could_be_read_in_two_ways_is_not_read(tmp_path: Path) -> None:
    step = Step()
    for _ in range(2):
        step.layer((256, 256, 256), [2, 4, 256, 64], (256, 256), 256)  # gated, or not gated and followed by a head
    assert step.inferred(tmp_path).keys().isdisjoint({"model.hidden", "model.ffn", "model.gated", "model.vocab"})


def test_layers_that_are_not_alike_are_read_roughly(tmp_path: Path) -> None:
    step = Step()
    for wide in (640, 1280, 640):
        step.layer(*PLAIN[:2], (wide, wide), wide)
    step.end()
    found = step.inferred(tmp_path)
    assert found["model.hidden"] == 256  # every attention is followed by a matmul with as many columns
    assert found.keys().isdisjoint({"model.layers", "model.ffn", "model.gated"})
    assert step.rough == {"model.layers": 3, "model.ffn": 1280, "model.gated": True, "model.tied": False}


def test_a_matmul_behind_every_layer_is_no_head(tmp_path: Path) -> None:
    step = Step()
    for _ in range(4):
        step.layer(*PLAIN)
        step.matmul(256, 8)
    found = step.inferred(tmp_path)
    assert found.keys().isdisjoint({"model.vocab", "model.layers", "train.microbatches"})


def test_activations_that_are_gathered_and_scattered_are_sequence_parallel(tmp_path: Path) -> None:
    step = Step()
    activation = step.rows * 256
    for _ in range(2):
        step.reduce("_allgather_base", (activation // 4, activation), 4)
        step.layer((64, 64, 64), [2, 1, 256, 64], (160, 160), 160)
        step.reduce("_reduce_scatter_base", (activation, activation // 4), 4)
    found = step.inferred(tmp_path, header(rank=0, world_size=4))
    assert (found["parallel.tp"], found["parallel.sequence_parallel"], found["parallel.dp"]) == (4, True, 1)
    assert (found["model.heads"], found["model.ffn"]) == (4, 640)


def test_an_unknown_exchange_leaves_the_parallelism_out(tmp_path: Path) -> None:
    step = Step()
    for _ in range(2):
        step.layer(*PLAIN)
        step.reduce("all_to_allv", (step.rows * 256, step.rows * 256), 4)
    found = step.inferred(tmp_path, header(rank=0, world_size=4))
    sizes = {f"parallel.{key}" for key in ("tp", "cp", "dp")}
    assert found.keys().isdisjoint(sizes | {"model.heads", "model.ffn", "train.seq"})
    assert found["model.hidden"] == 256


@pytest.mark.parametrize(("ranks", "by_index"), [((0, 1), False), ((1, 3), False), ((1, 3), True)])
def test_virtual_stages_are_counted_by_what_the_first_rank_sends(
    tmp_path: Path, ranks: tuple[int, int], by_index: bool
) -> None:
    for rank in (0, 1):
        step = Step()
        for _ in range(4):
            if rank == 0:
                step.call("aten::embedding", [[1000, 256], [2, 256]])
            for chunk in range(2):
                step.layer(*PLAIN)
                if rank == 1 and chunk == 1:
                    step.end()
                for _ in range(2 if rank == 0 and chunk else 1):  # the second chunk also sends a gradient back
                    peer = {"Dst Rank": 1 - rank if by_index else ranks[1 - rank], "Process Group Ranks": str(ranks)}
                    step.call("record_param_comms", [], **peer, **{"Collective name": "send"})
        marks = [note("ProfilerStep#1", 0, step.time)]
        head = header(rank=ranks[rank], world_size=2 * ranks[0] + 2)
        write_trace(tmp_path / f"rank{ranks[rank]}.json", [*marks, *step.events], head)
    found = values(tmp_path)
    assert (found["parallel.pp"], found["parallel.vpp"], found["train.microbatches"]) == (2, 2, 4)
    assert found["model.layers"] == 4


def test_a_trace_without_shapes_shows_what_needs_none(tmp_path: Path) -> None:
    step = Step()
    for _ in range(2):
        step.layer(*PLAIN)
    step.end()
    for event in step.events:
        event["args"] = {"External id": 1}
    found = step.inferred(tmp_path)
    assert found["model.layers"] == 2
    assert found.keys().isdisjoint({"model.hidden", "model.heads", "train.seq", "train.precision"})


RELEVANT = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention",
    "flash_attn::_flash_attn_forward", "aten::nll_loss_forward", "aten::embedding", "torch::autograd::AccumulateGrad",
    "c10d::allreduce_", "c10d::_allgather_base_", "c10d::send", "record_param_comms", "aten::topk", "aten::_grouped_mm",
    "aten::_softmax", "aten::convolution", "autograd::engine::evaluate_function: MmBackward0",
)  # fmt: skip
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, 2, 64]) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)
SIZES = st.lists(st.lists(st.sampled_from([0, 1, 2, 64, 512]), max_size=4), max_size=4)


@settings(max_examples=60)
@given(calls=st.lists(st.tuples(st.sampled_from(RELEVANT), SIZES | JUNK, JUNK), max_size=12), world=st.integers(1, 3))
def test_whatever_stands_in_the_arguments_the_inference_does_not_fail(
    tmp_path: Path, calls: list[tuple[str, Any, Any]], world: int
) -> None:
    step = Step()
    for name, dims, junk in calls:
        keys = (
            *("Collective name", "In msg nelems", "Group size", "Dst Rank", "Process Group Ranks", "Concrete Inputs"),
            "Sequence number",
        )
        step.call(name, dims, **dict.fromkeys(keys, junk), **{"Input type": junk})
    assert step.inferred(tmp_path, header(rank=0, world_size=world))["cluster.gpus"] == world


# The command


def _completed(found: dict[str, Any], **overrides: str) -> SetupReading:
    """What is asked for, by a trace that shows all of this, with `--set`."""
    inferred = {key.replace("__", "."): Inferred(value, "a test") for key, value in found.items()}
    return changed(inferred, read_plain(None, [f"{k.replace('__', '.')}={v}" for k, v in overrides.items()]))


_ONE_GPU = {
    "model__layers": 4, "model__hidden": 256, "model__ffn": 1024, "model__heads": 4, "model__vocab": 1000,
    "train__seq": 128, "train__micro_batch": 2, "cluster__gpu": "h200", "cluster__gpus": 1, "parallel__tp": 1,
    "parallel__dp": 1,
}  # fmt: skip


def test_more_ranks_than_the_trace_has_get_more_gpus() -> None:
    reading = _completed(_ONE_GPU, parallel__tp="2")
    assert (reading.setup.cluster.gpus, reading.setup.parallel.dp) == (2, 1)
    assert "on 2 GPUs, as tp · pp · cp = 2 does not fit on the traced 1" in reading.notes
    eight = _completed(_ONE_GPU | {"cluster__gpus": 8, "parallel__dp": 8}, parallel__tp="2")
    assert (eight.setup.cluster.gpus, eight.setup.parallel.dp) == (8, 4)  # they fit: the GPUs stay
    with pytest.raises(OptionError, match=r"cluster.gpus = 3"):
        _completed(_ONE_GPU, parallel__tp="2", cluster__gpus="3")


def test_a_trace_without_layers_or_shapes_says_so_instead_of_listing_keys() -> None:
    for has_shapes, text in ((True, "does not show the layers of a transformer"), (False, "record_shapes=True")):
        with pytest.raises(OptionError, match=text) as refused:
            complete({}, read_plain(None), has_shapes)
        assert "model.vocab" not in str(refused.value)


def test_what_the_trace_does_not_show_is_one_line_and_a_file_with_just_that_completes_it(tmp_path: Path) -> None:
    example = "src/lumos/data/example"
    asked = lumos("predict", "--from", example, "--set", "train.seq=512")
    assert asked.returncode == 2
    assert "the trace does not show model.layers, model.tied, train.microbatches: name a SETUP file" in asked.stderr
    assert len(asked.stderr.splitlines()) == 1
    file = tmp_path / "rest.toml"
    file.write_text("[model]\ntied = false\n")
    asked = lumos("predict", file, "--from", example, "--set", "train.seq=512")
    assert asked.stderr.splitlines() == [
        f"lumos: {file}: neither this file nor the trace shows model.layers: add it to the file"
    ]


@pytest.mark.data
def test_the_command_needs_no_file_and_says_what_it_understood(shared_data: Path, tmp_path: Path) -> None:
    trace = shared_data / "h200/single/tiny_l2_h512.pt.trace.json.gz"
    answer = json.loads(lumos("predict", "--from", trace, "--set", "model.layers=4", "--json").stdout)
    expected = {"value": 2, "evidence": "2 attentions in 1 micro-batch", "rough": False}
    assert answer["inferred"]["model.layers"] == expected
    assert answer["step_ms"] > answer["baseline_ms"]
    file = tmp_path / "partial.toml"
    file.write_text("[model]\nlayers = 2\n")
    again = json.loads(lumos("predict", file, "--from", trace, "--set", "model.layers=4", "--json").stdout)
    assert again["step_ms"] == pytest.approx(answer["step_ms"], rel=1e-9)
    assert "setup of the traced run, as inferred" in lumos("predict", "--from", trace, "--set", "model.layers=4").stdout


def test_scale_and_set_are_asked_one_at_a_time() -> None:
    done = lumos("predict", "--from", "src/lumos/data/example", "--set", "train.seq=512", "--scale", "cpu=0.5")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "--scale and --set together" in done.stderr
