"""ASTRA-sim: what it prints is read, and set beside our answer for the same job."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import lumos_here
from lumos.chakra.astra_costs import CompensatedSizes, as_ring, links_apart, too_long, too_many_groups, transfer_ns
from lumos.chakra.astra_estimate import described_workload, estimated, of_described
from lumos.chakra.astra_files import Dimension, write_astra_files
from lumos.chakra.astra_log import looks_like_astra_sim, read_astra_sim_log
from lumos.chakra.file_format import COLLECTIVES, NodeType
from lumos.chakra.rank_files import Workload
from lumos.chakra.tasks import CommNode, Task
from lumos.errors import InputError
from lumos.prediction.described_run import DescribedRun
from lumos.prediction.prediction import predict
from lumos.program.rank_places import RankPlaces
from lumos.setup.setup_files import read_setup

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import astra_sim as benchmark  # noqa: E402
import chakra_runs  # noqa: E402

EXAMPLE = ROOT / "src/lumos/data/example"
KEPT = ROOT / "tests/data/astra_sim/example.log"  # what ASTRA-sim made of it
GIB = 2**30 / 1e9

HEAD = "[2026-11-16 15:16:02.641] [system::topology::RingTopology] [info] ring of node 0, id: 0 dimension: local\n"
END = "[2026-11-16 15:16:02.642] [system] [warning] Exiting\n"


def finished(rank: int, cycles: int, exposed: int, statistics: bool = True) -> str:
    """What ASTRA-sim prints when a rank has finished."""
    time = "[2026-11-16 15:16:02.642]"
    lines = [f"{time} [workload] [info] sys[{rank}] finished, {cycles} cycles, exposed communication {exposed} cycles."]
    if statistics:
        lines += [f"{time} [statistics] [info] sys[{rank}], {name} time: {value}" for name, value in (
            ("Wall", cycles), ("GPU", cycles - exposed), ("Comm", exposed + 7))]  # fmt: skip
    return "\n".join(lines) + "\n"


def node(what: str, rank: int, tick: int, number: int, name: str, kind: int) -> str:
    parts = f"sys->id={rank}, tick={tick}, node->id={number}, node->name={name}, node->type={kind}"
    return f"[2026-11-16 15:16:02.641] [workload] [debug] {what},{parts}\n"


def log(tmp_path: Path, *parts: str) -> Path:
    path = tmp_path / "log.log"
    path.write_text("".join(parts))
    return path


# ---------------------------------------------------------------------- reading
def test_a_log_gives_the_times_of_every_rank_in_nanoseconds(tmp_path: Path) -> None:
    found = read_astra_sim_log(log(tmp_path, HEAD, finished(1, 2_500, 500), finished(0, 3_000, 1_000), END))
    assert found.step_ns == 3_000
    one = found.ranks[1]
    assert (one.wall_ns, one.exposed_ns, one.compute_ns) == (2_500, 500, 2_000)


def test_of_several_runs_in_a_log_the_last_one_counts(tmp_path: Path) -> None:
    """ASTRA-sim appends to its log."""
    old, new = finished(0, 9_000, 0) + finished(1, 9_000, 0), finished(0, 3_000, 1_000) + finished(1, 2_000, 0)
    assert read_astra_sim_log(log(tmp_path, HEAD, old, END, HEAD, new, END)).step_ns == 3_000
    assert read_astra_sim_log(log(tmp_path, HEAD, old, HEAD, new)).step_ns == 3_000  # an end was lost


def test_the_folder_of_logs_is_read_from_the_oldest_on(tmp_path: Path) -> None:
    (tmp_path / "log.1.log").write_text(HEAD + finished(0, 1_000, 0))
    (tmp_path / "log.log").write_text(finished(1, 2_000, 0) + END)
    assert looks_like_astra_sim(tmp_path)
    assert sorted(read_astra_sim_log(tmp_path).ranks) == [0, 1]


def test_traced_nodes_of_communication_last_from_issue_to_callback(tmp_path: Path) -> None:
    lines = [
        node("issue", 0, 10, 5, "all_reduce, of 2 (bf16)", 7), node("issue", 0, 10, 6, "work", 4),
        node("callback", 0, 60, 6, "work", 4), node("callback", 0, 110, 5, "all_reduce, of 2 (bf16)", 7),
        node("callback", 0, 110, 8, "never issued", 7),
    ]  # fmt: skip
    (found,) = read_astra_sim_log(log(tmp_path, *lines, finished(0, 200, 100), END)).nodes
    assert (found.name, found.type, found.start_ns, found.end_ns) == (
        "all_reduce, of 2 (bf16)", NodeType.COMM_COLL, 10, 110
    )  # fmt: skip


def test_colours_of_a_terminal_are_left_out(tmp_path: Path) -> None:
    text = finished(0, 3_000, 1_000).replace("[info]", "[\x1b[32minfo\x1b[m]")
    assert read_astra_sim_log(log(tmp_path, text)).step_ns == 3_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + END, "no result of ASTRA-sim"),
        ("", "no result of ASTRA-sim"),
        ("[t] [workload] [critical] communicator group 3 not found\n", "it stopped: communicator group 3 not found"),
        (finished(0, 10, 0) + finished(2, 10, 0), "rank 1 did not finish"),
        (finished(0, 10**19, 0), "is no number of cycles"),
        (finished(10**9, 10, 0), "is no rank"),
    ],
)
def test_a_log_without_a_whole_result_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_astra_sim_log(log(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_damaged_logs_end_in_a_result_or_are_refused(tmp_path: Path) -> None:
    whole = (HEAD + node("issue", 0, 1, 2, "x", 7) + finished(0, 3_000, 1_000) + finished(1, 2_000, 7) + END).encode()
    chance = random.Random(18)
    path = tmp_path / "log.log"
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(bytes(data[: chance.randint(1, len(data))]))
        with suppress(InputError):  # anything else is a defect
            assert read_astra_sim_log(path).step_ns >= 0


def test_traces_are_not_taken_for_logs(tmp_path: Path) -> None:
    assert not looks_like_astra_sim(EXAMPLE)
    assert not looks_like_astra_sim(next(EXAMPLE.glob("*.gz")))
    assert not looks_like_astra_sim(tmp_path / "nothing")


# ---------------------------------------------------------------------- comparing
def test_compare_sets_our_ranks_beside_those_of_astra_sim(tmp_path: Path) -> None:
    replayed = json.loads(lumos_here("replay", EXAMPLE, "--json").stdout)
    times = [20_000_000 + 1_000_000 * rank for rank in range(replayed["ranks"])]
    path = log(tmp_path, *(finished(rank, time, 5_000_000) for rank, time in enumerate(times)), END)
    answer = json.loads(lumos_here("compare", EXAMPLE, path, "--json").stdout)
    assert answer["astra_sim_ms"] == times[-1] / 1e6
    assert [pair["astra_ms"] for pair in answer["ranks"]] == [time / 1e6 for time in times]
    assert all(pair["astra_exposed_ms"] == 5.0 for pair in answer["ranks"])
    for pair in answer["ranks"]:
        assert pair["ours_work_ms"] + pair["ours_exposed_ms"] == pytest.approx(pair["ours_ms"])
        assert pair["difference_pct"] == pytest.approx(100 * (pair["astra_ms"] / pair["ours_ms"] - 1))
    assert answer["ours_ms"] == max(pair["ours_ms"] for pair in answer["ranks"])


def test_compare_writes_both_simulators_as_page_and_table(tmp_path: Path) -> None:
    path = log(tmp_path, *(finished(rank, 20_000_000, 5_000_000, statistics=False) for rank in range(4)), END)
    shown = lumos_here("compare", EXAMPLE, path, "-o", tmp_path / "both.html")
    assert shown.returncode == 0
    assert "ASTRA-sim" in shown.stdout
    assert "printed no statistics" in " ".join(shown.stdout.split())
    page = (tmp_path / "both.html").read_text()
    assert "ranks in both simulators" in page
    assert lumos_here("compare", EXAMPLE, path, "-o", tmp_path / "both.csv").returncode == 0
    assert len((tmp_path / "both.csv").read_text().splitlines()) == 5


def test_compare_sets_a_described_run_beside_astra_sim_every_rank_by_its_stage(tmp_path: Path) -> None:
    setup = tmp_path / "setup.toml"
    setup.write_text(
        '[model]\npreset = "llama3-8b"\nlayers = 4\n[train]\nseq = 2048\nglobal_batch = 8\nmicro_batch = 1\n'
        '[parallel]\npp = 2\ntp = 2\n[cluster]\ngpu = "h100"\ngpus = 4\n'
    )
    path = log(tmp_path, *(finished(rank, 100_000_000, 5_000_000) for rank in range(4)), END)
    answer = json.loads(lumos_here("compare", setup, path, "--json").stdout)
    first, second, third, last = (pair["ours_work_ms"] for pair in answer["ranks"])
    assert (first, third) == (second, last)  # of one stage
    assert first != third
    predicted = json.loads(lumos_here("predict", setup, "--json").stdout)
    assert answer["ours_ms"] == pytest.approx(predicted["step_ms"], rel=0.01)


@pytest.mark.parametrize("text", [None, "", "hello", "\x00\x01"])
def test_compare_names_the_file_that_is_no_log(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "some.log"
    if text is not None:
        path.write_text(text)
    done = lumos_here("compare", ROOT / "examples/one-h200.toml", path)
    assert done.returncode == 2
    words = "no such file" if text is None else "nothing of ASTRA-sim is in it"
    assert f"some.log: {words}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("factor", "doubted"), [(1.0, False), (1.3, True)])
def test_compare_doubts_a_log_whose_ranks_work_for_another_time(tmp_path: Path, factor: float, doubted: bool) -> None:
    ours = json.loads(lumos_here("compare", EXAMPLE, KEPT, "--json").stdout)["ranks"]
    work = [round(1e6 * factor * pair["ours_work_ms"]) for pair in ours]
    path = log(tmp_path, *(finished(rank, ns + 5_000_000, 5_000_000) for rank, ns in enumerate(work)), END)
    answer = json.loads(lumos_here("compare", EXAMPLE, path, "--json").stdout)
    assert any("of this run?" in note for note in answer["warnings"]) == doubted


def test_compare_says_where_the_collectives_are(tmp_path: Path) -> None:
    path = log(tmp_path, *(finished(rank, 20_000_000, 5_000_000) for rank in range(4)), END)
    answer = json.loads(lumos_here("compare", EXAMPLE, path, "--json").stdout)
    assert any("in the log/log.log" in note for note in answer["warnings"])


def test_compare_wants_the_run_first() -> None:
    done = lumos_here("compare", KEPT, EXAMPLE)
    assert done.returncode == 2
    assert "name the run first" in done.stderr


def test_compare_refuses_a_result_of_another_job(tmp_path: Path) -> None:
    done = lumos_here("compare", EXAMPLE, log(tmp_path, finished(0, 10, 0), END))
    assert done.returncode == 2
    assert "1 ranks in ASTRA-sim and 4 in the run" in " ".join(done.stderr.split())


# ---------------------------------------------------------------------- both simulators, without ASTRA-sim
def test_the_example_takes_as_long_in_astra_sim_as_here_rank_by_rank() -> None:
    answer = json.loads(lumos_here("compare", EXAMPLE, KEPT, "--json").stdout)
    assert abs(answer["difference_pct"]) < 1
    for pair in answer["ranks"]:
        assert abs(pair["difference_pct"]) < 2
        assert pair["astra_work_ms"] == pytest.approx(pair["ours_work_ms"], abs=0.02 * answer["ours_ms"])
        assert pair["astra_exposed_ms"] == pytest.approx(pair["ours_exposed_ms"], abs=0.02 * answer["ours_ms"])
    (kind,) = answer["collectives"]
    assert (kind["kind"], kind["calls"], kind["astra_calls"]) == ("all_reduce", 8, 8)  # a rank, as its milliseconds
    assert kind["astra_ms"] == pytest.approx(kind["ours_ms"], rel=0.02)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as it is written for ASTRA-sim."""
    folder = tmp_path_factory.mktemp("exported")
    assert lumos_here("convert", EXAMPLE, "-o", folder / "job.et", "--for", "astra-sim").returncode == 0
    return folder


