"""Megatron arguments as a run wrote them down: the block in its log, a Namespace, or a YAML or JSON of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lumos.setup.importers.imported import Reading
from lumos.setup.importers.megatron import read_megatron
from lumos.setup.importers.shell import Script

_DOTTED = re.compile(r"([A-Za-z_]\w{1,80}) \.{2,48} ([^\n]{1,4000})")
_HEADER = re.compile(r"-{6,} (?:end of )?arguments -{6,}")
_NAMESPACE = re.compile(r"\bNamespace\(([^\n]*)\)")
_PAIR = re.compile(r"(\w{1,80})=('[^'\n]*'|\"[^\"\n]*\"|\[[^\]\n]*\]|[^,()\n]*)")
_YAML = re.compile(r"(?m)^([ \t]*)(?:--)?([A-Za-z][\w-]{0,80}):(?:[ \t]+([^\n]*?))?[ \t]*(?:[ \t]#[^\n]*)?$")
# What tells Megatron's arguments from other tables; a few together are enough.
_TELLING = (
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size"),
    *("seq-length", "num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size"),
)
_MEGATRON_ALONE = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size")
_NOTHING = ("None", "null", "~", "False", "false", "[]", "{}", "")
# Where the name of a value is not that of the option, or the option says the opposite.
_OTHER_NAMES = {"fp8": "fp8-format", "fp4": "fp4-format", "virtual-pipeline-model-parallel-size": "virtual-stages"}
_OPPOSITES = {"add-bias-linear": "disable-bias-linear", "add-position-embedding": "no-position-embedding"}
_AS_USUAL: tuple[list[str], ...] = ([], ["0"], ["0.0"], ["1"], ["1.0"])  # most arguments are off, or 1
_MOST = 5000


def read_dump(pairs: Iterable[tuple[str, str]]) -> Reading:
    """The run of these names and values."""
    options: dict[str, list[str]] = {}
    for name, word in pairs:
        plain = name.lstrip("-").replace("_", "-")
        if word in ("False", "false") and plain in _OPPOSITES:
            options[_OPPOSITES[plain]] = []
        if word not in _NOTHING:
            value = word.strip("'\"")
            value = value.rpartition(".")[2] if value.startswith(("AttnBackend.", "torch.")) else value
            options[_OTHER_NAMES.get(plain, plain)] = [] if value in ("True", "true") else [value]
    options.pop("virtual-stages", None)  # follows from the layers of a virtual stage
    if "group-query-attention" not in options:
        options.pop("num-query-groups", None)  # written down as 1 where it is not used
    reading = read_megatron(Script(options, {}, {}, {}, ()))
    telling = [name[2:] for name in reading.not_understood if options[name[2:]] not in _AS_USUAL]
    return reading._replace(not_understood=tuple(name.replace("-", "_") for name in telling))


def dumped(text: str) -> list[tuple[str, str]]:
    """The names and values in the log of a run, with or without a prefix before every line; [] where there are none."""
    found = [(match[1], match[2].strip()) for match in _DOTTED.finditer(text)]
    if len(found) < 3:
        spaces = _NAMESPACE.search(text)
        found = [(match[1], match[2].strip()) for match in _PAIR.finditer(spaces[1])] if spaces else []
    return found[:_MOST] if is_megatron(name for name, _ in found) or (found and _HEADER.search(text)) else []


def in_yaml(text: str) -> list[tuple[str, str]]:
    """The scalars of a plain YAML of arguments; `name:` with `value: x` below it is how trackers write them."""
    found: list[tuple[str, str]] = []
    above = ""
    for match in _YAML.finditer(text):
        name, word = match[2], (match[3] or "").strip()
        if match[1] and name in ("value", "desc"):
            if name == "value" and above:
                found.append((above, word))
            continue
        above = "" if word else name
        if word:
            found.append((name, word))
    return found[:_MOST] if is_megatron(name for name, _ in found) else []


def in_table(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The same of a table that was JSON."""
    found = []
    for name, value in list(content.items())[:_MOST]:
        value = value["value"] if isinstance(value, dict) and "value" in value else value
        if not isinstance(value, dict):
            found.append((str(name), _word(value)))
    return found if is_megatron(name for name, _ in found) else []


def is_megatron(names: Iterable[str]) -> bool:
    """Whether these are names of Megatron's arguments."""
    plain = {name.lstrip("-").replace("_", "-") for name in names}
    return len(plain & set(_TELLING)) >= 3 and not plain.isdisjoint(_MEGATRON_ALONE)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_word(item) for item in value[:1000] if not isinstance(item, list | dict)) + "]"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number without end"
    return str(value)[:200]
