"""A described step is a Trace like any other: one breakdown, one critical path and one timeline, and parts add up."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos import Replay, Trace, predict, read_job, replay
from lumos.analysis.breakdown import breakdown_by_rank, mean_breakdown
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.power import Energy
from lumos.report.wording import si_text
from lumos.setup import Setup
from lumos.step.rows import Detail, StepTrace, Track
from lumos.step.step import simulate_step
from lumos.trace.names import Kind
from lumos.trace.steps import find_steps
from test_forecast import described, setups

ROOT = Path(__file__).resolve().parents[1]


@cache
def example() -> Replay:
    return replay(read_job(ROOT / "src/lumos/data/example"))


def pipeline(dp: int = 1) -> Setup:
    return described("llama3-8b", parallel__tp=2, parallel__pp=4, parallel__dp=dp, train__microbatches=8)


def overlaps(trace: Trace) -> list[str]:
    """Lanes on which a task starts before the one before it has ended; the step's mark encloses all others."""
    marks = np.array([name.startswith("ProfilerStep") for name in trace.names], bool)[trace.name]
    found = []
    for lane in range(len(trace.lanes)):
        rows = np.flatnonzero((trace.lane == lane) & ~marks)
        rows = rows[np.argsort(trace.start[rows], kind="stable")]
        if (trace.start[rows][1:] < trace.end[rows][:-1]).any():
            found.append(trace.lanes[lane].text)
    return found


# Laws


@pytest.mark.parametrize(("order", "in_node"), [("tp-cp-dp-pp", 8), ("tp-cp-pp-dp", 4)])
def test_messages_to_another_node_last_longer_than_those_inside_one(order: str, in_node: int) -> None:
    """Of four stages, two are in a node; the rows of a stage are those of its first rank."""
    slow = {"parallel.order": order, "cluster.gpus_per_node": in_node, "cluster.inter_gb_s": 2.0}
    trace = StepTrace(simulate_step(pipeline(2).replaced(slow))).trace()
    assert trace.ranks == ([0, 4, 8, 12] if order == "tp-cp-dp-pp" else [0, 2, 4, 6])
    received = [trace.duration[trace.lane == stage * len(Track) + Track.PIPELINE] for stage in range(4)]
    near, far = (received[stage].max() for stage in (0, 2))
    assert far > 10 * near
    assert [int((rows == far).sum()) for rows in received] == [0, 8, 8, 0], "forward to stage 2, and back to stage 1"


@settings(max_examples=40)
@given(setups())
def test_the_parts_of_a_described_step_add_up_to_it(setup: Setup) -> None:
    run = DescribedRun(simulate_step(setup))
    for part in run.breakdown_by_rank.values():
        assert part.step_ms == pytest.approx(run.us / 1e3, abs=1e-5)
        assert min(part.as_dict().values()) >= 0
    assert run.path_summary.total_ms == pytest.approx(run.us / 1e3, rel=1e-9)
    assert sum(ms for *_, ms in run.path_summary.by_block) <= run.us / 1e3 * 1.000001


@settings(max_examples=25)
@given(setups())
def test_operators_that_are_told_as_one_row_change_nothing_in_the_breakdown(setup: Setup) -> None:
    rows = StepTrace(simulate_step(setup))
    fine, coarse = (rows.trace(detail) for detail in (Detail.OPERATORS, Detail.INTERVALS))
    assert len(coarse) <= len(fine)
    parts = [mean_breakdown(list(breakdown_by_rank(t, find_steps(t).read(t)).values())) for t in (fine, coarse)]
    assert parts[0].as_dict() == pytest.approx(parts[1].as_dict(), abs=1e-6 * len(fine) + 1e-6)


@settings(max_examples=25)
@given(setups())
def test_tasks_of_a_lane_never_overlap(setup: Setup) -> None:
    assert overlaps(StepTrace(simulate_step(setup)).trace()) == []


