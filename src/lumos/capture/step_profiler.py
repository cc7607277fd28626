"""StepProfiler: torch.profiler with the options that Lumos needs, and marks of steps."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from lumos.capture.rank_info import synchronise

_PACKING = 6  # of gzip: smaller files cost seconds of a training run that waits


class StepProfiler:
    """Records marked steps of this process. Its methods are called in the order in which they are defined."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._mark: Any = None
        self._name = ""
        self._records = False

    def prepare(self) -> None:
        """Warm the profiler up: its first step is slow."""
        from torch.profiler import ProfilerActivity, profile

        _refuse_a_second_profiler()
        self._profile = profile(
            activities=[getattr(ProfilerActivity, name) for name in _activities()], record_shapes=True,
            with_stack=False, profile_memory=False, experimental_config=_sync_events(),
        )  # fmt: skip
        with warnings.catch_warnings():  # torch warns about cycles, and this is the only one
            warnings.simplefilter("ignore")
            self._profile.prepare_trace()

    def begin(self, number: int) -> None:
        """Record from here; what was launched before is not in it."""
        if self._profile is None:  # the start of the loop was not marked
            self.prepare()
        _refuse_a_second_profiler()
        synchronise()
        self._profile.start_trace()
        self._records = True
        self._open(number)

    def next_step(self, number: int) -> None:
        self._close()
        self._open(number)

    def end(self) -> None:
        """Stop; torch waits for what was launched."""
        self._stop()

    def abandon(self) -> None:
        """Stop, keeping nothing. A profiler that has stopped is never touched again: torch may crash."""
        if self._records:
            self._stop()
        self._profile = None

    def cancel(self) -> None:
        """Give up before the recording began; a profiler that was only prepared must be started to be stopped."""
        if self._profile is not None and not self._records:
            self._profile.start_trace()
            self._records = True
        self.abandon()

    def save(self, path: Path, unfinished: bool = False) -> None:
        """Write the trace under its name only when it is whole; `unfinished` leaves the last step's mark out."""
        plain, packed = (path.with_name(f".{path.name}.{os.getpid()}.{part}") for part in ("plain", "partial"))
        try:
            self._profile.export_chrome_trace(str(plain))
            if not plain.exists():  # Kineto reports no error, and leaves what it wrote
                raise OSError(f"{path} cannot be written: is its disk full?")
            if unfinished:
                _drop_mark(plain, self._name)
            with plain.open("rb") as source, gzip.open(packed, "wb", _PACKING) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.replace(packed, path)
        finally:
            for left in (plain, plain.with_name(f"{plain.name}.tmp"), packed):
                left.unlink(missing_ok=True)
        self._profile = None  # its events are large

    def _stop(self) -> None:
        self._close()
        self._records = False
        self._profile.stop_trace()

    def _open(self, number: int) -> None:
        from torch.profiler import record_function

        self._name = f"ProfilerStep#{number}"
        self._mark = record_function(self._name)
        self._mark.__enter__()

    def _close(self) -> None:
        if self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(None, None, None)


def _refuse_a_second_profiler() -> None:
    """Before anything is started: the script's own recording must not suffer."""
    import torch

    if getattr(torch.autograd, "_profiler_enabled", bool)():
        raise RuntimeError("another profiler of torch is recording")


def _activities() -> list[str]:
    """CPU, and the kinds of GPU that this machine has."""
    import torch

    names = ["CPU"]
    if torch.cuda.is_available():
        names.append("CUDA")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        names.append("XPU")
    return names


def _sync_events() -> Any:
    """The option that records which streams wait for which, if this torch has it."""
    import torch

    try:
        return torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    except (AttributeError, TypeError):
        return None


def _drop_mark(path: Path, name: str) -> None:
    """Without the mark of a step that did not end: it would count as a step."""
    content = json.loads(path.read_bytes())
    content["traceEvents"] = [event for event in content["traceEvents"] if event.get("name") != name]
    path.write_text(json.dumps(content))
