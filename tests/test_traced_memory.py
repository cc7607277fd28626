"""Peak memory of a changed run follows from the tensors of the trace: who makes, keeps and frees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lumos.memory.memory import memory_of
from lumos.memory.stage_walk import workspaces_of
from lumos.read.job import read_job
from lumos.read.op_columns import RankOps, rank_ops
from lumos.setup.setup import Setup
from lumos.traced.tensor_lifetimes import Tape, tape_of
from lumos.traced.traced_memory import traced_memory

T, H, F, V = 2048, 128, 512, 1000  # tokens, hidden, ffn, vocabulary
HEADS, DIM, LAYERS = 4, 32, 4
E = 2  # bytes of bf16
SUMS = [1, HEADS, T]  # of attention's exponentials: logarithms in fp32
Shapes = list[list[int]]


class Recording:
    """Writes a trace: calls of the forward pass, nodes of the backward pass, and the update."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.sequence = 10.0, 0

    def event(self, name: str, start: float, end: float, shapes: Shapes, thread: int = 1, **more: Any) -> None:
        types = ["float" if shape == SUMS else "c10::BFloat16" for shape in shapes]
        args = {"Input Dims": shapes, "Input type": types} | more
        category = "user_annotation" if name.startswith(("ProfilerStep", "Optimizer")) else "cpu_op"
        what = {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start}
        self.events.append(what | {"pid": 1, "args": args})

    def call(self, name: str, *shapes: list[int], **more: Any) -> int:
        """A call of the forward pass; its sequence number."""
        self.sequence += 1
        self.event(f"aten::{name}", self.now, self.now + 1, list(shapes), **{"Sequence number": self.sequence} | more)
        self.now += 2
        return self.sequence

    def node(self, name: str, sequence: int, *calls: tuple[Any, ...], recomputes: bool = False) -> None:
        """A node of the backward pass with the calls inside it."""
        begin, self.now = self.now, self.now + 2
        for number, (inside, *shapes) in enumerate(calls):
            own = {"Sequence number": 10_000 + number} if recomputes and "backward" not in inside else {}
            self.event(f"aten::{inside}", self.now, self.now + 1, shapes, thread=2, **own)
            self.now += 2
        for title, margin in ((f"autograd::engine::evaluate_function: {name}", 0), (name, 1)):
            self.event(title, begin + margin, self.now - margin, [], 2, **{"Sequence number": sequence})
        self.now += 1

    def accumulate(self, *shape: int) -> None:
        name = "torch::autograd::AccumulateGrad"
        self.event(f"autograd::engine::evaluate_function: {name}", self.now, self.now + 3, [], 2)
        self.event(name, self.now + 1, self.now + 2, [list(shape)], 2)
        self.now += 4

    def ops(self, folder: Path, memory: int = 0) -> RankOps:
        """As read from the file."""
        self.event("Optimizer.step#AdamW.step", self.now, self.now + 4, [])
        self.event("aten::_fused_adamw_", self.now + 1, self.now + 2, [])
        self.event("ProfilerStep#1", 0, self.now + 10, [])
        if memory:
            args = {"Total Allocated": memory, "Device Type": 1}
            self.events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 20.0, "args": args})
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return rank_ops(read_job(path), 0, "ProfilerStep#1")


def matmul(trace: Recording, rows: int, inner: int, columns: int) -> tuple[int, int, int, int]:
    return trace.call("mm", [rows, inner], [inner, columns]), rows, inner, columns


def matmul_backward(trace: Recording, call: tuple[int, int, int, int]) -> None:
    sequence, rows, inner, columns = call
    weight = ("mm", [columns, rows], [rows, inner])
    trace.node("MmBackward0", sequence, weight, ("mm", [rows, columns], [columns, inner]))
    trace.accumulate(columns, inner)


