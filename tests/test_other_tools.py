"""Files of nanotron, NeMo, GPT-NeoX, DeepSpeed, axolotl and LLaMA-Factory; and what is refused by name."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos.errors import LumosError
from lumos.setup import Setup, read_setup, read_setup_with_notes
from lumos.setup.importers.megatron import script_sections
from lumos.setup.setup_files import SetupReading

NANOTRON = """
general: {project: debug, run: llama, seed: 42}
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  init_method: {std: 0.02}
  model_config:
    is_llama_config: true
    hidden_act: silu
    hidden_size: 2048
    intermediate_size: 8192
    num_attention_heads: 32
    num_hidden_layers: 16
    num_key_value_heads: 8
    rope_theta: 500000.0
    tie_word_embeddings: true
    vocab_size: 128257
    max_position_embeddings: 4096
    _attn_implementation: flash_attention_2
optimizer:
  zero_stage: 1
  clip_grad: 1.0
  accumulate_grad_in_fp32: true
  optimizer_factory: {name: adamW, adam_beta1: 0.9, torch_adam_is_fused: true}
  learning_rate_scheduler: {learning_rate: 3.0e-4}
parallelism:
  dp: 4
  tp: 2
  pp: 2
  pp_engine: afab
  tp_mode: REDUCE_SCATTER
  tp_linear_async_communication: true
  recompute_layer: true
  expert_parallel_size: 1
tokens: {sequence_length: 4096, micro_batch_size: 2, batch_accumulation_per_replica: 8, train_steps: 100}
data_stages: [{name: a, data: {seed: 1}}]
gadget: {size: 3}
"""

NEMO = """
defaults: [_self_]
run: {name: llama2_7b, time_limit: "0-01:30:00"}
trainer: {num_nodes: 16, devices: 8, accelerator: gpu, precision: bf16-mixed, max_steps: 100}
exp_manager: {name: megatron_llama, explicit_log_dir: "${training.run.results_dir}/results"}
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 2048
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 4
  encoder_seq_length: 4096
  max_position_embeddings: 4096
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  make_vocab_size_divisible_by: 128
  tokenizer: {library: sentencepiece, type: null, model: "${data_dir}/llama2_tokenizer.model"}
  activations_checkpoint_granularity: selective
  sequence_parallel: true
  fp8: true
  optim: {name: mcore_distributed_optim, lr: 1.0e-4, overlap_grad_sync: true}
  data: {data_impl: mmap, num_workers: 2}
"""

NEOX = """{
  # as GPT-NeoX writes it: YAML in braces, with comments and commas
  "pipe_parallel_size": 4, "model-parallel-size": 2,
  "num_layers": 44, "hidden_size": 6144, "num_attention_heads": 64, "seq_length": 2048,
  "max_position_embeddings": 2048, "norm": "layernorm", "pos_emb": "rotary", "rotary_pct": 0.25,
  "no_weight_tying": true, "gpt_j_residual": true,
  "vocab_file": "./20B_tokenizer.json", "tokenizer_type": "HFTokenizer",
  "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1260000000},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint_activations": true, "fp16": {"enabled": true, "loss_scale": 0},
  "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4,}},
}"""

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": "auto",
}  # fmt: skip

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3.1-8B
model_type: AutoModelForCausalLM
datasets: [{path: some/data, type: alpaca}]
sequence_len: 8_192
sample_packing: true
adapter: lora
gradient_accumulation_steps: 8
micro_batch_size: 2
optimizer: adamw_torch_fused
bf16: auto
gradient_checkpointing: true
deepspeed: deepspeed_configs/zero2.json
"""

FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
template: qwen3_nothink
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""


def read(folder: Path, text: str, name: str, *changes: str) -> SetupReading:
    path = folder / name
    path.write_text(text, "utf-8")
    return read_setup_with_notes(path, ["cluster.gpu=h100", *changes])


def refused(folder: Path, text: str, name: str, *changes: str) -> str:
    path = folder / name
    path.write_text(text, "utf-8")
    with pytest.raises(LumosError) as caught:
        read_setup(path, changes)
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())
    return str(caught.value)


