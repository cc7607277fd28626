"""The four sections of a setup: Model, Train, Parallel and Cluster, with the values that follow from others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from lumos import schedules
from lumos.data_files import read_table
from lumos.model_file import read_model_file
from lumos.setup.frameworks import framework_named
from lumos.setup.gpus import Gpu, find_gpu, gpu_named, is_file_name

# Bounds keep a typing mistake, or a hostile file, from asking for more than a machine can hold.
Size = Annotated[int, Field(ge=1, le=1 << 24)]  # a length, width or batch
MaybeSize = Annotated[int, Field(ge=0, le=1 << 24)]  # 0: absent, or to be derived
Degree = Annotated[int, Field(ge=1, le=1 << 20)]  # GPUs that share something
MaybeDegree = Annotated[int, Field(ge=0, le=1 << 20)]
Count = Annotated[int, Field(ge=0, le=1 << 14)]  # layers or experts
Bandwidth = Annotated[float, Field(ge=1e-3, le=1e6)]  # GB/s

Module = Literal["core_attn", "layernorm", "mlp", "moe_act", "mla_up_proj", "moe", "shared_experts", "operators"]
"""A part of a layer that selective recomputation runs again, as in Megatron; "operators" is torchtitan's policy."""

if TYPE_CHECKING:
    Schedule = str
    Fabric = str
else:
    Schedule = Literal[schedules.names()]
    Fabric = Literal[tuple(read_table("fabrics.toml"))]


_USUAL_GPU = "h200"  # the GPU that Lumos is calibrated on


