"""Runs the examples of the documentation, compares what they print, checks quotes, and updates both.

    ```sh            every line is run from the root of the repository; `# exits with 2` if it is to fail
    ```python        the blocks of a page are run one after the other, in one namespace
    ```text          what the commands or Python before it print, under the same heading, shortened:
                     a line of … stands for any lines, … at the end of a line for the rest of the line
    <!-- value: PATTERN -->20.6<!-- -->      in prose, the group of PATTERN in the output that is shown above it
    <!-- percent: PATTERN -->21 %<!-- -->    by how much that number differs from the one before it that matches;
                     `percent -2/-3` compares others, counted from the last one
    > …              words or rows of another page, verbatim; the last line names it: > — [accuracy](accuracy.md)
                     or a part of it: accuracy.md#reading; after "The worst first:", as many rows as are quoted

`python docs/examples.py [PAGE…]` lists what is out of date; `--refresh` writes the current output and quotes into the
pages.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_FAILS = re.compile(r"#\s*exits with (\d+)\s*$")
_SOURCE = re.compile(r"^— \[[^\]]*\]\(([\w./-]+\.md)(?:#([\w-]*))?\)$")
_PROSE = re.compile(r"<!-- (value|percent)((?: -\d/-\d)?): (.+?) -->(.*?)<!-- -->")
_WORST = "The worst first:"  # before a quote of rows that are chosen and sorted by their third column
_OWN_PROCESS = ("python ", "lumos capture ")  # start processes, and take long
_NOT_RUN = ("make ", "pip ", "git ")  # set up what tests have already


@dataclass
class Example:
    """A block of a page that is run, and the output that the page shows."""

    page: Path
    line: int
    language: str
    code: str
    shown: list[tuple[int, str]] = field(default_factory=list)  # (line of the page, text)

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def slow(self) -> bool:
        return self.language == "sh" and any(line.startswith(_OWN_PROCESS) for line in self.code.splitlines())


@dataclass
class Quote:
    """Lines that a page quotes from another."""

    page: Path
    source: Path
    lines: list[tuple[int, str]]
    anchor: str = ""  # of the heading that they stand under; "": anywhere in the page
    worst: bool = False  # rows of a table, those with the largest mean errors first

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.lines[0][0]}"


def pages() -> list[Path]:
    """README.md, and all pages of docs/."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


# ---------------------------------------------------------------------- the contents of a page
def fences(page: Path) -> Iterator[tuple[int, str, list[str]]]:
    """(line, language, content) of every fenced block; headings come as blocks of language "#"."""
    begin, language = 0, ""
    content: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.startswith("```"):
            if begin:
                yield begin, language, content
                begin = 0
            else:
                begin, language, content = number, line[3:].strip(), []
        elif begin:
            content.append(line)
        elif line.startswith("#"):
            yield number, "#", [line]


def examples_of(page: Path) -> list[Example]:
    """The blocks of a page that are run, in order."""
    found: list[Example] = []
    last: Example | None = None
    for begin, language, content in fences(page):
        if language == "#":
            last = None
        elif language in ("sh", "python"):
            last = Example(page, begin, language, "\n".join(content))
            found.append(last)
        elif language == "text" and last is not None:
            last.shown += [(begin + i, line) for i, line in enumerate(content, 1)]
    return found


def quotes_of(page: Path) -> list[Quote]:
    """The quotes of a page from other pages."""
    found: list[Quote] = []
    lines: list[tuple[int, str]] = []
    before = ""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if not line.startswith(">"):
            lines, before = [], line or before
            continue
        text = line[1:].strip()
        source = _SOURCE.match(text)
        if source and lines:
            path, worst = (page.parent / source[1]).resolve(), before.endswith(_WORST)
            found.append(Quote(page, path, lines, source[2] or "", worst))
            lines = []
        elif text:
            lines.append((number, text))
    return found


