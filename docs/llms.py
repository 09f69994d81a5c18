"""Writes docs/llms.txt, a list of names, commands and keys for assistants, from code and pages.

python docs/llms.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "site"))

from recipe_page import recipe_page  # noqa: E402 - found beside this script

import hyperslab as hs  # noqa: E402
from hyperslab.cli import COMMANDS  # noqa: E402

FILE = DOCS / "llms.txt"

HEAD = """\
# hyperslab

> Trains any PyTorch network of volumes (3D, also 2D and 1D) on volumes that are cut over ranks.
> Every operator gives the serial result on any grid, or raises an error that says why not.

Written by `python docs/llms.py`, from the code; a test compares it.

A program imports `hyperslab as hs`, makes `grid = hs.Grid(depth=2)`, `model =
hs.parallelize(model, grid)` and `x = hs.shard(x, grid)`, and continues as plain PyTorch; run it
with `torchrun --nproc-per-node 2 own.py`. Losses are equal on every rank. Without a program, write
a recipe in YAML and run `hyperslab train recipe.yaml --ranks 2 grid.depth=2`.
"""


def public_names() -> Iterator[str]:
    """The signature of each public name, and its first sentence; of a class its public members."""
    for name in sorted(hs.__all__):
        one = getattr(hs, name)
        yield f"- `hs.{name}{signature_of(one)}`: {first_sentence(one)}"
        if inspect.isclass(one) and not issubclass(one, Exception):
            for member, value in vars(one).items():
                if (
                    not member.startswith("_")
                    and inspect.getdoc(value)
                    and callable_or_property(value)
                ):
                    called = signature_of(value) if callable(value) else ""
                    yield f"    - `.{member}{called}`: {first_sentence(value)}"


def callable_or_property(value: object) -> bool:
    return isinstance(value, property) or inspect.isfunction(value)


def signature_of(one: object) -> str:
    """Names and defaults; types are on the pages."""
    if not callable(one) or (inspect.isclass(one) and issubclass(one, Exception)):
        return ""
    try:
        named = inspect.signature(one).parameters.values()
    except ValueError:  # a class that is made by functions
        return ""
    parameters = [p.replace(annotation=p.empty) for p in named if p.name != "self"]
    return str(inspect.Signature(parameters))


def first_sentence(one: object) -> str:
    text = " ".join((inspect.getdoc(one) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", text)[0]


def pages() -> Iterator[str]:
    """Each page by its title."""
    for path in (
        sorted(DOCS.glob("*.md"))
        + sorted(DOCS.glob("api/*.md"))
        + sorted(DOCS.glob("coming-from/*.md"))
    ):
        title = next(line for line in path.read_text().splitlines() if line.startswith("# "))
        yield f"- [{title[2:]}]({path.relative_to(DOCS).as_posix()})"


def recipe_keys() -> Iterator[str]:
    """The reference of recipes without its links."""
    text = recipe_page().split("\n## ", 1)[1]
    yield (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "## " + text)
        .replace("\n## ", "\n### ")
        .lstrip("# ")
    )


def text() -> str:
    commands = [f"- `hyperslab {name}`: {line}" for name, line in COMMANDS.items()]
    parts = [
        HEAD,
        "## Python\n\n" + "\n".join(public_names()),
        "## Commands\n\n" + "\n".join(commands),
        "## Recipes: every key, its meaning, type and default\n\n### "
        + "".join(recipe_keys()).rstrip(),
        "## Pages\n\n" + "\n".join(pages()),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    if FILE.read_text() != text():  # tests may be reading it
        FILE.write_text(text())
    print(f"wrote {FILE}")
