"""Contention: kernels beside communication are slower, by as much as was measured, wherever a step comes from."""

from __future__ import annotations

import json
import lzma
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import lumos_here
from graphs import graphs
from lumos.costs.contention import Beside, channels_of, gpu_of_trace, kernel_of, sides, slowdown, usual_slowdown
from lumos.costs.costs import costs_of
from lumos.graph.graph import Edges, Graph, Times, make_graph
from lumos.graph.overlap import Side, alone, contended, overlapped
from lumos.graph.rules.build import build
from lumos.program.op import BESIDE, Op
from lumos.program.operators import Collective, Group, Operator
from lumos.read.job import read_job
from lumos.setup import Setup, preset_named
from lumos.setup.gpus import gpu_named
from lumos.step.block_timeline import timeline
from lumos.step.step import simulate_step
from plain_network import plain_network
from support import call, collective, kernel, note, op, write_trace

CALIBRATION = Path(__file__).parents[1] / "calibration"
sys.path.insert(0, str(CALIBRATION))

from fit_contention import step_slowdowns  # noqa: E402

RECORDED = CALIBRATION / "contention_blind_h200.jsonl.xz"
H200 = gpu_named("h200")
sizes = st.integers(64, 20_000)
matmuls = st.builds(lambda m, n, k: Operator("gemm_tn", (m, n, k), "bf16"), sizes, sizes, sizes)
operators = st.one_of(
    matmuls,
    st.builds(lambda s: Operator("sdpa_fwd", (2, 32, s, 128), "bf16"), sizes),
    st.builds(lambda n: Operator("stream", (n * 1000,), "bf16"), sizes),
    st.builds(lambda t: Operator("grouped_gemm", (8, t, 4096, 2048), "bf16"), sizes),
)


# ---------------------------------------------------------------------- what one kernel loses
@given(operators, st.integers(0, 40), st.integers(0, 40), st.sampled_from(["h200", "h100", "a100", "b200", "mi300x"]))
def test_more_communication_never_makes_a_kernel_faster(work: Operator, few: int, more: int, name: str) -> None:
    few, more = sorted((few, more))
    gpu = gpu_named(name)
    slower = [slowdown(work, Beside(blocks, 100.0, True), gpu) for blocks in (0, few, more)]
    assert slower[0] == 1.0
    assert slower == sorted(slower)


def test_a_matmul_that_leaves_enough_multiprocessors_loses_nothing() -> None:
    small = Operator("gemm_tn", (1024, 1024, 8192), "bf16")  # 32 tiles of 132
    assert slowdown(small, Beside(24, 500.0, True), H200) == 1.0


def test_a_matmul_of_one_full_round_needs_a_second_one() -> None:
    one = Operator("gemm_tn", (4096, 1024, 8192), "bf16")  # 128 tiles of 256 x 128
    assert slowdown(one, Beside(4, 0.0, True), H200) == pytest.approx(2.0, rel=0.1)


def test_memory_bound_kernels_lose_the_bandwidth_that_communication_takes() -> None:
    add = Operator("stream", (1 << 28,), "bf16")
    quiet, loud = (slowdown(add, Beside(16, rate, True), H200) for rate in (0.0, 2400.0))
    assert loud - quiet == pytest.approx(0.36, abs=0.1)


def measured() -> dict[str, list[float]]:
    """Predicted over measured slowdown on an H200, of kernels that nothing was fitted on."""
    found = defaultdict(list)
    for line in lzma.decompress(RECORDED.read_bytes()).splitlines():
        row: dict[str, Any] = json.loads(line)
        if row["us"] > 1.3 * sum(each["us"] for each in row["kernels"]):
            continue  # the host did not launch fast enough
        if row["op"] == "gemm":
            work = Operator("gemm_tn", (row["m"], row["n"], row["k"]), row["dtype"])
        elif row["op"] == "sdpa":
            work = Operator("sdpa_fwd", (row["batch"], row["heads"], row["seq"], row["dim"]), "bf16")
        else:
            work = Operator("stream", (row["rows"] * row["width"],), "bf16")
        kind = {"gemm": "matmul", "sdpa": "attention"}.get(row["op"], "memory")
        for blocks, _, us, rate, _ in row["beside"]:
            found[kind].append(slowdown(work, Beside(blocks, rate, True), H200) * row["us"] / us - 1)
    return found


@pytest.mark.parametrize("kind", ["matmul", "attention", "memory"])
def test_slowdowns_of_kernels_kept_apart_are_within_ten_percent(kind: str) -> None:
    errors = measured()[kind]
    assert len(errors) > 100
    assert np.mean(np.abs(errors)) < 0.10


def test_a_kernel_of_a_trace_is_slowed_like_the_usual_one_of_its_length() -> None:
    short, long = usual_slowdown("matmul", np.array([50.0, 3000.0]), 24.0)
    assert short > long > 1.2


