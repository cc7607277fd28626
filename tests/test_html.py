"""HTML reports: one file that asks nothing of any network, holds its numbers without scripts, and draws in Chromium."""

from __future__ import annotations

import html
import importlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from browser import LAPTOP, Browser, find_browser, open_browser
from browser import Page as Tab
from commands import lumos_here
from lumos import Scale, read_job, replay
from lumos.analysis.comparison import Comparison
from lumos.analysis.replay import Replay
from lumos.analysis.slowdown import slowdown
from lumos.analysis.slowdown_causes import diagnose
from lumos.analysis.slowdown_jobs import job_of_table
from lumos.cli.main import app
from lumos.prediction.bill import Tariff
from lumos.prediction.prediction import Prediction, predict
from lumos.read.operation_table import read_operation_table
from lumos.report.html.allocations import thinned
from lumos.report.html.charts import Bars, LaneView, Line, Lines, Points, Scatter, Series, Timeline
from lumos.report.html.comparison_page import comparison_page
from lumos.report.html.memory_view import _integrated
from lumos.report.html.notebook import comparison_snippet, prediction_snippet, replay_snippet
from lumos.report.html.page import Page, Section, render, write_page
from lumos.report.html.prediction_page import prediction_page
from lumos.report.html.replay_page import replay_page
from lumos.report.html.run_view import with_run
from lumos.report.html.search_page import search_page
from lumos.report.html.slowdown_page import slowdown_page
from lumos.report.html.svg import svg_of
from lumos.report.html.timeline import MOST_BOXES, Lanes, Tasks, draw_timeline
from lumos.report.html.timeline import Path as CriticalPath
from lumos.report.predictions import operators_table
from lumos.report.replays import replay_cards
from lumos.report.searches import search_cards
from lumos.report.table import Card, Column, Row, Table, ms_columns
from lumos.report.terminal.style import rendered
from lumos.report.wording import (
    count_text,
    gib_text,
    money_text,
    ms_text,
    number_text,
    parameters_text,
    rate_text,
    si_text,
)
from lumos.risk.monte_carlo import slowed
from lumos.risk.whole_run import whole_run
from lumos.setup import read_setup
from support import PATIENCE_S, call, header, kernel, training_run, write_trace

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src/lumos/data/example"
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
LARGEST = 6_000_000
PHONE = (390, 844)


@cache
def example() -> Replay:
    return replay(read_job(EXAMPLE))


@cache
def described() -> Prediction:
    return predict(read_setup(ROOT / "examples/llama3-70b.toml"))


BATCH = {"sequences": 128, "tokens": 1 << 20, "why": "stated"}


def search_answer() -> dict[str, Any]:
    """What `lumos search` hands over, made of real forecasts."""
    base = read_setup(ROOT / "examples/llama3-70b.toml", ["cluster.gpus=64", "train.global_batch=128"])
    rows = []
    for tp, pp, vpp in ((8, 4, 5), (4, 4, 5), (8, 8, 5), (8, 4, 1), (8, 2, 1)):
        found = predict(base.replaced({"parallel.tp": tp, "parallel.pp": pp, "parallel.vpp": vpp, "parallel.cp": 1}))
        rows.append({
            "parallel.tp": tp, "parallel.pp": pp, "parallel.vpp": vpp, "step_ms": found.step_ms, "mfu": found.mfu,
            "memory_gib": found.memory.gib()["peak"], "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
            "cost_per_mtoken": None, "value": found.step_ms, "lost_by": "tp 8, not 4",
            "breakdown": found.breakdown.as_dict(),
        })  # fmt: skip
    rows.sort(key=lambda row: row["step_ms"])
    front = [r for r in rows if not any(o["memory_gib"] < r["memory_gib"] for o in rows if o["step_ms"] < r["step_ms"])]
    setup = {"cluster.gpus": 64, "cluster.gpu": "h100", "model.preset": "llama3-70b"}
    return {
        "setup": setup, "evaluated": 480, "seconds": 2.5, "objective": "step_ms", "results": rows, "pareto": front,
        "global_batch": BATCH,
    }  # fmt: skip


KINDS = ("replay", "prediction", "forecast", "comparison", "search", "stragglers")


@cache
def page_of(kind: str) -> Page:
    if kind == "replay":
        return replay_page(example())
    if kind == "prediction":
        return prediction_page(predict(example(), [Scale("comm", 0.5)]))
    if kind == "forecast":
        return prediction_page(described())
    if kind == "search":
        return search_page(search_answer())
    if kind == "stragglers":
        return slowdown_page(diagnose(slowdown(job_of_table(read_operation_table(ROOT / "examples/operations.csv")))))
    if kind == "whole run":
        setup = read_setup(ROOT / "examples/llama3-70b.toml", ["reliability.rates=llama3"])
        found = predict(setup, tariff=Tariff(tokens=15e12, gpu_hour=2.0))
        return with_run(prediction_page(found), whole_run(found))
    return comparison_page(Comparison(example(), example_but_one()))


@cache
def example_but_one() -> Replay:
    """The example without its slow rank."""
    return replay(read_job(EXAMPLE, "rank[013]*"))


def text_of(page: Page) -> str:
    return "".join(render(page))


def without_plotly(text: str) -> str:
    return re.sub(r'id="plotly">[^<]*<', 'id="plotly"><', text)


