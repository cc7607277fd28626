"""Recording: the operators of one training step and the memory they hold, as a dry run saw them. Needs no torch."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from lumos.program.op import Op


class StorageEvent(NamedTuple):
    """Memory that is allocated, or released (negative)."""

    before: int  # place in the step of the operator that it comes before
    storage: int
    bytes: int


@dataclass(frozen=True, repr=False)
class Recording:
    """One step of one process, and the memory that it holds over time."""

    ops: list[Op]
    parameters: int
    trained_parameters: int
    tokens: int  # of one step; samples of a model that reads no tokens; 0 if it is not known
    alive: dict[int, int]  # bytes of the storages that exist when the step begins
    events: list[StorageEvent]
    roles: dict[int, str]  # of storages: weights, gradients, optimizer; others are activations and temporary
    places: dict[int, str]  # of storages: the module that allocated them
    most_bytes: int  # ever allocated at once, in building the model, too
    rank: int = 0
    world: int = 1
    microbatches: int = 1
    assumptions: list[str] = field(default_factory=list)
    made_by: dict[str, str] = field(default_factory=dict)  # versions

    def __repr__(self) -> str:
        size = f"{self.parameters:,} parameters, {self.peak_bytes / (1 << 30):.2f} GiB"
        return f"Recording(rank {self.rank} of {self.world}, {len(self.ops):,} operators, {size})"

    @cached_property
    def allocated(self) -> list[int]:
        """Bytes that are allocated after each event."""
        return list(accumulate((event.bytes for event in self.events), initial=sum(self.alive.values())))

    @cached_property
    def peak_bytes(self) -> int:
        """The most that `torch.cuda.max_memory_allocated()` would show."""
        return max(self.most_bytes, *self.allocated)

    @cached_property
    def at_peak(self) -> dict[int, int]:
        """The storages that exist when the step holds most."""
        alive = dict(self.alive)
        last = self.allocated.index(max(self.allocated))
        for event in self.events[:last]:
            alive[event.storage] = alive.get(event.storage, 0) + event.bytes
        return {storage: size for storage, size in alive.items() if size > 0}

    @property
    def peak_phase(self) -> str:
        """What runs when the step holds most."""
        if not self.events or not self.ops:
            return "forward"
        at = self.events[max(self.allocated.index(max(self.allocated)) - 1, 0)].before
        return self.ops[min(at, len(self.ops) - 1)].phase

    @property
    def held_bytes(self) -> dict[str, int]:
        """What the memory at the peak is for; what was only held before the step counts as temporary."""
        found: dict[str, int] = {}
        for storage, size in self.at_peak.items():
            role = self.roles.get(storage, "activations")
            found[role] = found.get(role, 0) + size
        beyond = self.peak_bytes - max(self.allocated)
        return found | ({"activations": found.get("activations", 0) + beyond} if beyond else {})

    @cached_property
    def most_held(self) -> dict[str, int]:
        """The most bytes of weights, gradients and optimizer state that exist at once, each at its own moment."""
        now: dict[str, int] = {}
        for storage, size in self.alive.items():
            now[self.roles.get(storage, "")] = now.get(self.roles.get(storage, ""), 0) + size
        most = dict(now)
        for event in self.events:
            role = self.roles.get(event.storage, "")
            now[role] = now.get(role, 0) + event.bytes
            most[role] = max(most.get(role, 0), now[role])
        return most

    @property
    def held_by_module(self) -> dict[str, float]:
        """What is neither weights, gradients nor optimizer at the peak, by module; largest first."""
        found: dict[str, float] = {}
        for storage, size in self.at_peak.items():
            if storage not in self.roles:
                module = ".".join(self.places.get(storage, "").split(".")[:_DEPTH]) or "(no module)"
                found[module] = found.get(module, 0.0) + size
        return dict(sorted(found.items(), key=lambda row: -row[1]))

    @property
    def storages(self) -> list[tuple[int, int]]:
        """(storage, bytes from then on) over two such steps, after which the caching allocator reserves no more."""
        size, step = dict(self.alive), []
        for event in self.events:
            size[event.storage] = size.get(event.storage, 0) + event.bytes
            step.append((event.storage, size[event.storage]))
        return [*sorted(self.alive.items()), *step, *step]


_DEPTH = 3  # parts of a module's path by which memory is grouped
FORMAT = "lumos dry run 1"
_KEPT = Op._fields.index("after") + 1  # fields of an Op that a file has; the others are of setups and traces


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording under its name only when it is whole; equal calls are written once.

    With nothing but Python's own library: the process that is recorded has the user's packages, not those of Lumos.
    """
    rows: dict[tuple[Any, ...], tuple[tuple[Any, ...], list[int], list[tuple[int, ...]]]] = {}
    for at, op in enumerate(recording.ops):
        plain = op._replace(after=())[:_KEPT]
        _, places, waits = rows.setdefault(plain, (plain, [], []))
        places.append(at)
        waits.append(op.after)
    values = {f.name: getattr(recording, f.name) for f in fields(recording) if f.name != "ops"}
    content = json.dumps({"format": FORMAT, "ops": list(rows.values()), **values})
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(gzip.compress(content.encode(), 6))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
