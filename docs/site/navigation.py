"""Which pages the navigation has: `DIR/*` is written out, and what is not written yet left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def expanded(nav: Sequence[Any], pages: Sequence[str]) -> list[Any]:
    """The navigation for these pages: an entry is a page, or a title with a page or with entries.

    >>> expanded([{"A": "a.md"}, {"B": "b.md"}, {"Notes": "d/*"}], ["a.md", "d/1.md", "d/2.md"])
    [{'A': 'a.md'}, {'Notes': ['d/1.md', 'd/2.md']}]
    """
    return [entry for given in nav for entry in _entry(given, sorted(pages))]


def _entry(entry: Any, pages: Sequence[str]) -> Iterator[Any]:
    if isinstance(entry, str):
        if entry in pages:
            yield entry
        return
    for title, inside in entry.items():
        if isinstance(inside, str) and inside.endswith("/*"):
            folder = inside.removesuffix("*")
            yield {title: [page for page in pages if page.startswith(folder)]}
        elif isinstance(inside, str):
            if inside in pages:
                yield {title: inside}
        elif found := expanded(inside, pages):
            yield {title: found}


def pages_in(nav: Any) -> Iterator[str]:
    """Every page that a navigation names, in its order.

    >>> list(pages_in([{"A": "a.md"}, {"B": ["c.md", {"D": "d/*"}]}]))
    ['a.md', 'c.md', 'd/*']
    """
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, Mapping):
        for inside in nav.values():
            yield from pages_in(inside)
    else:
        for entry in nav:
            yield from pages_in(entry)