# ---------------------------------------------------------------------- what is in the file


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_one_file_that_names_no_other(kind: str) -> None:
    text = text_of(page_of(kind))
    assert len(text.encode()) < LARGEST
    links = re.findall(r'\b(?:src|href|action|data|poster)="([^"]*)"', text)
    assert all(link.startswith(("#", "data:,")) for link in links)
    assert not re.search(r"https?://|@import|url\(", without_plotly(text))
    assert "default-src 'none'" in text
    assert "unsafe-eval" not in text
    assert re.search(r"script-src 'sha256-[^;]*' 'sha256-[^;]*'; ", text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_chart_stands_beside_a_table(kind: str) -> None:
    page = page_of(kind)
    assert page.figures
    assert all(section.tables for section in page.sections if section.figures)
    assert all(table.rows for section in page.sections for table in section.tables)


def test_the_replay_page_has_every_part_that_was_promised() -> None:
    titles = [section.title for section in page_of("replay").sections]
    assert titles == ["What would help", "Step breakdown", "Which rank is slow", "Timeline", "Critical path",
                      "Collectives", "Operators and kernels", "GPU utilisation", "Memory over time",
                      "Steps"]  # fmt: skip


def test_the_forecast_page_has_every_part_that_was_promised() -> None:
    titles = [section.title for section in page_of("forecast").sections]
    assert titles == ["Step breakdown", "Timeline", "Critical path", "Collectives", "Memory by stage",
                      "Roofline of operators", "Setup"]  # fmt: skip


def test_the_tables_say_what_the_json_says() -> None:
    answer = example().as_dict()
    text = text_of(page_of("replay"))
    for row in answer["per_rank"]:
        cells = [f"{row[key]:,.3f}" for key in ("exposed_compute_ms", "exposed_comm_ms", "overlapped_ms", "other_ms")]
        assert re.search(f'data-rank="{row["rank"]}".*' + ".*".join(map(re.escape, cells)), text)
    assert f"{answer['stragglers'][0]['costs_others_ms']:.3f}" in text
    assert html.escape(answer["stragglers"][0]["why"]) in text


@pytest.mark.parametrize("kind", ["replay", "prediction", "forecast"])
def test_the_parts_of_every_rank_add_up_to_its_step(kind: str) -> None:
    section = next(s for s in page_of(kind).sections if s.title == "Step breakdown")
    for row in section.tables[0].rows:
        *parts, step = (float(value) for value in row.values[1:])
        assert sum(parts) == pytest.approx(step, rel=1e-9)
    if kind == "forecast":
        steps = [float(row.values[-1]) for row in section.tables[0].rows]
        assert steps == pytest.approx([described().step_ms] * 5, rel=1e-6), "four stages and their mean"


@pytest.mark.parametrize("kind", ["replay", "prediction", "forecast"])
def test_the_critical_path_adds_up_to_what_is_shown_below_it(kind: str) -> None:
    section = next(s for s in page_of(kind).sections if s.title == "Critical path")
    by_kind, *_ = section.tables
    *parts, total = by_kind.rows
    assert total.is_total
    assert sum(float(row.values[1] or 0) for row in parts) == pytest.approx(total.values[1])


def test_the_critical_path_of_a_described_step_is_the_step() -> None:
    section = next(s for s in page_of("forecast").sections if s.title == "Critical path")
    for table, column in ((section.tables[0], 1), (section.tables[2], 2)):
        total = sum(float(row.values[column] or 0) for row in table.rows if not row.is_total)
        assert total == pytest.approx(described().step_ms, rel=1e-6)


def test_the_curve_of_memory_reaches_the_peak_of_its_stage_and_never_passes_it() -> None:
    section = next(s for s in page_of("forecast").sections if s.title == "Memory by stage")
    curves = section.figures[1].chart
    assert isinstance(curves, Lines)
    for line, stage in zip(curves.lines, described().memory.stages, strict=False):
        assert 0.9 * stage.peak / 2**30 < max(line.y) <= stage.peak / 2**30 + 1e-9
        assert line.y[0] == pytest.approx((stage.peak - stage.activations) / 2**30, rel=1e-6)


def test_no_operator_is_priced_above_the_roof_by_more_than_its_cache() -> None:
    section = next(s for s in page_of("forecast").sections if s.title == "Roofline of operators")
    (table,) = section.tables
    share = [float(row.values[10] or 0) for row in table.rows]
    assert max(share) <= 100
    assert sum(float(row.values[6] or 0) for row in table.rows) == pytest.approx(100)


@pytest.mark.data
def test_a_changed_run_says_what_was_understood_of_its_trace(shared_data: Path) -> None:
    setup = read_setup(ROOT / "examples/one-h200.toml")
    run = replay(read_job(shared_data / "h200/single/base_l8_h2048_s2048_b2.pt.trace.json.gz"))
    page = prediction_page(predict(run, setup=setup.replaced({"model.layers": 16}), traced=setup))
    assert [card.label for card in page.cards[:3]] == ["predicted step", "as recorded", "change"]
    assert page.sections[-1].title == "What was understood of the trace"
    assert len(page.sections[-1].tables[0].rows) == 3


def test_a_page_whose_run_has_nothing_in_it_is_written_all_the_same(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "cpu.json", [e for e in training_run(1) if e.get("cat") == "cpu_op"], header())
    page = replay_page(replay(read_job(path)))
    write_page(tmp_path / "cpu.html", page)
    assert "nothing to wait for" in (tmp_path / "cpu.html").read_text()


def test_utilisation_of_a_step_of_microseconds_is_a_curve_with_its_busy_share_as_mean(tmp_path: Path) -> None:
    """One bin of a millisecond would be one point, of which no line can be drawn, and mostly after the step."""
    run = replay(read_job(write_trace(tmp_path / "short.json", training_run(1), header())))
    use, steps, trace = run.utilisation, run.recorded_steps, run.execution.trace
    low, high = int(steps.start.min()), int(steps.end.max())
    assert high - low < 1_000_000
    assert use.share.shape[1] >= 20
    assert use.bin_ms * use.share.shape[1] == pytest.approx((high - low) / 1e6)
    busy = np.zeros(high - low, bool)
    for row in np.flatnonzero(trace.on_gpu).tolist():
        busy[max(0, trace.start[row] - low) : max(0, trace.end[row] - low)] = True
    assert use.mean == pytest.approx(float(busy.mean()), abs=1e-6)


def test_utilisation_does_not_depend_on_when_the_run_was_recorded(tmp_path: Path) -> None:
    """Nanoseconds since 1970 have no exact floating-point numbers."""
    events = training_run(2)
    for name, base in (("zero", 0), ("2026", 1_790_857_026_000_000_123)):
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name / "run.json", events, header() | {"baseTimeNanoseconds": base})
    zero, later = (replay(read_job(tmp_path / name / "run.json")).utilisation for name in ("zero", "2026"))
    assert np.array_equal(zero.share, later.share)


