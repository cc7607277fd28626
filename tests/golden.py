"""Golden answers: what some hundred commands answer, kept as numbers, and which of them a change moves.

    python tests/golden.py                     # run all commands, and list every value that moved
    python tests/golden.py --only setups       # those of one group
    python tests/golden.py --record            # keep the answers of this tree: review `git diff --stat` and say why

A command is run with --json, and its answer kept as numbers, truth values and words under their keys; sentences are
left out, so that texts are free to improve. Files that a command writes are kept as a digest. Groups that need the
shared measurements beside the checkout are skipped without them. `tests/test_golden.py` runs a sample of the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import lzma
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from commands import lumos_here

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared/data"
KEPT = Path(__file__).parent / "data/golden.json.xz"
TOLERANCE = 1e-9  # relative
DIGITS = 13  # significant ones that are kept
OUT = "OUT"  # stands for a file that the command writes
_LEFT_OUT = frozenset({"seconds", "version", "date", "command", "python", "path", "paths", "file", "files", "text"})

Answer = dict[str, Any]  # value by key with dots
Command = tuple[str, ...]


class Moved(NamedTuple):
    """A value that is not what it was."""

    command: str
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        numbers = isinstance(self.before, float | int) and isinstance(self.after, float | int) and self.before
        change = f" ({100 * (self.after / self.before - 1):+.3g}%)" if numbers else ""
        return f"{self.command}\n    {self.key}: {self.before} -> {self.after}{change}"


# ---------------------------------------------------------------------- commands
def _predict(preset: str, gpu: str, gpus: int, *changes: str) -> Command:
    sets = itertools.chain.from_iterable(("--set", change) for change in changes)
    return ("predict", preset, "--gpu", gpu, "--gpus", str(gpus), *sets)


def setups() -> Iterator[Command]:
    """Described runs: models, GPUs, parallelisms, schedules, recomputation, precisions, frameworks, optimizers."""
    for preset, gpu in itertools.product(("gpt2-124m", "llama3-8b", "mixtral-8x7b"), ("a100", "h100", "h200", "b200")):
        yield _predict(preset, gpu, 8)
    for gpu in ("gb200", "mi300x", "gh200", "a10g", "l4", "rtx-4090", "h100-pcie", "tpu-v5p"):
        yield _predict("llama3-8b", gpu, 16, "parallel.zero=3")
    layouts = (
        "tp=2", "tp=8", "tp=4 sequence_parallel=true", "pp=4", "pp=2 vpp=2", "pp=4 schedule=gpipe",
        "pp=4 schedule=zero-bubble", "pp=2 vpp=2 schedule=zero-bubble-v", "zero=1", "zero=2", "zero=3",
        "zero=3 shard=8", "cp=2", "cp=4 cp_type=all_gather", "tp=2 pp=2 cp=2", "pp=4 order=tp-cp-pp-dp",
        "tp=2 zero=3 no_sync=true",
    )  # fmt: skip
    for layout in layouts:
        keys = [f"parallel.{key}" for key in layout.split()]
        yield _predict("llama3-8b", "h100", 32, "train.global_batch=128", *keys)
    for layout in ("ep=8", "ep=4 tp=2", "ep=8 pp=2", "ep=8 zero=1", "ep=8 pp=2 schedule=dualpipe"):
        yield _predict("mixtral-8x7b", "h100", 32, "train.global_batch=128", *(f"parallel.{k}" for k in layout.split()))
    trains = (
        "recompute=full", "recompute=selective", "precision=fp8", "precision=fp16", "precision=fp32", "compile=true",
        "optimizer=sgd", "optimizer=muon", "mode=lora", "mode=lora weight_precision=nf4", "mode=sft", "micro_batch=4",
        "seq=32768 recompute=full", "offload_optimizer=1", "attention=unfused", "cuda_graphs=true",
        "recompute=full recompute_group=4", "reduce_precision=bf16",
    )  # fmt: skip
    for train in trains:
        yield _predict("llama3-8b", "h200", 8, "parallel.zero=3", *(f"train.{key}" for key in train.split()))
    for framework in ("pytorch", "megatron", "torchtitan", "deepspeed", "nanotron", "neox", "llm-foundry"):
        yield _predict("llama3-8b", "h100", 16, f"train.framework={framework}", "parallel.tp=2", "parallel.zero=1")
    clusters = ("inter_gb_s=25", "fabric=efa", "fabric=roce", "leaf_gpus=32", "nvls=true", "host=0.5", "sharp=true")
    for cluster in clusters:
        yield _predict("llama3-70b", "h100", 64, "parallel.tp=8", "parallel.pp=4", f"cluster.{cluster}")


def files() -> Iterator[Command]:
    """Setup files, files of frameworks, and what is asked of a described run besides its step."""
    examples = ROOT / "examples"
    for path in sorted([*examples.glob("*.toml"), *examples.glob("neox/*.toml"), examples / "megatron.sh"]):
        yield "predict", str(path.relative_to(ROOT))
    one = "examples/llama3-70b.toml"
    yield "predict", one, "--gpu", "h100,h200,b200"
    yield "predict", one, "--risk", "--draws", "200"
    yield "predict", one, "--slow", "rank=3,factor=1.2"
    yield "predict", one, "--tokens", "1e12", "--mtbf", "50000", "--price", "2.5"
    yield "predict", one, "--gpu", "examples/gpus/h100_500w.toml"
    yield "predict", "--from", "examples/workload", "--gpu", "h100"
    yield "predict", one, "-o", f"{OUT}.trace.json"
    yield "predict", one, "--set", "cluster.gpus=64", "--set", "parallel.pp=2", "-o", f"{OUT}.et"
    yield "cost", "examples/operators.json", "--gpu", "h100"
    yield "stragglers", "examples/operations.csv"
    yield ("about",)


def searches() -> Iterator[Command]:
    """Best configurations, by time, cost, energy and GPUs."""
    spaces = (
        ("examples/one-h200.toml", "--gpus", "8"),
        ("llama3-8b", "--gpu", "h100", "--gpus", "16"),
        ("llama3-8b", "--gpu", "h100,h200", "--gpus", "8", "--price", "h100=2,h200=3", "--objective", "cost"),
        ("mixtral-8x7b", "--gpu", "h200", "--gpus", "16", "--objective", "energy"),
        ("llama3-70b", "--gpu", "b200", "--gpus", "16", "--set", "train.global_batch=64"),
    )
    for space in spaces:
        yield "search", *space, "--top", "5"


def example() -> Iterator[Command]:
    """The trace in the package."""
    trace = "src/lumos/data/example"
    yield ("demo",)
    yield "replay", trace, "--ablate"
    yield "replay", trace, "--operators"
    yield "stragglers", trace
    yield "check", trace
    for scale in ("compute=0.5", "comm=0.5", "cpu=0.5", "kernel:nvjet=0.8"):
        yield "predict", "--from", trace, "--scale", scale
    yield "convert", trace, "-o", f"{OUT}.et"
    yield "convert", trace, "-o", f"{OUT}.trace.json"
    yield "synthesise", trace, "--seed", "1", "-o", f"{OUT}.et"


def architectures() -> Iterator[Command]:
    """Small traces of single steps, of which the setup is inferred."""
    for path in sorted((ROOT / "tests/data/architectures").glob("*.json.gz")):
        trace = str(path.relative_to(ROOT))
        yield "replay", trace
        for change in ("train.micro_batch=4", "train.recompute=full", "model.layers=24"):
            yield "predict", "--from", trace, "--set", change


def traces() -> Iterator[Command]:
    """Traces of the shared measurements: replayed, scaled and changed."""
    h200, public = SHARED / "h200", SHARED / "public"
    single = ("b8", "base_l8_h2048_s2048_b2", "h4096", "ckpt", "gpt2_l12_h1024", "compile_base")
    jobs = [h200 / f"single/{name}.pt.trace.json.gz" for name in single]
    jobs += [path for path in sorted((h200 / "multirank").iterdir()) if (path / "rank0.pt.trace.json.gz").exists()]
    jobs += sorted((h200 / "parallel").glob("*.gz")) + sorted((h200 / "zoo").glob("*.gz"))
    others = ("megatron_tp8_a100/kineto", "sglang_decode_b200", "torchrec_v100/resnet18", "nsys", "tracelens/h100")
    for job in (*jobs, *(public / name for name in others)):
        yield "replay", str(job)
    for job in jobs:
        yield "predict", "--from", str(job), "--scale", "compute=0.5"
        for change in ("model.layers=12", "train.micro_batch=1", "train.recompute=full", "parallel.dp=16"):
            yield "predict", "--from", str(job), "--set", change
    for name in ("AR", "ST"):
        for path in sorted((public / "straggler_jobs").glob(f"*{name}*.csv*")):
            yield "stragglers", str(path)


def configurations() -> Iterator[Command]:
    """Models of the shared measurements that are dry-run from their own code; needs torch."""
    for path in sorted((SHARED / "h200/zoo").glob("*.config.json")):
        yield "predict", str(path), "--gpu", "h200", "--set", "train.seq=2048", "--set", "train.micro_batch=1"


GROUPS = {group.__name__: group for group in (setups, files, searches, example, architectures, traces, configurations)}
NEED_SHARED = ("traces", "configurations")


# ---------------------------------------------------------------------- answers
def answer_of(command: Command) -> Answer:
    """What a command answers; of a command that is rejected, its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out")
        done = lumos_here(*(part.replace(OUT, out) for part in command), "--json", cwd=ROOT)
        found: Answer = {} if done.returncode == 0 else {"exit code": done.returncode}
        if done.returncode == 0 and done.stdout.strip():
            found |= dict(_flat(json.loads(done.stdout), ""))
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                found[f"written {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            if name not in _LEFT_OUT:
                yield from _flat(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from _flat(part, f"{key}[{place}]")
    elif isinstance(value, float):
        yield key, float(f"{value:.{DIGITS}g}")
    elif not isinstance(value, str) or (" " not in value and "/" not in value):
        yield key, value


def moved(command: str, before: Answer, after: Answer) -> Iterator[Moved]:
    """Values that differ, appeared or are gone."""
    for key in (*before, *(key for key in after if key not in before)):
        one, other = before.get(key, "absent"), after.get(key, "absent")
        if not _is_same(one, other):
            yield Moved(command, key, one, other)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
    return bool(one == other)


def name_of(command: Command) -> str:
    """The same wherever the checkout is."""
    return " ".join(command).replace(str(SHARED), "SHARED")


def kept() -> dict[str, Answer]:
    answers: dict[str, Answer] = json.loads(lzma.decompress(KEPT.read_bytes()))
    return answers


def available(only: Iterable[str] = ()) -> Iterator[Command]:
    """All commands that can be run here."""
    for name, group in GROUPS.items():
        if name in NEED_SHARED and not SHARED.is_dir():
            print(f"{name}: skipped, the shared measurements are not on this machine")
        elif not only or name in only:
            yield from group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--record", action="store_true", help="keep the answers of this tree")
    parser.add_argument("--only", nargs="*", default=(), choices=GROUPS, help="groups of commands")
    options = parser.parse_args()
    before = kept() if KEPT.exists() else {}
    after: dict[str, Answer] = {}
    count = 0
    for command in available(options.only):
        name = name_of(command)
        after[name] = answer_of(command)
        changes = list(moved(name, before[name], after[name])) if name in before else []
        count += len(changes)
        for change in changes[:10]:
            print(change, flush=True)
        if len(changes) > 10:
            print(f"    and {len(changes) - 10} more values", flush=True)
    print(f"{len(after)} commands, {sum(map(len, after.values()))} values, {count} moved")
    if options.record:
        KEPT.write_bytes(lzma.compress(json.dumps(before | after, sort_keys=True).encode(), preset=9))
        return 0
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