# ---------------------------------------------------------------------- running
def printed_by(example: Example, namespace: dict[str, Any] | None = None) -> list[str]:
    """The output of an example; AssertionError if its exit code is not the one that the page states."""
    if example.language == "python":
        return _python(example.code, {"__name__": "__main__"} if namespace is None else namespace)
    return [line for command in _commands(example.code) for line in _run(command)]


def _commands(code: str) -> Iterator[str]:
    """Each line of `lumos`, and the lines between them as one script."""
    script: list[str] = []
    for line in code.replace("\\\n", " ").splitlines():
        if line.startswith("lumos ") or line.startswith(_NOT_RUN):
            if script:
                yield "\n".join(script)
            script = []
            if not line.startswith(_NOT_RUN):
                yield line
        else:
            script.append(line)
    if "".join(script).strip():
        yield "\n".join(script)


@cache
def _run(command: str) -> tuple[str, ...]:
    failing = _FAILS.search(command)
    expected = int(failing[1]) if failing else 0
    here = command.startswith("lumos ") and not command.startswith(_OWN_PROCESS)
    code, text, complaint = _lumos(shlex.split(command, comments=True)[1:]) if here else _shell(command)
    assert code == expected, f"{command}: exit code {code}, not {expected}\n{complaint}"
    assert failing or not here or not complaint, f"{command}: {complaint}"
    return tuple((text + complaint).splitlines())


