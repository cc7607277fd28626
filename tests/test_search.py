"""Searches: nothing that matters is lost, whatever the order, the engine, the interruptions and the shards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from commands import lumos_here
from lumos import predict, search
from lumos.cli.merge_command import merged
from lumos.costs.costs import costs_of
from lumos.data_files import read_table
from lumos.errors import InputError, LumosError, OptionError
from lumos.memory.memory import memory_of
from lumos.prediction.power import energy_of
from lumos.report.html.search_page import search_page
from lumos.report.terminal.show_searches import show_search
from lumos.risk.monte_carlo import slowed, step_risk
from lumos.schedules import schedule_named
from lumos.search import branch_and_bound
from lumos.search.batch import shared_batches, suited, with_batch
from lumos.search.branch_and_bound import Task, bound_layouts
from lumos.search.estimator import Estimator
from lumos.search.gpu_counts import counts_between, estimated_gpus
from lumos.search.journal import open_journal
from lumos.search.ranking import BOUNDS, Front, Objective, Simulated, promising
from lumos.search.search import COLUMNS, KEYS, SearchResult, _same_work
from lumos.search.shards import checked_part, merged_search
from lumos.search.space import Space
from lumos.setup import read_setup
from lumos.setup.constraints import mistakes_in
from lumos.setup.setup import Setup
from lumos.step.step import assembled, simulate_step
from lumos.workers import Here, Job, engine_named
from lumos.workers.ray_cluster import Ray
from support import calls_made

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def llama() -> Setup:
    """Llama 3 70B on 64 GPUs: some thousand configurations."""
    return read_setup(ROOT / "examples/llama3-70b.toml", ["train.global_batch=128"])


FEW = {"cluster.gpus": [64], "parallel.pp": [1, 2, 4], "parallel.cp": [1, 2], "train.micro_batch": [1, 2],
       "parallel.vpp": [1, 5]}  # fmt: skip

FEWER = FEW | {"parallel.pp": [1, 2], "parallel.cp": [1], "parallel.vpp": [1]}


@pytest.fixture(scope="module")
def found(llama: Setup) -> SearchResult:
    return search(llama, FEW)


def numbers(result: SearchResult) -> tuple[list[Simulated], list[Simulated]]:
    return result.search.front.best, result.search.front.pareto


# ---------------------------------------------------------------------- nothing is lost
def test_bounds_rule_out_almost_everything_and_lose_nothing(llama: Setup, found: SearchResult) -> None:
    everything = search(llama, FEW, exhaustive=True)
    assert numbers(found) == numbers(everything)
    assert len(everything.search.simulated) == everything.search.fitting == found.search.fitting > 300
    assert len(found.search.simulated) < 0.5 * found.search.fitting, "though almost all families are among the best ten"
    first = search(llama, FEW, top=1)
    assert len(first.search.simulated) < 0.2 * found.search.fitting


@pytest.mark.parametrize("objective", [Objective("energy"), Objective("cost", (("", 2.0),), 0.2)])
def test_other_objectives_lose_nothing_either(llama: Setup, objective: Objective) -> None:
    few = FEW | {"parallel.zero": [0, 1], "parallel.tp": [4, 8], "train.recompute": ["none", "full"]}
    bounded = search(llama, few, objective=objective)
    everything = search(llama, few, objective=objective, exhaustive=True)
    assert numbers(bounded) == numbers(everything)
    values = [row.value for row in everything.search.simulated]
    assert bounded.search.front.best[0].value == min(values)


def test_the_best_is_what_predict_says_of_it(llama: Setup, found: SearchResult) -> None:
    row = found.as_dict()["results"][0]
    keys = {key: value for key, value in row.items() if "." in key and key not in ("parallel.dp", "train.microbatches")}
    said = predict(llama.replaced(keys))
    assert said.step_ms == pytest.approx(row["step_ms"], rel=1e-12)
    assert said.memory.gib()["peak"] == pytest.approx(row["memory_gib"])
    assert said.mfu == pytest.approx(row["mfu"])
    assert said.breakdown.as_dict() == pytest.approx(row["breakdown"])
    assert said.memory.fits
    assert said.energy_j == pytest.approx(row["energy_j"])


def test_the_answer_explains_itself(found: SearchResult) -> None:
    answer = found.as_dict()
    steps = [row["step_ms"] for row in answer["results"]]
    assert steps == sorted(steps)
    assert len(steps) == 10
    assert all(answer["bound_ms"] <= row["bound_ms"] <= row["step_ms"] for row in answer["results"])
    best, second = answer["results"][:2]
    assert best["lost_by"] == ""
    assert " not " in second["lost_by"]
    assert "ms" in second["lost_by"] or "same time" in second["lost_by"]
    assert answer["evaluated"] > answer["fitting"] > answer["simulated"]
    assert json.loads(json.dumps(answer)) == answer, "plain values alone"


def test_who_loses_by_cost_loses_the_time_of_all_gpus(llama: Setup) -> None:
    """32 GPUs take longer for a step than 64, and may still be cheaper."""
    answer = search(llama, FEWER | {"cluster.gpus": [32, 64]}, objective=Objective("cost", (("", 2.0),))).as_dict()
    best = answer["results"][0]
    for row in answer["results"][1:]:
        scale, _ = _same_work(best, row, "cost")
        excess = scale * row["step_ms"] / best["step_ms"] - 1
        assert excess == pytest.approx(row["value"] / best["value"] - 1, rel=1e-6)
        assert (" for the number of GPUs" in row["lost_by"]) == (row["cluster.gpus"] != best["cluster.gpus"])


# ---------------------------------------------------------------------- the laws behind it
SIZES = {
    "cluster.gpus": [8, 16, 64], "parallel.tp": [1, 2, 4, 8], "parallel.pp": [1, 2, 4, 8], "parallel.cp": [1, 2],
    "parallel.vpp": [1, 2, 3, 8], "parallel.zero": [0, 1, 2, 3], "train.micro_batch": [1, 2, 4],
    "train.global_batch": [64, 128], "train.recompute": ["none", "selective", "full"],
    "parallel.sequence_parallel": [False, True],
    "parallel.schedule": ["1f1b", "gpipe", "zero-bubble", "zero-bubble-v", "dualpipe", "dualpipe-v"],
    "cluster.gpu": ["h200", "h100"], "parallel.dp_overlap": [None, False, True],
    "train.framework": ["megatron", "pytorch", "nanotron", "torchtitan", "megatron-deepspeed"],
}  # fmt: skip
MODELS = [
    {"model.layers": 16, "model.hidden": 2048, "model.ffn": 8192, "model.heads": 16, "model.kv_heads": 8},
    {"model.layers": 32, "model.hidden": 1024, "model.ffn": 4096, "model.heads": 16, "model.kv_heads": 16},
    {"model.layers": 8, "model.hidden": 2048, "model.ffn": 8192, "model.heads": 16, "model.kv_heads": 8,
     "model.experts": 8, "model.top_k": 2, "model.expert_ffn": 1024, "parallel.ep": 2},
]  # fmt: skip


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    base = read_setup(ROOT / "examples/one-h200.toml")
    chosen = {key: draw(st.sampled_from(values)) for key, values in SIZES.items()} | draw(st.sampled_from(MODELS))
    fewest, most = schedule_named(str(chosen["parallel.schedule"])).chunks
    if not fewest <= chosen["parallel.vpp"] <= most:
        chosen["parallel.schedule"] = "interleaved" if chosen["parallel.vpp"] > 1 else "1f1b"
    setup = base.replaced(chosen | {"train.seq": 2048, "model.head_dim": 0})
    if mistakes_in(setup):
        setup = base.replaced(chosen | {"train.seq": 2048, "model.head_dim": 0, "parallel.vpp": 1,
                              "parallel.schedule": "1f1b", "parallel.pp": 1, "parallel.cp": 1})  # fmt: skip
    return setup


@given(setups())
@settings(max_examples=80)
def test_no_step_is_shorter_or_draws_less_than_its_bound(setup: Setup) -> None:
    if mistakes_in(setup):
        return
    (seconds, joules), step = Estimator().bound(setup), simulate_step(setup)
    assert seconds <= step.us / 1e6 * (1 + 1e-9)
    assert joules <= energy_of(step).joules * (1 + 1e-9)


@pytest.mark.parametrize(("pp", "vpp", "cp", "micro_batch"), [(4, 20, 8, 8), (4, 10, 2, 2), (2, 40, 8, 4)])
def test_bounds_are_close_where_passes_gather_their_weights(pp: int, vpp: int, cp: int, micro_batch: int) -> None:
    """Loose bounds lose nothing, but make a search simulate what it could have skipped."""
    setup = read_setup(ROOT / "examples/llama3-70b.toml").replaced({
        "parallel.pp": pp, "parallel.vpp": vpp, "parallel.zero": 3, "parallel.tp": 8, "parallel.cp": cp,
        "train.micro_batch": micro_batch, "train.recompute": "full", "parallel.schedule": "interleaved",
        "cluster.gpus": 512,
    })  # fmt: skip
    bound, step = Estimator().bound(setup)[0], simulate_step(setup).us / 1e6
    assert 0.95 * step < bound <= step


@given(setups(), setups())
@settings(max_examples=40)
def test_prices_that_setups_share_change_no_time(one: Setup, other: Setup) -> None:
    estimator = Estimator()
    for setup in (one, other, one):
        if not mistakes_in(setup):
            assert estimator.step(setup).us == pytest.approx(simulate_step(setup).us, rel=1e-12)


@given(setups())
@settings(max_examples=60)
def test_a_larger_micro_batch_never_needs_less_memory(setup: Setup) -> None:
    """Which is why a search need not ask about it where a smaller one does not fit."""
    train = setup.train
    if mistakes_in(setup) or train.microbatches % 2 or setup.parallel.vpp > 1:
        return
    larger = setup.replaced({"train.micro_batch": 2 * train.micro_batch})
    if not mistakes_in(larger):
        assert memory_of(larger).peak >= memory_of(setup).peak * (1 - 1e-9)


@given(setups())
@settings(max_examples=60)
def test_what_recomputes_more_never_needs_much_more_memory(setup: Setup) -> None:
    """Which is why a search need not ask about what recomputes less where this by far does not fit."""
    if not mistakes_in(setup):
        full, selective, none = (
            memory_of(setup.replaced({"train.recompute": kind})).peak for kind in ("full", "selective", "none")
        )
        assert full <= 1.02 * selective
        assert selective <= 1.02 * none


bounded_rows = st.lists(
    st.tuples(st.floats(1, 9), st.floats(1, 9), st.floats(0.0, 0.5)), min_size=1, max_size=60
)  # seconds, memory, what a bound misses


@given(bounded_rows, st.integers(1, 5), st.integers(4, 16))
@settings(max_examples=200)
def test_what_is_given_up_could_not_have_mattered(rows: list[tuple[float, float, float]], top: int, wave: int) -> None:
    truth = [Simulated(i, s, s, m, s, 0.0, s - b, s, s) for i, (s, m, b) in enumerate(rows)]
    wanted = Front(top)
    wanted.add(truth)
    front = Front(top)
    left = np.array([(f.number, f.bound, f.bound, f.memory, f.bound) for f in truth], BOUNDS)
    left = left[np.argsort(left["value"], kind="stable")]
    rounds = 0
    while len(left := left[front.can_matter(left)]):
        chosen = promising(left, wave)
        assert chosen.any(), "every round settles something"
        front.add(truth[int(row["number"])] for row in left[chosen])
        left = left[~chosen]
        rounds += 1
    assert (front.best, front.pareto) == (wanted.best, wanted.pareto)


def test_a_front_holds_exactly_what_nothing_beats(found: SearchResult, llama: Setup) -> None:
    rows = search(llama, FEW, exhaustive=True).search.simulated
    for row in rows:
        beaten = [
            o for o in rows
            if o.seconds <= row.seconds and o.memory <= row.memory and o.cost <= row.cost
            and (o.seconds, o.memory, o.cost) != (row.seconds, row.memory, row.cost)
        ]  # fmt: skip
        on_front = any((f.seconds, f.memory, f.cost) == (row.seconds, row.memory, row.cost) for f in numbers(found)[1])
        assert on_front == (not beaten)


SMALL_SPACE = {
    "cluster.gpus": st.sampled_from([8, 16]), "parallel.tp": st.sampled_from([[1], [1, 2], [2, 4]]),
    "parallel.pp": st.sampled_from([[1, 2], [4], [2, 4]]), "parallel.cp": st.just([1]),
    "train.micro_batch": st.sampled_from([[1], [1, 2]]), "train.recompute": st.sampled_from([["none"], ["full"]]),
    "parallel.zero": st.sampled_from([[0], [1]]),
}  # fmt: skip


@given(st.fixed_dictionaries(SMALL_SPACE), st.sampled_from([6, 10, 14]), st.sampled_from(["megatron", "torchtitan"]))
@settings(max_examples=8)
def test_nothing_that_can_be_varied_is_below_the_bound_that_is_printed(
    space: dict[str, Any], layers: int, framework: str
) -> None:
    """Neither of what was tried by default, nor of any number of virtual stages that could have been asked for."""
    base = read_setup(ROOT / "examples/one-h200.toml", [f"model.layers={layers}", f"train.framework={framework}"])
    space = space | {"cluster.gpus": [space["cluster.gpus"]]}
    batch = base.replaced({"train.global_batch": 32})
    printed = search(batch, space).as_dict()["bound_ms"]
    for vpp in range(1, layers // min(space["parallel.pp"]) + 1):
        try:
            everything = search(batch, space | {"parallel.vpp": [vpp]}, exhaustive=True)
        except OptionError:  # no schedule has so many
            continue
        assert all(row.seconds * 1e3 >= printed * (1 - 1e-9) for row in everything.search.simulated)


# ---------------------------------------------------------------------- the batch
@pytest.mark.parametrize(
    ("file", "overrides", "gpus", "sequences", "source"),
    [
        ("one-h200.toml", [], [8], 16, "tokens per GPU"), ("one-h200.toml", [], [64, 96], 192, "tokens per GPU"),
        ("one-h200.toml", ["train.global_batch=24"], [8], 24, "stated"),
        ("torchtitan.toml", [], [64], 64, "tokens per GPU"), ("llama3-70b.toml", [], [64], 1024, "stated"),
        ("config.json", ["train.seq=8192"], [64], 256, "default"),
        ("config.json", ["train.seq=131072"], [64], 16, "default"),
        ("config.json", ["train.seq=8192"], [4096], 4096, "default"),
    ],
)  # fmt: skip
def test_a_batch_that_is_not_stated_is_chosen_for_the_gpus(
    file: str, overrides: list[str], gpus: list[int], sequences: int, source: str
) -> None:
    setup = read_setup(ROOT / "examples" / file, overrides)
    found, batch = with_batch(setup, {"cluster.gpus": tuple(gpus)})
    assert (batch.sequences, batch.source) == (sequences, source)
    assert found.train.global_batch == sequences
    assert batch.tokens == sequences * setup.train.seq
    assert ("--set train.global_batch=N" in batch.why) == (source != "stated")


@given(st.floats(0.01, 1e5), st.lists(st.integers(1, 5000), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 8, 60]))
def test_a_chosen_batch_can_be_divided_and_is_not_far_from_what_was_wanted(
    wanted: float, counts: list[int], unit: int
) -> None:
    chosen = suited(wanted, tuple(counts), unit)
    assert chosen % unit == 0
    assert wanted - 1e-3 <= chosen <= 2 * unit * max(wanted, *counts) + unit


def test_the_batch_is_printed_with_its_source(tmp_path: Path) -> None:
    arguments = ("search", *SMALL, "--vary", "parallel.tp=1", "--vary", "parallel.pp=1")
    run = lumos(*arguments, "-o", tmp_path / "found.html")
    assert "16 " in run.stdout
    assert "32,768 tokens; not stated: 4,096 tokens per GPU, as in the setup" in run.stdout
    assert "4,096 tokens per GPU" in (tmp_path / "found.html").read_text()
    answer = json.loads(lumos(*arguments, "--json").stdout)
    assert answer["global_batch"]["tokens"] == 32_768
    assert answer["results"][0]["mfu"] > 0.25


# ---------------------------------------------------------------------- the space
def test_a_starting_point_that_only_searched_values_make_invalid_is_searched(tmp_path: Path) -> None:
    text = '[model]\npreset = "llama3-405b"\n[train]\nseq = 8192\nglobal_batch = 2048\nframework = "megatron"\n'
    (tmp_path / "run.toml").write_text(text + '[cluster]\ngpu = "h100"\ngpus = 16384\n')
    few = ("--vary", "parallel.pp=16", "--vary", "parallel.tp=8", "--vary", "train.recompute=none", "--workers", 1)
    run = lumos("search", tmp_path / "run.toml", *few, "--vary", "parallel.zero=1", "--json")
    assert run.returncode == 0, run.stderr
    best = json.loads(run.stdout)["results"][0]
    assert (best["cluster.gpus"], best["parallel.vpp"] > 1) == (16384, True), "126 layers on 16 stages, interleaved"


def test_context_ranks_have_a_thousand_tokens_or_more_unless_asked_for(llama: Setup) -> None:
    tried = {seq: Space(llama.replaced({"train.seq": seq}), {"cluster.gpus": (64,)}).tried()["parallel.cp"]
             for seq in (512, 4096, 131072)}  # fmt: skip
    assert tried == {512: [1], 4096: [1, 2, 4], 131072: [1, 2, 4, 8, 16, 32, 64]}
    assert Space(llama, {"cluster.gpus": (64,), "parallel.cp": (32,)}).tried()["parallel.cp"] == [32]


@pytest.mark.parametrize(("layers", "pp", "sizes"), [(126, 16, [1, 2, 3, 4]), (80, 4, [1, 2, 3, 4, 5, 7, 10, 20]),
                                                     (8, 8, [1]), (126, 64, [1])])  # fmt: skip
def test_virtual_stages_need_not_be_even(llama: Setup, layers: int, pp: int, sizes: list[int]) -> None:
    space = Space(llama.replaced({"model.layers": layers}), {"cluster.gpus": (64,), "parallel.pp": (pp,)})
    assert space.tried()["parallel.vpp"] == sizes


def test_every_candidate_is_valid_and_found_again_by_its_number(llama: Setup) -> None:
    space = Space(llama, {"cluster.gpus": (16,)})
    candidates = [c for layout in range(len(space.layouts)) for c, _ in space.candidates(layout)]
    assert len(candidates) > 1000
    assert len({c.number for c in candidates}) == len({c.values for c in candidates}) == len(candidates)
    for candidate in candidates[::37]:
        assert space.candidate(candidate.number) == candidate
        setup = space.setup_of(candidate)
        assert not mistakes_in(setup)
        assert setup == Setup(**{name: getattr(setup, name) for name in ("model", "train", "parallel", "cluster")})
        assert setup.train.global_batch == setup.train.micro_batch * setup.train.microbatches * setup.parallel.dp


def test_a_search_tries_what_the_framework_has(llama: Setup) -> None:
    def values(framework: str, key: str) -> set[Any]:
        setup = llama.replaced({"train.framework": framework})
        space = Space(setup, {"cluster.gpus": (16,), "train.micro_batch": (1,)})
        return {c.keys()[key] for n in range(len(space.layouts)) for c, _ in space.candidates(n)}

    assert values("megatron", "parallel.schedule") == {"1f1b", "interleaved"}
    assert values("megatron", "parallel.zero") == {0, 1, 3}
    assert values("llm-foundry", "parallel.pp") == {1}
    assert "zero-bubble" in values("torchtitan", "parallel.schedule")


@pytest.mark.parametrize(
    ("framework", "stages"), [("torchtitan", {0, 2, 3}), ("pytorch", {0, 1, 2, 3}), ("megatron-deepspeed", {0, 1})]
)
def test_zero_2_is_tried_with_a_pipeline_where_the_framework_combines_them(
    llama: Setup, framework: str, stages: set[int]
) -> None:
    setup = llama.replaced({"train.framework": framework})
    space = Space(setup, {"cluster.gpus": (16,), "parallel.pp": (2,), "train.micro_batch": (1,)})
    found = [setup for n in range(len(space.layouts)) for _, setup in space.candidates(n)]
    assert {setup.parallel.zero for setup in found} == stages
    assert all(setup.parallel.zero == 0 or setup.parallel.dp * setup.parallel.cp > 1 for setup in found)


def test_experts_are_divided_too() -> None:
    base = read_setup(ROOT / "examples/one-h200.toml", ["model.preset=mixtral-8x7b", "train.global_batch=64"])
    found = search(base, {"cluster.gpus": [32], "parallel.cp": [1], "train.micro_batch": [1], "parallel.pp": [1]})
    assert {row["parallel.ep"] for row in found.rows()} > {1}


# ---------------------------------------------------------------------- constraints
def test_only_what_is_asked_for_is_tried_of_the_rarer_keys(llama: Setup) -> None:
    usual = Space(llama, {"cluster.gpus": (64,)}).tried()
    assert (usual["parallel.etp"], usual["train.recompute_layers"]) == ([0], [None])
    vary = {"train.recompute_layers": (1, 2), "parallel.cp_type": ("p2p", "all_gather"), "parallel.pp": (4,)}
    space = Space(llama, {"cluster.gpus": (64,), "parallel.cp": (1, 2), "parallel.tp": (8,), **vary})
    found = [setup for index in range(len(space.layouts)) for _, setup in space.candidates(index)]
    layers = {(setup.train.recompute, setup.train.recompute_layers) for setup in found}
    assert layers == {("none", None), ("selective", None), ("full", 1), ("full", 2)}
    types = {(setup.parallel.cp, setup.parallel.cp_type) for setup in found}
    assert types == {(1, ""), (2, "p2p"), (2, "all_gather")}


def test_experts_that_are_cut_by_tensor_parallelism_stay_so_in_a_search() -> None:
    megatron = read_setup(ROOT / "examples/one-h200.toml", [
        "model.preset=mixtral-8x7b", "parallel.tp=2", "parallel.etp=2", "cluster.gpus=16", "train.global_batch=64",
        "train.framework=megatron",
    ])  # fmt: skip
    space = Space(megatron, {"parallel.tp": (1, 2, 4), "parallel.pp": (1,), "parallel.cp": (1,), "parallel.ep": (2,)})
    found = [setup.parallel for index in range(len(space.layouts)) for _, setup in space.candidates(index)]
    assert {(parallel.tp, parallel.etp) for parallel in found} == {(1, 1), (2, 2), (4, 4)}


def test_a_deadline_asks_for_the_fewest_gpus_that_meet_it(llama: Setup) -> None:
    few = FEWER | {"cluster.gpus": [32, 64, 128]}
    seconds = {
        gpus: search(llama, few | {"cluster.gpus": [gpus]}).search.front.best[0].seconds for gpus in (32, 64, 128)
    }
    tokens = 1e9
    days = 1.05 * seconds[64] * tokens / llama.tokens / 86_400
    found = search(llama, few, objective=Objective("gpus", tokens=tokens, deadline_days=days)).as_dict()
    assert found["results"][0]["cluster.gpus"] == 64
    assert all(row["days"] <= days for row in found["results"])


FEWEST = {"parallel.tp": [8], "parallel.cp": [1], "parallel.pp": [1, 2], "parallel.vpp": [1], "train.micro_batch": [1],
          "parallel.zero": [1], "train.recompute": ["none"]}  # fmt: skip
BY_THEN = Objective("gpus", gpu_hour=(("", 2.0),), tokens=1e12, deadline_days=40)


def test_counts_that_cannot_share_the_batch_take_one_near_it_or_are_listed() -> None:
    setup = read_setup(ROOT / "examples/llama3-70b.toml")
    counts = FEWEST | {"cluster.gpus": [256, 384, 512]}
    answer = search(setup, counts, objective=BY_THEN).as_dict()
    best = answer["results"][0]
    assert (best["cluster.gpus"], best["train.global_batch"]) == (384, 1152)
    assert best["days"] <= 40
    assert best["money"] == pytest.approx(2 * best["gpu_hours"])
    assert best["gpu_hours"] == pytest.approx(24 * 384 * best["days"], rel=1e-3)
    assert any("global_batch=1024" in text for text in answer["warnings"])
    assert [row["cluster.gpus"] for row in answer["skipped"]] == [256]
    assert answer["skipped"][0]["least_days"] > 40
    kept = search(setup, counts, objective=BY_THEN, keeps_batch=True).as_dict()
    assert kept["results"][0]["cluster.gpus"] == 512
    assert {row["train.global_batch"] for row in kept["results"]} == {1024}
    assert [(row["cluster.gpus"], row["near_batch"]) for row in kept["skipped"]] == [(256, None), (384, 1152)]


def test_the_fewest_gpus_are_searched_where_no_number_is_named(tmp_path: Path) -> None:
    setup = read_setup(ROOT / "examples/llama3-70b.toml")
    answer = search(setup, FEWEST, objective=BY_THEN, journal=tmp_path / "j").as_dict()
    best, tried = answer["results"][0], [row["cluster.gpus"] for row in answer["tried_clusters"]]
    assert {count for count in tried if count < best["cluster.gpus"]} == {r["cluster.gpus"] for r in answer["skipped"]}
    assert best["cluster.gpus"] - 8 in tried
    assert all(row["least_days"] > 40 for row in answer["skipped"])
    again = search(setup, FEWEST, objective=BY_THEN, journal=tmp_path / "j", engine=Here()).as_dict()
    assert again["results"] == answer["results"]
    with pytest.raises(OptionError, match="--deadline"):
        search(setup, FEWEST, objective=replace(BY_THEN, deadline_days=1e-6))


@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_the_fewest_gpus_do_not_depend_on_the_estimate(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = read_setup(ROOT / "examples/llama3-70b.toml")
    expected = search(setup, FEWEST, objective=BY_THEN).as_dict()["results"][0]

    def misled(*args: Any) -> tuple[float, int]:
        estimate, fitting = estimated_gpus(*args)
        return factor * estimate, fitting

    monkeypatch.setattr(sys.modules["lumos.search.search"], "estimated_gpus", misled)
    answer = search(setup, FEWEST, objective=BY_THEN).as_dict()
    assert answer["results"][0]["cluster.gpus"] == expected["cluster.gpus"]
    assert expected["cluster.gpus"] - 8 in [row["cluster.gpus"] for row in answer["skipped"]]


@pytest.mark.parametrize(
    ("days", "skipped"),
    [
        (20, {16: "no layout can share a batch of 300 sequences evenly"}),  # in an earlier round
        (400, {8: "no valid configuration fits into memory"}),  # memory asks for more GPUs than the deadline
    ],
)
def test_numbers_of_gpus_tried_in_vain_are_listed_until_one_has_an_answer(
    days: float, skipped: dict[int, str], tmp_path: Path
) -> None:
    text = '[model]\npreset = "llama3-8b"\n[train]\nseq = 8192\nglobal_batch = 300\nframework = "megatron"\n'
    few = FEWEST | {"parallel.tp": [1], "parallel.cp": [1, 2], "parallel.pp": [1]}
    objective = replace(BY_THEN, tokens=3e11, deadline_days=days)
    (tmp_path / "run.toml").write_text(text + '[cluster]\ngpu = "h100"\n')
    answer = search(tmp_path / "run.toml", few, objective=objective).as_dict()
    assert answer["results"][0]["cluster.gpus"] == 24
    listed = {row["cluster.gpus"]: row["why"] for row in answer["skipped"]}
    assert listed.items() >= skipped.items()
    assert any(f"{min(listed)} to 24 GPUs were tried" in text for text in answer["warnings"])


def test_shards_of_a_search_for_the_fewest_gpus_merge(tmp_path: Path) -> None:
    setup, parts = read_setup(ROOT / "examples/llama3-70b.toml"), []
    for index in range(2):
        parts.append(tmp_path / f"{index}.json")
        parts[-1].write_text(json.dumps(search(setup, FEWEST, objective=BY_THEN, shard=(index, 2)).as_dict()))
    whole, together = search(setup, FEWEST, objective=BY_THEN).as_dict(), merged(parts)
    for key in ("results", "tried_clusters", "skipped"):
        assert together[key] == whole[key]


@given(st.integers(1, 10_000), st.integers(1, 4096))
def test_a_shared_batch_is_near_the_stated_one_and_divides_further(sequences: int, gpus: int) -> None:
    odd, limits = gpus // (gpus & -gpus), read_table("search.toml")["adapted_batch"]
    near = shared_batches(sequences, (gpus,)).get(gpus)
    if near is None:
        return
    assert sequences % odd or gpus // gcd(sequences, gpus) > limits["largest_replica"]
    assert near % odd == 0
    assert gcd(near, gpus) > gcd(sequences, gpus)
    assert abs(near / sequences - 1) <= read_table("search.toml")["adapted_batch"]["most_change"]


@given(st.floats(0.1, 1e5), st.floats(1.01, 2), st.sampled_from([1, 4, 8, 72]))
def test_numbers_of_gpus_are_whole_nodes_or_parts_of_one(low: float, factor: float, node: int) -> None:
    counts = counts_between(low, low * factor, node)
    assert counts == sorted(set(counts))
    assert all(count % node == 0 or count < node for count in counts)
    assert min(counts) >= low
    assert len(counts) <= read_table("search.toml")["gpu_counts"]["most"] + 8


def test_cheaper_gpus_win_where_money_counts(llama: Setup) -> None:
    few = FEWER | {"cluster.gpu": ["h100", "h200"]}
    for prices, winner in (((("h100", 1.0), ("h200", 9.0)), "h100"), ((("h100", 9.0), ("h200", 1.0)), "h200")):
        found = search(llama, few, objective=Objective("cost", prices)).as_dict()
        assert found["results"][0]["cluster.gpu"] == winner
        assert found["results"][0]["cost_per_mtoken"] > 0


def test_a_price_of_energy_alone_is_all_that_is_paid(llama: Setup) -> None:
    found = search(llama, FEW, objective=Objective("cost", kwh=0.2)).as_dict()["results"][0]
    assert found["cost_per_mtoken"] == pytest.approx(1e6 * found["joules_per_token"] / 3.6e6 * 0.2)


VERY_FEW = {"cluster.gpus": [8], "parallel.pp": [1], "parallel.tp": [1, 2, 8], "train.micro_batch": [1, 2]}


@pytest.fixture(scope="module")
def small() -> Setup:
    return read_setup(ROOT / "examples/one-h200.toml", ["train.global_batch=32"])


def test_by_risk_the_90th_percentile_decides(small: Setup) -> None:
    found = search(small, VERY_FEW, objective=Objective(risk=True), top=4)
    rows = found.results
    assert [row["p90_ms"] for row in rows] == sorted(row["p90_ms"] for row in rows)
    assert all(row["p90_ms"] >= row["step_ms"] for row in [*rows, *found.pareto])
    assert rows[0]["value"] == pytest.approx(rows[0]["p90_ms"] / 1e3 / small.tokens)
    best = step_risk(predict(small.replaced({key: rows[0][key] for key in KEYS})), draws=4000)
    assert rows[0]["p90_ms"] / rows[0]["step_ms"] == pytest.approx(best.p90_ms / best.typical_ms, rel=0.01)
    assert {row["p90_ms"] for row in search(small, VERY_FEW).results} == {None}


def test_a_front_by_risk_has_what_is_slower_but_varies_less() -> None:
    rows = [
        Simulated(i, s, s, 1.0, 1.0, 0.0, s, late, s)
        for i, (s, late) in enumerate([(1.0, 1.3), (1.1, 1.2), (1.2, 1.3)])
    ]
    front = Front(3)
    front.add(rows)
    assert [row.number for row in front.pareto] == [0, 1]


def test_failures_make_runs_longer_and_dearer_and_large_jobs_most(small: Setup) -> None:
    failing = small.replaced({"reliability.mtbf_gpu_hours": 500.0})
    objective = Objective("cost", (("", 2.0),), tokens=1e12)
    without, with_failures = (search(one, VERY_FEW, objective=objective).results[0] for one in (small, failing))
    assert with_failures["step_ms"] == without["step_ms"]
    assert 1.0 < with_failures["days"] / without["days"] < 2.0
    assert with_failures["money"] / without["money"] == pytest.approx(with_failures["days"] / without["days"], rel=1e-6)
    assert without["run_ms"] is None
    assert with_failures["run_ms"] > with_failures["step_ms"]
    spared = search(failing.replaced({"reliability.spare_nodes": 1}), VERY_FEW, objective=objective).results[0]
    assert spared["money"] > 1.9 * without["money"], "a spare node of eight GPUs is paid for, too"


def test_a_search_counts_what_a_setup_says_is_slow(small: Setup) -> None:
    slow = small.replaced({"variability.slow": ["rank=3,factor=1.5"]})
    best = search(slow, VERY_FEW, top=1).results[0]
    chosen = slow.replaced({key: best[key] for key in KEYS})
    assert best["step_ms"] == pytest.approx(slowed(predict(chosen))[0].step_ms)
    assert best["step_ms"] > 1.1 * search(small, VERY_FEW, top=1).results[0]["step_ms"]


def test_a_deadline_that_no_bound_meets_is_said(small: Setup) -> None:
    found = search(small, VERY_FEW, objective=Objective(tokens=1e13, deadline_days=0.01))
    assert found.warnings[-1].startswith("none of the configurations that fit meets the deadline")


def test_failures_without_a_length_of_the_run_are_noted(small: Setup) -> None:
    failing = small.replaced({"reliability.rates": "llama3"})
    assert any("add --tokens" in text for text in search(failing, VERY_FEW).warnings)


def test_shards_by_risk_merge_into_the_whole(small: Setup) -> None:
    objective = Objective(risk=True)
    whole = search(small, VERY_FEW, objective=objective, top=3).as_dict()
    parts = [search(small, VERY_FEW, objective=objective, top=3, shard=(i, 2)).as_dict() for i in range(2)]
    one = merged_search([checked_part(part, "a part") for part in parts])
    assert [row["p90_ms"] for row in one["results"]] == [row["p90_ms"] for row in whole["results"]]
    assert one["risk"]
    assert {row["number"] for row in one["pareto"]} == {row["number"] for row in whole["pareto"]}


def test_what_a_forecast_warns_of_a_search_warns_of_too(found: SearchResult) -> None:
    assert any("no samples for h100" in text for text in found.as_dict()["warnings"])


def test_a_table_names_money_only_where_there_are_prices(found: SearchResult) -> None:
    assert {row["cost_per_mtoken"] for row in found.rows()} == {None}
    assert all(row["gpu_hours_per_mtoken"] > 0 for row in found.rows())
    assert set(found.rows()[0]) == set(COLUMNS)


def test_less_memory_leaves_fewer(llama: Setup, found: SearchResult) -> None:
    tight = search(llama, FEW, memory_gib=40)
    assert 0 < tight.search.fitting < found.search.fitting
    assert all(row["memory_gib"] < 40 for row in tight.as_dict()["results"])


def test_nothing_that_fits_is_said(llama: Setup) -> None:
    none = search(llama, FEW | {"cluster.gpus": [8], "parallel.pp": [1]}, memory_gib=1)
    assert none.as_dict()["results"] == []
    assert "fits" in none.as_dict()["warnings"][0]


def test_what_cannot_be_told_apart_is_one_family(llama: Setup, found: SearchResult) -> None:
    answer = found.as_dict()
    families = answer["families"]
    laid_out = [tuple(row[key] for key in ("parallel.tp", "parallel.pp", "parallel.ep")) for row in families]
    assert len(set(laid_out)) == len(families) > 3
    assert [row["step_ms"] for row in families] == sorted(row["step_ms"] for row in families)
    assert families[0]["number"] == answer["results"][0]["number"]
    assert any(len(row["variants"]) > 1 for row in families)
    for row in families:
        assert all(v["step_ms"] <= row["step_ms"] * (1 + answer["tolerance"]) for v in row["variants"])
        assert set(row["differ"]) == {key for v in row["variants"] for key in v if "." in key}


def test_the_page_says_what_was_tried_and_simulated_why_others_lost_and_the_bound(found: SearchResult) -> None:
    answer = found.as_dict()
    page = search_page(answer)
    assert f"{answer['evaluated']:,} configurations bounded, {answer['simulated']:,} simulated" in page.title
    results, _, steps, tried, _ = page.sections
    assert [column.title for column in results.tables[0].columns][:4] == ["#", "step, ms", "memory, GiB", "MFU, %"]
    assert [table.caption for table in results.tables[1:]] == ["why the others lost", "variants"]
    assert f"{answer['simulated']:,} that might still be among the best were simulated" in results.text
    assert "none can take less than" in tried.text
    assert [row.values[0] for row in tried.tables[0].rows] == list(answer["tried"])
    (figure,) = steps.figures
    labels = figure.chart.as_dict()["labels"]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) <= 44, "as many as stand beside a bar"
    assert "tp 8" in labels[0] or "tp 4" in labels[0]


def test_bounds_lose_no_family_and_no_variant(llama: Setup, found: SearchResult) -> None:
    few = FEW | {"train.recompute": ["none", "full"], "train.micro_batch": [1]}
    assert search(llama, few).families == search(llama, few, exhaustive=True).families


def test_what_is_too_large_to_simulate_is_skipped_and_said(tiny: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(tiny, TINY, exhaustive=True)
    longest = max(row["train.microbatches"] for row in whole.rows())
    monkeypatch.setitem(read_table("step.json"), "most_tasks", 40)
    found = search(tiny, TINY, exhaustive=True)
    assert 0 < len(found.search.too_large) < len(found.search.simulated)
    assert max(row["train.microbatches"] for row in found.rows()) <= longest
    assert len(found.rows()) + found.as_dict()["too_large"] == len(whole.rows())
    assert any("too many micro-batches to be simulated" in text for text in found.as_dict()["warnings"])
    monkeypatch.setitem(read_table("step.json"), "most_tasks", 0)
    assert search(tiny, TINY).as_dict()["results"] == []


@pytest.mark.parametrize(
    "vary",
    [
        {"cluster.gpus": range(1, 2001), "parallel.tp": range(1, 2001), "parallel.pp": range(1, 2001)},
        {"cluster.gpus": [64], "train.micro_batch": range(1, 9999), "parallel.vpp": range(1, 9999)},
        {"cluster.gpus": [64], "parallel.ep": range(1, 9999), "parallel.tp": range(1, 9999)},
    ],
)
def test_a_space_without_end_is_refused_at_once(tiny: Setup, vary: dict[str, Any]) -> None:
    def refused() -> None:
        with pytest.raises(OptionError, match="too many"):
            search(tiny.replaced({"train.global_batch": 4096}), {key: list(values) for key, values in vary.items()})

    assert calls_made(refused) < 20_000_000  # the whole space has 10⁸ configurations or more


@pytest.mark.parametrize("option", ["--set", "--vary"])
def test_a_gpu_that_looks_like_a_number_is_an_unknown_gpu(option: str) -> None:
    done = lumos_here("search", ROOT / "examples/one-h200.toml", option, "cluster.gpu=5e-324")
    assert (done.returncode, done.stdout) == (2, "")
    assert "5e-324" in done.stderr


def test_what_ray_prints_is_not_part_of_the_answer() -> None:
    script = """
