"""Samples of one machine, read from one or more files and checked, before anything is fitted to them.

A file may be wrong in ways that a fit would hide: times in other units, rows of a second GPU, the same row with two
contradictory times. All of these are found here, and end in an InputError.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from lumos.costs.operator_model import chip_of, roofline_us
from lumos.errors import InputError
from lumos.files import open_file
from lumos.measure.operator_rows import operator_of
from lumos.measure.published_samples import published_files, published_rows
from lumos.measure.sample_file import PACKED, Row, lines_of, threads_of
from lumos.measure.sample_grid import COLLECTIVES
from lumos.program.operators import Operator
from lumos.setup.gpus import Gpu, find_gpu

OTHER_ROWS = ("host", "profiler", "power", "step")
_WAY_OUT = "name files that `lumos sample` wrote"
_MOST_ROWS = 1_000_000  # of a file or folder; the finest grid has a tenth of that
_SHORTEST_US, _LONGEST_US = 1e-9, 1e9
_MOST_WATTS = 1e5
_CONTRADICTION = 4.0  # one time of a row over another one of it
_FEW_CONTRADICTIONS = 0.05  # of the rows that were measured more than once: noise
_IMPOSSIBLE = 1.5  # times the peak: faster than any product can be
_CACHED = 100.0  # times the bandwidth of the memory: faster than any cache makes an operator
_LARGE_US = 20.0  # by the roofline: from here on, launching a kernel does not matter
_WEAK = 1 / 3  # of the roofline, that the best matmuls reach: below, it is another GPU, or a machine that was busy
_BEST_SHARE = 0.98  # of the matmuls are slower than the best
_FEWEST_MATMULS = 10
_MANY_WRONG = 0.05  # of the rows, faster than the GPU can be: more than noise
_SLOW, _FAST = 300.0, 0.1  # times the roofline, as the middle of all rows: the times are in another unit
_FACTS = ("gpu", "torch", "cuda", "driver", "date", "host")
_SECONDS = 300.0  # times what no chip has yet: too fast even for milliseconds
_SLOWEST = 1e-5  # TFLOP/s
_PEAKS = {"CPU": {"fp32": 30.0, "other": 400.0}, "GPU": {"fp32": 2e3, "other": 1e5}}  # TFLOP/s that nothing has yet


class Sample(NamedTuple):
    """An operator and its measured time in microseconds."""

    operator: Operator
    us: float


Placed = tuple[str, Row]  # where a row stands, for messages, and the row


class Samples(NamedTuple):
    """All that was measured of one machine."""

    gpu: str  # as the machine calls it
    about: Row  # what the first lines of the files say of it
    operators: list[Sample]
    collectives: list[Placed]
    others: dict[str, list[Row]]  # by "op": host, profiler, power, step
    files: list[dict[str, Any]]  # for the provenance
    warnings: list[str]


def read_samples(paths: Sequence[Path]) -> Samples:
    """The samples of one machine in files that `lumos sample` wrote, or in folders of published ones."""
    about: Row = {}
    operators: list[tuple[str, Sample]] = []
    collectives: list[Placed] = []
    others: dict[str, list[Row]] = {name: [] for name in OTHER_ROWS}
    files = []
    for path in paths:
        header, rows = _read(path)
        _same_gpu(about, header, path, paths[0])
        about = header | about
        for place, row in rows:
            name = row.get("op")
            if "us" not in row and "watts" not in row:
                continue  # it failed where it was measured
            if name in COLLECTIVES:
                collectives.append((place, row))
            elif isinstance(name, str) and name in others:
                others[name].append(_checked(place, row))
            else:
                operators.append((place, Sample(operator_of(row, place), _time(place, row))))
        files.append(_provenance(path, header, len(rows)))
    if not operators and not collectives and not any(others.values()):
        raise InputError(f"{paths[0]}: no samples in it; {_WAY_OUT}")
    cut = [f"{path}: the last line is cut off, and left out" for path in paths if _is_cut(path)]
    return Samples(str(about["gpu"]), about, _without_repeats(operators), collectives, others, files, cut)


def _is_cut(path: Path) -> bool:
    """Whether a plain file ends within a line, as after a run that was killed or a copy that was interrupted."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        packed = file.read(8).startswith(PACKED)
        file.seek(-1, os.SEEK_END)
        return not packed and file.read(1) != b"\n"


