"""Fitting: a model file from samples of one machine, what it refuses, and whether a machine comes out as it was."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import lumos_here as lumos
from lumos.analysis.about import about_machine
from lumos.costs.energy import in_step_factors
from lumos.costs.hardware_model import hardware_model
from lumos.costs.model_costs import ModelCosts
from lumos.costs.operator_model import chip_of, roofline_us
from lumos.errors import InputError, OptionError
from lumos.measure.fit import fit, grow
from lumos.measure.fit_facts import described
from lumos.measure.fit_machine import FittedMachine, fit_machine
from lumos.measure.fit_samples import Sample, read_samples
from lumos.measure.operator_rows import SIZES, operator_of
from lumos.measure.sample_file import open_samples
from lumos.measure.sample_grid import rows as grid_rows
from lumos.setup.gpus import gpu_named
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_setup
from lumos.step.step import simulate_step
from support import PATIENCE_S

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'lumos-sim[fit]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
H200 = {"gpu": "NVIDIA H200", "torch": "2.11", "cuda": "13.0", "date": "2026-11-16"}
GELU = {"op": "gelu", "t": 64, "h": 64, "us": 3.0}
ROWS = [
    {"op": "gemm", "m": 4096, "n": 4096, "k": 4096},
    {"op": "rms_norm", "t": 4096, "h": 4096},
    {"op": "sdpa_fwd", "b": 1, "h": 16, "s": 4096, "d": 128},
]


def write(path: Path, values: list[Row]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def timed(
    names: dict[str, int],
    slower: float = 2.0,
    noise: float = 0.01,
    dtype: str = "bf16",
    gpu: str = "h200",
    seed: int = 0,
) -> Iterator[Row]:
    """Operators on a GPU that takes `slower` times the roofline and a microsecond."""
    draw = np.random.default_rng(seed)
    for name, count in names.items():
        for _ in range(count):
            row: Row = {"op": name, "dtype": dtype} | {size: int(draw.integers(4, 96)) * 64 for size in SIZES[name]}
            if name == "gemm":
                row["layout"] = ("TN", "NN", "NT")[draw.integers(3)]
            if "b" in row:
                row |= {"b": int(draw.integers(1, 5)), "h": int(draw.integers(1, 33)), "d": 64}
            bound = roofline_us(operator_of(row, "row"), chip_of(gpu_named(gpu), dtype))
            yield row | {"us": 1 + slower * bound * draw.lognormal(0, noise)}


def fitted(path: Path, rows: list[Row], *options: str) -> Any:
    write(path / "s.jsonl", rows)
    done = lumos("fit", "s.jsonl", "-o", "m.npz", "--json", *options, cwd=path)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


# ---------------------------------------------------------------------- operators
def test_what_was_sampled_is_fitted_and_priced(tmp_path: Path) -> None:
    """A GPU on which a product takes a microsecond and its roofline twice, noise apart: the model must say so."""
    rows = [H200, *timed({"gemm": 150, "gelu": 60, "silu": 10}), *timed({"add": 60}, noise=2.0)]
    answer = fitted(tmp_path, rows)
    families = {part["family"]: part for part in answer["families"]}
    assert (answer["gpu"], answer["model"]) == ("h200", "m.npz")
    assert families["silu"]["refused"] == "fewer than 16 samples"
    assert families["silu"]["error_pct"] is None
    assert "on held-out shapes" in families["add"]["refused"]
    assert max(families[name]["error_pct"] for name in ("gemm", "gelu")) < 10
    assert answer["warnings"] == ["refused; the shipped model is used for add, silu"]
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    priced = json.loads(lumos("cost", "rows.json", "--model", "m.npz", "--json", cwd=tmp_path).stdout)
    base = roofline_us(operator_of(ROWS[0], "row"), chip_of(gpu_named("h200"), "bf16"))
    assert priced["rows"][0]["us"] == pytest.approx(2 * base, rel=0.1)


def test_progress_of_a_fit_counts_its_work_and_begins_with_small_families() -> None:
    rows = timed({"gemm": 700, "gelu": 60, "silu": 10})
    samples = [Sample(operator_of(row, "row"), row["us"]) for row in rows]
    told: list[tuple[int, int, str]] = []
    fit(gpu_named("h200"), samples, lambda *what: told.append(what))
    done, totals, names = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert list(dict.fromkeys(names)) == ["silu", "gelu", "gemm"]
    (total,) = set(totals)
    assert 0 < done[-1] < total
    assert names.count("gelu") > 3, "also within a family"
    assert done[names.index("gemm")] < 0.3 * total, "the largest family is most of the work"


def test_trees_grow_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []

    def limited(count: int | None) -> Any:
        limits.append(count)
        return nullcontext()

    monkeypatch.setattr("threadpoolctl.threadpool_limits", limited)
    rows = np.random.default_rng(0).normal(size=(3000, 2))
    grow(rows, rows[:, 0], rounds=2)
    assert limits == [1], "threads wait for each other on a busy machine"


def test_a_model_file_says_where_it_comes_from_and_how_far_it_reaches(tmp_path: Path) -> None:
    fitted(tmp_path, [H200, *timed({"gelu": 60})])
    file = hardware_model(str(tmp_path / "m.npz")).file
    (sampled,) = file.header["provenance"]["samples"]
    assert (sampled["file"], sampled["rows"], sampled["gpu"], sampled["cuda"]) == ("s.jsonl", 60, "NVIDIA H200", "13.0")
    assert len(sampled["sha256"]) == 64
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()[1:]]
    assert file.header["regressors"]["gelu"]["least"] == [min(row[size] for row in rows) for size in "th"]
    assert file.header["regressors"]["gelu"]["most"] == [max(row[size] for row in rows) for size in "th"]


def test_a_finer_grid_is_said_to_buy_more_where_half_of_it_was_much_worse(tmp_path: Path) -> None:
    """Alignment decides a factor of three here, which takes many rows to learn."""
    draw, rows = np.random.default_rng(0), [H200]
    for row in timed({"gemm": 160}, noise=0.0):
        row["k"] = int(draw.integers(64, 6000))
        bound = roofline_us(operator_of(row, "row"), chip_of(gpu_named("h200"), "bf16"))
        rows.append(row | {"us": bound * (1 + 2 * (row["k"] % 8 != 0)) * (1 + np.log2(row["m"]) / 3)})
    answer = fitted(tmp_path, rows)
    (family,) = answer["families"]
    assert family["twice_pct"] < family["error_pct"]
    said = f"twice the rows would bring gemm from {family['error_pct']:.1f} to about {family['twice_pct']:.1f} %"
    assert answer["finer_grid"] == [said]


def test_more_rows_are_those_of_the_usual_grid_until_it_is_finished(tmp_path: Path) -> None:
    rows, path = [row for row in grid_rows() if row["op"] in ("gelu", "mul")], tmp_path / "s.jsonl"
    measured = [row | {"us": 5.0 + row["t"] * row["h"] / 1e6} for row in rows]
    assert fit_machine([write(path, [H200, *measured])]).more == "lumos sample --scale 2"
    failed = [row | {"error": "out of memory"} for row in rows[400:]]
    assert fit_machine([write(path, [H200, *measured[:400], *failed])]).more == "lumos sample --scale 2"
    some = fit_machine([write(path, [H200, *measured[:400]])]).more
    assert some == "the same lumos sample goes on (80 % of the usual grid are there)"


def test_samples_of_one_gpu_may_come_in_several_files(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [H200, *timed({"gelu": 30})])
    other = write(tmp_path / "b.jsonl", [{"gpu": "h200"}, *timed({"gelu": 30}, seed=1), *reduced()])
    machine = fit_machine([one, other])
    assert [(v.family, v.rows, v.refused) for v in machine.families] == [("gelu", 60, "")]
    assert section(machine, "network").values is not None
    assert [file["file"] for file in header(machine)["provenance"]["samples"]] == ["a.jsonl", "b.jsonl"]


def reduced() -> list[Row]:
    """All-reduces of eight GPUs at 200 GB/s, and 20 µs to start."""
    sizes = [1 << power for power in range(12, 31)]
    return [{"op": "all_reduce", "bytes": size, "ranks": 8, "us": 20 + 1.75 * size / 2e5} for size in sizes]


def test_collectives_alone_make_a_model_file(tmp_path: Path) -> None:
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *reduced()])])
    assert (machine.families, header(machine)["regressors"]) == ([], {})
    assert header(machine)["network"]["gpus_per_node"] == 8


def section(machine: FittedMachine, name: str) -> Any:
    return next(part for part in machine.sections if part.name == name)


def header(machine: FittedMachine) -> Any:
    with np.load(io.BytesIO(machine.content), allow_pickle=False) as file:
        return json.loads(bytes(file["header"]))


# ---------------------------------------------------------------------- what the GPU is
def test_a_known_gpu_has_the_facts_of_the_package(tmp_path: Path) -> None:
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *timed({"gelu": 60})])])
    assert (header(machine)["gpu"], header(machine)["facts"]) == ("h200", None)


def test_a_gpu_that_nobody_knows_is_what_its_samples_show(tmp_path: Path) -> None:
    """An H200 at 1.6 times its roofline, under another name."""
    about = {"gpu": "Abacus 9000", "torch": "2", "device": {"memory_gib": 100, "sms": 132, "power_limit_w": 650}}
    rows = list(timed({"gemm": 150, "copy": 60, "add": 40}, slower=1.6))
    machine = fit_machine([write(tmp_path / "s.jsonl", [about, *rows])])
    facts = header(machine)["facts"]
    known = gpu_named("h200")
    assert (facts["memory_gib"], facts["sms"], facts["tdp_w"], facts["family"]) == (100, 132, 650, "other")
    assert facts["peak_tflops"]["bf16"] == pytest.approx(known.peak("bf16") / 1.6, rel=0.2)
    assert facts["hbm_gb_s"] == pytest.approx(known.hbm_gb_s / 1.6, rel=0.2)
    assert facts["source"].startswith("measured")
    assert {"idle_w = 97.5", "inter_gb_s = 50", "l2_mb = 48", "gpus_per_node = 8"} <= set(facts["assumed"])
    (tmp_path / "m.npz").write_bytes(machine.content)
    run = {"layers": 4, "hidden": 2048, "ffn": 8192, "heads": 16, "vocab": 32000}
    cluster = {"model": str(tmp_path / "m.npz"), "gpus": 1}
    setup = Setup.model_validate({"model": run, "train": {"seq": 2048, "microbatches": 1}, "cluster": cluster})
    assert setup.cluster.accelerator.memory_gib == 100
    assert simulate_step(setup).us > 0


def test_links_that_were_not_sampled_are_stated_with_their_values(tmp_path: Path) -> None:
    """One GPU alone says nothing about links, nor how many GPUs its node has."""
    rows = [{"gpu": "Abacus 9000", "gpus_per_node": 1, "nodes": 1}, *timed({"gemm": 60, "copy": 40, "add": 20})]
    machine = fit_machine([write(tmp_path / "s.jsonl", rows)])
    assert section(machine, "network").note == (
        "not sampled: assumed: PCIe of 63 GB/s, no NVLink, nodes of 1, 50 GB/s between them; set cluster.nvlink_gb_s, "
        "nvlink_domain, gpus_per_node and inter_gb_s"
    )
    said = header(machine)["facts"]["assumed"]
    assert {"nvlink_gb_s = 0", "nvlink_domain = 1", "pcie_gb_s = 63", "gpus_per_node = 1 (as sampled)"} <= set(said)
    known = fit_machine([write(tmp_path / "s.jsonl", [H200, *timed({"gelu": 60})])])
    assert section(known, "network").note == (
        "not sampled: the usual links: NVLink of 450 GB/s, nodes of 8, 50 GB/s between them"
    )


def test_a_gpu_can_be_named_or_described_where_its_samples_do_not(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [{"gpu": "Abacus"}, *timed({"gelu": 60})])
    with pytest.raises(InputError, match=r"samples of 'Abacus', a GPU that is not known, with too few matmuls"):
        fit_machine([path])
    assert header(fit_machine([path], "h100"))["gpu"] == "h100"
    sheet = tmp_path / "my.toml"
    sheet.write_text('like = "h200"\nhbm_tb_s = 4.0\n')
    machine = fit_machine([path], str(sheet))
    assert header(machine)["facts"]["hbm_gb_s"] == 4000
    (tmp_path / "m.npz").write_bytes(machine.content)
    assert gpu_named(str(tmp_path / "m.npz")).hbm_gb_s == 4000


def test_samples_of_one_known_gpu_are_not_fitted_as_another(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [H200, *timed({"gelu": 60})])
    for other in ("a100", "cpu"):
        with pytest.raises(OptionError, match=rf"--gpu {other}: .*has samples of NVIDIA H200; leave --gpu out"):
            fit_machine([path], other)
    assert header(fit_machine([path], "H200-SXM"))["gpu"] == "h200"


# ---------------------------------------------------------------------- sections
DECODERS = [
    {"layers": n, "hidden": h, "ffn": 4 * h, "heads": h // 64, "seq": s, "micro_batch": b, "vocab": v, "dtype": "bf16"}
    for n, h, s, b, v in [
        (4, 1024, 2048, 2, 32000), (8, 2048, 1024, 4, 8000), (2, 4096, 2048, 1, 64000), (12, 768, 512, 16, 50304),
        (3, 3072, 4096, 1, 16000), (6, 1536, 1024, 8, 32000),
    ]
]  # fmt: skip


def described_us(row: Row, matrix: float, stream: float) -> float:
    """The step of a decoder on an H200 with these factors, decided by the GPU."""
    from dataclasses import replace

    setup = Setup.model_validate(
        {
            "model": {key: row[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")},
            "train": {"seq": row["seq"], "micro_batch": row["micro_batch"], "microbatches": 1},
            "cluster": {"gpu": "h200", "gpus": 1},
        }
    )
    factors = replace(in_step_factors(gpu_named("h200")), matrix=matrix, stream=stream)
    return simulate_step(setup, factors, make_costs=lambda m, n, f, _, c, *_speed: ModelCosts(m, n, f, 0.0, c)).us


def test_steps_that_take_longer_than_their_operators_give_factors(tmp_path: Path) -> None:
    """No operator is sampled: they are the shipped ones, and the sampled steps were made with them."""
    steps = [{"op": "step", **row, "us": described_us(row, 1.3, 0.8)} for row in DECODERS]
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *steps])])
    found = header(machine)["in_step"]
    assert found["matrix"] == pytest.approx(1.3, rel=0.02)
    assert found["stream"] == pytest.approx(0.8, rel=0.05)
    assert found["error_pct"] < 1


@pytest.mark.parametrize(
    ("factors", "words"),
    [([3.0] * 6, "beyond 0.5 to 2"), ([0.6, 1.6] * 3, "% off on steps that are left out"), ([1.0] * 2, "fewer than 4")],
)
def test_steps_that_make_no_sense_are_refused(tmp_path: Path, factors: list[float], words: str) -> None:
    steps = [
        {"op": "step", **row, "us": factor * described_us(row, 1.0, 1.0)}
        for row, factor in zip(DECODERS, factors, strict=False)
    ]
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *timed({"gelu": 60}), *steps])])
    assert words in section(machine, "in_step").refused
    assert header(machine)["in_step"] is None


def test_a_host_is_as_slow_as_its_launches(tmp_path: Path) -> None:
    tiny = {"layers": 8, "hidden": 64, "ffn": 128, "heads": 2, "seq": 16, "micro_batch": 1, "vocab": 64}

    def launch_us(slower: float) -> float:
        parts = {"forward": 4000.0, "backward": 5000.0, "optimizer": 500.0}
        rows = [{"op": "host", "what": w, "launches": 100, **tiny, "us": slower * us} for w, us in parts.items()]
        values: dict[str, float] = header(fit_machine([write(tmp_path / "s.jsonl", [H200, *rows])]))["host"]
        return values["launch_us"]

    assert 5 < launch_us(1.0) < 60
    assert launch_us(3.0) == pytest.approx(3 * launch_us(1.0), rel=1e-3)


def test_recording_costs_what_steps_say_with_and_without_it(tmp_path: Path) -> None:
    times = {
        "operator": 1.5, "call": 6.0, "kernel": 0.4, "step_fresh": 500.0, "step_recorded": 1000.0,
        "step_recorded_no_shapes": 800.0, "step_stopped": 600.0,
    }  # fmt: skip
    rows = [{"op": "profiler", "what": what, "us": us} for what, us in times.items()]
    found = header(fit_machine([write(tmp_path / "s.jsonl", [H200, *rows])]))["profiler"]
    shares = (found["kept_share"], found["no_shapes_kept_share"], found["fresh_kept_share"])
    assert shares == (0.6, 0.75, 0.5)
    assert (found["operator_us"], found["call_us"], found["kernel_gap_us"]) == (10.0, 6.0, 0.4)


def test_no_error_is_shown_of_the_profiler_which_none_was_measured_of(tmp_path: Path) -> None:
    times = {"step_fresh": 500.0, "step_recorded": 1000.0, "step_stopped": 600.0}
    rows = [{"op": "profiler", "what": what, "us": us} for what, us in times.items()]
    (tmp_path / "m.npz").write_bytes(fit_machine([write(tmp_path / "s.jsonl", [H200, *rows])]).content)
    (part,) = [part for part in about_machine(str(tmp_path / "m.npz")).parts if part.part == "profiler"]
    assert (part.measured, part.error_pct) == (True, None)


def test_about_a_cpu_says_nothing_of_watts_or_of_gpus(tmp_path: Path) -> None:
    machine = fit_machine([write(tmp_path / "s.jsonl", rows_in(1.0, CPU, "cpu", "fp32"))])
    (tmp_path / "m.npz").write_bytes(machine.content)
    done = lumos("about", "m.npz", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^CPU +m\.npz +0\.05\d* fp32 TFLOP/s, \d+ GB/s *$", done.stdout, re.M), done.stdout
    assert "none: the power of a CPU is not known" in done.stdout
    assert not re.search(r"\d W|GPU|typical|scaled by peaks", done.stdout)


def test_recording_may_cost_an_operator_nothing(tmp_path: Path) -> None:
    times = {"operator": 0.0, "step_fresh": 500.0, "step_recorded": 1000.0, "step_stopped": 600.0}
    rows = [{"op": "profiler", "what": what, "us": us} for what, us in times.items()]
    assert header(fit_machine([write(tmp_path / "s.jsonl", [H200, *rows])]))["profiler"]["kept_share"] == 0.6


def loops(scale: float = 1.0) -> list[Row]:
    """An H200 whose work costs `scale` times the shipped energies, at the highest clock throughout."""
    from lumos.costs.energy import joules_for

    known = joules_for(gpu_named("h200"))
    rows: list[Row] = [{"op": "power", "what": "idle", "watts": 100.0, "clock_mhz": 1980}]
    operators = [
        *({"operator": "gemm", "m": n, "n": n, "k": n, "layout": "TN", "dtype": "bf16"} for n in (1024, 2048, 4096)),
        *({"operator": "gemm", "m": n, "n": n, "k": n, "layout": "TN", "dtype": "fp32"} for n in (1024, 2048)),
        *({"operator": "copy", "t": t, "h": 4096, "dtype": "bf16"} for t in (256, 4096, 65536)),
        *({"operator": "sdpa_fwd", "b": 2, "h": 16, "s": s, "d": 128, "dtype": "bf16"} for s in (1024, 4096)),
    ]
    for row in operators:
        operator = operator_of({**row, "op": row["operator"]}, "loop")
        us = 3 * roofline_us(operator, chip_of(gpu_named("h200"), row["dtype"]))
        watts = 100 + scale * known.operator(operator, us) / (us * 1e-6)
        rows.append({"op": "power", "what": "a loop", **row, "us": us, "watts": watts, "clock_mhz": 1980})
    return rows


@pytest.mark.parametrize("scale", [0.7, 1.0, 1.4])
def test_loops_give_the_energy_of_what_ran_in_them(tmp_path: Path, scale: float) -> None:
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *loops(scale)])])
    found, shipped = header(machine)["power"], json.loads((ROOT / "src/lumos/data/energy.json").read_text())
    for key in ("memory_pj", "active_w"):
        assert found[key] == pytest.approx(scale * shipped[key], rel=0.1), key
    for dtype in ("bf16", "fp32"):
        assert found["flop_pj"][dtype] == pytest.approx(scale * shipped["flop_pj"][dtype], rel=0.1)
    assert found["flop_pj"]["fp8"] == pytest.approx(shipped["flop_pj"]["fp8"], rel=0.01), "not sampled: as shipped"
    assert "flop fp8" in section(machine, "power").note
    assert found["idle_w"] == 100


def test_power_without_idle_or_loops_is_refused(tmp_path: Path) -> None:
    rows = loops()
    without = fit_machine([write(tmp_path / "a.jsonl", [H200, GELU, *timed({"gelu": 60}), *rows[1:]])])
    assert section(without, "power").refused == "nothing says what the board draws idle"
    few = fit_machine([write(tmp_path / "b.jsonl", [H200, *timed({"gelu": 60}), *rows[:3]])])
    assert "fewer than 4 loops" in section(few, "power").refused


# ---------------------------------------------------------------------- mistakes
def rows_in(unit: float, about: Row, gpu: str = "h200", dtype: str = "bf16") -> list[Row]:
    times = timed({"gemm": 60, "copy": 40, "add": 20}, dtype=dtype, gpu=gpu)
    return [about, *(row | {"us": row["us"] * unit} for row in times)]


CPU = {"gpu": "cpu", "torch": "2", "host": "a CPU"}
MANY = list(timed({"gelu": 60}))
Content = Callable[[], str]


def text(*rows: Row) -> Content:
    return lambda: "".join(json.dumps(row) + "\n" for row in rows)


BAD: dict[str, tuple[Content, str]] = {
    "empty": (lambda: "", "empty"),
    "header alone": (text(H200), "no samples in it"),
    "one row": (text(H200, GELU), "nothing could be fitted (gelu: fewer than 16 samples)"),
    "all failed": (text(H200, {"op": "gelu", "t": 1, "h": 1, "error": "out of memory"}), "no samples in it"),
    "no header": (text(GELU), "s.jsonl:1: does not name the GPU"),
    "header of another kind": (text({"gpu": ["h200"]}, GELU), "s.jsonl:1: gpu = \"['h200']\" is no name of a GPU"),
    "a list": (lambda: "[]\n", "s.jsonl:1: not a row of samples"),
    "prose": (lambda: "hello\n", "s.jsonl:1: not JSON"),
    "deep": (lambda: '{"gpu": "h200"}\n' + "[" * 100_000 + "\n", "s.jsonl:2: not JSON"),
    "negative": (text(H200, GELU | {"us": -3.0}), "s.jsonl:2: us = -3.0 is no time"),
    "nan": (text(H200, GELU | {"us": float("nan")}), "s.jsonl:2: us = nan is no time"),
    "huge": (text(H200, GELU | {"us": 1e30}), "s.jsonl:2: us = 1e+30 is no time"),
    "true": (text(H200, GELU | {"us": True}), "s.jsonl:2: us = True is no time"),
    "nested": (text(H200, GELU | {"us": [[1]]}), "s.jsonl:2: us = [[1]] is no time"),
    "no size": (text(H200, {"op": "gelu", "t": 64, "us": 3.0}), "s.jsonl:2: h is missing"),
    "huge size": (text(H200, GELU | {"t": 1 << 60}), "s.jsonl:2: t = 1152921504606846976 is not a size"),
    "unknown": (text(H200, GELU | {"op": "gelou"}), "s.jsonl:2: op = \"gelou\" is not known"),
    "op of another kind": (text(H200, GELU | {"op": {"a": 1}}), "s.jsonl:2: op = "),
    "half a line": (lambda: '{"gpu": "h200"}\n{"op": "gelu", "t"', "no samples in it"),
    "two GPUs": (
        text(H200, *MANY, {"gpu": "NVIDIA A100-SXM4-80GB"}, *MANY),
        "s.jsonl:62: samples of NVIDIA A100-SXM4-80GB after those of NVIDIA H200; fit one GPU at a time",
    ),
    "milliseconds": (
        text(*rows_in(1e-3, H200)), "times as fast as at the rates of h200: us looks like milliseconds; multiply it by",
    ),
    "seconds": (text(*rows_in(1e-6, H200)), "us looks like seconds; multiply it by 1e6"),
    "nanoseconds": (text(*rows_in(1e3, H200)), "us looks like nanoseconds"),
    "milliseconds of an unknown GPU": (
        text(*rows_in(1e-3, {"gpu": "Abacus"})), "TFLOP/s, which no GPU does: us looks like milliseconds; multiply",
    ),
    "milliseconds of a CPU": (
        text(*rows_in(1e-3, CPU, "cpu", "fp32")), "which no CPU does: us looks like milliseconds; multiply it by 1,000",
    ),
    "seconds of a CPU": (text(*rows_in(1e-6, CPU, "cpu", "fp32")), "us looks like seconds"),
    "contradictions": (
        text(H200, *MANY, GELU, GELU | {"us": 400.0}),
        "s.jsonl:62 has 3 us for the same operator (1 of 1 rows",
    ),
    "a device of another kind": (
        text(CPU | {"device": {"sms": "many"}}, *rows_in(1.0, CPU, "cpu", "fp32")[1:]), "device.sms = 'many'",
    ),
    "watts": (text(H200, {"op": "power", "what": "idle", "watts": -5}), "s.jsonl:2: watts = -5 is no power"),
    "a step of other kinds": (
        text(H200, {"op": "step", "layers": [1], "us": 5.0}), "s.jsonl:2: layers = [1] is no measured value",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_samples_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    path = tmp_path / "s.jsonl"
    path.write_text(content())
    with pytest.raises(InputError) as refused:
        fit_machine([path])
    message = str(refused.value)
    assert words in message
    assert "\n" not in message
    assert message.startswith(str(path))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "xz": lzma.compress,
    "gz": gzip.compress,
    "two streams of xz": lambda content: lzma.compress(content[:99]) + b"\0" * 4 + lzma.compress(content[99:]),
    "two of gzip": lambda content: gzip.compress(content[:99]) + gzip.compress(content[99:]),
    "a mark of the byte order": lambda content: b"\xef\xbb\xbf" + content,
}


@pytest.mark.parametrize("packer", PACKERS)
def test_packed_samples_are_read_as_they_are(tmp_path: Path, packer: str) -> None:
    plain = write(tmp_path / "s.jsonl", [H200, *MANY])
    other = tmp_path / "s.jsonl.packed"
    other.write_bytes(PACKERS[packer](plain.read_bytes()))
    assert read_samples([other]).operators == read_samples([plain]).operators


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_packed_samples_that_are_cut_or_too_large_are_refused(
    tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lumos.measure.sample_file._MOST_BYTES", 1 << 20)
    path = tmp_path / "s.jsonl.packed"
    whole = pack(text(H200, *MANY)().encode())
    for content in (whole[: len(whole) // 2], whole[:20] + b"\xff" * 40 + whole[60:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"packed: cannot be decompressed, perhaps cut short; copy it again"):
            read_samples([path])
    path.write_bytes(pack(b" " * ((1 << 20) + 1)))
    with pytest.raises(InputError, match=r"packed: larger than 1 MiB once decompressed"):
        read_samples([path])


def test_nothing_is_appended_to_packed_samples(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(packed := gzip.compress(text(H200, *MANY)().encode()))
    with pytest.raises(InputError, match="not text"), open_samples(path, H200):
        pass
    assert path.read_bytes() == packed


@pytest.mark.parametrize("content", [b"\x00\xff" * 500, b"\x80\n", b"\x89PNG\r\n\x1a\n" * 9])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not text"):
        fit_machine([path])


def test_the_command_ends_in_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path / "s.jsonl", [H200, GELU])
    write(tmp_path / "a.jsonl", [{"gpu": "a100"}, GELU])
    before = sorted(tmp_path.iterdir())
    for arguments, words in (
        (("s.jsonl", "-o", "m.npz"), "nothing could be fitted"),
        (("s.jsonl", "a.jsonl", "-o", "m.npz"), "a.jsonl: samples of a100, and s.jsonl has those of NVIDIA H200"),
        (("s.jsonl", "-o", "m.json"), "-o m.json: the extension must name the format; use .npz"),
        (("s.jsonl", "-o", "m.npz", "--gpu", "h20o"), "GPU 'h20o' is not known"),
        (("none.jsonl", "-o", "m.npz"), "none.jsonl: cannot be read (No such file or directory)"),
    ):
        done = lumos("fit", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert words in done.stderr
        assert sorted(tmp_path.iterdir()) == before


def test_samples_and_model_files_are_not_taken_for_each_other(tmp_path: Path) -> None:
    fitted(tmp_path, [H200, *MANY])
    done = lumos("fit", "m.npz", "-o", "other.npz", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "m.npz: a model file, not samples" in done.stderr
    setup = tmp_path / "run.toml"
    setup.write_text('[model]\npreset = "llama2-7b"\n[train]\nseq = 4096\n[cluster]\ngpus = 8\n')
    (tmp_path / "s.npz").write_text((tmp_path / "s.jsonl").read_text())
    done = lumos("predict", "run.toml", "--model", "s.npz", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "s.npz: " in done.stderr
    assert "lumos fit" in done.stderr


def test_rows_faster_than_the_peak_are_left_out_and_named(tmp_path: Path) -> None:
    fast = {"op": "gemm", "m": 8192, "n": 8192, "k": 8192, "layout": "TN", "dtype": "bf16", "us": 300.0}
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *timed({"gemm": 60}), fast])])
    assert [verdict.rows for verdict in machine.families] == [60]
    example = "1 of 61, as gemm_tn 8192×8192×8192 in 300 us"
    assert machine.warnings == [f"rows left out because h200 cannot be so fast: {example}"]


def test_a_file_with_many_rows_that_are_too_fast_is_doubted(tmp_path: Path) -> None:
    rows = [row | {"us": row["us"] / 4 if i % 4 == 0 else row["us"]} for i, row in enumerate(timed({"gemm": 80}))]
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *rows])])
    assert "with so many, the rest is doubtful too: was it h200?" in " ".join(machine.warnings)


@pytest.mark.parametrize(("slower", "reached"), [(10, "10 %"), (4, "25 %"), (2, "")])
def test_matmuls_far_below_what_the_gpu_reaches_are_noted(tmp_path: Path, slower: float, reached: str) -> None:
    rows = [H200, *timed({"gemm": 60}, slower=slower)]
    warnings = fit_machine([write(tmp_path / "s.jsonl", rows)]).warnings
    said = [f"the best bf16 matmuls reach {reached} of the rates of h200, where 70 to 90 % are usual: was the GPU busy"]
    assert [warning.partition(", slowed down")[0] for warning in warnings] == (said if reached else [])


@pytest.mark.parametrize("extreme", [{"t": 1 << 39, "h": 1 << 39, "us": 0.001}, {"t": 1, "h": 1, "us": 9e8}])
def test_one_absurd_row_does_not_make_a_file_that_cannot_be_read(tmp_path: Path, extreme: Row) -> None:
    machine = fit_machine([write(tmp_path / "s.jsonl", [H200, *MANY, {"op": "gelu"} | extreme, *reduced()])])
    (tmp_path / "m.npz").write_bytes(machine.content)
    assert hardware_model(str(tmp_path / "m.npz")).operators(gpu_named("h200")).us(operator_of(GELU, "row")) > 0


def test_a_row_that_was_measured_often_counts_once_with_its_middle(tmp_path: Path) -> None:
    rows = [H200, *MANY, *(GELU | {"us": us} for us in (3.0, 4.0, 5.0))]
    found = {sample.operator: sample.us for sample in read_samples([write(tmp_path / "s.jsonl", rows)]).operators}
    assert len(found) == len(MANY) + 1
    assert found[operator_of(GELU, "row")] == 4.0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_changed_in_a_file_it_is_read_or_refused_in_words(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "s.jsonl"
    whole = bytearray(text(H200, *timed({"gemm": 3, "gelu": 3}), *loops()[:3], *reduced()[:3])().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=6))
    path.write_bytes(bytes(whole))
    with suppress(InputError):
        described(read_samples([path]), "", str(path))


def test_without_scikit_learn_fitting_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path / "s.jsonl", [{"gpu": "h200"}, GELU])
    code = "import sys; sys.modules['sklearn'] = None; sys.argv = ['lumos', 'fit', 's.jsonl', '-o', 'm.npz'];"
    command = [sys.executable, "-c", code + "from lumos.cli.main import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lumos: fitting needs scikit-learn: pip install 'lumos-sim[fit]'\n"


# ---------------------------------------------------------------------- this machine
SAMPLE = """
import json, sys
from collections import Counter
from pathlib import Path
from lumos.measure.operator_rows import operator_of
from lumos.measure.sample import device_timer, sample
from lumos.measure.sample_file import open_samples
from lumos.measure.sample_grid import rows, section_rows
from lumos.measure.time_steps import measured_step

