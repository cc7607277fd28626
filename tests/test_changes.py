"""Another configuration of a traced run: both paths tell one story, and edits obey their laws."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import lumos_here as lumos
from lumos.analysis.kernel_labels import KernelClass, KernelPhase, label
from lumos.analysis.replay import replay
from lumos.costs.costs import costs_of
from lumos.costs.energy import in_step_factors
from lumos.errors import OptionError
from lumos.graph.graph import Times
from lumos.prediction.prediction import predict
from lumos.read.job import read_job
from lumos.read.json_slices import Slices
from lumos.setup.setup import Setup
from lumos.step import step as step_module
from lumos.step.step import Step, simulate_step
from lumos.traced.learned import CalibratedRun, changed_step
from lumos.traced.retarget import own_blocks, us_by_kind
from lumos.traced.sizes import Sizes
from synthetic_traces import write_synthetic

GPT_15B = {"layers": 48, "hidden": 6144, "ffn": 12288, "heads": 48, "vocab": 51200, "gated": False}
TARGETS: list[dict[str, Any]] = [
    {"parallel.dp": 8}, {"parallel.dp": 16}, {"parallel.dp": 32}, {"parallel.pp": 4, "parallel.dp": 4},
    {"parallel.pp": 8, "parallel.dp": 4}, {"parallel.pp": 16, "parallel.dp": 4}, {"parallel.pp": 4, "parallel.dp": 8},
    {"model.layers": 96}, {"model.hidden": 12288, "model.ffn": 24576},
]  # fmt: skip


def setup(**parallel: Any) -> Setup:
    """GPT-3 15B at TP2·PP2·DP4, the run that published edits start from."""
    ways = {"tp": 2, "pp": 2, "dp": 4, "tp_overlap": False, "dp_overlap": False} | parallel
    return Setup.model_validate(
        {
            "model": GPT_15B,
            "train": {"seq": 2048, "micro_batch": 1, "microbatches": 8, "framework": "megatron"},
            "parallel": ways,
            "cluster": {"gpu": "h100", "gpus": ways["tp"] * ways["pp"] * ways["dp"]},
        }
    )


# A synthetic trace


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CalibratedRun:
    folder = tmp_path_factory.mktemp("traces")
    write_synthetic(simulate_step(setup()), folder)
    return CalibratedRun(replay(read_job(folder)), setup())


def test_a_synthetic_trace_replays_to_the_step_it_was_made_of(source: CalibratedRun) -> None:
    assert source.run.recorded_steps.mean == pytest.approx(simulate_step(setup()).us / 1e3, rel=1e-3)
    assert abs(source.run.error_pct) < 0.1


@pytest.mark.parametrize("changes", TARGETS, ids=str)
def test_the_trace_and_the_description_tell_one_story(source: CalibratedRun, changes: dict[str, Any]) -> None:
    target = setup().replaced(changes | {"train.microbatches": 8})
    assert predict(source, setup=target).step_ms == pytest.approx(simulate_step(target).us / 1e3, rel=0.03)


def test_the_identity_changes_nothing(source: CalibratedRun) -> None:
    assert predict(source, setup=setup()).step_ms == pytest.approx(source.run.clean_ms, rel=1e-3)


def test_there_and_back_is_the_baseline_and_two_edits_are_one(source: CalibratedRun) -> None:
    there = setup().replaced({"model.layers": 96})
    back = there.replaced({"model.layers": 48})
    assert predict(source, setup=back).step_ms == pytest.approx(source.run.clean_ms, rel=1e-3)
    both = setup().replaced({"model.layers": 96, "train.micro_batch": 2, "train.microbatches": 8})
    two = there.replaced({"train.micro_batch": 2, "train.microbatches": 8})
    assert predict(source, setup=two).step_ms == predict(source, setup=both).step_ms


def test_every_attention_is_one_layer_of_one_micro_batch(source: CalibratedRun) -> None:
    for labels in label(source.run):
        forward, backward = labels.of(KernelPhase.FORWARD), labels.of(KernelPhase.BACKWARD)
        assert (labels.attention[forward] == 1).sum() == 24 * 8
        assert (labels.attention[backward] == 2).sum() == 24 * 8
        assert (labels.us[labels.work == KernelClass.MATRIX] > 0).all()


def test_a_setup_that_is_not_the_traced_one_is_refused_with_the_counts(source: CalibratedRun) -> None:
    wrong = setup().replaced({"model.layers": 40})
    with pytest.raises(
        OptionError, match="192 attention kernels in the forward pass, and the setup says 20 layers × 8"
    ):
        predict(CalibratedRun(source.run, wrong), setup=wrong)


@pytest.mark.parametrize(
    "changes", [{"train.micro_batch": 4, "train.microbatches": 8}, {"model.hidden": 1536}, {"train.seq": 8192}], ids=str
)
def test_a_setup_of_other_sizes_is_refused(source: CalibratedRun, changes: dict[str, Any]) -> None:
    wrong = setup().replaced(changes)
    with pytest.raises(OptionError, match="does not describe this trace"):
        predict(CalibratedRun(source.run, wrong), setup=wrong)


def test_a_parallelism_that_was_never_measured_gets_a_wider_interval_and_a_note(source: CalibratedRun) -> None:
    same, replicas, stages = (
        predict(source, setup=setup().replaced(changes | {"train.microbatches": 8}))
        for changes in ({}, {"parallel.dp": 8}, {"parallel.pp": 4})
    )
    widths = [found.interval_ms[1] / found.step_ms for found in (same, replicas, stages)]
    assert widths[0] == pytest.approx(widths[1])
    assert widths[2] > widths[0] + 0.1
    assert any("not as in the traced run: parallel.pp" in note for note in stages.warnings)
    assert not any("differ from the traced run's" in note for note in replicas.warnings)


def test_a_trace_without_shapes_says_that_operators_follow_the_description(source: CalibratedRun) -> None:
    assert not source.has_shapes
    assert any("record_shapes=True" in note for note in predict(source, setup=setup()).warnings)


def test_a_slow_host_is_felt(source: CalibratedRun) -> None:
    slow = setup().replaced({"cluster.host": 0.02})
    assert predict(source, setup=slow).step_ms > 1.5 * source.run.clean_ms


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train.precision": "fp16"}, "train.precision cannot be changed"),
        ({"train.compile": True}, "train.compile cannot be changed"),
        ({"train.framework": "nanotron"}, "train.framework cannot be changed"),
        ({"model.gated": True}, "kind of MLP"),
    ],
)
def test_what_a_trace_cannot_tell_is_refused(source: CalibratedRun, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        predict(source, setup=setup().replaced(changes))


def test_tensor_parallelism_of_a_compiled_trace_is_refused(source: CalibratedRun) -> None:
    compiled = setup().replaced({"train.compile": True})
    with pytest.raises(OptionError, match="fused beyond recognition"):
        predict(CalibratedRun(source.run, compiled), setup=compiled.replaced({"parallel.tp": 4, "parallel.dp": 2}))


# Traces of machines that are slower than the model's


def small(**parallel: Any) -> Setup:
    """Four layers on four GPUs."""
    model = {"layers": 4, "hidden": 4096, "ffn": 16384, "heads": 32, "vocab": 32000, "gated": False}
    train = {"seq": 2048, "micro_batch": 1, "microbatches": 2, "framework": "megatron"}
    ways = {"tp": 1, "dp": 4, "zero": 0, "tp_overlap": False, "dp_overlap": False} | parallel
    return Setup.model_validate({"model": model, "train": train, "parallel": ways, "cluster": {"gpu": "h100"}})


def traced(step: Step, folder: Path, described: Setup | None = None) -> CalibratedRun:
    folder.mkdir(exist_ok=True)
    write_synthetic(step, folder)
    return CalibratedRun(replay(read_job(folder)), described or step.setup)


def ratio(run: CalibratedRun, name: str, like: str) -> float:
    """Measured over modelled time of one kind of work in a block."""
    modelled = us_by_kind(own_blocks(run.plain.assembly.program, ())[name], run.plain.costs)
    return run.blocks[name].us(like) / modelled[like]


def test_matmuls_that_took_longer_take_longer_in_every_configuration(tmp_path: Path) -> None:
    usual = in_step_factors(small().cluster.accelerator)
    slow = dataclasses.replace(usual, matrix=1.3 * usual.matrix)
    run = traced(simulate_step(small(), factors=slow), tmp_path)
    for name in ("forward", "backward"):
        assert ratio(run, name, "matrix") == pytest.approx(1.3, rel=0.04)
        assert ratio(run, name, "attention") == pytest.approx(1.3, rel=0.04)
        assert ratio(run, name, "stream") == pytest.approx(1.0, rel=0.04)
    assert ratio(run, "head", "matrix") == pytest.approx(1.3, rel=0.04)
    deeper = small().replaced({"model.layers": 8})
    assert predict(run, setup=deeper).step_ms == pytest.approx(simulate_step(deeper, factors=slow).us / 1e3, rel=0.03)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "dp": 2}], ids=str)
def test_collectives_that_took_longer_take_longer_in_every_configuration(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    usual = costs_of(small()).network
    slow = dataclasses.replace(usual, penalty=2 * usual.penalty)
    run = traced(simulate_step(small(**layout), network=slow), tmp_path)
    assert run.learned.network["ranks"] == pytest.approx(2.0, rel=0.05)
    assert run.learned.network["p2p"] == pytest.approx(1.0, rel=0.05), "one stage has none"
    if layout:
        assert run.learned.network["forward"] == pytest.approx(2.0, rel=0.05)
    deeper = small(**layout).replaced({"model.layers": 8})
    assert predict(run, setup=deeper).step_ms == pytest.approx(simulate_step(deeper, network=slow).us / 1e3, rel=0.03)


def test_recomputation_of_a_trace_is_a_forward_pass_inside_the_backward_pass(tmp_path: Path) -> None:
    again = small().replaced({"train.recompute": "full"})
    run = traced(simulate_step(again), tmp_path)
    assert ratio(run, "backward", "matrix") == pytest.approx(1.0, rel=0.04)
    assert ratio(run, "recompute", "matrix") == pytest.approx(1.0, rel=0.04)
    assert predict(run, setup=small()).step_ms == pytest.approx(simulate_step(small()).us / 1e3, rel=0.03)
    back = traced(simulate_step(small()), tmp_path / "without")
    assert predict(back, setup=again).step_ms == pytest.approx(simulate_step(again).us / 1e3, rel=0.03)


def test_what_was_understood_of_a_trace_adds_up_to_its_kernels(tmp_path: Path) -> None:
    run = traced(simulate_step(small(dp=1)), tmp_path)
    rows = {row["phase"]: row for row in run.understood}
    assert list(rows) == ["forward", "backward", "optimizer"]
    for phase in ("forward", "backward"):
        row = rows[phase]
        assert row["gpu_ms"] == pytest.approx(2 * (4 * row["layer_ms"] + row["ends_ms"]), rel=0.02)
        block = run.plain.chunks[0][0].forward if phase == "forward" else run.plain.chunks[0][0].backward
        assert row["gpu_ms"] == pytest.approx(2 * block.us / 1e3, rel=0.02)
        assert row["layer_host_ms"] == pytest.approx(run.ranks[0].blocks[phase].host_us / 1e3)
        assert row["layer_host_ms"] > 0
    assert rows["optimizer"]["ends_ms"] == pytest.approx(run.plain.role_us("optimizer", 0) / 1e3, rel=0.02)
    assert rows["optimizer"]["layer_ms"] == 0


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (3, 0), (4, 1), (7, 1), (99, 1)])
def test_ranks_fill_the_stages_in_order(tmp_path: Path, rank: int, stage: int) -> None:
    run = traced(simulate_step(small(pp=2, dp=4)), tmp_path)
    assert run._stage_of(rank) == stage


def test_a_host_twice_as_fast_launches_in_half_the_time(tmp_path: Path) -> None:
    run = traced(simulate_step(small()), tmp_path)
    step, _ = changed_step(run, small().replaced({"cluster.host": 2.0}))
    same, _ = changed_step(run, small())
    assert step.chunks[0][0].forward.host_us == pytest.approx(same.chunks[0][0].forward.host_us / 2)


def test_a_setup_that_explains_less_than_half_of_a_step_or_more_than_twice_of_it_is_refused(tmp_path: Path) -> None:
    """Every kernel begins three times as late as it should."""
    step = simulate_step(small())
    start, end = step.times
    late = dataclasses.replace(step, times=Times(3 * start, 3 * start + (end - start)))
    with pytest.raises(OptionError, match="the setup does not describe this trace: it explains"):
        _ = traced(late, tmp_path).learned


def test_a_link_that_took_twice_as_long_takes_twice_as_long_in_every_configuration(tmp_path: Path) -> None:
    """Three transfers to the next stage, on a stream of their own."""
    step = simulate_step(small(pp=2, dp=1))
    link_us = float(step.graph.edges.lag.max()) / 1e3
    first, _ = write_synthetic(step, tmp_path)
    trace = json.loads(first.read_text())
    for index in range(3):
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 100, "dur": 0.5}
        kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv", "pid": 0, "tid": 9, "dur": 2 * link_us}
        start, args = step.us * (0.2 + 0.2 * index), {"correlation": 90_000 + index}
        trace["traceEvents"] += [
            launch | {"ts": start - 5, "args": args}, kernel | {"ts": start, "args": args | {"stream": 9, "device": 0}}
        ]  # fmt: skip
    first.write_text(json.dumps(trace))
    run = CalibratedRun(replay(read_job(tmp_path)), step.setup)
    assert run.learned.network["p2p"] == pytest.approx(2.0, rel=0.05)


def test_the_host_of_the_optimizer_grows_with_the_tensors_that_it_updates(tmp_path: Path) -> None:
    run = traced(simulate_step(small(pp=2, dp=1).replaced({"train.framework": "pytorch", "parallel.dp": 1})), tmp_path)
    before, after = (changed_step(run, run.setup.replaced({"model.layers": layers}))[0] for layers in (4, 16))
    blocks = [(step, step.assembly.program.optimizer(0)) for step in (before, after)]
    launches = [step.assembly.block_time(block).host_us for step, block in blocks]
    assert launches[0] == pytest.approx(run.learned.host * run.blocks["optimizer"].host_us)
    assert 2 < launches[1] / launches[0] < 4


@pytest.mark.parametrize("pp", [1, 2])
def test_the_load_of_a_run_is_the_share_of_its_step_that_matmuls_ran_and_bubbles_do_not_count(
    tmp_path: Path, pp: int
) -> None:
    run = traced(simulate_step(small(pp=pp, dp=2)), tmp_path)
    matmuls = [
        labels.us[(labels.work == KernelClass.MATRIX) | (labels.work == KernelClass.ATTENTION)] for labels in run.labels
    ]
    share = np.mean([us.sum() for us in matmuls]) / 1e3 / run.run.recorded_steps.mean
    if pp == 1:
        assert run.recorded_load == pytest.approx(share)
        assert run.learned.load == pytest.approx(share, rel=0.02), "the same of the model, once it is closed"
    else:
        assert share < run.recorded_load < 1


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The same, and a record of its calls."""

    def call(*arguments: Any) -> Any:
        calls.append(function.__name__)
        return function(*arguments)

    return call


