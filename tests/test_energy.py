"""What a step costs in energy and money: laws of every forecast, figures on measured steps, the bill, the options."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos.cli import main as cli
from lumos.costs.energy import clock_of, in_step_factors, joules_for
from lumos.data_files import read_table
from lumos.errors import OptionError
from lumos.prediction.bill import Bill, Tariff, read_tariff
from lumos.prediction.power import Energy, energy_of, least_joules
from lumos.prediction.prediction import predict
from lumos.program.operators import KINDS, Collective, Group, Operator
from lumos.setup import Setup, gpu_named, gpu_names
from lumos.setup.gpus import Gpu
from lumos.step.step import simulate_step
from test_forecast import described, setups

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))

import fit_energy as fitting  # noqa: E402

EXAMPLE = ROOT / "examples/one-h200.toml"
positive = st.floats(1e-6, 1e6)


# Energy of a step, by hand


@pytest.mark.parametrize(("dp", "gb_s"), [(8, 450.0), (16, 50.0)])
def test_a_step_costs_its_blocks_its_update_and_its_communication(dp: int, gb_s: float) -> None:
    """Over idle: blocks for every micro-batch, the optimizer at its power, links that send at their bandwidth."""
    step = simulate_step(described(parallel__dp=dp, parallel__zero=1, train__microbatches=3, cluster__gpu="h100",
                                   train__framework="megatron", parallel__dp_overlap=False))  # fmt: skip
    joules, chunk = step.costs.joules, step.chunks[0][0]
    blocks = 3 * (chunk.forward.joules + chunk.backward.joules + chunk.weights.joules)
    update = joules.update_w * step.role_us("optimizer", 0) / 1e6
    busy_s = (step.role_us("reduce rest", 0) + step.role_us("publish", 0)) / 1e6
    sent = (joules.talking_w + joules.wire * gb_s * 1e9) * busy_s
    assert min(blocks, update, sent) > 0
    energy = energy_of(step)
    assert energy.work == pytest.approx((blocks + update + sent,))
    assert (energy.seconds, energy.stage_gpus) == (pytest.approx(step.us / 1e6), dp)
    assert (energy.idle_w, energy.most_w) == (gpu_named("h100").idle_w, joules.most_w)
    assert energy_of(step, 7.0).seconds == 7.0


def test_fsdp_costs_what_it_gathers_and_reduces() -> None:
    step = simulate_step(described(parallel__dp=8, parallel__zero=3, cluster__gpu="h100", train__framework="torchtitan",
                                   train__optimizer="none"))  # fmt: skip
    joules, chunk = step.costs.joules, step.chunks[0][0]
    busy_s = (step.role_us("gather", 0) + step.role_us("reduce", 0)) / 1e6
    sent = (joules.talking_w + joules.wire * 450e9) * busy_s
    assert energy_of(step).work == pytest.approx((chunk.forward.joules + chunk.backward.joules + sent,))


def test_a_stage_costs_all_its_chunks() -> None:
    step = simulate_step(described(parallel__pp=2, parallel__vpp=2, train__microbatches=4, train__optimizer="none"))
    wanted = [4 * sum(block.joules for chunk in row for block in chunk.blocks) for row in step.chunks]
    assert energy_of(step).work == pytest.approx(wanted)


def test_every_stage_has_its_own_power() -> None:
    energy = Energy(2.0, 4, 100.0, 700.0, (0.0, 400.0, 2000.0))
    assert energy.stage_w == (100, 300, 700)
    assert energy.watts == pytest.approx(1100 / 3)
    assert energy.joules == pytest.approx(1100 * 2.0 * 4)
    assert energy.at_limit == [2]
    step = simulate_step(described(parallel__pp=4, parallel__dp=2, train__microbatches=4))
    assert (energy_of(step).stage_gpus, len(energy_of(step).work)) == (2, 4)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ((0, 0), "100 W per GPU"),
        ((900, 900), "700 W per GPU, at the power limit"),
        ((900, 0, 900), "500 W per GPU (mean); stages 0, 2 at the power limit of 700 W"),
        ((900, 900, 900, 900, 100), "600 W per GPU (mean); stages 0, 1, 2, 3 at the power limit of 700 W"),
        ((900, 900, 900, 900, 900, 500), "683 W per GPU (mean); 5 of 6 stages at the power limit of 700 W"),
    ],
)
def test_power_is_said_with_the_stages_that_its_limit_slows_down(work: tuple[float, ...], words: str) -> None:
    assert Energy(1.0, 1, 100.0, 700.0, work).words == words


def test_a_step_costs_at_least_its_blocks() -> None:
    whole = described(parallel__pp=2, train__microbatches=4, train__optimizer="none", cluster__gpu="h200")
    step = simulate_step(whole)
    assert least_joules(step.assembly, step.us / 1e6) == pytest.approx(energy_of(step).joules)
    updated = simulate_step(described(parallel__pp=2, train__microbatches=4, cluster__gpu="h200"))
    assert least_joules(updated.assembly, updated.us / 1e6) < energy_of(updated).joules


def test_a_budget_of_tokens_is_days_energy_and_money() -> None:
    """64 GPUs, 10 s and a million tokens a step, 400 kJ; 15 million tokens and one are 16 steps."""
    tariff = Tariff(gpu_hour=3.0, kwh=0.2, pue=1.5, tokens=15_000_001)
    bill = Bill(tariff, 64, 10.0, (8.0, 12.0), 1_000_000, 400e3).as_dict()
    hours, kwh = 64 * 10 / 3600, 400e3 * 1.5 / 3.6e6
    money = 3 * hours + 0.2 * kwh
    assert bill["gpu_hours_per_step"] == pytest.approx(hours)
    assert bill["kwh_per_step"] == pytest.approx(kwh)
    assert bill["money_per_step"] == bill["money_per_million_tokens"] == pytest.approx(money)
    assert (bill["joules_per_step"], bill["joules_per_token"]) == pytest.approx((400e3, 0.4))
    assert bill["watts_per_gpu"] == pytest.approx(400e3 / 10 / 64)
    assert (bill["price_per_gpu_hour"], bill["price_per_kwh"], bill["pue"]) == (3.0, 0.2, 1.5)
    assert bill["budget"] == {
        "tokens": 15_000_001, "steps": 16, "days": pytest.approx(160 / 86400),
        "days_interval": pytest.approx([128 / 86400, 192 / 86400]), "gpu_hours": pytest.approx(16 * hours),
        "kwh": pytest.approx(16 * kwh), "money": pytest.approx(16 * money),
    }  # fmt: skip


def test_a_run_whose_power_is_not_known_has_a_bill_without_energy() -> None:
    bill = Bill(Tariff(gpu_hour=3.0, kwh=0.2, tokens=1e6), 1, 3600.0, (1.0, 2.0), 1_000_000, None).as_dict()
    assert bill["joules_per_step"] is bill["joules_per_token"] is bill["watts_per_gpu"] is bill["kwh_per_step"] is None
    assert bill["money_per_step"] == 3.0
    assert bill["budget"]["kwh"] is None


def test_options_of_a_tariff_have_bounds_that_belong_to_them() -> None:
    assert read_tariff() == Tariff(None, None, 1.0, None)
    assert read_tariff("0", "0", "1", "1") == Tariff(0.0, 0.0, 1.0, 1.0)
    assert read_tariff("2.5", "0.1", "10", "1e24") == Tariff(2.5, 0.1, 10.0, 1e24)
    assert read_tariff(tokens="1.5K").tokens == 1500


# Laws


@settings(max_examples=60)
@given(setups())
def test_no_gpu_draws_less_than_idle_or_more_than_its_limit(setup: Setup) -> None:
    gpu, energy = setup.cluster.accelerator, predict(setup).energy
    assert len(energy.stage_w) == setup.parallel.pp
    for watts in energy.stage_w:
        assert gpu.idle_w <= watts <= gpu.tdp_w
    assert energy.joules == pytest.approx(energy.watts * energy.seconds * setup.cluster.gpus)


@given(positive, st.lists(st.floats(0, 1e9), min_size=1, max_size=8), st.floats(1.001, 100))
def test_the_same_work_in_more_time_costs_more(seconds: float, work: list[float], longer: float) -> None:
    energy = Energy(seconds, 4, 124.0, 693.0, work)
    assert replace(energy, seconds=seconds * longer).joules > energy.joules


@given(positive, st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_work_in_the_same_time_never_costs_less(seconds: float, work: float, more: float) -> None:
    energy = Energy(seconds, 4, 124.0, 693.0, [work])
    assert replace(energy, work=[work + more]).joules >= energy.joules


@pytest.mark.parametrize(("layers", "hidden"), [(2, 512), (8, 2048), (4, 8192)])
def test_twice_the_micro_batches_cost_nearly_twice_the_energy(layers: int, hidden: int) -> None:
    keys = {"model__layers": layers, "model__hidden": hidden, "model__ffn": 4 * hidden, "cluster__gpu": "h200"}
    four, eight = (predict(described(**keys, train__microbatches=count)).energy_j for count in (4, 8))
    assert 1.7 * four < eight < 2.02 * four


def test_a_slower_host_costs_idle_power_and_no_more() -> None:
    tiny = {"model__layers": 2, "model__hidden": 512, "model__ffn": 1024, "model__vocab": 8000, "train__seq": 256}
    fast, slow = (predict(described(**tiny, cluster__gpu="h200", cluster__host=host)) for host in (2.0, 1.0))
    assert slow.host_bound
    waited = (slow.step_ms - fast.step_ms) / 1e3
    assert waited > 0
    assert slow.energy_j - fast.energy_j == pytest.approx(waited * gpu_named("h200").idle_w, rel=1e-6)


def test_recomputing_costs_energy() -> None:
    plain, again = (predict(described(train__recompute=how, train__micro_batch=4)) for how in ("none", "full"))
    assert again.energy_j > 1.15 * plain.energy_j


def test_stages_that_wait_draw_less() -> None:
    """A pipeline that is mostly bubble: four stages, one micro-batch."""
    bubble, full = (predict(described(parallel__pp=4, train__microbatches=count)).energy for count in (1, 32))
    assert max(bubble.stage_w) < 0.7 * min(full.stage_w)


# What work costs


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_a_price_in_joules_for_every_precision(name: str) -> None:
    gpu = gpu_named(name)
    joules = joules_for(gpu)
    assert joules.measured == (name == "h200")
    assert gpu.idle_w < joules.most_w <= gpu.tdp_w
    assert all(0 < value < 1e-9 for value in joules.flop.values())


def test_narrow_numbers_cost_less() -> None:
    flop = joules_for(gpu_named("h200")).flop
    assert flop["fp8"] < flop["bf16"] < flop["tf32"] < flop["fp32"]


def test_a_chip_that_does_more_for_its_watts_pays_less_for_an_operation() -> None:
    flop = {name: joules_for(gpu_named(name)).flop["bf16"] for name in ("a100", "h100", "h200", "b200")}
    assert flop["a100"] > flop["h100"] > flop["b200"]
    assert flop["h100"] == pytest.approx(flop["h200"], rel=0.05)  # the same chip


def test_a_kernel_that_takes_longer_for_the_same_costs_what_any_kernel_draws() -> None:
    joules, operator = joules_for(gpu_named("h200")), Operator("gemm_tn", (4096, 4096, 4096))
    more = joules.operator(operator, 300.0) - joules.operator(operator, 200.0)
    assert more == pytest.approx(joules.active_w * 100e-6)


def test_what_stays_in_the_cache_costs_less() -> None:
    joules = joules_for(gpu_named("h200"))
    small, large = (joules.operator(Operator("add", (rows, 1024)), 0.0) / rows for rows in (1024, 1 << 20))
    assert small < 0.5 * large


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_operator_is_free(kind: str) -> None:
    sizes = {"grouped": 4, "gemm": 3, "bmm": 4, "sdpa": 4, "rotary": 4, "softmax": 3, "fillmask": 3, "adamw": 1,
             "stream": 1, "embedding": 3, "linear": 3, "optimizer": 3}  # fmt: skip
    size = next((count for word, count in sizes.items() if word in kind), 2)
    assert joules_for(gpu_named("h200")).operator(Operator(kind, (256,) * size), 0.0) > 0


def test_a_collective_costs_what_it_sends() -> None:
    joules, group = joules_for(gpu_named("h100")), Group(8, 8)
    gather, reduce = (joules.collective(Collective(kind, 1e9, group), 0.0) for kind in ("all_gather", "all_reduce"))
    assert reduce == pytest.approx(2 * gather)
    assert joules.collective(Collective("all_gather", 2e9, group), 0.0) == pytest.approx(2 * gather)


# Clocks under a power limit


def capped(name: str, watts: float) -> Gpu:
    return replace(gpu_named(name), tdp_w=watts)


def test_the_clock_falls_until_matmuls_fit_under_the_power_limit() -> None:
    """An H200 may draw 0.9884 · 700 W, idle included; matmuls at 0.9 of its peak take 65.4 W and 1.011 pJ each."""
    spare_w, matmul_w = 0.9884 * 700 - 124, 65.4 + 0.9 * 1.011 * 989.4
    assert clock_of(gpu_named("h200")).core == pytest.approx((spare_w / matmul_w) ** (1 / 1.98), rel=1e-3)


def test_a_loop_of_matmuls_ran_at_the_clock_that_follows_from_its_power() -> None:
    """8192³ on the H200 was held at 1455 of 1980 MHz; nothing of it was fitted to that clock alone."""
    assert clock_of(gpu_named("h200")).core == pytest.approx(1455 / 1980, rel=0.05)


def test_the_factor_of_a_step_moves_to_another_gpu_by_the_clocks_that_both_hold() -> None:
    """2 250 TFLOP/s for 1 000 W is more than an H200 has to feed with the same energy for an operation."""
    b200, h200 = gpu_named("b200"), gpu_named("h200")
    assert clock_of(b200).core < clock_of(h200).core
    ratio = clock_of(h200).core / clock_of(b200).core
    assert in_step_factors(b200).matrix == pytest.approx(in_step_factors(h200).matrix * ratio)
    assert in_step_factors(b200).stream == in_step_factors(h200).stream


@pytest.mark.parametrize("name", ["a100", "gh200", "h200", "cpu"])
def test_a_factor_of_its_own_holds_at_the_usual_power_limit(name: str) -> None:
    table, gpu = read_table("in_step.json"), gpu_named(name)
    own = table["all"] | table.get(gpu.family, {}) | table.get(name, {})
    assert in_step_factors(gpu).matrix == pytest.approx(own["matrix"])
    assert in_step_factors(gpu).sustained == pytest.approx(own["sustained"])


@given(st.sampled_from(gpu_names()), st.floats(1, 5000), st.floats(1, 5000))
def test_less_power_never_makes_a_kernel_faster(name: str, one: float, other: float) -> None:
    low, high = (in_step_factors(capped(name, watts)) for watts in sorted((one, other)))
    assert low.matrix >= high.matrix > 0
    assert low.stream >= high.stream > 0
    assert low.sustained <= high.sustained <= 1


@given(st.sampled_from(gpu_names()), st.floats(0, 1e5), st.floats(0, 1e5))
def test_any_limit_and_any_idle_power_leave_some_clock(name: str, watts: float, idle: float) -> None:
    gpu = replace(gpu_named(name), tdp_w=watts, idle_w=idle)
    assert 0 < clock_of(gpu).core <= 1
    assert 0 < in_step_factors(gpu).matrix < 1e7
    assert all(joules >= 0 for joules in joules_for(gpu).flop.values())


@pytest.mark.parametrize("name", gpu_names())
def test_power_beyond_the_highest_clock_changes_nothing(name: str) -> None:
    plenty = 5 * gpu_named(name).tdp_w
    assert clock_of(capped(name, plenty)) == (1.0, 1.0)
    assert in_step_factors(capped(name, plenty)) == in_step_factors(capped(name, 2 * plenty))


def test_capped_power_lengthens_what_the_gpu_computes_and_leaves_the_rest_alone() -> None:
    usual, less = in_step_factors(gpu_named("h100")), in_step_factors(capped("h100", 500.0))
    assert 1.15 < less.matrix / usual.matrix < 1.35
    assert less.stream == usual.stream
    computes, waits = described(cluster__gpu="h100"), described(cluster__gpu="h100", cluster__host=0.02)
    assert predict(waits).host_bound
    for run, slower in ((computes, True), (waits, False)):
        before, after = predict(run), predict(run.replaced({"cluster.power_w": 500.0}))
        assert (after.step_ms > 1.05 * before.step_ms) == slower
        assert slower or after.step_ms == pytest.approx(before.step_ms)


@given(st.sampled_from(["h100", "h200", "b200", "a100"]), st.floats(0.65, 1.0), st.floats(0.65, 1.0))
@settings(max_examples=20)
def test_a_capped_gpu_takes_longer_for_no_more_energy(name: str, one: float, other: float) -> None:
    """Down to two thirds of its limit: further down, what it draws idle for longer outweighs."""
    run, watts = described(cluster__gpu=name), gpu_named(name).tdp_w
    low, high = (predict(run.replaced({"cluster.power_w": watts * share})) for share in sorted((one, other)))
    assert low.step_ms >= high.step_ms
    assert (low.energy_j or 0) <= (high.energy_j or 0) * (1 + 1e-9)


def test_an_answer_under_another_limit_is_less_certain_by_half_of_what_the_limit_changes() -> None:
    run = described(cluster__gpu="h200", train__cuda_graphs=True)
    usual, less = predict(run), predict(run.replaced({"cluster.power_w": 450.0}))
    wider = math.log(less.interval_ms[1] / less.step_ms) ** 2 - math.log(usual.interval_ms[1] / usual.step_ms) ** 2
    assert math.sqrt(wider) == pytest.approx(0.5 * math.log(less.step_ms / usual.step_ms), rel=0.3)
    (told,) = [text for text in less.warnings if "power limit" in text]
    assert told.startswith("no run was measured under a power limit of 450 W (usual for h200: 700 W)")
    assert not [text for text in usual.warnings if "power limit" in text]


def test_the_usual_power_limit_may_be_stated() -> None:
    run = described(cluster__gpu="b200")
    stated = run.replaced({"cluster.power_w": gpu_named("b200").tdp_w})
    assert predict(stated).step_ms == predict(run).step_ms
    assert predict(stated).energy_j == predict(run).energy_j


def test_power_that_was_not_measured_is_said() -> None:
    def said(gpu: str) -> list[str]:
        return [w for w in predict(described(cluster__gpu=gpu)).warnings if "power" in w]

    assert said("h200") == []
    assert len(said("mi300x")) == 1


# Figures


def mean_error(cases: list[fitting.Case], guesses: list[float]) -> float:
    return sum(abs(guess / case.joules - 1) for case, guess in zip(cases, guesses, strict=True)) / len(cases)


@pytest.fixture(scope="module")
def own() -> list[fitting.Case]:
    return fitting.own_cases()


@pytest.fixture(scope="module")
def fixed() -> fitting.Fixed:
    return fitting.fixed_of(fitting.read_rows(ROOT / "calibration/power_h200.jsonl"))


def test_gaps_between_kernels_draw_no_more_than_idle() -> None:
    rows = {row["name"]: row["watts"] for row in fitting.read_rows(ROOT / "calibration/power_h200.jsonl")}
    for period in (12, 30, 100, 1000):
        assert rows[f"add_128_512_every_{period}"] == pytest.approx(rows["idle_context"], rel=0.03)


def test_steps_that_were_never_fitted_on_are_within_the_bar(own: list[fitting.Case], fixed: fitting.Fixed) -> None:
    """Each predicted with constants fitted without it; GPU-bound ones with everything predicted, bar 10 %."""
    loops = fitting.loops_of(fitting.read_rows(ROOT / "calibration/power_h200.jsonl"), fixed)
    found = {case: fitting.fit([c for c in own if c is not case], loops, fixed) for case in own}
    busy = [case for case in own if case.watts > fitting.BUSY_W]
    calm = [case for case in own if case.watts <= fitting.BUSY_W]
    assert (len(busy), len(calm)) == (21, 16)
    assert mean_error(busy, [fitting.joules_in(c, found[c], fixed, c.predicted_s) for c in busy]) < 0.05
    assert mean_error(calm, [fitting.joules_in(c, found[c], fixed, c.seconds) for c in calm]) < 0.03
    assert mean_error(calm, [fitting.joules_in(c, found[c], fixed, c.predicted_s) for c in calm]) < 0.16


@pytest.mark.data
def test_the_shared_steps_are_foreseen_by_constants_from_ours(
    own: list[fitting.Case], fixed: fitting.Fixed, shared_data: Path
) -> None:
    loops = fitting.loops_of(fitting.read_rows(ROOT / "calibration/power_h200.jsonl"), fixed)
    found, cases = fitting.fit(own, loops, fixed), fitting.shared_cases(shared_data)
    assert mean_error(cases, [fitting.joules_in(c, found, fixed, c.seconds) for c in cases]) < 0.02
    busy = [case for case in cases if case.watts > fitting.BUSY_W]
    assert mean_error(busy, [fitting.joules_in(c, found, fixed, c.predicted_s) for c in busy]) < 0.03


def test_a_forecast_says_what_was_fitted(own: list[fitting.Case]) -> None:
    """The bench's sum and the package's are the same: through `forecast`, GPU-bound steps are within 5 %."""
    rows = {row["name"]: row for row in fitting.read_rows(ROOT / "calibration/steps_h200.jsonl")}
    busy = [case for case in own if case.watts > fitting.BUSY_W and case.name in rows]
    guesses = [predict(fitting.setup_of(rows[case.name])).energy_j for case in busy]
    assert mean_error(busy, guesses) < 0.05


# The bill

prices = st.none() | st.floats(0, 1e4)
tariffs = st.builds(Tariff, prices, prices, st.floats(1, 3), st.none() | st.floats(1, 1e15))
bills = st.builds(
    Bill, tariffs, st.integers(1, 100_000), st.floats(1e-3, 1e3), st.just((1.0, 2.0)), st.integers(1, 10**8),
    st.floats(1e-2, 1e9),
)  # fmt: skip


@given(bills)
def test_money_is_there_exactly_where_a_price_is(bill: Bill) -> None:
    answer = bill.as_dict()
    priced = bill.tariff.gpu_hour is not None or bill.tariff.kwh is not None
    assert (answer["money_per_step"] is not None) == priced
    assert (answer["money_per_million_tokens"] is not None) == priced
    if answer["budget"] is not None:
        assert (answer["budget"]["money"] is not None) == priced


@given(bills, st.floats(0, 1e4), st.floats(0, 1e4))
def test_prices_add_up(bill: Bill, gpu_hour: float, kwh: float) -> None:
    def money(tariff: Tariff) -> float:
        return replace(bill, tariff=tariff).step_money or 0.0

    both = replace(bill.tariff, gpu_hour=gpu_hour, kwh=kwh)
    apart = money(replace(both, kwh=None)) + money(replace(both, gpu_hour=None))
    assert money(both) == pytest.approx(apart)
    assert money(replace(both, kwh=None)) == pytest.approx(gpu_hour * bill.gpus * bill.step_s / 3600)
    assert money(replace(both, gpu_hour=None)) == pytest.approx(kwh * both.pue * bill.step_joules / 3.6e6)


@given(bills, st.floats(1, 1e15))
def test_a_budget_is_whole_steps_and_everything_goes_with_them(bill: Bill, tokens: float) -> None:
    bill = replace(bill, tariff=replace(bill.tariff, tokens=tokens))
    answer, budget = bill.as_dict(), bill.as_dict()["budget"]
    assert budget["steps"] * bill.step_tokens >= tokens * (1 - 1e-12)
    assert (budget["steps"] - 1) * bill.step_tokens < tokens
    assert budget["days"] == pytest.approx(budget["steps"] * bill.step_s / 86400)
    assert budget["kwh"] == pytest.approx(budget["steps"] * answer["kwh_per_step"])
    assert budget["gpu_hours"] == pytest.approx(budget["days"] * 24 * bill.gpus)
    low, high = budget["days_interval"]
    assert high == pytest.approx(2 * low)


@given(bills)
def test_joules_of_tokens_and_watts_are_those_of_the_step(bill: Bill) -> None:
    answer = bill.as_dict()
    assert answer["joules_per_token"] * bill.step_tokens == pytest.approx(bill.step_joules)
    assert answer["watts_per_gpu"] * bill.gpus * bill.step_s == pytest.approx(bill.step_joules)
    assert answer["kwh_per_step"] * 3.6e6 == pytest.approx(bill.step_joules * bill.tariff.pue)


def test_the_bill_of_a_forecast_is_in_its_answer() -> None:
    found = predict(described(), tariff=Tariff(gpu_hour=2.0, tokens=1e12))
    answer = found.as_dict()
    assert answer["bill"]["joules_per_step"] == answer["energy_j"]
    rate = answer["tokens_per_s_per_gpu"] * found.setup.cluster.gpus
    assert answer["bill"]["budget"]["days"] == pytest.approx(1e12 / rate / 86400, rel=1e-4)
    assert answer["bill"]["budget"]["money"] == pytest.approx(2.0 * answer["bill"]["budget"]["gpu_hours"])


# Options


@pytest.mark.parametrize(
    ("text", "count"), [("15e12", 15e12), ("15T", 15e12), ("300B", 3e11), ("1.5M", 1.5e6), ("2k", 2e3), ("7", 7.0)]
)
def test_tokens_are_read_as_people_write_them(text: str, count: float) -> None:
    assert read_tariff(tokens=text).tokens == pytest.approx(count)


BAD = [
    ("price", "abc"), ("price", "-1"), ("price", "nan"), ("price", "1e400"), ("kwh_price", "0,12"),
    ("kwh_price", "-0.1"), ("pue", "0.9"), ("pue", "11"), ("pue", "x"), ("tokens", "0"), ("tokens", "-3"),
    ("tokens", "15X"), ("tokens", "1..5"), ("tokens", "inf"), ("tokens", "1e99"), ("tokens", "9" * 5000),
]  # fmt: skip


@pytest.mark.parametrize(("option", "text"), BAD, ids=[f"{option}={text[:9]}" for option, text in BAD])
def test_what_is_no_price_or_count_is_refused_in_one_line(option: str, text: str) -> None:
    with pytest.raises(OptionError) as refused:
        read_tariff(**{option: text})
    message = str(refused.value)
    assert message.startswith(f"--{option.replace('_', '-')} {text[:100]!r} ")
    assert "\n" not in message
    assert ": give " in message


@given(st.text(max_size=12))
def test_any_text_is_a_count_or_refused(text: str) -> None:
    try:
        tokens = read_tariff(tokens=text).tokens
    except OptionError:
        return
    assert tokens is None if text == "" else tokens is not None and math.isfinite(tokens) and tokens >= 1


def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """(exit code, what was printed, what was said) of `lumos`."""
    monkeypatch.setattr(sys, "argv", ["lumos", *arguments])
    try:
        cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return int(code or 0), said.out, said.err


def test_predict_answers_with_the_bill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--price", "2.5", "--kwh-price", "0.1", "--pue", "1.3", "--tokens", "1T"]
    code, out, _ = asked(capsys, monkeypatch, "predict", str(EXAMPLE), "--json", *options)
    bill = json.loads(out)["bill"]
    assert code == 0
    assert (bill["price_per_gpu_hour"], bill["price_per_kwh"], bill["pue"]) == (2.5, 0.1, 1.3)
    assert bill["budget"]["money"] == pytest.approx(2.5 * bill["budget"]["gpu_hours"] + 0.1 * bill["budget"]["kwh"])
    code, out, _ = asked(capsys, monkeypatch, "predict", str(EXAMPLE), *options)
    assert code == 0
    assert "a million tokens" in out


def test_predict_without_a_price_has_no_money(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = asked(capsys, monkeypatch, "predict", str(EXAMPLE), "--json")
    bill = json.loads(out)["bill"]
    assert (bill["money_per_step"], bill["money_per_million_tokens"], bill["budget"]) == (None, None, None)
    assert "a million tokens" not in asked(capsys, monkeypatch, "predict", str(EXAMPLE))[1]


@pytest.mark.parametrize("options", [("--price", "x"), ("--tokens", "many"), ("--pue", "0.5"), ("--kwh-price", "x")])
def test_predict_refuses_in_one_line(
    options: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = asked(capsys, monkeypatch, "predict", str(EXAMPLE), *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"lumos: {options[0]} '{options[1]}' ")
    assert err.count("\n") == 1


def test_a_trace_has_no_bill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    example = str(ROOT / "src/lumos/data/example")
    code, _, err = asked(capsys, monkeypatch, "predict", "--from", example, "--price", "2")
    assert code == 2
    assert err.startswith("lumos: --price")


def rated(name: str, peak: float = 1.0, power: float = 1.0, hbm: float = 1.0) -> dict[str, float]:
    """Keys of a setup that multiply what a GPU usually has."""
    gpu = gpu_named(name)
    return {
        "cluster.peak_tflops": peak * gpu.peak("bf16"), "cluster.power_w": power * gpu.tdp_w,
        "cluster.hbm_tb_s": hbm * gpu.hbm_gb_s / 1e3,
    }  # fmt: skip


factor = st.floats(0.2, 20)


@given(
    st.sampled_from(["h200", "h100", "b200", "a100", "mi300x"]), st.booleans(), st.sampled_from(["bf16", "fp16"]),
    st.tuples(factor, st.floats(0.35, 3), factor), st.tuples(st.floats(1, 20), st.floats(1, 3), st.floats(1, 20)),
)  # fmt: skip
@settings(max_examples=40)
def test_no_step_gets_longer_with_a_higher_peak_more_power_or_faster_memory(
    name: str, large: bool, precision: str, have: tuple[float, float, float], more: tuple[float, float, float]
) -> None:
    """Tensor cores beyond what the power feeds run at a constant rate, and what waits for memory does not notice."""
    width = 4096 if large else 1024
    run = described(cluster__gpu=name, train__cuda_graphs=True, train__precision=precision, model__hidden=width,
                    model__ffn=2 * width)  # fmt: skip
    before = predict(run.replaced(rated(name, *have))).step_ms
    for place in range(3):
        changed = [value * (more[place] if place == at else 1) for at, value in enumerate(have)]
        assert predict(run.replaced(rated(name, *changed))).step_ms <= before * (1 + 1e-3)


def test_a_hundred_times_the_peak_at_the_same_power_is_no_slower() -> None:
    run = described(cluster__gpu="h200", train__cuda_graphs=True)
    usual, double, absurd = (predict(run.replaced(rated("h200", peak))).step_ms for peak in (1, 2, 100))
    assert 0.6 * usual < absurd <= double < 0.95 * usual


@pytest.mark.parametrize("like", ['like = "h200"\n', ""])
def test_a_higher_peak_in_a_data_sheet_slows_nothing_down(tmp_path: Path, like: str) -> None:
    """Whether the sheet begins with a known GPU or gives all facts; only the rate of bf16 differs."""
    facts = "memory_gib = 140\nhbm_tb_s = 4.8\npower_w = 700\nsms = 132\nl2_mb = 50\nclock_ghz = 1.98\n"
    steps = []
    for peak in (989, 2500, 10_000):
        sheet = tmp_path / f"gpu{peak}.toml"
        sheet.write_text(f"{like}{facts}[peak_tflops]\nbf16 = {peak}\nfp32 = 67\n")
        steps.append(predict(described(cluster__gpu=str(sheet), train__cuda_graphs=True)).step_ms)
    assert steps[2] <= steps[1] * (1.0 if like else 1.1) < steps[0]  # a new GPU has the noise of carried-over samples


@pytest.mark.parametrize("name", gpu_names())
def test_memory_bound_kernels_slow_down_no_further_than_the_floor_of_the_clock(name: str) -> None:
    gpu = gpu_named(name)
    usual, least = in_step_factors(gpu), in_step_factors(capped(name, 1.2 * gpu.idle_w))
    assert usual.stream < least.stream <= usual.stream / 0.5 + 1e-9


@pytest.mark.parametrize(
    ("peak", "power", "told"),
    [(1, 1, ""), (1, 0.9, ""), (1, 2, ""), (5, 1, "700 W leaves matmuls 25 %"), (1, 0.5, "350 W leaves matmuls 45 %")],
)
def test_an_answer_says_when_the_power_limit_holds_the_tensor_cores_back(peak: float, power: float, told: str) -> None:
    warnings = predict(described(cluster__gpu="h200").replaced(rated("h200", peak, power))).warnings
    assert [told in text for text in warnings if "leaves matmuls" in text] == ([True] if told else [])


def test_a_known_gpu_as_it_is_sold_has_no_note_on_its_power_limit() -> None:
    assert clock_of(gpu_named("b200")).core < 0.7
    assert not [text for text in predict(described(cluster__gpu="b200")).warnings if "power limit of" in text]
