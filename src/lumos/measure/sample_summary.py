"""What a file of samples holds, what is left to measure, and what that would buy: as plain values and as plain text."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from lumos.data_files import read_table
from lumos.measure.sample import Sampled, SamplePlan
from lumos.measure.sample_file import lines_of
from lumos.measure.sample_grid import COLLECTIVES, SECTIONS, Row, grid_of

Answer = dict[str, Any]

_WIDTHS = (18, 8, 9, 8, 12)  # of the columns of the table


def summary_of(path: Path, done: Sampled, plan: SamplePlan) -> Answer:
    """What the file holds by operator, collective and section, and what to do next."""
    about, rows = {}, []
    for _, row in lines_of(path):
        if "gpu" in row:
            about = row
        else:
            rows.append(row)
    wanted = Counter(str(row["op"]) for row in plan.everything())
    parts = list(_parts(rows, wanted))
    answer = {
        "gpu": str(about.get("gpu", "")), "file": str(path), "measured": done.measured, "left": done.left,
        "minutes_left": round(done.seconds_left / 60, 1), "operators": parts,
    }  # fmt: skip
    return answer | {"notes": list(_notes(answer, plan))}


def _parts(rows: list[Row], wanted: Counter[str]) -> Iterator[Answer]:
    times: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        name = str(row.get("op"))
        if "error" in row:
            failed[name].append(str(row["error"]))
        else:
            times[name].append(float(row.get("us", 0.0)))
    for name in sorted({*times, *failed, *wanted}, key=_order):
        found = [us for us in times[name] if us > 0]
        yield {
            "op": name, "rows": len(times[name]), "grid": max(wanted[name], len(times[name]) + len(failed[name])),
            "failed": len(failed[name]), "median_us": round(median(found), 3) if found else None,
            "why": max(failed[name], key=failed[name].count, default=""),
        }  # fmt: skip


def _order(name: str) -> tuple[int, str]:
    """Sections, collectives, operators."""
    return (0 if name in SECTIONS else 1 if name in COLLECTIVES else 2), name


def _notes(answer: Answer, plan: SamplePlan) -> Iterator[str]:
    parts = {part["op"]: part for part in answer["operators"]}
    if answer["left"]:
        yield (
            f"{answer['left']:,} rows left, about {max(1, round(answer['minutes_left']))} min at this rate: the same "
            "command resumes"
        )
    if plan.device == "cuda" and not plan.only:
        yield from _finer(parts, sum(grid_of(plan.device)["counts"].values()))
    if not plan.only and not any(parts[name]["rows"] for name in COLLECTIVES if name in parts):
        yield (
            "no collectives: they need several GPUs. All of a node are used by default; on several nodes start every "
            "rank with torchrun or srun"
        )
    for name in SECTIONS:
        part = parts.get(name)
        if part is not None and not part["rows"]:
            why = f" ({part['why']})" if part["why"] else ""
            yield f"nothing measured of {name}{why}: predictions use what is shipped"
    yield f"next: lumos fit {answer['file']} -o model.npz"


def _finer(parts: dict[str, Answer], whole: int) -> Iterator[str]:
    """The error that so many rows had on an H200, and the usual grid."""
    have = sum(part["rows"] + part["failed"] for name, part in parts.items() if _order(name)[0] == 2)
    if not have:
        return
    table, share = read_table("sample_grid.json")["finer"], have / whole
    names = [name for name in table if name not in ("source", "share")]
    at_all = ", ".join(f"{name} {table[name][-1]:g} %" for name in names)
    if share > 0.95:
        yield f"the usual grid: on an H200 its errors on other shapes are {at_all}; --scale 2 measures twice as much"
        return
    here = ", ".join(f"{name} {_at(share, table['share'], table[name]):.1f} %" for name in names)
    yield (
        f"{100 * share:.1f} % of the usual grid: on an H200 so many rows have errors on other shapes of about {here}; "
        f"all of it {at_all}"
    )


def _at(share: float, shares: list[float], errors: list[float]) -> float:
    """Between the measured shares, straight in the logarithm of the share."""
    share = min(max(share, shares[0]), shares[-1])
    place = min(max(1, bisect_right(shares, share)), len(shares) - 1)
    (left, right), (low, high) = shares[place - 1 : place + 1], errors[place - 1 : place + 1]
    return low + (high - low) * log(share / left) / log(right / left)


def text_of(answer: Answer) -> str:
    """The answer for a terminal."""
    lines = [f"samples of {answer['gpu']}: {answer['measured']:,} new rows in {answer['file']}"]
    lines.append(_line("what", "rows", "of", "failed", "median us", "why"))
    for part in answer["operators"]:
        middle = "" if part["median_us"] is None else f"{part['median_us']:,.1f}"
        counts = (f"{part['rows']:,}", f"{part['grid']:,}", str(part["failed"] or ""))
        lines.append(_line(part["op"], *counts, middle, part["why"]))
    return "\n".join([*lines, *answer["notes"]])


def _line(name: str, *cells: str) -> str:
    first, *rest = _WIDTHS
    text = "".join(cell.rjust(width) for cell, width in zip(cells, rest, strict=False))
    return f"{name.ljust(first)}{text}  {cells[-1]}".rstrip()