def billions(setup: Setup) -> float:
    return setup.model.parameters(setup.train.seq) / 1e9


def test_nanotron(tmp_path: Path) -> None:
    reading = read(tmp_path, NANOTRON, "config.yaml")
    setup = reading.setup
    model, train, parallel = setup.model, setup.train, setup.parallel
    assert billions(setup) == pytest.approx(1.236, rel=0.001)
    assert (model.vocab, model.tied, model.gated, model.kv_heads) == (128258, True, True, 8)
    assert (train.seq, train.micro_batch, train.microbatches, train.global_batch) == (4096, 2, 8, 64)
    assert (train.precision, train.recompute, train.framework, train.optimizer) == ("bf16", "full", "nanotron", "adamw")
    assert (parallel.tp, parallel.pp, parallel.dp, parallel.zero, setup.cluster.gpus) == (2, 2, 4, 1, 16)
    assert (parallel.schedule, parallel.sequence_parallel, parallel.tp_overlap) == ("gpipe", True, True)
    said = [note.partition(": ")[2] for note in reading.notes]
    assert said == [
        "vocabulary of 128257 padded to 128258, a multiple of 2, as nanotron does",
        "not recognised and ignored: gadget.size",
    ]


def test_experts_of_nanotron(tmp_path: Path) -> None:
    experts = "moe_config: {num_experts: 8, top_k: 2, moe_intermediate_size: 1024, layers: [2, 3, 4, 5, 6, 7, 8, 9]}"
    text = NANOTRON.replace("is_llama_config: true", f"is_qwen2_config: true\n    {experts}").replace("dp: 4", "dp: 2")
    setup = read(tmp_path, text.replace("expert_parallel_size: 1", "expert_parallel_size: 4"), "moe.yaml").setup
    model = setup.model
    assert (model.experts, model.top_k, model.expert_ffn, model.dense_layers, model.ffn) == (8, 2, 1024, 8, 8192)
    assert (setup.parallel.ep, setup.parallel.dp, model.qkv_bias) == (4, 8, False)
    mamba = NANOTRON.replace("is_llama_config", "is_mamba_config")
    assert "is_mamba_config: nanotron models that can be described" in refused(tmp_path, mamba, "mamba.yaml")


def test_nemo(tmp_path: Path) -> None:
    reading = read(tmp_path, NEMO, "llama2_7b.yaml")
    setup = reading.setup
    model, train, parallel = setup.model, setup.train, setup.parallel
    assert billions(setup) == pytest.approx(6.74, rel=0.001)
    assert (model.gated, model.bias, model.tied, model.norm, model.positions) == (True, False, False, "rms", "rotary")
    assert (train.seq, train.global_batch, train.precision, train.recompute) == (4096, 2048, "fp8", "selective")
    assert (parallel.tp, parallel.pp, parallel.vpp, parallel.dp, parallel.zero) == (2, 4, 4, 16, 1)
    assert (parallel.sequence_parallel, parallel.dp_overlap, setup.cluster.gpus) == (True, True, 128)
    assert [note for note in reading.notes if "not recognised" in note] == []
    assert any("vocabulary of 32000: that of llama2-7b" in note for note in reading.notes)
    assert not any("vocabulary" in note for note in read(tmp_path, NEMO, "a.yaml", "model.vocab=32000").notes)


def test_nemo_says_how_tokens_reach_their_experts(tmp_path: Path) -> None:
    more = (
        "model:\n  num_moe_experts: 8\n  moe_router_topk: 2\n  expert_model_parallel_size: 8\n"
        "  moe_token_dispatcher_type: flex\n  overlap_moe_expert_parallel_comm: true\n"
    )
    parallel = read(tmp_path, NEMO.replace("model:\n", more, 1), "a.yaml").setup.parallel
    assert (parallel.ep, parallel.dispatcher, parallel.ep_overlap) == (8, "flex", True)


