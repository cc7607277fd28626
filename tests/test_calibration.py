"""Numbers of the package: each says where it is from, and what a script made, the script makes again."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lumos.costs.energy import clock_of, in_step_factors
from lumos.costs.operator_model import cost_model
from lumos.data_files import read_table
from lumos.graph.rules.profiler_cost import load_profiler_cost
from lumos.prediction.interval import spread_of, width_of
from lumos.setup.gpus import gpu_named

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "calibration"))

import fit_aten  # noqa: E402
import fit_contention  # noqa: E402
import fit_energy  # noqa: E402
import fit_host  # noqa: E402
import fit_in_step  # noqa: E402
import fit_profiler  # noqa: E402
import fit_steps  # noqa: E402
import fit_transfer  # noqa: E402
import fit_uncertainty  # noqa: E402
import fit_warmth  # noqa: E402
import published  # noqa: E402
from shipped import ship, shipped, unpack_records  # noqa: E402

TABLES = sorted(path.name for path in (ROOT / "src/lumos/data").glob("*.json"))
ONE_SOURCE = ("profiler.json", "sample_grid.json")  # for all of their values
SOURCED = [name for name in TABLES if name not in ONE_SOURCE]
NOT_BY_SCRIPT = ("assumed", "by hand", "documented")


def values_in(table: dict[str, Any]) -> Iterator[str]:
    """Names of values: a section's own entries where the section has sources for them."""
    for key, value in table.items():
        if key == "sources":
            continue
        if isinstance(value, dict) and key not in table["sources"]:
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield key


@pytest.mark.parametrize("name", SOURCED)
def test_every_value_has_a_source_a_date_and_the_script_that_made_it(name: str) -> None:
    table = read_table(name)
    assert sorted(values_in(table)) == sorted(table["sources"])
    for key, source in table["sources"].items():
        assert set(source) == {"source", "script", "date"}, key
        assert source["source"], key
        assert source["script"] in NOT_BY_SCRIPT or (ROOT / source["script"]).is_file(), key
        assert len(source["date"].split("-")) == 3, key


@pytest.mark.parametrize("fabric", read_table("fabrics.toml").values())
def test_every_fabric_says_where_its_numbers_are_from(fabric: dict[str, Any]) -> None:
    assert all(name in fabric["source"] for name in fabric.keys() - {"source"})


def test_shipping_a_fitted_value_dates_it_and_leaves_the_rest(tmp_path: Path) -> None:
    text = (ROOT / "src/lumos/data/in_step.json").read_text()
    (tmp_path / "in_step.json").write_text(text)
    unchanged = {"ampere.sustained": shipped("in_step.json")["ampere"]["sustained"]}
    ship("in_step.json", unchanged, tmp_path)
    assert (tmp_path / "in_step.json").read_text() == text
    ship("in_step.json", {"ampere.sustained": 2.0}, tmp_path)
    changed, before = json.loads((tmp_path / "in_step.json").read_text()), json.loads(text)
    assert changed["ampere"] == before["ampere"] | {"sustained": 2.0}
    assert changed["sources"]["ampere.sustained"]["date"] > "2026"
    assert changed["all"] == before["all"]


def test_a_family_without_measured_runs_has_no_factor_of_its_own() -> None:
    """No run on AMD GPUs was there to fit on: matmuls are slower by what the power limit leaves of the clock."""
    h200 = gpu_named("h200")
    for name in ("mi250x", "mi300x", "mi325x", "mi355x"):
        gpu = gpu_named(name)
        assert not read_table("in_step.json").keys() & {name, gpu.family}
        slower = clock_of(h200).core / clock_of(gpu).core
        assert in_step_factors(gpu).matrix == pytest.approx(in_step_factors(h200).matrix * slower)
        assert in_step_factors(gpu).stream == 1.0


def test_published_runs_give_the_shipped_in_step_factors(shared_data: Path) -> None:
    fitted = fit_in_step.fit(fit_in_step.chosen_runs(shared_data / "truth"))
    table = shipped("in_step.json")
    for key, value in fitted.items():
        section, _, name = key.partition(".")
        assert table[section][name] == pytest.approx(value, rel=0.035), key  # one step of the search


def test_measured_slowdowns_give_the_shipped_tables_of_contention() -> None:
    fitted = fit_contention.fitted(fit_contention.rows_of("contention_h200.jsonl.xz"))
    table = shipped("contention.json")
    assert {key: table[key] for key in fitted} == fitted


def test_our_own_steps_on_h200_are_as_well_described_as_by_any_factors() -> None:
    """The shipped factors are rounded; the best ones must not be better by more than half a percentage point."""
    runs, known = fit_steps.busy_runs(), in_step_factors(gpu_named("h200"))
    best = np.abs(fit_steps.errors(runs, *fit_steps.fit(runs))).mean()
    assert np.abs(fit_steps.errors(runs, known.matrix, known.stream)).mean() < best + 0.005