def test_a_total_has_no_bar_that_would_run_over_its_number() -> None:
    table = Table("", [Column("share", 1, bar=True)], [Row([40.0]), Row([60.0]), Row([100.0], is_total=True)])
    assert [round(cell.bar) for _, (cell,) in table.body()] == [67, 100, -1]


def test_what_slow_parts_add_is_called_so_on_the_critical_path() -> None:
    found, costs = slowed(described(), ["rank=7,factor=1.3"])
    by_kind = found.critical_path.by_kind
    assert by_kind["slow parts"] == pytest.approx(costs[0]["delay_ms"])
    assert by_kind["unexplained"] == 0
    assert sum(by_kind.values()) == pytest.approx(found.step_ms)
    assert "slow parts" not in described().critical_path.by_kind
    path = next(s for s in prediction_page(found).sections if s.title == "Critical path")
    kinds = [row.values[0] for row in path.tables[0].rows]
    assert kinds == ["compute", "comm", "latency", "slow parts", "critical path"]


def test_a_predicted_step_has_no_name_of_the_profiler() -> None:
    captions = {kind: [figure.title for figure in page_of(kind).figures] for kind in ("replay", "forecast")}
    assert any(caption.startswith("ProfilerStep#2, ") for caption in captions["replay"])
    assert any(caption.startswith("predicted step, ") for caption in captions["forecast"])


def test_bars_that_are_too_many_for_their_labels_have_some_below() -> None:
    labels = [f"day {i} to {i + 1}" for i in range(60)]
    text = str(svg_of(Bars(labels, [Series("training", "compute", [1.0] * 60)])))
    assert 3 < len(re.findall(r">day \d+ to \d+</text>", text)) < 20


def test_variants_have_a_table_of_their_own_and_are_no_card() -> None:
    rows = [row | {"variants": [{}, {}], "differ": {"parallel.zero": [1, 2]}} for row in search_answer()["results"]]
    answer = search_answer() | {"families": rows, "tolerance": 0.02, "tried": {"cluster.gpus": [32, 64]}}
    page = search_page(answer)
    assert "gpus 32, 64" in page.subtitle
    assert "variants" not in [card.label for card in page.cards]
    shown = {table.caption: table for table in page.sections[0].tables}
    assert "variants" not in [column.title for column in shown["configurations"].columns]
    assert shown["variants"].rows[0].values == [1, "2", "zero 1, 2"]


def test_what_is_not_known_is_a_dash_and_is_sorted_last() -> None:
    table = Table("", [Column("any", 2)], [Row([None]), Row([float("nan")]), Row([float("inf")]), Row([-1.5])])
    assert [(cell.text, cell.sort) for _, (cell,) in table.body()] == [("–", "")] * 3 + [("−1.50", "-1.5")]


def test_a_search_without_a_result_says_so() -> None:
    text = text_of(search_page({"setup": {}, "evaluated": 12, "seconds": 0.1, "objective": "step_ms", "results": [],
                                "global_batch": BATCH}))  # fmt: skip
    assert "no configuration is valid, fits and meets the deadline" in text


def test_a_search_names_only_the_keys_that_differ() -> None:
    table = page_of("search").sections[0].tables[0]
    titles = [column.title for column in table.columns]
    assert titles[:7] == ["#", "step, ms", "memory, GiB", "MFU, %", "tp", "pp", "vpp"], "what decides is seen first"
    assert "cost per Mtoken" not in [column.title for column in table.columns]  # no price was given


def test_the_search_that_is_pictured_in_the_documentation_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = search_page(importlib.import_module("report_pages").searched())
    assert len(page.sections[0].tables[0].rows) == 10
    assert all(figure.chart.as_dict() for figure in page.figures)


# ---------------------------------------------------------------------- untrusted names


@pytest.fixture
def hostile_run(tmp_path: Path) -> Replay:
    events = [
        event | {"name": HOSTILE + event["name"]} if event.get("cat") in ("kernel", "cpu_op") else event
        for event in training_run()
    ]
    return replay(read_job(write_trace(tmp_path / "hostile.json", events, header())))


def test_names_from_a_trace_are_text_and_nothing_else(hostile_run: Replay) -> None:
    text = text_of(replay_page(hostile_run))
    assert "<script>window.hacked" not in text
    assert "<img" not in text
    assert html.escape("</script><script>window.hacked=1", quote=True) in text
    charts = re.search(r'id="charts">([^<]*)</script>', text)
    assert charts is not None
    assert HOSTILE[:40] in json.dumps(json.loads(charts[1]), ensure_ascii=False)
    for snippet in (replay_snippet(hostile_run), prediction_snippet(predict(hostile_run, []))):
        assert "<script" not in snippet
        assert "<img" not in snippet


