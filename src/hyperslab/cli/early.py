"""Answers before commands are imported, which takes two seconds.

``early.json`` declares the commands and the keys of a recipe a second time, with the schemas of
their numbers, words and lists. `docs/help.py` writes it from the commands and the recipe's classes
(`make docs`), and a test compares it with them. In reading order: a command as it is declared
there, which prints its help and refuses options; files that are missing; wrong keys and values of
a recipe; `--resume` of a run that is done.

After a training of its own, `train` leaves ``done.json`` in the run's folder: a digest of what it
was asked for, and what the run held then. Where all of that is as it was, nothing is left to
resume. In every other case the command itself finds out, and says the same words; ranks leave all
but options to it, as they have to agree.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from hyperslab.cli.terminal import say
from hyperslab.errors import DataError, LayoutError, RecipeError, no_run
from hyperslab.recipe.text import origin_of, parse_override, put_override, read_yaml, wrong_keys
from hyperslab.util.atomic_files import write_json
from hyperslab.util.documents import read_json

DECLARED = Path(__file__).with_name("early.json")

TYPES = {"Path": Path, "str": str, "int": int, "float": float, "bool": bool}
"""Types of options and arguments, by the names that the file has for them."""

FOLDER = "folder"
"""Names the command of `DefaultCommandGroup` that has no name."""


class DefaultCommandGroup(TyperGroup):
    """Has a command without a name, `hyperslab convert SRC OUT`, beside `... convert lits`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands and args[0] != FOLDER
        return super().parse_args(ctx, args if named else [FOLDER, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == FOLDER else name, command, rest


@functools.cache
def read_declared() -> dict[str, Any]:
    """Read the commands and the recipe's keys."""
    declared: dict[str, Any] = json.loads(DECLARED.read_text())
    return declared


def early_command(name: str) -> Any:
    """Make a command that takes the words of ``hyperslab NAME``, and only looks at them.

    Raises, once it is run:
        DataError: a folder is not there, or holds no run.
        RecipeError: a recipe cannot be read, or has an unknown key or a bad value.
    """
    declared = read_declared()["commands"][name]
    if "commands" not in declared:
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name)(_looking(name, declared))
        return get_command(alone)
    several = typer.Typer(
        cls=DefaultCommandGroup,
        help=declared["help"],
        rich_markup_mode=None,
        add_completion=False,
    )
    for below, one in declared["commands"].items():
        several.command(below, **one["settings"])(_looking(f"{name} {below}", one))
    group = get_command(several)
    group.name = name
    return group


def _looking(name: str, declared: Mapping[str, Any]) -> Callable[..., None]:
    """Make a function with a command's signature that runs `look_first`."""
    parameters = [_parameter(*one) for one in declared["parameters"].items()]

    def looking(**given: Any) -> None:
        look_first(name, given)

    looking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    looking.__annotations__ = {one.name: one.annotation for one in parameters}
    looking.__doc__ = declared["help"]
    return looking


def _parameter(name: str, declared: Mapping[str, Any]) -> inspect.Parameter:
    named = declared["type"]
    kind: Any = Literal[tuple(named)] if isinstance(named, list) else TYPES[named]
    if declared["list"]:
        kind = list[kind]
    if declared["optional"]:
        kind = kind | None
    make: Any = typer.Option if declared["option"] else typer.Argument
    said = make(*declared["words"], **declared["more"])
    default = declared.get("default", inspect.Parameter.empty)
    where = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, where, annotation=Annotated[kind, said], default=default)


def look_first(name: str, given: Mapping[str, Any]) -> None:
    """Refuse what is not there, and wrong keys of a recipe; see `early_command`.

    ``given`` are the options and arguments of the command.
    """
    if any(variable in os.environ for variable in STARTED):
        return
    for folder in given.get("runs", [given["run"]] if "run" in given else []):
        if name == "report" and os.path.lexists(folder):  # or the folder of a sweep
            continue
        if not os.path.isfile(folder / "recipe.yaml"):
            raise no_run(folder)
    if name in ("inspect", "convert folder"):
        folder = given["path" if name == "inspect" else "src"]
        if not os.path.lexists(folder):
            raise DataError(f"{folder}: does not exist; give the folder that holds the data")
    for key in ("recipe", "sweep"):
        file = given.get(key)
        if file is None or (os.path.lexists(file) and not (key == "sweep" and file.is_file())):
            continue  # a recipe is read below, and a pipe once
        read_yaml(file, key)
    _read_options(name, given)
    recipe = given["run"] / "recipe.yaml" if name == "evaluate" else given.get("recipe")
    if recipe is not None and (os.path.isfile(recipe) or os.path.isdir(recipe)):  # no pipe
        check_recipe(recipe, given["overrides"] or ())
        if name in NEEDS_RANKS:
            _check_start(name, recipe, given)
    if name == "train" and (said := done_words(given)):
        say(said)
        raise typer.Exit


