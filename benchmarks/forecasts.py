"""Measure the accuracy of predictions from descriptions, and write the page docs/forecasts.md.

python benchmarks/forecasts.py [--data ../shared/data] [-o docs/forecasts.md]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PUBLISHED = """
Step times of published training runs: dense pretraining, mixtures of experts and fine-tuning, each a source of its own.
Every source is predicted with constants and intervals fitted without the publication that it is from
(`calibration/fit_in_step.py`, `calibration/fit_uncertainty.py`). Three constants are fitted in all, and the second
table says what each is worth. What frameworks do is data (`src/lumos/data/frameworks.toml`), written from their sources
and documentation with these runs in view. The class of nanotron's network (EFA) is an inference. Bias is that of the
geometric mean of predicted over measured time: negative where Lumos is too fast. Peers are as measured by others on the
same rows (calculon, llm-analysis); bars are ours."""
TEN = """
The runs of arXiv 2509.22832, predicted by `lumos fit` on that paper's operator and NCCL samples and `lumos predict
examples/neox/NAME.toml --model FILE`. Nothing was fitted on the runs, but three details of GPT-NeoX that change little
were left out with their errors in view. The last column is without a model file of the cluster: A100 with
`cluster.fabric = "sockets"`, since NCCL ran over TCP on Perlmutter, and GH200 on InfiniBand."""
H200 = """
Models of transformers trained on one GPU. In-step factors were fitted on our own steps (`calibration/fit_steps.py`),
none of which is in the table; the speed of the reference host is the middle of the hosts we saw, these included."""
PAIRS = """
Published runs of one source that differ in nothing but the GPU: the ratio of their step times, predicted against
measured. Sources are held out as above; what was assumed of a run is the same on both GPUs."""
MEMORY = """
Peak memory, and whether a run fits."""
SECTIONS = [
    ("Published runs", "truth.py --constants", "truth", PUBLISHED),
    ("Ten runs from their own samples", "ten_runs.py", "operators", TEN),
    ("One H200", "h200_forecasts.py", "", H200),
    ("GPUs compared", "gpu_pairs.py", "truth", PAIRS),
    ("Memory", "memory.py", "", MEMORY),
]


def section(title: str, script: str, folder: str, words: str, data: Path) -> str:
    name, *options = script.split()
    arguments = [sys.executable, str(HERE / name), *options] + ([str(data / folder)] if folder else [])
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=HERE.parent)
    return f"## {title}\n{words}\n\n{_as_part(done.stdout.strip())}\n"


def _as_part(text: str) -> str:
    """What a script prints, as a part of a page: a page of its own loses its title, and its headings go one deeper."""
    if not text.startswith("# "):
        return text
    return re.sub(r"^(#+ )", r"#\1", text.partition("\n")[2].strip(), flags=re.MULTILINE)


def write_page(title: str, sections: list[tuple[str, str, str, str]]) -> None:
    """Print a page of what scripts print, and write it where the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared/data")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    parts = [section(*entry, options.data) for entry in sections]
    text = f"# {title}\n\nWritten by `make accuracy`.\n\n" + "\n".join(parts)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    write_page("Accuracy of predictions from descriptions", SECTIONS)
