"""Pages of the notebooks, with what their cells printed and drew when they were last run."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import nbformat
from nbconvert import MarkdownExporter

FOLDER = "notebooks"
HEAD = """!!! note
    A notebook that was run: `docs/{name}` in the source tree. Tests run it.

"""


def notebook_pages(docs: Path) -> dict[str, str | bytes]:
    """The pages and the images of all notebooks, by their paths on the site."""
    found: dict[str, str | bytes] = {}
    for path in sorted((docs / FOLDER).glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        resources = {"output_files_dir": f"{path.stem}_files"}
        text, made = MarkdownExporter().from_notebook_node(notebook, resources=resources)
        title, rest = text.lstrip().split("\n", 1)
        head = HEAD.format(name=path.relative_to(docs).as_posix())
        found[f"{FOLDER}/{path.stem}.md"] = f"{title}\n\n{head}{rest}"
        for name, content in made.get("outputs", {}).items():
            found[str(PurePosixPath(FOLDER, name))] = content
    return found