def test_a_file_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    write_trace(tmp_path / "\udcff.json", training_run(), header())
    done = lumos_here("replay", "\udcff.json", "-o", "answer.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "?.json" in (tmp_path / "answer.html").read_text("utf-8")


@settings(max_examples=40)
@given(st.text(max_size=80))
def test_no_text_escapes_from_a_page(name: str) -> None:
    table = Table(name, [Column(name)], [Row([name], rank=name, kind=name)], name)
    section = Section("Any", name, tables=[table])
    text = text_of(Page(name, name, [Card(name, name, name)], [section], [name], [name, name], name, [name]))
    shell = text_of(Page("", "", [Card("", "", "")], [Section("Any", ".", tables=[Table("", [Column("")], [])])]))
    allowed = {"tr", "td", "span", "p", "option", "select", "label", "fieldset", "legend", "input", "i"}
    assert set(re.findall(r"<([a-zA-Z]+)", text)) <= set(re.findall(r"<([a-zA-Z]+)", shell)) | allowed
    assert text.count("<script") == 3


# ---------------------------------------------------------------------- the timeline


@st.composite
def lanes_of_tasks(draw: st.DrawFn) -> Tasks:
    """Tasks that do not overlap on their lanes, some of them far too short to be seen."""
    lane, start, end = [], [], []
    for index in range(draw(st.integers(1, 40))):
        now = 0.0
        for gap, length in draw(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 2000)), max_size=30)):
            lane.append(index)
            start.append(now + gap)
            now += gap + length
            end.append(now)
    size = len(lane)
    kind = np.arange(size) % 3
    return Tasks(np.array(lane, np.int64), np.array(start, float), np.array(end, float), kind, np.arange(size))


def draw_all(tasks: Tasks, window: tuple[float, float]) -> Any:
    count = 40
    lanes = Lanes([LaneView(f"lane {i}", "0") for i in range(count)], np.arange(count) % 2 == 0, np.arange(count))
    none = CriticalPath(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    return draw_timeline(tasks, none, lanes, ("a", "b", "c"), [f"task {i}" for i in range(len(tasks))], window)


@settings(max_examples=40)
@given(lanes_of_tasks())
def test_boxes_hold_every_task_of_the_lanes_that_are_shown(tasks: Tasks) -> None:
    end = float(tasks.end.max(initial=1.0))
    drawn = draw_all(tasks, (0.0, end))
    chart: Timeline = drawn.chart
    assert sum(chart.count) == drawn.tasks
    shown = {lane.label for lane in chart.lanes}
    mine = np.array([f"lane {i}" in shown for i in tasks.lane], bool)
    assert np.sum(chart.busy) * 1e6 == pytest.approx(float((tasks.end - tasks.start)[mine].sum()))
    assert sum(use.busy_ms for use in drawn.uses) == pytest.approx(float(np.sum(chart.busy)))
    for lane in range(len(chart.lanes)):
        at = np.asarray(chart.lane) == lane
        begins, ends = np.asarray(chart.start)[at], (np.asarray(chart.start) + np.asarray(chart.length))[at]
        assert (begins[1:] >= ends[:-1] - 1e-9).all()
        assert (begins >= 0).all()
        assert (ends <= end / 1e6 + 1e-9).all()


def test_a_hundred_thousand_tasks_become_few_boxes_that_count_them() -> None:
    start = np.arange(100_000) * 100.0
    lane = np.repeat(np.arange(20), 5_000)
    tasks = Tasks(lane, start % 500_000, start % 500_000 + 60, np.zeros(100_000, np.int64), np.arange(100_000))
    drawn = draw_all(tasks, (0.0, 500_000.0))
    assert len(drawn.chart.lane) <= MOST_BOXES
    assert sum(drawn.chart.count) == 100_000
    assert "100,000 tasks in" in drawn.words
    assert "share a paler box" in drawn.words
    for ns, shown in ((512.3, "0.51"), (5_123.0, "5.1"), (51_230.0, "51"), (512_300.0, "510"), (5_123_000.0, "5,100")):
        assert f"neighbours shorter than {shown} µs share" in drawn._replace(too_short_ns=ns).words


def test_a_task_that_can_be_seen_keeps_its_own_box_among_thousands_that_cannot() -> None:
    small = np.arange(50_000) * 20.0
    start, end = np.append(small, 1_000_000.0), np.append(small + 10, 1_400_000.0)
    kind, name = np.append(np.zeros(50_000), 1).astype(int), np.arange(50_001)
    drawn = draw_all(Tasks(np.zeros(50_001, np.int64), start, end, kind, name), (0.0, 1_400_000.0))
    last = len(drawn.chart.lane) - 1
    assert drawn.chart.count[last] == 1
    assert drawn.chart.names[drawn.chart.name[last]] == "task 50000"


# ---------------------------------------------------------------------- memory


@given(st.lists(st.floats(0, 100), min_size=1, max_size=400), st.integers(4, 50))
def test_thinning_keeps_the_peak_and_both_ends(values: list[float], most: int) -> None:
    x, y = thinned(np.arange(len(values), dtype=float), np.array(values), most)
    assert y.max() == max(values)
    assert (x[0], x[-1]) == (0, len(values) - 1)
    assert len(x) <= max(most + 1, min(len(values), most + 1))


@given(st.lists(st.tuples(st.floats(0, 90), st.floats(1, 10), st.floats(0, 5)), max_size=20))
def test_what_every_forward_brings_is_there_at_the_end(ramps: list[tuple[float, float, float]]) -> None:
    times, held = _integrated([(low, low + length, height) for low, length, height in ramps], 101.0)
    assert held[-1] == pytest.approx(sum(height for *_, height in ramps), abs=1e-6)
    assert (np.diff(held) >= -1e-9).all()
    assert (np.diff(times) >= 0).all()


def memory_event(ts: float, held: int, device: int = 1) -> dict[str, Any]:
    told = {"Total Allocated": held, "Total Reserved": 2 * held, "Bytes": 1, "Device Type": device, "Device Id": 0}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 100, "tid": 1, "ts": ts, "args": told}


