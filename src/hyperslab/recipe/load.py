"""Read a recipe: YAML, then `key=value` overrides, then checks with errors that help."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hyperslab.atomic_files import write_text
from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import OneOf, Recipe

DEFAULT_NAMES = {"model": "cosmoflow", "optimizer": "adam", "optimizer.schedule": "linear"}
"""Sections with alternatives, and the one that goes without saying."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with ``key=value`` overrides (``grid.depth=2``; YAML values).

    A recipe that names no ``output`` gets ``runs/`` and its file's name.

    Raises:
        RecipeError: the file cannot be read, a key is unknown, a value is bad or missing; names
            the file or the override, the key and the nearest valid one.
    """
    path = Path(path)
    values = _read(path)
    given = [_parse(text) for text in overrides]
    for key, value in given:
        _put(values, key, value)
    values.setdefault("output", f"runs/{path.stem}")
    for section, name in DEFAULT_NAMES.items():
        _default_name(values, section.split("."), name)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        sources = {key: f"override {key}=" for key, _ in given}
        raise RecipeError(_explain(error, values, str(path), sources)) from None


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe with every default filled in, and readable from any working directory.

    It is there whole, or what was there before still is.
    """
    values = recipe.model_dump(mode="json")
    values["data"]["path"] = str(recipe.data.path.absolute())
    write_text(path, yaml.safe_dump(values, sort_keys=False))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no `key: value` lines, so it is no recipe")
    return values


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"{text!r} is no override: write key=value, such as grid.depth=2")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {text!r}: the value is no YAML: {error}") from None


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[last] = value


def _default_name(values: dict[str, Any], section: list[str], name: str) -> None:
    """Let the sections with alternatives leave out their name."""
    at: Any = values
    for key in section:
        at = at.get(key) if isinstance(at, dict) else None
    if isinstance(at, dict):
        at.setdefault("name", name)


def _explain(error: ValidationError, values: Any, file: str, sources: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = _dotted(problem["loc"], values)
        where = next((s for k, s in sources.items() if _related(k, key)), file)
        lines.append(f"{where}: {_sentence(key, dict(problem))}")
    return "\n".join(lines)


def _related(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _sentence(key: str, problem: dict[str, Any]) -> str:
    kind = problem["type"]
    value = problem["input"]
    if kind == "extra_forbidden" and key in _fields():
        return f"key {key!r} does not go with the chosen {key.rpartition('.')[0]}.name"
    if kind == "extra_forbidden":
        closest = nearest_key(key, list(_fields()))
        return f"unknown key {key!r}\n    nearest: {closest!r}{_siblings(key)}"
    if kind == "missing":
        return f"{key!r} is missing"
    if kind == "value_error" and isinstance(value, dict):  # of keys that do not go together
        return str(problem["msg"].removeprefix("Value error, "))
    if kind in ("model_type", "model_attributes_type"):
        return f"bad value {value!r} for {key!r}: it is a section of keys{_siblings(f'{key}.')}"
    if kind == "union_tag_invalid":
        value = value["name"]
    choices = _choices(key)
    if choices:
        valid = f"it should be one of {', '.join(choices)}\n    nearest: "
        return f"bad value {value!r} for {key!r}: {valid}{nearest_key(str(value), choices)!r}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"bad value {value!r} for {key!r}: {message}"


def nearest_key(word: str, valid: Sequence[str]) -> str:
    """The valid word that looks most like this one; of a dotted key the last part counts too."""
    last = word.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        end = candidate.rpartition(".")[2]
        initials = "".join(part[:1] for part in end.split("_"))
        return _ratio(word, candidate) + max(_ratio(last, end), _ratio(last, initials))

    return max(valid, key=likeness)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _dotted(loc: Sequence[int | str], values: Any) -> str:
    """The key as the user writes it: pydantic also puts in which alternative it tried."""
    keys: list[str] = []
    for part in loc:
        if isinstance(values, dict) and part not in values and values.get("name") == part:
            continue
        keys.append(str(part))
        values = values.get(part) if isinstance(values, dict) else None
    if ".".join(keys) in DEFAULT_NAMES and isinstance(values, dict):
        keys.append("name")  # an alternative that does not exist
    return ".".join(keys)


def _siblings(key: str) -> str:
    section = key.rpartition(".")[0]
    names = [k.rpartition(".")[2] for k in _fields() if k.rpartition(".")[0] == section]
    return f"\n    valid in {section or 'a recipe'}: {', '.join(names)}" if names else ""


@functools.cache
def _fields() -> dict[str, Any]:
    """Every key of a recipe, dotted, with its type; sections too."""
    fields: dict[str, Any] = {}
    for key, annotation in _walk(Recipe, ""):
        fields[key] = fields[key] | annotation if key in fields else annotation
    return fields


def _walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field.annotation
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _walk(kind, f"{prefix}{name}.")


def _choices(key: str) -> list[str] | None:
    """The words that a key takes, if it takes words."""
    kinds: list[Any] = [_fields().get(key.rstrip(".0123456789"))]
    choices: list[str] = []
    while kinds:
        kind = kinds.pop()
        if typing.get_origin(kind) is typing.Literal:
            choices += [str(value) for value in typing.get_args(kind)]
        elif typing.get_origin(kind) in (typing.Union, types.UnionType):
            kinds += typing.get_args(kind)
        elif typing.get_origin(kind) is typing.Annotated:
            marks = [mark for mark in kind.__metadata__ if isinstance(mark, OneOf)]
            choices += [word for mark in marks for word in mark.words()]
    return choices or None