import os
from lumos.workers.ray_cluster import output_as_messages
with output_as_messages():
    os.write(1, b"(raylet) node died; ")
    print("by Python, too")
print("the answer")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "the answer\n"
    assert run.stderr == "(raylet) node died; by Python, too\n"


# ---------------------------------------------------------------------- engines, interruptions, shards
@pytest.mark.slow
def test_processes_give_the_same_table(llama: Setup, found: SearchResult) -> None:
    with engine_named("local", 2) as engine:
        other = search(llama, FEW, engine=engine)
    assert numbers(other) == numbers(found)
    assert other.search.simulated == found.search.simulated


class Interrupted(Here):
    """Stops in the middle of a chunk, and counts those it ran."""

    def __init__(self, after: float) -> None:
        self.after, self.ran = after, 0

    def run(self, job: Job, chunks: Sequence[Any]) -> Iterator[Any]:
        for chunk in chunks:
            if self.ran >= self.after:
                raise KeyboardInterrupt
            self.ran += 1
            yield job.function(job.shared, chunk)


@pytest.mark.parametrize("after", [1, 7])
def test_an_interrupted_search_is_resumed(llama: Setup, found: SearchResult, tmp_path: Path, after: int) -> None:
    first, second, whole = Interrupted(after), Interrupted(np.inf), Interrupted(np.inf)
    search(llama, FEW, engine=whole)
    with pytest.raises(KeyboardInterrupt):
        search(llama, FEW, engine=first, journal=tmp_path / "j")
    resumed = search(llama, FEW, engine=second, journal=tmp_path / "j")
    assert numbers(resumed) == numbers(found)
    lost = 8  # chunks of the wave that was under way
    assert whole.ran - first.ran <= second.ran <= whole.ran - first.ran + lost
    third = Interrupted(0)
    assert numbers(search(llama, FEW, engine=third, journal=tmp_path / "j")) == numbers(found)
    assert third.ran == 0, "what is finished is not done again"


