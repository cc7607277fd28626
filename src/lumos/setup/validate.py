"""Check: from plain values to a Setup, or to one error that lists every mistake in them, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lumos.errors import OptionError
from lumos.setup.constraints import mistakes_in
from lumos.setup.messages import did_you_mean, mistakes_of, named, shown
from lumos.setup.sections import Section
from lumos.setup.setup import KEYS, SECTIONS, Setup

# If one of the first is wrong, so may be what was derived from it: rules about those would mislead.
_FOLLOW = (
    ({"model.heads", "model.hidden"}, {"model.heads", "model.hidden", "model.kv_heads", "model.head_dim"}),
    (
        {
            *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "cluster.gpus"),
            *("train.micro_batch", "train.microbatches", "train.global_batch"),
        },
        {"parallel.dp", "cluster.gpus", "train.microbatches", "train.global_batch"},
    ),
    ({"parallel.vpp"}, {"parallel.schedule"}),
    ({"model.experts", "model.ffn", "model.expert_ffn"}, {"model.ffn", "model.expert_ffn"}),
)


def check(setup: Setup, where: str = "") -> None:
    """OptionError with every mistake in a setup that was built from values of the right types."""
    _refuse(mistakes_in(setup), where)


def checked_setup(sections: Mapping[str, Any], where: str = "", known_mistakes: Sequence[str] = ()) -> Setup:
    """The setup of these sections, or OptionError with every mistake, those known before included.

    A section that is None could not be read, which a known mistake says; the others are checked without it.
    """
    mistakes = [*known_mistakes, *(_stray(name) for name in sections if name not in SECTIONS)]
    built: dict[str, Section] = {}
    wrong: set[str] = set()
    for name, kind in SECTIONS.items():
        built[name], found = _section(name, kind, sections.get(name, {}))
        mistakes += [sentence for sentence in found.values() if sentence]
        wrong |= {f"{name}.{key}" for key in found}
    for causes, effects in _FOLLOW:
        if not wrong.isdisjoint(causes):
            wrong |= effects
    setup = Setup(**built)  # type: ignore[arg-type]
    mistakes += mistakes_in(setup, wrong)
    _refuse(mistakes, where)
    return setup


def _section(name: str, kind: type[Section], values: Any) -> tuple[Section, dict[str, str]]:
    """A section that can be worked with, and what was wrong: a key to its sentence, "" if there is nothing to say."""
    required = {key: 1 for key, field in kind.model_fields.items() if field.is_required()}
    if not isinstance(values, dict):
        found = dict.fromkeys(kind.model_fields, "")
        if values is not None:
            found[""] = f"{name} = {shown(values)} is not a section: write [{name}] and its keys below"
        return kind.model_validate(required), found
    try:
        return kind.model_validate(values), {}
    except ValidationError as error:
        found = mistakes_of(error, name, list(kind.model_fields))
    usable = {key: value for key, value in values.items() if key not in found}
    for key in found.keys() - values.keys() - required.keys():
        found[key] = ""  # derived from a value that is wrong: saying so once is enough
    return kind.model_validate(required | usable), found


def _stray(name: str) -> str:
    """A name at the top of a file that is no section."""
    homes = [key.partition(".")[0] for key in KEYS if key.partition(".")[2] == name]
    if homes:
        return f"{name} stands outside of a section: it belongs into [{homes[0]}]"
    return f"[{named(name)}] is not a section: {did_you_mean(name, list(SECTIONS))}"


def _refuse(mistakes: Sequence[str], where: str) -> None:
    if mistakes:
        raise OptionError("\n".join(f"{where}: {sentence}" if where else sentence for sentence in mistakes))
