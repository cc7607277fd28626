"""Measure the accuracy of the energy of a step, and write the page docs/energy.md.

python benchmarks/energy.py [--data ../shared/data] [-o docs/energy.md]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "calibration"))

from fit_energy import (  # noqa: E402
    BUSY_W,
    GPU,
    START,
    Case,
    Constants,
    Fixed,
    Loop,
    fit,
    fixed_of,
    joules_in,
    loops_of,
    own_cases,
    read_rows,
    shared_cases,
)

INTRODUCTION = f"""# Energy

Written by `make accuracy`. Joules of training steps on one H200, by the board's own counter: {{sources}}.

*Power alone* uses the measured time of the step; *all predicted* is what `lumos predict` says of the setup,
on a host of speed 1. A step is bound by the GPU where the board draws more than {BUSY_W:.0f} W. Five
constants are fitted; the form of the model was tuned on all these steps.

What is not measured: any GPU but the H200, on which an operation is taken to cost the same energy, or at the peak the
same share of the power where that is more, and a byte the same energy; power limits other than the usual one;
collectives, which are priced as copies by small kernels and a recalled figure for the links; and the rest of the
machine, which `--pue` may stand for: a node of eight H100 drew 8.4 kW at most (arXiv 2412.08602), where its GPUs may
draw 5.6. Left out are our steps that no setup describes (models written by hand,
experts in a Python loop, the optimizer without fused kernels). The preset says 124 W idle; one board drew 119 W before
its work and 122 W after it. Published for another model of power, of whole nodes: 11.4 % mean (arXiv 2506.14551).
"""
NAMES = {
    "steps": "`calibration/steps_h200.jsonl`", "launch-bound": "the steps of `calibration/power_h200.jsonl`",
    "shared": "the shared measurements",
}  # fmt: skip
Guess = Callable[[Case, float], float]  # joules of a case, were its step so long


class Errors:
    """Errors of power alone and of everything predicted, in percent, case by case."""

    def __init__(self, cases: list[Case], guesses: list[Guess]) -> None:
        self.cases = cases
        self.alone = [100 * (g(c, c.seconds) / c.joules - 1) for c, g in zip(cases, guesses, strict=True)]
        self.all = [100 * (g(c, c.predicted_s) / c.joules - 1) for c, g in zip(cases, guesses, strict=True)]

    def row(self, title: str, busy: bool) -> str:
        chosen = [i for i, case in enumerate(self.cases) if (case.watts > BUSY_W) == busy]
        if not chosen:
            return ""
        cells = []
        for errors in (self.alone, self.all):
            sizes = [abs(errors[i]) for i in chosen]
            cells += [f"{np.mean(sizes):.1f}", f"{max(sizes):.1f}"]
        return f"| {title} | {'GPU' if busy else 'host'} | {len(chosen)} | {' | '.join(cells)} |"

    def rows(self, title: str) -> Iterator[str]:
        yield from filter(None, (self.row(title, busy) for busy in (False, True)))


def by_constants(found: Constants, fixed: Fixed) -> Guess:
    return lambda case, seconds: joules_in(case, found, fixed, seconds)


def leave_one_out(cases: list[Case], loops: list[Loop], fixed: Fixed) -> Errors:
    guesses = []
    for held in cases:
        guesses.append(by_constants(fit([case for case in cases if case is not held], loops, fixed), fixed))
    return Errors(cases, guesses)


def tables(cases: list[Case], loops: list[Loop], fixed: Fixed) -> Iterator[str]:
    yield "| constants from | bound by | steps | power alone, mean % | worst % | all predicted, mean % | worst % |"
    yield "|---|---|---|---|---|---|---|"
    own = [case for case in cases if case.source != "shared"]
    others = [case for case in cases if case.source == "shared"]
    no_steps = fit([], loops, fixed)._replace(limit_share=Constants(*START).limit_share)
    yield from _told(cases, lambda case, seconds: GPU.tdp_w * seconds, "(for comparison: the limit, all the time)")
    yield from _told(cases, by_constants(no_steps, fixed), "single operators alone, and 99 % of the limit")
    if others:
        yield from _told(others, by_constants(fit(own, loops, fixed), fixed), "operators and our steps, for the shared")
        yield from _told(own, by_constants(fit(others, loops, fixed), fixed), "operators and shared steps, for ours")
    held = leave_one_out(cases, loops, fixed)
    yield from held.rows("operators and every other step")
    yield ""
    yield f"Bar: GPU-bound steps, all predicted, leave-one-out: mean 10 % or less. {_verdict(held)}"
    yield "\n## Every step, constants fitted without it\n"
    yield "| step | source | bound by | W | J | power alone, % | measured ms | predicted ms | all predicted, % |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for i in sorted(range(len(cases)), key=lambda i: -abs(held.all[i])):
        c, bound = cases[i], "GPU" if cases[i].watts > BUSY_W else "host"
        yield (
            f"| {c.name} | {c.source} | {bound} | {c.watts:.0f} | {c.joules:.2f} | {held.alone[i]:+.1f} | "
            f"{1e3 * c.seconds:.1f} | {1e3 * c.predicted_s:.1f} | {held.all[i]:+.1f} |"
        )


def _told(cases: list[Case], guess: Guess, title: str) -> Iterator[str]:
    return Errors(cases, [guess] * len(cases)).rows(title)


def _verdict(held: Errors) -> str:
    errors = [abs(held.all[i]) for i, case in enumerate(held.cases) if case.watts > BUSY_W]
    return f"Measured: {np.mean(errors):.1f} %, over {len(errors)} steps."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows = read_rows(HERE.parent / "calibration/power_h200.jsonl")
    fixed = fixed_of(rows)
    cases = own_cases() + shared_cases(options.data)
    counts = {source: sum(case.source == source for case in cases) for source in NAMES}
    sources = ", ".join(f"{count} of {NAMES[source]}" for source, count in counts.items() if count)
    lines = tables(cases, loops_of(rows, fixed), fixed)
    text = INTRODUCTION.format(sources=sources) + "\n" + "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