def is_small(row):
    operator = operator_of(row, "row")
    return row["dtype"] == "fp32" and operator.flops < 4e7 and operator.bytes < 4e6

families, grid = Counter(), []
for row in filter(is_small, rows(2.0, only=frozenset(sys.argv[3].split(",")), device="cpu")):
    families[row["op"]] += 1
    if families[row["op"]] <= (48 if row["op"] == "gemm" else 18):
        grid.append(row)
timer = device_timer("cpu")
sample(grid, Path(sys.argv[1]), timer=timer)
with open_samples(Path(sys.argv[1]), timer.about) as file:
    for row in timer.section("host", section_rows("cpu", frozenset({"host"}))):
        file.add(row)
print(json.dumps(measured_step(json.loads(sys.argv[2]), "cpu", None)))
"""
FAMILIES = (
    "gemm", "sdpa_fwd", "sdpa_bwd", "norm_eager_fwd", "norm_eager_bwd", "rotary_fwd", "rotary_bwd", "silu", "silu_bwd",
    "mul", "copy", "cross_entropy", "cross_entropy_bwd", "embedding", "embedding_bwd", "adamw_fused",
)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch")
def test_a_cpu_is_sampled_fitted_and_its_training_step_predicted(tmp_path: Path) -> None:
    """The commands of docs/your_hardware.md, with a few seconds of sampling on one thread.

    How accurate that is depends on what else the cores do: the next test, and benchmarks/cpu_steps.py for whole models.
    """
    setup = read_setup(ROOT / "examples/small-cpu.toml")
    decoder = {key: getattr(setup.model, key) for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    decoder |= {"seq": setup.train.seq, "micro_batch": setup.train.micro_batch, "dtype": setup.train.precision}
    command = [sys.executable, "-c", SAMPLE, "cpu.jsonl", json.dumps(decoder), ",".join(FAMILIES)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # cores that tests share would make threads wait for each other
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=alone, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["us"] > 0
    assert fitted_step_ms(tmp_path) > 0


def test_the_training_step_of_a_recorded_cpu_is_predicted_from_its_samples(tmp_path: Path) -> None:
    """Samples and step that the test above recorded on a server."""
    recorded = Path(__file__).parent / "data/cpu"
    (tmp_path / "cpu.jsonl").write_bytes(lzma.decompress((recorded / "samples.jsonl.xz").read_bytes()))
    measured_ms = json.loads((recorded / "step.json").read_text())["us"] / 1e3
    assert fitted_step_ms(tmp_path) == pytest.approx(measured_ms, rel=0.4)


def fitted_step_ms(folder: Path) -> float:
    """The step that the commands of docs/your_hardware.md predict with the samples in a folder."""
    page = (ROOT / "docs/your_hardware.md").read_text()
    following = page.partition("lumos sample --device cpu -o cpu.jsonl\n")[2].splitlines()
    shutil.copytree(ROOT / "examples", folder / "examples")
    fitting, predicting = (lumos(*line.split()[1:], "--json", cwd=folder) for line in following[:2])
    assert (fitting.returncode, fitting.stderr, predicting.returncode, predicting.stderr) == (0, "", 0, "")
    families = {part["family"]: part["refused"] for part in json.loads(fitting.stdout)["families"]}
    assert families["gemm:fp32"] == families["sdpa_bwd:fp32"] == ""
    return float(json.loads(predicting.stdout)["step_ms"])


def test_a_file_that_was_cut_off_and_one_without_operators_are_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    rows = lzma.decompress((ROOT / "calibration/ten_minutes_h200.jsonl.xz").read_bytes()).decode().splitlines()
    path.write_text("\n".join([rows[0], *(row for row in rows[:60] if '"op": "host"' in row), rows[80][:20]]))
    told = fit_machine([path]).warnings
    assert told == [
        f"{path}: the last line is cut off, and left out",
        "no operators were sampled: predictions use those of the package",
    ]
