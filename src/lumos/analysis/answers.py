"""The JSON of `lumos replay` and `lumos predict`: every key and its type. Times are in milliseconds.

A value that a source cannot know is null: a trace does not show memory, a setup has no recorded step.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lumos.analysis.breakdown import Breakdown, Hotspot
from lumos.analysis.collectives import CollectiveGroup, CollectiveTimes
from lumos.analysis.sensitivities import Sensitivity
from lumos.analysis.stragglers import Straggler


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a command prints with --json."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class PathAnswer(Answer, frozen=True, kw_only=True):
    """The critical path of the typical step without the profiler; `by_kind_ms` adds up to `total_ms`."""

    total_ms: float
    by_kind_ms: dict[str, float]
    by_operator: list[dict[str, Any]]  # kind, name, ms


class ReplayAnswer(Answer, frozen=True, kw_only=True):
    """`lumos replay --json`; numbers are rounded to the nanosecond."""

    ranks: int
    tasks: int
    recorded_ms: float
    simulated_ms: float
    error_pct: float
    clean_ms: float | None  # without the profiler; None if there was none
    never_profiled_ms: float | None
    unexplained_ms: float
    steps: list[dict[str, Any]]  # name, recorded_ms, simulated_ms
    breakdown: dict[str, Breakdown]  # recorded, simulated
    sensitivities: list[Sensitivity]  # the largest gain first
    stragglers: list[Straggler]
    per_rank: list[dict[str, Any]]  # rank, and its breakdown
    critical_path: PathAnswer
    kernels: list[Hotspot]
    operators: list[Hotspot]
    collective_groups: list[CollectiveGroup]
    collectives: list[CollectiveTimes]
    utilisation: dict[str, Any]
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        rounded: dict[str, Any] = _rounded(super().as_dict())
        return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 6) + 0.0 if isinstance(value, float) else value  # + 0.0: no minus before a zero


class MemoryAnswer(Answer, frozen=True, kw_only=True):
    """GiB of one GPU of the stage that needs most; it fits if peak + reserve is at most what the GPU has."""

    peak: float
    reserve: float  # CUDA context, NCCL and fragmentation: beyond what torch counts
    available: float  # what the GPU has
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    framework: float
    stages: list[dict[str, Any]]  # stage, phase of its peak, peak and the same parts
    reserved: float | None = None  # as torch.cuda.max_memory_reserved reports it; of dry runs
    modules: dict[str, float] = {}  # activations and temporary tensors at the peak by module; of dry runs


class OperatorAnswer(Answer, frozen=True, kw_only=True):
    """An operator or collective of the first rank, all its calls in a step together."""

    name: str
    op: str
    shape: list[int]
    count: int
    ms: float
    bound: str  # compute, memory or network
    source: str  # measured, scaled (from a trace), fitted, transferred, roofline, or modelled (collectives)


class PredictionAnswer(Answer, frozen=True, kw_only=True):
    """`lumos predict --json`."""

    setup: dict[str, dict[str, Any]] | None  # of the predicted run: model, train, parallel, cluster
    step_ms: float
    baseline_ms: float | None  # the traced step without the profiler
    interval_ms: tuple[float, float]  # 80 %
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    hfu: float | None
    parameters: int | None
    active_parameters: int | None  # that one token uses: fewer than all in a mixture of experts
    memory_gib: MemoryAnswer | None
    state_bytes_per_parameter: dict[str, float] | None  # weights, gradients, master_weights, moments; before sharding
    fits: bool | None
    breakdown: Breakdown
    baseline_breakdown: Breakdown | None  # of the traced step, without the profiler
    bubble: float  # share of the step that the GPU is idle
    contention_ms: float | None  # of the step, because passes and communication beside them slow each other
    host_bound: bool | None
    energy_j: float | None  # of all GPUs, one step
    bill: dict[str, Any] | None
    operators: list[OperatorAnswer]
    source: dict[str, float]  # share of the work: measured, scaled, fitted, transferred, roofline, modelled
    approximations: list[dict[str, Any]]  # of a dry run: what runs on other kernels than the real run
    understood: list[dict[str, Any]] | None  # of the traced run, where another configuration is predicted from it
    inferred: dict[str, dict[str, Any]] | None  # keys of its setup, with evidence
    warnings: list[str]


class GpuAnswer(Answer, frozen=True, kw_only=True):
    """A run on one of several GPUs. Where it is refused, `refused` says why and the numbers are null."""

    gpu: str  # its name, or that of its file
    gpus: int | None = None  # how many
    refused: str | None = None
    step_ms: float | None = None
    interval_ms: tuple[float, float] | None = None  # 80 %
    tokens_per_s: float | None = None  # of all GPUs
    tokens_per_s_per_gpu: float | None = None
    speedup: float | None = None  # tokens per second over those of the first GPU that is not refused
    mfu: float | None = None
    peak_gib: float | None = None  # of the fullest GPU; it fits if peak + reserve is at most what is available
    reserve_gib: float | None = None
    available_gib: float | None = None
    fits: bool | None = None
    advice: str = ""  # where it does not fit: what would help
    energy_j: float | None = None  # of all GPUs, one step
    joules_per_token: float | None = None
    watts_per_gpu: float | None = None
    power_limit_w: float | None = None
    at_power_limit: bool | None = None  # whether the limit slows some of the GPUs down
    price_per_gpu_hour: float | None = None
    money_per_million_tokens: float | None = None
    budget: dict[str, Any] | None = None  # of --tokens: steps, days, gpu_hours, kwh, money
    bound_ms: dict[str, float] = {}  # compute, memory, network, host and bubble; they add up to the step
    bound_by: str = ""  # the largest of them
    operators: dict[str, float] = {}  # share of the first rank's work by family of operators
    costs_from: str = ""  # whose samples the times of operators are
    source: dict[str, float] = {}  # as of `lumos predict`
    configuration: dict[str, Any] = {}  # of a search: the best one on these GPUs
    best_in: list[str] = []  # the keys in which no other GPU is better
    warnings: list[str] = []

    @property
    def label(self) -> str:
        """Which row of several it is: the same GPU may be there in several numbers."""
        return f"{self.gpus:,} × {self.gpu}" if self.configuration and self.gpus else self.gpu


class GpuComparisonAnswer(Answer, frozen=True, kw_only=True):
    """`lumos predict --gpu A,B --json`, and `comparison` of `lumos search --gpu A,B --json`."""

    model: str
    parameters: int | None
    tokens_per_step: int | None
    gpus: list[GpuAnswer]  # in the order in which they were asked for
    same_speed: list[dict[str, Any]] = []  # of a search over several numbers: gpu, gpus as fast as the first row
    warnings: list[str]
