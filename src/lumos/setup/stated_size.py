"""What the name of a model states: the published model it is, and a size to compare with the count of its keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lumos.setup.messages import shown, size_text
from lumos.setup.presets import Preset, find_preset
from lumos.setup.sections import Model

_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([mbt])(\d?)(?![a-z0-9])")  # 8x7b, 1.5b, 7b1
_SIZE_WITH_DASH = re.compile(r"(?<![a-z0-9.])(\d)-(\d)b(?![a-z0-9])")  # 1_8b is 1.8 billion
_ACTIVE = re.compile(r"(?<![a-z0-9])a(\d{1,4}(?:\.\d{1,3})?)([mb])(?![a-z0-9])")  # a3b
_BILLIONS = {"t": 1e3, "b": 1.0, "m": 1e-3}
_NAMES_ROUND = 0.3  # a "2b" may have 2.5 billion
_SHARED_BY_EXPERTS = (0.5, 1.05)  # 8x7b has 47 billion: attention is there once
_PUBLISHED_WITHIN = 0.03


def size_doubt(model: Model, seq: int, names: Iterable[str] | None, stored: int = 0) -> str:
    """A sentence where a name, what was published under it, or stored weights contradict the model's size; else ""."""
    total, active = model.parameters(seq) / 1e9, model.active_parameters(seq) / 1e9
    if names is not None and stored:
        if abs(total * 1e9 / stored - 1) <= _PUBLISHED_WITHIN:
            return ""
        return f"the weights next to it have {stored / 1e9:.4g} B parameters, {_but(total, active)}"
    for name in names or ():
        preset = preset_of(name)
        published = preset.published_b if preset else 0.0
        if published:
            if abs(total / published - 1) <= _PUBLISHED_WITHIN:
                return ""
            return f"{shown(name)} was published with {published:g} B parameters, {_but(total, active)}"
        if _SIZE.search(_plain(name)):
            fits = _fits(name, total, active)
            return "" if fits else f"{shown(name)} is not the name of a model of this size, {_but(total, active)}"
    return ""


def _but(total: float, active: float) -> str:
    counted = size_text(total * 1e9) + (f" ({size_text(active * 1e9)} active)" if active != total else "")
    return f"but the keys add up to {counted}: check its sizes"


def preset_of(name: str) -> Preset | None:
    """The published model of that name, with or without words after it, as in "...-Instruct"; None for any other."""
    words = re.split(r"[\s_\-]+", name[:200].rpartition("/")[2])
    if words[:1] == ["Meta"]:
        words = words[1:]  # Meta-Llama-3-8B
    for count in range(len(words), 0, -1):
        preset = find_preset("-".join(words[:count]))
        if preset is not None:
            return preset
        if _SIZE.search(_plain(words[count - 1])):
            return None  # gpt3-5b is not gpt3
    return None


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
    unit = next(unit for unit in (*_BILLIONS.values(), 0.0) if stated >= unit)  # the last digit of 1b is a billion
    return abs(counted - stated) <= max(_NAMES_ROUND * stated, unit / 2)
