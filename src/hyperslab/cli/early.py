"""Answers before commands are imported, which takes two seconds.

In reading order: the help of a command, from ``help.txt``, which ``docs/help.py`` writes (`make
docs`) and a test compares with the commands; a first argument that names nothing; `--resume` of
a run that is done. After a training of its own, `train` leaves ``done.json`` in the run's folder:
a digest of the command line, the current folder and the recipe's file, and what the run held
then. Where all of that is as it was, nothing is left to resume. In every other case the command
itself finds out.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hyperslab.errors import DataError, RecipeError, no_run
from hyperslab.util.atomic_files import write_json
from hyperslab.util.documents import parse_yaml, read_json, read_text

PAGES = Path(__file__).with_name("help.txt")

WIDTH = 80
"""Help is set in no more columns, two of them empty, however wide the terminal is."""

BEGIN = "$ hyperslab "
"""Begins the line above a page: the command that prints it."""


def help_page(words: Sequence[str]) -> str | None:
    """Return what ``hyperslab COMMAND --help`` prints; None for all other words."""
    once = list(words).count("--help") == 1 and words[-1] == "--help"
    if not once or shutil.get_terminal_size().columns < WIDTH:
        return None
    return read_pages().get(" ".join(words))


def read_pages() -> dict[str, str]:
    """Read all pages, by the words behind ``hyperslab``."""
    parts = re.split(rf"^{re.escape(BEGIN)}(.+)\n", PAGES.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def look_first(name: str, arguments: Sequence[str]) -> None:
    """Refuse a first argument that names nothing, before seconds of imports.

    The command says the same of it; ranks leave it to that, as they have to agree.

    Raises:
        DataError: there is no such folder, or no run in it.
        RecipeError: there is no such recipe, nor a shipped one of its name.
    """
    first = arguments[0] if arguments else "-"
    if first.startswith("-") or "--help" in arguments or "RANK" in os.environ:
        return
    if name in ("evaluate", "predict") and not os.path.isfile(os.path.join(first, "recipe.yaml")):
        raise no_run(first)
    if os.path.lexists(first):
        return
    if name == "inspect":
        raise DataError(f"{first}: does not exist; give the folder that holds the data")
    if name in ("train", "plan"):
        shipped = Path(__file__).parents[1].joinpath("recipe", "files").rglob("*.yaml")
        if Path(first).stem not in {path.stem for path in shipped}:
            words = os.strerror(errno.ENOENT)
            raise RecipeError(f"cannot read the recipe {Path(first)}: {words}")


NOTE = "done.json"

STARTED = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMIX_RANK")
"""Variables of ranks: they have to agree with others, so that none of them answers alone."""


def note_done(words: Sequence[str], output: Path, epochs: int) -> None:
    """Note that the command line ``words`` has trained all epochs of a run.

    Raises:
        OSError: it cannot be written.
    """
    write_json(output / NOTE, _note(words, output, epochs))


def _note(words: Sequence[str], output: Path, epochs: int) -> dict[str, Any]:
    return {"command": _digest(words), "epochs": epochs, "run": _state_of(output)}


def done_words(words: Sequence[str]) -> str | None:
    """Return what a resumed command says if its run is done; None where that is not known."""
    if "--resume" not in words or any(name in os.environ for name in STARTED):
        return None
    try:
        for output in _outputs(words):
            if (output / NOTE).is_file():
                note = read_json(output / NOTE)
                now = {
                    "command": _digest(words),
                    "epochs": note["epochs"],
                    "run": _state_of(output),
                }
                return nothing_left(output, int(note["epochs"])) if note == now else None
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):  # the command will say it
        return None
    return None


def nothing_left(output: Path, epochs: int) -> str:
    """Say that a run is done."""
    return f"all {epochs} epochs of {output} are done: nothing is left to resume"


def _digest(words: Sequence[str]) -> str:
    """Hash all that a training depends on but the run's folder: equal for equal trainings."""
    said = [word for word in words if word != "--resume"]
    recipe = Path(words[1]).read_bytes().hex()
    return hashlib.sha256(json.dumps([said, os.getcwd(), recipe]).encode()).hexdigest()


def _outputs(words: Sequence[str]) -> Iterator[Path]:
    """Yield the folders that may be the run's, the user's own words first."""
    recipe = Path(words[1])
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--output":
            yield Path(following)
        elif word.startswith(("--output=", "output=")):
            yield Path(word.partition("=")[2])
    values: Any = parse_yaml(read_text(recipe))
    if isinstance(values, dict) and isinstance(values.get("output"), str):
        yield Path(values["output"])
    yield Path("runs") / recipe.stem


def _state_of(output: Path) -> list[list[Any]]:
    """List the recipe and the checkpoints of a run, each with its size [B] and its time [ns]."""
    files = [output / "recipe.yaml", *sorted((output / "checkpoints").rglob("*"))]
    states = [(path, path.stat()) for path in files if not path.is_dir()]
    return [[str(p.relative_to(output)), s.st_size, s.st_mtime_ns] for p, s in states]