def test_references_in_a_nemo_file_are_worked_out(tmp_path: Path) -> None:
    text = NEMO.replace("ffn_hidden_size: 11008", "ffn_hidden_size: ${multiply:4, ${.hidden_size}}")
    text = text.replace("encoder_seq_length: 4096", "encoder_seq_length: ${training.model.max_position_embeddings}")
    setup = read(tmp_path, text, "a.yaml").setup
    assert (setup.model.ffn, setup.train.seq) == (16384, 4096)
    unset = refused(tmp_path, text.replace("num_layers: 32", "num_layers: ${oc.env:LAYERS}"), "b.yaml")
    assert "--num-layers ${oc.env:LAYERS}" in unset
    assert "--set model.layers=" in unset


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("mcore_gpt: true", "bert_binary_head: true", "BERT, an encoder"),
        ("mcore_gpt: true", "mm_cfg: {a: 1}", "a model of images and text"),
        ("mcore_gpt: true", "encoder: {num_layers: 2}", "an encoder with a decoder"),
        ("mcore_gpt: true", "hybrid_override_pattern: M-M*", "a hybrid of attention and Mamba"),
        ("  num_layers: 32\n", "", "without model.num_layers"),
        ("type: null, model", "type: BertWordPieceLowerCase, model", "BERT, an encoder"),
    ],
)
def test_a_nemo_file_of_another_model_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in NEMO
    assert words in refused(tmp_path, NEMO.replace(old, new), "a.yaml")


def test_gpt_neox(tmp_path: Path) -> None:
    reading = read(tmp_path, NEOX, "20B.yml", "cluster.gpus=96")
    setup = reading.setup
    model, train, parallel = setup.model, setup.train, setup.parallel
    assert billions(setup) == pytest.approx(20.55, rel=0.001)
    assert (model.vocab, model.tied, model.parallel_residual, model.positions) == (50432, False, True, "rotary")
    assert (train.micro_batch, train.microbatches, train.precision, train.recompute) == (4, 32, "fp16", "full")
    assert (parallel.tp, parallel.pp, parallel.dp, parallel.zero, train.framework) == (2, 4, 12, 1, "neox")
    assert reading.notes == ()
    assert (train.partition_activations, train.attention, parallel.dp_overlap) == (False, "", None)
    assert any("the number of GPUs is not given" in note for note in read(tmp_path, NEOX, "20B.yml").notes)


def test_what_gpt_neox_keeps_in_parts_and_attends_with_is_read(tmp_path: Path) -> None:
    """As in its files for Llama; overlap_comm holds without a pipeline, where DeepSpeed heeds it."""
    more = '"partition-activations": true, "attention_config": [[["flash"], 44]], "norm"'
    text = NEOX.replace('"norm"', more).replace('"pipe_parallel_size": 4', '"pipe_parallel_size": 0')
    setup = read(tmp_path, text, "llama.yml", "cluster.gpus=96").setup
    assert (setup.train.partition_activations, setup.train.attention) == (True, "flash")
    assert (setup.parallel.pp, setup.parallel.dp_overlap) == (1, True)


def test_a_gated_mlp_of_gpt_neox_is_narrower_than_stated(tmp_path: Path) -> None:
    gated = '"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256, "hidden_size": 4096,'
    text = NEOX.replace('"hidden_size": 6144,', gated)
    assert read(tmp_path, text, "a.yml").setup.model.ffn == 11008
    assert "layers of kind mamba" in refused(
        tmp_path, NEOX.replace('"norm"', '"attention_config": [[["mamba"], 44]], "norm"'), "b.yml"
    )


def test_the_mlp_of_llama_in_older_files_of_gpt_neox_is_gated(tmp_path: Path) -> None:
    text = NEOX.replace('"hidden_size": 6144,', '"hidden_size": 4096, "mlp_type": "llama", "activation": "silu",')
    model = read(tmp_path, text, "a.yml").setup.model
    assert (model.ffn, model.gated, model.activation, model.bias) == (11008, True, "silu", False)


def deepspeed(folder: Path, **zero: object) -> SetupReading:
    text = json.dumps(DEEPSPEED | {"zero_optimization": {"stage": 3, **zero}})
    return read(folder, text, "ds.json", "model.preset=llama3-8b", "train.seq=4096", "cluster.gpus=16")


