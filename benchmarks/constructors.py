"""Build models of transformers, timm and torchvision in a dry run, and write the page docs/constructors.md.

    python benchmarks/constructors.py [--models 60] [--limit 60] [--library timm ...] [-o docs/constructors.md]

`--models 0` builds every model. A worker process builds one model after the other; a model that takes longer than the
limit ends its worker, and the next one starts a new worker. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("transformers", "timm", "torchvision")
START_SECONDS = 300.0  # to import a library on a busy machine
HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "CTC",
         "IMAGE_TEXT_TO_TEXT", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
         "AUDIO_CLASSIFICATION", "PRETRAINING", "SEQUENCE_CLASSIFICATION")  # fmt: skip
SLOWEST = 8  # rows of the table

INTRODUCTION = """# Constructors in a dry run

Written by `benchmarks/constructors.py` on {date}. Each model was built with its default configuration on fake tensors
and moved to the fake GPU, with torch {torch}, on {cores} cores that other programs used as well. A model that takes
longer than {limit:.0f} s is stopped. A model that fails in the same way on the meta device fails for a reason of its
own, such as a package that is not installed or a configuration without defaults.
"""


class Result(NamedTuple):
    """How the construction of one model went."""

    name: str
    seconds: float = 0.0
    parameters: int = 0
    operators: int = 0
    error: str = ""  # why it was not built
    is_own: bool = False  # it fails without a dry run, too


# In the worker


def names_of(library: str) -> list[str]:
    """All models of a library: of transformers, one class for every model type."""
    if library == "timm":
        return sorted(importlib.import_module("timm").list_models())
    if library == "torchvision":
        return sorted(_torchvision().models.list_models())
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    classes: dict[str, str] = {}
    for head in (*(f"MODEL_FOR_{name}" for name in HEADS), "MODEL"):
        for kind, name in getattr(auto, f"{head}_MAPPING_NAMES", {}).items():
            classes.setdefault(kind, name if isinstance(name, str) else name[0])
    return sorted(set(classes.values()))


def _torchvision() -> Any:
    """torchvision, even if its compiled operators do not load with this build of torch: constructors need none."""
    import torch

    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        return importlib.import_module("torchvision")


_KEPT: list[Any] = []


def constructor(library: str, name: str) -> Callable[[], Any]:
    if library == "timm":
        return lambda: importlib.import_module("timm").create_model(name, pretrained=False)
    if library == "torchvision":
        options = {"weights": None, "weights_backbone": None}
        if not any(part in name for part in ("rcnn", "retinanet", "fcos", "ssd", "deeplab", "fcn_", "lraspp")):
            del options["weights_backbone"]
        return lambda: _torchvision().models.get_model(name, **options)
    kind = getattr(importlib.import_module("transformers"), name)
    return lambda: kind(kind.config_class())


def build(library: str, name: str) -> Result:
    """Build one model in a dry run; if that fails, build it on the meta device to see whose fault it is."""
    import torch

    from lumos.dry_run.record import recorded

    began = time.monotonic()
    try:
        make = constructor(library, name)
        with recorded() as recorder:
            model = make().to("cuda")
            operators = len(recorder.ops)
        parameters = sum(weight.numel() for weight in model.parameters())
        return Result(name, time.monotonic() - began, parameters, operators)
    except BaseException as error:
        seconds, reason = time.monotonic() - began, _line(error)
    try:
        with torch.device("meta"):
            constructor(library, name)()
        is_own = False
    except BaseException as error:
        is_own = _line(error)[:40] == reason[:40]
    return Result(name, seconds, error=reason, is_own=is_own)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def serve(library: str) -> None:
    """Build the models that are named on standard input; one line of JSON for each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    if find_spec("torchvision") is not None:
        _torchvision()  # which the other libraries import
    names = names_of(library)
    print(json.dumps(names), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(build(library, line.strip())), file=answers, flush=True)


# In the parent


class Worker:
    """A process that builds models of one library."""

    def __init__(self, library: str) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", library], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, bufsize=1,
        )  # fmt: skip
        names = self.answer(START_SECONDS)
        if names is None:
            self.end()
            raise SystemExit(f"{library} was not imported; try: {sys.executable} {__file__} --serve {library}")
        self.names: list[str] = names

    def answer(self, limit: float) -> Any:
        """The next line, or None if none comes in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        line = self.process.stdout.readline() if ready else ""
        return json.loads(line) if line else None

    def build(self, name: str, limit: float) -> Result | None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        answer = self.answer(limit)
        return None if answer is None else Result(*answer)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def results_of(library: str, models: int, limit: float) -> Iterator[Result]:
    """Build so many models of a library, taken evenly from its list."""
    worker = Worker(library)
    names = worker.names
    if models and len(names) > models:
        names = [names[at * len(names) // models] for at in range(models)]
    for name in names:
        result = worker.build(name, limit)
        if result is None:
            ended = worker.process.poll() is not None
            worker.end()
            reason = "its process ended" if ended else f"not built after {limit:.0f} s"
            result, worker = Result(name, limit, error=reason), Worker(library)
        print(f"{library} {result.name} {result.seconds:.1f} s {result.error}", file=sys.stderr, flush=True)
        yield result
    worker.end()


def section(library: str, results: Sequence[Result]) -> str:
    """The part of the page about one library."""
    built = [result for result in results if not result.error]
    own = Counter(result.error.partition(":")[0] for result in results if result.is_own)
    rejected = [result for result in results if result.error and not result.is_own]
    seconds = [result.seconds for result in built] or [0.0]
    lines = [
        f"## {library} {version(library)}\n",
        f"{len(built)} of {len(results)} models were built, in {statistics.median(seconds):.2f} s at the median and "
        f"{max(seconds):.1f} s at most. {sum(own.values())} fail without a dry run as well"
        + (f" ({', '.join(f'{name}: {count}' for name, count in own.most_common())})" if own else "")
        + f". The dry run rejected {len(rejected)}.\n",
        "| slowest | s | parameters, M | operators |\n|---|---|---|---|",
    ]
    slowest = sorted(built, key=lambda result: -result.seconds)[:SLOWEST]
    lines += [f"| {r.name} | {r.seconds:.1f} | {r.parameters / 1e6:,.1f} | {r.operators:,} |" for r in slowest]
    if rejected:
        lines += ["\n| rejected | s | reason |\n|---|---|---|"]
        lines += [f"| {r.name} | {r.seconds:.1f} | {r.error.replace('|', '/')} |" for r in rejected]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument("--models", type=int, default=60, help="models per library; 0 for all")
    options.add_argument("--limit", type=float, default=60.0, help="seconds for one model")
    options.add_argument("--library", nargs="*", default=list(LIBRARIES), choices=LIBRARIES)
    options.add_argument("-o", "--output", type=Path, default=ROOT / "docs/constructors.md")
    options.add_argument("--serve", default="", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.serve:
        serve(chosen.serve)
        return
    page = INTRODUCTION.format(
        date=date.today().isoformat(), torch=version("torch"), cores=os.cpu_count(), limit=chosen.limit
    )
    for library in chosen.library:
        if find_spec(library) is not None:
            page += "\n" + section(library, list(results_of(library, chosen.models, chosen.limit)))
    chosen.output.write_text(page)


if __name__ == "__main__":
    main()
