"""Measure what carries over from one GPU to another, and write the page docs/transfer.md.

    python benchmarks/transfer.py [--data ../shared/data] [-o docs/transfer.md]

Each sampled GPU is left out in turn and predicted from the samples of the others (calibration/fit_transfer.py).
Published runs on GPUs without samples say what that makes of whole steps, of the interval, and of the clock under a
power limit.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "calibration"))

from fit_energy import TOP_MHZ, operator_in, read_rows  # noqa: E402
from fit_transfer import PUBLISHED, Cell, Errors, cells, families_of, relation, samples_of, table_of  # noqa: E402
from fit_uncertainty import held_out, residuals  # noqa: E402
from lumos.costs.energy import clock_of, in_step_factors  # noqa: E402
from lumos.costs.operator_model import chip_of, cost_model, features, roofline_us  # noqa: E402
from lumos.measure.fit import grow  # noqa: E402
from lumos.measure.fit_samples import Sample  # noqa: E402
from lumos.measure.operator_rows import SIZES  # noqa: E402
from lumos.score.measured_runs import Run, runs_of  # noqa: E402
from lumos.score.measured_runs import read_rows as read_runs  # noqa: E402
from lumos.setup.gpus import Gpu, gpu_named  # noqa: E402
from lumos.step.step import simulate_step  # noqa: E402
from published import predictions  # noqa: E402

INTRODUCTION = """# What carries over from one GPU to another

Written by `make accuracy`. Operators were sampled on three GPUs: H200 (our own samples), A100 and GH200 (published with
arXiv 2509.22832). On any other GPU their cost is the roofline of that GPU, corrected as on a sampled one. Here each of
the three is left out in turn, and predicted from the samples of the other two. Time spent on timing itself is taken off
on both sides, and shapes beyond those sampled on the other GPUs are left out.

"""
WORDS = """
In words:

- **Matmuls carry over**, between generations too: what decides is how their tiles fill the chip, and that enters as
  ratios. Gradients of linear layers by H200 are 11 % off, because there they are two samples, and one elsewhere.
- **Memory-bound kernels carry over where they are the same code** (additions, activations: {alike} % from H200 to
  GH200 and back, 6 to 22 % to A100). Operators of GPT-NeoX that are several kernels do so less; gradients of
  layer norms and embeddings do not carry over between A100 and GH200 at all, as other kernels run there.
- **Attention depends on its library more than on the GPU**: A100 and H200 predict each other within 9 to 16 %. The
  published samples of GH200 are of kernels that were not written for it, 30 to 60 % from all others.
- **Batched matmuls carry over within a generation alone**: on A100 they run half as fast for their roofline.
- **Grouped matmuls do not carry over**: {grouped} % off. H200 alone has samples of them; those of single matmuls on
  the other GPUs stand in.
- Nothing is known of fp8, fp32, tf32 and fused optimizers: H200 alone has samples of them. A bare roofline is off by
  {roofline} % on average over a family.
- Averaging two sources helps a little: see the line below. It is not done. It gains a point for matmuls, most of the
  rest comes from attention kernels of other libraries, and beyond the shapes of the smaller set prices would jump.
"""
ANSWERS = """
## What answers say of it

The errors below, with the shares of the groups in a step, are told with the answer for a GPU without samples. The
interval is wider by them: groups are taken to err independently of each other. "Same" is for GPUs of one family, as
from H200 to H100; where that is no better than for others, all count together.

| group | same family, % | other family, % |
|---|---|---|
"""
CLOCKS = """
## The clock under a power limit

Matmuls at the highest clock would draw more than a board may. The clock falls until they fit, and what they draw falls
with the square of the clock: both are measured on loops of one H200 (`calibration/power_h200.jsonl`). An operation
costs the same energy on other GPUs, or more where a board has more power for its peak. From this follows the clock of
every GPU and every power limit (`cluster.power_w`), and the factor on matmuls inside a step moves with it from the GPU
that it was measured on. H100 and A100 keep factors of their own at their usual limit.

