"""Runs without a GPU: operators are the kernels, calls to them block, and gloo moves the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lumos import Replay, Scale, predict, read_job, replay
from lumos.graph import Rule
from lumos.rules.cpu import with_cpu_device
from lumos.vocabulary import Category, Kind
from support import Event, header, kernel, note, op, span, training_run, write_trace

MM, REDUCE = "cpu_gemm_mm", "gloo:all_reduce"


def gloo(ts: float, dur: float, tid: int = 9) -> Event:
    """A collective on a thread of gloo."""
    return span("user_annotation", REDUCE, ts, dur, 100, tid, {"External id": 1})


def step(arrives: float, late: float = 0) -> list[Event]:
    """A product, an all-reduce that both ranks leave at 1,500, a product beside it, and the wait for it."""
    return [
        note("ProfilerStep#3", 0, 2000),
        op("aten::linear", 0, arrives - 20),
        op("aten::t", 1, 2),
        op("aten::mm", 5, arrives - 30),
        op("aten::empty", 6, 1),
        op("c10d::allreduce_", arrives - 10, 10),
        gloo(arrives, 1500 - arrives + late),
        op("aten::mm", arrives + 10, 200),
        op("aten::copy_", 1550, 100),
    ]


def job(folder: Path, *ranks: list[Event]) -> Replay:
    for rank, events in enumerate(ranks):
        told: dict[str, Any] = {"deviceProperties": []}
        write_trace(folder / f"rank{rank}.json", events, header(rank, len(ranks)) | told)
    return replay(read_job(folder))


def kernels(run: Replay, name: str) -> np.ndarray:
    trace = run.execution.trace
    found = [i for i in np.flatnonzero(trace.category == Category.KERNEL) if trace.names[trace.name[i]] == name]
    return np.array(found)


@pytest.fixture
def two(tmp_path: Path) -> Replay:
    return job(tmp_path, step(500), step(900))


def test_operators_that_work_themselves_are_kernels_and_what_they_call_is_part_of_them(two: Replay) -> None:
    trace = two.execution.trace
    names = {trace.names[i] for i in trace.name[trace.category == Category.KERNEL]}
    assert names == {MM, "cpu_t", "cpu_copy_", REDUCE}  # not linear, which is mm; not empty, which mm calls
    assert len(kernels(two, MM)) == 4


def test_the_run_replays_as_recorded_and_nothing_is_unexplained(two: Replay) -> None:
    assert two.error_pct == pytest.approx(0, abs=1e-6)
    assert two.path_summary.unexplained_ms == pytest.approx(0, abs=1e-3)


def test_a_step_is_compute_communication_and_both_at_once(two: Replay) -> None:
    first = two.recorded_breakdown[0]
    assert first.overlapped_ms == pytest.approx(0.2)  # the product beside the all-reduce
    assert first.exposed_comm_ms == pytest.approx(0.8)
    assert first.exposed_compute_ms == pytest.approx(0.47 + 0.002 + 0.1, abs=0.01)


def test_waiting_for_the_later_rank_is_told_from_transfer(two: Replay) -> None:
    (met,) = two.collectives
    assert (met.collective, met.ranks, met.last_rank) == ("all_reduce", 2, 1)
    assert (met.worst_wait_ms, met.transfer_ms) == (pytest.approx(0.4), pytest.approx(0.6))


def test_a_thread_goes_on_when_what_it_waits_for_has_ended(two: Replay) -> None:
    edges, nodes = two.execution.graph.edges, two.execution.draft
    assert int((edges.rule == Rule.THREAD).sum()) == 2
    silent = predict(two, [Scale("comm", 0)])
    assert silent.step_ms < two.clean_ms - 0.4
    assert nodes.trace.ranks == [0, 1]


def test_products_that_take_half_as_long_let_the_job_meet_earlier(two: Replay) -> None:
    halved = predict(two, [Scale("kernel:gemm", 0.5)])
    saved = two.clean_ms - halved.step_ms
    assert saved == pytest.approx(0.5 * 0.87, rel=0.1)  # of the later rank's product before the all-reduce


def test_collectives_are_matched_from_the_end_where_a_rank_has_more(tmp_path: Path) -> None:
    early = [op("c10d::allreduce_", -900, 10), gloo(-890, 100)]
    run = job(tmp_path, early + step(500), step(900))
    assert len(run.collectives) == 1
    assert run.collectives[0].transfer_ms == pytest.approx(0.6)


def test_ranks_whose_collectives_end_apart_are_matched_in_order_all_the_same(tmp_path: Path) -> None:
    """On a busy machine ends differ by milliseconds; order says more than times."""
    later = [e | {"ts": e["ts"] + 3000, "name": e["name"].replace("#3", "#4")} for e in step(700, late=40)]
    run = job(tmp_path, step(500) + later, step(900, late=30) + later)
    assert len(run.collectives) == 2


def test_one_interrupted_call_does_not_make_another_operator_of_it(tmp_path: Path) -> None:
    usual = [e for at in range(3) for e in (op("aten::mm", 100 * at, 50), op("aten::empty", 100 * at + 1, 1))]
    interrupted = [op("aten::mm", 300, 50), op("aten::empty", 301, 45)]
    assert len(kernels(job(tmp_path, usual + interrupted), MM)) == 4


def test_a_replayed_replay_is_identical(two: Replay) -> None:
    again = replay(two.simulated)
    np.testing.assert_array_equal(again.simulated.start, two.simulated.start)
    np.testing.assert_array_equal(again.simulated.duration, two.simulated.duration)


def test_a_trace_with_a_gpu_is_left_as_it_is(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", [*training_run(), gloo(10, 20)], header())
    trace = read_job(tmp_path)
    assert with_cpu_device(trace) is trace
    write_trace(tmp_path / "rank0.json", [kernel("gemm", 0, 5)], header())
    trace = read_job(tmp_path)
    assert with_cpu_device(trace) is trace


def test_kinds_are_those_of_scale(two: Replay) -> None:
    trace = two.execution.trace
    assert set(trace.kind[kernels(two, REDUCE)]) == {Kind.COMM}
    assert set(trace.kind[kernels(two, MM)]) == {Kind.COMPUTE}
