"""Each rule alone, on the smallest trace that shows it. Times are microseconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from lumos.analysis.collectives import message_bytes
from lumos.analysis.replay import replay, unfrozen
from lumos.graph.graph import Rule, simulate
from lumos.graph.rules.build import Execution, build
from lumos.graph.rules.event import _Thread
from lumos.graph.scaling import Scale
from lumos.prediction.prediction import predict
from lumos.read.job import read_job
from lumos.trace.trace import Message, Trace
from support import (
    Event,
    call,
    collective,
    header,
    kernel,
    launch,
    memcpy,
    memset,
    note,
    op,
    span,
    sync,
    training_run,
    write_trace,
)


def read(tmp_path: Path, *ranks: list[Event]) -> Trace:
    for rank, events in enumerate(ranks):
        write_trace(tmp_path / f"rank{rank}.json", events, header(rank, len(ranks)))
    return read_job(tmp_path)


def edges(execution: Execution, rule: Rule) -> list[tuple[str, str]]:
    """(source, target) of a rule's edges by the names of their events."""
    nodes, trace = execution.nodes, execution.trace

    def name(node: int) -> str:
        if node >= len(nodes):
            return "rendezvous"
        return trace.names[trace.name[nodes.row[node]]] if nodes.row[node] >= 0 else "pause"

    found = execution.graph.edges
    return [(name(found.source[i]), name(found.target[i])) for i in np.flatnonzero(found.rule == rule)]


def test_a_kernel_waits_for_its_launch_by_correlation_not_by_time(tmp_path: Path) -> None:
    events = [call("cudaLaunchKernel", 0, 5, 2), call("cudaLaunchKernel", 10, 5, 1)]
    trace = read(tmp_path, [*events, kernel("first", 20, 5, 1, 7), kernel("second", 20, 5, 2, 8)])
    execution = build(trace)
    by_target = dict(zip(*reversed(list(zip(*_nodes_of(execution, Rule.LAUNCH), strict=True))), strict=True))
    assert by_target == {"first": 10_000, "second": 0}


def _nodes_of(execution: Execution, rule: Rule) -> list[tuple[int, str]]:
    nodes, trace, found = execution.nodes, execution.trace, execution.graph.edges
    return [
        (int(nodes.start[found.source[i]]), trace.names[trace.name[nodes.row[found.target[i]]]])
        for i in np.flatnonzero(found.rule == rule)
    ]


def test_a_driver_launch_and_an_amd_launch_are_launches(tmp_path: Path) -> None:
    events = [
        span("cuda_driver", "cuLaunchKernelEx", 0, 5, 100, 1, {"correlation": 1}),
        call("hipExtModuleLaunchKernel", 10, 5, 2),
        kernel("a", 20, 5, 1),
        kernel("b", 30, 5, 2),
    ]
    assert sorted(edges(build(read(tmp_path, events)), Rule.LAUNCH)) == [
        ("cuLaunchKernelEx", "a"), ("hipExtModuleLaunchKernel", "b"),
    ]  # fmt: skip


def test_one_graph_launch_starts_many_kernels_and_orders_its_streams(tmp_path: Path) -> None:
    events = [
        call("cudaGraphLaunch", 0, 5, 1),
        kernel("a", 10, 20, 1, 7),
        kernel("b", 31, 20, 1, 8),  # right after a, on another stream
        kernel("c", 52, 20, 1, 7),  # right after b
    ]
    execution = build(read(tmp_path, events))
    assert sorted(edges(execution, Rule.LAUNCH)) == [("cudaGraphLaunch", "a"), ("cudaGraphLaunch", "b")]
    assert sorted(edges(execution, Rule.GRAPH)) == [("a", "b"), ("b", "c")]


