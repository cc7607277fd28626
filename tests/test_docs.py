"""The documentation is true: its examples run and print what it shows, its quotes and links hold, its names exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lumos
from lumos.cli.main import COMMANDS
from support import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


examples, site, api_page = script("examples"), script("build"), script("api_page")
PAGES: list[Path] = examples.pages()
WRITTEN = [page for page in PAGES if "Written by `" not in page.read_text("utf-8")[:400]]  # by hand
RECORDS = DOCS / "capture.md"  # its Python trains something: it is run apart
SHELL = [example for page in PAGES for example in examples.examples_of(page) if example.language == "sh"]


def as_parameter(example: Any) -> Any:
    return pytest.param(example, id=example.name, marks=[pytest.mark.slow] if example.slow else [])


# ---------------------------------------------------------------------- examples
@pytest.mark.parametrize("example", [as_parameter(example) for example in SHELL])
def test_a_command_runs_and_prints_what_the_page_shows(example: Any) -> None:
    (ROOT / "out").mkdir(exist_ok=True)
    assert examples.stale_lines(example, examples.printed_by(example)) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != RECORDS], ids=lambda page: page.name)
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for example in examples.examples_of(page):
        if example.language == "python":
            assert examples.stale_lines(example, examples.printed_by(example, namespace)) == []


@pytest.mark.slow
def test_the_python_of_the_page_on_recording_records(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch, the extra [capture]")
    (tmp_path / "run.toml").write_text((ROOT / "examples/one-h200.toml").read_text("utf-8"))
    given = "import torch\ndata = range(9)\ndef train(batch): torch.ones(8, 8) @ torch.ones(8, 8)\n"
    code = given + "\n".join(e.code for e in examples.examples_of(RECORDS) if e.language == "python")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == [
        "capture.json", "rank0.pt.trace.json.gz", "setup.toml",
    ]  # fmt: skip


def test_the_first_thing_a_newcomer_runs_works_in_a_new_process() -> None:
    done = subprocess.run([sys.executable, "-m", "lumos.cli.main", "demo"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "which rank is slow" in done.stdout


def lines_that_are_not_run() -> Iterator[tuple[str, str]]:
    """(page, command) of blocks without a language, and of code inside sentences."""
    for page in WRITTEN:
        for _, language, content in examples.fences(page):
            if not language:
                yield from ((page.name, line) for line in content if line.startswith("lumos "))
        prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        yield from ((page.name, " ".join(code.split())) for code in re.findall(r"`(lumos [^`]+)`", prose))


def test_options_named_anywhere_exist() -> None:
    commands = {name: command.load(name) for name, command in COMMANDS.items()}
    seen = 0
    for page, line in lines_that_are_not_run():
        words = shlex.split(line.replace("'", "").replace("\\", ""))
        if words[1].isupper() or words[1].startswith("-"):
            continue
        assert words[1] in commands, (page, line)
        known = {name for option in commands[words[1]].params for name in (*option.opts, *option.secondary_opts)}
        own = words[2 : words.index("--")] if "--" in words else words[2:]
        for word in own:
            if re.match(r"--?[a-z]", word):
                seen += 1
                assert word in known | {"--help"}, (page, line)
    assert seen > 20


def test_the_keys_of_the_json_are_those_that_the_page_lists() -> None:
    (ROOT / "out").mkdir(exist_ok=True)
    text = (DOCS / "commands.md").read_text("utf-8")
    rows = re.findall(r"^\| `(lumos [^`]*)` \| `([^`]*)` \|$", text, re.MULTILINE)
    assert len(rows) >= 9
    for command, keys in rows:
        answer = json.loads("\n".join(examples._run(f"{command} --json")))
        assert ", ".join(answer) == keys, command


# ---------------------------------------------------------------------- what examples.py itself must notice
def shown(*lines: str) -> Any:
    return examples.Example(DOCS / "x.md", 1, "sh", "", list(enumerate(lines, 1)))


def test_a_shown_line_must_be_printed_in_that_order() -> None:
    printed = ["step   1.0 ms", "memory  2 GiB  fits", "note"]
    assert examples.stale_lines(shown("step 1.0 ms", "…", "note"), printed) == []
    assert examples.stale_lines(shown("memory 2 …"), printed) == []
    assert examples.stale_lines(shown("step 1.1 ms"), printed) == [(1, "step 1.1 ms")]
    assert examples.stale_lines(shown("note", "step 1.0 ms"), printed) == [(2, "step 1.0 ms")]


def test_what_is_printed_now_is_found_for_a_line_with_old_numbers() -> None:
    printed = ["peak memory  5 GiB", "step   12.5 ms  10 – 15 ms"]
    assert examples._nearest("step 11.0 ms 9 – 14 ms", printed) == printed[1]
    assert examples._nearest("something else entirely", printed) == ""


def test_a_command_that_fails_otherwise_than_the_page_says_is_noticed() -> None:
    with pytest.raises(AssertionError, match="exit code 2, not 0"):
        examples._run("lumos replay README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quotes_are_word_for_word(page: Path) -> None:
    for quote in examples.quotes_of(page):
        assert examples.stale_quotes(quote) == [], f"not in {quote.source.name}; python docs/examples.py --refresh"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_prose_are_those_of_the_output_above(page: Path) -> None:
    stale = examples.prose_changes(page.read_text("utf-8").splitlines())
    assert stale == {}, "python docs/examples.py --refresh"


def test_numbers_in_prose_follow_the_output() -> None:
    prose = "<!-- percent: step (\\d+) -->5 %<!-- --> <!-- value: step (\\d+) -->1<!-- -->"
    lines = ["```text", "step 10 s", "step 12 s", "```", prose]
    expected = "<!-- percent: step (\\d+) -->20 %<!-- --> <!-- value: step (\\d+) -->12<!-- -->"
    assert examples.prose_changes(lines) == {5: expected}


def test_a_quote_is_of_the_part_that_it_names(tmp_path: Path) -> None:
    """Lines that differ in numbers alone are found under their own heading, not under the first that has one."""
    (tmp_path / "errors.md").write_text("# Errors\n\n## One, alone\n\nmean 1 %\n\n## Two (both)\n\nmean 2 %\n")
    page = tmp_path / "page.md"
    page.write_text("> mean 1 %\n>\n> — [two](errors.md#two-both)\n")
    assert examples.stale_quotes(examples.quotes_of(page)[0]) == [(1, "mean 1 %")]
    assert examples.changes_of(page) == {1: "> mean 2 %"}


def test_the_worst_rows_are_chosen_and_sorted(tmp_path: Path) -> None:
    rows = "".join(f"| {name} | 9 | {error} |\n" for name, error in (("a", 3.1), ("b", 20.5), ("c", 7.0)))
    (tmp_path / "errors.md").write_text(f"# Errors\n\n| source | rows | mean |\n|---|---|---|\n{rows}\nAll.\n")
    page = tmp_path / "page.md"
    page.write_text("The worst first:\n\n> | c | 9 | 7.0 |\n> | a | 9 | 3.1 |\n>\n> — [errors](errors.md)\n")
    assert examples.changes_of(page) == {3: "> | b | 9 | 20.5 |", 4: "> | c | 9 | 7.0 |"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_title(page: Path) -> None:
    headings = [content[0] for _, language, content in examples.fences(page) if language == "#"]
    assert sum(heading.startswith("# ") for heading in headings) == 1


def test_errors_are_quoted_and_not_retold() -> None:
    quoted = {quote.source.name for quote in examples.quotes_of(DOCS / "concepts.md")}
    assert {"accuracy.md", "changes.md", "energy.md", "forecasts.md"} <= quoted


# ---------------------------------------------------------------------- the site
class Links(HTMLParser):
    """What a page points to, what it loads, and what can be pointed to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values["id"]} if "id" in values else set()
        if tag == "a":
            self.targets.append(values["href"])
        elif "src" in values or "href" in values:
            self.loaded.append(values.get("src", values.get("href", "")))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    site.build(folder)
    return folder


