"""Pictures of the reports for the documentation, taken in a real Chromium.

python benchmarks/screenshots.py [docs/screenshots]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from report_pages import ROOT, every_kind

sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser, find_browser, open_browser
from lumos.report.html.page import Page, write_page

SIZE, SCALE = (1280, 1400), 0.65
LARGEST = 150_000  # bytes of a picture
DARK = ("replay", "forecast")


def take(browser: Browser, page: Page, to: Path, scheme: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        write_page(path, page)
        with browser.open(path, scheme=scheme, size=SIZE) as tab:
            tab.size(*SIZE, SCALE)
            tab.draw_charts()
            tab.value("document.querySelectorAll('.modebar').forEach(bar => bar.remove())")
            tab.screenshot(to)
    size = to.stat().st_size
    print(f"{to}  {size / 1e3:.0f} KB{'  TOO LARGE' if size > LARGEST else ''}")


def main(folder: str = str(ROOT / "docs/screenshots")) -> None:
    if not find_browser():
        raise SystemExit("no Chromium on this machine; on Debian: apt-get install chromium")
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        for name, page in every_kind().items():
            take(browser, page, Path(folder) / f"{name}.png", "light")
            if name in DARK:
                take(browser, page, Path(folder) / f"{name}-dark.png", "dark")


if __name__ == "__main__":
    main(*sys.argv[1:])