@pytest.mark.parametrize(("layout", "most"), [({"dp": 1}, 12), ({"pp": 2, "dp": 2}, 15)], ids=str)
def test_a_changed_prediction_simulates_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], most: int
) -> None:
    run = traced(simulate_step(small(**layout)), tmp_path)
    steps: list[str] = []
    for name in ("simulate", "contended"):
        monkeypatch.setattr(f"lumos.step.step.{name}", counted(getattr(step_module, name), steps))
    prediction = predict(run, setup=run.setup.replaced({"model.layers": 8, "train.micro_batch": 2}))
    assert prediction.breakdown.step_ms == pytest.approx(prediction.step_ms)
    assert 4 < len(steps) <= most


# The command line and measured runs


def test_a_set_without_the_setup_is_one_line(tmp_path: Path) -> None:
    done = lumos("predict", "--from", "src/lumos/data/example", "--set", "model.layers=4")
    assert done.returncode == 2
    assert "needs the traced run's setup" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_comparing_a_run_with_itself_finds_nothing() -> None:
    done = lumos("compare", "src/lumos/data/example", "src/lumos/data/example", "--json")
    answer = json.loads(done.stdout)
    assert answer["change_ms"] == 0
    assert all(row["change_ms"] == 0 for name in ("parts", "operators", "collectives") for row in answer[name])