def test_groups_of_mics_divide_everything_and_those_of_hpz_are_noted(tmp_path: Path) -> None:
    assert deepspeed(tmp_path, mics_shard_size=8).setup.parallel.shard == 8
    second = deepspeed(tmp_path, zero_hpz_partition_size=8)
    assert second.setup.parallel.shard == 0, "gradients and state stay divided over all ranks"
    assert any("zero_hpz_partition_size = 8" in note for note in second.notes)
    assert any("no second copy" in note for note in second.notes)


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("zero_quantized_weights", False, True), ("stage3_max_live_parameters", 1e9, 1e7),
        ("stage3_prefetch_bucket_size", "auto", 1e6), ("reduce_bucket_size", 5e8, 2e8),
    ],
)  # fmt: skip
def test_keys_of_zero_that_are_not_modelled_are_noted_unless_they_have_their_default(
    tmp_path: Path, key: str, usual: object, other: object
) -> None:
    assert not any(key in note for note in deepspeed(tmp_path, **{key: usual}).notes)
    assert sum(key in note and "not modelled" in note for note in deepspeed(tmp_path, **{key: other}).notes) == 1
    needs = {"stage": 2, key: other}
    assert any(key in note for note in deepspeed(tmp_path, **needs).notes) == (key == "reduce_bucket_size")


def test_a_deepspeed_file_asks_for_the_model(tmp_path: Path) -> None:
    text = json.dumps(DEEPSPEED)
    said = refused(tmp_path, text, "ds.json")
    assert "does not describe the model: --set model.preset=NAME or model.hf=CONFIG.JSON, and train.seq" in said
    reading = read(tmp_path, text, "ds.json", "model.preset=llama3-8b", "train.seq=4096", "cluster.gpus=16")
    train, parallel = reading.setup.train, reading.setup.parallel
    assert (train.micro_batch, train.microbatches, train.precision, parallel.zero, parallel.dp) == (4, 2, "bf16", 3, 16)
    assert train.framework == "deepspeed"
    assert (train.offload_optimizer, train.offload_overlap, train.offload_weights) == (1.0, True, False)
    assert any("on the host is assumed" in note for note in reading.notes)


MOE = """
deepspeed --num_nodes 8 --num_gpus 8 pretrain_gpt.py --deepspeed --fp16 --num-layers 24 --hidden-size 1024 \\
  --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --vocab-size 50257 \\
  --num-experts 128 --moe-expert-parallel-size 64
"""


def test_experts_of_megatron_deepspeed(tmp_path: Path) -> None:
    """Published as 350M+MoE-128, of 13 B parameters: every second layer has experts, and a token goes to one."""
    setup = read(tmp_path, MOE, "run.sh", "cluster.gpus=64").setup
    assert billions(setup) == pytest.approx(13.0, rel=0.02)
    assert (setup.model.top_k, setup.model.dense_layers, setup.parallel.ep) == (1, 12, 64)
    residual = read(
        tmp_path, MOE.replace("--num-experts", "--mlp-type residual --num-experts"), "r.sh", "cluster.gpus=64"
    )
    assert residual.setup.model.shared_experts == 1
    dense = MOE.replace("--num-experts 128 --moe-expert-parallel-size 64", "--num-experts 1")
    assert read(tmp_path, dense, "d.sh", "cluster.gpus=64").setup.model.experts == 0
    pyramid = MOE.replace("--num-experts 128", "--num-experts 32 32 64")
    said = refused(tmp_path, pyramid, "p.sh", "cluster.gpus=64")
    assert "--num-experts 32 32 64: layers with different numbers of experts cannot be described" in said


def test_a_trace_in_place_of_a_setup_is_told_where_it_belongs(tmp_path: Path) -> None:
    assert "a trace, not a description: give it with --from" in refused(tmp_path, '{"traceEvents": []}', "trace.json")
    (tmp_path / "rank0.json.gz").write_bytes(b"\x1f\x8b\x08\x00\xff")
    for path, words in ((tmp_path / "rank0.json.gz", "not a text file"), (tmp_path, "is a folder: name a file in it")):
        with pytest.raises(LumosError, match=rf"{words}.*with --from"):
            read_setup(path)


