"""Python: what the package offers, as short reprs, polars frames and functions of the command line's results."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lumos
from commands import lumos_here
from support import launch, small_recording, write_trace

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE, OPERATIONS = ROOT / "src/lumos/data/example", ROOT / "examples/operations.csv"
RUN = ROOT / "examples/one-h200.toml"


def test_every_public_name_is_there() -> None:
    assert all(getattr(lumos, name) is not None for name in lumos.__all__)


def test_reprs_fit_on_a_line() -> None:
    prediction = lumos.predict(str(RUN))
    results = (
        prediction, lumos.read_job(str(EXAMPLE)), lumos.replay(EXAMPLE), lumos.stragglers(OPERATIONS),
        lumos.compare_gpus(lumos.read_setup(RUN), ["h100", "h200"]), lumos.step_risk(prediction, draws=100),
        lumos.search(str(RUN), {"parallel.zero": [0]}), lumos.check(EXAMPLE), lumos.read_setup(RUN),
        prediction.run, prediction.step, lumos.compare(EXAMPLE, EXAMPLE), lumos.replay(EXAMPLE).run,
        lumos.replay(EXAMPLE).execution, lumos.replay(EXAMPLE).clean_graph, prediction.critical_path,
    )  # fmt: skip
    for result in results:
        assert len(repr(result)) < 200, type(result).__name__


def test_reprs_of_comparisons_and_readiness_state_the_result() -> None:
    assert repr(lumos.compare(EXAMPLE, EXAMPLE)) == "Comparison(25.81 ms before, 25.81 ms after)"
    ready = lumos.check(EXAMPLE)
    assert repr(ready).startswith("Readiness(4 ranks, ready for replay, scale")
    assert repr(ready).endswith(f", {len(ready.findings)} findings)")


def test_tables_of_comparisons_and_readiness_have_one_row_per_operator_or_finding(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", launch("gemm", 10, 1))
    compared, ready = lumos.compare(EXAMPLE, EXAMPLE), lumos.check(tmp_path)
    assert compared.table()["name"].to_list() == [part.name for part in compared.operators]
    assert compared.table()["change_ms"].abs().max() == 0
    assert ready.table()["what"].to_list() == [finding.what for finding in ready.findings] != []


def test_tables_are_frames_with_one_row_per_rank_operator_gpu_or_configuration() -> None:
    replayed, prediction = lumos.replay(str(EXAMPLE)), lumos.predict(RUN)
    assert replayed.table()["rank"].to_list() == [0, 1, 2, 3]
    operators = prediction.table()
    assert operators["ms"].is_sorted(descending=True)
    assert len(operators) == len(prediction.all_operators)
    found = lumos.search(lumos.read_setup(RUN), {"parallel.zero": [0]})
    assert found.table().row(0, named=True)["step_ms"] == found.results[0]["step_ms"]
    gpus = lumos.compare_gpus(lumos.read_setup(RUN), ["h100", "h200"]).table()
    assert gpus["gpu"].to_list() == ["h100", "h200"]


def test_every_function_takes_the_path_that_the_command_line_takes() -> None:
    """Predictions from a folder of traces are those of its replay; searches and comparisons read setups themselves."""
    run = lumos.replay(EXAMPLE)
    assert lumos.predict(str(EXAMPLE), ["comm=0.5"]).step_ms == lumos.predict(run, ["comm=0.5"]).step_ms
    assert lumos.predict(EXAMPLE).step_ms == lumos.predict(run).step_ms
    assert lumos.compare(str(EXAMPLE), EXAMPLE).as_dict() == lumos.compare(run, run).as_dict()
    assert lumos.compare_gpus(str(RUN), ["h100"]).as_dict()["gpus"][0]["gpu"] == "h100"
    assert lumos.search(str(RUN), {"parallel.zero": [0]}, objective="energy").as_dict()["objective"] == "energy"
    assert lumos.stragglers(run).table()["rank"].to_list()[0] == 2


@pytest.mark.parametrize(
    ("sections", "lines"),
    [
        ({"model": {"preset": "llama9"}, "train": {"seq": 8}}, ["llama3-8b"]),
        ({"model": {"preset": "llama3-8b"}}, ["train.seq is missing"]),
        ({"model": {"preset": "llama3-8b", "layrs": 3}, "train": {"seq": "x"}}, ["mean layers?", "seq = "]),
        ({"model": {"preset": "llama3-8b"}, "train": {"seq": 8}, "clusters": {}}, ["did you mean cluster"]),
        ({"model": 3, "train": {"seq": 8}}, ["model = 3 is not a section"]),
        ({}, ["model", "train.seq"]),
    ],
)
def test_mistakes_in_a_setup_made_in_python_are_those_of_a_file(sections: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(lumos.LumosError) as refused:
        lumos.Setup(**sections)
    told = str(refused.value).splitlines()
    assert len(told) == len(lines)
    assert all(part in line for part, line in zip(lines, told, strict=True)), told


def test_one_of_something_needs_no_list() -> None:
    prediction = lumos.predict(RUN)
    assert lumos.predict(EXAMPLE, "comm=0.5").step_ms == lumos.predict(EXAMPLE, [lumos.Scale("comm", 0.5)]).step_ms
    assert lumos.predict(EXAMPLE, lumos.Scale("comm", 0.5)).step_ms < lumos.replay(EXAMPLE).clean_ms
    assert lumos.read_setup(RUN, "train.seq=512") == lumos.read_setup(RUN, ["train.seq=512"])
    assert [row.gpu for row in lumos.compare_gpus(RUN, "h200").answer.gpus] == ["h200"]
    assert lumos.step_risk(prediction, slow="rank=0,factor=2", draws=50).typical_ms > 1.5 * prediction.step_ms
    few = {"parallel.zero": 0, "train.recompute": "none", "train.micro_batch": 1}
    assert lumos.search(RUN, few).as_dict()["tried"]["train.recompute"] == ["none"]


@pytest.mark.parametrize(("mistake", "message"), [
    (lambda: lumos.Scale("gpu", 2), "'gpu' is not known; use one of compute"),
    (lambda: lumos.Scale("comm", math.nan), "from 0 to a million"),
    (lambda: lumos.predict(None), "what = None: expected Setup, Replay, CalibratedRun, Path or str, not NoneType"),
    (lambda: lumos.predict("y" * 300), "check the path|no such file"),
    (lambda: lumos.replay("y" * 300), "File name too long; check the path"),
    (lambda: lumos.search(RUN, top=0.5), "search: top = 0.5: expected a whole number, not float"),
    (lambda: lumos.search(RUN, shard=(2, 2)), "index of a part, from 0"),
    (lambda: lumos.compare_gpus(RUN, [1]), r"gpus = \[1\]: expected str or a list of str, not list"),
    (lambda: lumos.predict(RUN, tariff={"gpu_hour": 2}), "expected Tariff, not dict"),
    (lambda: lumos.Tariff(tokens="15T"), "Tariff: tokens = '15T': expected a number, not str"),
    (lambda: lumos.Objective("cost", gpu_hour={"h100": -1}), "price h100 = -1"),
    (lambda: lumos.step_risk(lumos.predict(RUN), draws=50).percentile(101), "from 0 to 100"),
    (lambda: lumos.whole_run(lumos.predict(RUN), [1.0], tokens=1e9), "step_factors"),
])  # fmt: skip
def test_what_cannot_be_meant_is_a_mistake_in_one_line(mistake: Any, message: str) -> None:
    with pytest.raises(lumos.LumosError, match=message) as raised:
        mistake()
    assert "\n" not in str(raised.value)


def test_public_names_are_completed() -> None:
    assert set(lumos.__all__) <= set(dir(lumos))


def test_stragglers_and_check_are_those_of_the_command_line() -> None:
    for function, command, path in ((lumos.stragglers, "stragglers", OPERATIONS), (lumos.check, "check", EXAMPLE)):
        shown = json.loads(lumos_here(command, path, "--json").stdout)
        result = function(path)
        mine = result.as_dict() if command == "stragglers" else result.as_dict(str(path))
        assert json.loads(json.dumps(mine)) == shown


def test_prices_and_deadlines_are_reachable() -> None:
    tariff = lumos.Tariff(gpu_hour=2.0, tokens=1e12)
    bill = lumos.predict(RUN, tariff=tariff).as_dict()["bill"]
    assert bill["budget"]["money"] == pytest.approx(2.0 * bill["budget"]["gpu_hours"])
    objective = lumos.Objective("cost", gpu_hour=(("", 2.0),), tokens=1e9, deadline_days=400.0)
    assert lumos.search(lumos.read_setup(RUN), {"parallel.zero": [0]}, objective=objective).results


@pytest.mark.parametrize("tariff", [{"tokens": math.nan}, {"tokens": 0.5}, {"gpu_hour": -1.0}, {"pue": math.inf}])
def test_prices_that_are_none_are_refused_from_python_too(tariff: dict[str, float]) -> None:
    with pytest.raises(lumos.LumosError, match=next(iter(tariff))):
        lumos.predict(RUN, tariff=lumos.Tariff(**tariff))


def test_notebooks_show_the_interval_and_whether_it_fits() -> None:
    shown = lumos.predict(RUN)._repr_html_()
    assert "interval" in shown
    assert ": fits" in shown


REQUIRED: dict[str, dict[str, Any]] = {
    "predict": {"what": RUN}, "compare_gpus": {"setup": RUN, "gpus": "h100"}, "read_job": {"path": EXAMPLE},
    "compare": {"before": EXAMPLE, "after": EXAMPLE}, "replay": {"source": EXAMPLE}, "check": {"source": EXAMPLE},
    "stragglers": {"source": OPERATIONS}, "read_setup": {"path": RUN}, "write_setup": {}, "search": {"setup": RUN},
    "step_risk": {}, "whole_run": {}, "Scale": {"what": "comm", "factor": 2.0}, "Tariff": {}, "Objective": {},
    "capture": {"folder": "traces"}, "dry_run": {"train": print}, "predict_recording": {},
}  # fmt: skip
"""Arguments that each needs; those of Lumos's own types are made in the test."""


