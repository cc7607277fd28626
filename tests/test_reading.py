"""Reading one file: every variant of the format that is seen in the wild gives the same columns."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import Write
from lumos.analysis.replay import replay
from lumos.read import json_slices as slices
from lumos.read.job import read_job
from lumos.read.kineto import read_kineto
from lumos.trace.names import Category
from lumos.trace.trace import Message, Trace
from support import (
    BASE_NS,
    EPOCH_US,
    LAYOUTS,
    Event,
    Layout,
    assert_same_columns,
    call,
    calls_made,
    collective,
    header,
    json_text,
    kernel,
    launch,
    note,
    op,
    rows,
    span,
    sync,
    training_run,
    write_bytes,
    write_trace,
)

NS = 1000  # a microsecond


def names(trace: Trace) -> list[str]:
    return [row.name for row in rows(trace)]


# Categories


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Operator", "cpu_op"),
        ("Runtime", "cuda_runtime"),
        ("Kernel", "kernel"),
        ("Memcpy", "gpu_memcpy"),
        ("Memset", "gpu_memset"),
        ("cuda_driver", "cuda_runtime"),
        ("cuda_api", "cuda_runtime"),
        ("nvtx", "user_annotation"),
        ("cuda", "kernel"),
    ],
)
def test_other_names_of_a_category_mean_the_same(write: Write, old: str, new: str) -> None:
    a = read_kineto(write([span(old, "x", 1, 2, 0, 7)]))
    b = read_kineto(write([span(new, "x", 1, 2, 0, 7)]))
    assert rows(a) == rows(b)


def test_each_category_is_told_apart(write: Write) -> None:
    trace = read_kineto(write(training_run(steps=1, layers=1)))
    found = {row.name: row.category for row in rows(trace)}
    assert found["aten::mm"] == Category.OP
    assert found["cudaLaunchKernel"] == Category.CALL
    assert found["ProfilerStep#0"] == Category.NOTE
    assert found["sm90_gemm"] == Category.KERNEL
    assert found["Memcpy HtoD (Pageable -> Device)"] == Category.COPY
    assert found["Memset (Device)"] == Category.SET


@pytest.mark.parametrize("cat", ["Trace", "gpu_user_annotation", "fwdbwd", "", "no such category", 7, None])
def test_events_of_no_known_category_are_passed_over(write: Write, cat: Any) -> None:
    trace = read_kineto(write([op("kept", 1, 2), span(cat, "dropped", 1, 2, 0, 7)]))
    assert (names(trace), trace.warnings) == (["kept"], ())


def test_an_event_without_a_category_is_passed_over(write: Write) -> None:
    bare = {"ph": "X", "name": "dropped", "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    assert names(read_kineto(write([bare, op("kept", 1, 2)]))) == ["kept"]


def test_arrows_and_metadata_are_no_spans(write: Write) -> None:
    arrows = [{"ph": ph, "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 1, "id": 1} for ph in "sfMiC"]
    assert names(read_kineto(write([*arrows, op("kept", 1, 2)]))) == ["kept"]


# Lanes


@pytest.mark.parametrize(
    "event",
    [
        span("kernel", "k", 1, 2, 0, 7),
        span("kernel", "k", 1, 2, 0, "stream 7"),
        span("kernel", "k", 1, 2, 0, "stream 7", {"correlation": -1}),
        span("kernel", "k", 1, 2, "GPU", "Spans", {"device": 0, "stream": 7}),
        span("kernel", "k", 1, 2, 0, 7, {"device": "0", "stream": "7"}),
        span("kernel", "k", 1, 2, 0, 7, {"device": 0, "stream": "stream 7"}),
    ],
)
def test_a_stream_has_one_name_however_it_is_written(write: Write, event: Event) -> None:
    (lane,) = read_kineto(write([event])).lanes
    assert (lane.is_stream, lane.process, lane.label) == (True, "0", "7")


@pytest.mark.parametrize("tid", [1, -1, 2**63, 10**30, "123 (python)", "Spans", None])
def test_any_thread_id_is_a_lane(write: Write, tid: Any) -> None:
    trace = read_kineto(write([op("a", 1, 2, tid=tid), op("b", 3, 4, tid=tid), op("c", 1, 2, tid="other")]))
    assert [lane.label for lane in trace.lanes] == [str(tid), "other"]
    assert trace.lane.tolist() == [0, 0, 1]


@pytest.mark.parametrize("pid", [0, -7, 2**64, 10**30, "Device 0", "python 12"])
def test_the_same_thread_of_another_process_is_another_lane(write: Write, pid: Any) -> None:
    trace = read_kineto(write([span("cpu_op", "a", 1, 2, pid, 1), span("cpu_op", "b", 1, 2, 99, 1)]))
    assert [lane.process for lane in trace.lanes] == [str(pid), "99"]


def test_a_thread_and_a_stream_of_one_number_are_two_lanes(write: Write) -> None:
    trace = read_kineto(write([op("a", 1, 2, tid=7), kernel("k", 1, 2, stream=7)]))
    assert [lane.text for lane in trace.lanes] == ["thread 7", "stream 7"]


# Time


def test_integer_microseconds_since_the_epoch_are_exact(write: Write) -> None:
    trace = read_kineto(write([op("a", EPOCH_US, 3)]))
    assert (trace.start[0], trace.duration[0]) == (EPOCH_US * NS, 3 * NS)


def test_an_integer_time_may_have_a_fractional_duration(write: Write) -> None:
    trace = read_kineto(write([op("a", EPOCH_US, 3.25), op("b", EPOCH_US, 0.001)]))
    assert trace.duration.tolist() == [3250, 1]
    assert trace.start.tolist() == [EPOCH_US * NS] * 2


def test_the_base_is_added_as_integer_nanoseconds(write: Write) -> None:
    trace = read_kineto(write([op("a", 3846755121458.441, 199.029)], header(base=BASE_NS)))
    assert (trace.start[0], trace.duration[0]) == (BASE_NS + 3_846_755_121_458_441, 199_029)


@given(nanoseconds=st.lists(st.integers(0, 8_000_000_000_000_000), min_size=1, max_size=20))
def test_every_nanosecond_of_three_months_survives(tmp_path: Path, nanoseconds: list[int]) -> None:
    events = ",".join(
        f'{{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":{t // NS}.{t % NS:03},"dur":1}}'
        for t in nanoseconds
    )
    text = f'{{"baseTimeNanoseconds": {BASE_NS}, "traceEvents": [{events}]}}'
    trace = read_kineto(write_bytes(tmp_path / "trace.json", text.encode()))
    assert trace.start.tolist() == [BASE_NS + t for t in nanoseconds]


@given(nanoseconds=st.lists(st.integers(EPOCH_US * NS, 2_400_000_000 * 10**9), min_size=1, max_size=20))
def test_nanoseconds_since_the_epoch_survive_without_a_base(tmp_path: Path, nanoseconds: list[int]) -> None:
    events = ",".join(
        f'{{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":{t // NS}.{t % NS:03},"dur":1}}'
        for t in nanoseconds
    )
    trace = read_kineto(write_bytes(tmp_path / "trace.json", f'{{"traceEvents": [{events}]}}'.encode()))
    assert trace.start.tolist() == nanoseconds


def test_times_before_the_base_are_negative_offsets(write: Write) -> None:
    trace = read_kineto(write([op("a", -1.5, 1)], header(base=BASE_NS)))
    assert trace.start.tolist() == [BASE_NS - 1500]


@pytest.mark.parametrize("base", [None, "soon", -5, 2**70, [], {}])
def test_a_base_that_is_no_time_is_zero(write: Write, base: Any) -> None:
    trace = read_kineto(write([op("a", 5, 1)], {"baseTimeNanoseconds": base}))
    assert trace.start.tolist() == [5 * NS]


def test_a_missing_duration_is_zero(write: Write) -> None:
    event = op("a", 5, 1)
    del event["dur"]
    assert read_kineto(write([event])).duration.tolist() == [0]


@pytest.mark.parametrize(
    "bad", ["soon", "", None, [], [1.0], [1.0, 2.0], {}, float("nan"), float("inf"), 1e300, 10**400]
)
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_an_event_without_a_usable_time_is_left_out_with_a_warning(write: Write, bad: Any, field: str) -> None:
    trace = read_kineto(write([op("kept", 1, 2), op("dropped", 1, 2) | {field: bad}]))
    assert names(trace) == ["kept"]
    assert len(trace.warnings) == 1
    assert trace.warnings[0].startswith("trace.json: 1 event")


def test_a_file_of_nothing_but_bad_times_is_refused(write: Write) -> None:
    with pytest.raises(Exception, match="no operator, runtime call or kernel"):
        read_kineto(write([op("a", [1.0, 2.0], 2), op("b", [1.0, 2.0], 2)]))


def test_a_negative_duration_is_no_time(write: Write) -> None:
    trace = read_kineto(write([op("kept", 1, 2), op("dropped", 1, -2)]))
    assert (names(trace), len(trace.warnings)) == (["kept"], 1)


@pytest.mark.parametrize("ts", [8.9e15, -8.9e15, 3e15])
@pytest.mark.parametrize("base", [0, BASE_NS, 4 * 10**18 - 1])
def test_no_time_wraps_around(write: Write, ts: float, base: int) -> None:
    trace = read_kineto(write([op("now", 0, 1), op("far", ts, 8.9e15), op("far", ts, 1)], header(base=base)))
    span_of_all = int(trace.end.max()) - int(trace.start.min())
    assert (trace.end >= trace.start).all()
    assert span_of_all <= np.iinfo(np.int64).max
    assert (np.sign(trace.start - base) == [0 if n == "now" else np.sign(ts) for n in names(trace)]).all()


def test_a_number_in_quotes_is_a_number(write: Write) -> None:
    trace = read_kineto(write([op("a", "12.5", "3"), op("b", 1, 2)]))
    assert (trace.start.tolist(), trace.duration.tolist()) == ([12_500, NS], [3000, 2000])


# Arguments


@pytest.mark.parametrize(("told", "read"), [(12, 12), ("12", 12), (12.0, 12), (None, -1), ("x", -1), (2**64 - 1, -1)])
def test_a_correlation_is_an_integer_or_unknown(write: Write, told: Any, read: int) -> None:
    assert read_kineto(write([kernel("k", 1, 2, told)])).correlation.tolist() == [read]


@pytest.mark.parametrize("args", [None, "text", 5, 1.5, [], [1, {"stream": 9}], True, False])
def test_arguments_that_are_no_object_say_nothing(write: Write, args: Any) -> None:
    trace = read_kineto(write([span("kernel", "k", 1, 2, 0, 7) | {"args": args}]))
    assert (names(trace), trace.lanes[0].label, trace.correlation.tolist()) == (["k"], "7", [-1])


def test_a_launch_and_its_kernel_keep_their_correlation(write: Write) -> None:
    assert read_kineto(write(launch("k", 1, 37659))).correlation.tolist() == [37659, 37659]


@pytest.mark.parametrize("stream", [4294967295, "4294967295", -1])
def test_all_streams_has_one_number(write: Write, stream: Any) -> None:
    events = [call("cudaDeviceSynchronize", 1, 2, 5), sync("Context Sync", 1, 2, 5, stream)]
    syncs = read_kineto(write(events)).syncs
    assert (syncs.correlation.tolist(), syncs.stream.tolist()) == ([5], [-1])


def test_a_sync_row_says_what_waits_for_what(write: Write) -> None:
    waits = {"wait_on_stream": "7", "wait_on_cuda_event_record_corr_id": 41, "wait_on_cuda_event_id": 3}
    trace = read_kineto(write([op("a", 1, 1), sync("Stream Wait Event", 1, 2, 42, "20", waits)]))
    syncs = trace.syncs
    told = [int(c[0]) for c in (syncs.correlation, syncs.stream, syncs.wait_stream, syncs.record, syncs.event)]
    assert told == [42, 20, 7, 41, 3]
    assert names(trace) == ["a"], "the row itself is no task"


def test_a_collective_is_read_from_its_arguments(write: Write) -> None:
    args = collective("allreduce", 1024, "[0, 1]", Seq=9)
    (row,) = rows(read_kineto(write([kernel("ncclDevKernel_Generic", 1, 2, args=args)])))
    assert row.message == Message("all_reduce", "BFloat16", 1024, 1024, "0", 2, (0, 1), sequence=9)


@pytest.mark.parametrize(
    ("told", "read"),
    [("[0, 1]", (0, 1)), ([0, 1], (0, 1)), ("[]", ()), ("", ()), ("[0, 1, ..., 63]", ()), (None, ())],
)
def test_the_ranks_of_a_group_are_a_string_or_a_list(write: Write, told: Any, read: tuple[int, ...]) -> None:
    trace = read_kineto(write([kernel("k", 1, 2, args=collective("allreduce") | {"Process Group Ranks": told})]))
    assert trace.messages[0].ranks == read


def test_a_send_keeps_its_peers(write: Write) -> None:
    args = collective("send") | {"Src Rank": 0, "Dst Rank": "1"}
    (message,) = read_kineto(write([op("record_param_comms", 1, 2, args=args)])).messages
    assert (message.collective, message.source, message.destination) == ("send", 0, 1)


@pytest.mark.parametrize("name", ["wait", ""])
def test_a_wait_is_no_message(write: Write, name: str) -> None:
    trace = read_kineto(write([op("record_param_comms", 1, 2, args=collective(name))]))
    assert (trace.messages, trace.message.tolist()) == ((), [-1])


def test_equal_messages_are_kept_once(write: Write) -> None:
    told = collective("allreduce")
    trace = read_kineto(write([kernel("a", 1, 2, args=told), kernel("b", 1, 2), kernel("c", 1, 2, args=told)]))
    assert (len(trace.messages), trace.message.tolist()) == (1, [0, -1, 0])


# Header


def test_a_header_is_read(write: Write) -> None:
    (head,) = read_kineto(write([op("a", 1, 2)], header(3, 8, with_stack=1, traceName="run.json"))).headers
    assert (head.rank, head.world_size, head.gpu, head.backend) == (3, 8, "NVIDIA H200", "nccl")
    assert (head.shapes, head.stacks, head.job) == (True, True, "run.json")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_may_say_nothing_of_itself(write: Write, layout: Layout) -> None:
    (head,) = read_kineto(write([op("a", 1, 2)], {}, layout=layout)).headers
    assert (head.rank, head.world_size, head.gpu, head.backend) == (-1, -1, "", "")


@pytest.mark.parametrize(
    "head",
    [
        {"distributedInfo": None},
        {"distributedInfo": []},
        {"distributedInfo": {"backend": "undefined"}},
        {"deviceProperties": []},
        {"deviceProperties": [None]},
        {"deviceProperties": {"name": "x"}},
    ],
)
def test_a_header_may_be_half_empty(write: Write, head: dict[str, Any]) -> None:
    (read,) = read_kineto(write([op("a", 1, 2)], head)).headers
    assert (read.rank, read.gpu) == (-1, "")


@pytest.mark.parametrize("layout", ["pretty", "one line", "event a line", "events first"])
def test_the_header_may_stand_before_or_after_the_events(write: Write, layout: Layout) -> None:
    path = write([op("a", 1, 2)], header(3, 8, base=BASE_NS), layout=layout)
    trace = read_kineto(path)
    assert (trace.headers[0].rank, trace.headers[0].world_size) == (3, 8)
    assert trace.start.tolist() == [BASE_NS + NS]


@pytest.mark.parametrize("size", [100, 500, 8 << 20])
def test_a_header_of_many_devices_may_follow_the_events(
    write: Write, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", size)
    devices = [{"id": i, "name": "NVIDIA H200", "limits": [1, 2]} for i in range(100)]
    head = {"deviceProperties": devices, "distributedInfo": {"rank": 3, "groups": [{"a": {"b": [[]]}}]}}
    trace = read_kineto(write([op("a", 1, 2), op("b", 1, 2)], head, layout="events first"))
    assert (names(trace), trace.headers[0].rank, trace.warnings) == (["a", "b"], 3, ())


def test_keys_on_both_sides_of_the_events_are_read(tmp_path: Path) -> None:
    before, events, after = header(3), [op("a", 1, 2)], {"traceName": "run", "baseTimeNanoseconds": 5, "x": {"y": {}}}
    text = json.dumps(before | {"traceEvents": events} | after)
    trace = read_kineto(write_bytes(tmp_path / "trace.json", text.encode()))
    assert (trace.headers[0].rank, trace.headers[0].job, trace.start[0]) == (3, "run", NS + 5)


def test_a_broken_header_costs_a_warning_not_the_events(tmp_path: Path) -> None:
    text = b'{"deviceProperties": [oops], "traceEvents": ' + json_text([op("a", 1, 2)], layout="bare list") + b"}"
    trace = read_kineto(write_bytes(tmp_path / "trace.json", text))
    assert (names(trace), len(trace.warnings)) == (["a"], 1)


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_every_layout_and_packing_gives_the_same_columns(write: Write, layout: Layout, ending: str) -> None:
    events = training_run()
    trace = read_kineto(write(events, {}, name=f"other{ending}", layout=layout))
    assert_same_columns(trace, read_kineto(write(events, {}, layout="one line")))
    assert trace.warnings == ()


def test_packing_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    packed = write_trace(tmp_path / "a.json.gz", training_run())
    assert_same_columns(
        read_kineto(packed.rename(tmp_path / "a.json")), read_kineto(write_trace(packed, training_run()))
    )


TRICKY: list[Event] = [
    op("},{", 1, 2),
    op('"},\n  {"ph": "X"', 1, 2),
    op('}] , "traceEvents": [{', 1, 2),
    op("back\\slash\\", 1, 2),
    op("ünïcode 名前 🔥", 1, 2),
    op("nested", 1, 2, args={"a": {"b": {"c": [{"d": 1}, {"e": [{}, {}]}]}}}),
    op("list of dicts", 1, 2, args={"frames": [{"line": i} for i in range(100)]}),
    op("empty", 1, 2, args={"a": [], "b": {}, "c": [[], []]}),
    kernel("k", 1, 2, args={"stack": "f();},{g()", "Collective name": "allreduce"}),
]


@settings(max_examples=150)
@given(
    size=st.integers(1, 3000),
    layout=st.sampled_from(LAYOUTS),
    events=st.lists(st.sampled_from(TRICKY + training_run(steps=1, layers=1)), min_size=1, max_size=40),
)
def test_how_a_file_is_sliced_never_shows(tmp_path: Path, size: int, layout: Layout, events: list[Event]) -> None:
    path = write_trace(tmp_path / "trace.json", [op("first", 0, 1), *events], header(2, 4, base=BASE_NS), layout)
    whole = read_kineto(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_BYTES", size)
        sliced = read_kineto(path)
    assert_same_columns(sliced, whole)
    assert (sliced.headers, sliced.warnings) == (whole.headers, ())


def test_tricky_names_come_through_as_they_are(write: Write) -> None:
    for layout in LAYOUTS:
        assert names(read_kineto(write(TRICKY, layout=layout))) == [event["name"] for event in TRICKY]


def _peak_of_reading(path: Path) -> tuple[int, int]:
    tracemalloc.start()
    events = sum(len(part) for part in slices.Slices(path, dict[str, Any]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return events, peak


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_larger_file_needs_no_more_memory(write: Write, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 15)
    some, peak = _peak_of_reading(write(training_run(steps=20), name=f"some{ending}"))
    more, higher_peak = _peak_of_reading(write(training_run(steps=200), name=f"more{ending}"))
    assert more > 8 * some
    assert higher_peak < 1.5 * peak


def test_no_piece_that_is_decoded_is_longer_than_two_slices(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, real = 0, msgspec.json.Decoder

    class Watched:
        def __init__(self, type: Any) -> None:
            self.real: Any = real(type)

        def decode(self, text: bytes) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return self.real.decode(text)

    path = write(training_run(steps=50))
    monkeypatch.setattr(msgspec.json, "Decoder", Watched)
    monkeypatch.setattr(slices, "SLICE_BYTES", 4096)
    assert len(read_kineto(path)) > 500
    assert 2048 < longest <= 2 * 4096


# Damage


@pytest.mark.parametrize("bad", [b"\x00", b"\x01", b"\x1b[31m", b"\x1f", b"\n", b"\t", b"\r\n"])
@pytest.mark.parametrize("size", [300, 8 << 20])
def test_control_characters_inside_names_are_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bytes, size: int
) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", size)
    text = json_text([*training_run(), op("one-HERE-two", 1, 2), *training_run()], header(5)).replace(b"HERE", bad)
    trace = read_kineto(write_bytes(tmp_path / "trace.json", text))
    shown = "".join(" " if c < " " else c for c in bad.decode())
    assert f"one-{shown}-two" in names(trace)
    assert len(trace) == 2 * len(read_kineto(write_trace(tmp_path / "clean.json", training_run()))) + 1


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x80\x80"])
def test_invalid_utf8_in_a_name_costs_only_those_letters(tmp_path: Path, bad: bytes) -> None:
    text = json_text([op("before", 1, 2), op("one-HERE-two", 1, 2), op("after", 1, 2)]).replace(b"HERE", bad)
    before, between, after = names(read_kineto(write_bytes(tmp_path / "trace.json", text)))
    assert (before, after) == ("before", "after")
    assert between.startswith("one-")
    assert between.endswith("-two")


def test_invalid_utf8_in_the_header_costs_no_rank(tmp_path: Path) -> None:
    text = json_text([op("a", 1, 2)], header(3, traceName="HERE")).replace(b"HERE", b"\xff\x01")
    assert read_kineto(write_bytes(tmp_path / "trace.json", text)).headers[0].rank == 3


@settings(max_examples=150)
@given(share=st.floats(0.02, 0.999), layout=st.sampled_from(LAYOUTS), size=st.sampled_from([200, 1000, 8 << 20]))
def test_of_a_file_cut_short_all_whole_events_are_read(tmp_path: Path, share: float, layout: Layout, size: int) -> None:
    events = [op(f"a{i}", i, 1, args={"Input Dims": [[1, 2], []], "x": {}}) for i in range(40)]
    text = json_text(events, layout=layout).rstrip()
    inside = text.index(b"{", text.index(b"[")) if layout != "bare list" else 1
    kept = text[: inside + int(share * (text.rindex(b"}", 0, text.rindex(b"]")) - inside))]
    ends = [kept.find(f'"a{i}"'.encode()) for i in range(40)]
    whole = [f"a{i}" for i in range(39) if ends[i + 1] >= 0]  # the next one has begun
    path = write_bytes(tmp_path / "trace.json", kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_BYTES", size)
        if not whole:
            return
        trace = read_kineto(path)
    assert names(trace)[: len(whole)] == whole
    assert len(trace) <= len(whole) + 1
    assert trace.warnings == ("trace.json: the file ends in the middle; what was written up to there is used",)


@pytest.mark.parametrize("tail", [b"", b"]", b",", b"]}", b"\n]\n}\n", b", ]}"])
def test_a_list_that_is_closed_badly_is_read_to_its_end(tmp_path: Path, tail: bytes) -> None:
    text = b'{"traceEvents": [' + b", ".join(json.dumps(op(f"a{i}", 1, 2)).encode() for i in range(5)) + tail
    assert len(read_kineto(write_bytes(tmp_path / "trace.json", text))) == 5


def test_one_broken_event_costs_only_itself(tmp_path: Path) -> None:
    text = json_text([*training_run(), op("HERE", 1, 2), *training_run()]).replace(b'"HERE"', b"oops")
    trace = read_kineto(write_bytes(tmp_path / "trace.json", text))
    assert len(trace) == 2 * len(read_kineto(write_trace(tmp_path / "clean.json", training_run())))
    assert trace.warnings == ("trace.json: 1 events are not valid JSON and were left out",)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "nan", "01"])
def test_numbers_that_json_does_not_have_cost_one_event(tmp_path: Path, word: str) -> None:
    text = json_text([op("kept", 1, 2), op("dropped", 777, 2), op("kept", 1, 2)]).replace(b"777", word.encode())
    trace = read_kineto(write_bytes(tmp_path / "trace.json", text))
    assert (names(trace), len(trace.warnings)) == (["kept", "kept"], 1)


@pytest.mark.parametrize("stranger", ["5", "null", '"text"', "[]", "[1, {}]", "true"])
def test_what_is_no_event_is_passed_over(tmp_path: Path, stranger: str) -> None:
    kept = json.dumps(op("kept", 1, 2))
    text = f'{{"traceEvents": [{kept}, {stranger}, {kept}]}}'
    trace = read_kineto(write_bytes(tmp_path / "trace.json", text.encode()))
    assert names(trace) == ["kept", "kept"]


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "trace.json", b"\xef\xbb\xbf" + json_text([op("a", 1, 2)], header(3)))
    assert (len(read_job(path)), read_kineto(path).headers[0].rank) == (1, 3)


# Real files


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("h200/multirank/ddp2_l8/rank0.pt.trace.json.gz", 1_790_857_026_000_000_000 + 3_846_755_121_458_441),
        ("public/hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", 1_712_195_495_519_689_047),
        ("public/kineto_2021/worker0.1623143089861.pt.trace.json.gz", None),
        ("public/tracelens/inference/vllm_decode_full/graph_execution.json.gz", None),
    ],
)
def test_real_files_read_the_same_in_slices(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, file: str, first: int | None
) -> None:
    whole = read_kineto(shared_data / file)
    monkeypatch.setattr(slices, "SLICE_BYTES", 77_777)
    sliced = read_kineto(shared_data / file)
    assert_same_columns(sliced, whole)
    assert sliced.headers == whole.headers
    assert first is None or first in whole.start


@pytest.mark.data
def test_the_names_of_2021_are_understood_in_a_real_file(shared_data: Path) -> None:
    trace = read_kineto(shared_data / "public/kineto_2021/worker0.1623143089861.pt.trace.json.gz")
    found = {Category(c) for c in np.unique(trace.category)}
    assert {Category.OP, Category.CALL, Category.KERNEL, Category.COPY, Category.SET} <= found
    assert any(n.startswith("ProfilerStep") for n in trace.names)


def test_notes_and_operators_may_share_a_name(write: Write) -> None:
    trace = read_kineto(write([note("x", 1, 2), op("x", 1, 2)]))
    assert (trace.names, trace.name.tolist()) == (("x",), [0, 0])


def test_work_grows_with_the_number_of_threads_and_not_with_its_square(write: Write) -> None:
    calls = []
    replay(read_job(write(launch("gemm", 1, 7))))  # what is imported and read once is not counted
    for threads in (100, 200, 400):
        events = [op("aten::mm", 10 * thread, 5, tid=thread) for thread in range(threads)]
        path = write(events + launch("gemm", 1, 7))
        calls.append(calls_made(lambda path=path: replay(read_job(path)).recorded_steps.mean))
    assert calls[2] - calls[1] < 3 * (calls[1] - calls[0])
