"""Small files of other recorders: exports of Nsight Systems, and PyTorch execution traces."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

NSYS_TABLES = {
    "StringIds": "id INTEGER, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
}


def write_nsys(path: Path, processes: int = 1, without: str = "", **more: list[tuple[Any, ...]]) -> Path:
    """An export: each process launches one kernel inside "step 3"."""
    names = ["cudaLaunchKernel_v7000", "gemm", "step 3"]
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in NSYS_TABLES} | more
    rows["StringIds"] += list(enumerate(names))
    for i in range(processes):
        process = (100 + i) << 24
        rows["CUPTI_ACTIVITY_KIND_KERNEL"].append((2000, 5000, i, 7, 1, process, 1, 1))
        rows["CUPTI_ACTIVITY_KIND_RUNTIME"] += [(1000, 1500, process | 9, 1, 0), (1100, 1400, process | 9, 1, 0)]
        rows["NVTX_EVENTS"].append((500, 9000, 59, None, 2, process | 9))
    with sqlite3.connect(path) as database:
        for name, columns in NSYS_TABLES.items():
            if name != without:
                database.execute(f"CREATE TABLE {name} ({columns})")
                marks = ", ".join("?" * (columns.count(",") + 1))
                database.executemany(f"INSERT INTO {name} VALUES ({marks})", rows[name])
    return path


def et_nodes(names: list[str]) -> dict[str, Any]:
    """An execution trace of one thread, in which each operator reads what the one before it wrote."""

    def values(storage: int, elements: int, width: int, kind: str) -> dict[str, Any]:
        tensor = [storage, storage, 0, elements, width, "cuda:0"]
        return {"values": [tensor], "shapes": [[elements]], "types": [f"Tensor({kind})"]}

    nodes = [
        {
            "id": i + 2, "name": name, "ctrl_deps": 1,
            "inputs": values(i, 100, 4, "float"), "outputs": values(i + 1, 50, 2, "c10::Half"),
            "attrs": [{"name": "rf_id", "type": "uint64", "value": i + 1}, {"name": "tid", "value": 1}],
        }
        for i, name in enumerate(names)
    ]  # fmt: skip
    return {"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}


def write_et(path: Path, names: list[str]) -> Path:
    path.write_bytes(gzip.compress(json.dumps(et_nodes(names)).encode()))
    return path
