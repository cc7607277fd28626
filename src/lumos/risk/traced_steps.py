"""Drawn steps of a traced run: its own graph, with what differed between the recorded steps and what a window of a few
steps cannot show.

A trace of a dozen steps is a fraction of a second of a run: it shows how steps differ from their neighbours, not how
the host drifts over minutes. With n recorded steps, what they showed has the weight n / (n + n0), and the spreads of
`data/variability.json` or of the user the rest; variances add up. n0 differs for hosts, kernels and collectives, and is
in that file ("traced"). A trace of one step has its spreads alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lumos.analysis.replay import Replay
from lumos.data_files import read_table
from lumos.graph.graph import Bools, Floats, Graph, Ints
from lumos.graph.simulate import simulate_many
from lumos.risk.recurring_tasks import HOST, KERNEL, PARTS, TRANSFER, RecurringTasks, recurring_tasks
from lumos.risk.variability import Pauses, Variability

_LITTLE = 0.05
_NEIGHBOURS = 5  # steps whose median is the level of the host
_CELLS = 4_000_000  # nodes times scenarios that are simulated together
_WORK = 400_000_000  # nodes times scenarios at most
CAUSES_OF_PART = {HOST: "host", KERNEL: "step", TRANSFER: "collective"}


def trusted(part: str) -> float:
    """n0 of one of `PARTS`: how many recorded steps count as much as the usual figures."""
    return float(read_table("variability.json")["traced"][part])


@dataclass(frozen=True)
class TracedSteps:
    """A replayed trace whose steps can be drawn."""

    replay: Replay
    scale: Floats | None = None  # on the duration of every node: a what-if
    alone: bool = False  # whether the spreads that are drawn from count alone, and what the trace showed does not

    @cached_property
    def tasks(self) -> RecurringTasks:
        return recurring_tasks(self.replay)

    @cached_property
    def weights(self) -> Floats:
        """Of what the recorded steps showed, for each of `PARTS`; nothing for a single step."""
        steps = self.tasks.steps
        trust = np.array([trusted(name) for name in PARTS])
        return np.zeros(len(PARTS)) if self.alone or steps < 2 else steps / (steps + trust)

    @property
    def most_draws(self) -> int:
        """Steps that are drawn within a few seconds."""
        return max(1, _WORK // max(len(self.tasks.graph), 1)) * self.tasks.steps

    def drawn_ms(self, variability: Variability, draws: int, seed: int, without: str = "") -> Floats:
        """Lengths of so many steps; `without` one cause: a name of a spread, or "pauses"."""
        scenarios = -(-min(draws, self.most_draws) // self.tasks.steps)
        batch = max(1, _CELLS // max(len(self.tasks.graph), 1))
        random = np.random.default_rng(seed)
        graph = self._graph(without)
        found = []
        for first in range(0, scenarios, batch):
            size = min(batch, scenarios - first)
            duration = self._durations(graph, variability, size, random, without)
            ends = simulate_many(graph, duration)
            found.append(self._lengths(ends, duration) / 1e6)
        job = Variability().job if without == "job" else variability.job
        lengths = np.concatenate(found)
        return np.asarray((lengths * job.at(random.random(lengths.shape))).ravel()[:draws])

    def sensitivity(self) -> dict[str, float]:
        """By how many percent the step gets longer if a part of the work does by one: of `PARTS`."""
        tasks, graph = self.tasks, self.tasks.typical_graph
        slower = np.stack(
            [graph.duration * np.where(tasks.part == part, 1 + _LITTLE, 1.0) for part in range(len(PARTS))]
        )
        duration = np.concatenate([graph.duration[None], slower])
        length = self._lengths(simulate_many(graph, duration), duration).mean(axis=1)
        return dict(zip(PARTS, ((length[1:] / length[0] - 1) / _LITTLE).tolist(), strict=True))

    # ------------------------------------------------------------------ durations
    def _graph(self, without: str) -> Graph:
        """The graph with its differences between steps as far as they count; none of the part that is left out."""
        tasks = self.tasks
        graph, typical = self.settled.graph, tasks.typical_graph
        share = np.sqrt(self.weights)[tasks.part]
        for part, cause in CAUSES_OF_PART.items():
            if cause == without:
                share[tasks.part == part] = 0.0
        share[tasks.task < 0] = 1.0
        moved = graph.with_times(
            typical.duration + share * (graph.duration - typical.duration),
            typical.gap + share * (graph.gap - typical.gap),
        )
        lag = typical.edges.lag + share[graph.edges.target] * (graph.edges.lag - typical.edges.lag)
        return moved.with_lags(lag)

    @cached_property
    def settled(self) -> RecurringTasks:
        """Without the drift of the host while it was recorded: the first steps of a recording are often slow."""
        tasks = self.tasks
        if tasks.steps < 2 * _NEIGHBOURS:
            return tasks
        share = tasks.share(HOST)
        reach = _NEIGHBOURS // 2
        level = np.array([
            np.median(share[max(0, min(step - reach, tasks.steps - _NEIGHBOURS)) :][:_NEIGHBOURS], axis=0)
            for step in range(tasks.steps)
        ])  # fmt: skip
        level = np.concatenate([level, np.ones((1, tasks.ranks))])  # outside of all steps
        host = np.where(tasks.part == HOST, level[tasks.step, tasks.rank], 1.0)
        return replace(tasks, graph=tasks.graph.with_times(tasks.graph.duration / host, tasks.graph.gap))

    def _durations(
        self, graph: Graph, variability: Variability, size: int, random: np.random.Generator, without: str
    ) -> Floats:
        """(scenarios, nodes): the graph's durations times what is drawn for every step, and pauses."""
        tasks = self.tasks
        factors = np.ones((size, len(PARTS), tasks.steps + 1))
        for part, cause in CAUSES_OF_PART.items():
            u = random.random((size, tasks.steps))
            if cause != without:
                factors[:, part, :-1] = variability.spread(cause).scaled(np.sqrt(1.0 - self.weights[part])).at(u)
        usual = graph.duration if self.scale is None else graph.duration * self.scale
        duration = usual * factors[:, tasks.part, tasks.step]  # step -1 is the last column
        if without != "pauses":
            self._pause(duration, variability.pauses, random)
        return duration

    def _pause(self, duration: Floats, pauses: Pauses, random: np.random.Generator) -> None:
        """Stop the host of some ranks in some steps, somewhere in the step."""
        if pauses.is_none:
            return
        for nodes in self._host_nodes:
            hit = np.flatnonzero(random.random(len(duration)) < pauses.probability)
            at = nodes[random.integers(0, len(nodes), len(hit))]
            duration[hit, at] += 1e6 * pauses.ms * pauses.spread.at(random.random(len(hit)))

    @cached_property
    def _host_nodes(self) -> list[Ints]:
        """Nodes of the host of every rank in every step."""
        tasks = self.tasks
        host = np.flatnonzero((tasks.part == HOST) & (tasks.step >= 0))
        place = tasks.step[host] * tasks.ranks + tasks.rank[host]
        host = host[np.argsort(place, kind="stable")]
        return [part for part in np.split(host, np.flatnonzero(np.diff(np.sort(place))) + 1) if len(part)]

    # ------------------------------------------------------------------ steps
    def _lengths(self, ends: Floats, duration: Floats) -> Floats:
        """(scenarios, steps): as `StepMarks.read` has them, the mean over ranks, in nanoseconds."""
        first, last, gpu, on_gpu = self._marks
        if first is None or last is None:
            span = ends.max(axis=1) - (ends - duration)[:, : len(self.replay.execution.nodes)].min(axis=1)
            return np.asarray(span[:, None])
        start, end = ends[:, first] - duration[:, first], ends[:, last]
        end = np.where(on_gpu, np.maximum(end, ends[:, gpu]), end)
        start[:, 1:] = np.maximum(start[:, 1:], np.minimum(end[:, :-1], end[:, 1:]))
        return np.asarray((end - start).mean(axis=2))

    @cached_property
    def _marks(self) -> tuple[Ints | None, Ints | None, Ints, Bools]:
        """(steps, ranks): the nodes that begin and end each step, and the last of it on a GPU."""
        marks, nodes = self.replay.marks, self.replay.execution.nodes
        on_gpu = marks.last_on_gpu >= 0
        gpu = np.where(on_gpu, nodes.last_node[marks.last_on_gpu], 0)
        if (marks.note < 0).any() or (nodes.last_node[marks.note] < 0).any():
            return None, None, gpu, on_gpu
        return nodes.first_node[marks.note], nodes.last_node[marks.note], gpu, on_gpu
