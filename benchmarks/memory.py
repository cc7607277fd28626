"""Measure the accuracy and speed of the memory model: our own recordings, held-out ones, published runs.

    python benchmarks/memory.py [--data ../shared/data] [-o FILE]

Truth is torch.cuda.max_memory_allocated of recorded steps, the memory that tables of published runs state, and which
runs of a sweep failed. The accounting of eager PyTorch was checked against OWN alone. What other frameworks do
(lumos/data/frameworks.toml, memory.json) is from their sources; where those leave a choice, it was tuned on the tables
below, by framework and never by row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lumos.memory.memory import Memory, memory_of
from lumos.score.measured_runs import Run, read_rows, runs_of
from lumos.setup.setup import Setup

GIB = 1 << 30
# Recorded on one H200 (torch 2.11, transformers, bf16, AdamW): name, kind, layers hidden ffn heads vocab seq mbs, peak.
# Those of kind gpt2 have dropout (2 % of the peak), the plain ones a fused norm: more than a setup can say.
OWN = """
llama_l6_h2560_b2              llama        6 2560 6912 20 48000 2048 2      9742934016
llama_l10_h1792_b6             llama        10 1792 4864 14 24000 1536 6    13331271168
llama_l4_h5120_b2              llama        4 5120 13824 40 32000 2048 2    15235768320
llama_l3_h8192_s4096_b1_gqa    llama        3 8192 28672 64 32000 4096 1    25343545856 kv=8
llama_l2_h8192_s2048_b4        llama        2 8192 22016 64 32000 2048 4    22722083840
llama_l6_h3072_s1024_b12       llama        6 3072 8192 24 32000 1024 12    20622310400
llama_l4_h2048_s16384_b1       llama        4 2048 5632 16 32000 16384 1    14835062784
llama_l12_h1536_s2048_b8       llama        12 1536 4096 12 50304 2048 8    26827660288
llama_l20_h1024_s1024_b16      llama        20 1024 2816 16 32000 1024 16   23923564544
llama_l8_h4096_s512_b8_gqa     llama        8 4096 14336 32 128256 512 8    29860290560 kv=8
llama_l5_h3584_s3072_b3_gqa    llama        5 3584 18944 28 151936 3072 3   41068407296 kv=4
llama_l6_h2048_s2048_b16_ckpt  llama        6 2048 5632 16 32000 2048 16    16631016448 ckpt=1
llama_l6_h4096_s4096_b2_ckpt   llama        6 4096 11008 32 32000 4096 2    13326958592 ckpt=1
llama_l6_h3072_s2048_b2_accum4 llama        6 3072 8192 24 32000 2048 2     12177454080 accum=4
llama_l4_h1024_s512_b2         llama        4 1024 2816 8 32000 512 2        1382019072
llama_l12_h768_s1024_b1        llama        12 768 2048 12 32000 1024 1      1726319104
gpt2_l8_h1600_s1024_b16        gpt2         8 1600 6400 25 50257 1024 16    24250571264
gpt2_l12_h768_s1024_b12        gpt2         12 768 3072 12 50304 1024 12    14871992832
gpt2_l6_h2560_s2048_b4         gpt2         6 2560 10240 32 50304 2048 4    16063510016
accum2_l2_h1280                llama        2 1280 3456 10 16000 768 2       1212058112 accum=2
ckpt_l3_h1536_s1536_b4         llama        3 1536 4096 12 16000 1536 4      2188808192 ckpt=1
compile_l3_h1024_s512          llama        3 1024 2816 8 16000 512 2         745882624 compile=1
foreach_l3_h1152               llama        3 1152 3072 9 16000 512 2         950150656
gpt2_l4_h768                   gpt2         4 768 3072 12 16384 512 2         711235584
gqa_l4_h1792_s1280_b3          llama        4 1792 4864 14 24000 1280 3      3732542464 kv=2
llama_l2_h1536_s3072_b6        llama        2 1536 4096 12 24000 3072 6      8957578752
llama_l3_h2560_s1024_b3        llama        3 2560 6912 20 24000 1024 3      4277068800
llama_l3_h3072_s2048_b4        llama        3 3072 8192 24 24000 2048 4      8978089984
llama_l3_h768_s256             llama        3 768 2048 6 8000 256 1           343208960
llama_l4_h1536_s1536_b3        llama        4 1536 4096 12 24000 1536 3      3868672512
llama_l4_h896_s384             llama        4 896 2432 7 16000 384 2          763007488
mixtral_l2_h768                mixtral      2 768 1536 6 8000 512 2           551836672 kv=3
plain_l4_h640                  plain        4 640 1792 10 8192 512 2          467547136
plain_simple_l3_h1280_s768_b4  plain_simple 3 1280 3456 10 16000 768 4       1982775808
sgd_l4_h1152                   llama        4 1152 3072 9 16000 768 1         797638656 opt=sgd
accum3_l4_h1024_s768_b1        llama        4 1024 2816 8 16000 768 1        1051822592 accum=3
ckpt_l6_h1024_s768_b2          llama        6 1024 2816 8 16000 768 2        1074532864 ckpt=1
gpt2_l6_h1280_s512_b2          gpt2         6 1280 5120 20 16384 512 2       1588683776
gpt2_l8_h896_s768_b4           gpt2         8 896 3584 14 24576 768 4        2912691200
llama_l10_h768_s512_b2         llama        10 768 2048 6 16000 512 2        1231721472
llama_l6_h1280_s1024           llama        6 1280 3456 10 16000 1024 1      1606600704
llama_l6_h1664_s1024_b2        llama        6 1664 4480 13 24000 1024 2      3322729472
llama_l7_h2304_s1536_b2        llama        7 2304 6144 18 24000 1536 2      6639919616
mixtral_l3_h1024_s512          mixtral      3 1024 2048 8 8000 512 2         1003519488 kv=4
"""
SIZES = ("layers", "hidden", "ffn", "heads", "vocab", "seq", "mbs")
PARALLEL: dict[str, Callable[[dict[str, Any]], dict[str, int]]] = {
    "ddp": lambda c: {"dp": c["world"]},
    "fsdp": lambda c: {"dp": c["world"], "zero": 3},
    "tp": lambda c: {"tp": c["world"]},
    "pp": lambda c: {"pp": c["world"]},
    "tp_pp": lambda c: {"tp": c["world"] // c["pp"], "pp": c["pp"]},
    "dp_tp": lambda c: {"tp": c["tp"], "dp": c["world"] // c["tp"], "zero": 3},
}


class Answer(NamedTuple):
    """A case, measured and predicted, in GiB."""

    name: str
    measured: float
    predicted: float
    phase: str

    @property
    def error(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def own_cases() -> Iterator[dict[str, Any]]:
    for line in OWN.split("\n"):
        if line:
            name, kind, *numbers = line.split()
            case = {key: int(number) for key, number in zip((*SIZES, "peak_mem_alloc"), numbers, strict=False)}
            extra = dict(word.split("=") for word in numbers[len(SIZES) + 1 :])
            yield {"name": name, "kind": kind} | case | {k: v if k == "opt" else int(v) for k, v in extra.items()}


def setup_of(case: dict[str, Any], parallel: dict[str, int] | None = None) -> Setup:
    """The setup of a recorded case."""
    kind = case.get("kind", "llama")
    model = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    model |= {"kv_heads": case.get("kv") or case["heads"], "gated": kind != "gpt2", "tied": kind == "gpt2"}
    if kind == "mixtral":
        model |= {"experts": case.get("experts", 4), "top_k": case.get("topk", 2), "expert_ffn": case["ffn"]}
    train = {
        "seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1),
        "recompute": "full" if case.get("ckpt") else "none", "compile": bool(case.get("compile")),
        "optimizer": "sgd" if case.get("opt") == "sgd" else "adamw",
        "attention": "unfused" if kind == "plain_simple" else "",
    }  # fmt: skip
    return Setup(model=model, train=train, parallel=parallel or {}, cluster={"gpu": "h200"})  # type: ignore[arg-type]


def answers(cases: Iterable[dict[str, Any]]) -> list[Answer]:
    found = []
    for case in cases:
        memory = memory_of(setup_of(case))
        found.append(Answer(case["name"], case["peak_mem_alloc"] / GIB, memory.peak / GIB, memory.at_peak.phase))
    return found


def multirank_answers(data: Path) -> Iterator[Answer]:
    for path in sorted((data / "h200/multirank").glob("*/rank[0-9].json")):
        case = json.loads(path.read_text())
        stages = memory_of(setup_of(case, PARALLEL[case["mode"]](case))).stages
        stage = stages[case["rank"] * len(stages) // case["world"]]
        name = f"{case['name']} rank {case['rank']}"
        yield Answer(name, case["peak_mem_alloc"] / GIB, stage.peak / GIB, stage.phase)


def runs(path: Path) -> list[Run]:
    return [run for run in runs_of(read_rows(path)) if isinstance(run, Run)]


# ---------------------------------------------------------------------- sections
def table(head: list[str], rows: list[list[str]]) -> str:
    line = "| " + " | ".join(head) + " |\n|" + "---|" * len(head) + "\n"
    return line + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def verdict(found: list[Answer]) -> str:
    errors = [abs(answer.error) for answer in found]
    return f"**mean {statistics.mean(errors):.2f} %**, worst {max(errors):.2f} %, {len(errors)} cases"


def recorded_section(title: str, found: list[Answer]) -> str:
    rows = [[a.name, f"{a.measured:.3f}", f"{a.predicted:.3f}", f"{a.error:+.2f}", a.phase] for a in found]
    head = ["case", "measured GiB", "predicted GiB", "error %", "peak at"]
    return f"## {title}\n\n{verdict(found)}\n\n{table(head, rows)}"


def sweep_section(data: Path) -> str:
    """nanotron's sweep states one figure a run, in GiB; of which rank and counter it is, is not said."""
    groups: dict[str, list[float]] = {}
    for run in runs(data / "truth/nanotron_sweep.csv"):
        error = 100 * (memory_of(run.setup).peak / GIB / float(run.row["memory_gb"]) - 1)
        parallel = run.setup.parallel
        names = ("all", f"pp {parallel.pp}", f"tp {parallel.tp}", "tp up to 8" if parallel.tp <= 8 else "tp beyond 8")
        for name in names:
            groups.setdefault(name, []).append(error)
    rows = [
        [name, str(len(errors)), f"{statistics.median(errors):+.1f}", f"{statistics.median(map(abs, errors)):.1f}",
         f"{statistics.mean(map(abs, errors)):.1f}"]
        for name, errors in sorted(groups.items(), key=lambda item: (item[0].rstrip("0123456789"), len(item[0]), item))
    ]  # fmt: skip
    head = ["runs", "count", "median error %", "median of |error| %", "mean of |error| %"]
    return f"## Memory stated in nanotron's sweep\n\n{table(head, rows)}"


