"""What the official converter of Chakra makes of a trace, for tests: the same nodes, and the same losses.

Operators keep their own time in whole microseconds, cut off; callers, threads, launches and announced collectives are
there. When anything ran is not, steps and optimizers have no time, and what waits for what on the GPU is left to the
memory that kernels share. The facts are those of mlcommons/chakra 1.0 (`chakra_trace_link`, `chakra_converter`).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from lumos.chakra.file_format import NodeType, add_value, delimited, schema
from lumos.graph.graph import Rule
from lumos.graph.rules.build import Execution
from lumos.trace.names import Category

_PAUSE = 1_000_000  # ns without operators, after which a thread is taken to have waited for another


def convert_recording(run: Execution, folder: Path, with_times: bool = False, peers_by_index: bool = True) -> Path:
    """Write `job.RANK.et` for every rank of a recorded run, as the official tools would."""
    folder.mkdir(exist_ok=True)
    for rank in run.trace.ranks:
        kinds = schema()
        head = kinds.metadata()
        add_value(head.attr, "schema", "string_val", "1.1.1-chakra.0.0.4")
        with (folder / f"job.{rank}.et").open("wb") as file:
            for message in (head, *_Rank(run, rank, peers_by_index).nodes(with_times)):
                file.write(delimited(message))
    return folder


class _Rank:
    def __init__(self, run: Execution, rank: int, peers_by_index: bool) -> None:
        self.run, self.trace, self.rank, self.peers_by_index = run, run.trace, rank, peers_by_index
        trace, host = run.trace, (Category.OP, Category.NOTE)
        mine = (trace.rank == rank) & (run.nodes.first_node >= 0)
        self.ops = np.flatnonzero(mine & np.isin(trace.category, host))
        self.ops = self.ops[np.lexsort((-trace.end[self.ops], trace.start[self.ops]))].tolist()
        self.announced = [row for row in self.ops if trace.message[row] >= 0]
        self.kernels: dict[int, list[int]] = defaultdict(list)
        for row in np.flatnonzero(mine & trace.on_gpu & (trace.launch_row >= 0)).tolist():
            self.kernels[self._launcher(row)].append(row)
        self.ids: dict[int, int] = {}
        for row in self.ops:
            for one in (row, *sorted(self.kernels[row], key=lambda k: int(trace.start[k]))):
                self.ids[one] = len(self.ids) + 2
        self.caller = {row: self._op_around(int(run.nodes.parent[row])) for row in self.ops}

        self.sequence = self._numbered()

    def _numbered(self) -> dict[int, int]:
        """Sequence numbers of announcements: those of a batch of messages share one, and one kernel."""
        found: dict[int, int] = {}
        pending: list[int] = []
        number = 0
        for row in self.ops:
            if self.trace.message[row] < 0:
                continue
            pending.append(row)
            if any(self.trace.is_communication[kernel] for kernel in self.kernels[row]):
                found |= dict.fromkeys(pending, number)
                pending, number = [], number + 1
        return found

    def _op_around(self, row: int) -> int:
        """The operator or annotation at a row or around it; -1 for none."""
        while row >= 0 and self.trace.category[row] == Category.CALL:
            row = int(self.run.nodes.parent[row])
        return row

    def _launcher(self, kernel: int) -> int:
        """The operator that launched a kernel; of communication, the last announcement of its thread."""
        trace, launch = self.trace, self.trace.launch_row[kernel]
        around = self._op_around(int(self.run.nodes.parent[launch]))
        if not trace.is_communication[kernel]:
            return around
        before = [row for row in self.announced if trace.lane[row] == trace.lane[launch]]
        before = [row for row in before if trace.start[row] <= trace.start[launch]]
        return before[-1] if before else around

    def nodes(self, with_times: bool) -> list[Any]:
        inner: dict[int, int] = defaultdict(int)
        for row in self.ops:
            inner[self.caller[row]] += int(self.trace.duration[row])
        threads, before = self._threads(), self._handed_over()
        found = []
        for row in self.ops:
            name = self.trace.names[self.trace.name[row]]
            lost = "ProfilerStep" in name or "Optimizer.step" in name
            own = 0 if lost else (int(self.trace.duration[row]) - inner[row]) // 1000
            node = schema().node(id=self.ids[row], name=name, type=NodeType.COMP, duration_micros=max(0, own))
            node.ctrl_deps.append(self.ids.get(self.caller[row], 1))
            if row in before:
                node.data_deps.append(self.ids[before[row]])
            node.inputs.values = self._announced(row)
            self._describe(node, row, threads, is_cpu_op=True)
            found.append(node)
            found += [self._kernel(kernel, row, threads) for kernel in self.kernels[row]]
        if with_times:
            rows = {number: row for row, number in self.ids.items()}
            for node in found:
                node.start_time_micros = int(self.trace.start[rows[node.id]]) // 1000
        return found

    def _kernel(self, row: int, op: int, threads: dict[int, int]) -> Any:
        trace = self.trace
        kind, duration = NodeType.COMP, int(trace.duration[row]) // 1000
        message = self._message(op) or self._message(row)
        if trace.is_communication[row]:
            sides = {"send": NodeType.COMM_SEND, "recv": NodeType.COMM_RECV}
            kind = sides.get(message.collective if message else "", NodeType.COMM_COLL)
        node = schema().node(id=self.ids[row], name=trace.names[trace.name[row]], type=kind, duration_micros=duration)
        node.ctrl_deps.append(self.ids[op])
        node.data_deps.append(self.ids[op])
        node.inputs.values = self._shared.get(row, "[") + self._announced(op)[1:]
        self._describe(node, op, threads, is_cpu_op=False)
        add_value(node.attr, "stream", "int64_val", int(trace.lanes[trace.lane[row]].label))
        if kind != NodeType.COMP:
            size = max(message.in_elements, 0) if message else 0
            add_value(node.attr, "comm_size", "int64_val", size)
            add_value(node.attr, "pg_name", "string_val", message.group if message else "")
        return node

    def _describe(self, node: Any, row: int, threads: dict[int, int], is_cpu_op: bool) -> None:
        add_value(node.attr, "rf_id", "int64_val", self.ids[row])
        add_value(node.attr, "tid", "int64_val", threads[int(self.trace.lane[row])])
        add_value(node.attr, "is_cpu_op", "bool_val", is_cpu_op)

    def _message(self, row: int) -> Any:
        number = int(self.trace.message[row])
        return self.trace.messages[number] if number >= 0 else None

    def _announced(self, row: int) -> str:
        """[sequence, whether a message], [group, description], peer, name, splits, splits, first rank, stride, size."""
        message = self._message(row)
        if message is None:
            return "[]"
        ranks = message.ranks or tuple(range(max(message.group_size, 1)))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        peer = {"send": message.destination, "recv": message.source}.get(message.collective, 0)
        if peer in ranks and self.peers_by_index and message.collective in ("send", "recv"):
            peer = ranks.index(peer)
        name, number = message.collective, self.sequence.get(row, 0)
        return (
            f"[[{number}, {name in ('send', 'recv')}], ['{message.group}', 'default_pg'], {peer}, '{name}', [], [], "
            f"{ranks[0]}, {stride}, {len(ranks)}]"
        )

    @property
    def _shared(self) -> dict[int, str]:
        """Tensors by kernel: a stream that waits for another is made to use its memory."""
        if not hasattr(self, "_tensors"):
            edges, row = self.run.graph.edges, self.run.nodes.row
            pick = (edges.rule == Rule.EVENT) & (edges.source < len(row)) & (edges.target < len(row))
            tensors: dict[int, str] = defaultdict(lambda: "[")
            pairs = zip(row[edges.source[pick]].tolist(), row[edges.target[pick]].tolist(), strict=True)
            for number, pair in enumerate(pairs):
                for one in pair:
                    tensors[one] += f"[{number}, {number}, 0, 8, 2, 'cuda:0'], "
            self._tensors = tensors
        return self._tensors

    def _threads(self) -> dict[int, int]:
        lanes = dict.fromkeys(int(self.trace.lane[row]) for row in self.ops)
        return {lane: number for number, lane in enumerate(lanes, 1)}

    def _handed_over(self) -> dict[int, int]:
        """For operators after a pause of their thread: the one that began last before it in any other."""
        trace, found = self.trace, dict[int, int]()
        last: dict[int, int] = {}
        ended: dict[int, int] = {}
        held: dict[int, int] = {}
        for row in self.ops:
            lane, start = int(trace.lane[row]), int(trace.start[row])
            if start - ended.get(lane, -(1 << 60)) > _PAUSE:
                others = [other for thread, other in last.items() if thread != lane]
                held[lane] = max(others, key=lambda other: int(trace.start[other]), default=-1)
            if held[lane] >= 0:
                found[row] = held[lane]
            is_step = "ProfilerStep" in trace.names[trace.name[row]]
            last[lane] = row
            ended[lane] = max(ended.get(lane, 0), start if is_step else int(trace.end[row]))
        return found
