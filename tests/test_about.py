"""`lumos about` reports what the data files hold: what is known, where it is from, how old and how far off it is."""

from __future__ import annotations

import csv
import json
import re
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lumos.analysis.about import about
from lumos.cli.main import app
from lumos.costs.operator_model import cost_model
from lumos.data_files import read_table
from lumos.setup.frameworks import framework_names
from lumos.setup.gpus import gpu_names
from lumos.setup.presets import preset_names

FOUND = about(date(2030, 1, 1))


def test_every_gpu_model_and_framework_is_listed() -> None:
    assert tuple(gpu.name for gpu in FOUND.gpus) == gpu_names()
    assert tuple(model["name"] for model in FOUND.models) == preset_names()
    assert tuple(one["name"] for one in FOUND.frameworks) == framework_names()


def test_a_gpu_says_whose_samples_its_costs_are_from() -> None:
    by_name = {gpu.name: gpu for gpu in FOUND.gpus}
    assert (by_name["h200"].own_samples, by_name["h200"].samples, by_name["h200"].own_energy) == (True, "h200", True)
    assert (by_name["h100"].own_samples, by_name["h100"].samples, by_name["h100"].own_energy) == (False, "h200", False)


def test_errors_are_those_of_the_cost_models_themselves() -> None:
    shipped = next(one for one in FOUND.costs if one.gpu == "a100")
    assert {one.family: one.error_pct for one in shipped.families} == {
        name: found.error_pct for name, found in cost_model("a100").regressors.items()
    }
    assert shipped.worst_error_pct == max(one.error_pct for one in shipped.families)


def test_ages_are_counted_from_the_dates_in_the_files() -> None:
    when = date.fromisoformat(read_table("operator_costs.json")["sources"]["samples_of"]["date"])
    assert FOUND.costs[0].age_days == (date(2030, 1, 1) - when).days


def test_every_constant_with_a_source_is_listed_with_it() -> None:
    listed = {(one.file, one.key): one.source for one in FOUND.provenance}
    for name in ("energy", "memory", "uncertainty", "change"):
        for key, one in read_table(f"{name}.json")["sources"].items():
            assert listed[f"{name}.json", key] == one["source"]
    assert {one.kind for one in FOUND.provenance} == {"fitted", "assumed", "documented", "by hand"}


def test_the_interval_of_the_simplest_run_is_the_narrowest() -> None:
    first, *others = (one for one in FOUND.intervals if one["part"] in read_table("uncertainty.json")["variance"])
    assert 5 < first["pct"] <= min(one["pct"] for one in others)
    assert 0 > first["low_pct"] >= max(one["low_pct"] for one in others)


def test_the_interval_under_a_framework_without_published_runs_is_the_widest() -> None:
    by_part = {one["part"]: one["pct"] for one in FOUND.intervals}
    assert by_part["unseen"] == max(by_part[name] for name in (*read_table("uncertainty.json")["frameworks"], "unseen"))


def test_an_interval_says_how_many_publications_it_rests_on() -> None:
    counts = {name: known["publications"] for name, known in read_table("uncertainty.json")["frameworks"].items()}
    words = {one["part"]: one["words"] for one in FOUND.intervals}
    assert 1 in counts.values()
    for name, count in counts.items():
        assert words[name].endswith(f"under {name}, with {count} {'publication' if count == 1 else 'publications'}")


@pytest.mark.parametrize("form", ["html", "csv", "json"])
def test_the_answer_exists_as_table_and_file(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"about.{form}"
    done = CliRunner().invoke(app, ["about", "-o", str(path)])
    assert done.exit_code == 0
    assert re.search(r"h100 +hopper .* h200, scaled", done.stdout)
    assert "llama3-405b" in done.stdout
    if form == "json":
        assert json.loads(path.read_text())["gpus"][0]["name"] == "v100"
    elif form == "csv":
        with path.open() as file:
            assert {"family", "error_pct", "gpu", "date"} <= set(next(csv.DictReader(file)))
    else:
        assert "calibration/fit_energy.py" in path.read_text()
