"""Megatron-LM: the script that passes its arguments, or the arguments as a run wrote them down.

The options are in `data/megatron_options.toml`; here is what takes more than one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from typing import Any, get_args

from lumos.data_files import read_table
from lumos.errors import InputError
from lumos.setup.importers.foreign_file import Findings, Reading, is_ignored, shared_experts
from lumos.setup.importers.launch_script import Options, Script, put_cluster, read_shell
from lumos.setup.messages import listed, one_of, shown
from lumos.setup.sections import Module, as_count
from lumos.setup.stated_size import preset_of

_TABLES = read_table("megatron_options.toml")
_SKIPPED = "window-attn-skip-freq"
_MOST = 5000  # arguments, or layers
_REPEATED = (re.compile(r"\(([^()]*)\)\*(\d{1,5})", re.ASCII), re.compile(r"([Etm|L])\*(\d{1,5})", re.ASCII))
_VARIABLE = re.compile(r"\$\{?(\w{0,60})[^}\s]{0,60}\}?|\$\(\)")

Pairs = list[tuple[str, str]]  # names of arguments and their values as text


def script_sections(text: str, where: str) -> Reading:
    """The run that a script or a line of options describes. It is read as text and never run."""
    return read_megatron(read_shell(text, where))


def is_megatron(script: Script) -> bool:
    """Whether a script starts a program of Megatron with one of its options, or has several that only Megatron has."""
    named = len(set(script.options).intersection(_TABLES["written"]["recognised_by"]))
    starts = any(program.startswith(("pretrain_", "train_gpt", "finetune_gpt")) for program in script.programs)
    return named >= (1 if starts else 2)


def read_megatron(script: Script) -> Reading:
    """The run that Megatron's options describe, or InputError where they describe another model than a GPT."""
    options = _with_first_dense_layers(script)
    _refuse_other_models(script)
    found = Findings()
    found.values |= _TABLES["defaults"]
    _put_options(found, options)
    rules = (
        _slime, _precision, _mlp, _attention, _experts, _vocabulary, _stages, _overlap, _recomputation, _offloading,
    )  # fmt: skip
    for rule in (*rules, _context, _windows, _not_modelled):
        rule(found, options)
    put_cluster(found, script)
    _instances(found, options)
    if "cluster.gpus" not in found.values:
        found.note_gpus()
    for condition in script.notes:
        found.note(condition)
    twice = [f"--{name}" for name in script.repeated if name in _TABLES["numbers"] or name in _TABLES["choices"]]
    if twice:
        found.note(f"given several times, the last value is used: {listed(twice)}")
    return found.reading(f"--{name}" for name in options if not _is_known(name))._replace(model_names=())


def _refuse_other_models(script: Script) -> None:
    """Raise InputError for a script of another model than a GPT, by what it starts or by an option."""
    others = _TABLES["other_models"]
    found = {program: _words(program).intersection(others["programs"]) for program in script.programs}
    trains = {program: words for program, words in found.items() if _words(program) & {"pretrain", "train", "finetune"}}
    if found and all((trains or found).values()):  # one that trains a GPT may stand beside others
        program, named = next(iter((trains or found).items()))
        what = others["programs"][min(named)]
        raise InputError(f"{program} {what}; only the training of GPT models can be described")
    for name, what in others["options"].items():
        words = script.options.get(name)
        if words is not None and words[:1] not in (["0"], ["0.0"], ["None"]):
            option = f"--{name} {' '.join(words[:1])[:60]}".rstrip()
            raise InputError(f"{option} is {what}; only the training of GPT models can be described")
    if _word(script.options, "tokenizer-type").startswith("Bert"):
        raise InputError("a tokenizer of BERT, an encoder; only the training of GPT models can be described")
    spec = " ".join(script.options.get("spec", ())).casefold()
    word = next((word for word in ("mamba", "hybrid", "t5", "bert", "retro", "multimodal") if word in spec), "")
    if word:
        raise InputError(f"--spec {shown(spec)} is a {word} model; only the training of GPT models can be described")


