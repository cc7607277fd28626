"""Ablation: how much of a recorded step the dependency rules explain, and what each of them is worth.

A graph that keeps every recorded wait replays perfectly, whatever its rules say. Here every wait that no rule explains
is set to zero before the graph is simulated: what the step lacks then is the honest error of the replay. The same
without a rule says what that rule explains. When a thread or stream begins is kept: a recording starts somewhere.

Without `thread` or `collective`, a pause or a transfer keeps its recorded time, waiting included: both rows flatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lumos.graph.graph import Graph
from lumos.graph.rules.build import RULE_NAMES, Execution, build
from lumos.graph.rules.sync import LONGEST_RETURN, SYNCHRONISING
from lumos.graph.simulate import simulate
from lumos.trace.steps import find_steps

# What replays that know only launches, synchronisation and collectives lack: everything between streams.
BETWEEN_STREAMS = ("event", "communicator", "channel")


@dataclass(frozen=True)
class Ablation:
    """The step with nothing frozen, under some of the rules."""

    without: tuple[str, ...]
    edges: int  # fewer than with all rules; negative if others came in their place
    step_ms: float
    error_pct: float  # from the recorded step

    def as_dict(self) -> dict[str, Any]:
        """As in `lumos replay --ablate --json`."""
        return asdict(self) | {"without": list(self.without)}


def ablate(execution: Execution) -> Iterator[Ablation]:
    """All rules first, then without each that states something here, then without all that order streams."""
    whole = _measured(execution, (), len(execution.graph.edges))
    yield whole
    for without in (*((name,) for name in RULE_NAMES), BETWEEN_STREAMS):
        reduced = build(execution.trace, without)
        if len(reduced.graph.edges) != len(execution.graph.edges):
            yield _measured(reduced, without, len(execution.graph.edges))


def _measured(execution: Execution, without: tuple[str, ...], edges: int) -> Ablation:
    marks = find_steps(execution.trace)
    recorded = marks.read(execution.trace).mean
    step = marks.read(execution.retime(simulate(unfrozen(execution)))).mean
    error = 100 * (step / recorded - 1) if recorded else 0.0
    return Ablation(without, edges - len(execution.graph.edges), step, error)


def unfrozen(execution: Execution) -> Graph:
    """The graph without the waits that no rule explains; where a lane begins is not one of them.

    A synchronising call that outlasts everything it is known to wait for waited for something else.
    """
    graph, nodes, trace = execution.graph, execution.nodes, execution.trace
    waits = np.zeros(len(graph), bool)
    waits[: len(nodes)] = nodes.is_return & np.isin(trace.call[nodes.row], SYNCHRONISING) & (nodes.row >= 0)
    duration = np.where(waits, np.minimum(graph.duration, LONGEST_RETURN), graph.duration)
    edges = replace(graph.edges, frozen=np.zeros(len(graph.edges)))
    return replace(graph, duration=duration, frozen=np.where(graph.is_first, graph.frozen, 0.0), edges=edges)
