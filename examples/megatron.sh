#!/bin/bash
# A run as a script for Megatron-LM describes it. Lumos reads it as text and never runs it.
#SBATCH --nodes=4
#SBATCH --gres=gpu:h100:8
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-4}
TP=${TP:-4}
PP=${PP:-2}
RECOMPUTE=${RECOMPUTE:-0}

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --attention-dropout 0
    --hidden-dropout 0
    --vocab-size 128256
)
RUN_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --seq-length 8192
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
    --lr 3e-4
)
if [ "$RECOMPUTE" -eq 1 ]; then
    RUN_ARGS+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
fi

torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes "$NNODES" pretrain_gpt.py "${MODEL_ARGS[@]}" "${RUN_ARGS[@]}"
