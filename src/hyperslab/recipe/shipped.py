"""Lists the recipes that come along, and copies them to be changed.

In the repository `files/` beside this module is a link to `recipes/`.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path, PurePosixPath

from hyperslab.errors import RecipeError, system_errors_as
from hyperslab.util.atomic_files import write_text
from hyperslab.util.documents import parse_yaml

# In the repository a link to recipes/, which the packages are built with.
_FOLDER = Path(str(files("hyperslab.recipe") / "files"))
_SENTENCE = re.compile(r"(.+?)(?:(?<!\bal)[.?;](?=\s|$)|$)")


def shipped_recipes() -> dict[str, str]:
    """Return the first sentence of each, by name; those of sweeps begin with ``sweeps/``.

    >>> shipped_recipes()["demo"]
    'Small universes on two cores, each rank holding half of every sample'
    """
    paths = sorted(_FOLDER.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(_FOLDER).with_suffix("").as_posix(): _about(path) for path in paths}


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a recipe into a folder, and that which it varies if it is a sweep; the copies.

    Raises:
        RecipeError: there is none of this name, a file of the copy's name is there and has been
            changed, or the folder cannot be written to.
    """
    if name not in shipped_recipes():
        raise RecipeError(
            f"there is no shipped recipe {name!r}\n    there are {', '.join(shipped_recipes())}"
        )
    return [_copied(path, folder) for path in _needed(PurePosixPath(f"{name}.yaml"))]


def _needed(path: PurePosixPath) -> list[PurePosixPath]:
    """Return the files of a recipe: its own, and that of the one which it varies."""
    base = parse_yaml((_FOLDER / path).read_text()).get("recipe")
    if base is None:
        return [path]
    found = (_FOLDER / path.parent / base).resolve().relative_to(_FOLDER.resolve())
    return [path, PurePosixPath(found)]


def _copied(path: PurePosixPath, folder: Path) -> Path:
    text = (_FOLDER / path).read_text()
    copy = folder / path
    with system_errors_as(RecipeError, f"cannot copy a recipe to {copy}", named=False):
        if copy.exists() and copy.read_text() != text:
            raise RecipeError(
                f"{copy} exists already, and differs from the shipped recipe\n"
                "    rename it, or copy into another folder"
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_text(copy, text)
    return copy


def _about(path: Path) -> str:
    """Return the first sentence of the comment at the top."""
    comment = re.match(r"(?:#.*\n)+", path.read_text())
    words = " ".join(re.sub(r"^# ?", "", comment[0], flags=re.M).split()) if comment else ""
    sentence = _SENTENCE.match(words)
    return sentence[1] if sentence else ""
