"""Predict mixtures of experts that were measured on one H200 or published, and write the page docs/experts.md.

python benchmarks/experts.py [--data ../shared/data] [-o docs/experts.md]
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos.costs.operator_model import cost_model
from lumos.dry_run.from_config import predict_config
from lumos.memory.memory import memory_of
from lumos.prediction.bill import Tariff
from lumos.prediction.prediction import Prediction, predict
from lumos.score.measured_runs import Run, read_rows, runs_of
from lumos.setup.setup_files import read_setup
from lumos.step.step import Step, simulate_step
from lumos.step.structure import Role

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """# Mixtures of experts

Written by `make accuracy`. What a layer with experts costs, where that is in the code, and how far off it is.

```sh
lumos predict examples/llama3-70b.toml --set model.preset=qwen3-30b-a3b --set cluster.gpus=64 \\
  --set parallel.tp=2 --set parallel.pp=1 --set parallel.vpp=1 --set parallel.cp=1 \\
  --set parallel.ep=8 --set parallel.dispatcher=flex --set parallel.ep_overlap=true
```

## The model

**Grouped matmuls** (`src/lumos/described/experts.py`) have the sizes experts × tokens × n × k. Every expert's tokens
are cut into tiles of their own, and few tokens per expert only read its weights; the gradient of the weights is another
shape, whose depth is the tokens of one expert. They are priced from 8,335 samples of all three layouts on an H200, 8 to
8,192 tokens per expert and 2 to 256 experts (mean error on shapes held apart {grouped:.1f} %). Loads that differ
between experts change the time of all of them by less than 5 % on average. In 8 bits Transformer Engine runs a matmul
for every expert, on four streams; measured loops of them take as long as one matmul after the other, 0.95 to 1.16
times.

**Around them.** transformers runs one kernel for every line of its code: sort, gather, masks, activation of two halves,
weights, sum, and in the backward pass a scatter that sorts again; together as long as half of the matmuls. Megatron
permutes with fused kernels. Each micro-batch adds to the gradients of all experts of a rank, however few tokens they
got, and in 8 bits all that experts read is cast first. The host waits in every forward pass for how many tokens come,
unless all is in CUDA graphs.

**Exchanges.** `parallel.dispatcher = "all_to_all"` sends a copy of a token for every expert that it asks; `"flex"`
(DeepEP, HybridEP) once to every node, or to every rank of a node: of n places, k choices hit n (1 - (1 - 1/n)^k).
With `model.expert_groups` and `model.top_k_groups` (n_group and topk_group of a config.json) a token asks experts of
some groups alone, and n are the places that these lie in: 4 of 8 nodes in DeepSeek-V3. Between nodes the exchanges of
`train.framework = "deepseek"` take as long as DeepEP publishes for 4 and 8 nodes of H800s, within 4 %; Megatron's are
described as with NCCL: with that rate, one published run below on B200s is described better, and five on H100s worse.
`"all_gather"`, the default of Megatron's scripts, gathers the tokens of all ranks on each, and adds up the results on
the way back.

**Overlap.** `parallel.ep_overlap` runs exchanges beside the work of another micro-batch. In DualPipe and DualPipeV,
where it is the default, the schedule says which passes run together, and these alone hide exchanges: the operators of a
forward and a backward pass are put on one stream and their exchanges on another (`src/lumos/step/dualpipe_overlap.py`),
matmuls slow down by the 20 multiprocessors that exchanges hold, and what is left is exposed. In other schedules
exchanges run beside all of a layer's work, the first and last passes included, and the longer of both counts. With a
single micro-batch it has no effect. (Hiding exchanges in paired passes alone, as Megatron does in interleaved 1F1B, was
tried: the mean error of the published runs below rose by 0.4 points, and it was not kept.)

**8 bits with a factor for every block** (`train.fp8_scaling = "block"`, always with `train.framework = "deepseek"`)
make matmuls slower: 1.16 times, and 1.46 times for gradients of weights, medians of 17 shapes on an H200
(`calibration/block_scaled_h200.py`).

**Multi-token prediction** (`model.mtp_layers`) adds to the last stage a layer, a projection and the output matrix
again.

**Imbalance.** `train.imbalance` is the load of the busiest expert over the mean. The busiest rank decides, and experts
of one rank even out: with loads drawn from a normal distribution it is 1 + (imbalance - 1) z(ranks) / z(experts) /
sqrt(experts per rank), z(n) being the expected largest of n standard normal numbers. One rank alone loses nothing.
Routers that were not trained yet gave the busiest expert 1.2 to 15 times the mean in the runs below. With
`train.capacity`, every expert is filled up to so many times the mean: all ranks work on, send and keep that much.

**GPT-OSS** in transformers has unfused attention, with a mask and a sink (`model.sinks`), and a clamped activation in
seven kernels; Megatron has both in fused kernels, and skips what its sliding windows hide (`model.window`).

