"""The fixed vocabulary of synthetic runs: what a task may be called in a learned model and in a generated trace.

Names of kernels, operators, scopes and process groups of a recorded run stop here. What is not recognised is "other".
"""

from __future__ import annotations

import re

from lumos.analysis.kernel_labels import KernelClass
from lumos.trace.names import Category

# Kernels that are limited by memory bandwidth, by what their names say; the first that matches counts.
_STREAMING = (
    ("multi_tensor", re.compile(r"(?i)multi_tensor_apply|fused_?adam|adam|lamb(?!da)|\bsgd")),
    ("embedding", re.compile(r"(?i)embedding|index(_select|_put|select|func)?|gather|scatter|sort|radix|unique")),
    ("softmax", re.compile(r"(?i)softmax|cross_?entropy|nll_loss")),
    ("norm", re.compile(r"(?i)norm")),
    ("reduction", re.compile(r"(?i)reduce|sum|mean|argmax|cumsum|scan")),
    ("concatenation", re.compile(r"(?i)cat(array|batched)|chunk_cat|split_with_sizes|concat")),
    ("elementwise", re.compile(r"(?i)elementwise|vectorized|triton_poi|fill|copy|dropout|rotary|silu|gelu|swiglu")),
)
COMPUTE_KINDS = ("matmul", "attention", *(name for name, _ in _STREAMING), "other", "copy", "set")
COLLECTIVE_KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "gather", "scatter", "reduce",
    "communication",
)  # fmt: skip
MESSAGE_KINDS = ("send_recv", "send", "recv")
PASS_NAMES = {  # scopes of the host, by which phases are found again
    "forward": "forward pass", "backward": "autograd::engine::evaluate_function: backward pass",
    "optimizer": "Optimizer.step#synthetic",
}  # fmt: skip
SYNC, TAIL = "sync", "tail"  # the host waits for the GPU; what the host does after its last launch
KINDS = frozenset((*COMPUTE_KINDS, *COLLECTIVE_KINDS, *MESSAGE_KINDS, SYNC, TAIL))


def compute_kind(name: str, work: int, category: int) -> str:
    """The kind of a kernel that does not communicate."""
    if name in COMPUTE_KINDS:  # of a synthetic run
        return name
    if category in (Category.COPY, Category.SET):
        return "copy" if category == Category.COPY else "set"
    if work in (KernelClass.MATRIX, KernelClass.ATTENTION):
        return "matmul" if work == KernelClass.MATRIX else "attention"
    return next((kind for kind, pattern in _STREAMING if pattern.search(name)), "other")


def kernel_name(kind: str, phase: str, communicates: bool) -> str:
    """What a kernel of a synthetic run is called: so that phases, layers and collectives are found again."""
    if communicates:
        return f"ncclDevKernel_{kind}"
    return f"{kind} {phase}" if kind == "attention" else kind


def collective_kind(collective: str) -> str:
    """The kind of a communication kernel."""
    return collective if collective in (*COLLECTIVE_KINDS, *MESSAGE_KINDS) else "communication"
