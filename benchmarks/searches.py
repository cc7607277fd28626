"""Measure the regret of searches, and write the page docs/searches.md.

python benchmarks/searches.py [--data ../shared/data] [-o docs/searches.md]
"""

from __future__ import annotations

from forecasts import write_page

REGRET = """
For every group of published runs of one model, number of GPUs and batch: the measured step time of the configuration
that we rank first, over the best measured. The constants of `in_step.json` are those fitted without the group's
source. **What nanotron overlaps was tuned on these figures**; what other frameworks do was tuned on the runs of
docs/forecasts.md.
Runs of the sweep are erratic: `stable` ones were repeated with agreeing times. Where even those stalled (512 GPUs), the
choice among them cannot be predicted. vTrain has three groups; in one of them we rank the third first."""
CHOICES = """
All configurations in which one H200 can train the same batch of six models. Measured after everything that predicts
them was fixed; nothing was fitted on them."""
SECTIONS = [("Regret on published runs", "regret.py", "truth", REGRET), ("One H200", "choices.py", "", CHOICES)]


if __name__ == "__main__":
    write_page("Regret of searches", SECTIONS)