def test_recorded_memory_is_shown_with_its_peak(tmp_path: Path) -> None:
    memory = [memory_event(10 * i, (i % 7) << 30) for i in range(50)] + [memory_event(55, 100 << 30, device=0)]
    odd = {"ph": "i", "name": "[memory]", "ts": "soon", "args": {"Total Allocated": "much", "Device Type": 1}}
    path = write_trace(tmp_path / "memory.json", [*training_run(), *memory, odd], header())
    section = next(s for s in replay_page(replay(read_job(path))).sections if s.title == "Memory over time")
    (row,) = section.tables[0].rows
    assert row.values[2] == 6.0
    assert row.values[5] == 50


def test_a_trace_without_memory_says_how_to_record_it() -> None:
    section = next(s for s in page_of("replay").sections if s.title == "Memory over time")
    assert "profile_memory=True" in section.text
    assert not section.figures


# ---------------------------------------------------------------------- commands and notebooks


@pytest.mark.parametrize("arguments", [["replay", EXAMPLE], ["compare", EXAMPLE, EXAMPLE]], ids=lambda a: a[0])
def test_the_commands_write_reports(arguments: list[Any], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*map(str, arguments), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_notebook_shows_small_static_tables() -> None:
    changed = predict(example(), [Scale("compute", 0.5)])
    assert example()._repr_html_() == replay_snippet(example())
    assert changed._repr_html_() == prediction_snippet(changed)
    for snippet in (
        replay_snippet(example()), prediction_snippet(changed), prediction_snippet(described()),
        comparison_snippet(Comparison(example(), example())),
    ):  # fmt: skip
        assert "<script" not in snippet
        assert 1_000 < len(snippet) < 40_000
        assert snippet.count("<table") >= 2
        assert snippet.count("<table") == snippet.count("</table>")


# ---------------------------------------------------------------------- a large trace


@pytest.mark.data
def test_the_report_of_200_000_tasks_is_small(shared_data: Path, tmp_path: Path) -> None:
    run = replay(read_job(shared_data / "public/hta/df_index_resolver/df_index_resolver.json.gz"))
    _ = run.path_summary, run.clean_ms, run.never_profiled_ms
    assert len(run.execution.graph) > 200_000
    write_page(tmp_path / "large.html", replay_page(run))
    assert (tmp_path / "large.html").stat().st_size < LARGEST


# ---------------------------------------------------------------------- what is said of other devices


@pytest.mark.parametrize(("name", "is_nvidia"), [("cudaLaunchKernel", True), ("hipLaunchKernel", False)])
def test_only_traces_of_nvidia_gpus_speak_of_cupti(name: str, is_nvidia: bool, tmp_path: Path) -> None:
    """The cost of the profiler was measured with CUPTI: of roctracer it is an assumption, and has no interval."""
    events = [call(name, 0, 5, 1), kernel("gemm", 20, 100, 1), call(name, 40, 5, 2), kernel("gemm", 130, 100, 2)]
    run = replay(read_job(write_trace(tmp_path / "a.json", events)))
    words = " ".join(card.note for card in replay_cards(run))
    assert ("CUPTI" in words, "± 11 %" in words) == (is_nvidia, is_nvidia)
    assert ("if profiling costs what it does on NVIDIA GPUs" in words) != is_nvidia
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "a.json")]).output
    assert "time by kernel" in shown
    assert "time by operator" not in shown  # none was recorded, so no table without rows


def test_what_is_known_by_its_bytes_is_shown_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('model.preset = "gpt3-125m"\ntrain = {seq = 2048, framework = "neox"}\n')
    shapes = {row.values[0]: row.values[1] for row in operators_table(predict(read_setup(tmp_path / "a.toml"))).rows}
    assert shapes["loss"] == "3.91 GB"


@pytest.mark.parametrize(("cp", "length"), [(1, ""), (2, "of length 5793")])
def test_a_length_of_attention_that_the_run_does_not_have_is_explained(tmp_path: Path, cp: int, length: str) -> None:
    (tmp_path / "a.toml").write_text(
        f'model.preset = "llama3-8b"\ntrain.seq = 8192\nparallel.cp = {cp}\ncluster.gpus = 8\n'
    )
    found = predict(read_setup(tmp_path / "a.toml"))
    for text in (operators_table(found).left_out, text_of(prediction_page(found))):
        assert ("causal attention with the same work" in text) == bool(length)
        assert length in text


@pytest.mark.parametrize(("objective", "words"), [("time", "least time per token"), ("cost", "least cost per token")])
def test_the_best_of_a_search_is_named_after_what_it_minimises(objective: str, words: str) -> None:
    cards = {card.label: card for card in search_cards(search_answer() | {"objective": objective})}
    assert cards["best"].note.startswith(f"{words}: ")
    assert cards["best"].value.endswith(" per step")


