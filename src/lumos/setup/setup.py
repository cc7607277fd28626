"""Setup: the description of a whole training run. Model + Train + Parallel + Cluster, and what may happen to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from lumos.arguments import checks_arguments
from lumos.errors import OptionError
from lumos.setup.messages import did_you_mean, mistakes_of, mistakes_of_sections
from lumos.setup.presets import preset_named
from lumos.setup.reliability import Reliability
from lumos.setup.sections import Cluster, Model, Parallel, Section, Train, as_count
from lumos.setup.stated_variability import StatedVariability

STEP_SECTIONS: Mapping[str, type[Section]] = {"model": Model, "train": Train, "parallel": Parallel, "cluster": Cluster}
SECTIONS: Mapping[str, type[Section]] = {
    **STEP_SECTIONS, "reliability": Reliability, "variability": StatedVariability,
}  # fmt: skip
"""All sections. Those beyond STEP_SECTIONS change nothing in a step, and are in no answer unless they are stated."""
KEYS = tuple(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields)

_Values = Section | dict[str, Any]
_REPLICA = {"parallel.tp", "parallel.pp", "parallel.cp", "cluster.gpus"}


class Setup(BaseModel):
    """A training run. Types are checked and derived values filled in; `check` says whether the values fit together.

    >>> setup = Setup(model={"preset": "llama3-8b"}, train={"seq": 8192}, cluster={"gpu": "h100", "gpus": 8})
    >>> setup.parallel.dp
    8
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Model
    train: Train
    parallel: Parallel = Parallel()
    cluster: Cluster = Cluster()
    reliability: Reliability = Reliability()
    variability: StatedVariability = StatedVariability()

    def __repr__(self) -> str:
        model = self.model.name or f"{self.model.layers} layers of {self.model.hidden}"
        return f"Setup({', '.join([f'{model} on {self.cluster.gpus:,} × {self.cluster.shown}', *self.parallel.used])})"

    @model_validator(mode="wrap")
    @classmethod
    def _in_plain_words(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """The mistakes of sections, one line each, as for a file."""
        try:
            return validate(given)
        except ValidationError as error:
            raise OptionError("\n".join(mistakes_of_sections(error, SECTIONS))) from None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """dp or gpus from each other, then microbatches or global_batch from each other."""
        if not isinstance(given, dict):
            return given
        model = given.get("model")
        if isinstance(model, dict) and isinstance(model.get("preset"), str):
            stated = {key: value for key, value in model.items() if key != "preset"}
            given = given | {"model": {**preset_named(model["preset"]).keys, **stated}}
        train, parallel, cluster = (given.get(name, {}) for name in ("train", "parallel", "cluster"))
        if not all(isinstance(section, Section | dict) for section in (train, parallel, cluster)):
            return given
        gpus, dp = _count(cluster, "gpus"), _count(parallel, "dp")
        replica = (_count(parallel, "tp") or 1) * (_count(parallel, "pp") or 1) * (_count(parallel, "cp") or 1)
        dp = dp or max(gpus // replica, 1)
        per_round = (_count(train, "micro_batch") or 1) * dp
        microbatches, batch = _count(train, "microbatches"), _count(train, "global_batch")
        microbatches = microbatches or max(batch // per_round, 1)
        return given | {
            "train": _filled(train, {"microbatches": microbatches, "global_batch": batch or per_round * microbatches}),
            "parallel": _filled(parallel, {"dp": dp}),
            "cluster": _filled(cluster, {"gpus": gpus or replica * dp}),
        }

    @property
    def tokens(self) -> int:
        """Tokens in one step, over all replicas."""
        return self.train.global_batch * self.train.seq

    @property
    def stated_sections(self) -> list[str]:
        """The sections of the step, and of the others those that say something."""
        return [name for name in SECTIONS if name in STEP_SECTIONS or getattr(self, name).model_fields_set]

    @checks_arguments
    def replaced(self, changes: Mapping[str, Any]) -> Setup:
        """A copy with other values: `setup.replaced({"parallel.tp": 2})`. Only types are checked.

        What was derived is derived again. The number of GPUs stays unless it or dp is given, and the global batch stays
        unless it or microbatches is given.
        """
        unknown = [key for key in changes if key not in KEYS]
        if unknown:
            raise OptionError(f"{unknown[0][:100]} is not known: {did_you_mean(unknown[0], KEYS)}")
        by_section: dict[str, dict[str, Any]] = {}
        for key, value in (_follow_ups(changes) | dict(changes)).items():
            name, _, field = key.partition(".")
            by_section.setdefault(name, {})[field] = value
        sections = {name: getattr(self, name) for name in SECTIONS}
        for name, values in by_section.items():
            sections[name] = _changed(sections[name], name, values)
        return Setup(**sections)


def _follow_ups(changes: Mapping[str, Any]) -> dict[str, int]:
    """The values to derive again (0) because of these changes."""
    again: dict[str, int] = {}
    if "parallel.dp" in changes:
        again["cluster.gpus"] = 0
    elif not _REPLICA.isdisjoint(changes):
        again["parallel.dp"] = 0
    if "train.microbatches" in changes:
        again["train.global_batch"] = 0
    elif again or "train.micro_batch" in changes or "train.global_batch" in changes:
        again["train.microbatches"] = 0
    return again


def _changed(section: Section, name: str, values: Mapping[str, Any]) -> Section:
    try:
        return section.with_values(values)
    except ValidationError as error:
        raise OptionError("\n".join(mistakes_of(error, name, list(type(section).model_fields)).values())) from None


def _count(section: _Values, key: str) -> int:
    return as_count(section.get(key) if isinstance(section, dict) else getattr(section, key))


def _filled(section: _Values, values: dict[str, int]) -> _Values:
    """The section with these values where it has none. A value of the wrong type stays, to be refused."""
    if isinstance(section, dict):
        return values | {key: value for key, value in section.items() if key not in values or value}
    missing = {key: value for key, value in values.items() if not getattr(section, key)}
    if not missing:
        return section
    filled = section.model_copy(update=missing)
    filled.model_fields_set.difference_update(missing)  # `model_fields_set` has what was stated, and nothing else
    return filled