def model(layers: int = LAYERS, recomputes: bool = False, wide: int = -1) -> Recording:
    """Blocks of a matmul, attention, a matmul, and an MLP of two matmuls around a SiLU; an embedding and a head.

    The MLP of one block may be twice as `wide`.
    """
    trace, done = Recording(), []
    embedding = trace.call("embedding", [V, H], [T])
    for number in range(layers):
        ffn = 2 * F if number == wide else F
        query = matmul(trace, T, H, H)
        heads = [1, HEADS, T, DIM]
        attention = trace.call("_scaled_dot_product_flash_attention", heads, heads, heads)
        output = matmul(trace, T, H, H)
        inward = matmul(trace, T, H, ffn)
        silu = trace.call("silu", [T, ffn])
        done.append((query, attention, output, inward, silu, matmul(trace, T, ffn, H)))
    head = matmul(trace, T, H, V)
    loss = trace.call("_log_softmax", [T, V])
    trace.node("LogSoftmaxBackward0", loss, ("_log_softmax_backward_data", [T, V], [T, V]))
    matmul_backward(trace, head)
    for query, attention, output, inward, silu, outward in reversed(done):
        ffn = outward[2]
        again = [("mm", [T, H], [H, ffn]), ("silu", [T, ffn])] if recomputes else []
        trace.node("Recomputing", -1, *again, recomputes=recomputes)
        matmul_backward(trace, outward)
        trace.node("SiluBackward0", silu, ("silu_backward", [T, ffn], [T, ffn]))
        matmul_backward(trace, inward)
        matmul_backward(trace, output)
        inputs = [[1, HEADS, T, DIM]] * 5
        name = "_scaled_dot_product_flash_attention_backward"
        trace.node("ScaledDotProductFlashAttentionBackward0", attention, (name, *inputs, SUMS))
        matmul_backward(trace, query)
    trace.node("EmbeddingBackward0", embedding, ("embedding_dense_backward", [T, H], [T]))
    trace.accumulate(V, H)
    return trace


