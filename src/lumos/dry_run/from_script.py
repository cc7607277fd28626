"""`lumos predict --from DIR`, where DIR holds a dry run of a user's own script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lumos.arguments import checks_arguments
from lumos.costs.kernel_work import matrix_operator, runs_kernel
from lumos.dry_run.dry_files import read_recordings
from lumos.dry_run.dry_prediction import STAND_IN, DryPrediction, dry_prediction
from lumos.dry_run.recorded_step import Recording
from lumos.errors import OptionError
from lumos.prediction.bill import Tariff
from lumos.prediction.prediction import NO_PRICES
from lumos.setup.gpus import find_gpu, gpu_called
from lumos.setup.setup import SECTIONS, STEP_SECTIONS
from lumos.setup.setup_files import read_plain

_FREE = ("cluster", *(name for name in SECTIONS if name not in STEP_SECTIONS))  # sections that a dry run leaves open


def predict_script(path: Path, changes: Sequence[str], tariff: Tariff) -> DryPrediction:
    """Predict a dry run on a cluster; of several ranks, the one that takes longest decides."""
    return slowest_rank(read_recordings(path), changes, tariff)


def slowest_rank(recordings: Sequence[Recording], changes: Sequence[str], tariff: Tariff) -> DryPrediction:
    """The prediction of the rank that takes longest."""
    found = [predict_recording(recording, changes, tariff) for recording in recordings]
    return max(found, key=lambda prediction: prediction.step_ms)


@checks_arguments
def predict_recording(
    recording: Recording, changes: str | Sequence[str] = (), tariff: Tariff = NO_PRICES
) -> DryPrediction:
    """Predict one rank's dry run on the cluster that `changes` name, as in ("cluster.gpu=h200",)."""
    plain = read_plain(None, changes)
    for section, values in plain.sections.items():
        if section not in _FREE and values:
            raise OptionError(
                f"{section}.{next(iter(values))}: a dry run has the sizes of its script: change the script, and run "
                "lumos capture --dry again; cluster keys can be set here"
            )
    cluster = dict(plain.sections.get("cluster") or {})
    gpus = cluster.setdefault("gpus", recording.world)
    if gpus != recording.world:
        raise OptionError(
            f"cluster.gpus = {gpus}: the dry run is of a job of {recording.world}: "
            f"run lumos capture --dry --world {gpus} again"
        )
    notes = []
    if "gpu" not in cluster and not cluster.get("model"):
        met = gpu_called(recording.made_by.get("gpu", ""))
        cluster["gpu"] = met.name if met else "h100"
        notes.append(f"cluster.gpu is not given: assuming {cluster['gpu']}{', which the script found' if met else ''}")
    train = {"seq": 1, "precision": _precision(recording, str(cluster.get("gpu") or cluster.get("model")))}
    sections = {"model": STAND_IN, "train": train, "parallel": {"dp": recording.world}, "cluster": cluster}
    sections |= {name: plain.sections[name] for name in _FREE[1:] if name in plain.sections}
    reading = plain.checked(sections)
    version = recording.made_by.get("torch", "")
    notes = [*reading.notes, *notes, f"dry run of rank {recording.rank} of {recording.world}: torch {version}"]
    if recording.world > 1:
        notes.append("other ranks are taken to arrive at every collective at the same time")
    if any(op.name in ("send", "recv") for op in recording.ops):
        notes.append("a stage of a pipeline alone: the time that it waits for other stages is not included")
    return dry_prediction(recording, reading.setup, tuple(notes), tariff)


def _precision(recording: Recording, gpu: str) -> str:
    """The precision of most of the work of matmuls and attention: its peak is the denominator of MFU and HFU."""
    flops: Counter[str] = Counter()
    for op in recording.ops:
        found = matrix_operator(op) if runs_kernel(op) else None
        if found is not None and found.is_matrix:
            flops[found.dtype] += round(found.flops)
    known = find_gpu(gpu)
    if not flops:  # nothing depends on it: any that the GPU has
        return "bf16" if known is None or known.supports("bf16") else known.precisions[0]
    precision = flops.most_common(1)[0][0]
    return precision if known is not None and known.supports(precision) else "bf16"