def test_axolotl_and_llama_factory(tmp_path: Path) -> None:
    setup = read(tmp_path, AXOLOTL, "axolotl.yml", "cluster.gpus=8").setup
    assert (setup.model.name, setup.train.mode, setup.train.seq) == ("llama3-8b", "lora", 8192)
    assert (setup.train.micro_batch, setup.train.microbatches, setup.train.recompute) == (2, 8, "full")
    assert (setup.parallel.zero, setup.train.optimizer, setup.parallel.dp) == (2, "adamw", 8)
    assert setup.train.framework == "deepspeed"
    sharded = AXOLOTL.replace("deepspeed: deepspeed_configs/zero2.json", "fsdp_version: 2")
    setup = read(tmp_path, sharded, "fsdp.yml", "cluster.gpus=8").setup
    assert (setup.parallel.zero, setup.parallel.no_sync, setup.train.framework) == (3, True, "pytorch")
    (tmp_path / "ds_z3_config.json").write_text(json.dumps(DEEPSPEED))
    reading = read(tmp_path, FACTORY, "factory.yaml")
    setup = reading.setup
    assert (setup.model.name, setup.train.mode, setup.train.seq, setup.parallel.zero) == ("qwen3-4b", "sft", 2048, 3)
    assert setup.train.recompute == "full"  # which LLaMA-Factory does unless told otherwise
    assert any("the number of GPUs is not given" in note for note in reading.notes)
    other = FACTORY.replace("Qwen/Qwen3-4B-Instruct-2507", "some/model")
    assert '"some/model" is not known: --set model.hf=PATH' in refused(tmp_path, other, "b.yaml")
    config = tmp_path / "config.json"
    llama = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}
    config.write_text(json.dumps(llama | {"num_attention_heads": 8, "vocab_size": 1000}))
    assert read(tmp_path, other, "b.yaml", f"model.hf={config}").setup.model.layers == 4


@pytest.mark.parametrize("line", ["rl: dpo", "rl: grpo", "reward_model: true", "diffusion: {noise_schedule: cosine}"])
def test_training_by_preferences_is_not_predicted_as_supervised(tmp_path: Path, line: str) -> None:
    """A pair of sequences, a reference model or generation make the step several times as long."""
    text = f"{AXOLOTL}\n{line}\n"
    assert "is not modelled: --set train.mode=lora for the step of supervised training" in refused(
        tmp_path, text, "a.yml"
    )
    assert read(tmp_path, text, "a.yml", "train.mode=lora").setup.train.mode == "lora"
    assert 'stage = "dpo" is not' in refused(tmp_path, FACTORY.replace("stage: sft", "stage: dpo"), "b.yaml")


@pytest.mark.parametrize("line", ["fsdp_config: {offload_params: true}", "fsdp: full_shard offload auto_wrap"])
def test_fsdp_on_the_host_is_read_from_finetuning_files(line: str, tmp_path: Path) -> None:
    plain = "\n".join(text for text in AXOLOTL.splitlines() if not text.startswith("deepspeed"))
    setup = read(tmp_path, f"{plain}\n{line}\n", "a.yml", "cluster.gpus=8").setup
    assert (setup.parallel.zero, setup.train.offload_weights, setup.train.offload_optimizer) == (3, True, 1.0)


def test_a_deepspeed_file_that_is_not_there_is_known_by_its_name(tmp_path: Path) -> None:
    text = FACTORY.replace("ds_z3_config", "ds_z3_offload_config")
    reading = read(tmp_path, text, "factory.yaml", "cluster.gpus=8")
    assert (reading.setup.parallel.zero, reading.setup.train.offload_weights) == (3, True)
    assert any("ZeRO 3 with offloading by its name" in note for note in reading.notes)


def test_finetuning_files_say_what_is_not_modelled(tmp_path: Path) -> None:
    text = AXOLOTL + "\nlisa_n_layers: 4\nqat: false\n"
    notes = read(tmp_path, text.replace("adamw_torch_fused", "adamw_bnb_8bit"), "a.yml").notes
    assert any("not modelled and ignored: lisa_n_layers" in note and "qat" not in note for note in notes)
    assert any('optimizer = "adamw_bnb_8bit" is not known: assuming adamw' in note for note in notes)


