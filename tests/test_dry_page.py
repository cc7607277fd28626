"""The page on the accuracy of dry runs, and what CONTRIBUTING.md says about their prices."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from test_contributing import Copy, copy  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[1]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dry_runs_benchmark", ROOT / "benchmarks/dry_runs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


dry_runs = benchmark()


def case(**given: Any) -> Any:
    values = {"name": "one", "set": "scripts", "step_s": 0.1, "steps_s": (0.09, 0.1, 0.12), "peak": 2.0**30}
    return dry_runs.Case(**(values | given))


def result(found: Any, step_ms: float = 105.0, host_bound: bool = False) -> Any:
    memory = SimpleNamespace(stages=[SimpleNamespace(peak=1.01 * 2**30)])
    predicted = SimpleNamespace(step_ms=step_ms, host_bound=host_bound, memory=memory)
    return dry_runs.Result(found, predicted, 0.5, 10.0, 300.0)


@pytest.mark.parametrize(
    ("measured", "bound"),
    [
        ({"busy": 0.95}, "GPU"),
        ({"busy": 0.5}, "host"),
        ({"busy": 0.85, "waited": 0.2}, "GPU"),  # the host was ahead
        ({}, "(host)"),  # as predicted
    ],
)
def test_what_decides_a_step_is_measured_where_it_can_be(measured: dict[str, float], bound: str) -> None:
    assert result(case(**measured), host_bound=True).bound == bound


def test_a_row_has_the_scatter_beside_the_error() -> None:
    row = result(case(busy=0.95)).row()
    assert row == "| one | GPU | 100.0 | 30 | 105.0 | +5.0 | 1.00 | +1.00 | 10 | 300 |"


def test_what_was_kept_apart_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert not {case.set for case in dry_runs.cases(tmp_path, blind=False)} & {"blind scripts", "blind ranks"}
    assert {case.set for case in dry_runs.cases(tmp_path, blind=True)} == set(dry_runs.SECTIONS)


def test_a_page_that_is_written_again_keeps_the_chapter_on_what_was_kept_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert dry_runs.kept_chapter(page) == ""
    chapter = dry_runs.blind_chapter([result(case(set="blind scripts", busy=0.95))])
    page.write_text(f"# Dry runs\n\n{chapter}")
    assert dry_runs.kept_chapter(page) == chapter
    assert "mean 5.0 %" in chapter


def test_a_recording_is_made_again_when_the_code_or_the_case_changes() -> None:
    folder = dry_runs.folder_of(case(), "code")
    assert folder == dry_runs.folder_of(case(step_s=0.2), "code")
    assert folder != dry_runs.folder_of(case(), "other code")
    assert folder != dry_runs.folder_of(case(environment={"COMPILE": "1"}), "code")


def test_an_operator_gets_the_price_of_a_family_in_one_line(copy: Copy) -> None:  # noqa: F811
    code = """
from lumos.costs.costs import costs_of
from lumos.program.op import Op, Tensor
from lumos.setup import read_setup
from pathlib import Path
image = Tensor((8, 64, 128, 128), "bf16", (64 * 128 * 128, 128 * 128, 128, 1), 2)
grid = Tensor((8, 128, 128, 2), "bf16", (128 * 128 * 2, 256, 2, 1), 2)
op = Op("aten.grid_sampler_2d.default", (image, grid), (image,), "forward", allocates=True)
print(costs_of(read_setup(Path("examples/one-h200.toml"), [])).cost(op).source)
"""
    assert copy.python("-c", code).strip() == "roofline"
    copy.add("A price for dry runs")
    assert copy.python("-c", code).strip() == "fitted"
