"""What holds for the forecast of any run, what a change to a run does, and the command line that answers."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphs import scaled, simulate_reference
from lumos.cli import main as cli
from lumos.costs.costs import costs_of
from lumos.costs.energy import in_step_factors
from lumos.costs.network import Network, network_of
from lumos.data_files import read_table
from lumos.described.described import Program
from lumos.described.flops import forward_flops_per_token, hardware_flops, model_flops
from lumos.errors import LumosError
from lumos.graph.graph import simulate
from lumos.prediction.carried_over import CarriedOver, carried_over, transfer_part
from lumos.prediction.interval import (
    PARTS,
    changed_spread,
    described_spread,
    parts_of,
    scaled_spread,
    waiting_share,
    width_of,
)
from lumos.prediction.operator_times import operator_times
from lumos.prediction.prediction import Prediction, predict
from lumos.report.predictions import memory_table, prediction_cards
from lumos.setup import Setup, gpu_named, gpu_names, mistakes_in, preset_named, preset_names
from lumos.setup.frameworks import framework_names
from lumos.step.step import Assembly, Step, simulate_step
from plain_network import plain_network

FREE = plain_network(1e15, 1e15)
A_TRIFLE = 1.002  # fitted costs and the moment from which a host counts are not smooth

DENSE = tuple(name for name in preset_names() if not preset_named(name).model.experts)

pick = st.sampled_from


@st.composite
def setups(draw: st.DrawFn, gpus: tuple[str, ...] = gpu_names(), presets: tuple[str, ...] = preset_names()) -> Setup:
    """Any run that the rules allow."""
    gpu = gpu_named(draw(pick(gpus)))
    model = dict(preset_named(draw(pick(presets))).keys)
    if draw(st.booleans()):
        model["layers"] = draw(pick([1, 2, 4, 12, 31, 94]))
    model["parallel_residual"] = draw(pick([False, False, False, True]))
    pp = draw(pick([1, 1, 2, 4, 8]))
    vpp = draw(pick([1, 1, 2, 3])) if pp > 1 else 1
    parallel: dict[str, Any] = {
        "pp": pp, "vpp": vpp, "tp": draw(pick([1, 1, 2, 4, 8, 16])), "cp": draw(pick([1, 1, 2, 8])),
        "dp": draw(pick([1, 1, 2, 8, 64])), "ep": draw(pick([1, 2, 8, 64])) if model.get("experts") else 1,
        "zero": draw(st.integers(0, 3)), "sequence_parallel": draw(st.booleans()),
        "schedule": "interleaved" if vpp > 1 else draw(pick(["1f1b", "gpipe", "zero-bubble"])),
        "tp_overlap": draw(pick([None, False, True])), "dp_overlap": draw(pick([None, False, True])),
    }  # fmt: skip
    parallel["shard"] = draw(pick([0, 0, 0, max(1, parallel["dp"] // 2)]))
    train = {
        "seq": draw(pick([128, 1024, 4096, 32768])), "micro_batch": draw(pick([1, 1, 2])),
        "microbatches": draw(pick([1, 2, pp, 2 * pp])), "precision": draw(pick(gpu.precisions)),
        "recompute": draw(pick(["none", "selective", "full"])), "compile": draw(st.booleans()),
        "framework": draw(pick(framework_names())), "mode": draw(pick(["pretrain", "lora", "sft"])),
        "optimizer": draw(pick(["adamw", "adam", "sgd", "none"])), "attention": draw(pick(["", "flash", "unfused"])),
        "cuda_graphs": draw(pick([False, False, True])), "imbalance": draw(pick([1.0, 1.3])),
    }  # fmt: skip
    setup = Setup(model=model, train=train, parallel=parallel, cluster={"gpu": gpu.name})
    assume(not mistakes_in(setup))
    return setup


def described(preset: str = "llama3-8b", **changes: Any) -> Setup:
    """A published model with some keys changed (`__` for the dot); the other numbers follow from these."""
    setup = Setup(model=dict(preset_named(preset).keys), train={"seq": 2048})
    stated = {key.replace("__", "."): value for key, value in changes.items()}
    setup = setup.replaced({"parallel.dp": 1, "train.microbatches": 1} | stated)
    assert mistakes_in(setup) == []
    return setup


def us(setup: Setup, network: Network | None = None) -> float:
    return simulate_step(setup, network=network).us


def changed(setup: Setup, **changes: Any) -> Setup:
    """The same micro-batches and replicas with other values."""
    kept = {"parallel.dp": setup.parallel.dp, "train.microbatches": setup.train.microbatches}
    setup = setup.replaced(kept | {key.replace("__", "."): value for key, value in changes.items()})
    assert mistakes_in(setup) == []
    return setup


# The 80 % interval, by hand


@pytest.mark.parametrize(
    ("preset", "keys", "assumptions", "parts"),
    [
        ("llama3-8b", {"cluster__gpu": "h200"}, 0, {}),
        ("llama3-8b", {"cluster__gpu": "h100"}, 0, {"transferred": pytest.approx(0.3, abs=0.2)}),
        ("llama3-8b", {"cluster__gpu": "mi300x"}, 1,
         {"transferred": pytest.approx(0.5, abs=0.2), "other_family": 1, "assumed": 0.5}),
        ("llama3-8b", {"cluster__gpu": "h200", "parallel__dp": 8}, 2, {"assumed": 1}),
        ("llama3-8b", {"cluster__gpu": "h200", "parallel__dp": 16}, 5, {"assumed": 1}),
        ("llama3-8b", {"cluster__gpu": "h200", "train__mode": "lora"}, 0, {"fine_tuning": 1}),
        ("mixtral-8x7b", {"cluster__gpu": "h200"}, 0, {"experts": 1}),
    ],
)  # fmt: skip
def test_what_makes_a_run_hard_to_predict_adds_to_its_variance(
    preset: str, keys: dict[str, Any], assumptions: int, parts: dict[str, float]
) -> None:
    step = simulate_step(described(preset, **keys, train__cuda_graphs=True, train__framework="megatron"))
    found = parts_of(step, assumptions)
    assert tuple(found) == PARTS
    assert found.pop("waiting") == waiting_share(step) ** 2
    assert {name: value for name, value in found.items() if value} == {"always": 1} | parts
    table = read_table("uncertainty.json")
    variance = sum(table["variance"][name] * value for name, value in parts_of(step, assumptions).items())
    family = table["families"].get(step.setup.cluster.accelerator.family, {"width": table["unseen"]["families"]})
    size = math.sqrt(variance) * table["frameworks"]["megatron"]["width"] * family["width"]
    low, high = described_spread(step, ["assumed"] * assumptions)
    assert (math.log(low), math.log(high)) == pytest.approx((table["low"] * size, table["high"] * size))
    assert low < 1 < high


def test_a_run_that_waits_for_network_pipeline_or_host_is_harder_to_predict() -> None:
    """By hand: two stages and two micro-batches leave a stage idle for a third of the step, as good as exactly."""

    def waits(preset: str = "llama3-8b", **changes: Any) -> float:
        return math.sqrt(parts_of(simulate_step(described(preset, cluster__gpu="h200", **changes)), 0)["waiting"])

    alone = waits(train__framework="megatron", train__microbatches=2)
    assert alone == pytest.approx(0, abs=0.02)
    assert waits(train__framework="megatron", parallel__pp=2, train__microbatches=2) == pytest.approx(1 / 3, abs=0.12)
    across = waits(train__framework="megatron", train__microbatches=2, parallel__tp=16)
    assert across > waits(train__framework="megatron", train__microbatches=2, parallel__tp=8) > alone
    assert waits("gpt2-124m", train__seq=128, train__framework="pytorch") > 0.5  # the host


def test_no_framework_is_predicted_less_surely_than_one_without_published_runs() -> None:
    table = read_table("uncertainty.json")
    unseen = width_of(table, "frameworks", "never heard of")
    assert {name for name in framework_names() if width_of(table, "frameworks", name) > unseen} == set()
    assert width_of(table, "frameworks", "megatron") < unseen  # of which several sources were published
    one_source = table | {"frameworks": {"rare": {"width": 9.0, "publications": 1}}}
    assert width_of(one_source, "frameworks", "rare") == unseen


def test_no_family_of_gpus_is_predicted_less_surely_than_one_without_published_runs() -> None:
    """A family that nobody measured is as wide as the worst that was, and wider by a part of its own."""
    table = read_table("uncertainty.json")
    families = {gpu_named(name).family for name in gpu_names()}
    unseen = width_of(table, "families", "never heard of")
    assert {name for name in families if width_of(table, "families", name) > unseen} == set()
    for name in families - {*table["families"], "cpu"}:
        gpu = next(gpu for gpu in gpu_names() if gpu_named(gpu).family == name)
        setup = described(cluster__gpu=gpu, train__precision=gpu_named(gpu).precisions[0])
        assert parts_of(simulate_step(setup), 0)["other_family"] == 1


@pytest.mark.parametrize("framework", ["megatron", "neox"])
def test_more_assumptions_never_make_the_interval_narrower(framework: str) -> None:
    step = simulate_step(described(cluster__gpu="h100", train__framework=framework))
    spreads = [described_spread(step, ["assumed"] * count) for count in range(4)]
    assert all(a.low >= b.low and a.high <= b.high for a, b in pairwise(spreads))
    assert spreads[1].high > spreads[0].high


def test_an_answer_says_how_many_published_sources_its_interval_rests_on() -> None:
    table = read_table("uncertainty.json")

    def told(**changes: Any) -> str:
        (text,) = [text for text in predict(described(**changes)).warnings if "80 % interval" in text]
        return text

    count, on = (
        table[kind][name]["publications"] for kind, name in (("frameworks", "megatron"), ("families", "hopper"))
    )
    known = f"the 80 % interval rests on published runs: {count} sources of megatron, {on} sources of hopper GPUs"
    assert told(cluster__gpu="h100", train__framework="megatron") == known
    lacks = f"no published runs of neox: the 80 % interval is wider, and rests on {on} sources of hopper GPUs"
    assert told(cluster__gpu="h100", train__framework="neox") == lacks
    neither = "no published runs of neox or cdna3 GPUs: the 80 % interval is wider"
    assert told(cluster__gpu="mi300x", train__framework="neox") == neither


# What carries over from another GPU


def carried(gpu: str, preset: str = "llama3-8b", **changes: Any) -> list[CarriedOver]:
    step = simulate_step(described(preset, cluster__gpu=gpu, **changes))
    return carried_over(step.costs.model, operator_times(step))


def test_every_group_of_operators_has_its_own_error_and_its_share_of_the_time() -> None:
    parts = {part.group: part for part in carried("b200")}
    assert set(parts) == {"matmuls", "attention", "memory-bound kernels"}
    assert sum(part.share for part in parts.values()) == pytest.approx(1)
    errors = read_table("transfer.json")["error_pct"]
    assert {name: part.error_pct for name, part in parts.items()} == {name: errors[name]["other"] for name in parts}
    assert {part.sampled for part in parts.values()} == {"h200"}
    near = {part.group: part.error_pct for part in carried("h100")}
    assert near == {name: errors[name]["same"] for name in near}
    assert near["memory-bound kernels"] < parts["memory-bound kernels"].error_pct


def test_the_interval_is_wider_by_the_parts_that_carry_over_badly() -> None:
    """By hand: shares times errors, squared, in units of 10 %. Attention carries over worse than matmuls."""
    parts = [CarriedOver("matmuls", "h200", 0.7, 10.0), CarriedOver("attention", "h200", 0.3, 20.0)]
    assert transfer_part(parts) == pytest.approx(0.7**2 + 0.6**2)
    short, long = (transfer_part(carried("b200", train__seq=seq)) for seq in (2048, 32768))
    assert long > short > 0
    assert carried("h200") == []


def test_what_was_not_sampled_on_a_sampled_gpu_rests_on_another() -> None:
    """The published samples of A100 have matmuls and attention; norms and activations are those of H200."""
    assert {(part.group, part.sampled) for part in carried("a100")} == {("memory-bound kernels", "h200")}
    (told,) = [text for text in predict(described(cluster__gpu="a100")).warnings if "sampled" in text]
    assert told.startswith("not everything was sampled on a100: costs of h200 are scaled by its peaks")


def test_an_answer_says_which_part_of_it_carries_over_how_well() -> None:
    (told,) = [text for text in predict(described(cluster__gpu="b200")).warnings if "no samples" in text]
    matmuls = next(part for part in carried("b200") if part.group == "matmuls")
    assert f"off by {matmuls.error_pct:.0f} % in matmuls ({100 * matmuls.share:.0f} % of this step's operators)" in told
    assert not [text for text in predict(described(cluster__gpu="h200")).warnings if "sampled" in text]


def test_changes_that_were_never_measured_have_wider_intervals() -> None:
    """5 % where kernels decide; more for another GPU, a modelled network, a pipeline, and far from the traced step."""
    setup = described(cluster__gpu="h200", parallel__dp=8)

    def width(growth: float = 1.0, silent: bool = False, **changes: Any) -> float:
        return changed_spread(setup, simulate_step(changed(setup, **changes)), silent, growth).high - 1

    usual = width(train__seq=4096)
    assert usual == pytest.approx(0.05)
    assert width(cluster__gpu="h100") == pytest.approx(usual + 0.2)
    assert width(parallel__dp=4) == pytest.approx(usual)
    assert width(silent=True) == width(parallel__zero=1) == pytest.approx(usual + 0.1)
    assert width(parallel__dp=4, parallel__pp=2) == pytest.approx(usual + 0.25)
    assert width(growth=3.0) == width(growth=1 / 3) == pytest.approx(usual)
    assert width(growth=30.0) > usual
    assert width(cluster__host=0.05) == pytest.approx(0.15), "the host decides"
    assert scaled_spread(4.0) == pytest.approx((0.96, 1.04))
    assert scaled_spread(4.0).of(200.0) == pytest.approx((192, 208))


# Laws of every forecast


@settings(max_examples=120)
@given(setups())
def test_every_valid_run_has_a_sane_forecast(setup: Setup) -> None:
    found = predict(setup)
    answer = found.as_dict()
    assert math.isfinite(found.step_ms)
    assert found.step_ms > 0
    low, high = found.interval_ms
    assert 0 < low < found.step_ms < high
    assert 0 < found.mfu <= found.hfu < 1
    parts = answer["breakdown"]
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(found.step_ms, abs=1e-5)
    idle, full = setup.cluster.accelerator.idle_w, setup.cluster.accelerator.tdp_w
    watts = answer["energy_j"] / (found.step_ms / 1e3) / setup.cluster.gpus
    assert idle <= watts * 1.000001
    assert watts <= full * 1.000001
    assert answer["memory_gib"]["peak"] > 0
    assert len(set(answer["warnings"])) == len(answer["warnings"])


@settings(max_examples=80)
@given(setups(), pick([0.5, 3.0]))
def test_the_graph_of_every_step_obeys_the_laws(setup: Setup, factor: float) -> None:
    step = simulate_step(setup)
    graph, times = step.graph, step.times
    blocks = [sum(block.compute_us for chunk in row for block in chunk.blocks) for row in step.chunks]
    assert step.us * 1.000001 >= step.plan.microbatches * max(blocks)
    assert times.span <= (graph.duration.sum() + graph.edges.lag.sum()) * 1.000001
    follows = ~graph.is_first[1:]
    assert (times.start[1:][follows] >= times.end[:-1][follows]).all(), "tasks of a lane overlap"
    assert simulate(scaled(graph, factor)).span == pytest.approx(times.span * factor, rel=1e-9)
    if len(graph) <= 400:
        np.testing.assert_allclose(simulate_reference(graph).end, times.end, rtol=1e-12)


@settings(max_examples=20)
@given(setups())
def test_a_run_is_predicted_the_same_twice(setup: Setup) -> None:
    assert predict(setup).as_dict() == predict(setup).as_dict()


def test_a_step_that_no_machine_can_hold_is_refused() -> None:
    with pytest.raises(LumosError, match=r"train.microbatches = 8388608 makes a step of"):
        simulate_step(described("gpt2-124m", train__microbatches=1 << 23))


# What a change does


@settings(max_examples=40)
@given(setups())
def test_twice_the_micro_batches_take_longer_and_about_twice_as_long_at_most(setup: Setup) -> None:
    assume(setup.train.seq > 128)  # adding up gradients costs more than so few tokens do
    ratio = us(changed(setup, train__microbatches=2 * setup.train.microbatches)) / us(setup)
    assert 1.0 < ratio < 2.2


@settings(max_examples=40)
@given(setups())
def test_recomputation_never_pays_in_time(setup: Setup) -> None:
    none, selective, full = (us(changed(setup, train__recompute=value)) for value in ("none", "selective", "full"))
    assert none <= selective * A_TRIFLE
    assert selective <= full * A_TRIFLE


@settings(max_examples=40)
@given(pick(preset_names()), pick(["h200", "a100"]))
def test_recomputing_everything_is_slower_where_the_gpu_decides(preset: str, gpu: str) -> None:
    setup = described(preset, train__seq=4096, cluster__gpu=gpu, train__cuda_graphs=True)
    ratio = us(changed(setup, train__recompute="full")) / us(setup)
    assert 1.1 < ratio < 1.45, "a forward pass is a third of the work"


@settings(max_examples=40)
@given(setups(), pick([1.2, 3.0]))
def test_a_faster_host_never_slows_a_step(setup: Setup, factor: float) -> None:
    fast, usual = us(changed(setup, cluster__host=factor)), us(setup)
    assert fast <= usual * A_TRIFLE


@settings(max_examples=40)
@given(setups())
def test_who_is_bound_by_the_host_gains_by_a_faster_one_or_loses_by_a_slower_one(setup: Setup) -> None:
    gain = 1 - us(changed(setup, cluster__host=100)) / us(setup)
    loss = us(changed(setup, cluster__host=0.9)) / us(setup) - 1
    assert gain > 0.04 or loss > 0.04 if predict(setup).host_bound else gain < 0.06


@settings(max_examples=40)
@given(setups(), pick([1.5, 4.0]))
def test_a_faster_network_never_slows_a_step(setup: Setup, factor: float) -> None:
    gpu = setup.cluster.accelerator
    usual = us(setup)
    assert us(changed(setup, cluster__inter_gb_s=factor * gpu.inter_gb_s)) <= usual * A_TRIFLE
    assert us(changed(setup, cluster__nvlink_gb_s=factor * gpu.local_gb_s)) <= usual * A_TRIFLE
    assert us(setup, FREE) <= usual * A_TRIFLE


@pytest.mark.parametrize(
    ("less", "more", "precisions"),
    [
        ("a100-40", "a100", ("fp16", "bf16")),
        ("v100", "a100", ("fp16",)),
        ("a100", "h100", ("fp16", "bf16")),
        ("h100", "h200", ("fp16", "bf16", "fp8")),
        ("h200", "b200", ("fp16", "bf16", "fp8")),
        ("mi300x", "mi325x", ("fp16", "bf16", "fp8")),
    ],
)
@settings(max_examples=12)
@given(setups(), st.data())
def test_a_gpu_with_more_of_everything_is_not_slower(
    less: str, more: str, precisions: tuple[str, ...], setup: Setup, data: st.DataObject
) -> None:
    # Unfused attention of long sequences lies beyond the samples; ZeRO 1 and 2 hide what they gather behind a
    # forward pass, of which a faster GPU has less.
    kept = {"train__attention": "flash", "parallel__zero": data.draw(pick([0, 3]))}
    setup = changed(setup, train__precision=data.draw(pick(precisions)), cluster__gpu=less, **kept)
    assert us(changed(setup, cluster__gpu=more)) <= us(setup) * 1.05, "costs are fitted, so they are not smooth"


@settings(max_examples=40)
@given(setups(presets=DENSE), pick([2, 16]))
def test_more_replicas_of_the_same_work_never_make_a_step_faster(setup: Setup, factor: int) -> None:
    setup = changed(setup, parallel__zero=0)  # otherwise each replica has less to update
    assert us(setup) <= us(changed(setup, parallel__dp=factor * setup.parallel.dp)) * A_TRIFLE


@settings(max_examples=25)
@given(pick(["llama3-8b", "gpt3-6.7b", "mixtral-8x7b"]), pick([2, 4, 8]), st.booleans(), pick(["h100", "a100", "b200"]))
def test_tensor_parallelism_belongs_inside_a_node(preset: str, tp: int, sequences: bool, gpu: str) -> None:
    inside = described(
        preset, parallel__tp=tp, parallel__sequence_parallel=sequences, cluster__gpu=gpu, train__cuda_graphs=True
    )
    across = changed(inside, cluster__gpus_per_node=1)
    assert us(inside) < us(across)
    assert predict(inside).breakdown.exposed_comm_ms < predict(across).breakdown.exposed_comm_ms


@given(pick([2, 4, 8]), pick([1, 2, 4]), pick(["megatron", "torchtitan"]))
def test_schedules_are_ranked_by_their_bubbles(pp: int, rounds: int, framework: str) -> None:
    setup = described(
        model__layers=64, model__vocab=1000, parallel__pp=pp, train__microbatches=rounds * pp, train__seq=4096,
        train__framework=framework, train__cuda_graphs=True,
    )  # fmt: skip
    gpipe, usual, zero_bubble = (
        us(changed(setup, parallel__schedule=name), FREE) for name in ("gpipe", "1f1b", "zero-bubble")
    )
    assert zero_bubble < usual <= gpipe * 1.001
    for vpp in (2, 4):
        assert us(changed(setup, parallel__vpp=vpp), FREE) < usual


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_cost_of_a_forecast_grows_with_distinct_work_and_not_with_gpus(zero: int) -> None:
    small, large = (
        simulate_step(
            described("llama3-70b", parallel__tp=8, parallel__pp=4, parallel__dp=dp, parallel__zero=zero,
                      train__microbatches=8)
        )
        for dp in (16, 512)
    )  # fmt: skip
    assert (small.setup.cluster.gpus, large.setup.cluster.gpus) == (512, 16384)
    assert len(small.graph) == len(large.graph)


# Steps of known structure


def equal_stages(setup: Setup) -> tuple[Step, Assembly]:
    """A step whose stages are all like the second, on a network that takes no time."""
    step = simulate_step(setup, network=FREE)
    assembly = Assembly(Program(setup), costs_of(setup, network=FREE))
    assembly.__dict__["chunks"] = tuple(step.chunks[1] for _ in step.chunks)
    return step, assembly


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "microbatches"), [(4, 1), (4, 3), (4, 16), (8, 8)])
def test_a_pipeline_of_equal_stages_waits_for_all_stages_but_one(pp: int, microbatches: int, schedule: str) -> None:
    setup = described(
        parallel__pp=pp, train__microbatches=microbatches, parallel__schedule=schedule, train__cuda_graphs=True
    )
    _, assembly = equal_stages(setup)
    chunk = assembly.chunks[0][0]
    update = float(assembly.graph().duration[nodes(assembly, "optimizer")[0]]) / 1e3  # the first stage ends last
    wanted = (microbatches - 1 + pp) * (chunk.forward.us + chunk.backward.us) + update
    assert simulate(assembly.graph()).span / 1e3 == pytest.approx(wanted, rel=1e-9)


def nodes(part: Step | Assembly, what: str) -> list[int]:
    """The nodes of a role."""
    roles = part.structure.roles
    return [node for node, role in enumerate(part.structure.node_role) if roles[role].what == what]


def test_a_long_backward_pass_hides_the_reduction_of_gradients() -> None:
    alone = described("llama3-1b", train__seq=8192, train__micro_batch=2)
    replicas = changed(alone, parallel__dp=8)
    hidden = us(changed(replicas, parallel__dp_overlap=True)) - us(alone)
    exposed = us(changed(replicas, parallel__dp_overlap=False)) - us(alone)
    assert exposed > 1000, "a gigabyte and more is reduced"
    late = alone.model.vocab * alone.model.hidden / alone.model.parameters()  # the embedding comes last
    assert late * exposed < hidden < (late + 0.5) * exposed, "the kernels beside it are slower"
    parts = predict(changed(replicas, parallel__dp_overlap=True)).breakdown
    assert parts.overlapped_ms > 2 * parts.exposed_comm_ms


@pytest.mark.parametrize("microbatches", [1, 3])
def test_sharded_weights_are_gathered_twice_and_reduced_once_for_every_micro_batch(microbatches: int) -> None:
    setup = described(parallel__dp=8, parallel__zero=3, train__microbatches=microbatches)
    step = simulate_step(setup)
    assert len(nodes(step, "gather")) == 2 * 32 * microbatches
    assert len(nodes(step, "reduce")) == 32 * microbatches
    network = network_of(gpu_named("h200"), "infiniband", in_step_factors(gpu_named("h200")))
    gathered = sum(step.assembly.graph().duration[node] for node in nodes(step, "gather")) / 1e9
    bandwidth = network.near(8) * network.habits.gather_share * 1e6 / network.penalty
    least = 2 * microbatches * 2 * setup.model.parameters() * 7 / 8 / bandwidth
    assert least < gathered < 1.2 * least


def test_one_gpu_has_nobody_to_share_weights_with() -> None:
    assert us(described("llama3-1b", parallel__zero=3)) == us(described("llama3-1b"))


def test_sharing_among_some_replicas_gathers_inside_the_node() -> None:
    wide = described(parallel__dp=64, parallel__zero=3, train__framework="torchtitan")
    narrow = changed(wide, parallel__shard=8)
    gather, gather_inside = (simulate_step(setup).role_us("gather", 0) for setup in (wide, narrow))
    assert gather_inside < gather


@pytest.mark.parametrize("zero", [0, 1])
def test_experts_without_replicas_have_nothing_to_reduce(zero: int) -> None:
    setup = described("mixtral-8x7b", parallel__ep=8, parallel__dp=8, parallel__zero=zero, parallel__dp_overlap=False)
    copies = changed(setup, parallel__dp=16)
    alone, replicated = (simulate_step(s).role_us("reduce rest", 0) for s in (setup, copies))
    assert replicated > 4 * alone, "most weights are the experts'"


@pytest.mark.parametrize("zero", [0, 1])
def test_adapters_alone_are_reduced_and_updated(zero: int) -> None:
    for what in ("reduce rest", "optimizer"):
        full, adapters = (
            simulate_step(described("llama3-8b", parallel__dp=8, parallel__zero=zero, train__mode=mode,
                                    parallel__dp_overlap=False)).role_us(what, 0)
            for mode in ("sft", "lora")
        )  # fmt: skip
        assert adapters < 0.1 * full


def test_layers_of_a_stage_are_dealt_to_its_chunks_and_none_is_lost() -> None:
    setup = described("llama3-8b", parallel__pp=2, parallel__vpp=3, train__microbatches=4)
    setup = changed(setup, parallel__stage_layers=(17, 15))
    layers = simulate_step(setup).assembly.program.layers
    assert layers == [6, 5, 6, 5, 5, 5]


def test_an_unusual_schedule_of_one_stage_changes_nothing() -> None:
    steps = {us(described(parallel__dp=8, parallel__schedule=name)) for name in ("1f1b", "gpipe", "zero-bubble")}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("gpu", "tp", "dp"), [("rtx4090", 1, 8), ("l40s", 1, 4), ("a100-pcie", 2, 4), ("h100-pcie", 8, 1)]
)
def test_inside_one_node_the_network_between_nodes_is_not_used(gpu: str, tp: int, dp: int) -> None:
    setup = described("llama3-8b", cluster__gpu=gpu, parallel__tp=tp, parallel__dp=dp)
    assert us(changed(setup, cluster__inter_gb_s=0.1)) == us(setup)


# Operations


def test_a_dense_model_takes_six_operations_for_every_parameter_and_token() -> None:
    setup = described("llama3-8b", train__seq=8192)
    assert model_flops(setup) == pytest.approx(6 * setup.model.parameters() * setup.tokens, rel=0.15)


@pytest.mark.parametrize("preset", preset_names())
def test_a_model_takes_six_operations_for_every_parameter_that_a_token_meets(preset: str) -> None:
    setup = described(preset, train__seq=128)
    met = setup.model.active_parameters() - setup.model.embedding_parameters() + setup.model.vocab * setup.model.hidden
    assert model_flops(setup) == pytest.approx(6 * met * 128, rel=0.03)


def test_recomputed_and_frozen_work_is_counted() -> None:
    setup = described(train__seq=8192)
    forward, total = forward_flops_per_token(setup) * setup.tokens, model_flops(setup)
    assert hardware_flops(setup) == total == pytest.approx(3 * forward)
    full, selective = (hardware_flops(changed(setup, train__recompute=value)) for value in ("full", "selective"))
    assert 3 * forward < selective < full < 4 * forward
    assert 2 * forward < model_flops(changed(setup, train__mode="lora")) < 2.2 * forward


# Unusual runs


@pytest.mark.parametrize(
    ("setup", "least", "most"),
    [
        (described("llama3-8b", train__seq=8192), 0.40, 0.60),
        (described("llama3-8b", train__seq=128), 0.01, 0.10),
        (described("llama3-8b", model__vocab=1000), 0.25, 0.60),
        (described("llama3-8b", train__seq=131072, parallel__cp=8, train__framework="megatron"), 0.35, 0.70),
        (described("llama3-1b", model__heads=1, model__kv_heads=1, model__head_dim=2048), 0.05, 0.60),
        (described("llama3-1b", train__precision="fp32", train__micro_batch=2), 0.30, 0.75),
        (described("gpt2-1.5b", train__seq=1024, train__micro_batch=4, train__precision="fp16", cluster__gpu="v100"),
         0.20, 0.60),
        (described("llama3-1b", cluster__gpu="rtx4090"), 0.20, 0.60),
        (described("llama3-8b", cluster__gpu="mi300x", train__framework="torchtitan", train__seq=8192), 0.20, 0.75),
        (described("llama3-70b", train__precision="nvfp4", cluster__gpu="b200", train__framework="megatron",
                   train__seq=8192, parallel__tp=2, parallel__pp=4, train__microbatches=8), 0.08, 0.40),
        (described("deepseek-v3", train__seq=4096, train__framework="megatron", cluster__gpu="h100", parallel__ep=64,
                   parallel__pp=4, parallel__dp=64, parallel__zero=1, train__microbatches=32), 0.05, 0.40),
        (described("qwen3-235b-a22b", train__seq=4096, train__framework="megatron", cluster__gpu="h100",
                   parallel__ep=8, parallel__pp=16, parallel__vpp=2, parallel__dp=8, train__microbatches=32), 0.1, 0.5),
        (described("llama3-70b", train__seq=4096, train__framework="megatron", parallel__tp=4, parallel__pp=8,
                   train__microbatches=2), 0.05, 0.20),
        (described("mixtral-8x7b", train__seq=4096, train__framework="megatron", parallel__tp=8), 0.10, 0.60),
    ],
    ids=["usual", "short", "small vocabulary", "cp 8", "one head", "fp32", "V100", "RTX 4090", "MI300X", "nvfp4",
         "ep 64", "94 layers in 16 stages", "fewer micro-batches than stages", "tp 8 without sequence parallelism"],
)  # fmt: skip
def test_unusual_runs_use_a_gpu_as_well_as_such_runs_can(setup: Setup, least: float, most: float) -> None:
    assert least < predict(setup).mfu < most


# What is said about a forecast


def test_a_gpu_that_was_never_sampled_has_a_warning_and_a_wider_interval() -> None:
    def width(found: Prediction) -> float:
        low, high = found.interval_ms
        return high / low

    known, unknown = (predict(described(cluster__gpu=gpu)) for gpu in ("h200", "mi300x"))
    assert width(unknown) > 1.1 * width(known)
    assert any("no samples for mi300x" in warning for warning in unknown.warnings)
    assert not any("samples" in warning for warning in known.warnings)


def test_what_had_to_be_assumed_widens_the_interval_and_is_said_once() -> None:
    setup = described(parallel__sequence_parallel=True)
    sure, unsure = predict(setup), predict(setup, notes=("the network is not stated", "the network is not stated"))
    assert unsure.interval_ms[1] > sure.interval_ms[1]
    assert unsure.warnings.count("the network is not stated") == 1
    doubt = next(warning for warning in sure.warnings if "sequence_parallel has no effect" in warning)
    told = predict(setup, notes=(doubt,))
    assert told.warnings == sure.warnings
    assert told.interval_ms == sure.interval_ms, "a doubt about the setup is no assumption"


def test_muon_of_which_no_step_was_measured_widens_the_interval() -> None:
    def width(optimizer: str) -> float:
        low, high = predict(described(cluster__gpu="h200", train__optimizer=optimizer)).interval_ms
        return high / low

    assert width("muon") > 1.02 * width("adamw")


def test_a_run_that_does_not_fit_is_predicted_with_a_warning() -> None:
    found = predict(described("llama3-70b"))
    assert not found.memory.fits
    assert any("does not fit" in warning for warning in found.warnings)


def test_a_framework_that_is_not_set_is_reported_with_the_state_that_it_keeps() -> None:
    def told(**changes: Any) -> bool:
        return any("train.framework is" in warning for warning in predict(described(**changes)).warnings)

    assert told()
    assert not told(train__framework="pytorch")
    assert not told(train__precision="fp32"), "in which every framework keeps all"


def test_state_of_adapters_is_not_counted_for_frozen_weights() -> None:
    cards = prediction_cards(predict(described(train__mode="lora", train__weight_precision="nf4")))
    (state,) = [card for card in cards if card.label == "model state"]
    assert state.value == "0.516 B/parameter"


def test_what_muon_does_not_update_has_moments_of_adam() -> None:
    cards = prediction_cards(predict(described(train__optimizer="muon", train__framework="megatron")))
    (state,) = [card for card in cards if card.label == "model state"]
    assert "moments 4 (embeddings and vectors: 8, by Adam)" in state.note


def test_gradients_that_the_peak_comes_before_are_not_shown_as_none() -> None:
    memory = predict(described(train__framework="pytorch", parallel__tp=1, parallel__pp=1)).memory
    table = memory_table(memory)
    at = [column.title for column in table.columns].index("gradients")
    assert (memory.at_peak.phase, memory.at_peak.gradients) == ("loss", 0.0)
    assert isinstance(table.rows[0].values[at], str)


@pytest.mark.parametrize(("zero", "dp", "expected"), [(0, 4, True), (2, 4, False), (0, 1, False)])
def test_muon_on_every_replica_is_reported(zero: int, dp: int, expected: bool) -> None:
    found = predict(described(train__optimizer="muon", parallel__zero=zero, parallel__dp=dp, cluster__gpus=0))
    assert any("parallel.zero = 0" in warning for warning in found.warnings) == expected


# The command line

SETUP = """
[model]
preset = "llama3-8b"
[train]
seq = 2048
global_batch = 16
[parallel]
tp = 2
pp = 2
[cluster]
gpu = "h200"
gpus = 8
"""

KEYS = {
    "step_ms", "interval_ms", "tokens_per_s_per_gpu", "mfu", "memory_gib", "fits", "breakdown", "energy_j", "warnings"
}  # fmt: skip


class Answer:
    """What the command line answers, without a process of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        self.monkeypatch.setattr(sys, "argv", ["lumos", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self.capsys.readouterr()
        return int(ended.value.code or 0), out, err

    def json(self, *arguments: str) -> dict[str, Any]:
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, "")
        answer: dict[str, Any] = json.loads(out)
        return answer


@pytest.fixture
def lumos(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Answer:
    (tmp_path / "setup.toml").write_text(SETUP)
    return Answer(monkeypatch, capsys, tmp_path)


def test_predict_answers_with_the_keys_that_others_rely_on(lumos: Answer) -> None:
    answer = lumos.json("predict", "setup.toml")
    assert answer.keys() >= KEYS
    assert answer["memory_gib"]["peak"] > 0
    assert answer["breakdown"].keys() == {"exposed_compute_ms", "exposed_comm_ms", "overlapped_ms", "other_ms"}
    low, high = answer["interval_ms"]
    assert low < answer["step_ms"] < high
    tokens = 16 * 2048 / 8 / (answer["step_ms"] / 1e3)
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(tokens)


def test_the_machines_can_be_named_without_set(lumos: Answer) -> None:
    _, short, _ = lumos("predict", "setup.toml", "--gpu", "h200", "--gpus", "16", "--json")
    _, long, _ = lumos("predict", "setup.toml", "--set", "cluster.gpu=h200", "--set", "cluster.gpus=16", "--json")
    assert short == long
    assert json.loads(short)["setup"]["cluster"]["gpus"] == 16
    code, _, error = lumos("predict", "setup.toml", "--gpu", "hh200")
    assert code == 2
    assert "did you mean h200?" in error


def test_predict_shows_a_table_with_its_warnings(lumos: Answer) -> None:
    code, out, _ = lumos("predict", "setup.toml", "--set", "cluster.gpu=mi300x")
    assert code == 0
    assert "llama3-8b, 8.03 B parameters on 8 × mi300x" in out
    assert "no samples for mi300x" in out


def test_predict_takes_changes(lumos: Answer) -> None:
    usual = lumos.json("predict", "setup.toml")
    longer = lumos.json("predict", "setup.toml", "--set", "train.seq=4096", "--set", "train.recompute=full")
    assert longer["step_ms"] > 2 * usual["step_ms"]
    h100 = lumos.json("predict", "setup.toml", "--set", "cluster.gpu=h100")
    assert h100["step_ms"] > usual["step_ms"]


def test_predict_writes_every_form(lumos: Answer, tmp_path: Path) -> None:
    for name in ("a.json", "a.csv", "a.trace.json", "a.trace.json.gz"):
        assert lumos("predict", "setup.toml", "-o", name)[0] == 0
    answer = json.loads((tmp_path / "a.json").read_text())
    assert answer.keys() >= KEYS
    (row,) = csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text()))
    assert float(row["step_ms"]) == answer["step_ms"]
    plain = json.loads((tmp_path / "a.trace.json").read_text())
    assert json.loads(gzip.decompress((tmp_path / "a.trace.json.gz").read_bytes())) == plain
    spans = [event for event in plain["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(answer["step_ms"] * 1e3)
    assert {event["pid"] for event in spans} == {0, 4}, "the first rank of every stage"
    tracks: dict[int, float] = {}
    tasks = [event for event in spans if event["cat"] != "user_annotation"]  # the step's mark is around them
    for event in sorted(tasks, key=lambda event: event["ts"]):
        assert event["ts"] >= tracks.get(event["tid"], 0.0) - 1e-6, "spans of a track overlap"
        tracks[event["tid"]] = event["ts"] + event["dur"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict"],
        ["predict", "missing.toml"],
        ["predict", "setup.toml", "--scale", "compute=2"],
        ["predict", "--from", "missing.json", "--set", "train.seq=4096"],
        ["predict", "setup.toml", "-o", "answer.xlsx"],
        ["predict", "setup.toml", "-o", "nowhere/answer.json"],
        ["predict", "setup.toml", "--set", "tp=2"],
        ["predict", "setup.toml", "--set", "train.global_batch=16777216", "--set", "parallel.pp=1"],
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(lumos: Answer, tmp_path: Path, arguments: list[str]) -> None:
    before = set(tmp_path.iterdir())
    code, out, err = lumos(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lumos: ")
    assert err.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_all_mistakes_are_told_at_once(lumos: Answer, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        """
        [model]
        layers = 4
        hidden = 4096
        heads = 32
        ffn = -5
        vocab = 32000
        layer = 3
        [train]
        seq = 2048
        micro_batch = 3
        global_batch = 16
        [parallel]
        tp = 3
        pp = 8
        [cluster]
        gpu = "h2000"
        gpus = 24
        """
    )
    code, out, err = lumos("predict", "bad.toml")
    assert (code, out) == (2, "")
    for part in (
        "model.ffn = -5 is out of range", "model.layer is not known: did you mean layers?",
        "train.global_batch = 16 is not a multiple of train.micro_batch = 3", "parallel.tp = 3 does not divide",
        "parallel.pp = 8 is more than model.layers = 4", 'cluster.gpu = "h2000" is not known: did you mean h200?',
    ):  # fmt: skip
        assert part in err
    assert "Traceback" not in err


def test_a_kind_of_model_that_the_blocks_do_not_describe_is_refused(lumos: Answer, tmp_path: Path) -> None:
    config = {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 30522, "intermediate_size": 3072}))
    code, out, err = lumos("predict", "config.json", "--describe", "--set", "train.seq=512")
    assert (code, out) == (2, "")
    assert "bert" in err
    assert err.count("\n") == 1
