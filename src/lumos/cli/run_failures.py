"""--mtbf and --deadline of `lumos predict`: the whole run to a token budget, with failures."""

from __future__ import annotations

from collections.abc import Sequence

from lumos.cli.options import ReliabilityOptions
from lumos.cli.terminal import busy
from lumos.errors import OptionError
from lumos.graph.graph import Floats
from lumos.prediction.prediction import Prediction
from lumos.risk.whole_run import WholeRun, whole_run
from lumos.setup.messages import did_you_mean
from lumos.setup.reliability import RATES

_HOW_OFTEN = ("reliability.rates", "reliability.mtbf_gpu_hours", "reliability.mtbf_job_hours")
_ALIKE = 0.6  # of a name that is taken for a slip: names of rates are short
_SLIP_HOURS = 100.0  # between failures of one GPU: less is meant for a whole job


def failure_changes(
    options: ReliabilityOptions, tokens: str, gpus: Sequence[str], changes: Sequence[str] = ()
) -> list[str]:
    """What --mtbf is short for, as --set takes it; or OptionError where the options do not go together.

    `changes` are those of --set.
    """
    if options == ReliabilityOptions():
        return []
    given = "--deadline" if options.mtbf is None else "--mtbf"
    if not tokens:
        raise OptionError(f"{given} needs the length of the run: add the tokens to train on, as in --tokens 15T")
    if len(gpus) > 1:
        raise OptionError(f"{given} and --gpu {','.join(gpus)[:100]}: failures are drawn for one GPU; name one")
    _deadline(options)
    if options.mtbf is None:
        return []
    for text in changes:
        if text.partition("=")[0].strip() in _HOW_OFTEN:
            both = f"--mtbf {options.mtbf[:100]} and --set {text[:100]}"
            raise OptionError(f"{both}: both say how often the job fails: leave one out")
    key, value = ("rates", options.mtbf) if options.mtbf in RATES else ("mtbf_gpu_hours", _hours(options.mtbf))
    return [f"{one}={value if one == f'reliability.{key}' else ''}" for one in _HOW_OFTEN]


def _hours(text: str) -> float:
    try:
        hours = float(text.replace(",", ""))
    except ValueError:
        raise OptionError(
            f"--mtbf {text[:100]!r} is neither a number of GPU-hours between failures, as in 50000, nor known rates: "
            f"{did_you_mean(text, RATES, _ALIKE)}"
        ) from None
    if not 0 < hours <= 1e12:
        raise OptionError(f"--mtbf {text[:100]!r}: give the GPU-hours between two failures, more than 0, as in 50000")
    if hours < _SLIP_HOURS:
        raise OptionError(
            f"--mtbf {text[:100]} says that every GPU fails in {hours:g} hours: give GPU-hours, as in 50000, or the "
            f"hours between failures of the whole job with --set reliability.mtbf_job_hours={hours:g}"
        )
    return hours


def _deadline(options: ReliabilityOptions) -> float | None:
    if options.deadline is None:
        return None
    try:
        days = float(options.deadline)
    except ValueError:
        days = 0.0
    if not 0 < days <= 1e6:
        raise OptionError(f"--deadline {options.deadline[:100]!r} is not a number of days: give one, as in 90")
    return days


def asked_run(found: Prediction, options: ReliabilityOptions, step_factors: Floats | None = None) -> WholeRun | None:
    """The run to its last token, where it was asked for: by --mtbf, --deadline, --risk or a setup, with --tokens."""
    stated = found.setup is not None and found.setup.reliability.is_stated
    asked = options != ReliabilityOptions() or stated or step_factors is not None
    if not asked or found.tariff.tokens is None:
        return None
    with busy("drawing runs with failures"):
        run = whole_run(found, step_factors, _deadline(options))
        _ = run.runs
    return run