@pytest.mark.parametrize(
    ("stated", "precision"), [("adapter: qlora", "nf4"), ("adapter: lora\nload_in_8bit: true", "int8"), ("", "")]
)
def test_quantised_weights_of_adapters_are_read(tmp_path: Path, stated: str, precision: str) -> None:
    text = "\n".join(line for line in AXOLOTL.splitlines() if not line.startswith(("adapter", "load_in")))
    setup = read(tmp_path, f"{text}\n{stated}\n", "a.yml", "cluster.gpus=8").setup
    assert setup.train.weight_precision == precision


def test_sizes_of_llama_factory_on_megatron_and_fp8(tmp_path: Path) -> None:
    more = "\ntensor_model_parallel_size: 4\npipeline_model_parallel_size: 2\nfp8: true\n"
    (tmp_path / "ds_z3_config.json").write_text(json.dumps(DEEPSPEED))
    setup = read(tmp_path, FACTORY + more, "factory.yaml", "parallel.zero=1").setup
    assert (setup.parallel.tp, setup.parallel.pp, setup.train.precision) == (4, 2, "fp8")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "model: {_component_: torchtune.models.llama3.llama3_8b}\nbatch_size: 2\n", "torchtune"),
        ("a.yaml", "model: {_target_: nemo.collections.llm.Llama3Config8B}\ntrainer: {devices: 8}\n", "NeMo 2"),
        ("a.yaml", "model: {d_model: 4096}\nmax_sequence_length: 2048\ndevice_train_microbatch_size: 2\n", "OLMo"),
        (
            "a.yaml",
            "modules: {pre_trainer: {framework: megatron, config: a.yaml, model: b.yaml, overrides: {seq_length: 8192, "
            "micro_batch_size: 2, tensor_model_parallel_size: 1}}}\n",
            "Primus",
        ),
        ("a.yaml", "max_seq_len: 2048\nmodel: {name: mpt_causal_lm, d_model: 768}\n", "llm-foundry"),
        (
            "a.yaml",
            "variables: {max_seq_len: 2048}\nmodel: {name: mpt_causal_lm}\ndevice_train_microbatch_size: 4\n",
            "llm-foundry",
        ),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n", "accelerate"),
        ("a.py", "from torchtitan.config import TrainingConfig\ndef llama3_8b(): return 1\n", "Python is not read"),
        (
            "a.sh",
            "accelerate launch run_clm.py --model_name_or_path gpt2 --config_file fsdp.yaml",
            "it starts run_clm.py",
        ),
        ("a.yaml", "hidden_size: 64\nnum_layers: 2\nmicro_batch_size: 1\nglobal_batch_size: 2\n", "none of them"),
    ],
)
def test_files_that_are_not_read_are_refused_by_name(tmp_path: Path, name: str, text: str, words: str) -> None:
    assert words in refused(tmp_path, text, name, "train.seq=64")


REGISTRY = """
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from . import model_registry

def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096, steps=10),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, context_parallel_degree=how_many()),
        activation_checkpoint=FullAC.Config(),
    )

def llama3_8b_float8() -> Trainer.Config:
    config = llama3_8b()
    config.compile = CompileConfig(enable=True)
    config.parallelism.tensor_parallel_degree = 4
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(enable=True)])
    return config

def forever() -> Trainer.Config:
    return forever()
"""