class NothingKnown:
    """Of no type that a function takes."""


@pytest.mark.parametrize("name", REQUIRED)
def test_every_argument_of_a_wrong_type_is_rejected_in_one_line_that_names_it(name: str) -> None:
    function = getattr(lumos, name)
    function = getattr(function, name) if inspect.ismodule(function) else function
    made = {"what": lumos.predict(RUN), "found": lumos.predict(RUN), "recording": small_recording()}
    parameters = inspect.signature(function).parameters
    required = {key: value for key, value in made.items() if key in parameters} | REQUIRED[name]
    for parameter in set(parameters) - {"setup" if name == "capture" else ""}:
        with pytest.raises(lumos.LumosError) as rejected:
            function(**{**required, parameter: NothingKnown()})
        assert f": {parameter} = <" in str(rejected.value)
        assert str(rejected.value).endswith(", not NothingKnown")


def test_every_public_function_checks_its_arguments() -> None:
    functions = {name for name in lumos.__all__ if not inspect.isclass(getattr(lumos, name))}
    assert functions <= set(REQUIRED)


def test_numbers_and_lists_of_numpy_are_as_good_as_those_of_python() -> None:
    few = {"parallel.zero": [0], "train.recompute": ["none"], "train.micro_batch": [1]}
    prices = lumos.Objective("cost", gpu_hour={"h200": np.float32(2.0)})
    found = lumos.search(RUN, few, objective=prices, top=np.int64(1), memory_gib=np.float64(100.0))
    assert json.loads(json.dumps(found.as_dict()["results"]))[0]["cost_per_mtoken"] > 0
    compared = lumos.compare_gpus(RUN, np.array(["h100", "h200"]), tariff=lumos.Tariff(np.int64(2)))
    assert [row.gpu for row in compared.answer.gpus] == ["h100", "h200"]
    assert json.loads(json.dumps(compared.as_dict()))["gpus"]


