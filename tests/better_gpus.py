"""Pairs of accelerators of which one is better, or as good, in every figure of its data sheet.

Both are GPUs or neither is: programs of other accelerators are always compiled graphs, which need fewer launches.
"""

from __future__ import annotations

from lumos.setup.gpus import Gpu, gpu_named, gpu_names

FIGURES = (
    "memory_gib", "hbm_gb_s", "sms", "l2_mb", "tdp_w", "nvlink_gb_s", "nvlink_domain", "pcie_gb_s", "to_host_gb_s",
    "inter_gb_s", "gpus_per_node",
)  # fmt: skip


def is_at_least(better: Gpu, worse: Gpu) -> bool:
    """Whether a data sheet has no figure below another's; what a GPU draws idle is not one of them."""
    peaks = all(better.peak_tflops.get(key, 0.0) >= peak for key, peak in worse.peak_tflops.items())
    issues = better.sms * better.clock_ghz >= worse.sms * worse.clock_ghz
    return peaks and issues and all(getattr(better, name) >= getattr(worse, name) for name in FIGURES)


GPUS = [gpu_named(name) for name in gpu_names()]
BETTER_GPUS = [
    (a.name, b.name)
    for a in GPUS
    for b in GPUS
    if a is not b and a.is_other_accelerator == b.is_other_accelerator and is_at_least(b, a)
]
