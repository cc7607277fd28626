"""Packs what step_times_h200.py recorded into one archive, and reads it.

    python3 calibration/step_times_data.py FOLDER calibration/step_times_h200.tar.xz [STEPS]

Of the traces, the archive keeps what a replay reads: arrows between events, indices of events and sequence numbers are
left out, and long names of kernels are cut. Replays of both are the same. STEPS keeps so many of the recorded steps.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
DEVELOPMENT, BLIND, LAST, STRAGGLERS, STRAGGLERS_BLIND, SIBLINGS = (
    HERE / f"step_times_{name}h200.tar.xz"
    for name in ("", "blind_", "last_", "stragglers_", "stragglers_blind_", "siblings_")
)
STEPS = "steps.json"
_DROPPED = (
    "External id", "Record function id", "Ev Idx", "Sequence number", "Fwd thread id", "Context", "Trace name", "grid",
    "block", "registers per thread", "shared memory", "blocks per SM", "warps per SM", "est. achieved occupancy %",
    "cbid", "priority", "context", "queued", "bytes", "memory bandwidth (GB/s)",
)  # fmt: skip
_LONGEST_NAME = 90
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Recorded:
    """One recorded run: its step times, and where its traces are."""

    record: dict[str, Any]
    traces: Path  # a folder; empty where the traces did not come back

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def use(self) -> str:
        return str(self.record["use"])

    @property
    def is_traced(self) -> bool:
        return len(list(self.traces.glob("*.gz"))) == len(self.record["ranks"])

    def ms(self, when: str) -> Floats:
        """Steps before, while ("profiled") or after the recording: the mean over ranks."""
        ranks = np.array([rank[f"{when}_ms"] for rank in self.record["ranks"]])
        return np.asarray(ranks.mean(axis=0))

    @cached_property
    def clean(self) -> Floats:
        return self.ms("after")


def unpack(archive: Path, folder: Path) -> list[Recorded]:
    """The runs of an archive; their traces are written to `folder`."""
    records: dict[str, Any] = {}
    with tarfile.open(archive, "r:xz") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is None:
                continue
            if member.name == STEPS:
                records = json.loads(file.read())
                continue
            path = folder / f"{member.name}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(file.read(), compresslevel=1, mtime=0))
    return [Recorded(record, folder / record["name"]) for record in records["runs"]]


def pack(folder: Path, archive: Path, steps: int = 0) -> None:
    """The step times, and all traces of the tar files in `folder`; of these the first `steps` steps, or all."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        _add(tar, STEPS, (folder / STEPS).read_bytes())
        for bundle in sorted(folder.glob("traces*.tar")):
            with tarfile.open(bundle) as traces:
                for member in traces:
                    file = traces.extractfile(member)
                    if file is not None:
                        _add(tar, member.name.removesuffix(".gz"), _slim(gzip.decompress(file.read()), steps))


def _add(tar: tarfile.TarFile, name: str, contents: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(contents)
    tar.addfile(info, io.BytesIO(contents))


def _slim(text: bytes, steps: int) -> bytes:
    trace = json.loads(text)
    begins = sorted(
        event["ts"]
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep")
    )
    end = begins[steps] if 0 < steps < len(begins) else float("inf")  # every step waits for the GPU before it ends
    trace["traceEvents"] = [
        _slim_event(event)
        for event in trace["traceEvents"]
        if event.get("ph") not in ("s", "f") and event.get("ts", 0) < end
    ]
    return json.dumps(trace, separators=(",", ":")).encode()


def _slim_event(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("ph") == "X":
        event["name"] = event["name"][:_LONGEST_NAME]
        event["args"] = {key: value for key, value in event.get("args", {}).items() if key not in _DROPPED}
    return event


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
