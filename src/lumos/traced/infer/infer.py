"""The setup of a traced run, as far as the trace shows it. Nothing is guessed: what ranks disagree on is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from lumos.analysis.replay import Replay
from lumos.data_files import read_table
from lumos.dtypes import dtype_called
from lumos.graph.rules.cpu_device import is_cpu_run
from lumos.read.op_columns import OpType, TracedOp, rank_ops
from lumos.setup.gpus import gpu_called
from lumos.traced.infer import Findings, Inferred, agreed
from lumos.traced.infer.attentions import find_attentions
from lumos.traced.infer.layers import LayerShape, RankLayers, matrices, read_layers
from lumos.traced.infer.parallelism import Parallelism
from lumos.traced.infer.widths import Widths, kv_heads

_LIMITS = read_table("analysis.toml")["infer"]
_MOST_RANKS = 16  # that are looked at,
_MOST_STAGES = 64  # unless they are the stages of one pipeline
_PRECISIONS, _CPU_PRECISIONS = ("bf16", "fp16"), ("bf16", "fp16", "fp32")  # fp32 may be TF32 on a GPU
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}
_FUSED = (OpType.ATTENTION, OpType.SOFTMAX)
_OF_ATTENTION = (*_FUSED, OpType.BATCHED_MATMUL)
_ADDITIONS = ("aten::add", "aten::add_")
_CONVOLUTION = "aten::convolution"


def infer(run: Replay) -> Findings:
    """The keys of the traced run's setup that its trace shows, each with its value and evidence.

    >>> infer(replay(read_job(Path("traces"))))["model.layers"]             # doctest: +SKIP
    Inferred(value=4, evidence='4 attentions in 1 micro-batch')
    """
    headers = run.execution.trace.headers
    if not headers:
        return {}
    step = run.marks.names[int(np.argmin(np.abs(run.clean_steps.milliseconds - run.clean_ms)))]
    ranks: dict[int, RankLayers] = {}
    spread = np.linspace(0, len(headers) - 1, min(_MOST_RANKS, len(headers))).round().astype(int)
    wanted = [headers[place] for place in np.unique(spread)]
    while wanted and len(ranks) < _MOST_STAGES:
        ranks |= {h.rank: read_layers(rank_ops(run.execution.recorded, h.rank, step)) for h in wanted}
        chain = Parallelism([ranks[rank] for rank in sorted(ranks)], 0).chain
        wanted = [h for h in headers if h.rank in chain and h.rank not in ranks]
    return _Inference(run, [ranks[rank] for rank in sorted(ranks)]).findings()


@dataclass(frozen=True)
class _Inference:
    """What follows from the recorded operators of the ranks that were read."""

    run: Replay
    ranks: Sequence[RankLayers]

    def findings(self) -> Findings:
        parts: tuple[Mapping[str, Inferred | None], ...] = (
            self._cluster(), self.parallelism.inferred, self._repetition(), self._widths(), self._unsharded_sizes(),
            self._sharded_sizes(), self._vocabulary(), self._batch(), self._training(),
        )  # fmt: skip
        return {key: inferred for part in parts for key, inferred in part.items() if inferred is not None}

    def _ops(self, op_type: OpType) -> list[TracedOp]:
        """All operators or scopes of a type, of all ranks."""
        return [op for rank in self.ranks for op in rank.ops.ops if op.type == op_type]

    # ------------------------------------------------------------------ cluster and parallelism
    @cached_property
    def world(self) -> int:
        """How many ranks the job had; 0 where the trace does not show it."""
        trace = self.run.execution.trace
        stated = {header.world_size for header in trace.headers if header.world_size > 0}
        if stated:
            return agreed(stated) or 0
        alone = len(trace.headers) == 1 and not trace.is_communication.any() and not self.ranks[0].ops.collectives
        return 1 if alone and self._ops(OpType.OPTIMIZER) else 0

    @property
    def _on_cpu(self) -> bool:
        return is_cpu_run(self.run.execution.trace)

    def _cluster(self) -> Mapping[str, Inferred | None]:
        name = next((header.gpu for header in self.run.execution.trace.headers if header.gpu), "")
        gpu = gpu_called(name)
        traced = Inferred(gpu.name, f"the trace is of {name}") if gpu is not None else None
        on_cpu = Inferred("cpu", "operators run on the host, and there is no GPU activity")
        why = "the job's ranks" if self.world > 1 else "an update without communication"
        return {
            "cluster.gpu": on_cpu if self._on_cpu else traced,
            "cluster.gpus": Inferred(self.world, why) if self.world else None,
        }

    @cached_property
    def parallelism(self) -> Parallelism:
        return Parallelism(self.ranks, self.world)

    def _size(self, key: str) -> int:
        """tp, pp, cp or dp; 0 where the trace does not show it."""
        return int(self.parallelism.inferred.get(f"parallel.{key}", Inferred(0, "")).value)

    # ------------------------------------------------------------------ micro-batches and layers
    @cached_property
    def microbatches(self) -> int:
        """Micro-batches of the recorded step; ranks that show it must agree."""
        return agreed(rank.microbatches for rank in self.ranks if rank.microbatches) or 0

    def _repetition(self) -> Findings:
        findings: Findings = {}
        count = self.microbatches
        if not count or not any(rank.attentions for rank in self.ranks):
            return findings
        if all(rank.ops.is_one_step for rank in self.ranks):
            findings["train.microbatches"] = Inferred(count, f"the forward pass runs {count} × a step")
        attentions = [rank.attentions for rank in self._stages()]
        if attentions and all(n and n % count == 0 for n in attentions):
            why = f"{sum(attentions)} attentions in {count} micro-batch{'' if count == 1 else 'es'}"
            doubt = self._doubt_of_layers()
            findings["model.layers"] = Inferred(sum(attentions) // count, f"{why}{doubt}", bool(doubt))
        return findings

    def _doubt_of_layers(self) -> str:
        """Why an attention may not stand for a layer like all others."""
        rank = self.ranks[0]
        if not all(rank.are_alike for rank in self.ranks):
            return " of several shapes, such as encoder and decoder, or vision and text: all count"
        if not self._is_whole or rank.attention is None:
            return ""
        if Widths(rank, rank.attention).has_others:
            return "; layers without attention do not count"
        return "" if rank.repeats else ", with different matmuls between them"

    def _stages(self) -> list[RankLayers]:
        """One rank of every pipeline stage; none where the stages are not known, or ranks of one stage differ."""
        if self._size("pp") > 1:
            return [rank for rank in self.ranks if rank.ops.rank in self.parallelism.chain]
        alike = agreed(rank.attentions for rank in self.ranks) is not None
        return [self.ranks[0]] if self._size("pp") == 1 and alike else []

    # ------------------------------------------------------------------ sizes of the model
    @property
    def _is_whole(self) -> bool:
        """Whether every rank has whole layers, and all of them."""
        return self._size("tp") == self._size("pp") == self._size("cp") == 1

    def _widths(self) -> Findings:
        """Of layers of any architecture; where they are like those of Llama, the exact ones replace them."""
        shape = agreed(rank.attention for rank in self.ranks)
        if not self._is_whole or shape is None or not self.ranks[0].tokens or not self.microbatches:
            return {}
        first, *others = (Widths(rank, shape).findings() for rank in self.ranks)
        return first if all(one == first for one in others) else {}

    @cached_property
    def layer(self) -> LayerShape | None:
        return agreed(rank.layer for rank in self.ranks)

    def _unsharded_sizes(self) -> Findings:
        """What tensor parallelism does not split."""
        findings: Findings = {}
        if self.layer is not None:
            hidden, (ffn, gated) = self.layer.hidden, self.layer.mlp
            findings["model.hidden"] = Inferred(hidden, f"matmuls of {hidden} × {ffn}")
            findings["model.gated"] = Inferred(gated, f"matmuls into the MLP: {'two' if gated else 'one'}")
        dim = agreed(rank.attention.dim for rank in self.ranks if rank.attention is not None)
        if dim is not None and all(rank.are_alike for rank in self.ranks):
            findings["model.head_dim"] = Inferred(dim, "the last dimension of attention")
        return findings

    def _sharded_sizes(self) -> Findings:
        """What tensor parallelism splits: the rank's own size times tp."""
        tp, layer = self._size("tp"), self.layer
        shape = agreed((rank.attention.heads, rank.attention.dim) if rank.attention else None for rank in self.ranks)
        if not tp or layer is None or shape is None:
            return {}
        heads, dim = shape
        times = f" × {tp} ranks" if tp > 1 else ""
        findings = {"model.ffn": Inferred(layer.mlp.ffn * tp, f"matmuls of {layer.hidden} × {layer.mlp.ffn}{times}")}
        if layer.attended != heads * dim:
            return findings  # another kind of attention
        findings["model.heads"] = Inferred(heads * tp, f"attention of {heads} heads{times}")
        groups = kv_heads(layer.qkv, heads, dim)
        is_copy = tp > 1 and groups == 1 < heads and not self._splits_keys(dim)  # the same key heads on every rank
        if groups and not is_copy:
            why = f"matmuls of {layer.hidden} × {groups * dim} for keys{times}"
            findings["model.kv_heads"] = Inferred(groups * tp, why)
        return findings

    def _splits_keys(self, columns: int) -> bool:
        """Whether the matmuls of so many columns are all shards of DTensors: of keys and values, and no copies."""
        shards = {
            _columns(op.outer) if op.outer is not None else 0
            for rank in self.ranks
            for op in rank.ops.forward(OpType.MATMUL)
            if _columns(op) == columns
        }
        return shards == {self._size("tp") * columns}

    def _vocabulary(self) -> Findings:
        """vocab and tied; not where tensor parallelism may have split the vocabulary."""
        vocab = agreed(rank.vocab for rank in self.ranks if rank.vocab and (self._is_whole or rank.layer)) or 0
        if self._is_whole and not any(_is_vocabulary(rank, vocab) for rank in self.ranks):
            return self._other_outputs(vocab)
        if not vocab or not self._size("tp") or (self._size("tp") > 1 and self._splits_loss()):
            return {}
        findings = {"model.vocab": Inferred(vocab, f"matmuls and loss of {vocab} columns")} | self._tied(vocab)
        if self._is_whole and self.microbatches and "model.tied" not in findings:
            findings["model.tied"] = Inferred(False, "gradients of the embedding are not recorded", True)
        return findings

    def _other_outputs(self, columns: int) -> Findings:
        """In place of a vocabulary: the rows of the largest lookup of tokens, the classes of the loss, or outputs."""
        rank = self.ranks[0]
        lookups = [op.shapes[:2] for op in rank.ops.forward(OpType.EMBEDDING) if len(op.shapes) > 1]
        rows = max((table[0] for table, indices in lookups if table and prod(indices) >= rank.tokens), default=0)
        outputs = next((part.weights[-1][1] for part in reversed(rank.parts) if part.weights), 0)
        sizes = {
            "rows of the largest embedding; no head is recognised": rows,
            "columns of the head or loss; no tokens are looked up": columns,
            "columns of the last matmul; no tokens are looked up": outputs,
        }
        why, size = next(((why, size) for why, size in sizes.items() if size), ("", 0))
        if not size or not rank.attentions or not self.microbatches:
            return {}
        return {"model.vocab": Inferred(size, why, True), "model.tied": Inferred(False, why, True)}

    def _splits_loss(self) -> bool:
        """Whether the loss may cover a part of the vocabulary: it is not PyTorch's own, or ranks exchange its sums."""
        return any(
            (rank.vocab and not rank.ops.of(OpType.LOSS))
            or any(op.forward and 1 < call.in_elements <= rank.tokens for op, call in rank.ops.collectives)
            for rank in self.ranks
        )

    def _tied(self, vocab: int) -> Findings:
        """Two matrices get two gradients; tied ones on two pipeline stages would have to be summed."""
        gradients = self.ranks[0].ops.of(OpType.GRADIENT)
        count = sum(bool(op.shapes) and len(op.shapes[0]) == 2 and op.shapes[0][0] == vocab for op in gradients)
        passes = self.ranks[0].passes or self.microbatches
        if self._size("pp") == 1 and self.microbatches and count in (passes, 2 * passes):
            tied = count == passes
            which = "one matrix gets" if tied else "two matrices get"
            return {"model.tied": Inferred(tied, f"{which} a gradient of {vocab} rows")}
        apart = self._size("pp") > 1 and not any(rank.has_embedding and rank.has_loss for rank in self._stages())
        if not apart or self._may_sum(vocab) or not gradients:
            return {}
        return {"model.tied": Inferred(False, f"first and last stage do not sum gradients of {vocab} rows")}

    def _may_sum(self, vocab: int) -> bool:
        """Whether some all-reduce is large enough for the gradient of an embedding, and is not one of activations."""
        least = vocab // max(1, self._size("tp")) * self.ranks[0].hidden
        activation = self.parallelism.activation
        return any(
            call.collective == "all_reduce"
            and not 0 < call.in_elements < least
            and (call.in_elements != activation or activation == least)
            for rank in self.ranks
            for _, call in rank.ops.collectives
        )

    # ------------------------------------------------------------------ the training step
    def _batch(self) -> Findings:
        """micro_batch and seq; rough where attentions differ, or where something else shows another batch."""
        batch, seq, tokens = agreed(
            (r.attention.batch, r.attention.seq, r.tokens) for r in self.ranks if r.attention is not None
        ) or (0, 0, 0)
        joint = batch * seq != tokens  # of tokens from several matmuls, such as those of text and of an image
        if not batch or self._size("cp") != 1 or (joint and (not self._is_whole or tokens % batch)):
            return {}
        why = f"attention of {batch} × {seq} tokens"
        shapes = [shape for rank in self.ranks for shape in rank.shapes]
        same = all(shape is not None and {shape.seq, shape.keys or seq} == {seq} for shape in shapes)
        scales = all(shape is not None and shape.batch % batch == 0 for shape in shapes)
        doubt = not all(_is_batch(rank, batch, seq) for rank in self.ranks)
        reasons = {
            ", and inputs of another batch": doubt, ", and matmuls of other rows": joint,
            ", and others of other lengths": not same,
        }  # fmt: skip
        several = "".join(reason for reason, holds in reasons.items() if holds)
        return {
            "train.seq": Inferred(seq, why + several, bool(several)),
            "train.micro_batch": Inferred(batch, why, doubt or not scales),
        }

    def _training(self) -> Mapping[str, Inferred | None]:
        """recompute, mode, optimizer, precision and compile."""
        optimizer = agreed(op.name.partition("#")[2].partition(".")[0] for op in self._ops(OpType.OPTIMIZER)) or ""
        dtype = agreed(rank.dtype for rank in self.ranks) or ""
        precision = known.name if (known := dtype_called(dtype)) is not None else ""
        is_lora = all(rank.has_adapters for rank in self.ranks)
        is_stated = precision in (_CPU_PRECISIONS if self._on_cpu else _PRECISIONS)
        scope = Inferred(_OPTIMIZERS.get(optimizer, ""), f"scope of {optimizer}.step")
        return {
            "train.recompute": agreed(_recomputation(rank) for rank in self.ranks),
            "train.mode": Inferred("lora", "low-rank matmuls beside weights without gradients") if is_lora else None,
            "train.optimizer": scope if scope.value else None,
            "train.precision": Inferred(precision, f"matmuls of {dtype}") if is_stated else None,
            "train.compile": self._compile(),
        }

    def _compile(self) -> Inferred | None:
        """Compiled regions are recorded by name; eager layers show operators and no such region."""
        if self._ops(OpType.COMPILED):
            is_compiled = all(_is_compiled(rank) for rank in self.ranks)
            return Inferred(True, "matmuls inside compiled regions") if is_compiled else None
        is_eager = all(rank.layer is not None or _is_eager(rank) for rank in self.ranks)
        return Inferred(False, "operators are called one by one") if is_eager else None


