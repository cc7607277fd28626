"""The entry point of searches: which configuration of a run is best?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from lumos.errors import OptionError
from lumos.search.branch_and_bound import Progress, Search, Task
from lumos.search.estimator import Estimator
from lumos.search.journal import open_journal
from lumos.search.ranking import Front, Objective
from lumos.search.result import SearchResult, flat
from lumos.search.space import Space, checked_choices
from lumos.setup.constraints import mistakes_in
from lumos.setup.setup import Setup
from lumos.workers import Engine, Here, fingerprint

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
) -> SearchResult:
    """The best configurations of a run.

    `vary` gives the values of axes, as in {"cluster.gpus": [256, 512], "parallel.tp": [8]}. Other axes take all values
    that make sense; the GPUs are the setup's unless varied. `memory_gib` limits the memory of a GPU below what it has.
    `shard` is (index, count) of the part to search. With a `journal` folder, an interrupted search can be resumed.

    >>> search(read_setup(Path("run.toml")), {"cluster.gpus": [64]}).as_dict()["results"][0]   # doctest: +SKIP
    """
    if top < 1:
        raise OptionError(f"--top {top}: give at least 1")
    if memory_gib < 0:
        raise OptionError(f"--memory {memory_gib:g}: give GiB, more than 0")
    space = Space(setup, checked_choices(setup, vary or {}))
    objective.check(space.gpu_types)
    task = Task(space, objective, estimator or Estimator(), memory_gib, shard, exhaustive)
    question = fingerprint(flat(setup), space.choices, objective, memory_gib, task.estimator.name, top, exhaustive)
    begin = monotonic()
    kept = open_journal(journal, f"{question} {shard}")
    found = Search(task, engine or Here(), kept, Front(top), progress).run()
    if not found.valid and shard == (0, 1):
        raise OptionError(f"no combination is valid: {_first_mistake(setup, space.choices)}")
    return SearchResult(found, monotonic() - begin, question, tuple(notes))


def _first_mistake(setup: Setup, choices: Mapping[str, tuple[Any, ...]]) -> str:
    """What is wrong with the first of the values that were asked for, as `lumos predict` would report it."""
    mistakes = mistakes_in(setup.replaced({key: values[0] for key, values in choices.items()}))
    named = [text for text in mistakes if any(key in text for key in choices if key != "cluster.gpus")]
    return next(iter(named or mistakes), "vary fewer keys, or take another batch or number of GPUs")