@pytest.mark.parametrize(
    ("kind", "group", "blocks"),
    [
        ("all_gather", Group(8, 8), 24),
        ("all_gather", Group(64, 8), 16),
        ("all_reduce", Group(8, 1), 4),
        ("p2p", Group(2, 1), 2),
    ],
)
def test_channels_follow_the_links_of_a_group(kind: str, group: Group, blocks: int) -> None:
    assert channels_of(kind, group) == blocks
    assert kernel_of(Collective(kind, 1e9, group), 1e4).inside == (group.nodes == 1)


# ---------------------------------------------------------------------- what overlaps
spans = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12)


@given(spans, spans)
def test_overlap_is_the_time_during_which_any_of_the_others_runs(mine: list[Any], theirs: list[Any]) -> None:
    every = [*mine, *theirs]
    times = Times(np.array([float(s) for s, _, _ in every]), np.array([float(s + d) for s, d, _ in every]))
    place = np.array([p for *_, p in every])
    index = np.arange(len(every))
    one, other = index[: len(mine)], index[len(mine) :]
    found = overlapped(times, Side(one, place[one], np.ones(len(one))), Side(other, place[other], np.ones(len(other))))
    for (start, length, at), share in zip(mine, found, strict=True):
        seconds = [t for t in range(start, start + length) if any(p == at and s <= t < s + d for s, d, p in theirs)]
        assert share * length == pytest.approx(len(seconds))


def halves(graph: Graph, speed: float) -> tuple[Side, Side]:
    """Lanes in turn compute and communicate, all of one GPU."""
    lane, index = graph.lane, np.arange(len(graph))
    parts = [index[lane % 2 == side] for side in (0, 1)]
    return Side(parts[0], np.zeros(len(parts[0]), int), np.full(len(parts[0]), speed)), Side(
        parts[1], np.zeros(len(parts[1]), int), np.ones(len(parts[1]))
    )


@given(graphs(), st.floats(0.4, 1.0))
def test_beside_each_other_nothing_is_faster_and_nothing_slower_than_all_the_time(graph: Graph, speed: float) -> None:
    sides = halves(graph, speed)
    found, _ = contended(graph, *sides)
    assert (found.duration >= graph.duration - 1e-9).all()
    assert (found.duration <= graph.duration / speed + 1e-6).all()
    if speed == 1.0:
        assert np.array_equal(found.duration, graph.duration)


def beside(kernel_ns: float, transfer_ns: float) -> Graph:
    return make_graph([0, 1, 2], [kernel_ns, transfer_ns], Edges.join([]))


def test_a_kernel_is_slow_only_for_as_long_as_communication_runs_beside_it() -> None:
    sides = halves(beside(100.0, 50.0), 0.5)
    _, times = contended(beside(100.0, 50.0), *sides)
    assert times.span == pytest.approx(125.0, rel=1e-3), "half speed for 50 ns, then full speed for the other 75"
    assert contended(beside(100.0, 500.0), *sides)[0].duration[0] == pytest.approx(200.0, rel=1e-3)


def test_durations_alone_are_what_contention_made_longer() -> None:
    sides = halves(beside(100.0, 50.0), 0.5)
    graph, _ = contended(beside(100.0, 50.0), *sides)
    assert alone(graph, *sides)[0] == pytest.approx(100.0, rel=1e-2)


# ---------------------------------------------------------------------- steps
def step_ms(gpus: int, **keys: Any) -> float:
    train = {"seq": 4096, "framework": "torchtitan", "compile": True} | keys.pop("train", {})
    setup = Setup(
        model=dict(preset_named("llama2-7b").keys),
        train=train,
        parallel={"dp": gpus, "zero": 3} | keys,
        cluster={"gpu": "h200"},
    )  # type: ignore[arg-type]
    return simulate_step(setup).us / 1e3


def test_gathers_behind_a_pass_cost_it_time_although_they_are_hidden() -> None:
    """One micro-batch of 4,096 tokens: FSDP's gathers are hidden behind the passes of eight GPUs."""
    own, shared = step_ms(1, zero=0), step_ms(8)
    assert 1.02 < shared / own < 1.35


def test_gathers_that_leave_a_node_are_disturbed_like_those_that_stay_where_its_links_bind_them() -> None:
    """Steps of FSDP on one node and on two are alike, where the adapters give as much as NVLink does."""
    assert step_ms(8) < step_ms(16) * 1.01


def test_replicas_of_a_divided_copy_reduce_at_the_rate_of_their_adapters() -> None:
    """Eight nodes with a copy each: after the scatter inside a node, slow adapters decide, whatever runs beside."""
    setup = Setup(
        model=dict(preset_named("llama2-7b").keys), train={"seq": 4096, "framework": "torchtitan"},
        parallel={"dp": 64, "zero": 3, "shard": 8}, cluster={"gpu": "h200", "inter_gb_s": 1.0},
    )  # type: ignore[arg-type]  # fmt: skip
    step = simulate_step(setup)
    kinds = np.array([role.what for role in step.structure.roles])[step.structure.node_role]
    longer = step.graph.duration / np.maximum(step.assembly.graph().duration, 1e-9)
    assert longer[kinds == "reduce"].max() < 1.05
    assert longer[kinds == "gather"].max() > 1.1