# ---------------------------------------------------------------------- narrow terminals


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_tables_break_no_word_and_no_number_on_any_terminal(width: int) -> None:
    """Columns that do not fit stand below the others, with the first column again."""
    columns = [Column("#"), Column("schedule"), *(Column(f"number {i}, ms", 1) for i in range(6)), Column("variants")]
    row = Row(["1", "zero-bubble-v", *(123_456.7 + i for i in range(6)), "10: cp 1, 2; recompute none, selective"])
    text = io.StringIO()
    Console(file=text, width=width).print(rendered(Table("the best by time of all that were tried", columns, [row])))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    expected = {"zero-bubble-v", "selective", *(f"{123_456.7 + i:,.1f}" for i in range(6))}
    assert expected <= set(words)
    assert words.count("#") == words.count("1") == sum(line.startswith("#") for line in lines) > (width < 80)


# ---------------------------------------------------------------------- units that people read


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0.0, "0.00 ms"), (0.0042, "4.20 µs"), (117.841, "117.84 ms"), (1234.5, "1.234 s"), (14890.0, "14.89 s"),
        (119_000.0, "119.00 s"), (150_000.0, "2 min 30 s"), (11_508_887.49, "3 h 11 min 49 s"),
        (3 * 86400e3, "3.0 days"), (308.14 * 86400e3, "308.1 days"), (20_967.36 * 86400e3, "57.4 years"),
        (-0.0, "0.00 ms"), (-1e-7, "0.00 ms"), (-0.07, "−0.07 ms"), (-150_000.0, "−2 min 30 s"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_a_time_is_written_in_the_unit_that_people_use(ms: float, text: str) -> None:
    assert ms_text(ms) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (si_text(1.707e7, "Wh"), "17.1 MWh"), (si_text(67.1e6, "B"), "67.1 MB"), (si_text(-0.0, "B"), "0.00 B"),
        (count_text(8_388_608, "tokens"), "8,388,608 tokens"), (count_text(1.6384e9, "tokens"), "1.64 B tokens"),
        (parameters_text(1_026_408_232_448, 32_863_846_912), "1.03 T parameters (32.9 B active)"),
        (parameters_text(999_600_000_000), "1 T parameters"), (parameters_text(124_439_808), "0.124 B parameters"),
        (count_text(15e12, "tokens"), "15.0 T tokens"), (gib_text(51.32), "51.3 GiB"), (gib_text(10_022), "9.79 TiB"),
        (money_text(9_466_206.2), "9,466,206"), (money_text(-0.0), "0.00"), (rate_text(1234.5), "1,234"),
        (rate_text(0.00412), "0.00412"), (number_text(-0.04, 1), "0.0"), (number_text(-0.04, 1, signed=True), "+0.0"),
    ],
)  # fmt: skip
def test_amounts_have_prefixes_and_no_exponents(text: str, expected: str) -> None:
    assert text == expected


def test_a_column_of_long_times_has_their_units_and_one_of_short_times_has_milliseconds() -> None:
    rows = [Row(["a", 11_508_887.49]), Row(["b", 1.5])]
    (long,), (short,) = ms_columns(["step, ms"], rows), ms_columns(["step, ms"], rows[1:])
    cells = [cells[1].text for _, cells in Table("", [Column("name"), long], rows).body()]
    assert (long.title, cells) == ("step", ["3 h 11 min 49 s", "1.50 ms"])
    assert short.title == "step, ms"


@pytest.mark.parametrize("option", ["table", "page"])
def test_the_bill_is_in_every_answer(option: str, tmp_path: Path) -> None:
    setup, page = str(ROOT / "examples/llama3-70b.toml"), tmp_path / "page.html"
    done = CliRunner().invoke(app, ["predict", setup, "--price", "2.5", "--tokens", "15T", "-o", str(page)])
    text = done.stdout if option == "table" else re.sub(r"<[^>]+>", " ", page.read_text().split("<script", 1)[0])
    for word in ("training time", "days", "15.0 T tokens", "GPU-hours", "GWh", "money", "a million tokens"):
        assert word in text


# ---------------------------------------------------------------------- pictures, before any script