@settings(max_examples=15)
@given(setups(), st.sampled_from([-0.2, 0.3]))
def test_time_beyond_the_model_is_idle_and_a_model_that_is_too_long_shrinks(setup: Setup, share: float) -> None:
    step = simulate_step(setup)
    plain, run = DescribedRun(step), DescribedRun(step, share * step.us)
    assert run.breakdown.step_ms == pytest.approx((1 + share) * step.us / 1e3, abs=1e-5)
    assert run.path_summary.total_ms == pytest.approx(run.breakdown.step_ms, abs=1e-5)
    if share > 0:
        assert run.breakdown.other_ms - plain.breakdown.other_ms == pytest.approx(share * step.us / 1e3, abs=1e-4)
        assert run.path_summary.unexplained_ms == pytest.approx(share * step.us / 1e3)
    else:
        assert run.breakdown.compute_ms == pytest.approx((1 + share) * plain.breakdown.compute_ms, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("scale", [[], ["compute=0.5"], ["comm=0"], ["cpu=3"]], ids=str)
def test_the_parts_of_a_traced_step_add_up_to_it(scale: list[str]) -> None:
    found = predict(example(), scale)
    assert found.breakdown.step_ms == pytest.approx(found.step_ms, rel=1e-12)
    before = found.baseline_breakdown
    assert before is not None
    assert before.step_ms == pytest.approx(found.baseline_ms, rel=1e-12)
    assert found.critical_path.total_ms == pytest.approx(found.step_ms, rel=1e-6)


def test_the_parts_of_a_replayed_step_add_up_to_it() -> None:
    answer = example().as_dict()
    assert sum(answer["breakdown"]["recorded"].values()) == pytest.approx(answer["recorded_ms"], abs=1e-5)
    assert sum(answer["critical_path"]["by_kind_ms"].values()) == pytest.approx(
        answer["critical_path"]["total_ms"], abs=1e-4
    )


# What is in the trace


def test_one_rank_stands_for_every_stage() -> None:
    found = predict(pipeline(dp=2))
    assert found.trace.ranks == [0, 4, 8, 12]
    assert {lane.text for lane in found.trace.lanes} == {
        "thread host", "thread schedule", "stream compute", "stream communication", "stream data parallel",
        "stream pipeline",
    }  # fmt: skip


def test_operators_are_there_as_often_as_they_run() -> None:
    found = predict(pipeline())
    trace = found.trace
    rank = trace.rank == 0
    for row in found.operators:
        named = np.array([name == row.name for name in trace.names], bool)[trace.name]
        again = sum(other.count for other in found.all_operators if other.name == row.name)
        assert int((rank & named & trace.on_gpu).sum()) == pytest.approx(again, rel=0.02), row.name


def test_what_a_stage_computes_is_what_its_blocks_cost() -> None:
    step = simulate_step(pipeline())
    trace = StepTrace(step).trace()
    compute = trace.kind == Kind.COMPUTE
    for stage, rank in enumerate(trace.ranks):
        blocks = sum(block.compute_us for chunk in step.chunks[stage] for block in chunk.blocks)
        wanted = 8 * blocks + step.role_us("optimizer", stage)
        assert trace.duration[compute & (trace.rank == rank)].sum() / 1e3 == pytest.approx(wanted, rel=1e-3)


def test_every_stage_but_the_last_receives_gradients_and_every_one_but_the_first_activations() -> None:
    trace = predict(pipeline()).trace
    received = np.array([lane.label == "pipeline" for lane in trace.lanes], bool)[trace.lane]
    count = [int((received & (trace.rank == rank)).sum()) for rank in trace.ranks]
    assert count == [8, 16, 16, 8]


def test_collectives_have_their_sizes_and_groups() -> None:
    found = {(g.collective, g.ranks): g for g in predict(pipeline()).run.collectives}
    hidden = 2048 * 4096 * 2  # bytes of the activations of a micro-batch
    assert found["all_reduce", 2].bytes in (hidden, found["all_reduce", 2].bytes)
    assert found["send_recv", 2].count == 8
    assert all(group.transfer_ms > 0 and group.bus_gb_s > 0 for group in found.values())


def test_the_schedule_names_every_pass() -> None:
    trace = predict(pipeline()).trace
    schedule = [lane.rank == 0 and lane.label == "schedule" for lane in trace.lanes].index(True)
    names = {trace.names[name] for name in trace.name[trace.lane == schedule]}
    assert names == {f"{phase} micro-batch {i}" for phase in ("forward", "backward") for i in range(8)} | {"optimizer"}


def test_a_step_of_many_rows_is_told_in_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumos.step.rows._MOST_ROWS", dict.fromkeys(Detail, 1000))
    step = simulate_step(pipeline())
    run = DescribedRun(step)
    assert run.breakdown.step_ms == pytest.approx(step.us / 1e3, abs=1e-5)
    on_gpu = run.trace.on_gpu & (run.trace.lane % len(Track) != Track.PIPELINE)
    assert on_gpu.sum() <= 1000
    assert overlaps(run.trace) == []


def test_perfetto_gets_a_described_step_as_it_gets_a_replayed_one(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from lumos.cli.main import app

    setup = tmp_path / "setup.toml"
    setup.write_text((ROOT / "examples/one-h200.toml").read_text())
    done = CliRunner().invoke(app, ["predict", str(setup), "-o", str(tmp_path / "run.trace.json.gz")])
    assert done.exit_code == 0, done.output
    events = json.loads(gzip.decompress((tmp_path / "run.trace.json.gz").read_bytes()))["traceEvents"]
    assert {"X", "M", "s", "f"} == {event["ph"] for event in events}
    assert any(event["name"] == "critical path" for event in events)


# Where numbers come from, and what is shown of them


def test_every_operator_says_where_its_time_came_from() -> None:
    sampled, other = predict(described()), predict(described(cluster__gpu="mi300x"))
    assert sum(sampled.source.values()) == pytest.approx(1)
    assert sampled.source["fitted"] > 0.9
    assert other.source["transferred"] > 0.9
    assert {row.source for row in sampled.operators} <= set(sampled.source)
    assert predict(example()).source["measured"] == 1


def test_times_of_collectives_are_modelled_whatever_gpu_was_sampled() -> None:
    for gpu in ("h200", "h100"):
        found = predict(described(cluster__gpu=gpu, parallel__tp=2, parallel__dp=4))
        assert {row.source for row in found.all_operators if row.bound == "network"} == {"modelled"}
        assert found.source["modelled"] > 0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(67108864, "B", "67.1 MB"), (1.834e7, "Wh", "18.3 MWh"), (15e12, " tokens", "15.0 T tokens"), (3, "J", "3.00 J")],
)
def test_quantities_have_prefixes_that_people_read(value: float, unit: str, text: str) -> None:
    assert si_text(value, unit) == text


