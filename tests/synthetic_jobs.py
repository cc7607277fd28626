"""Operation tables of jobs whose times are known: a plain simulation of replicas of a pipeline.

    Job(dp=2, pp=4, cost=lambda p: 2.0 if (p.replica, p.stage) == (1, 0) else 1.0).write(tmp_path / "job.parquet")

Costs are seconds; a backward pass costs twice what `cost` says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import polars

from lumos.schedules.interleaved import SCHEDULE as INTERLEAVED
from lumos.schedules.one_forward_one_backward import SCHEDULE as ONE_F_ONE_B


@contextmanager
def deep_recursion() -> Iterator[None]:
    """A pass asks for the end of the pass before it, and so on: long pipelines nest deeply. Other tests must not."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


FIXED = {
    "params-all-gather": 0.02, "layernorm-grads-all-reduce": 0.001, "embedding-grads-all-reduce": 0.003,
    "grads-reduce-scatter": 0.05, "separate-grads-all-reduce": 0.006, "optimizer-clip-main-grad": 0.004,
    "optimizer": 0.01,
}  # fmt: skip
NAMES = ("forward", "backward")


class Pass(NamedTuple):
    """One pass: what `cost` is asked about."""

    backward: bool
    replica: int
    stage: int
    chunk: int
    microbatch: int
    step: int


@dataclass(frozen=True)
class Job:
    """A job with a pipeline in each replica.

    `empty` records messages that carry nothing, as Megatron does; `overlapped` reduces the gradients of each virtual
    stage as soon as they are complete, and those of what is shared apart.
    """

    dp: int = 2
    pp: int = 2
    vpp: int = 1
    microbatches: int = 4
    steps: int = 2
    cost: Callable[[Pass], float] = lambda p: 1.0
    transfer: float = 0.01
    empty: bool = False
    overlapped: bool = False
    pause: Callable[[Pass], float] = lambda p: 0.0  # before a pass, by the host

    def frame(self) -> polars.DataFrame:
        rows = [row for step in range(self.steps) for row in _Step(self, step).rows()]
        return polars.DataFrame(rows).with_columns(polars.col("optype").cast(polars.Categorical))

    def write(self, path: Path) -> Path:
        frame = self.frame()
        if path.suffix == ".parquet":
            frame.write_parquet(path)
        else:
            frame.write_csv(path)
        return path

    def step_seconds(self, step: int = 0) -> float:
        """How long a step takes."""
        return float(max(row["start_ts"] + row["duration"] for row in _Step(self, step).rows()))


