"""Distributions of steps: what is learned from traces, operation tables and step times, and steps drawn from it."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest

from commands import lumos_here
from lumos import predict, read_job, replay
from lumos.analysis.replay import Replay
from lumos.errors import InputError
from lumos.graph.graph import simulate
from lumos.read.operation_table import read_operation_table
from lumos.risk.learn import learn, learn_step_times, learn_trace, traced_risk
from lumos.risk.operation_steps import OperationSteps, operation_risk
from lumos.risk.recurring_tasks import KERNEL, recurring_tasks
from lumos.risk.traced_steps import TracedSteps
from lumos.risk.variability import CAUSES, Pauses, Spread, Variability, usual_of_traces, usual_variability
from lumos.trace.operations import REPLICA_COLLECTIVES, OperationTable
from lumos.trace.steps import keep_step
from support import header, write_trace
from synthetic_jobs import FIXED, Job, Pass

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"
sys.path[:0] = [str(ROOT / "calibration"), str(ROOT / "benchmarks")]

import fit_variability  # noqa: E402
from distributions import decided_by, distance, ratio, recorded_steps, seconds_of, split  # noqa: E402
from step_times_data import BLIND, DEVELOPMENT, Recorded, unpack  # noqa: E402


@pytest.fixture(scope="module")
def example() -> Replay:
    return replay(read_job(EXAMPLE))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    folder = tmp_path_factory.mktemp("recorded")
    return {run.name: run for archive in (DEVELOPMENT, BLIND) for run in unpack(archive, folder / archive.stem)}


# ---------------------------------------------------------------------- traces
def test_tasks_of_a_trace_recur_in_its_steps(example: Replay) -> None:
    tasks = recurring_tasks(example)
    recur = ~np.isnan(tasks.times).any(axis=1)
    assert tasks.steps == 2
    assert recur.mean() > 0.99
    assert tasks.typical[recur] == pytest.approx(tasks.times[recur].mean(axis=1))


def test_typical_steps_lie_between_the_recorded_ones(example: Replay) -> None:
    """With the medians of all tasks, the two steps are nearly alike."""
    typical = example.marks.read(example.execution.retime(simulate(recurring_tasks(example).typical_graph)))
    clean = example.clean_steps.milliseconds
    assert clean.min() < typical.milliseconds.mean() < clean.max()
    assert np.ptp(typical.milliseconds) < np.ptp(clean)


def test_what_all_ranks_share_is_the_spread_of_the_step(example: Replay) -> None:
    """Only whole steps differ, by a lognormal factor: so do the drawn ones."""
    drawn = TracedSteps(example).drawn_ms(Variability(job=Spread.lognormal(0.1)), 8000, 0)
    assert ratio(drawn, 90) == pytest.approx(np.exp(0.1 * 1.2816), rel=0.01)
    assert ratio(drawn, 99) == pytest.approx(np.exp(0.1 * 2.3263), rel=0.02)


def test_slower_parts_move_the_step_as_far_as_it_waits_for_them(example: Replay) -> None:
    """Collectives decide the steps of the example; twice the spread of kernels hardly shows."""
    steps = TracedSteps(example)
    felt = steps.sensitivity()
    assert felt["collective"] > 0.6
    assert felt["kernel"] < 0.1
    assert sum(felt.values()) == pytest.approx(1.0, abs=0.15)
    wide = ratio(steps.drawn_ms(Variability(collective=Spread.lognormal(0.1)), 2000, 0))
    narrow = ratio(steps.drawn_ms(Variability(step=Spread.lognormal(0.1)), 2000, 0))
    assert wide > 1.07
    assert narrow < 1.02


def test_a_pause_of_a_host_delays_its_step(example: Replay) -> None:
    steps = TracedSteps(example)
    often = steps.drawn_ms(Variability(pauses=Pauses(1.0, 20.0)), 200, 0)
    never = steps.drawn_ms(Variability(), 200, 0)
    assert often.mean() - never.mean() > 15.0


def test_draws_without_one_cause_keep_the_random_numbers_of_the_others(example: Replay) -> None:
    steps = TracedSteps(example)
    only = Variability(host=Spread.lognormal(0.1))
    both = replace(only, job=Spread.lognormal(0.05), pauses=Pauses(0.1, 5.0))
    assert steps.drawn_ms(both, 100, 3, "job") == pytest.approx(
        steps.drawn_ms(replace(both, job=only.job), 100, 3, "job")
    )
    without = steps.drawn_ms(replace(both, pauses=Pauses()), 100, 3, "job")
    assert without == pytest.approx(steps.drawn_ms(only, 100, 3))


def test_recorded_differences_count_as_far_as_there_are_steps_to_trust(example: Replay) -> None:
    learned, usual = learn_trace(example, whole_steps=True), usual_of_traces()
    steps = TracedSteps(example)
    for part, cause in enumerate(("host", "step", "collective")):
        weight, shown = steps.weights[part], steps.shown[part]
        mixed = weight * shown**2 + (1 - weight) * usual.spread(cause).sigma ** 2
        assert learned.spread(cause).sigma == pytest.approx(np.sqrt(mixed))
    assert steps.weights == pytest.approx([2 / 38, 2 / 6, 2 / 14])
    assert "2 steps of 4 ranks" in learned.source


def test_a_trace_of_one_step_has_the_usual_figures_and_says_so(example: Replay) -> None:
    one = replay(keep_step(read_job(EXAMPLE), example.marks.names[0]))
    learned = learn_trace(one)
    assert "single step" in learned.source
    assert learned.sigmas == usual_variability().sigmas
    assert 1.01 < ratio(traced_risk(predict(one), draws=500).step_ms) < 1.3


def test_a_what_if_has_its_own_distribution(example: Replay) -> None:
    """Twice the communication makes steps longer, and the typical step is the predicted one."""
    found = predict(example, ["comm=2"])
    risk = traced_risk(found, Variability(), draws=10)
    assert risk.typical_ms == found.step_ms
    assert np.median(risk.step_ms) == pytest.approx(found.step_ms, rel=0.05)


def test_a_trace_of_nothing_but_annotations_has_the_step_that_they_mark(tmp_path: Path) -> None:
    mark = {"ph": "X", "cat": "user_annotation", "name": "forward", "pid": 1, "tid": 1, "ts": 10, "dur": 5000}
    found = predict(replay(read_job(write_trace(tmp_path / "rank0.json", [mark], header(0)))))
    assert traced_risk(found, Variability(), draws=5).step_ms == pytest.approx(5.0)


def test_kernels_of_one_gpu_hardly_differ_from_step_to_step(recorded: dict[str, Recorded]) -> None:
    tasks = recurring_tasks(replay(read_job(recorded["llama_gpu"].traces)))
    assert float(np.log(tasks.share(KERNEL)).std()) < 0.005


# ---------------------------------------------------------------------- recordings
def test_recordings_give_the_shipped_variability(recorded: dict[str, Recorded]) -> None:
    table = json.loads((ROOT / "src/lumos/data/variability.json").read_text())
    found = fit_variability.fitted([run for run in recorded.values() if not run.name.startswith("blind")])
    for name, value in found.items():
        section, _, key = name.partition(".")
        assert table[section][key] == value, name


@pytest.mark.parametrize(("name", "decides", "points"), [
    ("blind_llama_gpu", "GPU", 3), ("blind_compiled", "host", 3), ("blind_ddp3", "network", 3),
    ("blind_fsdp2", "network", 3),
])  # fmt: skip
def test_unseen_steps_of_a_traced_run(recorded: dict[str, Recorded], name: str, decides: str, points: float) -> None:
    """p90/p50 of hundreds of steps, predicted from a dozen others; docs/distributions.md has all runs."""
    run = recorded[name]
    steps = TracedSteps(replay(read_job(run.traces)))
    drawn = steps.drawn_ms(learn_trace(steps.replay, whole_steps=True), 3000, 0)
    assert decided_by(steps) == decides
    assert 100 * abs(ratio(drawn) - ratio(run.clean)) < points


# ---------------------------------------------------------------------- step times
def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_step_times_of_one_rank_are_learned_as_they_are(tmp_path: Path) -> None:
    times = np.exp(np.random.default_rng(0).normal(np.log(800), 0.03, 3000))
    times[:3] = 5000  # compilation
    learned = learn_step_times(write_table(tmp_path / "log.csv", [{"step": i, "ms": t} for i, t in enumerate(times)]))
    assert learned.job.sigma == pytest.approx(0.03, rel=0.1)
    assert learned.sigmas == dict.fromkeys(learned.sigmas, 0.0) | {"job": learned.job.sigma}
    assert "2,997 step times" in learned.source
    assert "3 slow ones at the beginning left out" in learned.source


def test_step_times_of_several_ranks_tell_gpus_steps_and_the_job_apart(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    gpu, job = random.normal(0, 0.05, 64), random.normal(0, 0.02, 200)
    logs = gpu[:, None] + job + random.normal(0, 0.01, (64, 200))
    rows = [{"rank": r, "iteration": s, "seconds": np.exp(logs[r, s])} for r in range(64) for s in range(200)]
    learned = learn_step_times(write_table(tmp_path / "log.csv", rows))
    assert learned.gpu.sigma == pytest.approx(np.std(gpu), rel=0.2)
    assert learned.job.sigma == pytest.approx(0.02, rel=0.2)
    assert learned.step.sigma == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("content", ['[10, 11, 12, 10.5]', '{"step_s": [0.01, 0.011, 0.012, 0.0105]}',
                                     '[{"ms": 10}, {"ms": 11}, {"ms": 12}, {"ms": 10.5}]'])  # fmt: skip
def test_step_times_as_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "times.json").write_text(content)
    learned = learn(tmp_path / "times.json", lambda path: pytest.fail("no trace"))
    assert learned.job.logs == pytest.approx(Spread.of(np.array([10, 11, 12, 10.5])).logs)


@pytest.mark.parametrize(("content", "message"), [
    ("step,ms\n1,10\n2,-3\n3,4\n", "row 2: ms '-3' is not a step time"),
    ("step,ms\n1,10\n2,nan\n3,4\n", "row 2: ms 'nan' is not a step time"),
    ("step,ms\n1,1e-320\n2,4\n3,4\n", "row 1: ms '1e-320' is not a step time"),
    ("step,loss\n1,2.5\n", "row 1 has no step time"),
    ("step,ms\n1,10\n", "fewer than 3 steps"),
    ("rank,step,ms\n0,1,10\n0,2,11\n1,3,10\n1,4,10\n", "fewer than 3 steps"),
    ('{"losses": [1, 2]}', "no list of step times"),
    ("[1, 2", "not a table"),
    ("[true, 2, 3]", "row 1: ms 'True' is not a step time"),
    ("", "fewer than 3 steps"),
])  # fmt: skip
def test_a_table_that_is_none_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=r"docs/risk\.md") as error:
        learn_step_times(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- operation tables
def made_job(tmp_path: Path, slow: float = 1.0, steps: int = 40) -> OperationTable:
    """Four replicas of two stages: micro-batches differ by 10 %, steps by 2 %, and one worker may be slow."""
    random = np.random.default_rng(1)
    work, step = random.normal(0, 0.1, (steps, 4, 8)), random.normal(0, 0.02, steps)

    def cost(one: Pass) -> float:
        factor = slow if (one.replica, one.stage) == (1, 0) else 1.0
        return factor * float(np.exp(work[one.step, one.replica, one.microbatch] + step[one.step]))

    job = Job(dp=4, pp=2, microbatches=8, steps=steps, cost=cost)
    return read_operation_table(job.write(tmp_path / "job.parquet"))


def everything(table: OperationTable) -> OperationSteps:
    return OperationSteps(table, np.ones(len(table), bool))


def test_passes_of_a_table_are_taken_apart(tmp_path: Path) -> None:
    learned = everything(made_job(tmp_path)).variability
    assert learned.microbatch.sigma == pytest.approx(0.1, rel=0.15)
    assert learned.job.sigma == pytest.approx(0.02, rel=0.35)
    assert learned.gpu.sigma < 0.01
    assert learned.kernel.sigma < 0.01


@pytest.mark.parametrize("shape", [(4, 1), (4, 2), (12, 1)])
def test_steps_that_do_not_differ_have_no_spread_however_long_others_wait_for_a_slow_worker(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    """Who waits in a collective has a long one: that is not how collectives differ, here or in other runs."""
    dp, pp = shape
    job = Job(dp=dp, pp=pp, steps=4, cost=lambda one: 1.5 if (one.replica, one.stage) == (1, 0) else 1.0)
    table = read_operation_table(job.write(tmp_path / "job.parquet"))
    recorded = 1e3 * recorded_steps(table)
    risk = operation_risk(table, draws=200)
    assert risk.step_ms == pytest.approx(np.full(200, recorded[0]), rel=1e-4)
    assert risk.typical_ms == pytest.approx(recorded[0], rel=1e-4)
    spreads = everything(table).variability
    assert all(spreads.spread(name).at(np.array([0.001, 0.999])) == pytest.approx(1.0, abs=1e-4) for name in CAUSES)
    assert spreads.pauses.is_none


def test_collectives_differ_by_their_transfers(tmp_path: Path) -> None:
    """They differ by 10 % from step to step; that those of the second stage are larger is no difference."""
    logs = np.random.default_rng(3).normal(0, 0.1, (100, 2, 2))
    frame = Job(dp=4, pp=2, steps=100, cost=lambda one: 1.5 if one.replica == 1 else 1.0).frame()
    longer = [
        FIXED[name] * ((1 + stage) * np.exp(logs[step - 10, stage, REPLICA_COLLECTIVES.index(name)]) - 1)
        if name in REPLICA_COLLECTIVES else 0.0
        for name, step, stage in frame.select("optype", "step", "stage").iter_rows()
    ]  # fmt: skip
    path = tmp_path / "job.csv"
    frame.with_columns(duration=polars.col("duration") + polars.Series(longer)).write_csv(path)
    assert everything(read_operation_table(path)).variability.collective.sigma == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seed", [0, 6, 8])
def test_micro_batches_of_very_different_work_are_no_slow_or_fast_workers(tmp_path: Path, seed: int) -> None:
    work = np.random.default_rng(seed).normal(0, 0.4, (6, 4, 8))
    job = Job(dp=4, pp=2, microbatches=8, steps=6, cost=lambda p: float(np.exp(work[p.step, p.replica, p.microbatch])))
    steps = everything(read_operation_table(job.write(tmp_path / "job.parquet")))
    assert not steps.factors.is_exception.any()
    assert steps.variability.microbatch.sigma > 0.25
    assert steps.variability.step.sigma < 0.08


def test_a_slow_worker_is_an_exception_and_not_the_rule(tmp_path: Path) -> None:
    steps = everything(made_job(tmp_path, slow=2.0, steps=6))
    assert [steps.table.workers[place] for place in np.flatnonzero(steps.factors.is_exception)] == [(1, 0)]
    assert steps.variability.gpu.sigma < 0.02
    assert re.search(r"one worker that is (1\.9|2\.0)\d times slower left out .*--slow", steps.variability.source)


@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_half_of_workers_and_steps_give_the_distribution_of_the_others(tmp_path: Path, slow: float) -> None:
    table = made_job(tmp_path, slow, steps=120)
    recorded = recorded_steps(table)
    seen = (table.dp_rank % 2 == 1) & (table.step_index % 2 == 0)
    assert distance(seconds_of(OperationSteps(table, seen), 0), recorded[1::2]) < 0.2


def test_garbage_collection_of_a_table_is_a_pause(tmp_path: Path) -> None:
    """In every third step, each worker collects garbage for half a second."""
    collects = (polars.col("optype").cast(polars.String) == "gc") & (polars.col("step") % 3 == 0)
    frame = Job(dp=2, pp=2, steps=30).frame()
    path = tmp_path / "job.csv"
    frame.with_columns(duration=polars.when(collects).then(0.5).otherwise(polars.col("duration"))).write_csv(path)
    pauses = everything(read_operation_table(path)).variability.pauses
    assert pauses.probability == pytest.approx(1 / 3)
    assert pauses.ms == pytest.approx(500)


def test_two_steps_have_a_level(tmp_path: Path) -> None:
    """Neither of two different lengths is within the middle eight tenths."""
    table = made_job(tmp_path, steps=2)
    middle = operation_risk(table, draws=100).percentile(50)
    assert middle == pytest.approx(1e3 * np.mean(recorded_steps(table)), rel=0.05)


def test_drawn_steps_of_a_job_have_its_level(tmp_path: Path) -> None:
    table = made_job(tmp_path, slow=2.0)
    risk = operation_risk(table, draws=500)
    assert risk.percentile(50) == pytest.approx(1e3 * np.median(recorded_steps(table)), rel=0.01)
    assert risk.typical_ms < risk.percentile(90)
    assert {one.name for one in risk.causes} >= {"microbatch", "job"}
    assert "own steps" in risk.variability.source


def test_straggler_jobs_are_predicted_from_half_of_their_workers(shared_data: Path) -> None:
    """All steps, each drawn from the half that it is not in: docs/distributions.md has the floors."""
    for name, seeds in (("ST", range(6)), ("AR", (0,))):
        table = read_operation_table(shared_data / f"public/straggler_jobs/trace-{name}.parquet")
        found = [split(table, seed, 0 if name == "AR" else None) for seed in seeds]
        assert all(one.sees_slow for one in found)
        assert np.mean([one.both for one in found]) < 0.15, name


# ---------------------------------------------------------------------- the command line
def answer_of(*arguments: object) -> dict[str, Any]:
    done = lumos_here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_predict_from_a_trace_has_its_risk(tmp_path: Path) -> None:
    page = tmp_path / "risk.html"
    risk = answer_of("predict", "--from", EXAMPLE, "--risk", "--draws", 600, "-o", page)["risk"]
    step = risk["step_ms"]
    assert step["p50"] < step["p90"] < step["p99"]
    assert step["typical"] == pytest.approx(step["p50"], rel=0.05)
    assert {one["name"] for one in risk["causes"]} == {"collective", "host", "step", "job", "pauses"}
    assert risk["draws"] == 600
    assert "2 steps of 4 ranks" in risk["source"]
    assert "p90" in page.read_text()


def test_a_described_run_learns_from_files(tmp_path: Path) -> None:
    table = write_table(tmp_path / "log.csv", [{"ms": ms} for ms in (100, 101, 102, 103, 150)])
    job = Job(dp=2, pp=2, steps=3, cost=lambda p: 1 + 0.1 * (p.microbatch % 2)).write(tmp_path / "job.csv")
    stated, pauses = tmp_path / "mine.json", tmp_path / "pauses.json"
    stated.write_text('{"gpu": 0.02, "host": 0.1}')
    pauses.write_text('{"pauses": {"probability": 0.01, "ms": 100}}')
    for path, words in ((table, "5 step times"), (job, "4 workers, 3 steps"), (stated, "stated in mine.json"),
                        (pauses, "pauses as stated in pauses.json"),
                        (EXAMPLE, "2 steps of 4 ranks")):  # fmt: skip
        command = ("predict", ROOT / "examples/one-h200.toml", "--risk", "--draws", 50, "--variability", path)
        assert words in answer_of(*command)["risk"]["source"]


def test_stragglers_give_the_risk_of_their_job(tmp_path: Path) -> None:
    path = Job(dp=2, pp=2, steps=5, cost=lambda p: 1 + 0.1 * (p.step % 2)).write(tmp_path / "job.parquet")
    assert "risk" not in answer_of("stragglers", path)
    step = answer_of("stragglers", path, "--risk")["risk"]["step_ms"]
    assert step["p50"] <= step["p90"] <= step["p99"]
    told = lumos_here("stragglers", path, "--risk").stdout
    assert "risk of the step" in told
    assert "of the recorded job, if nothing differed from step to step" in told
    assert "predicted" not in told


@pytest.mark.parametrize(("content", "message"), [
    ('{"gpu": "much"}', "not a file of spreads"), ('{"gpu": -1}', "gpu is not a spread"),
    ('{"gpu": 0.1, "gpus": 0.1}', "'gpus' is not a name of a spread"), ('{"gpu": 99}', "gpu is not a spread"),
    ('{"gpu": {"p": [0.5], "factor": []}}', "not a file of spreads"),
    ('{"gpu": Infinity}', "not a file of spreads"), ('{"gpu": NaN}', "not a file of spreads"),
    ('{"pauses": {"probability": 7, "ms": 1}, "gpu": 0.1}', "pauses are a probability from 0 to 1"),
    ('{"gpu": true}', "gpu: a spread is a number, or"),
    ('{"gpu": 2.1}', "gpu is not a spread; give numbers from 0 to 2"),
    ('{"host": {"p": [0.9, 0.5, 0.1], "factor": [0.9, 1, 1.1]}}', "host: p ascends, between 0 and 1"),
    ('{"host": {"p": [0.1, 0.5, 0.9], "factor": [0.9, -1, 1.1]}}', "host: factors are above 0 and ascend with p"),
    ('{"host": {"p": [0.1, 0.9], "factor": [1]}}', "host: 2 p and 1 factors: give as many of both, 2 or more"),
    ('{"host": {"p": [0.5], "factor": [1]}}', "host: 1 p and 1 factors: give as many of both, 2 or more"),
    ('{"host": {"p": [0.1, 0.9], "factor": [2, 4]}}', "host: the factor at p = 0.5 is 2.83, and should be 1"),
    ('{"gpu": 0.1, "pauses": 5}', 'pauses are {"probability": 0.01, "ms": 100}'),
    ('{"pauses": {"probability": 0.1, "ms": 5, "spread": 1e18}}', "pauses is not a spread"),
    ('{"host": {"p": [0.5, 0.999], "factor": [1, 1e300]}}', "host is not a spread"),
])  # fmt: skip
def test_a_file_of_spreads_is_checked(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    done = lumos_here("predict", ROOT / "examples/one-h200.toml", "--risk", "--variability", path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_variability_without_risk_is_refused() -> None:
    done = lumos_here("predict", ROOT / "examples/one-h200.toml", "--variability", "log.csv")
    assert done.returncode == 2
    assert "--variability log.csv: it says how much steps differ: add --risk" in done.stderr
