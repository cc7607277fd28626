"""Another configuration of a traced run: both paths tell one story, and edits obey their laws."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lumos.analysis.kernel_labels import Phase, RankLabels, Work, label
from lumos.analysis.replay import replay
from lumos.change.calibration import (
    BlockingPrices,
    CalibratedPrices,
    Calibration,
    Factors,
    factors,
    less,
    modelled_times,
    work_of,
)
from lumos.change.change import CalibratedRun, calibrated_step, changed_step, loaded_step
from lumos.change.cut import MeasuredBlock, measure
from lumos.cost.in_step import in_step_factors
from lumos.errors import OptionError
from lumos.graph.simulate import Times
from lumos.prediction.prediction import predict
from lumos.program.block import BlockOp
from lumos.program.operators import Collective, Group, Operator
from lumos.setup.setup import Setup
from lumos.step.step import Step, prices_of, simulate_step
from lumos.trace.read.job import read_job
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


# Cutting a step into blocks, by hand


def labels_of(rows: list[tuple[Phase, Work, int, float]], launched: list[float] | None = None) -> RankLabels:
    """Kernels as (phase, work, attention, microseconds), launched 10 us apart unless times are given."""
    phase, work, attention, us = zip(*rows, strict=True)
    times = [10.0 * index for index in range(len(rows))] if launched is None else launched
    return RankLabels(
        3, np.arange(len(rows)), np.array(times), np.array(us), np.array(phase, np.uint8), np.array(work, np.uint8),
        np.array(attention, np.uint8), optimizer_us=77.0,
    )  # fmt: skip


def passes(microbatches: int, layers: int) -> list[tuple[Phase, Work, int, float]]:
    """An embedding of 5 us, layers of attention (2), matmul (30) and all-reduce (7), a head of 100; backward twice."""
    f, b = Phase.FORWARD, Phase.BACKWARD
    layer = [(f, Work.ATTENTION, 1, 2.0), (f, Work.MATRIX, 0, 30.0), (f, Work.COMM, 0, 7.0)]
    back = [(b, Work.COMM, 0, 7.0), (b, Work.MATRIX, 0, 60.0), (b, Work.ATTENTION, 2, 4.0)]
    forward = [(f, Work.STREAM, 0, 5.0), *layer * layers, (f, Work.MATRIX, 0, 100.0)]
    backward = [(b, Work.MATRIX, 0, 200.0), *back * layers, (b, Work.STREAM, 0, 10.0)]
    return [*(forward + backward) * microbatches, (Phase.OPTIMIZER, Work.STREAM, 0, 300.0)]


@pytest.mark.parametrize(("microbatches", "layers"), [(1, 4), (3, 4), (2, 2)])
def test_a_step_is_cut_at_its_attentions(microbatches: int, layers: int) -> None:
    """From one attention to the next is a layer; what is left of a pass is embedding and head."""
    stage = measure(labels_of(passes(microbatches, layers)), layers, microbatches)
    assert stage.rank == 3
    assert stage.forward.us.tolist() == pytest.approx([30, 2, 0, 7])
    assert stage.backward.us.tolist() == pytest.approx([60, 4, 0, 7])
    assert stage.ends_forward.us.tolist() == pytest.approx([100, 0, 5, 0])
    assert stage.ends_backward.us.tolist() == pytest.approx([200, 0, 10, 0])
    assert stage.optimizer.us.tolist() == [0, 0, 300, 0]
    assert stage.optimizer.host_us == 77
    assert stage.forward.host_us == stage.backward.host_us == 30, "three launches of 10 us"
    assert stage.before_us == 0


def test_one_layer_is_the_whole_pass() -> None:
    stage = measure(labels_of(passes(2, 1)), 1, 2)
    assert stage.forward.us.tolist() == pytest.approx([130, 2, 5, 7])
    assert stage.ends_forward.us.tolist() == [0, 0, 0, 0]


def test_chunks_of_a_stage_are_cut_one_by_one() -> None:
    """Two chunks of two layers run as two passes of two layers each."""
    stage = measure(labels_of(passes(4, 2)), 2, 2, chunks=2)
    assert stage.forward.us.tolist() == pytest.approx([30, 2, 0, 7])
    assert stage.ends_forward.us.tolist() == pytest.approx([200, 0, 10, 0]), "of a micro-batch"


def test_the_host_outside_layers_is_that_of_the_quickest_micro_batch() -> None:
    """Of 14 launches in a forward pass of 4 layers, 120 us belong to the layers; one micro-batch was held up."""
    rows = [row for row in passes(3, 4) if row[0] == Phase.FORWARD]
    rows += [row for row in passes(3, 4) if row[0] != Phase.FORWARD]
    launched = [10.0 * index + (5000 if index >= 20 else 0) + 40.0 for index in range(len(rows))]
    stage = measure(labels_of(rows, launched), 4, 3)
    assert stage.before_us == 40
    assert stage.forward.host_us == 30
    assert 0 <= stage.ends_forward.host_us <= 20


def test_attentions_that_do_not_match_the_setup_are_refused() -> None:
    with pytest.raises(OptionError, match="4 attention kernels in the forward pass, and the setup says 5 layers × 1"):
        measure(labels_of(passes(1, 4)), 5, 1)


# Calibration, by hand


def block(*us: float, host: float = 60.0) -> MeasuredBlock:
    return MeasuredBlock(np.array(us), host)


def test_a_factor_is_measured_over_modelled_time_of_every_kind_of_work() -> None:
    found = factors([block(20, 4, 9, 50), block(40, 4, 9, 150)], np.array([20.0, 8.0, 3.0, 50.0]), launches=30)
    assert found.gpu == pytest.approx((1.5, 0.5, 3.0, 2.0))
    assert found.measured == (True, True, True, True)
    assert found.launch_us == 2.0
    assert factors([block(1, 1, 1, 1)], np.ones(4), launches=0).launch_us is None


def test_what_only_one_of_trace_and_model_has_keeps_the_model() -> None:
    found = factors([block(20, 0, 9, 0)], np.array([20.0, 8.0, 0.0, 0.0]), launches=30)
    assert found.gpu == (1, 1, 1, 1)
    assert found.measured == (True, False, False, False)


@pytest.mark.parametrize(("measured", "factor"), [(19.0, 19.0), (21.0, 1.0), (0.06, 0.06), (0.04, 1.0)])
def test_a_factor_beyond_twenty_compares_two_different_things(measured: float, factor: float) -> None:
    assert factors([block(measured, 1, 1, 1)], np.ones(4), 1).gpu[Work.MATRIX] == pytest.approx(factor)


@pytest.mark.parametrize(("measured", "most", "factor"), [(900, 1000, 900), (1100, 1000, 1), (3, 2, 1), (1.9, 2, 1.9)])
def test_collectives_have_a_limit_of_their_own(measured: float, most: float, factor: float) -> None:
    assert factors([block(1, 1, 1, measured)], np.ones(4), 1, most).gpu == pytest.approx((1, 1, 1, factor))


def test_a_cpu_has_any_factor_and_no_time_for_what_it_does_not_run() -> None:
    found = factors([block(5000, 0, 0.0001, 3)], np.ones(4), 1, placeholders=True)
    assert found.gpu == pytest.approx((5000, 0, 0, 3))


def test_recomputation_is_taken_out_of_the_backward_pass_that_it_ran_in() -> None:
    left = less(block(30, 2, 5, 7, host=90), block(10, 2, 6, 0, host=100))
    assert left.us.tolist() == [20, 0, 0, 7]
    assert left.host_us == 0
    assert less(block(1, 1, 1, 1, host=90), block(0, 0, 0, 0, host=30)).host_us == 60


def calibration() -> Calibration:
    groups = {name: Factors((1.0, 2.0, 3.0, 4.0), launch_us=16.0) for name in ("forward", "ends_forward")}
    return Calibration(groups | {"optimizer": Factors((1.0, 2.0, 3.0, 4.0))}, 5.0, 6.0, 7.0, 0.55)


def test_a_slower_gpu_is_slower_at_everything_and_its_host_is_not() -> None:
    slow = calibration().slower(2.0)
    assert slow.groups["forward"] == Factors((2.0, 4.0, 6.0, 8.0), launch_us=16.0)
    assert (slow.data_parallel, slow.link, slow.fixed_us) == (10, 12, 7)


def test_a_slower_host_launches_more_slowly_where_launches_were_seen() -> None:
    slow = calibration().slower_host(2.0)
    assert slow.groups["forward"] == Factors((1.0, 2.0, 3.0, 4.0), launch_us=32.0)
    assert slow.groups["optimizer"].launch_us is None
    assert slow.data_parallel == 5


def test_communication_that_a_trace_lacks_is_replaced_everywhere() -> None:
    silent = calibration().with_communication(0.0)
    assert silent.groups["forward"].gpu == (1, 2, 3, 0)
    assert (silent.data_parallel, silent.link) == (0, 0)


def test_the_host_of_a_gpu_bound_step_goes_most_of_the_way_to_a_typical_one() -> None:
    """16 us seen and 1 us typical: 16 to the power of 0.35; the ends of the model keep theirs."""
    tempered = calibration().tempered(1.0)
    assert tempered.groups["forward"].launch_us == pytest.approx(16**0.35)
    assert calibration().tempered(81.0).groups["forward"].launch_us == pytest.approx(16**0.35 * 81**0.65)
    assert tempered.groups["ends_forward"].launch_us == 16
    assert tempered.groups["optimizer"].launch_us is None


def test_matmuls_and_attention_are_four_percent_slower_on_a_gpu_that_never_waits() -> None:
    """A GPU that is busy 95 % of the time and more runs at a lower clock than one that is busy 55 % and less."""
    busy = calibration().under(1.0)
    assert busy.groups["forward"].gpu == pytest.approx((1.04, 2.08, 3.0, 4.0))
    assert busy.load == 1
    assert calibration().under(0.75).groups["forward"].gpu == pytest.approx((1.02, 2.04, 3.0, 4.0))
    assert busy.under(0.3).groups["forward"].gpu == pytest.approx((1.0, 2.0, 3.0, 4.0))


def calibrated(kind: type[CalibratedPrices] = CalibratedPrices, **keys: Any) -> CalibratedPrices:
    """Prices of the setup above; operators of forward blocks 1, 2, 3 and 4 times as long, launches of 16 us."""
    prices = prices_of(setup(**keys), make_prices=kind)
    assert isinstance(prices, CalibratedPrices)
    prices.calibration = calibration()
    return prices


def test_prices_inside_a_block_have_the_factors_of_its_group() -> None:
    prices, plain = calibrated(), prices_of(setup())
    matmul, attention, add = (
        Operator("gemm_tn", (2048, 4096, 4096)), Operator("sdpa_fwd", (1, 32, 2048, 128)), Operator("add", (2048, 4096))
    )  # fmt: skip
    reduce, send = (Collective(kind, 1e8, Group(2, 2)) for kind in ("all_reduce", "p2p"))
    assert [work_of(work) for work in (matmul, attention, add, reduce)] == list(Work)
    with prices.inside(("forward", False)):
        for operator, factor in ((matmul, 1), (attention, 2), (add, 3)):
            assert prices.operator_us(operator) == pytest.approx(factor * plain.operator_us(operator))
        assert prices.collective_us(reduce) == pytest.approx(4 * plain.collective_us(reduce))
    assert prices.operator_us(attention) == plain.operator_us(attention), "outside of blocks"
    assert prices.collective_us(reduce) == pytest.approx(5 * plain.collective_us(reduce))
    assert prices.collective_us(send) == pytest.approx(6 * plain.collective_us(send))
    with prices.inside(("backward", False)):
        assert prices.operator_us(attention) == plain.operator_us(attention), "nothing is known of it"
    with prices.inside(("recompute", False)):
        assert prices.operator_us(attention) == pytest.approx(2 * plain.operator_us(attention)), "a forward pass again"


def test_a_launch_takes_what_the_trace_says_and_on_a_cpu_it_is_computing_time() -> None:
    ops = [BlockOp(Operator("add", (2048, 4096)), launches=3), BlockOp(Operator("sdpa_fwd", (1, 32, 2048, 128)))]
    found = calibrated().block(("forward", False), lambda: ops)
    assert found.host_us == pytest.approx(4 * 16.0)
    plain = prices_of(setup())
    add, attention = (plain.operator_us(op.work) for op in ops)  # type: ignore[arg-type]
    assert found.us == pytest.approx(3 * add + 2 * attention)
    unknown = calibrated().block(("optimizer", 1, 1), lambda: ops)
    assert unknown.host_us == pytest.approx(4 * plain.host_us)
    blocking = calibrated(BlockingPrices).block(("forward", False), lambda: ops)
    assert (blocking.us, blocking.compute_us, blocking.host_us) == pytest.approx((found.us + 64, found.us + 64, 0))
    us, launches = modelled_times(ops, plain)
    assert us.tolist() == pytest.approx([0, attention, add, 0])
    assert launches == pytest.approx(4)


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
        forward, backward = labels.of(Phase.FORWARD), labels.of(Phase.BACKWARD)
        assert (labels.attention[forward] == 1).sum() == 24 * 8
        assert (labels.attention[backward] == 2).sum() == 24 * 8
        assert (labels.us[labels.work == Work.MATRIX] > 0).all()


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


def test_another_parallelism_gets_a_wider_interval_and_a_note(source: CalibratedRun) -> None:
    same, other = predict(source, setup=setup()), predict(source, setup=setup().replaced({"parallel.dp": 8}))
    assert other.interval_ms[1] / other.step_ms > same.interval_ms[1] / same.step_ms
    assert any("parallelism differs" in note for note in other.warnings)


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
    write_synthetic(step, folder)
    return CalibratedRun(replay(read_job(folder)), described or step.setup)


def test_matmuls_that_took_longer_take_longer_in_every_configuration(tmp_path: Path) -> None:
    usual = in_step_factors(small().cluster.accelerator)
    slow = dataclasses.replace(usual, matrix=1.3 * usual.matrix)
    run = traced(simulate_step(small(), factors=slow), tmp_path)
    for name in ("forward", "backward"):
        matrix, attention, stream, _ = run.calibration.groups[name].gpu
        assert matrix == pytest.approx(1.3, rel=0.04)
        assert attention == pytest.approx(1.3, rel=0.04)
        assert stream == pytest.approx(1.0, rel=0.04)
        assert run.calibration.groups[f"ends_{name}"].gpu[Work.MATRIX] == pytest.approx(1.3, rel=0.04), "of the head"
    deeper = small().replaced({"model.layers": 8})
    assert predict(run, setup=deeper).step_ms == pytest.approx(simulate_step(deeper, factors=slow).us / 1e3, rel=0.03)


def step_computes_us(step: Step) -> float:
    """What the GPU of a single stage computes in a step."""
    blocks = sum(block.compute_us for chunk in step.chunks[0] for block in chunk.blocks)
    return step.plan.microbatches * blocks + step.role_us("optimizer", 0)


def test_a_calibration_that_knows_nothing_changes_nothing() -> None:
    assert Calibration() == Calibration({}, data_parallel=1.0, link=1.0, fixed_us=0.0, load=0.0)
    assert Factors() == Factors((1.0, 1.0, 1.0, 1.0), (False, False, False, False), None)
    assert calibrated_step(small(), Calibration()).us == simulate_step(small()).us


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "dp": 2}], ids=str)
def test_collectives_that_took_longer_take_longer_in_every_configuration(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    usual = prices_of(small()).network
    slow = dataclasses.replace(usual, penalty=2 * usual.penalty)
    run = traced(simulate_step(small(**layout), network=slow), tmp_path)
    assert run.calibration.data_parallel == pytest.approx(2.0, rel=0.05)
    assert run.calibration.link == pytest.approx(1.0, rel=0.05), "one stage has none"
    busy = step_computes_us(run.plain) / simulate_step(small(**layout), network=slow).us
    assert run.calibration.load == pytest.approx(busy, rel=0.02), "the GPU computes the rest of the time"
    if layout:
        assert run.calibration.groups["forward"].gpu[Work.COMM] == pytest.approx(2.0, rel=0.05)
    deeper = small(**layout).replaced({"model.layers": 8})
    assert predict(run, setup=deeper).step_ms == pytest.approx(simulate_step(deeper, network=slow).us / 1e3, rel=0.03)


def test_recomputation_of_a_trace_is_a_forward_pass_inside_the_backward_pass(tmp_path: Path) -> None:
    again = small().replaced({"train.recompute": "full"})
    run = traced(simulate_step(again), tmp_path)
    assert run.calibration.groups["backward"].gpu[Work.MATRIX] == pytest.approx(1.0, rel=0.04)
    assert predict(run, setup=small()).step_ms == pytest.approx(simulate_step(small()).us / 1e3, rel=0.03)


def test_what_was_understood_of_a_trace_adds_up_to_its_kernels(tmp_path: Path) -> None:
    run = traced(simulate_step(small(dp=1)), tmp_path)
    rows = {row["phase"]: row for row in run.understood}
    assert list(rows) == ["forward", "backward", "optimizer"]
    for phase in ("forward", "backward"):
        row = rows[phase]
        assert row["gpu_ms"] == pytest.approx(2 * (4 * row["layer_ms"] + row["ends_ms"]), rel=0.02)
        block = run.plain.chunks[0][0].forward if phase == "forward" else run.plain.chunks[0][0].backward
        assert row["gpu_ms"] == pytest.approx(2 * block.us / 1e3, rel=0.02)
        stage = run.stages[0].forward if phase == "forward" else run.stages[0].backward
        assert row["layer_host_ms"] == pytest.approx(stage.host_us / 1e3)
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
        _ = traced(late, tmp_path).calibration


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
    assert run.calibration.link == pytest.approx(2.0, rel=0.05)


def test_the_host_of_the_optimizer_launches_as_often_as_the_stages_of_the_trace_have_tensors(tmp_path: Path) -> None:
    step = simulate_step(small(pp=2, dp=1).replaced({"train.framework": "pytorch", "parallel.dp": 1}))
    run = traced(step, tmp_path)
    assert run.calibration.groups["optimizer"].launch_us == pytest.approx(step.prices.host_us, rel=0.1)


def test_the_clock_of_a_step_is_that_of_its_load(tmp_path: Path) -> None:
    """What its GPUs compute, blocks and update, over the step; a mean over the stages."""
    described = small(pp=2, dp=2)
    plain = calibrated_step(described, Calibration())
    blocks = sum(block.compute_us for row in plain.chunks for chunk in row for block in chunk.blocks) / 2
    updates = sum(plain.role_us("optimizer", stage) for stage in range(2)) / 2
    found = loaded_step(described, Calibration()).prices
    assert isinstance(found, CalibratedPrices)
    assert found.calibration.load == pytest.approx((2 * blocks + updates) / plain.us)


# The command line and measured runs


def lumos(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lumos.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


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


def single(data: Path, name: str) -> tuple[CalibratedRun, dict[str, Any]]:
    cases = {c["name"]: c for c in json.loads((data / "h200/single/measured.json").read_text())["results"]}
    trace = data / f"h200/single/{name}.pt.trace.json.gz"
    return CalibratedRun(replay(read_job(trace)), measured_setup(cases[name])), cases


def measured_setup(case: dict[str, Any]) -> Setup:
    sizes = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    train = {"seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1),
             "recompute": "full" if case.get("ckpt") else "none"}  # fmt: skip
    model = sizes | {"kv_heads": case.get("kv", case["heads"])}
    return Setup.model_validate({"model": model, "train": train, "cluster": {"gpu": "h200", "gpus": 1}})


@pytest.mark.data
def test_a_gpu_bound_trace_foretells_measured_runs(shared_data: Path) -> None:
    source, cases = single(shared_data, "b8")
    for name in ("b4", "s4096", "h4096", "l16", "h1024", "ckpt", "tiny_l2_h512"):
        truth = 1e3 * cases[name]["step_s_median"]
        assert predict(source, setup=measured_setup(cases[name])).step_ms == pytest.approx(truth, rel=0.12), name


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