def _with_first_dense_layers(script: Script) -> Options:
    """Options in which the pattern of experts is filled in, which slime's models make of this variable in a loop."""
    first, layers = script.variables.get("FIRST_K_DENSE_REPLACE", ""), _count(script.options, "num-layers")
    if "$" not in _word(script.options, "moe-layer-freq") or not re.fullmatch(r"[0-9]{1,4}", first):
        return script.options
    dense = min(int(first), layers)
    return {**script.options, "moe-layer-freq": [f"[0]*{dense}+[1]*{layers - dense}"]}


def _words(program: str) -> set[str]:
    """The words of a file name: run_text_generation.py has run, text and generation."""
    return set(re.split(r"[_.\-]+", program.casefold()))


def _is_known(name: str) -> bool:
    tables = (_TABLES["numbers"], _TABLES["flags"], _TABLES["choices"], _TABLES["combined"]["names"])
    return any(name in table for table in tables) or is_ignored(name.removeprefix("no-"), _TABLES["ignored"])


def _put_options(found: Findings, options: Options) -> None:
    """What single options say. Of two about one key, the later in the tables wins: --fp8-format over --bf16."""
    for name, place in _TABLES["numbers"].items():
        if name in options and not _is_unset(found, options, name, place):
            found.values[place] = _number(options[name])
    found.values |= dict(place_and_value for name, place_and_value in _TABLES["flags"].items() if name in options)
    for name, (place, meanings) in _TABLES["choices"].items():
        word = _word(options, name)
        if "$" in word and _is_unset(found, options, name, place):
            continue
        if word in meanings:
            found.values[place] = meanings[word]
        elif word:
            found.note(f"--{name} {shown(word)} is not known: use {one_of(list(meanings))}", place)


def _is_unset(found: Findings, options: Options, name: str, place: str) -> bool:
    """Whether the value of an option is a variable that the script does not assign, which is then a mistake."""
    word = _word(options, name)
    variable = _VARIABLE.search(word)
    if variable is None:
        return False
    is_named = bool(variable[1]) and not variable[1].isdigit()  # $1 is an argument of the script
    unset = f"the script does not say what {variable[0]} is" if variable[1] else f"only running the script tells {word}"
    assign = f", or assign {variable[1]} in the script" if is_named else ""
    found.mistake(place, f"--{name} {word[:60]}: {unset}: --set {place}=VALUE{assign}")
    if place == "train.seq":
        found.values[place] = 1  # it is not missing as well
    return True


def _word(options: Options, name: str, default: str = "") -> str:
    return (options.get(name) or [default])[0]


def _number(words: list[str]) -> int | str:
    """A whole number, or the word itself for the checks to refuse: a variable that the file does not assign, say."""
    word = words[0] if words else ""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 12 else word


def _count(options: Options, name: str, default: str = "") -> int:
    return as_count(_number([_word(options, name, default)]))


# What takes more than one option


