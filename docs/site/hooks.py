"""What mkdocs does besides: pages that are written from the code, and links of the repository.

`mkdocs.yml` names this file; mkdocs calls the functions by their names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from commands_page import commands_page
from links import for_the_site, section
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from navigation import expanded
from notebook_pages import notebook_pages
from recipe_page import recipe_page

ROOT = Path(__file__).resolve().parents[2]
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
}
"""Files of the repository that are pages; the README's place has one of the site's own."""
WRITTEN = {"reference/recipe.md": recipe_page, "reference/commands.md": commands_page}
FROM_README = re.compile(r"^<!-- README: (.+) -->$", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of `docs/` holds, and let the navigation have what there is."""
    for source, page in MOVED.items():
        if source != "README.md":
            text = (ROOT / source).read_text()
            files.append(File.generated(config, page, content=text))
    for page, write in WRITTEN.items():
        files.append(File.generated(config, page, content=write()))
    for page, content in notebook_pages(ROOT / "docs").items():
        files.append(File.generated(config, page, content=content))
    pages = [file.src_uri for file in files.documentation_pages()]
    config.nav = expanded(config.nav or [], pages)
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Take in sections of the README, and turn links between files into links between pages."""
    name = page.file.src_uri
    sources = {target: source for source, target in MOVED.items() if source != "README.md"}
    known = {file.src_uri for file in files}
    text = for_the_site(markdown, sources.get(name, f"docs/{name}"), name, known, MOVED)

    def from_readme(match: re.Match[str]) -> str:
        found = section((ROOT / "README.md").read_text(), match[1])
        return for_the_site(found, "README.md", name, known, MOVED)

    return FROM_README.sub(from_readme, text)