def _read(path: Path) -> tuple[Row, list[Placed]]:
    """(header, rows) of one file, all of one GPU."""
    if path.is_dir():
        source = published_rows(path)
    else:
        _refuse_model(path)
        source = lines_of(path, unpack=True)
    rows = list(islice(source, _MOST_ROWS + 1))
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{path}: more than {_MOST_ROWS:,} rows, which no machine needs; {_WAY_OUT}")
    if not rows:
        raise InputError(f"{path}: empty; {_WAY_OUT}")
    header = rows[0][1]
    if not isinstance(header["gpu"], str) or not header["gpu"].strip():
        raise InputError(f"{rows[0][0]}: gpu = {str(header['gpu'])[:60]!r} is no name of a GPU; {_WAY_OUT}")
    for place, row in rows[1:]:
        if "gpu" in row and not _is_same(str(row["gpu"]), header["gpu"]):
            raise InputError(
                f"{place}: samples of {str(row['gpu'])[:60]} after those of {header['gpu'][:60]}; "
                "fit one GPU at a time, each from a file of its own"
            )
    return header, [(place, row) for place, row in rows[1:] if "gpu" not in row]


def _refuse_model(path: Path) -> None:
    with open_file(path, _WAY_OUT) as file:
        begins = file.read(2)
    if begins == b"PK":
        raise InputError(f"{path}: a model file, not samples: use it as it is (`lumos predict --model`), or {_WAY_OUT}")


def _same_gpu(about: Row, header: Row, path: Path, first: Path) -> None:
    if about and not _is_same(str(about["gpu"]), str(header["gpu"])):
        raise InputError(
            f"{path}: samples of {str(header['gpu'])[:60]}, and {first} has those of {str(about['gpu'])[:60]}; "
            "fit one GPU at a time"
        )
    if about and about["gpu"] == "cpu" and about.get("host") != header.get("host"):
        hosts = f"{str(header.get('host'))[:60]}, and {first} has those of {str(about.get('host'))[:60]}"
        raise InputError(f"{path}: samples of {hosts}; fit one CPU at a time")
    if about and about["gpu"] == "cpu" and threads_of(about) != threads_of(header):
        threads = f"{threads_of(header)} threads, and {first} has those of {threads_of(about)}"
        raise InputError(f"{path}: samples of a CPU with {threads}; fit one number of threads at a time")


def _is_same(one: str, other: str) -> bool:
    """Whether two names are of one GPU, by any of its aliases."""
    if one == other:
        return True
    known = None if one.endswith((".toml", ".npz")) else find_gpu(one)
    return known is not None and not other.endswith((".toml", ".npz")) and known == find_gpu(other)


def _provenance(path: Path, header: Row, rows: int) -> dict[str, Any]:
    digest = hashlib.sha256()
    for part in published_files(path) if path.is_dir() else [path]:
        with open_file(part, _WAY_OUT) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    said = {name: str(header[name])[:200] for name in _FACTS if name in header}
    return {"file": path.name, "sha256": digest.hexdigest(), "rows": rows, **said}


# ---------------------------------------------------------------------- single rows
def _time(place: str, row: Row) -> float:
    us = row["us"]
    if not isinstance(us, int | float) or isinstance(us, bool) or not _SHORTEST_US <= us < _LONGEST_US:
        raise InputError(f"{place}: us = {us!r:.60} is no time; measure it again, or remove the line")
    return float(us)


def _checked(place: str, row: Row) -> Row:
    """A row that is no operator and no collective, with numbers where numbers belong."""
    if "us" in row and not (row["op"] == "profiler" and row["us"] == 0):  # what recording adds may be nothing
        _time(place, row)
    watts = row.get("watts", 1.0)
    if not isinstance(watts, int | float) or isinstance(watts, bool) or not 0 < watts < _MOST_WATTS:
        raise InputError(f"{place}: watts = {watts!r:.60} is no power; measure it again, or remove the line")
    for name, value in row.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and isfinite(value) and 0 <= value < 1e15) and not isinstance(value, str):
            raise InputError(f"{place}: {name} = {value!r:.60} is no measured value; measure again, or remove the line")
    return row


def _without_repeats(placed: Iterable[tuple[str, Sample]]) -> list[Sample]:
    """Every operator once, with the middle of its times; InputError where they contradict each other."""
    found: dict[Operator, list[tuple[str, float]]] = defaultdict(list)
    for place, sample in placed:
        found[sample.operator].append((place, sample.us))
    repeated = [times for times in found.values() if len(times) > 1]
    against = [times for times in repeated if _spread(times) > _CONTRADICTION]
    if len(against) > _FEW_CONTRADICTIONS * len(repeated):
        low, high = (chosen(against[0], key=lambda time: time[1]) for chosen in (min, max))
        raise InputError(
            f"{high[0]}: {high[1]:g} us, and {low[0]} has {low[1]:g} us for the same operator "
            f"({len(against)} of {len(repeated)} rows that were measured more than once differ by more than a factor "
            f"of {_CONTRADICTION:g}); sample again on an idle machine"
        )
    return [Sample(operator, median(us for _, us in times)) for operator, times in found.items()]


