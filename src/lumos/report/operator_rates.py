"""Operators of a traced step as cards and tables: how fast they ran, what bounds them, what is to be gained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lumos.program.op import Tensor
from lumos.report.table import Card, Column, Row, Table, Value, left_out
from lumos.report.wording import ms_text, rate_text, si_text
from lumos.traced.traced_operators import TracedOperator, TracedOperators

MOST_ROWS = 200
_MOST_TENSORS = 4
_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


def operator_cards(found: TracedOperators) -> list[Card]:
    gpu, total = found.gpu, found.ms or 1.0
    words = f"{found.device} time of one step without communication, rank {found.rank}"
    cards = [Card("operators", ms_text(found.ms), words)]
    if found.tflops:
        peak = gpu.peak_tflops.get("bf16") if gpu else None
        of = f"{100 * found.tflops / peak:.0f} % of the dense bf16 peak; " if peak else ""
        cards.append(
            Card("mean rate", si_text(1e12 * found.tflops, "FLOP/s"), f"{of}matmuls and attention over all of it")
        )
    if gpu is not None:
        waits = sum(op.calls * op.waited_us for op in found.operators) / 1e3
        gain = f"{100 * found.gain_ms / total:.0f} % of it, at the prices of the cost model"
        cards += [
            Card("to gain", ms_text(found.gain_ms), gain),
            Card("waited for launches", ms_text(waits), "the GPU was idle and the host late, as recorded"),
        ]
        for bound in ("compute", "memory", "launch"):
            ms = sum(op.ms for op in found.operators if op.bound == bound)
            cards.append(Card(f"bound by {bound}", ms_text(ms), f"{100 * ms / total:.0f} % of the time"))
    return cards


def rates_table(found: TracedOperators) -> Table:
    """Every operator with its tensors, the most expensive first; nothing of peaks where they are not known."""
    scale, unit = (1e3, "GFLOP/s") if found.device == "CPU" else (1.0, "TFLOP/s")
    columns = [
        Column("operator"), Column("shapes"), Column("in"), Column("calls", 0), Column("µs each", 1),
        Column("ms", 3, bar=True), Column(unit, form=rate_text), Column("GB/s", form=rate_text),
        Column("of peak, %", 0), Column("bound"), Column("model, ms", 3), Column("gain, ms", 3),
    ]  # fmt: skip
    known = len(columns) if found.gpu else 8
    rows = [Row(_values(op, scale)[:known]) for op in found.operators[:MOST_ROWS]]
    more = left_out(MOST_ROWS, found.operators)
    return Table(f"operators of rank {found.rank}, {found.step}", columns[:known], rows, more)


def _values(op: TracedOperator, scale: float) -> list[Value]:
    share, rate = op.peak_share, op.tflops
    return [
        short_name(op), shapes_text(op.tensors), _PHASES.get(op.phase, op.phase), op.calls, op.us, op.ms,
        None if rate is None else scale * rate, op.gb_s, None if share is None else 100 * share, op.bound or None,
        op.model_ms, op.gain_ms,
    ]  # fmt: skip


def modules_time_table(found: TracedOperators) -> Table:
    """Time by module; a module counts with what is inside it."""
    modules = found.modules
    total = sum(one.total_ms for one in modules if len(one.path) == 1) or 1.0
    columns = [Column("module"), Column("of them", 0), Column("forward, ms", 3), Column("backward, ms", 3),
               Column("optimizer, ms", 3), Column("ms", 3, bar=True), Column("%", 1)]  # fmt: skip
    rows = [
        Row([" › ".join(one.path), len(one.instances), *one.ms.values(), one.total_ms, 100 * one.total_ms / total])
        for one in modules[:MOST_ROWS]
    ]
    return Table(f"{found.device} time by module, with what is inside it", columns, rows, left_out(MOST_ROWS, modules))


def flat_row(op: TracedOperator) -> dict[str, Any]:
    """One operator as a row of a CSV file."""
    shapes, dtypes = ("×".join(map(str, t.shape)) or "1" for t in op.tensors), (t.dtype for t in op.tensors)
    lists = {"shapes": " ".join(shapes), "dtypes": " ".join(dtypes)}
    return {key: lists.get(key, value) for key, value in op.as_dict().items() if key != "strides"}


def short_name(op: TracedOperator) -> str:
    return op.name.removeprefix("aten::")


def shapes_text(tensors: Sequence[Tensor]) -> str:
    """As in `4096×2048 2048×5632ᵀ bf16`: ᵀ is a matrix whose columns are next to each other in memory."""
    if not tensors:
        return ""
    parts = [_shape_text(tensor) for tensor in tensors if tensor.shape][:_MOST_TENSORS]
    more = len([t for t in tensors if t.shape]) - len(parts)
    dtypes = list(dict.fromkeys(t.dtype for t in tensors if t.shape)) or [tensors[0].dtype]
    return " ".join([*parts, *([f"+{more}"] if more > 0 else []), "/".join(dtypes[:3])])


def _shape_text(tensor: Tensor) -> str:
    turned = len(tensor.shape) >= 2 and len(tensor.strides) == len(tensor.shape)
    turned = turned and tensor.strides[-1] != 1 and tensor.strides[-2] == 1 and tensor.shape[-1] > 1
    return "×".join(map(str, tensor.shape)) + "ᵀ" * turned


def reproduced_words(folder: str, written: Sequence[str], reasons: Sequence[str]) -> list[str]:
    """What was written where, and what was not."""
    said = [f"{len(written)} scripts in {folder}: python {folder}/{written[0]} times the first" if written
            else f"no script was written to {folder}"]  # fmt: skip
    if reasons:
        more = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        said.append(f"no script for {'; '.join(reasons[:3])}{more}")
    return said