def price_over(folder: Path) -> Callable[[chakra_runs.Transfer], float]:
    """What a collective takes over the links of a network file, by our account of ASTRA-sim."""
    network = yaml.safe_load((folder / "job.network.yml").read_text())
    link = GIB * network["bandwidth"][0], network["latency"][0]

    def price(found: chakra_runs.Transfer) -> float:
        transfer = CommNode(NodeType.COMM_COLL, found.bytes, COLLECTIVES[found.kind], "1")
        return transfer_ns(transfer, len(found.ranks), *link)

    return price


def test_every_transfer_costs_what_astra_sim_made_of_it(exported: Path) -> None:
    """Its log has every node; of a collective, the rank that came last has waited for nobody."""
    took = {(node.rank, node.id): node.end_ns - node.start_ns for node in read_astra_sim_log(KEPT).nodes}
    price, files = price_over(exported), chakra_runs.ChakraRun.read(exported / "job.et")
    assert len(files.transfers) == 8
    for found in files.transfers:
        assert price(found) == pytest.approx(min(took[place] for place in found.nodes), rel=0.01)


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_exported_files_at_the_prices_of_astra_sim_take_as_long_as_it_said(exported: Path, one_at_a_time: bool) -> None:
    price, files = price_over(exported), chakra_runs.ChakraRun.read(exported / "job.et")
    said = read_astra_sim_log(KEPT).step_ns / 1e6
    assert files.ms(price, one_at_a_time) == pytest.approx(said, rel=0.005)
    assert files.ms(lambda found: 3 * price(found), one_at_a_time) > 1.5 * said  # the network does decide this job