def _columns(op: TracedOp) -> int:
    """Columns of a matmul's second factor; 0 where they were not recorded."""
    right = op.factors[1] if len(op.factors) > 1 else ()
    return right[1] if len(right) == 2 else 0


def _is_vocabulary(rank: RankLayers, columns: int) -> bool:
    """Whether so many columns are a vocabulary: as many rows are looked up, or most tokens have a loss."""
    tables = {rows for rows, _ in matrices(rank.ops, OpType.EMBEDDING)}
    compiled = [op for op in rank.ops.forward(OpType.COMPILED) if "embedding" in op.name]
    tables |= {shape[0] for op in compiled for shape in op.shapes if len(shape) == 2}
    losses, least = matrices(rank.ops, OpType.LOSS), _LIMITS["language_model_loss"] * rank.tokens
    return columns > 0 and (columns in tables or any(rows >= least and width == columns for rows, width in losses))


def _is_batch(rank: RankLayers, batch: int, seq: int) -> bool:
    """False where tokens are looked up in another batch, or images come in a smaller one: attention has windows."""
    looked_up = {op.shapes[1] for op in rank.ops.forward(OpType.EMBEDDING) if len(op.shapes) > 1}
    other = any(len(shape) == 2 and prod(shape) == batch * seq and shape != (batch, seq) for shape in looked_up)
    images = [op.shapes[0][0] for op in rank.ops.ops if op.name == _CONVOLUTION and op.forward and any(op.shapes[:1])]
    return not other and not (images and images[0] < batch)