def _slime(found: Findings, options: Options) -> None:
    """slime trains what it sampled by Megatron, and has other defaults: 16 bits, and a shared optimizer."""
    table = _TABLES["slime"]
    if options.keys().isdisjoint(table["recognised_by"]):
        return
    found.values |= table["sets"]
    if "fp16" not in options and found.values["train.precision"] == "fp32":
        found.values["train.precision"] = "bf16"
    gpus = _count(options, table["nodes"], "1") * _count(options, table["gpus_per_node"], table["usual_gpus_per_node"])
    if gpus:
        found.values["cluster.gpus"] = gpus
    samples = _count(options, "rollout-batch-size") * _count(options, "n-samples-per-prompt", "1")
    steps = _count(options, "num-steps-per-rollout")
    if samples and steps:  # all samples of a rollout are trained on in this many steps
        found.values.setdefault("train.global_batch", samples // steps)
    found.note("slime: the training of the actor is described, and no rollout")


def _precision(found: Findings, options: Options) -> None:
    """Beside these, --bf16 is the precision of what is not a matmul."""
    values = found.values
    if "fp4-format" in options:
        values["train.precision"] = "nvfp4"
    elif "fp8-format" in options:
        recipe = _word(options, "fp8-recipe")
        values["train.precision"] = "mxfp8" if recipe == "mxfp8" else "fp8"
        if recipe == "blockwise":
            values["train.fp8_scaling"] = "block"
        values.setdefault("train.weight_precision", "bf16")  # unless --fp8-param-gather is given
    elif values["train.precision"] == "fp32":
        found.note("neither --bf16 nor --fp16 is given: fp32, as Megatron does", "train.precision")


def _mlp(found: Findings, options: Options) -> None:
    """Megatron's default width: four times the hidden size, or two thirds of that as a multiple of 64 with SwiGLU."""
    values = found.values
    hidden = as_count(values.get("model.hidden"))
    if "quick-geglu" in options:
        values |= {"model.gated": True, "model.activation": "gelu"}
    if "model.ffn" not in values and hidden:
        values["model.ffn"] = int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in options else 4 * hidden


def _attention(found: Findings, options: Options) -> None:
    values = found.values
    if "no-position-embedding" in options and values["model.positions"] == "learned":
        values["model.positions"] = "none"
    if "group-query-attention" in options:
        values.setdefault("model.kv_heads", 1)
    elif "model.kv_heads" in values:
        sentence = "--num-query-groups without --group-query-attention: used, although Megatron ignores it"
        found.note(sentence, "model.kv_heads")
    defaults = {f"model.{key}": size for key, size in _TABLES["latent_attention_defaults"].items()}
    if "multi-latent-attention" in options:
        values |= defaults | {key: values[key] for key in defaults if key in values}
        values.pop("model.head_dim", None)  # --kv-channels says nothing about latent attention
    else:
        for key in defaults:
            values.pop(key, None)  # a dump of arguments always has them


def _experts(found: Findings, options: Options) -> None:
    values = found.values
    is_deepspeed = values.get("train.framework") == "megatron-deepspeed"
    counts = [word for word in options.get("num-experts") or () if word.isdigit()]
    if len(set(counts)) > 1:
        what = f"--num-experts {' '.join(counts)[:60]}: layers with different numbers of experts cannot be described"
        found.mistake("model.experts", f"{what}: --set model.experts=NUMBER")
    if not as_count(values.get("model.experts")) or (is_deepspeed and values["model.experts"] == 1):
        for key in ("model.experts", "model.top_k", "model.expert_ffn", "parallel.etp"):
            values.pop(key, None)
        return
    if is_deepspeed:
        _deepspeed_experts(found, options)
    values.setdefault("model.top_k", _TABLES["moe_defaults"]["top_k"])
    width = as_count(values.get("model.expert_ffn")) or as_count(values.get("model.ffn"))
    shared = _count(options, "moe-shared-expert-intermediate-size")
    if shared and width:
        experts = as_count(values.get("model.experts"))
        values["model.shared_experts"] = shared_experts(found, shared, width, experts)
    tp = as_count(values.get("parallel.tp"))
    if tp > 1:
        values.setdefault("parallel.etp", tp)  # Megatron's default
    every = _word(options, "expert-interval", "2") if is_deepspeed else "1"
    _dense_layers(found, "".join(options.get("moe-layer-freq") or [every]).replace(" ", ""))
    _capacity(found, options)
    _dispatcher(found, options)
    if "moe-shared-expert-overlap" in options and values.get("model.shared_experts"):
        found.note("--moe-shared-expert-overlap is not modelled: assuming that shared experts run after the exchange")


def _capacity(found: Findings, options: Options) -> None:
    """Experts that are filled up to a capacity; one that only drops tokens has no effect where routers balance."""
    word = _word(options, "moe-expert-capacity-factor")
    if not word:
        return
    factor = float(word) if re.fullmatch(r"\d{1,4}(\.\d{0,12})?", word, re.ASCII) else 0.0
    pads = "moe-pad-expert-input-to-capacity" in options
    if factor and pads:
        found.values["train.capacity"] = factor
    elif factor < 1:
        wanted = "more than 0" if pads else "1 or more"
        wrong = f"--moe-expert-capacity-factor {shown(word)} is not a number of {wanted}"
        found.note(f"{wrong}: assuming that no token is dropped", "train.capacity")


def _dispatcher(found: Findings, options: Options) -> None:
    """Megatron's default gathers the tokens of all ranks; what cannot be had with it speaks for all-to-all."""
    others = ("moe-expert-capacity-factor", "overlap-moe-expert-parallel-comm", "moe-shared-expert-overlap")
    if not any(name in options for name in others) and found.values.get("train.framework") != "megatron-deepspeed":
        found.values.setdefault("parallel.dispatcher", "all_gather")


def _deepspeed_experts(found: Findings, options: Options) -> None:
    """Names and defaults of Megatron-DeepSpeed: one expert for a token, and in a residual MoE the MLP beside it."""
    found.values.setdefault("model.top_k", _count(options, "topk") or 1)
    if _word(options, "mlp-type") == "residual":
        found.values["model.shared_experts"] = 1


def _dense_layers(found: Findings, pattern: str) -> None:
    """Layers without experts: all but every N-th, or those with a 0 in a pattern such as ([0]*3+[1]*58)."""
    layers = as_count(found.values.get("model.layers"))
    if pattern.isascii() and pattern.isdigit() and len(pattern) < 6 and int(pattern):
        sparse = [layer % int(pattern) == 0 for layer in range(min(layers, _MOST))]
    else:
        sparse = [bool(number) for number in _pattern(pattern)]
    if len(sparse) != layers or not pattern:
        way_out = "--set model.dense_layers=NUMBER"
        found.mistake(
            "model.dense_layers",
            f"--moe-layer-freq {shown(pattern)} is not a number or a pattern of {layers} layers: {way_out}",
        )
        return
    dense = layers - sum(sparse)
    if dense:
        found.values["model.dense_layers"] = dense
    if any(sparse[:dense]):
        found.note(
            f"{dense} of {layers} layers have no experts: modelled as the first {dense} layers", "model.dense_layers"
        )


def _pattern(text: str) -> list[int]:
    """The list that a pattern in Python's notation stands for, or [] where it stands for none; nothing is run."""
    try:
        value = _part(ast.parse(text[:_MOST], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return value if isinstance(value, list) else []


def _part(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            numbers = [_part(element) for element in elements]
            return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _part(left), _part(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _part(left), _part(right)
            if isinstance(first, list) and isinstance(second, int) and len(first) * second <= _MOST:
                return first * second
    raise ValueError("not a pattern of layers")


def _vocabulary(found: Findings, options: Options) -> None:
    """Megatron pads the vocabulary so that every tensor-parallel rank has the same share of it."""
    values = found.values
    table = _TABLES["vocabulary"]
    size: int | str = table.get(_word(options, "tokenizer-type"), 0)
    preset = preset_of(_word(options, "tokenizer-model"))
    if not size and preset is not None and "vocab-size" not in options and "model.vocab" not in values:
        size = preset.keys["vocab"]
        found.note(f"vocabulary of {size}: that of {preset.name}, after --tokenizer-model", "model.vocab")
    elif not size and "merge-file" in options and "tokenizer-type" not in options:
        size = table["GPT2BPETokenizer"]  # files of BPE, which were the only ones before --tokenizer-type
    if options.get("vocab-size"):
        size = 0 if _is_unset(found, options, "vocab-size", "model.vocab") else _number(options["vocab-size"])
    if "model.vocab" not in values and not size and options.get("tokenizer-type"):
        tokenizer = _word(options, "tokenizer-model") or _word(options, "tokenizer-type")
        found.mistake("model.vocab", f"the vocabulary of {shown(tokenizer)} is not known: --set model.vocab=NUMBER")
    if "model.vocab" in values or not size:
        return
    values["model.vocab"] = size
    multiple = _count(options, "make-vocab-size-divisible-by", str(table["divisible_by"]))
    multiple *= as_count(values.get("parallel.tp", 1))
    if isinstance(size, int) and multiple and size % multiple:
        values["model.vocab"] = padded = -(-size // multiple) * multiple
        found.note(
            f"vocabulary of {size} padded to {padded}, a multiple of {multiple}, as Megatron does", "model.vocab"
        )


def _stages(found: Findings, options: Options) -> None:
    """Virtual stages; a first and a last stage of given sizes with the rest divided evenly; or a layout of all."""
    values = found.values
    if options.get("pipeline-model-parallel-layout"):
        _layout(found, "".join(options["pipeline-model-parallel-layout"]))
        return
    per_chunk = _count(options, "num-layers-per-virtual-pipeline-stage")
    layers, pp = as_count(values.get("model.layers")), as_count(values.get("parallel.pp", 1))
    if per_chunk and layers and pp:
        values["parallel.vpp"] = max(layers // (pp * per_chunk), 1)
    first, last = (_count(options, f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if not (first or last) or not layers or pp <= 1:
        return
    between = pp - bool(first) - bool(last)
    rest = layers - first - last
    if as_count(values.get("parallel.vpp")) > 1 or between < 1 or rest < between or rest % between:
        sentence = "uneven stages are not modelled together with virtual ones: assuming stages as even as possible"
        found.note(sentence, "parallel.stage_layers", "parallel.pp", "parallel.vpp")
    else:
        values["parallel.stage_layers"] = [first] * bool(first) + [rest // between] * between + [last] * bool(last)


def _layout(found: Findings, text: str) -> None:
    """Stages as in Ett|(ttt|)*6,ttL: embedding, layers and loss; what is in brackets, or one letter, is repeated."""
    values, unrolled = found.values, text.replace(",", "")
    for pattern in _REPEATED:
        parts = [int(match[2][:6]) * len(match[1]) for match in pattern.finditer(unrolled)]
        if sum(parts) > _MOST:
            break
        unrolled = pattern.sub(lambda match: match[1] * int(match[2]), unrolled)
    stages, pp = unrolled.split("|"), as_count(values.get("parallel.pp", 1)) or 1
    if set(unrolled) - set("Etm|L") or len(stages) % pp or unrolled.count("t") != as_count(values.get("model.layers")):
        what = f"a layout of {shown(values.get('model.layers'))} layers on a multiple of {pp} stages"
        way_out = "--set parallel.stage_layers=[LAYERS OF EACH STAGE] and parallel.vpp"
        found.mistake(
            "parallel.stage_layers", f"--pipeline-model-parallel-layout {shown(text)} is not {what}: {way_out}"
        )
        return
    values["parallel.vpp"] = len(stages) // pp
    layers = [stage.count("t") for stage in stages]
    if min(layers) < max(layers):
        values["parallel.stage_layers"] = layers


def _instances(found: Findings, options: Options) -> None:
    """Replicas in groups, each with a whole copy of the optimizer's state, where the number of GPUs is given."""
    values = found.values
    instances = _count(options, "num-distributed-optimizer-instances")
    if instances <= 1:
        return
    model = prod(as_count(values.get(f"parallel.{key}", 1)) or 1 for key in ("tp", "pp", "cp"))
    replicas = as_count(values.get("cluster.gpus")) // model
    if replicas and replicas % instances == 0:
        values["parallel.shard"] = replicas // instances
    else:
        what = f"--num-distributed-optimizer-instances {instances}: the number of replicas is not a multiple of it"
        found.note(f"{what}, or not given: assuming one group; set parallel.shard", "parallel.shard")


def _overlap(found: Findings, options: Options) -> None:
    values = found.values
    if _word(options, "optimizer") == "dist_muon":
        values.setdefault("parallel.zero", 1)  # whole matrices are shared out among the replicas
    if values.get("parallel.zero") == 3:
        values["parallel.dp_overlap"] = True  # sharded weights are prefetched
    elif values.get("parallel.zero"):
        values["parallel.gather_overlap"] = "overlap-param-gather" in options


def _recomputation(found: Findings, options: Options) -> None:
    """Which layers are recomputed, or which of their parts.

    Of full recomputation, "block" takes the first layers of every virtual stage, "uniform" all, in groups.
    """
    if "activations-checkpoint-method" in options:  # the name of 2021
        found.values["train.recompute"] = "full"
        if found.values["train.framework"] == "megatron":
            found.values["train.framework"] = "megatron-2021"
    how = found.values.get("train.recompute")
    method = _word(options, "recompute-method") or _word(options, "activations-checkpoint-method")
    layers = options.get("recompute-num-layers") or options.get("activations-checkpoint-num-layers")
    places = {"block": "train.recompute_layers", "uniform": "train.recompute_group"}
    if how == "full" and method in places:
        if not _is_unset(found, options, "recompute-num-layers", places[method]):
            found.values[places[method]] = _number(layers or ["1"])
    elif how == "full" and method:
        found.note(f"--recompute-method {shown(method)} is not known: use block or uniform", *places.values())
    if "moe-layer-recompute" in options and how in (None, "none"):  # the name of recompute_modules = moe until 2025
        found.values |= {"train.recompute": "selective", "train.recompute_modules": ["moe"]}
    if how != "selective" or "recompute-modules" not in options:
        return
    words = re.split(r"[\s,'\"\[\]()]+", " ".join(options["recompute-modules"]))
    known = [word for word in words if word in get_args(Module) and word != "operators"]
    unknown = [word for word in words if word and word not in known]
    if known:
        found.values["train.recompute_modules"] = known
    if unknown:
        what = f"--recompute-modules: {listed(unknown)} is not modelled"
        found.note(f"{what}: assuming {listed(known or ['core_attn'])}", "train.recompute_modules")


def _offloading(found: Findings, options: Options) -> None:
    """The optimizer's state, or the activations of some layers, on the host."""
    if "optimizer-cpu-offload" in options:
        word = _word(options, "optimizer-offload-fraction", "1.0")
        share = float(word) if re.fullmatch(r"[01](\.\d{0,12})?|\.\d{1,12}", word, re.ASCII) else 2.0
        if share <= 1:
            found.values["train.offload_optimizer"] = share
        else:
            wrong = f"--optimizer-offload-fraction {shown(word)} is not a number from 0 to 1"
            found.mistake("train.offload_optimizer", f"{wrong}: --set train.offload_optimizer=NUMBER")
    if "optimizer-cpu-offload" in options and "overlap-cpu-optimizer-d2h-h2d" in options:
        found.values["train.offload_overlap"] = True
    layers = "cpu-offloading-num-layers"
    if layers in options and not _is_unset(found, options, layers, "train.offload_layers"):
        found.values["train.offload_layers"] = _number(options.get(layers) or ["0"])
    if "fine-grained-activation-offloading" in options:
        modules = listed(options.get("offload-modules") or ["no modules"])
        sentence = f"--fine-grained-activation-offloading ({modules}) is not modelled: assuming activations on the GPU"
        found.note(sentence, "train.offload_layers")


def _context(found: Findings, options: Options) -> None:
    """How context-parallel ranks attend: one word, or one for every layer."""
    words, known = options.get("cp-comm-type") or [], ("p2p", "all_gather", "a2a", "a2a+p2p")
    if as_count(found.values.get("parallel.cp")) <= 1 or not words:
        return
    kinds = list(dict.fromkeys(word.strip("[]'\",").replace("allgather", "all_gather") for word in words))
    if kinds[0] in known:
        found.values["parallel.cp_type"] = kinds[0]
    if len(kinds) > 1 or kinds[0] not in known:
        taken = kinds[0] if kinds[0] in known else known[0]
        what = f"--cp-comm-type {listed(kinds)} is not modelled: use one of {one_of(list(known))}"
        found.note(f"{what}; assuming {taken} in all layers", "parallel.cp_type")
    inner = _count(options, "hierarchical-context-parallel-sizes")
    if inner and kinds[0] == "a2a+p2p":
        found.values["parallel.cp_inner"] = inner


def _windows(found: Findings, options: Options) -> None:
    """Tokens before and after each one that a layer with a window attends to; every n-th layer has none."""
    words, skipped = ",".join(options.get("window-size") or []), _word(options, _SKIPPED, "0")
    if not words:
        return
    before = re.fullmatch(r"\(?(\d{1,6}),0\)?", words.replace(" ", ""), re.ASCII)
    if before and skipped.isascii() and skipped.isdigit() and len(skipped) < 5:
        found.values |= {"model.window": int(before[1]) + 1, "model.window_pattern": int(skipped)}
    else:
        what = f"--window-size {shown(words)}" + (f" with --{_SKIPPED} {shown(skipped)}" if _SKIPPED in options else "")
        found.note(f"{what} is not modelled: assuming full attention", "model.preset", "model.window")


def _not_modelled(found: Findings, options: Options) -> None:
    for name, free in _TABLES["free"].items():
        word = _word(options, name, free[0])
        if word not in free:
            found.note(f"--{name} {shown(word)} is not modelled: assuming {free[0]}")


# Arguments as a run wrote them down: the block in its log, a Namespace, or a table in YAML or JSON

_DOTTED = re.compile(r"([A-Za-z_]\w{1,80}) \.{2,48} ([^\n]{1,4000})")
# No start is tried within what an earlier one has read: then the time does not grow with the square of the text.
_HEADER = re.compile(r"(?<!-)-{6,}+ (?:end of )?arguments -{6}")
_NAMESPACE = re.compile(r"^(?>[^\n]*?\bNamespace\()([^\n]*)\)", re.MULTILINE)
_PAIR = re.compile(r"(\w{1,80})=('[^'\n]*'|\"[^\"\n]*\"|\[++[^\[\]\n]*\]|[^,()\n]*)")
_UNSET = ("None", "null", "~", "False", "false", "[]", "{}", "")
_USUAL: tuple[list[str], ...] = ([], ["0"], ["0.0"], ["1"], ["1.0"])  # most arguments are off, or 1
_DEEPEST = 4


def read_arguments(pairs: Pairs) -> Reading:
    """The run of these arguments."""
    table = _TABLES["written"]
    options: dict[str, list[str]] = {}
    for name, word in pairs:
        plain = _option_name(name)
        if word in ("False", "false") and plain in table["opposites"]:
            options[table["opposites"][plain]] = []
        if word not in _UNSET:
            value = word.strip("'\"")
            value = value.rpartition(".")[2] if value.startswith(("AttnBackend.", "torch.")) else value
            options[table["names"].get(plain, plain)] = [] if value in ("True", "true") else [value]
    if "group-query-attention" not in options:
        options.pop("num-query-groups", None)  # written down as 1 where it is not used
    reading = read_megatron(Script(options))
    names = [name[2:] for name in reading.not_recognised if options[name[2:]] not in _USUAL]
    return reading._replace(not_recognised=tuple(name.replace("-", "_") for name in names))


def arguments_in_log(text: str) -> Pairs:
    """The arguments in the log of a run, with or without a prefix before every line; [] where there are none."""
    found = [(match[1], match[2].strip()) for match in _DOTTED.finditer(text)]
    if len(found) < 3:
        spaces = _NAMESPACE.search(text)
        found = [(match[1], match[2].strip()) for match in _PAIR.finditer(spaces[1])] if spaces else []
    return found[:_MOST] if found and (_HEADER.search(text) or _is_megatron(found)) else []


def arguments_in_table(content: Any) -> Pairs:
    """The arguments in a table of YAML or JSON; {"num_layers": {"value": 32}} is how trackers write them."""
    found = list(islice(_pairs(content), _MOST)) if isinstance(content, dict) else []
    return found if _is_megatron(found) else []


def _pairs(content: Mapping[Any, Any], depth: int = 1) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        value = value["value"] if isinstance(value, dict) and "value" in value else value
        if not isinstance(value, dict):
            yield str(name), _text(value)
        elif depth < _DEEPEST:
            yield from _pairs(value, depth + 1)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value[:1000] if not isinstance(item, list | dict)) + "]"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    return str(value)[:200]


def _is_megatron(pairs: Iterable[tuple[str, str]]) -> bool:
    names = {_option_name(name) for name, _ in pairs}
    table = _TABLES["written"]
    return len(names.intersection(table["recognised_by"])) >= 3 and not names.isdisjoint(table["only_megatron"])


def _option_name(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
