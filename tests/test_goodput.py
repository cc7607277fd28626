"""Runs with failures: published rates and outcomes, laws, the best checkpoint interval, and the command line."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from math import expm1
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import lumos_here
from lumos import predict, read_setup, write_setup
from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.prediction.bill import Tariff
from lumos.report.html.page import render
from lumos.report.html.prediction_page import prediction_page
from lumos.report.html.run_view import hours_by_period, with_run
from lumos.report.runs import failures_table, run_cards
from lumos.risk.failures import failures_of
from lumos.risk.fault_model import FaultModel
from lumos.risk.planned_run import PlannedRun, checkpoint_bytes
from lumos.risk.run_loops import PARTS
from lumos.risk.whole_run import DAY_S, HOUR_S, WholeRun, draw_runs, whole_run
from lumos.setup.reliability import RATES, Reliability

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "examples/llama3-70b.toml"
sys.path.insert(0, str(ROOT / "benchmarks"))

import goodput  # noqa: E402

laws = settings(deadline=None, max_examples=60)
some_seconds = st.floats(0.0, 2000.0)


@st.composite
def fault_models(draw: st.DrawFn) -> FaultModel:
    """Jobs that fail every hour to every month, and end."""
    return FaultModel(
        node_rate=1 / draw(st.floats(1.0, 700.0)) / HOUR_S,
        other_rate=1 / draw(st.floats(1.0, 700.0)) / HOUR_S,
        planned_rate=draw(st.sampled_from([0.0, 1e-5])),
        detection_s=draw(some_seconds),
        restart_s=draw(some_seconds),
        pause_s=draw(st.floats(0.1, 300.0)),
        lag_s=draw(st.sampled_from([0.0, 60.0, 600.0])),
        spares=draw(st.sampled_from([-1, 0, 1, 5])),
        repair_s=draw(st.floats(0.0, 3 * DAY_S)),
    )


def runs_of(model: FaultModel, work_s: float, interval_s: float, runs: int = 300, seed: int = 0) -> np.ndarray:
    return draw_runs(model, np.full(runs, work_s), interval_s, seed).total_s


def small_run(**section: Any) -> WholeRun:
    """A hundred days on 1,024 GPUs; the prediction is exact."""
    job = PlannedRun(1024, 8, 16, 864_000, 10.0, (10.0, 10.0), 1000.0)
    return WholeRun(job, Reliability(**section), {})


# ---------------------------------------------------------------------- published rates and outcomes
def test_rates_of_llama3_are_all_of_its_466_interruptions() -> None:
    table = read_table("failures.toml")["rates"]["llama3"]
    assert sum(cause["count"] for cause in table["causes"].values() if not cause.get("planned")) == 419
    assert sum(cause["count"] for cause in table["causes"].values()) == 466
    found = failures_of(Reliability(rates="llama3"), 16384, 8)
    assert 54 * 24 / found.mtbf_hours == pytest.approx(419, rel=0.02)  # hours of detection are not counted


@pytest.mark.parametrize(("gpus", "hours"), [(16384, 1.8), (131072, 0.23)])
def test_rates_of_rsc1_give_the_times_between_failures_that_meta_projects(gpus: int, hours: float) -> None:
    assert failures_of(Reliability(rates="meta-rsc1"), gpus, 8).mtbf_hours == pytest.approx(hours, rel=0.04)


@pytest.mark.parametrize(
    "run", [one for one in goodput.RUNS if one.name.startswith(("Llama", "OPT"))], ids=lambda one: one.name
)
def test_effective_training_time_of_llama3_and_opt_is_within_three_points(run: goodput.PublishedRun) -> None:
    assert run.low <= goodput.predicted_pct(run) <= run.high


@pytest.mark.parametrize("name", RATES)
def test_every_published_rate_has_its_source_and_a_job_twice_as_large_fails_twice_as_often(name: str) -> None:
    small, large = (failures_of(Reliability(rates=name), gpus, 8) for gpus in (512, 1024))
    assert "arXiv" in small.source or "chronicles" in small.source
    assert small.mtbf_hours == pytest.approx(2 * large.mtbf_hours)


def test_a_checkpoint_holds_weights_and_optimizer_of_the_whole_model_and_of_lora_the_adapters() -> None:
    setup = read_setup(SETUP)
    assert checkpoint_bytes(setup) == 14 * setup.model.parameters()  # bf16 weights; fp32 weights and two moments
    assert checkpoint_bytes(setup.replaced({"parallel.tp": 8, "parallel.cp": 1})) == checkpoint_bytes(setup)
    assert checkpoint_bytes(setup.replaced({"train.mode": "lora"})) < 0.01 * checkpoint_bytes(setup)


# ---------------------------------------------------------------------- laws
@given(st.floats(1e3, 1e6), st.floats(100.0, 1e5), st.floats(0.0, 600.0))
@laws
def test_without_failures_a_run_is_its_work_and_its_checkpoints(work: float, interval: float, pause: float) -> None:
    model = FaultModel(pause_s=pause)
    total = work + pause * np.ceil(work / interval - 1e-9)
    assert runs_of(model, work, interval, 3) == pytest.approx(total)
    assert model.expected_s(work, interval) == pytest.approx(total)


@given(fault_models(), st.integers(0, 1000))
@laws
def test_parts_add_up_to_the_run_and_all_work_is_done(model: FaultModel, seed: int) -> None:
    work = np.linspace(1e5, 2e6, 20)
    found = draw_runs(model, work, model.best_interval_s(1e6), seed)
    assert found.parts[:, 0] == pytest.approx(work)
    assert (found.parts >= 0).all()
    assert found.total_s == pytest.approx(found.parts.sum(axis=1))
    assert (found.total_s >= work).all()


@given(fault_models())
@laws
def test_more_failures_longer_restarts_and_slower_storage_never_shorten_the_expected_run(model: FaultModel) -> None:
    work = 30 * DAY_S
    before = model.expected_s(work, model.best_interval_s(work))
    worse = [
        {"node_rate": 1.5 * model.node_rate}, {"other_rate": 1.5 * model.other_rate},
        {"restart_s": model.restart_s + 100}, {"detection_s": model.detection_s + 100},
        {"pause_s": model.pause_s + 20}, {"lag_s": model.lag_s + 100},
    ]  # fmt: skip
    for changes in worse:
        other = replace(model, **changes)  # type: ignore[arg-type]
        assert other.expected_s(work, other.best_interval_s(work)) >= before * (1 - 1e-9), changes


@given(fault_models())
@laws
def test_spares_never_hurt_and_percentiles_are_in_order(model: FaultModel) -> None:
    work, interval = 20 * DAY_S, 3600.0
    few, more, always = (runs_of(replace(model, spares=n), work, interval, 50) for n in (0, 4, -1))
    assert (few >= more - 1e-6).all()  # the same failures: run by run
    assert (more >= always - 1e-6).all()
    p50, p90, p99 = np.quantile(few, [0.5, 0.9, 0.99])
    assert p50 <= p90 <= p99


def test_training_on_with_fewer_replicas_is_better_than_waiting_a_day_for_a_node() -> None:
    waits = FaultModel(node_rate=1 / (20 * HOUR_S), restart_s=600.0, pause_s=20.0, spares=0, repair_s=DAY_S)
    elastic = FaultModel(**{**waits.__dict__, "replicas": 16})
    rigid, flexible = (runs_of(model, 20 * DAY_S, 3600.0) for model in (waits, elastic))
    assert flexible.mean() < 0.7 * rigid.mean()
    parts = draw_runs(elastic, np.full(300, 20 * DAY_S), 3600.0).parts.mean(axis=0)
    assert parts[PARTS.index("fewer_replicas")] > 0
    assert parts[PARTS.index("waiting")] < 0.01 * parts[0]


def test_a_seed_gives_the_same_runs_again_and_another_seed_others() -> None:
    model = FaultModel(node_rate=1e-4, restart_s=100.0, pause_s=10.0)
    assert (runs_of(model, 1e6, 600.0, seed=5) == runs_of(model, 1e6, 600.0, seed=5)).all()
    assert (runs_of(model, 1e6, 600.0, seed=5) != runs_of(model, 1e6, 600.0, seed=6)).all()


# ---------------------------------------------------------------------- formula, simulation, interval
@pytest.mark.parametrize(
    "model",
    [
        FaultModel(other_rate=1e-4, detection_s=120, restart_s=480, pause_s=3),
        FaultModel(node_rate=1 / 600, detection_s=60, restart_s=300, pause_s=30),  # two restarts of five fail
        FaultModel(5e-5, 5e-5, planned_rate=1e-5, detection_s=120, restart_s=480, pause_s=1, lag_s=60),
        FaultModel(node_rate=1 / (30 * DAY_S), restart_s=3600, pause_s=4 * 3600),
    ],
    ids=["daly", "minutes", "asynchronous, planned stops", "hours of checkpoint"],
)  # fmt: skip
def test_formula_and_simulation_agree(model: FaultModel) -> None:
    work = 400 / model.failure_rate
    interval = model.best_interval_s(work)
    drawn = runs_of(model, work, interval, 1000)
    assert model.expected_s(work, interval) == pytest.approx(drawn.mean(), rel=4e-3)


def plain_run(model: FaultModel, work: float, interval: float, chance: Random) -> float:
    """One run, piece by piece, with a list of repairs: no formula, nothing compiled. Training waits for checkpoints."""
    repairs: list[float] = []  # when nodes are back
    clock, saved, spares, missing = 0.0, 0.0, model.spares, 0
    ran, fails_at = 0.0, chance.expovariate(model.node_rate)  # seconds in which processes ran

    def run_for(seconds: float) -> bool:
        """Let processes run; whether they got through without a failure."""
        nonlocal clock, ran
        done = min(seconds, fails_at - ran)
        clock, ran = clock + done, ran + done
        return done == seconds

    def nodes_back() -> None:
        nonlocal spares, missing
        for back in [one for one in repairs if one <= clock]:
            repairs.remove(back)
            missing, spares = (missing - 1, spares) if missing else (missing, spares + 1)

    def recover() -> None:
        nonlocal clock, spares, missing, fails_at
        while True:
            fails_at = ran + chance.expovariate(model.node_rate)
            nodes_back()
            repairs.append(clock + model.repair_s)
            if spares:
                spares -= 1
            elif missing + 1 < model.replicas:
                missing += 1
            else:
                clock = max(clock, min(repairs))
                repairs.remove(min(repairs))
            clock += model.detection_s
            if run_for(model.restart_s):
                return

    while saved < work - 1e-6:
        nodes_back()
        speed = 1 - missing / model.replicas if missing else 1.0
        piece = min(interval, work - saved)
        if run_for(piece / speed + model.pause_s):
            saved += piece
        else:
            recover()
    return clock


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_runs_with_few_spares_are_those_of_a_plain_simulation(spares: int) -> None:
    model = FaultModel(
        node_rate=1 / (30 * HOUR_S), detection_s=300, restart_s=900, pause_s=60, spares=spares, repair_s=2 * DAY_S
    )
    chance, work = Random(spares), 30 * DAY_S
    plain = np.array([plain_run(model, work, 7200.0, chance) for _ in range(600)])
    compiled = runs_of(model, work, 7200.0, 2000)
    assert compiled.mean() == pytest.approx(plain.mean(), rel=4 * plain.std() / plain.mean() / 600**0.5)
    assert compiled.std() == pytest.approx(plain.std(), rel=0.15)


def test_elastic_runs_are_those_of_a_plain_simulation_that_takes_nodes_back_without_a_restart() -> None:
    model = FaultModel(
        node_rate=1 / (30 * HOUR_S),
        detection_s=300,
        restart_s=900,
        pause_s=60,
        spares=0,
        repair_s=2 * DAY_S,
        replicas=16,
    )
    chance, work = Random(1), 30 * DAY_S
    plain = np.array([plain_run(model, work, 7200.0, chance) for _ in range(400)])
    compiled = draw_runs(model, np.full(2000, work), 7200.0)
    stops = compiled.mean_count("returns") * (model.restart_s + 2 * model.pause_s)  # what taking back costs
    assert compiled.total_s.mean() - stops == pytest.approx(plain.mean(), rel=0.01)


def test_without_detection_and_lag_the_formula_is_dalys() -> None:
    mtbf, restart, pause, interval, work = 7200.0, 300.0, 40.0, 900.0, 90_000.0
    model = FaultModel(other_rate=1 / mtbf, restart_s=restart, pause_s=pause)
    daly = mtbf * np.exp(restart / mtbf) * expm1((interval + pause) / mtbf) * work / interval
    assert model.expected_s(work, interval) == pytest.approx(daly)


def test_the_best_interval_is_youngs_where_checkpoints_are_short_and_far_from_it_where_they_are_not() -> None:
    short = FaultModel(other_rate=1 / DAY_S, pause_s=5.0)
    assert short.best_interval_s(100 * DAY_S) == pytest.approx(short.young_s, rel=0.02)
    long = FaultModel(other_rate=1 / 600.0, pause_s=600.0)
    assert long.best_interval_s(DAY_S) < 0.75 * long.young_s


@pytest.mark.parametrize(
    "model",
    [
        FaultModel(other_rate=1 / 300, detection_s=120, restart_s=480, pause_s=30),
        FaultModel(other_rate=1 / 1800, detection_s=120, restart_s=480, pause_s=600),
        FaultModel(other_rate=1 / (10 * HOUR_S), detection_s=120, restart_s=480, pause_s=5, lag_s=4 * HOUR_S),
        FaultModel(other_rate=1 / (90 * DAY_S), detection_s=120, restart_s=480, pause_s=1),
    ],
    ids=["fails every 5 minutes", "checkpoints of 10 minutes", "written in 4 hours", "fails every 90 days"],
)
def test_no_interval_of_an_exhaustive_search_is_two_per_cent_better(model: FaultModel) -> None:
    own, young = goodput.excess(model, runs=100)
    assert own <= 2.0
    assert own <= young + 0.1


# ---------------------------------------------------------------------- the whole run
def test_days_by_part_add_up_to_the_mean_run() -> None:
    run = small_run(rates="meta-rsc1", spare_nodes=1, elastic=True)
    assert sum(run.mean_days_by_part.values()) == pytest.approx(run.days.mean())
    assert run.mean_days_by_part["productive"] == pytest.approx(100.0)
    assert run.as_dict()["effective_training_time"]["p99"] <= run.as_dict()["effective_training_time"]["p50"]


@pytest.mark.parametrize(
    "section",
    [
        {"mtbf_job_hours": 24, "spare_nodes": 1, "repair_hours": 48},
        {"rates": "llama3", "spare_nodes": 0, "repair_hours": 200, "detection_minutes": 600},
    ],
    ids=["one cause", "planned stops too"],
)
def test_causes_add_up_to_the_interruptions_none_of_which_come_while_the_job_waits(section: dict[str, Any]) -> None:
    run = small_run(**section)
    answer = run.as_dict()
    found = {one["name"]: one["in_run"] for one in answer["failures"]["causes"]}
    assert sum(found.values()) == pytest.approx(answer["interruptions"]["mean"])
    days = run.mean_days_by_part
    assert days["waiting"] > 10
    running = 24 * (run.days.mean() - days["waiting"] - days["detection"])
    for cause in run.failures.causes:
        assert found[cause.name] == pytest.approx(running * cause.per_hour, rel=0.1), cause.name
    shown = {row.values[0]: row.values[2] for row in failures_table(run).rows}
    assert shown == pytest.approx(found)


def test_the_card_of_interruptions_tells_failures_planned_stops_and_returns_apart() -> None:
    def words(**section: Any) -> str:
        return next(card.note for card in run_cards(small_run(**section)) if card.label == "interruptions")

    assert words(mtbf_job_hours=24) == "the job fails every 24 h 00 min 00 s of running, once in 24,576 GPU-hours"
    assert "50 failures, 5.6 planned stops; the job fails every" in words(rates="llama3")
    elastic = words(mtbf_job_hours=24, spare_nodes=0, elastic=True)
    assert "planned" not in elastic
    assert "to take nodes back; the job fails every" in elastic


def test_one_step_is_not_steps() -> None:
    job = PlannedRun(1024, 8, 16, 1, 10.0, (10.0, 10.0), 1000.0)
    card = next(one for one in run_cards(WholeRun(job, Reliability(rates="llama3"), {})) if "checkpoint" in one.label)
    assert card.note.startswith("1 step;")


def test_a_worse_interval_costs_what_the_answer_says_and_the_best_one_buys_it() -> None:
    worse, best = small_run(rates="meta-rsc1", checkpoint_minutes=600), small_run(rates="meta-rsc1")
    found = worse.as_dict()["checkpoints"]
    assert found["expected_days"] - found["expected_days_at_best"] > 5
    assert found["best_interval_minutes"] == pytest.approx(best.interval_s / 60)
    bought = next(row for row in worse.what_it_buys() if row["what"] == "the best checkpoint interval")
    assert bought["days_saved"] == pytest.approx(worse.days.mean() - best.days.mean())


def test_checkpoints_are_a_step_apart_or_more() -> None:
    dense = small_run(mtbf_job_hours=1024, checkpoint_minutes=5e-324)
    assert dense.interval_s == dense.job.step_s
    assert dense.expected_s > small_run(mtbf_job_hours=1024).expected_s


def test_what_it_buys_is_what_the_changed_run_takes() -> None:
    run = small_run(mtbf_gpu_hours=20_000, spare_nodes=0)
    rows = {row["what"]: row for row in run.what_it_buys()}
    assert rows["ten more spare nodes"]["days_saved"] > 10
    assert rows["elastic: go on with fewer replicas"]["days_saved"] > 10
    assert all(row["days_saved"] > 0 for row in rows.values())
    other = small_run(mtbf_gpu_hours=20_000, spare_nodes=10)
    assert rows["ten more spare nodes"]["mean_days"] == pytest.approx(other.days.mean())


def test_a_run_half_of_whose_steps_are_slower_has_a_later_90th_percentile_and_that_cause_is_named() -> None:
    run = small_run(rates="llama3")
    vary = WholeRun(run.job, run.reliability, {"variation of steps": np.tile([1.0, 1.2], 2000)})
    assert np.quantile(vary.days, 0.9) == pytest.approx(1.2 * np.quantile(run.days, 0.9), rel=0.01)
    assert vary.causes()[0]["name"] == "variation of steps"
    assert vary.causes()[0]["costs_days"] == pytest.approx(20.0, rel=0.1)


def test_the_prediction_is_off_as_its_interval_says() -> None:
    found = predict(read_setup(SETUP), tariff=Tariff(tokens=1e12))
    run = whole_run(found)
    low, high = (end / found.step_ms for end in found.interval_ms)
    error = run.factors["prediction error"]
    assert np.quantile(error, [0.1, 0.5, 0.9]) == pytest.approx([low, 1.0, high], rel=0.02)


def test_hours_by_period_are_those_of_the_attempts() -> None:
    run = small_run(rates="meta-rsc1", spare_nodes=2)
    attempts = run.typical_attempts()
    assert attempts.sum() / DAY_S == pytest.approx(np.median(run.days), rel=0.02)
    hours = hours_by_period(attempts, DAY_S)
    assert hours.sum(axis=0) == pytest.approx(attempts.sum(axis=0) / HOUR_S)
    assert hours[:-1].sum(axis=1) == pytest.approx(24.0)


def test_the_page_draws_a_run_over_time_and_when_runs_end() -> None:
    found = predict(read_setup(SETUP, ["reliability.rates=llama3"]), tariff=Tariff(tokens=15e12, gpu_hour=2.0))
    page = with_run(prediction_page(found), whole_run(found, deadline_days=320))
    section = page.sections[0]
    assert section.title == "The whole run"
    assert [figure.title.split(",")[0] for figure in section.figures][:2] == [
        "runs that have ended by this day", "one drawn run",
    ]  # fmt: skip
    assert "deadline" in "".join(render(page))


# ---------------------------------------------------------------------- the command line
def answered(*arguments: str) -> dict[str, Any]:
    done = lumos_here("predict", SETUP, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_mtbf_and_tokens_give_days_money_and_what_better_recovery_would_buy(tmp_path: Path) -> None:
    table = tmp_path / "run.csv"
    answer = answered("--tokens", "15T", "--mtbf", "llama3", "--price", "2", "--deadline", "330", "-o", str(table))
    run = answer["run"]
    assert run["days"]["p50"] <= run["days"]["p90"] <= run["days"]["p99"]
    assert run["days"]["p50"] > run["days_without_failures"]["p50"]
    assert run["money"]["mean"] == pytest.approx(2 * run["gpu_hours"]["mean"])
    assert 0 < run["deadline"]["probability"] < 1
    assert {row["what"] for row in run["buys"]} >= {"asynchronous checkpoints", "restarts twice as fast"}
    assert run["failures"]["mtbf_job_hours"] == pytest.approx(50_000 / 512, rel=0.02)
    assert answer["setup"]["reliability"] == {"rates": "llama3"}
    assert float(next(csv.DictReader(table.open()))["run_days_p90"]) == pytest.approx(run["days"]["p90"])


def test_another_configuration_of_a_traced_run_has_a_run_too() -> None:
    trace = ROOT / "tests/data/capture/fake_world"
    asked = ("--set", "model.layers=8", "--tokens", "1B", "--mtbf", "50000", "--json")
    done = lumos_here("predict", trace / "setup.toml", "--from", trace, *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"]["failures"]["mtbf_gpu_hours"] == pytest.approx(50_000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("reliability.spare_nodes=4", "reliability.spare_nodes has no effect: how often the job fails is not stated"),
        ("reliability.elastic=true", "reliability.elastic has no effect"),
    ],
)
def test_what_has_no_effect_is_said(change: str, words: str) -> None:
    assert any(words in one for one in answered("--set", change)["warnings"])
    assert any("without reliability.spare_nodes" in one for one in answered(
        "--set", "reliability.elastic=true", "--set", "reliability.rates=llama3"
    )["warnings"])  # fmt: skip


def test_what_is_said_to_have_no_effect_has_none() -> None:
    section = ("reliability.spare_nodes=4", "reliability.checkpoint_minutes=1")
    plain, stated = (
        answered("--tokens", "1T", "--price", "2", "--deadline", "20", *changes)
        for changes in ((), [part for text in section for part in ("--set", text)])
    )
    assert stated["run"] == plain["run"]
    assert "reliability.checkpoint_minutes and reliability.spare_nodes have no effect" in stated["warnings"][0]


def test_an_interval_longer_than_the_run_is_said() -> None:
    asked = ("--tokens", "1T", "--mtbf", "llama3", "--set")
    note = answered(*asked, "reliability.checkpoint_minutes=100000")["warnings"][-1]
    assert note.startswith("reliability.checkpoint_minutes = 100000 is more than the ")
    assert note.endswith("minutes of training: one checkpoint is written, at the end")
    assert not any(
        "checkpoint_minutes" in one for one in answered(*asked, "reliability.checkpoint_minutes=60")["warnings"]
    )


def test_hours_are_those_of_one_gpu_unless_they_are_said_to_be_of_the_job() -> None:
    of_gpu = answered("--tokens", "1T", "--mtbf", "51200")["run"]["failures"]
    of_job = answered("--tokens", "1T", "--set", "reliability.mtbf_job_hours=100")["run"]["failures"]
    assert of_gpu["mtbf_job_hours"] == of_job["mtbf_job_hours"] == pytest.approx(100)


def test_a_prediction_that_does_not_ask_for_failures_is_as_it_was() -> None:
    answer = answered("--tokens", "15T")
    assert "run" not in answer
    assert "reliability" not in answer["setup"]


def test_a_setup_with_failures_is_written_and_read_back_equal(tmp_path: Path) -> None:
    setup = read_setup(SETUP, ["reliability.rates=llama3", "reliability.spare_nodes=0", "reliability.elastic=true"])
    path = tmp_path / "run.toml"
    path.write_text(write_setup(setup))
    assert read_setup(path) == setup
    assert "reliability" not in write_setup(read_setup(SETUP))


def test_mtbf_replaces_what_the_setup_says(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SETUP.read_text() + '\n[reliability]\nrates = "opt-175b"\nspare_nodes = 3\n')
    done = lumos_here("predict", path, "--tokens", "1T", "--mtbf", "llama3", "--json")
    found = json.loads(done.stdout)
    assert found["setup"]["reliability"] == {"rates": "llama3", "spare_nodes": 3}
    assert found["run"]["failures"]["spare_nodes"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mtbf", "llama3"), "--mtbf needs the length of the run: add the tokens to train on"),
        (("--tokens", "1T", "--mtbf", "lama3"), "did you mean llama3?"),
        (("--tokens", "1T", "--mtbf", "foo"), "nor known rates: use llama3, meta-rsc1,"),
        (("--tokens", "1T", "--mtbf", ""), "--mtbf '' is neither a number"),
        (("--tokens", "1T", "--deadline", ""), "--deadline '' is not a number of days"),
        (
            ("--tokens", "1T", "--mtbf", "2000", "--set", "reliability.mtbf_job_hours=100"),
            "--mtbf 2000 and --set reliability.mtbf_job_hours=100: both say how often the job fails",
        ),
        (("--tokens", "1T", "--mtbf", "3"), "--set reliability.mtbf_job_hours=3"),
        (("--tokens", "1T", "--mtbf", "nan"), "more than 0, as in 50000"),
        (("--tokens", "1T", "--deadline", "soon"), "--deadline 'soon' is not a number of days"),
        (("--tokens", "1T", "--mtbf", "llama3", "--gpu", "h100,b200"), "failures are drawn for one GPU"),
        (("--tokens", "1T", "--set", "reliability.mtbf_job_hours=0.01"), "the run would not end: the job fails every"),
        (("--tokens", "1T", "--set", "reliability.rates=llama4"), "reliability.rates"),
        (("--tokens", "1e24", "--mtbf", "llama3"), "interruptions, and 100,000 are drawn at most: give fewer tokens"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = lumos_here("predict", SETUP, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_search_refuses_two_rates_too() -> None:
    asked = ("--gpus", "512", "--tokens", "1T", "--mtbf", "2000", "--set", "reliability.rates=llama3")
    done = lumos_here("search", SETUP, *asked)
    assert done.returncode == 2
    assert "--mtbf 2000 and --set reliability.rates=llama3: both say" in done.stderr


def test_a_prediction_without_a_setup_has_no_run() -> None:
    from lumos import read_job, replay

    with pytest.raises(OptionError, match="failures need the setup of a run"):
        whole_run(predict(replay(read_job(ROOT / "src/lumos/data/example"))))
