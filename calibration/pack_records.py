"""Pack recordings for the repository: only what fitting needs of every trace, all in one compressed archive.

    python3 calibration/pack_records.py RUN1 RUN2 … -o calibration/records.tar.xz

A RUN is a folder that record_h200.py wrote (its tar files unpacked or not). Operator arguments and flow arrows go; the
first recording of every case stays, and the first repetition of those that were recorded several times over.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEPT_ARGUMENTS = {
    "correlation", "stream", "device", "Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size",
    "Process Group Name", "Process Group Ranks", "Src Rank", "Dst Rank", "wait_on_stream",
    "wait_on_cuda_event_record_corr_id", "wait_on_cuda_event_id",
}  # fmt: skip
SKIPPED = ("nosyncevents", "stack", "cycle2", "cycle4", "queue_default")


def slim(text: bytes) -> bytes:
    """A trace without what neither the graph nor the fit reads."""
    trace: dict[str, Any] = json.loads(text)
    spans = [
        event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "python_function"
    ]
    for event in spans:
        event["args"] = {k: v for k, v in event.get("args", {}).items() if k in KEPT_ARGUMENTS}
    trace["traceEvents"] = spans
    return json.dumps(trace, separators=(",", ":")).encode()


def files_of(run: Path) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of everything a run recorded, out of its tar files."""
    for name in ("results.json", "queue.json"):
        yield name, (run / name).read_bytes()
    for name in ("single", "multirank"):
        with tarfile.open(run / f"{name}.tar") as tar:
            for member in sorted(tar.getmembers(), key=lambda m: m.name):
                file = tar.extractfile(member)
                if file is not None and not any(word in member.name for word in SKIPPED):
                    yield f"{name}/{member.name}", file.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tarfile.open(arguments.output, "w:xz", preset=9) as archive:
        for number, run in enumerate(arguments.runs, 1):
            for name, contents in files_of(run):
                if name.endswith(".trace.json.gz"):
                    name, contents = name.removesuffix(".gz"), slim(gzip.decompress(contents))
                info = tarfile.TarInfo(f"run{number}/{name}")
                info.size = len(contents)
                archive.addfile(info, io.BytesIO(contents))


if __name__ == "__main__":
    main()