def test_a_journal_of_another_question_is_refused(llama: Setup, tmp_path: Path) -> None:
    few = FEW | {"parallel.pp": [2], "parallel.tp": [8]}
    search(llama, few, journal=tmp_path / "j")
    with pytest.raises(OptionError, match="another search"):
        search(llama, few, journal=tmp_path / "j", top=3)
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "file").touch()
    with pytest.raises(OptionError, match="not empty"):
        open_journal(tmp_path / "k", "question")


def damage(path: Path, how: str, others: Sequence[Path]) -> None:
    """What disks, people and other programs do to a file."""
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "altered":
        path.write_bytes(content[:-20] + bytes([content[-20] ^ 0x10]) + content[-19:])
    elif how == "removed":
        path.unlink()
    elif how == "replaced":
        path.write_bytes(others[0].read_bytes() if others[0] != path else others[-1].read_bytes())
    elif how == "duplicated":
        (path.parent / f"{path.stem[:-1]}f{path.suffix}").write_bytes(content)
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "a folder":
        path.unlink()
        path.mkdir()


TINY = {"cluster.gpus": [8], "parallel.pp": [1, 2], "parallel.cp": [1], "parallel.tp": [1, 2], "parallel.vpp": [1],
        "train.micro_batch": [1, 2], "parallel.zero": [1], "train.recompute": ["none", "full"]}  # fmt: skip


