"""Runs without a GPU: operators are the kernels, calls to them block, and gloo moves the data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lumos import Replay, Scale, read_job, replay
from lumos.analysis.comparison import Comparison
from lumos.analysis.kernel_labels import KernelPhase, label
from lumos.analysis.readiness import Readiness
from lumos.costs.operator_model import cost_model
from lumos.errors import OptionError
from lumos.graph.graph import Rule
from lumos.graph.rules.cpu_device import is_cpu_run, with_cpu_device
from lumos.prediction.bill import Tariff
from lumos.prediction.prediction import predict
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.page import write_page
from lumos.report.html.prediction_page import prediction_page
from lumos.report.html.replay_page import replay_page
from lumos.report.predictions import flat_row
from lumos.report.terminal.show import show_comparison, show_readiness, show_replay
from lumos.setup.gpus import gpu_named, gpu_names
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_plain
from lumos.trace.names import Category, Kind
from lumos.traced.infer.completion import changed, complete
from lumos.traced.infer.infer import infer
from lumos.traced.learned import CalibratedRun
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


def test_faster_compute_and_faster_exposed_communication_shorten_a_cpu_run(two: Replay) -> None:
    free, faster, slow = (
        predict(two, [Scale(what, factor)]).step_ms for what, factor in (("comm", 0), ("compute", 0.5), ("comm", 100))
    )
    assert faster < two.clean_ms
    assert free < two.clean_ms < slow


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
    edges, nodes = two.execution.graph.edges, two.execution.nodes
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


# Another configuration of a run without a GPU

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
HOST = 10.0  # between two operators
PARAMETER_US = 0.002  # of the update, and of the sum of gradients


def described(ranks: int = 2, layers: int = 2) -> Setup:
    return Setup.model_validate(
        {
            "model": {"layers": layers, "hidden": 256, "ffn": 704, "heads": 4, "vocab": 512},
            "train": {"seq": 128, "micro_batch": 4, "precision": "fp32"},
            "parallel": {"dp": ranks, "dp_overlap": False},
            "cluster": {"gpu": "cpu"},
        }
    )


class Thread:
    """The one thread of a rank: operators one after the other, the host between them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0.0

    def does(self, *work: tuple[str, float], engine: bool = False) -> None:
        for name, us in work:
            if engine:
                self.events.append(op("autograd::engine::evaluate_function: Backward0", self.now, us + 2))
            self.events.append(op(name, self.now + 1, us))
            self.now += us + HOST

    def sums(self, us: float) -> None:
        """Gradients, by gloo, and waits for it."""
        self.events += [op("c10d::allreduce_", self.now, HOST), gloo(self.now + HOST, us)]
        self.now += HOST + us + HOST


