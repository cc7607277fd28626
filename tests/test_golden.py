"""Golden answers: a sample of the commands of `tests/golden.py` answers as it did, to the ninth digit."""

from __future__ import annotations

from itertools import islice

import pytest

from golden import GROUPS, KEPT, NEED_SHARED, Command, answer_of, kept, moved, name_of

EVERY = 12  # command of the groups that need no shared measurements
COMMANDS = [command for name, group in GROUPS.items() if name not in NEED_SHARED for command in group()]


@pytest.mark.parametrize("command", islice(COMMANDS, 0, None, EVERY), ids=name_of)
def test_an_answer_is_what_it_was(command: Command) -> None:
    """A moved value is a defect or a decision: `python tests/golden.py` lists them all, `--record` keeps them."""
    name = name_of(command)
    assert not [str(one) for one in moved(name, kept()[name], answer_of(command))]


def test_every_command_that_needs_no_shared_measurements_has_a_golden_answer() -> None:
    assert KEPT.stat().st_size < 1 << 20
    assert {name_of(command) for command in COMMANDS} <= set(kept())


def test_values_that_moved_appeared_or_are_gone_are_found_and_those_that_round_otherwise_are_not() -> None:
    before = {"step_ms": 100.0, "fits": True, "gpu": "h100", "gone": 1}
    after = {"step_ms": 100.0 * (1 + 1e-10), "fits": True, "gpu": "h100", "new": 2}
    assert [one.key for one in moved("command", before, after)] == ["gone", "new"]
    for key, value in (("step_ms", 100.000001), ("fits", False), ("gpu", "h200")):
        assert [one.key for one in moved("command", before, before | {key: value})] == [key]
