"""Capture on a GPU, in all its forms, with torch and the standard library alone: the record that tests read.

python3 calibration/capture_h200.py OUTPUT

For each form a folder with a small trace, and one line of how long steps take before the recording, and after it. CUPTI
stays attached after a recording unless TEARDOWN_CUPTI=1 is set; the lines say what that is worth.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
TINY = ["--layers", "2", "--hidden", "256", "--ffn", "704", "--heads", "4", "--vocab", "2048", "--seq", "128"]
TRAIN = [sys.executable, str(ROOT / "examples/train_tiny.py"), *TINY]
FAKE = [sys.executable, str(ROOT / "examples/record_fake_world.py"), *TINY, "--tp", "2", "--steps", "1"]
_KEPT = re.compile(
    "Input|Collective|correlation|stream|device|External id|grid|block|bytes|dtype|.* nelems|Seq|Src|Dst|Fwd|wait_on|"
    "Process Group|Group"
)
_DROPPED = ("cudaStreamIsCapturing", "cudaDeviceGetAttribute", "cudaFuncGetAttributes")


def run(command: list[str], **variables: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def by_context(folder: Path, **variables: str) -> None:
    run([*TRAIN, "--capture", str(folder), "--steps", "40", "--warmup", "25"], **variables)


def by_command(folder: Path) -> None:
    """As `lumos capture -o FOLDER --warmup 25 -- python train_tiny.py`, whose command line needs more than torch."""
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    from lumos.capture.command import run_command
    from lumos.capture.recording import Plan

    code = run_command([*TRAIN, "--steps", "40"], Plan(folder, 1, 25).checked())
    if code:
        raise SystemExit(f"the command ended with {code}")


def by_fake_command(folder: Path) -> None:
    from lumos.capture.command import run_command
    from lumos.capture.recording import Plan

    code = run_command([*TRAIN, "--steps", "12"], Plan(folder, 1, 5, fake_world=(3, 8)).checked())
    if code:
        raise SystemExit(f"the command ended with {code}")


def slim(path: Path) -> None:
    """The same trace in fewer bytes: arguments that nothing reads are left out."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    content = {k: v for k, v in content.items() if k not in ("host_name", "traceName", "trace_id")}
    content["traceEvents"] = [e for e in content["traceEvents"] if e.get("name") not in _DROPPED]
    for event in content["traceEvents"]:
        if event.get("ph") == "X":
            event["args"] = {k: v for k, v in event.get("args", {}).items() if _KEPT.match(k)}
    path.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))


def report(folder: Path) -> str:
    told = json.loads((folder / "capture.json").read_text())
    times = told["without_profiler"]
    sizes = [path.stat().st_size for path in folder.glob("*.gz")]
    return (
        f"{folder.name}: torch {told['torch']}, {told['device']}, rank {told['rank']} of {told['world']}; step "
        f"{times['never_profiled']['mean_ms']} ms before, {times['after']['mean_ms']} ms after; {sum(sizes):,} bytes"
    )


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    scratch = Path("/tmp/capture_h200")
    forms = {"context": by_context, "command": by_command, "fake_command": by_fake_command}
    for name, record in forms.items():
        record(output / name)
        print(report(output / name), flush=True)
    run([*FAKE, "-o", str(output / "fake_world")])
    print(report(output / "fake_world"), flush=True)
    for path in sorted(output.glob("*/rank*.gz")):
        slim(path)
        print(f"{path.relative_to(output)}: {path.stat().st_size:,} bytes")
    for round_ in range(2):
        for wanted in ("0", "1"):
            folder = scratch / f"teardown{wanted}_{round_}"
            by_context(folder, TEARDOWN_CUPTI=wanted)
            print(report(folder), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