def test_a_device_synchronisation_waits_for_every_stream_and_costs_only_its_return(tmp_path: Path) -> None:
    events = [
        *launch("a", 0, 1, takes=100, stream=7),
        *launch("b", 10, 2, takes=300, stream=8),
        call("cudaDeviceSynchronize", 30, 295, 3),
    ]
    execution = build(read(tmp_path, events))
    assert sorted(s for s, _ in edges(execution, Rule.SYNC)) == ["a", "b"]
    returned = execution.nodes.last_node[execution.trace.call == 4][0]  # DEVICE_SYNC
    assert execution.graph.duration[returned] == 5_000  # b ended at 320, the call at 325


def test_a_stream_synchronisation_waits_for_its_stream_alone(tmp_path: Path) -> None:
    events = [
        *launch("short", 0, 1, takes=50, stream=7),
        *launch("long", 10, 2, takes=300, stream=8),
        call("cudaStreamSynchronize", 30, 40, 3),
        sync("Stream Sync", 30, 40, 3, 7),
    ]
    assert edges(build(read(tmp_path, events)), Rule.SYNC) == [("short", "cudaStreamSynchronize")]


def test_without_details_an_event_synchronisation_waits_for_what_ended_just_before_it_returned(tmp_path: Path) -> None:
    events = [
        *launch("early", 0, 1, takes=50, stream=7),
        *launch("late", 10, 2, takes=1000, stream=8),
        call("cudaEventSynchronize", 30, 995, 3),
    ]
    assert edges(build(read(tmp_path, events)), Rule.SYNC) == [("late", "cudaEventSynchronize")]


def test_a_copy_from_pageable_memory_blocks_and_one_that_is_pinned_does_not(tmp_path: Path) -> None:
    pinned = memcpy(40, 10, 2) | {"name": "Memcpy HtoD (Pinned -> Device)"}
    events = [call("cudaMemcpyAsync", 0, 25, 1), memcpy(5, 15, 1), call("cudaMemcpyAsync", 30, 25, 2), pinned]
    assert edges(build(read(tmp_path, events)), Rule.SYNC) == [("Memcpy HtoD (Pageable -> Device)", "cudaMemcpyAsync")]


def _two_streams(record: bool, details: dict[str, int] | None) -> list[Event]:
    """Compute on 7, then a kernel on 20 that waits for it by an event."""
    events = [*launch("compute", 0, 1, takes=100)]
    if record:
        events.append(call("cudaEventRecord", 20, 2, 2))
    events += [call("cudaStreamWaitEvent", 25, 2, 3), *launch("waiter", 30, 4, stream=20, late=83)]
    if details is not None:
        events.append(sync("Stream Wait Event", 25, 2, 3, 20, details))
    return events


EXPLICIT = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 2, "wait_on_cuda_event_id": 9}
HALF_EXPLICIT = {"wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": -1, "wait_on_cuda_event_id": 9}


@pytest.mark.parametrize(
    ("record", "details"),
    [(True, EXPLICIT), (True, HALF_EXPLICIT), (True, None), (False, None)],
    ids=["explicit", "stream and record unknown", "no sync rows", "no records either"],
)
def test_a_stream_waits_for_another_by_an_event(tmp_path: Path, record: bool, details: dict[str, int] | None) -> None:
    assert edges(build(read(tmp_path, _two_streams(record, details))), Rule.EVENT) == [("compute", "waiter")]


def test_a_wait_is_never_inferred_against_the_clock(tmp_path: Path) -> None:
    events = [
        *launch("done", 0, 1, takes=20),
        *launch("still running", 40, 2, takes=500),
        call("cudaEventRecord", 60, 2, 3),
        call("cudaStreamWaitEvent", 65, 2, 4),
        *launch("waiter", 70, 5, stream=20),  # starts at 80, long before `still running` ends
    ]
    assert edges(build(read(tmp_path, events)), Rule.EVENT) == [("done", "waiter")]