def stated_section(data: Path) -> str:
    """Other tables that state memory."""
    rows = []
    for run in runs(data / "truth/measured_runs.csv"):
        if run.row.get("memory_gb"):
            memory, stated = memory_of(run.setup), float(run.row["memory_gb"])
            taken = (memory.peak + memory.reserve) / GIB  # theirs is the whole process, as the driver shows it
            rows.append([run.id, f"{stated:.0f}", f"{taken:.1f}", f"{100 * (taken / stated - 1):+.0f}"])
    return f"## Memory stated in published runs\n\n{table(['run', 'stated', 'predicted', 'error %'], rows)}"


def failures_section(data: Path) -> str:
    """Failed runs of the sweep against those that ran. More stages than layers is no question of memory."""
    failed = read_rows(data / "truth/failed_runs.csv")
    setups = [run.setup for run in runs(data / "truth/failed_runs.csv")]
    asked = [setup for setup in setups if setup.parallel.pp <= setup.model.layers]
    ran = [run.setup for run in runs(data / "truth/nanotron_sweep.csv")]
    said_of_failed = [memory_of(setup) for setup in asked]
    said_of_ran = [memory_of(setup) for setup in ran]

    def row(name: str, too_large: Callable[[Memory], bool]) -> list[str]:
        caught, wrong = sum(map(too_large, said_of_failed)), sum(map(too_large, said_of_ran))
        precision = 100 * caught / max(caught + wrong, 1)
        recall = 100 * caught / len(asked)
        return [name, f"{caught} of {len(asked)}", f"{wrong} of {len(ran)}", f"{precision:.0f}", f"{recall:.0f}"]

    def beyond(share: float) -> Callable[[Memory], bool]:
        return lambda memory: memory.peak > share * memory.usable

    rows = [row("does not fit", lambda memory: not memory.fits)]
    rows += [row(f"peak over {100 * share:.0f} % of the GPU", beyond(share)) for share in (0.8, 0.85, 0.9, 0.95, 1.0)]
    small = sum(memory.peak < 0.5 * memory.usable for memory in said_of_failed)
    head = ["rule", "of the failed", "of those that ran", "precision %", "recall %"]
    return (
        f"## Runs that failed\n\n{len(failed) - len(asked)} of {len(failed)} have more stages than layers or cannot be "
        f"read, and are left out. {small} of the rest need less than half the GPU by our account, most of them with "
        f"one sequence a micro-batch: they will have failed for other reasons.\n\n{table(head, rows)}"
    )


