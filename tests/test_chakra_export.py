"""Any run as Chakra files that ASTRA-sim runs as they are: traces, descriptions, dry runs and what-ifs."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import astra_rules
from commands import lumos_here
from lumos import predict, read_job, read_setup
from lumos.analysis.replay import replay
from lumos.chakra import file_format, rank_files
from lumos.chakra.astra_estimate import described_workload, of_described
from lumos.chakra.astra_files import Dimension, needs_parting, parted_network
from lumos.chakra.file_format import NodeType, read_chakra_file
from lumos.chakra.rank_files import write_workload
from lumos.chakra.run_writer import write_chakra
from lumos.errors import OptionError
from lumos.graph.graph import simulate
from lumos.graph.rules.build import Execution, build
from lumos.prediction.described_run import DescribedRun
from lumos.program.rank_places import RankPlaces
from lumos.setup.setup_files import read_plain
from support import header, training_run, write_trace

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"
LLAMA = ROOT / "examples/llama3-70b.toml"
SMALL = ("model.preset=llama3-8b", "parallel.vpp=1", "parallel.cp=1", "model.layers=4", "train.global_batch=8")
DESCRIBED = {
    "ddp": ("parallel.tp=1", "parallel.pp=1", "parallel.zero=0", "parallel.sequence_parallel=false", "cluster.gpus=4"),
    "fsdp": ("parallel.tp=1", "parallel.pp=1", "parallel.zero=3", "train.framework=torchtitan", "cluster.gpus=4"),
    "tp and pp": ("parallel.tp=2", "parallel.pp=2", "cluster.gpus=8"),
    "pp before dp": ("parallel.tp=2", "parallel.pp=2", "parallel.order=tp-cp-pp-dp", "cluster.gpus=8"),
    "cp": ("parallel.tp=1", "parallel.pp=1", "parallel.cp=2", "cluster.gpus=4"),
    "interleaved": ("parallel.tp=1", "parallel.pp=2", "parallel.vpp=2", "cluster.gpus=4"),
    "zero bubble": ("parallel.tp=1", "parallel.pp=4", "parallel.schedule=zero-bubble", "cluster.gpus=4"),
    "dualpipe": ("parallel.tp=1", "parallel.pp=4", "parallel.schedule=dualpipe", "train.global_batch=16",
                 "model.layers=8", "cluster.gpus=8"),
    "experts as apart as replicas": ("model.preset=mixtral-8x7b", "parallel.tp=2", "parallel.pp=1", "parallel.ep=8",
                                     "train.global_batch=32", "parallel.zero=1", "cluster.gpus=16"),
    "two messages at once": ("model.preset=mixtral-8x7b", "parallel.tp=1", "parallel.pp=2", "parallel.ep=4",
                             "parallel.schedule=dualpipe", "train.global_batch=32", "model.ffn=4096", "cluster.gpus=8"),
    "experts": ("model.preset=mixtral-8x7b", "parallel.tp=2", "parallel.pp=2", "parallel.ep=4", "cluster.gpus=16"),
}  # fmt: skip


def described(*changes: str) -> DescribedRun:
    plain = read_plain(LLAMA, [*SMALL, *changes])
    run = predict(plain.checked(plain.sections).setup).run
    assert isinstance(run, DescribedRun)
    return run


@cache
def example() -> Execution:
    trace = read_job(EXAMPLE)
    assert not isinstance(trace, Execution)
    return build(trace)


def replayed_step_ms(folder: Path, match: str) -> float:
    """What `lumos replay` answers."""
    found = replay(read_job(folder, match))
    assert found.recorded_steps.mean == found.simulated_steps.mean
    return found.simulated_steps.mean


def replayed_ns(folder: Path, match: str) -> float:
    execution = read_job(folder, match)
    assert isinstance(execution, Execution)
    return simulate(execution.graph).span


# ---------------------------------------------------------------------- the rules themselves
def reduce(number: int, group: str = "1", *after: int, **more: Any) -> dict[str, Any]:
    told = {"comm_type": 0, "comm_size": 4096, "pg_name": group}
    return {"id": number, "type": NodeType.COMM_COLL, "data_deps": after, "told": told | more}


def work(number: int, *after: int, kind: NodeType = NodeType.COMP, **told: Any) -> dict[str, Any]:
    return {"id": number, "type": kind, "data_deps": after, "told": told}


def write_nodes(folder: Path, groups: dict[str, list[int]], *ranks: list[dict[str, Any]]) -> None:
    (folder / "bad.groups.json").write_text(json.dumps(groups))
    for rank, nodes in enumerate(ranks):
        with (folder / f"bad.{rank}.et").open("wb") as file:
            file.write(file_format.delimited(file_format.schema().metadata(version="0.0.4")))
            for node in nodes:
                message = file_format.schema().node(
                    id=node["id"], type=node["type"], data_deps=node["data_deps"], duration_micros=5, name="x"
                )
                for name, value in ({"is_cpu_op": False} | node["told"]).items():
                    kind = {bool: "bool_val", int: "int64_val", str: "string_val"}[type(value)]
                    file_format.add_value(message.attr, name, kind, value)
                file.write(file_format.delimited(message))


BOTH = {"1": [0, 1], "2": [0, 1]}
BAD: dict[str, tuple[dict[str, list[int]], tuple[list[dict[str, Any]], ...]]] = {
    "metadata": (BOTH, ([work(1, kind=NodeType.METADATA)], [work(1)])),
    "of the host": (BOTH, ([work(1, is_cpu_op=True)], [work(1)])),
    "group 0": (BOTH, ([reduce(1, "0")], [reduce(1, "0")])),
    "not in group": ({"1": [1]}, ([reduce(1)], [reduce(1)])),
    "never ends": (BOTH, ([reduce(1, comm_type=2, comm_size=4)], [reduce(1, comm_type=2, comm_size=4)])),
    "messages of more than 2 GiB": (BOTH, ([reduce(1, comm_size=5_637_144_576)], [reduce(1, comm_size=5_637_144_576)])),
    "an unknown kind": (BOTH, ([reduce(1, comm_type=9)], [reduce(1, comm_type=9)])),
    "differs": (BOTH, ([reduce(1)], [reduce(1, comm_size=8192)])),
    "nodes wait for each other": (BOTH, ([work(1, 2), work(2, 1)], [work(1)])),
    "never end; somebody waits": (BOTH, ([reduce(1), reduce(2, "2", 1)], [reduce(1, "2"), reduce(2, "1", 1)])),
    "a send without receive": (
        BOTH, ([work(1, kind=NodeType.COMM_SEND, comm_src=0, comm_dst=1, comm_tag=1, comm_size=8)], [work(1)])
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_the_rules_refuse_what_astra_sim_does_not_run(tmp_path: Path, what: str) -> None:
    groups, ranks = BAD[what]
    write_nodes(tmp_path, groups, *ranks)
    words = None if what in ("metadata", "an unknown kind", "a send without receive") else what
    with pytest.raises(AssertionError, match=words):
        astra_rules.check(tmp_path, "bad")


# ---------------------------------------------------------------------- traces
def test_a_trace_is_written_as_astra_sim_runs_it(tmp_path: Path) -> None:
    write_chakra(tmp_path / "run.et", example())
    astra_rules.check(tmp_path, "run", host=True, seeds=1)


def test_process_groups_are_beside_the_files_and_count_from_1(tmp_path: Path) -> None:
    written = write_chakra(tmp_path / "run.et", example())
    assert written.group_file == tmp_path / "run.groups.json"
    assert json.loads(written.group_file.read_text()) == {"1": [0, 1, 2, 3]}


def test_metadata_is_written_on_request(tmp_path: Path) -> None:
    for asked in (False, True):
        file = write_chakra(tmp_path / "run.et", example(), metadata=asked).files[0]
        assert any(node.type == NodeType.METADATA for node in read_chakra_file(file).nodes) == asked


def test_without_the_host_a_rank_is_work_and_transfers_that_take_as_long(tmp_path: Path) -> None:
    run = example()
    written = write_chakra(tmp_path / "run.et", run, fold_host=True)
    workload = astra_rules.check(tmp_path, "run")
    assert {node.type for _, node in workload.nodes} == {NodeType.COMP, NodeType.COMM_COLL}
    assert written.nodes < 100
    assert replayed_ns(tmp_path, "run.*.et") == pytest.approx(simulate(run.graph).span, rel=2e-3)


def test_longer_transfers_move_what_waits_for_them(tmp_path: Path) -> None:
    """As in the graph itself: the chain keeps what waits for what."""
    run = example()
    slower = run.graph.duration.copy()
    slower[run.nodes.last_node[run.trace.is_communication]] *= 3
    write_chakra(tmp_path / "run.et", run, fold_host=True)
    read = read_job(tmp_path, "run.*.et")
    assert isinstance(read, Execution)
    longer = read.graph.duration.copy()
    longer[read.nodes.last_node[read.trace.is_communication]] *= 3
    assert simulate(read.graph, longer).span == pytest.approx(simulate(run.graph, slower).span, rel=0.02)


def test_ranks_count_from_0_for_simulators(tmp_path: Path) -> None:
    trace = read_job(EXAMPLE, "*[23]*")
    assert not isinstance(trace, Execution)
    written = write_chakra(tmp_path / "run.et", build(trace), fold_host=True)
    assert [file.name for file in written.files] == ["run.0.et", "run.1.et"]
    assert any("the 2 ranks from 2 to 3" in warning for warning in written.warnings)
    assert written.collectives == 0  # ranks 0 and 1 would never come
    astra_rules.check(tmp_path, "run")


@pytest.mark.parametrize("name", ["ddp2_l8", "fsdp2_l8", "dp2_tp2_l8", "pp4_mb8"])
def test_real_jobs_keep_their_length(shared_data: Path, tmp_path: Path, name: str) -> None:
    trace = read_job(shared_data / "h200/multirank" / name, "rank?.pt.trace.json.gz")
    assert not isinstance(trace, Execution)
    run = build(trace)
    write_chakra(tmp_path / "run.et", run, fold_host=True)
    astra_rules.check(tmp_path, "run")
    assert replayed_ns(tmp_path, "run.*.et") == pytest.approx(simulate(run.graph).span, rel=0.01)


def test_one_recorded_rank_stands_for_all(tmp_path: Path) -> None:
    found = lumos_here(
        "convert", EXAMPLE, "--match", "*rank0*", "-o", tmp_path / "run.et", "--for", "astra-sim", "--json"
    )
    answer = json.loads(found.stdout)
    assert answer["ranks"] == 4
    assert "one rank was recorded: all 4 do what rank 0 does, in groups laid out like its own" in answer["warnings"]
    workload = astra_rules.check(tmp_path, "run")
    assert workload.groups == {1: [0, 1, 2, 3]}
    assert sum(node.type == NodeType.COMM_COLL for _, node in workload.nodes) == 32


# ---------------------------------------------------------------------- described runs
@pytest.mark.parametrize("name", DESCRIBED)
def test_a_described_run_replays_to_the_predicted_step(tmp_path: Path, name: str) -> None:
    run = described(*DESCRIBED[name])
    tasks = described_workload(run)
    write_workload(tmp_path / "run.et", tasks)
    workload = astra_rules.check(tmp_path, "run")
    assert len(workload.ranks) == run.step.setup.cluster.gpus
    assert replayed_step_ms(tmp_path, "run.*.et") == pytest.approx(run.us / 1e3, rel=0.002)
    estimate = of_described(run, tasks).estimate
    assert estimate is not None
    assert estimate.own_ms == pytest.approx(run.us / 1e3, rel=0.002), "the feeder runs tasks as a replay of the files"


def test_an_export_with_a_slow_gpu_says_that_all_of_its_ranks_are_written_alike(tmp_path: Path) -> None:
    asked = ("predict", LLAMA, "--set", "cluster.gpus=64", "--set", "train.global_batch=32", "--json",
             "-o", tmp_path / "run.et")  # fmt: skip
    slow, even = (json.loads(lumos_here(*asked, *more).stdout) for more in (["--slow", "rank=5,factor=1.5"], []))
    added = f"{slow['step_ms'] - even['step_ms']:,.2f} ms"
    told = f"--slow: the {added} per step that slow parts add are in the files of all ranks"
    assert [text for text in slow["written"]["warnings"] if text.startswith(told)]
    assert not [text for text in even["written"]["warnings"] if "slow" in text]


def test_no_share_or_difference_of_an_export_is_printed_as_a_zero_that_it_is_not(tmp_path: Path) -> None:
    found = lumos_here("predict", LLAMA, "--set", "cluster.gpus=64", "--set", "parallel.cp=2", "--set",
                       "train.global_batch=64", "-o", tmp_path / "run.et", "--for", "astra-sim")  # fmt: skip
    assert "less than 1 % of the transfers state another size" in found.stdout
    found = lumos_here("convert", EXAMPLE, "-o", tmp_path / "run.et", "--for", "astra-sim")
    assert " ms in ASTRA-sim, +0.0 %" in found.stdout


def test_collectives_have_the_bytes_that_each_rank_puts_in(tmp_path: Path) -> None:
    run = described("parallel.tp=2", "parallel.pp=1", "cluster.gpus=2")
    (tasks,) = described_workload(run).tasks
    sent = [task.transfer for task in tasks if task.transfer is not None]
    layout = run.step.assembly.layout
    gathers = {transfer.bytes for transfer in sent if transfer.collective == 2}
    scatters = {transfer.bytes for transfer in sent if transfer.collective == 7}
    assert round(layout.activation_bytes / 2) in gathers
    assert round(layout.activation_bytes) in scatters


def test_gradients_are_reduced_bucket_by_bucket() -> None:
    run = described(*DESCRIBED["ddp"], "train.framework=megatron")
    (tasks,) = described_workload(run).tasks
    reduced = sum(task.transfer.bytes for task in tasks if task.transfer is not None)
    program = run.step.assembly.program
    held = program.sharding.trained(program.stage_parameters(0))
    assert reduced == pytest.approx(held.common * program.framework.reduce_bytes, rel=1e-3)


def test_every_operator_can_be_a_node(tmp_path: Path) -> None:
    run = described(*DESCRIBED["tp and pp"])
    few, many = described_workload(run), described_workload(run, operators=True)
    assert sum(map(len, many.tasks)) > 1.5 * sum(map(len, few.tasks))
    write_workload(tmp_path / "run.et", many)
    astra_rules.check(tmp_path, "run", seeds=1)
    assert replayed_step_ms(tmp_path, "run.*.et") == pytest.approx(run.us / 1e3, rel=0.002)


def test_ranks_of_a_stage_differ_in_groups_and_peers_alone(tmp_path: Path) -> None:
    run = described(*DESCRIBED["tp and pp"])
    write_workload(tmp_path / "run.et", described_workload(run))

    def shape(rank: int) -> list[object]:
        varying = ("pg_name", "comm_src", "comm_dst")
        return [
            node._replace(values={k: v for k, v in node.values.items() if k not in varying})
            for node in read_chakra_file(tmp_path / f"run.{rank}.et").nodes
        ]

    assert shape(0) == shape(1) == shape(3)
    assert shape(0) != shape(4)  # the second stage


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 3, 4]), st.sampled_from([1, 2, 6]),
    st.booleans(),
)  # fmt: skip
def test_groups_part_the_ranks_of_a_stage(tp: int, cp: int, pp: int, dp: int, last: bool) -> None:
    setup = read_setup(LLAMA)
    order = "tp-cp-dp-pp" if last else "tp-cp-pp-dp"
    parallel = setup.parallel.model_copy(update={"tp": tp, "cp": cp, "pp": pp, "dp": dp, "order": order})
    places = RankPlaces.of_setup(parallel)
    assert [places.rank(*places.of(rank)) for rank in range(places.world)] == list(range(places.world))
    for size, stride in ((tp, 1), (cp, tp), (dp * cp, tp)):
        for rank in range(places.world):
            members = places.members(rank, size, stride)
            assert rank in members
            assert len(members) == size
            assert {places.of(member)[1] for member in members} == {places.of(rank)[1]}
            numbers = {places.group_number(member, size, stride) for member in members}
            assert numbers == {places.group_number(rank, size, stride)}
        named = {(places.group_number(r, size, stride), places.members(r, size, stride)) for r in range(places.world)}
        assert len(named) == places.world // size


# ---------------------------------------------------------------------- all files or none
def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.0.et").write_text("precious")
    stages = described_workload(described(*DESCRIBED["ddp"]))

    def interrupted(shared: object, ranks: list[int]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_files, "_write_ranks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_workload(tmp_path / "run.et", stages)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("run.0.et", "precious")]


def test_files_of_an_earlier_export_of_more_ranks_are_named(tmp_path: Path) -> None:
    """`lumos replay` and others would take them for ranks of this run."""
    changes = (*SMALL, "parallel.tp=1", "parallel.pp=1", "parallel.zero=0")
    small = [word for change in changes for word in ("--set", change)]

    def warnings(ranks: int) -> list[str]:
        asked = ("convert", LLAMA, *small, "--set", f"cluster.gpus={ranks}", "-o", tmp_path / "run.et", "--json")
        found: list[str] = json.loads(lumos_here(*asked).stdout)["warnings"]
        return [warning for warning in found if "earlier export" in warning]

    (tmp_path / "run2.7.et").write_bytes(b"of another run")
    assert warnings(4) == []
    (told,) = warnings(2)
    assert told.startswith("run.2.et … run.3.et (2 files): left from an earlier export")
    (told,) = warnings(1)
    assert "run.1.et … run.groups.json (4 files)" in told


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = described_workload(described(*DESCRIBED["ddp"]))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OptionError, match=r"4 ranks need about .* free there"):
        write_workload(tmp_path / "run.et", stages)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))  # as of what is no disk
    assert write_workload(tmp_path / "run.et", stages)


# ---------------------------------------------------------------------- ASTRA-sim's other files
def test_a_described_cluster_is_a_network_of_its_tiers(tmp_path: Path) -> None:
    found = lumos_here("predict", LLAMA, "--set", "cluster.gpus=64", "--set", "train.global_batch=32",
                  "-o", tmp_path / "run.et", "--for", "astra-sim", "--json")  # fmt: skip
    written = json.loads(found.stdout)["written"]
    assert [one["ranks"] for one in written["network"]] == [8, 8]
    near, far = (one["gb_s"] for one in written["network"])
    assert 200 < near < 450  # GB/s that NCCL reaches of NVLink's 450
    assert 25 < far < 50  # and of the adapter's 50
    assert (tmp_path / "run.network.yml").read_text().splitlines()[1] == "npus_count: [ 8, 8 ]"
    script = tmp_path / "run.run.sh"
    assert os.access(script, os.X_OK)
    assert "--comm-group-configuration=./run.groups.json" in script.read_text()
    system = json.loads((tmp_path / "run.system.json").read_text())
    assert system["all-reduce-implementation"] == ["ring", "ring"]
    assert any("another size than the run moves" in text for text in written["warnings"])  # messages between nodes


def test_a_bandwidth_that_no_transfer_shows_is_called_a_guess(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    for rank in range(2):  # transfers of some kilobytes
        write_trace(tmp_path / "job" / f"rank{rank}.json", training_run(1, rank=rank), header(rank, 2))
    said = []
    for job in (tmp_path / "job", EXAMPLE):
        found = lumos_here("convert", job, "-o", tmp_path / "run.et", "--for", "astra-sim", "--json")
        said.append(any("GB/s is a guess; put yours into" in text for text in json.loads(found.stdout)["warnings"]))
    assert said == [True, False]


@pytest.mark.parametrize(("seq", "ends"), [(65_536, True), (262_144, False)])
def test_messages_that_astra_sim_does_not_end_are_told(tmp_path: Path, seq: int, ends: bool) -> None:
    changes = (*SMALL, "parallel.tp=1", "parallel.pp=2", "parallel.sequence_parallel=false", "cluster.gpus=2")
    asked = [word for change in (*changes, f"train.seq={seq}") for word in ("--set", change)]
    found = lumos_here("convert", LLAMA, *asked, "-o", tmp_path / "run.et", "--for", "astra-sim", "--json")
    told = [warning for warning in json.loads(found.stdout)["warnings"] if "does not end" in warning]
    assert told == [] if ends else told[0].startswith("messages of 2.0 GiB between ranks")
    with nullcontext() if ends else pytest.raises(AssertionError, match="more than 2 GiB"):
        astra_rules.check(tmp_path, "run", seeds=1)


def test_dualpipe_with_experts_is_written_so_that_astra_sim_ends(tmp_path: Path) -> None:
    """Its mirrored stages reduce tensors of 5.6 GB, which ASTRA-sim ends only if they are cut."""
    changes = ("model.preset=mixtral-8x7b", "model.layers=8", "train.global_batch=64", "parallel.schedule=dualpipe",
               "parallel.tp=1", "parallel.cp=1", "parallel.vpp=1", "parallel.pp=4", "parallel.ep=4",
               "cluster.gpus=16")  # fmt: skip
    asked = [word for change in changes for word in ("--set", change)]
    lumos_here("convert", LLAMA, *asked, "-o", tmp_path / "run.et", "--for", "astra-sim")
    workload = astra_rules.check(tmp_path, "run", seeds=1)
    assert max(node.values.get("comm_size", 0) for _, node in workload.nodes) > 1 << 32
    assert workload.pieces > 1


def test_a_network_of_one_dimension_is_parted_where_groups_meet() -> None:
    assert not needs_parting({"1": [0, 1], "2": [2, 3]}, 4)
    assert not needs_parting({"1": [0, 1, 2, 3], "2": [0, 1]}, 4)
    assert needs_parting({"1": [0, 1], "2": [1, 2]}, 4)
    assert [one.ranks for one in parted_network([Dimension(8, 1.0, 1.0)])] == [4, 2]
    assert len(parted_network([Dimension(7, 1.0, 1.0)])) == 1


# ---------------------------------------------------------------------- on the command line
def test_convert_takes_descriptions_and_dry_runs(tmp_path: Path) -> None:
    found = json.loads(
        lumos_here("convert", ROOT / "examples/one-h200.toml", "-o", tmp_path / "one.et", "--json").stdout
    )
    assert found["ranks"] == 1
    assert replayed_ns(tmp_path, "one.*.et") / 1e6 == pytest.approx(found["step_ms"], rel=1e-3)


def test_a_run_of_one_rank_is_not_for_a_simulator_of_networks(tmp_path: Path) -> None:
    found = lumos_here("convert", ROOT / "examples/one-h200.toml", "-o", tmp_path / "x.et", "--for", "astra-sim")
    assert found.returncode == 2
    assert "this run has one rank; leave the option out" in found.stderr
    assert not list(tmp_path.iterdir())


def test_a_what_if_is_written_with_its_times(tmp_path: Path) -> None:
    lengths = {}
    for factor in (1, 30):
        name = f"comm{factor}"
        found = lumos_here("predict", "--from", EXAMPLE, "--scale", f"comm={factor}", "-o", tmp_path / f"{name}.et",
                           "--json")  # fmt: skip
        assert json.loads(found.stdout)["written"]["ranks"] == 4
        lengths[factor] = replayed_ns(tmp_path, f"{name}.*.et")
    assert lengths[30] > 1.5 * lengths[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-o", "x.et", "--for", "ns3"), "--for ns3: not known; use astra-sim"),
        (("-o", "x.trace.json", "--for", "astra-sim"), "--for: shapes Chakra files"),
        (("-o", "x.et", "--for", "astra-sim", "--metadata"), "which stops at it"),
        (("-o", "x.et", "--set", "train.seq=1"), "lumos predict --from"),
        (("-o", "x.et", "--operators"), "--operators: for a description"),
        (("-o", "x.{rank}.et"), "give NAME.et, without the rank"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    told = [str(tmp_path / text) if text.startswith("x.") else text for text in options]
    found = lumos_here("convert", EXAMPLE, *told)
    assert found.returncode == 2
    assert words in found.stderr
    assert found.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
