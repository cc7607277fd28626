"""`lumos cost`: how long do single operators take?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lumos.cli.options import AsJson, Model
from lumos.cli.terminal import deliver
from lumos.costs.operator_model import cost_model, read_cost_model
from lumos.errors import OptionError
from lumos.files import check_output, write_csv
from lumos.measure.operator_rows import operators_of, read_rows
from lumos.report.terminal.costs import cost_answer, show_costs


def cost_command(
    rows: Annotated[
        Path, typer.Argument(help="JSON: a list of operators, or an object with such a list as rows. - is stdin.")
    ],
    gpu: Annotated[str, typer.Option(help="The GPU's name, as in h200; by default that of --model.")] = "",
    model: Model = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write it: .json or .csv.")] = None,
) -> None:
    """How long do single operators take, isolated and from a cold cache?

    \b
    A row is {"op": NAME, its sizes, "dtype": bf16, fp16, fp32, tf32 or fp8}; bf16 by default. Names and sizes:
      gemm                                    m n k, and layout TN (forward), NN or NT (gradients of input, weight)
      linear_bwd                              m n k: both gradients of the linear layer whose forward pass is gemm
      bmm                                     b h s d: the scores of unfused attention
      batched_gemm batched_gemm_bwd           batch m n k: any product of `batch` pairs of matrices, and its gradients
      grouped_gemm                            e t n k, and layout: t tokens over e experts, and its gradients
      sdpa_fwd sdpa_bwd                       b h s d: causal flash attention
      rotary_fwd rotary_bwd                   b h s d
      softmax_fwd softmax_bwd                 b h s
      rms_norm layer_norm gelu silu           t h, and the same with _bwd
      norm_eager_fwd norm_eager_bwd           t h: RMS norm of several kernels
      mul add copy cast_f32 permute           t h
      cross_entropy cross_entropy_bwd         t v
      embedding embedding_bwd                 t v h
      adamw_fused                             n
      neox_...                                what GPT-NeoX runs for it, sizes as above; optimizers: layers width ranks
    """
    check_output(output, rows, (".json", ".csv"))
    if gpu.endswith(".npz") and model is None:
        gpu, model = "", Path(gpu)
    if not gpu and model is None:
        raise OptionError("--gpu is missing: give a name, as in --gpu h200, or a --model file")
    costs = cost_model(gpu) if model is None else read_cost_model(model, gpu)
    given = read_rows(rows)
    answer = cost_answer(costs, given, operators_of(given, str(rows)))
    deliver(answer, show_costs, as_json, output, {".csv": lambda to: write_csv(to, answer["rows"], ("us", "bound"))})
