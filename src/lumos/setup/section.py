"""Section: what the parts of a setup have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Bounds keep a typing mistake, or a hostile file, from asking for more than a machine can hold.
Size = Annotated[int, Field(ge=1, le=1 << 24)]  # a length, width or batch
MaybeSize = Annotated[int, Field(ge=0, le=1 << 24)]  # 0: not there, or to be derived
Ways = Annotated[int, Field(ge=1, le=1 << 20)]  # how many GPUs or pieces share something
MaybeWays = Annotated[int, Field(ge=0, le=1 << 20)]


class Section(BaseModel):
    """Frozen values, checked for their types alone. Keys in `DERIVED` follow from others unless they are given."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    DERIVED: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the keys in `DERIVED` are worth beside these values, which may still be of any type."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not cls.DERIVED:
            return given
        stated = {key: value for key, value in given.items() if not (key in cls.DERIVED and is_unsaid(value))}
        return cls.derived(stated) | stated

    def stated(self) -> dict[str, Any]:
        """The values less those which would be derived from the others anyway."""
        values = dict(self.__dict__)
        again = self.derived({key: value for key, value in values.items() if key not in self.DERIVED})
        return {key: value for key, value in values.items() if key not in again or again[key] != value}

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        """A copy with other values, checked; what was derived is derived anew."""
        return self.model_validate({**self.stated(), **changes})


def is_unsaid(value: object) -> bool:
    """0, "" and None stand for "derive it"; False does not."""
    return value is None or value == "" or (value == 0 and not isinstance(value, bool))


def as_count(value: object) -> int:
    """A positive whole number, or 0 for anything else: types are checked elsewhere."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