def test_a_torchtitan_configuration_in_python_is_read_where_it_is_literal(tmp_path: Path) -> None:
    (tmp_path / "llama3").mkdir()
    registry = tmp_path / "llama3" / "config_registry.py"
    registry.write_text(REGISTRY)
    command = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b"
    reading = read(tmp_path, command, "run.sh")
    setup = reading.setup
    assert (setup.model.name, setup.train.seq, setup.train.micro_batch) == ("llama3-8b", 4096, 2)
    assert (setup.parallel.tp, setup.parallel.dp, setup.train.recompute) == (2, 4, "full")
    assert any("so taken as the defaults: parallelism.context_parallel_degree" in note for note in reading.notes)
    setup = read(tmp_path, f"{command}_float8 --training.max_context_length 1024", "run.sh").setup
    assert (setup.train.precision, setup.train.compile, setup.parallel.tp) == ("fp8", True, 4)
    assert (setup.train.seq, setup.train.micro_batch) == (1024, 8)
    assert "did you mean llama3_8b?" in refused(tmp_path, command.replace("llama3_8b", "llama3_9b"), "a.sh")
    assert "does not return a configuration" in refused(tmp_path, command.replace("llama3_8b", "forever"), "a.sh")
    with pytest.raises(LumosError, match=r"it has 3 configurations.*--module llama3 --config llama3_8b"):
        read_setup(registry)
    registry.write_text(REGISTRY.replace("how_many()", "+".join("1" * 5000)))
    assert "llama3_8b" in refused(tmp_path, command, "a.sh")
    registry.write_text(REGISTRY[: REGISTRY.index("def llama3_8b_float8")])
    assert read_setup(registry, ["cluster.gpus=2"]).model.name == "llama3-8b"


GPT = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128 --micro-batch-size 1 "


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"torchrun pretrain_bert.py {GPT}", "pretrain_bert.py trains BERT"),
        (f"torchrun --nproc-per-node 8 ./pretrain_t5.py {GPT}", "pretrain_t5.py trains T5"),
        (f"python $HOME/megatron/pretrain_mamba.py {GPT}", "trains a Mamba model"),
        (f"python tools/run_text_generation_server.py {GPT}", "generates text"),
        (f"torchrun pretrain_gpt.py {GPT} --is-hybrid-model", "is a hybrid of attention and Mamba"),
        (f"torchrun pretrain_gpt.py {GPT} --hybrid-layer-pattern M-M*", "--hybrid-layer-pattern M-M* is a hybrid"),
        (f"torchrun train.py {GPT} --spec megatron.core.models.mamba.x mamba_stack", "is a mamba model"),
        (f"torchrun pretrain_gpt.py {GPT} --vision-model-type clip", "a model of images and text"),
        (f"torchrun pretrain_gpt.py {GPT} --heterogeneous-layers-config-path x.json", "a model whose layers differ"),
        (f"torchrun pretrain_gpt.py {GPT} --tokenizer-type BertWordPieceCase", "a tokenizer of BERT"),
    ],
)
def test_megatron_scripts_of_other_models_are_refused_by_name(tmp_path: Path, script: str, words: str) -> None:
    said = refused(tmp_path, script, "train.sh")
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "programs",
    ["python preprocess_data.py\ntorchrun pretrain_gpt.py", "torchrun predict_gravity.py", "torchrun train.py"],
)
def test_a_script_that_trains_a_gpt_beside_other_work_is_read(tmp_path: Path, programs: str) -> None:
    assert read(tmp_path, f"{programs} {GPT}", "train.sh").setup.model.layers == 4


def test_a_variable_that_a_script_does_not_assign_is_named(tmp_path: Path) -> None:
    script = GPT.replace("--num-layers 4", "--num-layers ${LAYERS}").replace("--seq-length 64", "--seq-length $1")
    lines = refused(tmp_path, f"torchrun pretrain_gpt.py {script} --normalization $NORM", "train.sh").splitlines()
    ends = [line.partition(": ")[2] for line in lines]
    assert ends == [
        "--num-layers ${LAYERS}: the script does not say what ${LAYERS} is: --set model.layers=VALUE, or assign LAYERS "
        "in the script",
        "--seq-length $1: the script does not say what $1 is: --set train.seq=VALUE",
        "--normalization $NORM: the script does not say what $NORM is: --set model.norm=VALUE, or assign NORM in the "
        "script",
    ]
    changes = ("model.layers=2", "train.seq=64", "model.norm=rms")
    assert read(tmp_path, f"torchrun pretrain_gpt.py {script}", "train.sh", *changes).setup.model.layers == 2