def test_every_page_is_in_the_site(built: Path) -> None:
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert {path.relative_to(built).with_suffix("").as_posix() for path in built.rglob("*.html")} == names
    front = Links((built / "index.html").read_text("utf-8"))
    assert {f"{name}.html" for name in names} <= set(front.targets)


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(built: Path) -> None:
    pages = {path: Links(path.read_text("utf-8")) for path in built.rglob("*.html")}
    for path, found in pages.items():
        for target in [*found.loaded, *(t for t in found.targets if not t.startswith("https://"))]:
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            assert file.is_file(), (path.name, target)
            assert not anchor or anchor in pages[file].ids, (path.name, target)
    style = (built / "style.css").read_text("utf-8")
    assert "@import" not in style
    assert "url(" not in style


def test_a_dead_link_ends_the_build() -> None:
    page = site.read_page(DOCS / "index.md")
    for dead in ("nowhere.md", "setup.md#no-such-heading", "../README.md"):
        page.links = [dead]
        with pytest.raises(site.BrokenLinkError, match="there is no such"):
            site.check_links([page, site.read_page(DOCS / "setup.md")])


def test_names_in_a_page_cannot_become_markup(tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text("# A\n\n<script>alert(1)</script> `<b>`\n")
    assert "<script>" not in site.read_page(tmp_path / "x.md").body


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_of_the_front_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (ROOT / target).exists(), target


# ---------------------------------------------------------------------- names
@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_files_of_the_project_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|benchmarks|calibration|examples)/[\w./-]*\w/?)`", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_is_explained() -> None:
    text = "\n".join(page.read_text("utf-8") for page in WRITTEN)
    missing = [name for name in COMMANDS if f"lumos {name}" not in text]
    assert missing == []


def test_there_is_a_way_for_each_wish() -> None:
    sections = (DOCS / "howto.md").read_text("utf-8").split("\n## ")[1:]
    assert len(sections) == 22
    for section in sections:
        assert "\nlumos " in section or "```python" in section, section[:40]
        assert "```text" in section, section[:40]
        assert "**Limits.**" in section or section.startswith("Be told"), section[:40]