@pytest.mark.parametrize(("ranks", "stride"), [(4, 1), (8, 1), (4, 2)])
def test_exchanges_in_a_node_are_told_so_that_the_ring_of_astra_sim_takes_as_long(ranks: int, stride: int) -> None:
    """In a group of some ranks, on several dimensions, it takes n(n - 1)/2 steps of a part for one rank."""
    links = [Dimension(8, 400.0, 0.0), Dimension(4, 50.0, 0.0)]
    exchange = CommNode(NodeType.COMM_COLL, 1 << 24, COLLECTIVES["all_to_all"], "1")
    told = as_ring(exchange, ranks, stride, links)
    ring_ns = ranks * (ranks - 1) / 2 * told.bytes / ranks / links[0].gb_s
    assert ring_ns == pytest.approx(transfer_ns(exchange, ranks, links[0].gb_s, 0.0, handshake=0), rel=1e-3)


def test_exchanges_between_nodes_are_told_by_what_leaves_a_node() -> None:
    """The ring is priced by the links inside a node; half of every rank's data goes to the other one."""
    links = [Dimension(8, 400.0, 0.0), Dimension(4, 50.0, 0.0)]
    exchange = CommNode(NodeType.COMM_COLL, 1 << 24, COLLECTIVES["all_to_all"], "1")
    told = as_ring(exchange, 16, 1, links)
    assert 16 * 15 / 2 * told.bytes / 16 / 400.0 == pytest.approx(0.5 * exchange.bytes / 50.0, rel=1e-3)


