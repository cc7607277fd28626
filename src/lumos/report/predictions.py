"""Predictions as cards and tables, for terminal, page and notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lumos.memory.memory import Memory
from lumos.memory.stage_walk import GIB
from lumos.prediction.operator_times import OperatorTime
from lumos.prediction.prediction import Prediction
from lumos.program.operators import Collective, Operator
from lumos.report.table import Card, Column, Row, Table, ms_column
from lumos.report.wording import (
    STEP_PARTS,
    change,
    count_text,
    gib_text,
    money_text,
    ms_text,
    rate_text,
    si_text,
)
from lumos.traced.infer import Inferred

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "framework")
_UNDERSTOOD = {
    "gpu_ms": "GPU, ms", "layer_ms": "a layer, ms", "layer_host_ms": "its host, ms",
    "ends_ms": "embedding and head, ms",
}  # fmt: skip
_PRICES = {"price_per_gpu_hour": "a GPU-hour", "price_per_kwh": "a kWh"}
_MOST_MODULES = 20
_DAY_MS = 86400e3
_WORTH_SAYING = 0.01  # of the step: what contention must cost to be shown


def prediction_cards(found: Prediction) -> list[Card]:
    low, high = found.interval_ms
    cards = [Card("predicted step", ms_text(found.step_ms), f"{ms_text(low)} – {ms_text(high)} (80 % interval)")]
    cards += [Card("approximated", f"{100 * part.share:.0f} %", part.words) for part in found.approximations]
    base = found.baseline_ms
    if (found.contention_ms or 0.0) > _WORTH_SAYING * found.step_ms:
        share = 100 * (found.contention_ms or 0.0) / found.step_ms
        words = f"{share:.1f} % of the step: kernels and communication beside each other are slower"
        cards.append(Card("contention", ms_text(found.contention_ms or 0.0), words))
    if base:
        cards += [
            Card("as recorded", ms_text(base), "without the profiler"),
            Card("change", change(found.step_ms, base), f"{ms_text(found.step_ms - base, signed=True)} per step"),
        ]
    return [*cards, *_setup_cards(found)]


def _setup_cards(found: Prediction) -> list[Card]:
    setup, memory, energy = found.setup, found.memory, found.energy
    if setup is None or memory is None:
        return []
    device = "CPU rank" if found.is_of_cpu else "GPU"
    reserve, usable = memory.reserve / GIB, memory.usable / GIB
    verdict = "fits" if found.fits else "tight, may not fit" if memory.is_tight else "does not fit"
    room = f"+ {gib_text(reserve)} reserve of {gib_text(usable)}: {verdict}"
    if found.fits is None:
        room = f"may fit {gib_text(usable)} if compiled" if found.approximations else "available memory not known"
    cards, speed = [], found.tokens_per_s_per_gpu
    if speed is not None:
        tokens = count_text(found.tokens or 0, "tokens")
        cards.append(Card(f"tokens/s/{device}", rate_text(speed), f"{tokens} per step"))
    if found.mfu is not None and found.hfu is not None:
        peak = f"HFU {100 * found.hfu:.1f} % (dense {setup.train.precision} peak)"
        cards.append(Card("MFU", f"{100 * found.mfu:.1f} %", peak))
    if energy is not None:
        per_token = f"{rate_text(energy.joules / found.tokens)} J per token; " if found.tokens else ""
        words = f"all GPUs, one step; {per_token}{energy.words}"
        cards.append(Card("energy", si_text(energy.joules, "J"), words))
    if memory.reserved is not None:
        room = f"allocated; {gib_text(memory.reserved / GIB)} reserved by PyTorch; {room}"
    return [*cards, Card("peak memory", gib_text(memory.gib()["peak"]), room), _state_card(found)]


def _state_card(found: Prediction) -> Card:
    """Bytes per parameter, which decide how far a peak can be trusted."""
    held = dict(found.state_bytes_per_parameter or {})
    if not found.is_dry and found.setup and found.setup.train.mode == "lora":
        weights = held.pop("weights")
        words = f"frozen weights; a parameter of an adapter has {_state_parts(held)}; before sharding"
        return Card("model state", f"{weights:.3g} B/parameter", words)
    where = "this rank's share" if found.is_dry and found.setup and found.setup.cluster.gpus > 1 else "before sharding"
    parts = _state_parts(held)
    if not found.is_dry and found.setup and found.setup.train.optimizer == "muon":
        parts += f" (embeddings and vectors: {2 * held['moments']:.3g}, by Adam)"
    return Card("model state", f"{sum(held.values()):.3g} B/parameter", f"{parts}; {where}")


def _state_parts(held: Mapping[str, float]) -> str:
    return " + ".join(f"{name.replace('_', ' ')} {size:.3g}" for name, size in held.items())


def cost_cards(found: Prediction) -> list[Card]:
    """Money and a token budget, if they were asked for."""
    bill = {} if found.bill is None else found.bill.as_dict()
    money, budget = bill.get("money_per_step"), bill.get("budget")
    cards = []
    if money is not None:
        prices = " and ".join(f"{bill[key]:g} {unit}" for key, unit in _PRICES.items() if bill[key] is not None)
        cards.append(Card("one step", money_text(money), prices))
        if bill["money_per_million_tokens"] is not None:
            cards.append(Card("a million tokens", money_text(bill["money_per_million_tokens"])))
    if budget is not None:
        days, low, high = (ms_text(one * _DAY_MS) for one in (budget["days"], *budget["days_interval"]))
        cards += [
            Card("training time", days, f"{low} – {high} (80 % interval), no interruptions"),
            Card("steps", f"{budget['steps']:,}", count_text(budget["tokens"], "tokens")),
            Card("GPU-hours", f"{budget['gpu_hours']:,.0f}"),
        ]
        if budget["kwh"] is not None:
            site = "" if bill["pue"] == 1 else f", times a PUE of {bill['pue']:g}"
            cards.append(Card("energy of the run", si_text(1e3 * budget["kwh"], "Wh"), f"GPUs alone{site}"))
        if budget["money"] is not None:
            cards.append(Card("money", money_text(budget["money"])))
    return cards


def parts_of_step_table(found: Prediction) -> Table:
    """The parts of the step, beside those of the traced one; both columns add up."""
    before, after = found.baseline_breakdown, found.breakdown
    rows = []
    for key, name in {**STEP_PARTS, "step_ms": "step"}.items():
        now, was = getattr(after, key), getattr(before, key) if before else 0.0
        cells = [was, now, now - was] if before else [now]
        rows.append(Row([name, *cells, 100 * now / (after.step_ms or 1.0)], is_total=key == "step_ms"))
    titles = ("as recorded", "predicted") if before else ("predicted",)
    columns = [Column("part"), *(Column(title, form=ms_text) for title in titles)]
    columns += [Column("change", form=partial(ms_text, signed=True))] if before else []
    title = f"where the step goes, mean over {'ranks' if found.step is None else 'stages'}"
    return Table(title, [*columns, Column("%", 1)], rows)


def memory_table(memory: Memory, ranks: Sequence[str] = ()) -> Table:
    """Memory of one rank of every stage, at its peak: before the backward pass there may be no gradients yet."""
    columns = [Column("stage"), Column("at its peak"), *(Column(name, 2) for name in MEMORY_PARTS),
               Column("peak", 2, bar=True)]  # fmt: skip
    rows = []
    for stage, row in enumerate(memory.rows()):
        parts = {name: float(row[name]) for name in (*MEMORY_PARTS, "peak")}
        cells = ["later" if name == "gradients" and not size else size for name, size in parts.items()]
        rows.append(Row([str(stage), str(row["phase"]), *cells], ranks[stage] if ranks else ""))
    return Table("memory by stage, GiB", columns, rows)


def modules_table(memory: Memory) -> Table:
    """Activations and temporary tensors of a dry run at its peak."""
    rows = [Row([name, size / GIB]) for name, size in list(memory.modules.items())[:_MOST_MODULES]]
    return Table("activations at the peak by module, GiB", [Column("module"), Column("GiB", 2, bar=True)], rows)


def operators_table(found: Prediction) -> Table:
    time = ms_column("ms", (row.ms for row in found.operators))
    time = time if time.form else Column("ms", 2)
    columns = [Column("operator"), Column("shape"), Column("count", 0), time._replace(bar=True), Column("bound"),
               Column("source")]  # fmt: skip
    rows = [Row([row.name, _size(row), row.count, row.ms, row.bound, row.source]) for row in found.operators]
    shares = ", ".join(f"{100 * share:.0f} % {name}" for name, share in found.source.items() if share >= 0.005)
    text = f"times of all operators: {shares}{attention_text(found, found.operators)}"
    return Table("most expensive operators (rank 0), per step", columns, rows, text)


def attention_text(found: Prediction, shown: Sequence[OperatorTime]) -> str:
    """Explains lengths of attention that are not those of the run: costs are known for causal squares alone."""
    lengths = {row.work.shape[2] for row in shown if isinstance(row.work, Operator) and _is_attention(row)}
    own = {found.setup.train.seq} if found.setup is not None and not found.is_dry else set()
    other = ", ".join(map(str, sorted(lengths - own)))
    return f". Attention is shown as causal attention with the same work, of length {other}" if other else ""


def _is_attention(row: OperatorTime) -> bool:
    return row.work.kind in ("sdpa_fwd", "sdpa_bwd")


def _size(row: OperatorTime) -> str:
    """Of what is known by its bytes alone: those."""
    is_bytes = isinstance(row.work, Collective) or row.work.kind == "stream"
    return si_text(row.shape[0], "B") if is_bytes else " × ".join(map(str, row.shape))


def understood_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Phases and layers as they were recognised in the trace."""
    columns = [Column("rank"), Column("phase"), Column("tasks", 0), *(Column(t, 3) for t in _UNDERSTOOD.values())]
    rows = [
        Row([str(row["rank"]), str(row["phase"]), row["tasks"], *(float(row[key]) for key in _UNDERSTOOD)])
        for row in found
    ]
    return Table("what was understood of the trace", columns, rows)