def _lumos(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command line in this process, in a tenth of the time of a new one: (exit code, stdout, stderr)."""
    from lumos.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before, sys.argv = sys.argv, ["lumos", *arguments]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(ROOT):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return code, texts[0], texts[1]


def _shell(script: str) -> tuple[int, str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-ec", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def _python(code: str, namespace: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):
        exec(compile(code, "example", "exec"), namespace)
    return out.getvalue().splitlines()


# ---------------------------------------------------------------------- comparison
def plain(text: str) -> str:
    """The text without the padding of columns."""
    return re.sub(r"\s+", " ", text).strip()


def stale_lines(example: Example, printed: list[str]) -> list[tuple[int, str]]:
    """The shown lines that the example does not print in this order."""
    return [(number, text) for number, text, _ in _stale(example, printed)]


def _stale(example: Example, printed: list[str]) -> Iterator[tuple[int, str, str]]:
    """(line of the page, text, replacement) of those lines; a replacement is printed after that of the line before."""
    lines, at = [plain(line) for line in printed], 0
    for number, text in example.shown:
        wanted = plain(text)
        if wanted in ("", "…"):
            continue
        found = next((i for i, line in enumerate(lines[at:], at) if _says(line, wanted)), None)
        if found is None:
            near = _nearest(text, printed[at:])
            yield number, text, near.rstrip()
            found = printed.index(near, at) if near else at - 1
        at = found + 1


def _says(line: str, wanted: str) -> bool:
    return line.startswith(wanted.removesuffix("…").rstrip()) if wanted.endswith("…") else line == wanted


def stale_quotes(quote: Quote) -> list[tuple[int, str]]:
    """The quoted lines that the other page does not have, or not under that heading, or not among the worst."""
    if quote.worst:
        rows = _worst_rows(quote)
        return [line for line, row in zip(quote.lines, rows, strict=True) if plain(line[1]) != plain(row)]
    source = plain("\n".join(quoted_part(quote)))
    return [(number, text) for number, text in quote.lines if plain(text) not in source]


def quoted_part(quote: Quote) -> list[str]:
    """The lines of the other page that a quote may be of: those under the heading it names, sub-headings included."""
    lines = quote.source.read_text("utf-8").splitlines()
    if not quote.anchor:
        return lines
    begin = next((i for i, line in enumerate(lines) if line.startswith("#") and _anchor_of(line) == quote.anchor), None)
    if begin is None:
        return []
    level = len(lines[begin]) - len(lines[begin].lstrip("#"))
    ends = (i for i, line in enumerate(lines[begin + 1 :], begin + 1) if re.match(rf"#{{1,{level}}} ", line))
    return lines[begin : next(ends, len(lines))]


def _anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def _worst_rows(quote: Quote) -> list[str]:
    """Of the first table in the part that is quoted, as many rows as are quoted, the largest mean error first."""
    part = quoted_part(quote)
    begin = next(i for i, line in enumerate(part) if line.startswith("|---")) + 1
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), part[begin:]))
    return sorted(rows, key=lambda row: -float(row.split("|")[3]))[: len(quote.lines)]


def prose_changes(lines: list[str]) -> dict[int, str]:
    """Lines of prose whose numbers are not those of the output shown above them, as they should be."""
    changes: dict[int, str] = {}
    shown: list[str] = []
    is_fenced = False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced:
            shown.append(line)
        else:
            now = _PROSE.sub(lambda m: f"<!-- {m[1]}{m[2]}: {m[3]} -->{_number(m, shown)}<!-- -->", line)
            if now != line:
                changes[number] = now
    return changes


def _number(match: re.Match[str], shown: list[str]) -> str:
    """The number that a place in prose should have; what it has if no output shows it."""
    values = [found[1] for line in shown if (found := re.search(match[3], line))]
    places = [int(place) for place in match[2].split("/")] if match[2] else [-1, -2]
    places = places[:1] if match[1] == "value" else places
    if len(values) < -min(places):
        return match[4]
    if match[1] == "value":
        return values[places[0]]
    now, before = (float(values[place].replace(",", "")) for place in places)
    return f"{abs(100 * (now / before - 1)):.0f} %"


def _nearest(text: str, lines: list[str]) -> str:
    """The line that replaces `text`: equal but for its numbers, else the most similar one; "" if there is none."""

    def masked(line: str) -> str:
        return re.sub(r"[\d,.]+", "0", plain(line))

    short = plain(text).endswith("…")
    wanted = masked(plain(text).removesuffix("…"))
    for line in lines:
        if masked(line) == wanted or (short and masked(line).startswith(wanted)):
            return line
    close = difflib.get_close_matches(wanted, [masked(line) for line in lines], 1, 0.6)
    return next((line for line in lines if close and masked(line) == close[0]), "")


def changes_of(page: Path) -> dict[int, str]:
    """Out-of-date lines of a page, each with its replacement; "" if there is none."""
    changes: dict[int, str] = {}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for example in examples_of(page):
        if example.shown:
            printed = printed_by(example, namespace)
            changes |= {number: near for number, _, near in _stale(example, printed)}
        elif example.language == "python" and page.name != "capture.md":  # later blocks may need it
            printed_by(example, namespace)
    for quote in quotes_of(page):
        rows = dict(zip((number for number, _ in quote.lines), _worst_rows(quote), strict=True)) if quote.worst else {}
        for number, text in stale_quotes(quote):
            near = rows.get(number) or _nearest(text, quoted_part(quote))
            changes[number] = f"> {near}" if near else ""
    return changes


def main() -> int:
    """List what is out of date, or refresh it."""
    refresh, left = "--refresh" in sys.argv, 0
    named = {Path(name).resolve() for name in sys.argv[1:] if not name.startswith("--")}
    for page in (page for page in pages() if not named or page in named):
        text, changes = page.read_text("utf-8").splitlines(), changes_of(page)
        for number, line in sorted(changes.items()):
            print(f"{page.relative_to(ROOT)}:{number}\n  - {text[number - 1]}\n  + {line or '(nothing like it)'}")
            left += not (refresh and line)
            text[number - 1] = line or text[number - 1]
        for number, line in prose_changes(text).items():
            print(f"{page.relative_to(ROOT)}:{number}\n  - {text[number - 1]}\n  + {line}")
            left += not refresh
            text[number - 1], changes[number] = line, line
        if refresh and changes:
            page.write_text("\n".join(text) + "\n", "utf-8")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