def test_gpt_oss_120b_as_megatron_has_it(tmp_path: Path) -> None:
    script = """torchrun pretrain_gpt.py --num-layers 36 --hidden-size 2880 --ffn-hidden-size 2880 --quick-geglu --bf16
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 --num-experts 128
    --moe-ffn-hidden-size 2880 --moe-router-topk 4 --normalization RMSNorm --padded-vocab-size 201088
    --untie-embeddings-and-output-weights --seq-length 4096 --position-embedding-type rope --window-size 127,0
    --glu-linear-offset 1.0 --softmax-type learnable --activation-func-clamp-value 7.0 --window-attn-skip-freq 2"""
    reading = read(tmp_path, script, "gpt-oss-120b.sh", "cluster.gpus=8")
    assert billions(reading.setup) == pytest.approx(116.83, rel=0.001)
    assert (reading.setup.model.window, reading.setup.model.window_pattern) == (128, 2)
    assert reading.notes == ()
    odd = script.replace("skip-freq 2", "skip-freq ([0]*6+[1]*30)")
    (note,) = read(tmp_path, odd, "gpt-oss-120b.sh", "cluster.gpus=8").notes
    assert '--window-size "127,0" with --window-attn-skip-freq' in note
    assert "is not modelled: assuming full attention" in note
    assert read(tmp_path, odd, "gpt-oss-120b.sh", "cluster.gpus=8", "model.window=128").notes == ()


def test_notes_vanish_when_set_answers_them(tmp_path: Path) -> None:
    script = f"torchrun pretrain_gpt.py {GPT} --bf16"
    assert any("number of GPUs is not given" in note for note in read(tmp_path, script, "a.sh").notes)
    for change in ("cluster.gpus=4", "parallel.dp=4"):
        assert not any("number of GPUs" in note for note in read(tmp_path, script, "a.sh", change).notes)
    half = script.replace("--bf16", "")
    assert any("fp32, as Megatron does" in note for note in read(tmp_path, half, "a.sh").notes)
    assert not any("fp32" in note for note in read(tmp_path, half, "a.sh", "train.precision=bf16").notes)
    odd = f"{script} --window-size 8,8 --vocab-size 127 --normalization Odd"
    assert len(read(tmp_path, odd, "a.sh", "cluster.gpus=1").notes) == 3
    assert read(tmp_path, odd, "a.sh", "cluster.gpus=1", "model.preset=llama3-8b").notes == ()


def test_expert_parallelism_that_does_not_fit_names_the_gpus_it_needs(tmp_path: Path) -> None:
    script = f"torchrun --nproc-per-node 2 pretrain_gpt.py {GPT} --num-experts 8 --expert-model-parallel-size 8"
    said = refused(tmp_path, script, "a.sh")
    assert (
        "parallel.ep = 8 does not divide parallel.dp * cp * tp = 2: set cluster.gpus to 8 or a multiple, or use" in said
    )
    assert read(tmp_path, script, "a.sh", "cluster.gpus=8").setup.parallel.ep == 8


def test_a_pattern_of_experts_that_is_no_pattern_is_a_mistake() -> None:
    for pattern in ("([0]*3+[1]*58)", "[1]*9**9", "__import__('os')", "[0,1", "0"):
        reading = script_sections(f"--num-layers 4 --num-experts 8 --moe-layer-freq {pattern}", "a.sh")
        assert [mistake.place for mistake in reading.mistakes] == ["model.dense_layers"], pattern


SEEDS = {"a.yaml": [NANOTRON, NEMO, AXOLOTL, FACTORY], "a.yml": [NEOX], "a.json": [json.dumps(DEEPSPEED)]}


@given(st.sampled_from([(name, text) for name, texts in SEEDS.items() for text in texts]), st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_is_read_or_refused(seed: tuple[str, str], data: st.DataObject) -> None:
    name, text = seed
    for _ in range(data.draw(st.integers(1, 3))):
        at, gone = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 30))
        words = ["", "0", "-1", "nan", '"', "${", "{", "[1, 2]", "\n", "9" * 40, "null", "true", "é", "1e999"]
        text = text[:at] + data.draw(st.sampled_from(words)) + text[at + gone :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, "utf-8")
        said = ""
        try:
            read_setup(path, ["train.seq=64"])
        except LumosError as error:
            said = str(error)
        assert all(len(line) < 1000 for line in said.splitlines())
