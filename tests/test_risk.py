"""The risk of a step: drawn steps against brute force, the laws they obey, slow parts, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brute_force_steps import brute_force_ms
from commands import lumos_here
from lumos.errors import OptionError
from lumos.graph.graph import Floats, simulate
from lumos.prediction.prediction import predict
from lumos.risk import drawn_steps
from lumos.risk.drawn_loops import drawn_spans
from lumos.risk.drawn_steps import drawn_ms, typical_ms
from lumos.risk.lanes import Lanes, lanes_of
from lumos.risk.monte_carlo import slowed, step_risk
from lumos.risk.variability import CAUSES, NONE, Pauses, Spread, Variability, usual_variability
from lumos.setup.setup import Setup
from lumos.setup.slow import Slow, read_slow
from lumos.step.step import Step, simulate_step
from test_dry_step import gather, matmul, predicted

ROOT = Path(__file__).parents[1]
LARGE_EXAMPLE = ROOT / "examples/llama3-70b.toml"
SMALL = {"layers": 4, "hidden": 2048, "ffn": 8192, "heads": 16, "kv_heads": 16, "vocab": 32000}
TITAN = {"framework": "torchtitan"}
REALISTIC = Variability(*map(Spread.lognormal, (0.015, 0.006, 0.01, 0.0, 0.07, 0.1, 0.005)))
LARGE = Variability(*map(Spread.lognormal, (0.04, 0.03, 0.15, 0.15, 0.15, 0.15, 0.01)))


def small(parallel: dict[str, Any], gpus: int, **sections: Any) -> Setup:
    train = {"seq": 2048, "micro_batch": 1, "global_batch": 16, "framework": "megatron"} | sections.get("train", {})
    cluster = {"gpu": "h100", "gpus": gpus} | sections.get("cluster", {})
    return Setup(model=SMALL | sections.get("model", {}), train=train, parallel=parallel, cluster=cluster)  # type: ignore[arg-type]


JOBS = {
    "DDP": small({"zero": 0}, 8),
    "ZeRO 1": small({"zero": 1}, 8),
    "ZeRO 2": small({"zero": 2}, 8, train={"framework": "deepspeed"}),
    "FSDP": small({"zero": 3}, 8, train=TITAN),
    "FSDP, two copies": small({"zero": 3, "shard": 4}, 8, train=TITAN),
    "TP": small({"tp": 8, "sequence_parallel": True}, 8),
    "1F1B": small({"pp": 4}, 4),
    "interleaved": small({"pp": 2, "vpp": 2}, 2),
    "zero bubble": small({"pp": 4, "schedule": "zero-bubble"}, 4),
    "TP, PP and DP": small({"tp": 2, "pp": 2, "zero": 1}, 16, train={"global_batch": 32}),
    "experts": small({"ep": 4, "zero": 1}, 8, model={"experts": 8, "top_k": 2, "expert_ffn": 4096}),
    "slow host": small({"zero": 0}, 4, model={"hidden": 256, "ffn": 1024, "heads": 4, "kv_heads": 4},
                       train=TITAN | {"seq": 256}, cluster={"host": 0.3}),
}  # fmt: skip


@cache
def step_of(name: str) -> Step:
    return simulate_step(JOBS[name])


def measures(steps: Floats) -> Floats:
    return np.array([steps.mean(), *np.quantile(steps, [0.5, 0.9, 0.99])])


# ---------------------------------------------------------------------- against brute force
@pytest.mark.parametrize("variability", [REALISTIC, LARGE], ids=["realistic", "large"])
@pytest.mark.parametrize("name", JOBS)
def test_drawn_steps_agree_with_all_replicas_and_ranks_drawn_one_by_one(name: str, variability: Variability) -> None:
    step = step_of(name)
    every = measures(brute_force_ms(step, variability, 8000))
    drawn = measures(drawn_ms(lanes_of(step), variability, draws=14_000))
    np.testing.assert_allclose(drawn, every, rtol=0.01)


@pytest.mark.parametrize(
    ("setup", "most"),
    [
        (small({"pp": 4, "zero": 1}, 64, train={"global_batch": 256}), 8 * 280),
        (small({"tp": 2, "pp": 2, "zero": 1}, 64, train={"global_batch": 256}), 6 * 150),
        (small({"zero": 3}, 32, model={"layers": 12}, train=TITAN | {"global_batch": 64}), 1),
    ],
    ids=["pipelines", "tensor and pipeline", "FSDP"],
)
def test_of_many_replicas_those_that_can_be_last_are_enough(setup: Setup, most: int) -> None:
    step = simulate_step(setup)
    lanes = lanes_of(step, most=most)
    assert lanes.simulated < setup.parallel.dp
    drawn = measures(drawn_ms(lanes, REALISTIC, draws=12_000))
    np.testing.assert_allclose(drawn, measures(brute_force_ms(step, REALISTIC, 3000)), rtol=0.01)


def test_pauses_come_as_often_and_last_as_long_as_stated() -> None:
    step = step_of("DDP")
    lengths = drawn_ms(lanes_of(step), Variability(pauses=Pauses(0.02, 50.0)), draws=20_000) - step.us / 1e3
    assert (lengths > 49).mean() == pytest.approx(1 - 0.98**8, rel=0.05)
    assert lengths[lengths > 1].min() == pytest.approx(50, rel=0.01)


# ---------------------------------------------------------------------- laws
sigmas = st.floats(0.0, 0.2)
jobs = st.sampled_from(["DDP", "FSDP", "TP, PP and DP", "experts"])
laws = settings(deadline=None, max_examples=15)


@pytest.mark.parametrize("name", JOBS)
def test_without_variability_every_step_is_exactly_the_predicted_one(name: str) -> None:
    step = step_of(name)
    assert drawn_ms(lanes_of(step), Variability(), draws=3).tolist() == [step.us / 1e3] * 3


@laws
@given(jobs, st.sampled_from(CAUSES), sigmas, sigmas)
def test_more_of_any_variance_lowers_neither_the_mean_nor_the_90th_percentile(
    name: str, cause: str, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    steps = [
        drawn_ms(lanes_of(step_of(name)), REALISTIC.stated({cause: sigma}), draws=1000, seed=3)
        for sigma in (less, more)
    ]
    assert steps[1].mean() >= steps[0].mean() * (1 - 1e-3)
    assert np.quantile(steps[1], 0.9) >= np.quantile(steps[0], 0.9) * (1 - 2e-3)


@laws
@given(jobs, st.integers(0, 1 << 30))
def test_a_seed_gives_the_same_steps_again_and_another_seed_others(name: str, seed: int) -> None:
    lanes = lanes_of(step_of(name))
    first, again, other = (drawn_ms(lanes, REALISTIC, draws=300, seed=one) for one in (seed, seed, seed + 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


@pytest.mark.parametrize("name", ["DDP", "ZeRO 1", "TP, PP and DP"])
def test_more_replicas_never_make_the_typical_drawn_step_shorter(name: str) -> None:
    lanes = lanes_of(step_of(name))
    many = [replace(lanes, lanes=count, simulated=count) for count in (2, 8, 32, 128)]
    medians = [np.median(drawn_ms(one, REALISTIC, draws=2000)) for one in many]
    assert medians == sorted(medians)
    assert medians[-1] > 1.005 * medians[0]


def test_the_slowest_of_many_is_their_largest() -> None:
    random, spread = np.random.default_rng(0), Spread.lognormal(0.1)
    largest = spread.at(random.random((20_000, 64))).max(axis=1)
    np.testing.assert_allclose(measures(spread.slowest_of(64, random.random(20_000))), measures(largest), rtol=0.005)


def test_a_spread_of_observed_times_has_their_quantiles_and_a_median_of_one() -> None:
    times = np.random.default_rng(1).gamma(20.0, 3.0, 5000)
    found = Spread.of(times)
    points = np.array([0.05, 0.5, 0.9, 0.99])
    np.testing.assert_allclose(found.at(points), np.quantile(times, points) / np.median(times), rtol=0.003)
    assert Spread.from_data(found.to_data()).sigma == pytest.approx(found.sigma, rel=0.01)


# ---------------------------------------------------------------------- slow parts
@cache
def lanes_of_grid() -> Lanes:
    return lanes_of(step_of("TP, PP and DP"))


@laws
@given(st.integers(0, 15))
def test_a_slow_rank_with_factor_one_changes_nothing(rank: int) -> None:
    assert typical_ms(lanes_of_grid(), (Slow(1.0, rank=rank),)) == typical_ms(lanes_of_grid())


@pytest.mark.parametrize("name", ["DDP", "FSDP", "TP, PP and DP"])
def test_a_factor_on_every_rank_is_the_same_factor_on_all_compute(name: str) -> None:
    lanes = lanes_of(step_of(name))
    every = typical_ms(lanes, tuple(Slow(1.5, rank=rank) for rank in range(lanes.gpus)))
    assert every == pytest.approx(typical_ms(lanes, (Slow(1.5, share=1.0),)))
    scaled = lanes.graph.duration * (1 + 0.5 * lanes.parts[:, 0])
    assert every == pytest.approx(simulate(lanes.graph, scaled).span / 1e6)


def test_one_slow_rank_of_a_data_parallel_job_delays_all_as_much_as_if_all_were_slow_but_for_collectives() -> None:
    lanes = lanes_of(step_of("DDP"))
    one, every = (typical_ms(lanes, (slow,)) for slow in (Slow(2.0, rank=5), Slow(2.0, share=1.0)))
    assert one == pytest.approx(every)
    assert one > 1.3 * typical_ms(lanes)


def test_ranks_stand_where_the_order_of_the_setup_puts_them() -> None:
    order = "tp-cp-pp-dp"
    usual = lanes_of(simulate_step(small({"tp": 2, "pp": 2}, 8)))
    other = lanes_of(simulate_step(small({"tp": 2, "pp": 2, "order": order}, 8)))
    assert [usual.where(rank)[:2] for rank in range(8)] == [(0, 0)] * 2 + [(1, 0)] * 2 + [(0, 1)] * 2 + [(1, 1)] * 2
    assert [other.where(rank)[:2] for rank in range(8)] == [(0, 0)] * 2 + [(0, 1)] * 2 + [(1, 0)] * 2 + [(1, 1)] * 2


def test_a_slow_link_delays_what_leaves_the_node_through_it_and_a_slow_group_its_collectives() -> None:
    large = lanes_of(simulate_step(small({"tp": 2, "zero": 1}, 32, train={"global_batch": 64})))
    inside = lanes_of(simulate_step(small({"tp": 2, "zero": 1}, 8)))
    assert typical_ms(large, (Slow(8.0, link=3),)) > 1.05 * typical_ms(large)
    assert typical_ms(inside, (Slow(8.0, link=3),)) == typical_ms(inside)
    assert typical_ms(inside, (Slow(8.0, group="dp"),)) > 1.05 * typical_ms(inside)
    pipeline = lanes_of(step_of("1F1B"))
    assert typical_ms(pipeline, (Slow(50.0, group="pp"),)) > typical_ms(pipeline)


def test_a_prediction_with_a_slow_rank_says_what_it_adds_and_whom_it_delays() -> None:
    found = predict(JOBS["TP, PP and DP"])
    slower, costs = slowed(found, ["rank=15,factor=3"])
    assert slower.step_ms == pytest.approx(found.step_ms + costs[0]["delay_ms"])
    assert slower.step_ms > 1.2 * found.step_ms
    assert slower.mfu is not None
    assert found.mfu is not None
    assert slower.mfu < found.mfu
    assert costs[0]["delays"].startswith(
        "stage 1, replica 3: delays 1 other rank of its stage in every pass, 1 other stage of replica 3"
    )


def test_a_share_of_slow_gpus_is_drawn_anew_for_every_set_of_gpus() -> None:
    lanes = lanes_of(step_of("DDP"))
    steps = drawn_ms(lanes, Variability(), (Slow(2.0, share=0.05),), draws=4000)
    assert (steps > typical_ms(lanes) * 1.01).mean() == pytest.approx(1 - 0.95**8, rel=0.08)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rank=512,factor=2", "the job has ranks 0 to 511"),
        ("rank=-1,factor=2", "rank is the number of a rank, from 0 to 511"),
        ("rank=1,factor=0", "factor must be above 0"),
        ("rank=1,factor=inf", "factor must be above 0"),
        ("rank=1,factor=two", "factor is not a number: two"),
        ("rank=1", "names one slow thing and its factor: write rank=7,factor=1.3"),
        ("rank=1,link=2,factor=2", "names one slow thing and its factor"),
        ("rnk=1,factor=2", "did you mean rank?"),
        ("share=1.5,factor=2", "share must be above 0 and at most 1"),
        ("rank=1,group=dp,factor=2", "group is dp, tp or pp, alone or with a link"),
    ],
)
def test_a_slow_part_that_is_none_ends_in_one_line(text: str, sentence: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_slow([text], 512)
    assert str(caught.value).startswith(f"--slow {text}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_factors_for_one_rank_are_refused() -> None:
    with pytest.raises(OptionError, match="--slow rank=3 is given twice: state one factor for it"):
        read_slow(["rank=3,factor=2", "rank=3,factor=1.5"], 8)


def test_very_many_slow_parts_are_refused_with_another_way() -> None:
    with pytest.raises(OptionError, match="--slow has 100 slow parts, at most 64: use share=… for many GPUs"):
        read_slow([f"rank={rank},factor=2" for rank in range(100)], 512)


# ---------------------------------------------------------------------- what a user sees
def test_causes_are_the_step_without_each_variance_the_most_expensive_first() -> None:
    risk = step_risk(predict(JOBS["DDP"]), Variability(gpu=Spread.lognormal(0.1), job=Spread.lognormal(0.01)))
    assert [one.name for one in risk.causes] == ["gpu", "job"]
    alone = step_risk(predict(JOBS["DDP"]), Variability(job=Spread.lognormal(0.01)))
    assert risk.causes[0].p90_ms == pytest.approx(alone.p90_ms * risk.scale / alone.scale, rel=0.01)
    assert risk.causes[0].words == "GPUs differ (the slowest of 8 decides)"


def test_runs_differ_by_their_gpus_and_not_by_single_steps() -> None:
    found = predict(JOBS["DDP"])
    spread = Spread.lognormal(0.05)
    risks = [
        step_risk(found, Variability(gpu=gpu, step=step))
        for gpu, step in ((spread, NONE), (spread, spread), (NONE, spread))
    ]
    fleets, both, steps = (risk.run_factors(2000) / risk.scale for risk in risks)
    assert steps.std() < 0.3 * fleets.std()
    assert steps.mean() > 1.03  # the slowest of eight, in every step, against a step in which nothing differs
    assert both.mean() > fleets.mean()
    assert 0.6 * fleets.std() < both.std() < 1.2 * fleets.std()
    calm = step_risk(found, Variability())
    np.testing.assert_allclose(calm.run_factors(10), np.full(10, calm.scale))


def test_the_median_of_steps_that_differ_as_usual_is_the_predicted_step() -> None:
    found = predict(JOBS["DDP"])
    usual = step_risk(found, draws=1000)
    assert usual.percentile(50) == pytest.approx(found.step_ms)
    assert usual.calm_ms < found.step_ms < usual.p90_ms
    assert usual.run_factors(500).mean() == pytest.approx(1.0, abs=0.03)
    calm, wild = (step_risk(predict(JOBS["DDP"].replaced({"variability.gpu": s})), draws=1000) for s in (0.0, 0.1))
    assert calm.scale == wild.scale == usual.scale, "what is stated counts from the usual"
    assert calm.percentile(50) < found.step_ms < wild.percentile(50)


def test_a_step_in_which_nothing_differs_is_a_little_shorter_on_any_number_of_gpus() -> None:
    for gpus in (8, 4096):
        found = predict(JOBS["DDP"].replaced({"cluster.gpus": gpus, "train.global_batch": gpus}))
        risk = step_risk(found, draws=300)
        assert 0.9 < risk.calm_ms / found.step_ms <= 1
        assert risk.calm_ms > found.breakdown.exposed_compute_ms + found.breakdown.overlapped_ms


def test_what_is_slow_delays_drawn_steps_as_it_delays_the_predicted_one() -> None:
    found, slow = predict(JOBS["DDP"]), ["rank=5,factor=1.5"]
    late, _ = slowed(found, slow)
    assert step_risk(found, slow=slow, draws=2000).percentile(50) == pytest.approx(late.step_ms, rel=0.02)


def test_a_slow_adapter_slows_nothing_inside_a_node() -> None:
    found = predict(JOBS["TP, PP and DP"].replaced({"cluster.gpus": 16}))
    assert slowed(found, ["link=0,factor=10,group=tp"])[1][0]["delay_ms"] == 0
    assert slowed(found, ["link=0,factor=10"])[1][0]["delay_ms"] > 0, "replicas meet across nodes"
    assert slowed(found, ["group=tp,factor=10"])[1][0]["delay_ms"] > 0.2 * found.step_ms


def test_a_slow_adapter_slows_only_messages_to_stages_on_other_nodes() -> None:
    """Two stages share a node: of the three boundaries of four stages, the one in the middle lies between nodes."""
    lanes = lanes_of(simulate_step(small({"tp": 2, "pp": 4, "dp": 2}, 16)))
    apart = {rank: lanes.apart((Slow(9.0, link=rank, group="pp"),)).tolist() for rank in (0, 4, 7, 8, 12)}
    nobody, before, after = np.ones((2, 4)).tolist(), [1.0, 1.0, 9.0, 1.0], [1.0, 9.0, 1.0, 1.0]
    alike, wrapped = [1.0] * 4, [9.0, 1.0, 1.0, 1.0]
    assert apart[4] == [nobody, nobody, [after, alike]]
    assert apart[7] == [nobody, nobody, [alike, after]]
    assert apart[8] == [nobody, [before, alike], nobody]
    assert apart[0] == [nobody, [wrapped, alike], nobody], "virtual stages go on from the last stage to the first"
    plain = typical_ms(lanes)
    assert typical_ms(lanes, (Slow(200.0, link=4),)) > 1.01 * plain
    assert typical_ms(lanes, (Slow(200.0, link=0),)) == plain
    assert typical_ms(lanes, (Slow(200.0, link=12),)) == plain
    every = typical_ms(lanes, (Slow(200.0, group="pp"),))
    assert typical_ms(lanes, (Slow(200.0, link=4),)) < every


def test_whom_a_slow_part_delays_is_said_where_it_delays_anybody() -> None:
    found = predict(small({"tp": 2, "pp": 4, "dp": 2}, 16))
    slow = ("rank=1,factor=1", "rank=2,factor=0.5", "link=0,factor=10", "link=4,factor=200", "rank=0,factor=2")
    nobody, fast, inside, link, rank = (one["delays"] for one in slowed(found, slow)[1])
    assert nobody == fast == inside == "nobody"
    assert link == "stage 1, replica 0: delays 3 other stages of replica 0"
    assert rank.endswith("delays 1 other rank of its stage in every pass, 3 other stages of replica 0, "
                         "1 other replica at the end of the step")  # fmt: skip


def test_a_slow_adapter_slows_what_its_own_ranks_gather_and_reduce() -> None:
    """Weights are gathered inside nodes, and gradients are reduced between them, too."""
    lanes = lanes_of(simulate_step(small({"zero": 3, "shard": 8}, 16, train=TITAN)))
    slower = lanes.slow_graph((Slow(9.0, link=3),)).duration / np.maximum(lanes.graph.duration, 1e-9)
    busy = (lanes.meets > 0) & (lanes.graph.duration > 0)
    assert slower[busy & lanes.gathers] == pytest.approx(1)
    assert slower[busy & ~lanes.gathers] == pytest.approx(9)


def test_a_file_of_spreads_states_what_a_setup_states(tmp_path: Path) -> None:
    write = tmp_path / "spreads.json"
    write.write_text('{"gpu": 0.1}')
    command = ("predict", ROOT / "examples/one-h200.toml", "--gpus", "8", "--risk", "--draws", "500", "--json")
    by_file = json.loads(lumos_here(*command, "--variability", write).stdout)["risk"]
    by_key = json.loads(lumos_here(*command, "--set", "variability.gpu=0.1").stdout)["risk"]
    assert by_file["step_ms"] == by_key["step_ms"]
    assert by_file["variability"] == by_key["variability"]


def test_what_a_setup_states_comes_before_what_is_usual() -> None:
    setup = JOBS["DDP"].replaced({"variability.gpu": 0.2})
    risk = step_risk(predict(setup), draws=500)
    assert risk.variability.sigmas["gpu"] == pytest.approx(0.2)
    assert risk.variability.sigmas["job"] == usual_variability().sigmas["job"]
    assert risk.variability.source.startswith("stated: gpu; else ")


def test_predict_risk_prints_percentiles_and_causes_and_writes_them(tmp_path: Path) -> None:
    command = ("predict", ROOT / "examples/one-h200.toml", "--set", "cluster.gpus=4", "--risk", "--draws", 400)
    plain = json.loads(lumos_here(*command[:4], "--json").stdout)
    answer = json.loads(lumos_here(*command, "--json", "-o", tmp_path / "risk.html").stdout)
    risk = answer.pop("risk")
    assert answer == plain
    assert (risk["draws"], risk["seed"], risk["slow"]) == (400, 0, [])
    assert risk["step_ms"]["typical"] == plain["step_ms"]
    assert risk["step_ms"]["p50"] <= risk["step_ms"]["p90"] <= risk["step_ms"]["p99"]
    assert set(risk["causes"][0]) == {"name", "words", "mean_ms", "p90_ms", "share"}
    assert set(risk["variability"]) == set(CAUSES)
    page = (tmp_path / "risk.html").read_text("utf-8")
    assert "Risk of the step" in page
    assert "typical step" in page
    shown = lumos_here(*command, "-o", tmp_path / "risk.csv").stdout
    assert "risk of the step: 400 steps drawn" in shown
    assert "GPUs differ (the slowest of 4 decides)" in shown
    columns = (tmp_path / "risk.csv").read_text("utf-8").splitlines()[0].split(",")
    assert {"risk_p50_ms", "risk_p90_ms", "risk_p99_ms", "risk_draws"} <= set(columns)


def test_predict_slow_changes_the_predicted_step_and_says_by_how_much() -> None:
    command = ("predict", LARGE_EXAMPLE, "--json")
    plain = json.loads(lumos_here(*command).stdout)
    slow = json.loads(lumos_here(*command, "--slow", "rank=7,factor=1.3").stdout)
    stated = json.loads(lumos_here(*command, "--set", 'variability.slow=["rank=7,factor=1.3"]').stdout)
    assert slow["step_ms"] == stated["step_ms"] == pytest.approx(plain["step_ms"] + slow["slow"][0]["delay_ms"])
    assert slow["step_ms"] > 1.15 * plain["step_ms"]
    assert stated["setup"]["variability"] == {"slow": ["rank=7,factor=1.3"]}
    assert "variability" not in plain["setup"]
    same = json.loads(lumos_here(*command, "--slow", "rank=7,factor=1").stdout)
    assert same["step_ms"] == pytest.approx(plain["step_ms"], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--slow", "rank=999,factor=2"), "lumos: --slow rank=999,factor=2: the job has ranks 0 to 511\n"),
        (("--draws", "100"), "lumos: --draws 100: it says how many steps --risk draws: add --risk\n"),
        (("--risk", "--draws", "0"), "lumos: --draws 0: draw 1 to 1,000,000 steps, 10,000 as usual\n"),
        (
            ("--risk", "--gpu", "h100,b200"),
            "lumos: --risk and --gpu h100,b200: steps are drawn for one GPU; name one\n",
        ),
    ],
)
def test_mistakes_about_risk_end_in_one_line(options: tuple[str, ...], sentence: str) -> None:
    found = lumos_here("predict", LARGE_EXAMPLE, *options)
    assert found.returncode == 2
    assert found.stderr.startswith(sentence)
    assert found.stderr.count("\n") == 1


def test_ranks_of_a_dry_run_are_alike_and_wait_for_the_slowest_in_its_collectives() -> None:
    found = predicted(*[matmul() for _ in range(20)], gather(), matmul(after=(20,)))
    gpus = Spread.lognormal(0.05)
    risk = step_risk(found, Variability(gpu=gpus), draws=4000)
    assert risk.ranks == 8
    busy = sum(row.ms for row in found.all_operators if row.name != "all_gather")
    slowest = float(np.median(gpus.slowest_of(8, np.linspace(0.0001, 0.9999, 2001))))
    assert risk.percentile(50) / risk.scale == pytest.approx(found.step_ms + (slowest - 1) * busy, rel=0.02)
    calm = step_risk(found, Variability(), draws=2)
    assert calm.step_ms.tolist() == pytest.approx([calm.scale * found.step_ms] * 2)


def test_another_configuration_of_a_traced_run_has_a_risk_and_slow_ranks_too() -> None:  # its host decides
    folder = ROOT / "tests/data/capture/fake_world"
    command = ("predict", folder / "setup.toml", "--from", folder, "--set", "model.layers=8", "--json")
    plain = json.loads(lumos_here(*command).stdout)
    answer = json.loads(lumos_here(*command, "--risk", "--draws", 300, "--slow", "rank=3,factor=200").stdout)
    assert answer["step_ms"] > plain["step_ms"]
    assert answer["risk"]["step_ms"]["typical"] == pytest.approx(answer["step_ms"])
    assert plain["step_ms"] < answer["risk"]["step_ms"]["p50"] < answer["risk"]["step_ms"]["p90"]
    assert answer["risk"]["slow"] == answer["slow"]


# ---------------------------------------------------------------------- independence
def test_what_is_drawn_for_the_gpu_of_a_pass_says_nothing_of_its_host() -> None:
    """Half of a pass is of the GPU and half of the host: variances of independent factors add up."""
    columns = 20_000
    pass_ = drawn_steps._table(
        drawn_steps._TASK, is_first=np.array([True]), gap=np.zeros(1), length=np.ones(1), stage=np.zeros(1, int),
        gpu=np.full(1, 0.5), host=np.full(1, 0.5), within=np.zeros(1), fresh=np.array([True]), meets=np.ones(1, int),
        micro=np.full(1, -1),
    )  # fmt: skip
    factors = np.linspace(0.5, 1.5, 4096)
    tables = np.array([factors, np.ones(4096), factors])  # of passes, collectives and hosts
    drawn, chosen = np.ones((6, 1, columns)), np.full((2, 1, columns), -1)
    chosen[0], drawn[5] = 0, 0.0
    states = np.random.default_rng(0).integers(0, 1 << 63, (2, columns), np.uint64)
    spans = drawn_spans(
        np.zeros(1, int), pass_, np.zeros(2, int), np.zeros(0, drawn_steps._EDGE), drawn, chosen, np.ones((0, columns)),
        tables, 1.0, states[0], states[1], states[0].copy(), 1, 1,
    )  # fmt: skip
    assert np.var(spans) == pytest.approx(np.var(factors) / 2, rel=0.03)