def test_a_price_of_an_objective_is_one_for_all_or_one_for_each_type() -> None:
    assert lumos.Objective("cost", gpu_hour=2) == lumos.Objective("cost", gpu_hour={"": 2})
    assert lumos.Objective("cost", {"h100": 2.0}) == lumos.Objective("cost", (("h100", 2.0),))


def test_setups_of_a_changed_run_may_be_paths(tmp_path: Path) -> None:
    source = ROOT / "tests/data/capture/fake_world"
    traced = lumos.read_setup(source / "setup.toml")
    wanted = traced.replaced({"train.microbatches": 2})
    (tmp_path / "wanted.toml").write_text(lumos.write_setup(wanted))
    of_paths = lumos.predict(source, setup=str(tmp_path / "wanted.toml"), traced=source / "setup.toml")
    assert of_paths.step_ms == lumos.predict(source, setup=wanted, traced=traced).step_ms


def test_what_was_learned_of_a_cluster_may_be_a_path(tmp_path: Path) -> None:
    times = tmp_path / "steps.csv"
    times.write_text("step,ms\n" + "".join(f"{step},{100 + 20 * (step % 5)}\n" for step in range(40)))
    prediction = lumos.predict(RUN)
    assert lumos.step_risk(prediction, times, draws=200).percentile(99) > 1.1 * prediction.step_ms


def test_errors_are_short_whatever_is_in_them() -> None:
    with pytest.raises(lumos.LumosError) as rejected:
        lumos.read_setup("y" * 200_000)
    assert len(str(rejected.value)) < 2100
    assert str(rejected.value).endswith("give the path of its config.json")


def test_thousands_of_mistakes_are_not_all_listed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\n" + "".join(f"k{number} = 1\n" for number in range(3000)))
    with pytest.raises(lumos.LumosError) as rejected:
        lumos.read_setup(tmp_path / "run.toml")
    assert len(str(rejected.value).splitlines()) == 31
    assert str(rejected.value).endswith("more lines")
