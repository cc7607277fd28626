"""Sampling: what is measured, on one device or many, and that a run can stop and resume anywhere. Needs no GPU."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import lumos_here
from lumos.described.layer import TransformerLayer
from lumos.errors import InputError, OptionError
from lumos.measure.fit_samples import read_samples
from lumos.measure.operator_rows import operator_of
from lumos.measure.sample import Sampled, SamplePlan, sample, sample_machine
from lumos.measure.sample_grid import (
    COLLECTIVES,
    SECTIONS,
    Layout,
    Row,
    collective_rows,
    grid_of,
    layouts,
    operators_of,
    rows,
    section_rows,
)
from lumos.measure.sample_script import MODULES, PlainProgress, main, parser, write_script
from lumos.measure.sample_summary import summary_of, text_of
from lumos.program.layout import RankLayout
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup
from support import PATIENCE_S

COUNTS = grid_of("cuda")["counts"]
OPERATORS = operators_of("cuda")
ROOT = Path(__file__).parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


class FakeGpu:
    """A GPU on which everything takes as long as its place in the order, and some things cannot be done."""

    def __init__(self, gpu: str = "NVIDIA H200", fails_at: int = -1, dies: bool = False) -> None:
        self.about = {"gpu": gpu, "torch": "none"}
        self.seen: list[Row] = []
        self.fails_at, self.dies = fails_at, dies

    def section(self, name: str, chosen: list[Row]) -> Iterator[Row]:
        self.seen += chosen
        yield from (row | {"us": 5.0} for row in chosen)

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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_operator_has_as_many_rows_as_it_should(device: str) -> None:
    counts = Counter((row["op"], row["dtype"]) for row in rows(0.1, device=device))
    expected: Counter[tuple[str, str]] = Counter()
    for key, count in grid_of(device)["counts"].items():
        name, _, dtype = key.partition(":")
        expected[name.partition("/")[0], dtype or "bf16"] += round(count * 0.1)
    assert counts == expected


def test_matmuls_of_the_output_layer_come_early_also_with_odd_vocabularies() -> None:
    """Or ten minutes of sampling know nothing of GPT-2's 50257 columns, which take several times as long."""
    early = rows()[:3000]
    odd = [row for row in early if row["op"] == "gemm" and any(row[size] % 8 and row[size] > 30000 for size in "mnk")]
    assert len(odd) >= 30
    assert {row["layout"] for row in odd} == {"TN", "NN", "NT"}


