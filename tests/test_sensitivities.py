"""The gain from faster work, and the critical path: what one says, the other must not contradict."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from conftest import Write
from graphs import graphs
from lumos.analysis.replay import Replay, replay
from lumos.analysis.sensitivities import Sensitivity
from lumos.data_files import data_file
from lumos.graph.critical_path import StepPath, critical_path, step_path
from lumos.graph.graph import Edges, Graph, Rule, make_graph, simulate
from lumos.graph.rules import build as building
from lumos.graph.rules.build import StepNodes, Windows
from lumos.graph.scaling import Scale
from lumos.prediction.prediction import predict
from lumos.read.job import read_job
from lumos.trace.names import Kind
from support import header, launch, note, op

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from sensitivities import TOLERANCE_PCT, contradictions

laws = settings(deadline=None, max_examples=150)

TRACES = (
    "public/nanogpt_h100/adamhook_20251031_hook_rank0.json.gz",
    "public/nanogpt_h100/h2dprefetch_20260212_rank0.json.gz",
    "public/sglang_decode_b200",
    "public/torchrec_v100/sst_long_a2a_optimizer_3",
    "public/torchrec_v100/sst_sleep_pl_dense_after_backward_2",
    "public/hta/trace_diff/control/control.json.gz",
    "public/hta/trace_diff/test/test.json.gz",
    "public/tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "public/tracelens/mi300/resnet_act_checkpoint.json.gz",
    "public/tracelens/mi210/gpu_only_trace/gpu_only_trace.json.gz",
    "public/chakra/chakra.0.et",
    "h200/multirank/ddp2_l8",
    "h200/multirank/pp2_mb4",
    "h200/multirank/pp4_mb8",
    "h200/multirank/tp2_l8",
)


def of_graph(graph: Graph) -> tuple[float, StepPath]:
    """The span of a graph of one rank and one step, and its critical path."""
    times = simulate(graph)
    last = int(np.argmax(times.end)) if len(graph) else -1
    windows = Windows(np.zeros((1, 1)), np.array([[times.span]]), np.array([[last]]))
    return times.span, step_path(graph, times, windows)


# ---------------------------------------------------------------------- graphs


@laws
@given(graphs())
def test_the_parts_of_the_critical_path_add_up_and_none_is_negative(graph: Graph) -> None:
    span, path = of_graph(graph)
    assert path.spent.sum() + path.latency + path.unexplained == pytest.approx(span)
    assert min(path.spent.min(initial=0.0), path.latency, path.unexplained) >= 0


@laws
@given(graphs())
def test_work_twice_as_fast_gains_at_most_half_of_its_share_of_the_path(graph: Graph) -> None:
    span, path = of_graph(graph)
    gains = 0.0
    for kind in Kind:
        nodes = graph.kind == kind
        gain = span - simulate(graph, np.where(nodes, graph.duration / 2, graph.duration)).span
        assert -1e-9 <= gain <= path.spent[nodes].sum() / 2 + 1e-9
        gains += gain
    assert gains <= path.spent.sum() / 2 + 1e-9, "no more than all work twice as fast"


def two_lanes(host: float, gpu: float) -> Graph:
    """A host and a GPU that run beside each other until both are done."""
    kind = [Kind.CPU, Kind.COMPUTE, Kind.CPU]
    edges = Edges.of([0, 1], [2, 2], Rule.SYNC)
    return make_graph([0, 1, 2, 3], [host, gpu, 0.0], edges, kind=kind)


def test_of_two_paths_of_nearly_equal_length_neither_alone_gains_more_than_their_difference() -> None:
    span, path = of_graph(two_lanes(100.0, 99.5))
    assert path.spent.tolist() == [100.0, 0.0, 0.0]
    assert span - simulate(two_lanes(50.0, 99.5)).span == 0.5
    assert span - simulate(two_lanes(100.0, 49.75)).span == 0.0


def test_a_task_that_starts_before_its_predecessor_ends_gives_no_negative_latency() -> None:
    edges = Edges.of([0], [1], Rule.EVENT)
    graph = make_graph([0, 1, 2], [100.0, 50.0], edges)
    graph = graph.with_lags(np.array([-30.0]))
    path = critical_path(graph, simulate(graph), 1)
    assert path.spent.tolist() == [70.0, 50.0]
    assert path.lag.tolist() == [0.0, 0.0]


# ---------------------------------------------------------------------- traces


@cache
def traced(path: Path) -> Replay:
    return replay(read_job(path))


@pytest.fixture(params=["example", *TRACES])
def run(request: pytest.FixtureRequest) -> Replay:
    if request.param == "example":
        return traced(Path(str(data_file("example"))))
    return traced(request.getfixturevalue("shared_data") / request.param)


def by_category(run: Replay) -> dict[str, Sensitivity]:
    return {one.what: one for one in run.sensitivities if one.kind == "category"}


@pytest.mark.data
def test_gains_and_the_critical_path_do_not_contradict_each_other(run: Replay) -> None:
    """What is not on the path gains nothing, what is gains at most half of its share, and most on the path most."""
    assert contradictions(run) == []
    assert all(one.gain_pct >= -TOLERANCE_PCT for one in run.sensitivities)


def test_a_gain_of_work_that_is_not_on_the_path_is_a_contradiction() -> None:
    run = traced(Path(str(data_file("example"))))
    best = next(one for one in run.sensitivities if one.what == "all_reduce")
    doctored = SimpleNamespace(clean_steps=run.clean_steps, sensitivities=[replace(best, path_pct=0.0)])
    assert len(contradictions(doctored)) == 1  # type: ignore[arg-type]


@pytest.mark.data
def test_the_shares_beside_the_gains_are_those_of_the_path(run: Replay) -> None:
    kinds, total = run.path_summary.by_kind, run.path_summary.total_ms
    shares = {
        "compute": kinds["compute"] + kinds["contention"],
        "communication": kinds["comm"] + kinds["contention"],
        "memcpy": kinds["copy"],
        "host": kinds["operator"] + kinds["call"] + kinds["python"],
    }
    for what, one in by_category(run).items():
        assert one.path_pct == pytest.approx(100 * shares[what] / total, abs=1e-6), what


@pytest.mark.data
def test_steps_read_from_nodes_are_those_of_the_trace(run: Replay) -> None:
    windows = StepNodes(run.execution, run.marks).windows(run.times)
    steps = run.simulated_steps
    np.testing.assert_allclose(windows.start, steps.start - run.execution.origin, atol=1.0)
    np.testing.assert_allclose(windows.end, steps.end - run.execution.origin, atol=1.0)


SCALES = {"compute": "compute", "communication": "comm", "memcpy": "memcpy", "host": "cpu"}


@pytest.mark.parametrize(("what", "scale"), SCALES.items())
def test_a_sensitivity_is_the_what_if_of_the_same_scale(what: str, scale: str) -> None:
    """Both are computed on a step that copies as long as it computes, one after the other."""
    run = traced(Path(str(data_file("example"))))
    graph, to_copy = run.execution.graph, run.execution.graph.kind == Kind.COMPUTE
    to_copy[np.flatnonzero(to_copy)[::2]] = False
    kind = np.where(to_copy, Kind.COPY, graph.kind).astype(graph.kind.dtype)
    run = replace(run, execution=replace(run.execution, graph=replace(graph, kind=kind)))
    base, faster = (predict(run, [Scale(scale, factor)]).step_ms for factor in (1.0, 0.5))
    one = by_category(run)[what]
    assert one.gain_ms == pytest.approx(base - faster, abs=1e-4 * base)
    assert one.gain_pct == pytest.approx(100 * (base - faster) / base, abs=0.01)


def test_dependencies_are_said_to_be_dropped_only_if_some_are(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write([note("ProfilerStep#1", 0, 100), op("aten::mm", 5, 40), *launch("gemm", 10, 7)], header())
    monkeypatch.setattr(building, "_has_order", lambda graph: False)
    warnings = building.build(read_job(path)).warnings
    assert not [text for text in warnings if text.startswith("0 ")]
