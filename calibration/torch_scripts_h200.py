"""Steps and peak memory on one GPU of the scripts that docs/torch_builds.md lists.

    python3 calibration/torch_scripts_h200.py OUT [--nanogpt DIR] [--llmc DIR] [--scripts DIR] [--only NAME ...]

Each script is a process of its own and runs unchanged except for its number of steps. A hook after every optimizer
step records a CUDA event and the allocator's counters; one late step runs under the profiler and is left out of the
clean ones. OUT/results.json has all steps, the peak and the counters, OUT/NAME.json.gz the profile.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARM, PROFILED = 16, 5, 13  # all steps; those left out at the beginning; the last one before the profiled one
LIMIT_S = 70.0  # of one script
MORE_STEPS = {r"range\((4|5|12)\):": f"range({STEPS}):", r"max_steps=4\b": f"max_steps={STEPS}"}
RANDOM_TOKENS = """
import numpy, os
tokens = numpy.random.default_rng(0).integers(0, 50257, 2_000_000).astype("uint16")
header = numpy.zeros(256, dtype="int32")
header[:3] = 20240520, 1, len(tokens)
open("tokens.bin", "wb").write(header.tobytes() + tokens.tobytes())
os.makedirs("data/random", exist_ok=True)
for name in ("train", "val"):
    tokens.tofile(f"data/random/{name}.bin")
"""


def watch(profile: str) -> None:
    """Run the script in sys.argv with a hook after every optimizer step, and print what was measured at exit."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    events: list[Any] = []
    walls: list[float] = []
    allocations: list[list[int]] = []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)

    def after_step(*_: Any) -> None:
        if len(events) == PROFILED + 1:
            torch.cuda.synchronize()
            profiler.stop()
            profiler.export_chrome_trace(profile)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)
        walls.append(time.perf_counter())
        counted = torch.cuda.memory_stats()
        allocations.append([counted.get(f"num_{name}", 0) for name in ("alloc_retries", "device_alloc", "device_free")])
        if len(events) == PROFILED + 1:
            torch.cuda.synchronize()
            profiler.start()

    def finish() -> None:
        torch.cuda.synchronize()
        steps = [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
        clean = sorted(steps[WARM : PROFILED - 1])
        measured = {
            "step_ms": clean[len(clean) // 2], "steps_ms": [round(step, 3) for step in steps],
            "walls_ms": [round(1e3 * (b - a), 3) for a, b in itertools.pairwise(walls)],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "allocations": allocations, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
        }  # fmt: skip
        print("\nMEASURED " + json.dumps(measured), flush=True)

    register_optimizer_step_post_hook(after_step)
    atexit.register(finish)
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")


def jobs(given: argparse.Namespace) -> list[tuple[str, list[str], Path | None, dict[str, str]]]:
    """Name, command, folder and environment of every script."""
    every: list[tuple[str, list[str], Path | None, dict[str, str]]] = []
    if given.scripts:
        names = ("moe_loop", "bert_mlm", "nanogpt")
        every += [(name, [str(given.scripts / f"{name}.py")], None, {}) for name in names]
        every += [("nanogpt_compiled", [str(given.scripts / "nanogpt.py")], None, {"COMPILE": "1"})]
        segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        every += [("moe_loop_expandable", [str(given.scripts / "moe_loop.py")], None, segments)]
    if given.nanogpt:
        train = ["train.py", "--dataset=random", "--gradient_accumulation_steps=4", "--eval_iters=2",
                 "--eval_interval=1000", f"--max_iters={STEPS}", "--log_interval=1"]  # fmt: skip
        every += [("nanoGPT", [*train, "--compile=False"], given.nanogpt, {})]
        every += [("nanoGPT compiled", [*train, "--compile=True"], given.nanogpt, {})]
    if given.llmc:
        train = ["train_gpt2.py", "--input_bin=tokens.bin", "--batch_size=16", "--sequence_length=1024",
                 "--total_batch_size=32768", "--model=d12", "--write_tensors=0", "--flash=1", "--dtype=bfloat16",
                 f"--num_iterations={STEPS}"]  # fmt: skip
        every += [("llm.c", train, given.llmc, {})]
    own = {"Trainer": "trainer", "Lightning": "lightning_fit", "timm": "timm_vit", "LoRA": "lora"}
    every += [(name, [str(ROOT / f"tests/torch_scripts/{script}.py")], None, {}) for name, script in own.items()]
    return [job for job in every if not given.only or job[0] in given.only]


def lengthened(path: Path, folder: Path) -> Path:
    """A copy of a script that makes more steps."""
    text = path.read_text()
    for pattern, replacement in MORE_STEPS.items():
        text = re.sub(pattern, replacement, text)
    copy = folder / path.name
    copy.write_text(text)
    return copy


def measured(command: list[str], folder: Path | None, environment: dict[str, str], profile: Path) -> dict[str, Any]:
    """What one script measures of itself, or the end of what it printed."""
    with tempfile.TemporaryDirectory() as work:
        if folder is not None:
            subprocess.run(["cp", "-r", f"{folder}/.", work], check=True)
            subprocess.run([sys.executable, "-c", RANDOM_TOKENS], cwd=work, check=True)
        else:
            command = [str(lengthened(Path(command[0]), Path(work))), *command[1:]]
        watched = [sys.executable, str(Path(__file__).resolve()), "--watch", str(profile), *command]
        try:
            done = subprocess.run(
                watched, cwd=work, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no end in {LIMIT_S:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if not lines:
        return {"error": (done.stderr or done.stdout)[-1500:]}
    result: dict[str, Any] = json.loads(lines[0].removeprefix("MEASURED "))
    return result


def main() -> None:
    if sys.argv[1:2] == ["--watch"]:
        profile = sys.argv[2]
        sys.argv = sys.argv[3:]
        watch(profile)
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    for name in ("nanogpt", "llmc", "scripts"):
        options.add_argument(f"--{name}", type=lambda text: Path(text).resolve())
    options.add_argument("--only", nargs="+")
    given = options.parse_args()
    results: dict[str, Any] = {}
    for name, command, folder, environment in jobs(given):
        began = time.perf_counter()
        profile = (given.out / f"{name.replace(' ', '_')}.json.gz").resolve()
        results[name] = measured(command, folder, environment, profile)
        took = time.perf_counter() - began
        shown = {key: results[name].get(key) for key in ("step_ms", "peak_gib", "error")}
        print(f"{name}: {took:.0f} s, {shown}", flush=True)
        (given.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