class _Step:
    """When everything of one step begins and ends; each answer waits for those that it depends on."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        schedule = INTERLEAVED if job.vpp > 1 else ONE_F_ONE_B
        self.order = [
            [(bool(t.phase), t.chunk, t.microbatch) for t in schedule.order(s, job.pp, job.vpp, job.microbatches)]
            for s in range(job.pp)
        ]
        self.of_kind = [[[t for t in turns if t[0] == kind] for kind in (False, True)] for turns in self.order]
        for name in ("pass_end", "post", "meet", "reduced", "closing_start", "closing_end"):
            setattr(self, name, cache(getattr(self, name)))

    def pass_start(self, r: int, s: int, i: int) -> float:
        kind, chunk, mb = self.order[s][i]
        waits = [self.pass_end(r, s, i - 1)] if i else []
        if not kind:
            waits.append(FIXED["params-all-gather"] * (chunk + 1))
        if self.neighbour(kind, True, s, chunk):
            waits.append(self.meet(kind, r, *self.sender(kind, s, chunk), mb))
        return max(waits) + self.job.pause(Pass(kind, r, s, chunk, mb, self.number))

    def pass_end(self, r: int, s: int, i: int) -> float:
        one = Pass(self.order[s][i][0], r, s, *self.order[s][i][1:], self.number)
        return self.pass_start(r, s, i) + self.job.cost(one) * (2.0 if one.backward else 1.0)

    def neighbour(self, kind: bool, receives: bool, s: int, chunk: int) -> bool:
        place = chunk * self.job.pp + s
        return place != (0 if receives != kind else self.job.vpp * self.job.pp - 1)

    def sender(self, kind: bool, s: int, chunk: int) -> tuple[int, int]:
        chunk, s = divmod(chunk * self.job.pp + s + (1 if kind else -1), self.job.pp)
        return s, chunk

    def meet(self, kind: bool, r: int, s: int, chunk: int, mb: int) -> float:
        """When the message of a pass has arrived."""
        to_chunk, to = divmod(chunk * self.job.pp + s + (-1 if kind else 1), self.job.pp)
        ready = self.post(kind, False, r, s, chunk, mb), self.post(kind, True, r, to, to_chunk, mb)
        return max(ready) + self.job.transfer

    def message_end(self, kind: bool, receives: bool, r: int, s: int, chunk: int, mb: int) -> float:
        if not self.neighbour(kind, receives, s, chunk):
            return self.post(kind, receives, r, s, chunk, mb)
        return self.meet(kind, r, *(self.sender(kind, s, chunk) if receives else (s, chunk)), mb)

    def recorded(self, kind: bool, receives: bool, s: int) -> list[tuple[bool, int, int]]:
        """Passes whose messages are in the table, in order."""
        return [t for t in self.of_kind[s][kind] if self.job.empty or self.neighbour(kind, receives, s, t[1])]

    def post(self, kind: bool, receives: bool, r: int, s: int, chunk: int, mb: int) -> float:
        """When a send or a receive is issued."""
        turns, turn = self.recorded(kind, receives, s), (kind, chunk, mb)
        waits = [0.0]
        if (at := turns.index(turn)) > 0:
            waits.append(self.message_end(kind, receives, r, s, *turns[at - 1][1:]))
        if not receives:
            waits.append(self.pass_end(r, s, self.order[s].index(turn)))
        else:
            number = self.of_kind[s][kind].index(turn)
            if number:
                waits.append(self.pass_end(r, s, self.order[s].index(self.of_kind[s][kind][number - 1])))
        first = next(i for i, t in enumerate(self.order[s]) if t[0])
        if kind and at == 0 and first >= 2:
            waits.append(self.pass_end(r, s, first - 2))
        return max(waits)

    def reduce_start(self, r: int, s: int, chunk: int) -> float:
        """When the gradients of a virtual stage are complete, and those of the one before it reduced."""
        last = max(i for i, turn in enumerate(self.order[s]) if turn[0] and turn[1] == chunk)
        before = [self.reduced(s, chunk + 1)] if chunk + 1 < self.job.vpp else []
        return max(self.pass_end(r, s, last), *before) if before else self.pass_end(r, s, last)

    def reduced(self, s: int, chunk: int) -> float:
        start = max(self.reduce_start(r, s, chunk) for r in range(self.job.dp))
        return start + FIXED["grads-reduce-scatter"]

    def closing_types(self, s: int) -> list[str]:
        ends = ["embedding-grads-all-reduce"] if s in (0, self.job.pp - 1) else []
        gradients = "separate-grads-all-reduce" if self.job.overlapped else "grads-reduce-scatter"
        tail = [gradients, "optimizer-clip-main-grad", "optimizer"]
        return ["gc", "layernorm-grads-all-reduce", *ends, *tail]

    def closing_start(self, r: int, s: int, name: str) -> float:
        names = self.closing_types(s)
        at = names.index(name)
        if self.job.overlapped and at == 1:
            return max(self.closing_end(r, s, "gc"), self.reduced(s, 0))
        return self.closing_end(r, s, names[at - 1]) if at else self.pass_end(r, s, len(self.order[s]) - 1)

    def closing_end(self, r: int, s: int, name: str) -> float:
        everyone = [(q, t) for q in range(self.job.dp) for t in range(self.job.pp)]
        groups = {
            "grads-reduce-scatter": [(q, s) for q in range(self.job.dp)],
            "separate-grads-all-reduce": [(q, s) for q in range(self.job.dp)],
            "embedding-grads-all-reduce": [(r, 0), (r, self.job.pp - 1)],
            "optimizer-clip-main-grad": everyone,
        }
        start = max(self.closing_start(q, t, name) for q, t in groups.get(name, [(r, s)]))
        return start + FIXED.get(name, 0.0)

    def rows(self) -> list[dict[str, Any]]:
        with deep_recursion():
            return [row for r in range(self.job.dp) for s in range(self.job.pp) for row in self._worker(r, s)]

    def _worker(self, r: int, s: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []

        def add(name: str, start: float, end: float, seq: int, mc: int = -1, mb: int = -1) -> None:
            gmc = mc * self.job.pp + s if mb >= 0 else -1
            rows.append({
                "dp_rank": r, "stage": s, "rank": s * self.job.dp + r, "step": 10 + self.number, "optype": name,
                "start_ts": start, "duration": end - start, "seq_id": seq, "mc": mc, "mb_id": mb, "gmc": gmc,
            })  # fmt: skip

        for chunk in range(self.job.vpp):
            begin = FIXED["params-all-gather"] * chunk
            add("params-all-gather", begin, begin + FIXED["params-all-gather"], chunk, chunk)
        for i, (kind, chunk, mb) in enumerate(self.order[s]):
            seq = self.of_kind[s][kind].index((kind, chunk, mb))
            add(f"{NAMES[kind]}-compute", self.pass_start(r, s, i), self.pass_end(r, s, i), seq, chunk, mb)
        for kind in (False, True):
            for receives, word in ((True, "recv"), (False, "send")):
                for seq, (_, chunk, mb) in enumerate(self.recorded(kind, receives, s)):
                    where = (kind, receives, r, s, chunk, mb)
                    add(f"{NAMES[kind]}-{word}", self.post(*where), self.message_end(*where), seq)
        for seq, chunk in enumerate(reversed(range(self.job.vpp)) if self.job.overlapped else ()):
            add("grads-reduce-scatter", self.reduce_start(r, s, chunk), self.reduced(s, chunk), seq, chunk)
        for name in self.closing_types(s):
            add(name, self.closing_start(r, s, name), self.closing_end(r, s, name), 0, 0 if "scatter" in name else -1)
        return rows
