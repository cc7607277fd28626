"""What a run still discloses: all that Lumos itself infers from it, for someone who is about to share it.

An anonymised trace has no names, but its times, counts and sizes are what makes it useful, and they show a lot. Each
row is what can be seen and by what, and which `--drop` of `lumos convert` hides it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from lumos.analysis.collectives import message_bytes
from lumos.analysis.kernel_labels import KernelClass, KernelPhase, RankLabels, label
from lumos.analysis.replay import Replay
from lumos.data_files import read_table
from lumos.setup.gpus import gpu_called
from lumos.trace.names import Category
from lumos.trace.steps import WHOLE
from lumos.traced.infer.infer import infer

_OPTIMIZERS = ("train.optimizer", "train.compile")
_TEXTS = read_table("analysis.toml")["disclosure"]
_MESSAGES_SHOWN = 4
_REDUCTIONS = ("all_reduce", "reduce_scatter")


class Disclosure(NamedTuple):
    """One thing that a run shows."""

    what: str
    value: str
    shown_by: str
    drop: str  # what hides it: a value of --drop, or "" where nothing does


def disclosures(run: Replay, dropped: Collection[str] = ()) -> list[Disclosure]:
    """Everything that is inferred from a run of which some was `dropped`, times first."""
    labels = label(run, most=1)[0]
    shown = (*_times(run), *_setup(run), *_work(run, labels), *_messages(run), *_libraries(run))
    return [_after(one) if one.drop in dropped else one for one in shown]


def _after(one: Disclosure) -> Disclosure:
    """What is still shown although what hides it was dropped: of times, all but their scale."""
    if one.drop == "times":
        return one._replace(value=f"{one.value}, scaled by a secret factor", drop="")
    return one._replace(drop="")


def _shown(name: str, value: str, **facts: str) -> Disclosure:
    """In the words of the table."""
    texts = _TEXTS["shown"][name]
    return Disclosure(texts["what"], value, texts["by"].format(**facts), texts.get("drop", ""))


def _times(run: Replay) -> Iterator[Disclosure]:
    yield _shown("step", f"{run.recorded_steps.mean:.4g} ms")
    yield _shown("clean_step", f"{run.clean_ms:.4g} ms")
    if run.marks.names != (WHOLE,):
        numbers = ", ".join(name.rpartition("#")[2].strip() for name in run.marks.names[:8])
        yield _shown("steps", f"{len(run.marks.names)} ({numbers})")
    trace = run.execution.trace
    world = max([len(trace.ranks), *(header.world_size for header in trace.headers)])
    yield _shown("ranks", f"{len(trace.ranks)} of {world}")


def _setup(run: Replay) -> Iterator[Disclosure]:
    """The keys of the setup that inference finds."""
    for key, inferred in infer(run).items():
        drop = "gpu" if key == "cluster.gpu" else "operators" if key in _OPTIMIZERS else ""
        yield Disclosure(key, str(inferred.value), inferred.evidence, drop)


def _work(run: Replay, labels: RankLabels) -> Iterator[Disclosure]:
    """What the kernels of one step show."""
    attentions = int(((labels.attention == 1) & (labels.phase == KernelPhase.FORWARD)).sum())
    if attentions:
        yield _shown("layers", str(attentions))
    yield _shown("kernels", f"{len(labels.row):,}")
    total = max(float(labels.us.sum()), 1e-9)
    shares = {work.name.lower(): float(labels.us[labels.work == work].sum()) / total for work in KernelClass}
    parts = (f"{_TEXTS['work'][work]} {100 * share:.0f} %" for work, share in shares.items() if share >= 0.005)
    yield _shown("gpu_time", ", ".join(parts))
    gpu = next((gpu for header in run.execution.trace.headers if (gpu := gpu_called(header.gpu))), None)
    matrix_us = float(labels.us[labels.work == KernelClass.MATRIX].sum())
    if gpu is not None and matrix_us and not gpu.is_cpu:
        most = matrix_us * gpu.peak_tflops.get("bf16", max(gpu.peak_tflops.values())) / 1e6
        yield _shown("matmuls", f"{most:.3g} TFLOP a rank", gpu=gpu.name)


def _messages(run: Replay) -> Iterator[Disclosure]:
    """Groups and sizes of communication, of the first rank."""
    trace = run.execution.trace
    sizes = Counter(len(m.ranks) or m.group_size for m in trace.messages)
    groups = sorted({(m.group, m.ranks): len(m.ranks) or m.group_size for m in trace.messages}.values())
    if groups and max(sizes) > 1:
        yield _shown("groups", ", ".join(f"{n} of {size}" for size, n in sorted(Counter(groups).items()) if size > 0))
    rows = np.flatnonzero((trace.message >= 0) & (trace.rank == trace.ranks[0]))
    rows = rows[trace.category[rows] == (Category.KERNEL if trace.on_gpu.any() else Category.OP)]
    sent = [trace.messages[message] for message in trace.message[rows].tolist()]
    steps = max(len(run.marks.names), 1)
    total = sum(max(message_bytes(message), 0) for message in sent) / steps
    if total:
        yield _shown("communication", f"{total / 1e9:.4g} GB a rank")
    single = sorted({max(message.in_elements, message.out_elements) for message in sent} - {-1, 0, 1}, reverse=True)
    if total and single:
        more = f"; {len(single) - _MESSAGES_SHOWN} others" if len(single) > _MESSAGES_SHOWN else ""
        yield _shown("messages", "; ".join(f"{size:,}" for size in single[:_MESSAGES_SHOWN]) + more)
    reduced = sum(m.in_elements for m in sent if m.collective in _REDUCTIONS and message_bytes(m) > 0)
    if reduced > 0:
        yield _shown("parameters", f"{reduced / steps / 1e6:.4g} million a rank")


def _libraries(run: Replay) -> Iterator[Disclosure]:
    """Libraries, by the names that they give to operators and scopes."""
    names = run.execution.trace.names
    used = [text for start, text in _TEXTS["libraries"].items() if any(name.startswith(start) for name in names)]
    if used:
        yield _shown("libraries", ", ".join(dict.fromkeys(used)))
    custom = sum(name.startswith("custom::") for name in names)
    if custom:
        yield _shown("custom", str(custom))
