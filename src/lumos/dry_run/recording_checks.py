"""What every recording of a dry run fulfils: checked once when a file is read, so that nothing later has to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import chain

from lumos.costs.host_costs import call_us
from lumos.costs.kernel_work import runs_kernel, works_of
from lumos.dry_run.recorded_step import Recording
from lumos.program.op import Op, Tensor

COLLECTIVE_KINDS = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "send", "recv", "gather",
     "scatter", "reduce")
)  # fmt: skip
_PHASES = ("forward", "backward", "optimizer")
_ROLES = ("weights", "gradients", "optimizer")
_MOST_BYTES = 1 << 44  # of a tensor, and of all memory; no GPU has a sixteenth of it
_MOST_COUNT = 1 << 50  # tokens, parameters, elements of a tensor with its broadcast dimensions
_MOST_RANKS = 10_000_000
_MOST_STREAMS = 10_000
_MOST_DIMENSIONS, _MOST_ELEMENT = 64, 16  # of torch
_MOST_TEXT = 1000  # characters of a name
_MOST_NOTES = 1000  # assumptions, and versions
_MOST_FLOPS, _MOST_MOVED = 1e21, 1e18  # of a step: days on the largest GPU


def check_recording(recording: Recording) -> None:
    """Raise a ValueError that names the first value that no dry run writes, and where it stands."""
    _check_numbers(recording)
    _check_texts(recording)
    work_of = cache(_work)
    flops = moved = 0.0
    for at, op in enumerate(recording.ops):
        try:
            _check_waits(at, op)
            more_flops, more_bytes = work_of(op._replace(after=()), recording.world)
        except ValueError as error:
            raise ValueError(f"operator {at}, {_short(op.name)}: {error}") from None
        flops, moved = flops + more_flops, moved + more_bytes
    if not (flops <= _MOST_FLOPS and moved <= _MOST_MOVED):
        raise ValueError(f"{flops:.3g} FLOPs and {moved:.3g} bytes moved are more than any step has")
    if len({op.stream for op in recording.ops}) > _MOST_STREAMS:
        raise ValueError(f"more than {_MOST_STREAMS} streams")
    _check_memory(recording)


def _check_numbers(recording: Recording) -> None:
    for name, low, high in (
        ("world", 1, _MOST_RANKS), ("rank", 0, recording.world - 1), ("microbatches", 1, _MOST_COUNT),
        ("parameters", 0, _MOST_COUNT), ("trained_parameters", 0, recording.parameters), ("tokens", 0, _MOST_COUNT),
        ("most_bytes", 0, _MOST_BYTES),
    ):  # fmt: skip
        _check_range(name, getattr(recording, name), low, high)


def _check_texts(recording: Recording) -> None:
    versions = chain.from_iterable(recording.made_by.items())
    _check_range("number of assumptions", len(recording.assumptions), 0, _MOST_NOTES)
    _check_range("number of versions", len(recording.made_by), 0, _MOST_NOTES)
    _check_lengths(chain(recording.assumptions, versions, recording.places.values()))


def _check_lengths(texts: Iterable[str]) -> None:
    for text in texts:
        if len(text) > _MOST_TEXT:
            raise ValueError(f"a text of {len(text)} characters: {_short(text)}")


def _check_waits(at: int, op: Op) -> None:
    for earlier in op.after:
        if not 0 <= earlier < at:
            raise ValueError(f"waits for operator {earlier}, which is not an earlier one")


def _work(op: Op, world: int) -> tuple[float, float]:
    """Check one operator, and return its FLOPs and the bytes that it moves."""
    if not 0 < len(op.name) <= _MOST_TEXT:
        raise ValueError(f"a name of {len(op.name)} characters")
    if op.phase not in _PHASES:
        raise ValueError(f"phase {_short(op.phase)!r} is not one of {', '.join(_PHASES)}")
    _check_lengths((op.module, *op.options))
    _check_range("stream", op.stream, -_MOST_COUNT, _MOST_COUNT)
    for tensor in (*op.inputs, *op.outputs):
        _check_tensor(tensor)
    if bool(op.ranks) != (op.name in COLLECTIVE_KINDS):
        raise ValueError("has ranks, and is not a collective" if op.ranks else "is a collective without ranks")
    if op.ranks:
        _check_range("rank of its group", min(op.ranks), 0, world - 1)
        _check_range("rank of its group", max(op.ranks), 0, world - 1)
        if len(set(op.ranks)) < len(op.ranks):
            raise ValueError("its group has a rank twice")
        return 0.0, sum(tensor.bytes for tensor in (*op.inputs, *op.outputs))
    return _kernel_work(op)


def _kernel_work(op: Op) -> tuple[float, float]:
    """The work of an operator; one whose operands are not those of its name cannot be costed."""
    try:
        call_us(op)
        works = works_of(op) if runs_kernel(op) else []
    except (LookupError, ValueError, TypeError, ArithmeticError, StopIteration):
        shapes = ", ".join(map(str, (tensor.shape for tensor in op.inputs)))
        raise ValueError(f"operands of shapes {_short(shapes) or 'none'} do not fit it") from None
    flops = [max(work.flops, work.operator.flops if work.operator else 0.0) for work in works]
    return sum(flops), sum(max(work.bytes, work.elements, work.serial) for work in works)


@lru_cache(maxsize=65_536)
def _check_tensor(tensor: Tensor) -> None:
    if len(tensor.shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(tensor.shape)} dimensions")
    for size in tensor.shape:
        _check_range("size", size, 0, _MOST_COUNT)
    if len(tensor.strides) != len(tensor.shape):
        raise ValueError(f"{len(tensor.strides)} strides for {len(tensor.shape)} dimensions")
    for stride in tensor.strides:
        _check_range("stride", stride, 0, _MOST_COUNT)
    _check_range("bytes per element", tensor.element, 1, _MOST_ELEMENT)
    _check_range("elements", tensor.elements, 0, _MOST_COUNT)
    _check_range("bytes of a tensor", round(tensor.bytes), 0, _MOST_BYTES)
    if len(tensor.dtype) > _MOST_TEXT:
        raise ValueError(f"a dtype of {len(tensor.dtype)} characters")


def _check_memory(recording: Recording) -> None:
    """Storages are released after they were allocated, in the order of operators."""
    for storage, role in recording.roles.items():
        if role not in _ROLES:
            raise ValueError(f"roles: storage {storage} holds {_short(role)!r}, not one of {', '.join(_ROLES)}")
    for storage, size in recording.alive.items():
        _check_range(f"alive: bytes of storage {storage}", size, 0, _MOST_BYTES)
    held, total, before = dict(recording.alive), sum(recording.alive.values()), 0
    for at, event in enumerate(recording.events):
        where = f"events: entry {at}:"
        _check_range(f"{where} operator", event.before, before, len(recording.ops))
        before = event.before
        held[event.storage] = held.get(event.storage, 0) + event.bytes
        total += event.bytes
        _check_range(f"{where} bytes of storage {event.storage}", held[event.storage], 0, _MOST_BYTES)
        _check_range(f"{where} bytes in use", total, 0, _MOST_BYTES)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} = {_short(str(value))} is not between {low} and {high}")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