def trained(layers: int) -> list[Event]:
    """One step of a model of so many layers, with an update and a sum of gradients that go with its parameters."""
    model = described(layers=layers).model
    us = PARAMETER_US * model.parameters(128)
    thread = Thread()
    layer = (("aten::mm", 1000.0), (ATTENTION, 500.0), ("aten::mm", 1000.0))
    back = (("aten::mm", 2000.0), (ATTENTION + "_backward", 1000.0), ("aten::mm", 2000.0))
    thread.does(("aten::embedding", 100.0), *layer * layers, ("aten::mm", 600.0))
    thread.does(("aten::mm", 1200.0), *back * layers, ("aten::embedding_dense_backward", 100.0), engine=True)
    thread.sums(us)
    began = thread.now
    thread.does(("aten::add_", us))
    return [
        *thread.events, note("Optimizer.step#AdamW.step", began, thread.now - began),
        note("ProfilerStep#3", 0, thread.now),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CalibratedRun:
    return CalibratedRun(job(tmp_path_factory.mktemp("traces"), trained(2), trained(2)), described())


def test_a_run_that_is_not_changed_takes_what_it_took(source: CalibratedRun) -> None:
    assert predict(source, setup=described()).step_ms == pytest.approx(source.run.clean_ms, rel=1e-6)


@pytest.mark.parametrize("layers", [1, 4, 8])
def test_another_number_of_layers_is_predicted_as_it_would_be_recorded(
    source: CalibratedRun, layers: int, tmp_path: Path
) -> None:
    recorded = job(tmp_path, trained(layers), trained(layers))
    assert predict(source, setup=described(layers=layers)).step_ms == pytest.approx(recorded.clean_ms, rel=0.02)


def test_more_ranks_wait_longer_for_their_sum_and_compute_what_they_did(source: CalibratedRun) -> None:
    two, four = (predict(source, setup=described(ranks)) for ranks in (2, 4))
    sums = PARAMETER_US * described().model.parameters(128) / 1e3
    assert four.step_ms - two.step_ms == pytest.approx(0.5 * sums, rel=0.02)  # a ring sends 3/4 twice, not 1/2
    assert any("share cores" in warning for warning in four.warnings)


def test_the_host_is_what_is_left_of_a_thread_that_calls_and_waits(source: CalibratedRun) -> None:
    (labels, _) = label(source.run)
    for phase in (KernelPhase.FORWARD, KernelPhase.BACKWARD):  # gradients are summed after both, and count as forward
        worked = np.diff(labels.launched[labels.of(phase)])
        assert ((worked > 0) & (worked <= HOST)).all()  # less the profiler's part
    assert 0 < labels.optimizer_us <= HOST


def test_what_is_not_known_of_a_cpu_is_not_answered(source: CalibratedRun, tmp_path: Path) -> None:
    found = predict(source, setup=described(4), tariff=Tariff(gpu_hour=1.0, tokens=1e9))
    answer = found.as_dict()
    assert [answer[key] for key in ("mfu", "hfu", "energy_j", "fits")] == [None] * 4
    assert (answer["bill"]["joules_per_step"], answer["bill"]["budget"]["kwh"]) == (None, None)
    assert answer["bill"]["money_per_step"] == pytest.approx(4 * found.step_ms / 3.6e6)
    assert any("CPU are not known" in warning for warning in answer["warnings"])
    assert {card.label for card in prediction_page(found).cards}.isdisjoint({"MFU", "energy"})
    write_page(tmp_path / "page.html", prediction_page(found))


def test_a_host_whose_memory_is_stated_has_room_or_not(source: CalibratedRun) -> None:
    small, large = (predict(source, setup=described().replaced({"cluster.memory_gib": gib})) for gib in (0.01, 100.0))
    assert (small.as_dict()["fits"], large.as_dict()["fits"]) == (False, True)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("parallel.tp", 2, "parallel.tp = 2: the traced run had none"),
        ("cluster.gpu", "h200", "cluster.gpu = h200 cannot be predicted from a trace of cpu"),
    ],
)
def test_what_the_trace_of_a_cpu_cannot_tell_is_refused(source: CalibratedRun, key: str, value: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        predict(source, setup=described().replaced({key: value}))


def test_power_has_no_price_where_it_is_not_known(source: CalibratedRun) -> None:
    with pytest.raises(OptionError, match=r"--kwh-price 0\.3: the power of a CPU is not known"):
        predict(source, setup=described(), tariff=Tariff(kwh=0.3))


def test_one_rank_says_nothing_of_what_several_would_send(tmp_path: Path) -> None:
    alone = CalibratedRun(job(tmp_path, [e for e in trained(2) if "reduce" not in e["name"]]), described(1))
    with pytest.raises(OptionError, match=r"parallel\.dp = 2: the traced run had none"):
        predict(alone, setup=described(2))


def test_without_a_trace_or_samples_a_cpu_is_refused_and_no_name_suggests_it() -> None:
    with pytest.raises(OptionError, match=r"only known from a trace .* or from samples"):
        predict(described())
    with pytest.raises(OptionError, match=r"only known from a trace .* or from samples"):
        cost_model("cpu")
    assert gpu_named("CPU").is_cpu
    assert "cpu" not in gpu_names()


def test_a_trace_tells_that_it_is_of_a_cpu(source: CalibratedRun) -> None:
    told = infer(source.run)
    assert told["cluster.gpu"].value == "cpu"
    assert is_cpu_run(source.run.execution.trace)
    with pytest.raises(OptionError, match=r"cluster\.gpu = h200, and the trace shows cpu"):
        complete(told, read_plain(None, ["cluster.gpu=h200"]))
    assert changed(told, read_plain(None, ["model.layers=2", "model.hidden=256", "model.ffn=704", "model.heads=4",
                                           "model.vocab=512", "train.seq=128"])).setup.cluster.gpu == "cpu"  # fmt: skip


# ---------------------------------------------------------------------- what is said of it


def test_nothing_that_is_shown_of_a_cpu_run_speaks_of_gpus(two: Replay, tmp_path: Path) -> None:
    write_page(tmp_path / "replay.html", replay_page(two))
    write_page(tmp_path / "compare.html", comparison_page(Comparison(two, two)))
    text = "".join((tmp_path / name).read_text() for name in ("replay.html", "compare.html"))
    shown = re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    with (tmp_path / "terminal.txt").open("w") as file:
        console = Console(file=file, width=160)
        show_replay(two, console)
        show_comparison(Comparison(two, two), console)
        show_readiness(Readiness(two), "traces", console)
    shown += (tmp_path / "terminal.txt").read_text()
    assert "CPU time by operator" in shown
    assert re.findall(r"[^\n]*(?:GPU|CUPTI|CUDA|NCCL)[^\n]*", shown) == []


def test_a_collective_of_unknown_size_is_said_to_be_and_not_of_minus_nothing(two: Replay) -> None:
    names = [one.name for one in Comparison(two, two).collectives]
    assert names == ["all_reduce, 2 ranks, size unknown"]


# ---------------------------------------------------------------------- what an answer holds


def test_a_run_that_is_not_changed_goes_where_the_recorded_one_went(source: CalibratedRun) -> None:
    found = predict(source, setup=source.setup)
    assert found.baseline_breakdown is not None
    assert found.breakdown.as_dict() == pytest.approx(found.baseline_breakdown.as_dict(), abs=1e-3)


def test_the_parts_of_a_changed_run_add_up_and_grow_from_the_recorded_ones(source: CalibratedRun) -> None:
    found = predict(source, setup=source.setup.replaced({"model.layers": 2 * source.setup.model.layers}))
    assert found.breakdown.step_ms == pytest.approx(found.step_ms, rel=1e-6)
    assert found.baseline_breakdown is not None
    assert found.breakdown.compute_ms > 1.3 * found.baseline_breakdown.compute_ms


def test_an_answer_states_its_setup_and_what_was_recorded(source: CalibratedRun) -> None:
    answer = predict(source, setup=source.setup, notes=("a note",)).as_dict()
    assert answer["setup"]["cluster"]["gpus"] == source.setup.cluster.gpus
    assert answer["setup"]["parallel"]["tp"] == 1
    assert answer["baseline_breakdown"].keys() == answer["breakdown"].keys()
    row = flat_row(answer)
    assert row["interval_low_ms"] < row["step_ms"] < row["interval_high_ms"]
    assert row["parallel.dp"] == source.setup.parallel.dp
    assert row["memory_peak_gib"] > 0
    assert "a note" in row["notes"]
    assert all(isinstance(value, bool | int | float | str) for value in row.values())
