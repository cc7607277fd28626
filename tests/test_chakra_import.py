"""Chakra files of other tools: recordings of the official converter, graphs with durations, workloads without any.

`chakra_converter` writes what the official tools make of a trace. What they made of real traces agreed with it on the
four recorded jobs that have a PyTorch execution trace.
"""

from __future__ import annotations

import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from chakra_converter import convert_recording
from commands import lumos_here
from lumos.analysis.replay import Replay, replay
from lumos.analysis.stragglers import Straggler
from lumos.chakra.file_format import ChakraFile, Node, NodeType, delimited, schema
from lumos.chakra.foreign_prediction import GraphPrediction, needs_prices, predict_graph
from lumos.chakra.run_reader import read_chakra_files
from lumos.costs.operator_model import cost_model
from lumos.errors import InputError, OptionError
from lumos.prediction.bill import Tariff
from lumos.prediction.prediction import predict
from lumos.program.operators import Collective, Operator
from lumos.read.job import read_job
from lumos.schedules import Phase
from lumos.setup.setup_files import read_plain
from lumos.trace.steps import keep_step
from test_formats import foreign_node, reduce_node, write_foreign

EXAMPLE = Path("src/lumos/data/example")


@cache
def recorded() -> Replay:
    """One step of four ranks, the third of which is slow."""
    trace = read_job(EXAMPLE)
    return replay(keep_step(trace, "3"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """The same, after the official converter."""
    return replay(read_job(convert_recording(recorded().execution, tmp_path_factory.mktemp("et") / "job")))


# Recordings of the official converter.


def test_a_converted_recording_takes_as_long_as_the_trace_it_was_made_from(converted: Replay) -> None:
    assert converted.recorded_steps.mean == pytest.approx(recorded().recorded_steps.mean, rel=0.03)
    assert converted.error_pct == pytest.approx(0, abs=0.01)


def test_a_converted_recording_blames_the_same_rank_for_as_much(converted: Replay) -> None:
    slow, expected = converted.stragglers[0], recorded().stragglers[0]
    assert slow.rank == expected.rank == 2
    assert slow.last_in == expected.last_in
    assert slow.others_wait_ms == pytest.approx(expected.others_wait_ms, rel=0.1)
    assert slow.costs_others_ms == pytest.approx(expected.costs_others_ms, rel=0.25)
    assert all(other.others_wait_ms < 0.1 * slow.others_wait_ms for other in converted.stragglers[1:])


def waited_for(run: Replay) -> Straggler:
    """The rank that the others wait for most."""
    return max(run.stragglers, key=lambda one: one.others_wait_ms)


def test_a_converted_recording_is_cleaned_of_the_profiler_that_made_it(converted: Replay) -> None:
    assert converted.answer.clean_ms == pytest.approx(recorded().clean_ms, rel=0.05)


def test_every_collective_has_the_transfer_of_the_rank_that_waited_the_least(converted: Replay) -> None:
    trace = converted.execution.trace
    for found in converted.execution.rendezvous:
        last = trace.start[found.rows].max()
        shortest = trace.duration[found.rows].min()
        assert abs(trace.end[found.rows] - (last + shortest)).max() < 100_000


def test_recorded_times_are_taken_where_a_file_has_them(tmp_path: Path) -> None:
    run = replay(read_job(convert_recording(recorded().execution, tmp_path / "job", with_times=True)))
    assert run.recorded_steps.mean == pytest.approx(recorded().recorded_steps.mean, rel=0.01)
    assert run.stragglers[0].rank == 2
    assert not run.execution.warnings


@pytest.mark.data
@pytest.mark.parametrize("name", ["ddp2_l8", "tp2_l8"])
def test_real_recordings_come_through_the_converter(shared_data: Path, tmp_path: Path, name: str) -> None:
    """Of steps that were recorded with a PyTorch execution trace, as the converter needs it."""
    kineto = replay(read_job(shared_data / "h200/multirank" / name, match="rank?.with_et.*"))
    found = replay(read_job(convert_recording(kineto.execution, tmp_path / "job")))
    assert found.recorded_steps.mean == pytest.approx(kineto.recorded_steps.mean, rel=0.03)
    assert waited_for(found).rank == waited_for(kineto).rank == 1
    assert waited_for(found).others_wait_ms == pytest.approx(waited_for(kineto).others_wait_ms, rel=0.1)


@pytest.mark.parametrize("name", ["ddp3_work", "fsdp2_even", "tp2_even"])
def test_blind_jobs_of_the_official_tools_name_the_slow_rank_and_the_step(tmp_path: Path, name: str) -> None:
    """Recorded and converted once everything was fixed; `kineto.json` has what the traces of the same steps say."""
    with tarfile.open("calibration/converted_chakra_h200.tar.xz") as tar:
        for member in tar:
            if member.name == "kineto.json" or member.name.startswith(f"{name}/"):
                file = tar.extractfile(member)
                assert file is not None
                path = tmp_path / member.name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(file.read())
    told = json.loads((tmp_path / "kineto.json").read_text())[name]
    found = replay(read_job(tmp_path / name))
    assert found.recorded_steps.mean == pytest.approx(told["step_ms"], rel=0.03)
    assert waited_for(found).rank == told["slow_rank"]
    assert waited_for(found).others_wait_ms == pytest.approx(told["costs_others_ms"], rel=0.1)


class Rank:
    """The file of one rank, as the official converter writes it: operators on one thread, and what they launch."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.sequence = 0

    def op(self, micros: int, name: str = "aten::mm", caller: int = 0, announced: str = "") -> int:
        self._add(name, micros, NodeType.COMP, [caller] if caller else [], True)
        self.nodes[-1].inputs.values = announced
        return len(self.nodes)

    def kernel(self, micros: int, storage: int = 0, stream: int = 7) -> None:
        op = self.op(10)
        self._add("kernel", micros, NodeType.COMP, [op], False, stream=("int64_val", stream))
        self.nodes[-1].inputs.values = _tensor(storage)

    def all_reduce(self, micros: int, storage: int = 0) -> None:
        said = f"[{_tensor(storage)}, [{self.sequence}, False], ['0', 'default_pg'], 0, 'allreduce', [], [], 0, 1, 2]"
        op = self.op(10, "record_param_comms", announced=said)
        told = {"stream": ("int64_val", 16), "comm_type": ("int64_val", 0), "comm_size": ("int64_val", 64)}
        self._add("ncclDevKernel_AllReduce", micros, NodeType.COMM_COLL, [op], False, **told)
        self.nodes[-1].inputs.values = said
        self.sequence += 1

    def wait(self) -> None:
        self.op(10, "record_param_comms", announced=f"[[{self.sequence - 1}, False], ['0', 'default_pg'], 0, 'wait', "
                "[], [], -1, -1, 1]")  # fmt: skip

    def _add(self, name: str, micros: int, kind: NodeType, deps: list[int], on_cpu: bool, **more: Any) -> None:
        number = len(self.nodes) + 1
        told = {"rf_id": ("int64_val", number), "tid": ("int64_val", 1), **more}
        plain = {"id": number, "name": name, "type": kind, "duration_micros": micros, "ctrl_deps": deps}
        self.nodes.append(foreign_node({**plain, "cpu": on_cpu, "attributes": told}))

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            for message in (schema().metadata(), *self.nodes):
                file.write(delimited(message))


def _tensor(storage: int) -> str:
    return f"[{storage}, {storage}, 0, 8, 2, 'cuda:0']" if storage else "[]"


def written(folder: Path, *ranks: Rank) -> Replay:
    for number, rank in enumerate(ranks):
        rank.write(folder / f"job.{number}.et")
    return replay(read_job(folder))


def starts(run: Replay, name: str, rank: int = 0) -> list[float]:
    """Microseconds from the first event of the rank, to the nearest ten."""
    trace = run.execution.trace
    begin = trace.start[trace.rank == rank].min()
    rows = [row for row in range(len(trace)) if trace.rank[row] == rank and trace.names[trace.name[row]] == name]
    return sorted(round((trace.start[row] - begin) / 1e4) * 10 for row in rows)


@pytest.mark.parametrize(("touches", "waits"), [(5, True), (6, False)])
def test_a_kernel_waits_for_a_collective_whose_memory_it_touches(tmp_path: Path, touches: int, waits: bool) -> None:
    rank = Rank()
    rank.all_reduce(2000, storage=5)
    rank.kernel(100, storage=touches)
    began = starts(written(tmp_path, rank), "kernel")[0]
    assert began >= 2000 if waits else began < 200


def test_a_kernel_waits_for_a_collective_that_its_thread_waited_for(tmp_path: Path) -> None:
    rank = Rank()
    rank.all_reduce(2000)
    rank.kernel(100)
    rank.wait()
    rank.kernel(100)
    first, second = starts(written(tmp_path, rank), "kernel")
    assert first < 200
    assert second >= 2000


def test_a_collective_waits_for_what_its_thread_launched_before(tmp_path: Path) -> None:
    rank = Rank()
    rank.kernel(3000)
    rank.all_reduce(500)
    assert starts(written(tmp_path, rank), "ncclDevKernel_AllReduce")[0] >= 3000


def test_a_pause_that_the_file_does_not_hold_is_found_from_what_the_others_waited(tmp_path: Path) -> None:
    """Between two collectives, the second rank did something for 20 ms that was no operator."""
    ranks = Rank(), Rank()
    for rank, second in zip(ranks, (20_500, 500), strict=True):
        rank.all_reduce(500)
        rank.op(1000)
        rank.all_reduce(second)
    run = written(tmp_path, *ranks)
    early, late = (starts(run, "ncclDevKernel_AllReduce", rank) for rank in (0, 1))
    assert late[1] - early[1] == pytest.approx(20_000, abs=50)
    slow = run.stragglers[0]
    assert slow.rank == 1
    assert slow.costs_others_ms == pytest.approx(20, rel=0.01)


def test_ranks_whose_host_ran_ahead_are_not_made_late_by_one_slow_end(tmp_path: Path) -> None:
    """The third of many transfers ends late on one rank: the other, whose GPU decides, went on in the meantime."""
    ranks = Rank(), Rank()
    for number, rank in enumerate(ranks):
        for index in range(8):
            rank.kernel(5000, storage=index + 1)
            rank.all_reduce(4500 if index == 3 and number else 3000 if index == 3 else 700, storage=index + 1)
    run = written(tmp_path, *ranks)
    assert run.recorded_steps.mean < 8 * 5.8 + 5


def test_what_an_operator_does_itself_lies_between_what_it_calls(tmp_path: Path) -> None:
    rank = Rank()
    outer = rank.op(300, "outer")
    rank.op(100, "first", caller=outer)
    rank.op(100, "second", caller=outer)
    rank.kernel(5)
    run = written(tmp_path, rank)
    assert starts(run, "first") == [100]
    assert starts(run, "second") == [300]


def test_hidden_time_of_steps_and_optimizers_is_estimated_and_not_forgotten(tmp_path: Path) -> None:
    rank = Rank()
    step = rank.op(0, "ProfilerStep#1")
    for _ in range(10):
        rank.op(100, caller=step)
    rank.kernel(5)
    run = written(tmp_path, rank)
    assert run.marks.names == ("ProfilerStep#1",)
    assert 1.5 < run.recorded_steps.mean < 3.0  # ten operators of 0.1 ms take 1.0


def test_announcements_that_say_nothing_are_no_mistake(tmp_path: Path) -> None:
    rank = Rank()
    rank.all_reduce(500)
    for node in rank.nodes:
        node.inputs.values = "[[1, 2, 'x'" * 50
    assert written(tmp_path, rank).recorded_steps.mean > 0.5


# Graphs with durations, of any tool.


def test_waiting_in_a_collective_is_told_from_its_transfer(tmp_path: Path) -> None:
    """Every rank states what it was in the collective for: the first waited for the second."""
    for rank, (before, inside) in enumerate([(10, 130), (40, 100)]):
        first = {"id": 1, "duration_micros": before}
        write_foreign(tmp_path / f"x.{rank}.et", first, reduce_node(2, inside, data_deps=[1]))
    run = replay(read_job(tmp_path))
    assert run.times.span == 140_000
    assert run.stragglers[0].rank == 1


def test_what_no_profiler_recorded_is_not_cleaned_of_one(tmp_path: Path) -> None:
    path = write_foreign(
        tmp_path / "x.0.et",
        {"id": 1, "duration_micros": 1000, "cpu": True},
        {"id": 2, "duration_micros": 500, "data_deps": [1]},
    )
    run = replay(read_job(path))
    assert run.clean_ms == run.simulated_steps.typical == pytest.approx(1.5)
    assert run.answer.clean_ms is run.answer.never_profiled_ms is None
    shown = lumos_here("replay", path).stdout
    assert "profiler" not in shown


# Workloads without durations.


def comp(number: int, work: Operator, deps: tuple[int, ...] = (), **more: Any) -> Node:
    sizes = {"num_ops": int(work.flops), "tensor_size": int(work.bytes)}
    return Node(number, "node", NodeType.COMP, deps, (), 0, 0, "", "", sizes | more)


def priced(*files: ChakraFile, changes: tuple[str, ...] = ("cluster.gpu=h100",)) -> GraphPrediction:
    return predict_graph(files, read_plain(None, changes), Tariff())


def workload(*nodes: Node, rank: int = 0, head: dict[str, Any] | None = None) -> ChakraFile:
    return ChakraFile(Path(f"/nowhere/job.{rank}.et"), rank, head or {}, list(nodes))


@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 1536, 4096)])
def test_a_node_with_the_operations_and_bytes_of_a_matmul_costs_what_that_does(shape: tuple[int, int, int]) -> None:
    work = Operator("gemm_tn", shape)
    found = priced(workload(comp(1, work)))
    assert 1e3 * found.step_ms == pytest.approx(found.costs.operator_us(work), rel=0.06)
    assert 1e3 * found.step_ms == pytest.approx(cost_model("h100").us(work), rel=0.25)  # alone, and not in a step


def test_a_node_that_only_moves_data_costs_what_memory_takes() -> None:
    found = priced(workload(comp(1, Operator("add", (8192, 8192)))))
    moved = Operator("add", (8192, 8192)).bytes
    assert 1e3 * found.step_ms == pytest.approx(moved / 3.35e6, rel=0.3)
    loads = Node(1, "load", NodeType.MEM_LOAD, (), (), 0, 0, "", "", {"tensor_size": int(moved)})
    assert priced(workload(loads)).step_ms == pytest.approx(found.step_ms)


def test_stage_states_elements_multiply_adds_and_operands() -> None:
    """2048 × 4096 times 4096 × 6144, as STAGE writes it."""
    work = Operator("gemm_tn", (2048, 6144, 4096))
    operands = {"inputs": ["x", str(2048 * 4096), "w", str(4096 * 6144.0)], "outputs": ["y", str(2048 * 6144)]}
    told = {"num_ops": int(work.flops) // 2, "tensor_size": 2048 * 6144, "op_type": "M", **operands}
    node = Node(1, "mha.qkv_COMP", NodeType.COMP, (), (), 0, 0, "", "", told)
    found = priced(workload(node, head={"schema": "symbolic_tensor_network"}))
    assert found.all_operators[0].work == work
    assert any("multiply-adds" in note for note in found.warnings)


def described_workload(tp: int) -> tuple[float, GraphPrediction]:
    """A described Llama, and the same operators and collectives as a workload: milliseconds, and its prediction."""
    changes = [
        "model.layers=4", "model.hidden=4096", "model.ffn=14336", "model.heads=32", "model.kv_heads=8",
        "model.vocab=32000", "train.seq=4096", f"parallel.tp={tp}", "train.global_batch=1", "cluster.gpu=h100",
        "train.framework=megatron", f"cluster.gpus={tp}",
    ]  # fmt: skip
    plain = read_plain(None, changes)
    described = predict(plain.checked(plain.sections).setup)
    assert described.step is not None
    program = described.step.assembly.program
    blocks = [block for chunk in program.chunks[0] for phase in Phase for block in program.blocks(chunk, phase)]
    blocks.append(program.optimizer(0))
    works = [
        op.work for block in blocks for _ in range(int(block.times)) for op in block.build() if op.work is not None
    ]
    codes = {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 7}
    nodes: list[Node] = []
    for number, work in enumerate(works, 1):
        deps = (number - 1,) if number > 1 else ()
        if isinstance(work, Collective):
            size = work.bytes / work.group.size if work.kind == "all_gather" else work.bytes
            told = {"comm_type": codes[work.kind], "comm_size": int(size)}
            nodes.append(Node(number, "talk", NodeType.COMM_COLL, deps, (), 0, 0, "", "", told))
        else:
            nodes.append(comp(number, work, deps, op_type="GEMM" if work.is_matrix else "E"))
    return described.step_ms, priced(*(workload(*nodes, rank=rank) for rank in range(tp)))


@pytest.mark.parametrize("tp", [1, 4])
def test_a_described_llama_as_a_workload_costs_what_its_description_does(tp: int) -> None:
    described, found = described_workload(tp)
    assert found.step_ms == pytest.approx(described, rel=0.05)


def collective(number: int, kind: int, size: int, group: str = "") -> dict[str, Any]:
    told: dict[str, Any] = {"comm_type": ("int64_val", kind), "comm_size": ("int64_val", size)}
    told |= {"pg_name": ("string_val", group)} if group else {}
    return {"id": number, "type": NodeType.COMM_COLL, "attributes": told}


def test_collectives_cost_what_the_network_takes_for_the_ranks_of_their_group(tmp_path: Path) -> None:
    """Sixteen ranks on two nodes: a group of neighbours is fast, one across nodes is slow."""
    near, far = {"1": [0, 1], "2": [8, 9]}, {"1": [0, 8], "2": [1, 9]}
    steps = []
    for name, groups in (("near", near), ("far", far)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(groups | {"3": list(range(16))}))
        for group, ranks in groups.items():
            for rank in ranks:
                write_foreign(folder / f"job.{rank}.et", collective(1, 0, 1 << 26, group))
        files = read_chakra_files(folder)
        assert needs_prices(files)
        steps.append(predict_graph(files, read_plain(None, ["cluster.gpu=h100"]), Tariff()).step_ms)
    assert steps[1] > 3 * steps[0]


def test_an_all_gather_states_what_every_rank_puts_in(tmp_path: Path) -> None:
    for rank in range(4):
        write_foreign(tmp_path / f"job.{rank}.et", collective(1, 2, 1 << 20))
    (row,) = predict_graph(read_chakra_files(tmp_path), read_plain(None, ["cluster.gpu=h100"]), Tariff()).all_operators
    assert row.work.bytes == 4 << 20


def test_messages_find_each_other_without_the_rank_whose_file_it_is(tmp_path: Path) -> None:
    work = {"num_ops": ("int64_val", 10**12), "tensor_size": ("int64_val", 10**8)}
    size = {"comm_size": ("int64_val", 1 << 20), "comm_tag": ("int32_val", 3)}
    sends = {"id": 2, "type": NodeType.COMM_SEND, "data_deps": [1], "attributes": size | {"comm_dst": ("int32_val", 1)}}
    write_foreign(tmp_path / "job.0.et", {"id": 1, "attributes": work}, sends)
    receives = {"id": 1, "type": NodeType.COMM_RECV, "attributes": size | {"comm_src": ("int32_val", 0)}}
    write_foreign(tmp_path / "job.1.et", receives, {"id": 2, "data_deps": [1], "attributes": work})
    found = predict_graph(read_chakra_files(tmp_path), read_plain(None, ["cluster.gpu=h100"]), Tariff())
    work = found.all_operators[0].work
    assert isinstance(work, Operator)
    whole = found.run.steps.end.max() - found.run.steps.start.min()
    assert whole > 1e3 * 1.99 * found.costs.operator_us(work)


def test_what_a_file_states_has_priority_over_a_price() -> None:
    stated = comp(1, Operator("gemm_tn", (8192, 8192, 8192)))._replace(duration_us=7)
    talk = Node(2, "talk", NodeType.COMM_COLL, (1,), (), 0, 0, "", "", {"comm_type": 0, "comm_size": 1 << 20})
    files = [workload(stated, talk, rank=rank) for rank in range(2)]
    assert needs_prices(files)
    found = priced(*files)
    (row,) = found.all_operators
    assert isinstance(row.work, Collective)
    assert 1e3 * found.step_ms == pytest.approx(7 + found.costs.collective_us(row.work), rel=1e-3)


def test_predict_prices_a_folder_and_writes_every_format(tmp_path: Path) -> None:
    folder = tmp_path / "workload"
    folder.mkdir()
    work = {"num_ops": ("int64_val", 10**12), "tensor_size": ("int64_val", 10**8)}
    for rank in range(2):
        write_foreign(folder / f"job.{rank}.et", {"id": 1, "attributes": work}, collective(2, 0, 1 << 24))
    shown = lumos_here("predict", "--from", folder, "--gpu", "h100")
    assert "2 × h100" in shown.stdout
    assert "communication alone" in shown.stdout
    for name in ("a.html", "a.json", "a.trace.json.gz"):
        assert lumos_here("predict", "--from", folder, "--gpu", "h100", "-o", tmp_path / name).returncode == 0
    answer = json.loads((tmp_path / "a.json").read_text())
    assert answer["parameters"] is answer["tokens_per_s_per_gpu"] is answer["memory_gib"] is None
    faster = lumos_here("predict", "--from", folder, "--gpu", "b200", "--json")
    assert json.loads(faster.stdout)["step_ms"] < answer["step_ms"]
    assert "b200" in lumos_here("predict", "--from", folder, "--gpu", "h100,b200").stdout


MISTAKES = {
    "replay": (("replay", "FOLDER"), "lumos predict --from FOLDER --gpu h100"),
    "sizes of a model": (("predict", "--from", "FOLDER", "--set", "model.layers=2"), "model.layers: a workload"),
    "another world": (("predict", "--from", "FOLDER", "--gpus", "64"), "the files are of a job of 2 ranks"),
    "tokens": (("predict", "--from", "FOLDER", "--gpu", "h100", "--tokens", "1T"), "do not say how many tokens"),
    "an unknown GPU": (("predict", "--from", "FOLDER", "--gpu", "h1000"), "h1000"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_with_workloads_are_one_line(tmp_path: Path, what: str) -> None:
    for rank in range(2):
        write_foreign(tmp_path / f"job.{rank}.et", collective(1, 0, 1 << 20))
    words, message = MISTAKES[what]
    told = lumos_here(*(str(tmp_path) if word == "FOLDER" else word for word in words))
    assert told.returncode == 2
    assert message.replace("FOLDER", str(tmp_path)) in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


def test_a_group_that_nothing_describes_is_asked_for(tmp_path: Path) -> None:
    path = write_foreign(tmp_path / "job.0.et", collective(1, 0, 1 << 20, "17"))
    with pytest.raises(InputError, match="process group '17', and nothing says which ranks that has"):
        predict_graph(read_chakra_files(path), read_plain(None, ["cluster.gpu=h100"]), Tariff())


@pytest.mark.parametrize("text", ["[1, 2]", '{"1": "x"}', '{"1": [0, 99999999999999999999]}', "[" * 9999, "\xff"])
def test_a_file_beside_the_traces_that_is_no_group_file_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text, encoding="latin-1")
    for rank in range(2):
        write_foreign(tmp_path / f"job.{rank}.et", collective(1, 0, 1 << 20, "1"))
    files = read_chakra_files(tmp_path, match="*.et")
    assert predict_graph(files, read_plain(None, ["cluster.gpu=h100"]), Tariff()).step_ms > 0


@pytest.mark.parametrize(("name", "value"), [("num_ops", 1 << 63), ("tensor_size", (1 << 64) - 1), ("comm_type", 99)])
def test_absurd_sizes_end_in_an_answer_or_one_line(tmp_path: Path, name: str, value: int) -> None:
    told: dict[str, Any] = {"num_ops": ("uint64_val", 10), "tensor_size": ("uint64_val", 1 << 20)}
    node = {"id": 1, "attributes": told | {name: ("uint64_val", value)}}
    told_of = collective(2, 0, 1 << 20)
    path = write_foreign(tmp_path / "job.0.et", node, told_of)
    write_foreign(tmp_path / "job.1.et", node, told_of)
    assert path.exists()
    assert predict_graph(read_chakra_files(tmp_path), read_plain(None, ["cluster.gpu=h100"]), Tariff()).step_ms >= 0


def test_json_with_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"workload_graph": [{"Id": 1, "Name": "a", "more": "\xbd"}]}')
    with pytest.raises(InputError, match="not a Chakra graph"):
        read_job(tmp_path / "x.json")


def test_keys_other_than_the_clusters_are_refused_from_python_too() -> None:
    with pytest.raises(OptionError, match=r"parallel\.tp: a workload"):
        priced(workload(comp(1, Operator("add", (64, 64)))), changes=("cluster.gpu=h100", "parallel.tp=2"))


@pytest.mark.parametrize("command", [["replay"], ["predict", "--from"]])
def test_a_folder_of_several_workloads_asks_for_one_of_them(tmp_path: Path, command: list[str]) -> None:
    names = ("ALL_REDUCE", "BARRIER", "BROADCAST")
    for name in names:
        for rank in range(2):
            write_foreign(tmp_path / f"{name}.{rank}.et", reduce_node(1, 100))
    done = lumos_here(*command, tmp_path)
    assert done.returncode == 2
    assert all(f"{name}.0.et" in done.stderr for name in names)
    assert "--match 'ALL_REDUCE.*.et'" in done.stderr
    assert "2 rank(s)" in lumos_here("replay", tmp_path, "--match", "BARRIER.*.et").stdout