def test_loops_and_steps_give_the_shipped_energies(shared_data: Path) -> None:
    rows = fit_energy.read_rows(ROOT / "calibration/power_h200.jsonl")
    fixed = fit_energy.fixed_of(rows)
    cases = fit_energy.own_cases() + fit_energy.shared_cases(shared_data)
    fitted = fit_energy.table_of(fit_energy.fit(cases, fit_energy.loops_of(rows, fixed), fixed), fixed, rows)
    table = shipped("energy.json")
    for key in fitted.keys() - {"gpu"}:
        assert table[key] == pytest.approx(fitted[key], rel=0.05), key  # a change of the cost model moves it a little


def test_published_runs_give_the_shipped_intervals(shared_data: Path) -> None:
    found = fit_uncertainty.residuals(published.predictions(shared_data / "truth"))
    fitted, table = fit_uncertainty.fit(found), shipped("uncertainty.json")
    assert table["variance"] == pytest.approx(fitted["variance"], rel=0.15, abs=0.001)
    for kind in ("frameworks", "families"):
        assert table[kind].keys() == fitted[kind].keys()
        for name, known in fitted[kind].items():
            assert table[kind][name] == pytest.approx(known, rel=0.1), name
    assert table["unseen"] == pytest.approx(fitted["unseen"], rel=0.1)
    assert (table["low"], table["high"]) == pytest.approx((fitted["low"], fitted["high"]), rel=0.1)


def simulated_sources(seed: int, count: int, frameworks: dict[str, float]) -> list[fit_uncertainty.Residual]:
    """Runs of sources that are off as a whole and run by run, under frameworks that spread differently."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        framework = list(frameworks)[number % len(frameworks)]
        offset = draw.normal(0.02, 0.06)
        for waits in draw.uniform(0, 1, draw.integers(5, 60)):
            size = frameworks[framework] * math.sqrt(0.01 + 0.04 * waits)
            parts = dict.fromkeys(fit_uncertainty.PARTS, 0.0) | {"always": 1.0, "waiting": float(waits)}
            error = frameworks[framework] * offset + draw.normal(0, size)
            found.append(fit_uncertainty.Residual(f"{seed}/{number}", framework, "hopper", parts, error))
    return found


def share_inside(table: dict[str, Any], rows: list[fit_uncertainty.Residual]) -> float:
    """By source, as many runs of one machine are not many machines."""
    by_source: dict[str, list[bool]] = {}
    for row in rows:
        spread = spread_of(table, row.parts, row.framework, row.family)
        by_source.setdefault(row.publication, []).append(spread.low <= math.exp(row.log_error) <= spread.high)
    return float(np.mean([np.mean(part) for part in by_source.values()]))


def test_intervals_hold_what_they_say_on_simulated_sources() -> None:
    """Fitted on a dozen sources, they hold 80 % of the runs of others; of a framework that was never seen, more."""
    frameworks = {"steady": 0.6, "usual": 1.0, "erratic": 1.6}
    inside, unseen = [], []
    for seed in range(6):
        table = fit_uncertainty.fit(simulated_sources(seed, 12, frameworks))
        widths = [width_of(table, "frameworks", name) for name in (*frameworks, "never seen")]
        assert widths == sorted(widths)
        inside.append(share_inside(table, simulated_sources(100 + seed, 60, frameworks)))
        unseen.append(share_inside(table, simulated_sources(200 + seed, 60, {"never seen": 1.0})))
    assert np.mean(inside) == pytest.approx(0.8, abs=0.04)
    assert np.mean(unseen) > np.mean(inside)


def test_the_interval_of_a_source_does_not_depend_on_the_source() -> None:
    rows = simulated_sources(0, 8, {"one": 1.0, "other": 1.0})
    first = [row for row in rows if row.publication == "0/0"]
    worse = [row._replace(log_error=3.0) if row.publication == "0/0" else row for row in rows]
    assert fit_uncertainty.held_out(rows)[: len(first)] == fit_uncertainty.held_out(worse)[: len(first)]
    assert fit_uncertainty.held_out(rows)[len(first)] != fit_uncertainty.held_out(worse)[len(first)]


def test_runs_that_nobody_could_repeat_do_not_widen_the_interval() -> None:
    rows = simulated_sources(1, 8, {"one": 1.0, "other": 1.0})
    lost = [row._replace(log_error=2.0, is_erratic=True) for row in rows[::2]]
    assert fit_uncertainty.fit([*rows, *lost]) == fit_uncertainty.fit(rows)


def test_a_correction_by_framework_is_judged_on_sources_it_was_not_made_from() -> None:
    """By hand: a framework whose four sources are all 20 % too fast is corrected; a single source is not, by itself."""
    parts = dict.fromkeys(fit_uncertainty.PARTS, 0.0) | {"always": 1.0}
    rows = [
        fit_uncertainty.Residual(f"{framework} {number}", framework, "hopper", parts, 0.2)
        for framework, count in (("biased", 4), ("single", 1))
        for number in range(count)
        for _ in range(45)
    ]
    found = {row.publication: row.log_error for row in fit_uncertainty.corrected(rows)}
    others = 3 * 45 / 50  # sources that count, against BIAS sources without an error
    assert found["biased 0"] == pytest.approx(0.2 - 0.2 * others / (others + fit_uncertainty.BIAS))
    assert found["single 0"] == 0.2


def test_gpus_that_were_left_out_give_the_shipped_errors_of_transfer(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On A100 by samples of H200, of a few shapes: matmuls within the error that answers tell, bare rooflines not."""
    monkeypatch.setattr(fit_transfer, "ROWS", 150)
    kept = ("gemm", "sdpa", "neox_add")
    samples = {
        "h200": list(fit_transfer.h200_samples()),
        "a100": list(fit_transfer.published_samples(shared_data / "operators/Perlmutter")),
    }
    samples = {gpu: [s for s in rows if s.operator.kind.startswith(kept)] for gpu, rows in samples.items()}
    found = {cell.family: cell for cell in fit_transfer.cells(samples) if cell.target == "a100"}
    told = shipped("transfer.json")["error_pct"]
    for family in ("gemm", "neox_add_fwd", "sdpa_fwd"):
        cell = found[family]
        error = cell.sources["h200"]
        assert cell.own_pct < error.mean < cell.roofline.mean
        assert error.mean < 1.5 * told[cell.group]["other"]
    assert found["gemm"].sources["h200"].mean == pytest.approx(told["matmuls"]["other"], rel=0.4)