def test_what_a_source_cannot_know_is_none() -> None:
    answer = predict(example()).as_dict()
    unknown = ("tokens_per_s_per_gpu", "mfu", "hfu", "parameters", "memory_gib", "fits", "energy_j", "bill")
    assert [answer[key] for key in unknown] == [None] * len(unknown)
    assert answer["baseline_ms"] is not None
    answer = predict(described()).as_dict()
    assert answer["baseline_ms"] is None
    assert answer["parameters"] == pytest.approx(8.03e9, rel=1e-3)


def test_memory_fits_if_peak_and_reserve_are_at_most_what_there_is() -> None:
    for preset in ("llama3-8b", "llama3-70b"):
        answer = predict(described(preset)).as_dict()
        memory = answer["memory_gib"]
        assert answer["fits"] == (memory["peak"] + memory["reserve"] <= memory["available"])
        assert memory["reserve"] > 0
        assert memory["peak"] == max(stage["peak"] for stage in memory["stages"])
        shown = f"{memory['peak']:.1f} GiB peak + {memory['reserve']:.1f} GiB reserve of {memory['available']:.1f} GiB"
        assert answer["fits"] or any(shown in warning for warning in answer["warnings"])


def test_power_names_the_stages_at_the_limit() -> None:
    assert Energy(1.0, 1, 100.0, 700.0, (50.0, 60.0)).words == "155 W per GPU"
    assert Energy(1.0, 1, 100.0, 700.0, (900.0, 900.0)).words == "700 W per GPU, at the power limit"
    words = Energy(1.0, 1, 100.0, 700.0, (900.0, 100.0)).words
    assert words == "450 W per GPU (mean); stage 0 at the power limit of 700 W"
