"""Recurrence: which tasks of a traced run are the same task, in another step or on another rank.

A task is told by what it does (its name and lane, say) and by its how-manieth time within a step.
"""

from __future__ import annotations

import numpy as np

from lumos.graph.graph import Floats, Ints
from lumos.graph.rules.nodes import Nodes
from lumos.trace.steps import StepMarks


def step_of_nodes(nodes: Nodes, marks: StepMarks, until_next: bool) -> Ints:
    """The step in which a node of a thread ran, or in which a node of a stream was launched; -1 outside of all.

    A step lasts until its own mark ends, or `until_next` begins.
    """
    trace = nodes.trace
    if (marks.note < 0).all():
        return np.zeros(len(nodes), np.int64)
    launch = nodes.launch_of_node
    when = np.where(launch >= 0, trace.start[launch], nodes.start)
    found = np.full(len(nodes), -1, np.int64)
    for column, rank in enumerate(marks.ranks):
        mine = np.flatnonzero(nodes.rank == rank)
        begin, end = trace.start[marks.note[:, column]], trace.end[marks.note[:, column]]
        order = np.argsort(begin, kind="stable")
        place = np.searchsorted(begin[order], when[mine], side="right") - 1
        index = order[np.maximum(place, 0)]
        inside = until_next | (when[mine] < np.maximum(end[index], begin[index] + 1))
        found[mine] = np.where((place >= 0) & inside, index, -1)
    return found


def numbered(*columns: Ints) -> Ints:
    """A number for each combination of values that occurs, in their order."""
    key = np.unique(columns[0], return_inverse=True)[1].astype(np.int64)
    for column in columns[1:]:
        values, other = np.unique(column, return_inverse=True)
        key = np.unique(key * len(values) + other, return_inverse=True)[1].astype(np.int64)
    return key


def occurrence(cell: Ints, start: Ints) -> Ints:
    """The how-manieth of its cell each is, in the order of time."""
    order = np.lexsort((start, cell))
    place = np.empty(len(cell), np.int64)
    place[order] = np.arange(len(cell)) - np.searchsorted(cell[order], cell[order])
    return place


def group_medians(group: Ints, value: Floats, groups: int, lower: bool) -> Floats:
    """The median of each group, 0 for an empty one; of two in the middle the `lower`, or their mean.

    Groups below 0 do not count.
    """
    order = np.lexsort((value, group))
    bounds = np.searchsorted(group[order], np.arange(groups + 1))
    first, last = bounds[:-1], np.maximum(bounds[1:] - 1, bounds[:-1])
    low, high = (value[order[np.minimum(place, len(order) - 1)]] if len(order) else np.zeros(groups)
                 for place in ((first + last) // 2, (first + last + 1) // 2))  # fmt: skip
    return np.where(np.diff(bounds) > 0, low if lower else (low + high) / 2, 0.0)