def setup(**changes: Any) -> Setup:
    keys: dict[str, dict[str, Any]] = {
        "model": {"layers": LAYERS, "hidden": H, "ffn": F, "heads": HEADS, "vocab": V, "gated": False},
        "train": {"seq": T, "micro_batch": 1, "microbatches": 1},
        "parallel": {},
        "cluster": {"gpu": "h200"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        keys[section][name] = value
    return Setup(**keys)


ENDS = {"interleaved": (1, 1), "zero-bubble-v": (2, 0)}  # embedding and head of each of two stages


def kept(tape: Tape | None, segment: int) -> float:
    """Bytes that a segment keeps for the backward pass."""
    assert tape is not None
    alive = [t for t in tape.tensors if t.segment == segment and t.born < tape.middle <= t.dies]
    return sum(t.info.elements * t.info.element for t in alive)


def activations(ops: RankOps, **changes: Any) -> float:
    memory = traced_memory(ops, setup(), setup(**changes))
    assert memory is not None
    return memory.at_peak.activations


# ---------------------------------------------------------------------- what is kept
def test_an_input_is_kept_once_although_three_matmuls_read_it(tmp_path: Path) -> None:
    trace = Recording()
    trace.call("embedding", [V, H], [T])
    calls = [matmul(trace, T, H, F) for _ in range(3)]
    for call in reversed(calls):
        matmul_backward(trace, call)
    assert kept(tape_of(trace.ops(tmp_path)), 0) + kept(tape_of(trace.ops(tmp_path)), 1) == T * H * E


def test_a_product_with_what_needs_no_gradient_keeps_that_alone(tmp_path: Path) -> None:
    trace = Recording()
    trace.call("embedding", [V, H], [T])
    trace.call("cos", [T, 32])
    product = trace.call("mul", [T, 4, 32], [T, 1, 32])
    trace.call("view", [T, 4, 32], **{"Concrete Inputs": ["", f"[{T}, -1]"]})
    matmul_backward(trace, matmul(trace, T, H, F))
    trace.node("MulBackward0", product, ("mul", [T, 4, 32], [T, 1, 32]))
    tape = tape_of(trace.ops(tmp_path))
    names = {tape.calls[t.call].name for t in tape.tensors if t.born < tape.middle <= t.dies} if tape else set()
    assert names == {"cos", "mul"}  # the cosine, and the product itself as the input of the matmul


def test_a_softmax_keeps_what_it_returns(tmp_path: Path) -> None:
    trace = Recording()
    trace.call("embedding", [V, H], [T])
    softmax = trace.call("_softmax", [T, H])
    trace.node("SoftmaxBackward0", softmax, ("_softmax_backward_data", [T, H], [T, H]))
    tape = tape_of(trace.ops(tmp_path))
    assert tape is not None
    assert [tape.calls[t.call].name for t in tape.tensors if t.saved] == ["_softmax"]


def test_what_nobody_saves_is_gone_with_its_last_reader(tmp_path: Path) -> None:
    tape = tape_of(model().ops(tmp_path))
    assert tape is not None
    written = [t for t in tape.tensors if tape.calls[t.call].name == "_log_softmax" or t.info.shape == (T, V)]
    logits = written[0]
    assert tape.calls[logits.call].name == "mm"
    assert logits.dies == logits.born + 1


def test_blocks_are_found_and_keep_the_same(tmp_path: Path) -> None:
    tape = tape_of(model().ops(tmp_path))
    assert tape is not None
    assert tape.blocks == LAYERS
    # Query, output of attention with its sums, two inputs of the MLP, and what it returns for the next block.
    sums = HEADS * T * 4
    assert [kept(tape, block) for block in range(1, LAYERS + 1)] == [(4 * T * H + 2 * T * F) * E + sums] * LAYERS


def test_recomputed_calls_are_no_part_of_the_tape(tmp_path: Path) -> None:
    plain, again = tape_of(model().ops(tmp_path)), tape_of(model(recomputes=True).ops(tmp_path))
    assert plain is not None
    assert again is not None
    assert [call.name for call in again.calls] == [call.name for call in plain.calls]
    assert kept(again, 2) == kept(plain, 2)


def test_parameters_are_those_that_get_gradients(tmp_path: Path) -> None:
    tape = tape_of(model().ops(tmp_path))
    assert tape is not None
    sizes = [sum(g.info.elements for g in tape.gradients if g.segment == part) for part in range(LAYERS + 2)]
    assert sizes == [V * H, *[2 * H * H + 2 * H * F] * LAYERS, V * H]


# ---------------------------------------------------------------------- another setup
def test_the_parts_of_the_traced_run_add_up_to_its_peak(tmp_path: Path) -> None:
    memory = traced_memory(model().ops(tmp_path), setup(), setup())
    assert memory is not None
    parameters = 2 * V * H + LAYERS * (2 * H * H + 2 * H * F)
    part = memory.at_peak
    assert (part.weights, part.optimizer) == (E * parameters, 2 * E * parameters)
    assert part.framework == workspaces_of("h200")
    assert memory.peak == sum(part[1:])


@pytest.mark.parametrize(
    ("changes", "factor"),
    [({"train_micro_batch": 3}, 3.0), ({"train_seq": 2 * T}, 2.0), ({"train_micro_batch": 2, "train_seq": 4 * T}, 8.0)],
)
def test_activations_grow_with_the_tokens(tmp_path: Path, changes: dict[str, int], factor: float) -> None:
    ops = model().ops(tmp_path)
    assert activations(ops, **changes) == pytest.approx(factor * activations(ops), rel=0.02)


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 40])
def test_a_trace_of_four_blocks_is_that_of_any_number(tmp_path: Path, layers: int) -> None:
    there = traced_memory(model().ops(tmp_path), setup(), setup(model_layers=layers))
    traced = max(layers, 2)
    itself = traced_memory(model(traced).ops(tmp_path), setup(model_layers=traced), setup(model_layers=layers))
    assert there is not None
    assert itself is not None
    assert there.peak == itself.peak