**Not modelled**: capacity factors that only drop tokens, overlap of shared experts, what DeepEP forwards over NVLink
(it decides on two nodes of H800s, where exchanges take twice as long as described).

"""
DEEPSEEK = """
## DeepSeek-V3 on 2,048 H800s

`examples/deepseek-v3.toml`: DualPipe on 16 stages, 64-way expert parallelism, FP8, as the report describes the run
(arXiv 2412.19437). Nothing was fitted on it. Its measured step is in the table of training metrics of arXiv
2505.09343, its pair of a forward and a backward pass of four layers in `train.json` of deepseek-ai/profile-data.
Which layers each stage has is not published: they are dealt evenly here, three to the first stage and three with the
extra prediction to the last, so that the first and last GPUs, which DualPipe gives both ends, have most to do. With
one layer on the last stage and four on all others, the step would take {other:.1f} s: so much depends on it. Which
GPU the published parts are of is not said either; those of the first one and the mean are below.

{table}

Tokens per second and GPU: {predicted:,.0f} predicted, 1,542 in that table, 1,543 over the whole pre-training (14.8 T
tokens in 2.664 M GPU hours). Before DualPipe was described, the same run with 1F1B came out at 622. Peak memory:
{memory:.1f} GiB of 79.1.
"""
MEASURED = {"1F": 1.13, "1B": 1.99, "1W": 0.48, "1F1B": 13.95, "bubble": 2.06, "optimizer": 0.29, "step": 19.926}
PUBLISHED = """
## Published runs