def inferred_table(found: Mapping[str, Inferred]) -> Table:
    rows = [Row([key, f"{'≈ ' * one.rough}{value_text(one.value)}", one.evidence]) for key, one in found.items()]
    return Table("setup of the traced run, as inferred", [Column("key"), Column("value"), Column("evidence")], rows)


def value_text(value: object) -> str:
    """A value as TOML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def flat_row(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `lumos predict --json` as one row of a CSV file: numbers, setup, memory, bill and notes."""
    row = {key: value for key, value in answer.items() if isinstance(value, bool | int | float)}
    row["interval_low_ms"], row["interval_high_ms"] = answer["interval_ms"]
    row |= answer["breakdown"]
    row |= {f"baseline_{key}": value for key, value in (answer["baseline_breakdown"] or {}).items()}
    row |= {f"memory_{key}_gib": value for key, value in (answer["memory_gib"] or {}).items() if _is_plain(value)}
    bill = answer["bill"] or {}
    for part in (bill, bill.get("budget") or {}):
        row |= {key: value for key, value in part.items() if _is_plain(value)}
    for section, values in (answer["setup"] or {}).items():
        row |= {f"{section}.{key}": value for key, value in values.items() if _is_plain(value)}
    return row | {"notes": " | ".join(answer["warnings"])}


def _is_plain(value: object) -> bool:
    return value is not None and isinstance(value, bool | int | float | str)
