"""--risk and --slow of `lumos predict`: the distribution of the step, and slow parts of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lumos.analysis.run import TracedRun
from lumos.cli.loading import load_run
from lumos.cli.options import RiskOptions
from lumos.cli.terminal import busy
from lumos.errors import OptionError
from lumos.graph.graph import Floats
from lumos.prediction.prediction import Prediction
from lumos.risk.learn import learn, learn_trace, traced_risk
from lumos.risk.monte_carlo import StepRisk, slowed, step_risk
from lumos.risk.whole_run import DRAWS as RUNS

_DRAWS, _MOST_DRAWS = 10_000, 1_000_000


class AskedRisk(NamedTuple):
    """What --risk and --slow add to an answer."""

    risk: StepRisk | None = None
    slow: Sequence[dict[str, Any]] = ()

    def run_factors(self, found: Prediction) -> Floats | None:
        """Of drawn runs to a token budget, if there is one: their mean step over the predicted one."""
        return None if self.risk is None or found.tariff.tokens is None else self.risk.run_factors(RUNS)

    def as_dict(self) -> dict[str, Any]:
        """Keys of the JSON."""
        found = {} if self.risk is None else {"risk": self.risk.as_dict()}
        return found | ({"slow": list(self.slow)} if self.slow else {})


def refuse_risk(options: RiskOptions, gpus: list[str]) -> None:
    """Refuse --risk and --slow where several GPUs are compared."""
    if len(gpus) > 1 and (options.risk or options.slow):
        given = "--risk" if options.risk else "--slow"
        raise OptionError(f"{given} and --gpu {','.join(gpus)[:100]}: steps are drawn for one GPU; name one")
    if options.variability is not None and not options.risk:
        raise OptionError(f"--variability {options.variability}: it says how much steps differ: add --risk")
    if options.draws is not None and not options.risk:
        raise OptionError(f"--draws {options.draws}: it says how many steps --risk draws: add --risk")
    _draws(options)


def asked_risk(found: Prediction, options: RiskOptions) -> tuple[Prediction, AskedRisk]:
    """The prediction with its slow parts, and the risk of its step, as far as they were asked for."""
    texts = options.slow or []
    changed, costs = slowed(found, texts)
    if not options.risk:
        return changed, AskedRisk(None, costs)
    learned = None if options.variability is None else learn(options.variability, load_run)
    with busy("drawing steps"):
        if isinstance(found.run, TracedRun) and found.replayed is not None:  # not of a dry run
            risk = traced_risk(found, learned, _draws(options))
        else:
            if learned is None and found.traced is not None:
                learned = learn_trace(found.traced.run)
            risk = step_risk(found, learned, texts, _draws(options))
        _ = risk.causes
    return changed, AskedRisk(risk, costs)


def _draws(options: RiskOptions) -> int:
    draws = _DRAWS if options.draws is None else options.draws
    if not 1 <= draws <= _MOST_DRAWS:
        raise OptionError(f"--draws {draws}: draw 1 to {_MOST_DRAWS:,} steps, {_DRAWS:,} as usual")
    return draws