def test_kernels_of_one_communicator_follow_each_other_across_streams(tmp_path: Path) -> None:
    told = collective("allreduce", ranks="[0]")
    events = [
        *launch("x", 0, 9),
        call("cudaLaunchKernel", 10, 5, 1),
        call("cudaLaunchKernel", 20, 5, 2),
        kernel("ncclDevKernel_AllReduce", 30, 100, 1, 20, told),
        kernel("ncclDevKernel_AllReduce", 132, 100, 2, 21, told),
    ]
    found = edges(build(read(tmp_path, events)), Rule.EVENT)
    assert ("ncclDevKernel_AllReduce", "ncclDevKernel_AllReduce") in found


def _shared_queue(together: bool) -> list[Event]:
    """Three times: a kernel on 20 is held back for a millisecond; one on 7, launched after it, could start at once."""
    events: list[Event] = []
    for i in range(3):
        t = 2000 * i
        events += [
            call("cudaLaunchKernel", t, 5, 10 * i + 1),
            call("cudaLaunchKernel", t + 10, 5, 10 * i + 2),
            kernel("held", t + 1000, 50, 10 * i + 1, 20),
            kernel("other", t + 1001 if together else t + 20, 50, 10 * i + 2, 7),
        ]
    return events


def test_streams_that_always_start_together_share_a_queue(tmp_path: Path) -> None:
    assert ("held", "other") in edges(build(read(tmp_path, _shared_queue(together=True))), Rule.CHANNEL)


def test_a_stream_that_runs_ahead_does_not_share_the_queue(tmp_path: Path) -> None:
    assert ("held", "other") not in edges(build(read(tmp_path, _shared_queue(together=False))), Rule.CHANNEL)


def test_a_kernel_without_room_does_not_disprove_a_shared_queue(tmp_path: Path) -> None:
    """Released together, but of the two the held one has to wait for room on the GPU once."""
    events = _shared_queue(together=True)
    late = next(e for e in events if e["name"] == "held")
    late["ts"] += 200
    assert ("held", "other") in edges(build(read(tmp_path, events)), Rule.CHANNEL)


def test_a_stream_goes_on_when_the_queue_head_has_its_turn_even_without_room(tmp_path: Path) -> None:
    """The kernel ahead in the queue may start once "before" has ended, but there is no room; the other one has room."""
    events: list[Event] = []
    for i in range(3):
        t, number = 5000 * i, 10 * i
        events += [call("cudaLaunchKernel", t + 10 * j, 5, number + j) for j in range(3)]
        events += [kernel("before", t + 20, 2000, number, 7), kernel("crowded", t + 2420, 50, number + 1, 7)]
        events.append(kernel("other", t + 2024, 50, number + 2, 20))
    execution = build(read(tmp_path, events))
    assert edges(execution, Rule.CHANNEL) == [("before", "other")] * 3


def _rank_on_a_gpu(rank: int, takes_turns: bool, device: int = 0) -> list[Event]:
    """Thirty kernels of 100 µs, all launched at once; on a shared GPU the other rank's kernels run in between."""
    period, first = (200, 100 * rank) if takes_turns else (200, 0)
    events = [note("ProfilerStep#1", 0, 200 * 30 + 300), call("cudaLaunchKernel", 0, 1, 1)]
    for i in range(30):
        events.append(call("cudaLaunchKernel", 1 + i, 1, i + 1))
        events.append(kernel(f"rank{rank}", 50 + first + period * i, 98, i + 1, 7, {"device": device}))
    return events


@pytest.mark.parametrize(
    ("takes_turns", "devices", "shared"),
    [(True, (0, 0), True), (True, (0, 1), False), (False, (0, 0), False)],
    ids=["in turns", "two devices", "at the same time"],
)
def test_ranks_that_share_a_gpu_take_turns(
    tmp_path: Path, takes_turns: bool, devices: tuple[int, int], shared: bool
) -> None:
    ranks = [_rank_on_a_gpu(rank, takes_turns, device) for rank, device in enumerate(devices)]
    execution = build(read(tmp_path, *ranks))
    between = set(edges(execution, Rule.SHARED_GPU))
    assert between == ({("rank0", "rank1"), ("rank1", "rank0")} if shared else set())
    if shared:
        gpu = execution.nodes.on_gpu
        faster = simulate(execution.graph, np.where(gpu, 0.5, 1.0) * execution.graph.duration)
        assert faster.end[gpu].max() < 0.6 * simulate(execution.graph).end[gpu].max()