@pytest.fixture
def tiny() -> Setup:
    return read_setup(ROOT / "examples/one-h200.toml", ["train.framework=megatron"])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a search of a few configurations has several pieces of every kind."""
    monkeypatch.setattr(branch_and_bound, "_LAYOUTS_PER_CHUNK", 1)
    monkeypatch.setattr(branch_and_bound, "_SIMULATIONS_PER_WAVE", 8)


@pytest.fixture
def finished_journal(tiny: Setup, small_pieces: None, tmp_path: Path) -> Path:
    search(tiny, TINY, journal=tmp_path / "finished")
    assert len(list((tmp_path / "finished").glob("wave-*"))) > 1
    assert len(list((tmp_path / "finished").glob("bounds-*"))) > 1
    return tmp_path / "finished"


@pytest.mark.parametrize("kind", ["bounds", "wave", "question"])
@pytest.mark.parametrize("how", ["truncated", "altered", "removed", "replaced", "duplicated", "emptied"])
def test_what_is_damaged_in_a_journal_is_done_again(
    tiny: Setup, finished_journal: Path, tmp_path: Path, kind: str, how: str
) -> None:
    found = search(tiny, TINY)
    for number, path in enumerate(sorted(finished_journal.glob(f"{kind}*"))):
        folder = tmp_path / str(number)
        shutil.copytree(finished_journal, folder)
        damage(folder / path.name, how, sorted(folder.glob("[bw]*")))
        engine = Interrupted(np.inf)
        resumed = search(tiny, TINY, journal=folder, engine=engine)
        assert numbers(resumed) == numbers(found)
        assert resumed.search.simulated == found.search.simulated
        harmless = kind == "question" or how == "duplicated"
        assert (engine.ran == 0) == harmless, "what is whole is not done again"
        told = any("damaged pieces" in text for text in resumed.as_dict()["warnings"])
        assert told == (not harmless and how != "removed")
        again = Interrupted(0)
        assert numbers(search(tiny, TINY, journal=folder, engine=again)) == numbers(found)


@pytest.mark.parametrize("kind", ["bounds", "wave", "question"])
def test_a_journal_that_cannot_be_written_ends_in_one_line(
    tiny: Setup, finished_journal: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(finished_journal, tmp_path / "j")
    damage(next((tmp_path / "j").glob(f"{kind}*")), "a folder", [])
    with pytest.raises(LumosError, match=kind) as told:
        search(tiny, TINY, journal=tmp_path / "j")
    assert len(str(told.value).splitlines()) == 1
    (tmp_path / "file").touch()
    with pytest.raises(LumosError, match="file"):
        open_journal(tmp_path / "file", "question")


def test_a_full_disk_leaves_nothing_half_written(llama: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = open_journal(tmp_path / "j", "question")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LumosError, match="No space left"):
        journal.keep_wave(np.zeros(1, BOUNDS), [Simulated(*[1] + [1.0] * 8)])
    assert [p.name for p in (tmp_path / "j").iterdir()] == ["question.txt"]


def test_shards_merge_into_the_whole(llama: Setup, found: SearchResult, tmp_path: Path) -> None:
    parts = []
    for index in range(3):
        part = search(llama, FEW, shard=(index, 3)).as_dict()
        parts.append(tmp_path / f"{index}.json")
        parts[-1].write_text(json.dumps(part))
    whole, together = found.as_dict(), merged(parts)
    for key in ("results", "families", "pareto", "evaluated", "fitting", "bound_ms", "warnings"):
        assert together[key] == whole[key]
    assert "1 of 3 shards missing (2)" in merged([parts[0], parts[2]], partial=True)["warnings"][-1]
    with pytest.raises(InputError, match=r"1 of 3 shards missing \(2\)"):
        merged([parts[0], parts[2]])
    with pytest.raises(InputError, match="same shard"):
        merged([parts[0], parts[0]])
    other = tmp_path / "other.json"
    other.write_text(json.dumps(search(llama, FEW, shard=(1, 3), top=2).as_dict()))
    with pytest.raises(InputError, match="another question"):
        merged([parts[0], other])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of a part, and of the first item of every list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield (*path, 0)
        yield from places(value[0], (*path, 0))


REMOVED = object()
MUTATIONS = [REMOVED, "x", -1, None, [], {}, True, 1e300, 10**30, 0, ["x"], {"a.b": []}]


def mutated(part: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy: Any = json.loads(json.dumps(part))
    inner = copy
    for step in place[:-1]:
        inner = inner[step]
    if value is REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return dict(copy)


def test_a_mutated_part_is_refused_in_one_line_or_shown(tiny: Setup, tmp_path: Path) -> None:
    whole = search(tiny, TINY, top=2).as_dict()
    whole["setup"] = dict(list(whole["setup"].items())[:3])
    path = tmp_path / "part.json"
    refused = []
    for number, place in enumerate(places(whole)):
        for value in MUTATIONS[number % 4 :: 4]:
            path.write_text(json.dumps(mutated(whole, place, value)))
            try:
                answer = merged([path])
            except InputError as problem:
                refused.append(str(problem))
                continue
            show_search(answer, Console(file=StringIO()))
            search_page(answer)
    assert len(refused) > 200
    assert all("part.json" in text and len(text.splitlines()) == 1 for text in refused)


@pytest.mark.parametrize("shard", [[2, 1_000_000_000], [0, 1], [3, 2], [1], [1, 2, 3], ["1", "2"], [1, 10**40]])
def test_a_part_of_a_shard_that_cannot_be_is_refused(tiny: Setup, tmp_path: Path, shard: list[Any]) -> None:
    part = search(tiny, TINY, top=1).as_dict() | {"shard": shard}
    (tmp_path / "part.json").write_text(json.dumps(part))
    with pytest.raises(InputError, match="shard") as told:
        merged([tmp_path / "part.json"])
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "search"}', '{"kind": "score", "shard": [1]}', "\x00"])
def test_what_is_no_part_is_not_merged(content: str, tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text(content)
    with pytest.raises(InputError, match=r"part\.json"):
        merged([tmp_path / "part.json"])


def test_a_million_configurations_need_little_memory(llama: Setup) -> None:
    """Rows of bounds are all that grows, 40 bytes each."""
    assert BOUNDS.itemsize == 40
    task = Task(Space(llama, {key: tuple(value) for key, value in FEW.items()}), Objective())
    valid, rows = bound_layouts(task, range(4))
    assert rows.nbytes == 40 * len(rows) <= 40 * valid


@pytest.mark.slow
def test_ray_gives_the_same_table_though_a_node_is_lost(llama: Setup) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        told: list[int] = []

        def lose_a_node(done: int, total: int, what: str) -> None:
            told.append(done)
            if len(told) == 2:
                cluster.remove_node(node, allow_graceful=False)

        with engine_named("ray", 0, cluster.address) as engine:
            assert engine.workers == 2
            other = search(llama, FEWER, engine=engine, progress=lose_a_node)
        assert len(told) > 2
        found = search(llama, FEWER)
        assert numbers(other) == numbers(found)
        assert other.as_dict()["results"] == found.as_dict()["results"]
    finally:
        cluster.shutdown()


# ---------------------------------------------------------------------- from a trace
@pytest.mark.data
def test_a_search_from_a_trace_is_anchored_in_it(shared_data: Path) -> None:
    trace = shared_data / "h200/single/base_l8_h2048_s2048_b2.pt.trace.json.gz"
    vary = ["--vary", "train.micro_batch=1,2,4,8", "--vary", "train.recompute=none,full"]
    batch = ["--set", "train.global_batch=8"]
    run = lumos("search", "--from", trace, "--gpus", 1, *batch, *vary, "--workers", 1, "--json")
    assert run.returncode == 0, run.stderr
    best = json.loads(run.stdout)["results"][0]
    asked = ["--set", f"train.micro_batch={best['train.micro_batch']}", "--set", "train.global_batch=8"]
    said = lumos("predict", "--from", trace, *asked, "--set", f"train.recompute={best['train.recompute']}", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["step_ms"] == pytest.approx(best["step_ms"], rel=1e-9)


# ---------------------------------------------------------------------- the command line
def lumos(*arguments: object) -> subprocess.CompletedProcess[str]:
    return lumos_here(*arguments, cwd=ROOT)


SMALL = ("examples/one-h200.toml", "--gpus", "8", "--workers", "1", "--top", "3")


@pytest.mark.parametrize("form", ["json", "csv", "parquet", "html"])
def test_every_form_is_written(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"found.{form}"
    run = lumos("search", *SMALL, "--vary", "parallel.tp=1,2", "--vary", "parallel.pp=1", "-o", path)
    assert run.returncode == 0, run.stderr
    assert "the best by time" in run.stdout
    if form == "json":
        assert len(json.loads(path.read_text())["results"]) == 3
    elif form == "parquet":
        table = polars.read_parquet(path)
        assert table["step_ms"].is_sorted()
        assert {"parallel.tp", "memory_gib", "pareto"} <= set(table.columns)
    else:
        assert "parallel.tp" in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--vary", "parallel.tb=2"), "did you mean parallel.tp?"), (("--vary", "parallel.tp"), "SECTION.KEY=A,B"),
        (("--vary", "cluster.fabric=efa,roce"), "use --set, one search for each value"),
        (("--vary", "parallel.tp=x"), "parallel.tp"), (("--vary", "parallel.tp="), "names no value"),
        (("--vary", "parallel.tp=2", "--set", "parallel.tp=4"), "twice"), (("--gpus", "zero"), "cluster.gpus"),
        (("--gpu", "h1000"), "h1000"), (("--objective", "joy"), "joy"), (("--objective", "gpus"), "--deadline"),
        (("--deadline", "3"), "--tokens"), (("--price", "cheap"), "--price"), (("--top", "0"), "--top 0"),
        (("--shard", "3/2"), "--shard"), (("--engine", "slurm"), "slurm"), (("-o", "found.txt"), ".parquet"),
        (("--memory", "-1"), "--memory"), (("--set", "model.layers=x"), "model.layers"),
        (("--gpus", "8", "--set", "parallel.tp=3"), "parallel.tp = 3"),
        (("--gpus", "0"), "at least 1 GPU"), (("--set", "parallel.dp=4"), "parallel.dp follows"),
        (("--gpus", "8", "--set", "cluster.gpus=16"), "twice"), (("--gpu", "h200,h100", "--price", "h100=2"), "h200"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    run = lumos("search", "examples/one-h200.toml", *arguments)
    assert run.returncode == 2
    assert told in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_notes_are_not_about_what_the_command_line_states() -> None:
    few = ("--vary", "parallel.tp=2", "--vary", "parallel.pp=1", "--vary", "parallel.cp=1", "--workers", 1, "--json")
    run = lumos("search", "examples/torchtitan.toml", "--gpus", 8, "--gpu", "h100", *few)
    assert run.returncode == 0, run.stderr
    assert not [text for text in json.loads(run.stdout)["warnings"] if "not given" in text]


def test_a_search_on_ray_reports_that_all_nodes_are_gone(capfd: pytest.CaptureFixture[str]) -> None:
    class Cluster:
        """A Ray cluster whose only node comes back after three waits."""

        exceptions = SimpleNamespace(RayTaskError=KeyError, RayError=ValueError)
        waits = 0

        def wait(self, references: list[int], timeout: float) -> tuple[list[int], list[int]]:
            self.waits += 1
            return (references, []) if self.waits > 3 else ([], references)

        def cluster_resources(self) -> dict[str, float]:
            return {} if self.waits < 3 else {"CPU": 1.0}

        def get(self, reference: int) -> int:
            return reference

    assert Ray(Cluster(), 1)._answer(5) == 5
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_scores_of_shards_merge_too(tmp_path: Path) -> None:
    columns = "id,source,model_name,gpu,n_gpus,n_layers,hidden,n_heads,n_kv_heads,vocab,seq_len,tp,pp,dp,micro_batch"
    header = columns + ",global_batch,precision,ffn_hidden,gated_mlp,step_time_s,train_mode,framework"
    sizes = "1024,8,8,32000,1024,1,1,1,2,2,bf16,4096,true"
    rows = [f"r{i},s,m,h200,1,{2 + i},{sizes},0.0{i + 1},pretrain,pytorch" for i in range(7)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join([header, *rows, "bad,s,m"]) + "\n")
    whole = lumos("score", table, "--json")
    assert whole.returncode == 0, whole.stderr
    for index in (1, 2):
        part = lumos("score", table, "--shard", f"{index}/2", "-o", tmp_path / f"{index}.json", "--workers", 2)
        assert part.returncode == 0, part.stderr
    together = json.loads(lumos("merge", tmp_path / "1.json", tmp_path / "2.json", "--json").stdout)
    answer = json.loads(whole.stdout)
    assert together["by_source"]["s"] == pytest.approx(answer["by_source"]["s"])
    assert together["refused"] == answer["refused"] != []
    assert (together["rows"], together["predicted"]) == (answer["rows"], answer["predicted"]) == (8, 7)


def test_shared_prices_are_prices(llama: Setup) -> None:
    assert assembled(llama, costs_of(llama)).step().us == simulate_step(llama).us