def test_with_recomputation_a_block_keeps_what_the_next_one_reads(tmp_path: Path) -> None:
    ops = model().ops(tmp_path)
    more = activations(ops, train_recompute="full", model_layers=400) - activations(
        ops, train_recompute="full", model_layers=300
    )
    assert more == 100 * T * H * E


def test_recomputation_that_was_traced_is_removed(tmp_path: Path) -> None:
    ops = model(recomputes=True).ops(tmp_path)
    without = traced_memory(ops, setup(train_recompute="full"), setup())
    plain = traced_memory(model().ops(tmp_path), setup(), setup())
    assert without is not None
    assert plain is not None
    assert without.peak == plain.peak


def test_accumulated_gradients_are_there_all_the_time(tmp_path: Path) -> None:
    ops = model().ops(tmp_path)
    memory = traced_memory(ops, setup(), setup(train_microbatches=4))
    assert memory is not None
    assert memory.at_peak.gradients == memory.at_peak.weights


def test_fsdp_divides_what_is_stored_and_gathers_what_is_used(tmp_path: Path) -> None:
    ops = model().ops(tmp_path)
    one = traced_memory(ops, setup(), setup())
    many = traced_memory(ops, setup(), setup(parallel_dp=8, parallel_zero=3))
    assert one is not None
    assert many is not None
    assert many.at_peak.weights == one.at_peak.weights / 8
    assert many.at_peak.optimizer == one.at_peak.optimizer / 8
    assert many.at_peak.buffers >= 2 * V * H * E  # the parameters outside the blocks stay gathered


def test_stages_of_a_pipeline_hold_their_own_blocks(tmp_path: Path) -> None:
    memory = traced_memory(model().ops(tmp_path), setup(), setup(parallel_pp=2, train_microbatches=4))
    assert memory is not None
    blocks = LAYERS // 2 * (2 * H * H + 2 * H * F)
    assert [stage.weights for stage in memory.stages] == [E * (blocks + V * H)] * 2


@pytest.mark.parametrize(("schedule", "wide"), [("interleaved", 2), ("zero-bubble-v", 3)])
def test_a_stage_of_several_chunks_holds_the_blocks_of_each(tmp_path: Path, schedule: str, wide: int) -> None:
    """The wider one of four blocks is on the first of two stages, although it is in the second half of the model."""
    target = setup(parallel_pp=2, parallel_vpp=2, parallel_schedule=schedule, train_microbatches=4)
    memory = traced_memory(model(wide=wide).ops(tmp_path), setup(), target)
    assert memory is not None
    first, second = (stage.weights - E * V * H * ends
                     for stage, ends in zip(memory.stages, ENDS[schedule], strict=True))  # fmt: skip
    assert first - second == E * 2 * H * F


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest(tmp_path: Path) -> None:
    memory = traced_memory(model().ops(tmp_path), muon := setup(train_optimizer="muon"), muon)
    assert memory is not None
    matrices = LAYERS * (2 * H * H + 2 * H * F)
    assert memory.at_peak.optimizer == pytest.approx(E * (matrices + 2 * 2 * V * H), rel=0.01)


def test_frameworks_with_fp32_copies_of_weights_keep_them_in_predictions_from_a_trace(tmp_path: Path) -> None:
    memory = traced_memory(model().ops(tmp_path), mixed := setup(train_framework="megatron"), mixed)
    assert memory is not None
    parameters = 2 * V * H + LAYERS * (2 * H * H + 2 * H * F)
    assert memory.at_peak.optimizer == (4 + 2 * 4) * parameters