def test_a_full_launch_queue_holds_the_cpu_back(tmp_path: Path) -> None:
    """Recorded on an H200: 3,000 launches behind one long kernel."""
    run = replay(read_job(Path(__file__).parent / "data/full_queue.json.gz"))
    blocked = [t for s, t in edges(run.execution, Rule.QUEUE) if s.endswith("spin_kernel(long)")]
    assert blocked == ["cudaLaunchKernel", "cudaLaunchKernel"]  # once a round
    halved = predict(run, [Scale.parse("kernel:spin=0.5")])
    assert halved.step_ms < 0.6 * run.clean_ms


def test_backward_on_another_thread_waits_for_forward_and_is_waited_for(tmp_path: Path) -> None:
    events = [
        note("ProfilerStep#1", 0, 2000),
        op("forward", 0, 500, tid=1),
        op("MmBackward0", 560, 900, tid=2),
        op("step", 1500, 400, tid=1),
    ]
    execution = build(read(tmp_path, events))
    assert edges(execution, Rule.THREAD) == [("MmBackward0", "ProfilerStep#1"), ("forward", "MmBackward0")]
    faster = execution.graph.duration.copy()
    faster[execution.nodes.row == 2] *= 0.5  # the backward pass
    assert simulate(execution.graph).span - simulate(execution.graph, faster).span == 450_000


def test_threads_wake_each_other_whatever_the_clock_s_origin_is(tmp_path: Path) -> None:
    """Rank 1 started earlier than rank 0, where the clock of a job begins, or events lie in the wrong order."""
    trace = read(tmp_path, [op("forward", 0, 500, tid=1), op("MmBackward0", 560, 900, tid=2)])
    found = edges(build(trace), Rule.THREAD)
    assert found == [("forward", "MmBackward0")]
    assert edges(build(trace.shifted({0: -10_000_000})), Rule.THREAD) == found


def test_a_pause_that_nothing_explains_is_work_of_its_own(tmp_path: Path) -> None:
    execution = build(read(tmp_path, [op("a", 0, 100), op("b", 1100, 100)]))
    assert edges(execution, Rule.THREAD) == []
    assert sorted(execution.graph.duration) == [100_000, 100_000, 1_000_000]


def test_a_thread_that_only_polls_is_not_work(tmp_path: Path) -> None:
    polling = [call("cudaEventQuery", 10 * i, 2, 100 + i, tid=99) for i in range(200)]
    run = replay(read(tmp_path, [op("a", 0, 100), *launch("k", 20, 1), *polling]))
    assert run.recorded_steps.mean == pytest.approx(0.1)  # the polling went on for 2 ms


def _meeting(arrival: float, end: float) -> list[Event]:
    told = collective("allreduce", 1 << 20)
    return [
        *launch("compute", 0, 1, takes=arrival - 15),
        call("cudaEventRecord", 10, 2, 3),
        call("cudaStreamWaitEvent", 15, 2, 4),
        call("cudaLaunchKernel", 20, 5, 2),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", arrival, end - arrival, 2, 20, told),
    ]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("BFloat16", 2), ("bf16", 2), ("fp16", 2), ("fp32", 4), ("Float8_e4m3fn", 1), ("Long", 8), ("?", -1)],
)
def test_a_message_has_the_size_of_its_elements_however_their_type_is_spelt(dtype: str, size: int) -> None:
    assert message_bytes(Message("all_reduce", dtype, 10, 10)) == (10 * size if size > 0 else -1)


def test_a_collective_is_waiting_and_transfer(tmp_path: Path) -> None:
    run = replay(read(tmp_path, _meeting(100, 1000), _meeting(700, 1002)))
    (found,) = run.collectives
    assert (found.collective, found.ranks, found.last_rank) == ("all_reduce", 2, 1)
    assert found.worst_wait_ms == pytest.approx(0.6)
    assert found.transfer_ms == pytest.approx(0.301)
    assert found.bus_gb_s == pytest.approx(2 * 2**20 / 0.301e-3 / 1e9, rel=1e-3)  # bf16, two ranks: factor one


