"""What the name of a model states about its size, compared with the parameters that its keys add up to."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lumos.setup.messages import shown
from lumos.setup.presets import find_preset
from lumos.setup.sections import Model

_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([mbt])(\d?)(?![a-z0-9])")  # 8x7b, 1.5b, 7b1
_SIZE_WITH_DASH = re.compile(r"(?<![a-z0-9.])(\d)-(\d)b(?![a-z0-9])")  # 1_8b is 1.8 billion
_ACTIVE = re.compile(r"(?<![a-z0-9])a(\d{1,4}(?:\.\d{1,3})?)([mb])(?![a-z0-9])")  # a3b
_BILLIONS = {"m": 1e-3, "b": 1.0, "t": 1e3}
_NAMES_ROUND = 0.3  # a "2b" may have 2.5 billion
_SHARED_BY_EXPERTS = (0.5, 1.05)  # 8x7b has 47 billion: attention is there once
_PUBLISHED_WITHIN = 0.03


def size_doubt(model: Model, seq: int, names: Iterable[str]) -> str:
    """A sentence where one of these names, or what was published under it, contradicts the model's size; else ""."""
    total, active = model.parameters(seq) / 1e9, model.active_parameters(seq) / 1e9
    for name in names:
        published = _published(name)
        if published:
            if abs(total / published - 1) <= _PUBLISHED_WITHIN:
                return ""
            return f"{shown(name)} was published with {published:g} B parameters, {_but(total, active)}"
        if _SIZE.search(_plain(name)):
            fits = _fits(name, total, active)
            return "" if fits else f"{shown(name)} is not the name of a model of this size, {_but(total, active)}"
    return ""


def _but(total: float, active: float) -> str:
    counted = f"{total:.3g} B" + (f" ({active:.3g} B active)" if active != total else "")
    return f"but the keys add up to {counted}: check its sizes"


def _published(name: str) -> float:
    """Billions of parameters of the preset of that name, with or without words after it, as in "...-Instruct"."""
    words = re.split(r"[\s_\-]+", name[:200].rpartition("/")[2])
    for count in range(len(words), 0, -1):
        preset = find_preset("-".join(words[:count]))
        if preset is not None:
            return preset.published_b
    return 0.0


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name[:200].casefold())


def _fits(name: str, total: float, active: float) -> bool:
    """Whether one of the sizes in a name is about that of the model; with experts, it may be the active part."""
    plain = _plain(name)
    stated_active = [float(number) * _BILLIONS[unit] for number, unit in _ACTIVE.findall(plain)]
    if stated_active and not any(_near(active, number) for number in stated_active):
        return False
    sizes = [float(f"{whole}.{part}") for whole, part in _SIZE_WITH_DASH.findall(plain)]
    for times, number, unit, more in _SIZE.findall(plain):
        size = float(number + (f".{more}" if more and "." not in number else "")) * _BILLIONS[unit]
        if times:
            least, most = (share * int(times) * size for share in _SHARED_BY_EXPERTS)
            if least <= total <= most:
                return True
        else:
            sizes.append(size)
    return any(_near(total, size) or (not stated_active and _near(active, size)) for size in sizes)


def _near(counted: float, stated: float) -> bool:
    return stated > 0 and abs(counted / stated - 1) <= _NAMES_ROUND