@pytest.mark.parametrize(("tensor", "pieces"), [(1 << 20, 1), ((1 << 32) - 2, 1), (17_114_071_040, 4)])
def test_no_message_is_longer_than_32_bits_can_say(tmp_path: Path, tensor: int, pieces: int) -> None:
    """ASTRA-sim waits for ever for a longer one if its sender waits for the receiver (`SimSendCaller` has an int)."""
    write_astra_files(tmp_path / "job.et", [Dimension(2, 50.0, 500.0)], {}, tensor)
    assert json.loads((tmp_path / "job.system.json").read_text())["preferred-dataset-splits"] == pieces
    assert tensor / 2 / pieces < 1 << 31  # a ring of two ranks has the longest messages: half of the tensor


@pytest.mark.parametrize(
    ("ranks", "apart"),
    [
        ((4, 5), 1), ((0, 8), 1), (range(8), 1),  # inside a node, or at the same place in two
        ((4, 8), 8), ((0, 12), 8),  # ASTRA-sim sends these over the links inside a node
        ((0, 4, 8, 12), 4), (range(0, 16, 2), 2),  # two and four ranks of a node bring their links
    ],
)  # fmt: skip
def test_what_leaves_a_node_takes_as_long_as_over_the_links_outside(ranks: Sequence[int], apart: float) -> None:
    assert links_apart(ranks, [Dimension(8, 400.0, 0.0), Dimension(2, 50.0, 0.0)]) == apart