def _spread(times: Sequence[tuple[str, float]]) -> float:
    values = [us for _, us in times]
    return max(values) / min(values)


# ---------------------------------------------------------------------- all rows together
def check_units(samples: Samples, gpu: Gpu, place: str) -> Samples:
    """The samples without rows that a GPU cannot reach; InputError where most of them are like that."""
    kept: list[Sample] = []
    wrong: list[Sample] = []
    ratios = []
    for sample in samples.operators:
        operator = sample.operator
        bound = roofline_us(operator, chip_of(gpu, operator.dtype))
        if bound > _LARGE_US:
            ratios.append(sample.us / bound)
        most = _IMPOSSIBLE if operator.is_matrix else _CACHED
        (wrong if bound > _LARGE_US and sample.us < bound / most else kept).append(sample)
    if ratios:
        _refuse_units(float(np.median(ratios)), f"the rates of {gpu.shown}", place)
    if len(wrong) > len(kept):
        said = f"{len(wrong)} rows are faster than {gpu.shown} can be"
        raise InputError(f"{place}: {said}; name the GPU that was sampled with --gpu")
    notes = [*samples.warnings, *_too_fast(wrong, len(samples.operators), gpu), *_too_slow(kept, gpu)]
    return samples._replace(operators=kept, warnings=notes)


def _too_fast(wrong: Sequence[Sample], total: int, gpu: Gpu) -> Iterator[str]:
    """A note on rows that were left out."""
    if not wrong:
        return
    (operator, us), share = wrong[0], len(wrong) / total
    said = f"rows left out because {gpu.shown} cannot be so fast: {len(wrong):,} of {total:,}, as {operator.kind} "
    said += f"{'×'.join(map(str, operator.shape))} in {us:g} us"
    doubt = f"; with so many, the rest is doubtful too: was it {gpu.shown}?" if share > _MANY_WRONG else ""
    yield said + doubt


def _too_slow(samples: Iterable[Sample], gpu: Gpu) -> Iterator[str]:
    """A note for each precision in which even the best matmuls are far from what the GPU reaches."""
    reached: dict[str, list[float]] = defaultdict(list)
    for operator, us in samples:
        bound = roofline_us(operator, chip_of(gpu, operator.dtype))
        if operator.kind.startswith("gemm") and bound > _LARGE_US:
            reached[operator.dtype].append(bound / us)
    for dtype, shares in reached.items():
        best = float(np.quantile(shares, _BEST_SHARE))
        if len(shares) >= _FEWEST_MATMULS and best < _WEAK:
            yield (
                f"the best {dtype} matmuls reach {100 * best:.0f} % of the rates of {gpu.shown}, where 70 to 90 % are "
                "usual: was the GPU busy, slowed down, or another one?"
            )


def check_rates(samples: Samples, peaks: Mapping[str, float], place: str) -> None:
    """The same for a machine whose peaks, in TFLOP/s by precision, are known from these samples alone."""
    device = "CPU" if samples.gpu == "cpu" else "GPU"
    for dtype, peak in peaks.items():
        most = _PEAKS[device]["fp32" if dtype == "fp32" else "other"]
        if peak > most:
            said = f"{dtype} products reach {peak:,.0f} TFLOP/s, which no {device} does"
            raise InputError(f"{place}: {said}: us looks like {_too_small(peak > _SECONDS * most)}")
        if peak < _SLOWEST:
            said = f"{dtype} products reach {1e6 * peak:.3g} MFLOP/s at most"
            raise InputError(f"{place}: {said}: us looks like nanoseconds; write microseconds")


def _refuse_units(ratio: float, peak: str, place: str) -> None:
    """InputError where the middle of all times, over the roofline, is that of another unit."""
    if ratio > _SLOW:
        said = f"operators take {ratio:,.0f} times as long as at {peak}"
        raise InputError(f"{place}: {said}: us looks like nanoseconds; write microseconds")
    if ratio < _FAST:
        said = f"operators are {1 / ratio:,.0f} times as fast as at {peak}"
        raise InputError(f"{place}: {said}: us looks like {_too_small(ratio < _FAST / _SECONDS / 10)}")


def _too_small(very: bool) -> str:
    """The unit of times that are too short to be true, and what to do about it."""
    return "seconds; multiply it by 1e6" if very else "milliseconds; multiply it by 1,000"