def published_section(data: Path) -> str:
    """Every published run fitted. Where the table leaves recomputation or sharding unsaid, none is assumed."""
    groups: dict[str, list[tuple[bool, bool]]] = {}
    for name in ("measured_runs.csv", "vtrain_single_node.csv"):
        for run in runs(data / "truth" / name):
            unsaid = not run.row.get("recompute", "").strip()
            groups.setdefault(run.source, []).append((memory_of(run.setup).fits, unsaid))
    rows = [
        [source, str(len(found)), str(sum(not fits for fits, _ in found)),
         str(sum(not fits and unsaid for fits, unsaid in found))]
        for source, found in sorted(groups.items())
    ]  # fmt: skip
    head = ["source", "runs", "called too large", "of these, recomputation not stated"]
    return f"## Published runs\n\n{table(head, rows)}"


def speed_section() -> str:
    model = {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "vocab": 128256}
    layouts: dict[str, dict[str, Any]] = {
        "one GPU": {}, "FSDP over 64": {"dp": 64, "zero": 3}, "tp 8, pp 8": {"tp": 8, "pp": 8, "dp": 16, "zero": 1},
        "tp 4, pp 8, vpp 5": {"tp": 4, "pp": 8, "vpp": 5, "dp": 16, "zero": 1},
    }  # fmt: skip
    rows = []
    for name, parallel in layouts.items():
        train = {"seq": 8192, "global_batch": 1024, "framework": "megatron"}
        setup = Setup(model=model, train=train, parallel=parallel, cluster={"gpu": "h100"})  # type: ignore[arg-type]
        seconds = min(timeit.repeat(lambda setup=setup: memory_of(setup), number=100, repeat=30)) / 100
        rows.append([name, f"{1e6 * seconds:.0f}"])
    return f"## Speed\n\n{table(['Llama 70B on', 'µs for one answer'], rows)}"


def page(data: Path) -> str:
    parts = ["# Memory\n", recorded_section("One H200, our own recordings", answers(own_cases()))]
    if data.is_dir():
        held_out = json.loads((data / "h200/single/measured.json").read_text())["results"]
        parts += [
            recorded_section("One H200, held out (bars: mean 5 %, worst 15 %)", answers(held_out)),
            recorded_section("Several ranks on one H200, held out", list(multirank_answers(data))),
            sweep_section(data), failures_section(data), stated_section(data), published_section(data),
        ]  # fmt: skip
    else:
        print(f"{data}: the shared measurements are not here; say where with --data", file=sys.stderr)
    return "\n".join([*parts, speed_section()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    text = page(arguments.data)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