def _recomputation(rank: RankLayers) -> Inferred | None:
    """none, selective or full, from the part of the forward pass that runs again in the backward pass."""
    matmuls = [op for op in rank.ops.of(OpType.MATMUL, OpType.GROUPED_MATMUL) if not _is_inside_group(op)]
    forward, repeated = sum(op.forward for op in matmuls), _repeated_matmuls(rank, matmuls)
    backward = [op for op in rank.ops.of(*_OF_ATTENTION) if op.backward and (op.type in _FUSED or _is_tracked(op))]
    again = len(find_attentions(backward))
    if not rank.attentions or not rank.tokens or repeated < 0:
        return None
    if not again and not repeated:
        return Inferred("none", "nothing of the forward pass runs again")
    if again != rank.attentions:
        return None
    if not repeated:
        return Inferred("selective", "attentions run again, matmuls do not")
    full = repeated / forward >= _LIMITS["full_recompute"]
    return Inferred("full", "layers run again in the backward pass") if full else None


def _repeated_matmuls(rank: RankLayers, matmuls: Sequence[TracedOp]) -> int:
    """Matmuls of the forward pass that run again in the backward pass; less than 0 if that is unknown.

    Autograd numbers what it will need gradients of: repeated matmuls, and not those that are gradients themselves.
    Without numbers (in compiled regions), what is more than two gradients per matmul was repeated.
    """
    if any(_is_tracked(op) for op in matmuls if op.forward):
        return sum(op.backward and _is_tracked(op) for op in matmuls)
    sized = [op for op in matmuls if any(rank.tokens in shape for shape in op.shapes)]
    return sum(op.backward for op in sized) - 2 * sum(op.forward for op in sized)


def _is_tracked(op: TracedOp) -> bool:
    return op.sequence >= 0 or (op.outer is not None and op.outer.sequence >= 0)


def _is_inside_group(op: TracedOp) -> bool:
    return op.type == OpType.MATMUL and OpType.GROUPED_MATMUL in op.scopes


def _is_eager(rank: RankLayers) -> bool:
    """Whether residuals are added one by one: compiled code does that inside of larger kernels."""
    adds = sum(op.name in _ADDITIONS and op.forward for op in rank.ops.ops)
    return 0 < rank.attentions <= adds


def _is_compiled(rank: RankLayers) -> bool:
    """Whether most matmuls of the forward pass run inside compiled regions."""
    forward = rank.ops.forward(OpType.MATMUL)
    return bool(forward) and sum(OpType.COMPILED in op.scopes for op in forward) > len(forward) / 2