def test_what_the_profiler_recorded_makes_the_traced_run_exact(tmp_path: Path) -> None:
    simulated = traced_memory(model().ops(tmp_path), setup(), setup())
    assert simulated is not None
    measured = int(simulated.peak + 0.2 * simulated.at_peak.activations)
    ops = model().ops(tmp_path, memory=measured)
    itself, more = (traced_memory(ops, setup(), setup(train_micro_batch=batch)) for batch in (1, 3))
    assert itself is not None
    assert more is not None
    assert itself.peak == pytest.approx(measured, abs=1)
    assert more.at_peak.activations == pytest.approx(3 * itself.at_peak.activations, rel=0.02)


# ---------------------------------------------------------------------- what a trace does not tell
def test_without_shapes_there_is_no_answer(tmp_path: Path) -> None:
    trace = model()
    for event in trace.events:
        event["args"].pop("Input Dims")
    assert traced_memory(trace.ops(tmp_path), setup(), setup()) is None


def test_without_sequence_numbers_there_is_no_answer(tmp_path: Path) -> None:
    trace = model()
    for event in trace.events:
        event["args"].pop("Sequence number", None)
    assert traced_memory(trace.ops(tmp_path), setup(), setup()) is None


def test_compiled_runs_and_stages_of_pipelines_are_left_to_the_description(tmp_path: Path) -> None:
    ops = model().ops(tmp_path)
    assert traced_memory(ops, setup(train_compile=True), setup(train_compile=True)) is None
    assert traced_memory(ops, setup(parallel_pp=2), setup(parallel_pp=2)) is None


@pytest.mark.parametrize("value", ["x", -1, [], [[1, -5], "?", None], 1 << 62, {"a": 1}, [[[]]], True])
def test_odd_values_in_a_trace_do_no_harm(tmp_path: Path, value: Any) -> None:
    for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs", "Sequence number"):
        trace = model()
        for event in trace.events[::3]:
            event["args"][key] = value
        traced_memory(trace.ops(tmp_path), setup(), setup(train_micro_batch=2, model_layers=7))


