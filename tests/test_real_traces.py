"""Real traces as cases: the laws of the graph, and answers that were measured."""

from __future__ import annotations

import json
import statistics
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from graphs import scaled, simulate_reference
from lumos.analysis.replay import Replay, replay
from lumos.data_files import data_file
from lumos.graph.graph import simulate
from lumos.graph.rules.build import build
from lumos.graph.scaling import Scale
from lumos.prediction.prediction import predict
from lumos.read.job import read_job
from lumos.trace.steps import keep_step

pytestmark = pytest.mark.data

SINGLE = ("h200/single/tiny_l2_h512.pt.trace.json.gz", "h200/single/b8.pt.trace.json.gz")
JOBS = (
    "h200/multirank/ddp2_l8",
    "h200/multirank/fsdp2_l8",
    "h200/multirank/pp4_mb8",
    "h200/multirank/dp2_tp2_l8",
    "public/megatron_tp8_a100/kineto",
    "public/sglang_decode_b200",
    "public/torchrec_v100/sst_long_a2a_optimizer_4",
)
OTHERS = (
    "public/hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "public/hta/critical_path/cuda_event_sync_multi_stream/event_sync_trace.json.gz",
    "public/hta/mixed_files/rank_non_gpu.json.gz",
    "public/kineto_2021/autograd_api.pt.trace.json.gz",
    "public/nanogpt_h100/adamhook_20251031_hook_rank0.json.gz",
    "public/tracelens/mi210/gpu_only_trace/gpu_only_trace.json.gz",
    "public/tracelens/inference/vllm_decode_full/graph_execution.json.gz",
)
_RUNS: dict[str, Replay] = {}


@pytest.fixture(params=SINGLE + JOBS + OTHERS)
def run(request: pytest.FixtureRequest, shared_data: Path) -> Replay:
    if request.param not in _RUNS:
        _RUNS[request.param] = replay(read_job(shared_data / request.param))
    return _RUNS[request.param]


def test_a_replay_gives_the_recorded_times_back(run: Replay) -> None:
    assert run.error_pct == pytest.approx(0.0, abs=0.01)


def test_a_replayed_replay_is_identical(run: Replay) -> None:
    again = replay(run.simulated)
    np.testing.assert_array_equal(again.simulated.start, run.simulated.start)
    np.testing.assert_array_equal(again.simulated.duration, run.simulated.duration)


def test_scaling_everything_scales_the_span(run: Replay) -> None:
    span = simulate(run.execution.graph).span
    assert simulate(scaled(run.execution.graph, 2.0)).span == pytest.approx(2 * span)


def test_tasks_of_a_lane_never_overlap(run: Replay) -> None:
    follows = ~run.execution.graph.is_first[1:]
    assert (run.times.start[1:][follows] >= run.times.end[:-1][follows]).all()


@pytest.mark.parametrize("what", ["compute", "comm", "cpu"])
def test_making_something_faster_never_makes_the_run_longer(run: Replay, what: str) -> None:
    span = simulate(run.clean_graph).span
    # Kernels beside communication are simulated until the run's length settles, to a ten-thousandth.
    assert predict(run, [Scale(what, 0.5)]).run.times.span <= span * (1 + 1e-4) + 1


@pytest.mark.parametrize("what", ["compute", "comm"])
def test_making_something_slower_never_makes_the_step_shorter(run: Replay, what: str) -> None:
    """Not even where it moves work from one step into the next, whose window then is the longer one."""
    assert predict(run, [Scale(what, 1.5)]).step_ms >= run.clean_ms * (1 - 1e-4) - 1e-6


def test_the_breakdown_adds_up_to_the_step(run: Replay) -> None:
    parts = run.as_dict()["breakdown"]["recorded"]
    assert sum(parts.values()) == pytest.approx(run.recorded_steps.mean, abs=0.01)
    assert min(parts.values()) >= 0


def test_the_critical_path_adds_up_to_the_steps(run: Replay) -> None:
    assert sum(run.path_summary.by_kind.values()) == pytest.approx(run.clean_ms, rel=1e-5)
    assert min(run.path_summary.by_kind.values()) >= 0


def test_the_answer_has_finite_numbers_only(run: Replay) -> None:
    json.dumps(run.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("h4096", 0.48, 0.60), ("b8", 0.48, 0.60), ("tiny_l2_h512", 0.93, 1.01), ("h1024", 0.93, 1.01)],
)
def test_kernels_twice_as_fast_help_as_far_as_the_gpu_decides(
    shared_data: Path, name: str, low: float, high: float
) -> None:
    run = replay(read_job(shared_data / f"h200/single/{name}.pt.trace.json.gz"))
    assert low <= predict(run, [Scale("compute", 0.5)]).step_ms / run.clean_ms <= high


def test_gpu_bound_steps_hold_hardly_any_unexplained_time(shared_data: Path) -> None:
    for name in ("h4096", "b8", "s4096"):
        run = replay(read_job(shared_data / f"h200/single/{name}.pt.trace.json.gz"))
        assert run.path_summary.unexplained_ms <= 0.05 * run.simulated_steps.mean


def test_the_step_without_the_profiler_is_near_the_measured_one(shared_data: Path) -> None:
    """Traces that were not used for fitting; the single errors are in docs/accuracy.md."""
    measured = {r["name"]: r for r in json.loads((shared_data / "h200/single/measured.json").read_text())["results"]}
    errors = []
    for name in ("l4", "h1024", "h4096", "s4096", "b1", "b8", "tiny_l2_h512", "gpt2_l12_h1024"):
        run = replay(read_job(shared_data / f"h200/single/{name}.pt.trace.json.gz"))
        errors.append(abs(run.clean_ms / (1e3 * measured[name]["step_s_median"]) - 1))
    assert statistics.mean(errors) <= 0.05


def test_explicit_events_are_what_inference_finds_too(shared_data: Path) -> None:
    """Hiding the recorded sources of stream waits must not change who waits for whom."""
    from dataclasses import replace

    trace = read_job(shared_data / "public/hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz")
    hidden = replace(
        trace.syncs, wait_stream=np.full_like(trace.syncs.wait_stream, -1), record=np.full_like(trace.syncs.record, -1)
    )
    told, inferred = build(trace), build(replace(trace, syncs=hidden))
    pairs = [
        set(zip(e.graph.edges.source.tolist(), e.graph.edges.target.tolist(), strict=True)) for e in (told, inferred)
    ]
    assert len(pairs[0] & pairs[1]) >= 0.95 * len(pairs[0])


def test_one_step_alone_takes_what_it_took_among_the_others(shared_data: Path) -> None:
    trace = read_job(shared_data / "h200/multirank/ddp2_l8")
    both, one = replay(trace), replay(keep_step(trace, "3"))
    assert one.marks.names == ("ProfilerStep#3",)
    assert one.simulated_steps.mean == pytest.approx(both.simulated_steps.milliseconds[1], rel=0.01)


def test_the_fast_simulator_agrees_with_the_definition_on_the_example() -> None:
    with resources.as_file(data_file("example")) as path:
        graph = replay(keep_step(read_job(path), "2")).execution.graph
    fast, slow = simulate(graph), simulate_reference(graph)
    np.testing.assert_allclose(fast.end, slow.end, rtol=0, atol=1e-6)


def test_the_example_shows_its_slow_rank_first() -> None:
    with resources.as_file(data_file("example")) as path:
        run = replay(read_job(path))
    assert run.stragglers[0].rank == 2
    assert "kernels" in run.stragglers[0].why