def _read_options(name: str, given: Mapping[str, Any]) -> None:
    """Refuse options that the command could not read; one that is not given is None or empty."""
    from hyperslab.cli import options  # pydantic, which the help does without

    readers: dict[str, Callable[[str], object]] = {
        "window": lambda text: options.three("--window", text, int),
        "cut": lambda text: options.three("--cut", text, int),
        "spacing": lambda text: options.three("--spacing", text, float),
        "shape": options.volume_shape,
        "memory": options.memory_size,
        "part": options.part_of_command,
    }
    if name == "convert lits":
        readers["size"] = lambda text: options.three("--size", text, int)
    if name == "scale" and (given["ranks"] or not given["grid"]):
        options.rank_counts(given["ranks"])
    for word, read in readers.items():
        if given.get(word):
            read(given[word])


def _check_start(name: str, recipe: Path, given: Mapping[str, Any]) -> None:
    """Refuse what `train` and `plan` cannot start with: ranks that do not fit, data not there.

    Raises:
        DataError, LayoutError, RecipeError: in the words of the commands.
    """
    extents: dict[str, int] | None = None
    path: Any = None
    others = True
    with suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
        values = _asked_values(recipe, given["overrides"] or ())
        grid, data = values.get("grid") or {}, values["data"]
        if grid != "auto" and not grid.get("auto"):
            extents = {axis: int(grid.get(axis, 1)) for axis in AXES}
        elif given["ranks"] is None:
            extents = {}
        path = data.get("path")
        others = any(data.get(key) for key in ("synthetic", "target", "plugins"))
    if extents == {}:
        raise RecipeError(NEEDS_RANKS[name])
    if name == "plan":
        return
    if extents and given["ranks"] is not None:
        check_count("--ranks", given["ranks"], extents)
    if others or given["resume"] or not isinstance(path, str):  # a run may be done
        return
    if not os.path.lexists(path):
        raise DataError(f"{path}: does not exist; give the folder that holds the data")


AXES = ("data", "depth", "height", "width")

NEEDS_RANKS = {
    "train": "grid=auto needs to know how many ranks to start: give --ranks",
    "plan": "grid=auto needs to know for how many ranks to plan: give --ranks",
}
"""Tell that a command is to choose a grid and does not know for how many ranks."""


def check_count(name: str, count: int, grid: Mapping[str, int]) -> None:
    """Compare a number of ranks with the extents of a grid.

    ``name``: the option, or the variable of the launcher, that has the number.

    Raises:
        LayoutError: with both numbers.
    """
    size = math.prod(grid.values())
    if count == size:
        return
    places = " x ".join(f"{axis} {extent}" for axis, extent in grid.items())
    remedy = f"use --ranks {size}" if name == "--ranks" else f"start {size} ranks"
    others = [f"{axis}=1" for axis, extent in grid.items() if axis != "depth" and extent > 1]
    overrides = " ".join(f"grid.{override}" for override in [*others, f"depth={count}"])
    raise LayoutError(
        f"{name} is {count} but the grid has {size} places ({places})\n"
        f"    {remedy}, or change the grid, such as {overrides}"
    )


def check_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Refuse unknown keys of a recipe, and values that are no numbers or words of their keys.

    Raises:
        RecipeError: names them; or the file is not a recipe, or an override not one.
    """
    values = read_yaml(path, "recipe")
    said = [parse_override(text) for text in overrides]
    wrong: list[tuple[str, str]] = []
    with suppress(TypeError, ValueError, IndexError, AttributeError):  # the command will say it
        for key, value in said:
            put_override(values, key, value)
        wrong = list(wrong_keys(values, read_declared()))
    sources = {key: f"override {key}=" for key, _ in said}
    if wrong:
        raise RecipeError(
            "\n".join(f"{origin_of(key, str(path), sources)}: {words}" for key, words in wrong)
        )


NOTE = "done.json"

STARTED = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMIX_RANK")
"""Variables of ranks: they have to agree with others, so that none of them answers alone."""


def note_done(asked: str, output: Path, epochs: int) -> None:
    """Note that all epochs of a run have been trained, as ``asked``, see `training_digest`.

    Raises:
        OSError: it cannot be written.
    """
    write_json(output / NOTE, _note(asked, output, epochs))


def _note(asked: str, output: Path, epochs: int) -> dict[str, Any]:
    return {"asked": asked, "epochs": epochs, "run": _state_of(output)}


def done_words(given: Mapping[str, Any]) -> str | None:
    """Return what a resumed training says if its run is done; None where that is not known.

    ``given`` are the options and arguments of `hyperslab train`.
    """
    recipe, overrides = given["recipe"], given["overrides"] or ()
    if not given["resume"] or not os.path.isfile(recipe):
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError, RecipeError):
        values = _asked_values(recipe, overrides)
        output = given["output"] or _output(recipe, values)
        note = read_json(output / NOTE)
        asked = training_digest(recipe, overrides, given["ranks"])
        if asked == training_digest(output / "recipe.yaml", (), None):
            asked = note["asked"]  # what the run's own recipe asks for
        if note == _note(asked, output, note["epochs"]):
            return nothing_left(output, int(note["epochs"]))
    return None


def nothing_left(output: Path, epochs: int) -> str:
    """Say that a run is done."""
    return f"all {epochs} epochs of {output} are done: nothing is left to resume"


def training_digest(recipe: Path, overrides: Sequence[str], ranks: int | None) -> str:
    """Hash the options of a training, however they are written: all but its folder and its grid.

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
