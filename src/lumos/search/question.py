"""Question: what a search is asked, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from lumos.errors import OptionError
from lumos.search.estimator import Described, Estimator
from lumos.search.journal import journal_in
from lumos.search.objective import Objective, checked_objective
from lumos.search.outcome import Outcome, flat
from lumos.search.search import Progress, Search, Task
from lumos.search.space import Space, checked_choices
from lumos.setup.constraints import mistakes_in
from lumos.setup.setup import Setup
from lumos.workers import Engine, Here
from lumos.workers.shard import fingerprint

_BY_TIME = Objective()


def search(
    setup: Setup,
    vary: Mapping[str, Sequence[Any]] | None = None,
    *,
    objective: Objective = _BY_TIME,
    top: int = 10,
    memory_gib: float = 0.0,
    estimator: Estimator | None = None,
    engine: Engine | None = None,
    shard: tuple[int, int] = (0, 1),
    journal: Path | None = None,
    exhaustive: bool = False,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
) -> Outcome:
    """The best configurations of a run.

    `vary` names the values of an axis, {"cluster.gpus": [256, 512], "parallel.tp": [8]}; axes that it does not name
    take all values that make sense, but for the GPUs, which are the setup's. `memory_gib` is what a GPU may use, where
    that is less than it has. With a `journal`, a folder, an interrupted search goes on where it was.
    """
    if top < 1 or memory_gib < 0:
        wrong = f"--top {top}: give at least 1" if top < 1 else f"--memory {memory_gib:g}: give GiB, more than 0"
        raise OptionError(wrong)
    space = Space(setup, checked_choices(setup, vary or {}))
    checked_objective(objective, space.kinds)
    task = Task(space, objective, estimator or Described(), memory_gib, shard, exhaustive)
    asked = fingerprint(flat(setup), space.choices, objective, memory_gib, task.estimator.name, top, exhaustive)
    begin = monotonic()
    kept = journal_in(journal, f"{asked} {shard}")
    found = Search(task, engine or Here(), kept, top, progress).run()
    if not found.valid and shard == (0, 1):
        raise OptionError(f"no combination is valid: {_first_mistake(setup, space.choices)}")
    return Outcome(found, monotonic() - begin, asked, tuple(notes))


def _first_mistake(setup: Setup, choices: Mapping[str, tuple[Any, ...]]) -> str:
    """What is wrong with the first of the values that were asked for, as `lumos predict` would say it."""
    mistakes = mistakes_in(setup.replaced({key: values[0] for key, values in choices.items()}))
    named = [text for text in mistakes if any(key in text for key in choices if key != "cluster.gpus")]
    return next(iter(named or mistakes), "vary fewer keys, or take another batch or number of GPUs")