def test_nobody_waits_longer_than_the_kernel_takes_even_if_events_are_missing_and_matching_is_misled(
    tmp_path: Path,
) -> None:
    def rank(*collectives: int) -> list[Event]:
        told = collective("allreduce")
        calls = [call("cudaLaunchKernel", 1000 * i, 5, i + 1) for i in collectives]
        kernels = [kernel("ncclKernel_x", 1000 * i + 50, 100, i + 1, 20, told) for i in collectives]
        return [op("a", 0, 9000), *calls, *kernels]

    run = replay(read(tmp_path, rank(0, 1, 2, 3, 4, 5), rank(0, 2, 3, 4, 5)))
    assert max(found.worst_wait_ms for found in run.collectives) <= 0.1
    assert max(one.others_wait_ms for one in run.stragglers) <= 0.1


def test_when_the_late_rank_is_faster_all_ranks_are(tmp_path: Path) -> None:
    run = replay(read(tmp_path, _meeting(100, 1000), _meeting(700, 1000)))
    predicted = predict(run, [Scale.parse("compute=0.5")])
    assert run.stragglers[0].rank == 1
    assert predicted.trace.end.max() - run.execution.trace.end.max() == pytest.approx(-342_500, abs=3_000)


def test_ranks_that_miss_leading_collectives_are_matched_from_the_end(tmp_path: Path) -> None:
    def rank(count: int) -> list[Event]:
        told = collective("allreduce")
        events: list[Event] = []
        for i in range(3 - count, 3):
            events += [
                call("cudaLaunchKernel", 1000 * i, 5, i + 1),
                kernel("ncclKernel_x", 1000 * i + 50, 100, i + 1, 20, told),
            ]
        return [op("a", 0, 3000), *events]

    run = replay(read(tmp_path, rank(3), rank(2)))
    assert [round(c.worst_wait_ms, 3) for c in run.collectives] == [0.0, 0.0]


def test_a_send_meets_the_receive_of_its_peer(tmp_path: Path) -> None:
    def rank(mine: str, peer: str, start: float) -> list[Event]:
        told = collective(mine, **{peer: 1 if mine == "send" else 0})
        return [
            op("record_param_comms", 0, 30, args=told),
            call("cudaLaunchKernel", 10, 5, 1),
            kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", start, 500 - start, 1, 20),
        ]

    run = replay(read(tmp_path, rank("send", "Dst Rank", 50), rank("recv", "Src Rank", 300)))
    (found,) = run.collectives
    assert (found.collective, found.last_rank, found.worst_wait_ms) == ("send_recv", 1, pytest.approx(0.25))


def test_clocks_that_differ_are_aligned_by_the_ends_of_collectives(tmp_path: Path) -> None:
    off = [event | {"ts": event.get("ts", 0) + 5000} for event in training_run(rank=1)]
    run = replay(read(tmp_path, training_run(rank=0), off))
    assert all(c.worst_wait_ms < 0.001 for c in run.collectives)
    assert any("aligned" in w for w in run.execution.warnings)


def test_kernels_resident_before_their_turn_begin_when_it_comes(tmp_path: Path) -> None:
    """Programmatic dependent launch: the second kernel is on the GPU early and waits there."""
    events = [*launch("a", 0, 1, takes=100), call("cudaLaunchKernel", 8, 3, 2), kernel("b", 15, 145, 2)]
    execution = build(read(tmp_path, events))
    b = execution.nodes.first_node[execution.trace.name == execution.trace.names.index("b")][0]
    assert (execution.nodes.start[b] - execution.origin, execution.graph.duration[b]) == (110_000, 50_000)