def test_rows_of_one_operator_do_not_depend_on_the_others() -> None:
    alone = rows(0.05, frozenset({"sdpa_fwd"}))
    assert keys(alone) == keys([row for row in rows(0.05) if row["op"] == "sdpa_fwd"])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_run_that_stops_early_has_sampled_everything_and_more_of_the_families_with_few_rows(device: str) -> None:
    everything = rows(0.2, device=device)
    part = everything[: len(everything) // 4]
    begun, whole = (Counter((row["op"], row["dtype"]) for row in chosen) for chosen in (part, everything))
    most = max(whole, key=lambda key: whole[key])
    share = begun[most] / whole[most]
    assert 0.1 < share < 0.25
    for key, count in whole.items():
        if key != most:
            assert begun[key] == pytest.approx(count * share / 0.6, abs=1 + 2 * math.sqrt(count))


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
    failed = [part for part in summary_of(path, Sampled(0, 0), SamplePlan())["operators"] if part["failed"]]
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
        (SamplePlan(only=frozenset({"gem"})), "--only gem: not known; use some of .*gemm.*power"),
        (SamplePlan(scale=0.0), "--scale 0: give a factor"),
        (SamplePlan(scale=math.nan), "--scale nan: give a factor"),
        (SamplePlan(seconds=math.nan), "--seconds nan: give a number"),
        (SamplePlan(seconds=-3), "--seconds -3: give a number"),
        (SamplePlan(only=frozenset({"p2p"})), "--only p2p: collectives need more than one GPU"),
        (SamplePlan(only=frozenset({"power"}), device="cpu"), "--only power: cannot be measured on a CPU"),
    ],
)
def test_an_impossible_plan_is_refused(plan: SamplePlan, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        plan.checked().checked_for_ranks()


def test_a_machine_of_one_gpu_is_sampled_without_collectives(tmp_path: Path) -> None:
    plan, gpu = SamplePlan(scale=0.002).checked(), FakeGpu()
    assert plan.collectives() == []
    assert sample_machine(plan, tmp_path / "s.jsonl", timer=gpu) == Sampled(len(plan.everything()), 0)
    assert gpu.seen == [*plan.sections(), *plan.operators()]


def test_sections_that_had_no_time_before_the_operators_come_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(FakeGpu):
        def section(self, name: str, chosen: list[Row]) -> Iterator[Row]:
            now[0] += 0.2
            yield from super().section(name, chosen)

    plan, gpu = SamplePlan(scale=0.0001, only=frozenset({"host", "profiler", "add"}), seconds=0.3), Slow()
    assert sample_machine(plan, tmp_path / "s.jsonl", timer=gpu) == Sampled(len(plan.everything()), 0)
    assert [row["op"] for row in gpu.seen] == [*["host"] * 3, "add", *["profiler"] * 7]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_section_has_rows_that_can_be_told_apart(device: str) -> None:
    found = section_rows(device)
    named = {row["op"] for row in found}
    assert named == set(SECTIONS) - ({"power"} if device == "cpu" else set())
    assert len(set(keys(found))) == len(found)
    assert 8 <= len([row for row in found if row["op"] == "step"]) <= 12


def test_a_full_disk_ends_in_one_line_and_the_next_run_resumes(tmp_path: Path) -> None:
    grid, path = rows(0.002), tmp_path / "s.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OptionError, match=r"s\.jsonl: cannot be written \(.*\); make room for it"):
            sample(grid, path, timer=FakeGpu())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 1000
    sample(grid, path, timer=FakeGpu())
    assert len(read_samples([path]).operators) == len(grid)


def test_samples_of_another_cpu_are_not_mixed_in(tmp_path: Path) -> None:
    path, here = tmp_path / "s.jsonl", FakeGpu("cpu")
    here.about["host"] = "one CPU"
    sample(rows(0.002), path, timer=here)
    here.about["host"] = "another CPU"
    with pytest.raises(InputError, match=r"holds samples of cpu \(one CPU\), and this is cpu \(another CPU\)"):
        sample(rows(0.004), path, timer=here)


def test_samples_of_one_thread_and_of_two_are_not_mixed(tmp_path: Path) -> None:
    one, two, here = tmp_path / "one.jsonl", tmp_path / "two.jsonl", FakeGpu("cpu")
    here.about |= {"host": "a CPU", "device": {"sms": 1}}
    sample(rows(0.002), one, timer=here)
    before = one.read_bytes()
    here.about |= {"device": {"sms": 2}}
    said = r"holds samples of cpu \(a CPU, OMP_NUM_THREADS=1\), and this is cpu \(a CPU, OMP_NUM_THREADS=2\)"
    with pytest.raises(InputError, match=said):
        sample(rows(0.004), one, timer=here)
    assert one.read_bytes() == before
    sample(rows(0.002), two, timer=here)
    with pytest.raises(InputError, match=r"two\.jsonl: samples of a CPU with 2 threads, and .* has those of 1"):
        read_samples([one, two])


# The answer


def test_the_answer_says_what_is_left_what_it_would_buy_and_what_is_missing(tmp_path: Path) -> None:
    plan, path = SamplePlan(), tmp_path / "s.jsonl"
    grid = plan.operators()
    tenth = grid[: len(grid) // 10]
    sample(tenth, path, timer=FakeGpu())
    answer = summary_of(path, Sampled(len(tenth), len(plan.everything()) - len(tenth), 600.0), plan)
    notes = "\n".join(answer["notes"])
    assert f"{answer['left']:,} rows left, about 10 min" in notes
    assert "10.0 % of the usual grid" in notes
    assert "matmuls 5.5 %" in notes, "as measured at a tenth of the grid"
    assert "all of it matmuls 4.1 %" in notes
    assert "no collectives: they need several GPUs" in notes
    assert "nothing measured of power" in notes
    assert f"lumos fit {path} -o" in notes
    gemm = next(part for part in answer["operators"] if part["op"] == "gemm")
    assert gemm["rows"] < gemm["grid"] == sum(c for key, c in COUNTS.items() if key.startswith("gemm"))
    assert "gemm" in text_of(answer)


# One file for machines that have torch alone


def test_the_file_holds_every_module_that_its_modules_import() -> None:
    held = {f"lumos.{name.replace('/', '.')}".removesuffix(".__init__") for name in MODULES}
    for name in MODULES:
        source = (ROOT / f"src/lumos/{name}.py").read_text()
        tree = ast.parse(source, feature_version=(3, 10))
        for node in ast.walk(tree):
            if name != "__init__" and isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lumos"):
                assert node.module in held, name
    assert "tomllib" not in {name.split(".")[0] for name in held}


LONELY = """
import runpy, sys

class NothingElse:
    \"\"\"No package of Lumos but those in the file, and none of what Lumos depends on.\"\"\"
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"orjson", "msgspec", "pydantic", "typer", "polars", "numba"}:
            raise ModuleNotFoundError(f"{name} must not be needed")

sys.meta_path.insert(0, NothingElse())
sys.path = [place for place in sys.path if not place.endswith("/src")]
script, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
finally:
    strange = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "lumos" and script not in m.__file__]
    print("strange:", strange, file=sys.stderr)
"""


def lonely(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The sampler as one file, where Lumos is not installed."""
    write_script(tmp_path / "sample.pyz")
    command = [sys.executable, "-I", "-c", LONELY, str(tmp_path / "sample.pyz"), *arguments]
    plain = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=plain, check=False)


@needs_torch
def test_one_file_samples_where_nothing_but_torch_is_installed(tmp_path: Path) -> None:
    done = lonely(tmp_path, "-o", "s.jsonl", "--only", "add,host,profiler", "--scale", "0.02")
    assert (done.returncode, "strange: []" in done.stderr) == (0, True), done.stderr
    assert "torch sees no GPU here: the CPU is sampled" in done.stderr
    assert "profiler" in done.stdout
    header, *found = lines(tmp_path / "s.jsonl")
    assert header["gpu"] == "cpu"
    assert header["host"]
    assert header["device"]["sms"] >= 1
    assert Counter(row["op"] for row in found) == {"host": 3, "profiler": 5, "add": 2}
    times = {row["what"]: row["us"] for row in found if row["op"] == "profiler"}
    assert times["step_fresh"] > 0
    assert all(row["us"] > 0 for row in found if row["op"] != "profiler")


@needs_torch
def test_mistakes_in_the_options_of_the_one_file_end_in_one_line(tmp_path: Path) -> None:
    done = lonely(tmp_path, "-o", "nowhere/s.jsonl")
    told = [line for line in done.stderr.splitlines() if not line.startswith("strange")]
    assert (done.returncode, len(told)) == (2, 1)
    assert told[0].startswith("lumos: -o nowhere/s.jsonl: the folder nowhere does not exist")
    assert [path.name for path in tmp_path.iterdir()] == ["sample.pyz"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "s.jsonl", "--seconds", "abc"], "argument --seconds: invalid float value: 'abc'"),
        ([], "the following arguments are required: -o/--output"),
        (["-o", "s.jsonl", "--sekunds", "3"], "unrecognized arguments: --sekunds 3"),
    ],
)
def test_an_option_of_the_one_file_that_is_none_ends_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"lumos: {words}; --help lists the options\n"


def test_both_front_ends_have_the_same_options() -> None:
    from lumos.cli.main import COMMANDS

    typed = COMMANDS["sample"].load("sample")
    of_lumos = {name for option in typed.params for name in (*option.opts, *option.secondary_opts)}
    of_file = {name for action in parser()._actions for name in action.option_strings}
    assert of_lumos - of_file == {"--script"}
    assert of_file - of_lumos <= {"-h", "--help"}


def test_a_script_cannot_be_written_over_samples(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"s\.jsonl: the extension must name the format; use \.pyz"):
        write_script(tmp_path / "s.jsonl")


def test_mistakes_about_the_script_name_its_option(tmp_path: Path) -> None:
    for arguments, words in (
        (("out/s.pyz",), "--script out/s.pyz: the folder out does not exist"),
        (("s.txt",), "--script s.txt: the extension must name the format; use .pyz"),
        (("s.pyz", "--only", "gemm"), "--script s.pyz: writes the sampler and measures nothing; leave"),
        (("s.pyz", "--seconds", "9"), "--script s.pyz: writes the sampler and measures nothing"),
        (("s.pyz", "-o", "s.jsonl"), "--script s.pyz: writes the sampler and measures nothing"),
    ):
        done = lumos_here("sample", "--script", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert words in done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("front_end", ["lumos sample", "sample.pyz"])
def test_an_interrupted_run_says_how_much_there_is_and_how_to_go_on(
    tmp_path: Path, front_end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(plan: SamplePlan, output: Path, *_: object) -> None:
        sample(rows(0.002)[:7], output, timer=FakeGpu())
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lumos.measure.sample_script.sample_as_told", stop)
    monkeypatch.setattr("lumos.cli.sample_command.sample_as_told", stop)
    if front_end == "sample.pyz":
        code, told = main(["-o", "s.jsonl"]), capsys.readouterr().err
    else:
        done = lumos_here("sample", "-o", "s.jsonl")
        code, told = done.returncode, done.stderr
    assert (code, told) == (130, "lumos: interrupted; 7 rows in s.jsonl: the same command resumes\n")


def test_the_time_left_is_told_once_a_resumed_run_has_a_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tell = PlainProgress(math.inf)
    tell(501, 1000, "add")
    now[0] += 10
    tell(511, 1000, "add")
    assert capsys.readouterr().err == "add: 501 of 1,000\nadd: 511 of 1,000, 8 min left\n"


def test_without_torch_sampling_says_so_in_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from lumos.cli.main import main; main()"  # as if not installed
    command = [sys.executable, "-c", code, "sample", "-o", "s.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "pip install torch" in done.stderr
    assert list(tmp_path.iterdir()) == []


# Collectives


def test_collectives_are_sampled_from_1_kib_to_1_gib_on_every_power_of_two() -> None:
    eight = collective_rows(8)
    assert {row["bytes"] for row in eight} == {1 << power for power in range(10, 31)}
    assert {row["ranks"] for row in eight if row["op"] == "all_reduce"} == {2, 4, 8}
    assert {row["ranks"] for row in eight if row["op"] == "p2p"} == {2}
    assert {row["ranks"] for row in collective_rows(6)} == {2, 4, 6}
    assert collective_rows(1) == []
    assert len(set(keys(eight))) == len(eight) == 21 * (5 * 4 + 2)


def test_half_of_the_collectives_have_all_layouts() -> None:
    everything = collective_rows(8, nodes=4)
    half = everything[: math.ceil(len(everything) * 11 / 21)]
    assert {(r["ranks"], r.get("nodes"), r.get("groups")) for r in half} == {
        (r["ranks"], r.get("nodes"), r.get("groups")) for r in everything
    }


def test_groups_are_inside_nodes_across_them_and_of_whole_nodes_alone_and_all_at_once() -> None:
    found = layouts(nodes=2, per_node=4)
    assert found == [
        Layout(2, 1, 1), Layout(2, 1, 4), Layout(4, 1, 1), Layout(4, 1, 2),  # inside a node
        Layout(2, 2, 1), Layout(2, 2, 4),  # one GPU of each node
        Layout(8, 2, 1),  # whole nodes
    ]  # fmt: skip
    assert Layout(2, 1, 4).members(2, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Layout(2, 2, 4).members(2, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert Layout(2, 2, 1).members(2, 4) == [[0, 4]]
    assert Layout(8, 2, 1).members(2, 4) == [list(range(8))]


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9))
def test_groups_of_a_layout_are_disjoint_and_as_many_as_it_says(nodes: int, per_node: int) -> None:
    for layout in layouts(nodes, per_node):
        groups = layout.members(nodes, per_node)
        ranks = [rank for group in groups for rank in group]
        assert len(groups) == layout.groups
        assert len(set(ranks)) == len(ranks)
        assert all(len(group) == layout.ranks for group in groups)
        assert all(len({rank // per_node for rank in group}) == layout.nodes for group in groups)
        assert max(ranks) < nodes * per_node


def test_collectives_among_samples_are_not_fitted_as_operators(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    sample(rows(0.002), path, timer=FakeGpu())
    with path.open("a") as file:
        file.write(json.dumps({"op": "all_reduce", "bytes": 1024, "ranks": 2, "us": 9.0}) + "\n")
    assert len(read_samples([path]).operators) == len(rows(0.002))


# Several ranks


@needs_torch
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}, None),
        ({"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}, (5, 16, 1, "a", 0)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, None),  # the script of sbatch itself, not a task of srun
        (
            {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1234",
             "SLURM_STEP_NODELIST": "gpu[003-005,9],login1"},
            (9, 16, 1, "gpu003", 29400 + 234),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1",
             "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node7", "MASTER_PORT": "4000"},
            (1, 2, 1, "node7", 4000),
        ),
    ],
)  # fmt: skip
def test_a_rank_finds_its_place_by_what_torchrun_and_slurm_say(
    environ: dict[str, str], expected: tuple[Any, ...] | None
) -> None:
    from lumos.measure.ranks import world_of

    assert world_of(environ) == expected


@needs_torch
def test_a_rank_without_a_meeting_place_is_refused() -> None:
    from lumos.measure.ranks import world_of

    with pytest.raises(OptionError, match="MASTER_ADDR is not: start all ranks with torchrun or srun"):
        world_of({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(OptionError, match="RANK=x: not a number"):
        world_of({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def start_rank(tmp_path: Path, own: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lumos.cli.main", "sample", "-o", "s.jsonl", "--device", "cpu", *arguments]
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"} | own
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=environ, text=True, stdout=pipe, stderr=pipe)


@needs_torch
def test_four_tasks_of_slurm_on_two_nodes_measure_every_layout_together(tmp_path: Path) -> None:
    common = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "1"}
    common |= {"MASTER_PORT": free_port()}
    ranks = [
        start_rank(
            tmp_path,
            common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURMD_NODENAME": f"n{rank // 2}"},
            "--only", "p2p,add", "--scale", "0.02",
        )
        for rank in range(4)
    ]  # fmt: skip
    said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert [out for out, _ in said[1:]] == [""] * 3, "only rank 0 talks"
    header, *found = lines(tmp_path / "s.jsonl")
    assert (header["gpus_per_node"], header["nodes"]) == (2, 2)
    expected = collective_rows(2, nodes=2, only=frozenset({"p2p"}), device="cpu")
    assert keys([{k: v for k, v in row.items() if k != "us"} for row in found if row["op"] == "p2p"]) == keys(expected)
    assert {(row.get("nodes", 1), row.get("groups", 1)) for row in expected} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert all(0 < row["us"] < 1e7 for row in found)
    assert sum(row["op"] == "add" for row in found) == 2


@needs_torch
def test_a_rank_that_dies_ends_all_with_one_line(tmp_path: Path) -> None:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    first, second = (
        start_rank(tmp_path, common | {"RANK": rank, "LOCAL_RANK": rank}, "--only", "all_reduce,all_to_all")
        for rank in "01"
    )
    path, end = tmp_path / "s.jsonl", time.monotonic() + PATIENCE_S
    while time.monotonic() < end and not (path.exists() and len(path.read_text().splitlines()) > 2):
        time.sleep(0.005)
    second.send_signal(signal.SIGKILL)
    out, said = first.communicate(timeout=PATIENCE_S)
    second.communicate()
    assert (first.returncode, out) == (2, "")
    told = [line for line in said.splitlines() if line.startswith("lumos:")]
    assert len(told) == 1, said
    assert re.match(r"lumos: another rank is gone \([\w :.]+\); the same command resumes$", told[0]), told[0]
    assert "Traceback" not in said


@needs_torch
def test_processes_for_the_other_gpus_of_a_machine_end_when_the_work_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lumos.measure.ranks import Peers, Team
    from lumos.measure.sample import follow
    from lumos.measure.time_operators import Stopwatch

    peers = Peers(2, "cpu", follow)
    team = Team(peers.world, "cpu")
    plan = SamplePlan(only=frozenset(COLLECTIVES), device="cpu", gpus_per_node=2, seconds=20.0)
    timer = Stopwatch("cpu")
    team.gathered(timer.about["gpu"])
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))  # a second passes whenever it is read
    done = sample_machine(plan, tmp_path / "s.jsonl", timer=timer, team=team)  # type: ignore[arg-type]
    team.shared(None)
    team.leave()
    peers.end()
    assert done.measured > 5
    assert done.left > 0
    assert done.measured + done.left == len(plan.collectives())
    assert {row["op"] for row in lines(tmp_path / "s.jsonl")[1:]} <= set(COLLECTIVES)
    assert all(process.exitcode == 0 for process in peers._processes)


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


# Hosts, whole steps, power, profiler


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 2, "seq": 8, "micro_batch": 1, "vocab": 64, "dtype": "fp32"}


@needs_torch
@pytest.mark.usefixtures("one_thread")
def test_launches_of_the_sampled_decoder_are_those_of_a_description() -> None:
    """Or `lumos fit` would divide the host's time by another number than a prediction multiplies by."""
    from lumos.measure.time_steps import measured_host

    def host(layers: int) -> dict[str, Row]:
        chosen = [{"what": what} | SMALL | {"layers": layers} for what in ("forward", "backward")]
        return {row["what"]: row for row in measured_host(chosen, "cpu")}

    found, more = host(2), host(3)
    a_layer = {what: more[what]["launches"] - found[what]["launches"] for what in found}
    model = {"layers": 2, "hidden": 4096, "ffn": 11008, "heads": 32, "vocab": 32000}
    train = {"seq": 2048, "micro_batch": 1}
    setup = Setup.model_validate({"model": model, "train": train, "cluster": {"gpu": "h200", "gpus": 1}})
    layer = TransformerLayer(RankLayout(setup, framework_named("pytorch")))
    described = {name: sum(op.launches for op in getattr(layer, name)()) for name in ("forward", "backward")}
    for what in found:
        assert a_layer[what] == pytest.approx(described[what], rel=0.25), (a_layer, described)
        assert found[what]["us"] > found[what]["launches"]


@needs_torch
@pytest.mark.usefixtures("one_thread")
def test_every_layer_lengthens_a_step_by_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances by a millisecond for each operator."""
    from lumos.measure import time_steps

    row = {"op": "step"} | SMALL | {"seq": 64, "hidden": 64}
    with time_steps._Counter() as counter:
        monkeypatch.setattr(time_steps, "cpu_clock", lambda: lambda: counter.count / 1e3)
        one, two, four = (time_steps.measured_step(row | {"layers": count}, "cpu", None)["us"] for count in (1, 2, 4))
    assert 0 < one < two
    assert four == pytest.approx(one + 3 * (two - one), rel=1e-9)


@needs_torch
def test_a_step_that_does_not_fit_is_an_error_and_ends_nothing() -> None:
    from lumos.measure.time_steps import measured_step

    assert measured_step({"op": "step"} | SMALL | {"vocab": 1 << 50}, "cpu", None)["error"]


class FakeBoard:
    """A board that draws 300 W, and whose counter moves every 50 ms as real ones do; reading it takes 4 ms."""

    def __init__(self, counts: bool) -> None:
        self.now, self.reads, self.counts = 0.0, 0, counts

    def joules(self) -> float | None:
        self._read()
        return 300.0 * 0.05 * (self.now // 0.05) if self.counts else None

    def watts(self) -> float:
        self._read()
        return 300.0

    def _read(self) -> None:
        self.now += 0.004
        self.reads += 1

    def clock_mhz(self) -> float:
        return 1500.0


@needs_torch
@pytest.mark.parametrize("counts", [True, False])
def test_power_is_taken_between_movements_of_the_counter(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from lumos.measure import time_power

    board = FakeBoard(counts)
    monkeypatch.setattr(time_power.Board, "of_this_gpu", lambda: board)
    monkeypatch.setattr(time_power.time, "perf_counter", lambda: board.now)
    meter = time_power.Wattmeter()
    with meter.reading():
        while board.reads < 180:
            time.sleep(0.001)
    assert meter.answer()["watts"] == pytest.approx(300.0, rel=0.05)
    assert meter.answer()["clock_mhz"] == 1500


@needs_torch
def test_a_machine_that_does_not_tell_its_power_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumos.measure import time_power

    monkeypatch.setattr(time_power.Board, "of_this_gpu", lambda: None)
    monkeypatch.setenv("PATH", "")
    found = time_power.measured_power({"what": "idle"}, time_power.Wattmeter())
    assert found == {"error": "neither NVML nor nvidia-smi tells the power of this GPU"}