# ---------------------------------------------------------------------- against PyTorch itself
SIZES: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
LLAMA = SIZES | {"intermediate_size": 224, "num_key_value_heads": 2, "max_position_embeddings": 64}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Llama, attention not fused": ("LlamaForCausalLM", LLAMA | {"attn_implementation": "eager"}),
    "Gemma 2": ("Gemma2ForCausalLM", LLAMA | {"head_dim": 32}),
    "Phi 3": ("Phi3ForCausalLM", LLAMA | {"pad_token_id": 0}),
    "Mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4}),
    "GPT-2": ("GPT2LMHeadModel", {"n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 64}),
    "BERT": ("BertForMaskedLM", SIZES | {"intermediate_size": 384}),
}


def saved_bytes(torch: Any, net: Any, step: Any) -> int:
    """What autograd holds between forward and backward, besides the parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    found: dict[int, int] = {}
    alive = []

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes() >= 4096:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step()
    loss.backward()
    net.zero_grad(set_to_none=True)
    return sum(found.values())


def recorded_bytes(torch: Any, step: Any, folder: Path) -> float:
    """The same, from the tape of a recording."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step().backward()
    profile.export_chrome_trace(str(folder / "trace.json"))
    tape = tape_of(rank_ops(read_job(folder / "trace.json"), 0, ""))
    assert tape is not None
    assert tape.blocks == 3
    return sum(kept(tape, segment) for segment in range(tape.blocks + 2))


@pytest.mark.usefixtures("fake_gpu_known")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tape_keeps_what_pytorch_saves(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model_name, sizes = ARCHITECTURES[name]
    kind = getattr(transformers, model_name)
    net, ids = kind(kind.config_class(**sizes)), torch.randint(0, 1000, (3, 40))

    def step() -> Any:
        return net(input_ids=ids, labels=ids).loss

    truth = saved_bytes(torch, net, step)
    assert recorded_bytes(torch, step, tmp_path) == pytest.approx(truth, rel=0.05)


@pytest.mark.usefixtures("fake_gpu_known")
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_tape_of_checkpointed_layers_is_that_without_checkpoints(tmp_path: Path, reentrant: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    net, ids = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), torch.randint(0, 1000, (3, 40))

    def step() -> Any:
        return net(input_ids=ids, labels=ids).loss

    plain = recorded_bytes(torch, step, tmp_path)
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    net.enable_input_require_grads()
    assert recorded_bytes(torch, step, tmp_path) == pytest.approx(plain, rel=0.01)


@pytest.mark.usefixtures("fake_gpu_known")
def test_setup_trace_and_dry_run_of_one_run_agree(tmp_path: Path) -> None:
    """States to the byte, less rotary frequencies and step counters that a dry run counts; the peak within 2%."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from lumos.dry_run.huggingface_model import builder
    from lumos.dry_run.record import record_step

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = sizes | {"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512}
    run = setup(
        model_layers=4, model_hidden=512, model_ffn=1536, model_heads=8, model_kv_heads=4, model_vocab=4096,
        model_gated=True, train_seq=512, train_micro_batch=2,
    )  # fmt: skip
    dry = record_step(builder({"model_type": "llama", **config}, 512, 2))
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16)
    ids = torch.randint(0, 4096, (2, 512))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        net(input_ids=ids, labels=ids).loss.backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    traced, stated = traced_memory(rank_ops(read_job(tmp_path / "trace.json"), 0, ""), run, run), memory_of(run)
    assert traced is not None
    assert traced.at_peak[1:4] == stated.at_peak[1:4]
    tensors = sum(1 for _ in net.parameters())
    most = (dry.most_held["weights"] - 2 * 512, dry.most_held["optimizer"] - 512 * tensors)
    assert most == (stated.at_peak.weights, stated.at_peak.optimizer)
    assert dry.most_held["gradients"] == 2 * sum(parameter.numel() for parameter in net.parameters())
    peaks = (stated.peak, traced.peak, dry.peak_bytes + workspaces_of("h200"))
    assert max(peaks) < 1.02 * min(peaks)


# ---------------------------------------------------------------------- against the H200
def rank_setup(case: dict[str, Any]) -> Setup:
    tp, world = case.get("tp", 1), case["world"]
    sizes = {key: case[key] for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    recompute = "full" if case.get("ckpt") else "none"
    train = {"seq": case["seq"], "micro_batch": case["mbs"], "microbatches": case.get("accum", 1)}
    return Setup(
        model=sizes | {"kv_heads": case["kv"]},
        train=train | {"recompute": recompute},
        parallel={"tp": tp, "dp": world // tp, "zero": case.get("zero", 0)},
        cluster={"gpu": "h200", "gpus": world},
    )


PAIRS = [
    ("l8_tp1", "l8_tp1"), ("l8_tp4", "l8_tp4"), ("l8_tp2", "l8_tp8"), ("l8_tp8", "l8_tp2"), ("l8_tp1", "l8_tp2"),
    ("l8_tp1", "l8_tp1_fsdp8"), ("l8_tp1_fsdp8", "l8_tp1"), ("l8_tp1_fsdp8", "l8_fsdp8_ckpt"),
    ("l8_fsdp8_ckpt", "l8_fsdp8_accum4"), ("l8_tp2", "l8_tp2_fsdp8"),
]  # fmt: skip


@pytest.mark.data
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_ranks_on_an_h200_need_what_was_measured(shared_data: Path, source: str, target: str) -> None:
    folder = shared_data / "h200/parallel"
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in (source, target))
    ops = rank_ops(read_job(folder / f"{source}.pt.trace.json.gz"), 0, "ProfilerStep#2")
    memory = traced_memory(ops, rank_setup(before), rank_setup(after))
    assert memory is not None
    assert memory.peak == pytest.approx(after["peak_mem_alloc"], rel=0.02)
