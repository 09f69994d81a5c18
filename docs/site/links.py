"""Links of pages that are read in the repository, made those of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Set

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^()\s]+)\)")
OUTSIDE = re.compile(r"[a-z]+:|#")


def for_the_site(
    text: str, source: str, page: str, known: Set[str], moved: Mapping[str, str]
) -> str:
    """The text of ``page`` with links as the site has them; ``source`` is its file.

    Both are paths in the repository, and ``known`` the pages and images of the site, relative to
    ``docs/``. A link to what is in the repository only becomes its words: the site says which file,
    and has no address of a repository. ``moved`` are files of the repository that are pages.

    >>> known = {"a.md", "b/c.md", "project/changelog.md"}
    >>> moved = {"CHANGELOG.md": "project/changelog.md"}
    >>> for_the_site("[x](docs/a.md#y) [z](src/z.c)", "README.md", "b/index.md", known, moved)
    '[x](../a.md#y) z'
    >>> for_the_site("[n](../CHANGELOG.md)", "docs/a.md", "a.md", known, moved)
    '[n](project/changelog.md)'
    """
    folder = posixpath.dirname(source)

    def target(link: str) -> str | None:
        if OUTSIDE.match(link):
            return link
        path, mark, anchor = link.partition("#")
        file = posixpath.normpath(posixpath.join(folder, path))
        found = moved.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
        if found is not None and found.endswith(".ipynb"):
            found = found.removesuffix(".ipynb") + ".md"  # notebooks are pages
        if found not in known:
            return None
        return posixpath.relpath(found, posixpath.dirname(page) or ".") + mark + anchor

    def linked(match: re.Match[str]) -> str:
        found = target(match[2])
        return match[1] if found is None else f"[{match[1]}]({found})"

    def shown(match: re.Match[str]) -> str:
        found = target(match[2])
        return match[0] if found is None else f"![{match[1]}]({found})"

    return IMAGE.sub(shown, LINK.sub(linked, text))


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level.

    >>> section("# A\\n\\n## B\\n\\nb\\n\\n## C\\n\\nc\\n", "B")
    'b'

    Raises:
        ValueError: there is no such heading.
    """
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None:
        raise ValueError(f"no heading {title!r}")
    return found[1].strip()
