"""Packs what changes_h200.py recorded into one archive, and unpacks it.

    python3 calibration/changes_data.py pack FOLDER calibration/changes_h200.tar.xz
    python3 calibration/changes_data.py unpack calibration/changes_h200.tar.xz FOLDER

In the archive the traces are not gzipped each, so that it can be compressed as a whole; unpacked, they are again.
"""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from pathlib import Path

TRACE = ".pt.trace.json"


def pack(folder: Path, archive: Path) -> None:
    """Everything under `folder` but logs, in an order that puts alike traces next to each other."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(path for path in folder.rglob("*.json*") if "logs" not in path.parts):
            name, contents = str(path.relative_to(folder)), path.read_bytes()
            if name.endswith(f"{TRACE}.gz"):
                name, contents = name.removesuffix(".gz"), gzip.decompress(contents)
            info = tarfile.TarInfo(name)
            info.size = len(contents)
            tar.addfile(info, io.BytesIO(contents))


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive, "r:xz") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is None:
                continue
            name, contents = member.name, file.read()
            if name.endswith(TRACE):
                name, contents = f"{name}.gz", gzip.compress(contents, compresslevel=6, mtime=0)
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