def test_messages_and_collectives_of_stages_are_told_by_the_links_between_their_ranks() -> None:
    links = [Dimension(8, 400.0, 0.0), Dimension(2, 50.0, 0.0)]
    kinds = (Task("", 1.0, (), CommNode(NodeType.COMM_COLL, 8, group=kind)) for kind in ("2x4", "4x1", "16x1"))
    told = CompensatedSizes(Workload(RankPlaces(4, 4, 4, copies=2), (tuple(kinds),)), links)
    sides = [CommNode(kind, 1000, source=1, destination=2) for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV)]
    assert [told.of(side, stage).bytes for side, stage in zip(sides, (1, 2), strict=True)] == [8000, 8000]
    assert told.of(CommNode(NodeType.COMM_SEND, 1000, source=0, destination=1), 0).bytes == 1000
    most = told.of(sides[0]._replace(bytes=1 << 29), 1)
    assert most.bytes == (1 << 31) - 1, "no more, or ASTRA-sim would not end"
    assert "faster in ASTRA-sim" in too_long([most])[0]
    assert "does not end" in too_long([told.of(sides[0]._replace(bytes=1 << 32), 1)])[0]
    mirrored = CommNode(NodeType.COMM_COLL, 1000, COLLECTIVES["all_reduce"], "2x4")  # of stages 0 and 3
    assert [told.of(mirrored, stage).bytes for stage in (0, 3)] == [8000, 8000]
    assert told.of(mirrored._replace(group="4x1"), 0).bytes == 1000
    assert told.of(mirrored._replace(group="16x1"), 0).bytes == 1000  # of all: it uses every dimension


@pytest.mark.parametrize(("ranks", "told"), [(8192, False), (32_768, True)])
def test_more_groups_than_astra_sim_can_number_are_told(ranks: int, told: bool) -> None:
    reduced = CommNode(NodeType.COMM_COLL, 1 << 24, COLLECTIVES["all_reduce"], "8x1")
    stages = Workload(RankPlaces(1, ranks, ranks), ((Task("all_reduce", 1.0, (), reduced),),))
    assert bool(too_many_groups(stages.groups())) == told


