"""Sizes: which dimension of which operand is tokens, a width, heads, experts or a shard, and what it becomes.

Every size of the traced setup has a value before and after the change. A dimension is matched by its value; where
several sizes have that value (a hidden size and a sequence of 2048), its place decides: rows of a matmul are tokens,
the first dimensions of an activation are batch and sequence, the last is a width, and weights have no tokens at all.
What matches nothing keeps its size, but for rows whose number depends on the data, such as the tokens of one expert:
they grow with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from lumos.program.layout import layout_of
from lumos.program.op import Op, Tensor
from lumos.setup.setup import Setup
from lumos.traced.measured_ops import is_weight_gradient

Shape = tuple[int, ...]
Values = dict[str, int]

_TOKENS = ("batch", "seq", "tokens", "routed", "seq/tp", "tokens/tp", "targets", "all targets", "batch·heads",
           "batch·kv heads", "batch·heads/tp", "batch·kv heads/tp")  # fmt: skip
_KEYS = {"heads/tp": "kv heads/tp", "heads": "kv heads", "attended/tp": "keys/tp", "attended": "keys",
         "batch·heads/tp": "batch·kv heads/tp"}  # fmt: skip
_MATMULS = ("mm", "addmm", "_scaled_mm", "linear")


class Sizes:
    """Rewrites shapes from one setup to another: `Sizes(before, after).rewritten(op)`.

    `weights` are the shapes of the trained parameters on this rank, as far as the trace shows them.
    """

    def __init__(self, before: Setup, after: Setup, weights: Iterable[Shape] = (), as_keys: bool = False) -> None:
        self.before, self.after, self._as_keys = before, after, as_keys
        old, new = _values(before), _values(after)
        if as_keys:
            new |= {name: new[key] for name, key in _KEYS.items()}
        self.pairs = {name: (old[name], new[name]) for name in old if old[name] > 0}
        self.changed = any(a != b for a, b in self.pairs.values()) or _shards(before) != _shards(after)
        self.weights = frozenset(weights)
        self._known: dict[Op, Op] = {}

    @cached_property
    def _named(self) -> dict[int, list[str]]:
        """Names of sizes by their value before the change, the likeliest first."""
        found: dict[int, list[str]] = {}
        for name, (value, _) in self.pairs.items():
            found.setdefault(value, []).append(name)
        return found

    @cached_property
    def keys(self) -> Sizes:
        """The same where what has the size of queries is keys or values.

        They differ where a model with as many heads of keys as of queries is to get fewer: the trace does not tell
        which is which.
        """
        model = self.before.model
        unclear = model.kv_heads == model.heads and self.after.model.kv_heads != self.after.model.heads
        return Sizes(self.before, self.after, self.weights, as_keys=True) if unclear and not self._as_keys else self

    @property
    def growth(self) -> float:
        """Tokens after the change over tokens before it, of one micro-batch."""
        before, after = self.pairs["tokens"]
        return after / before

    def rewritten(self, op: Op) -> Op:
        """The same call in the other setup."""
        if not self.changed:
            return op
        if op not in self._known:
            self._known[op] = self._rewritten(op)
        return self._known[op]

    def weight(self, shape: Shape, sharded: bool = False) -> Shape:
        """The shape of a parameter in the other setup; `sharded`: as the optimizer of this rank sees it."""
        found = self._stacked(shape) if len(shape) == 3 else tuple(self._as(size, self._is_width) for size in shape)
        if not sharded or not shape:
            return found
        before, after = _shards(self.before), _shards(self.after)
        whole = self._as(shape[0] * before, self._is_width, found[0] * before)
        return (max(1, -(-whole // after)), *found[1:])

    # ------------------------------------------------------------------ one operator
    def _rewritten(self, op: Op) -> Op:
        name = op.name.split(".")[1] if op.name.startswith("aten.") else op.name
        if op.phase == "optimizer":
            return self._with(op, lambda t: self.weight(t.shape, sharded=True))
        if op.name.startswith("attention.") and {len(t.shape) for t in op.inputs} == {4}:
            return self._attention(op)
        if name in _MATMULS and len(op.inputs) >= 2:
            return self._matmul(op)
        if name in ("bmm", "baddbmm"):
            return self._with(op, self._batched)
        if name == "_grouped_mm":
            return self._with(op, self._grouped)
        return self._with(op, self._activation)

    def _with(self, op: Op, shape_of: Callable[[Tensor], Shape]) -> Op:
        def change(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(_resized(t, shape_of(t)) for t in tensors)

        return op._replace(inputs=change(op.inputs), outputs=change(op.outputs))

    def _matmul(self, op: Op) -> Op:
        """(m, k) × (k, n), one of which counts tokens: rows, or what is summed over in the gradient of a weight."""
        *added, a, b = op.inputs
        if len(a.shape) != 2 or len(b.shape) != 2:
            return self._with(op, self._activation)
        m, k, n = a.shape[0], a.shape[1], b.shape[1]
        sizes = [m, k, n]
        place = int(is_weight_gradient(op))
        if not self._counts_tokens(sizes[place]):
            others = [i for i in range(3) if self._counts_tokens(sizes[i]) and not self._is_certain_width(sizes[i])]
            place = others[0] if others else place
        new = [self._as(size, self._is_width) for size in sizes]
        new[place] = self._rows(sizes[place])
        new = self._one_sharded(sizes, new, place)
        shapes = ((new[0], new[1]), (new[1], new[2]))
        inputs = (*(_resized(t, self._bias(t, new[2])) for t in added), _resized(a, shapes[0]), _resized(b, shapes[1]))
        outputs = tuple(_resized(t, (new[0], new[2])) if len(t.shape) == 2 else t for t in op.outputs)
        return op._replace(inputs=inputs, outputs=outputs)

    def _attention(self, op: Op) -> Op:
        """Queries, then keys and values: (batch, heads, sequence, size)."""
        queries = self if not self._as_keys else Sizes(self.before, self.after, self.weights)
        inputs = [_resized(t, queries._heads(t.shape, i > 0)) for i, t in enumerate(op.inputs)]
        return op._replace(inputs=tuple(inputs), outputs=(inputs[0],))

    def _heads(self, shape: Shape, is_keys: bool) -> Shape:
        batch, heads, seq, size = shape
        own = "kv heads/tp" if is_keys else "heads/tp"
        local = self._local_heads
        matches = heads == local[own][0]
        new = local[own][1] if matches else self._as(heads, lambda name: name == "heads/tp")
        between = self._as(seq, self._is_between)
        return self._batch(batch), new, between, self._as(size, lambda name: name == "head size")

    @cached_property
    def _local_heads(self) -> dict[str, tuple[int, int]]:
        """Heads of one rank before and after, one included."""
        found = {}
        for name in ("heads", "kv heads"):
            counts = []
            for setup in (self.before, self.after):
                count = setup.model.heads if name == "heads" else setup.model.kv_heads
                counts.append(max(1, count // setup.parallel.tp))
            found[f"{name}/tp"] = counts[0], counts[1]
        return found

    def _one_sharded(self, old: list[int], new: list[int], place: int) -> list[int]:
        """Of a square weight, tensor parallelism divides one side: which one does not matter for its cost."""
        hidden, attended = self.pairs["hidden"], self.pairs["attended/tp"]
        widths = [i for i in range(3) if i != place]
        square = all(old[i] == hidden[0] == attended[0] for i in widths)
        if square and attended[1] != hidden[1]:
            new[widths[1]] = attended[1]
        return new

    def _bias(self, tensor: Tensor, columns: int) -> Shape:
        return (*tensor.shape[:-1], columns)

    def _grouped(self, tensor: Tensor) -> Shape:
        """Experts × in × out, or the rows that were routed to them; in the gradient of weights, their columns."""
        if len(tensor.shape) == 3:
            return self._stacked(tensor.shape)
        routed = self.pairs.get("routed", (0, 0))[0]
        if routed and routed in tensor.shape:
            at = tensor.shape.index(routed)
            return tuple(
                self._rows(size) if i == at else self._as(size, self._is_width) for i, size in enumerate(tensor.shape)
            )
        return self._activation(tensor)

    def _stacked(self, shape: Shape) -> Shape:
        """Weights of experts, one behind the other."""
        first, *others = shape
        return (self._as(first, self._is_expert), *(self._as(size, self._is_width) for size in others))

    def _activation(self, tensor: Tensor) -> Shape:
        """Batch and sequence first, a width last, heads between; or a weight."""
        shape = tensor.shape
        if shape in self.weights:
            return self.weight(shape)
        if len(shape) == 0:
            return shape
        if len(shape) == 1:
            return (self._as(shape[0], self._is_tokens),)
        if len(shape) == 2:
            is_index = shape == (self.pairs["batch"][0], self.pairs["seq"][0])  # of tokens or positions
            return (self._rows(shape[0]), self._as(shape[1], self._is_between if is_index else self._is_width))
        first, *middle, last = shape
        shared = first == 1 and (middle[0] == 1 or (len(shape) == 3 and last == self.pairs.get("head size", (0, 0))[0]))
        scores = len(shape) > 3 and last == self.pairs["seq"][0] and last == middle[-1]
        inner = [self._as(size, self._is_between) for size in middle]
        if len(shape) == 4 and first != 1 and middle[0] == 1 and self._local_heads["kv heads/tp"][0] == 1:
            inner[0] = self._local_heads["kv heads/tp"][1]
        kind = self._is_width if len(shape) < 4 else self._is_head_size
        width = self._as(last, self._is_between if scores else kind)
        return (1 if shared else self._batch(first), *inner, width)

    def _batched(self, tensor: Tensor) -> Shape:
        """Of a batched matmul: a matmul for every head, of sequences and sizes of heads."""
        if not tensor.shape:
            return ()
        first, *others = tensor.shape
        inside = ("seq", "head size")
        return (self._batch(first), *(self._as(size, lambda name: name in inside) for size in others))

    # ------------------------------------------------------------------ one dimension
    def _as(self, size: int, wanted: Callable[[str], bool], otherwise: int | None = None) -> int:
        """The new value of a dimension: of the likeliest size of the wanted kind, or of one that is at least as likely
        a width, else as it was.
        """
        names = self._named.get(size, []) if size > 1 else []
        name = next((name for name in names if wanted(name)), None)
        if name is None:
            name = next((name for name in names if self._is_width(name)), None)
        if name is None:
            return size if otherwise is None else otherwise
        return max(1, self.pairs[name][1])

    def _rows(self, size: int) -> int:
        """Rows of an activation: tokens, or as many of them as the data sends here."""
        if size == 1:
            return self.pairs["batch"][1] if self.pairs["batch"][0] == 1 else 1
        names = self._named.get(size, [])
        if any(map(self._is_tokens, names)):
            return self._as(size, self._is_tokens)
        return self._as(size, self._is_width) if names else max(1, round(size * self.growth))

    def _batch(self, size: int) -> int:
        """The first dimension of an activation: the batch, or a multiple of it."""
        names = self._named.get(size, [])
        before, after = self.pairs["batch"]
        if size == before:
            return after
        if names or before == after or size == 1 or size % before:
            return self._as(size, self._is_tokens)
        return size // before * after

    def _counts_tokens(self, size: int) -> bool:
        return any(map(self._is_tokens, self._named.get(size, [])))

    def _is_certain_width(self, size: int) -> bool:
        return not self._counts_tokens(size)

    @staticmethod
    def _is_tokens(name: str) -> bool:
        return name in _TOKENS

    @staticmethod
    def _is_width(name: str) -> bool:
        return name not in _TOKENS

    @staticmethod
    def _is_expert(name: str) -> bool:
        return name in ("experts", "all experts")

    @staticmethod
    def _is_head_size(name: str) -> bool:
        return name in ("head size", "half a head")

    @staticmethod
    def _is_between(name: str) -> bool:
        return name in ("seq", "seq/tp", "heads/tp", "kv heads/tp", "heads", "kv heads", "targets")


def _shards(setup: Setup) -> int:
    """Into how many parts the weights are divided."""
    return layout_of(setup).shards if setup.parallel.zero >= 3 else 1


def _values(setup: Setup) -> Values:
    """Every size that a dimension may have, by name; 0 where a model has none. Of equal ones, the first counts."""
    model, tp = setup.model, setup.parallel.tp
    layout = layout_of(setup)
    batch, seq = layout.sequences, layout.seq
    dim, heads, kv = model.head_dim, model.heads, model.kv_heads
    rows = batch * seq
    local, local_kv = max(1, heads // tp), max(1, kv // tp)
    values = {
        "batch": batch, "tokens": rows, "seq": seq, "tokens/tp": rows // tp, "seq/tp": seq // tp,
        "routed": rows * model.top_k, "targets": seq - 1, "all targets": batch * (seq - 1),
        "batch·heads/tp": batch * local, "batch·kv heads/tp": batch * local_kv,
        "hidden": model.hidden, "ffn/tp": model.ffn // tp, "both ffn/tp": 2 * model.ffn // tp,
        "expert ffn": _inner(setup) // layout.expert_tp, "both expert ffn": 2 * _inner(setup) // layout.expert_tp,
        "attended/tp": local * dim, "keys/tp": local_kv * dim, "qkv/tp": (local + 2 * local_kv) * dim,
        "vocab/tp": layout.vocab, "vocab": model.vocab, "ffn": model.ffn, "both ffn": 2 * model.ffn,
        "attended": heads * dim, "keys": kv * dim, "qkv": (heads + 2 * kv) * dim,
        "head size": dim, "half a head": dim // 2, "heads/tp": local, "kv heads/tp": local_kv, "heads": heads,
        "kv heads": kv, "qkv heads/tp": local + 2 * local_kv, "experts": model.experts // setup.parallel.ep,
        "all experts": model.experts, "top k": model.top_k,
    }  # fmt: skip
    return {name: value if value > 1 or name in ("batch", "tokens", "seq") else 0 for name, value in values.items()}


def _inner(setup: Setup) -> int:
    return setup.model.expert_ffn if setup.model.experts else 0


def _resized(tensor: Tensor, shape: Shape) -> Tensor:
    """The same tensor in another shape, with the same order of dimensions and the same gaps between them."""
    if shape == tensor.shape:
        return tensor
    strides = [0] * len(shape)
    old = new = 1.0
    for i in sorted(range(len(shape)), key=lambda i: (tensor.strides[i], -i)):
        if tensor.strides[i] == 0:
            continue
        wide = tensor.strides[i] / old
        strides[i] = max(1, round(new * wide))
        old, new = float(tensor.strides[i] * tensor.shape[i]), float(strides[i] * shape[i])
    return tensor._replace(shape=shape, strides=tuple(strides))
