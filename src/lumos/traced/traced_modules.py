"""Modules of a traced step: which `nn.Module` or `record_function` range every operator ran in.

Calls of modules are recorded as Python functions (with_stack=True of torch.profiler), ranges as annotations. The
backward pass has neither: autograd repeats there the sequence number of the forward operator that it differentiates.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lumos.read.op_columns import MODULE, OpType, TracedOp

Path = tuple[str, ...]

OUTSIDE = "outside of modules"
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+")
_INSTANCE = re.compile(r"_\d+$")
_NOT_MODULES = (OpType.STEP, OpType.OPTIMIZER, OpType.BACKWARD, OpType.FSDP, OpType.DDP, OpType.COMM)
_NOT_RANGES = re.compile(r"Optimizer\.|ProfilerStep|enumerate\(|DataLoader|\[pl\]|## Call|Pregraph|nccl:|gloo:")
_LONGEST_PATH = 24  # scopes


class Modules:
    """Finds the modules around operators: `Modules(ops).of(op)` is ("Llama_0", "Block_3", "MLP_3", "Linear_17")."""

    def __init__(self, ops: Sequence[TracedOp]) -> None:
        self.has_modules = any(op.is_note and op.name.startswith(MODULE) for op in ops)
        self._paths: dict[int, Path] = {}
        self._forward: dict[int, list[tuple[float, Path]]] = defaultdict(list)
        self._outer: dict[str, Path] = {}  # the modules around a module, where it was called inside others
        for op in ops:
            path = self._around(op)
            if len(path) > 1 and self.has_modules:
                self._outer.setdefault(path[-1], path[:-1])
            if path and op.sequence >= 0 and not op.is_note:
                self._forward[op.sequence].append((op.start, path))
        self.known = any(self._paths.values())

    def of(self, op: TracedOp | None) -> Path:
        """The scopes around an operator, the outermost first; those of its forward pass, where it has none itself."""
        if op is None:
            return ()
        if OpType.OPTIMIZER in op.scopes:
            return ("optimizer",)
        path = self._around(op) or self._of_forward(op)
        return (*self._outer.get(path[0], ()), *path) if path else path  # recomputed modules are called by themselves

    def _around(self, op: TracedOp) -> Path:
        if id(op) not in self._paths:
            outer = self._around(op.parent) if op.parent is not None else ()
            name = self._scope(op)
            self._paths[id(op)] = (*outer, name)[:_LONGEST_PATH] if name else outer
        return self._paths[id(op)]

    def _scope(self, op: TracedOp) -> str:
        if not op.is_note or op.type in _NOT_MODULES:
            return ""
        if self.has_modules:
            return op.name.removeprefix(MODULE) if op.name.startswith(MODULE) else ""
        return "" if _NOT_RANGES.match(op.name) else op.name

    def _of_forward(self, op: TracedOp) -> Path:
        """Where the operator ran that this one differentiates: the latest before it with the same number."""
        node: TracedOp | None = op
        while node is not None:
            places = self._forward.get(node.sequence, []) if node.sequence >= 0 else []
            at = bisect_left(places, (op.start, ())) - 1
            if at >= 0:
                return places[at][1]
            node = node.parent
        return ()


@dataclass
class ModuleTime:
    """GPU time of all modules of one class at one place of the model, with what is inside them."""

    path: Path  # without the numbers of instances
    instances: set[Path] = field(default_factory=set)
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("forward", "backward", "optimizer"), 0.0))

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

    def as_dict(self) -> dict[str, Any]:
        times = {f"{phase}_ms": ms for phase, ms in self.ms.items()}
        return {"module": " › ".join(self.path), "instances": len(self.instances), **times, "ms": self.total_ms}


def module_times(calls: Iterable[tuple[Path, str, float]]) -> list[ModuleTime]:
    """GPU time by module from calls (modules around it, phase, microseconds): parents before what is inside them."""
    found: dict[Path, ModuleTime] = {}
    for path, phase, us in calls:
        names = path or (OUTSIDE,)
        folded = tuple(_class_of(name) for name in names)
        for depth in range(1, len(names) + 1):
            one = found.setdefault(folded[:depth], ModuleTime(folded[:depth]))
            one.instances.add(names[:depth])
            one.ms[phase] += us / 1e3
    return _by_time(found)


def _class_of(name: str) -> str:
    """Block_3 is a Block, layers.3 is layers.*: instances are counted together."""
    return _NUMBER.sub("*", _INSTANCE.sub("", name))


def _by_time(found: dict[Path, ModuleTime]) -> list[ModuleTime]:
    """Every module right before what is inside it, siblings by their time."""

    def place(one: ModuleTime) -> tuple[tuple[float, str], ...]:
        above = (one.path[: depth + 1] for depth in range(len(one.path)))
        return tuple((-found[path].total_ms, path[-1]) for path in above)

    return sorted(found.values(), key=place)