def test_other_collectives_keep_their_size() -> None:
    reduced = CommNode(NodeType.COMM_COLL, 1 << 24, COLLECTIVES["all_reduce"], "1")
    assert as_ring(reduced, 8, 1, [Dimension(8, 400.0, 0.0), Dimension(4, 50.0, 0.0)]) == reduced


# ---------------------------------------------------------------------- what ASTRA-sim cannot express
def overlapping(transfers: int = 2) -> Workload:
    """A rank of eight that issues so many reductions at once, each of another group."""
    sent = [CommNode(NodeType.COMM_COLL, 10**9, COLLECTIVES["all_reduce"], f"{2**i}x{8 // 2**i}") for i in (1, 2, 3)]
    tasks = [Task("work", 1e8, ()), *(Task("all_reduce", 5e6, (0,), one) for one in sent[:transfers])]
    return Workload(RankPlaces(1, 8, 8), ((*tasks, Task("work", 1e7, tuple(range(1, transfers + 1)))),))


def test_overlapped_transfers_are_estimated_one_after_the_other() -> None:
    links = [Dimension(8, 100.0, 0.0)]
    estimate = estimated(overlapping(), overlapping(), links)
    assert estimate is not None
    reduced = CommNode(NodeType.COMM_COLL, 10**9, COLLECTIVES["all_reduce"], "1")
    took = [transfer_ns(reduced, ranks, 100.0, 0.0) for ranks in (2, 4)]
    assert estimate.own_ms == pytest.approx(115)
    assert estimate.its_links_ms == pytest.approx(110 + max(took) / 1e6)
    assert estimate.one_at_a_time_ms == pytest.approx(110 + sum(took) / 1e6)
    (warning,) = estimate.warnings
    assert f"{sum(took) / 1e6 + 110:.1f} ms" in warning
    assert "one collective or send at a time" in warning


def test_an_export_that_astra_sim_can_express_has_no_warning() -> None:
    plain = overlapping(1)
    took = transfer_ns(CommNode(NodeType.COMM_COLL, 10**9, COLLECTIVES["all_reduce"], "1"), 2, 100.0, 0.0)
    same = replace(plain, tasks=(tuple(t._replace(ns=took) if t.transfer else t for t in plain.tasks[0]),))
    estimate = estimated(same, same, [Dimension(8, 100.0, 0.0)])
    assert estimate is not None
    assert (estimate.warnings, round(estimate.difference_pct, 3)) == ([], 0.0)


def test_tasks_that_wait_for_each_other_for_ever_have_no_estimate() -> None:
    receive = Task("p2p", 1.0, (), CommNode(NodeType.COMM_RECV, 8, source=1, destination=0, tag=1))
    stages = Workload(RankPlaces(2, 1, 1), ((receive,), ()))
    assert estimated(stages, stages, [Dimension(2, 100.0, 0.0)]) is None


@pytest.mark.parametrize("run", json.loads(benchmark.KEPT.read_text())["described"], ids=lambda run: run["name"][:20])
def test_estimates_agree_with_what_astra_sim_made_of_described_runs(tmp_path: Path, run: dict[str, Any]) -> None:
    """By ratios: what is predicted may change after the runs were made."""
    (tmp_path / "setup.toml").write_text(run["setup"])
    predicted = predict(read_setup(tmp_path / "setup.toml")).run
    assert isinstance(predicted, DescribedRun)
    estimate = of_described(predicted, described_workload(predicted)).estimate
    assert estimate is not None
    assert estimate.one_at_a_time_ms / estimate.own_ms == pytest.approx(run["astra_ms"] / run["predicted_ms"], rel=0.02)


CP = """model = {preset = "llama3-8b", layers = 8}
train = {seq = 8192, micro_batch = 1, global_batch = 16}
parallel = {tp = 2, cp = 4, zero = 1}
cluster = {gpu = "h100", gpus = 16}
"""


