"""Roofline: what the operators of a described or a traced step compute and move, against what the GPU can."""

from __future__ import annotations

import numpy as np

from lumos.prediction.operator_times import OperatorTime
from lumos.prediction.prediction import Prediction
from lumos.program.operators import Operator
from lumos.report import operator_rates
from lumos.report.html.charts import Points, Scatter
from lumos.report.html.page import Figure, Section
from lumos.report.predictions import attention_text
from lumos.report.table import Column, Row, Table
from lumos.setup.gpus import Gpu
from lumos.traced.traced_operators import TracedOperator, TracedOperators

_MOST_ROWS = 200


class _Spot:
    """One operator of one shape: what it computes and moves, and how fast."""

    def __init__(self, row: OperatorTime, operator: Operator) -> None:
        self.name, self.operator, self.count, self.ms, self.bound = row.name, operator, row.count, row.ms, row.bound
        self.us = 1e3 * row.ms / row.count  # of one
        self.tflops, self.gb_s = operator.flops / self.us / 1e6, operator.bytes / self.us / 1e3
        self.intensity = operator.flops / max(operator.bytes, 1.0)
        self.shape = "\u00a0×\u00a0".join(map(str, operator.shape))
        is_attention = operator.kind.startswith("sdpa")
        self.group = "attention" if is_attention else "matmuls" if operator.is_matrix else "data movement"


_COLOURS = {"matmuls": "series-0", "attention": "series-2", "data movement": "series-1"}


def roofline_section(found: Prediction) -> Section:
    """Every operator with work that can be counted, below the roofs of its GPU."""
    if found.step is None:
        return Section("Roofline of operators")
    spots = [_Spot(row, row.work) for row in found.all_operators if isinstance(row.work, Operator)]
    setup = found.step.setup
    gpu, precision = setup.cluster.accelerator, setup.train.precision
    peak = gpu.peak(precision) if gpu.supports(precision) else max(gpu.peak_tflops.values())
    drawn = [spot for spot in spots if spot.operator.flops > 0]
    text = (
        f"Operators of one rank of the first stage, by the work they do a byte. {gpu.name}: {peak:,.0f} TFLOP/s dense "
        f"in {precision}, {gpu.hbm_gb_s:,.0f} GB/s. Bytes are what must at least be read and written once, so an "
        "operator whose data is in the cache may lie above the slope. A larger dot takes more of the step"
        f"{attention_text(found, found.all_operators)}."
    )
    figures = [Figure("roofline of the operators", _chart(drawn, peak, gpu.hbm_gb_s))] if drawn else []
    return Section("Roofline of operators", text, figures, [_table(spots, peak)])


def _chart(spots: list[_Spot], peak: float, hbm_gb_s: float) -> Scatter:
    largest = max(spot.ms for spot in spots)
    parts = []
    for group, colour in _COLOURS.items():
        mine = [spot for spot in spots if spot.group == group]
        if mine:
            parts.append(
                Points(
                    group, colour, [s.intensity for s in mine], [s.tflops for s in mine],
                    [f"{s.name} | {s.operator.kind} {s.shape} | {s.tflops:,.1f} TFLOP/s, {s.gb_s:,.0f} GB/s | "
                     f"{s.count:,} × {s.us:,.1f} µs = {s.ms:,.2f} ms | bound by {s.bound}" for s in mine],
                    [7 + 17 * np.sqrt(s.ms / largest) for s in mine],
                )
            )  # fmt: skip
    roof = _roof([s.intensity for s in spots], peak, hbm_gb_s)
    return Scatter("FLOP a byte", "TFLOP/s", [roof, *parts], logarithmic=True)


def _roof(intensities: list[float], peak: float, hbm_gb_s: float) -> Points:
    """The slope of the memory and the flat of the peak, from left of the first dot to right of the last."""
    ridge = peak * 1e3 / hbm_gb_s
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    return Points("what the GPU can", "plain", [low, ridge, high], [low * hbm_gb_s / 1e3, peak, peak], is_bound=True)