class Section(BaseModel):
    """Immutable values whose types are checked. The keys in `DERIVED` follow from others unless they are given."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    DERIVED: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the keys in `DERIVED` that follow from these, which may still be of any type."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not cls.DERIVED:
            return given
        stated = {key: value for key, value in given.items() if not (key in cls.DERIVED and _is_unset(value))}
        return cls.derived(stated) | stated

    def stated(self) -> dict[str, Any]:
        """The values without those that would be derived from the others anyway."""
        values = dict(self.__dict__)
        again = self.derived({key: value for key, value in values.items() if key not in self.DERIVED})
        return {key: value for key, value in values.items() if key not in again or again[key] != value}

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        """A copy with other values, types checked; what was derived is derived again.

        As in the original, `model_fields_set` has the stated values alone.
        """
        changed = self.model_validate({**self.stated(), **changes})
        stated = {key for key, value in changes.items() if not _is_unset(value)}
        changed.model_fields_set.intersection_update(self.model_fields_set | stated)
        return changed


class Model(Section):
    """A decoder-only transformer: dense or mixture of experts, with grouped-query or latent attention.

    >>> Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256).parameters()
    8030261248
    """

    layers: Annotated[int, Field(ge=1, le=1 << 14)]
    hidden: Size
    ffn: MaybeSize = 0  # of dense layers; derived: expert_ffn in a mixture of experts
    heads: Size
    kv_heads: MaybeSize = 0  # derived: heads
    head_dim: MaybeSize = 0  # derived: hidden / heads, or the width of a query in latent attention
    vocab: Size
    gated: bool = True
    tied: bool = False  # one matrix for the embedding and the output
    experts: Count = 0
    top_k: Count = 0
    expert_ffn: MaybeSize = 0  # derived: ffn
    expert_groups: Count = 0  # that experts lie in, as many in each; 0: none
    top_k_groups: Count = 0  # of which a token may ask experts; 0: all
    shared_experts: Count = 0
    dense_layers: Count = 0  # in a mixture of experts, how many layers at the beginning have none
    mtp_layers: Annotated[int, Field(ge=0, le=64)] = 0  # that predict further tokens, each with the head again
    norm: Literal["rms", "layer"] = "rms"  # this and the next two are derived: as in Llama if gated, as in GPT-3 if not
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    bias: bool = False
    qkv_bias: bool = False  # derived: bias
    qk_norm: bool = False
    parallel_residual: bool = False
    activation: Literal["silu", "gelu", "relu", "relu2", "clamped_silu"] = "silu"  # derived: silu if gated, else gelu
    sinks: bool = False  # a logit of each head takes part in the softmax of its scores (GPT-OSS)
    window: MaybeSize = 0  # tokens that a layer with a sliding window attends to; 0: all layers attend to all
    window_pattern: Count = 0  # every n-th layer has no window; 0: all have it
    q_lora_rank: MaybeSize = 0
    kv_lora_rank: MaybeSize = 0  # more than 0: multi-head latent attention
    qk_nope_head_dim: MaybeSize = 0
    qk_rope_head_dim: MaybeSize = 0
    v_head_dim: MaybeSize = 0
    name: Annotated[str, Field(max_length=200)] = ""

    DERIVED: ClassVar[tuple[str, ...]] = (
        *("ffn", "kv_heads", "head_dim", "expert_ffn"),
        *("norm", "positions", "bias", "qkv_bias", "activation"),
    )

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """As in Llama where the MLP is gated, as in GPT-3 where it is not."""
        gated = given.get("gated", True) is not False
        hidden, heads = as_count(given.get("hidden")), as_count(given.get("heads"))
        experts = as_count(given.get("experts"))
        ffn, expert_ffn = as_count(given.get("ffn")), as_count(given.get("expert_ffn"))
        bias = given["bias"] if isinstance(given.get("bias"), bool) else not gated
        latent_dim = as_count(given.get("qk_nope_head_dim")) + as_count(given.get("qk_rope_head_dim"))
        latent = as_count(given.get("kv_lora_rank")) > 0
        return {
            "ffn": expert_ffn if experts else 0,
            "kv_heads": heads,
            "head_dim": latent_dim if latent else hidden // max(heads, 1),
            "expert_ffn": ffn if experts else 0,
            "norm": "rms" if gated else "layer",
            "positions": "rotary" if gated else "learned",
            "bias": bias,
            "qkv_bias": bias,
            "activation": "silu" if gated else "gelu",
        }

    def hidden_scores(self, seq: int) -> float:
        """The share of the causal attention scores of an average layer that sliding windows hide."""
        if not 0 < self.window < seq:
            return 0.0
        windowed = 1 - 1 / self.window_pattern if self.window_pattern else 1.0
        return windowed * (1 - self.window / seq) ** 2

    @property
    def latent(self) -> bool:
        """Whether it has multi-head latent attention, as DeepSeek-V3 does."""
        return self.kv_lora_rank > 0

    @property
    def moe_layers(self) -> int:
        """How many layers have experts; the dense ones come first."""
        return max(self.layers - self.dense_layers, 0) if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, with biases and inner norms."""
        return self._latent_attention() if self.latent else self._grouped_attention()

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size. A LayerNorm has a bias where the model has biases."""
        return self.hidden * (2 if self.norm == "layer" and self.bias else 1)

    @property
    def router_parameters(self) -> int:
        """Parameters of the router of one layer with experts."""
        return self.hidden * self.experts

    @property
    def predictor_parameters(self) -> int:
        """What a layer that predicts a further token has before it: two norms, and a projection of both to one."""
        return 2 * self.hidden**2 + 3 * self.norm_parameters

    def mlp_parameters(self, ffn: int) -> int:
        """Parameters of one MLP of this width: that of a dense layer (`ffn`) or of one expert (`expert_ffn`)."""
        inward = 2 if self.gated else 1
        biases = inward * ffn + self.hidden if self.bias else 0
        return (inward + 1) * self.hidden * ffn + biases

    def embedding_parameters(self, seq: int = 0) -> int:
        """Input embedding, output matrix unless tied, and learned positions for sequences of this length."""
        positions = seq * self.hidden if self.positions == "learned" else 0
        return self.vocab * self.hidden * (1 if self.tied else 2) + positions

    def parameters(self, seq: int = 0) -> int:
        """All parameters; learned positions count where the sequence length is given."""
        return self._parameters(self.experts, seq)

    def active_parameters(self, seq: int = 0) -> int:
        """The parameters that one token uses: `top_k` of the experts."""
        return self._parameters(self.top_k, seq)

    def _parameters(self, experts: int, seq: int) -> int:
        every_layer = self.attention_parameters + 2 * self.norm_parameters
        dense = self.mlp_parameters(self.ffn)
        sparse = self.router_parameters + (experts + self.shared_experts) * self.mlp_parameters(self.expert_ffn)
        layers = self.layers * every_layer + (self.layers - self.moe_layers) * dense + self.moe_layers * sparse
        layers += self.mtp_layers * (every_layer + (sparse if self.experts else dense) + self.predictor_parameters)
        return layers + self.norm_parameters + self.embedding_parameters(seq)

    def _grouped_attention(self) -> int:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * query + 2 * key_value)
        biases = (query + 2 * key_value if self.qkv_bias else 0) + (self.hidden if self.bias else 0)
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    def _latent_attention(self) -> int:
        query = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        low_rank = self.q_lora_rank * (self.hidden + 1 + query)  # + 1: the norm between the two
        queries = low_rank or self.hidden * query
        down = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + down + up + self.heads * self.v_head_dim * self.hidden


class Train(Section):
    """One training step. `microbatches` (per replica) and `global_batch` follow from each other in a Setup."""

    seq: Size
    micro_batch: Degree = 1
    microbatches: MaybeSize = 0
    global_batch: MaybeSize = 0
    precision: Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"] = "bf16"
    fp8_scaling: Literal["tensor", "row", "block"] = "tensor"  # a factor for a tensor, a row, or a block of 128 values
    weight_precision: Literal["", "bf16", "fp8", "int8", "nf4"] = ""  # of stored and gathered layer weights
    reduce_precision: Literal["", "bf16", "fp32"] = ""  # of gradients on the network; "": as the framework has it
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: Annotated[tuple[Module, ...], Field(strict=False, max_length=8)] = ()  # selective; (): as usual
    recompute_layers: Count | None = None  # full: only the first so many layers of every virtual stage; None: all
    recompute_every: Annotated[int, Field(ge=1, le=1 << 14)] = 1  # full: only every n-th layer
    recompute_group: Annotated[int, Field(ge=1, le=1 << 14)] = 1  # full: layers from one kept input to the next
    partition_activations: bool = False  # full: tensor ranks keep parts of the inputs, and gather them (DeepSpeed)
    optimizer: Literal["adamw", "adam", "sgd", "muon", "none"] = "adamw"
    offload_optimizer: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the optimizer's state and work on the host
    offload_weights: bool = False  # weights too, between their gathers (FSDP)
    offload_layers: Count = 0  # layers of a stage whose activations are on the host from forward to backward
    offload_overlap: bool = False  # copies of gradients and weights run beside the host's update
    compile: bool = False
    framework: Annotated[str, Field(max_length=100)] = "pytorch"
    attention: Literal["", "flash", "flash-3", "unfused"] = ""  # "": the framework's default
    mode: Literal["pretrain", "lora", "sft"] = "pretrain"
    imbalance: Annotated[float, Field(ge=1, le=1e4)] = 1.0  # load of the busiest expert / mean load
    capacity: Annotated[float, Field(ge=0, le=1e4)] = 0.0  # experts are filled up to so many times the mean; 0: are not
    cuda_graphs: bool = False

    @field_validator("recompute_modules", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        """One name, or several with commas between them, as a command line has them."""
        return tuple(name.strip() for name in given.split(",") if name.strip()) if isinstance(given, str) else given

    @property
    def modules(self) -> tuple[str, ...]:
        """What selective recomputation runs again: as given, or as the framework has it."""
        return self.recompute_modules or (framework_named(self.framework).selective,)


class Parallel(Section):
    """Tensor, pipeline (with virtual stages), context, expert and data parallelism. zero = 3 is FSDP."""

    tp: Degree = 1
    pp: Degree = 1
    vpp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    etp: MaybeDegree = 0  # ranks that one expert is cut for; 0: tp, or 1 where a rank has several experts
    cp_type: Literal["", "p2p", "all_gather", "a2a", "a2a+p2p"] = ""  # how context-parallel ranks attend; "": p2p
    cp_inner: MaybeDegree = 0  # a2a+p2p: ranks that exchange heads; 0: as many as NVLink joins and the heads allow
    dp: MaybeDegree = 0  # derived in a Setup: gpus / (tp * pp * cp)
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"  # derived: interleaved where vpp > 1
    stage_layers: Annotated[tuple[Count, ...], Field(strict=False, max_length=1 << 14)] = ()  # (): as even as possible
    shard: MaybeDegree = 0  # replicas that share one copy of the weights, gradients or state; 0: all of dp
    dispatcher: Literal["", "all_to_all", "flex", "all_gather"] = ""  # of tokens to experts; "": the framework's
    no_sync: bool = False  # ZeRO 3 reduces gradients after the last micro-batch alone, and keeps them whole until then
    order: Literal["tp-cp-dp-pp", "tp-cp-pp-dp"] = "tp-cp-dp-pp"  # of ranks, from neighbours to those farthest apart
    tp_overlap: bool | None = None  # None: the framework's default
    dp_overlap: bool | None = None
    gather_overlap: bool | None = None  # ZeRO 1, 2: updated weights behind the next forward pass; None: as dp_overlap
    ep_overlap: bool | None = None

    DERIVED: ClassVar[tuple[str, ...]] = ("schedule",)

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Virtual stages imply the interleaved schedule."""
        return {"schedule": "interleaved" if as_count(given.get("vpp")) > 1 else "1f1b"}

    @property
    def replica_gpus(self) -> int:
        """GPUs that hold one replica of the model."""
        return self.tp * self.pp * self.cp

    @property
    def used(self) -> list[str]:
        """The sizes that are more than 1, as in "tp 4"."""
        sizes = {key: getattr(self, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
        return [f"{key} {size}" for key, size in sizes.items() if size > 1]


def _as_name(value: object) -> object:
    """A GPU whose name is a number, such as 4090."""
    return str(value) if type(value) is int else value


class Cluster(Section):
    """GPUs in nodes. A value that is None is that of the GPU: in `data/gpus.toml`, or in its data sheet."""

    # A name, or a data sheet; derived: the GPU of `model`.
    gpu: Annotated[str, BeforeValidator(_as_name), Field(max_length=1000)] = _USUAL_GPU
    model: Annotated[str, Field(max_length=1000)] = ""  # a file of `lumos fit`: what was measured of the machine
    gpus: MaybeDegree = 0  # derived in a Setup: tp * pp * cp * dp
    gpus_per_node: MaybeDegree = 0  # derived: that of `model`, or the GPU's usual node
    nvlink_gb_s: Bandwidth | None = None  # per GPU, one direction
    nvlink_domain: Degree | None = None
    inter_gb_s: Bandwidth | None = None  # per GPU, one direction; None: that of the fabric if it has one, or of the GPU
    fabric: Fabric = "infiniband"  # between nodes
    leaf_gpus: MaybeDegree = 0  # whose adapters are on one leaf switch; 0: no switch is narrower than the adapters
    rail_aligned: bool = False  # the GPUs of a node are on different leaf switches, those of one index on the same
    oversubscription: Annotated[float, Field(ge=1, le=1e3)] = 1.0  # adapters below a leaf / its links to the spine
    sharp: bool = False  # the switches between nodes reduce (InfiniBand)
    nvls: bool | None = None  # the NVLink switch reduces; None: where the GPU's does
    nvswitch: bool | None = None  # a switch joins the GPUs of a domain, not links of pairs; None: as usual for the GPU
    memory_gib: Annotated[float, Field(gt=0, le=1e5)] | None = None
    hbm_tb_s: Annotated[float, Field(ge=1e-3, le=1e4)] | None = None
    power_w: Annotated[float, Field(ge=1, le=1e5)] | None = None  # the power limit of the board
    peak_tflops: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None  # dense, of bf16; others in proportion
    host: Annotated[float, Field(ge=0.01, le=100)] = 1.0  # its speed, relative to a typical host, or to that of `model`

    DERIVED: ClassVar[tuple[str, ...]] = ("gpu", "gpus_per_node")

    @model_validator(mode="before")
    @classmethod
    def _measured(cls, given: Any) -> Any:
        """A model file that is named as the GPU is the model of that GPU."""
        gpu = given.get("gpu") if isinstance(given, dict) else None
        if not isinstance(gpu, str) or not gpu.endswith(".npz") or given.get("model", "") not in ("", gpu):
            return given
        return {key: value for key, value in given.items() if key != "gpu"} | {"model": gpu}

    @classmethod
    def derived(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The node that was measured, or the GPU's usual one; an unknown GPU is refused by the constraints."""
        model, name = given.get("model"), given.get("gpu")
        measured = {"gpu": _gpu_of_model(model)} if model and isinstance(model, str) else {}
        name = measured.get("gpu", _USUAL_GPU) if name is None else name
        gpu = find_gpu(name) if isinstance(name, str) else None
        node = _node_of_model(str(model)) if measured and name == measured["gpu"] else 0
        return measured | {"gpus_per_node": node or (gpu.gpus_per_node if gpu else 1)}

    @property
    def shown(self) -> str:
        """The GPU in a report: as it was named, or its file without the folder."""
        return Path(self.gpu).name if is_file_name(self.gpu) else self.gpu

    @property
    def states_network(self) -> bool:
        """Whether links differ from those of the GPU and its node, so that what was sampled on them does not hold."""
        links = (self.nvlink_gb_s, self.nvlink_domain, self.inter_gb_s, self.nvls, self.nvswitch)
        return any(value is not None for value in links) or self.oversubscription > 1 or self.sharp

    @property
    def chip(self) -> Gpu:
        """The GPU with this section's values of the chip itself: what operators cost depends on nothing else."""
        return _chip(gpu_named(self.gpu), self.hbm_tb_s, self.power_w, self.peak_tflops)

    @property
    def accelerator(self) -> Gpu:
        """The GPU as it is in this cluster, with this section's values in place of the usual ones."""
        between = self.inter_gb_s or read_table("fabrics.toml")[self.fabric].get("gb_s")
        return _accelerator(
            self.chip, self.gpus_per_node, self.nvlink_gb_s, self.nvlink_domain, between, self.memory_gib
        )


OF_GPU: Mapping[str, Any] = MappingProxyType({
    "gpus_per_node": 0, "nvlink_gb_s": None, "nvlink_domain": None, "memory_gib": None, "hbm_tb_s": None,
    "power_w": None, "peak_tflops": None, "nvls": None, "nvswitch": None,
})  # fmt: skip
"""Keys of a cluster that say something of its own GPU, and the values that stand for those of any other."""


def _gpu_of_model(path: str) -> str:
    """The name by which the GPU of a model file is found: a known one, or the file itself."""
    gpu = gpu_named(path) if path.endswith(".npz") else None
    return gpu.name if gpu else _USUAL_GPU


def _node_of_model(path: str) -> int:
    """GPUs in a node whose collectives were measured, or 0."""
    network = read_model_file(Path(path)).header.get("network") if path.endswith(".npz") else None
    return min(as_count(network.get("gpus_per_node")), 1 << 20) if isinstance(network, dict) else 0


@lru_cache(maxsize=256)
def _chip(gpu: Gpu, hbm_tb_s: float | None, power_w: float | None, bf16: float | None) -> Gpu:
    changes: dict[str, Any] = {}
    if hbm_tb_s:
        changes["hbm_gb_s"] = hbm_tb_s * 1e3
    if power_w:
        changes["tdp_w"] = power_w
    if bf16:
        half = gpu.peak_tflops.get("bf16") or gpu.peak_tflops["fp16"]
        changes["peak_tflops"] = MappingProxyType({key: rate * bf16 / half for key, rate in gpu.peak_tflops.items()})
    return dataclasses.replace(gpu, **changes) if changes else gpu


@lru_cache(maxsize=256)
def _accelerator(
    gpu: Gpu, node: int, nvlink_gb_s: float | None, domain: int | None, inter_gb_s: float | None, gib: float | None
) -> Gpu:
    joined = domain or _joined(gpu, node)
    return dataclasses.replace(
        gpu,
        gpus_per_node=node,
        nvlink_gb_s=0.0 if joined == 1 < node else nvlink_gb_s or gpu.nvlink_gb_s,
        nvlink_domain=joined,
        inter_gb_s=inter_gb_s or gpu.inter_gb_s,
        memory_gib=gib or gpu.memory_gib,
    )


def _joined(gpu: Gpu, node: int) -> int:
    """GPUs that NVLink joins in nodes of this size: it ends at the node, except where it joins a rack."""
    if gpu.nvlink_domain > gpu.gpus_per_node:
        return gpu.nvlink_domain
    alone = gpu.nvlink_domain == gpu.gpus_per_node == 1  # in its usual node
    return node if alone else min(gpu.nvlink_domain, node)


def as_count(value: object) -> int:
    """A positive whole number, or 0 for anything else; whether the type is right is checked by the section."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _is_unset(value: object) -> bool:
    """0, "" and None stand for "derive it"; False does not."""
    return value is None or value == "" or (value == 0 and not isinstance(value, bool))