def test_communication_between_nodes_keeps_its_speed_where_the_adapters_bind_it() -> None:
    gather = Collective("all_gather", 1e9, Group(16, 8))
    kept = [plain_network(100.0, adapter).kept(gather, 0.8) for adapter in (1.0, 90 / 8, 100.0)]
    assert kept == pytest.approx([1.0, 80 / 90, 0.8], rel=1e-3)
    assert plain_network(100.0, 1.0).kept(Collective("all_gather", 1e9, Group(8, 8)), 0.8) == 0.8


def test_an_answer_says_what_contention_costs(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.toml"
    path.write_text(
        '[model]\npreset = "llama2-7b"\n[train]\nseq = 4096\nframework = "torchtitan"\n'
        '[parallel]\nzero = 3\n[cluster]\ngpu = "h200"\n'
    )
    alone, shared = (
        json.loads(lumos_here("predict", str(path), "--gpus", gpus, "--json").stdout) for gpus in ("1", "8")
    )
    assert alone["contention_ms"] == 0
    assert 0.01 < shared["contention_ms"] / shared["step_ms"] < 0.25
    assert "contention" in lumos_here("predict", str(path), "--gpus", "8").stdout


def test_a_collective_inside_a_block_slows_the_operators_beside_it() -> None:
    model = dict(preset_named("llama2-7b").keys)
    prices = costs_of(Setup(model=model, train={"seq": 4096}, cluster={"gpu": "h200"}))  # type: ignore[arg-type]
    work = Operator("gemm_tn", (8192, 8192, 8192), "bf16")
    gather = Collective("all_gather", 4e9, Group(8, 8))
    free, slowed = (
        timeline([Op("gather", work=gather, stream=BESIDE), Op("up", work=work)][not beside :], prices)[-1]
        for beside in (False, True)
    )
    assert slowed.end_us - slowed.start_us > 1.2 * (free.end_us - free.start_us)
    waited = timeline([Op("gather", work=gather), Op("up", work=work)], prices)[-1]
    assert waited.end_us - waited.start_us == pytest.approx(free.end_us - free.start_us)


def test_whole_steps_beside_a_copy_are_as_slow_as_measured() -> None:
    """Four decoders on an H200 beside 4, 16 and 24 blocks, measured after everything was fixed."""
    errors = [said / was - 1 for _, _, was, said in step_slowdowns()]
    assert len(errors) == 12
    assert np.mean(np.abs(errors)) < 0.05
    assert np.max(np.abs(errors)) < 0.10


# ---------------------------------------------------------------------- traces
def test_a_traced_matmul_gets_faster_where_a_change_takes_communication_away(tmp_path: Path) -> None:
    events = [
        note("ProfilerStep#1", 0, 4000), op("aten::mm", 10, 20),
        call("cudaLaunchKernel", 12, 4, 1), kernel("nvjet_tst_256x128_64x4", 100, 1000, 1, 7),
        op("record_param_comms", 40, 20, args=collective("all_reduce")),
        call("cudaLaunchKernel", 42, 4, 2), kernel("ncclDevKernel_AllReduce", 100, 1000, 2, 20),
        call("cudaDeviceSynchronize", 70, 1040, 3),
    ]  # fmt: skip
    path = write_trace(tmp_path / "rank0.json", events)
    same, without = (
        json.loads(lumos_here("predict", "--from", str(path), "--scale", scale, "--json").stdout)["step_ms"]
        for scale in ("comm=1", "comm=0")
    )
    assert same - without == pytest.approx(0.3, abs=0.1), "a millisecond beside NCCL is about 0.7 alone"


def test_messages_between_stages_hold_fewer_multiprocessors_than_a_reduction(tmp_path: Path) -> None:
    def slowdowns(kind: str) -> float:
        """Time of the matmul beside the kernel of this collective, over its time without any."""
        events = [
            note("ProfilerStep#0", 0, 3000), call("cudaLaunchKernel", 10, 5, 1),
            kernel("nvjet_tst_128x128_64x4_1x2_h_bz_TNT", 100, 1000, 1),
            call("cudaLaunchKernel", 30, 5, 2), kernel(f"ncclDevKernel_{kind}", 100, 1000, 2, 9, collective(kind)),
            call("cudaDeviceSynchronize", 40, 1100, 3),
        ]  # fmt: skip
        execution = build(read_job(write_trace(tmp_path / f"{kind}.json", events)))
        pair = sides(execution, execution.graph)
        assert pair is not None
        return float(1 / pair[0].speed[0])

    assert slowdowns("send") == slowdowns("recv") == slowdowns("send_recv") < slowdowns("allreduce")


def test_a_trace_whose_gpu_is_called_like_a_file_reads_no_file(tmp_path: Path) -> None:
    sheet = tmp_path / "gpu.toml"
    sheet.write_text("not a data sheet")
    assert gpu_of_trace(str(sheet), ["volta_sgemm_128x64_tn"]).name == "a100"
    assert gpu_of_trace("", ["nvjet_tst_256x128"]).name == "h100"
    assert gpu_of_trace("NVIDIA H200", []).name == "h200"
