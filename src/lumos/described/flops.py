"""Model FLOPs: the operations that a step has to do, for MFU; with what is recomputed, for HFU.

Matmuls count two operations for each weight that a token meets, three times (forward, and two gradients); attention
counts the causal half of the scores. MFU is this over time and the dense peak in the precision of the matmuls.
Megatron's own formula counts the whole square of the scores, and so gives a few percent more on long sequences.
"""

from __future__ import annotations

from lumos.described.layer import TransformerLayer
from lumos.program.layout import layout_of
from lumos.program.op import Ops
from lumos.program.operators import Operator
from lumos.program.sharding import chunks_of, recomputed_layers
from lumos.setup.frameworks import framework_named
from lumos.setup.setup import Setup


def forward_flops_per_token(setup: Setup) -> float:
    """Of all layers and the output matrix, for every token that is predicted."""
    return _matmul_flops(setup) + (setup.model.layers + setup.model.mtp_layers) * _scores_flops(setup)


def _matmul_flops(setup: Setup) -> float:
    """Of all linear layers, for one token."""
    m = setup.model
    return 2.0 * (m.active_parameters() - m.embedding_parameters() + (1 + m.mtp_layers) * m.vocab * m.hidden)


def _scores_flops(setup: Setup) -> float:
    """Of an average layer's attention, for one token: scores and values, the causal half, inside of windows."""
    m, seq = setup.model, setup.train.seq
    query = m.qk_nope_head_dim + m.qk_rope_head_dim if m.latent else m.head_dim
    value = m.v_head_dim if m.latent else m.head_dim
    return float(seq * (1 - m.hidden_scores(seq)) * m.heads * (query + value))


def model_flops(setup: Setup) -> float:
    """Of one step over all GPUs. Adapters train few weights: their step has no weight gradients to speak of."""
    frozen = _matmul_flops(setup) if setup.train.mode == "lora" else 0.0
    return (3.0 * forward_flops_per_token(setup) - frozen) * setup.tokens


def hardware_flops(setup: Setup) -> float:
    """What is computed in fact: recomputed layers, or parts of them, count again."""
    train, m = setup.train, setup.model
    if train.recompute == "none":
        return model_flops(setup)
    if train.recompute == "selective" and train.modules == ("core_attn",):
        return model_flops(setup) + (m.layers + m.mtp_layers) * _scores_flops(setup) * setup.tokens
    layers = forward_flops_per_token(setup) - 2.0 * (1 + m.mtp_layers) * m.vocab * m.hidden
    return model_flops(setup) + _recomputed_share(setup) * layers * setup.tokens


def _recomputed_share(setup: Setup) -> float:
    """Of the operations of all layers, those that are done again."""
    framework = framework_named(setup.train.framework, setup.train.precision)
    layout = layout_of(setup)
    done = again = 0.0
    for sparse in (False, True):
        chunks = [chunk for row in chunks_of(setup, framework.balances) for chunk in row]
        count = sum(chunk.sparse if sparse else chunk.dense for chunk in chunks)
        if count:
            layer = TransformerLayer(layout, sparse)
            done += count * _matrix_flops(layer.forward())
            again += sum(recomputed_layers(setup.train, c)[sparse] for c in chunks) * _matrix_flops(layer.recomputed())
    return again / done


def _matrix_flops(block: Ops) -> float:
    return sum(op.work.flops for op in block if isinstance(op.work, Operator) and op.work.is_matrix)


def utilisation(flops: float, setup: Setup, seconds: float) -> float:
    """FLOPs over what the GPUs could have done in that time."""
    gpu = setup.cluster.accelerator
    return flops / (seconds * setup.cluster.gpus * gpu.peak(setup.train.precision) * 1e12)
