"""`lumos synthesise`: what a synthetic run preserves, that it holds no original, and that simulators run it."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

import astra_rules
from commands import lumos_here
from lumos.analysis.replay import replay
from lumos.chakra.file_format import NodeType
from lumos.chakra.run_writer import write_chakra
from lumos.errors import InputError, OptionError
from lumos.read.job import read_job
from lumos.synthesis import lanes
from lumos.synthesis.distance import _apart, kernel_tasks
from lumos.synthesis.draw import draw_step, matched
from lumos.synthesis.generate import Size, generate
from lumos.synthesis.lanes import members_of
from lumos.synthesis.learn import learn
from lumos.synthesis.model import LEVELS, Marginal, Model, read_model, save_model
from lumos.synthesis.observe import Group, Job, ObservedRank, Task, observe
from lumos.synthesis.originals import longest_run, nearness
from lumos.synthesis.synthesise import RecordedJob, Synthetic, record, synthesise
from lumos.synthesis.vocabulary import KINDS
from support import header, training_run, write_trace

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"


@pytest.fixture(scope="module")
def first() -> RecordedJob:
    return record("example", read_job(EXAMPLE), [0])


@pytest.fixture(scope="module")
def second() -> RecordedJob:
    return record("example, later", read_job(EXAMPLE), [1])


@pytest.fixture(scope="module")
def made(first: RecordedJob, second: RecordedJob) -> Synthetic:
    return synthesise([first], against=[second])


@pytest.fixture(scope="module")
def model(first: RecordedJob) -> Model:
    return learn([first.job])


def of_two_ranks(shared_data: Path, name: str) -> RecordedJob:
    return record(name, read_job(shared_data / "h200/multirank" / name, "rank?.pt.trace.json.gz"), [0])


@pytest.fixture(scope="module")
def two_depths(shared_data: Path) -> list[RecordedJob]:
    return [of_two_ranks(shared_data, name) for name in ("ddp2_l8", "ddp2_l16")]


# ---------------------------------------------------------------------- what is preserved
def test_a_step_that_was_not_learned_from_is_met(made: Synthetic) -> None:
    held_out = made.distances[0]
    assert held_out.reference == "example, later"
    assert abs(held_out.step_pct) < 8.0  # the two recorded steps differ by 5.4 %
    assert held_out.breakdown_points < 5.0


def test_the_step_and_its_parts_are_those_of_what_was_learned(made: Synthetic) -> None:
    learned = made.distances[1]
    assert abs(learned.step_pct) < 5.0
    assert learned.breakdown_points < 3.0
    assert learned.synthetic.tasks == pytest.approx(learned.recorded.tasks, rel=0.02)


def test_collectives_are_as_many_and_as_large(made: Synthetic) -> None:
    learned = made.distances[1]
    assert learned.synthetic.collectives.keys() == learned.recorded.collectives.keys() == {"all_reduce"}
    count, size = learned.recorded.collectives["all_reduce"]
    assert learned.synthetic.collectives["all_reduce"][0] == count
    assert learned.synthetic.collectives["all_reduce"][1] == pytest.approx(size, rel=0.05)


def test_a_rank_that_does_more_than_the_others_still_does(made: Synthetic, first: RecordedJob) -> None:
    recorded = [len(rank.tasks) for rank in first.observed[0].ranks]
    assert recorded[2] > 1.5 * recorded[0]
    synthetic = [len(rank.tasks) for rank in made.observed[0].ranks]
    assert synthetic == pytest.approx(recorded, rel=0.05)


def with_ranks(job: RecordedJob, change: Callable[[ObservedRank], ObservedRank]) -> Job:
    steps = [replace(step, ranks=[change(rank) for rank in step.ranks]) for step in job.observed]
    return Job("changed", steps)


@pytest.mark.parametrize("late", [1, 2])  # 2 does other work than the rest, so it has a model of its own
def test_a_rank_that_begins_every_step_late_stays_the_late_one(first: RecordedJob, model: Model, late: int) -> None:
    changed = learn([with_ranks(first, lambda rank: replace(rank, lead=rank.lead + 3e7 * (rank.rank == late)))])
    usual, run = (replay(generate(one, Size(steps=2))) for one in (model, changed))
    gained = run.recorded_steps.mean - usual.recorded_steps.mean
    assert 20 < gained < 31  # without 2, the others were 7 ms faster
    assert max(run.stragglers, key=lambda one: one.costs_others_ms).rank == late
    leads = np.array([[rank.lead / 1e6 for rank in step.ranks] for step in observe(run)])
    assert (leads[:, late] > 25).all()
    assert (np.delete(leads, late, axis=1) < 1).all()


def test_a_rank_that_is_learned_alone_keeps_its_pause_before_the_first_task(tmp_path: Path) -> None:
    events = training_run(steps=1)
    for event in events:
        if event["name"] == "ProfilerStep#0":
            event["ts"], event["dur"] = event["ts"] - 5000, event["dur"] + 5000
    write_trace(tmp_path / "late.json", events, header(0, 1))
    job = record("late", read_job(tmp_path / "late.json"))
    assert job.observed[0].ranks[0].lead == pytest.approx(5e6, rel=0.01)
    assert job.observed[0].ranks[0].tasks[0].work == 0
    made = synthesise([job], Size(steps=3))
    assert made.run.recorded_steps.mean == pytest.approx(job.runs[0].recorded_steps.mean, rel=0.03)


def test_runs_that_recorded_different_ranks_are_learned_together(first: RecordedJob) -> None:
    step = first.observed[0]
    jobs = [Job(str(i), [replace(step, ranks=step.ranks[i : i + 2])]) for i in (0, 2)]
    model = learn(jobs)
    assert len(model.by_rank) == 4
    assert all(rank.lead.mean > 0 and 0.5 < rank.host < 2 for rank in model.by_rank)
    assert replay(generate(model)).recorded_steps.mean > 0


def test_a_rank_with_slow_kernels_or_a_slow_host_stays_that_rank(first: RecordedJob) -> None:
    def slower(rank: ObservedRank) -> ObservedRank:
        host, gpu = 1 + (rank.rank == 0), 1 + 0.5 * (rank.rank == 3)

        def task(one: Task) -> Task:
            return one._replace(work=host * one.work, busy=one.busy * (gpu if one.state.group < 0 else 1.0))

        return replace(rank, blocks=[replace(b, tasks=[task(one) for one in b.tasks]) for b in rank.blocks])

    job = with_ranks(first, slower)
    (step,) = observe(replay(generate(learn([job]))))
    for total in (host_of, gpu_of):
        recorded, synthetic = ([total(rank) for rank in one.ranks] for one in (job.steps[0], step))
        assert synthetic == pytest.approx(recorded, rel=0.07)
        assert max(recorded) > 1.3 * min(recorded)


def host_of(rank: ObservedRank) -> float:
    return sum(task.work + task.call for task in rank.tasks)


def gpu_of(rank: ObservedRank) -> float:
    return sum(task.busy for task in rank.tasks if task.state.group < 0)


def test_what_the_last_layer_does_not_do_stays_with_the_others(first: RecordedJob) -> None:
    def without(rank: ObservedRank) -> ObservedRank:
        middle = [b for b in rank.blocks if (b.phase, b.place) == ("forward", "middle")]
        bare = replace(middle[-1], tasks=[task for task in middle[-1].tasks if task.state.kind != "set"])
        return replace(rank, blocks=[bare if b is middle[-1] else b for b in rank.blocks])

    run = replay(generate(learn([with_ranks(first, without)]), Size(steps=4)))
    for rank in (rank for step in observe(run) for rank in step.ranks if rank.rank != 2):
        middle = [b for b in rank.blocks if (b.phase, b.place) == ("forward", "middle")]
        assert [sum(task.state.kind == "set" for task in b.tasks) for b in middle] == [1, 0]


def test_stratified_draws_have_the_mean_of_their_distribution() -> None:
    quantiles = np.geomspace(1.0, 100.0, len(LEVELS)).tolist()
    for count in (1, 3, 50):
        levels = (np.arange(count) + 0.5) / count
        assert Marginal(0.0, 20.0, quantiles).at(levels).mean() == pytest.approx(20.0)
    some_zeros = Marginal(0.5, 20.0, quantiles).at((np.arange(50) + 0.5) / 50)
    assert (some_zeros == 0).sum() == 25


# ---------------------------------------------------------------------- no original
def test_no_original_is_reproduced(made: Synthetic) -> None:
    own, sibling = made.nearness["synthetic"], made.nearness["held out"]
    assert own.equal_tasks == 0.0
    assert own.longest_run <= sibling.longest_run
    assert own.median_distance > sibling.median_distance
    assert made.reproduces is False


def test_a_copy_of_an_original_would_be_found(first: RecordedJob) -> None:
    steps = kernel_tasks(first.observed)
    copy = nearness(steps[:1], steps)
    assert (copy.longest_run, copy.equal_tasks, copy.median_distance) == (len(steps[0]), 1.0, 0.0)
    assert longest_run(steps[0][10:40], steps[0]) == 30
    shifted = [task._replace(busy=1.005 * task.busy) for task in steps[0]]
    assert longest_run(shifted, steps[0]) > 20  # close is the same; equal it is not
    assert nearness([shifted], steps).equal_tasks < 0.01


def test_a_run_too_near_to_an_original_is_called_one(made: Synthetic, first: RecordedJob) -> None:
    copied = Synthetic(made.model, first.runs[0].execution, Size(), 0, made.originals, made.against)
    assert copied.reproduces is True


def secret_run(folder: Path) -> Path:
    for rank in (0, 1):
        events = training_run(rank=rank)
        for event in events:
            if event.get("cat") in ("kernel", "cpu_op", "user_annotation") and "ProfilerStep" not in event["name"]:
                event["name"] += "_zyxwv"
        write_trace(folder / f"zyxwv_rank{rank}.json", events, header(rank, 2))
    return folder


def test_no_name_of_a_trace_is_in_the_model_or_the_files(tmp_path: Path) -> None:
    source = secret_run(tmp_path)
    done = lumos_here("synthesise", source, "-o", tmp_path / "s.et", "--save", tmp_path / "m.json", "--json")
    assert done.returncode == 0, done.stderr
    written = [*tmp_path.glob("s.*.et"), tmp_path / "s.groups.json", tmp_path / "m.json"]
    assert len(written) == 4
    for file in written:
        assert b"zyxwv" not in file.read_bytes()
    states = [s for role in read_model(tmp_path / "m.json").roles for block in role.blocks for s in block.states]
    assert {state.kind for state in states} <= KINDS


def test_no_recorded_time_is_in_the_model(model: Model, first: RecordedJob) -> None:
    """Quantiles are smoothed, and means of few values blurred: none is a recorded value to three digits by design."""
    single = [
        (state, block)
        for role in model.roles
        for block in role.blocks
        for state in block.states
        if state.kind == "embedding" and state.columns["busy"].quantiles
    ]
    recorded = {round(t.busy / 1e3, 3) for rank in first.observed[0].ranks for t in rank.tasks}
    values = {q for state, _ in single for q in state.columns["busy"].quantiles}
    assert values
    assert len(values & recorded) <= len(values) // 10


# ---------------------------------------------------------------------- files
def test_files_read_back_replay_to_the_same_step(made: Synthetic, tmp_path: Path) -> None:
    write_chakra(tmp_path / "s.et", made.execution)
    back = replay(read_job(tmp_path))
    assert back.recorded_steps.mean == made.run.recorded_steps.mean
    assert back.error_pct == pytest.approx(0.0, abs=1e-6)
    assert back.execution.trace.ranks == [0, 1, 2, 3]
    assert back.as_dict()["clean_ms"] is None  # no profiler was there


def test_astra_sim_would_run_the_files(model: Model, tmp_path: Path) -> None:
    write_chakra(tmp_path / "s.et", generate(model, Size(ranks=8, steps=1)))
    workload = astra_rules.check(tmp_path, "s", host=True)
    assert len(workload.ranks) == 8
    assert list(workload.groups.values()) in ([], [list(range(8))])


def test_the_same_seed_draws_the_same_run_and_another_one_another(model: Model) -> None:
    one, same, other = (generate(model, seed=seed).graph.duration for seed in (3, 3, 4))
    assert np.array_equal(one, same)
    assert not np.array_equal(one[: len(other)], other[: len(one)])


def test_a_saved_model_draws_what_the_traces_did(model: Model, tmp_path: Path) -> None:
    save_model(tmp_path / "m.json", model)
    again = generate(read_model(tmp_path / "m.json"), seed=5)
    assert np.array_equal(again.graph.duration, generate(model, seed=5).graph.duration)


def test_a_model_needs_no_scipy_to_be_drawn_from(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_scipy(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "scipy":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    assert generate(model).graph.duration.sum() > 0
    with pytest.raises(OptionError, match=r"needs scipy: pip install 'lumos-sim\[fit\]'"):
        learn([])


# ---------------------------------------------------------------------- other sizes
def test_more_ranks_steps_and_layers(model: Model) -> None:
    run = replay(generate(model, Size(ranks=8, steps=3, layers=6)))
    assert len(run.marks.ranks) == 8
    assert len(run.marks.names) == 3
    assert {m.group_size for m in run.execution.trace.messages} == {8}
    shallow = generate(model, Size(ranks=8, steps=3, layers=3))
    assert len(run.execution.graph) > 1.4 * len(shallow.graph)


def test_two_depths_say_what_a_layer_adds(first: RecordedJob, model: Model) -> None:
    deeper = record("deeper", generate(model, Size(steps=1, layers=9)))
    assert deeper.job.layers == 9
    made = synthesise([first, deeper], Size(steps=1, layers=6))
    low, high = (job.behaviour.tasks for job in (first, deeper))
    assert made.distances[0].synthetic.tasks == pytest.approx((low + high) / 2, rel=0.05)
    assert made.warnings == []


def test_roles_that_meet_have_the_same_collectives_in_the_same_order(model: Model) -> None:
    steps = [draw_step(model, role, 3, 1, np.random.default_rng(0)) for role in range(len(model.roles))]
    assert len(steps) == 2
    kinds = [[state.kind for state in step.states if state.group >= 0] for step in matched(steps)]
    assert kinds[0] == kinds[1]


def test_a_single_rank_sends_nothing(model: Model) -> None:
    alone, both = (generate(model, Size(ranks=ranks, steps=1)).trace for ranks in (1, 2))
    assert alone.is_communication.sum() > 0
    assert alone.duration[alone.is_communication].sum() == 0
    assert both.duration[both.is_communication].min() > 0
    assert alone.end.max() < both.end.max()


def test_a_run_of_another_size_to_compare_with_is_said_to_be_one(first: RecordedJob, model: Model) -> None:
    other = record("larger", generate(model, Size(ranks=2, steps=1, layers=6)))
    (said,) = Synthetic(model, generate(model), Size(), 0, [first], [other]).warnings
    assert said == (
        "larger has 6 layers and 2 ranks, the synthetic run 3 layers and 4 ranks: compared as they are; "
        "--layers 6 --ranks 2 makes them alike"
    )


# ---------------------------------------------------------------------- mistakes
def test_distributions_are_as_far_apart_as_scipy_says() -> None:
    scipy = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(0)
    for sizes in draw.integers(1, 30, (50, 2)):
        one, other = (draw.integers(0, 9, size).astype(float) for size in sizes)
        assert _apart(one, other) == pytest.approx(scipy.ks_2samp(one, other).statistic)


def test_a_rank_that_launches_nothing_has_no_streams(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", training_run(), header(0, 2))
    host = [event for event in training_run(rank=1) if event.get("cat") in ("cpu_op", "user_annotation")]
    write_trace(tmp_path / "rank1.json", host, header(1, 2))
    assert synthesise([record("run", read_job(tmp_path))]).as_dict()["tasks"] > 0


def test_models_of_times_without_measure_are_refused(tmp_path: Path, model: Model) -> None:
    save_model(tmp_path / "wild.json", replace_struct(model, spread=replace_struct(model.spread, step=1e9)))
    with pytest.raises(InputError, match=r"spread\.step"):
        read_model(tmp_path / "wild.json")
    with pytest.raises(InputError, match="years"):
        synthesise(replace_struct(model, latency_us=1e15))


def test_a_seed_that_numpy_does_not_take_is_refused(model: Model) -> None:
    with pytest.raises(OptionError, match="--seed -1"):
        synthesise(model, seed=-1)


def test_nearness_to_originals_of_other_kinds_has_no_distance(model: Model) -> None:
    assert nearness([], []).as_dict()["median_distance"] is None


def test_ranks_of_a_group_share_the_messages_that_name_all_of_them(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message lists the ranks of its group: one for each rank would take the square of their number."""
    listed: list[int] = []

    def members(group: Group, leader: int) -> tuple[int, ...]:
        found = members_of(group, leader)
        listed.append(len(found))
        return found

    monkeypatch.setattr(lanes, "members_of", members)
    generate(model, Size(ranks=8))
    few = sum(listed)
    generate(model, Size(ranks=64))
    assert sum(listed) - few == 8 * few


