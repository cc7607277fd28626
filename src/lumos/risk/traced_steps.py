"""Drawn steps of a traced run: its own graph, with what differed between the recorded steps and what a window of a few
steps cannot show.

A trace of a dozen steps is a fraction of a second of a run: it shows how steps differ from their neighbours, not how
the host drifts over minutes. With n recorded steps, what they showed has the weight n / (n + n0), and the usual figures
have the rest; variances add up. n0 differs for hosts, kernels and collectives, and is in `data/variability.json`
("trust"). A trace of one step has the usual figures alone.

The recorded differences stay in the graph as far as they count, each at its own task; the rest of a spread is drawn,
one factor for each part of the work in each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lumos.analysis.replay import Replay
from lumos.data_files import read_table
from lumos.graph.graph import Bools, Floats, Graph, Ints, simulate_many
from lumos.risk.recurring_tasks import HOST, KERNEL, PARTS, TRANSFER, RecurringTasks, recurring_tasks
from lumos.risk.variability import NONE, Pauses, Spread, Variability

_LITTLE = 0.05
_PAUSES, _JOB = 7, 8  # random numbers of their own; those of parts are 0 to 2
_NEIGHBOURS = 5  # steps whose median is the level of the host
_CELLS = 4_000_000  # nodes times scenarios that are simulated together
_WORK = 400_000_000  # nodes times scenarios at most
CAUSES_OF_PART = {HOST: "host", KERNEL: "step", TRANSFER: "collective"}


def trusted(part: str) -> float:
    """n0 of one of `PARTS`: how many recorded steps count as much as the usual figures."""
    return float(read_table("variability.json")["trust"][part])


@dataclass(frozen=True)
class TracedSteps:
    """A replayed trace whose steps can be drawn."""

    replay: Replay
    scale: Floats | None = None  # on the duration of every node: a what-if

    @cached_property
    def tasks(self) -> RecurringTasks:
        return recurring_tasks(self.replay)

    @cached_property
    def weights(self) -> Floats:
        """Of what the recorded steps showed, for each of `PARTS`; nothing for a single step."""
        steps = self.tasks.steps
        trust = np.array([trusted(name) for name in PARTS])
        return np.zeros(len(PARTS)) if steps < 2 else steps / (steps + trust)

    @cached_property
    def shown(self) -> Floats:
        """Sigmas of what the recorded steps showed, for each of `PARTS`."""
        return np.array([np.log(self.settled.share(part)).std() for part in range(len(PARTS))])

    @property
    def most_draws(self) -> int:
        """Steps that are drawn within a few seconds."""
        return max(1, _WORK // max(len(self.tasks.graph), 1)) * self.tasks.steps

    def drawn_ms(self, variability: Variability, draws: int, seed: int, without: str = "") -> Floats:
        """Lengths of so many steps; `without` one cause: a name of a spread, or "pauses"."""
        scenarios = -(-min(draws, self.most_draws) // self.tasks.steps)
        batch = max(1, _CELLS // max(len(self.tasks.graph), 1))
        carried, drawn = self._split(variability.without(without) if without else variability)
        graph = self._graph(carried)
        pauses = Pauses() if without == "pauses" else variability.pauses
        found = []
        for first in range(0, scenarios, batch):
            duration = self._durations(graph, drawn, pauses, min(batch, scenarios - first), (seed, first))
            ends = simulate_many(graph, duration)
            found.append(self._lengths(ends, duration) / 1e6)
        lengths = np.concatenate(found).ravel()[:draws]
        job = NONE if without == "job" else variability.job
        return np.asarray(lengths * job.at(np.random.default_rng([seed, _JOB]).random(len(lengths))))

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
    def _split(self, variability: Variability) -> tuple[Floats, list[Spread]]:
        """Of every part's spread: the share of the recorded differences that stay in the graph, and what is drawn."""
        carried, drawn = np.zeros(len(PARTS)), []
        for part, cause in CAUSES_OF_PART.items():
            spread, shown = variability.spread(cause), float(self.shown[part])
            total = spread.sigma
            if shown > 0:
                carried[part] = min(float(np.sqrt(self.weights[part])), total / shown)
            rest = np.sqrt(max(0.0, total**2 - (carried[part] * shown) ** 2))
            drawn.append(spread.scaled(rest / total) if total > 0 else NONE)
        return carried, drawn

    def _graph(self, carried: Floats) -> Graph:
        """The graph with these shares of the differences between its steps."""
        tasks = self.tasks
        graph, typical = self.settled.graph, tasks.typical_graph
        share = np.where(tasks.task >= 0, carried[tasks.part], 1.0)
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

    def _durations(self, graph: Graph, drawn: list[Spread], pauses: Pauses, size: int, seed: tuple[int, int]) -> Floats:
        """(scenarios, nodes): the graph's durations times what is drawn for every step, and pauses.

        Every part has random numbers of its own, so that one can be left out and the others stay as they are.
        """
        tasks = self.tasks
        factors = np.ones((size, len(PARTS), tasks.steps + 1))
        for part, spread in enumerate(drawn):
            factors[:, part, :-1] = spread.at(np.random.default_rng([*seed, part]).random((size, tasks.steps)))
        usual = graph.duration if self.scale is None else graph.duration * self.scale
        duration = usual * factors[:, tasks.part, tasks.step]  # step -1 is the last column
        self._pause(duration, pauses, np.random.default_rng([*seed, _PAUSES]))
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
        if not ends.shape[1]:  # a trace of nothing but annotations
            return np.tile(1e6 * self.replay.clean_steps.milliseconds, (len(ends), 1))
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
