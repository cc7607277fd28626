"""Python: what the package offers, as short reprs, polars frames and functions of the command line's results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import lumos
from commands import lumos_here

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
        prediction.run, prediction.step, lumos.compare(EXAMPLE, EXAMPLE),
    )  # fmt: skip
    for result in results:
        assert len(repr(result)) < 200, type(result).__name__


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
    (lambda: lumos.predict(None), "NoneType is nothing to predict"),
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
