"""Loads recipes: YAML, then `key=value` overrides, then checks with errors that help.

Short forms are written out on the way: names that sections leave out, and torch's own classes by
their names alone. `explain_errors` says what is wrong with a recipe in the user's words, with
the nearest valid word.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import itertools
import logging
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hyperslab.comm import AXES
from hyperslab.comm.launchers import read_variables
from hyperslab.errors import RecipeError, no_run, reason
from hyperslab.recipe.compare import plain_values, value_at
from hyperslab.recipe.optimizer import OptimizerSection
from hyperslab.recipe.schema import BY_NAME, BY_TARGET, Recipe
from hyperslab.recipe.section import OneOf, declared_names
from hyperslab.recipe.shipped import shipped_recipes
from hyperslab.recipe.trust import (
    NO_TRUST,
    RUN_RECIPE,
    Trust,
    leave_out_liberties,
    named_code,
    output_of_run,
    remember,
    trust_of,
    with_memory,
)
from hyperslab.util.atomic_files import write_text
from hyperslab.util.documents import parse_yaml, read_text

_MARKS = {"recipe": "data", "sweep": "variants"}
"""Keys by which one kind of file is told from the other."""


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read the keys and values of a file, which errors call ``what`` (`RecipeError`)."""
    try:
        values = parse_yaml(read_text(path))
    except OSError as error:
        hint = f"\n    hyperslab ships one: hyperslab recipes copy {path.stem}"
        known = hint if path.stem in shipped_recipes() else ""
        raise RecipeError(f"cannot read the {what} {path}: {error.strerror}{known}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no `key: value` lines, so it is not a {what}")
    found = [kind for kind, key in _MARKS.items() if key in values]
    if found and what not in found:
        command = "sweep" if found == ["sweep"] else "train"
        raise RecipeError(f"{path} is a {found[0]}, not a {what}\n    hyperslab {command} {path}")
    return values


def parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"{text!r} is not an override: write key=value, such as grid.depth=2")
    if value.startswith("*"):  # a pattern of files: there is nothing that YAML could refer to
        return key, value
    try:
        return key, parse_yaml(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {text!r}: the value is not valid YAML: {error}") from None


RATE_KEYS = ("optimizer.learning_rate", "optimizer.lr", "optimizer.arguments.lr")
"""Names the learning rate as recipes and as torch do: an override replaces all of them."""


def put_override(values: dict[str, Any], key: str, value: Any) -> None:
    inner: Any = values
    words = key.split(".")
    for word, following in itertools.pairwise(words):
        place = _place_in(inner, word)
        found = inner.get(place) if isinstance(inner, dict) else inner[place]
        if not isinstance(found, dict) and isinstance(_place_in(found, following), str):
            found = inner[place] = {}
        inner = found
    inner[_place_in(inner, words[-1])] = value
    for other in RATE_KEYS if key in RATE_KEYS else ():
        section = value_at(values, other.rpartition(".")[0])
        if other != key and isinstance(section, dict):
            section.pop(other.rpartition(".")[2], None)


def _place_in(values: Any, word: str) -> int | str:
    """Return the place that a word of a dotted key means: in a list a number, if it has as many."""
    is_index = isinstance(values, list) and word.isdecimal() and int(word) < len(values)
    return int(word) if is_index else word


def bad_value(key: str, value: Any, problem: str, choices: Sequence[str]) -> str:
    """Say what a key takes: one of ``choices``, or what pydantic's ``problem`` says."""
    if choices:
        valid = f"one of {', '.join(choices)}\n    nearest: {nearest_key(str(value), choices)!r}"
        return f"bad value {value!r} for {key!r}: it should be {valid}"
    message = problem.removeprefix("Value error, ").replace("Input should", "it should")
    message = re.sub("Input is not a valid path.*", "it should be a path", message)
    message = message.replace("a valid tuple", "a list, [...]")
    message = re.sub("could not parse value and unit.*", "it should be a size, 16GiB say", message)
    message = message.replace("a valid dictionary", "{key: value}")
    return f"bad value {value!r} for {key!r}: {message}"


def nearest_key(word: str, valid: Sequence[str]) -> str:
    """Find the valid word most like this one; of a dotted key the last part counts, too."""
    last = word.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        end = candidate.rpartition(".")[2]
        initials = "".join(part[:1] for part in end.split("_"))
        return _ratio(word, candidate) + max(_ratio(last, end), _ratio(last, initials))

    return max(valid, key=likeness)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def siblings(key: str, known: Sequence[str]) -> str:
    """List the keys of the section that a key is in, where it has some."""
    section = key.rpartition(".")[0]
    names = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    where = f"in {section}" if section else "there"
    return f"\n    valid {where}: {', '.join(names)}" if names else ""


def origin_of(key: str, file: str, sources: Mapping[str, str]) -> str:
    """Name the override that a key came from, or else the file."""
    for said, source in sources.items():
        if f"{key}.".startswith(f"{said}.") or f"{said}.".startswith(f"{key}."):
            return source
    return file


UNWRITTEN = ("handed_in", "python_class")  # keys that `hyperslab.fit` writes and nobody else

UNNAMED = ("target", "python")
"""Names of sections for what has none: somebody's class, and what a program has handed in."""

_TORCH_SOURCES = {
    "optimizer": ("torch.optim", "optim/__init__.py", r" import ((?!Optimizer\b)[A-Z]\w*) as \1$"),
    "optimizer.schedule": (
        "torch.optim.lr_scheduler",
        "optim/lr_scheduler.py",
        r"^class ([A-Z]\w*)\(LRScheduler\)",
    ),
}
"""Sections that may name a class of torch's, the module that has them, and how its file does."""

_REFUSED = {"lbfgs", "muon", "sparseadam", "lambdalr", "multiplicativelr"}
"""Names classes of torch's that no training takes, in small letters: they are not offered."""


def torch_classes(section: str) -> dict[str, str]:
    """Return torch's classes for a section: dotted names by their own names in small letters.

    They are read from torch's text, as importing it takes two seconds.
    """
    spec = find_spec("torch")
    if section not in _TORCH_SOURCES or spec is None or not spec.submodule_search_locations:
        return {}
    home, file, pattern = _TORCH_SOURCES[section]
    text = ""
    with suppress(OSError):
        text = read_text(Path(spec.submodule_search_locations[0], file))
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:  # a release that writes them otherwise
        found = [name for name in dir(importlib.import_module(home)) if name[0].isupper()]
    return {name.lower(): f"{home}.{name}" for name in found}


log = logging.getLogger("hyperslab")

A_TARGET = "target"  # the name of a section that has a target

DEFAULT_NAMES = {"model": "cosmoflow", "optimizer": "adam", "optimizer.schedule": "linear"}
"""Sections with alternatives, and the one that goes without saying."""


def write_out_short_forms(values: dict[str, Any]) -> None:
    """Put the names into sections that leave them out; a name of torch's becomes a target."""
    for key, name in DEFAULT_NAMES.items():
        section = value_at(values, key)
        if not isinstance(section, dict):
            continue
        given = section.get("name")
        of_torch = torch_classes(key).get(str(given).lower())
        if given not in _OWN_CLASSES.get(key, ()) and of_torch and not section.get(A_TARGET):
            section[A_TARGET] = of_torch
            section["name"] = A_TARGET
        section.setdefault("name", A_TARGET if section.get(A_TARGET) else name)


_OWN_CLASSES = {"optimizer": declared_names(OptimizerSection)}
"""Names that are ours where torch has them, too."""


def explain_errors(
    error: ValidationError,
    values: Any,
    file: str,
    sources: Mapping[str, str],
    kind: type[BaseModel] = Recipe,
) -> str:
    """Return one line or two for each mistake: where it is, what it is, and the nearest valid word.

    ``values`` are those of the recipe, or of a file of another ``kind``; ``sources`` gives the
    override that a key came from, where it did not come from ``file``.
    """
    lines = []
    for problem in error.errors(include_url=False):
        key = _dotted(problem["loc"], values)
        where = origin_of(key, file, sources)
        lines.append(f"{where}: {_sentence(key, dict(problem), _fields(kind))}")
    return "\n".join(lines)


def _sentence(key: str, problem: dict[str, Any], fields: Mapping[str, Any]) -> str:
    kind = problem["type"]
    value = problem["input"]
    known = list(fields)
    if key.endswith(".[key]"):  # as pydantic calls a name that is wrong itself
        section = key.removesuffix(f".{value}.[key]")
        return f"the name {value!r} in {section!r} is no text\n    write it in quotes: '{value}'"
    if kind == "extra_forbidden" and key in fields:
        return f"key {key!r} does not go with the chosen {key.rpartition('.')[0]}.name"
    if kind == "extra_forbidden":
        nearest = nearest_key(key, known)
        return f"unknown key {key!r}\n    nearest: {nearest!r}{siblings(key, known)}"
    if kind == "missing":
        return f"{key!r} is missing{'' if '.' in key else siblings(key, known)}"
    if kind == "value_error" and isinstance(value, dict):  # of keys that do not go together
        return str(problem["msg"].removeprefix("Value error, "))
    if kind in ("model_type", "model_attributes_type"):
        below = siblings(f"{key}.", known)
        return f"bad value {value!r} for {key!r}: it is a section of keys{below}"
    if kind == "union_tag_invalid":
        value = value["name"]
    return bad_value(key, value, problem["msg"], _choices(key, fields))


def _dotted(loc: Sequence[int | str], values: Any) -> str:
    """Return the key as the user writes it: pydantic also puts in which alternative it tried."""
    keys: list[str] = []
    for part in loc:
        if part in (BY_NAME, BY_TARGET):
            continue
        if isinstance(values, dict) and part not in values and values.get("name") == part:
            continue
        keys.append(str(part))
        values = values.get(part) if isinstance(values, dict) else None
    if ".".join(keys) in DEFAULT_NAMES and isinstance(values, dict):
        keys.append("name")  # an alternative that does not exist
    return ".".join(keys)


@functools.cache
def _fields(kind: type[BaseModel] = Recipe) -> dict[str, Any]:
    """Return every key of a recipe, or another file, dotted, with its type; sections too."""
    fields: dict[str, Any] = {}
    for key, annotation in _walk_fields(kind, ""):
        fields[key] = fields[key] | annotation if key in fields else annotation
    return fields


def _walk_fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if name in UNWRITTEN:
            continue
        yield prefix + name, field.annotation
        for kind in _alternatives(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _walk_fields(kind, f"{prefix}{name}.")


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Return the types that a key takes, those in unions and behind marks too, and the marks."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from annotation.__metadata__
        yield from _alternatives(annotation.__origin__)
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for kind in typing.get_args(annotation):
            yield from _alternatives(kind)
    else:
        yield annotation


def _choices(key: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the words that a key takes, if it takes words."""
    choices: list[str] = []
    section, _, last = key.rpartition(".")
    annotation = fields.get(key)
    if annotation is None and (of_all := typing.get_args(fields.get(section))):
        annotation = of_all[0 if last.isdecimal() else -1]  # an element of a list, or of a section
    for kind in _alternatives(annotation):
        if typing.get_origin(kind) is typing.Literal:
            choices += map(str, typing.get_args(kind))
        elif isinstance(kind, OneOf):
            choices += kind.words()
    if key.endswith(".name"):
        choices = [name for name in choices if name not in UNNAMED]
        choices += (name for name in torch_classes(section) if name not in _REFUSED)
    return list(dict.fromkeys(choices))


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    varied: Sequence[str] = (),
    trust: Trust | None = None,
) -> Recipe:
    """Load a YAML file's recipe, with ``key=value`` overrides (``grid.depth=2``; YAML values).

    A recipe that names no ``output`` gets ``runs/`` and its file's name, one in a run's folder that
    folder. ``varied`` are overrides that are no words of the user but those of somebody else's
    sweep. ``trust``: in the file; by default as it lies.

    Raises:
        RecipeError: the file cannot be read, a key is unknown, a value is bad or missing; names
            the file or the override, the key and the nearest valid one.
    """
    path = Path(path)
    values = read_yaml(path, "recipe")
    trust = trust or trust_of(path)
    said = [parse_override(text) for text in overrides]
    added = [parse_override(text) for text in varied]
    # The file's own words, with those of a sweep: what the user has trained with is known by them.
    varied_values = copy.deepcopy(values)
    for key, value in added:
        put_override(varied_values, key, value)
    trust = with_memory(trust, varied_values)
    # What the user says himself, apart: he answers for the code that he names.
    asked: dict[str, Any] = {}
    for key, value in copy.deepcopy(said):
        put_override(asked, key, value)
    # A run's recipe says no place; an override of ``output`` still does, which comes after it.
    if not trust.own:
        values["output"] = str(output_of_run(path))
    for key, value in [*said, *added]:
        put_override(values, key, value)
    trust = leave_out_liberties(trust, values, asked, varied_values)
    values.setdefault("output", f"runs/{path.stem}")
    named = frozenset(name for _, name, _ in named_code(asked))
    sources = {key: f"override {key}=" for key, _ in [*said, *added]}
    return recipe_of_values(values, str(path), sources, replace(trust, named=trust.named | named))


UNCUT = tuple(f"grid.{axis}=1" for axis in AXES)


def recipe_for(
    run: Path,
    overrides: Sequence[str],
    *,
    ranks: int | None = None,
    axis: str = "data",
    replicas: bool = True,
    trust: Trust | None = None,
) -> Recipe:
    """Load the run's recipe for this many ranks, by default those of the environment.

    Overrides such as ``grid.depth=2`` describe a grid of their own: the axes that they do not
    name are not cut. Without them the grid is the recipe's where it has as many places as there
    are ranks, and else cuts along ``axis`` alone: the mini-batch. Without ``replicas`` it cuts
    volumes only.

    Raises:
        RecipeError: an override is bad, or cuts mini-batches where there are none.
    """
    path = run / RUN_RECIPE
    if not path.is_file():
        raise no_run(run)
    own_grid = any(override.startswith("grid") for override in overrides)
    recipe = load_recipe(path, [*(UNCUT if own_grid else ()), *overrides], trust=trust)
    size = recipe.grid.size if own_grid else ranks or _started_ranks()
    if size == recipe.grid.size and (replicas or recipe.grid.data == 1):
        return recipe
    if own_grid:
        raise RecipeError(
            f"grid.data={recipe.grid.data}: volumes are predicted one after the other\n"
            "    use all ranks for each: grid.depth, grid.height, grid.width"
        )
    return load_recipe(path, [*UNCUT, f"grid.{axis}={size}", *overrides], trust=trust)


def _started_ranks() -> int:
    """Return how many ranks there are; a process that has not imported torch has started none."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        count: int = dist.get_world_size()
        return count
    place = read_variables(os.environ)
    return 1 if place is None else place.size


def recipe_of_values(
    values: dict[str, Any],
    file: str,
    sources: Mapping[str, str] | None = None,
    trust: Trust = NO_TRUST,
) -> Recipe:
    """Return the recipe of such values, written out on the way; raises as `load_recipe`.

    ``file`` is how errors call where they are from; ``sources`` is as in `explain_errors`;
    ``trust`` is the one in their author.
    """
    write_out_short_forms(values)
    try:
        recipe = Recipe.model_validate(values, context={"trust": trust})
    except ValidationError as error:
        raise RecipeError(explain_errors(error, values, file, sources or {})) from None
    for key, value in _truths_for_numbers(values, recipe):
        problem = bad_value(key, value, "it should be a number, which yes and no are not", ())
        raise RecipeError(f"{origin_of(key, file, sources or {})}: {problem}")
    return recipe


def _truths_for_numbers(given: Any, taken: Any, key: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the keys with ``yes`` or ``no`` that pydantic has taken for 1 or 0."""
    if isinstance(given, bool):
        if isinstance(taken, (int, float)) and not isinstance(taken, bool):
            yield key, given
    elif isinstance(given, list) and isinstance(taken, tuple):
        for place, pair in enumerate(zip(given, taken, strict=False)):
            yield from _truths_for_numbers(*pair, f"{key}.{place}")
    elif isinstance(given, dict):
        for word, value in given.items():
            inner = taken.get(word) if isinstance(taken, dict) else getattr(taken, str(word), None)
            yield from _truths_for_numbers(value, inner, f"{key}.{word}".removeprefix("."))


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe with every default filled in, and readable from any working directory.

    It is there whole, or what was there before still is.
    """
    write_text(path, yaml.safe_dump(plain_values(recipe), sort_keys=False))


def options_of_trust(recipe: Recipe) -> list[str]:
    """Return the options of a command on this recipe, once it is saved, that trusts it as much.

    Code for which the user answers is noted as code that he trains with.
    """
    remember_code(recipe)
    return recipe.trust.options


def remember_code(recipe: Recipe) -> None:
    """Note that the user trains with what a recipe names: it may do so again from its run's folder.

    No code where somebody else's recipe names it and the user has not, see `Trust.remembers`.
    Where it cannot be noted, a log line says so: commands on the run will ask.
    """
    try:
        remember(plain_values(recipe), recipe.trust)
    except OSError as error:
        log.warning(
            "cannot note that you trained this run, so commands on it will ask whose code it "
            "names: %s; XDG_STATE_HOME names another folder",
            reason(error),
        )
