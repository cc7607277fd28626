"""The inner loops, compiled by numba once and cached on disk. No other module imports numba.

The cache is beside the package, or in the user's cache folder if the package is read-only, or in NUMBA_CACHE_DIR. Where
none of them can be written, or a cache file is damaged, the loops are compiled for this process alone: some seconds
more at every start, and nothing else.

numba would also take settings, the folder of its pickled cache among them, from `.numba_config.yaml` in the current
folder, which may be a folder of someone else's traces. It is imported as if it could not read YAML.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.graph import loops


def _import_njit() -> Any:
    """numba's compiler; without the YAML reader if the current folder has a file of settings."""
    modules: dict[str, Any] = sys.modules
    if "numba" not in modules:  # else the settings are the application's own
        hidden = ["yaml"] if os.path.lexists(".numba_config.yaml") else []
        before = {name: modules.pop(name, None) for name in hidden}
        modules.update(dict.fromkeys(hidden))
        try:
            with warnings.catch_warnings(action="ignore"):
                from numba.core import config
        finally:
            for name, module in before.items():
                del modules[name]
                modules.update({name: module} if module else {})
        config._config_fname = os.devnull  # numba looks for it again whenever it compiles a function
    from numba import njit

    return njit


njit = _import_njit()
Array = NDArray[Any]


class compiled:  # noqa: N801 - a decorator
    """A function that numba compiles at its first call, from a cache if there is a usable one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        try:
            self._run = njit(cache=True, nogil=True)(function)
        except RuntimeError:  # no folder for the cache can be written
            self._run = njit(nogil=True)(function)
        self._proven = False

    def __call__(self, *arguments: Any) -> Any:
        if self._proven:
            return self._run(*arguments)
        try:
            answer = self._run(*arguments)
        except Exception:  # a full disk raises OSError; a damaged cache file whatever unpickling it raises
            self._run = njit(nogil=True)(self._function)
            answer = self._run(*arguments)
        self._proven = True
        return answer


def compiled_into(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of compiled functions of the same file: numba compiles it together with them."""
    part: Callable[..., Any] = njit(nogil=True)(function)
    return part


topological_order = compiled(loops.topological_order)
forward_pass = compiled(loops.forward_pass)
cut_into_segments = compiled(loops.cut_into_segments)
walk_back = compiled(loops.walk_back)


@compiled
def forward_pass_many(
    order: Array, is_first: Array, duration: Array, gap: Array, incoming: Array, source: Array, lag: Array,
    from_start: Array,
) -> Array:  # fmt: skip
    """End of every node in many scenarios at once; `duration` and the answer are (nodes, scenarios)."""
    scenarios = duration.shape[1]
    end = np.zeros(duration.shape)
    time = np.zeros(scenarios)
    for node in order:
        for s in range(scenarios):
            time[s] = gap[node] if is_first[node] else end[node - 1, s] + gap[node]
        for edge in range(incoming[node], incoming[node + 1]):
            other = source[edge]
            for s in range(scenarios):
                reached = end[other, s] - duration[other, s] if from_start[edge] else end[other, s]
                time[s] = max(time[s], reached + lag[edge])
        for s in range(scenarios):
            end[node, s] = time[s] + duration[node, s]
    return end


@compiled
def pay_debts(first: Array, duration: Array, owed: Array, kept: float, limit: float) -> Array:
    """Durations less what each node owes: each keeps a share, and the next ones owe the rest, up to a limit."""
    paid = duration.copy()
    for lane in range(len(first) - 1):
        debt = 0.0
        for node in range(first[lane], first[lane + 1]):
            debt = min(debt, limit) + owed[node]
            part = min(debt, duration[node] * (1.0 - kept))
            paid[node] = duration[node] - part
            debt -= part
    return paid


@compiled
def sum_of_trees(rows: Array, root: Array, feature: Array, threshold: Array, left: Array) -> Array:
    """The sum over all trees of the leaf that each row falls into."""
    answer = np.zeros(len(rows))
    for row in range(len(rows)):
        total = 0.0
        for tree in range(len(root)):
            node = root[tree]
            while feature[node] >= 0:
                node = left[node] + (rows[row, feature[node]] > threshold[node])
            total += threshold[node]
        answer[row] = total
    return answer


def load() -> None:
    """Load the compiled loops, or compile them the first time: half a second that may pass while files are read."""
    ints, small, flags, floats = np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, bool), np.zeros(1)
    lane, edges = np.array([0, 1]), np.zeros(2, np.int32)
    cut_into_segments(small, ints, ints, flags, flags)
    topological_order(lane, edges, small[:0])
    forward_pass(small, flags, floats, floats, edges, small[:0], floats[:0], flags[:0])
    walk_back(0, 0.0, floats, floats, flags, floats, edges, small[:0], floats[:0], flags[:0])
    pay_debts(lane, floats, floats, 0.5, 1.0)
