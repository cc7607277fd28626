"""Inference: the setup of a traced run, as far as the trace tells it, every value with its evidence. Never a guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lumos.analysis.replay import Replay
from lumos.change.infer.inferred_value import Told
from lumos.change.infer.layers import Stack, read_stack
from lumos.change.infer.parallelism import Ways
from lumos.change.infer.recorded_shapes import What, read_ops
from lumos.graph.from_trace.cpu_device import is_cpu_run
from lumos.setup.gpus import find_gpu
from lumos.trace.trace import Header

Findings = dict[str, Told]

_MOST_RANKS = 16  # whose files are read again,
_MOST_STAGES = 64  # unless they are of one pipeline
_PRECISIONS = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}
_PRECISIONS_OF_CPU = {"float": "fp32"}  # which on a GPU may be TF32
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}
_RECOMPUTED = 0.7  # of a layer's products, from which on all of it is: the last of them may be spared


def infer(run: Replay) -> Findings:
    """What the trace tells of its setup: key to value and evidence."""
    headers = run.execution.trace.headers
    if not headers:
        return {}
    step = run.marks.names[int(np.argmin(np.abs(run.clean_steps.milliseconds - run.clean_ms)))]
    stacks: dict[int, Stack] = {}
    wanted = _spread(headers)
    while wanted and len(stacks) < _MOST_STAGES:
        stacks |= {h.rank: read_stack(read_ops(Path(h.path), h.rank, step)) for h in wanted}
        chain = Ways([stacks[rank] for rank in sorted(stacks)], 0).chain
        wanted = [h for h in headers if h.rank in chain and h.rank not in stacks]
    return _Reading(run, [stacks[rank] for rank in sorted(stacks)]).found()


def _spread(headers: Sequence[Header]) -> list[Header]:
    """Ranks spread evenly over the job."""
    places = np.unique(np.linspace(0, len(headers) - 1, min(_MOST_RANKS, len(headers))).round().astype(int))
    return [headers[place] for place in places]


@dataclass(frozen=True)
class _Reading:
    """Everything that is asked of the operators of the ranks that were read."""

    run: Replay
    stacks: Sequence[Stack]

    def found(self) -> Findings:
        parts = (
            self._cluster(), self.ways, self._passes(), self._sizes(), self._shards(), self._vocabulary(),
            self._batch(), self._recompute(), self._optimizer(), self._precision(), self._compile(),
        )  # fmt: skip
        return {key: told for part in parts for key, told in part.items()}

    # the machines

    @cached_property
    def world(self) -> int:
        """How many ranks the job had; 0 where that is not told."""
        stated = {h.world_size for h in self.run.execution.trace.headers if h.world_size > 0}
        if stated:
            return stated.pop() if len(stated) == 1 else 0
        trace = self.run.execution.trace
        alone = len(trace.headers) == 1 and not trace.is_communication.any() and not self.stacks[0].ops.messages
        return 1 if alone and self._updates else 0

    @property
    def _on_cpu(self) -> bool:
        return is_cpu_run(self.run.execution.trace)

    @property
    def _updates(self) -> bool:
        """The step has an optimizer in it: gradients that nobody else saw are one rank's own."""
        return any(op.what == What.OPTIMIZER for stack in self.stacks for op in stack.ops.ops)

    def _cluster(self) -> Findings:
        found: Findings = {}
        gpu = next((h.gpu for h in self.run.execution.trace.headers if h.gpu), "")
        known = find_gpu(gpu)
        if self._on_cpu:
            found["cluster.gpu"] = Told("cpu", "operators run on the host, and no GPU does anything")
        elif known is not None:
            found["cluster.gpu"] = Told(known.name, f"the trace is of {gpu}")
        if self.world:
            many = self.world > 1
            found["cluster.gpus"] = Told(self.world, "the job's ranks" if many else "an update without communication")
        return found

    @cached_property
    def ways(self) -> Findings:
        return Ways(self.stacks, self.world).told()

    def _way(self, name: str) -> int:
        """The size of a way, or 0 where it is not told."""
        told = self.ways.get(f"parallel.{name}")
        return int(told.value) if told is not None else 0

    # repetition

    @cached_property
    def passes(self) -> int:
        """Micro-batches of one recorded step; the ranks that tell must agree."""
        found = {stack.passes for stack in self.stacks if stack.passes}
        return found.pop() if len(found) == 1 else 0

    def _passes(self) -> Findings:
        found: Findings = {}
        if not self.passes or not any(stack.attentions for stack in self.stacks):
            return found
        if all(stack.ops.is_one_step for stack in self.stacks):
            found["train.microbatches"] = Told(self.passes, f"the end of the model is reached {self.passes} × a step")
        stages = self._stages()
        counts = [stack.attentions for stack in stages]
        if stages and all(count and count % self.passes == 0 for count in counts):
            why = f"{sum(counts)} attentions in {_several(self.passes, 'micro-batch')}"
            found["model.layers"] = Told(sum(counts) // self.passes, why)
        return found

    def _stages(self) -> list[Stack]:
        """One rank of every pipeline stage; none where the stages are not told, or ranks of one stage differ."""
        if self._way("pp") > 1:
            chain = Ways(self.stacks, self.world).chain
            return [stack for stack in self.stacks if stack.ops.rank in chain]
        alike = len({stack.attentions for stack in self.stacks}) == 1
        return [self.stacks[0]] if self._way("pp") == 1 and alike else []

    # sizes

    def _sizes(self) -> Findings:
        """What tensor parallelism does not cut."""
        layers = {stack.layer for stack in self.stacks}
        layer = layers.pop() if len(layers) == 1 else None
        found: Findings = {}
        if layer is not None:
            found["model.hidden"] = Told(layer.hidden, f"products of {layer.hidden} × {layer.ffn}")
            found["model.gated"] = Told(layer.gated, "products into the MLP: " + ("two" if layer.gated else "one"))
        heads = {stack.heads.dim for stack in self.stacks if stack.heads is not None}
        if len(heads) == 1:
            found["model.head_dim"] = Told(heads.pop(), "the last size of attention")
        return found

    def _shards(self) -> Findings:
        """What tensor parallelism cuts: the rank's own, times tp."""
        stack, tp = self.stacks[0], self._way("tp")
        both = {(s.layer, s.heads.heads if s.heads else 0, s.heads.dim if s.heads else 0) for s in self.stacks}
        if not tp or len(both) != 1 or stack.layer is None or stack.heads is None:
            return {}
        layer, heads, dim = stack.layer, stack.heads.heads, stack.heads.dim
        times = f" × {tp} ranks" if tp > 1 else ""
        found = {"model.ffn": Told(layer.ffn * tp, f"products of {layer.hidden} × {layer.ffn}{times}")}
        if layer.attended != heads * dim:
            return found  # not the attention that was thought
        found["model.heads"] = Told(heads * tp, f"attention of {heads} heads{times}")
        groups = _key_heads(layer.query, heads, dim)
        if groups and (tp == 1 or groups == heads or groups > 1):  # one group may be a copy on every rank
            found["model.kv_heads"] = Told(groups * tp, f"products of {layer.hidden} × {groups * dim} for keys{times}")
        return found

    def _vocabulary(self) -> Findings:
        """vocab and tied; a vocabulary that may be cut by tensor parallelism is not told."""
        sizes = {stack.vocab for stack in self.stacks if stack.vocab and stack.layer is not None}
        if len(sizes) != 1 or not self._way("tp") or (self._way("tp") > 1 and self._cut_loss()):
            return {}
        vocab = sizes.pop()
        return {"model.vocab": Told(vocab, f"products and loss of {vocab} columns")} | self._tied(vocab)

    def _cut_loss(self) -> bool:
        """Whether the loss may be of a part of the vocabulary: it is not PyTorch's own, or ranks exchange its sums."""
        for stack in self.stacks:
            summed = any(op.forward and 1 < m.inward <= stack.tokens for op, m in stack.ops.messages)
            if summed or (stack.vocab and not stack.ops.of(What.LOSS)):
                return True
        return False

    def _tied(self, vocab: int) -> Findings:
        """Two matrices get two gradients. Stages that hold one each would have to sum them."""
        grads = sum(bool(op.dims) and len(op.dims[0]) == 2 and op.dims[0][0] == vocab for op in self._gradients())
        if self._way("pp") != 1 or not self.passes or grads not in (self.passes, 2 * self.passes):
            return self._tied_stages(vocab)
        tied = grads == self.passes
        return {
            "model.tied": Told(tied, f"{'one matrix gets' if tied else 'two matrices get'} a gradient of {vocab} rows")
        }

    def _gradients(self) -> list[Any]:
        return self.stacks[0].ops.of(What.GRADIENT)

    def _tied_stages(self, vocab: int) -> Findings:
        apart = self._way("pp") > 1 and not any(stack.embeds and stack.loses for stack in self._stages())
        summed = any(m.collective == "all_reduce" for stack in self.stacks for _, m in stack.ops.messages)
        if not apart or summed or not self._gradients():
            return {}
        return {"model.tied": Told(False, f"first and last stage do not sum gradients of {vocab} rows")}

    # the step

    def _batch(self) -> Findings:
        found = {(s.heads.batch, s.heads.seq, s.tokens) for s in self.stacks if s.heads is not None}
        batch, seq, tokens = found.pop() if len(found) == 1 else (0, 0, 0)
        if not batch or batch * seq != tokens or self._way("cp") != 1:
            return {}
        why = f"attention of {batch} × {seq} tokens"
        return {"train.seq": Told(seq, why), "train.micro_batch": Told(batch, why)}

    def _recompute(self) -> Findings:
        """From what of the forward pass runs again in the backward pass."""
        kinds = {_recomputation(stack) for stack in self.stacks}
        kind, why = kinds.pop() if len(kinds) == 1 else ("", "")
        return {"train.recompute": Told(kind, why)} if kind else {}

    def _optimizer(self) -> Findings:
        ops = [op for stack in self.stacks for op in stack.ops.ops if op.what == What.OPTIMIZER]
        names = {op.name.partition("#")[2].partition(".")[0] for op in ops}
        name = names.pop() if len(names) == 1 else ""
        return {"train.optimizer": Told(_OPTIMIZERS[name], f"scope of {name}.step")} if name in _OPTIMIZERS else {}

    def _precision(self) -> Findings:
        types = {stack.dtype for stack in self.stacks}
        name = types.pop() if len(types) == 1 else ""
        known = _PRECISIONS | (_PRECISIONS_OF_CPU if self._on_cpu else {})
        return {"train.precision": Told(known[name], f"products of {name}")} if name in known else {}

    def _compile(self) -> Findings:
        """Compiled regions say so; eager layers show operators and none of them."""
        seen = sum(op.what == What.COMPILED for stack in self.stacks for op in stack.ops.ops)
        if not seen and all(stack.layer is not None for stack in self.stacks):
            return {"train.compile": Told(False, "operators are called one by one")}
        whole = seen and all(_is_compiled(stack) for stack in self.stacks)
        return {"train.compile": Told(True, "products inside compiled regions")} if whole else {}


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es'}"


def _key_heads(columns: tuple[int, ...], heads: int, dim: int) -> int:
    """Heads of keys on one rank, from the products before the attention; 0 where they do not fit."""
    if len(columns) == 1:
        twice, rest = divmod(columns[0] - heads * dim, dim)
        return 0 if rest or twice % 2 or twice < 2 else twice // 2
    query, key, value = columns
    return key // dim if query == heads * dim and key == value and key % dim == 0 else 0


def _recomputation(stack: Stack) -> tuple[str, str]:
    """("none", "selective" or "full", evidence) of one rank, or two empty words."""
    again = sum(op.backward for op in stack.ops.of(What.ATTENTION))
    products = stack.ops.of(What.PRODUCT)
    there, back = (sum(stack.tokens in _sizes_of(op) for op in part) for part in _halves(products))
    extra = back - 2 * there
    if not stack.attentions or not stack.tokens or extra < 0:
        return "", ""
    if not again and not extra:
        return "none", "nothing of the forward pass runs again"
    if again != stack.attentions:
        return "", ""
    share = extra / there
    if not extra:
        return "selective", "attentions run again, products do not"
    return ("full", "layers run again in the backward pass") if share > _RECOMPUTED else ("", "")


def _halves(ops: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return [op for op in ops if op.forward], [op for op in ops if op.backward]


def _sizes_of(op: Any) -> set[int]:
    return {size for dims in op.dims for size in dims}


def _is_compiled(stack: Stack) -> bool:
    """Products of the forward pass run inside compiled regions."""
    forward = [op for op in stack.ops.of(What.PRODUCT) if op.forward]
    return bool(forward) and sum(What.COMPILED in op.scopes for op in forward) > len(forward) / 2
