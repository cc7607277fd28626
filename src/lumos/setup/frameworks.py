"""Framework: what a training framework runs around the same mathematics. The facts are in `data/frameworks.toml`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lumos.data_files import read_table
from lumos.errors import OptionError


@dataclass(frozen=True)
class Framework:
    """Which kernels are fused or joined, what overlaps, which precisions are kept, what a launch costs."""

    name: str
    aliases: tuple[str, ...] = ()  # regular expressions for its names in tables of measured runs, beside `name`
    stands_for: tuple[str, ...] = ()  # the same for frameworks that Lumos does not describe and that work most like it
    attention: str = "flash"
    # Flash kernels: the GPU's best (native), or FlashAttention 1 or 2 with Ampere's instructions; frameworks that have
    # FlashAttention 2 leave it for cuDNN's kernels on Blackwell.
    flash: str = "native"
    compiled_flash: str = ""  # the same in compiled models; "": as `flash`
    fused: bool = False  # element-wise chains are one kernel, and 8-bit linear layers are those of Transformer Engine
    fused_norm: bool = False
    fused_rotary: bool = False
    fused_activation: bool = False
    fused_bias: bool = False  # the matmul itself or the next kernel adds the bias
    loss: str = "eager"  # eager: a copy in fp32 and a fused kernel; sharded: ten passes over fp32; fused: in place
    eager_gelu: bool = False  # GELU written out as eight operators
    chains: str = ""  # its norms, additions, activations … were sampled as it runs them: operators with this prefix
    norm_per_branch: bool = False  # attention and MLP that run in parallel have a norm each, not one together
    joins_qkv: bool = False  # one matmul for query, key and value
    joins_gate: bool = False  # one matmul for both inward halves of a gated MLP
    dropout: bool = False
    # What selective recomputation runs again, where a setup does not name it: a module, "operators" (torchtitan's rule)
    # or "layers" (some layers, and those whole).
    selective: str = "core_attn"
    accumulates_fp32: bool = False  # weight gradients are added to a buffer of fp32
    fused_accumulation: bool = False  # by the matmul itself
    fp16_in_fp16: bool = False  # gradients of fp16, unlike those of bf16, are added up and reduced as they are
    tp_overlap: bool = False
    userbuffers: bool = False  # … by Transformer Engine's own kernels, which hold fewer multiprocessors than NCCL's
    dp_overlap: bool = False
    overlaps_sharded: bool = True  # … also where the optimizer's state is divided (ZeRO 1 and 2)
    overlaps_in_pipeline: bool = True  # … also where there are several stages
    sequence_parallel: bool = False
    cp_type: str = "p2p"  # how its context-parallel ranks attend, where a measured run does not say
    cp_in_parts: bool = False  # all_gather: ranks attend to the keys of one rank after the other, and add up in fp32
    sends_parts: bool = False  # every tensor rank sends its part of the activations to the next stage, which gathers
    balances: bool = False  # layers are dealt to stages by their work, the head's included; else evenly
    zero: int = 0
    zeros: tuple[int, ...] = (0, 1, 2, 3)  # stages of ZeRO that it has, for a search; 3 is FSDP
    keeps_weights_in_pipeline: bool = False  # in one, ZeRO 3 gathers and DDP reduces once a step, not in every pass
    zero2_with_pipeline: bool = False  # DeepSpeed refuses it; FSDP2 has it: reshard_after_forward="never"
    reduces_always: bool = False  # gradients are reduced after every micro-batch, not after the last alone
    reduces_divided: bool = False  # … where ZeRO 2 divides them
    scatters: bool = True  # ZeRO 1 and 2 reduce-scatter gradients; else they are all-reduced
    bucket_mb: float = 0.0  # gradients are reduced in parts of this size, see `bucket_bytes`; 0: as the layers end
    reduce_bytes: int = 2  # of one gradient on the network
    gather_bytes: float = 2.0  # of one weight on the network
    state_precision: str = "training"  # of weights and optimizer state: training, mixed, fp32
    optimizer_traffic: float = 28.0  # bytes read and written for one parameter
    optimizer_launches: int = 60  # 0: by the tensors it updates, half a launch each
    fuses_sinks: bool = True  # flash attention with a sink in the softmax; else attention is unfused
    skips_windows: bool = True  # attention with a sliding window computes the window alone, not the whole square
    grouped_experts: bool = False
    expert_launches: float = 0.0  # of the host, for one expert in a grouped matmul; 0: one launch for all
    dispatcher: str = "all_to_all"  # how tokens reach their experts: all_to_all, or flex (DeepEP, HybridEP)
    dispatches_fp8: bool = False  # tokens go to their experts as they are cast for 8-bit matmuls; results come in 16
    block_scaled: bool = False  # 8-bit matmuls have a factor for every block, whatever `train.fp8_scaling` says
    weighs_inside: bool = False  # the router's weights scale the activation of experts, so that results are not kept
    caches_fp8: bool = False  # in 8 bits, gated activations keep their inputs in 8, attention its output in 12
    leaves_sms: bool = False  # matmuls beside communication start as many blocks as it leaves multiprocessors
    ep_overlap: bool = False  # exchanges between experts run beside the work of another micro-batch
    clears_experts: bool = False  # rows that no expert worked on are set to zero after every grouped matmul
    host_us: float = 35.0  # of the host for one launch, with all the Python around it, on the reference host
    collective_launches: float = 2.0  # launches that a collective costs the host
    stops_early: bool = False  # a recomputed layer ends where nothing more is needed: before its last matmul
    checkpoint_launches: float = 15.0  # launches that keeping and restoring one recomputed layer costs the host
    syncs_checkpoints: bool = False  # the host waits for the GPU before it runs a layer that is kept or restored
    gather_launches: float = 30.0  # launches that gathering a layer's weights costs the host, forward and backward each
    layer_launches: int = 0  # of one layer's forward, beyond those of its operators; twice as many of its backward
    splits_vocab: bool = True  # tensor parallelism divides embedding and head as well
    # Where tensor parallelism is by eager DTensors, whose Python runs around every operator: launches that it costs the
    # host. Traced runs have it; a description leaves it out.
    dtensor_launches: tuple[float, float] = (0.0, 0.0)  # in a layer's forward and backward pass
    dtensor_updates: float = 0.0  # for one tensor that the optimizer updates
    # What it keeps in memory beyond that.
    logit_bytes: float = 0.0  # of one logit between the loss and its backward pass; 0: as `loss` has it
    compiled_logit_bytes: float = 0.0  # the same where train.compile is on; 0: as other compiled models
    kept_logit_bytes: float = 0.0  # of the micro-batch before, not released yet
    half_gradients: bool = False  # 16-bit gradients of all weights lie beside the fp32 buffer
    gradient_buffer_fp32: bool = False
    keeps_gathered: bool = False  # sequence parallel: linear layers keep their gathered input, not a part of it
    compiles_blocks: bool = False  # layer by layer, not the whole model: what matmuls of the backward pass read is kept
    keeps_repeated: bool = False  # keys and values are kept as they are repeated for the queries that share them
    keeps_outputs: bool = False  # the last stage keeps the logits of all micro-batches, to join them
    bucket_buffers: int = 0  # buffers of `bucket_mb` that gradients are copied to before their reduction
    live_parameters: float = 0.0  # ZeRO 3: gathered parameters that may stay for their next use
    gradient_buckets: bool = False  # DistributedDataParallel: one more copy of the gradients

    def reduces_beside(self, zero: int, pp: int) -> bool:
        """Whether it reduces gradients of whole weights beside the backward pass, if nothing else is asked for."""
        sharded = zero in (1, 2)
        return self.dp_overlap and (self.overlaps_sharded or not sharded) and (self.overlaps_in_pipeline or pp == 1)

    def bucket_bytes(self, beside: bool) -> float:
        """The size of one reduction, 0 if gradients are reduced as one; `beside`: during the backward pass.

        After the backward pass all gradients are ready, so only a framework that copies them to buckets divides them.
        """
        return self.bucket_mb * 1e6 if beside or self.bucket_buffers else 0.0


@cache
def framework_named(name: str, precision: str = "", reduced_in: str = "", stored_in: str = "") -> Framework:
    """The framework with the precisions in which it computes, reduces gradients and stores weights, or OptionError."""
    tables = _tables()
    if name not in tables:
        raise OptionError(f"framework {name[:100]!r} is not known: use one of {', '.join(tables)}")
    found = tables[name]
    if stored_in:
        found = replace(found, gather_bytes=read_table("memory.json")["weight_bytes"][stored_in])
    low = reduced_in == "bf16" or (not reduced_in and precision == "fp16")
    if found.fp16_in_fp16 and low:  # gradients are reduced as they are added up
        return replace(found, accumulates_fp32=False, gradient_buffer_fp32=False, reduce_bytes=2)
    return replace(found, reduce_bytes=2 if low else 4) if reduced_in else found


def framework_names() -> tuple[str, ...]:
    """The values that `train.framework` may have."""
    return tuple(_tables())


@cache
def _tables() -> dict[str, Framework]:
    found = {}
    for name, facts in read_table("frameworks.toml").items():
        frozen: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in facts.items()}
        found[name] = Framework(name=name, **frozen)
    return found