def test_the_page_on_python_is_what_the_code_says() -> None:
    assert (DOCS / "api.md").read_text("utf-8") == api_page.page(), "run `make docs`"
    for name in lumos.__all__:
        thing = getattr(lumos, name)
        thing = getattr(thing, name) if inspect.ismodule(thing) else thing
        first = "" if inspect.isclass(thing) else next(iter(inspect.signature(thing).parameters), "")
        entry = api_page.page().partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert f"{name}(" in entry
        assert first in entry


def test_the_public_names_are_these() -> None:
    assert sorted(lumos.__all__) == [
        "GpuComparison", "LumosError", "Objective", "Prediction", "Recording", "Replay", "Scale", "Setup", "StepRisk",
        "Tariff", "Trace", "WholeRun", "capture", "check", "compare", "compare_gpus", "dry_run", "predict",
        "predict_recording", "read_job", "read_setup", "replay", "search", "step_risk", "stragglers", "whole_run",
        "write_setup",
    ]  # fmt: skip
    assert all(getattr(lumos, name) is not None for name in lumos.__all__)


def test_the_help_of_all_commands_is_that_of_each() -> None:
    for name, command in COMMANDS.items():
        first = inspect.cleandoc(command.load(name).help or "").partition("\n")[0]
        assert first == command.help, name


def test_help_and_version_do_not_wait_for_numpy() -> None:
    code = "import sys; from lumos.cli.main import main\ntry: main()\nfinally: assert 'numpy' not in sys.modules"
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "lumos" in done.stdout or "Usage" in done.stdout


def test_contributing_lists_every_package_with_its_docstring() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| `(src/lumos/[\w/]+)/` \| (.*) \|$", text.partition("## The tree")[2], re.MULTILINE))
    docstrings = {}
    for path in sorted((ROOT / "src/lumos").rglob("__init__.py")):
        if path.parent.name != "lumos":
            doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            docstrings[str(path.parent.relative_to(ROOT))] = doc.split("\n\n")[0].replace("\n", " ").rstrip(".")
    assert listed == docstrings
