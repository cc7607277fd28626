"""How long reports take to be written, how large they are, and when a browser has them ready.

python benchmarks/report_speed.py [docs/report_speed.md]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from report_pages import EXAMPLE, LLAMA, ROOT, searched

sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser, find_browser, open_browser
from lumos import read_job, replay
from lumos.prediction.prediction import predict
from lumos.report.html.page import Page, write_page
from lumos.report.html.prediction_page import prediction_page
from lumos.report.html.replay_page import replay_page
from lumos.report.html.search_page import search_page
from lumos.setup import read_setup

DATA = ROOT.parent / "shared/data"
TRACES = {
    "one rank, a real trace": DATA / "public/hta/df_index_resolver/df_index_resolver.json.gz",
    "8 ranks, a real trace": DATA / "public/megatron_tp8_a100/kineto",
    "the example, 4 ranks": EXAMPLE,
}
MOST_MB, MOST_SECONDS = 6, 3
MARKS = ("ready", "unpacked", "drawn")
SAID = (
    "Writing is counted from the finished replay to the closed file. `ready` is when tables and filters answer and all "
    "charts are there as pictures; then interactive charts are asked for at once: `unpacked` is when plotly has "
    "started, during which the page does not answer, `drawn` when the last chart is interactive; all from the start of "
    "loading, in headless Chromium on this machine."
)


def cases() -> Iterator[tuple[str, Callable[[], Page]]]:
    for name, path in TRACES.items():
        if not path.exists():
            print(f"skipped: {path} is not there", file=sys.stderr)
            continue
        run = replay(read_job(path))
        _ = run.path_summary, run.clean_ms, run.never_profiled_ms
        yield f"replay of {len(run.execution.graph):,} tasks ({name})", lambda run=run: replay_page(run)
    found = predict(read_setup(LLAMA))
    yield f"prediction for {found.setup.cluster.gpus} GPUs", lambda: prediction_page(found)
    answer = searched()
    yield f"search of {answer['evaluated']:,} configurations", lambda: search_page(answer)


def row(name: str, make: Callable[[], Page], folder: Path, browser: Browser | None) -> str:
    path = folder / "page.html"
    start = time.perf_counter()
    write_page(path, make())
    seconds = time.perf_counter() - start
    size = path.stat().st_size / 1e6
    holds = "yes" if size <= MOST_MB and seconds <= MOST_SECONDS else "**no**"
    return f"| {name} | {seconds:.2f} | {size:.2f} | {holds} | {' | '.join(in_browser(path, browser))} |"


def in_browser(path: Path, browser: Browser | None) -> list[str]:
    if browser is None:
        return ["not measured"] * len(MARKS)
    with browser.open(path) as tab:
        tab.draw_charts()
        times = [tab.value(f"performance.getEntriesByName('{mark}')[0].startTime") for mark in MARKS]
    return [f"{time / 1e3:.2f}" for time in times]


def table(browser: Browser | None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, make, Path(folder), browser) for name, make in cases()]
    bar = f"≤ {MOST_SECONDS} s, ≤ {MOST_MB} MB"
    head = f"| report | written, s | MB | {bar} | ready, s | unpacked, s | drawn, s |\n|{'---|' * 7}\n"
    load = os.getloadavg()[0]
    return (
        f"# How large and how fast reports are\n\nWritten by `make bench`. {SAID}\n"
        f"Two megabytes of every file are plotly's script. {os.cpu_count()} cores, load {load:.1f} at the end: with "
        f"more load than cores, browser times are too long.\n\n{head}" + "\n".join(rows) + "\n"
    )


def main(output: str = "") -> None:
    if find_browser():
        with open_browser() as browser:
            text = table(browser)
    else:
        text = table(None)
    print(text)
    if output:
        Path(output).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
