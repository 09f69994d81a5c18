"""Read a recipe: YAML, then `key=value` overrides, then checks with errors that help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hyperslab.atomic_files import write_text
from hyperslab.documents import parse_yaml, read_text
from hyperslab.errors import RecipeError
from hyperslab.recipe.explain import explain
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.shipped import shipped_recipes
from hyperslab.recipe.short_forms import A_TARGET, write_out


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with ``key=value`` overrides (``grid.depth=2``; YAML values).

    A recipe that names no ``output`` gets ``runs/`` and its file's name.

    Raises:
        RecipeError: the file cannot be read, a key is unknown, a value is bad or missing; names
            the file or the override, the key and the nearest valid one.
    """
    path = Path(path)
    values = read_yaml(path, "recipe")
    _refuse_trust(values, path)
    given = [_parse(text) for text in overrides]
    for key, value in given:
        _put(values, key, value)
    values.setdefault("output", f"runs/{path.stem}")
    values["trusted"] = {name for key, value in given for name in _targets(key, value)}
    sources = {key: f"override {key}=" for key, _ in given}
    return recipe_of_values(values, str(path), sources)


def recipe_of_values(
    values: dict[str, Any], file: str, sources: Mapping[str, str] | None = None
) -> Recipe:
    """The recipe that such values make, which are written out on the way.

    ``file`` is how errors call where they are from; ``sources`` is as in `explain`.

    Raises:
        RecipeError: as `load_recipe`.
    """
    write_out(values)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(explain(error, values, file, sources or {})) from None


def _targets(key: str, value: Any) -> Iterator[str]:
    """The targets that an override names."""
    if key.rpartition(".")[2] == A_TARGET and isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _targets(f"{key}.{name}", inner)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe with every default filled in, and readable from any working directory.

    It is there whole, or what was there before still is.
    """
    values = recipe.model_dump(mode="json")
    values["data"] |= recipe.data.absolute_paths()
    write_text(path, yaml.safe_dump(values, sort_keys=False))


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The keys and values of a file; ``what`` it is to be is what errors call it.

    Raises:
        RecipeError: it cannot be read, or holds something else.
    """
    try:
        values = parse_yaml(read_text(path))
    except OSError as error:
        hint = f"\n    one comes along: hyperslab recipes copy {path.stem}"
        known = hint if path.stem in shipped_recipes() else ""
        raise RecipeError(f"cannot read the {what} {path}: {error.strerror}{known}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no `key: value` lines, so it is no {what}")
    return values


def _refuse_trust(values: dict[str, Any], path: Path) -> None:
    """A recipe may come from whoever made the checkpoints beside it."""
    if "trusted" in values:
        raise RecipeError(
            f"{path}: trusted is not taken from a file\n"
            "    name the target on the command line: model.target=package.function"
        )
    section = values.get("checkpoint")
    if isinstance(section, dict) and section.get("trust_pickle", False) is not False:
        raise RecipeError(
            f"{path}: checkpoint.trust_pickle is not taken from a file\n"
            "    if you trust the checkpoint give it on the command line: "
            "checkpoint.trust_pickle=true"
        )


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"{text!r} is no override: write key=value, such as grid.depth=2")
    try:
        return key, parse_yaml(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {text!r}: the value is no YAML: {error}") from None


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[last] = value
