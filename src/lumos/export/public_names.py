"""Names that anyone may see, and what becomes of the others.

A name passes if it is in a public vocabulary (operators of PyTorch, calls of CUDA and HIP, NCCL's kernels …:
data/public_names.toml and torch_names.json); any other becomes its kind and a number, such as `gemm_3`. Equal names
stay equal and different names different. A new name keeps the roles of the old one: all that the analysis reads in a
name, so that its answers stay the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from typing import NamedTuple

from lumos.data_files import read_table
from lumos.trace.names import CallKind, Category, call_kind, collective_name, is_communication, is_step

_CALL_PREFIX = re.compile(r"cuda|cu|hip")
_ON_SMS = re.compile(r"nccl|rccl", re.IGNORECASE)
_FUSED = re.compile(r"triton_(poi|red|per)_fused")
_TF32 = re.compile(r"tf32|s1688gemm|16816tf")
_GENERATION = re.compile(r"nvjet|sm90|sm100")  # kernels that are compiled for Hopper and later GPUs
_COMM_NAMESPACE = re.compile(r"_?c10d(_functional)?::")
_MESSAGE = re.compile(r"(nccl|gloo):")
_MESSAGE_TYPE = re.compile(
    r"_(bf16|f(16|32|64)|f8e4m3|f8e5m2|[iu](8|32|64)|u?int(8|32|64)_t|half|float|double)(?=_|$)"
)  # in names of NCCL's kernels
_LIBRARY_KINDS = ("triton",)
_SENDS = ("c10d::send", "c10d::recv_", "nccl:send", "nccl:recv")
_OF_SCOPES = ("autograd_engine", "optimizer")  # roles of operators and scopes, not of kernels
_CALLS = {
    CallKind.LAUNCH: "LaunchKernel", CallKind.GRAPH_LAUNCH: "GraphLaunch", CallKind.DEVICE_SYNC: "DeviceSynchronize",
    CallKind.STREAM_SYNC: "StreamSynchronize", CallKind.EVENT_SYNC: "EventSynchronize",
    CallKind.EVENT_RECORD: "EventRecord", CallKind.STREAM_WAIT: "StreamWaitEvent", CallKind.POLL: "EventQuery",
    CallKind.PLAIN: "Call",
}  # fmt: skip
_BASES = {Category.NOTE: "scope", Category.PYTHON: "python", Category.COPY: "copy", Category.SET: "fill",
          Category.OVERHEAD: "overhead", Category.OTHER: "event"}  # fmt: skip


class Vocabulary(NamedTuple):
    """The public names, and the forms that names may have."""

    operators: frozenset[str]
    scopes: frozenset[str]
    calls: frozenset[str]
    optimizers: frozenset[str]
    forms: re.Pattern[str]
    library_forms: re.Pattern[str]
    rules: tuple[tuple[re.Pattern[str], str, bool], ...]  # form, what it becomes, whether it is of a library
    roles: dict[str, re.Pattern[str]]
    operator_types: dict[str, re.Pattern[str]]
    kinds: tuple[tuple[str, re.Pattern[str]], ...]


@cache
def vocabulary() -> Vocabulary:
    """The tables of the package."""
    torch, table = read_table("torch_names.json"), read_table("public_names.toml")
    names = read_table("operator_names.toml")
    return Vocabulary(
        operators=frozenset([*torch["operators"], *torch["autograd_nodes"], *table["operators"]]),
        scopes=frozenset(table["scopes"]),
        calls=frozenset(f"{prefix}{call}" for prefix in ("cuda", "cu", "hip") for call in table["calls"]),
        optimizers=frozenset([*torch["optimizers"], *table["optimizers"]]),
        forms=re.compile("|".join(f"(?:{form})" for form in table["forms"])),
        library_forms=re.compile("|".join(f"(?:{form})" for form in table["library_forms"])),
        rules=tuple(
            (re.compile(rule["form"], re.DOTALL), rule["becomes"], rule.get("library", False))
            for rule in table["rules"]
        ),
        roles={key: re.compile(text) for key, text in names["kernels"].items()},
        operator_types={key: re.compile(text) for key, text in names["operators"].items()},
        kinds=tuple((kind, re.compile(text)) for kind, text in table["kinds"]["kernel"]),
    )


Roles = tuple[object, ...]


def roles_of(name: str, categories: Collection[Category]) -> Roles:
    """All that the analysis reads in a name that occurs in these categories: names of equal roles are exchangeable."""
    found: list[object] = [_is_attention(name), is_step(name)]
    if Category.CALL in categories:
        found += [call_kind(name), "Async" in name, name.startswith("hip")]
    if Category.KERNEL in categories:
        talks = is_communication(name)
        found += [talks, _ON_SMS.search(name) is not None, name.startswith("gloo:"), collective_name(name) * talks]
        works = [key for key in vocabulary().roles if key not in _OF_SCOPES] if not talks else []
        found += [vocabulary().roles[key].search(name) is not None for key in works]
    if Category.COPY in categories:
        found.append("Pageable" in name)
    if Category.OP in categories or Category.NOTE in categories:
        roles = vocabulary().roles
        types = vocabulary().operator_types.items()
        found += [roles["autograd_engine"].search(name) is not None, roles["optimizer"].search(name) is not None]
        found += [next((key for key, pattern in types if pattern.match(name)), ""), name in _SENDS]
        found.append(collective_name(name) if _MESSAGE.match(name) or _COMM_NAMESPACE.match(name) else "")
    return tuple(found)


def _is_attention(name: str) -> bool:
    return "aten::" not in name and vocabulary().roles["attention"].search(name) is not None


class NameMap:
    """New names for those of a trace.

    `operators` keeps public names of operators and libraries; of names of kernels `generation` keeps that of GPUs,
    `types` those of messages.

    >>> NameMap().of("aten::mm", [Category.OP]), NameMap().of("secret::mm", [Category.OP])
    ('aten::mm', 'custom::op_1')
    """

    def __init__(self, operators: bool = True, generation: bool = True, types: bool = True) -> None:
        self.operators, self.generation, self.types = operators, generation, types
        self.kept, self.replaced, self.changed_roles = 0, 0, 0
        self._new: dict[str, str] = {}
        self._taken: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._parts: dict[tuple[str, str], str] = {}

    def of(self, name: str, categories: Collection[Category]) -> str:
        """The new name of a name that occurs in these categories."""
        if name not in self._new:
            if self._is_public(name):
                self.kept += 1
                new = name
            else:
                self.replaced += 1
                new = self._renamed(name, categories)
            self._taken.add(new)
            self._new[name] = new
        return self._new[name]

    def _is_public(self, name: str) -> bool:
        known = vocabulary()
        if name in known.calls or known.forms.fullmatch(name) is not None:
            return True
        if name in known.operators and (name == "record_param_comms" or _COMM_NAMESPACE.match(name)):
            return True
        listed = name in known.operators or name in known.scopes
        return self.operators and (listed or known.library_forms.fullmatch(name) is not None)

    def _renamed(self, name: str, categories: Collection[Category]) -> str:
        """By the first rule that fits, or by its kind, or by both; whichever keeps its roles."""
        roles, kind = roles_of(name, categories), self._kind(name, categories)
        for ruled in self._by_rules(name):
            if self._keeps(ruled, roles, categories):
                return self._unique(ruled)
        for plain in (kind, *(f"{ruled} {kind}" for ruled in self._by_rules(name))):
            if self._keeps(f"{plain}_1", roles, categories):
                return self._numbered(plain)
        self.changed_roles += self.operators  # without names of operators, their types go on purpose
        return self._numbered(kind)

    def _keeps(self, new: str, roles: Roles, categories: Collection[Category]) -> bool:
        return roles_of(new, categories) == roles

    def _by_rules(self, name: str) -> Iterator[str]:
        """What the rules that fit make of a name, the first first."""
        for pattern, becomes, of_library in vocabulary().rules:
            found = pattern.fullmatch(name)
            if found is not None and (self.operators or not of_library):
                parts = {key: self._part(key, text or "") for key, text in found.groupdict().items()}
                made = becomes.format(*(text or "" for text in found.groups()), **parts)
                yield made if self.types or not _ON_SMS.match(made) else _MESSAGE_TYPE.sub("", made)

    def _part(self, key: str, text: str) -> str:
        """A part of a name: public, or its key and a number."""
        if key == "operator":
            if self.operators and f"aten::{text}" in vocabulary().operators:
                return text
            return self.of(text, [Category.OP])
        if key == "optimizer" and self.operators and text in vocabulary().optimizers:
            return text
        kind = f"attention_{key}" if _is_attention(text) else key
        if (kind, text) not in self._parts:
            self._counts[f"part {kind}"] += 1
            self._parts[kind, text] = f"{kind}_{self._counts[f'part {kind}']}"
        return self._parts[kind, text]

    def _kind(self, name: str, categories: Collection[Category]) -> str:
        """What a name is called by, before its number."""
        if Category.KERNEL in categories:
            return self._kernel_kind(name)
        if Category.CALL in categories:
            return _call_kind(name) + "_attention" * _is_attention(name)
        attention = "attention_" * _is_attention(name)
        if Category.OP in categories or Category.NOTE in categories:
            spoken, collective = _MESSAGE.match(name) or _COMM_NAMESPACE.match(name), collective_name(name)
            if spoken is not None:
                return f"{spoken.group()}{attention}{collective or 'scope'}"
            if vocabulary().roles["optimizer"].search(name):
                return f"{attention}Optimizer.step_scope"
            if Category.OP in categories:
                return f"custom::{attention}op" if "::" in name else f"{attention}function"
        base = next((_BASES[category] for category in categories if category in _BASES), "event")
        pageable = "_Pageable" if "Pageable" in name else ""
        return f"{attention}{base}{pageable}"

    def _kernel_kind(self, name: str) -> str:
        roles = {key for key, pattern in vocabulary().roles.items() if pattern.search(name)}
        if name.startswith("gloo:"):
            return f"gloo:{collective_name(name) or 'collective'}"
        on_sms = _ON_SMS.search(name) is not None
        if is_communication(name):
            attention = "_attention" * _is_attention(name)
            return f"{'ncclKernel' if on_sms else 'nvshmem'}{attention}_{collective_name(name)}".rstrip("_")
        fused = _FUSED.search(name)
        softmax = [f"softmax_warp_{way}" for way in ("forward", "backward") if f"softmax_{way}" in roles]
        main = [*softmax, *(["attention"] if _is_attention(name) else []), *(["gemm"] if "matrix" in roles else [])]
        kinds = [kind for kind, pattern in vocabulary().kinds if pattern.search(name)]
        usual = [kind for kind in kinds if self.operators or kind not in _LIBRARY_KINDS][:1] or ["kernel"]
        back = ["dot_do_o"] if "attention_helper" in roles else ["backward"] if "backward" in roles else []
        chip = [word for word, pattern in (("tf32", _TF32), ("sm90", _GENERATION)) if pattern.search(name)]
        compiled = [fused.group()] if fused is not None and self.operators else []
        first = (["nccl"] if on_sms else []) + (compiled if name.startswith("triton") else [])
        rest = [] if name.startswith("triton") else compiled
        return "_".join([*first, *(main or usual), *back, *(chip if self.generation else []), *rest])

    def _numbered(self, kind: str) -> str:
        while True:
            self._counts[kind] += 1
            name = f"{kind}_{self._counts[kind]}"
            if name not in self._taken:
                return name

    def _unique(self, name: str) -> str:
        return self._numbered(name) if name in self._taken else name


def _call_kind(name: str) -> str:
    """The usual call of the same kind, runtime or driver."""
    kind, found = call_kind(name), _CALL_PREFIX.match(name)
    prefix = found.group() if found else ""
    if kind == CallKind.COPY:
        return f"{prefix or 'cuda'}Memcpy{'Async' * ('Async' in name)}"
    if kind == CallKind.DEVICE_SYNC and prefix == "cu":
        return "cuCtxSynchronize"
    asynchronous = "Async" * ("Async" in name)
    return f"{prefix}{_CALLS[kind]}{asynchronous}" if prefix or kind == CallKind.PLAIN else f"cuda{_CALLS[kind]}"
