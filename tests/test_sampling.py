"""Sampling: which shapes are measured, and that a run can stop and resume at any point. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos.errors import InputError, OptionError
from lumos.measure.fit_samples import read_samples
from lumos.measure.operator_rows import operator_of
from lumos.measure.sample import Sampled, SamplePlan, sample, sample_machine
from lumos.measure.sample_grid import COLLECTIVE_BYTES, COLLECTIVES, COUNTS, Row, collective_rows, rows
from lumos.report.terminal.costs import sample_answer

OPERATORS = sorted({key.partition(":")[0] for key in COUNTS})
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch"
)
without_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")


class FakeGpu:
    """A GPU on which everything takes as long as its place in the order, and some things cannot be done."""

    def __init__(self, gpu: str = "NVIDIA H200", fails_at: int = -1, dies: bool = False) -> None:
        self.about = {"gpu": gpu, "torch": "none"}
        self.seen: list[Row] = []
        self.fails_at, self.dies = fails_at, dies

    def measured(self, row: Row) -> dict[str, Any]:
        self.seen.append(row)
        failed = len(self.seen) == self.fails_at
        return {"error": "out of memory"} if failed else {"us": 10.0 + len(self.seen)}

    def is_alive(self) -> bool:
        return not self.dies


def keys(chosen: list[Row]) -> list[str]:
    return [json.dumps(row, sort_keys=True) for row in chosen]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The grid


@settings(max_examples=12)
@given(st.floats(0.002, 0.05), st.integers(0, 99))
def test_the_grid_is_reproducible_and_its_rows_are_distinct(scale: float, seed: int) -> None:
    once = rows(scale, seed=seed)
    assert once == rows(scale, seed=seed)
    assert len(set(keys(once))) == len(once)
    assert keys(once) != keys(rows(scale, seed=seed + 1))


def test_every_operator_has_as_many_rows_as_it_should() -> None:
    counts = Counter((row["op"], row["dtype"]) for row in rows(0.1))
    for key, count in COUNTS.items():
        operator, _, dtype = key.partition(":")
        assert counts[operator, dtype or "bf16"] == round(count * 0.1), key


def test_rows_of_one_operator_do_not_depend_on_the_others() -> None:
    alone = rows(0.05, frozenset({"sdpa_fwd"}))
    assert keys(alone) == keys([row for row in rows(0.05) if row["op"] == "sdpa_fwd"])


def test_a_run_that_stops_early_has_sampled_everything_in_proportion() -> None:
    everything = rows(0.2)
    begun, whole = (Counter(row["op"] for row in part) for part in (everything[: len(everything) // 4], everything))
    for operator, count in whole.items():
        assert begun[operator] == pytest.approx(count / 4, abs=1 + 2 * math.sqrt(count))


@settings(max_examples=8)
@given(st.integers(0, 999))
def test_every_row_is_affordable_and_can_be_priced(seed: int) -> None:
    for row in rows(0.02, seed=seed):
        operator = operator_of(row, "row")
        assert operator.flops < 2.5e13
        assert operator.bytes < 7e10, "or it does not fit into a GPU"


# Stopping and resuming


def test_a_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    grid, path = rows(0.004), tmp_path / "s.jsonl"
    first, second = FakeGpu(), FakeGpu()
    assert sample(grid[:20], path, timer=first) == Sampled(20, 0)
    assert sample(grid, path, timer=second) == Sampled(len(grid) - 20, 0)
    assert first.seen + second.seen == grid
    assert keys([{k: v for k, v in row.items() if k != "us"} for row in lines(path)[1:]]) == keys(grid)


@settings(max_examples=40)
@given(st.data())
def test_a_run_that_was_killed_while_writing_is_resumed(tmp_path: Path, data: st.DataObject) -> None:
    grid, path = rows(0.002), tmp_path / "s.jsonl"
    path.unlink(missing_ok=True)
    sample(grid, path, timer=FakeGpu())
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    path.write_bytes(whole[: data.draw(st.integers(header, len(whole)))])
    sample(grid, path, timer=FakeGpu())
    assert sorted(keys([{k: v for k, v in row.items() if k != "us"} for row in lines(path)[1:]])) == sorted(keys(grid))
    assert len(read_samples([path]).operators) == len(grid)


def test_no_time_left_is_nothing_measured(tmp_path: Path) -> None:
    grid, gpu = rows(0.002), FakeGpu()
    assert sample(grid, tmp_path / "s.jsonl", seconds=-1.0, timer=gpu) == Sampled(0, len(grid))
    assert gpu.seen == []


def test_what_cannot_be_measured_is_reported_and_not_tried_again(tmp_path: Path) -> None:
    grid, path = rows(0.002), tmp_path / "s.jsonl"
    assert sample(grid, path, timer=FakeGpu(fails_at=3)) == Sampled(len(grid), 0)
    assert lines(path)[3]["error"] == "out of memory"
    assert sample(grid, path, timer=FakeGpu()) == Sampled(0, 0)
    assert len(read_samples([path]).operators) == len(grid) - 1
    failed = [part for part in sample_answer(path, 0, 0)["operators"] if part["failed"]]
    assert [(part["op"], part["why"]) for part in failed] == [(grid[2]["op"], "out of memory")]


def test_a_gpu_that_fails_ends_the_run_and_the_next_one_resumes_after_that_row(tmp_path: Path) -> None:
    grid, path = rows(0.002), tmp_path / "s.jsonl"
    with pytest.raises(OptionError, match=r"failed at .*the same command again"):
        sample(grid, path, timer=FakeGpu(fails_at=3, dies=True))
    assert sample(grid, path, timer=FakeGpu()) == Sampled(len(grid) - 3, 0)


def test_samples_of_another_gpu_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    sample(rows(0.002), path, timer=FakeGpu("NVIDIA A100-SXM4-80GB"))
    before = path.read_bytes()
    with pytest.raises(InputError, match="holds samples of NVIDIA A100-SXM4-80GB, and this is NVIDIA H200"):
        sample(rows(0.004), path, timer=FakeGpu())
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello", b"hello\n", b'{"op": "gemm"}\n', b"[1]\n", b"\xff\xfe\n", b'{"a": 1}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"s\.jsonl.*name (a file|one) that `lumos sample` wrote"):
        sample(rows(0.002), path, timer=FakeGpu())
    assert path.read_bytes() == content


def test_progress_names_the_operator_at_work(tmp_path: Path) -> None:
    grid, told = rows(0.002), []
    sample(grid[:5], tmp_path / "s.jsonl", timer=FakeGpu())
    sample(grid, tmp_path / "s.jsonl", progress=lambda *args: told.append(args), timer=FakeGpu())
    assert told[0] == (6, len(grid), grid[5]["op"])
    assert told[-1] == (len(grid), len(grid), grid[-1]["op"])


# Options


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (SamplePlan(only=frozenset({"gem"})), "--only gem: not known; use some of .*gemm"),
        (SamplePlan(scale=0.0), "--scale 0: give a factor"),
        (SamplePlan(scale=math.nan), "--scale nan: give a factor"),
        (SamplePlan(seconds=math.nan), "--seconds nan: give a number"),
        (SamplePlan(seconds=-3), "--seconds -3: give a number"),
        (SamplePlan(only=frozenset({"p2p"}), gpus=1), "--only p2p: collectives need more than one GPU"),
    ],
)
def test_an_impossible_plan_is_refused(plan: SamplePlan, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        plan.checked()


def test_a_machine_of_one_gpu_is_sampled_without_collectives(tmp_path: Path) -> None:
    plan = SamplePlan(scale=0.002).checked()
    assert plan.collectives() == []
    assert sample_machine(plan, tmp_path / "s.jsonl", timer=FakeGpu()) == Sampled(len(plan.operators()), 0)


@without_torch
def test_without_torch_sampling_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lumos.cli.main", "sample", "-o", "s.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "pip install torch" in done.stderr
    assert list(tmp_path.iterdir()) == []


# Collectives


def test_collectives_are_sampled_from_1_kib_to_1_gib_on_every_power_of_two() -> None:
    assert (COLLECTIVE_BYTES[0], COLLECTIVE_BYTES[-1], len(COLLECTIVE_BYTES)) == (1 << 10, 1 << 30, 21)
    eight = collective_rows(8)
    assert {row["ranks"] for row in eight if row["op"] == "all_reduce"} == {2, 4, 8}
    assert {row["ranks"] for row in eight if row["op"] == "p2p"} == {2}
    assert {row["ranks"] for row in collective_rows(6)} == {2, 4, 6}
    assert collective_rows(1) == []
    assert len(set(keys(eight))) == len(eight) == 21 * (3 * 4 + 1)


def test_collectives_among_samples_are_not_fitted_as_operators(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    sample(rows(0.002), path, timer=FakeGpu())
    with path.open("a") as file:
        file.write(json.dumps({"op": "all_reduce", "bytes": 1024, "ranks": 2, "us": 9.0}) + "\n")
    assert len(read_samples([path]).operators) == len(rows(0.002))


@needs_torch
def test_two_processes_measure_collectives_together() -> None:
    from lumos.measure.time_collectives import measure_collectives

    chosen = collective_rows(2, sizes=(1 << 10, 1 << 16))
    answers = list(measure_collectives(chosen, backend="gloo"))
    assert [{k: v for k, v in row.items() if k != "us"} for row in answers] == chosen
    assert {row["op"] for row in answers} == set(COLLECTIVES)
    assert all(0 < row["us"] < 1e6 for row in answers)


@needs_torch
def test_collectives_that_fail_end_in_one_line() -> None:
    from lumos.measure.time_collectives import measure_collectives

    with pytest.raises(OptionError, match=r"of 2 ranks failed .*--no-collectives"):
        list(measure_collectives([{"op": "all_reduce", "bytes": -8, "ranks": 2}], backend="gloo"))


@needs_torch
def test_collectives_stop_when_the_time_is_up() -> None:
    from lumos.measure.time_collectives import measure_collectives

    assert list(measure_collectives(collective_rows(2), end=0.0, backend="gloo")) == []


# Operators


@needs_torch
@pytest.mark.usefixtures("fake_gpu_known")
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_of_the_grid_runs(operator: str) -> None:
    """On a CPU, with small sizes; a backward pass gives the gradients of its inputs."""
    import torch

    from lumos.measure.time_operators import prepare

    sizes = {"m": 32, "n": 48, "k": 64, "b": 2, "h": 4, "s": 16, "d": 8, "t": 32, "v": 100, "e": 2}
    shapes = {
        "sdpa_bwd": [(2, 4, 16, 8)] * 3, "softmax_bwd": [(2, 4, 16, 16)], "rotary_bwd": [(2, 16, 4, 8)],
        "rms_norm_bwd": [(32, 4), (4,)], "layer_norm_bwd": [(32, 4), (4,), (4,)], "gelu_bwd": [(32, 4)],
        "silu_bwd": [(32, 4)], "norm_eager_bwd": [(32, 4), (4,)], "cross_entropy_bwd": [(32, 100)],
        "embedding_bwd": [(100, 4)], "gemm": [(32, 48)], "bmm": [(8, 16, 16)], "grouped_gemm": [(32, 48)],
        "rotary_fwd": [(2, 4, 16, 8)], "embedding": [(32, 4)], "cross_entropy": [()], "sdpa_fwd": [(2, 4, 16, 8)],
        "softmax_fwd": [(2, 4, 16, 16)], "adamw_fused": [],
    }  # fmt: skip
    found = prepare(sizes | {"op": operator, "dtype": "bf16", "layout": "NT"}, "cpu")()
    tensors = found if isinstance(found, tuple) else (found,)
    given = [tuple(tensor.shape) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert given == shapes.get(operator, [(32, 4)])
