"""Builds the documentation: the Markdown of docs/ as a small static site that opens without a network.

    python docs/build.py out/docs

A link to a page or heading that does not exist stops the build.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCS = Path(__file__).resolve().parent
_GROUPS = {
    "Start": ("index", "tutorial", "howto", "own_script", "gpus", "your_hardware"),
    "Understand": ("concepts", "design"),
    "Reference": ("commands", "setup", "capture", "reports", "scoring", "api"),
    "Accuracy": ("accuracy", "changes", "forecasts", "dry_runs", "constructors", "searches", "energy", "files"),
    "Speed": ("speed", "forecast_speed", "search_speed", "report_speed", "stranger"),
}
_OUTSIDE = re.compile(r"^(https?:|mailto:)")


class BrokenLinkError(Exception):
    """A page has a link to something that does not exist."""


@dataclass
class Page:
    """One page of the site."""

    source: Path
    title: str
    body: str
    anchors: set[str]
    contents: list[tuple[str, str]]  # (anchor, text) of its sections
    links: list[str] = field(default_factory=list)  # as written in the Markdown

    @property
    def address(self) -> str:
        return self.source.relative_to(DOCS).with_suffix(".html").as_posix()

    @property
    def up(self) -> str:
        """The relative path to the top of the site."""
        return "../" * self.address.count("/")


def slug(text: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def read_page(path: Path) -> Page:
    """A Markdown file as a page."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(path.read_text("utf-8"))
    page = Page(path, path.stem, "", set(), [])
    _name_headings(tokens, page)
    for inside in (child for token in tokens for child in token.children or ()):
        _turn_link(inside, page)
    body = markdown.renderer.render(tokens, markdown.options, {})
    page.body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    return page


def _name_headings(tokens: Sequence[Token], page: Page) -> None:
    for token, inline in pairwise(tokens):
        if token.type != "heading_open":
            continue
        text = "".join(child.content for child in inline.children or ())
        anchor, count = slug(text), 1
        while anchor in page.anchors:
            anchor, count = f"{slug(text)}-{count}", count + 1
        page.anchors.add(anchor)
        token.attrSet("id", anchor)
        if token.tag == "h1" and not page.contents:
            page.title = text
        elif token.tag == "h2":
            page.contents.append((anchor, text))
        mark = Token("html_inline", "", 0, content=f'<a class="anchor" href="#{anchor}" aria-label="link">#</a>')
        inline.children = [*(inline.children or ()), mark]


def _turn_link(token: Token, page: Page) -> None:
    """Turn a link between Markdown files into one between pages of the site."""
    name = {"link_open": "href", "image": "src"}.get(token.type)
    if name is None:
        return
    target = str(token.attrGet(name) or "")
    if _OUTSIDE.match(target):
        if name == "src":
            raise BrokenLinkError(f"{page.source.name}: {target} is a picture on another site; keep a copy in docs/")
        return
    page.links.append(target)
    token.attrSet(name, re.sub(r"\.md(?=$|#)", ".html", target))


def check_links(pages: Sequence[Page]) -> None:
    """Raise BrokenLinkError with every link that leads nowhere."""
    known = {page.source: page for page in pages}
    wrong = []
    for page in pages:
        for link in page.links:
            name, _, anchor = link.partition("#")
            target = (page.source.parent / name).resolve() if name else page.source
            if not target.is_relative_to(DOCS) or not target.is_file():
                wrong.append(f"{page.source.name}: {link}: there is no such page or picture in docs/")
            elif anchor and (target not in known or anchor not in known[target].anchors):
                wrong.append(f"{page.source.name}: {link}: there is no such heading")
    if wrong:
        raise BrokenLinkError("\n".join(wrong))


def grouped(pages: Sequence[Page]) -> list[tuple[str, list[Page]]]:
    """Pages in reading order; those without a group come last."""
    by_name = {page.source.relative_to(DOCS).with_suffix("").as_posix(): page for page in pages}
    groups = [(group, [by_name.pop(name) for name in names if name in by_name]) for group, names in _GROUPS.items()]
    return [*groups, ("More", list(by_name.values()))] if by_name else groups


def build(target: Path) -> list[Page]:
    """Write the site, unless a link is broken."""
    pages = [read_page(path) for path in sorted(DOCS.rglob("*.md"))]
    check_links(pages)
    groups = grouped(pages)
    order = [page for _, members in groups for page in members]
    environment = Environment(loader=FileSystemLoader(DOCS / "site"), autoescape=True, undefined=StrictUndefined)
    template = environment.get_template("page.html")
    for page, before, after in zip(order, [None, *order], [*order[1:], None], strict=False):
        file = target / page.address
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(template.render(page=page, groups=groups, before=before, after=after), "utf-8")
    shutil.copyfile(DOCS / "site" / "style.css", target / "style.css")
    for picture in DOCS.rglob("*.png"):
        copy = target / picture.relative_to(DOCS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, copy)
    return order


def main() -> int:
    """Build the site, or print the broken links and return 2."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "out/docs")
    try:
        order = build(target)
    except BrokenLinkError as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 2
    print(f"{len(order)} pages: {target / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
