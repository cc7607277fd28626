"""Fits how operators of a trace are priced in another setup: `data/change.json`, keys clock_factor, usual and weight.

    python3 calibration/fit_changes.py [--write]

On the development traces of changes_h200.tar.xz (ranks and single GPUs; architectures for `usual` alone). Every kernel
has a measured time and a price. Three things are fitted, one after the other:

- clock_factor: measured over priced time against the share of the step that matmuls and attention take, a line
  between knots, after a constant for every family of operators;
- usual: that constant;
- weight: over all pairs of traces, how much of what is left at one size is left at the other as well.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from changes_data import unpack
from lumos.analysis.replay import replay
from lumos.costs.costs import costs_of
from lumos.costs.kernel_work import works_of
from lumos.costs.model_costs import ModelCosts
from lumos.program.op import Op
from lumos.read.job import read_job
from lumos.setup.setup import Setup
from lumos.setup.setup_files import read_plain
from lumos.traced.cut import seen, total_us
from lumos.traced.infer.completion import complete
from lumos.traced.infer.infer import infer
from lumos.traced.learned import CalibratedRun
from lumos.traced.sizes import Sizes
from lumos.traced.trace_costs import bare
from shipped import ship

HERE = Path(__file__).parent
KNOTS = (0.42, 0.88)
SHORT_US = 20.0  # kernels from here on show the clock
FEWEST_TRACES = 2
DISTANCES = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
SHORTS = (0.0, 2.0, 5.0, 8.0, 12.0, 16.0, 24.0, 40.0)
FLOORS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Row(NamedTuple):
    """Equal calls of one block of one trace."""

    trace: str
    block: str
    op: Op
    like: str  # kind of work
    family: str
    measured: float  # of one call, in microseconds
    priced: float
    total: float
    load: float


def setup_of(case: dict[str, Any]) -> Setup:
    """The setup of a rank or of a single GPU, as the files beside the traces describe it."""
    tp, world = case.get("tp", 1), case.get("world", 1)
    model = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")} | {
        "kv_heads": case.get("kv", case["heads"])
    }
    train = {"seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1),
             "recompute": "full" if case.get("ckpt") else "none"}  # fmt: skip
    parallel = {"tp": tp, "dp": world // tp, "zero": case.get("zero", 0)}
    return Setup.model_validate(
        {"model": model, "train": train, "parallel": parallel, "cluster": {"gpu": "h200", "gpus": world}}
    )


def runs(folder: Path) -> Iterator[tuple[str, CalibratedRun]]:
    """The traced runs, cut into blocks."""
    for path in sorted(folder.glob("*/*.pt.trace.json.gz")):
        name, kind = path.name.split(".")[0], path.parent.name
        run = replay(read_job(path))
        if kind == "architectures":
            yield name, CalibratedRun(run, complete(infer(run), read_plain(None)).setup)
        elif kind in ("ranks", "single"):
            yield name, CalibratedRun(run, setup_of(json.loads((path.parent / f"{name}.json").read_text())))


def rows_of(name: str, run: CalibratedRun) -> list[Row]:
    prices = costs_of(run.setup)
    aten, gap, load = prices, prices.factors.launch_gap_us, run.recorded_load
    found = []
    for block, cut in run.blocks.items():
        for op in cut.ops:
            if block in ("optimizer", "recompute") or not op.inputs or op.stream or op.role:
                continue
            row = _row(name, block, op, aten, gap, load)
            found += [row] if row is not None else []
    return found


def _row(name: str, block: str, op: Op, aten: ModelCosts, gap: float, load: float) -> Row | None:
    call, measured = bare(op), seen(op)
    works = works_of(call)
    if measured.like == "comm" or not works:
        return None
    priced = max(aten.kernel_us(call) - gap, 0.5)
    if not 0.1 < measured.us / priced < 10:
        return None
    return Row(name, block, call, measured.like, works[0].family, measured.us, priced, total_us(op), load)


def fitted_clock(rows: list[Row]) -> dict[str, list[float]]:
    """Factors at the knots by kind of work, at least 1 and never falling."""
    found = {}
    for like in ("matrix", "attention", "stream"):
        mine = [row for row in rows if row.like == like and row.priced > SHORT_US]
        families = sorted({row.family for row in mine})
        lines = np.array([[np.interp(row.load, KNOTS, np.eye(len(KNOTS))[k]) for k in range(1, len(KNOTS))]
                          for row in mine])  # fmt: skip
        constants = np.array([[float(row.family == family) for family in families] for row in mine])
        every = {trace: sum(row.total for row in mine if row.trace == trace) for trace in {row.trace for row in mine}}
        weights = np.sqrt([row.total / every[row.trace] for row in mine])[:, None]  # every trace counts as much
        ratio = np.array([[log(row.measured / row.priced)] for row in mine])
        solved = np.linalg.lstsq(np.hstack([lines, constants]) * weights, ratio * weights, rcond=None)[0][:, 0]
        steps = np.maximum.accumulate(np.maximum([0.0, *solved[: len(KNOTS) - 1]], 0.0))
        found[like] = [round(float(exp(step)), 3) for step in steps]
    return found


def strain(clock: dict[str, list[float]], row: Row) -> float:
    return float(np.interp(row.load, KNOTS, clock[row.like]))


def fitted_usual(rows: list[Row], clock: dict[str, list[float]]) -> dict[str, float]:
    """Measured over priced time by family, where several traces have it; every trace counts once."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for row in rows:
        part = sums[row.family][row.trace]
        part[0] += row.total * log(row.measured / row.priced / strain(clock, row))
        part[1] += row.total
    usual = {"other": 1.0}
    for family, traces in sorted(sums.items()):
        if len(traces) >= FEWEST_TRACES:
            usual[family] = round(exp(float(np.mean([a / b for a, b in traces.values()]))), 3)
    return usual