No peak, power or bandwidth makes a step longer: tensor cores beyond what the power feeds run at a constant rate, what
waits for memory draws no more for a higher peak, and memory-bound kernels slow down no further than the floor of the
clock (half of the highest; assumed).

"""
RUNS = """
## Whole runs on GPUs without samples

Published runs, mixtures of experts among them, with constants fitted without their source. *Not moved* is the factor
of the H200 as it is; *cube root* moves it by the cube root of TFLOP/s per watt, as was done before.

"""
TRIED = """
## Features that were tried

Trees are grown on features of a shape: its sizes, and ratios that belong to a GPU (waves of tiles over multiprocessors,
bytes over cache, compute over memory). Sizes alone say nothing of another GPU. Leaving them out was tried: by family,
the choice is made on the two other GPUs, each predicted from the other, and its error is that on the GPU left out.

"""
_RATIO_FAMILIES = ("gemm", "linear_bwd", "bmm", "sdpa_fwd", "sdpa_bwd")
_ROUNDS, _ROWS = 200, 1500
Factor = Callable[[Gpu], float]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


# ---------------------------------------------------------------------- operators
def shown(errors: Errors | None) -> str:
    return "" if errors is None else f"{errors.mean:.1f} ({errors.median:.1f}, {errors.bias:+.1f})"


def operator_section(found: Sequence[Cell]) -> str:
    text = []
    for target in dict.fromkeys(cell.target for cell in found):
        sources = [name for name in ("h200", *PUBLISHED) if name != target]
        head = ["family", "shapes", "its own model", *(f"from {name}" for name in sources), "both", "roofline"]
        rows = []
        for cell in found:
            if cell.target == target and cell.sources:
                errors = [shown(cell.sources.get(source)) for source in sources]
                own = "" if np.isnan(cell.own_pct) else f"{cell.own_pct:.1f}"
                rows.append([cell.family, str(cell.roofline.rows), own, *errors, shown(cell.both),
                             f"{cell.roofline.mean:.0f}"])  # fmt: skip
        missing = [cell.family for cell in found if cell.target == target and not cell.sources]
        text.append(f"## {target.upper()} left out\n\nMean error in percent (median, bias).\n\n{table(head, rows)}")
        if missing:
            text.append(f"Not sampled elsewhere: {', '.join(missing)}.\n")
    return "\n".join(text)


def words(found: Sequence[Cell]) -> str:
    """What the tables say, with the ranges of errors that they have."""
    same_code = ("add", "gelu", "gelu_bwd", "neox_add_fwd", "neox_add_bwd", "neox_gelu_fwd", "neox_gelu_bwd")
    pairs = {"h200": "gh200", "gh200": "h200"}
    alike = [
        cell.sources[pairs[cell.target]].mean
        for cell in found
        if cell.family in same_code and pairs.get(cell.target) in cell.sources
    ]
    grouped = [errors.mean for cell in found if cell.family == "grouped_gemm" for errors in cell.sources.values()]
    roofline = [cell.roofline.mean for cell in found if cell.sources]
    return WORDS.format(alike=_range(alike), grouped=_range(grouped), roofline=_range(roofline))


def _range(values: Sequence[float]) -> str:
    low, high = (round(value, 1) for value in (min(values), max(values)))  # as the tables have them
    return f"{low:.0f} to {high:.0f}"


def blend_line(found: Sequence[Cell]) -> str:
    """The source that the package would take, beside the mean of both."""
    chosen, blended = [], []
    for cell in found:
        if cell.both is not None and cell.group != "batched matmuls":
            alike = [name for name in cell.sources if relation(name, cell.target) == "same"]
            chosen.append(cell.sources[(alike or ["h200"])[0]].mean)
            blended.append(cell.both.mean)
    better = sum(both < one for both, one in zip(blended, chosen, strict=True))
    return (
        f"\nOver {len(chosen)} families with two sources, batched matmuls left out: mean {mean(chosen):.1f} % from the "
        f"source that is taken, {mean(blended):.1f} % from both, which is better for {better} of them.\n"
    )


# ---------------------------------------------------------------------- features
def _rows_of(gpu: str, samples: Sequence[Sample]) -> tuple[Any, Any, Any]:
    """(features, rooflines, kernel times); of matmuls, the layout that all three GPUs have."""
    kept = [s for s in samples if s.operator.kind not in ("gemm_nn", "gemm_nt")][:_ROWS]
    chips = [chip_of(gpu_named(gpu), s.operator.dtype) for s in kept]
    rows = [features(s.operator, chip) for s, chip in zip(kept, chips, strict=True)]
    base = [roofline_us(s.operator, chip) for s, chip in zip(kept, chips, strict=True)]
    return np.array(rows), np.array(base), np.array([max(s.us - cost_model(gpu).isolation_us, 1.0) for s in kept])


def _ratios(width: int, family: str) -> list[int]:
    """The features that are no size and no time: the first two are times, then come sizes after four common ones."""
    sizes = 3 if family in ("gemm", "linear_bwd") else 4
    absolute = {0, 1, *range(4, 4 + sizes)}
    if sizes == 3:
        absolute |= set(range(width - 6, width - 3))  # the three sizes once more, before the three layouts
    return [column for column in range(width) if column not in absolute]


def feature_section(samples: dict[str, list[Sample]]) -> str:
    rows = []
    for family in _RATIO_FAMILIES:
        data = {gpu: _rows_of(gpu, parts[family]) for gpu in samples if family in (parts := families_of(samples[gpu]))}
        errors: dict[tuple[str, str, str], float] = {}
        for source, (x, base, us) in data.items():
            width = x.shape[1]
            for name, columns in (("all", list(range(width))), ("ratios", _ratios(width, family))):
                trees = grow(x[:, columns], np.log(us / base), _ROUNDS)
                for target, (other, roof, truth) in data.items():
                    predicted = roof * np.exp(trees(other[:, columns]))
                    errors[name, source, target] = float(100 * np.abs(predicted / truth - 1).mean())
        for target in data:
            others = [gpu for gpu in data if gpu != target]
            inner = {
                name: mean(errors[name, a, b] for a in others for b in others if a != b) if len(others) > 1 else 0.0
                for name in ("all", "ratios")
            }
            chosen = "ratios" if inner["ratios"] < inner["all"] else "all"
            found = {name: mean(errors[name, source, target] for source in others) for name in ("all", "ratios")}
            rows.append([family, target.upper(), f"{found['all']:.1f}", f"{found['ratios']:.1f}",
                         chosen if len(others) > 1 else "", f"{found[chosen]:.1f}"])  # fmt: skip
    gain = mean(float(row[2]) - float(row[5]) for row in rows)
    head = ["family", "left out", "all features, mean error %", "ratios alone, %", "chosen by the others", "error, %"]
    verdict = f"The choice gains {gain:.1f} points on average: not worth a second set of trees."
    return f"{TRIED}{table(head, rows)}\n{verdict}\n"


# ---------------------------------------------------------------------- clocks
def clock_section() -> str:
    rows = []
    for row in read_rows(HERE.parent / "calibration/power_h200.jsonl"):
        if row["op"] == "gemm" and "period_us" not in row and row["op"] in SIZES:
            operator = operator_in(row)
            if operator.flops > 5e10 and operator.dtype == "bf16":
                rows.append([row["name"], f"{row['clock_mhz'] / TOP_MHZ:.2f}"])
    law = clock_of(gpu_named("h200")).core
    loops = f"Loops of large bf16 matmuls on the H200 (700 W); the law says {law:.2f} for all of them:\n\n"
    text = CLOCKS + loops + table(["loop", "clock over the highest"], rows)
    names = ("h200", "h100", "h100-pcie", "h200-nvl", "b200", "gb200", "b300", "gb300", "a100", "mi300x", "mi325x")
    gpus = [gpu_named(name) for name in names]
    text += "\n" + table(
        ["GPU", "limit, W", "clock over the highest", "factor on matmuls", "at 70 % of the limit: factor"],
        [[gpu.name, f"{gpu.tdp_w:.0f}", f"{clock_of(gpu).core:.2f}", f"{in_step_factors(gpu).matrix:.2f}",
          f"{in_step_factors(replace(gpu, tdp_w=0.7 * gpu.tdp_w)).matrix:.2f}"] for gpu in gpus],
    )  # fmt: skip
    return text + (
        "\nNo limit but the usual one was measured: what another does is the law, not a measurement. The A100 holds "
        "0.8 of its peak in published runs; the law alone, with nothing fitted on an A100, says "
        f"{clock_of(gpu_named('a100')).core:.2f} of its highest clock.\n"
    )


def _cube_root(gpu: Gpu) -> float:
    home = gpu_named("h200")
    strain = (gpu.peak("bf16") / gpu.tdp_w) / (home.peak("bf16") / home.tdp_w)
    return float(in_step_factors(home).matrix * strain ** (1 / 3))


def run_section(truth: Path) -> str:
    """Errors of whole runs under three rules for the factor, and how often the interval held."""
    rules: dict[str, Factor] = {
        "not moved": lambda gpu: in_step_factors(gpu_named("h200")).matrix, "cube root": _cube_root,
        "by the clock": lambda gpu: in_step_factors(gpu).matrix,
    }  # fmt: skip
    runs: dict[str, list[Run]] = defaultdict(list)
    for run in runs_of(read_runs(truth / "measured_runs.csv")):
        if isinstance(run, Run) and run.seconds > 0 and cost_model(run.setup.cluster.gpu).transferred:
            runs[run.setup.cluster.gpu].append(run)
    inside = coverage(truth)
    rows = []
    for name, some in sorted(runs.items()):
        gpu = gpu_named(name)
        for kind, kept in (("dense", False), ("experts", True)):
            chosen = [run for run in some if bool(run.setup.model.experts) == kept]
            if not chosen:
                continue
            line = [name, kind, str(len(chosen))]
            for rule in rules.values():
                factors = replace(in_step_factors(gpu), matrix=rule(gpu))
                ratios = [simulate_step(run.setup, factors).us / 1e6 / run.seconds for run in chosen]
                line.append(f"{100 * mean(abs(r - 1) for r in ratios):.1f} ({100 * (median(ratios) - 1):+.0f})")
            held = inside.get((name, kept), [])
            rows.append([*line, f"{100 * mean(held):.0f} ({len(held)} run{'s' * (len(held) != 1)})" if held else ""])
    head = ["GPU", "runs", "rows", *(f"{rule}: mean error % (median)" for rule in rules), "inside the 80 % interval, %"]
    return RUNS + table(head, rows) + (
        "\nH100 has a factor of its own, fitted on published runs. The last column counts pretraining alone, and of "
        "the H100 nanotron's erratic sweep too, with variances fitted without the source.\n"
    )  # fmt: skip


def coverage(truth: Path) -> dict[tuple[str, bool], list[bool]]:
    """Whether each run was inside its interval, by GPU and whether it has experts."""
    rows = predictions(truth)
    found: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    for row, spread in zip(rows, held_out(residuals(rows)), strict=True):
        low, high = spread.of(row.seconds)
        setup = row.run.setup
        if setup.train.mode == "pretrain":
            found[setup.cluster.gpu, bool(setup.model.experts)].append(low <= row.run.seconds <= high)
    return found


def page(data: Path) -> Iterator[str]:
    samples = samples_of(data / "operators")
    found = list(cells(samples))
    yield INTRODUCTION
    yield operator_section(found)
    yield words(found) + blend_line(found)
    errors = table_of(found)
    known = {name: value for name, value in errors.items() if name != "roofline"}
    rows = [f"| {name} | {value['same']:.1f} | {value['other']:.1f} |" for name, value in known.items()]
    yield ANSWERS + "\n".join(rows) + f"\n| bare roofline | {errors['roofline']['any']:.1f} | the same |\n"
    yield clock_section()
    yield run_section(data / "truth")
    yield feature_section(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if not options.data.is_dir():
        sys.exit(f"{options.data}: the shared measurements are not here; say where with --data")
    text = "".join(page(options.data))
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
