"""Loads recipes: YAML, then `key=value` overrides, then checks with errors that help.

Short forms are written out on the way: names that sections leave out, and torch's own classes by
their names alone. `explain_errors` says what is wrong with a recipe in the user's words, with
the nearest valid word.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ValidationError
from torch.optim import lr_scheduler

from hyperslab.errors import RecipeError, reason
from hyperslab.recipe.compare import value_at
from hyperslab.recipe.optimizer import OptimizerSection
from hyperslab.recipe.schema import BY_NAME, BY_TARGET, Recipe
from hyperslab.recipe.section import OneOf, declared_names
from hyperslab.recipe.text import (
    UNNAMED,
    UNWRITTEN,
    bad_value,
    missing_key,
    no_section,
    origin_of,
    parse_override,
    put_override,
    read_yaml,
    unchosen_key,
    unknown_key,
)
from hyperslab.recipe.trust import (
    NO_TRUST,
    Trust,
    leave_out_liberties,
    named_code,
    output_of_run,
    remember,
    trust_of,
    with_memory,
)
from hyperslab.util.atomic_files import write_text

log = logging.getLogger("hyperslab")

A_TARGET = "target"
"""The name of a section that has a target."""

DEFAULT_NAMES = {"model": "cosmoflow", "optimizer": "adam", "optimizer.schedule": "linear"}
"""Sections with alternatives, and the one that goes without saying."""


def _classes_by_name(module: Any, base: type, without: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, one in vars(module).items():
        if isinstance(one, type) and issubclass(one, base) and one is not base and name[0] != "_":
            found.setdefault(name.lower(), f"{module.__name__}.{name}")
    return {name: path for name, path in found.items() if name != without}


TORCH_CLASSES: Mapping[str, Mapping[str, str]] = {
    "optimizer": _classes_by_name(torch.optim, torch.optim.Optimizer),
    "optimizer.schedule": _classes_by_name(lr_scheduler, lr_scheduler.LRScheduler, "_lrscheduler"),
}
"""Torch's classes by section: their dotted names by their own names in small letters."""


def write_out_short_forms(values: dict[str, Any]) -> None:
    """Put the names into sections that leave them out; a name of torch's becomes a target."""
    for key, name in DEFAULT_NAMES.items():
        section = value_at(values, key)
        if not isinstance(section, dict):
            continue
        given = section.get("name")
        of_torch = TORCH_CLASSES.get(key, {}).get(str(given).lower())
        if given not in _OWN_CLASSES.get(key, ()) and of_torch and not section.get(A_TARGET):
            section[A_TARGET] = of_torch
            section["name"] = A_TARGET
        section.setdefault("name", A_TARGET if section.get(A_TARGET) else name)


_OWN_CLASSES = {"optimizer": declared_names(OptimizerSection)}
"""Names that are ours where torch has them, too."""


def explain_errors(
    error: ValidationError, values: Any, file: str, sources: Mapping[str, str]
) -> str:
    """Return one line or two for each mistake: where it is, what it is, and the nearest valid word.

    ``values`` are those of the recipe; ``sources`` gives the override that a key came from, where
    it did not come from ``file``.
    """
    lines = []
    for problem in error.errors(include_url=False):
        key = _dotted(problem["loc"], values)
        where = origin_of(key, file, sources)
        lines.append(f"{where}: {_sentence(key, dict(problem))}")
    return "\n".join(lines)


def _sentence(key: str, problem: dict[str, Any]) -> str:
    kind = problem["type"]
    value = problem["input"]
    if kind == "extra_forbidden" and key in _fields():
        return unchosen_key(key)
    if kind == "extra_forbidden":
        return unknown_key(key, list(_fields()))
    if kind == "missing":
        return missing_key(key)
    if kind == "value_error" and isinstance(value, dict):  # of keys that do not go together
        return str(problem["msg"].removeprefix("Value error, "))
    if kind in ("model_type", "model_attributes_type"):
        return no_section(key, value, list(_fields()))
    if kind == "union_tag_invalid":
        value = value["name"]
    return bad_value(key, value, problem["msg"], _choices(key))


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
def _fields() -> dict[str, Any]:
    """Return every key of a recipe, dotted, with its type; sections too."""
    fields: dict[str, Any] = {}
    for key, annotation in _walk_fields(Recipe, ""):
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


def _choices(key: str) -> list[str]:
    """Return the words that a key takes, if it takes words."""
    choices: list[str] = []
    section, _, last = key.rpartition(".")
    annotation = _fields().get(key)
    if annotation is None and (of_all := typing.get_args(_fields().get(section))):
        annotation = of_all[0 if last.isdecimal() else -1]  # an element of a list, or of a section
    for kind in _alternatives(annotation):
        if typing.get_origin(kind) is typing.Literal:
            choices += map(str, typing.get_args(kind))
        elif isinstance(kind, OneOf):
            choices += kind.words()
    if key.endswith(".name"):
        choices = [name for name in choices if name not in UNNAMED]
        choices += TORCH_CLASSES.get(section, ())
    return list(dict.fromkeys(choices))


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    varied: Sequence[str] = (),
    trust: Trust | None = None,
) -> Recipe:
    """The recipe in a YAML file, with ``key=value`` overrides (``grid.depth=2``; YAML values).

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


def recipe_of_values(
    values: dict[str, Any],
    file: str,
    sources: Mapping[str, str] | None = None,
    trust: Trust = NO_TRUST,
) -> Recipe:
    """Return the recipe that such values make, which are written out on the way.

    ``file`` is how errors call where they are from; ``sources`` is as in `explain_errors`;
    ``trust`` is the one in their author.

    Raises:
        RecipeError: as `load_recipe`.
    """
    write_out_short_forms(values)
    try:
        return Recipe.model_validate(values, context={"trust": trust})
    except ValidationError as error:
        raise RecipeError(explain_errors(error, values, file, sources or {})) from None


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe with every default filled in, and readable from any working directory.

    It is there whole, or what was there before still is.
    """
    write_text(path, yaml.safe_dump(_values(recipe), sort_keys=False))


def _values(recipe: Recipe) -> dict[str, Any]:
    values = recipe.model_dump(mode="json")
    values["data"] |= recipe.data.absolute_paths()
    return values


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
        remember(_values(recipe), recipe.trust)
    except OSError as error:
        log.warning(
            "cannot note that you trained this run, so commands on it will ask whose code it "
            "names: %s; XDG_STATE_HOME names another folder",
            reason(error),
        )
