"""One run on several GPUs: each as it is alone, side by side, with what bounds it there."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lumos
from lumos.analysis.answers import GpuAnswer, GpuComparisonAnswer
from lumos.cli import main as cli
from lumos.costs.hardware_model import encode
from lumos.costs.operator_model import cost_model
from lumos.errors import OptionError
from lumos.prediction.bill import Tariff
from lumos.prediction.gpu_comparison import bound_ms, compare_gpus
from lumos.prediction.prediction import predict
from lumos.report.gpu_comparisons import time_table
from lumos.report.html.gpu_page import gpu_page
from lumos.report.html.page import render
from lumos.search.search import search
from lumos.search.shards import merged_search
from lumos.setup import Setup, read_setup

ROOT = Path(__file__).parents[1]
TRUTH = ROOT.parent / "shared/data/truth"
SMALL = ROOT / "examples/one-h200.toml"
LARGE = ROOT / "examples/llama3-70b.toml"
TRACE = ROOT / "tests/data/capture/fake_world"


@pytest.fixture
def small() -> Setup:
    return read_setup(SMALL)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line, without a process of its own: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lumos", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


Run = Callable[..., tuple[int, str, str]]


def answer_of(run: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


def sheet(folder: Path, text: str, name: str = "my_gpu.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# ---------------------------------------------------------------------- each GPU as it is alone
def test_every_gpu_is_as_predicted_alone_in_the_order_asked_for(run: Run) -> None:
    names = ["b200", "a100", "h200"]
    both = answer_of(run, "predict", LARGE, "--gpu", ",".join(names))
    assert [row["gpu"] for row in both["gpus"]] == names
    for name, row in zip(names, both["gpus"], strict=True):
        alone = answer_of(run, "predict", LARGE, "--gpu", name)
        assert row["step_ms"] == alone["step_ms"]
        assert row["interval_ms"] == alone["interval_ms"]
        assert row["mfu"] == alone["mfu"]
        assert row["energy_j"] == alone["energy_j"]
        assert row["peak_gib"] == alone["memory_gib"]["peak"]
        assert row["warnings"] == alone["warnings"]


def test_python_and_the_command_line_say_the_same(run: Run) -> None:
    found = lumos.compare_gpus(read_setup(LARGE), ["h100", "H100-SXM5", "b200"]).as_dict()
    assert json.loads(json.dumps(found)) == answer_of(run, "predict", LARGE, "--gpu", "h100,b200")


def test_ratios_are_to_the_first_gpu(small: Setup) -> None:
    first, second = compare_gpus(small, ["a100", "h200"]).answer.gpus
    assert first.speedup == 1
    assert first.step_ms is not None
    assert second.step_ms is not None
    assert second.speedup == pytest.approx(first.step_ms / second.step_ms)


@pytest.mark.parametrize("changes", [
    {}, {"train.micro_batch": 16, "train.global_batch": 16},
    {"cluster.gpus": 8, "parallel.zero": 3, "train.global_batch": 16},
    {"cluster.gpus": 8, "parallel.pp": 4, "train.global_batch": 32, "train.micro_batch": 1},
    {"cluster.gpus": 8, "parallel.tp": 8},
])  # fmt: skip
def test_what_bounds_a_step_adds_up_to_it(small: Setup, changes: dict[str, Any]) -> None:
    found = predict(small.replaced(changes))
    parts = bound_ms(found)
    assert sum(parts.values()) == pytest.approx(found.step_ms, rel=1e-6)
    assert min(parts.values()) >= 0
    assert (parts["network"] > 0) == (found.breakdown.exposed_comm_ms > 0)
    assert (parts["bubble"] > 0) == (found.setup is not None and found.setup.parallel.pp > 1)


def test_a_step_that_a_fast_gpu_cannot_shorten_is_bound_by_its_host(small: Setup) -> None:
    slow, fast = compare_gpus(small, ["a100", "b200"]).answer.gpus
    assert slow.bound_by == "compute"
    assert slow.bound_ms["host"] == pytest.approx(0, abs=0.01)
    assert fast.bound_ms["host"] > 0.3 * (fast.step_ms or 0)
    assert any("host decides" in text for text in fast.warnings)


def test_shares_of_operators_add_up_and_come_largest_first(small: Setup) -> None:
    (row,) = compare_gpus(small, ["h200"]).answer.gpus
    shares = list(row.operators.values())
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert next(iter(row.operators)) == "matmuls"


def test_it_says_whose_samples_the_times_are(small: Setup) -> None:
    rows = compare_gpus(small, ["h200", "b200", "a100"]).answer.gpus
    assert [row.costs_from for row in rows] == ["samples of h200", "samples of h200, scaled", "samples of a100"]


# ---------------------------------------------------------------------- refused, too large, unknown
def test_a_gpu_without_the_precision_stays_in_the_table_with_the_reason(run: Run) -> None:
    arguments = ("predict", SMALL, "--gpu", "a100,h200", "--set", "train.precision=fp8")
    refused, other = answer_of(run, *arguments)["gpus"]
    assert refused["step_ms"] is None
    assert '"fp8" is not supported by cluster.gpu = "a100"' in refused["refused"]
    assert "\n" not in refused["refused"]
    assert other["refused"] is None
    assert other["step_ms"] > 0
    assert other["speedup"] == 1
    code, out, _ = run(*arguments)
    assert code == 0
    assert "refused, see below" in out
    assert "note: a100: refused: " in " ".join(out.split())


def test_a_run_that_is_refused_everywhere_ends_in_one_line(run: Run) -> None:
    code, out, err = run("predict", SMALL, "--gpu", "a100,v100", "--set", "train.precision=fp8")
    assert (code, out) == (2, "")
    assert err.startswith("lumos: refused on every GPU: a100: ")
    assert err.count("\n") == 1
    code, out, err = run("predict", SMALL, "--gpu", "a100,h200", "--set", "train.seqq=4")
    assert (code, out) == (2, "")
    assert err.count("train.seqq") == 1  # a mistake, which is the same on all of them


@pytest.mark.parametrize(("arguments", "said"), [
    (["--gpu", "h100,b201"], "GPU 'b201' is not known: did you mean b200?"),
    (["--gpu", "h100,none.toml"], "none.toml: cannot be read"),
    (["--gpu", "h100,h200", "--price", "h100=2"], "--price has none for h200"),
    (["--gpu", "h100,h200", "--price", "h100"], "'h100' is not a price"),
    (["--gpu", "h100,h200", "--price", "h100=3,h200=4,h100=5"], "has two prices for h100, 3 and 5: give one"),
    (["--gpu", "h100,h200", "--price", "3,4"], "has two prices for GPUs without a price of their own, 3 and 4"),
    (["--gpu", "h100,h200", "--price", "3,a100=5"], "--price a100=5: the run is not put on it: leave it out"),
    (["--gpu", "h100,h200", "--price", "zz=5"], "--price: GPU 'zz' is not known"),
    (["--gpu", "h200,zz"], "Or name a data sheet"),
    (["--gpu", ","], "--gpu names none"),
    (["--gpu", ""], "--gpu names none"),
    (["--gpu", "h200,H200"], "names one GPU only: add another, or name h200 once"),
    (["--gpu", "h100,h200", "--set", "cluster.gpu=a100"], "leave one of them out"),
    (["--gpu", "h100,h200", "--emit", "megatron"], "files are written for one GPU"),
    (["--gpu", "h100,h200", "-o", "x.trace.json"], "cannot be written as .trace.json"),
])  # fmt: skip
def test_a_mistake_ends_in_one_line_and_writes_nothing(
    run: Run, tmp_path: Path, arguments: list[str], said: str
) -> None:
    output = [] if "-o" in arguments else ["-o", tmp_path / "x.html"]
    code, out, err = run("predict", SMALL, *arguments, *output)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_never_the_best_and_says_what_would_help(run: Run) -> None:
    rows = answer_of(run, "predict", SMALL, "--gpu", "l40s,h200", "--set", "train.micro_batch=24")["gpus"]
    assert [row["fits"] for row in rows] == [False, True]
    assert rows[0]["best_in"] == []
    assert "--set train.micro_batch=12" in rows[0]["advice"]
    assert {"step_ms", "mfu", "joules_per_token"} <= set(rows[1]["best_in"])


def test_gpus_that_predictions_cannot_tell_apart_are_named(small: Setup) -> None:
    (note,) = compare_gpus(small, ["a100", "b200", "gb200"]).answer.warnings
    assert note.startswith("b200 and gb200 are within 7 % of the fastest")
    assert compare_gpus(small, ["a100", "h200"]).answer.warnings == []


def model_file(folder: Path, name: str = "my.npz", **sections: Any) -> str:
    """What `lumos fit` writes of an H200."""
    path = folder / name
    path.write_bytes(encode("h200", cost_model("h200").regressors, isolation_us=2.8, **sections))
    return str(path)


def test_a_note_says_which_gpu_has_a_sampled_host(small: Setup, tmp_path: Path) -> None:
    quick = model_file(tmp_path, host={"launch_us": 19.0, "error_pct": 3.0})
    (note,) = compare_gpus(small, [quick, "a100"]).answer.warnings
    assert note.startswith("hosts differ (my.npz: a sampled host, 2.00 times as fast as a typical one; a100: a typical")
    without = model_file(tmp_path, "plain.npz")
    assert compare_gpus(small, [without, "a100"]).answer.warnings == []


def test_a_model_file_for_all_gpus_gives_them_one_host(run: Run, tmp_path: Path) -> None:
    quick = model_file(tmp_path, host={"launch_us": 19.0, "error_pct": 3.0})
    assert answer_of(run, "predict", SMALL, "--gpu", "h200,a100", "--model", quick)["warnings"] == []


def test_a_node_of_one_gpu_is_no_plural(small: Setup) -> None:
    changes = {"cluster.gpus": 2, "parallel.tp": 2, "cluster.gpus_per_node": 1}
    (row,) = compare_gpus(small.replaced({**changes, "cluster.gpu": "l40s"}), ["l40s"]).answer.gpus
    assert "parallel.tp = 2 reaches beyond a node of 1 GPU" in row.warnings


def test_the_power_limit_is_that_of_the_board(run: Run) -> None:
    arguments = ("predict", LARGE, "--gpu", "h100,b200")
    rows = answer_of(run, *arguments)["gpus"]
    assert [row["power_limit_w"] for row in rows] == [700, 1000]
    assert all(row["at_power_limit"] and 0.95 * row["power_limit_w"] < row["watts_per_gpu"] for row in rows)
    rows = answer_of(run, *arguments, "--set", "cluster.power_w=500")["gpus"]
    assert [row["power_limit_w"] for row in rows] == [500, 500]


def test_a_very_slow_gpu_has_a_speed_above_zero(small: Setup, tmp_path: Path) -> None:
    slow = sheet(tmp_path, 'like = "h200"\nhbm_tb_s = 0.01\npeak_tflops = {bf16 = 0.1, fp32 = 0.1}\n')
    answer = compare_gpus(small, ["h200", str(slow)]).as_dict()
    column = [column.title for column in time_table(answer).columns].index("speed, h200 = 1")
    first, second = (cells[column].text for _, cells in time_table(answer).body())
    assert first == "1.00"
    assert 0 < float(second) < 0.01


# ---------------------------------------------------------------------- prices, data sheets, keys of the cluster
def test_each_gpu_has_its_own_price(run: Run) -> None:
    rows = answer_of(run, "predict", LARGE, "--gpu", "h100,b200", "--price", "h100=2,b200=6", "--tokens", "1T")["gpus"]
    assert [row["price_per_gpu_hour"] for row in rows] == [2, 6]
    for row in rows:
        hours = 1e6 / row["tokens_per_s_per_gpu"] / 3600
        assert row["money_per_million_tokens"] == pytest.approx(row["price_per_gpu_hour"] * hours)
        assert row["budget"]["money"] == pytest.approx(row["money_per_million_tokens"] * 1e6, rel=1e-3)


def test_one_gpu_takes_its_price_by_name_too(run: Run) -> None:
    plain, named = (answer_of(run, "predict", SMALL, "--price", price)["bill"] for price in ("3", "H200=3"))
    assert plain == named
    code, _, err = run("predict", SMALL, "--price", "a100=1")
    assert (code, "--price a100=1: the run is not put on it: leave it out, or price h200\n" in err) == (2, True)


def test_a_price_for_all_others_stands_beside_that_of_one(run: Run) -> None:
    rows = answer_of(run, "predict", SMALL, "--gpu", "a100,h200,b200", "--price", "h200=3,4")["gpus"]
    assert [row["price_per_gpu_hour"] for row in rows] == [4, 3, 4]


def test_a_model_file_has_the_price_of_its_gpu(run: Run, tmp_path: Path) -> None:
    mine = model_file(tmp_path)
    rows = answer_of(run, "predict", SMALL, "--gpu", f"{mine},b200", "--price", "h200=3,b200=5")["gpus"]
    assert [row["price_per_gpu_hour"] for row in rows] == [3, 5]
    rows = answer_of(run, "predict", SMALL, "--gpu", f"{mine},h200", "--price", f"h200=3,{mine}=2")["gpus"]
    assert [row["price_per_gpu_hour"] for row in rows] == [2, 3]
    assert answer_of(run, "predict", SMALL, "--model", mine, "--price", "h200=3")["bill"]["price_per_gpu_hour"] == 3


def test_only_among_several_prices_one_is_the_cheapest(run: Run, tmp_path: Path) -> None:
    mine = sheet(tmp_path, 'like = "h200"\nprice = 4.5\n')
    code, out, _ = run("predict", SMALL, "--gpu", f"h200,{mine}")
    assert code == 0
    assert "cheapest" not in out
    assert "cheapest" in run("predict", SMALL, "--gpu", f"h200,{mine}", "--price", "h200=3")[1]


@pytest.mark.parametrize(("arguments", "said"), [
    (["--gpu", ","], "--gpu names none"),
    (["--gpu", ""], "--gpu names none"),
    (["--gpu", "h200", "--price", "a100=5,3"], "--price a100=5: the run is not put on it: leave it out, or price h200"),
])  # fmt: skip
def test_a_search_refuses_gpus_and_prices_that_name_nothing(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run("search", SMALL, "--gpus", "8", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_data_sheet_brings_its_price_and_is_named_by_its_file(run: Run, tmp_path: Path) -> None:
    mine = sheet(tmp_path, 'like = "h200"\nprice = 4.5\n')
    rows = answer_of(run, "predict", SMALL, "--gpu", f"h200,{mine}", "--price", "h200=3")["gpus"]
    assert [(row["gpu"], row["price_per_gpu_hour"]) for row in rows] == [("h200", 3), ("my_gpu.toml", 4.5)]
    assert rows[0]["step_ms"] == rows[1]["step_ms"]
    rows = answer_of(run, "predict", SMALL, "--gpu", f"h200,{mine}")["gpus"]
    assert [row["price_per_gpu_hour"] for row in rows] == [None, 4.5]


def test_two_data_sheets_of_one_name_are_refused(small: Setup, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    sheets = [str(sheet(folder, 'like = "h200"\n')) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(OptionError, match="rename one of the two files"):
        compare_gpus(small, sheets)


def test_twice_the_bandwidth_buys_only_what_memory_bounds(small: Setup, tmp_path: Path) -> None:
    setup = small.replaced({"train.micro_batch": 16, "train.global_batch": 16})  # the GPU decides
    usual, faster = compare_gpus(setup, ["h200", str(sheet(tmp_path, 'like = "h200"\nhbm_tb_s = 9.6\n'))]).answer.gpus
    saved = (usual.step_ms or 0) - (faster.step_ms or 0)
    assert 0 < saved <= usual.bound_ms["memory"]
    assert faster.bound_ms["memory"] < 0.8 * usual.bound_ms["memory"]


def test_what_a_setup_says_of_its_own_gpu_does_not_hold_on_others(run: Run, tmp_path: Path) -> None:
    setup = tmp_path / "run.toml"
    setup.write_text(SMALL.read_text() + "memory_gib = 100.0\n")
    answer = answer_of(run, "predict", setup, "--gpu", "h200,b200")
    assert [row["available_gib"] for row in answer["gpus"]] == [pytest.approx(100), pytest.approx(178.4, abs=1)]
    assert answer["warnings"][0].startswith("cluster.memory_gib: stated for the setup's own GPU")
    answer = answer_of(run, "predict", setup, "--gpu", "h200,b200", "--set", "cluster.memory_gib=90")
    assert [row["available_gib"] for row in answer["gpus"]] == [pytest.approx(90), pytest.approx(90)]


def test_python_raises_for_a_missing_price(small: Setup) -> None:
    with pytest.raises(OptionError, match="--price has none for b200"):
        compare_gpus(small, ["h200", "b200"], tariff=Tariff(tokens=1e12), prices={"h200": 3.0})


# ---------------------------------------------------------------------- other sources
def test_a_traced_run_is_read_once_and_put_on_every_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from lumos.cli import predict_command

    read, load = [], predict_command.load_run
    monkeypatch.setattr(predict_command, "load_run", lambda *given, **more: read.append(given) or load(*given, **more))
    rows = answer_of(run, "predict", TRACE / "setup.toml", "--from", TRACE, "--gpu", "h200,b200")["gpus"]
    assert len(read) == 1
    alone = answer_of(run, "predict", TRACE / "setup.toml", "--from", TRACE, "--gpu", "b200")
    assert rows[1]["step_ms"] == alone["step_ms"]
    assert rows[0]["gpus"] == 64


def test_a_dry_run_is_put_on_every_gpu(run: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="dry runs need torch, the extra [dry]")
    from lumos.dry_run.recorded_step import write_recording

    def train() -> None:
        net = torch.nn.Linear(4096, 4096).cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            net(torch.randn(8192, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    write_recording(tmp_path / "rank0.dry.json.gz", lumos.dry_run(train))
    rows = answer_of(run, "predict", "--from", tmp_path, "--gpu", "a100,h200")["gpus"]
    alone = [answer_of(run, "predict", "--from", tmp_path, "--gpu", row["gpu"])["step_ms"] for row in rows]
    assert [row["step_ms"] for row in rows] == alone
    assert all(sum(row["bound_ms"].values()) == pytest.approx(row["step_ms"], rel=1e-3) for row in rows)
    assert rows[1]["speedup"] is None or rows[1]["speedup"] > 1


def test_the_code_of_a_config_is_run_once_for_all_gpus(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="dry runs of a config.json need transformers, the extra [dry]")
    from lumos.dry_run import from_config

    calls, record = [], from_config._recorded
    monkeypatch.setattr(from_config, "_recorded", lambda *given: calls.append(given) or record(*given))
    few = json.loads((ROOT / "examples/config.json").read_text()) | {"num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in few.items() if key != "layer_types"}))
    rows = answer_of(run, "predict", path, "--gpu", "a100,h200", "--set", "train.seq=512")["gpus"]
    assert len(calls) == 1
    assert rows[0]["step_ms"] > rows[1]["step_ms"]


# ---------------------------------------------------------------------- forms of the answer
def test_the_json_has_these_keys(run: Run) -> None:
    answer = answer_of(run, "predict", SMALL, "--gpu", "h200,a100")
    assert tuple(answer) == GpuComparisonAnswer.__struct_fields__
    assert all(tuple(row) == GpuAnswer.__struct_fields__ for row in answer["gpus"])
    assert tuple(answer["gpus"][0]["bound_ms"]) == ("compute", "memory", "network", "host", "bubble")


def test_the_table_has_a_row_for_each_gpu(run: Run, tmp_path: Path) -> None:
    arguments = ("--gpu", "h200,a100,v100", "--set", "train.precision=bf16")
    assert run("predict", SMALL, *arguments, "-o", tmp_path / "gpus.csv")[0] == 0
    with (tmp_path / "gpus.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["gpu"] for row in rows] == ["h200", "a100", "v100"]
    assert float(rows[1]["speedup"]) < 1
    assert rows[1]["costs_from"] == "samples of a100"
    assert rows[2]["step_ms"] == ""
    assert "bf16" in rows[2]["refused"]


def test_the_best_of_a_column_is_marked_on_the_terminal(run: Run) -> None:
    code, out, _ = run("predict", LARGE, "--gpu", "h100,b200,a100")
    assert code == 0
    lines = out.splitlines()
    names = ("h100 ", "b200 ", "a100 ")
    first, second, third = (next(line for line in lines if line.startswith(name)) for name in names)
    assert "*" not in first
    assert second.split()[1] == "*"  # the shortest step
    assert "*" in third  # the highest MFU
    assert "fastest       b200" in out
    assert "times as fast as h100" in out


def test_the_page_draws_what_bounds_each_gpu_and_escapes_names(small: Setup, tmp_path: Path) -> None:
    mine = sheet(tmp_path, 'like = "h200"\n', "<b>&x.toml")
    answer = compare_gpus(small, ["h200", str(mine), "v100"], prices={"": 2.0}).as_dict()
    page = gpu_page(answer)
    assert [section.title for section in page.sections] == [
        "What bounds the step", "Time and throughput", "Memory, energy and money", "Cost of a token",
    ]  # fmt: skip
    text = "".join(render(page)).partition('id="plotly"')[0]
    assert "<b>&x" not in text
    assert "&lt;b&gt;&amp;x.toml" in text
    assert text.count("<svg") == 5
    assert "v100: refused:" in text
    assert "memory bandwidth" in text


def test_a_notebook_shows_the_tables(small: Setup) -> None:
    text = compare_gpus(small, ["h200", "a100"])._repr_html_()
    assert "what bounds the step, %" in text
    assert "samples of a100" in text
    assert "<svg" not in text


# ---------------------------------------------------------------------- searches
@pytest.fixture(scope="module")
def searched() -> dict[str, Any]:
    setup = read_setup(SMALL, ["train.global_batch=64"])
    return search(setup, {"cluster.gpu": ["a100", "h200"], "cluster.gpus": [8, 4], **NARROW}, top=2).as_dict()


NARROW: dict[str, list[Any]] = {"parallel.tp": [1, 2], "parallel.cp": [1], "parallel.pp": [1]}


def test_a_search_has_the_best_on_each_gpu_though_another_is_faster(searched: dict[str, Any]) -> None:
    assert {row["cluster.gpu"] for row in searched["results"]} == {"h200"}
    on = [(row["cluster.gpu"], row["cluster.gpus"]) for row in searched["best_by_gpu"]]
    assert on == [("a100", 8), ("a100", 4), ("h200", 8), ("h200", 4)]
    setup = read_setup(SMALL, ["train.global_batch=64"])
    for row in searched["best_by_gpu"]:
        only = {"cluster.gpu": [row["cluster.gpu"]], "cluster.gpus": [row["cluster.gpus"]]}
        alone = search(setup, {**only, **NARROW}, top=1).results[0]
        assert row["step_ms"] == alone["step_ms"]
        assert row["train.micro_batch"] == alone["train.micro_batch"]


def test_the_best_on_each_gpu_are_compared(searched: dict[str, Any]) -> None:
    compared = searched["comparison"]["gpus"]
    for row, best in zip(compared, searched["best_by_gpu"], strict=True):
        assert row["step_ms"] == pytest.approx(best["step_ms"])
    assert [row["gpus"] for row in compared] == [8, 4, 8, 4]
    assert compared[0]["configuration"]["parallel.tp"] == searched["best_by_gpu"][0]["parallel.tp"]
    assert compared[2]["speedup"] == pytest.approx(compared[0]["step_ms"] / compared[2]["step_ms"])


def test_it_says_how_many_of_each_gpu_are_as_fast_as_the_first(searched: dict[str, Any]) -> None:
    first, second = searched["comparison"]["same_speed"]
    assert (first["gpu"], first["gpus"]) == ("a100", 8)
    assert (second["gpu"], second["gpus"]) == ("h200", 4)
    assert second["tokens_per_s"] >= first["tokens_per_s"]


def test_shards_of_a_search_have_the_same_best_on_each_gpu(searched: dict[str, Any]) -> None:
    setup = read_setup(SMALL, ["train.global_batch=64"])
    vary = {"cluster.gpu": ["a100", "h200"], "cluster.gpus": [8, 4], **NARROW}
    parts = [search(setup, vary, top=2, shard=(index, 3)).as_dict() for index in range(3)]
    merged = merged_search(parts)
    assert [row["step_ms"] for row in merged["best_by_gpu"]] == [row["step_ms"] for row in searched["best_by_gpu"]]
    assert merged["comparison"] is None


def test_a_search_over_one_gpu_compares_nothing() -> None:
    found = search(read_setup(SMALL, ["train.global_batch=64"]), {"cluster.gpus": [4], **NARROW}, top=1)
    assert (found.best_by_gpu, found.comparison) == ([], None)


def test_a_search_shows_gpus_side_by_side_and_takes_prices_from_data_sheets(run: Run, tmp_path: Path) -> None:
    mine = sheet(tmp_path, 'like = "h200"\nhbm_tb_s = 9.6\nprice = 5\n')
    few = ("--vary", "parallel.tp=1", "--vary", "parallel.cp=1", "--vary", "parallel.pp=1", "--top", "1")
    arguments = ("search", SMALL, "--gpus", "8", "--gpu", f"h200,{mine}", "--price", "h200=3", *few)
    code, out, _ = run(*arguments, "-o", tmp_path / "search.html")
    assert code == 0
    assert "the best on each GPU" in out
    assert "what bounds the step, %" in out
    assert "8 × my_gpu.toml" in out
    assert "What bounds the step" in (tmp_path / "search.html").read_text()
    rows = answer_of(run, *arguments)["comparison"]["gpus"]
    assert [row["price_per_gpu_hour"] for row in rows] == [3, 5]
    assert rows[0]["money_per_million_tokens"] == pytest.approx(3e6 / 3600 / rows[0]["tokens_per_s_per_gpu"])


def test_a_search_says_how_to_give_it_a_model_file(run: Run) -> None:
    code, _, err = run("search", SMALL, "--gpus", "8", "--gpu", "h200,my.npz")
    assert code == 2
    assert err.count("\n") == 1


# ---------------------------------------------------------------------- how good such comparisons are
@pytest.mark.skipif(not TRUTH.is_dir(), reason="needs the published runs in ../shared/data/truth")
def test_ratios_between_gpus_hold_on_published_runs() -> None:
    spec = importlib.util.spec_from_file_location("gpu_pairs", ROOT / "benchmarks/gpu_pairs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_pairs"] = module
    spec.loader.exec_module(module)
    pairs = module.pairs(TRUTH)
    assert len(pairs) >= 40
    assert sum(pair.error for pair in pairs) / len(pairs) < 0.13
    assert sum(pair.same_winner for pair in pairs) / len(pairs) > 0.9