With the shipped constants, none of which was fitted on mixtures of experts. What the tables of Megatron-Bridge do not
state (dispatcher, overlap, CUDA graphs) is as its public recipes set it for that GPU and release
(`src/lumos/data/measured_runs.toml`). Equal configurations of several releases differ by 7 % on average, single ones by
up to 99 %. The largest errors are of small micro-batches without CUDA graphs (Qwen3 30B on H100 and B200): their host
takes about 9 ms a layer, more than is described. The runs were at hand while all this was built, and nothing was fitted
on them.
"""
HEAD = (
    "| case | measured, ms | described, % | dry run, % | measured, GiB | described, % | dry run, % |\n"
    "|---|---|---|---|---|---|---|"
)
AFTERWARDS = """
The blind cases were looked at once, when all prices were fixed. Two things were added to descriptions because of what
they showed, and neither to dry runs: sinks and clamped activations of GPT-OSS (until then described as -42 %), from the
kernels of its dry run, and the gradients of experts beside attention's backward pass (memory of gpt_oss_120b_l2 -9 %).
Before that, the mean errors of the descriptions were 8.2 % and 2.0 %. The host decides mixtral_small_loop and
olmoe_l8_short: single steps of the loop scatter between 197 and 283 ms.
"""
CASES = """{title}: mean error of the step {described:.1f} % described and {dry:.1f} %
dry-run; of the memory {memory:.1f} % and {dry_memory:.2f} %."""


class Case(NamedTuple):
    """A measured step, and by how much its predictions are off, in percent; None where there is none."""

    name: str
    step_ms: float
    gib: float
    described: tuple[float, float] | None
    dry: tuple[float, float]


def cases(file: str) -> Iterator[Case]:
    """The whole steps of a file of calibration/moe_h200.py."""
    with lzma.open(ROOT / "calibration" / file, "rt") as opened:
        rows = json.load(opened)["results"]
    for row in rows:
        if "error" in row:
            continue
        changes = [
            f"train.seq={row['seq']}", f"train.micro_batch={row['batch']}", "cluster.gpu=h200",
            f"train.recompute={'full' if row['checkpointing'] else 'none'}",
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(row["config"] | {"experts_implementation": row["experts"]}))
            dry = _errors(predict_config(path, changes, Tariff()), row)
            path.write_text(json.dumps(row["config"]))
            grouped = row["experts"] == "grouped_mm"  # a description has no loop over experts
            described = predict(read_setup(path, [*changes, "cluster.gpus=1"])) if grouped else None
        found = _errors(described, row) if described is not None else None
        yield Case(row["name"], 1e3 * row["step_s_median"], row["peak_mem_alloc"] / 2**30, found, dry)


def _errors(predicted: Prediction, row: dict[str, Any]) -> tuple[float, float]:
    """Of step and memory, in percent."""
    assert predicted.memory is not None
    step = predicted.step_ms / 1e3 / row["step_s_median"] - 1
    return 100 * step, 100 * (predicted.memory.peak / row["peak_mem_alloc"] - 1)


def shown(found: list[Case], title: str) -> str:
    """A table of cases, after a sentence with their means."""
    described = np.abs([case.described for case in found if case.described is not None])
    dry = np.abs([case.dry for case in found])
    words = CASES.format(
        title=title, described=described[:, 0].mean(), dry=dry[:, 0].mean(),
        memory=described[:, 1].mean(), dry_memory=dry[:, 1].mean(),
    )  # fmt: skip
    rows = []
    for case in found:
        step, memory = ("", "") if case.described is None else (f"{value:+.1f}" for value in case.described)
        rows.append(
            f"| {case.name} | {case.step_ms:.1f} | {step} | {case.dry[0]:+.1f} | {case.gib:.2f} | {memory} | "
            f"{case.dry[1]:+.2f} |"
        )
    return "\n".join([words, "", HEAD, *rows])


def published(data: Path) -> Iterator[tuple[Run, float]]:
    """Published mixtures of experts, with the logarithm of predicted over measured time."""
    for run in runs_of(read_rows(data / "truth/measured_runs.csv")):
        if isinstance(run, Run) and run.seconds > 0 and run.setup.model.experts:
            yield run, float(np.log(simulate_step(run.setup).us / 1e6 / run.seconds))


def deepseek() -> str:
    """The section about DeepSeek-V3's own run."""
    step = simulate_step(read_setup(ROOT / "examples/deepseek-v3.toml"))
    parts = parts_of(step)
    lines = ["| part, s | published | first GPU | mean of all |\n|---|---|---|---|"]
    for name, published in MEASURED.items():
        first, mean = (step.us / 1e6,) * 2 if name == "step" else (parts[name][0], parts[name].mean())
        lines.append(f"| {name} | {published:.2f} | {first:.2f} | {mean:.2f} |")
    pair = step.assembly.pair_of(Role("forward", step.plan.pp // 2, 0, -1, 1))
    lines.append(f"| one pair of four layers, ms | 129.0 | | {sum(block.us for block in pair[:3]) / 1e3:.1f} |")
    even = read_setup(ROOT / "examples/deepseek-v3.toml", [f"parallel.stage_layers={[4] * 15 + [1]}"])
    other = simulate_step(even).us / 1e6
    rate, memory = step.setup.tokens / step.setup.cluster.gpus / step.us * 1e6, memory_of(step.setup)
    return DEEPSEEK.format(table="\n".join(lines), predicted=rate, memory=memory.peak / 2**30, other=other)


def parts_of(step: Step) -> dict[str, NDArray[np.float64]]:
    """Seconds of every stage: passes alone, pairs, the update with its communication, and waiting."""
    structure, plan = step.structure, step.plan
    roles = [structure.roles[role] for role in structure.node_role]
    joined = plan.order.joined(plan.pp, plan.vpp, plan.microbatches).ravel()
    found = {name: np.zeros(plan.pp) for name in ("1F", "1B", "1W", "1F1B", "optimizer")}
    for role, turn, duration in zip(roles, structure.turn_index, step.graph.duration, strict=True):
        whole = turn >= 0 and joined[turn]  # gradients of weights that are computed with those of the inputs
        names = {"forward": "1F", "backward": "1B", "weights": "1B" if whole else "1W"}
        name = "1F1B" if role.partner >= 0 else names.get(role.what, "optimizer")
        found[name][role.stage] += duration / 1e9
    return found | {"bubble": step.us / 1e6 - np.sum(list(found.values()), axis=0)}


def by(runs: list[tuple[Run, float]], name: str, key: Callable[[Run], str]) -> str:
    """A table with a row for every class of runs."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run, error in runs:
        groups[key(run)].append(error)
    lines = [f"| {name} | runs | bias, % | mean error, % | median, % |\n|---|---|---|---|---|"]
    for group, errors in sorted(groups.items()):
        off = 100 * np.abs(np.expm1(errors))
        bias = 100 * np.expm1(np.mean(errors))
        lines.append(f"| {group} | {len(errors)} | {bias:+.1f} | {off.mean():.1f} | {np.median(off):.1f} |")
    return "\n".join(lines)


def page(data: Path) -> str:
    """The whole page."""
    development, blind = list(cases("moe_h200.json.xz")), list(cases("moe_blind_h200.json.xz"))
    parts = [
        INTRODUCTION.replace("{grouped:.1f}", f"{cost_model('h200').regressors['grouped_gemm'].error_pct:.1f}"),
        "## One H200\n",
        shown(development, "**Development**"),
        "",
        shown(blind, "**Blind**"),
        AFTERWARDS,
        deepseek(),
    ]
    if (data / "truth").is_dir():
        runs = list(published(data))
        parts += [
            PUBLISHED,
            by(runs, "source", lambda run: run.source),
            "",
            by(runs, "GPU", lambda run: f"{run.source}, {run.row['gpu']}"),
            "",
            by(runs, "model", lambda run: f"{run.source}, {run.model.partition(' (')[0]}"),
        ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    text = page(arguments.data)
    if arguments.output:
        arguments.output.write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