def _table(spots: list[_Spot], peak: float) -> Table:
    total = sum(spot.ms for spot in spots) or 1.0
    columns = [
        Column("operator"), Column("kind"), Column("shape"), Column("count", 0), Column("µs of one", 1),
        Column("ms a step", 2, bar=True), Column("share, %", 1), Column("GFLOP", 2), Column("MB", 1),
        Column("TFLOP/s", 1), Column("of the peak, %", 1), Column("GB/s", 0), Column("bound"),
    ]  # fmt: skip
    rows = [
        Row([s.name, s.operator.kind, s.shape, s.count, s.us, s.ms, 100 * s.ms / total, s.operator.flops / 1e9,
             s.operator.bytes / 1e6, s.tflops, 100 * s.tflops / peak, s.gb_s, s.bound])
        for s in spots[:_MOST_ROWS]
    ]  # fmt: skip
    return Table("operators of one rank of the first stage", columns, rows)


def traced_operators_sections(found: TracedOperators) -> list[Section]:
    """How fast the operators of a traced step ran, below the roofs of its GPU, and in which modules."""
    drawn = [op for op in found.operators if op.intensity and op.us and op.effort.bytes]
    figures = []
    text = "FLOPs and bytes follow from the recorded shapes; bytes are what must at least be read and written once. "
    if found.gpu is not None and drawn:
        figures = [Figure(f"roofline of the operators on {found.gpu.name}", _traced_chart(drawn, found.gpu))]
        text += (
            "Operators that only move data are drawn with one operation for each element. Bound by launch: the GPU "
            "waited longer for the host than it computed, or has less to do than starting a kernel takes. The model is "
            "what our cost model expects of the same call; what an operator takes beyond that is to be gained."
        )
    sections = [Section("Rates of operators", text, figures, [operator_rates.rates_table(found)])]
    if found.modules:
        words = "Operators of the backward pass count for the module whose forward operator they differentiate."
        sections.append(Section("Modules", words, tables=[operator_rates.modules_time_table(found)]))
    return sections


def _traced_chart(ops: list[TracedOperator], gpu: Gpu) -> Scatter:
    largest = max(op.ms for op in ops)
    groups: dict[str, list[TracedOperator]] = {name: [] for name in _COLOURS}
    for op in ops:
        is_attention = op.op is not None and op.op.name.startswith("attention.")
        groups["attention" if is_attention else "matmuls" if op.effort.flops else "data movement"].append(op)
    parts = [
        Points(name, _COLOURS[name], [op.intensity or 0.0 for op in some], [_rate(op) for op in some],
               [_words(op) for op in some], [7 + 17 * np.sqrt(op.ms / largest) for op in some])
        for name, some in groups.items() if some
    ]  # fmt: skip
    peak = max((op.peak_tflops or 0.0 for op in ops), default=0.0) or gpu.peak_tflops.get("bf16", 0.0)
    peak = peak or max(gpu.peak_tflops.values())
    xs = [op.intensity or 0.0 for op in ops]
    return Scatter("FLOP a byte", "TFLOP/s", [_roof(xs, peak, gpu.hbm_gb_s), *parts], logarithmic=True)


def _rate(op: TracedOperator) -> float:
    return (op.effort.flops or op.effort.elements) / op.us / 1e6


def _words(op: TracedOperator) -> str:
    rates = ([f"{op.tflops:,.0f} TFLOP/s"] if op.tflops else []) + ([f"{op.gb_s:,.0f} GB/s"] if op.gb_s else [])
    gain = "" if op.gain_ms is None else f" | to gain {op.gain_ms:,.3f} ms"
    shapes = operator_rates.shapes_text(op.tensors)
    times = f"{op.calls:,} × {op.us:,.1f} µs = {op.ms:,.3f} ms"
    return f"{op.name} | {shapes} | {', '.join(rates)} | {times} | bound by {op.bound or 'an unknown limit'}{gain}"