SINGLE_GPU_BOUND = ("b4", "b8", "h4096", "s4096", "s8192", "v128k")
SINGLE_HOST_BOUND = ("base_l8_h2048_s2048_b2", "l16", "h1024", "ckpt", "tiny_l2_h512")
NO_NETWORK = {"cluster.gpus_per_node": 8, "cluster.nvlink_gb_s": 100_000, "cluster.inter_gb_s": 100_000}


def measured_setup(case: dict[str, Any]) -> Setup:
    """The setup of a measured run; collectives of one rank in a fake process group took no time."""
    sizes = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    train = {"seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1),
             "recompute": "full" if case.get("ckpt") else "none"}  # fmt: skip
    ranks = case.get("world", 1)
    tp = case.get("tp", 1)
    zero = case.get("zero", 0) if ranks > tp else 0
    given = {
        "model": sizes | {"kv_heads": case.get("kv") or case["heads"]},
        "train": train,
        "parallel": {"tp": tp, "dp": ranks // tp, "zero": zero},
        "cluster": {"gpu": "h200", "gpus": ranks},
    }
    return Setup.model_validate(given).replaced(NO_NETWORK if ranks > 1 else {})


@cache
def single(data: Path, name: str) -> tuple[CalibratedRun, dict[str, Any]]:
    cases = {c["name"]: c for c in json.loads((data / "h200/single/measured.json").read_text())["results"]}
    trace = data / f"h200/single/{name}.pt.trace.json.gz"
    return CalibratedRun(replay(read_job(trace)), measured_setup(cases[name])), cases


def error(source: CalibratedRun, case: dict[str, Any]) -> float:
    return predict(source, setup=measured_setup(case)).step_ms / (1e3 * case["step_s_median"]) - 1


@pytest.mark.data
@pytest.mark.parametrize("name", ["b8", "h4096", "base_l8_h2048_s2048_b2", "s4096"])
def test_the_trace_of_one_gpu_foretells_measured_runs_where_kernels_decide(shared_data: Path, name: str) -> None:
    """Other batches, sequences, widths and vocabularies; the errors are in docs/changes.md."""
    source, cases = single(shared_data, name)
    errors = {target: error(source, cases[target]) for target in SINGLE_GPU_BOUND}
    assert max(map(abs, errors.values())) < 0.06, errors


@pytest.mark.data
def test_a_host_is_foretold_as_far_as_hosts_are_alike(shared_data: Path) -> None:
    """The same host took 10 to 50 % more or less from one run to the next."""
    source, cases = single(shared_data, "b8")
    errors = {target: error(source, cases[target]) for target in SINGLE_HOST_BOUND}
    assert max(map(abs, errors.values())) < 0.15, errors


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("l8_tp1", ("l8_tp1_fsdp8", "l8_fsdp8_ckpt", "l8_fsdp8_accum4")),
        ("l8_tp2", ("l8_tp1", "l8_tp1_fsdp8", "l8_fsdp8_ckpt", "l8_fsdp8_accum4")),
        ("l8_tp1_fsdp8", ("l8_tp1", "l8_fsdp8_ckpt", "l8_fsdp8_accum4")),
    ],
)
def test_a_rank_is_foretold_with_other_tensor_parallelism_and_sharding(
    shared_data: Path, name: str, targets: tuple[str, ...]
) -> None:
    """One rank of each configuration, recorded with a fake process group; kernels decide all targets."""
    folder = shared_data / "h200/parallel"
    cases = {n: json.loads((folder / f"{n}.json").read_text()) for n in (name, *targets)}
    source = CalibratedRun(replay(read_job(folder / f"{name}.pt.trace.json.gz")), measured_setup(cases[name]))
    errors = {target: error(source, cases[target]) for target in targets}
    assert max(map(abs, errors.values())) < 0.1, errors


