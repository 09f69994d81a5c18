"""The site is whole, and needs nothing from elsewhere (tier: one process that builds it).

The stage of documents in .ci/run looks at the site that it has built.
"""

from __future__ import annotations

import doctest
import importlib
import runpy
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WRITTEN = {"index.md", "reference/recipe.md", "reference/commands.md"}
"""Pages that have no file in docs/, or one that is not looked for by its links."""
# What a page takes by itself when it is opened, by element and attribute.
TAKEN = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
NOT_TAKEN = {"canonical", "prev", "next", "edit", "alternate"}


class Page(HTMLParser):
    """The anchors of a page, its links, and what it takes from elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.taken: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        for name, value in found.items():
            if (tag, name) in TAKEN and found.get("rel") not in NOT_TAKEN:
                self.taken.append(value)


def nav() -> Any:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


def site_module(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "site" / f"{name}.py"))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {str(path.relative_to(site)): Page(path) for path in sorted(site.rglob("*.html"))}


def broken(pages: dict[str, Page], site: Path) -> Iterator[str]:
    """Links to pages, files or anchors that are not there."""
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            file = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = str(file.resolve().relative_to(site.resolve()))
            if not file.exists():
                yield f"{name}: {link}"
            elif parts.fragment and target in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[target].anchors and not anchor.startswith("__"):
                    yield f"{name}: {link}"


@pytest.mark.long
def test_links_and_anchors_lead_somewhere(pages: dict[str, Page], site: Path) -> None:
    assert len(pages) > 30
    assert list(broken(pages, site)) == []


def test_a_broken_anchor_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">x</a> <a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<p id="y">')
    pages = {name: Page(tmp_path / name) for name in ("a.html", "b.html")}
    assert list(broken(pages, tmp_path)) == ["a.html: b.html#x", "a.html: c.html"]


@pytest.mark.long
def test_a_page_takes_nothing_from_another_host(pages: dict[str, Page], site: Path) -> None:
    for name, page in pages.items():
        for address in page.taken:
            parts = urlsplit(address)
            assert not parts.scheme or parts.scheme == "data", f"{name}: {address}"
            assert not parts.netloc, f"{name}: {address}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert "@import" not in text
        assert "url(http" not in text
        assert "url(//" not in text


@pytest.mark.long
def test_the_site_can_be_searched(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    for words in ("five minutes", "data.batch_size", "hyperslab train", "UnsupportedOp"):
        assert words in index, words


def test_every_page_has_a_place_in_the_navigation() -> None:
    """Or it is named as one for those who work on hyperslab."""
    given = list(site_module("navigation")["pages_in"](nav()))
    given += yaml.safe_load((ROOT / "mkdocs.yml").read_text())["not_in_nav"].split()
    folders = [entry.removesuffix("*") for entry in given if entry.endswith(("/*", "/"))]
    docs = ROOT / "docs"
    for page in sorted(docs.rglob("*.md")):
        name = page.relative_to(docs).as_posix()
        is_listed = name in given or any(name.startswith(folder) for folder in folders)
        assert is_listed, f"docs/{name} is not in the navigation of mkdocs.yml"
    for notebook in (docs / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{notebook.stem}.md" in given


def test_every_place_in_the_navigation_has_a_page() -> None:
    hooks = {"project/changelog.md", "project/contributing.md", "project/security.md"}
    hooks |= {"project/code-of-conduct.md", *WRITTEN}
    hooks |= {f"notebooks/{p.stem}.md" for p in (ROOT / "docs/notebooks").glob("*.ipynb")}
    for name in site_module("navigation")["pages_in"](nav()):
        is_there = (ROOT / "docs" / name.removesuffix("*")).exists() or name in hooks
        assert is_there, f"mkdocs.yml names {name}"


@pytest.mark.parametrize("name", ["navigation", "links", "value_types"])
def test_the_examples_of_what_writes_the_site_hold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
