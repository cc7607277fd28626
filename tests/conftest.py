"""Fixtures: where the shared measurements are, and a writer of synthetic traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from support import Event, Header, Layout, write_trace

settings.register_profile(
    "lumos",
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("lumos")

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The measurements beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared measurements (../shared/data beside the checkout) are not on this machine")
    return folder


@pytest.fixture(scope="session")
def fake_gpu_known() -> None:
    """For tests that run a backward pass on the CPU in this process.

    With its first backward pass, torch starts threads for the devices that are there, once and for all. Dry runs, which
    other tests make later, need one for their fake GPU.
    """
    torch = pytest.importorskip("torch")
    from lumos import dry_run

    def train() -> None:
        layer = torch.nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(3):
            layer(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()

    dry_run(train)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(events, header, name=…, layout=…): a trace file in the test's own folder."""

    def to_file(
        events: list[Event], head: Header | None = None, name: str = "trace.json", layout: Layout = "pretty"
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_trace(path, events, head, layout)

    return to_file


LONGEST_FIRST = (
    "test_search", "test_docs", "test_calibration", "test_inference", "test_sampling", "test_engines", "test_stranger",
    "test_capture", "test_fuzz", "test_dry_run", "test_bad_input", "test_dry_script", "test_fit", "test_risk",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first, so that no core waits for the last of them; the order within a file stays."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were skipped, each reason once: a run without the shared measurements must not look complete."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
