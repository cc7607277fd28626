"""GPT-NeoX on DeepSpeed: what a rank runs for one layer, kernel by kernel, and how long that takes.

Three things set it apart from the layers of other frameworks, and decide its speed:
- Element-wise chains run unfused. Where such a chain was sampled whole (the `neox_…` operators) its sample is used;
  copies, bias adds and gradient sums that were not are priced by the bytes they move.
- Every layer is recomputed, and the host waits for the GPU at both ends of every checkpoint. A layer therefore starts
  with an idle GPU, and the host's own time is part of it: `elapsed_us` follows host and GPU launch by launch.
- The input of a layer may be kept in parts by the ranks of a tensor group; the backward pass gathers it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lumos.cost.operator_model import CostModel, cost_model
from lumos.program.operators import Collective, Operator
from lumos.program.rank_layout import RankLayout


class Task(NamedTuple):
    """Work in the order of issue; `share` of its price counts."""

    work: Operator | Collective
    launches: int = 1  # that the host needs the time of
    share: float = 1.0
    name: str = ""


Tasks = list[Task]


class Host(NamedTuple):
    """Microseconds of the host, from recordings on an H200 with the profiler on, as it was in the measured runs.

    `python` and `autograd` are means of `h1024`, which the host limits; other recordings have 50–80 and 46–58.
    """

    boundary: float = 500.0  # from the end of a checkpoint to the next launch (`ckpt`: 460–660; 90 without one)
    python: float = 65.0  # for one launch of a forward pass
    autograd: float = 47.0  # for one launch of a backward pass
    latency: float = 8.0  # from the launch to the kernel's start


IDLE_HOST = Host(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Recipe:
    """What NeoX's own configuration files say beyond the model's shape."""

    rotary_share: float = 1.0  # of every head's width that is rotated
    fused_gelu: bool = False  # the bias is added by the activation's kernel
    attention_bias: bool = False
    partitioned: bool = False  # the inputs of layers are kept in parts by the ranks of a tensor group


@dataclass(frozen=True)
class Details:
    """Corrections to the plain sum of sampled operators; each can be left out to see what it is worth."""

    small_kernels: bool = True  # copies, bias adds, gradient sums
    accumulation: bool = True  # weight gradients are added up over micro-batches
    rotary: bool = True  # part of the head, and without the host's time that its short kernels were sampled with
    narrow_norm: bool = True  # RMS norm was sampled with weights of fp32, and trains with fp16
    causal: bool = True  # flash attention has a mask; it was sampled without one, and fitted as if it had
    gathered: bool = True  # the inputs of layers, where they are kept in parts


# Of the sampled bytes of an RMS norm, those that remain where its weights have the activations' precision.
_NARROW_FORWARD, _NARROW_BACKWARD = 10 / 12, 46 / 62
# Half the blocks and the diagonal (0.516 at 4096), at a tenth less throughput than the full square.
_CAUSAL = 0.57
_WIDER_LOSS = 2.0  # the loss was sampled on fp16 logits, and trains on fp32


class NeoxLayer:
    """The tasks of one layer on one rank, and of embedding and head."""

    def __init__(self, layout: RankLayout, recipe: Recipe, details: Details, model: CostModel) -> None:
        self.layout, self.recipe, self.details, self.model = layout, recipe, details, model
        self.hidden = layout.model.hidden
        self.inner = self.hidden // layout.parallel.tp  # of attention, on one rank
        self.ffn = layout.model.ffn // layout.parallel.tp

    # ------------------------------------------------------------------ parts
    def _op(self, kind: str, *shape: int, launches: int = 1, share: float = 1.0) -> Task:
        return Task(Operator(kind, shape, self.layout.precision), launches, share, kind)

    def _small(self, passes: float, width: int, name: str, launches: int = 1) -> Tasks:
        """A kernel that was not sampled: so many passes over tokens × width."""
        size = round(passes * self.layout.tokens * width * self.layout.element)
        task = Task(Operator("stream", (size,), self.layout.precision), launches, 1.0, name)
        return [task] if self.details.small_kernels else []

    def _collective(self, kind: str, name: str) -> Tasks:
        size = float(self.layout.tokens * self.hidden * self.layout.element)
        return [Task(Collective(kind, size, self.layout.tp), 1, 1.0, name)] if self.layout.tp.size > 1 else []

    def _linear(self, n: int, k: int) -> Tasks:
        return [self._op("gemm_tn", self.layout.tokens, n, k)]

    def _linear_backward(self, n: int, k: int) -> Tasks:
        tasks = [self._op("linear_bwd", self.layout.tokens, n, k, launches=2)]
        if self.details.accumulation and self.layout.train.microbatches > 1:
            size = 3 * n * k * self.layout.element
            tasks.append(Task(Operator("stream", (size,), self.layout.precision), 1, 1.0, "accumulate"))
        return tasks

    def norm(self) -> Tasks:
        if self.layout.model.norm == "layer":
            return [self._op("neox_layer_norm_fwd", self.layout.tokens, self.hidden)]
        share = _NARROW_FORWARD if self.details.narrow_norm else 1.0
        return [self._op("neox_rms_norm_fwd", self.layout.tokens, self.hidden, launches=3, share=share)]

    def norm_backward(self) -> Tasks:
        if self.layout.model.norm == "layer":
            return [self._op("neox_layer_norm_bwd", self.layout.tokens, self.hidden, launches=3)]
        share = _NARROW_BACKWARD if self.details.narrow_norm else 1.0
        return [self._op("neox_rms_norm_bwd", self.layout.tokens, self.hidden, launches=7, share=share)]

    def _rotary(self, kind: str, launches: int, passes: float) -> Tasks:
        """The chain at the size where the GPU limits it; what is not rotated is split off and joined again.

        The host issues the scripted chain in the time of `launches` others (the samples' shortest chains).
        """
        s = self.layout
        shape = (s.sequences, s.heads, s.seq, s.model.head_dim)
        if not self.details.rotary:
            return [self._op(kind, *shape, launches=launches)]
        tp, part = s.parallel.tp, self.recipe.rotary_share
        whole = (s.sequences, s.heads * tp, s.seq, s.model.head_dim)
        rest = self._small(passes, self.inner, "rotary rest", 2) if part < 1 else []
        return [self._op(kind, *whole, launches=launches, share=part / tp), *rest]

    # ------------------------------------------------------------------ attention
    def _core(self) -> Tasks:
        s, d = self.layout, self.layout.model.head_dim
        if s.attention == "flash":
            share = 1.0 if self.details.causal else 1 / _CAUSAL
            return [self._op("sdpa_fwd", s.sequences, s.heads, s.seq, d, share=share)]
        batch = s.sequences * s.heads
        return [
            self._op("bmm", batch, s.seq, s.seq, d),
            self._op("softmax_fwd", s.sequences, s.heads, s.seq),
            self._op("bmm", batch, s.seq, d, s.seq),
        ]

    def _core_backward(self) -> Tasks:
        s, d = self.layout, self.layout.model.head_dim
        if s.attention == "flash":
            forward = Operator("sdpa_fwd", (s.sequences, s.heads, s.seq, d), s.precision)
            share = flash_backward(self.model, forward) * (1.0 if self.details.causal else 1 / _CAUSAL)
            return [Task(forward, 3, share, "sdpa_bwd")]
        batch = s.sequences * s.heads
        return [
            self._op("bmm_bwd", batch, s.seq, d, s.seq, launches=2),
            self._op("softmax_bwd", s.sequences, s.heads, s.seq),
            self._op("bmm_bwd", batch, s.seq, s.seq, d, launches=2),
            *self._small(4.0, self.inner, "scale query and key grads", 2),
        ]

    def _attention(self) -> Tasks:
        return [
            *self._linear(3 * self.inner, self.hidden),
            *self._rotary("neox_rotary_fwd", 4, 4.0),
            *self._core(),
            *self._small(2.0, self.inner, "attention copy"),
            *self._linear(self.hidden, self.inner),
            *(self._small(2.0, self.hidden, "attention bias") if self.recipe.attention_bias else []),
        ]

    def _attention_backward(self) -> Tasks:
        return [
            *(self._small(1.0, self.hidden, "attention bias grad") if self.recipe.attention_bias else []),
            *self._linear_backward(self.hidden, self.inner),
            *self._small(2.0, self.inner, "attention copy"),
            *self._core_backward(),
            *self._rotary("neox_rotary_bwd", 9, 14.0),
            *self._small(6.0, self.inner, "join query, key and value grads"),
            *self._linear_backward(3 * self.inner, self.hidden),
            *self._collective("all_reduce", "attention grad reduce"),
        ]

    # ------------------------------------------------------------------ MLP
    def _mlp(self) -> Tasks:
        return [
            *self._linear(self.ffn, self.hidden),
            *([] if self.recipe.fused_gelu else self._small(2.0, self.ffn, "up bias")),
            self._op("neox_gelu_fwd", self.layout.tokens, self.ffn),
            *self._linear(self.hidden, self.ffn),
        ]

    def _mlp_backward(self) -> Tasks:
        return [
            *self._small(1.0, self.hidden, "down bias grad"),
            *self._linear_backward(self.hidden, self.ffn),
            self._op("neox_gelu_bwd", self.layout.tokens, self.ffn),
            *self._small(1.0, self.ffn, "up bias grad"),
            *self._linear_backward(self.ffn, self.hidden),
            *self._collective("all_reduce", "mlp grad reduce"),
        ]

    # ------------------------------------------------------------------ the whole
    def forward(self) -> Tasks:
        add = self._op("neox_add_fwd", self.layout.tokens, self.hidden)
        bias = self._small(2.0, self.hidden, "down bias")
        if self.layout.model.parallel_residual:  # x + reduce(attention(norm1 x) + mlp(norm2 x))
            head = [*self.norm(), *self.norm(), *self._attention(), *self._mlp(), *bias, add]
            return [*head, *self._collective("all_reduce", "reduce"), add]
        attention = [*self.norm(), *self._attention(), *self._collective("all_reduce", "attention reduce"), add]
        mlp = [*self.norm(), *self._mlp(), *self._collective("all_reduce", "mlp reduce"), *bias, add]
        return [*attention, *mlp]

    def backward(self) -> Tasks:
        add = self._op("neox_add_bwd", self.layout.tokens, self.hidden)
        mlp, attention = self._mlp_backward(), self._attention_backward()
        return [*mlp, *self.norm_backward(), add, *attention, *self.norm_backward(), add]

    def gathered(self) -> Tasks:
        """What a backward pass needs before it recomputes: the layer's input, where ranks keep parts of it."""
        kept = self.recipe.partitioned and self.details.gathered
        return self._collective("all_gather", "gather input") if kept else []

    def exchanged(self) -> Tasks:
        """Activations or gradients from another stage come in parts, and every tensor rank gathers the whole."""
        return self._collective("all_gather", "gather from stage")

    def embedding(self) -> Tasks:
        s = self.layout
        table = self._op("neox_embedding_fwd", s.tokens, s.vocab, self.hidden)
        return [table, *self._collective("all_reduce", "embedding reduce")]

    def embedding_backward(self) -> Tasks:
        return [self._op("neox_embedding_bwd", self.layout.tokens, self.layout.vocab, self.hidden, launches=4)]

    def head(self) -> Tasks:
        s = self.layout
        loss = self._op("neox_loss_fwd", s.tokens, s.vocab, launches=8, share=_WIDER_LOSS)
        return [*self.norm(), *self._linear(s.vocab, self.hidden), *self._small(3.0, s.vocab, "to fp32"), loss]

    def head_backward(self) -> Tasks:
        s = self.layout
        loss = self._op("neox_loss_bwd", s.tokens, s.vocab, launches=4, share=_WIDER_LOSS)
        product = self._linear_backward(s.vocab, self.hidden)
        reduced = self._collective("all_reduce", "head grad reduce")
        return [loss, *self._small(3.0, s.vocab, "to fp16"), *product, *reduced, *self.norm_backward()]


def flash_backward(model: CostModel, forward: Operator) -> float:
    """The backward pass of flash attention over its forward pass; that of the A100 where it was not sampled."""
    known = model if "sdpa_bwd" in model.regressors else cost_model("a100")
    return known.us(forward._replace(kind="sdpa_bwd")) / known.us(forward)


class PricesCollectives(Protocol):
    """A network, of whatever source."""

    def us(self, collective: Collective) -> float: ...


class Costs(NamedTuple):
    """What tasks cost inside a step: sampled times, and what a step makes of them."""

    model: CostModel
    network: PricesCollectives
    matrix: float = 1.0  # products and attention, over the same alone
    gap_us: float = 0.0  # between two kernels

    def us(self, task: Task) -> float:
        """One task. The samples are spans of kernels: nothing of a timer is in them that would have to come off."""
        if isinstance(task.work, Collective):
            return task.share * self.network.us(task.work)
        return task.share * self.model.us(task.work) * (self.matrix if task.work.is_matrix else 1.0) + self.gap_us


def elapsed_us(passes: Iterable[tuple[Tasks, float]], costs: Costs, host: Host) -> float:
    """From a synchronised start until the GPU has done all passes, each (tasks, host microseconds for one launch).

    A kernel starts once the one before it has ended and the host has launched it.
    """
    issued, done = host.boundary, 0.0
    for tasks, per_launch in passes:
        for task in tasks:
            cost, count = costs.us(task), max(1, task.launches)
            first = issued + per_launch + host.latency
            issued += per_launch * task.launches
            done = max(max(done, first) + cost, issued + host.latency + cost / count)
    return done