def test_with_nothing_frozen_a_step_lacks_what_no_rule_explains(tmp_path: Path) -> None:
    """The second kernel was late by a millisecond for no reason that the trace shows; the host waits for it."""
    events = [*launch("a", 0, 1), *launch("b", 20, 2, late=1010), call("cudaDeviceSynchronize", 30, 1025, 3),
              note("ProfilerStep#1", 0, 1060)]  # fmt: skip
    whole, *others = replay(read(tmp_path, events)).ablation
    assert (whole.without, round(whole.step_ms, 2)) == ((), 0.07)
    assert {one.without for one in others} == {("launch",), ("sync",)}
    answer = replay(read(tmp_path, events)).as_dict(ablate=True)
    assert answer["unfrozen_error_pct"] == whole.error_pct == pytest.approx(100 * (0.07 / 1.06 - 1), abs=1.5)
    assert [one["without"] for one in answer["ablation"]] == [[], ["launch"], ["sync"]]


def test_a_rule_that_explains_a_wait_is_missed(tmp_path: Path) -> None:
    trace = read(tmp_path, training_run(rank=0), training_run(rank=1, slow=40))
    errors = {one.without: one.error_pct for one in replay(trace).ablation}
    assert abs(errors[()]) < 0.5
    assert errors["launch",] < -20
    assert errors["sync",] < -2


def test_when_a_lane_begins_is_given_and_not_explained(tmp_path: Path) -> None:
    late = [*launch("b", 5000, 1), note("ProfilerStep#1", 5000, 60)]
    execution = build(read(tmp_path, [*launch("a", 0, 1), note("ProfilerStep#1", 0, 60)], late))
    assert simulate(unfrozen(execution)).span == simulate(execution.graph).span == 5_060_000


def test_time_that_no_rule_explains_is_frozen_and_reported(tmp_path: Path) -> None:
    events = [*launch("a", 0, 1, takes=100), *launch("b", 20, 2, late=1000), memset(2000, 1, 9), op("tail", 2050, 10)]
    run = replay(read(tmp_path, events))
    assert run.execution.graph.frozen.sum() + run.execution.graph.edges.frozen.sum() > 900_000


def _many_streams(count: int) -> list[Event]:
    """Each stream with one kernel, but the first with three."""
    streams = [20, 20, *range(20, 20 + count)]
    return list(chain.from_iterable(launch("gemm", 10.0 * i, i + 1, 2, stream, 4) for i, stream in enumerate(streams)))


def test_of_hundreds_of_streams_those_with_most_kernels_are_compared(tmp_path: Path) -> None:
    """All pairs of thousands would take minutes."""
    nodes = build(read(tmp_path, _many_streams(300))).nodes
    assert len(nodes.streams[0]) == 300
    assert len(nodes.busy_streams[0]) == 128
    assert nodes.trace.lanes[nodes.busy_streams[0][0]].label == "20"
    few = build(read(tmp_path, _many_streams(100))).nodes
    assert few.busy_streams == few.streams


def test_the_last_kernel_that_had_ended_is_found_behind_any_queue(tmp_path: Path) -> None:
    nodes = build(read(tmp_path, _many_streams(1))).nodes
    ends = np.random.default_rng(0).integers(0, 50, 200)
    nodes = replace(nodes, end=ends, first=np.array([0, 3, 200]), start=ends, row=ends, is_return=ends > 0)
    for node in range(3, 200):
        for time in (-1, 0, 3, 20, 49):
            ended = [at for at in range(3, node + 1) if ends[at] <= time]
            assert nodes.last_ended_by(1, node, time) == (ended[-1] if ended else -1)


def test_the_last_launch_to_another_stream_is_known_at_once() -> None:
    thread, lanes = _Thread(), np.random.default_rng(0).integers(0, 3, 100).tolist()
    for time, lane in enumerate(lanes):
        thread.launch(time, lane)
    for time in range(100):
        for lane in range(3):
            others = [one for one in lanes[:time] if one != lane]
            assert thread.last_lane(time, lane) == (others[-1] if others else -1)
