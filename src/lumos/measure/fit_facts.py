"""What a GPU is, for a model file: a known GPU, a data sheet, or what the samples themselves show.

A CPU, and a GPU that nobody has described yet, have no data sheet. Their peaks are then the best that the samples
reached, which is all that a cost model needs: it corrects whatever roofline it was fitted with. What is not known from
samples either is assumed, and stands with its value in `Gpu.assumed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from lumos.errors import InputError, OptionError
from lumos.measure.fit_samples import Sample, Samples, check_rates
from lumos.setup.gpus import Gpu, find_gpu, gpu_named, is_file_name

_STREAMS = ("copy", "add", "mul", "cast_f32")
_LARGEST_SHARE = 0.2  # of the streams, by bytes: those that no cache holds
_BEST_SHARE = 0.98  # of the products are slower than the measured peak: single outliers are not believed
_FEWEST = 10  # products, and streams
_FP32_SHARE = 1 / 16  # of the rate in 16 bits, on a GPU
_KEPT_WARM_MB = 0.001  # the cache of a CPU: its samples are warm, and prices must not be made warmer still


def described(samples: Samples, asked: str, place: str) -> Gpu:
    """The GPU of samples: as asked for, as the samples name it, or as they show it; InputError where none will do."""
    found = None if is_file_name(samples.gpu) else find_gpu(samples.gpu)
    if asked:
        gpu = gpu_named(asked)
        if found is not None and found != gpu and not is_file_name(asked):
            raise OptionError(
                f"--gpu {asked}: {place} has samples of {samples.gpu[:60]}; leave --gpu out, and to price "
                f"{gpu.name} with them set cluster.gpu beside --model"
            )
        return gpu
    return found if found is not None and not found.is_cpu else _measured(samples, place)


def facts_of(gpu: Gpu) -> dict[str, Any] | None:
    """The fields of a GPU for a model file; None for a known one, whose facts are those of the package."""
    known = None if is_file_name(gpu.name) else find_gpu(gpu.name)
    if known == gpu and not gpu.is_cpu:
        return None
    plain = asdict(replace(gpu, peak_tflops=dict(gpu.peak_tflops)))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def measured_peaks(samples: Iterable[Sample]) -> dict[str, float]:
    """TFLOP/s of the fastest products, by precision."""
    found: dict[str, list[float]] = {}
    for operator, us in samples:
        if operator.kind.startswith("gemm"):
            found.setdefault(operator.dtype, []).append(operator.flops / us / 1e6)
    return {dtype: float(np.quantile(values, _BEST_SHARE)) for dtype, values in found.items() if len(values) >= _FEWEST}


def measured_bandwidth(samples: Iterable[Sample]) -> float:
    """GB/s of the largest tensors that are only moved; 0 where there are too few."""
    moved = sorted((s.operator.bytes, s.us) for s in samples if s.operator.kind in _STREAMS)
    if len(moved) < _FEWEST:
        return 0.0
    largest = moved[-max(3, round(_LARGEST_SHARE * len(moved))) :]
    return float(np.median([size / us / 1e3 for size, us in largest]))


def _measured(samples: Samples, place: str) -> Gpu:
    peaks, bandwidth = measured_peaks(samples.operators), measured_bandwidth(samples.operators)
    name, is_cpu = samples.gpu, samples.gpu == "cpu"
    if not peaks or not bandwidth:
        missing = "matmuls" if not peaks else "copies and additions"
        way_out = "sample them" if is_cpu else "sample them, or name a data sheet or the nearest GPU with --gpu"
        who = "a CPU" if is_cpu else f"{name[:100]!r}, a GPU that is not known"
        raise InputError(f"{place}: samples of {who}, with too few {missing} to tell its rates from; {way_out}")
    check_rates(samples, peaks, place)
    reported = _reported(samples.about, place)
    source = f"measured: the best products and the largest copies among {len(samples.operators):,} samples"
    if is_cpu:
        return _cpu(reported, peaks, bandwidth, source)
    return _unknown_gpu(name, reported, peaks, bandwidth, source)


def _cpu(reported: Mapping[str, float], peaks: dict[str, float], bandwidth: float, source: str) -> Gpu:
    """This CPU: what samples do not show is that of the placeholder in data/gpus.toml."""
    usual = gpu_named("cpu")
    peaks.setdefault("fp32", max(peaks.values()) / 2)
    return replace(
        usual, memory_gib=reported.get("memory_gib", usual.memory_gib),
        clock_ghz=reported.get("clock_ghz", usual.clock_ghz), peak_tflops=MappingProxyType(peaks), hbm_gb_s=bandwidth,
        sms=int(reported.get("sms", 1)), l2_mb=_KEPT_WARM_MB, gpus_per_node=1,
        assumed=(f"inter_gb_s = {usual.inter_gb_s:g}",), source=source,
    )  # fmt: skip


def _unknown_gpu(
    name: str, reported: Mapping[str, float], peaks: dict[str, float], bandwidth: float, source: str
) -> Gpu:
    """A GPU without a data sheet, from what it reports of itself and what it was measured to do."""
    power = reported.get("tdp_w", 500.0)
    assumed: dict[str, Any] = {
        "memory_gib": 80.0, "sms": 128, "l2_mb": 48.0, "clock_ghz": 1.8, "tdp_w": power, "idle_w": 0.15 * power,
        "nvlink_gb_s": 0.0, "nvlink_domain": 1, "pcie_gb_s": 63.0, "inter_gb_s": 50.0, "gpus_per_node": 8,
    }  # fmt: skip
    given = {key: int(value) if key in ("sms", "gpus_per_node") else value for key, value in reported.items()}
    said = [f"{key} = {value:g}" for key, value in assumed.items() if key not in given]
    if given.get("gpus_per_node") == 1:  # one GPU was sampled: how many its node has is not known
        said.append("gpus_per_node = 1 (as sampled)")
    if "fp32" not in peaks:
        wide = peaks.get("bf16") or peaks.get("fp16") or max(peaks.values())
        peaks["fp32"] = wide * _FP32_SHARE
        said.append(f"peak_tflops.fp32 = {peaks['fp32']:.3g}")
    return Gpu(
        **{**assumed, **given}, name=name, family="other", hbm_gb_s=bandwidth, peak_tflops=MappingProxyType(peaks),
        assumed=tuple(said), source=source,
    )  # fmt: skip


_REPORTED = {
    "memory_gib": "memory_gib", "sms": "sms", "l2_mb": "l2_mb", "clock_ghz": "clock_ghz", "power_limit_w": "tdp_w",
}  # fmt: skip


def _reported(about: Mapping[str, Any], place: str) -> dict[str, float]:
    """What the machine said of itself when it was sampled, under the names of Gpu."""
    device = about.get("device", {})
    if not isinstance(device, dict):
        raise InputError(f"{place}: device = {device!r:.60} is no table; name a file that `lumos sample` wrote")
    found = {}
    for key, name in _REPORTED.items():
        value = device.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
            raise InputError(f"{place}: device.{key} = {value!r:.60} is no measured value; correct it, or remove it")
        found[name] = value
    if isinstance(node := about.get("gpus_per_node"), int) and 1 <= node <= 1 << 10:
        found["gpus_per_node"] = node
    return found
