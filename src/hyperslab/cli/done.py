"""Says of a training that is resumed and done that nothing is left, before anything is imported.

After a training of its own, `train` leaves ``done.json`` in the run's folder: a digest of what it
was asked for, and what the run held then. Where all of that is as it was, nothing is left to
resume. In every other case the command itself finds out, and says the same words.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hyperslab.errors import RecipeError
from hyperslab.recipe.text import parse_override, put_override, read_yaml
from hyperslab.util.atomic_files import write_json
from hyperslab.util.documents import read_json

NOTE = "done.json"


def note_done(asked: str, output: Path, epochs: int) -> None:
    """Note that all epochs of a run have been trained, as ``asked``, see `training_digest`.

    Raises:
        OSError: it cannot be written.
    """
    write_json(output / NOTE, _note(asked, output, epochs))


def _note(asked: str, output: Path, epochs: int) -> dict[str, Any]:
    return {"asked": asked, "epochs": epochs, "run": _state_of(output)}


def done_words(
    recipe: Path,
    overrides: Sequence[str],
    ranks: int | None,
    output: Path | None,
    *,
    resume: bool,
) -> str | None:
    """Return what a resumed training says if its run is done; None where that is not known."""
    if not resume or not os.path.isfile(recipe):  # a pipe is read once
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError, RecipeError):
        values = _asked_values(recipe, overrides)
        output = output or _output(recipe, values)
        note = read_json(output / NOTE)
        asked = training_digest(recipe, overrides, ranks)
        if asked == training_digest(output / "recipe.yaml", (), None):
            asked = note["asked"]  # what the run's own recipe asks for
        if note == _note(asked, output, note["epochs"]):
            return nothing_left(output, int(note["epochs"]))
    return None


def nothing_left(output: Path, epochs: int) -> str:
    """Say that a run is done."""
    return f"all {epochs} epochs of {output} are done: nothing is left to resume"


def training_digest(recipe: Path, overrides: Sequence[str], ranks: int | None) -> str:
    """Hash what a training is asked for, in whatever words: all but its folder and its grid.

    A run may be resumed on any grid. One that the plan chooses, or that does not fit the ranks, is
    left to the command.

    Raises:
        OSError, RecipeError: the recipe cannot be read.
    """
    values = _asked_values(recipe, overrides)
    values.pop("output", None)
    grid = values.get("grid") or {}
    places = list(grid.values()) if isinstance(grid, dict) else ["auto"]
    size = math.prod(places) if all(type(n) is int and n > 0 for n in places) else None
    if size is not None and ranks in (None, size):
        values.pop("grid", None)
    else:
        values["ranks"] = ranks
    asked = json.dumps([values, os.getcwd()], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()


def _asked_values(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    values = read_yaml(recipe, "recipe")
    for key, value in map(parse_override, overrides):
        put_override(values, key, value)
    return values


def _output(recipe: Path, values: Mapping[str, Any]) -> Path:
    """Return the folder that a training of these values fills."""
    if recipe.name == "recipe.yaml" and (recipe.parent / NOTE).is_file():
        return recipe.parent  # the run's own says no place
    return Path(values.get("output", f"runs/{recipe.stem}"))


def _state_of(output: Path) -> list[list[Any]]:
    """List the recipe and the checkpoints of a run, each with its size [B] and its time [ns]."""
    files = [output / "recipe.yaml", *sorted((output / "checkpoints").rglob("*"))]
    states = [(path, path.stat()) for path in files if not path.is_dir()]
    return [[str(p.relative_to(output)), s.st_size, s.st_mtime_ns] for p, s in states]
