"""Formats: Chakra there and back, Nsight Systems, execution traces, and files that are none of these."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foreign_traces import et_nodes, write_et, write_nsys
from graphs import graphs, scaled
from lumos.analysis.replay import replay
from lumos.chakra import file_format
from lumos.chakra.file_format import NodeType, add_value, read_chakra_file, schema
from lumos.chakra.run_reader import read_chakra
from lumos.chakra.run_writer import write_chakra
from lumos.cli.main import app
from lumos.errors import InputError, LumosError
from lumos.export.chrome_traces import write_kineto, write_timeline
from lumos.graph.graph import Graph, simulate
from lumos.graph.rules.build import Execution, build
from lumos.graph.rules.nodes import Nodes
from lumos.graph.scaling import Scale
from lumos.prediction.prediction import predict
from lumos.read import formats
from lumos.read.execution_trace import link, read_execution_trace
from lumos.read.formats import Form, form_of, head_of
from lumos.read.job import read_job
from lumos.read.nsys import read_nsys
from lumos.trace.names import Category, Kind
from lumos.trace.trace import Header, Lane, Message, Syncs, Trace
from support import collective, header, kernel, launch, note, op, training_run, write_trace

CATEGORY = {Kind.CPU: Category.OP, Kind.COMPUTE: Category.KERNEL, Kind.COMM: Category.KERNEL, Kind.COPY: Category.COPY}


# An independent reader of `.et`: protobuf by hand, from its specification.


class Field(NamedTuple):
    number: int
    wire: int  # 0 varint, 1 eight bytes, 2 bytes after their length, 5 four bytes
    value: Any


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[Field]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = varint(data, at)
            yield Field(key >> 3, wire, value)
            continue
        size, at = varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        yield Field(key >> 3, wire, data[at : at + size])
        at += size


def messages(path: Path) -> Iterator[list[Field]]:
    data, at = path.read_bytes(), 0
    while at < len(data):
        size, at = varint(data, at)
        yield list(fields(data[at : at + size]))
        at += size


class Seen(NamedTuple):
    """A node as the independent reader sees it; attributes with the field that held their value."""

    id: int
    name: str
    type: int
    ctrl_deps: list[int]
    data_deps: list[int]
    start: int
    duration: int
    attributes: dict[str, tuple[int, Any]]


INT32, INT64, UINT64, BOOL, STRING = 7, 9, 13, 27, 29  # the fields of AttributeProto that hold these


def numbers(found: list[Field], number: int) -> list[int]:
    """A repeated field, packed or not."""
    answer: list[int] = []
    for field in found:
        if field.number == number and field.wire == 0:
            answer.append(field.value)
        elif field.number == number:
            at = 0
            while at < len(field.value):
                value, at = varint(field.value, at)
                answer.append(value)
    return answer


def seen(found: list[Field]) -> Seen:
    one = {field.number: field.value for field in found}
    attributes = {}
    for field in found:
        if field.number == 10:
            inner = list(fields(field.value))
            value = next((f for f in inner if f.number > 2), Field(0, 0, None))
            attributes[inner[0].value.decode()] = (value.number, value.value)
    return Seen(
        one.get(1, 0), one.get(2, b"").decode(), one.get(3, 0), numbers(found, 4), numbers(found, 5),
        one.get(6, 0), one.get(7, 0), attributes,
    )  # fmt: skip


def nodes_in(path: Path) -> list[Seen]:
    return [seen(found) for found in list(messages(path))[1:]]


# Runs to write.


def execution_of(graph: Graph) -> Execution:
    """A run of one rank around a random graph: one event a node."""
    size = len(graph)
    names = ("task", "ncclDevKernel_AllReduce")
    lanes = tuple(Lane(0, bool(i % 2), "0", str(i)) for i in range(len(graph.first) - 1))
    times = simulate(graph)
    start, end = np.rint(times.start).astype(np.int64), np.rint(times.end).astype(np.int64)
    is_comm = graph.kind == Kind.COMM
    rows = np.arange(size, dtype=np.int32)
    trace = Trace(
        names=names,
        lanes=lanes,
        messages=(Message("all_reduce", "float", 8, 8, "0", 1, (0,)),),
        headers=(Header(0, "x"),),
        category=np.array([CATEGORY[Kind(k)] for k in graph.kind], np.uint8),
        name=is_comm.astype(np.int32),
        lane=graph.lane,
        start=start,
        duration=end - start,
        correlation=np.full(size, -1, np.int64),
        message=np.where(is_comm, 0, -1).astype(np.int32),
        syncs=Syncs.empty(),
    )
    nothing = np.full(size, -1, np.int32)
    nodes = Nodes(trace, graph.first, rows, start, end, np.zeros(size, bool), rows, rows, nothing)
    return Execution(trace, nodes, graph, 0, [], ())


def job(folder: Path, ranks: int = 2, steps: int = 1) -> Path:
    """A data-parallel job, the second rank of which is slower."""
    folder.mkdir()
    for rank in range(ranks):
        events = training_run(steps=steps, rank=rank, slow=20.0 * rank)
        write_trace(folder / f"rank{rank}.json", events, header(rank=rank, world_size=ranks))
    return folder


def pipeline(folder: Path, microbatches: int = 3) -> Path:
    """Two stages; in between, one kernel carries a send and a receive at once."""
    folder.mkdir()
    for rank in range(2):
        events = [note("ProfilerStep#1", 0, 400 * microbatches)]
        for i in range(microbatches):
            time, number, other = 400 * i, 10 * (i + 1), 1 - rank
            events += [op("aten::mm", time, 40), *launch("gemm", time + 10, number, takes=50 + 30 * rank)]
            for name, peer in (("send", {"Dst Rank": other}), ("recv", {"Src Rank": other})):
                told = collective(name, elements=1000 * (i + 1)) | peer
                events.append(op("record_param_comms", time + 50 + 10 * (name == "recv"), 5, args=told))
            events += launch("ncclDevKernel_SendRecv", time + 70, number + 1, takes=200 - 30 * rank, stream=20)
        write_trace(folder / f"rank{rank}.json", events, header(rank=rank, world_size=2))
    return folder


def executed(path: Path, match: str = "") -> Execution:
    found = read_job(path, match)
    return found if isinstance(found, Execution) else build(found)


EDGES = ("source", "target", "rule", "lag", "frozen", "from_start")


def edges_of(graph: Graph) -> list[tuple[Any, ...]]:
    return sorted(zip(*(getattr(graph.edges, column).tolist() for column in EDGES), strict=True))


def assert_same_run(a: Execution, b: Execution) -> None:
    """Structure, times and events are equal."""
    for column in ("first", "duration", "gap", "frozen", "kind"):
        np.testing.assert_array_equal(getattr(a.graph, column), getattr(b.graph, column), column)
    assert edges_of(a.graph) == edges_of(b.graph)
    for column in ("row", "start", "end", "is_return", "first_node", "last_node", "parent"):
        np.testing.assert_array_equal(getattr(a.nodes, column), getattr(b.nodes, column), column)
    for column in ("category", "lane", "start", "duration", "correlation"):
        np.testing.assert_array_equal(getattr(a.trace, column), getattr(b.trace, column), column)
    assert [a.trace.names[n] for n in a.trace.name] == [b.trace.names[n] for n in b.trace.name]
    assert [a.trace.collective_of(r) for r in np.flatnonzero(a.trace.message >= 0)] == [
        b.trace.collective_of(r) for r in np.flatnonzero(b.trace.message >= 0)
    ]
    assert [a.trace.lanes[i] for i in a.trace.lane] == [b.trace.lanes[i] for i in b.trace.lane]
    assert a.origin == b.origin
    assert [(m.collective, m.ranks, m.rows.tolist(), m.message, m.complete) for m in a.rendezvous] == [
        (m.collective, m.ranks, m.rows.tolist(), m.message, m.complete) for m in b.rendezvous
    ]


def assert_runs(files: list[list[Seen]]) -> None:
    """A plain feeder comes to the end: ids are unique, nothing dangles, and no rank waits for ever."""
    done: list[set[int]] = [set() for _ in files]
    arrived: dict[Any, set[tuple[int, int]]] = defaultdict(set)
    keys = [rendezvous_keys(nodes) for nodes in files]
    parties = Counter(key for found in keys for key in found.values())
    for nodes in files:
        ids = [node.id for node in nodes]
        assert len(set(ids)) == len(ids)
        assert {dep for node in nodes for dep in (*node.data_deps, *node.ctrl_deps)} <= set(ids)
    progress = True
    while progress:
        progress = False
        for rank, nodes in enumerate(files):
            for node in nodes:
                if node.id in done[rank] or not done[rank].issuperset(node.data_deps):
                    continue
                key = keys[rank].get(node.id)
                arrived[key].add((rank, node.id))
                if key is None or len(arrived[key]) == parties[key]:
                    done[rank].add(node.id)
                    progress = True
    assert [len(d) for d in done] == [len(nodes) for nodes in files]


def rendezvous_keys(nodes: list[Seen]) -> dict[int, Any]:
    """What the communication of a rank is matched by: order in the process group; source, destination and tag."""
    count: Counter[bytes] = Counter()
    found: dict[int, Any] = {}
    for node in sorted(nodes, key=lambda n: n.id):
        if node.type == NodeType.COMM_COLL:
            group = node.attributes["pg_name"][1]
            count[group] += 1
            found[node.id] = ("collective", group, count[group])
        elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            found[node.id] = tuple(node.attributes[name] for name in ("comm_src", "comm_dst", "comm_tag"))
    return found


def assert_ranks_agree(files: list[list[Seen]]) -> None:
    """Every collective is of one kind and size on all its ranks, in one order; every send has its receive."""
    orders: dict[bytes, list[list[Any]]] = defaultdict(list)
    sends, receives = Counter[Any](), Counter[Any]()
    for rank, nodes in enumerate(files):
        mine: dict[bytes, list[Any]] = defaultdict(list)
        for node in sorted(nodes, key=lambda n: n.id):
            told = node.attributes
            if node.type == NodeType.COMM_COLL:
                mine[told["pg_name"][1]].append((told["comm_type"], told["comm_size"]))
            elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                side = sends if node.type == NodeType.COMM_SEND else receives
                side[tuple(told[n] for n in ("comm_src", "comm_dst", "comm_tag", "comm_size"))] += 1
                here = "comm_src" if node.type == NodeType.COMM_SEND else "comm_dst"
                assert told[here][1] == rank
        for group, order in mine.items():
            orders[group].append(order)
    assert sends == receives
    assert all(count == 1 for count in sends.values())
    for found in orders.values():
        assert all(order == found[0] for order in found)


# Laws.


@settings(deadline=None, max_examples=60)
@given(graph=graphs())
def test_a_graph_comes_back_from_chakra_as_it_was(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> None:
    if len(graph) == 0:
        return
    before = execution_of(graph)
    written = write_chakra(tmp_path_factory.mktemp("et") / "x.et", before)
    after = executed(written.files[0])
    assert_same_run(before, after)
    np.testing.assert_array_equal(simulate(before.graph).end, simulate(after.graph).end)


@settings(deadline=None, max_examples=40)
@given(graph=graphs())
def test_an_export_of_any_graph_can_be_run_by_a_feeder(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> None:
    if len(graph) == 0:
        return
    written = write_chakra(tmp_path_factory.mktemp("et") / "x.et", execution_of(graph))
    assert_runs([nodes_in(written.files[0])])


@settings(deadline=None, max_examples=40)
@given(graph=graphs(lags=False), factor=st.sampled_from([0.3, 1.7]))
def test_times_that_are_no_whole_nanoseconds_survive(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph, factor: float
) -> None:
    if len(graph) == 0:
        return
    before = execution_of(graph)
    before = replace(before, graph=scaled(graph, factor))
    written = write_chakra(tmp_path_factory.mktemp("et") / "x.et", before)
    np.testing.assert_array_equal(executed(written.files[0]).graph.duration, before.graph.duration)


@settings(deadline=None, max_examples=60)
@given(cut=st.floats(0, 1), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=4))
def test_a_damaged_export_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, cut: float, flips: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("et")
    data = bytearray(exported(tmp_path_factory))
    for place, change in flips:
        data[place % len(data)] ^= change
    (folder / "x.0.et").write_bytes(data[: int(cut * len(data))] if not flips else data)
    said = ""
    try:
        replay(read_job(folder / "x.0.et")).as_dict()
    except LumosError as error:
        said = str(error)
    assert "\n" not in said


_EXPORTED: list[bytes] = []


def exported(factory: pytest.TempPathFactory) -> bytes:
    """A small export, made once."""
    if not _EXPORTED:
        folder = factory.mktemp("job")
        path = write_trace(folder / "rank0.json", training_run(steps=1, layers=1), header(rank=0))
        written = write_chakra(folder / "x.et", executed(path))
        _EXPORTED.append(written.files[0].read_bytes())
    return _EXPORTED[0]


# What stands in a file.


def test_an_independent_reader_sees_the_documented_fields(tmp_path: Path) -> None:
    run = executed(job(tmp_path / "job"))
    written = write_chakra(tmp_path / "x.et", run, metadata=True)
    head, *rest = list(messages(written.files[0]))
    assert head[0] == Field(1, 2, b"0.0.4")
    nodes = [seen(found) for found in rest]
    assert nodes[0].type == NodeType.METADATA
    assert nodes[0].name == "## process_group:init ##"
    assert {n.type for n in nodes[1:]} == {NodeType.COMP, NodeType.COMM_COLL}
    for node in nodes:
        assert node.attributes["is_cpu_op"][0] == BOOL
    reduces = [n for n in nodes if n.type == NodeType.COMM_COLL]
    assert [n.attributes["comm_size"] for n in reduces] == [(INT64, 2 * 4096 * i) for i in (1, 2, 3, 4)]
    assert {n.attributes["comm_type"] for n in reduces} == {(INT64, 0)}
    assert {n.attributes["pg_name"] for n in reduces} == {(STRING, b"1")}
    assert not any(n.attributes["is_cpu_op"][1] for n in reduces)


def test_process_groups_are_described_as_the_feeder_parses_them(tmp_path: Path) -> None:
    written = write_chakra(tmp_path / "x.et", executed(job(tmp_path / "job")), metadata=True)
    metadata = list(messages(written.files[1]))[1]
    inputs = {f.number: f.value for f in fields(next(f.value for f in metadata if f.number == 8))}
    (group,) = json.loads(inputs[1].decode()[2:-2])  # without [' and ']
    assert (group["pg_name"], group["ranks"], group["group_size"]) == ("1", [0, 1], 2)


def test_groups_smaller_than_the_world_have_their_ranks_and_a_number_of_their_own(tmp_path: Path) -> None:
    for rank in range(4):
        pair = "[0, 1]" if rank < 2 else "[2, 3]"
        name = "abc" if rank < 2 else "def"
        told = collective("allreduce", ranks=pair) | {"Process Group Name": name}
        events = [op("record_param_comms", 0, 5, args=told), *launch("ncclDevKernel_AllReduce", 10, 1)]
        events[-1]["args"] |= told
        (tmp_path / "job").mkdir(exist_ok=True)
        write_trace(tmp_path / "job" / f"rank{rank}.json", events, header(rank=rank, world_size=4))
    written = write_chakra(tmp_path / "x.et", executed(tmp_path / "job"))
    names = [
        [n.attributes["pg_name"][1] for n in nodes_in(file) if n.type == NodeType.COMM_COLL] for file in written.files
    ]
    assert names == [[b"1"], [b"1"], [b"2"], [b"2"]]


def test_a_kernel_that_sends_and_receives_is_a_node_for_each_message_sends_first(tmp_path: Path) -> None:
    run = executed(pipeline(tmp_path / "job"))
    written = write_chakra(tmp_path / "x.et", run)
    files = [nodes_in(file) for file in written.files]
    assert written.messages == 12
    assert_ranks_agree(files)
    assert_runs(files)
    kinds = [n.type for n in files[0] if n.type != NodeType.COMP]
    assert kinds == [NodeType.COMM_SEND, NodeType.COMM_RECV] * 3
    sends = [n.attributes for n in files[0] if n.type == NodeType.COMM_SEND]
    assert [told[name] for told in sends for name in ("comm_src", "comm_dst", "comm_tag")] == [
        (INT32, value) for tag in (1, 2, 3) for value in (0, 1, tag)
    ]
    sizes = [told["comm_size"][1] for told in sends]
    assert sizes == [2000, 4000, 6000]
    assert_same_run(run, executed(tmp_path, match="x.*.et"))


def test_communication_whose_other_side_was_not_recorded_is_plain_work(tmp_path: Path) -> None:
    """A simulator would wait for it for ever."""
    folder = job(tmp_path / "job")
    told = collective("allgather")
    events = [*training_run(steps=1), *launch("ncclDevKernel_AllGather", 2000, 77, stream=20)]
    events[-1]["args"] |= told
    write_trace(folder / "rank0.json", events, header(rank=0, world_size=2))
    written = write_chakra(tmp_path / "x.et", executed(folder))
    assert written.warnings == [
        "1 communication kernels are written as plain work: the other ranks did not record their part"
    ]
    assert_ranks_agree([nodes_in(file) for file in written.files])


def test_a_trace_of_one_rank_keeps_its_collectives(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0.json", training_run(steps=1), header(rank=0, world_size=2))
    assert write_chakra(tmp_path / "x.et", executed(path)).collectives == 4


def test_short_kernels_are_not_lost_to_microseconds(tmp_path: Path) -> None:
    """A thousand kernels of 0.4 µs are 400 µs in the file, and 0.4 µs each for Lumos."""
    events = [kernel("tiny", 10 * i, 0.4) for i in range(1000)]
    run = executed(write_trace(tmp_path / "rank0.json", events, header(rank=0)))
    written = write_chakra(tmp_path / "x.et", run)
    assert sum(node.duration for node in nodes_in(written.files[0])) == 400
    assert set(executed(written.files[0]).graph.duration) == {400.0}


def test_what_somebody_changed_in_a_file_counts(tmp_path: Path) -> None:
    """The nodes are the truth: a duration that was edited is taken over the nanoseconds beside it."""
    written = write_chakra(tmp_path / "x.et", executed(job(tmp_path / "job")))
    parsed = read_chakra_file(written.files[0])
    slow = next(n for n in parsed.nodes if n.type == NodeType.COMP and n.values["is_cpu_op"] is False and n.duration_us)
    edited = [n._replace(duration_us=9000) if n is slow else n for n in parsed.nodes]
    graph = read_chakra([replace(parsed, nodes=edited)]).graph
    assert 9_000_000 in graph.duration
    untied = [n._replace(data_deps=()) for n in parsed.nodes]
    assert len(read_chakra([replace(parsed, nodes=untied)]).graph.edges) < len(read_chakra([parsed]).graph.edges)


# Files of others.


def write_foreign(path: Path, *nodes: dict[str, Any], head: bool = True) -> Path:
    """A `.et` as other tools write it: keys of a node, and attributes under the name of their kind."""
    kinds = schema()
    with path.open("wb") as file:
        for message in [kinds.metadata(version="0.0.4"), *(foreign_node(n) for n in nodes)][0 if head else 1 :]:
            data = message.SerializeToString()
            assert len(data) < 1 << 14
            file.write(bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7]))
            file.write(data)
    return path


def foreign_node(values: dict[str, Any]) -> Any:
    plain = {k: v for k, v in values.items() if k not in ("cpu", "attributes")}
    node = schema().node(**({"name": f"node {plain['id']}", "type": NodeType.COMP} | plain))
    add_value(node.attr, "is_cpu_op", "bool_val", values.get("cpu", False))
    for name, (kind, value) in values.get("attributes", {}).items():
        add_value(node.attr, name, kind, value)
    return node


def reduce_node(number: int, micros: int, **more: Any) -> dict[str, Any]:
    told = {"comm_type": ("int64_val", 0), "comm_size": ("int64_val", 64), "pg_name": ("string_val", "0")}
    return {"id": number, "type": NodeType.COMM_COLL, "duration_micros": micros, "attributes": told} | more


def test_a_foreign_graph_runs_by_its_dependencies(tmp_path: Path) -> None:
    """CPU 10, then two kernels of 20 and 30 one after the other as there is one GPU, then CPU 5."""
    path = write_foreign(
        tmp_path / "x.0.et",
        {"id": 1, "duration_micros": 10, "cpu": True},
        {"id": 2, "duration_micros": 20, "data_deps": [1]},
        {"id": 3, "duration_micros": 30, "data_deps": [1]},
        {"id": 4, "duration_micros": 5, "data_deps": [3], "cpu": True},
    )
    run = replay(read_job(path))
    assert run.times.span == 65_000
    assert run.simulated_steps.mean == pytest.approx(0.065)
    assert predict(run, [Scale("compute", 0.5)]).run.times.span <= 40_000


def test_a_collective_of_foreign_files_waits_for_all_ranks(tmp_path: Path) -> None:
    for rank, before in ((0, 10), (1, 40)):
        first = {"id": 1, "duration_micros": before}
        write_foreign(tmp_path / f"x.{rank}.et", first, reduce_node(2, 100, data_deps=[1]))
    run = replay(read_job(tmp_path))
    assert run.times.span == 140_000
    (found,) = run.execution.rendezvous
    assert (found.collective, found.ranks) == ("all_reduce", (0, 1))
    assert run.collectives[0].bytes == 64


def test_a_receive_of_foreign_files_waits_for_its_send(tmp_path: Path) -> None:
    def told(tag: int) -> dict[str, Any]:
        peers = {"comm_src": 0, "comm_dst": 1, "comm_tag": tag}
        return {name: ("int32_val", value) for name, value in peers.items()}

    send = {"id": 2, "type": NodeType.COMM_SEND, "duration_micros": 50, "data_deps": [1], "attributes": told(7)}
    write_foreign(tmp_path / "x.0.et", {"id": 1, "duration_micros": 30}, send)
    receive = {"id": 1, "type": NodeType.COMM_RECV, "duration_micros": 50, "attributes": told(7)}
    write_foreign(tmp_path / "x.1.et", receive, {"id": 2, "duration_micros": 5, "data_deps": [1]})
    assert replay(read_job(tmp_path)).times.span == 85_000


BAD_GRAPHS = {
    "a circle": (
        [{"id": 1, "duration_micros": 1, "data_deps": [2]}, {"id": 2, "duration_micros": 1, "data_deps": [1]}],
        "form a cycle",
    ),
    "a missing node": ([{"id": 1, "duration_micros": 1, "data_deps": [9]}], "waits for node 9, which is not there"),
    "two of one id": ([{"id": 1, "duration_micros": 1}, {"id": 1}], "two nodes have the id 1"),
    "no durations": ([{"id": 1}, {"id": 2, "data_deps": [1]}], "none of its nodes has a duration"),
    "no nodes": ([], "no nodes in it"),
}


@pytest.mark.parametrize("what", BAD_GRAPHS)
def test_a_graph_that_cannot_run_is_refused_with_the_reason(tmp_path: Path, what: str) -> None:
    nodes, words = BAD_GRAPHS[what]
    with pytest.raises(InputError, match=words):
        read_job(write_foreign(tmp_path / "x.0.et", *nodes))


def test_ranks_whose_collectives_cannot_meet_are_refused(tmp_path: Path) -> None:
    """Each rank reduces in two groups, in opposite orders."""
    other = {"pg_name": ("string_val", "1")}
    for rank in range(2):
        groups = [{}, other] if rank == 0 else [other, {}]
        nodes = [
            reduce_node(i + 1, 10, data_deps=[i] if i else [], attributes=reduce_node(0, 0)["attributes"] | group)
            for i, group in enumerate(groups)
        ]
        write_foreign(tmp_path / f"x.{rank}.et", *nodes)
    with pytest.raises(InputError, match="the other ranks never come to it"):
        read_job(tmp_path)


HOSTILE = {
    "empty": b"",
    "a length that never ends": b"\xff" * 64,
    "a length of 4 GB": b"\xff\xff\xff\xff\x0f\x0a\x00",
    "a length beyond 32 bits": b"\xff\xff\xff\xff\x7f\x0a\x00",
    "cut in a message": b"\x10\x0a\x02ab",
    "text": b"this is no trace at all, whatever its name says",
    "no protobuf": b"\x04\x0f\xff\xff\xff",
    "text that is no UTF-8": b"\x04\x0a\x02\xff\xfe",
    "a deep message": b"\x00" + b"\x7f" + b"\x53" * 127,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.0.et"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(InputError) as caught:
        read_job(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_larger_than_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_foreign(tmp_path / "x.0.et", {"id": 1, "duration_micros": 1})
    monkeypatch.setattr(formats, "available_bytes", lambda: 100)
    with pytest.raises(InputError, match="GiB would be needed"):
        read_job(path)


def test_tables_that_do_not_fit_their_nodes_are_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0.json", training_run(steps=1, layers=1), header(rank=0))
    parsed = read_chakra_file(write_chakra(tmp_path / "x.et", executed(path)).files[0])
    wrong: dict[str, Any] = {
        "event.name": [10**6], "event.parent": [], "event.first_node": [1 << 40], "lanes": ["[]"], "header": "{",
        "rendezvous": ["[0,\"x\",[99999],[0],true,null]"], "origin_ns": 1 << 62, "version": 99, "node.lane": [99],
        "node.id": [1], "node.count": [0], "edge.rule": [77], "edge.lag": [1.0], "sync.stream": [1] * 99,
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(InputError, match="do not fit its nodes"):
            read_chakra([replace(parsed, head=parsed.head | {f"lumos.{name}": value})])
    with pytest.raises(InputError, match="do not fit"):
        read_chakra([replace(parsed, head={k: v for k, v in parsed.head.items() if k != "lumos.names"})])


# Which file is what.


def test_files_are_told_apart_by_content_not_by_name(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.et", training_run(steps=1), header(rank=0))
    graph = write_foreign(tmp_path / "b.json", {"id": 1, "duration_micros": 3})
    archive = tmp_path / "c.json"
    archive.write_bytes(bytes(257) + b"ustar" + bytes(250))
    found = [form_of(path, head_of(path)) for path in (trace, graph, archive)]
    assert found == [Form.KINETO, Form.CHAKRA, Form.ARCHIVE]
    assert len(read_job(trace).ranks) == 1  # type: ignore[union-attr]
    assert replay(read_job(graph)).times.span == 3_000


@pytest.mark.parametrize("text", [b"A\nB\n", b"x,y\n1,2\n", b"\x02\x12\x7f", b"\xef\xbb\xbf{\n}", b"\x00", b"\x05"])
def test_text_and_scraps_are_not_taken_for_a_graph(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    assert form_of(path, head_of(path)) == Form.OTHER


def test_a_packed_graph_is_to_be_unpacked_first(tmp_path: Path) -> None:
    path = write_foreign(tmp_path / "x.0.et", {"id": 1, "duration_micros": 3})
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match="a Chakra execution trace, but packed; unpack it first"):
        read_job(path)


def test_a_folder_of_two_kinds_is_refused(tmp_path: Path) -> None:
    folder = job(tmp_path / "job")
    write_foreign(folder / "rank2.et", {"id": 1, "duration_micros": 3})
    with pytest.raises(InputError, match=r"is a Kineto trace and .* is a Chakra execution trace; choose"):
        read_job(folder, match="rank*")


# Kineto there and back.


def test_a_run_comes_back_from_kineto_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for rank in range(2):
        base = {"baseTimeNanoseconds": 1_790_857_026_000_000_123}
        events = [e | {"ts": e["ts"] + 0.001} for e in training_run(steps=2, rank=rank) if "ts" in e]
        write_trace(folder / f"rank{rank}.json", events, header(rank=rank, world_size=2) | base)
    before = executed(folder)
    (tmp_path / "again").mkdir()
    for rank in range(2):
        write_kineto(tmp_path / "again" / f"rank{rank}.trace.json.gz", before.trace, rank)
    assert_same_run(before, executed(tmp_path / "again"))


def test_chakra_keeps_what_the_rules_need_to_find_the_graph_again(tmp_path: Path) -> None:
    """Kineto, Chakra, Kineto: the rules find the same graph in what comes out."""
    before = executed(job(tmp_path / "job", steps=2))
    write_chakra(tmp_path / "x.et", before)
    between = executed(tmp_path, match="*.et")
    (tmp_path / "again").mkdir()
    for rank in range(2):
        write_kineto(tmp_path / "again" / f"rank{rank}.json", between.trace, rank)
    assert_same_run(before, executed(tmp_path / "again"))


# Nsight Systems.


def test_an_export_of_nsight_is_a_trace(tmp_path: Path) -> None:
    trace = read_nsys(write_nsys(tmp_path / "x.sqlite"))
    assert Counter(Category(c).name for c in trace.category) == {"KERNEL": 1, "CALL": 1, "NOTE": 1}
    run = replay(read_job(tmp_path / "x.sqlite"))
    assert run.marks.names == ("ProfilerStep#3",)
    assert run.recorded_steps.mean == pytest.approx(0.0085)
    assert [lane.text for lane in trace.lanes] == ["stream 7", "thread 9"]
    assert {"LAUNCH"} == {e.name for e in map(type_of_rule, run.execution.graph.edges.rule)}


def type_of_rule(number: int) -> Any:
    from lumos.graph.graph import Rule

    return Rule(number)


def test_every_process_of_an_export_is_a_rank(tmp_path: Path) -> None:
    trace = read_job(write_nsys(tmp_path / "x.sqlite", processes=3))
    assert isinstance(trace, Trace)
    assert trace.ranks == [0, 1, 2]
    assert replay(trace).as_dict()["ranks"] == 3


def test_tables_that_are_not_there_are_done_without(tmp_path: Path) -> None:
    trace = read_nsys(write_nsys(tmp_path / "x.sqlite", without="NVTX_EVENTS"))
    assert len(trace) == 2


@pytest.mark.parametrize(
    ("without", "words"),
    [("StringIds", "not an export of Nsight"), ("CUPTI_ACTIVITY_KIND_KERNEL", "no kernel or copy in it")],
)
def test_an_export_that_lacks_what_is_needed_is_refused(tmp_path: Path, without: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_job(write_nsys(tmp_path / "x.sqlite", without=without))


def test_odd_values_in_an_export_are_left_out(tmp_path: Path) -> None:
    odd = [
        ("x", None, 0, 7, 1, 100 << 24, 1, 1),
        (5, 1, 0, 7, 1, 100 << 24, 1, 1),
        (b"\xff", 2**62, 0, 7, 1, None, 9, 9),
    ]
    trace = read_nsys(write_nsys(tmp_path / "x.sqlite", CUPTI_ACTIVITY_KIND_KERNEL=odd))
    assert int(trace.on_gpu.sum()) == 1


@pytest.mark.parametrize("size", [16, 100, 3000])
def test_a_damaged_export_is_refused(tmp_path: Path, size: int) -> None:
    path = write_nsys(tmp_path / "x.sqlite")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"x\.sqlite: (not a readable SQLite file|an SQLite file)"):
        read_job(path)


def test_a_table_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "x.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_master SET name = CAST(x'ff' AS TEXT) WHERE name = 'NVTX_EVENTS'")
    with pytest.raises(InputError, match="not a readable SQLite file"):
        read_job(path)


def test_a_view_in_an_export_is_not_run(tmp_path: Path) -> None:
    """A view would be a program: this one never ends."""
    path = write_nsys(tmp_path / "x.sqlite", without="CUPTI_ACTIVITY_KIND_KERNEL")
    with sqlite3.connect(path) as database:
        endless = "WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start FROM n"
        database.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
    with pytest.raises(InputError, match="no kernel or copy"):
        read_job(path)


# Execution traces.


def two_streams(path: Path) -> Path:
    events = [op("a", 0, 30), *launch("one", 5, 1), op("b", 40, 30), *launch("two", 45, 2, stream=9), op("c", 80, 5)]
    return write_trace(path, events, header(rank=0))


def test_an_execution_trace_is_linked_by_the_order_of_its_operators(tmp_path: Path) -> None:
    trace = read_job(two_streams(tmp_path / "rank0.json"))
    assert isinstance(trace, Trace)
    links = link(trace, {0: read_execution_trace(write_et(tmp_path / "et.json.gz", ["a", "b", "c"]))})
    assert {trace.names[trace.name[row]]: o.name for row, o in links.by_row.items()} == {"a": "a", "b": "b", "c": "c"}
    assert next(iter(links.by_row.values())).bytes == 100 * 4 + 50 * 2
    (edge,) = links.data_edges(build(trace).nodes)
    nodes = build(trace).nodes
    assert [trace.names[trace.name[nodes.row[node]]] for node in edge] == ["one", "two"]


def test_linked_operators_give_their_tensors_to_the_kernels_they_launch(tmp_path: Path) -> None:
    trace = read_job(two_streams(tmp_path / "rank0.json"))
    assert isinstance(trace, Trace)
    links = link(trace, {0: read_execution_trace(write_et(tmp_path / "et.json.gz", ["a", "b", "c"]))})
    run = build(trace)
    nodes = nodes_in(write_chakra(tmp_path / "x.et", run, links).files[0])
    by_name = {node.name: node for node in nodes}
    assert by_name["one"].attributes["tensor_size"] == (UINT64, 500)
    assert by_name["one"].id in by_name["two"].data_deps
    after = executed(tmp_path / "x.0.et")
    np.testing.assert_array_equal(simulate(run.graph).end, simulate(after.graph).end)


def test_an_execution_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    trace = read_job(two_streams(tmp_path / "rank0.json"))
    assert isinstance(trace, Trace)
    with pytest.raises(InputError, match="0 are there in the same order"):
        link(trace, {0: read_execution_trace(write_et(tmp_path / "et.json.gz", ["c", "b", "a"]))})


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b'{"nodes": 3}', b'{"nodes": [{"name": "## process_group:init ##"}]}']
)
def test_what_is_no_execution_trace_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "et.json").write_bytes(text)
    with pytest.raises(InputError):
        read_execution_trace(tmp_path / "et.json")


def test_a_tensor_that_no_memory_holds_is_left_out_of_an_execution_trace(tmp_path: Path) -> None:
    sound = read_execution_trace(write_et(tmp_path / "et.json", ["a"])).threads[1][0]
    nodes = et_nodes(["a"])
    nodes["nodes"][0]["inputs"]["values"][0][3] = 1 << 62
    (tmp_path / "et.json").write_text(json.dumps(nodes))
    assert 0 < read_execution_trace(tmp_path / "et.json").threads[1][0].bytes < sound.bytes


def test_a_deeply_nested_execution_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "et.json").write_bytes(b'{"nodes": [{"inputs": ' + b"[" * 100_000)
    with pytest.raises(InputError, match="not a PyTorch execution trace"):
        read_execution_trace(tmp_path / "et.json")


# The command.


def test_convert_says_what_it_wrote(tmp_path: Path) -> None:
    folder = job(tmp_path / "job")
    done = CliRunner().invoke(app, ["convert", str(folder), "-o", str(tmp_path / "x.et"), "--json"])
    answer = json.loads(done.stdout)
    assert answer["files"] == [str(tmp_path / f"x.{rank}.et") for rank in range(2)]
    assert (answer["ranks"], answer["collectives"], answer["groups"], answer["warnings"]) == (2, 8, 1, [])


def test_convert_writes_a_trace_for_every_rank_or_one_view_of_all(tmp_path: Path) -> None:
    folder = job(tmp_path / "job")
    runner = CliRunner()
    assert runner.invoke(app, ["convert", str(folder), "-o", str(tmp_path / "r{rank}.trace.json")]).exit_code == 0
    assert {p.name for p in tmp_path.glob("*.json")} == {"r0.trace.json", "r1.trace.json"}
    assert runner.invoke(app, ["convert", str(folder), "-o", str(tmp_path / "all.trace.json")]).exit_code == 0
    view = json.loads((tmp_path / "all.trace.json").read_text())
    assert {e["pid"] for e in view["traceEvents"]} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "x.html"], "the extension must name the format"),
        (["-o", "missing/x.et"], "does not exist; create it first"),
        (["-o", "x.et", "--et", "nothing"], "--et nothing: no such file or folder"),
        (["-o", "x.et", "--et", "."], "no PyTorch execution trace"),
    ],
)
def test_mistakes_of_convert_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    job(tmp_path / "job")
    done = CliRunner().invoke(app, ["convert", "job", *arguments])
    assert isinstance(done.exception, LumosError)
    assert words in str(done.exception)
    assert not list(tmp_path.glob("x*"))


def test_a_step_of_a_chakra_graph_cannot_be_cut_out(tmp_path: Path) -> None:
    path = write_foreign(tmp_path / "x.0.et", {"id": 1, "duration_micros": 3})
    done = CliRunner().invoke(app, ["replay", str(path), "--step", "2"])
    assert "a Chakra graph is replayed whole" in str(done.exception)


# Real files.


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2_mb4", "fsdp2_l8"])
def test_real_jobs_come_back_from_chakra(shared_data: Path, tmp_path: Path, name: str) -> None:
    run = replay(read_job(shared_data / "h200/multirank" / name))
    written = write_chakra(tmp_path / "x.et", run.execution)
    parsed = [read_chakra_file(file) for file in written.files]
    files = [[as_seen(node) for node in file.nodes] for file in parsed]
    assert_ranks_agree(files)
    for nodes in files:
        assert {dep for node in nodes for dep in (*node.data_deps, *node.ctrl_deps)} <= {node.id for node in nodes}
        TopologicalSorter({node.id: node.data_deps for node in nodes}).prepare()  # an error where there is a circle
        assert all(set(node.ctrl_deps) <= set(node.data_deps) for node in nodes)
    again = replay(read_chakra(parsed))
    assert again.simulated_steps.mean == pytest.approx(run.simulated_steps.mean, rel=0.005)
    assert again.as_dict() == run.as_dict()
    faster = [Scale("compute", 0.5)]
    assert predict(again, faster).step_ms == predict(run, faster).step_ms
    sent = sum(node.type in (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV) for n in files for node in n)
    assert sent == sum(len(found.rows) for found in run.execution.rendezvous)


def as_seen(node: file_format.Node) -> Seen:
    """The same of a node that our own reader read, which is faster."""
    plain = {name: (0, value) for name, value in node.values.items()}
    return Seen(
        node.id,
        node.name,
        node.type,
        list(node.ctrl_deps),
        list(node.data_deps),
        node.start_us,
        node.duration_us,
        plain,
    )


@pytest.mark.data
def test_the_real_chakra_file_is_read_as_it_stands(shared_data: Path) -> None:
    path = shared_data / "public/chakra/chakra.0.et"
    nodes = nodes_in(path)
    run = replay(read_job(path))
    assert len(run.execution.trace) == len(nodes) == 3664
    assert int(run.execution.trace.is_communication.sum()) == 7
    assert run.execution.graph.duration.sum() == 1000 * sum(node.duration for node in nodes)
    assert run.times.span <= run.execution.graph.duration.sum()
    assert run.error_pct == 0


@pytest.mark.data
def test_the_real_export_of_nsight_replays(shared_data: Path) -> None:
    run = replay(read_job(shared_data / "public/nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite"))
    trace = run.execution.trace
    assert Counter(Category(c).name for c in trace.category)["KERNEL"] == 5
    assert Counter(Category(c).name for c in trace.category)["COPY"] == 15
    assert trace.headers[0].gpu == "NVIDIA A100-SXM4-40GB"
    assert abs(run.error_pct) < 0.5
    assert (run.execution.nodes.trace.launch_row[trace.on_gpu] >= 0).all()


@pytest.mark.data
@pytest.mark.parametrize("name", ["h200/multirank/pp2_mb4/rank1", "h200/multirank/fsdp2_l8/rank0"])
def test_real_execution_traces_are_linked_completely(shared_data: Path, name: str) -> None:
    trace = read_job(shared_data / f"{name}.with_et.pt.trace.json.gz")
    assert isinstance(trace, Trace)
    found = read_execution_trace(shared_data / f"{name}.et.json.gz")
    links = link(trace, {trace.ranks[0]: found})
    assert len(links.by_row) == found.count
    told = {trace.message[row]: o.message for row, o in links.by_row.items() if o.message is not None}
    for message, linked in told.items():
        recorded = trace.messages[message]
        assert (recorded.collective, recorded.in_elements, recorded.ranks) == (
            linked.collective, linked.in_elements, linked.ranks,
        )  # fmt: skip


@pytest.mark.data
def test_an_execution_trace_adds_the_sizes_of_collectives(shared_data: Path) -> None:
    folder = shared_data / "public/megatron_tp8_a100"
    trace = read_job(folder / "kineto", match="rank[01].json.gz")
    assert isinstance(trace, Trace)
    ranks = {rank: read_execution_trace(folder / f"et/rank{rank}.et.json.gz") for rank in (0, 1)}
    without = build(trace)
    run = build(link(trace, ranks).enrich(trace))
    assert {m.message for m in without.rendezvous} == {None}
    sizes = Counter(m.message.in_elements for m in run.rendezvous if m.message is not None)
    assert sizes[4 * 2048 * 4096] >= 80  # micro-batch × sequence × hidden


def test_a_timeline_for_perfetto_is_not_taken_for_a_trace(tmp_path: Path) -> None:
    """It shows all ranks in one view and has no launches: replaying it would give another run."""
    path = tmp_path / "view.trace.json.gz"
    write_timeline(path, replay(read_job(Path("src/lumos/data/example"))).clean_run)
    with pytest.raises(InputError, match="a timeline that Lumos wrote for Perfetto"):
        read_job(path)