def pairs(found: dict[str, tuple[CalibratedRun, list[Row]]]) -> Iterator[tuple[Row, Row]]:
    """The same operator in two traces, whose shapes the first one predicts for the second."""
    for first, second in product(found, repeat=2):
        (run, mine), (other, theirs) = found[first], found[second]
        if first == second or run.setup.parallel.zero != other.setup.parallel.zero:
            continue
        sizes = Sizes(run.setup, other.setup, run.weights.shapes)
        there = {(row.block, row.op): row for row in theirs}
        for row in mine:
            new = sizes.rewritten(row.op)
            if new != row.op and (row.block, new) in there:
                yield row, there[row.block, new]


def fitted_weight(
    both: list[tuple[Row, Row]], clock: dict[str, list[float]], usual: dict[str, float]
) -> dict[str, dict[str, float]]:
    """distance, short_us and far by kind of work; blocks of transformers models count as much as others."""

    def rest(row: Row) -> float:
        return log(row.measured / row.priced / strain(clock, row) / usual.get(row.family, 1.0))

    return {
        like: _weight_of(like, [pair for pair in both if pair[0].like == like], rest)
        for like in ("matrix", "attention", "stream")
    }


def _weight_of(like: str, mine: list[tuple[Row, Row]], rest: Callable[[Row], float]) -> dict[str, float]:
    """The weight by which the time of all operators of a kind together is off least, over pairs of traces."""
    old, new = (np.array([rest(pair[i]) for pair in mine]) for i in (0, 1))
    apart = np.abs([log(b.priced / a.priced) for a, b in mine])
    each, total = np.array([a.measured for a, _ in mine]), np.array([b.total for _, b in mine])
    names = sorted({(a.trace, b.trace) for a, b in mine})
    place = np.array([names.index((a.trace, b.trace)) for a, b in mine])
    plain = np.array([first.startswith("r") for first, _ in names])
    share = np.where(plain, 1 / max(plain.sum(), 1), 1 / max((~plain).sum(), 1))

    def error(weight: Any) -> float:
        predicted = np.bincount(place, total * np.exp(weight * old - new))
        return float(np.sqrt(np.average(np.log(predicted / np.bincount(place, total)) ** 2, weights=share)))

    best = min(
        (error((far + (1 - far) * np.exp(-apart / distance)) / (1 + (short / each) ** 2)), distance, short, far)
        for distance, short, far in product(DISTANCES, SHORTS, FLOORS)
    )
    print(
        f"{like}: {len(mine)} operators of {len(names)} pairs; error of their time {error(0.0):.4f} by prices "
        f"alone, {error(1.0):.4f} by the trace alone, {best[0]:.4f} drawn"
    )
    return {"distance": best[1], "short_us": best[2], "far": best[3]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        unpack(HERE / "changes_h200.tar.xz", Path(folder))
        found = {name: (run, rows_of(name, run)) for name, run in runs(Path(folder))}
    rows = [row for _, some in found.values() for row in some]
    sized = {name: pair for name, pair in found.items() if any(row.trace == name for row in pair[1])}
    clock = fitted_clock(rows)
    usual = fitted_usual(rows, clock)
    both = list(pairs({name: pair for name, pair in sized.items() if pair[0].setup.model.experts == 0}))
    weight = fitted_weight(both, clock, usual)
    print(json.dumps({"clock_factor": clock, "usual": usual, "weight": weight}, indent=1))
    print(f"{len(rows)} operators of {len(found)} traces, {len(both)} pairs")
    if "--write" in sys.argv:
        ship("change.json", {"clock_load": list(KNOTS), "clock_factor": clock, "usual": usual,
                             "weight": weight})  # fmt: skip


if __name__ == "__main__":
    main()