def pictures_of(text: str) -> list[ElementTree.Element]:
    """The static charts of a page, parsed."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_chart_is_a_picture_before_any_script_runs(kind: str) -> None:
    page = page_of(kind)
    text = text_of(page)
    body = text[: text.index('<script type="application/json"')]
    pictures = pictures_of(body)
    assert len(pictures) == len(page.figures)
    for picture in pictures:
        shapes = picture.findall("rect") + picture.findall("circle") + picture.findall("path")
        assert len(shapes) > 1
    assert not re.search(r'class="chart[^>]*hidden', body)


def test_plotly_is_unpacked_only_when_interactive_charts_are_asked_for() -> None:
    script = (ROOT / "src/lumos/data/html/report.js").read_text()
    start = script[script.rindex("  listen();") :]
    assert "load()" not in start
    assert "wake()" not in start
    assert script.count("load()") == 2  # its definition, and in drawAll


@pytest.mark.parametrize("asked", ["button", "filter", "chart"])
def test_what_asks_for_interactive_charts_has_them_drawn_once(asked: str, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("no node on this machine, to run the script of a report without a browser")
    write_page(tmp_path / "page.html", page_of("replay"))
    command = ["node", str(ROOT / "tests/report_dom.js"), str(tmp_path / "page.html"), asked]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout)
    assert found["before"] == {"charts": "pictures", "page": "ready", "drawings": 0}
    assert found["after"]["charts"] == "drawn"
    assert found["after"]["drawings"] == found["charts"]
    assert found["drawn"][chart_of(page_of("replay"), Bars)] == (1 if asked == "filter" else 4)


def test_a_picture_has_the_lengths_of_its_values() -> None:
    chart = Bars(["a", "b"], [Series("x", "compute", [1.0, 2.0]), Series("y", "comm", [3.0, 0.0])], "ms")
    (picture,) = pictures_of(str(svg_of(chart)))
    bars = [float(rect.get("width", 0)) for rect in picture.findall("rect") if rect.find("title") is not None]
    first, second, third, fourth = bars
    assert (second / first, third / first, fourth) == (pytest.approx(3, rel=0.01), pytest.approx(2, rel=0.01), 0)


@pytest.mark.parametrize(
    "chart",
    [
        Bars([], [Series("x", "compute", [])]), Bars(["a"], []), Bars(["a"], [Series("x", "compute", [float("nan")])]),
        Bars(["a"], [Series("x", "change", [-1.0])]), Bars(list("ab") * 50, [Series("x", "compute", [0.0] * 100)]),
        Lines("x", "y", []), Lines("x", "y", [Line("l", "compute", [0.0], [float("inf")])]),
        Scatter("x", "y", []), Scatter("x", "y", [Points("p", "plain", [0.0, 1.0], [0.0, 1.0])], logarithmic=True),
        Scatter("x", "y", [Points("p", "plain", [1e-9, 1e12], [5.0, 5.0], joined=True)], logarithmic=True),
    ],
)  # fmt: skip
def test_a_picture_of_nothing_or_of_odd_values_is_still_a_picture(chart: Any) -> None:
    assert len(pictures_of(str(svg_of(chart)))) == 1


def test_names_in_pictures_are_text() -> None:
    evil = "</text></svg><script>alert(1)</script>"
    chart = Bars([evil], [Series(evil, "compute", [1.0]), Series("x", 'a;} body{"', [1.0])], evil)
    text = str(svg_of(chart))
    assert "<script" not in text
    assert "body{" not in text
    assert len(pictures_of(text)) == 1


# ---------------------------------------------------------------------- a real browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not find_browser():
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    with open_browser() as found:
        yield found


@contextmanager
def opened(browser: Browser, page: Page, folder: Path, **how: Any) -> Iterator[Tab]:
    write_page(folder / "page.html", page)
    with browser.open(folder / "page.html", **how) as tab:
        tab.draw_charts()
        yield tab


@pytest.fixture(scope="module")
def one_tab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """The replay page, for one test after the other."""
    with opened(browser, page_of("replay"), tmp_path_factory.mktemp("page")) as tab:
        yield tab


@pytest.fixture
def tab(one_tab: Tab) -> Tab:
    """The replay page with nothing filtered."""
    one_tab.click("#reset")
    one_tab.errors.clear()
    return one_tab


def chart_of(page: Page, kind: type) -> int:
    return next(i for i, figure in enumerate(page.figures) if isinstance(figure.chart, kind))


def drawn(tab: Tab, index: int) -> int:
    return int(tab.value(f"Number(document.querySelector('#chart-{index}').dataset.drawn)"))


def rows_shown(tab: Tab) -> int:
    return int(tab.value("document.querySelectorAll('tbody tr:not([hidden])').length"))


@pytest.mark.parametrize("kind", KINDS)
def test_chromium_draws_every_chart_without_error_or_request(
    browser: Browser, one_tab: Tab, kind: str, tmp_path: Path
) -> None:
    page = page_of(kind)
    with nullcontext(one_tab) if kind == "replay" else opened(browser, page, tmp_path) as tab:
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith("data:")] == [tab.value("location.href")]
        for index in range(len(page.figures)):
            marks = (".barlayer path", ".scatterlayer path", ".heatmaplayer image")  # a heat map is an image
            layers = ", ".join(f"#chart-{index} {mark}" for mark in marks)
            assert drawn(tab, index) > 0
            assert tab.value(f"document.querySelectorAll('{layers}').length") > 0
        assert tab.value("document.documentElement.scrollWidth") <= LAPTOP[0]  # nothing sticks out


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_on_a_phone_is_as_wide_as_the_phone_and_its_charts_can_be_read(
    browser: Browser, kind: str, tmp_path: Path
) -> None:
    write_page(tmp_path / "page.html", page_of(kind))
    with browser.open(tmp_path / "page.html", size=PHONE) as tab:
        assert tab.value("document.documentElement.scrollWidth") <= PHONE[0]
        texts = "[...document.querySelectorAll('.chart svg.static text')].filter(text => text.textContent)"
        tall = "Math.max(text.getBoundingClientRect().width, text.getBoundingClientRect().height)"
        heights = tab.value(f"{texts}.map(text => {tall})")
        assert min(heights) > 5


@pytest.mark.parametrize("kind", [*KINDS, "whole run"])
def test_labels_and_legends_of_interactive_charts_fit_on_a_phone(browser: Browser, kind: str, tmp_path: Path) -> None:
    """No legend scrolls or lies below the tool bar, and labels of neighbouring bars do not overlap."""
    with opened(browser, page_of(kind), tmp_path, size=PHONE) as tab:
        scrolls = "[...document.querySelectorAll('.legend .scrollbar')].filter(bar => +bar.getAttribute('height') > 0)"
        assert tab.value(f"{scrolls}.length") == 0
        assert tab.value("[...document.querySelectorAll('.modebar')].every(bar => !bar.offsetParent)")
        for index in range(len(page_of(kind).figures)):
            texts = f"[...document.querySelectorAll('#chart-{index} .xtick text')]"
            places = tab.value(f"{texts}.map(text => text.getBoundingClientRect()).map(box => [box.left, box.right])")
            assert all(right <= left + 1 for (_, right), (left, _) in pairwise(sorted(places))), index


def test_a_rank_chosen_takes_the_others_away(tab: Tab) -> None:
    page = page_of("replay")
    timeline, parts = chart_of(page, Timeline), chart_of(page, Bars)
    before = drawn(tab, timeline), drawn(tab, parts), rows_shown(tab)
    tab.value("(r => { r.value = '2'; r.dispatchEvent(new Event('change')); })(document.querySelector('#rank'))")
    after = drawn(tab, timeline), drawn(tab, parts), rows_shown(tab)
    assert 0 < after[0] < before[0]
    assert (before[1], after[1]) == (4, 1)
    assert after[2] < before[2]
    tab.click("#reset")
    assert (drawn(tab, timeline), drawn(tab, parts), rows_shown(tab)) == before


def test_a_kind_clicked_away_is_neither_drawn_nor_listed(tab: Tab) -> None:
    page = page_of("replay")
    before = drawn(tab, chart_of(page, Timeline)), rows_shown(tab)
    tab.click("input[name=kind][value=operator]")
    assert drawn(tab, chart_of(page, Timeline)) < before[0]
    assert rows_shown(tab) < before[1]
    assert tab.value("document.querySelectorAll('tr[data-kind=operator]:not([hidden])').length") == 0
    assert tab.errors == []


def test_a_name_is_found_in_tables_and_charts(tab: Tab) -> None:
    page = page_of("replay")
    before = drawn(tab, chart_of(page, Timeline))
    tab.type("#find", "adamw")
    tab.wait_for(f"Number(document.querySelector('#chart-{chart_of(page, Timeline)}').dataset.drawn) < {before}")
    assert rows_shown(tab) > 0
    shown = tab.value("[...document.querySelectorAll('tbody tr:not([hidden])')].map(row => row.textContent)")
    assert all("adamw" in row.lower() for row in shown)


def test_a_heading_clicked_sorts_its_table(tab: Tab) -> None:
    tab.click("#step-breakdown th:nth-child(2) button")
    cells = "#step-breakdown tbody tr:not(.total) td:nth-child(2)"
    column = f"[...document.querySelectorAll('{cells}')].map(cell => Number(cell.dataset.sort))"
    values = tab.value(column)
    assert values == sorted(values, reverse=True)
    assert len(values) == 4
    tab.click("#step-breakdown th:nth-child(2) button")
    assert tab.value(column) == sorted(values)
    assert tab.value("document.querySelector('#step-breakdown tbody tr:last-child').className") == "total"


def test_the_page_is_dark_where_the_system_is_and_the_button_turns_it(tab: Tab) -> None:
    tab.scheme("dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('#chart-0 text')).fill"
    dark = tab.value(ground), tab.value(ink)
    tab.click("#theme")
    light = tab.value(ground), tab.value(ink)
    tab.scheme("light")
    tab.value("delete document.documentElement.dataset.theme")
    assert _brightness(dark[0]) < 40 < 200 < _brightness(light[0])
    assert _brightness(light[1]) < 60 < 200 < _brightness(dark[1])


def _brightness(colour: str) -> float:
    return float(np.mean([float(v) for v in re.findall(r"[\d.]+", colour)[:3]]))


def test_tables_are_there_without_scripts(browser: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", page_of("replay"))
    with browser.open(tmp_path / "page.html", scripts=False) as tab:
        tree = tab.send("DOM.getDocument", depth=0)["root"]["nodeId"]
        table = tab.send("DOM.querySelector", nodeId=tree, selector="#step-breakdown table")["nodeId"]
        assert tab.send("DOM.getBoxModel", nodeId=table)["model"]["height"] > 100
        hidden = tab.send("DOM.querySelector", nodeId=tree, selector="#filters")["nodeId"]
        with pytest.raises(AssertionError, match="box model"):
            tab.send("DOM.getBoxModel", nodeId=hidden)


def test_a_print_is_light_and_fits_its_sheet(tab: Tab, tmp_path: Path) -> None:
    tab.scheme("dark")
    tab.value("window.seen = []; addEventListener('beforeprint', () => seen.push("
              "getComputedStyle(document.querySelector('#chart-0 text')).fill,"
              " document.querySelector('#chart-0 svg').getAttribute('width'))); 0")  # fmt: skip
    tab.pdf(tmp_path / "page.pdf")
    ink, width = tab.value("seen")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert _brightness(ink) < 60
    assert float(width) < 720
    assert tab.value("document.documentElement.dataset.theme") is None
    tab.scheme("light")


def test_hostile_names_stay_names_in_chromium(browser: Browser, hostile_run: Replay, tmp_path: Path) -> None:
    with opened(browser, replay_page(hostile_run), tmp_path) as tab:
        assert tab.value("typeof window.hacked") == "undefined"
        assert tab.value("document.querySelectorAll('img, a[href^=http]').length") == 0
        assert tab.errors == []


def test_a_script_that_slipped_in_would_not_run(browser: Browser, tmp_path: Path) -> None:
    text = text_of(replace(page_of("replay"), title="slipped"))
    (tmp_path / "page.html").write_text(text.replace("slipped</h1>", "</h1><script>window.hacked=1</script>"))
    with browser.open(tmp_path / "page.html") as tab:
        assert tab.value("typeof window.hacked") == "undefined"
        assert any("Content Security Policy" in error for error in tab.errors)
