"""Stragglers: slowdowns of jobs whose answer is known, by construction or as published, and their causes."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import lumos_here
from lumos import read_job, replay
from lumos.analysis.slowdown import Slowdown, slowdown
from lumos.analysis.slowdown_causes import Diagnosis, SlowdownCause, diagnose, job_of, stragglers
from lumos.analysis.slowdown_jobs import job_of_table
from lumos.read.operation_table import is_operation_table, read_operation_table
from lumos.report.slowdowns import slowdown_cards
from support import Event, call, header, kernel, memcpy, note, op, write_trace
from synthetic_jobs import Job, Pass

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"
sys.path.insert(0, str(ROOT / "calibration"))

from step_times_data import STRAGGLERS, Recorded, unpack  # noqa: E402


def of(job: Job, folder: Path, layers: int = 0) -> Diagnosis:
    """What is said about a synthetic job."""
    return diagnose(slowdown(job_of_table(read_operation_table(job.write(folder / "job.parquet")))), layers)


def lost(frame: polars.DataFrame, folder: Path) -> Slowdown:
    path = folder / "some.parquet"
    frame.write_parquet(path)
    return slowdown(job_of_table(read_operation_table(path)))


def kinds(found: Diagnosis) -> list[str]:
    return [cause.kind for cause in found.causes]


def first(found: Diagnosis) -> SlowdownCause:
    assert found.causes
    return found.causes[0]


# ---------------------------------------------------------------------- as published
@pytest.fixture(scope="module", params=["AR", "ST"])
def published(request: pytest.FixtureRequest, shared_data: Path) -> tuple[Diagnosis, dict[str, Any], dict[str, float]]:
    """A job of the paper, what Lumos says of it, and what was published."""
    folder, name = shared_data / "public/straggler_jobs", request.param
    if not folder.is_dir():
        pytest.skip("the jobs of the paper are not among the shared measurements")
    told = json.loads((folder / f"result-{name}.json").read_text())
    shares = {key: json.loads((folder / f"{key.lower()}-{name}.json").read_text())[key] for key in ("Ms", "Mw")}
    found = diagnose(slowdown(job_of_table(read_operation_table(folder / f"trace-{name}.parquet"))), layers=32)
    return found, told, shares


def test_slowdowns_are_those_that_were_published(published: Any) -> None:
    found, told, shares = published
    ours, answer = found.slowdown, found.as_dict()
    assert ours.slowdown == pytest.approx(told["blocking_slowdown"], rel=1e-4)
    assert ours.launch_slowdown == pytest.approx(told["launch_slowdown"], rel=1e-4)
    assert ours.by_type == pytest.approx(told["blocking_decompose_by_optype"], abs=1e-3)
    stages = {int(key): value for key, value in told["blocking_decompose_by_stage"].items()}
    replicas = {int(key): value for key, value in told["blocking_decompose_by_dp_rank"].items()}
    assert ours.by_stage == pytest.approx(stages, abs=1e-3)
    assert ours.by_dp_rank == pytest.approx(replicas, abs=1e-3)
    for row in answer["by_worker"]:
        assert row["slowdown"] == pytest.approx(min(stages[row["stage"]], replicas[row["dp_rank"]]), abs=1e-3)
    steps = {row["step"]: row["slowdown"] for row in answer["steps"]}
    assert steps == pytest.approx(told["blocking_step_slowdown"], abs=2e-3)
    assert answer["ms"] == pytest.approx(shares["Ms"], abs=1e-3)
    assert answer["mw"] == pytest.approx(shares["Mw"], abs=1e-3)


def test_every_step_is_replayed_within_one_and_a_half_percent(published: Any) -> None:
    ours: Slowdown = published[0].slowdown
    assert abs(ours.error_pct) < 0.01
    assert abs(ours.worst_error_pct) < 0.01
    assert ours.held_out_error_pct is not None  # launched as in other steps: a prediction
    assert ours.held_out_worst_pct is not None
    assert abs(ours.held_out_error_pct) < 0.5
    assert abs(ours.held_out_worst_pct) < 1.5


def test_no_single_fix_of_a_published_job_gains_more_than_everything_ideal(published: Any) -> None:
    assert_parts_stay_below_the_whole(published[0])


def test_the_causes_are_those_that_the_jobs_are_known_for(published: Any) -> None:
    found, told, _ = published
    cause = first(found)
    if told["job_meta"]["trial_name"] == "AR":
        assert (cause.kind, cause.name) == ("slow worker", "dp 0, stage 0 (rank 0)")
        assert 45 < cause.gain_pct < 55
    else:
        assert (cause.kind, cause.name) == ("long stage", "stage 3 (the last)")
        assert "move about 4 of the 32 layers" in cause.evidence


# ---------------------------------------------------------------------- known by construction
SHAPES = [
    {}, {"pp": 1}, {"dp": 1, "pp": 4}, {"pp": 4, "microbatches": 8}, {"pp": 4, "empty": True}, {"pp": 2, "vpp": 2},
    {"pp": 4, "vpp": 2, "microbatches": 8, "empty": True}, {"pp": 4, "vpp": 3, "microbatches": 8},
    {"pp": 2, "overlapped": True}, {"dp": 3, "pp": 4, "vpp": 2, "microbatches": 8, "overlapped": True, "empty": True},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pipeline_of_any_shape_is_replayed_exactly(shape: dict[str, Any], tmp_path: Path) -> None:
    job = Job(**shape, cost=lambda p: 1 + hash(p) % 7 / 5)
    found = slowdown(job_of_table(read_operation_table(job.write(tmp_path / "job.parquet"))))
    expected = [1e3 * job.step_seconds(step) for step in range(job.steps)]
    assert found.base_ms.tolist() == pytest.approx(expected, rel=1e-9)  # the graph alone, without recorded delays
    assert found.job.warnings == ()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ideal_job_is_the_one_whose_passes_all_take_the_mean(shape: dict[str, Any], tmp_path: Path) -> None:
    job = Job(**shape, cost=lambda p: 3.0 if (p.replica, p.stage) == (0, 0) else 1.0)
    found = slowdown(job_of_table(read_operation_table(job.write(tmp_path / "job.parquet"))))
    mean = 1 + 2 / (job.dp * job.pp)
    assert found.ideal_ms.mean() == pytest.approx(1e3 * replace(job, cost=lambda p: mean).step_seconds(), rel=1e-9)


def test_a_worker_that_is_twice_as_slow_is_found_and_what_mending_it_gives(tmp_path: Path) -> None:
    job = Job(dp=4, pp=2, microbatches=8, steps=4, cost=lambda p: 2.0 if (p.replica, p.stage) == (2, 1) else 1.0)
    found = of(job, tmp_path)
    cause = first(found)
    assert (cause.kind, cause.name) == ("slow worker", "dp 2, stage 1 (rank 6)")
    assert "2.00 times" in cause.evidence
    assert "4 of 4 steps" in cause.evidence
    healthy = replace(job, cost=lambda p: 1.0)
    assert cause.gain_ms == pytest.approx(1e3 * (job.step_seconds() - healthy.step_seconds()), rel=1e-9)
    assert found.as_dict()["by_worker"][0]["rank"] == 6
    assert found.slowdown.mw == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("dp", [2, 3, 8])
@pytest.mark.parametrize("factor", [1.2, 2.0, 10.0])
def test_no_single_fix_gains_more_than_everything_ideal(dp: int, factor: float, tmp_path: Path) -> None:
    """The mean of each type includes the slow worker, so that the published ideal may be slower than one fix."""
    slow = Job(dp=dp, pp=2, cost=lambda p: factor if (p.replica, p.stage) == (1, 0) else 1.0 + 0.3 * p.stage)
    assert_parts_stay_below_the_whole(of(slow, tmp_path))


def assert_parts_stay_below_the_whole(found: Diagnosis) -> None:
    whole = next(fix for fix in found.fixes if fix.name == "everything ideal")
    assert found.fixes[0] == whole
    assert whole.step_ms == found.attainable_ms <= min(fix.step_ms for fix in found.fixes)
    assert all(cause.gain_ms <= whole.gain_ms + 1e-6 for cause in found.causes if not cause.after)
    cards = [card for card in slowdown_cards(found) if "of the lost time" in card.note]
    assert all(float(card.value.rstrip(" %")) <= 100 for card in cards)


def test_a_trace_that_contradicts_itself_is_never_left_with_less_than_no_step(tmp_path: Path) -> None:
    """As one whose times overflow: it is simulated as far longer than it was recorded."""
    slow = Job(dp=3, steps=4, cost=lambda p: 2.0 if p.replica == 1 else 1.0)
    job = job_of_table(read_operation_table(slow.write(tmp_path / "job.parquet")))
    found = diagnose(slowdown(replace(job, recorded_ms=job.recorded_ms / 1e6)))
    assert found.fixes
    assert all(fix.step_ms >= 0 and fix.gain_pct <= 100 for fix in found.fixes)


@pytest.mark.data
@pytest.mark.parametrize("job", ["AR", "ST"])  # both have launches that come late
def test_what_a_fix_leaves_and_what_it_gains_are_the_recorded_step(shared_data: Path, job: str) -> None:
    found = stragglers(shared_data / f"public/straggler_jobs/trace-{job}.parquet")
    recorded = float(found.slowdown.job.recorded_ms.mean())
    assert found.slowdown.launch_slowdown > 1.005
    assert [fix.step_ms + fix.gain_ms for fix in found.fixes] == pytest.approx([recorded] * len(found.fixes))
    assert_parts_stay_below_the_whole(found)


def test_workers_that_are_slow_at_the_same_time_are_mended_together(tmp_path: Path) -> None:
    job = Job(dp=6, pp=2, steps=2, cost=lambda p: 2.0 if p.stage == 0 and p.replica in (1, 4) else 1.0)
    cause = first(of(job, tmp_path))
    assert cause.name == "dp 1, stage 0 (rank 1); dp 4, stage 0 (rank 4)"
    healthy = replace(job, cost=lambda p: 1.0)
    assert cause.gain_ms == pytest.approx(1e3 * (job.step_seconds() - healthy.step_seconds()), rel=1e-9)


def test_a_long_last_stage_is_found_and_how_many_layers_to_move(tmp_path: Path) -> None:
    job = Job(dp=2, pp=4, microbatches=8, cost=lambda p: 1.8 if p.stage == 3 else 1.0)
    found = of(job, tmp_path, layers=40)
    cause = first(found)
    assert (cause.kind, cause.name) == ("long stage", "stage 3 (the last)")
    assert "move about 6 of the 40 layers" in cause.evidence  # 0.6 of a stage of ten layers
    even = replace(job, cost=lambda p: 1.2)
    assert cause.gain_ms == pytest.approx(1e3 * (job.step_seconds() - even.step_seconds()), rel=1e-9)
    assert "slow worker" not in kinds(found)


def test_a_cause_that_hides_behind_another_is_named_with_what_it_gains_then(tmp_path: Path) -> None:
    job = Job(dp=4, pp=2, cost=lambda p: (3.0 if (p.replica, p.stage) == (1, 0) else 1.0) * (1.5 if p.stage else 1.0))
    found = of(job, tmp_path)
    assert [(cause.kind, cause.after) for cause in found.causes] == [("slow worker", ""), ("long stage", "slow worker")]
    mended, even = replace(job, cost=lambda p: 1.5 if p.stage else 1.0), replace(job, cost=lambda p: 1.25)
    assert found.causes[1].gain_ms == pytest.approx(1e3 * (mended.step_seconds() - even.step_seconds()), rel=1e-9)


def by_length(p: Pass) -> float:
    return 1 + (7 * p.microbatch + 11 * p.replica + 5 * p.step) % 13 / 6


def by_chance(p: Pass) -> float:
    return 1 + hash(p) % 13 / 6


def test_sequence_lengths_are_told_from_other_variation_by_the_backward_passes(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"dp": 4, "pp": 2, "microbatches": 8, "steps": 6}
    by_sequence, random = (of(Job(**shape, cost=cost), tmp_path) for cost in (by_length, by_chance))
    assert first(by_sequence).kind == "sequence lengths"
    assert "correlation of 1.00" in first(by_sequence).evidence
    assert "sequence lengths" not in kinds(random)
    assert "uneven passes" in kinds(random)


def test_a_disturbance_of_one_step_is_transient_and_no_slow_worker(tmp_path: Path) -> None:
    job = Job(dp=4, pp=2, steps=8, cost=lambda p: 3.0 if (p.replica, p.stage, p.step) == (1, 0, 5) else 1.0)
    found = of(job, tmp_path)
    cause = next(one for one in found.causes if one.kind == "transient")
    assert "1 of 8 steps (15)" in cause.evidence
    assert "dp 1, stage 0 costs most" in cause.evidence
    assert kinds(found) == ["transient"]


def test_of_steps_in_which_all_are_slow_nobody_is_named(tmp_path: Path) -> None:
    found = of(Job(dp=4, pp=2, steps=8, cost=lambda p: 1.5 if p.step == 5 else 1.0), tmp_path)
    assert kinds(found) == ["transient"]
    assert "no worker stands out" in first(found).evidence


def test_percentages_are_of_the_recorded_step(tmp_path: Path) -> None:
    found = of(Job(dp=3, pause=lambda p: 0.5, cost=lambda p: 1 + (p.replica == 1)), tmp_path)
    recorded = found.slowdown.job.recorded_ms.mean()
    assert found.slowdown.launch_slowdown > 1.05
    assert kinds(found) == ["slow worker", "launch delays"]
    answer = found.as_dict()
    for one in (*answer["causes"], *answer["fixes"]):
        assert one["gain_pct"] == pytest.approx(100 * one["gain_ms"] / recorded)


@pytest.mark.parametrize(("factor", "shown"), [(1.0, False), (1.001, False), (1.5, True)])
def test_shares_of_lost_time_are_shown_where_some_is_lost(factor: float, shown: bool, tmp_path: Path) -> None:
    job = Job(dp=4, cost=lambda p: factor if p.replica == 1 else 1.0)
    assert ("slow worker" in [card.label for card in slowdown_cards(of(job, tmp_path))]) == shown


def test_time_in_which_a_host_does_not_launch_is_a_delay_and_no_slowdown(tmp_path: Path) -> None:
    paused = Job(pause=lambda p: 0.5 if p.microbatch == 2 and not p.backward else 0.0)
    found, usual = of(paused, tmp_path), of(Job(), tmp_path)
    assert first(found).kind == "launch delays"
    assert "forward-compute" in first(found).evidence
    assert found.slowdown.slowdown == pytest.approx(usual.slowdown.slowdown)
    assert abs(found.slowdown.error_pct) < 1e-9


def test_slow_transfers_are_communication(tmp_path: Path) -> None:
    frame = Job(dp=2, pp=1, steps=8).frame()
    slow = (polars.col("optype") == "grads-reduce-scatter") & (polars.col("step") % 4 == 0)
    late = polars.col("optype").is_in(["optimizer", "optimizer-clip-main-grad"]) & (polars.col("step") % 4 == 0)
    frame = frame.with_columns(
        polars.when(slow).then(polars.col("duration") + 5).otherwise(polars.col("duration")).alias("duration"),
        polars.when(late).then(polars.col("start_ts") + 5).otherwise(polars.col("start_ts")).alias("start_ts"),
    )
    found = diagnose(lost(frame, tmp_path))
    cause = next(one for one in found.causes if one.kind == "communication")
    assert cause.gain_ms == pytest.approx(5e3 / 4, rel=1e-6)
    assert "grads-reduce-scatter" in cause.evidence


# ---------------------------------------------------------------------- laws
@settings(max_examples=12)
@given(dp=st.integers(1, 3), pp=st.integers(1, 3), batches=st.integers(1, 4), cost=st.floats(0.01, 100))
def test_a_job_whose_workers_are_alike_loses_nothing(
    tmp_path: Path, dp: int, pp: int, batches: int, cost: float
) -> None:
    found = of(Job(dp=dp, pp=pp, microbatches=batches, cost=lambda p: cost), tmp_path)
    assert found.slowdown.slowdown == pytest.approx(1)
    assert [cause.kind for cause in found.causes] == []
    assert found.slowdown.mw is None


@settings(max_examples=12)
@given(chosen=st.integers(0, 3), factor=st.floats(1.1, 20))
def test_mending_a_worker_never_makes_a_step_longer_nor_shorter_than_without_it(
    tmp_path: Path, chosen: int, factor: float
) -> None:
    job = Job(dp=2, pp=2, cost=lambda p: factor if 2 * p.replica + p.stage == chosen else 1.0)
    found = of(job, tmp_path)
    healthy = 1e3 * replace(job, cost=lambda p: 1.0).step_seconds()
    assert found.slowdown.slowdown >= 1
    assert found.slowdown.job.workers[int(found.slowdown.slowest[0])][1:] == divmod(chosen, 2)
    mended = next(fix for fix in found.fixes if fix.name.endswith("as the other replicas"))
    assert healthy * (1 - 1e-9) <= mended.step_ms <= found.slowdown.base_ms.mean()


@settings(max_examples=8)
@given(order=st.permutations(range(3)), seed=st.integers(0, 10**6))
def test_the_numbers_of_replicas_and_the_order_of_rows_mean_nothing(
    tmp_path: Path, order: list[int], seed: int
) -> None:
    frame = Job(dp=3, pp=2, cost=lambda p: 1 + hash((p, seed)) % 5 / 4).frame()
    renamed = frame.with_columns(polars.col("dp_rank").replace(dict(enumerate(order)))).sample(
        fraction=1.0, shuffle=True, seed=seed
    )
    before, after = lost(frame, tmp_path), lost(renamed, tmp_path)
    assert after.slowdown == pytest.approx(before.slowdown)
    assert after.by_type == pytest.approx(before.by_type)
    assert {order[rank]: value for rank, value in before.by_dp_rank.items()} == pytest.approx(after.by_dp_rank)


# ---------------------------------------------------------------------- tables as people write them
def test_csv_compressed_or_not_says_what_parquet_says(tmp_path: Path) -> None:
    job = Job(cost=lambda p: 1 + p.stage)
    parquet, plain = job.write(tmp_path / "a.parquet"), job.write(tmp_path / "b.csv")
    packed = tmp_path / "c.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert all(map(is_operation_table, (parquet, plain, packed)))
    found = [slowdown(job_of_table(read_operation_table(path))).as_dict() for path in (parquet, plain, packed)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "missing", [["rank"], ["seq_id"], ["mc", "gmc"], ["mb_id"], ["rank", "seq_id", "mc", "gmc", "mb_id"]], ids=str
)
def test_columns_that_follow_from_others_may_be_missing(missing: list[str], tmp_path: Path) -> None:
    frame = Job(dp=2, pp=4, microbatches=6, cost=lambda p: 1 + hash(p) % 3).frame()
    whole, less = lost(frame, tmp_path), lost(frame.drop(missing), tmp_path)
    assert less.slowdown == whole.slowdown
    assert less.by_type == whole.by_type
    assert less.job.warnings == ()


LACKING = {
    "no forward-send, backward-send": "-send",
    "no forward-recv, backward-recv": "-recv",
    "no messages between stages": "-(send|recv)",
    "no forward-send, forward-recv": "forward-(send|recv)",
}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.get("pp") != 1], ids=str)
@pytest.mark.parametrize("note", LACKING)
def test_without_messages_passes_wait_for_their_micro_batch_in_the_neighbouring_stage(
    note: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    slow = {"steps": 1, "transfer": 0.0, "cost": lambda p: 2.0 if (p.replica, p.stage) == (0, 1) else 1.0}
    frame = Job(**shape | slow).frame().with_columns(polars.col("optype").cast(polars.String))
    whole, less = (lost(f, tmp_path) for f in (frame, frame.filter(~polars.col("optype").str.contains(LACKING[note]))))
    assert less.base_ms.tolist() == pytest.approx(whole.base_ms.tolist(), rel=1e-9)
    assert less.ideal_ms.tolist() == pytest.approx(whole.ideal_ms.tolist(), rel=1e-9)
    assert less.launch_slowdown == pytest.approx(1)
    assert [text for text in less.job.warnings if note in text]


def test_without_messages_and_micro_batches_the_order_of_passes_counts(tmp_path: Path) -> None:
    frame = Job(pp=2, vpp=2, transfer=0.0, cost=lambda p: 1 + p.stage).frame()
    bare = frame.filter(~polars.col("optype").cast(polars.String).str.contains("-(send|recv)")).drop("mb_id")
    assert lost(bare, tmp_path).slowdown == pytest.approx(lost(frame, tmp_path).slowdown)


def test_passes_without_messages_that_contradict_their_stages_are_refused(tmp_path: Path) -> None:
    frame = Job(pp=2, steps=1).frame()
    path = tmp_path / "job.parquet"
    bare = frame.filter(~polars.col("optype").cast(polars.String).str.contains("-(send|recv)"))
    bare.with_columns((1 - polars.col("stage")).alias("stage")).write_parquet(path)
    done = lumos_here("stragglers", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "before it ends in stage" in done.stderr


def test_a_table_by_rank_alone_is_of_replicas(tmp_path: Path) -> None:
    frame = Job(dp=4, pp=1, cost=lambda p: 1 + p.replica).frame().drop("dp_rank", "stage")
    assert list(lost(frame, tmp_path).by_dp_rank)[:2] == [3, 2]


def test_ranks_of_one_tensor_parallel_group_count_once(tmp_path: Path) -> None:
    frame = Job(cost=lambda p: 1 + p.stage).frame()
    both = polars.concat([frame.with_columns((polars.col("rank") * 2 + i).alias("rank")) for i in (0, 1)])
    found = lost(both, tmp_path)
    assert found.slowdown == lost(frame, tmp_path).slowdown
    assert "tensor parallelism" in found.job.warnings[0]


def test_times_may_count_from_any_moment(tmp_path: Path) -> None:
    frame = Job().frame()
    later = frame.with_columns(polars.col("start_ts") + 1.7e9 + 100 * polars.col("step"))
    assert lost(later, tmp_path).slowdown == pytest.approx(lost(frame, tmp_path).slowdown, rel=1e-6)


def test_clocks_that_differ_a_little_change_nothing(tmp_path: Path) -> None:
    frame = Job(dp=2, pp=4, microbatches=8, cost=lambda p: 0.1 + 0.1 * (p.stage == 2)).frame()
    skewed = frame.with_columns(polars.col("start_ts") + 0.004 * (polars.col("stage") % 2))
    before, after = lost(frame, tmp_path), lost(skewed, tmp_path)
    assert after.base_ms.mean() == pytest.approx(before.base_ms.mean(), abs=5)
    assert after.slowdown == pytest.approx(before.slowdown, abs=0.02)  # medians of transfers differ


def test_steps_that_lack_workers_are_left_out_and_workers_that_lack_everywhere_are_named(tmp_path: Path) -> None:
    frame = Job(dp=2, pp=2, steps=3).frame()
    some = frame.filter(~((polars.col("step") == 11) & (polars.col("dp_rank") == 1)))
    found = lost(some, tmp_path)
    assert found.job.steps == ("10", "12")
    assert "1 of 3 steps lack some workers" in found.job.warnings[0]
    less = lost(frame.filter(~((polars.col("stage") == 1) & (polars.col("dp_rank") == 1))), tmp_path)
    assert "3 of 4 workers" in less.job.warnings[0]
    assert "no counterpart" in less.job.warnings[1]


def test_an_operation_of_another_kind_is_work_of_its_worker(tmp_path: Path) -> None:
    frame = Job(steps=1).frame().with_columns(polars.col("optype").cast(polars.String))
    loading = frame.filter(polars.col("optype") == "gc").with_columns(
        polars.lit("data-loading").alias("optype"),
        polars.lit(0.0).alias("start_ts"),
        polars.lit(0.02).alias("duration"),
    )
    found = lost(polars.concat([frame, loading]), tmp_path)
    assert "data-loading" in found.by_type
    assert "'data-loading' is not a type that Lumos knows" in found.job.warnings[0]


def spoilt(change: Callable[[polars.DataFrame], polars.DataFrame]) -> polars.DataFrame:
    return change(Job(steps=1).frame().with_columns(polars.col("optype").cast(polars.String)))


def value(column: str, text: Any) -> Callable[[polars.DataFrame], polars.DataFrame]:
    """One value of a column, in its third row."""
    place = polars.int_range(polars.len()) == 2
    return lambda frame: frame.with_columns(polars.when(place).then(text).otherwise(polars.col(column)).alias(column))


BAD = {
    "no column optype": spoilt(lambda f: f.drop("optype")),
    "no column that names the worker": spoilt(lambda f: f.drop("rank", "dp_rank", "stage")),
    "did you mean 'forward-compute'": spoilt(value("optype", polars.lit("foward-compute"))),
    "unknown types of operations": spoilt(
        lambda f: f.with_columns(("kind " + polars.int_range(polars.len()).cast(polars.String)).alias("optype"))
    ),
    "no row of optype forward-compute": spoilt(lambda f: f.filter(polars.col("optype") == "optimizer")),
    "duration is missing in 1 rows, first in row 3": spoilt(value("duration", polars.lit(None))),
    "start_ts is missing in 1 rows": spoilt(value("start_ts", polars.lit(float("nan")))),
    "duration -1 is negative": spoilt(value("duration", polars.lit(-1.0))),
    "step 0.5 is not a whole number": spoilt(value("step", polars.lit(0.5))),
    "stage -1 is not": spoilt(value("stage", polars.lit(-1))),
    "dp_rank 2147483648 is not": spoilt(value("dp_rank", polars.lit(2**31))),
    "row 3: duration 'soon' is not a number": spoilt(
        lambda f: value("duration", polars.lit("soon"))(f.with_columns(polars.col("duration").cast(polars.String)))
    ),
    "mc 3e+08 is not below": spoilt(value("mc", polars.lit(300_000_000))),
    "longer than thirty years": spoilt(value("duration", polars.lit(1e300))),
    "no operation takes any time": spoilt(lambda f: f.with_columns(polars.lit(0.0).alias("duration"))),
    "has no rows": spoilt(lambda f: f.head(0)),
    "occurs 2 times in step 10": spoilt(lambda f: polars.concat([f, f])),
    "single precision": spoilt(lambda f: f.with_columns((polars.col("start_ts") + 1.7e9).cast(polars.Float32))),
    "mb_id is Struct({'a': Int64}), not a number": spoilt(
        lambda f: f.with_columns(polars.struct(a="mb_id").alias("mb_id"))
    ),
    "duration is List(Float64), not a number": spoilt(
        lambda f: f.with_columns(polars.concat_list("duration").alias("duration"))
    ),
    "optype is Int64": spoilt(lambda f: f.with_columns(polars.lit(1, polars.Int64).alias("optype"))),
}


@pytest.mark.parametrize("message", BAD)
def test_a_table_that_cannot_be_right_is_refused_in_one_line(message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.parquet"
    BAD[message].write_parquet(path)
    done = lumos_here("stragglers", path)
    assert done.returncode == 2
    assert message in done.stderr
    assert str(path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    "content", [b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"optype,step\n1,2,3\n", b"optype,\xff\n"]
)
def test_a_damaged_table_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.table"
    path.write_bytes(content)
    done = lumos_here("stragglers", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", " \n", "is empty"),
        ("a.parquet", "hello", "not a Parquet"),
        ("a.toml", "[model]\nlayers = 8\n", "a TOML file"),
    ],
)
def test_a_file_that_is_no_table_is_told_so(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    done = lumos_here("stragglers", tmp_path / name)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_times_that_look_like_milliseconds_are_asked_about(tmp_path: Path) -> None:
    frame = Job(steps=1).frame().with_columns(polars.col("start_ts", "duration") * 1000)
    assert "are the times in seconds?" in lost(frame, tmp_path).job.warnings[0]


def test_a_table_whose_header_is_misspelt_is_told_which_column_lacks(tmp_path: Path) -> None:
    path = tmp_path / "job.csv"
    path.write_text(Job(steps=1).write(tmp_path / "good.csv").read_text().replace("optype", "op_type"))
    done = lumos_here("stragglers", path)
    assert done.returncode == 2
    assert "no column optype" in done.stderr


def test_an_order_that_no_pipeline_has_is_refused(tmp_path: Path) -> None:
    frame = Job(pp=2, steps=1).frame()
    swapped = frame.with_columns(
        polars.when((polars.col("mb_id") >= 0) & (polars.col("stage") == 1)).then(3 - polars.col("mb_id"))
        .otherwise(polars.col("mb_id")).alias("mb_id")
    )  # fmt: skip
    path = tmp_path / "job.parquet"
    swapped.write_parquet(path)
    done = lumos_here("stragglers", path)
    assert done.returncode == 2
    assert "contradicts itself" in done.stderr


# ---------------------------------------------------------------------- traces
@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """Jobs on an H200 with and without a slow rank."""
    return {run.name: run for run in unpack(STRAGGLERS, tmp_path_factory.mktemp("stragglers"))}


def test_the_slow_rank_of_a_trace_is_the_one_that_a_replay_names() -> None:
    run = replay(read_job(EXAMPLE))
    found = diagnose(slowdown(job_of(run)))
    answer = found.as_dict()
    assert answer["by_worker"][0]["rank"] == run.stragglers[0].rank == 2
    assert answer["by_worker"][0]["why"] == run.stragglers[0].why
    assert (first(found).kind, first(found).name, first(found).evidence) == (
        "slow worker",
        "rank 2",
        run.stragglers[0].why,
    )
    assert 1.1 < answer["slowdown"] < 1.3
    assert answer["simulated_ms"] == pytest.approx(run.simulated_steps.mean)
    assert found.slowdown.base_ms.tolist() == pytest.approx(run.simulated_steps.milliseconds.tolist())


@pytest.mark.parametrize(("name", "rank", "pause_ms"), [("ddp2_pause", 1, 12.0), ("ddp3_pause", 2, 15.0)])
def test_a_rank_that_pauses_is_named_and_mending_it_gives_what_was_measured(
    recorded: dict[str, Recorded], name: str, rank: int, pause_ms: float
) -> None:
    found = diagnose(slowdown(job_of(replay(read_job(recorded[name].traces)))))
    even = recorded[f"{name.split('_')[0]}_even"]
    gained = float(np.median(recorded[name].clean) - np.median(even.clean))
    assert (first(found).kind, first(found).name) == ("slow worker", f"rank {rank}")
    assert first(found).gain_ms == pytest.approx(gained, rel=0.2)
    assert gained > pause_ms


def test_a_replay_and_the_causes_agree_on_what_a_rank_costs() -> None:
    run = replay(read_job(EXAMPLE))
    found = diagnose(slowdown(job_of(run)))
    fixes = {fix.name: fix.gain_ms for fix in found.fixes}
    for one in run.stragglers:
        if (name := f"rank {one.rank} like the others") in fixes:
            assert fixes[name] == pytest.approx(one.costs_others_ms, abs=1e-6)
    assert first(found).gain_ms == pytest.approx(run.stragglers[0].costs_others_ms, abs=1e-6)
    assert_parts_stay_below_the_whole(found)


def test_ranks_that_do_the_same_slow_nobody_down() -> None:
    run = replay(read_job(EXAMPLE, "rank[013]*"))
    with_all = slowdown(job_of(replay(read_job(EXAMPLE))))
    without = slowdown(job_of(run))
    assert without.slowdown < with_all.slowdown
    assert np.ptp(without.of_worker) < 0.5 * np.ptp(with_all.of_worker)


def one_rank(steps: int = 4) -> list[Event]:
    """Steps that are all alike: two threads beside the main one load and compute, and idle in between."""
    events: list[Event] = []
    for step in range(steps):
        begin, number = 1000.0 * step, 10 * step + 1
        events += [note(f"ProfilerStep#{step}", begin, 990), call("cudaMemcpyAsync", begin + 5, 10, number, tid=2)]
        events += [
            memcpy(begin + 20, 5, number),
            op("first", begin + 30, 10, tid=3),
            op("second", begin + 140, 60, tid=3),
        ]
        events += [
            call("cudaLaunchKernel", begin + 150, 10, number + 1, tid=3),
            kernel("gemm", begin + 170, 800, number + 1),
        ]
    return events


def test_a_trace_of_one_rank_whose_steps_are_alike_loses_nothing(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", one_rank(), header(rank=0))
    found = diagnose(slowdown(job_of(replay(read_job(tmp_path)))))
    lost = found.slowdown
    assert lost.slowdown == pytest.approx(1, abs=1e-3)
    assert lost.ideal_ms.tolist() == pytest.approx(lost.job.recorded_ms.tolist(), rel=0.02)
    assert (lost.job.ideal <= lost.job.took + 2000).all()  # nanoseconds; no idle time is taken for another one
    assert (lost.mw, found.causes) == (None, ())
    assert "why" not in found.as_dict()["by_worker"][0]  # there are no others to compare it with


def test_a_job_that_is_faster_than_its_ideal_has_no_lost_time_to_share() -> None:
    found = slowdown(job_of(replay(read_job(EXAMPLE))))
    swapped = slowdown(replace(found.job, took=found.job.ideal, ideal=found.job.took))
    assert swapped.slowdown < 1
    assert swapped.mw is None
    cards = {card.label: card.note for card in slowdown_cards(diagnose(swapped))}
    assert cards["ideal step"].endswith("nothing lost to stragglers")


# ---------------------------------------------------------------------- the command
KEYS = {"slowdown", "recorded_ms", "simulated_ms", "error_pct", "ideal_ms", "workers", "steps", "by_type", "by_worker",
        "by_stage", "by_dp_rank", "mw", "ms", "attainable_ms", "causes", "fixes",
        "warnings"}  # fmt: skip


def test_the_command_answers_as_table_json_csv_page_and_timeline(tmp_path: Path) -> None:
    path = Job(dp=2, pp=2, cost=lambda p: 1.0 + (p.replica == 1)).write(tmp_path / "trace-x.parquet")
    (tmp_path / "meta-x.yaml").write_text("dp_size: 2\npp_size: 3\ntp_size: 8\n")
    done = lumos_here("stragglers", path, "--json")
    answer = json.loads(done.stdout)
    assert set(answer) >= KEYS
    assert answer["gpus"] == 32
    assert answer["warnings"] == ["meta-x.yaml states pp_size 3, the table has 2: the table counts"]
    shown = lumos_here("stragglers", tmp_path, "-o", tmp_path / "x.html")  # the only table of the folder
    assert "why it is slow" in shown.stdout
    page = (tmp_path / "x.html").read_text()
    assert "slowdown by worker and step" in page
    assert "slowdown by replica and stage" in page
    assert page.count("times the balanced step</title></rect>") == 4 * 2 + 4  # every cell says its value
    lumos_here("stragglers", path, "-o", tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().startswith("rank,dp_rank,stage,slowdown,alone\n")
    lumos_here("stragglers", path, "-o", tmp_path / "x.trace.json")
    events = json.loads((tmp_path / "x.trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in spans)
    assert end / 1e3 == pytest.approx(answer["ideal_ms"] * len(answer["steps"]), rel=1e-6)


def test_one_step_of_a_table_can_be_asked_for(tmp_path: Path) -> None:
    path = Job(steps=3).write(tmp_path / "job.parquet")
    answer = json.loads(lumos_here("stragglers", path, "--step", "11", "--json").stdout)
    assert [row["step"] for row in answer["steps"]] == ["11"]
    for arguments, message in (
        (("--step", "7"), "no such step; this table has 10, 11, 12"),
        (("--match", "x"), "this option is for traces"),
        (("--layers", "-1"), "--layers -1"),
    ):
        done = lumos_here("stragglers", path, *arguments)
        assert done.returncode == 2
        assert message in done.stderr


def test_a_folder_of_several_tables_asks_which(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.csv"):
        Job(steps=1).write(tmp_path / name)
    done = lumos_here("stragglers", tmp_path)
    assert done.returncode == 2
    assert "name one of them" in done.stderr