def test_the_page_and_the_answers_tell_the_same_errors_of_transfer() -> None:
    page = (ROOT / "docs/transfer.md").read_text("utf-8")
    table = shipped("transfer.json")["error_pct"]
    for group in table.keys() - {"roofline"}:
        assert f"| {group} | {table[group]['same']:.1f} | {table[group]['other']:.1f} |" in page


def test_the_page_on_transfer_says_in_words_what_its_tables_have() -> None:
    page = (ROOT / "docs/transfer.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    (grouped,) = [row for row in rows if row[0] == "grouped_gemm"]
    low, high = sorted(float(cell.split()[0]) for cell in grouped[3:5])
    assert f"**Grouped matmuls do not carry over**: {low:.0f} to {high:.0f} % off" in page
    rooflines = [int(row[6]) for row in rows if len(row) == 7 and row[6].isdigit()]
    assert f"{min(rooflines)} to {max(rooflines)} % on average over a family" in page


def test_recorded_steps_give_the_shipped_warmth_of_the_cache() -> None:
    """The smaller a tensor, the more of it is in the cache, and the sooner its kernels are done."""
    table = shipped("step.json")
    for name, values in fit_warmth.derived().items():
        assert table[name] == pytest.approx(values, abs=0.02)
        assert values == sorted(values)
        assert values[-1] == 1


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    unpack_records(folder)
    return folder


def test_recordings_give_the_shipped_cost_of_the_profiler(records: Path) -> None:
    """The gap of a kernel as fitted; the shares, of those around them, with the least error."""
    cost = load_profiler_cost()
    assert cost.kernel_gap_us == fit_profiler.kernel_gap_us(records)
    found = [recording for recording in fit_profiler.recordings(records) if recording.shapes]

    def loss(share: float) -> float:
        trial = msgspec.structs.replace(cost, kept_share=share)
        by_case = fit_profiler.errors(found, trial, lambda recording: recording.stopped_ms)
        return float(np.mean([np.mean(np.square(case)) for case in by_case.values()]))

    around = [round(cost.kept_share + step, 2) for step in (-0.04, -0.01, 0.0, 0.01, 0.04)]
    assert min(around, key=loss) == cost.kept_share


def test_samples_give_the_shipped_cost_models() -> None:
    """Two small families are fitted again: the same rows, and the same prices."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'lumos-sim[fit]'")
    import fit_costs

    families = ("gelu", "softmax_fwd")
    samples = [sample for sample in fit_costs.h200_samples() if sample.operator.kind in families]
    regressors, _ = fit_costs.fit(gpu_named("h200"), samples)
    model = cost_model("h200")
    for family in families:
        assert regressors[family].rows == model.regressors[family].rows
    operators = [sample.operator for sample in samples[::7]]
    again = type(model)(model.gpu, "h200", regressors)
    assert again.us_of_all(operators) == pytest.approx(model.us_of_all(operators), rel=0.02)


def test_samples_give_the_shipped_prices_of_aten_operators() -> None:
    assert fit_aten.derived_laws() == shipped("aten_costs.json")["families"]


def test_measured_calls_give_the_shipped_costs_of_the_host() -> None:
    assert fit_host.derived() == shipped("host_costs.json")["us"]