def test_runs_that_would_take_minutes_are_refused(model: Model) -> None:
    for size in (Size(ranks=4000, steps=4), Size(micro_batches=40_000), Size(ranks=2000, steps=3)):
        with pytest.raises(OptionError, match="are generated at once"):
            generate(model, size)


def test_steps_without_computation_on_the_gpu_have_a_spread(tmp_path: Path) -> None:
    events = [e for e in training_run(steps=3) if e.get("cat") != "kernel" or "nccl" in e["name"].lower()]
    write_trace(tmp_path / "few.json", events, header(0, 1))
    assert 0 <= learn([record("few", read_job(tmp_path / "few.json")).job]).spread.step < 0.5


def test_mistakes_are_named(tmp_path: Path, model: Model) -> None:
    save_model(tmp_path / "m.json", model)
    text = (tmp_path / "m.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace('"matmul"', '"my secret kernel"'))
    (tmp_path / "old.json").write_text(text.replace('"version": 1', '"version": 99'))
    (tmp_path / "other.json").write_text('{"version": 1}')
    (tmp_path / "unknown.json").write_text(text.replace('"jobs":', '"runs":'))
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    for arguments, said in (
        ([tmp_path / "bad.json"], "not in the vocabulary"),
        ([tmp_path / "old.json"], "version 99 is not known"),
        ([tmp_path / "half.json"], "not a model of synthetic runs"),
        ([tmp_path / "m.json", EXAMPLE], "a learned model is given alone"),
        ([tmp_path / "unknown.json", "--report", tmp_path / "s.html"], "learned_from"),
        ([tmp_path / "none"], "no such file or folder"),
        ([tmp_path / "m.json", "--ranks", "100000", "--steps", "9999"], "tasks; at most"),
        ([tmp_path / "m.json", "--layers", "-1"], "--layers -1: give a number"),
        ([tmp_path / "m.json", "--seed", "-1"], "--seed -1: give a number from 0"),
        ([tmp_path / "m.json", "-o", tmp_path / "s.json"], "use .et"),
        ([tmp_path / "m.json", "--save", tmp_path / "s.txt"], f"--save {tmp_path / 's.txt'}: the extension must name"),
        ([tmp_path / "m.json", "--report", tmp_path / "none" / "s.html"], f"--report {tmp_path / 'none'}"),
        ([tmp_path / "m.json", "--step", "1"], "--step 1: chooses from recorded runs, and m.json is a learned model"),
        ([tmp_path / "other.json"], ", or a model that lumos synthesise --save wrote"),
    ):
        done = lumos_here("synthesise", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert said in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


def test_jobs_that_communicate_differently_are_refused(first: RecordedJob, tmp_path: Path) -> None:
    write_trace(tmp_path / "alone.json", [e for e in training_run() if "nccl" not in e["name"].lower()], header(0, 1))
    other = record("alone", read_job(tmp_path / "alone.json"))
    with pytest.raises(InputError, match=r"alone: its communication \(none\) is not that of example"):
        learn([first.job, other.job])


@pytest.mark.data
def test_replicas_and_shards_of_layers_are_refused_together(shared_data: Path, two_depths: list[RecordedJob]) -> None:
    """Both do nothing but all-reduces among two ranks; those of shards are in forward passes, too."""
    shards = of_two_ranks(shared_data, "tp2_l8")
    with pytest.raises(InputError, match=r"tp2_l8: its communication \(all_reduce \(also in forward passes\) among 2"):
        learn([two_depths[0].job, shards.job])


def test_layers_are_refused_where_there_are_none(tmp_path: Path) -> None:
    write_trace(tmp_path / "run.json", training_run(), header(0, 1))
    job = record("run", read_job(tmp_path / "run.json"))
    with pytest.raises(OptionError, match="--layers 8: the traces have no attention"):
        synthesise([job], Size(layers=8))


# ---------------------------------------------------------------------- answers
def test_the_answer_as_json_table_and_page(tmp_path: Path) -> None:
    page, source = tmp_path / "r.html", secret_run(tmp_path)
    done = lumos_here("synthesise", source, "--against", source, "--report", page, "--json")
    answer = json.loads(done.stdout)
    assert answer["ranks"] == 2
    assert set(answer["nearness"]) == {"synthetic", "originals among each other"}
    said = f"{source.name} has steps that were learned from: nearness leaves them out, as no yardstick"
    assert said in answer["warnings"]
    assert {"step_pct", "breakdown", "path", "collectives", "durations_apart"} <= set(answer["distances"][0])
    assert "Is an original reproduced?" in page.read_text("utf-8")
    shown = lumos_here("synthesise", source).stdout
    assert "what is preserved" in shown
    assert "how near to the originals" in shown
    assert "learned from 1 job, 2 steps" in shown


# ---------------------------------------------------------------------- recorded jobs
@pytest.mark.data
def test_a_pipeline_keeps_its_schedule_and_its_step(shared_data: Path, tmp_path: Path) -> None:
    trace = read_job(shared_data / "h200/multirank/pp2_mb4", "rank?.pt.trace.json.gz")
    made = synthesise([record("pp2", trace)])
    assert made.model.pipeline is not None
    assert (made.model.pipeline.schedule, made.model.pipeline.stages, made.model.micro_batches) == ("1f1b", 2, 4)
    assert abs(made.distances[0].step_pct) < 8.0  # its recorded steps differ by 4 %, its parts by 14 points
    write_chakra(tmp_path / "s.et", generate(made.model, Size(steps=1, micro_batches=6)), fold_host=True)
    workload = astra_rules.check(tmp_path, "s")
    assert sum(node.type == NodeType.COMM_SEND for _, node in workload.nodes) == 12


@pytest.mark.data
@pytest.mark.parametrize("name", ["fsdp2_l8", "dp2_tp2_l8"])
def test_jobs_of_several_ranks_keep_their_step(shared_data: Path, tmp_path: Path, name: str) -> None:
    trace = read_job(shared_data / "h200/multirank" / name, "rank?.pt.trace.json.gz")
    made = synthesise([record(name, trace, [0])])
    assert abs(made.distances[0].step_pct) < 5.0
    assert made.distances[0].breakdown_points < 5.0
    write_chakra(tmp_path / "s.et", made.execution, fold_host=True)
    astra_rules.check(tmp_path, "s")


@pytest.mark.data
@pytest.mark.parametrize("layers", [8, 16])
def test_two_depths_say_how_many_collectives_there_are(two_depths: list[RecordedJob], layers: int) -> None:
    """Buckets of gradients go across layers: 8 layers have 9 of them, 16 have 16."""
    made = synthesise(two_depths, Size(layers=layers))
    own, recorded = made.distances[0].synthetic, two_depths[layers == 16].behaviour
    assert own.collectives["all_reduce"][0] == recorded.collectives["all_reduce"][0] == {8: 9, 16: 16}[layers]
    assert own.collectives["all_reduce"][1] == pytest.approx(recorded.collectives["all_reduce"][1], rel=0.03)
