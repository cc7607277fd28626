"""Tables of the package that scripts of this folder write: values, and under "sources" where each of them is from."""

from __future__ import annotations

import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "src/lumos/data"
RECORDS = Path(__file__).parent / "records.tar.xz"


def unpack_records(folder: str | Path, path: Path = RECORDS) -> None:
    """Unpack the recordings; Python before 3.11.4 has no filters for archives, which these do not need."""
    with tarfile.open(path) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def shipped(name: str) -> dict[str, Any]:
    """A table as it is shipped, without its sources."""
    table: dict[str, Any] = json.loads((DATA / name).read_text("utf-8"))
    table.pop("sources", None)
    return table


def ship(name: str, values: dict[str, Any], folder: Path = DATA) -> None:
    """Put fitted values into a table and date those that changed; what is not named keeps its value.

    A value inside a section is named with a dot: `ship("in_step.json", {"ampere.sustained": 0.8})`.
    """
    table: dict[str, Any] = json.loads((folder / name).read_text("utf-8"))
    sources = table.pop("sources")
    for key, value in values.items():
        section, _, inner = key.rpartition(".")
        part = table[section] if section else table
        if part.get(inner) != value:
            part[inner] = value
            sources[key]["date"] = datetime.now(UTC).date().isoformat()
    (folder / name).write_text(text_of(table, sources), "utf-8")


def text_of(table: dict[str, Any], sources: dict[str, Any]) -> str:
    """One value a line."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in table.items()]
    told = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sources.items())
    return "\n".join(["{", *lines, ' "sources": {', told, " }", "}", ""])