@pytest.mark.data
def test_the_identity_of_a_real_trace_is_its_clean_step(shared_data: Path) -> None:
    source, _ = single(shared_data, "b8")
    assert predict(source, setup=source.setup).step_ms == pytest.approx(source.run.clean_ms, rel=1e-3)


@pytest.mark.data
def test_no_gpu_time_of_a_real_trace_is_lost(shared_data: Path) -> None:
    """Blocks, as often as they run, against the kernels of the stream that computes."""
    source, _ = single(shared_data, "b8")
    for row in source.understood:
        layers = 0 if row["phase"] == "optimizer" else source.setup.model.layers
        assert layers * row["layer_ms"] + row["ends_ms"] == pytest.approx(row["gpu_ms"], rel=0.02), row["phase"]


@pytest.mark.data
def test_the_kernels_of_a_real_trace_have_shapes_and_weights(shared_data: Path) -> None:
    source, _ = single(shared_data, "b8")
    model = source.setup.model
    inside, outside = source.weights.elements(Sizes(source.setup, source.setup), model.layers)
    assert source.has_shapes
    assert inside + outside == model.parameters()


@pytest.mark.data
def test_one_rank_of_a_fake_world_gets_its_collectives_from_the_model(shared_data: Path) -> None:
    trace = shared_data / "h200/fake_world/rank0_of_64_tp8_dp8.pt.trace.json.gz"
    described = Setup.model_validate(
        {
            "model": {"layers": 4, "hidden": 8192, "ffn": 28672, "heads": 64, "vocab": 32000},
            "train": {"seq": 4096},
            "parallel": {"tp": 8, "dp": 8, "zero": 3},
            "cluster": {"gpu": "h200", "gpus": 64},
        }
    )
    found = predict(CalibratedRun(replay(read_job(trace)), described), setup=described)
    assert found.step_ms > 1.1 * found.baseline_ms
    assert any("fake process group" in note for note in found.warnings)


def test_a_changed_prediction_parses_its_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Path] = []
    iterate = Slices.__iter__

    def counted(slices: Slices[Any]) -> Any:
        parsed.append(slices.path)
        return iterate(slices)

    monkeypatch.setattr(Slices, "__iter__", counted)
    trace = Path(__file__).parent / "data/architectures/phi3.json.gz"
    assert lumos("predict", "--from", trace, "--set", "train.micro_batch=4").returncode == 0
    assert parsed == [trace]