def test_convert_and_compare_say_what_the_overlap_costs(tmp_path: Path) -> None:
    (tmp_path / "cp.toml").write_text(CP)
    done = lumos_here("convert", tmp_path / "cp.toml", "-o", tmp_path / "cp.et", "--for", "astra-sim", "--json")
    answer = json.loads(done.stdout)
    estimate = answer["estimate"]
    assert estimate["one_at_a_time_ms"] > 1.01 * estimate["its_links_ms"]
    assert any("one collective or send at a time" in text for text in answer["warnings"])
    ns = round(1e6 * estimate["one_at_a_time_ms"])
    (tmp_path / "log").write_text("".join(finished(rank, ns, 0, statistics=False) for rank in range(16)) + END)
    for run in (tmp_path / "cp.toml", tmp_path):
        compared = json.loads(lumos_here("compare", run, tmp_path / "log", "--json").stdout)
        assert compared["estimate"]["one_at_a_time_ms"] == pytest.approx(estimate["one_at_a_time_ms"], rel=0.01)
        assert compared["unexplained_ms"] == pytest.approx(0.0, abs=0.01 * estimate["own_ms"])
        assert any("one collective or send at a time" in text for text in compared["warnings"])


def test_a_recorded_rank_that_stands_for_all_is_compared_with_all(tmp_path: Path) -> None:
    recorded = EXAMPLE / "rank0.json.gz"
    for name in ("rank2.et", "tp2_pp2.et"):
        folder = tmp_path / name
        folder.mkdir()
        assert lumos_here("convert", recorded, "-o", folder / name, "--for", "astra-sim").returncode == 0
        assert "replay of 4 rank(s)" in lumos_here("replay", folder).stdout
    answer = json.loads(lumos_here("compare", recorded, KEPT, "--json").stdout)
    assert [pair["rank"] for pair in answer["ranks"]] == [0, 1, 2, 3]
    assert len({pair["ours_ms"] for pair in answer["ranks"]}) == 1


# ---------------------------------------------------------------------- the benchmark
def test_the_page_is_written_from_the_kept_results() -> None:
    assert benchmark.page(json.loads(benchmark.KEPT.read_text())) == (ROOT / "docs/astra_sim.md").read_text("utf-8")


def test_kept_results_agree_where_transfers_are_steady_and_are_explained_by_one_rule_elsewhere() -> None:
    kept = json.loads(benchmark.KEPT.read_text())
    recorded, described = kept["jobs"], kept["described"]
    steady = [job for job in recorded if "rates" in job and job["rates"][1] <= benchmark.STEADY * job["rates"][0]]
    assert len(steady) >= 4
    for job in steady:
        assert job["astra_ms"] == pytest.approx(job["ours_ms"], rel=0.04), job["name"]
    for job in recorded:
        explained = job.get("one_at_a_time_ms", job["ours_ms"])
        assert job["astra_ms"] == pytest.approx(explained, rel=0.04), job["name"]
        assert job["statistics"], job["name"]
    alone = [run for run in described if run["lent_one_at_a_time_ms"] < 1.04 * run["lent_ms"]]  # no transfers overlap
    assert {"DDP", "TP", "MoE"} <= {run["name"].split()[0].strip(",") for run in alone}
    for run in alone:
        assert run["astra_ms"] == pytest.approx(run["ideal_ms"], rel=0.04), run["name"]
    for run in described:
        assert run["astra_ms"] == pytest.approx(run["lent_one_at_a_time_ms"], rel=0.06), run["name"]


@pytest.mark.parametrize("after", ["\n", "real 0m2.1s\n", "$ \n\n"])
def test_lines_that_astra_sim_did_not_log_after_its_end_change_nothing(tmp_path: Path, after: str) -> None:
    log = tmp_path / "log"
    log.write_text(KEPT.read_text() + END + after)
    assert read_astra_sim_log(log).ranks == read_astra_sim_log(KEPT).ranks


def test_the_benchmark_without_the_program_ends_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/astra_sim.py", "--bin", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
